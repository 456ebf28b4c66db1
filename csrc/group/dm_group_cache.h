/* The groups of one mesh root: the same member list is never made twice.
 *
 * Key: ranks in order, backend, options text, time-out. The cache names its groups
 * "<identity>/<hash>.<n>": the hash is of ranks, backend and options, n counts the
 * groups that differ in the time-out alone (which members may choose differently). It
 * holds each group until the cache is freed. Safe from several threads.
 */
#ifndef DM_GROUP_CACHE_H
#define DM_GROUP_CACHE_H

#include "group/dm_group.h"

typedef struct dm_group_cache dm_group_cache;

/* `identity` comes from dm_world_agree. Holds the world. */
dm_status
dm_group_cache_new(dm_world *world, const char *identity, dm_group_cache **cache,
                   dm_error *err);

/* The group for this list, made if need be: a new reference. spec->identity is
 * ignored. `options` is canonical text or "". DM_ERR_CLOSED after close. */
dm_status
dm_group_cache_get(dm_group_cache *cache, const dm_group_spec *spec,
                   const char *options, dm_group **group, dm_error *err);

/* How many groups there are. */
size_t
dm_group_cache_count(dm_group_cache *cache);

/* Closes every group; later gets fail. Idempotent. */
void
dm_group_cache_close(dm_group_cache *cache);

void
dm_group_cache_abort(dm_group_cache *cache);

/* Releases the groups and frees the cache: does not close groups that others hold. */
void
dm_group_cache_free(dm_group_cache *cache);

#endif

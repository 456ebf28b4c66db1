/* The groups of one root: see dm_group_cache.h.
 *
 * A root has about as many groups as dims: a list is enough. The lock is not held while
 * a group is made (that may load a library), so two threads may make the same one; the
 * second to come throws its own away.
 */
#include "group/dm_group_cache.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/dm_alloc.h"
#include "group/dm_private.h"

typedef struct entry {
    uint64_t hash; /* of ranks, backend, options */
    char *options;
    int64_t timeout_ns;
    dm_group *group; /* held */
} entry;

struct dm_group_cache {
    dm_world *world; /* held */
    char identity[DM_IDENTITY_SIZE];
    pthread_mutex_t lock; /* guards the rest */
    entry *entries;
    size_t count;
    size_t room;
    bool closed;
};

dm_status
dm_group_cache_new(dm_world *world, const char *identity, dm_group_cache **cache,
                   dm_error *err)
{
    dm_group_cache *c = dm_calloc(1, sizeof(*c));
    if (c == NULL) {
        return dm_error_set_no_memory(err, "a cache of groups");
    }
    snprintf(c->identity, sizeof(c->identity), "%s", identity);
    pthread_mutex_init(&c->lock, NULL);
    c->world = dm_world_hold(world);
    *cache = c;
    return DM_OK;
}

/* FNV-1a, 64 bits, over bytes that are the same on all members. */
static uint64_t
fold(uint64_t hash, const void *data, size_t size)
{
    const unsigned char *bytes = data;
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    }
    return hash;
}

static uint64_t
hash_key(const dm_group_spec *spec, const char *options)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (int32_t i = 0; i < spec->size; i++) {
        uint32_t rank = (uint32_t)spec->ranks[i];
        unsigned char bytes[4] = {(unsigned char)rank, (unsigned char)(rank >> 8),
                                  (unsigned char)(rank >> 16),
                                  (unsigned char)(rank >> 24)};
        hash = fold(hash, bytes, sizeof(bytes));
    }
    hash = fold(hash, spec->backend, strlen(spec->backend) + 1);
    return fold(hash, options, strlen(options) + 1);
}

/* Same ranks, backend and options. */
static bool
same_list(const entry *e, const dm_group_spec *spec, const char *options, uint64_t hash)
{
    return e->hash == hash && dm_group_size(e->group) == spec->size &&
           memcmp(dm_group_ranks(e->group), spec->ranks,
                  (size_t)spec->size * sizeof(*spec->ranks)) == 0 &&
           strcmp(dm_group_backend(e->group), spec->backend) == 0 &&
           strcmp(e->options, options) == 0;
}

/* The group for the key (borrowed) or NULL; *same counts those of the same list. */
static dm_group *
find_locked(dm_group_cache *cache, const dm_group_spec *spec, const char *options,
            uint64_t hash, size_t *same)
{
    *same = 0;
    for (size_t i = 0; i < cache->count; i++) {
        entry *e = &cache->entries[i];
        if (same_list(e, spec, options, hash)) {
            if (e->timeout_ns == spec->timeout_ns) {
                return e->group;
            }
            ++*same;
        }
    }
    return NULL;
}

static dm_status
check_open_locked(const dm_group_cache *cache, dm_error *err)
{
    if (cache->closed) {
        return dm_error_set(err, DM_ERR_CLOSED, "the mesh is closed");
    }
    return DM_OK;
}

/* Takes over one reference to the group on success. */
static dm_status
add_locked(dm_group_cache *cache, dm_group *group, const char *options, uint64_t hash,
           int64_t timeout_ns, dm_error *err)
{
    if (cache->count == cache->room) {
        size_t room = cache->room != 0 ? cache->room * 2 : 4;
        entry *grown = dm_realloc_array(cache->entries, room, sizeof(*grown));
        if (grown == NULL) {
            return dm_error_set_no_memory(err, "a cache of groups");
        }
        cache->entries = grown;
        cache->room = room;
    }
    char *copy = dm_strdup(options);
    if (copy == NULL) {
        return dm_error_set_no_memory(err, "a cache of groups");
    }
    cache->entries[cache->count++] = (entry){hash, copy, timeout_ns, group};
    return DM_OK;
}

dm_status
dm_group_cache_get(dm_group_cache *cache, const dm_group_spec *spec,
                   const char *options, dm_group **group, dm_error *err)
{
    DM_TRY(dm_world_check_process(cache->world, err));
    uint64_t hash = hash_key(spec, options);
    for (;;) {
        size_t same = 0;
        dm_group *found = NULL;
        pthread_mutex_lock(&cache->lock);
        dm_status status = check_open_locked(cache, err);
        if (status == DM_OK) {
            found = find_locked(cache, spec, options, hash, &same);
            if (found != NULL) {
                dm_group_hold(found);
            }
        }
        pthread_mutex_unlock(&cache->lock);
        DM_TRY(status);
        if (found != NULL) {
            *group = found;
            return DM_OK;
        }

        char name[DM_IDENTITY_SIZE + 48];
        snprintf(name, sizeof(name), "%s/%016" PRIx64 ".%zu", cache->identity, hash,
                 same);
        dm_group_spec named = *spec;
        named.identity = name;
        dm_group *made = NULL;
        DM_TRY(dm_group_new(cache->world, &named, &made, err));

        size_t now_same = 0;
        pthread_mutex_lock(&cache->lock);
        status = check_open_locked(cache, err);
        bool current = status == DM_OK &&
                       find_locked(cache, spec, options, hash, &now_same) == NULL &&
                       now_same == same;
        if (current) {
            status = add_locked(cache, made, options, hash, spec->timeout_ns, err);
            if (status == DM_OK) {
                dm_group_hold(made);
            }
        }
        pthread_mutex_unlock(&cache->lock);
        if (current && status == DM_OK) {
            *group = made;
            return DM_OK;
        }
        dm_group_release(made);
        DM_TRY(status);
        /* Another thread was faster: look again. */
    }
}

size_t
dm_group_cache_count(dm_group_cache *cache)
{
    pthread_mutex_lock(&cache->lock);
    size_t count = cache->count;
    pthread_mutex_unlock(&cache->lock);
    return count;
}

/* Refuses further groups; entries only grow until then, so that they can be read
 * without the lock afterwards. */
static void
refuse(dm_group_cache *cache)
{
    if (dm_world_check_process(cache->world, NULL) != DM_OK) {
        cache->closed = true;
        return;
    }
    pthread_mutex_lock(&cache->lock);
    cache->closed = true;
    pthread_mutex_unlock(&cache->lock);
}

void
dm_group_cache_close(dm_group_cache *cache)
{
    refuse(cache);
    /* All are told first, so that they end side by side. */
    for (size_t i = 0; i < cache->count; i++) {
        dm_group_stop(cache->entries[i].group, DM_ERR_CLOSED);
    }
    for (size_t i = 0; i < cache->count; i++) {
        dm_group_close(cache->entries[i].group, NULL);
    }
}

void
dm_group_cache_abort(dm_group_cache *cache)
{
    refuse(cache);
    for (size_t i = 0; i < cache->count; i++) {
        dm_group_abort(cache->entries[i].group);
    }
}

void
dm_group_cache_free(dm_group_cache *cache)
{
    if (cache == NULL) {
        return;
    }
    for (size_t i = 0; i < cache->count; i++) {
        dm_group_release(cache->entries[i].group);
        dm_free(cache->entries[i].options);
    }
    dm_free(cache->entries);
    if (dm_world_check_process(cache->world, NULL) == DM_OK) {
        pthread_mutex_destroy(&cache->lock);
    }
    dm_world_release(cache->world);
    dm_free(cache);
}

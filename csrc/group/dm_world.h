/* The world: who takes part, how they find each other, what they agreed on.
 *
 * A world is a rank, a size, a store and a default time-out. Several worlds can
 * live in one process. Counted: hold and release from any thread; each group
 * holds its world. Closing a world closes the groups made in it.
 */
#ifndef DM_WORLD_H
#define DM_WORLD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dm_clock.h"
#include "base/dm_status.h"
#include "store/dm_store.h"

typedef struct dm_world dm_world;

/* Room for an identity (dm_world_agree) and its NUL. */
enum { DM_IDENTITY_SIZE = 64 };

typedef struct dm_world_config {
    int32_t rank;
    int32_t size;
    dm_store *store;    /* held by the world, never closed by it; NULL only when
                           `simulated` or when the size is 1 */
    int64_t timeout_ns; /* default of its groups; negative: none */
    bool simulated;     /* no communication: every group uses the fake backend */
} dm_world_config;

/* DM_ERR_VALUE: a rank outside 0..size-1, a missing store. Does not communicate. */
dm_status
dm_world_new(const dm_world_config *config, dm_world **world, dm_error *err);

dm_world *
dm_world_hold(dm_world *world);

/* NULL is fine. */
void
dm_world_release(dm_world *world);

int32_t
dm_world_rank(const dm_world *world);

int32_t
dm_world_size(const dm_world *world);

int64_t
dm_world_timeout(const dm_world *world);

/* Borrowed; NULL where the config had none. */
dm_store *
dm_world_store(const dm_world *world);

bool
dm_world_is_simulated(const dm_world *world);

bool
dm_world_is_closed(const dm_world *world);

/* Closes every group of the world; later groups and agreements are refused. The store
 * stays open: it is its maker's. Idempotent. Waits for no other rank. */
void
dm_world_close(dm_world *world);

/* Agreement among the members of a mesh (or of a group made by list).
 *
 * `members` names the member set (the same text on every member: a hash of the
 * rank list), `request` is what this rank asks for, as people read it: "cpu mesh
 * (2, 4), names ('dp', 'tp')". The call counts how many times this set has been
 * asked for here, writes the identity that all members share for this request (text
 * safe in store keys), records the request as this rank's last one, and compares it
 * with what stands in the store: one compare-and-set, no barrier, no wait for other
 * ranks. DM_ERR_MISMATCH: another member asked for something else; the text shows
 * both requests and both ranks, and a mark is left for those who agreed earlier.
 * In a simulated world or a world of one it only counts. Texts of more than 600 bytes
 * are cut where they are shown. */
dm_status
dm_world_agree(dm_world *world, const char *members, const char *request,
               const dm_wait *wait, char identity[DM_IDENTITY_SIZE], dm_error *err);

/* DM_ERR_MISMATCH when somebody left a mark on the identity (or a group's name
 * derived from it: everything up to the first '/'), else DM_OK. */
dm_status
dm_world_check_marks(dm_world *world, const char *identity, const dm_wait *wait,
                     dm_error *err);

/* Records the request of a rank outside the mesh as its last one, for the others' texts:
 * a mesh of another size has other members, which agree among themselves. One set; in a
 * simulated world or a world of one none. */
dm_status
dm_world_note(dm_world *world, const char *request, const dm_wait *wait, dm_error *err);

/* As many ranks does an explanation ask about. */
enum { DM_EXPLAINED_RANKS = 64 };

/* For groups that do not come about: appends to err's text what the `n` ranks asked for
 * last, where that is not what this rank asked for last: "ranks 2, 3 last asked for ...;
 * rank 4 has asked for nothing yet; this rank last asked for ...". Waits two seconds at
 * most, and only for the store. */
void
dm_world_explain_missing(dm_world *world, const int32_t *ranks, int32_t n,
                         dm_error *err);

/* For a rank outside a mesh that is used there: appends to err's text (empty so far)
 * what the mesh's members asked for last where that is not `request`. Waits for the
 * first member to have asked for anything; says nothing when the wait ends before. */
void
dm_world_explain_outside(dm_world *world, const int32_t *ranks, int32_t n,
                         const char *request, const dm_wait *wait, dm_error *err);

#endif

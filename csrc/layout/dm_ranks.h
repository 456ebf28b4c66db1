/* Rank maps: which rank lies at each offset of a root mesh.
 *
 * Either the identity, which costs nothing whatever its size, or an explicit list.
 * One block of plain memory, immutable after creation, owned by its maker; it may
 * be read by any thread.
 */
#ifndef DM_RANKS_H
#define DM_RANKS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dm_status.h"

typedef struct dm_ranks dm_ranks;

/* The identity map of n offsets. DM_ERR_VALUE: n outside 0..INT32_MAX. */
dm_status
dm_ranks_identity(int64_t n, dm_ranks **ranks, dm_error *err);

/* Copies the list; one that is 0..n-1 becomes the identity. DM_ERR_VALUE: n out of
 * range, a negative rank, or a rank that is there twice (the text names it and two
 * of its places). O(n), and O(n log n) where the ranks do not ascend. */
dm_status
dm_ranks_new(const int32_t *list, int64_t n, dm_ranks **ranks, dm_error *err);

/* NULL is fine. */
void
dm_ranks_free(dm_ranks *ranks);

int64_t
dm_ranks_size(const dm_ranks *ranks);

bool
dm_ranks_is_identity(const dm_ranks *ranks);

/* The rank at an offset, which must be in range. O(1). */
int32_t
dm_ranks_at(const dm_ranks *ranks, int64_t offset);

/* The offset of a rank, or -1. O(1) for the identity, else O(log n). */
int64_t
dm_ranks_find(const dm_ranks *ranks, int32_t rank);

bool
dm_ranks_equal(const dm_ranks *a, const dm_ranks *b);

/* Stable across processes; O(1) for the identity, else computed at creation. */
uint64_t
dm_ranks_hash(const dm_ranks *ranks);

#endif

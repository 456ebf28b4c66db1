/* Copying and reducing: the work itself. */
#ifndef DM_SHM_COPY_H
#define DM_SHM_COPY_H

#include "backend/reduce/dm_reduce.h"
#include "backend/shm/dm_shm_comm.h"

/* How results are combined. */
typedef struct dm_shm_reducer {
    dm_dtype dtype;
    dm_reduce_op op;
    size_t element; /* bytes */
    int32_t size;   /* operands */
} dm_shm_reducer;

static inline void
dm_shm_copy(void *to, const void *from, size_t bytes)
{
    if (bytes != 0) {
        memcpy(to, from, bytes);
    }
}

/* As dm_shm_copy, past the caches: for results so large that they will not be found
 * there anyway. They do not overlap. */
void
dm_shm_copy_past_cache(void *to, const void *from, size_t bytes);

/* The copy for a result of `total` bytes. */
typedef void (*dm_shm_copy_fn)(void *to, const void *from, size_t bytes);

static inline dm_shm_copy_fn
dm_shm_copy_for(size_t total)
{
    return total >= DM_SHM_PAST_CACHE_BYTES ? dm_shm_copy_past_cache : dm_shm_copy;
}

/* out[i] = sources[0][i] op sources[1][i] op ..., in that order; `out` may be one of the
 * sources or overlap none of them. Where `second` is not NULL the result is written
 * there too, while it is in the cache. */
void
dm_shm_combine(const dm_shm_reducer *reducer, const void *const *sources, size_t count,
               void *out, void *second);

#endif

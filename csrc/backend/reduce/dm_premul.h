/* A DM_PREMUL_SUM as the plain sum of arrays that have been multiplied: the one place
 * where that is done, for every backend that does not do it itself.
 */
#ifndef DM_PREMUL_H
#define DM_PREMUL_H

#include "backend/dm_backend.h"

typedef struct dm_premul {
    dm_op op;      /* what to run instead */
    void *scratch; /* the multiplied input, where the user's is only read */
} dm_premul;

/* Multiplies and fills in `premul`, for an all_reduce, reduce or reduce_scatter among
 * `size` members. An all_reduce is multiplied in place. DM_ERR_NO_MEMORY: nothing to
 * end. */
dm_status
dm_premul_begin(dm_premul *premul, const dm_op *op, int32_t size, dm_error *err);

/* After the operation. */
void
dm_premul_end(dm_premul *premul);

#endif

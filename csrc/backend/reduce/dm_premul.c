/* Scaled sums: see dm_premul.h. */
#include "backend/reduce/dm_premul.h"

#include "backend/reduce/dm_reduce.h"
#include "base/dm_alloc.h"

dm_status
dm_premul_begin(dm_premul *premul, const dm_op *op, int32_t size, dm_error *err)
{
    dm_op plain = *op;
    void *scratch = NULL;
    plain.reduce = DM_SUM;
    if (op->kind == DM_OP_ALL_REDUCE) {
        dm_reduce_scale(op->output, op->output, op->count, op->dtype, op->factor);
    }
    else {
        const void *input = op->input != NULL ? op->input : op->output;
        size_t count = op->count;
        if (op->kind == DM_OP_REDUCE_SCATTER) {
            count *= (size_t)size; /* there are that many: no overflow */
        }
        scratch = dm_malloc_array(count, dm_dtype_size(op->dtype));
        if (scratch == NULL) {
            return dm_error_set_no_memory(err, "the multiplied input of a premul_sum");
        }
        dm_reduce_scale(scratch, input, count, op->dtype, op->factor);
        plain.input = scratch;
    }
    premul->op = plain;
    premul->scratch = scratch;
    return DM_OK;
}

void
dm_premul_end(dm_premul *premul)
{
    dm_free(premul->scratch);
    premul->scratch = NULL;
}

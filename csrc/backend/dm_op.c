/* Names of operations: see dm_backend.h. */
#include "backend/dm_backend.h"

#include <assert.h>
#include <stdio.h>

static const char *const names[DM_OP_KIND_COUNT] = {
    [DM_OP_ALL_REDUCE] = "all_reduce",
    [DM_OP_BROADCAST] = "broadcast",
    [DM_OP_REDUCE] = "reduce",
    [DM_OP_ALL_GATHER] = "all_gather",
    [DM_OP_GATHER] = "gather",
    [DM_OP_SCATTER] = "scatter",
    [DM_OP_REDUCE_SCATTER] = "reduce_scatter",
    [DM_OP_ALL_TO_ALL] = "all_to_all",
    [DM_OP_BARRIER] = "barrier",
    [DM_OP_SEND] = "send",
    [DM_OP_RECV] = "recv",
};

const char *
dm_op_name(dm_op_kind kind)
{
    assert((unsigned)kind < DM_OP_KIND_COUNT);
    return names[kind];
}

bool
dm_op_is_reduction(dm_op_kind kind)
{
    return kind == DM_OP_ALL_REDUCE || kind == DM_OP_REDUCE ||
           kind == DM_OP_REDUCE_SCATTER;
}

const char *
dm_op_describe(const dm_op *op, char text[DM_OP_TEXT_SIZE])
{
    const char *name = dm_op_name(op->kind);
    const char *dtype = dm_dtype_name(op->dtype);
    switch (op->kind) {
    case DM_OP_BARRIER:
        snprintf(text, DM_OP_TEXT_SIZE, "%s", name);
        break;
    case DM_OP_ALL_REDUCE:
    case DM_OP_REDUCE_SCATTER:
        snprintf(text, DM_OP_TEXT_SIZE, "%s(%s) of %zu %s", name,
                 dm_reduce_op_name(op->reduce), op->count, dtype);
        break;
    case DM_OP_REDUCE:
        snprintf(text, DM_OP_TEXT_SIZE, "%s(%s) of %zu %s to group rank %d", name,
                 dm_reduce_op_name(op->reduce), op->count, dtype, op->root);
        break;
    case DM_OP_GATHER:
    case DM_OP_SEND:
        snprintf(text, DM_OP_TEXT_SIZE, "%s of %zu %s to group rank %d", name,
                 op->count, dtype, op->root);
        break;
    case DM_OP_BROADCAST:
    case DM_OP_SCATTER:
    case DM_OP_RECV:
        if (op->root == DM_ANY_RANK) {
            snprintf(text, DM_OP_TEXT_SIZE, "%s of %zu %s from any rank", name,
                     op->count, dtype);
        }
        else {
            snprintf(text, DM_OP_TEXT_SIZE, "%s of %zu %s from group rank %d", name,
                     op->count, dtype, op->root);
        }
        break;
    default:
        if (op->input_counts != NULL || op->output_counts != NULL) {
            snprintf(text, DM_OP_TEXT_SIZE, "%s of uneven pieces of %s", name, dtype);
        }
        else {
            snprintf(text, DM_OP_TEXT_SIZE, "%s of %zu %s for each rank", name,
                     op->count, dtype);
        }
        break;
    }
    return text;
}

/* What is wrong with an operation before anything is sent, and how errors name it. */
#include "group/dm_private.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>

#include "group/dm_text.h"

/* "group 'tp' (ranks 2, 3)" */
static void
describe(const dm_group *group, char *text, size_t size)
{
    char ranks[DM_RANKS_TEXT_SIZE];
    dm_text_ranks(group->ranks, group->config.size, ranks);
    bool named = group->dim_name[0] != '\0';
    snprintf(text, size, named ? "group '%.64s' (%s)" : "group%.0s (%s)",
             group->dim_name, ranks);
}

enum { DESCRIPTION_SIZE = DM_RANKS_TEXT_SIZE + 80 };

void
dm_group_error_context(const dm_group *group, const dm_op *op, dm_error *err)
{
    char text[DESCRIPTION_SIZE];
    describe(group, text, sizeof(text));
    if (op->seq == 0) {
        dm_error_context(err, "%s on %s", dm_op_name(op->kind), text);
    }
    else {
        dm_error_context(err, "%s #%" PRIu64 " on %s", dm_op_name(op->kind), op->seq,
                         text);
    }
}

typedef struct list {
    char text[512];
    size_t used;
} list;

static void
list_add(list *names, const char *name)
{
    size_t room = sizeof(names->text) - names->used;
    int n = snprintf(names->text + names->used, room, "%s%s",
                     names->used == 0 ? "" : ", ", name);
    assert(n >= 0 && (size_t)n < room);
    names->used += (size_t)n;
}

/* What was asked for and what there is instead. */
static dm_status
refuse(const dm_group *group, const dm_op *op, dm_error *err)
{
    const char *name = dm_op_name(op->kind);
    const char *dtype = dm_dtype_name(op->dtype);
    list there = {"", 0};

    if (!dm_op_is_reduction(op->kind)) {
        for (int i = 0; i < DM_OP_KIND_COUNT; i++) {
            if (group->backend->supports((dm_op_kind)i, op->dtype, DM_SUM)) {
                list_add(&there, dm_op_name((dm_op_kind)i));
            }
        }
        return dm_error_set(err, DM_ERR_UNSUPPORTED,
                            "backend '%s' has no %s of %s; it has: %s",
                            group->backend_name, name, dtype, there.text);
    }

    for (int i = 0; i < DM_REDUCE_OP_COUNT; i++) {
        if (group->backend->supports(op->kind, op->dtype, (dm_reduce_op)i)) {
            list_add(&there, dm_reduce_op_name((dm_reduce_op)i));
        }
    }
    if (there.used != 0) {
        return dm_error_set(
            err, DM_ERR_UNSUPPORTED,
            "backend '%s' has no %s with op '%s' for %s; for this dtype "
            "it has: %s",
            group->backend_name, name, dm_reduce_op_name(op->reduce), dtype,
            there.text);
    }
    for (int i = 0; i < DM_DTYPE_COUNT; i++) {
        if (group->backend->supports(op->kind, (dm_dtype)i, op->reduce)) {
            list_add(&there, dm_dtype_name((dm_dtype)i));
        }
    }
    return dm_error_set(err, DM_ERR_UNSUPPORTED,
                        "backend '%s' has no %s of %s; with op '%s' it has: %s",
                        group->backend_name, name, dtype, dm_reduce_op_name(op->reduce),
                        there.used != 0 ? there.text : "nothing");
}

static dm_status
check_root(const dm_group *group, const dm_op *op, dm_error *err)
{
    int32_t size = group->config.size;
    const char *what = NULL;
    switch (op->kind) {
    case DM_OP_BROADCAST:
    case DM_OP_REDUCE:
    case DM_OP_GATHER:
    case DM_OP_SCATTER:
        what = "root";
        break;
    case DM_OP_SEND:
        what = "dst";
        break;
    case DM_OP_RECV:
        if (op->root == DM_ANY_RANK) {
            return DM_OK;
        }
        what = "src";
        break;
    default:
        return DM_OK;
    }
    if (op->root < 0 || op->root >= size) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "%s must be a group rank, 0..%d in a group of %d, got %d",
                            what, (int)size - 1, (int)size, (int)op->root);
    }
    if (what[0] != 'r' && op->root == group->config.rank) {
        return dm_error_set(err, DM_ERR_VALUE,
                            "%s is this rank itself (group rank %d): a rank cannot "
                            "exchange messages with itself",
                            what, (int)op->root);
    }
    return DM_OK;
}

dm_status
dm_group_check(dm_group *group, const dm_op *op, dm_error *err)
{
    dm_status status = dm_world_check_process(group->world, err);
    if (status == DM_OK && !group->backend->supports(op->kind, op->dtype, op->reduce)) {
        status = refuse(group, op, err);
    }
    if (status == DM_OK) {
        status = check_root(group, op, err);
    }
    if (status != DM_OK) {
        dm_group_error_context(group, op, err);
    }
    return status;
}

/* The fake backend: no communication.
 *
 * Every operation ends at once, as if the other members had contributed nothing:
 *
 *     all_reduce, broadcast   the data stays as it is
 *     reduce, gather          at the root: the own part, in its place
 *     scatter                 at the root: the own piece; elsewhere nothing changes
 *     all_gather              the own slot is filled, the others stay
 *     reduce_scatter          the own piece of the own input
 *     all_to_all              the own piece goes to itself
 *     barrier                 returns
 *     send                    the message is dropped
 *     recv                    an error: nobody can have sent anything
 *
 * In a group of one that is exactly right for every operation, so groups of one use
 * this backend whatever they were asked to use. In larger groups it serves tests and
 * planning. Nothing here waits or locks; runs of one communicator may overlap.
 */
#include "backend/dm_backend.h"

#include <string.h>

#include "backend/reduce/dm_reduce.h"
#include "base/dm_alloc.h"

struct dm_comm {
    int32_t rank;
    const int32_t *ranks; /* borrowed from the group */
};

static bool
fake_supports(dm_op_kind kind, dm_dtype dtype, dm_reduce_op reduce)
{
    /* What real CPU backends can: a plan that works here works there. */
    return !dm_op_is_reduction(kind) || dm_reduce_lookup(dtype, reduce) != NULL;
}

static dm_status
fake_comm_new(const dm_comm_config *config, dm_comm **comm, dm_error *err)
{
    dm_comm *c = dm_calloc(1, sizeof(*c));
    if (c == NULL) {
        return dm_error_set_no_memory(err, "a communicator");
    }
    c->rank = config->rank;
    c->ranks = config->ranks;
    *comm = c;
    return DM_OK;
}

static dm_status
fake_comm_connect(dm_comm *comm, const dm_wait *wait, dm_error *err)
{
    (void)comm;
    (void)wait;
    (void)err;
    return DM_OK;
}

/* Copies elements; input and output may be the same place or overlap. */
static void
copy(const dm_op *op, size_t to, size_t from, size_t count)
{
    size_t size = dm_dtype_size(op->dtype);
    char *target = (char *)op->output + to * size;
    const char *source = (const char *)op->input + from * size;
    if (count != 0 && target != source) {
        memmove(target, source, count * size);
    }
}

/* Where the piece of `rank` begins, in elements. */
static size_t
piece_start(const size_t *counts, size_t count, int32_t rank)
{
    if (counts == NULL) {
        return count * (size_t)rank;
    }
    size_t start = 0;
    for (int32_t i = 0; i < rank; i++) {
        start += counts[i];
    }
    return start;
}

static dm_status
fake_comm_run(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    (void)wait;
    int32_t rank = comm->rank;
    size_t in = piece_start(op->input_counts, op->count, rank);
    size_t out = piece_start(op->output_counts, op->count, rank);

    switch (op->kind) {
    case DM_OP_ALL_REDUCE:
    case DM_OP_BROADCAST:
    case DM_OP_BARRIER:
    case DM_OP_SEND:
        break;
    case DM_OP_REDUCE:
        if (rank == op->root && op->input != NULL) {
            copy(op, 0, 0, op->count);
        }
        break;
    case DM_OP_GATHER:
        if (rank != op->root) {
            break;
        }
        /* fall through */
    case DM_OP_ALL_GATHER:
        copy(op, out, 0,
             op->output_counts != NULL ? op->output_counts[rank] : op->count);
        break;
    case DM_OP_SCATTER:
        if (rank != op->root) {
            break;
        }
        /* fall through */
    case DM_OP_REDUCE_SCATTER:
        copy(op, 0, in, op->input_counts != NULL ? op->input_counts[rank] : op->count);
        break;
    case DM_OP_ALL_TO_ALL:
        copy(op, out, in,
             op->input_counts != NULL ? op->input_counts[rank] : op->count);
        break;
    case DM_OP_RECV:
        if (op->root == DM_ANY_RANK) {
            return dm_error_set(err, DM_ERR_UNSUPPORTED,
                                "the fake backend moves no data between ranks: there "
                                "is nothing to receive");
        }
        return dm_error_set(err, DM_ERR_UNSUPPORTED,
                            "the fake backend moves no data between ranks: there is "
                            "nothing to receive from rank %d",
                            (int)comm->ranks[op->root]);
    case DM_OP_KIND_COUNT:
        break;
    }
    return DM_OK;
}

static void
fake_comm_abort(dm_comm *comm)
{
    (void)comm;
}

static void
fake_comm_free(dm_comm *comm, bool forked)
{
    (void)forked;
    dm_free(comm);
}

static const char *
fake_comm_transport(const dm_comm *comm)
{
    (void)comm;
    return "none";
}

const dm_backend dm_backend_fake = {
    .abi = DM_BACKEND_ABI,
    .name = "fake",
    .flags = DM_BACKEND_LOCAL,
    .supports = fake_supports,
    .comm_new = fake_comm_new,
    .comm_connect = fake_comm_connect,
    .comm_run = fake_comm_run,
    .comm_abort = fake_comm_abort,
    .comm_free = fake_comm_free,
    .comm_transport = fake_comm_transport,
};

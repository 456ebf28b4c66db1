/* broadcast and scatter: see dm_shm_collectives.h.
 *
 * Only the root gives. It reads nothing, so it reports its progress in advance, and runs
 * ahead of the others as far as its cells and slots allow: many small operations in a
 * row cost the root no wait at all.
 */
#include "backend/shm/dm_shm_collectives.h"

#include "backend/shm/dm_shm_copy.h"
#include "backend/shm/dm_shm_round.h"

/* What the root puts out: `pieces` pieces of `piece` bytes next to each other, of which
 * a member takes the one at `mine`. */
typedef struct run {
    dm_comm *comm;
    const unsigned char *input; /* the root's */
    unsigned char *output;      /* NULL where there is nothing to take */
    size_t piece;
    size_t pieces;
    size_t mine;
    int32_t root;
    const dm_wait *wait;
    dm_error *err;
} run;

static dm_status
spread_in_cells(const run *r)
{
    dm_comm *comm = r->comm;
    dm_shm_next_round(comm);
    if (comm->rank == r->root) {
        dm_shm_cell *mine;
        DM_TRY(dm_shm_open_cell(comm, &mine, r->wait, r->err));
        dm_shm_copy(mine->data, r->input, r->piece * r->pieces);
        dm_shm_publish(comm, mine);
    }
    else {
        const dm_shm_cell *cell;
        DM_TRY(dm_shm_await_one(comm, r->root, comm->round, &cell, r->wait, r->err));
        dm_shm_copy(r->output, cell->data + r->mine * r->piece, r->piece);
    }
    dm_shm_end_cells(comm);
    return DM_OK;
}

static dm_status
spread_in_slots(const run *r)
{
    dm_comm *comm = r->comm;
    dm_shm_next_round(comm);
    uint64_t used;
    uint64_t slot = dm_shm_next_small(comm, &used);
    if (comm->rank == r->root) {
        dm_shm_cell *cell;
        dm_shm_report(comm);
        DM_TRY(dm_shm_open_cell(comm, &cell, r->wait, r->err));
        DM_TRY(dm_shm_require_done(comm, used, r->wait, r->err));
        dm_shm_copy(dm_shm_small_slot(comm, comm->rank, slot), r->input,
                    r->piece * r->pieces);
        dm_shm_publish(comm, cell);
        return DM_OK;
    }
    const dm_shm_cell *cell;
    DM_TRY(dm_shm_await_one(comm, r->root, comm->round, &cell, r->wait, r->err));
    dm_shm_copy(r->output, dm_shm_small_slot(comm, r->root, slot) + r->mine * r->piece,
                r->piece);
    dm_shm_report(comm);
    return DM_OK;
}

static dm_status
spread_in_chunks(const run *r)
{
    dm_comm *comm = r->comm;
    const bool root = comm->rank == r->root;
    /* Each chunk holds the same stretch of every piece. */
    const size_t stride =
        comm->segment->plan.chunk / r->pieces / DM_SHM_LINE * DM_SHM_LINE;
    dm_shm_copy_fn copy = dm_shm_copy_for(r->piece);
    if (root) {
        dm_shm_report_through(comm, comm->round + (r->piece + stride - 1) / stride);
    }
    for (size_t start = 0; start < r->piece; start += stride) {
        size_t left = r->piece - start;
        size_t bytes = left < stride ? left : stride;
        dm_shm_next_round(comm);
        uint64_t used;
        uint64_t slot = dm_shm_next_large(comm, &used);
        unsigned char *data = dm_shm_large_slot(comm, r->root, slot);
        if (root) {
            DM_TRY(dm_shm_require_done(comm, used, r->wait, r->err));
            for (size_t i = 0; i < r->pieces; i++) {
                if (r->pieces == 1 || i != (size_t)comm->rank) {
                    memcpy(data + i * stride, r->input + i * r->piece + start, bytes);
                }
            }
            DM_TRY(dm_shm_announce(comm, r->wait, r->err));
        }
        else {
            const dm_shm_cell *cell;
            DM_TRY(
                dm_shm_await_one(comm, r->root, comm->round, &cell, r->wait, r->err));
            copy(r->output + start, data + r->mine * stride, bytes);
            dm_shm_report(comm);
        }
        DM_TRY(dm_shm_go_on(comm, r->wait, r->err));
    }
    return DM_OK;
}

static dm_status
spread(const run *r)
{
    size_t bytes = r->piece * r->pieces;
    if (bytes <= DM_SHM_INLINE) {
        return spread_in_cells(r);
    }
    if (bytes <= DM_SHM_SMALL_BYTES) {
        return spread_in_slots(r);
    }
    return spread_in_chunks(r);
}

dm_status
dm_shm_broadcast(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    const run r = {
        .comm = comm,
        .input = op->output,
        .output = op->output,
        .piece = op->count * dm_dtype_size(op->dtype),
        .pieces = 1,
        .mine = 0,
        .root = op->root,
        .wait = wait,
        .err = err,
    };
    return spread(&r);
}

dm_status
dm_shm_scatter(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    const run r = {
        .comm = comm,
        .input = op->input,
        .output = op->output,
        .piece = op->count * dm_dtype_size(op->dtype),
        .pieces = (size_t)comm->size,
        .mine = (size_t)comm->rank,
        .root = op->root,
        .wait = wait,
        .err = err,
    };
    if (comm->rank == op->root && r.piece != 0) {
        const unsigned char *mine = r.input + r.mine * r.piece;
        if (mine != r.output) {
            memmove(r.output, mine, r.piece);
        }
    }
    return spread(&r);
}

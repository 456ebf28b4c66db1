/* all_gather, gather and barrier: see dm_shm_collectives.h.
 *
 * A member that only gives (in gather) reads nothing, so it reports its progress in
 * advance and runs ahead of the root as far as its cells and slots allow.
 */
#include "backend/shm/dm_shm_collectives.h"

#include "backend/shm/dm_shm_copy.h"
#include "backend/shm/dm_shm_round.h"

typedef struct run {
    dm_comm *comm;
    const unsigned char *input;
    unsigned char *output;
    size_t element;       /* bytes */
    size_t count;         /* elements of my piece */
    const size_t *counts; /* of all pieces, NULL where they are equal */
    size_t most;          /* elements of the largest piece */
    size_t total;         /* of all pieces together */
    bool gives;           /* others want my piece */
    bool receives;
    const dm_wait *wait;
    dm_error *err;
} run;

static size_t
piece_count(const run *r, int32_t member)
{
    return r->counts != NULL ? r->counts[member] : r->count;
}

/* Copies elements of my own piece to where they belong; they may be there already. */
static void
place_mine(const run *r)
{
    size_t start = 0;
    for (int32_t i = 0; i < r->comm->rank; i++) {
        start += piece_count(r, i);
    }
    unsigned char *to = r->output + start * r->element;
    size_t bytes = piece_count(r, r->comm->rank) * r->element;
    if (bytes != 0 && to != r->input) {
        dm_shm_copy_for(r->total * r->element)(to, r->input, bytes);
    }
}

static dm_status
gather_in_cells(const run *r)
{
    dm_comm *comm = r->comm;
    dm_shm_next_round(comm);
    if (r->gives) {
        dm_shm_cell *mine;
        DM_TRY(dm_shm_open_cell(comm, &mine, r->wait, r->err));
        dm_shm_copy(mine->data, r->input, piece_count(r, comm->rank) * r->element);
        dm_shm_publish(comm, mine);
    }
    if (r->receives) {
        unsigned char *to = r->output;
        for (int32_t i = 0; i < comm->size; i++) {
            const void *from = r->input;
            if (i != comm->rank) {
                const dm_shm_cell *cell;
                DM_TRY(dm_shm_await_one(comm, i, comm->round, &cell, r->wait, r->err));
                from = cell->data;
            }
            size_t bytes = piece_count(r, i) * r->element;
            if (from != to) {
                dm_shm_copy(to, from, bytes);
            }
            to += bytes;
        }
        comm->cleared = comm->round - 1; /* everybody has begun this round */
    }
    dm_shm_end_cells(comm);
    return DM_OK;
}

static dm_status
gather_in_slots(const run *r)
{
    dm_comm *comm = r->comm;
    dm_shm_next_round(comm);
    uint64_t used;
    uint64_t slot = dm_shm_next_small(comm, &used);
    if (!r->receives) {
        dm_shm_report(comm);
    }
    if (r->gives) {
        dm_shm_cell *mine;
        DM_TRY(dm_shm_open_cell(comm, &mine, r->wait, r->err));
        DM_TRY(dm_shm_require_done(comm, used, r->wait, r->err));
        dm_shm_copy(dm_shm_small_slot(comm, comm->rank, slot), r->input,
                    piece_count(r, comm->rank) * r->element);
        dm_shm_publish(comm, mine);
    }
    if (!r->receives) {
        return DM_OK;
    }
    place_mine(r);
    unsigned char *to = r->output;
    for (int32_t i = 0; i < comm->size; i++) {
        size_t bytes = piece_count(r, i) * r->element;
        if (i != comm->rank) {
            const dm_shm_cell *cell;
            DM_TRY(dm_shm_await_one(comm, i, comm->round, &cell, r->wait, r->err));
            dm_shm_copy(to, dm_shm_small_slot(comm, i, slot), bytes);
        }
        to += bytes;
    }
    comm->cleared = comm->round - 1;
    dm_shm_report(comm);
    return DM_OK;
}

/* --- in chunks --------------------------------------------------------------------------- */

/* How many elements of a piece lie in the chunk that begins at `start`. */
static size_t
chunk_of(size_t piece, size_t start, size_t most)
{
    size_t left = piece > start ? piece - start : 0;
    return left < most ? left : most;
}

static dm_status
give_chunk(const run *r, size_t start, size_t most, uint64_t slot, uint64_t used)
{
    dm_comm *comm = r->comm;
    DM_TRY(dm_shm_require_done(comm, used, r->wait, r->err));
    size_t count = chunk_of(piece_count(r, comm->rank), start, most);
    dm_shm_copy(dm_shm_large_slot(comm, comm->rank, slot),
                r->input + start * r->element, count * r->element);
    return dm_shm_announce(comm, r->wait, r->err);
}

static dm_status
take_chunks(const run *r, size_t start, size_t most, uint64_t slot, uint64_t round)
{
    dm_comm *comm = r->comm;
    dm_shm_copy_fn copy = dm_shm_copy_for(r->total * r->element);
    unsigned char *to = r->output;
    for (int32_t i = 0; i < comm->size; i++) {
        size_t piece = piece_count(r, i);
        if (i != comm->rank) {
            const dm_shm_cell *cell;
            DM_TRY(dm_shm_await_one(comm, i, round, &cell, r->wait, r->err));
            size_t bytes = chunk_of(piece, start, most) * r->element;
            if (bytes != 0) {
                copy(to + start * r->element, dm_shm_large_slot(comm, i, slot), bytes);
            }
        }
        to += piece * r->element;
    }
    return DM_OK;
}

/* Everybody gives and receives:
 *
 *     round 0:  copy in 0
 *     round i:  copy in i; publish; (all have copied in i-1) copy out i-1
 *
 * A flag of round t is written before its writer copies out t-1. */
static dm_status
all_gather_in_chunks(const run *r)
{
    enum { LAG = 2 };
    dm_comm *comm = r->comm;
    const size_t most = comm->segment->plan.chunk / r->element;
    uint64_t old_slot = 0;
    uint64_t old_round = 0;
    place_mine(r);
    for (size_t start = 0;; start += most) {
        uint64_t slot = 0;
        uint64_t round = 0;
        if (start < r->most) {
            uint64_t used;
            dm_shm_next_round(comm);
            round = comm->round;
            slot = dm_shm_next_large(comm, &used);
            DM_TRY(give_chunk(r, start, most, slot, used));
        }
        if (start != 0) {
            DM_TRY(take_chunks(r, start - most, most, old_slot, old_round));
            if (old_round > LAG && old_round - LAG > comm->cleared) {
                comm->cleared = old_round - LAG;
            }
            DM_TRY(dm_shm_go_on(comm, r->wait, r->err));
        }
        if (start >= r->most) {
            break;
        }
        old_slot = slot;
        old_round = round;
    }
    dm_shm_report(comm);
    return DM_OK;
}

/* One gives or one receives, chunk by chunk. */
static dm_status
gather_in_chunks(const run *r)
{
    dm_comm *comm = r->comm;
    const size_t most = comm->segment->plan.chunk / r->element;
    const size_t chunks = (r->most + most - 1) / most;
    if (r->receives) {
        place_mine(r);
    }
    else {
        dm_shm_report_through(comm, comm->round + chunks);
    }
    for (size_t start = 0; start < r->most; start += most) {
        dm_shm_next_round(comm);
        uint64_t used;
        uint64_t slot = dm_shm_next_large(comm, &used);
        if (r->receives) {
            DM_TRY(take_chunks(r, start, most, slot, comm->round));
            comm->cleared = comm->round - 1;
            dm_shm_report(comm);
        }
        else {
            DM_TRY(give_chunk(r, start, most, slot, used));
        }
        DM_TRY(dm_shm_go_on(comm, r->wait, r->err));
    }
    return DM_OK;
}

/* --- operations -------------------------------------------------------------------------- */

static run
run_of(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    run r = {
        .comm = comm,
        .input = op->input,
        .output = op->output,
        .element = dm_dtype_size(op->dtype),
        .count = op->count,
        .counts = op->output_counts,
        .most = op->count,
        .total = op->count * (size_t)comm->size,
        .gives = true,
        .receives = true,
        .wait = wait,
        .err = err,
    };
    if (r.counts != NULL) {
        r.most = 0;
        r.total = 0;
        for (int32_t i = 0; i < comm->size; i++) {
            r.most = r.counts[i] > r.most ? r.counts[i] : r.most;
            r.total += r.counts[i];
        }
    }
    return r;
}

dm_status
dm_shm_all_gather(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    run r = run_of(comm, op, wait, err);
    if (r.most * r.element <= DM_SHM_INLINE) {
        return gather_in_cells(&r);
    }
    if (r.most * r.element <= DM_SHM_SMALL_BYTES) {
        return gather_in_slots(&r);
    }
    return all_gather_in_chunks(&r);
}

dm_status
dm_shm_gather(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    run r = run_of(comm, op, wait, err);
    r.counts = NULL;
    r.most = op->count;
    r.receives = comm->rank == op->root;
    r.gives = !r.receives;
    if (r.most * r.element <= DM_SHM_INLINE) {
        return gather_in_cells(&r);
    }
    if (r.most * r.element <= DM_SHM_SMALL_BYTES) {
        return gather_in_slots(&r);
    }
    return gather_in_chunks(&r);
}

dm_status
dm_shm_barrier(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    (void)op;
    dm_shm_next_round(comm);
    DM_TRY(dm_shm_announce(comm, wait, err));
    DM_TRY(dm_shm_await_all(comm, comm->round, 1, wait, err));
    dm_shm_end_cells(comm);
    return DM_OK;
}

/* all_reduce, reduce and reduce_scatter: see dm_shm_collectives.h. */
#include "backend/shm/dm_shm_collectives.h"

#include "backend/shm/dm_shm_copy.h"
#include "backend/shm/dm_shm_round.h"

/* An operation on its way, for the functions below. */
typedef struct run {
    dm_comm *comm;
    dm_shm_reducer reducer;
    const unsigned char *input;
    unsigned char *output; /* may be NULL where this member gets no result */
    size_t count;
    int32_t root; /* who gets the result, -1: everybody */
    const dm_wait *wait;
    dm_error *err;
} run;

static run
run_of(dm_comm *comm, const dm_op *op, int32_t root, const dm_wait *wait, dm_error *err)
{
    return (run){
        .comm = comm,
        .reducer = {.dtype = op->dtype,
                    .op = op->reduce,
                    .element = dm_dtype_size(op->dtype),
                    .size = comm->size},
        .input = op->input != NULL ? op->input : op->output,
        .output = op->output,
        .count = op->count,
        .root = root,
        .wait = wait,
        .err = err,
    };
}

static inline bool
publishes(const run *r)
{
    return r->root != r->comm->rank;
}

static inline bool
receives(const run *r)
{
    return r->root < 0 || r->root == r->comm->rank;
}

/* --- whole: everybody who wants the result combines all of it ------------------------ */

static dm_status
reduce_in_cells(const run *r)
{
    dm_comm *comm = r->comm;
    const size_t bytes = r->count * r->reducer.element;
    dm_shm_next_round(comm);
    if (publishes(r)) {
        dm_shm_cell *mine;
        DM_TRY(dm_shm_open_cell(comm, &mine, r->wait, r->err));
        dm_shm_copy(mine->data, r->input, bytes);
        dm_shm_publish(comm, mine);
    }
    if (receives(r)) {
        const void *sources[DM_SHM_MEMBERS_MAX];
        for (int32_t i = 0; i < comm->size; i++) {
            const dm_shm_cell *cell;
            if (i != comm->rank) {
                DM_TRY(dm_shm_await_one(comm, i, comm->round, &cell, r->wait, r->err));
                sources[i] = cell->data;
            }
            else {
                sources[i] = r->input;
            }
        }
        comm->cleared = comm->round - 1; /* everybody has begun this round */
        dm_shm_combine(&r->reducer, sources, r->count, r->output, NULL);
    }
    dm_shm_end_cells(comm);
    return DM_OK;
}

static dm_status
reduce_in_slots(const run *r)
{
    dm_comm *comm = r->comm;
    dm_shm_next_round(comm);
    uint64_t used;
    uint64_t slot = dm_shm_next_small(comm, &used);
    if (publishes(r)) {
        dm_shm_cell *mine;
        DM_TRY(dm_shm_open_cell(comm, &mine, r->wait, r->err));
        DM_TRY(dm_shm_require_done(comm, used, r->wait, r->err));
        dm_shm_copy(dm_shm_small_slot(comm, comm->rank, slot), r->input,
                    r->count * r->reducer.element);
        dm_shm_publish(comm, mine);
    }
    if (receives(r)) {
        DM_TRY(dm_shm_await_all(comm, comm->round, 1, r->wait, r->err));
        const void *sources[DM_SHM_MEMBERS_MAX];
        for (int32_t i = 0; i < comm->size; i++) {
            sources[i] = i == comm->rank ? (const void *)r->input
                                         : dm_shm_small_slot(comm, i, slot);
        }
        dm_shm_combine(&r->reducer, sources, r->count, r->output, NULL);
    }
    dm_shm_report(comm);
    return DM_OK;
}

/* --- in parts: each member combines one part of each chunk ----------------------------- */

/* A chunk and how it is cut into parts, one for each member. In elements. */
typedef struct chunk {
    size_t start;
    size_t count;
    size_t part; /* of each member; the last ones may be shorter or empty */
    uint64_t slot;
} chunk;

static chunk
chunk_at(const run *r, size_t start, uint64_t slot)
{
    size_t most = r->comm->segment->plan.chunk / r->reducer.element;
    size_t line = DM_SHM_LINE / r->reducer.element;
    size_t size = (size_t)r->comm->size;
    size_t left = r->count - start;
    chunk c = {.start = start, .count = left < most ? left : most, .slot = slot};
    c.part = ((c.count + size - 1) / size + line - 1) / line * line;
    return c;
}

static size_t
part_start(const chunk *c, int32_t member)
{
    size_t start = c->part * (size_t)member;
    return start < c->count ? start : c->count;
}

/* The address of an element of a chunk in a member's slot. */
static unsigned char *
in_slot(const run *r, const chunk *c, int32_t member, size_t element)
{
    return dm_shm_large_slot(r->comm, member, c->slot) + element * r->reducer.element;
}

static void
copy_in(const run *r, const chunk *c)
{
    const size_t element = r->reducer.element;
    const unsigned char *from = r->input + c->start * element;
    size_t before = part_start(c, r->comm->rank);
    size_t behind = part_start(c, r->comm->rank + 1);
    dm_shm_copy(in_slot(r, c, r->comm->rank, 0), from, before * element);
    dm_shm_copy(in_slot(r, c, r->comm->rank, behind), from + behind * element,
                (c->count - behind) * element);
}

/* My part: into the result, and into my slot for those who copy it out of there. */
static void
combine_part(const run *r, const chunk *c)
{
    dm_comm *comm = r->comm;
    const size_t start = part_start(c, comm->rank);
    const size_t count = part_start(c, comm->rank + 1) - start;
    if (count == 0) {
        return;
    }
    const size_t at = (c->start + start) * r->reducer.element;
    const void *sources[DM_SHM_MEMBERS_MAX];
    for (int32_t i = 0; i < comm->size; i++) {
        sources[i] =
            i == comm->rank ? (const void *)(r->input + at) : in_slot(r, c, i, start);
    }
    unsigned char *slot = in_slot(r, c, comm->rank, start);
    if (!receives(r)) {
        dm_shm_combine(&r->reducer, sources, count, slot, NULL);
    }
    else {
        dm_shm_combine(&r->reducer, sources, count, r->output + at,
                       r->root < 0 ? slot : NULL);
    }
}

static void
copy_out(const run *r, const chunk *c)
{
    const size_t element = r->reducer.element;
    for (int32_t i = 0; i < r->comm->size; i++) {
        size_t start = part_start(c, i);
        size_t count = part_start(c, i + 1) - start;
        if (i != r->comm->rank) {
            dm_shm_copy(r->output + (c->start + start) * element,
                        in_slot(r, c, i, start), count * element);
        }
    }
}

/* Takes a slot for the chunk at `start`, copies it in and publishes. */
static dm_status
put_chunk(const run *r, size_t start, chunk *c)
{
    uint64_t used;
    uint64_t slot = dm_shm_next_large(r->comm, &used);
    *c = chunk_at(r, start, slot);
    DM_TRY(dm_shm_require_done(r->comm, used, r->wait, r->err));
    copy_in(r, c);
    return DM_OK;
}

static dm_status
reduce_in_parts(const run *r)
{
    /*  round 0:  copy in chunk 0
     *  round i:  (all have copied in chunk i-1, and combined chunk i-2)
     *            combine my part of chunk i-1; copy in chunk i; publish;
     *            copy out chunk i-2
     *  at last:  (all have combined the last chunk) copy it out
     *
     * When a flag of round t is seen, its writer has copied out everything that came in
     * up to round t-3: hence the lag, and the four slots. */
    enum { LAG = 3 };
    _Static_assert((int)DM_SHM_LARGE_SLOTS > (int)LAG,
                   "a slot is free when its turn comes");
    dm_comm *comm = r->comm;
    const size_t most = comm->segment->plan.chunk / r->reducer.element;
    chunk older;
    chunk old;
    chunk next;

    dm_shm_next_round(comm);
    DM_TRY(put_chunk(r, 0, &next));
    DM_TRY(dm_shm_announce(comm, r->wait, r->err));
    for (size_t start = 0; start < r->count; start += most) {
        older = start != 0 ? old : next;
        old = next;
        DM_TRY(dm_shm_await_all(comm, comm->round, LAG, r->wait, r->err));
        combine_part(r, &old);
        dm_shm_next_round(comm);
        if (old.start + old.count < r->count) {
            DM_TRY(put_chunk(r, old.start + old.count, &next));
        }
        DM_TRY(dm_shm_announce(comm, r->wait, r->err));
        if (start != 0 && receives(r)) {
            copy_out(r, &older);
        }
        DM_TRY(dm_shm_go_on(comm, r->wait, r->err));
    }
    if (receives(r)) {
        DM_TRY(dm_shm_await_all(comm, comm->round, LAG, r->wait, r->err));
        copy_out(r, &old);
    }
    dm_shm_report(comm);
    return DM_OK;
}

/* --- all_reduce, reduce ------------------------------------------------------------------ */

dm_status
dm_shm_all_reduce(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    run r = run_of(comm, op, -1, wait, err);
    size_t bytes = r.count * r.reducer.element;
    if (bytes <= DM_SHM_INLINE) {
        return reduce_in_cells(&r);
    }
    if (bytes <= DM_SHM_SMALL_BYTES &&
        bytes * (size_t)comm->size <= DM_SHM_REDUCE_ALL_BYTES) {
        return reduce_in_slots(&r);
    }
    return reduce_in_parts(&r);
}

dm_status
dm_shm_reduce(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    run r = run_of(comm, op, op->root, wait, err);
    size_t bytes = r.count * r.reducer.element;
    if (bytes <= DM_SHM_INLINE) {
        return reduce_in_cells(&r);
    }
    if (bytes <= DM_SHM_SMALL_BYTES) {
        return reduce_in_slots(&r);
    }
    return reduce_in_parts(&r);
}

/* --- reduce_scatter ---------------------------------------------------------------------- */

static dm_status
scatter_in_cells(const run *r)
{
    dm_comm *comm = r->comm;
    const size_t piece = r->count * r->reducer.element;
    const size_t mine = piece * (size_t)comm->rank;
    dm_shm_next_round(comm);
    dm_shm_cell *cell;
    DM_TRY(dm_shm_open_cell(comm, &cell, r->wait, r->err));
    dm_shm_copy(cell->data, r->input, piece * (size_t)comm->size);
    dm_shm_publish(comm, cell);
    DM_TRY(dm_shm_await_all(comm, comm->round, 1, r->wait, r->err));
    const void *sources[DM_SHM_MEMBERS_MAX];
    for (int32_t i = 0; i < comm->size; i++) {
        sources[i] = dm_shm_cell_of(comm, i, comm->round)->data + mine;
    }
    dm_shm_combine(&r->reducer, sources, r->count, r->output, NULL);
    dm_shm_end_cells(comm);
    return DM_OK;
}

/* `count` elements of each piece from `start` on, next to each other into my slot; mine
 * stays where it is. */
static void
copy_pieces_in(const run *r, size_t start, size_t count, size_t stride,
               unsigned char *slot)
{
    const size_t element = r->reducer.element;
    for (int32_t i = 0; i < r->comm->size; i++) {
        if (i != r->comm->rank) {
            dm_shm_copy(slot + (size_t)i * stride,
                        r->input + (r->count * (size_t)i + start) * element,
                        count * element);
        }
    }
}

static void
combine_pieces(const run *r, size_t start, size_t count, size_t stride,
               const void *sources[DM_SHM_MEMBERS_MAX])
{
    const size_t element = r->reducer.element;
    const size_t rank = (size_t)r->comm->rank;
    for (int32_t i = 0; i < r->comm->size; i++) {
        sources[i] = (const unsigned char *)sources[i] + rank * stride;
    }
    sources[rank] = r->input + (r->count * rank + start) * element;
    dm_shm_combine(&r->reducer, sources, count, r->output + start * element, NULL);
}

static dm_status
scatter_in_slots(const run *r)
{
    dm_comm *comm = r->comm;
    const size_t piece = r->count * r->reducer.element;
    dm_shm_next_round(comm);
    uint64_t used;
    uint64_t slot = dm_shm_next_small(comm, &used);
    dm_shm_cell *cell;
    DM_TRY(dm_shm_open_cell(comm, &cell, r->wait, r->err));
    DM_TRY(dm_shm_require_done(comm, used, r->wait, r->err));
    copy_pieces_in(r, 0, r->count, piece, dm_shm_small_slot(comm, comm->rank, slot));
    dm_shm_publish(comm, cell);
    DM_TRY(dm_shm_await_all(comm, comm->round, 1, r->wait, r->err));
    const void *sources[DM_SHM_MEMBERS_MAX];
    for (int32_t i = 0; i < comm->size; i++) {
        sources[i] = dm_shm_small_slot(comm, i, slot);
    }
    combine_pieces(r, 0, r->count, piece, sources);
    dm_shm_report(comm);
    return DM_OK;
}

static dm_status
scatter_in_chunks(const run *r)
{
    /*  round 0:  copy in 0
     *  round i:  copy in i; publish; (all have copied in i-1) combine i-1
     *
     * A flag of round t is written before its writer combines t-1. */
    enum { LAG = 2 };
    dm_comm *comm = r->comm;
    const size_t stride =
        comm->segment->plan.chunk / (size_t)comm->size / DM_SHM_LINE * DM_SHM_LINE;
    const size_t most = stride / r->reducer.element;
    uint64_t old_slot = 0;
    uint64_t old_round = 0;
    for (size_t start = 0;; start += most) {
        uint64_t slot = 0;
        uint64_t round = 0;
        if (start < r->count) {
            size_t left = r->count - start;
            uint64_t used;
            dm_shm_next_round(comm);
            round = comm->round;
            slot = dm_shm_next_large(comm, &used);
            DM_TRY(dm_shm_require_done(comm, used, r->wait, r->err));
            copy_pieces_in(r, start, left < most ? left : most, stride,
                           dm_shm_large_slot(comm, comm->rank, slot));
            DM_TRY(dm_shm_announce(comm, r->wait, r->err));
        }
        if (start != 0) {
            size_t from = start - most;
            size_t left = r->count - from;
            DM_TRY(dm_shm_await_all(comm, old_round, LAG, r->wait, r->err));
            const void *sources[DM_SHM_MEMBERS_MAX];
            for (int32_t i = 0; i < comm->size; i++) {
                sources[i] = dm_shm_large_slot(comm, i, old_slot);
            }
            combine_pieces(r, from, left < most ? left : most, stride, sources);
            DM_TRY(dm_shm_go_on(comm, r->wait, r->err));
        }
        if (start >= r->count) {
            break;
        }
        old_slot = slot;
        old_round = round;
    }
    dm_shm_report(comm);
    return DM_OK;
}

dm_status
dm_shm_reduce_scatter(dm_comm *comm, const dm_op *op, const dm_wait *wait,
                      dm_error *err)
{
    run r = run_of(comm, op, -1, wait, err);
    size_t bytes = r.count * r.reducer.element * (size_t)comm->size;
    if (bytes <= DM_SHM_INLINE) {
        return scatter_in_cells(&r);
    }
    if (bytes <= DM_SHM_SMALL_BYTES) {
        return scatter_in_slots(&r);
    }
    return scatter_in_chunks(&r);
}

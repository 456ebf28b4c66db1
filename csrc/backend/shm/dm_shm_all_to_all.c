/* all_to_all: see dm_shm_collectives.h.
 *
 * The members do not know each other's counts, nor whether those are equal. So the
 * first round carries a header with the count; where all have equal pieces, small data
 * or the first chunk comes along with it. Where somebody has uneven pieces, a second
 * round shows everybody all counts. Each member checks all of them, so that all find
 * the same misfit.
 */
#include "backend/shm/dm_shm_collectives.h"

#include <inttypes.h>
#include <stdio.h>

#include "backend/shm/dm_shm_copy.h"
#include "backend/shm/dm_shm_peers.h"
#include "backend/shm/dm_shm_round.h"

#define UNEVEN UINT64_MAX

/* In the cell of the first round. */
typedef struct header {
    uint64_t count; /* elements of each piece, or UNEVEN */
    unsigned char data[DM_SHM_INLINE - sizeof(uint64_t)];
} header;

_Static_assert(sizeof(header) == DM_SHM_INLINE, "a header fills a cell");

/* Where the piece for or from one member lies. In elements. */
typedef struct piece {
    size_t start;
    size_t count;
} piece;

typedef struct run {
    dm_comm *comm;
    const unsigned char *input;
    unsigned char *output;
    size_t element;
    size_t total; /* bytes of the output */
    const dm_wait *wait;
    dm_error *err;
    piece gives[DM_SHM_MEMBERS_MAX];
    piece takes[DM_SHM_MEMBERS_MAX];
} run;

/* Fills a row of pieces; returns how many elements they have together. */
static size_t
cut(const dm_comm *comm, const size_t *counts, size_t count, piece *pieces)
{
    size_t start = 0;
    for (int32_t i = 0; i < comm->size; i++) {
        size_t n = counts != NULL ? counts[i] : count;
        pieces[i] = (piece){start, n};
        start += n;
    }
    return start;
}

static void
place_mine(const run *r)
{
    const piece *from = &r->gives[r->comm->rank];
    const piece *to = &r->takes[r->comm->rank];
    dm_shm_copy_for(r->total)(r->output + to->start * r->element,
                              r->input + from->start * r->element,
                              to->count * r->element);
}

/* --- the data ------------------------------------------------------------------------- */

/* Puts the stretch `start`..`start + most` of every piece next to each other. */
static void
put(const run *r, size_t start, size_t most, size_t stride, unsigned char *slot)
{
    for (int32_t i = 0; i < r->comm->size; i++) {
        const piece *p = &r->gives[i];
        if (i != r->comm->rank && p->count > start) {
            size_t left = p->count - start;
            dm_shm_copy(slot + (size_t)i * stride,
                        r->input + (p->start + start) * r->element,
                        (left < most ? left : most) * r->element);
        }
    }
}

/* Takes my stretch out of one member's slot. */
static void
take(const run *r, int32_t member, size_t start, size_t most, size_t stride,
     const unsigned char *slot, dm_shm_copy_fn copy)
{
    const piece *p = &r->takes[member];
    if (p->count > start) {
        size_t left = p->count - start;
        copy(r->output + (p->start + start) * r->element,
             slot + (size_t)r->comm->rank * stride,
             (left < most ? left : most) * r->element);
    }
}

static size_t
chunk_stride(const run *r)
{
    return r->comm->segment->plan.chunk / (size_t)r->comm->size / DM_SHM_LINE *
           DM_SHM_LINE;
}

/* Takes a large slot in this round and puts a chunk there. */
static dm_status
put_chunk(const run *r, size_t start, uint64_t *slot)
{
    dm_comm *comm = r->comm;
    const size_t stride = chunk_stride(r);
    uint64_t used;
    *slot = dm_shm_next_large(comm, &used);
    DM_TRY(dm_shm_require_done(comm, used, r->wait, r->err));
    put(r, start, stride / r->element, stride,
        dm_shm_large_slot(comm, comm->rank, *slot));
    return DM_OK;
}

/* Exchanges pieces of at most `longest` elements. The first chunk has been put into
 * `slot` and published in this round, and all flags of it have been seen.
 *
 *     round 0:  copy in 0
 *     round i:  copy in i; publish; (all have copied in i-1) copy out i-1 */
static dm_status
exchange_chunks(const run *r, size_t longest, uint64_t slot)
{
    enum { LAG = 2 };
    dm_comm *comm = r->comm;
    const size_t stride = chunk_stride(r);
    const size_t most = stride / r->element;
    dm_shm_copy_fn copy = dm_shm_copy_for(r->total);
    uint64_t old_round = comm->round;
    uint64_t old_slot = slot;
    for (size_t start = 0; start < longest; start += most) {
        if (start + most < longest) {
            dm_shm_next_round(comm);
            DM_TRY(put_chunk(r, start + most, &slot));
            DM_TRY(dm_shm_announce(comm, r->wait, r->err));
        }
        DM_TRY(dm_shm_await_all(comm, old_round, LAG, r->wait, r->err));
        /* Each begins with its neighbour, so that not all read the same slot. */
        for (int32_t k = 1; k < comm->size; k++) {
            int32_t i = (comm->rank + k) % comm->size;
            take(r, i, start, most, stride, dm_shm_large_slot(comm, i, old_slot), copy);
        }
        DM_TRY(dm_shm_go_on(comm, r->wait, r->err));
        old_round = comm->round;
        old_slot = slot;
    }
    return DM_OK;
}

/* --- uneven pieces -------------------------------------------------------------------- */

static dm_status
misfit(dm_comm *comm, int32_t from, int32_t to, uint64_t given, uint64_t wanted,
       dm_error *err)
{
    char who_from[DM_SHM_WHO_SIZE];
    char who_to[DM_SHM_WHO_SIZE];
    comm->parting = dm_shm_record(DM_SHM_MISFIT, from, to);
    return dm_error_set(err, DM_ERR_MISMATCH,
                        "all_to_all: %s sends %" PRIu64 " elements to %s, which "
                        "expects %" PRIu64,
                        dm_shm_who(comm, from, who_from), given,
                        dm_shm_who(comm, to, who_to), wanted);
}

/* A row of the table of counts: what a member gives to each, then what it takes. */
static const uint64_t *
row_of(const dm_comm *comm, int32_t member, uint64_t slot)
{
    return (const uint64_t *)(const void *)dm_shm_small_slot(comm, member, slot);
}

/* Shows everybody all counts and checks them; `*longest` is the largest one between two
 * different members. */
static dm_status
compare_counts(const run *r, size_t *longest)
{
    dm_comm *comm = r->comm;
    const int32_t size = comm->size;
    _Static_assert(2 * DM_SHM_MEMBERS_MAX * sizeof(uint64_t) <= DM_SHM_SMALL_BYTES,
                   "a row fits into a small slot");
    dm_shm_next_round(comm);
    uint64_t used;
    uint64_t slot = dm_shm_next_small(comm, &used);
    DM_TRY(dm_shm_require_done(comm, used, r->wait, r->err));
    uint64_t *row = (uint64_t *)(void *)dm_shm_small_slot(comm, comm->rank, slot);
    for (int32_t i = 0; i < size; i++) {
        row[i] = r->gives[i].count;
        row[size + i] = r->takes[i].count;
    }
    DM_TRY(dm_shm_announce(comm, r->wait, r->err));
    DM_TRY(dm_shm_await_all(comm, comm->round, 1, r->wait, r->err));

    size_t most = 0;
    for (int32_t i = 0; i < size; i++) {
        for (int32_t j = 0; j < size; j++) {
            uint64_t given = row_of(comm, i, slot)[j];
            uint64_t wanted = row_of(comm, j, slot)[size + i];
            if (given != wanted) {
                return misfit(comm, i, j, given, wanted, r->err);
            }
            if (i != j && given > most) {
                most = given;
            }
        }
    }
    *longest = most;
    return DM_OK;
}

static dm_status
exchange_uneven(const run *r)
{
    size_t longest = 0;
    DM_TRY(compare_counts(r, &longest));
    place_mine(r);
    if (longest == 0) {
        return DM_OK;
    }
    uint64_t slot;
    dm_shm_next_round(r->comm);
    DM_TRY(put_chunk(r, 0, &slot));
    DM_TRY(dm_shm_announce(r->comm, r->wait, r->err));
    return exchange_chunks(r, longest, slot);
}

/* --- the operation --------------------------------------------------------------------- */

/* How data travels with the first round. */
typedef enum way { IN_CELLS, IN_SLOTS, IN_CHUNKS } way;

static way
way_for(size_t bytes)
{
    if (bytes <= sizeof(((header *)NULL)->data)) {
        return IN_CELLS;
    }
    return bytes <= DM_SHM_SMALL_BYTES ? IN_SLOTS : IN_CHUNKS;
}

/* Publishes the header and what can go along; all members take the same slots. */
static dm_status
open_exchange(const run *r, bool even, way how, uint64_t *small, uint64_t *large)
{
    dm_comm *comm = r->comm;
    const size_t count = r->gives[0].count;
    dm_shm_next_round(comm);
    uint64_t used;
    *small = dm_shm_next_small(comm, &used);
    dm_shm_cell *cell;
    DM_TRY(dm_shm_open_cell(comm, &cell, r->wait, r->err));
    header *h = (header *)(void *)cell->data;
    if (even && how == IN_CHUNKS) {
        DM_TRY(put_chunk(r, 0, large));
    }
    else {
        uint64_t unused;
        *large = dm_shm_next_large(comm, &unused);
    }
    if (even && how == IN_CELLS) {
        put(r, 0, count, count * r->element, h->data);
    }
    if (even && how == IN_SLOTS) {
        DM_TRY(dm_shm_require_done(comm, used, r->wait, r->err));
        put(r, 0, count, count * r->element,
            dm_shm_small_slot(comm, comm->rank, *small));
    }
    h->count = even ? count : UNEVEN;
    dm_shm_publish(comm, cell);
    return DM_OK;
}

/* Reads everybody's header: whether all have equal pieces. */
static dm_status
compare_headers(const run *r, bool *all_even)
{
    dm_comm *comm = r->comm;
    uint64_t common = UNEVEN;
    int32_t first = 0;
    int32_t other = -1;
    bool even = true;
    for (int32_t i = 0; i < comm->size; i++) {
        const dm_shm_cell *cell = dm_shm_cell_of(comm, i, comm->round);
        uint64_t count = ((const header *)(const void *)cell->data)->count;
        if (count == UNEVEN) {
            even = false;
        }
        else if (common == UNEVEN) {
            common = count;
            first = i;
        }
        else if (count != common && other < 0) {
            other = i;
        }
    }
    if (even && other >= 0) {
        const dm_shm_cell *cell = dm_shm_cell_of(comm, other, comm->round);
        uint64_t wanted = ((const header *)(const void *)cell->data)->count;
        return misfit(comm, first, other, common, wanted, r->err);
    }
    *all_even = even;
    return DM_OK;
}

dm_status
dm_shm_all_to_all(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    run r;
    r.comm = comm;
    r.input = op->input;
    r.output = op->output;
    r.element = dm_dtype_size(op->dtype);
    r.wait = wait;
    r.err = err;
    cut(comm, op->input_counts, op->count, r.gives);
    r.total = cut(comm, op->output_counts, op->count, r.takes) * r.element;

    bool even = op->input_counts == NULL && op->output_counts == NULL;
    const size_t bytes = op->count * (size_t)comm->size * r.element;
    const way how = way_for(bytes);
    uint64_t small;
    uint64_t large;
    DM_TRY(open_exchange(&r, even, how, &small, &large));
    DM_TRY(dm_shm_await_all(comm, comm->round, 1, wait, err));
    DM_TRY(compare_headers(&r, &even));

    if (!even) {
        DM_TRY(exchange_uneven(&r));
    }
    else {
        place_mine(&r);
        if (how == IN_CHUNKS) {
            DM_TRY(exchange_chunks(&r, op->count, large));
        }
        else {
            for (int32_t i = 0; i < comm->size; i++) {
                const header *h =
                    (const void *)dm_shm_cell_of(comm, i, comm->round)->data;
                const unsigned char *slot =
                    how == IN_CELLS ? h->data : dm_shm_small_slot(comm, i, small);
                if (i != comm->rank) {
                    take(&r, i, 0, op->count, op->count * r.element, slot, dm_shm_copy);
                }
            }
        }
    }
    dm_shm_report(comm);
    return DM_OK;
}

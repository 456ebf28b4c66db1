/* Fingerprints of collectives: see dm_shm_op.h. */
#include "backend/shm/dm_shm_op.h"

#include <inttypes.h>
#include <stdio.h>

/* Multipliers of a well-known 64-bit mixer. */
#define MIX_A UINT64_C(0xbf58476d1ce4e5b9)
#define MIX_B UINT64_C(0x94d049bb133111eb)

/* `what` of a request: kind, dtype, reduce and root + 1 (0: there is none). */
enum { DTYPE_SHIFT = 8, REDUCE_SHIFT = 16, ROOT_SHIFT = 32 };
enum { NO_REDUCE = 0xff };

static inline uint64_t
mix(uint64_t x)
{
    x = (x ^ x >> 30) * MIX_A;
    x = (x ^ x >> 27) * MIX_B;
    return x ^ x >> 31;
}

static bool
is_reduction(dm_op_kind kind)
{
    return kind == DM_OP_ALL_REDUCE || kind == DM_OP_REDUCE ||
           kind == DM_OP_REDUCE_SCATTER;
}

static bool
is_rooted(dm_op_kind kind)
{
    return kind == DM_OP_BROADCAST || kind == DM_OP_REDUCE || kind == DM_OP_GATHER ||
           kind == DM_OP_SCATTER;
}

static uint64_t
hash_counts(const dm_comm *comm, const size_t *counts)
{
    uint64_t hash = 1;
    for (int32_t i = 0; i < comm->size; i++) {
        hash = mix(hash + counts[i]);
    }
    return hash;
}

static dm_shm_request
request_of(const dm_comm *comm, const dm_op *op)
{
    dm_shm_request request = {.what = (uint64_t)op->kind, .count = op->count};
    if (op->kind == DM_OP_BARRIER) {
        request.count = 0;
        return request;
    }
    unsigned reduce = is_reduction(op->kind) ? (unsigned)op->reduce : NO_REDUCE;
    request.what |= (uint64_t)op->dtype << DTYPE_SHIFT;
    request.what |= (uint64_t)reduce << REDUCE_SHIFT;
    if (is_rooted(op->kind)) {
        request.what |= (uint64_t)((uint32_t)op->root + 1) << ROOT_SHIFT;
    }
    /* Counts that all members know alike; those of all_to_all are compared in pairs
     * when the members meet. */
    const size_t *counts = NULL;
    if (op->kind == DM_OP_ALL_GATHER) {
        counts = op->output_counts;
    }
    else if (op->kind == DM_OP_REDUCE_SCATTER) {
        counts = op->input_counts;
    }
    if (counts != NULL) {
        request.count = 0;
        request.counts = hash_counts(comm, counts);
    }
    return request;
}

void
dm_shm_begin(dm_comm *comm, const dm_op *op)
{
    dm_shm_request request = request_of(comm, op);
    uint64_t count = op->kind == DM_OP_ALL_TO_ALL ? 0 : request.count;
    comm->chain =
        mix(comm->chain + request.what * MIX_B + count * MIX_A + request.counts);
    comm->begun++;

    /* Release, each: whoever reads one of these words and then `begun` again must not
     * see an older `begun`. */
    dm_shm_entry *entry = &comm->self->history[comm->begun % DM_SHM_HISTORY];
    atomic_store_explicit(&entry->chain, comm->chain, memory_order_release);
    atomic_store_explicit(&entry->what, request.what, memory_order_release);
    atomic_store_explicit(&entry->count, request.count, memory_order_release);
    atomic_store_explicit(&entry->counts, request.counts, memory_order_release);
    atomic_store_explicit(&comm->self->begun, comm->begun, memory_order_release);
}

void
dm_shm_describe(const dm_comm *comm, const dm_shm_request *request, char *text,
                size_t size)
{
    unsigned kind = request->what & 0xff;
    unsigned dtype = request->what >> DTYPE_SHIFT & 0xff;
    unsigned reduce = request->what >> REDUCE_SHIFT & 0xff;
    uint32_t root = (uint32_t)(request->what >> ROOT_SHIFT);
    if (kind >= DM_OP_KIND_COUNT || dtype >= DM_DTYPE_COUNT) {
        snprintf(text, size, "something unknown");
        return;
    }
    if (kind == DM_OP_BARRIER) {
        snprintf(text, size, "barrier");
        return;
    }
    char op[32] = "";
    if (reduce < DM_REDUCE_OP_COUNT) {
        snprintf(op, sizeof(op), "(%s)", dm_reduce_op_name((dm_reduce_op)reduce));
    }
    char where[40] = "";
    if (root != 0 && root <= (uint32_t)comm->size) {
        bool from = kind == DM_OP_BROADCAST || kind == DM_OP_SCATTER;
        snprintf(where, sizeof(where), " %s rank %d", from ? "from" : "to",
                 (int)comm->ranks[root - 1]);
    }
    char count[40] = "uneven counts";
    if (request->counts == 0) {
        snprintf(count, sizeof(count), "%" PRIu64, request->count);
    }
    snprintf(text, size, "%s%s of %s %s%s", dm_op_name((dm_op_kind)kind), op, count,
             dm_dtype_name((dm_dtype)dtype), where);
}

/* The shm backend's table: see dm_shm.h and README.md of this folder. */
#include "backend/shm/dm_shm.h"

#include "backend/reduce/dm_reduce.h"
#include "backend/shm/dm_shm_collectives.h"
#include "backend/shm/dm_shm_comm.h"
#include "backend/shm/dm_shm_meet.h"
#include "backend/shm/dm_shm_message.h"
#include "backend/shm/dm_shm_op.h"
#include "backend/shm/dm_shm_peers.h"
#include "base/dm_alloc.h"

static bool
shm_supports(dm_op_kind kind, dm_dtype dtype, dm_reduce_op reduce)
{
    bool reduction = kind == DM_OP_ALL_REDUCE || kind == DM_OP_REDUCE ||
                     kind == DM_OP_REDUCE_SCATTER;
    return !reduction || dm_reduce_lookup(dtype, reduce) != NULL;
}

static dm_status
shm_comm_new(const dm_comm_config *config, dm_comm **comm, dm_error *err)
{
    dm_comm *c = dm_calloc(1, sizeof(*c));
    if (c == NULL) {
        return dm_error_set_no_memory(err, "a communicator");
    }
    c->rank = config->rank;
    c->size = config->size;
    c->ranks = config->ranks;
    c->name = config->name;
    c->store = config->store;
    atomic_init(&c->aborted, false);
    atomic_init(&c->attached, false);
    atomic_init(&c->running, false);
    *comm = c;
    return DM_OK;
}

/* The record to leave with after a failure. */
static uint64_t
record_for(const dm_comm *comm, dm_status status)
{
    int32_t me = comm->rank;
    switch (status) {
    case DM_ERR_ABORTED:
    case DM_ERR_CLOSED:
        return dm_shm_record(DM_SHM_ABORTED, me, me);
    case DM_ERR_INTERRUPTED:
        return dm_shm_record(DM_SHM_INTERRUPTED, me, me);
    case DM_ERR_TIMEOUT:
    case DM_ERR_PEER:
    case DM_ERR_MISMATCH:
        if (comm->parting != 0) {
            return comm->parting;
        }
        break;
    default:
        break;
    }
    return dm_shm_record(DM_SHM_FAILED, me, me);
}

/* The end of a call: a failure that leaves the others without me ends my membership. */
static dm_status
end_call(dm_comm *comm, dm_status status)
{
    if (status <= DM_ERR_TIMEOUT) {
        comm->broken = true;
        if (atomic_load(&comm->attached)) {
            dm_shm_leave(comm, record_for(comm, status));
        }
    }
    atomic_store(&comm->running, false);
    return status;
}

dm_status
dm_shm_connect(dm_comm *comm, const dm_wait *wait, bool *together, dm_error *err)
{
    atomic_store(&comm->running, true);
    return end_call(comm, dm_shm_meet(comm, wait, together, err));
}

dm_status
dm_shm_connect_to(dm_comm *comm, dm_shm_segment *segment, const dm_wait *wait,
                  dm_error *err)
{
    atomic_store(&comm->running, true);
    dm_status status = dm_shm_attach(comm, dm_shm_segment_hold(segment), NULL, err);
    if (status == DM_OK) {
        status = dm_shm_await_joined(comm, wait, err);
    }
    return end_call(comm, status);
}

static dm_status
shm_comm_connect(dm_comm *comm, const dm_wait *wait, dm_error *err)
{
    bool together = false;
    DM_TRY(dm_shm_connect(comm, wait, &together, err));
    if (!together) {
        return dm_error_set(err, DM_ERR_CONNECTION,
                            "the members of the group do not share a host");
    }
    return DM_OK;
}

typedef dm_status (*operation)(dm_comm *comm, const dm_op *op, const dm_wait *wait,
                               dm_error *err);

static const operation operations[DM_OP_KIND_COUNT] = {
    [DM_OP_ALL_REDUCE] = dm_shm_all_reduce,
    [DM_OP_BROADCAST] = dm_shm_broadcast,
    [DM_OP_REDUCE] = dm_shm_reduce,
    [DM_OP_ALL_GATHER] = dm_shm_all_gather,
    [DM_OP_GATHER] = dm_shm_gather,
    [DM_OP_SCATTER] = dm_shm_scatter,
    [DM_OP_REDUCE_SCATTER] = dm_shm_reduce_scatter,
    [DM_OP_ALL_TO_ALL] = dm_shm_all_to_all,
    [DM_OP_BARRIER] = dm_shm_barrier,
    [DM_OP_SEND] = dm_shm_send,
    [DM_OP_RECV] = dm_shm_recv,
};

static dm_status
shm_comm_run(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    /* Relaxed, both: comm_abort that comes at this moment may take the operation for
     * begun or not; either is true. */
    if (atomic_load_explicit(&comm->aborted, memory_order_relaxed)) {
        return dm_error_set(err, DM_ERR_ABORTED, "the group was aborted");
    }
    if (comm->broken) {
        return dm_error_set(err, DM_ERR_CLOSED, "the group is broken");
    }
    atomic_store_explicit(&comm->running, true, memory_order_relaxed);
    comm->parting = 0;
    comm->next_poll = 0;
    if (op->kind != DM_OP_SEND && op->kind != DM_OP_RECV) {
        dm_shm_begin(comm, op);
    }
    dm_status status = operations[op->kind](comm, op, wait, err);
    if (status != DM_OK) {
        return end_call(comm, status);
    }
    atomic_store_explicit(&comm->running, false, memory_order_relaxed);
    return DM_OK;
}

static void
shm_comm_abort(dm_comm *comm)
{
    /* Sequentially consistent: see dm_shm_attach, and sleep_once in dm_shm_wait.c. */
    atomic_store(&comm->aborted, true);
    if (atomic_load(&comm->attached)) {
        bool running = atomic_load(&comm->running);
        dm_shm_leave(comm, dm_shm_record(running ? DM_SHM_ABORTED : DM_SHM_LEFT,
                                         comm->rank, comm->rank));
        dm_shm_ring_all(comm);
    }
}

static void
shm_comm_free(dm_comm *comm, bool forked)
{
    if (!forked && atomic_load(&comm->attached)) {
        dm_shm_leave(comm, dm_shm_record(DM_SHM_LEFT, comm->rank, comm->rank));
    }
    dm_shm_segment_release(comm->segment, forked);
    dm_shm_inbox_free(comm->inbox);
    dm_free(comm);
}

static const char *
shm_comm_transport(const dm_comm *comm)
{
    (void)comm;
    return "shm";
}

const dm_backend dm_backend_shm = {
    .abi = DM_BACKEND_ABI,
    .name = "shm",
    .flags = 0,
    .supports = shm_supports,
    .comm_new = shm_comm_new,
    .comm_connect = shm_comm_connect,
    .comm_run = shm_comm_run,
    .comm_abort = shm_comm_abort,
    .comm_free = shm_comm_free,
    .comm_transport = shm_comm_transport,
};

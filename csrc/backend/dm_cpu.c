/* The backend of CPU groups, "gloo" by name: shared memory where all members share a
 * host, gloo's TCP otherwise.
 *
 * A communicator finds out when it connects, and passes everything on to one of the two
 * from then on; the gloo bridge is loaded when the first group needs it. Groups over
 * several hosts with several ranks on each have their place here, too: shm inside a
 * host and gloo between them.
 *
 * Locks: `lock` guards `inner`, which comm_abort reaches from other threads. The thread
 * that connects and runs is the only one that sets it, so it reads it without the lock.
 */
#include "backend/dm_backend.h"

#include <pthread.h>

#include "backend/reduce/dm_reduce.h"
#include "backend/shm/dm_shm.h"
#include "base/dm_alloc.h"

struct dm_comm {
    dm_comm_config config; /* its pointers are the group's */
    pthread_mutex_t lock;
    const dm_backend *backend; /* of `inner` */
    dm_comm *inner;            /* NULL until it connects */
    bool connected;
    bool aborted;
};

static bool
cpu_supports(dm_op_kind kind, dm_dtype dtype, dm_reduce_op reduce)
{
    bool reduction = kind == DM_OP_ALL_REDUCE || kind == DM_OP_REDUCE ||
                     kind == DM_OP_REDUCE_SCATTER;
    return !reduction || dm_reduce_lookup(dtype, reduce) != NULL;
}

static dm_status
cpu_comm_new(const dm_comm_config *config, dm_comm **comm, dm_error *err)
{
    dm_comm *c = dm_calloc(1, sizeof(*c));
    if (c == NULL) {
        return dm_error_set_no_memory(err, "a communicator");
    }
    c->config = *config;
    pthread_mutex_init(&c->lock, NULL);
    *comm = c;
    return DM_OK;
}

/* Makes a communicator of `backend` the one inside, instead of what was there. */
static dm_status
replace_inner(dm_comm *comm, const dm_backend *backend, dm_error *err)
{
    dm_comm *made = NULL;
    DM_TRY(backend->comm_new(&comm->config, &made, err));
    pthread_mutex_lock(&comm->lock);
    const dm_backend *old_backend = comm->backend;
    dm_comm *old = comm->inner;
    bool aborted = comm->aborted;
    comm->backend = backend;
    comm->inner = made;
    pthread_mutex_unlock(&comm->lock);
    if (old != NULL) {
        old_backend->comm_free(old, false);
    }
    return aborted ? dm_error_set(err, DM_ERR_ABORTED, "the group was aborted") : DM_OK;
}

static dm_status
cpu_comm_connect(dm_comm *comm, const dm_wait *wait, dm_error *err)
{
    bool together = false;
    DM_TRY(replace_inner(comm, &dm_backend_shm, err));
    DM_TRY(dm_shm_connect(comm->inner, wait, &together, err));
    if (!together) {
        const dm_backend *gloo;
        DM_TRY(dm_backend_load_gloo(&gloo, err));
        DM_TRY(replace_inner(comm, gloo, err));
        DM_TRY(gloo->comm_connect(comm->inner, wait, err));
    }
    pthread_mutex_lock(&comm->lock);
    comm->connected = true;
    pthread_mutex_unlock(&comm->lock);
    return DM_OK;
}

static dm_status
cpu_comm_run(dm_comm *comm, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    return comm->backend->comm_run(comm->inner, op, wait, err);
}

static void
cpu_comm_abort(dm_comm *comm)
{
    pthread_mutex_lock(&comm->lock);
    comm->aborted = true;
    if (comm->inner != NULL) {
        comm->backend->comm_abort(comm->inner);
    }
    pthread_mutex_unlock(&comm->lock);
}

static void
cpu_comm_free(dm_comm *comm, bool forked)
{
    if (comm->inner != NULL) {
        comm->backend->comm_free(comm->inner, forked);
    }
    if (!forked) {
        pthread_mutex_destroy(&comm->lock);
    }
    dm_free(comm);
}

static const char *
cpu_comm_transport(const dm_comm *comm)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)&comm->lock;
    pthread_mutex_lock(lock);
    const char *transport =
        comm->connected ? comm->backend->comm_transport(comm->inner) : "none";
    pthread_mutex_unlock(lock);
    return transport;
}

const dm_backend dm_backend_cpu = {
    .abi = DM_BACKEND_ABI,
    .name = "gloo",
    .flags = DM_BACKEND_MAIL,
    .supports = cpu_supports,
    .comm_new = cpu_comm_new,
    .comm_connect = cpu_comm_connect,
    .comm_run = cpu_comm_run,
    .comm_abort = cpu_comm_abort,
    .comm_free = cpu_comm_free,
    .comm_transport = cpu_comm_transport,
};

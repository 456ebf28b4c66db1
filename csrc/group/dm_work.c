/* Asynchronous operations: see dm_group.h.
 *
 * A work is held by its maker and by the queue until it has run; it holds its group.
 * Its result is written before `finished` is set (release) and read after it was seen
 * (acquire); waiters sleep on the group's condition.
 */
#include <inttypes.h>
#include <string.h>

#include "base/dm_alloc.h"
#include "group/dm_private.h"

struct dm_work {
    dm_job job; /* first */
    atomic_int refs;
    dm_group *group;
    dm_op op;
    int32_t source; /* recv */
    void (*done)(void *arg, dm_status status);
    void *arg;

    atomic_bool finished;
    dm_status status;
    dm_error *err; /* of a failure; NULL where there was no memory for it */
};

dm_work *
dm_work_hold(dm_work *work)
{
    atomic_fetch_add_explicit(&work->refs, 1, memory_order_relaxed);
    return work;
}

void
dm_work_release(dm_work *work)
{
    if (work == NULL) {
        return;
    }
    /* Release and acquire: see dm_world_release. */
    if (atomic_fetch_sub_explicit(&work->refs, 1, memory_order_acq_rel) != 1) {
        return;
    }
    dm_group_release(work->group);
    dm_free(work->err);
    dm_free(work);
}

/* Before the turn passes on: who sees a later operation end sees this one finished. The
 * waiters are woken when the turn passes. */
static void
finish(void *arg, dm_status status, const dm_error *err)
{
    dm_work *work = arg;
    work->status = status;
    if (status != DM_OK) {
        work->err = dm_memdup(err, sizeof(*err));
    }
    if (work->done != NULL) {
        work->done(work->arg, status);
    }
    atomic_store_explicit(&work->finished, true, memory_order_release);
}

static void
perform(dm_work *work)
{
    dm_wait forever = DM_WAIT_FOREVER;
    dm_settle settle = {finish, work};
    dm_error err;
    dm_group_perform(work->group, &work->op, &forever, &settle, &err);
}

/* On the queue's thread. */
static void
run(dm_job *job)
{
    dm_work *work = (dm_work *)job;
    perform(work);
    dm_work_release(work);
}

/* Numbers the work and, where it is not done on the spot, queues it: both under the
 * lock, so that the queue's order is the order of numbers. */
static dm_status
give_locked(dm_group *group, dm_work *work, dm_error *err)
{
    DM_TRY(dm_group_admit_locked(group, err));
    work->op.seq = group->given + 1;
    if (!group->local) {
        if (group->queue == NULL) {
            DM_TRY(dm_queue_new("dm-group", &group->queue, err));
        }
        dm_work_hold(work);
        dm_status status = dm_queue_push(group->queue, &work->job, err);
        if (status != DM_OK) {
            atomic_fetch_sub_explicit(&work->refs, 1, memory_order_relaxed);
            work->op.seq = 0;
            return status;
        }
    }
    group->given++;
    return DM_OK;
}

dm_status
dm_group_submit(dm_group *group, const dm_op *op,
                void (*done)(void *arg, dm_status status), void *arg, dm_work **work,
                dm_error *err)
{
    dm_op copy = *op;
    copy.seq = 0;
    DM_TRY(dm_group_check(group, &copy, err));

    dm_work *w = dm_calloc(1, sizeof(*w));
    if (w == NULL) {
        return dm_error_set_no_memory(err, "an asynchronous operation");
    }
    w->job.run = run;
    atomic_init(&w->refs, 1);
    atomic_init(&w->finished, false);
    w->group = dm_group_hold(group);
    w->op = copy;
    w->source = DM_ANY_RANK;
    if (w->op.kind == DM_OP_RECV && w->op.source == NULL) {
        w->op.source = &w->source;
    }
    w->done = done;
    w->arg = arg;

    pthread_mutex_lock(&group->lock);
    dm_status status = give_locked(group, w, err);
    pthread_mutex_unlock(&group->lock);
    if (status != DM_OK) {
        dm_group_error_context(group, &copy, err);
        dm_work_release(w);
        return status;
    }
    if (group->local) {
        perform(w);
    }
    *work = w;
    return DM_OK;
}

bool
dm_work_is_done(const dm_work *work)
{
    return atomic_load_explicit(&work->finished, memory_order_acquire);
}

static dm_status
result(const dm_work *work, dm_error *err)
{
    if (work->status == DM_OK) {
        return DM_OK;
    }
    if (work->err == NULL) {
        return dm_error_set(err, work->status,
                            "%s #%" PRIu64 " failed (%s); there was no memory for more",
                            dm_op_name(work->op.kind), work->op.seq,
                            dm_status_name(work->status));
    }
    if (err != NULL) {
        memcpy(err, work->err, sizeof(*err));
    }
    return work->status;
}

dm_status
dm_work_wait(dm_work *work, const dm_wait *wait, dm_error *err)
{
    dm_group *group = work->group;
    if (dm_work_is_done(work)) {
        return result(work, err);
    }
    DM_TRY(dm_world_check_process(group->world, err));

    for (;;) {
        pthread_mutex_lock(&group->lock);
        if (!dm_work_is_done(work)) {
            dm_group_wait_changed_locked(group, wait);
        }
        pthread_mutex_unlock(&group->lock);
        if (dm_work_is_done(work)) {
            return result(work, err);
        }
        dm_status status = dm_wait_poll(wait, err);
        if (status == DM_ERR_TIMEOUT) {
            dm_error_set(err, status, "the operation is still running");
            dm_group_error_context(group, &work->op, err);
        }
        DM_TRY(status);
    }
}

uint64_t
dm_work_seq(const dm_work *work)
{
    return work->op.seq;
}

dm_op_kind
dm_work_kind(const dm_work *work)
{
    return work->op.kind;
}

int32_t
dm_work_source(const dm_work *work)
{
    return work->source;
}

dm_group *
dm_work_group(const dm_work *work)
{
    return work->group;
}

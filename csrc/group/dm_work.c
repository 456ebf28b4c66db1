/* Asynchronous operations: see dm_group.h.
 *
 * A work is held by its maker and by the queue until it has run; it holds its group.
 * Its result is written before `finished` is set (release) and read after it was seen
 * (acquire); waiters sleep on the group's condition.
 */
#include <inttypes.h>
#include <stddef.h>
#include <string.h>

#include "base/dm_alloc.h"
#include "group/dm_private.h"

struct dm_work {
    dm_job job;        /* first */
    dm_mail_item item; /* of a message */
    atomic_int refs;
    dm_group *group;
    dm_op op;
    int32_t source; /* recv */
    void (*done)(void *arg, dm_status status);
    void *arg;

    atomic_bool finished;
    dm_notice *notices; /* guarded by the group's lock */
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

/* Before the turn passes on: who sees a later operation end sees this one finished. */
static void
finish(void *arg, dm_status status, const dm_error *err)
{
    dm_work *work = arg;
    dm_group *group = work->group;
    work->status = status;
    if (status != DM_OK) {
        work->err = dm_memdup(err, sizeof(*err));
    }
    if (work->done != NULL) {
        work->done(work->arg, status);
    }
    pthread_mutex_lock(&group->lock);
    atomic_store_explicit(&work->finished, true, memory_order_release);
    dm_notice *notice = work->notices;
    work->notices = NULL;
    if (group->waiters != 0) {
        pthread_cond_broadcast(&group->changed);
    }
    pthread_mutex_unlock(&group->lock);
    while (notice != NULL) {
        dm_notice *next = notice->next;
        notice->call(notice);
        notice = next;
    }
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

/* The mail is through with a message. */
static void
message_ended(dm_mail_item *item, dm_status status, const dm_error *err)
{
    dm_work *work = (dm_work *)((char *)item - offsetof(dm_work, item));
    dm_error own = DM_ERROR_INIT;
    if (status != DM_OK) {
        dm_error_set(&own, status, "%s", err != NULL ? err->text : "out of memory");
        dm_group_error_context(work->group, &work->op, &own);
        if (dm_group_breaks(status)) {
            dm_group_fail(work->group, &own);
        }
    }
    finish(work, status, &own);
    dm_work_release(work);
}

static dm_status
post(dm_work *work, dm_error *err)
{
    work->item.deadline = dm_clock_deadline(dm_group_timeout(work->group));
    work->item.ended = message_ended;
    dm_work_hold(work);
    dm_status status = dm_group_post(work->group, &work->op, &work->item, err);
    if (status != DM_OK) {
        atomic_fetch_sub_explicit(&work->refs, 1, memory_order_relaxed);
    }
    return status;
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

/* A work that has been checked and nothing else. */
static dm_status
work_new(dm_group *group, const dm_op *op, void (*done)(void *arg, dm_status status),
         void *arg, dm_work **work, dm_error *err)
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
    *work = w;
    return DM_OK;
}

/* Gives a message or, in a local group, does the operation. */
static dm_status
give_unlocked(dm_group *group, dm_work *work, dm_error *err)
{
    if (dm_group_mails(group, &work->op)) {
        return post(work, err);
    }
    if (group->local) {
        perform(work);
    }
    return DM_OK;
}

dm_status
dm_group_submit(dm_group *group, const dm_op *op,
                void (*done)(void *arg, dm_status status), void *arg, dm_work **work,
                dm_error *err)
{
    dm_work *w = NULL;
    DM_TRY(work_new(group, op, done, arg, &w, err));
    dm_status status = DM_OK;
    if (!dm_group_mails(group, op)) {
        pthread_mutex_lock(&group->lock);
        status = give_locked(group, w, err);
        pthread_mutex_unlock(&group->lock);
    }
    if (status == DM_OK) {
        status = give_unlocked(group, w, err);
    }
    if (status != DM_OK) {
        dm_group_error_context(group, &w->op, err);
        dm_work_release(w);
        return status;
    }
    *work = w;
    return DM_OK;
}

/* All collectives among the orders, which the queue takes all or none of: only starting
 * its thread can fail. */
static dm_status
give_all_locked(dm_group *group, dm_order *orders, size_t count, dm_error *err)
{
    DM_TRY(dm_group_admit_locked(group, err));
    for (size_t i = 0; i < count; i++) {
        if (!dm_group_mails(group, &orders[i].op)) {
            DM_TRY(give_locked(group, orders[i].work, err));
        }
    }
    return DM_OK;
}

dm_status
dm_group_submit_all(dm_group *group, dm_order *orders, size_t count, dm_error *err)
{
    dm_status status = DM_OK;
    size_t made = 0;
    for (; made < count && status == DM_OK; made++) {
        dm_order *order = &orders[made];
        order->work = NULL;
        status =
            work_new(group, &order->op, order->done, order->arg, &order->work, err);
    }
    if (status == DM_OK) {
        pthread_mutex_lock(&group->lock);
        status = give_all_locked(group, orders, count, err);
        pthread_mutex_unlock(&group->lock);
        if (status != DM_OK) {
            dm_group_error_context(group, &orders[0].op, err);
        }
    }
    if (status != DM_OK) {
        for (size_t i = 0; i < made; i++) {
            dm_work_release(orders[i].work);
            orders[i].work = NULL;
        }
        return status;
    }
    /* From here on what cannot be given ends with its error. */
    for (size_t i = 0; i < count; i++) {
        dm_work *work = orders[i].work;
        dm_error own;
        dm_status given = give_unlocked(group, work, &own);
        if (given != DM_OK) {
            dm_group_error_context(group, &work->op, &own);
            finish(work, given, &own);
        }
    }
    return DM_OK;
}

bool
dm_work_notify(dm_work *work, dm_notice *notice)
{
    dm_group *group = work->group;
    if (dm_work_is_done(work) || dm_world_check_process(group->world, NULL) != DM_OK) {
        return false;
    }
    pthread_mutex_lock(&group->lock);
    bool running = !dm_work_is_done(work);
    if (running) {
        dm_notice **tail = &work->notices;
        while (*tail != NULL) {
            tail = &(*tail)->next;
        }
        notice->next = NULL;
        *tail = notice;
    }
    pthread_mutex_unlock(&group->lock);
    return running;
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

dm_status
dm_group_run_message(dm_group *group, dm_op *op, const dm_wait *wait, dm_error *err)
{
    dm_work *work = NULL;
    dm_error own;
    err = err != NULL ? err : &own;
    DM_TRY(dm_group_submit(group, op, NULL, NULL, &work, err));
    op->seq = work->op.seq;
    dm_status status = dm_work_wait(work, wait, err);
    if (!dm_work_is_done(work)) {
        dm_wait forever = DM_WAIT_FOREVER;
        if (status != DM_ERR_TIMEOUT) {
            dm_group_error_context(group, &work->op, err);
        }
        dm_group_fail(group, err);
        dm_work_wait(work, &forever, NULL);
    }
    dm_work_release(work);
    return status;
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

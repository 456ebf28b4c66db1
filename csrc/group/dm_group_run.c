/* Groups at work: see dm_group.h.
 *
 * Operations take turns by their number: operation n runs when n-1 have ended, on the
 * thread that gave it, or on the queue's thread when it is asynchronous. Whoever has
 * the turn is alone in the communicator and touches it without the lock. `stop` ends
 * what runs (it is read between slices); the communicator is freed by whoever finds
 * the group stopped and nobody running: close, or the operation that was the last one
 * out. An operation that fails half way, or that gives up its turn, breaks the group:
 * the other members count on it.
 */
#include "group/dm_group.h"

#include <inttypes.h>
#include <stdio.h>
#include <time.h>

#include "backend/reduce/dm_premul.h"
#include "base/dm_alloc.h"
#include "group/dm_private.h"

/* How often a group that waits for its members looks for a disagreement. */
#define MARK_INTERVAL_NS (250 * DM_NS_PER_MS)
/* Members that are on their way are not worth a look. */
#define MARK_DELAY_NS (50 * DM_NS_PER_MS)

/* The group was closed or aborted. */
static dm_status
say_stopped(const dm_group *group, const char *when, dm_error *err)
{
    dm_status why = atomic_load_explicit(&group->stop, memory_order_relaxed);
    return dm_error_set(err, why, "the group was %s%s",
                        why == DM_ERR_CLOSED ? "closed" : "aborted", when);
}

dm_status
dm_group_admit_locked(dm_group *group, dm_error *err)
{
    if (dm_group_is_closed(group)) {
        return say_stopped(group, "", err);
    }
    if (group->broken) {
        return dm_error_set(err, DM_ERR_CLOSED,
                            "the group is broken by an earlier failure: %s",
                            group->why != NULL ? group->why : "(its text is lost)");
    }
    return DM_OK;
}

/* --- stopping ---------------------------------------------------------------------- */

static void
wake_locked(dm_group *group)
{
    if (group->waiters != 0) {
        pthread_cond_broadcast(&group->changed);
    }
}

void
dm_group_stop(dm_group *group, dm_status why)
{
    if (dm_world_check_process(group->world, NULL) != DM_OK) {
        int none = DM_OK;
        atomic_compare_exchange_strong(&group->stop, &none, why);
        return;
    }
    pthread_mutex_lock(&group->lock);
    dm_mail *mail = NULL;
    if (!dm_group_is_closed(group)) {
        mail = group->mail;
        atomic_store_explicit(&group->stop, why, memory_order_relaxed);
        if (group->comm != NULL) {
            group->backend->comm_abort(group->comm);
        }
        if (group->queue != NULL) {
            dm_queue_stop(group->queue);
        }
        wake_locked(group);
    }
    pthread_mutex_unlock(&group->lock);
    if (mail != NULL) {
        dm_error err;
        say_stopped(group, " while the message was under way", &err);
        dm_mail_stop(mail, why, err.text, why == DM_ERR_ABORTED ? &err : NULL);
    }
}

void
dm_group_abort(dm_group *group)
{
    dm_group_stop(group, DM_ERR_ABORTED);
}

/* Frees the communicator of a stopped group once nobody is inside it. */
static void
clean(dm_group *group)
{
    dm_comm *comm = NULL;
    pthread_mutex_lock(&group->lock);
    if (dm_group_is_closed(group) && !group->running) {
        comm = group->comm;
        group->comm = NULL;
    }
    pthread_mutex_unlock(&group->lock);
    if (comm != NULL) {
        group->backend->comm_free(comm, false);
    }
}

dm_status
dm_group_close(dm_group *group, dm_error *err)
{
    (void)err;
    dm_group_stop(group, DM_ERR_CLOSED);
    if (dm_world_check_process(group->world, NULL) != DM_OK) {
        return DM_OK;
    }

    dm_wait forever = DM_WAIT_FOREVER;
    pthread_mutex_lock(&group->lock);
    dm_queue *queue = group->queue;
    dm_mail *mail = group->mail;
    /* Called from inside an operation (by a signal handler, by a `done` function): the
     * operation itself cleans up when it gets out. */
    while (group->running && !pthread_equal(group->runner, pthread_self())) {
        dm_group_wait_changed_locked(group, &forever);
    }
    pthread_mutex_unlock(&group->lock);
    if (queue != NULL) {
        dm_queue_join(queue);
    }
    if (mail != NULL) {
        dm_mail_join(mail);
    }
    clean(group);
    return DM_OK;
}

/* --- operations -------------------------------------------------------------------- */

void
dm_group_wait_changed_locked(dm_group *group, const dm_wait *wait)
{
    int64_t until = dm_clock_deadline(dm_wait_slice(wait));
    struct timespec ts = {.tv_sec = until / DM_NS_PER_S,
                          .tv_nsec = until % DM_NS_PER_S};
    group->waiters++;
    pthread_cond_timedwait(&group->changed, &group->lock, &ts);
    group->waiters--;
}

/* Refuses all further work because of `err`. The lock is held. */
static void
break_locked(dm_group *group, const dm_error *err)
{
    if (!group->broken) {
        group->broken = true;
        group->why = dm_strdup(err->text);
        if (group->comm != NULL) {
            group->backend->comm_abort(group->comm);
        }
    }
    wake_locked(group);
}

/* What break_locked leaves to be done without the lock. */
static void
break_mail(dm_group *group, const dm_error *err)
{
    char text[sizeof(err->text)];
    snprintf(text, sizeof(text), "the group is broken by an earlier failure: %.1400s",
             err->text);
    dm_group_stop_mail(group, DM_ERR_CLOSED, text, err);
}

void
dm_group_fail(dm_group *group, const dm_error *err)
{
    pthread_mutex_lock(&group->lock);
    break_locked(group, err);
    pthread_mutex_unlock(&group->lock);
    break_mail(group, err);
}

/* DM_OK once operation `seq` has the turn. The lock is held; it is released while this
 * waits. */
static dm_status
wait_turn_locked(dm_group *group, uint64_t seq, const dm_wait *wait, dm_error *err)
{
    for (;;) {
        DM_TRY(dm_group_admit_locked(group, err));
        if (group->ended == seq - 1) {
            return DM_OK;
        }
        pthread_mutex_unlock(&group->lock);
        dm_status status = dm_wait_poll(wait, err);
        pthread_mutex_lock(&group->lock);
        if (status == DM_ERR_TIMEOUT) {
            dm_error_set(err, status,
                         "timed out while waiting for operation #%" PRIu64
                         " of the group to end",
                         group->ended + 1);
        }
        DM_TRY(status);
        if (group->ended != seq - 1) {
            dm_group_wait_changed_locked(group, wait);
        }
    }
}

/* How an operation waits: what ends it is the group, then its caller. */
typedef struct op_wait {
    dm_wait wait;
    const dm_wait *outer;
    dm_group *group;
    int64_t next_look; /* for a disagreement; DM_FOREVER: none */
} op_wait;

static dm_status
poll_stop(void *arg, dm_error *err)
{
    op_wait *w = arg;
    if (dm_group_is_closed(w->group)) {
        return say_stopped(w->group, " while the operation was running", err);
    }
    if (w->outer->poll != NULL) {
        return w->outer->poll(w->outer->arg, err);
    }
    return DM_OK;
}

/* As poll_stop; looks for a disagreement now and then, since members that found one
 * will not come. */
static dm_status
poll_connect(void *arg, dm_error *err)
{
    op_wait *w = arg;
    DM_TRY(poll_stop(w, err));
    int64_t now = dm_clock_now();
    if (now < w->next_look) {
        return DM_OK;
    }
    w->next_look = now + MARK_INTERVAL_NS;

    int64_t deadline = dm_clock_deadline(DM_NS_PER_S);
    if (deadline > w->wait.deadline) {
        deadline = w->wait.deadline;
    }
    dm_wait wait = {deadline, poll_stop, w};
    dm_error found;
    dm_status status =
        dm_world_check_marks(w->group->world, dm_group_name(w->group), &wait, &found);
    switch (status) {
    case DM_ERR_MISMATCH:
    case DM_ERR_INTERRUPTED:
    case DM_ERR_CLOSED:
    case DM_ERR_ABORTED:
        return dm_error_set(err, status, "%s", found.text);
    default:
        return DM_OK; /* a store in trouble shows itself to the connect */
    }
}

static dm_status
connect(dm_group *group, op_wait *w, dm_error *err)
{
    w->wait.poll = poll_connect;
    w->next_look = dm_clock_now() + MARK_DELAY_NS;
    dm_status status = group->backend->comm_connect(group->comm, &w->wait, err);
    w->wait.poll = poll_stop;
    /* Also where another member gave up: it may have waited for who asked for something
     * else. */
    if ((status == DM_ERR_TIMEOUT || status == DM_ERR_PEER) && err != NULL) {
        dm_world_explain_missing(group->world, group->ranks, group->config.size, err);
    }
    if (status == DM_OK) {
        group->connected = true;
    }
    return status;
}

/* The operation in the backend, in terms that this one knows. */
static dm_status
run_in_backend(dm_group *group, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    const dm_backend *backend = group->backend;
    if (op->reduce != DM_PREMUL_SUM || !dm_op_is_reduction(op->kind) ||
        (backend->flags & DM_BACKEND_PREMUL_SUM) != 0) {
        return backend->comm_run(group->comm, op, wait, err);
    }
    dm_premul premul;
    DM_TRY(dm_premul_begin(&premul, op, group->config.size, err));
    dm_status status = backend->comm_run(group->comm, &premul.op, wait, err);
    dm_premul_end(&premul);
    return status;
}

/* Inside the communicator, on the thread that has the turn. */
static dm_status
run(dm_group *group, const dm_op *op, const dm_wait *wait, dm_error *err)
{
    if (group->local) {
        return run_in_backend(group, op, wait, err);
    }
    int64_t deadline = dm_clock_deadline(dm_group_timeout(group));
    if (deadline > wait->deadline) {
        deadline = wait->deadline;
    }
    op_wait w = {.outer = wait, .group = group, .next_look = DM_FOREVER};
    w.wait = (dm_wait){deadline, poll_stop, &w};
    if (!group->connected) {
        DM_TRY(connect(group, &w, err));
    }
    return run_in_backend(group, op, &w.wait, err);
}

bool
dm_group_breaks(dm_status status)
{
    return status <= DM_ERR_TIMEOUT;
}

dm_status
dm_group_perform(dm_group *group, const dm_op *op, const dm_wait *wait,
                 const dm_settle *settle, dm_error *err)
{
    dm_error own;
    if (err == NULL) {
        err = &own; /* the group remembers its first failure */
    }

    pthread_mutex_lock(&group->lock);
    dm_status status = wait_turn_locked(group, op->seq, wait, err);
    bool turn = status == DM_OK;
    if (turn) {
        group->running = true;
        group->runner = pthread_self();
    }
    pthread_mutex_unlock(&group->lock);

    if (turn) {
        status = run(group, op, wait, err);
        if (status != DM_OK && dm_group_is_closed(group)) {
            status = say_stopped(group, " while the operation was running", err);
        }
    }
    if (status != DM_OK) {
        dm_group_error_context(group, op, err);
    }
    if (settle != NULL) {
        settle->settle(settle->arg, status, err);
    }

    pthread_mutex_lock(&group->lock);
    if (turn) {
        group->running = false;
        group->ended = op->seq;
    }
    if (dm_group_breaks(status)) {
        break_locked(group, err);
    }
    wake_locked(group);
    bool stopped = dm_group_is_closed(group);
    bool broken = status != DM_OK && group->broken;
    pthread_mutex_unlock(&group->lock);
    if (broken) {
        break_mail(group, err);
    }
    if (stopped) {
        clean(group);
    }
    return status;
}

dm_status
dm_group_run(dm_group *group, dm_op *op, const dm_wait *wait, dm_error *err)
{
    op->seq = 0;
    DM_TRY(dm_group_check(group, op, err));
    if (dm_group_mails(group, op)) {
        return dm_group_run_message(group, op, wait, err);
    }

    pthread_mutex_lock(&group->lock);
    dm_status status = dm_group_admit_locked(group, err);
    if (status == DM_OK) {
        op->seq = ++group->given;
    }
    pthread_mutex_unlock(&group->lock);
    if (status != DM_OK) {
        dm_group_error_context(group, op, err);
        return status;
    }
    return dm_group_perform(group, op, wait, NULL, err);
}

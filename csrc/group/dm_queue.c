/* A FIFO of jobs and its thread: see dm_queue.h.
 *
 * One mutex guards everything. The queue is freed by dm_queue_free, or by the thread
 * where there still is one at that moment (`orphan`).
 */
#include "group/dm_queue.h"

#include <assert.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>

#include "base/dm_alloc.h"

struct dm_queue {
    pthread_mutex_t lock;
    pthread_cond_t arrived; /* a job, or `stopping` */
    pthread_cond_t joined;
    dm_job *head;
    dm_job *tail;
    pthread_t thread;
    bool started;  /* there is a thread that nobody has joined or detached */
    bool joining;  /* somebody is joining it */
    bool stopping; /* no further jobs */
    bool left;     /* the thread does not touch the queue any more */
    bool orphan;   /* the thread frees the queue */
    char name[16];
};

static void
destroy(dm_queue *queue)
{
    pthread_cond_destroy(&queue->joined);
    pthread_cond_destroy(&queue->arrived);
    pthread_mutex_destroy(&queue->lock);
    dm_free(queue);
}

static void *
work(void *arg)
{
    dm_queue *queue = arg;
    pthread_setname_np(pthread_self(), queue->name);

    pthread_mutex_lock(&queue->lock);
    for (;;) {
        while (queue->head == NULL && !queue->stopping) {
            pthread_cond_wait(&queue->arrived, &queue->lock);
        }
        dm_job *job = queue->head;
        if (job == NULL) {
            break;
        }
        queue->head = job->next;
        pthread_mutex_unlock(&queue->lock);
        job->run(job);
        pthread_mutex_lock(&queue->lock);
    }
    queue->left = true;
    bool orphan = queue->orphan;
    pthread_mutex_unlock(&queue->lock);
    if (orphan) {
        destroy(queue);
    }
    return NULL;
}

dm_status
dm_queue_new(const char *name, dm_queue **queue, dm_error *err)
{
    dm_queue *q = dm_calloc(1, sizeof(*q));
    if (q == NULL) {
        return dm_error_set_no_memory(err, "a queue");
    }
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->arrived, NULL);
    pthread_cond_init(&q->joined, NULL);
    snprintf(q->name, sizeof(q->name), "%s", name);
    *queue = q;
    return DM_OK;
}

/* All signals are blocked in the new thread. */
static dm_status
start_locked(dm_queue *queue, dm_error *err)
{
    sigset_t all;
    sigset_t old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int failed = pthread_create(&queue->thread, NULL, work, queue);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (failed != 0) {
        return dm_error_set_errno(err, failed,
                                  "cannot start the thread of asynchronous operations");
    }
    queue->started = true;
    return DM_OK;
}

dm_status
dm_queue_push(dm_queue *queue, dm_job *job, dm_error *err)
{
    dm_status status = DM_OK;
    pthread_mutex_lock(&queue->lock);
    if (queue->stopping) {
        status = dm_error_set(err, DM_ERR_CLOSED, "the queue is stopped");
    }
    else if (!queue->started) {
        status = start_locked(queue, err);
    }
    if (status == DM_OK) {
        job->next = NULL;
        if (queue->head == NULL) {
            queue->head = job;
        }
        else {
            queue->tail->next = job;
        }
        queue->tail = job;
        pthread_cond_signal(&queue->arrived);
    }
    pthread_mutex_unlock(&queue->lock);
    return status;
}

void
dm_queue_stop(dm_queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    queue->stopping = true;
    pthread_cond_signal(&queue->arrived);
    pthread_mutex_unlock(&queue->lock);
}

void
dm_queue_join(dm_queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    assert(queue->stopping);
    if (queue->started && !pthread_equal(queue->thread, pthread_self())) {
        if (queue->joining) {
            while (queue->started) {
                pthread_cond_wait(&queue->joined, &queue->lock);
            }
        }
        else {
            queue->joining = true;
            pthread_mutex_unlock(&queue->lock);
            pthread_join(queue->thread, NULL);
            pthread_mutex_lock(&queue->lock);
            queue->started = false;
            pthread_cond_broadcast(&queue->joined);
        }
    }
    pthread_mutex_unlock(&queue->lock);
}

void
dm_queue_free(dm_queue *queue, bool forked)
{
    if (queue == NULL) {
        return;
    }
    if (forked) {
        /* The locks may have been held at the fork: they are left alone. */
        dm_free(queue);
        return;
    }
    pthread_mutex_lock(&queue->lock);
    assert(queue->head == NULL);
    bool running = queue->started && !queue->left;
    if (running) {
        queue->stopping = true;
        queue->orphan = true;
        pthread_detach(queue->thread);
        pthread_cond_signal(&queue->arrived);
    }
    pthread_mutex_unlock(&queue->lock);
    if (running) {
        return;
    }
    if (queue->started) {
        pthread_join(queue->thread, NULL); /* it is about to return, if it has not */
    }
    destroy(queue);
}

/* A FIFO of jobs and the one thread that runs them.
 *
 * The thread starts with the first job and ends with dm_queue_stop; it blocks all
 * signals, so that they go to the threads of the program. It knows nothing of groups;
 * jobs that must not run any more say so themselves: what is queued when the queue is
 * stopped is still run. Functions may be called from any thread, jobs included.
 */
#ifndef DM_QUEUE_H
#define DM_QUEUE_H

#include <stdbool.h>

#include "base/dm_status.h"

typedef struct dm_queue dm_queue;

/* The head of a job. `run` is called once, with no lock held; the queue does not touch
 * the job any more once it has called it, so it may free it. */
typedef struct dm_job {
    struct dm_job *next; /* the queue's */
    void (*run)(struct dm_job *job);
} dm_job;

/* Starts no thread. `name` is what tools show for the thread (15 bytes at most). */
dm_status
dm_queue_new(const char *name, dm_queue **queue, dm_error *err);

/* DM_ERR_CLOSED after dm_queue_stop; DM_ERR_SYSTEM when the thread cannot be started.
 * The job was not taken then. */
dm_status
dm_queue_push(dm_queue *queue, dm_job *job, dm_error *err);

/* Refuses further jobs and lets the thread end once it has run what is queued. Does not
 * wait. Idempotent. */
void
dm_queue_stop(dm_queue *queue);

/* After dm_queue_stop: waits until the thread is gone. Returns at once on the thread
 * itself and when there is none. */
void
dm_queue_join(dm_queue *queue);

/* Stops the queue and frees it, the thread being the last to touch it: does not wait.
 * No job may be queued. `forked`: in a forked child, where the thread does not exist.
 * NULL is fine. */
void
dm_queue_free(dm_queue *queue, bool forked);

#endif

/* Works that tell when they have ended: see py_notices.h.
 *
 * The mutex guards all of it. It is taken by threads that end operations, so it is never
 * held while the GIL is asked for.
 */
#include "python/py_notices.h"

#include <pthread.h>
#include <time.h>

#include "base/dm_alloc.h"
#include "base/dm_clock.h"

/* The waiting thread has nothing else to look after. */
#define LONGEST_WAIT_NS (3600 * DM_NS_PER_S)

typedef struct notice {
    dm_notice head; /* first */
    py_notices *notices;
    uint64_t token;
    struct notice *next;
} notice;

struct py_notices {
    pthread_mutex_t lock;
    pthread_cond_t arrived;
    int refs; /* the module's, and one for each notice that has not been called */
    notice *first;
    notice **last;
};

py_notices *
py_notices_new(void)
{
    py_notices *notices = dm_calloc(1, sizeof(*notices));
    if (notices == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    pthread_mutex_init(&notices->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&notices->arrived, &attributes);
    pthread_condattr_destroy(&attributes);
    notices->refs = 1;
    notices->last = &notices->first;
    return notices;
}

static void
release_locked(py_notices *notices)
{
    bool last = --notices->refs == 0;
    pthread_mutex_unlock(&notices->lock);
    if (!last) {
        return;
    }
    while (notices->first != NULL) {
        notice *n = notices->first;
        notices->first = n->next;
        dm_free(n);
    }
    pthread_cond_destroy(&notices->arrived);
    pthread_mutex_destroy(&notices->lock);
    dm_free(notices);
}

void
py_notices_release(py_notices *notices)
{
    if (notices != NULL) {
        pthread_mutex_lock(&notices->lock);
        release_locked(notices);
    }
}

static void
arrive(dm_notice *head)
{
    notice *n = (notice *)head;
    py_notices *notices = n->notices;
    pthread_mutex_lock(&notices->lock);
    n->next = NULL;
    *notices->last = n;
    notices->last = &n->next;
    pthread_cond_signal(&notices->arrived);
    release_locked(notices);
}

int
py_notices_add(py_notices *notices, dm_work *work, uint64_t token)
{
    notice *n = dm_calloc(1, sizeof(*n));
    if (n == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    n->head.call = arrive;
    n->notices = notices;
    n->token = token;
    pthread_mutex_lock(&notices->lock);
    notices->refs++;
    pthread_mutex_unlock(&notices->lock);
    if (dm_work_notify(work, &n->head)) {
        return 1;
    }
    dm_free(n);
    py_notices_release(notices);
    return 0;
}

int
py_notices_next(py_notices *notices, uint64_t *token)
{
    PyThreadState *thread = PyEval_SaveThread();
    int64_t until = dm_clock_deadline(LONGEST_WAIT_NS);
    struct timespec ts = {.tv_sec = until / DM_NS_PER_S,
                          .tv_nsec = until % DM_NS_PER_S};
    pthread_mutex_lock(&notices->lock);
    if (notices->first == NULL) {
        pthread_cond_timedwait(&notices->arrived, &notices->lock, &ts);
    }
    notice *n = notices->first;
    if (n != NULL) {
        notices->first = n->next;
        if (notices->first == NULL) {
            notices->last = &notices->first;
        }
        *token = n->token;
    }
    pthread_mutex_unlock(&notices->lock);
    bool there = n != NULL;
    dm_free(n);
    PyEval_RestoreThread(thread);
    return there;
}

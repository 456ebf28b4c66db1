/* Waiting from Python: time-outs in, signals looked at between slices.
 *
 * Usage:
 *     py_waiter waiter = py_waiter_start(deadline);   // releases the GIL
 *     status = dm_something(..., &waiter.wait, &err);
 *     py_waiter_stop(&waiter);                        // takes it back
 *
 * Between slices the waiting thread takes the GIL, runs signal handlers (main thread
 * only) and gives it back; a handler that raises ends the wait with
 * DM_ERR_INTERRUPTED and its exception stands when py_waiter_stop has returned.
 */
#ifndef PY_WAIT_H
#define PY_WAIT_H

#include "base/dm_clock.h"
#include "python/py_state.h"

typedef struct py_waiter {
    dm_wait wait;
    PyThreadState *thread; /* where PyEval_SaveThread put it */
} py_waiter;

/* Fills the waiter in place (wait.arg points to it) and releases the GIL. */
void
py_waiter_start(py_waiter *waiter, int64_t deadline);

void
py_waiter_stop(py_waiter *waiter);

/* Seconds (int, float) or a timedelta -> nanoseconds; None -> -1 (no time-out).
 * Errors name the argument `name` and show the value: negative, NaN, too large, wrong
 * type. Returns 0 or -1. */
int
py_timeout_parse(PyObject *value, const char *name, int64_t *timeout_ns);

/* Nanoseconds -> float seconds, or None for a negative one. New reference. */
PyObject *
py_timeout_object(int64_t timeout_ns);

#endif

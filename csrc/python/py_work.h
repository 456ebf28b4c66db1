/* The Work type: an asynchronous operation.
 *
 * What an operation needs until it has ended is a py_pending: the dm_work and the arrays
 * that stay exported. It belongs to its Work. Ended: the arrays are released by whoever
 * notices first with the GIL (wait, is_completed, the Work's end). A Work that is dropped
 * earlier leaves its py_pending in a list of the module state, which later calls look
 * through (py_work_sweep). So the thread that runs the operation never needs the GIL,
 * and nothing is released while it runs.
 */
#ifndef PY_WORK_H
#define PY_WORK_H

#include "group/dm_group.h"
#include "python/py_hold.h"
#include "python/py_state.h"

typedef struct py_pending {
    py_pending_link link; /* first; in no list until submitted */
    dm_work *work;        /* held; NULL until submitted */
    py_hold hold;
    struct py_pending *next; /* in a batch, which is submitted as a whole */
    dm_op op;                /* likewise */
} py_pending;

/* Empty lists; before anything else is done with the state. */
void
py_work_state_init(py_state *state);

void
py_work_sweep_dropped(py_state *state);

/* An empty one, or NULL with MemoryError. */
py_pending *
py_pending_new(void);

/* Releases the arrays and frees it; the operation has ended or was never submitted. */
void
py_pending_free(py_pending *pending);

/* A Work for a submitted operation (pending->work is set); takes over `pending`, also on failure. New
 * reference. */
PyObject *
py_work_new(py_state *state, py_pending *pending);

/* Frees what dropped Works left behind and has ended by now. */
static inline void
py_work_sweep(py_state *state)
{
    if (state->dropped_works.next != &state->dropped_works) {
        py_work_sweep_dropped(state);
    }
}

#endif

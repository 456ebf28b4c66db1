/* Works that tell when they have ended: what Work.add_done_callback is made of.
 *
 * The thread that ends an operation never takes the GIL, so it leaves a number in a list;
 * a thread of Python (devicemesh/callbacks.py) takes numbers out of it and knows what they
 * stand for. The list outlives the module: operations may end after it.
 */
#ifndef PY_NOTICES_H
#define PY_NOTICES_H

#include "group/dm_group.h"
#include "python/py_state.h"

typedef struct py_notices py_notices;

/* NULL with MemoryError. */
py_notices *
py_notices_new(void);

/* The module lets go of it. NULL is fine. */
void
py_notices_release(py_notices *notices);

/* 1: `token` will be in the list once the work has ended; 0: it has ended already; -1 with
 * MemoryError. */
int
py_notices_add(py_notices *notices, dm_work *work, uint64_t token);

/* The next number, waited for with the GIL released: 1, or 0 when there is none yet (which
 * is no reason to stop waiting). For a thread that handles no signals. */
int
py_notices_next(py_notices *notices, uint64_t *token);

#endif

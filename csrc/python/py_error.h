/* Records become exceptions: the one place where the core's errors are raised. */
#ifndef PY_ERROR_H
#define PY_ERROR_H

#include "base/dm_status.h"
#include "python/py_state.h"

/* Raises what the record says and returns NULL. DM_ERR_INTERRUPTED keeps the
 * exception that the signal handler raised. */
PyObject *
py_raise(py_state *state, const dm_error *err);

/* As py_raise, returns -1. */
int
py_raise_int(py_state *state, const dm_error *err);

#endif

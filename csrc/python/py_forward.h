/* Methods of C types that are written in Python. */
#ifndef PY_FORWARD_H
#define PY_FORWARD_H

#include "python/py_state.h"

/* Calls module.function(self, *args, **kwargs) with the arguments of a METH_FASTCALL |
 * METH_KEYWORDS method. New reference. */
PyObject *
py_forward(const char *module, const char *function, PyObject *self,
           PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);

#endif

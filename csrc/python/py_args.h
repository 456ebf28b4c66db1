/* Arguments of FASTCALL methods: positional or by name, bound to an array. */
#ifndef PY_ARGS_H
#define PY_ARGS_H

#include "python/py_state.h"

typedef struct py_params {
    const char *function;     /* "all_reduce" */
    const char *const *names; /* ASCII */
    int count;
    int required;   /* the first ones */
    int positional; /* how many may be given by position */
} py_params;

/* Binds a METH_FASTCALL | METH_KEYWORDS call: values[i] is borrowed, or left as it is
 * where an optional argument is missing (the caller puts the default there). Returns 0,
 * or -1 with TypeError. */
int
py_args_bind(const py_params *params, PyObject *const *args, Py_ssize_t nargs,
             PyObject *kwnames, PyObject **values);

/* An int (or anything with __index__) in low..high. Errors name the argument and show the
 * value. Returns 0 or -1. */
int
py_args_int(PyObject *value, const char *name, int64_t low, int64_t high,
            int64_t *result);

#endif

/* Arguments of FASTCALL methods: see py_args.h. */
#include "python/py_args.h"

#include <inttypes.h>
#include <stdint.h>

/* The index of the parameter, or -1. */
static int
find_param(const py_params *params, PyObject *name)
{
    for (int i = 0; i < params->count; i++) {
        if (PyUnicode_CompareWithASCIIString(name, params->names[i]) == 0) {
            return i;
        }
    }
    return -1;
}

static int
raise_too_many(const py_params *params, Py_ssize_t nargs)
{
    PyErr_Format(PyExc_TypeError, "%s() takes %s %d positional argument%s (%zd given)",
                 params->function,
                 params->required < params->positional ? "at most" : "exactly",
                 params->positional, params->positional == 1 ? "" : "s", nargs);
    return -1;
}

int
py_args_bind(const py_params *params, PyObject *const *args, Py_ssize_t nargs,
             PyObject *kwnames, PyObject **values)
{
    if (nargs > params->positional) {
        return raise_too_many(params, nargs);
    }
    uint64_t given = 0;
    for (Py_ssize_t i = 0; i < nargs; i++) {
        values[i] = args[i];
        given |= UINT64_C(1) << i;
    }
    Py_ssize_t named = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i);
        int param = find_param(params, name);
        if (param < 0) {
            PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument %R",
                         params->function, name);
            return -1;
        }
        if (given & UINT64_C(1) << param) {
            PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument %R",
                         params->function, name);
            return -1;
        }
        values[param] = args[nargs + i];
        given |= UINT64_C(1) << param;
    }
    for (int i = 0; i < params->required; i++) {
        if (!(given & UINT64_C(1) << i)) {
            PyErr_Format(PyExc_TypeError, "%s() is missing the argument '%s'",
                         params->function, params->names[i]);
            return -1;
        }
    }
    return 0;
}

int
py_args_int(PyObject *value, const char *name, int64_t low, int64_t high,
            int64_t *result)
{
    PyObject *index = PyNumber_Index(value);
    if (index == NULL) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "%s must be an int, got %R", name, value);
        }
        return -1;
    }
    int overflow = 0;
    long long number = PyLong_AsLongLongAndOverflow(index, &overflow);
    Py_DECREF(index);
    if (number == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (overflow != 0 || number < low || number > high) {
        PyErr_Format(PyExc_ValueError, "%s must be in %lld..%lld, got %R", name,
                     (long long)low, (long long)high, value);
        return -1;
    }
    *result = number;
    return 0;
}

/* Waiting from Python: see py_wait.h. */
#include "python/py_wait.h"

#include <math.h>

static dm_status
look_at_signals(void *arg, dm_error *err)
{
    py_waiter *waiter = arg;
    PyEval_RestoreThread(waiter->thread);
    int raised = PyErr_CheckSignals();
    waiter->thread = PyEval_SaveThread();
    if (raised != 0) {
        return dm_error_set(err, DM_ERR_INTERRUPTED, "interrupted by a signal");
    }
    return DM_OK;
}

void
py_waiter_start(py_waiter *waiter, int64_t deadline)
{
    waiter->wait = (dm_wait){deadline, look_at_signals, waiter};
    waiter->thread = PyEval_SaveThread();
}

void
py_waiter_stop(py_waiter *waiter)
{
    PyEval_RestoreThread(waiter->thread);
}

int
py_timeout_parse(PyObject *value, const char *name, int64_t *timeout_ns)
{
    if (value == Py_None) {
        *timeout_ns = -1;
        return 0;
    }

    PyObject *seconds_obj = NULL;
    if (PyFloat_Check(value) || PyIndex_Check(value)) {
        seconds_obj = Py_NewRef(value);
    }
    else {
        /* A timedelta, known by its method: datetime need not be imported here. */
        PyObject *method = PyUnicode_InternFromString("total_seconds");
        if (method == NULL) {
            return -1;
        }
        seconds_obj = PyObject_CallMethodNoArgs(value, method);
        Py_DECREF(method);
        if (seconds_obj == NULL) {
            if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
                PyErr_Format(PyExc_TypeError,
                             "%s must be seconds (int or float), a timedelta or None, "
                             "got %R",
                             name, value);
            }
            return -1;
        }
    }
    double seconds = PyFloat_AsDouble(seconds_obj);
    Py_DECREF(seconds_obj);
    if (seconds == -1.0 && PyErr_Occurred()) {
        return -1;
    }
    if (isnan(seconds) || seconds < 0) {
        PyErr_Format(PyExc_ValueError, "%s must be 0 or more seconds, got %R", name,
                     value);
        return -1;
    }
    /* Longer than 292 years is as good as no time-out. */
    double ns = seconds * (double)DM_NS_PER_S;
    *timeout_ns = ns >= (double)INT64_MAX ? -1 : (int64_t)ns;
    return 0;
}

PyObject *
py_timeout_object(int64_t timeout_ns)
{
    if (timeout_ns < 0) {
        Py_RETURN_NONE;
    }
    return PyFloat_FromDouble((double)timeout_ns / (double)DM_NS_PER_S);
}

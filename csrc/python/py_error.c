/* Records become exceptions: see py_error.h. */
#include "python/py_error.h"

#include <assert.h>

static PyObject *
exception_for(py_state *state, dm_status status)
{
    switch (status) {
    case DM_ERR_VALUE:
        return PyExc_ValueError;
    case DM_ERR_TYPE:
        return PyExc_TypeError;
    case DM_ERR_KEY:
        return PyExc_KeyError;
    case DM_ERR_UNSUPPORTED:
        return PyExc_NotImplementedError;
    case DM_ERR_TIMEOUT:
        return state->timeout_error;
    case DM_ERR_CLOSED:
    case DM_ERR_ABORTED:
    case DM_ERR_FORKED:
        return state->closed_error;
    case DM_ERR_PEER:
        return state->peer_error;
    case DM_ERR_MISMATCH:
        return state->mismatch_error;
    case DM_ERR_CONNECTION:
    case DM_ERR_PROTOCOL:
        return state->connection_error;
    case DM_ERR_NO_MEMORY:
        return PyExc_MemoryError;
    case DM_ERR_SYSTEM:
        return PyExc_OSError;
    case DM_ERR_LIBRARY:
        return state->library_error;
    case DM_OK:
    case DM_ERR_INTERRUPTED:
    case DM_ERR_AGAIN:
    case DM_ERR_STATE:
        break;
    }
    return state->error;
}

/* OSError with its errno, so that the right subclass is chosen. */
static void
raise_os_error(const dm_error *err)
{
    PyObject *args = Py_BuildValue("(is)", err->native, err->text);
    if (args != NULL) {
        PyErr_SetObject(PyExc_OSError, args);
        Py_DECREF(args);
    }
}

PyObject *
py_raise(py_state *state, const dm_error *err)
{
    assert(err->status != DM_OK);
    if (err->status == DM_ERR_INTERRUPTED && PyErr_Occurred()) {
        return NULL;
    }
    if (err->status == DM_ERR_SYSTEM && err->native != 0) {
        raise_os_error(err);
        return NULL;
    }
    PyErr_SetString(exception_for(state, err->status), err->text);
    return NULL;
}

int
py_raise_int(py_state *state, const dm_error *err)
{
    py_raise(state, err);
    return -1;
}

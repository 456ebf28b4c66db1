/* Methods that are written in Python: see py_forward.h. */
#include "python/py_forward.h"

PyObject *
py_forward(const char *module, const char *function, PyObject *self,
           PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    Py_ssize_t named = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    PyObject *result = NULL;
    PyObject *target = NULL;
    PyObject **all = NULL;
    PyObject *imported = PyImport_ImportModule(module);
    if (imported == NULL) {
        return NULL;
    }
    target = PyObject_GetAttrString(imported, function);
    all = PyMem_New(PyObject *, (size_t)(1 + nargs + named));
    if (all == NULL) {
        PyErr_NoMemory();
    }
    if (target != NULL && all != NULL) {
        all[0] = self;
        for (Py_ssize_t i = 0; i < nargs + named; i++) {
            all[1 + i] = args[i];
        }
        result = PyObject_Vectorcall(target, all, (size_t)(1 + nargs), kwnames);
    }
    PyMem_Free(all);
    Py_XDECREF(target);
    Py_DECREF(imported);
    return result;
}

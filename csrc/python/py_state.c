/* Module state: see py_state.h. */
#include "python/py_state.h"

#include "python/py_notices.h"
#include "python/py_work.h"

/* "devicemesh.<name>", based on `base`, added to the module. */
static PyObject *
new_error(PyObject *module, const char *name, PyObject *base, const char *doc)
{
    char full[64];
    PyOS_snprintf(full, sizeof(full), "devicemesh.%s", name);
    PyObject *error = PyErr_NewExceptionWithDoc(full, doc, base, NULL);
    if (error != NULL && PyModule_AddObjectRef(module, name, error) < 0) {
        Py_CLEAR(error);
    }
    return error;
}

int
py_state_init(PyObject *module)
{
    py_state *state = py_state_of_module(module);
    py_work_state_init(state);
    state->notices = py_notices_new();
    if (state->notices == NULL) {
        return -1;
    }

#define X(member, name, base, doc)                                                     \
    state->member = new_error(module, name, base, doc);                                \
    if (state->member == NULL) {                                                       \
        return -1;                                                                     \
    }
    PY_STATE_ERRORS(X)
#undef X

    PyObject *bases = PyTuple_Pack(2, state->error, PyExc_TimeoutError);
    if (bases == NULL) {
        return -1;
    }
    state->timeout_error =
        new_error(module, "GroupTimeoutError", bases,
                  "An operation did not finish in time; the text names the missing "
                  "ranks.");
    Py_DECREF(bases);
    if (state->timeout_error == NULL) {
        return -1;
    }

#define X(member, text)                                                                \
    state->member = PyUnicode_InternFromString(text);                                  \
    if (state->member == NULL) {                                                       \
        return -1;                                                                     \
    }
    PY_STATE_NAMES(X)
#undef X
    return 0;
}

int
py_state_traverse(PyObject *module, visitproc visit, void *arg)
{
    py_state *state = py_state_of_module(module);
#define X(member, ...) Py_VISIT(state->member);
    PY_STATE_TYPES(X)
    PY_STATE_ERRORS(X)
    PY_STATE_NAMES(X)
#undef X
    Py_VISIT(state->timeout_error);
    Py_VISIT(state->default_world);
    Py_VISIT(state->pickled_roots);
    Py_VISIT(state->reused_roots);
    return 0;
}

int
py_state_clear(PyObject *module)
{
    py_state *state = py_state_of_module(module);
    if (state->dropped_works.next != NULL) {
        py_work_sweep(state);
    }
#define X(member, ...) Py_CLEAR(state->member);
    PY_STATE_TYPES(X)
    PY_STATE_ERRORS(X)
    PY_STATE_NAMES(X)
#undef X
    Py_CLEAR(state->timeout_error);
    Py_CLEAR(state->default_world);
    Py_CLEAR(state->pickled_roots);
    Py_CLEAR(state->reused_roots);
    py_notices *notices = state->notices;
    state->notices = NULL;
    py_notices_release(notices);
    return 0;
}

int
py_state_add_type(PyObject *module, PyType_Spec *spec, PyObject *bases,
                  PyTypeObject **slot)
{
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, bases);
    if (type == NULL) {
        return -1;
    }
    *slot = type; /* the state owns this reference */
    return PyModule_AddType(module, type);
}

/* What all operations of a ProcessGroup have in common: see py_group_private.h. */
#include "python/py_group_private.h"

#include <string.h>

#include "python/py_args.h"
#include "python/py_error.h"
#include "python/py_wait.h"

/* Local operations on fewer bytes than this keep the GIL. */
enum { KEEP_GIL_BYTES = 64 * 1024 };

/* --- the call ------------------------------------------------------------------------- */

int
py_call_begin(py_call *c, PyObject *op, PyTypeObject *defining_class, dm_op_kind kind,
              PyObject *async_op)
{
    c->state = PyType_GetModuleState(defining_class);
    c->group = ((py_group *)op)->group;
    memset(&c->op, 0, sizeof(c->op));
    c->op.kind = kind;
    c->op.dtype = DM_UINT8;
    c->pending = NULL;
    c->arrays = c->own;
    for (int i = 0; i < PY_WORK_ARRAYS; i++) {
        c->own[i].holder = PY_ARRAY_NONE;
        c->own[i].bytes = 0;
    }
    if (async_op != Py_False) {
        int wanted = PyObject_IsTrue(async_op);
        if (wanted < 0) {
            return -1;
        }
        if (wanted) {
            c->pending = py_pending_new();
            if (c->pending == NULL) {
                return -1;
            }
            c->arrays = c->pending->arrays;
        }
    }
    py_work_sweep(c->state);
    return 0;
}

PyObject *
py_call_cancel(py_call *c)
{
    if (c->pending != NULL) {
        py_pending_free(c->pending);
    }
    py_array_release(&c->own[0]);
    py_array_release(&c->own[1]);
    return NULL;
}

/* Whether the operation may be run with the GIL held: it waits for nobody and is short. */
static bool
keeps_gil(const py_call *c)
{
    return dm_group_is_local(c->group) && c->arrays[0].bytes < KEEP_GIL_BYTES;
}

static PyObject *
submit(py_call *c)
{
    dm_error err;
    dm_work *work = NULL;
    dm_status status;
    if (!dm_group_is_local(c->group) || keeps_gil(c)) {
        status = dm_group_submit(c->group, &c->op, NULL, NULL, &work, &err);
    }
    else {
        PyThreadState *thread = PyEval_SaveThread();
        status = dm_group_submit(c->group, &c->op, NULL, NULL, &work, &err);
        PyEval_RestoreThread(thread);
    }
    if (status != DM_OK) {
        py_call_cancel(c);
        return py_raise(c->state, &err);
    }
    c->pending->work = work;
    return py_work_new(c->state, c->pending);
}

PyObject *
py_call_perform(py_call *c)
{
    if (c->pending != NULL) {
        return submit(c);
    }
    dm_error err;
    dm_status status;
    if (keeps_gil(c)) {
        dm_wait wait = DM_WAIT_FOREVER;
        status = dm_group_run(c->group, &c->op, &wait, &err);
    }
    else {
        py_waiter waiter;
        py_waiter_start(&waiter, DM_FOREVER);
        status = dm_group_run(c->group, &c->op, &waiter.wait, &err);
        py_waiter_stop(&waiter);
    }
    py_array_release(&c->own[0]);
    py_array_release(&c->own[1]);
    if (status != DM_OK) {
        return py_raise(c->state, &err);
    }
    Py_RETURN_NONE;
}

int
py_call_export(py_call *c, int i, PyObject *object, const char *name, bool writable)
{
    int flags =
        (writable ? PY_ARRAY_WRITABLE : 0) | (c->pending != NULL ? PY_ARRAY_ASYNC : 0);
    return py_array_export(c->state, object, name, flags, &c->arrays[i]);
}

/* --- arguments ------------------------------------------------------------------------ */

/* The factor of a ReduceOp.premul_sum. 0 or -1. */
static int
parse_factor(py_state *state, PyObject *object, double *factor)
{
    PyObject *value = PyObject_GetAttr(object, state->name_factor);
    if (value == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_SetString(PyExc_ValueError, "op 'premul_sum' needs a factor: use "
                                              "ReduceOp.premul_sum(factor)");
        }
        return -1;
    }
    *factor = PyFloat_AsDouble(value);
    Py_DECREF(value);
    return *factor == -1.0 && PyErr_Occurred() ? -1 : 0;
}

int
py_call_parse_reduce(py_state *state, PyObject *object, dm_op *op)
{
    op->reduce = DM_SUM;
    if (object == NULL) {
        return 0;
    }
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError,
                     "op must be a ReduceOp or its name, such as 'sum', got %R",
                     object);
        return -1;
    }
    const char *name = PyUnicode_AsUTF8(object);
    if (name == NULL) {
        return -1;
    }
    if (!dm_reduce_op_parse(name, &op->reduce)) {
        PyErr_Format(PyExc_ValueError,
                     "op must be one of 'sum', 'product', 'min', 'max', 'avg', 'band', "
                     "'bor', 'bxor', 'premul_sum', got %R",
                     object);
        return -1;
    }
    return op->reduce == DM_PREMUL_SUM ? parse_factor(state, object, &op->factor) : 0;
}

int
py_call_parse_rank(PyObject *object, const char *name, int32_t *rank)
{
    int64_t value = 0;
    if (py_args_int(object, name, INT32_MIN, INT32_MAX, &value) < 0) {
        return -1;
    }
    *rank = (int32_t)value; /* the core checks the range */
    return 0;
}

int
py_call_parse_source(PyObject *object, int32_t *rank)
{
    *rank = DM_ANY_RANK;
    if (object == Py_None) {
        return 0;
    }
    if (py_call_parse_rank(object, "src", rank) < 0) {
        return -1;
    }
    if (*rank == DM_ANY_RANK) {
        PyErr_Format(PyExc_ValueError, "src must be a group rank or None, got %R",
                     object);
        return -1;
    }
    return 0;
}

int
py_call_parse_tag(PyObject *object, uint32_t *tag)
{
    int64_t value = 0;
    if (object != NULL && py_args_int(object, "tag", 0, INT32_MAX, &value) < 0) {
        return -1;
    }
    *tag = (uint32_t)value;
    return 0;
}

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
    c->self = (py_group *)op;
    c->group = c->self->group;
    memset(&c->op, 0, sizeof(c->op));
    c->op.kind = kind;
    c->op.dtype = DM_UINT8;
    c->pending = NULL;
    py_hold_init(&c->own);
    c->hold = &c->own;
    c->arrays = c->own.arrays;
    bool collects = py_group_collects(c->self);
    if (async_op != Py_False || collects) {
        int wanted = PyObject_IsTrue(async_op);
        if (wanted < 0) {
            return -1;
        }
        if (wanted || collects) {
            c->pending = py_pending_new();
            if (c->pending == NULL) {
                return -1;
            }
            c->hold = &c->pending->hold;
            c->arrays = c->hold->arrays;
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
    py_hold_release(&c->own);
    return NULL;
}

/* Whether the operation may be run with the GIL held: it waits for nobody and is short. */
static bool
keeps_gil(const py_call *c)
{
    return dm_group_is_local(c->group) && py_hold_bytes(c->hold) < KEEP_GIL_BYTES;
}

/* Where nobody else takes part, outputs may keep what they hold. */
void
py_hold_load(const py_hold *hold, const dm_group *group)
{
    py_pieces_load(&hold->input);
    if (hold->output.staging != NULL && dm_group_is_local(group)) {
        py_pieces_load(&hold->output);
    }
}

void
py_pending_store(void *arg, dm_status status)
{
    const py_pending *pending = arg;
    if (status == DM_OK) {
        py_pieces_store(&pending->hold.output);
    }
}

/* Puts it off until the batch ends. */
static PyObject *
collect(py_call *c)
{
    if (py_call_check(c) < 0) {
        return py_call_cancel(c);
    }
    py_pending *pending = c->pending;
    pending->op = c->op;
    pending->next = NULL;
    *c->self->batch_tail = pending;
    c->self->batch_tail = &pending->next;
    Py_RETURN_NONE;
}

static PyObject *
submit(py_call *c)
{
    dm_error err;
    dm_work *work = NULL;
    PyThreadState *thread = NULL;
    if (!keeps_gil(c)) {
        thread = PyEval_SaveThread();
    }
    py_hold_load(c->hold, c->group);
    dm_status status =
        dm_group_submit(c->group, &c->op, py_pending_store, c->pending, &work, &err);
    if (thread != NULL) {
        PyEval_RestoreThread(thread);
    }
    if (status != DM_OK) {
        py_call_cancel(c);
        return py_raise(c->state, &err);
    }
    c->pending->work = work;
    return py_work_new(c->state, c->pending);
}

static dm_status
run(py_call *c, const dm_wait *wait, dm_error *err)
{
    py_hold_load(c->hold, c->group);
    dm_status status = dm_group_run(c->group, &c->op, wait, err);
    if (status == DM_OK) {
        py_pieces_store(&c->hold->output);
    }
    return status;
}

PyObject *
py_call_perform(py_call *c)
{
    if (c->pending != NULL) {
        return py_group_collects(c->self) ? collect(c) : submit(c);
    }
    dm_error err;
    dm_status status;
    if (keeps_gil(c)) {
        dm_wait wait = DM_WAIT_FOREVER;
        status = run(c, &wait, &err);
    }
    else {
        py_waiter waiter;
        py_waiter_start(&waiter, DM_FOREVER);
        status = run(c, &waiter.wait, &err);
        py_waiter_stop(&waiter);
    }
    py_hold_release(&c->own);
    if (status != DM_OK) {
        return py_raise(c->state, &err);
    }
    Py_RETURN_NONE;
}

int
py_call_check(const py_call *c)
{
    dm_error err;
    dm_status status = dm_group_check(c->group, &c->op, &err);
    return status == DM_OK ? 0 : py_raise_int(c->state, &err);
}

static int
export_flags(const py_call *c, bool writable)
{
    return (writable ? PY_ARRAY_WRITABLE : 0) |
           (c->pending != NULL ? PY_ARRAY_ASYNC : 0);
}

int
py_call_reserve(py_call *c, int count)
{
    int failed = py_hold_reserve(c->hold, count);
    c->arrays = c->hold->arrays;
    return failed;
}

int
py_call_export_list(py_call *c, int first, PyObject *list, const char *name,
                    bool writable, py_pieces *pieces)
{
    return py_pieces_export(c->state, list, name, export_flags(c, writable),
                            dm_group_size(c->group), c->hold, first, pieces);
}

int
py_call_export(py_call *c, int i, PyObject *object, const char *name, bool writable)
{
    return py_array_export(c->state, object, name, export_flags(c, writable),
                           &c->arrays[i]);
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

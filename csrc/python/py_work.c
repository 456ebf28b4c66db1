/* The Work type: see py_work.h. */
#include "python/py_work.h"

#include <structmember.h>

#include "base/dm_alloc.h"
#include "python/py_error.h"
#include "python/py_forward.h"
#include "python/py_notices.h"
#include "python/py_wait.h"

typedef struct py_work {
    PyObject_HEAD
    py_pending *pending; /* NULL once finalized */
    PyObject *weak_references;
} py_work;

/* --- what is pending --------------------------------------------------------------- */

py_pending *
py_pending_new(void)
{
    py_pending *pending = dm_calloc(1, sizeof(*pending));
    if (pending == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    py_hold_init(&pending->hold);
    return pending;
}

static void
list_add(py_pending_link *list, py_pending *pending)
{
    py_pending_link *link = &pending->link;
    link->previous = list;
    link->next = list->next;
    link->next->previous = link;
    list->next = link;
}

/* Nothing where it is in no list. */
static void
list_remove(py_pending *pending)
{
    py_pending_link *link = &pending->link;
    if (link->next != NULL) {
        link->previous->next = link->next;
        link->next->previous = link->previous;
        link->previous = link->next = NULL;
    }
}

void
py_pending_free(py_pending *pending)
{
    list_remove(pending);
    py_hold_release(&pending->hold);
    dm_work_release(pending->work);
    dm_free(pending);
}

/* Frees it, now or when the operation has ended. */
static void
drop_pending(py_state *state, py_pending *pending)
{
    if (dm_work_is_done(pending->work)) {
        py_pending_free(pending);
    }
    else if (state != NULL) {
        list_remove(pending);
        list_add(&state->dropped_works, pending);
    }
    /* Without a state the interpreter is ending: the memory has to outlive it. */
}

void
py_work_sweep_dropped(py_state *state)
{
    py_pending_link *list = &state->dropped_works;
    py_pending_link *link = list->next;
    while (link != list) {
        py_pending *pending = (py_pending *)link;
        link = link->next;
        if (dm_work_is_done(pending->work)) {
            py_pending_free(pending);
            link = list->next; /* that ran code which may have come back here */
        }
    }
}

void
py_work_state_init(py_state *state)
{
    state->works.previous = state->works.next = &state->works;
    state->dropped_works.previous = state->dropped_works.next = &state->dropped_works;
}

/* --- life ---------------------------------------------------------------------------- */

PyObject *
py_work_new(py_state *state, py_pending *pending)
{
    PyTypeObject *type = state->work_type;
    list_add(&state->works, pending);
    py_work *self = (py_work *)type->tp_alloc(type, 0);
    if (self == NULL) {
        drop_pending(state, pending);
        return NULL;
    }
    self->pending = pending;
    return (PyObject *)self;
}

static void
work_finalize(PyObject *op)
{
    py_work *self = (py_work *)op;
    py_pending *pending = self->pending;
    self->pending = NULL;
    if (pending == NULL) {
        return;
    }
    /* An error that stands while this object goes must stay. */
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    py_state *state = py_state_of_type(Py_TYPE(op));
    if (state == NULL) {
        PyErr_Clear();
    }
    drop_pending(state, pending);
    PyErr_Restore(type, value, traceback);
}

static void
work_dealloc(PyObject *op)
{
    py_work *self = (py_work *)op;
    if (PyObject_CallFinalizerFromDealloc(op) < 0) {
        return;
    }
    if (self->weak_references != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    PyTypeObject *type = Py_TYPE(op);
    type->tp_free(op);
    Py_DECREF(type);
}

/* --- methods -------------------------------------------------------------------------- */

/* Waits until the deadline (the GIL is released meanwhile) and hands the arrays back once
 * the operation has ended. */
static dm_status
wait_until(py_pending *pending, int64_t deadline, dm_error *err)
{
    dm_status status;
    dm_work *work = dm_work_hold(pending->work);
    if (dm_work_is_done(work)) {
        dm_wait none = {0, NULL, NULL};
        status = dm_work_wait(work, &none, err);
    }
    else {
        py_waiter waiter;
        py_waiter_start(&waiter, deadline);
        status = dm_work_wait(work, &waiter.wait, err);
        py_waiter_stop(&waiter);
    }
    dm_work_release(work);
    return status;
}

/* wait() and result() up to the value. 0 or -1. */
static int
wait_for_end(PyObject *op, PyObject *timeout)
{
    py_work *self = (py_work *)op;
    int64_t timeout_ns = -1;
    if (timeout != NULL && py_timeout_parse(timeout, "timeout", &timeout_ns) < 0) {
        return -1;
    }
    py_state *state = py_state_of_type(Py_TYPE(op));
    if (state == NULL) {
        return -1;
    }
    dm_error err;
    dm_status status = wait_until(self->pending, dm_clock_deadline(timeout_ns), &err);
    if (dm_work_is_done(self->pending->work)) {
        py_hold_release(&self->pending->hold);
    }
    py_work_sweep(state);
    return status == DM_OK ? 0 : py_raise_int(state, &err);
}

PyDoc_STRVAR(
    work_wait_doc,
    "wait($self, /, timeout=None)\n"
    "--\n"
    "\n"
    "Waits until the operation has ended.\n"
    "\n"
    "Args:\n"
    "    timeout: how long this call waits, in seconds or as a timedelta; None: until "
    "the\n"
    "        operation ends (which the group's own time-out sees to).\n"
    "\n"
    "Returns:\n"
    "    True, as torch's Work does.\n"
    "\n"
    "Raises:\n"
    "    GroupTimeoutError: not ended in time; the operation goes on, its arrays stay\n"
    "        exported, and wait() may be called again. Also when the operation itself\n"
    "        timed out.\n"
    "    DeviceMeshError: what the operation failed with.");

static PyObject *
work_wait(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"timeout", NULL};
    PyObject *timeout = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:wait", names, &timeout) ||
        wait_for_end(op, timeout) < 0) {
        return NULL;
    }
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(work_result_doc,
             "result($self, /, timeout=None)\n"
             "--\n"
             "\n"
             "Waits as wait() does and returns what the synchronous call returns.\n"
             "\n"
             "Returns:\n"
             "    None; data is in the arrays that the operation was given.");

static PyObject *
work_result(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"timeout", NULL};
    PyObject *timeout = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:result", names, &timeout) ||
        wait_for_end(op, timeout) < 0) {
        return NULL;
    }
    dm_work *work = ((py_work *)op)->pending->work;
    if (dm_work_kind(work) == DM_OP_RECV) {
        return PyLong_FromLong(dm_work_source(work));
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(work_is_completed_doc,
             "is_completed($self, /)\n"
             "--\n"
             "\n"
             "Whether the operation has ended, well or not. Never waits.");

static PyObject *
work_is_completed(PyObject *op, PyObject *Py_UNUSED(args))
{
    py_pending *pending = ((py_work *)op)->pending;
    bool done = dm_work_is_done(pending->work);
    if (done) {
        py_hold_release(&pending->hold);
    }
    return PyBool_FromLong(done);
}

/* The exception for the record, not raised. New reference. */
static PyObject *
exception_of(py_state *state, const dm_error *err)
{
    py_raise(state, err);
#if PY_VERSION_HEX >= 0x030c0000
    return PyErr_GetRaisedException();
#else
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

PyDoc_STRVAR(
    work_exception_doc,
    "exception($self, /)\n"
    "--\n"
    "\n"
    "The exception that the operation ended with; None while it runs or when it went\n"
    "well. Never waits.");

static PyObject *
work_exception(PyObject *op, PyObject *Py_UNUSED(args))
{
    py_pending *pending = ((py_work *)op)->pending;
    if (!dm_work_is_done(pending->work)) {
        Py_RETURN_NONE;
    }
    py_hold_release(&pending->hold);
    dm_error err;
    if (wait_until(pending, 0, &err) == DM_OK) {
        Py_RETURN_NONE;
    }
    py_state *state = py_state_of_type(Py_TYPE(op));
    return state == NULL ? NULL : exception_of(state, &err);
}

PyDoc_STRVAR(work_add_done_callback_doc,
             "add_done_callback($self, /, fn)\n"
             "--\n"
             "\n"
             "Calls fn(work) once, when the operation has ended, well or not.\n"
             "\n"
             "At once and here where it has ended already; else on a thread for all "
             "callbacks,\n"
             "one after the other, in which fn may give operations and wait for them. "
             "What fn\n"
             "raises goes to threading.excepthook. The Work lives until then.\n"
             "\n"
             "Args:\n"
             "    fn: a callable with one argument.\n"
             "\n"
             "Raises:\n"
             "    TypeError: fn cannot be called.");

static PyObject *
work_add_done_callback(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                       PyObject *kwnames)
{
    return py_forward("devicemesh.callbacks", "add_done_callback", op, args, nargs,
                      kwnames);
}

PyDoc_STRVAR(work_source_rank_doc,
             "source_rank($self, /)\n"
             "--\n"
             "\n"
             "Of a receive that went well: the group rank of the sender.\n"
             "\n"
             "Raises:\n"
             "    RuntimeError: it has not ended, it failed, or it is no receive.");

static PyObject *
work_source_rank(PyObject *op, PyObject *Py_UNUSED(args))
{
    py_pending *pending = ((py_work *)op)->pending;
    const dm_work *work = pending->work;
    dm_error err;
    if (dm_work_kind(work) != DM_OP_RECV || !dm_work_is_done(work) ||
        wait_until(pending, 0, &err) != DM_OK) {
        PyErr_Format(PyExc_RuntimeError, "only a recv that went well has a source: %R",
                     op);
        return NULL;
    }
    return PyLong_FromLong(dm_work_source(work));
}

/* `await work`: see devicemesh/callbacks.py. */
static PyObject *
work_await(PyObject *op)
{
    return py_forward("devicemesh.callbacks", "wait", op, NULL, 0, NULL);
}

static PyObject *
work_get_seq(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(dm_work_seq(((py_work *)op)->pending->work));
}

static PyObject *
work_get_name(PyObject *op, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(
        dm_op_name(dm_work_kind(((py_work *)op)->pending->work)));
}

static PyObject *
work_reduce(PyObject *Py_UNUSED(op), PyObject *Py_UNUSED(args))
{
    PyErr_SetString(PyExc_TypeError,
                    "a Work cannot be pickled: it is an operation of this process");
    return NULL;
}

static PyObject *
work_repr(PyObject *op)
{
    py_pending *pending = ((py_work *)op)->pending;
    if (pending == NULL) {
        return PyUnicode_FromString("<devicemesh.Work finalized>");
    }
    const dm_work *work = pending->work;
    const char *outcome = "running";
    if (dm_work_is_done(work)) {
        dm_error err;
        outcome = wait_until(pending, 0, &err) == DM_OK ? "done" : "failed";
    }
    const char *dim_name = dm_group_dim_name(dm_work_group(work));
    return PyUnicode_FromFormat("<devicemesh.Work %s #%llu%s%s %s>",
                                dm_op_name(dm_work_kind(work)),
                                (unsigned long long)dm_work_seq(work),
                                dim_name[0] != '\0' ? " on " : "", dim_name, outcome);
}

static PyMethodDef work_methods[] = {
    {"wait", (PyCFunction)(void (*)(void))work_wait, METH_VARARGS | METH_KEYWORDS,
     work_wait_doc},
    {"result", (PyCFunction)(void (*)(void))work_result, METH_VARARGS | METH_KEYWORDS,
     work_result_doc},
    {"is_completed", work_is_completed, METH_NOARGS, work_is_completed_doc},
    {"exception", work_exception, METH_NOARGS, work_exception_doc},
    {"add_done_callback", (PyCFunction)(void (*)(void))work_add_done_callback,
     METH_FASTCALL | METH_KEYWORDS, work_add_done_callback_doc},
    {"source_rank", work_source_rank, METH_NOARGS, work_source_rank_doc},
    {"__reduce__", work_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef work_getset[] = {
    {"seq", work_get_seq, NULL,
     "Number of the operation on its group; messages are numbered apart.", NULL},
    {"name", work_get_name, NULL, "Name of the operation: 'all_reduce', ...", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef work_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(py_work, weak_references), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(
    work_doc,
    "An asynchronous operation, as returned by operations with async_op=True.\n"
    "\n"
    "Works of one group run in the order in which they were given; works of different\n"
    "groups overlap. The arrays of an operation stay exported until it has ended: "
    "the\n"
    "memory lives even if nobody else holds them, and what has the buffer protocol "
    "cannot be\n"
    "resized. A torch tensor may go or get other memory (tensor.data = ...); only the "
    "storage\n"
    "itself must not be resized meanwhile, which torch cannot forbid and "
    "torch.distributed\n"
    "asks for too. Dropping a Work does not stop its operation.\n"
    "\n"
    "Example:\n"
    "    >>> import devicemesh\n"
    "    >>> world = devicemesh.World.simulated(2)\n"
    "    >>> work = world.new_group([0, 1]).all_reduce(bytearray(4), async_op=True)\n"
    "    >>> work.wait()\n"
    "    True\n");

static PyType_Slot work_slots[] = {
    {Py_tp_doc, (void *)work_doc},
    {Py_tp_finalize, work_finalize},
    {Py_tp_dealloc, work_dealloc},
    {Py_tp_repr, work_repr},
    {Py_tp_methods, work_methods},
    {Py_tp_members, work_members},
    {Py_tp_getset, work_getset},
    {Py_am_await, work_await},
    {0, NULL},
};

static PyType_Spec work_spec = {
    .name = "devicemesh.Work",
    .basicsize = sizeof(py_work),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = work_slots,
};

/* --- module functions ------------------------------------------------------------------ */

PyDoc_STRVAR(close_running_doc,
             "_close_running($module, /)\n"
             "--\n"
             "\n"
             "Closes the groups whose asynchronous operations have not ended.\n"
             "\n"
             "For the interpreter's exit: a thread that is inside a backend must not "
             "see the process\n"
             "being taken apart.");

/* The group of one running work, held, or NULL. */
static dm_group *
find_running(const py_pending_link *list)
{
    for (py_pending_link *link = list->next; link != list; link = link->next) {
        const dm_work *work = ((py_pending *)link)->work;
        if (!dm_work_is_done(work)) {
            return dm_group_hold(dm_work_group(work));
        }
    }
    return NULL;
}

static PyObject *
close_running(PyObject *module, PyObject *Py_UNUSED(args))
{
    py_state *state = py_state_of_module(module);
    for (;;) {
        dm_group *group = find_running(&state->works);
        if (group == NULL) {
            group = find_running(&state->dropped_works);
        }
        if (group == NULL) {
            break;
        }
        /* All works of the group have ended afterwards. */
        Py_BEGIN_ALLOW_THREADS
        dm_group_close(group, NULL);
        dm_group_release(group);
        Py_END_ALLOW_THREADS
    }
    py_work_sweep(state);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(notify_doc, "_notify($module, /, work, token)\n"
                         "--\n"
                         "\n"
                         "Whether _next_notice will give the token once the work has "
                         "ended; else it has.");

static PyObject *
notify(PyObject *module, PyObject *args)
{
    py_state *state = py_state_of_module(module);
    PyObject *work = NULL;
    unsigned long long token = 0;
    if (!PyArg_ParseTuple(args, "O!K:_notify", state->work_type, &work, &token)) {
        return NULL;
    }
    int added = py_notices_add(state->notices, ((py_work *)work)->pending->work, token);
    return added < 0 ? NULL : PyBool_FromLong(added);
}

PyDoc_STRVAR(next_notice_doc,
             "_next_notice($module, /)\n"
             "--\n"
             "\n"
             "Waits for the token of a work that has ended; None: none "
             "yet.");

static PyObject *
next_notice(PyObject *module, PyObject *Py_UNUSED(args))
{
    uint64_t token = 0;
    if (!py_notices_next(py_state_of_module(module)->notices, &token)) {
        Py_RETURN_NONE;
    }
    return PyLong_FromUnsignedLongLong(token);
}

static PyMethodDef functions[] = {
    {"_notify", notify, METH_VARARGS, notify_doc},
    {"_next_notice", next_notice, METH_NOARGS, next_notice_doc},
    {"_close_running", close_running, METH_NOARGS, close_running_doc},
    {NULL, NULL, 0, NULL},
};

int
py_work_register(PyObject *module)
{
    py_state *state = py_state_of_module(module);
    if (py_state_add_type(module, &work_spec, NULL, &state->work_type) < 0) {
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}

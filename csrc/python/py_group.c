/* The ProcessGroup type and its facts: see py_group.h. */
#include "python/py_group.h"

#include <stdio.h>
#include <string.h>

#include <structmember.h>

#include "python/py_error.h"
#include "python/py_group_private.h"
#include "python/py_wait.h"
#include "python/py_work.h"

static dm_group *
handle(PyObject *op)
{
    return ((py_group *)op)->group;
}

/* --- life ---------------------------------------------------------------------------- */

PyObject *
py_group_wrap(py_state *state, dm_group *group)
{
    void **slot = dm_group_slot(group);
    if (*slot != NULL) {
        return Py_NewRef((PyObject *)*slot);
    }
    PyTypeObject *type = state->group_type;
    py_group *self = (py_group *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->group = dm_group_hold(group);
    *slot = self;
    return (PyObject *)self;
}

dm_group *
py_group_of(py_state *state, PyObject *object, const char *name)
{
    if (!Py_IS_TYPE(object, state->group_type)) {
        PyErr_Format(PyExc_TypeError, "%s must be a ProcessGroup, got %.200s", name,
                     Py_TYPE(object)->tp_name);
        return NULL;
    }
    return handle(object);
}

static void
group_finalize(PyObject *op)
{
    py_group *self = (py_group *)op;
    dm_group *group = self->group;
    if (group != NULL) {
        if (self->batch_thread != 0) {
            Py_XDECREF(py_group_drop_batch(op, NULL));
        }
        self->group = NULL;
        *dm_group_slot(group) = NULL;
        dm_group_release(group);
    }
}

static void
group_dealloc(PyObject *op)
{
    py_group *self = (py_group *)op;
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

/* --- facts ----------------------------------------------------------------------------- */

PyDoc_STRVAR(group_rank_doc, "rank($self, /)\n"
                             "--\n"
                             "\n"
                             "This process's rank in the group.");

static PyObject *
group_rank(PyObject *op, PyObject *Py_UNUSED(args))
{
    return PyLong_FromLong(dm_group_rank(handle(op)));
}

PyDoc_STRVAR(group_size_doc, "size($self, /)\n"
                             "--\n"
                             "\n"
                             "Number of members.");

static PyObject *
group_size(PyObject *op, PyObject *Py_UNUSED(args))
{
    return PyLong_FromLong(dm_group_size(handle(op)));
}

PyDoc_STRVAR(
    group_close_doc,
    "close($self, /)\n"
    "--\n"
    "\n"
    "Ends what runs or is queued with ClosedError and frees connections and threads.\n"
    "\n"
    "Idempotent; waits for no other rank. The other members notice at their next\n"
    "operation.");

static PyObject *
group_close(PyObject *op, PyObject *Py_UNUSED(args))
{
    py_state *state = py_state_of_type(Py_TYPE(op));
    if (state == NULL) {
        return NULL;
    }
    dm_group *group = dm_group_hold(handle(op));
    dm_error err;
    dm_status status;
    PyThreadState *thread = PyEval_SaveThread();
    status = dm_group_close(group, &err);
    dm_group_release(group);
    PyEval_RestoreThread(thread);
    py_work_sweep(state);
    if (status != DM_OK) {
        return py_raise(state, &err);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    group_abort_doc,
    "abort($self, /)\n"
    "--\n"
    "\n"
    "Ends what runs or is queued with ClosedError, from any thread, without waiting.\n"
    "\n"
    "close() frees what is left.");

static PyObject *
group_abort(PyObject *op, PyObject *Py_UNUSED(args))
{
    dm_group_abort(handle(op));
    Py_RETURN_NONE;
}

static PyObject *
group_reduce_(PyObject *Py_UNUSED(op), PyObject *Py_UNUSED(args))
{
    PyErr_SetString(
        PyExc_TypeError,
        "a ProcessGroup cannot be pickled: it stands for connections of this "
        "process; pickle the mesh and take the group from it again");
    return NULL;
}

static PyObject *
ranks_tuple(const dm_group *group)
{
    const int32_t *ranks = dm_group_ranks(group);
    int32_t size = dm_group_size(group);
    PyObject *tuple = PyTuple_New(size);
    for (int32_t i = 0; tuple != NULL && i < size; i++) {
        PyObject *rank = PyLong_FromLong(ranks[i]);
        if (rank == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, i, rank);
    }
    return tuple;
}

static PyObject *
group_get_ranks(PyObject *op, void *Py_UNUSED(closure))
{
    return ranks_tuple(handle(op));
}

static PyObject *
group_get_name(PyObject *op, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(dm_group_name(handle(op)));
}

static PyObject *
group_get_dim_name(PyObject *op, void *Py_UNUSED(closure))
{
    const char *name = dm_group_dim_name(handle(op));
    if (name[0] == '\0') {
        Py_RETURN_NONE;
    }
    return PyUnicode_FromString(name);
}

static PyObject *
group_get_backend(PyObject *op, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(dm_group_backend(handle(op)));
}

static PyObject *
group_get_transport(PyObject *op, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(dm_group_transport(handle(op)));
}

static PyObject *
group_get_timeout(PyObject *op, void *Py_UNUSED(closure))
{
    return py_timeout_object(dm_group_timeout(handle(op)));
}

static int
group_set_timeout(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    int64_t timeout_ns = -1;
    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError, "timeout cannot be deleted");
        return -1;
    }
    if (py_timeout_parse(value, "timeout", &timeout_ns) < 0) {
        return -1;
    }
    dm_group_set_timeout(handle(op), timeout_ns);
    return 0;
}

static PyObject *
group_get_closed(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(dm_group_is_closed(handle(op)));
}

static PyObject *
group_repr(PyObject *op)
{
    dm_group *group = handle(op);
    if (group == NULL) {
        return PyUnicode_FromString("<devicemesh.ProcessGroup finalized>");
    }
    const char *name = dm_group_dim_name(group);
    PyObject *ranks = ranks_tuple(group);
    if (ranks == NULL) {
        return NULL;
    }
    PyObject *text = PyUnicode_FromFormat(
        "<devicemesh.ProcessGroup %s%srank=%d ranks=%R backend=%s%s>", name,
        name[0] != '\0' ? " " : "", (int)dm_group_rank(group), ranks,
        dm_group_backend(group), dm_group_is_closed(group) ? " closed" : "");
    Py_DECREF(ranks);
    return text;
}

/* --- type ---------------------------------------------------------------------------- */

#define OPERATION(method)                                                              \
    {#method, (PyCFunction)(void (*)(void))py_group_##method,                          \
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS, py_group_##method##_doc},

#define FORWARD(method)                                                                \
    {#method, (PyCFunction)(void (*)(void))py_group_##method,                          \
     METH_FASTCALL | METH_KEYWORDS, py_group_##method##_doc},

static PyMethodDef group_methods[] = {
    PY_GROUP_OPERATIONS(OPERATION)
        PY_GROUP_FORWARDS(FORWARD){"rank", group_rank, METH_NOARGS, group_rank_doc},
    {"size", group_size, METH_NOARGS, group_size_doc},
    {"close", group_close, METH_NOARGS, group_close_doc},
    {"abort", group_abort, METH_NOARGS, group_abort_doc},
    {"monitored_barrier", (PyCFunction)(void (*)(void))py_group_monitored_barrier,
     METH_FASTCALL | METH_KEYWORDS, py_group_monitored_barrier_doc},
    {"_begin_batch", py_group_begin_batch, METH_NOARGS, NULL},
    {"_end_batch", py_group_end_batch, METH_NOARGS, NULL},
    {"_drop_batch", py_group_drop_batch, METH_NOARGS, NULL},
    {"__reduce__", group_reduce_, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef group_getset[] = {
    {"ranks", group_get_ranks, NULL, "Global ranks of the members, in group order.",
     NULL},
    {"name", group_get_name, NULL, "Identity of the group: the same on every member.",
     NULL},
    {"dim_name", group_get_dim_name, NULL, "Name of the mesh dim, or None.", NULL},
    {"backend", group_get_backend, NULL, "Name of the backend: 'gloo', 'fake', ...",
     NULL},
    {"transport", group_get_transport, NULL,
     "How the data travels: 'tcp', 'shm', 'none', ...", NULL},
    {"timeout", group_get_timeout, group_set_timeout,
     "Time-out of an operation in seconds, or None. Settable.", NULL},
    {"closed", group_get_closed, NULL, "Whether close() or abort() has been called.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef group_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(py_group, weak_references), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(
    group_doc,
    "The communicator of an ordered list of ranks.\n"
    "\n"
    "Groups come from a mesh (DeviceMesh.get_group) or World.new_group. Nothing is\n"
    "connected before the first operation. All members must call the same operations "
    "in\n"
    "the same order; each has a number, which errors show. Outputs come before inputs, "
    "as\n"
    "in torch.distributed; root, src and dst are group ranks.\n"
    "\n"
    "Arrays are what offers its memory, which is used where it lies: the buffer "
    "protocol\n"
    "(numpy with ml_dtypes' types, array.array, bytearray, ...), DLPack (torch's CPU "
    "tensors,\n"
    "those that require grad included: their values are sent, autograd learns of "
    "nothing) and\n"
    "__array_interface__. They must be C-contiguous, in the CPU's memory, writable "
    "where they\n"
    "are written, of bool, int8 to int64, uint8 to uint64, float16, bfloat16, float32, "
    "float64,\n"
    "complex64, complex128, float8_e4m3fn or float8_e5m2; outputs share no memory with "
    "inputs,\n"
    "but for what an operation says of working in place. Else it is refused before "
    "anything is\n"
    "sent.\n"
    "\n"
    "Members that call different things (operation, dtype, size, reduce op, root, "
    "order) get\n"
    "MismatchError on every one, with both sides and the operation's number. This is "
    "always\n"
    "on: in shared memory every step is checked, over TCP who has waited for a second "
    "looks\n"
    "for the reason. A member whose part needs nobody's answer (it sends to a root) "
    "learns of\n"
    "it with its next operation. Messages that do not fit are told to both ends at "
    "once.\n"
    "\n"
    "An operation that fails half way (time-out, a dead member, Ctrl-C) breaks the "
    "group:\n"
    "later operations raise ClosedError and name the first failure.");

static PyType_Slot group_slots[] = {
    {Py_tp_doc, (void *)group_doc}, {Py_tp_finalize, group_finalize},
    {Py_tp_dealloc, group_dealloc}, {Py_tp_repr, group_repr},
    {Py_tp_methods, group_methods}, {Py_tp_getset, group_getset},
    {Py_tp_members, group_members}, {0, NULL},
};

static PyType_Spec group_spec = {
    .name = "devicemesh.ProcessGroup",
    .basicsize = sizeof(py_group),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = group_slots,
};

/* The backends' libraries lie beside this module. */
static int
tell_library_folder(PyObject *module)
{
    PyObject *file = PyModule_GetFilenameObject(module);
    if (file == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_SystemError)) {
            return -1;
        }
        PyErr_Clear(); /* not loaded from a file */
        return 0;
    }
    PyObject *bytes = PyUnicode_EncodeFSDefault(file);
    Py_DECREF(file);
    if (bytes == NULL) {
        return -1;
    }
    const char *path = PyBytes_AS_STRING(bytes);
    const char *slash = strrchr(path, '/');
    char folder[4096];
    int length = slash == NULL ? snprintf(folder, sizeof(folder), ".")
                               : snprintf(folder, sizeof(folder), "%.*s",
                                          (int)(slash - path), path);
    Py_DECREF(bytes);
    if (length < 0 || (size_t)length >= sizeof(folder)) {
        return 0; /* the backend's error will say that no folder is known */
    }
    dm_error err;
    dm_status status = dm_backend_set_path(folder, &err);
    return status == DM_OK ? 0 : py_raise_int(py_state_of_module(module), &err);
}

int
py_group_register(PyObject *module)
{
    py_state *state = py_state_of_module(module);
    if (py_state_add_type(module, &group_spec, NULL, &state->group_type) < 0) {
        return -1;
    }
    return tell_library_folder(module);
}

/* The base type Store: the methods that all stores have. See py_store.h.
 *
 * A native handle: no Python references, so no part in garbage collection. Each call
 * runs without the GIL and looks at signals while it waits; the arguments are kept
 * alive by the caller or by what was made from them.
 */
#include "python/py_store.h"

#include <datetime.h>
#include <structmember.h>

#include "python/py_args.h"
#include "python/py_error.h"
#include "python/py_store_call.h"
#include "python/py_store_object.h"

/* --- one call -------------------------------------------------------------------------- */

int
py_store_call_init(py_store_call *call, PyObject *op)
{
    py_store *self = (py_store *)op;
    call->state = py_state_of_type(Py_TYPE(op));
    if (call->state == NULL) {
        return -1;
    }
    if (self->store == NULL) {
        PyErr_Format(PyExc_NotImplementedError,
                     "%s is a Store made in Python: it has to implement this method",
                     Py_TYPE(op)->tp_name);
        return -1;
    }
    call->store = self->store;
    return 0;
}

const dm_wait *
py_store_call_start(py_store_call *call, int64_t timeout_ns)
{
    py_waiter_start(&call->waiter, dm_clock_deadline(timeout_ns));
    return &call->waiter.wait;
}

int
py_store_call_stop(py_store_call *call, dm_status status)
{
    py_waiter_stop(&call->waiter);
    if (status == DM_OK) {
        return 0;
    }
    if (status == DM_ERR_AGAIN) {
        PyErr_SetString(call->state->queue_empty_error, call->err.text);
        return -1;
    }
    return py_raise_int(call->state, &call->err);
}

int64_t
py_store_timeout_of(PyObject *op)
{
    return ((py_store *)op)->timeout_ns;
}

int
py_store_parse_timeout(PyObject *op, PyObject *object, int64_t *timeout_ns)
{
    if (object == NULL || object == Py_None) {
        *timeout_ns = py_store_timeout_of(op);
        return 0;
    }
    return py_timeout_parse(object, "timeout", timeout_ns);
}

/* --- the object itself -------------------------------------------------------------------------- */

PyDoc_STRVAR(store_set_timeout_doc,
             "set_timeout($self, /, timeout)\n"
             "--\n"
             "\n"
             "Sets how long calls wait: seconds or a timedelta; None: for ever.");

static PyObject *
store_set_timeout(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames)
{
    static const char *const names[] = {"timeout"};
    static const py_params params = {"set_timeout", names, 1, 1, 1};
    PyObject *given;
    if (py_args_bind(&params, args, nargs, kwnames, &given) < 0 ||
        py_timeout_parse(given, "timeout", &((py_store *)op)->timeout_ns) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* A timedelta, as torch's stores have it. */
static PyObject *
store_get_timeout(PyObject *op, void *Py_UNUSED(closure))
{
    int64_t ns = py_store_timeout_of(op);
    if (ns < 0) {
        Py_RETURN_NONE;
    }
    if (PyDateTimeAPI == NULL) {
        PyDateTime_IMPORT;
        if (PyDateTimeAPI == NULL) {
            return NULL;
        }
    }
    int64_t microseconds = ns / 1000;
    int64_t seconds = microseconds / 1000000;
    return PyDelta_FromDSU((int)(seconds / 86400), (int)(seconds % 86400),
                           (int)(microseconds % 1000000));
}

PyDoc_STRVAR(
    store_close_doc,
    "close($self, /)\n"
    "--\n"
    "\n"
    "Ends the use of the store: calls in flight and later ones raise ClosedError; a\n"
    "TCPStore says goodbye (its will is not executed) and, if it serves, stops. A\n"
    "PrefixStore leaves the store under it open. Idempotent; waits for nobody.");

static PyObject *
store_close(PyObject *op, PyObject *Py_UNUSED(args))
{
    py_store *self = (py_store *)op;
    dm_store *store = self->store;
    dm_store_server *server = self->server;
    self->server = NULL;
    Py_BEGIN_ALLOW_THREADS
    if (store != NULL) {
        dm_store_close(store);
    }
    dm_store_server_stop(server);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(store_clone_doc,
             "clone($self, /)\n"
             "--\n"
             "\n"
             "The store itself: its methods may be called by several threads at once.");

static PyObject *
store_self(PyObject *op, PyObject *Py_UNUSED(args))
{
    return Py_NewRef(op);
}

PyDoc_STRVAR(store_extended_doc,
             "has_extended_api($self, /)\n"
             "--\n"
             "\n"
             "Whether append, multi_get and multi_set are there (as torch asks it).");

static PyObject *
store_extended(PyObject *op, PyObject *Py_UNUSED(args))
{
    return PyBool_FromLong(((py_store *)op)->store != NULL);
}

static PyObject *
store_exit(PyObject *op, PyObject *Py_UNUSED(args))
{
    return store_close(op, NULL);
}

static PyObject *
store_reduce(PyObject *op, PyObject *Py_UNUSED(args))
{
    PyErr_Format(PyExc_TypeError,
                 "a %s cannot be pickled: it belongs to one process; make one in each "
                 "process",
                 Py_TYPE(op)->tp_name);
    return NULL;
}

/* Only Python subclasses of Store itself, which bring their own methods. */
static PyObject *
store_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    py_state *state = py_state_of_type(type);
    if (state == NULL) {
        return NULL;
    }
    if (type == state->store_type) {
        PyErr_SetString(PyExc_TypeError,
                        "Store cannot be made: use TCPStore, FileStore, "
                        "HashStore or PrefixStore");
        return NULL;
    }
    return py_store_make(type, NULL, NULL, PY_STORE_TIMEOUT_NS);
}

/* May run twice: once by hand of the collector, once by dealloc. Without close the
 * server takes this for a departure. */
static void
store_finalize(PyObject *op)
{
    py_store *self = (py_store *)op;
    dm_store *store = self->store;
    dm_store_server *server = self->server;
    self->store = NULL;
    self->server = NULL;
    if (store != NULL && store->slot == self) {
        store->slot = NULL;
    }
    dm_store_release(store);
    dm_store_server_stop(server);
}

static void
store_dealloc(PyObject *op)
{
    py_store *self = (py_store *)op;
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

static PyMethodDef store_methods[] = {
#define X(name)                                                                        \
    {#name, (PyCFunction)(void (*)(void))py_store_##name,                              \
     METH_FASTCALL | METH_KEYWORDS, py_store_##name##_doc},
    PY_STORE_METHODS(X)
#undef X
        {"set_timeout", (PyCFunction)(void (*)(void))store_set_timeout,
         METH_FASTCALL | METH_KEYWORDS, store_set_timeout_doc},
    {"num_keys", py_store_num_keys, METH_NOARGS, py_store_num_keys_doc},
    {"list_keys", py_store_list_keys, METH_NOARGS, py_store_list_keys_doc},
    {"close", store_close, METH_NOARGS, store_close_doc},
    {"clone", store_self, METH_NOARGS, store_clone_doc},
    {"has_extended_api", store_extended, METH_NOARGS, store_extended_doc},
    {"__enter__", store_self, METH_NOARGS, NULL},
    {"__exit__", store_exit, METH_VARARGS, NULL},
    {"__reduce__", store_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef store_getset[] = {
    {"timeout", store_get_timeout, NULL,
     "How long calls wait, a timedelta (None: for ever). See set_timeout.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef store_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(py_store, weak_references), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(
    store_doc,
    "Store(*args, **kwargs)\n"
    "--\n"
    "\n"
    "A key-value table that ranks share while they find each other.\n"
    "\n"
    "The base of TCPStore, FileStore, HashStore and PrefixStore, with the methods of\n"
    "torch.distributed.Store. Keys are str, values go in as str or bytes-like and "
    "come\n"
    "out as bytes. Every call runs without the GIL, can be interrupted, and may be "
    "made\n"
    "by several threads at once. Classes made in Python may derive from it and "
    "implement\n"
    "at least set, get, add and wait.\n"
    "\n"
    "Every method raises GroupTimeoutError (also a TimeoutError) after the store's\n"
    "time-out, StoreError when the server is gone, and ClosedError when the store was\n"
    "closed or belongs to the parent of a fork.");

static PyType_Slot store_slots[] = {
    {Py_tp_doc, (void *)store_doc},   {Py_tp_new, store_new},
    {Py_tp_finalize, store_finalize}, {Py_tp_dealloc, store_dealloc},
    {Py_tp_methods, store_methods},   {Py_tp_getset, store_getset},
    {Py_tp_members, store_members},   {0, NULL},
};

static PyType_Spec store_spec = {
    .name = "devicemesh.Store",
    .basicsize = sizeof(py_store),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = store_slots,
};

/* --- for the other files ---------------------------------------------------------------------------- */

PyObject *
py_store_make(PyTypeObject *type, dm_store *store, dm_store_server *server,
              int64_t timeout_ns)
{
    py_store *self = (py_store *)type->tp_alloc(type, 0);
    if (self == NULL) {
        dm_store_release(store);
        dm_store_server_stop(server);
        return NULL;
    }
    self->store = store;
    self->server = server;
    self->timeout_ns = timeout_ns;
    if (store != NULL && store->slot == NULL) {
        store->slot = self;
    }
    return (PyObject *)self;
}

dm_store *
py_store_from_object(py_state *state, PyObject *object, const char *name)
{
    if (PyObject_TypeCheck(object, state->store_type)) {
        py_store *self = (py_store *)object;
        if (self->store != NULL) {
            return dm_store_hold(self->store);
        }
    }
    return py_store_adapter_new(state, object, name);
}

/* The type whose objects hold stores of that kind. */
static PyTypeObject *
type_of_kind(const py_state *state, const char *kind)
{
    switch (kind[0]) {
    case 't':
        return state->tcp_store_type;
    case 'f':
        return state->file_store_type;
    case 'h':
        return state->hash_store_type;
    default:
        return state->prefix_store_type;
    }
}

PyObject *
py_store_wrap(py_state *state, dm_store *store)
{
    PyObject *object = py_store_adapter_object(store);
    if (object == NULL) {
        object = store->slot;
    }
    if (object != NULL) {
        return Py_NewRef(object);
    }
    return py_store_make(type_of_kind(state, dm_store_kind(store)),
                         dm_store_hold(store), NULL, PY_STORE_TIMEOUT_NS);
}

int
py_store_register(PyObject *module)
{
    py_state *state = py_state_of_module(module);
    if (py_state_add_type(module, &store_spec, NULL, &state->store_type) < 0 ||
        py_store_types_register(module) < 0 || py_store_server_register(module) < 0) {
        return -1;
    }
    return 0;
}

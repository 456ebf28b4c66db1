/* TCPStore, FileStore, HashStore and PrefixStore: how they are made and what they alone
 * know. */
#include "python/py_store.h"

#include <errno.h>
#include <string.h>

#include "python/py_args.h"
#include "python/py_error.h"
#include "python/py_store_args.h"
#include "python/py_store_object.h"
#include "python/py_wait.h"

/* --- TCPStore -------------------------------------------------------------------------- */

typedef struct tcp_arguments {
    const char *host;
    uint16_t port;
    int64_t world_size; /* 0: none */
    int is_master;
    int64_t timeout_ns;
    int wait_for_workers;
    int multi_tenant;
    int listen_fd; /* -1: none */
    const char *token;
} tcp_arguments;

static int
parse_tcp(PyObject *args, PyObject *kwargs, tcp_arguments *parsed)
{
    static char *names[] = {"host_name",
                            "port",
                            "world_size",
                            "is_master",
                            "timeout",
                            "wait_for_workers",
                            "multi_tenant",
                            "master_listen_fd",
                            "use_libuv",
                            "token",
                            NULL};
    PyObject *host = NULL;
    PyObject *port = NULL;
    PyObject *world_size = Py_None;
    PyObject *timeout = NULL;
    PyObject *listen_fd = Py_None;
    PyObject *token = Py_None;
    int use_libuv = 1; /* torch's choice of server; there is one here */
    parsed->is_master = 0;
    parsed->wait_for_workers = 1;
    parsed->multi_tenant = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OO|OpOppOp$O:TCPStore", names, &host, &port, &world_size,
            &parsed->is_master, &timeout, &parsed->wait_for_workers,
            &parsed->multi_tenant, &listen_fd, &use_libuv, &token)) {
        return -1;
    }
    parsed->host = py_store_key(host, "host_name");
    int64_t number = 0;
    int lowest = parsed->is_master ? 0 : 1;
    if (parsed->host == NULL || py_args_int(port, "port", lowest, 65535, &number) < 0) {
        return -1;
    }
    parsed->port = (uint16_t)number;
    parsed->world_size = 0;
    if (world_size != Py_None &&
        py_args_int(world_size, "world_size", 1, INT32_MAX, &parsed->world_size) < 0) {
        return -1;
    }
    parsed->timeout_ns = PY_STORE_TIMEOUT_NS;
    if (timeout != NULL &&
        py_timeout_parse(timeout, "timeout", &parsed->timeout_ns) < 0) {
        return -1;
    }
    number = -1;
    if (listen_fd != Py_None &&
        py_args_int(listen_fd, "master_listen_fd", 0, INT32_MAX, &number) < 0) {
        return -1;
    }
    parsed->listen_fd = (int)number;
    return py_store_token(token, &parsed->token);
}

/* Starts the server where there is to be one; the port may become another. */
static dm_status
serve(tcp_arguments *arguments, dm_store_server **server, dm_error *err)
{
    if (!arguments->is_master) {
        return DM_OK;
    }
    dm_store_server_config config = {arguments->host, arguments->port, arguments->token,
                                     arguments->listen_fd};
    dm_status status = dm_store_server_start(&config, server, err);
    if (status == DM_ERR_SYSTEM && err->native == EADDRINUSE &&
        arguments->multi_tenant) {
        return DM_OK; /* another one in this job serves there */
    }
    if (status == DM_OK) {
        arguments->port = dm_store_server_port(*server);
    }
    return status;
}

/* Server, client and torch's meeting, all without the GIL. */
static dm_status
open_tcp(tcp_arguments *arguments, const dm_wait *wait, dm_store_server **server,
         dm_store **store, dm_error *err)
{
    DM_TRY(serve(arguments, server, err));
    DM_TRY(dm_store_tcp_new(arguments->host, arguments->port, arguments->token, wait,
                            store, err));
    if (arguments->world_size != 0 && arguments->wait_for_workers) {
        DM_TRY(dm_store_tcp_meet_workers(*store, arguments->world_size,
                                         arguments->is_master, wait, err));
    }
    return DM_OK;
}

static PyObject *
tcp_store_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    py_state *state = py_state_of_type(type);
    tcp_arguments arguments;
    if (state == NULL || parse_tcp(args, kwargs, &arguments) < 0) {
        return NULL;
    }
    dm_store_server *server = NULL;
    dm_store *store = NULL;
    dm_error err;
    py_waiter waiter;
    py_waiter_start(&waiter, dm_clock_deadline(arguments.timeout_ns));
    dm_status status = open_tcp(&arguments, &waiter.wait, &server, &store, &err);
    if (status != DM_OK) {
        dm_store_release(store);
        dm_store_server_stop(server);
    }
    py_waiter_stop(&waiter);
    if (status != DM_OK) {
        return py_raise(state, &err);
    }
    return py_store_make(type, store, server, arguments.timeout_ns);
}

/* The address, or NULL with an exception. */
static const char *
address_of(PyObject *op, uint16_t *port)
{
    py_store *self = (py_store *)op;
    if (self->store == NULL) {
        PyErr_SetString(PyExc_ValueError, "the store has been finalized");
        return NULL;
    }
    return dm_store_tcp_address(self->store, port);
}

static PyObject *
tcp_store_get_host(PyObject *op, void *Py_UNUSED(closure))
{
    uint16_t port;
    const char *host = address_of(op, &port);
    return host == NULL ? NULL : PyUnicode_FromString(host);
}

static PyObject *
tcp_store_get_port(PyObject *op, void *Py_UNUSED(closure))
{
    uint16_t port;
    return address_of(op, &port) == NULL ? NULL : PyLong_FromLong(port);
}

static PyObject *
tcp_store_repr(PyObject *op)
{
    uint16_t port;
    const char *host = address_of(op, &port);
    if (host == NULL) {
        PyErr_Clear();
        return PyUnicode_FromString("<devicemesh.TCPStore finalized>");
    }
    bool serves = ((py_store *)op)->server != NULL;
    return PyUnicode_FromFormat("<devicemesh.TCPStore %s:%d%s>", host, (int)port,
                                serves ? " serving" : "");
}

static PyGetSetDef tcp_store_getset[] = {
    {"host", tcp_store_get_host, NULL, "Host name or address of the server.", NULL},
    {"port", tcp_store_get_port, NULL, "Port of the server.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(
    tcp_store_doc,
    "TCPStore(host_name, port, world_size=None, is_master=False, timeout=300.0,\n"
    "         wait_for_workers=True, multi_tenant=False, master_listen_fd=None,\n"
    "         use_libuv=True, *, token=None)\n"
    "--\n"
    "\n"
    "A client of the store server at host_name:port, devicemesh's or torch's.\n"
    "\n"
    "It speaks the protocol of torch.distributed.TCPStore, so either side may be "
    "torch's.\n"
    "Connects before it returns, and waits for a server that is not there yet.\n"
    "\n"
    "Args:\n"
    "    host_name: name or address; an address and 'localhost' need no resolver.\n"
    "    port: 1..65535; with is_master also 0 for any free one.\n"
    "    world_size: number of workers to wait for; None: do not count them.\n"
    "    is_master: also serve the store, on host_name alone.\n"
    "    timeout: seconds or a timedelta, for connecting and every later call.\n"
    "    wait_for_workers: whether the master waits until world_size have connected.\n"
    "    multi_tenant: a master finds the port taken: it becomes a client.\n"
    "    master_listen_fd: a listening socket that the master takes over.\n"
    "    use_libuv: ignored, for torch's signature.\n"
    "    token: shared secret that the server asks for; None takes\n"
    "        DEVICEMESH_STORE_TOKEN from the environment, '' means none.\n"
    "\n"
    "Raises:\n"
    "    GroupTimeoutError: no server has answered in time.\n"
    "    StoreError: the token is wrong, or what answers is no store.\n"
    "    OSError: the master cannot listen there.\n"
    "\n"
    "Example:\n"
    "    >>> from devicemesh import TCPStore\n"
    "    >>> with TCPStore('127.0.0.1', 0, is_master=True) as store:\n"
    "    ...     store.set('a', '1'); store.get('a')\n"
    "    b'1'\n");

static PyType_Slot tcp_store_slots[] = {
    {Py_tp_doc, (void *)tcp_store_doc},
    {Py_tp_new, tcp_store_new},
    {Py_tp_repr, tcp_store_repr},
    {Py_tp_getset, tcp_store_getset},
    {0, NULL},
};

static PyType_Spec tcp_store_spec = {
    .name = "devicemesh.TCPStore",
    .basicsize = sizeof(py_store),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = tcp_store_slots,
};

/* --- FileStore -------------------------------------------------------------------------- */

static PyObject *
file_store_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"file_name", "world_size", NULL};
    PyObject *path = NULL;
    PyObject *world_size_arg = NULL;
    int64_t world_size = -1;
    py_state *state = py_state_of_type(type);
    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O&|O:FileStore", names,
                                     PyUnicode_FSConverter, &path, &world_size_arg)) {
        return NULL;
    }
    if (world_size_arg != NULL &&
        py_args_int(world_size_arg, "world_size", -1, INT32_MAX, &world_size) < 0) {
        Py_DECREF(path);
        return NULL;
    }
    dm_store *store = NULL;
    dm_error err;
    dm_status status;
    Py_BEGIN_ALLOW_THREADS
    status =
        dm_store_file_new(PyBytes_AS_STRING(path), (int32_t)world_size, &store, &err);
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    if (status != DM_OK) {
        return py_raise(state, &err);
    }
    return py_store_make(type, store, NULL, PY_STORE_TIMEOUT_NS);
}

static PyObject *
file_store_get_path(PyObject *op, void *Py_UNUSED(closure))
{
    py_store *self = (py_store *)op;
    const char *path = self->store != NULL ? dm_store_file_path(self->store) : "";
    return PyUnicode_DecodeFSDefault(path);
}

static PyObject *
file_store_repr(PyObject *op)
{
    PyObject *path = file_store_get_path(op, NULL);
    if (path == NULL) {
        return NULL;
    }
    PyObject *text = PyUnicode_FromFormat("<devicemesh.FileStore %R>", path);
    Py_DECREF(path);
    return text;
}

static PyGetSetDef file_store_getset[] = {
    {"path", file_store_get_path, NULL, "The file's path, as it was given.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(
    file_store_doc,
    "FileStore(file_name, world_size=-1)\n"
    "--\n"
    "\n"
    "A store in a file: no server and no port, for processes of one host or of hosts\n"
    "that share a file system with working locks.\n"
    "\n"
    "Args:\n"
    "    file_name: path; made when it is not there (for this user alone). It must be\n"
    "        fresh: what stands in it counts.\n"
    "    world_size: if 1 or more, the file is removed once that many stores on it "
    "have\n"
    "        been closed.\n"
    "\n"
    "Raises:\n"
    "    OSError: the file cannot be opened.\n"
    "\n"
    "Example:\n"
    "    >>> import os, tempfile\n"
    "    >>> from devicemesh import FileStore\n"
    "    >>> with tempfile.TemporaryDirectory() as folder:\n"
    "    ...     with FileStore(os.path.join(folder, 'store')) as store:\n"
    "    ...         store.add('n', 1)\n"
    "    1\n");

static PyType_Slot file_store_slots[] = {
    {Py_tp_doc, (void *)file_store_doc},
    {Py_tp_new, file_store_new},
    {Py_tp_repr, file_store_repr},
    {Py_tp_getset, file_store_getset},
    {0, NULL},
};

static PyType_Spec file_store_spec = {
    .name = "devicemesh.FileStore",
    .basicsize = sizeof(py_store),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = file_store_slots,
};

/* --- HashStore -------------------------------------------------------------------------- */

static PyObject *
hash_store_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {NULL};
    py_state *state = py_state_of_type(type);
    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, ":HashStore", names)) {
        return NULL;
    }
    dm_store *store = NULL;
    dm_error err;
    if (dm_store_hash_new(&store, &err) != DM_OK) {
        return py_raise(state, &err);
    }
    return py_store_make(type, store, NULL, PY_STORE_TIMEOUT_NS);
}

PyDoc_STRVAR(hash_store_doc,
             "HashStore()\n"
             "--\n"
             "\n"
             "A store inside this process, for threads that play ranks and for tests.\n"
             "\n"
             "Example:\n"
             "    >>> from devicemesh import HashStore\n"
             "    >>> HashStore().add('n', 2)\n"
             "    2\n");

static PyType_Slot hash_store_slots[] = {
    {Py_tp_doc, (void *)hash_store_doc},
    {Py_tp_new, hash_store_new},
    {0, NULL},
};

static PyType_Spec hash_store_spec = {
    .name = "devicemesh.HashStore",
    .basicsize = sizeof(py_store),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = hash_store_slots,
};

/* --- PrefixStore ------------------------------------------------------------------------- */

/* The time-out to begin with: that of the store under it. */
static int64_t
timeout_of_base(const py_state *state, PyObject *base)
{
    return PyObject_TypeCheck(base, state->store_type) ? ((py_store *)base)->timeout_ns
                                                       : PY_STORE_TIMEOUT_NS;
}

static PyObject *
prefix_store_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"prefix", "store", NULL};
    PyObject *prefix_arg = NULL;
    PyObject *base_arg = NULL;
    py_state *state = py_state_of_type(type);
    if (state == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "OO:PrefixStore",
                                                      names, &prefix_arg, &base_arg)) {
        return NULL;
    }
    const char *prefix = py_store_key(prefix_arg, "prefix");
    dm_store *base =
        prefix == NULL ? NULL : py_store_from_object(state, base_arg, "store");
    if (base == NULL) {
        return NULL;
    }
    dm_store *store = NULL;
    dm_error err;
    dm_status status = dm_store_prefix_new(base, prefix, &store, &err);
    dm_store_release(base);
    if (status != DM_OK) {
        return py_raise(state, &err);
    }
    return py_store_make(type, store, NULL, timeout_of_base(state, base_arg));
}

static PyObject *
prefix_store_get_underlying(PyObject *op, void *Py_UNUSED(closure))
{
    py_store *self = (py_store *)op;
    py_state *state = py_state_of_type(Py_TYPE(op));
    const char *prefix;
    if (state == NULL) {
        return NULL;
    }
    if (self->store == NULL) {
        Py_RETURN_NONE;
    }
    return py_store_wrap(state, dm_store_prefix_base(self->store, &prefix));
}

static PyObject *
prefix_store_repr(PyObject *op)
{
    py_store *self = (py_store *)op;
    const char *prefix = "";
    dm_store *base =
        self->store != NULL ? dm_store_prefix_base(self->store, &prefix) : NULL;
    return PyUnicode_FromFormat("<devicemesh.PrefixStore '%s' of a %s store>", prefix,
                                base != NULL ? dm_store_kind(base) : "finalized");
}

static PyGetSetDef prefix_store_getset[] = {
    {"underlying_store", prefix_store_get_underlying, NULL, "The store under the view.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(prefix_store_doc,
             "PrefixStore(prefix, store)\n"
             "--\n"
             "\n"
             "A view of `store` in which every key stands for '<prefix>/<key>'.\n"
             "\n"
             "Args:\n"
             "    prefix: str.\n"
             "    store: a Store, or any object with torch's Store methods.\n"
             "\n"
             "Example:\n"
             "    >>> from devicemesh import HashStore, PrefixStore\n"
             "    >>> store = HashStore()\n"
             "    >>> PrefixStore('job', store).set('a', '1'); store.get('job/a')\n"
             "    b'1'\n");

static PyType_Slot prefix_store_slots[] = {
    {Py_tp_doc, (void *)prefix_store_doc},
    {Py_tp_new, prefix_store_new},
    {Py_tp_repr, prefix_store_repr},
    {Py_tp_getset, prefix_store_getset},
    {0, NULL},
};

static PyType_Spec prefix_store_spec = {
    .name = "devicemesh.PrefixStore",
    .basicsize = sizeof(py_store),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = prefix_store_slots,
};

/* ------------------------------------------------------------------------------------------ */

int
py_store_types_register(PyObject *module)
{
    py_state *state = py_state_of_module(module);
    PyObject *base = (PyObject *)state->store_type;
    if (py_state_add_type(module, &tcp_store_spec, base, &state->tcp_store_type) < 0 ||
        py_state_add_type(module, &file_store_spec, base, &state->file_store_type) <
            0 ||
        py_state_add_type(module, &hash_store_spec, base, &state->hash_store_type) <
            0 ||
        py_state_add_type(module, &prefix_store_spec, base, &state->prefix_store_type) <
            0) {
        return -1;
    }
    return 0;
}

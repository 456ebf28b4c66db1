/* The type StoreServer: a server without a client.
 *
 * A native handle. Its thread never touches Python, so joining it with or without the
 * GIL is short.
 */
#include "python/py_store_object.h"

#include <stdlib.h>
#include <structmember.h>
#include <unistd.h>

#include "base/dm_alloc.h"
#include "python/py_args.h"
#include "python/py_error.h"
#include "python/py_store_args.h"
#include "python/py_wait.h"

typedef struct py_store_server {
    PyObject_HEAD
    dm_store_server *server; /* NULL once closed */
    char *host;
    uint16_t port;
    pid_t pid;
    PyObject *weak_references;
} py_store_server;

int
py_store_token(PyObject *given, const char **token)
{
    if (given == Py_None) {
        const char *text = getenv("DEVICEMESH_STORE_TOKEN");
        *token = text != NULL && *text != '\0' ? text : NULL;
        return 0;
    }
    const char *text = py_store_key(given, "token");
    if (text == NULL) {
        return -1;
    }
    *token = *text != '\0' ? text : NULL;
    return 0;
}

static PyObject *
server_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"host", "port", "token", "listen_fd", NULL};
    PyObject *host_arg = NULL;
    PyObject *port_arg = NULL;
    PyObject *token_arg = Py_None;
    PyObject *fd_arg = Py_None;
    py_state *state = py_state_of_type(type);
    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "|OOO$O:StoreServer", names,
                                     &host_arg, &port_arg, &token_arg, &fd_arg)) {
        return NULL;
    }
    const char *host = host_arg == NULL ? "127.0.0.1" : py_store_key(host_arg, "host");
    int64_t port = 0;
    int64_t fd = -1;
    const char *token;
    if (host == NULL ||
        (port_arg != NULL && py_args_int(port_arg, "port", 0, 65535, &port) < 0) ||
        (fd_arg != Py_None &&
         py_args_int(fd_arg, "listen_fd", 0, INT32_MAX, &fd) < 0) ||
        py_store_token(token_arg, &token) < 0) {
        return NULL;
    }
    py_store_server *self = (py_store_server *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->pid = getpid();
    self->host = dm_strdup(host);
    if (self->host == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    const dm_store_server_config config = {host, (uint16_t)port, token, (int)fd};
    dm_store_server *server = NULL;
    dm_error err;
    dm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = dm_store_server_start(&config, &server, &err);
    Py_END_ALLOW_THREADS
    if (status != DM_OK) {
        Py_DECREF(self);
        return py_raise(state, &err);
    }
    self->server = server;
    self->port = dm_store_server_port(server);
    return (PyObject *)self;
}

PyDoc_STRVAR(server_close_doc,
             "close($self, /)\n"
             "--\n"
             "\n"
             "Stops the server and drops its clients' connections. Idempotent.");

static PyObject *
server_close(PyObject *op, PyObject *Py_UNUSED(args))
{
    py_store_server *self = (py_store_server *)op;
    dm_store_server *server = self->server;
    self->server = NULL;
    Py_BEGIN_ALLOW_THREADS
    dm_store_server_stop(server);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *
server_enter(PyObject *op, PyObject *Py_UNUSED(args))
{
    return Py_NewRef(op);
}

static PyObject *
server_exit(PyObject *op, PyObject *Py_UNUSED(args))
{
    return server_close(op, NULL);
}

static PyObject *
server_reduce(PyObject *Py_UNUSED(op), PyObject *Py_UNUSED(args))
{
    PyErr_SetString(PyExc_TypeError,
                    "a StoreServer cannot be pickled: it belongs to one process");
    return NULL;
}

/* Warns about a server that was not closed, where it was made. */
static void
server_finalize(PyObject *op)
{
    py_store_server *self = (py_store_server *)op;
    dm_store_server *server = self->server;
    self->server = NULL;
    if (server == NULL) {
        return;
    }
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (self->pid == getpid() &&
        PyErr_ResourceWarning(op, 1, "unclosed store server at %s:%d", self->host,
                              (int)self->port) < 0) {
        PyErr_WriteUnraisable(op);
    }
    PyErr_Restore(type, value, traceback);
    dm_store_server_stop(server);
}

static void
server_dealloc(PyObject *op)
{
    py_store_server *self = (py_store_server *)op;
    if (PyObject_CallFinalizerFromDealloc(op) < 0) {
        return;
    }
    if (self->weak_references != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    dm_free(self->host);
    PyTypeObject *type = Py_TYPE(op);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyObject *
server_get_host(PyObject *op, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(((py_store_server *)op)->host);
}

static PyObject *
server_get_port(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(((py_store_server *)op)->port);
}

static PyObject *
server_get_clients(PyObject *op, void *Py_UNUSED(closure))
{
    dm_store_server *server = ((py_store_server *)op)->server;
    return PyLong_FromLong(server == NULL ? 0 : dm_store_server_clients(server));
}

static PyObject *
server_get_closed(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((py_store_server *)op)->server == NULL);
}

static PyObject *
server_repr(PyObject *op)
{
    py_store_server *self = (py_store_server *)op;
    return PyUnicode_FromFormat("<devicemesh.StoreServer %s:%d%s>", self->host,
                                (int)self->port, self->server == NULL ? " closed" : "");
}

static PyMethodDef server_methods[] = {
    {"close", server_close, METH_NOARGS, server_close_doc},
    {"__enter__", server_enter, METH_NOARGS, NULL},
    {"__exit__", server_exit, METH_VARARGS, NULL},
    {"__reduce__", server_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef server_getset[] = {
    {"host", server_get_host, NULL, "The address it was asked to listen on.", NULL},
    {"port", server_get_port, NULL, "The port it listens on.", NULL},
    {"clients", server_get_clients, NULL, "Number of clients connected now.", NULL},
    {"closed", server_get_closed, NULL, "Whether close() has been called.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef server_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(py_store_server, weak_references),
     READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(
    server_doc,
    "StoreServer(host='127.0.0.1', port=0, token=None, *, listen_fd=None)\n"
    "--\n"
    "\n"
    "Serves a store to TCPStore clients, devicemesh's or torch's, from one thread.\n"
    "\n"
    "Args:\n"
    "    host: the address to listen on, and no other.\n"
    "    port: 0 takes any free one; see the attribute `port`.\n"
    "    token: shared secret that clients must send; None takes\n"
    "        DEVICEMESH_STORE_TOKEN from the environment, '' means none. Torch's "
    "clients\n"
    "        have none.\n"
    "    listen_fd: a listening socket to take over, instead of host and port.\n"
    "\n"
    "Raises:\n"
    "    OSError: cannot listen there; the text names host and port.\n"
    "\n"
    "Example:\n"
    "    >>> from devicemesh import StoreServer, TCPStore\n"
    "    >>> with StoreServer() as server:\n"
    "    ...     with TCPStore(server.host, server.port) as store:\n"
    "    ...         store.add('n', 1)\n"
    "    1\n");

static PyType_Slot server_slots[] = {
    {Py_tp_doc, (void *)server_doc},
    {Py_tp_new, server_new},
    {Py_tp_finalize, server_finalize},
    {Py_tp_dealloc, server_dealloc},
    {Py_tp_repr, server_repr},
    {Py_tp_methods, server_methods},
    {Py_tp_getset, server_getset},
    {Py_tp_members, server_members},
    {0, NULL},
};

static PyType_Spec server_spec = {
    .name = "devicemesh.StoreServer",
    .basicsize = sizeof(py_store_server),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = server_slots,
};

int
py_store_server_register(PyObject *module)
{
    py_state *state = py_state_of_module(module);
    return py_state_add_type(module, &server_spec, NULL, &state->store_server_type);
}

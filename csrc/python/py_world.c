/* The World type and the default world: see py_world.h. */
#include "python/py_world.h"

#include <stdio.h>
#include <string.h>

#include <structmember.h>

#include "python/py_args.h"
#include "python/py_error.h"
#include "python/py_group.h"
#include "python/py_store.h"
#include "python/py_wait.h"
#include "python/py_work.h"

/* Half an hour, as torch.distributed has it. */
#define DEFAULT_TIMEOUT_NS (1800 * DM_NS_PER_S)

/* A native handle and nothing else. */
typedef struct py_world {
    PyObject_HEAD
    dm_world *world; /* NULL once finalized */
    PyObject *weak_references;
} py_world;

/* --- life ------------------------------------------------------------------------- */

/* A World that takes over `world`. */
static PyObject *
world_wrap(PyTypeObject *type, dm_world *world)
{
    py_world *self = (py_world *)type->tp_alloc(type, 0);
    if (self == NULL) {
        dm_world_release(world);
        return NULL;
    }
    self->world = world;
    return (PyObject *)self;
}

static PyObject *
world_make(PyTypeObject *type, const dm_world_config *config)
{
    py_state *state = py_state_of_type(type);
    if (state == NULL) {
        return NULL;
    }
    dm_error err;
    dm_world *world = NULL;
    if (dm_world_new(config, &world, &err) != DM_OK) {
        return py_raise(state, &err);
    }
    return world_wrap(type, world);
}

static int
parse_place(PyObject *rank, PyObject *size, PyObject *timeout, dm_world_config *config)
{
    int64_t number = 0;
    if (py_args_int(size, "size", 1, INT32_MAX, &number) < 0) {
        return -1;
    }
    config->size = (int32_t)number;
    if (rank != NULL) {
        if (py_args_int(rank, "rank", 0, config->size - 1, &number) < 0) {
            return -1;
        }
        config->rank = (int32_t)number;
    }
    config->timeout_ns = DEFAULT_TIMEOUT_NS;
    if (timeout != NULL && timeout != Py_None) {
        return py_timeout_parse(timeout, "timeout", &config->timeout_ns);
    }
    return 0;
}

PyDoc_STRVAR(
    world_doc,
    "World(store, rank, size, timeout=None)\n"
    "--\n"
    "\n"
    "A set of processes that can find each other: the ranks 0..size-1.\n"
    "\n"
    "Most programs never make one: init_device_mesh uses the default world, which\n"
    "devicemesh.bootstrap finds. Making a world communicates nothing. Several can "
    "live\n"
    "in one process, each with a key space of its own (a PrefixStore).\n"
    "\n"
    "Args:\n"
    "    store: the Store that all ranks share (one of devicemesh's, or any object "
    "with\n"
    "        torch's Store methods). None for a world of one. The world never closes "
    "it.\n"
    "    rank: this process's rank, 0..size-1.\n"
    "    size: number of ranks.\n"
    "    timeout: default time-out of the world's groups, in seconds or as a "
    "timedelta;\n"
    "        None means half an hour, as in torch.distributed.\n"
    "\n"
    "Raises:\n"
    "    ValueError: rank or size out of range, no store for a world of two or more.\n"
    "\n"
    "Example:\n"
    "    >>> from devicemesh import World\n"
    "    >>> World(None, 0, 1).size\n"
    "    1\n");

static PyObject *
world_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"store", "rank", "size", "timeout", NULL};
    PyObject *store = NULL;
    PyObject *rank = NULL;
    PyObject *size = NULL;
    PyObject *timeout = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|O:World", names, &store, &rank,
                                     &size, &timeout)) {
        return NULL;
    }
    dm_world_config config = {0};
    if (parse_place(rank, size, timeout, &config) < 0) {
        return NULL;
    }
    if (store != Py_None) {
        py_state *state = py_state_of_type(type);
        if (state == NULL) {
            return NULL;
        }
        config.store = py_store_from_object(state, store, "store");
        if (config.store == NULL) {
            return NULL;
        }
    }
    PyObject *world = world_make(type, &config);
    dm_store_release(config.store);
    return world;
}

/* May run twice: once by hand of the collector, once by dealloc. */
static void
world_finalize(PyObject *op)
{
    py_world *self = (py_world *)op;
    dm_world *world = self->world;
    self->world = NULL;
    dm_world_release(world);
}

static void
world_dealloc(PyObject *op)
{
    py_world *self = (py_world *)op;
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

/* --- methods ---------------------------------------------------------------------- */

PyDoc_STRVAR(
    world_simulated_doc,
    "simulated($type, /, size, rank=0, timeout=None)\n"
    "--\n"
    "\n"
    "A world without communication: this process plays `rank` of `size` ranks.\n"
    "\n"
    "Every group made in it uses the fake backend: operations end at once, as if the\n"
    "other members had contributed nothing. See devicemesh.simulate.");

static PyObject *
world_simulated(PyObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"size", "rank", "timeout", NULL};
    PyObject *size = NULL;
    PyObject *rank = NULL;
    PyObject *timeout = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OO:simulated", names, &size,
                                     &rank, &timeout)) {
        return NULL;
    }
    dm_world_config config = {.simulated = true};
    if (parse_place(rank, size, timeout, &config) < 0) {
        return NULL;
    }
    return world_make((PyTypeObject *)type, &config);
}

PyDoc_STRVAR(
    world_close_doc,
    "close($self, /)\n"
    "--\n"
    "\n"
    "Closes every group made in the world; later groups and meshes are refused.\n"
    "\n"
    "Operations that run or are queued end with ClosedError. The store stays open: it\n"
    "belongs to who made it. Idempotent; waits for no other rank.");

static PyObject *
world_close(PyObject *op, PyObject *Py_UNUSED(args))
{
    py_world *self = (py_world *)op;
    if (self->world != NULL) {
        dm_world *world = dm_world_hold(self->world);
        Py_BEGIN_ALLOW_THREADS
        dm_world_close(world);
        dm_world_release(world);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    world_new_group_doc,
    "new_group($self, /, ranks, backend=None, timeout=None, name=None)\n"
    "--\n"
    "\n"
    "Makes a group of the given ranks without a mesh.\n"
    "\n"
    "Only the members call this, each with the same list; nothing is connected until "
    "the\n"
    "first operation. Members that ask for different backends or names are told so.\n"
    "\n"
    "Args:\n"
    "    ranks: sequence of global ranks; their order is the order of group ranks.\n"
    "    backend: 'gloo' (the default) or 'fake'.\n"
    "    timeout: seconds or a timedelta; None takes the world's.\n"
    "    name: what errors call the group; the same on every member.\n"
    "\n"
    "Returns:\n"
    "    A new ProcessGroup.\n"
    "\n"
    "Raises:\n"
    "    ValueError: a rank out of range or twice, or this rank is not among them.\n"
    "    MismatchError: another member asked for something else.\n"
    "    LibraryError: the backend's library is missing.\n"
    "\n"
    "Example:\n"
    "    >>> from devicemesh import World\n"
    "    >>> group = World.simulated(8, rank=2).new_group([0, 2, 4, 6])\n"
    "    >>> group.rank(), group.size()\n"
    "    (1, 4)\n");

/* A new array from PyMem_Malloc. */
static int32_t *
parse_ranks(PyObject *object, int32_t *n)
{
    PyObject *list = PySequence_Fast(object, "ranks must be a sequence of ints");
    if (list == NULL) {
        return NULL;
    }
    Py_ssize_t size = PySequence_Fast_GET_SIZE(list);
    int32_t *ranks = PyMem_New(int32_t, size > 0 ? size : 1);
    if (ranks == NULL || size > INT32_MAX) {
        PyMem_Free(ranks);
        Py_DECREF(list);
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        int64_t rank = 0;
        if (py_args_int(PySequence_Fast_GET_ITEM(list, i), "ranks", 0, INT32_MAX,
                        &rank) < 0) {
            PyMem_Free(ranks);
            Py_DECREF(list);
            return NULL;
        }
        ranks[i] = (int32_t)rank;
    }
    Py_DECREF(list);
    *n = (int32_t)size;
    return ranks;
}

/* The same text on every member for the same list. */
static void
members_text(const int32_t *ranks, int32_t n, char *text, size_t size)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (int32_t i = 0; i < n; i++) {
        hash = (hash ^ (uint32_t)ranks[i]) * UINT64_C(0x100000001b3);
        hash ^= hash >> 29;
    }
    snprintf(text, size, "group %d %016llx", (int)n, (unsigned long long)hash);
}

/* Agreement and group in one stretch without the GIL. */
static dm_status
make_group(dm_world *world, dm_group_spec *spec, const dm_wait *wait, dm_group **group,
           dm_error *err)
{
    char members[64];
    char request[256];
    char identity[DM_IDENTITY_SIZE];
    char name[DM_IDENTITY_SIZE + 4];
    members_text(spec->ranks, spec->size, members, sizeof(members));
    bool named = spec->dim_name != NULL;
    snprintf(request, sizeof(request), "a group of %d%s%.64s%s, backend '%.64s'",
             (int)spec->size, named ? " named '" : "", named ? spec->dim_name : "",
             named ? "'" : "", spec->backend);
    DM_TRY(dm_world_agree(world, members, request, wait, identity, err));
    snprintf(name, sizeof(name), "%s/g", identity);
    spec->identity = name;
    return dm_group_new(world, spec, group, err);
}

static PyObject *
world_new_group(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ranks", "backend", "timeout", "name", NULL};
    PyObject *ranks_arg = NULL;
    const char *backend = NULL;
    PyObject *timeout = Py_None;
    const char *name = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|zOz:new_group", names, &ranks_arg,
                                     &backend, &timeout, &name)) {
        return NULL;
    }
    py_state *state = py_state_of_type(Py_TYPE(op));
    dm_world *world = state == NULL ? NULL : py_world_of(state, op, "self");
    if (world == NULL) {
        return NULL;
    }
    dm_group_spec spec = {.dim_name = name,
                          .backend = backend != NULL ? backend : "gloo",
                          .timeout_ns = dm_world_timeout(world)};
    if (timeout != Py_None &&
        py_timeout_parse(timeout, "timeout", &spec.timeout_ns) < 0) {
        return NULL;
    }
    int32_t *ranks = parse_ranks(ranks_arg, &spec.size);
    if (ranks == NULL) {
        return NULL;
    }
    spec.ranks = ranks;

    dm_error err;
    dm_group *group = NULL;
    dm_world_hold(world);
    py_waiter waiter;
    py_waiter_start(&waiter, dm_clock_deadline(dm_world_timeout(world)));
    dm_status status = make_group(world, &spec, &waiter.wait, &group, &err);
    dm_world_release(world);
    py_waiter_stop(&waiter);
    PyMem_Free(ranks);
    if (status != DM_OK) {
        return py_raise(state, &err);
    }
    PyObject *result = py_group_wrap(state, group);
    dm_group_release(group);
    return result;
}

static PyObject *
world_enter(PyObject *op, PyObject *Py_UNUSED(args))
{
    return Py_NewRef(op);
}

static PyObject *
world_exit(PyObject *op, PyObject *Py_UNUSED(args))
{
    return world_close(op, NULL);
}

static PyObject *
world_reduce(PyObject *Py_UNUSED(op), PyObject *Py_UNUSED(args))
{
    PyErr_SetString(PyExc_TypeError,
                    "a World cannot be pickled: it belongs to one process; make one in "
                    "each process");
    return NULL;
}

/* --- attributes --------------------------------------------------------------------- */

/* The handle, or NULL with ClosedError once the object has been finalized. */
static dm_world *
handle(PyObject *op)
{
    py_world *self = (py_world *)op;
    if (self->world == NULL) {
        py_state *state = py_state_of_type(Py_TYPE(op));
        if (state != NULL) {
            PyErr_SetString(state->closed_error, "the world has been finalized");
        }
    }
    return self->world;
}

static PyObject *
world_get_rank(PyObject *op, void *Py_UNUSED(closure))
{
    dm_world *world = handle(op);
    return world == NULL ? NULL : PyLong_FromLong(dm_world_rank(world));
}

static PyObject *
world_get_size(PyObject *op, void *Py_UNUSED(closure))
{
    dm_world *world = handle(op);
    return world == NULL ? NULL : PyLong_FromLong(dm_world_size(world));
}

static PyObject *
world_get_timeout(PyObject *op, void *Py_UNUSED(closure))
{
    dm_world *world = handle(op);
    return world == NULL ? NULL : py_timeout_object(dm_world_timeout(world));
}

static PyObject *
world_get_store(PyObject *op, void *Py_UNUSED(closure))
{
    dm_world *world = handle(op);
    if (world == NULL) {
        return NULL;
    }
    dm_store *store = dm_world_store(world);
    if (store == NULL) {
        Py_RETURN_NONE;
    }
    py_state *state = py_state_of_type(Py_TYPE(op));
    return state == NULL ? NULL : py_store_wrap(state, store);
}

static PyObject *
world_get_is_simulated(PyObject *op, void *Py_UNUSED(closure))
{
    dm_world *world = handle(op);
    return world == NULL ? NULL : PyBool_FromLong(dm_world_is_simulated(world));
}

static PyObject *
world_get_closed(PyObject *op, void *Py_UNUSED(closure))
{
    dm_world *world = ((py_world *)op)->world;
    return PyBool_FromLong(world == NULL || dm_world_is_closed(world));
}

static PyObject *
world_repr(PyObject *op)
{
    dm_world *world = ((py_world *)op)->world;
    if (world == NULL) {
        return PyUnicode_FromString("<devicemesh.World finalized>");
    }
    return PyUnicode_FromFormat("<devicemesh.World rank=%d size=%d%s%s>",
                                (int)dm_world_rank(world), (int)dm_world_size(world),
                                dm_world_is_simulated(world) ? " simulated" : "",
                                dm_world_is_closed(world) ? " closed" : "");
}

static PyMethodDef world_methods[] = {
    {"simulated", (PyCFunction)(void (*)(void))world_simulated,
     METH_VARARGS | METH_KEYWORDS | METH_CLASS, world_simulated_doc},
    {"new_group", (PyCFunction)(void (*)(void))world_new_group,
     METH_VARARGS | METH_KEYWORDS, world_new_group_doc},
    {"close", world_close, METH_NOARGS, world_close_doc},
    {"__enter__", world_enter, METH_NOARGS, NULL},
    {"__exit__", world_exit, METH_VARARGS, NULL},
    {"__reduce__", world_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef world_getset[] = {
    {"rank", world_get_rank, NULL, "This process's rank.", NULL},
    {"size", world_get_size, NULL, "Number of ranks.", NULL},
    {"timeout", world_get_timeout, NULL,
     "Default time-out of groups in seconds, or None.", NULL},
    {"store", world_get_store, NULL, "The Store of the world, or None.", NULL},
    {"is_simulated", world_get_is_simulated, NULL,
     "Whether the world is one without communication.", NULL},
    {"closed", world_get_closed, NULL, "Whether close() has been called.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef world_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(py_world, weak_references), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot world_slots[] = {
    {Py_tp_doc, (void *)world_doc},
    {Py_tp_new, world_new},
    {Py_tp_finalize, world_finalize},
    {Py_tp_dealloc, world_dealloc},
    {Py_tp_repr, world_repr},
    {Py_tp_methods, world_methods},
    {Py_tp_getset, world_getset},
    {Py_tp_members, world_members},
    {0, NULL},
};

static PyType_Spec world_spec = {
    .name = "devicemesh.World",
    .basicsize = sizeof(py_world),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = world_slots,
};

/* --- for the other files -------------------------------------------------------------- */

dm_world *
py_world_of(py_state *state, PyObject *object, const char *name)
{
    if (!Py_IS_TYPE(object, state->world_type)) {
        PyErr_Format(PyExc_TypeError, "%s must be a World, got %.200s", name,
                     Py_TYPE(object)->tp_name);
        return NULL;
    }
    return handle(object);
}

PyObject *
py_world_default(py_state *state)
{
    PyObject *world = state->default_world;
    if (world != NULL && ((py_world *)world)->world != NULL &&
        !dm_world_is_closed(((py_world *)world)->world)) {
        return Py_NewRef(world);
    }
    PyObject *bootstrap = PyImport_ImportModule("devicemesh.bootstrap");
    if (bootstrap == NULL) {
        return NULL;
    }
    world = PyObject_CallMethod(bootstrap, "default_world", NULL);
    Py_DECREF(bootstrap);
    if (world != NULL && py_world_of(state, world, "the default world") == NULL) {
        Py_CLEAR(world);
    }
    return world;
}

/* --- module functions ------------------------------------------------------------------ */

PyDoc_STRVAR(get_default_world_doc, "_get_default_world($module, /)\n"
                                    "--\n"
                                    "\n"
                                    "The default World of this process, or None.");

static PyObject *
get_default_world(PyObject *module, PyObject *Py_UNUSED(args))
{
    PyObject *world = py_state_of_module(module)->default_world;
    return Py_NewRef(world != NULL ? world : Py_None);
}

PyDoc_STRVAR(
    set_default_world_doc,
    "_set_default_world($module, world, /)\n"
    "--\n"
    "\n"
    "Makes `world` (a World or None) the default one; returns the one before.");

static PyObject *
set_default_world(PyObject *module, PyObject *world)
{
    py_state *state = py_state_of_module(module);
    if (world != Py_None && py_world_of(state, world, "world") == NULL) {
        return NULL;
    }
    PyObject *before = state->default_world;
    state->default_world = world == Py_None ? NULL : Py_NewRef(world);
    return before != NULL ? before : Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {
    {"_get_default_world", get_default_world, METH_NOARGS, get_default_world_doc},
    {"_set_default_world", set_default_world, METH_O, set_default_world_doc},
    {NULL, NULL, 0, NULL},
};

int
py_world_register(PyObject *module)
{
    py_state *state = py_state_of_module(module);
    if (py_state_add_type(module, &world_spec, NULL, &state->world_type) < 0) {
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}

/* DeviceMesh from arguments: the constructor and _from_shape. */
#include "python/py_mesh.h"

#include "python/py_error.h"
#include "python/py_world.h"

/* What the constructor and _from_shape have in common. */
typedef struct mesh_request {
    PyObject *device_type; /* as given */
    PyObject *names;
    PyObject *overrides;
    PyObject *timeout;
    PyObject *world; /* World, or None for the default one */
    PyObject *rank;  /* int, or None for the world's */
    int init_backend;
    int reuse;
} mesh_request;

static int
parse_rank(PyObject *value, int32_t *rank)
{
    Py_ssize_t number = PyNumber_AsSsize_t(value, PyExc_OverflowError);
    if (number == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (number < 0 || number > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "rank must be 0 or more, got %zd", number);
        return -1;
    }
    *rank = (int32_t)number;
    return 0;
}

static int
check_world(dm_world *world, const py_mesh_root *root, const mesh_request *request)
{
    int64_t count = dm_ranks_size(root->ranks);
    int32_t size = dm_world_size(world);
    if (!request->init_backend) {
        return 0;
    }
    if (count > size) {
        PyErr_Format(PyExc_RuntimeError,
                     "Mesh should not be bigger than default world size %d, but found "
                     "%lld ranks!",
                     (int)size, (long long)count);
        return -1;
    }
    int32_t largest = py_mesh_root_largest(root);
    if (largest >= size) {
        PyErr_Format(PyExc_RuntimeError,
                     "the mesh has rank %d, but the world has ranks 0 to %d",
                     (int)largest, (int)size - 1);
        return -1;
    }
    if (root->rank != dm_world_rank(world)) {
        PyErr_Format(PyExc_ValueError,
                     "_rank is %d, but this process is rank %d of the world",
                     (int)root->rank, (int)dm_world_rank(world));
        return -1;
    }
    return 0;
}

/* The native half: with the world, unless a rank was given and no backend is wanted.
 * Takes over `ranks`. */
static py_mesh_root *
new_native(py_state *state, const mesh_request *request, dm_ranks *ranks)
{
    PyObject *object = NULL;
    dm_world *world = NULL;
    int32_t rank = 0;
    bool has_rank = request->rank != NULL && request->rank != Py_None;
    if (has_rank && parse_rank(request->rank, &rank) < 0) {
        goto error;
    }
    if (request->init_backend || !has_rank) {
        object = request->world != NULL && request->world != Py_None
                     ? Py_NewRef(request->world)
                     : py_world_default(state);
        world = object == NULL ? NULL : py_world_of(state, object, "world");
        if (world == NULL) {
            goto error;
        }
        rank = has_rank ? rank : dm_world_rank(world);
    }
    py_mesh_root *root = py_mesh_root_new(state, world, ranks, rank);
    Py_XDECREF(object);
    if (root != NULL && world != NULL && check_world(world, root, request) < 0) {
        Py_CLEAR(root);
    }
    return root;

error:
    Py_XDECREF(object);
    dm_ranks_free(ranks);
    return NULL;
}

/* The key under which groups are reused: the world and what was asked for. */
static PyObject *
reuse_key(py_mesh *self, PyObject *request)
{
    return Py_BuildValue("(NO)", PyLong_FromVoidPtr(self->native->world), request);
}

/* Roots of worlds that were closed will not be asked for again. */
static int
sweep_reused(PyObject *table)
{
    PyObject *items = PyDict_Items(table);
    int result = items == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; result == 0 && i < PyList_GET_SIZE(items); i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        py_mesh_root *root = (py_mesh_root *)PyTuple_GET_ITEM(item, 1);
        if (dm_world_is_closed(root->world)) {
            result = PyDict_DelItem(table, PyTuple_GET_ITEM(item, 0));
        }
    }
    Py_XDECREF(items);
    return result;
}

/* reuse_groups=True: takes over the native half of an equal mesh that was made so too,
 * or becomes the one that others find. */
static int
open_reused(py_state *state, py_mesh *self, PyObject *request)
{
    if (state->reused_roots == NULL) {
        state->reused_roots = PyDict_New();
    }
    if (state->reused_roots == NULL || sweep_reused(state->reused_roots) < 0) {
        return -1;
    }
    PyObject *key = reuse_key(self, request);
    if (key == NULL) {
        return -1;
    }
    int result = -1;
    PyObject *found = PyDict_GetItemWithError(state->reused_roots, key);
    if (found != NULL) {
        self->native->sharers--;
        Py_SETREF(self->native, (py_mesh_root *)Py_NewRef(found));
        self->native->sharers++;
    }
    if (!PyErr_Occurred()) {
        result = py_mesh_root_open(state, self->native, request);
    }
    if (result == 0 && found == NULL) {
        result = PyDict_SetItem(state->reused_roots, key, (PyObject *)self->native);
    }
    Py_DECREF(key);
    return result;
}

/* The members agree; ranks outside show what they asked for. The first thing of a mesh
 * that communicates. */
static int
open_groups(py_state *state, py_mesh *self, int reuse)
{
    PyObject *request = py_mesh_request(self);
    if (request == NULL) {
        return -1;
    }
    int result = self->native->offset < 0
                     ? py_mesh_root_note(state, self->native, request)
                 : reuse ? open_reused(state, self, request)
                         : py_mesh_root_open(state, self->native, request);
    Py_DECREF(request);
    return result;
}

/* Takes over `layout` and `ranks`. */
static int
init_mesh(py_state *state, py_mesh *self, const mesh_request *request,
          dm_layout *layout, dm_ranks *ranks)
{
    PyObject *device_type = NULL, *names = NULL, *specs = NULL;
    py_mesh_root *native = NULL;
    int result = -1;
    int ndim = dm_layout_ndim(layout);
    if (self->native != NULL) {
        PyErr_SetString(PyExc_TypeError,
                        "a DeviceMesh cannot change: __init__ was called twice");
        goto done;
    }
    device_type = py_mesh_device_type(state, request->device_type);
    if (device_type == NULL || py_mesh_names_parse(request->names, ndim, &names) < 0) {
        goto done;
    }
    specs = py_mesh_specs_parse(state, request->overrides, request->timeout, ndim,
                                names, device_type, Py_None);
    if (specs == NULL) {
        goto done;
    }
    native = new_native(state, request, ranks);
    ranks = NULL;
    if (native == NULL) {
        goto done;
    }
    result = py_mesh_fill(self, native, NULL, layout, device_type, names, specs,
                          request->init_backend);
    layout = NULL;
    if (result == 0 && request->init_backend) {
        result = open_groups(state, self, request->reuse);
        if (result < 0) {
            py_mesh_unfill(self);
        }
    }

done:
    dm_layout_free(layout);
    dm_ranks_free(ranks);
    Py_XDECREF(device_type);
    Py_XDECREF(names);
    Py_XDECREF(specs);
    Py_XDECREF(native);
    return result;
}

int
py_mesh_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {
        "device_type", "mesh",  "mesh_dim_names", "backend_override",
        "timeout",     "world", "reuse_groups",   "_init_backend",
        "_rank",       NULL};
    py_state *state = py_state_of_type(Py_TYPE(op));
    PyObject *mesh = NULL;
    mesh_request request = {.init_backend = 1};
    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(
            args, kwargs, "OO|$OOOOppO:DeviceMesh", keywords, &request.device_type,
            &mesh, &request.names, &request.overrides, &request.timeout, &request.world,
            &request.reuse, &request.init_backend, &request.rank)) {
        return -1;
    }
    py_mesh_grid grid;
    if (py_mesh_grid_parse(state, mesh, &grid) < 0) {
        return -1;
    }
    dm_layout *layout = NULL;
    dm_ranks *ranks = NULL;
    dm_error err = DM_ERROR_INIT;
    dm_status status = dm_layout_new(grid.shape, grid.ndim, &layout, &err);
    if (status == DM_OK) {
        status = dm_ranks_new(grid.ranks, grid.count, &ranks, &err);
    }
    py_mesh_grid_clear(&grid);
    if (status != DM_OK) {
        dm_layout_free(layout);
        return py_raise_int(state, &err);
    }
    return init_mesh(state, (py_mesh *)op, &request, layout, ranks);
}

/* A tuple or list of ints -> sizes; returns their number or -1. */
static int
parse_sizes(PyObject *shape, int64_t *sizes)
{
    PyObject *items = PySequence_Fast(shape, "mesh_shape must be a tuple of ints");
    if (items == NULL) {
        return -1;
    }
    Py_ssize_t ndim = PySequence_Fast_GET_SIZE(items);
    if (ndim > PY_MESH_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "a mesh has at most %d dims, got %zd",
                     PY_MESH_MAX_NDIM, ndim);
        ndim = -1;
    }
    for (Py_ssize_t d = 0; d < ndim; d++) {
        sizes[d] =
            PyNumber_AsSsize_t(PySequence_Fast_GET_ITEM(items, d), PyExc_OverflowError);
        if (sizes[d] == -1 && PyErr_Occurred()) {
            ndim = -1;
        }
    }
    Py_DECREF(items);
    return (int)ndim;
}

PyDoc_STRVAR(
    mesh_from_shape_doc,
    "_from_shape($type, device_type, mesh_shape, *, mesh_dim_names=None,\n"
    "            backend_override=None, timeout=None, world=None,\n"
    "            reuse_groups=False)\n"
    "--\n\n"
    "The mesh of ranks 0 to n-1 in row-major order: what init_device_mesh calls.");

static PyObject *
mesh_from_shape(PyObject *cls, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"device_type",      "mesh_shape", "mesh_dim_names",
                               "backend_override", "timeout",    "world",
                               "reuse_groups",     NULL};
    PyTypeObject *type = (PyTypeObject *)cls;
    py_state *state = py_state_of_type(type);
    PyObject *shape = NULL;
    mesh_request request = {.init_backend = 1};
    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$OOOOp:_from_shape", keywords,
                                     &request.device_type, &shape, &request.names,
                                     &request.overrides, &request.timeout,
                                     &request.world, &request.reuse)) {
        return NULL;
    }
    int64_t sizes[PY_MESH_MAX_NDIM];
    int ndim = parse_sizes(shape, sizes);
    if (ndim < 0) {
        return NULL;
    }
    dm_layout *layout = NULL;
    dm_ranks *ranks = NULL;
    dm_error err = DM_ERROR_INIT;
    dm_status status = dm_layout_new(sizes, ndim, &layout, &err);
    if (status == DM_OK) {
        status = dm_ranks_identity(dm_layout_numel(layout), &ranks, &err);
    }
    PyObject *self = status == DM_OK ? type->tp_alloc(type, 0) : NULL;
    if (self == NULL) {
        dm_layout_free(layout);
        dm_ranks_free(ranks);
        return status == DM_OK ? NULL : py_raise(state, &err);
    }
    if (init_mesh(state, (py_mesh *)self, &request, layout, ranks) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

PyMethodDef py_mesh_init_methods[] = {
    {"_from_shape", (PyCFunction)(void (*)(void))mesh_from_shape,
     METH_VARARGS | METH_KEYWORDS | METH_CLASS, mesh_from_shape_doc},
    {NULL, NULL, 0, NULL},
};

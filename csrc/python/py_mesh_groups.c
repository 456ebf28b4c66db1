/* Groups of a mesh: made when asked for, closed together. */
#include "python/py_mesh.h"

#include "base/dm_alloc.h"
#include "python/py_error.h"
#include "python/py_group.h"

/* --- one dim's group --------------------------------------------------------------- */

int32_t *
py_mesh_line_ranks(py_state *state, py_mesh *self, int dim)
{
    dm_layout *line = NULL;
    dm_error err = DM_ERROR_INIT;
    if (dm_layout_select(self->layout, &dim, 1, &line, &err) != DM_OK) {
        py_raise(state, &err);
        return NULL;
    }
    size_t count = (size_t)dm_layout_numel(line);
    int64_t *offsets = dm_malloc_array(count, sizeof(*offsets));
    int32_t *ranks = dm_malloc_array(count, sizeof(*ranks));
    if (offsets == NULL || ranks == NULL) {
        PyErr_NoMemory();
        dm_free(ranks);
        ranks = NULL;
        goto done;
    }
    dm_layout_offsets(line, dm_layout_base(line, self->native->offset), offsets);
    for (size_t i = 0; i < count; i++) {
        ranks[i] = dm_ranks_at(self->native->ranks, offsets[i]);
    }

done:
    dm_free(offsets);
    dm_layout_free(line);
    return ranks;
}

PyObject *
py_mesh_dim_name(py_mesh *self, int dim)
{
    return self->names != NULL ? Py_NewRef(PyTuple_GET_ITEM(self->names, dim))
                               : PyUnicode_FromFormat("dim_%d", dim);
}

/* RuntimeError: this rank is not in the mesh; and what the members asked for, where it
 * was something else. */
static void
raise_outside(py_mesh *self)
{
    py_mesh *source = py_mesh_source_of(self);
    if (source->native->offset >= 0) {
        py_mesh_raise_outside(self); /* it is in what the selection was made from */
        return;
    }
    PyObject *request = py_mesh_request(source);
    PyObject *asked =
        request == NULL ? NULL : py_mesh_root_asked(source->native, request);
    Py_XDECREF(request);
    if (asked != NULL) {
        PyErr_Format(
            PyExc_RuntimeError,
            "rank %d is not in the mesh %R: it has no coordinate and no groups there%U",
            (int)self->native->rank, self, asked);
        Py_DECREF(asked);
    }
}

/* Whether this rank can have groups of this mesh now; else an exception. */
static int
check_groups(py_state *state, py_mesh *self)
{
    if (!self->has_groups) {
        PyErr_SetString(PyExc_RuntimeError,
                        "DeviceMesh process groups not initialized!");
        return -1;
    }
    if (py_mesh_source_of(self)->closed) {
        PyErr_Format(state->closed_error, "the mesh %R was closed", self);
        return -1;
    }
    if (self->native->offset < 0) {
        raise_outside(self);
        return -1;
    }
    return 0;
}

/* The members agree before the first group is made; meshes that were made without
 * that (from_group, unpickled) do it here. */
static int
ensure_open(py_state *state, py_mesh *source)
{
    if (source->native->cache != NULL) {
        return 0;
    }
    PyObject *request = py_mesh_request(source);
    int result =
        request == NULL ? -1 : py_mesh_root_open(state, source->native, request);
    Py_XDECREF(request);
    return result;
}

static dm_group *
make_group(py_state *state, py_mesh *self, int dim, const int32_t *ranks)
{
    py_mesh *source = py_mesh_source_of(self);
    PyObject *spec = PyTuple_GET_ITEM(self->specs, dim);
    PyObject *backend = PyTuple_GET_ITEM(spec, 0);
    PyObject *timeout = PyTuple_GET_ITEM(spec, 2);
    PyObject *name = py_mesh_dim_name(self, dim);
    const char *options = PyUnicode_AsUTF8(PyTuple_GET_ITEM(spec, 1));
    dm_group *group = NULL;
    dm_group_spec wanted = {
        .ranks = ranks,
        .size = (int32_t)dm_layout_size(self->layout, dim),
        .dim_name = name == NULL ? NULL : PyUnicode_AsUTF8(name),
    };
    const char *device_type = PyUnicode_AsUTF8(self->device_type);
    if (wanted.dim_name == NULL || options == NULL || device_type == NULL) {
        goto done;
    }
    wanted.backend = backend == Py_None ? dm_backend_default(device_type)
                                        : PyUnicode_AsUTF8(backend);
    if (!py_mesh_root_is_given(source->native, ranks, wanted.size)) {
        if (ensure_open(state, source) < 0) {
            goto done;
        }
        wanted.timeout_ns = timeout == Py_None ? dm_world_timeout(source->native->world)
                                               : PyLong_AsLongLong(timeout);
    }
    group = py_mesh_root_group(state, source->native, &wanted, options);

done:
    Py_XDECREF(name);
    return group;
}

PyObject *
py_mesh_group_of_dim(py_state *state, py_mesh *self, int dim)
{
    if (check_groups(state, self) < 0) {
        return NULL;
    }
    if (self->groups[dim] != NULL) {
        return Py_NewRef(self->groups[dim]);
    }
    int32_t *ranks = py_mesh_line_ranks(state, self, dim);
    dm_group *group = ranks == NULL ? NULL : make_group(state, self, dim, ranks);
    dm_free(ranks);
    if (group == NULL) {
        return NULL;
    }
    PyObject *object = py_group_wrap(state, group);
    dm_group_release(group);
    if (object != NULL) {
        Py_XSETREF(self->groups[dim], Py_NewRef(object));
    }
    return object;
}

PyDoc_STRVAR(
    mesh_get_group_doc,
    "get_group($self, mesh_dim=None)\n--\n\n"
    "The process group of one dim: always the same object.\n"
    "\n"
    "Made when first asked for; it connects at its first operation.\n"
    "\n"
    "Args:\n"
    "    mesh_dim: name (also of a flattened dim of the root) or index; not needed\n"
    "        where there is one dim.\n"
    "\n"
    "Raises:\n"
    "    RuntimeError: no mesh_dim on a mesh of several dims; this rank is not in\n"
    "        the mesh; the mesh was made without a backend.\n"
    "    KeyError, IndexError: no such dim.\n"
    "    ClosedError: the mesh was closed.\n"
    "\n"
    "Example:\n"
    "    >>> import devicemesh\n"
    "    >>> with devicemesh.simulate(world_size=8, rank=5):\n"
    "    ...     mesh = devicemesh.init_device_mesh(\n"
    "    ...         'cpu', (2, 4), mesh_dim_names=('dp', 'tp'))\n"
    "    ...     list(mesh.get_group('dp').ranks)\n"
    "    [1, 5]\n");

static PyObject *
mesh_get_group(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    py_mesh *self = (py_mesh *)op;
    py_mesh *mesh = self;
    PyObject *arg;
    int dim = 0;
    if (py_mesh_dim_arg("get_group", args, nargs, kwnames, &arg) < 0) {
        return NULL;
    }
    if (self->native != NULL && arg == NULL && self->ndim != 1) {
        PyErr_Format(
            PyExc_RuntimeError,
            "Found the DeviceMesh have %d dimensions. Optional kwarg `mesh_dim` "
            "needs to be specified when device_mesh.ndim > 1. If you want to get "
            "the list of all the ProcessGroups in the DeviceMesh, please use "
            "`get_all_groups()` instead.",
            self->ndim);
        return NULL;
    }
    if (py_mesh_find_dim(self, arg == NULL ? Py_False : arg, &mesh, &dim) < 0) {
        return NULL;
    }
    PyObject *known = mesh->groups[dim];
    if (known != NULL && !py_mesh_source_of(mesh)->closed) {
        return Py_NewRef(known);
    }
    py_state *state = py_state_of_type(Py_TYPE(op));
    return state == NULL ? NULL : py_mesh_group_of_dim(state, mesh, dim);
}

PyDoc_STRVAR(mesh_get_all_groups_doc,
             "get_all_groups($self, /)\n--\n\n"
             "The process groups of all dims, as a list in the order of the dims.");

static PyObject *
mesh_get_all_groups(PyObject *op, PyObject *Py_UNUSED(unused))
{
    py_mesh *self = (py_mesh *)op;
    py_state *state = py_state_of_type(Py_TYPE(op));
    if (state == NULL) {
        return NULL;
    }
    PyObject *groups = PyList_New(self->ndim);
    for (int d = 0; d < self->ndim && groups != NULL; d++) {
        PyObject *group = py_mesh_group_of_dim(state, self, d);
        if (group == NULL) {
            Py_CLEAR(groups);
            break;
        }
        PyList_SET_ITEM(groups, d, group);
    }
    return groups;
}

/* torch: absent where there is no backend, empty on ranks outside. */
static PyObject *
mesh_dim_group_names(PyObject *op, void *Py_UNUSED(closure))
{
    py_mesh *self = (py_mesh *)op;
    py_state *state = py_state_of_type(Py_TYPE(op));
    if (state == NULL) {
        return NULL;
    }
    if (!self->has_groups) {
        PyErr_SetString(PyExc_AttributeError,
                        "'DeviceMesh' object has no attribute '_dim_group_names': "
                        "process groups not initialized");
        return NULL;
    }
    if (self->native->offset < 0) {
        return PyList_New(0);
    }
    PyObject *names = PyList_New(self->ndim);
    for (int d = 0; d < self->ndim && names != NULL; d++) {
        PyObject *object = py_mesh_group_of_dim(state, self, d);
        dm_group *group = object == NULL ? NULL : py_group_of(state, object, "group");
        PyObject *name =
            group == NULL ? NULL : PyUnicode_FromString(dm_group_name(group));
        Py_XDECREF(object);
        if (name == NULL) {
            Py_CLEAR(names);
            break;
        }
        PyList_SET_ITEM(names, d, name);
    }
    return names;
}

/* --- closing ------------------------------------------------------------------------- */

/* The groups can no longer be reused by a mesh to come. */
static int
forget_reused(py_state *state, py_mesh_root *native)
{
    PyObject *table = state->reused_roots;
    PyObject *items = table == NULL ? NULL : PyDict_Items(table);
    if (items == NULL) {
        return table == NULL ? 0 : -1;
    }
    int result = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items) && result == 0; i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        if (PyTuple_GET_ITEM(item, 1) == (PyObject *)native) {
            result = PyDict_DelItem(table, PyTuple_GET_ITEM(item, 0));
        }
    }
    Py_DECREF(items);
    return result;
}

/* The last root mesh that uses these groups closes them. */
static PyObject *
leave_groups(PyObject *op, bool abort)
{
    py_mesh *self = (py_mesh *)op;
    py_mesh *root = py_mesh_source_of(self);
    py_state *state = py_state_of_type(Py_TYPE(op));
    if (state == NULL) {
        return NULL;
    }
    if (self->native == NULL || root->closed) {
        Py_RETURN_NONE;
    }
    root->closed = true;
    if (root->joined) {
        root->joined = false;
        root->native->sharers--;
    }
    if (root->native->sharers == 0) {
        if (forget_reused(state, root->native) < 0) {
            return NULL;
        }
        py_mesh_root_close(root->native, abort);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    mesh_close_doc,
    "close($self, /)\n--\n\n"
    "Closes every group that the root of this mesh and its views made.\n"
    "\n"
    "Twice is fine. The world, other roots and groups that came from from_group\n"
    "live on; where reuse_groups shared the groups, the last mesh closes them.\n"
    "Facts (sizes, coordinates, slices) can still be asked for.\n"
    "\n"
    "Example:\n"
    "    >>> import devicemesh\n"
    "    >>> with devicemesh.simulate(world_size=4, rank=0):\n"
    "    ...     mesh = devicemesh.init_device_mesh('cpu', (4,))\n"
    "    ...     mesh.close()\n"
    "    ...     mesh.size()\n"
    "    4\n");

static PyObject *
mesh_close(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return leave_groups(op, false);
}

PyDoc_STRVAR(mesh_abort_doc,
             "abort($self, /)\n--\n\n"
             "As close(), from any thread: operations in flight end with an error at\n"
             "once.");

static PyObject *
mesh_abort(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return leave_groups(op, true);
}

PyMethodDef py_mesh_group_methods[] = {
    {"get_group", (PyCFunction)(void (*)(void))mesh_get_group,
     METH_FASTCALL | METH_KEYWORDS, mesh_get_group_doc},
    {"get_all_groups", mesh_get_all_groups, METH_NOARGS, mesh_get_all_groups_doc},
    {"close", mesh_close, METH_NOARGS, mesh_close_doc},
    {"abort", mesh_abort, METH_NOARGS, mesh_abort_doc},
    {NULL, NULL, 0, NULL},
};

PyGetSetDef py_mesh_group_getset[] = {
    {"_dim_group_names", mesh_dim_group_names, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

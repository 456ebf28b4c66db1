/* Groups of a mesh: made when asked for, closed together, or brought along. */
#include "python/py_mesh.h"

#include <string.h>

#include "base/dm_alloc.h"
#include "python/py_error.h"
#include "python/py_group.h"

/* --- one dim's group --------------------------------------------------------------- */

/* Ranks of this rank's line along a dim, in the mesh's order; dm_free them. */
static int32_t *
line_ranks(py_state *state, py_mesh *self, int dim)
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

/* Its name, or "dim_0". */
static PyObject *
dim_name(py_mesh *self, int dim)
{
    return self->names != NULL ? Py_NewRef(PyTuple_GET_ITEM(self->names, dim))
                               : PyUnicode_FromFormat("dim_%d", dim);
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
    if (py_mesh_root_of(self)->closed) {
        PyErr_Format(state->closed_error, "the mesh %R was closed", self);
        return -1;
    }
    if (self->native->offset < 0) {
        py_mesh_raise_outside(self);
        return -1;
    }
    return 0;
}

/* The members agree before the first group is made; meshes that were made without
 * that (from_group, unpickled) do it here. */
static int
ensure_open(py_state *state, py_mesh *self)
{
    if (self->native->cache != NULL) {
        return 0;
    }
    PyObject *request = py_mesh_request(py_mesh_root_of(self));
    int result = request == NULL ? -1 : py_mesh_root_open(state, self->native, request);
    Py_XDECREF(request);
    return result;
}

static dm_group *
make_group(py_state *state, py_mesh *self, int dim, const int32_t *ranks)
{
    PyObject *spec = PyTuple_GET_ITEM(self->specs, dim);
    PyObject *backend = PyTuple_GET_ITEM(spec, 0);
    PyObject *timeout = PyTuple_GET_ITEM(spec, 2);
    PyObject *name = dim_name(self, dim);
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
    if (!py_mesh_root_is_given(self->native, ranks, wanted.size)) {
        if (ensure_open(state, self) < 0) {
            goto done;
        }
        wanted.timeout_ns = timeout == Py_None ? dm_world_timeout(self->native->world)
                                               : PyLong_AsLongLong(timeout);
    }
    group = py_mesh_root_group(state, self->native, &wanted, options);

done:
    Py_XDECREF(name);
    return group;
}

/* The ProcessGroup of a dim, made if need be; new reference. */
static PyObject *
group_of_dim(py_state *state, py_mesh *self, int dim)
{
    if (check_groups(state, self) < 0) {
        return NULL;
    }
    if (self->groups[dim] != NULL) {
        return Py_NewRef(self->groups[dim]);
    }
    int32_t *ranks = line_ranks(state, self, dim);
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
    if (known != NULL && !py_mesh_root_of(mesh)->closed) {
        return Py_NewRef(known);
    }
    py_state *state = py_state_of_type(Py_TYPE(op));
    return state == NULL ? NULL : group_of_dim(state, mesh, dim);
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
        PyObject *group = group_of_dim(state, self, d);
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
        PyObject *object = group_of_dim(state, self, d);
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
    py_mesh *root = py_mesh_root_of(self);
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

/* --- meshes around groups that are there ----------------------------------------------- */

static PyObject *
ranks_list(const int32_t *ranks, int64_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (int64_t i = 0; i < count && list != NULL; i++) {
        PyObject *rank = PyLong_FromLong(ranks[i]);
        if (rank == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, rank);
    }
    return list;
}

static PyObject *
grid_lists(const py_mesh_grid *grid, int dim, const int32_t **next)
{
    if (dim == grid->ndim) {
        return PyLong_FromLong(*(*next)++);
    }
    PyObject *list = PyList_New((Py_ssize_t)grid->shape[dim]);
    for (int64_t i = 0; i < grid->shape[dim] && list != NULL; i++) {
        PyObject *entry = grid_lists(grid, dim + 1, next);
        if (entry == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, entry);
    }
    return list;
}

/* The grid as nested lists, as it is shown in errors. */
static PyObject *
grid_text(const py_mesh_grid *grid)
{
    const int32_t *next = grid->ranks;
    return grid_lists(grid, 0, &next);
}

/* A mesh of one group must be the group's own list. */
static int
check_single_mesh(dm_group *group, const py_mesh_grid *grid)
{
    int32_t size = dm_group_size(group);
    const int32_t *ranks = dm_group_ranks(group);
    if (grid->ndim == 1 && grid->count == size &&
        memcmp(grid->ranks, ranks, (size_t)size * sizeof(*ranks)) == 0) {
        return 0;
    }
    PyObject *text = grid_text(grid);
    PyObject *list = ranks_list(ranks, size);
    if (text != NULL && list != NULL) {
        PyErr_Format(PyExc_ValueError, "Invalid mesh %S for ProcessGroup with ranks %R",
                     text, list);
    }
    Py_XDECREF(text);
    Py_XDECREF(list);
    return -1;
}

/* Group d must have the ranks of this rank's line along dim d. */
static int
check_lines(py_state *state, py_mesh *mesh, dm_group *const *groups)
{
    if (mesh->native->offset < 0) {
        py_mesh_raise_outside(mesh);
        return -1;
    }
    for (int d = 0; d < mesh->ndim; d++) {
        int32_t *line = line_ranks(state, mesh, d);
        if (line == NULL) {
            return -1;
        }
        int32_t size = (int32_t)dm_layout_size(mesh->layout, d);
        bool same =
            dm_group_size(groups[d]) == size &&
            memcmp(line, dm_group_ranks(groups[d]), (size_t)size * sizeof(*line)) == 0;
        if (!same) {
            PyObject *expected = ranks_list(line, size);
            PyObject *found =
                ranks_list(dm_group_ranks(groups[d]), dm_group_size(groups[d]));
            PyObject *name = dim_name(mesh, d);
            if (expected != NULL && found != NULL && name != NULL) {
                PyErr_Format(
                    PyExc_ValueError,
                    "group %d has ranks %R, but along dim '%U' of the mesh rank "
                    "%d is with ranks %R",
                    d, found, name, (int)mesh->native->rank, expected);
            }
            Py_XDECREF(expected);
            Py_XDECREF(found);
            Py_XDECREF(name);
        }
        dm_free(line);
        if (!same) {
            return -1;
        }
    }
    return 0;
}

/* One spec (None, "", None) per dim. */
static PyObject *
plain_specs(int ndim)
{
    PyObject *specs = PyTuple_New(ndim);
    for (int d = 0; d < ndim && specs != NULL; d++) {
        PyObject *spec = Py_BuildValue("(OsO)", Py_None, "", Py_None);
        if (spec == NULL) {
            Py_CLEAR(specs);
            break;
        }
        PyTuple_SET_ITEM(specs, d, spec);
    }
    return specs;
}

/* A root over a grid with ready-made groups (`ngroups` of them, of one world). */
static PyObject *
mesh_of_groups(py_state *state, PyTypeObject *type, const py_mesh_grid *grid,
               dm_group *const *groups, int ngroups, PyObject *device_type,
               PyObject *names)
{
    PyObject *specs = plain_specs(grid->ndim);
    PyObject *mesh = NULL;
    py_mesh_root *native = NULL;
    dm_layout *layout = NULL;
    dm_ranks *ranks = NULL;
    dm_error err = DM_ERROR_INIT;
    if (specs == NULL) {
        return NULL;
    }
    dm_status status = dm_layout_new(grid->shape, grid->ndim, &layout, &err);
    if (status == DM_OK) {
        status = dm_ranks_new(grid->ranks, grid->count, &ranks, &err);
    }
    if (status != DM_OK) {
        py_raise(state, &err);
        goto done;
    }
    dm_world *world = dm_group_world(groups[0]);
    native = py_mesh_root_new(state, world, ranks, dm_world_rank(world));
    for (int i = 0; i < ngroups && native != NULL; i++) {
        if (py_mesh_root_give(native, groups[i]) < 0) {
            Py_CLEAR(native);
        }
    }
    if (native != NULL) {
        mesh =
            py_mesh_make(type, native, NULL, layout, device_type, names, specs, true);
        layout = NULL;
    }
    if (mesh != NULL && ngroups == grid->ndim &&
        check_lines(state, (py_mesh *)mesh, groups) < 0) {
        Py_CLEAR(mesh);
    }

done:
    dm_layout_free(layout);
    Py_XDECREF(native);
    Py_XDECREF(specs);
    return mesh;
}

/* from_group with one group. */
static PyObject *
from_one_group(py_state *state, PyTypeObject *type, dm_group *group,
               PyObject *device_type, PyObject *mesh, PyObject *names_arg)
{
    PyObject *names = NULL, *made = NULL;
    if (mesh != Py_None) {
        py_mesh_grid given;
        if (py_mesh_grid_parse(state, mesh, &given) < 0) {
            return NULL;
        }
        int failed = check_single_mesh(group, &given);
        py_mesh_grid_clear(&given);
        if (failed < 0) {
            return NULL;
        }
    }
    if (py_mesh_names_parse(names_arg, 1, &names) < 0) {
        return NULL;
    }
    py_mesh_grid grid = {
        .ndim = 1,
        .ranks = (int32_t *)dm_group_ranks(group), /* read only */
        .count = dm_group_size(group),
    };
    grid.shape[0] = grid.count;
    made = mesh_of_groups(state, type, &grid, &group, 1, device_type, names);
    Py_XDECREF(names);
    return made;
}

/* The groups of a sequence of ProcessGroups; returns their number or -1. */
static int
groups_of_list(py_state *state, PyObject *list, dm_group **groups)
{
    Py_ssize_t count = PyTuple_GET_SIZE(list);
    if (count == 0) {
        PyErr_SetString(PyExc_ValueError,
                        "Expects at least one ProcessGroup to be passed");
        return -1;
    }
    if (count > PY_MESH_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "a mesh has at most %d dims, got %zd",
                     PY_MESH_MAX_NDIM, count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        groups[i] = py_group_of(state, PyTuple_GET_ITEM(list, i), "group");
        if (groups[i] == NULL) {
            return -1;
        }
        if (dm_group_world(groups[i]) != dm_group_world(groups[0])) {
            PyErr_SetString(PyExc_ValueError,
                            "the groups of a mesh must belong to one world");
            return -1;
        }
    }
    return (int)count;
}

/* from_group with several groups, one per dim. */
static PyObject *
from_group_list(py_state *state, PyTypeObject *type, PyObject *list,
                PyObject *device_type, PyObject *mesh, PyObject *names_arg)
{
    dm_group *groups[PY_MESH_MAX_NDIM];
    PyObject *names = NULL, *made = NULL;
    int count = groups_of_list(state, list, groups);
    if (count < 0) {
        return NULL;
    }
    if (mesh == Py_None) {
        PyErr_SetString(PyExc_ValueError,
                        "Must pass mesh if passing multiple ProcessGroups");
        return NULL;
    }
    if (names_arg == Py_None) {
        PyErr_SetString(PyExc_ValueError,
                        "Must pass mesh_dim_names if passing multiple ProcessGroups");
        return NULL;
    }
    py_mesh_grid grid;
    if (py_mesh_grid_parse(state, mesh, &grid) < 0) {
        return NULL;
    }
    if (grid.ndim != count) {
        PyObject *text = grid_text(&grid);
        if (text != NULL) {
            PyErr_Format(
                PyExc_ValueError,
                "Expects mesh with ndim equal to number of ProcessGroups but got "
                "mesh %S and %d ProcessGroups",
                text, count);
            Py_DECREF(text);
        }
    }
    else if (py_mesh_names_parse(names_arg, grid.ndim, &names) == 0) {
        made = mesh_of_groups(state, type, &grid, groups, count, device_type, names);
    }
    py_mesh_grid_clear(&grid);
    Py_XDECREF(names);
    return made;
}

PyDoc_STRVAR(
    mesh_from_group_doc,
    "from_group($type, group, device_type, mesh=None, *, mesh_dim_names=None)\n--\n\n"
    "A mesh around process groups that are there: one dim per group.\n"
    "\n"
    "Args:\n"
    "    group: a ProcessGroup, or a list of them in the order of the dims.\n"
    "    device_type: 'cpu' or 'cuda'.\n"
    "    mesh: the ranks; needed with several groups, checked with one.\n"
    "    mesh_dim_names: one name per dim; needed with several groups.\n"
    "\n"
    "Raises:\n"
    "    ValueError: the mesh does not fit the groups' ranks or their order.\n"
    "\n"
    "Example:\n"
    "    >>> import devicemesh\n"
    "    >>> with devicemesh.simulate(world_size=8, rank=0):\n"
    "    ...     mesh = devicemesh.init_device_mesh('cpu', (2, 4))\n"
    "    ...     devicemesh.DeviceMesh.from_group(mesh.get_group(1), 'cpu')\n"
    "    DeviceMesh((4,), 'cpu', stride=(1,))\n");

static PyObject *
mesh_from_group(PyObject *cls, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"group", "device_type", "mesh", "mesh_dim_names", NULL};
    PyTypeObject *type = (PyTypeObject *)cls;
    py_state *state = py_state_of_type(type);
    PyObject *group_arg, *type_arg;
    PyObject *mesh = Py_None, *names = Py_None;
    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O$O:from_group", keywords,
                                     &group_arg, &type_arg, &mesh, &names)) {
        return NULL;
    }
    PyObject *device_type = py_mesh_device_type(state, type_arg);
    if (device_type == NULL) {
        return NULL;
    }
    PyObject *made = NULL;
    if (PyObject_TypeCheck(group_arg, state->group_type)) {
        dm_group *group = py_group_of(state, group_arg, "group");
        if (group != NULL) {
            made = from_one_group(state, type, group, device_type, mesh, names);
        }
    }
    else if (!PyList_Check(group_arg) && !PyTuple_Check(group_arg)) {
        PyErr_Format(PyExc_TypeError,
                     "group must be a ProcessGroup or a list of them, got %R",
                     group_arg);
    }
    else {
        PyObject *list = PySequence_Tuple(group_arg);
        if (list != NULL) {
            made = from_group_list(state, type, list, device_type, mesh, names);
            Py_DECREF(list);
        }
    }
    Py_DECREF(device_type);
    return made;
}

/* --- all lines of a dim ------------------------------------------------------------------ */

/* The line of a dim that begins at `base`, as a root of its own. */
static PyObject *
submesh_at(py_state *state, py_mesh *self, const dm_layout *line, int64_t base, int dim,
           PyObject *names)
{
    size_t count = (size_t)dm_layout_numel(line);
    int64_t size = (int64_t)count;
    int64_t *offsets = dm_malloc_array(count, sizeof(*offsets));
    int32_t *list = dm_malloc_array(count, sizeof(*list));
    dm_layout *layout = NULL;
    dm_ranks *ranks = NULL;
    dm_error err = DM_ERROR_INIT;
    py_mesh_root *native = NULL;
    PyObject *specs = NULL, *mesh = NULL, *group = NULL;
    if (offsets == NULL || list == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    dm_layout_offsets(line, base, offsets);
    for (size_t i = 0; i < count; i++) {
        list[i] = dm_ranks_at(self->native->ranks, offsets[i]);
    }
    if (dm_layout_new(&size, 1, &layout, &err) != DM_OK ||
        dm_ranks_new(list, size, &ranks, &err) != DM_OK) {
        py_raise(state, &err);
        goto done;
    }
    native = py_mesh_root_new(state, self->native->world, ranks, self->native->rank);
    if (native == NULL) {
        goto done;
    }
    if (native->offset >= 0 && self->has_groups && !py_mesh_root_of(self)->closed) {
        group = group_of_dim(state, self, dim);
        dm_group *core = group == NULL ? NULL : py_group_of(state, group, "group");
        if (core == NULL || py_mesh_root_give(native, core) < 0) {
            goto done;
        }
    }
    specs = PyTuple_GetSlice(self->specs, dim, dim + 1);
    if (specs != NULL) {
        mesh = py_mesh_make(Py_TYPE(self), native, NULL, layout, self->device_type,
                            names, specs, self->has_groups);
        layout = NULL;
    }

done:
    dm_free(offsets);
    dm_free(list);
    dm_layout_free(layout);
    Py_XDECREF(native);
    Py_XDECREF(specs);
    Py_XDECREF(group);
    return mesh;
}

static PyObject *
submeshes_of_line(py_state *state, py_mesh *self, const dm_layout *line, int dim)
{
    dm_layout *others = NULL;
    dm_error err = DM_ERROR_INIT;
    int64_t cosize = dm_ranks_size(self->native->ranks);
    if (dm_layout_complement(line, cosize, &others, &err) != DM_OK) {
        return py_raise(state, &err);
    }
    Py_ssize_t count = (Py_ssize_t)dm_layout_numel(others);
    int64_t *bases = dm_malloc_array((size_t)count, sizeof(*bases));
    PyObject *names = PyTuple_GetSlice(self->names, dim, dim + 1);
    PyObject *meshes = PyList_New(count);
    if (bases == NULL) {
        PyErr_NoMemory();
    }
    if (bases == NULL || names == NULL) {
        Py_CLEAR(meshes);
    }
    else {
        dm_layout_offsets(others, 0, bases);
    }
    for (Py_ssize_t i = 0; i < count && meshes != NULL; i++) {
        PyObject *mesh = submesh_at(state, self, line, bases[i], dim, names);
        if (mesh == NULL) {
            Py_CLEAR(meshes);
            break;
        }
        PyList_SET_ITEM(meshes, i, mesh);
    }
    dm_layout_free(others);
    dm_free(bases);
    Py_XDECREF(names);
    return meshes;
}

PyDoc_STRVAR(mesh_get_all_submeshes_doc,
             "_get_all_submeshes($self, mesh_dim_name, /)\n--\n\n"
             "Every line along a dim, each as a root mesh of its own; this rank's own\n"
             "line has the dim's group.");

static PyObject *
mesh_get_all_submeshes(PyObject *op, PyObject *name)
{
    py_mesh *self = (py_mesh *)op;
    py_state *state = py_state_of_type(Py_TYPE(op));
    py_mesh *mesh;
    int dim;
    if (state == NULL) {
        return NULL;
    }
    if (!PyUnicode_Check(name)) {
        PyErr_Format(PyExc_TypeError, "mesh_dim_name must be a str, got %R", name);
        return NULL;
    }
    if (py_mesh_find_dim(self, name, &mesh, &dim) < 0) {
        return NULL;
    }
    dm_layout *line = NULL;
    dm_error err = DM_ERROR_INIT;
    if (dm_layout_select(mesh->layout, &dim, 1, &line, &err) != DM_OK) {
        return py_raise(state, &err);
    }
    PyObject *meshes = submeshes_of_line(state, mesh, line, dim);
    dm_layout_free(line);
    return meshes;
}

PyMethodDef py_mesh_group_methods[] = {
    {"get_group", (PyCFunction)(void (*)(void))mesh_get_group,
     METH_FASTCALL | METH_KEYWORDS, mesh_get_group_doc},
    {"get_all_groups", mesh_get_all_groups, METH_NOARGS, mesh_get_all_groups_doc},
    {"close", mesh_close, METH_NOARGS, mesh_close_doc},
    {"abort", mesh_abort, METH_NOARGS, mesh_abort_doc},
    {"from_group", (PyCFunction)(void (*)(void))mesh_from_group,
     METH_VARARGS | METH_KEYWORDS | METH_CLASS, mesh_from_group_doc},
    {"_get_all_submeshes", mesh_get_all_submeshes, METH_O, mesh_get_all_submeshes_doc},
    {NULL, NULL, 0, NULL},
};

PyGetSetDef py_mesh_group_getset[] = {
    {"_dim_group_names", mesh_dim_group_names, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* Root meshes around groups that are there: from_group, and the lines of a dim. */
#include "python/py_mesh.h"

#include <string.h>

#include "base/dm_alloc.h"
#include "group/dm_grid.h"
#include "python/py_error.h"
#include "python/py_group.h"
#include "python/py_wait.h"

/* --- from_group ----------------------------------------------------------------- */

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
        int32_t *line = py_mesh_line_ranks(state, mesh, d);
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
            PyObject *name = py_mesh_dim_name(mesh, d);
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

/* The grid that the groups span: the members tell each other. The grid is to be cleared
 * on success only. Returns 0 or -1. */
static int
span_grid(py_state *state, dm_group *const *groups, int count, py_mesh_grid *grid)
{
    *grid = (py_mesh_grid){.ndim = count, .count = 1};
    for (int d = 0; d < count; d++) {
        grid->shape[d] = dm_group_size(groups[d]);
        grid->count *= grid->shape[d];
    }
    dm_error err = DM_ERROR_INIT;
    py_waiter waiter;
    py_waiter_start(&waiter, DM_FOREVER);
    dm_status status =
        dm_grid_of_groups(groups, count, &waiter.wait, &grid->ranks, &err);
    py_waiter_stop(&waiter);
    return status == DM_OK ? 0 : py_raise_int(state, &err);
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
    if (names_arg == Py_None) {
        PyErr_SetString(PyExc_ValueError,
                        "Must pass mesh_dim_names if passing multiple ProcessGroups");
        return NULL;
    }
    if (py_mesh_names_parse(names_arg, count, &names) < 0) {
        return NULL;
    }
    py_mesh_grid grid;
    int failed = mesh == Py_None ? span_grid(state, groups, count, &grid)
                                 : py_mesh_grid_parse(state, mesh, &grid);
    if (failed < 0) {
        Py_XDECREF(names);
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
    else {
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
    "    mesh: the ranks, checked against the groups. Without it the members of\n"
    "        several groups tell each other theirs: all of them make the call.\n"
    "    mesh_dim_names: one name per dim; needed with several groups.\n"
    "\n"
    "Raises:\n"
    "    ValueError: the mesh does not fit the groups' ranks or their order; groups\n"
    "        that cannot be dims of one mesh.\n"
    "    MismatchError: without `mesh`, other members have other groups, or have them\n"
    "        in another order; the text shows both sides.\n"
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
    if (native->offset >= 0 && self->has_groups && !py_mesh_source_of(self)->closed) {
        group = py_mesh_group_of_dim(state, self, dim);
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

PyMethodDef py_mesh_adopt_methods[] = {
    {"from_group", (PyCFunction)(void (*)(void))mesh_from_group,
     METH_VARARGS | METH_KEYWORDS | METH_CLASS, mesh_from_group_doc},
    {"_get_all_submeshes", mesh_get_all_submeshes, METH_O, mesh_get_all_submeshes_doc},
    {NULL, NULL, 0, NULL},
};

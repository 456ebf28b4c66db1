/* Pickling: facts travel, groups do not.
 *
 * A root pickles what it was asked for, a view its root and its own facts, a selection
 * the root that has its groups and its own facts; the flattened dims of a root travel
 * with it. Inside one process a mesh that comes back
 * shares the groups of the one that was pickled (a token finds it); elsewhere it takes
 * the default world when groups are asked for.
 */
#include "python/py_mesh.h"

#include <string.h>

#include "base/dm_alloc.h"
#include "python/py_error.h"
#include "python/py_world.h"

/* --- out -------------------------------------------------------------------------- */

/* Factors per dim, as _layout shows them. */
static PyObject *
layout_facts(PyObject *mesh)
{
    return PyObject_GetAttrString(mesh, "_layout");
}

/* None for 0 to n-1, else the ranks as a tuple. */
static PyObject *
ranks_facts(py_mesh *self)
{
    if (dm_ranks_is_identity(self->native->ranks)) {
        return PyLong_FromLongLong(dm_ranks_size(self->native->ranks));
    }
    return PyObject_GetAttrString((PyObject *)self, "_flatten_rank_map");
}

/* ((name, layout, specs), ...) of the flattened dims. */
static PyObject *
flattened_facts(py_mesh *self)
{
    PyObject *list = PyList_New(0);
    PyObject *name, *flat;
    Py_ssize_t position = 0;
    while (list != NULL && self->flattened != NULL &&
           PyDict_Next(self->flattened, &position, &name, &flat)) {
        PyObject *layout = layout_facts(flat);
        PyObject *entry = layout == NULL
                              ? NULL
                              : PyTuple_Pack(3, name, layout, ((py_mesh *)flat)->specs);
        Py_XDECREF(layout);
        if (entry == NULL || PyList_Append(list, entry) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(entry);
    }
    PyObject *tuple = list == NULL ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return tuple;
}

static PyObject *
root_arguments(py_state *state, py_mesh *self)
{
    const char *token = py_mesh_root_token(state, self->native);
    PyObject *layout = token == NULL ? NULL : layout_facts((PyObject *)self);
    PyObject *ranks = layout == NULL ? NULL : ranks_facts(self);
    PyObject *flattened = ranks == NULL ? NULL : flattened_facts(self);
    PyObject *arguments = NULL;
    if (flattened != NULL) {
        arguments =
            Py_BuildValue("(OOOOOOiOsO)", Py_TYPE(self), self->device_type, layout,
                          ranks, self->names != NULL ? self->names : Py_None,
                          self->specs, (int)self->native->rank,
                          self->has_groups ? Py_True : Py_False, token, flattened);
    }
    Py_XDECREF(layout);
    Py_XDECREF(ranks);
    Py_XDECREF(flattened);
    return arguments;
}

static PyObject *
view_arguments(py_mesh *self)
{
    PyObject *layout = layout_facts((PyObject *)self);
    PyObject *arguments =
        layout == NULL
            ? NULL
            : PyTuple_Pack(4, self->root, layout,
                           self->names != NULL ? self->names : Py_None, self->specs);
    Py_XDECREF(layout);
    return arguments;
}

static PyObject *
selection_arguments(py_mesh *self)
{
    PyObject *ranks = PyObject_GetAttrString((PyObject *)self, "_flatten_rank_map");
    PyObject *flattened = ranks == NULL ? NULL : flattened_facts(self);
    PyObject *arguments =
        flattened == NULL ? NULL
                          : PyTuple_Pack(6, self->source, self->shape, ranks,
                                         self->names != NULL ? self->names : Py_None,
                                         self->specs, flattened);
    Py_XDECREF(ranks);
    Py_XDECREF(flattened);
    return arguments;
}

PyObject *
py_mesh_reduce(PyObject *op, PyObject *Py_UNUSED(unused))
{
    py_mesh *self = (py_mesh *)op;
    PyObject *module = PyType_GetModuleByDef(Py_TYPE(op), &py_core_module);
    if (module == NULL) {
        return NULL;
    }
    if (py_mesh_check(self) < 0) {
        return NULL;
    }
    const char *name = self->root != NULL     ? "_restore_view"
                       : self->source != NULL ? "_restore_selection"
                                              : "_restore_root";
    PyObject *restore = PyObject_GetAttrString(module, name);
    PyObject *arguments = restore == NULL      ? NULL
                          : self->root != NULL ? view_arguments(self)
                          : self->source != NULL
                              ? selection_arguments(self)
                              : root_arguments(py_state_of_module(module), self);
    PyObject *result = NULL;
    if (arguments != NULL) {
        bool has_state = self->dict != NULL && PyDict_GET_SIZE(self->dict) > 0;
        result = has_state ? PyTuple_Pack(3, restore, arguments, self->dict)
                           : PyTuple_Pack(2, restore, arguments);
    }
    Py_XDECREF(restore);
    Py_XDECREF(arguments);
    return result;
}

/* --- in --------------------------------------------------------------------------- */

static dm_layout *
raise_malformed(void)
{
    PyErr_SetString(PyExc_ValueError, "malformed pickle of a DeviceMesh");
    return NULL;
}

/* ((size, stride), ...) per dim -> a layout. */
static dm_layout *
layout_from_facts(py_state *state, PyObject *facts)
{
    enum { MAX_FACTORS = 256 };
    dm_factor factors[MAX_FACTORS];
    int first[PY_MESH_MAX_NDIM + 1] = {0};
    int count = 0;
    Py_ssize_t ndim = PyTuple_Check(facts) ? PyTuple_GET_SIZE(facts) : -1;
    if (ndim < 0 || ndim > PY_MESH_MAX_NDIM) {
        return raise_malformed();
    }
    for (Py_ssize_t d = 0; d < ndim; d++) {
        PyObject *dim = PyTuple_GET_ITEM(facts, d);
        if (!PyTuple_Check(dim) || PyTuple_GET_SIZE(dim) > MAX_FACTORS - count) {
            return raise_malformed();
        }
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dim); i++) {
            long long size, stride;
            PyObject *factor = PyTuple_GET_ITEM(dim, i);
            if (!PyTuple_Check(factor) ||
                !PyArg_ParseTuple(factor, "LL", &size, &stride)) {
                PyErr_Clear();
                return raise_malformed();
            }
            factors[count++] = (dm_factor){size, stride};
        }
        first[d + 1] = count;
    }
    dm_layout *layout = NULL;
    dm_error err = DM_ERROR_INIT;
    if (dm_layout_from_factors(factors, first, (int)ndim, &layout, &err) != DM_OK) {
        py_raise(state, &err);
        return NULL;
    }
    return layout;
}

/* A number (the identity) or a tuple of ranks. */
static dm_ranks *
ranks_from_facts(py_state *state, PyObject *facts)
{
    dm_ranks *ranks = NULL;
    dm_error err = DM_ERROR_INIT;
    if (PyLong_Check(facts)) {
        long long count = PyLong_AsLongLong(facts);
        if (count == -1 && PyErr_Occurred()) {
            return NULL;
        }
        if (dm_ranks_identity(count, &ranks, &err) != DM_OK) {
            py_raise(state, &err);
        }
        return ranks;
    }
    py_mesh_grid grid;
    if (py_mesh_grid_parse(state, facts, &grid) < 0) {
        return NULL;
    }
    if (dm_ranks_new(grid.ranks, grid.count, &ranks, &err) != DM_OK) {
        py_raise(state, &err);
    }
    py_mesh_grid_clear(&grid);
    return ranks;
}

/* Tuples of (backend or None, str, int or None), one per dim. */
static bool
specs_are_sound(PyObject *specs, int ndim)
{
    if (!PyTuple_Check(specs) || PyTuple_GET_SIZE(specs) != ndim) {
        return false;
    }
    for (int d = 0; d < ndim; d++) {
        PyObject *spec = PyTuple_GET_ITEM(specs, d);
        if (!PyTuple_Check(spec) || PyTuple_GET_SIZE(spec) != 3) {
            return false;
        }
        PyObject *backend = PyTuple_GET_ITEM(spec, 0);
        PyObject *timeout = PyTuple_GET_ITEM(spec, 2);
        if ((backend != Py_None && !PyUnicode_Check(backend)) ||
            !PyUnicode_Check(PyTuple_GET_ITEM(spec, 1)) ||
            (timeout != Py_None && !PyLong_Check(timeout))) {
            return false;
        }
        if (timeout != Py_None) {
            int overflow;
            (void)PyLong_AsLongLongAndOverflow(timeout, &overflow);
            if (overflow != 0) {
                return false;
            }
        }
    }
    return true;
}

/* The default world if it is there; never made for a pickle's sake. Borrowed. */
static dm_world *
present_world(py_state *state)
{
    if (state->default_world == NULL) {
        return NULL;
    }
    dm_world *world = py_world_of(state, state->default_world, "world");
    if (world == NULL) {
        PyErr_Clear();
    }
    return world != NULL && !dm_world_is_closed(world) ? world : NULL;
}

/* The native half that was pickled, where it still lives here and is the same; else a
 * new one. Takes over `ranks`. */
static py_mesh_root *
restore_native(py_state *state, PyObject *token, dm_ranks *ranks, int rank)
{
    py_mesh_root *native = py_mesh_root_find(state, token);
    if (native != NULL && dm_ranks_equal(native->ranks, ranks)) {
        dm_ranks_free(ranks);
        return native;
    }
    Py_XDECREF(native);
    dm_world *world = present_world(state);
    native = py_mesh_root_new(state, NULL, ranks,
                              world != NULL ? dm_world_rank(world) : rank);
    if (native != NULL) {
        native->attach = true;
    }
    return native;
}

static int
restore_flattened(py_state *state, py_mesh *root, PyObject *facts)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(facts); i++) {
        PyObject *name, *layout_tuple, *specs;
        PyObject *entry = PyTuple_GET_ITEM(facts, i);
        if (!PyTuple_Check(entry) ||
            !PyArg_ParseTuple(entry, "UOO", &name, &layout_tuple, &specs) ||
            !specs_are_sound(specs, 1)) {
            PyErr_Clear();
            raise_malformed();
            return -1;
        }
        PyObject *given = PyTuple_Pack(1, name);
        PyObject *names = NULL;
        int parsed = given == NULL ? -1 : py_mesh_names_parse(given, 1, &names);
        Py_XDECREF(given);
        dm_layout *layout = parsed < 0 ? NULL : layout_from_facts(state, layout_tuple);
        PyObject *flat =
            layout == NULL ? NULL : py_mesh_view(root, layout, names, specs);
        int failed =
            flat == NULL
                ? -1
                : py_mesh_add_flattened(root, PyTuple_GET_ITEM(names, 0), flat);
        Py_XDECREF(names);
        Py_XDECREF(flat);
        if (failed < 0) {
            return -1;
        }
    }
    return 0;
}

/* The layout of a mesh of these ranks, or NULL with an exception. */
static dm_layout *
checked_layout(py_state *state, PyObject *facts, int64_t count)
{
    dm_layout *layout = layout_from_facts(state, facts);
    if (layout != NULL &&
        (dm_layout_cosize(layout) > count || !dm_layout_is_orthogonal(layout))) {
        dm_layout_free(layout);
        return raise_malformed();
    }
    return layout;
}

static PyObject *
restore_root(PyObject *module, PyObject *args)
{
    py_state *state = py_state_of_module(module);
    PyTypeObject *type;
    PyObject *type_arg, *layout_tuple, *ranks_arg, *names_arg, *specs, *token,
        *flattened;
    PyObject *device_type = NULL, *names = NULL, *mesh = NULL;
    py_mesh_root *native = NULL;
    dm_layout *layout = NULL;
    dm_ranks *ranks = NULL;
    int rank, has_groups;
    if (!PyArg_ParseTuple(args, "O!OOOOOipUO!:_restore_root", &PyType_Type, &type,
                          &type_arg, &layout_tuple, &ranks_arg, &names_arg, &specs,
                          &rank, &has_groups, &token, &PyTuple_Type, &flattened)) {
        return NULL;
    }
    if (!PyType_IsSubtype(type, state->mesh_type)) {
        return (PyObject *)raise_malformed();
    }
    ranks = ranks_from_facts(state, ranks_arg);
    if (ranks == NULL) {
        return NULL;
    }
    layout = checked_layout(state, layout_tuple, dm_ranks_size(ranks));
    device_type = layout == NULL ? NULL : py_mesh_device_type(state, type_arg);
    if (device_type == NULL ||
        py_mesh_names_parse(names_arg, dm_layout_ndim(layout), &names) < 0) {
        goto done;
    }
    if (!specs_are_sound(specs, dm_layout_ndim(layout))) {
        raise_malformed();
        goto done;
    }
    native = restore_native(state, token, ranks, rank);
    ranks = NULL;
    if (native == NULL) {
        goto done;
    }
    mesh = py_mesh_make(type, native, NULL, layout, device_type, names, specs,
                        has_groups != 0);
    layout = NULL;
    if (mesh != NULL && restore_flattened(state, (py_mesh *)mesh, flattened) < 0) {
        Py_CLEAR(mesh);
    }

done:
    dm_layout_free(layout);
    dm_ranks_free(ranks);
    Py_XDECREF(device_type);
    Py_XDECREF(names);
    Py_XDECREF(native);
    return mesh;
}

static PyObject *
restore_view(PyObject *module, PyObject *args)
{
    py_state *state = py_state_of_module(module);
    PyObject *root, *layout_tuple, *names_arg, *specs;
    if (!PyArg_ParseTuple(args, "O!OOO:_restore_view", state->mesh_type, &root,
                          &layout_tuple, &names_arg, &specs)) {
        return NULL;
    }
    py_mesh *mesh = (py_mesh *)root;
    if (mesh->native == NULL) {
        return (PyObject *)raise_malformed();
    }
    dm_layout *layout =
        checked_layout(state, layout_tuple, dm_ranks_size(mesh->native->ranks));
    PyObject *names = NULL, *view = NULL;
    if (layout == NULL ||
        py_mesh_names_parse(names_arg, dm_layout_ndim(layout), &names) < 0) {
        dm_layout_free(layout);
        return NULL;
    }
    if (!specs_are_sound(specs, dm_layout_ndim(layout))) {
        dm_layout_free(layout);
        raise_malformed();
    }
    else {
        view = py_mesh_view(mesh, layout, names, specs);
    }
    Py_XDECREF(names);
    return view;
}

/* The shape of a selection, a tuple of sizes that multiply to `count`. Returns the number
 * of dims, or -1 with ValueError. */
static int
selection_shape(PyObject *sizes, int64_t count, int64_t *shape)
{
    Py_ssize_t ndim = PyTuple_GET_SIZE(sizes);
    int64_t product = ndim >= 1 && ndim <= PY_MESH_MAX_NDIM ? 1 : 0;
    for (Py_ssize_t d = 0; d < ndim && product > 0; d++) {
        shape[d] = PyLong_Check(PyTuple_GET_ITEM(sizes, d))
                       ? PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, d))
                       : -1;
        bool fits = shape[d] >= 1 && shape[d] <= count / product;
        product = fits ? product * shape[d] : 0;
    }
    if (product != count) {
        PyErr_Clear();
        raise_malformed();
        return -1;
    }
    return (int)ndim;
}

static bool
are_ranks_of(const py_mesh *source, const py_mesh_grid *grid)
{
    bool all = grid->ndim == 1;
    for (int64_t i = 0; i < grid->count && all; i++) {
        all = dm_ranks_find(source->native->ranks, grid->ranks[i]) >= 0;
    }
    return all;
}

static PyObject *
restore_selection(PyObject *module, PyObject *args)
{
    py_state *state = py_state_of_module(module);
    PyObject *source_arg, *sizes, *ranks_arg, *names_arg, *specs, *flattened;
    if (!PyArg_ParseTuple(args, "O!O!O!OOO!:_restore_selection", state->mesh_type,
                          &source_arg, &PyTuple_Type, &sizes, &PyTuple_Type, &ranks_arg,
                          &names_arg, &specs, &PyTuple_Type, &flattened)) {
        return NULL;
    }
    py_mesh *source = (py_mesh *)source_arg;
    if (source->native == NULL || py_mesh_source_of(source) != source) {
        return (PyObject *)raise_malformed();
    }
    py_mesh_grid grid;
    if (py_mesh_grid_parse(state, ranks_arg, &grid) < 0) {
        return NULL;
    }
    int64_t shape[PY_MESH_MAX_NDIM];
    int ndim = selection_shape(sizes, grid.count, shape);
    PyObject *names = NULL, *mesh = NULL;
    if (ndim < 0 || py_mesh_names_parse(names_arg, ndim, &names) < 0) {
        goto done;
    }
    if (!are_ranks_of(source, &grid) || !specs_are_sound(specs, ndim)) {
        raise_malformed();
        goto done;
    }
    mesh = py_mesh_selection(state, source, shape, ndim, grid.ranks, grid.count, names,
                             specs);
    if (mesh != NULL && restore_flattened(state, (py_mesh *)mesh, flattened) < 0) {
        Py_CLEAR(mesh);
    }

done:
    py_mesh_grid_clear(&grid);
    Py_XDECREF(names);
    return mesh;
}

PyMethodDef py_mesh_pickle_functions[] = {
    {"_restore_root", restore_root, METH_VARARGS,
     "A root mesh from its pickle. Internal."},
    {"_restore_selection", restore_selection, METH_VARARGS,
     "A selection from its pickle. Internal."},
    {"_restore_view", restore_view, METH_VARARGS,
     "A view of a root mesh from its pickle. Internal."},
    {NULL, NULL, 0, NULL},
};

/* Meshes of some indices of a mesh's dims, and of its dims in another order.
 *
 * Another order is a view: the same ranks, the same root. A selection has fewer ranks, so
 * it is a root of its own for all arithmetic; its groups are those of the root that it
 * was selected from (`source`), which also holds it, so that the same selection is the
 * same object and a group of the same ranks is the same group.
 */
#include "python/py_mesh.h"

#include <string.h>

#include "base/dm_alloc.h"
#include "python/py_error.h"

/* --- selections by their facts ------------------------------------------------------ */

static PyObject *
make_selection(py_state *state, py_mesh *source, const int64_t *shape, int ndim,
               const int32_t *list, int64_t count, PyObject *names, PyObject *specs)
{
    dm_layout *layout = NULL;
    dm_ranks *ranks = NULL;
    dm_error err = DM_ERROR_INIT;
    if (dm_layout_new(shape, ndim, &layout, &err) != DM_OK ||
        dm_ranks_new(list, count, &ranks, &err) != DM_OK) {
        dm_layout_free(layout);
        return py_raise(state, &err);
    }
    py_mesh_root *native =
        py_mesh_root_new(state, source->native->world, ranks, source->native->rank);
    if (native == NULL) {
        dm_layout_free(layout);
        return NULL;
    }
    PyObject *made =
        py_mesh_make(Py_TYPE(source), native, NULL, layout, source->device_type, names,
                     specs, source->has_groups);
    Py_DECREF(native);
    if (made != NULL) {
        ((py_mesh *)made)->source = (py_mesh *)Py_NewRef(source);
    }
    return made;
}

PyObject *
py_mesh_selection(py_state *state, py_mesh *source, const int64_t *shape, int ndim,
                  const int32_t *ranks, int64_t count, PyObject *names, PyObject *specs)
{
    PyObject *key =
        Py_BuildValue("(Oy#y#O)", names != NULL ? names : Py_None, (const char *)shape,
                      (Py_ssize_t)ndim * (Py_ssize_t)sizeof(*shape),
                      (const char *)ranks, (Py_ssize_t)count * 4, specs);
    if (key == NULL) {
        return NULL;
    }
    PyObject *made = NULL;
    if (source->views == NULL) {
        source->views = PyDict_New();
    }
    if (source->views != NULL) {
        made = Py_XNewRef(PyDict_GetItemWithError(source->views, key));
    }
    if (made == NULL && !PyErr_Occurred()) {
        made = make_selection(state, source, shape, ndim, ranks, count, names, specs);
        if (made != NULL && PyDict_SetItem(source->views, key, made) < 0) {
            Py_CLEAR(made);
        }
    }
    Py_DECREF(key);
    return made;
}

/* --- reading what is selected ------------------------------------------------------- */

/* What is selected of one dim. */
typedef struct choice {
    int64_t start; /* of a slice, an index or the whole dim */
    int64_t step;
    int64_t *list; /* owned; NULL where start and step say it all */
    int64_t count;
    bool dropped; /* a single index: the dim goes */
    bool given;
} choice;

static int64_t
chosen(const choice *c, int64_t i)
{
    return c->list != NULL ? c->list[i] : c->start + i * c->step;
}

static int
raise_for_dim(py_mesh *self, int dim, PyObject *type, const char *what, PyObject *value)
{
    PyObject *name = py_mesh_dim_name(self, dim);
    if (name != NULL) {
        PyErr_Format(type, "%s of dim '%U' of size %S: %R", what, name,
                     PyTuple_GET_ITEM(self->shape, dim), value);
        Py_DECREF(name);
    }
    return -1;
}

static int
parse_index(py_mesh *self, int dim, PyObject *value, int64_t *index)
{
    int64_t size = dm_layout_size(self->layout, dim);
    Py_ssize_t number = PyNumber_AsSsize_t(value, NULL);
    if (number == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (number < -size || number >= size) {
        return raise_for_dim(self, dim, PyExc_IndexError, "index out of range", value);
    }
    *index = number < 0 ? number + size : number;
    return 0;
}

static int
choose_slice(py_mesh *self, int dim, PyObject *value, choice *c)
{
    Py_ssize_t start, stop, step;
    if (PySlice_Unpack(value, &start, &stop, &step) < 0) {
        return -1;
    }
    Py_ssize_t size = (Py_ssize_t)dm_layout_size(self->layout, dim);
    c->count = PySlice_AdjustIndices(size, &start, &stop, step);
    c->start = start;
    c->step = step;
    return 0;
}

static int
choose_list(py_mesh *self, int dim, PyObject *value, choice *c)
{
    PyObject *items = PySequence_Tuple(value);
    PyObject *seen = items == NULL ? NULL : PySet_New(NULL);
    int result = -1;
    if (seen == NULL) {
        goto done;
    }
    c->count = PyTuple_GET_SIZE(items);
    c->list = dm_malloc_array((size_t)c->count, sizeof(*c->list));
    if (c->list == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < c->count; i++) {
        PyObject *item = PyTuple_GET_ITEM(items, i);
        if (!PyIndex_Check(item) || PyBool_Check(item)) { /* a mask means others */
            raise_for_dim(self, dim, PyExc_TypeError, "not a list of indices", value);
            goto done;
        }
        if (parse_index(self, dim, item, &c->list[i]) < 0) {
            goto done;
        }
        PyObject *number = PyLong_FromLongLong(c->list[i]);
        int failed = number == NULL ? -1 : PySet_Add(seen, number);
        Py_XDECREF(number);
        if (failed < 0) {
            goto done;
        }
        if (PySet_GET_SIZE(seen) != i + 1) {
            raise_for_dim(self, dim, PyExc_ValueError, "an index is there twice",
                          value);
            goto done;
        }
    }
    result = 0;

done:
    Py_XDECREF(items);
    Py_XDECREF(seen);
    return result;
}

static int
choose(py_mesh *self, int dim, PyObject *value, choice *c)
{
    int result;
    if (c->given) {
        return raise_for_dim(self, dim, PyExc_TypeError, "several selections", value);
    }
    c->given = true;
    if (PySlice_Check(value)) {
        result = choose_slice(self, dim, value, c);
    }
    else if (PyIndex_Check(value) && !PyBool_Check(value)) {
        c->dropped = true;
        c->count = 1;
        result = parse_index(self, dim, value, &c->start);
    }
    else if (PyUnicode_Check(value) || !PySequence_Check(value)) {
        return raise_for_dim(self, dim, PyExc_TypeError,
                             "not an index, a slice or a list of indices", value);
    }
    else {
        result = choose_list(self, dim, value, c);
    }
    if (result == 0 && c->count == 0) {
        return raise_for_dim(self, dim, PyExc_ValueError, "nothing is selected", value);
    }
    return result;
}

/* Takes the entries of a dict from dims (names or indices) to what is selected. Nobody
 * else has the dict: reading an index may run code of the caller's. */
static int
choose_all(py_mesh *self, PyObject *dict, choice *choices)
{
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (dict != NULL && PyDict_Next(dict, &position, &key, &value)) {
        py_mesh *mesh;
        int dim;
        if (py_mesh_find_dim(self, key, &mesh, &dim) < 0) {
            return -1;
        }
        if (mesh != self) {
            PyErr_Format(PyExc_KeyError,
                         "'%U' is a flattened dim of the root: select from root[%R]",
                         key, key);
            return -1;
        }
        if (choose(self, dim, value, &choices[dim]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* --- select -------------------------------------------------------------------------- */

static bool
is_whole(const py_mesh *self, const choice *choices)
{
    bool whole = true;
    for (int d = 0; d < self->ndim && whole; d++) {
        const choice *c = &choices[d];
        whole = !c->dropped && c->count == dm_layout_size(self->layout, d);
        for (int64_t i = 0; i < c->count && whole; i++) {
            whole = chosen(c, i) == i;
        }
    }
    return whole;
}

/* The selected ranks in row-major order; dm_free them. */
static int32_t *
selected_ranks(py_mesh *self, const choice *choices, int64_t count)
{
    int64_t base = py_mesh_base(self);
    if (base < 0) {
        return NULL;
    }
    int32_t *ranks = dm_malloc_array((size_t)count, sizeof(*ranks));
    if (ranks == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    int64_t place[PY_MESH_MAX_NDIM] = {0}; /* counts through the choices */
    int64_t indices[PY_MESH_MAX_NDIM];
    for (int d = 0; d < self->ndim; d++) {
        indices[d] = chosen(&choices[d], 0);
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t offset = base + dm_layout_offset(self->layout, indices);
        ranks[i] = dm_ranks_at(self->native->ranks, offset);
        for (int d = self->ndim - 1; d >= 0; d--) {
            place[d] = place[d] + 1 < choices[d].count ? place[d] + 1 : 0;
            indices[d] = chosen(&choices[d], place[d]);
            if (place[d] != 0) {
                break;
            }
        }
    }
    return ranks;
}

/* The entries of the dims that stay; NULL stays NULL. */
static PyObject *
kept(PyObject *tuple, const choice *choices)
{
    PyObject *list = PyList_New(0);
    for (Py_ssize_t d = 0; d < PyTuple_GET_SIZE(tuple) && list != NULL; d++) {
        if (!choices[d].dropped &&
            PyList_Append(list, PyTuple_GET_ITEM(tuple, d)) < 0) {
            Py_CLEAR(list);
        }
    }
    PyObject *result = list == NULL ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return result;
}

static PyObject *
select_chosen(py_state *state, py_mesh *self, const choice *choices)
{
    int64_t shape[PY_MESH_MAX_NDIM];
    int64_t count = 1;
    int ndim = 0;
    for (int d = 0; d < self->ndim; d++) {
        count *= choices[d].count;
        if (!choices[d].dropped) {
            shape[ndim++] = choices[d].count;
        }
    }
    if (ndim == 0) {
        PyErr_SetString(
            PyExc_ValueError,
            "an index for each dim leaves no mesh: rank_at() gives the rank "
            "there, and a slice or list of one index keeps its dim");
        return NULL;
    }
    PyObject *names = NULL, *specs = NULL, *made = NULL;
    int32_t *ranks = selected_ranks(self, choices, count);
    if (ranks == NULL) {
        return NULL;
    }
    specs = kept(self->specs, choices);
    if (self->names != NULL && specs != NULL) {
        names = kept(self->names, choices);
    }
    if (specs != NULL && (self->names == NULL || names != NULL)) {
        made = py_mesh_selection(state, py_mesh_source_of(self), shape, ndim, ranks,
                                 count, names, specs);
    }
    dm_free(ranks);
    Py_XDECREF(names);
    Py_XDECREF(specs);
    return made;
}

PyDoc_STRVAR(
    mesh_select_doc,
    "select($self, dims=None, /, **indices)\n--\n\n"
    "The mesh of some indices of its dims: other ranks are not in it.\n"
    "\n"
    "Nothing is communicated, so ranks may select as they like. The groups are those\n"
    "of this mesh where their ranks are the same, and close() closes them all.\n"
    "\n"
    "Args:\n"
    "    dims: a dict from names or indices of dims to what is selected.\n"
    "    indices: the same by name. A slice, or a list of indices in any order; an\n"
    "        index alone takes the dim away.\n"
    "\n"
    "Returns:\n"
    "    A root mesh: slices, flattened dims and pickles work as in any other. The\n"
    "    same selection is the same object.\n"
    "\n"
    "Raises:\n"
    "    KeyError, IndexError: no such dim, or an index out of range.\n"
    "    ValueError: nothing selected, an index twice, no dim left.\n"
    "\n"
    "Example:\n"
    "    >>> import devicemesh\n"
    "    >>> with devicemesh.simulate(world_size=8, rank=0):\n"
    "    ...     mesh = devicemesh.init_device_mesh(\n"
    "    ...         'cpu', (2, 4), mesh_dim_names=('dp', 'tp'))\n"
    "    ...     half = mesh.select(tp=slice(0, 2))\n"
    "    ...     half.get_group('dp') is mesh.get_group('dp')\n"
    "    True\n"
    "    >>> half, half.ranks()\n"
    "    (DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1)), (0, 1, 4, 5))\n"
    "    >>> mesh.select(dp=-1).ranks(), mesh.select(tp=[3, 0]).ranks()\n"
    "    ((4, 5, 6, 7), (3, 0, 7, 4))\n");

static PyObject *
mesh_select(PyObject *op, PyObject *args, PyObject *kwargs)
{
    py_mesh *self = (py_mesh *)op;
    py_state *state = py_state_of_type(Py_TYPE(op));
    PyObject *dims = Py_None, *result = NULL;
    choice choices[PY_MESH_MAX_NDIM];
    if (state == NULL || py_mesh_check(self) < 0 ||
        !PyArg_ParseTuple(args, "|O:select", &dims)) {
        return NULL;
    }
    if (dims != Py_None && !PyDict_Check(dims)) {
        PyErr_Format(PyExc_TypeError,
                     "select() takes a dict of dims, or dims by name, got %R", dims);
        return NULL;
    }
    for (int d = 0; d < self->ndim; d++) {
        choices[d] = (choice){.step = 1, .count = dm_layout_size(self->layout, d)};
    }
    PyObject *own = dims == Py_None ? PyDict_New() : PyDict_Copy(dims);
    if (own != NULL && choose_all(self, own, choices) == 0 &&
        choose_all(self, kwargs, choices) == 0) {
        result = is_whole(self, choices) ? Py_NewRef(op)
                                         : select_chosen(state, self, choices);
    }
    for (int d = 0; d < self->ndim; d++) {
        dm_free(choices[d].list);
    }
    Py_XDECREF(own);
    return result;
}

/* --- permute ------------------------------------------------------------------------- */

/* Reads all dims of the mesh in some order. */
static int
parse_order(py_mesh *self, PyObject *list, int *order)
{
    bool seen[PY_MESH_MAX_NDIM] = {false};
    if (PyTuple_GET_SIZE(list) != self->ndim) {
        PyErr_Format(PyExc_ValueError,
                     "permute() takes each of the %d dims of %R once, got %R",
                     self->ndim, self, list);
        return -1;
    }
    for (int i = 0; i < self->ndim; i++) {
        py_mesh *mesh;
        if (py_mesh_find_dim(self, PyTuple_GET_ITEM(list, i), &mesh, &order[i]) < 0) {
            return -1;
        }
        if (mesh != self || seen[order[i]]) {
            PyErr_Format(PyExc_ValueError,
                         "permute() takes each of the %d dims of %R once, got %R",
                         self->ndim, self, list);
            return -1;
        }
        seen[order[i]] = true;
    }
    return 0;
}

/* The entries of a tuple in that order; NULL stays NULL. */
static PyObject *
reorder(PyObject *tuple, const int *order)
{
    Py_ssize_t n = tuple == NULL ? 0 : PyTuple_GET_SIZE(tuple);
    PyObject *result = tuple == NULL ? NULL : PyTuple_New(n);
    for (Py_ssize_t i = 0; i < n && result != NULL; i++) {
        PyTuple_SET_ITEM(result, i, Py_NewRef(PyTuple_GET_ITEM(tuple, order[i])));
    }
    return result;
}

PyDoc_STRVAR(mesh_permute_doc,
             "permute($self, /, *dims)\n--\n\n"
             "A view with the dims in another order; the groups are the same.\n"
             "\n"
             "Args:\n"
             "    dims: each dim once, by name or index.\n"
             "\n"
             "Raises:\n"
             "    KeyError, IndexError: no such dim.\n"
             "    ValueError: not each dim once.\n"
             "\n"
             "Example:\n"
             "    >>> import devicemesh\n"
             "    >>> with devicemesh.simulate(world_size=8, rank=0):\n"
             "    ...     mesh = devicemesh.init_device_mesh(\n"
             "    ...         'cpu', (2, 4), mesh_dim_names=('dp', 'tp'))\n"
             "    >>> mesh.permute('tp', 'dp')\n"
             "    DeviceMesh((tp=4, dp=2), 'cpu', stride=(1, 4))\n"
             "    >>> mesh.permute('tp', 'dp').flatten().ranks()\n"
             "    (0, 4, 1, 5, 2, 6, 3, 7)\n");

static PyObject *
mesh_permute(PyObject *op, PyObject *args)
{
    py_mesh *self = (py_mesh *)op;
    py_state *state = py_state_of_type(Py_TYPE(op));
    int order[PY_MESH_MAX_NDIM];
    if (state == NULL || py_mesh_check(self) < 0) {
        return NULL;
    }
    PyObject *first = PyTuple_GET_SIZE(args) == 1 ? PyTuple_GET_ITEM(args, 0) : NULL;
    bool packed = first != NULL && (PyTuple_Check(first) || PyList_Check(first));
    PyObject *list = packed ? PySequence_Tuple(first) : Py_NewRef(args);
    if (list == NULL) {
        return NULL;
    }
    int failed = parse_order(self, list, order);
    Py_DECREF(list);
    if (failed < 0) {
        return NULL;
    }
    dm_layout *layout = NULL;
    dm_error err = DM_ERROR_INIT;
    if (dm_layout_select(self->layout, order, self->ndim, &layout, &err) != DM_OK) {
        return py_raise(state, &err);
    }
    PyObject *names = reorder(self->names, order);
    PyObject *specs = reorder(self->specs, order);
    PyObject *view = NULL;
    if (specs != NULL && (self->names == NULL || names != NULL)) {
        view = py_mesh_view(self, layout, names, specs);
        layout = NULL;
    }
    dm_layout_free(layout);
    Py_XDECREF(names);
    Py_XDECREF(specs);
    return view;
}

PyMethodDef py_mesh_select_methods[] = {
    {"select", (PyCFunction)(void (*)(void))mesh_select, METH_VARARGS | METH_KEYWORDS,
     mesh_select_doc},
    {"permute", mesh_permute, METH_VARARGS, mesh_permute_doc},
    {NULL, NULL, 0, NULL},
};

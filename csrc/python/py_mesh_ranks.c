/* Ranks and coordinates of a mesh: arithmetic on its layout; no group is touched. */
#include "python/py_mesh.h"

#include "base/dm_alloc.h"
#include "python/py_args.h"
#include "python/py_error.h"

/* The coordinates as a tuple. */
static PyObject *
tuple_of(const int64_t *numbers, int n)
{
    PyObject *tuple = PyTuple_New(n);
    for (int i = 0; i < n && tuple != NULL; i++) {
        PyObject *number = PyLong_FromLongLong(numbers[i]);
        if (number == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, i, number);
    }
    return tuple;
}

/* The ranks of a layout whose first element lies at offset `base`, as a tuple. */
static PyObject *
rank_tuple(const py_mesh *self, const dm_layout *layout, int64_t base)
{
    size_t count = (size_t)dm_layout_numel(layout);
    int64_t *offsets = dm_malloc_array(count, sizeof(*offsets));
    PyObject *tuple = PyTuple_New((Py_ssize_t)count);
    if (offsets == NULL) {
        PyErr_NoMemory();
        Py_CLEAR(tuple);
    }
    if (tuple != NULL) {
        dm_layout_offsets(layout, base, offsets);
    }
    for (size_t i = 0; i < count && tuple != NULL; i++) {
        PyObject *rank = PyLong_FromLong(dm_ranks_at(self->native->ranks, offsets[i]));
        if (rank == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, (Py_ssize_t)i, rank);
    }
    dm_free(offsets);
    return tuple;
}

/* Where a rank lies in the root; -1 with ValueError where it is in none of its places. */
static int64_t
offset_of(py_mesh *self, PyObject *rank)
{
    int64_t number;
    if (py_args_int(rank, "rank", 0, INT32_MAX, &number) < 0) {
        return -1;
    }
    int64_t offset = dm_ranks_find(self->native->ranks, (int32_t)number);
    if (offset < 0) {
        PyErr_Format(PyExc_ValueError, "rank %lld is not in the mesh %R",
                     (long long)number, py_mesh_root_of(self));
    }
    return offset;
}

/* Whether the rank lies in this mesh itself, not only in another line of its root; then
 * its offset. */
static bool
find_member(py_mesh *self, int32_t rank, int64_t *offset)
{
    const dm_layout *layout = self->layout;
    *offset = dm_ranks_find(self->native->ranks, rank);
    if (*offset < 0) {
        return false;
    }
    if (self->numel == dm_ranks_size(self->native->ranks)) {
        return true;
    }
    int64_t mine = self->native->offset;
    return mine >= 0 && dm_layout_base(layout, *offset) == dm_layout_base(layout, mine);
}

/* --- coordinates ----------------------------------------------------------------- */

PyDoc_STRVAR(
    mesh_coordinate_of_doc,
    "coordinate_of($self, rank, /)\n--\n\n"
    "The coordinate of any rank, as a tuple; None when it is not in the mesh.\n"
    "\n"
    "A slice has the ranks that its `mesh` shows: this rank's line or plane.\n"
    "\n"
    "Example:\n"
    "    >>> import devicemesh\n"
    "    >>> with devicemesh.simulate(world_size=8, rank=0):\n"
    "    ...     mesh = devicemesh.init_device_mesh(\n"
    "    ...         'cpu', (2, 4), mesh_dim_names=('dp', 'tp'))\n"
    "    >>> mesh.coordinate_of(6), mesh['tp'].coordinate_of(6), mesh.rank_at(1, 2)\n"
    "    ((1, 2), None, 6)\n");

static PyObject *
mesh_coordinate_of(PyObject *op, PyObject *rank)
{
    py_mesh *self = (py_mesh *)op;
    int64_t number, offset;
    if (py_mesh_check(self) < 0 ||
        py_args_int(rank, "rank", 0, INT32_MAX, &number) < 0) {
        return NULL;
    }
    if (!find_member(self, (int32_t)number, &offset)) {
        Py_RETURN_NONE;
    }
    int64_t indices[PY_MESH_MAX_NDIM];
    dm_layout_coordinate(self->layout, offset, indices);
    return tuple_of(indices, self->ndim);
}

int
py_mesh_contains(PyObject *op, PyObject *rank)
{
    py_mesh *self = (py_mesh *)op;
    int64_t number, offset;
    if (py_mesh_check(self) < 0) {
        return -1;
    }
    if (PyUnicode_Check(rank)) {
        PyErr_Format(PyExc_TypeError,
                     "a mesh contains ranks, got %R: the names are in mesh_dim_names",
                     rank);
        return -1;
    }
    if (py_args_int(rank, "rank", 0, INT32_MAX, &number) < 0) {
        return -1;
    }
    return find_member(self, (int32_t)number, &offset);
}

static PyObject *
mesh_get_is_member(PyObject *op, void *Py_UNUSED(closure))
{
    py_mesh *self = (py_mesh *)op;
    return py_mesh_check(self) < 0 ? NULL
                                   : PyBool_FromLong(self->coordinate != Py_None);
}

/* --- rank_at ------------------------------------------------------------------------ */

static int
parse_index(py_mesh *self, int dim, PyObject *value, int64_t *index)
{
    PyObject *name = py_mesh_dim_name(self, dim);
    const char *text = name == NULL ? NULL : PyUnicode_AsUTF8(name);
    int result =
        text == NULL
            ? -1
            : py_args_int(value, text, 0, dm_layout_size(self->layout, dim) - 1, index);
    Py_XDECREF(name);
    return result;
}

static int
indices_by_position(py_mesh *self, PyObject *const *args, Py_ssize_t nargs,
                    int64_t *indices)
{
    if (nargs != self->ndim) {
        PyErr_Format(PyExc_TypeError,
                     "rank_at() takes one index for each of the %d dims, or indices by "
                     "name; got %zd",
                     self->ndim, nargs);
        return -1;
    }
    for (int d = 0; d < self->ndim; d++) {
        if (parse_index(self, d, args[d], &indices[d]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Dims that are not named are this rank's own. */
static int
indices_by_name(py_mesh *self, PyObject *const *values, PyObject *names,
                int64_t *indices)
{
    bool given[PY_MESH_MAX_NDIM] = {false};
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        int dim = py_mesh_own_dim(self, name);
        if (dim < 0) {
            PyErr_Format(
                PyExc_KeyError,
                "Mesh dimension '%U' does not exist. Available mesh dimensions "
                "are: mesh_dim_names=%R",
                name, self->names != NULL ? self->names : Py_None);
            return -1;
        }
        if (parse_index(self, dim, values[i], &indices[dim]) < 0) {
            return -1;
        }
        given[dim] = true;
    }
    for (int d = 0; d < self->ndim; d++) {
        if (given[d]) {
            continue;
        }
        if (self->native->offset < 0) {
            PyErr_Format(
                PyExc_RuntimeError,
                "rank %d is not in the mesh %R and has no coordinate to fill in: "
                "rank_at() needs an index for every dim",
                (int)self->native->rank, self);
            return -1;
        }
        indices[d] = dm_layout_coordinate_on(self->layout, d, self->native->offset);
    }
    return 0;
}

PyDoc_STRVAR(
    mesh_rank_at_doc,
    "rank_at($self, /, *coordinate, **indices)\n--\n\n"
    "The rank at a coordinate.\n"
    "\n"
    "Args:\n"
    "    coordinate: an index from 0 up for each dim.\n"
    "    indices: or indices by name; in dims that are left out it is this rank's\n"
    "        own.\n"
    "\n"
    "Raises:\n"
    "    ValueError: an index out of range; negative ones are, as the rank before\n"
    "        the first is not the last.\n"
    "    RuntimeError: a dim left out on a rank that is not in the mesh.\n"
    "\n"
    "Example:\n"
    "    >>> import devicemesh\n"
    "    >>> with devicemesh.simulate(world_size=8, rank=5):\n"
    "    ...     mesh = devicemesh.init_device_mesh(\n"
    "    ...         'cpu', (2, 4), mesh_dim_names=('dp', 'tp'))\n"
    "    >>> mesh.rank_at(0, 3), mesh.rank_at(dp=0, tp=3), mesh.rank_at(tp=0)\n"
    "    (3, 3, 4)\n");

static PyObject *
mesh_rank_at(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    py_mesh *self = (py_mesh *)op;
    int64_t indices[PY_MESH_MAX_NDIM];
    if (py_mesh_check(self) < 0) {
        return NULL;
    }
    if (nargs > 0 && kwnames != NULL && PyTuple_GET_SIZE(kwnames) > 0) {
        PyErr_SetString(PyExc_TypeError,
                        "rank_at() takes indices by position or by name, not both");
        return NULL;
    }
    int failed = nargs > 0 ? indices_by_position(self, args, nargs, indices)
                           : indices_by_name(self, args, kwnames, indices);
    int64_t base = failed < 0 ? -1 : py_mesh_base(self);
    if (base < 0) {
        return NULL;
    }
    int64_t offset = base + dm_layout_offset(self->layout, indices);
    return PyLong_FromLong(dm_ranks_at(self->native->ranks, offset));
}

/* --- ranks -------------------------------------------------------------------------- */

/* Where the line (or slice) begins that a rank is in; -1 with ValueError. */
static int64_t
base_of_rank(py_mesh *self, PyObject *rank)
{
    int64_t offset = offset_of(self, rank);
    return offset < 0 ? -1 : dm_layout_base(self->layout, offset);
}

/* The layout of one dim or of a tuple of them. */
static dm_layout *
layout_of_dims(py_state *state, py_mesh *self, PyObject *arg)
{
    py_mesh *meshes[PY_MESH_MAX_NDIM];
    int dims[PY_MESH_MAX_NDIM];
    bool several = PyTuple_Check(arg) || PyList_Check(arg);
    PyObject *list = several ? PySequence_Tuple(arg) : PyTuple_Pack(1, arg);
    Py_ssize_t n = list == NULL ? 0 : PyTuple_GET_SIZE(list);
    dm_layout *layout = NULL;
    dm_error err = DM_ERROR_INIT;
    if (list == NULL) {
        return NULL;
    }
    if (n == 0 || n > PY_MESH_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "dim must be 1 to %d dims, got %R",
                     PY_MESH_MAX_NDIM, arg);
        goto done;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (py_mesh_find_dim(self, PyTuple_GET_ITEM(list, i), &meshes[i], &dims[i]) <
            0) {
            goto done;
        }
    }
    if (py_mesh_gather_dims(meshes, dims, (int)n, &layout, &err) != DM_OK) {
        py_raise(state, &err);
    }
    else if (!dm_layout_is_orthogonal(layout)) {
        PyErr_Format(PyExc_ValueError, "the dims %R overlap", arg);
        dm_layout_free(layout);
        layout = NULL;
    }

done:
    Py_DECREF(list);
    return layout;
}

PyDoc_STRVAR(
    mesh_ranks_doc,
    "ranks($self, dim=None, rank=None)\n--\n\n"
    "The ranks along a dim, as a tuple in the order of the mesh.\n"
    "\n"
    "Args:\n"
    "    dim: name (also of a flattened dim of the root) or index, or a tuple of\n"
    "        several, the last one changing fastest; all of the mesh by default.\n"
    "    rank: whose line it is; this rank's by default.\n"
    "\n"
    "Raises:\n"
    "    KeyError, IndexError: no such dim.\n"
    "    ValueError: a rank that is not in the mesh; dims that overlap.\n"
    "    RuntimeError: no `rank` on a rank that is not in the mesh.\n"
    "\n"
    "Example:\n"
    "    >>> import devicemesh\n"
    "    >>> with devicemesh.simulate(world_size=8, rank=5):\n"
    "    ...     mesh = devicemesh.init_device_mesh(\n"
    "    ...         'cpu', (2, 4), mesh_dim_names=('dp', 'tp'))\n"
    "    >>> mesh.ranks('tp'), mesh.ranks('tp', rank=0), mesh.ranks('dp')\n"
    "    ((4, 5, 6, 7), (0, 1, 2, 3), (1, 5))\n"
    "    >>> mesh.ranks(('tp', 'dp'))\n"
    "    (0, 4, 1, 5, 2, 6, 3, 7)\n");

static PyObject *
mesh_ranks(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"dim", "rank"};
    static const py_params params = {"ranks", names, 2, 0, 2};
    py_mesh *self = (py_mesh *)op;
    py_state *state = py_state_of_type(Py_TYPE(op));
    PyObject *values[2] = {Py_None, Py_None};
    if (state == NULL || py_mesh_check(self) < 0 ||
        py_args_bind(&params, args, nargs, kwnames, values) < 0) {
        return NULL;
    }
    if (values[0] == Py_None) {
        int64_t base =
            values[1] == Py_None ? py_mesh_base(self) : base_of_rank(self, values[1]);
        return base < 0 ? NULL : rank_tuple(self, self->layout, base);
    }
    dm_layout *layout = layout_of_dims(state, self, values[0]);
    PyObject *ranks = NULL;
    if (layout == NULL) {
        return NULL;
    }
    int64_t offset = self->native->offset;
    if (values[1] != Py_None) {
        offset = offset_of(self, values[1]);
    }
    else if (offset < 0) {
        py_mesh_raise_outside(self);
    }
    if (offset >= 0) {
        ranks = rank_tuple(self, layout, dm_layout_base(layout, offset));
    }
    dm_layout_free(layout);
    return ranks;
}

/* --- shift ---------------------------------------------------------------------------- */

PyDoc_STRVAR(mesh_shift_doc,
             "shift($self, dim, n=1, wrap=False)\n--\n\n"
             "The rank n steps along a dim, or None beyond the edge.\n"
             "\n"
             "Args:\n"
             "    dim: name (also of a flattened dim of the root) or index.\n"
             "    n: steps from this rank; negative ones go back.\n"
             "    wrap: the dim is a ring: the last rank is followed by the first.\n"
             "\n"
             "Raises:\n"
             "    KeyError, IndexError: no such dim.\n"
             "    RuntimeError: this rank is not in the mesh.\n"
             "\n"
             "Example:\n"
             "    >>> import devicemesh\n"
             "    >>> with devicemesh.simulate(world_size=8, rank=3):\n"
             "    ...     mesh = devicemesh.init_device_mesh(\n"
             "    ...         'cpu', (2, 4), mesh_dim_names=('dp', 'pp'))\n"
             "    >>> mesh.shift('pp', -1), mesh.shift('pp', 1), mesh.shift('pp', 1, "
             "wrap=True)\n"
             "    (2, None, 0)\n"
             "\n"
             "MPI's Cart_shift gives shift(dim, -n) and shift(dim, n) at once.\n");

static PyObject *
mesh_shift(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"dim", "n", "wrap"};
    static const py_params params = {"shift", names, 3, 1, 3};
    py_mesh *self = (py_mesh *)op;
    PyObject *values[3] = {NULL, NULL, Py_False};
    py_mesh *mesh;
    int dim;
    int64_t steps = 1;
    if (py_mesh_check(self) < 0 ||
        py_args_bind(&params, args, nargs, kwnames, values) < 0 ||
        py_mesh_find_dim(self, values[0], &mesh, &dim) < 0 ||
        (values[1] != NULL &&
         py_args_int(values[1], "n", -INT32_MAX, INT32_MAX, &steps) < 0)) {
        return NULL;
    }
    int wrap = PyObject_IsTrue(values[2]);
    if (wrap < 0) {
        return NULL;
    }
    int64_t offset = mesh->native->offset;
    if (offset < 0) {
        py_mesh_raise_outside(mesh);
        return NULL;
    }
    int64_t indices[PY_MESH_MAX_NDIM];
    int64_t size = dm_layout_size(mesh->layout, dim);
    dm_layout_coordinate(mesh->layout, offset, indices);
    int64_t target = indices[dim] + steps;
    if (wrap) {
        target = (target % size + size) % size;
    }
    else if (target < 0 || target >= size) {
        Py_RETURN_NONE;
    }
    indices[dim] = target;
    offset =
        dm_layout_base(mesh->layout, offset) + dm_layout_offset(mesh->layout, indices);
    return PyLong_FromLong(dm_ranks_at(mesh->native->ranks, offset));
}

PyMethodDef py_mesh_rank_methods[] = {
    {"coordinate_of", mesh_coordinate_of, METH_O, mesh_coordinate_of_doc},
    {"rank_at", (PyCFunction)(void (*)(void))mesh_rank_at,
     METH_FASTCALL | METH_KEYWORDS, mesh_rank_at_doc},
    {"ranks", (PyCFunction)(void (*)(void))mesh_ranks, METH_FASTCALL | METH_KEYWORDS,
     mesh_ranks_doc},
    {"shift", (PyCFunction)(void (*)(void))mesh_shift, METH_FASTCALL | METH_KEYWORDS,
     mesh_shift_doc},
    {NULL, NULL, 0, NULL},
};

PyGetSetDef py_mesh_rank_getset[] = {
    {"is_member", mesh_get_is_member, NULL,
     "Whether this rank is in the mesh: it has a coordinate and groups there.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

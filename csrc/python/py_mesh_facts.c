/* What a mesh answers without communication: sizes, coordinates, ranks. */
#include "python/py_mesh.h"

#include <string.h>

#include "base/dm_alloc.h"
#include "python/py_error.h"

/* --- dims by name or index ------------------------------------------------------ */

int
py_mesh_check(const py_mesh *self)
{
    if (self->native == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "DeviceMesh.__init__() was not called");
        return -1;
    }
    return 0;
}

int
py_mesh_own_dim(py_mesh *self, PyObject *name)
{
    PyObject *names = self->names;
    if (names == NULL) {
        return -1;
    }
    /* Names are interned and so are literals: nearly always this finds it. */
    for (Py_ssize_t d = 0; d < PyTuple_GET_SIZE(names); d++) {
        if (PyTuple_GET_ITEM(names, d) == name) {
            return (int)d;
        }
    }
    for (Py_ssize_t d = 0; d < PyTuple_GET_SIZE(names); d++) {
        if (PyUnicode_Compare(PyTuple_GET_ITEM(names, d), name) == 0) {
            return (int)d;
        }
    }
    return -1;
}

/* The flattened dims of the root may be asked for by name from any of its views. */
static int
find_flattened(py_mesh *self, PyObject *name, py_mesh **mesh, int *dim)
{
    py_mesh *root = py_mesh_root_of(self);
    PyObject *found =
        root->flattened == NULL ? NULL : PyDict_GetItemWithError(root->flattened, name);
    if (found != NULL) {
        *mesh = (py_mesh *)found;
        *dim = 0;
        return 0;
    }
    if (PyErr_Occurred()) {
        return -1;
    }
    if (self->names == NULL) {
        PyErr_Format(PyExc_KeyError,
                     "No `mesh_dim_names` found. The mesh has no dim %R: use an index.",
                     name);
    }
    else {
        PyErr_Format(
            PyExc_KeyError,
            "Mesh dimension '%U' does not exist. Available mesh dimensions are: "
            "mesh_dim_names=%R",
            name, self->names);
    }
    return -1;
}

static int
find_by_index(py_mesh *self, PyObject *arg, int *dim)
{
    Py_ssize_t index = PyNumber_AsSsize_t(arg, PyExc_IndexError);
    if (index == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (index < -self->ndim || index >= self->ndim) {
        PyErr_Format(PyExc_IndexError,
                     "mesh_dim %zd is out of range for a mesh of %d dims", index,
                     self->ndim);
        return -1;
    }
    *dim = (int)(index < 0 ? index + self->ndim : index);
    return 0;
}

int
py_mesh_find_dim(py_mesh *self, PyObject *arg, py_mesh **mesh, int *dim)
{
    if (py_mesh_check(self) < 0) {
        return -1;
    }
    *mesh = self;
    if (PyUnicode_Check(arg)) {
        *dim = py_mesh_own_dim(self, arg);
        return *dim >= 0 ? 0 : find_flattened(self, arg, mesh, dim);
    }
    if (PyIndex_Check(arg)) {
        return find_by_index(self, arg, dim);
    }
    if (PyTuple_Check(arg) || PyList_Check(arg)) {
        PyErr_Format(PyExc_TypeError,
                     "mesh_dim must be one dim's name or index, got %R: several dims "
                     "become one by mesh[names].flatten()",
                     arg);
    }
    else {
        PyErr_Format(PyExc_TypeError, "mesh_dim must be a dim's name or index, got %R",
                     arg);
    }
    return -1;
}

int
py_mesh_dim_arg(const char *method, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames, PyObject **arg)
{
    Py_ssize_t nkw = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    *arg = NULL;
    if (nargs + nkw > 1) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most 1 argument (%zd given)",
                     method, nargs + nkw);
        return -1;
    }
    if (nkw == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(kwnames, 0),
                                                     "mesh_dim") != 0) {
        PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'",
                     method, PyTuple_GET_ITEM(kwnames, 0));
        return -1;
    }
    if (nargs + nkw == 1 && args[0] != Py_None) {
        *arg = args[0];
    }
    return 0;
}

void
py_mesh_raise_outside(py_mesh *self)
{
    PyErr_Format(
        PyExc_RuntimeError,
        "rank %d is not in the mesh %R: it has no coordinate and no groups there",
        (int)self->native->rank, self);
}

/* --- sizes and coordinates --------------------------------------------------------- */

PyDoc_STRVAR(mesh_size_doc,
             "size($self, mesh_dim=None)\n--\n\n"
             "Number of ranks of the mesh, or of one dim by name or index.\n"
             "\n"
             "Raises:\n"
             "    KeyError: no dim of that name.\n"
             "    IndexError: an index out of range.\n"
             "\n"
             "Example:\n"
             "    >>> import devicemesh\n"
             "    >>> with devicemesh.simulate(world_size=8, rank=0):\n"
             "    ...     mesh = devicemesh.init_device_mesh(\n"
             "    ...         'cpu', (2, 4), mesh_dim_names=('dp', 'tp'))\n"
             "    >>> mesh.size(), mesh.size('tp'), mesh.size(0)\n"
             "    (8, 4, 2)\n");

static PyObject *
mesh_size(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    py_mesh *self = (py_mesh *)op;
    py_mesh *mesh;
    PyObject *arg;
    int dim;
    if (py_mesh_dim_arg("size", args, nargs, kwnames, &arg) < 0 ||
        py_mesh_check(self) < 0) {
        return NULL;
    }
    if (arg == NULL) {
        return PyLong_FromLongLong(self->numel);
    }
    if (py_mesh_find_dim(self, arg, &mesh, &dim) < 0) {
        return NULL;
    }
    return Py_NewRef(PyTuple_GET_ITEM(mesh->shape, dim));
}

PyDoc_STRVAR(mesh_get_rank_doc,
             "get_rank($self, /)\n--\n\n"
             "This process's rank in the world, whether it is in the mesh or not.");

static PyObject *
mesh_get_rank(PyObject *op, PyObject *Py_UNUSED(unused))
{
    py_mesh *self = (py_mesh *)op;
    return py_mesh_check(self) < 0 ? NULL : PyLong_FromLong(self->native->rank);
}

PyDoc_STRVAR(
    mesh_get_local_rank_doc,
    "get_local_rank($self, mesh_dim=None)\n--\n\n"
    "This rank's place along one dim: its coordinate there, which is also its\n"
    "rank in that dim's group.\n"
    "\n"
    "Args:\n"
    "    mesh_dim: name or index; not needed where there is one dim.\n"
    "\n"
    "Raises:\n"
    "    RuntimeError: no mesh_dim on a mesh of several dims; this rank is not\n"
    "        in the mesh.\n");

static PyObject *
mesh_get_local_rank(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                    PyObject *kwnames)
{
    py_mesh *self = (py_mesh *)op;
    py_mesh *mesh = self;
    PyObject *arg;
    int dim = 0;
    if (py_mesh_dim_arg("get_local_rank", args, nargs, kwnames, &arg) < 0 ||
        py_mesh_check(self) < 0) {
        return NULL;
    }
    if (arg == NULL && self->ndim != 1) {
        PyErr_Format(
            PyExc_RuntimeError,
            "Found the DeviceMesh have %d dimensions. Optional kwarg `mesh_dim` "
            "needs to be specified when device_mesh.ndim > 1.",
            self->ndim);
        return NULL;
    }
    if (arg != NULL && py_mesh_find_dim(self, arg, &mesh, &dim) < 0) {
        return NULL;
    }
    if (mesh->coordinate == Py_None) {
        py_mesh_raise_outside(mesh);
        return NULL;
    }
    return Py_NewRef(PyTuple_GET_ITEM(mesh->coordinate, dim));
}

PyDoc_STRVAR(mesh_get_coordinate_doc,
             "get_coordinate($self, /)\n--\n\n"
             "This rank's index along each dim, or None when it is not in the mesh.");

static PyObject *
mesh_get_coordinate(PyObject *op, PyObject *Py_UNUSED(unused))
{
    py_mesh *self = (py_mesh *)op;
    return py_mesh_check(self) < 0 ? NULL : Py_NewRef(self->coordinate);
}

static PyObject *
mesh_sym_get_coordinate(PyObject *op, PyObject *index)
{
    py_mesh *self = (py_mesh *)op;
    int dim;
    if (py_mesh_check(self) < 0 || find_by_index(self, index, &dim) < 0) {
        return NULL;
    }
    if (self->coordinate == Py_None) {
        py_mesh_raise_outside(self);
        return NULL;
    }
    return Py_NewRef(PyTuple_GET_ITEM(self->coordinate, dim));
}

static PyObject *
mesh_is_member(PyObject *op, PyObject *Py_UNUSED(unused))
{
    py_mesh *self = (py_mesh *)op;
    return py_mesh_check(self) < 0 ? NULL
                                   : PyBool_FromLong(self->coordinate != Py_None);
}

static PyObject *
mesh_get_mesh_dim_by_name(PyObject *op, PyObject *name)
{
    py_mesh *self = (py_mesh *)op;
    if (py_mesh_check(self) < 0) {
        return NULL;
    }
    int dim = PyUnicode_Check(name) ? py_mesh_own_dim(self, name) : -1;
    if (dim >= 0) {
        return PyLong_FromLong(dim);
    }
    if (self->names == NULL) {
        PyErr_SetString(PyExc_KeyError, "No `mesh_dim_names` found.");
    }
    else {
        PyErr_Format(
            PyExc_KeyError,
            "Mesh dimension '%S' does not exist. Available mesh dimensions are: "
            "mesh_dim_names=%R",
            name, self->names);
    }
    return NULL;
}

static PyObject *
mesh_get_root_mesh(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return Py_NewRef((PyObject *)py_mesh_root_of((py_mesh *)op));
}

static PyObject *
mesh_get_root_mesh_dim(PyObject *op, PyObject *Py_UNUSED(unused))
{
    py_mesh *self = (py_mesh *)op;
    if (py_mesh_check(self) < 0) {
        return NULL;
    }
    if (self->names == NULL) {
        Py_RETURN_NONE;
    }
    if (self->ndim != 1) {
        PyErr_Format(PyExc_RuntimeError,
                     "The submesh can only be a 1D mesh. %R has %d dims", op,
                     self->ndim);
        return NULL;
    }
    return mesh_get_mesh_dim_by_name((PyObject *)py_mesh_root_of(self),
                                     PyTuple_GET_ITEM(self->names, 0));
}

/* --- arrays and lists of ranks ------------------------------------------------------- */

int64_t
py_mesh_base(py_mesh *self)
{
    if (dm_layout_numel(self->layout) == dm_ranks_size(self->native->ranks)) {
        return 0;
    }
    if (self->native->offset >= 0) {
        return dm_layout_base(self->layout, self->native->offset);
    }
    PyErr_Format(
        PyExc_RuntimeError,
        "In order to get the mesh Tensor of a DeviceMesh it needs to either have "
        "all its original dimensions (e.g., no slicing) or it needs to contain "
        "the local rank: rank %d is in no slice %R",
        (int)self->native->rank, self);
    return -1;
}

/* The ranks in row-major order; dm_free them. */
static int32_t *
row_major_ranks(py_mesh *self)
{
    int64_t base = py_mesh_base(self);
    if (base < 0) {
        return NULL;
    }
    size_t count = (size_t)self->numel;
    int64_t *offsets = dm_malloc_array(count, sizeof(*offsets));
    int32_t *ranks = dm_malloc_array(count, sizeof(*ranks));
    if (offsets == NULL || ranks == NULL) {
        dm_free(offsets);
        dm_free(ranks);
        PyErr_NoMemory();
        return NULL;
    }
    dm_layout_offsets(self->layout, base, offsets);
    for (size_t i = 0; i < count; i++) {
        ranks[i] = dm_ranks_at(self->native->ranks, offsets[i]);
    }
    dm_free(offsets);
    return ranks;
}

static PyObject *
nested_lists(py_mesh *self, int dim, const int32_t **next)
{
    if (dim == self->ndim) {
        return PyLong_FromLong(*(*next)++);
    }
    int64_t size = dm_layout_size(self->layout, dim);
    PyObject *list = PyList_New((Py_ssize_t)size);
    for (int64_t i = 0; i < size && list != NULL; i++) {
        PyObject *entry = nested_lists(self, dim + 1, next);
        if (entry == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, entry);
    }
    return list;
}

PyObject *
py_mesh_rank_lists(py_mesh *self)
{
    int32_t *ranks = row_major_ranks(self);
    if (ranks == NULL) {
        return NULL;
    }
    const int32_t *next = ranks;
    PyObject *lists = nested_lists(self, 0, &next);
    dm_free(ranks);
    return lists;
}

/* numpy, or ImportError that says why it is needed. */
static PyObject *
import_numpy(py_state *state)
{
    PyObject *numpy = PyImport_Import(state->name_numpy);
    if (numpy == NULL && PyErr_ExceptionMatches(PyExc_ImportError)) {
        PyErr_SetString(
            PyExc_ImportError,
            "DeviceMesh.mesh is a numpy array and numpy is not installed: "
            "pip install numpy. Everything else about a mesh works without");
    }
    return numpy;
}

/* A writable int32 array over a bytearray of its own. */
static PyObject *
int32_array(PyObject *numpy, const int32_t *ranks, int64_t count, PyObject *shape)
{
    PyObject *bytes =
        PyByteArray_FromStringAndSize((const char *)ranks, (Py_ssize_t)count * 4);
    PyObject *flat =
        bytes == NULL ? NULL
                      : PyObject_CallMethod(numpy, "frombuffer", "Os", bytes, "int32");
    PyObject *array =
        flat == NULL ? NULL : PyObject_CallMethod(flat, "reshape", "(O)", shape);
    Py_XDECREF(bytes);
    Py_XDECREF(flat);
    return array;
}

static PyObject *
mesh_get_mesh(PyObject *op, void *Py_UNUSED(closure))
{
    py_mesh *self = (py_mesh *)op;
    py_state *state = py_state_of_type(Py_TYPE(op));
    if (state == NULL || py_mesh_check(self) < 0) {
        return NULL;
    }
    PyObject *numpy = import_numpy(state);
    int32_t *ranks = numpy == NULL ? NULL : row_major_ranks(self);
    PyObject *array =
        ranks == NULL ? NULL : int32_array(numpy, ranks, self->numel, self->shape);
    dm_free(ranks);
    Py_XDECREF(numpy);
    return array;
}

/* The root's ranks as a tuple: O(world), for torch's sake. */
static PyObject *
mesh_flatten_rank_map(PyObject *op, void *Py_UNUSED(closure))
{
    py_mesh *self = (py_mesh *)op;
    if (py_mesh_check(self) < 0) {
        return NULL;
    }
    int64_t count = dm_ranks_size(self->native->ranks);
    PyObject *tuple = PyTuple_New((Py_ssize_t)count);
    for (int64_t i = 0; i < count && tuple != NULL; i++) {
        PyObject *rank = PyLong_FromLong(dm_ranks_at(self->native->ranks, i));
        if (rank == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, (Py_ssize_t)i, rank);
    }
    return tuple;
}

/* Per dim a tuple of (size, stride), outermost first; none for a dim of size 1. */
static PyObject *
mesh_layout(PyObject *op, void *Py_UNUSED(closure))
{
    py_mesh *self = (py_mesh *)op;
    if (py_mesh_check(self) < 0) {
        return NULL;
    }
    PyObject *dims = PyTuple_New(self->ndim);
    for (int d = 0; d < self->ndim && dims != NULL; d++) {
        const dm_factor *factors = NULL;
        int count = dm_layout_factors(self->layout, d, &factors);
        PyObject *dim = PyTuple_New(count);
        for (int i = 0; i < count && dim != NULL; i++) {
            PyObject *factor = Py_BuildValue("(LL)", (long long)factors[i].size,
                                             (long long)factors[i].stride);
            if (factor == NULL) {
                Py_CLEAR(dim);
                break;
            }
            PyTuple_SET_ITEM(dim, i, factor);
        }
        if (dim == NULL) {
            Py_CLEAR(dims);
            break;
        }
        PyTuple_SET_ITEM(dims, d, dim);
    }
    return dims;
}

/* --- hashes ------------------------------------------------------------------------------ */

static PyObject *
mesh_hash_key(PyObject *op, PyObject *Py_UNUSED(unused))
{
    py_mesh *self = (py_mesh *)op;
    if (py_mesh_check(self) < 0) {
        return NULL;
    }
    PyObject *names = self->names != NULL ? self->names : Py_None;
    PyObject *ranks = mesh_flatten_rank_map(op, NULL);
    PyObject *layout = mesh_layout(op, NULL);
    PyObject *key = NULL;
    if (ranks != NULL && layout != NULL) {
        key = PyTuple_Pack(5, ranks, layout, self->device_type, names, Py_None);
    }
    Py_XDECREF(ranks);
    Py_XDECREF(layout);
    return key;
}

PyDoc_STRVAR(mesh_stable_hash_doc,
             "_stable_hash($self, /)\n--\n\n"
             "A hex text that equal meshes share in every process and run.");

static PyObject *
mesh_stable_hash(PyObject *op, PyObject *Py_UNUSED(unused))
{
    py_mesh *self = (py_mesh *)op;
    if (py_mesh_check(self) < 0) {
        return NULL;
    }
    PyObject *names = self->names != NULL ? self->names : Py_None;
    PyObject *ranks = dm_ranks_is_identity(self->native->ranks)
                          ? PyLong_FromLongLong(dm_ranks_size(self->native->ranks))
                          : mesh_flatten_rank_map(op, NULL);
    PyObject *layout = mesh_layout(op, NULL);
    PyObject *text = NULL, *bytes = NULL, *hashlib = NULL, *hash = NULL, *hex = NULL;
    if (ranks == NULL || layout == NULL) {
        goto done;
    }
    text = PyUnicode_FromFormat("%R %R %R %R", self->device_type, names, layout, ranks);
    bytes = text == NULL ? NULL : PyUnicode_AsUTF8String(text);
    hashlib = bytes == NULL ? NULL : PyImport_ImportModule("hashlib");
    hash = hashlib == NULL ? NULL : PyObject_CallMethod(hashlib, "sha256", "O", bytes);
    hex = hash == NULL ? NULL : PyObject_CallMethod(hash, "hexdigest", NULL);
    if (hex != NULL) {
        Py_SETREF(hex, PyUnicode_Substring(hex, 0, 32));
    }

done:
    Py_XDECREF(ranks);
    Py_XDECREF(layout);
    Py_XDECREF(text);
    Py_XDECREF(bytes);
    Py_XDECREF(hashlib);
    Py_XDECREF(hash);
    return hex;
}

/* --- properties --------------------------------------------------------------------------- */

static PyObject *
mesh_get_device_type(PyObject *op, void *Py_UNUSED(closure))
{
    py_mesh *self = (py_mesh *)op;
    return py_mesh_check(self) < 0 ? NULL : Py_NewRef(self->device_type);
}

static PyObject *
mesh_get_names(PyObject *op, void *Py_UNUSED(closure))
{
    py_mesh *self = (py_mesh *)op;
    if (py_mesh_check(self) < 0) {
        return NULL;
    }
    return Py_NewRef(self->names != NULL ? self->names : Py_None);
}

static PyObject *
mesh_get_ndim(PyObject *op, void *Py_UNUSED(closure))
{
    py_mesh *self = (py_mesh *)op;
    return py_mesh_check(self) < 0 ? NULL : PyLong_FromLong(self->ndim);
}

static PyObject *
mesh_get_shape(PyObject *op, void *Py_UNUSED(closure))
{
    py_mesh *self = (py_mesh *)op;
    return py_mesh_check(self) < 0 ? NULL : Py_NewRef(self->shape);
}

static PyObject *
mesh_get_coordinate_property(PyObject *op, void *Py_UNUSED(closure))
{
    return mesh_get_coordinate(op, NULL);
}

static PyObject *
mesh_get_rank_property(PyObject *op, void *Py_UNUSED(closure))
{
    return mesh_get_rank(op, NULL);
}

static PyObject *
mesh_get_root_property(PyObject *op, void *Py_UNUSED(closure))
{
    py_mesh *self = (py_mesh *)op;
    return Py_NewRef(self->root != NULL ? (PyObject *)self->root : Py_None);
}

static PyObject *
mesh_get_thread_id(PyObject *Py_UNUSED(op), void *Py_UNUSED(closure))
{
    Py_RETURN_NONE; /* torch: set under its threaded backend only */
}

static PyObject *
mesh_get_flatten_mapping(PyObject *op, void *Py_UNUSED(closure))
{
    py_mesh *self = (py_mesh *)op;
    return self->flattened != NULL ? PyDict_Copy(self->flattened) : PyDict_New();
}

PyMethodDef py_mesh_fact_methods[] = {
    {"size", (PyCFunction)(void (*)(void))mesh_size, METH_FASTCALL | METH_KEYWORDS,
     mesh_size_doc},
    {"get_rank", mesh_get_rank, METH_NOARGS, mesh_get_rank_doc},
    {"get_local_rank", (PyCFunction)(void (*)(void))mesh_get_local_rank,
     METH_FASTCALL | METH_KEYWORDS, mesh_get_local_rank_doc},
    {"get_coordinate", mesh_get_coordinate, METH_NOARGS, mesh_get_coordinate_doc},
    {"_sym_get_coordinate", mesh_sym_get_coordinate, METH_O,
     "_sym_get_coordinate($self, index, /)\n--\n\nThis rank's index along one dim."},
    {"_is_current_rank_part_of_mesh", mesh_is_member, METH_NOARGS,
     "_is_current_rank_part_of_mesh($self, /)\n--\n\nWhether it has a coordinate."},
    {"_get_mesh_dim_by_name", mesh_get_mesh_dim_by_name, METH_O,
     "_get_mesh_dim_by_name($self, mesh_dim_name, /)\n--\n\nThe index of a dim."},
    {"_get_root_mesh", mesh_get_root_mesh, METH_NOARGS,
     "_get_root_mesh($self, /)\n--\n\nThe mesh that this one is a view of, or itself."},
    {"_get_root_mesh_dim", mesh_get_root_mesh_dim, METH_NOARGS,
     "_get_root_mesh_dim($self, /)\n--\n\nThe index in the root of this mesh's only "
     "dim; None without names."},
    {"_hash_key", mesh_hash_key, METH_NOARGS,
     "_hash_key($self, /)\n--\n\nWhat equality compares, as a tuple; O(world)."},
    {"_stable_hash", mesh_stable_hash, METH_NOARGS, mesh_stable_hash_doc},
    {NULL, NULL, 0, NULL},
};

PyGetSetDef py_mesh_fact_getset[] = {
    {"device_type", mesh_get_device_type, NULL, "'cpu' or 'cuda'.", NULL},
    {"mesh", mesh_get_mesh, NULL,
     "The ranks as an int32 numpy array, made anew each time.", NULL},
    {"mesh_dim_names", mesh_get_names, NULL, "A tuple of names, or None.", NULL},
    {"ndim", mesh_get_ndim, NULL, "Number of dims.", NULL},
    {"shape", mesh_get_shape, NULL, "Size of each dim, as a tuple.", NULL},
    {"_coordinate_on_dim", mesh_get_coordinate_property, NULL, NULL, NULL},
    {"_device_type", mesh_get_device_type, NULL, NULL, NULL},
    {"_flatten_mapping", mesh_get_flatten_mapping, NULL, NULL, NULL},
    {"_flatten_rank_map", mesh_flatten_rank_map, NULL, NULL, NULL},
    {"_layout", mesh_layout, NULL,
     "Per dim its factors (size, stride), outermost first.", NULL},
    {"_mesh_dim_names", mesh_get_names, NULL, NULL, NULL},
    {"_rank", mesh_get_rank_property, NULL, NULL, NULL},
    {"_root_mesh", mesh_get_root_property, NULL, "The root mesh; None in a root.",
     NULL},
    {"_thread_id", mesh_get_thread_id, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

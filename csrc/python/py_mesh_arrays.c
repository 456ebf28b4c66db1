/* A mesh as arrays and lists of ranks, and the keys and hashes made from them. */
#include "python/py_mesh.h"

#include "base/dm_alloc.h"

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

PyMethodDef py_mesh_array_methods[] = {
    {"_hash_key", mesh_hash_key, METH_NOARGS,
     "_hash_key($self, /)\n--\n\nWhat equality compares, as a tuple; O(world)."},
    {"_stable_hash", mesh_stable_hash, METH_NOARGS, mesh_stable_hash_doc},
    {NULL, NULL, 0, NULL},
};

PyGetSetDef py_mesh_array_getset[] = {
    {"mesh", mesh_get_mesh, NULL,
     "The ranks as an int32 numpy array, made anew each time.", NULL},
    {"_flatten_rank_map", mesh_flatten_rank_map, NULL, NULL, NULL},
    {"_layout", mesh_layout, NULL,
     "Per dim its factors (size, stride), outermost first.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

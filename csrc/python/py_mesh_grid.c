/* The `mesh` argument: an array of ranks in any of the forms that it may have. */
#include "python/py_mesh.h"

#include <string.h>

#include "base/dm_alloc.h"

enum { NOT_HANDLED = 1 }; /* besides 0 and -1: try the next way to read it */

void
py_mesh_grid_clear(py_mesh_grid *grid)
{
    dm_free(grid->ranks);
    grid->ranks = NULL;
}

static int
push(py_mesh_grid *grid, long long rank)
{
    if (rank > INT32_MAX || rank < INT32_MIN) {
        PyErr_Format(PyExc_ValueError, "mesh: %lld is no rank", rank);
        return -1;
    }
    if (grid->count == grid->capacity) {
        int64_t capacity = grid->capacity == 0 ? 16 : 2 * grid->capacity;
        int32_t *grown =
            dm_realloc_array(grid->ranks, (size_t)capacity, sizeof(*grown));
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        grid->ranks = grown;
        grid->capacity = capacity;
    }
    grid->ranks[grid->count++] = (int32_t)rank;
    return 0;
}

/* Memory with a shape: what a Py_buffer and an __array_interface__ have in common. */
typedef struct array_view {
    const char *data;
    int ndim;
    const Py_ssize_t *shape;
    const Py_ssize_t *strides;
    Py_ssize_t itemsize;
    bool is_signed;
    bool is_swapped; /* not this machine's byte order */
} array_view;

/* 1, 2, 4 or 8 bytes at any address as a number, zero-extended. */
static uint64_t
read_raw(const char *at, Py_ssize_t itemsize, bool swapped)
{
    unsigned char bytes[8];
    uint64_t raw = 0;
    memcpy(bytes, at, (size_t)itemsize);
    bool is_little = (PY_LITTLE_ENDIAN != 0) != swapped;
    for (Py_ssize_t i = 0; i < itemsize; i++) {
        raw = raw << 8 | bytes[is_little ? itemsize - 1 - i : i];
    }
    return raw;
}

static int
read_item(py_mesh_grid *grid, const array_view *view, const char *at)
{
    uint64_t raw = read_raw(at, view->itemsize, view->is_swapped);
    unsigned spare = 64 - 8 * (unsigned)view->itemsize;
    if (view->is_signed) {
        return push(grid, (int64_t)(raw << spare) >> spare);
    }
    return push(grid, raw > INT64_MAX ? INT64_MAX : (int64_t)raw);
}

static int
read_dims(py_mesh_grid *grid, const array_view *view, int dim, const char *at)
{
    if (dim == view->ndim) {
        return read_item(grid, view, at);
    }
    for (Py_ssize_t i = 0; i < view->shape[dim]; i++) {
        if (read_dims(grid, view, dim + 1, at + i * view->strides[dim]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
read_array(py_mesh_grid *grid, const array_view *view)
{
    if (view->ndim > PY_MESH_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "a mesh has at most %d dims, got %d",
                     PY_MESH_MAX_NDIM, view->ndim);
        return -1;
    }
    grid->ndim = view->ndim;
    for (int d = 0; d < view->ndim; d++) {
        grid->shape[d] = view->shape[d];
    }
    return read_dims(grid, view, 0, view->data);
}

static int
raise_not_integers(const char *what)
{
    PyErr_Format(PyExc_TypeError,
                 "mesh must hold integer ranks, got elements of type %s", what);
    return -1;
}

/* Integers of a struct format. */
static int
check_format(const char *format, array_view *view)
{
    const char *code = format == NULL ? "B" : format;
    if (strchr("@=<>!", *code) != NULL && *code != '\0') {
        view->is_swapped =
            PY_LITTLE_ENDIAN ? *code == '>' || *code == '!' : *code == '<';
        code++;
    }
    if (*code != '\0' && code[1] == '\0') {
        if (strchr("bhilqn", *code) != NULL) {
            view->is_signed = true;
            return 0;
        }
        if (strchr("BHILQN", *code) != NULL) {
            view->is_signed = false;
            return 0;
        }
    }
    return raise_not_integers(format);
}

static int
read_buffer(py_mesh_grid *grid, PyObject *obj)
{
    if (!PyObject_CheckBuffer(obj)) {
        return NOT_HANDLED;
    }
    Py_buffer buffer;
    if (PyObject_GetBuffer(obj, &buffer, PyBUF_STRIDES | PyBUF_FORMAT) < 0) {
        PyErr_Clear();
        return NOT_HANDLED;
    }
    array_view view = {
        .data = buffer.buf,
        .ndim = buffer.ndim,
        .shape = buffer.shape,
        .strides = buffer.strides,
        .itemsize = buffer.itemsize,
    };
    int result = check_format(buffer.format, &view);
    if (result == 0) {
        result = read_array(grid, &view);
    }
    PyBuffer_Release(&buffer);
    return result;
}

/* A tuple of `n` ints. */
static int
read_sizes(PyObject *tuple, Py_ssize_t n, Py_ssize_t *sizes)
{
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != n) {
        PyErr_SetString(PyExc_ValueError, "mesh: malformed __array_interface__");
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        sizes[i] = PyNumber_AsSsize_t(PyTuple_GET_ITEM(tuple, i), PyExc_OverflowError);
        if (sizes[i] == -1 && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

/* "<i4" and the like. */
static int
check_typestr(PyObject *typestr, array_view *view)
{
    const char *text =
        typestr == NULL || !PyUnicode_Check(typestr) ? NULL : PyUnicode_AsUTF8(typestr);
    if (text == NULL || strlen(text) < 3) {
        PyErr_Clear();
        return NOT_HANDLED;
    }
    view->is_swapped = text[0] == (PY_LITTLE_ENDIAN ? '>' : '<');
    view->is_signed = text[1] == 'i';
    view->itemsize = strtol(text + 2, NULL, 10);
    bool known = view->itemsize == 1 || view->itemsize == 2 || view->itemsize == 4 ||
                 view->itemsize == 8;
    if ((text[1] != 'i' && text[1] != 'u') || !known) {
        return raise_not_integers(text);
    }
    return 0;
}

static int
read_interface_dict(py_mesh_grid *grid, PyObject *interface)
{
    array_view view = {0};
    int result = check_typestr(PyDict_GetItemString(interface, "typestr"), &view);
    if (result != 0) {
        return result;
    }
    PyObject *shape = PyDict_GetItemString(interface, "shape");
    PyObject *data = PyDict_GetItemString(interface, "data");
    PyObject *strides = PyDict_GetItemString(interface, "strides");
    if (shape == NULL || !PyTuple_Check(shape) || data == NULL ||
        !PyTuple_Check(data) || PyTuple_GET_SIZE(data) != 2) {
        return NOT_HANDLED;
    }
    Py_ssize_t ndim = PyTuple_GET_SIZE(shape);
    Py_ssize_t sizes[PY_MESH_MAX_NDIM];
    Py_ssize_t steps[PY_MESH_MAX_NDIM];
    if (ndim > PY_MESH_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "a mesh has at most %d dims, got %zd",
                     PY_MESH_MAX_NDIM, ndim);
        return -1;
    }
    if (read_sizes(shape, ndim, sizes) < 0) {
        return -1;
    }
    if (strides != NULL && strides != Py_None) {
        if (read_sizes(strides, ndim, steps) < 0) {
            return -1;
        }
    }
    else {
        Py_ssize_t step = view.itemsize;
        for (Py_ssize_t d = ndim - 1; d >= 0; d--) {
            steps[d] = step;
            step *= sizes[d];
        }
    }
    view.data = PyLong_AsVoidPtr(PyTuple_GET_ITEM(data, 0));
    if (view.data == NULL && PyErr_Occurred()) {
        return -1;
    }
    view.ndim = (int)ndim;
    view.shape = sizes;
    view.strides = steps;
    return read_array(grid, &view);
}

static int
read_interface(py_state *state, py_mesh_grid *grid, PyObject *obj)
{
    PyObject *interface = py_mesh_get_optional(obj, state->name_array_interface);
    if (interface == NULL) {
        return PyErr_Occurred() ? -1 : NOT_HANDLED;
    }
    int result =
        PyDict_Check(interface) ? read_interface_dict(grid, interface) : NOT_HANDLED;
    Py_DECREF(interface);
    return result;
}

static int
read_leaf(py_mesh_grid *grid, PyObject *obj, int depth)
{
    if (!PyIndex_Check(obj)) {
        PyErr_Format(PyExc_TypeError, "mesh must hold integer ranks, got %R (%s)", obj,
                     Py_TYPE(obj)->tp_name);
        return -1;
    }
    if (grid->ndim < 0) {
        grid->ndim = depth;
    }
    if (grid->ndim != depth) {
        PyErr_Format(PyExc_ValueError,
                     "mesh is ragged: rank %R lies %d lists deep, others %d", obj,
                     depth, grid->ndim);
        return -1;
    }
    PyObject *number = PyNumber_Index(obj);
    if (number == NULL) {
        return -1;
    }
    int overflow = 0;
    long long rank = PyLong_AsLongLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (rank == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (overflow != 0) {
        PyErr_Format(PyExc_ValueError, "mesh: %R is no rank", obj);
        return -1;
    }
    return push(grid, rank);
}

static int
read_nested(py_state *state, py_mesh_grid *grid, PyObject *obj, int depth);

static int
read_sequence(py_state *state, py_mesh_grid *grid, PyObject *obj, int depth)
{
    if (depth >= PY_MESH_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "a mesh has at most %d dims", PY_MESH_MAX_NDIM);
        return -1;
    }
    PyObject *items = PySequence_Fast(obj, "mesh must be nested sequences of ranks");
    if (items == NULL) {
        return -1;
    }
    int result = -1;
    Py_ssize_t size = PySequence_Fast_GET_SIZE(items);
    if (size == 0) {
        PyErr_SetString(PyExc_ValueError, "mesh is empty");
        goto done;
    }
    if (grid->shape[depth] < 0) {
        grid->shape[depth] = size;
    }
    if (grid->shape[depth] != size) {
        PyErr_Format(PyExc_ValueError,
                     "mesh is ragged: expected %lld entries at dim %d, got %zd",
                     (long long)grid->shape[depth], depth, size);
        goto done;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        /* tolist() and __index__ of an entry may run any code. */
        if (PySequence_Fast_GET_SIZE(items) != size) {
            PyErr_SetString(PyExc_RuntimeError, "mesh changed while it was read");
            goto done;
        }
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(items, i));
        int failed = read_nested(state, grid, item, depth + 1);
        Py_DECREF(item);
        if (failed != 0) {
            goto done;
        }
    }
    result = 0;

done:
    Py_DECREF(items);
    return result;
}

static int
read_nested(py_state *state, py_mesh_grid *grid, PyObject *obj, int depth)
{
    if (PyLong_Check(obj)) {
        return read_leaf(grid, obj, depth);
    }
    if (PyUnicode_Check(obj) || PyBytes_Check(obj) || PyFloat_Check(obj)) {
        PyErr_Format(PyExc_TypeError, "mesh must hold integer ranks, got %R (%s)", obj,
                     Py_TYPE(obj)->tp_name);
        return -1;
    }
    if (!PyList_Check(obj) && !PyTuple_Check(obj)) {
        PyObject *method = py_mesh_get_optional(obj, state->name_tolist);
        if (method != NULL) {
            PyObject *list = PyObject_CallNoArgs(method);
            Py_DECREF(method);
            if (list == NULL) {
                return -1;
            }
            int result = PyList_Check(list) ? read_sequence(state, grid, list, depth)
                                            : read_leaf(grid, list, depth);
            Py_DECREF(list);
            return result;
        }
        if (PyErr_Occurred()) {
            return -1;
        }
    }
    return PySequence_Check(obj) ? read_sequence(state, grid, obj, depth)
                                 : read_leaf(grid, obj, depth);
}

int
py_mesh_grid_parse(py_state *state, PyObject *mesh, py_mesh_grid *grid)
{
    *grid = (py_mesh_grid){.ndim = -1};
    for (int d = 0; d < PY_MESH_MAX_NDIM; d++) {
        grid->shape[d] = -1;
    }
    int result = NOT_HANDLED;
    if (!PyList_Check(mesh) && !PyTuple_Check(mesh) && !PyLong_Check(mesh) &&
        !PyBytes_Check(mesh)) {
        result = read_buffer(grid, mesh);
        if (result == NOT_HANDLED) {
            result = read_interface(state, grid, mesh);
        }
    }
    if (result == NOT_HANDLED) {
        result = read_nested(state, grid, mesh, 0);
    }
    if (result == 0 && grid->count == 0) {
        PyErr_SetString(PyExc_ValueError, "mesh is empty");
        result = -1;
    }
    if (result != 0) {
        py_mesh_grid_clear(grid);
    }
    return result;
}

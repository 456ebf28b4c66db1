/* Arguments of meshes: device types, names, arrays of ranks, what is asked for per
 * dim. Nothing here touches a mesh; every function checks first and builds in locals.
 */
#include "python/py_mesh.h"

#include <string.h>

#include "base/dm_alloc.h"
#include "python/py_error.h"
#include "python/py_wait.h"

/* obj.name, or NULL: without an exception when there is no such attribute. */
static PyObject *
get_optional(PyObject *obj, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(obj, name);
    if (value == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
    }
    return value;
}

/* --- device type ---------------------------------------------------------------- */

static int
is_letters(PyObject *text)
{
    PyObject *alpha = PyObject_CallMethod(text, "isalpha", NULL);
    if (alpha == NULL) {
        return -1;
    }
    int result = PyObject_IsTrue(alpha);
    Py_DECREF(alpha);
    return result;
}

static PyObject *
raise_device_index(PyObject *value)
{
    PyErr_Format(
        PyExc_RuntimeError,
        "Device type with index is not supported but got %S. If you maintained "
        "a 'torch.device' object, it's recommended to pass in 'device.type'.",
        value);
    return NULL;
}

/* The `type` of a torch.device or the like; an index in it is refused. */
static PyObject *
device_object_type(py_state *state, PyObject *value)
{
    PyObject *type = get_optional(value, state->name_type);
    if (type == NULL || !PyUnicode_Check(type)) {
        Py_XDECREF(type);
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError,
                         "device_type must be a str such as 'cpu' or 'cuda', got %R",
                         value);
        }
        return NULL;
    }
    PyObject *index = get_optional(value, state->name_index);
    if (index == NULL && PyErr_Occurred()) {
        Py_DECREF(type);
        return NULL;
    }
    if (index != NULL && index != Py_None) {
        Py_DECREF(index);
        Py_DECREF(type);
        return raise_device_index(value);
    }
    Py_XDECREF(index);
    return type;
}

PyObject *
py_mesh_device_type(py_state *state, PyObject *value)
{
    PyObject *type = PyUnicode_Check(value) ? PyUnicode_FromObject(value)
                                            : device_object_type(state, value);
    if (type == NULL) {
        return NULL;
    }
    int letters = is_letters(type);
    const char *text = PyUnicode_AsUTF8(type);
    if (letters < 0 || text == NULL) {
        goto error;
    }
    if (letters == 0 && PyUnicode_GET_LENGTH(type) > 0) {
        raise_device_index(type);
        goto error;
    }
    if (dm_backend_default(text) == NULL) {
        PyErr_Format(PyExc_ValueError,
                     "unknown device type %R: devicemesh knows 'cpu' and 'cuda'", type);
        goto error;
    }
    PyUnicode_InternInPlace(&type);
    return type;

error:
    Py_DECREF(type);
    return NULL;
}

/* --- names ---------------------------------------------------------------------- */

/* The classic ("dp") for ("dp",). */
static int
raise_names_are_str(PyObject *value, int ndim)
{
    if (PyUnicode_GET_LENGTH(value) != ndim) {
        PyErr_Format(PyExc_RuntimeError,
                     "mesh_shape and mesh_dim_names should have same length! Found "
                     "len(mesh_dim_names): %zd and len(mesh_shape):%d. mesh_dim_names "
                     "is the str %R: did you mean (%R,)?",
                     PyUnicode_GET_LENGTH(value), ndim, value, value);
    }
    else {
        PyErr_Format(PyExc_TypeError,
                     "mesh_dim_names must be a tuple of str, got the str %R: did you "
                     "mean (%R,)?",
                     value, value);
    }
    return -1;
}

/* Each entry an exact str, interned, and there once. */
static int
intern_names(PyObject *names)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        if (!PyUnicode_Check(name)) {
            PyErr_Format(PyExc_TypeError, "mesh_dim_names must be str, got %R in %R",
                         name, names);
            return -1;
        }
        PyObject *exact = PyUnicode_FromObject(name);
        if (exact == NULL) {
            return -1;
        }
        PyUnicode_InternInPlace(&exact);
        Py_DECREF(name);
        PyTuple_SET_ITEM(names, i, exact);
        for (Py_ssize_t j = 0; j < i; j++) {
            if (PyTuple_GET_ITEM(names, j) == exact) {
                PyErr_Format(PyExc_RuntimeError,
                             "Each mesh_dim_name must be unique. Found repeated "
                             "mesh_dim_name in mesh_dim_names %R",
                             names);
                return -1;
            }
        }
    }
    return 0;
}

/* A tuple of our own: entries of it will be replaced. */
static PyObject *
fresh_tuple(PyObject *iterable)
{
    PyObject *list = PySequence_List(iterable);
    if (list == NULL) {
        return NULL;
    }
    PyObject *tuple = PyList_AsTuple(list);
    Py_DECREF(list);
    return tuple;
}

int
py_mesh_names_parse(PyObject *value, int ndim, PyObject **names)
{
    if (value == NULL || value == Py_None) {
        *names = NULL;
        return 0;
    }
    if (PyUnicode_Check(value)) {
        return raise_names_are_str(value, ndim);
    }
    PyObject *tuple = fresh_tuple(value);
    if (tuple == NULL) {
        return -1;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(tuple);
    if (count == 0) {
        Py_DECREF(tuple);
        *names = NULL;
        return 0;
    }
    if (intern_names(tuple) < 0) {
        Py_DECREF(tuple);
        return -1;
    }
    if (count != ndim) {
        PyErr_Format(PyExc_RuntimeError,
                     "mesh_shape and mesh_dim_names should have same length! Found "
                     "len(mesh_dim_names): %zd and len(mesh_shape):%d.",
                     count, ndim);
        Py_DECREF(tuple);
        return -1;
    }
    *names = tuple;
    return 0;
}

/* --- arrays of ranks ------------------------------------------------------------ */

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
    PyObject *interface = get_optional(obj, state->name_array_interface);
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
        PyObject *method = get_optional(obj, state->name_tolist);
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

/* --- what is asked for per dim -------------------------------------------------- */

/* "cpu:gloo,cuda:nccl" -> the entry of the device type; a plain name -> itself. NULL
 * with an exception when there is no entry for it. */
static PyObject *
backend_of_device(PyObject *text, PyObject *device_type)
{
    Py_ssize_t colon = PyUnicode_FindChar(text, ':', 0, PyUnicode_GET_LENGTH(text), 1);
    if (colon == -1) {
        return PyUnicode_FromObject(text);
    }
    PyObject *comma = PyUnicode_FromString(",");
    PyObject *parts = comma == NULL ? NULL : PyUnicode_Split(text, comma, -1);
    Py_XDECREF(comma);
    if (parts == NULL) {
        return NULL;
    }
    PyObject *found = NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parts) && found == NULL; i++) {
        PyObject *part = PyList_GET_ITEM(parts, i);
        Py_ssize_t length = PyUnicode_GET_LENGTH(part);
        colon = PyUnicode_FindChar(part, ':', 0, length, 1);
        if (colon < 0) {
            continue;
        }
        PyObject *device = PyUnicode_Substring(part, 0, colon);
        if (device == NULL) {
            break;
        }
        if (PyUnicode_Compare(device, device_type) == 0) {
            found = PyUnicode_Substring(part, colon + 1, length);
        }
        Py_DECREF(device);
    }
    Py_DECREF(parts);
    if (found == NULL && !PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "backend %R names none for device type %R", text,
                     device_type);
    }
    return found;
}

/* Known, without loading the library of a backend that may never be used. */
static int
check_backend(py_state *state, PyObject *backend)
{
    const char *name = PyUnicode_AsUTF8(backend);
    if (name == NULL) {
        return -1;
    }
    if (strcmp(name, "gloo") == 0 || strcmp(name, "nccl") == 0) {
        return 0;
    }
    const dm_backend *table = NULL;
    dm_error err = DM_ERROR_INIT;
    if (dm_backend_find(name, &table, &err) != DM_OK) {
        return py_raise_int(state, &err);
    }
    return 0;
}

/* A backend name or None -> *backend (new reference). */
static int
parse_backend(py_state *state, PyObject *value, PyObject *device_type,
              PyObject **backend)
{
    if (value == Py_None) {
        *backend = Py_NewRef(Py_None);
        return 0;
    }
    if (!PyUnicode_Check(value)) {
        PyErr_Format(PyExc_TypeError,
                     "backend_override: a backend must be a name or None, got %R",
                     value);
        return -1;
    }
    PyObject *name = backend_of_device(value, device_type);
    if (name == NULL) {
        return -1;
    }
    if (check_backend(state, name) < 0) {
        Py_DECREF(name);
        return -1;
    }
    *backend = name;
    return 0;
}

/* The time-out of options: `_timeout` (torch's spelling) or `timeout`. New reference,
 * Py_None where there is none; NULL on error or where neither attribute exists. */
static PyObject *
options_timeout(py_state *state, PyObject *options)
{
    PyObject *timeout = get_optional(options, state->name_private_timeout);
    if (timeout == NULL && !PyErr_Occurred()) {
        timeout = get_optional(options, state->name_timeout);
    }
    return timeout;
}

static PyObject *
timeout_as_int(PyObject *timeout)
{
    int64_t ns;
    if (py_timeout_parse(timeout, "timeout", &ns) < 0) {
        return NULL;
    }
    return PyLong_FromLongLong(ns);
}

/* Options -> backend name (None unless they say one) and time-out (None unless ...).
 * Both new references. */
static int
parse_options(py_state *state, PyObject *options, PyObject *device_type,
              PyObject **backend, PyObject **timeout)
{
    PyObject *name = NULL;
    PyObject *limit = options_timeout(state, options);
    if (limit == NULL && PyErr_Occurred()) {
        return -1;
    }
    name = get_optional(options, state->name_backend);
    if (name == NULL && PyErr_Occurred()) {
        goto error;
    }
    if (name == NULL && limit == NULL) {
        PyErr_Format(PyExc_TypeError,
                     "backend_override: expected a backend name, options, or (name, "
                     "options), got %R",
                     options);
        goto error;
    }
    if (limit != NULL && limit != Py_None) {
        Py_SETREF(limit, timeout_as_int(limit));
        if (limit == NULL) {
            goto error;
        }
    }
    if (name == NULL || (PyUnicode_Check(name) && PyUnicode_GET_LENGTH(name) == 0)) {
        Py_XSETREF(name, Py_NewRef(Py_None));
    }
    PyObject *parsed = NULL;
    if (parse_backend(state, name, device_type, &parsed) < 0) {
        goto error;
    }
    Py_DECREF(name);
    *backend = parsed;
    *timeout = limit != NULL ? limit : Py_NewRef(Py_None);
    return 0;

error:
    Py_XDECREF(name);
    Py_XDECREF(limit);
    return -1;
}

/* (name or None, options or None) */
static int
parse_pair(py_state *state, PyObject *pair, PyObject *device_type, PyObject **backend,
           PyObject **timeout)
{
    PyObject *first = PySequence_GetItem(pair, 0);
    PyObject *second = PySequence_GetItem(pair, 1);
    PyObject *name = NULL, *own_name = NULL, *limit = NULL;
    int result = -1;
    if (first == NULL || second == NULL ||
        parse_backend(state, first, device_type, &name) < 0) {
        goto done;
    }
    if (second != Py_None &&
        parse_options(state, second, device_type, &own_name, &limit) < 0) {
        goto done;
    }
    if (name == Py_None && own_name != NULL) {
        Py_SETREF(name, Py_NewRef(own_name));
    }
    *backend = Py_NewRef(name);
    *timeout = limit != NULL ? Py_NewRef(limit) : Py_NewRef(Py_None);
    result = 0;

done:
    Py_XDECREF(first);
    Py_XDECREF(second);
    Py_XDECREF(name);
    Py_XDECREF(own_name);
    Py_XDECREF(limit);
    return result;
}

PyObject *
py_mesh_spec_parse(py_state *state, PyObject *override, PyObject *device_type,
                   PyObject *inherited)
{
    PyObject *backend = NULL, *timeout = NULL;
    int failed;
    if (override == NULL || override == Py_None || PyUnicode_Check(override)) {
        timeout = Py_NewRef(Py_None);
        failed = parse_backend(state, override == NULL ? Py_None : override,
                               device_type, &backend);
    }
    else if (PyTuple_Check(override) || PyList_Check(override)) {
        if (PySequence_Size(override) != 2) {
            PyErr_Format(PyExc_TypeError,
                         "backend_override: expected (name, options), got %R",
                         override);
            return NULL;
        }
        failed = parse_pair(state, override, device_type, &backend, &timeout);
    }
    else {
        failed = parse_options(state, override, device_type, &backend, &timeout);
    }
    PyObject *spec = NULL;
    if (failed == 0) {
        spec = Py_BuildValue("(OsO)", backend, "",
                             timeout == Py_None ? inherited : timeout);
    }
    Py_XDECREF(backend);
    Py_XDECREF(timeout);
    return spec;
}

/* names as in error texts: () where there are none. */
static PyObject *
names_or_empty(PyObject *names)
{
    return names != NULL ? Py_NewRef(names) : PyTuple_New(0);
}

/* dict[index or name] for each dim; every key must have been used. *values gets `ndim`
 * borrowed entries, NULL where there is none. */
static int
spread_dict(PyObject *dict, const char *what, int ndim, PyObject *names,
            PyObject **values)
{
    Py_ssize_t used = 0;
    for (int d = 0; d < ndim; d++) {
        PyObject *name = names != NULL ? PyTuple_GET_ITEM(names, d) : NULL;
        PyObject *index = PyLong_FromLong(d);
        if (index == NULL) {
            return -1;
        }
        PyObject *by_index = PyDict_GetItemWithError(dict, index);
        Py_DECREF(index);
        PyObject *by_name = NULL;
        if (name != NULL && !PyErr_Occurred()) {
            by_name = PyDict_GetItemWithError(dict, name);
        }
        if (PyErr_Occurred()) {
            return -1;
        }
        if (by_index != NULL && by_name != NULL) {
            PyErr_Format(PyExc_RuntimeError,
                         "Found redundant dim index %d and name %U in %s", d, name,
                         what);
            return -1;
        }
        values[d] = by_index != NULL ? by_index : by_name;
        used += values[d] != NULL;
    }
    return used == PyDict_GET_SIZE(dict) ? 0 : 1;
}

/* The keys that are neither a dim's name nor its index. */
static int
raise_invalid_keys(PyObject *dict, const char *what, int ndim, PyObject *names)
{
    PyObject *bad = PyDict_Keys(dict);
    PyObject *known = names_or_empty(names);
    if (bad == NULL || known == NULL) {
        goto done;
    }
    for (Py_ssize_t i = PyList_GET_SIZE(bad) - 1; i >= 0; i--) {
        PyObject *key = PyList_GET_ITEM(bad, i);
        int is_known = PySequence_Contains(known, key);
        if (is_known == 0 && PyLong_Check(key)) {
            int overflow;
            long index = PyLong_AsLongAndOverflow(key, &overflow);
            is_known = overflow == 0 && index >= 0 && index < ndim;
        }
        if (is_known < 0 || (is_known && PySequence_DelItem(bad, i) < 0)) {
            goto done;
        }
    }
    PyErr_Format(PyExc_RuntimeError,
                 "Found invalid keys in %s: got %R, expected integers in range [0, %d) "
                 "or one of %R",
                 what, bad, ndim, known);

done:
    Py_XDECREF(bad);
    Py_XDECREF(known);
    return -1;
}

/* Values per dim, borrowed from `dict`, which the caller keeps. */
static int
values_by_dim(PyObject *dict, const char *what, int ndim, PyObject *names,
              PyObject **values)
{
    int result = spread_dict(dict, what, ndim, names, values);
    return result <= 0 ? result : raise_invalid_keys(dict, what, ndim, names);
}

/* Time-outs per dim as int or None: new references, which the caller releases also
 * on failure. */
static int
timeouts_by_dim(PyObject *timeout, int ndim, PyObject *names, PyObject *inherited,
                PyObject **timeouts)
{
    PyObject *values[PY_MESH_MAX_NDIM] = {NULL};
    PyObject *shared = NULL, *keep = NULL;
    int result = -1;
    if (timeout == NULL || timeout == Py_None) {
        shared = Py_NewRef(inherited);
    }
    else if (PyDict_Check(timeout)) {
        shared = Py_NewRef(inherited);
        keep = PyDict_Copy(timeout);
        if (keep == NULL || values_by_dim(keep, "timeout", ndim, names, values) < 0) {
            goto done;
        }
    }
    else {
        shared = timeout_as_int(timeout);
        if (shared == NULL) {
            goto done;
        }
    }
    result = 0;
    for (int d = 0; d < ndim && result == 0; d++) {
        timeouts[d] = values[d] != NULL ? timeout_as_int(values[d]) : Py_NewRef(shared);
        result = timeouts[d] != NULL ? 0 : -1;
    }

done:
    Py_XDECREF(keep);
    Py_XDECREF(shared);
    return result;
}

/* Overrides per dim from a dict or a sequence; borrowed from *keep, which the caller
 * releases. */
static int
overrides_by_dim(PyObject *overrides, int ndim, PyObject *names, PyObject **values,
                 PyObject **keep)
{
    if (overrides == NULL || overrides == Py_None) {
        return 0;
    }
    if (PyDict_Check(overrides)) {
        *keep = PyDict_Copy(overrides);
        if (*keep == NULL) {
            return -1;
        }
        return values_by_dim(*keep, "backend_override", ndim, names, values);
    }
    if (PyUnicode_Check(overrides)) {
        PyErr_Format(
            PyExc_TypeError,
            "backend_override must be a dict such as {0: %R} (or one entry per "
            "dim), got the str %R",
            overrides, overrides);
        return -1;
    }
    *keep = PySequence_Tuple(overrides);
    if (*keep == NULL) {
        return -1;
    }
    if (PyTuple_GET_SIZE(*keep) != ndim) {
        PyErr_Format(PyExc_ValueError,
                     "backend_override should have the same length as the number of "
                     "mesh dimensions, but got %zd and %d.",
                     PyTuple_GET_SIZE(*keep), ndim);
        return -1;
    }
    for (int d = 0; d < ndim; d++) {
        values[d] = PyTuple_GET_ITEM(*keep, d);
    }
    return 0;
}

PyObject *
py_mesh_specs_parse(py_state *state, PyObject *overrides, PyObject *timeout, int ndim,
                    PyObject *names, PyObject *device_type, PyObject *inherited)
{
    PyObject *values[PY_MESH_MAX_NDIM] = {NULL};
    PyObject *timeouts[PY_MESH_MAX_NDIM] = {NULL};
    PyObject *keep = NULL, *specs = NULL;
    if (overrides_by_dim(overrides, ndim, names, values, &keep) < 0 ||
        timeouts_by_dim(timeout, ndim, names, inherited, timeouts) < 0) {
        goto done;
    }
    specs = PyTuple_New(ndim);
    for (int d = 0; d < ndim && specs != NULL; d++) {
        PyObject *spec = py_mesh_spec_parse(state, values[d], device_type, timeouts[d]);
        if (spec == NULL) {
            Py_CLEAR(specs);
            break;
        }
        PyTuple_SET_ITEM(specs, d, spec);
    }

done:
    for (int d = 0; d < ndim; d++) {
        Py_XDECREF(timeouts[d]);
    }
    Py_XDECREF(keep);
    return specs;
}

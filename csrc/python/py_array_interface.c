/* Arrays that describe themselves in a dict: `__array_interface__` (numpy's, version 3)
 * and `__cuda_array_interface__` (numba's): see py_array.h.
 *
 * The memory is a number in the dict, which holds as long as the object that gave it, or
 * a buffer beside it.
 */
#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "python/py_array_private.h"

enum { VERSION = 3 };

/* The value of a key, borrowed; NULL without an exception where it is missing or None,
 * NULL with one on errors. */
static PyObject *
value_of(PyObject *dict, const char *key)
{
    PyObject *name = PyUnicode_FromString(key);
    PyObject *value = name == NULL ? NULL : PyDict_GetItemWithError(dict, name);
    Py_XDECREF(name);
    return value == Py_None ? NULL : value;
}

/* "entry 'shape' of array.__array_interface__ must be a tuple of ints, got 3". Always
 * -1. */
static int
raise_entry(const py_export *e, const char *key, const char *wanted, PyObject *value)
{
    PyErr_Format(PyExc_TypeError, "'%s' in %s.__array_interface__ must be %s, got %R",
                 key, e->name, wanted, value != NULL ? value : Py_None);
    return -1;
}

/* --- entries -------------------------------------------------------------------------- */

/* "<f4" -> float32. An extension type of numpy is "<V2" or "<f1" there and has its name in
 * the object's dtype. 1, or 0 for what is no type of ours, or -1. */
static int
parse_typestr(const py_export *e, const char *text, dm_dtype *dtype)
{
    static const struct {
        char text[4];
        dm_dtype dtype;
    } known[] = {
        {"b1", DM_BOOL},      {"i1", DM_INT8},        {"i2", DM_INT16},
        {"i4", DM_INT32},     {"i8", DM_INT64},       {"u1", DM_UINT8},
        {"u2", DM_UINT16},    {"u4", DM_UINT32},      {"u8", DM_UINT64},
        {"f2", DM_FLOAT16},   {"f4", DM_FLOAT32},     {"f8", DM_FLOAT64},
        {"c8", DM_COMPLEX64}, {"c16", DM_COMPLEX128},
    };
    if (text[0] == '\0' || strchr("<>|=", text[0]) == NULL) {
        return 0;
    }
    const char *type = text + 1;
    int found = 0;
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]) && found == 0; i++) {
        if (strcmp(known[i].text, type) == 0) {
            *dtype = known[i].dtype;
            found = 1;
        }
    }
    if (found == 0 && (type[0] == 'V' || type[0] == 'f')) {
        found = py_array_dtype_by_name(e, dtype);
        if (found > 0 && strtoul(type + 1, NULL, 10) != dm_dtype_size(*dtype)) {
            found = 0;
        }
    }
    return found > 0 && text[0] == '>' ? dm_dtype_size(*dtype) == 1 : found;
}

/* A tuple of ints into sizes[PY_ARRAY_MAX_NDIM]; their number, or -1. */
static int
parse_sizes(const py_export *e, const char *key, PyObject *tuple, int64_t *sizes)
{
    if (tuple == NULL || !PyTuple_Check(tuple) ||
        PyTuple_GET_SIZE(tuple) > PY_ARRAY_MAX_NDIM) {
        return raise_entry(e, key, "a tuple of at most 64 ints", tuple);
    }
    int n = (int)PyTuple_GET_SIZE(tuple);
    for (int i = 0; i < n; i++) {
        sizes[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
        if (sizes[i] == -1 && PyErr_Occurred()) {
            if (PyErr_ExceptionMatches(PyExc_TypeError) ||
                PyErr_ExceptionMatches(PyExc_OverflowError)) {
                PyErr_Clear();
                raise_entry(e, key, "a tuple of ints of 64 bits", tuple);
            }
            return -1;
        }
    }
    return n;
}

/* (address, readonly). 0 or -1. */
static int
parse_address(const py_export *e, PyObject *data, py_layout *layout)
{
    PyObject *address = PyTuple_GET_SIZE(data) == 2 ? PyTuple_GET_ITEM(data, 0) : NULL;
    if (address == NULL || !PyLong_Check(address)) {
        return raise_entry(e, "data", "(address, read-only) or a buffer", data);
    }
    unsigned long long value = PyLong_AsUnsignedLongLong(address);
    if (value == ULLONG_MAX && PyErr_Occurred()) {
        PyErr_Clear();
        return raise_entry(e, "data", "(address, read-only) or a buffer", data);
    }
    int readonly = PyObject_IsTrue(PyTuple_GET_ITEM(data, 1));
    if (readonly < 0) {
        return -1;
    }
    layout->data = (void *)(uintptr_t)value;
    layout->readonly = readonly != 0;
    return 0;
}

/* --- a buffer beside the dict ------------------------------------------------------------ */

/* The buffer is exported into *array and must hold the layout, from its 'offset' on. 0 or
 * -1. */
static int
export_data(const py_export *e, PyObject *dict, PyObject *data, py_layout *layout,
            py_array *array)
{
    PyObject *entry = value_of(dict, "offset");
    if (PyErr_Occurred()) {
        return -1;
    }
    int64_t offset = entry == NULL ? 0 : PyLong_AsLongLong(entry);
    if (offset == -1 && PyErr_Occurred()) {
        return -1;
    }
    Py_buffer *view = &array->hold.view;
    if (PyObject_GetBuffer(data, view, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    array->holder = PY_ARRAY_BUFFER;
    layout->readonly = view->readonly != 0;
    if (offset < 0 || offset > view->len) {
        PyErr_Format(
            PyExc_ValueError,
            "'offset' in %s.__array_interface__ must be in 0..%zd, the bytes of "
            "its data, got %lld",
            e->name, view->len, (long long)offset);
        return -1;
    }
    layout->data = (char *)view->buf + offset;
    if (py_array_accept(e, layout, array) < 0) {
        return -1;
    }
    if (array->bytes > (size_t)(view->len - offset)) {
        PyErr_Format(
            PyExc_ValueError,
            "%s needs %zu bytes for its shape, its data has %zd after the offset "
            "%lld",
            e->name, array->bytes, view->len - offset, (long long)offset);
        return -1;
    }
    return 0;
}

/* --- the dict ------------------------------------------------------------------------------- */

/* Exports what the dict says. 0 or -1; a buffer may be exported in both cases. */
static int
export_dict(const py_export *e, PyObject *dict, py_array *array)
{
    int64_t shape[PY_ARRAY_MAX_NDIM];
    int64_t strides[PY_ARRAY_MAX_NDIM];
    py_layout layout = {.shape = shape, .stride_unit = 1};

    PyObject *version = value_of(dict, "version");
    long number =
        version != NULL && PyLong_Check(version) ? PyLong_AsLong(version) : -1;
    if (number != VERSION) {
        return PyErr_Occurred() ? -1 : raise_entry(e, "version", "3", version);
    }
    PyObject *typestr = value_of(dict, "typestr");
    const char *text =
        typestr != NULL && PyUnicode_Check(typestr) ? PyUnicode_AsUTF8(typestr) : NULL;
    if (text == NULL) {
        return PyErr_Occurred()
                   ? -1
                   : raise_entry(e, "typestr", "a str like '<f4'", typestr);
    }
    int known = parse_typestr(e, text, &layout.dtype);
    if (known <= 0) {
        return known < 0 ? -1 : py_array_raise_dtype(e, text);
    }
    PyObject *sizes = value_of(dict, "shape");
    int ndim = PyErr_Occurred() ? -1 : parse_sizes(e, "shape", sizes, shape);
    if (ndim < 0) {
        return -1;
    }
    layout.ndim = ndim;
    PyObject *steps = value_of(dict, "strides");
    if (steps != NULL) {
        int n = parse_sizes(e, "strides", steps, strides);
        if (n != ndim) {
            return n < 0 ? -1 : raise_entry(e, "strides", "as long as 'shape'", steps);
        }
        layout.strides = strides;
    }
    PyObject *mask = value_of(dict, "mask");
    if (mask != NULL) {
        return raise_entry(e, "mask", "None, since elements are sent without it", mask);
    }
    PyObject *data = value_of(dict, "data");
    if (PyErr_Occurred()) {
        return -1;
    }
    if (data == NULL) {
        return raise_entry(e, "data", "(address, read-only) or a buffer", data);
    }
    if (!PyTuple_Check(data)) {
        return export_data(e, dict, data, &layout, array);
    }
    if (parse_address(e, data, &layout) < 0 || py_array_accept(e, &layout, array) < 0) {
        return -1;
    }
    array->holder = PY_ARRAY_OBJECT;
    array->hold.object = Py_NewRef(e->object);
    return 0;
}

int
py_array_export_interface(const py_export *e, py_array *array)
{
    PyObject *dict = NULL;
    int result = py_array_get(e->object, e->state->name_cuda_array_interface, &dict);
    if (result > 0) {
        Py_DECREF(dict);
        return py_array_raise_device(e, "on a CUDA device");
    }
    if (result == 0) {
        result = py_array_get(e->object, e->state->name_array_interface, &dict);
    }
    if (result <= 0) {
        return result;
    }
    if (!PyDict_Check(dict)) {
        PyErr_Format(PyExc_TypeError, "%s.__array_interface__ must be a dict, got %R",
                     e->name, dict);
        result = -1;
    }
    else if (export_dict(e, dict, array) < 0) {
        py_array_release(array);
        result = -1;
    }
    Py_DECREF(dict);
    return result;
}

/* Arrays: see py_array.h. */
#include "python/py_array.h"

#include <stdbool.h>
#include <string.h>

/* --- element types --------------------------------------------------------------- */

static const dm_dtype unsigned_of_size[9] = {
    [1] = DM_UINT8, [2] = DM_UINT16, [4] = DM_UINT32, [8] = DM_UINT64};
static const dm_dtype signed_of_size[9] = {
    [1] = DM_INT8, [2] = DM_INT16, [4] = DM_INT32, [8] = DM_INT64};

/* The dtype of a struct-module format of one element; `itemsize` tells how long a "long"
 * is, so that native and standard sizes need no telling apart. */
static bool
parse_format(const char *format, Py_ssize_t itemsize, dm_dtype *dtype)
{
    if (format[0] == '@' || format[0] == '=' || format[0] == '<') {
        format++; /* little-endian is native here */
    }
    else if ((format[0] == '>' || format[0] == '!') && itemsize == 1) {
        format++;
    }

    if (format[0] == 'Z') {
        if (strcmp(format, "Zf") == 0 || strcmp(format, "Zd") == 0) {
            *dtype = format[1] == 'f' ? DM_COMPLEX64 : DM_COMPLEX128;
            return true;
        }
        return false;
    }
    if (format[0] == '\0' || format[1] != '\0') {
        return false;
    }
    switch (format[0]) {
    case '?':
        *dtype = DM_BOOL;
        return itemsize == 1;
    case 'e':
        *dtype = DM_FLOAT16;
        return itemsize == 2;
    case 'f':
        *dtype = DM_FLOAT32;
        return itemsize == 4;
    case 'd':
        *dtype = DM_FLOAT64;
        return itemsize == 8;
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q':
    case 'n':
        *dtype = itemsize <= 8 ? signed_of_size[itemsize] : DM_BOOL;
        return *dtype != DM_BOOL;
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
    case 'N':
        *dtype = itemsize <= 8 ? unsigned_of_size[itemsize] : DM_BOOL;
        return *dtype != DM_BOOL;
    default:
        return false;
    }
}

/* obj.dtype.name as a dtype. False with an exception set where there is no such name;
 * false without one where it is a name that we do not know. */
static bool
dtype_by_name(py_state *state, PyObject *object, dm_dtype *dtype)
{
    bool known = false;
    PyObject *descr = PyObject_GetAttr(object, state->name_dtype);
    PyObject *name = descr == NULL ? NULL : PyObject_GetAttr(descr, state->name_name);
    const char *text = name == NULL ? NULL : PyUnicode_AsUTF8(name);
    if (text != NULL) {
        known = dm_dtype_parse(text, dtype);
    }
    Py_XDECREF(name);
    Py_XDECREF(descr);
    return known;
}

/* --- errors ----------------------------------------------------------------------- */

static int
raise_no_array(PyObject *object, const char *name)
{
    PyErr_Format(PyExc_TypeError,
                 "%s must be an array with the buffer protocol (a numpy array, an "
                 "array.array, a bytearray, ...), got %.200s",
                 name, Py_TYPE(object)->tp_name);
    return -1;
}

static int
raise_bad_dtype(PyObject *object, const char *name, const char *format)
{
    PyObject *dtype = PyObject_GetAttrString(object, "dtype");
    if (dtype == NULL) {
        PyErr_Clear();
    }
    if (dtype != NULL) {
        PyErr_Format(PyExc_TypeError,
                     "%s has elements of type %S, which cannot be sent", name, dtype);
    }
    else {
        PyErr_Format(PyExc_TypeError,
                     "%s has elements of format '%s', which cannot be sent", name,
                     format != NULL ? format : "?");
    }
    Py_XDECREF(dtype);
    return -1;
}

/* A tuple of the values. */
static PyObject *
size_tuple(const Py_ssize_t *values, int ndim)
{
    PyObject *tuple = PyTuple_New(ndim);
    for (int i = 0; tuple != NULL && i < ndim; i++) {
        PyObject *value = PyLong_FromSsize_t(values[i]);
        if (value == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, i, value);
    }
    return tuple;
}

static int
raise_not_contiguous(const Py_buffer *view, const char *name)
{
    PyObject *shape = size_tuple(view->shape, view->ndim);
    PyObject *strides = shape == NULL ? NULL : size_tuple(view->strides, view->ndim);
    if (strides != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "%s must be C-contiguous: its shape is %R, its strides in bytes "
                     "are %R; pass a copy",
                     name, shape, strides);
    }
    Py_XDECREF(strides);
    Py_XDECREF(shape);
    return -1;
}

/* --- exports ----------------------------------------------------------------------- */

/* Exports an array whose exporter knows no format for its elements (and has just said
 * so), with the type that its dtype's name tells. */
static int
export_by_name(py_state *state, PyObject *object, const char *name, py_array *array)
{
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    int result = -1;
    if (dtype_by_name(state, object, &array->dtype)) {
        result = PyObject_GetBuffer(object, &array->view, PyBUF_STRIDES);
    }
    else if (!PyErr_Occurred()) {
        raise_bad_dtype(object, name, NULL);
    }
    else if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
        /* No numpy array: what the exporter said is all there is to say. */
        PyErr_Clear();
        PyErr_Restore(type, value, traceback);
        return -1;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return result;
}

int
py_array_export(py_state *state, PyObject *object, const char *name, bool writable,
                py_array *array)
{
    Py_buffer *view = &array->view;
    array->exported = false;
    if (!PyObject_CheckBuffer(object)) {
        return raise_no_array(object, name);
    }
    /* Read-only and strided buffers are taken too, so that the error is ours. */
    if (PyObject_GetBuffer(object, view, PyBUF_FORMAT | PyBUF_STRIDES) < 0) {
        if (export_by_name(state, object, name, array) < 0) {
            return -1;
        }
    }
    else if (!parse_format(view->format != NULL ? view->format : "B", view->itemsize,
                           &array->dtype)) {
        raise_bad_dtype(object, name, view->format);
        goto refuse;
    }

    if (writable && view->readonly) {
        PyErr_Format(PyExc_ValueError, "%s must be writable, got a read-only %.200s",
                     name, Py_TYPE(object)->tp_name);
        goto refuse;
    }
    if (!PyBuffer_IsContiguous(view, 'C')) {
        raise_not_contiguous(view, name);
        goto refuse;
    }
    array->count = (size_t)view->len / dm_dtype_size(array->dtype);
    array->exported = true;
    return 0;

refuse:
    PyBuffer_Release(view);
    return -1;
}

void
py_array_release(py_array *array)
{
    if (array->exported) {
        array->exported = false; /* first: the exporter's code may come back here */
        PyBuffer_Release(&array->view);
    }
}

/* Arrays of the buffer protocol: see py_array.h.
 *
 * The element type comes from the buffer's format, or, where an extension type of numpy
 * has none (bfloat16, float8 of ml_dtypes), from the name of the object's dtype.
 */
#include <stdbool.h>
#include <string.h>

#include "python/py_array_private.h"

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
    if (format[0] == '@' || format[0] == '=' || format[0] == '<' || format[0] == '^') {
        format++; /* little-endian is native here */
    }
    else if ((format[0] == '>' || format[0] == '!') && itemsize == 1) {
        format++;
    }

    if (format[0] == 'Z') {
        if (strcmp(format, "Zf") == 0 || strcmp(format, "Zd") == 0) {
            *dtype = format[1] == 'f' ? DM_COMPLEX64 : DM_COMPLEX128;
            return (size_t)itemsize == dm_dtype_size(*dtype);
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
        *dtype = itemsize > 0 && itemsize <= 8 ? signed_of_size[itemsize] : DM_BOOL;
        return *dtype != DM_BOOL;
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
    case 'N':
        *dtype = itemsize > 0 && itemsize <= 8 ? unsigned_of_size[itemsize] : DM_BOOL;
        return *dtype != DM_BOOL;
    default:
        return false;
    }
}

/* --- exports ----------------------------------------------------------------------- */

/* Whether the object has another way to offer what its buffer has just refused. The
 * exception stays. */
static bool
speaks_dlpack(const py_export *e)
{
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *method = NULL;
    int found = py_array_get(e->object, e->state->name_dlpack, &method);
    Py_XDECREF(method);
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    return found > 0;
}

/* Gets the buffer of an array whose exporter knows no format for its elements (and has
 * just said so), with the type that its dtype's name tells. As a protocol's function. */
static int
get_by_name(const py_export *e, Py_buffer *view, dm_dtype *dtype)
{
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);

    int result = py_array_dtype_by_name(e, dtype);
    if (result > 0) {
        if (PyObject_GetBuffer(e->object, view, PyBUF_STRIDES) == 0) {
            result = 1;
        }
        else if (PyErr_ExceptionMatches(PyExc_BufferError) && speaks_dlpack(e)) {
            PyErr_Clear();
            result = 0;
        }
        else {
            result = -1;
        }
    }
    else if (result == 0) {
        PyObject *descr = NULL;
        result = py_array_get(e->object, e->state->name_dtype, &descr);
        Py_XDECREF(descr);
        if (result > 0) {
            result = py_array_raise_dtype(e, NULL);
        }
        else if (result == 0) {
            /* No numpy array: what the exporter said is all there is to say. */
            PyErr_Restore(type, value, traceback);
            return -1;
        }
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return result;
}

/* Checks the buffer and takes its facts over into *array. 0 or -1. */
static int
accept(const py_export *e, const Py_buffer *view, dm_dtype dtype, py_array *array)
{
    if (!PyBuffer_IsContiguous(view, 'C')) {
        py_layout layout = {view->buf,
                            dtype,
                            view->readonly != 0,
                            view->ndim,
                            (int64_t *)view->shape,
                            (int64_t *)view->strides,
                            1};
        return py_array_accept(e, &layout, array);
    }
    if (view->readonly && (e->flags & PY_ARRAY_WRITABLE) != 0) {
        return py_array_raise_readonly(e);
    }
    array->dtype = dtype;
    array->data = view->buf;
    array->count = (size_t)view->len / dm_dtype_size(dtype);
    array->bytes = (size_t)view->len;
    return 0;
}

int
py_array_export_buffer(const py_export *e, py_array *array)
{
    if (!PyObject_CheckBuffer(e->object)) {
        return 0;
    }
    Py_buffer *view = &array->hold.view;
    dm_dtype dtype = DM_UINT8;
    bool known = true;
    /* Read-only and strided buffers are taken too, so that the error is ours. */
    if (PyObject_GetBuffer(e->object, view, PyBUF_FORMAT | PyBUF_STRIDES) < 0) {
        int result = get_by_name(e, view, &dtype);
        if (result <= 0) {
            return result;
        }
        known = (size_t)view->itemsize == dm_dtype_size(dtype);
    }
    else {
        const char *format = view->format != NULL ? view->format : "B";
        known = parse_format(format, view->itemsize, &dtype);
    }
    array->holder = PY_ARRAY_BUFFER;
    if (!known) {
        py_array_raise_dtype(e, view->format);
    }
    if (!known || accept(e, view, dtype, array) < 0) {
        py_array_release(array);
        return -1;
    }
    return 1;
}

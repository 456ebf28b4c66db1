/* Arrays: see py_array.h. Here is what all protocols have in common: the order in which
 * they are tried, the checks, the release.
 */
#include "python/py_array.h"

#include "python/py_array_private.h"

_Static_assert(sizeof(int64_t) == sizeof(Py_ssize_t), "shapes of buffers are int64_t");

/* --- errors ----------------------------------------------------------------------- */

static int
raise_no_array(const py_export *e)
{
    PyErr_Format(
        PyExc_TypeError,
        "%s must be an array (a numpy array, a torch tensor, anything with the "
        "buffer protocol, DLPack or __array_interface__), got %.200s",
        e->name, Py_TYPE(e->object)->tp_name);
    return -1;
}

int
py_array_raise_dtype(const py_export *e, const char *format)
{
    PyObject *dtype = PyObject_GetAttr(e->object, e->state->name_dtype);
    if (dtype == NULL) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError,
                     "%s has elements of format '%.200s', which cannot be sent",
                     e->name, format != NULL ? format : "?");
        return -1;
    }
    PyErr_Format(PyExc_TypeError, "%s has elements of type %S, which cannot be sent",
                 e->name, dtype);
    Py_DECREF(dtype);
    return -1;
}

int
py_array_raise_readonly(const py_export *e)
{
    PyErr_Format(PyExc_ValueError, "%s must be writable, got a read-only %.200s",
                 e->name, Py_TYPE(e->object)->tp_name);
    return -1;
}

int
py_array_raise_device(const py_export *e, const char *where)
{
    PyErr_Format(
        PyExc_ValueError,
        "%s must be in the CPU's memory, where this group works, got a %.200s %s",
        e->name, Py_TYPE(e->object)->tp_name, where);
    return -1;
}

/* A tuple of the values times `unit`. */
static PyObject *
size_tuple(const int64_t *values, int64_t ndim, int64_t unit)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)ndim);
    for (int64_t i = 0; tuple != NULL && i < ndim; i++) {
        int64_t product = 0;
        bool fits = !__builtin_mul_overflow(values[i], unit, &product);
        PyObject *value = PyLong_FromLongLong(fits ? product : values[i]);
        if (value == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, (Py_ssize_t)i, value);
    }
    return tuple;
}

static int
raise_not_contiguous(const py_export *e, const py_layout *layout)
{
    PyObject *shape = size_tuple(layout->shape, layout->ndim, 1);
    PyObject *strides =
        shape == NULL ? NULL
                      : size_tuple(layout->strides, layout->ndim, layout->stride_unit);
    if (strides != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "%s must be C-contiguous: its shape is %R, its strides in bytes "
                     "are %R; pass a copy",
                     e->name, shape, strides);
    }
    Py_XDECREF(strides);
    Py_XDECREF(shape);
    return -1;
}

static int
raise_bad_shape(const py_export *e, const py_layout *layout)
{
    PyObject *shape = size_tuple(layout->shape, layout->ndim, 1);
    if (shape != NULL) {
        PyErr_Format(PyExc_ValueError, "%s has the impossible shape %R of %s", e->name,
                     shape, dm_dtype_name(layout->dtype));
        Py_DECREF(shape);
    }
    return -1;
}

/* --- checks ------------------------------------------------------------------------ */

/* Elements and bytes of the shape; false where it is none that memory can have. */
static bool
measure(const py_layout *layout, size_t *count, size_t *bytes)
{
    int64_t elements = 1;
    bool empty = false;
    for (int64_t i = 0; i < layout->ndim; i++) {
        int64_t size = layout->shape[i];
        if (size < 0) {
            return false;
        }
        empty = empty || size == 0;
        if (!empty && __builtin_mul_overflow(elements, size, &elements)) {
            return false;
        }
    }
    int64_t total = 0;
    elements = empty ? 0 : elements;
    if (__builtin_mul_overflow(elements, (int64_t)dm_dtype_size(layout->dtype),
                               &total)) {
        return false;
    }
    *count = (size_t)elements;
    *bytes = (size_t)total;
    return true;
}

/* Dims of size 1 have no stride worth the name; an array without elements has none. */
static bool
is_contiguous(const py_layout *layout, size_t count)
{
    if (layout->strides == NULL || count == 0) {
        return true;
    }
    int64_t expected = (int64_t)dm_dtype_size(layout->dtype) / layout->stride_unit;
    for (int64_t i = layout->ndim - 1; i >= 0; i--) {
        if (layout->shape[i] != 1 && layout->strides[i] != expected) {
            return false;
        }
        expected *= layout->shape[i]; /* within the array's size: no overflow */
    }
    return true;
}

int
py_array_accept(const py_export *e, const py_layout *layout, py_array *array)
{
    if (layout->ndim < 0 || layout->ndim > PY_ARRAY_MAX_NDIM ||
        (layout->ndim > 0 && layout->shape == NULL)) {
        PyErr_Format(PyExc_ValueError,
                     "%s has %lld dims%s, which no array has (0..%d are possible)",
                     e->name, (long long)layout->ndim,
                     layout->shape == NULL ? " without sizes" : "", PY_ARRAY_MAX_NDIM);
        return -1;
    }
    size_t count = 0;
    size_t bytes = 0;
    if (!measure(layout, &count, &bytes)) {
        return raise_bad_shape(e, layout);
    }
    if (layout->readonly && (e->flags & PY_ARRAY_WRITABLE) != 0) {
        return py_array_raise_readonly(e);
    }
    if (!is_contiguous(layout, count)) {
        return raise_not_contiguous(e, layout);
    }
    if (layout->data == NULL && count != 0) {
        PyErr_Format(PyExc_ValueError,
                     "%s has %zu elements but no memory: its data pointer is null",
                     e->name, count);
        return -1;
    }
    array->dtype = layout->dtype;
    array->data = layout->data;
    array->count = count;
    array->bytes = bytes;
    return 0;
}

/* --- helpers ------------------------------------------------------------------------ */

int
py_array_get(PyObject *object, PyObject *name, PyObject **value)
{
    *value = PyObject_GetAttr(object, name);
    if (*value != NULL) {
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

int
py_array_dtype_by_name(const py_export *e, dm_dtype *dtype)
{
    PyObject *descr = NULL;
    PyObject *name = NULL;
    int result = py_array_get(e->object, e->state->name_dtype, &descr);
    if (result > 0) {
        result = py_array_get(descr, e->state->name_name, &name);
    }
    if (result > 0) {
        const char *text = PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : "";
        result = text == NULL ? -1 : dm_dtype_parse(text, dtype);
    }
    Py_XDECREF(name);
    Py_XDECREF(descr);
    return result;
}

/* --- export and release ---------------------------------------------------------------- */

int
py_array_export(py_state *state, PyObject *object, const char *name, int flags,
                py_array *array)
{
    py_export e = {state, object, name, flags};
    array->holder = PY_ARRAY_NONE;
    int result = py_array_export_buffer(&e, array);
    if (result == 0) {
        result = py_array_export_exchange(&e, array);
    }
    if (result == 0) {
        result = py_array_export_dlpack(&e, array);
    }
    if (result == 0) {
        result = py_array_export_interface(&e, array);
    }
    if (result == 0) {
        result = raise_no_array(&e);
    }
    return result > 0 ? 0 : -1;
}

static void
release(py_array *array, py_array_holder holder)
{
    switch (holder) {
    case PY_ARRAY_NONE:
        break;
    case PY_ARRAY_BUFFER:
        PyBuffer_Release(&array->hold.view);
        break;
    case PY_ARRAY_OBJECT:
        Py_DECREF(array->hold.object);
        break;
    case PY_ARRAY_MANAGED:
    case PY_ARRAY_VERSIONED:
        py_array_free_managed(holder, array->hold.managed);
        break;
    }
}

void
py_array_release(py_array *array)
{
    py_array_holder holder = array->holder;
    if (holder == PY_ARRAY_NONE) {
        return;
    }
    array->holder = PY_ARRAY_NONE; /* first: the exporter's code may come back here */
    if (PyErr_Occurred() == NULL) {
        release(array, holder);
        return;
    }
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    release(array, holder);
    PyErr_Restore(type, value, traceback);
}

/* --- overlap ------------------------------------------------------------------------- */

bool
py_array_overlaps(const py_array *a, const py_array *b)
{
    uintptr_t x = (uintptr_t)a->data;
    uintptr_t y = (uintptr_t)b->data;
    return a->bytes != 0 && b->bytes != 0 && x < y + b->bytes && y < x + a->bytes;
}

int
py_array_check_apart(const py_array *a, const char *a_name, const py_array *b,
                     const char *b_name)
{
    if (py_array_overlaps(a, b)) {
        PyErr_Format(
            PyExc_ValueError,
            "%s and %s must not overlap: %s is %zu bytes at %p, %s is %zu bytes "
            "at %p",
            a_name, b_name, a_name, a->bytes, a->data, b_name, b->bytes, b->data);
        return -1;
    }
    return 0;
}

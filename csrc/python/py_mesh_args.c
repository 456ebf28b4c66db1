/* Arguments of meshes: device types and names. */
#include "python/py_mesh.h"

PyObject *
py_mesh_get_optional(PyObject *obj, PyObject *name)
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
    PyObject *type = py_mesh_get_optional(value, state->name_type);
    if (type == NULL || !PyUnicode_Check(type)) {
        Py_XDECREF(type);
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError,
                         "device_type must be a str such as 'cpu' or 'cuda', got %R",
                         value);
        }
        return NULL;
    }
    PyObject *index = py_mesh_get_optional(value, state->name_index);
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

/* Each entry an exact str, and there once. Literals are interned already; names made at
 * run time stay as they are, since interning would keep them for ever. */
static int
check_names(PyObject *names)
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
        Py_DECREF(name);
        PyTuple_SET_ITEM(names, i, exact);
        for (Py_ssize_t j = 0; j < i; j++) {
            if (PyUnicode_Compare(PyTuple_GET_ITEM(names, j), exact) == 0) {
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
    if (check_names(tuple) < 0) {
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

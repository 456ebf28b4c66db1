/* Keys and values of stores as arguments: see py_store_args.h. */
#include "python/py_store_args.h"

#include <string.h>

const char *
py_store_key(PyObject *object, const char *name)
{
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be a str, got %R", name, object);
        return NULL;
    }
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text != NULL && strlen(text) != (size_t)size) {
        PyErr_Format(PyExc_ValueError, "%s must not contain a NUL, got %R", name,
                     object);
        return NULL;
    }
    return text;
}

int
py_store_keys_init(py_store_keys *keys, PyObject *object, const char *name)
{
    if (PyUnicode_Check(object) || PyBytes_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be a sequence of str, got %R", name,
                     object);
        return -1;
    }
    PyObject *tuple = PySequence_Tuple(object);
    if (tuple == NULL) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "%s must be a sequence of str, got %R", name,
                         object);
        }
        return -1;
    }
    size_t n = (size_t)PyTuple_GET_SIZE(tuple);
    const char **texts = PyMem_New(const char *, n);
    if (texts == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    for (size_t i = 0; i < n; i++) {
        texts[i] = py_store_key(PyTuple_GET_ITEM(tuple, (Py_ssize_t)i), name);
        if (texts[i] == NULL) {
            goto fail;
        }
    }
    *keys = (py_store_keys){tuple, texts, n};
    return 0;

fail:
    PyMem_Free(texts);
    Py_DECREF(tuple);
    return -1;
}

void
py_store_keys_fini(py_store_keys *keys)
{
    PyMem_Free(keys->texts);
    Py_CLEAR(keys->tuple);
}

int
py_store_value_init(py_store_value *value, PyObject *object, const char *name)
{
    memset(value, 0, sizeof(*value));
    if (PyUnicode_Check(object)) {
        Py_ssize_t size;
        value->data = PyUnicode_AsUTF8AndSize(object, &size);
        value->size = value->data != NULL ? (size_t)size : 0;
        return value->data != NULL ? 0 : -1;
    }
    if (!PyObject_CheckBuffer(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be str or bytes, got %R", name, object);
        return -1;
    }
    if (PyObject_GetBuffer(object, &value->buffer, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    value->data = value->buffer.buf;
    value->size = (size_t)value->buffer.len;
    return 0;
}

void
py_store_value_fini(py_store_value *value)
{
    if (value->buffer.obj != NULL) {
        PyBuffer_Release(&value->buffer);
    }
}

PyObject *
py_store_take_bytes(dm_bytes *value)
{
    PyObject *bytes = PyBytes_FromStringAndSize(value->data, (Py_ssize_t)value->size);
    dm_bytes_free(value);
    return bytes;
}

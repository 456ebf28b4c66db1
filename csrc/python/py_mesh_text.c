/* A mesh as text: repr, and what ranks are told that it asks for. */
#include "python/py_mesh.h"

#include <stdlib.h>
#include <string.h>

/* --- repr ----------------------------------------------------------------------- */

/* ", ".join(...) in parentheses, from "dp=2" and the like. */
static PyObject *
named_shape(py_mesh *self)
{
    PyObject *parts = PyList_New(0);
    PyObject *comma = PyUnicode_FromString(", ");
    PyObject *joined = NULL, *text = NULL;
    if (parts == NULL || comma == NULL) {
        goto done;
    }
    for (int d = 0; d < self->ndim; d++) {
        PyObject *part = PyUnicode_FromFormat("%U=%S", PyTuple_GET_ITEM(self->names, d),
                                              PyTuple_GET_ITEM(self->shape, d));
        if (part == NULL || PyList_Append(parts, part) < 0) {
            Py_XDECREF(part);
            goto done;
        }
        Py_DECREF(part);
    }
    joined = PyUnicode_Join(comma, parts);
    if (joined != NULL) {
        text = PyUnicode_FromFormat("(%U)", joined);
    }

done:
    Py_XDECREF(parts);
    Py_XDECREF(comma);
    Py_XDECREF(joined);
    return text;
}

/* Per dim its stride, or a tuple of strides where it has not exactly one factor. */
static PyObject *
strides_of(py_mesh *self)
{
    PyObject *strides = PyTuple_New(self->ndim);
    for (int d = 0; d < self->ndim && strides != NULL; d++) {
        const dm_factor *factors = NULL;
        int count = dm_layout_factors(self->layout, d, &factors);
        PyObject *stride =
            count == 1 ? PyLong_FromLongLong(factors[0].stride) : PyTuple_New(count);
        for (int i = 0; i < count && count != 1 && stride != NULL; i++) {
            PyObject *number = PyLong_FromLongLong(factors[i].stride);
            if (number == NULL) {
                Py_CLEAR(stride);
                break;
            }
            PyTuple_SET_ITEM(stride, i, number);
        }
        if (stride == NULL) {
            Py_CLEAR(strides);
            break;
        }
        PyTuple_SET_ITEM(strides, d, stride);
    }
    return strides;
}

/* "" or ", Mesh: [[0, 1], [2, 3]]" under TORCH_DISTRIBUTED_DEBUG=DETAIL. */
static PyObject *
detail_text(py_mesh *self)
{
    const char *debug = getenv("TORCH_DISTRIBUTED_DEBUG");
    if (debug == NULL || strcmp(debug, "DETAIL") != 0) {
        return PyUnicode_FromString("");
    }
    PyObject *ranks = py_mesh_rank_lists(self);
    if (ranks == NULL) {
        PyErr_Clear();
        return PyUnicode_FromString("");
    }
    PyObject *text = PyUnicode_FromFormat(", Mesh: %R", ranks);
    Py_DECREF(ranks);
    return text;
}

PyObject *
py_mesh_repr(PyObject *op)
{
    py_mesh *self = (py_mesh *)op;
    if (self->native == NULL) {
        return PyUnicode_FromString("<DeviceMesh without __init__>");
    }
    PyObject *text = NULL;
    PyObject *strides = strides_of(self);
    PyObject *detail = detail_text(self);
    PyObject *shape =
        self->names != NULL ? named_shape(self) : PyObject_Repr(self->shape);
    if (strides != NULL && shape != NULL && detail != NULL) {
        text = PyUnicode_FromFormat("DeviceMesh(%U, '%U', stride=%R%U)", shape,
                                    self->device_type, strides, detail);
    }
    Py_XDECREF(strides);
    Py_XDECREF(detail);
    Py_XDECREF(shape);
    return text;
}

/* --- what it asks for, as people read it ---------------------------------------------- */

/* " over ranks [3, 1, 0, 2]", or "" for 0 to n-1. Long lists are cut; the hash tells
 * them apart. */
static PyObject *
ranks_text(const dm_ranks *ranks)
{
    enum { SHOWN = 16 };
    if (dm_ranks_is_identity(ranks)) {
        return PyUnicode_FromString("");
    }
    int64_t count = dm_ranks_size(ranks);
    int64_t shown = count < SHOWN ? count : SHOWN;
    PyObject *list = PyList_New(shown);
    for (int64_t i = 0; i < shown && list != NULL; i++) {
        PyObject *rank = PyLong_FromLong(dm_ranks_at(ranks, i));
        if (rank == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, rank);
    }
    if (list == NULL) {
        return NULL;
    }
    PyObject *text =
        count == shown ? PyUnicode_FromFormat(" over ranks %R", list)
                       : PyUnicode_FromFormat(" over %lld ranks %R... (hash %llx)",
                                              (long long)count, list,
                                              (unsigned long long)dm_ranks_hash(ranks));
    Py_DECREF(list);
    return text;
}

/* What a request shows of a spec's entry: a time-out in seconds, the rest as it is. */
static PyObject *
shown_entry(PyObject *entry)
{
    if (!PyLong_Check(entry)) {
        return Py_NewRef(entry);
    }
    long long ns = PyLong_AsLongLong(entry);
    return ns < 0 ? PyUnicode_FromString("never")
                  : PyFloat_FromDouble((double)ns / 1e9);
}

/* Appends ", <label> [..]" with entry `index` of each spec, unless all are None. Takes
 * over `text`. */
static PyObject *
append_specs(PyObject *text, py_mesh *self, int index, const char *label)
{
    PyObject *list = PyList_New(self->ndim);
    bool any = false;
    if (text == NULL || list == NULL) {
        goto error;
    }
    for (int d = 0; d < self->ndim; d++) {
        PyObject *entry = PyTuple_GET_ITEM(PyTuple_GET_ITEM(self->specs, d), index);
        PyObject *shown = shown_entry(entry);
        if (shown == NULL) {
            goto error;
        }
        any = any || entry != Py_None;
        PyList_SET_ITEM(list, d, shown);
    }
    if (any) {
        Py_SETREF(text, PyUnicode_FromFormat("%U, %s %R", text, label, list));
    }
    Py_DECREF(list);
    return text;

error:
    Py_XDECREF(text);
    Py_XDECREF(list);
    return NULL;
}

PyObject *
py_mesh_request(py_mesh *self)
{
    PyObject *ranks = ranks_text(self->native->ranks);
    if (ranks == NULL) {
        return NULL;
    }
    PyObject *text =
        self->names != NULL
            ? PyUnicode_FromFormat("%U mesh %R with names %R%U", self->device_type,
                                   self->shape, self->names, ranks)
            : PyUnicode_FromFormat("%U mesh %R%U", self->device_type, self->shape,
                                   ranks);
    Py_DECREF(ranks);
    text = append_specs(text, self, 0, "backends");
    return append_specs(text, self, 2, "time-outs in seconds");
}

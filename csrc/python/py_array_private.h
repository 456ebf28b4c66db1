/* What the files of py_array share. */
#ifndef PY_ARRAY_PRIVATE_H
#define PY_ARRAY_PRIVATE_H

#include "python/py_array.h"

/* More dims than anybody's arrays have. */
enum { PY_ARRAY_MAX_NDIM = 64 };

/* One export in the making. */
typedef struct py_export {
    py_state *state;
    PyObject *object; /* borrowed */
    const char *name; /* of the argument */
    int flags;
} py_export;

/* What an exporter says of its memory, before it is believed. */
typedef struct py_layout {
    void *data;
    dm_dtype dtype;
    bool readonly;
    int64_t ndim;
    const int64_t *shape;
    const int64_t *strides; /* NULL: C-contiguous */
    int64_t stride_unit;    /* bytes: 1 or the size of an element */
} py_layout;

/* Checks the layout and takes it over into *array, all but the holder. 0 or -1. */
int
py_array_accept(const py_export *e, const py_layout *layout, py_array *array);

/* --- protocols: 1 exported, 0 the object does not speak it, -1 an exception --------- */

int
py_array_export_buffer(const py_export *e, py_array *array);

int
py_array_export_exchange(const py_export *e, py_array *array);

int
py_array_export_dlpack(const py_export *e, py_array *array);

int
py_array_export_interface(const py_export *e, py_array *array);

/* Gives back what a holder of DLPack's (PY_ARRAY_MANAGED, PY_ARRAY_VERSIONED) holds. */
void
py_array_free_managed(py_array_holder holder, void *managed);

/* --- errors: each returns -1 ---------------------------------------------------------- */

/* "<name> has elements of type <object.dtype>, which cannot be sent"; the format where
 * there is no dtype. */
int
py_array_raise_dtype(const py_export *e, const char *format);

int
py_array_raise_readonly(const py_export *e);

/* `where` is "on cuda:0". */
int
py_array_raise_device(const py_export *e, const char *where);

/* --- helpers -------------------------------------------------------------------------- */

/* The attribute (1, new reference), or 0 where there is none, or -1. */
int
py_array_get(PyObject *object, PyObject *name, PyObject **value);

/* object.dtype.name as a dtype: 1, or 0 where it is no name that we know, or -1. */
int
py_array_dtype_by_name(const py_export *e, dm_dtype *dtype);

#endif

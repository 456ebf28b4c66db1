/* Arrays: what Python objects offer as memory for operations, without a copy.
 *
 * In the order in which an object is asked: the buffer protocol (numpy, array.array,
 * bytearray, mmap, ...), DLPack's C functions on its type (torch since 2.13), `__dlpack__`
 * (older torch, cupy, jax, ...), `__cuda_array_interface__`, `__array_interface__`.
 * An array is exported until it is released. Until then its memory lives even if nobody
 * else holds the object; exporters of the buffer protocol also refuse to resize it (torch
 * has no way to: resizing a storage that is in use is an error of the caller's). What
 * cannot be used (read-only, not contiguous, on another device, ...) is refused by the
 * export, with the argument's name and what was found.
 *
 * One file each: py_array_buffer.c, py_array_dlpack.c, py_array_interface.c.
 */
#ifndef PY_ARRAY_H
#define PY_ARRAY_H

#include <stdbool.h>

#include "base/dm_dtype.h"
#include "python/py_state.h"

/* Who holds the memory; a matter of py_array*.c alone. 0: nothing is exported. */
typedef enum py_array_holder {
    PY_ARRAY_NONE = 0,
    PY_ARRAY_BUFFER,    /* hold.view */
    PY_ARRAY_OBJECT,    /* hold.object */
    PY_ARRAY_MANAGED,   /* hold.managed, a py_dl_managed with a deleter */
    PY_ARRAY_VERSIONED, /* hold.managed, a py_dl_versioned with a deleter */
} py_array_holder;

/* An export; all zero while there is none. A Py_buffer may point into itself: never
 * copied or moved. */
typedef struct py_array {
    py_array_holder holder;
    dm_dtype dtype;
    void *data;
    size_t count; /* elements */
    size_t bytes;
    union {
        Py_buffer view;
        PyObject *object;
        void *managed;
    } hold;
} py_array;

enum {
    PY_ARRAY_WRITABLE = 1, /* refuse what is read-only */
    PY_ARRAY_ASYNC = 2,    /* for longer than the call that was given the object */
};

/* Exports `object` into *array. `name` is the argument's, for errors. TypeError: no array,
 * or elements that no backend knows; ValueError: not C-contiguous, not in the CPU's
 * memory, without memory, read-only where `flags` has PY_ARRAY_WRITABLE; and whatever the
 * object's own methods raise. Runs code of the object. Returns 0, or -1 with nothing
 * exported. */
int
py_array_export(py_state *state, PyObject *object, const char *name, int flags,
                py_array *array);

/* Nothing where nothing is exported. Runs code of the exporter; an exception that stands
 * meanwhile stays. */
void
py_array_release(py_array *array);

/* Whether they have a byte in common. */
bool
py_array_overlaps(const py_array *a, const py_array *b);

/* ValueError where they overlap; names are those of the arguments. 0 or -1. */
int
py_array_check_apart(const py_array *a, const char *a_name, const py_array *b,
                     const char *b_name);

#endif

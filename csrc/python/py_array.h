/* Arrays: what Python objects offer as memory for operations.
 *
 * An array is exported through the buffer protocol and stays exported until it is
 * released, so its memory can neither move nor go. The element type comes from the
 * buffer's format, or, where an extension type of numpy has none (bfloat16, float8 of
 * ml_dtypes), from the name of the object's dtype.
 */
#ifndef PY_ARRAY_H
#define PY_ARRAY_H

#include <stdbool.h>

#include "base/dm_dtype.h"
#include "python/py_state.h"

/* An export. A Py_buffer may point into itself: never copied or moved. */
typedef struct py_array {
    bool exported;
    Py_buffer view; /* view.buf is the memory */
    dm_dtype dtype;
    size_t count; /* elements */
} py_array;

/* Exports `object` into *array. `name` is the argument's, for errors: TypeError for
 * what is no array or has an element type that no backend knows, ValueError for one
 * that is not C-contiguous, or read-only where `writable`. Returns 0, or -1 with nothing
 * exported. */
int
py_array_export(py_state *state, PyObject *object, const char *name, bool writable,
                py_array *array);

/* Nothing where nothing is exported. Runs code of the exporter. */
void
py_array_release(py_array *array);

#endif

/* Keys and values of stores as arguments. */
#ifndef PY_STORE_ARGS_H
#define PY_STORE_ARGS_H

#include "python/py_state.h"
#include "store/dm_store.h"

/* The text of a key, borrowed from `object`, a str without NUL. NULL with TypeError or
 * ValueError naming the argument. */
const char *
py_store_key(PyObject *object, const char *name);

/* A list of keys. `tuple` keeps them alive whatever happens to the list. */
typedef struct py_store_keys {
    PyObject *tuple;
    const char **texts;
    size_t n;
} py_store_keys;

/* Any iterable of str but a str itself. Returns 0 or -1; fini in the first case. */
int
py_store_keys_init(py_store_keys *keys, PyObject *object, const char *name);

void
py_store_keys_fini(py_store_keys *keys);

/* A value: the UTF-8 bytes of a str, or what a bytes-like object exports. `object` must
 * outlive it. */
typedef struct py_store_value {
    const void *data;
    size_t size;
    Py_buffer buffer; /* buffer.obj is NULL for a str */
} py_store_value;

/* Returns 0 or -1 with TypeError; fini in the first case. */
int
py_store_value_init(py_store_value *value, PyObject *object, const char *name);

void
py_store_value_fini(py_store_value *value);

/* New bytes with the content; frees `value` in any case. */
PyObject *
py_store_take_bytes(dm_bytes *value);

#endif

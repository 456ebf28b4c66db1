/* Python objects as stores, and the types that hold stores, among the store files. */
#ifndef PY_STORE_OBJECT_H
#define PY_STORE_OBJECT_H

#include "python/py_state.h"
#include "store/dm_store.h"

/* What Store and its subtypes are: a native handle. A Store subclass made in Python
 * has none. */
typedef struct py_store {
    PyObject_HEAD
    dm_store *store;         /* NULL: none, or finalized */
    dm_store_server *server; /* of a TCPStore that serves; else NULL */
    int64_t timeout_ns;      /* of every call; negative: none */
    PyObject *weak_references;
} py_store;

/* 300 s, torch's default. */
#define PY_STORE_TIMEOUT_NS (300 * DM_NS_PER_S)

/* An object of `type` that takes over `store` and `server` (NULL is fine), also on
 * failure. */
PyObject *
py_store_make(PyTypeObject *type, dm_store *store, dm_store_server *server,
              int64_t timeout_ns);

/* A dm_store of kind "python" that calls the object's methods, with the GIL. NULL with
 * TypeError naming `name` when it lacks one of set, get, add and wait. */
dm_store *
py_store_adapter_new(py_state *state, PyObject *object, const char *name);

/* The object behind a store of kind "python", borrowed; else NULL. */
PyObject *
py_store_adapter_object(dm_store *store);

/* The token to use: `given` (a str, "" for none) or, when that is None, the
 * environment's DEVICEMESH_STORE_TOKEN. *token is NULL for none, borrowed. Returns 0 or
 * -1. */
int
py_store_token(PyObject *given, const char **token);

/* Makes the types in their files. */
int
py_store_types_register(PyObject *module);
int
py_store_server_register(PyObject *module);

#endif

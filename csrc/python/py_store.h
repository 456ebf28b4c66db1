/* Store types for Python, and Python objects as stores. */
#ifndef PY_STORE_H
#define PY_STORE_H

#include "python/py_state.h"
#include "store/dm_store.h"

/* The dm_store behind `object`: one of our Store types, or any object with torch's
 * Store methods (set, get, add, wait, ...), which is wrapped. New reference (release
 * with dm_store_release). NULL with TypeError naming `name` otherwise. */
dm_store *
py_store_from_object(py_state *state, PyObject *object, const char *name);

/* The Python object for a store (World.store): where the store was made from a Python
 * object that still lives, that object; else a new one of the type that fits, which
 * holds `store`. New reference. */
PyObject *
py_store_wrap(py_state *state, dm_store *store);

#endif

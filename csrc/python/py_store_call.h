/* One call of a Store's method, and the methods: what the files of Store share.
 *
 * A call runs without the GIL and looks at signals while it waits. The arguments are kept
 * alive by the caller or by what was made from them (py_store_args.h).
 */
#ifndef PY_STORE_CALL_H
#define PY_STORE_CALL_H

#include "python/py_state.h"
#include "python/py_wait.h"
#include "store/dm_store.h"

typedef struct py_store_call {
    py_state *state;
    dm_store *store;
    py_waiter waiter;
    dm_error err;
} py_store_call;

/* Fills the call; -1 with an exception where there is no store. */
int
py_store_call_init(py_store_call *call, PyObject *op);

/* Gives the GIL away; the deadline is `timeout_ns` from now. */
const dm_wait *
py_store_call_start(py_store_call *call, int64_t timeout_ns);

/* Takes the GIL back. 0, or -1 with the exception that belongs to the status. */
int
py_store_call_stop(py_store_call *call, dm_status status);

/* How long the store's calls wait. */
int64_t
py_store_timeout_of(PyObject *op);

/* The argument `timeout`, where None (or NULL) means the store's. */
int
py_store_parse_timeout(PyObject *op, PyObject *object, int64_t *timeout_ns);

/* X(name) - FASTCALL methods, in py_store_values.c and py_store_keys.c */
#define PY_STORE_METHODS(X)                                                            \
    X(set)                                                                             \
    X(append)                                                                          \
    X(queue_push)                                                                      \
    X(will)                                                                            \
    X(get)                                                                             \
    X(add)                                                                             \
    X(compare_set)                                                                     \
    X(delete_key)                                                                      \
    X(queue_pop)                                                                       \
    X(queue_len)                                                                       \
    X(check)                                                                           \
    X(wait)                                                                            \
    X(wait_unless)                                                                     \
    X(multi_get)                                                                       \
    X(multi_set)                                                                       \
    X(barrier)

#define X(name)                                                                        \
    PyObject *py_store_##name(PyObject *op, PyObject *const *args, Py_ssize_t nargs,   \
                              PyObject *kwnames);                                      \
    extern const char py_store_##name##_doc[];
PY_STORE_METHODS(X)
#undef X

PyObject *
py_store_num_keys(PyObject *op, PyObject *args);
extern const char py_store_num_keys_doc[];

PyObject *
py_store_list_keys(PyObject *op, PyObject *args);
extern const char py_store_list_keys_doc[];

#endif

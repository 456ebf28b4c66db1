/* What the files of the ProcessGroup type share: py_group.c (the type and its facts),
 * py_group_call.c (what all operations have in common), py_group_ops.c (operations on one
 * or two arrays), py_group_lists.c (operations on lists of arrays), py_group_messages.c
 * (send and recv), py_group_batch.c (operations that are given together),
 * py_group_objects.c (what is written in Python), py_group_monitored.c.
 */
#ifndef PY_GROUP_PRIVATE_H
#define PY_GROUP_PRIVATE_H

#include "python/py_array.h"
#include "python/py_group.h"
#include "python/py_work.h"

/* A native handle, and operations that are collected (py_group_batch.c). */
typedef struct py_group {
    PyObject_HEAD
    dm_group *group; /* NULL once finalized */
    PyObject *weak_references;
    unsigned long batch_thread; /* who collects; 0: nobody */
    py_pending *batch;
    py_pending **batch_tail;
} py_group;

/* What an operation's function is called with. */
#define PY_OPERATION_ARGS                                                              \
    PyObject *op, PyTypeObject *defining_class, PyObject *const *args,                 \
        Py_ssize_t nargs, PyObject *kwnames

/* X(method) - the operations: a function py_group_<method> and its docstring,
 * py_group_<method>_doc, each. */
#define PY_GROUP_OPERATIONS(X)                                                         \
    X(all_reduce)                                                                      \
    X(broadcast)                                                                       \
    X(reduce)                                                                          \
    X(all_gather)                                                                      \
    X(all_gather_into_tensor)                                                          \
    X(gather)                                                                          \
    X(scatter)                                                                         \
    X(reduce_scatter)                                                                  \
    X(reduce_scatter_tensor)                                                           \
    X(all_to_all)                                                                      \
    X(all_to_all_single)                                                               \
    X(send)                                                                            \
    X(recv)                                                                            \
    X(isend)                                                                           \
    X(irecv)                                                                           \
    X(barrier)

#define X(method)                                                                      \
    PyObject *py_group_##method(PY_OPERATION_ARGS);                                    \
    extern const char py_group_##method##_doc[];
PY_GROUP_OPERATIONS(X)
#undef X

/* X(method) - written in Python: devicemesh.<module>.<function> is called with the group in
 * front of the arguments. */
#define PY_GROUP_FORWARDS(X)                                                           \
    X(all_gather_object)                                                               \
    X(broadcast_object_list)                                                           \
    X(gather_object)                                                                   \
    X(scatter_object_list)                                                             \
    X(send_object_list)                                                                \
    X(recv_object_list)                                                                \
    X(batch_isend_irecv)                                                               \
    X(coalesce)

#define X(method)                                                                      \
    PyObject *py_group_##method(PyObject *op, PyObject *const *args, Py_ssize_t nargs, \
                                PyObject *kwnames);                                    \
    extern const char py_group_##method##_doc[];
PY_GROUP_FORWARDS(X)
#undef X

PyObject *
py_group_monitored_barrier(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames);
extern const char py_group_monitored_barrier_doc[];

/* Collecting operations, for `coalesce`: methods without arguments. */
PyObject *
py_group_begin_batch(PyObject *op, PyObject *none);

PyObject *
py_group_end_batch(PyObject *op, PyObject *none);

PyObject *
py_group_drop_batch(PyObject *op, PyObject *none);

/* Whether this thread's operations on the group are being collected. */
static inline bool
py_group_collects(const py_group *self)
{
    return self->batch_thread != 0 && self->batch_thread == PyThread_get_thread_ident();
}

/* Before the operation: fills the memory that lists go through. */
void
py_hold_load(const py_hold *hold, const dm_group *group);

/* A dm_order's `done` with a py_pending: outputs of lists get what is theirs. */
void
py_pending_store(void *pending, dm_status status);

/* One call: what its function has put together. Synchronous calls hold their arrays on
 * the stack, asynchronous ones in `pending`. begin, exports and checks, then perform; an
 * error in between ends with cancel. */
typedef struct py_call {
    py_state *state;
    py_group *self;
    dm_group *group;
    dm_op op;
    py_hold own;
    py_hold *hold;    /* `own` or that of `pending` */
    py_array *arrays; /* of the hold */
    py_pending *pending;
} py_call;

/* 0, or -1 with an exception and nothing to clean up. */
int
py_call_begin(py_call *c, PyObject *op, PyTypeObject *defining_class, dm_op_kind kind,
              PyObject *async_op);

/* Room for more than two arrays: 0 or -1. */
int
py_call_reserve(py_call *c, int count);

/* Exports the arrays of a list, one for each member, into arrays `first`...: 0 or -1. */
int
py_call_export_list(py_call *c, int first, PyObject *list, const char *name,
                    bool writable, py_pieces *pieces);

/* Exports array `i` of the call: 0 or -1. `name` is the argument's. */
int
py_call_export(py_call *c, int i, PyObject *object, const char *name, bool writable);

/* What the core checks of the op before it is performed, for calls that must know earlier
 * that it is sound (a root that is in the group): 0 or -1. */
int
py_call_check(const py_call *c);

/* Cleans up after an error that has been raised. Returns NULL. */
PyObject *
py_call_cancel(py_call *c);

/* Runs the operation. None, a Work, or NULL with an exception; the call is over. */
PyObject *
py_call_perform(py_call *c);

/* --- arguments: each 0, or -1 with an exception that names the argument ---------------- */

/* The reduce op and its factor of dm_op; `object` is NULL for the default. */
int
py_call_parse_reduce(py_state *state, PyObject *object, dm_op *op);

/* A group rank; the core checks its range. */
int
py_call_parse_rank(PyObject *object, const char *name, int32_t *rank);

/* A group rank or None, which is any rank (and which no number may be). */
int
py_call_parse_source(PyObject *object, int32_t *rank);

/* NULL is tag 0. */
int
py_call_parse_tag(PyObject *object, uint32_t *tag);

#endif

/* Module state of devicemesh._core: its types, exceptions and interned names.
 *
 * The members are listed once, in the macros below; traverse, clear and free
 * are made from the lists. A pointer to the state may be used in methods and
 * tp_finalize, never in tp_dealloc or tp_clear: it can be gone by then.
 */
#ifndef PY_STATE_H
#define PY_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* X(member) - heap types */
#define PY_STATE_TYPES(X)                                                              \
    X(world_type)                                                                      \
    X(group_type)                                                                      \
    X(work_type)                                                                       \
    X(store_type)                                                                      \
    X(tcp_store_type)                                                                  \
    X(file_store_type)                                                                 \
    X(hash_store_type)                                                                 \
    X(prefix_store_type)                                                               \
    X(store_server_type)                                                               \
    X(mesh_root_type)                                                                  \
    X(mesh_type)

/* X(member, Python name, base expression, doc) - exceptions; the base may use
 * members that stand above it */
#define PY_STATE_ERRORS(X)                                                             \
    X(error, "DeviceMeshError", PyExc_RuntimeError,                                    \
      "Base class of devicemesh's own errors.")                                        \
    X(closed_error, "ClosedError", state->error,                                       \
      "The object was closed, aborted, or belongs to the parent of a fork.")           \
    X(mismatch_error, "MismatchError", state->error,                                   \
      "Ranks asked for different things; the text shows both sides.")                  \
    X(peer_error, "PeerError", state->error,                                           \
      "Another rank died or closed its connection; the text names it.")                \
    X(connection_error, "StoreError", state->error,                                    \
      "The store or a connection failed; the text names host and port.")               \
    X(queue_empty_error, "QueueEmptyError", state->connection_error,                   \
      "A queue of a store is empty, and waiting was not asked for.")                   \
    X(library_error, "LibraryError", state->error,                                     \
      "A library (gloo, NCCL, ...) is missing; the text says what to install.")

/* X(member, text) - interned strings used on hot paths */
#define PY_STATE_NAMES(X)                                                              \
    X(name_array_interface, "__array_interface__")                                     \
    X(name_backend, "backend")                                                         \
    X(name_cuda_array_interface, "__cuda_array_interface__")                           \
    X(name_detach, "detach")                                                           \
    X(name_dlpack, "__dlpack__")                                                       \
    X(name_dlpack_device, "__dlpack_device__")                                         \
    X(name_dlpack_exchange, "__dlpack_c_exchange_api__")                               \
    X(name_dtype, "dtype")                                                             \
    X(name_factor, "factor")                                                           \
    X(name_index, "index")                                                             \
    X(name_is_conj, "is_conj")                                                         \
    X(name_is_neg, "is_neg")                                                           \
    X(name_max_version, "max_version")                                                 \
    X(name_mesh_dim, "mesh_dim")                                                       \
    X(name_name, "name")                                                               \
    X(name_numpy, "numpy")                                                             \
    X(name_requires_grad, "requires_grad")                                             \
    X(name_private_timeout, "_timeout")                                                \
    X(name_timeout, "timeout")                                                         \
    X(name_tolist, "tolist")                                                           \
    X(name_type, "type")

/* Links of a list: see py_work.h. */
typedef struct py_pending_link {
    struct py_pending_link *previous;
    struct py_pending_link *next;
} py_pending_link;

typedef struct py_state {
#define X(member) PyTypeObject *member;
    PY_STATE_TYPES(X)
#undef X
#define X(member, name, base, doc) PyObject *member;
    PY_STATE_ERRORS(X)
#undef X
    /* DeviceMeshError and TimeoutError: both, so that either catches it. */
    PyObject *timeout_error;
#define X(member, text) PyObject *member;
    PY_STATE_NAMES(X)
#undef X
    /* The default world of this process (a World) or NULL. */
    PyObject *default_world;
    /* Rings of asynchronous operations (py_work.h), guarded by the GIL: those that have
     * a Work, and those whose Work was dropped before they ended. */
    py_pending_link works;
    py_pending_link dropped_works;
    struct py_notices *notices; /* py_notices.h */
    /* Token -> weak reference to a _MeshRoot that was pickled here; NULL until then. */
    PyObject *pickled_roots;
    /* Request -> _MeshRoot made with reuse_groups=True; NULL until there is one. */
    PyObject *reused_roots;
} py_state;

extern struct PyModuleDef py_core_module;

/* The state of the module `m`. */
static inline py_state *
py_state_of_module(PyObject *m)
{
    return (py_state *)PyModule_GetState(m);
}

/* The state behind a type of ours or a subclass of one. NULL with TypeError
 * otherwise. Not for tp_dealloc and tp_clear. */
static inline py_state *
py_state_of_type(PyTypeObject *type)
{
    PyObject *m = PyType_GetModuleByDef(type, &py_core_module);
    return m == NULL ? NULL : py_state_of_module(m);
}

/* Makes the exceptions and interned names; adds the exceptions to the module. */
int
py_state_init(PyObject *module);

int
py_state_traverse(PyObject *module, visitproc visit, void *arg);

int
py_state_clear(PyObject *module);

/* Makes the heap type of `spec`, stores it in *slot and adds it to the module. */
int
py_state_add_type(PyObject *module, PyType_Spec *spec, PyObject *bases,
                  PyTypeObject **slot);

/* One for each file that has types or functions; each returns 0 or -1. */
int
py_store_register(PyObject *module);
int
py_world_register(PyObject *module);
int
py_group_register(PyObject *module);
int
py_work_register(PyObject *module);
int
py_mesh_register(PyObject *module);

#endif

/* DeviceMesh: what its files share. Nothing outside csrc/python/py_mesh*.c needs
 * this header.
 *
 * Two types. `_MeshRoot` is the native half of a root mesh: rank map, world, groups.
 * It owns no Python object. `DeviceMesh` owns Python references and plain memory (a
 * layout); every mesh is a view of one root mesh, which holds its views so that a
 * slice is always the same object (cycles that the garbage collector sees).
 *
 * A mesh is immutable once made: what is filled in later (groups, slices, hash) is
 * derived and the same whenever it is computed. All fields are guarded by the GIL.
 */
#ifndef PY_MESH_H
#define PY_MESH_H

#include <stdbool.h>
#include <stdint.h>

#include "group/dm_group_cache.h"
#include "layout/dm_layout.h"
#include "python/py_state.h"

enum { PY_MESH_MAX_NDIM = 64 };

/* --- _MeshRoot (py_mesh_root.c) ------------------------------------------------- */

typedef struct py_mesh_root {
    PyObject_HEAD
    PyObject *weakrefs;
    dm_ranks *ranks;
    dm_world *world;       /* NULL: none, or not attached yet (after unpickling) */
    dm_group_cache *cache; /* NULL until the members have agreed */
    dm_group **given;      /* groups that came ready-made (from_group) */
    int given_count;
    int32_t rank;   /* this process */
    int64_t offset; /* of `rank` in `ranks`; -1: not a member */
    int sharers;    /* root meshes that use these groups and were not closed */
    bool attach;    /* may take the default world when groups are asked for */
    bool opening;   /* one thread is in py_mesh_root_open with the GIL released */
    char token[64]; /* names this object in pickles of this process; "" until asked */
} py_mesh_root;

/* Holds `world` (may be NULL) and takes over `ranks`, also on failure. */
py_mesh_root *
py_mesh_root_new(py_state *state, dm_world *world, dm_ranks *ranks, int32_t rank);

/* The largest of its ranks. O(1) for the identity. */
int32_t
py_mesh_root_largest(const py_mesh_root *root);

/* Makes sure that groups can be made: the members agree on `request` (once). Waits
 * for the store, GIL released; this rank must be a member. Returns 0 or -1. */
int
py_mesh_root_open(py_state *state, py_mesh_root *root, PyObject *request);

/* For a rank outside: shows the members what it asked for. Waits for the store, GIL
 * released. Returns 0 or -1. */
int
py_mesh_root_note(py_state *state, py_mesh_root *root, PyObject *request);

/* For a rank outside: what the members last asked for where that is not `request`, as
 * the end of a sentence ("; rank 0 last asked for ...") or "". Waits a second at most,
 * GIL released. NULL with an exception where a signal handler raised. */
PyObject *
py_mesh_root_asked(py_mesh_root *root, PyObject *request);

/* Adds a ready-made group. Returns 0 or -1. */
int
py_mesh_root_give(py_mesh_root *root, dm_group *group);

/* The group of `spec`: ready-made, known or new; a new reference, or NULL with an
 * exception. The root is open, or has the group ready-made. */
dm_group *
py_mesh_root_group(py_state *state, py_mesh_root *root, const dm_group_spec *spec,
                   const char *options);

/* Whether a ready-made group has exactly these members. */
bool
py_mesh_root_is_given(const py_mesh_root *root, const int32_t *ranks, int32_t size);

/* Closes (or aborts) every group that was made here. */
void
py_mesh_root_close(py_mesh_root *root, bool abort);

/* A text that finds this object again in this process; borrowed, NULL on error. */
const char *
py_mesh_root_token(py_state *state, py_mesh_root *root);

/* The living root of that token (new reference), or NULL without an exception. */
py_mesh_root *
py_mesh_root_find(py_state *state, PyObject *token);

extern PyType_Spec py_mesh_root_spec;

/* --- DeviceMesh ----------------------------------------------------------------- */

typedef struct py_mesh {
    PyObject_HEAD
    PyObject *dict;
    PyObject *weakrefs;
    py_mesh_root *native;   /* NULL until __init__ has run */
    struct py_mesh *root;   /* NULL in a root */
    struct py_mesh *source; /* the root that has the groups of a selection, itself a
                               root; NULL elsewhere */
    dm_layout *layout;
    PyObject *device_type;
    PyObject *names;      /* tuple of str, or NULL */
    PyObject *specs;      /* per dim: see py_mesh_specs_parse */
    PyObject *shape;      /* tuple of int */
    PyObject *coordinate; /* tuple of int, or None */
    PyObject **groups;    /* per dim: ProcessGroup, or NULL until asked for */
    PyObject *slices;     /* name or tuple of names -> mesh; NULL until asked for */
    PyObject *flattened;  /* root: name -> mesh; NULL until there is one */
    PyObject *views;      /* root: facts -> mesh; NULL until there is one */
    int64_t numel;
    Py_hash_t hash; /* -1 until asked for */
    int ndim;
    bool has_groups; /* false: made without a backend */
    bool closed;     /* root */
    bool joined;     /* root: counted in native->sharers */
} py_mesh;

static inline py_mesh *
py_mesh_root_of(py_mesh *self)
{
    return self->root != NULL ? self->root : self;
}

/* The root that has the groups. */
static inline py_mesh *
py_mesh_source_of(py_mesh *self)
{
    py_mesh *root = py_mesh_root_of(self);
    return root->source != NULL ? root->source : root;
}

/* --- making meshes (py_mesh.c) */

/* Fills an empty mesh: all or nothing. Takes over `layout`, also on failure; `root`
 * NULL makes a root; `names` may be NULL. Returns 0 or -1. */
int
py_mesh_fill(py_mesh *self, py_mesh_root *native, py_mesh *root, dm_layout *layout,
             PyObject *device_type, PyObject *names, PyObject *specs, bool has_groups);

/* A new mesh of `type`, filled. */
PyObject *
py_mesh_make(PyTypeObject *type, py_mesh_root *native, py_mesh *root, dm_layout *layout,
             PyObject *device_type, PyObject *names, PyObject *specs, bool has_groups);

/* Back to what tp_alloc made. */
void
py_mesh_unfill(py_mesh *self);

/* __init__ (py_mesh_init.c) and __repr__ (py_mesh_text.c). */
int
py_mesh_init(PyObject *op, PyObject *args, PyObject *kwargs);
PyObject *
py_mesh_repr(PyObject *op);

/* The mesh as people ask for it: "cpu mesh (2, 4) with names ('dp', 'tp')". */
PyObject *
py_mesh_request(py_mesh *self);

/* Its ranks as nested lists; NULL with RuntimeError on a rank that sees several
 * siblings of a slice and is in none of them. */
PyObject *
py_mesh_rank_lists(py_mesh *self);

/* The offset of the first element of the line (or slice) that this rank is in: 0 for
 * a mesh that covers its root. -1 with RuntimeError. */
int64_t
py_mesh_base(py_mesh *self);

/* --- dims by name or index (py_mesh_facts.c) */

/* Finds the dim that `arg` (name or index) stands for: *mesh is self, or the
 * flattened mesh of that name (borrowed). Returns 0, or -1 with KeyError, IndexError
 * or TypeError. */
int
py_mesh_find_dim(py_mesh *self, PyObject *arg, py_mesh **mesh, int *dim);

/* The index of a name among the mesh's own, or -1 without an exception. */
int
py_mesh_own_dim(py_mesh *self, PyObject *name);

/* RuntimeError: this rank is not in the mesh. */
void
py_mesh_raise_outside(py_mesh *self);

/* The optional single argument `mesh_dim` of a FASTCALL method (borrowed; NULL when
 * absent or None). Returns 0 or -1 with TypeError. */
int
py_mesh_dim_arg(const char *method, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames, PyObject **arg);

/* RuntimeError where a subclass has not called __init__. Returns 0 or -1. */
int
py_mesh_check(const py_mesh *self);

/* `rank in mesh` (py_mesh_ranks.c). 1, 0 or -1. */
int
py_mesh_contains(PyObject *op, PyObject *rank);

/* --- views (py_mesh_views.c) */

/* One layout from dims of several meshes over one root. */
dm_status
py_mesh_gather_dims(py_mesh *const *meshes, const int *dims, int n, dm_layout **out,
                    dm_error *err);

/* mesh[key]: a slice, always the same object for the same names. */
PyObject *
py_mesh_slice(py_mesh *self, PyObject *key);

/* The view of self's root with these facts: found or made. Takes over `layout`, also
 * on failure. */
PyObject *
py_mesh_view(py_mesh *self, dm_layout *layout, PyObject *names, PyObject *specs);

/* Records a flattened dim in a root: `flat` is reachable by its name. */
int
py_mesh_add_flattened(py_mesh *root, PyObject *name, PyObject *flat);

/* --- selections (py_mesh_select.c) */

/* The selection of these ranks of `source` (the root that has the groups), row-major:
 * found or made. `names` may be NULL. */
PyObject *
py_mesh_selection(py_state *state, py_mesh *source, const int64_t *shape, int ndim,
                  const int32_t *ranks, int64_t count, PyObject *names,
                  PyObject *specs);

/* --- groups (py_mesh_groups.c) */

/* Ranks of this rank's line along a dim, in the mesh's order; dm_free them. NULL with
 * an exception. This rank is a member. */
int32_t *
py_mesh_line_ranks(py_state *state, py_mesh *self, int dim);

/* A dim's name, or "dim_0". */
PyObject *
py_mesh_dim_name(py_mesh *self, int dim);

/* The ProcessGroup of a dim, made if need be; new reference. May wait for the store,
 * GIL released, where the members have not agreed yet. */
PyObject *
py_mesh_group_of_dim(py_state *state, py_mesh *self, int dim);

/* --- pickling (py_mesh_pickle.c) */

PyObject *
py_mesh_reduce(PyObject *self, PyObject *unused);

/* --- methods of each file, joined in py_mesh.c */

extern PyMethodDef py_mesh_init_methods[];
extern PyMethodDef py_mesh_fact_methods[];
extern PyMethodDef py_mesh_rank_methods[];
extern PyMethodDef py_mesh_array_methods[];
extern PyMethodDef py_mesh_reshape_methods[];
extern PyMethodDef py_mesh_select_methods[];
extern PyMethodDef py_mesh_group_methods[];
extern PyMethodDef py_mesh_adopt_methods[];
extern PyMethodDef py_mesh_pickle_functions[];
extern PyGetSetDef py_mesh_fact_getset[];
extern PyGetSetDef py_mesh_rank_getset[];
extern PyGetSetDef py_mesh_array_getset[];
extern PyGetSetDef py_mesh_group_getset[];

/* --- arguments (py_mesh_args.c, py_mesh_grid.c, py_mesh_specs.c) ------------------- */

/* obj.name, or NULL: without an exception when there is no such attribute. */
PyObject *
py_mesh_get_optional(PyObject *obj, PyObject *name);

/* An array of ranks. */
typedef struct py_mesh_grid {
    int64_t shape[PY_MESH_MAX_NDIM];
    int ndim;
    int32_t *ranks; /* owned; row-major */
    int64_t count;
    int64_t capacity;
} py_mesh_grid;

/* Reads `mesh`: an int, nested sequences, anything with the buffer protocol,
 * __array_interface__ or tolist(). The grid is to be cleared on success only. Returns
 * 0 or -1. */
int
py_mesh_grid_parse(py_state *state, PyObject *mesh, py_mesh_grid *grid);

void
py_mesh_grid_clear(py_mesh_grid *grid);

/* A device type without index, or an object with such a `type`: an interned str. */
PyObject *
py_mesh_device_type(py_state *state, PyObject *value);

/* None (or nothing in it) -> *names NULL; else a tuple of `ndim` unique str.
 * Returns 0 or -1. */
int
py_mesh_names_parse(PyObject *value, int ndim, PyObject **names);

/* What was asked for per dim: a tuple of (backend or None, options text, time-out in
 * nanoseconds, -1 for never, None for the world's). `overrides`: None, a dict by
 * name or index, or one entry per dim. `timeout`: None, seconds or a timedelta, or a
 * dict by name or index. `inherited`: the time-out (int or None) where none is given.
 */
PyObject *
py_mesh_specs_parse(py_state *state, PyObject *overrides, PyObject *timeout, int ndim,
                    PyObject *names, PyObject *device_type, PyObject *inherited);

/* The spec of one dim from a single override value (None, name, options or both). */
PyObject *
py_mesh_spec_parse(py_state *state, PyObject *override, PyObject *device_type,
                   PyObject *inherited);

#endif

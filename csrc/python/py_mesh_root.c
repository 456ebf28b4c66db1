/* _MeshRoot: the native half of a root mesh. See py_mesh.h.
 *
 * Owns the rank map, holds the world, the cache of groups and the groups that came
 * ready-made. No Python object is owned here, so its finalizer may run at any time.
 */
#include "python/py_mesh.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <time.h>
#include <unistd.h>

#include "base/dm_alloc.h"
#include "python/py_error.h"
#include "python/py_wait.h"
#include "python/py_world.h"

py_mesh_root *
py_mesh_root_new(py_state *state, dm_world *world, dm_ranks *ranks, int32_t rank)
{
    PyTypeObject *type = state->mesh_root_type;
    py_mesh_root *root = (py_mesh_root *)type->tp_alloc(type, 0);
    if (root == NULL) {
        dm_ranks_free(ranks);
        return NULL;
    }
    root->ranks = ranks;
    root->world = world != NULL ? dm_world_hold(world) : NULL;
    root->rank = rank;
    root->offset = rank < 0 ? -1 : dm_ranks_find(ranks, rank);
    return root;
}

/* --- agreement ------------------------------------------------------------------ */

static int
compare_ranks(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a;
    int32_t y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Size and hash of the member *set*: ranks that ask for the same members in another
 * order shall find each other, and learn that they disagree. */
static int
members_text(py_state *state, const dm_ranks *ranks, char *text, size_t size)
{
    int64_t count = dm_ranks_size(ranks);
    uint64_t hash = dm_ranks_hash(ranks);
    if (!dm_ranks_is_identity(ranks)) {
        dm_error err = DM_ERROR_INIT;
        dm_ranks *sorted = NULL;
        int32_t *list = dm_malloc_array((size_t)count, sizeof(*list));
        if (list == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        for (int64_t i = 0; i < count; i++) {
            list[i] = dm_ranks_at(ranks, i);
        }
        qsort(list, (size_t)count, sizeof(*list), compare_ranks);
        dm_status status = dm_ranks_new(list, count, &sorted, &err);
        dm_free(list);
        if (status != DM_OK) {
            return py_raise_int(state, &err);
        }
        hash = dm_ranks_hash(sorted);
        dm_ranks_free(sorted);
    }
    snprintf(text, size, "%" PRId64 "-%016" PRIx64, count, hash);
    return 0;
}

int32_t
py_mesh_root_largest(const py_mesh_root *root)
{
    int64_t count = dm_ranks_size(root->ranks);
    if (dm_ranks_is_identity(root->ranks)) {
        return (int32_t)(count - 1);
    }
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t rank = dm_ranks_at(root->ranks, i);
        largest = rank > largest ? rank : largest;
    }
    return largest;
}

/* An unpickled root takes the default world, if there is one. */
static int
attach_world(py_state *state, py_mesh_root *root)
{
    if (!root->attach) {
        PyErr_SetString(PyExc_RuntimeError,
                        "DeviceMesh process groups not initialized!");
        return -1;
    }
    if (state->default_world == NULL) {
        PyErr_SetString(
            PyExc_RuntimeError,
            "this mesh was unpickled in a process without a world, so it has facts but "
            "no groups: initialise devicemesh first (init_device_mesh or "
            "devicemesh.distributed.init_process_group), then ask again");
        return -1;
    }
    dm_world *world = py_world_of(state, state->default_world, "world");
    if (world == NULL) {
        return -1;
    }
    if (dm_world_rank(world) != root->rank) {
        PyErr_Format(PyExc_RuntimeError,
                     "this mesh was unpickled as rank %d before the world was there, "
                     "and this process is rank %d: unpickle it again",
                     (int)root->rank, (int)dm_world_rank(world));
        return -1;
    }
    if (py_mesh_root_largest(root) >= dm_world_size(world)) {
        PyErr_Format(PyExc_RuntimeError,
                     "this mesh was unpickled in a world of %d ranks, too few for its "
                     "rank %d",
                     (int)dm_world_size(world), (int)py_mesh_root_largest(root));
        return -1;
    }
    root->world = dm_world_hold(world);
    return 0;
}

/* Another thread is opening the root: wait for it without the GIL. */
static int
wait_while_opening(py_mesh_root *root)
{
    while (root->opening) {
        Py_BEGIN_ALLOW_THREADS
        nanosleep(&(struct timespec){.tv_nsec = DM_NS_PER_MS}, NULL);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
    }
    return 0;
}

int
py_mesh_root_open(py_state *state, py_mesh_root *root, PyObject *request)
{
    if (wait_while_opening(root) < 0) {
        return -1;
    }
    if (root->cache != NULL) {
        return 0;
    }
    if (root->world == NULL && attach_world(state, root) < 0) {
        return -1;
    }
    char members[64];
    const char *text = PyUnicode_AsUTF8(request);
    if (text == NULL ||
        members_text(state, root->ranks, members, sizeof(members)) < 0) {
        return -1;
    }
    char identity[DM_IDENTITY_SIZE];
    dm_error err = DM_ERROR_INIT;
    dm_group_cache *cache = NULL;
    dm_world *world = root->world;
    int64_t deadline = dm_clock_deadline(dm_world_timeout(world));
    root->opening = true;
    py_waiter waiter;
    py_waiter_start(&waiter, deadline);
    dm_status status =
        dm_world_agree(world, members, text, &waiter.wait, identity, &err);
    if (status == DM_OK) {
        status = dm_group_cache_new(world, identity, &cache, &err);
    }
    py_waiter_stop(&waiter);
    root->opening = false;
    if (status != DM_OK) {
        return py_raise_int(state, &err);
    }
    root->cache = cache;
    return 0;
}

int
py_mesh_root_note(py_state *state, py_mesh_root *root, PyObject *request)
{
    const char *text = PyUnicode_AsUTF8(request);
    if (text == NULL) {
        return -1;
    }
    dm_error err = DM_ERROR_INIT;
    py_waiter waiter;
    py_waiter_start(&waiter, dm_clock_deadline(dm_world_timeout(root->world)));
    dm_status status = dm_world_note(root->world, text, &waiter.wait, &err);
    py_waiter_stop(&waiter);
    return status == DM_OK ? 0 : py_raise_int(state, &err);
}

PyObject *
py_mesh_root_asked(py_mesh_root *root, PyObject *request)
{
    const char *text = PyUnicode_AsUTF8(request);
    if (text == NULL) {
        return NULL;
    }
    dm_error found = DM_ERROR_INIT;
    if (root->world != NULL) {
        int32_t ranks[DM_EXPLAINED_RANKS];
        int64_t count = dm_ranks_size(root->ranks);
        int32_t n = count < DM_EXPLAINED_RANKS ? (int32_t)count : DM_EXPLAINED_RANKS;
        for (int32_t i = 0; i < n; i++) {
            ranks[i] = dm_ranks_at(root->ranks, i);
        }
        py_waiter waiter;
        py_waiter_start(&waiter, dm_clock_deadline(DM_NS_PER_S));
        dm_world_explain_outside(root->world, ranks, n, text, &waiter.wait, &found);
        py_waiter_stop(&waiter);
        if (PyErr_Occurred()) {
            return NULL;
        }
    }
    return PyUnicode_DecodeUTF8(found.text, (Py_ssize_t)strlen(found.text), "replace");
}

/* --- groups --------------------------------------------------------------------- */

int
py_mesh_root_give(py_mesh_root *root, dm_group *group)
{
    size_t count = (size_t)root->given_count + 1;
    dm_group **grown = dm_realloc_array(root->given, count, sizeof(*grown));
    if (grown == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    root->given = grown;
    root->given[root->given_count++] = dm_group_hold(group);
    return 0;
}

static dm_group *
find_given(const py_mesh_root *root, const int32_t *ranks, int32_t size)
{
    for (int i = 0; i < root->given_count; i++) {
        dm_group *group = root->given[i];
        if (dm_group_size(group) == size &&
            memcmp(dm_group_ranks(group), ranks, (size_t)size * sizeof(*ranks)) == 0) {
            return group;
        }
    }
    return NULL;
}

bool
py_mesh_root_is_given(const py_mesh_root *root, const int32_t *ranks, int32_t size)
{
    return find_given(root, ranks, size) != NULL;
}

dm_group *
py_mesh_root_group(py_state *state, py_mesh_root *root, const dm_group_spec *spec,
                   const char *options)
{
    dm_group *group = find_given(root, spec->ranks, spec->size);
    if (group != NULL) {
        return dm_group_hold(group);
    }
    dm_error err = DM_ERROR_INIT;
    dm_status status;
    Py_BEGIN_ALLOW_THREADS /* loads the backend's library */
    status = dm_group_cache_get(root->cache, spec, options, &group, &err);
    Py_END_ALLOW_THREADS
    if (status != DM_OK) {
        py_raise(state, &err);
        return NULL;
    }
    return group;
}

void
py_mesh_root_close(py_mesh_root *root, bool abort)
{
    if (root->cache == NULL) {
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    if (abort) {
        dm_group_cache_abort(root->cache);
    }
    else {
        dm_group_cache_close(root->cache);
    }
    Py_END_ALLOW_THREADS
}

/* --- tokens --------------------------------------------------------------------- */

/* What a weak reference leads to (new reference), or NULL when it is gone. */
static PyObject *
dereference(PyObject *ref)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *object = NULL;
    if (PyWeakref_GetRef(ref, &object) < 0) {
        PyErr_Clear();
    }
    return object;
#else
    PyObject *object = PyWeakref_GetObject(ref);
    return object == NULL || object == Py_None ? NULL : Py_NewRef(object);
#endif
}

/* Forgets roots that have died; called when the table has doubled. */
static int
sweep_tokens(PyObject *table)
{
    Py_ssize_t size = PyDict_GET_SIZE(table);
    if (size < 16 || (size & (size - 1)) != 0) {
        return 0;
    }
    PyObject *items = PyDict_Items(table);
    if (items == NULL) {
        return -1;
    }
    int result = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items) && result == 0; i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        PyObject *root = dereference(PyTuple_GET_ITEM(item, 1));
        if (root == NULL) {
            result = PyDict_DelItem(table, PyTuple_GET_ITEM(item, 0));
        }
        Py_XDECREF(root);
    }
    Py_DECREF(items);
    return result;
}

const char *
py_mesh_root_token(py_state *state, py_mesh_root *root)
{
    if (root->token[0] != '\0') {
        return root->token;
    }
    if (state->pickled_roots == NULL) {
        state->pickled_roots = PyDict_New();
        if (state->pickled_roots == NULL) {
            return NULL;
        }
    }
    if (sweep_tokens(state->pickled_roots) < 0) {
        return NULL;
    }
    /* Address and time: the root lives, so nobody else in this process has both. */
    char token[sizeof(root->token)];
    snprintf(token, sizeof(token), "%ld-%" PRIxPTR "-%" PRIx64, (long)getpid(),
             (uintptr_t)root, (uint64_t)dm_clock_now());
    PyObject *key = PyUnicode_FromString(token);
    PyObject *ref = key == NULL ? NULL : PyWeakref_NewRef((PyObject *)root, NULL);
    int failed = ref == NULL ? -1 : PyDict_SetItem(state->pickled_roots, key, ref);
    Py_XDECREF(key);
    Py_XDECREF(ref);
    if (failed < 0) {
        return NULL;
    }
    memcpy(root->token, token, sizeof(token));
    return root->token;
}

py_mesh_root *
py_mesh_root_find(py_state *state, PyObject *token)
{
    if (state->pickled_roots == NULL) {
        return NULL;
    }
    PyObject *ref = PyDict_GetItemWithError(state->pickled_roots, token);
    if (ref == NULL) {
        PyErr_Clear();
        return NULL;
    }
    return (py_mesh_root *)dereference(ref);
}

/* --- the type ------------------------------------------------------------------- */

static void
mesh_root_finalize(PyObject *op)
{
    py_mesh_root *self = (py_mesh_root *)op;
    for (int i = 0; i < self->given_count; i++) {
        dm_group_release(self->given[i]);
    }
    dm_free(self->given);
    if (self->cache != NULL) {
        dm_group_cache_free(self->cache);
    }
    dm_world_release(self->world);
    dm_ranks_free(self->ranks);
    self->given = NULL;
    self->given_count = 0;
    self->cache = NULL;
    self->world = NULL;
    self->ranks = NULL;
}

static void
mesh_root_dealloc(PyObject *op)
{
    if (PyObject_CallFinalizerFromDealloc(op) < 0) {
        return;
    }
    py_mesh_root *self = (py_mesh_root *)op;
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    PyTypeObject *type = Py_TYPE(op);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyMemberDef mesh_root_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(py_mesh_root, weakrefs), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot mesh_root_slots[] = {
    {Py_tp_doc, "The native half of a root mesh: ranks, world, groups. Internal."},
    {Py_tp_dealloc, mesh_root_dealloc},
    {Py_tp_finalize, mesh_root_finalize},
    {Py_tp_members, mesh_root_members},
    {0, NULL},
};

PyType_Spec py_mesh_root_spec = {
    .name = "devicemesh._core._MeshRoot",
    .basicsize = sizeof(py_mesh_root),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = mesh_root_slots,
};

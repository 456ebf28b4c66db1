/* DeviceMesh: the type, its life, and what makes two meshes equal. See py_mesh.h.
 *
 * A mesh is filled once, by __init__ or by the function that makes a view; methods
 * find `native` NULL only where a subclass has not called __init__.
 */
#include "python/py_mesh.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

#include "base/dm_alloc.h"
#include "python/py_error.h"
#include "python/py_world.h"

/* --- filling -------------------------------------------------------------------- */

static PyObject *
shape_of(const dm_layout *layout)
{
    int ndim = dm_layout_ndim(layout);
    PyObject *shape = PyTuple_New(ndim);
    for (int d = 0; d < ndim && shape != NULL; d++) {
        PyObject *size = PyLong_FromLongLong(dm_layout_size(layout, d));
        if (size == NULL) {
            Py_CLEAR(shape);
            break;
        }
        PyTuple_SET_ITEM(shape, d, size);
    }
    return shape;
}

static PyObject *
coordinate_of(const dm_layout *layout, int64_t offset)
{
    if (offset < 0) {
        Py_RETURN_NONE;
    }
    int64_t indices[PY_MESH_MAX_NDIM];
    int ndim = dm_layout_ndim(layout);
    dm_layout_coordinate(layout, offset, indices);
    PyObject *coordinate = PyTuple_New(ndim);
    for (int d = 0; d < ndim && coordinate != NULL; d++) {
        PyObject *number = PyLong_FromLongLong(indices[d]);
        if (number == NULL) {
            Py_CLEAR(coordinate);
            break;
        }
        PyTuple_SET_ITEM(coordinate, d, number);
    }
    return coordinate;
}

int
py_mesh_fill(py_mesh *self, py_mesh_root *native, py_mesh *root, dm_layout *layout,
             PyObject *device_type, PyObject *names, PyObject *specs, bool has_groups)
{
    PyObject *shape = NULL, *coordinate = NULL;
    PyObject **groups = NULL;
    int ndim = dm_layout_ndim(layout);
    if (ndim > PY_MESH_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "a mesh has at most %d dims, got %d",
                     PY_MESH_MAX_NDIM, ndim);
        goto error;
    }
    shape = shape_of(layout);
    if (shape == NULL) {
        goto error;
    }
    coordinate = coordinate_of(layout, native->offset);
    if (coordinate == NULL) {
        goto error;
    }
    groups = dm_calloc((size_t)ndim, sizeof(*groups));
    if (groups == NULL) {
        PyErr_NoMemory();
        goto error;
    }

    self->root = (py_mesh *)Py_XNewRef(root);
    self->layout = layout;
    self->device_type = Py_NewRef(device_type);
    self->names = Py_XNewRef(names);
    self->specs = Py_NewRef(specs);
    self->shape = shape;
    self->coordinate = coordinate;
    self->groups = groups;
    self->numel = dm_layout_numel(layout);
    self->hash = -1;
    self->ndim = ndim;
    self->has_groups = has_groups;
    if (root == NULL) {
        native->sharers++;
        self->joined = true;
    }
    self->native = (py_mesh_root *)Py_NewRef(native);
    return 0;

error:
    Py_XDECREF(shape);
    Py_XDECREF(coordinate);
    dm_layout_free(layout);
    return -1;
}

PyObject *
py_mesh_make(PyTypeObject *type, py_mesh_root *native, py_mesh *root, dm_layout *layout,
             PyObject *device_type, PyObject *names, PyObject *specs, bool has_groups)
{
    PyObject *self = type->tp_alloc(type, 0);
    if (self == NULL) {
        dm_layout_free(layout);
        return NULL;
    }
    if (py_mesh_fill((py_mesh *)self, native, root, layout, device_type, names, specs,
                     has_groups) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return self;
}

/* --- construction from arguments -------------------------------------------------- */

/* What the constructor and _from_shape have in common. */
typedef struct mesh_request {
    PyObject *device_type; /* as given */
    PyObject *names;
    PyObject *overrides;
    PyObject *timeout;
    PyObject *world; /* World, or None for the default one */
    PyObject *rank;  /* int, or None for the world's */
    int init_backend;
    int reuse;
} mesh_request;

static int
parse_rank(PyObject *value, int32_t *rank)
{
    Py_ssize_t number = PyNumber_AsSsize_t(value, PyExc_OverflowError);
    if (number == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (number < 0 || number > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "rank must be 0 or more, got %zd", number);
        return -1;
    }
    *rank = (int32_t)number;
    return 0;
}

static int
check_world(dm_world *world, const py_mesh_root *root, const mesh_request *request)
{
    int64_t count = dm_ranks_size(root->ranks);
    int32_t size = dm_world_size(world);
    if (!request->init_backend) {
        return 0;
    }
    if (count > size) {
        PyErr_Format(PyExc_RuntimeError,
                     "Mesh should not be bigger than default world size %d, but found "
                     "%lld ranks!",
                     (int)size, (long long)count);
        return -1;
    }
    int32_t largest = py_mesh_root_largest(root);
    if (largest >= size) {
        PyErr_Format(PyExc_RuntimeError,
                     "the mesh has rank %d, but the world has ranks 0 to %d",
                     (int)largest, (int)size - 1);
        return -1;
    }
    if (root->rank != dm_world_rank(world)) {
        PyErr_Format(PyExc_ValueError,
                     "_rank is %d, but this process is rank %d of the world",
                     (int)root->rank, (int)dm_world_rank(world));
        return -1;
    }
    return 0;
}

/* The native half: with the world, unless a rank was given and no backend is wanted.
 * Takes over `ranks`. */
static py_mesh_root *
new_native(py_state *state, const mesh_request *request, dm_ranks *ranks)
{
    PyObject *object = NULL;
    dm_world *world = NULL;
    int32_t rank = 0;
    bool has_rank = request->rank != NULL && request->rank != Py_None;
    if (has_rank && parse_rank(request->rank, &rank) < 0) {
        goto error;
    }
    if (request->init_backend || !has_rank) {
        object = request->world != NULL && request->world != Py_None
                     ? Py_NewRef(request->world)
                     : py_world_default(state);
        world = object == NULL ? NULL : py_world_of(state, object, "world");
        if (world == NULL) {
            goto error;
        }
        rank = has_rank ? rank : dm_world_rank(world);
    }
    py_mesh_root *root = py_mesh_root_new(state, world, ranks, rank);
    Py_XDECREF(object);
    if (root != NULL && world != NULL && check_world(world, root, request) < 0) {
        Py_CLEAR(root);
    }
    return root;

error:
    Py_XDECREF(object);
    dm_ranks_free(ranks);
    return NULL;
}

/* The key under which groups are reused: the world and what was asked for. */
static PyObject *
reuse_key(py_mesh *self, PyObject *request)
{
    return Py_BuildValue("(NO)", PyLong_FromVoidPtr(self->native->world), request);
}

/* reuse_groups=True: an equal mesh's groups, if it was made the same way. Returns 1
 * when found, 0 when this one is the first, -1 on error. */
static int
join_reused(py_state *state, py_mesh *self, PyObject *request)
{
    if (state->reused_roots == NULL) {
        state->reused_roots = PyDict_New();
        if (state->reused_roots == NULL) {
            return -1;
        }
    }
    PyObject *key = reuse_key(self, request);
    if (key == NULL) {
        return -1;
    }
    int result = -1;
    PyObject *found = PyDict_GetItemWithError(state->reused_roots, key);
    if (found != NULL) {
        py_mesh_root *other = (py_mesh_root *)Py_NewRef(found);
        if (dm_world_is_closed(other->world) || other->sharers < 0) {
            found = NULL;
            Py_DECREF(other);
        }
        else {
            self->native->sharers--;
            Py_SETREF(self->native, other);
            self->native->sharers++;
            result = 1;
        }
    }
    if (found == NULL && !PyErr_Occurred()) {
        result = PyDict_SetItem(state->reused_roots, key, (PyObject *)self->native);
    }
    Py_DECREF(key);
    return result;
}

/* The members agree; the first thing of a mesh that communicates. */
static int
open_groups(py_state *state, py_mesh *self, int reuse)
{
    PyObject *request = py_mesh_request(self);
    if (request == NULL) {
        return -1;
    }
    int result = reuse ? join_reused(state, self, request) : 0;
    if (result == 0) {
        result = py_mesh_root_open(state, self->native, request);
    }
    Py_DECREF(request);
    return result < 0 ? -1 : 0;
}

static void
unfill(py_mesh *self);

/* Takes over `layout` and `ranks`. */
static int
init_mesh(py_state *state, py_mesh *self, const mesh_request *request,
          dm_layout *layout, dm_ranks *ranks)
{
    PyObject *device_type = NULL, *names = NULL, *specs = NULL;
    py_mesh_root *native = NULL;
    int result = -1;
    int ndim = dm_layout_ndim(layout);
    if (self->native != NULL) {
        PyErr_SetString(PyExc_TypeError,
                        "a DeviceMesh cannot change: __init__ was called twice");
        goto done;
    }
    device_type = py_mesh_device_type(state, request->device_type);
    if (device_type == NULL || py_mesh_names_parse(request->names, ndim, &names) < 0) {
        goto done;
    }
    specs = py_mesh_specs_parse(state, request->overrides, request->timeout, ndim,
                                names, device_type, Py_None);
    if (specs == NULL) {
        goto done;
    }
    native = new_native(state, request, ranks);
    ranks = NULL;
    if (native == NULL) {
        goto done;
    }
    result = py_mesh_fill(self, native, NULL, layout, device_type, names, specs,
                          request->init_backend);
    layout = NULL;
    if (result == 0 && request->init_backend && native->offset >= 0) {
        result = open_groups(state, self, request->reuse);
        if (result < 0) {
            unfill(self);
        }
    }

done:
    dm_layout_free(layout);
    dm_ranks_free(ranks);
    Py_XDECREF(device_type);
    Py_XDECREF(names);
    Py_XDECREF(specs);
    Py_XDECREF(native);
    return result;
}

static int
mesh_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {
        "device_type", "mesh",  "mesh_dim_names", "backend_override",
        "timeout",     "world", "reuse_groups",   "_init_backend",
        "_rank",       NULL};
    py_state *state = py_state_of_type(Py_TYPE(op));
    PyObject *mesh = NULL;
    mesh_request request = {.init_backend = 1};
    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(
            args, kwargs, "OO|$OOOOppO:DeviceMesh", keywords, &request.device_type,
            &mesh, &request.names, &request.overrides, &request.timeout, &request.world,
            &request.reuse, &request.init_backend, &request.rank)) {
        return -1;
    }
    py_mesh_grid grid;
    if (py_mesh_grid_parse(state, mesh, &grid) < 0) {
        return -1;
    }
    dm_layout *layout = NULL;
    dm_ranks *ranks = NULL;
    dm_error err = DM_ERROR_INIT;
    dm_status status = dm_layout_new(grid.shape, grid.ndim, &layout, &err);
    if (status == DM_OK) {
        status = dm_ranks_new(grid.ranks, grid.count, &ranks, &err);
    }
    py_mesh_grid_clear(&grid);
    if (status != DM_OK) {
        dm_layout_free(layout);
        return py_raise_int(state, &err);
    }
    return init_mesh(state, (py_mesh *)op, &request, layout, ranks);
}

/* A tuple or list of ints -> sizes; returns their number or -1. */
static int
parse_sizes(PyObject *shape, int64_t *sizes)
{
    PyObject *items = PySequence_Fast(shape, "mesh_shape must be a tuple of ints");
    if (items == NULL) {
        return -1;
    }
    Py_ssize_t ndim = PySequence_Fast_GET_SIZE(items);
    if (ndim > PY_MESH_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "a mesh has at most %d dims, got %zd",
                     PY_MESH_MAX_NDIM, ndim);
        ndim = -1;
    }
    for (Py_ssize_t d = 0; d < ndim; d++) {
        sizes[d] =
            PyNumber_AsSsize_t(PySequence_Fast_GET_ITEM(items, d), PyExc_OverflowError);
        if (sizes[d] == -1 && PyErr_Occurred()) {
            ndim = -1;
        }
    }
    Py_DECREF(items);
    return (int)ndim;
}

PyDoc_STRVAR(
    mesh_from_shape_doc,
    "_from_shape($type, device_type, mesh_shape, *, mesh_dim_names=None,\n"
    "            backend_override=None, timeout=None, world=None,\n"
    "            reuse_groups=False)\n"
    "--\n\n"
    "The mesh of ranks 0 to n-1 in row-major order: what init_device_mesh calls.");

static PyObject *
mesh_from_shape(PyObject *cls, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"device_type",      "mesh_shape", "mesh_dim_names",
                               "backend_override", "timeout",    "world",
                               "reuse_groups",     NULL};
    PyTypeObject *type = (PyTypeObject *)cls;
    py_state *state = py_state_of_type(type);
    PyObject *shape = NULL;
    mesh_request request = {.init_backend = 1};
    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$OOOOp:_from_shape", keywords,
                                     &request.device_type, &shape, &request.names,
                                     &request.overrides, &request.timeout,
                                     &request.world, &request.reuse)) {
        return NULL;
    }
    int64_t sizes[PY_MESH_MAX_NDIM];
    int ndim = parse_sizes(shape, sizes);
    if (ndim < 0) {
        return NULL;
    }
    dm_layout *layout = NULL;
    dm_ranks *ranks = NULL;
    dm_error err = DM_ERROR_INIT;
    dm_status status = dm_layout_new(sizes, ndim, &layout, &err);
    if (status == DM_OK) {
        status = dm_ranks_identity(dm_layout_numel(layout), &ranks, &err);
    }
    PyObject *self = status == DM_OK ? type->tp_alloc(type, 0) : NULL;
    if (self == NULL) {
        dm_layout_free(layout);
        dm_ranks_free(ranks);
        return status == DM_OK ? NULL : py_raise(state, &err);
    }
    if (init_mesh(state, (py_mesh *)self, &request, layout, ranks) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

/* --- life --------------------------------------------------------------------------- */

static int
mesh_traverse(PyObject *op, visitproc visit, void *arg)
{
    py_mesh *self = (py_mesh *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->dict);
    Py_VISIT(self->native);
    Py_VISIT(self->root);
    Py_VISIT(self->device_type);
    Py_VISIT(self->names);
    Py_VISIT(self->specs);
    Py_VISIT(self->shape);
    Py_VISIT(self->coordinate);
    Py_VISIT(self->slices);
    Py_VISIT(self->flattened);
    Py_VISIT(self->views);
    for (int d = 0; self->groups != NULL && d < self->ndim; d++) {
        Py_VISIT(self->groups[d]);
    }
    return 0;
}

/* Everything that py_mesh_fill and later look-ups put there, plain memory apart. */
static void
drop_references(py_mesh *self)
{
    if (self->joined) {
        self->native->sharers--;
        self->joined = false;
    }
    for (int d = 0; self->groups != NULL && d < self->ndim; d++) {
        Py_CLEAR(self->groups[d]);
    }
    Py_CLEAR(self->native);
    Py_CLEAR(self->root);
    Py_CLEAR(self->device_type);
    Py_CLEAR(self->names);
    Py_CLEAR(self->specs);
    Py_CLEAR(self->shape);
    Py_CLEAR(self->coordinate);
    Py_CLEAR(self->slices);
    Py_CLEAR(self->flattened);
    Py_CLEAR(self->views);
}

/* Back to what tp_alloc made. */
static void
unfill(py_mesh *self)
{
    drop_references(self);
    dm_layout_free(self->layout);
    dm_free(self->groups);
    self->layout = NULL;
    self->groups = NULL;
}

static int
mesh_clear(PyObject *op)
{
    py_mesh *self = (py_mesh *)op;
    Py_CLEAR(self->dict);
    drop_references(self);
    return 0;
}

static void
mesh_dealloc(PyObject *op)
{
    py_mesh *self = (py_mesh *)op;
    PyObject_GC_UnTrack(op);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    mesh_clear(op);
    unfill(self);
    PyTypeObject *type = Py_TYPE(op);
    type->tp_free(op);
    Py_DECREF(type);
}

/* --- equality and text -------------------------------------------------------------- */

static bool
names_equal(PyObject *a, PyObject *b)
{
    if (a == b) {
        return true;
    }
    if (a == NULL || b == NULL || PyTuple_GET_SIZE(a) != PyTuple_GET_SIZE(b)) {
        return false;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a); i++) {
        /* Interned: equal means identical. */
        if (PyTuple_GET_ITEM(a, i) != PyTuple_GET_ITEM(b, i)) {
            return false;
        }
    }
    return true;
}

/* torch's rule: the root's ranks, the layout, the device type, the names. */
static bool
meshes_equal(const py_mesh *a, const py_mesh *b)
{
    if (a->native == NULL || b->native == NULL) {
        return false;
    }
    return dm_layout_equal(a->layout, b->layout) && names_equal(a->names, b->names) &&
           a->device_type == b->device_type &&
           (a->native == b->native ||
            dm_ranks_equal(a->native->ranks, b->native->ranks));
}

static PyObject *
mesh_richcompare(PyObject *a, PyObject *b, int op)
{
    if (op != Py_EQ && op != Py_NE) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    if (a == b) {
        return PyBool_FromLong(op == Py_EQ);
    }
    py_state *state = py_state_of_type(Py_TYPE(a));
    if (state == NULL) {
        return NULL;
    }
    if (!PyObject_TypeCheck(b, state->mesh_type)) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    bool equal = meshes_equal((py_mesh *)a, (py_mesh *)b);
    return PyBool_FromLong(equal == (op == Py_EQ));
}

static Py_hash_t
mesh_hash(PyObject *op)
{
    py_mesh *self = (py_mesh *)op;
    if (self->hash != -1 && self->native != NULL) {
        return self->hash;
    }
    if (self->native == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "DeviceMesh.__init__() was not called");
        return -1;
    }
    Py_hash_t names = self->names == NULL ? 0 : PyObject_Hash(self->names);
    Py_hash_t device = PyObject_Hash(self->device_type);
    if ((names == -1 || device == -1) && PyErr_Occurred()) {
        return -1;
    }
    /* The parts are well mixed; rotations keep them apart. */
    uint64_t hash = dm_ranks_hash(self->native->ranks);
    uint64_t layout = dm_layout_hash(self->layout);
    hash = hash * UINT64_C(0x9E3779B97F4A7C15) + layout;
    hash = (hash << 27 | hash >> 37) ^ (uint64_t)names;
    hash = (hash << 27 | hash >> 37) ^ (uint64_t)device;
    self->hash = (Py_hash_t)hash == -1 ? -2 : (Py_hash_t)hash;
    return self->hash;
}

/* ", ".join(...) in parentheses, from "dp=2" and the like. */
static PyObject *
named_shape(py_mesh *self)
{
    PyObject *parts = PyList_New(0);
    PyObject *comma = PyUnicode_FromString(", ");
    PyObject *joined = NULL, *text = NULL;
    if (parts == NULL || comma == NULL) {
        goto done;
    }
    for (int d = 0; d < self->ndim; d++) {
        PyObject *part = PyUnicode_FromFormat("%U=%S", PyTuple_GET_ITEM(self->names, d),
                                              PyTuple_GET_ITEM(self->shape, d));
        if (part == NULL || PyList_Append(parts, part) < 0) {
            Py_XDECREF(part);
            goto done;
        }
        Py_DECREF(part);
    }
    joined = PyUnicode_Join(comma, parts);
    if (joined != NULL) {
        text = PyUnicode_FromFormat("(%U)", joined);
    }

done:
    Py_XDECREF(parts);
    Py_XDECREF(comma);
    Py_XDECREF(joined);
    return text;
}

/* Per dim its stride, or a tuple of strides where it has not exactly one factor. */
static PyObject *
strides_of(py_mesh *self)
{
    PyObject *strides = PyTuple_New(self->ndim);
    for (int d = 0; d < self->ndim && strides != NULL; d++) {
        const dm_factor *factors = NULL;
        int count = dm_layout_factors(self->layout, d, &factors);
        PyObject *stride =
            count == 1 ? PyLong_FromLongLong(factors[0].stride) : PyTuple_New(count);
        for (int i = 0; i < count && count != 1 && stride != NULL; i++) {
            PyObject *number = PyLong_FromLongLong(factors[i].stride);
            if (number == NULL) {
                Py_CLEAR(stride);
                break;
            }
            PyTuple_SET_ITEM(stride, i, number);
        }
        if (stride == NULL) {
            Py_CLEAR(strides);
            break;
        }
        PyTuple_SET_ITEM(strides, d, stride);
    }
    return strides;
}

/* "" or ", Mesh: [[0, 1], [2, 3]]" under TORCH_DISTRIBUTED_DEBUG=DETAIL. */
static PyObject *
detail_text(py_mesh *self)
{
    const char *debug = getenv("TORCH_DISTRIBUTED_DEBUG");
    if (debug == NULL || strcmp(debug, "DETAIL") != 0) {
        return PyUnicode_FromString("");
    }
    PyObject *ranks = py_mesh_rank_lists(self);
    if (ranks == NULL) {
        PyErr_Clear();
        return PyUnicode_FromString("");
    }
    PyObject *text = PyUnicode_FromFormat(", Mesh: %R", ranks);
    Py_DECREF(ranks);
    return text;
}

static PyObject *
mesh_repr(PyObject *op)
{
    py_mesh *self = (py_mesh *)op;
    if (self->native == NULL) {
        return PyUnicode_FromString("<DeviceMesh without __init__>");
    }
    PyObject *text = NULL;
    PyObject *strides = strides_of(self);
    PyObject *detail = detail_text(self);
    PyObject *shape =
        self->names != NULL ? named_shape(self) : PyObject_Repr(self->shape);
    if (strides != NULL && shape != NULL && detail != NULL) {
        text = PyUnicode_FromFormat("DeviceMesh(%U, '%U', stride=%R%U)", shape,
                                    self->device_type, strides, detail);
    }
    Py_XDECREF(strides);
    Py_XDECREF(detail);
    Py_XDECREF(shape);
    return text;
}

/* --- what it asks for, as people read it ---------------------------------------------- */

/* " over ranks [3, 1, 0, 2]", or "" for 0 to n-1. Long lists are cut; the hash tells
 * them apart. */
static PyObject *
ranks_text(const dm_ranks *ranks)
{
    enum { SHOWN = 16 };
    if (dm_ranks_is_identity(ranks)) {
        return PyUnicode_FromString("");
    }
    int64_t count = dm_ranks_size(ranks);
    int64_t shown = count < SHOWN ? count : SHOWN;
    PyObject *list = PyList_New(shown);
    for (int64_t i = 0; i < shown && list != NULL; i++) {
        PyObject *rank = PyLong_FromLong(dm_ranks_at(ranks, i));
        if (rank == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, rank);
    }
    if (list == NULL) {
        return NULL;
    }
    PyObject *text =
        count == shown ? PyUnicode_FromFormat(" over ranks %R", list)
                       : PyUnicode_FromFormat(" over %lld ranks %R... (hash %llx)",
                                              (long long)count, list,
                                              (unsigned long long)dm_ranks_hash(ranks));
    Py_DECREF(list);
    return text;
}

/* Appends ", <label> [..]" with entry `index` of each spec, unless all are None. Takes
 * over `text`. */
static PyObject *
append_specs(PyObject *text, py_mesh *self, int index, const char *label)
{
    PyObject *list = PyList_New(self->ndim);
    bool any = false;
    if (text == NULL || list == NULL) {
        goto error;
    }
    for (int d = 0; d < self->ndim; d++) {
        PyObject *entry = PyTuple_GET_ITEM(PyTuple_GET_ITEM(self->specs, d), index);
        any = any || entry != Py_None;
        PyList_SET_ITEM(list, d, Py_NewRef(entry));
    }
    if (any) {
        Py_SETREF(text, PyUnicode_FromFormat("%U, %s %R", text, label, list));
    }
    Py_DECREF(list);
    return text;

error:
    Py_XDECREF(text);
    Py_XDECREF(list);
    return NULL;
}

PyObject *
py_mesh_request(py_mesh *self)
{
    PyObject *ranks = ranks_text(self->native->ranks);
    if (ranks == NULL) {
        return NULL;
    }
    PyObject *text =
        self->names != NULL
            ? PyUnicode_FromFormat("%U mesh %R with names %R%U", self->device_type,
                                   self->shape, self->names, ranks)
            : PyUnicode_FromFormat("%U mesh %R%U", self->device_type, self->shape,
                                   ranks);
    Py_DECREF(ranks);
    text = append_specs(text, self, 0, "backends");
    return append_specs(text, self, 2, "time-outs in ns");
}

/* --- the current mesh ------------------------------------------------------------------- */

/* devicemesh.device_mesh._mesh_resources.mesh_stack of this thread. */
static PyObject *
mesh_stack(void)
{
    PyObject *module = PyImport_ImportModule("devicemesh.device_mesh");
    if (module == NULL) {
        return NULL;
    }
    PyObject *resources = PyObject_GetAttrString(module, "_mesh_resources");
    Py_DECREF(module);
    if (resources == NULL) {
        return NULL;
    }
    PyObject *stack = PyObject_GetAttrString(resources, "mesh_stack");
    Py_DECREF(resources);
    return stack;
}

PyDoc_STRVAR(mesh_enter_doc, "__enter__($self, /)\n--\n\n"
                             "Makes this the current mesh of this thread.");

static PyObject *
mesh_enter(PyObject *op, PyObject *Py_UNUSED(unused))
{
    PyObject *stack = mesh_stack();
    if (stack == NULL) {
        return NULL;
    }
    int failed = PyList_Check(stack) ? PyList_Append(stack, op) : -1;
    Py_DECREF(stack);
    return failed < 0 ? NULL : Py_NewRef(op);
}

PyDoc_STRVAR(mesh_exit_doc, "__exit__($self, /, *args)\n--\n\n"
                            "Takes the current mesh off the stack; closes nothing.");

static PyObject *
mesh_exit(PyObject *Py_UNUSED(op), PyObject *Py_UNUSED(args))
{
    PyObject *stack = mesh_stack();
    if (stack == NULL) {
        return NULL;
    }
    PyObject *popped = PyObject_CallMethod(stack, "pop", NULL);
    Py_DECREF(stack);
    if (popped == NULL) {
        return NULL;
    }
    Py_DECREF(popped);
    Py_RETURN_NONE;
}

/* --- copies ------------------------------------------------------------------------------ */

PyDoc_STRVAR(mesh_copy_doc, "__copy__($self, /)\n--\n\n"
                            "The mesh itself: it cannot change.");

static PyObject *
mesh_copy(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return Py_NewRef(op);
}

PyDoc_STRVAR(mesh_deepcopy_doc,
             "__deepcopy__($self, memo, /)\n--\n\n"
             "The mesh itself: a copy has the same groups and the same root.");

static PyObject *
mesh_deepcopy(PyObject *op, PyObject *Py_UNUSED(memo))
{
    return Py_NewRef(op);
}

/* --- the type ------------------------------------------------------------------------------ */

static PyMethodDef mesh_methods[] = {
    {"_from_shape", (PyCFunction)(void (*)(void))mesh_from_shape,
     METH_VARARGS | METH_KEYWORDS | METH_CLASS, mesh_from_shape_doc},
    {"__enter__", mesh_enter, METH_NOARGS, mesh_enter_doc},
    {"__exit__", mesh_exit, METH_VARARGS, mesh_exit_doc},
    {"__copy__", mesh_copy, METH_NOARGS, mesh_copy_doc},
    {"__deepcopy__", mesh_deepcopy, METH_O, mesh_deepcopy_doc},
    {"__reduce__", py_mesh_reduce, METH_NOARGS,
     "__reduce__($self, /)\n--\n\nPickles the facts, not the groups."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef mesh_members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(py_mesh, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(py_mesh, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef mesh_getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(
    mesh_doc,
    "DeviceMesh(device_type, mesh, *, mesh_dim_names=None, backend_override=None,\n"
    "           timeout=None, world=None, reuse_groups=False, _init_backend=True,\n"
    "           _rank=None)\n"
    "--\n\n"
    "Ranks laid out as an n-dimensional array, with a process group per dim.\n"
    "\n"
    "Args:\n"
    "    device_type: 'cpu' or 'cuda' (no index), or an object with such a type.\n"
    "    mesh: the ranks: nested lists, numpy array, torch tensor, range. Their\n"
    "        order is kept; a rank may be there once.\n"
    "    mesh_dim_names: one name per dim, each there once.\n"
    "    backend_override: per dim, by name or index: a backend's name, Options, or\n"
    "        (name, Options). The dict is not changed.\n"
    "    timeout: seconds or timedelta for all groups, or a dict per dim.\n"
    "    world: the World to live in; the process's default world otherwise.\n"
    "    reuse_groups: share the groups of an equal mesh that was made so too.\n"
    "\n"
    "Raises:\n"
    "    RuntimeError: the mesh is bigger than the world; names that do not fit.\n"
    "    ValueError: a rank that is there twice, an unknown device type or backend.\n"
    "    MismatchError: another member asked for another mesh.\n"
    "\n"
    "Example:\n"
    "    >>> import devicemesh\n"
    "    >>> with devicemesh.simulate(world_size=4, rank=1):\n"
    "    ...     mesh = devicemesh.DeviceMesh('cpu', [[3, 1], [0, 2]])\n"
    "    ...     mesh.get_coordinate()\n"
    "    (0, 1)\n");

static PyObject *
mesh_subscript(PyObject *op, PyObject *key)
{
    py_mesh *self = (py_mesh *)op;
    if (self->slices != NULL &&
        (PyUnicode_CheckExact(key) || PyTuple_CheckExact(key))) {
        PyObject *slice = PyDict_GetItemWithError(self->slices, key);
        if (slice != NULL) {
            return Py_NewRef(slice);
        }
        PyErr_Clear(); /* an unhashable entry is told apart below */
    }
    return py_mesh_slice(self, key);
}

static PyType_Slot mesh_slots[] = {
    {Py_tp_doc, (void *)mesh_doc},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, mesh_init},
    {Py_tp_dealloc, mesh_dealloc},
    {Py_tp_traverse, mesh_traverse},
    {Py_tp_clear, mesh_clear},
    {Py_tp_richcompare, mesh_richcompare},
    {Py_tp_hash, mesh_hash},
    {Py_tp_repr, mesh_repr},
    {Py_tp_members, mesh_members},
    {Py_tp_methods, mesh_methods},
    {Py_tp_getset, mesh_getset},
    {Py_mp_subscript, mesh_subscript},
    {0, NULL},
};

static PyType_Spec mesh_spec = {
    .name = "devicemesh.DeviceMesh",
    .basicsize = sizeof(py_mesh),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = mesh_slots,
};

/* The methods and properties of the other files, each of which keeps its own table. */
static int
add_methods(PyTypeObject *type, PyMethodDef *methods)
{
    for (PyMethodDef *def = methods; def->ml_name != NULL; def++) {
        PyObject *descr = def->ml_flags & METH_CLASS ? PyDescr_NewClassMethod(type, def)
                                                     : PyDescr_NewMethod(type, def);
        if (descr == NULL) {
            return -1;
        }
        int failed = PyObject_SetAttrString((PyObject *)type, def->ml_name, descr);
        Py_DECREF(descr);
        if (failed < 0) {
            return -1;
        }
    }
    return 0;
}

static int
add_properties(PyTypeObject *type, PyGetSetDef *properties)
{
    for (PyGetSetDef *def = properties; def->name != NULL; def++) {
        PyObject *descr = PyDescr_NewGetSet(type, def);
        if (descr == NULL) {
            return -1;
        }
        int failed = PyObject_SetAttrString((PyObject *)type, def->name, descr);
        Py_DECREF(descr);
        if (failed < 0) {
            return -1;
        }
    }
    return 0;
}

int
py_mesh_register(PyObject *module)
{
    py_state *state = py_state_of_module(module);
    if (py_state_add_type(module, &py_mesh_root_spec, NULL, &state->mesh_root_type) <
            0 ||
        py_state_add_type(module, &mesh_spec, NULL, &state->mesh_type) < 0 ||
        add_methods(state->mesh_type, py_mesh_fact_methods) < 0 ||
        add_methods(state->mesh_type, py_mesh_reshape_methods) < 0 ||
        add_methods(state->mesh_type, py_mesh_group_methods) < 0 ||
        add_properties(state->mesh_type, py_mesh_fact_getset) < 0 ||
        add_properties(state->mesh_type, py_mesh_group_getset) < 0) {
        return -1;
    }
    return PyModule_AddFunctions(module, py_mesh_pickle_functions);
}

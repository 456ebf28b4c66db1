/* DeviceMesh: the type, its life, and what makes two meshes equal. See py_mesh.h.
 *
 * A mesh is filled once, by __init__ or by the function that makes a view; methods
 * find `native` NULL only where a subclass has not called __init__.
 */
#include "python/py_mesh.h"

#include <structmember.h>

#include "base/dm_alloc.h"

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

/* --- life --------------------------------------------------------------------------- */

static int
mesh_traverse(PyObject *op, visitproc visit, void *arg)
{
    py_mesh *self = (py_mesh *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->dict);
    Py_VISIT(self->native);
    Py_VISIT(self->root);
    Py_VISIT(self->source);
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
    Py_CLEAR(self->source);
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
void
py_mesh_unfill(py_mesh *self)
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
    py_mesh_unfill(self);
    PyTypeObject *type = Py_TYPE(op);
    type->tp_free(op);
    Py_DECREF(type);
}

/* --- equality ------------------------------------------------------------------------ */

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
        PyObject *x = PyTuple_GET_ITEM(a, i);
        PyObject *y = PyTuple_GET_ITEM(b, i);
        if (x != y && PyUnicode_Compare(x, y) != 0) {
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
    if (py_mesh_check(self) < 0) {
        return -1;
    }
    if (self->hash != -1) {
        return self->hash;
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
    {Py_tp_init, py_mesh_init},
    {Py_tp_dealloc, mesh_dealloc},
    {Py_tp_traverse, mesh_traverse},
    {Py_tp_clear, mesh_clear},
    {Py_tp_richcompare, mesh_richcompare},
    {Py_tp_hash, mesh_hash},
    {Py_tp_repr, py_mesh_repr},
    {Py_tp_members, mesh_members},
    {Py_tp_methods, mesh_methods},
    {Py_tp_getset, mesh_getset},
    {Py_mp_subscript, mesh_subscript},
    {Py_sq_contains, py_mesh_contains},
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
        add_methods(state->mesh_type, py_mesh_init_methods) < 0 ||
        add_methods(state->mesh_type, py_mesh_fact_methods) < 0 ||
        add_methods(state->mesh_type, py_mesh_rank_methods) < 0 ||
        add_methods(state->mesh_type, py_mesh_array_methods) < 0 ||
        add_methods(state->mesh_type, py_mesh_reshape_methods) < 0 ||
        add_methods(state->mesh_type, py_mesh_select_methods) < 0 ||
        add_methods(state->mesh_type, py_mesh_group_methods) < 0 ||
        add_methods(state->mesh_type, py_mesh_adopt_methods) < 0 ||
        add_properties(state->mesh_type, py_mesh_fact_getset) < 0 ||
        add_properties(state->mesh_type, py_mesh_rank_getset) < 0 ||
        add_properties(state->mesh_type, py_mesh_array_getset) < 0 ||
        add_properties(state->mesh_type, py_mesh_group_getset) < 0) {
        return -1;
    }
    return PyModule_AddFunctions(module, py_mesh_pickle_functions);
}

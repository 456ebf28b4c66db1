/* Views with other dims than their root's: flattened, unflattened, concatenated. */
#include "python/py_mesh.h"

#include "base/dm_alloc.h"
#include "python/py_error.h"

/* --- flatten ------------------------------------------------------------------------ */

/* "_".join(names) */
static PyObject *
joined_names(PyObject *names)
{
    PyObject *underscore = PyUnicode_FromString("_");
    PyObject *joined = underscore == NULL ? NULL : PyUnicode_Join(underscore, names);
    Py_XDECREF(underscore);
    return joined;
}

/* The longest of the dims' time-outs: -1 is longer than all, None is the world's. */
static PyObject *
longest_timeout(py_mesh *self)
{
    PyObject *longest = NULL; /* borrowed */
    int64_t longest_ns = 0;
    for (int d = 0; d < self->ndim; d++) {
        PyObject *timeout = PyTuple_GET_ITEM(PyTuple_GET_ITEM(self->specs, d), 2);
        dm_world *world = py_mesh_source_of(self)->native->world;
        int64_t ns = timeout != Py_None ? PyLong_AsLongLong(timeout)
                     : world != NULL    ? dm_world_timeout(world)
                                        : 0;
        ns = ns < 0 ? INT64_MAX : ns;
        if (longest == NULL || ns > longest_ns) {
            longest = timeout;
            longest_ns = ns;
        }
    }
    return Py_NewRef(longest != NULL ? longest : Py_None);
}

int
py_mesh_add_flattened(py_mesh *root, PyObject *name, PyObject *flat)
{
    if (root->flattened == NULL) {
        root->flattened = PyDict_New();
        if (root->flattened == NULL) {
            return -1;
        }
    }
    return PyDict_SetItem(root->flattened, name, flat);
}

/* A name that stands for something else already, or that is taken by the same
 * flattening: *found borrowed. Returns 0 or -1. */
static int
check_flat_name(py_mesh *root, PyObject *name, const dm_layout *layout,
                PyObject *override, PyObject *specs, PyObject **found)
{
    *found = NULL;
    if (root->names != NULL && py_mesh_own_dim(root, name) >= 0) {
        PyErr_Format(PyExc_ValueError,
                     "%U already exists for submesh of the %R. The mesh_dim_names of "
                     "submesh and flattened mesh are %R. Please specify another valid "
                     "mesh_dim_name.",
                     name, root, root->names);
        return -1;
    }
    PyObject *known =
        root->flattened == NULL ? NULL : PyDict_GetItemWithError(root->flattened, name);
    if (known == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    if (!dm_layout_equal(((py_mesh *)known)->layout, layout)) {
        PyErr_Format(
            PyExc_ValueError,
            "Flatten mesh with mesh_dim_name %U has been created before, Please "
            "specify another valid mesh_dim_name.",
            name);
        return -1;
    }
    if (override != NULL && override != Py_None) {
        int same = PyObject_RichCompareBool(((py_mesh *)known)->specs, specs, Py_EQ);
        if (same == 0) {
            PyErr_Format(
                PyExc_ValueError,
                "Flatten mesh with mesh_dim_name %U has been created before with "
                "another backend_override or timeout. Please specify another "
                "valid mesh_dim_name.",
                name);
        }
        if (same <= 0) {
            return -1;
        }
    }
    *found = known;
    return 0;
}

/* name: an exact str. */
static PyObject *
flatten_as(py_state *state, py_mesh *self, PyObject *name, PyObject *override)
{
    py_mesh *root = py_mesh_root_of(self);
    PyObject *inherited = NULL, *spec = NULL, *specs = NULL, *names = NULL,
             *flat = NULL;
    dm_layout *layout = NULL;
    dm_error err = DM_ERROR_INIT;
    inherited = longest_timeout(self);
    spec = py_mesh_spec_parse(state, override, self->device_type, inherited);
    specs = spec == NULL ? NULL : PyTuple_Pack(1, spec);
    names = PyTuple_Pack(1, name);
    if (specs == NULL || names == NULL) {
        goto done;
    }
    if (dm_layout_flatten(self->layout, &layout, &err) != DM_OK) {
        py_raise(state, &err);
        goto done;
    }
    PyObject *known;
    if (check_flat_name(root, name, layout, override, specs, &known) < 0) {
        goto done;
    }
    if (known != NULL) {
        flat = Py_NewRef(known);
        goto done;
    }
    flat = py_mesh_view(self, layout, names, specs);
    layout = NULL;
    if (flat != NULL && py_mesh_add_flattened(root, name, flat) < 0) {
        Py_CLEAR(flat);
    }

done:
    dm_layout_free(layout);
    Py_XDECREF(inherited);
    Py_XDECREF(spec);
    Py_XDECREF(specs);
    Py_XDECREF(names);
    return flat;
}

PyDoc_STRVAR(
    mesh_flatten_doc,
    "flatten($self, mesh_dim_name=None, backend_override=None)\n--\n\n"
    "All dims of this mesh as one dim of its root.\n"
    "\n"
    "The root remembers it by name: root[name] and root.get_group(name) find it. The\n"
    "same flattening twice is the same mesh.\n"
    "\n"
    "Args:\n"
    "    mesh_dim_name: the name; the names joined by '_' by default.\n"
    "    backend_override: a backend's name, Options, or (name, Options).\n"
    "\n"
    "Raises:\n"
    "    RuntimeError: the mesh has no names.\n"
    "    ValueError: the name stands for something else.\n"
    "\n"
    "Example:\n"
    "    >>> import devicemesh\n"
    "    >>> with devicemesh.simulate(world_size=8, rank=0):\n"
    "    ...     mesh = devicemesh.init_device_mesh(\n"
    "    ...         'cpu', (2, 2, 2), mesh_dim_names=('dp', 'cp', 'tp'))\n"
    "    >>> mesh['dp', 'tp'].flatten()\n"
    "    DeviceMesh((dp_tp=4), 'cpu', stride=((4, 1),))\n"
    "\n"
    "torch calls it _flatten.\n");

static PyObject *
mesh_flatten(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"mesh_dim_name", "backend_override", NULL};
    py_mesh *self = (py_mesh *)op;
    py_state *state = py_state_of_type(Py_TYPE(op));
    PyObject *given = Py_None, *override = Py_None;
    if (state == NULL || py_mesh_check(self) < 0 ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "|OO:flatten", keywords, &given,
                                     &override)) {
        return NULL;
    }
    if (self->names == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "Cannot flatten a DeviceMesh without mesh_dim_names!");
        return NULL;
    }
    if (given != Py_None && !PyUnicode_Check(given)) {
        PyErr_Format(PyExc_TypeError, "mesh_dim_name must be a str, got %R", given);
        return NULL;
    }
    bool is_default = given == Py_None || PyUnicode_GET_LENGTH(given) == 0;
    PyObject *name =
        is_default ? joined_names(self->names) : PyUnicode_FromObject(given);
    if (name == NULL) {
        return NULL;
    }
    PyObject *flat = self->ndim == 1 && py_mesh_own_dim(self, name) == 0
                         ? Py_NewRef(op)
                         : flatten_as(state, self, name, override);
    Py_DECREF(name);
    return flat;
}

/* --- unflatten ------------------------------------------------------------------------ */

/* Which dim: a name or an index (negative from the end). -1 with ValueError. */
static int
unflatten_dim(py_mesh *self, PyObject *arg)
{
    if (PyUnicode_Check(arg)) {
        int dim = py_mesh_own_dim(self, arg);
        if (dim < 0) {
            PyErr_Format(PyExc_ValueError,
                         "dim %U specified in `_unflatten` is not in %R", arg,
                         self->names);
        }
        return dim;
    }
    Py_ssize_t index = PyNumber_AsSsize_t(arg, NULL);
    if (index == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (index < -self->ndim || index >= self->ndim) {
        PyErr_Format(PyExc_ValueError,
                     "dim %zd specified in `_unflatten` is out of range %d", index,
                     self->ndim);
        return -1;
    }
    return (int)(index < 0 ? index + self->ndim : index);
}

/* The sizes as int64, checked against the dim's size. */
static int
check_unflatten_sizes(py_mesh *self, int dim, PyObject *sizes, int64_t *numbers)
{
    int64_t product = 1;
    bool bad = false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sizes); i++) {
        Py_ssize_t number =
            PyNumber_AsSsize_t(PyTuple_GET_ITEM(sizes, i), PyExc_OverflowError);
        if (number == -1 && PyErr_Occurred()) {
            return -1;
        }
        numbers[i] = number;
        bad = bad || number < 1 || number > INT32_MAX || product > INT32_MAX;
        product = bad ? 0 : product * number;
    }
    int64_t expected = dm_layout_size(self->layout, dim);
    if (bad || product != expected) {
        PyErr_Format(
            PyExc_ValueError,
            "The product of mesh_sizes=%R is %lld, but the original dimension at "
            "dim=%d has size %lld. These must be equal for unflatten to work "
            "correctly.",
            sizes, (long long)product, dim, (long long)expected);
        return -1;
    }
    return 0;
}

/* tuple[:dim] + middle + tuple[dim + 1:] */
static PyObject *
splice(PyObject *tuple, int dim, PyObject *middle)
{
    PyObject *head = PyTuple_GetSlice(tuple, 0, dim);
    PyObject *tail = PyTuple_GetSlice(tuple, dim + 1, PyTuple_GET_SIZE(tuple));
    PyObject *front =
        head == NULL || tail == NULL ? NULL : PySequence_Concat(head, middle);
    PyObject *whole = front == NULL ? NULL : PySequence_Concat(front, tail);
    Py_XDECREF(head);
    Py_XDECREF(tail);
    Py_XDECREF(front);
    return whole;
}

/* sizes: tuple of int-likes; new_names: as many str. */
static PyObject *
unflatten_to(py_state *state, py_mesh *self, int dim, PyObject *sizes,
             PyObject *new_names, PyObject *override, PyObject *timeout)
{
    int64_t numbers[PY_MESH_MAX_NDIM];
    int n = (int)PyTuple_GET_SIZE(sizes);
    PyObject *spliced = NULL, *names = NULL, *inner = NULL, *specs = NULL, *view = NULL;
    dm_layout *layout = NULL;
    dm_error err = DM_ERROR_INIT;
    PyObject *inherited = PyTuple_GET_ITEM(PyTuple_GET_ITEM(self->specs, dim), 2);
    if (check_unflatten_sizes(self, dim, sizes, numbers) < 0) {
        return NULL;
    }
    spliced = splice(self->names, dim, new_names);
    if (spliced == NULL ||
        py_mesh_names_parse(spliced, self->ndim - 1 + n, &names) < 0) {
        goto done;
    }
    inner = py_mesh_specs_parse(state, override, timeout, n, new_names,
                                self->device_type, inherited);
    specs = inner == NULL ? NULL : splice(self->specs, dim, inner);
    if (specs == NULL) {
        goto done;
    }
    if (dm_layout_unflatten(self->layout, dim, numbers, n, &layout, &err) != DM_OK) {
        py_raise(state, &err);
        goto done;
    }
    view = py_mesh_view(self, layout, names, specs);

done:
    Py_XDECREF(spliced);
    Py_XDECREF(names);
    Py_XDECREF(inner);
    Py_XDECREF(specs);
    return view;
}

PyDoc_STRVAR(
    mesh_unflatten_doc,
    "unflatten($self, dim, mesh_sizes, mesh_dim_names, backend_override=None,\n"
    "          timeout=None)\n--\n\n"
    "A view in which one dim is split row-major into several.\n"
    "\n"
    "Groups of dims that stay are shared, and so are new ones that were made before.\n"
    "\n"
    "Args:\n"
    "    dim: name or index of the dim.\n"
    "    mesh_sizes: sizes of the new dims; their product is the dim's size.\n"
    "    mesh_dim_names: one name for each.\n"
    "    backend_override: per new dim, as for init_device_mesh.\n"
    "    timeout: for the new dims' groups; the dim's own by default.\n"
    "\n"
    "Raises:\n"
    "    ValueError: no such dim, or sizes that do not multiply to its size.\n"
    "    RuntimeError: names that do not fit, or are there already.\n"
    "\n"
    "Example:\n"
    "    >>> import devicemesh\n"
    "    >>> with devicemesh.simulate(world_size=8, rank=0):\n"
    "    ...     world = devicemesh.init_device_mesh(\n"
    "    ...         'cpu', (8,), mesh_dim_names=('world',))\n"
    "    >>> world.unflatten('world', (2, 4), ('dp', 'tp'))\n"
    "    DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1))\n"
    "\n"
    "torch calls it _unflatten.\n");

static PyObject *
mesh_unflatten(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {
        "dim", "mesh_sizes", "mesh_dim_names", "backend_override", "timeout", NULL};
    py_mesh *self = (py_mesh *)op;
    py_state *state = py_state_of_type(Py_TYPE(op));
    PyObject *dim_arg, *sizes_arg, *names_arg;
    PyObject *override = Py_None, *timeout = Py_None;
    if (state == NULL || py_mesh_check(self) < 0 ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|OO:unflatten", keywords,
                                     &dim_arg, &sizes_arg, &names_arg, &override,
                                     &timeout)) {
        return NULL;
    }
    if (self->names == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "Cannot unflatten a DeviceMesh without mesh_dim_names!");
        return NULL;
    }
    int dim = unflatten_dim(self, dim_arg);
    if (dim < 0) {
        return NULL;
    }
    PyObject *view = NULL, *names = NULL;
    PyObject *sizes = PySequence_Tuple(sizes_arg);
    Py_ssize_t given = sizes == NULL ? -1
                       : PyUnicode_Check(names_arg)
                           ? -2 /* told apart by py_mesh_names_parse */
                           : PySequence_Size(names_arg);
    if (given == -1) {
        goto done;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(sizes);
    if (given >= 0 && given != n) {
        PyErr_SetString(PyExc_RuntimeError,
                        "mesh_dim_names must have same length as mesh_sizes in "
                        "_unflatten!");
        goto done;
    }
    if (n == 0 || n + self->ndim - 1 > PY_MESH_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "a dim is split into 1 to %d dims, got %zd",
                     PY_MESH_MAX_NDIM - self->ndim + 1, n);
        goto done;
    }
    if (py_mesh_names_parse(names_arg, (int)n, &names) < 0) {
        goto done;
    }
    view = unflatten_to(state, self, dim, sizes, names, override, timeout);

done:
    Py_XDECREF(sizes);
    Py_XDECREF(names);
    return view;
}

/* --- concatenate ------------------------------------------------------------------------ */

/* All are meshes of ours with names, over equal ranks. */
static int
check_parts(py_state *state, PyObject *list)
{
    py_mesh *first = NULL;
    Py_ssize_t dims = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(list); i++) {
        PyObject *item = PyTuple_GET_ITEM(list, i);
        if (!PyObject_TypeCheck(item, state->mesh_type)) {
            PyErr_Format(PyExc_TypeError, "concatenate takes DeviceMeshes, got %R",
                         item);
            return -1;
        }
        py_mesh *mesh = (py_mesh *)item;
        if (py_mesh_check(mesh) < 0) {
            return -1;
        }
        if (mesh->names == NULL) {
            PyErr_SetString(PyExc_RuntimeError,
                            "Cannot concatenate a DeviceMesh without mesh_dim_names!");
            return -1;
        }
        first = first == NULL ? mesh : first;
        if (mesh->device_type != first->device_type ||
            (mesh->native != first->native &&
             !dm_ranks_equal(mesh->native->ranks, first->native->ranks))) {
            PyErr_SetString(PyExc_RuntimeError,
                            "Cannot concatenate DeviceMeshes derived "
                            "from different device meshs");
            return -1;
        }
        dims += mesh->ndim;
    }
    if (first == NULL) {
        PyErr_SetString(PyExc_ValueError, "concatenate needs at least one DeviceMesh");
        return -1;
    }
    if (dims > PY_MESH_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "a mesh has at most %d dims, got %zd",
                     PY_MESH_MAX_NDIM, dims);
        return -1;
    }
    return 0;
}

static dm_status
concatenate_layouts(PyObject *list, dm_layout **out, dm_error *err)
{
    Py_ssize_t n = PyTuple_GET_SIZE(list);
    const dm_layout **layouts = dm_malloc_array((size_t)n, sizeof(const dm_layout *));
    if (layouts == NULL) {
        return dm_error_set_no_memory(err, "a list of layouts");
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        layouts[i] = ((py_mesh *)PyTuple_GET_ITEM(list, i))->layout;
    }
    dm_status status = dm_layout_concatenate(layouts, (int)n, out, err);
    dm_free(layouts);
    return status;
}

/* The names (or specs) of all meshes, one after the other. */
static PyObject *
chain(PyObject *list, bool specs)
{
    PyObject *whole = PyTuple_New(0);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(list) && whole != NULL; i++) {
        py_mesh *mesh = (py_mesh *)PyTuple_GET_ITEM(list, i);
        Py_SETREF(whole, PySequence_Concat(whole, specs ? mesh->specs : mesh->names));
    }
    return whole;
}

PyDoc_STRVAR(
    mesh_concatenate_doc,
    "concatenate($type, device_mesh_list, /)\n--\n\n"
    "The dims of several views of one root, one after the other, as one view.\n"
    "\n"
    "Raises:\n"
    "    RuntimeError: meshes over different ranks, dims that overlap, repeated "
    "names.\n"
    "\n"
    "Example:\n"
    "    >>> import devicemesh\n"
    "    >>> with devicemesh.simulate(world_size=8, rank=0):\n"
    "    ...     mesh = devicemesh.init_device_mesh(\n"
    "    ...         'cpu', (2, 4), mesh_dim_names=('dp', 'tp'))\n"
    "    >>> devicemesh.DeviceMesh.concatenate([mesh['dp'], mesh['tp']]) is mesh\n"
    "    True\n"
    "\n"
    "torch calls it _concatenate.\n");

static PyObject *
mesh_concatenate(PyObject *cls, PyObject *meshes)
{
    py_state *state = py_state_of_type((PyTypeObject *)cls);
    PyObject *list = state == NULL ? NULL : PySequence_Tuple(meshes);
    PyObject *names = NULL, *all_names = NULL, *specs = NULL, *view = NULL;
    dm_layout *layout = NULL;
    dm_error err = DM_ERROR_INIT;
    if (list == NULL || check_parts(state, list) < 0) {
        goto done;
    }
    if (concatenate_layouts(list, &layout, &err) != DM_OK) {
        py_raise(state, &err);
        goto done;
    }
    if (!dm_layout_is_orthogonal(layout)) {
        PyErr_Format(PyExc_RuntimeError, "Cannot concatenate overlapping meshes: %R",
                     meshes);
        goto done;
    }
    all_names = chain(list, false);
    specs = chain(list, true);
    if (all_names == NULL || specs == NULL ||
        py_mesh_names_parse(all_names, dm_layout_ndim(layout), &names) < 0) {
        goto done;
    }
    view = py_mesh_view((py_mesh *)PyTuple_GET_ITEM(list, 0), layout, names, specs);
    layout = NULL;

done:
    dm_layout_free(layout);
    Py_XDECREF(list);
    Py_XDECREF(names);
    Py_XDECREF(all_names);
    Py_XDECREF(specs);
    return view;
}

PyDoc_STRVAR(mesh_private_flatten_doc,
             "_flatten($self, mesh_dim_name=None, backend_override=None)\n--\n\n"
             "torch's name for flatten.");
PyDoc_STRVAR(
    mesh_private_unflatten_doc,
    "_unflatten($self, dim, mesh_sizes, mesh_dim_names, backend_override=None,\n"
    "           timeout=None)\n--\n\n"
    "torch's name for unflatten.");
PyDoc_STRVAR(mesh_private_concatenate_doc,
             "_concatenate($type, device_mesh_list, /)\n--\n\n"
             "torch's name for concatenate.");

PyMethodDef py_mesh_reshape_methods[] = {
    {"flatten", (PyCFunction)(void (*)(void))mesh_flatten, METH_VARARGS | METH_KEYWORDS,
     mesh_flatten_doc},
    {"_flatten", (PyCFunction)(void (*)(void))mesh_flatten,
     METH_VARARGS | METH_KEYWORDS, mesh_private_flatten_doc},
    {"unflatten", (PyCFunction)(void (*)(void))mesh_unflatten,
     METH_VARARGS | METH_KEYWORDS, mesh_unflatten_doc},
    {"_unflatten", (PyCFunction)(void (*)(void))mesh_unflatten,
     METH_VARARGS | METH_KEYWORDS, mesh_private_unflatten_doc},
    {"concatenate", mesh_concatenate, METH_O | METH_CLASS, mesh_concatenate_doc},
    {"_concatenate", mesh_concatenate, METH_O | METH_CLASS,
     mesh_private_concatenate_doc},
    {NULL, NULL, 0, NULL},
};

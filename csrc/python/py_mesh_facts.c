/* What a mesh answers without communication: sizes, coordinates, names. */
#include "python/py_mesh.h"

/* --- dims by name or index ------------------------------------------------------ */

int
py_mesh_check(const py_mesh *self)
{
    if (self->native == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "DeviceMesh.__init__() was not called");
        return -1;
    }
    return 0;
}

int
py_mesh_own_dim(py_mesh *self, PyObject *name)
{
    PyObject *names = self->names;
    if (names == NULL) {
        return -1;
    }
    /* Literals are interned, here and where the mesh was made: this finds most. */
    for (Py_ssize_t d = 0; d < PyTuple_GET_SIZE(names); d++) {
        if (PyTuple_GET_ITEM(names, d) == name) {
            return (int)d;
        }
    }
    for (Py_ssize_t d = 0; d < PyTuple_GET_SIZE(names); d++) {
        if (PyUnicode_Compare(PyTuple_GET_ITEM(names, d), name) == 0) {
            return (int)d;
        }
    }
    return -1;
}

/* The flattened dims of the root may be asked for by name from any of its views. */
static int
find_flattened(py_mesh *self, PyObject *name, py_mesh **mesh, int *dim)
{
    py_mesh *root = py_mesh_root_of(self);
    PyObject *found =
        root->flattened == NULL ? NULL : PyDict_GetItemWithError(root->flattened, name);
    if (found != NULL) {
        *mesh = (py_mesh *)found;
        *dim = 0;
        return 0;
    }
    if (PyErr_Occurred()) {
        return -1;
    }
    if (self->names == NULL) {
        PyErr_Format(PyExc_KeyError,
                     "No `mesh_dim_names` found. The mesh has no dim %R: use an index.",
                     name);
    }
    else {
        PyErr_Format(
            PyExc_KeyError,
            "Mesh dimension '%U' does not exist. Available mesh dimensions are: "
            "mesh_dim_names=%R",
            name, self->names);
    }
    return -1;
}

static int
find_by_index(py_mesh *self, PyObject *arg, int *dim)
{
    Py_ssize_t index = PyNumber_AsSsize_t(arg, PyExc_IndexError);
    if (index == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (index < -self->ndim || index >= self->ndim) {
        PyErr_Format(PyExc_IndexError,
                     "mesh_dim %zd is out of range for a mesh of %d dims", index,
                     self->ndim);
        return -1;
    }
    *dim = (int)(index < 0 ? index + self->ndim : index);
    return 0;
}

int
py_mesh_find_dim(py_mesh *self, PyObject *arg, py_mesh **mesh, int *dim)
{
    if (py_mesh_check(self) < 0) {
        return -1;
    }
    *mesh = self;
    if (PyUnicode_Check(arg)) {
        *dim = py_mesh_own_dim(self, arg);
        return *dim >= 0 ? 0 : find_flattened(self, arg, mesh, dim);
    }
    if (PyIndex_Check(arg)) {
        return find_by_index(self, arg, dim);
    }
    if (PyTuple_Check(arg) || PyList_Check(arg)) {
        PyErr_Format(PyExc_TypeError,
                     "mesh_dim must be one dim's name or index, got %R: several dims "
                     "become one by mesh[names].flatten()",
                     arg);
    }
    else {
        PyErr_Format(PyExc_TypeError, "mesh_dim must be a dim's name or index, got %R",
                     arg);
    }
    return -1;
}

int
py_mesh_dim_arg(const char *method, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames, PyObject **arg)
{
    Py_ssize_t nkw = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    *arg = NULL;
    if (nargs + nkw > 1) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most 1 argument (%zd given)",
                     method, nargs + nkw);
        return -1;
    }
    if (nkw == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(kwnames, 0),
                                                     "mesh_dim") != 0) {
        PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'",
                     method, PyTuple_GET_ITEM(kwnames, 0));
        return -1;
    }
    if (nargs + nkw == 1 && args[0] != Py_None) {
        *arg = args[0];
    }
    return 0;
}

void
py_mesh_raise_outside(py_mesh *self)
{
    PyErr_Format(
        PyExc_RuntimeError,
        "rank %d is not in the mesh %R: it has no coordinate and no groups there",
        (int)self->native->rank, self);
}

/* --- sizes and coordinates --------------------------------------------------------- */

PyDoc_STRVAR(mesh_size_doc,
             "size($self, mesh_dim=None)\n--\n\n"
             "Number of ranks of the mesh, or of one dim by name or index.\n"
             "\n"
             "Raises:\n"
             "    KeyError: no dim of that name.\n"
             "    IndexError: an index out of range.\n"
             "\n"
             "Example:\n"
             "    >>> import devicemesh\n"
             "    >>> with devicemesh.simulate(world_size=8, rank=0):\n"
             "    ...     mesh = devicemesh.init_device_mesh(\n"
             "    ...         'cpu', (2, 4), mesh_dim_names=('dp', 'tp'))\n"
             "    >>> mesh.size(), mesh.size('tp'), mesh.size(0)\n"
             "    (8, 4, 2)\n");

static PyObject *
mesh_size(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    py_mesh *self = (py_mesh *)op;
    py_mesh *mesh;
    PyObject *arg;
    int dim;
    if (py_mesh_dim_arg("size", args, nargs, kwnames, &arg) < 0 ||
        py_mesh_check(self) < 0) {
        return NULL;
    }
    if (arg == NULL) {
        return PyLong_FromLongLong(self->numel);
    }
    if (py_mesh_find_dim(self, arg, &mesh, &dim) < 0) {
        return NULL;
    }
    return Py_NewRef(PyTuple_GET_ITEM(mesh->shape, dim));
}

PyDoc_STRVAR(mesh_get_rank_doc,
             "get_rank($self, /)\n--\n\n"
             "This process's rank in the world, whether it is in the mesh or not.");

static PyObject *
mesh_get_rank(PyObject *op, PyObject *Py_UNUSED(unused))
{
    py_mesh *self = (py_mesh *)op;
    return py_mesh_check(self) < 0 ? NULL : PyLong_FromLong(self->native->rank);
}

PyDoc_STRVAR(
    mesh_get_local_rank_doc,
    "get_local_rank($self, mesh_dim=None)\n--\n\n"
    "This rank's place along one dim: its coordinate there, which is also its\n"
    "rank in that dim's group.\n"
    "\n"
    "Args:\n"
    "    mesh_dim: name or index; not needed where there is one dim.\n"
    "\n"
    "Raises:\n"
    "    RuntimeError: no mesh_dim on a mesh of several dims; this rank is not\n"
    "        in the mesh.\n");

static PyObject *
mesh_get_local_rank(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                    PyObject *kwnames)
{
    py_mesh *self = (py_mesh *)op;
    py_mesh *mesh = self;
    PyObject *arg;
    int dim = 0;
    if (py_mesh_dim_arg("get_local_rank", args, nargs, kwnames, &arg) < 0 ||
        py_mesh_check(self) < 0) {
        return NULL;
    }
    if (arg == NULL && self->ndim != 1) {
        PyErr_Format(
            PyExc_RuntimeError,
            "Found the DeviceMesh have %d dimensions. Optional kwarg `mesh_dim` "
            "needs to be specified when device_mesh.ndim > 1.",
            self->ndim);
        return NULL;
    }
    if (arg != NULL && py_mesh_find_dim(self, arg, &mesh, &dim) < 0) {
        return NULL;
    }
    if (mesh->coordinate == Py_None) {
        py_mesh_raise_outside(mesh);
        return NULL;
    }
    return Py_NewRef(PyTuple_GET_ITEM(mesh->coordinate, dim));
}

PyDoc_STRVAR(mesh_get_coordinate_doc,
             "get_coordinate($self, /)\n--\n\n"
             "This rank's index along each dim, or None when it is not in the mesh.");

static PyObject *
mesh_get_coordinate(PyObject *op, PyObject *Py_UNUSED(unused))
{
    py_mesh *self = (py_mesh *)op;
    return py_mesh_check(self) < 0 ? NULL : Py_NewRef(self->coordinate);
}

static PyObject *
mesh_sym_get_coordinate(PyObject *op, PyObject *index)
{
    py_mesh *self = (py_mesh *)op;
    int dim;
    if (py_mesh_check(self) < 0 || find_by_index(self, index, &dim) < 0) {
        return NULL;
    }
    if (self->coordinate == Py_None) {
        py_mesh_raise_outside(self);
        return NULL;
    }
    return Py_NewRef(PyTuple_GET_ITEM(self->coordinate, dim));
}

static PyObject *
mesh_is_member(PyObject *op, PyObject *Py_UNUSED(unused))
{
    py_mesh *self = (py_mesh *)op;
    return py_mesh_check(self) < 0 ? NULL
                                   : PyBool_FromLong(self->coordinate != Py_None);
}

static PyObject *
mesh_get_mesh_dim_by_name(PyObject *op, PyObject *name)
{
    py_mesh *self = (py_mesh *)op;
    if (py_mesh_check(self) < 0) {
        return NULL;
    }
    int dim = PyUnicode_Check(name) ? py_mesh_own_dim(self, name) : -1;
    if (dim >= 0) {
        return PyLong_FromLong(dim);
    }
    if (self->names == NULL) {
        PyErr_SetString(PyExc_KeyError, "No `mesh_dim_names` found.");
    }
    else {
        PyErr_Format(
            PyExc_KeyError,
            "Mesh dimension '%S' does not exist. Available mesh dimensions are: "
            "mesh_dim_names=%R",
            name, self->names);
    }
    return NULL;
}

static PyObject *
mesh_get_root_mesh(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return Py_NewRef((PyObject *)py_mesh_root_of((py_mesh *)op));
}

static PyObject *
mesh_get_root_mesh_dim(PyObject *op, PyObject *Py_UNUSED(unused))
{
    py_mesh *self = (py_mesh *)op;
    if (py_mesh_check(self) < 0) {
        return NULL;
    }
    if (self->names == NULL) {
        Py_RETURN_NONE;
    }
    if (self->ndim != 1) {
        PyErr_Format(PyExc_RuntimeError,
                     "The submesh can only be a 1D mesh. %R has %d dims", op,
                     self->ndim);
        return NULL;
    }
    return mesh_get_mesh_dim_by_name((PyObject *)py_mesh_root_of(self),
                                     PyTuple_GET_ITEM(self->names, 0));
}

/* --- properties --------------------------------------------------------------------------- */

static PyObject *
mesh_get_device_type(PyObject *op, void *Py_UNUSED(closure))
{
    py_mesh *self = (py_mesh *)op;
    return py_mesh_check(self) < 0 ? NULL : Py_NewRef(self->device_type);
}

static PyObject *
mesh_get_names(PyObject *op, void *Py_UNUSED(closure))
{
    py_mesh *self = (py_mesh *)op;
    if (py_mesh_check(self) < 0) {
        return NULL;
    }
    return Py_NewRef(self->names != NULL ? self->names : Py_None);
}

static PyObject *
mesh_get_ndim(PyObject *op, void *Py_UNUSED(closure))
{
    py_mesh *self = (py_mesh *)op;
    return py_mesh_check(self) < 0 ? NULL : PyLong_FromLong(self->ndim);
}

static PyObject *
mesh_get_shape(PyObject *op, void *Py_UNUSED(closure))
{
    py_mesh *self = (py_mesh *)op;
    return py_mesh_check(self) < 0 ? NULL : Py_NewRef(self->shape);
}

static PyObject *
mesh_get_coordinate_property(PyObject *op, void *Py_UNUSED(closure))
{
    return mesh_get_coordinate(op, NULL);
}

static PyObject *
mesh_get_rank_property(PyObject *op, void *Py_UNUSED(closure))
{
    return mesh_get_rank(op, NULL);
}

static PyObject *
mesh_get_root_property(PyObject *op, void *Py_UNUSED(closure))
{
    py_mesh *self = (py_mesh *)op;
    return Py_NewRef(self->root != NULL ? (PyObject *)self->root : Py_None);
}

static PyObject *
mesh_get_thread_id(PyObject *Py_UNUSED(op), void *Py_UNUSED(closure))
{
    Py_RETURN_NONE; /* torch: set under its threaded backend only */
}

static PyObject *
mesh_get_flatten_mapping(PyObject *op, void *Py_UNUSED(closure))
{
    py_mesh *self = (py_mesh *)op;
    return self->flattened != NULL ? PyDict_Copy(self->flattened) : PyDict_New();
}

PyMethodDef py_mesh_fact_methods[] = {
    {"size", (PyCFunction)(void (*)(void))mesh_size, METH_FASTCALL | METH_KEYWORDS,
     mesh_size_doc},
    {"get_rank", mesh_get_rank, METH_NOARGS, mesh_get_rank_doc},
    {"get_local_rank", (PyCFunction)(void (*)(void))mesh_get_local_rank,
     METH_FASTCALL | METH_KEYWORDS, mesh_get_local_rank_doc},
    {"get_coordinate", mesh_get_coordinate, METH_NOARGS, mesh_get_coordinate_doc},
    {"_sym_get_coordinate", mesh_sym_get_coordinate, METH_O,
     "_sym_get_coordinate($self, index, /)\n--\n\nThis rank's index along one dim."},
    {"_is_current_rank_part_of_mesh", mesh_is_member, METH_NOARGS,
     "_is_current_rank_part_of_mesh($self, /)\n--\n\nWhether it has a coordinate."},
    {"_get_mesh_dim_by_name", mesh_get_mesh_dim_by_name, METH_O,
     "_get_mesh_dim_by_name($self, mesh_dim_name, /)\n--\n\nThe index of a dim."},
    {"_get_root_mesh", mesh_get_root_mesh, METH_NOARGS,
     "_get_root_mesh($self, /)\n--\n\nThe mesh that this one is a view of, or itself."},
    {"_get_root_mesh_dim", mesh_get_root_mesh_dim, METH_NOARGS,
     "_get_root_mesh_dim($self, /)\n--\n\nThe index in the root of this mesh's only "
     "dim; None without names."},
    {NULL, NULL, 0, NULL},
};

PyGetSetDef py_mesh_fact_getset[] = {
    {"device_type", mesh_get_device_type, NULL, "'cpu' or 'cuda'.", NULL},
    {"mesh_dim_names", mesh_get_names, NULL, "A tuple of names, or None.", NULL},
    {"ndim", mesh_get_ndim, NULL, "Number of dims.", NULL},
    {"shape", mesh_get_shape, NULL, "Size of each dim, as a tuple.", NULL},
    {"_coordinate_on_dim", mesh_get_coordinate_property, NULL, NULL, NULL},
    {"_device_type", mesh_get_device_type, NULL, NULL, NULL},
    {"_flatten_mapping", mesh_get_flatten_mapping, NULL, NULL, NULL},
    {"_mesh_dim_names", mesh_get_names, NULL, NULL, NULL},
    {"_rank", mesh_get_rank_property, NULL, NULL, NULL},
    {"_root_mesh", mesh_get_root_property, NULL, "The root mesh; None in a root.",
     NULL},
    {"_thread_id", mesh_get_thread_id, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* Views of a root mesh: how they are found, and slices.
 *
 * A view is known by its facts (names, layout, what was asked for per dim) and is
 * made once: the root's table `views` returns the same object for the same facts.
 * Each mesh also keeps its own table from names to slices for the common look-up.
 */
#include "python/py_mesh.h"

#include <string.h>

#include "python/py_error.h"

/* --- interning ------------------------------------------------------------------ */

/* The factors of all dims as bytes; each dim begins with their number. */
static PyObject *
layout_bytes(const dm_layout *layout)
{
    int ndim = dm_layout_ndim(layout);
    Py_ssize_t count = 0;
    const dm_factor *factors = NULL;
    for (int d = 0; d < ndim; d++) {
        count += 1 + 2 * dm_layout_factors(layout, d, &factors);
    }
    PyObject *bytes =
        PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    if (bytes == NULL) {
        return NULL;
    }
    char *at = PyBytes_AS_STRING(bytes);
    for (int d = 0; d < ndim; d++) {
        int64_t n = dm_layout_factors(layout, d, &factors);
        memcpy(at, &n, sizeof(n));
        at += sizeof(n);
        for (int64_t i = 0; i < n; i++) {
            memcpy(at, &factors[i].size, sizeof(int64_t));
            memcpy(at + sizeof(int64_t), &factors[i].stride, sizeof(int64_t));
            at += 2 * sizeof(int64_t);
        }
    }
    return bytes;
}

/* Whether the root itself has these facts. 1, 0 or -1. */
static int
is_root(py_mesh *root, const dm_layout *layout, PyObject *names, PyObject *specs)
{
    if (!dm_layout_equal(root->layout, layout) ||
        (root->names == NULL) != (names == NULL)) {
        return 0;
    }
    int same = names == NULL ? 1 : PyObject_RichCompareBool(root->names, names, Py_EQ);
    return same == 1 ? PyObject_RichCompareBool(root->specs, specs, Py_EQ) : same;
}

PyObject *
py_mesh_view(py_mesh *self, dm_layout *layout, PyObject *names, PyObject *specs)
{
    py_mesh *root = py_mesh_root_of(self);
    PyObject *bytes = NULL, *key = NULL, *view = NULL;
    int same = is_root(root, layout, names, specs);
    if (same != 0) {
        view = same > 0 ? Py_NewRef((PyObject *)root) : NULL;
        goto done;
    }
    bytes = layout_bytes(layout);
    key = bytes == NULL
              ? NULL
              : PyTuple_Pack(3, names != NULL ? names : Py_None, bytes, specs);
    if (key == NULL) {
        goto done;
    }
    if (root->views == NULL) {
        root->views = PyDict_New();
        if (root->views == NULL) {
            goto done;
        }
    }
    view = Py_XNewRef(PyDict_GetItemWithError(root->views, key));
    if (view == NULL && !PyErr_Occurred()) {
        view = py_mesh_make(Py_TYPE(root), root->native, root, layout,
                            root->device_type, names, specs, root->has_groups);
        layout = NULL;
        if (view != NULL && PyDict_SetItem(root->views, key, view) < 0) {
            Py_CLEAR(view);
        }
    }

done:
    dm_layout_free(layout);
    Py_XDECREF(bytes);
    Py_XDECREF(key);
    return view;
}

/* --- slicing -------------------------------------------------------------------- */

static PyObject *
raise_key_type(py_mesh *self, PyObject *key)
{
    PyErr_Format(
        PyExc_TypeError,
        "a mesh is sliced by dim names (one, or a tuple or list of them), got %R; "
        "the names are %R, and get_group(), size() and get_local_rank() also "
        "take an index",
        key, self->names);
    return NULL;
}

/* The key as a tuple of str. */
static PyObject *
names_of_key(py_mesh *self, PyObject *key)
{
    if (PyUnicode_Check(key)) {
        return PyTuple_Pack(1, key);
    }
    if (!PyTuple_Check(key) && !PyList_Check(key)) {
        return raise_key_type(self, key);
    }
    PyObject *names = PySequence_Tuple(key);
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_GET_SIZE(names); i++) {
        if (!PyUnicode_Check(PyTuple_GET_ITEM(names, i))) {
            Py_DECREF(names);
            return raise_key_type(self, key);
        }
    }
    return names;
}

static PyObject *
raise_invalid_names(py_mesh *self, PyObject *names)
{
    PyObject *valid = PySequence_List(self->names);
    if (valid != NULL && self->flattened != NULL) {
        PyObject *more = PyDict_Keys(self->flattened);
        if (more != NULL) {
            Py_SETREF(valid, PySequence_Concat(valid, more));
            Py_DECREF(more);
        }
    }
    if (valid != NULL) {
        PyErr_Format(
            PyExc_KeyError,
            "Invalid mesh_dim_names %R specified. Valid mesh_dim_names are %R.", names,
            valid);
        Py_DECREF(valid);
    }
    return NULL;
}

/* The mesh and dim that a name means in a slice of self: an own dim, or, in a root, a
 * flattened one. 1 found, 0 not, -1 error. */
static int
find_name(py_mesh *self, PyObject *name, py_mesh **mesh, int *dim)
{
    *mesh = self;
    *dim = py_mesh_own_dim(self, name);
    if (*dim >= 0) {
        return 1;
    }
    if (self->flattened == NULL) { /* views have none */
        return 0;
    }
    PyObject *found = PyDict_GetItemWithError(self->flattened, name);
    if (found == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    *mesh = (py_mesh *)found;
    *dim = 0;
    return 1;
}

dm_status
py_mesh_gather_dims(py_mesh *const *meshes, const int *dims, int n, dm_layout **out,
                    dm_error *err)
{
    dm_layout *parts[PY_MESH_MAX_NDIM] = {NULL};
    dm_status status = DM_OK;
    for (int i = 0; i < n && status == DM_OK; i++) {
        status = dm_layout_select(meshes[i]->layout, &dims[i], 1, &parts[i], err);
    }
    if (status == DM_OK) {
        status = dm_layout_concatenate((const dm_layout *const *)parts, n, out, err);
    }
    for (int i = 0; i < n; i++) {
        dm_layout_free(parts[i]);
    }
    return status;
}

/* Dims of this mesh in its own order, whatever that is (permute). */
static bool
own_in_order(py_mesh *self, py_mesh *const *meshes, const int *dims, int n)
{
    bool ordered = true;
    for (int i = 0; i < n && ordered; i++) {
        ordered = meshes[i] == self && (i == 0 || dims[i - 1] <= dims[i]);
    }
    return ordered;
}

static bool
has_repeats(PyObject *names)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
        for (Py_ssize_t j = 0; j < i; j++) {
            if (PyUnicode_Compare(PyTuple_GET_ITEM(names, i),
                                  PyTuple_GET_ITEM(names, j)) == 0) {
                return true;
            }
        }
    }
    return false;
}

/* A slice of more than itself: names are known to be str. */
static PyObject *
slice_dims(py_mesh *self, PyObject *names)
{
    py_mesh *meshes[PY_MESH_MAX_NDIM];
    int dims[PY_MESH_MAX_NDIM];
    Py_ssize_t n = PyTuple_GET_SIZE(names);
    if (n == 0 || n > PY_MESH_MAX_NDIM) {
        return raise_invalid_names(self, names);
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        int found = find_name(self, PyTuple_GET_ITEM(names, i), &meshes[i], &dims[i]);
        if (found <= 0) {
            return found < 0 ? NULL : raise_invalid_names(self, names);
        }
    }
    py_state *state = py_state_of_type(Py_TYPE(self));
    dm_layout *layout = NULL;
    dm_error err = DM_ERROR_INIT;
    if (state == NULL) {
        return NULL;
    }
    if (py_mesh_gather_dims(meshes, dims, (int)n, &layout, &err) != DM_OK) {
        return py_raise(state, &err);
    }
    if (!dm_layout_is_sorted(layout) && !own_in_order(self, meshes, dims, (int)n)) {
        PyErr_Format(
            PyExc_KeyError,
            "Invalid mesh_dim_names %R specified. Mesh dim indices should be in "
            "ascending order.",
            names);
        dm_layout_free(layout);
        return NULL;
    }
    if (!dm_layout_is_orthogonal(layout) || has_repeats(names)) {
        PyErr_Format(PyExc_RuntimeError,
                     "Slicing overlapping dim_names %R is not allowed.", names);
        dm_layout_free(layout);
        return NULL;
    }
    PyObject *view = NULL;
    PyObject *own = PyTuple_New(n); /* the names as the dims have them */
    PyObject *specs = PyTuple_New(n);
    for (Py_ssize_t i = 0; i < n && own != NULL && specs != NULL; i++) {
        PyObject *name = PyTuple_GET_ITEM(meshes[i]->names, dims[i]);
        PyObject *spec = PyTuple_GET_ITEM(meshes[i]->specs, dims[i]);
        PyTuple_SET_ITEM(own, i, Py_NewRef(name));
        PyTuple_SET_ITEM(specs, i, Py_NewRef(spec));
    }
    if (own != NULL && specs != NULL) {
        view = py_mesh_view(self, layout, own, specs);
        layout = NULL;
    }
    dm_layout_free(layout);
    Py_XDECREF(own);
    Py_XDECREF(specs);
    return view;
}

/* Remembers a slice under the key as it was written, so that the next look-up is one
 * dict access. A mesh is not its own slice there: that would be a cycle for nothing. */
static int
remember_slice(py_mesh *self, PyObject *key, PyObject *view)
{
    if (view == (PyObject *)self ||
        (!PyUnicode_CheckExact(key) && !PyTuple_CheckExact(key))) {
        return 0;
    }
    if (self->slices == NULL) {
        self->slices = PyDict_New();
        if (self->slices == NULL) {
            return -1;
        }
    }
    return PyDict_SetItem(self->slices, key, view);
}

PyObject *
py_mesh_slice(py_mesh *self, PyObject *key)
{
    if (py_mesh_check(self) < 0) {
        return NULL;
    }
    if (self->names == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "Cannot slice a DeviceMesh without mesh_dim_names!");
        return NULL;
    }
    PyObject *names = names_of_key(self, key);
    if (names == NULL) {
        return NULL;
    }
    PyObject *view = NULL;
    int own = PyObject_RichCompareBool(names, self->names, Py_EQ);
    if (own == 1) {
        view = Py_NewRef((PyObject *)self);
    }
    else if (own == 0) {
        view = slice_dims(self, names);
    }
    Py_DECREF(names);
    if (view != NULL && remember_slice(self, key, view) < 0) {
        Py_CLEAR(view);
    }
    return view;
}

/* What is asked for per dim: backends, options, time-outs. */
#include "python/py_mesh.h"

#include <string.h>

#include "python/py_error.h"
#include "python/py_wait.h"

/* "cpu:gloo,cuda:nccl" -> the entry of the device type; a plain name -> itself. NULL
 * with an exception when there is no entry for it. */
static PyObject *
backend_of_device(PyObject *text, PyObject *device_type)
{
    Py_ssize_t colon = PyUnicode_FindChar(text, ':', 0, PyUnicode_GET_LENGTH(text), 1);
    if (colon == -1) {
        return PyUnicode_FromObject(text);
    }
    PyObject *comma = PyUnicode_FromString(",");
    PyObject *parts = comma == NULL ? NULL : PyUnicode_Split(text, comma, -1);
    Py_XDECREF(comma);
    if (parts == NULL) {
        return NULL;
    }
    PyObject *found = NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parts) && found == NULL; i++) {
        PyObject *part = PyList_GET_ITEM(parts, i);
        Py_ssize_t length = PyUnicode_GET_LENGTH(part);
        colon = PyUnicode_FindChar(part, ':', 0, length, 1);
        if (colon < 0) {
            continue;
        }
        PyObject *device = PyUnicode_Substring(part, 0, colon);
        if (device == NULL) {
            break;
        }
        if (PyUnicode_Compare(device, device_type) == 0) {
            found = PyUnicode_Substring(part, colon + 1, length);
        }
        Py_DECREF(device);
    }
    Py_DECREF(parts);
    if (found == NULL && !PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "backend %R names none for device type %R", text,
                     device_type);
    }
    return found;
}

/* Known, without loading the library of a backend that may never be used. */
static int
check_backend(py_state *state, PyObject *backend)
{
    const char *name = PyUnicode_AsUTF8(backend);
    if (name == NULL) {
        return -1;
    }
    if (strcmp(name, "gloo") == 0 || strcmp(name, "nccl") == 0) {
        return 0;
    }
    const dm_backend *table = NULL;
    dm_error err = DM_ERROR_INIT;
    if (dm_backend_find(name, &table, &err) != DM_OK) {
        return py_raise_int(state, &err);
    }
    return 0;
}

/* A backend name or None -> *backend (new reference). */
static int
parse_backend(py_state *state, PyObject *value, PyObject *device_type,
              PyObject **backend)
{
    if (value == Py_None) {
        *backend = Py_NewRef(Py_None);
        return 0;
    }
    if (!PyUnicode_Check(value)) {
        PyErr_Format(PyExc_TypeError,
                     "backend_override: a backend must be a name or None, got %R",
                     value);
        return -1;
    }
    PyObject *name = backend_of_device(value, device_type);
    if (name == NULL) {
        return -1;
    }
    if (check_backend(state, name) < 0) {
        Py_DECREF(name);
        return -1;
    }
    *backend = name;
    return 0;
}

/* The time-out of options: `_timeout` (torch's spelling) or `timeout`. New reference,
 * Py_None where there is none; NULL on error or where neither attribute exists. */
static PyObject *
options_timeout(py_state *state, PyObject *options)
{
    PyObject *timeout = py_mesh_get_optional(options, state->name_private_timeout);
    if (timeout == NULL && !PyErr_Occurred()) {
        timeout = py_mesh_get_optional(options, state->name_timeout);
    }
    return timeout;
}

static PyObject *
timeout_as_int(PyObject *timeout)
{
    int64_t ns;
    if (py_timeout_parse(timeout, "timeout", &ns) < 0) {
        return NULL;
    }
    return PyLong_FromLongLong(ns);
}

/* Options -> backend name (None unless they say one) and time-out (None unless ...).
 * Both new references. */
static int
parse_options(py_state *state, PyObject *options, PyObject *device_type,
              PyObject **backend, PyObject **timeout)
{
    PyObject *name = NULL;
    PyObject *limit = options_timeout(state, options);
    if (limit == NULL && PyErr_Occurred()) {
        return -1;
    }
    name = py_mesh_get_optional(options, state->name_backend);
    if (name == NULL && PyErr_Occurred()) {
        goto error;
    }
    if (name == NULL && limit == NULL) {
        PyErr_Format(PyExc_TypeError,
                     "backend_override: expected a backend name, options, or (name, "
                     "options), got %R",
                     options);
        goto error;
    }
    if (limit != NULL && limit != Py_None) {
        Py_SETREF(limit, timeout_as_int(limit));
        if (limit == NULL) {
            goto error;
        }
    }
    if (name == NULL || (PyUnicode_Check(name) && PyUnicode_GET_LENGTH(name) == 0)) {
        Py_XSETREF(name, Py_NewRef(Py_None));
    }
    PyObject *parsed = NULL;
    if (parse_backend(state, name, device_type, &parsed) < 0) {
        goto error;
    }
    Py_DECREF(name);
    *backend = parsed;
    *timeout = limit != NULL ? limit : Py_NewRef(Py_None);
    return 0;

error:
    Py_XDECREF(name);
    Py_XDECREF(limit);
    return -1;
}

/* (name or None, options or None) */
static int
parse_pair(py_state *state, PyObject *pair, PyObject *device_type, PyObject **backend,
           PyObject **timeout)
{
    PyObject *first = PySequence_GetItem(pair, 0);
    PyObject *second = PySequence_GetItem(pair, 1);
    PyObject *name = NULL, *own_name = NULL, *limit = NULL;
    int result = -1;
    if (first == NULL || second == NULL ||
        parse_backend(state, first, device_type, &name) < 0) {
        goto done;
    }
    if (second != Py_None &&
        parse_options(state, second, device_type, &own_name, &limit) < 0) {
        goto done;
    }
    if (name == Py_None && own_name != NULL) {
        Py_SETREF(name, Py_NewRef(own_name));
    }
    *backend = Py_NewRef(name);
    *timeout = limit != NULL ? Py_NewRef(limit) : Py_NewRef(Py_None);
    result = 0;

done:
    Py_XDECREF(first);
    Py_XDECREF(second);
    Py_XDECREF(name);
    Py_XDECREF(own_name);
    Py_XDECREF(limit);
    return result;
}

PyObject *
py_mesh_spec_parse(py_state *state, PyObject *override, PyObject *device_type,
                   PyObject *inherited)
{
    PyObject *backend = NULL, *timeout = NULL;
    int failed;
    if (override == NULL || override == Py_None || PyUnicode_Check(override)) {
        timeout = Py_NewRef(Py_None);
        failed = parse_backend(state, override == NULL ? Py_None : override,
                               device_type, &backend);
    }
    else if (PyTuple_Check(override) || PyList_Check(override)) {
        if (PySequence_Size(override) != 2) {
            PyErr_Format(PyExc_TypeError,
                         "backend_override: expected (name, options), got %R",
                         override);
            return NULL;
        }
        failed = parse_pair(state, override, device_type, &backend, &timeout);
    }
    else {
        failed = parse_options(state, override, device_type, &backend, &timeout);
    }
    PyObject *spec = NULL;
    if (failed == 0) {
        spec = Py_BuildValue("(OsO)", backend, "",
                             timeout == Py_None ? inherited : timeout);
    }
    Py_XDECREF(backend);
    Py_XDECREF(timeout);
    return spec;
}

/* names as in error texts: () where there are none. */
static PyObject *
names_or_empty(PyObject *names)
{
    return names != NULL ? Py_NewRef(names) : PyTuple_New(0);
}

/* dict[index or name] for each dim; every key must have been used. *values gets `ndim`
 * borrowed entries, NULL where there is none. */
static int
spread_dict(PyObject *dict, const char *what, int ndim, PyObject *names,
            PyObject **values)
{
    Py_ssize_t used = 0;
    for (int d = 0; d < ndim; d++) {
        PyObject *name = names != NULL ? PyTuple_GET_ITEM(names, d) : NULL;
        PyObject *index = PyLong_FromLong(d);
        if (index == NULL) {
            return -1;
        }
        PyObject *by_index = PyDict_GetItemWithError(dict, index);
        Py_DECREF(index);
        PyObject *by_name = NULL;
        if (name != NULL && !PyErr_Occurred()) {
            by_name = PyDict_GetItemWithError(dict, name);
        }
        if (PyErr_Occurred()) {
            return -1;
        }
        if (by_index != NULL && by_name != NULL) {
            PyErr_Format(PyExc_RuntimeError,
                         "Found redundant dim index %d and name %U in %s", d, name,
                         what);
            return -1;
        }
        values[d] = by_index != NULL ? by_index : by_name;
        used += values[d] != NULL;
    }
    return used == PyDict_GET_SIZE(dict) ? 0 : 1;
}

/* The keys that are neither a dim's name nor its index. */
static int
raise_invalid_keys(PyObject *dict, const char *what, int ndim, PyObject *names)
{
    PyObject *bad = PyDict_Keys(dict);
    PyObject *known = names_or_empty(names);
    if (bad == NULL || known == NULL) {
        goto done;
    }
    for (Py_ssize_t i = PyList_GET_SIZE(bad) - 1; i >= 0; i--) {
        PyObject *key = PyList_GET_ITEM(bad, i);
        int is_known = PySequence_Contains(known, key);
        if (is_known == 0 && PyLong_Check(key)) {
            int overflow;
            long index = PyLong_AsLongAndOverflow(key, &overflow);
            is_known = overflow == 0 && index >= 0 && index < ndim;
        }
        if (is_known < 0 || (is_known && PySequence_DelItem(bad, i) < 0)) {
            goto done;
        }
    }
    PyErr_Format(PyExc_RuntimeError,
                 "Found invalid keys in %s: got %R, expected integers in range [0, %d) "
                 "or one of %R",
                 what, bad, ndim, known);

done:
    Py_XDECREF(bad);
    Py_XDECREF(known);
    return -1;
}

/* Values per dim, borrowed from `dict`, which the caller keeps. */
static int
values_by_dim(PyObject *dict, const char *what, int ndim, PyObject *names,
              PyObject **values)
{
    int result = spread_dict(dict, what, ndim, names, values);
    return result <= 0 ? result : raise_invalid_keys(dict, what, ndim, names);
}

/* Time-outs per dim as int or None: new references, which the caller releases also
 * on failure. */
static int
timeouts_by_dim(PyObject *timeout, int ndim, PyObject *names, PyObject *inherited,
                PyObject **timeouts)
{
    PyObject *values[PY_MESH_MAX_NDIM] = {NULL};
    PyObject *shared = NULL, *keep = NULL;
    int result = -1;
    if (timeout == NULL || timeout == Py_None) {
        shared = Py_NewRef(inherited);
    }
    else if (PyDict_Check(timeout)) {
        shared = Py_NewRef(inherited);
        keep = PyDict_Copy(timeout);
        if (keep == NULL || values_by_dim(keep, "timeout", ndim, names, values) < 0) {
            goto done;
        }
    }
    else {
        shared = timeout_as_int(timeout);
        if (shared == NULL) {
            goto done;
        }
    }
    result = 0;
    for (int d = 0; d < ndim && result == 0; d++) {
        timeouts[d] = values[d] != NULL ? timeout_as_int(values[d]) : Py_NewRef(shared);
        result = timeouts[d] != NULL ? 0 : -1;
    }

done:
    Py_XDECREF(keep);
    Py_XDECREF(shared);
    return result;
}

/* Overrides per dim from a dict or a sequence; borrowed from *keep, which the caller
 * releases. */
static int
overrides_by_dim(PyObject *overrides, int ndim, PyObject *names, PyObject **values,
                 PyObject **keep)
{
    if (overrides == NULL || overrides == Py_None) {
        return 0;
    }
    if (PyDict_Check(overrides)) {
        *keep = PyDict_Copy(overrides);
        if (*keep == NULL) {
            return -1;
        }
        return values_by_dim(*keep, "backend_override", ndim, names, values);
    }
    if (PyUnicode_Check(overrides)) {
        PyErr_Format(
            PyExc_TypeError,
            "backend_override must be a dict such as {0: %R} (or one entry per "
            "dim), got the str %R",
            overrides, overrides);
        return -1;
    }
    *keep = PySequence_Tuple(overrides);
    if (*keep == NULL) {
        return -1;
    }
    if (PyTuple_GET_SIZE(*keep) != ndim) {
        PyErr_Format(PyExc_ValueError,
                     "backend_override should have the same length as the number of "
                     "mesh dimensions, but got %zd and %d.",
                     PyTuple_GET_SIZE(*keep), ndim);
        return -1;
    }
    for (int d = 0; d < ndim; d++) {
        values[d] = PyTuple_GET_ITEM(*keep, d);
    }
    return 0;
}

PyObject *
py_mesh_specs_parse(py_state *state, PyObject *overrides, PyObject *timeout, int ndim,
                    PyObject *names, PyObject *device_type, PyObject *inherited)
{
    PyObject *values[PY_MESH_MAX_NDIM] = {NULL};
    PyObject *timeouts[PY_MESH_MAX_NDIM] = {NULL};
    PyObject *keep = NULL, *specs = NULL;
    if (overrides_by_dim(overrides, ndim, names, values, &keep) < 0 ||
        timeouts_by_dim(timeout, ndim, names, inherited, timeouts) < 0) {
        goto done;
    }
    specs = PyTuple_New(ndim);
    for (int d = 0; d < ndim && specs != NULL; d++) {
        PyObject *spec = py_mesh_spec_parse(state, values[d], device_type, timeouts[d]);
        if (spec == NULL) {
            Py_CLEAR(specs);
            break;
        }
        PyTuple_SET_ITEM(specs, d, spec);
    }

done:
    for (int d = 0; d < ndim; d++) {
        Py_XDECREF(timeouts[d]);
    }
    Py_XDECREF(keep);
    return specs;
}

/* Methods of Store about several keys: see py_store_call.h. */
#include "python/py_store_call.h"

#include "base/dm_alloc.h"
#include "python/py_args.h"
#include "python/py_store_args.h"

/* --- several keys -------------------------------------------------------------------------- */

const char py_store_check_doc[] =
    PyDoc_STR("check($self, /, keys)\n"
              "--\n"
              "\n"
              "Whether all of `keys` are there now (values, or queues that are not "
              "empty).");

PyObject *
py_store_check(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"keys"};
    static const py_params params = {"check", names, 1, 1, 1};
    PyObject *given;
    py_store_call call;
    py_store_keys keys;
    if (py_args_bind(&params, args, nargs, kwnames, &given) < 0 ||
        py_store_call_init(&call, op) < 0 ||
        py_store_keys_init(&keys, given, "keys") < 0) {
        return NULL;
    }
    bool ready = false;
    const dm_wait *wait = py_store_call_start(&call, py_store_timeout_of(op));
    dm_status status =
        dm_store_check(call.store, keys.texts, keys.n, wait, &ready, &call.err);
    int rc = py_store_call_stop(&call, status);
    py_store_keys_fini(&keys);
    return rc < 0 ? NULL : PyBool_FromLong(ready);
}

const char py_store_wait_doc[] =
    PyDoc_STR("wait($self, /, keys, timeout=None)\n"
              "--\n"
              "\n"
              "Waits until all of `keys` are there.\n"
              "\n"
              "Args:\n"
              "    keys: sequence of str.\n"
              "    timeout: seconds or a timedelta; None takes the store's.\n"
              "\n"
              "Raises:\n"
              "    GroupTimeoutError: the text names the keys that are missing.\n");

PyObject *
py_store_wait(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"keys", "timeout"};
    static const py_params params = {"wait", names, 2, 1, 2};
    PyObject *given[2] = {NULL, NULL};
    py_store_call call;
    py_store_keys keys;
    int64_t timeout_ns;
    if (py_args_bind(&params, args, nargs, kwnames, given) < 0 ||
        py_store_parse_timeout(op, given[1], &timeout_ns) < 0 ||
        py_store_call_init(&call, op) < 0 ||
        py_store_keys_init(&keys, given[0], "keys") < 0) {
        return NULL;
    }
    const dm_wait *wait = py_store_call_start(&call, timeout_ns);
    dm_status status = dm_store_wait(call.store, keys.texts, keys.n, wait, &call.err);
    int rc = py_store_call_stop(&call, status);
    py_store_keys_fini(&keys);
    if (rc < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

const char py_store_wait_unless_doc[] =
    PyDoc_STR("wait_unless($self, /, keys, unless, timeout=None)\n"
              "--\n"
              "\n"
              "As wait(), but ends with PeerError as soon as one of the keys in "
              "`unless` is there\n"
              "while one of `keys` is not; the text is that key's value. See will().");

PyObject *
py_store_wait_unless(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                     PyObject *kwnames)
{
    static const char *const names[] = {"keys", "unless", "timeout"};
    static const py_params params = {"wait_unless", names, 3, 2, 3};
    PyObject *given[3] = {NULL, NULL, NULL};
    py_store_call call;
    py_store_keys keys, unless;
    int64_t timeout_ns;
    if (py_args_bind(&params, args, nargs, kwnames, given) < 0 ||
        py_store_parse_timeout(op, given[2], &timeout_ns) < 0 ||
        py_store_call_init(&call, op) < 0 ||
        py_store_keys_init(&keys, given[0], "keys") < 0) {
        return NULL;
    }
    if (py_store_keys_init(&unless, given[1], "unless") < 0) {
        py_store_keys_fini(&keys);
        return NULL;
    }
    const dm_wait *wait = py_store_call_start(&call, timeout_ns);
    dm_status status = dm_store_wait_unless(call.store, keys.texts, keys.n,
                                            unless.texts, unless.n, wait, &call.err);
    int rc = py_store_call_stop(&call, status);
    py_store_keys_fini(&keys);
    py_store_keys_fini(&unless);
    if (rc < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* A list of bytes (or of str) from `n` values; frees them and the array. */
static PyObject *
take_list(dm_bytes *values, size_t n, bool as_text)
{
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; i < n; i++) {
        PyObject *item = NULL;
        if (list == NULL) {
            dm_bytes_free(&values[i]);
            continue;
        }
        if (as_text) {
            /* Other clients may have made keys of any bytes. */
            item = PyUnicode_DecodeUTF8(values[i].data, (Py_ssize_t)values[i].size,
                                        "surrogateescape");
            dm_bytes_free(&values[i]);
        }
        else {
            item = py_store_take_bytes(&values[i]);
        }
        if (item == NULL) {
            Py_CLEAR(list);
            continue;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    dm_free(values);
    return list;
}

const char py_store_multi_get_doc[] =
    PyDoc_STR("multi_get($self, /, keys)\n"
              "--\n"
              "\n"
              "The values of `keys` as a list of bytes; waits for all of them.");

PyObject *
py_store_multi_get(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                   PyObject *kwnames)
{
    static const char *const names[] = {"keys"};
    static const py_params params = {"multi_get", names, 1, 1, 1};
    PyObject *given;
    py_store_call call;
    py_store_keys keys;
    if (py_args_bind(&params, args, nargs, kwnames, &given) < 0 ||
        py_store_call_init(&call, op) < 0 ||
        py_store_keys_init(&keys, given, "keys") < 0) {
        return NULL;
    }
    size_t n = keys.n;
    dm_bytes *values = dm_calloc(n, sizeof(dm_bytes));
    if (values == NULL) {
        py_store_keys_fini(&keys);
        return PyErr_NoMemory();
    }
    const dm_wait *wait = py_store_call_start(&call, py_store_timeout_of(op));
    dm_status status =
        dm_store_multi_get(call.store, keys.texts, n, wait, values, &call.err);
    int rc = py_store_call_stop(&call, status);
    py_store_keys_fini(&keys);
    if (rc < 0) {
        dm_free(values);
        return NULL;
    }
    return take_list(values, n, false);
}

/* The values of multi_set. */
typedef struct value_list {
    PyObject *tuple;
    py_store_value *values;
    dm_bytes *bytes; /* the same, as the core wants them */
    size_t n;
} value_list;

static void
value_list_fini(value_list *list)
{
    while (list->n > 0) {
        py_store_value_fini(&list->values[--list->n]);
    }
    PyMem_Free(list->values);
    PyMem_Free(list->bytes);
    Py_CLEAR(list->tuple);
}

static int
value_list_init(value_list *list, PyObject *object, size_t n)
{
    *list = (value_list){0};
    list->tuple = PyUnicode_Check(object) || PyBytes_Check(object)
                      ? NULL
                      : PySequence_Tuple(object);
    if (list->tuple == NULL) {
        if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError,
                         "values must be a sequence of str or bytes, got %R", object);
        }
        return -1;
    }
    if ((size_t)PyTuple_GET_SIZE(list->tuple) != n) {
        PyErr_Format(PyExc_ValueError,
                     "keys and values must have the same length, got %zu and %zd", n,
                     PyTuple_GET_SIZE(list->tuple));
        goto fail;
    }
    list->values = PyMem_New(py_store_value, n);
    list->bytes = PyMem_New(dm_bytes, n);
    if (list->values == NULL || list->bytes == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    for (; list->n < n; list->n++) {
        py_store_value *value = &list->values[list->n];
        PyObject *item = PyTuple_GET_ITEM(list->tuple, (Py_ssize_t)list->n);
        if (py_store_value_init(value, item, "values") < 0) {
            goto fail;
        }
        list->bytes[list->n] = (dm_bytes){(char *)value->data, value->size};
    }
    return 0;

fail:
    value_list_fini(list);
    return -1;
}

const char py_store_multi_set_doc[] =
    PyDoc_STR("multi_set($self, /, keys, values)\n"
              "--\n"
              "\n"
              "Sets each of `keys` to the value at the same place in `values`.\n"
              "\n"
              "Raises:\n"
              "    ValueError: the lengths differ.\n");

PyObject *
py_store_multi_set(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                   PyObject *kwnames)
{
    static const char *const names[] = {"keys", "values"};
    static const py_params params = {"multi_set", names, 2, 2, 2};
    PyObject *given[2];
    py_store_call call;
    py_store_keys keys;
    value_list values;
    if (py_args_bind(&params, args, nargs, kwnames, given) < 0 ||
        py_store_call_init(&call, op) < 0 ||
        py_store_keys_init(&keys, given[0], "keys") < 0) {
        return NULL;
    }
    if (value_list_init(&values, given[1], keys.n) < 0) {
        py_store_keys_fini(&keys);
        return NULL;
    }
    const dm_wait *wait = py_store_call_start(&call, py_store_timeout_of(op));
    dm_status status = dm_store_multi_set(call.store, keys.texts, values.bytes, keys.n,
                                          wait, &call.err);
    int rc = py_store_call_stop(&call, status);
    value_list_fini(&values);
    py_store_keys_fini(&keys);
    if (rc < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* --- all keys, queues, barrier --------------------------------------------------------------- */

const char py_store_num_keys_doc[] =
    PyDoc_STR("num_keys($self, /)\n"
              "--\n"
              "\n"
              "Number of keys that have a value, in the whole store also when asked "
              "through a\n"
              "PrefixStore (as in torch).");

PyObject *
py_store_num_keys(PyObject *op, PyObject *Py_UNUSED(args))
{
    py_store_call call;
    if (py_store_call_init(&call, op) < 0) {
        return NULL;
    }
    int64_t n = 0;
    const dm_wait *wait = py_store_call_start(&call, py_store_timeout_of(op));
    dm_status status = dm_store_num_keys(call.store, wait, &n, &call.err);
    return py_store_call_stop(&call, status) < 0 ? NULL : PyLong_FromLongLong(n);
}

const char py_store_list_keys_doc[] =
    PyDoc_STR("list_keys($self, /)\n"
              "--\n"
              "\n"
              "The keys that have a value, as a list of str in no order.");

PyObject *
py_store_list_keys(PyObject *op, PyObject *Py_UNUSED(args))
{
    py_store_call call;
    if (py_store_call_init(&call, op) < 0) {
        return NULL;
    }
    dm_bytes *keys = NULL;
    size_t n = 0;
    const dm_wait *wait = py_store_call_start(&call, py_store_timeout_of(op));
    dm_status status = dm_store_list_keys(call.store, wait, &keys, &n, &call.err);
    return py_store_call_stop(&call, status) < 0 ? NULL : take_list(keys, n, true);
}

const char py_store_barrier_doc[] =
    PyDoc_STR("barrier($self, /, key, world_size, timeout=None)\n"
              "--\n"
              "\n"
              "Returns when `world_size` callers have come to `key`. "
              "The same callers may use it\n"
              "again at once (torch's can be used once).\n"
              "\n"
              "Raises:\n"
              "    GroupTimeoutError: not all have come in time.\n");

PyObject *
py_store_barrier(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *kwnames)
{
    static const char *const names[] = {"key", "world_size", "timeout"};
    static const py_params params = {"barrier", names, 3, 2, 3};
    PyObject *given[3] = {NULL, NULL, NULL};
    py_store_call call;
    int64_t world = 0;
    int64_t timeout_ns;
    if (py_args_bind(&params, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    const char *key = py_store_key(given[0], "key");
    if (key == NULL || py_args_int(given[1], "world_size", 1, INT32_MAX, &world) < 0 ||
        py_store_parse_timeout(op, given[2], &timeout_ns) < 0 ||
        py_store_call_init(&call, op) < 0) {
        return NULL;
    }
    const dm_wait *wait = py_store_call_start(&call, timeout_ns);
    dm_status status =
        dm_store_barrier(call.store, key, (int32_t)world, wait, &call.err);
    if (py_store_call_stop(&call, status) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

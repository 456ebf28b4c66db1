/* The base type Store: the methods that all stores have. See py_store.h.
 *
 * A native handle: no Python references, so no part in garbage collection. Each call
 * runs without the GIL and looks at signals while it waits; the arguments are kept
 * alive by the caller or by what was made from them.
 */
#include "python/py_store.h"

#include <datetime.h>
#include <structmember.h>

#include "base/dm_alloc.h"
#include "python/py_args.h"
#include "python/py_error.h"
#include "python/py_store_args.h"
#include "python/py_store_object.h"
#include "python/py_wait.h"

/* --- one call -------------------------------------------------------------------------- */

typedef struct py_store_call {
    py_state *state;
    dm_store *store;
    py_waiter waiter;
    dm_error err;
} py_store_call;

/* Fills the call; -1 with an exception where there is no store. */
static int
call_init(py_store_call *call, PyObject *op)
{
    py_store *self = (py_store *)op;
    call->state = py_state_of_type(Py_TYPE(op));
    if (call->state == NULL) {
        return -1;
    }
    if (self->store == NULL) {
        PyErr_Format(PyExc_NotImplementedError,
                     "%s is a Store made in Python: it has to implement this method",
                     Py_TYPE(op)->tp_name);
        return -1;
    }
    call->store = self->store;
    return 0;
}

/* Gives the GIL away; the deadline is `timeout_ns` from now. */
static const dm_wait *
call_start(py_store_call *call, int64_t timeout_ns)
{
    py_waiter_start(&call->waiter, dm_clock_deadline(timeout_ns));
    return &call->waiter.wait;
}

/* Takes the GIL back. 0, or -1 with the exception that belongs to the status. */
static int
call_stop(py_store_call *call, dm_status status)
{
    py_waiter_stop(&call->waiter);
    if (status == DM_OK) {
        return 0;
    }
    if (status == DM_ERR_AGAIN) {
        PyErr_SetString(call->state->queue_empty_error, call->err.text);
        return -1;
    }
    return py_raise_int(call->state, &call->err);
}

static int64_t
timeout_of(PyObject *op)
{
    return ((py_store *)op)->timeout_ns;
}

/* The argument `timeout`, where None means the store's. */
static int
parse_timeout(PyObject *op, PyObject *object, int64_t *timeout_ns)
{
    if (object == NULL || object == Py_None) {
        *timeout_ns = timeout_of(op);
        return 0;
    }
    return py_timeout_parse(object, "timeout", timeout_ns);
}

/* --- values ------------------------------------------------------------------------------ */

/* Methods of a key and a value that return None. */
typedef dm_status (*put_call)(dm_store *, const char *, const void *, size_t,
                              const dm_wait *, dm_error *);

static PyObject *
put(PyObject *op, const char *function, put_call call_it, PyObject *const *args,
    Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"key", "value"};
    const py_params params = {function, names, 2, 2, 2};
    PyObject *given[2];
    py_store_call call;
    py_store_value value;
    if (py_args_bind(&params, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    const char *key = py_store_key(given[0], "key");
    if (key == NULL || call_init(&call, op) < 0 ||
        py_store_value_init(&value, given[1], "value") < 0) {
        return NULL;
    }
    const dm_wait *wait = call_start(&call, timeout_of(op));
    dm_status status =
        call_it(call.store, key, value.data, value.size, wait, &call.err);
    int rc = call_stop(&call, status);
    py_store_value_fini(&value);
    if (rc < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* The one argument of methods of a key. */
static const char *
bind_key(const char *function, PyObject *const *args, Py_ssize_t nargs,
         PyObject *kwnames)
{
    static const char *const names[] = {"key"};
    const py_params params = {function, names, 1, 1, 1};
    PyObject *given;
    if (py_args_bind(&params, args, nargs, kwnames, &given) < 0) {
        return NULL;
    }
    return py_store_key(given, "key");
}

PyDoc_STRVAR(store_set_doc,
             "set($self, /, key, value)\n"
             "--\n"
             "\n"
             "Sets `key` to `value` (str or bytes-like), whatever it held before.\n"
             "\n"
             "Raises:\n"
             "    ValueError: key (8191 bytes) or value (8 MiB) too large.\n"
             "    StoreError, ClosedError, GroupTimeoutError: as for every method.\n"
             "\n"
             "Example:\n"
             "    >>> from devicemesh import HashStore\n"
             "    >>> store = HashStore()\n"
             "    >>> store.set('a', '1'); store.get('a')\n"
             "    b'1'\n");

static PyObject *
store_set(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    return put(op, "set", dm_store_set, args, nargs, kwnames);
}

PyDoc_STRVAR(store_append_doc, "append($self, /, key, value)\n"
                               "--\n"
                               "\n"
                               "Appends `value` to what `key` holds, or sets it.");

static PyObject *
store_append(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    return put(op, "append", dm_store_append, args, nargs, kwnames);
}

PyDoc_STRVAR(store_queue_push_doc,
             "queue_push($self, /, key, value)\n"
             "--\n"
             "\n"
             "Puts `value` at the end of the queue `key`. Queues and values are apart: "
             "the\n"
             "same key can name one of each.");

static PyObject *
store_queue_push(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *kwnames)
{
    return put(op, "queue_push", dm_store_queue_push, args, nargs, kwnames);
}

PyDoc_STRVAR(
    store_will_doc,
    "will($self, /, key, value)\n"
    "--\n"
    "\n"
    "Leaves word with the server: should this process go away without close(), it "
    "sets\n"
    "`key` to `value`, and who waits with wait_unless ends at once.\n"
    "\n"
    "Raises:\n"
    "    NotImplementedError: any store but a TCPStore under devicemesh's server.\n");

static PyObject *
store_will(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    return put(op, "will", dm_store_will, args, nargs, kwnames);
}

PyDoc_STRVAR(store_get_doc,
             "get($self, /, key)\n"
             "--\n"
             "\n"
             "The value of `key` as bytes; waits for it up to the store's time-out.\n"
             "\n"
             "Raises:\n"
             "    GroupTimeoutError: nobody has set it in time.\n");

static PyObject *
store_get(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    py_store_call call;
    const char *key = bind_key("get", args, nargs, kwnames);
    if (key == NULL || call_init(&call, op) < 0) {
        return NULL;
    }
    dm_bytes value = {NULL, 0};
    const dm_wait *wait = call_start(&call, timeout_of(op));
    dm_status status = dm_store_get(call.store, key, wait, &value, &call.err);
    return call_stop(&call, status) < 0 ? NULL : py_store_take_bytes(&value);
}

PyDoc_STRVAR(store_add_doc,
             "add($self, /, key, amount)\n"
             "--\n"
             "\n"
             "Adds `amount` to the counter `key` (absent counts as 0); returns the "
             "sum.\n"
             "\n"
             "Raises:\n"
             "    ValueError: the key holds no number, or the sum needs more than 64 "
             "bits.\n");

static PyObject *
store_add(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"key", "amount"};
    static const py_params params = {"add", names, 2, 2, 2};
    PyObject *given[2];
    py_store_call call;
    int64_t amount = 0;
    if (py_args_bind(&params, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    const char *key = py_store_key(given[0], "key");
    if (key == NULL ||
        py_args_int(given[1], "amount", INT64_MIN, INT64_MAX, &amount) < 0 ||
        call_init(&call, op) < 0) {
        return NULL;
    }
    int64_t sum = 0;
    const dm_wait *wait = call_start(&call, timeout_of(op));
    dm_status status = dm_store_add(call.store, key, amount, wait, &sum, &call.err);
    return call_stop(&call, status) < 0 ? NULL : PyLong_FromLongLong(sum);
}

PyDoc_STRVAR(store_compare_set_doc,
             "compare_set($self, /, key, expected_value, desired_value)\n"
             "--\n"
             "\n"
             "Sets `key` to `desired_value` if it holds `expected_value`, or if it is "
             "absent and\n"
             "`expected_value` is empty.\n"
             "\n"
             "Returns:\n"
             "    What the key holds afterwards, as bytes; where it is absent and "
             "stays so, the\n"
             "    expected value, as torch has it.\n");

static PyObject *
store_compare_set(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames)
{
    static const char *const names[] = {"key", "expected_value", "desired_value"};
    static const py_params params = {"compare_set", names, 3, 3, 3};
    PyObject *given[3];
    py_store_call call;
    py_store_value expected, desired;
    if (py_args_bind(&params, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    const char *key = py_store_key(given[0], "key");
    if (key == NULL || call_init(&call, op) < 0 ||
        py_store_value_init(&expected, given[1], "expected_value") < 0) {
        return NULL;
    }
    if (py_store_value_init(&desired, given[2], "desired_value") < 0) {
        py_store_value_fini(&expected);
        return NULL;
    }
    dm_bytes value = {NULL, 0};
    const dm_wait *wait = call_start(&call, timeout_of(op));
    dm_status status =
        dm_store_compare_set(call.store, key, expected.data, expected.size,
                             desired.data, desired.size, wait, &value, &call.err);
    int rc = call_stop(&call, status);
    py_store_value_fini(&expected);
    py_store_value_fini(&desired);
    return rc < 0 ? NULL : py_store_take_bytes(&value);
}

PyDoc_STRVAR(
    store_delete_key_doc,
    "delete_key($self, /, key)\n"
    "--\n"
    "\n"
    "Removes `key`; returns whether it was there. A queue of that name stays.");

static PyObject *
store_delete_key(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *kwnames)
{
    py_store_call call;
    const char *key = bind_key("delete_key", args, nargs, kwnames);
    if (key == NULL || call_init(&call, op) < 0) {
        return NULL;
    }
    bool existed = false;
    const dm_wait *wait = call_start(&call, timeout_of(op));
    dm_status status = dm_store_delete_key(call.store, key, wait, &existed, &call.err);
    return call_stop(&call, status) < 0 ? NULL : PyBool_FromLong(existed);
}

/* --- several keys -------------------------------------------------------------------------- */

PyDoc_STRVAR(store_check_doc,
             "check($self, /, keys)\n"
             "--\n"
             "\n"
             "Whether all of `keys` are there now (values, or queues that are not "
             "empty).");

static PyObject *
store_check(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"keys"};
    static const py_params params = {"check", names, 1, 1, 1};
    PyObject *given;
    py_store_call call;
    py_store_keys keys;
    if (py_args_bind(&params, args, nargs, kwnames, &given) < 0 ||
        call_init(&call, op) < 0 || py_store_keys_init(&keys, given, "keys") < 0) {
        return NULL;
    }
    bool ready = false;
    const dm_wait *wait = call_start(&call, timeout_of(op));
    dm_status status =
        dm_store_check(call.store, keys.texts, keys.n, wait, &ready, &call.err);
    int rc = call_stop(&call, status);
    py_store_keys_fini(&keys);
    return rc < 0 ? NULL : PyBool_FromLong(ready);
}

PyDoc_STRVAR(store_wait_doc,
             "wait($self, /, keys, timeout=None)\n"
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

static PyObject *
store_wait(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"keys", "timeout"};
    static const py_params params = {"wait", names, 2, 1, 2};
    PyObject *given[2] = {NULL, NULL};
    py_store_call call;
    py_store_keys keys;
    int64_t timeout_ns;
    if (py_args_bind(&params, args, nargs, kwnames, given) < 0 ||
        parse_timeout(op, given[1], &timeout_ns) < 0 || call_init(&call, op) < 0 ||
        py_store_keys_init(&keys, given[0], "keys") < 0) {
        return NULL;
    }
    const dm_wait *wait = call_start(&call, timeout_ns);
    dm_status status = dm_store_wait(call.store, keys.texts, keys.n, wait, &call.err);
    int rc = call_stop(&call, status);
    py_store_keys_fini(&keys);
    if (rc < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(store_wait_unless_doc,
             "wait_unless($self, /, keys, unless, timeout=None)\n"
             "--\n"
             "\n"
             "As wait(), but ends with PeerError as soon as one of the keys in "
             "`unless` is there\n"
             "while one of `keys` is not; the text is that key's value. See will().");

static PyObject *
store_wait_unless(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames)
{
    static const char *const names[] = {"keys", "unless", "timeout"};
    static const py_params params = {"wait_unless", names, 3, 2, 3};
    PyObject *given[3] = {NULL, NULL, NULL};
    py_store_call call;
    py_store_keys keys, unless;
    int64_t timeout_ns;
    if (py_args_bind(&params, args, nargs, kwnames, given) < 0 ||
        parse_timeout(op, given[2], &timeout_ns) < 0 || call_init(&call, op) < 0 ||
        py_store_keys_init(&keys, given[0], "keys") < 0) {
        return NULL;
    }
    if (py_store_keys_init(&unless, given[1], "unless") < 0) {
        py_store_keys_fini(&keys);
        return NULL;
    }
    const dm_wait *wait = call_start(&call, timeout_ns);
    dm_status status = dm_store_wait_unless(call.store, keys.texts, keys.n,
                                            unless.texts, unless.n, wait, &call.err);
    int rc = call_stop(&call, status);
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

PyDoc_STRVAR(store_multi_get_doc,
             "multi_get($self, /, keys)\n"
             "--\n"
             "\n"
             "The values of `keys` as a list of bytes; waits for all of them.");

static PyObject *
store_multi_get(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames)
{
    static const char *const names[] = {"keys"};
    static const py_params params = {"multi_get", names, 1, 1, 1};
    PyObject *given;
    py_store_call call;
    py_store_keys keys;
    if (py_args_bind(&params, args, nargs, kwnames, &given) < 0 ||
        call_init(&call, op) < 0 || py_store_keys_init(&keys, given, "keys") < 0) {
        return NULL;
    }
    size_t n = keys.n;
    dm_bytes *values = dm_calloc(n, sizeof(dm_bytes));
    if (values == NULL) {
        py_store_keys_fini(&keys);
        return PyErr_NoMemory();
    }
    const dm_wait *wait = call_start(&call, timeout_of(op));
    dm_status status =
        dm_store_multi_get(call.store, keys.texts, n, wait, values, &call.err);
    int rc = call_stop(&call, status);
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

PyDoc_STRVAR(store_multi_set_doc,
             "multi_set($self, /, keys, values)\n"
             "--\n"
             "\n"
             "Sets each of `keys` to the value at the same place in `values`.\n"
             "\n"
             "Raises:\n"
             "    ValueError: the lengths differ.\n");

static PyObject *
store_multi_set(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames)
{
    static const char *const names[] = {"keys", "values"};
    static const py_params params = {"multi_set", names, 2, 2, 2};
    PyObject *given[2];
    py_store_call call;
    py_store_keys keys;
    value_list values;
    if (py_args_bind(&params, args, nargs, kwnames, given) < 0 ||
        call_init(&call, op) < 0 || py_store_keys_init(&keys, given[0], "keys") < 0) {
        return NULL;
    }
    if (value_list_init(&values, given[1], keys.n) < 0) {
        py_store_keys_fini(&keys);
        return NULL;
    }
    const dm_wait *wait = call_start(&call, timeout_of(op));
    dm_status status = dm_store_multi_set(call.store, keys.texts, values.bytes, keys.n,
                                          wait, &call.err);
    int rc = call_stop(&call, status);
    value_list_fini(&values);
    py_store_keys_fini(&keys);
    if (rc < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* --- all keys, queues, barrier --------------------------------------------------------------- */

PyDoc_STRVAR(store_num_keys_doc,
             "num_keys($self, /)\n"
             "--\n"
             "\n"
             "Number of keys that have a value, in the whole store also when asked "
             "through a\n"
             "PrefixStore (as in torch).");

static PyObject *
store_num_keys(PyObject *op, PyObject *Py_UNUSED(args))
{
    py_store_call call;
    if (call_init(&call, op) < 0) {
        return NULL;
    }
    int64_t n = 0;
    const dm_wait *wait = call_start(&call, timeout_of(op));
    dm_status status = dm_store_num_keys(call.store, wait, &n, &call.err);
    return call_stop(&call, status) < 0 ? NULL : PyLong_FromLongLong(n);
}

PyDoc_STRVAR(store_list_keys_doc,
             "list_keys($self, /)\n"
             "--\n"
             "\n"
             "The keys that have a value, as a list of str in no order.");

static PyObject *
store_list_keys(PyObject *op, PyObject *Py_UNUSED(args))
{
    py_store_call call;
    if (call_init(&call, op) < 0) {
        return NULL;
    }
    dm_bytes *keys = NULL;
    size_t n = 0;
    const dm_wait *wait = call_start(&call, timeout_of(op));
    dm_status status = dm_store_list_keys(call.store, wait, &keys, &n, &call.err);
    return call_stop(&call, status) < 0 ? NULL : take_list(keys, n, true);
}

PyDoc_STRVAR(store_queue_pop_doc,
             "queue_pop($self, /, key, block=True)\n"
             "--\n"
             "\n"
             "Takes the first value out of the queue `key`, as bytes; waits for one "
             "unless\n"
             "`block` is false.\n"
             "\n"
             "Raises:\n"
             "    QueueEmptyError: the queue is empty and `block` is false.\n"
             "    GroupTimeoutError: nothing came in time.\n");

static PyObject *
store_queue_pop(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames)
{
    static const char *const names[] = {"key", "block"};
    static const py_params params = {"queue_pop", names, 2, 1, 2};
    PyObject *given[2] = {NULL, Py_True};
    py_store_call call;
    if (py_args_bind(&params, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    const char *key = py_store_key(given[0], "key");
    int block = key != NULL ? PyObject_IsTrue(given[1]) : -1;
    if (block < 0 || call_init(&call, op) < 0) {
        return NULL;
    }
    dm_bytes value = {NULL, 0};
    const dm_wait *wait = call_start(&call, timeout_of(op));
    dm_status status =
        dm_store_queue_pop(call.store, key, block != 0, wait, &value, &call.err);
    return call_stop(&call, status) < 0 ? NULL : py_store_take_bytes(&value);
}

PyDoc_STRVAR(store_queue_len_doc, "queue_len($self, /, key)\n"
                                  "--\n"
                                  "\n"
                                  "Number of values in the queue `key`.");

static PyObject *
store_queue_len(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames)
{
    py_store_call call;
    const char *key = bind_key("queue_len", args, nargs, kwnames);
    if (key == NULL || call_init(&call, op) < 0) {
        return NULL;
    }
    int64_t n = 0;
    const dm_wait *wait = call_start(&call, timeout_of(op));
    dm_status status = dm_store_queue_len(call.store, key, wait, &n, &call.err);
    return call_stop(&call, status) < 0 ? NULL : PyLong_FromLongLong(n);
}

PyDoc_STRVAR(store_barrier_doc, "barrier($self, /, key, world_size, timeout=None)\n"
                                "--\n"
                                "\n"
                                "Returns when `world_size` callers have come to `key`. "
                                "The same callers may use it\n"
                                "again at once (torch's can be used once).\n"
                                "\n"
                                "Raises:\n"
                                "    GroupTimeoutError: not all have come in time.\n");

static PyObject *
store_barrier(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
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
        parse_timeout(op, given[2], &timeout_ns) < 0 || call_init(&call, op) < 0) {
        return NULL;
    }
    const dm_wait *wait = call_start(&call, timeout_ns);
    dm_status status =
        dm_store_barrier(call.store, key, (int32_t)world, wait, &call.err);
    if (call_stop(&call, status) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* --- the object itself -------------------------------------------------------------------------- */

PyDoc_STRVAR(store_set_timeout_doc,
             "set_timeout($self, /, timeout)\n"
             "--\n"
             "\n"
             "Sets how long calls wait: seconds or a timedelta; None: for ever.");

static PyObject *
store_set_timeout(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames)
{
    static const char *const names[] = {"timeout"};
    static const py_params params = {"set_timeout", names, 1, 1, 1};
    PyObject *given;
    if (py_args_bind(&params, args, nargs, kwnames, &given) < 0 ||
        py_timeout_parse(given, "timeout", &((py_store *)op)->timeout_ns) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* A timedelta, as torch's stores have it. */
static PyObject *
store_get_timeout(PyObject *op, void *Py_UNUSED(closure))
{
    int64_t ns = timeout_of(op);
    if (ns < 0) {
        Py_RETURN_NONE;
    }
    if (PyDateTimeAPI == NULL) {
        PyDateTime_IMPORT;
        if (PyDateTimeAPI == NULL) {
            return NULL;
        }
    }
    int64_t microseconds = ns / 1000;
    int64_t seconds = microseconds / 1000000;
    return PyDelta_FromDSU((int)(seconds / 86400), (int)(seconds % 86400),
                           (int)(microseconds % 1000000));
}

PyDoc_STRVAR(
    store_close_doc,
    "close($self, /)\n"
    "--\n"
    "\n"
    "Ends the use of the store: calls in flight and later ones raise ClosedError; a\n"
    "TCPStore says goodbye (its will is not executed) and, if it serves, stops. A\n"
    "PrefixStore leaves the store under it open. Idempotent; waits for nobody.");

static PyObject *
store_close(PyObject *op, PyObject *Py_UNUSED(args))
{
    py_store *self = (py_store *)op;
    dm_store *store = self->store;
    dm_store_server *server = self->server;
    self->server = NULL;
    Py_BEGIN_ALLOW_THREADS
    if (store != NULL) {
        dm_store_close(store);
    }
    dm_store_server_stop(server);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(store_clone_doc,
             "clone($self, /)\n"
             "--\n"
             "\n"
             "The store itself: its methods may be called by several threads at once.");

static PyObject *
store_self(PyObject *op, PyObject *Py_UNUSED(args))
{
    return Py_NewRef(op);
}

PyDoc_STRVAR(store_extended_doc,
             "has_extended_api($self, /)\n"
             "--\n"
             "\n"
             "Whether append, multi_get and multi_set are there (as torch asks it).");

static PyObject *
store_extended(PyObject *op, PyObject *Py_UNUSED(args))
{
    return PyBool_FromLong(((py_store *)op)->store != NULL);
}

static PyObject *
store_exit(PyObject *op, PyObject *Py_UNUSED(args))
{
    return store_close(op, NULL);
}

static PyObject *
store_reduce(PyObject *op, PyObject *Py_UNUSED(args))
{
    PyErr_Format(PyExc_TypeError,
                 "a %s cannot be pickled: it belongs to one process; make one in each "
                 "process",
                 Py_TYPE(op)->tp_name);
    return NULL;
}

/* Only Python subclasses of Store itself, which bring their own methods. */
static PyObject *
store_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    py_state *state = py_state_of_type(type);
    if (state == NULL) {
        return NULL;
    }
    if (type == state->store_type) {
        PyErr_SetString(PyExc_TypeError,
                        "Store cannot be made: use TCPStore, FileStore, "
                        "HashStore or PrefixStore");
        return NULL;
    }
    return py_store_make(type, NULL, NULL, PY_STORE_TIMEOUT_NS);
}

/* May run twice: once by hand of the collector, once by dealloc. Without close the
 * server takes this for a departure. */
static void
store_finalize(PyObject *op)
{
    py_store *self = (py_store *)op;
    dm_store *store = self->store;
    dm_store_server *server = self->server;
    self->store = NULL;
    self->server = NULL;
    if (store != NULL && store->slot == self) {
        store->slot = NULL;
    }
    dm_store_release(store);
    dm_store_server_stop(server);
}

static void
store_dealloc(PyObject *op)
{
    py_store *self = (py_store *)op;
    if (PyObject_CallFinalizerFromDealloc(op) < 0) {
        return;
    }
    if (self->weak_references != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    PyTypeObject *type = Py_TYPE(op);
    type->tp_free(op);
    Py_DECREF(type);
}

#define METHOD(name)                                                                   \
    {#name, (PyCFunction)(void (*)(void))store_##name, METH_FASTCALL | METH_KEYWORDS,  \
     store_##name##_doc}

static PyMethodDef store_methods[] = {
    METHOD(set),
    METHOD(get),
    METHOD(add),
    METHOD(compare_set),
    METHOD(check),
    METHOD(wait),
    METHOD(wait_unless),
    METHOD(delete_key),
    METHOD(append),
    METHOD(multi_get),
    METHOD(multi_set),
    METHOD(queue_push),
    METHOD(queue_pop),
    METHOD(queue_len),
    METHOD(barrier),
    METHOD(will),
    METHOD(set_timeout),
    {"num_keys", store_num_keys, METH_NOARGS, store_num_keys_doc},
    {"list_keys", store_list_keys, METH_NOARGS, store_list_keys_doc},
    {"close", store_close, METH_NOARGS, store_close_doc},
    {"clone", store_self, METH_NOARGS, store_clone_doc},
    {"has_extended_api", store_extended, METH_NOARGS, store_extended_doc},
    {"__enter__", store_self, METH_NOARGS, NULL},
    {"__exit__", store_exit, METH_VARARGS, NULL},
    {"__reduce__", store_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef store_getset[] = {
    {"timeout", store_get_timeout, NULL,
     "How long calls wait, a timedelta (None: for ever). See set_timeout.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef store_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(py_store, weak_references), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(
    store_doc,
    "Store(*args, **kwargs)\n"
    "--\n"
    "\n"
    "A key-value table that ranks share while they find each other.\n"
    "\n"
    "The base of TCPStore, FileStore, HashStore and PrefixStore, with the methods of\n"
    "torch.distributed.Store. Keys are str, values go in as str or bytes-like and "
    "come\n"
    "out as bytes. Every call runs without the GIL, can be interrupted, and may be "
    "made\n"
    "by several threads at once. Classes made in Python may derive from it and "
    "implement\n"
    "at least set, get, add and wait.\n"
    "\n"
    "Every method raises GroupTimeoutError (also a TimeoutError) after the store's\n"
    "time-out, StoreError when the server is gone, and ClosedError when the store was\n"
    "closed or belongs to the parent of a fork.");

static PyType_Slot store_slots[] = {
    {Py_tp_doc, (void *)store_doc},   {Py_tp_new, store_new},
    {Py_tp_finalize, store_finalize}, {Py_tp_dealloc, store_dealloc},
    {Py_tp_methods, store_methods},   {Py_tp_getset, store_getset},
    {Py_tp_members, store_members},   {0, NULL},
};

static PyType_Spec store_spec = {
    .name = "devicemesh.Store",
    .basicsize = sizeof(py_store),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = store_slots,
};

/* --- for the other files ---------------------------------------------------------------------------- */

PyObject *
py_store_make(PyTypeObject *type, dm_store *store, dm_store_server *server,
              int64_t timeout_ns)
{
    py_store *self = (py_store *)type->tp_alloc(type, 0);
    if (self == NULL) {
        dm_store_release(store);
        dm_store_server_stop(server);
        return NULL;
    }
    self->store = store;
    self->server = server;
    self->timeout_ns = timeout_ns;
    if (store != NULL && store->slot == NULL) {
        store->slot = self;
    }
    return (PyObject *)self;
}

dm_store *
py_store_from_object(py_state *state, PyObject *object, const char *name)
{
    if (PyObject_TypeCheck(object, state->store_type)) {
        py_store *self = (py_store *)object;
        if (self->store != NULL) {
            return dm_store_hold(self->store);
        }
    }
    return py_store_adapter_new(state, object, name);
}

/* The type whose objects hold stores of that kind. */
static PyTypeObject *
type_of_kind(const py_state *state, const char *kind)
{
    switch (kind[0]) {
    case 't':
        return state->tcp_store_type;
    case 'f':
        return state->file_store_type;
    case 'h':
        return state->hash_store_type;
    default:
        return state->prefix_store_type;
    }
}

PyObject *
py_store_wrap(py_state *state, dm_store *store)
{
    PyObject *object = py_store_adapter_object(store);
    if (object == NULL) {
        object = store->slot;
    }
    if (object != NULL) {
        return Py_NewRef(object);
    }
    return py_store_make(type_of_kind(state, dm_store_kind(store)),
                         dm_store_hold(store), NULL, PY_STORE_TIMEOUT_NS);
}

int
py_store_register(PyObject *module)
{
    py_state *state = py_state_of_module(module);
    if (py_state_add_type(module, &store_spec, NULL, &state->store_type) < 0 ||
        py_store_types_register(module) < 0 || py_store_server_register(module) < 0) {
        return -1;
    }
    return 0;
}

/* Methods of Store about one key: values and queues. See py_store_call.h. */
#include "python/py_store_call.h"

#include "python/py_args.h"
#include "python/py_store_args.h"

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
    if (key == NULL || py_store_call_init(&call, op) < 0 ||
        py_store_value_init(&value, given[1], "value") < 0) {
        return NULL;
    }
    const dm_wait *wait = py_store_call_start(&call, py_store_timeout_of(op));
    dm_status status =
        call_it(call.store, key, value.data, value.size, wait, &call.err);
    int rc = py_store_call_stop(&call, status);
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

const char py_store_set_doc[] =
    PyDoc_STR("set($self, /, key, value)\n"
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

PyObject *
py_store_set(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    return put(op, "set", dm_store_set, args, nargs, kwnames);
}

const char py_store_append_doc[] =
    PyDoc_STR("append($self, /, key, value)\n"
              "--\n"
              "\n"
              "Appends `value` to what `key` holds, or sets it.");

PyObject *
py_store_append(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames)
{
    return put(op, "append", dm_store_append, args, nargs, kwnames);
}

const char py_store_queue_push_doc[] = PyDoc_STR(
    "queue_push($self, /, key, value)\n"
    "--\n"
    "\n"
    "Puts `value` at the end of the queue `key`. Queues and values are apart: "
    "the\n"
    "same key can name one of each.");

PyObject *
py_store_queue_push(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                    PyObject *kwnames)
{
    return put(op, "queue_push", dm_store_queue_push, args, nargs, kwnames);
}

const char py_store_will_doc[] = PyDoc_STR(
    "will($self, /, key, value)\n"
    "--\n"
    "\n"
    "Leaves word with the server: should this process go away without close(), it "
    "sets\n"
    "`key` to `value`, and who waits with wait_unless ends at once.\n"
    "\n"
    "Raises:\n"
    "    NotImplementedError: any store but a TCPStore under devicemesh's server.\n");

PyObject *
py_store_will(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    return put(op, "will", dm_store_will, args, nargs, kwnames);
}

const char py_store_get_doc[] =
    PyDoc_STR("get($self, /, key)\n"
              "--\n"
              "\n"
              "The value of `key` as bytes; waits for it up to the store's time-out.\n"
              "\n"
              "Raises:\n"
              "    GroupTimeoutError: nobody has set it in time.\n");

PyObject *
py_store_get(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    py_store_call call;
    const char *key = bind_key("get", args, nargs, kwnames);
    if (key == NULL || py_store_call_init(&call, op) < 0) {
        return NULL;
    }
    dm_bytes value = {NULL, 0};
    const dm_wait *wait = py_store_call_start(&call, py_store_timeout_of(op));
    dm_status status = dm_store_get(call.store, key, wait, &value, &call.err);
    return py_store_call_stop(&call, status) < 0 ? NULL : py_store_take_bytes(&value);
}

const char py_store_add_doc[] =
    PyDoc_STR("add($self, /, key, amount)\n"
              "--\n"
              "\n"
              "Adds `amount` to the counter `key` (absent counts as 0); returns the "
              "sum.\n"
              "\n"
              "Raises:\n"
              "    ValueError: the key holds no number, or the sum needs more than 64 "
              "bits.\n");

PyObject *
py_store_add(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
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
        py_store_call_init(&call, op) < 0) {
        return NULL;
    }
    int64_t sum = 0;
    const dm_wait *wait = py_store_call_start(&call, py_store_timeout_of(op));
    dm_status status = dm_store_add(call.store, key, amount, wait, &sum, &call.err);
    return py_store_call_stop(&call, status) < 0 ? NULL : PyLong_FromLongLong(sum);
}

const char py_store_compare_set_doc[] =
    PyDoc_STR("compare_set($self, /, key, expected_value, desired_value)\n"
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

PyObject *
py_store_compare_set(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
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
    if (key == NULL || py_store_call_init(&call, op) < 0 ||
        py_store_value_init(&expected, given[1], "expected_value") < 0) {
        return NULL;
    }
    if (py_store_value_init(&desired, given[2], "desired_value") < 0) {
        py_store_value_fini(&expected);
        return NULL;
    }
    dm_bytes value = {NULL, 0};
    const dm_wait *wait = py_store_call_start(&call, py_store_timeout_of(op));
    dm_status status =
        dm_store_compare_set(call.store, key, expected.data, expected.size,
                             desired.data, desired.size, wait, &value, &call.err);
    int rc = py_store_call_stop(&call, status);
    py_store_value_fini(&expected);
    py_store_value_fini(&desired);
    return rc < 0 ? NULL : py_store_take_bytes(&value);
}

const char py_store_delete_key_doc[] = PyDoc_STR(
    "delete_key($self, /, key)\n"
    "--\n"
    "\n"
    "Removes `key`; returns whether it was there. A queue of that name stays.");

PyObject *
py_store_delete_key(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                    PyObject *kwnames)
{
    py_store_call call;
    const char *key = bind_key("delete_key", args, nargs, kwnames);
    if (key == NULL || py_store_call_init(&call, op) < 0) {
        return NULL;
    }
    bool existed = false;
    const dm_wait *wait = py_store_call_start(&call, py_store_timeout_of(op));
    dm_status status = dm_store_delete_key(call.store, key, wait, &existed, &call.err);
    return py_store_call_stop(&call, status) < 0 ? NULL : PyBool_FromLong(existed);
}

/* --- queues ------------------------------------------------------------------------------ */

const char py_store_queue_pop_doc[] =
    PyDoc_STR("queue_pop($self, /, key, block=True)\n"
              "--\n"
              "\n"
              "Takes the first value out of the queue `key`, as bytes; waits for one "
              "unless\n"
              "`block` is false.\n"
              "\n"
              "Raises:\n"
              "    QueueEmptyError: the queue is empty and `block` is false.\n"
              "    GroupTimeoutError: nothing came in time.\n");

PyObject *
py_store_queue_pop(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
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
    if (block < 0 || py_store_call_init(&call, op) < 0) {
        return NULL;
    }
    dm_bytes value = {NULL, 0};
    const dm_wait *wait = py_store_call_start(&call, py_store_timeout_of(op));
    dm_status status =
        dm_store_queue_pop(call.store, key, block != 0, wait, &value, &call.err);
    return py_store_call_stop(&call, status) < 0 ? NULL : py_store_take_bytes(&value);
}

const char py_store_queue_len_doc[] = PyDoc_STR("queue_len($self, /, key)\n"
                                                "--\n"
                                                "\n"
                                                "Number of values in the queue `key`.");

PyObject *
py_store_queue_len(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                   PyObject *kwnames)
{
    py_store_call call;
    const char *key = bind_key("queue_len", args, nargs, kwnames);
    if (key == NULL || py_store_call_init(&call, op) < 0) {
        return NULL;
    }
    int64_t n = 0;
    const dm_wait *wait = py_store_call_start(&call, py_store_timeout_of(op));
    dm_status status = dm_store_queue_len(call.store, key, wait, &n, &call.err);
    return py_store_call_stop(&call, status) < 0 ? NULL : PyLong_FromLongLong(n);
}

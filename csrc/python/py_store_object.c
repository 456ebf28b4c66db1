/* Any Python object with torch's Store methods as a dm_store of kind "python".
 *
 * Each call takes the GIL, which callers must not hold a lock of ours for. Waiting is
 * done by looking (check) with growing pauses without the GIL, so that deadlines,
 * interrupts and close hold whatever the object's own time-out is; an object without
 * check is asked to wait in slices. Exceptions as stores raise them become records;
 * any other (signal handlers raise in the object's methods too) is left standing and
 * the call ends with DM_ERR_INTERRUPTED.
 *
 * The reference to the object is not seen by the garbage collector: an object that
 * refers back to the world or store made from it lives for ever.
 */
#include "python/py_store_object.h"

#include <string.h>
#include <time.h>

#include "base/dm_alloc.h"
#include "python/py_store.h"

enum { FIRST_PAUSE_US = 100, LAST_PAUSE_US = 20000 };

typedef struct object_store {
    dm_store base;
    dm_store_ops ops; /* those that the object has */
    PyObject *object; /* owned; used with the GIL */
    atomic_bool closed;
} object_store;

static object_store *
object_of(dm_store *store)
{
    return (object_store *)store;
}

static bool
interpreter_is_ending(void)
{
#if PY_VERSION_HEX >= 0x030d0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
}

/* Takes the GIL. DM_ERR_CLOSED, and not taken, when the store is closed or Python ends. */
static dm_status
enter(object_store *self, PyGILState_STATE *gil, dm_error *err)
{
    /* Relaxed: a call that races with close may go either way. */
    if (atomic_load_explicit(&self->closed, memory_order_relaxed)) {
        dm_error_set(err, DM_ERR_CLOSED, "python store is closed");
        return DM_ERR_CLOSED;
    }
    if (interpreter_is_ending()) {
        dm_error_set(err, DM_ERR_CLOSED,
                     "python store: the interpreter is shutting down");
        return DM_ERR_CLOSED;
    }
    *gil = PyGILState_Ensure();
    return DM_OK;
}

static dm_status
leave(PyGILState_STATE gil, dm_status status)
{
    PyGILState_Release(gil);
    return status;
}

static bool
is_named(PyObject *exception, const char *name)
{
    return strcmp(Py_TYPE(exception)->tp_name, name) == 0;
}

/* The status for an exception as stores raise them; DM_ERR_INTERRUPTED for any other,
 * which signal handlers and mistakes in the object raise. */
static dm_status
status_of(PyObject *exception)
{
    if (is_named(exception, "QueueEmptyError") ||
        is_named(exception, "devicemesh.QueueEmptyError")) {
        return DM_ERR_AGAIN;
    }
    const struct {
        PyObject *type;
        dm_status status;
    } table[] = {
        {PyExc_TimeoutError, DM_ERR_TIMEOUT},
        {PyExc_NotImplementedError, DM_ERR_UNSUPPORTED},
        {PyExc_ValueError, DM_ERR_VALUE},
        {PyExc_KeyError, DM_ERR_KEY},
        {PyExc_MemoryError, DM_ERR_NO_MEMORY},
        {PyExc_OSError, DM_ERR_CONNECTION},
        {PyExc_RuntimeError, DM_ERR_CONNECTION}, /* torch's DistError is one */
    };
    for (size_t i = 0; i < sizeof(table) / sizeof(*table); i++) {
        if (PyErr_GivenExceptionMatches(exception, table[i].type)) {
            return table[i].status;
        }
    }
    return DM_ERR_INTERRUPTED;
}

/* Turns the exception that is set into a record; one that no store raises is left
 * standing. Needs the GIL. */
static dm_status
failed(const object_store *self, const char *method, dm_error *err)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *text = PyObject_Str(value);
    const char *utf8 = text != NULL ? PyUnicode_AsUTF8(text) : NULL;
    PyErr_Clear();
    dm_status status = dm_error_set(err, status_of(value), "%s of a %s failed: %s: %s",
                                    method, Py_TYPE(self->object)->tp_name,
                                    Py_TYPE(value)->tp_name, utf8 != NULL ? utf8 : "?");
    Py_XDECREF(text);
    if (status == DM_ERR_INTERRUPTED) {
        PyErr_Restore(type, value, traceback);
        return status;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return status;
}

/* Ends a call whose result is not used: releases `result`, NULL for an exception. */
static dm_status
finish(const object_store *self, const char *method, PyObject *result, dm_error *err)
{
    if (result == NULL) {
        return failed(self, method, err);
    }
    Py_DECREF(result);
    return DM_OK;
}

/* A result that must be bytes-like or str; releases it. */
static dm_status
finish_bytes(const object_store *self, const char *method, PyObject *result,
             dm_bytes *value, dm_error *err)
{
    if (result == NULL) {
        return failed(self, method, err);
    }
    dm_status status;
    Py_buffer buffer;
    if (PyUnicode_Check(result)) {
        Py_ssize_t size;
        const char *text = PyUnicode_AsUTF8AndSize(result, &size);
        status = text != NULL ? dm_bytes_copy(text, (size_t)size, value, err)
                              : failed(self, method, err);
    }
    else if (PyObject_GetBuffer(result, &buffer, PyBUF_SIMPLE) == 0) {
        status = dm_bytes_copy(buffer.buf, (size_t)buffer.len, value, err);
        PyBuffer_Release(&buffer);
    }
    else {
        status = failed(self, method, err);
    }
    Py_DECREF(result);
    return status;
}

static dm_status
finish_int(const object_store *self, const char *method, PyObject *result,
           int64_t *number, dm_error *err)
{
    if (result == NULL) {
        return failed(self, method, err);
    }
    long long n = PyLong_AsLongLong(result);
    Py_DECREF(result);
    if (n == -1 && PyErr_Occurred()) {
        return failed(self, method, err);
    }
    *number = n;
    return DM_OK;
}

static dm_status
finish_bool(const object_store *self, const char *method, PyObject *result, bool *yes,
            dm_error *err)
{
    int truth = result != NULL ? PyObject_IsTrue(result) : -1;
    Py_XDECREF(result);
    if (truth < 0) {
        return failed(self, method, err);
    }
    *yes = truth != 0;
    return DM_OK;
}

/* A list of str. */
static PyObject *
list_of(const char *const *keys, size_t n)
{
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list != NULL && i < n; i++) {
        PyObject *key = PyUnicode_FromString(keys[i]);
        if (key == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, key);
    }
    return list;
}

/* --- waiting ------------------------------------------------------------------------------ */

static dm_status
object_check(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
             bool *ready, dm_error *err)
{
    (void)wait;
    object_store *self = object_of(store);
    PyGILState_STATE gil;
    DM_TRY(enter(self, &gil, err));
    PyObject *list = list_of(keys, n);
    PyObject *result =
        list == NULL ? NULL : PyObject_CallMethod(self->object, "check", "(O)", list);
    Py_XDECREF(list);
    return leave(gil, finish_bool(self, "check", result, ready, err));
}

/* A short sleep between two looks, without the GIL. */
static dm_status
pause_between(int64_t *pause_us, const dm_wait *wait, dm_error *err)
{
    DM_TRY(dm_wait_poll(wait, err));
    int64_t ns = *pause_us * 1000;
    int64_t left = dm_clock_left(wait->deadline);
    ns = ns < left ? ns : left;
    const struct timespec ts = {ns / DM_NS_PER_S, ns % DM_NS_PER_S};
    nanosleep(&ts, NULL);
    *pause_us = *pause_us * 2 < LAST_PAUSE_US ? *pause_us * 2 : LAST_PAUSE_US;
    return DM_OK;
}

/* DM_ERR_TIMEOUT that names the keys; which of them are missing only check can tell. */
static dm_status
timed_out(dm_store *store, const char *const *keys, size_t n, dm_error *err)
{
    char text[512];
    bool *there = store->ops->check != NULL ? dm_calloc(n, sizeof(bool)) : NULL;
    const dm_wait now = DM_WAIT_FOREVER;
    for (size_t i = 0; there != NULL && i < n; i++) {
        if (object_check(store, &keys[i], 1, &now, &there[i], NULL) != DM_OK) {
            dm_free(there);
            there = NULL;
        }
    }
    dm_store_list_missing(keys, there, n, text, sizeof(text));
    dm_free(there);
    return dm_error_set(err, DM_ERR_TIMEOUT, "python store: timed out waiting for %s",
                        text);
}

/* One slice of the object's own wait. DM_ERR_AGAIN: it took its time and failed. */
static dm_status
wait_slice(object_store *self, const char *const *keys, size_t n, const dm_wait *wait,
           dm_error *err)
{
    int64_t slice = dm_wait_slice(wait);
    int64_t started = dm_clock_now();
    PyGILState_STATE gil;
    DM_TRY(enter(self, &gil, err));
    PyObject *list = list_of(keys, n);
    PyObject *datetime = PyImport_ImportModule("datetime");
    PyObject *delta = datetime == NULL
                          ? NULL
                          : PyObject_CallMethod(datetime, "timedelta", "dd", 0.0,
                                                (double)slice / DM_NS_PER_S);
    PyObject *result =
        list == NULL || delta == NULL
            ? NULL
            : PyObject_CallMethod(self->object, "wait", "OO", list, delta);
    Py_XDECREF(list);
    Py_XDECREF(datetime);
    Py_XDECREF(delta);
    dm_status status = finish(self, "wait", result, err);
    /* Which exception means "not in time" differs from store to store. */
    bool timely = dm_clock_now() - started < slice / 2;
    if (status == DM_ERR_TIMEOUT || (status == DM_ERR_CONNECTION && !timely)) {
        status = DM_ERR_AGAIN;
    }
    return leave(gil, status);
}

static dm_status
object_wait(dm_store *store, const char *const *keys, size_t n, const dm_wait *wait,
            dm_error *err)
{
    int64_t pause_us = FIRST_PAUSE_US;
    for (;;) {
        dm_status status;
        if (store->ops->check != NULL) {
            bool ready = false;
            DM_TRY(object_check(store, keys, n, wait, &ready, err));
            if (ready) {
                return DM_OK;
            }
            status = pause_between(&pause_us, wait, err);
        }
        else {
            status = dm_wait_poll(wait, err);
            if (status == DM_OK) {
                status = wait_slice(object_of(store), keys, n, wait, err);
                if (status == DM_OK) {
                    return DM_OK;
                }
                status = status == DM_ERR_AGAIN ? DM_OK : status;
            }
        }
        if (status == DM_ERR_TIMEOUT) {
            return timed_out(store, keys, n, err);
        }
        DM_TRY(status);
    }
}

/* --- calls ------------------------------------------------------------------------------- */

/* Methods of a key and a value that return nothing. */
static dm_status
put(dm_store *store, const char *method, const char *key, const void *data, size_t size,
    dm_error *err)
{
    object_store *self = object_of(store);
    PyGILState_STATE gil;
    DM_TRY(enter(self, &gil, err));
    PyObject *result = PyObject_CallMethod(self->object, method, "sy#", key,
                                           (const char *)data, (Py_ssize_t)size);
    return leave(gil, finish(self, method, result, err));
}

static dm_status
object_set(dm_store *store, const char *key, const void *data, size_t size,
           const dm_wait *wait, dm_error *err)
{
    (void)wait;
    return put(store, "set", key, data != NULL ? data : "", size, err);
}

static dm_status
object_append(dm_store *store, const char *key, const void *data, size_t size,
              const dm_wait *wait, dm_error *err)
{
    (void)wait;
    return put(store, "append", key, data != NULL ? data : "", size, err);
}

static dm_status
object_queue_push(dm_store *store, const char *key, const void *data, size_t size,
                  const dm_wait *wait, dm_error *err)
{
    (void)wait;
    return put(store, "queue_push", key, data != NULL ? data : "", size, err);
}

static dm_status
object_get(dm_store *store, const char *key, const dm_wait *wait, dm_bytes *value,
           dm_error *err)
{
    object_store *self = object_of(store);
    DM_TRY(object_wait(store, &key, 1, wait, err));
    PyGILState_STATE gil;
    DM_TRY(enter(self, &gil, err));
    PyObject *result = PyObject_CallMethod(self->object, "get", "s", key);
    return leave(gil, finish_bytes(self, "get", result, value, err));
}

static dm_status
object_add(dm_store *store, const char *key, int64_t amount, const dm_wait *wait,
           int64_t *sum, dm_error *err)
{
    (void)wait;
    object_store *self = object_of(store);
    PyGILState_STATE gil;
    DM_TRY(enter(self, &gil, err));
    PyObject *result =
        PyObject_CallMethod(self->object, "add", "sL", key, (long long)amount);
    return leave(gil, finish_int(self, "add", result, sum, err));
}

static dm_status
object_compare_set(dm_store *store, const char *key, const void *expected,
                   size_t expected_size, const void *desired, size_t desired_size,
                   const dm_wait *wait, dm_bytes *value, dm_error *err)
{
    (void)wait;
    object_store *self = object_of(store);
    PyGILState_STATE gil;
    DM_TRY(enter(self, &gil, err));
    /* An empty value must not become None. */
    PyObject *result =
        PyObject_CallMethod(self->object, "compare_set", "sy#y#", key,
                            expected_size ? expected : "", (Py_ssize_t)expected_size,
                            desired_size ? desired : "", (Py_ssize_t)desired_size);
    return leave(gil, finish_bytes(self, "compare_set", result, value, err));
}

/* Where the object has no compare_set: "set if absent" for keys that are only made in
 * this way. The first to count sets, the others wait for its value. */
static dm_status
claim_by_counting(dm_store *store, const char *key, const void *expected,
                  size_t expected_size, const void *desired, size_t desired_size,
                  const dm_wait *wait, dm_bytes *value, dm_error *err)
{
    (void)expected;
    if (expected_size != 0) {
        return dm_error_set(err, DM_ERR_UNSUPPORTED,
                            "a %s has no compare_set, only an absent key can be set "
                            "without it",
                            Py_TYPE(object_of(store)->object)->tp_name);
    }
    size_t size = strlen(key) + sizeof("/claims");
    char *counter = dm_malloc_array(size, 1);
    if (counter == NULL) {
        return dm_error_set_no_memory(err, "a store's key");
    }
    memcpy(counter, key, size - sizeof("/claims"));
    memcpy(counter + size - sizeof("/claims"), "/claims", sizeof("/claims"));
    int64_t n = 0;
    dm_status status = object_add(store, counter, 1, wait, &n, err);
    dm_free(counter);
    if (status == DM_OK && n == 1) {
        status = object_set(store, key, desired, desired_size, wait, err);
    }
    DM_TRY(status);
    return object_get(store, key, wait, value, err);
}

static dm_status
object_delete_key(dm_store *store, const char *key, const dm_wait *wait, bool *existed,
                  dm_error *err)
{
    (void)wait;
    object_store *self = object_of(store);
    PyGILState_STATE gil;
    DM_TRY(enter(self, &gil, err));
    PyObject *result = PyObject_CallMethod(self->object, "delete_key", "s", key);
    return leave(gil, finish_bool(self, "delete_key", result, existed, err));
}

/* The items of a sequence of `n` bytes or str; releases `result`. */
static dm_status
finish_values(const object_store *self, const char *method, PyObject *result, size_t n,
              dm_bytes *values, dm_error *err)
{
    PyObject *items = result == NULL ? NULL : PySequence_Tuple(result);
    Py_XDECREF(result);
    if (items == NULL) {
        return failed(self, method, err);
    }
    dm_status status = DM_OK;
    size_t done = 0;
    if ((size_t)PyTuple_GET_SIZE(items) != n) {
        status = dm_error_set(
            err, DM_ERR_CONNECTION, "%s of a %s returned %zd values for %zu keys",
            method, Py_TYPE(self->object)->tp_name, PyTuple_GET_SIZE(items), n);
    }
    for (; status == DM_OK && done < n; done += status == DM_OK) {
        PyObject *item = Py_NewRef(PyTuple_GET_ITEM(items, (Py_ssize_t)done));
        status = finish_bytes(self, method, item, &values[done], err);
    }
    Py_DECREF(items);
    while (status != DM_OK && done > 0) {
        dm_bytes_free(&values[--done]);
    }
    return status;
}

static dm_status
object_multi_get(dm_store *store, const char *const *keys, size_t n,
                 const dm_wait *wait, dm_bytes *values, dm_error *err)
{
    object_store *self = object_of(store);
    DM_TRY(object_wait(store, keys, n, wait, err));
    PyGILState_STATE gil;
    DM_TRY(enter(self, &gil, err));
    PyObject *list = list_of(keys, n);
    PyObject *result =
        list == NULL ? NULL
                     : PyObject_CallMethod(self->object, "multi_get", "(O)", list);
    Py_XDECREF(list);
    return leave(gil, finish_values(self, "multi_get", result, n, values, err));
}

static PyObject *
values_of(const dm_bytes *values, size_t n)
{
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list != NULL && i < n; i++) {
        PyObject *value =
            PyBytes_FromStringAndSize(values[i].data, (Py_ssize_t)values[i].size);
        if (value == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, value);
    }
    return list;
}

static dm_status
object_multi_set(dm_store *store, const char *const *keys, const dm_bytes *values,
                 size_t n, const dm_wait *wait, dm_error *err)
{
    (void)wait;
    object_store *self = object_of(store);
    PyGILState_STATE gil;
    DM_TRY(enter(self, &gil, err));
    PyObject *names = list_of(keys, n);
    PyObject *contents = names == NULL ? NULL : values_of(values, n);
    PyObject *result = contents == NULL ? NULL
                                        : PyObject_CallMethod(self->object, "multi_set",
                                                              "OO", names, contents);
    Py_XDECREF(names);
    Py_XDECREF(contents);
    return leave(gil, finish(self, "multi_set", result, err));
}

static dm_status
object_num_keys(dm_store *store, const dm_wait *wait, int64_t *n, dm_error *err)
{
    (void)wait;
    object_store *self = object_of(store);
    PyGILState_STATE gil;
    DM_TRY(enter(self, &gil, err));
    PyObject *result = PyObject_CallMethod(self->object, "num_keys", NULL);
    return leave(gil, finish_int(self, "num_keys", result, n, err));
}

static dm_status
object_list_keys(dm_store *store, const dm_wait *wait, dm_bytes **keys, size_t *n,
                 dm_error *err)
{
    (void)wait;
    object_store *self = object_of(store);
    PyGILState_STATE gil;
    DM_TRY(enter(self, &gil, err));
    PyObject *result = PyObject_CallMethod(self->object, "list_keys", NULL);
    PyObject *items = result == NULL ? NULL : PySequence_Tuple(result);
    Py_XDECREF(result);
    if (items == NULL) {
        return leave(gil, failed(self, "list_keys", err));
    }
    size_t count = (size_t)PyTuple_GET_SIZE(items);
    dm_bytes *list = dm_calloc(count, sizeof(dm_bytes));
    if (list == NULL) {
        Py_DECREF(items);
        return leave(gil, dm_error_set_no_memory(err, "a list of keys"));
    }
    dm_status status = finish_values(self, "list_keys", items, count, list, err);
    if (status != DM_OK) {
        dm_free(list);
        return leave(gil, status);
    }
    *keys = list;
    *n = count;
    return leave(gil, DM_OK);
}

static dm_status
object_queue_len(dm_store *store, const char *key, const dm_wait *wait, int64_t *n,
                 dm_error *err)
{
    (void)wait;
    object_store *self = object_of(store);
    PyGILState_STATE gil;
    DM_TRY(enter(self, &gil, err));
    PyObject *result = PyObject_CallMethod(self->object, "queue_len", "s", key);
    return leave(gil, finish_int(self, "queue_len", result, n, err));
}

static dm_status
try_pop(object_store *self, const char *key, dm_bytes *value, dm_error *err)
{
    PyGILState_STATE gil;
    DM_TRY(enter(self, &gil, err));
    PyObject *result =
        PyObject_CallMethod(self->object, "queue_pop", "sO", key, Py_False);
    return leave(gil, finish_bytes(self, "queue_pop", result, value, err));
}

static dm_status
object_queue_pop(dm_store *store, const char *key, bool block, const dm_wait *wait,
                 dm_bytes *value, dm_error *err)
{
    int64_t pause_us = FIRST_PAUSE_US;
    for (;;) {
        dm_status status = try_pop(object_of(store), key, value, err);
        if (status != DM_ERR_AGAIN || !block) {
            return status;
        }
        status = pause_between(&pause_us, wait, err);
        if (status == DM_ERR_TIMEOUT) {
            return dm_error_set(err, status,
                                "python store: timed out waiting for an item in queue "
                                "'%.200s'",
                                key);
        }
        DM_TRY(status);
    }
}

/* --- life ------------------------------------------------------------------------------------ */

/* The object itself stays open: it is its owner's. */
static void
object_close(dm_store *store)
{
    /* Relaxed: see enter. */
    atomic_store_explicit(&object_of(store)->closed, true, memory_order_relaxed);
}

static void
object_free(dm_store *store)
{
    object_store *self = object_of(store);
    if (!interpreter_is_ending()) {
        PyGILState_STATE gil = PyGILState_Ensure();
        Py_DECREF(self->object);
        PyGILState_Release(gil);
    }
    dm_free(self);
}

static const dm_store_ops all_ops = {
    .kind = "python",
    .set = object_set,
    .get = object_get,
    .add = object_add,
    .compare_set = object_compare_set,
    .check = object_check,
    .wait = object_wait,
    .delete_key = object_delete_key,
    .append = object_append,
    .multi_get = object_multi_get,
    .multi_set = object_multi_set,
    .num_keys = object_num_keys,
    .list_keys = object_list_keys,
    .queue_push = object_queue_push,
    .queue_pop = object_queue_pop,
    .queue_len = object_queue_len,
    .close = object_close,
    .free = object_free,
};

/* The object has a method of that name that is not Store's own. */
static bool
has_method(const py_state *state, PyObject *object, const char *text)
{
    /* Interned: the interpreter's cache of attributes keeps the names it is asked for. */
    PyObject *name = PyUnicode_InternFromString(text);
    PyObject *type = (PyObject *)Py_TYPE(object);
    PyObject *method = name != NULL ? PyObject_GetAttr(type, name) : NULL;
    PyObject *inherited = NULL;
    if (method != NULL) {
        inherited = PyObject_GetAttr((PyObject *)state->store_type, name);
    }
    else if (name != NULL) {
        /* An instance may have it all the same (a mock, a module). */
        PyErr_Clear();
        method = PyObject_GetAttr(object, name);
    }
    bool has = method != NULL && method != inherited && PyCallable_Check(method);
    PyErr_Clear();
    Py_XDECREF(name);
    Py_XDECREF(method);
    Py_XDECREF(inherited);
    return has;
}

static bool
fill_ops(const py_state *state, PyObject *object, dm_store_ops *ops,
         const char **missing)
{
    static const char *const required[] = {"set", "get", "add", "wait"};
    for (size_t i = 0; i < sizeof(required) / sizeof(*required); i++) {
        if (!has_method(state, object, required[i])) {
            *missing = required[i];
            return false;
        }
    }
    *ops = all_ops;
#define KEEP_IF_THERE(name)                                                            \
    if (!has_method(state, object, #name)) {                                           \
        ops->name = NULL;                                                              \
    }
    KEEP_IF_THERE(compare_set)
    KEEP_IF_THERE(check)
    KEEP_IF_THERE(delete_key)
    KEEP_IF_THERE(append)
    KEEP_IF_THERE(multi_get)
    KEEP_IF_THERE(multi_set)
    KEEP_IF_THERE(num_keys)
    KEEP_IF_THERE(list_keys)
    KEEP_IF_THERE(queue_push)
    KEEP_IF_THERE(queue_pop)
    KEEP_IF_THERE(queue_len)
#undef KEEP_IF_THERE
    if (ops->compare_set == NULL) {
        ops->compare_set = claim_by_counting;
    }
    return true;
}

dm_store *
py_store_adapter_new(py_state *state, PyObject *object, const char *name)
{
    object_store *self = dm_calloc(1, sizeof(*self));
    if (self == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    const char *missing;
    if (!fill_ops(state, object, &self->ops, &missing)) {
        dm_free(self);
        PyErr_Format(PyExc_TypeError,
                     "%s must be a Store or an object with its methods (set, get, add, "
                     "wait), got %R, which has no %s",
                     name, object, missing);
        return NULL;
    }
    dm_store_init(&self->base, &self->ops);
    atomic_init(&self->closed, false);
    self->object = Py_NewRef(object);
    return &self->base;
}

PyObject *
py_store_adapter_object(dm_store *store)
{
    return store->ops->free == object_free ? object_of(store)->object : NULL;
}

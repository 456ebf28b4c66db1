/* Arrays of DLPack: see py_array.h and py_dlpack.h.
 *
 * Two ways to the same struct. The C functions that a tensor's type may carry need no
 * capsule and no Python: torch's tensors come this way, those that require grad included,
 * as torch.distributed takes them. `__dlpack__` hands out a capsule; what is in it is
 * ours from the moment in which the capsule is renamed, and goes back through its deleter.
 */
#include <stdbool.h>
#include <string.h>

#include "python/py_array_private.h"
#include "python/py_dlpack.h"

/* --- what a tensor says -------------------------------------------------------------- */

static bool
parse_dtype(py_dl_dtype type, dm_dtype *dtype)
{
    static const struct {
        uint8_t code;
        uint8_t bits;
        dm_dtype dtype;
    } known[] = {
        {PY_DL_FLOAT, 32, DM_FLOAT32},
        {PY_DL_BFLOAT, 16, DM_BFLOAT16},
        {PY_DL_FLOAT, 16, DM_FLOAT16},
        {PY_DL_FLOAT, 64, DM_FLOAT64},
        {PY_DL_INT, 64, DM_INT64},
        {PY_DL_INT, 32, DM_INT32},
        {PY_DL_INT, 16, DM_INT16},
        {PY_DL_INT, 8, DM_INT8},
        {PY_DL_UINT, 8, DM_UINT8},
        {PY_DL_UINT, 16, DM_UINT16},
        {PY_DL_UINT, 32, DM_UINT32},
        {PY_DL_UINT, 64, DM_UINT64},
        {PY_DL_BOOL, 8, DM_BOOL},
        {PY_DL_COMPLEX, 64, DM_COMPLEX64},
        {PY_DL_COMPLEX, 128, DM_COMPLEX128},
        {PY_DL_FLOAT8_E4M3FN, 8, DM_FLOAT8_E4M3},
        {PY_DL_FLOAT8_E5M2, 8, DM_FLOAT8_E5M2},
    };
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (known[i].code == type.code && known[i].bits == type.bits) {
            *dtype = known[i].dtype;
            return type.lanes == 1;
        }
    }
    return false;
}

static bool
is_cpu_memory(int32_t device_type)
{
    return device_type == PY_DL_CPU || device_type == PY_DL_CUDA_HOST ||
           device_type == PY_DL_ROCM_HOST || device_type == PY_DL_CUDA_MANAGED;
}

/* Always -1. */
static int
raise_device(const py_export *e, py_dl_device device)
{
    static const char *const names[] = {
        [PY_DL_CUDA] = "cuda",       [PY_DL_OPENCL] = "opencl",
        [PY_DL_VULKAN] = "vulkan",   [PY_DL_METAL] = "metal",
        [PY_DL_VPI] = "vpi",         [PY_DL_ROCM] = "rocm",
        [PY_DL_ONE_API] = "oneapi",  [PY_DL_WEB_GPU] = "webgpu",
        [PY_DL_HEXAGON] = "hexagon", [PY_DL_MAIA] = "maia",
        [PY_DL_TRN] = "trainium",
    };
    enum { COUNT = sizeof(names) / sizeof(names[0]) };
    char where[64];
    if (device.type >= 0 && device.type < COUNT && names[device.type] != NULL) {
        PyOS_snprintf(where, sizeof(where), "on %s:%d", names[device.type],
                      (int)device.id);
    }
    else {
        PyOS_snprintf(where, sizeof(where), "on a device of DLPack's type %d",
                      (int)device.type);
    }
    return py_array_raise_device(e, where);
}

/* Checks the tensor and takes its facts over into *array. 0 or -1. */
static int
accept(const py_export *e, const py_dl_tensor *tensor, bool readonly, py_array *array)
{
    py_layout layout = {.readonly = readonly,
                        .ndim = tensor->ndim,
                        .shape = tensor->shape,
                        .strides = tensor->strides};
    if (!is_cpu_memory(tensor->device.type)) {
        return raise_device(e, tensor->device);
    }
    if (!parse_dtype(tensor->dtype, &layout.dtype)) {
        char format[64];
        PyOS_snprintf(format, sizeof(format), "code %d, %d bits, %d lanes",
                      tensor->dtype.code, tensor->dtype.bits, tensor->dtype.lanes);
        return py_array_raise_dtype(e, format);
    }
    layout.stride_unit = (int64_t)dm_dtype_size(layout.dtype);
    if (tensor->data != NULL) {
        layout.data = (char *)tensor->data + tensor->byte_offset;
    }
    return py_array_accept(e, &layout, array);
}

/* --- ownership ---------------------------------------------------------------------- */

/* Takes over what `managed` points to. Where it has no deleter nobody owns it, and the
 * object must live. */
static void
hold(const py_export *e, py_array_holder holder, void *managed, bool has_deleter,
     py_array *array)
{
    if (has_deleter) {
        array->holder = holder;
        array->hold.managed = managed;
    }
    else {
        array->holder = PY_ARRAY_OBJECT;
        array->hold.object = Py_NewRef(e->object);
    }
}

void
py_array_free_managed(py_array_holder holder, void *managed)
{
    if (holder == PY_ARRAY_VERSIONED) {
        py_dl_versioned *own = managed;
        own->deleter(own);
    }
    else {
        py_dl_managed *own = managed;
        own->deleter(own);
    }
}

static int
accept_versioned(const py_export *e, py_dl_versioned *managed, py_array *array)
{
    hold(e, PY_ARRAY_VERSIONED, managed, managed->deleter != NULL, array);
    if (managed->version.major != PY_DL_MAJOR) {
        PyErr_Format(
            PyExc_ValueError,
            "%s is exported by version %u.%u of DLPack, which is not known here "
            "(%d is)",
            e->name, (unsigned)managed->version.major, (unsigned)managed->version.minor,
            PY_DL_MAJOR);
    }
    else if (accept(e, &managed->tensor, (managed->flags & PY_DL_READ_ONLY) != 0,
                    array) == 0) {
        return 1;
    }
    py_array_release(array);
    return -1;
}

/* The exception that stands, taken off, as one object. */
static PyObject *
take_exception(void)
{
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(value, traceback);
    }
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
}

/* The first line of what an exception says (torch adds where in its sources it said so),
 * or NULL without an exception. */
static PyObject *
first_line(PyObject *exception)
{
    PyObject *line = NULL;
    PyObject *text = PyObject_Str(exception);
    if (text != NULL) {
        Py_ssize_t length = PyUnicode_GET_LENGTH(text);
        Py_ssize_t end = PyUnicode_FindChar(text, '\n', 0, length, 1);
        line = PyUnicode_Substring(text, 0, end < 0 ? length : end);
        Py_DECREF(text);
    }
    PyErr_Clear();
    return line;
}

/* The exporter has refused: says which argument it was about, with the exporter's
 * exception as the cause. Only where it raised BufferError, which is how exporters say no,
 * or `also`. Always -1. */
static int
raise_refused(const py_export *e, PyObject *also)
{
    if (PyErr_Occurred() == NULL) {
        PyErr_SetString(PyExc_BufferError, "its exporter does not say why");
    }
    if (!PyErr_ExceptionMatches(PyExc_BufferError) &&
        (also == NULL || !PyErr_ExceptionMatches(also))) {
        return -1;
    }
    PyObject *cause = take_exception();
    PyObject *line = first_line(cause);
    PyErr_Format(PyExc_ValueError, "%s cannot be exported through DLPack: %V", e->name,
                 line, "its exporter's text cannot be read");
    Py_XDECREF(line);

    PyObject *error = take_exception();
    PyException_SetCause(error, cause); /* takes the reference over */
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_DECREF(error);
    return -1;
}

/* --- C functions on the type ------------------------------------------------------------ */

/* The functions of the object's type: 1, or 0 where it has none that we know, or -1. */
static int
find_exchange(const py_export *e, PyObject *object, const py_dl_exchange **exchange)
{
    PyObject *capsule = NULL;
    int result = py_array_get((PyObject *)Py_TYPE(object),
                              e->state->name_dlpack_exchange, &capsule);
    if (result <= 0) {
        return result;
    }
    *exchange = NULL;
    if (PyCapsule_IsValid(capsule, PY_DL_NAME_EXCHANGE)) {
        *exchange = PyCapsule_GetPointer(capsule, PY_DL_NAME_EXCHANGE);
    }
    Py_DECREF(capsule); /* the functions live as long as the process */
    while (*exchange != NULL && (*exchange)->version.major != PY_DL_MAJOR) {
        *exchange = (*exchange)->previous;
    }
    return *exchange != NULL;
}

/* torch keeps notes beside a tensor's memory that DLPack knows nothing of. `method` asks
 * for one of them. 0 where it is not set or where there is no such thing, else -1. */
static int
check_note(const py_export *e, PyObject *object, PyObject *method, const char *what,
           const char *remedy)
{
    PyObject *answer = PyObject_CallMethodNoArgs(object, method);
    if (answer == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    int set = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    if (set > 0) {
        PyErr_Format(
            PyExc_ValueError,
            "%s is not what its memory holds: its %s bit is set; pass its %s()",
            e->name, what, remedy);
        return -1;
    }
    return set;
}

static int
check_notes(const py_export *e, PyObject *object, dm_dtype dtype)
{
    py_state *state = e->state;
    if ((dtype == DM_COMPLEX64 || dtype == DM_COMPLEX128) &&
        check_note(e, object, state->name_is_conj, "conjugate", "resolve_conj") < 0) {
        return -1;
    }
    return check_note(e, object, state->name_is_neg, "negative", "resolve_neg");
}

/* A tensor of its own over the same memory, or NULL with or without an exception: none
 * where the object cannot do that. The user may give the tensor itself other memory
 * (`tensor.data = ...`) while ours is in use. */
static PyObject *
alias_of(const py_export *e, const py_dl_exchange *exchange)
{
    PyObject *alias = PyObject_CallMethodNoArgs(e->object, e->state->name_detach);
    if (alias == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
        }
        return NULL;
    }
    const py_dl_exchange *own = NULL;
    int found = find_exchange(e, alias, &own);
    if (found <= 0 || own != exchange) {
        Py_CLEAR(alias);
    }
    return alias;
}

/* Without a new owner: `object`, which is held, keeps its memory. */
static int
look(const py_export *e, const py_dl_exchange *exchange, PyObject *object,
     py_array *array)
{
    py_dl_tensor tensor;
    memset(&tensor, 0, sizeof(tensor));
    if (exchange->look(object, &tensor) != 0) {
        return raise_refused(e, PyExc_RuntimeError);
    }
    if (accept(e, &tensor, false, array) < 0 ||
        check_notes(e, object, array->dtype) < 0) {
        return -1;
    }
    array->holder = PY_ARRAY_OBJECT;
    array->hold.object = Py_NewRef(object);
    return 1;
}

int
py_array_export_exchange(const py_export *e, py_array *array)
{
    const py_dl_exchange *exchange = NULL;
    int result = find_exchange(e, e->object, &exchange);
    if (result <= 0) {
        return result;
    }
    if (exchange->look != NULL) {
        if ((e->flags & PY_ARRAY_ASYNC) == 0) {
            return look(e, exchange, e->object, array);
        }
        PyObject *alias = alias_of(e, exchange);
        if (alias != NULL) {
            result = look(e, exchange, alias, array);
            Py_DECREF(alias);
            return result;
        }
        if (PyErr_Occurred()) {
            return -1;
        }
    }

    py_dl_versioned *managed = NULL;
    if (exchange->own(e->object, &managed) != 0 || managed == NULL) {
        return raise_refused(e, PyExc_RuntimeError);
    }
    result = accept_versioned(e, managed, array);
    if (result > 0 && check_notes(e, e->object, array->dtype) < 0) {
        py_array_release(array);
        return -1;
    }
    return result;
}

/* --- __dlpack__ ----------------------------------------------------------------------------- */

/* Where the object says that it is. 0 where that is the CPU's memory or where it does not
 * say, else -1. */
static int
check_device(const py_export *e)
{
    PyObject *pair = PyObject_CallMethodNoArgs(e->object, e->state->name_dlpack_device);
    if (pair == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear();
        return 0; /* the capsule says it */
    }
    int type = 0;
    int id = 0;
    int result = -1;
    if (!PyTuple_Check(pair)) {
        PyErr_Format(PyExc_TypeError,
                     "%s.__dlpack_device__() must return a tuple of two ints, got %R",
                     e->name, pair);
    }
    else if (PyArg_ParseTuple(pair, "ii:__dlpack_device__", &type, &id)) {
        result = is_cpu_memory(type) ? 0 : raise_device(e, (py_dl_device){type, id});
    }
    Py_DECREF(pair);
    return result;
}

/* object.__dlpack__(max_version=...), or without arguments for those who know none. */
static PyObject *
call_dlpack(const py_export *e, PyObject *object)
{
    PyObject *result = NULL;
    PyObject *version = Py_BuildValue("(ii)", PY_DL_MAJOR, 0);
    PyObject *names =
        version == NULL ? NULL : PyTuple_Pack(1, e->state->name_max_version);
    if (names != NULL) {
        PyObject *args[] = {object, version};
        result = PyObject_VectorcallMethod(e->state->name_dlpack, args,
                                           1 | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
        if (result == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            result = PyObject_CallMethodNoArgs(object, e->state->name_dlpack);
        }
    }
    Py_XDECREF(names);
    Py_XDECREF(version);
    return result;
}

/* torch's tensors refuse to export themselves while they require grad; what they detach
 * does not. A BufferError stands. The detached tensor, or NULL with the same error or
 * another. */
static PyObject *
detach(const py_export *e)
{
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *detached = NULL;
    PyObject *wanted = NULL;
    int set = py_array_get(e->object, e->state->name_requires_grad, &wanted);
    if (set > 0) {
        set = PyObject_IsTrue(wanted);
        Py_DECREF(wanted);
    }
    if (set > 0) {
        detached = PyObject_CallMethodNoArgs(e->object, e->state->name_detach);
    }
    if (set == 0) {
        PyErr_Restore(type, value, traceback);
        return NULL;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return detached;
}

/* Takes the capsule's content. */
static int
accept_capsule(const py_export *e, PyObject *capsule, py_array *array)
{
    if (PyCapsule_IsValid(capsule, PY_DL_NAME_VERSIONED)) {
        py_dl_versioned *managed = PyCapsule_GetPointer(capsule, PY_DL_NAME_VERSIONED);
        if (PyCapsule_SetName(capsule, PY_DL_NAME_VERSIONED_USED) < 0) {
            return -1;
        }
        return accept_versioned(e, managed, array);
    }
    if (PyCapsule_IsValid(capsule, PY_DL_NAME)) {
        py_dl_managed *managed = PyCapsule_GetPointer(capsule, PY_DL_NAME);
        if (PyCapsule_SetName(capsule, PY_DL_NAME_USED) < 0) {
            return -1;
        }
        hold(e, PY_ARRAY_MANAGED, managed, managed->deleter != NULL, array);
        /* Version 0 has no flag for it: exporters give out what may be written. */
        if (accept(e, &managed->tensor, false, array) == 0) {
            return 1;
        }
        py_array_release(array);
        return -1;
    }
    bool used = PyCapsule_IsValid(capsule, PY_DL_NAME_VERSIONED_USED) ||
                PyCapsule_IsValid(capsule, PY_DL_NAME_USED);
    PyErr_Format(used ? PyExc_ValueError : PyExc_TypeError,
                 used ? "%s.__dlpack__() returned %R, whose content was taken before"
                      : "%s.__dlpack__() must return a capsule of DLPack, got %R",
                 e->name, capsule);
    return -1;
}

int
py_array_export_dlpack(const py_export *e, py_array *array)
{
    PyObject *method = NULL;
    int result = py_array_get(e->object, e->state->name_dlpack, &method);
    Py_XDECREF(method);
    if (result <= 0) {
        return result;
    }
    if (check_device(e) < 0) {
        return -1;
    }
    PyObject *capsule = call_dlpack(e, e->object);
    if (capsule == NULL && PyErr_ExceptionMatches(PyExc_BufferError)) {
        PyObject *detached = detach(e);
        if (detached != NULL) {
            capsule = call_dlpack(e, detached);
            Py_DECREF(detached);
        }
    }
    if (capsule == NULL) {
        return raise_refused(e, NULL);
    }
    result = accept_capsule(e, capsule, array);
    Py_DECREF(capsule);
    if (result > 0 && check_notes(e, e->object, array->dtype) < 0) {
        py_array_release(array);
        return -1;
    }
    return result;
}

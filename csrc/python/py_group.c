/* The ProcessGroup type: see py_group.h.
 *
 * One operation is one function: it binds its arguments, exports the arrays, checks them
 * against each other and gives the dm_op to `perform`. Nothing is sent before all checks
 * are done.
 */
#include "python/py_group.h"

#include <stdio.h>
#include <string.h>

#include <structmember.h>

#include "python/py_args.h"
#include "python/py_array.h"
#include "python/py_error.h"
#include "python/py_wait.h"
#include "python/py_work.h"

/* Local operations on fewer bytes than this keep the GIL. */
enum { KEEP_GIL_BYTES = 64 * 1024 };

/* A native handle and nothing else. */
typedef struct py_group {
    PyObject_HEAD dm_group *group; /* NULL once finalized */
    PyObject *weak_references;
} py_group;

static dm_group *
handle(PyObject *op)
{
    return ((py_group *)op)->group;
}

/* --- life ---------------------------------------------------------------------------- */

PyObject *
py_group_wrap(py_state *state, dm_group *group)
{
    void **slot = dm_group_slot(group);
    if (*slot != NULL) {
        return Py_NewRef((PyObject *)*slot);
    }
    PyTypeObject *type = state->group_type;
    py_group *self = (py_group *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->group = dm_group_hold(group);
    *slot = self;
    return (PyObject *)self;
}

dm_group *
py_group_of(py_state *state, PyObject *object, const char *name)
{
    if (!Py_IS_TYPE(object, state->group_type)) {
        PyErr_Format(PyExc_TypeError, "%s must be a ProcessGroup, got %.200s", name,
                     Py_TYPE(object)->tp_name);
        return NULL;
    }
    return handle(object);
}

static void
group_finalize(PyObject *op)
{
    py_group *self = (py_group *)op;
    dm_group *group = self->group;
    if (group != NULL) {
        self->group = NULL;
        *dm_group_slot(group) = NULL;
        dm_group_release(group);
    }
}

static void
group_dealloc(PyObject *op)
{
    py_group *self = (py_group *)op;
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

/* --- operations: common parts ---------------------------------------------------------- */

/* What every operation's function is called with. */
#define OPERATION_ARGS                                                                 \
    PyObject *op, PyTypeObject *defining_class, PyObject *const *args,                 \
        Py_ssize_t nargs, PyObject *kwnames

/* One call: what its function has put together. Synchronous calls have their arrays on
 * the stack, asynchronous ones in `pending`. */
typedef struct call {
    py_state *state;
    dm_group *group;
    dm_op op;
    py_array own[PY_WORK_ARRAYS];
    py_array *arrays;
    py_pending *pending;
} call;

/* 0, or -1 with an exception and nothing to clean up. */
static int
call_begin(call *c, PyObject *op, PyTypeObject *defining_class, dm_op_kind kind,
           PyObject *async_op)
{
    c->state = PyType_GetModuleState(defining_class);
    c->group = handle(op);
    memset(&c->op, 0, sizeof(c->op));
    c->op.kind = kind;
    c->op.dtype = DM_UINT8;
    c->pending = NULL;
    c->arrays = c->own;
    for (int i = 0; i < PY_WORK_ARRAYS; i++) {
        c->own[i].holder = PY_ARRAY_NONE;
        c->own[i].bytes = 0;
    }
    if (async_op != Py_False) {
        int wanted = PyObject_IsTrue(async_op);
        if (wanted < 0) {
            return -1;
        }
        if (wanted) {
            c->pending = py_pending_new();
            if (c->pending == NULL) {
                return -1;
            }
            c->arrays = c->pending->arrays;
        }
    }
    py_work_sweep(c->state);
    return 0;
}

/* Cleans up after an error that has been raised. */
static PyObject *
call_cancel(call *c)
{
    if (c->pending != NULL) {
        py_pending_free(c->pending);
    }
    py_array_release(&c->own[0]);
    py_array_release(&c->own[1]);
    return NULL;
}

/* Whether the operation may be run with the GIL held: it waits for nobody and is short. */
static bool
keeps_gil(const call *c)
{
    return dm_group_is_local(c->group) && c->arrays[0].bytes < KEEP_GIL_BYTES;
}

static PyObject *
submit(call *c)
{
    dm_error err;
    dm_work *work = NULL;
    dm_status status;
    if (!dm_group_is_local(c->group) || keeps_gil(c)) {
        status = dm_group_submit(c->group, &c->op, NULL, NULL, &work, &err);
    }
    else {
        Py_BEGIN_ALLOW_THREADS status =
            dm_group_submit(c->group, &c->op, NULL, NULL, &work, &err);
        Py_END_ALLOW_THREADS
    }
    if (status != DM_OK) {
        call_cancel(c);
        return py_raise(c->state, &err);
    }
    c->pending->work = work;
    return py_work_new(c->state, c->pending);
}

/* Runs the operation. None, a Work, or NULL with an exception; the call is over. */
static PyObject *
call_perform(call *c)
{
    if (c->pending != NULL) {
        return submit(c);
    }
    dm_error err;
    dm_status status;
    if (keeps_gil(c)) {
        dm_wait wait = DM_WAIT_FOREVER;
        status = dm_group_run(c->group, &c->op, &wait, &err);
    }
    else {
        py_waiter waiter;
        py_waiter_start(&waiter, DM_FOREVER);
        status = dm_group_run(c->group, &c->op, &waiter.wait, &err);
        py_waiter_stop(&waiter);
    }
    py_array_release(&c->own[0]);
    py_array_release(&c->own[1]);
    if (status != DM_OK) {
        return py_raise(c->state, &err);
    }
    Py_RETURN_NONE;
}

/* Exports array `i` of the call. */
static int
call_export(call *c, int i, PyObject *object, const char *name, bool writable)
{
    int flags =
        (writable ? PY_ARRAY_WRITABLE : 0) | (c->pending != NULL ? PY_ARRAY_ASYNC : 0);
    return py_array_export(c->state, object, name, flags, &c->arrays[i]);
}

/* The factor of a ReduceOp.premul_sum. 0 or -1. */
static int
parse_factor(py_state *state, PyObject *object, double *factor)
{
    PyObject *value = PyObject_GetAttr(object, state->name_factor);
    if (value == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_SetString(PyExc_ValueError, "op 'premul_sum' needs a factor: use "
                                              "ReduceOp.premul_sum(factor)");
        }
        return -1;
    }
    *factor = PyFloat_AsDouble(value);
    Py_DECREF(value);
    return *factor == -1.0 && PyErr_Occurred() ? -1 : 0;
}

/* The reduce op and its factor of dm_op; `object` is NULL for the default. */
static int
parse_reduce(py_state *state, PyObject *object, dm_op *op)
{
    op->reduce = DM_SUM;
    if (object == NULL) {
        return 0;
    }
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError,
                     "op must be a ReduceOp or its name, such as 'sum', got %R",
                     object);
        return -1;
    }
    const char *name = PyUnicode_AsUTF8(object);
    if (name == NULL) {
        return -1;
    }
    if (!dm_reduce_op_parse(name, &op->reduce)) {
        PyErr_Format(PyExc_ValueError,
                     "op must be one of 'sum', 'product', 'min', 'max', 'avg', 'band', "
                     "'bor', 'bxor', 'premul_sum', got %R",
                     object);
        return -1;
    }
    return op->reduce == DM_PREMUL_SUM ? parse_factor(state, object, &op->factor) : 0;
}

static int
parse_rank(PyObject *object, const char *name, int32_t *rank)
{
    int64_t value = 0;
    if (py_args_int(object, name, INT32_MIN, INT32_MAX, &value) < 0) {
        return -1;
    }
    *rank = (int32_t)value; /* the core checks the range */
    return 0;
}

/* None is any rank, which no number may be. */
static int
parse_source(PyObject *object, int32_t *rank)
{
    *rank = DM_ANY_RANK;
    if (object == Py_None) {
        return 0;
    }
    if (parse_rank(object, "src", rank) < 0) {
        return -1;
    }
    if (*rank == DM_ANY_RANK) {
        PyErr_Format(PyExc_ValueError, "src must be a group rank or None, got %R",
                     object);
        return -1;
    }
    return 0;
}

static int
check_same_dtype(const py_array *output, const py_array *input)
{
    if (output->dtype != input->dtype) {
        PyErr_Format(
            PyExc_ValueError,
            "output and input must have the same dtype: output is %s, input is "
            "%s",
            dm_dtype_name(output->dtype), dm_dtype_name(input->dtype));
        return -1;
    }
    return 0;
}

/* `large` has exactly size times as many elements as `small`. */
static int
check_times_size(const py_array *large, const char *large_name, const py_array *small,
                 const char *small_name, int32_t size)
{
    size_t wanted = 0;
    if (__builtin_mul_overflow(small->count, (size_t)size, &wanted) ||
        large->count != wanted) {
        PyErr_Format(PyExc_ValueError,
                     "%s must have %d times (the group's size) the %zu elements of %s, "
                     "it has %zu",
                     large_name, (int)size, small->count, small_name, large->count);
        return -1;
    }
    return 0;
}

/* `piece` may be this rank's very piece of `whole`, in place, and must be apart else. */
static int
check_in_place(const call *c, const py_array *whole, const char *whole_name,
               const py_array *piece, const char *piece_name)
{
    const char *own = whole->data;
    own += piece->bytes * (size_t)dm_group_rank(c->group);
    if (piece->data == own) {
        return 0;
    }
    return py_array_check_apart(whole, whole_name, piece, piece_name);
}

/* --- operations -------------------------------------------------------------------------- */

PyDoc_STRVAR(
    group_all_reduce_doc,
    "all_reduce($self, /, array, op='sum', async_op=False)\n"
    "--\n"
    "\n"
    "Combines the arrays of all members in place: afterwards all hold the same "
    "result.\n"
    "\n"
    "Args:\n"
    "    array: writable, C-contiguous; same shape and dtype on every member.\n"
    "    op: a ReduceOp or its name; devicemesh.ReduceOp says what each does.\n"
    "    async_op: return a Work at once instead of waiting.\n"
    "\n"
    "Returns:\n"
    "    None, or a Work.\n"
    "\n"
    "Raises:\n"
    "    TypeError, ValueError, NotImplementedError: the array or the op cannot be "
    "used;\n"
    "        nothing was sent.\n"
    "    GroupTimeoutError, PeerError, MismatchError, ClosedError: the operation "
    "failed,\n"
    "        and with it the group.\n"
    "\n"
    "Example:\n"
    "    >>> import array, devicemesh\n"
    "    >>> group = devicemesh.World(None, 0, 1).new_group([0])\n"
    "    >>> values = array.array('f', [1, 2])\n"
    "    >>> group.all_reduce(values)\n"
    "    >>> values.tolist()\n"
    "    [1.0, 2.0]\n");

static PyObject *
group_all_reduce(OPERATION_ARGS)
{
    static const char *const names[] = {"array", "op", "async_op"};
    static const py_params params = {"all_reduce", names, 3, 1, 3};
    PyObject *values[3] = {NULL, NULL, Py_False};
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0) {
        return NULL;
    }
    call c;
    if (call_begin(&c, op, defining_class, DM_OP_ALL_REDUCE, values[2]) < 0) {
        return NULL;
    }
    if (parse_reduce(c.state, values[1], &c.op) < 0 ||
        call_export(&c, 0, values[0], "array", true) < 0) {
        return call_cancel(&c);
    }
    c.op.dtype = c.arrays[0].dtype;
    c.op.output = c.arrays[0].data;
    c.op.count = c.arrays[0].count;
    return call_perform(&c);
}

PyDoc_STRVAR(group_broadcast_doc,
             "broadcast($self, /, array, root=0, async_op=False)\n"
             "--\n"
             "\n"
             "Copies the root's array into the arrays of all members.\n"
             "\n"
             "Args:\n"
             "    array: writable, C-contiguous; same size and dtype on every member.\n"
             "    root: group rank whose array is copied.\n"
             "    async_op: return a Work at once instead of waiting.\n"
             "\n"
             "Returns:\n"
             "    None, or a Work.\n"
             "\n"
             "Raises:\n"
             "    As all_reduce; ValueError for a root outside the group.");

static PyObject *
group_broadcast(OPERATION_ARGS)
{
    static const char *const names[] = {"array", "root", "async_op"};
    static const py_params params = {"broadcast", names, 3, 1, 3};
    PyObject *values[3] = {NULL, NULL, Py_False};
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0) {
        return NULL;
    }
    int32_t root = 0;
    if (values[1] != NULL && parse_rank(values[1], "root", &root) < 0) {
        return NULL;
    }
    call c;
    if (call_begin(&c, op, defining_class, DM_OP_BROADCAST, values[2]) < 0) {
        return NULL;
    }
    if (call_export(&c, 0, values[0], "array", true) < 0) {
        return call_cancel(&c);
    }
    c.op.root = root;
    c.op.dtype = c.arrays[0].dtype;
    c.op.output = c.arrays[0].data;
    c.op.count = c.arrays[0].count;
    return call_perform(&c);
}

PyDoc_STRVAR(
    group_all_gather_doc,
    "all_gather_into_tensor($self, /, output, input, async_op=False)\n"
    "--\n"
    "\n"
    "Puts the inputs of all members one after the other, in group order, into output.\n"
    "\n"
    "Args:\n"
    "    output: writable, C-contiguous, size() times as many elements as input.\n"
    "    input: C-contiguous; same size and dtype on every member. May be this rank's\n"
    "        piece of output, in place.\n"
    "    async_op: return a Work at once instead of waiting.\n"
    "\n"
    "Returns:\n"
    "    None, or a Work.\n"
    "\n"
    "Raises:\n"
    "    As all_reduce; ValueError when sizes or dtypes do not fit together.");

PyDoc_STRVAR(
    group_reduce_scatter_doc,
    "reduce_scatter_tensor($self, /, output, input, op='sum', async_op=False)\n"
    "--\n"
    "\n"
    "Combines the inputs of all members and gives each member its piece of the "
    "result.\n"
    "\n"
    "Args:\n"
    "    output: writable, C-contiguous. May be this rank's piece of input, in place.\n"
    "    input: C-contiguous, size() times as many elements as output.\n"
    "    op: a ReduceOp or its name.\n"
    "    async_op: return a Work at once instead of waiting.\n"
    "\n"
    "Returns:\n"
    "    None, or a Work.\n"
    "\n"
    "Raises:\n"
    "    As all_reduce; ValueError when sizes or dtypes do not fit together.");

PyDoc_STRVAR(group_all_to_all_doc,
             "all_to_all_single($self, /, output, input, async_op=False)\n"
             "--\n"
             "\n"
             "Sends the i-th piece of input to member i and puts its piece for us in "
             "the i-th place\n"
             "of output.\n"
             "\n"
             "Args:\n"
             "    output: writable, C-contiguous, as large as input.\n"
             "    input: C-contiguous; size() pieces of equal size.\n"
             "    async_op: return a Work at once instead of waiting.\n"
             "\n"
             "Returns:\n"
             "    None, or a Work.\n"
             "\n"
             "Raises:\n"
             "    As all_reduce; ValueError when sizes or dtypes do not fit together.");

/* Output and input exported, of one dtype, with the op's pointers set. */
static int
export_pair(call *c, PyObject *output, PyObject *input)
{
    if (call_export(c, 0, output, "output", true) < 0 ||
        call_export(c, 1, input, "input", false) < 0 ||
        check_same_dtype(&c->arrays[0], &c->arrays[1]) < 0) {
        return -1;
    }
    c->op.dtype = c->arrays[0].dtype;
    c->op.output = c->arrays[0].data;
    c->op.input = c->arrays[1].data;
    return 0;
}

static PyObject *
group_all_gather_into_tensor(OPERATION_ARGS)
{
    static const char *const names[] = {"output", "input", "async_op"};
    static const py_params params = {"all_gather_into_tensor", names, 3, 2, 3};
    PyObject *values[3] = {NULL, NULL, Py_False};
    call c;
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0 ||
        call_begin(&c, op, defining_class, DM_OP_ALL_GATHER, values[2]) < 0) {
        return NULL;
    }
    if (export_pair(&c, values[0], values[1]) < 0 ||
        check_times_size(&c.arrays[0], "output", &c.arrays[1], "input",
                         dm_group_size(c.group)) < 0 ||
        check_in_place(&c, &c.arrays[0], "output", &c.arrays[1], "input") < 0) {
        return call_cancel(&c);
    }
    c.op.count = c.arrays[1].count;
    return call_perform(&c);
}

static PyObject *
group_reduce_scatter_tensor(OPERATION_ARGS)
{
    static const char *const names[] = {"output", "input", "op", "async_op"};
    static const py_params params = {"reduce_scatter_tensor", names, 4, 2, 4};
    PyObject *values[4] = {NULL, NULL, NULL, Py_False};
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0) {
        return NULL;
    }
    call c;
    if (call_begin(&c, op, defining_class, DM_OP_REDUCE_SCATTER, values[3]) < 0) {
        return NULL;
    }
    if (parse_reduce(c.state, values[2], &c.op) < 0 ||
        export_pair(&c, values[0], values[1]) < 0 ||
        check_times_size(&c.arrays[1], "input", &c.arrays[0], "output",
                         dm_group_size(c.group)) < 0 ||
        check_in_place(&c, &c.arrays[1], "input", &c.arrays[0], "output") < 0) {
        return call_cancel(&c);
    }
    c.op.count = c.arrays[0].count;
    return call_perform(&c);
}

static int
check_pieces(const py_array *output, const py_array *input, int32_t size)
{
    if (output->count != input->count) {
        PyErr_Format(PyExc_ValueError,
                     "output and input must have the same number of elements: output "
                     "has %zu, input has %zu",
                     output->count, input->count);
        return -1;
    }
    if (input->count % (size_t)size != 0) {
        PyErr_Format(
            PyExc_ValueError,
            "input must divide into %d equal pieces (the group's size), it has "
            "%zu elements",
            (int)size, input->count);
        return -1;
    }
    return 0;
}

static PyObject *
group_all_to_all_single(OPERATION_ARGS)
{
    static const char *const names[] = {"output", "input", "async_op"};
    static const py_params params = {"all_to_all_single", names, 3, 2, 3};
    PyObject *values[3] = {NULL, NULL, Py_False};
    call c;
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0 ||
        call_begin(&c, op, defining_class, DM_OP_ALL_TO_ALL, values[2]) < 0) {
        return NULL;
    }
    int32_t size = dm_group_size(c.group);
    if (export_pair(&c, values[0], values[1]) < 0 ||
        check_pieces(&c.arrays[0], &c.arrays[1], size) < 0 ||
        (size > 1 &&
         py_array_check_apart(&c.arrays[0], "output", &c.arrays[1], "input") < 0)) {
        return call_cancel(&c);
    }
    c.op.count = c.arrays[1].count / (size_t)size;
    return call_perform(&c);
}

PyDoc_STRVAR(
    group_send_doc,
    "send($self, /, array, dst, tag=0)\n"
    "--\n"
    "\n"
    "Sends the array to another member; returns when the array may be changed again.\n"
    "\n"
    "Args:\n"
    "    array: C-contiguous.\n"
    "    dst: group rank of the receiver.\n"
    "    tag: must be what the receiver asks for, 0..2**31-1.\n"
    "\n"
    "Raises:\n"
    "    As all_reduce; ValueError for a dst outside the group or this rank itself.");

static int
parse_tag(PyObject *object, uint32_t *tag)
{
    int64_t value = 0;
    if (object != NULL && py_args_int(object, "tag", 0, INT32_MAX, &value) < 0) {
        return -1;
    }
    *tag = (uint32_t)value;
    return 0;
}

static PyObject *
group_send(OPERATION_ARGS)
{
    static const char *const names[] = {"array", "dst", "tag"};
    static const py_params params = {"send", names, 3, 2, 3};
    PyObject *values[3] = {NULL, NULL, NULL};
    int32_t dst = 0;
    uint32_t tag = 0;
    call c;
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0 ||
        parse_rank(values[1], "dst", &dst) < 0 || parse_tag(values[2], &tag) < 0 ||
        call_begin(&c, op, defining_class, DM_OP_SEND, Py_False) < 0) {
        return NULL;
    }
    if (call_export(&c, 0, values[0], "array", false) < 0) {
        return call_cancel(&c);
    }
    c.op.root = dst;
    c.op.tag = tag;
    c.op.dtype = c.arrays[0].dtype;
    c.op.input = c.arrays[0].data;
    c.op.count = c.arrays[0].count;
    return call_perform(&c);
}

PyDoc_STRVAR(
    group_recv_doc,
    "recv($self, /, array, src=None, tag=0)\n"
    "--\n"
    "\n"
    "Receives what another member sends.\n"
    "\n"
    "Args:\n"
    "    array: writable, C-contiguous; as large as what is sent, same dtype.\n"
    "    src: group rank of the sender; None takes the first message that comes.\n"
    "    tag: must be what the sender gave, 0..2**31-1.\n"
    "\n"
    "Returns:\n"
    "    The group rank of the sender.\n"
    "\n"
    "Raises:\n"
    "    As all_reduce; ValueError for a src outside the group or this rank itself.");

static PyObject *
group_recv(OPERATION_ARGS)
{
    static const char *const names[] = {"array", "src", "tag"};
    static const py_params params = {"recv", names, 3, 1, 3};
    PyObject *values[3] = {NULL, Py_None, NULL};
    int32_t src = DM_ANY_RANK;
    uint32_t tag = 0;
    call c;
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0 ||
        parse_source(values[1], &src) < 0 || parse_tag(values[2], &tag) < 0 ||
        call_begin(&c, op, defining_class, DM_OP_RECV, Py_False) < 0) {
        return NULL;
    }
    if (call_export(&c, 0, values[0], "array", true) < 0) {
        return call_cancel(&c);
    }
    int32_t source = src;
    c.op.root = src;
    c.op.tag = tag;
    c.op.dtype = c.arrays[0].dtype;
    c.op.output = c.arrays[0].data;
    c.op.count = c.arrays[0].count;
    c.op.source = &source;
    PyObject *none = call_perform(&c);
    if (none == NULL) {
        return NULL;
    }
    Py_DECREF(none);
    return PyLong_FromLong(source);
}

PyDoc_STRVAR(group_barrier_doc,
             "barrier($self, /, async_op=False)\n"
             "--\n"
             "\n"
             "Waits until every member has come to this call.\n"
             "\n"
             "Args:\n"
             "    async_op: return a Work at once instead of waiting.\n"
             "\n"
             "Returns:\n"
             "    None, or a Work.");

static PyObject *
group_barrier(OPERATION_ARGS)
{
    static const char *const names[] = {"async_op"};
    static const py_params params = {"barrier", names, 1, 0, 1};
    PyObject *values[1] = {Py_False};
    call c;
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0 ||
        call_begin(&c, op, defining_class, DM_OP_BARRIER, values[0]) < 0) {
        return NULL;
    }
    return call_perform(&c);
}

/* --- facts ----------------------------------------------------------------------------- */

PyDoc_STRVAR(group_rank_doc, "rank($self, /)\n"
                             "--\n"
                             "\n"
                             "This process's rank in the group.");

static PyObject *
group_rank(PyObject *op, PyObject *Py_UNUSED(args))
{
    return PyLong_FromLong(dm_group_rank(handle(op)));
}

PyDoc_STRVAR(group_size_doc, "size($self, /)\n"
                             "--\n"
                             "\n"
                             "Number of members.");

static PyObject *
group_size(PyObject *op, PyObject *Py_UNUSED(args))
{
    return PyLong_FromLong(dm_group_size(handle(op)));
}

PyDoc_STRVAR(
    group_close_doc,
    "close($self, /)\n"
    "--\n"
    "\n"
    "Ends what runs or is queued with ClosedError and frees connections and threads.\n"
    "\n"
    "Idempotent; waits for no other rank. The other members notice at their next\n"
    "operation.");

static PyObject *
group_close(PyObject *op, PyObject *Py_UNUSED(args))
{
    py_state *state = py_state_of_type(Py_TYPE(op));
    if (state == NULL) {
        return NULL;
    }
    dm_group *group = dm_group_hold(handle(op));
    dm_error err;
    dm_status status;
    Py_BEGIN_ALLOW_THREADS status = dm_group_close(group, &err);
    dm_group_release(group);
    Py_END_ALLOW_THREADS py_work_sweep(state);
    if (status != DM_OK) {
        return py_raise(state, &err);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    group_abort_doc,
    "abort($self, /)\n"
    "--\n"
    "\n"
    "Ends what runs or is queued with ClosedError, from any thread, without waiting.\n"
    "\n"
    "close() frees what is left.");

static PyObject *
group_abort(PyObject *op, PyObject *Py_UNUSED(args))
{
    dm_group_abort(handle(op));
    Py_RETURN_NONE;
}

static PyObject *
group_reduce_(PyObject *Py_UNUSED(op), PyObject *Py_UNUSED(args))
{
    PyErr_SetString(
        PyExc_TypeError,
        "a ProcessGroup cannot be pickled: it stands for connections of this "
        "process; pickle the mesh and take the group from it again");
    return NULL;
}

static PyObject *
ranks_tuple(const dm_group *group)
{
    const int32_t *ranks = dm_group_ranks(group);
    int32_t size = dm_group_size(group);
    PyObject *tuple = PyTuple_New(size);
    for (int32_t i = 0; tuple != NULL && i < size; i++) {
        PyObject *rank = PyLong_FromLong(ranks[i]);
        if (rank == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, i, rank);
    }
    return tuple;
}

static PyObject *
group_get_ranks(PyObject *op, void *Py_UNUSED(closure))
{
    return ranks_tuple(handle(op));
}

static PyObject *
group_get_name(PyObject *op, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(dm_group_name(handle(op)));
}

static PyObject *
group_get_dim_name(PyObject *op, void *Py_UNUSED(closure))
{
    const char *name = dm_group_dim_name(handle(op));
    if (name[0] == '\0') {
        Py_RETURN_NONE;
    }
    return PyUnicode_FromString(name);
}

static PyObject *
group_get_backend(PyObject *op, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(dm_group_backend(handle(op)));
}

static PyObject *
group_get_transport(PyObject *op, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(dm_group_transport(handle(op)));
}

static PyObject *
group_get_timeout(PyObject *op, void *Py_UNUSED(closure))
{
    return py_timeout_object(dm_group_timeout(handle(op)));
}

static int
group_set_timeout(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    int64_t timeout_ns = -1;
    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError, "timeout cannot be deleted");
        return -1;
    }
    if (py_timeout_parse(value, "timeout", &timeout_ns) < 0) {
        return -1;
    }
    dm_group_set_timeout(handle(op), timeout_ns);
    return 0;
}

static PyObject *
group_get_closed(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(dm_group_is_closed(handle(op)));
}

static PyObject *
group_repr(PyObject *op)
{
    dm_group *group = handle(op);
    if (group == NULL) {
        return PyUnicode_FromString("<devicemesh.ProcessGroup finalized>");
    }
    const char *name = dm_group_dim_name(group);
    PyObject *ranks = ranks_tuple(group);
    if (ranks == NULL) {
        return NULL;
    }
    PyObject *text = PyUnicode_FromFormat(
        "<devicemesh.ProcessGroup %s%srank=%d ranks=%R backend=%s%s>", name,
        name[0] != '\0' ? " " : "", (int)dm_group_rank(group), ranks,
        dm_group_backend(group), dm_group_is_closed(group) ? " closed" : "");
    Py_DECREF(ranks);
    return text;
}

/* --- type ---------------------------------------------------------------------------- */

#define OPERATION(method, doc)                                                         \
    {#method, (PyCFunction)(void (*)(void))group_##method,                             \
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS, doc}

static PyMethodDef group_methods[] = {
    OPERATION(all_reduce, group_all_reduce_doc),
    OPERATION(broadcast, group_broadcast_doc),
    OPERATION(all_gather_into_tensor, group_all_gather_doc),
    OPERATION(reduce_scatter_tensor, group_reduce_scatter_doc),
    OPERATION(all_to_all_single, group_all_to_all_doc),
    OPERATION(send, group_send_doc),
    OPERATION(recv, group_recv_doc),
    OPERATION(barrier, group_barrier_doc),
    {"rank", group_rank, METH_NOARGS, group_rank_doc},
    {"size", group_size, METH_NOARGS, group_size_doc},
    {"close", group_close, METH_NOARGS, group_close_doc},
    {"abort", group_abort, METH_NOARGS, group_abort_doc},
    {"__reduce__", group_reduce_, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef group_getset[] = {
    {"ranks", group_get_ranks, NULL, "Global ranks of the members, in group order.",
     NULL},
    {"name", group_get_name, NULL, "Identity of the group: the same on every member.",
     NULL},
    {"dim_name", group_get_dim_name, NULL, "Name of the mesh dim, or None.", NULL},
    {"backend", group_get_backend, NULL, "Name of the backend: 'gloo', 'fake', ...",
     NULL},
    {"transport", group_get_transport, NULL,
     "How the data travels: 'tcp', 'shm', 'none', ...", NULL},
    {"timeout", group_get_timeout, group_set_timeout,
     "Time-out of an operation in seconds, or None. Settable.", NULL},
    {"closed", group_get_closed, NULL, "Whether close() or abort() has been called.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef group_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(py_group, weak_references), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(
    group_doc,
    "The communicator of an ordered list of ranks.\n"
    "\n"
    "Groups come from a mesh (DeviceMesh.get_group) or World.new_group. Nothing is\n"
    "connected before the first operation. All members must call the same operations "
    "in\n"
    "the same order; each has a number, which errors show. Outputs come before inputs, "
    "as\n"
    "in torch.distributed; root, src and dst are group ranks. Arrays are anything with "
    "the\n"
    "buffer protocol, such as numpy arrays.\n"
    "\n"
    "An operation that fails half way (time-out, a dead member, Ctrl-C) breaks the "
    "group:\n"
    "later operations raise ClosedError and name the first failure.");

static PyType_Slot group_slots[] = {
    {Py_tp_doc, (void *)group_doc}, {Py_tp_finalize, group_finalize},
    {Py_tp_dealloc, group_dealloc}, {Py_tp_repr, group_repr},
    {Py_tp_methods, group_methods}, {Py_tp_getset, group_getset},
    {Py_tp_members, group_members}, {0, NULL},
};

static PyType_Spec group_spec = {
    .name = "devicemesh.ProcessGroup",
    .basicsize = sizeof(py_group),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = group_slots,
};

/* The backends' libraries lie beside this module. */
static int
tell_library_folder(PyObject *module)
{
    PyObject *file = PyModule_GetFilenameObject(module);
    if (file == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_SystemError)) {
            return -1;
        }
        PyErr_Clear(); /* not loaded from a file */
        return 0;
    }
    PyObject *bytes = PyUnicode_EncodeFSDefault(file);
    Py_DECREF(file);
    if (bytes == NULL) {
        return -1;
    }
    const char *path = PyBytes_AS_STRING(bytes);
    const char *slash = strrchr(path, '/');
    char folder[4096];
    int length = slash == NULL ? snprintf(folder, sizeof(folder), ".")
                               : snprintf(folder, sizeof(folder), "%.*s",
                                          (int)(slash - path), path);
    Py_DECREF(bytes);
    if (length < 0 || (size_t)length >= sizeof(folder)) {
        return 0; /* the backend's error will say that no folder is known */
    }
    dm_error err;
    dm_status status = dm_backend_set_path(folder, &err);
    return status == DM_OK ? 0 : py_raise_int(py_state_of_module(module), &err);
}

int
py_group_register(PyObject *module)
{
    py_state *state = py_state_of_module(module);
    if (py_state_add_type(module, &group_spec, NULL, &state->group_type) < 0) {
        return -1;
    }
    return tell_library_folder(module);
}

/* The operations of a ProcessGroup: see py_group_private.h.
 *
 * One operation is one function: it binds its arguments, exports the arrays, checks them
 * against each other and performs the dm_op. Nothing is sent before all checks are done.
 */
#include "python/py_group_private.h"

#include "python/py_args.h"

/* --- checks: each 0, or -1 with an exception -------------------------------------------- */

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
check_in_place(const py_call *c, const py_array *whole, const char *whole_name,
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

const char py_group_all_reduce_doc[] = PyDoc_STR(
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

PyObject *
py_group_all_reduce(PY_OPERATION_ARGS)
{
    static const char *const names[] = {"array", "op", "async_op"};
    static const py_params params = {"all_reduce", names, 3, 1, 3};
    PyObject *values[3] = {NULL, NULL, Py_False};
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0) {
        return NULL;
    }
    py_call c;
    if (py_call_begin(&c, op, defining_class, DM_OP_ALL_REDUCE, values[2]) < 0) {
        return NULL;
    }
    if (py_call_parse_reduce(c.state, values[1], &c.op) < 0 ||
        py_call_export(&c, 0, values[0], "array", true) < 0) {
        return py_call_cancel(&c);
    }
    c.op.dtype = c.arrays[0].dtype;
    c.op.output = c.arrays[0].data;
    c.op.count = c.arrays[0].count;
    return py_call_perform(&c);
}

const char py_group_broadcast_doc[] = PyDoc_STR(
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

PyObject *
py_group_broadcast(PY_OPERATION_ARGS)
{
    static const char *const names[] = {"array", "root", "async_op"};
    static const py_params params = {"broadcast", names, 3, 1, 3};
    PyObject *values[3] = {NULL, NULL, Py_False};
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0) {
        return NULL;
    }
    int32_t root = 0;
    if (values[1] != NULL && py_call_parse_rank(values[1], "root", &root) < 0) {
        return NULL;
    }
    py_call c;
    if (py_call_begin(&c, op, defining_class, DM_OP_BROADCAST, values[2]) < 0) {
        return NULL;
    }
    if (py_call_export(&c, 0, values[0], "array", true) < 0) {
        return py_call_cancel(&c);
    }
    c.op.root = root;
    c.op.dtype = c.arrays[0].dtype;
    c.op.output = c.arrays[0].data;
    c.op.count = c.arrays[0].count;
    return py_call_perform(&c);
}

const char py_group_reduce_doc[] = PyDoc_STR(
    "reduce($self, /, array, root=0, op='sum', async_op=False)\n"
    "--\n"
    "\n"
    "Combines the arrays of all members into the root's; the others stay as they are.\n"
    "\n"
    "Args:\n"
    "    array: C-contiguous, at the root writable; same size and dtype on every\n"
    "        member.\n"
    "    root: group rank that gets the result.\n"
    "    op: a ReduceOp or its name.\n"
    "    async_op: return a Work at once instead of waiting.\n"
    "\n"
    "Returns:\n"
    "    None, or a Work.\n"
    "\n"
    "Raises:\n"
    "    As all_reduce; ValueError for a root outside the group.");

PyObject *
py_group_reduce(PY_OPERATION_ARGS)
{
    static const char *const names[] = {"array", "root", "op", "async_op"};
    static const py_params params = {"reduce", names, 4, 1, 4};
    PyObject *values[4] = {NULL, NULL, NULL, Py_False};
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0) {
        return NULL;
    }
    int32_t root = 0;
    if (values[1] != NULL && py_call_parse_rank(values[1], "root", &root) < 0) {
        return NULL;
    }
    py_call c;
    if (py_call_begin(&c, op, defining_class, DM_OP_REDUCE, values[3]) < 0) {
        return NULL;
    }
    bool is_root = root == dm_group_rank(c.group);
    if (py_call_parse_reduce(c.state, values[2], &c.op) < 0 ||
        py_call_export(&c, 0, values[0], "array", is_root) < 0) {
        return py_call_cancel(&c);
    }
    c.op.root = root;
    c.op.dtype = c.arrays[0].dtype;
    c.op.input = c.op.output = c.arrays[0].data;
    c.op.count = c.arrays[0].count;
    return py_call_perform(&c);
}

const char py_group_all_gather_into_tensor_doc[] = PyDoc_STR(
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

const char py_group_reduce_scatter_tensor_doc[] = PyDoc_STR(
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

/* Output and input exported, of one dtype, with the op's pointers set. */
static int
export_pair(py_call *c, PyObject *output, PyObject *input)
{
    if (py_call_export(c, 0, output, "output", true) < 0 ||
        py_call_export(c, 1, input, "input", false) < 0 ||
        check_same_dtype(&c->arrays[0], &c->arrays[1]) < 0) {
        return -1;
    }
    c->op.dtype = c->arrays[0].dtype;
    c->op.output = c->arrays[0].data;
    c->op.input = c->arrays[1].data;
    return 0;
}

PyObject *
py_group_all_gather_into_tensor(PY_OPERATION_ARGS)
{
    static const char *const names[] = {"output", "input", "async_op"};
    static const py_params params = {"all_gather_into_tensor", names, 3, 2, 3};
    PyObject *values[3] = {NULL, NULL, Py_False};
    py_call c;
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0 ||
        py_call_begin(&c, op, defining_class, DM_OP_ALL_GATHER, values[2]) < 0) {
        return NULL;
    }
    if (export_pair(&c, values[0], values[1]) < 0 ||
        check_times_size(&c.arrays[0], "output", &c.arrays[1], "input",
                         dm_group_size(c.group)) < 0 ||
        check_in_place(&c, &c.arrays[0], "output", &c.arrays[1], "input") < 0) {
        return py_call_cancel(&c);
    }
    c.op.count = c.arrays[1].count;
    return py_call_perform(&c);
}

PyObject *
py_group_reduce_scatter_tensor(PY_OPERATION_ARGS)
{
    static const char *const names[] = {"output", "input", "op", "async_op"};
    static const py_params params = {"reduce_scatter_tensor", names, 4, 2, 4};
    PyObject *values[4] = {NULL, NULL, NULL, Py_False};
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0) {
        return NULL;
    }
    py_call c;
    if (py_call_begin(&c, op, defining_class, DM_OP_REDUCE_SCATTER, values[3]) < 0) {
        return NULL;
    }
    if (py_call_parse_reduce(c.state, values[2], &c.op) < 0 ||
        export_pair(&c, values[0], values[1]) < 0 ||
        check_times_size(&c.arrays[1], "input", &c.arrays[0], "output",
                         dm_group_size(c.group)) < 0 ||
        check_in_place(&c, &c.arrays[1], "input", &c.arrays[0], "output") < 0) {
        return py_call_cancel(&c);
    }
    c.op.count = c.arrays[0].count;
    return py_call_perform(&c);
}

const char py_group_barrier_doc[] =
    PyDoc_STR("barrier($self, /, async_op=False)\n"
              "--\n"
              "\n"
              "Waits until every member has come to this call.\n"
              "\n"
              "Args:\n"
              "    async_op: return a Work at once instead of waiting.\n"
              "\n"
              "Returns:\n"
              "    None, or a Work.");

PyObject *
py_group_barrier(PY_OPERATION_ARGS)
{
    static const char *const names[] = {"async_op"};
    static const py_params params = {"barrier", names, 1, 0, 1};
    PyObject *values[1] = {Py_False};
    py_call c;
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0 ||
        py_call_begin(&c, op, defining_class, DM_OP_BARRIER, values[0]) < 0) {
        return NULL;
    }
    return py_call_perform(&c);
}

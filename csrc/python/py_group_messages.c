/* Messages of a ProcessGroup, from one member to another: see py_group_private.h. */
#include "python/py_group_private.h"

#include "python/py_args.h"

const char py_group_send_doc[] = PyDoc_STR(
    "send($self, /, array, dst, tag=0)\n"
    "--\n"
    "\n"
    "Sends the array to another member; returns when the other one has taken it.\n"
    "\n"
    "Args:\n"
    "    array: C-contiguous.\n"
    "    dst: group rank of the receiver.\n"
    "    tag: must be what the receiver asks for, 0..2**31-1.\n"
    "\n"
    "Raises:\n"
    "    As all_reduce; ValueError for a dst outside the group or this rank itself.");

const char py_group_isend_doc[] = PyDoc_STR(
    "isend($self, /, array, dst, tag=0)\n"
    "--\n"
    "\n"
    "As send, without waiting.\n"
    "\n"
    "Messages go their own way: they neither wait for collectives nor keep them from\n"
    "running. Those to one member with one tag arrive in the order in which they were\n"
    "given.\n"
    "\n"
    "Returns:\n"
    "    A Work.\n"
    "\n"
    "Raises:\n"
    "    As send.");

static PyObject *
send_message(const py_params *params, PyObject *async_op, PY_OPERATION_ARGS)
{
    PyObject *values[3] = {NULL, NULL, NULL};
    int32_t dst = 0;
    uint32_t tag = 0;
    py_call c;
    if (py_args_bind(params, args, nargs, kwnames, values) < 0 ||
        py_call_parse_rank(values[1], "dst", &dst) < 0 ||
        py_call_parse_tag(values[2], &tag) < 0 ||
        py_call_begin(&c, op, defining_class, DM_OP_SEND, async_op) < 0) {
        return NULL;
    }
    if (py_call_export(&c, 0, values[0], "array", false) < 0) {
        return py_call_cancel(&c);
    }
    c.op.root = dst;
    c.op.tag = tag;
    c.op.dtype = c.arrays[0].dtype;
    c.op.input = c.arrays[0].data;
    c.op.count = c.arrays[0].count;
    return py_call_perform(&c);
}

static const char *const send_names[] = {"array", "dst", "tag"};

PyObject *
py_group_send(PY_OPERATION_ARGS)
{
    static const py_params params = {"send", send_names, 3, 2, 3};
    return send_message(&params, Py_False, op, defining_class, args, nargs, kwnames);
}

PyObject *
py_group_isend(PY_OPERATION_ARGS)
{
    static const py_params params = {"isend", send_names, 3, 2, 3};
    return send_message(&params, Py_True, op, defining_class, args, nargs, kwnames);
}

const char py_group_recv_doc[] = PyDoc_STR(
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

const char py_group_irecv_doc[] = PyDoc_STR(
    "irecv($self, /, array, src=None, tag=0)\n"
    "--\n"
    "\n"
    "As recv, without waiting: see isend.\n"
    "\n"
    "Returns:\n"
    "    A Work; its result() and source_rank() are the group rank of the sender.\n"
    "\n"
    "Raises:\n"
    "    As recv.");

/* `source` is where the sender's rank is left for a call that waits. */
static PyObject *
receive_message(const py_params *params, PyObject *async_op, int32_t *source,
                PY_OPERATION_ARGS)
{
    PyObject *values[3] = {NULL, Py_None, NULL};
    int32_t src = DM_ANY_RANK;
    uint32_t tag = 0;
    py_call c;
    if (py_args_bind(params, args, nargs, kwnames, values) < 0 ||
        py_call_parse_source(values[1], &src) < 0 ||
        py_call_parse_tag(values[2], &tag) < 0 ||
        py_call_begin(&c, op, defining_class, DM_OP_RECV, async_op) < 0) {
        return NULL;
    }
    if (py_call_export(&c, 0, values[0], "array", true) < 0) {
        return py_call_cancel(&c);
    }
    c.op.root = src;
    c.op.tag = tag;
    c.op.dtype = c.arrays[0].dtype;
    c.op.output = c.arrays[0].data;
    c.op.count = c.arrays[0].count;
    if (c.pending == NULL) {
        *source = src;
        c.op.source = source;
    }
    return py_call_perform(&c);
}

static const char *const recv_names[] = {"array", "src", "tag"};

PyObject *
py_group_recv(PY_OPERATION_ARGS)
{
    static const py_params params = {"recv", recv_names, 3, 1, 3};
    int32_t source = DM_ANY_RANK;
    PyObject *none = receive_message(&params, Py_False, &source, op, defining_class,
                                     args, nargs, kwnames);
    if (none == NULL || source == DM_ANY_RANK) {
        return none;
    }
    Py_DECREF(none);
    return PyLong_FromLong(source);
}

PyObject *
py_group_irecv(PY_OPERATION_ARGS)
{
    static const py_params params = {"irecv", recv_names, 3, 1, 3};
    return receive_message(&params, Py_True, NULL, op, defining_class, args, nargs,
                           kwnames);
}

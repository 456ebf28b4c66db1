/* Operations of a ProcessGroup on lists of arrays: see py_group_private.h and py_hold.h.
 *
 * A list has one array for each member, in group order. Outputs are the first arrays of
 * the hold, inputs follow.
 */
#include "python/py_group_private.h"

#include "base/dm_alloc.h"
#include "python/py_args.h"

/* --- checks: each 0, or -1 with an exception -------------------------------------------- */

static int
check_dtype(const py_array *output, const char *output_name, const py_array *input,
            const char *input_name)
{
    if (output->dtype != input->dtype) {
        PyErr_Format(PyExc_ValueError,
                     "%s and %s must have the same dtype: %s is %s, %s is %s",
                     output_name, input_name, output_name, dm_dtype_name(output->dtype),
                     input_name, dm_dtype_name(input->dtype));
        return -1;
    }
    return 0;
}

/* All arrays of the list have as many elements as `single`. */
static int
check_all_equal(const py_pieces *pieces, const char *name, const py_array *single,
                const char *single_name)
{
    for (int i = 0; i < pieces->count; i++) {
        if (pieces->sizes[i] != single->count) {
            PyErr_Format(PyExc_ValueError,
                         "%s must have as many elements as each of %s: %s has %zu, "
                         "%s[%d] has %zu",
                         single_name, name, single_name, single->count, name, i,
                         pieces->sizes[i]);
            return -1;
        }
    }
    return 0;
}

static int
check_own_size(const py_pieces *pieces, const char *name, int32_t rank,
               const py_array *single, const char *single_name)
{
    if (pieces->sizes[rank] != single->count) {
        PyErr_Format(
            PyExc_ValueError,
            "%s must have as many elements as %s[%d] (this rank's), it has %zu "
            "and not %zu",
            single_name, name, (int)rank, single->count, pieces->sizes[rank]);
        return -1;
    }
    return 0;
}

static bool
all_equal(const py_pieces *pieces)
{
    for (int i = 1; i < pieces->count; i++) {
        if (pieces->sizes[i] != pieces->sizes[0]) {
            return false;
        }
    }
    return true;
}

/* Only the root has the list; others pass None. Sets *present. */
static int
check_roots(const py_call *c, PyObject *list, const char *name, int32_t root,
            bool *present)
{
    *present = root == dm_group_rank(c->group);
    if (*present && list == Py_None) {
        PyErr_Format(PyExc_ValueError, "%s is needed at the root (group rank %d)", name,
                     (int)root);
        return -1;
    }
    if (!*present && list != Py_None) {
        PyErr_Format(PyExc_ValueError,
                     "%s must be None but at the root, which is group rank %d and not "
                     "this one (%d)",
                     name, (int)root, (int)dm_group_rank(c->group));
        return -1;
    }
    return 0;
}

/* --- one list and one array ------------------------------------------------------------- */

const char py_group_all_gather_doc[] = PyDoc_STR(
    "all_gather($self, /, outputs, input, async_op=False)\n"
    "--\n"
    "\n"
    "Copies the input of member i into outputs[i], on every member.\n"
    "\n"
    "Args:\n"
    "    outputs: list of size() arrays, writable, C-contiguous. They may differ in "
    "size\n"
    "        where the inputs do: outputs[i] is as large as member i's input.\n"
    "    input: C-contiguous; may be outputs[rank()] itself, in place.\n"
    "    async_op: return a Work at once instead of waiting.\n"
    "\n"
    "Outputs that lie one after the other in memory are filled in place; others cost "
    "a\n"
    "copy.\n"
    "\n"
    "Returns:\n"
    "    None, or a Work.\n"
    "\n"
    "Raises:\n"
    "    As all_reduce; ValueError when sizes or dtypes do not fit together.\n"
    "\n"
    "Example:\n"
    "    >>> import devicemesh\n"
    "    >>> group = devicemesh.World(None, 0, 1).new_group([0])\n"
    "    >>> outputs = [bytearray(3)]\n"
    "    >>> group.all_gather(outputs, b'abc')\n"
    "    >>> outputs\n"
    "    [bytearray(b'abc')]\n");

PyObject *
py_group_all_gather(PY_OPERATION_ARGS)
{
    static const char *const names[] = {"outputs", "input", "async_op"};
    static const py_params params = {"all_gather", names, 3, 2, 3};
    PyObject *values[3] = {NULL, NULL, Py_False};
    py_call c;
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0 ||
        py_call_begin(&c, op, defining_class, DM_OP_ALL_GATHER, values[2]) < 0) {
        return NULL;
    }
    int32_t size = dm_group_size(c.group);
    int32_t rank = dm_group_rank(c.group);
    py_pieces *outputs = &c.hold->output;
    py_apart apart = {size, "outputs", "input", true, false, rank, size};
    if (py_call_reserve(&c, size + 1) < 0 ||
        py_call_export_list(&c, 0, values[0], "outputs", true, outputs) < 0 ||
        py_call_export(&c, size, values[1], "input", false) < 0 ||
        check_dtype(&c.arrays[0], "outputs", &c.arrays[size], "input") < 0 ||
        check_own_size(outputs, "outputs", rank, &c.arrays[size], "input") < 0 ||
        py_hold_check_apart(c.hold, &apart) < 0 || py_pieces_place(outputs) < 0) {
        return py_call_cancel(&c);
    }
    c.op.dtype = c.arrays[size].dtype;
    c.op.count = c.arrays[size].count;
    c.op.input = c.arrays[size].data;
    c.op.output = py_pieces_data(outputs);
    c.op.output_counts = all_equal(outputs) ? NULL : outputs->sizes;
    return py_call_perform(&c);
}

const char py_group_gather_doc[] =
    PyDoc_STR("gather($self, /, input, outputs=None, root=0, async_op=False)\n"
              "--\n"
              "\n"
              "Copies the input of member i into outputs[i] of the root.\n"
              "\n"
              "Args:\n"
              "    input: C-contiguous; same size and dtype on every member. At the "
              "root it may be\n"
              "        outputs[rank()] itself, in place.\n"
              "    outputs: at the root a list of size() arrays, writable, "
              "C-contiguous, each as\n"
              "        large as input; elsewhere None.\n"
              "    root: group rank that gets the inputs.\n"
              "    async_op: return a Work at once instead of waiting.\n"
              "\n"
              "Returns:\n"
              "    None, or a Work.\n"
              "\n"
              "Raises:\n"
              "    As all_reduce; ValueError for a root outside the group, or when "
              "sizes or dtypes\n"
              "        do not fit together.");

PyObject *
py_group_gather(PY_OPERATION_ARGS)
{
    static const char *const names[] = {"input", "outputs", "root", "async_op"};
    static const py_params params = {"gather", names, 4, 1, 4};
    PyObject *values[4] = {NULL, Py_None, NULL, Py_False};
    int32_t root = 0;
    bool is_root = false;
    py_call c;
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0 ||
        (values[2] != NULL && py_call_parse_rank(values[2], "root", &root) < 0) ||
        py_call_begin(&c, op, defining_class, DM_OP_GATHER, values[3]) < 0) {
        return NULL;
    }
    c.op.root = root;
    int32_t size = dm_group_size(c.group);
    int32_t rank = dm_group_rank(c.group);
    py_pieces *outputs = &c.hold->output;
    if (py_call_check(&c) < 0 ||
        check_roots(&c, values[1], "outputs", root, &is_root) < 0 ||
        py_call_reserve(&c, size + 1) < 0 ||
        py_call_export(&c, size, values[0], "input", false) < 0) {
        return py_call_cancel(&c);
    }
    if (is_root) {
        py_apart apart = {size, "outputs", "input", true, false, rank, size};
        if (py_call_export_list(&c, 0, values[1], "outputs", true, outputs) < 0 ||
            check_dtype(&c.arrays[0], "outputs", &c.arrays[size], "input") < 0 ||
            check_all_equal(outputs, "outputs", &c.arrays[size], "input") < 0 ||
            py_hold_check_apart(c.hold, &apart) < 0 || py_pieces_place(outputs) < 0) {
            return py_call_cancel(&c);
        }
        c.op.output = py_pieces_data(outputs);
    }
    c.op.dtype = c.arrays[size].dtype;
    c.op.count = c.arrays[size].count;
    c.op.input = c.arrays[size].data;
    return py_call_perform(&c);
}

const char py_group_scatter_doc[] = PyDoc_STR(
    "scatter($self, /, output, inputs=None, root=0, async_op=False)\n"
    "--\n"
    "\n"
    "Copies inputs[i] of the root into the output of member i.\n"
    "\n"
    "Args:\n"
    "    output: writable, C-contiguous; same size and dtype on every member. At the "
    "root\n"
    "        it may be inputs[rank()] itself, in place.\n"
    "    inputs: at the root a list of size() arrays, C-contiguous, each as large as\n"
    "        output; elsewhere None.\n"
    "    root: group rank that has the inputs.\n"
    "    async_op: return a Work at once instead of waiting.\n"
    "\n"
    "Returns:\n"
    "    None, or a Work.\n"
    "\n"
    "Raises:\n"
    "    As gather.");

/* Output and list of inputs: scatter at the root, reduce_scatter. */
static int
export_inputs(py_call *c, PyObject *list)
{
    int32_t rank = dm_group_rank(c->group);
    py_pieces *inputs = &c->hold->input;
    py_apart apart = {1, "output", "inputs", false, true, 0, 1 + rank};
    if (py_call_export_list(c, 1, list, "inputs", false, inputs) < 0 ||
        check_dtype(&c->arrays[0], "output", &c->arrays[1], "inputs") < 0 ||
        check_all_equal(inputs, "inputs", &c->arrays[0], "output") < 0 ||
        py_hold_check_apart(c->hold, &apart) < 0 || py_pieces_place(inputs) < 0) {
        return -1;
    }
    c->op.input = py_pieces_data(inputs);
    return 0;
}

PyObject *
py_group_scatter(PY_OPERATION_ARGS)
{
    static const char *const names[] = {"output", "inputs", "root", "async_op"};
    static const py_params params = {"scatter", names, 4, 1, 4};
    PyObject *values[4] = {NULL, Py_None, NULL, Py_False};
    int32_t root = 0;
    bool is_root = false;
    py_call c;
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0 ||
        (values[2] != NULL && py_call_parse_rank(values[2], "root", &root) < 0) ||
        py_call_begin(&c, op, defining_class, DM_OP_SCATTER, values[3]) < 0) {
        return NULL;
    }
    c.op.root = root;
    if (py_call_check(&c) < 0 ||
        check_roots(&c, values[1], "inputs", root, &is_root) < 0 ||
        py_call_reserve(&c, dm_group_size(c.group) + 1) < 0 ||
        py_call_export(&c, 0, values[0], "output", true) < 0 ||
        (is_root && export_inputs(&c, values[1]) < 0)) {
        return py_call_cancel(&c);
    }
    c.op.dtype = c.arrays[0].dtype;
    c.op.count = c.arrays[0].count;
    c.op.output = c.arrays[0].data;
    return py_call_perform(&c);
}

const char py_group_reduce_scatter_doc[] = PyDoc_STR(
    "reduce_scatter($self, /, output, inputs, op='sum', async_op=False)\n"
    "--\n"
    "\n"
    "Combines inputs[i] of all members into the output of member i.\n"
    "\n"
    "Args:\n"
    "    output: writable, C-contiguous. May be inputs[rank()] itself, in place.\n"
    "    inputs: list of size() arrays, C-contiguous, each as large as output; same "
    "size\n"
    "        and dtype on every member.\n"
    "    op: a ReduceOp or its name.\n"
    "    async_op: return a Work at once instead of waiting.\n"
    "\n"
    "Returns:\n"
    "    None, or a Work.\n"
    "\n"
    "Raises:\n"
    "    As all_reduce; ValueError when sizes or dtypes do not fit together.");

PyObject *
py_group_reduce_scatter(PY_OPERATION_ARGS)
{
    static const char *const names[] = {"output", "inputs", "op", "async_op"};
    static const py_params params = {"reduce_scatter", names, 4, 2, 4};
    PyObject *values[4] = {NULL, NULL, NULL, Py_False};
    py_call c;
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0 ||
        py_call_begin(&c, op, defining_class, DM_OP_REDUCE_SCATTER, values[3]) < 0) {
        return NULL;
    }
    if (py_call_parse_reduce(c.state, values[2], &c.op) < 0 ||
        py_call_reserve(&c, dm_group_size(c.group) + 1) < 0 ||
        py_call_export(&c, 0, values[0], "output", true) < 0 ||
        export_inputs(&c, values[1]) < 0) {
        return py_call_cancel(&c);
    }
    c.op.dtype = c.arrays[0].dtype;
    c.op.count = c.arrays[0].count;
    c.op.output = c.arrays[0].data;
    return py_call_perform(&c);
}

/* --- all_to_all ------------------------------------------------------------------------- */

const char py_group_all_to_all_doc[] = PyDoc_STR(
    "all_to_all($self, /, outputs, inputs, async_op=False)\n"
    "--\n"
    "\n"
    "Copies inputs[i] into outputs[rank()] of member i.\n"
    "\n"
    "Args:\n"
    "    outputs: list of size() arrays, writable, C-contiguous; outputs[i] is as "
    "large\n"
    "        as what member i has for us.\n"
    "    inputs: list of size() arrays, C-contiguous, of any sizes.\n"
    "    async_op: return a Work at once instead of waiting.\n"
    "\n"
    "Returns:\n"
    "    None, or a Work.\n"
    "\n"
    "Raises:\n"
    "    As all_reduce; ValueError when sizes or dtypes do not fit together.");

PyObject *
py_group_all_to_all(PY_OPERATION_ARGS)
{
    static const char *const names[] = {"outputs", "inputs", "async_op"};
    static const py_params params = {"all_to_all", names, 3, 2, 3};
    PyObject *values[3] = {NULL, NULL, Py_False};
    py_call c;
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0 ||
        py_call_begin(&c, op, defining_class, DM_OP_ALL_TO_ALL, values[2]) < 0) {
        return NULL;
    }
    int32_t size = dm_group_size(c.group);
    int32_t rank = dm_group_rank(c.group);
    py_pieces *outputs = &c.hold->output;
    py_pieces *inputs = &c.hold->input;
    py_apart apart = {size, "outputs", "inputs", true, true, -1, -1};
    if (py_call_reserve(&c, 2 * size) < 0 ||
        py_call_export_list(&c, 0, values[0], "outputs", true, outputs) < 0 ||
        py_call_export_list(&c, size, values[1], "inputs", false, inputs) < 0 ||
        check_dtype(&c.arrays[0], "outputs", &c.arrays[size], "inputs") < 0 ||
        check_own_size(outputs, "outputs", rank, &c.arrays[size + rank],
                       "this rank's piece of inputs") < 0 ||
        py_hold_check_apart(c.hold, &apart) < 0 || py_pieces_place(outputs) < 0 ||
        py_pieces_place(inputs) < 0) {
        return py_call_cancel(&c);
    }
    c.op.dtype = c.arrays[0].dtype;
    c.op.input = py_pieces_data(inputs);
    c.op.output = py_pieces_data(outputs);
    /* Whether pieces are even is not the same on all members: always as uneven ones. */
    c.op.input_counts = inputs->sizes;
    c.op.output_counts = outputs->sizes;
    return py_call_perform(&c);
}

const char py_group_all_to_all_single_doc[] = PyDoc_STR(
    "all_to_all_single($self, /, output, input, output_splits=None, input_splits=None, "
    "async_op=False)\n"
    "--\n"
    "\n"
    "Sends the i-th piece of input to member i and puts its piece for us in the i-th\n"
    "place of output.\n"
    "\n"
    "Args:\n"
    "    output: writable, C-contiguous.\n"
    "    input: C-contiguous.\n"
    "    output_splits: rows of output (elements along its first dim) that each "
    "member\n"
    "        sends us, a list of size() ints; None: size() equal pieces.\n"
    "    input_splits: rows of input for each member, likewise. Splits are given on\n"
    "        every member or on none.\n"
    "    async_op: return a Work at once instead of waiting.\n"
    "\n"
    "Returns:\n"
    "    None, or a Work.\n"
    "\n"
    "Raises:\n"
    "    As all_reduce; ValueError when sizes, splits or dtypes do not fit together.");

static int
check_equal_pieces(const py_array *output, const py_array *input, int32_t size)
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

/* Reads `splits` (a list of `size` row counts, or None for equal ones) into elements for
 * each member. */
static int
parse_splits(PyObject *splits, const char *splits_name, PyObject *object,
             const py_array *array, const char *name, int32_t size, size_t **sizes)
{
    Py_ssize_t rows = PyObject_Size(object);
    if (rows < 0) {
        return -1;
    }
    size_t *counts = dm_calloc((size_t)size, sizeof(*counts));
    if (counts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *sizes = counts; /* the hold's */
    const size_t row = rows == 0 ? 0 : array->count / (size_t)rows;
    if (splits == Py_None) {
        if (rows % size != 0) {
            PyErr_Format(PyExc_ValueError,
                         "without %s, %s must divide into %d equal pieces, it has %zd "
                         "rows",
                         splits_name, name, (int)size, rows);
            return -1;
        }
        for (int32_t i = 0; i < size; i++) {
            counts[i] = (size_t)(rows / size) * row;
        }
        return 0;
    }

    PyObject *items = PySequence_Tuple(splits);
    if (items == NULL) {
        return -1;
    }
    int result = -1;
    int64_t sum = 0;
    if (PyTuple_GET_SIZE(items) != size) {
        PyErr_Format(PyExc_ValueError,
                     "%s must have one number for each of the %d members, got %R",
                     splits_name, (int)size, splits);
        goto done;
    }
    for (int32_t i = 0; i < size; i++) {
        int64_t value = 0;
        if (py_args_int(PyTuple_GET_ITEM(items, i), splits_name, 0,
                        INT32_MAX * INT64_C(65536), &value) < 0) {
            goto done;
        }
        counts[i] = (size_t)value * row;
        if (__builtin_add_overflow(sum, value, &sum)) {
            sum = INT64_MAX;
        }
    }
    if (sum != rows) {
        PyErr_Format(PyExc_ValueError,
                     "%s must add up to the %zd rows of %s, they add up to %lld",
                     splits_name, rows, name, (long long)sum);
        goto done;
    }
    result = 0;
done:
    Py_DECREF(items);
    return result;
}

static int
parse_both_splits(py_call *c, PyObject *const *values)
{
    int32_t size = dm_group_size(c->group);
    int32_t rank = dm_group_rank(c->group);
    py_pieces *outputs = &c->hold->output;
    py_pieces *inputs = &c->hold->input;
    if (parse_splits(values[2], "output_splits", values[0], &c->arrays[0], "output",
                     size, &outputs->sizes) < 0 ||
        parse_splits(values[3], "input_splits", values[1], &c->arrays[1], "input", size,
                     &inputs->sizes) < 0) {
        return -1;
    }
    if (outputs->sizes[rank] != inputs->sizes[rank]) {
        PyErr_Format(PyExc_ValueError,
                     "what this rank (group rank %d) sends itself must be what it "
                     "receives from itself: %zu elements of input, %zu of output",
                     (int)rank, inputs->sizes[rank], outputs->sizes[rank]);
        return -1;
    }
    c->op.input_counts = inputs->sizes;
    c->op.output_counts = outputs->sizes;
    return 0;
}

PyObject *
py_group_all_to_all_single(PY_OPERATION_ARGS)
{
    static const char *const names[] = {"output", "input", "output_splits",
                                        "input_splits", "async_op"};
    static const py_params params = {"all_to_all_single", names, 5, 2, 5};
    PyObject *values[5] = {NULL, NULL, Py_None, Py_None, Py_False};
    py_call c;
    if (py_args_bind(&params, args, nargs, kwnames, values) < 0 ||
        py_call_begin(&c, op, defining_class, DM_OP_ALL_TO_ALL, values[4]) < 0) {
        return NULL;
    }
    int32_t size = dm_group_size(c.group);
    const py_array *output = &c.arrays[0];
    const py_array *input = &c.arrays[1];
    bool split = values[2] != Py_None || values[3] != Py_None;
    if (py_call_export(&c, 0, values[0], "output", true) < 0 ||
        py_call_export(&c, 1, values[1], "input", false) < 0 ||
        check_dtype(output, "output", input, "input") < 0 ||
        (split ? parse_both_splits(&c, values)
               : check_equal_pieces(output, input, size)) < 0 ||
        (size > 1 && py_array_check_apart(output, "output", input, "input") < 0)) {
        return py_call_cancel(&c);
    }
    c.op.dtype = output->dtype;
    c.op.output = output->data;
    c.op.input = input->data;
    c.op.count = split ? 0 : input->count / (size_t)size;
    return py_call_perform(&c);
}

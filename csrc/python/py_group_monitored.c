/* The barrier that says who is missing: see py_group_private.h. */
#include "python/py_group_private.h"

#include "python/py_args.h"
#include "python/py_error.h"
#include "python/py_wait.h"

const char py_group_monitored_barrier_doc[] = PyDoc_STR(
    "monitored_barrier($self, /, timeout=None, wait_all_ranks=False)\n"
    "--\n"
    "\n"
    "A barrier that names the ranks that have not come, on every rank that has.\n"
    "\n"
    "It goes through the store: slower than barrier, and it needs no connections of "
    "the\n"
    "group. A rank that was missed finds the same error when it comes; the group lives "
    "on.\n"
    "\n"
    "Args:\n"
    "    timeout: seconds or a timedelta; None: the group's.\n"
    "    wait_all_ranks: name all missing ranks, not only the first.\n"
    "\n"
    "Raises:\n"
    "    GroupTimeoutError: not all members came in time; the text names those that "
    "did\n"
    "        not.");

PyObject *
py_group_monitored_barrier(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
    static const char *const names[] = {"timeout", "wait_all_ranks"};
    static const py_params params = {"monitored_barrier", names, 2, 0, 2};
    PyObject *values[2] = {Py_None, Py_False};
    py_state *state = py_state_of_type(Py_TYPE(op));
    dm_group *group = ((py_group *)op)->group;
    int64_t timeout_ns = -1;
    if (state == NULL || py_args_bind(&params, args, nargs, kwnames, values) < 0 ||
        py_timeout_parse(values[0], "timeout", &timeout_ns) < 0) {
        return NULL;
    }
    int all = PyObject_IsTrue(values[1]);
    if (all < 0) {
        return NULL;
    }
    if (values[0] == Py_None) {
        timeout_ns = dm_group_timeout(group);
    }
    dm_error err;
    dm_status status;
    py_waiter waiter;
    py_waiter_start(&waiter, dm_clock_deadline(timeout_ns));
    status = dm_group_monitored_barrier(group, all != 0, &waiter.wait, &err);
    py_waiter_stop(&waiter);
    if (status != DM_OK) {
        return py_raise(state, &err);
    }
    Py_RETURN_NONE;
}

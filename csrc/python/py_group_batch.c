/* Operations of a ProcessGroup that are collected and given together: what
 * devicemesh.coalesce is made of. See py_group_private.h.
 *
 * While a thread collects, its operations on the group are checked and put in a list, with
 * their arrays exported. Other threads' operations are not touched.
 */
#include "python/py_group_private.h"

#include "base/dm_alloc.h"
#include "python/py_error.h"

static py_pending *
take_batch(py_group *self)
{
    py_pending *first = self->batch;
    self->batch_thread = 0;
    self->batch = NULL;
    self->batch_tail = &self->batch;
    return first;
}

static void
free_all(py_pending *pending)
{
    while (pending != NULL) {
        py_pending *next = pending->next;
        py_pending_free(pending);
        pending = next;
    }
}

PyObject *
py_group_begin_batch(PyObject *op, PyObject *Py_UNUSED(none))
{
    py_group *self = (py_group *)op;
    if (self->batch_thread != 0) {
        PyErr_SetString(
            PyExc_RuntimeError,
            py_group_collects(self)
                ? "coalesce() is already collecting this group's operations"
                : "coalesce() of another thread is collecting operations on "
                  "this group");
        return NULL;
    }
    self->batch_thread = PyThread_get_thread_ident();
    self->batch = NULL;
    self->batch_tail = &self->batch;
    Py_RETURN_NONE;
}

PyObject *
py_group_drop_batch(PyObject *op, PyObject *Py_UNUSED(none))
{
    free_all(take_batch((py_group *)op));
    Py_RETURN_NONE;
}

/* Gives them all. 0, or -1 with an exception and none given. */
static int
give(py_state *state, dm_group *group, dm_order *orders, py_pending *first, size_t n)
{
    dm_error err;
    dm_status status;
    PyThreadState *thread = PyEval_SaveThread();
    for (py_pending *p = first; p != NULL; p = p->next) {
        py_hold_load(&p->hold, group);
    }
    status = dm_group_submit_all(group, orders, n, &err);
    PyEval_RestoreThread(thread);
    return status == DM_OK ? 0 : py_raise_int(state, &err);
}

PyObject *
py_group_end_batch(PyObject *op, PyObject *Py_UNUSED(none))
{
    py_group *self = (py_group *)op;
    py_state *state = py_state_of_type(Py_TYPE(op));
    py_pending *first = take_batch(self);
    size_t n = 0;
    for (py_pending *p = first; p != NULL; p = p->next) {
        n++;
    }
    PyObject *works = PyList_New(0);
    dm_order *orders = dm_calloc(n, sizeof(*orders));
    if (orders == NULL) {
        PyErr_NoMemory();
    }
    if (state == NULL || works == NULL || orders == NULL || n == 0) {
        goto done;
    }
    size_t at = 0;
    for (py_pending *p = first; p != NULL; p = p->next) {
        orders[at++] = (dm_order){p->op, py_pending_store, p, NULL};
    }
    if (give(state, self->group, orders, first, n) < 0) {
        goto done;
    }

    for (at = 0; first != NULL; at++) {
        py_pending *pending = first;
        first = pending->next;
        pending->work = orders[at].work;
        PyObject *work = py_work_new(state, pending);
        if (work == NULL || (works != NULL && PyList_Append(works, work) < 0)) {
            Py_CLEAR(works); /* they run; the rest must still get their Works */
        }
        Py_XDECREF(work);
    }

done:
    free_all(first);
    dm_free(orders);
    if (PyErr_Occurred()) {
        Py_CLEAR(works);
    }
    return works;
}

/* Methods of a ProcessGroup that are written in Python: see py_group_private.h.
 *
 * Here they have their names, signatures and docstrings; the modules are imported when one
 * of their functions is first called.
 */
#include "python/py_group_private.h"

#include "python/py_forward.h"

const char py_group_all_gather_object_doc[] = PyDoc_STR(
    "all_gather_object($self, /, objects, obj)\n"
    "--\n"
    "\n"
    "Gathers an object of every member into a list, on every member.\n"
    "\n"
    "Objects travel pickled, and unpickling runs what it is told to run: only among "
    "ranks\n"
    "that trust each other.\n"
    "\n"
    "Args:\n"
    "    objects: list of size() entries, which are replaced.\n"
    "    obj: anything that can be pickled.\n"
    "\n"
    "Raises:\n"
    "    TypeError, ValueError: objects is not such a list; nothing was sent.\n"
    "    pickle.PicklingError: obj cannot be pickled; nothing was sent.\n");

PyObject *
py_group_all_gather_object(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
    return py_forward("devicemesh.objects", "all_gather_object", op, args, nargs,
                      kwnames);
}

const char py_group_broadcast_object_list_doc[] = PyDoc_STR(
    "broadcast_object_list($self, /, objects, root=0)\n"
    "--\n"
    "\n"
    "Copies the root's objects into the lists of all members.\n"
    "\n"
    "Objects travel pickled, and unpickling runs what it is told to run: only among "
    "ranks\n"
    "that trust each other.\n"
    "\n"
    "Args:\n"
    "    objects: list, equally long on every member; replaced but at the root.\n"
    "    root: group rank whose objects are copied.\n"
    "\n"
    "Raises:\n"
    "    As all_gather_object; ValueError for a root outside the group.\n");

PyObject *
py_group_broadcast_object_list(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                               PyObject *kwnames)
{
    return py_forward("devicemesh.objects", "broadcast_object_list", op, args, nargs,
                      kwnames);
}

const char py_group_gather_object_doc[] =
    PyDoc_STR("gather_object($self, /, obj, objects=None, root=0)\n"
              "--\n"
              "\n"
              "Gathers an object of every member into a list of the root.\n"
              "\n"
              "Objects travel pickled, and unpickling runs what it is told to run: "
              "only among ranks\n"
              "that trust each other.\n"
              "\n"
              "Args:\n"
              "    obj: anything that can be pickled.\n"
              "    objects: at the root a list of size() entries, which are replaced; "
              "elsewhere None.\n"
              "    root: group rank that gets the objects.\n"
              "\n"
              "Raises:\n"
              "    As all_gather_object; ValueError for a root outside the group.\n");

PyObject *
py_group_gather_object(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                       PyObject *kwnames)
{
    return py_forward("devicemesh.objects", "gather_object", op, args, nargs, kwnames);
}

const char py_group_scatter_object_list_doc[] =
    PyDoc_STR("scatter_object_list($self, /, output, inputs=None, root=0)\n"
              "--\n"
              "\n"
              "Gives each member one of the root's objects.\n"
              "\n"
              "Objects travel pickled, and unpickling runs what it is told to run: "
              "only among ranks\n"
              "that trust each other.\n"
              "\n"
              "Args:\n"
              "    output: list of at least one entry; the first is replaced.\n"
              "    inputs: at the root a list of size() objects; elsewhere None.\n"
              "    root: group rank that has the objects.\n"
              "\n"
              "Raises:\n"
              "    As all_gather_object; ValueError for a root outside the group.\n");

PyObject *
py_group_scatter_object_list(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames)
{
    return py_forward("devicemesh.objects", "scatter_object_list", op, args, nargs,
                      kwnames);
}

const char py_group_send_object_list_doc[] = PyDoc_STR(
    "send_object_list($self, /, objects, dst, tag=0)\n"
    "--\n"
    "\n"
    "Sends objects to another member, which receives as many.\n"
    "\n"
    "Objects travel pickled, and unpickling runs what it is told to run: only among "
    "ranks\n"
    "that trust each other.\n"
    "\n"
    "Args:\n"
    "    objects: list of anything that can be pickled.\n"
    "    dst: group rank of the receiver.\n"
    "    tag: must be what the receiver asks for. Two messages are sent with it.\n"
    "\n"
    "Raises:\n"
    "    As send.\n");

PyObject *
py_group_send_object_list(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames)
{
    return py_forward("devicemesh.objects", "send_object_list", op, args, nargs,
                      kwnames);
}

const char py_group_recv_object_list_doc[] = PyDoc_STR(
    "recv_object_list($self, /, objects, src=None, tag=0)\n"
    "--\n"
    "\n"
    "Receives the objects that another member sends.\n"
    "\n"
    "Objects travel pickled, and unpickling runs what it is told to run: only among "
    "ranks\n"
    "that trust each other.\n"
    "\n"
    "Args:\n"
    "    objects: list, as long as what is sent; replaced.\n"
    "    src: group rank of the sender; None takes the first message that comes.\n"
    "    tag: must be what the sender gave.\n"
    "\n"
    "Returns:\n"
    "    The group rank of the sender.\n"
    "\n"
    "Raises:\n"
    "    As recv.\n");

PyObject *
py_group_recv_object_list(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames)
{
    return py_forward("devicemesh.objects", "recv_object_list", op, args, nargs,
                      kwnames);
}

const char py_group_batch_isend_irecv_doc[] = PyDoc_STR(
    "batch_isend_irecv($self, /, ops)\n"
    "--\n"
    "\n"
    "Posts several messages at once; an error in one of them means that none is sent.\n"
    "\n"
    "Args:\n"
    "    ops: iterable of tuples (kind, array, peer) or (kind, array, peer, tag), "
    "where\n"
    "        kind is 'isend' or 'irecv' and peer what isend and irecv take.\n"
    "\n"
    "Returns:\n"
    "    A list of Works, in the order of ops.\n"
    "\n"
    "Raises:\n"
    "    As isend and irecv.\n"
    "\n"
    "Example:\n"
    "    >>> import devicemesh\n"
    "    >>> group = devicemesh.World.simulated(2).new_group([0, 1])\n"
    "    >>> [work] = group.batch_isend_irecv([('isend', b'abc', 1)])\n"
    "    >>> work.wait()\n"
    "    True\n");

PyObject *
py_group_batch_isend_irecv(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
    return py_forward("devicemesh.coalesce", "batch_isend_irecv", op, args, nargs,
                      kwnames);
}

const char py_group_coalesce_doc[] = PyDoc_STR(
    "coalesce($self, /, async_op=False)\n"
    "--\n"
    "\n"
    "A context in which operations are collected, and given together at its end.\n"
    "\n"
    "Operations of this thread on this group return None inside. An error inside "
    "means\n"
    "that none of them is sent.\n"
    "\n"
    "Args:\n"
    "    async_op: do not wait for the operations at the end.\n"
    "\n"
    "Returns:\n"
    "    A context manager; it gives a list, which holds the Works of the operations "
    "once\n"
    "    it has ended.\n"
    "\n"
    "Raises:\n"
    "    RuntimeError: operations of this group are being collected already.\n"
    "\n"
    "Example:\n"
    "    >>> import devicemesh\n"
    "    >>> group = devicemesh.World.simulated(2).new_group([0, 1])\n"
    "    >>> with group.coalesce() as works:\n"
    "    ...     group.all_reduce(bytearray(4))\n"
    "    ...     group.broadcast(bytearray(4))\n"
    "    >>> [work.name for work in works]\n"
    "    ['all_reduce', 'broadcast']\n");

PyObject *
py_group_coalesce(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames)
{
    return py_forward("devicemesh.coalesce", "coalesce", op, args, nargs, kwnames);
}

"""Operations on any Python object: pickled here, sent as bytes by the group's operations.

What arrives is unpickled, and unpickling runs what it is told to run: only among ranks that
trust each other. Everything goes through `dumps` and `loads` below.

These are the methods of ProcessGroup, written in Python.
"""

import pickle
from array import array

EMPTY = b""


def dumps(obj):
    """The one place where objects become bytes: a bytearray."""
    return bytearray(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))


def loads(data):
    """And the one where bytes become objects again."""
    return pickle.loads(data)


def length(data=EMPTY):
    """A number of bytes, as an array that operations take."""
    return array("q", [len(data)])


def check_list(name, objects, count=None):
    if not isinstance(objects, list):
        raise TypeError(f"{name} must be a list, got {type(objects).__name__}")
    if count is not None and len(objects) != count:
        raise ValueError(
            f"{name} must have one entry for each of the {count} members, it has {len(objects)}"
        )


def is_root(group, root):
    """Whether this rank is the root, which must be one of the group's."""
    if not 0 <= root < group.size():
        raise ValueError(
            f"root must be a group rank, 0..{group.size() - 1} in a group of {group.size()}, "
            f"got {root}"
        )
    return root == group.rank()


def gather_lengths(group, data):
    """How many bytes every member has."""
    lengths = array("q", [0] * group.size())
    group.all_gather_into_tensor(lengths, length(data))
    return lengths.tolist()


def all_gather_object(group, objects, obj):
    check_list("objects", objects, group.size())
    data = dumps(obj)
    lengths = gather_lengths(group, data)
    # Simulated members contribute nothing: not even what an object is made of.
    outputs = [bytearray(count) for count in lengths]
    group.all_gather(outputs, data)
    for i, output in enumerate(outputs):
        if output:
            objects[i] = loads(output)


def broadcast_object_list(group, objects, root=0):
    check_list("objects", objects)
    data = [dumps(obj) for obj in objects] if is_root(group, root) else None
    lengths = array("q", [0] * len(objects) if data is None else map(len, data))
    group.broadcast(lengths, root)
    buffer = bytearray().join(data) if data is not None else bytearray(sum(lengths))
    group.broadcast(buffer, root)
    if data is None:
        fill(objects, buffer, lengths)


def fill(objects, buffer, lengths):
    """Puts the objects that lie one after the other in the buffer into the list."""
    at = 0
    with memoryview(buffer) as view:
        for i in range(len(objects)):
            if lengths[i]:
                objects[i] = loads(view[at : at + lengths[i]])
            at += lengths[i]


def gather_object(group, obj, objects=None, root=0):
    root_here = is_root(group, root)
    if root_here:
        check_list("objects", objects, group.size())
    elif objects is not None:
        raise ValueError(f"objects must be None but at the root, which is group rank {root}")
    data = dumps(obj)
    lengths = gather_lengths(group, data)
    most = max(lengths)
    data.extend(bytes(most - len(data)))
    outputs = [bytearray(most) for _ in lengths] if root_here else None
    group.gather(data, outputs, root)
    if root_here:
        for i, output in enumerate(outputs):
            if lengths[i]:
                objects[i] = loads(memoryview(output)[: lengths[i]])


def scatter_object_list(group, output, inputs=None, root=0):
    check_list("output", output)
    if len(output) < 1:
        raise ValueError("output must have room for one object: a list of at least one entry")
    root_here = is_root(group, root)
    if root_here:
        check_list("inputs", inputs, group.size())
    elif inputs is not None:
        raise ValueError(f"inputs must be None but at the root, which is group rank {root}")
    pieces = [dumps(obj) for obj in inputs] if root_here else None
    mine = length()
    group.scatter(mine, [length(piece) for piece in pieces] if root_here else None, root)
    most = length(max(pieces, key=len) if root_here else EMPTY)
    group.broadcast(most, root)
    for piece in pieces or ():
        piece.extend(bytes(most[0] - len(piece)))
    buffer = bytearray(most[0])
    group.scatter(buffer, pieces, root)
    if mine[0]:
        output[0] = loads(memoryview(buffer)[: mine[0]])


def send_object_list(group, objects, dst, tag=0):
    check_list("objects", objects)
    data = [dumps(obj) for obj in objects]
    group.send(array("q", map(len, data)), dst, tag)
    group.send(bytearray().join(data), dst, tag)


def recv_object_list(group, objects, src=None, tag=0):
    check_list("objects", objects)
    lengths = array("q", [0] * len(objects))
    source = group.recv(lengths, src, tag)
    buffer = bytearray(sum(lengths))
    group.recv(buffer, source, tag)
    fill(objects, buffer, lengths)
    return source

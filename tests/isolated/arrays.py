"""Arrays of every protocol leave nothing behind: references, memory, exports."""

from contextlib import suppress

import dlpack
import numpy as np
from measure import check_steady

from devicemesh import DeviceMeshError, World

world = World.simulated(2)
group = world.new_group([0, 1])
array = np.ones(8, "f4")
pieces = np.ones(16, "f4")
ERRORS = (TypeError, ValueError, DeviceMeshError, BufferError, OverflowError, RuntimeError)


class Described:
    def __init__(self, array, **entries):
        self.__array_interface__ = {**array.__array_interface__, **entries}


class Wrapped:
    """numpy's own capsules."""

    def __dlpack__(self, **named):
        return array.__dlpack__(**named)

    def __dlpack_device__(self):
        return array.__dlpack_device__()


class Grad(Wrapped):
    requires_grad = True

    def __dlpack__(self, **named):
        raise BufferError("no")

    def detach(self):
        return Wrapped()


def refuse(self):
    raise BufferError("no\nline 2")


looked = dlpack.exchange_by_looking()
owned = dlpack.exchange_by_owning()
aliased = dlpack.exchange_by_looking(detach=lambda self: type(self)(self.value))
negative = dlpack.exchange_by_owning(is_neg=lambda self: True)
mute = dlpack.exchange_type(None, dlpack.RAISES, fileno=lambda self: 0)
refusing = dlpack.exchange_type(dlpack.RAISES, dlpack.RAISES, fileno=refuse)
data = bytearray(32)


def good():
    yield dlpack.Exporter(array)
    yield dlpack.Exporter(array, versioned=False)
    yield dlpack.Exporter(array, deleter=False)
    yield Wrapped()
    yield Grad()
    yield owned(array)
    yield aliased(array)
    yield Described(array)
    yield Described(array, data=data)


def bad():
    yield dlpack.Exporter(array, device=(2, 0))
    yield dlpack.Exporter(array, device=None)
    yield dlpack.Exporter(array, version=(2, 0))
    yield dlpack.Exporter(array, strides=[2])
    yield dlpack.Exporter(array, shape=[-1])
    yield dlpack.Exporter(array, code=99)
    yield dlpack.Exporter(array, flags=dlpack.READ_ONLY)
    yield dlpack.Function(lambda **_: None)
    yield dlpack.Function(lambda **_: dlpack.capsule(1, b"used_dltensor"))
    yield dlpack.Function(refuse)
    yield negative(array)
    yield mute()
    yield refusing()
    yield Described(array, version=2)
    yield Described(array, shape=("x",))
    yield Described(array, strides=(1, 2))
    yield Described(array, typestr="<M8[s]")
    yield Described(array, data=bytearray(3))
    yield Described(array, data=data, offset=99)
    yield Described(array, mask=1)


def taken():
    for value in (*good(), looked(array)):
        group.all_reduce(value)
        group.all_gather_into_tensor(pieces, value)
        with suppress(ERRORS):
            group.all_gather_into_tensor(value, value)


def taken_asynchronously():
    for value in good():
        group.all_reduce(value, async_op=True).wait()
        group.all_reduce(value, async_op=True)
        with suppress(ERRORS):
            group.all_gather_into_tensor(value, value, async_op=True)


def refused():
    for value in bad():
        for async_op in (False, True):
            with suppress(ERRORS):
                group.all_reduce(value, async_op=async_op)
            with suppress(ERRORS):
                group.all_gather_into_tensor(pieces, value, async_op=async_op)


exported = [*good()]
for value in exported:
    group.all_reduce(value, async_op=True)
    if isinstance(value, dlpack.Exporter) and value.export.managed.deleter:
        assert value.export.deleted == 1, value
data.append(0)
data.pop()

types = (looked, owned, aliased, negative, mute, refusing, Described, Wrapped, Grad)
for step in (taken, taken_asynchronously, refused):
    check_steady(step, array, pieces, data, *types, None, True, rounds=40, windows=20)

"""Groups, works and arrays leave nothing behind, however operations end."""

from contextlib import suppress

import ml_dtypes
import numpy as np
from measure import check_steady

from devicemesh import DeviceMeshError, ProcessGroup, Work, World

world = World.simulated(4)
group = world.new_group([0, 1, 2, 3])
small = np.ones(8, "f4")
large = np.ones(1 << 15, "f4")
pieces = np.ones(32, "f4")
brain = np.ones(8, ml_dtypes.bfloat16)
data = bytearray(8)
ERRORS = (TypeError, ValueError, DeviceMeshError, NotImplementedError, BufferError)


def made_and_dropped():
    world.new_group([0, 1], name="tp")


def made_and_closed():
    other = world.new_group([0, 1])
    other.barrier()
    other.close()
    with suppress(DeviceMeshError):
        other.barrier()


def aborted():
    world.new_group([0, 1]).abort()


def facts():
    repr(group), group.ranks, group.name, group.dim_name, group.backend, group.transport
    group.timeout = group.timeout
    group.rank(), group.size(), hash(group)


def operations():
    for array in (small, large, brain, data):
        group.all_reduce(array)
        group.broadcast(array, root=1)
        group.send(array, 1)
    group.all_gather_into_tensor(pieces, small)
    group.reduce_scatter_tensor(small, pieces, op="max")
    group.all_to_all_single(pieces, np.ones(32, "f4"))
    group.barrier()


def operations_that_fail():
    for arguments in (
        (),
        (3,),
        (small, "x"),
        (small, 3),
        (small, "band"),
        (small[::2],),
        (b"read-only",),
        (np.zeros(2, "M8[s]"),),
        (np.zeros(2, ">f4"),),
        (np.zeros(2, ml_dtypes.int4),),
    ):
        for async_op in (False, True):
            with suppress(ERRORS):
                group.all_reduce(*arguments, async_op=async_op)
    for output, input in ((small, pieces), (pieces, data), (data, object()), (b"", small)):
        for method in (
            group.all_gather_into_tensor,
            group.reduce_scatter_tensor,
            group.all_to_all_single,
        ):
            with suppress(ERRORS):
                method(output, input)
            with suppress(ERRORS):
                method(output, input, async_op=True)
    for method in (group.recv, group.send):
        for rank in (-1, 0, 1, 9, "x"):
            with suppress(ERRORS):
                method(small, rank)


def works():
    for array in (small, large, data):
        work = group.all_reduce(array, async_op=True)
        repr(work), work.wait(), work.result(), work.is_completed(), work.exception()
        group.all_reduce(array, async_op=True)
        with suppress(ERRORS):
            work.wait(-1)
    kept = [group.barrier(async_op=True) for _ in range(10)]
    assert all(work.wait(1) for work in kept)


for step in (
    made_and_dropped,
    made_and_closed,
    aborted,
    facts,
    operations,
    operations_that_fail,
    works,
):
    check_steady(step, World, ProcessGroup, Work, None, small, large, pieces, brain, data)

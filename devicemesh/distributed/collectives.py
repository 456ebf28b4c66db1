"""Operations that a group's members do together, on one array or two.

Arrays are what groups take: numpy arrays, torch CPU tensors and others. With `async_op` a
function returns a Work, else None. Ranks outside the group (NON_GROUP_MEMBER) get a warning
and None.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from devicemesh._core import ProcessGroup
from devicemesh.distributed import state
from devicemesh.reduce_op import ReduceOp


def supports_complex(reduceOp: str) -> bool:
    """Whether complex arrays can be reduced so: by sum, product, average and premul_sum."""
    return reduceOp in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVG, ReduceOp.PREMUL_SUM)


def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op: bool = False):
    """Combines the arrays of all members, elementwise, into each of them.

    Example:
        >>> import array, devicemesh.distributed as dist
        >>> dist.init_process_group(rank=0, world_size=1)
        >>> values = array.array("i", [1, 2])
        >>> dist.all_reduce(values, dist.ReduceOp.MAX)
        >>> values.tolist()
        [1, 2]
        >>> dist.destroy_process_group()
    """
    pg = state.member(group, "all_reduce")
    return None if pg is None else pg.all_reduce(tensor, op, async_op)


def broadcast(
    tensor: Any,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
):
    """Copies the array of one member, global rank `src` or group rank `group_src`, to all."""
    pg = state.member(group, "broadcast")
    if pg is None:
        return None
    return pg.broadcast(tensor, state.peer(pg, src, group_src, "src"), async_op)


def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
    """Puts the inputs of all members, by group rank, into output_tensor."""
    pg = state.member(group, "all_gather_into_tensor")
    return None if pg is None else pg.all_gather_into_tensor(output_tensor, input_tensor, async_op)


def all_gather_single(output_tensor, input_tensor, group=None, async_op=False):
    """all_gather_into_tensor by its other name."""
    pg = state.member(group, "all_gather_single")
    return None if pg is None else pg.all_gather_into_tensor(output_tensor, input_tensor, async_op)


def reduce_scatter_tensor(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    """Combines the inputs of all members; each gets its piece of the result."""
    pg = state.member(group, "reduce_scatter_tensor")
    return None if pg is None else pg.reduce_scatter_tensor(output, input, op, async_op)


def reduce_scatter_single(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    """reduce_scatter_tensor by its other name."""
    pg = state.member(group, "reduce_scatter_single")
    return None if pg is None else pg.reduce_scatter_tensor(output, input, op, async_op)


def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids=None,
    timeout: timedelta | None = None,
):
    """Waits until every member has come here.

    Args:
        timeout: how long a synchronous call waits, seconds or timedelta; None for the
            group's time-out. After it the barrier goes on without this rank.
        device_ids: accepted, not used.

    Raises:
        GroupTimeoutError: not in time.
    """
    pg = state.member(group, "barrier")
    if pg is None:
        return None
    if async_op or timeout is None:
        return pg.barrier(async_op)
    pg.barrier(async_op=True).wait(timeout)
    return None


def monitored_barrier(
    group: ProcessGroup | None = None, timeout=None, wait_all_ranks: bool = False
):
    """A barrier whose error names the ranks that did not come: the first of them, or all
    with `wait_all_ranks`. `timeout` is in seconds or a timedelta; None for the group's."""
    pg = state.member(group, "monitored_barrier")
    if pg is not None:
        pg.monitored_barrier(timeout, wait_all_ranks)

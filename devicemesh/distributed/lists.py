"""Operations on lists of arrays, one array for each member; reduce; uneven pieces.

Lists whose arrays lie one after the other in memory are used in place, others copied.
"""

from __future__ import annotations

from typing import Any

from devicemesh._core import ProcessGroup
from devicemesh.distributed import state
from devicemesh.reduce_op import ReduceOp


def reduce(
    tensor: Any,
    dst: int | None = None,
    op=ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
):
    """Combines the arrays of all members into that of one; the others keep theirs."""
    pg = state.member(group, "reduce")
    if pg is None:
        return None
    return pg.reduce(tensor, state.peer(pg, dst, group_dst, "dst"), op, async_op)


def all_gather(tensor_list, tensor, group=None, async_op=False):
    """Copies the array of the member with group rank i into tensor_list[i] on all members."""
    pg = state.member(group, "all_gather")
    return None if pg is None else pg.all_gather(tensor_list, tensor, async_op)


def gather(
    tensor: Any,
    gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
):
    """Copies the arrays of all members into gather_list at one of them: global rank `dst`
    (0 where neither is given) or group rank `group_dst`. Elsewhere there is no list."""
    pg = state.member(group, "gather")
    if pg is None:
        return None
    root = state.peer_or_0(pg, dst, group_dst, "dst")
    return pg.gather(tensor, gather_list or None, root, async_op)


def scatter(
    tensor: Any,
    scatter_list: list[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
):
    """Copies scatter_list[i] of one member, global rank `src` (0 where neither is given) or
    group rank `group_src`, into the array of the member with group rank i."""
    pg = state.member(group, "scatter")
    if pg is None:
        return None
    root = state.peer_or_0(pg, src, group_src, "src")
    return pg.scatter(tensor, scatter_list or None, root, async_op)


def reduce_scatter(output, input_list, op=ReduceOp.SUM, group=None, async_op: bool = False):
    """Combines input_list[i] of all members into the output of the member with group rank i."""
    pg = state.member(group, "reduce_scatter")
    return None if pg is None else pg.reduce_scatter(output, input_list, op, async_op)


def all_to_all(output_tensor_list, input_tensor_list, group=None, async_op: bool = False):
    """Copies input_tensor_list[i] into the list of the member with group rank i."""
    pg = state.member(group, "all_to_all")
    return None if pg is None else pg.all_to_all(output_tensor_list, input_tensor_list, async_op)


def all_to_all_single(
    output,
    input,
    output_split_sizes=None,
    input_split_sizes=None,
    group=None,
    async_op: bool = False,
):
    """Sends the i-th piece of input to the member with group rank i and puts its piece into
    the i-th place of output. The pieces are equal, or as many rows as the lists say."""
    pg = state.member(group, "all_to_all_single")
    if pg is None:
        return None
    return pg.all_to_all_single(
        output, input, output_split_sizes or None, input_split_sizes or None, async_op
    )

"""Operations on any objects that can be pickled.

What arrives is unpickled, which runs what it is told to run: for ranks that trust each other.
`device` is accepted and not used.
"""

from __future__ import annotations

from typing import Any

from devicemesh._core import ProcessGroup
from devicemesh.distributed import state


def all_gather_object(object_list, obj, group=None):
    """Puts the object of the member with group rank i into object_list[i] on all members."""
    pg = state.member(group, "all_gather_object")
    if pg is not None:
        pg.all_gather_object(object_list, obj)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: Any = None,
    group_src: int | None = None,
):
    """Puts the objects of one member, global rank `src` (0 where neither is given) or group
    rank `group_src`, into the lists of all, which are equally long."""
    pg = state.member(group, "broadcast_object_list")
    if pg is not None:
        pg.broadcast_object_list(object_list, state.peer_or_0(pg, src, group_src, "src"))


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
):
    """Puts the objects of all members into object_gather_list at one of them, global rank
    `dst` (0 where neither is given) or group rank `group_dst`. Elsewhere there is no list."""
    pg = state.member(group, "gather_object")
    if pg is not None:
        root = state.peer_or_0(pg, dst, group_dst, "dst")
        pg.gather_object(obj, object_gather_list or None, root)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
):
    """Puts scatter_object_input_list[i] of one member, global rank `src` (0 where neither is
    given) or group rank `group_src`, into the first place of the output list of the member
    with group rank i. The inputs of others do not count."""
    pg = state.member(group, "scatter_object_list")
    if pg is not None:
        root = state.peer_or_0(pg, src, group_src, "src")
        inputs = scatter_object_input_list if pg.rank() == root else None
        pg.scatter_object_list(scatter_object_output_list, inputs, root)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: ProcessGroup | None = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
):
    """Sends the objects to global rank `dst` or group rank `group_dst`. `use_batch` is
    accepted and not used: nothing here needs a batch."""
    pg = state.member(group, "send_object_list")
    if pg is not None:
        pg.send_object_list(object_list, state.peer(pg, dst, group_dst, "dst"))


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
):
    """Receives as many objects as the list is long from global rank `src` or group rank
    `group_src`; with neither, from who comes first.

    Returns:
        The sender's global rank; -1 where this rank is not in the group.
    """
    pg = state.member(group, "recv_object_list")
    if pg is None:
        return -1
    return pg.ranks[pg.recv_object_list(object_list, state.source(pg, src, group_src))]

"""Messages from one rank to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from devicemesh._core import ProcessGroup, Work
from devicemesh.distributed import state
from devicemesh.distributed.groups import get_global_rank


def send(
    tensor: Any,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Sends the array to global rank `dst` or group rank `group_dst`; returns when it may be
    changed again."""
    pg = state.member(group, "send")
    if pg is not None:
        pg.send(tensor, state.peer(pg, dst, group_dst, "dst"), tag)


def recv(
    tensor: Any,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receives what global rank `src` or group rank `group_src` sends; with neither, what
    comes first.

    Returns:
        The sender's global rank; -1 where this rank is not in the group.
    """
    pg = state.member(group, "recv")
    if pg is None:
        return -1
    return pg.ranks[pg.recv(tensor, state.source(pg, src, group_src), tag)]


def isend(
    tensor: Any,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """As send, without waiting: returns a Work."""
    pg = state.member(group, "isend")
    return None if pg is None else pg.isend(tensor, state.peer(pg, dst, group_dst, "dst"), tag)


def irecv(
    tensor: Any,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """As recv, without waiting: returns a Work, whose result() is the sender's group rank."""
    pg = state.member(group, "irecv")
    return None if pg is None else pg.irecv(tensor, state.source(pg, src, group_src), tag)


class P2POp:
    """One message of batch_isend_irecv.

    Args:
        op: isend or irecv of this module.
        tensor: the array.
        peer: global rank of the other side; or group_peer: its group rank.
        group: None for the default group.
        tag: as for send.

    Raises:
        ValueError: another op, no peer or one that is not in the group.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Any,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op is not isend and op is not irecv:
            raise ValueError(f"op must be isend or irecv of devicemesh.distributed, got {op!r}")
        self.op = op
        self.tensor = tensor
        self.group = state.require(group)
        self.group_peer = state.peer(self.group, peer, group_peer, "peer")
        self.peer = get_global_rank(self.group, self.group_peer)
        self.tag = tag

    def __repr__(self) -> str:
        return f"P2POp({self.op.__name__}, peer={self.peer}, tag={self.tag})"


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Starts the messages, whose order matters only between those to or from one rank with
    one tag.

    Returns:
        A Work for each.

    Raises:
        ValueError: not a list of P2POp, an empty one, or one of several groups.
    """
    if not isinstance(p2p_op_list, list) or not p2p_op_list:
        raise ValueError(f"p2p_op_list must be a list of P2POp, got {p2p_op_list!r}")
    for each in p2p_op_list:
        if not isinstance(each, P2POp):
            raise ValueError(f"p2p_op_list must be a list of P2POp, {each!r} is in it")
        if each.group is not p2p_op_list[0].group:
            raise ValueError("the messages of p2p_op_list must be in one group")
    messages = [(each.op.__name__, each.tensor, each.group_peer, each.tag) for each in p2p_op_list]
    return p2p_op_list[0].group.batch_isend_irecv(messages)

"""Messages from one rank to another."""

from __future__ import annotations

from typing import Any

from devicemesh._core import ProcessGroup
from devicemesh.distributed import state


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
    return pg.ranks[pg.recv(tensor, _source(pg, src, group_src), tag)]


def _source(pg: ProcessGroup, src: int | None, group_src: int | None) -> int | None:
    if src is None and group_src is None:
        return None
    return state.peer(pg, src, group_src, "src")

"""The default group, and what the argument `group` means.

The default group spans the default world of devicemesh (`devicemesh.default_world`), which
meshes live in too: a world that `init_device_mesh` has made is one that is initialized here.
"""

from __future__ import annotations

import warnings
from _thread import allocate_lock
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

from devicemesh import _core, bootstrap
from devicemesh._core import ProcessGroup

default_pg_timeout = timedelta(minutes=30)

NON_GROUP_MEMBER = -100


class Made:
    """What was made in one world.

    Attributes:
        default: the group of all.
        groups: it and the others. Kept until they are destroyed: a member that is done with
            a group and forgets it must not end it for the others.
    """

    __slots__ = ("default", "groups")

    def __init__(self, default: ProcessGroup) -> None:
        self.default = default
        self.groups = [default]


_made: WeakKeyDictionary[Any, Made] = WeakKeyDictionary()
_lock = allocate_lock()


def made(backend: str | None = None) -> Made:
    """What was made in the default world; the default group, with `backend`, if it has to be
    made first. Connects nothing."""
    world = _core._get_default_world()
    if world is None or world.closed:
        raise ValueError(
            "the default process group has not been initialized: call init_process_group first"
        )
    found = _made.get(world)
    if found is not None:
        return found
    with _lock:
        found = _made.get(world)
        if found is None:
            found = Made(world.new_group(range(world.size), backend=backend))
            _made[world] = found
        return found


class _WorldMeta(type):
    """Gives classes the property WORLD."""

    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, or None before it is initialized."""
        return made().default if bootstrap.is_initialized() else None


class group(metaclass=_WorldMeta):
    """``group.WORLD`` is the default group."""


class GroupMember(metaclass=_WorldMeta):
    """``GroupMember.NON_GROUP_MEMBER`` is what ``new_group`` gives to ranks outside."""

    NON_GROUP_MEMBER = NON_GROUP_MEMBER


def is_non_member(group: Any) -> bool:
    """Whether `group` stands for a group that this rank is not in."""
    return isinstance(group, int) and group == NON_GROUP_MEMBER


def require(group: Any) -> ProcessGroup:
    """The group that the argument means. ValueError where this rank is not in it."""
    if group is None:
        return made().default
    if isinstance(group, ProcessGroup):
        return group
    if is_non_member(group):
        raise ValueError("this rank is not in the group (NON_GROUP_MEMBER)")
    raise TypeError(f"group must be a ProcessGroup or None, got {group!r}")


def member(group: Any, operation: str) -> ProcessGroup | None:
    """The group that the argument of an operation means, or None, with a warning, where this
    rank is not in it."""
    if isinstance(group, ProcessGroup):
        return group
    if is_non_member(group):
        world = _core._get_default_world()
        rank = -1 if world is None else world.rank
        warnings.warn(
            f"{operation} does nothing on rank {rank}, which is not in the group", stacklevel=3
        )
        return None
    return require(group)


def group_rank_of(group: ProcessGroup, global_rank: int) -> int:
    """Its place among the group's ranks."""
    ranks = group.ranks
    try:
        # A group of all, in order, is the common one.
        if 0 <= global_rank < len(ranks) and ranks[global_rank] == global_rank:
            return global_rank
        return ranks.index(global_rank)
    except ValueError:
        raise ValueError(
            f"rank {global_rank} is not in the group of ranks {_shown(ranks)}"
        ) from None


def _shown(ranks: tuple[int, ...]) -> str:
    few = ", ".join(map(str, ranks[:16]))
    return few if len(ranks) <= 16 else f"{few}, ... ({len(ranks)} in all)"


def peer(group: ProcessGroup, global_rank: int | None, group_rank: int | None, name: str) -> int:
    """The group rank given either way: as `name` ("src") or as `group_` with that."""
    if group_rank is not None:
        if global_rank is not None:
            raise ValueError(f"{name} and group_{name} cannot both be given")
        return group_rank
    if global_rank is None:
        raise ValueError(f"either {name} or group_{name} must be given")
    return group_rank_of(group, global_rank)


def peer_or_0(
    group: ProcessGroup, global_rank: int | None, group_rank: int | None, name: str
) -> int:
    """The same, where neither means global rank 0."""
    if global_rank is None and group_rank is None:
        global_rank = 0
    return peer(group, global_rank, group_rank, name)


def source(group: ProcessGroup, src: int | None, group_src: int | None) -> int | None:
    """The group rank to receive from; None, from any, where neither is given."""
    if src is None and group_src is None:
        return None
    return peer(group, src, group_src, "src")

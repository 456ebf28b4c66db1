"""Groups of some of the ranks, and what is known of groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from devicemesh import _core
from devicemesh._core import ProcessGroup
from devicemesh.distributed import state
from devicemesh.distributed.lifecycle import timeout_of
from devicemesh.distributed.names import cpu_backend


def get_rank(group: ProcessGroup | None = None) -> int:
    """This process's rank in the group; -1 where it is not in it."""
    return -1 if state.is_non_member(group) else state.require(group).rank()


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Number of ranks in the group; -1 where this rank is not in it."""
    return -1 if state.is_non_member(group) else state.require(group).size()


def get_backend(group: ProcessGroup | None = None) -> str:
    """The group's backend, such as ``"gloo"``."""
    return state.require(group).backend


def get_backend_config(group: ProcessGroup | None = None) -> str:
    """The group's backend with its device, such as ``"cpu:gloo"``."""
    return f"cpu:{state.require(group).backend}"


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """Global ranks of the group's members, by group rank."""
    return list(state.require(group).ranks)


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """The group rank of a global rank. ValueError where it is not in the group."""
    return state.group_rank_of(state.require(group), global_rank)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """The global rank of a group rank. ValueError where there is none such."""
    ranks = state.require(group).ranks
    if not 0 <= group_rank < len(ranks):
        raise ValueError(f"group rank must be in 0..{len(ranks) - 1}, got {group_rank}")
    return ranks[group_rank]


def new_group(
    ranks=None,
    timeout=None,
    backend=None,
    pg_options=None,
    use_local_synchronization: bool = False,
    group_desc=None,
    device_id=None,
    sort_ranks: bool = True,
):
    """A group of some ranks. Nothing is connected before its first operation.

    The members must call this in the same order for the same list of ranks; other ranks may
    call it too, as in torch they must.

    Args:
        ranks: global ranks; None: all.
        timeout: seconds or timedelta; None for the default group's.
        backend: as for init_process_group; None for the default group's.
        pg_options: options with a time-out, used where `timeout` is None.
        use_local_synchronization: ranks outside get None; otherwise NON_GROUP_MEMBER.
        group_desc: what errors call the group; the same on all members.
        device_id: None or a CPU device.
        sort_ranks: group ranks follow the sorted ranks, torch's default; False: the order
            of `ranks`, as groups of a mesh do.

    Returns:
        A ProcessGroup, or GroupMember.NON_GROUP_MEMBER (or None, see above).

    Raises:
        ValueError: a rank out of range or twice.

    Example:
        >>> import devicemesh, devicemesh.distributed as dist
        >>> with devicemesh.simulate(world_size=8, rank=2):
        ...     group = dist.new_group([6, 4, 2, 0])
        ...     dist.get_process_group_ranks(group), dist.get_rank(group)
        ([0, 2, 4, 6], 1)
    """
    made = state.made()
    world = _core._get_default_world()
    name = cpu_backend(backend) or made.default.backend
    if device_id is not None and getattr(device_id, "type", device_id) != "cpu":
        raise ValueError(f"device_id must be a CPU device or None, got {device_id!r}")
    ranks = _checked(range(world.size) if ranks is None else ranks, world.size)
    if sort_ranks:
        ranks.sort()
    if timeout is None:
        timeout = timeout_of(pg_options)
    if world.rank not in ranks:
        return None if use_local_synchronization else state.NON_GROUP_MEMBER
    group = world.new_group(ranks, backend=name, timeout=timeout, name=group_desc)
    made.groups.append(group)
    return group


def _checked(ranks: Any, size: int) -> list[int]:
    """The ranks as a list; in all processes, whether they are members or not."""
    ranks = list(ranks)
    for rank in ranks:
        if not 0 <= rank < size:
            raise ValueError(f"ranks must be in 0..{size - 1}, got {rank}")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"ranks must not contain duplicates, got {ranks}")
    return ranks


def new_subgroups(
    group_size=None,
    group=None,
    timeout=None,
    backend=None,
    pg_options=None,
    group_desc=None,
):
    """Groups of `group_size` neighbouring ranks each.

    Args:
        group_size: must divide the group's size.
        group: what is divided; None: all ranks.
        timeout, backend, pg_options, group_desc: as for new_group.

    Returns:
        (this rank's group, all of them); see new_subgroups_by_enumeration.

    Raises:
        ValueError: a size that does not divide, or none (torch then takes the number of
            CUDA devices).

    Example:
        >>> import devicemesh, devicemesh.distributed as dist
        >>> with devicemesh.simulate(world_size=4, rank=3):
        ...     mine, groups = dist.new_subgroups(2)
        ...     mine.ranks, groups[0] == dist.GroupMember.NON_GROUP_MEMBER
        ((2, 3), True)
    """
    if group_size is None:
        raise ValueError("group_size must be given: there is no default on CPU")
    if group_size <= 0:
        raise ValueError(f"group_size must be positive, got {group_size}")
    ranks = get_process_group_ranks(group)
    if len(ranks) % group_size != 0:
        raise ValueError(f"group_size must divide the group's {len(ranks)} ranks, got {group_size}")
    lists = [ranks[i : i + group_size] for i in range(0, len(ranks), group_size)]
    return new_subgroups_by_enumeration(lists, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list,
    timeout=None,
    backend=None,
    pg_options=None,
    group_desc=None,
):
    """A group for each of several lists of ranks that have none in common.

    Returns:
        (this rank's group or None, a list with the handle that new_group gives for each).

    Raises:
        ValueError: no list, or a rank in two of them.
    """
    if not ranks_per_subgroup_list:
        raise ValueError("ranks_per_subgroup_list must not be empty")
    seen: dict[int, Any] = {}
    for ranks in ranks_per_subgroup_list:
        for rank in ranks:
            if rank in seen:
                raise ValueError(f"rank {rank} is in two subgroups: {seen[rank]} and {ranks}")
            seen[rank] = ranks
    groups = [
        new_group(ranks, timeout, backend, pg_options, group_desc=group_desc)
        for ranks in ranks_per_subgroup_list
    ]
    mine = [each for each in groups if not state.is_non_member(each)]
    return (mine[0] if mine else None), groups


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: list | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Splits a group into parts that have no rank in common.

    Args:
        parent_pg: the group; None: the default one.
        split_ranks: a list of lists of *group* ranks. Group ranks of a part follow the
            sorted list, as in torch.
        timeout, pg_options, group_desc, backend: as for new_group.

    Returns:
        This rank's part, or None where it is in none.

    Raises:
        ValueError: an empty part, a rank out of range or twice.

    torch does this for NCCL only.
    """
    parent = state.require(parent_pg)
    if not split_ranks:
        raise ValueError("split_ranks must not be empty")
    lists = []
    for part in split_ranks:
        if not part:
            raise ValueError("a part of split_ranks must not be empty")
        lists.append([get_global_rank(parent, rank) for rank in sorted(part)])
    seen = [rank for ranks in lists for rank in ranks]
    if len(set(seen)) != len(seen):
        raise ValueError(f"split_ranks must not name a rank twice, got {split_ranks}")
    mine = parent.ranks[parent.rank()]
    for ranks in lists:
        if mine in ranks:
            return new_group(
                ranks,
                timeout,
                backend or parent.backend,
                pg_options,
                group_desc=group_desc,
                sort_ranks=False,
            )
    return None

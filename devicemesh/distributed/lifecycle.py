"""Beginning and end of the default group."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from devicemesh import _core, bootstrap
from devicemesh._core import ProcessGroup
from devicemesh.bootstrap import is_initialized
from devicemesh.distributed import rendezvous, state
from devicemesh.distributed.names import Backend, cpu_backend

__all__ = [
    "destroy_process_group",
    "get_node_local_rank",
    "init_process_group",
    "is_initialized",
]


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
    _ranks: list[int] | None = None,
) -> None:
    """Makes the default group. Nothing is connected before its first operation.

    Args:
        backend: ``"gloo"``, None (the same) or ``"fake"`` (no communication); of
            ``"cpu:gloo,cuda:nccl"`` the part of the CPU counts.
        init_method: ``"env://"`` (the default: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT,
            which `rank` and `world_size` override; none of them at all is a world of one),
            ``"tcp://host:port"`` (rank 0 serves there) or ``"file:///path"`` (a file that
            all ranks share and that is new to this job). ``?rank=0&world_size=2`` may follow.
        timeout: seconds or timedelta, for the operations of groups; half an hour.
        world_size, rank: how many ranks, and which one this process is; -1: as init_method
            says.
        store: a Store shared by all ranks, instead of init_method; needs the two above.
        pg_options: options with a time-out, used where `timeout` is None.
        device_id: None or a CPU device.
        group_name, _ranks: accepted, not used.

    Raises:
        ValueError: there is a default group already, or arguments do not fit together.
        TypeError: something of the wrong type.

    Example:
        >>> import devicemesh.distributed as dist
        >>> dist.init_process_group("gloo", rank=0, world_size=1)
        >>> dist.get_rank(), dist.get_world_size()
        (0, 1)
        >>> dist.destroy_process_group()

    As torch.distributed.init_process_group, which has no world of one without variables.
    """
    name = cpu_backend(backend)
    if is_initialized():
        raise ValueError(
            "the default process group is there already: destroy_process_group ends it"
        )
    if store is not None and init_method is not None:
        raise ValueError("init_method and store cannot both be given")
    _check_device(device_id)
    if timeout is None:
        timeout = timeout_of(pg_options)
    rank = -1 if rank is None else rank
    world_size = -1 if world_size is None else world_size
    if name == Backend.FAKE:
        rendezvous.simulate(world_size, rank, timeout)
    elif store is not None:
        rendezvous.meet_in_store(store, rank, world_size, timeout)
    else:
        rendezvous.meet(init_method or "env://", rank, world_size, timeout)
    try:
        state.made(name)
    except BaseException:
        bootstrap.close_world()
        raise


def timeout_of(options: Any) -> Any:
    """The time-out in options of a group, or None."""
    if options is None:
        return None
    return getattr(options, "timeout", getattr(options, "_timeout", None))


def _check_device(device: Any) -> None:
    if device is not None and getattr(device, "type", device) != "cpu":
        raise ValueError(f"device_id must be a CPU device or None, got {device!r}")


def destroy_process_group(group: ProcessGroup | None = None):
    """Closes the group; without one (or with the default one) all groups and the default
    world, after which init_process_group may be called again. Waits for no other rank.

    Raises:
        ValueError: there is no default group, or `group` is none of its groups.
    """
    if state.is_non_member(group):
        return
    made = state.made()
    if group is None or group is made.default:
        bootstrap.close_world()
        return
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or None, got {group!r}")
    if not any(each is group for each in made.groups):
        raise ValueError(f"not a group of new_group, or destroyed already: {group!r}")
    made.groups = [each for each in made.groups if each is not group]
    group.close()


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """LOCAL_RANK of the environment, else `fallback_rank`.

    Raises:
        RuntimeError: neither is there.
    """
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    if fallback_rank is not None:
        return int(fallback_rank)
    raise RuntimeError("LOCAL_RANK is not in the environment, and there is no fallback_rank")


def get_pg_count() -> int:
    """Number of groups: the default one and those of new_group that were not destroyed."""
    world = _core._get_default_world()
    return 0 if world is None or world.closed else len(state.made().groups)

"""``torch.distributed.device_mesh`` without torch: the same names and signatures.

The mesh itself is ``devicemesh._core.DeviceMesh``; this module shapes arguments and
keeps the current mesh of each thread.
"""

import os
from _thread import _local

from devicemesh import _core
from devicemesh._core import DeviceMesh
from devicemesh.bootstrap import default_world

__all__ = ["DeviceMesh", "init_device_mesh"]


class _MeshEnv(_local):
    """The meshes that ``with mesh:`` has made current, per thread."""

    def __init__(self):
        self.mesh_stack = []

    def get_current_mesh(self):
        """The innermost ``with mesh:`` of this thread."""
        if not self.mesh_stack:
            raise RuntimeError("No device mesh is currently active!")
        return self.mesh_stack[-1]

    def get_root_mesh(self, device_mesh):
        """The mesh that ``device_mesh`` is a view of, or itself."""
        return device_mesh._get_root_mesh() if device_mesh is not None else None

    @staticmethod
    def num_devices_per_host(device_type):
        """Devices of that type that this process can see: 1 for ``cpu``."""
        return _device_count(device_type)

    @staticmethod
    def num_hosts(device_type):
        """Hosts of the default world if all have as many devices as this one."""
        return max(1, default_world().size // max(1, _device_count(device_type)))

    def _get_all_submeshes(self, device_mesh, mesh_dim_name):
        return device_mesh._get_all_submeshes(mesh_dim_name)


_mesh_resources = _MeshEnv()


def _device_count(device_type):
    """Without the CUDA library: what the driver shows, or CUDA_VISIBLE_DEVICES selects."""
    if device_type != "cuda":
        return 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def init_device_mesh(
    device_type,
    mesh_shape,
    *,
    mesh_dim_names=None,
    backend_override=None,
    timeout=None,
    store=None,
    rank=None,
    world_size=None,
    world=None,
    reuse_groups=False,
):
    """A mesh of ranks 0 to n-1 in row-major order, with a process group per dim.

    Nothing is connected here: each group connects at its first operation. The ranks
    check in the store that they asked for the same mesh.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``, or an object with such a ``type``.
        mesh_shape: sizes of the dims; one may be -1 (what is left of the world). A
            dict ``{"dp": 2, "tp": -1}`` gives the names as well.
        mesh_dim_names: one name per dim, each there once.
        backend_override: per dim, by name or index: a backend's name, ``Options``, or
            ``(name, Options)``. The dict is not changed.
        timeout: seconds or timedelta for the groups' operations, or a dict per dim.
        store, rank, world_size: a world of its own over this store, all three or none.
        world: the ``World`` to live in; the process's default world otherwise, which is
            found in the launcher's environment (a bare process is a world of one).
        reuse_groups: share the groups of an equal mesh that was made so too.

    Returns:
        The root ``DeviceMesh``.

    Raises:
        RuntimeError: more ranks than the world has, or names that do not fit.
        ValueError: a shape, device type or backend that cannot be.
        MismatchError: another rank asked for another mesh; the text shows both.

    Example:
        >>> import devicemesh
        >>> with devicemesh.simulate(world_size=8, rank=5):
        ...     mesh = devicemesh.init_device_mesh("cpu", {"dp": 2, "tp": -1})
        >>> mesh, mesh.get_coordinate()
        (DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1)), (1, 1))

    From ``torch.distributed``; the dict, the -1 and everything after
    ``backend_override`` are additions.
    """
    if isinstance(mesh_shape, dict):
        mesh_dim_names = _names_of_dict(mesh_shape, mesh_dim_names)
        mesh_shape = mesh_shape.values()
    sizes = _sizes(mesh_shape)
    if store is not None or rank is not None or world_size is not None:
        world = _explicit_world(store, rank, world_size, timeout, world)
    if -1 in sizes:
        _check_names(sizes, mesh_dim_names)
        sizes = _fill_in(sizes, world)
    return DeviceMesh._from_shape(
        device_type,
        sizes,
        mesh_dim_names=mesh_dim_names,
        backend_override=backend_override,
        timeout=timeout,
        world=world,
        reuse_groups=reuse_groups,
    )


def _names_of_dict(shape, names):
    if names is not None and tuple(names) != tuple(shape):
        raise ValueError(
            f"mesh_dim_names {tuple(names)!r} are not the names in mesh_shape {shape!r}: "
            "leave them out"
        )
    return tuple(shape)


def _sizes(shape):
    """A tuple of ints; an int alone is one dim."""
    try:
        if hasattr(shape, "__index__") and not hasattr(shape, "__len__"):
            return (shape.__index__(),)
        return tuple(size.__index__() for size in shape)
    except (AttributeError, TypeError):
        raise TypeError(
            f"mesh_shape must be a tuple of ints or a dict of names to ints, got {shape!r}"
        ) from None


def _check_names(sizes, names):
    """Names that do not fit are told before a world is looked for."""
    if names is not None and len(names) not in (0, len(sizes)):
        raise RuntimeError(
            "mesh_shape and mesh_dim_names should have same length! "
            f"Found len(mesh_dim_names): {len(names)} and len(mesh_shape):{len(sizes)}."
        )


def _fill_in(sizes, world):
    """Replaces the one -1 by what is left of the world."""
    if sizes.count(-1) > 1:
        raise ValueError(f"mesh_shape {sizes} has more than one -1")
    known = 1
    for size in sizes:
        if size != -1 and size < 1:
            raise ValueError(f"mesh_shape {sizes}: a dim has a size of 1 or more, or -1")
        known *= size if size != -1 else 1
    if world is None:
        world = default_world()
    rest, left_over = divmod(world.size, known)
    if left_over or rest == 0:
        raise ValueError(
            f"mesh_shape {sizes} does not fit a world of {world.size} ranks: "
            f"{world.size} is not a multiple of {known}"
        )
    return tuple(rest if size == -1 else size for size in sizes)


def _explicit_world(store, rank, world_size, timeout, world):
    """A world over the caller's store, with keys of its own.

    Each rank counts the worlds that it has made on this store, so the k-th of every rank
    are one world.
    """
    if world is not None:
        raise ValueError("pass either world, or store, rank and world_size")
    given = {"store": store, "rank": rank, "world_size": world_size}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ValueError(
            f"a world of its own needs store, rank and world_size: missing {', '.join(missing)}"
        )
    number = store.add(f"devicemesh/worlds/{rank}", 1)
    prefixed = _core.PrefixStore(f"devicemesh/world/{number}", store)
    return _core.World(prefixed, rank, world_size, None if isinstance(timeout, dict) else timeout)

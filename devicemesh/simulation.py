"""Worlds of any size in one process, without communication."""

from devicemesh import _core


class simulate:
    """Makes a simulated world the default one for the length of a `with` block.

    This process plays one rank of `world_size`. Meshes and groups are made as usual; every
    group uses the fake backend, whose operations end at once as if the other members had
    contributed nothing: all_reduce and broadcast leave the data as it is,
    all_gather_into_tensor fills the own slot, reduce_scatter_tensor takes the own piece of
    the own input, all_to_all_single keeps the own piece, send drops the message, and recv
    is an error. Use it to look at layouts, to plan, and to test code that holds meshes.

    Blocks nest; the inner world ends first. The default world belongs to the process, not
    to a thread or task: threads and tasks that run at the same time all see it, so
    simulate in one of them at a time (a World.simulated of your own is private).

    Groups end with the block; what meshes say about ranks stays true.

    Args:
        world_size: number of ranks, 1 or more.
        rank: the one to play, 0..world_size-1.

    Returns:
        On entering the block, the World.

    Raises:
        ValueError: rank or world_size out of range.

    Example:
        >>> import devicemesh
        >>> with devicemesh.simulate(world_size=8, rank=5) as world:
        ...     world.rank, world.size
        (5, 8)
    """

    def __init__(self, world_size, rank=0):
        self._world = _core.World.simulated(world_size, rank)
        self._before = None
        self._entered = False

    def __enter__(self):
        if self._entered:
            raise _core.DeviceMeshError("a simulation can be entered once: make another one")
        self._entered = True
        self._before = _core._set_default_world(self._world)
        return self._world

    def __exit__(self, exc_type, exc, traceback, /):
        _core._set_default_world(self._before)
        self._before = None
        self._world.close()

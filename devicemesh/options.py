"""Options of a group, as values of ``backend_override``."""

__all__ = ["GlooOptions", "Options"]


class Options:
    """What to ask for in one dim's group.

    Args:
        backend: the backend's name, or None for the device type's default.
        timeout: seconds or timedelta; None for the mesh's or the world's.

    Example:
        >>> import devicemesh
        >>> with devicemesh.simulate(world_size=8, rank=0):
        ...     mesh = devicemesh.init_device_mesh(
        ...         "cpu", (2, 4), mesh_dim_names=("dp", "tp"),
        ...         backend_override={"tp": devicemesh.Options("fake", timeout=30)},
        ...     )
        ...     mesh.get_group("tp").timeout
        30.0

    torch's option objects are taken as well: their ``backend`` and ``_timeout`` count.
    """

    __slots__ = ("backend", "timeout")

    def __init__(self, backend=None, timeout=None):
        if backend is not None and not isinstance(backend, str):
            raise TypeError(f"backend must be a name or None, got {backend!r}")
        self.backend = backend
        self.timeout = timeout

    def __repr__(self):
        return f"{type(self).__name__}(backend={self.backend!r}, timeout={self.timeout!r})"

    def __eq__(self, other):
        if not isinstance(other, Options):
            return NotImplemented
        return (self.backend, self.timeout) == (other.backend, other.timeout)

    def __hash__(self):
        return hash((self.backend, self.timeout))


class GlooOptions(Options):
    """Options of a gloo group.

    Args:
        timeout: seconds or timedelta; None for the mesh's or the world's.
    """

    __slots__ = ()

    def __init__(self, timeout=None):
        super().__init__("gloo", timeout)

"""devicemesh: device meshes over process groups, without PyTorch and beside it."""

from devicemesh import _core
from devicemesh._core import (
    ClosedError,
    DeviceMeshError,
    FileStore,
    GroupTimeoutError,
    HashStore,
    LibraryError,
    MismatchError,
    PeerError,
    PrefixStore,
    ProcessGroup,
    QueueEmptyError,
    Store,
    StoreError,
    StoreServer,
    TCPStore,
    Work,
    World,
)
from devicemesh.bootstrap import close_world, default_world, init_world, is_initialized
from devicemesh.device_mesh import DeviceMesh, init_device_mesh
from devicemesh.options import GlooOptions, Options
from devicemesh.reduce_op import ReduceOp
from devicemesh.simulation import simulate

__version__ = "0.1.0"

__all__ = [
    "ClosedError",
    "DeviceMesh",
    "DeviceMeshError",
    "FileStore",
    "GlooOptions",
    "GroupTimeoutError",
    "HashStore",
    "LibraryError",
    "MismatchError",
    "Options",
    "PeerError",
    "PrefixStore",
    "ProcessGroup",
    "QueueEmptyError",
    "ReduceOp",
    "Store",
    "StoreError",
    "StoreServer",
    "TCPStore",
    "Work",
    "World",
    "__version__",
    "_core",
    "close_world",
    "default_world",
    "init_device_mesh",
    "init_world",
    "is_initialized",
    "simulate",
]

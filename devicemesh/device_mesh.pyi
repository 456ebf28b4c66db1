from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex

from devicemesh._core import DeviceMesh as DeviceMesh
from devicemesh._core import World, _DeviceType, _Overrides, _TimeoutByDim

__all__ = ["DeviceMesh", "init_device_mesh"]

class _MeshEnv:
    mesh_stack: list[DeviceMesh]
    def get_current_mesh(self) -> DeviceMesh: ...
    def get_root_mesh(self, device_mesh: DeviceMesh | None) -> DeviceMesh | None: ...
    @staticmethod
    def num_devices_per_host(device_type: str) -> int: ...
    @staticmethod
    def num_hosts(device_type: str) -> int: ...
    def _get_all_submeshes(
        self, device_mesh: DeviceMesh, mesh_dim_name: str
    ) -> list[DeviceMesh]: ...

_mesh_resources: _MeshEnv

def init_device_mesh(
    device_type: _DeviceType,
    mesh_shape: SupportsIndex | Iterable[SupportsIndex] | Mapping[str, SupportsIndex],
    *,
    mesh_dim_names: Iterable[str] | None = None,
    backend_override: _Overrides | None = None,
    timeout: _TimeoutByDim = None,
    store: Any = None,
    rank: int | None = None,
    world_size: int | None = None,
    world: World | None = None,
    reuse_groups: bool = False,
) -> DeviceMesh: ...

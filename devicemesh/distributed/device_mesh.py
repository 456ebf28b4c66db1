"""``torch.distributed.device_mesh``'s place for the mesh."""

from devicemesh.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]

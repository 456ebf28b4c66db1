"""devicemesh: device meshes over process groups, without PyTorch and beside it."""

from devicemesh import _core as _core

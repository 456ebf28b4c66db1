"""Backends by name, and which of them are there."""

from __future__ import annotations

import os
from pathlib import Path

import devicemesh


class Backend(str):
    """Names of backends: ``Backend("GLOO")`` and ``Backend.GLOO`` are ``"gloo"``.

    The names are torch's; ``is_backend_available`` says which can be used.
    """

    __slots__ = ()

    UNDEFINED = "undefined"
    GLOO = "gloo"
    NCCL = "nccl"
    UCC = "ucc"
    MPI = "mpi"
    XCCL = "xccl"
    FAKE = "fake"

    backend_list = (UNDEFINED, GLOO, NCCL, XCCL, UCC, MPI, FAKE)
    default_device_backend_map = {"cpu": GLOO}  # noqa: RUF012

    def __new__(cls, name: str):
        if not isinstance(name, str):
            raise ValueError(f"the name of a backend must be a str, got {name!r}")
        return name.lower()


def is_available() -> bool:
    """True: groups on CPU are part of every build."""
    return True


def is_gloo_available() -> bool:
    """Whether this installation has the gloo backend."""
    return any(Path(folder, "_gloo.so").exists() for folder in devicemesh.__path__)


def is_nccl_available() -> bool:
    """False: these functions work on CPU."""
    return False


def is_mpi_available() -> bool:
    """False."""
    return False


def is_ucc_available() -> bool:
    """False."""
    return False


def is_xccl_available() -> bool:
    """False."""
    return False


def is_backend_available(backend: str) -> bool:
    """Whether groups can have that backend; of ``"cpu:gloo,cuda:nccl"``, all of them."""
    if ":" in backend:
        return all(is_backend_available(name) for name in backends_by_device(backend).values())
    return {"gloo": is_gloo_available(), "fake": True}.get(backend.lower(), False)


def is_torchelastic_launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def get_default_backend_for_device(device) -> str:
    """``"gloo"`` for ``"cpu"``, a str or an object with such a ``type``."""
    kind = str(getattr(device, "type", device)).partition(":")[0]
    if kind not in Backend.default_device_backend_map:
        raise ValueError(f"no backend for device {device!r}: there is one for 'cpu'")
    return Backend.default_device_backend_map[kind]


def backends_by_device(text: str) -> dict[str, str]:
    """``{"cpu": "gloo", "cuda": "nccl"}`` of ``"cpu:gloo,cuda:nccl"``."""
    backends: dict[str, str] = {}
    for part in text.lower().split(","):
        device, colon, name = part.strip().partition(":")
        if not colon or not device or not name or ":" in name:
            raise ValueError(
                f"backend must be a name or 'device:name' pairs such as 'cpu:gloo', got {text!r}"
            )
        if device in backends:
            raise ValueError(f"backend names device {device!r} twice: {text!r}")
        backends[device] = name
    return backends


def cpu_backend(backend: str | None) -> str | None:
    """The backend on CPU that `backend` asks for; None where it leaves the choice."""
    if backend is None:
        return None
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a name or None, got {backend!r}")
    if ":" in backend:
        backends = backends_by_device(backend)
        if "cpu" not in backends:
            raise ValueError(f"backend has none for device 'cpu': {backend!r}")
        name = backends["cpu"]
    else:
        name = backend.lower()
    if name == Backend.UNDEFINED:
        return None
    if name not in (Backend.GLOO, Backend.FAKE):
        raise ValueError(f"backend must be 'gloo' or 'fake' on CPU, got {backend!r}")
    return name

"""Our declarations of DLPack's ABI against the header that torch carries."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "dlpack.h"
CC = shlex.split(os.environ.get("CC", "gcc"))

STRUCTS = {
    ("py_dl_version", "DLPackVersion"): ["major major", "minor minor"],
    ("py_dl_device", "DLDevice"): ["type device_type", "id device_id"],
    ("py_dl_dtype", "DLDataType"): ["code code", "bits bits", "lanes lanes"],
    ("py_dl_tensor", "DLTensor"): [
        *("data data", "device device", "ndim ndim", "dtype dtype", "shape shape"),
        *("strides strides", "byte_offset byte_offset"),
    ],
    ("py_dl_managed", "DLManagedTensor"): [
        *("tensor dl_tensor", "context manager_ctx", "deleter deleter"),
    ],
    ("py_dl_versioned", "DLManagedTensorVersioned"): [
        *("version version", "context manager_ctx", "deleter deleter", "flags flags"),
        "tensor dl_tensor",
    ],
    ("py_dl_exchange", "DLPackExchangeAPI"): [
        *("version header.version", "previous header.prev_api"),
        "allocate managed_tensor_allocator",
        "own managed_tensor_from_py_object_no_sync",
        "import managed_tensor_to_py_object_no_sync",
        "look dltensor_from_py_object_no_sync",
        "current_stream current_work_stream",
    ],
}

CONSTANTS = {
    "PY_DL_MAJOR": "DLPACK_MAJOR_VERSION",
    "PY_DL_READ_ONLY": "DLPACK_FLAG_BITMASK_READ_ONLY",
    "PY_DL_CPU": "kDLCPU",
    "PY_DL_CUDA": "kDLCUDA",
    "PY_DL_CUDA_HOST": "kDLCUDAHost",
    "PY_DL_OPENCL": "kDLOpenCL",
    "PY_DL_VULKAN": "kDLVulkan",
    "PY_DL_METAL": "kDLMetal",
    "PY_DL_VPI": "kDLVPI",
    "PY_DL_ROCM": "kDLROCM",
    "PY_DL_ROCM_HOST": "kDLROCMHost",
    "PY_DL_EXT_DEV": "kDLExtDev",
    "PY_DL_CUDA_MANAGED": "kDLCUDAManaged",
    "PY_DL_ONE_API": "kDLOneAPI",
    "PY_DL_WEB_GPU": "kDLWebGPU",
    "PY_DL_HEXAGON": "kDLHexagon",
    "PY_DL_MAIA": "kDLMAIA",
    "PY_DL_TRN": "kDLTrn",
    "PY_DL_INT": "kDLInt",
    "PY_DL_UINT": "kDLUInt",
    "PY_DL_FLOAT": "kDLFloat",
    "PY_DL_BFLOAT": "kDLBfloat",
    "PY_DL_COMPLEX": "kDLComplex",
    "PY_DL_BOOL": "kDLBool",
    "PY_DL_FLOAT8_E4M3FN": "kDLFloat8_e4m3fn",
    "PY_DL_FLOAT8_E5M2": "kDLFloat8_e5m2",
}


def assertions():
    for (ours, theirs), members in STRUCTS.items():
        yield f"sizeof({ours}) == sizeof({theirs})"
        for member in members:
            our, their = member.split()
            yield f"offsetof({ours}, {our}) == offsetof({theirs}, {their})"
            yield f"sizeof((({ours} *)0)->{our}) == sizeof((({theirs} *)0)->{their})"
    for ours, theirs in CONSTANTS.items():
        yield f"(int){ours} == (int){theirs}"


@pytest.mark.skipif(shutil.which(CC[0]) is None, reason=f"no C compiler ({CC[0]})")
@pytest.mark.skipif(not HEADER.exists(), reason="this torch carries no headers")
def test_layouts_and_values_agree(tmp_path):
    if "dlpack_c_exchange_api" not in HEADER.read_text():
        pytest.skip("this torch's DLPack is older than its C functions")
    source = tmp_path / "abi.c"
    lines = ['#include "python/py_dlpack.h"', f'#include "{HEADER}"']
    lines += [f'_Static_assert({claim}, "{claim}");' for claim in assertions()]
    source.write_text("\n".join(lines))
    command = [*CC, "-std=c11", "-fsyntax-only", f"-I{ROOT / 'csrc'}", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_constant_is_looked_at():
    text = (ROOT / "csrc/python/py_dlpack.h").read_text()
    declared = {word.strip(" ,=") for word in text.split() if word.startswith("PY_DL_")}
    declared = {name for name in declared if "NAME" not in name}
    assert declared <= set(CONSTANTS) | {"PY_DL_MAJOR", "PY_DL_READ_ONLY"}

"""The C core without Python: compiled into a shared library and driven by ctypes.

For tests that hold layouts, rank maps and reduce kernels against numpy and torch. The
library is built once per process, in a folder that goes with it.
"""

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from ctypes import POINTER, byref, c_bool, c_char, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
FOLDERS = ["base", "layout", "backend/reduce"]
FLAGS = "-std=c11 -O3 -g -shared -fPIC -fvisibility=default -D_GNU_SOURCE"
DTYPES = """
    bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64
    complex64 complex128 float8_e4m3fn float8_e5m2
"""
DTYPES = {name: number for number, name in enumerate(DTYPES.split())}
OPS = "sum product min max avg band bor bxor premul_sum"
OPS = {name: number for number, name in enumerate(OPS.split())}

ERR_VALUE = -1
ERR_NO_MEMORY = -60


class NativeError(Exception):
    """What a function of the core returned instead of DM_OK."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class _Error(ctypes.Structure):
    _fields_ = [("status", c_int), ("native", c_int), ("text", c_char * 1536)]


class _Factor(ctypes.Structure):
    _fields_ = [("size", c_int64), ("stride", c_int64)]


_RESULTS = {
    "dm_layout_ndim": c_int,
    "dm_layout_size": c_int64,
    "dm_layout_numel": c_int64,
    "dm_layout_cosize": c_int64,
    "dm_layout_factors": c_int,
    "dm_layout_equal": c_bool,
    "dm_layout_hash": ctypes.c_uint64,
    "dm_layout_is_orthogonal": c_bool,
    "dm_layout_is_sorted": c_bool,
    "dm_layout_coordinate_on": c_int64,
    "dm_layout_offset": c_int64,
    "dm_layout_base": c_int64,
    "dm_ranks_size": c_int64,
    "dm_ranks_is_identity": c_bool,
    "dm_ranks_at": c_int32,
    "dm_ranks_find": c_int64,
    "dm_ranks_equal": c_bool,
    "dm_ranks_hash": ctypes.c_uint64,
    "dm_reduce_lookup": c_void_p,
    "dm_dtype_name": ctypes.c_char_p,
    "dm_reduce_op_name": ctypes.c_char_p,
    "dm_dtype_size": c_size_t,
}


@functools.cache
def library(define=None):
    """The compiled library; skips the test where there is no compiler.

    Args:
        define: A macro for another build of the same, such as DM_REDUCE_PORTABLE.
    """
    compiler = shlex.split(os.environ.get("CC", "gcc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C compiler ({compiler[0]})", allow_module_level=True)
    sources = [path for folder in FOLDERS for path in sorted((CSRC / folder).glob("*.c"))]
    with tempfile.TemporaryDirectory(prefix="devicemesh-test-") as folder:
        path = Path(folder, "native.so")
        flags = [*shlex.split(FLAGS), *([f"-D{define}"] if define else [])]
        command = [*compiler, *flags, f"-I{CSRC}", *sources, "-o", path]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(path)
    for name, result in _RESULTS.items():
        getattr(loaded, name).restype = result
    return loaded


def _call(name, *args):
    """Calls a function that returns a status and takes an error record last."""
    error = _Error()
    status = getattr(library(), name)(*args, byref(error))
    if status != 0:
        assert error.status == status
        raise NativeError(status, error.text.decode())


def _make(name, *args):
    """As _call, for a function whose last output argument is a new object."""
    made = c_void_p()
    _call(name, *args, byref(made))
    return made


def _array(kind, values):
    values = list(values)
    return (kind * len(values))(*values)


class Layout:
    """A dm_layout. `dims` are tuples of (size, stride), outermost first."""

    def __init__(self, handle):
        self.handle = handle

    @classmethod
    def row_major(cls, shape):
        return cls(_make("dm_layout_new", _array(c_int64, shape), len(shape)))

    @classmethod
    def from_dims(cls, dims):
        factors = _array(_Factor, [_Factor(*factor) for dim in dims for factor in dim])
        first = [0]
        for dim in dims:
            first.append(first[-1] + len(dim))
        return cls(_make("dm_layout_from_factors", factors, _array(c_int, first), len(dims)))

    def __del__(self):
        library().dm_layout_free(self.handle)

    def __eq__(self, other):
        return library().dm_layout_equal(self.handle, other.handle)

    def __hash__(self):
        return library().dm_layout_hash(self.handle)

    def __repr__(self):
        return f"Layout({self.dims})"

    @property
    def ndim(self):
        return library().dm_layout_ndim(self.handle)

    @property
    def shape(self):
        return tuple(library().dm_layout_size(self.handle, d) for d in range(self.ndim))

    @property
    def numel(self):
        return library().dm_layout_numel(self.handle)

    @property
    def cosize(self):
        return library().dm_layout_cosize(self.handle)

    @property
    def dims(self):
        dims = []
        for d in range(self.ndim):
            factors = POINTER(_Factor)()
            n = library().dm_layout_factors(self.handle, d, byref(factors))
            dims.append(tuple((factors[i].size, factors[i].stride) for i in range(n)))
        return tuple(dims)

    @property
    def is_orthogonal(self):
        return library().dm_layout_is_orthogonal(self.handle)

    @property
    def is_sorted(self):
        return library().dm_layout_is_sorted(self.handle)

    def copy(self):
        return Layout(_make("dm_layout_copy", self.handle))

    def select(self, dims):
        return Layout(_make("dm_layout_select", self.handle, _array(c_int, dims), len(dims)))

    def flatten(self):
        return Layout(_make("dm_layout_flatten", self.handle))

    def unflatten(self, dim, sizes):
        sizes = _array(c_int64, sizes)
        return Layout(_make("dm_layout_unflatten", self.handle, dim, sizes, len(sizes)))

    @staticmethod
    def concatenate(layouts):
        handles = _array(c_void_p, [layout.handle for layout in layouts])
        return Layout(_make("dm_layout_concatenate", handles, len(layouts)))

    def complement(self, cosize):
        return Layout(_make("dm_layout_complement", self.handle, c_int64(cosize)))

    def coordinate(self, offset):
        coordinate = (c_int64 * self.ndim)()
        library().dm_layout_coordinate(self.handle, c_int64(offset), coordinate)
        for d in range(self.ndim):
            on = library().dm_layout_coordinate_on(self.handle, d, c_int64(offset))
            assert on == coordinate[d]
        return tuple(coordinate)

    def offset(self, coordinate):
        return library().dm_layout_offset(self.handle, _array(c_int64, coordinate))

    def base(self, offset):
        return library().dm_layout_base(self.handle, c_int64(offset))

    def offsets(self, base=0):
        """All offsets, row-major, as a flat list."""
        offsets = (c_int64 * self.numel)()
        library().dm_layout_offsets(self.handle, c_int64(base), offsets)
        return list(offsets)


class Ranks:
    """A dm_ranks."""

    def __init__(self, handle):
        self.handle = handle

    @classmethod
    def identity(cls, n):
        return cls(_make("dm_ranks_identity", c_int64(n)))

    @classmethod
    def of(cls, ranks):
        ranks = _array(c_int32, ranks)
        return cls(_make("dm_ranks_new", ranks, c_int64(len(ranks))))

    def __del__(self):
        library().dm_ranks_free(self.handle)

    def __eq__(self, other):
        return library().dm_ranks_equal(self.handle, other.handle)

    def __hash__(self):
        return library().dm_ranks_hash(self.handle)

    def __len__(self):
        return library().dm_ranks_size(self.handle)

    def __getitem__(self, offset):
        return library().dm_ranks_at(self.handle, c_int64(offset))

    @property
    def is_identity(self):
        return library().dm_ranks_is_identity(self.handle)

    def find(self, rank):
        return library().dm_ranks_find(self.handle, c_int32(rank))


def reduce_kernel(dtype, op, define=None):
    """The kernel as a function of (out, a, b, count), addresses; None where there is none."""
    address = library(define).dm_reduce_lookup(DTYPES[dtype], OPS[op])
    kind = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_size_t)
    return kind(address) if address else None


def reduce_finish(data, count, dtype, op, size):
    """Divides what lies at the address `data` where `op` is an average."""
    library().dm_reduce_finish(c_void_p(data), c_size_t(count), DTYPES[dtype], OPS[op], size)


def reduce_scale(out, data, count, dtype, factor):
    """Multiplies what lies at the address `data` into what lies at `out`."""
    library().dm_reduce_scale(
        c_void_p(out), c_void_p(data), c_size_t(count), DTYPES[dtype], ctypes.c_double(factor)
    )


def reduce_many(out, inputs, count, dtype, op, size=1, define=None):
    """Combines what lies at the addresses `inputs`, in order, into what lies at `out`."""
    library(define).dm_reduce_many(
        c_void_p(out),
        _array(c_void_p, inputs),
        len(inputs),
        c_size_t(count),
        DTYPES[dtype],
        OPS[op],
        size,
    )

"""Arrays that describe themselves in a dict, well or badly."""

import gc
import sys
import weakref

import dlpack
import ml_dtypes
import numpy as np
import pytest

from devicemesh import World


@pytest.fixture
def group():
    with World(None, 0, 1) as world:
        yield world.new_group([0])


class Described:
    """An object with `__array_interface__`, and nothing else. Entries set to `...` are left
    out."""

    def __init__(self, array, **entries):
        self.array = array
        interface = {**array.__array_interface__, **entries}
        self.__array_interface__ = {k: v for k, v in interface.items() if v is not ...}


def read(group, exporter, like=None):
    output = np.zeros_like(dlpack.arange("f4") if like is None else like)
    group.all_gather_into_tensor(output, exporter)
    return output


# --- bad entries ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "error", "text"),
    [
        ({"version": 2}, TypeError, r"^'version' in array.__array_interface__ must be 3, got 2"),
        ({"version": ...}, TypeError, r"'version' in .* must be 3, got None"),
        ({"version": "3"}, TypeError, r"'version' in .* must be 3, got '3'"),
        ({"version": 1 << 70}, OverflowError, "."),
        ({"typestr": ...}, TypeError, r"'typestr' in .* must be a str like '<f4', got None"),
        ({"typestr": b"<f4"}, TypeError, r"'typestr' in .* got b'<f4'"),
        ({"typestr": "<f\udc80"}, UnicodeEncodeError, "."),
        ({"typestr": ""}, TypeError, r"^array has elements of format '', which cannot be sent"),
        ({"typestr": ">f4"}, TypeError, "elements of format '>f4'"),
        ({"typestr": "<f16"}, TypeError, "elements of format '<f16'"),
        ({"typestr": "f4"}, TypeError, "elements of format 'f4'"),
        ({"typestr": "<f44"}, TypeError, "elements of format '<f44'"),
        ({"typestr": "<M8[s]"}, TypeError, r"elements of format '<M8\[s\]'"),
        ({"typestr": "|O"}, TypeError, r"elements of format '\|O'"),
        ({"typestr": "|V4"}, TypeError, r"elements of format '\|V4'"),
        ({"shape": ...}, TypeError, r"'shape' in .* must be a tuple of at most 64 ints, got None"),
        ({"shape": [4]}, TypeError, r"'shape' in .* must be a tuple of .*, got \[4\]"),
        ({"shape": (1,) * 65}, TypeError, r"'shape' in .* must be a tuple of at most 64 ints"),
        ({"shape": ("4",)}, TypeError, r"'shape' in .* must be a tuple of ints .*, got \('4',\)"),
        ({"shape": (1 << 64,)}, TypeError, r"'shape' in .* must be a tuple of ints of 64 bits"),
        ({"shape": (-1,)}, ValueError, r"^array has the impossible shape \(-1,\) of float32"),
        ({"shape": (1 << 62,)}, ValueError, r"impossible shape \(4611686018427387904,\)"),
        ({"strides": 4}, TypeError, r"'strides' in .* must be a tuple of at most 64 ints, got 4"),
        ({"strides": (4, 4)}, TypeError, r"'strides' in .* must be as long as 'shape'"),
        ({"strides": (4.0,)}, TypeError, r"'strides' in .* must be a tuple of ints"),
        ({"strides": (8,)}, ValueError, r"shape is \(4,\), its strides in bytes are \(8,\)"),
        ({"strides": (-4,)}, ValueError, "must be C-contiguous"),
        ({"mask": np.ones(4)}, TypeError, r"'mask' in .* must be None, since elements are sent"),
        ({"data": ...}, TypeError, r"'data' in .* must be \(address, read-only\) or a buffer, got"),
        ({"data": (1,)}, TypeError, r"'data' in .* must be "),
        ({"data": (1.0, False)}, TypeError, r"'data' in .* must be "),
        ({"data": (-1, False)}, TypeError, r"'data' in .* must be "),
        ({"data": (1 << 64, False)}, TypeError, r"'data' in .* must be "),
        ({"data": (0, False)}, ValueError, "4 elements but no memory: its data pointer is null"),
        ({"data": 3}, TypeError, "bytes-like object is required"),
        ({"data": bytearray(15)}, ValueError, "needs 16 bytes for its shape, its data has 15"),
        ({"data": bytearray(16), "offset": 1}, ValueError, r"has 15 after the offset 1$"),
        ({"data": bytearray(16), "offset": -1}, ValueError, r"'offset' in .* 0..16, .* got -1"),
        ({"data": bytearray(16), "offset": 17}, ValueError, r"'offset' in .* 0..16, .* got 17"),
        ({"data": bytearray(16), "offset": "1"}, TypeError, "."),
        ({"data": bytearray(16), "offset": 1 << 64}, OverflowError, "."),
        ({"data": bytes(16)}, ValueError, r"^array must be writable, got a read-only Described"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bad_entries(group, entries, error, text):
    exporter = Described(dlpack.arange("f4"), **entries)
    for async_op in (False, True):
        with pytest.raises(error, match=text):
            group.all_reduce(exporter, async_op=async_op)


@pytest.mark.parametrize("value", [None, 3, "x", [("version", 3)]])
def test_no_dict(group, value):
    exporter = Described(dlpack.arange("f4"))
    exporter.__array_interface__ = value
    with pytest.raises(TypeError, match=r"^array.__array_interface__ must be a dict, got "):
        group.all_reduce(exporter)


def test_errors_of_the_exporter_are_kept(group):
    class Odd(Exception):
        pass

    class Property:
        @property
        def __array_interface__(self):
            raise Odd

    with pytest.raises(Odd):
        group.all_reduce(Property())

    class Truth:
        def __bool__(self):
            raise Odd

    array = dlpack.arange("f4")
    with pytest.raises(Odd):
        group.all_reduce(Described(array, data=(array.ctypes.data, Truth())))

    class Named(Described):
        @property
        def dtype(self):
            raise Odd

    with pytest.raises(Odd):
        group.all_reduce(Named(array, typestr="<V4"))


def test_read_only(group):
    array = dlpack.arange("f4")
    array.flags.writeable = False
    with pytest.raises(ValueError, match=r"^array must be writable, got a read-only Described"):
        group.all_reduce(Described(array))
    assert read(group, Described(array)).tolist() == [0, 1, 2, 3]
    assert read(group, Described(array, data=array.tobytes())).tolist() == [0, 1, 2, 3]


def test_cuda_arrays_are_elsewhere(group):
    class Cuda:
        __cuda_array_interface__ = dlpack.arange("f4").__array_interface__

    text = (
        r"^array must be in the CPU's memory, where this group works, got a Cuda on a CUDA device"
    )
    with pytest.raises(ValueError, match=text):
        group.all_reduce(Cuda())


# --- what is read -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (1, 3, 1)], ids=str)
def test_dtypes(group, dtype, shape):
    array = dlpack.arange(dtype, shape)
    output = read(group, Described(array), array)
    assert output.tobytes() == array.tobytes()
    strides = array.strides
    assert read(group, Described(array, strides=strides), array).tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
)
def test_types_with_a_name(group, dtype):
    """numpy knows their size only; their name is that of the object's dtype."""
    array = dlpack.arange(dtype)
    exporter = Described(array)
    exporter.dtype = array.dtype
    assert read(group, exporter, array).tobytes() == array.tobytes()
    exporter.dtype = np.dtype("f8")
    with pytest.raises(TypeError, match="array has elements of type float64"):
        group.all_reduce(exporter)


def test_written_in_place(group):
    array = np.zeros(3, "i4")
    group.all_gather_into_tensor(Described(array), np.arange(3, dtype="i4"))
    assert array.tolist() == [0, 1, 2]


def test_big_endian_bytes_have_no_order(group):
    array = dlpack.arange("i1")
    assert read(group, Described(array, typestr=">i1"), array).tolist() == [0, 1, 2, 3]


def test_buffer_beside_the_dict(group):
    memory = bytearray(b"__\1\2\3")
    exporter = Described(np.zeros(3, "u1"), data=memory, offset=2)
    assert read(group, exporter, np.zeros(3, "u1")).tolist() == [1, 2, 3]
    work = group.all_gather_into_tensor(exporter, b"abc", async_op=True)
    assert memory == b"__abc"
    with pytest.raises(BufferError):
        memory.append(0)
    work.wait()
    memory.append(0)


def test_object_lives_while_it_is_exported(group):
    exporter = Described(dlpack.arange("f4"))
    alive = weakref.ref(exporter)
    work = group.all_reduce(exporter, async_op=True)
    del exporter
    gc.collect()
    assert alive() is not None
    work.wait()
    gc.collect()
    assert alive() is None


def test_nothing_is_kept_after_an_error(group):
    exporter = Described(dlpack.arange("f4"), data=bytearray(4))
    before = sys.getrefcount(exporter), sys.getrefcount(exporter.__array_interface__["data"])
    with pytest.raises(ValueError, match="needs 16 bytes"):
        group.all_reduce(exporter)
    after = sys.getrefcount(exporter), sys.getrefcount(exporter.__array_interface__["data"])
    assert after == before
    exporter.__array_interface__["data"].append(0)

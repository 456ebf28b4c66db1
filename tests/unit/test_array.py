"""Arrays: what groups take, and what they say to the rest."""

import array
import ctypes
import mmap
import sys

import ml_dtypes
import numpy as np
import pytest

from devicemesh import World


@pytest.fixture
def group():
    """A group of one: whatever it takes, it takes everywhere."""
    with World(None, 0, 1) as world:
        yield world.new_group([0])


@pytest.fixture
def pair():
    with World.simulated(2) as world:
        yield world.new_group([0, 1])


# --- bad arguments --------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 3, "text", [1.0, 2.0], object()])
def test_no_array(group, value):
    with pytest.raises(TypeError, match=r"^array must be an array .* got "):
        group.all_reduce(value)


@pytest.mark.parametrize(
    "dtype",
    ["M8[s]", "m8[s]", "O", "U3", "S3", ">f4", ">i2", "V4", "f4,i4", "g", ml_dtypes.int4],
)
def test_elements_that_cannot_be_sent(group, dtype):
    value = np.zeros(2, dtype)
    with pytest.raises(TypeError, match=r"^array has elements of type .*, which cannot be sent"):
        group.broadcast(value)


def test_foreign_format_is_shown():
    class Pair(ctypes.Structure):
        _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_int)]

    with (
        World(None, 0, 1) as world,
        pytest.raises(TypeError, match=r"^array has elements of format 'T\{"),
    ):
        world.new_group([0]).broadcast((Pair * 2)())


@pytest.mark.parametrize(
    "value",
    [np.zeros(4, "f4")[::2], np.zeros((2, 3), "f4").T, memoryview(bytearray(8))[::2]],
    ids=["step", "transposed", "memoryview"],
)
def test_not_contiguous(group, value):
    with pytest.raises(ValueError, match=r"^array must be C-contiguous: its shape is \(.*strides"):
        group.all_reduce(value)


def test_read_only(group):
    value = np.zeros(2)
    value.flags.writeable = False
    with pytest.raises(ValueError, match=r"^array must be writable, got a read-only numpy.ndarray"):
        group.all_reduce(value)
    with pytest.raises(ValueError, match=r"^array must be writable, got a read-only bytes"):
        group.broadcast(b"ab")
    with pytest.raises(ValueError, match=r"^output must be writable"):
        group.all_gather_into_tensor(b"ab", b"ab")


def test_released_memoryview(group):
    view = memoryview(bytearray(4))
    view.release()
    with pytest.raises(ValueError, match="released memoryview"):
        group.all_reduce(view)


def test_error_of_the_dtype_is_kept(group):
    class Odd(np.ndarray):
        @property
        def dtype(self):
            raise RuntimeError("no dtype today")

    value = np.zeros(2, ml_dtypes.bfloat16).view(Odd)
    with pytest.raises(RuntimeError, match="no dtype today"):
        group.all_reduce(value)


@pytest.mark.parametrize(
    ("method", "output", "input", "text"),
    [
        (
            "all_gather_into_tensor",
            5,
            2,
            r"^output must have 2 times \(the group's size\) the 2 elements of input, it has 5",
        ),
        (
            "reduce_scatter_tensor",
            2,
            5,
            r"^input must have 2 times \(the group's size\) the 2 elements of output, it has 5",
        ),
        ("all_to_all_single", 4, 2, "same number of elements: output has 4, input has 2"),
        ("all_to_all_single", 3, 3, "must divide into 2 equal pieces .* it has 3 elements"),
    ],
)
def test_sizes_that_do_not_fit(pair, method, output, input, text):
    with pytest.raises(ValueError, match=text):
        getattr(pair, method)(np.zeros(output), np.zeros(input))


@pytest.mark.parametrize(
    "method", ["all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"]
)
def test_dtypes_that_do_not_fit(group, method):
    with pytest.raises(ValueError, match="same dtype: output is float32, input is float64"):
        getattr(group, method)(np.zeros(2, "f4"), np.zeros(2))


def test_input_and_output_apart(pair):
    """Other than in place: as NCCL and MPI have it, at the place of the own rank, which is 0."""
    memory = np.arange(8, dtype="i4")
    pair.all_gather_into_tensor(memory, memory[:4])
    pair.reduce_scatter_tensor(memory[:4], memory)
    text = r"^{} and {} must not overlap: {} is 32 bytes at 0x\w+, {} is 16 bytes at 0x\w+$"
    for piece in (memory[4:], memory[1:5]):
        with pytest.raises(ValueError, match=text.format(*("output", "input") * 2)):
            pair.all_gather_into_tensor(memory, piece)
        with pytest.raises(ValueError, match=text.format(*("input", "output") * 2)):
            pair.reduce_scatter_tensor(piece, memory)
    for piece in (memory[:6], memory[2:], memory[1:7]):
        with pytest.raises(ValueError, match="output and input must not overlap"):
            pair.all_to_all_single(memory[:6], piece)
    pair.all_to_all_single(memory[:4], memory[4:])
    pair.all_to_all_single(memory[4:4], memory[4:4])


@pytest.mark.skipif(sys.version_info < (3, 12), reason="buffers in Python came with 3.12")
class TestBuffersInPython:
    class Exporter:
        def __init__(self, value):
            self.value = value
            self.released = 0

        def __buffer__(self, flags):
            if isinstance(self.value, Exception):
                raise self.value
            return self.value

        def __release_buffer__(self, view):
            self.released += 1

    @pytest.mark.parametrize("error", [BufferError("today"), KeyError("today")])
    def test_errors_are_kept(self, group, error):
        with pytest.raises(type(error), match="today"):
            group.all_reduce(self.Exporter(error))

    @pytest.mark.parametrize("value", [None, b"ab", 3])
    def test_no_view(self, group, value):
        with pytest.raises(TypeError, match="__buffer__ returned non-memoryview object"):
            group.all_reduce(self.Exporter(value))

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (memoryview(b"ab"), "array must be writable"),
            (memoryview(bytearray(8))[::2], "array must be C-contiguous"),
        ],
    )
    def test_views_that_cannot_be_used(self, group, value, text):
        exporter = self.Exporter(value)
        with pytest.raises(ValueError, match=text):
            group.all_reduce(exporter)
        assert exporter.released == 1

    def test_views_that_can(self, group):
        memory = bytearray(4)
        exporter = self.Exporter(memoryview(memory))
        work = group.all_gather_into_tensor(exporter, b"abcd", async_op=True)
        assert exporter.released == 0
        work.wait()
        assert (memory, exporter.released) == (b"abcd", 1)


def test_unaligned(group):
    value = np.frombuffer(bytearray(9), np.uint8)[1:].view("f4")
    output = np.ones(2, "f4")
    group.all_gather_into_tensor(output, value)
    assert output.tolist() == [0, 0]


def test_nothing_stays_exported_after_an_error(pair):
    output = bytearray(3)
    for input in (bytes(2), object(), np.zeros(3)):
        with pytest.raises((TypeError, ValueError)):
            pair.all_gather_into_tensor(output, input)
    output.append(0)  # BufferError while it is exported


# --- element types --------------------------------------------------------------------

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    # C's names for what has one of the sizes above
    *("intc", "long", "longlong", "uintc", "ulong", "ulonglong", "intp"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)], ids=str)
def test_dtypes(group, dtype, shape):
    input = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    output = np.zeros_like(input)
    group.all_gather_into_tensor(output, input)
    np.testing.assert_array_equal(output.astype("c16"), input.astype("c16"))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_errors_name_the_dtype(group, dtype):
    name = np.dtype(dtype).name
    if name in ("bool", *(np.dtype(d).name for d in DTYPES if np.dtype(d).kind in "iu")):
        group.all_reduce(np.zeros(2, dtype), "band")
        return
    with pytest.raises(NotImplementedError, match=rf"no all_reduce with op 'band' for {name};"):
        group.all_reduce(np.zeros(2, dtype), "band")


@pytest.mark.parametrize("code", "bBhHiIlLqQfd")
def test_array_module(group, code):
    input = array.array(code, [1, 2, 3])
    output = array.array(code, [0, 0, 0])
    group.all_gather_into_tensor(output, input)
    assert output == input


def test_other_exporters(group):
    values = (ctypes.c_float * 3)(1, 2, 3)
    output = (ctypes.c_float * 3)()
    group.all_gather_into_tensor(output, values)
    assert list(output) == [1, 2, 3]

    text = bytearray(3)
    group.all_gather_into_tensor(text, b"abc")
    assert text == b"abc"

    with mmap.mmap(-1, 4) as memory:
        group.all_gather_into_tensor(memory, b"wxyz")
        assert memory[:] == b"wxyz"


def test_big_endian_bytes_have_no_order(group):
    group.broadcast(np.zeros(3, ">i1"))
    group.broadcast(np.zeros(3, "<i4"))


def test_scalar_array(group):
    value = np.array(3.0)
    group.all_reduce(value)
    assert value == 3.0

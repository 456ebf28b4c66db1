"""Any shape, strides and dtype, through every protocol: numpy says what is contiguous."""

import ast
import re

import dlpack
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devicemesh import World

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]


class Described:
    """Offers an array through `__array_interface__` alone, always with its strides."""

    def __init__(self, array):
        self.array = array
        self.dtype = array.dtype
        self.__array_interface__ = {**array.__array_interface__, "strides": array.strides}


def unversioned(array):
    return dlpack.Exporter(array, versioned=False)


WAYS = [
    lambda array: array,
    dlpack.Exporter,
    unversioned,
    dlpack.exchange_by_looking(),
    dlpack.exchange_by_owning(),
    Described,
]
WAYS = pytest.mark.parametrize(
    "way", WAYS, ids=["buffer", "dlpack", "unversioned", "looked", "owned", "dict"]
)


@pytest.fixture(scope="module")
def group():
    with World(None, 0, 1) as world:
        yield world.new_group([0])


@st.composite
def arrays(draw):
    """Views of all kinds: transposed, with steps, reversed, broadcast, of no elements."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    if draw(st.booleans()):
        array = array.transpose(draw(st.permutations(range(array.ndim))))
    steps = [draw(st.sampled_from([1, 1, 1, 2, -1])) for _ in shape]
    array = array[(*(slice(None, None, step) for step in steps), ...)]
    if draw(st.booleans()):
        at = draw(st.integers(0, array.ndim))
        array = np.expand_dims(array, at)
        if draw(st.booleans()):
            wide = [*array.shape]
            wide[at] = draw(st.integers(0, 3))
            array = np.broadcast_to(array, wide)
    return array


@WAYS
@settings(deadline=None)
@given(array=arrays())
def test_any_view(group, way, array):
    output = np.zeros(array.size, array.dtype)
    if array.flags.c_contiguous:
        group.all_gather_into_tensor(output, way(array))
        assert output.tobytes() == array.tobytes()
    else:
        with pytest.raises(ValueError, match=r"^input must be C-contiguous: its shape") as info:
            group.all_gather_into_tensor(output, way(array))
        assert repr(array.shape) in str(info.value)
        strides = ast.literal_eval(re.search(r"in bytes are (\(.*\));", str(info.value))[1])
        for size, stride, shown in zip(array.shape, array.strides, strides, strict=True):
            assert size == 1 or shown == stride


@WAYS
@settings(deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    wanted=st.integers(0, 200),
    dtype=st.sampled_from(DTYPES),
)
def test_any_size(group, way, shape, wanted, dtype):
    array = np.zeros(shape, dtype)
    output = np.ones(wanted, dtype)
    if array.size == wanted:
        group.all_gather_into_tensor(way(output), way(array))
        assert not output.astype(bool).any()
    else:
        text = rf"^output must have 1 times .* the {array.size} elements of input, it has {wanted}$"
        with pytest.raises(ValueError, match=text):
            group.all_gather_into_tensor(way(output), way(array))
        assert output.astype(bool).all()


@WAYS
@settings(deadline=None)
@given(first=st.integers(0, 20), second=st.integers(0, 20), count=st.integers(0, 10))
def test_any_overlap(way, first, second, count):
    """Of two arrays in one piece of memory, the first rank's output and input."""
    memory = np.zeros(60, "i2")
    output, input = memory[first : first + 2 * count], memory[second : second + count]
    with World.simulated(2, rank=1) as world:
        group = world.new_group([0, 1])
        in_place = first + count == second
        if np.shares_memory(output, input) and not in_place:
            text = (
                rf"^output and input must not overlap: output is {4 * count} bytes at "
                rf"{hex(output.ctypes.data)}, input is {2 * count} bytes at "
                rf"{hex(input.ctypes.data)}$"
            )
            with pytest.raises(ValueError, match=text):
                group.all_gather_into_tensor(way(output), way(input))
        else:
            group.all_gather_into_tensor(way(output), way(input))

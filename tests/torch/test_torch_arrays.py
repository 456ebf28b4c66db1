"""torch's CPU tensors as arrays: all dtypes, all layouts, without a copy."""

import gc
import subprocess
import sys
import warnings
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devicemesh import ReduceOp, World

torch = pytest.importorskip("torch")

DTYPES = [
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.fixture(scope="module")
def group():
    with World(None, 0, 1) as world:
        yield world.new_group([0])


@pytest.fixture
def pair():
    with World.simulated(2, rank=1) as world:
        yield world.new_group([0, 1])


class Capsules:
    """A tensor as torch before 2.13 offered it: by `__dlpack__` alone."""

    def __init__(self, tensor, **forced):
        self.tensor = tensor
        self.forced = forced

    def __dlpack__(self, **named):
        return self.tensor.__dlpack__(**{**named, **self.forced})

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor, name)


def unversioned(tensor):
    return Capsules(tensor, max_version=None)


WAYS = pytest.mark.parametrize(
    "way", [lambda tensor: tensor, Capsules, unversioned], ids=["tensor", "capsule", "unversioned"]
)
ASYNC = pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])


def bits(tensor):
    """The tensor's bytes; torch compares too few types."""
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())


def gather(group, output, input, async_op=False):
    work = group.all_gather_into_tensor(output, input, async_op=async_op)
    if async_op:
        work.wait()


# --- tensors that cannot be used -----------------------------------------------------------


def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.quint8)


REFUSED = {
    "stepped": (lambda: torch.zeros(4)[::2], r"shape is \(2,\), its strides in bytes are \(8,\)"),
    "transposed": (lambda: torch.zeros(2, 3).t(), r"strides in bytes are \(4, 12\); pass a copy"),
    "expanded": (lambda: torch.zeros(1).expand(4), r"strides in bytes are \(0,\)"),
    "channels last": (
        lambda: torch.zeros(2, 2, 2, 2).to(memory_format=torch.channels_last),
        "array must be C-contiguous",
    ),
    "conjugated": (
        lambda: torch.zeros(3, dtype=torch.complex64).conj(),
        r"array is not what its memory holds: its conjugate bit is set; pass its resolve_conj\(\)",
    ),
    "negated": (
        lambda: torch._neg_view(torch.ones(3)),
        r"array is not what its memory holds: its negative bit is set; pass its resolve_neg\(\)",
    ),
    "negated ints": (lambda: torch._neg_view(torch.ones(3, dtype=torch.int8)), "negative bit"),
    "meta": (
        lambda: torch.zeros(3, device="meta"),
        "array cannot be exported through DLPack: Cannot pack tensors on meta$",
    ),
    "sparse": (lambda: torch.eye(3).to_sparse(), r"cannot be exported through DLPack: .* storage$"),
    "zero": (lambda: torch._efficientzerotensor(3), "3 elements but no memory"),
}


@pytest.mark.parametrize("name", REFUSED)
@ASYNC
def test_refused(group, name, async_op):
    make, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        group.all_reduce(make(), async_op=async_op)


@pytest.mark.parametrize(
    "make",
    [
        quantized,
        lambda: torch.zeros(3, dtype=torch.float8_e4m3fnuz),
        lambda: torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    ],
)
def test_elements_that_cannot_be_sent(group, make):
    with pytest.raises((TypeError, ValueError), match=r"which cannot be sent|not supported by"):
        group.broadcast(make())


def test_fake_tensors_have_no_memory(group):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        tensor = torch.zeros(3)
        with pytest.raises(ValueError, match="array has 3 elements but no memory"):
            group.all_reduce(tensor)


def test_wrappers_have_no_memory(group):
    """As DTensor and other subclasses that only stand for tensors."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError(function)

    with pytest.raises(ValueError, match="array has 3 elements but no memory"):
        group.all_reduce(Wrapper(torch.zeros(3)))


@WAYS
def test_errors_leave_the_tensor_alone(group, way):
    good, bad = torch.zeros(4), torch.zeros(4, dtype=torch.float64)
    with pytest.raises(ValueError, match="output is float32, input is float64"):
        group.all_gather_into_tensor(way(good), way(bad))
    assert sys.getrefcount(good) == sys.getrefcount(bad) == 2
    good.resize_(100)


# --- what is read and written ------------------------------------------------------------------


@WAYS
@ASYNC
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (1, 4, 1)], ids=str)
def test_dtypes(group, way, async_op, dtype, shape):
    count = torch.Size(shape).numel()
    input = torch.arange(count).to(dtype).reshape(shape)
    output = torch.zeros(shape, dtype=torch.uint8).to(dtype)
    place = output.data_ptr()
    gather(group, way(output), way(input), async_op)
    assert bits(output) == bits(input)
    assert output.data_ptr() == place


@pytest.mark.parametrize("dtype", [t for t in DTYPES if t.is_floating_point or t.is_complex])
def test_reduced_as_the_dtype_that_it_is(group, dtype):
    tensor = torch.tensor([1.0, -2.0, 0.5]).to(dtype)
    group.all_reduce(tensor, ReduceOp.premul_sum(0.5))
    assert bits(tensor) == bits(torch.tensor([0.5, -1.0, 0.25]).to(dtype))


@pytest.mark.parametrize("dtype", [t for t in DTYPES if not (t.is_floating_point or t.is_complex)])
@pytest.mark.parametrize("op", ["band", "bor", "bxor"])
def test_bit_operations(group, dtype, op):
    tensor = torch.tensor([0, 1, 1]).to(dtype)
    group.all_reduce(tensor, op)
    assert bits(tensor) == bits(torch.tensor([0, 1, 1]).to(dtype))


@WAYS
def test_views_are_read_where_they_lie(group, way):
    tensor = torch.arange(12, dtype=torch.int16).reshape(3, 4)
    output = torch.zeros(4, dtype=torch.int16)
    gather(group, way(output), way(tensor[1]))
    assert output.tolist() == [4, 5, 6, 7]
    gather(group, way(tensor[2]), way(output))
    assert tensor[2].tolist() == [4, 5, 6, 7]


@WAYS
@ASYNC
def test_tensors_that_require_grad(group, way, async_op):
    """As torch.distributed takes them: their values, nothing of their graph."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    gather(group, way(parameter), torch.ones(3), async_op)
    assert parameter.tolist() == [1, 1, 1]
    computed = parameter * 2
    output = torch.zeros(3)
    gather(group, output, way(computed), async_op)
    assert output.tolist() == [2, 2, 2]
    assert parameter.grad is None
    assert parameter.requires_grad
    assert parameter.is_leaf


def test_inference_tensors(group):
    with torch.inference_mode():
        tensor = torch.zeros(3)
        group.all_gather_into_tensor(tensor, torch.ones(3))
        assert tensor.tolist() == [1, 1, 1]


def test_subclasses(group):
    class Tensor(torch.Tensor):
        pass

    tensor = torch.zeros(3).as_subclass(Tensor)
    gather(group, tensor, torch.ones(3))
    assert tensor.tolist() == [1, 1, 1]
    gather(group, torch.nn.Buffer(tensor), torch.zeros(3))
    assert tensor.tolist() == [0, 0, 0]


def test_numpy_and_torch_together(group):
    numpy = pytest.importorskip("numpy")
    tensor, array = torch.zeros(3), numpy.arange(3, dtype="f4")
    gather(group, tensor, array)
    assert tensor.tolist() == [0, 1, 2]
    gather(group, array, tensor + 1)
    assert array.tolist() == [1, 2, 3]


def test_overlap(pair):
    tensor = torch.zeros(6)
    pair.all_gather_into_tensor(tensor, tensor[3:])  # in place: rank 1 of 2
    pair.reduce_scatter_tensor(tensor[3:], tensor)
    for piece in (tensor[:3], tensor[2:5]):
        with pytest.raises(ValueError, match=r"^output and input must not overlap: output is 24 "):
            pair.all_gather_into_tensor(tensor, piece)
        with pytest.raises(ValueError, match=r"^input and output must not overlap: input is 24 "):
            pair.reduce_scatter_tensor(piece, tensor)
    with pytest.raises(ValueError, match="must not overlap"):
        pair.all_to_all_single(tensor, tensor)


@st.composite
def views(draw):
    tensor = torch.arange(48, dtype=torch.int32).reshape(draw(st.permutations([2, 4, 6])))
    tensor = tensor.permute(draw(st.permutations(range(3))))
    for dim in range(3):
        start = draw(st.integers(0, tensor.shape[dim]))
        stop = draw(st.integers(0, tensor.shape[dim]))
        tensor = tensor.narrow(dim, min(start, stop), abs(stop - start))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(draw(st.integers(0, 3)))
    return tensor


@WAYS
@settings(deadline=None)
@given(tensor=views())
def test_contiguous_is_what_torch_says(group, way, tensor):
    output = torch.zeros(tensor.numel(), dtype=torch.int32)
    if tensor.is_contiguous():
        gather(group, output, way(tensor))
        assert output.tolist() == tensor.flatten().tolist()
    else:
        with pytest.raises(ValueError, match="input must be C-contiguous"):
            gather(group, output, way(tensor))


# --- lifetimes -----------------------------------------------------------------------------------


@WAYS
def test_memory_outlives_the_tensor(group, way):
    tensor = torch.ones(4)
    storage = weakref.ref(tensor.untyped_storage())
    work = group.all_reduce(way(tensor), async_op=True)
    del tensor
    gc.collect()
    assert work.wait()
    del work
    gc.collect()
    assert storage() is None


def test_other_memory_for_the_tensor_meanwhile(group):
    """`tensor.data = ...` frees the old memory where nobody else holds it: the operation
    does. (Asked with a deleter: a tensor over memory that says when it goes.)"""
    import dlpack

    exporter = dlpack.Exporter(dlpack.arange("f4"))
    tensor = torch.from_dlpack(exporter)
    gc.collect()
    work = group.all_reduce(tensor, async_op=True)
    tensor.data = torch.zeros(1)
    gc.collect()
    assert exporter.export.deleted == 0
    work.wait()
    gc.collect()
    assert exporter.export.deleted == 1


def test_torch_is_not_imported_by_us():
    code = (
        "import sys, devicemesh; from devicemesh import World; "
        "World(None, 0, 1).new_group([0]).all_reduce(bytearray(4)); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

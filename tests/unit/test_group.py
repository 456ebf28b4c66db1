"""Groups: what operations accept and answer. Without other processes: groups of one, and
simulated ones, whose members contribute nothing."""

import copy
import gc
import inspect
import pickle
import signal
import threading
import weakref
from datetime import timedelta

import ml_dtypes
import numpy as np
import pytest

from devicemesh import ClosedError, ReduceOp, World


@pytest.fixture
def group():
    """Group rank 2 of 4, in an order that is not sorted."""
    with World.simulated(8, 3) as world:
        yield world.new_group([7, 1, 3, 0], name="tp")


@pytest.fixture
def alone():
    with World(None, 0, 1) as world:
        yield world.new_group([0])


# --- bad arguments --------------------------------------------------------------------

DATA = np.zeros(4, "f4")


@pytest.mark.parametrize(
    ("method", "arguments", "named", "error", "text"),
    [
        ("all_reduce", (), {}, TypeError, r"all_reduce\(\) is missing the argument 'array'"),
        ("all_reduce", (DATA,) * 4, {}, TypeError, r"takes at most 3 positional .* \(4 given\)"),
        ("all_reduce", (DATA,), {"oop": 1}, TypeError, "unexpected keyword argument 'oop'"),
        ("all_reduce", (DATA,), {"array": 1}, TypeError, "multiple values for argument 'array'"),
        ("all_reduce", (DATA, 3), {}, TypeError, "op must be a ReduceOp or its name, .* got 3"),
        ("all_reduce", (DATA, "mean"), {}, ValueError, "op must be one of 'sum', .* got 'mean'"),
        ("all_reduce", (DATA, "premul_sum"), {}, ValueError, r"factor: use ReduceOp.premul_sum\("),
        (
            *("all_reduce", (np.zeros(2, "i4"), ReduceOp.premul_sum(2)), {}),
            *(NotImplementedError, "no all_reduce with op 'premul_sum' for int32"),
        ),
        ("all_reduce", (DATA, "bxor"), {}, NotImplementedError, "sum, product, min, max, avg"),
        ("all_reduce", (np.zeros(2, "c8"), "max"), {}, NotImplementedError, "sum, product, avg"),
        ("broadcast", (DATA, 4), {}, ValueError, "root must be a group rank, 0..3 in a group of 4"),
        ("broadcast", (DATA, -1), {}, ValueError, "got -1$"),
        ("broadcast", (DATA, 2**40), {}, ValueError, "root must be in"),
        ("broadcast", (DATA,), {"root": "0"}, TypeError, "root must be an int, got '0'"),
        ("send", (DATA,), {}, TypeError, r"send\(\) is missing the argument 'dst'"),
        ("send", (DATA, 4), {}, ValueError, "dst must be a group rank"),
        ("send", (DATA, 2), {}, ValueError, r"dst is this rank itself \(group rank 2\)"),
        ("send", (DATA, 1, -1), {}, ValueError, "tag must be in 0..2147483647, got -1"),
        ("recv", (DATA, -1), {}, ValueError, "src must be a group rank or None, got -1"),
        ("recv", (DATA, 2), {}, ValueError, "src is this rank itself"),
        ("recv", (DATA, 0), {}, NotImplementedError, "nothing to receive from rank 7"),
        ("recv", (DATA,), {}, NotImplementedError, "nothing to receive$"),
        ("barrier", (1, 2), {}, TypeError, "takes at most 1 positional"),
        ("all_gather_into_tensor", (DATA,), {}, TypeError, "missing the argument 'input'"),
    ],
)
def test_bad_arguments(group, method, arguments, named, error, text):
    with pytest.raises(error, match=text):
        getattr(group, method)(*arguments, **named)
    group.barrier()  # still whole


def test_errors_say_where(group):
    with pytest.raises(
        ValueError, match=r"^broadcast on group 'tp' \(ranks 7, 1, 3, 0\): root must be"
    ):
        group.broadcast(DATA, 9)


def test_async_op_that_cannot_tell():
    with World.simulated(2) as world, pytest.raises(ValueError, match="ambiguous"):
        world.new_group([0, 1]).all_reduce(DATA, async_op=DATA)


@pytest.mark.parametrize(
    ("value", "error"), [(-1, ValueError), ("1", TypeError), (float("nan"), ValueError)]
)
def test_bad_timeout(group, value, error):
    with pytest.raises(error, match="timeout must be"):
        group.timeout = value
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del group.timeout
    assert group.timeout == 1800.0


# --- facts ----------------------------------------------------------------------------


def test_facts(group):
    assert (group.rank(), group.size(), group.ranks) == (2, 4, (7, 1, 3, 0))
    assert (group.dim_name, group.backend, group.transport) == ("tp", "gloo", "none")
    assert not group.closed
    assert isinstance(group.name, str)
    assert repr(group) == "<devicemesh.ProcessGroup tp rank=2 ranks=(7, 1, 3, 0) backend=gloo>"


def test_a_group_without_a_name(alone):
    assert alone.dim_name is None
    assert repr(alone) == "<devicemesh.ProcessGroup rank=0 ranks=(0,) backend=gloo>"


def test_backend_is_what_was_asked_for():
    with World.simulated(2) as world:
        assert world.new_group([0, 1], "nccl").backend == "nccl"
        assert world.new_group([0, 1], "fake").backend == "fake"
    with World(None, 0, 1) as world:
        assert world.new_group([0], "nccl").backend == "nccl"


def test_timeout(group):
    group.timeout = timedelta(seconds=2.5)
    assert group.timeout == 2.5
    group.timeout = None
    assert group.timeout is None
    group.timeout = 7
    assert group.timeout == 7.0


def test_identity(group):
    other = World.simulated(2).new_group([0, 1])
    assert group == group
    assert group != other
    assert len({group, other, group}) == 2


@pytest.mark.parametrize(
    ("method", "signature"),
    [
        ("all_reduce", "(self, /, array, op='sum', async_op=False)"),
        ("broadcast", "(self, /, array, root=0, async_op=False)"),
        ("all_gather_into_tensor", "(self, /, output, input, async_op=False)"),
        ("reduce_scatter_tensor", "(self, /, output, input, op='sum', async_op=False)"),
        (
            "all_to_all_single",
            "(self, /, output, input, output_splits=None, input_splits=None, async_op=False)",
        ),
        ("all_gather", "(self, /, outputs, input, async_op=False)"),
        ("gather", "(self, /, input, outputs=None, root=0, async_op=False)"),
        ("scatter", "(self, /, output, inputs=None, root=0, async_op=False)"),
        ("reduce", "(self, /, array, root=0, op='sum', async_op=False)"),
        ("reduce_scatter", "(self, /, output, inputs, op='sum', async_op=False)"),
        ("all_to_all", "(self, /, outputs, inputs, async_op=False)"),
        ("isend", "(self, /, array, dst, tag=0)"),
        ("irecv", "(self, /, array, src=None, tag=0)"),
        ("send", "(self, /, array, dst, tag=0)"),
        ("recv", "(self, /, array, src=None, tag=0)"),
        ("barrier", "(self, /, async_op=False)"),
        ("rank", "(self, /)"),
        ("size", "(self, /)"),
        ("close", "(self, /)"),
        ("abort", "(self, /)"),
    ],
)
def test_signatures(group, method, signature):
    assert str(inspect.signature(getattr(type(group), method))) == signature


# --- operations -----------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "product", "min", "max", "avg", ReduceOp.SUM])
def test_all_reduce_alone(alone, op):
    value = np.array([1.5, -2, 3], "f4")
    assert alone.all_reduce(value, op) is None
    np.testing.assert_array_equal(value, [1.5, -2, 3])


@pytest.mark.parametrize("op", ["band", "bor", ReduceOp.BXOR])
def test_bit_operations_alone(alone, op):
    value = np.array([1, 2, 3], "u2")
    alone.all_reduce(array=value, op=op)
    np.testing.assert_array_equal(value, [1, 2, 3])


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16", ml_dtypes.bfloat16])
def test_premultiplied_sum_alone(alone, dtype):
    value = np.array([1.5, -2, 3]).astype(dtype)
    alone.all_reduce(value, ReduceOp.premul_sum(0.5))
    np.testing.assert_array_equal(value.astype("c16"), [0.75, -1, 1.5])

    input, output = np.array([1.5, -2]).astype(dtype), np.zeros(2, dtype)
    alone.reduce_scatter_tensor(output, input, ReduceOp.premul_sum(2))
    np.testing.assert_array_equal(output.astype("c16"), [3, -4])
    np.testing.assert_array_equal(input.astype("c16"), [1.5, -2])


def test_premultiplied_sum_in_pieces():
    with World.simulated(2, rank=1) as world:
        output = np.zeros(2, "f4")
        input = np.array([1, 2, 3, 4], "f4")
        group = world.new_group([0, 1])
        group.reduce_scatter_tensor(output, input, ReduceOp.premul_sum(10), async_op=True).wait()
        assert output.tolist() == [30, 40]


@pytest.mark.parametrize("factor", [None, "x", [1]])
def test_factors_that_are_no_numbers(alone, factor):
    with pytest.raises((TypeError, ValueError)):
        ReduceOp.premul_sum(factor)

    class Odd(str):
        pass

    op = Odd("premul_sum")
    op.factor = factor
    with pytest.raises(TypeError):
        alone.all_reduce(np.zeros(2), op)


def test_op_with_a_factor():
    op = ReduceOp.premul_sum(3)
    assert op == ReduceOp.PREMUL_SUM == "premul_sum"
    assert repr(op) == "ReduceOp.premul_sum(3.0)"
    assert pickle.loads(pickle.dumps(op)).factor == copy.copy(op).factor == 3.0


def test_every_operation_alone(alone):
    input = np.arange(3.0)
    for method in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        output = np.zeros(3)
        assert getattr(alone, method)(output, input) is None
        np.testing.assert_array_equal(output, input)
    alone.broadcast(input, root=0)
    alone.barrier()
    np.testing.assert_array_equal(input, np.arange(3.0))


def test_input_and_output_may_be_one_array_alone(alone):
    value = np.arange(3.0)
    alone.all_gather_into_tensor(value, value)
    np.testing.assert_array_equal(value, np.arange(3.0))


def test_simulated_members_contribute_nothing(group):
    value = np.arange(4.0)
    group.all_reduce(value)
    group.broadcast(value, root=0)
    np.testing.assert_array_equal(value, np.arange(4.0))

    gathered = np.full(16, -1.0)
    group.all_gather_into_tensor(output=gathered, input=value)
    expected = np.full((4, 4), -1.0)
    expected[2] = value
    np.testing.assert_array_equal(gathered, expected.ravel())

    piece = np.zeros(4)
    group.reduce_scatter_tensor(piece, np.arange(16.0), "max")
    np.testing.assert_array_equal(piece, np.arange(8.0, 12.0))

    exchanged = np.full(4, -1.0)
    group.all_to_all_single(exchanged, value)
    np.testing.assert_array_equal(exchanged, [-1, -1, 2, -1])

    group.send(value, 0)
    group.send(value, dst=1, tag=5)
    group.barrier()


def test_shapes_do_not_matter_only_sizes(group):
    output = np.zeros((2, 2, 4))
    group.all_gather_into_tensor(output, np.ones((2, 2)))
    np.testing.assert_array_equal(output.ravel()[8:12], 1)


def test_large_arrays(alone):
    """Large enough that the GIL is released."""
    input = np.arange(1 << 17, dtype="i4")
    output = np.zeros_like(input)
    alone.all_gather_into_tensor(output, input)
    np.testing.assert_array_equal(output, input)
    work = alone.all_gather_into_tensor(output, input[::-1].copy(), async_op=True)
    work.wait()
    np.testing.assert_array_equal(output, input[::-1])


def test_empty_arrays(group):
    group.all_reduce(np.zeros(0))
    group.all_gather_into_tensor(np.zeros(0), np.zeros(0))


# --- life and death -------------------------------------------------------------------


def test_close(group):
    group.close()
    group.close()
    assert group.closed
    assert repr(group).endswith("closed>")
    with pytest.raises(ClosedError, match=r"^barrier on group 'tp' .*: the group was closed$"):
        group.barrier()
    with pytest.raises(ClosedError, match="the group was closed"):
        group.all_reduce(bytearray(1), async_op=True)
    assert group.rank() == 2


def test_abort(group):
    group.abort()
    assert group.closed
    with pytest.raises(ClosedError, match="the group was aborted"):
        group.barrier()
    group.close()


def test_closing_one_leaves_the_others():
    with World.simulated(4) as world:
        a, b = world.new_group([0, 1]), world.new_group([0, 1])
        a.close()
        b.barrier()


def test_weak_references():
    with World.simulated(2) as world:
        group = world.new_group([0, 1])
        reference = weakref.ref(group)
        assert reference() is group
        del group
        assert reference() is None


@pytest.mark.parametrize("copier", [pickle.dumps, copy.copy, copy.deepcopy])
def test_no_copies(group, copier):
    with pytest.raises(TypeError, match=r"a ProcessGroup cannot be pickled: .* pickle the mesh"):
        copier(group)


def test_arrays_are_released(group):
    data = bytearray(4)
    group.all_reduce(data)
    group.all_gather_into_tensor(bytearray(16), data)
    data.append(1)


def test_threads_share_a_group(group):
    errors = []

    def work():
        try:
            for _ in range(200):
                value = np.ones(20_000)
                group.all_reduce(value)
                group.all_reduce(value, async_op=True).wait()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_close_from_a_signal_handler(group):
    """A handler runs on the thread whose call it interrupts."""

    def handler(signum, frame):
        group.close()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert group.closed


def test_not_tracked_by_the_collector(group):
    assert not gc.is_tracked(group)

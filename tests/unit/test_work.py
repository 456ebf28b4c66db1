"""Works: asynchronous operations, as far as one process can show them."""

import copy
import gc
import inspect
import pickle
import weakref

import numpy as np
import pytest

from devicemesh import Work, World


@pytest.fixture
def group():
    with World.simulated(4) as world:
        yield world.new_group([0, 1, 2, 3], name="dp")


# --- bad arguments --------------------------------------------------------------------


def test_cannot_be_made():
    with pytest.raises(TypeError, match="cannot create"):
        Work()


@pytest.mark.parametrize("method", ["wait", "result"])
@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), ("x", TypeError)])
def test_bad_timeout(group, method, value, error):
    work = group.barrier(async_op=True)
    with pytest.raises(error, match="timeout must be"):
        getattr(work, method)(value)


def test_bad_operations_make_no_work(group):
    with pytest.raises(NotImplementedError, match=r"^all_reduce on group 'dp'"):
        group.all_reduce(np.zeros(3), "band", async_op=True)
    with pytest.raises(ValueError, match="output must have 4 times"):
        group.all_gather_into_tensor(bytearray(3), b"ab", async_op=True)


@pytest.mark.parametrize("copier", [pickle.dumps, copy.copy, copy.deepcopy])
def test_no_copies(group, copier):
    with pytest.raises(TypeError, match="a Work cannot be pickled"):
        copier(group.barrier(async_op=True))


# --- results --------------------------------------------------------------------------


def test_every_operation_has_one(group):
    input, pieces = np.ones(4), np.ones(16)
    works = [
        group.all_reduce(input, async_op=True),
        group.broadcast(input, async_op=True),
        group.all_gather_into_tensor(pieces, input, async_op=True),
        group.reduce_scatter_tensor(input, pieces, async_op=True),
        group.all_to_all_single(pieces, pieces.copy(), async_op=True),
        group.barrier(async_op=True),
    ]
    for work in works:
        assert isinstance(work, Work)
        assert work.wait() is True
        assert work.wait(timeout=0) is True
        assert work.is_completed()
        assert work.exception() is None
        assert work.result() is None


def test_async_op_is_any_truth(group):
    assert group.barrier(0) is None
    assert isinstance(group.barrier(1), Work)


def test_repr(group):
    group.barrier()
    work = group.all_reduce(bytearray(1), async_op=True)
    assert repr(work) == "<devicemesh.Work all_reduce #2 on dp done>"


@pytest.mark.parametrize(
    ("method", "signature"),
    [
        ("wait", "(self, /, timeout=None)"),
        ("result", "(self, /, timeout=None)"),
        ("is_completed", "(self, /)"),
        ("exception", "(self, /)"),
    ],
)
def test_signatures(method, signature):
    assert str(inspect.signature(getattr(Work, method))) == signature


# --- lifetimes ------------------------------------------------------------------------


@pytest.mark.parametrize("notice", ["wait", "result", "is_completed", "exception"])
def test_arrays_are_released_when_the_end_is_noticed(group, notice):
    data = bytearray(4)
    work = group.all_reduce(data, async_op=True)
    getattr(work, notice)()
    data.append(1)


def test_arrays_are_released_with_the_work(group):
    data = bytearray(4)
    work = group.all_reduce(data, async_op=True)
    del work
    data.append(1)


def test_the_array_lives_as_long_as_its_operation(group):
    class Data(np.ndarray):
        pass

    data = np.ones(3).view(Data)
    reference = weakref.ref(data)
    work = group.all_reduce(data, async_op=True)
    del data
    gc.collect()
    assert reference() is not None
    work.wait()
    gc.collect()
    assert reference() is None


def test_a_work_outlives_group_and_world():
    work = World.simulated(2).new_group([0, 1]).barrier(async_op=True)
    gc.collect()
    assert work.wait()


def test_weak_references(group):
    work = group.barrier(async_op=True)
    reference = weakref.ref(work)
    assert reference() is work
    del work
    assert reference() is None

"""Arrays of every protocol while an operation really runs: rank 1 comes when rank 0 is done
with them."""

import gc
import threading
import weakref

import dlpack
import numpy as np
import pytest

import devicemesh


@pytest.fixture(params=["shm", "tcp"])
def world(request, monkeypatch):
    monkeypatch.setenv("DEVICEMESH_TRANSPORT", request.param)
    yield devicemesh.default_world(timeout=600)
    devicemesh.close_world()


class Described:
    def __init__(self, array):
        self.array = array
        self.__array_interface__ = array.__array_interface__


COUNT = 200_000


def meet(world, group, rank, exporter, after=None):
    """all_reduce, given by rank 0 as a Work and by rank 1 once rank 0 says so, which is
    when `exporter` was let go and `after(work)` has been called."""
    if rank == 1:
        world.store.wait(["go"])
        group.all_reduce(np.ones(COUNT, "f4"))
        return
    work = group.all_reduce(exporter.pop(), async_op=True)
    gc.collect()
    assert not work.is_completed()
    if after is not None:
        after(work)
    world.store.set("go", "")
    assert work.wait()


def aliased(array):
    return dlpack.exchange_by_looking(detach=lambda self: type(self)(self.value))(array)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [lambda array: array, aliased, Described])
def test_memory_lives_while_the_operation_runs(world, rank, make):
    """Nobody else holds it."""
    group = world.new_group([0, 1])
    array = np.ones(COUNT, "f4")
    alive = weakref.ref(array)
    held = [make(array)]
    del array

    def still_there(work):
        assert alive() is not None

    meet(world, group, rank, held, still_there)
    if rank == 0:
        gc.collect()
        assert alive() is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["versioned", "unversioned", "owned"])
def test_given_back_after_the_end_and_not_before(world, rank, way):
    group = world.new_group([0, 1])
    array = np.ones(COUNT, "f4")
    if way == "owned":
        exporter = dlpack.exchange_by_owning()(array)
    else:
        exporter = dlpack.Exporter(array, versioned=way == "versioned")

    def not_yet(work):
        assert exporter.export.deleted == 0
        assert work.exception() is None
        assert exporter.export.deleted == 0

    meet(world, group, rank, [exporter], not_yet)
    if rank == 0:
        assert exporter.export.deleted == 1
        assert (array == 2).all()


@pytest.mark.ranks(2)
def test_given_back_on_a_thread_with_the_gil(world, rank):
    """Of a Work that was dropped, by a later call: never by the thread that ran it."""
    group = world.new_group([0, 1])
    if rank == 1:
        world.store.wait(["go"])
        group.all_reduce(np.ones(COUNT, "f4"))
        group.barrier()
        group.barrier()
        return
    exporter = dlpack.Exporter(np.ones(COUNT, "f4"))
    deleters = []
    delete = exporter.export.delete

    def noted(pointer):
        deleters.append(threading.get_ident())
        delete(pointer)

    exporter.export.delete = noted
    group.all_reduce(exporter, async_op=True)
    gc.collect()
    assert deleters == []
    world.store.set("go", "")
    group.barrier()
    group.barrier()  # sweeps what has ended
    assert deleters == [threading.get_ident()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("end", ["abort", "close"])
def test_given_back_when_the_group_ends(world, rank, end):
    if rank == 1:
        world.store.wait(["done"])
        return
    group = world.new_group([0, 1])
    exporter = dlpack.Exporter(np.ones(COUNT, "f4"))
    work = group.all_reduce(exporter, async_op=True)
    assert exporter.export.deleted == 0
    getattr(group, end)()
    with pytest.raises(devicemesh.ClosedError):
        work.wait()
    assert exporter.export.deleted == 1
    world.store.set("done", "")

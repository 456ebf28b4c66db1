"""Works that call back and are awaited, operations given together, objects, the barrier that
names who is missing."""

import asyncio
import threading

import numpy as np
import pytest

import devicemesh
from devicemesh import GroupTimeoutError

NEVER = 600


@pytest.fixture
def world():
    yield devicemesh.default_world(timeout=NEVER)
    devicemesh.close_world()


@pytest.fixture
def group(world):
    return world.new_group(range(world.size), name="all")


# --- callbacks, asyncio ---------------------------------------------------------------


@pytest.mark.ranks(2)
def test_callbacks(world, group, rank):
    """They come once, after the end, from another thread, and may use the group."""
    calls, done = [], threading.Event()
    value, more = np.ones(2), np.ones(2)

    def ended(work):
        calls.append((work, work.is_completed(), threading.current_thread()))
        group.all_reduce(more)
        done.set()

    if rank == 1:
        world.store.wait(["given"])
    work = group.all_reduce(value, async_op=True)
    work.add_done_callback(ended)
    world.store.set("given", "")
    work.wait()
    assert done.wait(60)
    assert len(calls) == 1
    assert calls[0][:2] == (work, True)
    np.testing.assert_array_equal(value + more, 4)

    late = []
    work.add_done_callback(late.append)  # at once
    assert late == [work]


@pytest.mark.ranks(2)
def test_callbacks_of_what_fails(world, group, rank):
    if rank == 0:
        group.timeout = 0.2
        errors, done = [], threading.Event()
        for work in (group.irecv(bytearray(1), 1), group.barrier(async_op=True)):
            work.add_done_callback(lambda work: errors.append(work.exception()))
            work.add_done_callback(lambda work: done.set() if len(errors) == 2 else None)
        assert done.wait(60)
        assert any(isinstance(error, GroupTimeoutError) for error in errors)
        world.store.set("done", "")
    else:
        world.store.wait(["done"])


@pytest.mark.ranks(2)
def test_asyncio(group, rank):
    async def main():
        value, got = np.ones(3), np.zeros(2)
        other = 1 - rank
        source, none, _ = await asyncio.gather(
            wait(group.irecv(got, other)),
            wait(group.all_reduce(value, async_op=True)),
            wait(group.isend(np.full(2, float(rank)), other)),
        )
        assert (source, none) == (other, None)
        np.testing.assert_array_equal(got, other)
        np.testing.assert_array_equal(value, 2)
        for _ in range(20):
            assert await group.barrier(async_op=True) is None

        pending = group.irecv(got, other)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(pending), 0.01)
        assert not pending.is_completed()  # goes on
        group.barrier()
        await group.isend(got, other)
        assert await pending == other

    async def wait(work):
        return await work

    asyncio.run(main())


@pytest.mark.ranks(2)
def test_asyncio_failure(world, group, rank):
    async def main():
        with pytest.raises(GroupTimeoutError, match="barrier #1"):
            await group.barrier(async_op=True)

    if rank == 0:
        group.timeout = 0.2
        asyncio.run(main())
        world.store.set("done", "")
    else:
        world.store.wait(["done"])


# --- together -------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_coalesce(group, rank, world_size):
    first, second, got = np.ones(2), np.full(3, rank), np.zeros(1)
    with group.coalesce() as works:
        assert group.all_reduce(first) is None
        assert group.broadcast(second, root=2, async_op=True) is None
        assert group.isend(np.full(1, float(rank)), (rank + 1) % 3) is None
        assert group.recv(got, (rank - 1) % 3) is None
        assert works == []
        np.testing.assert_array_equal(first, 1)
    assert [work.name for work in works] == ["all_reduce", "broadcast", "send", "recv"]
    assert [work.seq for work in works] == [1, 2, 1, 2]
    assert all(work.is_completed() for work in works)
    np.testing.assert_array_equal(first, 3)
    np.testing.assert_array_equal(second, 2)
    assert got == works[3].source_rank() == (rank - 1) % 3

    outputs = [np.zeros(2) for _ in range(3)]
    with group.coalesce(async_op=True) as works:
        group.all_gather(outputs, np.full(2, float(rank)))
    works[0].wait()
    np.testing.assert_array_equal(outputs, [[0, 0], [1, 1], [2, 2]])


@pytest.mark.ranks(2)
def test_an_error_inside_sends_nothing(group, rank):
    value = np.ones(2)
    with pytest.raises(ValueError, match="root"), group.coalesce():  # noqa: PT012
        group.all_reduce(value)
        group.broadcast(value, root=7)
    with pytest.raises(KeyError), group.coalesce():  # noqa: PT012
        group.all_reduce(value)
        raise KeyError
    np.testing.assert_array_equal(value, 1)
    group.all_reduce(value)
    np.testing.assert_array_equal(value, 2)


@pytest.mark.ranks(4)
def test_batch_isend_irecv(group, rank, world_size):
    peers = [peer for peer in range(world_size) if peer != rank]
    gots = [np.zeros(50_000) for _ in peers]
    ops = [("irecv", got, peer, 3) for got, peer in zip(gots, peers, strict=True)]
    ops += [("isend", np.full(50_000, float(rank)), peer, 3) for peer in peers]
    works = group.batch_isend_irecv(ops)
    assert [work.name for work in works] == ["recv"] * 3 + ["send"] * 3
    for work in works:
        work.wait()
    for got, peer in zip(gots, peers, strict=True):
        np.testing.assert_array_equal(got, peer)


# --- objects --------------------------------------------------------------------------


@pytest.mark.ranks(1, 3)
def test_objects(group, rank, world_size):
    mine = {"rank": rank, "data": "x" * 1000 * rank}
    everybody = [{"rank": i, "data": "x" * 1000 * i} for i in range(world_size)]
    root = world_size - 1

    objects = [None] * world_size
    group.all_gather_object(objects, mine)
    assert objects == everybody

    objects = everybody[:2] if rank == root else [None] * len(everybody[:2])
    group.broadcast_object_list(objects, root)
    assert objects == everybody[:2]

    objects = [None] * world_size if rank == root else None
    group.gather_object(mine, objects, root)
    assert objects == (everybody if rank == root else None)

    output = [None]
    group.scatter_object_list(output, everybody if rank == root else None, root)
    assert output == [mine]

    if world_size > 1 and rank == 0:
        group.send_object_list([1, "two", mine], 1, tag=4)
    elif world_size > 1 and rank == 1:
        objects = [None] * 3
        assert group.recv_object_list(objects, tag=4) == 0
        assert objects == [1, "two", everybody[0]]


# --- the barrier that names who is missing --------------------------------------------


@pytest.mark.ranks(4)
def test_monitored_barrier(world, group, rank):
    for _ in range(4):
        group.monitored_barrier()
    if rank in (1, 3):
        world.store.wait(["missed"])
        with pytest.raises(GroupTimeoutError, match="ranks 1, 3 have not come in time"):
            group.monitored_barrier()
    else:
        with pytest.raises(
            GroupTimeoutError,
            match=r"^monitored_barrier #5 on group 'all': ranks 1, 3 have not come in time",
        ):
            group.monitored_barrier(timeout=0.3, wait_all_ranks=True)
        world.store.set("missed", "")
    group.monitored_barrier(10)
    group.barrier()  # the group lives on
    if rank == 0:
        world.store.wait(["named"])
        with pytest.raises(GroupTimeoutError, match="rank 0 has not come in time"):
            group.monitored_barrier()
    else:
        with pytest.raises(GroupTimeoutError, match="rank 0 has not come in time"):
            group.monitored_barrier(timeout=0.01)
        if rank == 1:
            world.store.set("named", "")

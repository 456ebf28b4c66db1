"""Groups over several processes: results, order, overlap, the ways to end."""

import gc
import os
import signal
import threading

import numpy as np
import pytest

import devicemesh
from devicemesh import ClosedError, GroupTimeoutError, PeerError

NEVER = 600  # seconds: a test that waited for this time-out would run into its deadline


@pytest.fixture(params=["shm", "tcp"])
def world(request, monkeypatch):
    monkeypatch.setenv("DEVICEMESH_TRANSPORT", request.param)
    yield devicemesh.default_world(timeout=NEVER)
    devicemesh.close_world()


@pytest.fixture
def group(world):
    return world.new_group(range(world.size), name="all")


kept = []  # until the interpreter's end


def threads():
    return len(os.listdir("/proc/self/task"))


# --- results --------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3, 4, 8)
@pytest.mark.parametrize("async_op", [False, True])
def test_results(group, rank, world_size, async_op):
    def call(method, *arguments, **named):
        result = getattr(group, method)(*arguments, **named, async_op=async_op)
        if async_op:
            assert result.wait()
        else:
            assert result is None

    ranks = np.arange(world_size)
    for op, expected in (
        ("sum", ranks.sum()),
        ("max", world_size - 1),
        ("min", 0),
        ("avg", ranks.mean()),
    ):
        value = np.full(5, float(rank))
        call("all_reduce", value, op)
        np.testing.assert_allclose(value, expected)

    value = np.full(3, rank, "i4")
    call("broadcast", value, root=world_size - 1)
    np.testing.assert_array_equal(value, world_size - 1)

    gathered = np.empty((world_size, 2), "u1")
    call("all_gather_into_tensor", gathered, np.full(2, rank, "u1"))
    np.testing.assert_array_equal(gathered, np.repeat(ranks, 2).reshape(-1, 2))

    piece = np.empty(2)
    call("reduce_scatter_tensor", piece, np.arange(2.0 * world_size) + rank)
    np.testing.assert_allclose(piece, world_size * (2.0 * rank + np.arange(2)) + ranks.sum())

    exchanged = np.empty(world_size)
    call("all_to_all_single", exchanged, 100.0 * rank + ranks)
    np.testing.assert_array_equal(exchanged, 100.0 * ranks + rank)

    call("barrier")


@pytest.mark.ranks(2, 3)
def test_messages_go_round(group, rank, world_size):
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    value, got = np.full(4, float(rank)), np.empty(4)
    if rank == 0:
        group.send(value, after, tag=7)
        assert group.recv(got, before, tag=7) == before
    else:
        assert group.recv(got, src=before, tag=7) == before
        group.send(value, dst=after, tag=7)
    np.testing.assert_array_equal(got, before)


@pytest.mark.ranks(4)
def test_group_ranks_follow_the_list(world, rank):
    order = [3, 1, 0, 2]
    group = world.new_group(order)
    assert group.rank() == order.index(rank)
    gathered = np.empty(4)
    group.all_gather_into_tensor(gathered, np.array([float(rank)]))
    np.testing.assert_array_equal(gathered, order)


# --- order and overlap ----------------------------------------------------------------


@pytest.mark.ranks(2)
def test_operations_keep_their_order(group, rank):
    """Each starts from what the one before has left."""
    value = np.ones(1)
    works = [group.all_reduce(value, async_op=True) for _ in range(20)]
    group.all_reduce(value)
    assert value == 2.0**21
    assert all(work.wait() for work in works)


@pytest.mark.ranks(2)
def test_works_of_different_groups_overlap(world, rank):
    """A work that waits for its peer does not keep those of other groups from running."""
    first, second = world.new_group([0, 1]), world.new_group([0, 1])
    if rank == 0:
        value = np.ones(1)
        work = first.all_reduce(value, async_op=True)
        second.barrier()
        world.store.set("met", "")
        assert work.wait()
        assert value == 2
    else:
        second.barrier()
        world.store.wait(["met"])
        first.all_reduce(np.ones(1))


@pytest.mark.ranks(2)
def test_a_work_can_be_waited_for_again(world, group, rank):
    value = np.ones(1)
    if rank == 0:
        work = group.all_reduce(value, async_op=True)
        with pytest.raises(GroupTimeoutError, match=r"^all_reduce #1 on group 'all' .* running"):
            work.wait(timeout=0.01)
        assert not work.is_completed()
        assert work.exception() is None
        assert repr(work) == "<devicemesh.Work all_reduce #1 on all running>"
        world.store.set("go", "")
        assert work.wait()
        assert value == 2
    else:
        world.store.wait(["go"])
        group.all_reduce(value)


@pytest.mark.ranks(2)
def test_arrays_stay_exported_while_the_operation_runs(world, group, rank):
    data = bytearray(8)
    if rank == 0:
        kept = group.all_reduce(data, async_op=True)
        with pytest.raises(BufferError):
            data.append(0)
        dropped = bytearray(8)
        group.all_reduce(dropped, async_op=True)  # its Work goes at once
        gc.collect()
        with pytest.raises(BufferError):
            dropped.append(0)
        world.store.set("go", "")
        kept.wait()
        data.append(0)
        group.barrier()
        group.barrier()  # sweeps what has ended
        dropped.append(0)
    else:
        world.store.wait(["go"])
        for _ in range(2):
            group.all_reduce(bytearray(8))
        group.barrier()
        group.barrier()


# --- failures -------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("connected", [False, True])
def test_a_peer_that_never_comes(world, group, rank, connected, async_op):
    if connected:
        group.barrier()
    if rank == 0:
        group.timeout = 0.3
        number = 2 if connected else 1
        with pytest.raises(
            GroupTimeoutError, match=rf"^barrier #{number} on group 'all' \(ranks 0, 1\): .*rank 1"
        ):
            group.barrier(async_op).wait()
        with pytest.raises(ClosedError, match=f"broken by an earlier failure: barrier #{number}"):
            group.barrier()
        world.store.set("done", "")
    else:
        world.store.wait(["done"])


@pytest.mark.ranks(2)
def test_a_peer_that_closes(world, group, rank):
    group.barrier()
    if rank == 1:
        group.close()
        world.store.wait(["done"])
    else:
        with pytest.raises(PeerError, match=r"^all_reduce #2 on group 'all' .*rank 1"):
            group.all_reduce(np.ones(1))
        world.store.set("done", "")


@pytest.mark.ranks(2)
def test_other_groups_live_on(world, rank):
    broken, whole = world.new_group([0, 1]), world.new_group([0, 1])
    broken.barrier()
    if rank == 0:
        broken.close()
    else:
        with pytest.raises(PeerError):
            broken.barrier()
    whole.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("connected", [False, True])
def test_ending_a_group_ends_what_runs(world, group, rank, end, connected):
    if connected:
        group.barrier()
    if rank == 0:
        running, queued = group.barrier(async_op=True), group.barrier(async_op=True)
        errors = []

        def wait_in_line():
            try:
                group.barrier()
            except ClosedError as error:
                errors.append(error)

        thread = threading.Thread(target=wait_in_line)
        thread.start()
        getattr(group, end)()
        for work in (running, queued):
            with pytest.raises(ClosedError, match=rf"the group was {end.rstrip('e')}ed"):
                work.wait()
        thread.join()
        assert len(errors) == 1
        group.close()
        world.store.set("done", "")
    else:
        world.store.wait(["done"])


@pytest.mark.ranks(2)
def test_ctrl_c(world, group, rank):
    if rank == 0:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            group.barrier()
        with pytest.raises(ClosedError, match=r"earlier failure: barrier #1 .* by a signal"):
            group.barrier()
        world.store.set("done", "")
    else:
        world.store.wait(["done"])


@pytest.mark.ranks(2)
def test_ctrl_c_leaves_a_work_running(world, group, rank):
    if rank == 0:
        work = group.barrier(async_op=True)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        world.store.set("go", "")
        assert work.wait()
    else:
        world.store.wait(["go"])
        group.barrier()


@pytest.mark.ranks(2)
def test_close_from_a_handler_ends_the_call_it_interrupted(world, group, rank):
    if rank == 0:
        signal.signal(signal.SIGUSR1, lambda *_: group.close())
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(ClosedError, match="the group was closed while the operation"):
            group.barrier()
        world.store.set("done", "")
    else:
        world.store.wait(["done"])


@pytest.mark.ranks(2)
def test_threads_go_with_the_group(world, group, rank):
    before = threads()
    group.barrier()
    connected = threads()
    group.barrier(async_op=True).wait()
    assert threads() == connected + 1
    group.barrier()
    group.close()
    assert threads() == before


@pytest.mark.ranks(2)
def test_exit_with_a_work_that_runs(rank):
    """The harness looks at how the process ends."""
    group = devicemesh.default_world(timeout=NEVER).new_group([0, 1])
    group.barrier()
    if rank == 0:
        kept.append(group.barrier(async_op=True))

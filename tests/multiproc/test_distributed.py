"""devicemesh.distributed over several processes: ways to meet, ranks, groups, results."""

import os
import socket

import numpy as np
import pytest

import devicemesh
import devicemesh.distributed as dist

NEVER = 600  # seconds: a test that waited for this time-out would run into its deadline


@pytest.fixture
def joined():
    dist.init_process_group("gloo", timeout=NEVER)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def total(value, **named):
    """The sum over the ranks of the group."""
    array = np.array([float(value)])
    dist.all_reduce(array, **named)
    return array[0]


# --- meeting --------------------------------------------------------------------------


def free_port(shared_path, rank, world_size):
    """One that all ranks learn of, from a socket that rank 0 has bound and closed."""
    with devicemesh.FileStore(str(shared_path / "port")) as store:
        if rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as server:
                store.set("port", str(server.getsockname()[1]))
        return int(store.get("port"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["env", "arguments", "tcp", "query", "file", "store"])
def test_ways_to_meet_again_and_again(how, rank, world_size, shared_path, monkeypatch):
    place = {"rank": rank, "world_size": world_size}
    if how == "env":
        arguments = {"init_method": "env://"}
    elif how == "arguments":
        monkeypatch.delenv("RANK")
        monkeypatch.delenv("WORLD_SIZE")
        arguments = place
    elif how == "tcp":
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
        port = free_port(shared_path, rank, world_size)
        arguments = {"init_method": f"tcp://127.0.0.1:{port}", **place}
    elif how == "query":
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        arguments = {"init_method": f"tcp://{address}?rank={rank}&world_size={world_size}"}
    elif how == "file":
        arguments = {"init_method": f"file://{shared_path}/meeting", **place}
    else:
        arguments = {"store": devicemesh.FileStore(str(shared_path / "store")), **place}
    for _ in range(3):
        dist.init_process_group("gloo", timeout=NEVER, **arguments)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
        assert total(rank + 1) == 3
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()


# --- ranks and groups -----------------------------------------------------------------


@pytest.mark.ranks(4)
def test_global_and_group_ranks(joined, rank):
    """Groups whose group ranks are not the global ones."""
    group = dist.new_group([3, 1])
    reverse = dist.new_group([3, 1], sort_ranks=False)
    if rank in (1, 3):
        assert dist.get_rank(group) == (1, 3).index(rank)
        assert dist.get_rank(reverse) == (3, 1).index(rank)
        for group_in_use in (group, reverse):
            value = np.array([rank])
            dist.broadcast(value, src=3, group=group_in_use)
            assert value == 3
        value = np.array([rank])
        dist.broadcast(value, group_src=1, group=reverse)
        assert value == 1
        gathered = np.empty(2)
        dist.all_gather_into_tensor(gathered, np.array([float(rank)]), group=reverse)
        assert gathered.tolist() == [3, 1]
        if rank == 1:
            dist.send(value, dst=3, group=reverse, tag=5)
            dist.send(value, group_dst=0, group=reverse)
        else:
            assert dist.recv(value, group=reverse, tag=5) == 1
            assert dist.recv(value, src=1, group=reverse) == 1
    else:
        assert group == reverse == dist.GroupMember.NON_GROUP_MEMBER
    dist.barrier()


@pytest.mark.ranks(4)
def test_subgroups(joined, rank):
    rows, _ = dist.new_subgroups(2)
    columns, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    assert total(rank, group=rows) == (1 if rank < 2 else 5)
    assert total(rank, group=columns) == (2 if rank % 2 == 0 else 4)
    part = dist.split_group(None, [[3, 0], [1, 2]])
    assert total(rank, group=part) == 3
    dist.destroy_process_group(rows)
    assert total(1, group=columns) == 2
    assert total(1) == 4


@pytest.mark.ranks(4)
def test_groups_of_a_mesh(rank):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert dist.is_initialized()
    assert total(rank, group=mesh.get_group("tp")) == (1 if rank < 2 else 5)
    assert dist.get_process_group_ranks(mesh.get_group("dp")) == [rank % 2, rank % 2 + 2]
    assert total(1) == 4
    dist.destroy_process_group()


# --- results --------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize("async_op", [False, True])
def test_collectives(joined, rank, world_size, async_op):
    def call(function, *arguments, **named):
        work = function(*arguments, **named, async_op=async_op)
        assert work.wait() if async_op else work is None

    value = np.full(3, rank + 1.0)
    call(dist.all_reduce, value, dist.ReduceOp.PRODUCT)
    np.testing.assert_array_equal(value, 24)
    value = np.full(3, rank)
    call(dist.broadcast, value, 2)
    np.testing.assert_array_equal(value, 2)
    for gather in (dist.all_gather_into_tensor, dist.all_gather_single):
        gathered = np.empty((4, 1))
        call(gather, gathered, np.array([float(rank)]))
        np.testing.assert_array_equal(gathered[:, 0], range(4))
    for scatter in (dist.reduce_scatter_tensor, dist.reduce_scatter_single):
        piece = np.empty(1)
        call(scatter, piece, np.arange(4.0), op=dist.ReduceOp.SUM)
        assert piece == 4 * rank
    call(dist.barrier)

    value = np.full(2, rank + 1.0)
    call(dist.reduce, value, 3)
    np.testing.assert_array_equal(value, 10 if rank == 3 else rank + 1)
    mine, outputs = np.full(2, rank), [np.empty(2, int) for _ in range(4)]
    call(dist.all_gather, outputs, mine)
    assert [each[1] for each in outputs] == [0, 1, 2, 3]
    outputs = [np.empty(2, int) for _ in range(4)]
    call(dist.gather, mine, outputs if rank == 1 else [], dst=1)
    if rank == 1:
        assert [each[1] for each in outputs] == [0, 1, 2, 3]
    got = np.empty(2, int)
    call(dist.scatter, got, [mine + 10 * i for i in range(4)] if rank == 2 else None, src=2)
    np.testing.assert_array_equal(got, 2 + 10 * rank)
    got = np.empty(2, int)
    call(dist.reduce_scatter, got, [mine + 10 * i for i in range(4)])
    np.testing.assert_array_equal(got, 6 + 40 * rank)
    call(dist.all_to_all, outputs, [mine + 10 * i for i in range(4)])
    assert [each[1] for each in outputs] == [10 * rank + i for i in range(4)]
    # The first dim is split: i + 1 rows for rank i.
    sent = np.repeat(np.arange(4), [1, 2, 3, 4])[:, None] + 10.0 * rank
    got = np.empty((4 * (rank + 1), 1))
    call(dist.all_to_all_single, got, sent, [rank + 1] * 4, [1, 2, 3, 4])
    np.testing.assert_array_equal(got[:, 0], np.repeat(10.0 * np.arange(4) + rank, rank + 1))


@pytest.mark.ranks(4)
def test_objects(joined, rank):
    """In a group whose group ranks are not the global ones."""
    group = dist.new_group([3, 2, 1], sort_ranks=False)
    if rank == 0:
        return
    mine = {"rank": rank, "padding": "x" * 100 * rank}
    objects = [None] * 3
    dist.all_gather_object(objects, mine, group=group)
    assert [each["rank"] for each in objects] == [3, 2, 1]
    for root in ({"src": 2}, {"group_src": 1}):
        objects = [mine, rank]
        dist.broadcast_object_list(objects, **root, group=group)
        assert (objects[0]["rank"], objects[1]) == (2, 2)
    objects = [None] * 3 if rank == 1 else None
    dist.gather_object(mine, objects, dst=1, group=group)
    assert rank != 1 or [each["rank"] for each in objects] == [3, 2, 1]
    got = [None]
    dist.scatter_object_list(got, ["for 3", "for 2", "for 1"], src=3, group=group)
    assert got == [f"for {rank}"]
    if rank == 3:
        dist.send_object_list([mine, "second"], dst=1, group=group)
    elif rank == 1:
        objects = [None, None]
        assert dist.recv_object_list(objects, group=group) == 3
        assert objects == [{"rank": 3, "padding": "x" * 300}, "second"]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("async_op", [False, True])
def test_coalesced(joined, rank, async_op):
    arrays = [np.full(length, rank + 1.0) for length in (1, 3, 1000)]
    work = dist.all_reduce_coalesced(arrays, async_op=async_op)
    if async_op:
        assert work.wait()
        assert work.is_completed()
        assert work.exception() is work.result() is None
    for array in arrays:
        np.testing.assert_array_equal(array, 10)
    outputs = [[np.empty(length) for _ in range(4)] for length in (1, 3)]
    inputs = [np.full(length, float(rank)) for length in (1, 3)]
    work = dist.all_gather_coalesced(outputs, inputs, async_op=async_op)
    assert work.wait() if async_op else work is None
    for each in outputs:
        assert [array[-1] for array in each] == [0, 1, 2, 3]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("length", [1, 1 << 20])
def test_everybody_to_everybody(joined, rank, length):
    """Sends before receives, one by one and as a batch."""
    others = [other for other in range(4) if other != rank]
    mine = np.full(length, rank, "u1")
    for batch in (False, True):
        got = {other: np.empty(length, "u1") for other in others}
        if batch:
            messages = [dist.P2POp(dist.isend, mine, other) for other in others]
            messages += [dist.P2POp(dist.irecv, got[other], other) for other in others]
            works = dist.batch_isend_irecv(messages)
        else:
            works = [dist.isend(mine, other) for other in others]
            works += [dist.irecv(got[other], other) for other in others]
        assert len(works) == 6
        for work in works:
            work.wait()
        for other in others:
            np.testing.assert_array_equal(got[other], other)


@pytest.mark.ranks(4)
def test_a_monitored_barrier(joined, rank):
    dist.monitored_barrier(timeout=60)
    store = devicemesh.default_world().store
    if rank == 3:
        store.wait(["gave up 0", "gave up 1", "gave up 2"])
        return
    with pytest.raises(devicemesh.DeviceMeshError, match="3" if rank == 0 else None):
        dist.monitored_barrier(timeout=1, wait_all_ranks=True)
    store.set(f"gave up {rank}", "")


@pytest.mark.ranks(2)
def test_a_barrier_that_times_out(joined, rank):
    store = devicemesh.default_world().store
    if rank == 0:
        with pytest.raises(devicemesh.GroupTimeoutError):
            dist.barrier(timeout=0.05)
        store.set("gave up", "")
    else:
        store.wait(["gave up"])
        dist.barrier()
    dist.barrier()

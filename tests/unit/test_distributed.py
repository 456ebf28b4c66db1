"""devicemesh.distributed in one process: arguments, names, simulated and one-rank worlds."""

import subprocess
import sys
from datetime import timedelta

import numpy as np
import pytest

import devicemesh
import devicemesh.distributed as dist
from devicemesh.distributed import GroupMember

OUTSIDE = GroupMember.NON_GROUP_MEMBER
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def one():
    dist.init_process_group(rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def eight():
    """Rank 5 of eight."""
    with devicemesh.simulate(world_size=8, rank=5) as world:
        yield world


# --- bad arguments --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"backend": 3}, TypeError, "backend must be a name or None, got 3"),
        ({"backend": "nccl"}, ValueError, "backend must be 'gloo' or 'fake' on CPU, got 'nccl'"),
        ({"backend": "cuda:nccl"}, ValueError, "backend has none for device 'cpu'"),
        ({"backend": "cpu:gloo,cpu:fake"}, ValueError, "names device 'cpu' twice"),
        ({"backend": "cpu:"}, ValueError, "'device:name' pairs"),
        ({"init_method": 3}, TypeError, "init_method must be a URL, got 3"),
        ({"init_method": "udp://x"}, ValueError, "init_method must be 'env://'"),
        ({"init_method": "tcp://localhost:1"}, ValueError, "with tcp://localhost:1, world_size"),
        (
            {"init_method": "tcp://localhost:1", "rank": 2, "world_size": 2},
            ValueError,
            "got rank=2, world_size=2",
        ),
        (
            {"init_method": "tcp://localhost", "rank": 0, "world_size": 2},
            ValueError,
            "init_method must name host and port",
        ),
        ({"init_method": "tcp://a:1?rank=x"}, ValueError, "rank must be a number, got 'x'"),
        (
            {"init_method": "file://host/f", "rank": 0, "world_size": 2},
            ValueError,
            "init_method must name a file of this host",
        ),
        ({"rank": 1, "world_size": 2}, ValueError, "MASTER_ADDR, MASTER_PORT are not set"),
        ({"store": devicemesh.HashStore()}, ValueError, "with store, world_size must be given"),
        (
            {"store": devicemesh.HashStore(), "init_method": "env://"},
            ValueError,
            "init_method and store cannot both be given",
        ),
        ({"device_id": 0}, ValueError, "device_id must be a CPU device or None, got 0"),
        ({"timeout": "long"}, TypeError, "timeout"),
    ],
)
def test_bad_arguments_of_init(arguments, error, text):
    with pytest.raises(error, match=text):
        dist.init_process_group(**arguments)
    assert not dist.is_initialized()
    assert dist.group.WORLD is None


def test_init_twice(one):
    with pytest.raises(ValueError, match="there already"):
        dist.init_process_group()
    assert dist.group.WORLD is one


@pytest.mark.parametrize(
    "call",
    [
        dist.get_rank,
        dist.get_world_size,
        dist.get_backend,
        dist.barrier,
        dist.new_group,
        dist.destroy_process_group,
        lambda: dist.get_process_group_ranks(None),
        lambda: dist.all_reduce(np.ones(1)),
    ],
)
def test_nothing_goes_before_init(call):
    with pytest.raises(ValueError, match="call init_process_group first"):
        call()


def test_bad_groups(one):
    for call in (dist.get_rank, dist.barrier, dist.destroy_process_group):
        with pytest.raises(TypeError, match="group must be a ProcessGroup or None, got 'dp'"):
            call(group="dp")
    with pytest.raises(TypeError, match="group must be a ProcessGroup"):
        dist.all_reduce(np.ones(1), group=3)


def test_bad_arguments_of_groups(eight):
    with pytest.raises(ValueError, match=r"ranks must be in 0\.\.7, got 8"):
        dist.new_group([0, 8])
    with pytest.raises(ValueError, match="must not contain duplicates"):
        dist.new_group([5, 5])
    with pytest.raises(ValueError, match="'gloo' or 'fake'"):
        dist.new_group([5], backend="mpi")
    with pytest.raises(ValueError, match="device_id"):
        dist.new_group([5], device_id="cuda:0")
    with pytest.raises(ValueError, match="group_size must be given"):
        dist.new_subgroups()
    with pytest.raises(ValueError, match="group_size must be positive, got 0"):
        dist.new_subgroups(0)
    with pytest.raises(ValueError, match="must divide the group's 8 ranks, got 3"):
        dist.new_subgroups(3)
    with pytest.raises(ValueError, match="must not be empty"):
        dist.new_subgroups_by_enumeration([])
    with pytest.raises(ValueError, match=r"rank 1 is in two subgroups: \[0, 1\] and \[1, 2\]"):
        dist.new_subgroups_by_enumeration([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="split_ranks must not be empty"):
        dist.split_group()
    with pytest.raises(ValueError, match="must not be empty"):
        dist.split_group(split_ranks=[[0], []])
    with pytest.raises(ValueError, match="twice"):
        dist.split_group(split_ranks=[[0, 1], [1]])
    with pytest.raises(ValueError, match=r"group rank must be in 0\.\.7, got 8"):
        dist.split_group(split_ranks=[[8]])
    assert dist.get_pg_count() == 1


def test_bad_ranks(eight):
    group = dist.new_group([1, 3, 5])
    for call in (
        lambda **named: dist.broadcast(np.ones(1), **named),
        lambda **named: dist.recv(np.ones(1), **named),
    ):
        with pytest.raises(ValueError, match="src and group_src cannot both be given"):
            call(src=1, group=group, group_src=0)
        with pytest.raises(ValueError, match=r"rank 0 is not in the group of ranks 1, 3, 5"):
            call(src=0, group=group)
    with pytest.raises(ValueError, match="either src or group_src must be given"):
        dist.broadcast(np.ones(1))
    with pytest.raises(ValueError, match="either dst or group_dst must be given"):
        dist.send(np.ones(1))
    with pytest.raises(ValueError, match="rank 2 is not in the group"):
        dist.get_group_rank(group, 2)
    with pytest.raises(ValueError, match=r"in 0\.\.2, got 3"):
        dist.get_global_rank(group, 3)


def test_bad_batches(eight):
    one = np.ones(1)
    with pytest.raises(ValueError, match="op must be isend or irecv"):
        dist.P2POp(dist.send, one, 0)
    with pytest.raises(ValueError, match="either peer or group_peer"):
        dist.P2POp(dist.isend, one)
    with pytest.raises(ValueError, match="not in the group"):
        dist.P2POp(dist.isend, one, group=OUTSIDE)
    for bad in ([], None, [1], (dist.P2POp(dist.isend, one, 0),)):
        with pytest.raises(ValueError, match="p2p_op_list must be a list of P2POp"):
            dist.batch_isend_irecv(bad)
    pair = [dist.P2POp(dist.isend, one, 1, group=g) for g in (None, dist.new_group([1, 5]))]
    assert [each.group_peer for each in pair] == [1, 0]
    assert repr(pair[0]) == "P2POp(isend, peer=1, tag=0)"
    with pytest.raises(ValueError, match="must be in one group"):
        dist.batch_isend_irecv(pair)


def test_lists_only_where_they_belong(eight):
    for call in (dist.gather, dist.scatter):
        with pytest.raises(ValueError, match=r"puts must be"):
            call(np.ones(1), [np.ones(1)] * 8)  # rank 0 is the one


def test_bad_lists(one):
    with pytest.raises(TypeError, match="tensors must be a list, got ndarray"):
        dist.all_reduce_coalesced(np.ones(1))
    with pytest.raises(ValueError, match="equally long, they have 1 and 0 entries"):
        dist.all_gather_coalesced([[np.ones(1)]], [])
    with pytest.raises(ValueError, match="one entry for each of the 1 members, it has 2"):
        dist.all_gather_object([None, None], 1)
    with pytest.raises(ValueError, match="either dst or group_dst must be given"):
        dist.send_object_list([1])


def test_local_rank(monkeypatch):
    with pytest.raises(RuntimeError, match="LOCAL_RANK is not in the environment"):
        dist.get_node_local_rank()
    assert dist.get_node_local_rank(3) == 3
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert dist.get_node_local_rank(3) == 2


# --- names ----------------------------------------------------------------------------


def test_backends():
    assert dist.Backend("GLOO") == dist.Backend.GLOO == "gloo"
    with pytest.raises(ValueError, match="must be a str"):
        dist.Backend(3)
    assert dist.is_available()
    assert dist.is_gloo_available()
    assert dist.is_backend_available("cpu:gloo")
    assert dist.is_backend_available("FAKE")
    assert not dist.is_backend_available("cpu:gloo,cuda:nccl")
    for name in ("nccl", "mpi", "ucc", "xccl"):
        assert not getattr(dist, f"is_{name}_available")()
        assert not dist.is_backend_available(name)
    assert dist.get_default_backend_for_device("cpu") == "gloo"
    with pytest.raises(ValueError, match="no backend for device 'tpu'"):
        dist.get_default_backend_for_device("tpu")


def test_launched_by_torchrun(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not dist.is_torchelastic_launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert dist.is_torchelastic_launched()


def test_all_names_exist():
    for name in dist.__all__:
        assert hasattr(dist, name), name


def test_it_is_not_imported_with_devicemesh():
    code = "import sys, devicemesh; print('devicemesh.distributed' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


# --- life -----------------------------------------------------------------------------


def test_a_world_of_one(one):
    assert dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size(), dist.get_pg_count()) == (0, 1, 1)
    assert (dist.get_backend(), dist.get_backend_config()) == ("gloo", "cpu:gloo")
    assert one is GroupMember.WORLD is dist.group.WORLD
    assert one.timeout == dist.default_pg_timeout.total_seconds()
    value = np.arange(3.0)
    dist.all_reduce(value)
    dist.broadcast(value, 0)
    out = np.empty(3)
    dist.all_gather_into_tensor(out, value)
    dist.reduce_scatter_tensor(out, value)
    dist.all_gather_single(out, value)
    dist.reduce_scatter_single(out, value)
    dist.reduce(value, 0)
    dist.all_gather([out], value)
    dist.gather(value, [out])
    dist.scatter(out, [value])
    dist.reduce_scatter(out, [value])
    dist.all_to_all([out], [value])
    dist.all_to_all_single(out, value)
    dist.all_to_all_single(out, value, [3], [3])
    dist.all_reduce_coalesced([value, out])
    dist.all_gather_coalesced([[out]], [value])
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    objects = [None]
    dist.all_gather_object(objects, "a")
    assert objects == ["a"]
    dist.broadcast_object_list(objects)
    dist.gather_object("b", objects)
    assert objects == ["b"]
    dist.scatter_object_list(objects, ["c"])
    assert objects == ["c"]
    dist.barrier()
    dist.barrier(timeout=timedelta(seconds=60))
    assert dist.barrier(async_op=True).wait()
    assert dist.all_reduce(value, async_op=True).wait()
    np.testing.assert_array_equal(out, np.arange(3.0))


def test_init_destroy_init():
    for backend in ("gloo", None, "cpu:gloo", "CPU:GLOO,cuda:nccl", "undefined"):
        dist.init_process_group(backend, timeout=timedelta(minutes=1))
        first = dist.group.WORLD
        assert first.timeout == 60
        assert dist.get_backend() == "gloo"
        dist.destroy_process_group(first)
        assert first.closed
        assert not dist.is_initialized()


def test_a_store_of_ones_own():
    store = devicemesh.HashStore()
    for _ in range(2):
        dist.init_process_group(store=store, rank=0, world_size=1)
        dist.barrier()
        dist.destroy_process_group()
    store.set("still", "open")


def test_files(tmp_path):
    for _ in range(2):
        dist.init_process_group(
            init_method=f"file://{tmp_path}/a%20file?world_size=1", rank=0, timeout=60
        )
        dist.barrier()
        dist.destroy_process_group()
    assert (tmp_path / "a file").exists()


def test_fake(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    dist.init_process_group("fake")
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (3, 4, "fake")
    assert dist.get_backend(dist.new_group([2, 3])) == "fake"
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=2, world_size=1024)
    assert (dist.get_rank(), dist.get_world_size()) == (2, 1024)
    dist.destroy_process_group()


def test_options_time_out():
    dist.init_process_group(pg_options=devicemesh.GlooOptions(timeout=7))
    assert dist.group.WORLD.timeout == 7
    assert dist.new_group([0], pg_options=devicemesh.Options(timeout=8)).timeout == 8
    assert dist.new_group([0], timeout=9, pg_options=devicemesh.Options(timeout=8)).timeout == 9
    dist.destroy_process_group()


def test_a_mesh_initializes_too():
    assert not dist.is_initialized()
    mesh = dist.init_device_mesh("cpu", (1,))
    assert dist.is_initialized()
    assert dist.get_world_size() == 1
    assert dist.get_process_group_ranks(mesh.get_group()) == [0]
    dist.destroy_process_group()
    assert mesh.get_group().closed


def test_worlds_do_not_mix(one):
    with devicemesh.simulate(world_size=4, rank=1):
        assert dist.get_world_size() == 4
        assert dist.group.WORLD is not one
    assert dist.group.WORLD is one


# --- groups ---------------------------------------------------------------------------


def test_groups(eight):
    group = dist.new_group([7, 5, 1], group_desc="odd")
    assert dist.get_process_group_ranks(group) == [1, 5, 7]
    assert (dist.get_rank(group), dist.get_world_size(group)) == (1, 3)
    assert (dist.get_group_rank(group, 7), dist.get_global_rank(group, 2)) == (2, 7)
    assert group.dim_name == "odd"
    unsorted = dist.new_group([7, 5, 1], sort_ranks=False, timeout=timedelta(seconds=3))
    assert dist.get_process_group_ranks(unsorted) == [7, 5, 1]
    assert unsorted.timeout == 3
    assert dist.get_process_group_ranks(dist.new_group()) == list(range(8))
    assert dist.get_pg_count() == 4
    dist.destroy_process_group(group)
    assert group.closed
    assert dist.get_pg_count() == 3
    with pytest.raises(ValueError, match="destroyed already"):
        dist.destroy_process_group(group)


def test_groups_live_until_they_are_destroyed(eight):
    dist.new_group([4, 5])
    assert dist.get_pg_count() == 2


def test_outside(eight):
    outside = dist.new_group([0, 1])
    assert outside == OUTSIDE == -100
    assert dist.new_group([0, 1], use_local_synchronization=True) is None
    assert dist.get_rank(outside) == dist.get_world_size(outside) == -1
    dist.destroy_process_group(outside)
    for call in (dist.get_backend, dist.get_backend_config, dist.get_process_group_ranks):
        with pytest.raises(ValueError, match="this rank is not in the group"):
            call(outside)


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("all_reduce", 1, None),
        ("broadcast", 1, None),
        ("all_gather_into_tensor", 2, None),
        ("all_gather_single", 2, None),
        ("reduce_scatter_tensor", 2, None),
        ("reduce_scatter_single", 2, None),
        ("barrier", 0, None),
        ("monitored_barrier", 0, None),
        ("all_reduce_coalesced", 1, None),
        ("all_gather_coalesced", 2, None),
        ("all_gather_object", 2, None),
        ("broadcast_object_list", 1, None),
        ("gather_object", 1, None),
        ("scatter_object_list", 1, None),
        ("send_object_list", 1, None),
        ("recv_object_list", 1, -1),
        ("reduce", 1, None),
        ("all_gather", 2, None),
        ("gather", 1, None),
        ("scatter", 1, None),
        ("reduce_scatter", 2, None),
        ("all_to_all", 2, None),
        ("all_to_all_single", 2, None),
        ("send", 1, None),
        ("isend", 1, None),
        ("irecv", 1, None),
        ("recv", 1, -1),
    ],
)
def test_operations_outside(eight, name, arguments, result):
    with pytest.warns(UserWarning, match=f"{name} does nothing on rank 5") as caught:
        got = getattr(dist, name)(*[np.ones(1)] * arguments, group=OUTSIDE)
    assert got == result
    assert caught[0].filename == __file__


def test_subgroups(eight):
    mine, groups = dist.new_subgroups(4)
    assert dist.get_process_group_ranks(mine) == [4, 5, 6, 7]
    assert groups == [OUTSIDE, mine]
    inner, _ = dist.new_subgroups(2, group=mine)
    assert dist.get_process_group_ranks(inner) == [4, 5]
    mine, groups = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    assert mine is None
    assert groups == [OUTSIDE, OUTSIDE]


def test_split(eight):
    parent = dist.new_group([1, 3, 5, 7])
    part = dist.split_group(parent, [[3, 2], [0, 1]], group_desc="half")
    assert dist.get_process_group_ranks(part) == [5, 7]
    assert dist.split_group(parent, [[0, 1]]) is None

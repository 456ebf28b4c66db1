"""Meshes on real processes: agreement, groups that meet, rank order, the life of a mesh."""

import contextlib
import pickle

import numpy as np
import pytest

import devicemesh
from devicemesh import (
    ClosedError,
    DeviceMesh,
    GroupTimeoutError,
    MismatchError,
    PeerError,
    World,
    init_device_mesh,
)


def sum_of_ranks(group, rank):
    """What an all_reduce of everybody's rank gives: who really is in the group."""
    data = np.array([rank, 1], dtype=np.int64)
    group.all_reduce(data)
    return data.tolist()


@pytest.mark.ranks(4, 8)
def test_groups_of_a_mesh_meet(rank, world_size):
    mesh = init_device_mesh("cpu", {"dp": 2, "tp": -1})
    for name in ("dp", "tp"):
        line = mesh[name].mesh.tolist()
        assert sum_of_ranks(mesh.get_group(name), rank) == [sum(line), len(line)]
    everybody = mesh.flatten().get_group()
    assert sum_of_ranks(everybody, rank) == [sum(range(world_size)), world_size]


@pytest.mark.ranks(4)
def test_views_meet_too(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "one", "tp"))
    flat = mesh["pp", "tp"].flatten()
    assert sum_of_ranks(flat.get_group(), rank) == [6, 4]
    split = flat.unflatten(0, (2, 2), ("a", "b"))
    assert sum_of_ranks(split.get_group("b"), rank) == [rank // 2 * 4 + 1, 2]
    assert sum_of_ranks(mesh.get_group("one"), rank) == [rank, 1]
    assert mesh.get_group("one").transport == "none"


@pytest.mark.ranks(4)
def test_rank_order_is_the_mesh_s(rank, world_size):
    order = [3, 1, 0, 2]
    mesh = DeviceMesh("cpu", order)
    group = mesh.get_group()
    gathered = np.zeros(4, dtype=np.int64)
    group.all_gather_into_tensor(gathered, np.array([rank]))
    assert gathered.tolist() == order
    assert mesh.get_coordinate() == (order.index(rank),)


@pytest.mark.ranks(4)
def test_meshes_of_some_ranks(rank, world_size):
    """Each half makes its own meshes, one half more than the other: no clash."""
    mine = [0, 3] if rank in (0, 3) else [1, 2]
    for _ in range(1 if rank in (0, 3) else 3):
        mesh = DeviceMesh("cpu", mine)
        assert sum_of_ranks(mesh.get_group(), rank) == [3, 2]
    whole = DeviceMesh("cpu", range(4))
    assert sum_of_ranks(whole.get_group(), rank) == [6, 4]


@pytest.mark.ranks(4)
def test_two_equal_meshes_do_not_mix(rank, world_size):
    one, two = (init_device_mesh("cpu", (4,)) for _ in range(2))
    assert one == two
    groups = [one.get_group(), two.get_group()]
    works = []
    data = [np.array([1]), np.array([100])]
    for i in (0, 1) if rank % 2 else (1, 0):
        works.append(groups[i].all_reduce(data[i], async_op=True))
    for work in works:
        work.wait()
    assert [array.tolist() for array in data] == [[4], [400]]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("common", "other", "difference"),
    [
        (((2, 2),), ((4, 1),), r"\(4, 1\)"),
        (((2, 2),), ((4,),), r"\(4,\)"),
        (((2, 2), ("a", "b")), ((2, 2), ("b", "a")), r"'b', 'a'"),
        (((2, 2), ("a", "b")), ((2, 2),), r"cpu mesh \(2, 2\)"),
    ],
)
def test_meshes_that_differ(rank, world_size, common, other, difference):
    """Who disagrees hears it at once; who had agreed hears it when a group meets."""
    shape, *names = other if rank == 2 else common

    def make_and_use():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names[0] if names else None)
        for group in mesh.get_all_groups():
            group.barrier()

    with pytest.raises(MismatchError, match=difference) as error:
        make_and_use()
    assert "cpu mesh (2, 2)" in str(error.value)


@pytest.mark.ranks(4)
def test_other_rank_order_is_a_mismatch(rank, world_size):
    order = [0, 1, 2, 3] if rank != 3 else [3, 2, 1, 0]
    with pytest.raises(MismatchError, match=r"over ranks \[3, 2, 1, 0\]"):
        DeviceMesh("cpu", order).get_group().barrier()


@pytest.mark.ranks(2)
def test_other_backend_is_a_mismatch(rank, world_size):
    """The rank whose group has to meet always hears it; one with a fake group may have come
    first and asks nobody."""
    override = {0: "fake"} if rank == 1 else None
    heard = pytest.raises(MismatchError, match=r"backends \['fake'\]")
    with heard if rank == 0 else contextlib.suppress(MismatchError):
        init_device_mesh("cpu", (2,), backend_override=override).get_group().barrier()


@pytest.mark.ranks(2)
def test_other_timeout_is_a_mismatch(rank, world_size):
    timeout = {0: 5} if rank == 1 else None
    with pytest.raises(
        MismatchError, match=r"rank 1 for cpu mesh \(2,\), time-outs in seconds \[5"
    ):
        init_device_mesh("cpu", (2,), timeout=timeout).get_group().barrier()


@pytest.mark.ranks(4)
def test_meshes_of_different_sizes(rank, world_size):
    """They have different members, so nobody disagrees: only waiting can show it. Whoever
    waits, and who is in no mesh that was asked for, sees both shapes."""
    shape = (4,) if rank < 2 else (2,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a",))
    store = devicemesh.default_world().store
    store.set(f"asked/{rank}", "")
    store.wait([f"asked/{other}" for other in range(4)])
    if rank >= 2:
        with pytest.raises(RuntimeError) as error:
            mesh.get_group("a")
        text = str(error.value)
        assert f"rank {rank} is not in the mesh DeviceMesh((a=2), 'cpu', stride=(1,))" in text
        assert "ranks 0, 1 last asked for cpu mesh (4,) with names ('a',)" in text
        assert "this rank asked for cpu mesh (2,) with names ('a',)" in text
    else:
        group = mesh.get_group("a")
        group.timeout = 1 if rank == 0 else 600  # rank 1 hears that rank 0 has left
        with pytest.raises(GroupTimeoutError if rank == 0 else PeerError) as error:
            group.all_reduce(np.zeros(1))
        text = str(error.value)
        assert "ranks 2, 3 last asked for cpu mesh (2,) with names ('a',)" in text
        assert "this rank last asked for cpu mesh (4,) with names ('a',)" in text


@pytest.mark.ranks(3)
def test_a_rank_outside_hears_of_members_that_come_later(rank, world_size):
    store = devicemesh.default_world().store
    if rank == 2:
        mesh = DeviceMesh("cpu", [0, 1])
        store.set("made", "")
        with pytest.raises(RuntimeError, match=r"; rank 0 last asked for cpu mesh \(3,\)"):
            mesh.get_group()
        store.set("heard", "")
    elif rank == 0:
        store.wait(["made"])
        init_device_mesh("cpu", (3,))
    store.wait(["heard"])


@pytest.mark.ranks(4)
def test_outside_a_mesh_that_the_members_did_ask_for(rank, world_size):
    """No word of others, and no wait for members that make their mesh elsewhere."""
    halves = [DeviceMesh("cpu", half) for half in ([0, 1], [2, 3])]
    mine, other = halves if rank < 2 else halves[::-1]
    assert sum_of_ranks(mine.get_group(), rank) == [sum(mine.mesh.tolist()), 2]
    assert other.get_coordinate() is None
    whole = init_device_mesh("cpu", (4,))
    if rank < 3:
        half = DeviceMesh("cpu", [0, 1, 2])
        assert sum_of_ranks(half.get_group(), rank) == [3, 3]
    assert sum_of_ranks(whole.get_group(), rank) == [6, 4]
    last = DeviceMesh("cpu", [0, 1])
    whole.get_group().barrier()
    if rank >= 2:
        with pytest.raises(RuntimeError) as error:
            last.get_group()
        assert str(error.value).endswith("it has no coordinate and no groups there")


@pytest.mark.ranks(4)
def test_close_leaves_other_roots_alone(rank, world_size):
    one = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for mesh in (one, two):
        sum_of_ranks(mesh.get_group("a"), rank)
    group = one.get_group("a")
    two.get_group("b").barrier()
    one.get_group("b").barrier()
    one.close()
    with pytest.raises(ClosedError):
        group.barrier()
    assert sum_of_ranks(two.get_group("a"), rank) == [sum(two["a"].mesh), 2]
    three = init_device_mesh("cpu", (4,))
    assert sum_of_ranks(three.get_group(), rank) == [6, 4]


@pytest.mark.ranks(2)
def test_init_close_init(rank, world_size):
    for _ in range(3):
        mesh = init_device_mesh("cpu", (2,))
        assert sum_of_ranks(mesh.get_group(), rank) == [1, 2]
        devicemesh.close_world()
        with pytest.raises(ClosedError):
            mesh.get_group().barrier()


@pytest.mark.ranks(4)
def test_one_rank_pickles(rank, world_size):
    """A mesh that went through a pickle on one rank still speaks to the others' mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    if rank == 1:
        mesh = pickle.loads(pickle.dumps(mesh))
    assert sum_of_ranks(mesh.get_group("a"), rank) == [sum(mesh["a"].mesh), 2]


@pytest.mark.ranks(4)
def test_all_ranks_load_a_pickle_of_another_process(rank, world_size):
    with devicemesh.simulate(world_size=4, rank=0):
        data = pickle.dumps(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    devicemesh.default_world()
    mesh = pickle.loads(data)
    assert mesh.get_rank() == rank
    assert sum_of_ranks(mesh.get_group("b"), rank) == [sum(mesh["b"].mesh), 2]


@pytest.mark.ranks(4)
def test_from_group(rank, world_size):
    world = devicemesh.default_world()
    whole = world.new_group(range(4))
    mesh = DeviceMesh.from_group(whole, "cpu", mesh_dim_names=("all",))
    assert sum_of_ranks(mesh.get_group(), rank) == [6, 4]
    split = mesh.unflatten("all", (2, 2), ("a", "b"))
    for name in ("a", "b"):
        assert sum_of_ranks(split.get_group(name), rank) == [sum(split[name].mesh), 2]


@pytest.mark.ranks(8)
@pytest.mark.parametrize(
    "ranks",
    [
        np.arange(8).reshape(2, 4),
        np.arange(8).reshape(2, 2, 2),
        np.array([[6, 1, 0, 3], [2, 7, 5, 4]]),  # no arithmetic continues these
        np.array([[[3], [1]], [[5], [7]], [[0], [2]], [[4], [6]]]),
        np.arange(8).reshape(4, 2).T,
    ],
    ids=lambda ranks: str(ranks.shape),
)
def test_from_groups_alone(rank, world_size, ranks):
    """Each member knows its lines; together they know the mesh."""
    names = ("a", "b", "c")[: ranks.ndim]
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    made = DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh_dim_names=names)
    assert made.mesh.tolist() == ranks.tolist()
    assert made == mesh
    assert made.get_all_groups() == mesh.get_all_groups()
    assert sum_of_ranks(made.flatten("all").get_group(), rank) == [28, 8]


@pytest.mark.ranks(4)
def test_from_groups_of_some_ranks(rank, world_size):
    if rank in (1, 3):
        group = devicemesh.default_world().new_group([3, 1])
        alone = devicemesh.default_world().new_group([rank])
        made = DeviceMesh.from_group([alone, group], "cpu", mesh_dim_names=("a", "b"))
        assert made.mesh.tolist() == [[3, 1]]


@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize("odd", [{1}, {0, 3}, {0, 2}])
def test_from_groups_in_another_order(rank, world_size, odd):
    """Nobody hangs: all hear of it, also those whose own groups are right."""
    shape = (2, 2, world_size // 4)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c"))
    order = ("b", "a", "c") if rank in odd else ("a", "b", "c")
    groups = [mesh.get_group(name) for name in order]
    with pytest.raises(MismatchError, match=r"in different orders|no lines of one mesh"):
        DeviceMesh.from_group(groups, "cpu", mesh_dim_names=order)
    made = DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh_dim_names=("a", "b", "c"))
    assert made == mesh  # the groups are as good as before


@pytest.mark.ranks(8)
def test_from_groups_that_span_no_mesh(rank, world_size):
    """A ladder with a twist: each square closes for nobody."""
    world = devicemesh.default_world()
    pairs = [(r, r + 1) for r in range(0, 8, 2)]
    rails = [(0, 2), (1, 4), (3, 6), (5, 7)]
    mine = [world.new_group(pair) for pairs_ in (rails, pairs) for pair in pairs_ if rank in pair]
    with pytest.raises(MismatchError, match=r"no lines of one mesh|do not close to one mesh"):
        DeviceMesh.from_group(mine, "cpu", mesh_dim_names=("a", "b"))


@pytest.mark.ranks(3, 4)
def test_from_groups_of_different_sizes(rank, world_size):
    """Three ranks in an L: the corner has two lines, the ends have one each."""
    if rank == 3:
        return
    world = devicemesh.default_world()
    alone = world.new_group([rank])
    row = world.new_group([0, 1]) if rank in (0, 1) else alone
    column = world.new_group([0, 2]) if rank in (0, 2) else alone
    sizes = r"different sizes: \(\d, \d\) on rank \d, \(\d, \d\) on rank \d"
    with pytest.raises(MismatchError, match=sizes + "|span 4 ranks, more than the world has"):
        DeviceMesh.from_group([column, row], "cpu", mesh_dim_names=("a", "b"))


@pytest.mark.ranks(4)
def test_explicit_store(rank, world_size):
    """Worlds of their own over the same store do not clash, nor with the default one."""
    store = devicemesh.default_world().store
    for _ in range(2):
        mesh = init_device_mesh("cpu", (4,), store=store, rank=rank, world_size=4)
        assert sum_of_ranks(mesh.get_group(), rank) == [6, 4]
    assert sum_of_ranks(init_device_mesh("cpu", (4,)).get_group(), rank) == [6, 4]
    world = World(devicemesh._core.PrefixStore("mine", store), rank, 4)
    half = init_device_mesh("cpu", (2, 2), world=world)
    assert sum_of_ranks(half.get_group(1), rank) == [rank // 2 * 4 + 1, 2]


@pytest.mark.ranks(4)
def test_broadcast_along_each_dim(rank, world_size):
    mesh = DeviceMesh("cpu", np.arange(4).reshape(2, 2))
    for dim, group in enumerate(mesh.get_all_groups()):
        data = np.full(3, rank)
        group.broadcast(data, root=0)
        assert data.tolist() == [np.take(mesh.mesh, 0, dim)[mesh.get_coordinate()[1 - dim]]] * 3


@pytest.mark.ranks(3)
def test_bigger_than_the_world(rank, world_size):
    with pytest.raises(
        RuntimeError,
        match="Mesh should not be bigger than default world size 3, but found 4 ranks!",
    ):
        init_device_mesh("cpu", (2, 2))
    mesh = DeviceMesh("cpu", [2, 0])
    if rank == 1:
        assert mesh.get_coordinate() is None
        with pytest.raises(RuntimeError, match="rank 1 is not in the mesh"):
            mesh.get_group()
    else:
        assert sum_of_ranks(mesh.get_group(), rank) == [2, 2]
    with contextlib.closing(init_device_mesh("cpu", (3,))) as whole:
        assert sum_of_ranks(whole.get_group(), rank) == [3, 3]

"""Groups of a mesh: which ranks they have, when they are shared, when they end."""

import pickle
import threading

import pytest

import devicemesh
from devicemesh import ClosedError, DeviceMesh, ProcessGroup, init_device_mesh

NAMES = ("dp", "tp")


@pytest.fixture
def world():
    """Rank 5 of a simulated world of 8."""
    with devicemesh.simulate(world_size=8, rank=5) as world:
        yield world


@pytest.fixture
def mesh(world):
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES)


# --- refused ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["get_group", "get_local_rank", "size"])
def test_bad_dim(mesh, method):
    ask = getattr(mesh, method)
    with pytest.raises(KeyError, match=r"Mesh dimension 'pp' does not exist.*\('dp', 'tp'\)"):
        ask("pp")
    with pytest.raises(IndexError, match="mesh_dim 2 is out of range for a mesh of 2 dims"):
        ask(2)
    with pytest.raises(IndexError, match="mesh_dim -3 is out of range"):
        ask(-3)
    with pytest.raises(IndexError):
        ask(2**80)
    with pytest.raises(TypeError, match=r"one dim's name or index, got \('dp', 'tp'\).*flatten"):
        ask(("dp", "tp"))
    with pytest.raises(TypeError, match=r"a dim's name or index, got 1\.5"):
        ask(1.5)
    with pytest.raises(TypeError, match=rf"{method}\(\) takes at most 1 argument \(2 given\)"):
        ask(0, 1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dim'"):
        ask(dim=0)
    unnamed = init_device_mesh("cpu", (2, 4))
    with pytest.raises(KeyError, match="No `mesh_dim_names` found"):
        getattr(unnamed, method)("dp")


def test_group_without_dim(mesh):
    with pytest.raises(RuntimeError, match=r"`mesh_dim` needs to be specified.*get_all_groups"):
        mesh.get_group()
    with pytest.raises(
        RuntimeError, match=r"`mesh_dim` needs to be specified when device_mesh.ndi"
    ):
        mesh.get_local_rank(None)
    assert mesh["dp"].get_group() is mesh["dp"].get_group(None)


def test_rank_outside(world):
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=NAMES)
    assert mesh.get_coordinate() is None
    assert mesh["dp"].get_coordinate() is None
    assert not mesh._is_current_rank_part_of_mesh()
    assert mesh.get_rank() == 5
    assert mesh._dim_group_names == []
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert mesh.size("dp") == 2
    text = r"rank 5 is not in the mesh DeviceMesh\(\(dp=2"
    for ask in (
        lambda: mesh.get_group("dp"),
        lambda: mesh["dp"].get_group(),
        lambda: mesh.get_all_groups(),
        lambda: mesh.get_local_rank("dp"),
        lambda: mesh._sym_get_coordinate(0),
    ):
        with pytest.raises(RuntimeError, match=text):
            ask()
    with pytest.raises(RuntimeError, match="needs to contain the local rank: rank 5 is in no sli"):
        mesh["dp"].mesh  # noqa: B018


# --- groups -------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(8))
def test_ranks_of_groups(rank):
    with devicemesh.simulate(world_size=8, rank=rank):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES)
        dp, tp = mesh.get_all_groups()
        assert list(dp.ranks) == [rank % 4, rank % 4 + 4]
        assert list(tp.ranks) == list(range(rank // 4 * 4, rank // 4 * 4 + 4))
        assert dp.rank() == mesh.get_local_rank("dp") == mesh.get_coordinate()[0]
        assert tp.rank() == mesh.get_local_rank("tp") == mesh.get_coordinate()[1]
        assert (dp.size(), tp.size()) == mesh.shape


@pytest.mark.parametrize("rank", range(4))
def test_rank_order_is_the_mesh_s(rank):
    with devicemesh.simulate(world_size=4, rank=rank):
        mesh = DeviceMesh("cpu", [3, 1, 0, 2])
        assert list(mesh.get_group().ranks) == [3, 1, 0, 2]
        assert mesh.get_coordinate() == (mesh.get_group().rank(),)
        square = DeviceMesh("cpu", [[3, 1], [0, 2]])
        groups = square.get_all_groups()
        assert square.get_coordinate() == tuple(group.rank() for group in groups)
        assert list(groups[0].ranks) == {3: [3, 0], 0: [3, 0], 1: [1, 2], 2: [1, 2]}[rank]


def test_group_is_one_object(mesh):
    group = mesh.get_group("dp")
    assert isinstance(group, ProcessGroup)
    assert mesh.get_group("dp") is group
    assert mesh.get_group(0) is group
    assert mesh.get_group(-2) is group
    assert mesh.get_group(mesh_dim="dp") is group
    assert mesh["dp"].get_group() is group
    assert mesh.get_all_groups() == [group, mesh.get_group("tp")]
    assert mesh._dim_group_names == [group.name, mesh.get_group(1).name]


def test_groups_know_their_dim(mesh, world):
    assert mesh.get_group("dp").dim_name == "dp"
    assert init_device_mesh("cpu", (2, 4)).get_group(1).dim_name == "dim_1"


def test_roots_are_isolated(world):
    one = init_device_mesh("cpu", (8,))
    two = init_device_mesh("cpu", (8,))
    assert one == two
    assert one.get_group() is not two.get_group()
    assert one.get_group().name != two.get_group().name


def test_reuse_groups(world):
    def make(**more):
        return init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES, reuse_groups=True, **more)

    one, two = make(), make()
    assert one is not two
    assert one.get_group("dp") is two.get_group("dp")
    assert make(timeout=3).get_group("dp") is not one.get_group("dp")
    plain = init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES)
    assert plain.get_group("dp") is not one.get_group("dp")
    with devicemesh.simulate(world_size=8, rank=5):
        assert make().get_group("dp") is not one.get_group("dp")


def test_reused_groups_live_until_the_last_close(world):
    one, two = (init_device_mesh("cpu", (8,), reuse_groups=True) for _ in range(2))
    group = one.get_group()
    one.close()
    with pytest.raises(ClosedError):
        one.get_group()
    assert two.get_group() is group
    assert not group.closed
    two.close()
    assert group.closed
    three = init_device_mesh("cpu", (8,), reuse_groups=True)
    assert three.get_group() is not group
    assert not three.get_group().closed


def test_reused_groups_wait_for_the_next_mesh(world):
    name = init_device_mesh("cpu", (8,), reuse_groups=True).get_group().name
    again = init_device_mesh("cpu", (8,), reuse_groups=True)
    assert again.get_group().name == name
    again.close()


def test_threads_get_the_same_group(mesh):
    found = []
    start = threading.Barrier(4)

    def ask():
        start.wait()
        found.append(mesh.get_group("dp"))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(group) for group in found}) == 1


# --- closing ------------------------------------------------------------------------


def test_close(mesh, world):
    other = init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES)
    flat = mesh.flatten()
    split = mesh.unflatten("tp", (2, 2), ("a", "b"))
    mine = [*mesh.get_all_groups(), flat.get_group(), split.get_group("a")]
    others = other.get_all_groups()
    mesh.close()
    mesh.close()
    assert all(group.closed for group in mine)
    assert not any(group.closed for group in others)
    for ask in (lambda: mesh.get_group(0), flat.get_group, mesh["dp"].get_group):
        with pytest.raises(ClosedError, match=r"the mesh DeviceMesh\(.* was closed"):
            ask()
    assert mesh.size() == 8
    assert mesh["dp"].get_coordinate() == (1,)
    assert init_device_mesh("cpu", (8,)).get_group().size() == 8


def test_close_of_a_view_closes_the_root(mesh):
    group = mesh.get_group("tp")
    mesh["dp"].close()
    assert group.closed
    with pytest.raises(ClosedError):
        mesh.get_group("tp")


def test_abort(mesh):
    group = mesh.get_group("tp")
    mesh.abort()
    mesh.abort()
    mesh.close()
    assert group.closed
    with pytest.raises(ClosedError):
        mesh.get_group("tp")


def test_context_manager_closes_nothing(mesh):
    group = mesh.get_group("tp")
    with mesh:
        pass
    assert not group.closed
    assert mesh.get_group("tp") is group


def test_closed_world(mesh, world):
    group = mesh.get_group("tp")
    world.close()
    assert group.closed
    with pytest.raises(ClosedError):
        mesh.get_group("dp")
    with pytest.raises(ClosedError):
        init_device_mesh("cpu", (8,), world=world)


# --- from_group ---------------------------------------------------------------------


def test_bad_from_group(mesh):
    dp, tp = mesh.get_all_groups()
    with pytest.raises(TypeError, match="a ProcessGroup or a list of them, got 3"):
        DeviceMesh.from_group(3, "cpu")
    with pytest.raises(TypeError, match="group"):
        DeviceMesh.from_group([dp, 3], "cpu", mesh.mesh, mesh_dim_names=NAMES)
    with pytest.raises(ValueError, match="Expects at least one ProcessGroup to be passed"):
        DeviceMesh.from_group([], "cpu")
    with pytest.raises(ValueError, match="Must pass mesh_dim_names if passing multiple"):
        DeviceMesh.from_group([dp, tp], "cpu")
    with pytest.raises(ValueError, match="Must pass mesh_dim_names if passing multiple"):
        DeviceMesh.from_group([dp, tp], "cpu", mesh.mesh)
    with pytest.raises(ValueError, match=r"Invalid mesh \[\[1\], \[5\]\] for ProcessGroup with ra"):
        DeviceMesh.from_group(dp, "cpu", [[1], [5]])
    with pytest.raises(ValueError, match=r"Invalid mesh \[5, 1\] for ProcessGroup with ranks \[1"):
        DeviceMesh.from_group(dp, "cpu", [5, 1])
    with pytest.raises(ValueError, match="ndim equal to number of ProcessGroups but got mesh"):
        DeviceMesh.from_group([dp, tp], "cpu", range(8), mesh_dim_names=NAMES)
    with pytest.raises(RuntimeError, match="same length"):
        DeviceMesh.from_group(dp, "cpu", mesh_dim_names=NAMES)
    with pytest.raises(RuntimeError, match="Device type with index"):
        DeviceMesh.from_group(dp, "cpu:0")


def test_groups_span_a_mesh(mesh, world):
    """Nobody answers in a simulated world, so regular lines are continued."""
    made = DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh_dim_names=NAMES)
    assert made == mesh
    assert made.get_group("tp") is mesh.get_group("tp")
    view = mesh.permute("tp", "dp")
    swapped = DeviceMesh.from_group(view.get_all_groups(), "cpu", mesh_dim_names=("tp", "dp"))
    assert swapped.mesh.tolist() == view.mesh.tolist()
    backwards = [world.new_group(ranks) for ranks in ([5, 1], [7, 6, 5, 4])]
    made = DeviceMesh.from_group(backwards, "cpu", mesh_dim_names=NAMES)
    assert made.mesh.tolist() == [[7, 6, 5, 4], [3, 2, 1, 0]]
    one = DeviceMesh.from_group([world.new_group([5])] * 2, "cpu", mesh_dim_names=NAMES)
    assert one.mesh.tolist() == [[5]]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (([1, 5], [1, 5]), "groups 0 and 1 cannot be dims of one mesh: both have ranks 5 and 1"),
        (([5, 6, 7], [5, 4, 6]), "both have ranks 5 and 6"),
        (([0, 1, 5], [4, 5]), r"group 0 \(ranks 0, 1, 5\) has no regular step, .*: pass mesh"),
        (([5, 7], [5, 6]), "give a rank 8, outside the world of 8: pass mesh"),
        (([3, 5], [5, 1]), "give a rank -1, outside"),
        (([5, 6, 7], [3, 4, 5]), "span 9 ranks, more than the world has"),
    ],
)
def test_groups_that_span_no_mesh(world, lines, text):
    groups = [world.new_group(line) for line in lines]
    with pytest.raises(ValueError, match=text):
        DeviceMesh.from_group(groups, "cpu", mesh_dim_names=NAMES)


def test_groups_in_the_wrong_order(mesh):
    dp, tp = mesh.get_all_groups()
    with pytest.raises(
        ValueError,
        match=r"group 0 has ranks \[4, 5, 6, 7\], but along dim 'dp' of the mesh rank 5 is with "
        r"ranks \[1, 5\]",
    ):
        DeviceMesh.from_group([tp, dp], "cpu", mesh.mesh, mesh_dim_names=NAMES)


def test_from_group(mesh):
    dp, tp = mesh.get_all_groups()
    made = DeviceMesh.from_group([dp, tp], "cpu", mesh.mesh, mesh_dim_names=NAMES)
    assert made == mesh
    assert made.get_all_groups() == [dp, tp]
    assert made["tp"].get_group() is tp
    assert made._dim_group_names == mesh._dim_group_names
    line = DeviceMesh.from_group(tp, "cpu")
    assert line.mesh.tolist() == [4, 5, 6, 7]
    assert line.mesh_dim_names is None
    assert line.get_group() is tp
    assert DeviceMesh.from_group(tp, "cpu", mesh=(4, 5, 6, 7)) == line
    assert DeviceMesh.from_group(tp, "cpu", mesh_dim_names=("tp",))["tp"].get_group() is tp


def test_from_group_makes_groups_it_lacks(mesh):
    dp, tp = mesh.get_all_groups()
    made = DeviceMesh.from_group([dp, tp], "cpu", mesh.mesh, mesh_dim_names=NAMES)
    flat = made.flatten()
    assert list(flat.get_group().ranks) == list(range(8))
    split = made.unflatten("tp", (4, 1), ("a", "b"))
    assert split.get_group("a") is tp
    flat_group = flat.get_group()
    made.close()
    assert flat_group.closed
    assert not dp.closed
    assert not tp.closed
    assert mesh.get_group("dp") is dp


def test_from_group_comes_back_from_a_pickle(mesh):
    dp, tp = mesh.get_all_groups()
    made = DeviceMesh.from_group([dp, tp], "cpu", mesh.mesh, mesh_dim_names=NAMES)
    again = pickle.loads(pickle.dumps(made))
    assert again.get_group("dp") is dp


# --- without groups -----------------------------------------------------------------


def test_without_backend():
    mesh = DeviceMesh("cpu", range(10), _init_backend=False, _rank=5, mesh_dim_names=("x",))
    assert mesh.get_coordinate() == (5,)
    assert mesh.get_rank() == 5
    assert mesh.get_local_rank() == 5
    assert not hasattr(mesh, "_dim_group_names")
    split = mesh.unflatten(0, (2, 5), ("a", "b"))
    for ask in (mesh.get_group, mesh.get_all_groups, split["a"].get_group):
        with pytest.raises(RuntimeError, match="process groups not initialized!"):
            ask()
    mesh.close()


def test_all_submeshes(mesh):
    lines = mesh._get_all_submeshes("dp")
    assert [line.mesh.tolist() for line in lines] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert lines[1].get_group() is mesh.get_group("dp")
    assert lines[0].get_coordinate() is None
    assert [line._get_root_mesh() is line for line in lines] == [True] * 4
    assert lines[0] == DeviceMesh("cpu", [0, 4], mesh_dim_names=("dp",))
    with pytest.raises(KeyError, match="Mesh dimension 'pp' does not exist"):
        mesh._get_all_submeshes("pp")
    with pytest.raises(TypeError, match="must be a str"):
        mesh._get_all_submeshes(0)


def test_all_submeshes_of_a_rank_outside(world):
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=NAMES)
    assert [line.mesh.tolist() for line in mesh._get_all_submeshes("tp")] == [[0, 1], [2, 3]]

"""select and permute: what they refuse, what they share, and what becomes of the result.

That the ranks are right is test_mesh_numpy.py's.
"""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest

import devicemesh
from devicemesh import ClosedError, DeviceMesh, init_device_mesh


@pytest.fixture
def world():
    """Rank 5 of a simulated world of 8."""
    with devicemesh.simulate(world_size=8, rank=5) as world:
        yield world


@pytest.fixture
def mesh(world):
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


@pytest.mark.parametrize(
    ("dims", "indices", "error", "text"),
    [
        (None, {"pp": 0}, KeyError, "'pp' does not exist"),
        ({2: 0}, {}, IndexError, "out of range"),
        ({1.5: 0}, {}, TypeError, "a dim's name or index"),
        ([0, 1], {}, TypeError, r"takes a dict of dims, or dims by name, got \[0, 1\]"),
        (None, {"dp": 2}, IndexError, "index out of range of dim 'dp' of size 2: 2"),
        (None, {"dp": -3}, IndexError, "index out of range of dim 'dp' of size 2: -3"),
        (None, {"tp": [0, 10**30]}, IndexError, "index out of range of dim 'tp'"),
        (None, {"tp": []}, ValueError, r"nothing is selected of dim 'tp' of size 4: \[\]"),
        (None, {"tp": slice(2, 2)}, ValueError, "nothing is selected of dim 'tp'"),
        (None, {"tp": [1, 1]}, ValueError, r"an index is there twice of dim 'tp'"),
        (None, {"tp": [3, -1]}, ValueError, "an index is there twice"),
        (None, {"tp": 1.0}, TypeError, "not an index, a slice or a list of indices of dim 'tp'"),
        (None, {"tp": "01"}, TypeError, "not an index, a slice or a list"),
        (None, {"tp": [0.5]}, TypeError, r"not a list of indices of dim 'tp' .*\[0.5\]"),
        (None, {"tp": [True, False]}, TypeError, "not a list of indices"),
        (None, {"tp": np.array([True, False])}, TypeError, "integer"),
        (None, {"tp": True}, TypeError, "not an index"),
        (None, {"tp": slice(0, 1.5)}, TypeError, "slice indices must be integers"),
        (None, {"tp": slice(0, 4, 0)}, ValueError, "slice step cannot be zero"),
        ({"tp": 0}, {"tp": 1}, TypeError, "several selections of dim 'tp'"),
        ({1: 0}, {"tp": 0}, TypeError, "several selections"),
        (None, {"dp": 0, "tp": 0}, ValueError, r"leaves no mesh: rank_at\(\) gives the rank"),
    ],
)
def test_bad_select(mesh, dims, indices, error, text):
    with pytest.raises(error, match=text):
        mesh.select(dims, **indices)


def test_flattened_dims_are_selected_elsewhere(mesh):
    mesh.flatten("all")
    with pytest.raises(KeyError, match="'all' is a flattened dim of the root"):
        mesh.select(all=0)
    assert mesh["all"].select(all=slice(2, 4)).ranks() == (2, 3)


@pytest.mark.parametrize(
    ("dims", "error", "text"),
    [
        ((), ValueError, r"each of the 2 dims .* once, got \(\)"),
        (("dp",), ValueError, "once, got"),
        (("dp", "dp"), ValueError, "once, got"),
        (("dp", 0), ValueError, "once, got"),
        (("tp", "pp"), KeyError, "'pp' does not exist"),
        ((0, 2), IndexError, "out of range"),
        ((0, None), TypeError, "a dim's name or index"),
    ],
)
def test_bad_permute(mesh, dims, error, text):
    for args in (dims, [dims]):
        with pytest.raises(error, match=text):
            mesh.permute(*args)


def test_permute_takes_no_flattened_dim(mesh):
    mesh.flatten("all")
    with pytest.raises(ValueError, match="once, got"):
        mesh.permute("all", "dp")


# --- selections ---------------------------------------------------------------------


def test_everything_is_the_mesh_itself(mesh):
    assert mesh.select() is mesh
    assert mesh.select(dp=slice(None), tp=[0, 1, 2, 3]) is mesh
    assert mesh.select({0: [0, 1]}) is mesh


def test_the_same_selection_is_the_same_object(mesh):
    assert mesh.select(tp=slice(0, 2)) is mesh.select(tp=[0, 1])
    assert mesh.select(tp=slice(0, 2)).select(dp=1) is mesh.select(dp=1).select(tp=[0, 1])
    assert mesh.select(tp=slice(0, 2)) is not mesh.select(tp=[1, 0])


def test_groups(mesh):
    """What has the same ranks is the same group; what has not is another one."""
    half = mesh.select(tp=slice(0, 2))
    assert half.get_group("dp") is mesh.get_group("dp")
    assert list(half.get_group("tp").ranks) == [4, 5]
    assert half.get_group("tp") is mesh.select(tp=slice(0, 2), dp=1).get_group()
    assert half.flatten().get_group() is half["dp", "tp"].flatten("other").get_group()
    assert list(half.get_group("dp_tp").ranks) == [0, 1, 4, 5]


def test_ranks_outside(mesh):
    other = mesh.select(dp=0)
    assert not other.is_member
    assert other.get_coordinate() is None
    with pytest.raises(RuntimeError, match=r"rank 5 is not in the mesh DeviceMesh\(\(tp=4\)"):
        other.get_group()
    assert other.mesh.tolist() == [0, 1, 2, 3]
    assert other.coordinate_of(2) == (2,)


def test_it_is_a_root(mesh):
    half = mesh.select(tp=slice(3, None, -2))
    assert half._get_root_mesh() is half
    assert half["tp"]._get_root_mesh() is half
    assert half["tp"].select(tp=slice(1)).ranks() == (7,)
    split = mesh.select(tp=slice(0, 2)).flatten().unflatten(0, (2, 2), ("x", "y"))
    assert split.get_group("y") is mesh.select(tp=[0, 1]).get_group("tp")
    assert half["dp"].ranks(rank=3) == (3, 7)


def test_a_selection_of_a_slice_is_of_this_rank_s(mesh):
    assert mesh["tp"].select(tp=[0, 1]).ranks() == (4, 5)
    with devicemesh.simulate(world_size=8, rank=7):
        outside = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    with pytest.raises(RuntimeError, match="rank 7 is in no slice"):
        outside["a"].select(a=[0])
    assert outside.select(a=0).ranks() == (0, 1)


def test_without_names(world):
    mesh = init_device_mesh("cpu", (2, 4))
    assert mesh.select({1: slice(0, 2)}).mesh.tolist() == [[0, 1], [4, 5]]
    assert mesh.select({-1: 1}).mesh.tolist() == [1, 5]
    assert mesh.permute(1, 0).shape == (4, 2)
    with pytest.raises(KeyError, match="No `mesh_dim_names` found"):
        mesh.select(tp=0)


def test_closing(mesh):
    """The groups are the root's, so closing either closes both."""
    half = mesh.select(tp=slice(0, 2))
    groups = [half.get_group("tp"), mesh.get_group("tp")]
    half.close()
    for each in (mesh, half, mesh.select(tp=0)):
        with pytest.raises(ClosedError, match="was closed"):
            each.get_group(0)
    assert all(group.closed for group in groups)
    assert half.ranks("dp") == (1, 5)


def test_of_adopted_groups(world):
    group = world.new_group([1, 5, 7])
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("a",))
    assert list(mesh.select(a=[0, 1]).get_group().ranks) == [1, 5]
    assert mesh.select(a=slice(None, None, -1)).ranks() == (7, 5, 1)


def test_pickles_share_groups(mesh):
    half = mesh.select(tp=[2, 1])
    flat = half.flatten("flat")
    for each in (half, half["tp"], flat):
        back = pickle.loads(pickle.dumps(each))
        assert back == each
        assert back.get_group(0) is each.get_group(0)
    assert pickle.loads(pickle.dumps(half))["flat"] == flat
    assert copy.deepcopy(half) is half


def test_pickle_of_another_process():
    with devicemesh.simulate(world_size=8, rank=5):
        data = pickle.dumps(init_device_mesh("cpu", (2, 4)).select({1: [0, 1]}))
    gc.collect()
    with devicemesh.simulate(world_size=8, rank=4):
        half = pickle.loads(data)
        assert half.get_coordinate() == (1, 0)
        assert list(half.get_group(1).ranks) == [4, 5]


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ((3,), (0, 1)),
        ((), (0, 1)),
        ((-2,), (0, 1)),
        ((2,), (0, 9)),
        ((1.0,), (0,)),
        ((1,) * 65, (0,)),
    ],
)
def test_malformed_pickle(mesh, sizes, ranks):
    spec = (None, "", None)
    with pytest.raises(ValueError, match="malformed pickle"):
        devicemesh._core._restore_selection(mesh, sizes, ranks, None, (spec,) * len(sizes), ())
    half = mesh.select(tp=[0, 1])
    with pytest.raises(ValueError, match="malformed pickle"):
        devicemesh._core._restore_selection(half, (1,), (0,), None, (spec,), ())


def test_subclasses(world):
    class Mesh(DeviceMesh):
        pass

    mesh = Mesh("cpu", [[0, 5], [1, 2]], mesh_dim_names=("a", "b"))
    assert type(mesh.select(a=0)) is type(mesh.permute(1, 0)) is Mesh


def test_selections_die_with_their_root(world):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    half = weakref.ref(mesh.select(tp=slice(0, 2)))
    half().get_group("tp")
    gc.collect()
    assert half() is not None
    del mesh
    gc.collect()
    assert half() is None


# --- permuted -----------------------------------------------------------------------


def test_permute_is_a_view(mesh):
    view = mesh.permute("tp", "dp")
    assert view._get_root_mesh() is mesh
    assert view is mesh.permute(["tp", "dp"]) is mesh.permute(-1, 0)
    assert view.permute("dp", "tp") is mesh
    assert mesh.permute("dp", "tp") is mesh
    assert view.size("tp") == view.size(0) == 4
    assert view != mesh
    assert view.select(tp=0).ranks() == (0, 4)


def test_slices_of_a_permuted_mesh(world):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    view = mesh.permute("c", "a", "b")
    assert view["c", "b"].ranks() == (4, 6, 5, 7)
    assert view["c"] is mesh["c"]
    assert view["b", "c"] is mesh["b", "c"]  # the order of the ranks will do as well
    with pytest.raises(KeyError, match="ascending order"):
        mesh["c", "b"]
    with pytest.raises(KeyError, match="ascending order"):
        view["b", "a"]

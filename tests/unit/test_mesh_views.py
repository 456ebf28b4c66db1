"""Slices, flattened and unflattened dims, concatenations: what they are and what they refuse."""

import gc
import weakref

import pytest

import devicemesh
from devicemesh import DeviceMesh, Options, init_device_mesh


@pytest.fixture
def world():
    """Rank 5 of a simulated world of 8."""
    with devicemesh.simulate(world_size=8, rank=5) as world:
        yield world


@pytest.fixture
def mesh(world):
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))


# --- slices -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "error", "text"),
    [
        (0, TypeError, r"sliced by dim names .* got 0; the names are \('dp', 'cp', 'tp'\)"),
        (-1, TypeError, "got -1.*also take an index"),
        (slice(0, 1), TypeError, "sliced by dim names"),
        (..., TypeError, "sliced by dim names"),
        (None, TypeError, "sliced by dim names"),
        (("dp", 0), TypeError, "sliced by dim names"),
        (("dp", slice(0, 2)), TypeError, "sliced by dim names"),
        (("dp", []), TypeError, "sliced by dim names"),
        ((), KeyError, r"Invalid mesh_dim_names \(\) specified"),
        ("pp", KeyError, r"Invalid mesh_dim_names \('pp',\) specified. Valid mesh_dim_names are"),
        (("dp", "pp"), KeyError, r"are \['dp', 'cp', 'tp'\]"),
        (("tp", "dp"), KeyError, "Mesh dim indices should be in ascending order"),
        (("dp", "dp"), RuntimeError, r"Slicing overlapping dim_names \('dp', 'dp'\)"),
        (("dp",) * 70, KeyError, "Invalid mesh_dim_names"),
    ],
)
def test_bad_slice(mesh, key, error, text):
    for _ in range(2):
        with pytest.raises(error, match=text):
            mesh[key]


def test_slice_without_names(world):
    mesh = init_device_mesh("cpu", (2, 4))
    for key in ("dp", 0, ("dp",)):
        with pytest.raises(RuntimeError, match="Cannot slice a DeviceMesh without mesh_dim_names!"):
            mesh[key]


def test_repeated_dim_of_size_one(world):
    mesh = init_device_mesh("cpu", (8, 1), mesh_dim_names=("dp", "one"))
    with pytest.raises(RuntimeError, match="overlapping"):
        mesh["one", "one"]


def test_a_mesh_is_not_iterable(mesh):
    with pytest.raises(TypeError):
        list(mesh)
    with pytest.raises(TypeError):
        len(mesh)


def test_slices_are_interned(mesh):
    assert mesh["dp"] is mesh["dp"]
    assert mesh["dp", "tp"] is mesh["dp", "tp"]
    assert mesh["dp", "tp"] is mesh[["dp", "tp"]]
    assert mesh["dp", "tp"]["tp"] is mesh["tp"]
    assert mesh[("dp",)] is mesh["dp"]
    assert mesh["dp"]["dp"] is mesh["dp"]
    assert mesh["dp", "cp", "tp"] is mesh
    assert mesh[["dp", "cp", "tp"]] is mesh


def test_one_dim_mesh_sliced_by_its_name(world):
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    assert mesh["dp"] is mesh
    assert mesh[("dp",)] is mesh


def test_names_made_at_run_time(mesh):
    name = "".join(["d", "p"])
    assert mesh[name] is mesh["dp"]
    assert mesh.size(name) == 2


def test_slices_of_two_roots_are_apart(world):
    one = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    two = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    assert one == two
    assert one["tp"] == two["tp"]
    assert one["tp"] is not two["tp"]
    assert one["tp"]._get_root_mesh() is one
    assert two["tp"]._get_root_mesh() is two
    assert one["tp"].get_group() is not two["tp"].get_group()
    assert one["tp"].get_group().name != two["tp"].get_group().name


@pytest.mark.parametrize("rank", range(8))
def test_slices_hold_my_line(rank):
    with devicemesh.simulate(world_size=8, rank=rank):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        dp, cp, tp = mesh.get_coordinate()
        full = mesh.mesh
        assert mesh["dp"].mesh.tolist() == full[:, cp, tp].tolist()
        assert mesh["cp"].mesh.tolist() == full[dp, :, tp].tolist()
        assert mesh["dp", "tp"].mesh.tolist() == full[:, cp, :].tolist()
        assert mesh["dp", "tp"]["tp"].mesh.tolist() == full[dp, cp, :].tolist()
        assert mesh["dp", "tp"].get_coordinate() == (dp, tp)
        assert mesh["cp"].get_local_rank() == cp


# --- flatten ------------------------------------------------------------------------


def test_bad_flatten(mesh, world):
    with pytest.raises(TypeError, match="mesh_dim_name must be a str, got 3"):
        mesh.flatten(3)
    with pytest.raises(ValueError, match="dp already exists for submesh of the DeviceMesh"):
        mesh.flatten("dp")
    with pytest.raises(ValueError, match="unknown backend 'foo'"):
        mesh.flatten(backend_override="foo")
    assert mesh._flatten_mapping == {}
    mesh["dp", "cp"].flatten("x")
    with pytest.raises(ValueError, match="mesh_dim_name x has been created before, Please"):
        mesh["cp", "tp"].flatten("x")
    with pytest.raises(ValueError, match="created before with another backend_override"):
        mesh["dp", "cp"].flatten("x", backend_override="fake")
    with pytest.raises(RuntimeError, match="Cannot flatten a DeviceMesh without mesh_dim_names!"):
        init_device_mesh("cpu", (8,)).flatten()


def test_flatten_is_remembered_by_the_root(mesh):
    flat = mesh["dp", "cp"].flatten()
    assert flat.mesh_dim_names == ("dp_cp",)
    assert flat.shape == (4,)
    assert mesh["dp", "cp"]._flatten() is flat
    assert mesh["dp_cp"] is flat
    assert mesh[("dp_cp",)] is flat
    assert mesh["dp_cp", "tp"].shape == (4, 2)
    assert mesh.get_group("dp_cp") is flat.get_group()
    assert mesh["tp"].get_group("dp_cp") is flat.get_group()
    assert mesh.size("dp_cp") == 4
    assert mesh.get_local_rank("dp_cp") == flat.get_local_rank() == 2
    assert mesh._flatten_mapping == {"dp_cp": flat}
    assert flat._flatten_mapping == {}
    assert flat._get_root_mesh() is mesh
    with pytest.raises(KeyError, match=r"Valid mesh_dim_names are \['dp', 'cp', 'tp', 'dp_cp'\]"):
        mesh["nothing"]


def test_flattened_dims_are_sliced_from_the_root_only(mesh):
    mesh["dp", "cp"].flatten()
    with pytest.raises(KeyError, match="Invalid mesh_dim_names"):
        mesh["dp", "tp"]["dp_cp"]


def test_flatten_non_adjacent(mesh):
    flat = mesh["dp", "tp"].flatten()
    assert repr(flat) == "DeviceMesh((dp_tp=4), 'cpu', stride=((4, 1),))"
    assert flat.mesh.tolist() == mesh["dp", "tp"].mesh.flatten().tolist()
    with pytest.raises(KeyError, match="Mesh dim indices should be in ascending order"):
        mesh["dp_tp", "cp"]
    with pytest.raises(RuntimeError, match="overlapping"):
        mesh["dp_tp", "tp"]


def test_overlapping_slice_with_a_flattened_dim(mesh):
    mesh["cp", "tp"].flatten()
    with pytest.raises(RuntimeError, match=r"overlapping dim_names \('cp', 'cp_tp'\)"):
        mesh["cp", "cp_tp"]


def test_flatten_one_dim_to_its_own_name(mesh):
    assert mesh["dp"].flatten() is mesh["dp"]
    assert mesh["dp"].flatten("dp") is mesh["dp"]
    assert mesh["dp"].flatten("") is mesh["dp"]
    renamed = mesh["dp"].flatten("data")
    assert renamed.mesh_dim_names == ("data",)
    assert renamed.get_group() is mesh.get_group("dp")  # the same ranks: one group


def test_flatten_flattened_dims(mesh):
    mesh["cp", "tp"].flatten("inner")
    everything = mesh["dp", "inner"].flatten("all")
    assert everything.shape == (8,)
    assert everything.mesh.tolist() == list(range(8))


def test_flatten_twice_makes_one_group(mesh):
    flat = mesh.flatten()
    name = flat.get_group().name
    assert mesh.flatten().get_group().name == name
    other = mesh.flatten("other")
    assert other is not flat
    assert other.get_group() is flat.get_group()


def test_flatten_backend_and_timeout(world):
    mesh = init_device_mesh(
        "cpu",
        (2, 2, 2),
        mesh_dim_names=("dp", "cp", "tp"),
        backend_override={"dp": "fake", "tp": "fake"},
        timeout={"dp": 10, "cp": 20},
    )
    # torch's rule: a flattened dim has the default backend unless told otherwise.
    assert mesh["dp", "tp"].flatten().get_group().backend == "gloo"
    assert mesh["dp", "cp"].flatten(backend_override="fake").get_group().backend == "fake"
    assert mesh["dp", "cp"].flatten().get_group().timeout == 20
    assert mesh["dp_tp"].get_group().timeout == 1800
    slow = mesh["cp", "tp"].flatten(backend_override=("fake", Options(timeout=3)))
    assert slow.get_group().timeout == 3
    assert slow.get_group().backend == "fake"
    same = mesh["cp", "tp"].flatten(backend_override=("fake", Options(timeout=3)))
    assert same is slow


# --- unflatten ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((2, (2,), ("x",)), ValueError, "dim 2 specified in `_unflatten` is out of range 2"),
        ((-3, (2,), ("x",)), ValueError, "dim -3 specified in `_unflatten` is out of range 2"),
        (("pp", (2,), ("x",)), ValueError, r"dim pp specified in `_unflatten` is not in \('dp'"),
        ((None, (2,), ("x",)), TypeError, "integer"),
        (("dp", (2, 2), ("x",)), RuntimeError, "must have same length as mesh_sizes"),
        (("dp", (2, 3), ("x", "y")), ValueError, r"product of mesh_sizes=\(2, 3\) is 6, but the"),
        (("dp", (4, 0), ("x", "y")), ValueError, "dim=0 has size 4"),
        (("dp", (-2, -2), ("x", "y")), ValueError, "dim=0 has size 4"),
        (("dp", (2**62, 2**62), ("x", "y")), ValueError, "dim=0 has size 4"),
        (("dp", (2.0, 2), ("x", "y")), TypeError, "float"),
        (("dp", (), ()), ValueError, "split into 1 to 63 dims, got 0"),
        (("dp", (2, 2), ("x", "x")), RuntimeError, "must be unique"),
        (("dp", (2, 2), ("x", "tp")), RuntimeError, "must be unique"),
        (("dp", (2, 2), "xy"), TypeError, r"did you mean \('xy',\)"),
        (("dp", (2, 2), ("x", 3)), TypeError, "must be str, got 3"),
        (("dp", (2, 2), ("x", "y"), {"tp": "fake"}), RuntimeError, "invalid keys in backend_ov"),
        (("dp", (2, 2), ("x", "y"), {"x": "foo"}), ValueError, "unknown backend 'foo'"),
    ],
)
def test_bad_unflatten(world, arguments, error, text):
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(error, match=text):
        mesh.unflatten(*arguments)


def test_unflatten_without_names(world):
    with pytest.raises(RuntimeError, match="Cannot unflatten a DeviceMesh without mesh_dim_names"):
        init_device_mesh("cpu", (8,)).unflatten(0, (2, 4), ("a", "b"))


def test_unflatten(world):
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    split = mesh.unflatten("world", (2, 2, 2), ("dp", "cp", "tp"))
    assert split.shape == (2, 2, 2)
    assert split.mesh_dim_names == ("dp", "cp", "tp")
    assert split.get_coordinate() == (1, 0, 1)
    assert split == mesh._unflatten(0, [2, 2, 2], ["dp", "cp", "tp"])
    assert split is mesh.unflatten(-1, (2, 2, 2), ("dp", "cp", "tp"))
    assert split._get_root_mesh() is mesh
    assert split["cp"].mesh.tolist() == [5, 7]
    # equal facts, another root: torch calls these equal too
    assert split == init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    with pytest.raises(KeyError):
        mesh["dp"]


def test_unflatten_shares_groups(world):
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    one = mesh.unflatten(0, (2, 4), ("dp", "tp"))
    two = mesh.unflatten(0, (2, 4), ("ep", "etp"))
    assert one.get_group("tp") is two.get_group("etp")
    assert one.get_group("dp") is two.get_group("ep")
    three = one.unflatten("tp", (2, 2), ("x", "y"))
    assert three.get_group("dp") is one.get_group("dp")
    assert three["dp"].get_group() is one.get_group("dp")


def test_unflatten_a_flattened_non_adjacent_dim(mesh):
    flat = mesh["dp", "tp"].flatten()
    back = flat.unflatten("dp_tp", (2, 2), ("dp", "tp"))
    assert back is mesh["dp", "tp"]
    assert flat.unflatten(0, (4, 1), ("a", "b")).shape == (4, 1)


def test_unflatten_backend_and_timeout(world):
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("world",), timeout=40)
    split = mesh.unflatten(
        0, (2, 2, 2), ("a", "b", "c"), backend_override={"a": "fake", "b": Options(timeout=5)}
    )
    assert [group.backend for group in split.get_all_groups()] == ["fake", "gloo", "gloo"]
    assert [group.timeout for group in split.get_all_groups()] == [40, 5, 40]
    other = mesh.unflatten(0, (2, 2, 2), ("a", "b", "c"), timeout={"c": 1})
    assert other is not split
    assert other == split
    assert [group.timeout for group in other.get_all_groups()] == [40, 40, 1]


# --- concatenate --------------------------------------------------------------------


def test_bad_concatenate(mesh, world):
    with pytest.raises(ValueError, match="at least one"):
        DeviceMesh.concatenate([])
    with pytest.raises(TypeError, match="takes DeviceMeshes, got 3"):
        DeviceMesh.concatenate([mesh, 3])
    with pytest.raises(TypeError):
        DeviceMesh.concatenate(3)
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    with pytest.raises(RuntimeError, match="Cannot concatenate DeviceMeshes derived from differ"):
        DeviceMesh.concatenate([mesh["dp"], other])
    with pytest.raises(RuntimeError, match="Cannot concatenate overlapping meshes"):
        DeviceMesh.concatenate([mesh["dp", "cp"], mesh["cp"]])
    with pytest.raises(RuntimeError, match="Cannot concatenate overlapping meshes"):
        DeviceMesh.concatenate([mesh["dp", "cp"].flatten(), mesh["cp"]])
    with pytest.raises(RuntimeError, match="without mesh_dim_names"):
        DeviceMesh.concatenate([init_device_mesh("cpu", (8,))])


def test_concatenate_repeated_name(world):
    mesh = init_device_mesh("cpu", (8, 1), mesh_dim_names=("dp", "one"))
    with pytest.raises(RuntimeError, match="must be unique"):
        DeviceMesh.concatenate([mesh["one"], mesh["one"]])


def test_concatenate(mesh):
    assert DeviceMesh.concatenate([mesh["dp"], mesh["cp", "tp"]]) is mesh
    assert DeviceMesh._concatenate((mesh["dp"], mesh["tp"])) is mesh["dp", "tp"]
    assert DeviceMesh.concatenate([mesh["dp"]]) is mesh["dp"]
    turned = DeviceMesh.concatenate([mesh["tp"], mesh["dp"]])
    assert turned.mesh.tolist() == mesh["dp", "tp"].mesh.T.tolist()
    assert turned.get_group("dp") is mesh.get_group("dp")
    assert turned.mesh_dim_names == ("tp", "dp")
    # dims of another view
    split = mesh.flatten().unflatten(0, (2, 4), ("a", "b"))
    both = DeviceMesh.concatenate([mesh["dp"], split["b"]])
    assert both.shape == (2, 4)
    assert both._get_root_mesh() is mesh


# --- roots and views ----------------------------------------------------------------


def test_views_keep_their_root_alive(world):
    view = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))["dp"]
    gc.collect()
    assert view._get_root_mesh()["dp"] is view
    assert view._get_root_mesh()["tp"].shape == (4,)


def test_a_dropped_mesh_is_collected_with_its_views(world):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    mesh.note = [mesh]
    gone = [weakref.ref(mesh), weakref.ref(mesh["dp"]), weakref.ref(mesh.flatten())]
    groups = [weakref.ref(group) for group in mesh.get_all_groups()]
    del mesh
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    assert [ref() for ref in groups] == [None] * 2


def test_a_mesh_without_views_goes_at_once(world):
    gc.disable()
    try:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        group = weakref.ref(mesh.get_group("dp"))
        gone = weakref.ref(mesh)
        del mesh
        assert gone() is None
        assert group() is None
    finally:
        gc.enable()


def test_views_have_the_class_of_their_root(world):
    class Mine(DeviceMesh):
        def hello(self):
            return self.size()

    mesh = Mine("cpu", [[0, 1], [5, 2]], mesh_dim_names=("dp", "tp"))
    assert type(mesh["tp"]) is Mine
    assert mesh["tp"].hello() == 2
    assert type(mesh.flatten()) is Mine
    assert type(Mine._from_shape("cpu", (8,))) is Mine


def test_attributes_of_a_mesh_stay(mesh):
    mesh["dp"].note = "mine"
    assert mesh["dp"].note == "mine"
    assert mesh["dp"].__dict__ == {"note": "mine"}
    for name in ("shape", "ndim", "mesh", "device_type", "mesh_dim_names"):
        with pytest.raises(AttributeError):
            setattr(mesh, name, None)

"""A counterpart for each mesh test of PyTorch's own test/distributed/test_device_mesh.py.

The tests there run under torch on several processes; these ask the same of our meshes, as
every rank of a simulated world in turn. What torch's test is called and where ours is:

DeviceMeshTestGlooBackend
  test_device_mesh_reuse_default_group           test_a_mesh_of_all_ranks_has_its_own_group
DeviceMeshSetDeviceTest                          (CUDA: which device a process takes)
DeviceMeshTest
  test_init_process_group                        test_first_mesh_makes_the_world
  test_2d_mesh_non_eager_init_subgroup           test_groups_are_lazy
  test_2d_mesh_eager_init_subgroup               test_groups_are_lazy
  test_get_group_and_get_all_groups              test_get_group_and_get_all_groups
  test_get_local_rank_raises_exception           test_local_rank_needs_a_dim
  test_get_local_rank                            test_local_rank
  test_device_mesh_2d                            test_groups_of_two_dims
  test_device_mesh_init_backend                  test_mesh_without_backend
  test_fake_pg_device_mesh                       test_collective_over_the_fake_backend
  test_fake_pg_device_mesh_cuda_on_cpu           test_cuda_mesh_without_cuda
  test_from_group_with_global_pg                 test_from_group_of_all_ranks
  test_from_group_with_invalid_mesh              test_from_group_with_a_wrong_mesh
  test_raises_invalid_device_type                test_device_type_with_index
  test_get_root_mesh_multiple_independent_meshes test_roots_of_independent_meshes
DeviceMeshTestNDim
  test_device_mesh_nd                            test_groups_of_three_dims
  test_device_mesh_hash                          test_hash
  test_get_local_rank_3d                         test_local_rank_of_three_dims
  test_device_mesh_parent_child_hash             test_a_slice_and_a_mesh_of_its_ranks
  test_from_group_with_mesh_shape_3d             test_from_group_of_a_slice
  test_from_group_with_mesh_shape_2d             test_from_group_of_groups_made_by_hand
InitDeviceMeshTest
  test_init_device_mesh                          test_init_device_mesh
  test_raises_duplicate_mesh_dim_names           test_repeated_names
  test_raises_mesh_shape_mesh_dim_names_mismatch test_names_and_shape_of_other_lengths
  test_backend_override_argument_dict_with_idx_and_backend_lazy
                                                 test_backend_override_by_index
  test_backend_override_argument_dict_with_idx_and_backend_eager
                                                 test_backend_override_by_index
  test_backend_override_argument_dict_with_name_and_options
                                                 test_backend_override_by_name
  test_backend_override_argument_errors          test_backend_override_errors
TestDeviceMeshGetItem
  test_raises_no_mesh_dim_found                  test_slice_without_names
  test_raises_invalid_mesh_dim_name              test_slice_with_an_unknown_name
  test_get_item_2d                               test_slices_of_two_dims
  test_get_item_1d                               test_slice_of_one_dim
  test_get_item_3d                               test_slices_of_three_dims
  test_cache_and_reuse_submesh_slice_result      test_slices_make_no_groups
  test_get_item_3d_noncontiguous_slicing         test_slice_of_dims_that_are_not_adjacent
  test_flatten_mesh_1d                           test_flatten_one_dim
  test_flatten_mesh_3d                           test_flatten_three_dims
  test_flatten_mesh_4d                           test_flatten_flattened_dims
  test_unflatten_mesh_2d                         test_unflatten_one_of_two_dims
  test_unflatten_mesh_3d                         test_unflatten_the_world
  test_concatenate_2d                            test_concatenate_two_dims
  test_concatenate_3d                            test_concatenate_of_three_dims
  test_reconstruct_mesh_with_flatten_dim         test_slice_with_a_flattened_dim
TestMeshEnv
  test_get_root_mesh                             test_root_of_every_slice
  test_get_root_mesh_dim_exist                   test_dim_in_the_root
  test_get_root_mesh_dim_not_exist               test_dim_in_the_root_without_names
  test_get_mesh_dim_by_name                      test_dim_by_name
  test_get_all_submeshes                         test_all_lines_of_a_dim
  test_mesh_slice_fake_tensor_mode               (FakeTensorMode: a mesh of ours has no tensor)
DeviceMeshCollectiveTest                         tests/multiproc (collectives on real processes)
CuTeLayoutTest                                   tests/unit/test_layout_peer.py
ProcessGroupOpaqueTypeTest                       (torch.compile's registry)
"""

import numpy as np
import pytest

import devicemesh
from devicemesh import DeviceMesh, Options, ProcessGroup, World, init_device_mesh
from devicemesh.device_mesh import _mesh_resources


def every_rank(size):
    """Runs the test as each rank of a simulated world of `size`."""

    def decorate(test):
        def run(rank):
            with devicemesh.simulate(world_size=size, rank=rank):
                test(rank)

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return pytest.mark.parametrize("rank", range(size))(run)

    return decorate


def my_line(array, rank, dim):
    """The ranks of the line along `dim` that holds `rank`."""
    lines = np.moveaxis(array, dim, -1).reshape(-1, array.shape[dim])
    return next(line.tolist() for line in lines if rank in line)


def dim_groups(mesh):
    return [list(group.ranks) for group in mesh.get_all_groups()]


# --- DeviceMeshTestGlooBackend, DeviceMeshTest ----------------------------------------


@every_rank(4)
def test_a_mesh_of_all_ranks_has_its_own_group(rank):
    """torch hands out WORLD itself, so that closing one closes all; ours is a group apart."""
    one, two = (init_device_mesh("cpu", (4,)) for _ in range(2))
    assert list(one.get_group().ranks) == [0, 1, 2, 3]
    assert one.get_group() is not two.get_group()


def test_first_mesh_makes_the_world(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    devicemesh.close_world()
    assert not devicemesh.is_initialized()
    mesh = DeviceMesh("cpu", [0])
    assert devicemesh.is_initialized()
    assert mesh.get_coordinate() == (0,)
    devicemesh.close_world()
    assert not devicemesh.is_initialized()


@every_rank(4)
def test_groups_are_lazy(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    for group in mesh.get_all_groups():
        assert group.transport == "none"  # nothing is connected before the first operation
        assert not group.closed


@every_rank(4)
def test_get_group_and_get_all_groups(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_all_groups()
    assert mesh.get_group(0) is mesh.get_group("dp") is mesh["dp"].get_group() is dp
    assert mesh.get_group(1) is mesh.get_group("tp") is mesh["tp"].get_group() is tp


@every_rank(4)
def test_local_rank_needs_a_dim(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(
        RuntimeError,
        match=r"Optional kwarg `mesh_dim` needs to be specified when device_mesh\.ndim > 1\.",
    ):
        mesh.get_local_rank()


@every_rank(4)
def test_local_rank(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh.get_local_rank("dp") == mesh.get_local_rank(0) == rank // 2
    assert mesh.get_local_rank("tp") == mesh.get_local_rank(1) == rank % 2
    assert mesh["dp"].get_local_rank() == rank // 2
    assert mesh["tp"].get_local_rank() == rank % 2
    assert mesh["dp", "tp"]._flatten().get_local_rank() == rank


@every_rank(4)
def test_groups_of_two_dims(rank):
    mesh = DeviceMesh("cpu", np.arange(4).reshape(2, 2))
    assert all(isinstance(group, ProcessGroup) for group in mesh.get_all_groups())
    assert [group.size() for group in mesh.get_all_groups()] == [2, 2]
    assert dim_groups(mesh) == [[rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]]


def test_mesh_without_backend():
    mesh = DeviceMesh("cpu", np.arange(10), _init_backend=False, _rank=5)
    with pytest.raises(RuntimeError, match="process groups not initialized!"):
        mesh.get_group()
    assert mesh.get_coordinate() == (5,)


@every_rank(4)
def test_collective_over_the_fake_backend(rank):
    mesh = DeviceMesh("cpu", np.arange(4))
    gathered = np.zeros((8, 8), dtype=np.float32)
    mesh.get_group(0).all_gather_into_tensor(gathered, np.ones((2, 8), dtype=np.float32))
    assert gathered.sum() == 16  # the fake backend fills the own place


def test_cuda_mesh_without_cuda():
    with devicemesh.simulate(world_size=1, rank=0):
        mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
        assert (mesh.ndim, mesh.size(), mesh.mesh_dim_names) == (1, 1, ("dp",))
        (group,) = mesh.get_all_groups()
        data = np.ones(3, dtype=np.float32)
        group.all_reduce(data)
        assert data.tolist() == [1, 1, 1]


@every_rank(4)
def test_from_group_of_all_ranks(rank):
    mesh = init_device_mesh("cpu", (4,))
    group = mesh.get_group()
    for made in (
        DeviceMesh.from_group(group, "cpu"),
        DeviceMesh.from_group(group, "cpu", mesh=np.arange(4)),
        DeviceMesh.from_group(group, "cpu", [0, 1, 2, 3]),
    ):
        assert made == mesh
        assert made._dim_group_names == mesh._dim_group_names
        assert made._coordinate_on_dim == mesh._coordinate_on_dim == (rank,)


@every_rank(4)
def test_from_group_with_a_wrong_mesh(rank):
    whole = init_device_mesh("cpu", (4,)).get_group()
    with pytest.raises(
        ValueError,
        match=r"Invalid mesh \[\[0, 1\], \[2, 3\]\] for ProcessGroup with ranks \[0, 1, 2, 3\]",
    ):
        DeviceMesh.from_group(whole, "cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    groups = init_device_mesh("cpu", (2, 2)).get_all_groups()
    with pytest.raises(
        ValueError,
        match=r"Expects mesh with ndim equal to number of ProcessGroups but got mesh "
        r"\[0, 1, 2, 3\] and 2 ProcessGroups",
    ):
        DeviceMesh.from_group(groups, "cpu", (0, 1, 2, 3), mesh_dim_names=("a", "b"))


def test_device_type_with_index():
    with pytest.raises(RuntimeError, match="Device type with index is not supported"):
        init_device_mesh("cpu:0", mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"))


@every_rank(4)
def test_roots_of_independent_meshes(rank):
    one = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    for mesh, other in ((one, two), (two, one)):
        for name in mesh.mesh_dim_names:
            assert _mesh_resources.get_root_mesh(mesh[name]) is mesh
            assert _mesh_resources.get_root_mesh(mesh[name]) != other


# --- DeviceMeshTestNDim ---------------------------------------------------------------


@every_rank(8)
def test_groups_of_three_dims(rank):
    array = np.arange(8).reshape(2, 2, 2)
    mesh = DeviceMesh("cpu", array)
    assert dim_groups(mesh) == [my_line(array, rank, dim) for dim in range(3)]


@every_rank(8)
def test_hash(rank):
    array = np.arange(8)
    one, two = (DeviceMesh("cpu", array.reshape(4, 2)) for _ in range(2))
    three = DeviceMesh("cpu", array.reshape(2, 2, 2))
    assert hash(one) == hash(two)
    assert hash(three) not in (hash(one), hash(two))


@every_rank(8)
def test_local_rank_of_three_dims(rank):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    assert mesh.get_local_rank("tp") == rank % 2
    assert mesh.get_local_rank("pp") == rank // 2 % 2
    assert mesh.get_local_rank("dp") == rank // 4


@every_rank(8)
def test_a_slice_and_a_mesh_of_its_ranks(rank):
    tp = init_device_mesh("cpu", (2, 4), mesh_dim_names=("DP", "TP"))["TP"]
    half = np.arange(4) if rank < 4 else np.arange(4, 8)
    ep, other = (DeviceMesh("cpu", half) for _ in range(2))
    assert tp.mesh.tolist() == ep.mesh.tolist()
    assert tp._layout == ep._layout
    assert tp.device_type == ep.device_type
    assert tp.mesh_dim_names != ep.mesh_dim_names
    assert tp._thread_id == ep._thread_id
    assert hash(tp) != hash(ep)
    assert tp != ep
    assert ep._flatten_rank_map == other._flatten_rank_map
    assert ep._layout == other._layout
    assert hash(ep) == hash(other)
    assert ep == other


@every_rank(8)
def test_from_group_of_a_slice(rank):
    names = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    made = DeviceMesh.from_group(
        [mesh["dp_replicate"].get_group(), mesh["dp_shard"].get_group()],
        "cpu",
        mesh=mesh.mesh[:, :, mesh.get_local_rank("tp")],
        mesh_dim_names=names[:2],
    )
    assert made._dim_group_names == mesh._dim_group_names[:2]
    for name in names[:2]:
        assert made[name].mesh.tolist() == mesh[name].mesh.tolist()
        assert made[name]._dim_group_names == mesh[name]._dim_group_names


@every_rank(8)
def test_from_group_of_groups_made_by_hand(rank):
    names = ("dp_replicate", "dp_shard")
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=names)
    world = devicemesh.default_world()
    shard = world.new_group(range(4) if rank < 4 else range(4, 8))
    replicate = world.new_group([rank % 4, rank % 4 + 4])
    made = DeviceMesh.from_group([replicate, shard], "cpu", mesh.mesh, mesh_dim_names=names)
    assert dim_groups(made) == dim_groups(mesh)
    assert made.get_all_groups() == [replicate, shard]
    assert made == mesh
    assert [made[name] == mesh[name] for name in names] == [True, True]


# --- InitDeviceMeshTest ---------------------------------------------------------------


@every_rank(8)
def test_init_device_mesh(rank):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("DP", "TP"))
    assert mesh == DeviceMesh("cpu", np.arange(8).reshape(2, 4), mesh_dim_names=("DP", "TP"))
    assert mesh.mesh_dim_names == ("DP", "TP")


@every_rank(8)
def test_repeated_names(rank):
    with pytest.raises(RuntimeError, match=r"Each mesh_dim_name must be unique\."):
        init_device_mesh("cpu", (2, 4), mesh_dim_names=["dp", "dp"])


@every_rank(8)
def test_names_and_shape_of_other_lengths(rank):
    with pytest.raises(
        RuntimeError, match="mesh_shape and mesh_dim_names should have same length!"
    ):
        init_device_mesh("cpu", (8,), mesh_dim_names=["dp", "tp"])


@every_rank(8)
def test_backend_override_by_index(rank):
    options = Options(timeout=42)
    mesh = init_device_mesh(
        "cpu",
        (2, 2, 2),
        mesh_dim_names=("dp", "tp", "cp"),
        backend_override={0: "fake", 2: ("fake", options)},
    )
    assert [group.backend for group in mesh.get_all_groups()] == ["fake", "gloo", "fake"]
    assert mesh.get_group(0).timeout != 42
    assert mesh.get_group(2).timeout == 42
    dp_tp = mesh["dp", "tp"]._flatten()
    dp_cp = mesh["dp", "cp"]._flatten(backend_override="fake")
    tp_cp = mesh["tp", "cp"]._flatten(backend_override=("fake", options))
    assert [flat.get_group(0).backend for flat in (dp_tp, dp_cp, tp_cp)] == ["gloo", "fake", "fake"]
    assert tp_cp.get_group(0).timeout == 42


@every_rank(8)
def test_backend_override_by_name(rank):
    options = Options(timeout=42)
    mesh = init_device_mesh(
        "cpu",
        (2, 2, 2),
        mesh_dim_names=("dp", "tp", "cp"),
        backend_override={"tp": options},
    )
    assert [group.timeout == 42 for group in mesh.get_all_groups()] == [False, True, False]
    assert mesh["dp", "cp"]._flatten(backend_override=options).get_group(0).timeout == 42


@every_rank(8)
def test_backend_override_errors(rank):
    def make(override):
        init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), backend_override=override)

    with pytest.raises(
        RuntimeError, match="Found redundant dim index 0 and name dp in backend_override"
    ):
        make({"dp": "foo", 0: "bar"})
    with pytest.raises(RuntimeError, match=r"Found invalid keys in backend_override: got \['cp'\]"):
        make({"cp": "foo"})
    with pytest.raises(RuntimeError, match=r"Found invalid keys in backend_override: got \[42\]"):
        make({42: "bar"})


# --- TestDeviceMeshGetItem ------------------------------------------------------------


@every_rank(8)
def test_slice_without_names(rank):
    with pytest.raises(RuntimeError, match="Cannot slice a DeviceMesh without mesh_dim_names!"):
        init_device_mesh("cpu", (2, 4))["DP"]


@every_rank(8)
def test_slice_with_an_unknown_name(rank):
    with pytest.raises(KeyError, match="Invalid mesh_dim_name"):
        init_device_mesh("cpu", (2, 4), mesh_dim_names=("DP", "TP"))[("PP",)]


@every_rank(8)
def test_slices_of_two_dims(rank):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("DP", "TP"))
    for dim, name in enumerate(mesh.mesh_dim_names):
        assert mesh[name].mesh.tolist() == my_line(mesh.mesh, rank, dim)


@every_rank(8)
def test_slice_of_one_dim(rank):
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    assert mesh["dp"] == mesh
    with pytest.raises(KeyError, match="Invalid mesh_dim_name"):
        mesh["dim0"]


@every_rank(8)
def test_slices_of_three_dims(rank):
    names = ("Replicate", "Shard", "TP")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    for dim, name in enumerate(names):
        assert mesh[name].mesh.tolist() == my_line(mesh.mesh, rank, dim)
    by_list, by_tuple = mesh[["Replicate", "Shard"]], mesh["Replicate", "Shard"]
    assert by_list.mesh.tolist() == [[rank % 2, rank % 2 + 2], [rank % 2 + 4, rank % 2 + 6]]
    assert by_list == by_tuple
    assert by_tuple["Shard"].mesh.tolist() == mesh["Shard"].mesh.tolist()
    assert by_tuple["Replicate"].mesh.tolist() == mesh["Replicate"].mesh.tolist()


@every_rank(8)
def test_slices_make_no_groups(rank):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    names = [group.name for group in mesh.get_all_groups()]
    for _ in range(2):
        assert [mesh["dp"].get_group().name, mesh["tp"].get_group().name] == names


@every_rank(8)
def test_slice_of_dims_that_are_not_adjacent(rank):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "cp"))
    view = mesh["dp", "cp"]
    assert view.mesh.tolist() == ([[0, 1], [4, 5]] if rank in (0, 1, 4, 5) else [[2, 3], [6, 7]])
    assert view.mesh[view.get_local_rank("dp")].tolist() == mesh["cp"].mesh.tolist()
    with pytest.raises(KeyError, match="Invalid mesh_dim_names"):
        mesh["cp", "dp"]


@every_rank(4)
def test_flatten_one_dim(rank):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("default",))
    assert mesh._flatten() is mesh


@every_rank(8)
def test_flatten_three_dims(rank):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    for _ in range(2):
        with pytest.raises(ValueError, match="dp already exists for submesh of the DeviceMesh"):
            mesh._flatten("dp")

    dp_cp = mesh["dp", "cp"]
    flat = dp_cp._flatten()
    assert flat.mesh.tolist() == dp_cp.mesh.flatten().tolist()
    assert flat.mesh_dim_names == ("dp_cp",)
    assert flat.get_group().dim_name == "dp_cp"
    assert dp_cp._get_root_mesh() is mesh
    assert mesh._flatten_mapping["dp_cp"]._layout == flat._layout == (((4, 2),),)
    assert flat.mesh.tolist() in ([0, 2, 4, 6], [1, 3, 5, 7])
    assert mesh["dp_cp", "tp"].shape == (4, 2)
    assert dp_cp._flatten() == flat
    assert dp_cp._flatten().get_group() is flat.get_group()

    dp_tp = mesh["dp", "tp"]
    flat = dp_tp._flatten()
    assert flat.mesh.tolist() == dp_tp.mesh.flatten().tolist()
    assert mesh._flatten_mapping["dp_tp"]._layout == flat._layout
    assert flat.mesh.tolist() in ([0, 1, 4, 5], [2, 3, 6, 7])
    with pytest.raises(KeyError, match="Mesh dim indices should be in ascending order"):
        mesh["dp_tp", "cp"]

    mesh["cp", "tp"]._flatten("dummy")
    assert mesh["dummy"].mesh_dim_names == ("dummy",)
    with pytest.raises(
        ValueError, match="Flatten mesh with mesh_dim_name dp_tp has been created before"
    ):
        mesh["cp", "tp"]._flatten("dp_tp")


@every_rank(8)
def test_flatten_flattened_dims(rank):
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    mesh = init_device_mesh("cpu", (2, 2, 2, 1), mesh_dim_names=names)
    flat = mesh[names[:3]]._flatten("dp_cp")
    assert mesh["dp_cp"].mesh.tolist() == flat.mesh.tolist()
    assert flat.mesh_dim_names == ("dp_cp",)
    assert flat._get_root_mesh() is mesh
    mesh[names[1:3]]._flatten("dp_shard_cp")
    mesh["dp_replicate", "dp_shard_cp"]._flatten("dp")
    assert mesh["dp", "tp"].mesh.shape == (8, 1)

    small = init_device_mesh("cpu", (1, 1, 1, 1), mesh_dim_names=names)
    small["dp_shard", "cp"]._flatten("dp_cp")
    assert small["dp_replicate", "dp_cp", "tp"].shape == (1, 1, 1)


@every_rank(8)
def test_unflatten_one_of_two_dims(rank):
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    split = mesh._unflatten(0, (2, 2), ("dp_shard", "dp_replicate"))
    assert split.mesh_dim_names == ("dp_shard", "dp_replicate", "tp")
    assert split["tp"].mesh.tolist() == mesh["tp"].mesh.tolist()
    assert split["tp"].get_group() is mesh["tp"].get_group()
    with pytest.raises(KeyError):
        mesh["dp_shard"]


@every_rank(8)
def test_unflatten_the_world(rank):
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    dense = mesh._unflatten(0, (2, 2, 2), ("dp", "cp", "tp"))
    experts = mesh._unflatten(0, (2, 2, 2), ("dp", "ep", "ep_tp"))
    assert dense["cp"].mesh.tolist() == experts["ep"].mesh.tolist()
    assert dense["tp"].mesh.tolist() == experts["ep_tp"].mesh.tolist()
    cube = mesh._unflatten(0, (4, 2, 1), ("dp", "cp", "tp"))
    split = cube._unflatten(0, (2, 2), ("dp_shard", "dp_replicate"))
    assert split.mesh_dim_names == ("dp_shard", "dp_replicate", "cp", "tp")
    for name in ("tp", "cp"):
        assert split[name].mesh.tolist() == cube[name].mesh.tolist()
        assert split[name].get_group() is cube[name].get_group()
    wide = mesh._unflatten(
        0,
        (1, 8),
        ("pp", "spmd"),
        backend_override={"pp": "fake", "spmd": ("gloo", Options(timeout=30))},
    )
    deep = wide._unflatten(
        1,
        (2, 2, 2),
        ("dp", "cp", "tp"),
        backend_override={"dp": "gloo", "cp": "gloo", "tp": ("gloo", Options(timeout=60))},
    )
    assert deep["pp"].get_group().backend == "fake"
    assert wide["spmd"].get_group().timeout == 30
    assert deep["tp"].get_group().timeout == 60


@every_rank(8)
def test_concatenate_two_dims(rank):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    joined = DeviceMesh._concatenate([mesh["dp"], mesh["tp"]])
    assert joined.mesh.tolist() == mesh.mesh.tolist()
    for name in ("dp", "tp"):
        assert joined.get_group(name) is mesh.get_group(name)


@every_rank(8)
def test_concatenate_of_three_dims(rank):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    joined = DeviceMesh._concatenate([mesh["dp"], mesh["tp"]])
    assert joined.mesh.tolist() == mesh["dp", "tp"].mesh.tolist()
    for name in ("dp", "tp"):
        assert joined.get_group(name) is mesh["dp", "tp"].get_group(name)
    assert DeviceMesh._concatenate([mesh["pp", "dp"], mesh["tp"]]) == mesh


@every_rank(8)
def test_slice_with_a_flattened_dim(rank):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "cp"))
    flat = mesh["shard", "cp"]._flatten()
    assert mesh["replicate", "shard_cp"].mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert flat.get_group() is mesh["shard_cp"].get_group()
    assert flat.get_group() is mesh.get_group(mesh_dim="shard_cp")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    flat = mesh["dp", "cp"]._flatten()
    assert mesh["dp_cp", "tp"].mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert flat.get_group() is mesh["dp_cp"].get_group()
    assert flat.get_group() is mesh.get_group(mesh_dim="dp_cp")


# --- TestMeshEnv ----------------------------------------------------------------------


@every_rank(8)
def test_root_of_every_slice(rank):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    for key in (("dp", "cp"), ("dp", "tp"), ("cp", "tp"), "dp", "cp", "tp"):
        assert _mesh_resources.get_root_mesh(mesh[key]) is mesh
        assert mesh[key]._get_root_mesh() is mesh


@every_rank(8)
def test_dim_in_the_root(rank):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("DP", "TP"))
    assert [mesh[name]._get_root_mesh_dim() for name in ("DP", "TP")] == [0, 1]


@every_rank(8)
def test_dim_in_the_root_without_names(rank):
    assert init_device_mesh("cpu", (8,))._get_root_mesh_dim() is None


@every_rank(8)
def test_dim_by_name(rank):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("DP", "TP"))
    assert [mesh._get_mesh_dim_by_name(name) for name in ("DP", "TP")] == [0, 1]


@every_rank(8)
def test_all_lines_of_a_dim(rank):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    lines = mesh._get_all_submeshes("replicate")
    assert [line.mesh.tolist() for line in lines] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    mine = next(line for line in lines if line.get_coordinate() is not None)
    assert mine.get_group() is mesh.get_group("replicate")


def test_a_world_of_its_own():
    """Beyond torch: a mesh needs no default world."""
    world = World.simulated(8, 3)
    mesh = init_device_mesh("cpu", (2, 4), world=world)
    assert mesh.get_coordinate() == (0, 3)
    assert not devicemesh.is_initialized() or devicemesh.default_world() is not world

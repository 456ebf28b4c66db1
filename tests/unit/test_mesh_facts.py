"""What a mesh is as a value: text, equality, hash, copies, pickles, the current mesh."""

import ast
import copy
import inspect
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import devicemesh
from devicemesh import DeviceMesh, init_device_mesh
from devicemesh.device_mesh import _mesh_resources

NAMES = ("dp", "tp")


@pytest.fixture
def world():
    """Rank 5 of a simulated world of 8."""
    with devicemesh.simulate(world_size=8, rank=5) as world:
        yield world


@pytest.fixture
def mesh(world):
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES)


# --- text ---------------------------------------------------------------------------


def test_repr(mesh, world):
    assert repr(mesh) == "DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1))"
    assert repr(mesh["dp"]) == "DeviceMesh((dp=2), 'cpu', stride=(4,))"
    assert repr(init_device_mesh("cpu", (8,))) == "DeviceMesh((8,), 'cpu', stride=(1,))"
    assert repr(init_device_mesh("cpu", (2, 1, 4))) == (
        "DeviceMesh((2, 1, 4), 'cpu', stride=(4, (), 1))"
    )
    assert repr(DeviceMesh("cuda", [[3, 1], [0, 2]])) == "DeviceMesh((2, 2), 'cuda', stride=(2, 1))"
    assert str(mesh) == repr(mesh)


def test_repr_in_detail(mesh, monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert repr(mesh["tp"]) == "DeviceMesh((tp=4), 'cpu', stride=(1,), Mesh: [4, 5, 6, 7])"
    outside = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=NAMES)
    assert repr(outside["tp"]) == "DeviceMesh((tp=2), 'cpu', stride=(1,))"
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    assert "Mesh:" not in repr(mesh)


def test_signatures():
    assert str(inspect.signature(init_device_mesh)).startswith(
        "(device_type, mesh_shape, *, mesh_dim_names=None, backend_override=None, timeout=None"
    )
    assert str(inspect.signature(DeviceMesh)).startswith(
        "(device_type, mesh, *, mesh_dim_names=None, backend_override=None, timeout=None"
    )
    assert str(inspect.signature(DeviceMesh.from_group)) == (
        "(group, device_type, mesh=None, *, mesh_dim_names=None)"
    )
    assert str(inspect.signature(DeviceMesh.get_group)) == "(self, /, mesh_dim=None)"
    assert str(inspect.signature(DeviceMesh.size)) == "(self, /, mesh_dim=None)"
    assert str(inspect.signature(DeviceMesh._flatten)) == (
        "(self, /, mesh_dim_name=None, backend_override=None)"
    )


def test_docstrings():
    for name, value in vars(DeviceMesh).items():
        if not name.startswith("_"):
            assert value.__doc__, name


def test_stub_has_every_method():
    tree = ast.parse((Path(devicemesh.__file__).parent / "_core.pyi").read_text())
    (stub,) = (node for node in tree.body if getattr(node, "name", None) == "DeviceMesh")
    described = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    slots = set(dir(object)) | {"__dict__", "__module__"}
    assert described - slots == set(vars(DeviceMesh)) - slots


# --- equality and hash --------------------------------------------------------------


def test_equal_across_roots(world):
    shaped = init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES)
    listed = DeviceMesh("cpu", np.arange(8).reshape(2, 4), mesh_dim_names=NAMES)
    assert shaped == listed
    assert hash(shaped) == hash(listed)
    assert shaped["tp"] == listed["tp"]
    assert hash(shaped["tp"]) == hash(listed["tp"])
    assert len({shaped, listed, shaped["tp"], listed["tp"]}) == 2
    assert shaped._stable_hash() == listed._stable_hash()
    assert shaped._hash_key() == listed._hash_key()


def test_unequal(mesh, world):
    others = [
        init_device_mesh("cpu", (2, 4)),
        init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b")),
        init_device_mesh("cpu", (4, 2), mesh_dim_names=NAMES),
        init_device_mesh("cuda", (2, 4), mesh_dim_names=NAMES),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES),
        DeviceMesh("cpu", np.arange(8)[::-1].reshape(2, 4), mesh_dim_names=NAMES),
        mesh["dp"],
        mesh["tp"],
        3,
        None,
        "DeviceMesh",
        mesh.shape,
    ]
    for other in others:
        assert mesh != other
        assert not (mesh == other)  # noqa: SIM201
    hashes = {hash(other) for other in others} | {hash(mesh)}
    assert len(hashes) == len(others) + 1
    texts = {other._stable_hash() for other in others[:8]} | {mesh._stable_hash()}
    assert len(texts) == 9


def test_a_slice_is_not_the_mesh_of_its_ranks(mesh, world):
    alone = DeviceMesh("cpu", [4, 5, 6, 7], mesh_dim_names=("tp",))
    assert mesh["tp"].mesh.tolist() == alone.mesh.tolist()
    assert mesh["tp"] != alone
    assert alone == DeviceMesh("cpu", [4, 5, 6, 7], mesh_dim_names=("tp",))
    # the same slice on ranks of different lines is one value: what SPMD code compares
    with devicemesh.simulate(world_size=8, rank=0):
        assert init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES)["tp"] == mesh["tp"]


def test_no_order(mesh):
    with pytest.raises(TypeError):
        mesh < mesh  # noqa: B015


def test_stable_hash_in_another_process(mesh):
    code = (
        "import devicemesh as d\n"
        "with d.simulate(world_size=8, rank=0):\n"
        "    m = d.init_device_mesh('cpu', (2, 4), mesh_dim_names=('dp', 'tp'))\n"
        "    print(m._stable_hash(), m['tp']._stable_hash())\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    text = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert text.split() == [mesh._stable_hash(), mesh["tp"]._stable_hash()]


# --- copies and pickles -------------------------------------------------------------


def test_copies_are_the_mesh(mesh):
    assert copy.copy(mesh) is mesh
    assert copy.deepcopy(mesh["dp"]) is mesh["dp"]
    assert copy.deepcopy({"m": [mesh]})["m"][0] is mesh


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(mesh, protocol):
    mesh["dp"].note = "mine"
    flat = mesh.flatten()
    root, view, flattened = pickle.loads(pickle.dumps((mesh, mesh["dp"], flat), protocol))
    assert root == mesh
    assert hash(root) == hash(mesh)
    assert root is not mesh
    assert view is root["dp"]
    assert view.note == "mine"
    assert root["dp_tp"] is flattened
    assert root.get_coordinate() == (1, 1)
    # in one process the groups are those of the mesh that was pickled
    assert root.get_group("dp") is mesh.get_group("dp")
    assert flattened.get_group() is flat.get_group()
    alone = pickle.loads(pickle.dumps(mesh["tp"], protocol))
    assert alone == mesh["tp"]
    assert alone._get_root_mesh() == mesh


@pytest.mark.parametrize("ranks", [[3, 1, 0, 2], [[5, 7], [1, 3]], [[[4]], [[5]]]])
def test_pickle_of_listed_ranks(world, ranks):
    mesh = DeviceMesh("cpu", ranks)
    again = pickle.loads(pickle.dumps(mesh))
    assert again == mesh
    assert again.mesh.tolist() == ranks
    assert again.get_coordinate() == mesh.get_coordinate()


def test_pickle_keeps_what_was_asked_for(world):
    mesh = init_device_mesh("cpu", (2, 4), backend_override={0: "fake"}, timeout={1: 3})
    again = pickle.loads(pickle.dumps(mesh))
    del mesh
    assert [group.backend for group in again.get_all_groups()] == ["fake", "gloo"]
    assert [group.timeout for group in again.get_all_groups()] == [1800, 3]


def test_closing_the_original_leaves_the_unpickled(mesh):
    again = pickle.loads(pickle.dumps(mesh))
    group = mesh.get_group("dp")
    mesh.close()
    assert not group.closed
    assert again.get_group("dp") is group
    again.close()
    assert group.closed


def test_pickle_goes_to_another_process(mesh):
    """Facts without a world, groups with one; never a world made for a pickle's sake."""
    code = (
        "import pickle, sys\n"
        "import devicemesh as d\n"
        "data = sys.stdin.buffer.read()\n"
        "mesh = pickle.loads(data)\n"
        "print(mesh, mesh['tp'].mesh.tolist(), mesh.get_coordinate(), mesh.get_rank())\n"
        "try:\n"
        "    mesh.get_group('tp')\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
        "with d.simulate(world_size=8, rank=2):\n"
        "    try:\n"
        "        mesh.get_group('tp')\n"
        "    except RuntimeError as error:\n"
        "        print(error)\n"
        "    again = pickle.loads(data)\n"
        "    print(again.get_coordinate(), list(again['tp'].get_group().ranks))\n"
        "with d.simulate(world_size=4, rank=2):\n"
        "    try:\n"
        "        pickle.loads(data).get_group('tp')\n"
        "    except RuntimeError as error:\n"
        "        print(error)\n"
        "with d.simulate(world_size=8, rank=5):\n"
        "    print(list(mesh['tp'].get_group().ranks))\n"
    )
    text = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(mesh), capture_output=True, check=True
    ).stdout.decode()
    lines = text.splitlines()
    assert lines[0] == f"{mesh} [4, 5, 6, 7] (1, 1) 5"
    assert "unpickled in a process without a world" in lines[1]
    assert "unpickled as rank 5 before the world was there, and this process is rank 2" in lines[2]
    assert lines[3] == "(0, 2) [0, 1, 2, 3]"
    assert "unpickled in a world of 4 ranks, too few for its rank 7" in lines[4]
    assert lines[5] == "[4, 5, 6, 7]"


def test_malformed_pickles():
    from devicemesh import _core

    good = (DeviceMesh, "cpu", (((2, 4),), ((4, 1),)), 8, NAMES, ((None, "", None),) * 2, 0)
    tail = (True, "", ())
    assert _core._restore_root(*good, *tail).shape == (2, 4)
    for place, value in [
        (0, int),
        (1, "banana"),
        (2, (((2, 4),), ((5, 1),))),
        (2, (((2, 4),), ((4, 3),))),
        (2, (((2, 1),), ((4, 1),))),
        (2, (((-2, 4),), ((4, 1),))),
        (2, (((2, 4), 3), ((4, 1),))),
        (2, ((2, 4), (4, 1))),
        (2, 7),
        (2, ((),) * 65),
        (3, [0, 0]),
        (3, -1),
        (3, 2),
        (4, ("a",)),
        (5, ()),
        (5, ((None, "", None), 3)),
        (5, ((None, "", None), (3, "", None))),
        (5, ((None, "", None), (None, "", 2**80))),
    ]:
        bad = list(good)
        bad[place] = value
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            _core._restore_root(*bad, *tail)
    for flattened in [(3,), (("x", 3, ()),), (("x", (((8, 1),),), ((None, "", None),) * 2),)]:
        with pytest.raises((ValueError, TypeError)):
            _core._restore_root(*good, True, "", flattened)
    root = _core._restore_root(*good, *tail)
    with pytest.raises(ValueError, match="malformed"):
        _core._restore_view(root, (((2, 8),),), ("x",), ((None, "", None),))
    with pytest.raises(ValueError, match="malformed"):
        _core._restore_view(root, (((2, 4),),), ("x",), ())
    with pytest.raises(TypeError):
        _core._restore_view(3, (), None, ())


# --- the current mesh ---------------------------------------------------------------


def test_current_mesh(mesh):
    with pytest.raises(RuntimeError, match="No device mesh is currently active!"):
        _mesh_resources.get_current_mesh()
    with mesh as entered:
        assert entered is mesh
        assert _mesh_resources.get_current_mesh() is mesh
        with mesh["dp"]:
            assert _mesh_resources.get_current_mesh() is mesh["dp"]
            assert _mesh_resources.mesh_stack == [mesh, mesh["dp"]]
        assert _mesh_resources.get_current_mesh() is mesh
    assert _mesh_resources.mesh_stack == []


def test_current_mesh_after_an_error(mesh):
    with pytest.raises(ZeroDivisionError), mesh:
        1 / 0  # noqa: B018
    assert _mesh_resources.mesh_stack == []


def test_current_mesh_is_per_thread(mesh):
    seen = []
    with mesh:
        thread = threading.Thread(target=lambda: seen.append(list(_mesh_resources.mesh_stack)))
        thread.start()
        thread.join()
    assert seen == [[]]


def test_mesh_resources(mesh, monkeypatch):
    assert _mesh_resources.get_root_mesh(mesh["dp"]) is mesh
    assert _mesh_resources.get_root_mesh(None) is None
    assert len(_mesh_resources._get_all_submeshes(mesh, "dp")) == 4
    assert _mesh_resources.num_devices_per_host("cpu") == 1
    assert _mesh_resources.num_hosts("cpu") == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,3, 5")
    assert _mesh_resources.num_devices_per_host("cuda") == 4
    assert _mesh_resources.num_hosts("cuda") == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert _mesh_resources.num_devices_per_host("cuda") == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert _mesh_resources.num_devices_per_host("cuda") >= 0


# --- numpy --------------------------------------------------------------------------


def test_mesh_array_is_the_caller_s(mesh):
    array = mesh.mesh
    array[:] = 0
    assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert array.dtype == np.int32
    assert array.flags.c_contiguous
    assert array.flags.writeable


def test_without_numpy(mesh, monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ImportError, match=r"DeviceMesh.mesh is a numpy array.*pip install numpy"):
        mesh.mesh  # noqa: B018
    assert mesh._flatten_rank_map == tuple(range(8))
    assert mesh.size() == 8


def test_private_facts(mesh):
    assert mesh._layout == (((2, 4),), ((4, 1),))
    assert mesh["dp"]._root_mesh is mesh
    assert mesh._root_mesh is None
    assert mesh._rank == 5
    assert mesh._device_type == "cpu"
    assert mesh._mesh_dim_names == NAMES
    assert mesh._thread_id is None
    assert mesh._coordinate_on_dim == (1, 1)
    assert mesh._sym_get_coordinate(-1) == 1
    assert mesh._get_mesh_dim_by_name("tp") == 1
    with pytest.raises(KeyError, match="Mesh dimension 'x' does not exist"):
        mesh._get_mesh_dim_by_name("x")
    with pytest.raises(IndexError):
        mesh._sym_get_coordinate(2)
    assert mesh["tp"]._get_root_mesh_dim() == 1
    with pytest.raises(RuntimeError, match="can only be a 1D mesh"):
        mesh._get_root_mesh_dim()
    with pytest.raises(KeyError):
        mesh.flatten()._get_root_mesh_dim()

"""Meshes leave nothing behind: types, views and groups, dropped, closed, failed or pickled."""

import copy
import gc
import pickle
import sys
from contextlib import suppress

import numpy as np
from measure import check_steady

import devicemesh
from devicemesh import DeviceMesh, Options, ProcessGroup, _core, init_device_mesh

ROOT = _core._MeshRoot
NAMES = ("dp", "cp", "tp")
ERRORS = (TypeError, ValueError, KeyError, IndexError, RuntimeError, AttributeError)


class Mine(DeviceMesh):
    """A Python subclass: another way through dealloc."""


def build():
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)


def dropped():
    build()
    DeviceMesh("cpu", [[3, 1], [0, 5]])
    DeviceMesh("cpu", np.arange(8).reshape(2, 4), mesh_dim_names=("a", "b"))
    DeviceMesh("cpu", range(4), _init_backend=False, _rank=2)
    Mine("cpu", range(8))


def views():
    mesh = build()
    mesh["dp"], mesh["dp", "tp"]["tp"], mesh[["cp", "tp"]]
    flat = mesh["dp", "tp"].flatten()
    flat.unflatten(0, (4, 1), ("a", "b"))["a"]
    mesh["dp_tp"], mesh._flatten_mapping
    DeviceMesh.concatenate([mesh["tp"], mesh["dp"]])
    mesh._get_all_submeshes("dp")
    Mine("cpu", range(8), mesh_dim_names=("a",)).flatten("b")


def groups():
    mesh = build()
    mesh.get_group("dp"), mesh.get_group(2), mesh["cp"].get_group()
    mesh.get_all_groups(), mesh._dim_group_names
    mesh.flatten().get_group()
    made = DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh.mesh, mesh_dim_names=NAMES)
    made.flatten().get_group()
    DeviceMesh.from_group(mesh.get_group(0), "cpu")
    DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh_dim_names=NAMES)


def selected():
    mesh = build()
    half = mesh.select(dp=[1, 0], tp=1)
    half.get_group("dp"), half.flatten().get_group(), half["cp"], half.select({0: -1})
    view = mesh.permute("tp", "dp", "cp")
    view.get_group(0), view["tp", "cp"].flatten("x"), view.permute(*NAMES)
    pickle.loads(pickle.dumps((half, half["dp"], view)))[0].get_group(1)
    Mine("cpu", range(8)).select({0: slice(1)})


def closed():
    with build() as mesh:
        mesh.get_all_groups()
        mesh["dp"].close()
        mesh.close()
    mesh = build()
    mesh.flatten().get_group()
    mesh.abort()


def reused():
    one, two = (init_device_mesh("cpu", (8,), reuse_groups=True) for _ in range(2))
    one.get_group(), two.get_group()
    one.close()
    two.close()
    # not closed: goes when the world has ended and somebody looks
    init_device_mesh("cpu", (2, 4), reuse_groups=True).get_group(0)


def facts():
    mesh = build()
    mesh.size(), mesh.size("tp"), mesh.get_rank(), mesh.get_local_rank("dp")
    mesh.get_coordinate(), mesh.shape, mesh.ndim, mesh.mesh, mesh.device_type
    mesh._layout, mesh._flatten_rank_map, mesh._hash_key(), mesh._stable_hash()
    repr(mesh), hash(mesh), mesh == build(), mesh == 3, mesh != mesh["dp"]
    mesh.is_member, mesh.coordinate_of(3), mesh.rank_at(0, 1, 1), mesh.rank_at(tp=1), 3 in mesh
    mesh.ranks(), mesh.ranks("dp"), mesh.ranks(("tp", 0), 3), mesh.shift("dp"), mesh.shift(0, -1)
    mesh._get_root_mesh(), mesh["dp"]._root_mesh, mesh["dp"]._get_root_mesh_dim()
    mesh.note = mesh


def asked_for():
    init_device_mesh(
        "cpu",
        {"dp": 2, "tp": -1},
        backend_override={"dp": ("fake", Options(timeout=3)), 1: Options("fake")},
        timeout={"dp": 1.5},
    ).flatten(backend_override="fake")


def pickled():
    mesh = build()
    mesh.flatten("all")
    mesh["dp"].note = 1
    root, view = pickle.loads(pickle.dumps((mesh, mesh["dp"])))
    root.get_group(0), view.get_group()
    data = pickle.dumps(mesh)
    del mesh, root, view
    gc.collect()
    pickle.loads(data).get_group(0)
    copy.copy(build()), copy.deepcopy(build())


def refused():
    mesh = build()
    mesh["dp", "cp"].flatten("x")
    outside = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    empty = DeviceMesh.__new__(DeviceMesh)
    dp, cp, _ = mesh.get_all_groups()
    for act in (
        lambda: DeviceMesh("cpu", [[0], [1, 2]]),
        lambda: DeviceMesh("cpu", [0, 0]),
        lambda: DeviceMesh("cpu", [[0, 1.5]]),
        lambda: DeviceMesh("cpu", np.arange(4.0)),
        lambda: DeviceMesh("cpu", range(99)),
        lambda: DeviceMesh("cpu", [0, 99]),
        lambda: DeviceMesh("cpu", [0], _rank=2),
        lambda: DeviceMesh("cpu:0", [0]),
        lambda: DeviceMesh("banana", [0]),
        lambda: DeviceMesh("cpu", [0], mesh_dim_names=("a", "b")),
        lambda: DeviceMesh("cpu", [0, 1], mesh_dim_names=(3,)),
        lambda: DeviceMesh("cpu", [0], backend_override={"a": 1}),
        lambda: DeviceMesh("cpu", [0], backend_override={0: 1}),
        lambda: DeviceMesh("cpu", [0], backend_override={0: "foo"}),
        lambda: DeviceMesh("cpu", [0], backend_override={0: ("fake", 3)}),
        lambda: DeviceMesh("cpu", [0], backend_override={0: Options(timeout=-1)}),
        lambda: DeviceMesh("cpu", [0], timeout={0: "x"}),
        lambda: DeviceMesh("cpu", [0], timeout={3: 3}),
        lambda: DeviceMesh("cpu", [0], world=3),
        lambda: init_device_mesh("cpu", (5, 5)),
        lambda: init_device_mesh("cpu", (-1, -1)),
        lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "a")),
        lambda: mesh.__init__("cpu", [0]),
        lambda: empty.__init__("cpu", [0, 0]),
        lambda: empty.shape,
        lambda: empty.__reduce__(),
        lambda: mesh[0],
        lambda: mesh["dp", 0],
        lambda: mesh["tp", "dp"],
        lambda: mesh["dp", "dp"],
        lambda: mesh["x", "dp"],
        lambda: mesh["nothing"],
        lambda: mesh[()],
        lambda: mesh.get_group(),
        lambda: mesh.get_group("nothing"),
        lambda: mesh.get_group(7),
        lambda: mesh.get_group(("dp", "cp")),
        lambda: mesh.size(dim=3),
        lambda: mesh.flatten("dp"),
        lambda: mesh.flatten("x"),
        lambda: mesh.flatten(3),
        lambda: mesh.flatten(backend_override="foo"),
        lambda: mesh.unflatten(7, (2,), ("a",)),
        lambda: mesh.unflatten(0, (3,), ("a",)),
        lambda: mesh.unflatten(0, (2, 1), ("a", "tp")),
        lambda: mesh.unflatten(0, (2, 1), ("a", "b"), {"c": "fake"}),
        lambda: mesh.coordinate_of("x"),
        lambda: "x" in mesh,
        lambda: mesh.rank_at(0),
        lambda: mesh.rank_at(0, 0, 2),
        lambda: mesh.rank_at(x=0),
        lambda: outside.rank_at(a=0),
        lambda: outside["a"].rank_at(0),
        lambda: mesh.ranks("nothing"),
        lambda: mesh.ranks(("dp", "dp")),
        lambda: mesh.ranks(0, 99),
        lambda: mesh.ranks(rank=99),
        lambda: outside.shift("a"),
        lambda: mesh.select(3),
        lambda: mesh.select(nothing=3),
        lambda: mesh.select(dp=[0, 0]),
        lambda: mesh.select(dp=[0, 7]),
        lambda: mesh.select(dp=[0, "a"]),
        lambda: mesh.select(dp=[]),
        lambda: mesh.select(dp=0, cp=0, tp=0),
        lambda: mesh.select({0: 1}, dp=1),
        lambda: outside["a"].select(a=0),
        lambda: mesh.permute(0),
        lambda: mesh.permute(0, 0, 1),
        lambda: mesh.permute("x", "dp", "tp"),
        lambda: _core._restore_selection(mesh, (2,), (0, 9), None, ((None, "", None),), ()),
        lambda: _core._restore_selection(mesh, (3,), (0, 1), None, ((None, "", None),), ()),
        lambda: DeviceMesh.concatenate([mesh, 3]),
        lambda: DeviceMesh.concatenate([mesh, mesh]),
        lambda: DeviceMesh.concatenate([mesh, outside]),
        lambda: DeviceMesh.from_group([cp, dp], "cpu", [[0, 1], [2, 3]], mesh_dim_names="ab"),
        lambda: DeviceMesh.from_group([dp, cp], "cpu", [0], mesh_dim_names=("a", "b")),
        lambda: DeviceMesh.from_group(dp, "cpu", [[0]]),
        lambda: DeviceMesh.from_group([dp, dp], "cpu", mesh_dim_names=("a", "b")),
        lambda: DeviceMesh.from_group([dp, cp], "cpu", mesh_dim_names=("a", "a")),
        lambda: outside.get_group(0),
        lambda: outside["a"].mesh,
        lambda: outside.get_local_rank(0),
        lambda: _core._restore_root(DeviceMesh, "cpu", 3, 8, None, (), 0, True, "", ()),
        lambda: _core._restore_view(mesh, ((), 3), None, ()),
    ):
        with suppress(*ERRORS):
            act()
            raise AssertionError("not refused")


def outlived():
    """Views, groups and what is current outlive the name of their mesh."""
    view = build()["dp"]
    group = build().get_group("dp")
    with build()["tp"]:
        gc.collect()
    view.get_group(), group.size()


def by_type():
    """Each object holds its type, and lets go of it."""

    def references():
        return [sys.getrefcount(kind) for kind in (DeviceMesh, ROOT)]

    deep, native = references()
    meshes = [build() for _ in range(50)]
    assert references() == [deep + 50, native + 50]
    slices = [mesh["dp"] for mesh in meshes]
    assert references() == [deep + 100, native + 50]
    del meshes, slices
    gc.collect()
    assert references() == [deep, native]


with devicemesh.simulate(world_size=8, rank=5):
    by_type()

for step in (
    dropped,
    views,
    selected,
    groups,
    closed,
    reused,
    facts,
    asked_for,
    pickled,
    refused,
    outlived,
):

    def run(step=step):
        with devicemesh.simulate(world_size=8, rank=5):
            step()

    run.__name__ = step.__name__
    check_steady(run, DeviceMesh, ROOT, ProcessGroup, None, True, windows=60)

"""Each allocation of Python in turn fails while a mesh is made and used: MemoryError or the
right result, never a crash, never a mesh that is half there.

Only the core is called while allocations fail: interpreters have frames of their own in
which a failure is not handled well."""

import gc
import pickle
import sys
from contextlib import suppress
from functools import partial

import devicemesh
from devicemesh import DeviceMesh, ProcessGroup, _core

try:
    from _testcapi import remove_mem_hooks, set_nomemory
except ImportError:  # an interpreter without its test modules
    sys.exit(0)

NAMES = ("dp", "cp", "tp")
MOST = 2000  # more allocations than any step makes


def build():
    return DeviceMesh._from_shape(
        "cpu", (2, 2, 2), mesh_dim_names=NAMES, backend_override={"tp": "fake"}, timeout={"dp": 3}
    )


def made(mesh):
    return build()


def listed(mesh):
    return DeviceMesh("cpu", [[3, 1], [0, 5]], mesh_dim_names=("a", "b"), reuse_groups=True)


def slices(mesh):
    return mesh["dp", "tp"]["tp"], mesh[["cp", "tp"]]


def groups(mesh):
    return mesh.get_all_groups(), mesh["dp"].get_group(), mesh._dim_group_names


def flatten(mesh):
    return mesh["dp", "tp"].flatten().get_group(), mesh["dp_tp"]


def unflatten(mesh):
    return mesh.flatten("all").unflatten(0, (2, 4), ("a", "b"), {"a": "fake"}).get_group("a")


def concatenate(mesh):
    return DeviceMesh.concatenate([mesh["tp"], mesh["dp"]])


def submeshes(mesh):
    return mesh._get_all_submeshes("dp")


def selected(mesh):
    half = mesh.select({0: [1, 0], 2: 1})
    function, arguments = half.__reduce__()
    return half.get_group(1), function(*arguments), mesh.permute(1, 0, 2).get_group(0)


def ranks(mesh):
    return mesh.ranks(), mesh.ranks((0, 1)), mesh.rank_at(0, 1, 1), mesh.coordinate_of(3)


def from_group(mesh):
    return DeviceMesh.from_group(
        mesh.get_all_groups(), "cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], mesh_dim_names=NAMES
    )


def facts(mesh):
    return repr(mesh), hash(mesh), mesh._hash_key(), mesh._layout, mesh == 3


def reduced(mesh):
    function, arguments = mesh["dp"].__reduce__()
    return function(*arguments), mesh.__reduce__()


def restored(mesh):
    function, arguments = build().__reduce__()
    return function(*arguments)


def refused(mesh):
    """Calls that end in an error, without a frame of Python in between."""
    return (
        partial(mesh.__getitem__, ("tp", "dp")),
        partial(mesh.__getitem__, "nothing"),
        partial(mesh.__getitem__, 0),
        partial(mesh.flatten, "dp"),
        mesh.get_group,
        partial(mesh.get_group, "nothing"),
        partial(mesh.get_group, 7),
        partial(mesh.unflatten, 0, (3,), ("x",)),
        partial(mesh.unflatten, 0, (2, 1), ("x", "tp")),
        partial(DeviceMesh, "cpu", [[0], [1, 2]]),
        partial(DeviceMesh, "cpu", [0, 0]),
        partial(DeviceMesh, "cpu", [0, 99]),
        partial(DeviceMesh, "cpu", [0], mesh_dim_names=("a", "b")),
        partial(DeviceMesh._from_shape, "cpu", (9, 9)),
        partial(DeviceMesh._from_shape, "cpu", (2,), backend_override={5: "fake"}),
        partial(DeviceMesh._from_shape, "cpu", (2,), backend_override={0: "foo"}),
        partial(DeviceMesh._from_shape, "cpu", (2,), timeout={"x": 3}),
        partial(mesh.select, {0: [0, 0]}),
        partial(mesh.select, {0: [7]}),
        partial(mesh.select, {0: 0, 1: 0, 2: 0}),
        partial(mesh.permute, 0, 0, 1),
        partial(mesh.rank_at, 0),
        partial(mesh.rank_at, 0, 0, 9),
        partial(mesh.ranks, (0, 0)),
        partial(DeviceMesh.concatenate, [mesh, 3]),
        partial(DeviceMesh.from_group, mesh.get_group(0), "cpu", [[0]]),
        partial(DeviceMesh.from_group, mesh.get_all_groups(), "cpu", [0], mesh_dim_names=NAMES),
    )


def refuse(act):
    sys._getframe()  # made now: a failure in making it would lose the error
    for nth in range(100):
        set_nomemory(nth, nth + 1)
        try:
            act()
        except (MemoryError, KeyError, ValueError, TypeError, IndexError, RuntimeError):
            pass
        finally:
            remove_mem_hooks()


def run(step):
    calm = 0
    for nth in range(MOST):
        mesh = build()
        failed = False
        set_nomemory(nth, nth + 1)
        try:
            step(mesh)
        except MemoryError:
            failed = True
        except SystemError as error:  # an error return without an exception
            remove_mem_hooks()
            raise AssertionError(f"{step.__name__}, allocation {nth}") from error
        finally:
            remove_mem_hooks()
        # whatever failed, the mesh is whole
        assert mesh["dp"].size() == 2
        assert mesh.get_group("tp").backend == "fake"
        step(mesh)
        calm = 0 if failed else calm + 1
        if calm > 50:  # beyond the step's last allocation
            return
    raise AssertionError(f"{step.__name__} allocates without end")


with devicemesh.simulate(world_size=8, rank=5):
    pickle.loads(pickle.dumps(build()))
    for step in (
        made,
        listed,
        slices,
        groups,
        flatten,
        unflatten,
        concatenate,
        submeshes,
        selected,
        ranks,
        from_group,
        facts,
        reduced,
        restored,
    ):
        run(step)
    for act in refused(build()):
        refuse(act)
    del act

for _ in range(3):
    gc.collect()
with suppress(AttributeError):
    sys._clear_type_cache()
alive = [each for each in gc.get_objects() if isinstance(each, (DeviceMesh, ProcessGroup))]
assert not alive, alive
assert _core._get_default_world() is None

"""Meshes from bad and good arguments: what is refused, with which words, and what is read."""

import array
import datetime

import numpy as np
import pytest

import devicemesh
from devicemesh import DeviceMesh, GlooOptions, Options, init_device_mesh


@pytest.fixture
def world():
    """Rank 5 of a simulated world of 8."""
    with devicemesh.simulate(world_size=8, rank=5) as world:
        yield world


NAMES = ("dp", "tp")


# --- refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "error", "text"),
    [
        (None, TypeError, "mesh must hold integer ranks, got None"),
        ("01", TypeError, "got '01'"),
        (b"01", TypeError, "got b'01'"),
        (1.0, TypeError, "got 1.0 \\(float\\)"),
        ([0, 1.5], TypeError, "got 1.5 \\(float\\)"),
        ([[0], "x"], TypeError, "got 'x'"),
        ([object()], TypeError, "mesh must hold integer ranks"),
        ([], ValueError, "mesh is empty"),
        ([[], []], ValueError, "mesh is empty"),
        (np.zeros((2, 0), dtype=np.int64), ValueError, "mesh is empty"),
        ([[0, 1], [2]], ValueError, "ragged: expected 2 entries at dim 1, got 1"),
        ([[0, 1], 2], ValueError, "ragged: rank 2 lies 1 lists deep, others 2"),
        ([0, [1]], ValueError, "ragged"),
        ([0, 0], ValueError, "rank 0 is in the mesh twice, at positions 0 and 1"),
        ([[0, 1], [2, 1]], ValueError, "rank 1 is in the mesh twice, at positions 1 and 3"),
        ([0, -1], ValueError, "rank -1 at position 1 of the mesh is negative"),
        ([2**31], ValueError, "2147483648 is no rank"),
        ([2**80], ValueError, "is no rank"),
        (np.arange(4.0), TypeError, "elements of type d"),
        (np.array([2**63], dtype=np.uint64), ValueError, "is no rank"),
        (range(9), RuntimeError, "bigger than default world size 8, but found 9 ranks!"),
        ([0, 8], RuntimeError, "the mesh has rank 8, but the world has ranks 0 to 7"),
    ],
)
def test_bad_mesh(world, mesh, error, text):
    with pytest.raises(error, match=text):
        DeviceMesh("cpu", mesh)


def test_bad_mesh_is_the_same_error_on_every_rank():
    for rank in range(8):
        world = devicemesh.simulate(world_size=8, rank=rank)
        with world, pytest.raises(ValueError, match="rank 3 is in the mesh twice"):
            DeviceMesh("cpu", [[3, 3], [1, 0]])


def test_too_many_dims(world):
    nested = 0
    for _ in range(65):
        nested = [nested]
    with pytest.raises(ValueError, match="at most 64 dims"):
        DeviceMesh("cpu", nested)
    with pytest.raises(ValueError, match="at most 64 dims"):
        init_device_mesh("cpu", (1,) * 65)
    assert DeviceMesh("cpu", nested[0]).ndim == 64


def test_list_that_holds_itself(world):
    endless = []
    endless.append(endless)
    with pytest.raises(ValueError, match="at most 64 dims"):
        DeviceMesh("cpu", endless)


@pytest.mark.parametrize("make", [init_device_mesh, DeviceMesh])
@pytest.mark.parametrize(
    ("device_type", "error", "text"),
    [
        ("cuda:0", RuntimeError, "Device type with index is not supported but got cuda:0"),
        ("cpu:0", RuntimeError, "'device.type'"),
        ("banana", ValueError, "unknown device type 'banana': devicemesh knows 'cpu' and 'cuda'"),
        ("", ValueError, "unknown device type ''"),
        (None, TypeError, "device_type must be a str such as 'cpu' or 'cuda', got None"),
        (3, TypeError, "got 3"),
    ],
)
def test_bad_device_type(world, make, device_type, error, text):
    with pytest.raises(error, match=text):
        make(device_type, (2, 4) if make is init_device_mesh else range(8))


class Device:
    def __init__(self, type, index=None):
        self.type = type
        self.index = index

    def __str__(self):
        return f"{self.type}:{self.index}"


def test_device_object(world):
    assert init_device_mesh(Device("cpu"), (8,)).device_type == "cpu"
    with pytest.raises(RuntimeError, match="with index is not supported but got cuda:1"):
        init_device_mesh(Device("cuda", 1), (8,))
    with pytest.raises(TypeError, match="device_type must be a str"):
        init_device_mesh(Device(7), (8,))


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        (["dp", "dp"], RuntimeError, "Each mesh_dim_name must be unique.*'dp', 'dp'"),
        (("dp",), RuntimeError, r"should have same length! Found len\(mesh_dim_names\): 1"),
        (("a", "b", "c"), RuntimeError, r"len\(mesh_shape\):2"),
        ((0, 1), TypeError, r"mesh_dim_names must be str, got 0 in \(0, 1\)"),
        ("dp", TypeError, r"got the str 'dp': did you mean \('dp',\)\?"),
        ("tensor", RuntimeError, r"should have same length.*did you mean \('tensor',\)\?"),
        (7, TypeError, "not iterable"),
    ],
)
def test_bad_names(world, names, error, text):
    with pytest.raises(error, match=text):
        init_device_mesh("cpu", (2, 4), mesh_dim_names=names)
    with pytest.raises(error, match=text):
        DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=names)


@pytest.mark.parametrize(
    ("shape", "error", "text"),
    [
        (None, TypeError, "mesh_shape must be a tuple of ints or a dict"),
        ("24", TypeError, "mesh_shape must be a tuple of ints"),
        ((2, 4.0), TypeError, "mesh_shape must be a tuple of ints"),
        ((0, 4), ValueError, "0"),
        ((2, -2), ValueError, "-2"),
        ((-1, -1), ValueError, r"\(-1, -1\) has more than one -1"),
        ((3, -1), ValueError, r"does not fit a world of 8 ranks: 8 is not a multiple of 3"),
        ((16, -1), ValueError, "does not fit a world of 8 ranks"),
        ((0, -1), ValueError, "a dim has a size of 1 or more, or -1"),
        ((5, 5), RuntimeError, "bigger than default world size 8, but found 25 ranks!"),
        ((2**20, 2**20), ValueError, "1048576"),
    ],
)
def test_bad_shape(world, shape, error, text):
    with pytest.raises(error, match=text):
        init_device_mesh("cpu", shape)


def test_dict_with_other_names(world):
    with pytest.raises(ValueError, match="are not the names in mesh_shape"):
        init_device_mesh("cpu", {"dp": 2, "tp": 4}, mesh_dim_names=("a", "b"))


@pytest.mark.parametrize(
    ("override", "error", "text"),
    [
        ({"dp": "fake", 0: "gloo"}, RuntimeError, "redundant dim index 0 and name dp in back"),
        ({"cp": "fake"}, RuntimeError, r"invalid keys in backend_override: got \['cp'\]"),
        ({42: "fake"}, RuntimeError, r"got \[42\], expected integers in range \[0, 2\) or one of"),
        ({-1: "fake"}, RuntimeError, r"got \[-1\]"),
        ({"dp": "foo"}, ValueError, "unknown backend 'foo': there are"),
        ({"dp": 3}, TypeError, "expected a backend name, options, or"),
        ({"dp": ("fake", 3)}, TypeError, "expected a backend name, options"),
        ({"dp": ("fake",)}, TypeError, r"expected \(name, options\), got \('fake',\)"),
        ({"dp": (3, None)}, TypeError, "a backend must be a name or None, got 3"),
        ({"dp": "cuda:nccl"}, ValueError, "names none for device type 'cpu'"),
        ({"dp": Options(timeout=-1)}, ValueError, "timeout must be 0 or more seconds"),
        ("fake", TypeError, "backend_override must be a dict such as"),
        (("fake",), ValueError, "should have the same length as the number of mesh dim"),
        (7, TypeError, "not iterable"),
    ],
)
def test_bad_override(world, override, error, text):
    with pytest.raises(error, match=text):
        init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES, backend_override=override)


@pytest.mark.parametrize(
    ("timeout", "error", "text"),
    [
        ("soon", TypeError, "timeout must be seconds"),
        (-1, ValueError, "timeout must be 0 or more seconds, got -1"),
        (float("nan"), ValueError, "timeout must be 0 or more seconds"),
        ({"cp": 3}, RuntimeError, r"invalid keys in timeout: got \['cp'\]"),
        ({"dp": 3, 0: 3}, RuntimeError, "redundant dim index 0 and name dp in timeout"),
        ({"dp": "x"}, TypeError, "timeout must be seconds"),
    ],
)
def test_bad_timeout(world, timeout, error, text):
    with pytest.raises(error, match=text):
        init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES, timeout=timeout)


def test_bad_keywords(world):
    with pytest.raises(TypeError):
        DeviceMesh()
    with pytest.raises(TypeError):
        DeviceMesh("cpu")
    with pytest.raises(TypeError):
        DeviceMesh("cpu", [0], ("dp",))
    with pytest.raises(TypeError):
        DeviceMesh("cpu", [0], nonsense=1)
    with pytest.raises(TypeError, match="world"):
        DeviceMesh("cpu", [0], world="here")
    with pytest.raises(ValueError, match="rank must be 0 or more, got -2"):
        DeviceMesh("cpu", [0], _init_backend=False, _rank=-2)
    with pytest.raises(ValueError, match="_rank is 3, but this process is rank 5"):
        DeviceMesh("cpu", [0], _rank=3)


def test_explicit_world_needs_all_three(world):
    with pytest.raises(ValueError, match="missing world_size"):
        init_device_mesh("cpu", (1,), store=object(), rank=0)
    with pytest.raises(ValueError, match="missing store, world_size"):
        init_device_mesh("cpu", (1,), rank=0)
    with pytest.raises(ValueError, match="pass either world, or store"):
        init_device_mesh("cpu", (1,), rank=0, world=world)


def test_names_are_checked_before_a_world_is_looked_for():
    """No world is needed to hear that the arguments do not fit."""
    with pytest.raises(RuntimeError, match="same length"):
        init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp",))
    with pytest.raises(RuntimeError, match="Device type with index"):
        init_device_mesh("cpu:0", (2, 4))
    with pytest.raises(RuntimeError, match="same length"):
        init_device_mesh("cpu", (2, -1), mesh_dim_names=("dp",))


def test_failed_init_leaves_nothing_behind(world):
    mesh = DeviceMesh.__new__(DeviceMesh)
    for use in (
        lambda: mesh.shape,
        lambda: mesh.size(),
        lambda: mesh.get_rank(),
        lambda: mesh.get_group(),
        lambda: mesh.get_local_rank(),
        lambda: mesh["dp"],
        lambda: mesh.flatten(),
        lambda: hash(mesh),
        lambda: mesh._dim_group_names,
        lambda: mesh.mesh,
        lambda: mesh.__reduce__(),
    ):
        with pytest.raises(
            (RuntimeError, AttributeError), match=r"__init__\(\) was not called|not initialized"
        ):
            use()
    assert mesh.close() is None
    assert "without __init__" in repr(mesh)
    assert mesh != DeviceMesh("cpu", [0])
    with pytest.raises(ValueError, match="twice"):
        mesh.__init__("cpu", [0, 0])
    mesh.__init__("cpu", [[5, 1]], mesh_dim_names=NAMES)
    assert mesh.shape == (1, 2)
    with pytest.raises(TypeError, match="cannot change"):
        mesh.__init__("cpu", [0])
    assert mesh.shape == (1, 2)


# --- read ---------------------------------------------------------------------------


RANKS = [[3, 1], [0, 2]]


class Interface:
    """An array known only by __array_interface__."""

    def __init__(self, array):
        self.array = array

    @property
    def __array_interface__(self):
        return self.array.__array_interface__


class Tensor:
    """An array known only by tolist(), as torch's CPU tensors are."""

    def __init__(self, ranks):
        self.ranks = ranks

    def tolist(self):
        return self.ranks


@pytest.mark.parametrize(
    "mesh",
    [
        RANKS,
        ((3, 1), (0, 2)),
        [(3, 1), np.array([0, 2])],
        [[np.int64(3), np.int8(1)], [np.uint16(0), 2]],
        Tensor(RANKS),
        [Tensor([3, 1]), Tensor([0, 2])],
        *(np.array(RANKS, dtype=kind) for kind in "bhilqBHILQ"),
        np.array(RANKS, dtype=">i4"),
        np.array([[3, 0], [1, 2]]).T,
        np.array([[3, 9, 1, 9], [0, 9, 2, 9]])[:, ::2],
        Interface(np.array(RANKS, dtype=np.int16)),
        Interface(np.array([[3, 0], [1, 2]]).T),
        Interface(np.array(RANKS, dtype=">u4")),
        memoryview(np.array(RANKS)),
    ],
    ids=lambda mesh: type(mesh).__name__,
)
def test_mesh_argument(world, mesh):
    made = DeviceMesh("cpu", mesh)
    assert made.shape == (2, 2)
    assert made.mesh.tolist() == RANKS
    assert made.mesh.dtype == np.int32


def test_one_dim_arguments(world):
    for mesh in (range(8), array.array("i", range(8)), np.arange(8), list(range(8))):
        made = DeviceMesh("cpu", mesh)
        assert made.shape == (8,)
        assert made == init_device_mesh("cpu", (8,))


def test_a_rank_alone(world):
    mesh = DeviceMesh("cpu", 5)
    assert mesh.ndim == 0
    assert mesh.shape == ()
    assert mesh.size() == 1
    assert mesh.get_coordinate() == ()
    assert mesh.get_all_groups() == []
    assert mesh.mesh.shape == ()
    assert repr(mesh) == "DeviceMesh((), 'cpu', stride=())"


@pytest.mark.parametrize(
    "shape",
    [
        (2, 4),
        [2, 4],
        np.array([2, 4]),
        (np.int64(2), np.int32(4)),
        (2, -1),
        (-1, 4),
        {"a": 2, "b": 4}.values(),
    ],
)
def test_shape_argument(world, shape):
    mesh = init_device_mesh("cpu", shape)
    assert mesh.shape == (2, 4)
    assert all(type(size) is int for size in mesh.shape)
    assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.mesh_dim_names is None


def test_shape_as_dict_and_int(world):
    mesh = init_device_mesh("cpu", {"dp": 2, "tp": -1})
    assert mesh == init_device_mesh("cpu", (2, 4), mesh_dim_names=["dp", "tp"])
    assert init_device_mesh("cpu", {"dp": 2, "tp": 4}, mesh_dim_names=("dp", "tp")) == mesh
    assert init_device_mesh("cpu", 8) == init_device_mesh("cpu", (8,))


def test_no_names(world):
    assert init_device_mesh("cpu", (2, 4), mesh_dim_names=()).mesh_dim_names is None
    assert init_device_mesh("cpu", (2, 4), mesh_dim_names=None).mesh_dim_names is None


def test_names_are_plain_str(world):
    class Name(str):
        __slots__ = ()

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=[Name("dp"), "t" + "p"])
    assert [type(name) for name in mesh.mesh_dim_names] == [str, str]
    assert mesh.size(Name("dp")) == 2
    assert mesh[Name("dp")] is mesh["dp"]


# --- backends and time-outs ---------------------------------------------------------


class TorchOptions:
    """Like torch's: a `_timeout`, perhaps a `backend`."""

    def __init__(self, timeout, backend=None):
        self._timeout = timeout
        if backend is not None:
            self.backend = backend


def test_override_leaves_the_dict_alone(world):
    override = {"dp": "fake", 1: ("fake", Options(timeout=3))}
    before = dict(override)
    for _ in range(2):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES, backend_override=override)
        assert override == before
        assert mesh.get_group("dp").backend == "fake"
        assert mesh.get_group("tp").timeout == 3


@pytest.mark.parametrize(
    ("override", "backend", "timeout"),
    [
        (None, "gloo", 1800),
        ("fake", "fake", 1800),
        ("cpu:fake,cuda:nccl", "fake", 1800),
        (Options(), "gloo", 1800),
        (Options("fake"), "fake", 1800),
        (Options(timeout=7), "gloo", 7),
        (Options("fake", datetime.timedelta(seconds=2)), "fake", 2),
        (GlooOptions(timeout=5), "gloo", 5),
        (("fake", None), "fake", 1800),
        (("fake", Options(timeout=7)), "fake", 7),
        (["fake", Options("gloo", 7)], "fake", 7),
        ((None, Options("fake", 7)), "fake", 7),
        ((None, None), "gloo", 1800),
        (TorchOptions(datetime.timedelta(seconds=9)), "gloo", 9),
        (TorchOptions(datetime.timedelta(seconds=9), "fake"), "fake", 9),
        (("gloo", TorchOptions(datetime.timedelta(seconds=9), "")), "gloo", 9),
    ],
)
def test_override_value(world, override, backend, timeout):
    by_dict = init_device_mesh("cpu", (2, 4), backend_override={1: override})
    by_tuple = DeviceMesh(
        "cpu", np.arange(8).reshape(2, 4), backend_override=((None, None), override)
    )
    for mesh in (by_dict, by_tuple):
        group = mesh.get_group(1)
        assert (group.backend, group.timeout) == (backend, timeout)
        assert (mesh.get_group(0).backend, mesh.get_group(0).timeout) == ("gloo", 1800)


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [
        (None, (1800, 1800)),
        (5, (5, 5)),
        (0.25, (0.25, 0.25)),
        (datetime.timedelta(minutes=1), (60, 60)),
        (float("inf"), (None, None)),
        ({"tp": 5}, (1800, 5)),
        ({0: 4, "tp": 5}, (4, 5)),
        ({"dp": None}, (None, 1800)),
        ({}, (1800, 1800)),
    ],
)
def test_timeout(world, timeout, expected):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES, timeout=timeout)
    assert tuple(group.timeout for group in mesh.get_all_groups()) == expected
    assert mesh["dp"].get_group().timeout == expected[0]


def test_options_win_over_timeout(world):
    mesh = init_device_mesh(
        "cpu",
        (2, 4),
        mesh_dim_names=NAMES,
        timeout=5,
        backend_override={"tp": Options(timeout=9)},
    )
    assert mesh.get_group("dp").timeout == 5
    assert mesh.get_group("tp").timeout == 9


def test_options_object():
    assert Options("gloo", 3) == Options("gloo", 3)
    assert GlooOptions(3) == Options("gloo", 3)
    assert hash(GlooOptions(3)) == hash(Options("gloo", 3))
    assert Options() != Options("gloo")
    assert Options() != 3
    assert repr(Options("fake", 3)) == "Options(backend='fake', timeout=3)"
    with pytest.raises(TypeError, match="backend must be a name or None, got 3"):
        Options(3)

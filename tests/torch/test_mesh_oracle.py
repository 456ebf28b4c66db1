"""Our DeviceMesh against torch's, side by side in one process.

torch runs over its fake process group and ours in a simulated world, as the same rank of
the same world. Each step is done on both and everything that a mesh answers is compared:
text, shape, layout, ranks, coordinates, group ranks, and the type and words of errors.
Where we differ on purpose the test says so by name.
"""

import contextlib
import copy
import math
import pickle
import re
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import devicemesh

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
theirs = pytest.importorskip("torch.distributed.device_mesh")
ours = devicemesh.device_mesh


@contextlib.contextmanager
def worlds(size, rank):
    """The same rank of the same world, in torch and here."""
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=size)
    try:
        with devicemesh.simulate(world_size=size, rank=rank), warnings.catch_warnings():
            # torch warns of things that it will take away; we do not
            warnings.simplefilter("ignore")
            yield
    finally:
        dist.destroy_process_group()


def facts(mesh):
    """Everything comparable that a mesh says."""
    coordinate = mesh.get_coordinate()
    ranks = None
    with contextlib.suppress(RuntimeError):
        ranks = mesh.mesh.tolist()
    return {
        "repr": repr(mesh),
        "device_type": mesh.device_type,
        "names": mesh.mesh_dim_names,
        "ndim": mesh.ndim,
        "shape": tuple(mesh.shape),
        "size": mesh.size(),
        "sizes": [mesh.size(d) for d in range(mesh.ndim)],
        "rank": mesh.get_rank(),
        "coordinate": coordinate,
        "member": mesh._is_current_rank_part_of_mesh(),
        "ranks": ranks,
        "root ranks": tuple(mesh._flatten_rank_map),
        "is root": mesh._get_root_mesh() == mesh,
        "root": repr(mesh._get_root_mesh()),
        "flattened": sorted(mesh._get_root_mesh()._flatten_mapping),
    }


def group_ranks(group):
    if isinstance(group, devicemesh.ProcessGroup):
        return list(group.ranks)
    return dist.get_process_group_ranks(group)


def same(their_mesh, our_mesh, groups=True):
    assert facts(our_mesh) == facts(their_mesh)
    if groups and their_mesh.get_coordinate() is not None:
        assert [group_ranks(group) for group in our_mesh.get_all_groups()] == [
            group_ranks(group) for group in their_mesh.get_all_groups()
        ]


def same_members(their_mesh, our_mesh):
    """The groups' ranks in any order: torch sorts them, here they keep the mesh's."""
    if their_mesh.get_coordinate() is not None:
        assert [sorted(group_ranks(group)) for group in our_mesh.get_all_groups()] == [
            sorted(group_ranks(group)) for group in their_mesh.get_all_groups()
        ]


def outcome(act, *arguments):
    """The result of an action, or the type and words of its error."""
    try:
        return act(*arguments), None, None
    except Exception as error:
        words = " ".join(str(argument) for argument in error.args)
        return None, type(error), words


def words_of(text):
    return re.findall(r"\w+", text)


def both_fail(their_act, our_act, but=()):
    """The same type of error, and all of torch's words in ours, in that order."""
    _, their_type, their_text = outcome(their_act)
    _, our_type, our_text = outcome(our_act)
    assert their_type is not None
    assert our_type is their_type, our_text
    remaining = iter(words_of(our_text))
    for word in words_of(their_text):
        if word not in but:
            assert word in remaining, f"{word!r}: {our_text!r} against {their_text!r}"


SHAPES = [((8,), ("world",)), ((2, 4), ("dp", "tp")), ((2, 2, 2), ("pp", "dp", "tp"))]


@pytest.mark.parametrize("rank", [0, 5, 7])
@pytest.mark.parametrize(("shape", "names"), [*SHAPES, ((2, 1, 4), None), ((1, 8, 1), None)])
def test_init_device_mesh(shape, names, rank):
    with worlds(8, rank):
        same(
            theirs.init_device_mesh("cpu", shape, mesh_dim_names=names),
            ours.init_device_mesh("cpu", shape, mesh_dim_names=names),
        )


@pytest.mark.parametrize("rank", range(6))
@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [[0, 1], [4, 5]], [[[2]], [[3]]], [5]])
def test_listed_ranks(ranks, rank):
    with worlds(6, rank):
        same(theirs.DeviceMesh("cpu", ranks), ours.DeviceMesh("cpu", ranks))
        tensor = torch.tensor(ranks)
        same(theirs.DeviceMesh("cpu", tensor), ours.DeviceMesh("cpu", tensor))
        assert ours.DeviceMesh("cpu", tensor) == ours.DeviceMesh("cpu", ranks)


def test_tensors_of_all_kinds():
    with worlds(8, 3):
        whole = torch.arange(8, dtype=torch.int64).reshape(2, 4)
        for tensor in (whole, whole.int(), whole.short(), whole.byte(), whole.t(), whole[:, ::2]):
            their_mesh = theirs.DeviceMesh("cpu", tensor.contiguous())
            our_mesh = ours.DeviceMesh("cpu", tensor)
            assert our_mesh.mesh.tolist() == their_mesh.mesh.tolist() == tensor.tolist()
        with pytest.raises(TypeError, match="integer ranks"):
            ours.DeviceMesh("cpu", whole.float())


def test_rank_order_differs_on_purpose():
    """torch sorts the group and so lets coordinate and group rank disagree."""
    with worlds(4, 2):
        their_mesh = theirs.DeviceMesh("cpu", [3, 1, 0, 2])
        our_mesh = ours.DeviceMesh("cpu", [3, 1, 0, 2])
        same(their_mesh, our_mesh, groups=False)
        assert their_mesh.get_coordinate() == our_mesh.get_coordinate() == (3,)
        assert our_mesh.get_local_rank() == 3


@pytest.mark.parametrize("rank", range(8))
def test_slices(rank):
    with worlds(8, rank):
        their_mesh, our_mesh = (
            side.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
            for side in (theirs, ours)
        )
        keys = ["pp", "dp", "tp", ("pp", "dp"), ("pp", "tp"), ("dp", "tp"), ["pp", "tp"]]
        for key in keys:
            same(their_mesh[key], our_mesh[key])
        same(their_mesh["pp", "tp"]["tp"], our_mesh["pp", "tp"]["tp"])
        assert their_mesh["pp", "dp", "tp"] is their_mesh
        assert our_mesh["pp", "dp", "tp"] is our_mesh


@pytest.mark.parametrize("rank", range(8))
def test_flatten(rank):
    with worlds(8, rank):
        their_mesh, our_mesh = (
            side.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
            for side in (theirs, ours)
        )
        for key in [("pp", "dp"), ("pp", "tp"), ("dp", "tp"), ("pp", "dp", "tp"), "dp"]:
            same(their_mesh[key]._flatten(), our_mesh[key]._flatten())
        same(their_mesh["dp"]._flatten("data"), our_mesh["dp"]._flatten("data"))
        for key in ["pp_dp", ("pp_dp", "tp"), ("pp", "dp_tp"), "data", ("pp", "data")]:
            same(their_mesh[key], our_mesh[key])
        for name in ("pp_tp", "data", "pp"):
            assert group_ranks(our_mesh.get_group(name)) == group_ranks(their_mesh.get_group(name))
            assert our_mesh.get_local_rank(name) == their_mesh.get_local_rank(name)
        same(their_mesh["pp", "dp_tp"]._flatten("x"), our_mesh["pp", "dp_tp"]._flatten("x"))


@pytest.mark.parametrize("rank", range(0, 24, 5))
def test_unflatten(rank):
    with worlds(24, rank):
        their_mesh, our_mesh = (
            side.init_device_mesh("cpu", (24,), mesh_dim_names=("world",))
            for side in (theirs, ours)
        )
        their_split = their_mesh._unflatten(0, (2, 12), ("pp", "rest"))
        our_split = our_mesh._unflatten(0, (2, 12), ("pp", "rest"))
        same(their_split, our_split)
        same(
            their_split._unflatten("rest", (3, 1, 4), ("dp", "one", "tp")),
            our_split._unflatten("rest", (3, 1, 4), ("dp", "one", "tp")),
        )
        same(
            their_mesh._unflatten("world", (4, 6), ("a", "b"))["b"],
            our_mesh._unflatten("world", (4, 6), ("a", "b"))["b"],
        )


@pytest.mark.parametrize("rank", range(0, 24, 7))
def test_unflatten_a_non_adjacent_dim(rank):
    with worlds(24, rank):
        their_mesh, our_mesh = (
            side.init_device_mesh("cpu", (4, 3, 2), mesh_dim_names=("pp", "dp", "tp"))
            for side in (theirs, ours)
        )
        their_flat = their_mesh["pp", "tp"]._flatten()
        our_flat = our_mesh["pp", "tp"]._flatten()
        for sizes in [(4, 2), (2, 4), (8, 1), (2, 2, 2)]:
            names = tuple("abc"[: len(sizes)])
            same(their_flat._unflatten(0, sizes, names), our_flat._unflatten(0, sizes, names))


@pytest.mark.parametrize("rank", range(8))
def test_concatenate(rank):
    with worlds(8, rank):
        their_mesh, our_mesh = (
            side.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
            for side in (theirs, ours)
        )
        for names in [("dp", "tp"), ("tp", "pp"), ("dp",)]:
            same(
                theirs.DeviceMesh._concatenate([their_mesh[name] for name in names]),
                ours.DeviceMesh._concatenate([our_mesh[name] for name in names]),
            )
        their_all = theirs.DeviceMesh._concatenate([their_mesh["pp", "dp"], their_mesh["tp"]])
        our_all = ours.DeviceMesh._concatenate([our_mesh["pp", "dp"], our_mesh["tp"]])
        assert their_all == their_mesh
        assert our_all == our_mesh


@pytest.mark.parametrize("rank", range(8))
def test_from_group(rank):
    with worlds(8, rank):
        sides = []
        for side in (theirs, ours):
            mesh = side.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
            one = side.DeviceMesh.from_group(mesh.get_group("tp"), "cpu")
            named = side.DeviceMesh.from_group(mesh.get_group("tp"), "cpu", mesh_dim_names=("tp",))
            both = side.DeviceMesh.from_group(
                mesh.get_all_groups(), "cpu", mesh.mesh, mesh_dim_names=("dp", "tp")
            )
            assert both == mesh
            sides.append((one, named, both, both["dp"]))
        for their_mesh, our_mesh in zip(*sides, strict=True):
            same(their_mesh, our_mesh)


@pytest.mark.parametrize("rank", range(8))
def test_all_submeshes(rank):
    with worlds(8, rank):
        their_mesh, our_mesh = (
            side.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
            for side in (theirs, ours)
        )
        for name in ("dp", "tp"):
            pairs = zip(
                their_mesh._get_all_submeshes(name),
                our_mesh._get_all_submeshes(name),
                strict=True,
            )
            for their_line, our_line in pairs:
                same(their_line, our_line, groups=False)


def test_equality():
    with worlds(8, 0):

        def meshes(side):
            root = side.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
            wide = side.init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
            return [
                root,
                side.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")),
                side.init_device_mesh("cpu", (2, 4)),
                side.init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp")),
                side.DeviceMesh("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]], mesh_dim_names=("dp", "tp")),
                root["dp"],
                root["tp"],
                side.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("tp",)),
                side.DeviceMesh("cpu", [0, 1, 2, 3]),
                side.DeviceMesh("cpu", [0, 1, 2, 3]),
                wide,
                wide._unflatten(0, (2, 4), ("dp", "tp")),
                wide._unflatten(0, (2, 4), ("dp", "tp"))["tp"],
                root["dp", "tp"]._flatten("world"),
                side.DeviceMesh("cpu", [[0], [1]]),
                side.DeviceMesh("cpu", [[0, 1]]),
            ]

        table = [
            [[a == b for b in meshes_of_side] for a in meshes_of_side]
            for meshes_of_side in (meshes(theirs), meshes(ours))
        ]
        assert table[1] == table[0]
        side = meshes(ours)
        assert all(hash(a) == hash(b) for a in side for b in side if a == b)
        assert all((a._stable_hash() == b._stable_hash()) == (a == b) for a in side for b in side)


def test_copies():
    with worlds(8, 3):
        for side in (theirs, ours):
            mesh = side.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
            for clone in (copy.copy(mesh), copy.deepcopy(mesh), pickle.loads(pickle.dumps(mesh))):
                assert clone == mesh
                assert hash(clone) == hash(mesh)
                assert group_ranks(clone.get_group("dp")) == group_ranks(mesh.get_group("dp"))
                assert clone.get_group("dp") is mesh.get_group("dp")


def test_current_mesh():
    with worlds(8, 3):
        for side in (theirs, ours):
            mesh = side.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
            with mesh, mesh["dp"]:
                assert side._mesh_resources.get_current_mesh() == mesh["dp"]
            assert side._mesh_resources.mesh_stack == []
            assert side._mesh_resources.num_hosts("cpu") == 8
        both_fail(theirs._mesh_resources.get_current_mesh, ours._mesh_resources.get_current_mesh)


# --- errors -------------------------------------------------------------------------


def init(*arguments, **named):
    return lambda side: side.init_device_mesh(*arguments, **named)


def on_mesh(act):
    def run(side):
        mesh = side.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        mesh["pp", "dp"]._flatten()
        return act(mesh, side)

    return run


def without_names(act):
    return lambda side: act(side.init_device_mesh("cpu", (2, 4)), side)


@pytest.mark.parametrize(
    "act",
    [
        init("cpu", (5, 5)),
        init("cpu", (2, 4), mesh_dim_names=["dp", "dp"]),
        init("cpu", (8,), mesh_dim_names=["dp", "tp"]),
        init("cpu:0", (2, 4)),
        init("cuda:1", (2, 4)),
        init("cpu", (2, 4), mesh_dim_names=("a", "b"), backend_override={"a": "x", 0: "y"}),
        init("cpu", (2, 4), mesh_dim_names=("a", "b"), backend_override={"c": "x"}),
        init("cpu", (2, 4), backend_override={42: "x"}),
        lambda side: side.DeviceMesh("cpu", [0, 1], backend_override=((None, None),) * 2),
        on_mesh(lambda mesh, side: mesh["nothing"]),
        on_mesh(lambda mesh, side: mesh["tp", "pp"]),
        on_mesh(lambda mesh, side: mesh[("pp", "nothing")]),
        on_mesh(lambda mesh, side: mesh["pp", "tp"]["dp"]),
        on_mesh(lambda mesh, side: mesh["pp", "tp"]["pp_dp"]),
        on_mesh(lambda mesh, side: mesh["dp", "pp_dp"]),
        on_mesh(lambda mesh, side: mesh["pp", "pp"]),
        on_mesh(lambda mesh, side: mesh[0]),
        on_mesh(lambda mesh, side: mesh.get_group()),
        on_mesh(lambda mesh, side: mesh.get_local_rank()),
        on_mesh(lambda mesh, side: mesh.get_group("nothing")),
        on_mesh(lambda mesh, side: mesh.get_local_rank("nothing")),
        on_mesh(lambda mesh, side: mesh._get_mesh_dim_by_name("nothing")),
        on_mesh(lambda mesh, side: mesh.get_group(7)),
        on_mesh(lambda mesh, side: mesh.size(7)),
        on_mesh(lambda mesh, side: mesh._flatten("pp")),
        on_mesh(lambda mesh, side: mesh["dp", "tp"]._flatten("pp_dp")),
        on_mesh(lambda mesh, side: mesh._unflatten(3, (2, 1), ("a", "b"))),
        on_mesh(lambda mesh, side: mesh._unflatten("x", (2, 1), ("a", "b"))),
        on_mesh(lambda mesh, side: mesh._unflatten(0, (2, 1), ("a",))),
        on_mesh(lambda mesh, side: mesh._unflatten(0, (2, 3), ("a", "b"))),
        on_mesh(lambda mesh, side: mesh._get_all_submeshes("nothing")),
        on_mesh(
            lambda mesh, side: side.DeviceMesh._concatenate(
                [mesh["pp"], side.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))]
            )
        ),
        on_mesh(lambda mesh, side: side.DeviceMesh._concatenate([mesh["pp"], mesh["pp", "dp"]])),
        on_mesh(lambda mesh, side: side.DeviceMesh.from_group([], "cpu")),
        on_mesh(
            lambda mesh, side: side.DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh.mesh)
        ),
        on_mesh(
            lambda mesh, side: side.DeviceMesh.from_group(
                mesh.get_all_groups(), "cpu", [0, 1], mesh_dim_names=("a", "b", "c")
            )
        ),
        on_mesh(
            lambda mesh, side: side.DeviceMesh.from_group(
                mesh.get_group("tp"), "cpu", [[0, 1], [2, 3]]
            )
        ),
        without_names(lambda mesh, side: mesh["dp"]),
        without_names(lambda mesh, side: mesh._flatten()),
        without_names(lambda mesh, side: mesh.get_group("dp")),
        lambda side: side.DeviceMesh("cpu", [0, 1, 2], _init_backend=False, _rank=1).get_group(),
    ],
)
def test_errors(act):
    """The same type; torch's words, but for the spelling of `int`, in the same order."""
    with worlds(8, 1):
        _, their_type, their_text = outcome(act, theirs)
        assert their_type is not None
        # our index errors say which index and mesh; torch's are those of its lists
        if their_type is IndexError or their_text == "'int' object is not iterable":
            assert outcome(act, ours)[1] is their_type
        else:
            both_fail(lambda: act(theirs), lambda: act(ours))


@pytest.mark.parametrize(
    ("act", "their_type", "our_type"),
    [
        # refused here, taken or misunderstood there
        (init("banana", (2, 4)), None, ValueError),
        (init("cpu", (2, 4), mesh_dim_names=(0, 1)), None, TypeError),
        (lambda side: side.DeviceMesh("cpu", [0.0, 1.0]), None, TypeError),
        (
            lambda side: side.DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a",)),
            IndexError,
            RuntimeError,
        ),
        (
            on_mesh(lambda mesh, side: mesh._unflatten(0, (2, 1), ("tp", "x"))),
            None,
            RuntimeError,
        ),
        # taken here, refused there
        (init("cpu", (2, -1)), RuntimeError, None),
        (init("cpu", {"dp": 2, "tp": 4}), TypeError, None),
        (init(torch.device("cpu"), (2, 4)), AttributeError, None),
        (on_mesh(lambda mesh, side: mesh.size("tp")), TypeError, None),
        (on_mesh(lambda mesh, side: mesh._unflatten(-1, (2, 1), ("a", "b"))), Exception, None),
        # another type: the error is clear on every rank
        (lambda side: side.DeviceMesh("cpu", [[1, 1]]), Exception, ValueError),
        (on_mesh(lambda mesh, side: mesh.get_group(("pp", "dp"))), AssertionError, TypeError),
        (
            without_names(lambda mesh, side: mesh._unflatten(0, (2,), ("a",))),
            TypeError,
            RuntimeError,
        ),
    ],
)
def test_differs_on_purpose(act, their_type, our_type):
    with worlds(8, 1):
        _, seen_theirs, _ = outcome(act, theirs)
        _, seen_ours, text = outcome(act, ours)
        assert (seen_theirs is None) == (their_type is None), seen_theirs
        assert seen_theirs is None or issubclass(seen_theirs, their_type)
        assert seen_ours is our_type, text


def test_a_rank_outside_says_so_on_purpose():
    """torch has no slices there, and answers with an IndexError from a list of groups."""
    with worlds(8, 5):
        their_mesh = theirs.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        our_mesh = ours.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        same(their_mesh, our_mesh)
        assert our_mesh["tp"].shape == (2,)
        assert their_mesh._dim_group_names == our_mesh._dim_group_names == []
        both_fail(lambda: their_mesh["tp"], lambda: our_mesh["tp"].mesh)
        assert outcome(lambda: their_mesh.get_group("tp"))[1] is IndexError
        with pytest.raises(RuntimeError, match="rank 5 is not in the mesh"):
            our_mesh.get_group("tp")


# --- any sequence of steps ----------------------------------------------------------


@st.composite
def plans(draw):
    """A shape and a list of steps, each a choice of dims or sizes."""
    shape = draw(
        st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=4).filter(
            lambda sizes: math.prod(sizes) <= 24
        )
    )
    rank = draw(st.integers(0, math.prod(shape) - 1))
    steps = draw(st.lists(st.tuples(st.sampled_from("sfuc"), st.integers(0, 10**6)), max_size=5))
    return tuple(shape), rank, steps


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def step(side, mesh, kind, choice, serial):
    """One step on a mesh: deterministic in `choice`, so both sides do the same."""
    names = mesh.mesh_dim_names
    if kind == "s":
        picked = tuple(name for i, name in enumerate(names) if choice >> i & 1) or names[:1]
        return mesh[picked]
    if kind == "f":
        return mesh._flatten(f"flat{serial}")
    if kind == "u":
        dim = choice % mesh.ndim
        sizes = divisors(mesh.size(dim))
        first = sizes[choice // 7 % len(sizes)]
        return mesh._unflatten(
            dim, (first, mesh.size(dim) // first), (f"u{serial}a", f"u{serial}b")
        )
    turn = choice // 2 % len(names)
    order = (names[turn:] + names[:turn])[:: -1 if choice % 2 else 1]
    order = order[: 1 + choice // 11 % len(order)]
    return side.DeviceMesh._concatenate([mesh[name] for name in order])


@settings(deadline=None)
@given(plans())
@example(((2, 2), 0, [("c", 13), ("f", 0)]))  # dims in another order, flattened
def test_any_steps(plan):
    shape, rank, steps = plan
    names = tuple(f"d{i}" for i in range(len(shape)))
    with worlds(math.prod(shape), rank):
        their_mesh = theirs.init_device_mesh("cpu", shape, mesh_dim_names=names)
        our_mesh = ours.init_device_mesh("cpu", shape, mesh_dim_names=names)
        for serial, (kind, choice) in enumerate(steps):
            what = (kind, choice, serial)
            their_next, their_type, text = outcome(step, theirs, their_mesh, *what)
            our_next, our_type, our_text = outcome(step, ours, our_mesh, *what)
            assert our_type is their_type, (kind, text, our_text)
            if their_next is not None:
                same(their_next, our_next, groups=False)
                same_members(their_next, our_next)
                their_mesh, our_mesh = their_next, our_next

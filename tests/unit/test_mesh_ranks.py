"""Ranks by coordinate and coordinates by rank: what is refused, and the corners.

That the answers are right is test_mesh_numpy.py's.
"""

import numpy as np
import pytest

import devicemesh
from devicemesh import DeviceMesh, init_device_mesh


@pytest.fixture
def mesh():
    """Rank 5 at (1, 1) of a (2, 4) mesh."""
    with devicemesh.simulate(world_size=8, rank=5):
        return init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


@pytest.fixture
def outside():
    """Rank 5 outside a mesh of four."""
    with devicemesh.simulate(world_size=8, rank=5):
        return DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))


@pytest.mark.parametrize("rank", [1.0, "1", None, (1, 1)])
def test_rank_must_be_an_int(mesh, rank):
    with pytest.raises(TypeError, match="rank must be an int, got"):
        mesh.coordinate_of(rank)
    if rank is not None:
        with pytest.raises(TypeError, match="rank must be an int, got"):
            mesh.ranks("dp", rank)


@pytest.mark.parametrize("rank", [-1, 2**31, 10**30])
def test_rank_out_of_range(mesh, rank):
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.2147483647, got"):
        mesh.coordinate_of(rank)


@pytest.mark.parametrize(
    ("args", "indices", "error", "text"),
    [
        ((), {"pp": 0}, KeyError, "Mesh dimension 'pp' does not exist.*'dp', 'tp'"),
        ((0,), {}, TypeError, "one index for each of the 2 dims, .* got 1"),
        ((0, 0, 0), {}, TypeError, "got 3"),
        ((0, 1), {"dp": 0}, TypeError, "by position or by name, not both"),
        ((0, 4), {}, ValueError, r"tp must be in 0\.\.3, got 4"),
        ((), {"dp": -1}, ValueError, r"dp must be in 0\.\.1, got -1"),
        ((), {"dp": 0.0}, TypeError, "dp must be an int, got 0.0"),
        (((0, 1),), {}, TypeError, "got 1"),
    ],
)
def test_bad_rank_at(mesh, args, indices, error, text):
    with pytest.raises(error, match=text):
        mesh.rank_at(*args, **indices)


@pytest.mark.parametrize(
    ("dim", "rank", "error", "text"),
    [
        ("pp", None, KeyError, "'pp' does not exist"),
        (2, None, IndexError, "out of range"),
        ((), None, ValueError, r"dim must be 1 to 64 dims, got \(\)"),
        ((0,) * 65, None, ValueError, "dim must be 1 to 64 dims"),
        (("dp", "dp"), None, ValueError, r"the dims \('dp', 'dp'\) overlap"),
        ("dp", 8, ValueError, r"rank 8 is not in the mesh DeviceMesh\(\(dp=2, tp=4\)"),
        (None, 8, ValueError, "rank 8 is not in the mesh"),
        (1.5, None, TypeError, "must be a dim's name or index"),
    ],
)
def test_bad_ranks(mesh, dim, rank, error, text):
    with pytest.raises(error, match=text):
        mesh.ranks(dim, rank)


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        ((), TypeError, "missing the argument 'dim'"),
        (("pp",), KeyError, "'pp' does not exist"),
        (("dp", 1.0), TypeError, "n must be an int, got 1.0"),
        (("dp", 2**40), ValueError, "n must be in"),
        (("dp", 1, True, 4), TypeError, "takes at most 3"),
    ],
)
def test_bad_shift(mesh, args, error, text):
    with pytest.raises(error, match=text):
        mesh.shift(*args)


def test_outside(outside):
    """Facts about others can be asked for; what needs an own place cannot."""
    assert not outside.is_member
    assert outside.coordinate_of(5) is None
    assert 5 not in outside
    assert outside.coordinate_of(0) == (1, 0)
    assert outside.rank_at(dp=0, tp=1) == 1
    assert outside.ranks() == (3, 1, 0, 2)
    assert outside.ranks("dp", rank=1) == (1, 2)
    for ask in (lambda: outside.ranks("dp"), lambda: outside.shift("dp")):
        with pytest.raises(RuntimeError, match="rank 5 is not in the mesh"):
            ask()
    with pytest.raises(RuntimeError, match="no coordinate to fill in"):
        outside.rank_at(dp=0)
    part = outside["tp"]
    assert part.coordinate_of(3) is None  # it is in no line of its own
    assert part.ranks(rank=3) == (3, 1)
    for ask in (part.ranks, lambda: part.rank_at(0)):
        with pytest.raises(RuntimeError, match="rank 5 is in no slice"):
            ask()


def test_a_slice_has_its_own_line_only(mesh):
    part = mesh["tp"]
    assert part.coordinate_of(5) == (1,)
    assert part.coordinate_of(1) is None
    assert [rank for rank in range(8) if rank in part] == [4, 5, 6, 7]
    assert part.rank_at(0) == part.rank_at(tp=0) == 4
    assert part.ranks("tp", rank=1) == (0, 1, 2, 3)


def test_flattened_dims(mesh):
    mesh.flatten()
    assert mesh.ranks("dp_tp") == tuple(range(8))
    assert mesh["tp"].shift("dp_tp", -5) == 0
    assert mesh.shift("dp_tp", 3) is None


def test_no_group_is_made(mesh):
    """None of it asks a group, so it works without a backend and after close."""
    with devicemesh.simulate(world_size=8, rank=5):
        bare = DeviceMesh("cpu", np.arange(8).reshape(2, 4), _init_backend=False)
    assert bare.ranks(1) == (4, 5, 6, 7)
    assert bare.shift(0, -1) == 1
    mesh.close()
    assert mesh.ranks("tp") == (4, 5, 6, 7)


def test_names_are_not_in_a_mesh(mesh):
    with pytest.raises(TypeError, match="a mesh contains ranks, got 'dp'"):
        "dp" in mesh  # noqa: B015
    with pytest.raises(TypeError, match="rank must be an int"):
        1.5 in mesh  # noqa: B015


def test_a_million_ranks():
    with devicemesh.simulate(world_size=1 << 20, rank=77_777):
        mesh = init_device_mesh("cpu", (32, 32, 32, 32), mesh_dim_names=("a", "b", "c", "d"))
    assert mesh.rank_at(*mesh.coordinate_of(1_000_000)) == 1_000_000
    assert mesh.shift("a", 1) == 77_777 + 32**3
    assert len(mesh.ranks("d", rank=0)) == 32

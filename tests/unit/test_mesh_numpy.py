"""Meshes against numpy: every rank's coordinates, slices and groups by array arithmetic."""

import math
import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import devicemesh
from devicemesh import DeviceMesh, init_device_mesh

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= 48)


def names_of(ndim):
    return tuple("abcdefgh"[:ndim])


@st.composite
def meshes(draw):
    """A shape, an array of unique ranks of that shape, and this process's rank."""
    shape = tuple(draw(SHAPES))
    count = math.prod(shape)
    world = draw(st.integers(count, count + 5))
    ranks = draw(st.permutations(range(world)))[:count]
    if draw(st.booleans()):
        ranks = range(count)
    return np.array(ranks).reshape(shape), world, draw(st.integers(0, world - 1))


def coordinate_of(array, rank):
    found = np.argwhere(array == rank)
    return tuple(int(i) for i in found[0]) if len(found) else None


def line(array, coordinate, dims):
    """The sub-array of `dims` that holds the coordinate."""
    return array[tuple(slice(None) if d in dims else c for d, c in enumerate(coordinate))]


@given(meshes())
def test_facts(case):
    array, world, rank = case
    with devicemesh.simulate(world_size=world, rank=rank):
        mesh = DeviceMesh("cpu", array, mesh_dim_names=names_of(array.ndim))
        assert mesh.shape == array.shape
        assert mesh.size() == array.size
        assert mesh.mesh.tolist() == array.tolist()
        assert mesh.get_coordinate() == coordinate_of(array, rank)
        assert mesh._flatten_rank_map == tuple(array.flatten().tolist())


@given(meshes(), st.data())
def test_slices(case, data):
    array, world, rank = case
    coordinate = coordinate_of(array, rank)
    dims = sorted(data.draw(st.sets(st.integers(0, array.ndim - 1), min_size=1)))
    names = names_of(array.ndim)
    with devicemesh.simulate(world_size=world, rank=rank):
        mesh = DeviceMesh("cpu", array, mesh_dim_names=names)
        view = mesh[tuple(names[d] for d in dims)]
        assert view.shape == tuple(array.shape[d] for d in dims)
        if coordinate is None:
            assert view.get_coordinate() is None
            return
        part = line(array, coordinate, dims)
        assert view.mesh.tolist() == part.tolist()
        assert view.get_coordinate() == tuple(coordinate[d] for d in dims)
        for d, group in zip(dims, view.get_all_groups(), strict=True):
            assert list(group.ranks) == line(array, coordinate, [d]).tolist()
            assert group.rank() == coordinate[d]
            assert group is mesh.get_group(d)


@given(meshes(), st.data())
def test_flatten(case, data):
    array, world, rank = case
    coordinate = coordinate_of(array, rank)
    dims = sorted(data.draw(st.sets(st.integers(0, array.ndim - 1), min_size=1)))
    names = names_of(array.ndim)
    with devicemesh.simulate(world_size=world, rank=rank):
        mesh = DeviceMesh("cpu", array, mesh_dim_names=names)
        flat = mesh[tuple(names[d] for d in dims)].flatten("flat")
        assert flat.shape == (math.prod(array.shape[d] for d in dims),)
        if coordinate is None:
            assert flat.get_coordinate() is None
            return
        part = line(array, coordinate, dims).flatten()
        assert flat.mesh.tolist() == part.tolist()
        assert list(flat.get_group().ranks) == part.tolist()
        assert flat.get_coordinate() == coordinate_of(part, rank)


@given(SHAPES, st.data())
def test_unflatten(shape, data):
    count = math.prod(shape)
    rank = data.draw(st.integers(0, count - 1))
    with devicemesh.simulate(world_size=count, rank=rank):
        mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("world",))
        split = mesh.unflatten("world", shape, names_of(len(shape)))
        expected = init_device_mesh("cpu", shape, mesh_dim_names=names_of(len(shape)))
        assert split == expected
        assert hash(split) == hash(expected)
        assert split.get_coordinate() == expected.get_coordinate()
        assert split.mesh.tolist() == np.arange(count).reshape(shape).tolist()


@given(meshes(), st.data())
def test_concatenate(case, data):
    array, world, rank = case
    names = names_of(array.ndim)
    order = data.draw(st.permutations(range(array.ndim)))
    coordinate = coordinate_of(array, rank)
    with devicemesh.simulate(world_size=world, rank=rank):
        mesh = DeviceMesh("cpu", array, mesh_dim_names=names)
        turned = DeviceMesh.concatenate([mesh[names[d]] for d in order])
        assert turned.mesh.tolist() == array.transpose(order).tolist()
        if coordinate is not None:
            assert turned.get_coordinate() == tuple(coordinate[d] for d in order)


@given(meshes(), st.data())
def test_coordinates_and_ranks(case, data):
    """coordinate_of, rank_at, ranks and shift, of the mesh and of a slice of it."""
    array, world, rank = case
    names = names_of(array.ndim)
    with devicemesh.simulate(world_size=world, rank=rank):
        mesh = DeviceMesh("cpu", array, mesh_dim_names=names)
        dims = sorted(data.draw(st.sets(st.integers(0, array.ndim - 1), min_size=1)))
        coordinate = coordinate_of(array, rank)
        assert mesh.is_member == (coordinate is not None)
        if coordinate is not None and data.draw(st.booleans()):
            mesh, array = mesh[tuple(names[d] for d in dims)], line(array, coordinate, dims)
            names, coordinate = mesh.mesh_dim_names, coordinate_of(array, rank)
        assert mesh.ranks() == tuple(array.flatten().tolist())
        for other in range(world):
            found = coordinate_of(array, other)
            assert mesh.coordinate_of(other) == found
            assert (other in mesh) == (found is not None)
            if found is not None:
                assert mesh.rank_at(*found) == other
                assert mesh.rank_at(**dict(zip(names, found, strict=True))) == other
                order = data.draw(st.permutations(range(array.ndim)))
                some = order[: data.draw(st.integers(1, array.ndim))]
                rest = [d for d in range(array.ndim) if d not in some]
                along = array.transpose([*rest, *some])[tuple(found[d] for d in rest)]
                expected = tuple(along.flatten().tolist())
                assert mesh.ranks(tuple(names[d] for d in some), other) == expected
                assert mesh.ranks(tuple(some), rank=np.int64(other)) == expected
        if coordinate is not None:
            dim = data.draw(st.integers(0, array.ndim - 1))
            assert mesh.ranks(dim) == tuple(line(array, coordinate, [dim]).tolist())
            steps = data.draw(st.integers(-9, 9))
            place = list(coordinate)
            place[dim] = (place[dim] + steps) % array.shape[dim]
            assert mesh.shift(dim, steps, wrap=True) == array[tuple(place)]
            inside = 0 <= coordinate[dim] + steps < array.shape[dim]
            assert mesh.shift(names[dim], steps) == (array[tuple(place)] if inside else None)
            index = data.draw(st.integers(0, array.shape[dim] - 1))
            place = list(coordinate)
            place[dim] = index
            assert mesh.rank_at(**{names[dim]: index}) == array[tuple(place)]


@st.composite
def selections(draw, size):
    """What select() takes for a dim of that size, never empty."""
    kind = draw(st.sampled_from(["slice", "list", "index"]))
    if kind == "index":
        return draw(st.integers(-size, size - 1))
    if kind == "list":
        order = draw(st.permutations(range(size)))
        return order[: draw(st.integers(1, size))]
    return draw(st.slices(size).filter(lambda s: len(range(size)[s]) > 0))


@given(meshes(), st.data())
def test_select(case, data):
    """Against numpy's own indexing; the result is a mesh like one made of those ranks."""
    array, world, rank = case
    names = names_of(array.ndim)
    dims = data.draw(st.sets(st.integers(0, array.ndim - 1)))
    chosen = {d: data.draw(selections(array.shape[d])) for d in dims}
    if array.ndim and all(isinstance(chosen.get(d), int) for d in range(array.ndim)):
        chosen.pop(0)
    expected = array
    for d in sorted(chosen, reverse=True):  # from behind, as an index takes its dim away
        expected = expected[(slice(None),) * d + (chosen[d],)]
    left = tuple(n for d, n in enumerate(names) if not isinstance(chosen.get(d), int))
    with devicemesh.simulate(world_size=world, rank=rank):
        mesh = DeviceMesh("cpu", array, mesh_dim_names=names)
        by_name = {names[d]: value for d, value in chosen.items()}
        part = mesh.select(**by_name)
        assert part is mesh.select(chosen)
        assert part.mesh.tolist() == expected.tolist()
        assert part.mesh_dim_names == left
        assert part.get_coordinate() == coordinate_of(expected, rank)
        same = DeviceMesh("cpu", expected, mesh_dim_names=left)
        assert part == same
        assert hash(part) == hash(same)
        if part.is_member:
            for name in left:
                group = part.get_group(name)
                assert tuple(group.ranks) == part.ranks(name) == same.ranks(name)
                assert (group is mesh.get_group(name)) == (part.ranks(name) == mesh.ranks(name))
        back = pickle.loads(pickle.dumps(part))
        assert back == part
        assert back.get_rank() == rank
        again = part.select({0: [0]})
        assert again.mesh.tolist() == expected[:1].tolist()


@given(meshes(), st.data())
def test_permute(case, data):
    array, world, rank = case
    names = names_of(array.ndim)
    order = data.draw(st.permutations(range(array.ndim)))
    expected = array.transpose(order)
    with devicemesh.simulate(world_size=world, rank=rank):
        mesh = DeviceMesh("cpu", array, mesh_dim_names=names)
        view = mesh.permute(*order)
        assert view is mesh.permute(*(names[d] for d in order))
        assert view.permute(*names) is mesh
        assert view.mesh.tolist() == expected.tolist()
        assert view.mesh_dim_names == tuple(names[d] for d in order)
        assert view.get_coordinate() == coordinate_of(expected, rank)
        assert pickle.loads(pickle.dumps(view)) == view
        dims = sorted(data.draw(st.sets(st.integers(0, array.ndim - 1), min_size=1)))
        part = view[tuple(view.mesh_dim_names[d] for d in dims)]
        if view.is_member:
            assert part.mesh.tolist() == line(expected, view.get_coordinate(), dims).tolist()
            for name in names:
                assert view.get_group(name) is mesh.get_group(name)
            if array.ndim > 1:
                flat = view.flatten("flat")
                assert flat.mesh.tolist() == expected.flatten().tolist()
                assert list(flat.get_group().ranks) == expected.flatten().tolist()

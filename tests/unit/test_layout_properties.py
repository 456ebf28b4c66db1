"""Layouts against numpy: a layout means what an array of offsets with its shape means."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_strategies import dims_of_factors, shapes, some_dims, splits
from native import Layout, NativeError, Ranks


def array_of(layout):
    """The offsets of a layout as an array of its shape."""
    return np.array(layout.offsets()).reshape(layout.shape)


def array_of_dims(dims):
    """The same from the factors, by outer sums."""
    array = np.zeros((), np.int64)
    for dim in dims:
        line = np.zeros((), np.int64)
        for size, stride in dim:
            line = np.add.outer(line, np.arange(size) * stride)
        array = np.add.outer(array, line.ravel())
    return array


def assert_canonical(layout):
    for dim in layout.dims:
        assert all(size > 1 for size, _ in dim)
        assert all(a[1] != b[0] * b[1] for a, b in itertools.pairwise(dim))


@st.composite
def views(draw):
    """A row-major layout after some operations, and the same done to an array."""
    shape = draw(shapes())
    layout = Layout.row_major(shape)
    array = np.arange(math.prod(shape)).reshape(shape)
    for step in draw(st.lists(st.sampled_from("sffuuc"), max_size=4)):
        if step == "s":
            dims = draw(some_dims(layout.ndim))
            layout = layout.select(dims)
            rest = [d for d in range(array.ndim) if d not in dims]
            array = array.transpose([*dims, *rest])
            array = array[(..., *[0] * len(rest))]
        elif step == "f":
            layout = layout.flatten()
            array = array.reshape(-1)
        elif step == "u" and layout.ndim > 0:
            dim = draw(st.integers(0, layout.ndim - 1))
            sizes = draw(splits(layout.shape[dim]))
            try:
                layout = layout.unflatten(dim, sizes)
            except NativeError:
                continue
            array = array.reshape(*array.shape[:dim], *sizes, *array.shape[dim + 1 :])
        elif step == "c":
            # Some dims, then the others: a transpose.
            dims = draw(some_dims(layout.ndim))
            rest = [d for d in range(layout.ndim) if d not in dims]
            layout = Layout.concatenate([layout.select(dims), layout.select(rest)])
            array = array.transpose([*dims, *rest])
    return layout, array, math.prod(shape)


# --- meaning -------------------------------------------------------------------------------


@given(shapes())
def test_row_major(shape):
    layout = Layout.row_major(shape)
    array = np.arange(math.prod(shape), dtype=np.int8).reshape(shape)
    assert layout.shape == shape
    assert layout.numel == layout.cosize == array.size
    assert layout.is_orthogonal
    assert layout.is_sorted
    for d, dim in enumerate(layout.dims):
        assert dim == (((shape[d], array.strides[d]),) if shape[d] > 1 else ())


@given(views())
def test_views(view):
    layout, array, _ = view
    assert layout.shape == array.shape
    assert layout.numel == array.size
    assert layout.cosize == array.max() + 1
    assert layout.is_orthogonal
    assert (array_of(layout) == array).all()
    assert (array_of_dims(layout.dims) == array).all()
    assert_canonical(layout)


@given(dims_of_factors())
def test_factors(dims):
    layout = Layout.from_dims(dims)
    array = array_of_dims(dims)
    assert layout.shape == array.shape
    assert (array_of(layout) == array).all()
    assert layout.cosize == array.max() + 1
    assert_canonical(layout)
    flat = layout.flatten()
    assert_canonical(flat)
    assert (array_of(flat) == array.ravel()).all()
    assert (layout.is_orthogonal, layout.is_sorted) == (flat.is_orthogonal, flat.is_sorted)
    if layout.is_orthogonal:
        assert np.unique(array).size == array.size


@given(dims_of_factors(), dims_of_factors())
def test_equal_means_equal(first, second):
    """Layouts are equal where they mean the same, and only there."""
    a, b = Layout.from_dims(first), Layout.from_dims(second)
    same = a.shape == b.shape and a.offsets() == b.offsets()
    assert (a == b) == same
    if same:
        assert hash(a) == hash(b)


@given(views())
def test_made_again_is_equal(view):
    layout, array, _ = view
    for again in (layout.copy(), Layout.from_dims(layout.dims), Layout.concatenate([layout])):
        assert again == layout
        assert hash(again) == hash(layout)
    assert layout.select(range(layout.ndim)) == layout
    if layout.ndim == 1:
        assert layout.flatten() == layout
    assert layout == layout.select(range(layout.ndim))
    if array.size == 1:
        assert layout.dims == ((),) * layout.ndim


@given(views())
def test_one_factor_where_numpy_needs_no_copy(view):
    layout, array, numel = view
    # The same view again, of memory: strides in elements.
    memory = np.lib.stride_tricks.as_strided(
        np.zeros(numel + 1, np.int8),
        [size for dim in layout.dims for size, _ in dim],
        [stride for dim in layout.dims for _, stride in dim],
    )
    flat = layout.flatten()
    assert (len(flat.dims[0]) <= 1) == np.shares_memory(memory, memory.reshape(-1))
    assert (array_of(flat) == array.ravel()).all()


# --- unflatten --------------------------------------------------------------------------------


@given(st.data())
def test_unflatten_where_it_can_be(data):
    """A dim splits exactly where the offsets of the split are sums of one offset per new
    dim; and then the result is numpy's reshape."""
    layout = data.draw(views())[0].flatten()
    sizes = data.draw(splits(layout.numel))
    reshaped = np.array(layout.offsets()).reshape(sizes)
    sums = np.zeros((), np.int64)
    for d in range(reshaped.ndim):
        line = [0] * reshaped.ndim
        line[d] = slice(None)
        sums = np.add.outer(sums, reshaped[tuple(line)])
    if (sums == reshaped).all():
        split = layout.unflatten(0, sizes)
        assert (array_of(split) == reshaped).all()
        assert_canonical(split)
        assert split.flatten() == layout
    else:
        with pytest.raises(NativeError, match="does not split evenly"):
            layout.unflatten(0, sizes)


@given(views(), st.data())
def test_unflatten_leaves_other_dims(view, data):
    layout, array, _ = view
    if layout.ndim == 0:
        return
    dim = data.draw(st.integers(0, layout.ndim - 1))
    ones = layout.unflatten(dim, [1, layout.shape[dim], 1])
    assert ones.dims == (*layout.dims[:dim], (), layout.dims[dim], (), *layout.dims[dim + 1 :])
    assert array_of(ones).ravel().tolist() == array.ravel().tolist()


# --- coordinates ------------------------------------------------------------------------------


@given(views())
def test_coordinates(view):
    layout, array, _ = view
    for coordinate in np.ndindex(array.shape):
        offset = int(array[coordinate])
        assert layout.coordinate(offset) == coordinate
        assert layout.offset(coordinate) == offset
        assert layout.base(offset) == 0


@given(views())
def test_siblings_tile_the_root(view):
    """The bases are those of the siblings, ascending; each offset of the root belongs to one
    sibling, and coordinate and base find the way from it."""
    layout, array, numel = view
    complement = layout.complement(numel)
    bases = complement.offsets()
    assert complement.ndim == 1
    assert bases == sorted(bases)
    every = [base + offset for base in bases for offset in array.ravel().tolist()]
    assert sorted(every) == list(range(numel))
    for base in bases:
        assert layout.offsets(base) == [base + offset for offset in array.ravel().tolist()]
        for coordinate in np.ndindex(array.shape):
            offset = base + int(array[coordinate])
            assert layout.base(offset) == base
            assert layout.coordinate(offset) == coordinate


@given(views(), st.integers(1, 4))
def test_complement_of_more(view, copies):
    layout, _, numel = view
    bases = layout.complement(numel * copies).offsets()
    assert len(bases) * layout.numel == numel * copies
    together = Layout.concatenate([layout.complement(numel * copies), layout])
    assert together.is_orthogonal
    assert sorted(together.offsets()) == list(range(numel * copies))


@given(dims_of_factors(), st.integers(1, 200))
def test_complement_tiles_or_raises(dims, cosize):
    layout = Layout.from_dims(dims)
    try:
        complement = layout.complement(cosize)
    except NativeError:
        return
    together = Layout.concatenate([complement, layout])
    assert sorted(together.offsets()) == list(range(cosize))


# --- rank maps --------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**31 - 1), unique=True, max_size=50))
def test_ranks(ranks):
    made = Ranks.of(ranks)
    assert len(made) == len(ranks)
    assert made.is_identity == (ranks == list(range(len(ranks))))
    for offset, rank in enumerate(ranks):
        assert made[offset] == rank
        assert made.find(rank) == offset
        for near in (rank - 1, rank + 1):
            if near not in ranks and near < 2**31:
                assert made.find(near) == -1
    assert made == Ranks.of(ranks)
    assert hash(made) == hash(Ranks.of(ranks))
    assert (made == Ranks.identity(len(ranks))) == made.is_identity


@given(st.permutations(range(7)), st.permutations(range(7)))
def test_ranks_are_equal_in_the_same_order_only(first, second):
    assert (Ranks.of(first) == Ranks.of(second)) == (first == second)


@given(st.lists(st.integers(-2, 6), min_size=1, max_size=12))
def test_bad_ranks_are_named(ranks):
    negative = [rank for rank in ranks if rank < 0]
    twice = [rank for rank in ranks if ranks.count(rank) > 1]
    if negative:
        with pytest.raises(NativeError, match=f"rank {negative[0]} at .* negative"):
            Ranks.of(ranks)
    elif twice:
        rank = min(twice)
        first = ranks.index(rank)
        places = f"positions {first} and {ranks.index(rank, first + 1)}$"
        with pytest.raises(NativeError, match=f"rank {rank} .* twice, at {places}"):
            Ranks.of(ranks)
    else:
        assert len(Ranks.of(ranks)) == len(ranks)

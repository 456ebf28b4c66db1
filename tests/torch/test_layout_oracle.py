"""Layouts against torch's _MeshLayout and _FlatLayout."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_strategies import dims_of_factors, shapes, some_dims, splits
from native import Layout, NativeError

_mesh_layout = pytest.importorskip(
    "torch.distributed._mesh_layout", reason="torch with its mesh layouts is not installed"
)
_FlatLayout = _mesh_layout._FlatLayout
_MeshLayout = _mesh_layout._MeshLayout


def dims_of(theirs):
    """The dims of one of torch's layouts as our wrapper shows them."""
    axes = [theirs] if isinstance(theirs, _FlatLayout) else theirs
    return tuple(tuple(axis.sizes_and_strides) for axis in axes)


def torch_layout(dims):
    axes = [
        _FlatLayout(tuple(size for size, _ in dim), tuple(stride for _, stride in dim))
        for dim in dims
    ]
    return _MeshLayout(axes)


def assert_same(ours, theirs):
    flat = theirs.collapse()
    assert ours.dims == dims_of(theirs)
    assert ours.shape == theirs.top_level_sizes
    assert ours.numel == theirs.numel()
    assert ours.cosize == theirs.cosize()
    assert ours.is_sorted == flat.check_sorted()
    assert ours.flatten().dims == dims_of(flat)
    assert ours.offsets() == flat.all_ranks_from_zero()


@st.composite
def views(draw):
    """The same chain of slices and flattenings on both sides, of a root of some size."""
    shape = draw(shapes())
    ours, theirs = Layout.row_major(shape), _MeshLayout.from_sizes_strides(shape)
    for step in draw(st.lists(st.sampled_from("sf"), max_size=3)):
        if step == "s":
            dims = draw(some_dims(ours.ndim))
            ours, theirs = ours.select(dims), _MeshLayout([theirs[d] for d in dims])
        else:
            ours, theirs = ours.flatten(), _MeshLayout([theirs.collapse()])
    return ours, theirs, math.prod(shape)


@given(views())
def test_views(view):
    ours, theirs, world = view
    assert_same(ours, theirs)
    assert ours.is_orthogonal == theirs.collapse().check_orthogonal()
    complement = ours.complement(world)
    assert complement.dims == dims_of(theirs.collapse().complement(world))
    ranks = [ours.offsets(base) for base in complement.offsets()]
    assert ranks == theirs.collapse().global_ranks(world)


@given(dims_of_factors(min_stride=1))
def test_factors(dims):
    ours, theirs = Layout.from_dims(dims), torch_layout(dims)
    assert_same(ours, theirs)
    assert ours.is_orthogonal == theirs.collapse().check_orthogonal()


@given(dims_of_factors())
def test_factors_that_stand_still(dims):
    """Strides of 0: torch divides by them or lets them pass, here they overlap."""
    ours = Layout.from_dims(dims)
    assert_same(ours, torch_layout(dims))
    assert not (ours.is_orthogonal and any(stride == 0 for dim in ours.dims for _, stride in dim))


@given(dims_of_factors(min_stride=1), dims_of_factors(min_stride=1))
def test_equality(first, second):
    assert (Layout.from_dims(first) == Layout.from_dims(second)) == (
        torch_layout(first) == torch_layout(second)
    )


@given(views(), st.data())
def test_unflatten(view, data):
    """Where we split, torch's composition says the same; where we refuse, torch stops at an
    assertion or makes something of another size."""
    ours, theirs, _ = view
    if ours.ndim == 0:
        return
    dim = data.draw(st.integers(0, ours.ndim - 1))
    sizes = tuple(data.draw(splits(ours.shape[dim])))
    inner = _MeshLayout.from_sizes_strides(sizes)
    try:
        split = ours.unflatten(dim, sizes)
    except NativeError:
        try:
            wrong = theirs[dim].composition(inner)
        except AssertionError:
            return
        assert wrong.top_level_sizes != sizes
        return
    composed = theirs.splice(dim, dim + 1, theirs[dim].composition(inner))
    assert_same(split, composed)


@given(views(), st.data())
def test_concatenate(view, data):
    ours, theirs, _ = view
    picks = data.draw(st.lists(some_dims(ours.ndim), min_size=1, max_size=3))
    if math.prod(ours.shape[d] for dims in picks for d in dims) > 5000:
        picks = picks[:1]
    mine = Layout.concatenate([ours.select(dims) for dims in picks])
    axes = _MeshLayout([theirs[d] for dims in picks for d in dims])
    assert_same(mine, axes)
    assert mine.is_orthogonal == axes.collapse().check_orthogonal()


@given(dims_of_factors(min_stride=1), st.integers(1, 200))
def test_complement(dims, world):
    """Where a complement exists it is torch's; torch has others, rounded up."""
    try:
        complement = Layout.from_dims(dims).complement(world)
    except NativeError:
        return
    assert complement.dims == dims_of(torch_layout(dims).collapse().complement(world))

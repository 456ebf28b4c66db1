"""What hypothesis draws for layouts: shapes, orders of dims, splits, arbitrary factors."""

import math

from hypothesis import settings
from hypothesis import strategies as st

# Examples are not timed: the machine may be busy, and the first one compiles the library.
settings.register_profile("devicemesh", deadline=None)
settings.load_profile("devicemesh")


@st.composite
def shapes(draw, min_dims=0, max_dims=5, max_numel=200):
    """Sizes whose product stays small; ones are frequent, as they are special."""
    shape = []
    left = max_numel
    for _ in range(draw(st.integers(min_dims, max_dims))):
        shape.append(draw(st.one_of(st.just(1), st.integers(1, max(1, min(left, 12))))))
        left //= shape[-1]
    return tuple(shape)


@st.composite
def some_dims(draw, ndim, min_size=0):
    """Some of the dims of a layout, each at most once, in any order."""
    dims = draw(st.permutations(range(ndim)))
    return dims[: draw(st.integers(min(min_size, ndim), ndim))]


@st.composite
def splits(draw, size, max_parts=4):
    """Sizes that multiply to `size`."""
    parts = []
    for _ in range(draw(st.integers(0, max_parts - 1))):
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        parts.append(draw(st.sampled_from(divisors)))
        size //= parts[-1]
    return draw(st.permutations([*parts, size]))


@st.composite
def dims_of_factors(draw, min_stride=0):
    """Dims of arbitrary factors, mostly overlapping."""
    stride = st.one_of(st.sampled_from([1, 2, 4, 6, 8, 12, 24]), st.integers(min_stride, 50))
    factor = st.tuples(st.integers(1, 4), stride)
    dims = draw(st.lists(st.lists(factor, max_size=3), max_size=4))
    if math.prod(size for dim in dims for size, _ in dim) > 2000:
        dims = dims[:2]
    return dims

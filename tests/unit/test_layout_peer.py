"""A counterpart for each test of CuTeLayoutTest in PyTorch's test/distributed/test_device_mesh.py.

test_coalesce, test_flatten, test_optional_strides   test_neighbours_that_fit_are_merged
test_coalesce_non_coalescible                        test_neighbours_that_do_not_fit_stay
test_coalesce_singleton_dims                         test_factors_of_size_one_go
test_mismatch_sizes_strides                          (factors are pairs: there is no mismatch)
test_complement_n_group_layout                       test_complement
test_composition                                     test_unflatten_is_composition
test_check_orthogonal                                test_orthogonal
test_remap_to_tensor                                 test_ranks_of_a_layout
"""

import pytest
from native import Layout, NativeError


def one_dim(*factors):
    return Layout.from_dims([factors])


def lists(layout, cosize):
    """The offsets of every sibling of a layout of one dim."""
    return [layout.offsets(base) for base in layout.complement(cosize).offsets()]


@pytest.mark.parametrize(
    ("factors", "merged"),
    [
        ([(3, 2), (2, 1)], [(6, 1)]),
        ([(2, 12), (3, 4), (4, 1)], [(24, 1)]),
        ([(7, 30), (5, 6), (3, 2), (2, 1)], [(210, 1)]),
        ([(7, 900), (5, 36), (3, 4), (2, 1)], [(7, 900), (5, 36), (3, 4), (2, 1)]),
    ],
)
def test_neighbours_that_fit_are_merged(factors, merged):
    assert one_dim(*factors).dims == (tuple(merged),)
    assert Layout.row_major([7, 5, 3, 2]).flatten().dims == (((210, 1),),)


def test_neighbours_that_do_not_fit_stay():
    assert one_dim((3, 4), (2, 1)).dims == (((3, 4), (2, 1)),)


def test_factors_of_size_one_go():
    layout = one_dim((1, 0), (3, 10), (1, 17), (5, 2), (1, 1))
    assert layout.dims == (((15, 2),),)
    assert one_dim((1, 1), (1, 42), (1, 0)).dims == ((),)


@pytest.mark.parametrize(
    ("factors", "cosize", "outer", "ranks"),
    [
        ([(4, 2)], 8, [(2, 1)], [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (
            [(4, 2)],
            16,
            [(2, 8), (2, 1)],
            [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]],
        ),
        (
            [(2, 4), (2, 1)],
            16,
            [(2, 8), (2, 2)],
            [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]],
        ),
        (
            [(2, 2), (2, 4)],
            16,
            [(2, 8), (2, 1)],
            [[0, 4, 2, 6], [1, 5, 3, 7], [8, 12, 10, 14], [9, 13, 11, 15]],
        ),
    ],
)
def test_complement(factors, cosize, outer, ranks):
    layout = one_dim(*factors)
    assert layout.complement(cosize).dims == (tuple(outer),)
    assert lists(layout, cosize) == ranks


@pytest.mark.parametrize(
    ("factors", "sizes", "dims"),
    [
        ([(4, 2), (2, 1)], (4, 2), (((4, 2),), ((2, 1),))),
        ([(4, 2)], (2, 2), (((2, 4),), ((2, 2),))),
        ([(4, 4), (2, 1)], (4, 2), (((4, 4),), ((2, 1),))),
        ([(4, 4), (2, 1)], (2, 4), (((2, 8),), ((2, 4), (2, 1)))),
    ],
)
def test_unflatten_is_composition(factors, sizes, dims):
    assert one_dim(*factors).unflatten(0, sizes).dims == dims


def test_unflatten_that_cuts_a_factor():
    with pytest.raises(NativeError):
        one_dim((4, 4), (3, 1)).unflatten(0, (3, 4))


@pytest.mark.parametrize(
    ("factors", "orthogonal"),
    [
        ([(2, 6), (3, 1)], True),
        ([(2, 2), (3, 1)], False),
        ([(2, 1), (3, 1)], False),
        ([(4, 1)], True),
        ([(2, 3), (3, 1)], True),
        ([(2, 8), (2, 4), (2, 1)], True),
        ([(2, 4), (2, 1), (2, 2)], True),
        ([(3, 2), (2, 3)], False),
        ([(2, 1), (11, 210), (3, 2), (7, 30)], True),
    ],
)
def test_orthogonal(factors, orthogonal):
    assert one_dim(*factors).is_orthogonal is orthogonal


@pytest.mark.parametrize(
    ("dims", "ranks", "expected"),
    [
        ([[(2, 2)], [(2, 1)]], [0, 1, 2, 3], [0, 1, 2, 3]),
        ([[(2, 2)], [(2, 1)]], [10, 20, 30, 40], [10, 20, 30, 40]),
        ([[(4, 1)]], [0, 1, 2, 3], [0, 1, 2, 3]),
        ([[(2, 1)], [(2, 2)]], [0, 2, 1, 3], [0, 1, 2, 3]),
        ([[(2, 1)], [(2, 2)]], [0, 2, 1, 4], [0, 1, 2, 4]),
    ],
)
def test_ranks_of_a_layout(dims, ranks, expected):
    assert [ranks[offset] for offset in Layout.from_dims(dims).offsets()] == expected

"""Reductions between processes beyond plain numbers: factors, narrow floats, special values.

The same over shared memory and over tcp; groups of one go their own way.
"""

import functools

import ml_dtypes
import numpy as np
import pytest

import devicemesh
from devicemesh import ReduceOp

NARROW = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
FLOAT8 = [np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]


@pytest.fixture(params=["shm", "tcp"])
def group(request, monkeypatch):
    monkeypatch.setenv("DEVICEMESH_TRANSPORT", request.param)
    world = devicemesh.default_world(timeout=600)
    yield world.new_group(range(world.size), name="all")
    devicemesh.close_world()


def random(rank, count, dtype):
    return np.random.default_rng(rank).uniform(-2, 2, count).astype(dtype)


def everywhere(make, world_size):
    return [make(rank) for rank in range(world_size)]


def assert_same_bits(group, value, world_size):
    """As the same bytes on every rank."""
    bits = value.view(np.uint8)
    all_bits = np.empty((world_size, bits.size), np.uint8)
    group.all_gather_into_tensor(all_bits, bits)
    assert (all_bits == bits).all()


# --- factors ------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("async_op", [False, True])
def test_each_rank_has_its_factor(group, rank, world_size, async_op):
    op = ReduceOp.premul_sum(2.0 ** (-1 - rank))
    for dtype in ("f4", "f8", "c8", "c16", *NARROW):
        inputs = everywhere(
            lambda r, d=dtype: np.full(6 * world_size, 2.0 ** (r + 1), d), world_size
        )
        value = inputs[rank].copy()
        work = group.all_reduce(value, op, async_op=async_op)
        assert work.wait() if async_op else work is None
        assert (value == np.array(world_size, dtype)).all(), dtype

        given = inputs[rank].copy()
        piece = np.zeros(6, dtype)
        work = group.reduce_scatter_tensor(piece, given, op, async_op=async_op)
        assert work.wait() if async_op else work is None
        assert (piece == np.array(world_size, dtype)).all(), dtype
        assert (given == inputs[rank]).all(), dtype

        value = inputs[rank].copy()
        work = group.reduce(value, 0, op, async_op=async_op)
        assert work.wait() if async_op else work is None
        expected = np.full(value.size, world_size) if rank == 0 else inputs[rank]
        assert (value == expected.astype(dtype)).all(), dtype


# --- floats of 8 and 16 bits -----------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("op", ["sum", "avg", "product"])
@pytest.mark.parametrize("dtype", [*NARROW, *FLOAT8], ids=str)
def test_narrow_floats(group, rank, world_size, dtype, op):
    """Within one rounding for each step between ranks, and the same bits on all of them."""
    for count in (3, 1000, 100_003):
        inputs = everywhere(lambda r, n=count: random(r, n * world_size, dtype), world_size)
        wide = [each.astype("f8") for each in inputs]
        exact = functools.reduce(np.multiply if op == "product" else np.add, wide)
        size = functools.reduce(
            np.multiply if op == "product" else np.add, [np.abs(each) for each in wide]
        )
        if op == "avg":
            exact, size = exact / world_size, size / world_size
        info = ml_dtypes.finfo(dtype)
        allowed = world_size * (float(info.eps) * size + float(info.smallest_subnormal))

        value = inputs[rank].copy()
        group.all_reduce(value, op)
        assert (np.abs(value.astype("f8") - exact) <= allowed).all()
        assert_same_bits(group, value, world_size)

        piece = np.empty(count, dtype)
        group.reduce_scatter_tensor(piece, inputs[rank], op)
        mine = slice(rank * count, (rank + 1) * count)
        assert (np.abs(piece.astype("f8") - exact[mine]) <= allowed[mine]).all()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [*NARROW, *FLOAT8], ids=str)
def test_minimum_and_maximum_are_exact(group, rank, world_size, dtype):
    inputs = everywhere(lambda r: random(r, 10_000, dtype), world_size)
    for op, function in (("min", np.minimum), ("max", np.maximum)):
        value = inputs[rank].copy()
        group.all_reduce(value, op)
        expected = functools.reduce(function, [each.astype("f4") for each in inputs])
        assert (value.astype("f4") == expected).all()


# --- special values ---------------------------------------------------------------------------


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", ["f4", "f8", *NARROW, FLOAT8[1]], ids=str)
def test_special_values(group, rank, world_size, dtype):
    """As documented for ReduceOp: one rank has something special, the others a one."""
    dtype = np.dtype(dtype)
    last = rank == world_size - 1

    def reduced(special, op, ordinary=1.0):
        value = np.full(5, special if last else ordinary, dtype)
        group.all_reduce(value, op)
        assert_same_bits(group, value, world_size)
        return value.astype("f8")

    for op in ("sum", "product", "min", "max", "avg"):
        assert np.isnan(reduced(np.nan, op)).all(), op
    for op in ("sum", "product", "max", "avg"):
        assert (reduced(np.inf, op) == np.inf).all(), op
    assert (reduced(np.inf, "min") == 1).all()
    assert np.isnan(reduced(np.inf, "sum", ordinary=-np.inf)).all()

    largest = float(ml_dtypes.finfo(dtype).max)
    assert (reduced(largest, "sum", ordinary=largest) == np.inf).all()
    denormal = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    total = reduced(denormal, "sum", ordinary=denormal)
    assert (total == float(np.array(world_size * denormal, dtype))).all()

    for op, negative in (("min", True), ("max", False)):
        zero = reduced(-0.0, op, ordinary=0.0)
        assert (np.signbit(zero) == negative).all(), op


@pytest.mark.ranks(2, 3)
def test_float8_without_infinity(group, rank, world_size):
    """Past the largest number of e4m3fn is NaN."""
    value = np.full(5, 448, FLOAT8[0])
    group.all_reduce(value)
    assert np.isnan(value.astype("f4")).all()


@pytest.mark.ranks(2, 3)
def test_integers_wrap(group, rank, world_size):
    for dtype in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"):
        inputs = everywhere(
            lambda r, d=dtype: np.random.default_rng(r).integers(0, 256, 800, "u1").view(d),
            world_size,
        )
        for op, function in (("sum", np.add), ("product", np.multiply)):
            value = inputs[rank].copy()
            group.all_reduce(value, op)
            assert (value == functools.reduce(function, inputs)).all(), (dtype, op)


@pytest.mark.ranks(2, 3)
def test_bools(group, rank, world_size):
    """Any byte but 0 is true, and results are 0 or 1."""
    given = np.array([[0, 0, 7, 255], [0, 2, 0, 1], [0, 0, 128, 3]], "u1")[:world_size]
    truth = given != 0
    for op, function in (
        *(("sum", np.logical_or), ("max", np.logical_or), ("bor", np.logical_or)),
        *(("product", np.logical_and), ("min", np.logical_and), ("band", np.logical_and)),
        ("bxor", np.logical_xor),
    ):
        value = given[rank].copy().view(bool)
        group.all_reduce(value, op)
        assert value.view("u1").tolist() == functools.reduce(function, truth).tolist(), op

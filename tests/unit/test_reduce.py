"""The reduce kernels against numpy and, for floats of 8 and 16 bits, against their definition.

The oracle for the narrow floats is a table of all their values, made from the meaning of
the bits, and a search for the nearest one: nothing of how the kernels do it.
"""

import dataclasses
import functools
import itertools

import native
import numpy as np
import pytest

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float32", "float64"]
COMPLEX = ["complex64", "complex128"]
LAYOUTS = ["apart", "out is a", "out is b"]


@dataclasses.dataclass(frozen=True)
class Narrow:
    """A float format: its widths, and which magnitudes are infinity and NaN."""

    exponent_bits: int
    mantissa_bits: int
    infinity: int | None
    first_nan: int

    @property
    def width(self):
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def dtype(self):
        return np.dtype(f"uint{self.width}")

    @property
    def sign(self):
        return 1 << (self.width - 1)

    def value(self, magnitude):
        """What the bits without their sign mean, as a float."""
        bias = (1 << (self.exponent_bits - 1)) - 1
        exponent = magnitude >> self.mantissa_bits
        mantissa = magnitude & ((1 << self.mantissa_bits) - 1)
        implicit = 1 << self.mantissa_bits if exponent > 0 else 0
        scale = max(exponent, 1) - bias - self.mantissa_bits
        return np.ldexp(np.float64(mantissa + implicit), scale)

    @functools.cached_property
    def finite(self):
        """The values that are not negative, ascending; the index is the bits. One more
        than there are: from half way to it on, numbers overflow."""
        end = self.first_nan if self.infinity is None else self.infinity
        return np.array([self.value(magnitude) for magnitude in range(end + 1)])

    def widen(self, bits):
        magnitude = bits & (self.sign - 1)
        values = self.finite[np.minimum(magnitude, len(self.finite) - 1)]
        if self.infinity is not None:
            values[magnitude == self.infinity] = np.inf
        values[magnitude >= self.first_nan] = np.nan
        return np.where(bits & self.sign, -values, values).astype(np.float32)

    def round(self, values):
        """The nearest bits to float32 values, ties to even bits."""
        size = np.abs(values.astype(np.float64))
        above = np.searchsorted(self.finite[:-1], np.nan_to_num(size, nan=0.0, posinf=np.inf))
        above = np.clip(above, 1, len(self.finite) - 1)
        below = above - 1
        to_above = self.finite[above] - size
        to_below = size - self.finite[below]
        pick_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
        bits = np.where(pick_above, above, below)
        bits = np.where(size >= self.finite[-1], len(self.finite) - 1, bits)
        bits = np.where(np.isnan(values), self.first_nan, bits)
        return (bits | np.where(np.signbit(values), self.sign, 0)).astype(self.dtype)


NARROW = {
    "float16": Narrow(5, 10, 0x7C00, 0x7C01),
    "bfloat16": Narrow(8, 7, 0x7F80, 0x7F81),
    "float8_e5m2": Narrow(5, 2, 0x7C, 0x7D),
    "float8_e4m3fn": Narrow(4, 3, None, 0x7F),
}


def storage(dtype):
    """The numpy dtype whose bytes hold elements of `dtype`."""
    return NARROW[dtype].dtype if dtype in NARROW else np.dtype(dtype)


def unaligned(array):
    """A copy that begins at an odd address."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = 1 - raw.ctypes.data % 2
    copy = raw[start : start + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


def run(dtype, op, a, b, layout="apart", define=None):
    """The kernel's result on copies of a and b, whose inputs must stay as they were."""
    kernel = native.reduce_kernel(dtype, op, define)
    assert a.dtype == b.dtype == storage(dtype)
    a_copy, b_copy = a.copy(), b.copy()
    out = {"apart": np.zeros_like(a), "out is a": a_copy, "out is b": b_copy}[layout]
    kernel(out.ctypes.data, a_copy.ctypes.data, b_copy.ctypes.data, a.size)
    assert out is a_copy or a_copy.tobytes() == a.tobytes()
    assert out is b_copy or b_copy.tobytes() == b.tobytes()
    return out


def finish(dtype, op, data, size):
    out = data.copy()
    native.reduce_finish(out.ctypes.data, out.size, dtype, op, size)
    return out


def random_bits(dtype, count, seed):
    """Elements of any bits at all: for floats this includes NaN and infinities."""
    return (
        np.random.default_rng(seed)
        .integers(0, 256, count * storage(dtype).itemsize, np.uint8)
        .view(storage(dtype))
    )


def special(dtype):
    """Every pair of the interesting values of a float dtype."""
    info = np.finfo(dtype)
    tiny, sub = info.tiny, info.smallest_subnormal
    values = [0.0, 1.0, 1.5, np.inf, info.max, tiny, sub, 3 * sub, tiny - sub, np.nan, 0.1]
    values = np.array([sign * v for v in values for sign in (1, -1)], dtype)
    a, b = (np.array(v, dtype) for v in zip(*itertools.product(values, values), strict=True))
    return a, b


def assert_same(actual, expected):
    """Equal bits, any NaN for a NaN."""
    bits = f"u{expected.dtype.itemsize}"
    same = (actual.view(bits) == expected.view(bits)) | (np.isnan(actual) & np.isnan(expected))
    wrong = np.flatnonzero(~same)
    assert wrong.size == 0, f"{actual[wrong[:5]]} for {expected[wrong[:5]]} at {wrong[:5]}"


# --- what there is ------------------------------------------------------------------------


def test_numbers_are_those_of_the_headers():
    for name, number in native.DTYPES.items():
        assert native.library().dm_dtype_name(number).decode() == name
        assert native.library().dm_dtype_size(number) == storage(name).itemsize
    for name, number in native.OPS.items():
        assert native.library().dm_reduce_op_name(number).decode() == name


def test_pairs_that_make_no_sense_have_no_kernel():
    bitwise = ["band", "bor", "bxor"]
    missing = {(dtype, "premul_sum") for dtype in ["bool", *INTEGERS]}
    missing |= {(dtype, op) for dtype in [*FLOATS, *NARROW, *COMPLEX] for op in bitwise}
    missing |= {(dtype, op) for dtype in COMPLEX for op in ["min", "max"]}
    missing |= {("bool", "avg")}
    for dtype, op in itertools.product(native.DTYPES, native.OPS):
        assert (native.reduce_kernel(dtype, op) is None) == ((dtype, op) in missing), (dtype, op)


# --- every kernel: counts, places, neighbours ----------------------------------------------


ALL = [
    (dtype, op)
    for dtype, op in itertools.product(native.DTYPES, native.OPS)
    if not (dtype == "bool" and op == "avg")
    and not (dtype in ["bool", *INTEGERS] and op == "premul_sum")
    and not (dtype in COMPLEX and op in ("min", "max"))
    and not (dtype in [*FLOATS, *NARROW, *COMPLEX] and op in ("band", "bor", "bxor"))
]


@pytest.mark.parametrize(("dtype", "op"), ALL)
def test_places_and_counts(dtype, op):
    """The same answer in place, at odd addresses and for any count, and not one byte more."""
    kernel = native.reduce_kernel(dtype, op)
    size = storage(dtype).itemsize
    for count in [0, 1, 2, 3, 7, 8, 15, 16, 31, 33, 64, 100, 257]:
        a, b = random_bits(dtype, count, 1), random_bits(dtype, count, 2)
        expected = run(dtype, op, a, b).tobytes()
        for layout in LAYOUTS:
            assert run(dtype, op, a, b, layout).tobytes() == expected
        out = np.full(count * size + 2, 0xA5, np.uint8)
        a, b = unaligned(a), unaligned(b)
        kernel(out.ctypes.data + 1, a.ctypes.data, b.ctypes.data, count)
        assert out[1:-1].tobytes() == expected
        assert out[0] == out[-1] == 0xA5
        for alone in range(0, count, 13):
            one = run(dtype, op, a[alone : alone + 1], b[alone : alone + 1])
            assert one.tobytes() == expected[alone * size : (alone + 1) * size]


@pytest.mark.parametrize(("dtype", "op"), ALL)
def test_a_and_a(dtype, op):
    """All three in the same place."""
    a = random_bits(dtype, 100, 3)
    out = a.copy()
    native.reduce_kernel(dtype, op)(out.ctypes.data, out.ctypes.data, out.ctypes.data, out.size)
    assert out.tobytes() == run(dtype, op, a, a).tobytes()


# --- integers and bool ----------------------------------------------------------------------


UFUNCS = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "avg": np.add,
    "premul_sum": np.add,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
INTEGER_OPS = [op for op in UFUNCS if op != "premul_sum"]


@pytest.mark.parametrize("op", INTEGER_OPS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers(dtype, op):
    info = np.iinfo(dtype)
    edges = np.array([info.min, info.min + 1, info.max, info.max - 1, 0, 1, 2, 255], "O")
    edges = np.array([edge for edge in edges if info.min <= edge <= info.max], dtype)
    a, b = (v.ravel() for v in np.meshgrid(edges, edges))
    a = np.concatenate([a, random_bits(dtype, 1000, 4)])
    b = np.concatenate([b, random_bits(dtype, 1000, 5)])
    for layout in LAYOUTS:
        assert (run(dtype, op, a, b, layout) == UFUNCS[op](a, b)).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("op", INTEGER_OPS)
def test_every_pair_of_bytes(dtype, op):
    every = np.arange(256).astype(np.uint8).view(dtype)
    a, b = (v.ravel() for v in np.meshgrid(every, every))
    assert (run(dtype, op, a, b) == UFUNCS[op](a, b)).all()


@pytest.mark.parametrize("op", [op for op in INTEGER_OPS if op != "avg"])
def test_bool(op):
    a = np.array([False, False, True, True])
    b = np.array([False, True, False, True])
    assert run("bool", op, a, b).tolist() == UFUNCS[op](a, b).tolist()


@pytest.mark.parametrize("op", [op for op in INTEGER_OPS if op != "avg"])
def test_bool_of_other_bytes(op):
    """Any byte but 0 is true, and what comes out is 0 or 1."""
    bytes_ = np.array([0, 1, 2, 4, 128, 255], np.uint8)
    a, b = (v.ravel() for v in np.meshgrid(bytes_, bytes_))
    out = run("bool", op, a.view(bool), b.view(bool)).view(np.uint8)
    assert out.tolist() == UFUNCS[op](a != 0, b != 0).astype(np.uint8).tolist()


# --- floats ---------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "product", "avg", "premul_sum"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats(dtype, op):
    a, b = special(dtype)
    a = np.concatenate([a, random_bits(dtype, 5000, 6)])
    b = np.concatenate([b, random_bits(dtype, 5000, 7)])
    with np.errstate(all="ignore"):
        expected = UFUNCS[op](a, b)
    for layout in LAYOUTS:
        assert_same(run(dtype, op, a, b, layout), expected)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_min_max(dtype, op):
    """numpy's values; to the bit the same whichever comes first; -0 is below 0."""
    a, b = special(dtype)
    a = np.concatenate([a, random_bits(dtype, 5000, 8)])
    b = np.concatenate([b, random_bits(dtype, 5000, 9)])
    with np.errstate(all="ignore"):
        expected = UFUNCS[op](a, b)
    zeros = (a == 0) & (b == 0)
    signs = np.signbit(a), np.signbit(b)
    negative = signs[0] | signs[1] if op == "min" else signs[0] & signs[1]
    expected[zeros] = np.where(negative, -0.0, 0.0)[zeros]
    out = run(dtype, op, a, b)
    assert_same(out, expected)
    assert run(dtype, op, b, a).tobytes() == out.tobytes()


@pytest.mark.parametrize("op", ["sum", "product", "avg", "premul_sum"])
@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex(dtype, op):
    rng = np.random.default_rng(10)
    a, b = (
        np.concatenate(
            [
                rng.normal(size=1000) + 1j * rng.normal(size=1000),
                [np.inf, np.nan, 1j, 0, -1 + 1e30j],
            ]
        ).astype(dtype)
        for _ in range(2)
    )
    out = run(dtype, op, a, b)
    with np.errstate(all="ignore"):
        if op == "product":
            re, im = a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real
        else:
            re, im = a.real + b.real, a.imag + b.imag
    assert_same(out.real.copy(), re)
    assert_same(out.imag.copy(), im)


# --- floats of 8 and 16 bits ------------------------------------------------------------------


def narrow_pairs(dtype):
    """All pairs of 8 bits; of 16 bits every value with some partners."""
    every = np.arange(1 << NARROW[dtype].width).astype(NARROW[dtype].dtype)
    if every.size == 256:
        return tuple(v.ravel() for v in np.meshgrid(every, every))
    rng = np.random.default_rng(11)
    partners = [np.roll(every, shift) for shift in (0, 1, 0x8000, 1024, 12345)]
    partners += [rng.permutation(every) for _ in range(10)]
    partners += [np.full_like(every, bits) for bits in (0, 1, 0x8001, 0x0400, 0x3C00, 0x7BFF)]
    return np.tile(every, len(partners)), np.concatenate(partners)


@pytest.mark.parametrize("dtype", NARROW)
def test_oracle(dtype):
    """What the test itself relies on: the table agrees with numpy where numpy has the type,
    and rounding a value that is there gives it back."""
    narrow = NARROW[dtype]
    every = np.arange(1 << narrow.width).astype(narrow.dtype)
    values = narrow.widen(every)
    if dtype == "float16":
        assert_same(values, every.view(np.float16).astype(np.float32))
    known = ~np.isnan(values)
    assert (narrow.round(values)[known] == every[known]).all()
    # 16 and 240 are representable everywhere; half way between neighbours goes to even.
    step = np.float32(2.0 ** (4 - narrow.mantissa_bits))
    halves = np.array([16 + step / 2, 16 + 3 * step / 2], np.float32)
    assert (narrow.widen(narrow.round(halves)) == [16, 16 + 2 * step]).all()


@pytest.mark.parametrize("op", ["sum", "product", "avg", "premul_sum"])
@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_arithmetic(dtype, op):
    narrow = NARROW[dtype]
    a, b = narrow_pairs(dtype)
    with np.errstate(all="ignore"):
        exact = UFUNCS[op](narrow.widen(a), narrow.widen(b))
        expected = narrow.round(exact)
    out = run(dtype, op, a, b)
    magnitude = out & (narrow.sign - 1)
    nan = magnitude >= narrow.first_nan
    assert (nan == ((expected & (narrow.sign - 1)) >= narrow.first_nan)).all()
    wrong = np.flatnonzero((out != expected) & ~nan)
    assert wrong.size == 0, [hex(v[wrong[0]]) for v in (a, b, out, expected)]


@pytest.mark.parametrize("op", ["sum", "product"])
def test_float16_is_numpys(op):
    a, b = narrow_pairs("float16")
    out = run("float16", op, a, b).view(np.float16)
    with np.errstate(all="ignore"):
        assert_same(out, UFUNCS[op](a.view(np.float16), b.view(np.float16)))


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_min_max(dtype, op):
    narrow = NARROW[dtype]
    a, b = narrow_pairs(dtype)
    out = run(dtype, op, a, b)
    with np.errstate(all="ignore"):
        expected = UFUNCS[op](narrow.widen(a), narrow.widen(b))
    values = narrow.widen(out)
    assert ((values == expected) | (np.isnan(values) & np.isnan(expected))).all()
    assert run(dtype, op, b, a).tobytes() == out.tobytes()
    zeros = (narrow.widen(a) == 0) & (narrow.widen(b) == 0)
    sign = (a | b if op == "min" else a & b) & narrow.sign
    assert (out[zeros] == sign[zeros]).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_nan_keeps_its_sign(dtype):
    narrow = NARROW[dtype]
    a = np.array([narrow.sign - 1, narrow.sign | (narrow.sign - 1)], narrow.dtype)
    out = run(dtype, "sum", a, np.zeros_like(a))
    assert (out == a).all()


# --- for any processor and for this one -----------------------------------------------------


@pytest.mark.parametrize(("dtype", "op"), ALL)
def test_every_processor_gives_the_same_bits(dtype, op):
    """Ranks may run on different machines: what is chosen for this one changes nothing."""
    a, b = random_bits(dtype, 20003, 15), random_bits(dtype, 20003, 16)
    if dtype in NARROW:
        a, b = (np.concatenate(v) for v in zip((a, b), narrow_pairs(dtype), strict=True))
    if dtype in FLOATS:
        a, b = (np.concatenate(v) for v in zip((a, b), special(dtype), strict=True))
    out, expected = run(dtype, op, a, b), run(dtype, op, a, b, define="DM_REDUCE_PORTABLE")
    if dtype in NARROW:
        nans = (
            (bits & (NARROW[dtype].sign - 1)) >= NARROW[dtype].first_nan for bits in (out, expected)
        )
        assert ((out == expected) | np.logical_and(*nans)).all()
    elif dtype in [*FLOATS, *COMPLEX]:
        assert_same(out.view(out.real.dtype), expected.view(expected.real.dtype))
    else:
        assert out.tobytes() == expected.tobytes()


# --- averages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 100, 1000])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_average_of_integers(dtype, size):
    """Divided towards zero."""
    info = np.iinfo(dtype)
    data = np.concatenate(
        [np.array([info.min, info.max, 0, 1], dtype), random_bits(dtype, 500, 12)]
    )
    expected = [abs(int(v)) // size * (1 if v >= 0 else -1) for v in data]
    assert finish(dtype, "avg", data, size).tolist() == expected


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
def test_average_of_floats(dtype, size):
    data = np.concatenate([random_bits(dtype, 2000, 13), np.array([np.inf, -0.0], dtype)])
    out = finish(dtype, "avg", data, size)
    real = data.real.dtype.type
    with np.errstate(all="ignore"):
        assert_same(out.real.copy(), data.real / real(size))
        assert_same(out.imag.copy(), data.imag / real(size))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("dtype", NARROW)
def test_average_of_narrow_floats(dtype, size):
    narrow = NARROW[dtype]
    every = np.arange(1 << narrow.width).astype(narrow.dtype)
    every = every[~np.isnan(narrow.widen(every))]
    expected = narrow.round(narrow.widen(every) / np.float32(size))
    assert (finish(dtype, "avg", every, size) == expected).all()


@pytest.mark.parametrize(("dtype", "op"), [pair for pair in ALL if pair[1] != "avg"])
def test_nothing_is_left_to_do(dtype, op):
    data = random_bits(dtype, 50, 14)
    assert finish(dtype, op, data, 4).tobytes() == data.tobytes()


# --- multiplied before they are summed ------------------------------------------------------------


FACTORS = [0.0, -0.0, 1.0, -2.5, 1 / 3, 1e-40, 1e40, np.inf, np.nan]


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
def test_scaled_floats(dtype, factor):
    data = random_bits(dtype, 2003, 17)
    real = data.real.dtype
    before = data.tobytes()
    out = np.zeros_like(data)
    native.reduce_scale(out.ctypes.data, data.ctypes.data, data.size, dtype, factor)
    assert data.tobytes() == before
    native.reduce_scale(data.ctypes.data, data.ctypes.data, data.size, dtype, factor)
    with np.errstate(all="ignore"):
        expected = np.frombuffer(before, real) * real.type(factor)
    assert_same(out.view(real), expected)
    assert_same(data.view(real), expected)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", NARROW)
def test_scaled_narrow_floats(dtype, factor):
    narrow = NARROW[dtype]
    every = np.arange(1 << narrow.width).astype(narrow.dtype)
    with np.errstate(all="ignore"):
        expected = narrow.round(narrow.widen(every) * np.float32(factor))
    out = np.zeros_like(every)
    native.reduce_scale(out.ctypes.data, every.ctypes.data, every.size, dtype, factor)
    nan = (expected & (narrow.sign - 1)) >= narrow.first_nan
    assert (((out & (narrow.sign - 1)) >= narrow.first_nan) == nan).all()
    assert (out == expected)[~nan].all()


# --- many arrays at once ------------------------------------------------------------------------


def many(dtype, op, inputs, size=1, place=None, define=None):
    """dm_reduce_many of copies; `place` is the index of the input that is the output too."""
    inputs = [a.copy() for a in inputs]
    before = [a.tobytes() for a in inputs]
    out = np.zeros_like(inputs[0]) if place is None else inputs[place]
    addresses = [a.ctypes.data for a in inputs]
    native.reduce_many(out.ctypes.data, addresses, out.size, dtype, op, size, define)
    for i, a in enumerate(inputs):
        assert i == place or a.tobytes() == before[i]
    return out


def folded(dtype, op, inputs, size=1):
    """The same by kernels of two, one after the other."""
    out = functools.reduce(lambda a, b: run(dtype, op, a, b), inputs)
    return finish(dtype, op, out, size)


def accumulates(dtype, op):
    return dtype in NARROW and op in ("sum", "product", "avg", "premul_sum")


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("dtype", "op"), [pair for pair in ALL if not accumulates(*pair)])
def test_many_is_one_after_the_other(dtype, op, n):
    for count in (0, 1, 100, 2048 // storage(dtype).itemsize, 20001):
        inputs = [random_bits(dtype, count, 20 + i) for i in range(n)]
        expected = folded(dtype, op, inputs, n)
        for place in [None, *range(n)]:
            out = many(dtype, op, inputs, n, place)
            if dtype in [*FLOATS, *COMPLEX]:  # which payload a NaN keeps is open
                assert_same(out.view(out.real.dtype), expected.view(out.real.dtype))
            else:
                assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("define", [None, "DM_REDUCE_PORTABLE"])
@pytest.mark.parametrize("n", [2, 3, 4, 7])
@pytest.mark.parametrize("op", ["sum", "product", "avg", "premul_sum"])
@pytest.mark.parametrize("dtype", NARROW)
def test_many_round_once(dtype, op, n, define):
    narrow = NARROW[dtype]
    for count in (0, 1, 9, 512, 2048, 10001):
        inputs = [random_bits(dtype, count, 30 + i) for i in range(n)]
        with np.errstate(all="ignore"):
            exact = functools.reduce(UFUNCS[op], [narrow.widen(a) for a in inputs])
            if op == "avg":
                exact /= np.float32(n)
            expected = narrow.round(exact)
        nan = (expected & (narrow.sign - 1)) >= narrow.first_nan
        for place in [None, *range(n)]:
            out = many(dtype, op, inputs, n, place, define)
            assert (((out & (narrow.sign - 1)) >= narrow.first_nan) == nan).all()
            assert (out == expected)[~nan].all()


def test_many_at_odd_addresses():
    inputs = [unaligned(random_bits("float16", 777, 40 + i)) for i in range(3)]
    inputs = [np.where(np.isnan(a.view(np.float16)), 0, a) for a in inputs]
    expected = many("float16", "sum", inputs)
    out = np.full(2 * 777 + 2, 0xA5, np.uint8)
    odd = [unaligned(a) for a in inputs]
    addresses = [a.ctypes.data for a in odd]
    native.reduce_many(out.ctypes.data + 1, addresses, 777, "float16", "sum")
    assert out[1:-1].tobytes() == expected.tobytes()
    assert out[0] == out[-1] == 0xA5


def test_many_sums_where_pairs_would_round_away():
    """1 + 2**-8 + 2**-8 is more than 1 in bfloat16 only if it is rounded once."""
    ones = np.full(100, 0x3F80, np.uint16)
    small = np.full(100, 0x3B80, np.uint16)  # 2**-8: half a unit in the last place of 1
    assert (folded("bfloat16", "sum", [ones, small, small]) == 0x3F80).all()
    assert (many("bfloat16", "sum", [ones, small, small]) == 0x3F81).all()


def test_partial_sums_are_divided_later():
    inputs = [np.full(10, value, "f4") for value in (1, 2, 4)]
    assert (many("float32", "avg", inputs, size=1) == 7).all()
    assert (many("float32", "avg", inputs, size=4) == 1.75).all()
    assert (many("int32", "avg", [-a.astype("i4") for a in inputs], size=2) == -3).all()

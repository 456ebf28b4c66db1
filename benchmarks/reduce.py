"""The reduce kernels beside numpy: bytes per second of out = a op b, and of many arrays.

usage: python benchmarks/reduce.py [--rounds 15] [--sizes 65536 ...] [--json FILE]

The kernels are compiled as the package compiles them and called through ctypes. Sides of one
line run in turns, each for the same bytes:

- ours: what this processor gets (AVX2 and F16C where it has them).
- any: the same lists compiled for any processor.
- numpy: np.add, np.multiply, np.maximum into an output array; ml_dtypes' bfloat16 and float8
  where it is installed.
- float32: ours for float32 on as many bytes: what the memory gives.

Bytes are those that have to move: the inputs and the output. A sample takes about 2 ms. Shown
and compared are the best samples, which what else runs on the machine disturbs least; the JSON
has medians, spread and all samples.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
import native

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

SAMPLE_S = 0.002
PORTABLE = "DM_REDUCE_PORTABLE"
OPS = {"sum": np.add, "product": np.multiply, "max": np.maximum}
CASES = [
    *((dtype, "sum") for dtype in ("float32", "float64", "int32", "int8", "complex64")),
    *((dtype, "max") for dtype in ("float32", "float16", "bfloat16")),
    *((dtype, "sum") for dtype in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")),
]
MANY = 4


def arrays(dtype, size, count):
    """Arrays of `size` bytes with ordinary values: nothing overflows, nothing is denormal."""
    values = np.random.default_rng(1).uniform(0.5, 1.0, (count, size))
    if dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        if ml_dtypes is None:
            bits = {"bfloat16": 0x3F00, "float8_e4m3fn": 0x30, "float8_e5m2": 0x38}[dtype]
            kind = np.uint16 if dtype == "bfloat16" else np.uint8
            return [np.full(size // kind().itemsize, bits, kind) for _ in range(count)]
        dtype = getattr(ml_dtypes, dtype)
    dtype = np.dtype(dtype)
    scale = 1 if dtype.kind in "fcV" else 10
    each = size // dtype.itemsize
    return [(scale * values[i, :each]).astype(dtype) for i in range(count)]


def measure(sides, size_moved, rounds):
    """Bytes per second of each side, `rounds` samples in turns."""
    repeats = {}
    for name, call in sides.items():
        start = time.perf_counter()
        call()
        once = time.perf_counter() - start
        repeats[name] = max(1, round(SAMPLE_S / max(once, 1e-6)))
    rates = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            rates[name].append(repeats[name] * size_moved / (time.perf_counter() - start))
    return {name: report.summary(values) for name, values in rates.items()}


def pair_sides(dtype, op, size):
    a, b = arrays(dtype, size, 2)
    out = np.empty_like(a)
    places = out.ctypes.data, a.ctypes.data, b.ctypes.data, a.size
    plain = arrays("float32", size, 2)
    plain_out = np.empty_like(plain[0])
    plain_places = *(each.ctypes.data for each in (plain_out, *plain)), plain_out.size
    ours, portable = native.reduce_kernel(dtype, op), native.reduce_kernel(dtype, op, PORTABLE)
    sides = {"ours": lambda: ours(*places), "any": lambda: portable(*places)}
    if a.dtype.name == dtype:
        function = OPS[op]
        sides["numpy"] = lambda: function(a, b, out=out)
    if dtype != "float32" or op != "sum":
        float32 = native.reduce_kernel("float32", "sum")
        sides["float32"] = lambda: float32(*plain_places)
    sides["keep"] = lambda: (a, b, out, plain, plain_out)  # alive while their addresses are used
    return sides


def many_sides(dtype, size):
    inputs = arrays(dtype, size, MANY)
    out = np.empty_like(inputs[0])
    to, count = out.ctypes.data, out.size
    places = [each.ctypes.data for each in inputs]
    kernel = native.reduce_kernel(dtype, "sum")

    def pairs():
        kernel(to, places[0], places[1], count)
        for place in places[2:]:
            kernel(to, to, place, count)

    sides = {"ours": lambda: native.reduce_many(to, places, count, dtype, "sum"), "pairs": pairs}
    if inputs[0].dtype.name == dtype:

        def numpys():
            np.add(inputs[0], inputs[1], out)
            for each in inputs[2:]:
                np.add(out, each, out)

        sides["numpy"] = numpys
    sides["keep"] = lambda: (inputs, out)
    return sides


def table_line(name, size, results):
    ours = results["ours"]["max"]
    parts = [f"{name:22} {size >> 10:7} KiB  ours {ours / 1e9:6.1f} GB/s"]
    for side, measured in results.items():
        if side != "ours":
            parts.append(
                f"{side} {measured['median'] / 1e9:6.1f} (x{ours / measured['median']:.2f})"
            )
    print("  ".join(parts), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 16, 1 << 20, 1 << 26])
    parser.add_argument("--json")
    options = parser.parse_args()

    results, ratios = {}, {}
    for size in options.sizes:
        cases = [(f"{dtype} {op}", 3, pair_sides, (dtype, op, size)) for dtype, op in CASES]
        cases += [
            (f"{dtype} sum of {MANY}", MANY + 1, many_sides, (dtype, size))
            for dtype in ("float32", "float16", "bfloat16", "float8_e4m3fn")
        ]
        for name, moved, make, arguments in cases:
            sides = make(*arguments)
            alive = sides.pop("keep")
            measured = measure(sides, moved * size, options.rounds)
            del alive
            key = f"{name}, {size} bytes"
            results[key] = measured
            ours = measured["ours"]["max"]
            ratios[key] = {
                side: ours / each["max"] for side, each in measured.items() if side != "ours"
            }
            table_line(name, size, measured)

    for side in ("numpy", "float32"):
        found = [each[side] for each in ratios.values() if side in each]
        if found:
            print(
                f"ours beside {side}: median x{statistics.median(found):.2f},"
                f" least {min(found):.2f}"
            )
    report.write(options.json, results=results, ratios=ratios)


if __name__ == "__main__":
    main()

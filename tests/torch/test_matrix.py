"""Every operation x dtype x op x group size x number of elements, against torch's gloo.

The same function runs an operation of devicemesh.distributed and of torch.distributed, on
torch tensors, in the same processes. What torch refuses is held against numpy alone:
what is known of the inputs of all ranks, combined in a wider type.

Half of the floating-point inputs are such that every result along the way is exact: these
must be equal. For the others each step may round once.
"""

import functools
import logging
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as theirs  # noqa: E402

import devicemesh.distributed as ours  # noqa: E402

MANY = 64 * 1024 + 1
SIZES = (0, 1, 7, MANY)

INTEGERS = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
]
FLOATS = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]
# For many elements, where the type matters less and the time more.
DTYPES_OF_MANY = (torch.uint8, torch.int64, torch.bfloat16, torch.float32)
OPS_OF_MANY = ("sum", "max")

FACTOR = 0.5


def ops_of(dtype):
    """Names of the ops that devicemesh has for the type."""
    if dtype in INTEGERS:
        return ("sum", "product", "min", "max", "avg", "band", "bor", "bxor")
    if dtype in FLOATS:
        return ("sum", "product", "min", "max", "avg", "premul_sum")
    if dtype in COMPLEX:
        return ("sum", "product", "avg", "premul_sum")
    return ("sum", "product", "min", "max", "band", "bor", "bxor")


def op_for(module, name):
    """torch's ReduceOp or ours. ValueError where torch has it for NCCL alone."""
    if name == "premul_sum":
        if module is theirs:
            raise ValueError("for NCCL alone")
        return ours.ReduceOp.premul_sum(FACTOR)
    return getattr(module.ReduceOp, name.upper())


# --- inputs -----------------------------------------------------------------------------


@functools.lru_cache(maxsize=24)  # one case after the other has the same
def values(dtype, count, rank, signs):
    """The input of a rank: what all ranks can work out."""
    generator = np.random.default_rng([count, rank, DTYPES.index(dtype)])
    if dtype is torch.bool:
        return torch.from_numpy(generator.integers(0, 2, count).astype(bool))
    if dtype in INTEGERS:
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        limits = np.iinfo(kind)
        return torch.from_numpy(
            generator.integers(limits.min, limits.max, count, kind, endpoint=True)
        )
    if dtype in COMPLEX:
        real, imag = (exact_and_random(generator, count, signs) for _ in range(2))
        numbers = real + 1j * imag
        return torch.from_numpy(numbers).to(dtype)
    return torch.from_numpy(exact_and_random(generator, count, signs)).to(dtype)


def exact_and_random(generator, count, signs):
    exact = generator.choice([-1.0, 1.0] if signs else [-1.0, 0.0, 1.0], count)
    return np.where(np.arange(count) % 2 == 0, exact, generator.uniform(0.5, 1.5, count))


# --- what numpy says --------------------------------------------------------------------


def wide(tensor):
    """As a numpy array of a type in which the sums of a few are (nearly) exact."""
    if tensor.dtype in COMPLEX:
        return tensor.numpy().astype(np.clongdouble)
    if tensor.dtype in FLOATS:
        return tensor.to(torch.float64).numpy().astype(np.longdouble)
    return tensor.numpy()


COMBINE = {
    "product": np.prod,
    "min": np.min,
    "max": np.max,
    "band": np.bitwise_and.reduce,
    "bor": np.bitwise_or.reduce,
    "bxor": np.bitwise_xor.reduce,
}


def combined(inputs, op):
    """(the result, how far rounding may take it)."""
    dtype = inputs[0].dtype
    stack = np.stack([wide(each) for each in inputs])
    if dtype is torch.bool:
        op = {"sum": "bor", "product": "band"}.get(op, op)
    if op == "premul_sum":
        stack = stack * stack.dtype.type(FACTOR)
    if op in COMBINE:
        named = {} if op in ("min", "max", "band", "bor", "bxor") else {"dtype": stack.dtype}
        result = COMBINE[op](stack, axis=0, **named)
    else:
        result = stack.sum(axis=0, dtype=stack.dtype)
    if op == "avg":
        if dtype in INTEGERS:
            # Towards zero, in the type's own width.
            whole = np.abs(result.astype(object)) // len(inputs)
            result = (whole * np.sign(result.astype(object))).astype(stack.dtype)
        else:
            result = result / len(inputs)
    if dtype not in FLOATS and dtype not in COMPLEX:
        return result, None
    if op in ("min", "max"):
        return result, np.zeros(result.shape)
    steps = len(inputs) - 1 + (op in ("avg", "premul_sum"))
    if op == "product":
        scale = np.prod(np.abs(stack), axis=0) * (4 if dtype in COMPLEX else 1)
    else:
        scale = np.abs(stack).sum(axis=0)
    if op == "avg":
        scale = scale / len(inputs)
    bound = (steps * torch.finfo(dtype).eps * scale).astype(float)
    exact = (is_unit(stack.real) & is_unit(stack.imag) if dtype in COMPLEX else is_unit(stack)).all(
        0
    )
    bound[exact] = (torch.finfo(dtype).eps * np.abs(result[exact])) if op == "avg" else 0
    return result, bound


def is_unit(numbers):
    """Of -1, 0 and 1 (or half of them) no result has to be rounded, but by a division."""
    return np.isin(numbers, [-1, -0.5, 0, 0.5, 1])


# --- operations -------------------------------------------------------------------------

# run(dist, tensor, rank, size, op) gives this rank's result. expected(inputs, rank, op) is a
# pair as `combined` gives it; a result of None is not looked at. `factor` is how many times
# the elements of one piece a rank puts in.


class Case:
    factor = 1
    reduces = False

    def elements(self, count, rank, size):
        return count * (size if self.factor == "size" else 1)


class AllReduce(Case):
    reduces = True

    def run(self, dist, x, rank, size, op):
        x = x.clone()
        dist.all_reduce(x, op)
        return x

    def expected(self, inputs, rank, op):
        return combined(inputs, op)


class Reduce(AllReduce):
    def run(self, dist, x, rank, size, op):
        kept = x.clone()
        x = x.clone()
        dist.reduce(x, dst=size - 1, op=op)
        if dist is ours and rank != size - 1:
            assert same_bytes(x, kept)
        return x if rank == size - 1 else None


class ReduceScatter(Case):
    reduces = True
    factor = "size"

    def run(self, dist, x, rank, size, op):
        out = torch.empty_like(x[: len(x) // size])
        dist.reduce_scatter(out, list(x.chunk(size)) if len(x) else [x] * size, op)
        return out

    def expected(self, inputs, rank, op):
        return combined([piece(x, rank, len(inputs)) for x in inputs], op)


class ReduceScatterTensor(ReduceScatter):
    def run(self, dist, x, rank, size, op):
        out = torch.empty_like(x[: len(x) // size])
        dist.reduce_scatter_tensor(out, x, op)
        return out


def piece(x, rank, size):
    n = len(x) // size
    return x[rank * n : (rank + 1) * n]


class Broadcast(Case):
    def run(self, dist, x, rank, size, op):
        x = x.clone()
        dist.broadcast(x, src=size // 2)
        return x

    def expected(self, inputs, rank, op):
        return inputs[len(inputs) // 2]


class AllGather(Case):
    def run(self, dist, x, rank, size, op):
        out = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(out, x)
        return torch.cat(out)

    def expected(self, inputs, rank, op):
        return torch.cat(inputs)


class AllGatherIntoTensor(AllGather):
    def run(self, dist, x, rank, size, op):
        out = torch.empty(size * len(x), dtype=x.dtype)
        dist.all_gather_into_tensor(out, x)
        return out


class Gather(AllGather):
    def run(self, dist, x, rank, size, op):
        out = [torch.empty_like(x) for _ in range(size)] if rank == 0 else None
        dist.gather(x, out, dst=0)
        return None if out is None else torch.cat(out)


class Scatter(Case):
    factor = "size"

    def run(self, dist, x, rank, size, op):
        out = torch.empty_like(piece(x, 0, size))
        pieces = [piece(x, i, size) for i in range(size)]
        dist.scatter(out, pieces if rank == size - 1 else None, src=size - 1)
        return out

    def expected(self, inputs, rank, op):
        return piece(inputs[-1], rank, len(inputs))


class AllToAllSingle(Case):
    factor = "size"

    def run(self, dist, x, rank, size, op):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    def expected(self, inputs, rank, op):
        return torch.cat([piece(x, rank, len(inputs)) for x in inputs])


class AllToAll(AllToAllSingle):
    def run(self, dist, x, rank, size, op):
        out = [torch.empty_like(piece(x, 0, size)) for _ in range(size)]
        dist.all_to_all(out, [piece(x, i, size) for i in range(size)])
        return torch.cat(out)


class AllToAllUneven(Case):
    """Rank r sends (r + i) % 3 times as much as usual to rank i."""

    def elements(self, count, rank, size):
        self.count = count
        return sum(self.splits(rank, size))

    def splits(self, rank, size):
        return [self.count * ((rank + i) % 3) for i in range(size)]

    def run(self, dist, x, rank, size, op):
        splits = self.splits(rank, size)
        out = torch.empty_like(x)  # as much comes as goes
        dist.all_to_all_single(out, x, list(splits), list(splits))
        return out

    def expected(self, inputs, rank, op):
        pieces = []
        for source, x in enumerate(inputs):
            splits = self.splits(source, len(inputs))
            start = sum(splits[:rank])
            pieces.append(x[start : start + splits[rank]])
        return torch.cat(pieces)


class SendRecv(Case):
    """Round the ring."""

    def run(self, dist, x, rank, size, op):
        out = torch.empty_like(x)
        if size == 1:
            return x
        steps = [
            lambda: dist.send(x, (rank + 1) % size, tag=3),
            lambda: dist.recv(out, (rank - 1) % size, tag=3),
        ]
        for step in steps if rank % 2 == 0 else reversed(steps):
            step()
        return out

    def expected(self, inputs, rank, op):
        return inputs[rank - 1]


CASES = [
    *(AllReduce(), Reduce(), ReduceScatter(), ReduceScatterTensor()),
    *(Broadcast(), AllGather(), AllGatherIntoTensor(), Gather(), Scatter()),
    *(AllToAllSingle(), AllToAll(), AllToAllUneven(), SendRecv()),
]


# --- the matrix -------------------------------------------------------------------------


def same_bytes(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.numel() == 0 or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_against_numpy(what, got, result, bound):
    if bound is None:
        assert np.array_equal(wide(got), result), what
        return
    off = np.abs(wide(got) - result).astype(float)
    assert (off <= bound).all(), f"{what}: off by {off.max()}"


def check_against_torch(what, got, theirs_got, bound):
    if bound is None:
        assert torch.equal(got, theirs_got), what  # torch's sums of bools are bytes of 2
        return
    # Torch's own error may be as large.
    assert (np.abs(wide(got) - wide(theirs_got)).astype(float) <= 2 * bound).all(), what


def theirs_result(case, x, rank, size, op):
    """None where torch refuses, which it does on all ranks."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return case.run(theirs, x, rank, size, op and op_for(theirs, op))
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return None


def combinations():
    for count in SIZES:
        for dtype in DTYPES_OF_MANY if count == MANY else DTYPES:
            for case in CASES:
                if not case.reduces:
                    yield case, count, dtype, None
            for op in ops_of(dtype):
                for case in CASES:
                    if case.reduces and (count != MANY or op in OPS_OF_MANY):
                        yield case, count, dtype, op


@pytest.mark.ranks(1, 2, 3, 4, 5, 8, timeout=170)
def test_matrix(rank, world_size, shared_path):
    torch.set_num_threads(1)
    logging.disable(logging.DEBUG)  # torch logs what it refuses
    theirs.init_process_group(
        "gloo",
        store=theirs.FileStore(str(shared_path / "theirs"), world_size),
        rank=rank,
        world_size=world_size,
    )
    ours.init_process_group("gloo", timeout=600)
    both = alone = 0
    for case, count, dtype, op in combinations():
        name = type(case).__name__
        what = f"{name} of {count} {dtype} by {op} on {world_size}, rank {rank}"
        inputs = [
            values(dtype, case.elements(count, each, world_size), each, op == "product")
            for each in range(world_size)
        ]
        x = inputs[rank]
        got = case.run(ours, x, rank, world_size, op and op_for(ours, op))
        torchs = theirs_result(case, x, rank, world_size, op)
        both, alone = both + (torchs is not None), alone + (torchs is None)
        if got is None:
            continue
        expected = case.expected(inputs, rank, op)
        if not case.reduces:
            assert same_bytes(got, expected), what
            assert torchs is None or same_bytes(torchs, got), what
            continue
        check_against_numpy(what, got, *expected)
        if torchs is not None:
            check_against_torch(what, got, torchs, expected[1])
    assert both > alone / 2, (both, alone)
    print(f"{both} combinations with torch, {alone} without")
    theirs.destroy_process_group()
    ours.destroy_process_group()

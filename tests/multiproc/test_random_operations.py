"""Random operations in random order on random sub-groups of a 2 x 2 x 2 mesh.

A sequence is made from a seed and run by all ranks. Each rank has registers (arrays) and a
model of those of all ranks; an operation changes the registers of some lines of the mesh,
along some of its dims. Asynchronous ones run on while others start: a register that is still
in use is waited for before it is touched, and then looks as the model says. All ranks meet
the operations in the same order, each only its own, so nothing can wait for ever.

    DEVICEMESH_RANDOM_OPERATIONS=10000 python -m pytest tests/multiproc/test_random_operations.py

DEVICEMESH_RANDOM_SEED chooses another sequence.
"""

import os
import random

import numpy as np
import pytest
from measure import descriptors, heap_bytes, threads

import devicemesh

OPERATIONS = int(os.environ.get("DEVICEMESH_RANDOM_OPERATIONS", "500"))
SEED = int(os.environ.get("DEVICEMESH_RANDOM_SEED", "0"))

NAMES = ("a", "b", "c")
PLACES = ("a", "b", "c", "ab", "bc", "ac", "abc")  # dims that an operation goes along
LENGTHS = (8, 24, 1000, 8192)  # of the registers: each divides into 8
OPS = {
    "sum": np.add.reduce,
    "product": np.multiply.reduce,
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
    "band": np.bitwise_and.reduce,
    "bor": np.bitwise_or.reduce,
    "bxor": np.bitwise_xor.reduce,
}


def start_values(rank):
    generator = np.random.default_rng(rank)
    return [generator.integers(-(2**62), 2**62, length) for length in LENGTHS]


# --- operations ---------------------------------------------------------------------------

# Each makes its call, which returns a Work or None, and gives (work, result): what
# result() returns is to be stored in the register once the work has ended (None: the
# register is what was passed). model(values, i) is the same on the registers of a whole group:
# the new value of member i, or of its first elements. `k` is a random member, `op` a name.


class Op:
    def __init__(self, k, op):
        self.k = k
        self.op = op

    def takes_part(self, i):
        return True

    def __repr__(self):
        return f"{type(self).__name__}(k={self.k}, op={self.op})"


class AllReduce(Op):
    def call(self, group, x, **how):
        return group.all_reduce(x, self.op, **how), None

    def model(self, values, i):
        return OPS[self.op](values)


class Reduce(AllReduce):
    def call(self, group, x, **how):
        return group.reduce(x, self.k, self.op, **how), None

    def model(self, values, i):
        return OPS[self.op](values) if i == self.k else values[i]


class Broadcast(Op):
    def call(self, group, x, **how):
        return group.broadcast(x, self.k, **how), None

    def model(self, values, i):
        return values[self.k]


class AllGatherIntoTensor(Broadcast):
    def call(self, group, x, **how):
        out = np.empty((group.size(), len(x)), x.dtype)
        return group.all_gather_into_tensor(out, x, **how), lambda: out[self.k]


class AllGather(Broadcast):
    def call(self, group, x, **how):
        out = [np.empty_like(x) for _ in range(group.size())]
        return group.all_gather(out, x, **how), lambda: out[self.k]


class Gather(Op):
    """The root takes the last one's."""

    def call(self, group, x, **how):
        if group.rank() != self.k:
            return group.gather(x, root=self.k, **how), None
        out = [np.empty_like(x) for _ in range(group.size())]
        return group.gather(x, out, self.k, **how), lambda: out[-1]

    def model(self, values, i):
        return values[-1] if i == self.k else values[i]


class Scatter(Op):
    def call(self, group, x, **how):
        n = group.size()
        out = np.empty(len(x) // n, x.dtype)
        pieces = np.split(x, n) if group.rank() == self.k else None
        return group.scatter(out, pieces, self.k, **how), lambda: out

    def model(self, values, i):
        return np.split(values[self.k], len(values))[i]


class ReduceScatterTensor(Op):
    def call(self, group, x, **how):
        out = np.empty(len(x) // group.size(), x.dtype)
        return group.reduce_scatter_tensor(out, x, self.op, **how), lambda: out

    def model(self, values, i):
        return np.split(OPS[self.op](values), len(values))[i]


class ReduceScatter(ReduceScatterTensor):
    def call(self, group, x, **how):
        out = np.empty(len(x) // group.size(), x.dtype)
        pieces = [each.copy() for each in np.split(x, group.size())]
        return group.reduce_scatter(out, pieces, self.op, **how), lambda: out


class AllToAllSingle(Op):
    def call(self, group, x, **how):
        out = np.empty_like(x)
        return group.all_to_all_single(out, x, **how), lambda: out

    def model(self, values, i):
        return np.concatenate([np.split(each, len(values))[i] for each in values])


class AllToAll(AllToAllSingle):
    def call(self, group, x, **how):
        n = group.size()
        out = [np.empty(len(x) // n, x.dtype) for _ in range(n)]
        work = group.all_to_all(out, np.split(x, n), **how)
        return work, lambda: np.concatenate(out)


class Barrier(Op):
    def call(self, group, x, **how):
        return group.barrier(**how), None

    def model(self, values, i):
        return values[i]


class Message(Op):
    """From member 0, or from 1 to 0. The tag is the operation's own, so that any may send."""

    def __init__(self, k, op):
        super().__init__(k, op)
        self.tag = 0

    def source_and_destination(self):
        return (0, self.k) if self.k else (1, 0)

    def takes_part(self, i):
        return i in self.source_and_destination()

    def call(self, group, x, async_op=False):
        source, destination = self.source_and_destination()
        if group.rank() == source:
            send = group.isend if async_op else group.send
            return send(x, destination, self.tag), None
        if async_op:
            return group.irecv(x, source, self.tag), None
        assert group.recv(x, None, self.tag) == source
        return None, None

    def model(self, values, i):
        source, destination = self.source_and_destination()
        return values[source] if i == destination else values[i]


KINDS = (
    *(AllReduce, Reduce, Broadcast, AllGatherIntoTensor, AllGather, Gather, Scatter),
    *(ReduceScatterTensor, ReduceScatter, AllToAllSingle, AllToAll, Barrier, Message),
)


# --- a run --------------------------------------------------------------------------------


class Run:
    def __init__(self, mesh, rank):
        self.rank = rank
        self.lines = {place: lines_along(place) for place in PLACES}
        self.groups = {}
        for place in PLACES:
            dims = mesh[tuple(place)]
            group = (dims if len(place) == 1 else dims.flatten()).get_group()
            assert list(group.ranks) in self.lines[place]
            self.groups[place] = group
        self.model = [start_values(each) for each in range(8)]
        self.registers = start_values(rank)
        self.busy = {}  # register -> (work, result, expected, what)

    def settle(self, register):
        """Waits for what uses the register and looks at it."""
        if register in self.busy:
            work, *how_it_ends = self.busy.pop(register)
            work.wait()
            self.store(register, *how_it_ends)

    def settle_all(self):
        for register in list(self.busy):
            self.settle(register)

    def store(self, register, result, expected, what):
        if result is not None:
            value = result()
            self.registers[register][: len(value)] = value
        assert np.array_equal(self.registers[register], expected), what

    def step(self, number, generator):
        """One operation, of which the ranks outside the chosen lines keep the model alone."""
        place = generator.choice(PLACES)
        kind = generator.choice(KINDS)
        register = generator.randrange(len(LENGTHS))
        asynchronous = generator.random() < 0.5
        op = kind(generator.randrange(2 ** len(place)), generator.choice(list(OPS)))
        if kind is Message:
            op.tag = number
        lines = [line for line in self.lines[place] if generator.random() < 0.7]
        what = f"#{number}: {op!r} along {place}{' async' if asynchronous else ''}"

        mine = None
        for line in lines:
            values = [self.model[each][register] for each in line]
            taking_part = [i for i in range(len(line)) if op.takes_part(i)]
            after = [op.model(values, i) for i in taking_part]
            for i, value in zip(taking_part, after, strict=True):
                new = self.model[line[i]][register].copy()
                new[: len(value)] = value
                self.model[line[i]][register] = new
                if line[i] == self.rank:
                    mine = new
        if mine is None:
            return
        self.settle(register)
        how = {"async_op": True} if asynchronous else {}
        work, result = op.call(self.groups[place], self.registers[register], **how)
        if asynchronous:
            self.busy[register] = work, result, mine, what
        else:
            assert work is None
            self.store(register, result, mine, what)


def lines_along(place):
    """The ranks of each line of the mesh along the dims."""
    cube = np.arange(8).reshape(2, 2, 2)
    along = [NAMES.index(name) for name in place]
    others = [dim for dim in range(3) if dim not in along]
    return cube.transpose(others + along).reshape(-1, 2 ** len(place)).tolist()


def open_all(group):
    """All connections and threads that the group will ever have are there afterwards."""
    group.barrier(async_op=True).wait()
    others = [peer for peer in range(group.size()) if peer != group.rank()]
    sent, received = np.zeros(1), np.zeros(len(others))
    works = [group.isend(sent, peer) for peer in others]
    works += [group.irecv(received[i : i + 1], peer) for i, peer in enumerate(others)]
    for work in works:
        work.wait()
    group.barrier()


@pytest.mark.ranks(8, timeout=max(100, OPERATIONS // 5))
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_random_operations(transport, rank, monkeypatch):
    if transport == "tcp":
        monkeypatch.setenv("DEVICEMESH_TRANSPORT", "tcp")
    mesh = devicemesh.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES, timeout=600)
    run = Run(mesh, rank)
    for group in run.groups.values():
        open_all(group)

    generator = random.Random(SEED)
    windows = 5
    growth, held = [], []
    for window in range(windows):
        before = heap_bytes()
        for number in range(OPERATIONS // windows):
            run.step(window * OPERATIONS + number, generator)
        run.settle_all()
        for group in run.groups.values():
            group.barrier()
        growth.append(heap_bytes() - before)
        held.append((descriptors(), threads()))
    # Connections give up their listening sockets when both sides have come.
    assert held[-1][0] <= held[1][0], held
    assert held[-1][1] <= held[0][1], held
    # The smallest thing that could be lost in each operation, beside caches that fill up.
    assert min(growth[1:]) < 16 * (OPERATIONS // windows) + 16384, growth
    devicemesh.close_world()

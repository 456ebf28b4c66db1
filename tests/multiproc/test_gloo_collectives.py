"""Collectives over gloo's TCP transport, held against numpy.

What a group of any backend does (order, overlap, endings) is in test_operations.py; the
bridge below Python, with its failures, is in tests/c/gloo_test.c.
"""

import functools
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import wait_until

import devicemesh
from devicemesh import GroupTimeoutError, MismatchError, PeerError

NEVER = 600
COUNTS = [0, 1, 7, 4097, 64 * 1024 + 1, 600 * 1024 + 1]
INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
FLOATS = ["f2", "f4", "f8"]
COMPLEX = ["c8", "c16"]
UFUNCS = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
OPS_OF = {
    **{dtype: [*UFUNCS] for dtype in INTEGERS},
    **{dtype: ["sum", "product", "min", "max"] for dtype in FLOATS},
    **{dtype: ["sum", "product"] for dtype in COMPLEX},
}


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setenv("DEVICEMESH_TRANSPORT", "tcp")
    world = devicemesh.default_world(timeout=NEVER)
    yield world.new_group(range(world.size), name="all")
    devicemesh.close_world()


def data_of(rank, count, dtype):
    """Small whole numbers, other ones on each rank: all results here are exact."""
    numbers = np.random.default_rng(1000 * count + rank).integers(0, 4, count)
    return numbers.astype(dtype)


def all_data(world_size, count, dtype):
    return [data_of(r, count, dtype) for r in range(world_size)]


def combine(arrays, op):
    if op == "avg":
        total = functools.reduce(np.add, arrays)
        if total.dtype.kind in "iu":
            return (total // len(arrays)).astype(total.dtype)
        return total / np.array(len(arrays), total.dtype)
    return functools.reduce(UFUNCS[op], arrays)


def check(actual, expected, what):
    np.testing.assert_array_equal(actual, expected, err_msg=str(what), strict=True)


@pytest.mark.ranks(1, 2, 3, 4, 5, 8, timeout=120)
def test_reductions(group, rank, world_size):
    for dtype, ops in OPS_OF.items():
        for op in ops:
            count = 37
            inputs = all_data(world_size, count, dtype)
            value = inputs[rank].copy()
            group.all_reduce(value, op)
            check(value, combine(inputs, op), ("all_reduce", dtype, op))

            inputs = all_data(world_size, 5 * world_size, dtype)
            piece = np.empty(5, dtype)
            group.reduce_scatter_tensor(piece, inputs[rank], op)
            check(
                piece,
                combine(inputs, op)[5 * rank : 5 * rank + 5],
                ("reduce_scatter", dtype, op),
            )


@pytest.mark.ranks(2, 3, 8, timeout=120)
def test_averages(group, rank, world_size):
    for dtype in [*INTEGERS, "f4", "f8"]:
        inputs = all_data(world_size, 37, dtype)
        value = inputs[rank].copy()
        group.all_reduce(value, "avg")
        expected = combine(inputs, "avg")
        if value.dtype.kind == "f":
            np.testing.assert_allclose(value, expected, rtol=1e-6)
        else:
            check(value, expected, dtype)


@pytest.mark.ranks(1, 2, 3, 4, 5, 8, timeout=120)
def test_sizes(group, rank, world_size):
    """From nothing to more than one segment of a ring, each by the path that it takes."""
    for count in COUNTS:
        inputs = all_data(world_size, count, "f4")
        value = inputs[rank].copy()
        group.all_reduce(value)
        check(value, combine(inputs, "sum"), ("all_reduce", count))

        value = inputs[rank].copy()
        for root in {0, world_size // 2, world_size - 1}:
            value = inputs[rank].copy()
            group.broadcast(value, root=root)
            check(value, inputs[root], ("broadcast", count, root))

        gathered = np.empty(count * world_size, "f4")
        group.all_gather_into_tensor(gathered, inputs[rank])
        check(gathered, np.concatenate(inputs), ("all_gather", count))

        inputs = all_data(world_size, count * world_size, "f4")
        mine = slice(count * rank, count * (rank + 1))
        piece = np.empty(count, "f4")
        group.reduce_scatter_tensor(piece, inputs[rank])
        check(piece, combine(inputs, "sum")[mine], ("reduce_scatter", count))

        exchanged = np.empty(count * world_size, "f4")
        group.all_to_all_single(exchanged, inputs[rank])
        check(exchanged, np.concatenate([i[mine] for i in inputs]), ("all_to_all", count))


@pytest.mark.ranks(3)
def test_large_arrays(group, rank, world_size):
    """Many segments of every ring; the sum is exact in float64."""
    count = 3 * 1024 * 1024 + 5
    value = np.arange(count, dtype="f8") + rank
    group.all_reduce(value)
    check(value, 3 * np.arange(count, dtype="f8") + 3, "all_reduce")

    piece = np.empty(count)
    group.reduce_scatter_tensor(piece, np.arange(3 * count, dtype="f8") * (rank + 1))
    check(piece, 6 * np.arange(rank * count, (rank + 1) * count, dtype="f8"), "reduce_scatter")

    group.broadcast(value, root=1)
    check(value, 3 * np.arange(count, dtype="f8") + 3, "broadcast")


@pytest.mark.ranks(2, 5)
def test_in_place(group, rank, world_size):
    inputs = all_data(world_size, 6, "i4")
    gathered = np.zeros((world_size, 6), "i4")
    gathered[rank] = inputs[rank]
    group.all_gather_into_tensor(gathered, gathered[rank])
    check(gathered, np.stack(inputs), "all_gather")

    inputs = all_data(world_size, 6 * world_size, "i4")
    whole = inputs[rank].copy().reshape(world_size, 6)
    group.reduce_scatter_tensor(whole[rank], whole)
    check(whole[rank], combine(inputs, "sum").reshape(world_size, 6)[rank], "reduce_scatter")


@pytest.mark.ranks(2)
def test_all_ranks_get_the_same_bits(group, rank, world_size):
    """Whatever the order of adding was."""
    rng = np.random.default_rng(rank)
    for count in (100, 100_000):
        value = rng.standard_normal(count).astype("f4")
        group.all_reduce(value)
        both = np.empty((world_size, count), "f4")
        group.all_gather_into_tensor(both, value)
        check(both[0].view("u4"), both[1].view("u4"), count)


@pytest.mark.ranks(2)
def test_messages(group, rank):
    """Tags keep messages apart; two of one tag come in order."""
    sent = [data_of(0, count, "i2") for count in (5, 5, 0, 100_000)]
    tags = [1, 1, 2, 3]
    if rank == 0:
        for array, tag in zip(sent, tags, strict=True):
            group.send(array, 1, tag)
    else:
        for array, tag in zip(sent, tags, strict=True):
            got = np.empty_like(array)
            assert group.recv(got, 0, tag) == 0
            check(got, array, tag)
    group.barrier()


@pytest.mark.ranks(3)
def test_recv_from_any(group, rank):
    if rank == 0:
        got, seen = np.empty(1, "i4"), set()
        for _ in range(2):
            source = group.recv(got)
            check(got, np.array([source], "i4"), "recv")
            seen.add(source)
        assert seen == {1, 2}
    else:
        group.send(np.array([rank], "i4"), 0)
    group.barrier()


@pytest.mark.ranks(2)
def test_transport(group):
    group.barrier()
    assert (group.backend, group.transport) == ("gloo", "tcp")


def step(group, dice, rank, world_size):
    """One operation that the dice choose, the same on every rank, and its check."""
    kind = dice.choice(["reduce", "broadcast", "gather", "scatter", "exchange", "send", "barrier"])
    count = int(dice.choice([0, 1, 5, 1000, 30_000]))
    root = int(dice.integers(world_size))
    salt = int(dice.integers(1000))
    inputs = [data_of(salt + r, count * world_size, "i4") for r in range(world_size)]
    mine = slice(count * rank, count * (rank + 1))
    if kind == "reduce":
        op = str(dice.choice(["sum", "max", "bxor"]))
        value = inputs[rank].copy()
        group.all_reduce(value, op)
        check(value, combine(inputs, op), (kind, op, count))
    elif kind == "broadcast":
        value = inputs[rank].copy()
        group.broadcast(value, root=root)
        check(value, inputs[root], (kind, count, root))
    elif kind == "gather":
        gathered = np.empty(count * world_size, "i4")
        group.all_gather_into_tensor(gathered, inputs[rank][:count])
        check(gathered, np.concatenate([i[:count] for i in inputs]), (kind, count))
    elif kind == "scatter":
        piece = np.empty(count, "i4")
        group.reduce_scatter_tensor(piece, inputs[rank])
        check(piece, combine(inputs, "sum")[mine], (kind, count))
    elif kind == "exchange":
        exchanged = np.empty(count * world_size, "i4")
        group.all_to_all_single(exchanged, inputs[rank])
        check(exchanged, np.concatenate([i[mine] for i in inputs]), (kind, count))
    elif kind == "send":
        to = (root + 1) % world_size
        if rank == root:
            group.send(inputs[root], to, salt)
        elif rank == to:
            got = np.empty(count * world_size, "i4")
            group.recv(got, root, salt)
            check(got, inputs[root], (kind, count))
    else:
        group.barrier()


@pytest.mark.ranks(2, 3, 8, timeout=120)
def test_a_random_program(group, rank, world_size):
    """Operations that follow each other without a barrier do not mix."""
    dice = np.random.default_rng(20_220_518)
    for _ in range(150):
        step(group, dice, rank, world_size)


# --- what goes wrong ---------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_mismatch_shows_both_sides(group, rank):
    call = group.broadcast if rank == 2 else group.all_reduce
    with pytest.raises((MismatchError, PeerError)) as caught:
        call(np.zeros(10, "f4"))
    assert "all_reduce(sum) of 10 float32" in str(caught.value)
    assert "broadcast of 10 float32" in str(caught.value)


@pytest.mark.ranks(4)
def test_time_out_names_who_is_missing(group, rank, shared_path):
    group.barrier()
    if rank == 3:
        wait_until(lambda: len([*shared_path.iterdir()]) == 3, "the others' time-outs")
        return
    group.timeout = 1.0
    with pytest.raises((GroupTimeoutError, PeerError), match="rank 3"):
        group.all_reduce(np.zeros(100_000))
    Path(shared_path, str(rank)).touch()


# A rank of two that dies of SIGKILL while the other waits for it.
DIES = """
import os, signal, sys
import numpy as np
import devicemesh
os.environ["DEVICEMESH_TRANSPORT"] = "tcp"
world = devicemesh.default_world(timeout=600)
group = world.new_group(range(2), name="pair")
group.barrier()
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    group.all_reduce(np.zeros(10))
except devicemesh.PeerError as error:
    print(error)
"""


def test_a_killed_peer(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    with devicemesh.StoreServer("127.0.0.1", 0) as server:
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(server.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": "2",
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, script],
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [process.communicate(timeout=60)[0] for process in ranks]
    assert ranks[1].returncode == -signal.SIGKILL, outputs
    assert ranks[0].returncode == 0, outputs
    assert "rank 1 (group rank 1) closed its connection" in outputs[0]


@pytest.mark.ranks(2)
def test_an_unknown_interface(rank, monkeypatch):
    monkeypatch.setenv("DEVICEMESH_TRANSPORT", "tcp")
    monkeypatch.setenv("DEVICEMESH_SOCKET_IFNAME", "nosuch0")
    world = devicemesh.default_world(timeout=NEVER)
    group = world.new_group(range(2))
    with pytest.raises((ValueError, PeerError), match=r"DEVICEMESH_SOCKET_IFNAME=nosuch0.*lo"):
        group.barrier()
    devicemesh.close_world()


# --- what a process has --------------------------------------------------------------------


def connections():
    """TCP sockets that this process has open, without those to the store."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = os.dup(int(name))
        except OSError:  # the folder's own descriptor
            continue
        if not stat.S_ISSOCK(os.fstat(duplicate).st_mode):
            os.close(duplicate)
            continue
        with socket.socket(fileno=duplicate) as one:
            try:
                peer = one.getpeername()
            except OSError:  # it listens
                peer = ("", 0)
            store = int(os.environ["MASTER_PORT"])
            count += one.family == socket.AF_INET and peer[1] != store
    return count


@pytest.mark.ranks(8)
def test_subgroups_connect_only_their_members(rank, monkeypatch):
    """A (2, 4) mesh opens nothing until its groups communicate, then a socket for each
    peer in them, and closes all of them."""
    monkeypatch.setenv("DEVICEMESH_TRANSPORT", "tcp")
    mesh = devicemesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    before = connections()
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    assert connections() == before
    dp.barrier()
    assert connections() == before + 1
    tp.barrier()
    assert connections() == before + 1 + 3
    for _ in range(3):
        value = np.ones(1000)
        dp.all_reduce(value)
        tp.all_reduce(value)
    assert connections() == before + 1 + 3
    # Nobody closes before all have counted.
    tp.barrier()
    dp.barrier()
    mesh.close()
    assert connections() == before
    devicemesh.close_world()

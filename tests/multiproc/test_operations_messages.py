"""Messages: send, recv, isend, irecv between processes, beside collectives."""

import os
import signal
import threading

import numpy as np
import pytest

import devicemesh
from devicemesh import ClosedError, GroupTimeoutError, MismatchError, PeerError

NEVER = 600
LARGE = 300_000  # elements of float64: announced, not sent at once


@pytest.fixture
def world():
    yield devicemesh.default_world(timeout=NEVER)
    devicemesh.close_world()


@pytest.fixture
def group(world):
    return world.new_group(range(world.size), name="all")


def threads():
    return len(os.listdir("/proc/self/task"))


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def numbers(rank, count):
    return np.arange(count) * 3.0 + rank


# --- progress -------------------------------------------------------------------------


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("count", [0, 5, LARGE])
def test_rings(group, rank, world_size, count):
    """Whatever is posted first, and with collectives between."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    got = np.zeros(count)

    work = group.isend(numbers(rank, count), right)
    assert group.recv(got, left) == left
    assert work.wait()
    np.testing.assert_array_equal(got, numbers(left, count))

    got[:] = 0
    work = group.irecv(got, left)
    group.send(numbers(rank, count), right)
    assert work.result() == left
    np.testing.assert_array_equal(got, numbers(left, count))

    got[:] = 0
    receive = group.irecv(got, left)
    total = np.ones(1)
    group.all_reduce(total)
    assert total == world_size
    pending = group.barrier(async_op=True)
    send = group.isend(numbers(rank, count), right)
    assert receive.wait()
    assert send.wait()
    assert pending.wait()
    np.testing.assert_array_equal(got, numbers(left, count))
    group.barrier()


@pytest.mark.ranks(2)
def test_a_message_goes_past_a_collective_that_waits(group, rank):
    if rank == 0:
        barrier = group.barrier(async_op=True)
        group.send(b"go on", 1)
        assert barrier.wait()
    else:
        got = bytearray(5)
        group.recv(got, 0)  # rank 0 is in its barrier
        assert got == b"go on"
        group.barrier()


@pytest.mark.ranks(2)
def test_tags_and_order(group, rank):
    """Ten messages for each of three tags, small and large mixed, received by tag in another
    order than sent."""
    sizes = [1, LARGE, 10, 0, 4097, LARGE, 2, 3, 4, 5]
    other = 1 - rank
    sends = [
        group.isend(np.full(size, 100.0 * tag + i), other, tag)
        for i, size in enumerate(sizes)
        for tag in (0, 7, 2**31 - 1)
    ]
    for tag in (2**31 - 1, 0, 7):
        for i, size in enumerate(sizes):
            got = np.zeros(size)
            assert group.recv(got, other, tag) == other
            np.testing.assert_array_equal(got, 100.0 * tag + i)
    for send in sends:
        send.wait()


@pytest.mark.ranks(4)
def test_from_any(group, rank, world_size):
    """A server by recv from any, both ends first."""
    if rank == 0:
        works = []
        arrays = [np.zeros(3) for _ in range(world_size - 1)]
        works = [group.irecv(array, tag=1) for array in arrays]
        sources = [work.result() for work in works]
        assert sorted(sources) == [1, 2, 3]
        for source, array in zip(sources, arrays, strict=True):
            np.testing.assert_array_equal(array, source)
        big = np.zeros(LARGE)
        for _ in range(world_size - 1):
            source = group.recv(big)
            np.testing.assert_array_equal(big, source)
            group.send(big, source)
    else:
        group.send(np.full(3, float(rank)), 0, 1)
        value = np.full(LARGE, float(rank))
        group.send(value, 0)
        group.recv(value, 0)
        np.testing.assert_array_equal(value, rank)


@pytest.mark.ranks(3)
def test_ranks_without_messages_do_not_take_part(group, rank):
    """Nobody but the two ends has to come."""
    if rank < 2:
        got = np.zeros(2)
        work = group.isend(np.full(2, float(rank)), 1 - rank)
        group.recv(got, 1 - rank)
        work.wait()
        np.testing.assert_array_equal(got, 1 - rank)


@pytest.mark.ranks(2)
def test_threads(group, rank):
    """Each thread has a tag of its own."""
    failures = []

    def talk(tag):
        try:
            for i in range(30):
                got = np.zeros(1 + i)
                work = group.isend(np.full(1 + i, float(tag + i)), 1 - rank, tag)
                group.recv(got, 1 - rank, tag)
                np.testing.assert_array_equal(got, tag + i)
                work.wait()
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=talk, args=(tag,)) for tag in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []


# --- what they hold -------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_threads_and_descriptors_go_with_the_group(group, rank):
    group.barrier()
    before, open_before = threads(), descriptors()
    other = 1 - rank
    work = group.isend(b"x", other)
    group.recv(bytearray(1), other)
    work.wait()
    assert threads() == before + 1
    group.barrier()
    group.close()
    assert threads() <= before
    assert descriptors() <= open_before


@pytest.mark.ranks(2)
def test_arrays_stay_exported(world, group, rank):
    data = bytearray(4)
    if rank == 0:
        work = group.irecv(data, 1)
        with pytest.raises(BufferError):
            data.append(0)
        world.store.set("go", "")
        assert work.wait()
        data.append(0)
    else:
        world.store.wait(["go"])
        group.send(data, 0)


# --- failures -------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("sent", "asked", "text"),
    [
        (np.zeros(4, "f4"), np.zeros(3, "f4"), r"sends 4 float32 .* receives 3 float32 \(tag 5\)"),
        (np.zeros(4, "f4"), np.zeros(2, "f8"), "sends 4 float32 .* receives 2 float64"),
        (np.zeros(LARGE), np.zeros(LARGE + 1), "sends 300000 .* receives 300001"),
    ],
)
@pytest.mark.parametrize("receiver_first", [False, True])
def test_mismatch(world, group, rank, sent, asked, text, receiver_first):
    group.barrier()
    first = rank == (1 if receiver_first else 0)
    if not first:
        world.store.wait(["posted"])
    work = group.isend(sent, 1, 5) if rank == 0 else group.irecv(asked, 0, 5)
    if first:
        world.store.set("posted", "")
    with pytest.raises(MismatchError, match=rf"^(send|recv) #1 on group 'all' .*: rank 0 .*{text}"):
        work.wait()
    with pytest.raises(ClosedError, match=r"broken by an earlier failure: (send|recv) #1"):
        group.barrier()


@pytest.mark.ranks(3)
def test_a_mismatch_breaks_the_group_for_others_with_messages(group, rank):
    if rank == 2:
        value = bytearray(1)
        work = group.isend(value, 1, 9)  # nobody asks for it
        group.recv(value, 1)
        with pytest.raises(MismatchError, match=r"rank 0 .*sends 1 uint8 while rank 1"):
            work.wait()
    else:
        if rank == 1:
            group.send(b"x", 2)
            work = group.irecv(bytearray(2), 0)
        else:
            work = group.isend(b"x", 1)
        with pytest.raises(MismatchError):
            work.wait()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("source", [1, None])
def test_a_peer_that_never_comes(world, group, rank, source):
    if rank == 0:
        group.timeout = 0.3
        with pytest.raises(GroupTimeoutError, match=r"^recv #1 .* timed out after 0.3 s .*rank"):
            group.recv(bytearray(1), source)
        with pytest.raises(ClosedError, match="broken by an earlier failure: recv #1"):
            group.isend(b"x", 1)
        world.store.set("done", "")
    else:
        world.store.wait(["done"])


@pytest.mark.ranks(3)
def test_a_peer_that_closes(world, group, rank):
    value = bytearray(1)
    if rank == 0:
        group.send(b"a", 1)
        group.send(b"b", 2)
        world.store.wait(["ready"])
        group.close()
    elif rank == 1:
        group.recv(value, 0)
        works = [group.irecv(value, 0), group.isend(bytes(LARGE), 0)]
        world.store.set("ready", "")
        with pytest.raises(PeerError, match=r"rank 0 \(group rank 0\) closed its connection"):
            works[0].wait()
        with pytest.raises((PeerError, ClosedError), match="rank 0"):
            works[1].wait()
    else:
        group.recv(value, 0)
        assert value == b"b"


@pytest.mark.ranks(2)
def test_a_peer_that_dies(world, group, rank):
    if rank == 0:
        group.send(b"x", 1)
        world.store.set("sent", "")
        work = group.irecv(bytearray(1), 1)
        with pytest.raises(PeerError, match="rank 1"):
            work.wait()
        # the harness: rank 1 ends well, without closing anything
    else:
        group.recv(bytearray(1), 0)
        world.store.wait(["sent"])  # an abort may overtake the word that the message was taken
        group.abort()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("end", ["close", "abort"])
def test_ending_a_group_ends_messages(world, group, rank, end):
    if rank == 0:
        works = [group.irecv(bytearray(3), 1), group.irecv(bytearray(3)), group.isend(b"x", 1)]
        getattr(group, end)()
        for work in works:
            with pytest.raises(ClosedError, match=rf"the group was {end.rstrip('e')}ed"):
                work.wait()
        with pytest.raises(ClosedError):
            group.isend(b"x", 1)
        group.close()
        world.store.set("done", "")
    else:
        world.store.wait(["done"])


@pytest.mark.ranks(2)
def test_a_broken_group_ends_messages(world, group, rank):
    group.barrier()
    if rank == 0:
        work = group.irecv(bytearray(3), 1)
        group.timeout = 0.2
        with pytest.raises(GroupTimeoutError):
            group.barrier()
        with pytest.raises(ClosedError, match=r"^recv #1 .* earlier failure: barrier #2"):
            work.wait()
        world.store.set("done", "")
    else:
        world.store.wait(["done"])


@pytest.mark.ranks(2)
def test_ctrl_c(world, group, rank):
    if rank == 0:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        data = bytearray(3)
        with pytest.raises(KeyboardInterrupt):
            group.recv(data, 1)
        data.append(0)
        with pytest.raises(ClosedError, match=r"earlier failure: recv #1 .* by a signal"):
            group.barrier()
        world.store.set("done", "")
    else:
        world.store.wait(["done"])

"""Worlds over several processes: where they meet, several at once, again and again, forks."""

import os
import socket

import numpy as np
import pytest

import devicemesh
from devicemesh import ClosedError, PrefixStore, World

NEVER = 600  # seconds: a test that waited for this time-out would run into its deadline


@pytest.fixture(autouse=True)
def no_default_world():
    yield
    devicemesh.close_world()


def check(world, value=1.0):
    """The world's ranks reach each other."""
    data = np.full(2, value)
    group = world.new_group(range(world.size))
    group.all_reduce(data)
    np.testing.assert_array_equal(data, value * world.size)
    return group


@pytest.mark.ranks(1, 3)
def test_from_the_environment(rank, world_size):
    world = devicemesh.default_world(timeout=NEVER)
    assert (world.rank, world.size, world.timeout) == (rank, world_size, NEVER)
    assert (world.store is None) == (world_size == 1)
    check(world)


@pytest.mark.ranks(2)
def test_init_close_init_on_one_port():
    names = set()
    for number in range(3):
        names.add(check(devicemesh.init_world(timeout=NEVER), number).name)
        devicemesh.close_world()
    assert len(names) == 1  # a new key space each time, so the same names are free again


@pytest.mark.ranks(2)
def test_close_world_leaves_what_others_need(rank):
    """Rank 1 goes on with a store that rank 0 has left."""
    world = devicemesh.default_world(timeout=NEVER)
    check(world)
    if rank == 0:
        world.store.set("left", "")
        devicemesh.close_world()
    else:
        world.store.wait(["left"])
        world.store.set("still", "here")
        assert world.store.get("still") == b"here"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.ranks(3)
def test_rank_0_serves_where_no_launcher_does(rank, monkeypatch):
    harness = devicemesh.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    if rank == 0:
        harness.set("port", str(free_port()))
    port = harness.get("port").decode()
    monkeypatch.setenv("MASTER_PORT", port)

    for _ in range(2):
        world = devicemesh.init_world(timeout=NEVER)
        check(world)
        devicemesh.close_world()

    # The server is still there for those who need it longer than rank 0 does.
    if rank == 0:
        harness.set("rank 0 closed", "")
        harness.wait(["done"])
    if rank == 1:
        harness.wait(["rank 0 closed"])
        devicemesh.TCPStore("127.0.0.1", int(port)).set("late", "1")
        harness.set("done", "")
    harness.close()


@pytest.mark.ranks(1)
def test_a_port_that_is_taken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(OSError, match=rf"in use \(rank 0 serves .* MASTER_PORT={port}\)"):
            devicemesh.init_world()
    assert not devicemesh.is_initialized()


@pytest.mark.ranks(2)
def test_several_worlds_in_one_process(rank, world_size):
    default = devicemesh.default_world(timeout=NEVER)
    others = [
        World(PrefixStore(name, default.store), rank, world_size, NEVER) for name in ("a", "b")
    ]
    groups = [check(world, value) for value, world in enumerate([*others, default])]
    others[0].close()
    assert [group.closed for group in groups] == [True, False, False]
    groups[1].barrier()
    groups[2].barrier()


@pytest.mark.ranks(2)
def test_a_store_written_in_python(rank, world_size):
    """Anything with torch's Store methods will do."""

    class Wrapped:
        def __init__(self, store):
            self._store = store

        def __getattr__(self, name):
            return getattr(self._store, name)

    store = Wrapped(devicemesh.default_world(timeout=NEVER).store)
    world = World(store, rank, world_size, NEVER)
    assert world.store is store
    check(world)


@pytest.mark.ranks(2)
def test_a_forked_child_harms_nobody(rank):
    world = devicemesh.default_world(timeout=NEVER)
    group = check(world)
    work = group.barrier(async_op=True)
    work.wait()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                group.barrier()
            except ClosedError:
                code = 2
            try:
                world.new_group([0, 1])
            except ClosedError:
                code += 2
            group.close()
            devicemesh.close_world()
            del group, work, world
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    group.barrier()
    check(world)

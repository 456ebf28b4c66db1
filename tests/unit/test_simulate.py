"""simulate: a default world without communication."""

import threading

import pytest

import devicemesh
from devicemesh import DeviceMeshError, World, simulate


@pytest.fixture(autouse=True)
def no_default_world(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    devicemesh.close_world()
    yield
    devicemesh.close_world()


# --- bad arguments --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0,), ValueError, "size must be in"),
        ((4, 4), ValueError, "rank must be in 0..3, got 4"),
        ((4, -1), ValueError, "rank must be in 0..3, got -1"),
        (("4",), TypeError, "size must be an int"),
        ((), TypeError, "world_size"),
    ],
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        simulate(*arguments)


def test_entered_once():
    block = simulate(world_size=2)
    with block:
        pass
    with pytest.raises(DeviceMeshError, match="entered once"), block:
        pass


# --- what it does ---------------------------------------------------------------------


def test_is_the_default_world_inside():
    assert not devicemesh.is_initialized()
    with simulate(world_size=8, rank=5) as world:
        assert isinstance(world, World)
        assert world.is_simulated
        assert devicemesh.is_initialized()
        assert devicemesh.default_world() is world
        assert (world.rank, world.size) == (5, 8)
    assert not devicemesh.is_initialized()
    assert world.closed


def test_nests():
    real = devicemesh.default_world()
    with simulate(world_size=2) as outer:
        with simulate(world_size=3) as inner:
            assert devicemesh.default_world() is inner
        assert devicemesh.default_world() is outer
        assert not outer.closed
    assert devicemesh.default_world() is real


def test_ends_on_errors():
    with pytest.raises(KeyError), simulate(world_size=2) as world:
        raise KeyError
    assert world.closed
    assert not devicemesh.is_initialized()


def test_threads_see_it():
    seen = []
    with simulate(world_size=2) as world:
        thread = threading.Thread(target=lambda: seen.append(devicemesh.default_world()))
        thread.start()
        thread.join()
    assert seen == [world]


def test_a_million_ranks():
    with simulate(world_size=1_000_000, rank=999_999) as world:
        assert world.rank == 999_999

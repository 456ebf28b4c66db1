"""Members that ask for different things all learn it, long before the time-out."""

import contextlib

import pytest

import devicemesh
from devicemesh import GroupTimeoutError, MismatchError

NEVER = 600  # seconds: a test that waited for this time-out would run into its deadline


@pytest.fixture
def world():
    yield devicemesh.default_world(timeout=NEVER)
    devicemesh.close_world()


def same_everywhere(world, key, value):
    """`value` is the same on every rank."""
    world.store.set(f"{key}/{world.rank}", value)
    return all(world.store.get(f"{key}/{rank}") == value.encode() for rank in range(world.size))


@pytest.mark.ranks(2, 4)
def test_the_same_request_has_the_same_name(world):
    everybody = range(world.size)
    mine = world.new_group([world.rank])
    first, second = world.new_group(everybody), world.new_group(everybody)
    assert len({mine.name, first.name, second.name}) == 3
    assert same_everywhere(world, "first", first.name)
    assert same_everywhere(world, "second", second.name)
    for group in (mine, second, first):
        group.barrier()


@pytest.mark.ranks(2, 4)
def test_everybody_learns_of_a_disagreement(world):
    """Who comes second is told at once, who came first when its group first meets."""
    odd = world.size - 1
    name = "pp" if world.rank == odd else "tp"

    def ask():
        world.new_group(range(world.size), name=name).barrier()

    with pytest.raises(MismatchError) as caught:
        ask()
    text = str(caught.value)
    assert f"rank {odd} for a group of {world.size} named 'pp', backend 'gloo'" in text
    assert f"for a group of {world.size} named 'tp', backend 'gloo'" in text


@pytest.mark.ranks(2)
def test_a_disagreement_is_over_with_the_next_request(world):
    with contextlib.suppress(MismatchError):
        world.new_group([0, 1], name=["a", "b"][world.rank])
    world.new_group([0, 1]).barrier()


@pytest.mark.ranks(3)
def test_a_time_out_says_who_asked_for_something_else(world):
    """Different member sets are different requests: only waiting can show that."""
    if world.rank == 0:
        group = world.new_group([0, 1, 2], timeout=0.5)
        world.store.wait(["asked"])
        with pytest.raises(GroupTimeoutError) as caught:
            group.barrier()
        text = str(caught.value)
        assert "barrier #1 on group (ranks 0, 1, 2)" in text
        assert "rank 1 last asked for a group of 2, backend 'gloo'" in text
        assert "rank 2 has asked for nothing yet" in text
        assert "this rank last asked for a group of 3, backend 'gloo'" in text
        world.store.set("done", "")
    else:
        if world.rank == 1:
            world.new_group([0, 1])
            world.store.set("asked", "")
        world.store.wait(["done"])

"""Worlds leave nothing behind, however they end."""

from contextlib import suppress

from measure import check_steady

import devicemesh
from devicemesh import ClosedError, World


def dropped():
    World(None, 0, 1)
    World.simulated(4)


def closed():
    with World.simulated(4) as world:
        world.new_group([0, 1])


def refused():
    for arguments in ((None, 0, 0), (None, 1, 1), (None, 0, 2), (None, 0, 1, -1), (None, "x", 1)):
        with suppress(TypeError, ValueError):
            World(*arguments)


def group_requests():
    """Counters of member sets go with the world."""
    with World.simulated(16) as world:
        for i in range(1, 16):
            world.new_group([0, i])
            world.new_group([0, i])
        for ranks in ([], [1], [0, 0], [99], ["x"]):
            with suppress(TypeError, ValueError):
                world.new_group(ranks)


def group_requests_of_a_closed_world():
    world = World.simulated(2)
    world.close()
    with suppress(ClosedError):
        world.new_group([0, 1])


def default():
    devicemesh.default_world()
    with devicemesh.simulate(world_size=8, rank=3):
        devicemesh.default_world()
    devicemesh.close_world()


def facts():
    world = World.simulated(2)
    repr(world), world.rank, world.size, world.timeout, world.store, world.closed
    hash(world)


for step in (
    dropped,
    closed,
    refused,
    group_requests,
    group_requests_of_a_closed_world,
    default,
    facts,
):
    check_steady(step, World, None, True)

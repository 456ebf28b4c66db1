"""Groups over gloo leave no descriptor, thread or memory behind, however they end."""

import sys
import threading
from contextlib import suppress
from pathlib import Path

from measure import check_steady
from two_ranks import run_two

import devicemesh
from devicemesh import ClosedError, DeviceMeshError, GroupTimeoutError, MismatchError, PeerError

if not Path(devicemesh.__file__).with_name("_gloo.so").exists():
    print("built without gloo")
    sys.exit()


def never_used():
    run_two(lambda world: world.new_group([0, 1]) and None)


def used_and_closed():
    def body(world):
        group = world.new_group([0, 1])
        group.all_reduce(bytearray(100))
        group.barrier(async_op=True).wait()
        group.close()

    run_two(body)


def used_and_dropped():
    def body(world):
        group = world.new_group([0, 1])
        group.all_reduce(bytearray(100))
        group.barrier(async_op=True).wait()

    run_two(body)


def closed_with_the_world():
    kept = run_two(lambda world: (world.new_group([0, 1]), world.new_group([0, 1])))
    for groups in kept:
        for group in groups:
            with suppress(ClosedError):
                group.barrier()


def works_dropped_while_they_run():
    def body(world):
        group = world.new_group([0, 1])
        group.barrier()
        if world.rank == 0:
            for _ in range(5):
                group.all_reduce(bytearray(100), async_op=True)
            world.store.set("given", "")
        else:
            world.store.wait(["given"])
            for _ in range(5):
                group.all_reduce(bytearray(100))
        group.barrier()

    run_two(body)


def peer_closes():
    def body(world):
        group = world.new_group([0, 1])
        group.barrier()
        if world.rank == 0:
            group.close()
        else:
            with suppress(PeerError):
                group.barrier()

    run_two(body)


def peer_never_comes():
    def body(world):
        if world.rank == 0:
            group = world.new_group([0, 1], timeout=0.01)
            with suppress(GroupTimeoutError):
                group.barrier()
            with suppress(ClosedError):
                group.barrier(async_op=True)

    run_two(body)


def aborted_while_it_runs():
    def body(world):
        group = world.new_group([0, 1])
        if world.rank == 0:
            works = [group.all_reduce(bytearray(100), async_op=True) for _ in range(3)]
            threading.Thread(target=group.abort).start()
            for work in works:
                with suppress(DeviceMeshError):
                    work.wait()

    run_two(body)


def ranks_disagree():
    def body(world):
        with suppress(MismatchError):
            world.new_group([0, 1], name=f"rank {world.rank}").barrier()

    run_two(body)


for step in (
    never_used,
    used_and_closed,
    used_and_dropped,
    closed_with_the_world,
    works_dropped_while_they_run,
    peer_closes,
    peer_never_comes,
    aborted_while_it_runs,
    ranks_disagree,
):
    check_steady(step, devicemesh.ProcessGroup, devicemesh.Work, rounds=8)

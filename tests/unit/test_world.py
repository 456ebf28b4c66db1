"""Worlds: arguments, facts, groups made without a mesh, life and death."""

import copy
import gc
import inspect
import os
import pickle
import subprocess
import sys
import textwrap
import weakref
from datetime import timedelta

import numpy as np
import pytest

import devicemesh
from devicemesh import ClosedError, ProcessGroup, World, _core

# --- bad arguments --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((None, 0, 0), ValueError, "size must be in 1..2147483647, got 0"),
        ((None, 0, -1), ValueError, "size must be in .* got -1"),
        ((None, 0, 2**31), ValueError, "size must be in .* got 2147483648"),
        ((None, 0, 10**30), ValueError, "size must be in .* got 10000"),
        ((None, 1, 1), ValueError, "rank must be in 0..0, got 1"),
        ((None, -1, 1), ValueError, "rank must be in 0..0, got -1"),
        ((None, 0, 2), ValueError, "a world of size 2 needs a store"),
        ((None, "0", 1), TypeError, "rank must be an int, got '0'"),
        ((None, 0, 1.0), TypeError, "size must be an int, got 1.0"),
        ((None, 0, 1, -1), ValueError, "timeout must be 0 or more seconds, got -1"),
        ((None, 0, 1, "1"), TypeError, "timeout must be seconds"),
        ((None, 0), TypeError, "size"),
    ],
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        World(*arguments)


@pytest.mark.parametrize(
    ("ranks", "options", "error", "text"),
    [
        ([], {}, ValueError, "at least one rank"),
        ([0, 1, 0], {}, ValueError, "must differ: 0 is there twice"),
        ([0, 4], {}, ValueError, "rank 4 is not in the world of size 4"),
        ([0, -1], {}, ValueError, "ranks must be in .* got -1"),
        ([1, 2], {}, ValueError, r"this rank \(0\) is not a member of the group of ranks 1, 2"),
        ([1], {}, ValueError, r"is not a member of the group of rank 1$"),
        (["0"], {}, TypeError, "ranks must be an int, got '0'"),
        (0, {}, TypeError, "ranks must be a sequence of ints"),
        ([0], {"backend": "mpi"}, ValueError, "unknown backend 'mpi': there are 'gloo', 'nccl', "),
        ([0], {"timeout": "soon"}, TypeError, "timeout must be seconds"),
        ([0], {"backend": 3}, TypeError, "must be str or None"),
    ],
)
def test_bad_groups(ranks, options, error, text):
    with World.simulated(4) as world, pytest.raises(error, match=text):
        world.new_group(ranks, **options)


def test_long_rank_lists_are_cut():
    with (
        World.simulated(100) as world,
        pytest.raises(ValueError, match=r"ranks 1, 2, 3, 4, 5, 6, \.\.\., 99 \(99 in all\)"),
    ):
        world.new_group(range(1, 100))


def test_default_must_be_a_world():
    with pytest.raises(TypeError, match="world must be a World, got int"):
        _core._set_default_world(3)


# --- facts ----------------------------------------------------------------------------


def test_facts():
    world = World(None, rank=0, size=1)
    assert (world.rank, world.size, world.store) == (0, 1, None)
    assert world.timeout == 1800.0
    assert not world.is_simulated
    assert not world.closed
    assert repr(world) == "<devicemesh.World rank=0 size=1>"


def test_facts_of_a_simulated_one():
    world = World.simulated(8, rank=5, timeout=timedelta(minutes=1))
    assert (world.rank, world.size, world.store, world.timeout) == (5, 8, None, 60.0)
    assert world.is_simulated
    assert repr(world) == "<devicemesh.World rank=5 size=8 simulated>"


def test_numpy_ints_are_ints():
    assert World.simulated(np.int64(8), np.int32(5)).rank == 5


@pytest.mark.parametrize(("given", "seconds"), [(None, 1800.0), (2, 2.0), (float("inf"), None)])
def test_timeout(given, seconds):
    world = World(None, 0, 1, given)
    assert world.timeout == seconds
    assert world.new_group([0]).timeout == seconds


def test_signatures():
    assert str(inspect.signature(World)) == "(store, rank, size, timeout=None)"
    assert str(inspect.signature(World.simulated)) == "(size, rank=0, timeout=None)"
    assert (
        str(inspect.signature(World.new_group))
        == "(self, /, ranks, backend=None, timeout=None, name=None)"
    )


def test_identity():
    a, b = World(None, 0, 1), World(None, 0, 1)
    assert a == a
    assert a != b
    assert len({a, b, a}) == 2


# --- groups ---------------------------------------------------------------------------


def test_groups_of_one_list_are_distinct():
    with World.simulated(4) as world:
        a, b, c = (world.new_group(ranks) for ranks in ([0, 1], [0, 1], [1, 0]))
    assert len({a.name, b.name, c.name}) == 3


def test_names_agree_between_ranks():
    """What a group is called depends on its members and their calls, not on the rank."""
    with World.simulated(4, 0) as first, World.simulated(4, 1) as second:
        first.new_group([0])
        first.new_group([0, 2])
        assert first.new_group([1, 0]).name == second.new_group([1, 0]).name
        assert first.new_group([1, 0]).name == second.new_group([1, 0]).name


def test_a_group_of_a_million():
    with World.simulated(1_000_000, 7) as world:
        group = world.new_group(range(1_000_000))
        assert (group.rank(), group.size()) == (7, 1_000_000)


# --- life and death -------------------------------------------------------------------


def test_close_is_idempotent():
    world = World.simulated(2)
    group = world.new_group([0, 1])
    world.close()
    world.close()
    assert world.closed
    assert group.closed
    assert repr(world).endswith("closed>")
    with pytest.raises(ClosedError, match="the world is closed"):
        world.new_group([0])
    with pytest.raises(ClosedError, match=r"all_reduce on group \(ranks 0, 1\): the group was"):
        group.all_reduce(bytearray(2))


def test_leaving_the_block_closes():
    with World.simulated(2) as world:
        assert not world.closed
    assert world.closed


def test_a_group_outlives_the_world_object():
    group = World.simulated(2).new_group([0, 1])
    gc.collect()
    group.all_reduce(bytearray(2))


def test_weak_references():
    world = World(None, 0, 1)
    reference = weakref.ref(world)
    assert reference() is world
    del world
    assert reference() is None


@pytest.mark.parametrize("copier", [pickle.dumps, copy.copy, copy.deepcopy])
def test_no_copies(copier):
    with pytest.raises(TypeError, match="a World cannot be pickled"):
        copier(World(None, 0, 1))


def test_types_are_closed():
    with pytest.raises(TypeError):
        type("Sub", (World,), {})
    with pytest.raises(TypeError):
        World.simulated = None
    with pytest.raises(TypeError, match="cannot create"):
        ProcessGroup()


def test_a_forked_child_is_told():
    with World.simulated(2) as world:
        group = world.new_group([0, 1])
        child = os.fork()
        if child == 0:
            code = 1
            try:
                group.all_reduce(bytearray(2))
            except ClosedError as error:
                group.close()
                world.close()
                code = 0 if f"made by process {os.getppid()}" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0) == (child, 0)
        group.all_reduce(bytearray(2))


def test_exit_without_close():
    program = """
        import devicemesh
        world = devicemesh.World.simulated(2)
        group = world.new_group([0, 1])
        work = group.all_reduce(bytearray(4), async_op=True)
        default = devicemesh.default_world()
    """
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "RANK"},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_public_names():
    for name in devicemesh.__all__:
        assert getattr(devicemesh, name) is not None

"""Which way a CPU group's bytes go, and what decides it."""

import os

import numpy as np
import pytest

import devicemesh
from devicemesh import DeviceMeshError, MismatchError

NEVER = 600  # seconds: a test that waited for this time-out would run into its deadline


@pytest.fixture
def group():
    world = devicemesh.default_world(timeout=NEVER)
    yield world.new_group(range(world.size), name="all")
    devicemesh.close_world()


def check_sum(group):
    value = np.full(3000, group.rank(), "f4")
    group.all_reduce(value)
    np.testing.assert_array_equal(value, sum(range(group.size())))


def is_mapped(word):
    with open("/proc/self/maps") as maps:
        return any(word in line for line in maps)


@pytest.mark.ranks(2)
def test_an_unknown_transport_is_refused(group, rank, monkeypatch):
    monkeypatch.setenv("DEVICEMESH_TRANSPORT", "pigeon")
    with pytest.raises(ValueError, match=r"DEVICEMESH_TRANSPORT must be .* got 'pigeon'"):
        group.barrier()


@pytest.mark.ranks(3)
def test_wishes_that_contradict_each_other(group, rank, monkeypatch):
    monkeypatch.setenv("DEVICEMESH_TRANSPORT", "tcp" if rank == 2 else "shm")
    with pytest.raises(MismatchError, match="'shm' on rank 0 and 'tcp' on rank 2"):
        group.barrier()


@pytest.mark.ranks(2)
def test_shm_across_hosts_is_refused(group, rank, monkeypatch):
    monkeypatch.setenv("DEVICEMESH_TRANSPORT", "shm")
    monkeypatch.setenv("DEVICEMESH_HOST_ID", f"host {rank}")
    with pytest.raises(DeviceMeshError, match="ranks 0 and 1 do not share a host"):
        group.barrier()


@pytest.mark.ranks(2, 4)
def test_ranks_of_one_host_share_memory(group):
    assert (group.backend, group.transport) == ("gloo", "none")
    check_sum(group)
    assert (group.backend, group.transport) == ("gloo", "shm")
    assert is_mapped("memfd:devicemesh")
    assert not is_mapped("libgloo")
    group.close()
    assert not is_mapped("memfd:devicemesh")


@pytest.mark.ranks(2, 4)
def test_nothing_is_visible_in_the_file_system(group):
    before = os.listdir("/dev/shm")
    check_sum(group)
    assert os.listdir("/dev/shm") == before


@pytest.mark.ranks(4)
def test_ranks_of_different_hosts_use_tcp(rank, monkeypatch):
    """Two hosts of two ranks: groups inside a host share memory, the others do not."""
    monkeypatch.setenv("DEVICEMESH_HOST_ID", f"host {rank // 2}")
    world = devicemesh.default_world(timeout=NEVER)
    for ranks, transport in (
        ([0, 1], "shm"),
        ([2, 3], "shm"),
        ([0, 2], "tcp"),
        ([1, 3], "tcp"),
        ([0, 1, 2, 3], "tcp"),
    ):
        if rank in ranks:
            group = world.new_group(ranks)
            check_sum(group)
            assert (group.backend, group.transport) == ("gloo", transport)
    devicemesh.close_world()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("who", [0, 1])
def test_one_rank_can_ask_for_tcp(group, rank, who, monkeypatch):
    if rank == who:
        monkeypatch.setenv("DEVICEMESH_TRANSPORT", "tcp")
    check_sum(group)
    assert group.transport == "tcp"
    assert not is_mapped("memfd:devicemesh")

"""A million ranks: what is arithmetic costs nothing that grows with the world."""

import gc
import math
import os
import tracemalloc

import pytest

import devicemesh
from devicemesh import init_device_mesh

SHAPE = (10, 50, 100, 20)
NAMES = ("pp", "dp", "cp", "tp")
WORLD = math.prod(SHAPE)


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("rank", [0, 1, 524_287, WORLD - 1])
def test_a_million_ranks(rank):
    assert WORLD == 1_000_000
    with devicemesh.simulate(world_size=WORLD, rank=rank):
        mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES)
        assert mesh.size() == WORLD
        coordinate = mesh.get_coordinate()
        assert (
            rank
            == ((coordinate[0] * 50 + coordinate[1]) * 100 + coordinate[2]) * 20 + (coordinate[3])
        )
        assert mesh["dp", "tp"].get_coordinate() == (coordinate[1], coordinate[3])
        assert mesh.get_group("tp").size() == 20
        assert mesh["pp", "dp"].flatten().size() == 500
        assert mesh == init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES)


def test_a_million_ranks_take_less_than_64_kib():
    with devicemesh.simulate(world_size=WORLD, rank=424_242):
        init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES)["tp"]  # warm
        gc.collect()
        many = 64
        meshes = [None] * many
        tracemalloc.start()
        before = resident_bytes()
        for i in range(many):
            meshes[i] = init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES)
        after = resident_bytes()
        python_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert after - before < many * 64 * 1024
        assert python_bytes < many * 16 * 1024
        assert len({hash(mesh) for mesh in meshes}) == 1

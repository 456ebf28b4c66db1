"""Members of a group that call different things: an error on every one that names both."""

import numpy as np
import pytest

import devicemesh
from devicemesh import DeviceMeshError, MismatchError


@pytest.fixture(params=["shm", "tcp"])
def group(request, monkeypatch):
    monkeypatch.setenv("DEVICEMESH_TRANSPORT", request.param)
    world = devicemesh.default_world(timeout=20)
    group = world.new_group(range(world.size), name="all")
    group.barrier()
    yield group
    devicemesh.close_world()


def floats(count=4):
    return np.ones(count, "f4")


def pieces(count=4, size=3):
    return [floats(count) for _ in range(size)]


CALLS = {
    "operation": (
        lambda group: group.all_reduce(floats()),
        lambda group: group.broadcast(floats()),
        "all_reduce(sum) of 4 float32",
        "broadcast of 4 float32 from ",
    ),
    "order": (
        lambda group: group.barrier(),
        lambda group: group.all_reduce(floats()),
        "barrier",
        "all_reduce(sum) of 4 float32",
    ),
    "dtype": (
        lambda group: group.all_reduce(floats()),
        lambda group: group.all_reduce(np.ones(4, "i4")),
        "4 float32",
        "4 int32",
    ),
    "count": (
        lambda group: group.all_reduce(floats()),
        lambda group: group.all_reduce(floats(5)),
        "4 float32",
        "5 float32",
    ),
    "empty": (
        lambda group: group.all_reduce(floats()),
        lambda group: group.all_reduce(floats(0)),
        "4 float32",
        "0 float32",
    ),
    "op": (
        lambda group: group.all_reduce(floats(), "max"),
        lambda group: group.all_reduce(floats(), "min"),
        "all_reduce(max)",
        "all_reduce(min)",
    ),
    "root": (
        # who needs nobody's answer learns of it with its next operation
        lambda group: group.reduce(floats(), 0) or group.barrier(),
        lambda group: group.reduce(floats(), 1) or group.barrier(),
        "rank 0",
        "rank 1",
    ),
    "uneven": (
        lambda group: group.all_gather(pieces(), floats()),
        lambda group: group.all_gather([floats(3), *pieces(size=2)], floats()),
        "all_gather",
        "all_gather",
    ),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", CALLS)
def test_mismatch(group, rank, kind):
    most, other, first, second = CALLS[kind]
    with pytest.raises(DeviceMeshError) as caught:
        (other if rank == 2 else most)(group)
    text = str(caught.value)
    assert isinstance(caught.value, MismatchError), text
    assert " on group 'all' (ranks 0..2)" in text or "(ranks 0, 1, 2)" in text, text
    assert first in text, text
    assert second in text, text
    assert "rank 2" in text, text

"""devicemesh.distributed against torch.distributed: names and signatures, one by one."""

import inspect
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as theirs  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402

import devicemesh.distributed as ours  # noqa: E402

# What torch has and we leave out, by reason.
LEFT_OUT = {
    "options objects of torch's C++ process groups": {
        "AllToAllOptions",
        "AllreduceCoalescedOptions",
        "AllreduceOptions",
        "BarrierOptions",
        "BroadcastOptions",
        "GatherOptions",
        "ReduceOptions",
        "ReduceScatterOptions",
        "ScatterOptions",
    },
    "parts of torch's own DDP": {"BuiltinCommHookType", "GradBucket", "Logger", "Reducer"},
    "for plugging C++ backends and rendezvous handlers into torch": {
        "BackendConfig",
        "ProcessGroupGloo",
        "record_comm",
        "register_rendezvous_handler",
        "rendezvous",
    },
    "names of types that mark arguments": {"GroupName", "RankType"},
    "torch's own debugging and logging": {
        "DebugLevel",
        "breakpoint",
        "get_debug_level",
        "set_debug_level",
        "set_debug_level_from_env",
    },
    "deprecated in torch": {"reduce_op"},
    "for NCCL alone": {"shrink_group"},
}

# Modules that torch.distributed happens to hold, and what it imports for its own use.
NOT_API = {"log", "timedelta"}

FUNCTIONS = sorted(
    name
    for name in ours.__all__
    if name != "init_device_mesh"  # test_device_mesh looks at it
    and inspect.isfunction(getattr(ours, name))
    and hasattr(theirs, name)
)


def public_names():
    names = {name for name in dir(theirs) if not name.startswith("_")}
    modules = {name for name in names if issubclass(type(getattr(theirs, name)), ModuleType)}
    return names - modules - NOT_API | (set(distributed_c10d.__all__) & names)


def test_every_name_is_there_or_left_out_for_a_reason():
    left_out = set().union(*LEFT_OUT.values())
    missing = public_names() - set(ours.__all__)
    assert missing - left_out == set(), "neither there nor in the table"
    assert left_out & set(ours.__all__) == set(), "in the table though there"
    assert left_out - public_names() == set(), "in the table though torch has none"


def test_nothing_is_made_up():
    assert {name for name in ours.__all__ if not hasattr(theirs, name)} == set()


def parameters(function):
    return [
        (each.name, each.kind, comparable(each.default))
        for each in inspect.signature(function).parameters.values()
    ]


def comparable(default):
    """A default that the two sides spell differently."""
    if isinstance(default, theirs.ReduceOp.RedOpType):
        return default.name.lower()
    return default


def test_p2p_op():
    assert parameters(ours.P2POp) == parameters(theirs.P2POp)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature(name):
    assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name))


def test_reduce_ops():
    for name in theirs.ReduceOp.RedOpType.__members__:
        assert getattr(ours.ReduceOp, name) == name.lower()


def test_constants():
    assert ours.GroupMember.NON_GROUP_MEMBER == theirs.GroupMember.NON_GROUP_MEMBER
    assert ours.default_pg_timeout == theirs.default_pg_timeout
    names = [name for name in vars(theirs.Backend) if name.isupper()]
    assert names
    for name in names:
        assert getattr(ours.Backend, name) == getattr(theirs.Backend, name)
    assert ours.Backend("GLOO") == theirs.Backend("GLOO")


def test_device_mesh():
    # torch's arguments first, and ours after them by keyword.
    expected = parameters(theirs.init_device_mesh)
    assert parameters(ours.init_device_mesh)[: len(expected)] == expected
    from devicemesh.distributed.device_mesh import init_device_mesh

    assert init_device_mesh is ours.init_device_mesh

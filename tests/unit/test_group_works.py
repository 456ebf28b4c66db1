"""Works, objects and operations given together, without other processes."""

import asyncio
import gc
import inspect
import threading
import weakref

import numpy as np
import pytest

from devicemesh import ProcessGroup, Work, World


@pytest.fixture
def group():
    """Group rank 1 of 3."""
    with World.simulated(3, 1) as world:
        yield world.new_group([0, 1, 2], name="tp")


@pytest.fixture
def alone():
    with World(None, 0, 1) as world:
        yield world.new_group([0])


# --- bad arguments --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "arguments", "error", "text"),
    [
        ("all_gather_object", ((None,) * 3, 1), TypeError, "objects must be a list, got tuple"),
        ("all_gather_object", ([None] * 2, 1), ValueError, "each of the 3 members, it has 2"),
        ("broadcast_object_list", ([1], 3), ValueError, r"root must be a group rank, 0..2 .*got 3"),
        ("gather_object", (1, [None] * 3), ValueError, "objects must be None but at the root"),
        ("gather_object", (1, None, 1), TypeError, "objects must be a list, got NoneType"),
        ("scatter_object_list", ([],), ValueError, "output must have room"),
        ("scatter_object_list", ([None], [1] * 3), ValueError, "inputs must be None"),
        ("scatter_object_list", ([None], [1] * 2, 1), ValueError, "each of the 3 members"),
        ("send_object_list", (3, 0), TypeError, "objects must be a list"),
        ("send_object_list", ([3], 1), ValueError, "dst is this rank itself"),
        ("batch_isend_irecv", ([("send", b"x", 1)],), ValueError, "begin with 'isend' or 'irecv'"),
        ("batch_isend_irecv", ([("isend", b"x")],), ValueError, r"ops\[0\] must be \(kind"),
        ("batch_isend_irecv", ([("isend", b"x", 7)],), ValueError, "dst must be a group rank"),
        ("monitored_barrier", (-1,), ValueError, "timeout must be"),
        ("monitored_barrier", (1, True, 3), TypeError, "at most 2 positional"),
    ],
)
def test_bad_arguments(group, method, arguments, error, text):
    with pytest.raises(error, match=text):
        getattr(group, method)(*arguments)


def test_what_cannot_be_pickled_sends_nothing(group):
    with pytest.raises((TypeError, AttributeError), match=r"pickle|local object"):
        group.all_gather_object([None] * 3, lambda: 0)


def test_a_callback_that_cannot_be_called(group):
    with pytest.raises(TypeError, match="fn must be callable, got 3"):
        group.barrier(async_op=True).add_done_callback(3)


# --- works ----------------------------------------------------------------------------


def test_facts(group):
    group.barrier()
    work = group.all_reduce(bytearray(2), async_op=True)
    assert (work.name, work.seq) == ("all_reduce", 2)
    with pytest.raises(RuntimeError, match="only a recv that went well has a source"):
        work.source_rank()


def test_a_callback_of_what_has_ended_is_called_at_once(group):
    calls = []
    work = group.barrier(async_op=True)
    work.add_done_callback(lambda work: calls.append((work, threading.current_thread())))
    assert calls == [(work, threading.main_thread())]


def test_what_a_callback_raises(group, monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))

    def fail(work):
        raise KeyError

    group.barrier(async_op=True).add_done_callback(fail)
    assert seen == [KeyError]


def test_await(group):
    async def main():
        assert await group.barrier(async_op=True) is None

    asyncio.run(main())
    with pytest.raises(RuntimeError, match="no running event loop"):
        group.barrier(async_op=True).__await__()


# --- objects --------------------------------------------------------------------------


def test_objects_alone(alone):
    objects = [None]
    alone.all_gather_object(objects, {"a": 1})
    alone.broadcast_object_list(objects)
    assert objects == [{"a": 1}]
    alone.gather_object(3, objects)
    assert objects == [3]
    alone.scatter_object_list(objects, [(1, 2)])
    assert objects == [(1, 2)]


def test_simulated_members_have_no_objects(group):
    objects = [0, 0, 0]
    group.all_gather_object(objects, "mine")
    assert objects == [0, "mine", 0]
    group.broadcast_object_list(objects, root=2)
    group.gather_object("mine", None, root=0)
    group.send_object_list([1], 0)
    output = [5]
    group.scatter_object_list(output, None)
    assert output == [5]


# --- together -------------------------------------------------------------------------


def test_coalesce(group):
    data = bytearray(4)
    with group.coalesce() as works:
        assert group.all_reduce(data) is None
        with pytest.raises(BufferError):
            data.append(0)  # exported at once
        with pytest.raises(RuntimeError, match="already collecting"):
            group._begin_batch()
        assert works == []
    assert [work.name for work in works] == ["all_reduce"]
    del works
    gc.collect()
    data.append(0)
    with group.coalesce() as works:
        pass
    assert works == []


def test_other_threads_are_not_collected(group):
    results = []
    with group.coalesce() as works:
        thread = threading.Thread(
            target=lambda: results.append(group.barrier(async_op=True).wait())
        )
        thread.start()
        thread.join()
    assert results == [True]
    assert works == []


def test_an_error_inside_hands_arrays_back(group):
    data = bytearray(4)
    with pytest.raises(KeyError), group.coalesce() as works:  # noqa: PT012
        group.all_reduce(data)
        raise KeyError
    assert works == []
    data.append(0)
    group.barrier()


def test_a_group_that_goes_while_it_collects(group):
    data = bytearray(4)
    with World.simulated(2) as world:
        other = world.new_group([0, 1])
        other._begin_batch()
        other.all_reduce(data)
        gone = weakref.ref(other)
        del other
        gc.collect()
        assert gone() is None
    data.append(0)


def test_monitored_barrier(group, alone):
    group.monitored_barrier()
    alone.monitored_barrier(timeout=1, wait_all_ranks=True)


# --- signatures -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "method", "signature"),
    [
        (ProcessGroup, "all_gather_object", "(self, /, objects, obj)"),
        (ProcessGroup, "broadcast_object_list", "(self, /, objects, root=0)"),
        (ProcessGroup, "gather_object", "(self, /, obj, objects=None, root=0)"),
        (ProcessGroup, "scatter_object_list", "(self, /, output, inputs=None, root=0)"),
        (ProcessGroup, "send_object_list", "(self, /, objects, dst, tag=0)"),
        (ProcessGroup, "recv_object_list", "(self, /, objects, src=None, tag=0)"),
        (ProcessGroup, "batch_isend_irecv", "(self, /, ops)"),
        (ProcessGroup, "coalesce", "(self, /, async_op=False)"),
        (ProcessGroup, "monitored_barrier", "(self, /, timeout=None, wait_all_ranks=False)"),
        (Work, "add_done_callback", "(self, /, fn)"),
        (Work, "source_rank", "(self, /)"),
    ],
)
def test_signatures(owner, method, signature):
    assert str(inspect.signature(getattr(owner, method))) == signature


def test_an_array_that_is_shared_is_fine():
    with World.simulated(3, 1) as world:
        group = world.new_group([0, 1, 2])
        group.all_gather([np.zeros(1) for _ in range(3)], np.ones(1))

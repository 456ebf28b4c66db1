"""Operations on lists of arrays, uneven pieces, reduce: against numpy."""

import numpy as np
import pytest

import devicemesh
from devicemesh import ReduceOp

NEVER = 600


@pytest.fixture
def group():
    world = devicemesh.default_world(timeout=NEVER)
    yield world.new_group(range(world.size), name="all")
    devicemesh.close_world()


def numbers(rank, count, dtype="i4"):
    """What `rank` contributes; differs for every rank and place."""
    return (np.arange(count) * 7 + 1000 * rank).astype(dtype)


def in_line(counts, dtype="i4", apart=0):
    """Arrays one after the other in memory, or `apart` elements from each other."""
    memory = np.zeros(sum(counts) + apart * len(counts), dtype)
    pieces, at = [], 0
    for count in counts:
        pieces.append(memory[at : at + count])
        at += count + apart
    return pieces


def finish(result, async_op):
    if async_op:
        assert result.wait()
    else:
        assert result is None


@pytest.mark.ranks(1, 2, 3, 4, 5, 8)
@pytest.mark.parametrize("async_op", [False, True])
def test_lists(group, rank, world_size, async_op):
    ranks = range(world_size)
    for count, apart in ((1, 0), (3, 1), (0, 0), (20_001, 0)):
        outputs = in_line([count] * world_size, apart=apart)
        finish(group.all_gather(outputs, numbers(rank, count), async_op), async_op)
        for i in ranks:
            np.testing.assert_array_equal(outputs[i], numbers(i, count))

        outputs = in_line([count] * world_size, apart=apart)  # in place
        outputs[rank][:] = numbers(rank, count)
        finish(group.all_gather(outputs, outputs[rank], async_op), async_op)
        for i in ranks:
            np.testing.assert_array_equal(outputs[i], numbers(i, count))

        root = world_size - 1
        outputs = in_line([count] * world_size, apart=apart) if rank == root else None
        finish(group.gather(numbers(rank, count), outputs, root, async_op), async_op)
        for i in ranks if rank == root else ():
            np.testing.assert_array_equal(outputs[i], numbers(i, count))

        output = np.zeros(count, "i4")
        inputs = [numbers(i, count) for i in ranks] if rank == 0 else None
        finish(group.scatter(output, inputs, async_op=async_op), async_op)
        np.testing.assert_array_equal(output, numbers(rank, count))

        inputs = in_line([count] * world_size, "f8", apart)
        for i in ranks:
            inputs[i][:] = numbers(rank, count) + i
        output = np.zeros(count)
        finish(group.reduce_scatter(output, inputs, "max", async_op), async_op)
        np.testing.assert_array_equal(output, numbers(world_size - 1, count) + rank)

        value = numbers(rank, count, "f8")
        finish(group.reduce(value, root, ReduceOp.SUM, async_op), async_op)
        expected = sum(numbers(i, count, "f8") for i in ranks)
        np.testing.assert_array_equal(value, expected if rank == root else numbers(rank, count))


def amount(sender, receiver):
    """How much one rank has for another: nothing at times, else all kinds of amounts."""
    return (sender * 3 + receiver * 5) % 4 * (1 + receiver)


@pytest.mark.ranks(1, 2, 3, 4, 5, 8)
@pytest.mark.parametrize("async_op", [False, True])
def test_uneven(group, rank, world_size, async_op):
    ranks = range(world_size)
    sizes = [3 * (i % 3) for i in ranks]
    outputs = in_line(sizes, apart=rank % 2)
    finish(group.all_gather(outputs, numbers(rank, sizes[rank]), async_op), async_op)
    for i in ranks:
        np.testing.assert_array_equal(outputs[i], numbers(i, sizes[i]))

    sends = [amount(rank, i) for i in ranks]
    receives = [amount(i, rank) for i in ranks]
    inputs = [numbers(rank, n) + i for i, n in enumerate(sends)]
    outputs = in_line(receives, apart=1)
    finish(group.all_to_all(outputs, inputs, async_op), async_op)
    for i in ranks:
        np.testing.assert_array_equal(outputs[i], numbers(i, receives[i]) + rank)

    # splits count rows
    output = np.zeros((sum(receives), 2), "i4")
    data = np.concatenate([np.stack([piece, -piece], 1) for piece in inputs])
    finish(group.all_to_all_single(output, data, receives, sends, async_op), async_op)
    expected = np.concatenate([numbers(i, receives[i]) + rank for i in ranks])
    np.testing.assert_array_equal(output, np.stack([expected, -expected], 1))

    # equal splits are no splits
    if world_size > 1:
        even = np.repeat(np.arange(world_size, dtype="i4") + 10 * rank, 2)
        got = np.zeros_like(even)
        group.all_to_all_single(got, even, None, [2] * world_size)
        np.testing.assert_array_equal(got, np.repeat(10 * np.arange(world_size) + rank, 2))


@pytest.mark.ranks(3)
def test_in_place_pieces_of_tensors(group, rank, world_size):
    whole = np.zeros((world_size, 4), "i4")
    whole[rank] = numbers(rank, 4)
    group.all_gather_into_tensor(whole, whole[rank])
    np.testing.assert_array_equal(whole, [numbers(i, 4) for i in range(world_size)])

    whole = np.stack([numbers(rank, 4) + i for i in range(world_size)])
    group.reduce_scatter_tensor(whole[rank], whole)
    expected = sum(numbers(i, 4) for i in range(world_size)) + world_size * rank
    np.testing.assert_array_equal(whole[rank], expected)

    inputs = [numbers(rank, 4) + i for i in range(world_size)]
    group.reduce_scatter(inputs[rank], inputs)
    np.testing.assert_array_equal(inputs[rank], expected)


@pytest.mark.ranks(2)
def test_what_fails_leaves_its_outputs_alone(group, rank):
    if rank == 0:
        group.timeout = 0.3
        outputs = in_line([4, 4], apart=1)
        work = group.all_gather(outputs, numbers(0, 4), async_op=True)
        with pytest.raises(devicemesh.GroupTimeoutError):
            work.wait()
        assert not np.any(outputs)

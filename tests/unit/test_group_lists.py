"""Operations on lists of arrays, without other processes: what they refuse, groups of one,
simulated groups."""

import numpy as np
import pytest

from devicemesh import World


@pytest.fixture
def group():
    """Group rank 1 of 3."""
    with World.simulated(3, 1) as world:
        yield world.new_group([0, 1, 2], name="tp")


@pytest.fixture
def alone():
    with World(None, 0, 1) as world:
        yield world.new_group([0])


def lists(count=2, dtype="f4", size=3):
    return [np.zeros(count, dtype) for _ in range(size)]


# --- bad arguments --------------------------------------------------------------------

ONE = np.zeros(2, "f4")
OTHER = np.zeros(2, "f8")
LONG = np.zeros(3, "f4")
SIX = np.zeros((6, 2), "f4")
READ_ONLY = np.zeros(2, "f4")
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("method", "arguments", "error", "text"),
    [
        ("all_gather", (ONE, ONE), TypeError, "outputs must be a list of 3 arrays, got numpy"),
        ("all_gather", (lists(size=2), ONE), ValueError, "each of the 3 members, it has 2"),
        ("all_gather", ([ONE, 1, ONE], ONE), TypeError, r"outputs\[1\]"),
        ("all_gather", ([ONE, READ_ONLY, LONG], ONE), ValueError, r"outputs\[1\].*read-only"),
        (
            *("all_gather", ([ONE, OTHER, ONE], ONE), ValueError),
            r"one dtype: outputs\[0\] is float32, outputs\[1\] is float64",
        ),
        ("all_gather", (lists(), OTHER), ValueError, "outputs is float32, input is float64"),
        (
            *("all_gather", (lists(), LONG), ValueError),
            r"input must have as many elements as outputs\[1\] \(this rank's\), it has 3 and not 2",
        ),
        ("all_gather", ([ONE, LONG[:2], ONE], LONG[1:]), ValueError, "must not overlap"),
        ("gather", (ONE,), ValueError, r"gather .*on group|outputs must be None|root"),
        ("gather", (ONE, lists(), 0), ValueError, r"outputs must be None but at the root.* 0 "),
        ("gather", (ONE, None, 1), ValueError, r"outputs is needed at the root \(group rank 1\)"),
        ("gather", (ONE, None, 3), ValueError, "root must be a group rank, 0..2"),
        ("gather", (ONE, lists(3), 1), ValueError, r"input has 2, outputs\[0\] has 3"),
        ("scatter", (ONE, lists(), 2), ValueError, "inputs must be None but at the root"),
        ("scatter", (ONE, None, 1), ValueError, "inputs is needed at the root"),
        ("scatter", (READ_ONLY, None, 0), ValueError, "output.*read-only"),
        ("reduce_scatter", (ONE, lists(3)), ValueError, "output has 2, inputs.0. has 3"),
        ("reduce_scatter", (ONE, [ONE, LONG[:2], LONG[1:]]), ValueError, "must not overlap"),
        ("reduce_scatter", (ONE, lists(), "mean"), ValueError, "op must be one of"),
        ("reduce", (ONE, 3), ValueError, "root must be a group rank"),
        ("reduce", (READ_ONLY, 1), ValueError, "read-only"),
        ("all_to_all", (lists(), lists(dtype="i4")), ValueError, "outputs is float32, inputs is i"),
        ("all_to_all", ([ONE, LONG, LONG], lists()), ValueError, r"outputs\[1\]"),
        ("all_to_all", (lists(3), [ONE] * 3), ValueError, "this rank's piece of inputs"),
        ("all_to_all", ([ONE, LONG[:2], OTHER[:0].view("f4")], [ONE] * 3), ValueError, "overlap"),
        ("all_to_all_single", (ONE, ONE.copy()), ValueError, "divide into 3 equal pieces"),
        (
            *("all_to_all_single", (SIX, SIX.copy(), [1, 2], None), ValueError),
            r"output_splits must have one number for each of the 3 members, got \[1, 2\]",
        ),
        (
            *("all_to_all_single", (SIX, SIX.copy(), [1, 2, 4], None), ValueError),
            "output_splits must add up to the 6 rows of output, they add up to 7",
        ),
        ("all_to_all_single", (SIX, SIX.copy(), None, [7, 0, -1]), ValueError, "input_splits must"),
        ("all_to_all_single", (SIX, SIX.copy(), None, 2), TypeError, "iterable"),
        ("all_to_all_single", (SIX, SIX.copy(), None, [2, "2", 2]), TypeError, "an int, got '2'"),
        ("all_to_all_single", (SIX, SIX.copy(), [3, 0, 3], None), ValueError, "sends itself"),
        ("isend", (ONE, 1), ValueError, "dst is this rank itself"),
        ("irecv", (READ_ONLY,), ValueError, "read-only"),
    ],
)
def test_bad_arguments(group, method, arguments, error, text):
    if (method, len(arguments)) == ("gather", 1):
        group.gather(*arguments)  # the root is another rank
        return
    with pytest.raises(error, match=text):
        getattr(group, method)(*arguments)
    group.barrier()


def test_a_list_that_shrinks_while_it_is_read(group):
    class Shrinks:
        @property
        def __array_interface__(self):
            outputs.clear()
            return ONE.__array_interface__

    outputs = [Shrinks(), np.zeros(2, "f4"), np.zeros(2, "f4")]
    with pytest.raises((RuntimeError, TypeError), match=r"changed while it was read|outputs"):
        group.all_gather(outputs, ONE)


# --- results --------------------------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
def test_alone(alone, async_op):
    data = np.arange(4.0)

    def call(method, *arguments):
        result = getattr(alone, method)(*arguments, async_op=async_op)
        assert result.wait() if async_op else result is None

    output = np.zeros(4)
    call("all_gather", [output], data)
    np.testing.assert_array_equal(output, data)
    output = np.zeros(4)
    call("gather", data, [output])
    np.testing.assert_array_equal(output, data)
    output = np.zeros(4)
    call("scatter", output, [data])
    np.testing.assert_array_equal(output, data)
    output = np.zeros(4)
    call("reduce_scatter", output, (data,))
    np.testing.assert_array_equal(output, data)
    output = np.zeros(4)
    call("all_to_all", [output], [data])
    np.testing.assert_array_equal(output, data)
    output = np.zeros(4)
    call("all_to_all_single", output, data, [4], [4])
    np.testing.assert_array_equal(output, data)
    call("reduce", output)
    np.testing.assert_array_equal(output, data)


@pytest.mark.parametrize("async_op", [False, True])
def test_simulated_members_contribute_nothing(group, async_op):
    def finish(result):
        assert result.wait() if async_op else result is None

    outputs = [np.full(2, -1.0) for _ in range(3)]
    finish(group.all_gather(outputs, np.ones(2), async_op))
    np.testing.assert_array_equal(outputs, [[-1, -1], [1, 1], [-1, -1]])

    outputs = [np.full(n, -1.0) for n in (1, 2, 0)]
    finish(group.all_to_all(outputs, [np.full(2, 5.0 + i) for i in range(3)], async_op))
    assert [x.tolist() for x in outputs] == [[-1], [6, 6], []]


def test_in_place_is_exactly_the_own_piece(group):
    whole = np.arange(6.0)
    group.all_gather_into_tensor(whole, whole[2:4])
    group.reduce_scatter_tensor(whole[2:4], whole)
    for piece in (whole[0:2], whole[1:3], whole[4:6]):
        with pytest.raises(ValueError, match="output and input must not overlap"):
            group.all_gather_into_tensor(whole, piece)
        with pytest.raises(ValueError, match="input and output must not overlap"):
            group.reduce_scatter_tensor(piece, whole)
    pieces = [whole[0:2], whole[2:4], whole[4:6]]
    group.all_gather(pieces, pieces[1])
    for piece in (whole[0:2], whole[3:5]):
        with pytest.raises(ValueError, match=r"outputs\[.\] and input|input and outputs\[.\]"):
            group.all_gather(pieces, piece)
    group.reduce_scatter(pieces[1], pieces)
    with pytest.raises(ValueError, match=r"must not overlap"):
        group.reduce_scatter(pieces[1], [pieces[1]] * 3)


def test_arrays_of_a_list_stay_exported(group):
    outputs = [bytearray(2) for _ in range(3)]
    work = group.all_gather(outputs, b"ab", async_op=True)
    assert work.wait()
    for output in outputs:
        output.append(0)  # handed back

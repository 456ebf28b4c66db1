"""Arrays of DLPack: capsules, C functions on a type, and exporters that get it wrong."""

import gc
import sys
import weakref

import dlpack
import ml_dtypes
import numpy as np
import pytest
from dlpack import CPU, CUDA, CUDA_HOST, READ_ONLY, Exporter, Function

from devicemesh import World

BOTH = pytest.mark.parametrize("versioned", [False, True], ids=["unversioned", "versioned"])


@pytest.fixture
def group():
    with World(None, 0, 1) as world:
        yield world.new_group([0])


def read(group, exporter, like=None):
    """What the group reads from the array."""
    output = np.zeros_like(dlpack.arange("f4") if like is None else like)
    group.all_gather_into_tensor(output, exporter)
    return output


# --- bad exporters --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        (None, TypeError, r"^array.__dlpack__\(\) must return a capsule of DLPack, got None"),
        ("dltensor", TypeError, r"must return a capsule of DLPack, got 'dltensor'"),
        (dlpack.capsule(1, b"other"), TypeError, r"must return .*, got <capsule object \"other\""),
        (dlpack.capsule(1, None), TypeError, r"must return .*, got <capsule object NULL"),
        (dlpack.capsule(1, b"used_dltensor"), ValueError, "whose content was taken before"),
        (dlpack.capsule(1, b"used_dltensor_versioned"), ValueError, "was taken before"),
    ],
)
def test_no_capsule(group, result, error, text):
    with pytest.raises(error, match=text):
        group.all_reduce(Function(lambda **_: result))


@BOTH
def test_capsule_that_was_used(group, versioned):
    export = dlpack.Export(dlpack.arange("f4"), versioned)
    capsule = export.capsule()
    exporter = Function(lambda **_: capsule)
    group.all_reduce(exporter)
    assert dlpack.capsule_name(capsule) == "used_" + export.name.decode()
    assert export.deleted == 1
    with pytest.raises(ValueError, match="was taken before"):
        group.all_reduce(exporter)
    assert export.deleted == 1


class Odd(Exception):
    pass


@pytest.mark.parametrize("error", [Odd("today"), TypeError("today"), KeyboardInterrupt("today")])
def test_errors_of_the_exporter_are_kept(group, error):
    def fail(**_):
        raise error

    with pytest.raises(type(error), match=r"^today$"):
        group.all_reduce(Function(fail))


def test_refusals_name_the_argument(group):
    def fail(**_):
        raise BufferError("no\nfile.cc:3")

    with pytest.raises(ValueError, match=r"^input cannot be exported through DLPack: no$") as info:
        group.all_gather_into_tensor(bytearray(4), Function(fail))
    assert isinstance(info.value.__cause__, BufferError)
    assert str(info.value.__cause__) == "no\nfile.cc:3"


def test_error_of_the_attribute_is_kept(group):
    class Property:
        @property
        def __dlpack__(self):
            raise Odd("today")

    with pytest.raises(Odd):
        group.all_reduce(Property())


def test_errors_without_a_text(group):
    class Mute(BufferError):
        def __str__(self):
            raise Odd

    def fail(**_):
        raise Mute

    with pytest.raises(
        ValueError,
        match="array cannot be exported through DLPack: its exporter's text cannot be read",
    ):
        group.all_reduce(Function(fail))


@pytest.mark.parametrize(
    ("device", "error", "text"),
    [
        ((CUDA, 3), ValueError, r"^array must be in the CPU's memory, .* got a Exporter on cuda:3"),
        ((10, 0), ValueError, "got a Exporter on rocm:0"),
        ((99, 1), ValueError, "on a device of DLPack's type 99"),
        ((-1, 0), ValueError, "on a device of DLPack's type -1"),
        (None, TypeError, r"array.__dlpack_device__\(\) must return a tuple of two ints, got None"),
        ((1,), TypeError, "__dlpack_device__"),
        (("cpu", 0), TypeError, "."),
        ((1 << 40, 0), OverflowError, "."),
    ],
)
def test_devices_that_are_not_ours(group, device, error, text):
    exporter = Exporter(dlpack.arange("f4"), device=device)
    with pytest.raises(error, match=text):
        group.all_reduce(exporter)
    assert exporter.capsules == []  # not exported at all


@BOTH
def test_device_of_the_capsule_counts(group, versioned):
    exporter = Exporter(dlpack.arange("f4"), versioned=versioned, device_type=CUDA, device_id=2)
    with pytest.raises(ValueError, match="on cuda:2"):
        group.all_reduce(exporter)
    assert exporter.export.deleted == 1


FIELDS = [
    ({"ndim": -1}, ValueError, r"^array has -1 dims, which no array has \(0..64 are possible\)"),
    ({"ndim": 65}, ValueError, "array has 65 dims, which no array has"),
    ({"shape": None}, ValueError, "array has 1 dims without sizes, which no array has"),
    ({"shape": [-1]}, ValueError, r"array has the impossible shape \(-1,\) of float32"),
    ({"shape": [1 << 62]}, ValueError, r"impossible shape \(4611686018427387904,\)"),
    ({"data": None}, ValueError, "array has 4 elements but no memory: its data pointer is null"),
    ({"strides": [2]}, ValueError, r"shape is \(4,\), its strides in bytes are \(8,\)"),
    ({"strides": [-1]}, ValueError, r"strides in bytes are \(-4,\); pass a copy"),
    ({"strides": [0]}, ValueError, "array must be C-contiguous"),
    (
        {"lanes": 2},
        TypeError,
        "elements of format 'code 2, 32 bits, 2 lanes', which cannot be sent",
    ),
    ({"lanes": 0}, TypeError, "0 lanes"),
    ({"bits": 128}, TypeError, "array has elements of format 'code 2, 128 bits, 1 lanes'"),
    ({"code": 3}, TypeError, "code 3"),
    ({"code": 17, "bits": 4}, TypeError, "code 17, 4 bits"),
    ({"code": 200}, TypeError, "code 200"),
]


@BOTH
@pytest.mark.parametrize(("fields", "error", "text"), FIELDS, ids=lambda v: str(v)[:30])
def test_fields_that_make_no_sense(group, versioned, fields, error, text):
    exporter = Exporter(dlpack.arange("f4"), versioned=versioned, **fields)
    for async_op in (False, True):
        with pytest.raises(error, match=text):
            group.all_reduce(exporter, async_op=async_op)
    assert exporter.export.deleted == 2


def test_overflow_of_many_dims(group):
    shape = [1 << 31, 1 << 31, 1 << 31]
    exporter = Exporter(dlpack.arange("f4", (1, 1, 4)), shape=shape)
    with pytest.raises(ValueError, match="impossible shape"):
        group.all_reduce(exporter)
    group.all_reduce(Exporter(dlpack.arange("f4", (1, 1, 4)), shape=[*shape[:2], 0]))


@pytest.mark.parametrize("version", [(0, 8), (2, 0)])
def test_unknown_versions(group, version):
    """Of another major version nothing but the deleter may be touched."""
    exporter = Exporter(dlpack.arange("f4"), version=version, ndim=-77)
    text = rf"array is exported by version {version[0]}.{version[1]} of DLPack, .* \(1 is\)"
    with pytest.raises(ValueError, match=text):
        group.all_reduce(exporter)
    assert exporter.export.deleted == 1


def test_read_only(group):
    exporter = Exporter(dlpack.arange("f4"), flags=READ_ONLY)
    with pytest.raises(ValueError, match=r"^array must be writable, got a read-only Exporter"):
        group.all_reduce(exporter)
    assert exporter.export.deleted == 1
    assert read(group, exporter).tolist() == [0, 1, 2, 3]
    assert exporter.export.deleted == 2


def test_nothing_stays_exported_after_an_error(group):
    good, bad = Exporter(dlpack.arange("f4")), Exporter(dlpack.arange("f8"))
    for async_op in (False, True):
        with pytest.raises(ValueError, match="same dtype: output is float32, input is float64"):
            group.all_gather_into_tensor(good, bad, async_op=async_op)
    assert good.export.deleted == bad.export.deleted == 2


# --- what is read ---------------------------------------------------------------------

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (1, 3, 1)], ids=str)
def test_dtypes(group, versioned, dtype, shape):
    array = dlpack.arange(dtype, shape)
    exporter = Exporter(array, versioned=versioned)
    output = read(group, exporter, array)
    np.testing.assert_array_equal(output.astype("c16"), array.astype("c16"))
    assert exporter.export.deleted == 1


@BOTH
def test_written_in_place(group, versioned):
    array = np.zeros(3, "i4")
    group.all_gather_into_tensor(Exporter(array, versioned=versioned), np.arange(3, dtype="i4"))
    assert array.tolist() == [0, 1, 2]


@BOTH
def test_no_strides_are_contiguous(group, versioned):
    exporter = Exporter(dlpack.arange("f4", (2, 2)), versioned=versioned, strides=None)
    assert read(group, exporter).tolist() == [0, 1, 2, 3]


@BOTH
def test_dims_of_size_one_have_any_stride(group, versioned):
    array = dlpack.arange("f4", (4, 1))
    exporter = Exporter(array.T, versioned=versioned, strides=[77, 1])
    assert read(group, exporter).tolist() == [0, 1, 2, 3]


@BOTH
def test_byte_offset(group, versioned):
    exporter = Exporter(dlpack.arange("f4"), versioned=versioned, shape=[2], byte_offset=8)
    output = read(group, exporter, np.zeros(2, "f4"))
    assert output.tolist() == [2, 3]


@pytest.mark.parametrize("device", [CPU, CUDA_HOST, 11, 13])
def test_memory_that_the_cpu_reads(group, device):
    exporter = Exporter(dlpack.arange("f4"), device=(device, 0), device_type=device)
    assert read(group, exporter).tolist() == [0, 1, 2, 3]


def test_no_deleter(group):
    exporter = Exporter(dlpack.arange("f4"), deleter=False)
    assert read(group, exporter).tolist() == [0, 1, 2, 3]
    exporter = Exporter(dlpack.arange("f4"), deleter=False, versioned=False)
    work = group.all_reduce(exporter, async_op=True)
    alive = weakref.ref(exporter)
    del exporter
    gc.collect()
    assert alive() is not None  # nobody else owns the memory
    work.wait()
    gc.collect()
    assert alive() is None


def test_exporters_without_versions(group):
    """Those from before version 1 know no max_version."""

    class Old(Exporter):
        def __dlpack__(self, stream=None):
            return super().__dlpack__()

    assert read(group, Old(dlpack.arange("f4"), versioned=False)).tolist() == [0, 1, 2, 3]


def test_exporters_without_a_device(group):
    export = dlpack.Export(dlpack.arange("f4"))
    assert read(group, Function(lambda **_: export.capsule())).tolist() == [0, 1, 2, 3]


def test_numpys_own_capsules(group):
    array = dlpack.arange("f4")

    class Wrapped:
        def __dlpack__(self, **named):
            return array.__dlpack__(**named)

        def __dlpack_device__(self):
            return array.__dlpack_device__()

    assert read(group, Wrapped()).tolist() == [0, 1, 2, 3]
    group.all_gather_into_tensor(Wrapped(), np.full(4, 7, "f4"))
    assert array.tolist() == [7] * 4
    array.flags.writeable = False
    with pytest.raises(ValueError, match="must be writable"):
        group.all_reduce(Wrapped())


def test_buffers_come_first(group):
    class Both(np.ndarray):
        def __dlpack__(self, **_):
            raise Odd

    array = dlpack.arange("f4").view(Both)
    group.all_reduce(array)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="buffers in Python came with 3.12")
def test_buffers_that_refuse(group):
    """As jax's arrays on a GPU: a dtype that we know, and no buffer."""

    class Array(Exporter):
        dtype = np.dtype("f4")

        def __buffer__(self, flags):
            raise BufferError("not on the CPU")

    assert read(group, Array(dlpack.arange("f4"))).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="on cuda:0"):
        group.all_reduce(Array(dlpack.arange("f4"), device=(CUDA, 0)))

    class Mute(Array):
        __dlpack__ = property()

    with pytest.raises(BufferError, match="not on the CPU"):
        group.all_reduce(Mute(dlpack.arange("f4")))


# --- lifetimes ------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("notice", ["wait", "result", "is_completed", "exception"])
def test_given_back_when_the_end_is_noticed(group, versioned, notice):
    exporter = Exporter(dlpack.arange("f4"), versioned=versioned)
    work = group.all_reduce(exporter, async_op=True)
    assert exporter.export.deleted == 0
    getattr(work, notice)()
    assert exporter.export.deleted == 1
    del work
    assert exporter.export.deleted == 1


def test_given_back_with_the_work(group):
    exporter = Exporter(dlpack.arange("f4"))
    group.all_reduce(exporter, async_op=True)
    assert exporter.export.deleted == 1


def test_capsule_does_not_free_what_was_taken(group):
    """numpy's capsules have destructors."""
    array = dlpack.arange("f4")
    alive = weakref.ref(array)
    capsules = [array.__dlpack__()]
    work = group.all_reduce(Function(lambda **_: capsules.pop()), async_op=True)
    del array
    gc.collect()
    assert alive() is not None
    work.wait()
    gc.collect()
    assert alive() is None


def test_deleter_that_comes_back(group):
    """A deleter may run anything, the operation that it ends included."""
    exporter = Exporter(dlpack.arange("f4"))
    delete = exporter.export.delete

    def again(pointer):
        delete(pointer)
        group.all_reduce(bytearray(4))
        work.wait()

    exporter.export.delete = again
    work = group.all_reduce(exporter, async_op=True)
    work.wait()
    assert exporter.export.deleted == 1


# --- C functions on the type ----------------------------------------------------------

EXCHANGES = pytest.mark.parametrize(
    "exchange", [dlpack.exchange_by_looking, dlpack.exchange_by_owning]
)


@EXCHANGES
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_exchange(group, exchange, async_op, dtype):
    if exchange is dlpack.exchange_by_looking and async_op:
        exchange = copying_exchange
    array = dlpack.arange(dtype)
    tensor, output = exchange()(array), np.zeros_like(array)
    work = group.all_gather_into_tensor(output, tensor, async_op=async_op)
    if async_op:
        work.wait()
    assert output.tobytes() == array.tobytes()


def copying_exchange():
    return dlpack.exchange_by_looking(detach=lambda self: type(self)(self.value))


@pytest.mark.parametrize("error", [BufferError, RuntimeError])
@pytest.mark.parametrize("async_op", [False, True])
def test_exchange_that_refuses(group, error, async_op):
    def fileno(self):
        raise error("no\nfile.cc:3")

    kinds = [dlpack.exchange_type(None, dlpack.RAISES, fileno=fileno)]
    kinds.append(dlpack.exchange_type(dlpack.RAISES, dlpack.RAISES, fileno=fileno))
    for kind in kinds:
        with pytest.raises(
            ValueError, match=r"^array cannot be exported through DLPack: no$"
        ) as info:
            group.all_reduce(kind(), async_op=async_op)
        assert isinstance(info.value.__cause__, error)


def test_exchange_whose_errors_are_kept(group):
    def fileno(self):
        raise Odd

    with pytest.raises(Odd):
        group.all_reduce(dlpack.exchange_type(dlpack.RAISES, dlpack.RAISES, fileno=fileno)())


def test_exchange_that_says_nothing(group):
    """No exception and no tensor."""
    kind = dlpack.exchange_type(None, dlpack.RAISES, fileno=lambda self: 0)
    with pytest.raises(ValueError, match=r"cannot be exported .* does not say why"):
        group.all_reduce(kind())


@EXCHANGES
@pytest.mark.parametrize(("fields", "error", "text"), FIELDS, ids=lambda v: str(v)[:30])
def test_fields_of_an_exchange(group, exchange, fields, error, text):
    def look(op, tensor):
        op.export = dlpack.Export(op.value)
        op.export.fill(tensor, **fields)

    def own(op):
        op.export = dlpack.Export(op.value, **fields)
        return op.export

    owning = exchange is dlpack.exchange_by_owning
    tensor = dlpack.exchange_type(None if owning else look, own)(dlpack.arange("f4"))
    with pytest.raises(error, match=text):
        group.all_reduce(tensor)
    assert tensor.export.deleted == owning


@pytest.mark.parametrize("api", [None, 3, dlpack.capsule(1, b"other"), dlpack.capsule(1, None)])
def test_exchange_that_is_none(group, api):
    """Then the object may still have __dlpack__."""

    class Strange(Exporter):
        __dlpack_c_exchange_api__ = api

    assert read(group, Strange(dlpack.arange("f4"))).tolist() == [0, 1, 2, 3]


def test_exchange_of_another_version(group):
    def own(op):
        raise AssertionError

    newer = dlpack.exchange_type(own, own, version=(2, 0))
    with pytest.raises(TypeError, match="array must be an array"):
        group.all_reduce(newer())
    older = dlpack.exchange_by_looking()
    newer = dlpack.exchange_type(own, own, version=(2, 0), previous=older)
    assert read(group, newer(dlpack.arange("f4"))).tolist() == [0, 1, 2, 3]


def test_exchange_on_the_object_does_not_count(group):
    class Strange:
        pass

    strange = Strange()
    strange.__dlpack_c_exchange_api__ = dlpack.exchange_by_looking().__dlpack_c_exchange_api__
    with pytest.raises(TypeError, match="array must be an array"):
        group.all_reduce(strange)


@EXCHANGES
@pytest.mark.parametrize(
    ("note", "dtype", "text"),
    [
        ("is_neg", "f4", r"^array is not .* its negative bit is set; pass its resolve_neg\(\)"),
        ("is_neg", "i4", "its negative bit is set"),
        ("is_conj", "c8", r"its conjugate bit is set; pass its resolve_conj\(\)"),
    ],
)
def test_notes_beside_the_memory(group, exchange, note, dtype, text):
    tensor = exchange(**{note: lambda self: True})(dlpack.arange(dtype))
    with pytest.raises(ValueError, match=text):
        group.all_reduce(tensor)
    assert tensor.export.deleted == (exchange is dlpack.exchange_by_owning)
    tensor = exchange(**{note: lambda self: False})(dlpack.arange(dtype))
    group.all_reduce(tensor)

    def fail(self):
        raise Odd

    with pytest.raises(Odd):
        group.all_reduce(exchange(**{note: fail})(dlpack.arange(dtype)))


def test_looked_at_is_held(group):
    """While an operation runs, what `detach` gave is held, not the object."""
    array = dlpack.arange("f4")
    made = []

    def detach(self):
        made.append(type(self)(self.value))
        return made[-1]

    work = group.all_reduce(dlpack.exchange_by_looking(detach=detach)(array), async_op=True)
    alive = weakref.ref(made.pop())
    gc.collect()
    assert alive() is not None
    work.wait()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("alias", [None, 3, np.zeros(3)])
def test_alias_that_is_no_tensor(group, alias):
    """Then a new owner is asked for."""

    def look(op, tensor):
        raise AssertionError

    def own(op):
        op.export = dlpack.Export(op.value)
        return op.export

    kind = dlpack.exchange_type(look, own, detach=lambda self: alias)
    tensor = kind(dlpack.arange("f4"))
    group.all_reduce(tensor, async_op=True).wait()
    assert tensor.export.deleted == 1


# --- tensors that require grad, without the C functions -------------------------------


class Grad(Exporter):
    """As torch's tensors before 2.13."""

    requires_grad = True

    def __dlpack__(self, **named):
        if self.requires_grad:
            raise BufferError("tensors that require gradient cannot be exported")
        return super().__dlpack__(**named)

    def detach(self):
        self.detached = Grad.__new__(Grad)
        self.detached.__dict__.update(self.__dict__, requires_grad=False)
        return self.detached


def test_detached_where_that_is_the_reason(group):
    tensor = Grad(dlpack.arange("f4"))
    assert read(group, tensor).tolist() == [0, 1, 2, 3]
    assert tensor.export.deleted == 1


def test_not_detached_for_other_reasons(group):
    tensor = Grad(dlpack.arange("f4"))
    tensor.detach = None
    with pytest.raises(TypeError, match="not callable"):
        group.all_reduce(tensor)

    def refuse(**_):
        raise BufferError("another reason")

    tensor = Grad(dlpack.arange("f4"))
    tensor.requires_grad = False
    tensor.__class__ = type("Other", (Grad,), {"__dlpack__": lambda self, **_: refuse()})
    with pytest.raises(ValueError, match="another reason"):
        group.all_reduce(tensor)

"""DLPack without a library that speaks it: structs, capsules and tables of C functions, made
by ctypes, so that tests can get every field wrong and see what is given back."""

import ctypes
from ctypes import (
    POINTER,
    PYFUNCTYPE,
    Structure,
    c_char_p,
    c_int,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    py_object,
)

import numpy as np

CPU, CUDA, CUDA_HOST = 1, 2, 3
READ_ONLY = 1
CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
EXTENSION_CODES = {"bfloat16": 4, "float8_e4m3fn": 10, "float8_e5m2": 12}
RAISES = object()  # for exchange_type: a function that raises what the object's fileno() raises


class Tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int),
        ("device_id", c_int),
        ("ndim", c_int),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class Managed(Structure):
    """The struct of an unversioned capsule."""

    _fields_ = [("tensor", Tensor), ("context", c_void_p), ("deleter", c_void_p)]


class Versioned(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", Tensor),
    ]


class Exchange(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("previous", c_void_p),
        ("allocate", c_void_p),
        ("own", c_void_p),
        ("import_", c_void_p),
        ("look", c_void_p),
        ("current_stream", c_void_p),
    ]


_Deleter = PYFUNCTYPE(None, c_void_p)
_Own = PYFUNCTYPE(c_int, py_object, POINTER(c_void_p))
_Look = PYFUNCTYPE(c_int, py_object, POINTER(Tensor))

_new = ctypes.pythonapi.PyCapsule_New
_new.restype = py_object
_new.argtypes = [c_void_p, c_char_p, c_void_p]
_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype = c_char_p
_name.argtypes = [py_object]


_names = {}


def capsule(pointer, name):
    """A capsule without a destructor. It does not copy its name, so that is kept here."""
    return _new(pointer, _names.setdefault(name, name), None)


def capsule_name(of):
    return _name(of).decode()


class Export:
    """One array exported: the struct, and how often its deleter was called.

    Args:
        array: Any numpy array; its memory, shape and strides fill the struct.
        versioned: Which of the two structs.
        version: For the versioned one.
        deleter: Whether there is one.
        fields: Fields of the tensor (or `flags`) to be set to something else.
    """

    def __init__(self, array, versioned=True, version=(1, 0), deleter=True, **fields):
        self.array = array
        self.deleted = 0
        self.name = b"dltensor_versioned" if versioned else b"dltensor"
        self.managed = Versioned(*version) if versioned else Managed()
        self._deleter = _Deleter(lambda pointer: self.delete(pointer))
        if deleter:
            self.managed.deleter = ctypes.cast(self._deleter, c_void_p)
        self.flags = fields.pop("flags", 0)
        if versioned:
            self.managed.flags = self.flags
        self.fill(self.managed.tensor, **fields)

    def delete(self, pointer):
        """The deleter; tests may put another one in its place."""
        assert pointer == self.address
        self.deleted += 1

    @property
    def address(self):
        return ctypes.addressof(self.managed)

    def fill(self, tensor, **fields):
        """Writes what the array is into a Tensor, then `fields` over it."""
        array, name = self.array, self.array.dtype.name
        tensor.data = array.ctypes.data
        tensor.device_type = CPU
        tensor.ndim = array.ndim
        tensor.code = EXTENSION_CODES.get(name) or CODES[array.dtype.kind]
        tensor.bits = 8 * array.itemsize
        tensor.lanes = 1
        self.shape = (c_int64 * array.ndim)(*array.shape)
        self.strides = (c_int64 * array.ndim)(*(s // array.itemsize for s in array.strides))
        tensor.shape = self.shape
        tensor.strides = self.strides
        for field, value in fields.items():
            if field in ("shape", "strides"):
                value = value if value is None else (c_int64 * len(value))(*value)
                setattr(self, field, value)  # keeps it
            setattr(tensor, field, value)

    def capsule(self):
        return capsule(self.address, self.name)


class Exporter:
    """An object with `__dlpack__` and `__dlpack_device__`, and nothing else."""

    def __init__(self, array, device=(CPU, 0), **options):
        self.export = Export(array, **options)
        self.device = device
        self.capsules = []

    def __dlpack__(self, *, max_version=None):
        assert max_version is None or max_version[0] == 1
        self.capsules.append(self.export.capsule())
        return self.capsules[-1]

    def __dlpack_device__(self):
        return self.device


class Function:
    """An object whose `__dlpack__` is the function."""

    def __init__(self, function):
        self.__dlpack__ = function

    @property
    def deleted(self):
        return 0


def exchange_type(look=None, own=None, version=(1, 0), previous=None, **members):
    """A type whose `__dlpack_c_exchange_api__` has these functions; objects of it carry
    what they are made with as `value`.

    Args:
        look: look(object, tensor: Tensor), which fills the tensor; None for a NULL; or RAISES.
        own: own(object) -> Export; or RAISES.
        previous: A type made before: its table is that of an older version.
        members: What else the type has.
    """

    def call_look(op, tensor):
        look(op, tensor[0])
        return 0

    def call_own(op, out):
        out[0] = own(op).address
        return 0

    class Exchanged:
        def __init__(self, value=None):
            self.value = value

    functions = [_Look(call_look), _Own(call_own)]
    table = Exchange(*version)
    table.previous = ctypes.addressof(previous.table) if previous else None
    table.look = _address(functions[0], look) if look else None
    table.own = _address(functions[1], own)
    Exchanged.table, Exchanged.functions = table, functions
    api = capsule(ctypes.addressof(table), b"dlpack_exchange_api")
    Exchanged.__dlpack_c_exchange_api__ = api
    for key, value in members.items():
        setattr(Exchanged, key, value)
    return Exchanged


def _address(callback, function):
    """Callbacks of ctypes cannot leave an exception set. This function of Python's own can:
    it calls the object's fileno(), and returns -1 with what that raises."""
    raises = ctypes.pythonapi.PyObject_AsFileDescriptor
    return ctypes.cast(raises if function is RAISES else callback, c_void_p)


def exchange_by_looking(**members):
    """exchange_type for numpy arrays, without owners."""

    def look(op, tensor):
        op.export = Export(op.value)
        op.export.fill(tensor)

    return exchange_type(look, RAISES, **members)


def exchange_by_owning(**members):
    def own(op):
        op.export = Export(op.value)
        return op.export

    return exchange_type(None, own, **members)


def arange(dtype, shape=(4,)):
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)

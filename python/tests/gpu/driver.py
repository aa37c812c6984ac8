"""Arrays on GPUs by the driver alone, which the tests' is emulated: memory, streams, and how other libraries hand both out."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
#: `CU_STREAM_NON_BLOCKING`.
_NON_BLOCKING = 1


class Driver:
    """The driver, with the context of a GPU on the calling thread."""

    def __init__(self, device: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.device = device
        self.call("cuInit", 0)
        context, handle = ctypes.c_void_p(), ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(handle), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        assert code == 0, f"{name} returned {code}"

    def stream(self) -> int:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        assert stream.value
        return stream.value

    def synchronize(self, stream: int) -> None:
        self.call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def wait(self, stream: int, behind: int) -> None:
        """Has a stream wait for what another has so far."""
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), 2)
        self.call("cuEventRecord", event, ctypes.c_void_p(behind))
        self.call("cuStreamWaitEvent", ctypes.c_void_p(stream), event, 0)
        self.call("cuEventDestroy_v2", event)

    def fill(self, array: Memory, value: int, stream: int) -> None:
        """Sets all bytes, when the stream comes there."""
        self.call("cuMemsetD8Async", ctypes.c_uint64(array.address), ctypes.c_ubyte(value), ctypes.c_size_t(array.bytes), ctypes.c_void_p(stream))

    def copy(self, into: Memory, array: Memory, stream: int) -> None:
        """When the stream comes there."""
        addresses = ctypes.c_uint64(into.address), ctypes.c_uint64(array.address)
        self.call("cuMemcpyAsync", *addresses, ctypes.c_size_t(array.bytes), ctypes.c_void_p(stream))

    def capture(self, stream: int) -> None:
        self.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), 2)

    def end_capture(self, stream: int) -> None:
        self.call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(ctypes.c_void_p()))

    def array(self, content: np.ndarray, kind: type[Memory] | None = None, **settings: Any) -> Any:
        """An array on the GPU with this content."""
        return (kind or ByInterface)(self, content, **settings)


class Held:
    """A stream that goes on when it is told to, at the end of ``with`` at the latest."""

    def __init__(self, driver: Driver) -> None:
        self._may_go_on = threading.Event()
        self.stream = driver.stream()
        self._function = _HOST_FUNCTION(lambda _: self._may_go_on.wait() and None)
        driver.call("cuLaunchHostFunc", ctypes.c_void_p(self.stream), self._function, None)

    def let_go(self) -> None:
        self._may_go_on.set()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()


class Memory:
    """Memory of a GPU, which goes with the object."""

    def __init__(self, driver: Driver, content: np.ndarray, producer: int | None = None, is_read_only: bool = False) -> None:
        self.driver, self.producer, self.is_read_only = driver, producer, is_read_only
        self.shape, self.dtype, self.bytes = content.shape, content.dtype, content.nbytes
        address = ctypes.c_uint64()
        if self.bytes:
            driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(self.bytes))
            own = np.ascontiguousarray(content)
            driver.call("cuMemcpyHtoD_v2", address, ctypes.c_void_p(own.ctypes.data), ctypes.c_size_t(self.bytes))
        self.address = address.value

    def get(self) -> np.ndarray:
        """The content, as it is now."""
        content = np.empty(self.shape, self.dtype)
        if self.bytes:
            address = ctypes.c_uint64(self.address)
            self.driver.call("cuMemcpyDtoH_v2", ctypes.c_void_p(content.ctypes.data), address, ctypes.c_size_t(self.bytes))
        return content

    def __del__(self) -> None:
        # The driver's library may be gone at the interpreter's end.
        if self.address and threading is not None:
            self.driver.call("cuMemFree_v2", ctypes.c_uint64(self.address))


class ByInterface(Memory):
    """An array as Numba has them."""

    #: Fields that are others than the array's.
    changed: dict[str, Any] = {}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, self.is_read_only),
            "strides": None,
            "stream": self.producer,
            "version": 3,
        }
        return interface | self.changed


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_CODES = {"i": 0, "u": 1, "f": 2}

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


#: Arrays and tensors that capsules keep, by their address.
_lent: dict[int, tuple[ByDlpack, ctypes.Structure]] = {}


@_DESTRUCTOR
def _gone(capsule: int) -> None:
    _lent.pop(capsule)[0].given_back += 1


class ByDlpack(Memory):
    """An array as PyTorch and CuPy have them: its library has the stream wait that it is told."""

    #: `kDLCUDA`.
    device_type = 2
    strides: tuple[int, ...] | None = None

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        #: Streams that were told, and capsules that have gone.
        self.told: list[int | None] = []
        self.given_back = 0
        self._kept: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, self.driver.device

    def _tensor(self) -> _Tensor:
        n = len(self.shape)
        shape = (ctypes.c_int64 * n)(*self.shape)
        strides = None if self.strides is None else (ctypes.c_int64 * n)(*self.strides)
        self._kept += [shape, strides]
        kind, bits = _CODES[self.dtype.kind], 8 * self.dtype.itemsize
        pointer = ctypes.POINTER(ctypes.c_int64)
        cast: Callable[[Any], Any] = lambda at: ctypes.cast(at, pointer) if at is not None else pointer()  # noqa: E731
        return _Tensor(self.address or None, self.device_type, self.driver.device, n, kind, bits, 1, cast(shape), cast(strides), 0)

    def _capsule(self, of: ctypes.Structure, name: bytes) -> Any:
        capsule = _new_capsule(ctypes.addressof(of), name, ctypes.cast(_gone, ctypes.c_void_p))
        _lent[id(capsule)] = (self, of)
        return capsule

    def _order(self, stream: int | None) -> None:
        self.told.append(stream)
        if self.producer is not None and stream is not None:
            self.driver.wait(stream, self.producer)

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self._order(stream)
        return self._capsule(self._tensor(), b"dltensor")


class ByVersionedDlpack(ByDlpack):
    """The same, by DLPack's version 1."""

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None) -> Any:
        if max_version is None:
            return super().__dlpack__(stream=stream)
        self._order(stream)
        versioned = _Versioned((1, 1), None, None, int(self.is_read_only), self._tensor())
        return self._capsule(versioned, b"dltensor_versioned")

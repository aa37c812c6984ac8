//! Arrays of other libraries as memory: by Python's buffer protocol, or by DLPack.

use std::ffi::{CStr, c_char, c_int, c_void};

use mccs::DataType;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi::{PyCapsule_GetPointer, PyObject};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Elements one behind the other in the host's memory.
pub(crate) struct Array {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    pub(crate) element: Element,
    /// Keeps the memory.
    pub(crate) owner: Py<PyAny>,
}

/// Type of elements.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Element {
    pub(crate) bytes: usize,
    /// `None` for types that no collective combines; all can be moved.
    pub(crate) data_type: Option<DataType>,
}

impl Element {
    pub(crate) fn new(kind: Scalar, bytes: usize) -> Self {
        let data_type = match (kind, bytes) {
            (Scalar::Signed, 1) => Some(DataType::I8),
            (Scalar::Unsigned, 1) => Some(DataType::U8),
            (Scalar::Signed, 4) => Some(DataType::I32),
            (Scalar::Unsigned, 4) => Some(DataType::U32),
            (Scalar::Signed, 8) => Some(DataType::I64),
            (Scalar::Unsigned, 8) => Some(DataType::U64),
            (Scalar::Float, 2) => Some(DataType::F16),
            (Scalar::Float, 4) => Some(DataType::F32),
            (Scalar::Float, 8) => Some(DataType::F64),
            (Scalar::Bfloat, 2) => Some(DataType::Bf16),
            _ => None,
        };
        Element { bytes, data_type }
    }
}

/// Kinds of numbers.
pub(crate) enum Scalar {
    Signed,
    Unsigned,
    Float,
    Bfloat,
    Other,
}

/// `Py_buffer`. Its layout is part of the stable ABI from Python 3.11 on, and was the same in 3.10.
#[repr(C)]
struct PyBuffer {
    buf: *mut c_void,
    obj: *mut PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyObject_CheckBuffer(object: *mut PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut PyBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut PyBuffer);
}

/// `PyBUF_C_CONTIGUOUS | PyBUF_FORMAT`.
const C_CONTIGUOUS_WITH_FORMAT: c_int = 0x0020 | 0x0010 | 0x0008 | 0x0004;
const WRITABLE: c_int = 0x0001;

const ON_GPU: &str = "the array is in a GPU's memory; this communicator takes arrays in the host's memory, and one of GPUs is joined \
                      by mccs.init(..., device=0)";

/// Memory that an array lends.
pub(crate) fn of(array: &Bound<'_, PyAny>, is_written: bool) -> PyResult<Array> {
    // SAFETY: a live object.
    if unsafe { PyObject_CheckBuffer(array.as_ptr()) } != 0 {
        return by_buffer(array, is_written);
    }
    let py = array.py();
    if array.hasattr(pyo3::intern!(py, "__cuda_array_interface__")).unwrap_or(false) {
        return Err(PyTypeError::new_err(ON_GPU));
    }
    if array.hasattr(pyo3::intern!(py, "__dlpack__"))? {
        return by_dlpack(array, is_written);
    }
    let kind = array.get_type().name()?;
    Err(PyTypeError::new_err(format!("{kind} is no array: it has neither the buffer protocol nor __dlpack__")))
}

fn by_buffer(array: &Bound<'_, PyAny>, is_written: bool) -> PyResult<Array> {
    let mut view = std::mem::MaybeUninit::<PyBuffer>::uninit();
    let flags = C_CONTIGUOUS_WITH_FORMAT | if is_written { WRITABLE } else { 0 };
    // SAFETY: a live object with the protocol; the view is filled if the call succeeds.
    if unsafe { PyObject_GetBuffer(array.as_ptr(), view.as_mut_ptr(), flags) } != 0 {
        let cause = PyErr::take(array.py()).map_or_else(String::new, |error| error.value(array.py()).to_string());
        let needed = if is_written { "C-contiguous and writable" } else { "C-contiguous" };
        return Err(PyValueError::new_err(format!("the array must be {needed}: {cause}")));
    }
    // SAFETY: filled.
    let mut view = unsafe { view.assume_init() };
    let itemsize = usize::try_from(view.itemsize).unwrap_or(1).max(1);
    let format = if view.format.is_null() {
        c"B"
    } else {
        // SAFETY: the protocol's text, which lives as long as the view.
        unsafe { CStr::from_ptr(view.format) }
    };
    let kind = match format.to_bytes().iter().find(|byte| !b"@=<>!".contains(byte)) {
        Some(b'b' | b'h' | b'i' | b'l' | b'q' | b'n') => Scalar::Signed,
        Some(b'B' | b'H' | b'I' | b'L' | b'Q' | b'N') => Scalar::Unsigned,
        Some(b'e' | b'f' | b'd') => Scalar::Float,
        _ => Scalar::Other,
    };
    let is_foreign = cfg!(target_endian = "little") && matches!(format.to_bytes().first(), Some(b'>' | b'!'));
    let kind = if is_foreign { Scalar::Other } else { kind };
    let element = Element::new(kind, itemsize);
    let (address, bytes) = (view.buf.expose_provenance(), usize::try_from(view.len).unwrap_or(0));
    // Another export, which the object cannot end before it is dropped: a `bytearray` is not resized, a `memoryview` not released.
    let owner = pyo3::types::PyMemoryView::from(array).map(|view| view.into_any().unbind());
    // SAFETY: filled above, and released once.
    unsafe { PyBuffer_Release(&raw mut view) };
    Ok(Array { address, bytes, element, owner: owner? })
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `kDLCPU`, and `kDLCUDAHost`: memory of the host's that is pinned.
const HOST: [i32; 2] = [1, 3];
/// `kDLCUDA`, and `kDLCUDAManaged`.
pub(crate) const GPU: [i32; 2] = [2, 13];

/// First fields of a `DLManagedTensorVersioned`.
#[repr(C)]
struct DlVersioned {
    version: [u32; 2],
    context: *mut c_void,
    deleter: *mut c_void,
    flags: u64,
    tensor: DlTensor,
}

/// In [`DlVersioned::flags`].
const READ_ONLY: u64 = 1;
/// The newest version whose layout is this one.
const DLPACK_VERSION: (u32, u32) = (1, 1);

/// The capsule of an array; a versioned one, where the library knows those. One of a GPU's is ready on the stream.
pub(crate) fn capsule_of<'py>(array: &Bound<'py, PyAny>, stream: Option<usize>) -> PyResult<Bound<'py, PyAny>> {
    let py = array.py();
    let name = pyo3::intern!(py, "__dlpack__");
    let arguments = PyDict::new(py);
    if let Some(stream) = stream {
        arguments.set_item("stream", stream)?;
    }
    let plain = arguments.copy()?;
    arguments.set_item("max_version", DLPACK_VERSION)?;
    match array.call_method(name, (), Some(&arguments)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => array.call_method(name, (), Some(&plain)),
        capsule => capsule,
    }
}

fn by_dlpack(array: &Bound<'_, PyAny>, is_written: bool) -> PyResult<Array> {
    let device = pyo3::intern!(array.py(), "__dlpack_device__");
    let (device, _): (i32, i32) = array.call_method0(device)?.extract()?;
    if GPU.contains(&device) {
        return Err(PyTypeError::new_err(ON_GPU));
    }
    if !HOST.contains(&device) {
        return Err(PyTypeError::new_err("the array is in a device's memory; this takes arrays in the host's memory"));
    }
    of_capsule(capsule_of(array, None)?, is_written)
}

/// Memory of a capsule's tensor. Not consumed: the capsule, which is kept, frees what it holds.
pub(crate) fn of_capsule(capsule: Bound<'_, PyAny>, is_written: bool) -> PyResult<Array> {
    let py = capsule.py();
    let named = |name: &CStr| {
        // SAFETY: checks that it is a capsule of that name.
        let pointer = unsafe { PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr()) };
        if pointer.is_null() { Err(PyErr::take(py)) } else { Ok(pointer) }
    };
    let (tensor, flags) = match named(c"dltensor_versioned") {
        Ok(pointer) => {
            // SAFETY: what a capsule of that name leads to, for as long as it lives.
            let versioned = unsafe { &*pointer.cast::<DlVersioned>() };
            (&versioned.tensor, versioned.flags)
        }
        Err(_) => {
            let no_capsule = |error: Option<PyErr>| {
                error.unwrap_or_else(|| PyBufferError::new_err("__dlpack__ returned no capsule"))
            };
            let pointer = named(c"dltensor").map_err(no_capsule)?;
            // SAFETY: a DLManagedTensor begins with its tensor, and lives as long as the capsule.
            (unsafe { &*pointer.cast::<DlTensor>() }, 0)
        }
    };
    if is_written && flags & READ_ONLY != 0 {
        return Err(PyValueError::new_err("the array must be writable"));
    }
    let dimensions = usize::try_from(tensor.ndim).unwrap_or(0);
    let list = |at: *const i64| {
        // SAFETY: as many as there are dimensions, where the pointer is not null.
        (!at.is_null() && dimensions > 0).then(|| unsafe { std::slice::from_raw_parts(at, dimensions) })
    };
    let shape = list(tensor.shape).unwrap_or(&[]);
    let mut count = 1;
    // Strides of no elements say nothing.
    if let Some(strides) = list(tensor.strides).filter(|_| !shape.contains(&0)) {
        for (length, stride) in shape.iter().zip(strides).rev() {
            if *length > 1 && *stride != count {
                return Err(PyValueError::new_err("the array must be C-contiguous"));
            }
            count *= length;
        }
    } else {
        count = shape.iter().product();
    }
    let kind = match (tensor.code, tensor.lanes) {
        (0, 1) => Scalar::Signed,
        (1, 1) => Scalar::Unsigned,
        (2, 1) => Scalar::Float,
        (4, 1) => Scalar::Bfloat,
        _ => Scalar::Other,
    };
    let item_bytes = usize::from(tensor.bits) * usize::from(tensor.lanes) / 8;
    let address = tensor.data.expose_provenance() + tensor.byte_offset as usize;
    let bytes = usize::try_from(count).unwrap_or(0) * item_bytes;
    Ok(Array { address, bytes, element: Element::new(kind, item_bytes), owner: capsule.unbind() })
}

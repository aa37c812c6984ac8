//! Arrays in a GPU's memory: by DLPack, or by their `__cuda_array_interface__`.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::array::{self, Array, Element, GPU, Scalar};
use crate::cuda_rank::CudaRank;
use crate::operation::StreamAddress;

const IN_THE_HOST: &str = "the array is in the host's memory; this communicator takes arrays of a GPU, and one of the host's memory is \
                           joined by mccs.init() without a device";

/// Memory that an array lends to operations of a rank's on a stream, which waits for what makes the array.
pub(crate) fn of(
    array: &Bound<'_, PyAny>,
    is_written: bool,
    rank: &CudaRank,
    stream: StreamAddress,
) -> PyResult<Array> {
    let (py, wrong) = (array.py(), |error: mccs::Error| PyValueError::new_err(error.to_string()));
    let lent = if array.hasattr("__dlpack__")? && array.hasattr("__dlpack_device__")? {
        by_dlpack(array, is_written, rank, stream)?
    } else if array.hasattr("__cuda_array_interface__")? {
        let interface = array.getattr("__cuda_array_interface__")?;
        let (lent, producer) = by_interface(interface.cast::<PyDict>()?, array, is_written)?;
        if let Some(producer) = producer {
            py.detach(|| rank.order(stream, producer)).map_err(wrong)?;
        }
        lent
    } else {
        let message = format!(
            "{} is no array of a GPU's: it has neither __dlpack__ nor __cuda_array_interface__",
            array.get_type().name()?
        );
        return Err(PyTypeError::new_err(message));
    };
    if lent.bytes > 0 {
        py.detach(|| rank.check_address(lent.address as u64)).map_err(wrong)?;
    }
    Ok(lent)
}

fn by_dlpack(array: &Bound<'_, PyAny>, is_written: bool, rank: &CudaRank, stream: StreamAddress) -> PyResult<Array> {
    let (device, number): (i32, i32) = array.call_method0("__dlpack_device__")?.extract()?;
    if !GPU.contains(&device) {
        return Err(PyTypeError::new_err(IN_THE_HOST));
    }
    if number != rank.device() {
        return Err(PyValueError::new_err(rank.is_of_other(number)));
    }
    // The array's library has the stream wait. DLPack calls the default stream 1.
    array::of_capsule(array::capsule_of(array, Some(stream.max(1)))?, is_written)
}

/// Memory, and the stream that is to be waited for.
fn by_interface(
    interface: &Bound<'_, PyDict>,
    array: &Bound<'_, PyAny>,
    is_written: bool,
) -> PyResult<(Array, Option<StreamAddress>)> {
    let given = |name: &str| Ok::<_, PyErr>(interface.get_item(name)?.filter(|value| !value.is_none()));
    let shape: Vec<usize> = field(given("shape")?, "shape")?;
    let typestr: String = field(given("typestr")?, "typestr")?;
    let (address, is_read_only): (usize, bool) = field(given("data")?, "data")?;
    if is_written && is_read_only {
        return Err(PyValueError::new_err("the array must be writable"));
    }
    if given("mask")?.is_some() {
        return Err(PyValueError::new_err("the array has a mask: give its data"));
    }
    let element = element_of(&typestr)?;
    let mut bytes = element.bytes;
    let strides: Option<Vec<isize>> = given("strides")?.map(|strides| field(Some(strides), "strides")).transpose()?;
    if strides.as_ref().is_some_and(|strides| strides.len() != shape.len()) {
        return Err(PyValueError::new_err("__cuda_array_interface__ has no stride for each dimension"));
    }
    // Strides of no elements say nothing.
    let strides = strides.filter(|_| !shape.contains(&0));
    for (dimension, length) in shape.iter().enumerate().rev() {
        let stride = strides.as_ref().map(|strides| strides[dimension]);
        if *length > 1 && stride.is_some_and(|stride| stride != bytes as isize) {
            return Err(PyValueError::new_err("the array must be C-contiguous"));
        }
        let too_large = || PyValueError::new_err("the array would be larger than memory");
        bytes = bytes.checked_mul(*length).ok_or_else(too_large)?;
    }
    let producer: Option<StreamAddress> = given("stream")?.map(|stream| field(Some(stream), "stream")).transpose()?;
    if producer == Some(0) {
        let message = "__cuda_array_interface__ names the stream 0, which the protocol has not: 1 is the default one";
        return Err(PyValueError::new_err(message));
    }
    Ok((Array { address, bytes, element, owner: array.clone().unbind() }, producer))
}

/// A field of the interface's.
fn field<'py, T>(value: Option<Bound<'py, PyAny>>, name: &str) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    let value = value.ok_or_else(|| PyValueError::new_err(format!("__cuda_array_interface__ has no {name}")))?;
    let wrong = || {
        PyValueError::new_err(format!("__cuda_array_interface__ has the {name} {value}, which the protocol has not"))
    };
    value.extract().map_err(|_| wrong())
}

/// The elements of a type string of NumPy's.
fn element_of(typestr: &str) -> PyResult<Element> {
    let wrong = || PyValueError::new_err(format!("__cuda_array_interface__ has the type {typestr:?}"));
    let mut letters = typestr.chars();
    let order = letters.next().ok_or_else(wrong)?;
    let kind = match (order, letters.next().ok_or_else(wrong)?) {
        ('>', _) => Scalar::Other,
        (_, 'i') => Scalar::Signed,
        (_, 'u') => Scalar::Unsigned,
        (_, 'f') => Scalar::Float,
        _ => Scalar::Other,
    };
    let bytes = letters.as_str().parse().ok().filter(|bytes| *bytes > 0).ok_or_else(wrong)?;
    Ok(Element::new(kind, bytes))
}

/// The stream that an argument names: a number, or an object of PyTorch's, CuPy's or another library's.
pub(crate) fn stream_of(stream: &Bound<'_, PyAny>) -> Result<StreamAddress, String> {
    let number = |object: &Bound<'_, PyAny>| object.extract::<StreamAddress>().ok();
    if let Some(number) = number(stream) {
        return Ok(number);
    }
    if let Ok(protocol) = stream.call_method0("__cuda_stream__")
        && let Ok((_, address)) = protocol.extract::<(u32, StreamAddress)>()
    {
        return Ok(address);
    }
    let named = ["cuda_stream", "ptr"].into_iter().find_map(|name| number(&stream.getattr(name).ok()?));
    named.ok_or_else(|| {
        format!("{stream} is no stream: neither a number, nor an object with __cuda_stream__, cuda_stream or ptr")
    })
}

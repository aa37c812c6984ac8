//! Arguments of calls, as Python gives them, checked: arrays, ranks and operators. The same for arrays of the host and of GPUs.

use mccs::{DataType, RedOp, ReduceOperator, Scalar};
use pyo3::prelude::*;

use crate::argument::Argument;
use crate::array::Array;
use crate::errors::Caller;
use crate::operation::{Call, Kind};

/// Gives an array's memory, to be written or only read.
pub(crate) type Lend<'a> = dyn FnMut(&Bound<'_, PyAny>, bool) -> PyResult<Array> + 'a;

/// The rank that an argument names.
pub(crate) fn peer(py: Python<'_>, caller: Caller, call: &str, name: &str, rank: Argument<u32>) -> PyResult<u32> {
    rank.get(name).map_err(|message| caller.argument(py, call, &message))
}

/// How a call combines elements: the operator of a name, or the sum of contributions that are multiplied before.
pub(crate) fn operator(
    py: Python<'_>,
    caller: Caller,
    call: &str,
    name: Argument<String>,
    factor: Option<Argument<f64>>,
) -> PyResult<ReduceOperator> {
    let refused = |message: &str| Err(caller.argument(py, call, message));
    let (name, factor) = match (name.get("op"), factor.map(|factor| factor.get("factor")).transpose()) {
        (Ok(name), Ok(factor)) => (name, factor),
        (Err(message), _) | (_, Err(message)) => return refused(&message),
    };
    let op = match name.as_str() {
        "sum" => RedOp::Sum,
        "prod" => RedOp::Prod,
        "min" => RedOp::Min,
        "max" => RedOp::Max,
        "avg" => RedOp::Avg,
        other => return refused(&format!("unknown operator {other:?}; known: sum, prod, min, max, avg")),
    };
    match factor {
        None => Ok(op.into()),
        Some(factor) if op == RedOp::Sum => Ok(ReduceOperator::PreMulSum(Scalar::Float(factor))),
        Some(_) => refused(&format!("a factor goes with the operator sum, not with {name}")),
    }
}

/// Buffers of a call: which of them the rank has, and into how many parts each is divided.
pub(crate) struct Buffers<'a, 'py> {
    pub(crate) send: Option<&'a Bound<'py, PyAny>>,
    pub(crate) send_parts: usize,
    pub(crate) recv: Option<&'a Bound<'py, PyAny>>,
    pub(crate) recv_parts: usize,
}

/// A call, besides its buffers.
#[derive(Clone, Copy)]
pub(crate) struct What {
    pub(crate) kind: Kind,
    pub(crate) op: ReduceOperator,
    pub(crate) root: u32,
}

impl What {
    /// A call that combines nothing.
    pub(crate) fn moving(kind: Kind, root: u32) -> Self {
        What { kind, op: RedOp::Sum.into(), root }
    }

    /// The call on arrays, whose memory `lend` gives, and what keeps that.
    pub(crate) fn on(
        self,
        py: Python<'_>,
        caller: Caller,
        buffers: &Buffers<'_, '_>,
        lend: &mut Lend<'_>,
    ) -> PyResult<(Call, Vec<Py<PyAny>>)> {
        let name = self.kind.name();
        let refused = |error: PyErr| caller.argument(py, name, &error.value(py).to_string());
        let send = buffers.send.map(|array| lend(array, false)).transpose().map_err(refused)?;
        let recv = buffers.recv.map(|array| lend(array, true)).transpose().map_err(refused)?;
        let argument = |message: &str| caller.argument(py, name, message);
        let element = send.as_ref().or(recv.as_ref()).map(|array| array.element);
        if let (Some(send), Some(recv)) = (&send, &recv)
            && send.element != recv.element
        {
            return Err(argument("what is sent and what is received have different types"));
        }
        let reduces = matches!(self.kind, Kind::Collective(kind) if kind.reduces());
        let data_type = match element {
            Some(element) if reduces => element.data_type.ok_or_else(|| {
                argument("elements of this type cannot be combined; int8, int32, int64, their unsigned kinds, and float16, bfloat16, float32 and float64 can")
            })?,
            Some(element) => element.data_type.unwrap_or(DataType::U8),
            None => DataType::U8,
        };
        let size = data_type.size_bytes();
        let part_bytes = |array: &Array, parts: usize, what: &str| {
            let bytes = array.bytes / parts;
            if bytes * parts != array.bytes || !bytes.is_multiple_of(element.map_or(1, |element| element.bytes)) {
                let elements = array.bytes / element.map_or(1, |element| element.bytes).max(1);
                return Err(argument(&format!("{elements} elements to {what} are no {parts} equal parts")));
            }
            Ok(bytes)
        };
        let sent = send.as_ref().map(|array| part_bytes(array, buffers.send_parts, "send")).transpose()?;
        let received = recv.as_ref().map(|array| part_bytes(array, buffers.recv_parts, "receive")).transpose()?;
        if let (Some(sent), Some(received)) = (sent, received)
            && sent != received
        {
            let message = format!("a part that is sent has {sent} bytes, and one that is received has {received}");
            return Err(argument(&message));
        }
        let bytes = sent.or(received).unwrap_or(0);
        let parts = |array: &Option<Array>, parts: usize| {
            let address = |array: &Array| (0..parts).map(|part| array.address + part * bytes).collect();
            array.as_ref().map_or_else(Vec::new, address)
        };
        let call = Call {
            kind: self.kind,
            data_type,
            op: self.op,
            root: self.root,
            count: (bytes / size) as u64,
            send: parts(&send, buffers.send_parts),
            recv: parts(&recv, buffers.recv_parts),
        };
        let owners = [send, recv].into_iter().flatten().map(|array| array.owner).collect();
        Ok((call, owners))
    }
}

//! Conformance of optional abilities, where a transport has them and where it has not.

use mccs_config::service::Device;

use super::Fixture;
use super::harness::Pair;
use crate::{Abilities, FlowOptions, MemoryKind, Transport, TransportError, is_device_up};

/// A flow that is told to stay on its path, under load, loses nothing; one that is over cannot be told.
pub(crate) fn paths_are_set<F: Fixture>(pair: &mut Pair<F>) {
    let ends = pair.flow(0);
    let path = pair.options.path();
    pair.transfer(ends, 100_000, 1);
    for number in 2..5 {
        if let Some(paths) = pair.host(0).path_control() {
            paths.set_path(ends.send, &path, &[].into());
        }
        pair.transfer(ends, 100_000, number);
    }
    pair.host(0).close(ends.send.into());
    pair.host(1).close(ends.recv.into());
    if let Some(paths) = pair.host(0).path_control() {
        paths.set_path(ends.send, &path, &[].into());
    }
    // Another flow in the same place is another flow.
    let new = pair.flow(0);
    pair.transfer(new, 1000, 5);
}

/// Counts grow with what is sent, and are those of one flow.
pub(crate) fn packets_are_counted<F: Fixture>(pair: &mut Pair<F>) {
    let (ends, other) = (pair.flow(0), pair.flow(0));
    let counts = |pair: &mut Pair<F>, flow| Some(pair.host(0).wire_statistics()?.wire_stats(flow)?.segments);
    let (before, others) = (counts(pair, ends.send), counts(pair, other.send));
    for number in 0..3 {
        pair.transfer(ends, 100_000, number);
    }
    assert_eq!(counts(pair, other.send), others, "nothing was sent there");
    assert!(before.is_none_or(|before| counts(pair, ends.send) > Some(before)), "{before:?}");
    pair.host(0).close(ends.send.into());
    assert_eq!(counts(pair, ends.send), None, "it is over");
}

/// No transport takes a path whose device is not there for one that it has.
pub(crate) fn unknown_devices_are_refused<F: Fixture>(pair: &mut Pair<F>) {
    let options = FlowOptions { device: None, ..pair.options.clone() };
    assert_eq!(is_device_up(pair.host(0).local_devices(), &options), Ok(true));
    let device = Some(Device { name: "nosuch0".into(), port: None });
    let refusal = is_device_up(pair.host(0).local_devices(), &FlowOptions { device: device.clone(), ..options });
    assert!(matches!(&refusal, Err(TransportError::Device { device: named, .. }) if Some(named) == device.as_ref()));
}

/// A GPU's memory is taken, or refused with what to do instead.
pub(crate) fn gpu_memory_is_taken_or_refused<F: Fixture>(pair: &mut Pair<F>) {
    let memory = pair.filled(0, 1000, 7);
    let ptr = memory.bytes().as_ptr().cast_mut();
    // SAFETY: the memory outlives the registration. It is no GPU's, as those who ask a device for it find out.
    match unsafe { pair.host(0).register(ptr, 1000, MemoryKind::Gpu { dma_buffer: None }) } {
        Ok(key) => {
            let reaches_gpus = pair.host(0).gpu_memory();
            assert!(reaches_gpus.is_some_and(|known| known.gpu_access(key).is_some()), "it says how");
            assert!(reaches_gpus.is_some_and(|known| known.gpu_access(memory.key).is_none()), "it is the host's");
            pair.host(0).deregister(key).expect("unused");
        }
        Err(refusal) => assert!(refusal.to_string().contains("stage through"), "{refusal}"),
    }
    let before = pair.host(0).usage();
    pair.forget(0, memory);
    assert_eq!(pair.host(0).usage().registrations + 1, before.registrations, "nothing is kept of it");
}

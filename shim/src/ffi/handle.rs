//! Handles of C programs (`mccsComm_t` and kin): every object that C has is in one table, by its
//! kind.

use std::marker::PhantomData;
use std::ops::Deref;

use super::bootstrap::CBootstrap;
use super::communicators::CComm;
use super::port_channels::{CChannelMemory, CPortChannel};
use super::{CClient, CStream};
use crate::Error;
use crate::handles::{Held, Table};

static OBJECTS: Table<Object> = Table::new();

/// Defines the kinds of objects, each with its word in `mccs.h`.
macro_rules! kinds {
    ($($kind:ident $word:literal;)+) => {
        /// What a handle may stand for.
        #[expect(clippy::enum_variant_names, reason = "they are the types' names")]
        pub(super) enum Object {
            $(
                #[doc = concat!("A ", $word, ".")]
                $kind($kind),
            )+
        }

        $(
            impl Kind for $kind {
                const WORD: &'static str = $word;

                fn into_object(self) -> Object {
                    Object::$kind(self)
                }

                fn of(object: &Object) -> Option<&Self> {
                    match object {
                        Object::$kind(own) => Some(own),
                        _ => None,
                    }
                }

                fn from_object(object: Object) -> Option<Self> {
                    match object {
                        Object::$kind(own) => Some(own),
                        _ => None,
                    }
                }
            }
        )+
    };
}

kinds! {
    CClient "client";
    CComm "communicator";
    CStream "stream of mccsStreamCreate";
    CBootstrap "bootstrap";
    CChannelMemory "memory of channels";
    CPortChannel "port channel";
}

/// A kind of object that C has handles of.
pub(super) trait Kind: Sized + 'static {
    /// What it is called.
    const WORD: &'static str;

    fn into_object(self) -> Object;
    fn of(object: &Object) -> Option<&Self>;
    fn from_object(object: Object) -> Option<Self>;
}

/// An object for the time of a call: it lives at least as long, also if another thread destroys it meanwhile.
pub(super) struct Use<T> {
    held: Held<Object>,
    kind: PhantomData<T>,
}

impl<T: Kind> Use<T> {
    /// The object itself, where no other thread's call uses it.
    pub(super) fn into_inner(self) -> Option<T> {
        self.held.into_inner().ok().and_then(T::from_object)
    }
}

impl<T: Kind> Deref for Use<T> {
    type Target = T;

    fn deref(&self) -> &T {
        T::of(&self.held).expect("invariant: a use is of its object's kind")
    }
}

/// Gives an object a handle: a number, which is no address.
pub(super) fn handle_of<T: Kind>(object: T) -> Result<*mut T, Error> {
    let held = OBJECTS.insert(object.into_object());
    let held = held.ok_or_else(|| Error::System("this process has as many handles of mccs as there can be".into()))?;
    Ok(std::ptr::without_provenance_mut(held.handle() as usize))
}

/// The object behind a handle, which is the argument `what`.
pub(super) fn object<T: Kind>(handle: *mut T, what: &str) -> Result<Use<T>, Error> {
    used(OBJECTS.find(handle.addr() as u64), handle, what)
}

/// As [`object`]. The handle ends.
pub(super) fn take<T: Kind>(handle: *mut T, what: &str) -> Result<Use<T>, Error> {
    object(handle, what)?;
    used(OBJECTS.close(handle.addr() as u64), handle, what)
}

fn used<T: Kind>(held: Option<Held<Object>>, handle: *mut T, what: &str) -> Result<Use<T>, Error> {
    if handle.is_null() {
        return Err(Error::argument(format!("{what} is null")));
    }
    let held = held.filter(|held| T::of(held).is_some());
    let held = held.ok_or_else(|| {
        Error::argument(format!("{what} {handle:p} is no handle of a {}, or has been destroyed", T::WORD))
    })?;
    Ok(Use { held, kind: PhantomData })
}

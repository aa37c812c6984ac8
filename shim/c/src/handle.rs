//! Handles of C programs (`mccsComm_t` and kin): all objects that C has are in one table, whatever
//! their kinds.

use std::any::Any;
use std::marker::PhantomData;
use std::ops::Deref;

use mccs::Error;
use mccs::bindings::{Held, Table};

type Object = Box<dyn Any + Send + Sync>;

static OBJECTS: Table<Object> = Table::new();

/// A kind of object that C has handles of.
pub(super) trait Kind: Any + Send + Sync {
    /// Its name.
    const WORD: &'static str;
}

/// An object for the time of a call: it lives at least as long, also if another thread destroys it meanwhile.
pub(super) struct Use<T> {
    held: Held<Object>,
    kind: PhantomData<T>,
}

impl<T: Kind> Use<T> {
    /// The object itself, where no other thread's call uses it.
    pub(super) fn into_inner(self) -> Option<T> {
        let object: Box<dyn Any> = self.held.into_inner().ok()?;
        object.downcast().ok().map(|object| *object)
    }
}

impl<T: Kind> Deref for Use<T> {
    type Target = T;

    fn deref(&self) -> &T {
        (**self.held).downcast_ref().expect("invariant: a use is of its object's kind")
    }
}

/// Gives an object a handle: a number, which is no address.
pub(super) fn handle_of<T: Kind>(object: T) -> Result<*mut T, Error> {
    let held = OBJECTS.insert(Box::new(object));
    let held = held.ok_or_else(|| Error::system("this process has as many handles of mccs as there can be"))?;
    Ok(std::ptr::without_provenance_mut(held.handle() as usize))
}

/// The object behind a handle, which is the argument `what`.
pub(super) fn object<T: Kind>(handle: *mut T, what: &str) -> Result<Use<T>, Error> {
    of_kind(OBJECTS.find(handle.addr() as u64), handle, what)
}

/// As [`object`]. The handle ends.
pub(super) fn take<T: Kind>(handle: *mut T, what: &str) -> Result<Use<T>, Error> {
    object(handle, what)?;
    of_kind(OBJECTS.close(handle.addr() as u64), handle, what)
}

fn of_kind<T: Kind>(held: Option<Held<Object>>, handle: *mut T, what: &str) -> Result<Use<T>, Error> {
    match held {
        Some(held) if (**held).is::<T>() => Ok(Use { held, kind: PhantomData }),
        _ if handle.is_null() => Err(Error::argument(format!("{what} is null"))),
        _ => {
            let word = T::WORD;
            Err(Error::argument(format!("{what} {handle:p} is no handle of a {word}, or of one that was destroyed")))
        }
    }
}

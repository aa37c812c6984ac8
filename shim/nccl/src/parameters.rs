//! Environment variables (`NCCL_*`, `MCCS_*`) that the library reads, and `ncclParam*`, which tells
//! of them.
//!
//! Everything else that NCCL has variables for is the operator's here (`docs/OPERATING.md`), and no key of it is known.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::Write;

use mccs::Error;

use super::{Status, guard, put};

/// A parameter: a variable of the environment.
pub struct Parameter {
    key: &'static CStr,
    /// The text of its value where it is not set.
    default: &'static str,
    meaning: &'static str,
    /// Whether it is listed unasked.
    is_published: bool,
}

/// Lists all parameters, those too that are not published.
const LISTS_ALL: &CStr = c"NCCL_PARAM_DUMP_ALL";

static PARAMETERS: [Parameter; 6] = [
    Parameter { key: c"MCCS_SOCKET", default: "", meaning: "path of the service's socket", is_published: true },
    Parameter {
        key: c"NCCL_DEBUG",
        default: "",
        meaning: "VERSION, WARN, INFO or TRACE: which lines are printed",
        is_published: true,
    },
    Parameter { key: c"NCCL_DEBUG_FILE", default: "", meaning: "where they are printed to", is_published: true },
    Parameter { key: c"NCCL_DEBUG_SUBSYS", default: "", meaning: "of what INFO tells", is_published: true },
    Parameter { key: c"NCCL_PROFILER_PLUGIN", default: "", meaning: "the profiler plugin", is_published: true },
    Parameter { key: LISTS_ALL, default: "0", meaning: "1 lists parameters of these calls too", is_published: false },
];

thread_local! {
    static LAST: RefCell<Last> = RefCell::default();
}

/// Values to which the calling thread was last given pointers.
#[derive(Default)]
struct Last {
    by_handle: CString,
    by_key: CString,
    keys: Vec<*const c_char>,
}

fn with_last<R>(act: impl FnOnce(&mut Last) -> R) -> Result<R, Error> {
    LAST.try_with(|last| act(&mut last.borrow_mut())).map_err(|_| Error::system("the calling thread ends"))
}

impl Parameter {
    /// Its value, as text.
    fn value(&self) -> String {
        let name = self.key.to_str().unwrap_or_default();
        std::env::var_os(name).map_or_else(|| self.default.into(), |value| value.to_string_lossy().into_owned())
    }

    fn text(&self) -> CString {
        // Values of the environment have no zeros within.
        CString::new(self.value()).unwrap_or_default()
    }

    /// The parameter of a key.
    ///
    /// # Safety
    /// The pointer must be null, or lead to a text that ends.
    unsafe fn named(key: *const c_char) -> Result<&'static Self, Error> {
        if key.is_null() {
            return Err(Error::InvalidArgument("key is null".into()));
        }
        // SAFETY: the caller's contract.
        let key = unsafe { CStr::from_ptr(key) };
        let found = PARAMETERS.iter().find(|parameter| parameter.key == key);
        found.ok_or_else(|| {
            let key = key.to_string_lossy();
            Error::InvalidArgument(format!("there is no parameter {key}; ncclParamGetAllParameterKeys lists all"))
        })
    }

    /// The parameter of a handle, which is compared and never followed.
    fn behind(handle: *const Parameter) -> Result<&'static Self, Error> {
        let found = PARAMETERS.iter().find(|parameter| std::ptr::eq(*parameter, handle));
        found.ok_or_else(|| Error::InvalidArgument(format!("{handle:p} is not from ncclParamBind")))
    }

    fn listed() -> impl Iterator<Item = &'static Self> {
        let asked = std::env::var(LISTS_ALL.to_str().unwrap_or_default()).unwrap_or_default();
        let lists_all = matches!(asked.to_ascii_uppercase().as_str(), "1" | "T" | "TRUE");
        PARAMETERS.iter().filter(move |parameter| lists_all || parameter.is_published)
    }
}

/// Finds a parameter. The handle stays good; see `nccl.h`.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclParamBind(handle: *mut *const Parameter, key: *const c_char) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(handle, std::ptr::from_ref(Parameter::named(key)?), "out") })
}

/// Defines how a value is read as a number.
macro_rules! numbers {
    ($($name:ident: $type:ty;)+) => {
        $(
            /// A value as a number; see `nccl.h`.
            ///
            /// # Safety
            /// Pointers as `nccl.h` says.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(handle: *const Parameter, number: *mut $type) -> Status {
                guard(|| {
                    let (parameter, type_name) = (Parameter::behind(handle)?, stringify!($type));
                    let (key, value) = (parameter.key.to_string_lossy(), parameter.value());
                    let wrong = |_| Error::InvalidArgument(format!("{key} is {value:?} and no {type_name}"));
                    // SAFETY: the caller's contract.
                    unsafe { put(number, value.trim().parse::<$type>().map_err(wrong)?, "out") }
                })
            }
        )+
    };
}

numbers! {
    ncclParamGetI8: i8;
    ncclParamGetI16: i16;
    ncclParamGetI32: i32;
    ncclParamGetI64: i64;
    ncclParamGetU8: u8;
    ncclParamGetU16: u16;
    ncclParamGetU32: u32;
    ncclParamGetU64: u64;
}

/// A value as text, which stays until the thread's next call of this function; see `nccl.h`.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclParamGetStr(handle: *const Parameter, text: *mut *const c_char) -> Status {
    guard(|| {
        let value = Parameter::behind(handle)?.text();
        let address = with_last(|last| {
            last.by_handle = value;
            last.by_handle.as_ptr()
        })?;
        // SAFETY: the caller's contract.
        unsafe { put(text, address, "out") }
    })
}

/// Copies a value's bytes, a zero at the end of a text included; see `nccl.h`.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclParamGet(
    handle: *const Parameter,
    bytes: *mut c_void,
    room: c_int,
    length: *mut c_int,
) -> Status {
    guard(|| {
        let value = Parameter::behind(handle)?.text().into_bytes_with_nul();
        // SAFETY: the caller's contract.
        unsafe { put(length, value.len() as c_int, "len")? };
        if bytes.is_null() || usize::try_from(room).is_ok_and(|room| room < value.len()) || room < 0 {
            return Err(Error::InvalidArgument(format!(
                "the value takes {} bytes, of which {room} are there",
                value.len()
            )));
        }
        // SAFETY: the caller's contract: there is as much room.
        unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), bytes.cast(), value.len()) };
        Ok(())
    })
}

/// The value of a key, as text, which stays until the thread's next call of this function; see `nccl.h`.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclParamGetParameter(
    key: *const c_char,
    text: *mut *const c_char,
    length: *mut c_int,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let found = unsafe { Parameter::named(key) };
        if found.is_err() && !text.is_null() && !length.is_null() {
            // SAFETY: the caller's contract.
            unsafe { (text.write(std::ptr::null()), length.write(0)) };
        }
        let value = found?.text();
        let (address, bytes) = with_last(|last| {
            last.by_key = value;
            (last.by_key.as_ptr(), last.by_key.as_bytes().len())
        })?;
        // SAFETY: the caller's contract.
        unsafe {
            put(length, bytes as c_int, "valueLen")?;
            put(text, address, "value")
        }
    })
}

/// All keys, in a table that stays until the thread's next call of this function; see `nccl.h`.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclParamGetAllParameterKeys(table: *mut *const *const c_char, length: *mut c_int) -> Status {
    guard(|| {
        let (address, count) = with_last(|last| {
            last.keys = Parameter::listed().map(|parameter| parameter.key.as_ptr()).collect();
            (last.keys.as_ptr(), last.keys.len())
        })?;
        // SAFETY: the caller's contract.
        unsafe {
            put(length, count as c_int, "tableLen")?;
            put(table, address, "table")
        }
    })
}

/// Prints all parameters to standard output, where NCCL prints them; see `nccl.h`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclParamDumpAll() {
    let lines = Parameter::listed().map(|parameter| {
        let Parameter { key, default, meaning, .. } = parameter;
        let (key, value) = (key.to_string_lossy(), parameter.value());
        format!("{key} (text) {meaning}\n    Current value={value:?} default={default:?}\n")
    });
    // Nobody may read it.
    let _ = std::io::stdout().write_all(lines.collect::<String>().as_bytes());
}

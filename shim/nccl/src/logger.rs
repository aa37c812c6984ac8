//! `ncclDebugLogger_t`: the function by which plugins print lines. It takes arguments as `printf`
//! does.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};

use super::debug::{self, Level};

/// The function, for plugins.
pub(crate) fn function() -> *const c_void {
    log as *const c_void
}

unsafe extern "C" {
    fn vsnprintf(text: *mut c_char, bytes: usize, format: *const c_char, arguments: *mut c_void) -> c_int;
}

/// The variadic function: gathers what comes behind the format into a `va_list`, as the System V ABI lays it out, and passes it on.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn log() {
    // The list is at rsp, and the registers that it names 32 bytes above. Five arguments come before the first variable one, and what did not fit
    // into registers lies above the return address.
    std::arch::naked_asm!(
        "sub rsp, 216",
        "mov qword ptr [rsp + 72], r9",
        "test al, al",
        "je 2f",
        "movaps xmmword ptr [rsp + 80], xmm0",
        "movaps xmmword ptr [rsp + 96], xmm1",
        "movaps xmmword ptr [rsp + 112], xmm2",
        "movaps xmmword ptr [rsp + 128], xmm3",
        "movaps xmmword ptr [rsp + 144], xmm4",
        "movaps xmmword ptr [rsp + 160], xmm5",
        "movaps xmmword ptr [rsp + 176], xmm6",
        "movaps xmmword ptr [rsp + 192], xmm7",
        "2:",
        "mov dword ptr [rsp], 40",
        "mov dword ptr [rsp + 4], 48",
        "lea rax, [rsp + 224]",
        "mov qword ptr [rsp + 8], rax",
        "lea rax, [rsp + 32]",
        "mov qword ptr [rsp + 16], rax",
        "mov r9, rsp",
        "call {print}",
        "add rsp, 216",
        "ret",
        print = sym print,
    );
}

/// Elsewhere the format is printed as it is, without its arguments.
#[cfg(not(target_arch = "x86_64"))]
unsafe extern "C" fn log(level: c_int, flags: c_ulong, file: *const c_char, line: c_int, format: *const c_char) {
    // SAFETY: the caller's contract: text. Without a list nothing is formatted.
    unsafe { print(level, flags, file, line, format, std::ptr::null_mut()) };
}

/// Prints a plugin's line.
///
/// # Safety
/// The format must be text, and the list fit it, or be null.
unsafe extern "C" fn print(
    level: c_int,
    flags: c_ulong,
    _file: *const c_char,
    _line: c_int,
    format: *const c_char,
    arguments: *mut c_void,
) {
    let level = match level {
        1 => Level::Version,
        2 => Level::Warn,
        3 => Level::Info,
        _ => Level::Trace,
    };
    if format.is_null() || !debug::is_on(level, flags) {
        return;
    }
    let mut text = [0u8; 1024];
    // SAFETY: the caller's contract; the text is cut to its room, and ends with zero.
    let message = unsafe {
        if arguments.is_null() {
            CStr::from_ptr(format)
        } else {
            vsnprintf(text.as_mut_ptr().cast(), text.len(), format, arguments);
            CStr::from_bytes_until_nul(&text).unwrap_or_default()
        }
    };
    debug::line(level, format_args!("{}", message.to_string_lossy()));
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_formatted_wherever_they_are_passed() {
        type Format = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);
        let folder = std::env::temp_dir().join(format!("mccs-logger-{}", std::process::id()));
        debug::print_to_file_for_tests(Level::Info, &folder);
        // SAFETY: the function is variadic in truth, and the format fits the arguments.
        unsafe {
            let log = std::mem::transmute::<*const c_void, Format>(function());
            let (file, format) = (c"file".as_ptr(), c"%d %s %.1f %ld %d %d %d %.2f".as_ptr());
            log(
                3,
                u64::MAX as c_ulong,
                file,
                1,
                format,
                1i32,
                c"two".as_ptr(),
                3.5f64,
                4i64,
                5i32,
                6i32,
                7i32,
                8.25f64,
            );
            log(5, u64::MAX as c_ulong, file, 1, c"not at this level".as_ptr());
        }
        let written = std::fs::read_to_string(&folder).expect("the lines");
        std::fs::remove_file(&folder).expect("its end");
        debug::reset();
        assert_eq!(written.lines().count(), 1, "{written}");
        assert!(written.ends_with("NCCL INFO 1 two 3.5 4 5 6 7 8.25\n"), "{written}");
    }
}

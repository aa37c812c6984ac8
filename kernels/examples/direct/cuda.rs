//! The few driver calls that the bench needs, looked up at run time.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::null_mut;

use mccs_kernels::cuda::Launch;

/// A shared library.
pub struct Library(*mut c_void);

// SAFETY: a handle of the loader, which any thread may use.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    pub fn open(path: &str) -> Result<Library, String> {
        let name = CString::new(path).map_err(|error| error.to_string())?;
        // SAFETY: a terminated name; the libraries' constructors are trusted.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() { Err(format!("cannot open {path}")) } else { Ok(Library(handle)) }
    }

    /// The function of that name as a value of `F`.
    ///
    /// # Safety
    /// `F` must be the function's pointer type.
    pub unsafe fn function<F: Copy>(&self, name: &str) -> F {
        let terminated = CString::new(name).expect("invariant: no zeros in names");
        // SAFETY: a live handle and a terminated name.
        let address = unsafe { libc::dlsym(self.0, terminated.as_ptr()) };
        assert!(!address.is_null(), "no {name}");
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
        // SAFETY: the caller vouches for the type; a function pointer has a pointer's size.
        unsafe { std::mem::transmute_copy(&address) }
    }
}

macro_rules! driver {
    ($($field:ident = $symbol:literal ($($type:ty),*);)+) => {
        /// Driver functions.
        pub struct Driver { $($field: unsafe extern "C" fn($($type),*) -> i32),+ }
        impl Driver {
            pub fn open() -> Result<Driver, String> {
                let library = Library::open("libcuda.so.1")?;
                // SAFETY: the types are those of cuda.h.
                let driver = unsafe { Driver { $($field: library.function($symbol)),+ } };
                // SAFETY: the first call, as it must be.
                driver.check(unsafe { (driver.init)(0) });
                Ok(driver)
            }
        }
    };
}

type Handle = *mut c_void;
pub type Stream = usize;

driver! {
    init = "cuInit" (u32);
    error_name = "cuGetErrorName" (i32, *mut *const c_char);
    device_count = "cuDeviceGetCount" (*mut i32);
    context_retain = "cuDevicePrimaryCtxRetain" (*mut Handle, i32);
    context_set = "cuCtxSetCurrent" (Handle);
    context_synchronize = "cuCtxSynchronize" ();
    peer_enable = "cuCtxEnablePeerAccess" (Handle, u32);
    alloc = "cuMemAlloc_v2" (*mut u64, usize);
    alloc_host = "cuMemHostAlloc" (*mut *mut c_void, usize, u32);
    set = "cuMemsetD8_v2" (u64, u8, usize);
    to_device = "cuMemcpyHtoD_v2" (u64, *const c_void, usize);
    to_device_async = "cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, Handle);
    to_host = "cuMemcpyDtoH_v2" (*mut c_void, u64, usize);
    stream_create = "cuStreamCreate" (*mut Handle, u32);
    stream_query = "cuStreamQuery" (Handle);
    stream_synchronize = "cuStreamSynchronize" (Handle);
    module_load = "cuModuleLoadData" (*mut Handle, *const c_void);
    module_function = "cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
    function_load = "cuFuncLoad" (Handle);
    launch = "cuLaunchKernel" (Handle, u32, u32, u32, u32, u32, u32, u32, Handle, *mut *mut c_void, *mut *mut c_void);
}

impl Driver {
    pub fn check(&self, result: i32) {
        if result != 0 {
            let mut name = std::ptr::null();
            // SAFETY: the driver gives a static text, or nothing.
            let text = unsafe {
                (self.error_name)(result, &raw mut name);
                if name.is_null() { "unknown".into() } else { CStr::from_ptr(name).to_string_lossy() }
            };
            panic!("CUDA error {result}: {text}");
        }
    }

    pub fn devices(&self) -> i32 {
        let mut count = 0;
        // SAFETY: a place for the count.
        self.check(unsafe { (self.device_count)(&raw mut count) });
        count
    }
}

/// One GPU: its context, the module, a stream.
pub struct Gpu<'a> {
    driver: &'a Driver,
    context: usize,
    module: usize,
    pub stream: Stream,
    pub second_stream: Stream,
}

impl<'a> Gpu<'a> {
    pub fn open(driver: &'a Driver, device: i32, image: &[u8]) -> Gpu<'a> {
        let (mut context, mut module, mut stream, mut second) = (null_mut(), null_mut(), null_mut(), null_mut());
        // SAFETY: places for the results; the image is a whole one.
        unsafe {
            driver.check((driver.context_retain)(&raw mut context, device));
            driver.check((driver.context_set)(context));
            driver.check((driver.stream_create)(&raw mut stream, 1));
            driver.check((driver.stream_create)(&raw mut second, 1));
            driver.check((driver.module_load)(&raw mut module, image.as_ptr().cast()));
        }
        Gpu {
            driver,
            context: context as usize,
            module: module as usize,
            stream: stream as usize,
            second_stream: second as usize,
        }
    }

    pub fn make_current(&self) {
        // SAFETY: a live context.
        self.driver.check(unsafe { (self.driver.context_set)(self.context as Handle) });
    }

    pub fn enable_peer(&self, other: &Gpu) {
        self.make_current();
        // SAFETY: live contexts.
        self.driver.check(unsafe { (self.driver.peer_enable)(other.context as Handle, 0) });
    }

    pub fn alloc(&self, bytes: usize) -> u64 {
        let mut address = 0;
        // SAFETY: a place for the result; fresh memory is set.
        unsafe {
            self.driver.check((self.driver.alloc)(&raw mut address, bytes));
            self.driver.check((self.driver.set)(address, 0, bytes));
            self.driver.check((self.driver.context_synchronize)());
        }
        address
    }

    /// Pinned words that all GPUs see under their host address.
    pub fn alloc_words(&self, count: usize) -> *mut u64 {
        let mut address = null_mut();
        // SAFETY: portable and mapped memory of that many words, cleared.
        unsafe {
            self.driver.check((self.driver.alloc_host)(&raw mut address, count * 8, 3));
            address.write_bytes(0, count * 8);
        }
        address.cast()
    }

    pub fn set(&self, address: u64, value: u8, bytes: usize) {
        // SAFETY: the bench's own memory.
        unsafe {
            self.driver.check((self.driver.set)(address, value, bytes));
            self.driver.check((self.driver.context_synchronize)());
        }
    }

    pub fn write(&self, address: u64, bytes: &[u8]) {
        // SAFETY: the bench's own memory.
        unsafe {
            self.driver.check((self.driver.to_device)(address, bytes.as_ptr().cast(), bytes.len()));
            self.driver.check((self.driver.context_synchronize)());
        }
    }

    /// Writes a word from a stream beside.
    pub fn write_word_beside(&self, address: u64, word: &u64) {
        let from: *const u64 = word;
        let stream = self.second_stream as Handle;
        // SAFETY: the bench's own memory, which outlives the copy since the stream is waited for.
        unsafe {
            self.driver.check((self.driver.to_device_async)(address, from.cast(), 8, stream));
            self.driver.check((self.driver.stream_synchronize)(stream));
        }
    }

    pub fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut data = vec![0; bytes];
        // SAFETY: the bench's own memory.
        self.driver.check(unsafe { (self.driver.to_host)(data.as_mut_ptr().cast(), address, bytes) });
        data
    }

    pub fn function(&self, name: &str) -> usize {
        let name = CString::new(name).expect("invariant: no zeros in names");
        let mut function = null_mut();
        // SAFETY: a live module and a terminated name.
        unsafe {
            let module = self.module as Handle;
            self.driver.check((self.driver.module_function)(&raw mut function, module, name.as_ptr()));
            self.driver.check((self.driver.function_load)(function));
        }
        function as usize
    }

    pub fn launch<A>(&self, function: usize, launch: &Launch<A>) {
        let mut parameter: *mut c_void = (&raw const launch.args).cast_mut().cast();
        // SAFETY: the function takes one parameter of this type; the driver copies it before it returns.
        self.driver.check(unsafe {
            (self.driver.launch)(
                function as Handle,
                launch.grid,
                1,
                1,
                launch.block,
                1,
                1,
                0,
                self.stream as Handle,
                &raw mut parameter,
                null_mut(),
            )
        });
    }

    pub fn synchronize(&self) {
        // SAFETY: a live stream.
        self.driver.check(unsafe { (self.driver.stream_synchronize)(self.stream as Handle) });
    }

    pub fn is_idle(&self) -> bool {
        // SAFETY: a live stream.
        match unsafe { (self.driver.stream_query)(self.stream as Handle) } {
            600 => false,
            result => {
                self.driver.check(result);
                true
            }
        }
    }
}

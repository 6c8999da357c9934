//! The functions of the library that are used: their C signatures, and since when they are known to be there.

use std::ffi::{c_char, c_int, c_void};

use libloading::Library;
use thiserror::Error;

use crate::find::LIBRARY;

/// `aclError`.
pub type Code = c_int;
/// Any handle, and a place in device memory.
pub type Handle = *mut c_void;

/// A function that this crate knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// Its name in the library.
    pub name: &'static str,
    /// Whether nothing works without it.
    pub required: bool,
    /// A release of CANN whose public headers have it; older ones may.
    pub known_in: &'static str,
}

/// A function that the library lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{LIBRARY} has no function {}, which {} has; install that release or a newer one", .0.name, .0.known_in)]
pub struct MissingSymbol(pub Symbol);

/// The version structure of `aclsysGetCANNVersion`.
#[repr(C)]
pub struct PackageVersion {
    /// The whole version, zero-terminated.
    pub version: [c_char; 128],
    /// Its parts, and room that is reserved.
    pub rest: [c_char; 4 * 64 + 128],
}

macro_rules! required {
    (needs) => {
        true
    };
    (may) => {
        false
    };
}

macro_rules! functions {
    ($($need:ident $name:ident($($argument:ty),*) -> $result:ty, $known:literal;)*) => {
        /// Every function that this crate calls.
        pub const SYMBOLS: &[Symbol] =
            &[$(Symbol { name: stringify!($name), required: required!($need), known_in: $known }),*];

        /// The functions of one library; those that it lacks are `None`.
        #[derive(Debug)]
        #[allow(non_snake_case)] // The names of the C interface.
        pub struct Functions {
            $(pub $name: Option<unsafe extern "C" fn($($argument),*) -> $result>,)*
        }

        impl Functions {
            /// Looks all of them up.
            pub fn of(library: &Library) -> Result<Self, MissingSymbol> {
                $(
                    let symbol = Symbol { name: stringify!($name), required: required!($need), known_in: $known };
                    // SAFETY: the signature is that of the public header; it cannot be checked at run time. The
                    // library is never unloaded, so that the pointer stays valid.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> $result>(symbol.name.as_bytes())
                    };
                    #[allow(non_snake_case)]
                    let $name = match found {
                        Ok(function) => Some(*function),
                        Err(_) if symbol.required => return Err(MissingSymbol(symbol)),
                        Err(_) => None,
                    };
                )*
                Ok(Self { $($name),* })
            }
        }
    };
}

functions! {
    needs aclInit(*const c_char) -> Code, "CANN 5";
    needs aclFinalize() -> Code, "CANN 5";
    needs aclrtSetDevice(i32) -> Code, "CANN 5";
    needs aclrtResetDevice(i32) -> Code, "CANN 5";
    needs aclrtGetDeviceCount(*mut u32) -> Code, "CANN 5";
    needs aclrtMalloc(*mut Handle, usize, c_int) -> Code, "CANN 5";
    needs aclrtFree(Handle) -> Code, "CANN 5";
    needs aclrtMemcpy(Handle, usize, *const c_void, usize, c_int) -> Code, "CANN 5";
    may aclrtMemset(Handle, usize, i32, usize) -> Code, "CANN 5";
    may aclrtGetMemInfo(c_int, *mut usize, *mut usize) -> Code, "CANN 5";
    may aclrtGetSocName() -> *const c_char, "CANN 5";
    may aclGetRecentErrMsg() -> *const c_char, "CANN 6";
    may aclrtGetVersion(*mut i32, *mut i32, *mut i32) -> Code, "CANN 5";
    may aclsysGetCANNVersion(c_int, *mut PackageVersion) -> Code, "CANN 8.5";
    may aclrtResetDeviceForce(i32) -> Code, "CANN 8.5";
    may aclrtCreateStream(*mut Handle) -> Code, "CANN 5";
    may aclrtDestroyStream(Handle) -> Code, "CANN 5";
    may aclrtDestroyStreamForce(Handle) -> Code, "CANN 8.5";
    may aclrtSynchronizeStreamWithTimeout(Handle, i32) -> Code, "CANN 6";
    may aclrtCreateEvent(*mut Handle) -> Code, "CANN 5";
    may aclrtDestroyEvent(Handle) -> Code, "CANN 5";
    may aclrtRecordEvent(Handle, Handle) -> Code, "CANN 5";
    may aclrtQueryEventStatus(Handle, *mut c_int) -> Code, "CANN 6";
    may aclrtSynchronizeEventWithTimeout(Handle, i32) -> Code, "CANN 8.5";
    may aclrtEventElapsedTime(*mut f32, Handle, Handle) -> Code, "CANN 5";
    may aclrtBinaryLoadFromFile(*const c_char, *mut c_void, *mut Handle) -> Code, "CANN 8.5";
    may aclrtBinaryUnLoad(Handle) -> Code, "CANN 8.5";
    may aclrtBinaryGetFunction(Handle, *const c_char, *mut Handle) -> Code, "CANN 8.5";
    may aclrtKernelArgsInit(Handle, *mut Handle) -> Code, "CANN 8.5";
    may aclrtKernelArgsAppend(Handle, *mut c_void, usize, *mut Handle) -> Code, "CANN 8.5";
    may aclrtKernelArgsFinalize(Handle) -> Code, "CANN 8.5";
    may aclrtLaunchKernelWithConfig(Handle, u32, Handle, *mut c_void, Handle, *mut c_void) -> Code, "CANN 8.5";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_listed_once() {
        for (index, symbol) in SYMBOLS.iter().enumerate() {
            assert!(SYMBOLS[..index].iter().all(|other| other.name != symbol.name), "{}", symbol.name);
            assert!(symbol.name.starts_with("acl") && symbol.known_in.starts_with("CANN "), "{symbol:?}");
        }
    }

    #[test]
    fn a_missing_function_is_named_with_a_release_that_has_it() {
        let launch = SYMBOLS.iter().find(|symbol| symbol.name == "aclrtLaunchKernelWithConfig").unwrap();
        let text = MissingSymbol(*launch).to_string();
        assert!(text.contains("aclrtLaunchKernelWithConfig") && text.contains("CANN 8.5"), "{text}");
    }
}

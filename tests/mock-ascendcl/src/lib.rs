//! AscendCL on host memory, for tests. It has the C functions that the bindings call, with their signatures, and none
//! of CANN. A kernel binary is a text file of lines `function NAME`, `store ARGUMENT FILE` (the bytes of a file go to
//! where an argument points) and `expect ARGUMENT FILE` (the argument points at these bytes, or is this value). How a
//! device fails is said in a file beside the library: its path and `.plan`; see `plan.rs`. Every copy of the library
//! is a machine of its own.

// The names and the documentation of these functions are those of the C interface.
#![allow(non_snake_case, missing_docs)]
// What pointers hold is the C interface's promise, which a test keeps through the bindings.
#![allow(clippy::not_unsafe_ptr_arg_deref)]
// A mock that cannot go on ends the test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod kernel;
mod plan;
mod state;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

use kernel::Kernel;
use state::{Status, state};

type Handle = *mut c_void;

const SUCCESS: c_int = 0;
const INVALID_PARAM: c_int = 107_000;
const INVALID_DEVICE: c_int = 107_001;
const CONTEXT_NULL: c_int = 107_002;
const REPEAT_INITIALIZE: c_int = 100_002;
const KERNEL_LOOKUP: c_int = 507_027;
const SYNC_TIMEOUT: c_int = 507_046;

/// A number as a handle.
fn handle(number: usize) -> Handle {
    std::ptr::without_provenance_mut(number)
}

/// Writes what a call gives.
///
/// # Safety
/// `place` is null or can be written.
unsafe fn give<T>(place: *mut T, value: T) -> c_int {
    if place.is_null() {
        return INVALID_PARAM;
    }
    // SAFETY: not null, and the caller's promise.
    unsafe { place.write(value) };
    SUCCESS
}

/// A text of the caller.
///
/// # Safety
/// `text` is zero-terminated.
unsafe fn said(text: *const c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().expect("tests use UTF-8").to_owned()
}

#[unsafe(no_mangle)]
pub extern "C" fn aclInit(_config: *const c_char) -> c_int {
    let mut state = state();
    if let Some(code) = state.plan.init {
        return code;
    }
    if state.initialized {
        return REPEAT_INITIALIZE;
    }
    state.initialized = true;
    state.log("init")
}

#[unsafe(no_mangle)]
pub extern "C" fn aclFinalize() -> c_int {
    let mut state = state();
    state.initialized = false;
    let left = state.left();
    state.log(&format!("finalize {left}"))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetDeviceCount(count: *mut u32) -> c_int {
    let devices = state().plan.devices;
    // SAFETY: the caller's place.
    unsafe { give(count, devices) }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSetDevice(device: i32) -> c_int {
    let mut state = state();
    if u32::try_from(device).map_or(true, |device| device >= state.plan.devices) {
        return INVALID_DEVICE;
    }
    state::set_thread_device(Some(device));
    state.log(&format!("set_device {device}"))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtResetDevice(device: i32) -> c_int {
    state::set_thread_device(None);
    let mut state = state();
    let left = state.left();
    state.log(&format!("reset_device {device} {left}"))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtResetDeviceForce(device: i32) -> c_int {
    state::set_thread_device(None);
    let mut state = state();
    let left = state.left();
    state.log(&format!("reset_device_force {device} {left}"))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetSocName() -> *const c_char {
    c"Ascend-mock".as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn aclGetRecentErrMsg() -> *const c_char {
    if state().plan.says_nothing { std::ptr::null() } else { c"EZ9999: Inner Error!\n  [mock] as asked".as_ptr() }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetVersion(major: *mut i32, minor: *mut i32, patch: *mut i32) -> c_int {
    // SAFETY: the caller's places.
    unsafe { give(major, 1) | give(minor, 16) | give(patch, 0) }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclsysGetCANNVersion(package: c_int, version: *mut [c_char; 512]) -> c_int {
    let mut text = [0; 512];
    for (to, from) in text.iter_mut().zip(format!("9.{package}.mock").bytes()) {
        *to = from as c_char;
    }
    // SAFETY: the caller's place, of the structure's size.
    unsafe { give(version, text) }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetMemInfo(_kind: c_int, free: *mut usize, total: *mut usize) -> c_int {
    // SAFETY: the caller's places.
    unsafe { give(free, 48 << 30) | give(total, 64 << 30) }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtMalloc(place: *mut Handle, bytes: usize, _policy: c_int) -> c_int {
    let mut state = state();
    if state::thread_device().is_none() {
        return CONTEXT_NULL;
    }
    match state.malloc(bytes) {
        // SAFETY: the caller's place.
        Ok(address) => unsafe { give(place, handle(address)) },
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtFree(place: Handle) -> c_int {
    state().free(place.addr())
}

/// # Safety
/// The host's side of the copy is valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMemcpy(to: Handle, most: usize, from: *const c_void, bytes: usize, kind: c_int) -> c_int {
    let mut state = state();
    if state::thread_device().is_none() {
        return CONTEXT_NULL;
    }
    if bytes > most {
        return INVALID_PARAM;
    }
    match kind {
        1 => {
            // SAFETY: the caller's promise.
            let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
            state.memory(to.addr(), bytes).map_or(INVALID_PARAM, |memory| {
                memory.copy_from_slice(from);
                SUCCESS
            })
        }
        2 => {
            if let Some(code) = state.plan.download {
                return code;
            }
            // SAFETY: the caller's promise.
            let to = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes) };
            state.memory(from.addr(), bytes).map_or(INVALID_PARAM, |memory| {
                to.copy_from_slice(memory);
                SUCCESS
            })
        }
        _ => INVALID_PARAM,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtMemset(place: Handle, most: usize, value: i32, bytes: usize) -> c_int {
    if bytes > most {
        return INVALID_PARAM;
    }
    state().memory(place.addr(), bytes).map_or(INVALID_PARAM, |memory| {
        memory.fill(value as u8);
        SUCCESS
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtCreateStream(place: *mut Handle) -> c_int {
    let mut state = state();
    if state::thread_device().is_none() {
        return CONTEXT_NULL;
    }
    let number = state.number();
    state.streams.insert(number, Status::Idle);
    state.log("create_stream");
    // SAFETY: the caller's place.
    unsafe { give(place, handle(number)) }
}

fn destroy_stream(stream: Handle, word: &str) -> c_int {
    let mut state = state();
    match state.streams.remove(&stream.addr()) {
        Some(_) => state.log(word),
        None => INVALID_PARAM,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtDestroyStream(stream: Handle) -> c_int {
    destroy_stream(stream, "destroy_stream")
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtDestroyStreamForce(stream: Handle) -> c_int {
    destroy_stream(stream, "destroy_stream_force")
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeStreamWithTimeout(stream: Handle, milliseconds: i32) -> c_int {
    let mut state = state();
    state.log(&format!("synchronize {milliseconds}"));
    match state.streams.get(&stream.addr()) {
        None => INVALID_PARAM,
        Some(Status::Idle) => SUCCESS,
        Some(Status::Failed(code)) => *code,
        // An endless wait would hang the test: tests look for it in the log.
        Some(Status::Hangs) => SYNC_TIMEOUT,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtCreateEvent(place: *mut Handle) -> c_int {
    let mut state = state();
    let number = state.number();
    state.events.insert(number, None);
    // SAFETY: the caller's place.
    unsafe { give(place, handle(number)) }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtDestroyEvent(event: Handle) -> c_int {
    state().events.remove(&event.addr()).map_or(INVALID_PARAM, |_| SUCCESS)
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtRecordEvent(event: Handle, stream: Handle) -> c_int {
    let mut state = state();
    let hangs = state.streams.get(&stream.addr()) == Some(&Status::Hangs);
    let now = state.number();
    match state.events.get_mut(&event.addr()) {
        Some(at) => {
            *at = if hangs { None } else { Some(now) };
            SUCCESS
        }
        None => INVALID_PARAM,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtQueryEventStatus(event: Handle, status: *mut c_int) -> c_int {
    let happened = state().events.get(&event.addr()).copied().flatten().is_some();
    // SAFETY: the caller's place.
    unsafe { give(status, c_int::from(happened)) }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeEventWithTimeout(event: Handle, _milliseconds: i32) -> c_int {
    match state().events.get(&event.addr()) {
        Some(Some(_)) => SUCCESS,
        Some(None) => SYNC_TIMEOUT + 1,
        None => INVALID_PARAM,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtEventElapsedTime(milliseconds: *mut f32, start: Handle, end: Handle) -> c_int {
    let state = state();
    let at = |event: Handle| state.events.get(&event.addr()).copied().flatten();
    match (at(start), at(end)) {
        // SAFETY: the caller's place.
        (Some(start), Some(end)) => unsafe { give(milliseconds, end as f32 - start as f32) },
        _ => INVALID_PARAM,
    }
}

/// # Safety
/// `path` is zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtBinaryLoadFromFile(path: *const c_char, _options: Handle, place: *mut Handle) -> c_int {
    // SAFETY: the caller's promise.
    let path = unsafe { said(path) };
    let Some(kernel) = Kernel::read(Path::new(&path)) else { return INVALID_PARAM };
    let mut state = state();
    let number = state.number();
    state.binaries.insert(number, kernel);
    state.log("load_binary");
    // SAFETY: the caller's place.
    unsafe { give(place, handle(number)) }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtBinaryUnLoad(binary: Handle) -> c_int {
    let mut state = state();
    match state.binaries.remove(&binary.addr()) {
        Some(_) => state.log("unload_binary"),
        None => INVALID_PARAM,
    }
}

/// # Safety
/// `name` is zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtBinaryGetFunction(binary: Handle, name: *const c_char, place: *mut Handle) -> c_int {
    // SAFETY: the caller's promise.
    let name = unsafe { said(name) };
    match state().binaries.get(&binary.addr()) {
        // A binary has one function here: its handle is the binary's.
        // SAFETY: the caller's place.
        Some(kernel) if kernel.function == name => unsafe { give(place, binary) },
        Some(_) => KERNEL_LOOKUP,
        None => INVALID_PARAM,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtKernelArgsInit(function: Handle, place: *mut Handle) -> c_int {
    let mut state = state();
    if !state.binaries.contains_key(&function.addr()) {
        return INVALID_PARAM;
    }
    let number = state.number();
    state.lists.insert(number, (Vec::new(), false));
    // SAFETY: the caller's place.
    unsafe { give(place, handle(number)) }
}

/// # Safety
/// `value` holds so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtKernelArgsAppend(list: Handle, value: Handle, bytes: usize, place: *mut Handle) -> c_int {
    // SAFETY: the caller's promise.
    let value = unsafe { std::slice::from_raw_parts(value.cast_const().cast::<u8>(), bytes) };
    let mut state = state();
    let Some((values, false)) = state.lists.get_mut(&list.addr()) else { return INVALID_PARAM };
    values.push(value.to_vec());
    let index = values.len();
    // SAFETY: the caller's place.
    unsafe { give(place, handle(index)) }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtKernelArgsFinalize(list: Handle) -> c_int {
    match state().lists.get_mut(&list.addr()) {
        Some((_, done)) => {
            *done = true;
            SUCCESS
        }
        None => INVALID_PARAM,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtLaunchKernelWithConfig(
    function: Handle,
    blocks: u32,
    stream: Handle,
    _config: Handle,
    list: Handle,
    _reserved: Handle,
) -> c_int {
    let mut state = state();
    let Some((values, true)) = state.lists.remove(&list.addr()) else { return INVALID_PARAM };
    if !state.streams.contains_key(&stream.addr()) || blocks == 0 {
        return INVALID_PARAM;
    }
    state.launch(function.addr(), stream.addr(), &values)
}

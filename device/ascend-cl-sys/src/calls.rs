//! One safe method a call: handles are opaque and sizes are checked, so that no caller needs `unsafe`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::ptr::{NonNull, null, null_mut};

use libloading::Library;
use thiserror::Error;

use crate::SUCCESS;
use crate::find::{LoadError, Searched};
use crate::symbols::{Functions, Handle, MissingSymbol, PackageVersion, SYMBOLS, Symbol};

/// Kinds of a copy.
const HOST_TO_DEVICE: c_int = 1;
const DEVICE_TO_HOST: c_int = 2;
/// Huge pages where there are any.
const HUGE_FIRST: c_int = 0;
/// The memory that tensors lie in.
const HBM: c_int = 1;
/// An event that has happened.
const RECORDED: c_int = 1;
/// Most bytes of a text that the library hands out.
const LONGEST_TEXT: usize = 4096;

/// A call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CallError {
    /// The library returned a code other than success.
    #[error("{call} returned {code}")]
    Code {
        /// The C function.
        call: &'static str,
        /// Its `aclError`.
        code: i32,
    },
    /// The library lacks the function.
    #[error(transparent)]
    Missing(#[from] MissingSymbol),
    /// The caller's sizes do not fit one another; the library was not called.
    #[error("{call}: {what}")]
    Refused {
        /// The C function.
        call: &'static str,
        /// What does not fit.
        what: &'static str,
    },
}

/// The library, loaded for the rest of the process: its threads may outlive any handle.
pub struct AscendCl {
    place: PathBuf,
    functions: Functions,
}

impl fmt::Debug for AscendCl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AscendCl").field(&self.place).finish()
    }
}

/// Device memory.
#[derive(Debug)]
pub struct Memory {
    place: NonNull<c_void>,
    bytes: usize,
}

/// A stream of tasks.
#[derive(Debug)]
pub struct Stream(NonNull<c_void>);

/// A place in a stream that can be waited for.
#[derive(Debug)]
pub struct Event(NonNull<c_void>);

/// A kernel binary on the device.
#[derive(Debug)]
pub struct Binary(NonNull<c_void>);

/// A kernel in a binary.
#[derive(Debug)]
pub struct Function<'b> {
    handle: NonNull<c_void>,
    binary: PhantomData<&'b Binary>,
}

/// What a kernel is given.
#[derive(Clone, Copy, Debug)]
pub enum Argument<'a> {
    /// The address of a byte of device memory.
    Address {
        /// The memory.
        memory: &'a Memory,
        /// Bytes from its beginning.
        offset: usize,
    },
    /// A value, in the device's little-endian bytes.
    Value(&'a [u8]),
}

/// Parts of CANN that have versions of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Package {
    /// CANN as a whole.
    Cann = 0,
    /// The runtime.
    Runtime = 1,
    /// The driver.
    Driver = 7,
}

impl Memory {
    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

fn symbol(name: &'static str) -> MissingSymbol {
    let known = SYMBOLS.iter().find(|symbol| symbol.name == name).copied();
    MissingSymbol(known.unwrap_or(Symbol { name, required: false, known_in: "CANN" }))
}

/// Calls a function of the library and turns its code into a result.
macro_rules! call {
    ($self:ident.$name:ident($($argument:expr),*)) => {{
        let function = $self.functions.$name.ok_or_else(|| symbol(stringify!($name)))?;
        // SAFETY: the pointers given are null where the interface allows it, or valid for the call: handles come from
        // the library and are consumed by what destroys them, host memory is borrowed and its size is handed on or is
        // the fixed size of what the call writes.
        match unsafe { function($($argument),*) } {
            SUCCESS => Ok(()),
            code => Err(CallError::Code { call: stringify!($name), code }),
        }
    }};
}

impl AscendCl {
    /// Loads the library from the first of these files that is one.
    ///
    /// # Errors
    /// None of them can be loaded, or one lacks a function without which nothing works.
    pub fn load(places: &[PathBuf]) -> Result<Self, LoadError> {
        let mut searched = Vec::new();
        for place in places {
            let folder = place.parent().is_some_and(|folder| !folder.as_os_str().is_empty());
            // Asked before opening: opening a pipe waits for its writer.
            if folder && !place.is_file() {
                let why = if place.exists() { "not a regular file" } else { "not there" };
                searched.push(Searched { place: place.clone(), why: why.to_owned() });
                continue;
            }
            // SAFETY: loading a library runs its initializers. The file is the one that the user's installation or
            // variables name as AscendCL; nothing else can be asked of it from here.
            match unsafe { Library::new(place) } {
                Ok(library) => {
                    let functions = Functions::of(&library)
                        .map_err(|source| LoadError::Incomplete { place: place.clone(), source })?;
                    // Never unloaded: the functions stay valid.
                    std::mem::forget(library);
                    return Ok(Self { place: place.clone(), functions });
                }
                Err(error) => {
                    // The loader repeats the name of a file that it does not find.
                    let reason = std::error::Error::source(&error).map(|reason| format!(": {reason}"));
                    let why = match folder {
                        true => format!("{error}{}", reason.unwrap_or_default()),
                        false => "not in the loader's path".to_owned(),
                    };
                    searched.push(Searched { place: place.clone(), why });
                }
            }
        }
        Err(LoadError::Absent(searched))
    }

    /// The file that was loaded.
    #[must_use]
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// Whether the library has all functions that launching a kernel takes; the first that it lacks otherwise.
    ///
    /// # Errors
    /// The library is too old.
    pub fn can_launch(&self) -> Result<(), MissingSymbol> {
        let f = &self.functions;
        let have = [
            ("aclrtCreateStream", f.aclrtCreateStream.is_some()),
            ("aclrtDestroyStream", f.aclrtDestroyStream.is_some()),
            ("aclrtSynchronizeStreamWithTimeout", f.aclrtSynchronizeStreamWithTimeout.is_some()),
            ("aclrtBinaryLoadFromFile", f.aclrtBinaryLoadFromFile.is_some()),
            ("aclrtBinaryUnLoad", f.aclrtBinaryUnLoad.is_some()),
            ("aclrtBinaryGetFunction", f.aclrtBinaryGetFunction.is_some()),
            ("aclrtKernelArgsInit", f.aclrtKernelArgsInit.is_some()),
            ("aclrtKernelArgsAppend", f.aclrtKernelArgsAppend.is_some()),
            ("aclrtKernelArgsFinalize", f.aclrtKernelArgsFinalize.is_some()),
            ("aclrtLaunchKernelWithConfig", f.aclrtLaunchKernelWithConfig.is_some()),
        ];
        have.iter().find(|(_, there)| !there).map_or(Ok(()), |(name, _)| Err(symbol(name)))
    }

    /// Initializes the library with its defaults; once in a process.
    ///
    /// # Errors
    /// The library's code; [`crate::REPEAT_INITIALIZE`] where that was done before.
    pub fn init(&self) -> Result<(), CallError> {
        call!(self.aclInit(null()))
    }

    /// Gives back what the library holds in this process.
    ///
    /// # Errors
    /// The library's code.
    pub fn finalize(&self) -> Result<(), CallError> {
        call!(self.aclFinalize())
    }

    /// Makes `device` the one that this thread uses.
    ///
    /// # Errors
    /// The library's code.
    pub fn set_device(&self, device: i32) -> Result<(), CallError> {
        call!(self.aclrtSetDevice(device))
    }

    /// Gives back what this process holds on `device`.
    ///
    /// # Errors
    /// The library's code.
    pub fn reset_device(&self, device: i32) -> Result<(), CallError> {
        call!(self.aclrtResetDevice(device))
    }

    /// The same without waiting for what still runs.
    ///
    /// # Errors
    /// The library's code, or it has no such function.
    pub fn reset_device_force(&self, device: i32) -> Result<(), CallError> {
        call!(self.aclrtResetDeviceForce(device))
    }

    /// Devices that this process may use.
    ///
    /// # Errors
    /// The library's code.
    pub fn device_count(&self) -> Result<u32, CallError> {
        let mut count = 0;
        call!(self.aclrtGetDeviceCount(&mut count)).map(|()| count)
    }

    /// The name of the chip; `None` before a device is set.
    #[must_use]
    pub fn soc_name(&self) -> Option<String> {
        let function = self.functions.aclrtGetSocName?;
        // SAFETY: takes nothing, and gives a zero-terminated text that stays or null.
        text(unsafe { function() })
    }

    /// What the library says of this thread's last errors.
    #[must_use]
    pub fn recent_message(&self) -> Option<String> {
        let function = self.functions.aclGetRecentErrMsg?;
        // SAFETY: takes nothing, and gives a zero-terminated text that stays until this thread's next call, or null.
        text(unsafe { function() })
    }

    /// Version of the interface: major, minor, patch.
    ///
    /// # Errors
    /// The library's code, or it has no such function.
    pub fn version(&self) -> Result<[i32; 3], CallError> {
        let [mut major, mut minor, mut patch] = [0; 3];
        call!(self.aclrtGetVersion(&mut major, &mut minor, &mut patch)).map(|()| [major, minor, patch])
    }

    /// Version of a part of CANN.
    ///
    /// # Errors
    /// The library's code, or it has no such function.
    pub fn package_version(&self, package: Package) -> Result<String, CallError> {
        let mut version = PackageVersion { version: [0; 128], rest: [0; 4 * 64 + 128] };
        call!(self.aclsysGetCANNVersion(package as c_int, &mut version))?;
        let bytes = version.version.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect::<Vec<_>>();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Free and total bytes of this thread's device.
    ///
    /// # Errors
    /// The library's code, or it has no such function.
    pub fn memory_info(&self) -> Result<[usize; 2], CallError> {
        let [mut free, mut total] = [0; 2];
        call!(self.aclrtGetMemInfo(HBM, &mut free, &mut total)).map(|()| [free, total])
    }

    /// Takes device memory; what is in it is not defined.
    ///
    /// # Errors
    /// The library's code.
    pub fn malloc(&self, bytes: usize) -> Result<Memory, CallError> {
        let mut place = null_mut();
        call!(self.aclrtMalloc(&mut place, bytes, HUGE_FIRST))?;
        given("aclrtMalloc", place).map(|place| Memory { place, bytes })
    }

    /// Gives it back.
    ///
    /// # Errors
    /// The library's code.
    pub fn free(&self, memory: Memory) -> Result<(), CallError> {
        call!(self.aclrtFree(memory.place.as_ptr()))
    }

    /// Copies to the beginning of device memory, and waits until it is there.
    ///
    /// # Errors
    /// `from` is longer than the memory, or the library's code.
    pub fn upload(&self, to: &Memory, from: &[u8]) -> Result<(), CallError> {
        if from.len() > to.bytes {
            return Err(CallError::Refused {
                call: "aclrtMemcpy",
                what: "the memory is shorter than what is copied to it",
            });
        }
        call!(self.aclrtMemcpy(to.place.as_ptr(), to.bytes, from.as_ptr().cast(), from.len(), HOST_TO_DEVICE))
    }

    /// Copies from the beginning of device memory, and waits until it is here.
    ///
    /// # Errors
    /// `to` is longer than the memory, or the library's code.
    pub fn download(&self, to: &mut [u8], from: &Memory) -> Result<(), CallError> {
        if to.len() > from.bytes {
            let what = "the memory is shorter than what is copied from it";
            return Err(CallError::Refused { call: "aclrtMemcpy", what });
        }
        let size = to.len();
        call!(self.aclrtMemcpy(to.as_mut_ptr().cast(), size, from.place.as_ptr().cast_const(), size, DEVICE_TO_HOST))
    }

    /// Sets every byte of device memory.
    ///
    /// # Errors
    /// The library's code, or it has no such function.
    pub fn fill(&self, memory: &Memory, byte: u8) -> Result<(), CallError> {
        call!(self.aclrtMemset(memory.place.as_ptr(), memory.bytes, i32::from(byte), memory.bytes))
    }

    /// Makes a stream on this thread's device.
    ///
    /// # Errors
    /// The library's code, or it has no such function.
    pub fn create_stream(&self) -> Result<Stream, CallError> {
        let mut handle = null_mut();
        call!(self.aclrtCreateStream(&mut handle))?;
        given("aclrtCreateStream", handle).map(Stream)
    }

    /// Destroys a stream; waits for what is in it.
    ///
    /// # Errors
    /// The library's code, or it has no such function.
    pub fn destroy_stream(&self, stream: Stream) -> Result<(), CallError> {
        call!(self.aclrtDestroyStream(stream.0.as_ptr()))
    }

    /// Destroys a stream with what is in it.
    ///
    /// # Errors
    /// The library's code, or it has no such function.
    pub fn destroy_stream_force(&self, stream: Stream) -> Result<(), CallError> {
        call!(self.aclrtDestroyStreamForce(stream.0.as_ptr()))
    }

    /// Waits until a stream is idle, so many milliseconds at most.
    ///
    /// # Errors
    /// The library's code, [`crate::STREAM_SYNC_TIMEOUT`] among them, or it has no such function.
    pub fn synchronize_stream(&self, stream: &Stream, milliseconds: u32) -> Result<(), CallError> {
        // A negative time is an endless one.
        let milliseconds = i32::try_from(milliseconds).unwrap_or(i32::MAX);
        call!(self.aclrtSynchronizeStreamWithTimeout(stream.0.as_ptr(), milliseconds))
    }

    /// Makes an event.
    ///
    /// # Errors
    /// The library's code, or it has no such function.
    pub fn create_event(&self) -> Result<Event, CallError> {
        let mut handle = null_mut();
        call!(self.aclrtCreateEvent(&mut handle))?;
        given("aclrtCreateEvent", handle).map(Event)
    }

    /// Destroys an event.
    ///
    /// # Errors
    /// The library's code, or it has no such function.
    pub fn destroy_event(&self, event: Event) -> Result<(), CallError> {
        call!(self.aclrtDestroyEvent(event.0.as_ptr()))
    }

    /// The event happens when what is in the stream now is done.
    ///
    /// # Errors
    /// The library's code, or it has no such function.
    pub fn record_event(&self, event: &Event, stream: &Stream) -> Result<(), CallError> {
        call!(self.aclrtRecordEvent(event.0.as_ptr(), stream.0.as_ptr()))
    }

    /// Whether an event has happened.
    ///
    /// # Errors
    /// The library's code, or it has no such function.
    pub fn event_has_happened(&self, event: &Event) -> Result<bool, CallError> {
        let mut status = 0;
        call!(self.aclrtQueryEventStatus(event.0.as_ptr(), &mut status)).map(|()| status == RECORDED)
    }

    /// Waits until an event has happened, so many milliseconds at most.
    ///
    /// # Errors
    /// The library's code, [`crate::EVENT_SYNC_TIMEOUT`] among them, or it has no such function.
    pub fn synchronize_event(&self, event: &Event, milliseconds: u32) -> Result<(), CallError> {
        let milliseconds = i32::try_from(milliseconds).unwrap_or(i32::MAX);
        call!(self.aclrtSynchronizeEventWithTimeout(event.0.as_ptr(), milliseconds))
    }

    /// Milliseconds between two events that have happened.
    ///
    /// # Errors
    /// The library's code, or it has no such function.
    pub fn elapsed(&self, start: &Event, end: &Event) -> Result<f32, CallError> {
        let mut milliseconds = 0.0;
        call!(self.aclrtEventElapsedTime(&mut milliseconds, start.0.as_ptr(), end.0.as_ptr())).map(|()| milliseconds)
    }

    /// Loads a kernel binary.
    ///
    /// # Errors
    /// The path holds a zero byte, the library's code, or it has no such function.
    pub fn load_binary(&self, path: &Path) -> Result<Binary, CallError> {
        const CALL: &str = "aclrtBinaryLoadFromFile";
        let path = c_string(CALL, path.as_os_str().as_encoded_bytes())?;
        let mut handle = null_mut();
        call!(self.aclrtBinaryLoadFromFile(path.as_ptr(), null_mut(), &mut handle))?;
        given(CALL, handle).map(Binary)
    }

    /// Unloads a kernel binary.
    ///
    /// # Errors
    /// The library's code, or it has no such function.
    pub fn unload_binary(&self, binary: Binary) -> Result<(), CallError> {
        call!(self.aclrtBinaryUnLoad(binary.0.as_ptr()))
    }

    /// A kernel of a binary.
    ///
    /// # Errors
    /// The name holds a zero byte, the library's code, or it has no such function.
    pub fn function<'b>(&self, binary: &'b Binary, name: &str) -> Result<Function<'b>, CallError> {
        const CALL: &str = "aclrtBinaryGetFunction";
        let name = c_string(CALL, name.as_bytes())?;
        let mut handle = null_mut();
        call!(self.aclrtBinaryGetFunction(binary.0.as_ptr(), name.as_ptr(), &mut handle))?;
        given(CALL, handle).map(|handle| Function { handle, binary: PhantomData })
    }

    /// Puts a launch of a kernel into a stream.
    ///
    /// # Errors
    /// An address beyond its memory, the library's code, or it has no such function.
    pub fn launch(
        &self,
        function: &Function<'_>,
        blocks: u32,
        stream: &Stream,
        arguments: &[Argument<'_>],
    ) -> Result<(), CallError> {
        let function = function.handle.as_ptr();
        let mut list: Handle = null_mut();
        call!(self.aclrtKernelArgsInit(function, &mut list))?;
        for argument in arguments {
            let mut parameter: Handle = null_mut();
            let mut bytes = match *argument {
                Argument::Address { memory, offset } if offset <= memory.bytes => {
                    // The address is the device's: it is handed on and never followed here.
                    (memory.place.as_ptr().addr() + offset).to_le_bytes().to_vec()
                }
                Argument::Address { .. } => {
                    let what = "an address lies beyond its memory";
                    return Err(CallError::Refused { call: "aclrtKernelArgsAppend", what });
                }
                Argument::Value(bytes) => bytes.to_vec(),
            };
            call!(self.aclrtKernelArgsAppend(list, bytes.as_mut_ptr().cast(), bytes.len(), &mut parameter))?;
        }
        call!(self.aclrtKernelArgsFinalize(list))?;
        call!(self.aclrtLaunchKernelWithConfig(function, blocks, stream.0.as_ptr(), null_mut(), list, null_mut()))
    }
}

/// A handle that the library gave. Success without one is an error of the library's, not an address to use.
fn given(call: &'static str, handle: Handle) -> Result<NonNull<c_void>, CallError> {
    NonNull::new(handle).ok_or(CallError::Refused { call, what: "the library reported success and gave nothing" })
}

fn c_string(call: &'static str, bytes: &[u8]) -> Result<CString, CallError> {
    CString::new(bytes).map_err(|_| CallError::Refused { call, what: "a name holds a zero byte" })
}

/// A text of the library, in one line.
fn text(place: *const c_char) -> Option<String> {
    if place.is_null() {
        return None;
    }
    // SAFETY: not null; the library's texts are zero-terminated.
    let bytes = unsafe { CStr::from_ptr(place) }.to_bytes();
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(LONGEST_TEXT)]).into_owned();
    let words = text.split(|c: char| c.is_whitespace() || c.is_control()).filter(|word| !word.is_empty());
    let line = words.collect::<Vec<_>>().join(" ");
    (!line.is_empty()).then_some(line)
}

//! Bindings of AscendCL, the C interface of Ascend devices, loaded when a program runs: nothing of CANN is needed to
//! build, and a machine without it is told where the library was looked for.
//!
//! [`AscendCl`] is the library with one method a call. Handles are opaque, are made by a call alone and are consumed
//! by the call that destroys them; copies between host and device are checked against the sizes of both. What the C
//! interface leaves to its user beyond that (order of release, threads, waiting no longer than asked) is for the
//! caller to keep. This is the one crate beside the kernels of the reference and mapped files in which `unsafe` is
//! allowed.

mod calls;
mod find;
mod symbols;

pub use calls::{Argument, AscendCl, Binary, CallError, Event, Function, Memory, Package, Stream};
pub use find::{EXPLICIT, LIBRARY, LoadError, Searched, places};
pub use symbols::{MissingSymbol, SYMBOLS, Symbol};

/// A call that did what it was asked.
pub const SUCCESS: i32 = 0;
/// `aclInit` was called in this process before.
pub const REPEAT_INITIALIZE: i32 = 100_002;
/// A stream did not become idle in the time that it was given.
pub const STREAM_SYNC_TIMEOUT: i32 = 507_046;
/// An event did not happen in the time that it was given.
pub const EVENT_SYNC_TIMEOUT: i32 = 507_047;

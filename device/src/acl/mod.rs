//! Kernels launched on a device of this machine through AscendCL, with types that own what they take and give it back
//! in the right order.
//!
//! A [`Runtime`] is the initialized library, a [`Device`] of it what the calling thread uses; [`Stream`], [`Event`],
//! [`Buffer`] and [`Module`] borrow the device, so that the compiler keeps them from outliving it. All of them stay on
//! their thread, no wait is endless, and an error says the call, the code's name, what the runtime says and what to
//! do. After a fault nothing waits for the device any more: streams and the device are given back by force. [`run()`]
//! launches the kernel of a case between guards. Nothing here judges.

mod error;
mod guard;
mod objects;
mod run;
mod runtime;

pub use ascend_cl_sys::{EXPLICIT, LIBRARY, LoadError, MissingSymbol, Searched, places};
pub use error::AclError;
pub use guard::{Side, Stray, Unwritten};
pub use objects::{Argument, Buffer, Event, Function, Module, Stream};
pub use run::{Differing, Limits, Observed, binary, run};
pub use runtime::{Device, DeviceFacts, Runtime, Versions};

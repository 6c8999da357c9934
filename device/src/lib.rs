//! Where kernel outputs come from: recorded bundles, and devices of this machine through AscendCL ([`acl`]).
//!
//! A [`Bundle`] is a case and what a device produced for it. [`Captures`] are the device's tensors as
//! the contract types them; the reader distrusts the file down to its header ([`cases::header`]), refuses what
//! is malformed with the tensor and the field named, and judges nothing: a value, a row id or an element
//! type that the contract does not expect is handed on for `goldens` to judge. A [`dump`] is what other tools wrote.

pub mod acl;
mod bundle;
mod captures;
mod command;
pub mod dump;
mod fault;
mod states;
mod write;

pub use bundle::{Bundle, BundleError, CAPTURES_FILE};
pub use captures::{
    CaptureError, CaptureFault, Captured, CapturedTensor, Captures, Layout, TokenCaptures, WrittenRows,
};
pub use cases::{create_atomically, create_atomically_with, write_atomically};
pub use command::{
    INPUTS_FILE, InputTensor, OutputsError, file_type, input_tensors, outputs_file, read_outputs, tensor_bytes,
    write_inputs,
};
pub use fault::{FAULTS, Fault, FaultKind, FaultLog, Reported};
pub use states::{LayerStates, Moment, StateSizes, state_name, write_layer_states};
pub use write::write_captures;

//! What is taken of a device: memory, streams, events, kernel binaries. Each is given back when it is dropped, and
//! cannot outlive the device.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use ascend_cl_sys as sys;
use ascend_cl_sys::CallError;

use super::error::AclError;
use super::runtime::Device;

/// What a kernel is given.
#[derive(Clone, Copy, Debug)]
pub enum Argument<'a> {
    /// The address of a byte of a buffer.
    Address(&'a Buffer<'a>, usize),
    /// A value, in the device's little-endian bytes.
    Value(&'a [u8]),
}

/// Device memory.
#[derive(Debug)]
pub struct Buffer<'d> {
    device: &'d Device<'d>,
    /// Taken in `drop` alone.
    memory: Option<sys::Memory>,
    bytes: usize,
}

/// A stream of tasks.
#[derive(Debug)]
pub struct Stream<'d> {
    device: &'d Device<'d>,
    /// Taken in `drop` alone.
    stream: Option<sys::Stream>,
    /// Whether something was launched that was not seen to end well.
    pending: std::cell::Cell<bool>,
}

/// A place in a stream.
#[derive(Debug)]
pub struct Event<'d> {
    device: &'d Device<'d>,
    /// Taken in `drop` alone.
    event: Option<sys::Event>,
}

/// A kernel binary on the device.
#[derive(Debug)]
pub struct Module<'d> {
    device: &'d Device<'d>,
    /// Taken in `drop` alone.
    binary: Option<sys::Binary>,
}

/// A kernel of a module.
#[derive(Debug)]
pub struct Function<'m>(sys::Function<'m>);

/// What is taken of an object whose `drop` is running: no code reaches it.
const GONE: CallError = CallError::Refused { call: "drop", what: "the object was given back" };

impl Device<'_> {
    /// Takes device memory; what is in it is not defined.
    ///
    /// # Errors
    /// There is none left.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer<'_>, AclError> {
        let failed = |error| self.failed(error, &format!("taking {bytes} bytes of device memory"));
        let memory = self.bind()?.malloc(bytes).map_err(failed)?;
        Ok(Buffer { device: self, memory: Some(memory), bytes })
    }

    /// Makes a stream.
    ///
    /// # Errors
    /// The device has none left, or the library is too old.
    pub fn stream(&self) -> Result<Stream<'_>, AclError> {
        let stream = self.bind()?.create_stream().map_err(|error| self.failed(error, "making a stream"))?;
        Ok(Stream { device: self, stream: Some(stream), pending: false.into() })
    }

    /// Makes an event.
    ///
    /// # Errors
    /// The device has none left, or the library is too old.
    pub fn event(&self) -> Result<Event<'_>, AclError> {
        let event = self.bind()?.create_event().map_err(|error| self.failed(error, "making an event"))?;
        Ok(Event { device: self, event: Some(event) })
    }

    /// Loads a kernel binary.
    ///
    /// # Errors
    /// It is not one for this device, or the library is too old.
    pub fn module(&self, path: &Path) -> Result<Module<'_>, AclError> {
        let failed = |error| self.failed(error, &format!("loading {}", path.display()));
        let binary = self.bind()?.load_binary(path).map_err(failed)?;
        Ok(Module { device: self, binary: Some(binary) })
    }
}

impl Buffer<'_> {
    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies to its beginning.
    ///
    /// # Errors
    /// `from` is longer, or the copy fails.
    pub fn upload(&self, from: &[u8]) -> Result<(), AclError> {
        let library = self.device.bind()?;
        let memory = self.memory.as_ref().ok_or(GONE);
        memory
            .and_then(|memory| library.upload(memory, from))
            .map_err(|error| self.device.failed(error, "copying to the device"))
    }

    /// Copies from its beginning.
    ///
    /// # Errors
    /// `to` is longer, or the copy fails.
    pub fn download(&self, to: &mut [u8]) -> Result<(), AclError> {
        let library = self.device.bind()?;
        let memory = self.memory.as_ref().ok_or(GONE);
        let copied = memory.and_then(|memory| library.download(to, memory));
        copied.map_err(|error| self.device.failed(error, "copying from the device"))
    }

    /// Sets every byte.
    ///
    /// # Errors
    /// The device refuses, or the library is too old.
    pub fn fill(&self, byte: u8) -> Result<(), AclError> {
        let library = self.device.bind()?;
        let memory = self.memory.as_ref().ok_or(GONE);
        memory
            .and_then(|memory| library.fill(memory, byte))
            .map_err(|error| self.device.failed(error, "filling device memory"))
    }
}

impl Module<'_> {
    /// A kernel by its name.
    ///
    /// # Errors
    /// The module has none of that name, or the library is too old.
    pub fn function(&self, name: &str) -> Result<Function<'_>, AclError> {
        let library = self.device.bind()?;
        let binary = self.binary.as_ref().ok_or(GONE);
        let function = binary.and_then(|binary| library.function(binary, name));
        function.map(Function).map_err(|error| self.device.failed(error, &format!("looking for kernel {name}")))
    }
}

impl Stream<'_> {
    /// Puts a launch into the stream.
    ///
    /// # Errors
    /// An address beyond its buffer, a launch that the device refuses, or the library is too old.
    pub fn launch(&self, function: &Function<'_>, blocks: u32, arguments: &[Argument<'_>]) -> Result<(), AclError> {
        let library = self.device.bind()?;
        let arguments: Option<Vec<sys::Argument<'_>>> = arguments
            .iter()
            .map(|argument| match *argument {
                Argument::Address(buffer, offset) => {
                    buffer.memory.as_ref().map(|memory| sys::Argument::Address { memory, offset })
                }
                Argument::Value(bytes) => Some(sys::Argument::Value(bytes)),
            })
            .collect();
        let parts = self.stream.as_ref().zip(arguments).ok_or(GONE);
        self.pending.set(true);
        let launched = parts.and_then(|(stream, arguments)| library.launch(&function.0, blocks, stream, &arguments));
        launched.map_err(|error| {
            self.device.give_up();
            self.device.failed(error, "launching")
        })
    }

    /// The event happens when what is in the stream now is done.
    ///
    /// # Errors
    /// The device refuses, or the library is too old.
    pub fn record(&self, event: &Event<'_>) -> Result<(), AclError> {
        let library = self.device.bind()?;
        let parts = event.event.as_ref().zip(self.stream.as_ref()).ok_or(GONE);
        let recorded = parts.and_then(|(event, stream)| library.record_event(event, stream));
        recorded.map_err(|error| self.device.failed(error, "recording an event"))
    }

    /// Waits until the stream is idle, `limit` at most. Where something in it failed or it is not idle by then, the
    /// device is given up: nothing waits for it any more.
    ///
    /// # Errors
    /// What a task in the stream failed with, or that time is up.
    pub fn wait(&self, limit: Duration) -> Result<(), AclError> {
        let library = self.device.bind()?;
        let waited =
            self.stream.as_ref().ok_or(GONE).and_then(|stream| library.synchronize_stream(stream, milliseconds(limit)));
        match waited {
            Ok(()) => {
                self.pending.set(false);
                Ok(())
            }
            Err(error) => {
                self.device.give_up();
                Err(self.device.failed(error, &format!("waiting for the device, {} s at most", limit.as_secs_f64())))
            }
        }
    }
}

impl Event<'_> {
    /// Whether it has happened.
    ///
    /// # Errors
    /// The device does not tell, or the library is too old.
    pub fn has_happened(&self) -> Result<bool, AclError> {
        let library = self.device.bind()?;
        let happened = self.event.as_ref().ok_or(GONE).and_then(|event| library.event_has_happened(event));
        happened.map_err(|error| self.device.failed(error, "asking for an event"))
    }

    /// Waits until it has happened, `limit` at most.
    ///
    /// # Errors
    /// It has not by then, the device does not tell, or the library is too old.
    pub fn wait(&self, limit: Duration) -> Result<(), AclError> {
        let library = self.device.bind()?;
        let waited =
            self.event.as_ref().ok_or(GONE).and_then(|event| library.synchronize_event(event, milliseconds(limit)));
        match waited {
            // An older library has no such wait: it is asked until the time is up.
            Err(CallError::Missing(_)) => self.poll(limit),
            waited => waited.map_err(|error| {
                self.device.give_up();
                self.device.failed(error, "waiting for an event")
            }),
        }
    }

    fn poll(&self, limit: Duration) -> Result<(), AclError> {
        let start = Instant::now();
        while !self.has_happened()? {
            if start.elapsed() >= limit {
                self.device.give_up();
                let error = CallError::Code { call: "aclrtQueryEventStatus", code: sys::EVENT_SYNC_TIMEOUT };
                return Err(self.device.failed(error, "waiting for an event"));
            }
            sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Milliseconds from an earlier event to this one; both have happened.
    ///
    /// # Errors
    /// One of them has not, or the library is too old.
    pub fn since(&self, earlier: &Event<'_>) -> Result<f32, AclError> {
        let library = self.device.bind()?;
        let events = earlier.event.as_ref().zip(self.event.as_ref()).ok_or(GONE);
        let elapsed = events.and_then(|(earlier, later)| library.elapsed(earlier, later));
        elapsed.map_err(|error| self.device.failed(error, "asking for the time between two events"))
    }
}

/// Whole milliseconds, at least one: no time at all would be an endless one to some releases.
fn milliseconds(limit: Duration) -> u32 {
    u32::try_from(limit.as_millis()).unwrap_or(u32::MAX).max(1)
}

// There is nothing to do about an error of what gives something back.

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        if let (Some(memory), Ok(library)) = (self.memory.take(), self.device.bind()) {
            let _ = library.free(memory);
        }
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        if let (Some(stream), Ok(library)) = (self.stream.take(), self.device.bind()) {
            // Destroying a stream in which something runs would wait for it. Where the library cannot do it by force,
            // the end of the process does.
            let _ = if self.pending.get() || self.device.is_given_up() {
                self.device.give_up();
                library.destroy_stream_force(stream)
            } else {
                library.destroy_stream(stream)
            };
        }
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        if let (Some(event), Ok(library)) = (self.event.take(), self.device.bind()) {
            let _ = library.destroy_event(event);
        }
    }
}

impl Drop for Module<'_> {
    fn drop(&mut self) {
        if let (Some(binary), Ok(library)) = (self.binary.take(), self.device.bind()) {
            let _ = library.unload_binary(binary);
        }
    }
}

//! The library, initialized, and the devices that this thread opened.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use ascend_cl_sys::{AscendCl, CallError, Package, REPEAT_INITIALIZE};

use super::error::AclError;

/// AscendCL, initialized. It and what is opened through it stay on their thread: a device belongs to the thread that
/// set it.
#[derive(Debug)]
pub struct Runtime {
    library: AscendCl,
    /// Whether this runtime initialized the library, and so has to give it back.
    owns: bool,
    /// The device that this thread uses.
    current: Cell<Option<i32>>,
    open: RefCell<BTreeSet<i32>>,
    thread: PhantomData<*const ()>,
}

/// Versions that the library tells; those that it does not are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Versions {
    /// Of the interface: major, minor, patch.
    pub interface: Option<[i32; 3]>,
    /// Of CANN's runtime.
    pub runtime: Option<String>,
    /// Of the driver.
    pub driver: Option<String>,
}

/// What a device tells of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its number.
    pub index: i32,
    /// The name of its chip.
    pub soc: Option<String>,
    /// Free and total bytes of its memory.
    pub memory: Option<[usize; 2]>,
}

impl Runtime {
    /// Loads and initializes the library that this process's variables and the system lead to.
    ///
    /// # Errors
    /// It is not there, not usable, or does not initialize.
    pub fn find() -> Result<Self, AclError> {
        Self::open(&ascend_cl_sys::places(|name| std::env::var_os(name)))
    }

    /// Loads and initializes the first of these files that is a library.
    ///
    /// # Errors
    /// None of them is there or usable, or it does not initialize.
    pub fn open(places: &[PathBuf]) -> Result<Self, AclError> {
        let library = AscendCl::load(places)?;
        let owns = match library.init() {
            Ok(()) => true,
            // Somebody else in this process did, and gives it back.
            Err(CallError::Code { code: REPEAT_INITIALIZE, .. }) => false,
            Err(error) => return Err(AclError::of(error, "initializing AscendCL", library.recent_message())),
        };
        let (current, open) = (Cell::new(None), RefCell::default());
        Ok(Self { library, owns, current, open, thread: PhantomData })
    }

    /// The file that was loaded.
    #[must_use]
    pub fn place(&self) -> &Path {
        self.library.place()
    }

    /// Devices that this process may use.
    ///
    /// # Errors
    /// The library does not tell.
    pub fn device_count(&self) -> Result<u32, AclError> {
        self.library.device_count().map_err(|error| self.failed(error, "counting devices"))
    }

    /// Versions, as far as the library tells them.
    #[must_use]
    pub fn versions(&self) -> Versions {
        Versions {
            interface: self.library.version().ok(),
            runtime: self.library.package_version(Package::Runtime).ok(),
            driver: self.library.package_version(Package::Driver).ok(),
        }
    }

    /// Whether the library is recent enough to launch kernels.
    ///
    /// # Errors
    /// The first function that it lacks.
    pub fn can_launch(&self) -> Result<(), AclError> {
        Ok(self.library.can_launch()?)
    }

    /// Opens a device for this thread.
    ///
    /// # Errors
    /// There is no such device, it is open already, or it cannot be set.
    pub fn device(&self, index: i32) -> Result<Device<'_>, AclError> {
        let count = self.device_count()?;
        if u32::try_from(index).map_or(true, |index| index >= count) {
            return Err(AclError::NoDevice { index, count });
        }
        if !self.open.borrow_mut().insert(index) {
            return Err(AclError::InUse { index });
        }
        let device = Device { runtime: self, index, faulty: Cell::new(false) };
        // Where this fails the device is dropped, and given back.
        device.bind()?;
        Ok(device)
    }

    pub(super) fn library(&self) -> &AscendCl {
        &self.library
    }

    /// A failed call with what the runtime says of it.
    pub(super) fn failed(&self, error: CallError, doing: &str) -> AclError {
        AclError::of(error, doing, self.library.recent_message())
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if self.owns {
            // There is nothing left to do about an error.
            let _ = self.library.finalize();
        }
    }
}

/// A device that this thread uses.
#[derive(Debug)]
pub struct Device<'r> {
    runtime: &'r Runtime,
    index: i32,
    /// Whether something on it failed or hangs, so that nothing may wait for it any more.
    faulty: Cell<bool>,
}

impl Device<'_> {
    /// Its number.
    #[must_use]
    pub fn index(&self) -> i32 {
        self.index
    }

    /// What it tells of itself.
    ///
    /// # Errors
    /// It cannot be set.
    pub fn facts(&self) -> Result<DeviceFacts, AclError> {
        let library = self.bind()?;
        Ok(DeviceFacts { index: self.index, soc: library.soc_name(), memory: library.memory_info().ok() })
    }

    /// Makes it the one that this thread uses, where another was since.
    pub(super) fn bind(&self) -> Result<&AscendCl, AclError> {
        let library = &self.runtime.library;
        if self.runtime.current.get() != Some(self.index) {
            let failed = |error| self.runtime.failed(error, &format!("setting device {}", self.index));
            library.set_device(self.index).map_err(failed)?;
            self.runtime.current.set(Some(self.index));
        }
        Ok(library)
    }

    /// A failed call with what the runtime says of it.
    pub(super) fn failed(&self, error: CallError, doing: &str) -> AclError {
        self.runtime.failed(error, doing)
    }

    /// From now on nothing waits for it.
    pub(super) fn give_up(&self) {
        self.faulty.set(true);
    }

    /// Whether it was given up.
    pub(super) fn is_given_up(&self) -> bool {
        self.faulty.get()
    }
}

impl Drop for Device<'_> {
    fn drop(&mut self) {
        let was_set = self.runtime.current.get() == Some(self.index) || self.bind().is_ok();
        if was_set {
            let library = self.runtime.library();
            // A device that hangs is not waited for; without the function for it, the end of the process gives it back.
            let _ = if self.faulty.get() {
                library.reset_device_force(self.index)
            } else {
                library.reset_device(self.index)
            };
        }
        self.runtime.current.set(None);
        self.runtime.open.borrow_mut().remove(&self.index);
    }
}

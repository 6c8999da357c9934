//! What the mock holds: memory, streams, events, binaries, lists of arguments, and a log of calls.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::SUCCESS;
use crate::kernel::Kernel;
use crate::plan::Plan;

const MEMORY_ALLOCATION: i32 = 207_001;
const INVALID_HANDLE: i32 = 107_017;
const AICORE_EXCEPTION: i32 = 507_015;
/// Blocks begin at multiples of this.
const ALIGNMENT: usize = 512;

/// How a stream stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Nothing is in it.
    Idle,
    /// What was in it failed.
    Failed(i32),
    /// What is in it never ends.
    Hangs,
}

/// Everything.
pub struct State {
    pub plan: Plan,
    pub initialized: bool,
    blocks: BTreeMap<usize, Vec<u8>>,
    pub streams: BTreeMap<usize, Status>,
    /// When each happened.
    pub events: BTreeMap<usize, Option<usize>>,
    pub binaries: BTreeMap<usize, Kernel>,
    /// Values, and whether the list is complete.
    pub lists: BTreeMap<usize, (Vec<Vec<u8>>, bool)>,
    next: usize,
    next_address: usize,
    allocations: usize,
    launches: usize,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| {
    Mutex::new(State {
        plan: Plan::beside_library(),
        initialized: false,
        blocks: BTreeMap::new(),
        streams: BTreeMap::new(),
        events: BTreeMap::new(),
        binaries: BTreeMap::new(),
        lists: BTreeMap::new(),
        next: 0,
        // Nowhere near host memory: an address that is followed on the host is a fault at once.
        next_address: 1 << 60,
        allocations: 0,
        launches: 0,
    })
});

thread_local! {
    static DEVICE: Cell<Option<i32>> = const { Cell::new(None) };
}

/// The device of this thread.
pub fn thread_device() -> Option<i32> {
    DEVICE.get()
}

/// Sets it.
pub fn set_thread_device(device: Option<i32>) {
    DEVICE.set(device);
}

/// The state, locked.
pub fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// A number that was not given before.
    pub fn number(&mut self) -> usize {
        self.next += 1;
        self.next
    }

    /// Writes a line to the log.
    pub fn log(&mut self, line: &str) -> i32 {
        if let Some(path) = &self.plan.log {
            let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path).expect("the log opens");
            writeln!(file, "{line}").expect("the log takes a line");
        }
        SUCCESS
    }

    /// What was not given back.
    pub fn left(&self) -> String {
        let counts = [self.blocks.len(), self.streams.len(), self.events.len(), self.binaries.len()];
        format!("memory={} streams={} events={} binaries={}", counts[0], counts[1], counts[2], counts[3])
    }

    pub fn malloc(&mut self, bytes: usize) -> Result<usize, i32> {
        self.allocations += 1;
        if bytes == 0 || self.plan.malloc == Some(self.allocations) {
            return Err(MEMORY_ALLOCATION);
        }
        let address = self.next_address;
        self.next_address += (bytes.div_ceil(ALIGNMENT) + 1) * ALIGNMENT;
        // Device memory holds anything.
        self.blocks.insert(address, vec![0x3c; bytes]);
        self.log("malloc");
        Ok(address)
    }

    pub fn free(&mut self, address: usize) -> i32 {
        match self.blocks.remove(&address) {
            Some(_) => self.log("free"),
            None => INVALID_HANDLE,
        }
    }

    /// So many bytes of device memory from an address on, where one block holds them all.
    pub fn memory(&mut self, address: usize, bytes: usize) -> Option<&mut [u8]> {
        let (start, block) = self.blocks.range_mut(..=address).next_back()?;
        let at = address - start;
        block.get_mut(at..at.checked_add(bytes)?)
    }

    /// Runs a kernel; what comes of it is seen in the stream.
    pub fn launch(&mut self, binary: usize, stream: usize, values: &[Vec<u8>]) -> i32 {
        if let Some(code) = self.plan.refuse {
            return code;
        }
        self.launches += 1;
        self.log("launch");
        let failed = self.plan.launch.filter(|(_, at)| *at == self.launches).map(|(code, _)| code);
        let status = match failed {
            Some(code) => Status::Failed(code),
            None if self.plan.hang => Status::Hangs,
            None => self.run(binary, values).map_or(Status::Failed(AICORE_EXCEPTION), |()| Status::Idle),
        };
        self.streams.insert(stream, status);
        SUCCESS
    }

    fn run(&mut self, binary: usize, values: &[Vec<u8>]) -> Option<()> {
        let kernel = self.binaries.remove(&binary)?;
        let ran = self.steps(&kernel, values);
        self.binaries.insert(binary, kernel);
        ran
    }

    fn steps(&mut self, kernel: &Kernel, values: &[Vec<u8>]) -> Option<()> {
        let address = |argument: usize| Some(usize::from_le_bytes(values.get(argument)?.as_slice().try_into().ok()?));
        for (argument, bytes) in &kernel.expects {
            let is_value = values.get(*argument)? == bytes;
            if !is_value && self.memory(address(*argument)?, bytes.len())? != bytes.as_slice() {
                return None;
            }
        }
        let kept = match self.plan.skip {
            Some((argument, offset)) => {
                let at = address(argument)?.checked_add_signed(offset)?;
                Some((at, self.memory(at, 4)?.to_vec()))
            }
            None => None,
        };
        for (argument, bytes) in &kernel.stores {
            self.memory(address(*argument)?, bytes.len())?.copy_from_slice(bytes);
        }
        if let Some((at, bytes)) = kept {
            self.memory(at, 4)?.copy_from_slice(&bytes);
        }
        if let Some((argument, offset)) = self.plan.wild {
            self.memory(address(argument)?.checked_add_signed(offset)?, 4)?.fill(0x11);
        }
        if let Some((argument, offset)) = self.plan.flip
            && self.launches > 1
        {
            self.memory(address(argument)?.checked_add_signed(offset)?, 1)?[0] ^= 1;
        }
        Some(())
    }
}

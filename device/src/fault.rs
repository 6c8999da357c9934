//! Errors of a device and of its runtime: numbers that say nothing, under the names that say what happened. None of
//! them is an accuracy failure: what a device could not run cannot be judged.

mod log;

use std::fmt;

pub use log::{FaultLog, Reported};

/// What a code is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// A code that AscendCL or its driver returned.
    AscendCl,
    /// A code of the kernel library's runtime: the graph did not fit what it was given.
    Capacity,
    /// A code of the kernel library's runtime: it gave up for another reason.
    Runtime,
}

/// A known error of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fault {
    /// What the code is about.
    pub kind: FaultKind,
    /// The number.
    pub code: i32,
    /// Its name, as the runtime's headers spell it.
    pub name: &'static str,
    /// What happened and what to do.
    pub advice: &'static str,
}

/// Every known error, by kind and number.
pub const FAULTS: &[Fault] = &[
    runtime(
        5,
        "INVALID_ARGS",
        "the orchestration called the runtime with arguments that it refuses: look at its calls, no larger ring helps",
    ),
    runtime(
        7,
        "REQUIRE_SYNC_START_INVALID",
        "a task asked for more blocks at once than there are cores of its kind: give it fewer blocks",
    ),
    runtime(
        8,
        "TENSOR_WAIT_TIMEOUT",
        "a tensor that the orchestration waits for was never written: look for a kernel that hangs, and for a missing \
        dependency",
    ),
    runtime(9, "EXPLICIT_ORCH_FATAL", "the orchestration itself gave up: its own message in the log says why"),
    runtime(
        100,
        "SCHEDULER_TIMEOUT",
        "no task finished in the scheduler's time: a kernel hangs, or tasks wait for each other; the log's sub_class \
        says which",
    ),
    acl(
        100_029,
        "ACL_ERROR_KERNEL_NOT_FOUND",
        "the binary has no kernel of this name: compare `function` in the case with the binary's symbols",
    ),
    acl(
        107_000,
        "ACL_ERROR_RT_PARAM_INVALID",
        "the runtime refuses a parameter: for a kernel binary, one that is missing, empty or of another format",
    ),
    acl(
        107_001,
        "ACL_ERROR_RT_INVALID_DEVICEID",
        "there is no device of this number: ASCEND_RT_VISIBLE_DEVICES renumbers those that it names from 0",
    ),
    acl(107_002, "ACL_ERROR_RT_CONTEXT_NULL", "no device is set on this thread: another part of the program reset it"),
    acl(
        107_009,
        "ACL_ERROR_RT_FILE_OPEN",
        "a file cannot be opened: look whether the kernel binary is there and readable",
    ),
    acl(107_017, "ACL_ERROR_RT_INVALID_HANDLE", "a handle is not one of this process or was given back before"),
    acl(
        107_019,
        "ACL_ERROR_RT_WAIT_TIMEOUT",
        "what was waited for did not happen in time: a kernel hangs, or the time limit is too short",
    ),
    acl(
        107_020,
        "ACL_ERROR_RT_TASK_TIMEOUT",
        "a task did not finish in time: a kernel hangs, or the time limit is too short",
    ),
    acl(
        107_022,
        "ACL_ERROR_RT_DEVICE_TASK_ABORT",
        "a task on the device was aborted, often after another one's error: \
        read the first error of the log, reset the device and run the case alone",
    ),
    acl(
        107_023,
        "ACL_ERROR_RT_STREAM_ABORT",
        "the stream is being aborted after another error: read the first error of the log",
    ),
    acl(200_000, "ACL_ERROR_BAD_ALLOC", "host memory was used up: run a smaller case, or end other processes"),
    acl(
        207_000,
        "ACL_ERROR_RT_FEATURE_NOT_SUPPORT",
        "this chip or driver does not have the feature: compare the versions of driver and CANN (assay doctor)",
    ),
    acl(
        207_001,
        "ACL_ERROR_RT_MEMORY_ALLOCATION",
        "device memory was used up: end other processes on the device, or run \
        a case with fewer pages or a smaller geometry",
    ),
    acl(
        207_004,
        "ACL_ERROR_RT_NO_DEVICE",
        "the driver sees no device: look at npu-smi info, and whether the container was given /dev/davinci*",
    ),
    acl(
        207_005,
        "ACL_ERROR_RT_RESOURCE_ALLOC_FAIL",
        "a stream, event or other resource is used up: end other processes on the device",
    ),
    acl(
        207_006,
        "ACL_ERROR_RT_NO_PERMISSION",
        "this user may not use the device: join the group that owns /dev/davinci* (mostly HwHiAiUser)",
    ),
    acl(
        207_018,
        "ACL_ERROR_RT_DEVICE_OOM",
        "device memory was used up: end other processes on the device, or run a case with fewer pages or a \
        smaller geometry",
    ),
    acl(500_000, "ACL_ERROR_INTERNAL_ERROR", "AscendCL failed inside: read its log (ASCEND_SLOG_PRINT_TO_STDOUT=1)"),
    acl(
        507_000,
        "RT_INTERNAL_ERROR",
        "the runtime failed inside: read its log (ASCEND_SLOG_PRINT_TO_STDOUT=1), then \
        reset the device",
    ),
    acl(
        507_008,
        "ACL_ERROR_RT_SOC_VERSION",
        "the binary was built for another chip, or CANN does not know this one: rebuild the kernel for the chip \
        that assay doctor names",
    ),
    acl(
        507_010,
        "ACL_ERROR_RT_LOST_HEARTBEAT",
        "the device no longer answers: reset it, and restart the machine if that does not help",
    ),
    acl(
        507_014,
        "RT_AICORE_TIMEOUT",
        "an AI Core did not finish in time: a kernel waits for a flag or event that is never \
        set, or its blocks wait for each other; run it with one block",
    ),
    acl(
        507_015,
        "RT_AICORE_EXCEPTION",
        "an AI Core raised an exception, mostly an address out of range or misaligned: the \
        device log names the core and the program counter",
    ),
    acl(
        507_016,
        "ACL_ERROR_RT_AICORE_TRAP_EXCEPTION",
        "an AI Core met a trap instruction: an assertion of the kernel failed, or it ran into data",
    ),
    acl(
        507_017,
        "RT_AICPU_TIMEOUT",
        "an AI CPU task did not finish in time: the scheduler on it waits for kernels that do \
        not complete",
    ),
    acl(
        507_018,
        "RT_AICPU_EXCEPTION",
        "an AI CPU task raised an exception: the runtime's own error code in the log says \
        which, often a capacity that was exceeded",
    ),
    acl(
        507_027,
        "ACL_ERROR_RT_KERNEL_LOOKUP",
        "the binary has no kernel of this name: compare `function` in the case with the binary's symbols",
    ),
    acl(507_033, "ACL_ERROR_RT_DEV_SETUP_ERROR", "the device could not be set up: look at npu-smi info and reset it"),
    acl(
        507_034,
        "ACL_ERROR_RT_VECTOR_CORE_TIMEOUT",
        "a vector core did not finish in time: a kernel waits for a flag or event that is never set",
    ),
    acl(
        507_035,
        "ACL_ERROR_RT_VECTOR_CORE_EXCEPTION",
        "a vector core raised an exception, mostly an address out of range or misaligned: the device log names \
        the core and the program counter",
    ),
    acl(
        507_036,
        "ACL_ERROR_RT_VECTOR_CORE_TRAP_EXCEPTION",
        "a vector core met a trap instruction: an assertion of the kernel failed, or it ran into data",
    ),
    acl(
        507_042,
        "ACL_ERROR_RT_AICORE_TRAP_READ_OVERFLOW",
        "an AI Core read outside of what it was given: check sizes and offsets of the kernel's copies",
    ),
    acl(
        507_043,
        "ACL_ERROR_RT_AICORE_TRAP_WRITE_OVERFLOW",
        "an AI Core wrote outside of what it was given: check sizes and offsets of the kernel's copies",
    ),
    acl(
        507_044,
        "ACL_ERROR_RT_VECTOR_CORE_TRAP_READ_OVERFLOW",
        "a vector core read outside of what it was given: check sizes and offsets of the kernel's copies",
    ),
    acl(
        507_045,
        "ACL_ERROR_RT_VECTOR_CORE_TRAP_WRITE_OVERFLOW",
        "a vector core wrote outside of what it was given: check sizes and offsets of the kernel's copies",
    ),
    acl(
        507_046,
        "RT_STREAM_SYNC_TIMEOUT",
        "the stream did not become idle in time: a kernel hangs, or the time limit is \
        below what the case needs",
    ),
    acl(
        507_047,
        "ACL_ERROR_RT_EVENT_SYNC_TIMEOUT",
        "the event did not happen in time: a kernel hangs, or the time limit is below what the case needs",
    ),
    acl(
        507_053,
        "ACL_ERROR_RT_DEVICE_MEM_ERROR",
        "the device's memory has an error: reset the device, and have it checked when it comes back",
    ),
    acl(
        507_054,
        "ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR",
        "the device's memory lost bits beyond repair: reset the device, and have it checked when it comes back",
    ),
    acl(507_899, "RT_DRV_INTERNAL_ERROR", "the driver failed inside: check the device with npu-smi and reset it"),
    acl(507_901, "ACL_ERROR_RT_SOCKET_CLOSE", "the connection to the device broke off: reset the device"),
    acl(
        507_915,
        "ACL_ERROR_RT_SYMBOL_NOT_FOUND",
        "the binary lacks a symbol: compare `function` in the case with the binary's symbols",
    ),
    capacity(
        1,
        "SCOPE_DEADLOCK",
        "tasks of one scope do not fit its window and wait for each other: open smaller scopes, or \
        enlarge the runtime's task window",
    ),
    capacity(
        2,
        "HEAP_RING_DEADLOCK",
        "the ring of intermediate tensors is full of tensors that are still needed: enlarge \
        the runtime's heap, or run fewer tokens (long completions are known to end here)",
    ),
    capacity(
        3,
        "FLOW_CONTROL_DEADLOCK",
        "the ring of tasks is full and none of them can finish: enlarge the runtime's task \
        window",
    ),
    capacity(
        4,
        "DEP_POOL_OVERFLOW",
        "there are more dependencies between tasks than the pool holds: enlarge the runtime's \
        dependency pool",
    ),
    capacity(
        10,
        "SCOPE_TASKS_OVERFLOW",
        "one scope submitted more tasks than are recorded for it: open smaller scopes",
    ),
    capacity(
        11,
        "TENSORMAP_OVERFLOW",
        "there are more tensors alive than the tensor map holds: enlarge it, or free tensors \
        earlier",
    ),
    capacity(
        104,
        "READY_QUEUE_OVERFLOW",
        "more tasks were ready at once than a queue of the scheduler holds: submit fewer tasks that do not depend on \
        each other",
    ),
];

const fn acl(code: i32, name: &'static str, advice: &'static str) -> Fault {
    Fault { kind: FaultKind::AscendCl, code, name, advice }
}

const fn capacity(code: i32, name: &'static str, advice: &'static str) -> Fault {
    Fault { kind: FaultKind::Capacity, code, name, advice }
}

const fn runtime(code: i32, name: &'static str, advice: &'static str) -> Fault {
    Fault { kind: FaultKind::Runtime, code, name, advice }
}

impl Fault {
    /// The known error of the kernel library's runtime with this number.
    #[must_use]
    pub fn of_runtime(code: i32) -> Option<&'static Self> {
        Self::known(FaultKind::Capacity, code).or_else(|| Self::known(FaultKind::Runtime, code))
    }

    /// The known error of this kind and number.
    #[must_use]
    pub fn known(kind: FaultKind, code: i32) -> Option<&'static Self> {
        FAULTS.iter().find(|fault| fault.kind == kind && fault.code == code)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.name, self.code, self.advice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_error_has_one_number_and_one_name() {
        for (index, fault) in FAULTS.iter().enumerate() {
            assert_eq!(Fault::known(fault.kind, fault.code), Some(fault));
            assert!(FAULTS[..index].iter().all(|other| other.name != fault.name), "{}", fault.name);
            assert!(!fault.advice.is_empty());
            // The runtime has one list of numbers.
            assert!(fault.kind == FaultKind::AscendCl || Fault::of_runtime(fault.code) == Some(fault));
        }
        assert!(FAULTS.is_sorted_by_key(|fault| (fault.kind == FaultKind::Capacity, fault.code)));
        assert_eq!(Fault::known(FaultKind::Capacity, 507_018), None);
    }
}

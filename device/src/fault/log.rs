//! Device errors in what a program said: known ones by name, by the fields in which the runtime prints its codes, and
//! by a number in words that make it an error code. A number alone is none: logs are full of numbers.

use std::fmt;

use super::{FAULTS, Fault, FaultKind};

/// The fields in which the kernel library's runtime prints its own codes.
const FIELDS: [&str; 3] = ["orch_error_code", "sched_error_code", "runtime_status"];
/// Names that a code of the runtime has in other revisions of it.
const ALIASES: [(&str, i32); 1] = [("FANIN_CAPACITY_EXCEEDED", 4)];
/// What stands before a name in headers.
const PREFIXES: [&str; 3] = ["ACL_ERROR_", "PTO2_ERROR_", "SIMPLER_ERROR_"];
/// Words that make a number behind them an error code.
const WORDS: [&str; 20] = [
    "ret",
    "rc",
    "err",
    "error",
    "errors",
    "errno",
    "errcode",
    "errorcode",
    "retcode",
    "rtret",
    "aclret",
    "aclerror",
    "code",
    "status",
    "result",
    "failed",
    "failure",
    "fail",
    "exception",
    "returned",
];
/// What a number counts when it stands before one of these.
const UNITS: [&str; 12] = ["bytes", "kb", "mb", "gb", "ns", "us", "ms", "s", "seconds", "cycles", "tokens", "elements"];
/// What a number counts when it stands behind one of these.
const COUNTED: [&str; 6] = ["step", "iteration", "iter", "epoch", "batch", "took"];
/// Words before a number that may be between it and such a word: `error code is 507018`.
const REACH: usize = 4;
/// Bytes of a line that are looked at.
const LONGEST_LINE: usize = 1 << 16;

/// An error that a log reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reported {
    /// A known one.
    Known(&'static Fault),
    /// A code of the runtime that this program has no name for.
    Unknown {
        /// The field it was printed in.
        field: &'static str,
        /// The code.
        code: i32,
    },
}

impl Reported {
    /// Its name, or what stands in its place: `HEAP_RING_DEADLOCK (2)`, `orch_error_code=37`.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Known(fault) => format!("{} ({})", fault.name, fault.code),
            Self::Unknown { field, code } => format!("{field}={code}"),
        }
    }
}

impl fmt::Display for Reported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(fault) => fault.fmt(f),
            Self::Unknown { field, code } => {
                write!(
                    f,
                    "{field}={code}: the runtime gave up for a reason that has no name here; look it up in its log"
                )
            }
        }
    }
}

/// Gathers the errors of a log, line by line.
#[derive(Clone, Debug, Default)]
pub struct FaultLog {
    /// Codes in the runtime's fields, in order.
    fields: Vec<Reported>,
    /// Names of the runtime's codes, in order.
    named: Vec<Reported>,
    /// Errors of AscendCL, in order.
    acl: Vec<Reported>,
}

impl FaultLog {
    /// Looks at a line.
    pub fn line(&mut self, line: &str) {
        let end = (0..=line.len().min(LONGEST_LINE)).rev().find(|&end| line.is_char_boundary(end)).unwrap_or(0);
        let line = &line[..end];
        for field in FIELDS {
            for code in values(line, field) {
                let reported = match Fault::of_runtime(code) {
                    Some(fault) => Reported::Known(fault),
                    // The status repeats the code of one of the others, or is one of the host's.
                    None if field == "runtime_status" => continue,
                    None => Reported::Unknown { field, code },
                };
                add(&mut self.fields, reported);
            }
        }
        for fault in FAULTS {
            if word(line, fault.name.trim_start_matches(PREFIXES[0])) {
                let list = if fault.kind == FaultKind::AscendCl { &mut self.acl } else { &mut self.named };
                add(list, Reported::Known(fault));
            }
        }
        for (name, code) in ALIASES {
            if let (true, Some(fault)) = (word(line, name), Fault::of_runtime(code)) {
                add(&mut self.named, Reported::Known(fault));
            }
        }
        for (at, number) in numbers(line) {
            let known = i32::try_from(number).ok().and_then(|code| Fault::known(FaultKind::AscendCl, code));
            if let Some(fault) = known.filter(|_| is_code(line, at) && !is_measure(line, at)) {
                add(&mut self.acl, Reported::Known(fault));
            }
        }
    }

    /// What was reported, each once. The runtime's own codes come first: they say why a call of AscendCL failed. Among
    /// the others the first is the one that later ones follow from.
    #[must_use]
    pub fn reported(&self) -> Vec<Reported> {
        // Where the runtime prints its code, names in its prose are explanations.
        let own = if self.fields.is_empty() { &self.named } else { &self.fields };
        own.iter().chain(&self.acl).copied().collect()
    }
}

fn add(list: &mut Vec<Reported>, reported: Reported) {
    // A program may count up: a handful of codes says it.
    if list.len() < 8 && !list.contains(&reported) {
        list.push(reported);
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Whether a line holds a name as a word of its own, alone or behind a prefix of the headers.
fn word(line: &str, name: &str) -> bool {
    line.match_indices(name).any(|(at, _)| {
        let (before, after) = (&line[..at], &line[at + name.len()..]);
        let before = PREFIXES.iter().find_map(|prefix| before.strip_suffix(prefix)).unwrap_or(before);
        !before.bytes().next_back().is_some_and(is_word) && !after.bytes().next().is_some_and(is_word)
    })
}

/// The codes other than zero that stand behind a field: `field=2`, `field: 2`, `"field": -2`.
fn values<'a>(line: &'a str, field: &'a str) -> impl Iterator<Item = i32> + 'a {
    line.match_indices(field).filter_map(move |(at, _)| {
        if line[..at].bytes().next_back().is_some_and(is_word) {
            return None;
        }
        let rest = line[at + field.len()..].trim_start_matches(['"', '\'', ' ']);
        let rest = rest.strip_prefix(['=', ':'])?.trim_start().trim_start_matches('-');
        if let Some(hex) = rest.strip_prefix("0x") {
            let digits = hex.len() - hex.trim_start_matches(|c: char| c.is_ascii_hexdigit()).len();
            let whole = !hex.as_bytes().get(digits).is_some_and(|&byte| is_word(byte));
            return i32::from_str_radix(&hex[..digits], 16).ok().filter(|&code| whole && code != 0);
        }
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let whole = !rest.as_bytes().get(digits).is_some_and(|&byte| is_word(byte) || byte == b'.');
        rest[..digits].parse::<i32>().ok().filter(|&code| whole && code != 0)
    })
}

/// Whole numbers of a line that stand alone, decimal or hexadecimal, with where they begin.
fn numbers(line: &str) -> impl Iterator<Item = (usize, u64)> + '_ {
    let bytes = line.as_bytes();
    let mut at = 0;
    std::iter::from_fn(move || {
        loop {
            while at < bytes.len() && !is_word(bytes[at]) {
                at += 1;
            }
            let begin = at;
            while at < bytes.len() && is_word(bytes[at]) {
                at += 1;
            }
            if begin == at {
                return None;
            }
            // Bytes of words are ASCII, so that these are borders of characters.
            let text = &line[begin..at];
            let part = |point: Option<&u8>, beyond: Option<&u8>| {
                point == Some(&b'.') && beyond.is_some_and(|byte| byte.is_ascii_digit())
            };
            let fraction =
                part(bytes.get(at), bytes.get(at + 1)) || begin > 1 && part(bytes.get(begin - 1), bytes.get(begin - 2));
            let number = match text.strip_prefix("0x") {
                Some(hex) => u64::from_str_radix(hex, 16).ok(),
                None if text.bytes().all(|byte| byte.is_ascii_digit()) => text.parse().ok(),
                None => None,
            };
            if let Some(number) = number.filter(|_| !fraction) {
                return Some((begin, number));
            }
        }
    })
}

/// Whether the number at `at` counts something: `wrote 507018 bytes`, `step 507018 failed`.
fn is_measure(line: &str, at: usize) -> bool {
    let word =
        |word: Option<&str>, of: &[&str]| word.is_some_and(|word| of.contains(&word.to_ascii_lowercase().as_str()));
    let digits = line[at..].bytes().take_while(|&byte| is_word(byte)).count();
    let after =
        line[at + digits..].strip_prefix(' ').and_then(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric()).next());
    let before = line[..at].trim_end().rsplit(|c: char| !c.is_ascii_alphanumeric()).next();
    word(after, &UNITS) || word(before, &COUNTED)
}

/// Whether the number at `at` is said to be an error code: by a word before it, or by standing alone on its line.
fn is_code(line: &str, at: usize) -> bool {
    if line.trim().bytes().all(is_word) {
        return true;
    }
    let words = line[..at].rsplit(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.take(REACH).any(|word| {
        let lower = word.to_ascii_lowercase();
        // What failed is often the only word: `aclrtSynchronizeStream: 507018`, `rtKernelLaunch: 207001`.
        let function = lower.starts_with("acl")
            || word.starts_with("rt") && word.as_bytes().get(2).is_some_and(u8::is_ascii_uppercase);
        function || WORDS.contains(&lower.as_str()) || lower.ends_with("errorcode") || lower.ends_with("retcode")
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(log: &str) -> Vec<String> {
        let mut found = FaultLog::default();
        log.lines().for_each(|line| found.line(line));
        found.reported().iter().map(Reported::name).collect()
    }

    #[test]
    fn errors_are_found_by_name_by_field_and_by_number() {
        for (log, name) in [
            ("aclrtSynchronizeStreamWithTimeout (AICPU) failed: 507018", "RT_AICPU_EXCEPTION (507018)"),
            ("RuntimeError: run failed with code 507018", "RT_AICPU_EXCEPTION (507018)"),
            ("ret=507015, device 3", "RT_AICORE_EXCEPTION (507015)"),
            ("the error code is 507046.", "RT_STREAM_SYNC_TIMEOUT (507046)"),
            ("[ERROR] errorCode:0x7BFFB", "RT_DRV_INTERNAL_ERROR (507899)"),
            ("rtKernelLaunchWithHandleV2: 207001, desc=[]", "ACL_ERROR_RT_MEMORY_ALLOCATION (207001)"),
            ("  507014\t", "RT_AICORE_TIMEOUT (507014)"),
            ("ACL_ERROR_RT_DEVICE_TASK_ABORT", "ACL_ERROR_RT_DEVICE_TASK_ABORT (107022)"),
            ("ACL_ERROR_RT_AICPU_EXCEPTION!", "RT_AICPU_EXCEPTION (507018)"),
            ("FATAL: PTO2_ERROR_HEAP_RING_DEADLOCK", "HEAP_RING_DEADLOCK (2)"),
            ("SCOPE_DEADLOCK: a scope", "SCOPE_DEADLOCK (1)"),
            ("orch_error_code=2 sched_error_code=0 runtime_status=-2", "HEAP_RING_DEADLOCK (2)"),
            ("orch_error_code=0x2", "HEAP_RING_DEADLOCK (2)"),
            ("runtime_status=-11", "TENSORMAP_OVERFLOW (11)"),
            ("\"sched_error_code\": 100}", "SCHEDULER_TIMEOUT (100)"),
            ("orch_error_code: 37", "orch_error_code=37"),
            ("(FANIN_CAPACITY_EXCEEDED)", "DEP_POOL_OVERFLOW (4)"),
        ] {
            assert_eq!(names(log), [name], "{log}");
        }
    }

    #[test]
    fn numbers_and_words_that_are_no_error_are_none() {
        for log in [
            "elapsed 507018 us",
            "read 507018 bytes of 1507018",
            "error 5070181",
            "error 507018.25 and 0.507018",
            "orch_error_code=0 sched_error_code=0",
            "my_orch_error_code=2",
            "orch_error_code=2x",
            "orch_error_code=0x2g",
            "status: wrote 507018 bytes",
            "rtStreamSync took 507018 us",
            "loss error at step 507018 is 0.1",
            "error code 2",
            "failed 1 of 4, exit code 11",
            "NO_HEAP_RING_DEADLOCKS",
            "heap ring deadlock",
            "runtime_status=-1000",
            "device 507018 is ready",
        ] {
            assert_eq!(names(log), [""; 0], "{log}");
        }
    }

    #[test]
    fn what_the_runtime_says_comes_before_what_followed_from_it() {
        let log = "aclrtSynchronizeStream failed: 507018\n\
                   runtime failed: orch_error_code=10 sched_error_code=0 runtime_status=-10\n\
                   hint: SCOPE_DEADLOCK or FLOW_CONTROL_DEADLOCK come first\n\
                   aclrtMalloc failed: 107022\nret=507018\n";
        let expected =
            ["SCOPE_TASKS_OVERFLOW (10)", "RT_AICPU_EXCEPTION (507018)", "ACL_ERROR_RT_DEVICE_TASK_ABORT (107022)"];
        assert_eq!(names(log), expected);
    }

    proptest! {
        #[test]
        fn no_line_is_too_strange(line in "\\PC*", code in any::<u32>()) {
            names(&line);
            names(&format!("orch_error_code={code}{line}"));
            names(&format!("{line}0x{code:x}.{line}"));
        }

        #[test]
        fn a_code_is_found_in_any_company(before in "[ -/:-@]{0,20}", after in "[ ,;:)\\]]{0,20}") {
            prop_assert_eq!(names(&format!("{before} error code {before}507018{after}")).len(), 1);
        }
    }
}

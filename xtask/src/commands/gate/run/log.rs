//! What a command said and ended with: device errors in it, and its last lines.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::process::ExitStatus;

use device::{FAULTS, FaultKind, FaultLog, Reported};

use crate::report::text::plain;

/// Bytes of the end of a log that are looked at for its last lines.
const TAIL: u64 = 4096;
/// Lines of them that are repeated, and bytes of each.
const LAST_LINES: usize = 6;
const LINE: usize = 300;
/// Bytes of a line that are searched for device errors at once.
const SEARCHED: u64 = 1 << 16;

/// Device errors that an exit code may be what is left of: shells and systems keep eight bits of it.
pub fn truncated(status: ExitStatus) -> Option<String> {
    // Any program ends with 1 to 3 when something is wrong: they say nothing of a device.
    let code = status.code().filter(|&code| code > 3)?;
    let acl = || FAULTS.iter().filter(|fault| fault.kind == FaultKind::AscendCl);
    let whole = acl().find(|fault| fault.code == code).map(|fault| format!(", which is {fault}"));
    whole.or_else(|| {
        let fault = acl().find(|fault| fault.code & 0xff == code)?;
        // Shells give what a signal ended such a code too.
        let signal = if (129..160).contains(&code) { format!(", or signal {}", code - 128) } else { String::new() };
        Some(format!(" (of an exit code eight bits are kept: it may have been {} {}{signal})", fault.code, fault.name))
    })
}

/// The device errors of a log, however long it is.
pub fn errors_in(log: &Path) -> io::Result<Vec<Reported>> {
    let mut log = BufReader::new(File::open(log)?);
    let (mut found, mut line) = (FaultLog::default(), Vec::new());
    let mut continues = false;
    loop {
        line.clear();
        if log.by_ref().take(SEARCHED).read_until(b'\n', &mut line)? == 0 {
            return Ok(found.reported());
        }
        // The rest of a line that is too long is no line of its own.
        if !continues {
            let text = String::from_utf8_lossy(&line);
            // Progress is written over and over with carriage returns, and what is wrong in colours.
            let text = anstream::adapter::strip_str(&text).to_string();
            text.split('\r').for_each(|line| found.line(line));
        }
        continues = line.last() != Some(&b'\n');
    }
}

/// The last lines of a log, without what colours them.
pub fn last_lines(log: &Path) -> Option<String> {
    let mut file = File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let text = anstream::adapter::strip_str(&text).to_string();
    let lines: Vec<String> = text
        .lines()
        .map(|line| plain(line.trim()).chars().take(LINE).collect::<String>())
        .filter(|line| !line.is_empty())
        .collect();
    let last = &lines[lines.len().saturating_sub(LAST_LINES)..];
    (!last.is_empty()).then(|| last.join(" | "))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_end_of_a_log_is_repeated_without_its_colours() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        fs::write(&log, "").unwrap();
        assert_eq!(last_lines(&log), None);
        let long = "x".repeat(1000);
        fs::write(&log, format!("{}\n\u{1b}[31mred\u{1b}[0m\n\n{long}\n\0\u{ff}", "line\n".repeat(5000))).unwrap();
        let told = last_lines(&log).unwrap();
        assert!(told.starts_with("line | line | line | red | xxx") && told.ends_with("x | \u{ff}"), "{told}");
        assert!(told.len() < 2 * LINE);
    }

    #[test]
    fn a_log_is_searched_to_its_end_and_in_lines_without_one() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        fs::write(&log, format!("{}\nfailed: 507018", "y ".repeat(1 << 17))).unwrap();
        assert_eq!(errors_in(&log).unwrap().len(), 1);
        fs::write(&log, [0xff; 100]).unwrap();
        assert_eq!(errors_in(&log).unwrap(), []);
    }

    #[cfg(unix)]
    #[test]
    fn what_is_left_of_a_code_is_hinted_at() {
        use std::os::unix::process::ExitStatusExt as _;
        let of = |code: i32| truncated(ExitStatus::from_raw(code << 8));
        assert!(of(507_018 & 0xff).unwrap().contains("507018 RT_AICPU_EXCEPTION"));
        assert!(of(137).unwrap().ends_with("507017 RT_AICPU_TIMEOUT, or signal 9)"));
        assert_eq!((of(0), of(1), of(2)), (None, None, None));
        assert_eq!(truncated(ExitStatus::from_raw(9)), None);
    }
}

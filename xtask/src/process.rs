//! Commands of the user, which may hang: filled in, run in a process group of their own with a time limit, and ended
//! with all that they started, also when this program is asked to end.

use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::exit_codes::Code;
use crate::refusal::Refusal;
use crate::report::text::quoted;

/// What a command has to clean up after it was asked to end.
const GRACE: Duration = Duration::from_secs(2);
/// Longest pause between two looks at a command.
const PAUSE: Duration = Duration::from_millis(50);

/// Whether somebody asked this program to end: Ctrl-C, SIGTERM, a closed terminal.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    raised: Arc<AtomicBool>,
    /// Whether a command is running, which has to be ended first.
    running: Arc<AtomicBool>,
    /// What goes with the program.
    temporary: Arc<Mutex<Vec<PathBuf>>>,
}

impl Interrupt {
    /// From now on such a request sets a flag and no longer ends the program.
    ///
    /// # Errors
    /// The system does not allow it.
    pub fn catch() -> Result<Self, Refusal> {
        let interrupt = Self::default();
        let theirs = interrupt.clone();
        handle(move || theirs.raised.store(true, Ordering::SeqCst))?;
        Ok(interrupt)
    }

    /// From now on such a request sets a flag where a command is running, which is ended then, and otherwise ends the
    /// program, as it does by itself.
    ///
    /// # Errors
    /// The system does not allow it.
    pub fn catch_while_running() -> Result<Self, Refusal> {
        let interrupt = Self::default();
        let theirs = interrupt.clone();
        handle(move || {
            theirs.raised.store(true, Ordering::SeqCst);
            if !theirs.running.load(Ordering::SeqCst) {
                theirs.end();
            }
        })?;
        Ok(interrupt)
    }

    /// A directory that is removed where such a request ends the program, which drops nothing then.
    pub fn removes(&self, directory: PathBuf) {
        self.temporary.lock().unwrap_or_else(PoisonError::into_inner).push(directory);
    }

    /// Ends the program as such a request does.
    pub fn end(&self) -> ! {
        for directory in self.temporary.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // What cannot be removed keeps nobody from ending.
            let _ = std::fs::remove_dir_all(directory);
        }
        std::process::exit(Code::Unjudged.number().into())
    }

    /// Whether it was asked.
    pub fn raised(&self) -> bool {
        self.raised.load(Ordering::SeqCst)
    }
}

fn handle(raise: impl FnMut() + Send + 'static) -> Result<(), Refusal> {
    ctrlc::set_handler(raise).map_err(|error| {
        Refusal::Request(format!("Ctrl-C cannot be caught, so that commands could not be ended after it: {error}"))
    })
}

/// How a command ended.
#[derive(Debug)]
pub enum Ended {
    /// By itself, or by a signal of somebody else.
    Exited(ExitStatus),
    /// Its time was over.
    TimedOut,
    /// This program was asked to end.
    Interrupted,
}

/// Runs a command to its end, without input.
///
/// # Errors
/// It cannot be started.
pub fn run(command: &mut Command, timeout: Option<Duration>, interrupt: &Interrupt) -> io::Result<Ended> {
    // Before the flag is read: whoever raises it either sees this or is seen.
    interrupt.running.store(true, Ordering::SeqCst);
    let ended = if interrupt.raised() { Ok(Ended::Interrupted) } else { watch(command, timeout, interrupt) };
    interrupt.running.store(false, Ordering::SeqCst);
    ended
}

/// Starts a command and waits until it ends, or has to.
fn watch(command: &mut Command, timeout: Option<Duration>, interrupt: &Interrupt) -> io::Result<Ended> {
    alone(command);
    let started = Instant::now();
    let mut child = command.stdin(Stdio::null()).spawn()?;
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Ended::Exited(status));
        }
        let ended = if interrupt.raised() {
            Some(Ended::Interrupted)
        } else {
            timeout.is_some_and(|timeout| started.elapsed() >= timeout).then_some(Ended::TimedOut)
        };
        if let Some(ended) = ended {
            end(&mut child)?;
            return Ok(ended);
        }
        sleep(pause);
        pause = PAUSE.min(pause * 2);
    }
}

/// A process group of its own: what the terminal sends goes to this program alone, which then ends the whole group.
#[cfg(unix)]
pub fn alone(command: &mut Command) {
    std::os::unix::process::CommandExt::process_group(command, 0);
}

/// Elsewhere there are no process groups.
#[cfg(not(unix))]
pub fn alone(_: &mut Command) {}

/// Ends a command and what it started: first asked, then forced.
#[cfg(unix)]
fn end(child: &mut Child) -> io::Result<()> {
    use rustix::process::{Pid, Signal, kill_process_group};
    let group = Pid::from_child(child);
    // A group that is gone already is what was asked for.
    let _ = kill_process_group(group, Signal::TERM);
    let asked = Instant::now();
    while asked.elapsed() < GRACE && child.try_wait()?.is_none() {
        sleep(PAUSE);
    }
    let _ = kill_process_group(group, Signal::KILL);
    child.wait().map(|_| ())
}

/// Ends a command.
#[cfg(not(unix))]
fn end(child: &mut Child) -> io::Result<()> {
    let _ = GRACE;
    child.kill()?;
    child.wait().map(|_| ())
}

/// A command with `{name}` replaced by what it names, quoted where the shell would read something else into it. What is
/// put in is not looked at again.
pub fn filled(command: &str, names: &[(&str, Option<&str>)]) -> String {
    let (mut text, mut rest) = (String::with_capacity(command.len()), command);
    while let Some(at) = rest.find('{') {
        let (before, field) = rest.split_at(at);
        text.push_str(before);
        let named = names.iter().find_map(|&(name, value)| {
            let after = field.strip_prefix('{')?.strip_prefix(name)?.strip_prefix('}')?;
            Some((quoted(value?), after))
        });
        rest = match named {
            Some((value, after)) => {
                text.push_str(&value);
                after
            }
            None => {
                text.push('{');
                &field[1..]
            }
        };
    }
    text + rest
}

/// A command line, as the shell runs it.
pub fn shell(text: &str) -> Command {
    let (shell, flag) = if cfg!(windows) { ("cmd", "/C") } else { ("sh", "-c") };
    let mut command = Command::new(shell);
    command.args([flag, text]);
    command
}

/// How a command ended, in words that follow its name: `exited with 3`.
pub fn words(status: ExitStatus) -> String {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return format!("was ended by signal {signal}");
    }
    status.code().map_or_else(|| "was ended".to_owned(), |code| format!("exited with {code}"))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn flag(raised: bool) -> Interrupt {
        Interrupt { raised: Arc::new(AtomicBool::new(raised)), ..Interrupt::default() }
    }

    #[test]
    fn placeholders_are_replaced_and_quoted() {
        let names = [("out", Some("/a b/it's")), ("case", None), ("commit", Some("12ab"))];
        assert_eq!(filled("run {commit} {case} ${HOME} {}", &names), "run 12ab {case} ${HOME} {}");
        assert_eq!(filled("> {out}/x", &names), r"> '/a b/it'\''s'/x");
        assert_eq!(filled("{out}", &[("out", Some("/t/assay-bisect-x1/out"))]), "/t/assay-bisect-x1/out");
        let nested = [("a", Some("{b}")), ("b", Some("; rm"))];
        assert_eq!(filled("{{a}}{b}{a", &nested), "{'{b}'}'; rm'{a");
    }

    #[test]
    fn commands_end_in_each_of_their_ways() {
        let ended = |script: &str| match run(&mut shell(script), None, &flag(false)).unwrap() {
            Ended::Exited(status) => words(status),
            other => format!("{other:?}"),
        };
        assert_eq!(ended("exit 3"), "exited with 3");
        assert_eq!(ended("kill -9 $$"), "was ended by signal 9");
        assert!(run(&mut Command::new("no-such-program-at-all"), None, &flag(false)).is_err());
        assert!(matches!(run(&mut shell("exit 0"), None, &flag(true)).unwrap(), Ended::Interrupted));
    }

    #[test]
    fn what_a_command_started_ends_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = shell("sh -c 'sleep 1; echo late > late' & echo started; wait");
        let ended = run(command.current_dir(dir.path()), Some(Duration::from_millis(200)), &flag(false)).unwrap();
        assert!(matches!(ended, Ended::TimedOut));
        sleep(Duration::from_millis(1500));
        assert!(!dir.path().join("late").exists());
    }
}

//! States of a device's run, fetched one at a time from a command. Each is had once: it is kept until the end, or in a
//! directory of the user's for the next call. A command that hangs is ended with its process group.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use device::{Bundle, CAPTURES_FILE, LayerStates, Moment, StateSizes, state_name};
use goldens::layerwise::{Fetch, FetchError};
use half::bf16;
use ndarray::Array2;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::process::{self, Ended, Interrupt};
use crate::refusal::Refusal;

/// What has to be filled in.
const FIELDS: [&str; 3] = ["{layer}", "{step}", "{out}"];
/// The file that says whose states a directory holds.
const OF: &str = "fetched.json";
/// Characters of what a command said that are repeated.
const SAID: usize = 600;

/// A command in which layer, step and file can be filled in.
pub fn template(text: &str) -> Result<String, String> {
    match FIELDS.into_iter().find(|field| !text.contains(field)) {
        Some(missing) => Err(format!("the command has to name {missing}, which is filled in for each state")),
        None => Ok(text.to_owned()),
    }
}

/// Fetches states.
pub struct Fetcher {
    command: String,
    limit: Duration,
    sizes: StateSizes,
    folder: Folder,
    interrupt: Interrupt,
}

/// Where fetched files are.
enum Folder {
    /// Until the end.
    Temporary(tempfile::TempDir),
    /// For the next call too.
    Kept(PathBuf),
}

/// Whose states a directory holds.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
struct Of {
    format: u32,
    case: String,
    /// SHA-256 of case file and captures.
    bundle: String,
    command: String,
}

impl Fetcher {
    /// A fetcher whose directory is there and is this bundle's.
    ///
    /// # Errors
    /// The directory holds something else, or cannot be written; signals cannot be caught.
    pub fn new(
        command: &str,
        limit: Duration,
        sizes: StateSizes,
        keep: Option<&Path>,
        bundle: &Bundle,
    ) -> Result<Self, Refusal> {
        let folder = match keep {
            None => tempfile::tempdir().map(Folder::Temporary).map_err(|error| {
                Refusal::Request(format!("no temporary directory for what is fetched: {error}; name one with --keep"))
            })?,
            Some(folder) => {
                claim(folder, command, bundle)?;
                Folder::Kept(folder.to_path_buf())
            }
        };
        let interrupt = Interrupt::catch_while_running()?;
        if let Folder::Temporary(folder) = &folder {
            interrupt.removes(folder.path().to_path_buf());
        }
        Ok(Self { command: command.to_owned(), limit, sizes, folder, interrupt })
    }

    fn folder(&self) -> &Path {
        match &self.folder {
            Folder::Temporary(folder) => folder.path(),
            Folder::Kept(folder) => folder,
        }
    }

    /// Reads a file that has to hold a state.
    fn read(&self, file: &Path, layer: usize, moment: Moment) -> Result<Array2<bf16>, FetchError> {
        let mut states =
            LayerStates::open(file, &self.sizes).map_err(|error| FetchError::Wrong(error.to_string()))?.states;
        states.remove(&(layer, moment)).ok_or_else(|| {
            FetchError::Wrong(format!("{}: does not hold `{}`", file.display(), state_name(layer, moment)))
        })
    }
}

impl Fetch for Fetcher {
    fn fetch(&mut self, layer: usize, moment: Moment) -> Result<Array2<bf16>, FetchError> {
        let name = state_name(layer, moment);
        let failed = |said: String| FetchError::Failed(said);
        let system = |error: io::Error| FetchError::Failed(error.to_string());
        let file = self.folder().join(format!("{name}.safetensors"));
        if file.symlink_metadata().is_ok() {
            return self.read(&file, layer, moment);
        }
        // Whole or not there: what a command leaves when it fails is no state.
        let part = self.folder().join(format!("{name}.part"));
        let log = self.folder().join(format!("{name}.log"));
        let remove = |path: &Path| match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(system(error)),
            _ => Ok(()),
        };
        remove(&part)?;
        let line = filled(&self.command, layer, moment, &part);
        let ended =
            run(&line, self.limit, &log, &self.interrupt).map_err(|error| failed(format!("`{line}`: {error}")))?;
        let kept = match &self.folder {
            Folder::Kept(_) => format!("; all of it is in {}", log.display()),
            Folder::Temporary(_) => String::new(),
        };
        let said = || match last_words(&log) {
            Some(said) => format!(", having said: {said}{kept}"),
            None => ", having said nothing".to_owned(),
        };
        let why = match ended {
            Ended::Exited(status) if status.success() => None,
            Ended::Exited(status) => Some(format!("{}{}", process::words(status), said())),
            Ended::TimedOut => {
                let seconds = self.limit.as_secs();
                Some(format!("took longer than {seconds} s and was ended; --timeout gives it longer{}", said()))
            }
            Ended::Interrupted => Some("was interrupted".to_owned()),
        };
        if let Some(why) = why {
            remove(&part)?;
            return Err(failed(format!("`{line}` {why}")));
        }
        if part.symlink_metadata().is_err() {
            return Err(failed(format!("`{line}` ended well but did not write {}{}", part.display(), said())));
        }
        let state = self.read(&part, layer, moment)?;
        fs::rename(&part, &file).map_err(system)?;
        Ok(state)
    }
}

/// Makes a directory, or sees that it is this bundle's and command's.
fn claim(folder: &Path, command: &str, bundle: &Bundle) -> Result<(), Refusal> {
    let write = |error| Refusal::Write { path: folder.to_path_buf(), error };
    let mut hash = Sha256::new();
    for file in [bundle.case.path.clone(), bundle.dir.join(CAPTURES_FILE)] {
        match fs::read(&file) {
            Ok(bytes) => hash.update(&bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Refusal::Request(format!("{}: {error}", file.display()))),
        }
        hash.update([0]);
    }
    let digest: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    let of = Of { format: 1, case: bundle.case.name.clone(), bundle: digest, command: command.to_owned() };
    fs::create_dir_all(folder).map_err(write)?;
    let file = folder.join(OF);
    match fs::read(&file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if fs::read_dir(folder).map_err(write)?.next().is_some() {
                return Err(Refusal::Request(format!(
                    "--keep {}: is not empty and holds nothing that was fetched; name another directory",
                    folder.display()
                )));
            }
            let text = serde_json::to_vec_pretty(&of).map_err(|error| Refusal::Request(error.to_string()))?;
            device::write_atomically(&file, &text).map_err(write)
        }
        Err(error) => Err(Refusal::Request(format!("{}: {error}", file.display()))),
        Ok(bytes) => match serde_json::from_slice::<Of>(&bytes) {
            Ok(held) if held == of => Ok(()),
            Ok(held) => {
                let what = if held.command == of.command { "another bundle" } else { "another command" };
                Err(Refusal::Request(format!(
                    "--keep {}: holds states that were fetched for {what}; remove it, or name another directory",
                    folder.display()
                )))
            }
            Err(error) => Err(Refusal::Request(format!("{}: {error}; remove the directory", file.display()))),
        },
    }
}

/// The command for one state.
fn filled(command: &str, layer: usize, moment: Moment, out: &Path) -> String {
    let (layer, step, out) = (layer.to_string(), moment.to_string(), out.display().to_string());
    process::filled(command, &[("layer", Some(&layer)), ("step", Some(&step)), ("out", Some(&out))])
}

/// Runs a shell command to its end. What it says goes to `log`.
fn run(line: &str, limit: Duration, log: &Path, interrupt: &Interrupt) -> io::Result<Ended> {
    let log = File::create(log)?;
    let mut command = process::shell(line);
    command.stdout(log.try_clone()?).stderr(log);
    process::run(&mut command, Some(limit), interrupt)
}

/// The end of what a command said.
fn last_words(log: &Path) -> Option<String> {
    use std::io::{Read as _, Seek as _, SeekFrom};
    let mut file = File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(SAID as u64))).ok()?;
    let mut bytes = Vec::new();
    file.take(SAID as u64).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes).trim().to_owned();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_names_what_is_filled_in() {
        assert!(template("get {layer} {step} {out}").is_ok());
        assert!(template("get {layer} {step}").unwrap_err().contains("{out}"));
        let line = filled("get {layer} {step} {out}", 3, Moment::Prefill, Path::new("it's here"));
        assert_eq!(line, r"get 3 prefill 'it'\''s here'");
    }

    #[cfg(unix)]
    #[test]
    fn what_a_command_said_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let run = |line: &str, limit| run(line, limit, &log, &Interrupt::default()).unwrap();
        let ended = run("echo so far; sleep 600 & sleep 600", Duration::from_millis(300));
        assert!(matches!(ended, Ended::TimedOut), "{ended:?}");
        assert_eq!(last_words(&log).as_deref(), Some("so far"));
        let ended = run("exit 3", Duration::from_secs(60));
        assert!(matches!(ended, Ended::Exited(status) if status.code() == Some(3)), "{ended:?}");
        assert_eq!(last_words(&log), None);
    }
}

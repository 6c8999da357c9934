//! Git, as far as a search needs it: one program run in one directory, without hooks, questions or a pager.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use goldens::commits;

use crate::process;
use crate::refusal::Refusal;
use crate::report::text::plain;

/// Variables that lead git elsewhere than to the directory it is started in; hooks of git set them.
const ELSEWHERE: [&str; 7] = [
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_PREFIX",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
];

/// Git in a directory.
#[derive(Clone, Debug)]
pub struct Git {
    dir: PathBuf,
}

/// Takes from a command the variables that lead git elsewhere.
pub fn here(command: &mut Command) -> &mut Command {
    ELSEWHERE.iter().fold(command, |command, name| command.env_remove(name))
}

impl Git {
    /// Git in `dir`.
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_path_buf() }
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Runs git, and gives what it ended with and said.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn output(&self, args: &[&str]) -> Result<Output, Refusal> {
        let mut command = Command::new("git");
        command.args(["--no-pager", "-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false", "-C"]);
        command.arg(&self.dir).args(args).envs([("LC_ALL", "C"), ("GIT_TERMINAL_PROMPT", "0")]).stdin(Stdio::null());
        // A Ctrl-C is for this program: git goes on to the end of what it does.
        process::alone(&mut command);
        here(&mut command).output().map_err(|error| {
            Refusal::Request(format!("git cannot be started: {error}; install it, or put it into PATH"))
        })
    }

    /// Runs git and gives what it printed, without the last line break.
    ///
    /// # Errors
    /// It fails; what it said is in the error.
    pub fn text(&self, args: &[&str]) -> Result<String, Refusal> {
        let output = self.output(args)?;
        if output.status.success() {
            let text = String::from_utf8_lossy(&output.stdout);
            return Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned());
        }
        let (dir, told) = (self.dir.display(), said(&output));
        Err(Refusal::Request(format!("{dir}: git {} {}: {told}", args.join(" "), process::words(output.status))))
    }

    /// Whether git ends well.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn holds(&self, args: &[&str]) -> Result<bool, Refusal> {
        Ok(self.output(args)?.status.success())
    }

    /// The commit that `rev` means; `flag` is where it was given.
    ///
    /// # Errors
    /// It means none.
    pub fn commit(&self, flag: &str, rev: &str) -> Result<String, Refusal> {
        let wanted = format!("{rev}^{{commit}}");
        let output = self.output(&["rev-parse", "--verify", "--quiet", "--end-of-options", &wanted])?;
        let hash = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if output.status.success() && !hash.is_empty() {
            return Ok(hash);
        }
        Err(Refusal::Request(format!(
            "{flag} {rev}: {} has no such commit; name a hash, a branch or a tag (a shallow clone lacks older ones: \
             git fetch --unshallow)",
            self.dir.display()
        )))
    }

    /// What there is to say of a commit.
    ///
    /// # Errors
    /// Git fails.
    pub fn describe(&self, hash: &str) -> Result<commits::Commit, Refusal> {
        let format = "--format=%H%x00%s%x00%an <%ae>%x00%aI";
        let text = self.text(&["log", "-1", "--no-show-signature", "--no-color", format, hash, "--"])?;
        let mut fields = text.splitn(4, '\0').map(str::to_owned);
        let mut next = || fields.next().unwrap_or_default();
        Ok(commits::Commit { hash: next(), subject: next(), author: next(), date: next() })
    }
}

/// What git said, in one line.
pub fn said(output: &Output) -> String {
    let bytes = if output.stderr.is_empty() { &output.stdout } else { &output.stderr };
    plain(String::from_utf8_lossy(bytes).trim()).into_owned()
}

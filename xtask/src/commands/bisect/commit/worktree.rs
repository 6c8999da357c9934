//! A work tree beside the user's own, in which commits are checked out, built and run. The user's tree, index, branch
//! and bisections are never touched; the work tree is removed whatever happens, with all that git knows about it.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::git::Git;
use crate::output;
use crate::refusal::Refusal;
use crate::report::text::plain;

/// A detached work tree of a repository in a temporary directory. Dropped, it is removed.
pub struct Worktree {
    repository: Git,
    tree: Git,
    folder: TempDir,
}

impl Worktree {
    /// Checks `commit` out beside the repository.
    ///
    /// # Errors
    /// There is no room for it, or git refuses.
    pub fn add(repository: &Git, commit: &str) -> Result<Self, Refusal> {
        let unwritable = |error| Refusal::Write { path: std::env::temp_dir(), error };
        let folder = tempfile::Builder::new().prefix("assay-bisect-").tempdir().map_err(unwritable)?;
        let path = folder.path().canonicalize().map_err(unwritable)?.join("assay-bisect");
        // Made before git runs: a checkout that fails half-way is removed too.
        let tree = Self { repository: repository.clone(), tree: Git::new(&path), folder };
        let place = text(&path)?;
        repository.text(&["worktree", "add", "--quiet", "--force", "--detach", "--", place, commit])?;
        Ok(tree)
    }

    /// Git in the work tree.
    pub fn git(&self) -> &Git {
        &self.tree
    }

    /// A directory beside the tree for what commits give, removed with it.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.tree.dir().parent().unwrap_or(self.folder.path()).join(name)
    }
}

impl Drop for Worktree {
    fn drop(&mut self) {
        let Ok(place) = text(self.tree.dir()) else { return };
        // Twice forced: it may hold anything, and a command may have locked it.
        let remove = ["worktree", "remove", "--force", "--force", "--", place];
        let removed = self.repository.holds(&remove).unwrap_or(false);
        if !removed && self.tree.dir().exists() {
            let _ = std::fs::remove_dir_all(self.tree.dir());
            let _ = self.repository.holds(&remove);
        }
        if self.tree.dir().exists() {
            let place = plain(place);
            output::stderr(&format!(
                "warning: {place}: cannot be removed whole; remove it, then run: git worktree prune\n"
            ));
        }
    }
}

/// A path for git's command line.
fn text(path: &Path) -> Result<&str, Refusal> {
    path.to_str().ok_or_else(|| {
        Refusal::Request(format!("{}: is no UTF-8; set TMPDIR to a directory whose name is", path.display()))
    })
}

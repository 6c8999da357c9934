//! Where the library is: at the place that a variable names, in the folders that CANN's installer uses, or where the
//! system's loader finds it.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::symbols::MissingSymbol;

/// File name of the library.
pub const LIBRARY: &str = "libascendcl.so";
/// The variable that names the library itself; nowhere else is looked then.
pub const EXPLICIT: &str = "ASSAY_ASCENDCL";

/// Variables that name a folder of CANN, in the order in which they are looked at.
const HOMES: [&str; 2] = ["ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"];
/// Folders of CANN where nothing names one: the toolkit's, of new and old installers, and those of the smaller
/// packages.
const INSTALLED: [&str; 5] = [
    "/usr/local/Ascend/cann",
    "/usr/local/Ascend/ascend-toolkit/latest",
    "/usr/local/Ascend/latest",
    "/usr/local/Ascend/nnae/latest",
    "/usr/local/Ascend/nnrt/latest",
];

/// The files to try, best first; the last has no folder and is left to the loader.
#[must_use]
pub fn places(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
    if let Some(explicit) = variable(EXPLICIT) {
        return vec![explicit.into()];
    }
    let homes = HOMES.iter().filter_map(|name| variable(name)).map(PathBuf::from);
    let of_user = variable("HOME").map(|home| Path::new(&home).join("Ascend/ascend-toolkit/latest"));
    let folders = homes.chain(INSTALLED.map(PathBuf::from)).chain(of_user);
    let mut places = Vec::new();
    for place in folders.map(|folder| folder.join("lib64").join(LIBRARY)).chain([PathBuf::from(LIBRARY)]) {
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

/// A file that was tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Searched {
    /// The file.
    pub place: PathBuf,
    /// Why it is not the library.
    pub why: String,
}

/// The library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LoadError {
    /// It is nowhere.
    #[error(
        "AscendCL ({LIBRARY}) was not found; looked at {}; install CANN, source its set_env.sh, or set {EXPLICIT} to \
         the library",
        listed(.0)
    )]
    Absent(Vec<Searched>),
    /// What was found lacks a symbol without which nothing works.
    #[error("{}: {source}", place.display())]
    Incomplete {
        /// The library.
        place: PathBuf,
        /// What it lacks.
        source: MissingSymbol,
    },
}

/// Where was looked, and what was in the way where a file is there.
fn listed(searched: &[Searched]) -> String {
    let mut text = String::new();
    for (index, Searched { place, why }) in searched.iter().enumerate() {
        let comma = if index == 0 { "" } else { ", " };
        // Writing to a string cannot fail.
        let _ = write!(text, "{comma}{} ({why})", place.display());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with<'a>(pairs: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<OsString> + 'a {
        |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).into())
    }

    #[test]
    fn an_explicit_library_is_the_only_place() {
        let found = places(with(&[(EXPLICIT, "/opt/mine.so"), ("ASCEND_HOME_PATH", "/opt/cann")]));
        assert_eq!(found, [PathBuf::from("/opt/mine.so")]);
    }

    #[test]
    fn named_folders_come_first_and_the_loader_last() {
        let found = places(with(&[("ASCEND_HOME_PATH", "/opt/cann"), (EXPLICIT, ""), ("HOME", "/home/u")]));
        assert_eq!(found[0], Path::new("/opt/cann/lib64/libascendcl.so"));
        assert_eq!(found[1], Path::new("/usr/local/Ascend/cann/lib64/libascendcl.so"));
        assert_eq!(found[found.len() - 2], Path::new("/home/u/Ascend/ascend-toolkit/latest/lib64/libascendcl.so"));
        assert_eq!(found[found.len() - 1], Path::new(LIBRARY));
    }

    #[test]
    fn a_folder_named_twice_is_looked_at_once() {
        let both =
            [("ASCEND_TOOLKIT_HOME", "/usr/local/Ascend/latest"), ("ASCEND_HOME_PATH", "/usr/local/Ascend/latest")];
        let found = places(with(&both));
        assert_eq!(found.iter().filter(|place| place.starts_with("/usr/local/Ascend/latest")).count(), 1);
        assert!(places(|_| None).len() == INSTALLED.len() + 1);
    }

    #[test]
    fn what_was_searched_is_said_with_what_to_do() {
        let searched = Searched { place: "/a/b.so".into(), why: "not there".into() };
        let text = LoadError::Absent(vec![searched.clone(), searched]).to_string();
        assert!(text.contains("/a/b.so (not there), /a/b.so (not there)") && text.contains(EXPLICIT), "{text}");
    }
}

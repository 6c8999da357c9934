//! What `assay doctor` found, for a person: one fact a line, and below what is not there what it would be good for.

use std::fmt::Write as _;

use super::text::plain;

/// Columns of the names.
const NAMES: usize = 13;

/// One thing that was looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// What it is.
    pub name: &'static str,
    /// What was found, a line each.
    pub found: Vec<String>,
    /// What cannot be done without it, and how to get it, where it is not there.
    pub lacking: Option<String>,
}

impl Fact {
    /// Something that is there.
    pub fn new(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, found: vec![found.into()], lacking: None }
    }
}

/// All of it.
pub fn render(facts: &[Fact]) -> String {
    let mut text = String::new();
    for fact in facts {
        let mut name = fact.name;
        for line in fact.found.iter().chain(&fact.lacking) {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name:<NAMES$} {}", plain(line));
            name = "";
        }
    }
    text
}

/// Bytes in the largest unit of which there is one: `1.5 GiB`.
pub fn size(bytes: u64) -> String {
    let units = [(1u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use snapbox::{assert_data_eq, str};

    use super::*;

    #[test]
    fn facts_are_aligned_and_gaps_say_what_they_cost() {
        let absent = Fact {
            name: "AscendCL",
            found: vec!["not found; looked at".into(), "  /a/libascendcl.so (not there)".into()],
            lacking: Some("with it: assay gate --device".into()),
        };
        assert_data_eq!(
            render(&[Fact::new("version", "assay 1"), absent, Fact::new("CPU features", "a b")]),
            str![[r#"
version       assay 1
AscendCL      not found; looked at
                /a/libascendcl.so (not there)
              with it: assay gate --device
CPU features  a b

"#]]
        );
        assert!(!render(&[Fact::new("version", "a\u{1b}b")]).contains('\u{1b}'));
    }

    #[test]
    fn sizes_have_the_unit_that_fits() {
        let sizes = [0, 1023, 1 << 10, 3 << 29, 5 << 40].map(size);
        assert_eq!(sizes, ["0 bytes", "1023 bytes", "1.0 KiB", "1.5 GiB", "5.0 TiB"]);
    }
}

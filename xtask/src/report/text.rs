//! Pieces of text that several formats share: numbers, lists of rows, names made safe to print.

use std::borrow::Cow;
use std::path::{Component, Path};

/// Text from a case, a capture or the system, safe to print: line breaks and tabs become spaces, other
/// control characters and those that reorder text are spelled out, so that a name can neither move the
/// cursor nor look like another.
pub fn plain(text: &str) -> Cow<'_, str> {
    let unsafe_character = |c: char| c.is_control() || is_reordering(c) || matches!(c, '\u{fffe}' | '\u{ffff}');
    if !text.contains(unsafe_character) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        match character {
            '\n' | '\r' | '\t' => out.push(' '),
            other if unsafe_character(other) => out.extend(other.escape_unicode()),
            other => out.push(other),
        }
    }
    Cow::Owned(out)
}

fn is_reordering(character: char) -> bool {
    matches!(character, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A path as one would type it: without detours, and relative to where the command runs when it lies below.
pub fn place(path: &Path) -> String {
    let detours = path.components().any(|component| component == Component::ParentDir);
    let direct = if detours { path.canonicalize().ok() } else { None };
    let path = direct.as_deref().unwrap_or(path);
    let here = std::env::current_dir().ok();
    here.and_then(|here| path.strip_prefix(here).ok()).unwrap_or(path).display().to_string()
}

/// A count with its thousands apart: `40,960`.
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `1 row`, `2 rows`.
pub fn plural(count: u64, one: &str) -> String {
    format!("{} {one}{}", grouped(count), if count == 1 { "" } else { "s" })
}

/// An argument as a shell takes it: quoted where the shell would read something else into it.
pub fn quoted(argument: &str) -> String {
    let also = if cfg!(windows) { "\\" } else { ",=%" };
    let bare = |c: char| c.is_ascii_alphanumeric() || "-_./:+@".contains(c) || also.contains(c);
    if !argument.is_empty() && argument.chars().all(bare) {
        argument.to_owned()
    } else if cfg!(windows) {
        format!("\"{argument}\"")
    } else {
        format!("'{}'", argument.replace('\'', r"'\''"))
    }
}

/// A commit's hash as people name it.
pub fn short(hash: &str) -> &str {
    hash.get(..12).unwrap_or(hash)
}

/// Ascending numbers with neighbours joined: `1-3, 7`.
pub fn ranges(numbers: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let run = |&(first, last): &(usize, usize)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    };
    runs.iter().map(run).collect::<Vec<_>>().join(", ")
}

/// `row 1`, `rows 1-3`; nothing for no numbers.
pub fn labelled(one: &str, numbers: &[usize]) -> Option<String> {
    match numbers {
        [] => None,
        [only] => Some(format!("{one} {only}")),
        many => Some(format!("{one}s {}", ranges(many))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_lists_read_well() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_000), "1,000");
        assert_eq!(grouped(u64::MAX), "18,446,744,073,709,551,615");
        assert_eq!(ranges(&[]), "");
        assert_eq!(ranges(&[1, 2, 3, 7, 9, 10]), "1-3, 7, 9, 10");
        assert_eq!(ranges(&[5, 5, 4]), "5, 5, 4");
        assert_eq!(ranges(&[usize::MAX, 0]), format!("{}, 0", usize::MAX));
        assert_eq!(labelled("row", &[1]).unwrap(), "row 1");
        assert_eq!(labelled("page", &[1, 2, 3]).unwrap(), "pages 1-3");
        assert_eq!(plural(1, "tie"), "1 tie");
    }

    #[cfg(unix)]
    #[test]
    fn arguments_are_quoted_where_a_shell_would_take_them_apart() {
        assert_eq!(quoted("goldens/bundles/mini"), "goldens/bundles/mini");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted(r"a\b"), r"'a\b'");
        assert_eq!(quoted("a;b"), "'a;b'");
        assert_eq!(quoted("it's"), "'it'\\''s'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn names_cannot_move_the_cursor() {
        assert_eq!(plain("mini/full"), "mini/full");
        assert_eq!(plain("a\u{1b}[2Jb\nc\u{202e}d"), "a\\u{1b}[2Jb c\\u{202e}d");
    }
}

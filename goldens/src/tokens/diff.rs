//! Differences that a person reads: texts with what is gone and what is new in their place, ids line by line.

use similar::{ChangeTag, TextDiff};

/// Both texts in one: what only the first has as `[-gone-]`, what only the second has as `{+new+}`. By character, since
/// many languages do not part their words.
#[must_use]
pub fn texts(before: &str, after: &str) -> String {
    let diff = TextDiff::from_chars(before, after);
    let (mut out, mut open) = (String::new(), ChangeTag::Equal);
    let mut switch = |out: &mut String, tag: ChangeTag| {
        if tag != open {
            out.push_str(match open {
                ChangeTag::Delete => "-]",
                ChangeTag::Insert => "+}",
                ChangeTag::Equal => "",
            });
            out.push_str(match tag {
                ChangeTag::Delete => "[-",
                ChangeTag::Insert => "{+",
                ChangeTag::Equal => "",
            });
            open = tag;
        }
    };
    for change in diff.iter_all_changes() {
        switch(&mut out, change.tag());
        out.push_str(change.value());
    }
    switch(&mut out, ChangeTag::Equal);
    out
}

/// Lines of the first that are gone with `-`, lines of the second that are new with `+`, each with its context; nothing
/// where the two are equal.
#[must_use]
pub fn lines(before: &str, after: &str) -> String {
    TextDiff::from_lines(before, after).unified_diff().context_radius(2).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_changed_stands_in_its_place() {
        assert_eq!(texts("北京的故宫", "北京的建筑"), "北京的[-故宫-]{+建筑+}");
        assert_eq!(texts("same", "same"), "same");
        assert_eq!(texts("", "new"), "{+new+}");
        assert_eq!(texts("gone", ""), "[-gone-]");
    }

    proptest! {
        #[test]
        fn both_texts_are_in_it(before in "[a-c北京]{0,12}", after in "[a-c北京]{0,12}") {
            let diff = texts(&before, &after);
            let side = |gone: [&str; 2], kept: [&str; 2]| {
                let mut out = String::new();
                let mut rest = diff.as_str();
                while let Some((head, tail)) = rest.split_once(gone[0]) {
                    out.push_str(head);
                    rest = tail.split_once(gone[1]).unwrap().1;
                }
                out.push_str(rest);
                out.replace(kept[0], "").replace(kept[1], "")
            };
            prop_assert_eq!(side(["{+", "+}"], ["[-", "-]"]), before);
            prop_assert_eq!(side(["[-", "-]"], ["{+", "+}"]), after);
        }
    }
}

//! What launching a kernel shows beyond what it gave: writes outside of its tensors, elements that it never wrote,
//! launches that differ from one another. Each is a check of its own, because a kernel may be right in every number
//! and break these.

use device::acl::{Observed, Side, Stray, Unwritten};

use crate::place::{counted, number};
use crate::repeat::compare_runs;
use crate::report::{CaseReport, Check, Verdict};

/// The check on a case that a device could not run ([`CaseReport::unjudged`]).
pub const DEVICE: &str = "device";

/// Findings of one kind that a report lists.
const LISTED: usize = 4;

/// Adds the checks `bounds`, `written` and, where the kernel was launched more than once, `repeatable` to the report
/// on what the first launch gave, and says where it ran.
pub fn add_checks(report: &mut CaseReport, observed: &Observed) {
    let soc = observed.soc.as_deref().unwrap_or("a chip without a name");
    report.source = format!("{}, launched on ascend:{} ({soc})", report.source, observed.device);
    add(report, bounds(&observed.strays));
    add(report, written(&observed.unwritten));
    if observed.launches > 1 {
        add(report, repeatable(observed));
    }
}

fn add(report: &mut CaseReport, (check, tensor): (Check, Option<String>)) {
    if check.verdict == Verdict::Fail {
        report.verdict = Verdict::Fail;
        report.first_divergence = report.first_divergence.take().or(tensor);
    }
    report.checks.push(check);
}

fn check(name: &str, verdict: Verdict, detail: String) -> Check {
    Check { name: name.to_owned(), verdict, detail }
}

/// The first few findings, and how many more there are.
fn listed(mut findings: Vec<String>) -> String {
    let more = findings.len().saturating_sub(LISTED);
    findings.truncate(LISTED);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    findings.join("; ") + &more
}

/// Nothing but the kernel's own tensors was written.
fn bounds(strays: &[Stray]) -> (Check, Option<String>) {
    const NAME: &str = "bounds";
    let Some(first) = strays.first() else {
        let detail = "nothing was written outside of the tensors or into those that are only read".to_owned();
        return (check(NAME, Verdict::Pass, detail), None);
    };
    let words = |stray: &Stray| {
        let Stray { tensor, side, offset, bytes, found, launch } = stray;
        let bytes = number(*bytes, "byte", "bytes");
        let place = match side {
            Side::Before => {
                format!("before {tensor}, the nearest {} before its first", number(*offset, "byte", "bytes"))
            }
            Side::After => {
                format!("behind {tensor}, the nearest {} behind its last", number(offset + 1, "byte", "bytes"))
            }
            Side::Inside => format!("in {tensor}, which the kernel only reads, from byte {offset} on"),
        };
        let found: Vec<String> = found.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{bytes} written {place} (launch {launch}; found {})", found.join(" "))
    };
    (check(NAME, Verdict::Fail, listed(strays.iter().map(words).collect())), Some(first.tensor.clone()))
}

/// Every element of what the kernel writes was written.
fn written(unwritten: &[Unwritten]) -> (Check, Option<String>) {
    const NAME: &str = "written";
    let Some(first) = unwritten.first() else {
        return (check(NAME, Verdict::Pass, "no element holds what it held before the launch".to_owned()), None);
    };
    let words = |unwritten: &Unwritten| {
        let Unwritten { tensor, elements, of, first: [row, column], rows, launch } = unwritten;
        let rows = counted("row", rows);
        format!(
            "{tensor}: {elements} of {of} elements were never written, first [{row}, {column}] ({rows}; \
             launch {launch})"
        )
    };
    (check(NAME, Verdict::Fail, listed(unwritten.iter().map(words).collect())), Some(first.tensor.clone()))
}

/// Every launch gave the bytes of the first.
fn repeatable(observed: &Observed) -> (Check, Option<String>) {
    const NAME: &str = "repeatable";
    let launches = observed.launches;
    let Some(differing) = &observed.differing else {
        let detail = format!("{launches} launches from the same state gave the same bytes");
        return (check(NAME, Verdict::Pass, detail), None);
    };
    let others = launches - 1;
    let tail = format!("{} of {others} further launches differ from the first", differing.launches);
    let later = format!("launch {}", differing.launch);
    match compare_runs(&later, "launch 1", &observed.captures, &differing.captures) {
        (found, tensor) if found.verdict == Verdict::Fail => {
            (check(NAME, Verdict::Fail, format!("{}; {tail}", found.detail)), tensor)
        }
        // The bytes differ and no number does.
        _ => {
            (check(NAME, Verdict::Fail, format!("{later} and launch 1 differ in the bits of NaN alone; {tail}")), None)
        }
    }
}

#[cfg(test)]
mod tests {
    use device::Captures;
    use device::acl::Differing;

    use super::*;

    fn observed() -> Observed {
        Observed {
            captures: Captures::default(),
            launches: 3,
            strays: Vec::new(),
            unwritten: Vec::new(),
            differing: None,
            device: 1,
            soc: Some("Ascend910B2".to_owned()),
        }
    }

    fn report() -> CaseReport {
        let case = cases::new_case(cases::NewCase::named("t", "mini").unwrap()).unwrap();
        CaseReport { verdict: Verdict::Pass, checks: Vec::new(), ..CaseReport::unjudged(&case, DEVICE, "x") }
    }

    fn stray(side: Side, offset: usize) -> Stray {
        Stray { tensor: "out".into(), side, offset, bytes: 2, found: vec![0x11, 0x1f], launch: 1 }
    }

    #[test]
    fn a_clean_run_passes_every_check() {
        let mut report = report();
        add_checks(&mut report, &observed());
        assert_eq!((report.verdict, report.checks.len()), (Verdict::Pass, 3));
        assert!(report.source.ends_with(", launched on ascend:1 (Ascend910B2)"), "{}", report.source);
        let mut once = self::report();
        add_checks(&mut once, &Observed { launches: 1, ..observed() });
        assert_eq!(once.checks.iter().map(|check| check.name.as_str()).collect::<Vec<_>>(), ["bounds", "written"]);
    }

    #[test]
    fn stray_writes_are_named_with_their_place() {
        let mut report = report();
        let strays = vec![stray(Side::Before, 4), stray(Side::After, 0), stray(Side::Inside, 9)];
        add_checks(&mut report, &Observed { strays, ..observed() });
        assert_eq!((report.verdict, report.first_divergence.as_deref()), (Verdict::Fail, Some("out")));
        let detail = &report.checks[0].detail;
        for words in [
            "2 bytes written before out, the nearest 4 bytes before its first (launch 1; found 11 1f)",
            "2 bytes written behind out, the nearest 1 byte behind its last",
            "2 bytes written in out, which the kernel only reads, from byte 9 on",
        ] {
            assert!(detail.contains(words), "{words}: {detail}");
        }
    }

    #[test]
    fn a_finding_that_came_first_stays_the_first() {
        let mut report = CaseReport { first_divergence: Some("q_proj".into()), ..report() };
        let unwritten = Unwritten { tensor: "out".into(), elements: 5, of: 9, first: [1, 2], rows: vec![1], launch: 1 };
        add_checks(&mut report, &Observed { unwritten: vec![unwritten; 6], ..observed() });
        assert_eq!(report.first_divergence.as_deref(), Some("q_proj"));
        let detail = &report.checks[1].detail;
        assert!(
            detail.starts_with("out: 5 of 9 elements were never written, first [1, 2] (row 1; launch 1); "),
            "{detail}"
        );
        assert!(detail.ends_with("; and 2 more"), "{detail}");
    }

    #[test]
    fn a_difference_in_bytes_alone_fails_too() {
        let mut report = report();
        let differing = Some(Differing { launch: 2, launches: 1, captures: Captures::default() });
        add_checks(&mut report, &Observed { differing, ..observed() });
        assert_eq!(report.verdict, Verdict::Fail);
        let detail = &report.checks[2].detail;
        assert!(
            detail.contains("launch 2 and launch 1")
                && detail.ends_with("1 of 2 further launches differ from the first"),
            "{detail}"
        );
    }
}

//! The page over hand-made reports: its structure, that it needs nothing from anywhere, that hostile names stay names,
//! and that it stays small.

use std::collections::BTreeSet;

use goldens::Mark;
use goldens::maps::{Axis, Distances, Grid, MOST_ACROSS, MOST_DOWN, TensorMap};
use goldens::report::{Candidate, CaseReport, Explanation, GateReport, Reproduced, TensorReport};
use snapbox::{assert_data_eq, file};

use super::super::tests::{failing, hostile, nan, passing, tensor, ties, tokens, unjudged};
use super::{Facts, Page, render};

fn page(cases: Vec<CaseReport>) -> String {
    let command = ["assay", "gate", "a b", "--html", "report.html"].map(str::to_owned).to_vec();
    let run = Facts { version: "1.2.3".into(), kernels: "plain".into(), false_alarm: 1e-6, command };
    render(&Page { report: &GateReport::new(cases), cases: &[], run: &run })
}

/// The page without its style, a tag a line.
fn outline(page: &str) -> String {
    let (before, rest) = page.split_once("<style>").unwrap();
    let (_, after) = rest.split_once("</style>").unwrap();
    format!("{before}{after}").replace("><", ">\n<")
}

/// A map of 16 rows and 5120 columns with one drifting element, ties in a row, and flips here and there.
fn map() -> Box<TensorMap> {
    let mut grid = Grid::new(Axis::whole("row", 16, MOST_DOWN), Axis::whole("column", 5120, MOST_ACROSS));
    let mut distances = Distances::default();
    for row in 0..16 {
        for column in 0..5120 {
            let (mark, distance) = match (row, column) {
                (3, 77) => (Mark::Drift, 128),
                (5, 0..200) => (Mark::Tie, 1),
                (_, column) if column % 397 == 0 => (Mark::Flip, 2),
                _ => (Mark::Exact, 0),
            };
            grid.add(row, column, mark);
            distances.add(mark, Some(distance));
        }
    }
    Box::new(TensorMap { grids: vec![grid], distances })
}

/// A failing case with everything that a page can show of a layer.
fn full() -> CaseReport {
    let mut case = failing();
    case.tensors[1].map = Some(map());
    let candidate = |id: &str, score| Candidate {
        id: id.into(),
        site: "attn_out".into(),
        description: "attention saw one page too many".into(),
        score,
        reproduced: Reproduced { exact: 40_959, elements: 40_960 },
    };
    case.explanation = Some(Explanation {
        candidates: vec![candidate("attention.length_page", 0.9999), candidate("attention.scale", 0.25)],
        reproduced: Reproduced { exact: 40_959, elements: 40_960 },
        visible: true,
        notes: vec!["rests on attn_out alone".into()],
    });
    case
}

fn all() -> Vec<CaseReport> {
    vec![passing(), full(), nan(), unjudged(), ties(), tokens(), hostile()]
}

#[test]
fn structure_of_a_failing_case() {
    assert_data_eq!(outline(&page(vec![full()])), file!["snapshots/failing.html"].raw());
}

#[test]
fn structure_of_a_token_run() {
    let page = outline(&page(vec![tokens()]));
    let (from, to) = (page.find("<h3>Tokens").unwrap(), page.find("<h3>Tensors").unwrap());
    assert_data_eq!(&page[from..to], file!["snapshots/tokens.html"].raw());
}

#[test]
fn a_refusal_has_a_page() {
    let report = GateReport::refused("case.yaml:3: <wrong>");
    let run = Facts { version: "1".into(), kernels: "plain".into(), false_alarm: 1e-6, command: vec![] };
    let page = render(&Page { report: &report, cases: &[], run: &run });
    assert!(page.contains("case.yaml:3: &lt;wrong&gt;") && page.contains("ERROR"), "{page}");
}

#[test]
fn nothing_is_loaded_from_anywhere() {
    let page = page(all());
    for reference in ["http://", "https://", "src=", "url(", "@import", "<script", "<link", "<iframe", "<img", "<base"]
    {
        assert!(!page.contains(reference), "{reference}");
    }
    let ids: Vec<&str> = page.split(" id=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    let unique: BTreeSet<&str> = ids.iter().copied().collect();
    assert_eq!(ids.len(), unique.len(), "an id is there twice");
    let targets: Vec<&str> = page.split("href=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    assert!(targets.len() > 5);
    for target in targets {
        assert!(target.strip_prefix('#').is_some_and(|id| unique.contains(id)), "{target} leads nowhere");
    }
}

#[test]
fn hostile_names_stay_names() {
    let page = page(vec![hostile()]);
    assert!(!page.contains(['\u{0}', '\u{1b}', '\u{202e}', '\u{ffff}']));
    assert!(!page.contains("<b>") && !page.contains("\"q\""));
    assert_eq!(page.matches("<article").count(), 1);
    assert!(page.contains("a|b &lt;b&gt;&amp;amp; &quot;q&quot;"));
    // No page has any of these of its own.
    let of_hostile: CaseReport = CaseReport { name: "<script>x</script><style>".into(), ..hostile() };
    let page = super::tests::page(vec![of_hostile]);
    assert_eq!((page.matches("<script").count(), page.matches("<style").count()), (0, 1));
}

#[test]
fn the_first_divergence_and_its_consequences_are_told_apart() {
    let page = page(vec![full()]);
    let stage = |name: &str| {
        let at = page.find(&format!("</span> {name}</a>")).unwrap();
        let from = page[..at].rfind("<li").unwrap();
        let end = from + page[from..].find("</li>").unwrap();
        page[from..end].to_owned()
    };
    assert!(stage("attention").contains("first divergence"), "{}", stage("attention"));
    assert!(stage("out").contains("a consequence"), "{}", stage("out"));
    assert!(stage("q_projection").contains("exact"), "{}", stage("q_projection"));
    assert!(page.contains("not captured"));
    // One element of 81,920 drifts: its cell, its row's letter and its row's text show it.
    assert!(page.contains("row 3: 5,120 elements: 1 drift"), "the row says so");
    assert_eq!(page.matches(r#"<text class="l d""#).count(), 1);
}

#[test]
fn a_page_of_full_size_maps_stays_small() {
    // Marks that change from cell to cell: nothing can be drawn in one.
    let grid = |rows| {
        let mut grid = Grid::new(Axis::whole("row", rows, MOST_DOWN), Axis::whole("column", 17_408, MOST_ACROSS));
        for row in 0..rows {
            for column in 0..17_408 {
                grid.add(row, column, if column / 136 % 2 == 0 { Mark::Drift } else { Mark::Flip });
            }
        }
        grid
    };
    let tensor = |name: &str, rows| {
        let map = TensorMap { grids: vec![grid(rows), grid(16)], distances: Distances::default() };
        TensorReport { exact: 0, map: Some(Box::new(map)), ..tensor(name, 1) }
    };
    let tensors = (0..27).map(|number| tensor("a_tensor", if number == 10 { 64 } else { 16 })).collect();
    let page = page(vec![CaseReport { tensors, ..passing() }]);
    assert!(page.len() < 4_000_000, "{} bytes", page.len());
}

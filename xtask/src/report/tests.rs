//! Snapshots of every format over hand-made reports: a pass, a failure, NaN, nothing to judge, and names
//! that try to break out of their format. `SNAPSHOTS=overwrite cargo test -p xtask` accepts a change.

use std::collections::BTreeMap;

use goldens::report::{
    CaseReport, Cause, Check, Element, GateReport, Number, PolicyReport, StepVerdict, TensorReport, TokenStep, Verdict,
};
use snapbox::{assert_data_eq, file, str};

use super::{github, human, json, junit};

fn cause(description: &str) -> Cause {
    let (id, site) = ("attention.length_page".to_owned(), "attn_out".to_owned());
    Cause { id, site, description: description.to_owned(), confidence: 0.987 }
}

pub(super) fn tensor(name: &str, elements: u64) -> TensorReport {
    TensorReport {
        name: name.into(),
        verdict: Verdict::Pass,
        forced: true,
        elements,
        exact: elements,
        explained: 0,
        explained_flips: 0,
        explained_ties: 0,
        unexplained: 0,
        nonfinite: 0,
        exactly_half: 0,
        worst: None,
        worst_elements: vec![],
        first: None,
        rows_failing: vec![],
        heads_failing: vec![],
        pages_failing: vec![],
        notes: vec![],
        map: None,
    }
}

pub(super) fn check(name: &str, verdict: Verdict, detail: &str) -> Check {
    Check { name: name.into(), verdict, detail: detail.into() }
}

pub(super) fn element(index: &[usize], device: (f64, u32), reference: (f64, u32), ulps: Option<u64>) -> Element {
    Element {
        index: index.to_vec(),
        device: Number(device.0),
        reference: Number(reference.0),
        device_bits: format!("0x{:04x}", device.1),
        reference_bits: format!("0x{:04x}", reference.1),
        ulps,
    }
}

fn policy() -> PolicyReport {
    let rules = [("out", "ties_away"), ("normed", "ties_away"), ("k_cache", "rne"), ("attn", "not exercised")];
    PolicyReport {
        asked: "auto".into(),
        rules: rules.map(|(site, rule)| (site.into(), rule.into())).into(),
        ties: BTreeMap::from([("out".into(), 8501), ("normed".into(), 1)]),
        violations: vec![],
    }
}

pub(super) fn passing() -> CaseReport {
    let explained =
        TensorReport { exact: 40_950, explained: 10, explained_flips: 8, explained_ties: 2, ..tensor("out", 40_960) };
    CaseReport {
        name: "mini/full".into(),
        path: "goldens/bundles/mini/full/case.yaml".into(),
        verdict: Verdict::Pass,
        seconds: 0.8125,
        source: "emulated, kernel 5b8ce4d6".into(),
        checks: vec![
            check("padding_rows", Verdict::Pass, "no padding rows"),
            check("finite", Verdict::Pass, "every captured value is finite"),
            check("kv_values", Verdict::Unjudged, "k_written_rows and k_written_values were not captured"),
        ],
        tensors: vec![tensor("attn_out", 40_960), explained],
        policy: policy(),
        coverage: ["attn", "prob", "silu", "mlp_in"]
            .map(|site| format!("no exact tie at {site}: its tie rule was not exercised"))
            .into(),
        warnings: vec![],
        first_divergence: None,
        consequences: vec![],
        cause: None,
        explanation: None,
        steps: vec![],
    }
}

pub(super) fn failing() -> CaseReport {
    let worst = element(&[1, 77], (0.5, 0x3f00), (0.25, 0x3e80), Some(128));
    let attn = TensorReport {
        verdict: Verdict::Fail,
        exact: 40_950,
        explained: 8,
        explained_flips: 8,
        unexplained: 2,
        exactly_half: 1,
        worst: Some(worst.clone()),
        worst_elements: vec![worst, element(&[3, 0], (-1.5, 0xbfc0), (-3.0, 0xc040), Some(128))],
        rows_failing: vec![1, 2, 3],
        heads_failing: vec![0],
        notes: vec!["head 0 of row 1 matches an attended length of 144, not 128".into()],
        ..tensor("attn_out", 40_960)
    };
    let out = TensorReport {
        verdict: Verdict::Fail,
        forced: false,
        exact: 30_000,
        unexplained: 10_960,
        worst: Some(element(&[1, 0], (2.0, 0x4000), (1.0, 0x3f80), Some(128))),
        rows_failing: vec![1],
        ..tensor("out", 40_960)
    };
    CaseReport {
        name: "mini/active2".into(),
        path: "bundle/case.yaml".into(),
        verdict: Verdict::Fail,
        source: "npu, kernel 5b8ce4d6".into(),
        checks: vec![
            check("padding_rows", Verdict::Fail, "rows 2-15 of attn_out are zero, not row 0"),
            check("finite", Verdict::Pass, "every captured value is finite"),
        ],
        tensors: vec![tensor("q_proj", 40_960), attn, out],
        policy: PolicyReport {
            violations: vec!["out is held to rne, but 8501 ties went away from zero".into()],
            ..policy()
        },
        warnings: vec!["rows 0 and 2 share slot 4993".into()],
        first_divergence: Some("attn_out".into()),
        consequences: vec!["out".into()],
        cause: Some(cause("attention saw one page too many")),
        steps: vec![],
        ..passing()
    }
}

/// Nothing drifts, but ties went by a rule that was not asked for.
pub(super) fn ties() -> CaseReport {
    let note = "out: 4076 of 8197 ties went away from zero, where ties to even was asked for";
    let out = TensorReport {
        verdict: Verdict::Fail,
        exact: 36_884,
        explained: 4_076,
        explained_ties: 4_076,
        worst: Some(element(&[1, 549], (-4.468_75, 0xc08f), (-4.4375, 0xc08e), Some(1))),
        notes: vec![note.into()],
        ..tensor("out", 40_960)
    };
    CaseReport {
        name: "mini/ties".into(),
        verdict: Verdict::Fail,
        tensors: vec![out],
        policy: PolicyReport { asked: "rne".into(), violations: vec![note.into()], ..policy() },
        coverage: vec![],
        first_divergence: Some("out".into()),
        ..passing()
    }
}

pub(super) fn nan() -> CaseReport {
    let worst = element(&[9, 100], (f64::NAN, 0x7fc0), (f64::NEG_INFINITY, 0xff80), None);
    let out = TensorReport {
        verdict: Verdict::Fail,
        exact: 81_919,
        unexplained: 1,
        nonfinite: 1,
        worst: Some(worst.clone()),
        worst_elements: vec![worst],
        rows_failing: vec![9],
        ..tensor("out", 81_920)
    };
    CaseReport {
        name: "14b/nan".into(),
        verdict: Verdict::Fail,
        source: String::new(),
        checks: vec![check("finite", Verdict::Fail, "out: 1 non-finite value, at [9, 100]")],
        tensors: vec![out],
        policy: PolicyReport::default(),
        coverage: vec![],
        first_divergence: Some("out".into()),
        ..passing()
    }
}

pub(super) fn unjudged() -> CaseReport {
    CaseReport {
        name: "mini/no-captures".into(),
        verdict: Verdict::Unjudged,
        checks: vec![check("captured", Verdict::Unjudged, "the bundle holds no captures.safetensors")],
        tensors: vec![],
        policy: PolicyReport::default(),
        coverage: vec![],
        ..passing()
    }
}

/// Names and texts that would end a cell, a tag, a line or an attribute.
pub(super) fn hostile() -> CaseReport {
    let text = "a|b <b>&amp; \"q\" `c` *d* [l](u) ]]> \u{1b}[31m\u{0}\u{202e}x\ny\u{ffff}";
    CaseReport {
        name: text.into(),
        path: text.into(),
        verdict: Verdict::Fail,
        source: text.into(),
        checks: vec![check(text, Verdict::Fail, text)],
        tensors: vec![TensorReport { verdict: Verdict::Fail, notes: vec![text.into()], ..tensor(text, 1) }],
        policy: PolicyReport { asked: text.into(), violations: vec![text.into()], ..policy() },
        coverage: vec![text.into()],
        warnings: vec![text.into()],
        consequences: vec![text.into()],
        cause: Some(cause(text)),
        steps: vec![],
        ..passing()
    }
}

pub(super) fn tokens() -> CaseReport {
    let step = |step, device, reference, margin: f64, verdict, note: Option<&str>| TokenStep {
        row: 1,
        step,
        device,
        reference,
        margin: Number(margin),
        bound: Number(0.000_15),
        verdict,
        note: note.map(str::to_owned),
    };
    CaseReport {
        name: "mini/tokens".into(),
        steps: vec![
            step(0, 17, Some(17), 0.75, StepVerdict::Agree, None),
            step(1, 105, Some(243), 0.000_125, StepVerdict::NearTie, Some("either token is right")),
            step(2, 9, Some(8), 1.5, StepVerdict::Fail, Some("not the largest logit")),
            step(3, -1, None, f64::NAN, StepVerdict::Fail, Some("a | b")),
        ],
        verdict: Verdict::Fail,
        ..passing()
    }
}

fn report() -> GateReport {
    GateReport::new(vec![passing(), failing(), nan(), unjudged(), ties()])
}

fn uncoloured(text: &str) -> String {
    anstream::adapter::strip_str(text).to_string()
}

#[test]
fn human_report() {
    assert_data_eq!(uncoloured(&human::render(&report(), false)), file!["snapshots/human.txt"].raw());
    let all_pass = GateReport::new(vec![passing()]);
    assert_data_eq!(uncoloured(&human::render(&all_pass, false)), file!["snapshots/human_pass.txt"].raw());
    assert_data_eq!(uncoloured(&human::render(&all_pass, true)), file!["snapshots/human_pass_verbose.txt"].raw());
}

#[test]
fn json_report() {
    assert_data_eq!(json::render(&report()), file!["snapshots/report.json"].raw());
    let read: serde_json::Value = serde_json::from_str(&json::render(&report())).unwrap();
    assert_eq!(read["cases"][2]["tensors"][0]["worst"]["device"], "NaN");
    assert_eq!(read["cases"][2]["tensors"][0]["worst"]["reference"], "-Infinity");
    assert_eq!(read["cases"][0]["cause"], serde_json::Value::Null);
}

#[test]
fn a_refusal_is_exactly_three_keys() {
    let read: serde_json::Value = serde_json::from_str(&json::refused("case.yaml:3: \"no\"")).unwrap();
    assert_eq!(read, serde_json::json!({"verdict": "error", "message": "case.yaml:3: \"no\"", "cases": []}));
}

#[test]
fn junit_report() {
    assert_data_eq!(junit::render(&report()).unwrap(), file!["snapshots/junit.xml"].raw());
    let refused = GateReport::refused("case.yaml:3: wrong");
    assert_data_eq!(junit::render(&refused).unwrap(), file!["snapshots/junit_refused.xml"].raw());
}

#[test]
fn github_report() {
    assert_data_eq!(github::render(&report()), file!["snapshots/github.md"].raw());
}

#[test]
fn ids_are_shown_as_the_numbers_that_they_are() {
    let bits = |id: i64| format!("0x{id:016x}");
    let element = Element {
        index: vec![0, 5],
        device: Number(4_611_686_018_427_387_905_i64 as f64),
        reference: Number(-1.0),
        device_bits: bits(4_611_686_018_427_387_905),
        reference_bits: bits(-1),
        ulps: None,
    };
    let expected = "[0, 5]: device 4611686018427387905 (0x4000000000000001), contract -1 (0xffffffffffffffff)";
    assert_eq!(super::summary::element(&element), expected);
}

#[test]
fn steps_of_a_token_run_are_shown_where_they_are_not_plain_agreement() {
    let report = GateReport::new(vec![tokens()]);
    let human = uncoloured(&human::render(&report, false));
    let (from, to) = (human.find("  4 tokens").unwrap(), human.find("  policy auto").unwrap());
    assert_data_eq!(
        &human[from..to],
        str![[r#"
  4 tokens: 1 agree, 1 near tie, 2 fail; smallest margins 0.000125 (row 1, step 1), 0.750 (row 1, step 0), 1.500 (row 1, step 2)
    row   step   device   reference     margin      bound   verdict    remark
   ──────────────────────────────────────────────────────────────────────────────────────────
      1      1      105         243   0.000125   0.000150   near tie   either token is right
      1      2        9           8      1.500   0.000150   fail       not the largest logit
      1      3       -1        none        NaN   0.000150   fail       a | b

"#]]
    );
    let markdown = github::render(&report);
    assert!(markdown.contains("| 1 | 2 | 9 | 8 | 1.500 | 0.000150 | fail | not the largest logit |"), "{markdown}");
    assert!(markdown.contains("a \\| b"), "{markdown}");
    let xml = junit::render(&report).unwrap();
    assert!(xml.contains("name=\"tokens\"") && xml.contains("verdict near tie, remark either token is right"), "{xml}");
    let read: serde_json::Value = serde_json::from_str(&json::render(&report)).unwrap();
    let step = &read["cases"][0]["steps"][1];
    assert_eq!((&step["verdict"], &step["device"], &step["reference"]), (&"near_tie".into(), &105.into(), &243.into()));
    assert_eq!(read["cases"][0]["steps"][3]["margin"], "NaN");
    let all: serde_json::Value = serde_json::from_str(&json::render(&GateReport::new(vec![passing()]))).unwrap();
    assert_eq!(all["cases"][0]["steps"], serde_json::json!([]));
}

#[test]
fn hostile_names_stay_names() {
    let report = GateReport::new(vec![hostile()]);
    let (human, xml, markdown) =
        (human::render(&report, true), junit::render(&report).unwrap(), github::render(&report));
    // The only escape sequences are the report's own.
    assert!(!uncoloured(&human).contains('\u{1b}'));
    assert!(!human.contains("\u{1b}[31mx"));
    for text in [&human, &xml, &markdown] {
        assert!(!text.contains(['\u{0}', '\u{202e}']), "{text:?}");
    }
    let tag_count = |tag: &str| xml.matches(tag).count();
    assert_eq!((tag_count("<testsuite "), tag_count("<testcase "), tag_count("<failure")), (1, 3, 3));
    assert!(!xml.contains('\u{ffff}') && !xml.contains("<b>"));
    assert!(!markdown.contains("<b>"));
    // Every table row keeps its number of cells.
    for line in markdown.lines().filter(|line| line.starts_with('|')) {
        let cells = line.replace("\\\\", "").replace("\\|", "").matches('|').count() - 1;
        assert!(cells == 4 || cells == 8, "{line}");
    }
}

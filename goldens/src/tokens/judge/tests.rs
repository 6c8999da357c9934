//! Each verdict on hand-made rows, with a reference that is a table.

use std::path::PathBuf;

use super::super::golden::tests::{golden, row, step};
use super::*;
use crate::tokens::Row;

/// A reference whose steps are the same whatever it is fed: `firm` choices of 50, 51, ... from step 0 on.
struct Table {
    steps: Vec<Step>,
    asked: Vec<(Vec<usize>, Vec<usize>)>,
}

impl Table {
    fn new() -> Self {
        let steps = (0..8).map(|n| step(&[(50 + n, 9.0, 0.0), (60 + n, 8.75, 0.125), (70 + n, 1.0, 0.125)]));
        Self { steps: steps.collect(), asked: Vec::new() }
    }
}

impl Follow for Table {
    fn follow(&mut self, rows: &[Forced<'_>]) -> Result<Vec<Vec<Step>>, GenerateError> {
        self.asked.extend(rows.iter().map(|row| (row.prompt.to_vec(), row.tokens.to_vec())));
        Ok(rows.iter().map(|row| self.steps[..row.tokens.len()].to_vec()).collect())
    }
}

/// A row whose steps choose these ids; at each, 7 is within reach, 8 is not.
fn choosing(ids: &[usize], stop: Stop) -> Row {
    let steps = ids.iter().map(|&id| step(&[(id, 9.0, 0.0), (7, 8.75, 0.125), (8, 3.0, 0.125)]));
    row(&[1, 2, 3], stop, steps.collect())
}

fn small() -> Golden {
    golden(vec![choosing(&[20, 21, 22, 23], Stop::MaxNewTokens), choosing(&[30, 31, 99], Stop::Eos)])
}

fn dump(rows: &[&[i64]]) -> Dump {
    Dump { path: PathBuf::from("dump.json"), rows: rows.iter().map(|row| row.to_vec()).collect(), ..Dump::default() }
}

const RIGHT: [&[i64]; 2] = [&[20, 21, 22, 23], &[30, 31, 99]];

fn job<'a>(golden: &'a Golden, dump: &'a Dump) -> Check<'a> {
    Check { golden, dump, row: None, before: None, decode: None }
}

/// The report on row 0 of these ids, row 1 being right.
fn alone(ids: &[i64]) -> TokensReport {
    check(&job(&small(), &dump(&[ids, RIGHT[1]])), None).unwrap()
}

fn followed(ids: &[i64]) -> (TokensReport, Table) {
    let mut table = Table::new();
    let report = check(&job(&small(), &dump(&[ids, RIGHT[1]])), Some(&mut table)).unwrap();
    (report, table)
}

fn words(report: &TokensReport, row: usize) -> Vec<&'static str> {
    let word = |step: &StepReport| match step.verdict {
        StepVerdict::Agree => "agree",
        StepVerdict::NearTie => "near_tie",
        StepVerdict::Fail => "fail",
        StepVerdict::Unjudged => "unjudged",
    };
    report.steps.iter().filter(|step| step.row == row).map(word).collect()
}

fn only(report: &TokensReport) -> (usize, FindingKind, &str) {
    assert_eq!(report.findings.len(), 1, "{:?}", report.findings);
    let finding = &report.findings[0];
    (finding.step, finding.kind, &finding.message)
}

#[test]
fn the_reference_own_tokens_pass() {
    let report = alone(RIGHT[0]);
    assert_eq!(report.verdict, Verdict::Pass);
    assert_eq!((words(&report, 0), words(&report, 1)), (vec!["agree"; 4], vec!["agree"; 3]));
    assert!(report.findings.is_empty() && report.remarks.is_empty());
}

#[test]
fn a_near_tie_is_open_without_a_model() {
    let report = alone(&[20, 7, 22, 23]);
    assert_eq!(report.verdict, Verdict::Unjudged);
    assert_eq!(words(&report, 0), ["agree", "near_tie", "unjudged", "unjudged"]);
    let (step, kind, message) = only(&report);
    assert_eq!((step, kind), (1, FindingKind::NearTie));
    assert!(message.contains("device's 7 has logit 8.75") && message.contains("21 has 9, 0.25 apart"), "{message}");
    assert!(report.remarks[0].contains("row 0") && report.remarks[0].contains("--model"), "{:?}", report.remarks);
}

#[test]
fn a_near_tie_at_the_last_step_leaves_nothing_open() {
    let report = alone(&[20, 21, 22, 7]);
    assert_eq!(report.verdict, Verdict::Pass);
    assert_eq!(words(&report, 0), ["agree", "agree", "agree", "near_tie"]);
    assert!(report.remarks.is_empty());
}

#[test]
fn after_a_near_tie_the_model_follows_the_device() {
    let (report, table) = followed(&[20, 7, 52, 63]);
    assert_eq!(table.asked, [(vec![1, 2, 3], vec![20, 7, 52, 63])]);
    assert_eq!(report.verdict, Verdict::Pass);
    assert_eq!(words(&report, 0), ["agree", "near_tie", "agree", "near_tie"]);
    let forced: Vec<bool> = report.steps.iter().filter(|step| step.row == 0).map(|step| step.forced).collect();
    assert_eq!(forced, [false, false, true, true]);

    let (report, _) = followed(&[20, 7, 72, 53]);
    assert_eq!(report.verdict, Verdict::Fail);
    assert_eq!(words(&report, 0), ["agree", "near_tie", "fail", "agree"]);
    assert_eq!((report.findings[1].step, report.findings[1].kind), (2, FindingKind::WrongToken));
}

#[test]
fn a_wrong_token_fails_at_its_step_with_both_logits() {
    let report = alone(&[20, 21, 8, 23]);
    assert_eq!(report.verdict, Verdict::Fail);
    assert_eq!(words(&report, 0), ["agree", "agree", "fail", "unjudged"]);
    let (step, kind, message) = only(&report);
    assert_eq!((step, kind), (2, FindingKind::WrongToken));
    assert!(message.contains("device's 8 has logit 3, the reference's 22 has 9, 6 apart"), "{message}");
    let told = &report.steps[2];
    assert_eq!((told.device_logit, told.reference_logit), (Some(Number(3.0)), Some(Number(9.0))));
    // An id that the golden keeps no logit of.
    let report = alone(&[20, 21, 44, 23]);
    assert!(only(&report).2.contains("none of the 3 best") && only(&report).2.contains("at least 6 apart"));
    // Later steps are still compared where the model is there.
    let (report, _) = followed(&[20, 21, 8, 53]);
    assert_eq!(words(&report, 0), ["agree", "agree", "fail", "agree"]);
    assert_eq!(report.verdict, Verdict::Fail);
}

#[test]
fn ids_after_a_stop_id_fail_at_the_first() {
    let report = check(&job(&small(), &dump(&[RIGHT[0], &[30, 31, 99, 5, 5]])), None).unwrap();
    let (step, kind, message) = only(&report);
    assert_eq!((step, kind), (3, FindingKind::PastStop));
    assert!(message.contains("stop id from generation config not honoured: 99 at step 2"), "{message}");
    assert!(message.contains("2 more ids follow it, 5 first"), "{message}");
    assert_eq!(words(&report, 1), ["agree", "agree", "agree", "fail", "unjudged"]);
    assert!(report.remarks.is_empty(), "no model could say more: {:?}", report.remarks);
    assert_eq!(report.verdict, Verdict::Fail);
}

#[test]
fn ids_that_are_no_tokens_are_named() {
    for (id, kind, words) in [
        (100, FindingKind::PaddingVocabulary, "id 100 is padding of the vocabulary (100 to 109)"),
        (109, FindingKind::PaddingVocabulary, "the reference chose 21, logit 9"),
        (110, FindingKind::OutsideVocabulary, "id 110 is no token: ids are 0 to 99"),
        (-5, FindingKind::OutsideVocabulary, "id -5"),
        (i64::MIN, FindingKind::OutsideVocabulary, "id -9223372036854775808"),
    ] {
        let (report, table) = followed(&[20, id, 22, 23]);
        let (step, found, message) = only(&report);
        assert_eq!((step, found), (1, kind), "{id}");
        assert!(message.contains(words), "{message}");
        // No model can be given it.
        assert!(table.asked.is_empty());
        assert_eq!(self::words(&report, 0), ["agree", "fail", "unjudged", "unjudged"]);
    }
}

#[test]
fn a_constant_stream_points_one_stage_back() {
    let (report, _) = followed(&[0, 0, 0, 0]);
    let first = &report.findings[0];
    assert_eq!((first.step, first.kind), (0, FindingKind::ConstantStream));
    assert!(
        first.message.contains("every id of the row is 0") && first.message.contains("zero or NaN"),
        "{}",
        first.message
    );
    assert!(report.findings[1..].iter().all(|finding| finding.kind == FindingKind::WrongToken));
    assert_eq!(report.verdict, Verdict::Fail);
    let report = alone(&[105, 105, 105, 105]);
    assert_eq!(report.findings[0].kind, FindingKind::ConstantStream);
}

#[test]
fn rows_end_where_they_have_to() {
    let report = alone(&[20, 21]);
    let (step, kind, message) = only(&report);
    assert_eq!((step, kind), (2, FindingKind::TooShort));
    assert!(message.contains("ends after 2 tokens; expected 4"), "{message}");
    assert_eq!(words(&report, 0), ["agree", "agree", "fail"]);
    assert_eq!(report.steps[2].reference, Some(22));

    assert_eq!(only(&alone(&[])).1, FindingKind::TooShort);
    let report = alone(&[20, 21, 22, 23, 24, 25]);
    let (step, kind, message) = only(&report);
    assert_eq!((step, kind), (4, FindingKind::TooLong));
    assert!(message.contains("may have 4 tokens, and 2 more follow"), "{message}");

    // On its own path a row may end earlier or later than the golden's.
    let report = check(&job(&small(), &dump(&[RIGHT[0], &[30, 31, 7, 5]])), Some(&mut Table::new())).unwrap();
    assert!(report.findings.iter().all(|finding| finding.kind != FindingKind::TooLong));
    let report = check(&job(&small(), &dump(&[RIGHT[0], &[30, 31, 7]])), Some(&mut Table::new())).unwrap();
    assert!(report.findings.iter().any(|finding| finding.kind == FindingKind::TooShort));
}

#[test]
fn max_seq_len_ends_a_row_too() {
    let mut golden = small();
    golden.limits.max_seq_len = 5;
    golden.rows.truncate(1);
    golden.rows[0].steps.truncate(2);
    golden.rows[0].stop = Stop::MaxSeqLen;
    let verdict = |ids: &[i64]| check(&job(&golden, &dump(&[ids])), None).unwrap().verdict;
    assert_eq!(verdict(&[20, 21]), Verdict::Pass);
    assert_eq!(verdict(&[20, 21, 22]), Verdict::Fail);
}

#[test]
fn a_wrong_number_of_rows_fails_and_one_row_can_be_chosen() {
    let golden = small();
    let one = dump(&RIGHT[1..]);
    let report = check(&job(&golden, &dump(&RIGHT[..1])), None).unwrap();
    assert_eq!((report.verdict, only(&report).1), (Verdict::Fail, FindingKind::Rows));
    assert_eq!(words(&report, 0), ["agree"; 4]);
    let three = dump(&[RIGHT[0], RIGHT[1], RIGHT[0]]);
    assert_eq!(check(&job(&golden, &three), None).unwrap().verdict, Verdict::Fail);

    let chosen = |dump: &Dump, row| check(&Check { row: Some(row), ..job(&golden, dump) }, None).unwrap();
    assert_eq!(chosen(&one, 1).verdict, Verdict::Pass);
    assert_eq!(chosen(&one, 0).verdict, Verdict::Fail);
    assert_eq!(chosen(&three, 1).verdict, Verdict::Pass);
    assert_eq!(chosen(&three, 2).verdict, Verdict::Fail);
    assert_eq!(chosen(&one, 7).findings[0].kind, FindingKind::Rows);
}

#[test]
fn an_earlier_dump_says_whether_it_was_so_before() {
    let golden = small();
    let now = dump(&[&[0, 0, 0, 0], RIGHT[1]]);
    for (before, expected) in [(now.clone(), true), (dump(&RIGHT), false), (dump(&[]), false)] {
        let report = check(&Check { before: Some(&before), ..job(&golden, &now) }, None).unwrap();
        assert_eq!(only(&report).0, 0);
        assert_eq!(report.findings[0].already_before, Some(expected));
    }
}

#[test]
fn two_runs_are_compared_in_time_and_never_judged_by_it() {
    let golden = small();
    let timed = |seconds: f64| Dump { seconds: vec![vec![seconds; 3]], ..dump(&RIGHT) };
    let (now, before) = (timed(0.5), timed(0.25));
    let report = check(&Check { before: Some(&before), ..job(&golden, &now) }, None).unwrap();
    assert_eq!(report.verdict, Verdict::Pass);
    let timing = report.timing.unwrap();
    assert_eq!((timing.median_seconds, timing.before_median_seconds, timing.ratio), (0.5, Some(0.25), Some(2.0)));
    assert!(check(&job(&golden, &dump(&RIGHT)), None).unwrap().timing.is_none());
}

#[test]
fn an_id_that_the_golden_cannot_place_is_unjudged() {
    let crowd = step(&[(20, 9.0, 0.0), (21, 8.9, 0.125), (22, 8.8, 0.125)]);
    let golden = golden(vec![row(&[1], Stop::MaxNewTokens, vec![crowd; 4])]);
    let report = check(&job(&golden, &dump(&[&[20, 40, 20, 20]])), None).unwrap();
    assert_eq!(report.verdict, Verdict::Unjudged);
    assert_eq!(words(&report, 0), ["agree", "unjudged", "unjudged", "unjudged"]);
}

#[test]
fn texts_that_differ_are_shown() {
    let golden = small();
    let decode = |ids: &[usize]| Some(ids.iter().map(|id| format!("{id} ")).collect::<String>());
    let wrong = dump(&[&[20, 21, 8, 23], RIGHT[1]]);
    let report = check(&Check { decode: Some(&decode), ..job(&golden, &wrong) }, None).unwrap();
    assert_eq!(report.texts.len(), 1);
    assert_eq!(report.texts[0].diff, "20 21 [-22-]{+8+} 23 ");
}

#[test]
fn dumps_without_tokens_are_no_verdict_on_them() {
    let error = |fault| DumpError { path: PathBuf::from("captures.safetensors"), fault: Box::new(fault) };
    let report = without_tokens(&small(), &error(DumpFault::NoTokens)).unwrap();
    assert_eq!(report.verdict, Verdict::Unjudged);
    let report = without_tokens(&small(), &error(DumpFault::DType("I32".into()))).unwrap();
    assert_eq!((report.verdict, only(&report).1), (Verdict::Fail, FindingKind::ElementType));
    assert!(without_tokens(&small(), &error(DumpFault::NotAFile)).is_none());
}

#[test]
fn a_second_run_agrees_to_the_last_bit() {
    let golden = small();
    let mut again = golden.clone();
    let report = check_again(&golden, &again, "the reference".into());
    assert_eq!((report.verdict, report.steps.len()), (Verdict::Pass, 7));
    // Spreads are no outputs of the run.
    again.rows[0].steps[0].top[1].spread = 0.5;
    assert_eq!(check_again(&golden, &again, String::new()).verdict, Verdict::Pass);
    let logit = &mut again.rows[1].steps[1].top[2].logit;
    *logit = f32::from_bits(logit.to_bits() + 1);
    let report = check_again(&golden, &again, String::new());
    assert_eq!((report.verdict, only(&report).0, report.findings[0].row), (Verdict::Fail, 1, 1));
    // The candidate that differs is named, where the chosen one is the same.
    let message = only(&report).2;
    let words = "as candidate 2 (0 is the chosen one) the reference now gives id 8 with logit 3.0000002, the golden \
                 holds id 8 with logit 3.0; ";
    assert!(message.starts_with(words), "{message}");
    again.rows[1].steps[1].top.pop();
    let report = check_again(&golden, &again, String::new());
    assert!(only(&report).2.contains("candidate 2 (0 is the chosen one) the reference now gives none, "), "{report:?}");
    again.rows[1].steps[1].top[0].id = 32;
    let report = check_again(&golden, &again, String::new());
    let words = "the reference now gives id 32 with logit 9.0, the golden holds id 31 with logit 9.0; ";
    assert!(only(&report).2.starts_with(words), "{report:?}");
    again.rows[1].steps.truncate(1);
    assert_eq!(check_again(&golden, &again, String::new()).findings[0].step, 1);
    again.rows.truncate(1);
    assert_eq!(check_again(&golden, &again, String::new()).verdict, Verdict::Fail);
}

#[test]
fn numbers_are_short() {
    for (value, text) in [
        (9.0, "9"),
        (0.25, "0.25"),
        (1e-7, "1.000e-7"),
        (0.0, "0"),
        (12.345_678_9, "12.345679"),
        (f64::INFINITY, "inf"),
    ] {
        assert_eq!(short(value), text);
    }
}

mod any_dump {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn gets_a_verdict_for_every_id_and_none_that_contradicts_its_steps(
            rows in prop::collection::vec(prop::collection::vec(prop_oneof![Just(7i64), Just(99), 18i64..34, -2i64..120], 0..7), 0..4),
            model in any::<bool>(),
        ) {
            let golden = small();
            let dump = Dump { rows: rows.clone(), ..Dump::default() };
            let mut table = Table::new();
            let report = check(&job(&golden, &dump), if model { Some(&mut table) } else { None }).unwrap();
            for (row, ids) in rows.iter().enumerate().take(2) {
                let found: Vec<i64> =
                    report.steps.iter().filter(|step| step.row == row).filter_map(|step| step.device).collect();
                prop_assert_eq!(&found, ids);
            }
            let failed = report.steps.iter().any(|step| step.verdict == StepVerdict::Fail) || rows.len() != 2;
            prop_assert_eq!(report.verdict == Verdict::Fail, failed);
            let exact = rows.iter().map(Vec::as_slice).eq(RIGHT);
            if exact {
                prop_assert_eq!(report.verdict, Verdict::Pass);
            }
        }
    }
}

//! The verdict on generated tokens (`docs/tokens.md`, Verdicts). Up to the first token that is not the golden's, the
//! golden says everything. After it the device is on a path of its own, and the reference has to follow it there: the
//! device's own tokens are forced, and every later step is judged on what came before it.

use reference::generate::GenerateError;

use super::diff;
use super::dump::{Dump, DumpError, DumpFault};
use super::golden::{Choice, Golden, Step, Stop};
use super::report::{Finding, FindingKind, StepReport, StepVerdict, TextChange, Timing, TokensReport};
use crate::report::{Number, Verdict};

/// A prompt and the tokens that a device generated after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forced<'a> {
    /// The prompt.
    pub prompt: &'a [usize],
    /// The device's tokens.
    pub tokens: &'a [usize],
}

/// A reference that follows a device's own tokens.
pub trait Follow {
    /// For each row one [`Step`] a token: what the reference would have chosen in its place, after the tokens before
    /// it, with the spreads of the golden's number of samples.
    ///
    /// # Errors
    /// The model cannot be run on them.
    fn follow(&mut self, rows: &[Forced<'_>]) -> Result<Vec<Vec<Step>>, GenerateError>;
}

/// Turns ids into text.
pub type Decode<'a> = &'a dyn Fn(&[usize]) -> Option<String>;

/// What is checked.
pub struct Check<'a> {
    /// The golden.
    pub golden: &'a Golden,
    /// What the device generated.
    pub dump: &'a Dump,
    /// Judge this row alone. A dump of one row is taken to be it.
    pub row: Option<usize>,
    /// What it generated before a change.
    pub before: Option<&'a Dump>,
    /// Ids as text, for differences that can be read.
    pub decode: Option<Decode<'a>>,
}

/// The report on a dump that holds no tokens of the right type; `None` where the dump is malformed, which no verdict
/// covers.
#[must_use]
pub fn without_tokens(golden: &Golden, error: &DumpError) -> Option<TokensReport> {
    let mut report = empty(golden, error.path.display().to_string());
    match *error.fault {
        DumpFault::NoTokens => {
            report.verdict = Verdict::Unjudged;
            report.remarks.push(error.to_string());
        }
        DumpFault::DType(_) => {
            report.verdict = Verdict::Fail;
            report.findings.push(finding(0, 0, FindingKind::ElementType, error.to_string()));
        }
        _ => return None,
    }
    Some(report)
}

/// The report on a golden of which nothing was compared.
pub(super) fn empty(golden: &Golden, source: String) -> TokensReport {
    TokensReport {
        verdict: Verdict::Unjudged,
        golden: golden.name.clone(),
        source,
        steps: Vec::new(),
        findings: Vec::new(),
        remarks: Vec::new(),
        texts: Vec::new(),
        timing: None,
    }
}

fn finding(row: usize, step: usize, kind: FindingKind, message: String) -> Finding {
    Finding { row, step, kind, message, already_before: None }
}

/// Judges a dump. Without a reference to follow the device, what comes after its first token off the golden's path is
/// unjudged.
///
/// # Errors
/// The reference cannot follow.
pub fn check(job: &Check<'_>, follower: Option<&mut dyn Follow>) -> Result<TokensReport, GenerateError> {
    let golden = job.golden;
    let mut report = empty(golden, job.dump.path.display().to_string());
    let pairs = pair(job, &mut report);
    let mut walks: Vec<Walk<'_>> = Vec::new();
    for (row, ids) in pairs {
        let mut walk = Walk::new(golden, row, ids);
        walk.along_golden();
        walks.push(walk);
    }
    let followed = follower.is_some();
    if let Some(follower) = follower {
        let off: Vec<usize> = (0..walks.len()).filter(|&index| walks[index].can_be_followed()).collect();
        let forced: Vec<Forced<'_>> = off
            .iter()
            .map(|&index| Forced { prompt: &golden.rows[walks[index].row].prompt_ids, tokens: &walks[index].valid })
            .collect();
        let steps = if forced.is_empty() { Vec::new() } else { follower.follow(&forced)? };
        for (index, steps) in off.into_iter().zip(steps) {
            walks[index].along_device(&steps);
        }
    }
    for walk in walks {
        let (row, open) = (walk.row, walk.left.filter(|_| walk.can_be_followed() && !followed));
        let Walk { steps, mut findings, .. } = walk;
        if let Some(step) = open {
            report.remarks.push(format!(
                "row {row}: the device left the golden's tokens at step {step}; name the model (--model or --case) to judge what follows on its own tokens"
            ));
        }
        if let Some(before) = job.before {
            for finding in &mut findings {
                finding.already_before = Some(same_up_to(job, before, row, finding.step));
            }
        }
        report.texts.extend(text_change(job, row, &steps));
        report.steps.extend(steps);
        report.findings.extend(findings);
    }
    report.verdict = report.found();
    report.timing = timing(job);
    Ok(report)
}

/// Which ids belong to which row of the golden. A wrong number of rows is a finding; the rows that are there are judged.
fn pair<'a>(job: &Check<'a>, report: &mut TokensReport) -> Vec<(usize, &'a [i64])> {
    let (rows, dumped) = (job.golden.rows.len(), job.dump.rows.len());
    if let Some(row) = job.row {
        let ids = if dumped == 1 { job.dump.rows.first() } else { job.dump.rows.get(row) };
        if ids.is_none() || row >= rows {
            let message = format!("row {row} was asked for; the golden has {rows} rows, the dump {dumped}");
            report.findings.push(finding(row, 0, FindingKind::Rows, message));
        }
        return ids.filter(|_| row < rows).map(|ids| (row, ids.as_slice())).into_iter().collect();
    }
    if dumped != rows {
        let advice =
            if dumped > rows { "leave padding rows out, or judge one with --row" } else { "judge one with --row" };
        let message = format!("the dump holds {dumped} rows, the golden {rows}; {advice}");
        report.findings.push(finding(rows.min(dumped), 0, FindingKind::Rows, message));
    }
    job.dump.rows.iter().take(rows).enumerate().map(|(row, ids)| (row, ids.as_slice())).collect()
}

/// The row of an earlier dump, found as the row of the dump itself.
fn row_of(job: &Check<'_>, dump: &Dump, row: usize) -> Option<Vec<i64>> {
    if job.row.is_some() && dump.rows.len() == 1 { dump.rows.first().cloned() } else { dump.rows.get(row).cloned() }
}

/// Whether both dumps hold the same ids up to a step, or both end before it.
fn same_up_to(job: &Check<'_>, before: &Dump, row: usize, step: usize) -> bool {
    match (row_of(job, before, row), row_of(job, job.dump, row)) {
        (Some(before), Some(now)) => before.iter().take(step + 1).eq(now.iter().take(step + 1)),
        _ => false,
    }
}

fn timing(job: &Check<'_>) -> Option<Timing> {
    let median_seconds = job.dump.median_seconds()?;
    let before_median_seconds = job.before.and_then(Dump::median_seconds);
    let ratio = before_median_seconds.filter(|before| *before > 0.0).map(|before| median_seconds / before);
    Some(Timing { median_seconds, before_median_seconds, ratio })
}

fn text_change(job: &Check<'_>, row: usize, steps: &[StepReport]) -> Option<TextChange> {
    let decode = job.decode?;
    if steps.iter().all(|step| step.verdict == StepVerdict::Agree) {
        return None;
    }
    // An id that is none has no text, and shows as a character that is none.
    let ids: Vec<usize> =
        steps.iter().filter_map(|step| step.device).map(|id| usize::try_from(id).unwrap_or(usize::MAX)).collect();
    let reference = decode(&job.golden.rows.get(row)?.token_ids())?;
    let device = decode(&ids)?;
    let diff = diff::texts(&reference, &device);
    Some(TextChange { row, reference, device, diff })
}

/// A row on its way.
struct Walk<'a> {
    golden: &'a Golden,
    row: usize,
    ids: &'a [i64],
    /// The ids up to the first that no model can be given, or the first past a stop id.
    valid: Vec<usize>,
    steps: Vec<StepReport>,
    findings: Vec<Finding>,
    /// The step at which the device left the golden's tokens.
    left: Option<usize>,
}

impl<'a> Walk<'a> {
    fn new(golden: &'a Golden, row: usize, ids: &'a [i64]) -> Self {
        let vocabulary = golden.model.geometry.real_vocab_size;
        let known = |id: &i64| usize::try_from(*id).ok().filter(|id| *id < vocabulary);
        let mut valid: Vec<usize> = ids.iter().map_while(known).collect();
        let ends = |id: &usize| golden.limits.stop_ids.contains(id);
        if let Some(end) = valid.iter().position(ends) {
            valid.truncate(end + 1);
        }
        valid.truncate(room(golden, row));
        Self { golden, row, ids, valid, steps: Vec::new(), findings: Vec::new(), left: None }
    }

    fn can_be_followed(&self) -> bool {
        self.left.is_some_and(|left| left + 1 < self.valid.len())
    }

    /// Judges what the golden alone can judge, and leaves the rest unjudged.
    fn along_golden(&mut self) {
        let steps = &self.golden.rows[self.row].steps;
        for step in 0..self.ids.len() {
            match (self.left, steps.get(step)) {
                (None, Some(golden)) => self.judge(step, Some(golden), false),
                _ => self.judge(step, None, false),
            }
        }
        self.end();
    }

    /// Judges again what comes after the golden's tokens, now by a reference that was given the device's.
    fn along_device(&mut self, followed: &[Step]) {
        let Some(left) = self.left else { return };
        let kept = left + 1;
        self.steps.truncate(kept);
        self.findings.retain(|finding| finding.step <= left);
        for step in kept..self.ids.len() {
            self.judge(step, followed.get(step), true);
        }
        self.end();
    }

    /// One step: `expected` is what the reference says of it, where it says anything.
    fn judge(&mut self, step: usize, expected: Option<&Step>, forced: bool) {
        let (row, golden, id) = (self.row, self.golden, self.ids[step]);
        let mut report = StepReport {
            row,
            step,
            device: Some(id),
            reference: expected.map(Step::id),
            margin: expected.map(|expected| Number(expected.margin().into())),
            verdict: StepVerdict::Unjudged,
            device_logit: None,
            reference_logit: expected.map(|expected| Number(expected.logit().into())),
            bound: None,
            forced,
        };
        let found = self.rule(step, expected);
        let found = found.or_else(|| {
            let expected = expected?;
            match expected.judge(usize::try_from(id).ok()?, golden) {
                Choice::Same => {
                    report.verdict = StepVerdict::Agree;
                    report.device_logit = report.reference_logit;
                    None
                }
                Choice::Permitted { gap, bound } => {
                    let logit = f64::from(expected.logit()) - gap;
                    (report.device_logit, report.bound) = (Some(Number(logit)), Some(Number(bound)));
                    let best = expected.id();
                    let message = format!(
                        "either id may be chosen: the device's {id} has logit {}, the reference's {best} has {}, {} apart; \
                         the permitted freedoms reach {}",
                        short(logit), short(expected.logit().into()), short(gap), short(bound),
                    );
                    Some((FindingKind::NearTie, message))
                }
                Choice::Wrong { logit, gap, bound } => {
                    report.device_logit = logit.map(|logit| Number(logit.into()));
                    report.bound = Some(Number(bound));
                    let best = expected.id();
                    let has = match logit {
                        Some(logit) => format!("has logit {}", short(logit.into())),
                        None => format!("is none of the {} best", expected.top.len()),
                    };
                    let least = if logit.is_some() { "" } else { "at least " };
                    let message = format!(
                        "the device's {id} {has}, the reference's {best} has {}, {least}{} apart; the permitted freedoms \
                         reach {}",
                        short(expected.logit().into()), short(gap), short(bound),
                    );
                    Some((FindingKind::WrongToken, message))
                }
                Choice::Unknown { bound, .. } => {
                    report.bound = Some(Number(bound));
                    None
                }
            }
        });
        if let Some((kind, message)) = found {
            report.verdict = if kind == FindingKind::NearTie { StepVerdict::NearTie } else { StepVerdict::Fail };
            let (kind, message) = self.whole_stream(kind, message);
            self.findings.push(finding(row, step, kind, message));
        }
        if report.verdict != StepVerdict::Agree && self.left.is_none() {
            self.left = Some(step);
        }
        self.steps.push(report);
    }

    /// What is wrong with an id whatever the logits are.
    fn rule(&self, step: usize, expected: Option<&Step>) -> Option<(FindingKind, String)> {
        let (golden, id) = (self.golden, self.ids[step]);
        let geometry = &golden.model.geometry;
        let stop_id = |id: &i64| usize::try_from(*id).is_ok_and(|id| golden.limits.stop_ids.contains(&id));
        // A row is told once that it went on; what it went on with is no matter.
        if let Some(end) = self.ids.iter().take(step).position(stop_id) {
            let (stop, more) = (self.ids[end], self.ids.len() - end - 1);
            return (step == end + 1).then(|| {
                let message = format!(
                    "stop id from generation config not honoured: {stop} at step {end} ends the row, and {more} more \
                     {} it, {id} first",
                    if more == 1 { "id follows" } else { "ids follow" },
                );
                (FindingKind::PastStop, message)
            });
        }
        let room = room(golden, self.row);
        if step >= room {
            let more = self.ids.len() - room;
            let message = format!(
                "the row may have {room} tokens, and {more} more {}",
                if more == 1 { "follows" } else { "follow" }
            );
            return (step == room).then_some((FindingKind::TooLong, message));
        }
        let (real, stored) = (geometry.real_vocab_size, geometry.vocab_size);
        let expected =
            expected.map(|step| format!("; the reference chose {}, logit {}", step.id(), short(step.logit().into())));
        let expected = expected.unwrap_or_default();
        match usize::try_from(id) {
            Ok(known) if known < real => None,
            Ok(padding) if padding < stored => Some((
                FindingKind::PaddingVocabulary,
                format!(
                    "id {id} is padding of the vocabulary ({real} to {}), which no token has{expected}",
                    stored - 1
                ),
            )),
            _ => Some((
                FindingKind::OutsideVocabulary,
                format!(
                    "id {id} is no token: ids are 0 to {}, and what lies beyond is padding or nothing{expected}",
                    real - 1
                ),
            )),
        }
    }

    /// A failure whose row is one id over and over is a fault of the stage before.
    fn whole_stream(&self, kind: FindingKind, message: String) -> (FindingKind, String) {
        let constant = self.ids.len() > 1 && self.ids.windows(2).all(|pair| pair[0] == pair[1]);
        let first = !self.findings.iter().any(|finding| finding.kind != FindingKind::NearTie);
        let about_ids =
            matches!(kind, FindingKind::WrongToken | FindingKind::PaddingVocabulary | FindingKind::OutsideVocabulary);
        if !(constant && first && about_ids) {
            return (kind, message);
        }
        let message = format!(
            "every id of the row is {}: look one stage back, at logits that are constant, zero or NaN ({message})",
            self.ids.first().copied().unwrap_or_default(),
        );
        (FindingKind::ConstantStream, message)
    }

    /// Judges the row's end: it has to be at a stop id or at a limit.
    fn end(&mut self) {
        let (golden, row, length) = (self.golden, self.row, self.ids.len());
        let stopped =
            self.ids.iter().any(|id| usize::try_from(*id).is_ok_and(|id| golden.limits.stop_ids.contains(&id)));
        if stopped || length >= room(golden, row) {
            return;
        }
        let expected = golden.rows[row].steps.get(length).filter(|_| self.left.is_none());
        let due = match golden.rows[row].stop {
            _ if expected.is_none() => format!("a stop id or {} tokens", room(golden, row)),
            Stop::Eos => format!("{} with a stop id", golden.rows[row].steps.len()),
            _ => golden.rows[row].steps.len().to_string(),
        };
        self.steps.push(StepReport {
            row,
            step: length,
            device: None,
            reference: expected.map(Step::id),
            margin: expected.map(|expected| Number(expected.margin().into())),
            verdict: StepVerdict::Fail,
            device_logit: None,
            reference_logit: expected.map(|expected| Number(expected.logit().into())),
            bound: None,
            forced: false,
        });
        let message = format!("the row ends after {length} tokens; expected {due}");
        self.findings.push(finding(row, length, FindingKind::TooShort, message));
    }
}

/// Tokens that a row may have.
fn room(golden: &Golden, row: usize) -> usize {
    let prompt = golden.rows[row].prompt_ids.len();
    golden.limits.max_new_tokens.min(golden.limits.max_seq_len.saturating_sub(prompt))
}

/// A number as people read it: six digits.
fn short(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude != 0.0 && magnitude.is_finite() && !(1e-4..1e6).contains(&magnitude) {
        return format!("{value:.3e}");
    }
    let text = format!("{value:.6}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Compares a second run of the reference, which must agree bit for bit: the same bits follow from the same files on
/// every machine.
#[must_use]
pub fn check_again(golden: &Golden, again: &Golden, source: String) -> TokensReport {
    let mut report = empty(golden, source);
    if golden.rows.len() != again.rows.len() {
        let message = format!("the run gave {} rows, the golden has {}", again.rows.len(), golden.rows.len());
        report.findings.push(finding(0, 0, FindingKind::Rows, message));
    }
    for (row, (expected, found)) in golden.rows.iter().zip(&again.rows).enumerate() {
        let mut differs = false;
        for step in 0..expected.steps.len().max(found.steps.len()) {
            let (expected, found) = (expected.steps.get(step), found.steps.get(step));
            let same = match (expected, found) {
                (Some(expected), Some(found)) => bits(expected) == bits(found),
                _ => false,
            };
            report.steps.push(StepReport {
                row,
                step,
                device: found.and_then(|step| i64::try_from(step.id()).ok()),
                reference: expected.map(Step::id),
                margin: expected.map(|step| Number(step.margin().into())),
                verdict: if same { StepVerdict::Agree } else { StepVerdict::Fail },
                device_logit: found.map(|step| Number(step.logit().into())),
                reference_logit: expected.map(|step| Number(step.logit().into())),
                bound: None,
                forced: false,
            });
            if !same && !differs {
                differs = true;
                let message = format!(
                    "{}; a reference run is the same to the last bit on every machine, so the program has changed, or \
                     somebody the golden",
                    change(found, expected),
                );
                report.findings.push(finding(row, step, FindingKind::Reference, message));
            }
        }
    }
    report.verdict = report.found();
    report
}

/// The first candidate in which a second run differs from the golden's step. The chosen one is the first of them.
fn change(found: Option<&Step>, expected: Option<&Step>) -> String {
    let top = |step: Option<&Step>| step.map_or_else(Vec::new, bits);
    let (now, held) = (top(found), top(expected));
    let at = now.iter().zip(&held).take_while(|(now, held)| now == held).count();
    let told = |step: Option<&Step>| match (step, step.and_then(|step| step.top.get(at))) {
        (_, Some(of)) => format!("id {} with logit {:?}", of.id, of.logit),
        (Some(_), None) => "none".to_owned(),
        (None, None) => "no token".to_owned(),
    };
    let which = if at == 0 { String::new() } else { format!("as candidate {at} (0 is the chosen one) ") };
    format!("{which}the reference now gives {}, the golden holds {}", told(found), told(expected))
}

/// The candidates of a step, to the last bit.
fn bits(step: &Step) -> Vec<(usize, u32)> {
    step.top.iter().map(|of| (of.id, of.logit.to_bits())).collect()
}

#[cfg(test)]
mod tests;

//! What a report says in words, for every format that a person reads.

use goldens::report::{
    CaseReport, Check, Element, GateReport, MergedReport, PolicyReport, ShardReport, StepVerdict, TensorReport,
    TokenStep, Verdict,
};
use reference::Site;

use super::text::{grouped, labelled, plural};

/// The sentence that a failing or unjudged case is about; `None` for one that passed.
pub fn headline(case: &CaseReport) -> Option<String> {
    if case.verdict == Verdict::Pass {
        return None;
    }
    if let Some(name) = &case.first_divergence {
        let tensor = case.tensors.iter().find(|tensor| tensor.name == *name && tensor.verdict != Verdict::Pass);
        let failed = case.checks.iter().find(|check| check.verdict == Verdict::Fail);
        return Some(match tensor {
            None if failed.is_some() => {
                format!("First divergence: {name}, by a check. {}.", failed.map(check).unwrap_or_default())
            }
            Some(tensor) => format!("First divergence: {}.", drift(tensor)),
            None => format!("First divergence: {name}."),
        });
    }
    if let Some(violation) = case.policy.violations.first() {
        return Some(format!("Rounding rule: {violation}."));
    }
    if case.verdict == Verdict::Unjudged
        && let Some(reason) = case.coverage.first()
    {
        return Some(format!("Not judged: {reason}."));
    }
    let worst = |verdict| case.checks.iter().find(|check| check.verdict == verdict);
    let check = worst(Verdict::Fail).or_else(|| worst(Verdict::Unjudged));
    check.map(self::check)
}

/// A check and what it found.
pub fn check(check: &Check) -> String {
    format!("{}: {}", check.name, check.detail)
}

/// What is wrong with one tensor: how much of it, where, and its worst element.
pub fn drift(tensor: &TensorReport) -> String {
    let (name, elements) = (&tensor.name, plural(tensor.elements, "element"));
    let mut text = match (tensor.unexplained, tensor.explained_ties, tensor.notes.first()) {
        (0, 0, Some(note)) => return format!("{name}: {note}"),
        (0, 0, None) => return name.clone(),
        (0, 1, _) => format!("{name}: 1 of {elements} is a tie that went by a forbidden rule"),
        (0, ties, _) => format!("{name}: {} of {elements} are ties that went by a forbidden rule", grouped(ties)),
        (1, _, _) => format!("{name}: 1 of {elements} drifts"),
        (drift, _, _) => format!("{name}: {} of {elements} drift", grouped(drift)),
    };
    if let Some(places) = places(tensor) {
        text.push_str(&format!(", in {places}"));
    }
    if let Some(worst) = &tensor.worst {
        text.push_str(&format!("; worst {}", element(worst)));
    }
    text
}

/// Rows, heads and pages that hold drift.
pub fn places(tensor: &TensorReport) -> Option<String> {
    let parts = [
        labelled("row", &tensor.rows_failing),
        labelled("head", &tensor.heads_failing),
        labelled("page", &tensor.pages_failing),
    ];
    let parts: Vec<_> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// One element: place, both values, both bit patterns, distance.
pub fn element(element: &Element) -> String {
    // Two digits of bits are an INT8 code, whose steps are whole codes.
    let unit = match (element.device_bits.len() == "0x00".len(), element.ulps) {
        (true, Some(1)) => "code",
        (true, _) => "codes",
        (false, _) => "ULP",
    };
    let ulps = element.ulps.map(|ulps| format!(", {} {unit} apart", grouped(ulps))).unwrap_or_default();
    let side = |value: &goldens::report::Number, bits: &str| match (bits, integer(bits)) {
        ("absent", _) => bits.to_owned(),
        (_, Some(number)) => format!("{number} ({bits})"),
        (_, None) => format!("{value} ({bits})"),
    };
    let index = if element.index.is_empty() { String::new() } else { format!("{:?}: ", element.index) };
    let (device, contract) =
        (side(&element.device, &element.device_bits), side(&element.reference, &element.reference_bits));
    format!("{index}device {device}, contract {contract}{ulps}")
}

/// The number itself of an id or a cache row, whose bits have sixteen digits: an FP32 number need not hold it.
pub fn integer(bits: &str) -> Option<i64> {
    let digits = bits.strip_prefix("0x").filter(|digits| digits.len() == 16)?;
    u64::from_str_radix(digits, 16).ok().map(u64::cast_signed)
}

/// What was compared, in one line.
pub fn compared(case: &CaseReport) -> String {
    let sum = |field: fn(&TensorReport) -> u64| case.tensors.iter().map(field).fold(0, u64::saturating_add);
    if case.tensors.is_empty() {
        return "no tensor compared".into();
    }
    let mut parts = vec![format!("{} exact", grouped(sum(|tensor| tensor.exact)))];
    let explained = sum(|tensor| tensor.explained);
    if explained > 0 {
        parts.push(format!(
            "{} explained ({}, {})",
            grouped(explained),
            plural(sum(|tensor| tensor.explained_flips), "rounding flip"),
            plural(sum(|tensor| tensor.explained_ties), "tie"),
        ));
    }
    for (count, what) in [(sum(|tensor| tensor.unexplained), "drift"), (sum(|tensor| tensor.nonfinite), "non-finite")] {
        if count > 0 {
            parts.push(format!("{} {what}", grouped(count)));
        }
    }
    format!(
        "{}, {}: {}",
        plural(case.tensors.len() as u64, "tensor"),
        plural(sum(|tensor| tensor.elements), "element"),
        parts.join(", ")
    )
}

/// Margins named of a token run.
const MARGINS: usize = 3;

/// The tokens of a run, in one line; `None` where there are none.
pub fn tokens(case: &CaseReport) -> Option<String> {
    if case.steps.is_empty() {
        return None;
    }
    let count = |verdict| case.steps.iter().filter(|step| step.verdict == verdict).count() as u64;
    let [agree, near, fail] = [StepVerdict::Agree, StepVerdict::NearTie, StepVerdict::Fail].map(count);
    let parts = [
        (agree, format!("{} agree", grouped(agree))),
        (near, plural(near, "near tie")),
        (fail, format!("{} fail", grouped(fail))),
    ];
    let parts: Vec<String> = parts.into_iter().filter(|(count, _)| *count > 0).map(|(_, text)| text).collect();
    let mut margins: Vec<&TokenStep> = case.steps.iter().filter(|step| step.margin.0.is_finite()).collect();
    margins.sort_by(|a, b| a.margin.0.total_cmp(&b.margin.0));
    let smallest: Vec<String> = margins
        .iter()
        .take(MARGINS)
        .map(|step| format!("{} (row {}, step {})", rounded(step.margin.0), step.row, step.step))
        .collect();
    let smallest =
        if smallest.is_empty() { String::new() } else { format!("; smallest margins {}", smallest.join(", ")) };
    Some(format!("{}: {}{smallest}", plural(case.steps.len() as u64, "token"), parts.join(", ")))
}

/// Steps worth a look: all that are not plain agreement.
pub fn notable_steps(case: &CaseReport) -> Vec<&TokenStep> {
    case.steps.iter().filter(|step| step.verdict != StepVerdict::Agree).collect()
}

/// The cells of a step: row, step, device, reference, margin, what freedoms can turn round, verdict, remark.
pub fn step_cells(step: &TokenStep) -> [String; 8] {
    [
        step.row.to_string(),
        step.step.to_string(),
        step.device.to_string(),
        step.reference.map_or_else(|| "none".to_owned(), |id| id.to_string()),
        rounded(step.margin.0),
        rounded(step.bound.0),
        step.verdict.name().replace('_', " "),
        step.note.clone().unwrap_or_default(),
    ]
}

/// The headings of [`step_cells`].
pub const STEP_HEADINGS: [&str; 8] = ["row", "step", "device", "reference", "margin", "bound", "verdict", "remark"];

/// A logit difference with as many digits as tell something.
fn rounded(value: f64) -> String {
    if !value.is_finite() {
        goldens::report::Number(value).to_string()
    } else if value.abs() >= 0.1 {
        format!("{value:.3}")
    } else {
        format!("{value:.6}")
    }
}

/// The rules found, grouped by rule and in the contract's order of sites, each with its ties.
pub fn policy(policy: &PolicyReport) -> Vec<String> {
    let mut groups: Vec<(&str, Vec<String>)> = Vec::new();
    let known = Site::ALL.map(Site::name);
    let other = policy.rules.keys().map(String::as_str).filter(|site| !known.contains(site));
    for site in known.into_iter().chain(other) {
        let Some(rule) = policy.rules.get(site) else { continue };
        let entry = match policy.ties.get(site) {
            Some(&ties) if ties > 0 && rule == "not exercised" => {
                format!("{site} ({}, none telling)", plural(ties, "tie"))
            }
            Some(&ties) if ties > 0 => format!("{site} ({})", plural(ties, "tie")),
            _ => site.to_owned(),
        };
        match groups.iter_mut().find(|(name, _)| *name == rule.as_str()) {
            Some((_, sites)) => sites.push(entry),
            None => groups.push((rule, vec![entry])),
        }
    }
    // What was not seen comes after what was.
    groups.sort_by_key(|(rule, _)| *rule == "not exercised");
    groups.into_iter().map(|(rule, sites)| format!("{rule}: {}", sites.join(", "))).collect()
}

/// Where the outputs came from. An emulated device must never be taken for hardware.
pub fn provenance(case: &CaseReport) -> String {
    const EMULATED: &str = "the kernel's source executed operator by operator on a CPU, not NPU hardware";
    match case.source.as_str() {
        "" => "outputs: of unknown origin".into(),
        source if source.starts_with("emulated") && !source.contains(EMULATED) => {
            format!("outputs: {source} ({EMULATED})")
        }
        source => format!("outputs: {source}"),
    }
}

/// Rules that were broken, those left out that a tensor's own notes say already.
pub fn violations(case: &CaseReport) -> impl Iterator<Item = &String> {
    let noted = |violation: &String| case.tensors.iter().any(|tensor| tensor.notes.contains(violation));
    case.policy.violations.iter().filter(move |violation| !noted(violation))
}

/// What part of a run a report is about; nothing for a whole one.
pub fn scope(report: &GateReport) -> Option<String> {
    scope_of(report.merged.as_ref(), report.shard, report.cases.len(), "case")
}

/// The same of any run, which has so many of `what`.
pub fn scope_of(
    merged: Option<&MergedReport>,
    shard: Option<ShardReport>,
    entries: usize,
    what: &str,
) -> Option<String> {
    let held = |total: usize| format!("{} of {}", grouped(entries as u64), plural(total as u64, what));
    match (merged, shard) {
        (Some(merged), _) if merged.missing.is_empty() => {
            Some(format!("{} joined", plural(merged.count as u64, "shard")))
        }
        (Some(merged), _) => {
            let (known, held) = (merged.count.saturating_sub(merged.missing.len()), held(merged.cases_total));
            let missing = labelled("shard", &merged.missing).unwrap_or_default();
            let verb = if merged.missing.len() == 1 { "is" } else { "are" };
            Some(format!(
                "{known} of {} joined, {held}; {missing} {verb} missing",
                plural(merged.count as u64, "shard")
            ))
        }
        (None, Some(shard)) => Some(format!("shard {}/{}: {}", shard.index, shard.count, held(shard.cases_total))),
        (None, None) => None,
    }
}

/// How many cases ended how: `1 failed, 2 passed`.
pub fn tally(cases: &[CaseReport]) -> String {
    tally_of(&cases.iter().map(|case| case.verdict).collect::<Vec<_>>(), "case")
}

/// The same of any run, with the verdict on each of `what`.
pub fn tally_of(verdicts: &[Verdict], what: &str) -> String {
    let count = |verdict| verdicts.iter().filter(|of| **of == verdict).count();
    let parts: Vec<_> = [
        (Verdict::Error, "refused"),
        (Verdict::Fail, "failed"),
        (Verdict::Unjudged, "could not be judged"),
        (Verdict::Pass, "passed"),
    ]
    .into_iter()
    .map(|(verdict, word)| (count(verdict), word))
    .filter(|(count, _)| *count > 0)
    .map(|(count, word)| format!("{count} {word}"))
    .collect();
    if parts.is_empty() {
        format!("no {what}")
    } else {
        format!("{}: {}", plural(verdicts.len() as u64, what), parts.join(", "))
    }
}

//! What mutation testing of the gate found: a table for a person, and `docs/power.md`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use goldens::power::{CasePower, Counts, Trial};
use goldens::report::{MergedReport, ShardReport};
use reference::Deviation;
use serde::Serialize;

use super::human::{BOLD, DIM};
use super::text::{plain, ranges};
use crate::commands::show::table;

/// Trials, and what they add up to.
#[derive(Serialize)]
pub struct Found<'r> {
    /// Which part of the cases it is, where it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    shard: Option<ShardReport>,
    /// Of joined reports, what was joined and what is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    merged: Option<MergedReport>,
    /// Over all cases and seeds.
    total: Counts,
    /// Right devices judged, and judgements of them that failed.
    clean: u32,
    false_alarms: u32,
    /// Right devices that others' rules fail.
    others_false_alarms: [u32; 4],
    /// One entry a case and seed.
    cases: &'r [CasePower],
    /// One entry a fault.
    faults: Vec<FaultPower<'r>>,
}

/// One fault over all cases.
#[derive(Serialize)]
struct FaultPower<'r> {
    id: &'r str,
    site: &'r str,
    description: &'r str,
    counts: Counts,
    /// Cases whose data show it, by name.
    shown_by: Vec<&'r str>,
    /// Cases in which it cannot be seen, or not be told from permitted freedom.
    not_shown_by: Vec<&'r str>,
    /// What was named instead, and how often.
    named_instead: BTreeMap<String, u32>,
    /// The same for `out` alone.
    named_instead_by_out: BTreeMap<String, u32>,
}

impl<'r> Found<'r> {
    /// Adds trials up.
    pub fn new(cases: &'r [CasePower], faults: &'r [Deviation]) -> Self {
        let all = || cases.iter().flat_map(|case| &case.trials);
        let fault = |fault: &'r Deviation| {
            let trials: Vec<(&'r str, &'r Trial)> = cases
                .iter()
                .flat_map(|case| case.trials.iter().map(move |trial| (case.name.as_str(), trial)))
                .filter(|(_, trial)| trial.id == fault.id)
                .collect();
            let shows = |trial: &Trial| trial.whole.as_ref().is_some_and(|outcome| outcome.caught);
            let names = |wanted: bool| {
                let mut names: Vec<&str> = Vec::new();
                for (name, _) in trials.iter().filter(|(_, trial)| shows(trial) == wanted) {
                    if !names.contains(name) {
                        names.push(name);
                    }
                }
                names
            };
            let shown_by = names(true);
            let not_shown_by = names(false).into_iter().filter(|name| !shown_by.contains(name)).collect();
            let instead = |outcome: fn(&Trial) -> Option<&goldens::power::Outcome>| {
                let mut instead: BTreeMap<String, u32> = BTreeMap::new();
                for outcome in trials.iter().filter_map(|(_, trial)| outcome(trial)) {
                    if outcome.caught && !outcome.names(&fault.id) {
                        *instead.entry(outcome.cause.clone().unwrap_or_else(|| "none".into())).or_default() += 1;
                    }
                }
                instead
            };
            FaultPower {
                id: &fault.id,
                site: fault.site,
                description: &fault.description,
                counts: Counts::of(trials.iter().map(|(_, trial)| *trial)),
                shown_by,
                not_shown_by,
                named_instead: instead(|trial| trial.whole.as_ref()),
                named_instead_by_out: instead(|trial| trial.out_alone.as_ref()),
            }
        };
        Self {
            shard: None,
            merged: None,
            total: Counts::of(all()),
            clean: cases.iter().map(|case| case.clean).sum(),
            false_alarms: cases.iter().map(|case| case.false_alarms).sum(),
            others_false_alarms: std::array::from_fn(|rule| cases.iter().map(|c| c.others_false_alarms[rule]).sum()),
            cases,
            faults: faults.iter().map(fault).collect(),
        }
    }

    /// The same of one shard.
    pub fn of_shard(self, shard: Option<ShardReport>) -> Self {
        Self { shard, ..self }
    }

    /// The same of joined shards.
    pub fn of_merged(self, merged: MergedReport) -> Self {
        Self { merged: Some(merged), ..self }
    }

    /// Whether the gate caught and located every fault that it can tell from permitted freedom, and failed no right
    /// device.
    pub fn holds(&self) -> bool {
        self.total.located == self.total.changed - self.total.permitted && self.false_alarms == 0
    }
}

/// `12 of 15 (80.0 %)`.
fn share(part: u32, whole: u32) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    format!("{part} of {whole} ({:.1} %)", (1000.0 * f64::from(part) / f64::from(whole)).floor() / 10.0)
}

/// The rows of the summary: what was counted, and the count.
fn summary(found: &Found<'_>) -> Vec<[String; 2]> {
    let Counts { faults, changed, permitted, caught, located, named, out_changed, out_caught, out_named, .. } =
        found.total;
    let visible = changed - permitted;
    let row = |what: &str, count: String| [what.to_owned(), count];
    vec![
        row("faults tried (faults x cases x seeds)", faults.to_string()),
        row("change a bit of the captures", share(changed, faults)),
        row("of these, by no more than a right device may", share(permitted, changed)),
        row("caught with intermediates, of the others", share(caught, visible)),
        row("located at the right tensor", share(located, visible)),
        row("cause named first", share(named, visible)),
        row("change a bit of `out`", share(out_changed, faults)),
        row("caught by `out` alone", share(out_caught, out_changed)),
        row("cause named first by `out` alone", share(out_named, out_changed)),
        row("right devices failed, each judged whole and by `out` alone", share(found.false_alarms, 2 * found.clean)),
    ]
}

/// The rows of the comparison with others' rules, all on `out`: the rule, right devices failed, faults caught.
fn rules(found: &Found<'_>) -> Vec<[String; 3]> {
    let total = found.total;
    let names = [
        "allclose, rtol and atol 1e-3",
        "at most 2 % outside rtol and atol 1e-2",
        "cosine of at least 0.999",
        "at most one in a thousand off by one in a thousand",
    ];
    let row =
        |rule: &str, failed, caught| [rule.to_owned(), share(failed, found.clean), share(caught, total.out_changed)];
    let ours = found.cases.iter().map(|case| case.false_alarms).sum::<u32>();
    std::iter::once(row("this gate, `out` alone", ours, total.out_caught))
        .chain((0..names.len()).map(|n| row(names[n], found.others_false_alarms[n], total.others[n])))
        .collect()
}

/// For a person.
pub fn human(found: &Found<'_>) -> String {
    let mut out = String::new();
    if let Some(MergedReport { count, missing, .. }) = found.merged.as_ref().filter(|m| !m.missing.is_empty()) {
        let _ = writeln!(out, "{BOLD}shards {} of {count} are missing{BOLD:#}\n", ranges(missing));
    }
    table(&mut out, ["what", "count"], summary(found).into_iter());
    let _ = writeln!(out);
    table(&mut out, ["rule on `out`", "right devices failed", "faults caught"], rules(found).into_iter());
    let _ = writeln!(out);
    let rows = found.cases.iter().map(|case| {
        let counts = Counts::of(case.trials.iter());
        let visible = counts.changed - counts.permitted;
        [
            plain(&case.name).into_owned(),
            case.seed.to_string(),
            visible.to_string(),
            counts.caught.to_string(),
            counts.located.to_string(),
            counts.named.to_string(),
            counts.out_changed.to_string(),
            counts.out_caught.to_string(),
            counts.out_named.to_string(),
        ]
    });
    table(&mut out, ["case", "seed", "visible", "caught", "located", "named", "out", "caught", "named"], rows);
    let odd = found.faults.iter().filter(|f| !f.named_instead.is_empty() || f.counts.located < f.counts.caught);
    for fault in odd {
        let _ = writeln!(out, "  {BOLD}{}{BOLD:#}: named instead: {}", fault.id, instead(&fault.named_instead));
    }
    let unseen: Vec<&str> = found.faults.iter().filter(|f| f.shown_by.is_empty()).map(|f| f.id).collect();
    if !unseen.is_empty() {
        let _ = writeln!(out, "  {DIM}not shown by any of these cases:{DIM:#} {}", unseen.join(", "));
    }
    out
}

fn instead(names: &BTreeMap<String, u32>) -> String {
    let names: Vec<String> = names.iter().map(|(name, count)| format!("{name} ({count})")).collect();
    names.join(", ")
}

/// `docs/power.md`.
pub fn markdown(found: &Found<'_>) -> String {
    let mut out = String::from(
        "# The power of the gate\n\n\
         This page is written by `assay power --write docs/power.md`; do not edit it. Each known deviation from the \
         contract (`reference::deviations`) is planted in a device that otherwise computes with sampled permitted \
         freedoms under the production rules, in each case and for each seed. The device is judged under `--policy \
         production`, with every intermediate and by `out` alone, and the cause is asked for.\n\n\
         A fault that changes no bit of a case's captures cannot be seen in it. One that changes bits by no more than a \
         right device may, by the bounds of [verdicts.md](verdicts.md), cannot be told from one: such bits are what \
         some right device gives. Both are counted apart, and the last table says which cases show which fault.\n\n\
         ## Summary\n\n| what | count |\n|---|---|\n",
    );
    for [what, count] in summary(found) {
        let _ = writeln!(out, "| {what} | {count} |");
    }
    out.push_str(
        "\n## Beside the rules that others use\n\nThe same `out`, judged by rules that compare it with a golden; faults are those that \
         change a bit of it. A rule that fails right devices cannot gate a merge, and one that catches no fault need not.\n\n\
         | rule | right devices failed | faults caught |\n|---|---|---|\n",
    );
    for [rule, failed, caught] in rules(found) {
        let _ = writeln!(out, "| {rule} | {failed} | {caught} |");
    }
    out.push_str(
        "\n## By case\n\nVisible: faults that change a bit by more than a right device may. `out`: faults that change a bit of \
         it.\n\n| case | seed | visible | caught | located | named | `out` | caught | named | allclose | outliers | cosine \
         | thousandth |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for case in found.cases {
        let c = Counts::of(case.trials.iter());
        let others: Vec<String> = c.others.iter().map(u32::to_string).collect();
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            escape(&case.name),
            case.seed,
            c.changed - c.permitted,
            c.caught,
            c.located,
            c.named,
            c.out_changed,
            c.out_caught,
            c.out_named,
            others.join(" | ")
        );
    }
    out.push_str(
        "\n## By fault\n\nCounts are over cases and seeds. The columns of `out` are: changed, caught, named by `out` \
         alone.\n\n| fault | the device ... | visible | caught | located | named | `out` | shown by | not shown by |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    for fault in &found.faults {
        let c = fault.counts;
        let names = |names: &[&str]| if names.is_empty() { "-".to_owned() } else { escape(&names.join(", ")) };
        let _ = writeln!(
            out,
            "| `{}` | {} | {} | {} | {} | {} | {}, {}, {} | {} | {} |",
            fault.id,
            escape(fault.description),
            c.changed - c.permitted,
            c.caught,
            c.located,
            c.named,
            c.out_changed,
            c.out_caught,
            c.out_named,
            names(&fault.shown_by),
            names(&fault.not_shown_by)
        );
    }
    for (title, misnamed) in [
        ("Named otherwise, with intermediates", faults_named(found, |f| &f.named_instead)),
        ("Named otherwise, by `out` alone", faults_named(found, |f| &f.named_instead_by_out)),
    ] {
        if !misnamed.is_empty() {
            let _ = writeln!(out, "\n## {title}\n\n| fault | named (times) |\n|---|---|\n{misnamed}");
        }
    }
    out.truncate(out.trim_end().len());
    out.push('\n');
    out
}

fn faults_named<'f>(found: &'f Found<'_>, of: impl Fn(&'f FaultPower<'f>) -> &'f BTreeMap<String, u32>) -> String {
    let rows = found.faults.iter().filter(|fault| !of(fault).is_empty());
    rows.map(|fault| format!("| `{}` | {} |\n", fault.id, escape(&instead(of(fault))))).collect()
}

fn escape(text: &str) -> String {
    plain(text).replace('|', "\\|").replace('<', "&lt;")
}

//! `assay diff`: two dumps of any formats, compared tensor by tensor and bit by bit.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use clap::Args;
use device::dump::{Opened, ReadOptions, Stored};
use goldens::diff::{DumpDiff, Side, TensorDiff, compare};
use goldens::report::Verdict;

use super::show::{Format, json};
use crate::exit_codes::Code;
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::{output, report};

/// The request.
#[derive(Args)]
pub struct Diff {
    /// The first dump, as `assay inspect` takes it: what was expected
    #[arg(value_name = "A")]
    a: PathBuf,
    /// The second dump: what there is
    #[arg(value_name = "B")]
    b: PathBuf,
    /// Take NumPy's two-byte void and its 16-bit unsigned integers for BF16
    #[arg(long)]
    bf16: bool,
    /// Format of the answer
    #[arg(long, value_enum, default_value_t = Format::Human)]
    format: Format,
    /// Show tensors that are equal, too
    #[arg(long, short)]
    verbose: bool,
}

impl Diff {
    /// Compares and reports.
    ///
    /// # Errors
    /// A dump is refused, or neither holds a tensor.
    pub fn run(&self) -> Result<Code, Refusal> {
        let options = ReadOptions { bf16: self.bf16 };
        let dumps = [Opened::open(&self.a, &options)?, Opened::open(&self.b, &options)?];
        if dumps.iter().all(|dump| dump.tensors.is_empty() && dump.unusable.is_empty()) {
            let (a, b) = (self.a.display(), self.b.display());
            return Err(Refusal::Request(format!("{a} and {b} hold no tensor; there is nothing to compare")));
        }
        let diff = self.compare(&dumps);
        match self.format {
            Format::Json => json(&diff)?,
            Format::Human => output::stdout(&report::diff::render(&diff, self.verbose))?,
        }
        Ok(diff.verdict.into())
    }

    fn compare(&self, dumps: &[Opened; 2]) -> DumpDiff {
        let [a, b] = dumps;
        let pairs: Vec<(&Stored, &Stored)> = match (a.tensors.as_slice(), b.tensors.as_slice()) {
            // Files name a bare tensor, and two files are seldom named alike.
            ([one], [other]) if a.bare && b.bare => vec![(one, other)],
            _ => {
                let named: BTreeMap<&str, &Stored> = b.tensors.iter().map(|t| (t.name.as_str(), t)).collect();
                a.tensors.iter().filter_map(|tensor| Some((tensor, *named.get(tensor.name.as_str())?))).collect()
            }
        };
        let bar = Bar::of_bytes(pairs.iter().map(|(tensor, _)| tensor.length() as u64).sum());
        let mut done = 0;
        let compared = |(one, other): &(&Stored, &Stored)| {
            let diff = pair(dumps, one, other);
            done += one.length() as u64;
            bar.reached(done);
            diff
        };
        let tensors: Vec<TensorDiff> = pairs.iter().map(compared).collect();
        let met: [BTreeSet<&str>; 2] = [
            pairs.iter().map(|(one, _)| one.name.as_str()).collect(),
            pairs.iter().map(|(_, other)| other.name.as_str()).collect(),
        ];
        let only = |at: usize| {
            let other = &dumps[1 - at];
            // What the other holds without usable data is not missing there.
            let unusable = |name: &str| other.unusable.iter().any(|bad| bad.name == name);
            let names = dumps[at].tensors.iter().map(|tensor| &tensor.name);
            names.filter(|name| !met[at].contains(name.as_str()) && !unusable(name)).cloned().collect()
        };
        let mut not_compared = BTreeSet::new();
        let mut remarks = Vec::new();
        for (dump, side) in dumps.iter().zip(["first", "second"]) {
            let of_side = |bad: &device::dump::Unusable| format!("{}: in the {side}: {}", bad.name, bad.reason);
            not_compared.extend(dump.unusable.iter().map(of_side));
            remarks.extend(dump.remarks.iter().map(|remark| format!("the {side}: {remark}")));
        }
        let (only_a, only_b) = (only(0), only(1));
        let diff = DumpDiff {
            verdict: Verdict::Unjudged,
            a: self.a.display().to_string(),
            b: self.b.display().to_string(),
            tensors,
            only_a,
            only_b,
            not_compared: not_compared.into_iter().collect(),
            remarks,
        };
        diff.judged()
    }
}

fn pair(dumps: &[Opened; 2], one: &Stored, other: &Stored) -> TensorDiff {
    let bytes = [dumps[0].bytes(one), dumps[1].bytes(other)];
    let a = Side { dtype: one.dtype, shape: &one.shape, bytes: &bytes[0] };
    let b = Side { dtype: other.dtype, shape: &other.shape, bytes: &bytes[1] };
    compare(&one.name, &a, &b)
}

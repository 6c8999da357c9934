//! `assay inspect`: the tensors of dumps, whatever wrote them, and what they hold in a few numbers.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Args;
use device::dump::{Opened, ReadOptions, Stored};
use goldens::{Statistics, statistics};
use rayon::prelude::*;
use serde::Serialize;

use super::show::{Format, json, table};
use crate::exit_codes::Code;
use crate::output;
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::report::text::{grouped, plain};

/// The request.
#[derive(Args)]
pub struct Inspect {
    /// Dumps: .pt, .npy, .npz or .safetensors files, argument dumps, or directories of them
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Take NumPy's two-byte void and its 16-bit unsigned integers for BF16
    #[arg(long)]
    bf16: bool,
    /// Format of the answer
    #[arg(long, value_enum, default_value_t = Format::Human)]
    format: Format,
}

/// All files.
#[derive(Serialize)]
struct Answer {
    files: Vec<Inspected>,
}

/// One file.
#[derive(Serialize)]
struct Inspected {
    path: String,
    format: &'static str,
    tensors: Vec<Tensor>,
    unusable: Vec<Unusable>,
    remarks: Vec<String>,
}

#[derive(Serialize)]
struct Tensor {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    #[serde(flatten)]
    statistics: Statistics,
}

#[derive(Serialize)]
struct Unusable {
    name: String,
    reason: String,
}

impl Inspect {
    /// Reads all files, then shows them.
    ///
    /// # Errors
    /// The first file that is refused.
    pub fn run(&self) -> Result<Code, Refusal> {
        let options = ReadOptions { bf16: self.bf16 };
        let opened = self.files.iter().map(|path| Opened::open(path, &options)).collect::<Result<Vec<_>, _>>()?;
        let bytes = opened.iter().flat_map(|dump| &dump.tensors).map(|tensor| tensor.length() as u64).sum();
        let (bar, done) = (Bar::of_bytes(bytes), AtomicU64::new(0));
        let files = opened.iter().map(|dump| inspect(dump, &bar, &done)).collect();
        drop(bar);
        let answer = Answer { files };
        match self.format {
            Format::Json => json(&answer)?,
            Format::Human => output::stdout(&text(&answer))?,
        }
        Ok(Code::Pass)
    }
}

fn inspect(dump: &Opened, bar: &Bar, done: &AtomicU64) -> Inspected {
    let one = |stored: &Stored| {
        let statistics = statistics(stored.dtype, &dump.bytes(stored));
        bar.reached(done.fetch_add(stored.length() as u64, Ordering::Relaxed) + stored.length() as u64);
        Tensor { name: stored.name.clone(), dtype: stored.dtype.to_string(), shape: stored.shape.clone(), statistics }
    };
    let unusable = dump.unusable.iter();
    Inspected {
        path: dump.path.display().to_string(),
        format: dump.format.name(),
        tensors: dump.tensors.par_iter().map(one).collect(),
        unusable: unusable.map(|bad| Unusable { name: bad.name.clone(), reason: bad.reason.clone() }).collect(),
        remarks: dump.remarks.clone(),
    }
}

fn text(answer: &Answer) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut out, answer);
    out
}

fn write(out: &mut String, answer: &Answer) -> std::fmt::Result {
    for (index, file) in answer.files.iter().enumerate() {
        if index > 0 {
            writeln!(out)?;
        }
        writeln!(out, "{}  {}", plain(&file.path), file.format)?;
        let shown = |value: Option<goldens::Scalar>| value.map_or("-".to_owned(), |value| value.to_string());
        let rows = file.tensors.iter().map(|Tensor { name, dtype, shape, statistics }| {
            [
                name.clone(),
                dtype.clone(),
                format!("{shape:?}"),
                shown(statistics.min),
                shown(statistics.max),
                grouped(statistics.nonfinite),
                statistics.sha256.get(..16).unwrap_or_default().to_owned(),
            ]
        });
        if !file.tensors.is_empty() {
            table(out, ["tensor", "dtype", "shape", "min", "max", "non-finite", "sha256"], rows);
        } else {
            writeln!(out, "  no tensor")?;
        }
        for Unusable { name, reason } in &file.unusable {
            writeln!(out, "  not usable: {}: {}", plain(name), plain(reason))?;
        }
        for remark in &file.remarks {
            writeln!(out, "  remark: {}", plain(remark))?;
        }
    }
    Ok(())
}

//! `assay import`: a dump of other tools made a bundle. What each entry was taken as is shown with the evidence.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use anstyle::Style;
use cases::{CASE_FILE, Case, InputStore, Inputs};
use clap::Args;
use comfy_table::{Cell, CellAlignment, Table};
use device::dump::{NamedArray, ReadOptions, read, write_safetensors};
use device::{CAPTURES_FILE, read_outputs, write_captures};
use goldens::Progress as _;
use goldens::exchange::{Candidate, Identified, IdentifiedEntry, Taken, identify, read_map};
use serde::Serialize;

use crate::commands::export::Folder;
use crate::commands::show::{Format, json};
use crate::exit_codes::Code;
use crate::output;
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::report::human::{DIM, TABLE};
use crate::report::text::{grouped, plain};

/// The request.
#[derive(Args)]
pub struct Import {
    /// A .pt, .npy, .npz or safetensors file, a directory of them (a golden-data directory among others), or an
    /// argument dump of the runtime
    #[arg(value_name = "DUMP")]
    dump: PathBuf,
    /// The decode-layer case that was run
    #[arg(long, value_name = "CASE")]
    case: PathBuf,
    /// Bundle to write; the directory must not be there, or be empty
    #[arg(long, value_name = "BUNDLE-DIR")]
    to: PathBuf,
    /// YAML file {entry: tensor} for entries whose names say nothing or the wrong thing; `ignore` leaves one out
    #[arg(long, value_name = "FILE")]
    map: Option<PathBuf>,
    /// Take NumPy's two-byte void and 16-bit unsigned integers, as which BF16 is saved, for BF16
    #[arg(long)]
    bf16: bool,
    /// Format on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    format: Format,
}

/// The answer in JSON.
#[derive(Serialize)]
struct Imported<'a> {
    case: &'a str,
    bundle: String,
    #[serde(flatten)]
    identified: &'a Identified,
}

impl Import {
    /// Reads, identifies and writes.
    ///
    /// # Errors
    /// The dump, the case or the map is wrong, they contradict one another, or entries cannot be told apart.
    pub fn run(&self) -> Result<Code, Refusal> {
        let folder = Folder::beside(&self.to)?;
        let case = Case::load(&self.case)?;
        if case.batch().is_none() {
            return Err(Refusal::Request(format!(
                "{}: is a {} case; dumps are imported for a decode layer's",
                case.path.display(),
                case.kernel.kind().name()
            )));
        }
        let map = match &self.map {
            Some(file) => read_map(file).map_err(Refusal::Request)?,
            None => BTreeMap::new(),
        };
        let dump =
            read(&self.dump, &ReadOptions { bf16: self.bf16 }).map_err(|error| Refusal::Request(error.to_string()))?;
        let bar = Bar::new(0);
        bar.begin(&case.name);
        bar.step("inputs");
        let inputs = Inputs::generate(&case, &InputStore::new())?;
        bar.step("entries");
        let identified = identify(&case, &inputs, &dump, &map)
            .map_err(|error| Refusal::Request(format!("{}: {error}", self.dump.display())))?;
        bar.step("writing");
        let arrays: Vec<NamedArray> = identified
            .outputs
            .iter()
            .filter_map(|(name, output)| {
                let mut array = dump.arrays.get(output.index)?.array.clone();
                array.shape.clone_from(&output.shape);
                Some(NamedArray { name: name.clone(), array })
            })
            .collect();
        let file = folder.path().join(CAPTURES_FILE);
        write_safetensors(&file, &arrays).map_err(|error| Refusal::Request(error.to_string()))?;
        let captures = read_outputs(&file, &case, &inputs).map_err(|error| Refusal::Request(error.to_string()))?;
        let captures = captures.unwrap_or_default();
        write_captures(&file, &captures)?;
        // The outputs are those of the dump and no recording's.
        let case = Case { device: None, final_cache_sha256: [].into(), ..case };
        let copy = folder.path().join(CASE_FILE);
        device::write_atomically(&copy, case.to_yaml().as_bytes())
            .map_err(|error| Refusal::Write { path: copy.clone(), error })?;
        drop(bar);
        folder.settle(&self.to)?;
        match self.format {
            Format::Json => {
                json(&Imported { case: &case.name, bundle: self.to.display().to_string(), identified: &identified })?;
            }
            Format::Human => output::stdout(&human(&case.name, &self.to.display().to_string(), &identified))?,
        }
        Ok(Code::Pass)
    }
}

fn human(case: &str, to: &str, identified: &Identified) -> String {
    let mut table = Table::new();
    table.load_style(TABLE).enforce_styling();
    table.set_header(["entry", "taken as", "equal", "of", "distance", "next best", "why"]);
    for column in table.column_iter_mut().skip(2).take(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for entry in &identified.entries {
        table.add_row(row(entry));
    }
    let mut out = format!("{}\n", plain(case));
    for line in table.lines() {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "  {}", line.trim_end());
    }
    for remark in &identified.remarks {
        let _ = writeln!(out, "  remark: {}", plain(remark));
    }
    let names: Vec<String> = identified.outputs.keys().map(|name| plain(name).into_owned()).collect();
    if !identified.outputs.contains_key("out") {
        let _ = writeln!(out, "  no `out` is among them, without which the gate leaves the case unjudged");
    }
    let dim: Style = DIM;
    let _ = writeln!(out, "{} in {}; {dim}judge it: assay gate {1}{dim:#}", names.join(", "), plain(to));
    out
}

fn row(entry: &IdentifiedEntry) -> Vec<Cell> {
    let taken = match &entry.taken {
        Taken::Output(tensor) => tensor.clone(),
        Taken::Input(tensor) => format!("{tensor} (input)"),
        Taken::Nothing => "-".to_owned(),
    };
    let own = match &entry.taken {
        Taken::Output(tensor) | Taken::Input(tensor) => {
            entry.candidates.iter().find(|candidate| candidate.tensor == *tensor)
        }
        Taken::Nothing => entry.candidates.first(),
    };
    let next = entry.candidates.iter().find(|candidate| Some(&candidate.tensor) != own.map(|own| &own.tensor));
    let next = next.map(|next| format!("{}: {} equal, {}", next.tensor, grouped(next.distance.equal), distance(next)));
    let cells = [
        plain(&entry.name).into_owned(),
        taken,
        own.map(|own| grouped(own.distance.equal)).unwrap_or_default(),
        own.map(|own| grouped(own.distance.elements)).unwrap_or_default(),
        own.map(distance).unwrap_or_default(),
        next.unwrap_or_default(),
        plain(&entry.why).into_owned(),
    ];
    cells.into_iter().map(Cell::new).collect()
}

fn distance(candidate: &Candidate) -> String {
    match candidate.relative {
        0.0 => "0".to_owned(),
        relative => format!("{relative:.1e}"),
    }
}

//! The kernel of a case on a device: every buffer between guards, what is to be written poisoned, as many launches
//! from the same state as asked for, and what came back as captures beside what was seen of the guards.

use std::path::Path;
use std::time::Duration;

use bytemuck::cast_slice;
use cases::{Argument as Role, BatchTensor, Case, Input, Inputs, Launch};
use half::bf16;
use ndarray::{Array1, Array2};
use reference::{BATCH, Batch, DType, Tensor, TensorId};

use super::error::AclError;
use super::guard::{Content, Guarded, Stray, Unwritten};
use super::objects::{Argument, Buffer};
use super::runtime::Device;
use crate::captures::{Captured, Captures, Element, WrittenRows};

/// Findings of one kind that are kept.
const KEPT: usize = 16;

/// How a kernel is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How often it is launched, at least once.
    pub launches: usize,
    /// The longest that is waited for one launch.
    pub wait: Duration,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    /// What the first launch gave.
    pub captures: Captures,
    /// How often the kernel was launched.
    pub launches: usize,
    /// Writes where it must not write, of the first launch that made any.
    pub strays: Vec<Stray>,
    /// Elements that it never wrote, of the first launch that left any.
    pub unwritten: Vec<Unwritten>,
    /// A launch that gave other bytes than the first.
    pub differing: Option<Differing>,
    /// The device's number.
    pub device: i32,
    /// The name of its chip.
    pub soc: Option<String>,
}

/// A launch that gave other bytes than the first, from the same state.
#[derive(Clone, Debug, PartialEq)]
pub struct Differing {
    /// Which, from 1.
    pub launch: usize,
    /// How many did.
    pub launches: usize,
    /// What it gave.
    pub captures: Captures,
}

/// A buffer and what it is to the kernel.
struct Part<'d> {
    role: Role,
    guarded: Guarded,
    buffer: Buffer<'d>,
}

/// Runs the kernel of a case. `step` hears what is done.
///
/// # Errors
/// The device fails, hangs or is too small; the library is too old; the binary does not hold the kernel.
pub fn run(
    device: &Device<'_>,
    case: &Case,
    launch: &Launch,
    inputs: &Inputs,
    limits: Limits,
    step: &dyn Fn(&str),
) -> Result<Observed, AclError> {
    let mut observed = Observed {
        captures: Captures::default(),
        launches: limits.launches.max(1),
        strays: Vec::new(),
        unwritten: Vec::new(),
        differing: None,
        device: device.index(),
        soc: device.facts()?.soc,
    };
    let Some(batch) = case.batch() else { return Ok(observed) };
    let tables = Tables::of(batch);
    let run = Run { case, inputs, tables: &tables };
    let module = device.module(&binary(case, launch))?;
    let function = module.function(&launch.function)?;
    let mut values = Vec::new();
    let mut parts = Vec::new();
    for (index, &role) in launch.arguments.iter().enumerate() {
        match role {
            Role::Scalar(scalar) => values.push(scalar.bytes(case.active_batch)),
            _ => {
                let guarded = run.guarded(index, role);
                let taking = |error: AclError| {
                    error.during(format!("taking {} bytes of device memory for {}", guarded.bytes(), guarded.name))
                };
                parts.push(Part { role, buffer: device.buffer(guarded.bytes()).map_err(taking)?, guarded });
            }
        }
    }
    // Made last, so that it is given back before the memory that its kernels write.
    let stream = device.stream()?;
    let mut first = Vec::new();
    for number in 1..=observed.launches {
        let what = format!("launch {number} of {}", observed.launches);
        step(&what);
        for part in &parts {
            let image = run.image(part);
            part.buffer
                .upload(&image)
                .map_err(|error| error.during(format!("copying {} to the device", part.guarded.name)))?;
        }
        let mut addresses = parts.iter().map(|part| Argument::Address(&part.buffer, part.guarded.margin));
        let mut scalars = values.iter().map(|bytes| Argument::Value(bytes));
        let mut next = |role: &Role| if matches!(role, Role::Scalar(_)) { scalars.next() } else { addresses.next() };
        let arguments: Vec<Argument<'_>> = launch.arguments.iter().filter_map(&mut next).collect();
        stream
            .launch(&function, launch.blocks, &arguments)
            .map_err(|error| error.during(format!("{what}, {}", launch.function)))?;
        let waiting = |error: AclError| {
            error.during(format!("{what}, waiting for {} at most {} s", launch.function, limits.wait.as_secs_f64()))
        };
        stream.wait(limits.wait).map_err(waiting)?;
        let found = run.read_back(&parts, number)?;
        if observed.strays.is_empty() {
            observed.strays = found.strays;
        }
        if observed.unwritten.is_empty() {
            observed.unwritten = found.unwritten;
        }
        if number == 1 {
            observed.captures = run.captures(&parts, &found.written);
            first = found.written;
        } else if found.written != first {
            match &mut observed.differing {
                Some(differing) => differing.launches += 1,
                none => {
                    let captures = run.captures(&parts, &found.written);
                    *none = Some(Differing { launch: number, launches: 1, captures });
                }
            }
        }
    }
    Ok(observed)
}

/// The file that holds the kernel of a case.
#[must_use]
pub fn binary(case: &Case, launch: &Launch) -> std::path::PathBuf {
    let folder = case.directory();
    // The library looks for a plain name in places of its own.
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    folder.join(&launch.binary)
}

/// What one launch left behind.
struct Found {
    /// The bytes of each part that the kernel may write, workspaces excepted.
    written: Vec<Vec<u8>>,
    strays: Vec<Stray>,
    unwritten: Vec<Unwritten>,
}

/// Batch metadata as the kernel reads it.
struct Tables {
    seq_lens: Vec<i32>,
    block_table: Vec<i32>,
    slots: Vec<i32>,
}

impl Tables {
    fn of(batch: &Batch) -> Self {
        // Sizes of a case are at most 2^20.
        let narrow =
            |values: &[usize; BATCH]| values.iter().map(|&value| i32::try_from(value).unwrap_or(i32::MAX)).collect();
        Self { seq_lens: narrow(&batch.seq_lens), block_table: batch.block_table.concat(), slots: narrow(&batch.slots) }
    }

    fn bytes(&self, tensor: BatchTensor) -> &[u8] {
        cast_slice(match tensor {
            BatchTensor::SeqLens => &self.seq_lens,
            BatchTensor::BlockTable => &self.block_table,
            BatchTensor::SlotMapping => &self.slots,
        })
    }
}

/// What a run is made from.
struct Run<'a> {
    case: &'a Case,
    inputs: &'a Inputs,
    tables: &'a Tables,
}

impl Run<'_> {
    /// The buffer of an argument that is an address.
    fn guarded(&self, index: usize, role: Role) -> Guarded {
        let name = role.name().map_or_else(|| format!("workspace arguments[{index}]"), str::to_owned);
        match role {
            Role::Input(input) => {
                Guarded::tensor(&name, input.shape(&self.case.geometry, self.case.extent()), input.dtype())
            }
            Role::Batch(tensor) => Guarded::tensor(&name, [1, self.tables.bytes(tensor).len() / 4], DType::I32),
            Role::Output(id) => Guarded::tensor(&name, id.shape(&self.case.geometry), id.dtype()),
            Role::Workspace { bytes, .. } => Guarded::plain(&name, usize::try_from(bytes).unwrap_or(usize::MAX)),
            Role::Scalar(_) => Guarded::plain(&name, 0),
        }
    }

    /// The bytes of what the kernel reads.
    fn given(&self, role: Role) -> Option<&[u8]> {
        match role {
            Role::Input(input) => self.inputs.bytes(input),
            Role::Batch(tensor) => Some(self.tables.bytes(tensor)),
            _ => None,
        }
    }

    fn image(&self, part: &Part<'_>) -> Vec<u8> {
        part.guarded.image(match (self.given(part.role), part.role) {
            (Some(bytes), _) => Content::Bytes(bytes),
            (None, Role::Workspace { zero: true, .. }) => Content::Zeros,
            (None, Role::Workspace { zero: false, .. }) => Content::Junk,
            (None, _) => Content::Poison,
        })
    }

    /// Copies every buffer back and looks at its guards.
    fn read_back(&self, parts: &[Part<'_>], launch: usize) -> Result<Found, AclError> {
        let mut found = Found { written: Vec::new(), strays: Vec::new(), unwritten: Vec::new() };
        for Part { role, guarded, buffer } in parts {
            let mut image = vec![0; guarded.bytes()];
            buffer
                .download(&mut image)
                .map_err(|error| error.during(format!("copying {} from the device", guarded.name)))?;
            let kept = self.given(*role).filter(|_| !role.is_written());
            found.strays.extend(guarded.strays(&image, kept, launch));
            if let Role::Output(_) = role {
                found.unwritten.extend(guarded.unwritten(&image, launch));
            }
            if role.is_written() {
                found.written.push(guarded.data(&image).to_vec());
            }
        }
        found.strays.truncate(KEPT);
        found.unwritten.truncate(KEPT);
        Ok(found)
    }

    /// What was written, as captures.
    fn captures(&self, parts: &[Part<'_>], written: &[Vec<u8>]) -> Captures {
        let mut captures = Captures::default();
        for (part, bytes) in parts.iter().filter(|part| part.role.is_written()).zip(written) {
            match part.role {
                Role::Output(id) => {
                    if let Some(tensor) = tensor(id, id.shape(&self.case.geometry), bytes) {
                        captures.tensors.insert(id, Captured::Values(tensor));
                    }
                }
                Role::Input(input) => {
                    let rows = self.inputs.bytes(input).map(|before| changed(before, bytes, part.guarded.columns));
                    match input {
                        Input::KCache => captures.k_written = rows,
                        _ => captures.v_written = rows,
                    }
                }
                _ => {}
            }
        }
        captures
    }
}

/// Bytes as a tensor of the contract's type.
fn tensor(id: TensorId, [rows, columns]: [usize; 2], bytes: &[u8]) -> Option<Tensor> {
    let shape = (rows, columns);
    match id.dtype() {
        DType::Bf16 => Array2::from_shape_vec(shape, bf16::decode(bytes)).map(Tensor::Bf16).ok(),
        DType::I8 => Array2::from_shape_vec(shape, i8::decode(bytes)).map(Tensor::I8).ok(),
        _ => Array2::from_shape_vec(shape, f32::decode(bytes)).map(Tensor::F32).ok(),
    }
}

/// The rows of a cache whose bytes changed.
fn changed(before: &[u8], after: &[u8], columns: usize) -> WrittenRows {
    let width = columns * DType::Bf16.size();
    let pairs = before.chunks_exact(width).zip(after.chunks_exact(width)).enumerate();
    let (rows, values): (Vec<i64>, Vec<&[u8]>) =
        pairs.filter(|(_, (before, after))| before != after).map(|(row, (_, after))| (row as i64, after)).unzip();
    let values = Array2::from_shape_vec((rows.len(), columns), bf16::decode(&values.concat()));
    WrittenRows {
        rows: Captured::Values(Array1::from(rows)),
        // As many values as were cut from whole rows.
        values: Captured::Values(values.unwrap_or_else(|_| Array2::from_elem((0, columns), bf16::ZERO))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_rows_are_those_whose_bytes_changed() {
        let before: Vec<u8> = (0..24).collect();
        let mut after = before.clone();
        after[5] ^= 1;
        after[23] ^= 1;
        let rows = changed(&before, &after, 2);
        assert_eq!(rows.rows, Captured::Values(Array1::from(vec![1, 5])));
        let values = rows.values.values().unwrap();
        assert_eq!((values.dim(), values[(1, 1)].to_bits()), ((2, 2), u16::from_le_bytes([after[22], after[23]])));
        assert_eq!(changed(&before, &before, 2).rows, Captured::Values(Array1::from(Vec::<i64>::new())));
    }

    #[test]
    fn a_binary_lies_beside_its_case() {
        let case = cases::new_case(cases::NewCase::named("t", "mini").unwrap()).unwrap();
        let launch = Launch { binary: "k/a.o".to_owned(), function: "f".to_owned(), blocks: 1, arguments: Vec::new() };
        let at = |path: &str| binary(&Case { path: path.into(), ..case.clone() }, &launch);
        assert_eq!(at("bundle/case.yaml"), Path::new("bundle/k/a.o"));
        assert_eq!(at("case.yaml"), Path::new("./k/a.o"));
    }
}

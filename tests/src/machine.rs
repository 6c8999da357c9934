//! A machine with a device: a copy of the library that stands in for AscendCL, what it is to do wrong, and kernels that
//! replay what a [`Bench`] gave.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use ::device::{Captured, Captures, WrittenRows};
use cases::{
    Argument, BatchTensor, CASE_FILE, Case, DeviceInfo, DeviceKind, Input, Launch, Scalar, ScalarKind, ScalarValue,
};
use half::bf16;
use reference::{Tensor, TensorId};
use tempfile::TempDir;

use crate::{Bench, assay, mock_ascendcl};

/// A machine of its own.
pub struct Machine {
    /// Its files.
    pub dir: TempDir,
}

/// A case on a machine, and the kernel that it names.
pub struct Kernel {
    /// The case file.
    pub case: PathBuf,
    /// What the kernel is given.
    pub arguments: Vec<Argument>,
}

impl Machine {
    /// A machine whose device does what these words say (`tests/mock-ascendcl/src/plan.rs`), and nothing else wrong.
    #[must_use]
    pub fn new(words: &str) -> Self {
        let machine = Self { dir: tempfile::tempdir().unwrap() };
        fs::copy(mock_ascendcl(), machine.library()).unwrap();
        machine.plan(words);
        machine
    }

    /// Changes what the device does, in processes to come.
    pub fn plan(&self, words: &str) {
        let log = self.dir.path().join("log");
        let _ = fs::remove_file(&log);
        fs::write(self.dir.path().join("libascendcl.so.plan"), format!("log={},{words}", log.display())).unwrap();
    }

    /// The library.
    #[must_use]
    pub fn library(&self) -> PathBuf {
        self.dir.path().join("libascendcl.so")
    }

    /// The calls that were made, one a line.
    #[must_use]
    pub fn log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Runs the program here.
    #[must_use]
    pub fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(assay());
        command.args(args).current_dir(self.dir.path()).stdin(Stdio::null());
        command.env("ASSAY_ASCENDCL", self.library()).env_remove("GITHUB_STEP_SUMMARY").env_remove("CLICOLOR_FORCE");
        command.output().unwrap()
    }

    /// A case in a folder of its own whose kernel asks for the bench's inputs, and gives its outputs.
    #[must_use]
    pub fn kernel(&self, folder: &str, bench: &Bench) -> Kernel {
        let folder = self.dir.path().join(folder);
        fs::create_dir_all(&folder).unwrap();
        let inputs = Input::ALL.into_iter().filter(|input| input.of_decode_layer()).map(Argument::Input);
        let batch = BatchTensor::ALL.into_iter().map(Argument::Batch);
        let active = Scalar { kind: ScalarKind::Int32, value: ScalarValue::ActiveBatch };
        let others = [Argument::Scalar(active), Argument::Workspace { bytes: 4096, zero: true }];
        let outputs = bench.captures.tensors.keys().map(|&id| Argument::Output(id));
        let arguments: Vec<Argument> = inputs.chain(batch).chain(others).chain(outputs).collect();
        let mut text = "function replay\n".to_owned();
        let mut line = |word: &str, index: usize, bytes: &[u8]| {
            fs::write(folder.join(format!("{word}.{index}")), bytes).unwrap();
            writeln!(text, "{word} {index} {word}.{index}").unwrap();
        };
        for (index, argument) in arguments.iter().enumerate() {
            match *argument {
                Argument::Input(input @ (Input::KCache | Input::VCache)) => {
                    line("expect", index, bench.inputs.bytes(input).unwrap());
                    line("store", index, &cache_after(bench, input));
                }
                // The weights are many bytes, and go the same way.
                Argument::Input(input @ (Input::HiddenStates | Input::WqScale | Input::RopeSin)) => {
                    line("expect", index, bench.inputs.bytes(input).unwrap());
                }
                Argument::Batch(tensor) => line("expect", index, &batch_bytes(&bench.case, tensor)),
                Argument::Scalar(_) => line("expect", index, &(bench.case.active_batch as i32).to_le_bytes()),
                Argument::Workspace { bytes, .. } => line("expect", index, &vec![0; bytes as usize]),
                Argument::Output(id) => line("store", index, &tensor_bytes(&bench.captures, id)),
                Argument::Input(_) => {}
            }
        }
        fs::write(folder.join("kernel.txt"), text).unwrap();
        let launch = Launch {
            binary: "kernel.txt".to_owned(),
            function: "replay".to_owned(),
            blocks: 4,
            arguments: arguments.clone(),
        };
        let device = DeviceInfo {
            kind: DeviceKind::Npu,
            kernel_revision: Some("0a1b2c3d".to_owned()),
            exp_ulp: None,
            kernel: Some(Box::new(launch)),
        };
        let case = Case { device: Some(device), inputs_sha256: bench.inputs.hashes(), ..bench.case.clone() };
        let path = folder.join(CASE_FILE);
        fs::write(&path, case.to_yaml()).unwrap();
        Kernel { case: path, arguments }
    }
}

impl Kernel {
    /// The place of a tensor among the arguments.
    #[must_use]
    pub fn index(&self, name: &str) -> usize {
        self.arguments.iter().position(|argument| argument.name() == Some(name)).unwrap()
    }

    /// The case file as text.
    #[must_use]
    pub fn text(&self) -> &str {
        Path::to_str(&self.case).unwrap()
    }
}

fn batch_bytes(case: &Case, tensor: BatchTensor) -> Vec<u8> {
    let batch = case.batch().unwrap();
    let values: Vec<i32> = match tensor {
        BatchTensor::SeqLens => batch.seq_lens.iter().map(|&value| value as i32).collect(),
        BatchTensor::BlockTable => batch.block_table.concat(),
        BatchTensor::SlotMapping => batch.slots.iter().map(|&value| value as i32).collect(),
    };
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn tensor_bytes(captures: &Captures, id: TensorId) -> Vec<u8> {
    match captures.tensors[&id].values().unwrap() {
        Tensor::Bf16(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        Tensor::F32(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        Tensor::I8(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

/// A whole cache with what the device wrote.
fn cache_after(bench: &Bench, input: Input) -> Vec<u8> {
    let written = if input == Input::KCache { &bench.captures.k_written } else { &bench.captures.v_written };
    let Some(WrittenRows { rows: Captured::Values(rows), values: Captured::Values(values) }) = written else {
        panic!("the bench captured its caches")
    };
    let mut bytes = bench.inputs.bytes(input).unwrap().to_vec();
    let width = values.ncols() * size_of::<bf16>();
    for (&row, values) in rows.iter().zip(values.rows()) {
        let place = &mut bytes[row as usize * width..][..width];
        place.copy_from_slice(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>());
    }
    bytes
}

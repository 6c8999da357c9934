//! Somebody else's golden of the same layer, `tests/peers/torch_golden.py`, run on the same inputs in turn with ours.
//! The two processes speak in lines: a command goes in, an answer comes out. The script documents both.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use half::bf16;
use ndarray::{ArrayView1, ArrayView2};
use reference::kernels::matmul_i8;
use reference::stages::{Trace, run_layer};
use reference::{BATCH, DownWeight, LayerInputs, Policy, TensorId};
use safetensors::{Dtype, View};
use serde::Deserialize;
use thiserror::Error;

use super::Line;
use crate::report::text::{grouped, plain};

/// Lines of the PyTorch peer, and the form of its products behind each.
pub const TORCH: &[(&str, &str)] =
    &[("peer_torch_f32_held", "f32_held"), ("peer_torch_converted", "converted"), ("peer_torch_int_mm", "int_mm")];

/// The peer's program, so that an installed `assay` has it.
const SCRIPT: &str = include_str!("../../../tests/peers/torch_golden.py");
/// Runs of either side; odd, so that the median is one of them.
const RUNS: usize = 5;
/// Between a run of one side and the other's: worker threads of either spin for a while before they sleep.
const PAUSE: Duration = Duration::from_millis(30);
/// Bytes of an answer at most.
const LONGEST: u64 = 1 << 16;
/// The tensors that a check compares.
const COMPARED: [&str; 9] =
    ["attn_out_i8", "mlp_norm_i8", "normed_i8", "w_gate_sums", "w_up_sums", "wk_sums", "wo_sums", "wq_sums", "wv_sums"];

/// Why there is no comparison with a peer.
#[derive(Debug, Error)]
pub enum PeerError {
    /// Not installed.
    #[error("{what}; install it with `{install}`, or name another interpreter with --python")]
    Absent {
        /// What is not there.
        what: String,
        /// The command that would install it.
        install: String,
    },
    /// There is no such program.
    #[error("{}: no interpreter that can be run: {error}; name one with --python", path.display())]
    NoInterpreter {
        /// What was to be run.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// It began and did not go on.
    #[error("the peer failed: {0}")]
    Failed(String),
}

impl From<io::Error> for PeerError {
    fn from(error: io::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

/// What came of it.
#[derive(Debug)]
pub struct Comparison {
    /// One line for each form asked for.
    pub lines: Vec<Line>,
    /// What a person should know.
    pub notes: Vec<String>,
    /// Whether every INT8 and INT32 tensor is the same on both sides.
    pub equal: bool,
}

/// Finds out whether the interpreter can be run at all, which is known before anything is measured.
///
/// # Errors
/// It cannot.
pub fn require(python: &Path) -> Result<(), PeerError> {
    let mut command = Command::new(python);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| no_interpreter(python, error))?;
    // That it began is all that is asked; what it would say may take long.
    let _ = child.kill();
    let _ = child.wait();
    Ok(())
}

fn no_interpreter(python: &Path, error: io::Error) -> PeerError {
    PeerError::NoInterpreter { path: python.to_path_buf(), error }
}

/// Runs the layer and the peer's `forms` of it in turn. `layer` has its weights as a checkpoint holds them; `ours` is
/// the name of the line that times the same layer. `begin` is told each form as it begins. Each answer of the peer has
/// `limit` to come.
///
/// # Errors
/// The peer is not installed, fails, or hangs.
pub fn compare(
    python: &Path,
    limit: Duration,
    layer: &LayerInputs<'_>,
    forms: &[(&str, &str)],
    ours: &str,
    begin: impl Fn(&str),
) -> Result<Comparison, PeerError> {
    let folder = tempfile::tempdir()?;
    let policy = Policy::rne();
    let trace = run_layer(layer, &policy);
    write_inputs(&folder.path().join("layer.safetensors"), layer)?;
    write_expected(&folder.path().join("expected.safetensors"), layer, &trace)?;
    drop(trace);
    let mut peer = Peer::start(python, limit, folder.path(), rayon::current_num_threads())?;
    let mut comparison = Comparison { lines: Vec::new(), notes: vec![format!("peer: {}", peer.name)], equal: true };
    let mut folder = Some(folder);
    for (name, form) in forms {
        begin(name);
        let checked = peer.check(form)?;
        // The peer has mapped the files: without them, nothing is left behind by an interruption.
        folder.take();
        comparison.equal &= checked.equal();
        comparison.notes.push(format!("{name}: {}", checked.sentence()));
        peer.seconds(form)?;
        let (mut own, mut others) = (Vec::new(), Vec::new());
        for _ in 0..RUNS {
            std::thread::sleep(PAUSE);
            let start = Instant::now();
            std::hint::black_box(run_layer(layer, &policy));
            own.push(start.elapsed().as_secs_f64());
            std::thread::sleep(PAUSE);
            others.push(peer.seconds(form)?);
        }
        comparison.lines.push(Line::new(name, &others, format!("assay {ours}"), super::median(&own)));
    }
    Ok(comparison)
}

/// What the peer found when it was given our inputs to each step with INT8 in it.
#[derive(Debug, Deserialize)]
struct Checked {
    tensors: Vec<Compared>,
    out: Compared,
}

/// How one tensor of the peer compares with ours.
#[derive(Debug, Deserialize)]
struct Compared {
    #[serde(default)]
    name: String,
    differ: u64,
    elements: u64,
}

/// The seconds of an answer: a time that a run can take.
fn seconds(answer: &str) -> Option<f64> {
    let seconds: f64 = answer.strip_prefix("seconds ")?.parse().ok()?;
    (seconds.is_finite() && seconds > 0.0).then_some(seconds)
}

/// As much of an answer as a message repeats.
fn cut(answer: &str) -> String {
    answer.chars().take(200).collect()
}

impl Checked {
    /// Refuses counts of other tensors than those that are to be compared, each once.
    fn require_all(&self) -> Result<(), PeerError> {
        let mut names: Vec<&str> = self.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        names.sort_unstable();
        if names == COMPARED {
            return Ok(());
        }
        let (found, expected) = (cut(&plain(&names.join(", "))), COMPARED.join(", "));
        Err(PeerError::Failed(format!("it compared the tensors [{found}]; expected [{expected}]")))
    }

    /// Whether every INT8 and INT32 tensor is ours; none compared is not equal.
    fn equal(&self) -> bool {
        !self.tensors.is_empty() && self.tensors.iter().all(|tensor| tensor.differ == 0 && tensor.elements > 0)
    }

    fn sentence(&self) -> String {
        let (differ, elements) = (self.out.differ, self.out.elements);
        let out = format!("its own `out` differs in {} of {} elements", grouped(differ), grouped(elements));
        if self.equal() {
            let names = self.tensors.iter().map(|tensor| tensor.name.as_str()).collect::<Vec<_>>().join(", ");
            return format!("all INT8 and INT32 tensors equal ({}); {out}", plain(&names));
        }
        let differing = self.tensors.iter().filter(|tensor| tensor.differ > 0 || tensor.elements == 0);
        let differing = differing.map(|tensor| {
            format!("{} in {} of {} elements", plain(&tensor.name), grouped(tensor.differ), grouped(tensor.elements))
        });
        format!("NOT EQUAL: {}; {out}", differing.collect::<Vec<_>>().join(", "))
    }
}

/// The peer's process.
struct Peer {
    child: Child,
    commands: ChildStdin,
    /// Lines of its standard output, read by a thread that ends with it.
    answers: Receiver<io::Result<String>>,
    /// How long each may take.
    limit: Duration,
    /// Where its standard error goes.
    said: PathBuf,
    /// What it is, in its own words.
    name: String,
}

impl Peer {
    fn start(python: &Path, limit: Duration, folder: &Path, threads: usize) -> Result<Self, PeerError> {
        let (script, said) = (folder.join("torch_golden.py"), folder.join("stderr.txt"));
        std::fs::write(&script, SCRIPT)?;
        let mut command = Command::new(python);
        command.arg(&script).arg(folder).arg(threads.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&said)?);
        let absent = |what: String| {
            let install = format!("{} -m pip install torch", python.display());
            PeerError::Absent { what, install }
        };
        let mut child = command.spawn().map_err(|error| no_interpreter(python, error))?;
        let (Some(commands), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(PeerError::Failed("it has no standard input and output".into()));
        };
        let (sender, receiver) = sync_channel(1);
        std::thread::spawn(move || {
            // An answer is short; what goes on without end is cut, and is no answer.
            let mut answers = BufReader::new(answers);
            loop {
                let mut line = Vec::new();
                let read = (&mut answers).take(LONGEST).read_until(b'\n', &mut line);
                let line = read.map(|_| String::from_utf8_lossy(&line).into_owned());
                if line.as_ref().is_ok_and(String::is_empty) || sender.send(line).is_err() {
                    break;
                }
            }
        });
        let mut peer = Self { child, commands, answers: receiver, limit, said, name: String::new() };
        let greeting = peer.answer("its start")?;
        match greeting.split_once(' ') {
            Some(("torch", _)) => peer.name = plain(&greeting).into_owned(),
            Some(("absent", reason)) => {
                return Err(absent(format!("{} has no usable torch ({})", python.display(), plain(reason))));
            }
            _ => return Err(PeerError::Failed(format!("it began with {:?}", cut(&greeting)))),
        }
        Ok(peer)
    }

    /// Seconds of one run of a form, as the peer's clock has it.
    fn seconds(&mut self, form: &str) -> Result<f64, PeerError> {
        let answer = self.ask(&format!("run {form}"))?;
        seconds(&answer)
            .ok_or_else(|| PeerError::Failed(format!("it answered {:?} where seconds were asked for", cut(&answer))))
    }

    fn check(&mut self, form: &str) -> Result<Checked, PeerError> {
        let answer = self.ask(&format!("check {form}"))?;
        let checked = answer.strip_prefix("checked ").and_then(|checked| serde_json::from_str(checked).ok());
        let checked: Checked = checked
            .ok_or_else(|| PeerError::Failed(format!("it answered {:?} where counts were asked for", cut(&answer))))?;
        checked.require_all()?;
        Ok(checked)
    }

    fn ask(&mut self, command: &str) -> Result<String, PeerError> {
        // A peer that has ended cannot be written to; its last words say more than that.
        let _ = writeln!(self.commands, "{command}").and_then(|()| self.commands.flush());
        self.answer(&format!("`{command}`"))
    }

    /// The next line of its standard output; `after` says what it answers.
    fn answer(&mut self, after: &str) -> Result<String, PeerError> {
        match self.answers.recv_timeout(self.limit) {
            Ok(line) => Ok(line?.trim_end().to_owned()),
            Err(RecvTimeoutError::Timeout) => Err(PeerError::Failed(format!(
                "it gave no answer within {} s of {after} and was ended; --peer-timeout gives it longer",
                self.limit.as_secs_f64()
            ))),
            Err(RecvTimeoutError::Disconnected) => {
                let said = std::fs::read_to_string(&self.said).unwrap_or_default();
                let last = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it ended without a word");
                Err(PeerError::Failed(plain(last).into_owned()))
            }
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended by itself, and then there is nothing to end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A tensor on its way to a file, read where it lies.
struct Stored<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: std::borrow::Cow<'a, [u8]>,
}

impl View for &Stored<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> std::borrow::Cow<'_, [u8]> {
        self.bytes.as_ref().into()
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// The tensors of a file.
#[derive(Default)]
struct Sink<'a>(Vec<(&'static str, Stored<'a>)>);

impl<'a> Sink<'a> {
    fn matrix<T: bytemuck::NoUninit>(&mut self, name: &'static str, dtype: Dtype, values: ArrayView2<'a, T>) {
        let shape = values.shape().to_vec();
        let bytes = match values.to_slice() {
            Some(values) => bytemuck::cast_slice(values).into(),
            None => values.iter().flat_map(|value| bytemuck::bytes_of(value).to_vec()).collect::<Vec<u8>>().into(),
        };
        self.0.push((name, Stored { dtype, shape, bytes }));
    }

    fn vector(&mut self, name: &'static str, values: ArrayView1<'a, f32>) {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        self.0.push((name, Stored { dtype: Dtype::F32, shape: vec![values.len()], bytes: bytes.into() }));
    }

    fn integers(&mut self, name: &'static str, shape: Vec<usize>, values: impl Iterator<Item = i64>) {
        let bytes = values.flat_map(i64::to_le_bytes).collect::<Vec<u8>>();
        self.0.push((name, Stored { dtype: Dtype::I64, shape, bytes: bytes.into() }));
    }

    fn write(&self, path: &Path) -> Result<(), PeerError> {
        let tensors = self.0.iter().map(|(name, stored)| (*name, stored));
        safetensors::serialize_to_file(tensors, None, path).map_err(|error| PeerError::Failed(error.to_string()))
    }
}

/// Everything the layer reads, under the names of `docs/numerics.md`.
fn write_inputs(path: &Path, layer: &LayerInputs<'_>) -> Result<(), PeerError> {
    let (w, batch) = (&layer.weights, layer.batch);
    let mut sink = Sink::default();
    sink.matrix::<bf16>("hidden_states", Dtype::BF16, layer.hidden_states);
    for (name, weight) in projections(layer) {
        sink.matrix::<i8>(name, Dtype::I8, weight.reversed_axes());
    }
    match w.w_down {
        DownWeight::Bf16(weight) => sink.matrix::<bf16>("w_down", Dtype::BF16, weight.reversed_axes()),
        DownWeight::Int8 { codes, scale } => {
            sink.matrix::<i8>("w_down", Dtype::I8, codes.reversed_axes());
            sink.vector("w_down_scale", scale);
        }
    }
    for (name, values) in [
        ("wq_scale", w.wq_scale),
        ("wk_scale", w.wk_scale),
        ("wv_scale", w.wv_scale),
        ("wo_scale", w.wo_scale),
        ("w_gate_scale", w.w_gate_scale),
        ("w_up_scale", w.w_up_scale),
        ("input_rms_weight", w.input_rms_weight),
        ("post_rms_weight", w.post_rms_weight),
        ("q_norm_weight", w.q_norm_weight),
        ("k_norm_weight", w.k_norm_weight),
    ] {
        sink.vector(name, values);
    }
    let eps = [layer.geometry.rms_norm_eps];
    sink.vector("rms_norm_eps", ArrayView1::from(eps.as_slice()));
    sink.matrix::<f32>("rope_cos", Dtype::F32, layer.rope_cos);
    sink.matrix::<f32>("rope_sin", Dtype::F32, layer.rope_sin);
    sink.matrix::<bf16>("k_cache", Dtype::BF16, layer.cache.k);
    sink.matrix::<bf16>("v_cache", Dtype::BF16, layer.cache.v);
    // Sizes and pages are far below 2^63.
    sink.integers("active_batch", vec![1], [batch.active as i64].into_iter());
    sink.integers("seq_lens", vec![BATCH], batch.seq_lens.iter().map(|&length| length as i64));
    sink.integers("slots", vec![BATCH], batch.slots.iter().map(|&slot| slot as i64));
    let blocks = batch.block_table.first().map_or(0, Vec::len);
    sink.integers(
        "block_table",
        vec![batch.block_table.len(), blocks],
        batch.block_table.iter().flatten().map(|&page| page.into()),
    );
    sink.write(path)
}

/// What the peer is held to: our activations before and after each row quantization, the sums of each INT8 product,
/// and the output.
fn write_expected(path: &Path, layer: &LayerInputs<'_>, trace: &Trace) -> Result<(), PeerError> {
    use TensorId as T;
    let mut sink = Sink::default();
    for id in [T::NormedStates, T::AttnOut, T::MlpNormIn, T::Out] {
        sink.matrix::<bf16>(id.name(), Dtype::BF16, trace.bf16(id));
    }
    for id in [T::NormedI8, T::AttnOutI8, T::MlpNormI8] {
        sink.matrix::<i8>(id.name(), Dtype::I8, trace.i8(id));
    }
    let [wq, wk, wv, wo, gate, up] = projections(layer).map(|(_, weight)| weight);
    let sums = [
        ("wq_sums", matmul_i8(trace.i8(T::NormedI8), wq)),
        ("wk_sums", matmul_i8(trace.i8(T::NormedI8), wk)),
        ("wv_sums", matmul_i8(trace.i8(T::NormedI8), wv)),
        ("wo_sums", matmul_i8(trace.i8(T::AttnOutI8), wo)),
        ("w_gate_sums", matmul_i8(trace.i8(T::MlpNormI8), gate)),
        ("w_up_sums", matmul_i8(trace.i8(T::MlpNormI8), up)),
    ];
    for (name, sums) in &sums {
        sink.matrix::<i32>(name, Dtype::I32, sums.view());
    }
    sink.write(path)
}

/// The INT8 weights by name, logically `[in, out]`.
fn projections<'a>(layer: &LayerInputs<'a>) -> [(&'static str, ArrayView2<'a, i8>); 6] {
    let w = &layer.weights;
    [("wq", w.wq), ("wk", w.wk), ("wv", w.wv), ("wo", w.wo), ("w_gate", w.w_gate), ("w_up", w.w_up)]
}

#[cfg(test)]
mod tests {
    use cases::PolicyRequest;
    use device::{Bundle, Captures, Layout};
    use goldens::report::Verdict;
    use goldens::{FALSE_ALARM, Job, judge};

    use super::*;
    use crate::bench::layer::{Layers, Shape, as_checkpoint, down_codes};

    /// Longer than anything on a small layer takes.
    const LIMIT: Duration = Duration::from_secs(600);

    /// The interpreter that tests use, as the command chooses it.
    fn python() -> PathBuf {
        let named = std::env::var_os("PYTHON").filter(|python| !python.is_empty());
        named.map_or_else(|| "python3".into(), PathBuf::from)
    }

    fn absent(error: &PeerError) -> bool {
        let absent = matches!(error, PeerError::Absent { .. });
        if absent {
            eprintln!("skipped: {error}");
        }
        absent
    }

    /// Runs `test` on a small layer with padding rows and contexts that end inside a tile.
    fn on_a_small_layer(test: impl FnOnce(&LayerInputs<'_>)) {
        let inputs = Layers::new("mini", 256).inputs(Shape { rows: 3, context: 137 }).unwrap();
        let down = down_codes(inputs.geometry()).unwrap();
        test(&as_checkpoint(inputs.layer(0).unwrap(), down.view()).unwrap());
    }

    #[test]
    fn the_torch_golden_gives_the_same_integers() {
        on_a_small_layer(|layer| {
            let compared = match compare(&python(), LIMIT, layer, TORCH, "layer_mini", |_| {}) {
                Err(error) if absent(&error) => return,
                other => other.unwrap(),
            };
            assert!(compared.equal, "{:?}", compared.notes);
            let names: Vec<_> = compared.lines.iter().map(|line| line.name.as_str()).collect();
            assert_eq!(names, TORCH.iter().map(|(name, _)| *name).collect::<Vec<_>>());
            assert!(compared.lines.iter().all(|line| line.seconds > 0.0 && line.floor == "assay layer_mini"));
        });
    }

    #[test]
    fn an_integer_that_differs_is_found() {
        on_a_small_layer(|layer| {
            let folder = tempfile::tempdir().unwrap();
            let mut trace = run_layer(layer, &Policy::rne());
            write_inputs(&folder.path().join("layer.safetensors"), layer).unwrap();
            // A code that is one off: it differs itself, and so do the sums of its row.
            let mut codes = trace.i8(TensorId::MlpNormI8).to_owned();
            codes[(2, 7)] ^= 1;
            trace.force(TensorId::MlpNormI8, std::sync::Arc::new(reference::Tensor::I8(codes)));
            write_expected(&folder.path().join("expected.safetensors"), layer, &trace).unwrap();
            let mut peer = match Peer::start(&python(), LIMIT, folder.path(), 1) {
                Err(error) if absent(&error) => return,
                other => other.unwrap(),
            };
            let checked = peer.check("int_mm").unwrap();
            let differing: Vec<_> = checked.tensors.iter().filter(|tensor| tensor.differ > 0).collect();
            assert!(!checked.equal() && differing.len() == 1, "{checked:?}");
            assert_eq!((differing[0].name.as_str(), differing[0].differ), ("mlp_norm_i8", 1));
            assert!(checked.sentence().starts_with("NOT EQUAL: mlp_norm_i8 in 1 of 40,960"), "{}", checked.sentence());
            let failed = peer.ask("run as_fast_as_possible").unwrap_err();
            assert!(failed.to_string().contains("no form as_fast_as_possible"), "{failed}");
        });
    }

    #[test]
    fn the_torch_golden_passes_the_gate_as_a_device_would() {
        let layers = Layers::new("mini", 256);
        for rows in [3, BATCH] {
            let shape = Shape { rows, context: 137 };
            let (case, inputs) = (layers.case(shape).unwrap(), layers.inputs(shape).unwrap());
            let layer = inputs.layer(0).unwrap();
            let folder = tempfile::tempdir().unwrap();
            write_inputs(&folder.path().join("layer.safetensors"), &layer).unwrap();
            write_expected(&folder.path().join("expected.safetensors"), &layer, &run_layer(&layer, &Policy::rne()))
                .unwrap();
            for (_, form) in TORCH {
                let mut peer = match Peer::start(&python(), LIMIT, folder.path(), 2) {
                    Err(error) if absent(&error) => return,
                    other => other.unwrap(),
                };
                let answer = peer.ask(&format!("capture {form}")).unwrap();
                let path = Path::new(answer.strip_prefix("captured ").unwrap());
                let captures = Captures::open(path, &case.geometry, &Layout::of(&case)).unwrap();
                let bundle = Bundle { dir: folder.path().into(), case: case.clone(), captures: Some(captures) };
                let job = Job {
                    bundle: &bundle,
                    inputs: &inputs,
                    policy: &PolicyRequest::Rne,
                    only: None,
                    false_alarm: FALSE_ALARM,
                    maps: false,
                };
                let report = judge(&job, &()).unwrap();
                assert_eq!(report.verdict, Verdict::Pass, "{form}: {report:?}");
                // All of the contract's tensors, and which rows of the two caches were written.
                assert_eq!(report.tensors.len(), TensorId::ALL.len() + 2);
            }
        }
    }

    #[test]
    fn without_an_interpreter_the_message_says_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let error = Peer::start(Path::new("no-such-python"), LIMIT, folder.path(), 1).err().unwrap().to_string();
        assert!(error.contains("no-such-python") && error.contains("--python"), "{error}");
        assert!(!error.contains("install"), "{error}");
        let required = require(Path::new("no-such-python")).unwrap_err().to_string();
        assert_eq!(required, error);
    }

    #[cfg(unix)]
    #[test]
    fn a_peer_that_hangs_is_ended() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let hung = folder.path().join("python");
        // As silent as an import that waits for a lock; it would outlast any test.
        std::fs::write(&hung, "#!/bin/sh\nexec sleep 86400\n").unwrap();
        std::fs::set_permissions(&hung, std::fs::Permissions::from_mode(0o755)).unwrap();
        let error = Peer::start(&hung, Duration::from_millis(50), folder.path(), 1).err().unwrap().to_string();
        assert!(error.contains("no answer within 0.05 s of its start"), "{error}");
        assert!(error.contains("--peer-timeout"), "{error}");
    }

    #[test]
    fn answers_that_cannot_be_are_refused() {
        assert_eq!(seconds("seconds 0.5"), Some(0.5));
        for wrong in ["seconds NaN", "seconds inf", "seconds -1", "seconds 0", "seconds", "0.5", "seconds x"] {
            assert_eq!(seconds(wrong), None, "{wrong}");
        }
        let compared = |names: &[&str]| Checked {
            tensors: names.iter().map(|&name| Compared { name: name.into(), differ: 0, elements: 1 }).collect(),
            out: Compared { name: String::new(), differ: 0, elements: 1 },
        };
        compared(&COMPARED).require_all().unwrap();
        for wrong in [&COMPARED[1..], &["made_up"], &[], &[&COMPARED[..], &["wq_sums"]].concat()] {
            let refused = compared(wrong).require_all().unwrap_err().to_string();
            assert!(refused.contains("expected [attn_out_i8, "), "{refused}");
        }
    }

    #[test]
    fn nothing_compared_is_not_equal() {
        let out = || Compared { name: String::new(), differ: 3, elements: 10 };
        assert!(!Checked { tensors: vec![], out: out() }.equal());
        let tensor = Compared { name: "normed_i8".into(), differ: 0, elements: 0 };
        assert!(!Checked { tensors: vec![tensor], out: out() }.equal());
    }
}

//! The lines of the benchmark: their names, and how each is run.

use std::path::Path;

use cases::{Checkpoint, InputStore, Inputs};
use goldens::compare_bf16;
use half::bf16;
use ndarray::Array2;
use rayon::prelude::*;
use reference::stages::run_layer;
use reference::{BATCH, Policy};

use super::floors::{Gauge, room};
use super::layer::{Layers, Layout, Shape, as_checkpoint, down_codes};
use super::model::{ModelStep, require_14b, weights};
use super::work::Work;
use super::{Floors, Line};
use crate::refusal::Refusal;

/// What a line times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A decode layer of the 14B geometry.
    Layer(Shape, Layout),
    /// Generation of all inputs of such a layer, into memory that is new each time.
    Inputs,
    /// Comparison of two BF16 tensors of 1 GiB each.
    Compare,
    /// A whole decode step of a checkpoint of the 14B geometry, from the token to the next one.
    Model(Shape),
}

/// All lines but the peer's, in the order in which they run: what shares inputs stands together.
pub const LINES: &[(&str, Subject)] = &[
    ("layer_14b_rows16_ctx200_in_out", layer(BATCH, 200, Layout::InOut)),
    ("layer_14b_rows16_ctx1000_in_out", layer(BATCH, 1000, Layout::InOut)),
    ("layer_14b_rows1_ctx200_in_out", layer(1, 200, Layout::InOut)),
    ("layer_14b_rows1_ctx1000_in_out", layer(1, 1000, Layout::InOut)),
    ("layer_14b_rows2_ctx200_in_out", layer(2, 200, Layout::InOut)),
    ("layer_14b_rows2_ctx1000_in_out", layer(2, 1000, Layout::InOut)),
    ("layer_14b_rows16_ctx200", layer(BATCH, 200, Layout::OutIn)),
    ("layer_14b_rows16_ctx1000", layer(BATCH, 1000, Layout::OutIn)),
    ("layer_14b_rows1_ctx200", layer(1, 200, Layout::OutIn)),
    ("layer_14b_rows1_ctx1000", layer(1, 1000, Layout::OutIn)),
    ("layer_14b_rows2_ctx200", layer(2, 200, Layout::OutIn)),
    ("layer_14b_rows2_ctx1000", layer(2, 1000, Layout::OutIn)),
    ("inputs_14b", Subject::Inputs),
    ("compare_bf16", Subject::Compare),
    ("model_14b_rows1", Subject::Model(Shape { rows: 1, context: 200 })),
];

/// The line that times the layer which peers are given.
pub const PEERS_LAYER: &str = "layer_14b_rows16_ctx200";

const fn layer(rows: usize, context: usize, layout: Layout) -> Subject {
    Subject::Layer(Shape { rows, context }, layout)
}

/// Runs lines one after the other; what they share stays between them.
pub struct Runner {
    gauge: Gauge,
    model: Option<Checkpoint>,
    layers: Option<Layers>,
    down: Option<Array2<i8>>,
}

/// Layers of the 14B geometry whose contexts fit into 1024 tokens.
pub fn layers_14b() -> Layers {
    Layers::new("14b", 1024)
}

impl Runner {
    /// A runner with a gauge of its own. `model` is the directory of the checkpoint that whole steps run on; it is
    /// opened before anything is measured.
    ///
    /// # Errors
    /// A checkpoint that is wrong, or of another geometry; no memory to measure with.
    pub fn new(model: Option<&Path>) -> Result<Self, Refusal> {
        let model = model.map(Checkpoint::open).transpose()?;
        model.iter().try_for_each(require_14b)?;
        Ok(Self { gauge: Gauge::new()?, model, layers: None, down: None })
    }

    /// Runs one line.
    ///
    /// # Errors
    /// Inputs that this machine cannot hold.
    pub fn run(&mut self, name: &str, subject: Subject) -> Result<Line, Refusal> {
        match subject {
            Subject::Layer(shape, layout) => self.layer(name, shape, layout),
            Subject::Inputs => self.inputs(name),
            Subject::Compare => self.compare(name),
            Subject::Model(shape) => self.model(name, shape),
        }
    }

    /// Ends the run and frees what it held; the best floors seen.
    pub fn finish(mut self) -> Floors {
        self.gauge.best()
    }

    fn layer(&mut self, name: &str, shape: Shape, layout: Layout) -> Result<Line, Refusal> {
        let inputs = self.layers.get_or_insert_with(layers_14b).inputs(shape)?;
        let held = inputs.layer(0)?;
        let layer = match layout {
            Layout::InOut => held,
            Layout::OutIn => {
                let down = match &mut self.down {
                    Some(down) => down,
                    none => none.insert(down_codes(inputs.geometry())?),
                };
                as_checkpoint(held, down.view()).map_err(|error| Refusal::Request(format!("{name}: {error}")))?
            }
        };
        let policy = Policy::rne();
        let (seconds, floors) = self.gauge.time(|| Ok::<_, Refusal>(run_layer(&layer, &policy)))?;
        let (floor, least) = Work::layer(&layer, shape.rows).floor(&floors);
        Ok(Line::new(name, &seconds, floor, least))
    }

    fn inputs(&mut self, name: &str) -> Result<Line, Refusal> {
        self.forget_layers();
        let case = layers_14b().case(Shape { rows: BATCH, context: 200 })?;
        let mut bytes = 0;
        let (seconds, floors) = self.gauge.time(|| {
            let inputs = Inputs::generate(&case, &InputStore::with_capacity(0))?;
            bytes = case.inputs().filter_map(|input| inputs.bytes(input)).map(<[u8]>::len).sum();
            Ok::<_, Refusal>(())
        })?;
        // Written, and held against the rate of reading: no store is faster than that.
        let (_, least) = Work::reading(bytes).floor(&floors);
        Ok(Line::new(name, &seconds, "read".into(), least))
    }

    fn compare(&mut self, name: &str) -> Result<Line, Refusal> {
        self.forget_layers();
        // One of them is the gauge's own buffer, so that the two take 2 GiB and not 3.
        let buffer = self.gauge.buffer();
        let reference: &[bf16] = bytemuck::cast_slice(&buffer);
        let device = with_flips(reference)?;
        let bytes = size_of_val(reference) + size_of_val(device.as_slice());
        let (seconds, floors) = self.gauge.time(|| Ok::<_, Refusal>(compare_bf16(&device, reference)))?;
        let (floor, least) = Work::reading(bytes).floor(&floors);
        Ok(Line::new(name, &seconds, floor, least))
    }

    fn model(&mut self, name: &str, shape: Shape) -> Result<Line, Refusal> {
        self.forget_layers();
        let checkpoint = self
            .model
            .as_ref()
            .ok_or_else(|| Refusal::Request(format!("{name}: needs a checkpoint; name its directory with --model")))?;
        let mut step = ModelStep::new(checkpoint, shape)?;
        let least = Work::step(checkpoint, step.batch())?;
        let (seconds, floors) = self.gauge.time_reading(&weights(checkpoint), || step.run())?;
        let (floor, least) = least.floor(&floors);
        Ok(Line::new(name, &seconds, floor, least))
    }

    /// Frees what only layers need.
    fn forget_layers(&mut self) {
        (self.layers, self.down) = (None, None);
    }
}

/// The tensor with every thousandth element one BF16 step away: what a right device looks like.
fn with_flips(reference: &[bf16]) -> Result<Vec<bf16>, Refusal> {
    let flipped = |(index, value): (usize, &bf16)| bf16::from_bits(value.to_bits() ^ u16::from(index % 1000 == 999));
    let mut device = room(reference.len())?;
    reference.par_iter().enumerate().map(flipped).collect_into_vec(&mut device);
    Ok(device)
}

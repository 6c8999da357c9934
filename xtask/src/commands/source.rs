//! The model that tokens come from: a checkpoint, or the generated one of a `tokens` case.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cases::seeded::{Rope, rope};
use cases::{Case, Checkpoint, InputStore, Inputs, Kernel, TokensCase};
use clap::Args;
use ndarray::Array2;
use reference::Geometry;
use reference::model::Weights;

use crate::progress::Bar;
use crate::refusal::Refusal;

/// Tokens of the longest row that is computed; its RoPE tables take a gigabyte.
const MOST_POSITIONS: usize = 1 << 20;

/// Which model.
#[derive(Args, Clone)]
#[group(id = "source", multiple = false)]
pub struct Place {
    /// Directory of a checkpoint
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// A case of kernel `tokens`, or the bundle that holds it: its generated model, its prompts, its number of steps
    #[arg(long, value_name = "CASE")]
    pub case: Option<PathBuf>,
}

/// A model that has been opened.
pub enum Source {
    /// Mapped weights.
    Checkpoint(Box<Checkpoint>),
    /// Generated weights.
    Case(Box<Generated>),
}

/// A case and its inputs.
pub struct Generated {
    case: Case,
    run: TokensCase,
    inputs: Inputs,
}

impl Place {
    /// Opens the model; `None` where the request names none.
    ///
    /// # Errors
    /// A checkpoint, case or input is wrong, or the case is one of a layer.
    pub fn open(&self) -> Result<Option<Source>, Refusal> {
        if let Some(dir) = &self.model {
            return Ok(Some(Source::Checkpoint(Box::new(Checkpoint::open(dir)?))));
        }
        let Some(path) = &self.case else { return Ok(None) };
        let case = Case::load(path)?;
        let Kernel::Tokens(run) = &case.kernel else {
            return Err(Refusal::Request(format!(
                "--case {}: is a case of kernel decode_layer; tokens come from one of kernel tokens",
                path.display()
            )));
        };
        let inputs = Inputs::generate(&case, &InputStore::new())?;
        Ok(Some(Source::Case(Box::new(Generated { run: run.clone(), inputs, case }))))
    }
}

impl Source {
    /// The weights.
    ///
    /// # Errors
    /// None that an opened model can cause.
    pub fn weights(&self) -> Result<Box<dyn Weights + '_>, Refusal> {
        Ok(match self {
            Self::Checkpoint(checkpoint) => Box::new(&**checkpoint),
            Self::Case(generated) => Box::new(generated.inputs.model()?),
        })
    }

    /// What it is called: the checkpoint's directory, or the case.
    pub fn name(&self) -> String {
        match self {
            Self::Checkpoint(checkpoint) => {
                let dir = checkpoint.dir().canonicalize().unwrap_or_else(|_| checkpoint.dir().to_owned());
                dir.file_name().unwrap_or_default().to_string_lossy().into_owned()
            }
            Self::Case(generated) => generated.case.name.clone(),
        }
    }

    /// Its sizes, with the layers that are there.
    ///
    /// # Errors
    /// None that an opened model can cause.
    pub fn geometry(&self) -> Result<Geometry, Refusal> {
        Ok(self.weights()?.geometry().clone())
    }

    /// Ids after which a row ends; a case has none.
    pub fn stop_ids(&self) -> &[usize] {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.stop_ids(),
            Self::Case(_) => &[],
        }
    }

    /// The directory that may hold a tokenizer.
    pub fn dir(&self) -> Option<&Path> {
        match self {
            Self::Checkpoint(checkpoint) => Some(checkpoint.dir()),
            Self::Case(_) => None,
        }
    }

    /// What a case says is to be run.
    pub fn run(&self) -> Option<&TokensCase> {
        match self {
            Self::Checkpoint(_) => None,
            Self::Case(generated) => Some(&generated.run),
        }
    }

    /// Tokens that a row of a case may have.
    pub fn max_seq(&self) -> Option<usize> {
        match self {
            Self::Checkpoint(_) => None,
            Self::Case(generated) => Some(generated.case.max_seq),
        }
    }

    /// Contexts that the model was made for, where its files say so.
    pub fn max_positions(&self) -> Option<usize> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.max_positions(),
            Self::Case(_) => None,
        }
    }

    /// The fingerprint, with a bar over its bytes while they are read.
    ///
    /// # Errors
    /// None that an opened model can cause.
    pub fn fingerprint(&self) -> Result<String, Refusal> {
        let bar = OnceLock::new();
        let progress = |done, total| bar.get_or_init(|| Bar::of_bytes(total)).reached(done);
        Ok(match self {
            Self::Checkpoint(checkpoint) => checkpoint.fingerprint(&progress),
            Self::Case(generated) => generated.inputs.fingerprint(generated.case.rope_theta, &progress)?,
        }
        .to_string())
    }

    /// RoPE cosines and sines of contexts up to `most` tokens, FP32 `[most, D]`.
    ///
    /// # Errors
    /// More than the tables may hold.
    pub fn rope(&self, most: usize) -> Result<[Array2<f32>; 2], Refusal> {
        if most > MOST_POSITIONS {
            return Err(Refusal::Request(format!(
                "rows of {most} tokens: at most {MOST_POSITIONS} are computed; lower --max-new-tokens or --max-seq-len"
            )));
        }
        let (dim, theta) = match self {
            Self::Checkpoint(checkpoint) => (checkpoint.geometry().head_dim, checkpoint.rope_theta()),
            Self::Case(generated) => (generated.case.geometry.head_dim, generated.case.rope_theta),
        };
        let table = |which| {
            rope(which, most, dim, theta).map_err(|error| Refusal::Request(format!("max_seq_len {most}: {error}")))
        };
        Ok([table(Rope::Cos)?, table(Rope::Sin)?])
    }
}

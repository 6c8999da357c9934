//! `assay export`: inputs and outputs of a case in the files of other tools, the kernel library's golden-data
//! directory first among them.

use std::io;
use std::path::{Path, PathBuf};

use cases::{Case, InputStore, Inputs, PolicyRequest};
use clap::{Args, ValueEnum};
use device::dump::{Array, DumpError, write_npy, write_pt};
use device::{Bundle, Captured, INPUTS_FILE, InputTensor, input_tensors, tensor_bytes, write_captures, write_inputs};
use goldens::Progress as _;
use goldens::exchange::{Outputs, device_outputs, reference_outputs};
use half::bf16;
use ndarray::Array2;
use reference::Tensor;
use safetensors::Dtype;

use crate::exit_codes::Code;
use crate::output;
use crate::process::Interrupt;
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::report::text::{plain, plural};

/// File name of outputs in one file.
const OUTPUTS_FILE: &str = "outputs.safetensors";

/// The request.
#[derive(Args)]
pub struct Export {
    /// A decode-layer case, or a bundle
    #[arg(value_name = "CASE-OR-BUNDLE")]
    case: PathBuf,
    /// Directory to write; it must not be there, or be empty
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// What is written
    #[arg(long, value_enum, default_value_t = Format::Golden)]
    format: Format,
    /// Whose outputs: the reference's, or those that the device gave
    #[arg(long, value_enum, default_value_t = Source::Reference)]
    outputs: Source,
    /// Rounding rules of the reference: production, rne, or a YAML file {site: rule}; default: the case's, and where
    /// they are left open the production kernels'
    #[arg(long, value_name = "POLICY")]
    policy: Option<String>,
    /// Write these inputs of one element without dimensions, for kernels that take them as scalars
    #[arg(long, value_name = "INPUT,...", value_delimiter = ',')]
    scalars: Vec<String>,
}

/// Forms of a directory.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// The kernel library's golden-data directory: in/NAME.pt and out/NAME.pt for what its kernel takes and gives
    Golden,
    /// The same with every tensor of the layer under out/
    Pt,
    /// As pt, in NumPy's files; BF16 is a two-byte void there
    Npy,
    /// inputs.safetensors and outputs.safetensors, the latter in the layout of captures.safetensors
    Safetensors,
}

/// Whose outputs are written.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Source {
    /// The reference's
    Reference,
    /// The bundle's
    Device,
}

impl Export {
    /// Writes the directory.
    ///
    /// # Errors
    /// The case is wrong or no decode layer's, the bundle lacks an output, or the directory cannot be written.
    pub fn run(&self) -> Result<Code, Refusal> {
        let folder = Folder::beside(&self.to)?;
        let (case, captures) = match self.outputs {
            Source::Reference => (Case::load(&self.case)?, None),
            Source::Device => {
                let bundle = Bundle::open(&self.case)?;
                let captures = bundle.captures.ok_or_else(|| {
                    Refusal::Request(format!(
                        "--outputs device: {} holds no captures; take the reference's outputs, or name a bundle",
                        self.case.display()
                    ))
                })?;
                (bundle.case, Some(captures))
            }
        };
        if case.batch().is_none() {
            return Err(Refusal::Request(format!(
                "{}: is a {} case; only a decode layer's can be exported",
                case.path.display(),
                case.kernel.kind().name()
            )));
        }
        let bar = Bar::new(0);
        bar.begin(&case.name);
        bar.step("inputs");
        let inputs = Inputs::generate(&case, &InputStore::new())?;
        bar.step("outputs");
        let judged = |error| Refusal::Judge { case: case.path.clone(), error: Box::new(error) };
        let of = match captures {
            None => {
                let policy = match &self.policy {
                    Some(policy) => PolicyRequest::from_flag(policy)?,
                    None => case.policy.clone(),
                };
                reference_outputs(&case, &inputs, &policy).map_err(judged)?
            }
            Some(captures) => device_outputs(&case, &inputs, captures).map_err(judged)?,
        };
        bar.step("writing");
        let (given, made) = self.write(&folder, &case, &inputs, &of)?;
        drop(bar);
        folder.settle(&self.to)?;
        let whose = match self.outputs {
            Source::Reference => "the reference",
            Source::Device => "the device",
        };
        output::stdout(&format!(
            "{}: {} and {} of {whose} in {}\n",
            plain(&case.name),
            plural(given as u64, "input"),
            plural(made as u64, "output"),
            plain(&self.to.display().to_string())
        ))?;
        Ok(Code::Pass)
    }

    /// Writes all files; gives how many inputs and outputs there are.
    fn write(&self, folder: &Folder, case: &Case, inputs: &Inputs, of: &Outputs) -> Result<(usize, usize), Refusal> {
        let given = self.inputs(case, inputs)?;
        if self.format == Format::Safetensors {
            let path = folder.path().join(INPUTS_FILE);
            write_inputs(&path, case, inputs).map_err(|error| Refusal::Write { path, error })?;
            write_captures(&folder.path().join(OUTPUTS_FILE), &of.captures)?;
            let caches = [&of.captures.k_written, &of.captures.v_written].into_iter().flatten().count();
            return Ok((given.len(), of.captures.tensors.len() + caches));
        }
        let made = self.made(of)?;
        for (part, tensors) in [("in", &given), ("out", &made)] {
            let place = folder.path().join(part);
            std::fs::create_dir(&place).map_err(|error| Refusal::Write { path: place.clone(), error })?;
            for (name, array) in tensors {
                let written: Result<(), DumpError> = match self.format {
                    Format::Npy => write_npy(&place.join(format!("{name}.npy")), array),
                    _ => write_pt(&place.join(format!("{name}.pt")), array),
                };
                written.map_err(|error| Refusal::Request(error.to_string()))?;
            }
        }
        Ok((given.len(), made.len()))
    }

    fn inputs(&self, case: &Case, inputs: &Inputs) -> Result<Vec<(&'static str, Array)>, Refusal> {
        let mut given: Vec<(&str, Array)> = input_tensors(case, inputs)
            .into_iter()
            .map(|InputTensor { name, dtype, shape, bytes }| (name, Array { dtype, shape, bytes: bytes.into_owned() }))
            .collect();
        for scalar in &self.scalars {
            let single: Vec<&str> = given
                .iter()
                .filter(|(_, array)| array.shape.iter().all(|&size| size == 1))
                .map(|(name, _)| *name)
                .collect();
            if !single.contains(&scalar.as_str()) {
                return Err(Refusal::Request(format!(
                    "--scalars {}: is no input of one element; this case has: {}",
                    plain(scalar),
                    single.join(", ")
                )));
            }
            given.iter_mut().filter(|(name, _)| name == scalar).for_each(|(_, array)| array.shape.clear());
        }
        Ok(given)
    }

    /// The outputs by name.
    fn made(&self, of: &Outputs) -> Result<Vec<(&'static str, Array)>, Refusal> {
        let mut made = Vec::new();
        for (id, captured) in &of.captures.tensors {
            let asked = self.format != Format::Golden || id.name() == "out";
            match captured {
                Captured::Values(tensor) if asked => made.push((id.name(), array(tensor))),
                Captured::WrongDType { found, .. } if asked => {
                    return Err(Refusal::Request(format!(
                        "{}: {} is {found} there, which is not the contract's type; export the reference's outputs",
                        self.case.display(),
                        id.name()
                    )));
                }
                _ => {}
            }
        }
        for (name, cache) in [("k_cache", &of.k_cache), ("v_cache", &of.v_cache)] {
            made.extend(cache.as_ref().map(|cache| (name, whole(cache))));
        }
        let missing = ["out", "k_cache", "v_cache"].into_iter().find(|name| made.iter().all(|(made, _)| made != name));
        match missing.filter(|_| self.format == Format::Golden) {
            Some(missing) => Err(Refusal::Request(format!(
                "{}: the device did not give {missing}, which a golden has to hold; export the reference's outputs",
                self.case.display()
            ))),
            None => Ok(made),
        }
    }
}

fn array(tensor: &Tensor) -> Array {
    let dtype = device::file_type(tensor.dtype());
    Array { dtype, shape: tensor.shape().to_vec(), bytes: tensor_bytes(tensor) }
}

fn whole(cache: &Array2<bf16>) -> Array {
    let bytes = cache.iter().flat_map(|value| value.to_le_bytes()).collect();
    Array { dtype: Dtype::BF16, shape: cache.shape().to_vec(), bytes }
}

/// A directory that is whole or not there: filled beside its place, then renamed.
pub struct Folder(tempfile::TempDir);

impl Folder {
    /// A directory beside the place that it is for.
    ///
    /// # Errors
    /// Something is there, or it cannot be made.
    pub fn beside(place: &Path) -> Result<Self, Refusal> {
        let in_the_way = match std::fs::read_dir(place) {
            Ok(mut entries) => entries.next().is_some(),
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        };
        if in_the_way {
            return Err(Refusal::Request(format!(
                "--to {}: is there and no empty directory; name a new one, or remove it",
                place.display()
            )));
        }
        let parent = place.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut builder = tempfile::Builder::new();
        builder.prefix(".assay-").suffix(".tmp");
        // Temporary directories are private by default; a finished one gets what any new one gets.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
        let folder = builder.tempdir_in(parent).map_err(|error| Refusal::Write { path: place.to_path_buf(), error })?;
        Interrupt::catch_while_running()?.removes(folder.path().to_path_buf());
        Ok(Self(folder))
    }

    /// Where it is while it is filled.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Puts it in its place.
    ///
    /// # Errors
    /// The file system refuses; nothing is left then.
    pub fn settle(self, place: &Path) -> Result<(), Refusal> {
        std::fs::rename(self.0.path(), place).map_err(|error| Refusal::Write { path: place.to_path_buf(), error })?;
        // It has gone from where it would be removed.
        let _ = self.0.keep();
        Ok(())
    }
}

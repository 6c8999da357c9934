//! The kernel that a case names to be launched on a device of this machine (`device: kernel:`): its binary, its name,
//! and what each argument is. Arguments are the contract's tensors under the kernel's own names, batch metadata,
//! scalars and workspaces, in the kernel's order.

use reference::TensorId;

use crate::case::{DeviceKind, KernelKind};
use crate::error::{CaseError, Document};
use crate::input::Input;
use crate::schema::{Location, NameOr, RawArgument, RawKernel, RawValue, Spanned};

/// A launch, as a case describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The file that holds the kernel, relative to the case file.
    pub binary: String,
    /// The kernel's name in it.
    pub function: String,
    /// Blocks to run it in.
    pub blocks: u32,
    /// Its arguments, in its order.
    pub arguments: Vec<Argument>,
}

/// What one argument is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// The address of an input tensor; caches are written in place.
    Input(Input),
    /// The address of batch metadata.
    Batch(BatchTensor),
    /// The address of a tensor that the kernel writes.
    Output(TensorId),
    /// A value.
    Scalar(Scalar),
    /// The address of memory that the kernel uses for itself.
    Workspace {
        /// Its size.
        bytes: u64,
        /// Whether it holds zeros before the launch; otherwise it holds anything.
        zero: bool,
    },
}

/// Batch metadata, INT32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BatchTensor {
    /// `[16]`
    SeqLens,
    /// `[16 * max_blocks]`
    BlockTable,
    /// `[16]`
    SlotMapping,
}

/// A value that a kernel is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scalar {
    /// Its type.
    pub kind: ScalarKind,
    /// The value.
    pub value: ScalarValue,
}

/// Type of a scalar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The names are the types.
pub enum ScalarKind {
    Int32,
    Uint32,
    Int64,
    Uint64,
    Float32,
}

/// Value of a scalar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScalarValue {
    /// Its bit pattern, zero-extended.
    Bits(u64),
    /// The case's number of active rows.
    ActiveBatch,
}

impl ScalarValue {
    /// The word for the number of active rows.
    pub const ACTIVE_BATCH: &'static str = "active_batch";
}

impl BatchTensor {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::SeqLens, Self::BlockTable, Self::SlotMapping];

    /// The kernel's name of the tensor.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::SeqLens => "seq_lens",
            Self::BlockTable => "block_table",
            Self::SlotMapping => "slot_mapping",
        }
    }
}

impl Argument {
    /// The tensor's name, where the argument is one.
    #[must_use]
    pub fn name(&self) -> Option<&'static str> {
        match self {
            Self::Input(input) => Some(input.name()),
            Self::Batch(tensor) => Some(tensor.name()),
            Self::Output(id) => Some(id.name()),
            Self::Scalar(_) | Self::Workspace { .. } => None,
        }
    }

    /// The tensor of this name.
    fn named(name: &str) -> Option<Self> {
        let input = Input::from_name(name).filter(|input| input.of_decode_layer()).map(Self::Input);
        let batch = || BatchTensor::ALL.into_iter().find(|tensor| tensor.name() == name).map(Self::Batch);
        input.or_else(batch).or_else(|| TensorId::from_capture_name(name).map(Self::Output))
    }

    /// Whether the kernel writes it, so that there is something to judge.
    #[must_use]
    pub fn is_written(&self) -> bool {
        matches!(self, Self::Output(_) | Self::Input(Input::KCache | Input::VCache))
    }
}

impl ScalarKind {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Int32, Self::Uint32, Self::Int64, Self::Uint64, Self::Float32];

    /// The key in case files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Int32 => "int32",
            Self::Uint32 => "uint32",
            Self::Int64 => "int64",
            Self::Uint64 => "uint64",
            Self::Float32 => "float32",
        }
    }

    /// Bytes of a value.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::Int32 | Self::Uint32 | Self::Float32 => 4,
            Self::Int64 | Self::Uint64 => 8,
        }
    }

    /// A bit pattern of this type as a number from which it is read back.
    #[must_use]
    pub fn text(self, bits: u64) -> String {
        match self {
            Self::Int32 => (bits as u32).cast_signed().to_string(),
            Self::Int64 => bits.cast_signed().to_string(),
            Self::Uint32 | Self::Uint64 => bits.to_string(),
            Self::Float32 => crate::yaml::single(f32::from_bits(bits as u32)),
        }
    }

    /// The bit pattern of a whole number, where the type holds it.
    fn whole(self, value: i128) -> Option<u64> {
        match self {
            Self::Int32 => i32::try_from(value).ok().map(|value| u64::from(value.cast_unsigned())),
            Self::Uint32 => u32::try_from(value).ok().map(u64::from),
            Self::Int64 => i64::try_from(value).ok().map(i64::cast_unsigned),
            Self::Uint64 => u64::try_from(value).ok(),
            Self::Float32 => self.real(value as f64),
        }
    }

    /// The bit pattern of a real number, where the type holds such.
    fn real(self, value: f64) -> Option<u64> {
        let value = value as f32;
        (self == Self::Float32 && value.is_finite()).then(|| u64::from(value.to_bits()))
    }
}

impl Scalar {
    /// Its little-endian bytes in a case with so many active rows.
    #[must_use]
    pub fn bytes(&self, active: usize) -> Vec<u8> {
        let bits = match self.value {
            ScalarValue::Bits(bits) => bits,
            // At most 16.
            ScalarValue::ActiveBatch => self.kind.whole(active as i128).unwrap_or_default(),
        };
        let mut bytes = bits.to_le_bytes().to_vec();
        bytes.truncate(self.kind.size());
        bytes
    }
}

/// Most blocks, arguments and bytes of a workspace: guards, above what any device has.
const MOST_BLOCKS: i64 = 65_535;
const MOST_ARGUMENTS: usize = 256;
const LARGEST_WORKSPACE: i64 = 1 << 34;

/// What the rules on a launch depend on.
pub(crate) struct Rules<'a> {
    pub document: &'a Document<'a>,
    pub case: KernelKind,
    pub device: DeviceKind,
}

impl Rules<'_> {
    /// Reads `device: kernel:`.
    pub fn launch(&self, raw: &Spanned<RawKernel>) -> Result<Launch, CaseError> {
        if self.device != DeviceKind::Npu {
            let message = "a kernel is launched on a device of kind npu, and this one is emulated";
            return Err(self.error(raw.referenced, message, "write `kind: npu`, or remove `kernel:`"));
        }
        if self.case != KernelKind::DecodeLayer {
            let message = "a token run is many launches, and only kernel decode_layer can be launched";
            return Err(self.error(raw.referenced, message, "remove `kernel:`"));
        }
        let RawKernel { binary, function, blocks, arguments } = &raw.value;
        let printable = |text: &str, most| (1..=most).contains(&text.len()) && !text.chars().any(char::is_control);
        if !printable(&binary.value, 1000) {
            let help = "write the file that holds the kernel, relative to the case file";
            return Err(self.error(binary.referenced, "binary: expected 1 to 1000 bytes of printable text", help));
        }
        if !printable(&function.value, 200) || function.value.contains(char::is_whitespace) {
            let message = "function: expected 1 to 200 bytes without spaces";
            return Err(self.error(function.referenced, message, "write the kernel's name in its binary"));
        }
        let count = u32::try_from(blocks.value).ok().filter(|_| (1..=MOST_BLOCKS).contains(&blocks.value));
        let count = count.ok_or_else(|| {
            let message = format!("blocks: {} is outside 1..={MOST_BLOCKS}", blocks.value);
            self.error(blocks.referenced, message, "write the number of blocks to run the kernel in")
        })?;
        if !(1..=MOST_ARGUMENTS).contains(&arguments.value.len()) {
            let message = format!("arguments: {} of them, expected 1..={MOST_ARGUMENTS}", arguments.value.len());
            return Err(self.error(arguments.referenced, message, "list what the kernel is given, in its order"));
        }
        let mut read: Vec<Argument> = Vec::with_capacity(arguments.value.len());
        for (index, argument) in arguments.value.iter().enumerate() {
            let found = match &argument.value {
                NameOr::Name(name) => self.tensor(index, name, argument.referenced)?,
                NameOr::Mapping(value) => self.other(index, value, argument.referenced)?,
            };
            let earlier = read.iter().position(|earlier| found.name().is_some() && earlier.name() == found.name());
            if let (Some(earlier), Some(name)) = (earlier, found.name()) {
                let message = format!("arguments[{index}]: {name} is arguments[{earlier}] already");
                return Err(self.error(argument.referenced, message, "give each tensor once"));
            }
            read.push(found);
        }
        if !read.iter().any(Argument::is_written) {
            let message = "arguments: none of them is written by the kernel, so that there would be nothing to judge";
            return Err(self.error(
                arguments.referenced,
                message,
                "name `out`, and any other tensor that the kernel writes",
            ));
        }
        Ok(Launch { binary: binary.value.clone(), function: function.value.clone(), blocks: count, arguments: read })
    }

    fn error(&self, place: Location, message: impl AsRef<str>, help: impl Into<String>) -> CaseError {
        self.document.error(place, format!("device: kernel: {}", message.as_ref()), help)
    }

    fn tensor(&self, index: usize, name: &str, place: Location) -> Result<Argument, CaseError> {
        Argument::named(name).ok_or_else(|| {
            let message = format!("arguments[{index}]: no tensor is named {name:?}");
            let help = if name.starts_with("k_written") || name.starts_with("v_written") {
                "name k_cache and v_cache: what changed in them is read back".to_owned()
            } else {
                let inputs = Input::ALL.into_iter().filter(|input| input.of_decode_layer()).map(Input::name);
                let batch = BatchTensor::ALL.into_iter().map(BatchTensor::name);
                let outputs = TensorId::ALL.into_iter().map(TensorId::name);
                let outputs = outputs.filter(|name| TensorId::from_capture_name(name).is_some());
                let names: Vec<&str> = inputs.chain(batch).chain(outputs).collect();
                format!("the tensors are {}", names.join(", "))
            };
            self.error(place, message, help)
        })
    }

    /// An argument that is no tensor.
    fn other(&self, index: usize, raw: &RawArgument, place: Location) -> Result<Argument, CaseError> {
        const HELP: &str = "write a tensor's name, {int32: 2}, {int32: active_batch}, or {workspace: BYTES}; the \
            scalars are int32, uint32, int64, uint64 and float32";
        let scalars = [&raw.int32, &raw.uint32, &raw.int64, &raw.uint64, &raw.float32];
        let mut scalars =
            ScalarKind::ALL.into_iter().zip(scalars).filter_map(|(kind, raw)| Some((kind, raw.as_ref()?)));
        let (first, second) = (scalars.next(), scalars.next());
        match (first, second, &raw.workspace) {
            (Some((kind, value)), None, None) if raw.zero.is_none() => self.scalar(index, kind, value),
            (None, None, Some(bytes)) => {
                if !(1..=LARGEST_WORKSPACE).contains(&bytes.value) {
                    let message =
                        format!("arguments[{index}]: workspace: {} is outside 1..={LARGEST_WORKSPACE}", bytes.value);
                    return Err(self.error(bytes.referenced, message, "write its size in bytes"));
                }
                let zero = raw.zero.as_ref().is_some_and(|zero| zero.value);
                // Positive, as was just seen.
                Ok(Argument::Workspace { bytes: bytes.value.cast_unsigned(), zero })
            }
            (Some(_), None, None) => {
                let message = format!("arguments[{index}]: `zero` is about a workspace, and this is a scalar");
                Err(self.error(place, message, "remove it"))
            }
            (None, None, None) => {
                Err(self.error(place, format!("arguments[{index}]: neither a scalar nor a workspace"), HELP))
            }
            _ => Err(self.error(place, format!("arguments[{index}]: more than one value in one argument"), HELP)),
        }
    }

    fn scalar(&self, index: usize, kind: ScalarKind, raw: &Spanned<RawValue>) -> Result<Argument, CaseError> {
        let (value, found) = match &raw.value {
            RawValue::Whole(value) => (kind.whole(*value), value.to_string()),
            RawValue::Real(value) => (kind.real(*value), value.to_string()),
            RawValue::Word(word) if word == ScalarValue::ACTIVE_BATCH => {
                return Ok(Argument::Scalar(Scalar { kind, value: ScalarValue::ActiveBatch }));
            }
            RawValue::Word(word) => (None, format!("{word:?}")),
        };
        let value = value.map(ScalarValue::Bits).ok_or_else(|| {
            let message = format!("arguments[{index}]: {found} is no {}", kind.name());
            self.error(raw.referenced, message, "write a number that the type holds, or active_batch")
        })?;
        Ok(Argument::Scalar(Scalar { kind, value }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn scalars_are_little_endian_and_as_wide_as_their_type() {
        let bytes = |kind: ScalarKind, value| Scalar { kind, value: ScalarValue::Bits(value) }.bytes(7);
        assert_eq!(bytes(ScalarKind::Int32, ScalarKind::Int32.whole(-2).unwrap()), (-2i32).to_le_bytes());
        assert_eq!(bytes(ScalarKind::Int64, ScalarKind::Int64.whole(-2).unwrap()), (-2i64).to_le_bytes());
        assert_eq!(bytes(ScalarKind::Float32, ScalarKind::Float32.real(1e-6).unwrap()), 1e-6f32.to_le_bytes());
        let active = |kind| Scalar { kind, value: ScalarValue::ActiveBatch }.bytes(7);
        assert_eq!(active(ScalarKind::Uint32), 7u32.to_le_bytes());
        assert_eq!(active(ScalarKind::Float32), 7f32.to_le_bytes());
    }

    #[test]
    fn a_type_refuses_what_it_does_not_hold() {
        assert_eq!(ScalarKind::Int32.whole(1 << 31), None);
        assert_eq!(ScalarKind::Uint64.whole(-1), None);
        assert_eq!(ScalarKind::Int32.real(1.0), None);
        assert_eq!(ScalarKind::Float32.real(1e60), None);
    }

    #[test]
    fn every_tensor_of_the_layer_can_be_named() {
        for id in TensorId::ALL.into_iter().filter(|id| TensorId::from_capture_name(id.name()).is_some()) {
            assert_eq!(Argument::named(id.name()), Some(Argument::Output(id)));
        }
        assert_eq!(Argument::named("k_cache"), Some(Argument::Input(Input::KCache)));
        assert_eq!(Argument::named("embed_tokens"), None);
        assert_eq!(Argument::named("k_written_values"), None);
    }

    proptest! {
        #[test]
        fn numbers_are_read_back(value in any::<i64>(), bits in any::<u32>()) {
            for kind in ScalarKind::ALL {
                if let Some(pattern) = kind.whole(value.into())
                    && kind != ScalarKind::Float32
                {
                    prop_assert_eq!(kind.text(pattern).parse::<i128>().unwrap(), i128::from(value));
                }
            }
            let real = f32::from_bits(bits);
            prop_assume!(real.is_finite());
            let text = ScalarKind::Float32.text(bits.into());
            prop_assert_eq!(ScalarKind::Float32.real(text.parse().unwrap()), Some(u64::from(bits)));
        }
    }
}

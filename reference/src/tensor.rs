//! Tensors that pass between the stages of a decode layer, under the kernel's own names.

use half::bf16;
use ndarray::{Array2, ArrayView2};

use crate::geometry::{BATCH, Geometry};

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum DType {
    Bf16,
    F32,
    I8,
    I32,
    I64,
}

impl DType {
    /// The contract's name of the type.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::F32 => "FP32",
            Self::I8 => "INT8",
            Self::I32 => "INT32",
            Self::I64 => "INT64",
        }
    }

    /// Bytes of one element.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::I8 => 1,
            Self::Bf16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }
}

/// A tensor between two stages. `KRows` and `VRows` are what each physical row writes into the caches
/// (`cast@k_cache`, `cast@v_cache`); a capture gives them sparse, as `k_written_values`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // Documented by `name`, `dtype` and `shape`.
pub enum TensorId {
    NormedStates,
    InvRmsStates,
    NormedI8,
    ActScales,
    QProj,
    KProj,
    VProj,
    QProjNorm,
    KProjNorm,
    VProjNorm,
    AllQPadded,
    KRows,
    VRows,
    AttnOut,
    AttnOutI8,
    AttnOutScales,
    AttnProjFp32,
    PostNormPartial,
    MlpNormIn,
    InvRmsTile,
    MlpNormI8,
    MlpActScales,
    GateAccAll,
    UpAccAll,
    MlpDownTile,
    DownAccParts,
    Out,
}

impl TensorId {
    /// Every tensor, in the order in which the contract makes them.
    pub const ALL: [Self; 27] = [
        Self::NormedStates,
        Self::InvRmsStates,
        Self::NormedI8,
        Self::ActScales,
        Self::QProj,
        Self::KProj,
        Self::VProj,
        Self::QProjNorm,
        Self::KProjNorm,
        Self::VProjNorm,
        Self::AllQPadded,
        Self::KRows,
        Self::VRows,
        Self::AttnOut,
        Self::AttnOutI8,
        Self::AttnOutScales,
        Self::AttnProjFp32,
        Self::PostNormPartial,
        Self::MlpNormIn,
        Self::InvRmsTile,
        Self::MlpNormI8,
        Self::MlpActScales,
        Self::GateAccAll,
        Self::UpAccAll,
        Self::MlpDownTile,
        Self::DownAccParts,
        Self::Out,
    ];

    /// The kernel's name; `k_written_values` and `v_written_values` for the cache rows.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NormedStates => "normed_states",
            Self::InvRmsStates => "inv_rms_states",
            Self::NormedI8 => "normed_i8",
            Self::ActScales => "act_scales",
            Self::QProj => "q_proj",
            Self::KProj => "k_proj",
            Self::VProj => "v_proj",
            Self::QProjNorm => "q_proj_norm",
            Self::KProjNorm => "k_proj_norm",
            Self::VProjNorm => "v_proj_norm",
            Self::AllQPadded => "all_q_padded",
            Self::KRows => "k_written_values",
            Self::VRows => "v_written_values",
            Self::AttnOut => "attn_out",
            Self::AttnOutI8 => "attn_out_i8",
            Self::AttnOutScales => "attn_out_scales",
            Self::AttnProjFp32 => "attn_proj_fp32",
            Self::PostNormPartial => "post_norm_partial",
            Self::MlpNormIn => "mlp_norm_in",
            Self::InvRmsTile => "inv_rms_tile",
            Self::MlpNormI8 => "mlp_norm_i8",
            Self::MlpActScales => "mlp_act_scales",
            Self::GateAccAll => "gate_acc_all",
            Self::UpAccAll => "up_acc_all",
            Self::MlpDownTile => "mlp_down_tile",
            Self::DownAccParts => "down_acc_parts",
            Self::Out => "out",
        }
    }

    /// The tensor that a capture stores under this name, cache rows excepted (they come sparse).
    #[must_use]
    pub fn from_capture_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|id| id.name() == name && !matches!(id, Self::KRows | Self::VRows))
    }

    /// Element type.
    #[must_use]
    pub fn dtype(self) -> DType {
        match self {
            Self::NormedStates
            | Self::AllQPadded
            | Self::KRows
            | Self::VRows
            | Self::AttnOut
            | Self::PostNormPartial
            | Self::MlpNormIn
            | Self::MlpDownTile
            | Self::Out => DType::Bf16,
            Self::NormedI8 | Self::AttnOutI8 | Self::MlpNormI8 => DType::I8,
            _ => DType::F32,
        }
    }

    /// `[rows, columns]` of the tensor. `KRows` and `VRows` are `[16, KV*D]`.
    #[must_use]
    pub fn shape(self, geometry: &Geometry) -> [usize; 2] {
        let (hidden, q, kv) = (geometry.hidden_size, geometry.q_width(), geometry.kv_width());
        match self {
            Self::InvRmsStates | Self::ActScales | Self::AttnOutScales | Self::InvRmsTile | Self::MlpActScales => {
                [BATCH, 1]
            }
            Self::NormedStates
            | Self::NormedI8
            | Self::AttnProjFp32
            | Self::PostNormPartial
            | Self::MlpNormIn
            | Self::MlpNormI8
            | Self::Out => [BATCH, hidden],
            Self::QProj | Self::QProjNorm | Self::AttnOut | Self::AttnOutI8 => [BATCH, q],
            Self::KProj | Self::VProj | Self::KProjNorm | Self::VProjNorm | Self::KRows | Self::VRows => [BATCH, kv],
            Self::AllQPadded => [BATCH * geometry.num_key_value_heads * BATCH, geometry.head_dim],
            Self::GateAccAll | Self::UpAccAll | Self::MlpDownTile => [BATCH, geometry.intermediate_size],
            Self::DownAccParts => [2 * BATCH, hidden],
        }
    }
}

/// A tensor's values, row-major. Vectors are one column wide.
#[derive(Clone, Debug, PartialEq)]
pub enum Tensor {
    /// BF16 values.
    Bf16(Array2<bf16>),
    /// FP32 values.
    F32(Array2<f32>),
    /// INT8 codes.
    I8(Array2<i8>),
}

impl Tensor {
    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        match self {
            Self::Bf16(_) => DType::Bf16,
            Self::F32(_) => DType::F32,
            Self::I8(_) => DType::I8,
        }
    }

    /// `[rows, columns]`.
    #[must_use]
    pub fn shape(&self) -> [usize; 2] {
        let (rows, columns) = match self {
            Self::Bf16(values) => values.dim(),
            Self::F32(values) => values.dim(),
            Self::I8(values) => values.dim(),
        };
        [rows, columns]
    }

    /// The values when they are BF16; a view of nothing otherwise.
    #[must_use]
    pub fn bf16(&self) -> ArrayView2<'_, bf16> {
        if let Self::Bf16(values) = self { values.view() } else { nothing() }
    }

    /// The values when they are FP32; a view of nothing otherwise.
    #[must_use]
    pub fn f32(&self) -> ArrayView2<'_, f32> {
        if let Self::F32(values) = self { values.view() } else { nothing() }
    }

    /// The codes when they are INT8; a view of nothing otherwise.
    #[must_use]
    pub fn i8(&self) -> ArrayView2<'_, i8> {
        if let Self::I8(values) = self { values.view() } else { nothing() }
    }

    /// One element, widened to FP32 (exact for every type here).
    #[must_use]
    pub fn get(&self, row: usize, column: usize) -> f32 {
        match self {
            Self::Bf16(values) => values[(row, column)].to_f32(),
            Self::F32(values) => values[(row, column)],
            Self::I8(values) => f32::from(values[(row, column)]),
        }
    }

    /// The bit pattern of one element, zero-extended.
    #[must_use]
    pub fn bits(&self, row: usize, column: usize) -> u32 {
        match self {
            Self::Bf16(values) => u32::from(values[(row, column)].to_bits()),
            Self::F32(values) => values[(row, column)].to_bits(),
            Self::I8(values) => u32::from(values[(row, column)] as u8),
        }
    }
}

/// A view of nothing.
pub(crate) fn nothing<'a, T>() -> ArrayView2<'a, T> {
    ArrayView2::from_shape((0, 0), &[]).unwrap_or_else(|_| unreachable!("an empty slice has shape [0, 0]"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tensor_is_listed_once_in_contract_order() {
        for (index, id) in TensorId::ALL.into_iter().enumerate() {
            assert_eq!(id as usize, index);
        }
        assert_eq!(TensorId::from_capture_name("attn_out"), Some(TensorId::AttnOut));
        assert_eq!(TensorId::from_capture_name("k_written_values"), None);
    }
}

//! Tensors against the table of a form: each that has to be there is, with the type and shape that the configuration
//! makes it, and nothing is left over. A refusal says which tensor, what it is and what was expected.

use std::collections::BTreeSet;

use half::bf16;
use ndarray::Array1;
use reference::Geometry;
use safetensors::Dtype;

use super::error::CheckpointFault;
use super::layout::{self, Expected, Form, HEAD, Part};
use super::shards::{Place, Shards};

/// Where a tensor lies that [`check`] has seen.
pub fn place(shards: &Shards, name: &str) -> Result<Place, CheckpointFault> {
    let missing = || CheckpointFault::Missing { tensor: name.to_owned(), searched: shards.searched() };
    shards.tensors.get(name).cloned().ok_or_else(missing)
}

/// Checks every tensor of the form, and that there is no other; the head that is there though the embedding is used.
pub fn check_all(
    shards: &Shards,
    geometry: &Geometry,
    tied: bool,
    form: Form,
) -> Result<Option<Place>, CheckpointFault> {
    let spare_head = shards.tensors.get(HEAD).filter(|_| tied).cloned();
    let mut known = BTreeSet::new();
    let of_layers = (0..geometry.num_hidden_layers).flat_map(|layer| form.of_layer(geometry, layer));
    // A head that is not used has to be one all the same.
    for expected in layout::outside(geometry, tied && spare_head.is_none()).into_iter().chain(of_layers) {
        check(shards, &expected, form)?;
        known.insert(expected.name);
    }
    match shards.tensors.keys().find(|name| !known.contains(*name)) {
        Some(name) => Err(unexpected(name, shards, geometry, form)),
        None => Ok(spare_head),
    }
}

/// Checks presence, type and shape of a tensor.
fn check(shards: &Shards, expected: &Expected, form: Form) -> Result<(), CheckpointFault> {
    let name = &expected.name;
    let weight = || name.trim_end_matches("_scale").to_owned();
    let Some(found) = shards.tensors.get(name) else {
        let (tensor, searched) = (name.clone(), shards.searched());
        return Err(match expected.part {
            Part::Scale => match shards.tensors.get(&weight()) {
                // It has no scale because it has no codes.
                Some(found) if found.dtype != Dtype::I8 => wrong_type(&weight(), found, Part::Codes, form),
                Some(_) => CheckpointFault::MissingScale { tensor, weight: weight(), searched },
                None => CheckpointFault::Missing { tensor: weight(), searched },
            },
            Part::Matrix if name == HEAD => CheckpointFault::MissingHead { tensor, searched },
            _ => CheckpointFault::Missing { tensor, searched },
        });
    };
    // A scale beside a weight that has no codes is named before anything else is said of the weight.
    if expected.part == Part::Scale
        && let Some(weight_found) = shards.tensors.get(&weight()).filter(|weight| weight.dtype != Dtype::I8)
    {
        return Err(needless_scale(name, &weight(), weight_found, shards, form));
    }
    if !form.types(expected.part).contains(&found.dtype) {
        return Err(wrong_type(name, found, expected.part, form));
    }
    if found.shape != expected.shape {
        let (found, expected) = (found.shape.clone(), expected.shape.clone());
        return Err(CheckpointFault::Shape { tensor: name.clone(), found, expected });
    }
    Ok(())
}

fn wrong_type(name: &str, found: &Place, part: Part, form: Form) -> CheckpointFault {
    let types = form.types(part).iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
    let expected = match part {
        Part::Codes => format!("{} declares it INT8 ({types})", form.declared_in()),
        Part::Scale => format!("a scale is {types}"),
        Part::Offset => format!("an offset is {types}"),
        Part::Norm => format!("a norm is {types}"),
        Part::Matrix => format!("embedding and head are {types}"),
        Part::Weights => format!("a projection that is to be quantized is {types}"),
    };
    CheckpointFault::DType { tensor: name.to_owned(), found: found.dtype.to_string(), expected }
}

fn needless_scale(name: &str, weight: &str, found: &Place, shards: &Shards, form: Form) -> CheckpointFault {
    let by = match (form, layout::is_of_projection(name)) {
        (Form::Unquantized, _) => "config.json declares no quantization".to_owned(),
        (_, true) => format!("{} declares it INT8", form.declared_in()),
        (_, false) => "it is not quantized".to_owned(),
    };
    CheckpointFault::NeedlessScale {
        tensor: name.to_owned(),
        weight: weight.to_owned(),
        found: found.dtype.to_string(),
        by,
        searched: shards.searched(),
    }
}

/// Why a tensor is left over.
fn unexpected(name: &str, shards: &Shards, geometry: &Geometry, form: Form) -> CheckpointFault {
    if let Some(weight) = name.strip_suffix("_scale")
        && let Some(found) = shards.tensors.get(weight).filter(|found| found.dtype != Dtype::I8)
    {
        return needless_scale(name, weight, found, shards, form);
    }
    let layers = geometry.num_hidden_layers;
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
    let why = if layer.is_some_and(|layer| layer >= layers) {
        format!("config.json declares {layers} layers")
    } else if name.ends_with("zero_point") || name.ends_with("weight_offset") {
        format!("{} declares a symmetric scheme, which has none", form.declared_in())
    } else if name.ends_with(".bias") {
        "config.json declares no bias".to_owned()
    } else {
        let kind = if form == Form::Unquantized { "Qwen3" } else { "Qwen3 W8A8" };
        format!("a {kind} checkpoint has no tensor of that name")
    };
    CheckpointFault::Unexpected { tensor: name.to_owned(), why }
}

/// A vector's values, widened.
pub fn vector(
    shards: &Shards,
    name: &str,
    allowed: impl Fn(f32) -> Result<(), &'static str>,
) -> Result<Array1<f32>, CheckpointFault> {
    let place = place(shards, name)?;
    let bytes = shards.bytes(&place);
    let values: Array1<f32> = match place.dtype {
        Dtype::BF16 => bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect(),
        _ => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
    };
    for (index, &value) in values.iter().enumerate() {
        allowed(value).map_err(|rule| CheckpointFault::Value { tensor: name.to_owned(), index, value, rule })?;
    }
    Ok(values)
}

/// What a norm's weight must be.
pub fn finite(value: f32) -> Result<(), &'static str> {
    if value.is_finite() { Ok(()) } else { Err("a norm's weights are finite") }
}

/// What a scale must be.
pub fn scale_value(value: f32) -> Result<(), &'static str> {
    if value.is_finite() && value >= 0.0 { Ok(()) } else { Err("a scale is finite and not negative") }
}

/// What an offset must be.
pub fn offset_value(value: f32) -> Result<(), &'static str> {
    if value == 0.0 { Ok(()) } else { Err("the scheme is symmetric, and its offsets are 0") }
}

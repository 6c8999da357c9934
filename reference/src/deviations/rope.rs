//! Deviations of the rotation (step 6).

use ndarray::Array2;

use super::Change;
use super::changes::narrowed;
use crate::geometry::BATCH;
use crate::policy::Site;
use crate::stages::{Context, Output, Trace};
use crate::tensor::TensorId as T;

/// How a kernel may rotate otherwise.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Rotation {
    /// The other way round: the sign of the sine changed.
    Back,
    /// The two halves of a head stored in each other's place.
    HalvesExchanged,
    /// Neighbours rotated instead of the two halves.
    Interleaved,
    /// Sine and cosine taken for each other.
    TablesExchanged,
    /// The second product fused into the addition.
    Fused,
}

/// A rotation stage done so.
pub fn rotated(how: Rotation) -> Change {
    Box::new(move |call| run(call.context, call.trace, call.stage.writes.contains(&T::AllQPadded), how))
}

fn run(context: &Context<'_, '_>, trace: &Trace, queries: bool, how: Rotation) -> Vec<Output> {
    let geometry = context.inputs.geometry;
    let (dim, group) = (geometry.head_dim, geometry.group());
    let (source, id, site) =
        if queries { (T::QProjNorm, T::AllQPadded, Site::Q) } else { (T::KProjNorm, T::KRows, Site::KCache) };
    let x = trace.f32(source);
    let [rows, columns] = id.shape(geometry);
    let mut wide = Array2::<f32>::zeros((rows, columns));
    for b in 0..BATCH {
        let position = context.inputs.batch.position(b);
        let (cos, sin) = (context.inputs.rope_cos.row(position), context.inputs.rope_sin.row(position));
        for head in 0..x.ncols() / dim {
            let value = |d: usize| x[(b, head * dim + d)];
            for j in 0..dim / 2 {
                let (lo, hi) = (j, j + dim / 2);
                let (a, z) = if how == Rotation::Interleaved { (2 * j, 2 * j + 1) } else { (lo, hi) };
                let (cos_a, sin_a, cos_b, sin_b) = match how {
                    Rotation::Back => (cos[lo], -sin[lo], cos[hi], -sin[hi]),
                    Rotation::TablesExchanged => (sin[lo], cos[lo], sin[hi], cos[hi]),
                    _ => (cos[lo], sin[lo], cos[hi], sin[hi]),
                };
                let (xa, xb) = (value(a), value(z));
                let first = match how {
                    Rotation::Fused => (-xb).mul_add(sin_a, xa * cos_a),
                    _ => xa * cos_a - xb * sin_a,
                };
                let second = match how {
                    Rotation::Fused => xa.mul_add(sin_b, xb * cos_b),
                    _ => xb * cos_b + xa * sin_b,
                };
                let (to_a, to_b) = if how == Rotation::HalvesExchanged { (z, a) } else { (a, z) };
                for (d, rotated) in [(to_a, first), (to_b, second)] {
                    let at = if queries {
                        ((b * geometry.num_key_value_heads + head / group) * BATCH + head % group, d)
                    } else {
                        (b, head * dim + d)
                    };
                    wide[at] = rotated;
                }
            }
        }
    }
    narrowed(context, id, site, wide)
}

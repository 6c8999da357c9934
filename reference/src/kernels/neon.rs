//! The Arm levels: NEON, whose INT8 products are widened in two steps, and the same with the dot-product instruction.
//! FP32 work is alike in both: the eight virtual lanes of an output are two registers, and a tile of outputs shares what
//! is loaded. A token that only detection gives out stands for what the CPU has, so that safe code cannot call what it
//! has not.

use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};
use std::fmt;
use std::hint::black_box;
use std::ops::Range;

use half::bf16;

use super::level::{Block, Kernels, ValueTile, Weighted};
use super::sum::{LANES, RUNS};
use super::upcoming::Upcoming;
use crate::rounding::{BF16_NAN, Rounding, to_bf16};

/// Outputs of a tile, where the weights of an output lie side by side.
const OUTPUTS: usize = 4;
/// Columns of a strip, where the weights of a term lie side by side.
const STRIP: usize = 16;
/// Terms that all strips of a block take before the next ones are read: their weights stay in the first cache.
const TERMS: usize = 128;

/// The level that every 64-bit Arm CPU has. `None` without NEON.
#[must_use]
pub fn baseline() -> Option<impl Kernels> {
    Neon::detect().map(Level)
}

/// The level with dot products. `None` where the CPU has none.
#[must_use]
pub fn dot_products() -> Option<impl Kernels> {
    DotProducts::detect().map(Level)
}

/// The CPU has NEON.
#[derive(Clone, Copy, Debug)]
struct Neon(());

impl Neon {
    fn detect() -> Option<Self> {
        is_aarch64_feature_detected!("neon").then_some(Self(()))
    }
}

/// The CPU has NEON and dot products.
#[derive(Clone, Copy, Debug)]
struct DotProducts(Neon);

impl DotProducts {
    fn detect() -> Option<Self> {
        Neon::detect().filter(|_| is_aarch64_feature_detected!("dotprod")).map(Self)
    }
}

impl From<DotProducts> for Neon {
    fn from(token: DotProducts) -> Self {
        token.0
    }
}

/// Sums of products over weights that lie side by side for each output.
trait Tile: Copy {
    /// Activations.
    type X;
    /// Weights.
    type W;
    /// Sums.
    type Sum: Copy;
    /// Activation rows that a tile's registers hold at most.
    const ROWS: usize;

    /// `R` rows by `C` outputs, all of one length.
    fn tile<const R: usize, const C: usize>(self, x: [&[Self::X]; R], w: [&[Self::W]; C]) -> [[Self::Sum; C]; R];
}

/// What the two levels do not share.
trait Int8: Tile<X = i8, W = i8, Sum = i32> + Into<Neon> + Send + Sync + fmt::Debug {
    const NAME: &'static str;
    const NEEDS: &'static str;

    /// Sums of [`STRIP`] columns from `column` on for `R` rows of activations, over the terms in `w`.
    fn strip<const R: usize>(self, x: [&[i8]; R], w: &[&[i8]], column: usize) -> [[i32; STRIP]; R];

    /// [`Kernels::i8_burst`].
    fn burst(self, steps: u64) -> u64;
}

// Loads of whole registers. The intrinsics take pointers and no alignment beyond the element's.

#[inline]
#[target_feature(enable = "neon")]
fn load_i8(values: &[i8; 16]) -> int8x16_t {
    // SAFETY: the array holds the 16 elements that are read.
    unsafe { vld1q_s8(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_half_i8(values: &[i8; 8]) -> int8x8_t {
    // SAFETY: the array holds the 8 elements that are read.
    unsafe { vld1_s8(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_f32(values: &[f32; LANES]) -> [float32x4_t; 2] {
    // SAFETY: the array holds the 8 elements that are read, the second four from its fifth on.
    unsafe { [vld1q_f32(values.as_ptr()), vld1q_f32(values.as_ptr().add(4))] }
}

#[inline]
#[target_feature(enable = "neon")]
fn store_f32(values: [float32x4_t; 2]) -> [f32; LANES] {
    let mut out = [0f32; LANES];
    // SAFETY: the array holds the 8 elements that are written, the second four from its fifth on.
    unsafe {
        vst1q_f32(out.as_mut_ptr(), values[0]);
        vst1q_f32(out.as_mut_ptr().add(4), values[1]);
    }
    out
}

#[inline]
#[target_feature(enable = "neon")]
fn store_i32(values: [int32x4_t; 4]) -> [i32; STRIP] {
    let mut out = [0i32; STRIP];
    for (out, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
        // SAFETY: the chunk holds the 4 elements that are written.
        unsafe { vst1q_s32(out.as_mut_ptr(), value) };
    }
    out
}

/// BF16 is the upper half of FP32.
#[inline]
#[target_feature(enable = "neon")]
fn widen(values: &[bf16; LANES]) -> [float32x4_t; 2] {
    // SAFETY: the array holds the 8 elements that are read, and `bf16` is a `u16` in memory.
    let bits = unsafe { vld1q_u16(values.as_ptr().cast()) };
    let low = vshll_n_u16::<16>(vget_low_u16(bits));
    let high = vshll_high_n_u16::<16>(bits);
    [vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(high)]
}

/// The eight lanes of an output, added in adjacent pairs until one is left.
#[inline]
#[target_feature(enable = "neon")]
fn tree(lanes: [float32x4_t; 2]) -> f32 {
    let pairs = vpaddq_f32(lanes[0], lanes[1]);
    let quads = vpaddq_f32(pairs, pairs);
    vpadds_f32(vget_low_f32(quads))
}

/// The eight lanes of `R` rows by `C` outputs.
type Lanes<const R: usize, const C: usize> = [[[float32x4_t; 2]; C]; R];

/// BF16 by widened BF16 in the canonical order: runs two by two.
#[inline]
#[target_feature(enable = "neon")]
fn bf16_tile<const R: usize, const C: usize>(x: [&[f32]; R], w: [&[bf16]; C]) -> [[f32; C]; R] {
    let depth = x.first().map_or(0, |x| x.len());
    let mut lanes: Lanes<R, C> = [[[vdupq_n_f32(0.0); 2]; C]; R];
    for start in (0..depth).step_by(2 * RUNS) {
        let (middle, end) = (depth.min(start + RUNS), depth.min(start + 2 * RUNS));
        let first = bf16_run(x.map(|x| &x[start..middle]), w.map(|w| &w[start..middle]));
        let second = bf16_run(x.map(|x| &x[middle..end]), w.map(|w| &w[middle..end]));
        for r in 0..R {
            for c in 0..C {
                for half in 0..2 {
                    let both = vaddq_f32(first[r][c][half], second[r][c][half]);
                    lanes[r][c][half] = vaddq_f32(lanes[r][c][half], both);
                }
            }
        }
    }
    let mut sums = [[0f32; C]; R];
    for r in 0..R {
        for c in 0..C {
            sums[r][c] = tree(lanes[r][c]);
        }
    }
    sums
}

/// A run of every lane: term `k` goes to lane `k % 8`.
#[inline]
#[target_feature(enable = "neon")]
fn bf16_run<const R: usize, const C: usize>(x: [&[f32]; R], w: [&[bf16]; C]) -> Lanes<R, C> {
    let depth = x.first().map_or(0, |x| x.len());
    let mut lanes: Lanes<R, C> = [[[vdupq_n_f32(0.0); 2]; C]; R];
    for k in (0..depth).step_by(LANES) {
        let mut values = [[vdupq_n_f32(0.0); 2]; R];
        for r in 0..R {
            values[r] = load_f32(&eight(&x[r][k..depth]));
        }
        for c in 0..C {
            let [low, high] = widen(&eight(&w[c][k..depth]));
            for r in 0..R {
                lanes[r][c][0] = vfmaq_f32(lanes[r][c][0], values[r][0], low);
                lanes[r][c][1] = vfmaq_f32(lanes[r][c][1], values[r][1], high);
            }
        }
    }
    lanes
}

/// The first eight values, or fewer and zeros.
#[inline]
fn eight<T: Copy + Default>(values: &[T]) -> [T; LANES] {
    values.first_chunk().copied().unwrap_or_else(|| {
        let mut padded = [T::default(); LANES];
        padded[..values.len()].copy_from_slice(values);
        padded
    })
}

/// Adds terms to [`STRIP`] sums of each of `R` rows, one after the other. The sums begin at `sums[0]`, those of the
/// next row `columns` further on; their weights at `column`.
#[target_feature(enable = "neon")]
fn bf16_strip<const R: usize>(terms: Terms<'_>, x: [&[f32]; R], column: usize, sums: &mut [f32], columns: usize) {
    let mut lanes = [[[vdupq_n_f32(0.0); 2]; STRIP / LANES]; R];
    for r in 0..R {
        let sums = sums[r * columns..].as_chunks::<LANES>().0;
        for (lanes, sums) in lanes[r].iter_mut().zip(sums) {
            *lanes = load_f32(sums);
        }
    }
    for k in (terms.first..terms.w.len()).step_by(terms.step) {
        let w = &terms.w[k][column..column + STRIP];
        let mut values = [vdupq_n_f32(0.0); R];
        for r in 0..R {
            values[r] = vdupq_n_f32(x[r][k]);
        }
        for (h, w) in w.as_chunks::<LANES>().0.iter().enumerate() {
            let [low, high] = widen(w);
            for r in 0..R {
                lanes[r][h][0] = vfmaq_f32(lanes[r][h][0], values[r], low);
                lanes[r][h][1] = vfmaq_f32(lanes[r][h][1], values[r], high);
            }
        }
    }
    for r in 0..R {
        let sums = sums[r * columns..].as_chunks_mut::<LANES>().0;
        for (sums, lanes) in sums.iter_mut().zip(lanes[r]) {
            *sums = store_f32(lanes);
        }
    }
}

/// `BF16_RNE(f32(code) * scale)` of a row of codes.
#[target_feature(enable = "neon")]
fn narrow(codes: &[i8], scale: f32, out: &mut [bf16]) {
    let (codes, codes_tail) = codes.as_chunks::<LANES>();
    let (out, out_tail) = out.as_chunks_mut::<LANES>();
    for (out, codes) in out.iter_mut().zip(codes) {
        let codes = vmovl_s8(load_half_i8(codes));
        let low = narrow_half(vmovl_s16(vget_low_s16(codes)), scale);
        let high = narrow_half(vmovl_high_s16(codes), scale);
        // SAFETY: the array holds the 8 elements that are written, and `bf16` is a `u16` in memory.
        unsafe { vst1q_u16(out.as_mut_ptr().cast(), vcombine_u16(low, high)) };
    }
    for (out, &code) in out_tail.iter_mut().zip(codes_tail) {
        *out = to_bf16(f32::from(code) * scale, Rounding::Rne);
    }
}

/// Four codes, as [`to_bf16`] rounds: half an upper unit and the lowest bit that stays are added, every NaN is one NaN.
#[inline]
#[target_feature(enable = "neon")]
fn narrow_half(codes: int32x4_t, scale: f32) -> uint16x4_t {
    let value = vmulq_n_f32(vcvtq_f32_s32(codes), scale);
    let bits = vreinterpretq_u32_f32(value);
    let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
    let rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
    let number = vmovn_u32(vceqq_f32(value, value));
    vbsl_u16(number, vshrn_n_u32::<16>(rounded), vdup_n_u16(BF16_NAN.to_bits()))
}

/// Adds the products of 16 pairs to four sums, in any order: integer sums are exact.
///
/// Two products are added before they are widened: they fit 16 bits, because no activation is -128 and
/// 2 * 127 * 128 < 2^15.
#[inline]
#[target_feature(enable = "neon")]
fn widened_dot(sums: int32x4_t, x: int8x16_t, w: int8x16_t) -> int32x4_t {
    let products = vmull_s8(vget_low_s8(x), vget_low_s8(w));
    let products = vmlal_s8(products, vget_high_s8(x), vget_high_s8(w));
    vpadalq_s16(sums, products)
}

/// Adds the products of four terms to 16 columns. `w` holds a term's weights in each register. Products are added in
/// pairs as in [`widened_dot`].
#[inline]
#[target_feature(enable = "neon")]
fn widened_terms(mut sums: [int32x4_t; 4], x: [i8; 4], w: [int8x16_t; 4]) -> [int32x4_t; 4] {
    for pair in [0, 2] {
        let x = [vdupq_n_s8(x[pair]), vdupq_n_s8(x[pair + 1])];
        let low = vmull_s8(vget_low_s8(w[pair]), vget_low_s8(x[0]));
        let low = vmlal_s8(low, vget_low_s8(w[pair + 1]), vget_low_s8(x[1]));
        let high = vmull_high_s8(w[pair], x[0]);
        let high = vmlal_high_s8(high, w[pair + 1], x[1]);
        sums[0] = vaddw_s16(sums[0], vget_low_s16(low));
        sums[1] = vaddw_high_s16(sums[1], low);
        sums[2] = vaddw_s16(sums[2], vget_low_s16(high));
        sums[3] = vaddw_high_s16(sums[3], high);
    }
    sums
}

/// The weights as [`widened_terms`] takes them: as they lie.
#[inline]
#[target_feature(enable = "neon")]
fn as_terms(w: [int8x16_t; 4]) -> [int8x16_t; 4] {
    w
}

/// Adds the products of 16 pairs to four sums.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn fused_dot(sums: int32x4_t, x: int8x16_t, w: int8x16_t) -> int32x4_t {
    let out;
    // SAFETY: the caller's features hold the instruction, which reads and writes the named registers only. It is written
    // out because its intrinsic is not stable.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {x:v}.16b, {w:v}.16b",
            sums = inout(vreg) sums => out,
            x = in(vreg) x,
            w = in(vreg) w,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    out
}

/// Adds the products of four terms to 16 columns. Each 32 bits of `w` hold a column's four weights, as
/// [`as_columns`] makes them.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn fused_terms(mut sums: [int32x4_t; 4], x: [i8; 4], w: [int8x16_t; 4]) -> [int32x4_t; 4] {
    let x = vreinterpretq_s8_s32(vdupq_n_s32(i32::from_le_bytes(x.map(|x| x as u8))));
    for (sums, w) in sums.iter_mut().zip(w) {
        *sums = fused_dot(*sums, x, w);
    }
    sums
}

/// Transposes four terms of 16 columns into columns of four terms.
#[inline]
#[target_feature(enable = "neon")]
fn as_columns(w: [int8x16_t; 4]) -> [int8x16_t; 4] {
    let low = [vzip1q_s8(w[0], w[1]), vzip1q_s8(w[2], w[3])].map(|pairs| vreinterpretq_s16_s8(pairs));
    let high = [vzip2q_s8(w[0], w[1]), vzip2q_s8(w[2], w[3])].map(|pairs| vreinterpretq_s16_s8(pairs));
    [
        vreinterpretq_s8_s16(vzip1q_s16(low[0], low[1])),
        vreinterpretq_s8_s16(vzip2q_s16(low[0], low[1])),
        vreinterpretq_s8_s16(vzip1q_s16(high[0], high[1])),
        vreinterpretq_s8_s16(vzip2q_s16(high[0], high[1])),
    ]
}

/// Hides from the compiler that a register does not change, so that a burst multiplies as often as it says.
#[inline]
#[target_feature(enable = "neon")]
fn opaque(mut values: int8x16_t) -> int8x16_t {
    // SAFETY: no instruction, only the claim to change the register.
    unsafe { asm!("/* {0:v} */", inout(vreg) values, options(nomem, nostack, preserves_flags)) };
    values
}

/// [`Kernels::f32_burst`].
#[target_feature(enable = "neon")]
fn f32_burst(steps: u64) -> u64 {
    const CHAINS: usize = 16;
    let (x, w) = (vdupq_n_f32(black_box(0.5)), vdupq_n_f32(black_box(1.0)));
    // Chains that the compiler knew to be alike it could make one.
    let mut sums = black_box([w; CHAINS]);
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = vfmaq_f32(*sum, x, w);
        }
    }
    let mut total = 0f32;
    for sum in sums {
        total += vaddvq_f32(sum);
    }
    black_box(total);
    steps * (CHAINS * 4) as u64
}

/// The INT8 loops for a token, compiled with the features that it stands for, so that what multiplies is inlined.
macro_rules! int8 {
    ($token:ty, $name:literal, $needs:literal, $features:literal, $dot:ident, $terms:ident, $arranged:ident) => {
        const _: () = {
            #[target_feature(enable = $features)]
            fn tile<const R: usize, const C: usize>(x: [&[i8]; R], w: [&[i8]; C]) -> [[i32; C]; R] {
                let depth = x.first().map_or(0, |x| x.len());
                let whole = depth / 16;
                let (x_tail, w_tail) = (x.map(|x| &x[whole * 16..depth]), w.map(|w| &w[whole * 16..depth]));
                let x = x.map(|x| &x.as_chunks::<16>().0[..whole]);
                let w = w.map(|w| &w.as_chunks::<16>().0[..whole]);
                let mut sums = [[vdupq_n_s32(0); C]; R];
                for k in 0..whole {
                    let mut weights = [vdupq_n_s8(0); C];
                    for c in 0..C {
                        weights[c] = load_i8(&w[c][k]);
                    }
                    for r in 0..R {
                        let x = load_i8(&x[r][k]);
                        for c in 0..C {
                            sums[r][c] = $dot(sums[r][c], x, weights[c]);
                        }
                    }
                }
                let mut out = [[0i32; C]; R];
                for r in 0..R {
                    for c in 0..C {
                        let tail = x_tail[r].iter().zip(w_tail[c]).map(|(&x, &w)| i32::from(x) * i32::from(w));
                        out[r][c] = vaddvq_s32(sums[r][c]) + tail.sum::<i32>();
                    }
                }
                out
            }

            #[target_feature(enable = $features)]
            fn strip<const R: usize>(x: [&[i8]; R], w: &[&[i8]], column: usize) -> [[i32; STRIP]; R] {
                let mut sums = [[vdupq_n_s32(0); 4]; R];
                for (quad, w) in w.chunks(4).enumerate() {
                    // Terms that a last quad lacks are products with zero.
                    let mut weights = [vdupq_n_s8(0); 4];
                    for (weights, w) in weights.iter_mut().zip(w) {
                        if let Some(w) = w[column..].first_chunk() {
                            *weights = load_i8(w);
                        }
                    }
                    let weights = $arranged(weights);
                    for r in 0..R {
                        let x = &x[r][4 * quad..];
                        let mut terms = [0i8; 4];
                        match x.first_chunk() {
                            Some(x) => terms = *x,
                            None => terms.iter_mut().zip(x).for_each(|(term, &x)| *term = x),
                        }
                        sums[r] = $terms(sums[r], terms, weights);
                    }
                }
                let mut out = [[0i32; STRIP]; R];
                for r in 0..R {
                    out[r] = store_i32(sums[r]);
                }
                out
            }

            #[target_feature(enable = $features)]
            fn burst(steps: u64) -> u64 {
                const CHAINS: usize = 16;
                let (x, mut w) = (opaque(vdupq_n_s8(3)), vdupq_n_s8(5));
                let mut sums = [vdupq_n_s32(0); CHAINS];
                for _ in 0..steps {
                    for sums in &mut sums {
                        w = opaque(w);
                        *sums = $dot(*sums, x, w);
                    }
                }
                let mut total = 0i32;
                for sums in sums {
                    total = total.wrapping_add(vaddvq_s32(sums));
                }
                black_box(total);
                steps * (CHAINS * 16) as u64
            }

            impl Tile for $token {
                type X = i8;
                type W = i8;
                type Sum = i32;
                const ROWS: usize = 4;

                fn tile<const R: usize, const C: usize>(self, x: [&[i8]; R], w: [&[i8]; C]) -> [[i32; C]; R] {
                    // SAFETY: the token is only made where the CPU has the features.
                    unsafe { tile(x, w) }
                }
            }

            impl Int8 for $token {
                const NAME: &'static str = $name;
                const NEEDS: &'static str = $needs;

                fn strip<const R: usize>(self, x: [&[i8]; R], w: &[&[i8]], column: usize) -> [[i32; STRIP]; R] {
                    // SAFETY: the token is only made where the CPU has the features.
                    unsafe { strip(x, w, column) }
                }

                fn burst(self, steps: u64) -> u64 {
                    // SAFETY: the token is only made where the CPU has the features.
                    unsafe { burst(steps) }
                }
            }
        };
    };
}

int8!(Neon, "neon", "a 64-bit Arm CPU with NEON", "neon", widened_dot, widened_terms, as_terms);
int8!(
    DotProducts,
    "neon-dotprod",
    "a 64-bit Arm CPU with NEON and dot products (FEAT_DotProd)",
    "neon,dotprod",
    fused_dot,
    fused_terms,
    as_columns
);

/// BF16 tiles.
#[derive(Clone, Copy)]
struct Bf16(Neon);

impl Tile for Bf16 {
    type X = f32;
    type W = bf16;
    type Sum = f32;
    // Each sum is two registers.
    const ROWS: usize = 2;

    fn tile<const R: usize, const C: usize>(self, x: [&[f32]; R], w: [&[bf16]; C]) -> [[f32; C]; R] {
        // SAFETY: the token is only made where the CPU has NEON.
        unsafe { bf16_tile(x, w) }
    }
}

/// Of a matrix of `width` columns the `columns` of `R` rows from row `first` on.
fn part<const R: usize, T>(matrix: &[T], width: usize, first: usize, columns: Range<usize>) -> [&[T]; R] {
    std::array::from_fn(|r| &matrix[(first + r) * width..][columns.clone()])
}

/// Runs a body for each group of at most `$most` rows: `$row` is the group's first one, and the constant `R` says how
/// many it has, so that registers are assigned when this is compiled.
macro_rules! by_rows {
    ($rows:expr, $most:expr, |$row:ident| $body:block) => {
        let (mut $row, rows) = (0, $rows);
        while $row < rows {
            $row += match rows - $row {
                4.. if $most >= 4 => {
                    const R: usize = 4;
                    $body
                    R
                }
                2.. => {
                    const R: usize = 2;
                    $body
                    R
                }
                _ => {
                    const R: usize = 1;
                    $body
                    R
                }
            };
        }
    };
}

/// The outputs in `range` of all rows, in tiles. `out` is `[rows, columns]`, and `weight` gives each output's weights.
fn by_outputs<'w, T: Tile<W: 'w>>(
    token: T,
    x: &[T::X],
    depth: usize,
    weight: impl Fn(usize) -> &'w [T::W],
    range: Range<usize>,
    columns: usize,
    out: &mut [T::Sum],
) {
    let mut n = range.start;
    while n < range.end {
        if range.end - n >= OUTPUTS {
            let weights: [&[T::W]; OUTPUTS] = std::array::from_fn(|c| weight(n + c));
            all_rows(token, x, depth, weights, n, columns, out);
            n += OUTPUTS;
        } else {
            all_rows(token, x, depth, [weight(n)], n, columns, out);
            n += 1;
        }
    }
}

/// The outputs from `n` on that `w` has weights of, for all rows.
fn all_rows<T: Tile, const C: usize>(
    token: T,
    x: &[T::X],
    depth: usize,
    w: [&[T::W]; C],
    n: usize,
    columns: usize,
    out: &mut [T::Sum],
) {
    by_rows!(out.len() / columns, T::ROWS, |row| {
        let sums = token.tile(part::<R, _>(x, depth, row, 0..depth), w);
        for (out, sums) in out[row * columns..].chunks_exact_mut(columns).zip(sums) {
            out[n..n + C].copy_from_slice(&sums);
        }
    });
}

/// Terms of FP32 sums whose weights lie side by side for each term.
#[derive(Clone, Copy)]
struct Terms<'a> {
    /// Activations, `[rows, depth]`.
    x: &'a [f32],
    depth: usize,
    /// Which term the first of `w` is.
    start: usize,
    /// The weights of each term, a sum's beside the next one's.
    w: &'a [&'a [bf16]],
    /// Of these, `first`, `first + step`, ... are added.
    first: usize,
    step: usize,
}

impl Terms<'_> {
    /// Adds the terms to `sums`, `[rows, columns]`, one after the other.
    fn add(self, _: Neon, sums: &mut [f32], columns: usize) {
        let whole = columns - columns % STRIP;
        for column in (0..whole).step_by(STRIP) {
            by_rows!(sums.len() / columns, 4, |row| {
                let x = part::<R, _>(self.x, self.depth, row, self.start..self.start + self.w.len());
                // SAFETY: the token is only made where the CPU has NEON.
                unsafe { bf16_strip(self, x, column, &mut sums[row * columns + column..], columns) };
            });
        }
        // What is no whole strip, plainly.
        for (row, sums) in sums.chunks_exact_mut(columns.max(1)).enumerate() {
            let x = &self.x[row * self.depth + self.start..];
            for k in (self.first..self.w.len()).step_by(self.step) {
                for (sum, w) in sums[whole..].iter_mut().zip(&self.w[k][whole..]) {
                    *sum = x[k].mul_add(w.to_f32(), *sum);
                }
            }
        }
    }
}

/// Adds INT8 products to `sums`, `[rows, columns]`: `x` is `[rows, depth]`, `w` are the weights from term `start` on.
fn add_products<I: Int8>(
    token: I,
    (x, depth, start): (&[i8], usize, usize),
    w: &[&[i8]],
    sums: &mut [i32],
    columns: usize,
) {
    let whole = columns - columns % STRIP;
    let terms = start..start + w.len();
    for column in (0..whole).step_by(STRIP) {
        by_rows!(sums.len() / columns, 4, |row| {
            let products = token.strip(part::<R, _>(x, depth, row, terms.clone()), w, column);
            for (sums, products) in sums[row * columns + column..].chunks_mut(columns).zip(products) {
                for (sum, product) in sums.iter_mut().zip(products) {
                    *sum += product;
                }
            }
        });
    }
    // What is no whole strip, plainly.
    for (row, sums) in sums.chunks_exact_mut(columns.max(1)).enumerate() {
        for (&x, w) in x[row * depth..][terms.clone()].iter().zip(w) {
            for (sum, &w) in sums[whole..].iter_mut().zip(&w[whole..]) {
                *sum += i32::from(x) * i32::from(w);
            }
        }
    }
}

/// The rows of a block.
fn rows_of<'a, T>(w: Block<'a, T>) -> Vec<&'a [T]> {
    (0..w.rows()).map(|k| w.row(k)).collect()
}

/// A level, made of what the CPU has.
#[derive(Clone, Copy, Debug)]
struct Level<I>(I);

impl<I: Int8> Kernels for Level<I> {
    fn name(&self) -> &'static str {
        I::NAME
    }

    fn needs(&self) -> &'static str {
        I::NEEDS
    }

    fn i8_outputs(&self, x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
        by_outputs(self.0, x, w.width(), |n| w.row(n), 0..w.rows(), w.rows(), out);
    }

    fn i8_columns(&self, x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
        out.fill(0);
        let (depth, columns) = (w.rows(), w.width());
        for (block, w) in rows_of(w).chunks(TERMS).enumerate() {
            add_products(self.0, (x, depth, block * TERMS), w, out, columns);
        }
    }

    fn bf16_outputs(&self, x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) {
        by_outputs(Bf16(self.0.into()), x, w.width(), |n| w.row(n), 0..w.rows(), w.rows(), out);
    }

    fn bf16_columns(&self, x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) {
        let (depth, columns) = (w.rows(), w.width());
        // Matrices for each virtual lane: what it has, and the first of two runs.
        let count = out.len();
        let (mut lanes, mut firsts) = (vec![0f32; LANES * count], vec![0f32; LANES * count]);
        let mut run = vec![0f32; count];
        for (block, w) in rows_of(w).chunks(RUNS).enumerate() {
            for first in 0..LANES {
                run.fill(0.0);
                Terms { x, depth, start: block * RUNS, w, first, step: LANES }.add(self.0.into(), &mut run, columns);
                let place = first * count..(first + 1) * count;
                if block % 2 == 0 {
                    firsts[place].copy_from_slice(&run);
                } else {
                    for ((lane, first), run) in lanes[place.clone()].iter_mut().zip(&firsts[place]).zip(&run) {
                        *lane += first + run;
                    }
                }
            }
        }
        if depth.div_ceil(RUNS) % 2 == 1 {
            lanes.iter_mut().zip(&firsts).for_each(|(lane, first)| *lane += first);
        }
        for (i, out) in out.iter_mut().enumerate() {
            let [l0, l1, l2, l3, l4, l5, l6, l7] = std::array::from_fn(|lane| lanes[lane * count + i]);
            *out = ((l0 + l1) + (l2 + l3)) + ((l4 + l5) + (l6 + l7));
        }
    }

    fn scaled_outputs(&self, x: &[f32], w: Block<'_, i8>, scale: &[f32], out: &mut [f32]) {
        let (outputs, depth) = (w.rows(), w.width());
        // The weights of a tile are narrowed once for all its rows.
        let mut weights = vec![bf16::ZERO; OUTPUTS * depth];
        for start in (0..outputs).step_by(OUTPUTS) {
            let range = start..outputs.min(start + OUTPUTS);
            for n in range.clone() {
                let out = &mut weights[(n - start) * depth..][..depth];
                // SAFETY: the level is only made where the CPU has NEON.
                unsafe { narrow(w.row(n), scale[n], out) };
            }
            let weight = |n: usize| &weights[(n - start) * depth..][..depth];
            by_outputs(Bf16(self.0.into()), x, depth, weight, range, outputs, out);
        }
    }

    fn scores(&self, q: &[f32], keys: &[&[bf16]], _: &mut Upcoming<'_>, out: &mut [f32]) {
        let dim = keys.first().map_or(0, |key| key.len());
        by_outputs(Bf16(self.0.into()), q, dim, |t| keys[t], 0..keys.len(), keys.len(), out);
    }

    fn weighted(&self, values: Weighted<'_>, _: &mut Upcoming<'_>, out: &mut [f32]) {
        let dim = values.dim().max(1);
        let mut sums = vec![0f32; out.len()];
        for ValueTile { p, stride, factors, values } in values.tiles() {
            sums.fill(0.0);
            let terms = Terms { x: p, depth: stride, start: 0, w: values, first: 0, step: 1 };
            terms.add(self.0.into(), &mut sums, dim);
            for ((out, sums), [a, c]) in out.chunks_exact_mut(dim).zip(sums.chunks_exact(dim)).zip(factors) {
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out = *out * a + sum * c;
                }
            }
        }
    }

    fn i8_burst(&self, steps: u64) -> u64 {
        self.0.burst(steps)
    }

    fn f32_burst(&self, steps: u64) -> u64 {
        // SAFETY: the level is only made where the CPU has NEON.
        unsafe { f32_burst(steps) }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use crate::kernels::{Block, levels};

    /// `.ci/aarch64` names the levels of the CPU that it emulates, so that none is missing unseen.
    #[test]
    fn the_levels_are_those_of_the_cpu() {
        let names: Vec<&str> = levels().iter().map(|level| level.name()).collect();
        assert!(names.starts_with(&["plain", "neon"]), "{names:?}");
        if let Ok(expected) = std::env::var("ASSAY_EXPECTED_LEVELS") {
            assert_eq!(names.join(" "), expected);
        }
    }

    /// Two products are added in 16 bits: the largest ones fit.
    #[test]
    fn the_largest_products_are_exact() {
        let (depth, outputs) = (1 << 10, 33);
        for value in [-127, 127] {
            let x = vec![value; depth];
            for weight in [-128, 127] {
                let expected = vec![i32::from(value) * i32::from(weight) * depth as i32; outputs];
                let by_output = Array2::from_elem((outputs, depth), weight);
                let by_column = Array2::from_elem((depth, outputs), weight);
                for level in levels() {
                    let mut out = vec![0; outputs];
                    level.i8_outputs(&x, Block::new(by_output.view()).unwrap(), &mut out);
                    assert_eq!(out, expected, "{}", level.name());
                    level.i8_columns(&x, Block::new(by_column.view()).unwrap(), &mut out);
                    assert_eq!(out, expected, "{}", level.name());
                }
            }
        }
    }
}

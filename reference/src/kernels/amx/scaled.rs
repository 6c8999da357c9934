//! The down projection from INT8 and scale on tiles, as [`super::runs`] says. Weights are looked up as in
//! [`super::super::vbmi`], a group of terms of sixteen outputs at a time: four lanes are four tiles, and their sums stay in
//! tiles over all of K.

use std::arch::asm;
use std::arch::x86_64::*;
use std::array::from_fn;
use std::marker::PhantomData;

use super::super::aligned::Aligned;
use super::super::avx2::prefetch;
use super::super::level::Block;
use super::super::sum::{LANES, RUNS};
use super::super::vbmi::{CODES, Table, table, weights};
use super::runs::{Exponents, GROUP, TILE, TILES, TOGETHER, are_bf16, pack, tree};
use super::{LINE, SIDE, SUMS, Shapes, store_turned};

/// Whether these kernels take weights of this shape.
pub(super) fn fits(w: Block<'_, i8>) -> bool {
    w.width() >= GROUP && w.rows() >= SIDE
}

/// Whether tiles add the products of these activations, and of weights of these scales, as FP32 instructions do; and the
/// scales have tables.
#[target_feature(enable = "avx512f,avx512bw")]
fn adds_alike(x: &[f32], scale: &[f32]) -> bool {
    let scales = Exponents::of(scale);
    // The largest weight is 128 times its scale, and rounding may carry.
    let weights = Exponents { most: scales.most + 8, ..scales };
    scale.iter().all(|scale| scale.is_sign_positive()) && are_bf16(x) && Exponents::of(x).add_alike(weights)
}

/// [`super::Kernels::scaled_outputs`] of weights that [`fits`]; `false`, and nothing done, where tiles would give other bits.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) fn outputs(x: &[f32], w: Block<'_, i8>, scale: &[f32], out: &mut [f32]) -> bool {
    if !adds_alike(x, scale) {
        return false;
    }
    let (depth, outputs) = (w.width(), w.rows());
    let (whole, rest, groups) = (depth / GROUP, depth % GROUP, depth.div_ceil(GROUP));
    let packed: Vec<Aligned<u32>> = x.chunks(SIDE * depth).map(|x| pack(x, depth)).collect();
    // What only the first rows need is overwritten group by group, in the first cache level.
    let group_of_panel = |at: usize| if packed.len() > 1 { at * TILES } else { 0 };
    let mut panel = Aligned::<u32>::zeros(group_of_panel(groups - 1) + TILES);
    // The last codes of each output, filled up with zeros.
    let mut last = [[0i8; GROUP]; SIDE];
    // [16 rows][lane]
    let mut sums = Aligned::<f32>::zeros(packed.len() * LANES * SUMS);
    let shapes = Shapes::load();
    for start in (0..outputs).step_by(SIDE) {
        // A tile that would reach past the last output ends there, and computes some once more.
        let first = start.min(outputs - SIDE);
        let rows: [&[i8]; SIDE] = from_fn(|n| w.row(first + n));
        let tables: [Table; SIDE] = from_fn(|n| table(scale[first + n]));
        for (last, row) in last.iter_mut().zip(rows).take(if rest > 0 { SIDE } else { 0 }) {
            last[..rest].copy_from_slice(&row[whole * GROUP..]);
        }
        for half in 0..LANES / TOGETHER {
            // SAFETY: 64 bytes.
            let order = unsafe { _mm512_loadu_si512(ORDER[half].as_ptr().cast()) };
            for (index, (x, sums)) in packed.iter().zip(sums.chunks_exact_mut(LANES * SUMS)).enumerate() {
                let lanes = Lanes::zero(&shapes);
                for at in 0..groups {
                    let panel = &mut panel[group_of_panel(at)..][..TILES];
                    for n in 0..if index == 0 { SIDE } else { 0 } {
                        let codes = rows[n][at * GROUP..].first_chunk().unwrap_or(&last[n]);
                        // What comes next: two lines of the next outputs, one after the other over both halves.
                        let next = rows[n].as_ptr().wrapping_offset(SIDE as isize * w.stride());
                        let next = next.wrapping_add((half * groups + at) * 2 * CODES);
                        prefetch(next);
                        prefetch(next.wrapping_add(CODES));
                        widen(codes, order, &tables[n], &mut panel[n * SIDE..]);
                    }
                    lanes.add(panel, &x[(half * groups + at) * TILES..]);
                }
                lanes.store(&mut sums[half * TOGETHER * SUMS..]);
            }
        }
        for (sums, out) in sums.chunks_exact(LANES * SUMS).zip(out.chunks_mut(SIDE * outputs)) {
            store(sums, out, outputs, first);
        }
    }
    true
}

/// For either half of the lanes, which code each looked-up weight is of, so that once bytes are spread to words there
/// stand eight pairs of a lane, in order, beside eight of the next one. Codes of second runs count from 64 on.
const ORDER: [[u8; CODES]; 2] = {
    let mut order = [[0; CODES]; 2];
    let mut at = 0;
    while at < 2 * CODES {
        let (half, byte) = (at / CODES, at % CODES);
        // The lower eight bytes of each quarter become the first register, the upper ones the second.
        let (register, word) = (byte % 16 / 8, byte / 16 * 8 + byte % 8);
        let (pair, run) = (word / 2, word % 2);
        let lane = half * TOGETHER + register * 2 + pair / 8;
        order[half][byte] = (run * CODES + pair % 8 * LANES + lane) as u8;
        at += 1;
    }
    order
};

/// The weights of a group of an output's codes, as its line in the tiles of four lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
fn widen(codes: &[i8; GROUP], order: __m512i, table: &Table, panel: &mut [u32]) {
    assert!(panel.len() >= (TOGETHER - 1) * TILE + SIDE);
    // Eight pairs of each lane at a time.
    for part in 0..2 {
        // SAFETY: 64 codes each.
        let (one, two) = unsafe {
            let codes = codes.as_ptr().add(part * CODES);
            (_mm512_loadu_si512(codes.cast()), _mm512_loadu_si512(codes.add(RUNS).cast()))
        };
        let registers = weights(_mm512_permutex2var_epi8(one, order, two), table);
        for (register, pairs) in registers.into_iter().enumerate() {
            // SAFETY: eight pairs each, inside the panel by the assertion above.
            unsafe {
                let panel = panel.as_mut_ptr().add(2 * register * TILE + 8 * part);
                _mm256_storeu_si256(panel.cast(), _mm512_castsi512_si256(pairs));
                _mm256_storeu_si256(panel.add(TILE).cast(), _mm512_extracti64x4_epi64::<1>(pairs));
            }
        }
    }
}

/// The sums of four lanes, in tiles 0 to 3. They stay there from one block of assembly to the next: the compiler is not
/// told of tiles and has no use for them, and nothing else runs on this thread meanwhile that has.
struct Lanes<'a>(PhantomData<&'a Shapes>);

impl<'a> Lanes<'a> {
    fn zero(_: &'a Shapes) -> Self {
        // SAFETY: registers only, of the shapes that are loaded.
        unsafe { asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem)) };
        Self(PhantomData)
    }

    /// Adds the products of a group of terms: tiles of weights and of activations, one a lane.
    fn add(&self, w: &[u32], x: &[u32]) {
        assert!(w.len() >= TILES && x.len() >= TILES);
        // SAFETY: four tiles each, by the assertion.
        unsafe {
            asm!(
                "tileloadd tmm4, [{w} + {line}]",
                "tileloadd tmm5, [{x} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm5",
                "tileloadd tmm6, [{w} + {line} + {tile}]",
                "tileloadd tmm7, [{x} + {line} + {tile}]",
                "tdpbf16ps tmm1, tmm6, tmm7",
                "tileloadd tmm4, [{w} + {line} + 2 * {tile}]",
                "tileloadd tmm5, [{x} + {line} + 2 * {tile}]",
                "tdpbf16ps tmm2, tmm4, tmm5",
                "tileloadd tmm6, [{w} + {line} + 3 * {tile}]",
                "tileloadd tmm7, [{x} + {line} + 3 * {tile}]",
                "tdpbf16ps tmm3, tmm6, tmm7",
                w = in(reg) w.as_ptr(), x = in(reg) x.as_ptr(), line = in(reg) LINE,
                tile = const SIDE * LINE,
                options(nostack, readonly),
            );
        }
    }

    /// The sums, `[lane][output][row]`.
    fn store(self, sums: &mut [f32]) {
        assert!(sums.len() >= TOGETHER * SUMS);
        // SAFETY: four tiles, by the assertion.
        unsafe {
            asm!(
                "tilestored [{sums} + {line}], tmm0",
                "tilestored [{sums} + {line} + {tile}], tmm1",
                "tilestored [{sums} + {line} + 2 * {tile}], tmm2",
                "tilestored [{sums} + {line} + 3 * {tile}], tmm3",
                sums = in(reg) sums.as_mut_ptr(), line = in(reg) LINE,
                tile = const SIDE * LINE,
                options(nostack),
            );
        }
    }
}

/// Adds the lanes of sixteen outputs in adjacent pairs and stores them as `first..first + 16` of each row of `out`,
/// `outputs` long.
#[target_feature(enable = "avx512f,avx512bw")]
fn store(sums: &[f32], out: &mut [f32], outputs: usize, first: usize) {
    let mut lines = [_mm512_setzero_si512(); SIDE];
    for (n, line) in lines.iter_mut().enumerate() {
        *line = _mm512_castps_si512(tree(&sums[n * SIDE..], SUMS));
    }
    store_turned(lines, out, outputs, first);
}

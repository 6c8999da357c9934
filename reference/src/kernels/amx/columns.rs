//! BF16 products on tiles with weights that lie term by term, as [`super::runs`] says. Rows are staged, two runs of every
//! lane together; a strip of columns at a time, two rows are interleaved into lines of a tile, and sums go from memory to
//! tiles and back. The rows that come next are prefetched meanwhile.

use std::arch::asm;
use std::arch::x86_64::*;

use half::bf16;

use super::super::aligned::Aligned;
use super::super::avx512::{Ahead, Stage};
use super::super::level::Block;
use super::super::sum::{LANES, RUNS};
use super::runs::{Exponents, GROUP, TILE, TILES, TOGETHER, are_bf16, pack, tree};
use super::{LINE, SIDE, SUMS, Shapes, lines_of, transposed};

/// Columns of a strip: a line of each row.
const COLUMNS: usize = LINE / size_of::<bf16>();
/// Tiles of a strip and a lane.
const HALVES: usize = COLUMNS / SIDE;

/// Whether these kernels take weights of this shape.
pub(super) fn fits(w: Block<'_, bf16>) -> bool {
    w.rows() >= GROUP
}

/// [`super::Kernels::bf16_columns`] of weights that [`fits`]; `false`, and `out` untouched, where tiles would give other bits,
/// which only reading all weights tells.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn columns(x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) -> bool {
    let activations = Exponents::of(x);
    if !are_bf16(x) || !activations.are_normal() {
        return false;
    }
    let (depth, width) = (w.rows(), w.width());
    let (groups, strips) = (depth.div_ceil(GROUP), width.div_ceil(COLUMNS));
    let rows: Vec<Aligned<u32>> = x.chunks(SIDE * depth).map(|x| turned(pack(x, depth))).collect();
    // [strip][16 rows][lane][half of the columns]
    let of_rows = LANES * HALVES * SUMS;
    let mut sums = Aligned::<f32>::zeros(strips * rows.len() * of_rows);
    // [lane][half][pair]
    let mut panel = Aligned::<u32>::zeros(LANES * HALVES * TILE);
    let row = |k: usize| w.as_ptr().wrapping_offset(k as isize * w.stride());
    // The least size but zero less one, and the largest.
    let (mut least, mut most) = (_mm512_set1_epi16(-1), _mm512_setzero_si512());
    let mut stage = Stage::new(2 * width, GROUP);
    let shapes = Shapes::load();
    for group in 0..groups {
        let start = group * GROUP;
        let next = (depth - start).saturating_sub(GROUP).min(GROUP);
        let terms = (depth - start).min(GROUP);
        // SAFETY: rows start..start + terms of the block are `2 * width` bytes long.
        unsafe { stage.fill(terms, 2 * width, |k| row(start + k).cast()) };
        let mut ahead = Ahead::new(row(start + GROUP).cast(), 2 * w.stride(), next, 2 * width);
        for (strip, sums) in sums.chunks_exact_mut(rows.len() * of_rows).enumerate() {
            let block = stage.block(strip);
            for term in 0..RUNS {
                ahead.go(2);
                let line = |k: usize| {
                    if k >= terms {
                        return _mm512_setzero_si512();
                    }
                    // SAFETY: 64 bytes.
                    unsafe { _mm512_loadu_si512(block[k * LINE..][..LINE].as_ptr().cast()) }
                };
                let (one, two) = (line(term), line(RUNS + term));
                for line in [one, two] {
                    let size = _mm512_and_si512(line, _mm512_set1_epi16(0x7fff));
                    least = _mm512_min_epu16(least, _mm512_sub_epi16(size, _mm512_set1_epi16(1)));
                    most = _mm512_max_epu16(most, size);
                }
                let pairs = [_mm512_unpacklo_epi16(one, two), _mm512_unpackhi_epi16(one, two)];
                for (half, pairs) in pairs.into_iter().enumerate() {
                    let to = (term % LANES * HALVES + half) * TILE + term / LANES * SIDE;
                    // SAFETY: sixteen pairs.
                    unsafe { _mm512_storeu_si512(panel[to..to + SIDE].as_mut_ptr().cast(), pairs) };
                }
            }
            for (x, sums) in rows.iter().zip(sums.chunks_exact_mut(of_rows)) {
                for (part, sums) in sums.chunks_exact_mut(TOGETHER * HALVES * SUMS).enumerate() {
                    let x = &x[(part * groups + group) * TILES..];
                    multiply(&shapes, x, &panel[part * TOGETHER * HALVES * TILE..], sums);
                }
            }
        }
    }
    let bits = |sizes: __m512i| {
        let mut values = [0u16; COLUMNS];
        // SAFETY: 64 bytes.
        unsafe { _mm512_storeu_si512(values.as_mut_ptr().cast(), sizes) };
        values
    };
    let least = bits(least).into_iter().min().map_or(0, |least| least.saturating_add(1));
    let most = bits(most).into_iter().max().unwrap_or(0);
    let weights = Exponents { least: u32::from(least) >> 7, most: u32::from(most) >> 7 };
    if !activations.add_alike(weights) {
        return false;
    }
    for (strip, sums) in sums.chunks_exact(rows.len() * of_rows).enumerate() {
        for (sums, out) in sums.chunks_exact(of_rows).zip(out.chunks_mut(SIDE * width)) {
            for (row, out) in out.chunks_exact_mut(width).enumerate() {
                let halves = [0, 1].map(|half| {
                    let mut values = [0f32; SIDE];
                    let sums = tree(&sums[half * SUMS + row * SIDE..], HALVES * SUMS);
                    // SAFETY: sixteen sums.
                    unsafe { _mm512_storeu_ps(values.as_mut_ptr(), sums) };
                    values
                });
                for (four, out) in out[strip * COLUMNS..].chunks_mut(4).take(COLUMNS / 4).enumerate() {
                    // In each quarter of its lines, a tile holds its four of eight columns.
                    out.copy_from_slice(&halves[four % 2][four / 2 * 4..][..out.len()]);
                }
            }
        }
    }
    true
}

/// Tiles of activations with rows for columns: `[..][row][pair]`.
#[target_feature(enable = "avx512f,avx512bw")]
fn turned(mut packed: Aligned<u32>) -> Aligned<u32> {
    for tile in packed.chunks_exact_mut(TILE) {
        for (line, tile) in transposed(lines_of(tile)).into_iter().zip(tile.chunks_exact_mut(SIDE)) {
            // SAFETY: sixteen pairs.
            unsafe { _mm512_storeu_si512(tile.as_mut_ptr().cast(), line) };
        }
    }
    packed
}

/// Adds the products of sixteen activation rows with the strip in the panel to the sums of four lanes: two runs of each.
fn multiply(_: &Shapes, x: &[u32], panel: &[u32], sums: &mut [f32]) {
    assert!(x.len() >= TILES && panel.len() >= TOGETHER * HALVES * TILE && sums.len() == TOGETHER * HALVES * SUMS);
    const { assert!(HALVES == 2) };
    // SAFETY: all tiles are inside their slices by the assertions.
    unsafe {
        asm!(
            "2:",
            "tileloadd tmm0, [{sums} + {line}]",
            "tileloadd tmm1, [{sums} + {line} + {tile}]",
            "tileloadd tmm4, [{x} + {line}]",
            "tileloadd tmm5, [{w} + {line}]",
            "tdpbf16ps tmm0, tmm4, tmm5",
            "tileloadd tmm6, [{w} + {line} + {tile}]",
            "tdpbf16ps tmm1, tmm4, tmm6",
            "tilestored [{sums} + {line}], tmm0",
            "tilestored [{sums} + {line} + {tile}], tmm1",
            "add {x}, {tile}",
            "add {w}, 2 * {tile}",
            "add {sums}, 2 * {tile}",
            "dec {lanes}",
            "jnz 2b",
            x = inout(reg) x.as_ptr() => _, w = inout(reg) panel.as_ptr() => _, lanes = inout(reg) TOGETHER => _,
            sums = inout(reg) sums.as_mut_ptr() => _, line = in(reg) LINE, tile = const SIDE * LINE,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

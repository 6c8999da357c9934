//! FP32 sums with weights that lie term by term. A register holds one canonical lane of eight columns.

use std::arch::x86_64::*;

use half::bf16;

use super::staged::{LINE, STAGED, Stage};
use crate::kernels::level::Block;
use crate::kernels::sum::{LANES, tree_of_columns};

/// Widened weights of 16 columns.
type ColumnPanel = [[__m256; 2]; STAGED];

/// Sixteen columns of a lane and a row: what the lane has, and the first of two runs.
type ColumnSums = [[__m256; 2]; 2];

/// Products with weights that lie term by term: term `k` goes to lane `k % 8`. What is staged together is one run.
#[target_feature(enable = "avx2,fma")]
pub(super) fn columns(x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) {
    let (depth, width) = (w.rows(), w.width());
    if depth == 0 || width == 0 {
        return out.fill(0.0);
    }
    let rows = x.len() / depth;
    let (bytes, blocks) = (2 * width, width.div_ceil(16));
    let row = |k: usize| w.as_ptr().wrapping_offset(k as isize * w.stride()).cast::<u8>();
    let mut stage = Stage::new(bytes);
    let mut panel: ColumnPanel = [[_mm256_setzero_ps(); 2]; STAGED];
    // [block][lane][row]
    let mut acc: Vec<ColumnSums> = vec![[[_mm256_setzero_ps(); 2]; 2]; blocks * LANES * rows];
    for at in (0..depth).step_by(STAGED) {
        let (terms, second) = (STAGED.min(depth - at), at / STAGED % 2 == 1);
        // SAFETY: rows at..at + terms of the block are `bytes` long.
        unsafe { stage.fill(terms, bytes, |k| row(at + k)) };
        for (block, acc) in acc.chunks_exact_mut(LANES * rows).enumerate() {
            for (line, panel) in stage.block(block).chunks_exact(LINE).zip(&mut panel).take(terms) {
                for half in 0..2 {
                    // SAFETY: a line is twice 16 bytes.
                    let eight = unsafe { _mm_loadu_si128(line.as_ptr().add(half * 16).cast()) };
                    panel[half] = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(eight)));
                }
            }
            for (lane, acc) in acc.chunks_exact_mut(rows).enumerate() {
                let mut first = 0;
                while first < rows {
                    let (x, acc) = (&x[first * depth + at..], &mut acc[first..]);
                    first += match acc.len() {
                        1 => column_block::<1>(x, depth, lane, terms, &panel, acc, second),
                        2 | 3 => column_block::<2>(x, depth, lane, terms, &panel, acc, second),
                        _ => column_block::<4>(x, depth, lane, terms, &panel, acc, second),
                    };
                }
            }
        }
    }
    for (block, acc) in acc.chunks_exact_mut(LANES * rows).enumerate() {
        let columns = block * 16..width.min(block * 16 + 16);
        tree_of_columns(acc, rows, depth.div_ceil(STAGED) % 2 == 1, |a, b| {
            [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])]
        });
        for (row, [sums, _]) in acc[..rows].iter().enumerate() {
            let mut values = [0f32; 16];
            // SAFETY: two registers are stored into two times eight elements.
            unsafe {
                _mm256_storeu_ps(values.as_mut_ptr(), sums[0]);
                _mm256_storeu_ps(values[8..].as_mut_ptr(), sums[1]);
            }
            out[row * width..][columns.clone()].copy_from_slice(&values[..columns.len()]);
        }
    }
}

/// The run of one lane for `R` activation rows, kept when it is the first and added with the first when it is the
/// second; returns `R`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn column_block<const R: usize>(
    x: &[f32],
    stride: usize,
    lane: usize,
    terms: usize,
    panel: &ColumnPanel,
    out: &mut [ColumnSums],
    second: bool,
) -> usize {
    assert!(x.len() >= (R - 1) * stride + terms && terms <= STAGED);
    let out = &mut out[..R];
    let mut acc = [[_mm256_setzero_ps(); 2]; R];
    for k in (lane..terms).step_by(LANES) {
        let w = panel[k];
        for r in 0..R {
            // SAFETY: the activation of row r and term k, inside the slice by the assertion above.
            let x = _mm256_set1_ps(unsafe { *x.as_ptr().add(r * stride + k) });
            acc[r] = [_mm256_fmadd_ps(x, w[0], acc[r][0]), _mm256_fmadd_ps(x, w[1], acc[r][1])];
        }
    }
    for r in 0..R {
        if second {
            let [sum, first] = out[r];
            let both = |half: usize| _mm256_add_ps(first[half], acc[r][half]);
            out[r][0] = [_mm256_add_ps(sum[0], both(0)), _mm256_add_ps(sum[1], both(1))];
        } else {
            out[r][1] = acc[r];
        }
    }
    R
}

//! FP32 sums with weights that lie term by term. A register holds one canonical lane of sixteen columns.

use std::arch::x86_64::*;

use half::bf16;

use super::ZERO;
use super::staged::{Ahead, STAGED, Stage};
use crate::kernels::level::Block;
use crate::kernels::sum::{LANES, tree_of_columns};

/// Widened weights of 32 columns.
type ColumnPanel = [[__m512; 2]; STAGED];

/// 32 columns of a lane and a row: what the lane has, and the first of two runs.
type ColumnSums = [[__m512; 2]; 2];

/// Products with weights that lie term by term: term `k` goes to lane `k % 8`. What is staged together is one run.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn columns(x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) {
    let (depth, width) = (w.rows(), w.width());
    if depth == 0 || width == 0 {
        return out.fill(0.0);
    }
    let rows = x.len() / depth;
    let (bytes, blocks) = (2 * width, width.div_ceil(32));
    let stride = 2 * w.stride();
    let row = |k: usize| w.as_ptr().cast::<u8>().wrapping_offset(k as isize * stride);
    let mut stage = Stage::new(bytes, STAGED);
    let mut panel: ColumnPanel = [[ZERO; 2]; STAGED];
    // [block][lane][row]
    let mut acc: Vec<ColumnSums> = vec![[[ZERO; 2]; 2]; blocks * LANES * rows];
    for at in (0..depth).step_by(STAGED) {
        let (terms, second) = (STAGED.min(depth - at), at / STAGED % 2 == 1);
        let next = STAGED.min(depth - at - terms);
        // SAFETY: rows at..at + terms of the block are `bytes` long.
        unsafe { stage.fill(terms, bytes, |k| row(at + k)) };
        let mut ahead = Ahead::new(row(at + terms), stride, next, bytes);
        for (block, acc) in acc.chunks_exact_mut(LANES * rows).enumerate() {
            for (line, panel) in stage.block(block).chunks_exact(64).zip(&mut panel).take(terms) {
                // SAFETY: a line is twice 32 bytes.
                let (low, high) = unsafe {
                    (_mm256_loadu_si256(line.as_ptr().cast()), _mm256_loadu_si256(line[32..].as_ptr().cast()))
                };
                panel[0] = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(low)));
                panel[1] = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(high)));
            }
            for (lane, acc) in acc.chunks_exact_mut(rows).enumerate() {
                let mut first = 0;
                while first < rows {
                    let (x, acc) = (&x[first * depth + at..], &mut acc[first..]);
                    first += match acc.len() {
                        1 => column_block::<1>(x, depth, lane, terms, &panel, acc, second, &mut ahead),
                        2 | 3 => column_block::<2>(x, depth, lane, terms, &panel, acc, second, &mut ahead),
                        4..=7 => column_block::<4>(x, depth, lane, terms, &panel, acc, second, &mut ahead),
                        _ => column_block::<8>(x, depth, lane, terms, &panel, acc, second, &mut ahead),
                    };
                }
            }
        }
    }
    for (block, acc) in acc.chunks_exact_mut(LANES * rows).enumerate() {
        let columns = block * 32..width.min(block * 32 + 32);
        tree_of_columns(acc, rows, depth.div_ceil(STAGED) % 2 == 1, |a, b| {
            [_mm512_add_ps(a[0], b[0]), _mm512_add_ps(a[1], b[1])]
        });
        for (row, [sums, _]) in acc[..rows].iter().enumerate() {
            let mut values = [0f32; 32];
            // SAFETY: two registers are stored into two times sixteen elements.
            unsafe {
                _mm512_storeu_ps(values.as_mut_ptr(), sums[0]);
                _mm512_storeu_ps(values[16..].as_mut_ptr(), sums[1]);
            }
            out[row * width..][columns.clone()].copy_from_slice(&values[..columns.len()]);
        }
    }
}

/// The run of one lane for `R` activation rows, kept when it is the first and added with the first when it is the
/// second; returns `R`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn column_block<const R: usize>(
    x: &[f32],
    stride: usize,
    lane: usize,
    terms: usize,
    panel: &ColumnPanel,
    out: &mut [ColumnSums],
    second: bool,
    ahead: &mut Ahead,
) -> usize {
    assert!(x.len() >= (R - 1) * stride + terms && terms <= STAGED);
    let out = &mut out[..R];
    let mut acc = [[ZERO; 2]; R];
    for k in (lane..terms).step_by(LANES) {
        ahead.go(1);
        let w = panel[k];
        for r in 0..R {
            // SAFETY: the activation of row r and term k, inside the slice by the assertion above.
            let x = _mm512_set1_ps(unsafe { *x.as_ptr().add(r * stride + k) });
            acc[r] = [_mm512_fmadd_ps(x, w[0], acc[r][0]), _mm512_fmadd_ps(x, w[1], acc[r][1])];
        }
    }
    for r in 0..R {
        if second {
            let [sum, first] = out[r];
            let both = |half: usize| _mm512_add_ps(first[half], acc[r][half]);
            out[r][0] = [_mm512_add_ps(sum[0], both(0)), _mm512_add_ps(sum[1], both(1))];
        } else {
            out[r][1] = acc[r];
        }
    }
    R
}

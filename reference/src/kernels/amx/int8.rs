//! INT8 products on tiles, signed by signed, so that weights are read as they lie and nothing is taken off at the end. A tile
//! of weights is 16 outputs by 64 terms; one of activations is packed once, four terms of sixteen rows a line, and up to four
//! of them meet each tile of weights. The same terms of the next sixteen outputs are prefetched meanwhile: sixteen streams
//! keep memory busier than one.

use std::arch::asm;
use std::arch::x86_64::*;

use super::super::aligned::Aligned;
use super::super::avx2::prefetch;
use super::super::level::Block;
use super::{LINE, SIDE, SUMS, Shapes, lines_of, store_turned, transposed};

/// Terms of a tile.
const TERMS: usize = LINE;
/// Bytes of a tile of codes.
const TILE: usize = SIDE * LINE;
/// Tiles of activation rows that meet a tile of weights together.
const GROUP: usize = 4;

/// Whether these kernels take weights of this shape.
pub(super) fn fits(w: Block<'_, i8>) -> bool {
    w.width() >= TERMS && w.rows() >= SIDE
}

/// [`super::Kernels::i8_outputs`] of weights that [`fits`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn outputs(x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
    let (depth, outputs) = (w.width(), w.rows());
    assert!(fits(w));
    let (whole, rest) = (depth / TERMS, depth % TERMS);
    let groups: Vec<Packed> = x.chunks(GROUP * SIDE * depth).map(|x| Packed::new(x, depth)).collect();
    let mut sums = Aligned::<i32>::zeros(GROUP * SUMS);
    // The last terms of a tile of outputs, filled up with zeros.
    let mut last = Aligned::<i8>::zeros(TILE);
    let shapes = Shapes::load();
    ahead_of_first(w);
    for start in (0..outputs).step_by(SIDE) {
        // A tile that would reach past the last output ends there, and computes some once more.
        let first = start.min(outputs - SIDE);
        let weights = w.row(first).as_ptr();
        for (row, last) in last.chunks_exact_mut(TERMS).enumerate().take(if rest > 0 { SIDE } else { 0 }) {
            last[..rest].copy_from_slice(&w.row(first + row)[whole * TERMS..]);
        }
        for (index, (group, out)) in groups.iter().zip(out.chunks_mut(GROUP * SIDE * outputs)).enumerate() {
            let (x, x_last) = group.codes.split_at(whole * group.tiles * TILE);
            let sums = &mut sums[..group.tiles * SUMS];
            sums.fill(0);
            let ahead = (index == 0).then(|| weights.wrapping_offset(SIDE as isize * w.stride()));
            // SAFETY: 16 outputs of which `whole` steps of 64 terms can be read.
            unsafe { multiply(&shapes, weights, w.stride(), x, sums, ahead) };
            if rest > 0 {
                // SAFETY: a tile of 16 times 64 codes.
                unsafe { multiply(&shapes, last.as_ptr(), TERMS as isize, x_last, sums, None) };
            }
            for (sums, out) in sums.chunks_exact(SUMS).zip(out.chunks_mut(SIDE * outputs)) {
                store(sums, out, outputs, first);
            }
        }
    }
}

/// Up to four tiles of activation rows: by 64 terms, tile by tile, each by four terms, row by row. Missing rows and terms
/// are zeros.
struct Packed {
    tiles: usize,
    codes: Aligned<i8>,
}

impl Packed {
    #[target_feature(enable = "avx512f,avx512bw")]
    fn new(x: &[i8], depth: usize) -> Self {
        let tiles = (x.len() / depth).div_ceil(SIDE);
        let mut codes = Aligned::<i8>::zeros(tiles * depth.div_ceil(TERMS) * TILE);
        for (at, out) in (0..depth).step_by(TERMS).zip(codes.chunks_exact_mut(tiles * TILE)) {
            let mask = u64::MAX >> (TERMS - (depth - at).min(TERMS));
            for (x, out) in x.chunks(SIDE * depth).zip(out.chunks_exact_mut(TILE)) {
                let mut rows = [_mm512_setzero_si512(); SIDE];
                for (row, x) in rows.iter_mut().zip(x.chunks_exact(depth)) {
                    // SAFETY: the mask leaves only terms of the row.
                    *row = unsafe { _mm512_maskz_loadu_epi8(mask, x[at..].as_ptr()) };
                }
                for (line, out) in transposed(rows).into_iter().zip(out.chunks_exact_mut(TERMS)) {
                    // SAFETY: 64 bytes.
                    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), line) };
                }
            }
        }
        Self { tiles, codes }
    }
}

/// Stores a tile's sums, output by output, as `first..first + 16` of each row of `out`, `outputs` long.
#[target_feature(enable = "avx512f,avx512bw")]
fn store(sums: &[i32], out: &mut [i32], outputs: usize, first: usize) {
    store_turned(lines_of(sums), out, outputs, first);
}

/// Prefetches the weights of the first tile of outputs.
fn ahead_of_first(w: Block<'_, i8>) {
    for output in 0..SIDE {
        for line in w.row(output).chunks(64) {
            prefetch(line.as_ptr());
        }
    }
}

/// Asks for 64 terms of each of sixteen rows.
macro_rules! prefetches {
    () => {
        concat!(prefetches!("{ahead}"), prefetches!("{ahead4}"), prefetches!("{ahead8}"), prefetches!("{ahead12}"))
    };
    ($at:literal) => {
        concat!(
            "prefetcht1 [",
            $at,
            "]\n",
            "prefetcht1 [",
            $at,
            " + {stride}]\n",
            "prefetcht1 [",
            $at,
            " + 2 * {stride}]\n",
            "prefetcht1 [",
            $at,
            " + {stride3}]\n",
            "add ",
            $at,
            ", 64\n",
        )
    };
}

/// The loop over steps of 64 terms, with as many tiles of activations as are named.
macro_rules! multiply {
    ($($tile:literal)*; $ahead:expr; $($operands:tt)*) => {
        asm!(
            $(concat!("tileloadd tmm", $tile, ", [{sums} + {line} + 1024 * ", $tile, "]"),)*
            "2:",
            "tileloadd tmm7, [{w} + {stride}]",
            $(
                concat!("tileloadd tmm6, [{x} + {line} + 1024 * ", $tile, "]"),
                concat!("tdpbssd tmm", $tile, ", tmm7, tmm6"),
            )*
            $ahead,
            "add {x}, {step}",
            "add {w}, 64",
            "dec {steps}",
            "jnz 2b",
            $(concat!("tilestored [{sums} + {line} + 1024 * ", $tile, "], tmm", $tile),)*
            $($operands)*
            step = const 1024 * [$($tile),*].len(),
            line = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// Adds the products of a tile of outputs and up to four of activation rows to their sums, `[tiles][16 outputs][16
/// rows]`. `x` is packed and says how many steps of 64 terms there are, at least one. The same terms of the sixteen rows
/// from `ahead` on are prefetched.
///
/// # Safety
/// 16 rows of weights, `stride` bytes apart, must be readable for all terms.
unsafe fn multiply(
    _shapes: &Shapes,
    weights: *const i8,
    stride: isize,
    x: &[i8],
    sums: &mut [i32],
    ahead: Option<*const i8>,
) {
    let tiles = sums.len() / SUMS;
    let steps = x.len() / (tiles * TILE);
    assert!(steps > 0 && (1..=GROUP).contains(&tiles));
    let (x, sums) = (x.as_ptr(), sums.as_mut_ptr());
    macro_rules! with {
        ($($tile:literal)*) => {
            match ahead {
                // SAFETY: as the caller promises; activations and sums are inside their slices by the assertion;
                // prefetching never faults.
                Some(ahead) => unsafe {
                    multiply!($($tile)*; prefetches!();
                        w = inout(reg) weights => _, x = inout(reg) x => _, steps = inout(reg) steps => _,
                        ahead = inout(reg) ahead => _, ahead4 = inout(reg) ahead.wrapping_offset(4 * stride) => _,
                        ahead8 = inout(reg) ahead.wrapping_offset(8 * stride) => _,
                        ahead12 = inout(reg) ahead.wrapping_offset(12 * stride) => _,
                        stride = in(reg) stride, stride3 = in(reg) 3 * stride, sums = in(reg) sums,
                    );
                },
                // SAFETY: as above.
                None => unsafe {
                    multiply!($($tile)*; "";
                        w = inout(reg) weights => _, x = inout(reg) x => _, steps = inout(reg) steps => _,
                        stride = in(reg) stride, sums = in(reg) sums,
                    );
                },
            }
        };
    }
    match tiles {
        1 => with!(0),
        2 => with!(0 1),
        3 => with!(0 1 2),
        _ => with!(0 1 2 3),
    }
}

/// [`super::Kernels::i8_burst`].
pub(super) fn burst(steps: u64) -> u64 {
    let _shapes = Shapes::load();
    for _ in 0..steps {
        // SAFETY: registers only.
        unsafe {
            asm!(
                "tdpbssd tmm0, tmm4, tmm5",
                "tdpbssd tmm1, tmm4, tmm5",
                "tdpbssd tmm2, tmm4, tmm5",
                "tdpbssd tmm3, tmm4, tmm5",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, nomem, preserves_flags),
            );
        }
    }
    steps * (GROUP * SUMS * TERMS) as u64
}

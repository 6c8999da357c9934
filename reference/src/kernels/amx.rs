//! The AMX level: INT8 products on the CPU's tiles, signed by signed, so that weights are read as they lie and nothing is
//! taken off at the end. A tile of weights is 16 outputs by 64 terms; one of activations is packed once, four terms of
//! sixteen rows a line. Four tiles of outputs share it, and what comes next is prefetched meanwhile in one run, which is
//! what memory is fast at. All other operations, and products of few rows, are those of [`Avx512`].

use std::arch::asm;
use std::arch::x86_64::*;
use std::array::from_fn;

use half::bf16;

use super::aligned::Aligned;
use super::avx2::prefetch;
use super::avx512::Avx512;
use super::level::{Block, Kernels};

/// AMX with INT8, above AVX-512 with VNNI.
#[derive(Clone, Copy, Debug)]
pub struct Amx(Avx512);

impl Amx {
    /// The level, where the CPU has it and the system lets this process use it.
    #[must_use]
    pub fn new() -> Option<Self> {
        let avx512 = Avx512::new()?;
        (has_tiles() && may_use_tiles()).then_some(Self(avx512))
    }
}

/// Whether the CPU has tiles and multiplies INT8 in them.
fn has_tiles() -> bool {
    const TILE: u32 = 1 << 24;
    const INT8: u32 = 1 << 25;
    // Not an unsafe function in every release of the standard library.
    #[allow(unused_unsafe)]
    // SAFETY: a CPU with AVX-512 has this leaf.
    let features = unsafe { __cpuid_count(7, 0) };
    features.edx & TILE != 0 && features.edx & INT8 != 0
}

/// Asks the system for tiles, which a process has to once; threads started before and after have them too.
fn may_use_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the request takes a number and touches no memory of this process. It fails where the system knows no tiles.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

impl Kernels for Amx {
    fn name(&self) -> &'static str {
        "amx"
    }

    fn needs(&self) -> &'static str {
        "AMX INT8, and AVX-512 F, BW, DQ, VL and VNNI"
    }

    fn i8_outputs(&self, x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
        if x.len() <= FEW_ROWS * w.width() || w.width() < TERMS || w.rows() < SIDE {
            return self.0.i8_outputs(x, w, out);
        }
        // SAFETY: a value of this type exists only where the CPU has AVX-512.
        unsafe { i8_outputs(x, w, out) }
    }

    fn i8_columns(&self, x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
        self.0.i8_columns(x, w, out);
    }

    fn bf16_outputs(&self, x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) {
        self.0.bf16_outputs(x, w, out);
    }

    fn bf16_columns(&self, x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) {
        self.0.bf16_columns(x, w, out);
    }

    fn scaled_outputs(&self, x: &[f32], w: Block<'_, i8>, scale: &[f32], out: &mut [f32]) {
        self.0.scaled_outputs(x, w, scale, out);
    }

    fn scores(&self, q: &[f32], keys: &[&[bf16]], out: &mut [f32]) {
        self.0.scores(q, keys, out);
    }

    fn weighted(&self, p: &[f32], values: &[&[bf16]], out: &mut [f32]) {
        self.0.weighted(p, values, out);
    }

    fn i8_burst(&self, steps: u64) -> u64 {
        i8_burst(steps)
    }

    fn f32_burst(&self, steps: u64) -> u64 {
        self.0.f32_burst(steps)
    }
}

/// Outputs, or activation rows, of a tile.
const SIDE: usize = 16;
/// Terms of a tile.
const TERMS: usize = 64;
/// Bytes of a tile of codes.
const TILE: usize = SIDE * TERMS;
/// Sums of a tile.
const SUMS: usize = SIDE * SIDE;
/// Activation rows that leave tiles too empty to pay.
const FEW_ROWS: usize = 4;
/// Tiles of outputs that are computed together.
const GROUP: usize = 4;
/// Steps of 64 terms after which the next activation rows meet the same weights, which are in the first cache level then.
const STEPS: usize = 8;

/// The shapes of all tiles, on the thread that holds this: 16 rows of 64 bytes.
struct Shapes(());

impl Shapes {
    fn load() -> Self {
        #[repr(C, align(64))]
        struct Config {
            palette: u8,
            start_row: u8,
            reserved: [u8; 14],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        // Of sixteen places eight are tiles.
        config.row_bytes[..8].fill(TERMS as u16);
        config.rows[..8].fill(SIDE as u8);
        // SAFETY: a valid configuration of 64 bytes; tiles are used by nothing but this module.
        unsafe {
            asm!(
                "ldtilecfg [{config}]", config = in(reg) &raw const config,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags, readonly),
            );
        }
        Self(())
    }
}

impl Drop for Shapes {
    fn drop(&mut self) {
        // SAFETY: gives back what `load` took.
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags, nomem),
            );
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn i8_outputs(x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
    let (depth, outputs) = (w.width(), w.rows());
    assert!(depth >= TERMS && outputs >= SIDE);
    let (whole, rest) = (depth / TERMS, depth % TERMS);
    let bytes = depth.div_ceil(TERMS) * TILE;
    let x = packed(x, depth, bytes);
    let mut sums = Aligned::<i32>::zeros(x.len() / bytes * GROUP * SUMS);
    // The last terms of a group of outputs, filled up with zeros.
    let mut last = Aligned::<i8>::zeros(if rest > 0 { GROUP * TILE } else { 0 });
    let shapes = Shapes::load();
    ahead_of_first(w);
    for start in (0..outputs).step_by(GROUP * SIDE) {
        // A tile that would reach past the last output ends there, and computes some once more.
        let tiles: [usize; GROUP] = from_fn(|t| (start + t * SIDE).min(outputs - SIDE));
        let weights = tiles.map(|first| w.row(first).as_ptr());
        let next = start + GROUP * SIDE;
        let next = w.row(if next < outputs { next } else { start }).as_ptr();
        sums.fill(0);
        for at in (0..whole).step_by(STEPS) {
            let steps = STEPS.min(whole - at);
            let weights = weights.map(|w| w.wrapping_add(at * TERMS));
            for (index, (x, sums)) in x.chunks_exact(bytes).zip(sums.chunks_exact_mut(GROUP * SUMS)).enumerate() {
                let ahead = (index == 0).then(|| next.wrapping_add(at * GROUP * TILE));
                // SAFETY: each tile is 16 outputs of which `whole` steps of 64 terms can be read.
                unsafe { multiply(&shapes, weights, w.stride(), &x[at * TILE..][..steps * TILE], sums, ahead) };
            }
        }
        if rest > 0 {
            for (last, first) in last.chunks_exact_mut(TILE).zip(tiles) {
                for (row, last) in last.chunks_exact_mut(TERMS).enumerate() {
                    last[..rest].copy_from_slice(&w.row(first + row)[whole * TERMS..]);
                }
            }
            let weights = from_fn(|t| last[t * TILE..][..TILE].as_ptr());
            for (x, sums) in x.chunks_exact(bytes).zip(sums.chunks_exact_mut(GROUP * SUMS)) {
                // SAFETY: four tiles of 16 times 64 codes.
                unsafe { multiply(&shapes, weights, TERMS as isize, &x[whole * TILE..], sums, None) };
            }
        }
        for (sums, out) in sums.chunks_exact(GROUP * SUMS).zip(out.chunks_mut(SIDE * outputs)) {
            for (sums, first) in sums.chunks_exact(SUMS).zip(tiles) {
                store(sums, out, outputs, first);
            }
        }
    }
}

/// Activation rows in tiles of sixteen, each `bytes` long: by 64 terms, by four terms, row by row. Missing rows and terms
/// are zeros.
#[target_feature(enable = "avx512f,avx512bw")]
fn packed(x: &[i8], depth: usize, bytes: usize) -> Aligned<i8> {
    let mut out = Aligned::<i8>::zeros((x.len() / depth).div_ceil(SIDE) * bytes);
    for (x, out) in x.chunks(SIDE * depth).zip(out.chunks_exact_mut(bytes)) {
        for (at, out) in (0..depth).step_by(TERMS).zip(out.chunks_exact_mut(TILE)) {
            let mask = u64::MAX >> (TERMS - (depth - at).min(TERMS));
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
    out
}

/// Stores a tile's sums, output by output, as `first..first + 16` of each row of `out`, `outputs` long.
#[target_feature(enable = "avx512f,avx512bw")]
fn store(sums: &[i32], out: &mut [i32], outputs: usize, first: usize) {
    let mut lines = [_mm512_setzero_si512(); SIDE];
    for (line, sums) in lines.iter_mut().zip(sums.chunks_exact(SIDE)) {
        // SAFETY: sixteen sums.
        *line = unsafe { _mm512_loadu_si512(sums.as_ptr().cast()) };
    }
    for (row, out) in transposed(lines).into_iter().zip(out.chunks_exact_mut(outputs)) {
        // SAFETY: sixteen sums.
        unsafe { _mm512_storeu_si512(out[first..first + SIDE].as_mut_ptr().cast(), row) };
    }
}

/// Sixteen by sixteen elements of four bytes, columns for rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn transposed(rows: [__m512i; SIDE]) -> [__m512i; SIDE] {
    let zero = [_mm512_setzero_si512(); SIDE];
    // Within quarters of a register: pairs of rows, then fours.
    let (mut pairs, mut fours, mut eights, mut all) = (zero, zero, zero, zero);
    for i in (0..SIDE).step_by(2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for i in (0..SIDE).step_by(4) {
        for j in 0..2 {
            fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + 2 + j]);
            fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + 2 + j]);
        }
    }
    // Quarters: those of even and of odd number, then all.
    for i in (0..SIDE).step_by(8) {
        for j in 0..4 {
            eights[i + j] = _mm512_shuffle_i32x4::<0b10_00_10_00>(fours[i + j], fours[i + 4 + j]);
            eights[i + 4 + j] = _mm512_shuffle_i32x4::<0b11_01_11_01>(fours[i + j], fours[i + 4 + j]);
        }
    }
    for j in 0..4 {
        all[j] = _mm512_shuffle_i32x4::<0b10_00_10_00>(eights[j], eights[8 + j]);
        all[4 + j] = _mm512_shuffle_i32x4::<0b10_00_10_00>(eights[4 + j], eights[12 + j]);
        all[8 + j] = _mm512_shuffle_i32x4::<0b11_01_11_01>(eights[j], eights[8 + j]);
        all[12 + j] = _mm512_shuffle_i32x4::<0b11_01_11_01>(eights[4 + j], eights[12 + j]);
    }
    all
}

/// Prefetches the weights of the first group of outputs.
fn ahead_of_first(w: Block<'_, i8>) {
    for output in 0..w.rows().min(GROUP * SIDE) {
        for line in w.row(output).chunks(64) {
            prefetch(line.as_ptr());
        }
    }
}

/// Asks for the next 1024 bytes.
macro_rules! prefetches {
    () => { prefetches!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15) };
    ($($line:literal)*) => { concat!($("prefetcht1 [{ahead} + 64 * ", $line, "]\n",)* "add {ahead}, 1024") };
}

/// The loop over steps of 64 terms; `$ahead` follows each of the four products of a step.
macro_rules! multiply {
    ($ahead:expr; $($operands:tt)*) => {
        asm!(
            "tileloadd tmm0, [{sums} + {line}]",
            "tileloadd tmm1, [{sums} + {line} + 1024]",
            "tileloadd tmm2, [{sums} + {line} + 2048]",
            "tileloadd tmm3, [{sums} + {line} + 3072]",
            "2:",
            "tileloadd tmm4, [{x} + {line}]",
            "tileloadd tmm5, [{a} + {stride}]",
            "tdpbssd tmm0, tmm5, tmm4",
            $ahead,
            "tileloadd tmm6, [{b} + {stride}]",
            "tdpbssd tmm1, tmm6, tmm4",
            $ahead,
            "tileloadd tmm7, [{c} + {stride}]",
            "tdpbssd tmm2, tmm7, tmm4",
            $ahead,
            "tileloadd tmm5, [{d} + {stride}]",
            "tdpbssd tmm3, tmm5, tmm4",
            $ahead,
            "add {x}, 1024",
            "add {a}, 64",
            "add {b}, 64",
            "add {c}, 64",
            "add {d}, 64",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{sums} + {line}], tmm0",
            "tilestored [{sums} + {line} + 1024], tmm1",
            "tilestored [{sums} + {line} + 2048], tmm2",
            "tilestored [{sums} + {line} + 3072], tmm3",
            $($operands)*
            line = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// Adds the products of four tiles of outputs and one of activation rows to their sums, `[4][16 outputs][16 rows]`. `x`
/// is packed and says how many steps of 64 terms there are, at least one. As many bytes as the weights have are
/// prefetched from `ahead` on.
///
/// # Safety
/// In each tile, 16 rows of weights, `stride` bytes apart, must be readable for all terms.
unsafe fn multiply(
    _shapes: &Shapes,
    weights: [*const i8; GROUP],
    stride: isize,
    x: &[i8],
    sums: &mut [i32],
    ahead: Option<*const i8>,
) {
    let steps = x.len() / TILE;
    assert!(steps > 0 && sums.len() == GROUP * SUMS);
    let [a, b, c, d] = weights;
    let (x, sums) = (x.as_ptr(), sums.as_mut_ptr());
    match ahead {
        // SAFETY: as the caller promises; activations and sums are inside their slices by the assertion; prefetching
        // never faults.
        Some(ahead) => unsafe {
            multiply!(prefetches!();
                a = inout(reg) a => _, b = inout(reg) b => _, c = inout(reg) c => _, d = inout(reg) d => _,
                x = inout(reg) x => _, steps = inout(reg) steps => _, ahead = inout(reg) ahead => _,
                stride = in(reg) stride, sums = in(reg) sums,
            );
        },
        // SAFETY: as above.
        None => unsafe {
            multiply!("";
                a = inout(reg) a => _, b = inout(reg) b => _, c = inout(reg) c => _, d = inout(reg) d => _,
                x = inout(reg) x => _, steps = inout(reg) steps => _,
                stride = in(reg) stride, sums = in(reg) sums,
            );
        },
    }
}

fn i8_burst(steps: u64) -> u64 {
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

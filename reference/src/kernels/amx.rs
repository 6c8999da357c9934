//! The AMX level: INT8 products ([`int8`]) and BF16 ones ([`runs`], from INT8 and scale in [`scaled`], term by term in
//! [`columns`]) on the CPU's tiles. All other operations are those of [`Vbmi`].

use std::arch::asm;
use std::arch::x86_64::*;

use bytemuck::Pod;
use half::bf16;

use super::level::{Block, Kernels, inherited};
use super::vbmi::Vbmi;

mod columns;
mod int8;
mod runs;
mod scaled;

/// AMX with INT8 and BF16, above AVX-512 with VNNI and VBMI.
#[derive(Clone, Copy, Debug)]
pub struct Amx(Vbmi);

impl Amx {
    /// The level, where the CPU has it and the system lets this process use it.
    #[must_use]
    pub fn new() -> Option<Self> {
        let vbmi = Vbmi::new()?;
        (has_tiles() && may_use_tiles()).then_some(Self(vbmi))
    }
}

/// Whether the CPU has tiles and multiplies INT8 and BF16 in them.
fn has_tiles() -> bool {
    const TILE: u32 = 1 << 24;
    const INT8: u32 = 1 << 25;
    const BF16: u32 = 1 << 22;
    // Not an unsafe function in every release of the standard library.
    #[allow(unused_unsafe)]
    // SAFETY: a CPU with AVX-512 has this leaf.
    let features = unsafe { __cpuid_count(7, 0) };
    [TILE, INT8, BF16].iter().all(|feature| features.edx & feature != 0)
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
        "AMX INT8 and BF16, and AVX-512 F, BW, DQ, VL, VNNI and VBMI"
    }

    fn i8_outputs(&self, x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
        if !int8::fits(w) {
            return self.0.i8_outputs(x, w, out);
        }
        // SAFETY: a value of this type exists only where the CPU has these instructions.
        unsafe { int8::outputs(x, w, out) }
    }

    fn bf16_columns(&self, x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) {
        let pays = x.len() > FEW * w.rows() && columns::fits(w);
        // SAFETY: as above.
        if !pays || !unsafe { columns::columns(x, w, out) } {
            self.0.bf16_columns(x, w, out);
        }
    }

    fn scaled_outputs(&self, x: &[f32], w: Block<'_, i8>, scale: &[f32], out: &mut [f32]) {
        let pays = x.len() > FEW * w.width() && scaled::fits(w);
        // SAFETY: as above.
        if !pays || !unsafe { scaled::outputs(x, w, scale, out) } {
            self.0.scaled_outputs(x, w, scale, out);
        }
    }

    fn i8_burst(&self, steps: u64) -> u64 {
        int8::burst(steps)
    }

    inherited!(i8_columns bf16_outputs scores weighted f32_burst);
}

/// Activation rows of BF16 products for which tiles do not pay.
const FEW: usize = 2;
/// Lines of a tile.
const SIDE: usize = 16;
/// Bytes of a line.
const LINE: usize = 64;
/// Sums of a tile.
const SUMS: usize = SIDE * SIDE;

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
        config.row_bytes[..8].fill(LINE as u16);
        config.rows[..8].fill(SIDE as u8);
        // SAFETY: a valid configuration of 64 bytes; tiles are used by nothing but these modules.
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

/// The lines of a tile in memory.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn lines_of<T: Pod>(tile: &[T]) -> [__m512i; SIDE] {
    assert!(size_of_val(tile) == SIDE * LINE);
    // SAFETY: sixteen lines, by the assertion.
    std::array::from_fn(|line| unsafe { _mm512_loadu_si512(tile.as_ptr().byte_add(line * LINE).cast()) })
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

/// Stores sixteen outputs' sums of sixteen rows as `first..first + 16` of each row of `out`, `outputs` long.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn store_turned<T: Pod>(lines: [__m512i; SIDE], out: &mut [T], outputs: usize, first: usize) {
    const { assert!(size_of::<T>() * SIDE == LINE) };
    for (row, out) in transposed(lines).into_iter().zip(out.chunks_exact_mut(outputs)) {
        // SAFETY: sixteen sums.
        unsafe { _mm512_storeu_si512(out[first..first + SIDE].as_mut_ptr().cast(), row) };
    }
}

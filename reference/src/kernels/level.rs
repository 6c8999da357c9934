//! The levels: one trait for the inner loops of the reference, implemented plainly ([`Plain`], the
//! specification) and once for each instruction set that pays. A level's constructor returns `None` where
//! the CPU lacks what it needs; detection happens once. Every level gives the bits of the plain one.

use std::fmt;
use std::sync::OnceLock;

use half::bf16;
use ndarray::{ArrayView2, Axis, s};
use thiserror::Error;

use super::plain::Plain;
use super::upcoming::Upcoming;

/// A matrix whose rows are each contiguous: what the inner loops read weights from.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a, T>(ArrayView2<'a, T>);

impl<'a, T> Block<'a, T> {
    /// `view` as a block. `None` where the elements of a row do not lie side by side.
    #[must_use]
    pub fn new(view: ArrayView2<'a, T>) -> Option<Self> {
        (view.is_empty() || view.ncols() == 1 || view.strides()[1] == 1).then_some(Self(view))
    }

    /// Rows.
    #[must_use]
    #[inline(always)]
    pub fn rows(&self) -> usize {
        self.0.nrows()
    }

    /// Elements of a row.
    #[must_use]
    #[inline(always)]
    pub fn width(&self) -> usize {
        self.0.ncols()
    }

    /// Row `index`.
    ///
    /// # Panics
    /// If `index` is not below [`Block::rows`].
    #[must_use]
    #[inline(always)]
    pub fn row(&self, index: usize) -> &'a [T] {
        self.0.index_axis_move(Axis(0), index).to_slice().unwrap_or_default()
    }

    /// The first element of the first row; row `r` begins `r * stride()` elements further.
    #[must_use]
    #[inline(always)]
    pub fn as_ptr(&self) -> *const T {
        self.0.as_ptr()
    }

    /// Elements from one row to the next.
    #[must_use]
    #[inline(always)]
    pub fn stride(&self) -> isize {
        self.0.strides()[0]
    }

    /// `count` rows from `start` on.
    ///
    /// # Panics
    /// If the block has fewer.
    #[must_use]
    pub fn some_rows(&self, start: usize, count: usize) -> Self {
        Self(self.0.slice_move(s![start..start + count, ..]))
    }

    /// `count` columns from `start` on.
    ///
    /// # Panics
    /// If the block has fewer.
    #[must_use]
    pub fn some_columns(&self, start: usize, count: usize) -> Self {
        Self(self.0.slice_move(s![.., start..start + count]))
    }
}

/// The inner loops, each on one thread. Activations `x` are `[rows, K]`, at least one row, row-major without gaps;
/// results are `[rows, N]`, row-major without gaps, and are overwritten. FP32 sums run in the canonical order
/// ([`super::SumOrder::Canonical`]): a run of lane `k % 8` takes `fma(x[k], w[k], run)`. The fused step rounds once because the
/// product of two BF16 values is exact. A lane begins at +0 and so never becomes -0, whatever its runs are: a canonical sum
/// may be filled up with products of zeros.
pub trait Kernels: Send + Sync + fmt::Debug {
    /// The name that `doctor` prints and `--kernels` takes.
    fn name(&self) -> &'static str;

    /// What the level needs of the CPU.
    fn needs(&self) -> &'static str;

    /// INT8 by INT8 with exact INT32 sums, weights as checkpoints store them: `w` is `[N, K]`. `x` holds no -128.
    fn i8_outputs(&self, x: &[i8], w: Block<'_, i8>, out: &mut [i32]);

    /// INT8 by INT8 with exact INT32 sums, weights as the device's kernels store them: `w` is `[K, N]`.
    fn i8_columns(&self, x: &[i8], w: Block<'_, i8>, out: &mut [i32]);

    /// BF16 weights `[N, K]`; `x` holds widened BF16 values.
    fn bf16_outputs(&self, x: &[f32], w: Block<'_, bf16>, out: &mut [f32]);

    /// BF16 weights `[K, N]`; `x` holds widened BF16 values.
    fn bf16_columns(&self, x: &[f32], w: Block<'_, bf16>, out: &mut [f32]);

    /// BF16 weights made on the way from INT8 codes `[N, K]` and one scale an output:
    /// `BF16_RNE(f32(code) * scale[n])` (`docs/numerics.md`, Tensors, `w_down`).
    fn scaled_outputs(&self, x: &[f32], w: Block<'_, i8>, scale: &[f32], out: &mut [f32]);

    /// `q . k` of every query and key of attention: `q` is `[G, D]`, `keys` are `T` rows of `D`; `out` is `[G, T]`,
    /// canonical order over `D`, not scaled. Prefetches meanwhile, three rows for four keys.
    fn scores(&self, q: &[f32], keys: &[&[bf16]], upcoming: &mut Upcoming<'_>, out: &mut [f32]);

    /// `o = o*a + (p @ v)*c` of attention tiles in turn; `o` is `out`, `[G, D]`. The tokens of a tile are added in order into
    /// one accumulator that starts at +0. Prefetches meanwhile, three rows for four values.
    fn weighted(&self, values: Weighted<'_>, upcoming: &mut Upcoming<'_>, out: &mut [f32]);

    /// Repeats the best INT8 multiply-add sequence this level has, on registers, `steps` times; returns how many
    /// multiply-adds that were. What a benchmark takes for the arithmetic's own limit.
    fn i8_burst(&self, steps: u64) -> u64;

    /// The same for FP32 fused multiply-adds.
    fn f32_burst(&self, steps: u64) -> u64;
}

/// Values of attention and what they are weighted with.
#[derive(Clone, Copy, Debug)]
pub struct Weighted<'a> {
    /// Weights `p`, `[G, T]`.
    pub p: &'a [f32],
    /// `a` and `c` of each tile, `[tiles, G]`.
    pub factors: &'a [[f32; 2]],
    /// `T` rows of `D`.
    pub values: &'a [&'a [bf16]],
    /// Tokens of a tile; the last has what is left.
    pub tile: usize,
}

impl<'a> Weighted<'a> {
    /// Length of a value.
    pub(super) fn dim(&self) -> usize {
        self.values.first().map_or(0, |value| value.len())
    }

    /// Calls `add` with each tile, up to `count` rows of weights of it and their part of `out` at a time. The turn of the first
    /// rows is the time to prefetch.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn by_rows(
        self,
        count: usize,
        upcoming: &mut Upcoming<'_>,
        out: &mut [f32],
        mut add: impl FnMut(ValueTile<'a>, &mut Upcoming<'_>, &mut [f32]),
    ) {
        let dim = self.dim().max(1);
        for tile in self.tiles() {
            let rows = tile.p.chunks(count * tile.stride).zip(tile.factors.chunks(count));
            for (index, ((p, factors), out)) in rows.zip(out.chunks_mut(count * dim)).enumerate() {
                let upcoming = if index == 0 { &mut *upcoming } else { &mut Upcoming::none() };
                add(ValueTile { p, factors, ..tile }, upcoming, out);
            }
        }
    }

    /// The tiles in turn.
    pub(super) fn tiles(self) -> impl Iterator<Item = ValueTile<'a>> {
        let Self { p, factors, values, tile } = self;
        let stride = values.len();
        let group = p.len() / stride.max(1);
        let tiles = values.chunks(tile).zip(factors.chunks_exact(group.max(1)));
        tiles.enumerate().map(move |(i, (values, factors))| ValueTile { p: &p[i * tile..], stride, factors, values })
    }
}

/// A tile of [`Weighted`].
#[derive(Clone, Copy)]
pub(super) struct ValueTile<'a> {
    /// From the weight of the first row and the tile's first token on.
    pub(super) p: &'a [f32],
    /// From a row's weights to those of the next.
    pub(super) stride: usize,
    /// Of each row.
    pub(super) factors: &'a [[f32; 2]],
    /// At least one.
    pub(super) values: &'a [&'a [bf16]],
}

/// Methods of [`Kernels`] as they are in the level that a level builds on, its field `0`.
#[cfg(target_arch = "x86_64")]
macro_rules! inherited {
    (@ i8_outputs) => {
        fn i8_outputs(&self, x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
            self.0.i8_outputs(x, w, out);
        }
    };
    (@ i8_columns) => {
        fn i8_columns(&self, x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
            self.0.i8_columns(x, w, out);
        }
    };
    (@ bf16_outputs) => {
        fn bf16_outputs(&self, x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) {
            self.0.bf16_outputs(x, w, out);
        }
    };
    (@ bf16_columns) => {
        fn bf16_columns(&self, x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) {
            self.0.bf16_columns(x, w, out);
        }
    };
    (@ scaled_outputs) => {
        fn scaled_outputs(&self, x: &[f32], w: Block<'_, i8>, scale: &[f32], out: &mut [f32]) {
            self.0.scaled_outputs(x, w, scale, out);
        }
    };
    (@ scores) => {
        fn scores(&self, q: &[f32], keys: &[&[bf16]], upcoming: &mut crate::kernels::Upcoming<'_>, out: &mut [f32]) {
            self.0.scores(q, keys, upcoming, out);
        }
    };
    (@ weighted) => {
        fn weighted(
            &self,
            values: crate::kernels::Weighted<'_>,
            upcoming: &mut crate::kernels::Upcoming<'_>,
            out: &mut [f32],
        ) {
            self.0.weighted(values, upcoming, out);
        }
    };
    (@ i8_burst) => {
        fn i8_burst(&self, steps: u64) -> u64 {
            self.0.i8_burst(steps)
        }
    };
    (@ f32_burst) => {
        fn f32_burst(&self, steps: u64) -> u64 {
            self.0.f32_burst(steps)
        }
    };
    ($($method:ident)*) => { $(inherited!(@ $method);)* };
}
#[cfg(target_arch = "x86_64")]
pub(super) use inherited;

/// Every level this CPU has, the plain one first, the fastest last.
#[must_use]
pub fn levels() -> &'static [Box<dyn Kernels>] {
    static LEVELS: OnceLock<Vec<Box<dyn Kernels>>> = OnceLock::new();
    LEVELS.get_or_init(|| {
        let mut levels: Vec<Box<dyn Kernels>> = vec![Box::new(Plain)];
        #[cfg(target_arch = "x86_64")]
        if let Some(level) = super::avx2::Avx2::new() {
            levels.push(Box::new(level));
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(level) = super::avx512::Avx512::new() {
            levels.push(Box::new(level));
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(level) = super::vbmi::Vbmi::new() {
            levels.push(Box::new(level));
        }
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if let Some(level) = super::amx::Amx::new() {
            levels.push(Box::new(level));
        }
        #[cfg(target_arch = "aarch64")]
        {
            use super::neon;
            levels.extend(neon::baseline().map(|level| Box::new(level) as Box<dyn Kernels>));
            levels.extend(neon::dot_products().map(|level| Box::new(level) as Box<dyn Kernels>));
        }
        levels
    })
}

/// The name chosen with [`choose`].
static CHOSEN: OnceLock<&'static dyn Kernels> = OnceLock::new();

/// The level in use: the one that was chosen, otherwise the fastest.
#[must_use]
pub fn kernels() -> &'static dyn Kernels {
    *CHOSEN.get_or_init(|| levels().last().map_or(&Plain as &dyn Kernels, AsRef::as_ref))
}

/// Why a level cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum LevelError {
    /// No such level here.
    #[error("no kernels named {name:?} on this CPU; it has {available}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// What there is.
        available: String,
    },
    /// Something was already computed with another level.
    #[error("kernels {0} are already in use")]
    InUse(&'static str),
}

/// Makes every later product use the level called `name`. For comparing levels: results never depend on it.
///
/// # Errors
/// A name that [`levels`] does not hold; a level that is already in use.
pub fn choose(name: &str) -> Result<(), LevelError> {
    let Some(level) = levels().iter().find(|level| level.name() == name) else {
        let available = levels().iter().map(|level| level.name()).collect::<Vec<_>>().join(", ");
        return Err(LevelError::Unknown { name: name.to_owned(), available });
    };
    let used = *CHOSEN.get_or_init(|| level.as_ref());
    if used.name() == level.name() { Ok(()) } else { Err(LevelError::InUse(used.name())) }
}

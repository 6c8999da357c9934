//! What the machine can do, with all threads: stream memory, multiply and add. Of several passes in a row the fastest
//! counts: whatever disturbs a pass makes it slower, never faster. Of such measurements beside those of a line the median
//! counts, as it does of the line's, each the fastest of as many calls in a row: what changes slowly changes both.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytemuck::pod_align_to;
use pulp::Arch;
use rayon::prelude::*;
use reference::kernels::{Kernels, kernels, levels};
use serde::Serialize;

use super::median;
use crate::refusal::Refusal;

/// Rates of the machine, all threads together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Floors {
    /// Streaming reads, 1e9 bytes a second.
    pub read_gb_s: f64,
    /// INT8 multiply-adds with INT32 sums, 1e9 a second.
    pub int8_gmac_s: f64,
    /// FP32 fused multiply-adds, 1e9 a second.
    pub fp32_gmac_s: f64,
}

impl Floors {
    /// The median of several measurements, rate by rate.
    fn typical(measured: &[Self]) -> Self {
        let rate = |of: fn(&Self) -> f64| median(&measured.iter().map(of).collect::<Vec<_>>());
        Self {
            read_gb_s: rate(|floors| floors.read_gb_s),
            int8_gmac_s: rate(|floors| floors.int8_gmac_s),
            fp32_gmac_s: rate(|floors| floors.fp32_gmac_s),
        }
    }

    /// The better of the two, rate by rate.
    pub fn best(self, other: Self) -> Self {
        Self {
            read_gb_s: self.read_gb_s.max(other.read_gb_s),
            int8_gmac_s: self.int8_gmac_s.max(other.int8_gmac_s),
            fp32_gmac_s: self.fp32_gmac_s.max(other.fp32_gmac_s),
        }
    }
}

/// Words of the buffer that is streamed: 1 GiB, beyond any cache that a floor of memory should not come from.
pub const WORDS: usize = (1 << 30) / size_of::<u64>();
/// Passes over the buffer, bursts, and calls of a line in a row, of which the best counts.
const PASSES: usize = 3;
/// Words a thread takes at a time: long enough to stream, short enough for threads to share out a pass evenly.
const CHUNK: usize = 1 << 18;
/// Streams that a thread reads side by side. One alone leaves up to a third of the bandwidth unused, because a core
/// fetches ahead a stream at a time.
const STREAMS: usize = 4;
/// Measurements of a line; odd, so that the median is one of them.
const RUNS: usize = 7;
/// Measurements where a call takes longer than [`SLOW`], so that a line stays under a minute; odd too.
const SLOW_RUNS: usize = 3;
/// See [`SLOW_RUNS`].
const SLOW: Duration = Duration::from_secs(1);
/// How long a burst of arithmetic is, at least: beyond the time that threads take to wake.
const BURST: Duration = Duration::from_millis(15);

/// Measures floors again and again, and remembers the best of the run.
pub struct Gauge {
    buffer: Arc<Vec<u64>>,
    int8: Burst,
    fp32: Burst,
    best: Floors,
}

/// An empty vector with room for `len` elements.
///
/// # Errors
/// There is no memory for them.
pub fn room<T>(len: usize) -> Result<Vec<T>, Refusal> {
    let mut room = Vec::new();
    room.try_reserve_exact(len).map_err(|_| {
        let mib = len.saturating_mul(size_of::<T>()).div_ceil(1 << 20);
        let limit = "free some, or raise the limit that is set for this process (`ulimit -v`)";
        Refusal::Request(format!("measuring needs a buffer of {mib} MiB, and there is no memory for it; {limit}"))
    })?;
    Ok(room)
}

/// A burst of arithmetic: whose, and how many steps of it.
struct Burst {
    run: Box<dyn Fn(u64) -> u64 + Sync>,
    steps: u64,
}

impl Gauge {
    /// Fills the buffer, so that every page of it is there, and finds which level's arithmetic is the fastest.
    ///
    /// # Errors
    /// There is no memory for the buffer.
    pub fn new() -> Result<Self, Refusal> {
        let mut buffer = room(WORDS)?;
        buffer.resize(WORDS, 0);
        // Any values do, as long as they are written; these make BF16 pairs that are finite.
        buffer
            .par_iter_mut()
            .enumerate()
            .for_each(|(index, word)| *word = 0x3f80_3f00_bf40_3fa0 ^ (index as u64 & 0x3f));
        let int8 = Burst::fastest(|level| Box::new(|steps| level.i8_burst(steps)));
        let fp32 = Burst::fastest(|level| Box::new(|steps| level.f32_burst(steps)));
        Ok(Self { buffer: Arc::new(buffer), int8, fp32, best: Floors::default() })
    }

    /// The floors at this moment.
    pub fn measure(&mut self) -> Floors {
        let read = (0..PASSES).map(|_| read_rate(&[&self.buffer])).fold(0.0, f64::max);
        let rate = |burst: &Burst| (0..PASSES).map(|_| burst.rate()).fold(0.0, f64::max);
        let now = Floors { read_gb_s: read, int8_gmac_s: rate(&self.int8), fp32_gmac_s: rate(&self.fp32) };
        self.best = self.best.best(now);
        now
    }

    /// The best floors of the run; measured now if they never were.
    pub fn best(&mut self) -> Floors {
        if self.best == Floors::default() {
            self.measure();
        }
        self.best
    }

    /// The streamed buffer: 1 GiB that is there anyway.
    pub fn buffer(&self) -> Arc<Vec<u64>> {
        Arc::clone(&self.buffer)
    }

    /// Seconds of `run` after a call to warm up, with the floors measured before and after; returns the seconds, several
    /// times the least of as many calls in a row as there are passes of a floor, and the median of those floors. Both are
    /// measured alike, so that a disturbance falls on neither more than on the other. What a call gives is kept until just
    /// before the next one, as a caller would keep it: to free it is no part of the time, and its memory is at hand for the
    /// next.
    pub fn time<T, E>(&mut self, run: impl FnMut() -> Result<T, E>) -> Result<(Vec<f64>, Floors), E> {
        self.time_beside(Self::measure, run)
    }

    /// [`Gauge::time`], with reading measured on `memory` where it lies in place of the gauge's buffer: pages of files
    /// lie where the system put them, and not all memory of a shared machine is equally fast.
    pub fn time_reading<T, E>(
        &mut self,
        memory: &[&[u8]],
        run: impl FnMut() -> Result<T, E>,
    ) -> Result<(Vec<f64>, Floors), E> {
        // What is not whole words of eight bytes is too little to matter.
        let words: Vec<&[u64]> = memory.iter().map(|bytes| pod_align_to(bytes).1).collect();
        let read = || (0..PASSES).map(|_| read_rate(&words)).fold(0.0, f64::max);
        self.time_beside(|gauge| Floors { read_gb_s: read(), ..gauge.measure() }, run)
    }

    fn time_beside<T, E>(
        &mut self,
        measure: impl Fn(&mut Self) -> Floors,
        mut run: impl FnMut() -> Result<T, E>,
    ) -> Result<(Vec<f64>, Floors), E> {
        let start = Instant::now();
        let mut given = Some(run()?);
        let runs = if start.elapsed() < SLOW { RUNS } else { SLOW_RUNS };
        let mut floors = vec![measure(self)];
        let mut seconds = Vec::with_capacity(runs);
        for _ in 0..runs {
            let mut least = f64::INFINITY;
            for _ in 0..PASSES {
                drop(given.take());
                let start = Instant::now();
                given = Some(black_box(run()?));
                least = least.min(start.elapsed().as_secs_f64());
            }
            seconds.push(least);
            floors.push(measure(self));
        }
        Ok((seconds, Floors::typical(&floors)))
    }
}

impl Burst {
    /// The burst of the level that is fastest here, among the level in use and all others.
    fn fastest(of: impl Fn(&'static dyn Kernels) -> Box<dyn Fn(u64) -> u64 + Sync>) -> Self {
        let mut best = Self::calibrated(of(kernels()));
        let mut rate = best.rate();
        for level in levels() {
            let burst = Self::calibrated(of(level.as_ref()));
            let found = burst.rate();
            if found > rate {
                (best, rate) = (burst, found);
            }
        }
        best
    }

    /// With as many steps as a burst needs to be long enough.
    fn calibrated(run: Box<dyn Fn(u64) -> u64 + Sync>) -> Self {
        let mut steps = 1024;
        loop {
            let start = Instant::now();
            black_box(run(steps));
            if start.elapsed() >= BURST || steps >= 1 << 40 {
                return Self { run, steps };
            }
            steps *= 2;
        }
    }

    /// 1e9 multiply-adds a second, all threads at once.
    fn rate(&self) -> f64 {
        let start = Instant::now();
        let done: u64 = rayon::broadcast(|_| (self.run)(self.steps)).into_iter().sum();
        done as f64 / start.elapsed().as_secs_f64() / 1e9
    }
}

/// 1e9 bytes a second of one pass over the words, piece by piece.
fn read_rate(pieces: &[&[u64]]) -> f64 {
    let arch = Arch::new();
    let start = Instant::now();
    let chunks: Vec<&[u64]> = pieces.iter().flat_map(|words| words.chunks(CHUNK)).collect();
    let sum = chunks.par_iter().map(|chunk| arch.dispatch(|| sum(chunk))).reduce(|| 0, u64::wrapping_add);
    black_box(sum);
    pieces.iter().map(|words| size_of_val(*words)).sum::<usize>() as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// The sum of the words, read as [`STREAMS`] streams side by side, a cache line of each in turn.
#[inline(always)]
fn sum(words: &[u64]) -> u64 {
    const LINE: usize = 8;
    let length = words.len() / STREAMS / LINE * LINE;
    let (streams, rest) = words.split_at(STREAMS * length);
    let mut lanes = [[0u64; LINE]; STREAMS];
    // Slices of one length, so that the loop has no check of bounds in it.
    let streams: [&[u64]; STREAMS] = std::array::from_fn(|stream| &streams[stream * length..][..length]);
    for start in (0..length).step_by(LINE) {
        for (lanes, stream) in lanes.iter_mut().zip(streams) {
            for (lane, &word) in lanes.iter_mut().zip(&stream[start..start + LINE]) {
                *lane = lane.wrapping_add(word);
            }
        }
    }
    lanes.iter().flatten().chain(rest).fold(0, |sum, &word| sum.wrapping_add(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loop_that_is_timed_reads_every_word() {
        for count in [0u64, 1, 63, 64, 65, 1000, 4096] {
            let words: Vec<u64> = (1..=count).collect();
            assert_eq!(sum(&words), count * (count + 1) / 2);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_size() {
        assert!(room::<u64>(3).unwrap().capacity() >= 3);
        let error = room::<u64>(1 << 59).unwrap_err().to_string();
        assert!(error.contains("a buffer of 4398046511104 MiB"), "{error}");
    }

    #[test]
    fn floors_are_combined_rate_by_rate() {
        let a = Floors { read_gb_s: 1.0, int8_gmac_s: 20.0, fp32_gmac_s: 3.0 };
        let b = Floors { read_gb_s: 2.0, int8_gmac_s: 10.0, fp32_gmac_s: 3.0 };
        assert_eq!(a.best(b), Floors { read_gb_s: 2.0, int8_gmac_s: 20.0, fp32_gmac_s: 3.0 });
        let c = Floors { read_gb_s: 1.5, int8_gmac_s: 90.0, fp32_gmac_s: 1.0 };
        assert_eq!(Floors::typical(&[a, b, c]), Floors { read_gb_s: 1.5, int8_gmac_s: 20.0, fp32_gmac_s: 3.0 });
    }
}

//! How far permitted freedoms move a row: energies of sampled devices, and whether a device's rows lie within what
//! they reach (`docs/verdicts.md`, Unforced).

/// Tests that a run may make this way: its false-alarm probability is split over them.
pub const TESTS: f64 = 1024.0;

/// Sampled rows that must have moved before the samples are taken to show what flips do.
pub const MOVED: usize = 8;

/// Samples beyond an energy from which on they are counted.
const COUNTED: usize = 8;

/// How a batch row differs from the nominal one.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// Elements compared.
    pub elements: usize,
    /// Of those, elements with other bits.
    pub differing: usize,
    /// Mean square distance, in units.
    pub energy: f64,
    /// Mean sign of the differences, those that go away from zero positive.
    pub lean: f64,
}

impl Row {
    /// Standard deviation of the row's displacement, in units, as seen without one element: narrowed values cross
    /// a boundary one unit apart about as often as their mean displacement says, FP32 values show it themselves.
    pub fn deviation_without(&self, distance: f64, narrowed: bool) -> f64 {
        let elements = self.elements.max(1) as f64;
        let crossing = 1.25 * (self.differing.max(2) - 1) as f64 / elements;
        let energy = (self.energy - distance * distance / elements).max(0.0).sqrt();
        match (narrowed, crossing < 0.5) {
            (false, _) => energy,
            (true, true) => crossing,
            (true, false) => crossing.max(energy),
        }
    }
}

/// Energies and leans of sampled rows.
#[derive(Clone, Debug, Default)]
pub struct Distribution {
    /// Ascending.
    pub energies: Vec<f64>,
    /// Sampled rows that differed at all.
    pub moved: usize,
    /// The largest lean seen in a row that differs in more than a few elements.
    pub lean: f64,
    median: f64,
    /// Mean exceedance over the median, at its upper confidence limit.
    tail: f64,
    /// Share of the samples that exceed the median.
    share: f64,
    /// Mean logarithm of an energy over the median where the tail is a power law, at its upper confidence limit.
    power: Option<f64>,
}

impl Distribution {
    /// Adds sampled rows.
    pub fn add<'r>(&mut self, rows: impl Iterator<Item = &'r Row>) {
        for row in rows {
            self.energies.push(row.energy);
            self.moved += usize::from(row.differing > 0);
            if row.differing >= 64 {
                self.lean = self.lean.max(row.lean.abs());
            }
        }
    }

    /// Fits the tail: exceedances over the median are taken as exponential.
    pub fn finish(&mut self) {
        self.energies.sort_by(f64::total_cmp);
        self.median = self.energies.get(self.energies.len() / 2).copied().unwrap_or(0.0);
        let above: Vec<f64> = self.energies.iter().filter(|&&t| t > self.median).map(|t| t - self.median).collect();
        if !above.is_empty() {
            let count = above.len() as f64;
            // Half as long again as the mean: a scalar's square falls off that much more slowly than its mean says.
            self.tail = 1.5 * above.iter().sum::<f64>() / count * (1.0 + 2.0 / count.sqrt());
            self.share = count / self.energies.len() as f64;
        }
    }

    /// Fits the tail of FP32 rows. They always move a little, and a flip before them moves them by whatever its element
    /// weighs: where energies above the median scatter more than exponential ones do, their tail is taken as a power law.
    pub fn finish_whole(&mut self) {
        self.finish();
        let above: Vec<f64> = self.energies.iter().copied().filter(|&t| t > self.median && self.median > 0.0).collect();
        let count = above.len() as f64;
        let mean = above.iter().map(|t| t - self.median).sum::<f64>() / count;
        let variance = above.iter().map(|t| (t - self.median - mean).powi(2)).sum::<f64>() / count;
        if variance.sqrt() > mean * (1.0 + 4.0 / count.sqrt()) {
            let logarithms = above.iter().map(|t| (t / self.median).ln()).sum::<f64>();
            self.power = Some(logarithms / count * (1.0 + 2.0 / count.sqrt()));
        }
    }

    /// Logarithm of the probability, at its upper confidence limit, that a right row exceeds `energy`.
    pub fn log_survival(&self, energy: f64) -> f64 {
        let counted = |above: f64| ((above + 2.0 * above.sqrt()) / self.energies.len() as f64).ln();
        let above = self.energies.iter().filter(|&&t| t >= energy).count();
        if above >= COUNTED {
            return counted(above as f64);
        }
        if self.tail == 0.0 {
            // Nothing ever moved.
            return if energy > self.median { f64::NEG_INFINITY } else { 0.0 };
        }
        let exponential = self.share.ln() - (energy - self.median).max(0.0) / self.tail;
        let power = self.power.map(|power| self.share.ln() - (energy / self.median).max(1.0).ln() / power);
        // Where one flip makes most of the energy, samples crowd just below it: from what is counted it goes on as steeply.
        let last = self.energies.len().checked_sub(COUNTED).and_then(|index| self.energies.get(index));
        let crowd = last.map(|last| counted(COUNTED as f64) - (energy - last) / self.tail);
        [power, crowd].into_iter().flatten().fold(exponential, f64::max).min(0.0)
    }

    /// Which of `energies`, one a row, permitted freedoms do not reach at the false-alarm probability `p`: the `k`
    /// largest together, for some `k`, and how far they are. Energies up to `floor` of their row never count.
    pub fn too_far(&self, energies: &[f64], floor: impl Fn(usize) -> f64, p: f64) -> (Vec<usize>, String) {
        let mut order: Vec<usize> = (0..energies.len()).collect();
        order.sort_by(|&a, &b| energies[b].total_cmp(&energies[a]));
        let count = order.len() as f64;
        let (mut ways, mut far, mut how_far) = (0.0f64, 0, String::new());
        for (index, &row) in order.iter().enumerate() {
            let k = (index + 1) as f64;
            // The logarithm of the number of ways to choose k of the rows.
            ways += ((count - index as f64) / k).ln();
            let energy = energies[row];
            let chance = ways + k * self.log_survival(energy).min(0.0);
            if energy > floor(row) && (energy.is_nan() || chance < (p / count).ln()) {
                far = index + 1;
                how_far = format!(
                    "mean square {energy:.3e} steps or more, chance below 1e{:.0}",
                    (chance / std::f64::consts::LN_10).max(-300.0)
                );
            }
        }
        order.truncate(far);
        (order, how_far)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn survival_of_a_power_law() {
        // Quantiles of energies that exceed t with a chance of 1 / t.
        let energies = (0..1024).map(|i| 1.0 / (1.0 - (f64::from(i) + 0.5) / 1024.0)).collect();
        let mut distribution = Distribution { energies, ..Distribution::default() };
        distribution.finish_whole();
        for energy in [1e4, 1e6, 1e9] {
            let (upper, exact) = (distribution.log_survival(energy), -f64::ln(energy));
            assert!(upper >= exact && upper <= 0.8 * exact, "{energy}: {upper} against {exact}");
        }
        // Those of an exponential distribution stay exponential.
        let energies = (0..1024).map(|i| 1.0 - (1.0 - (f64::from(i) + 0.5) / 1024.0).ln()).collect();
        let mut distribution = Distribution { energies, ..Distribution::default() };
        distribution.finish_whole();
        assert_eq!(distribution.power, None);
    }

    #[test]
    fn survival_of_an_exponential_tail() {
        // Quantiles of an exponential distribution of mean 1.
        let energies = (0..256).map(|i| -(1.0 - (f64::from(i) + 0.5) / 256.0).ln()).collect();
        let mut distribution = Distribution { energies, ..Distribution::default() };
        distribution.finish();
        for energy in [0.7, 2.0, 10.0, 20.0] {
            let (upper, exact) = (distribution.log_survival(energy), -energy);
            assert!(upper >= exact && upper <= 0.5 * exact + 0.5, "{energy}: {upper} against {exact}");
        }
    }
}

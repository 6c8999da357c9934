//! The numeric policy: plain data that says how each cast rounds and which of a device's legitimate
//! freedoms a run takes (`docs/numerics.md`, Rounding and What is exact and what is not).

use crate::rounding::Rounding;

/// A place where a value is narrowed. The name is the one of `docs/numerics.md`; the three INT8
/// quantizations are named after the tensor they write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // Each variant is documented by its `name` in `docs/numerics.md`.
pub enum Site {
    Normed,
    NormedI8,
    Q,
    KCache,
    VCache,
    Prob,
    Attn,
    AttnOutI8,
    Residual,
    MlpIn,
    MlpNormI8,
    Silu,
    Down,
    Out,
    FinalNorm,
}

impl Site {
    /// Every site, in the order of the contract's steps.
    pub const ALL: [Self; 15] = [
        Self::Normed,
        Self::NormedI8,
        Self::Q,
        Self::KCache,
        Self::VCache,
        Self::Prob,
        Self::Attn,
        Self::AttnOutI8,
        Self::Residual,
        Self::MlpIn,
        Self::MlpNormI8,
        Self::Silu,
        Self::Down,
        Self::Out,
        Self::FinalNorm,
    ];

    /// The name used in case files and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Normed => "normed",
            Self::NormedI8 => "normed_i8",
            Self::Q => "q",
            Self::KCache => "k_cache",
            Self::VCache => "v_cache",
            Self::Prob => "prob",
            Self::Attn => "attn",
            Self::AttnOutI8 => "attn_out_i8",
            Self::Residual => "residual",
            Self::MlpIn => "mlp_in",
            Self::MlpNormI8 => "mlp_norm_i8",
            Self::Silu => "silu",
            Self::Down => "down",
            Self::Out => "out",
            Self::FinalNorm => "final_norm",
        }
    }

    /// The site with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|site| site.name() == name)
    }

    /// Whether the site narrows to INT8 codes rather than to BF16.
    #[must_use]
    pub fn is_int8(self) -> bool {
        matches!(self, Self::NormedI8 | Self::AttnOutI8 | Self::MlpNormI8)
    }

    /// Whether the contract leaves the direction of ties to the kernel. The other sites name RNE.
    #[must_use]
    pub fn ties_are_free(self) -> bool {
        !self.is_int8() && !matches!(self, Self::KCache | Self::VCache | Self::Down)
    }
}

/// Which of the legitimate freedoms a run takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Freedom {
    /// The canonical order of the reference (`docs/numerics.md`, Order of the reference), exp correctly rounded.
    #[default]
    Canonical,
    /// The orders of the emulated device (`docs/numerics.md`): vector sums over 64 lanes by column
    /// chunk, cube sums over exact dots of 16.
    Emulated,
    /// A random device: every long FP32 sum runs in an order drawn from the seed, and exp, square root
    /// and reciprocal are off by up to their documented ULPs.
    Sampled {
        /// Seed of the draw.
        seed: u64,
    },
    /// A sampled device whose elementary functions are off by `gain` times what is permitted: no legitimate
    /// device, but a way to see what one rare flip does where permitted errors hardly ever cause one.
    Enlarged {
        /// Seed of the draw.
        seed: u64,
        /// Factor on the ULPs of exp, square root and reciprocal.
        gain: u32,
    },
}

/// How each site rounds, and which freedoms are taken.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    rounding: [Rounding; Site::ALL.len()],
    /// Order of FP32 sums and accuracy of elementary functions.
    pub freedom: Freedom,
}

impl Policy {
    /// Nearest, ties to even, at every site.
    #[must_use]
    pub fn rne() -> Self {
        Self { rounding: [Rounding::Rne; Site::ALL.len()], freedom: Freedom::Canonical }
    }

    /// The production kernels: ties away from zero wherever they leave the rule to their language.
    #[must_use]
    pub fn production() -> Self {
        let mut policy = Self::rne();
        for site in Site::ALL {
            if site.ties_are_free() {
                policy.set(site, Rounding::TiesAway);
            }
        }
        policy
    }

    /// The rule at a site.
    #[must_use]
    #[inline]
    pub fn at(&self, site: Site) -> Rounding {
        self.rounding[site as usize]
    }

    /// Changes the rule at a site.
    pub fn set(&mut self, site: Site, rule: Rounding) {
        self.rounding[site as usize] = rule;
    }

    /// The same policy with one rule changed.
    #[must_use]
    pub fn with(mut self, site: Site, rule: Rounding) -> Self {
        self.set(site, rule);
        self
    }

    /// The same policy under another freedom.
    #[must_use]
    pub fn under(mut self, freedom: Freedom) -> Self {
        self.freedom = freedom;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sites_are_indexed_in_order_and_named_once() {
        for (index, site) in Site::ALL.into_iter().enumerate() {
            assert_eq!(site as usize, index);
            assert_eq!(Site::from_name(site.name()), Some(site));
        }
    }

    #[test]
    fn production_differs_from_rne_at_the_free_sites_only() {
        let (rne, production) = (Policy::rne(), Policy::production());
        for site in Site::ALL {
            assert_eq!(rne.at(site) != production.at(site), site.ties_are_free(), "{}", site.name());
        }
    }
}

//! Rounding rules: what the device is held to, and what its own ties say (`docs/verdicts.md`, Ties).

use std::collections::BTreeMap;

use cases::PolicyRequest;
use reference::{Policy, Rounding, Site};

use crate::report::PolicyReport;

/// How the exact ties of one site went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TieTally {
    /// Exact ties seen.
    pub ties: u64,
    /// Ties that only ties-to-even gives.
    pub even: u64,
    /// Ties that only ties-away gives.
    pub away: u64,
    /// Where the first tie that only ties-to-even gives was seen.
    pub first_even: Option<String>,
    /// Where the first tie that only ties-away gives was seen.
    pub first_away: Option<String>,
}

impl TieTally {
    /// The same tally where other differences blur it: only a clear majority counts, and it counts for all.
    #[must_use]
    pub fn clear_majority(self) -> Self {
        let (most, least) = (self.even.max(self.away), self.even.min(self.away));
        if most < 16 || most < 2 * least {
            Self { even: 0, away: 0, ..self }
        } else if self.even > self.away {
            Self { away: 0, ..self }
        } else {
            Self { even: 0, ..self }
        }
    }

    /// Counts one tie: what each rule gives and what the device has.
    pub fn count<V: PartialEq>(&mut self, even: &V, away: &V, device: &V, place: impl FnOnce() -> String) {
        self.ties += 1;
        if even == away {
            return;
        }
        if device == even {
            self.even += 1;
            if self.first_even.is_none() {
                self.first_even = Some(place());
            }
        } else if device == away {
            self.away += 1;
            if self.first_away.is_none() {
                self.first_away = Some(place());
            }
        }
    }
}

/// The rules in force while a bundle is judged.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Whether free sites follow the device's own ties.
    auto: bool,
    /// The rule at each site.
    pub policy: Policy,
    tallies: BTreeMap<Site, TieTally>,
    violations: BTreeMap<Site, String>,
}

impl Rules {
    /// The rules that a request starts from. Under `auto` a site is `production` until its ties speak.
    pub fn new(request: &PolicyRequest) -> Self {
        let policy = match request {
            PolicyRequest::Auto | PolicyRequest::Production => Policy::production(),
            PolicyRequest::Rne => Policy::rne(),
            PolicyRequest::Custom(policy) => policy.clone(),
        };
        let auto = matches!(request, PolicyRequest::Auto);
        Self { auto, policy, tallies: BTreeMap::new(), violations: BTreeMap::new() }
    }

    /// The rules that were found, as a request of their own.
    pub fn settled(&self) -> Self {
        Self { auto: false, policy: self.policy.clone(), tallies: BTreeMap::new(), violations: BTreeMap::new() }
    }

    /// Whether the rule at `site` is the device's own to choose.
    pub fn is_open(&self, site: Site) -> bool {
        self.auto && site.ties_are_free()
    }

    /// Settles a site by the ties of a tensor. Returns whether the site's rule is violated.
    pub fn settle(&mut self, site: Site, tally: TieTally) -> bool {
        if self.is_open(site) && (tally.even > 0 || tally.away > 0) {
            let rule = if tally.even > tally.away { Rounding::Rne } else { Rounding::TiesAway };
            self.policy.set(site, rule);
            if tally.even > 0 && tally.away > 0 {
                let place = |place: &Option<String>| place.clone().unwrap_or_default();
                self.violations.insert(
                    site,
                    format!(
                        "the ties at {} follow no one rule: {} went away from zero (first at {}), {} to even (first at {})",
                        site.name(),
                        tally.away,
                        place(&tally.first_away),
                        tally.even,
                        place(&tally.first_even)
                    ),
                );
            }
        } else {
            let rule = self.policy.at(site);
            let (other, count, first) = match rule {
                Rounding::Rne => ("ties went away from zero", tally.away, &tally.first_away),
                Rounding::TiesAway => ("ties went to even", tally.even, &tally.first_even),
                Rounding::Trunc | Rounding::None => ("", 0, &None),
            };
            if count > 0 {
                let wants = if rule == Rounding::Rne { "ties to even" } else { "ties away from zero" };
                self.violations.insert(
                    site,
                    format!(
                        "{}: {count} of {} {other}, where {wants} was asked for (first at {})",
                        site.name(),
                        tally.ties,
                        first.clone().unwrap_or_default()
                    ),
                );
            }
        }
        self.tallies.insert(site, tally);
        self.violations.contains_key(&site)
    }

    /// Whether a site's rule is violated.
    pub fn violation(&self, site: Site) -> Option<&String> {
        self.violations.get(&site)
    }

    /// Whether any tie at this site told the rules apart.
    pub fn exercised(&self, site: Site) -> bool {
        self.tallies.get(&site).is_some_and(|tally| tally.even + tally.away > 0)
    }

    /// Exact ties seen at a site.
    pub fn ties(&self, site: Site) -> u64 {
        self.tallies.get(&site).map_or(0, |tally| tally.ties)
    }

    /// The report: the rule that the device's ties follow at each site of a decode layer.
    pub fn report(&self, asked: &str) -> PolicyReport {
        let mut report = PolicyReport { asked: asked.to_owned(), ..PolicyReport::default() };
        for site in Site::ALL.into_iter().filter(|&site| site != Site::FinalNorm) {
            let seen = match self.tallies.get(&site) {
                Some(tally) if tally.even > 0 && tally.away > 0 => "mixed",
                Some(tally) if tally.even > 0 => Rounding::Rne.name(),
                Some(tally) if tally.away > 0 => Rounding::TiesAway.name(),
                _ => "not exercised",
            };
            report.rules.insert(site.name().to_owned(), seen.to_owned());
            if self.ties(site) > 0 {
                report.ties.insert(site.name().to_owned(), self.ties(site));
            }
        }
        report.violations = self.violations.values().cloned().collect();
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(even: u64, away: u64) -> TieTally {
        TieTally { ties: even + away + 1, even, away, ..TieTally::default() }
    }

    #[test]
    fn auto_takes_the_rule_of_the_ties_at_free_sites_only() {
        let mut rules = Rules::new(&PolicyRequest::Auto);
        assert!(!rules.settle(Site::Normed, tally(5, 0)));
        assert_eq!(rules.policy.at(Site::Normed), Rounding::Rne);
        assert!(!rules.settle(Site::Out, tally(0, 5)));
        assert_eq!(rules.policy.at(Site::Out), Rounding::TiesAway);
        assert!(rules.settle(Site::Residual, tally(1, 900)));
        assert!(rules.settle(Site::KCache, tally(0, 1)));
        assert_eq!(rules.policy.at(Site::KCache), Rounding::Rne);
        let report = rules.report("auto");
        assert_eq!(report.rules["normed"], "rne");
        assert_eq!(report.rules["residual"], "mixed");
        assert_eq!(report.rules["q"], "not exercised");
        assert_eq!(report.violations.len(), 2);
    }

    #[test]
    fn rne_names_every_site_that_goes_away() {
        let mut rules = Rules::new(&PolicyRequest::Rne);
        assert!(rules.settle(Site::Out, tally(0, 5)));
        assert!(!rules.settle(Site::Normed, tally(7, 0)));
        assert_eq!(rules.policy.at(Site::Out), Rounding::Rne);
    }
}

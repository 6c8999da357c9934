//! Which case would show a fault (`docs/cases.md`): faults of the catalogue are planted in a device of each case, and
//! what the gate says of it is kept. A case is run only for faults that no case before it has shown.

use cases::{Case, InputStore, Inputs};
use rayon::prelude::*;
use reference::{Deviation, Freedom};
use serde::Serialize;

use crate::judge::{JudgeError, Progress};
use crate::power::{Bed, Shown};

/// A fault, and the case that shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Suggestion {
    /// The fault's name.
    pub fault: String,
    /// What a device with it does.
    pub description: String,
    /// What the case that was asked about has to say; none where no case was.
    pub here: Option<Shown>,
    /// The first case that shows it, and where; none where none of them does.
    pub shown_by: Option<ShownBy>,
}

/// Where a fault shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ShownBy {
    /// Index among the cases that were tried.
    #[serde(skip)]
    pub index: usize,
    /// The case's name.
    pub name: String,
    /// Its file.
    pub path: String,
    /// The first divergence.
    pub at: String,
}

/// Whether a case's data show each of these faults, in their order.
///
/// # Errors
/// Inputs that are no decode layer's, or cannot be generated.
pub fn shown(case: &Case, faults: &[&Deviation], progress: &dyn Progress) -> Result<Vec<Shown>, JudgeError> {
    progress.begin(&case.name);
    let inputs = Inputs::generate(case, &InputStore::new())
        .map_err(|source| JudgeError::Inputs { case: case.name.clone(), source: source.into() })?;
    let bed = Bed::new(case, &inputs, Freedom::Sampled { seed: case.seed })?;
    faults.par_iter().map(|fault| bed.shows(fault)).collect()
}

/// For each fault that `here` does not show (each one, without `here`), the first of `cases` that does. A case of
/// another kernel than a decode layer is left out.
///
/// # Errors
/// As [`shown`].
pub fn suggest(
    here: Option<&Case>,
    cases: &[Case],
    faults: &[Deviation],
    progress: &dyn Progress,
) -> Result<Vec<Suggestion>, JudgeError> {
    let all: Vec<&Deviation> = faults.iter().collect();
    let said = here.map(|case| shown(case, &all, progress)).transpose()?;
    let mut open: Vec<(&Deviation, Suggestion)> = Vec::new();
    for (index, fault) in all.into_iter().enumerate() {
        let here = said.as_ref().and_then(|said| said.get(index)).cloned();
        if !here.as_ref().is_some_and(Shown::is_caught) {
            let (id, description) = (fault.id.clone(), fault.description.clone());
            open.push((fault, Suggestion { fault: id, description, here, shown_by: None }));
        }
    }
    for (index, case) in cases.iter().enumerate().filter(|(_, case)| case.batch().is_some()) {
        let mut missing: Vec<_> = open.iter_mut().filter(|(_, suggestion)| suggestion.shown_by.is_none()).collect();
        if missing.is_empty() {
            break;
        }
        let faults: Vec<&Deviation> = missing.iter().map(|(fault, _)| *fault).collect();
        for ((_, suggestion), said) in missing.iter_mut().zip(shown(case, &faults, progress)?) {
            if let Shown::Caught { at } = said {
                let path = case.path.display().to_string();
                suggestion.shown_by = Some(ShownBy { index, name: case.name.clone(), path, at });
            }
        }
    }
    Ok(open.into_iter().map(|(_, suggestion)| suggestion).collect())
}

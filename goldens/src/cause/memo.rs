//! What several devices that ran one case have in common where nothing before the judged tensor was captured: what
//! kernels with faults give there, and how far permitted freedoms move it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use reference::{Deviation, Policy, Site, Tensor, TensorId};

use crate::unforced::Sampled;

/// Faults by name, and the rule at each site.
type Kernel = (Vec<String>, [&'static str; Site::ALL.len()]);

/// Kept between the judgements of devices that ran one case; made for it and dropped with it.
#[derive(Debug, Default)]
pub struct Memo {
    outs: Mutex<BTreeMap<Kernel, Arc<Tensor>>>,
    sampled: Mutex<BTreeMap<(TensorId, Kernel), Sampled>>,
}

impl Memo {
    /// What a kernel with faults gives at `out`.
    pub(crate) fn out(
        &self,
        policy: &Policy,
        faults: &[&Deviation],
        compute: impl FnOnce() -> Option<Arc<Tensor>>,
    ) -> Option<Arc<Tensor>> {
        let kernel = kernel(policy, faults);
        let held = locked(&self.outs).get(&kernel).map(Arc::clone);
        // Never computed under the lock: a thread that waits for its part of the work may come here again.
        held.or_else(|| {
            let out = compute()?;
            locked(&self.outs).insert(kernel, Arc::clone(&out));
            Some(out)
        })
    }

    /// How far freedoms move a tensor of a kernel with faults.
    pub(crate) fn sampled(
        &self,
        id: TensorId,
        policy: &Policy,
        faults: &[&Deviation],
        sample: impl FnOnce() -> Sampled,
    ) -> Sampled {
        let key = (id, kernel(policy, faults));
        let held = locked(&self.sampled).get(&key).cloned();
        held.unwrap_or_else(|| {
            let sampled = sample();
            locked(&self.sampled).insert(key, sampled.clone());
            sampled
        })
    }
}

fn kernel(policy: &Policy, faults: &[&Deviation]) -> Kernel {
    (faults.iter().map(|fault| fault.id.clone()).collect(), Site::ALL.map(|site| policy.at(site).name()))
}

/// Whole after every change, so that a panic elsewhere leaves it usable.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

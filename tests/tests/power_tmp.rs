use assay_tests::Bench;
use goldens::power::{Bed, faults};
use reference::Freedom;
use std::time::Instant;
#[test]
fn table() {
    let names = std::env::var("CASES").unwrap_or("mini/full".into());
    for name in names.split(',') {
        let b = Bench::recorded(name);
        let t = Instant::now();
        let bed = Bed::new(&b.case, &b.inputs, Freedom::Sampled { seed: 77 }).unwrap();
        if std::env::var("CLEAN").is_ok() {
            println!("{name} false alarms {}", bed.false_alarms(Freedom::Sampled { seed: 5 }).unwrap());
        }
        let mut trials = Vec::new();
        for f in faults() {
            if let Ok(only) = std::env::var("ONLY") {
                if !only.split(',').any(|o| f.id.contains(o)) {
                    continue;
                }
            }
            let t0 = Instant::now();
            let t = bed.trial(&f).unwrap();
            let mut line = format!("{:36} first {:20}", t.id, t.first.clone().unwrap_or("-".into()));
            if let Some(o) = &t.whole {
                line += &format!(
                    " | {} {} {}",
                    if o.caught { "C" } else { "MISSED" },
                    if o.located == t.first { "L".into() } else { format!("at {:?}", o.located) },
                    if o.names(&t.id) { "N".into() } else { format!("named {:?}", o.cause) }
                );
            }
            if let Some(o) = &t.out_alone {
                line += &format!(
                    " || out {} {}",
                    if o.caught { "C" } else { "MISSED" },
                    if o.names(&t.id) { "N".into() } else { format!("named {:?}", o.cause) }
                );
            }
            println!(
                "{line} [{} {} {} {}] {:.2?}",
                t.others.allclose as u8,
                t.others.outliers as u8,
                t.others.cosine as u8,
                t.others.thousandth as u8,
                t0.elapsed()
            );
            trials.push(t);
        }
        println!("{name}: {:?} {:.1?}", goldens::power::Counts::of(trials.iter()), t.elapsed());
    }
}

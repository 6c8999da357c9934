use assay_tests::Bench;
use goldens::power::{Bed, faults};
use reference::Freedom;
use std::time::Instant;
#[test]
fn table() {
    let names = std::env::var("CASES").unwrap_or("mini/full".into());
    let whole_only = std::env::var("WHOLE").is_ok();
    for name in names.split(',') {
        let b = Bench::recorded(name);
        let t = Instant::now();
        let bed = Bed::new(&b.case, &b.inputs, Freedom::Sampled { seed: 77 }).unwrap();
        println!(
            "{name} clean {:?} {:?} {:.2?}",
            bed.clean(false).unwrap().verdict,
            bed.clean(true).unwrap().verdict,
            t.elapsed()
        );
        let r = bed.clean(false).unwrap();
        for t in r.tensors.iter().filter(|t| t.unexplained > 0) {
            println!("{} {} {:?} {:?}", t.name, t.unexplained, t.worst, t.notes);
        }
        for c in r.checks.iter() {
            println!("{} {:?} {}", c.name, c.verdict, c.detail);
        }
        if std::env::var("STOP").is_ok() {
            continue;
        }
        let (mut n, mut caught, mut located, mut named, mut no, mut co, mut nao) = (0, 0, 0, 0, 0, 0, 0);
        for f in faults() {
            let t0 = Instant::now();
            let t = bed.trial(&f).unwrap();
            let _ = whole_only;
            let mut line = format!("{:36} first {:20}", t.id, t.first.clone().unwrap_or("-".into()));
            if let Some(o) = &t.whole {
                n += 1;
                caught += o.caught as u32;
                located += (o.caught && o.located == t.first) as u32;
                named += o.names(&t.id) as u32;
                line += &format!(
                    " | {} {} {}",
                    if o.caught { "C" } else { "MISSED" },
                    if o.located == t.first { "L".into() } else { format!("at {:?}", o.located) },
                    if o.names(&t.id) { "N".into() } else { format!("named {:?}", o.cause) }
                );
            }
            if let Some(o) = &t.out_alone {
                no += 1;
                co += o.caught as u32;
                nao += o.names(&t.id) as u32;
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
        }
        println!(
            "{name}: {n} visible, {caught} caught {located} located {named} named; out {no}: {co} caught {nao} named; {:.1?}",
            t.elapsed()
        );
    }
}

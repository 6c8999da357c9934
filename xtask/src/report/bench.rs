//! The benchmark's report: a table for a person, and the JSON of `docs/performance.md`.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table};

use super::human::TABLE;
use crate::bench::{Floors, Report};

const METHOD: &str = "\
time: median of 7 measurements, of 3 where a run takes a second, each the least of 3 runs in a row, as for the floors
floor: the least time in which this machine, with all threads, can read the bytes and do the multiply-adds of the line,
  at the rates measured beside its runs; the floors above are the best of the whole run";
/// What else there is to say of the times of a peer.
const PEER: &str = "peer: median of 5 runs, and ours beside them for a floor";
/// From this many times the fastest run on, a median tells more of what else ran than of what is measured.
const DISTURBED: f64 = 1.15;

/// The table, the floors over it and the method under it.
pub fn human(report: &Report) -> String {
    let Floors { read_gb_s, int8_gmac_s, fp32_gmac_s } = report.floors;
    let (threads, level) = (rayon::current_num_threads(), reference::kernels::kernels().name());
    let mut out = format!(
        "floors of this machine, threads {threads}: read {read_gb_s:.1} GB/s, INT8 {int8_gmac_s:.1} GMAC/s, \
         FP32 {fp32_gmac_s:.1} GMAC/s\n"
    );
    let mut table = Table::new();
    table.load_style(TABLE).enforce_styling();
    table.set_header(["line", "time", "best", "floor time", "ratio", "floor"]);
    for line in &report.lines {
        let times = [line.seconds, line.best, line.floor_seconds].map(milliseconds);
        let [time, best, floor] = times;
        table.add_row([line.name.clone(), time, best, floor, format!("{:.2}", line.ratio), line.floor.clone()]);
    }
    for column in table.column_iter_mut().skip(1).take(4) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    // Writing to a string cannot fail.
    if !report.lines.is_empty() {
        let _ = writeln!(out, "lines, kernels {level}:");
        for line in table.lines() {
            let _ = writeln!(out, "{}", line.trim_end());
        }
        let _ = writeln!(out, "{METHOD}");
        if report.lines.iter().any(|line| line.name.starts_with("peer_")) {
            let _ = writeln!(out, "{PEER}");
        }
    }
    for line in report.lines.iter().filter(|line| line.seconds >= DISTURBED * line.best) {
        let times = line.seconds / line.best;
        let _ = writeln!(
            out,
            "{}: disturbed, its median is {times:.2} times its best; measure again with nothing else running",
            line.name
        );
    }
    for line in report.lines.iter().filter(|line| line.ratio < 1.0 && !line.name.starts_with("peer_")) {
        let _ = writeln!(
            out,
            "{}: faster than its floor, so that what it reads lay in a cache, or the floors beside it were disturbed",
            line.name
        );
    }
    for note in &report.notes {
        let _ = writeln!(out, "{note}");
    }
    out
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.2} ms", seconds * 1e3)
}

/// One object and a newline.
pub fn json(report: &Report) -> String {
    // Plain data with string keys: there is nothing in it that serialization could refuse.
    let mut text = serde_json::to_string_pretty(report)
        .unwrap_or_else(|error| format!("{{\"message\": {:?}}}", error.to_string()));
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use snapbox::{assert_data_eq, str};

    use super::*;
    use crate::bench::Line;

    fn report() -> Report {
        Report {
            floors: Floors { read_gb_s: 20.5, int8_gmac_s: 600.0, fp32_gmac_s: 150.25 },
            lines: vec![
                Line::new("layer_14b_rows1_ctx1000", &[0.035, 0.03, 0.0325], "read".into(), 0.025),
                Line::new("peer_torch_int_mm", &[1.5], "assay layer".into(), 0.1),
            ],
            notes: vec!["peer: torch 2".into()],
        }
    }

    #[test]
    fn json_has_exactly_the_documented_keys() {
        assert_data_eq!(
            json(&report()),
            str![[r#"
{
  "floors": {
    "read_gb_s": 20.5,
    "int8_gmac_s": 600.0,
    "fp32_gmac_s": 150.25
  },
  "lines": [
    {
      "name": "layer_14b_rows1_ctx1000",
      "seconds": 0.0325,
      "floor": "read",
      "floor_seconds": 0.025,
      "ratio": 1.3
    },
    {
      "name": "peer_torch_int_mm",
      "seconds": 1.5,
      "floor": "assay layer",
      "floor_seconds": 0.1,
      "ratio": 15.0
    }
  ]
}

"#]]
        );
    }

    #[test]
    fn the_table_is_aligned_and_ends_with_method_and_notes() {
        let text = human(&report());
        let table = text.lines().skip(2).take(4).collect::<Vec<_>>().join("\n");
        assert_data_eq!(
            table,
            str![[r#"
  line                            time         best   floor time   ratio   floor
 ──────────────────────────────────────────────────────────────────────────────────────
  layer_14b_rows1_ctx1000     32.50 ms     30.00 ms     25.00 ms    1.30   read
  peer_torch_int_mm         1500.00 ms   1500.00 ms    100.00 ms   15.00   assay layer
"#]]
        );
        assert!(text.contains(": read 20.5 GB/s, INT8 600.0 GMAC/s, FP32 150.2 GMAC/s\nlines, kernels "), "{text}");
        assert!(text.ends_with(&format!("{METHOD}\n{PEER}\npeer: torch 2\n")), "{text}");
    }

    #[test]
    fn a_time_below_its_floor_is_pointed_out() {
        let mut report = report();
        report.lines.push(Line::new("layer_14b_rows1_ctx200", &[0.01], "read".into(), 0.0125));
        report.lines.push(Line::new("peer_torch_f32_held", &[0.01], "assay layer".into(), 0.0125));
        let text = human(&report);
        let pointed_out: Vec<_> = text.lines().filter(|line| line.contains("faster than its floor")).collect();
        assert_eq!(pointed_out.len(), 1, "{text}");
        assert!(pointed_out[0].starts_with("layer_14b_rows1_ctx200: "), "{text}");
    }

    #[test]
    fn a_median_far_from_the_best_is_pointed_out() {
        let mut report = report();
        report.lines.push(Line::new("layer_14b_rows2_ctx200", &[0.010, 0.012, 0.013], "read".into(), 0.009));
        let text = human(&report);
        let pointed_out: Vec<_> = text.lines().filter(|line| line.contains("disturbed")).collect();
        assert_data_eq!(
            pointed_out.join("\n"),
            str![
                "layer_14b_rows2_ctx200: disturbed, its median is 1.20 times its best; measure again with nothing else running"
            ]
        );
        let quiet = Report { lines: report.lines.split_off(2), ..self::report() };
        assert!(!human(&quiet).contains(PEER));
    }
}

//! The report on two dumps for a person: which tensors differ, how, and where it is worst.

use std::fmt::Write as _;

use goldens::diff::{Differing, DumpDiff, Patterns, TensorDiff, Ulps};
use goldens::report::Verdict;

use super::human::{BOLD, DIM, style};
use super::text::{grouped, plain, plural};
use crate::commands::show::table;
use crate::exit_codes::Code;

/// The whole report.
pub fn render(diff: &DumpDiff, verbose: bool) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut out, diff, verbose);
    out
}

fn write(out: &mut String, diff: &DumpDiff, verbose: bool) -> std::fmt::Result {
    let style = style(diff.verdict);
    let word = match diff.verdict {
        Verdict::Pass => "EQUAL",
        Verdict::Fail => "DIFFERENT",
        _ => "UNJUDGED",
    };
    let (a, b) = (plain(&diff.a), plain(&diff.b));
    writeln!(out, "{style}{word}{style:#} {BOLD}{a}{BOLD:#} {DIM}and{DIM:#} {BOLD}{b}{BOLD:#}")?;
    let shown: Vec<&TensorDiff> =
        diff.tensors.iter().filter(|tensor| verbose || tensor.verdict != Verdict::Pass).collect();
    if !shown.is_empty() {
        let mut text = String::new();
        let header = ["tensor", "dtype", "shape", "elements", "differing", "non-finite", "largest ULPs"];
        table(&mut text, header, shown.iter().map(|tensor| row(tensor)));
        text.lines().try_for_each(|line| writeln!(out, "  {line}"))?;
    }
    for tensor in shown.iter().filter(|tensor| tensor.verdict != Verdict::Pass) {
        details(out, tensor)?;
    }
    for (names, side) in [(&diff.only_a, "first"), (&diff.only_b, "second")] {
        if !names.is_empty() {
            let (some, more) = (names.iter().take(20).map(|name| plain(name)), names.len().saturating_sub(20));
            let more = if more > 0 { format!(" and {} more", grouped(more as u64)) } else { String::new() };
            writeln!(out, "  only in the {side}: {}{more}", some.collect::<Vec<_>>().join(", "))?;
        }
    }
    for line in &diff.not_compared {
        writeln!(out, "  not compared: {}", plain(line))?;
    }
    for remark in &diff.remarks {
        writeln!(out, "  remark: {}", plain(remark))?;
    }
    let differing = diff.tensors.iter().filter(|tensor| tensor.verdict != Verdict::Pass).count();
    let only = diff.only_a.len() + diff.only_b.len();
    let (code, tensors) = (Code::from(diff.verdict), plural(diff.tensors.len() as u64, "tensor"));
    let only = if only > 0 { format!(", {} in one of the two only", grouped(only as u64)) } else { String::new() };
    let meaning = match diff.verdict {
        Verdict::Pass => "the dumps are equal",
        Verdict::Fail => "the dumps differ",
        _ => "what could be compared is equal, but not all could be",
    };
    let (differing, number) = (grouped(differing as u64), code.number());
    writeln!(out, "{tensors} compared: {differing} differ{only}. (exit code {number}: {meaning})")
}

fn row(tensor: &TensorDiff) -> [String; 7] {
    let both = |a: String, b: String| if a == b { a } else { format!("{a} and {b}") };
    let ([dtype_a, dtype_b], [shape_a, shape_b]) = (&tensor.dtype, &tensor.shape);
    [
        tensor.name.clone(),
        both(dtype_a.clone(), dtype_b.clone()),
        both(format!("{shape_a:?}"), format!("{shape_b:?}")),
        grouped(tensor.elements),
        tensor.differing.map_or("-".to_owned(), grouped),
        both(grouped(tensor.nonfinite[0]), grouped(tensor.nonfinite[1])),
        tensor.ulps.as_ref().map_or("-".to_owned(), |ulps| grouped(ulps.max)),
    ]
}

fn details(out: &mut String, tensor: &TensorDiff) -> std::fmt::Result {
    writeln!(out, "  {BOLD}{}{BOLD:#}", plain(&tensor.name))?;
    let ([dtype_a, dtype_b], [shape_a, shape_b]) = (&tensor.dtype, &tensor.shape);
    if dtype_a != dtype_b {
        writeln!(out, "    element type {dtype_a} in the first, {dtype_b} in the second")?;
    }
    if shape_a != shape_b {
        writeln!(out, "    shape {shape_a:?} in the first, {shape_b:?} in the second")?;
    }
    if let (Some(differing), Some(ulps)) = (tensor.differing, &tensor.ulps) {
        let elements = plural(tensor.elements, "element");
        writeln!(out, "    {} of {elements} differ{}", grouped(differing), distances(ulps))?;
    }
    for line in patterns(&tensor.patterns) {
        writeln!(out, "    {line}")?;
    }
    for note in &tensor.notes {
        writeln!(out, "    {}", plain(note))?;
    }
    for Differing { index, a, b, a_bits, b_bits, ulps } in &tensor.worst {
        let apart = match ulps {
            Some(ulps) => format!("{} apart", plural(*ulps, "ULP")),
            None => "one is NaN".to_owned(),
        };
        writeln!(out, "    {index:?}: {a} ({a_bits}) and {b} ({b_bits}), {apart}")?;
    }
    Ok(())
}

/// How far differing elements are apart, in the ranges that hold any.
fn distances(ulps: &Ulps) -> String {
    let words = ["at most 1 ULP", "2 or 3", "4 to 15", "16 to 255", "more than 255"];
    let counts = ulps.ranges();
    let some = words.iter().zip(counts).filter(|(_, (_, count))| *count > 0);
    let parts: Vec<String> = some.map(|(words, (_, count))| format!("{} by {words}", grouped(count))).collect();
    if parts.is_empty() { String::new() } else { format!(": {}", parts.join(", ")) }
}

fn patterns(patterns: &Patterns) -> Vec<String> {
    let Patterns { exactly_half, exactly_double, zero_in_b, zero_in_a, sign, one_nan, both_nan } = patterns;
    let all = [
        (exactly_half, "exactly half in the second"),
        (exactly_double, "exactly double in the second"),
        (zero_in_b, "zero in the second only"),
        (zero_in_a, "zero in the first only"),
        (sign, "the same but for the sign"),
        (one_nan, "NaN in one of the two"),
        (both_nan, "NaN in both, with other bits"),
    ];
    let some = all.iter().filter(|(count, _)| **count > 0);
    some.map(|(count, what)| format!("{} {} {what}", grouped(**count), if **count == 1 { "is" } else { "are" }))
        .collect()
}

#[cfg(test)]
mod tests {
    use goldens::diff::{Side, compare};
    use safetensors::Dtype;

    use super::*;

    fn side<'a>(shape: &'a [usize], bytes: &'a [u8]) -> Side<'a> {
        Side { dtype: Dtype::BF16, shape, bytes }
    }

    fn different() -> DumpDiff {
        let a: Vec<u8> = (0..512u16).flat_map(|at| (0x3F80 + at % 97).to_le_bytes()).collect();
        let mut b = a.clone();
        for (place, bits) in [(3, 0x3F84u16), (97, 0x3F00), (300, 0x7FC0), (511, 0xBFA6)] {
            b[2 * place..2 * place + 2].copy_from_slice(&bits.to_le_bytes());
        }
        let columns: Vec<u8> = (0..12u8).flat_map(|at| [(at % 3) * 4 + at / 3, 0x3F]).collect();
        let rows: Vec<u8> = (0..12u8).flat_map(|at| [at, 0x3F]).collect();
        let tensors = vec![
            compare("attn_out", &side(&[16, 32], &a), &side(&[16, 32], &b)),
            compare("normed", &side(&[3, 4], &rows), &side(&[3, 4], &columns)),
            compare("out\u{1b}[2J", &side(&[16, 32], &a), &side(&[32, 16], &a)),
            compare("same", &side(&[16, 32], &a), &side(&[16, 32], &a)),
        ];
        DumpDiff {
            verdict: Verdict::Unjudged,
            a: "golden/out".into(),
            b: "run.safetensors".into(),
            tensors,
            only_a: vec!["scale".into()],
            only_b: Vec::new(),
            not_compared: vec!["0x02.arg1.output.after_completion: in the second: truncated".into()],
            remarks: vec!["the second: 3 records were dropped".into()],
        }
        .judged()
    }

    #[test]
    fn a_difference_reads_like_this() {
        let text = anstream::adapter::strip_str(&render(&different(), true)).to_string();
        assert!(text.starts_with("DIFFERENT golden/out and run.safetensors\n") && !text.contains('\u{1b}'), "{text}");
        for line in [
            "    4 of 512 elements differ: 1 by at most 1 ULP, 1 by 16 to 255, 1 by more than 255\n",
            "    1 is exactly half in the second\n",
            "    1 is NaN in one of the two\n",
            "    [9, 12]: 1.0703125 (0x3f89) and NaN (0x7fc0), one is NaN\n",
            "    [15, 31]: 1.203125 (0x3f9a) and -1.296875 (0xbfa6), 32,576 ULPs apart\n",
            "    [3, 1]: 1 (0x3f80) and 0.5 (0x3f00), 128 ULPs apart\n",
            "    same values, column-major order: the second was saved as it lay in memory\n",
            "  out\\u{1b}[2J\n    shape [16, 32] in the first, [32, 16] in the second\n    the bytes are the same\n",
            "  only in the first: scale\n",
            "  not compared: 0x02.arg1.output.after_completion: in the second: truncated\n",
            "  remark: the second: 3 records were dropped\n",
            "4 tensors compared: 3 differ, 1 in one of the two only. (exit code 1: the dumps differ)\n",
        ] {
            assert!(text.contains(line), "{text} lacks {line}");
        }
        assert!(text.contains("\n  same ") || text.contains("\n    same "), "{text}");
        let short = anstream::adapter::strip_str(&render(&different(), false)).to_string();
        assert!(short.lines().count() < text.lines().count(), "{short}");
    }

    #[test]
    fn what_could_not_be_compared_is_no_equality() {
        let mut diff = different();
        diff.tensors.retain(|tensor| tensor.verdict == Verdict::Pass);
        diff.only_a.clear();
        let diff = diff.judged();
        assert!(render(&diff, false).contains("(exit code 125: what could be compared is equal"));
        let equal = DumpDiff { not_compared: Vec::new(), ..diff }.judged();
        assert!(render(&equal, false).ends_with("1 tensor compared: 0 differ. (exit code 0: the dumps are equal)\n"));
    }
}

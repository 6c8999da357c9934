//! How verdicts and marks look: each has a sign or a shape of its own besides its colour, because not everybody sees
//! colours and not every printer has them.

use goldens::Mark;
use goldens::report::{StepVerdict, Verdict};
use maud::{Markup, html};

use super::plot::{Shape, sample};

/// A verdict as a sign and a word.
pub fn pill(verdict: Verdict) -> Markup {
    html! {
        span class=(format!("pill {}", verdict.name())) {
            span aria-hidden="true" { (sign(verdict)) } " " (super::word(verdict))
        }
    }
}

/// The sign of a verdict.
pub fn sign(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "✓",
        Verdict::Fail => "✕",
        Verdict::Error => "!",
        Verdict::Unjudged => "?",
    }
}

/// The letter of a mark, at the end of a map's row.
pub fn letter(mark: Mark) -> &'static str {
    match mark {
        Mark::Drift => "D",
        Mark::Tie => "T",
        Mark::Flip => "f",
        Mark::Exact | Mark::Skipped => "",
    }
}

/// The shape of a step's verdict.
pub fn of_step(verdict: StepVerdict) -> Shape {
    match verdict {
        StepVerdict::Agree => Shape::Exact,
        StepVerdict::NearTie => Shape::Tie,
        StepVerdict::Fail => Shape::Drift,
    }
}

/// What the shapes of the maps mean.
pub fn legend() -> Markup {
    let shapes = [
        (Shape::Exact, "exact: the bits that the contract gives"),
        (Shape::Flip(1), "explained flip: a permitted freedom gives these bits; the taller the bar, the more of them"),
        (Shape::Tie, "tie: went by another rounding rule than asked for (letter T); of a token, a near tie"),
        (Shape::Drift, "drift: nothing permitted explains it (letter D); of a token, a failure"),
    ];
    html! {
        section.legend aria-label="Legend" {
            h2 { "How to read the maps" }
            ul {
                @for (shape, text) in shapes { li { (sample(shape)) " " (text) } }
                li {
                    "A cell may stand for many elements and shows the worst of them: one drifting element fills it. "
                    "Blank cells hold nothing that was compared."
                }
            }
        }
    }
}

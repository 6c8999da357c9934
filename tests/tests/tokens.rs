//! Token runs before the gate: recorded ones and right devices pass with every step judged, and each planted fault gets
//! the verdict and the words that it deserves.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use assay_tests::{TokenRun, said, small_run, values, values_mut, written};
use cases::{Case, PolicyRequest};
use device::{Captured, Captures};
use goldens::report::{CaseReport, StepVerdict, Verdict};
use half::bf16;
use ndarray::s;
use rayon::prelude::*;
use reference::inputs::cache_row;
use reference::{Freedom, PAGE, Policy};

fn case() -> Case {
    small_run(5, &[130, 5], 12)
}

/// The emulated device's orders under the production kernels' rules.
fn emulated() -> TokenRun {
    TokenRun::right(case(), &Policy::production().under(Freedom::Emulated))
}

fn failing_steps(report: &CaseReport) -> Vec<(usize, usize)> {
    let fails = |step: &&goldens::report::TokenStep| step.verdict == StepVerdict::Fail;
    report.steps.iter().filter(fails).map(|step| (step.row, step.step)).collect()
}

fn note(report: &CaseReport, row: usize, step: usize) -> String {
    let step = report.steps.iter().find(|s| (s.row, s.step) == (row, step)).unwrap();
    step.note.clone().unwrap_or_default()
}

#[test]
fn recorded_runs_pass_with_every_step_judged() {
    for (name, rows) in [("mini/tokens1", 1), ("mini/tokens2", 2)] {
        let run = TokenRun::recorded(name);
        for policy in [PolicyRequest::Auto, PolicyRequest::Production] {
            let report = run.judge(run.captures.clone(), &policy);
            said::passes(&report, name);
            assert_eq!(report.steps.len(), rows * 49, "{name}");
            assert!(failing_steps(&report).is_empty(), "{name}");
            assert_eq!(report.tensors.len(), 9, "{name}");
            assert!(report.checks.iter().all(|check| check.verdict == Verdict::Pass), "{name}: {:?}", report.checks);
            assert!(said::check(&report, "kv_values").detail.contains("SHA-256"), "{name}");
            assert_eq!((&*report.policy.rules["normed"], &*report.policy.rules["out"]), ("ties_away", "ties_away"));
            let close = report.steps.iter().filter(|step| step.margin.0 < 0.1).count();
            assert!(close * 5 > report.steps.len(), "{name}: {close} margins below 0.1");
        }
    }
}

#[test]
fn under_rne_the_sites_whose_ties_are_seen_fail_by_name_and_no_element_is_drift() {
    let run = TokenRun::recorded("mini/tokens1");
    let report = run.judge(run.captures.clone(), &PolicyRequest::Rne);
    assert_eq!(report.verdict, Verdict::Fail);
    for site in ["normed", "out"] {
        let named = report.policy.violations.iter().any(|v| v.starts_with(site) && v.contains("away from zero"));
        assert!(named, "{site}: {:?}", report.policy.violations);
    }
    assert!(report.tensors.iter().all(|tensor| tensor.unexplained == 0), "{}", said::summary(&report));
    assert!(failing_steps(&report).is_empty());
    // A device that follows the other rule passes where the rule is its own to choose, and is told from this one.
    let rne = TokenRun::right(case(), &Policy::rne().under(Freedom::Emulated));
    let report = rne.gate();
    said::passes(&report, "a device that rounds ties to even");
    assert_eq!(report.policy.rules["normed"], "rne");
    assert_eq!(rne.judge(rne.captures.clone(), &PolicyRequest::Production).verdict, Verdict::Fail);
}

#[test]
fn right_devices_pass() {
    // Thousands of rows behind the first layer, of devices at the limit of what is permitted.
    (0..12u64).into_par_iter().for_each(|seed| {
        let freedom = match seed {
            0 => Freedom::Canonical,
            1 => Freedom::Emulated,
            // Not the seeds that the judge samples.
            _ => Freedom::Sampled { seed: seed << 40 },
        };
        let run = TokenRun::right(small_run(seed, &[130, 5], 20), &Policy::production().under(freedom));
        let report = run.gate();
        said::passes(&report, &format!("device {seed}"));
        assert_eq!(report.steps.len(), 42);
    });
}

#[test]
fn an_id_changed_after_it_was_fed_back_is_told_from_a_wrong_choice() {
    let run = emulated();
    let right = run.tokens()[(0, 7)];
    let report = run.gate_with(|captures| values_mut(&mut captures.tokens.token_ids)[(0, 7)] = (right + 1) % 190);
    assert_eq!(failing_steps(&report), [(0, 7)]);
    assert!(note(&report, 0, 7).contains("changed after it was fed back"), "{}", note(&report, 0, 7));
    assert_eq!(said::failing(&report), ["token_ids"]);
    assert_eq!(report.first_divergence.as_deref(), Some("token_ids"));

    // The device that feeds its wrong choice back is at fault there and nowhere else.
    let policy = Policy::production().under(Freedom::Emulated);
    let choose = |row: usize, step: usize, greedy: usize| {
        if (row, step) == (0, 7) { (greedy + 1) % 190 } else { greedy }
    };
    let wrong = TokenRun::play(case(), &policy, |habits| habits.choose = Box::new(choose));
    let report = wrong.gate();
    assert_eq!(failing_steps(&report), [(0, 7)]);
    assert!(note(&report, 0, 7).contains("own logits"), "{}", note(&report, 0, 7));
    assert_eq!(said::failing(&report), ["token_ids"]);
    let report = wrong.gate_with(|captures| (captures.tokens.top2_ids, captures.tokens.top2_logits) = (None, None));
    assert_eq!(failing_steps(&report), [(0, 7)]);
    assert!(note(&report, 0, 7).contains("not the largest logit"), "{}", note(&report, 0, 7));
}

#[test]
fn padding_of_the_vocabulary_is_never_a_token() {
    let policy = Policy::production().under(Freedom::Emulated);
    let choose = |row: usize, step: usize, greedy: usize| {
        if (row, step) == (1, 3) { 195 } else { greedy }
    };
    let run = TokenRun::play(case(), &policy, |habits| habits.choose = Box::new(choose));
    let report = run.gate();
    assert_eq!(failing_steps(&report), [(1, 3)]);
    assert!(note(&report, 1, 3).contains("padding of the vocabulary"), "{}", note(&report, 1, 3));
    assert_eq!(said::failing(&report), ["token_ids"]);
    for id in [-1, 200, i64::MAX] {
        let report = emulated().gate_with(|captures| values_mut(&mut captures.tokens.token_ids)[(1, 3)] = id);
        assert_eq!(failing_steps(&report), [(1, 3)]);
        assert!(note(&report, 1, 3).contains("outside the vocabulary"), "{}", note(&report, 1, 3));
    }
}

#[test]
fn a_stream_of_zeros_fails_at_its_first_step_and_is_followed_one_stage_back() {
    let run = emulated();
    let zero = |captures: &mut Captures| values_mut(&mut captures.tokens.token_ids).fill(0);
    let report = run.gate_with(zero);
    assert_eq!(failing_steps(&report).first(), Some(&(0, 0)));
    let words = said::words(&report);
    assert!(words.contains("every id is 0; one stage back, logits are alive"), "{words}");
    assert!(words.contains("behind the logits"), "{words}");

    let report = run.gate_with(|captures| {
        zero(captures);
        values_mut(&mut captures.tokens.top2_logits).fill(0.0);
    });
    let words = said::words(&report);
    assert!(words.contains("logits are zero") && words.contains("the fault lies in the LM head"), "{words}");

    for (value, word) in [(bf16::ZERO, "zero"), (bf16::NAN, "NaN")] {
        let report = run.gate_with(|captures| {
            zero(captures);
            values_mut(&mut captures.tokens.prefill_hidden).fill(value);
            values_mut(&mut captures.tokens.decode_hidden).fill(value);
        });
        assert_eq!(failing_steps(&report).first(), Some(&(0, 0)));
        let words = said::words(&report);
        assert!(
            words.contains(&format!("hidden states are {word}")) && words.contains("before the LM head"),
            "{words}"
        );
        assert_eq!(report.first_divergence.as_deref(), Some("prefill_hidden"));
    }
}

/// The first tensor that fails of a device with a fault.
fn first_of(report: &CaseReport) -> &str {
    assert_eq!(report.verdict, Verdict::Fail, "{}", said::summary(report));
    report.first_divergence.as_deref().unwrap()
}

#[test]
fn faults_inside_the_layers_are_found() {
    let policy = Policy::production().under(Freedom::Emulated);
    let geometry = case().geometry;

    // Layers 1 and 2 exchanged.
    let run = TokenRun::play(case(), &policy, |habits| habits.layers = vec![0, 2, 1]);
    assert_eq!(first_of(&run.gate()), "k_written_values");

    // Rotated one position late in decode steps.
    let run = TokenRun::play(case(), &policy, |habits| habits.rotated_late = 1);
    let report = run.gate();
    assert_eq!(first_of(&report), "k_written_values");
    assert!(said::words(&report).contains("the key is rotated as position 131, not 130"), "{}", said::words(&report));

    // Attention of the last step misses the tokens of the prompt's second page: they were lost from the block table.
    let before = |_: usize, batch: &mut reference::Batch, _: &mut reference::model::PagedCache| {
        batch.block_table[0][0] = batch.block_table[0][1];
    };
    let run = TokenRun::play(case(), &policy, |habits| habits.before = Box::new(before));
    let report = run.gate();
    assert_eq!(first_of(&report), "k_written_values");
    assert!(!said::words(&report).contains("layer 0"), "{}", said::words(&report));

    // A context that is one token short.
    let before = |_: usize, batch: &mut reference::Batch, cache: &mut reference::model::PagedCache| {
        // The row before this step's reads as it did before it was written: zero keys and values.
        let slot = batch.slot_of(1, batch.seq_lens[1] - 2).unwrap();
        for layer in 0..3 {
            let [_, mut v] = cache.layer_mut(layer).unwrap();
            (0..2).for_each(|head| v.row_mut(cache_row(&geometry, slot, head)).fill(bf16::ZERO));
        }
    };
    let run = TokenRun::play(case(), &policy, |habits| habits.before = Box::new(before));
    assert_eq!(first_of(&run.gate()), "v_written_values");

    // The keys of a head of layer 2 scaled by 1.5 %.
    let report = emulated().gate_with(|captures| {
        let first = (2 * case().pages * 2 * PAGE) as i64;
        written::edit(&mut captures.k_written, &geometry, |rows| {
            for (_, values) in rows.range_mut(first..).filter(|(row, _)| (**row / PAGE as i64) % 2 == 1) {
                values.iter_mut().for_each(|x| *x = bf16::from_f32(x.to_f32() * 1.015));
            }
        });
    });
    assert_eq!(first_of(&report), "k_written_values");
    assert!(said::tensor(&report, "k_written_values").heads_failing.contains(&1));

    // One element of a last state a few steps off.
    let report = emulated().gate_with(|captures| {
        let state = &mut values_mut(&mut captures.tokens.decode_hidden)[(4, 1, 100)];
        *state = bf16::from_f32(state.to_f32() + 1.0);
    });
    assert_eq!(first_of(&report), "decode_hidden");
    assert_eq!(said::tensor(&report, "decode_hidden").rows_failing, [1]);
}

#[test]
fn rows_of_the_caches_are_those_of_the_contract() {
    let run = emulated();
    let geometry = case().geometry;
    let stray = (case().pages * 2 * PAGE - 1) as i64;
    let report = run.gate_with(|captures| {
        written::edit(&mut captures.v_written, &geometry, |rows| {
            rows.insert(stray, vec![bf16::ONE; 64]);
        });
    });
    assert_eq!(first_of(&report), "v_written_rows");
    assert!(
        said::words(&report).contains("1 cache row written that no token of this run has"),
        "{}",
        said::words(&report)
    );
    let report = run.gate_with(|captures| {
        written::edit(&mut captures.k_written, &geometry, |rows| {
            let row = *rows.keys().nth(40).unwrap();
            rows.remove(&row);
        });
    });
    assert_eq!(first_of(&report), "k_written_rows");
    assert!(said::words(&report).contains("1 cache row not written"), "{}", said::words(&report));
}

#[test]
fn one_wrong_bit_of_the_first_layer_or_of_a_logit_is_seen() {
    let run = emulated();
    let geometry = case().geometry;
    for values in [false, true] {
        for nth in [0, 77, 200] {
            let report = run.gate_with(|captures| {
                let cache = if values { &mut captures.v_written } else { &mut captures.k_written };
                written::edit(cache, &geometry, |rows| {
                    let value = &mut rows.values_mut().nth(nth).unwrap()[nth % 64];
                    *value = bf16::from_bits(value.to_bits() + 2);
                });
            });
            let name = if values { "v_written_values" } else { "k_written_values" };
            assert_eq!(first_of(&report), name);
            assert!(said::tensor(&report, name).notes[0].starts_with("layer 0"), "{}", said::words(&report));
        }
    }
    let report = run.gate_with(|captures| values_mut(&mut captures.tokens.top2_logits)[(1, 4, 1)] -= 1e-3);
    assert_eq!(said::failing(&report), ["top2_logits"]);
    let report = run.gate_with(|captures| values_mut(&mut captures.tokens.top2_ids)[(1, 4, 1)] += 1);
    assert!(said::failing(&report).contains(&"top2_ids"));
}

#[test]
fn what_was_not_captured_is_said_and_the_rest_judged() {
    let run = emulated();
    let report = run.gate_with(|captures| captures.tokens.token_ids = None);
    assert_eq!((report.verdict, report.coverage[0].as_str()), (Verdict::Unjudged, "token_ids: not captured"));
    assert!(report.steps.is_empty());

    // Without states the reference's own on the device's history decide, with the spread of sampled devices.
    let stateless = |captures: &mut Captures| {
        (captures.tokens.prefill_hidden, captures.tokens.decode_hidden) = (None, None);
    };
    let report = run.gate_with(stateless);
    said::passes(&report, "without hidden states");
    assert_eq!(report.steps.len(), 26);
    assert!(!said::tensor(&report, "token_ids").forced);
    let bound = report.steps[3].bound.0;
    assert!(bound > 0.0 && bound < 2.0, "{bound}");

    // Without caches the LM head decides alone.
    let report = run.gate_with(|captures| (captures.k_written, captures.v_written) = (None, None));
    said::passes(&report, "without caches");
    assert_eq!(report.steps.len(), 26);
    assert_eq!(said::check(&report, "kv_values").verdict, Verdict::Unjudged);

    let report = run.gate_with(|captures| {
        stateless(captures);
        (captures.k_written, captures.v_written) = (None, None);
    });
    assert_eq!(report.verdict, Verdict::Unjudged);

    let report = run.gate_with(|captures| {
        captures.tokens.top2_logits = Some(Captured::WrongDType { found: "BF16".into(), shape: vec![2, 13, 2] });
    });
    assert_eq!(said::failing(&report), ["top2_logits"]);
}

#[test]
fn at_a_margin_that_freedoms_turn_round_either_token_is_right() {
    let policy = Policy::production().under(Freedom::Emulated);
    let stateless = |captures: &mut Captures| {
        captures.tokens.prefill_hidden = None;
        captures.tokens.decode_hidden = None;
        (captures.tokens.top2_ids, captures.tokens.top2_logits) = (None, None);
    };
    // A run long enough to hold a margin that decides nothing.
    let case = || small_run(3, &[9, 5], 60);
    let right = TokenRun::right(case(), &policy);
    let report = right.gate_with(stateless);
    let closest = report.steps.iter().min_by(|a, b| a.margin.0.total_cmp(&b.margin.0)).unwrap();
    assert!(closest.margin.0 < closest.bound.0, "{closest:?}");
    let (row, step) = (closest.row, closest.step);
    let runner_up = values(&right.captures.tokens.top2_ids)[(row, step, 1)];
    let choose = |r: usize, s: usize, greedy: usize| {
        if (r, s) == (row, step) { runner_up as usize } else { greedy }
    };
    let other = TokenRun::play(case(), &policy, |habits| habits.choose = Box::new(choose));
    let report = other.gate_with(stateless);
    said::passes(&report, "the other token of a near tie");
    let near = report.steps.iter().find(|s| (s.row, s.step) == (row, step)).unwrap();
    assert_eq!(near.verdict, StepVerdict::NearTie);
    assert_eq!(report.steps.len(), 122, "every later step is judged on the device's own tokens");
    assert!(report.coverage.iter().any(|remark| remark.contains("either of two tokens is right")));
    // The device's own state leaves no doubt.
    let report = other.gate();
    assert_eq!(failing_steps(&report), [(row, step)]);
}

#[test]
fn row_0_does_not_depend_on_its_batch() {
    let policy = Policy::production();
    let lengths: Vec<usize> = (0..16).map(|row| if row == 0 { 9 } else { 3 + row % 4 }).collect();
    let run = |rows: usize| TokenRun::right(small_run(11, &lengths[..rows], 10), &policy);
    let (one, two, sixteen) = (run(1), run(2), run(16));
    for other in [&two, &sixteen] {
        assert_eq!(one.tokens().row(0), other.tokens().row(0));
        let (a, b) = (&one.captures.tokens, &other.captures.tokens);
        assert_eq!(values(&a.top2_logits).slice(s![0, .., ..]), values(&b.top2_logits).slice(s![0, .., ..]));
        assert_eq!(values(&a.prefill_hidden).slice(s![..9, ..]), values(&b.prefill_hidden).slice(s![..9, ..]));
        assert_eq!(values(&a.decode_hidden).slice(s![.., 0, ..]), values(&b.decode_hidden).slice(s![.., 0, ..]));
        said::passes(&other.gate(), "a batch");
    }
}

#[test]
fn a_report_does_not_depend_on_threads() {
    let run = emulated();
    let text = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        serde_json::to_string(&pool.install(|| run.gate())).unwrap()
    };
    assert_eq!(text(1), text(3));
}

/// Takes the states and the two caches out of a capture.
fn bare(captures: &mut Captures) {
    (captures.tokens.prefill_hidden, captures.tokens.decode_hidden) = (None, None);
    (captures.k_written, captures.v_written) = (None, None);
}

#[test]
fn one_cache_alone_is_judged_where_it_follows_from_the_tokens() {
    let run = emulated();
    let geometry = case().geometry;
    let alone = |captures: &mut Captures, values: bool| {
        *(if values { &mut captures.k_written } else { &mut captures.v_written }) = None;
    };
    for values in [false, true] {
        let (name, other) = if values { ("v", "k") } else { ("k", "v") };
        let tensor = format!("{name}_written_values");
        let report = run.gate_with(|captures| alone(captures, values));
        said::passes(&report, name);
        assert!(said::tensor(&report, &tensor).elements > 0);
        let detail = &said::check(&report, "kv_values").detail;
        assert!(detail.starts_with(&format!("{other}_written_values: not captured;")), "{detail}");
        let remark = |text: &str| report.coverage.iter().any(|remark| remark.starts_with(text));
        assert!(!remark("prefill_hidden: not captured") && remark("prefill_hidden: captured, but not compared"));
        assert!(remark("prefill: the layers behind the first were not judged"), "{:?}", report.coverage);

        // All NaN, all zero, and one wrong bit of the first layer.
        let edits: [fn(&mut bf16); 3] =
            [|x| *x = bf16::NAN, |x| *x = bf16::ZERO, |x| *x = bf16::from_bits(x.to_bits() + 2)];
        for (n, edit) in edits.into_iter().enumerate() {
            let report = run.gate_with(|captures| {
                alone(captures, values);
                let cache = if values { &mut captures.v_written } else { &mut captures.k_written };
                written::edit(cache, &geometry, |rows| {
                    let some = if n == 2 { 1 } else { usize::MAX };
                    rows.values_mut().flatten().take(some).for_each(edit);
                });
            });
            assert_eq!(first_of(&report), tensor);
            assert_eq!(said::check(&report, "finite").verdict == Verdict::Fail, n == 0, "{}", said::words(&report));
        }

        // Behind the first layer nothing can be compared; what no freedom gives is seen all the same.
        for value in [bf16::INFINITY, bf16::ZERO] {
            let report = run.gate_with(|captures| {
                alone(captures, values);
                let cache = if values { &mut captures.v_written } else { &mut captures.k_written };
                written::edit(cache, &geometry, |rows| rows.values_mut().last().unwrap().fill(value));
            });
            assert_eq!(first_of(&report), tensor);
            let words = said::words(&report);
            assert!(words.contains("layer 2, not finite or all zero, where the reference's own run is not"), "{words}");
            assert_eq!(words.contains("64 numbers are not finite"), !value.is_finite(), "{words}");
        }
    }

    // The token that was fed is read off one cache too.
    let right = run.tokens()[(0, 7)];
    let report = run.gate_with(|captures| {
        bare(captures);
        captures.v_written.clone_from(&run.captures.v_written);
        captures.tokens.top2_logits = None;
        values_mut(&mut captures.tokens.token_ids)[(0, 7)] = (right + 1) % 190;
    });
    assert_eq!(failing_steps(&report), [(0, 7)]);
    assert!(note(&report, 0, 7).contains("changed after it was fed back"), "{}", note(&report, 0, 7));
}

#[test]
fn states_that_nothing_can_be_compared_with_are_finite_and_alive() {
    let run = emulated();
    let (prefill, decode) = ("prefill_hidden", "decode_hidden");
    type Edit = fn(&mut Captures);
    let edits: [(&str, Edit); 4] = [
        (prefill, |captures| values_mut(&mut captures.tokens.prefill_hidden)[(3, 1)] = bf16::NAN),
        (prefill, |captures| values_mut(&mut captures.tokens.prefill_hidden).slice_mut(s![..20, ..]).fill(bf16::ZERO)),
        (decode, |captures| values_mut(&mut captures.tokens.decode_hidden)[(4, 1, 100)] = bf16::INFINITY),
        (decode, |captures| values_mut(&mut captures.tokens.decode_hidden).slice_mut(s![4, 1, ..]).fill(bf16::ZERO)),
    ];
    for (n, (name, edit)) in edits.into_iter().enumerate() {
        let report = run.gate_with(|captures| {
            (captures.k_written, captures.v_written) = (None, None);
            edit(captures);
        });
        assert_eq!(first_of(&report), name, "{}", said::words(&report));
        assert_eq!(said::check(&report, "finite").verdict == Verdict::Fail, n % 2 == 0, "{}", said::words(&report));
        assert!(said::words(&report).contains("where the reference's own run is not"), "{}", said::words(&report));
    }
}

#[test]
fn what_tokens_alone_show_to_be_wrong_fails() {
    let run = emulated();
    for (id, words) in [(-1, "outside the vocabulary of 200"), (99_999, "outside the vocabulary"), (195, "padding")] {
        let report = run.gate_with(|captures| {
            bare(captures);
            values_mut(&mut captures.tokens.token_ids)[(1, 3)] = id;
        });
        assert_eq!((first_of(&report), failing_steps(&report)), ("token_ids", vec![(1, 3)]));
        assert!(note(&report, 1, 3).contains(words), "{}", note(&report, 1, 3));
    }
    let report = run.gate_with(|captures| {
        bare(captures);
        let ids = values_mut(&mut captures.tokens.token_ids);
        ids[(1, 3)] = (ids[(1, 3)] + 1) % 190;
    });
    assert_eq!(failing_steps(&report), [(1, 3)]);
    assert!(note(&report, 1, 3).contains("own logits"), "{}", note(&report, 1, 3));

    type Edit = fn(&mut Captures);
    let edits: [(&str, Edit); 4] = [
        ("top2_ids", |captures| values_mut(&mut captures.tokens.top2_ids)[(0, 5, 1)] = 195),
        ("top2_ids", |captures| {
            let ids = values_mut(&mut captures.tokens.top2_ids);
            ids[(0, 5, 1)] = ids[(0, 5, 0)];
        }),
        ("top2_ids", |captures| values_mut(&mut captures.tokens.top2_logits).swap((0, 5, 0), (0, 5, 1))),
        ("top2_logits", |captures| values_mut(&mut captures.tokens.top2_logits).fill(f32::NAN)),
    ];
    for (name, edit) in edits {
        let report = run.gate_with(|captures| {
            bare(captures);
            edit(captures);
        });
        assert_eq!(said::failing(&report), [name], "{}", said::words(&report));
        assert_eq!(said::check(&report, "finite").verdict == Verdict::Fail, name == "top2_logits");
    }

    // One id throughout is no fault by itself: it is said, and nothing is judged.
    let report = run.gate_with(|captures| {
        bare(captures);
        (captures.tokens.top2_ids, captures.tokens.top2_logits) = (None, None);
        values_mut(&mut captures.tokens.token_ids).fill(3);
    });
    assert_eq!(report.verdict, Verdict::Unjudged);
    assert!(report.coverage.iter().any(|remark| remark.contains("every id is 3")), "{:?}", report.coverage);
}

#[test]
fn numbers_that_the_inputs_make_infinite_do_not_fail() {
    // The gamma of the final norm at the end of the range: the normed states overflow.
    let mut case = small_run(5, &[9, 5], 4);
    let huge = cases::Recipe::new(cases::RecipeKind::Normal { mean: 3e38, std: 1e36, bf16: true });
    case.tensors.insert(cases::Input::FinalNormWeight, huge);
    let run = TokenRun::right(case, &Policy::production().under(Freedom::Emulated));
    let captured = values(&run.captures.tokens.top2_logits);
    assert!(captured.iter().any(|x| !x.is_finite()), "the case is to make infinities");
    let report = run.gate();
    let finite = said::check(&report, "finite");
    assert_eq!(finite.verdict, Verdict::Pass, "{}", finite.detail);
    assert!(finite.detail.contains("the inputs make the reference so too"), "{}", finite.detail);
}

#[test]
fn ids_are_shown_as_ids() {
    let run = emulated();
    let id = i64::MAX - 1;
    let report = run.gate_with(|captures| values_mut(&mut captures.tokens.token_ids)[(1, 3)] = id);
    let worst = said::tensor(&report, "token_ids").worst.clone().unwrap();
    assert_eq!((&*worst.device_bits, worst.ulps), ("0x7ffffffffffffffe", None));
    assert_eq!(worst.reference_bits, format!("0x{:016x}", run.tokens()[(1, 3)]));
    let wrong = run.gate_with(|captures| {
        captures.tokens.token_ids = Some(Captured::WrongDType { found: "INT32".into(), shape: vec![2, 13] });
    });
    let read = serde_json::to_value(&wrong).unwrap();
    assert_eq!(read["steps"], serde_json::json!([]));
}

#[test]
fn a_request_looks_at_some_tensors_only() {
    let run = emulated();
    let report = run.gate_only(&["token_ids", "prefill_hidden", "decode_hidden"]);
    said::passes(&report, "tokens and states");
    assert_eq!(report.steps.len(), 26);
    let asked = "looked at as asked: prefill_hidden, decode_hidden, token_ids; every other";
    assert!(report.coverage[0].starts_with(asked), "{:?}", report.coverage);
    // What is hidden by the request is not missing.
    let report = run.gate_only(&["k_written_rows", "v_written_values"]);
    said::passes(&report, "caches");
    assert_eq!(report.tensors.len(), 4);
    assert_eq!(run.gate_only(&["token_ids"]).verdict, Verdict::Unjudged);
    assert_eq!(run.gate_only(&["prefill_hidden"]).verdict, Verdict::Unjudged);
    assert_eq!(run.gate_only(&["out"]).verdict, Verdict::Unjudged);
}

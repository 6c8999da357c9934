use ndarray::{Axis, s};

use super::*;
use crate::elementary::{exp, inverse_sqrt};
use crate::kernels::SumOrder;
use crate::policy::{Freedom, Site};
use crate::rounding::{Rounding, round_f32};
use crate::small::{Small, small, tables};

/// The last layer's output and the cache after the chunks of `prompts` that end at `ends`, one call after the other.
fn run(prompts: &[(&[usize], &[i32])], ends: &[usize], policy: &Policy) -> (Vec<Array2<bf16>>, PagedCache) {
    let (model, [cos, sin]) = (small(), tables());
    let mut cache = PagedCache::new(&model.geometry, 8).unwrap();
    let mut outputs = vec![Array2::from_elem((0, 24), bf16::ZERO); prompts.len()];
    let mut start = 0;
    for &end in ends {
        let mut rows = vec![];
        let mut chunks = vec![];
        for (row, (tokens, pages)) in prompts.iter().enumerate() {
            if start < tokens.len() {
                rows.push(row);
                chunks.push(Prompt { tokens: &tokens[start..end.min(tokens.len())], start, pages });
            }
        }
        let out = prefill(&model, &chunks, cos.view(), sin.view(), policy, &mut cache, &mut |_, _| ()).unwrap();
        let mut at = 0;
        for (row, chunk) in rows.iter().zip(&chunks) {
            outputs[*row].append(Axis(0), out.slice(s![at..at + chunk.tokens.len(), ..])).unwrap();
            at += chunk.tokens.len();
        }
        start = end;
    }
    (outputs, cache)
}

fn prompt(seed: usize, length: usize) -> Vec<usize> {
    (0..length).map(|i| (i * 7 + seed + i * i) % 18).collect()
}

/// The contract's prefill of one prompt, a token at a time, in plain loops and the canonical order of sums.
fn written_out(model: &Small, tokens: &[usize], policy: &Policy) -> Vec<Vec<f32>> {
    let at = |site, value| round_f32(value, policy.at(site));
    let sum = |n: usize, term: &dyn Fn(usize) -> f32| SumOrder::Canonical.sum(n, term);
    let inverse_rms =
        |x: &[f32]| inverse_sqrt(sum(x.len(), &|i| x[i] * x[i]) * (1.0 / x.len() as f32) + 1e-6, Freedom::Canonical);
    let int8 = |x: &[f32]| {
        let amax = x.iter().fold(1e-4f32, |most, x| most.max(x.abs()));
        let codes: Vec<i32> =
            x.iter().map(|x| (x * (127.0 / amax)).round_ties_even().clamp(-127.0, 127.0) as i32).collect();
        (codes, amax / 127.0)
    };
    let [cos, sin] = tables();
    let mut x: Vec<Vec<f32>> =
        tokens.iter().map(|&id| model.table.row(id).iter().map(|x| x.to_f32()).collect()).collect();
    for layer in 0..2 {
        let w = model.layer(layer).unwrap();
        let (mut keys, mut values) = (vec![], vec![]);
        for (position, x) in x.iter_mut().enumerate() {
            let inv = inverse_rms(x);
            let normed: Vec<f32> = (0..24).map(|i| at(Site::Normed, (x[i] * inv) * w.input_rms_weight[i])).collect();
            let (codes, act) = int8(&normed);
            let project = |codes: &[i32], act: f32, weight: ArrayView2<'_, i8>, scale: &[f32]| -> Vec<f32> {
                let acc = |n: usize| (0..codes.len()).map(|k| codes[k] * i32::from(weight[(k, n)])).sum::<i32>();
                (0..weight.ncols()).map(|n| (acc(n) as f32 * scale[n]) * act).collect()
            };
            let q = project(&codes, act, w.wq, &w.wq_scale.to_vec());
            let k = project(&codes, act, w.wk, &w.wk_scale.to_vec());
            let v = project(&codes, act, w.wv, &w.wv_scale.to_vec());
            let rotated = |z: &[f32], gamma: &[f32], site| -> Vec<f32> {
                let mut out = vec![];
                for head in z.chunks(6) {
                    let inv = inverse_rms(head);
                    let n: Vec<f32> = head.iter().zip(gamma).map(|(z, gamma)| (z * inv) * gamma).collect();
                    for j in 0..6 {
                        let (c, s) = (cos[(position, j)], sin[(position, j)]);
                        let turned = if j < 3 { n[j] * c - n[j + 3] * s } else { n[j] * c + n[j - 3] * s };
                        out.push(at(site, turned));
                    }
                }
                out
            };
            let q = rotated(&q, &w.q_norm_weight.to_vec(), Site::Q);
            keys.push(rotated(&k, &w.k_norm_weight.to_vec(), Site::KCache));
            values.push(v.iter().map(|v| at(Site::VCache, *v)).collect::<Vec<f32>>());

            let mut attn = vec![];
            for (head, q) in q.chunks(6).enumerate() {
                let columns = head / 2 * 6..head / 2 * 6 + 6;
                let (mut m, mut l, mut o) = (f32::NEG_INFINITY, 0f32, vec![0f32; 6]);
                for (tile, (keys, values)) in keys.chunks(128).zip(values.chunks(128)).enumerate() {
                    let score = |key: &[f32]| sum(6, &|d| q[d] * key[d]) * (6f32).powf(-0.5);
                    let s: Vec<f32> = keys.iter().map(|key| score(&key[columns.clone()])).collect();
                    let m_t = s.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let p: Vec<f32> = s.iter().map(|s| at(Site::Prob, exp(s - m_t, Freedom::Canonical))).collect();
                    let l_t = p.iter().fold(0f32, |l, p| l + p);
                    let weighted = |d: usize| p.iter().zip(values).fold(0f32, |o, (p, v)| o + p * v[columns.start + d]);
                    let o_t: Vec<f32> = (0..6).map(weighted).collect();
                    if tile == 0 {
                        (m, l, o) = (m_t, l_t, o_t);
                        continue;
                    }
                    let larger = m.max(m_t);
                    let (a, c) = (exp(m - larger, Freedom::Canonical), exp(m_t - larger, Freedom::Canonical));
                    l = a * l + c * l_t;
                    o = o.iter().zip(&o_t).map(|(o, o_t)| o * a + o_t * c).collect();
                    m = larger;
                }
                attn.extend(o.iter().map(|o| at(Site::Attn, o / l)));
            }
            let (codes, act) = int8(&attn);
            let proj = project(&codes, act, w.wo, &w.wo_scale.to_vec());
            let h1: Vec<f32> = proj.iter().zip(&*x).map(|(proj, x)| proj + x).collect();
            let inv = inverse_rms(&h1);
            let mlp_in: Vec<f32> = (0..24).map(|i| at(Site::MlpIn, (h1[i] * inv) * w.post_rms_weight[i])).collect();
            // All of K is one chunk of 128 in this model.
            let narrowed = |weight: ArrayView2<'_, i8>, scale: &[f32], k: usize, n: usize| {
                round_f32(f32::from(weight[(k, n)]) * scale[n], Rounding::Rne)
            };
            let dense = |x: &[f32], weight: ArrayView2<'_, i8>, scale: &[f32]| -> Vec<f32> {
                (0..weight.ncols()).map(|n| sum(x.len(), &|k| x[k] * narrowed(weight, scale, k, n))).collect()
            };
            let g = dense(&mlp_in, w.w_gate, &w.w_gate_scale.to_vec());
            let u = dense(&mlp_in, w.w_up, &w.w_up_scale.to_vec());
            let sig = |g: f32| 1.0 / (exp(-g, Freedom::Canonical) + 1.0);
            let act: Vec<f32> = g.iter().zip(&u).map(|(g, u)| at(Site::Silu, (g * sig(*g)) * u)).collect();
            let crate::DownWeight::Int8 { codes, scale } = w.w_down else { unreachable!() };
            let d = dense(&act, codes, &scale.to_vec());
            *x = d.iter().zip(&h1).map(|(d, h1)| at(Site::Out, d + h1)).collect();
        }
    }
    x
}

#[test]
fn every_step_is_what_the_contract_says() {
    let tokens = prompt(3, 150);
    for policy in [Policy::rne(), Policy::production()] {
        let (outputs, _) = run(&[(&tokens, &[5, 2])], &[150], &policy);
        let expected = written_out(&small(), &tokens, &policy);
        for ((token, i), value) in outputs[0].indexed_iter() {
            assert_eq!(value.to_f32().to_bits(), expected[token][i].to_bits(), "token {token}, element {i}");
        }
    }
}

#[test]
fn chunks_and_companions_change_no_bit() {
    let (first, second) = (prompt(1, 140), prompt(2, 9));
    let policy = Policy::production();
    let (whole, cache) = run(&[(&first, &[1, 4]), (&second, &[0, -1])], &[140], &policy);
    let (pieces, other) = run(&[(&first, &[1, 4]), (&second, &[0])], &[1, 9, 127, 129, 140], &policy);
    assert_eq!(whole, pieces);
    for layer in 0..2 {
        let (a, b) = (cache.layer(layer).unwrap(), other.layer(layer).unwrap());
        assert_eq!((a.k, a.v), (b.k, b.v));
    }
    let (alone, _) = run(&[(&second, &[7])], &[9], &policy);
    assert_eq!(alone[0], whole[1]);
    // A token sees those before it and none after it.
    let mut changed = first.clone();
    changed[100] = (changed[100] + 1) % 18;
    let (after, _) = run(&[(&changed, &[1, 4])], &[140], &policy);
    assert_eq!(after[0].slice(s![..100, ..]), whole[0].slice(s![..100, ..]));
    assert!((100..140).all(|token| after[0].row(token) != whole[0].row(token)));
}

#[test]
fn what_does_not_fit_is_refused_before_anything_runs() {
    let (model, [cos, sin], policy) = (small(), tables(), Policy::rne());
    let refusal = |prompts: &[Prompt<'_>]| {
        let mut cache = PagedCache::new(&model.geometry, 2).unwrap();
        let error = prefill(&model, prompts, cos.view(), sin.view(), &policy, &mut cache, &mut |_, _| ()).unwrap_err();
        assert!(cache.layer(0).unwrap().k.iter().all(|x| *x == bf16::ZERO));
        error
    };
    let good = Prompt { tokens: &[1, 2], start: 0, pages: &[0] };
    assert_eq!(refusal(&[good, Prompt { tokens: &[], ..good }]), ModelError::EmptyPrompt { row: 1 });
    let token = ModelError::Token { row: 1, id: 18, vocabulary: 18 };
    assert_eq!(refusal(&[good, Prompt { tokens: &[1, 18], pages: &[1], ..good }]), token);
    assert_eq!(refusal(&[good, good]), ModelError::SharedSlot { slot: 0, rows: [0, 1] });
    let missing = ModelError::NoPage { row: 0, block: 1, context: 129 };
    assert_eq!(refusal(&[Prompt { start: 127, ..good }]), missing);
    assert_eq!(refusal(&[Prompt { start: 127, pages: &[0, -1], ..good }]), missing);
    let beyond = ModelError::BeyondCache { row: 0, what: "page", index: 2, pages: 2 };
    assert_eq!(refusal(&[Prompt { pages: &[2], ..good }]), beyond);
    let position = ModelError::Position { row: 0, position: 200, rows: 200 };
    assert_eq!(refusal(&[Prompt { start: 199, pages: &[0, 1], ..good }]), position);
}

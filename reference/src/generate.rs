//! Greedy decoding of 1 to 16 prompts: prefill, then decode steps of all layers with the rows that still run, padded to
//! 16 as in serving. A row's tokens do not depend on the rows beside it.

use half::bf16;
use ndarray::{Array2, ArrayView1, Axis};
use thiserror::Error;

use crate::geometry::{BATCH, PAGE};
use crate::head::{GreedyError, final_norm, lm_head};
use crate::inputs::Batch;
use crate::model::{ModelError, PagedCache, Step, Weights, decode_step};
use crate::policy::Policy;
use crate::prefill::{Prompt, prefill};

/// Candidates that a [`Choice`] keeps.
pub const TOP: usize = 8;
/// Tokens of each prompt that go through prefill together; what is in memory at a time depends on it, results do not.
const CHUNK: usize = PAGE;

/// Sees row, step and logits of a choice.
type Observe<'a> = &'a mut dyn FnMut(usize, usize, ArrayView1<'_, f32>);

/// What the logits of one position say.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The [`TOP`] largest logits of the real vocabulary with their ids, largest first, of equal ones the lower id first.
    pub top: Vec<(usize, f32)>,
}

impl Choice {
    /// The choice among the first `real_vocab_size` logits.
    ///
    /// # Errors
    /// A logit of the real vocabulary is NaN or infinite, or there is none.
    pub fn of(logits: ArrayView1<'_, f32>, real_vocab_size: usize) -> Result<Self, GreedyError> {
        let mut top: Vec<(usize, f32)> = Vec::with_capacity(TOP + 1);
        for (id, &logit) in logits.iter().take(real_vocab_size).enumerate() {
            if logit.is_nan() {
                return Err(GreedyError::NaN { id });
            }
            if logit.is_infinite() {
                return Err(GreedyError::Infinite { id });
            }
            if top.len() < TOP || top.last().is_some_and(|last| logit > last.1) {
                let at = top.partition_point(|better| better.1 >= logit);
                top.insert(at, (id, logit));
                top.truncate(TOP);
            }
        }
        if top.is_empty() { Err(GreedyError::Empty) } else { Ok(Self { top }) }
    }

    /// The greedy token: the lowest id of the largest logit.
    #[must_use]
    pub fn token(&self) -> usize {
        self.top.first().map_or(0, |best| best.0)
    }

    /// How far the largest logit lies above the second; infinite where there is no second.
    #[must_use]
    pub fn margin(&self) -> f32 {
        match self.top.as_slice() {
            [(_, best), (_, second), ..] => best - second,
            _ => f32::INFINITY,
        }
    }

    /// How far the largest logit lies above that of `id`, where `id` is among the candidates kept.
    #[must_use]
    pub fn gap(&self, id: usize) -> Option<f32> {
        let best = self.top.first()?.1;
        self.top.iter().find(|candidate| candidate.0 == id).map(|candidate| best - candidate.1)
    }
}

/// When a row ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens that a row may generate, at least 1.
    pub max_new_tokens: usize,
    /// Tokens that a row may have, its prompt included.
    pub max_seq_len: usize,
    /// Ids after which a row ends; the id itself is kept.
    pub stop_ids: Vec<usize>,
}

/// Why a row ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It generated a stop id.
    StopId(usize),
    /// It has as many new tokens as were asked for.
    MaxNewTokens,
    /// Prompt and new tokens are as many as a row may have.
    MaxSeqLen,
    /// Every forced token has been judged.
    Forced,
}

/// A row of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    /// Token ids of the prompt.
    pub prompt: Vec<usize>,
    /// Somebody else's tokens, fed in place of the choices; the run gives one choice for each.
    pub forced: Option<Vec<usize>>,
    /// The choice of each step so far, the first from prefill.
    pub choices: Vec<Choice>,
    /// Why the row ended; `None` while it runs.
    pub stop: Option<Stop>,
}

impl Sequence {
    /// The tokens generated so far: the choices, whatever was fed.
    #[must_use]
    pub fn tokens(&self) -> Vec<usize> {
        self.choices.iter().map(Choice::token).collect()
    }

    /// The token that the next step decodes.
    fn last(&self) -> Option<usize> {
        let index = self.choices.len().checked_sub(1)?;
        match &self.forced {
            Some(forced) => forced.get(index).copied(),
            None => Some(self.choices[index].token()),
        }
    }

    /// Whether the row ends with the choices it has.
    fn ended(&self, limits: &Limits) -> Option<Stop> {
        let generated = self.choices.len();
        if let Some(forced) = &self.forced {
            return (generated >= forced.len()).then_some(Stop::Forced);
        }
        let last = self.choices.last()?.token();
        if limits.stop_ids.contains(&last) {
            Some(Stop::StopId(last))
        } else if generated >= limits.max_new_tokens {
            Some(Stop::MaxNewTokens)
        } else {
            (self.prompt.len() + generated >= limits.max_seq_len).then_some(Stop::MaxSeqLen)
        }
    }
}

/// Why a run cannot begin or go on.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
pub enum GenerateError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("prompt {row}, step {step}: {source}; look at the weights for NaN and infinities")]
    Choice { row: usize, step: usize, source: GreedyError },
    #[error("{0} prompts; a batch has 1 to {BATCH}")]
    Prompts(usize),
    #[error("max_new_tokens is 0; a run gives at least one token")]
    NoTokens,
    #[error("prompt {row}: its length of {length} leaves no room for a new token in max_seq_len {most}")]
    TooLong { row: usize, length: usize, most: usize },
    #[error("prompt {row}: {found} tokens are forced upon it, expected 1 to {most}")]
    Forced { row: usize, found: usize, most: usize },
    #[error("prompt {row}: no run of this request can have stood there")]
    Resume { row: usize },
    #[error("prompt {row}: there is no such prompt to force tokens upon before the run begins")]
    NoRow { row: usize },
}

/// A greedy run, one step at a time.
#[derive(Debug)]
pub struct Decoder<'w, W> {
    weights: &'w W,
    rope: [Array2<f32>; 2],
    policy: Policy,
    limits: Limits,
    cache: PagedCache,
    /// Pages of each row.
    pages: Vec<Vec<i32>>,
    sequences: Vec<Sequence>,
    /// Tokens of each prompt that are in the cache, while prefill runs.
    prefilled: usize,
}

impl<'w, W: Weights> Decoder<'w, W> {
    /// A run that has not begun. `rope` holds cosines and sines, FP32 `[max_seq_len or more, D]`.
    ///
    /// # Errors
    /// No prompt or more than 16, a prompt that is empty or leaves no room for a token, an id outside the vocabulary, a
    /// cache that does not fit the memory.
    pub fn new(
        weights: &'w W,
        rope: [Array2<f32>; 2],
        prompts: Vec<Vec<usize>>,
        limits: Limits,
        policy: Policy,
    ) -> Result<Self, GenerateError> {
        if !(1..=BATCH).contains(&prompts.len()) {
            return Err(GenerateError::Prompts(prompts.len()));
        }
        if limits.max_new_tokens == 0 {
            return Err(GenerateError::NoTokens);
        }
        let (geometry, mut pages, mut next) = (weights.geometry(), Vec::new(), 0);
        for (row, prompt) in prompts.iter().enumerate() {
            if prompt.is_empty() {
                return Err(ModelError::EmptyPrompt { row }.into());
            }
            if let Some(&id) = prompt.iter().find(|id| **id >= geometry.real_vocab_size) {
                return Err(ModelError::Token { row, id, vocabulary: geometry.real_vocab_size }.into());
            }
            if prompt.len() >= limits.max_seq_len {
                return Err(GenerateError::TooLong { row, length: prompt.len(), most: limits.max_seq_len });
            }
            let longest = prompt.len().saturating_add(limits.max_new_tokens).min(limits.max_seq_len);
            if longest > rope[0].nrows() {
                let rows = rope[0].nrows();
                return Err(ModelError::Position { row, position: longest - 1, rows }.into());
            }
            let blocks = longest.div_ceil(PAGE);
            pages.push((next..next + blocks).map(|page| page as i32).collect());
            next += blocks;
        }
        let sequence = |prompt| Sequence { prompt, forced: None, choices: Vec::new(), stop: None };
        Ok(Self {
            cache: PagedCache::new(geometry, next)?,
            sequences: prompts.into_iter().map(sequence).collect(),
            prefilled: 0,
            weights,
            rope,
            policy,
            limits,
            pages,
        })
    }

    /// Feeds `tokens` to a row in place of its own choices; the row then runs until there is a choice for each of them,
    /// stop ids or not. Before the first step.
    ///
    /// # Errors
    /// No such row, no tokens, or more than the run's limits leave room for; an id outside the vocabulary that would have
    /// to be fed (the last one is not).
    pub fn force(&mut self, row: usize, tokens: Vec<usize>) -> Result<(), GenerateError> {
        let vocabulary = self.weights.geometry().real_vocab_size;
        let begun = self.prefilled > 0;
        let sequence = self.sequences.get_mut(row).filter(|_| !begun).ok_or(GenerateError::NoRow { row })?;
        let most = self.limits.max_new_tokens.min(self.limits.max_seq_len - sequence.prompt.len());
        if !(1..=most).contains(&tokens.len()) {
            return Err(GenerateError::Forced { row, found: tokens.len(), most });
        }
        if let Some(&id) = tokens[..tokens.len() - 1].iter().find(|id| **id >= vocabulary) {
            return Err(ModelError::Token { row, id, vocabulary }.into());
        }
        sequence.forced = Some(tokens);
        Ok(())
    }

    /// The rows.
    #[must_use]
    pub fn sequences(&self) -> &[Sequence] {
        &self.sequences
    }

    /// The cache as the steps so far have left it.
    #[must_use]
    pub fn cache(&self) -> &PagedCache {
        &self.cache
    }

    /// Tokens of each prompt that are in the cache, as far as the prompt goes.
    #[must_use]
    pub fn prefilled(&self) -> usize {
        self.prefilled
    }

    /// Takes up a run where another one of the same weights, prompts, limits and policy stood: the choices of each row,
    /// what [`Decoder::prefilled`] said, and, written by `fill`, its cache.
    ///
    /// # Errors
    /// No run with these prompts and limits can have stood there; nothing is changed then.
    pub fn resume(
        &mut self,
        choices: Vec<Vec<Choice>>,
        prefilled: usize,
        fill: impl FnOnce(&mut PagedCache),
    ) -> Result<(), GenerateError> {
        let vocabulary = self.weights.geometry().real_vocab_size;
        let mut sequences = self.sequences.clone();
        if choices.len() != sequences.len() {
            return Err(GenerateError::Resume { row: choices.len().min(sequences.len()) });
        }
        for (row, (sequence, choices)) in sequences.iter_mut().zip(choices).enumerate() {
            for choice in choices {
                let known = !choice.top.is_empty() && choice.top.iter().all(|&(id, _)| id < vocabulary);
                if !known || sequence.stop.is_some() {
                    return Err(GenerateError::Resume { row });
                }
                sequence.choices.push(choice);
                sequence.stop = sequence.ended(&self.limits);
            }
            if sequence.choices.is_empty() != (prefilled < sequence.prompt.len()) {
                return Err(GenerateError::Resume { row });
            }
        }
        self.sequences = sequences;
        self.prefilled = prefilled;
        fill(&mut self.cache);
        Ok(())
    }

    /// Goes on by a chunk of the prompts, or, when all are in the cache, by a token of every row that still runs. False,
    /// and nothing done, when none does.
    ///
    /// # Errors
    /// A logit is NaN or infinite: the row and the step.
    pub fn advance(&mut self) -> Result<bool, GenerateError> {
        self.advance_observed(&mut |_, _, _| {})
    }

    /// As [`Decoder::advance`]; `observe` sees row, step and logits, FP32 `[vocab]`, of each choice before they are dropped.
    ///
    /// # Errors
    /// As [`Decoder::advance`].
    pub fn advance_observed(&mut self, observe: Observe<'_>) -> Result<bool, GenerateError> {
        let longest = self.sequences.iter().map(|sequence| sequence.prompt.len()).max().unwrap_or(0);
        if self.prefilled < longest {
            self.prefill(observe)?;
        } else {
            let running: Vec<usize> = (0..self.sequences.len()).filter(|&r| self.sequences[r].stop.is_none()).collect();
            if running.is_empty() {
                return Ok(false);
            }
            self.decode(&running, observe)?;
        }
        Ok(true)
    }

    /// The next chunk of every prompt that is not in the cache yet. A prompt's last token gives its first choice.
    fn prefill(&mut self, observe: Observe<'_>) -> Result<(), GenerateError> {
        let start = self.prefilled;
        let rows: Vec<usize> = (0..self.sequences.len()).filter(|&r| self.sequences[r].prompt.len() > start).collect();
        let chunk = |row: usize| {
            let prompt = &self.sequences[row].prompt;
            Prompt { tokens: &prompt[start..prompt.len().min(start + CHUNK)], start, pages: &self.pages[row] }
        };
        let prompts: Vec<Prompt<'_>> = rows.iter().map(|&row| chunk(row)).collect();
        let [cos, sin] = &self.rope;
        let cache = &mut self.cache;
        let hidden = prefill(self.weights, &prompts, cos.view(), sin.view(), &self.policy, cache, &mut |_, _| {})?;
        let (mut ended, mut last, mut end) = (Vec::new(), Vec::new(), 0);
        for (&row, prompt) in rows.iter().zip(&prompts) {
            end += prompt.tokens.len();
            if start + prompt.tokens.len() == self.sequences[row].prompt.len() {
                ended.push(row);
                last.push(end - 1);
            }
        }
        self.prefilled = start + CHUNK;
        self.choose(&ended, hidden.select(Axis(0), &last), observe)
    }

    /// One decode step of the rows that still run.
    fn decode(&mut self, running: &[usize], observe: Observe<'_>) -> Result<(), GenerateError> {
        let mut batch =
            Batch { active: running.len(), seq_lens: [0; BATCH], block_table: Vec::new(), slots: [0; BATCH] };
        for b in 0..BATCH {
            let row = running[if b < running.len() { b } else { 0 }];
            let sequence = &self.sequences[row];
            let context = sequence.prompt.len() + sequence.choices.len();
            batch.seq_lens[b] = context;
            batch.block_table.push(self.pages[row].clone());
            let block = (context - 1) / PAGE;
            batch.slots[b] = batch.slot_of(b, context - 1).ok_or(ModelError::NoPage { row, block, context })?;
        }
        let tokens: Vec<usize> = running.iter().filter_map(|&row| self.sequences[row].last()).collect();
        let [cos, sin] = &self.rope;
        let step = Step { batch: &batch, rope_cos: cos.view(), rope_sin: sin.view(), policy: &self.policy };
        let decoded = decode_step(self.weights, &tokens, &step, &mut self.cache, &mut |_, _| {})?;
        self.take(running, &decoded.logits, observe)
    }

    /// The choices that follow the last layer's output of some rows.
    fn choose(&mut self, rows: &[usize], hidden: Array2<bf16>, observe: Observe<'_>) -> Result<(), GenerateError> {
        if rows.is_empty() {
            return Ok(());
        }
        let (weights, eps) = (self.weights, self.weights.geometry().rms_norm_eps);
        let normed = final_norm(hidden.view(), weights.final_norm(), eps, self.policy.freedom);
        self.take(rows, &lm_head(normed.view(), weights.lm_head(), &self.policy), observe)
    }

    /// Keeps the choice of each row, `logits` being FP32 `[rows, vocab]`.
    fn take(&mut self, rows: &[usize], logits: &Array2<f32>, observe: Observe<'_>) -> Result<(), GenerateError> {
        let vocabulary = self.weights.geometry().real_vocab_size;
        for (logits, &row) in logits.rows().into_iter().zip(rows) {
            let sequence = &mut self.sequences[row];
            let step = sequence.choices.len();
            let choice = Choice::of(logits, vocabulary);
            observe(row, step, logits);
            sequence.choices.push(choice.map_err(|source| GenerateError::Choice { row, step, source })?);
            sequence.stop = sequence.ended(&self.limits);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head::greedy;
    use crate::small::{Small, small, tables};
    use ndarray::Array1;
    use proptest::prelude::*;

    fn limits(max_new_tokens: usize, max_seq_len: usize, stop_ids: &[usize]) -> Limits {
        Limits { max_new_tokens, max_seq_len, stop_ids: stop_ids.to_vec() }
    }

    fn decoder<'w>(model: &'w Small, prompts: &[Vec<usize>], limits: Limits) -> Decoder<'w, Small> {
        Decoder::new(model, tables(), prompts.to_vec(), limits, Policy::production()).unwrap()
    }

    fn finish(mut decoder: Decoder<'_, Small>) -> Vec<Sequence> {
        while decoder.advance().unwrap() {}
        decoder.sequences.clone()
    }

    fn prompts(count: usize) -> Vec<Vec<usize>> {
        (0..count).map(|row| (0..2 + 5 * row % 11).map(|i| (3 * row + i * i) % 18).collect()).collect()
    }

    proptest! {
        #[test]
        fn candidates_are_the_largest_logits(logits in prop::collection::vec(-3i8..3, 1..40), real in 1usize..50) {
            let values = Array1::from_iter(logits.iter().map(|&l| f32::from(l)));
            let choice = Choice::of(values.view(), real).unwrap();
            let mut sorted: Vec<(usize, f32)> = values.iter().copied().take(real).enumerate().collect();
            sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            sorted.truncate(TOP);
            prop_assert_eq!(&choice.top, &sorted);
            prop_assert_eq!(choice.token(), greedy(values.view(), real).unwrap());
        }
    }

    #[test]
    fn no_choice_is_made_among_logits_that_are_no_numbers() {
        let of = |logit| Choice::of(ndarray::array![1.0, logit, logit].view(), 2);
        assert_eq!(of(f32::NAN), Err(GreedyError::NaN { id: 1 }));
        assert_eq!(of(f32::INFINITY), Err(GreedyError::Infinite { id: 1 }));
        assert_eq!(of(f32::NEG_INFINITY), Err(GreedyError::Infinite { id: 1 }));
        // What is padding of the vocabulary is no choice.
        assert_eq!(Choice::of(ndarray::array![1.0, f32::INFINITY].view(), 1).unwrap().top, [(0, 1.0)]);
        assert_eq!(Choice::of(ndarray::array![1.0, f32::MAX].view(), 2).unwrap().token(), 1);
    }

    #[test]
    fn a_row_ends_at_an_infinite_logit_by_row_step_and_id() {
        let mut model = small();
        model.table[(3, 0)] = bf16::INFINITY;
        let mut run = decoder(&model, &[vec![1, 2], vec![4]], limits(6, 200, &[]));
        let source = GreedyError::Infinite { id: 3 };
        assert_eq!(run.advance(), Err(GenerateError::Choice { row: 0, step: 0, source }));
    }

    #[test]
    fn a_rows_tokens_do_not_depend_on_its_batch() {
        let model = small();
        let all = prompts(16);
        let together = finish(decoder(&model, &all, limits(6, 200, &[])));
        for count in [1, 2] {
            let some = finish(decoder(&model, &all[..count], limits(6, 200, &[])));
            assert_eq!(some, together[..count]);
        }
        assert!(together.iter().all(|row| row.choices.len() == 6 && row.stop == Some(Stop::MaxNewTokens)));
        assert!(together.windows(2).any(|pair| pair[0].tokens() != pair[1].tokens()));
    }

    #[test]
    fn each_limit_ends_a_row_and_the_others_go_on() {
        let model = small();
        let (all, free) = (prompts(3), finish(decoder(&small(), &prompts(3), limits(8, 200, &[]))));
        let stop = free[1].tokens()[2];
        let stopped = finish(decoder(&model, &all, limits(8, 200, &[stop])));
        for (row, free) in stopped.iter().zip(&free) {
            let end = free.tokens().iter().position(|id| *id == stop).map_or(8, |at| at + 1);
            assert_eq!(row.choices, free.choices[..end]);
            assert_eq!(row.stop, Some(if end < 8 { Stop::StopId(stop) } else { Stop::MaxNewTokens }));
        }
        let most = all[2].len() + 3;
        let short = finish(decoder(&model, &all, limits(8, most, &[])));
        assert_eq!((short[2].choices.len(), short[2].stop), (3, Some(Stop::MaxSeqLen)));
        assert_eq!(short[2].choices, free[2].choices[..3]);
    }

    #[test]
    fn forced_tokens_are_fed_and_every_one_gets_a_choice() {
        let model = small();
        let all = prompts(2);
        let free = finish(decoder(&model, &all, limits(6, 200, &[])));
        let mut same = decoder(&model, &all, limits(6, 200, &free[0].tokens()[..1]));
        for (row, sequence) in free.iter().enumerate() {
            same.force(row, sequence.tokens()).unwrap();
        }
        let same = finish(same);
        assert!(same.iter().zip(&free).all(|(a, b)| a.choices == b.choices && a.stop == Some(Stop::Forced)));
        let mut tokens = free[0].tokens();
        tokens[2] = (tokens[2] + 1) % 18;
        let mut other = decoder(&model, &all, limits(6, 200, &[]));
        other.force(0, tokens).unwrap();
        let other = finish(other);
        assert_eq!(other[0].choices[..3], free[0].choices[..3]);
        assert!((3..6).all(|step| other[0].choices[step] != free[0].choices[step]));
        assert_eq!(other[1], free[1]);
    }

    #[test]
    fn a_run_goes_on_where_it_was_left() {
        let model = small();
        let all: Vec<Vec<usize>> = vec![(0..150).map(|i| i % 17).collect(), vec![4, 2]];
        let whole = finish(decoder(&model, &all, limits(5, 200, &[])));
        for left_after in 1..6 {
            let mut first = decoder(&model, &all, limits(5, 200, &[]));
            for _ in 0..left_after {
                assert!(first.advance().unwrap());
            }
            let mut second = decoder(&model, &all, limits(5, 200, &[]));
            let choices = |run: &Decoder<'_, Small>| run.sequences.iter().map(|row| row.choices.clone()).collect();
            second.resume(choices(&first), first.prefilled(), |cache| *cache = first.cache().clone()).unwrap();
            assert_eq!(finish(second), whole, "left after {left_after}");
        }
        let ids = |ids: &[usize]| ids.iter().map(|&id| Choice { top: vec![(id, 1.0)] }).collect::<Vec<_>>();
        for (row, choices, prefilled) in [
            (1, vec![ids(&[1])], 256),
            (0, vec![ids(&[]), ids(&[1])], 256),
            (1, vec![ids(&[]), ids(&[])], 128),
            (1, vec![ids(&[1]), ids(&[18])], 256),
            (0, vec![ids(&[1, 1, 1, 1, 1, 1]), ids(&[1])], 256),
        ] {
            let mut run = decoder(&model, &all, limits(5, 200, &[]));
            assert_eq!(run.resume(choices, prefilled, |_| unreachable!()), Err(GenerateError::Resume { row }));
            assert_eq!(run.prefilled(), 0);
        }
    }

    #[test]
    fn requests_that_cannot_run_are_refused() {
        let model = small();
        let new = |prompts: Vec<Vec<usize>>, limits| {
            Decoder::new(&model, tables(), prompts, limits, Policy::rne()).map(|_| ()).unwrap_err()
        };
        let good = || limits(4, 100, &[]);
        assert_eq!(new(vec![], good()), GenerateError::Prompts(0));
        assert_eq!(new(prompts(17), good()), GenerateError::Prompts(17));
        assert_eq!(new(vec![vec![1], vec![]], good()), ModelError::EmptyPrompt { row: 1 }.into());
        let token = ModelError::Token { row: 0, id: 18, vocabulary: 18 };
        assert_eq!(new(vec![vec![1, 18]], good()), token.clone().into());
        assert_eq!(new(vec![vec![1]], limits(0, 100, &[])), GenerateError::NoTokens);
        let long = GenerateError::TooLong { row: 0, length: 5, most: 5 };
        assert_eq!(new(vec![vec![1; 5]], limits(4, 5, &[])), long);
        let position = ModelError::Position { row: 0, position: 200, rows: 200 };
        assert_eq!(new(vec![vec![1; 5]], limits(196, 400, &[])), position.into());
        let mut run = decoder(&model, &[vec![1]], good());
        assert_eq!(run.force(1, vec![2]), Err(GenerateError::NoRow { row: 1 }));
        assert_eq!(run.force(0, vec![2; 5]), Err(GenerateError::Forced { row: 0, found: 5, most: 4 }));
        assert_eq!(run.force(0, vec![18, 2]), Err(token.into()));
        assert_eq!(run.force(0, vec![2, 19]), Ok(()));
    }
}

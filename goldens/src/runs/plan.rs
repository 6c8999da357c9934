//! What a token run computes and where it keeps it: every token of a prompt and every token that is fed back has a
//! place, a batch row and a position in it, and each place has its cache rows in every layer.

use std::collections::BTreeMap;

use cases::{Case, TokensCase};
use reference::inputs::{cache_place, cache_row};
use reference::{Geometry, PAGE};

/// One token of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Batch row.
    pub row: usize,
    /// Position in its sequence, from 0.
    pub position: usize,
}

/// All places of a run, the rows one after the other, each in order of positions.
#[derive(Debug)]
pub struct Plan<'a> {
    /// Sizes of the model.
    pub geometry: &'a Geometry,
    /// Layers that ran.
    pub layers: usize,
    /// Pages of each layer's caches.
    pub pages: usize,
    /// Prompts, decode steps and block table.
    pub tokens: &'a TokensCase,
    /// The places.
    pub places: Vec<Place>,
    /// Index of each row's first place.
    first: Vec<usize>,
}

impl<'a> Plan<'a> {
    /// The places of a case. Each prompt is followed by one place a decode step.
    pub fn new(case: &'a Case, tokens: &'a TokensCase) -> Self {
        let (mut places, mut first) = (Vec::new(), Vec::new());
        for (row, prompt) in tokens.prompts.iter().enumerate() {
            first.push(places.len());
            places.extend((0..prompt.len() + tokens.decode_steps).map(|position| Place { row, position }));
        }
        Self { geometry: &case.geometry, layers: case.layers, pages: case.pages, tokens, places, first }
    }

    /// Active rows.
    pub fn rows(&self) -> usize {
        self.tokens.prompts.len()
    }

    /// Tokens that each row gives: one from the prefill, one a decode step.
    pub fn steps(&self) -> usize {
        1 + self.tokens.decode_steps
    }

    /// Index of a place.
    pub fn index(&self, place: Place) -> usize {
        self.first[place.row] + place.position
    }

    /// The place whose hidden state gives token `step` of `row`: the prompt's last, or that of the token before.
    pub fn source(&self, row: usize, step: usize) -> Place {
        Place { row, position: self.tokens.prompts[row].len() + step - 1 }
    }

    /// The step at which the token of a place was chosen; `None` inside a prompt.
    pub fn step_of(&self, place: Place) -> Option<usize> {
        place.position.checked_sub(self.tokens.prompts[place.row].len())
    }

    /// Index of a prompt's place in `prefill_hidden`.
    pub fn prompt_index(&self, place: Place) -> usize {
        self.tokens.prompts[..place.row].iter().map(Vec::len).sum::<usize>() + place.position
    }

    /// Indices of the places that decode steps compute, or of those that the prefill computes.
    pub fn of_phase(&self, decode: bool) -> Vec<usize> {
        (0..self.places.len()).filter(|&index| self.step_of(self.places[index]).is_some() == decode).collect()
    }

    /// The slot of a place. A case whose contexts lack a page is refused when it is read, so that there always is one.
    pub fn slot(&self, place: Place) -> usize {
        let page = self.tokens.block_table[place.row].get(place.position / PAGE).copied().unwrap_or(-1);
        usize::try_from(page).unwrap_or(0) * PAGE + place.position % PAGE
    }

    /// Rows of each cache over all layers.
    pub fn cache_rows(&self) -> usize {
        self.layers * self.layer_rows()
    }

    /// Rows of each layer's caches.
    fn layer_rows(&self) -> usize {
        self.pages * self.geometry.num_key_value_heads * PAGE
    }

    /// Row of the stacked caches that holds a place's `kv_head` in `layer`.
    pub fn cache_row(&self, layer: usize, place: Place, kv_head: usize) -> usize {
        layer * self.layer_rows() + cache_row(self.geometry, self.slot(place), kv_head)
    }

    /// The cache rows that the run writes, each with its layer, the index of its place, and its KV head.
    pub fn written(&self) -> BTreeMap<usize, (usize, usize, usize)> {
        let mut rows = BTreeMap::new();
        for layer in 0..self.layers {
            for (index, &place) in self.places.iter().enumerate() {
                for kv_head in 0..self.geometry.num_key_value_heads {
                    rows.insert(self.cache_row(layer, place, kv_head), (layer, index, kv_head));
                }
            }
        }
        rows
    }

    /// Names a row of the stacked caches.
    pub fn cache_row_name(&self, row: usize) -> String {
        let (slot, head) = cache_place(self.geometry, row % self.layer_rows());
        let layer = row / self.layer_rows();
        format!("layer {layer}, page {}, slot {slot} (offset {}), KV head {head}", slot / PAGE, slot % PAGE)
    }

    /// Names a place: `row 1, step 4 (position 43)` or `row 0, prompt token 20`.
    pub fn name(&self, index: usize) -> String {
        let place = self.places[index];
        let Place { row, position } = place;
        match self.step_of(place) {
            // The state made here gives the next token.
            Some(step) => format!("row {row}, step {} (position {position})", step + 1),
            None => format!("row {row}, prompt token {position}"),
        }
    }

    /// Names some places: the first few, and how many more.
    pub fn names(&self, indices: &[usize]) -> String {
        let mut names: Vec<String> = indices.iter().take(3).map(|&index| self.name(index)).collect();
        if indices.len() > 3 {
            names.push(format!("and {} more", indices.len() - 3));
        }
        names.join("; ")
    }
}

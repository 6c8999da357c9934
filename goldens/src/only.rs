//! Which captured tensors a request looks at, of either kernel.

use std::collections::BTreeSet;

use reference::TensorId;

/// A tensor of a `tokens` capture besides its caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TokenTensor {
    /// Last states of the prefill.
    PrefillHidden,
    /// Last states of the decode steps.
    DecodeHidden,
    /// The two largest logits.
    Top2Logits,
    /// Their ids.
    Top2Ids,
    /// The generated ids.
    TokenIds,
}

impl TokenTensor {
    /// All of them, in the order in which a run makes them.
    pub const ALL: [Self; 5] =
        [Self::PrefillHidden, Self::DecodeHidden, Self::Top2Logits, Self::Top2Ids, Self::TokenIds];

    /// Its name in a capture.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::PrefillHidden => "prefill_hidden",
            Self::DecodeHidden => "decode_hidden",
            Self::Top2Logits => "top2_logits",
            Self::Top2Ids => "top2_ids",
            Self::TokenIds => "token_ids",
        }
    }
}

/// The tensors that are looked at; every other one is hidden.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Only {
    /// Tensors of a decode layer. Written cache rows of either kernel stand under `KRows` and `VRows`.
    pub layer: BTreeSet<TensorId>,
    /// Tensors of a token run.
    pub tokens: BTreeSet<TokenTensor>,
}

impl Only {
    /// Adds a tensor by its name in a capture. A cache's rows and values come together.
    ///
    /// # Errors
    /// No capture has a tensor of this name; the message names all that there are.
    pub fn insert(&mut self, name: &str) -> Result<(), String> {
        let layer = match name {
            "k_written_rows" => Some(TensorId::KRows),
            "v_written_rows" => Some(TensorId::VRows),
            _ => TensorId::ALL.into_iter().find(|id| id.name() == name),
        };
        let tokens = TokenTensor::ALL.into_iter().find(|id| id.name() == name);
        if layer.is_none() && tokens.is_none() {
            let names: Vec<&str> = Self::names().collect();
            return Err(format!("no captured tensor has this name; there are: {}", names.join(", ")));
        }
        self.layer.extend(layer);
        self.tokens.extend(tokens);
        Ok(())
    }

    /// The tensors in words.
    #[must_use]
    pub fn named(&self) -> String {
        let layer = self.layer.iter().map(|id| id.name());
        let names: Vec<&str> = layer.chain(self.tokens.iter().map(|id| id.name())).collect();
        names.join(", ")
    }

    fn names() -> impl Iterator<Item = &'static str> {
        TensorId::ALL.into_iter().map(TensorId::name).chain(TokenTensor::ALL.into_iter().map(TokenTensor::name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_go_by_the_names_of_captures() {
        let of = |name: &str| {
            let mut only = Only::default();
            only.insert(name).map(|()| only)
        };
        for id in TensorId::ALL {
            assert_eq!(of(id.name()).unwrap().layer, BTreeSet::from([id]));
        }
        for id in TokenTensor::ALL {
            assert_eq!(of(id.name()).unwrap().tokens, BTreeSet::from([id]));
        }
        assert_eq!(of("k_written_rows").unwrap(), of("k_written_values").unwrap());
        let refused = of("outt").unwrap_err();
        assert!(refused.contains("attn_out") && refused.contains("token_ids"), "{refused}");
    }
}

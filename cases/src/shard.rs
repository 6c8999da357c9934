//! Shards: the cases of one run split over several machines. The split depends on the names of the cases and on nothing
//! else, so that machines agree on it whatever the order of their files.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Most shards of a run: those that are missing are listed.
pub const MOST_SHARDS: usize = 65_536;

/// One of several shards: `2/4` is the second of four.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    index: usize,
    count: usize,
}

/// A text or a pair of numbers that names no shard.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("expected I/N with I from 1 to N and N up to {MOST_SHARDS}, for example 2/4 for the second of four shards")]
pub struct ShardError;

impl Shard {
    /// Shard `index` of `count`, counted from 1.
    ///
    /// # Errors
    /// An index of 0 or beyond the count; more than [`MOST_SHARDS`].
    pub fn new(index: usize, count: usize) -> Result<Self, ShardError> {
        if index == 0 || index > count || count > MOST_SHARDS { Err(ShardError) } else { Ok(Self { index, count }) }
    }

    /// Which one, from 1.
    #[must_use]
    pub fn index(self) -> usize {
        self.index
    }

    /// Of how many.
    #[must_use]
    pub fn count(self) -> usize {
        self.count
    }

    /// Whether it takes what stands at this position, from 0, of the list of all that is to be split.
    #[must_use]
    pub fn takes(self, position: usize) -> bool {
        position % self.count == self.index - 1
    }

    /// The names that it takes: each goes by its position in the list of names sorted bytewise, every name once,
    /// modulo the number of shards. Cases of one name stay together.
    #[must_use]
    pub fn taken<'a>(self, names: impl IntoIterator<Item = &'a str>) -> BTreeSet<&'a str> {
        let sorted: BTreeSet<&str> = names.into_iter().collect();
        sorted.into_iter().enumerate().filter(|(position, _)| self.takes(*position)).map(|(_, name)| name).collect()
    }
}

impl FromStr for Shard {
    type Err = ShardError;

    fn from_str(text: &str) -> Result<Self, ShardError> {
        // Digits alone: `+1/2` is no name of a shard in a file's name.
        let number = |text: &str| match text.bytes().all(|byte| byte.is_ascii_digit()) {
            true => text.parse().map_err(|_| ShardError),
            false => Err(ShardError),
        };
        let (index, count) = text.split_once('/').ok_or(ShardError)?;
        Self::new(number(index)?, number(count)?)
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn shards_are_read_as_they_are_written() {
        for text in ["1/1", "2/4", "4/4"] {
            assert_eq!(text.parse::<Shard>().unwrap().to_string(), text);
        }
        for text in
            ["", "1", "/", "0/2", "3/2", "1/0", "0/0", "a/2", "+1/2", "-1/2", "1/2/3", " 1/2", "1/9e9", "1/65537"]
        {
            assert_eq!(text.parse::<Shard>(), Err(ShardError), "{text:?}");
        }
        assert_eq!("1/99999999999999999999".parse::<Shard>(), Err(ShardError));
    }

    #[test]
    fn names_go_by_their_place_in_the_sorted_list() {
        let names = ["b", "a", "B", "a", "c"];
        assert_eq!("1/2".parse::<Shard>().unwrap().taken(names), BTreeSet::from(["B", "b"]));
        assert_eq!("2/2".parse::<Shard>().unwrap().taken(names), BTreeSet::from(["a", "c"]));
        assert_eq!("5/5".parse::<Shard>().unwrap().taken(names), BTreeSet::new());
    }

    proptest! {
        #[test]
        fn every_name_is_in_one_shard_whatever_the_order(
            mut names in prop::collection::vec("[a-d]{1,2}", 0..20),
            count in 1_usize..8,
        ) {
            let split = |names: &[String]| -> Vec<BTreeSet<String>> {
                let shard = |index| Shard::new(index, count).unwrap().taken(names.iter().map(String::as_str));
                (1..=count).map(|index| shard(index).into_iter().map(str::to_owned).collect()).collect()
            };
            let shards = split(&names);
            for name in &names {
                prop_assert_eq!(shards.iter().filter(|shard| shard.contains(name)).count(), 1);
            }
            let sizes: Vec<usize> = shards.iter().map(BTreeSet::len).collect();
            prop_assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1);
            names.reverse();
            prop_assert_eq!(split(&names), shards);
        }
    }
}

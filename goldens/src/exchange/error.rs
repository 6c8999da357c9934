//! Why a dump is refused: what is wrong in it, or what it leaves open.

use thiserror::Error;

/// Why a dump is refused.
#[derive(Debug, Error)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
pub enum ExchangeError {
    #[error("the map names `{entry}`, which is no entry of the dump; it has: {known}")]
    UnknownEntry { entry: String, known: String },
    #[error("the map gives `{entry}` the name `{tensor}`, which is no tensor of this case; there are: {known}")]
    UnknownTensor { entry: String, tensor: String, known: String },
    #[error("`{entry}` is {tensor}, but the dump holds no usable data for it: {reason}")]
    Unusable { entry: String, tensor: String, reason: String },
    #[error("`{entry}` is {found}, but {tensor} is {expected}; nothing is converted, and another entry may be meant")]
    Type { entry: String, tensor: String, found: String, expected: String },
    #[error(
        "`{entry}` is not the {tensor} that the case describes: {differing} of {elements} elements differ, first \
         {first}{holds}; the outputs are of other inputs, or the entry is another tensor (--map)"
    )]
    Input { entry: String, tensor: String, differing: u64, elements: u64, first: String, holds: String },
    #[error(
        "`{entry}` is called {tensor} and holds {holds}: {equal} of {elements} elements are those of {holds}, and it \
         is nearer to that than half of what lies between the two; correct the name or the map"
    )]
    Swapped { entry: String, tensor: String, holds: String, equal: u64, elements: u64 },
    #[error(
        "`{entry}` is {tensor} as it was before the run, and nothing says when it was taken: before, or after a kernel that \
         wrote nothing; put it under `in/` or `out/`, or name it `ignore` in the map"
    )]
    When { entry: String, tensor: String },
    #[error("{0}; say which is which with --map")]
    Alike(String),
    #[error(
        "`{first}` and `{second}` are both {tensor} and differ; say which of them is meant with --map, and name the \
         other `ignore`"
    )]
    Twice { first: String, second: String, tensor: String },
    #[error(
        "no output of the case was found in the dump, so that there is nothing to judge{0}; name its entries with --map"
    )]
    Nothing(String),
    #[error("{0}")]
    Case(String),
}

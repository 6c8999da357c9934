//! What a command that generates tokens is asked for: a model, prompts as text or as ids, and where rows end.

use std::path::PathBuf;

use cases::{PolicyRequest, Tokenizer};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use reference::Policy;
use reference::generate::Limits;

use super::source::{Place, Source};
use crate::refusal::Refusal;

/// New tokens of the field's standing test.
const STANDING_TOKENS: usize = 48;
/// Tokens that a row of the standing test may have.
const STANDING_LENGTH: usize = 256;

/// A model and prompts.
#[derive(Args)]
pub struct Prompts {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    prompts: List,
    /// Tokens that a row may generate; default: 48, the field's standing test, or as many as the case's run gives
    #[arg(long, value_name = "N")]
    max_new_tokens: Option<usize>,
    /// Tokens that a row may have, its prompt included; default: 256, or as many as the case's tables have
    #[arg(long, value_name = "N")]
    max_seq_len: Option<usize>,
    /// A tokenizer.json, or the directory that holds it; default: the model's
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Rounding rules: production, rne, or a YAML file of them
    #[arg(long, value_name = "POLICY", default_value = "production")]
    policy: String,
}

/// One prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Prompt {
    Text(String),
    Ids(Vec<usize>),
}

/// The prompts in the order in which they stand on the command line, whichever of the two flags each has.
#[derive(Clone, Debug, PartialEq, Eq)]
struct List(Vec<Prompt>);

impl Args for List {
    fn augment_args(command: Command) -> Command {
        let text = Arg::new("prompt").long("prompt").value_name("TEXT").action(ArgAction::Append);
        let ids = Arg::new("prompt_ids").long("prompt-ids").value_name("IDS").action(ArgAction::Append);
        command
            .arg(text.help("A prompt as text, which needs a tokenizer; once for each row"))
            .arg(ids.help("A prompt as token ids, such as 1,2,3; once for each row").value_parser(ids_of))
            .group(clap::ArgGroup::new("prompts").args(["prompt", "prompt_ids"]).multiple(true))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for List {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let places = |id| matches.indices_of(id).into_iter().flatten();
        let texts = matches.get_many::<String>("prompt").into_iter().flatten().cloned().map(Prompt::Text);
        let ids = matches.get_many::<Vec<usize>>("prompt_ids").into_iter().flatten().cloned().map(Prompt::Ids);
        let mut prompts: Vec<(usize, Prompt)> =
            places("prompt").zip(texts).chain(places("prompt_ids").zip(ids)).collect();
        prompts.sort_by_key(|(place, _)| *place);
        Ok(Self(prompts.into_iter().map(|(_, prompt)| prompt).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Ids between commas or blanks.
fn ids_of(text: &str) -> Result<Vec<usize>, String> {
    let words = text.split(',').flat_map(|part| {
        // Nothing between two commas is an id that was forgotten.
        let part = part.trim();
        if part.is_empty() { vec![""] } else { part.split_whitespace().collect() }
    });
    words.map(|word| word.parse().map_err(|_| format!("{word:?} is no token id; write ids such as 1,2,3"))).collect()
}

/// The request with its files opened.
pub struct Opened {
    /// The model.
    pub source: Source,
    /// The tokenizer, where there is one.
    pub tokenizer: Option<Tokenizer>,
    /// Token ids of each row's prompt.
    pub prompts: Vec<Vec<usize>>,
    /// Where rows end; stop ids are the model's.
    pub limits: Limits,
    /// How the reference rounds.
    pub policy: Policy,
}

impl Prompts {
    /// Opens what the request names.
    ///
    /// # Errors
    /// A file is wrong, or a prompt is text and there is no tokenizer.
    pub fn open(&self) -> Result<Opened, Refusal> {
        let policy = match PolicyRequest::from_flag(&self.policy)? {
            PolicyRequest::Production => Policy::production(),
            PolicyRequest::Rne => Policy::rne(),
            PolicyRequest::Custom(policy) => policy,
            PolicyRequest::Auto => {
                return Err(Refusal::Request(
                    "--policy auto: there is no device whose ties could be read; write production, rne, or a file"
                        .into(),
                ));
            }
        };
        let source = self.place.open()?.ok_or_else(|| {
            Refusal::Request("no model: name a checkpoint with --model, or a tokens case with --case".into())
        })?;
        let tokenizer = match (&self.tokenizer, source.dir()) {
            (Some(path), _) => Some(Tokenizer::open(path)?),
            (None, Some(dir)) if Tokenizer::is_in(dir) => Some(Tokenizer::open(dir)?),
            _ => None,
        };
        let encode = |prompt: &Prompt| match (prompt, &tokenizer) {
            (Prompt::Ids(ids), _) => Ok(ids.clone()),
            (Prompt::Text(text), Some(tokenizer)) => Ok(tokenizer.encode(text)?),
            (Prompt::Text(text), None) => Err(Refusal::Request(format!(
                "--prompt {text:?}: the model has no tokenizer.json; name one with --tokenizer, or give token ids with \
                 --prompt-ids"
            ))),
        };
        let mut prompts: Vec<Vec<usize>> = self.prompts.0.iter().map(encode).collect::<Result<_, _>>()?;
        if let (true, Some(run)) = (prompts.is_empty(), source.run()) {
            prompts.clone_from(&run.prompts);
        }
        if prompts.is_empty() {
            return Err(Refusal::Request("no prompt: give one with --prompt TEXT or --prompt-ids 1,2,3".into()));
        }
        let steps = source.run().map_or(STANDING_TOKENS, |run| 1 + run.decode_steps);
        let limits = Limits {
            max_new_tokens: self.max_new_tokens.unwrap_or(steps),
            max_seq_len: self.max_seq_len.unwrap_or(source.max_seq().unwrap_or(STANDING_LENGTH)),
            stop_ids: source.stop_ids().to_vec(),
        };
        Ok(Opened { source, tokenizer, prompts, limits, policy })
    }
}

impl Opened {
    /// Positions that the longest row can reach, which RoPE tables must have.
    pub fn positions(&self) -> usize {
        let longest = self.prompts.iter().map(Vec::len).max().unwrap_or(0);
        longest.saturating_add(self.limits.max_new_tokens).min(self.limits.max_seq_len)
    }

    /// What a person should know of contexts longer than the model was made for.
    pub fn beyond_trained(&self) -> Option<String> {
        let trained = self.source.max_positions().filter(|&trained| self.positions() > trained)?;
        let reached = self.positions();
        Some(format!("remark: rows may reach {reached} tokens; the model's max_position_embeddings is {trained}\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        prompts: Prompts,
    }

    fn parse(words: &[&str]) -> Result<List, clap::Error> {
        Cli::try_parse_from(["x", "--model", "m"].iter().chain(words)).map(|cli| cli.prompts.prompts)
    }

    #[test]
    fn rows_stand_in_the_order_of_the_command_line() {
        let list =
            parse(&["--prompt-ids", "1,2", "--prompt", "a b", "--prompt-ids", "3 , 4", "--prompt", "c"]).unwrap();
        let text = |text: &str| Prompt::Text(text.to_owned());
        assert_eq!(list.0, [Prompt::Ids(vec![1, 2]), text("a b"), Prompt::Ids(vec![3, 4]), text("c")]);
    }

    #[test]
    fn words_that_are_no_ids_are_refused() {
        for ids in ["", ",", "1,,2", "1,", "1,x", "-1", "1.5", "99999999999999999999999"] {
            assert!(parse(&[&format!("--prompt-ids={ids}")]).unwrap_err().to_string().contains("token id"), "{ids}");
        }
    }
}

//! What commands that show something print: tables for a person, JSON for a program.

use std::fmt::Write as _;

use clap::ValueEnum;
use comfy_table::{CellAlignment, Table};
use serde::Serialize;

use crate::output;
use crate::refusal::Refusal;
use crate::report::human::TABLE;
use crate::report::text::plain;

/// Formats of commands that list or show something.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Tables for a person
    Human,
    /// One JSON value
    Json,
}

/// A table whose numbers stand to the right.
pub fn table<const N: usize>(out: &mut String, header: [&str; N], rows: impl Iterator<Item = [String; N]>) {
    let mut table = Table::new();
    table.load_style(TABLE).set_header(header);
    let mut numeric = [true; N];
    for row in rows {
        for (numeric, cell) in numeric.iter_mut().zip(&row) {
            *numeric &= cell.bytes().all(|byte| byte.is_ascii_digit() || byte == b',');
        }
        table.add_row(row.iter().map(|cell| plain(cell)));
    }
    for (column, _) in table.column_iter_mut().zip(numeric).filter(|(_, numeric)| *numeric) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for line in table.lines() {
        let _ = writeln!(out, "{}", line.trim_end());
    }
}

/// Prints a value.
///
/// # Errors
/// Standard output cannot be written.
pub fn json(value: &impl Serialize) -> Result<(), Refusal> {
    let text = serde_json::to_string_pretty(value).map_err(|error| Refusal::Request(error.to_string()))?;
    output::stdout(&(text + "\n"))
}

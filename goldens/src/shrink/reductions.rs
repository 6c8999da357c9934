//! The ways in which a case can be smaller: fewer rows, shorter contexts, fewer pages, smaller geometry, plainer
//! inputs. What breaks a rule of case files, or a tiling rule that the case keeps, is no way.

use std::collections::{BTreeMap, BTreeSet};

use cases::{Case, Kernel, Padding, Recipe, RecipeKind};
use reference::{BATCH, Batch, Geometry, PAGE, TILE};

/// A smaller case, and what is smaller in it.
pub type Smaller = (String, Case);

/// Ways of making a case smaller, those that cut most first. Each gives its cases in order.
pub const KINDS: [fn(&Case) -> Vec<Smaller>; 7] = [rows, geometry, contexts, extent, extras, plain_inputs, padding];

/// The case without what another case than itself could not keep: hashes, and where outputs came from.
pub fn prepared(case: &Case) -> Case {
    let mut case = case.clone();
    case.inputs_sha256.clear();
    case.final_cache_sha256.clear();
    case.device = None;
    case
}

/// A case with a change, where it is another one and obeys the rules.
fn changed(case: &Case, what: String, change: impl FnOnce(&mut Case)) -> Option<Smaller> {
    let mut smaller = case.clone();
    change(&mut smaller);
    let tiled = case.geometry.tiling_violations().is_empty();
    let allowed = !tiled || smaller.geometry.tiling_violations().is_empty();
    (allowed && smaller != *case && Case::parse(&smaller.to_yaml(), &smaller.path).is_ok()).then_some((what, smaller))
}

/// A case with another batch, whose slots follow from its tables.
fn rebatched(case: &Case, what: String, change: impl FnOnce(&mut Batch)) -> Option<Smaller> {
    changed(case, what, |case| {
        let padding = case.padding;
        if let Kernel::DecodeLayer(decode) = &mut case.kernel {
            change(&mut decode.batch);
            settle(&mut decode.batch, padding);
            case.active_batch = decode.batch.active;
        }
    })
}

/// Slots of active rows by their tables, and padding rows as row 0 where they replicate it.
fn settle(batch: &mut Batch, padding: Padding) {
    for row in 0..batch.active.min(BATCH) {
        if let Some(slot) = batch.slot_of(row, batch.position(row)) {
            batch.slots[row] = slot;
        }
    }
    if padding == Padding::ReplicateRow0 {
        for row in batch.active..BATCH {
            batch.seq_lens[row] = batch.seq_lens[0];
            batch.slots[row] = batch.slots[0];
            batch.block_table[row] = batch.block_table[0].clone();
        }
    }
}

/// Fewer active rows: each alone, either half, all but one.
fn rows(case: &Case) -> Vec<Smaller> {
    let Some(batch) = case.batch() else { return Vec::new() };
    let active = batch.active;
    let mut kept: Vec<Vec<usize>> = Vec::new();
    if active > 1 {
        kept.push(vec![0]);
        kept.push((0..active / 2).collect());
        kept.push((active / 2..active).collect());
        kept.extend((1..active).map(|row| vec![row]));
        kept.extend((0..active).rev().map(|gone| (0..active).filter(|&row| row != gone).collect()));
    }
    let smaller = kept.into_iter().filter_map(|kept| {
        let what = format!("active rows {active} -> {}", kept.len());
        rebatched(case, what, |batch| {
            // Rows that are no longer active become padding rows, behind those that are kept.
            let order: Vec<usize> = kept.iter().copied().chain((0..BATCH).filter(|row| !kept.contains(row))).collect();
            let old = batch.clone();
            batch.active = kept.len();
            batch.block_table = order.iter().filter_map(|&row| old.block_table.get(row).cloned()).collect();
            for (to, &from) in order.iter().enumerate().take(BATCH) {
                batch.seq_lens[to] = old.seq_lens[from];
                batch.slots[to] = old.slots[from];
            }
        })
    });
    smaller.collect()
}

/// Shorter contexts: of all rows, then of each.
fn contexts(case: &Case) -> Vec<Smaller> {
    let Some(batch) = case.batch() else { return Vec::new() };
    let shorter = |len: usize| {
        let lengths = [1, len / 2, len.saturating_sub(PAGE), len.saturating_sub(TILE), len.saturating_sub(1)];
        let mut seen = BTreeSet::new();
        lengths.into_iter().filter(move |&to| (1..len).contains(&to) && seen.insert(to))
    };
    let longest = batch.seq_lens[..batch.active].iter().copied().max().unwrap_or(1);
    let all = shorter(longest).filter_map(|to| {
        rebatched(case, format!("contexts of at most {longest} -> {to}"), |batch| {
            batch.seq_lens[..batch.active].iter_mut().for_each(|len| *len = (*len).min(to));
        })
    });
    let each = (0..batch.active).flat_map(|row| shorter(batch.seq_lens[row]).map(move |to| (row, to)));
    let each = each.filter_map(|(row, to)| {
        let what = format!("row {row}: context {} -> {to}", batch.seq_lens[row]);
        rebatched(case, what, |batch| batch.seq_lens[row] = to)
    });
    all.chain(each).collect()
}

/// A shorter table and no more pages than are used; their order stays.
fn extent(case: &Case) -> Vec<Smaller> {
    let Some(batch) = case.batch() else { return Vec::new() };
    let longest = batch.seq_lens.iter().copied().max().unwrap_or(1);
    let blocks = longest.div_ceil(PAGE).max(1);
    let mut used: BTreeSet<usize> = batch.slots.iter().map(|slot| slot / PAGE).collect();
    for (row, pages) in batch.block_table.iter().enumerate() {
        let reached = batch.seq_lens.get(row).map_or(0, |len| len.div_ceil(PAGE));
        used.extend(pages.iter().take(reached).filter_map(|&page| usize::try_from(page).ok()));
    }
    let packed = |to: BTreeMap<usize, usize>, pages: usize| {
        let what = format!("pages {} -> {pages}, contexts up to {} -> {}", case.pages, case.max_seq, blocks * PAGE);
        changed(case, what, |case| {
            (case.pages, case.max_seq) = (pages, blocks * PAGE);
            let Kernel::DecodeLayer(decode) = &mut case.kernel else { return };
            for row in &mut decode.batch.block_table {
                row.truncate(blocks);
                for page in row {
                    let packed = usize::try_from(*page).ok().and_then(|page| to.get(&page));
                    *page = packed.map_or(-1, |&page| page as i32);
                }
            }
            for slot in &mut decode.batch.slots {
                *slot = to.get(&(*slot / PAGE)).map_or(*slot, |page| page * PAGE + *slot % PAGE);
            }
        })
    };
    let to = used.iter().enumerate().map(|(to, &page)| (page, to)).collect();
    packed(to, used.len()).into_iter().collect()
}

/// Smaller sizes, one at a time.
fn geometry(case: &Case) -> Vec<Smaller> {
    let g = &case.geometry;
    let mut sizes: Vec<(&str, usize, usize, Geometry)> = Vec::new();
    let group = (g.num_attention_heads / g.num_key_value_heads.max(1)).max(1);
    let of = |size: usize, least: &[usize]| {
        let mut to: Vec<usize> =
            least.iter().copied().chain([size / 4, size / 2]).filter(|&to| 0 < to && to < size).collect();
        to.sort_unstable();
        to.dedup();
        to
    };
    for to in of(g.intermediate_size, &[128]) {
        sizes.push(("intermediate_size", g.intermediate_size, to, Geometry { intermediate_size: to, ..g.clone() }));
    }
    for to in of(g.hidden_size, &[128, 2560]) {
        sizes.push(("hidden_size", g.hidden_size, to, Geometry { hidden_size: to, ..g.clone() }));
    }
    for to in of(group, &[1]) {
        let heads = to * g.num_key_value_heads;
        sizes.push(("query heads", g.num_attention_heads, heads, Geometry { num_attention_heads: heads, ..g.clone() }));
    }
    for to in of(g.num_key_value_heads, &[1, 4]) {
        let heads = Geometry { num_key_value_heads: to, num_attention_heads: to * group, ..g.clone() };
        sizes.push(("KV heads", g.num_key_value_heads, to, heads));
    }
    for to in of(g.head_dim, &[16]) {
        sizes.push(("head_dim", g.head_dim, to, Geometry { head_dim: to, ..g.clone() }));
    }
    let resized = sizes.into_iter().filter_map(|(name, from, to, geometry)| {
        changed(case, format!("{name} {from} -> {to}"), |case| {
            (case.geometry, case.geometry_name) = (geometry, None);
        })
    });
    let layers =
        (case.layers > 1).then(|| changed(case, format!("layers {} -> 1", case.layers), |case| case.layers = 1));
    layers.flatten().into_iter().chain(resized).collect()
}

/// No poison, no outliers.
fn extras(case: &Case) -> Vec<Smaller> {
    let poison = case.poison.and_then(|_| changed(case, "poison removed".to_owned(), |case| case.poison = None));
    let outliers = case.tensors.iter().filter(|(_, recipe)| recipe.outlier_columns.is_some());
    let outliers = outliers.filter_map(|(&input, recipe)| {
        changed(case, format!("{}: outlier columns removed", input.name()), |case| {
            case.tensors.insert(input, Recipe { outlier_columns: None, ..recipe.clone() });
        })
    });
    poison.into_iter().chain(outliers).collect()
}

/// Inputs that are all zero, or all one.
fn plain_inputs(case: &Case) -> Vec<Smaller> {
    let rank = |kind: &RecipeKind| match kind {
        RecipeKind::Zeros => 0,
        RecipeKind::Ones => 1,
        RecipeKind::Constant { .. } => 2,
        _ => 3,
    };
    let mut smaller = Vec::new();
    for plain in [RecipeKind::Zeros, RecipeKind::Ones] {
        for (&input, recipe) in case.tensors.iter().filter(|(_, recipe)| rank(&recipe.kind) > rank(&plain)) {
            let what = format!("{}: {recipe} -> {}", input.name(), Recipe::new(plain));
            smaller.extend(changed(case, what, |case| {
                case.tensors.insert(input, Recipe::new(plain));
            }));
        }
    }
    smaller
}

/// Padding rows that replicate row 0.
fn padding(case: &Case) -> Vec<Smaller> {
    let own = case.padding == Padding::Own && case.active_batch < BATCH;
    let smaller = own.then(|| {
        changed(case, "padding rows replicate row 0".to_owned(), |case| {
            case.padding = Padding::ReplicateRow0;
            if let Kernel::DecodeLayer(decode) = &mut case.kernel {
                settle(&mut decode.batch, Padding::ReplicateRow0);
            }
        })
    });
    smaller.flatten().into_iter().collect()
}

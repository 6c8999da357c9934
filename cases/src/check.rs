//! The rules of `docs/bundles.md` on a case file. Each is checked once, here, and each says where it
//! was broken, what was found, what was expected and what to do.

use std::collections::BTreeMap;
use std::path::Path;

use reference::geometry::GeometryError;
use reference::{BATCH, Batch, Geometry, PAGE};

use crate::case::{Case, DecodeCase, DeviceInfo, DeviceKind, Kernel, KernelKind, Padding, Poison, TokensCase};
use crate::error::{CaseError, Document};
use crate::input::{Extent, Input};
use crate::launch;
use crate::policy::PolicyRequest;
use crate::recipe::{OutlierColumns, Recipe, RecipeKind};
use crate::schema::{
    Entries, Header, Keys, Location, NameOr, RawCase, RawDevice, RawKernel, RawRecipe, RawRow, RawSizes, Spanned,
};

/// Most positions and pages that a case may have: a guard on allocations, far above any kernel's.
pub(crate) const LARGEST_EXTENT: usize = 1 << 20;
/// Most bytes that the inputs of one case may take.
const LARGEST_INPUTS: u128 = 32 << 30;

/// Reads a case.
pub(crate) fn case(text: &str, path: &Path) -> Result<Case, CaseError> {
    let document = Document::new(path, text);
    let kernel = kernel(&document.read()?, &document)?;
    let keys: Keys = document.read()?;
    required(kernel, &keys, &document)?;
    let raw: RawCase = document.read()?;
    Checker { document, keys, raw, kernel }.case()
}

/// The kernel of a file whose format is known.
fn kernel(header: &Header, document: &Document<'_>) -> Result<KernelKind, CaseError> {
    if header.format.value != 1 {
        let message = format!("format: {} is unknown; this program reads format 1", header.format.value);
        return Err(document.error(header.format.referenced, message, "write `format: 1`, or use a newer program"));
    }
    let place = header.kernel.referenced;
    match header.kernel.value.as_str() {
        "decode_layer" => Ok(KernelKind::DecodeLayer),
        "tokens" => Ok(KernelKind::Tokens),
        "prefill" => Err(document.error(
            place,
            "kernel: prefill is reserved: case files have no schema for it yet",
            "use tokens, whose run begins with a prefill",
        )),
        other => {
            Err(document.error(place, format!("kernel: no kernel is named {other:?}"), "write decode_layer or tokens"))
        }
    }
}

/// Keys that every case has.
const REQUIRED: [&str; 10] =
    ["name", "geometry", "layers", "seed", "max_seq", "pages", "rope_theta", "tensors", "active_batch", "padding"];

/// Requires the keys of `kernel`.
fn required(kernel: KernelKind, keys: &Keys, document: &Document<'_>) -> Result<(), CaseError> {
    let own = match kernel {
        KernelKind::DecodeLayer => ["seq_lens", "block_table", "slot_mapping"],
        KernelKind::Tokens => ["prompts", "decode_steps", "block_table"],
    };
    match REQUIRED.into_iter().chain(own).find(|key| place(keys, key).is_none()) {
        Some(key) => {
            let message = format!("missing key {key:?}, which kernel {} needs", kernel.name());
            let place = place(keys, "kernel").unwrap_or(Location::UNKNOWN);
            Err(document.error(place, message, format!("add a line `{key}: ...`")))
        }
        None => Ok(()),
    }
}

/// Where `key` stands.
fn place(keys: &Keys, key: &str) -> Option<Location> {
    keys.0.iter().find(|(found, _)| found.value == key).map(|(found, _)| found.referenced)
}

/// A case file that has the right keys, on its way to a [`Case`].
struct Checker<'a> {
    document: Document<'a>,
    keys: Keys,
    raw: RawCase,
    kernel: KernelKind,
}

impl Checker<'_> {
    fn case(&self) -> Result<Case, CaseError> {
        let raw = &self.raw;
        let name = self.name()?;
        let (geometry, geometry_name) = self.geometry()?;
        let layers = self.size(&raw.layers, "layers", 1, geometry.num_hidden_layers, "num_hidden_layers")?;
        let max_seq = self.size(&raw.max_seq, "max_seq", 1, LARGEST_EXTENT, "the most this program takes")?;
        let pages = self.size(&raw.pages, "pages", 1, LARGEST_EXTENT, "the most this program takes")?;
        let extent = Extent { layers, max_seq, pages };
        self.memory(&geometry, extent)?;
        let rope_theta = raw.rope_theta.value;
        if !(rope_theta.is_finite() && rope_theta > 0.0) {
            let message = format!("rope_theta: {rope_theta} is not positive and finite");
            return Err(self.error(raw.rope_theta.referenced, message, "Qwen3 uses 1000000.0"));
        }
        let tensors = self.tensors()?;
        let active = self.size(&raw.active_batch, "active_batch", 1, BATCH, "the physical rows")?;
        let kernel = match self.kernel {
            KernelKind::DecodeLayer => Kernel::DecodeLayer(Box::new(self.decode_layer(active, extent)?)),
            KernelKind::Tokens => Kernel::Tokens(self.tokens(active, extent, &geometry)?),
        };
        let policy = raw.policy.as_ref().map(|policy| PolicyRequest::from_raw(policy, &self.document)).transpose()?;
        Ok(Case {
            path: self.document.path().to_owned(),
            name,
            kernel,
            geometry,
            geometry_name,
            layers,
            seed: raw.seed,
            max_seq,
            pages,
            rope_theta,
            tensors,
            active_batch: active,
            padding: self.padding(active)?,
            policy_in_case: policy.is_some(),
            policy: policy.unwrap_or(PolicyRequest::Auto),
            poison: self.poison()?,
            device: raw.device.as_ref().map(|device| self.device(device)).transpose()?,
            inputs_sha256: self.hashes(&raw.inputs_sha256, "inputs_sha256", |input| self.kernel.reads(input))?,
            final_cache_sha256: self.hashes(&raw.final_cache_sha256, "final_cache_sha256", |input| {
                matches!(input, Input::KCache | Input::VCache)
            })?,
        })
    }

    fn error(&self, place: Location, message: impl Into<String>, help: impl Into<String>) -> CaseError {
        self.document.error(place, message, help)
    }

    /// Where the top-level `key` stands; a list or mapping of several lines begins below it.
    fn key(&self, key: &str) -> Location {
        place(&self.keys, key).unwrap_or(Location::UNKNOWN)
    }

    /// An integer in `least..=most`; `limit` says what `most` is.
    fn size(
        &self,
        found: &Spanned<i64>,
        what: &str,
        least: usize,
        most: usize,
        limit: &str,
    ) -> Result<usize, CaseError> {
        match usize::try_from(found.value) {
            Ok(value) if (least..=most).contains(&value) => Ok(value),
            _ => {
                let message = format!("{what}: {} is outside {least}..={most} ({most} is {limit})", found.value);
                Err(self.error(found.referenced, message, format!("write a number in {least}..={most}")))
            }
        }
    }

    fn name(&self) -> Result<String, CaseError> {
        let Spanned { value: name, referenced, .. } = &self.raw.name;
        if name.trim().is_empty() || name.len() > 200 || name.chars().any(char::is_control) {
            let message = "name: expected 1 to 200 bytes of printable text";
            return Err(self.error(*referenced, message, "write a short name such as mini/active2"));
        }
        Ok(name.clone())
    }

    fn geometry(&self) -> Result<(Geometry, Option<String>), CaseError> {
        let Spanned { value, referenced, .. } = &self.raw.geometry;
        match value {
            NameOr::Name(name) => match Geometry::named(name) {
                Some(geometry) => Ok((geometry, Some(name.clone()))),
                None => {
                    let message = format!("geometry: no geometry is named {name:?}");
                    let names = Geometry::NAMES.join(", ");
                    Err(self.error(*referenced, message, format!("write {names}, or a mapping of its sizes")))
                }
            },
            NameOr::Mapping(sizes) => self.sizes(sizes, *referenced).map(|geometry| (geometry, None)),
        }
    }

    fn sizes(&self, raw: &RawSizes, whole: Location) -> Result<Geometry, CaseError> {
        let size = |found: &Spanned<i64>, name: &str| {
            // Zero and sizes beyond the reference's own limits are refused by `Geometry::validate`.
            usize::try_from(found.value).map_err(|_| {
                let message = format!("geometry: {name}: {} is negative", found.value);
                self.error(found.referenced, message, "write a positive number")
            })
        };
        let geometry = Geometry {
            hidden_size: size(&raw.hidden_size, "hidden_size")?,
            num_attention_heads: size(&raw.num_attention_heads, "num_attention_heads")?,
            num_key_value_heads: size(&raw.num_key_value_heads, "num_key_value_heads")?,
            head_dim: size(&raw.head_dim, "head_dim")?,
            intermediate_size: size(&raw.intermediate_size, "intermediate_size")?,
            num_hidden_layers: size(&raw.num_hidden_layers, "num_hidden_layers")?,
            vocab_size: size(&raw.vocab_size, "vocab_size")?,
            real_vocab_size: size(&raw.real_vocab_size, "real_vocab_size")?,
            rms_norm_eps: raw.rms_norm_eps.as_ref().map_or(1e-6, |eps| eps.value as f32),
        };
        geometry.validate().map_err(|error| {
            let place = match &error {
                GeometryError::Zero(name) | GeometryError::TooLarge { name, .. } => raw.place(name),
                GeometryError::OddHead(_) => Some(raw.head_dim.referenced),
                GeometryError::Heads { .. } | GeometryError::Group(_) => Some(raw.num_attention_heads.referenced),
                GeometryError::OddIntermediate(_) => Some(raw.intermediate_size.referenced),
                GeometryError::Vocab { .. } => Some(raw.real_vocab_size.referenced),
                GeometryError::Eps(_) => raw.rms_norm_eps.as_ref().map(|eps| eps.referenced),
            };
            self.error(place.unwrap_or(whole), format!("geometry: {error}"), "write the sizes of a Qwen3 dense model")
        })?;
        Ok(geometry)
    }

    fn memory(&self, geometry: &Geometry, extent: Extent) -> Result<(), CaseError> {
        let bytes = |input: Input| {
            let [rows, columns] = input.shape(geometry, extent);
            rows as u128 * columns as u128 * input.dtype().size() as u128
        };
        let inputs = || Input::ALL.into_iter().filter(|&input| self.kernel.reads(input));
        let total: u128 = inputs().map(bytes).sum();
        if total <= LARGEST_INPUTS {
            return Ok(());
        }
        // Reversed, so that the first of equals is named.
        let Some(largest) = inputs().rev().max_by_key(|&input| bytes(input)) else { return Ok(()) };
        let place = match largest {
            Input::KCache | Input::VCache => self.raw.pages.referenced,
            Input::RopeCos | Input::RopeSin => self.raw.max_seq.referenced,
            _ => self.raw.layers.referenced,
        };
        let gib = |bytes: u128| bytes.div_ceil(1 << 30);
        let message = format!(
            "the inputs would take {} GiB, more than the {} GiB that a case may have; {} alone takes {} GiB",
            gib(total),
            gib(LARGEST_INPUTS),
            largest.name(),
            gib(bytes(largest)),
        );
        Err(self.error(place, message, "use fewer layers or pages, or a shorter max_seq"))
    }

    fn tensors(&self) -> Result<BTreeMap<Input, Recipe>, CaseError> {
        let mut recipes = BTreeMap::new();
        for (key, raw) in &self.raw.tensors.0 {
            let input = self.input(key, "tensors", |input| self.kernel.reads(input))?;
            if !input.has_recipe() {
                let message = format!("tensors: {} has no recipe: it follows from rope_theta", key.value);
                return Err(self.error(key.referenced, message, "remove the line"));
            }
            recipes.insert(input, self.recipe(input, &raw.value)?);
        }
        let missing = |&input: &Input| self.kernel.reads(input) && input.has_recipe() && !recipes.contains_key(&input);
        if let Some(input) = Input::ALL.into_iter().find(missing) {
            let message = format!("tensors: no recipe for {}, which {} reads", input.name(), self.kernel.name());
            let help = format!("add a line such as `{}: {{recipe: zeros}}`", input.name());
            return Err(self.error(self.key("tensors"), message, help));
        }
        Ok(recipes)
    }

    /// The input that `key` names, if the section may name it.
    fn input(&self, key: &Spanned<String>, section: &str, allowed: impl Fn(Input) -> bool) -> Result<Input, CaseError> {
        Input::from_name(&key.value).filter(|&input| allowed(input)).ok_or_else(|| {
            let message = format!("{section}: {} has no tensor {:?} here", self.kernel.name(), key.value);
            let names: Vec<&str> = Input::ALL.into_iter().filter(|&i| allowed(i)).map(Input::name).collect();
            self.error(key.referenced, message, format!("the tensors are {}", names.join(", ")))
        })
    }

    fn recipe(&self, input: Input, raw: &RawRecipe) -> Result<Recipe, CaseError> {
        let recipe = Reader { checker: self, input, raw }.recipe()?;
        recipe.check(input.dtype()).map_err(|error| {
            let place = raw.place(error.parameter).unwrap_or(raw.recipe.referenced);
            self.error(place, format!("tensors: {}: {}", input.name(), error.message), error.help)
        })?;
        Ok(recipe)
    }

    /// `block_table`, with `rows` rows of `ceil(max_seq/128)` pages or -1.
    fn block_table(&self, rows: usize, whose: &str, extent: Extent) -> Result<Vec<Vec<i32>>, CaseError> {
        let raw = &self.raw.block_table;
        let blocks = extent.max_seq.div_ceil(PAGE);
        if raw.value.len() != rows {
            let message = format!("block_table: {} rows, expected {rows} ({whose})", raw.value.len());
            return Err(self.error(self.key("block_table"), message, "write one list of pages a row"));
        }
        let row = |(index, row): (usize, &RawRow)| {
            if row.value.len() != blocks {
                let found = row.value.len();
                let message = format!(
                    "block_table[{index}]: {found} entries, expected {blocks} (ceil(max_seq {} / {PAGE}))",
                    extent.max_seq
                );
                return Err(self.error(row.referenced, message, "fill unused entries with -1"));
            }
            row.value.iter().enumerate().map(|(block, page)| self.page(page, index, block, extent.pages)).collect()
        };
        raw.value.iter().enumerate().map(row).collect()
    }

    /// One entry of `block_table`.
    fn page(&self, page: &Spanned<i64>, row: usize, block: usize, pages: usize) -> Result<i32, CaseError> {
        let valid = page.value == -1 || usize::try_from(page.value).is_ok_and(|page| page < pages);
        i32::try_from(page.value).ok().filter(|_| valid).ok_or_else(|| {
            let message = format!(
                "block_table[{row}][{block}]: page {} is outside the cache, which has pages 0..={}",
                page.value,
                pages - 1
            );
            self.error(page.referenced, message, "write a page of the cache, or -1 where the block is unused")
        })
    }

    /// Requires that every block up to `positions` has a page.
    fn context_has_pages(&self, row: usize, table: &[i32], positions: usize) -> Result<(), CaseError> {
        let used = positions.div_ceil(PAGE);
        let Some(block) = table.iter().take(used).position(|&page| page < 0) else { return Ok(()) };
        let entry = self.raw.block_table.value.get(row).and_then(|row| row.value.get(block));
        let place = entry.map_or(self.raw.block_table.referenced, |page| page.referenced);
        let message = format!(
            "block_table[{row}][{block}]: -1 inside the context of row {row}, whose {positions} positions need {used} pages"
        );
        Err(self.error(place, message, "write the page that holds these positions"))
    }

    /// The 16 entries of a per-row key of a decode layer.
    fn per_row<'r>(&self, raw: Option<&'r RawRow>, key: &str) -> Result<&'r [Spanned<i64>; BATCH], CaseError> {
        let raw = raw.ok_or_else(|| self.missing(key))?;
        <&[Spanned<i64>; BATCH]>::try_from(raw.value.as_slice()).map_err(|_| {
            let message = format!("{key}: {} entries, expected {BATCH} (padding rows too)", raw.value.len());
            self.error(self.key(key), message, "write one entry a physical row")
        })
    }

    fn missing(&self, key: &str) -> CaseError {
        let message = format!("missing key {key:?}, which kernel {} needs", self.kernel.name());
        self.error(self.key("kernel"), message, format!("add a line `{key}: ...`"))
    }

    /// Refuses keys that belong to the other kernel.
    fn foreign(&self, keys: &[&str]) -> Result<(), CaseError> {
        let Some((key, _)) = self.keys.0.iter().find(|(key, _)| keys.contains(&key.value.as_str())) else {
            return Ok(());
        };
        let message = format!("unknown key {:?}: kernel {} does not take it", key.value, self.kernel.name());
        Err(self.error(key.referenced, message, "remove it"))
    }

    fn decode_layer(&self, active: usize, extent: Extent) -> Result<DecodeCase, CaseError> {
        let raw = &self.raw;
        self.foreign(&["prompts", "decode_steps"])?;
        let raw_lens = self.per_row(raw.seq_lens.as_ref(), "seq_lens")?;
        let raw_slots = self.per_row(raw.slot_mapping.as_ref(), "slot_mapping")?;
        let mut seq_lens = [0; BATCH];
        for (row, (length, found)) in seq_lens.iter_mut().zip(raw_lens).enumerate() {
            *length = self.size(found, &format!("seq_lens[{row}]"), 1, extent.max_seq, "max_seq")?;
        }
        let block_table = self.block_table(BATCH, "the physical rows", extent)?;
        let mut slots = [0; BATCH];
        for (row, (slot, found)) in slots.iter_mut().zip(raw_slots).enumerate() {
            let last = extent.pages * PAGE - 1;
            *slot = self.size(found, &format!("slot_mapping[{row}]"), 0, last, "the cache's last slot")?;
        }
        let batch = Batch { active, seq_lens, block_table, slots };
        for (row, (&slot, found)) in batch.slots.iter().zip(raw_slots).enumerate().take(active) {
            let (length, table) = (batch.seq_lens[row], &batch.block_table[row]);
            self.context_has_pages(row, table, length)?;
            let position = length - 1;
            let expected = batch.slot_of(row, position);
            if expected != Some(slot) {
                let expected = expected.unwrap_or_default();
                let message = format!(
                    "slot_mapping[{row}]: slot {slot} is page {} offset {}, but position {position} of row {row} lies \
                     in page {} offset {} (slot {expected})",
                    slot / PAGE,
                    slot % PAGE,
                    expected / PAGE,
                    expected % PAGE
                );
                let help = format!("write {expected}, or correct seq_lens[{row}] or block_table[{row}]");
                return Err(self.error(found.referenced, message, help));
            }
            if let Some(other) = batch.slots.iter().take(row).position(|&earlier| earlier == slot) {
                let message = format!("slot_mapping[{row}]: active rows {other} and {row} both write slot {slot}");
                return Err(self.error(found.referenced, message, "give each active row a page of its own"));
            }
        }
        Ok(DecodeCase { batch })
    }

    fn tokens(&self, active: usize, extent: Extent, geometry: &Geometry) -> Result<TokensCase, CaseError> {
        let raw = &self.raw;
        self.foreign(&["seq_lens", "slot_mapping", "poison"])?;
        let raw_prompts = raw.prompts.as_ref().ok_or_else(|| self.missing("prompts"))?;
        let raw_steps = raw.decode_steps.as_ref().ok_or_else(|| self.missing("decode_steps"))?;
        let decode_steps = self.size(raw_steps, "decode_steps", 0, extent.max_seq - 1, "max_seq - 1")?;
        if raw_prompts.value.len() != active {
            let message = format!("prompts: {} prompts, expected {active} (active_batch)", raw_prompts.value.len());
            return Err(self.error(self.key("prompts"), message, "write one list of token ids an active row"));
        }
        let most = extent.max_seq - decode_steps;
        let mut prompts = Vec::with_capacity(active);
        for (row, prompt) in raw_prompts.value.iter().enumerate() {
            let length = prompt.value.len();
            if !(1..=most).contains(&length) {
                let message = format!(
                    "prompts[{row}]: {length} tokens, expected 1..={most} (with decode_steps {decode_steps} they must \
                     fit max_seq {})",
                    extent.max_seq
                );
                return Err(self.error(prompt.referenced, message, "shorten the prompt or raise max_seq"));
            }
            let token = |(index, id): (usize, &Spanned<i64>)| {
                let what = format!("prompts[{row}][{index}]");
                self.size(id, &what, 0, geometry.real_vocab_size - 1, "the last id of the real vocabulary")
            };
            prompts.push(prompt.value.iter().enumerate().map(token).collect::<Result<Vec<usize>, _>>()?);
        }
        let block_table = self.block_table(active, "active_batch", extent)?;
        let mut owners: BTreeMap<i32, (usize, usize)> = BTreeMap::new();
        for (row, (prompt, table)) in prompts.iter().zip(&block_table).enumerate() {
            let positions = prompt.len() + decode_steps;
            self.context_has_pages(row, table, positions)?;
            for (block, &page) in table.iter().enumerate().take(positions.div_ceil(PAGE)) {
                if let Some((other, at)) = owners.insert(page, (row, block)) {
                    let place = raw.block_table.value[row].value[block].referenced;
                    let message = format!(
                        "block_table[{row}][{block}]: page {page} already holds block {at} of row {other}; both would \
                         write it"
                    );
                    return Err(self.error(place, message, "give each block a page of its own"));
                }
            }
        }
        Ok(TokensCase { prompts, decode_steps, block_table })
    }

    fn padding(&self, active: usize) -> Result<Padding, CaseError> {
        let Spanned { value, referenced, .. } = &self.raw.padding;
        match (value.as_str(), self.kernel) {
            ("replicate_row0", _) => Ok(Padding::ReplicateRow0),
            ("own", KernelKind::Tokens) if active < BATCH => Err(self.error(
                *referenced,
                "padding: padding rows of kernel tokens have no tokens of their own",
                "write `padding: replicate_row0`",
            )),
            ("own", _) => Ok(Padding::Own),
            (other, _) => {
                let message = format!("padding: {other:?} is unknown");
                Err(self.error(*referenced, message, "write replicate_row0 or own"))
            }
        }
    }

    fn poison(&self) -> Result<Option<Poison>, CaseError> {
        let Some(Spanned { value: poison, .. }) = &self.raw.poison else { return Ok(None) };
        let Spanned { value, referenced, .. } = &poison.kv_beyond_context;
        if value == "nan" {
            return Ok(Some(Poison::KvBeyondContextNan));
        }
        let message = format!("poison: kv_beyond_context: {value:?} is unknown");
        Err(self.error(*referenced, message, "write `poison: {kv_beyond_context: nan}`"))
    }

    fn device(&self, raw: &RawDevice) -> Result<DeviceInfo, CaseError> {
        let kind = match raw.kind.value.as_str() {
            "emulated" => DeviceKind::Emulated,
            "npu" => DeviceKind::Npu,
            other => {
                let message = format!("device: kind: {other:?} is unknown");
                return Err(self.error(raw.kind.referenced, message, "write emulated or npu"));
            }
        };
        let ulps = |found: &Spanned<i64>| {
            let ulps = self.size(found, "device: noise: exp_ulp", 0, 1 << 10, "the most this program takes")?;
            // The bound above fits any integer type.
            Ok(u32::try_from(ulps).unwrap_or_default())
        };
        let exp_ulp = raw.noise.as_ref().map(|noise| ulps(&noise.exp_ulp)).transpose()?;
        if let Some(revision) = &raw.kernel_revision
            && (revision.value.trim().is_empty() || revision.value.chars().any(char::is_control))
        {
            let message = "device: kernel_revision: expected printable text";
            return Err(self.error(revision.referenced, message, "write the revision of the kernel sources"));
        }
        let kernel_revision = raw.kernel_revision.as_ref().map(|revision| revision.value.clone());
        let launch = |kernel: &Spanned<RawKernel>| {
            let rules = launch::Rules { document: &self.document, case: self.kernel, device: kind };
            rules.launch(kernel).map(Box::new)
        };
        let kernel = raw.kernel.as_ref().map(launch).transpose()?;
        Ok(DeviceInfo { kind, kernel_revision, exp_ulp, kernel })
    }

    fn hashes(
        &self,
        raw: &Entries<Spanned<String>>,
        section: &str,
        allowed: impl Fn(Input) -> bool,
    ) -> Result<BTreeMap<Input, String>, CaseError> {
        let mut hashes = BTreeMap::new();
        for (key, hash) in &raw.0 {
            let input = self.input(key, section, &allowed)?;
            if hash.value.len() != 64 || !hash.value.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                let message = format!("{section}: {}: {:?} is no SHA-256", key.value, hash.value);
                return Err(self.error(hash.referenced, message, "write its 64 hexadecimal digits"));
            }
            hashes.insert(input, hash.value.to_ascii_lowercase());
        }
        Ok(hashes)
    }
}

impl RawSizes {
    /// Where the size called `name` stands.
    fn place(&self, name: &str) -> Option<Location> {
        let size = match name {
            "hidden_size" => &self.hidden_size,
            "num_attention_heads" => &self.num_attention_heads,
            "num_key_value_heads" => &self.num_key_value_heads,
            "head_dim" => &self.head_dim,
            "intermediate_size" => &self.intermediate_size,
            "num_hidden_layers" => &self.num_hidden_layers,
            "vocab_size" => &self.vocab_size,
            "real_vocab_size" => &self.real_vocab_size,
            _ => return None,
        };
        Some(size.referenced)
    }
}

impl RawRecipe {
    /// The keys that are given, with their places, in the order of the documentation.
    fn given(&self) -> impl Iterator<Item = (&'static str, Location)> {
        fn at<T>(key: &'static str, value: Option<&Spanned<T>>) -> Option<(&'static str, Location)> {
            value.map(|value| (key, value.referenced))
        }
        [
            at("mean", self.mean.as_ref()),
            at("std", self.std.as_ref()),
            at("bf16", self.bf16.as_ref()),
            at("lo", self.lo.as_ref()),
            at("hi", self.hi.as_ref()),
            at("value", self.value.as_ref()),
            at("outlier_columns", self.outlier_columns.as_ref()),
        ]
        .into_iter()
        .flatten()
    }

    /// Where `parameter` stands, those of `outlier_columns` included.
    fn place(&self, parameter: &str) -> Option<Location> {
        let outliers = self.outlier_columns.as_ref();
        match parameter {
            "recipe" => Some(self.recipe.referenced),
            "period" => outliers.map(|outliers| outliers.value.period.referenced),
            "phase" => outliers.map(|outliers| outliers.value.phase.referenced),
            "factor" => outliers.map(|outliers| outliers.value.factor.referenced),
            _ => self.given().find(|(key, _)| *key == parameter).map(|(_, place)| place),
        }
    }
}

/// One recipe being read.
struct Reader<'a> {
    checker: &'a Checker<'a>,
    input: Input,
    raw: &'a RawRecipe,
}

impl Reader<'_> {
    fn recipe(&self) -> Result<Recipe, CaseError> {
        let raw = self.raw;
        let kind = match raw.recipe.value.as_str() {
            "normal" => RecipeKind::Normal {
                mean: self.number("mean", raw.mean.as_ref())?,
                std: self.number("std", raw.std.as_ref())?,
                bf16: raw.bf16.as_ref().is_some_and(|bf16| bf16.value),
            },
            "int8_normal" => RecipeKind::Int8Normal { std: self.whole_std()? },
            "uniform" => {
                RecipeKind::Uniform { lo: self.number("lo", raw.lo.as_ref())?, hi: self.number("hi", raw.hi.as_ref())? }
            }
            "zeros" => RecipeKind::Zeros,
            "ones" => RecipeKind::Ones,
            "constant" => RecipeKind::Constant { value: self.number("value", raw.value.as_ref())? },
            other => {
                let help = "write normal, int8_normal, uniform, zeros, ones or constant";
                return Err(self.error(raw.recipe.referenced, &format!("no recipe is named {other:?}"), help));
            }
        };
        let takes: &[&str] = match kind {
            RecipeKind::Normal { .. } => &["mean", "std", "bf16"],
            RecipeKind::Int8Normal { .. } => &["std"],
            RecipeKind::Uniform { .. } => &["lo", "hi"],
            RecipeKind::Constant { .. } => &["value"],
            RecipeKind::Zeros | RecipeKind::Ones => &[],
        };
        if let Some((key, place)) = raw.given().find(|(key, _)| *key != "outlier_columns" && !takes.contains(key)) {
            let message = format!("unknown key {key:?}: recipe {} does not take it", kind.name());
            return Err(self.error(place, &message, "remove it"));
        }
        let outlier_columns = match &raw.outlier_columns {
            None => None,
            Some(Spanned { value: outliers, .. }) => Some(OutlierColumns {
                period: self.count("period", &outliers.period)?,
                phase: self.count("phase", &outliers.phase)?,
                factor: outliers.factor.value,
            }),
        };
        Ok(Recipe { kind, outlier_columns })
    }

    fn error(&self, place: Location, message: &str, help: &str) -> CaseError {
        self.checker.error(place, format!("tensors: {}: {message}", self.input.name()), help)
    }

    fn number(&self, key: &str, value: Option<&Spanned<f64>>) -> Result<f64, CaseError> {
        value.map(|value| value.value).ok_or_else(|| {
            let message = format!("missing key {key:?}, which recipe {} needs", self.raw.recipe.value);
            self.error(self.raw.recipe.referenced, &message, &format!("add `{key}: ...`"))
        })
    }

    fn count(&self, key: &str, found: &Spanned<i64>) -> Result<usize, CaseError> {
        usize::try_from(found.value).map_err(|_| {
            self.error(found.referenced, &format!("{key} is {}, below 0", found.value), "write 0 or a positive number")
        })
    }

    fn whole_std(&self) -> Result<u32, CaseError> {
        let std = self.number("std", self.raw.std.as_ref())?;
        if std.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&std) {
            return Ok(std as u32);
        }
        let place = self.raw.place("std").unwrap_or(self.raw.recipe.referenced);
        let message = format!("std is {std}; int8_normal needs a whole number, 0 or more");
        Err(self.error(place, &message, "a useful std is about 32"))
    }
}

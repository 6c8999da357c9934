//! The devices that faults are planted into.

use std::sync::LazyLock;

use assay_tests::{Bench, small, with_recipe};
use cases::{Input, Kernel, NewCase, Padding, Poison, RecipeKind, new_case};
use reference::Geometry;

/// A device by the function that runs it, once.
pub type Make = fn() -> &'static Bench;

macro_rules! benches {
    ($($(#[$doc:meta])* $name:ident = $make:expr;)*) => {
        $($(#[$doc])* pub fn $name() -> &'static Bench {
            static BENCH: LazyLock<Bench> = LazyLock::new(|| $make);
            &BENCH
        })*
        /// All devices that run here, by name.
        pub const ALL: &[(&str, Make)] = &[$((stringify!($name), $name)),*];
    };
}

benches! {
    /// Two rows of 140 and 77 tokens; padding rows of their own.
    two_rows = Bench::emulated(new_case(small()).unwrap());
    /// The same with padding rows that repeat row 0.
    replicated =
        Bench::emulated(new_case(NewCase { padding: Padding::ReplicateRow0, ..small() }).unwrap());
    /// As many KV heads as query heads.
    one_to_one = {
        let geometry = Geometry { num_attention_heads: 2, num_key_value_heads: 2, ..small().geometry };
        Bench::emulated(new_case(NewCase { geometry, ..small() }).unwrap())
    };
    /// Codes 64 to 127 and weights of 127: INT32 sums beyond 2^24.
    large_sums = {
        let geometry = Geometry { hidden_size: 2048, intermediate_size: 128, ..small().geometry };
        let parameters = NewCase { geometry, seq_lens: vec![20, 5], ..small() };
        Bench::emulated(with_recipe(parameters, &[
            (Input::HiddenStates, RecipeKind::Uniform { lo: 0.5, hi: 1.0 }),
            (Input::Wq, RecipeKind::Constant { value: 127.0 }),
        ]))
    };
    /// A full batch, all zero, 640 wide.
    zeros = {
        let geometry = Geometry { hidden_size: 640, ..small().geometry };
        let parameters = NewCase { geometry, active_batch: 16, seq_lens: vec![5; 16], max_seq: 128, ..small() };
        Bench::emulated(with_recipe(parameters, &[(Input::HiddenStates, RecipeKind::Zeros)]))
    };
    /// Normal hidden states without outlier columns, the first seed at which some row's largest element is
    /// 3.96875, so that 127 / amax is 32.
    power_of_two_scale = {
        let made = |seed| {
            let geometry = Geometry { hidden_size: 640, ..small().geometry };
            let recipes = [
                (Input::HiddenStates, RecipeKind::Normal { mean: 0.0, std: 1.2, bf16: false }),
                (Input::InputRmsWeight, RecipeKind::Ones),
            ];
            Bench::emulated(with_recipe(NewCase { geometry, seed, seq_lens: vec![5, 3], ..small() }, &recipes))
        };
        let fits = |bench: &Bench| super::field::row_of_amax(&bench.layer(), 3.968_75).is_some();
        (1..).map(made).find(fits).unwrap()
    };
    /// One row, different padding rows.
    one_row = Bench::emulated(new_case(NewCase { active_batch: 1, seq_lens: vec![140], ..small() }).unwrap());
    /// Padding rows of their own that write to row 0's slot.
    shared_slot = {
        let mut case = new_case(small()).unwrap();
        if let Kernel::DecodeLayer(decode) = &mut case.kernel {
            let batch = &mut decode.batch;
            for row in 2..16 {
                batch.slots[row] = batch.slots[0];
                batch.seq_lens[row] = batch.seq_lens[0];
                batch.block_table[row] = batch.block_table[0].clone();
            }
        }
        Bench::emulated(case)
    };
    /// A page boundary; the next page, which the table already lists, is row 1's and NaN from its second slot on.
    boundary_nan = Bench::emulated(boundary(Some(Poison::KvBeyondContextNan), &[]));
    /// A page boundary before a fresh page.
    boundary_zeros = Bench::emulated(boundary(None, &[
        (Input::KCache, RecipeKind::Zeros),
        (Input::VCache, RecipeKind::Zeros),
    ]));
    /// A page boundary before a page of old keys.
    boundary_old = Bench::emulated(boundary(None, &[]));
    /// 18 tokens, NaN behind them.
    poisoned = Bench::emulated(
        new_case(NewCase {
            active_batch: 1,
            seq_lens: vec![18],
            poison: Some(Poison::KvBeyondContextNan),
            ..small()
        }).unwrap(),
    );
    /// Keys so large that scores lie near -6e4; the first seed at which all of some head's do.
    far_scores = {
        let made = |seed| {
            let recipes = [
                (Input::KCache, RecipeKind::Constant { value: 8e4 }),
                (Input::KNormWeight, RecipeKind::Constant { value: 8e4 }),
            ];
            let parameters = NewCase { active_batch: 1, seq_lens: vec![18], seed, ..small() };
            Bench::emulated(with_recipe(parameters, &recipes))
        };
        (1..).map(made).find(|bench| super::field::head_of_low_scores(bench).is_some()).unwrap()
    };
    /// A full batch with 40 query heads of 128: 16 x 5120 attention outputs.
    wide = {
        let geometry = Geometry {
            hidden_size: 256,
            num_attention_heads: 40,
            num_key_value_heads: 8,
            head_dim: 128,
            intermediate_size: 128,
            ..small().geometry
        };
        let seq_lens = vec![33; 16];
        Bench::emulated(new_case(NewCase { geometry, active_batch: 16, seq_lens, max_seq: 128, ..small() }).unwrap())
    };
}

/// The recorded bundle with two active rows.
pub fn recorded() -> &'static Bench {
    Bench::recorded("mini/active2")
}

/// Row 0 fills its first page; row 1's only page is the next one of row 0's table.
fn boundary(poison: Option<Poison>, recipes: &[(Input, RecipeKind)]) -> cases::Case {
    let mut case = with_recipe(NewCase { seq_lens: vec![128, 1], ..small() }, recipes);
    if let Kernel::DecodeLayer(decode) = &mut case.kernel {
        let batch = &mut decode.batch;
        batch.block_table[1] = batch.block_table[0].clone();
        batch.block_table[1].rotate_left(1);
        batch.slots[1] = batch.block_table[1][0] as usize * 128;
    }
    case.poison = poison;
    case
}

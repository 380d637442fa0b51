//! Experts in every layout, the names of wrapped models, and layers whose tensors do not fit
//! together.

use super::{File, MLP, Made, bf16, config, f32s, i32s, weights_of};
use isobit_models::experts::{self, Experts, ExpertsShape, Projection};
use isobit_models::{FloatFormat, RandomSource, Weight, WeightSource};
use serde_json::Value;

/// A number for every element of every expert.
pub(crate) fn element(projection: Projection, expert: usize, row: usize, column: usize) -> u16 {
    (projection as usize * 4000 + expert * 1000 + row * 30 + column) as u16
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ExpertsLayout {
    Single,
    Fused,
    Transposed,
}

pub(crate) fn expert_file(shape: ExpertsShape, layout: ExpertsLayout) -> File {
    let ExpertsShape { experts, width, hidden } = shape;
    let mut file = File::new();
    if layout == ExpertsLayout::Single {
        for expert in 0..experts {
            for projection in Projection::ALL {
                let [rows, columns] = projection.shape(shape);
                let made = bf16(&[rows, columns], |at| element(projection, expert, at / columns, at % columns));
                file.insert(format!("{MLP}.experts.{expert}.{}.weight", projection.module()), made);
            }
        }
        return file;
    }
    let transposed = layout == ExpertsLayout::Transposed;
    let make = |tall: usize, across: usize, of: &dyn Fn(usize, usize, usize) -> u16| {
        let dims = if transposed { [experts, across, tall] } else { [experts, tall, across] };
        bf16(&dims, |at| {
            let (expert, row, column) = (at / dims[2] / dims[1], at / dims[2] % dims[1], at % dims[2]);
            if transposed { of(expert, column, row) } else { of(expert, row, column) }
        })
    };
    let gate_up = make(2 * width, hidden, &|expert, row, column| {
        let projection = if row < width { Projection::Gate } else { Projection::Up };
        element(projection, expert, row % width, column)
    });
    file.insert(format!("{MLP}.experts.gate_up_proj"), gate_up);
    let down = make(hidden, width, &|expert, row, column| element(Projection::Down, expert, row, column));
    file.insert(format!("{MLP}.experts.down_proj"), down);
    file
}

pub(crate) fn stored(experts: Experts) -> experts::StoredExperts {
    match experts {
        Experts::Stored(stored) => stored,
        Experts::Gptq(_) | Experts::Mxfp4(_) => panic!("quantised"),
    }
}

#[test]
fn every_layout_gives_the_same_experts() {
    // The last two look alike both ways in one of their tensors.
    for (width, hidden) in [(5, 4), (2, 7), (2, 4), (3, 3), (1, 1), (1, 2)] {
        let shape = ExpertsShape { experts: 3, width, hidden };
        for layout in [ExpertsLayout::Single, ExpertsLayout::Fused, ExpertsLayout::Transposed] {
            let (_folder, weights) = weights_of(&expert_file(shape, layout), &config(&Value::Null)).expect("weights");
            let loaded = stored(experts::load(&weights, MLP, shape).expect("experts"));
            assert_eq!(loaded.format(), FloatFormat::Bf16);
            for projection in Projection::ALL {
                let [rows, columns] = projection.shape(shape);
                let stacked = loaded.stacked(projection).expect("numbers");
                assert_eq!(stacked.shape, [3, rows, columns]);
                let wanted: Vec<u16> = (0..3 * rows * columns)
                    .map(|at| element(projection, at / columns / rows, at / columns % rows, at % columns))
                    .collect();
                assert_eq!(stacked.bits().collect::<Vec<_>>(), wanted, "{layout:?} {projection:?} {shape:?}");
                let one = loaded.expert(projection, 1).expect("numbers");
                let part = rows * columns..2 * rows * columns;
                assert_eq!(
                    (one.shape.clone(), one.bits().collect::<Vec<_>>()),
                    (vec![rows, columns], wanted[part].to_vec())
                );
                let borrowed = matches!(one.bytes, std::borrow::Cow::Borrowed(_));
                assert_eq!(borrowed, layout != ExpertsLayout::Transposed, "nothing is copied that need not be");
                loaded.release_expert(projection, 1);
            }
            loaded.release();
        }
    }
}

#[test]
fn a_source_of_random_numbers_has_experts() {
    let shape = ExpertsShape { experts: 2, width: 3, hidden: 4 };
    let source = RandomSource { seed: 1 };
    let loaded = stored(experts::load(&source, MLP, shape).expect("experts"));
    let [gate, up] = [Projection::Gate, Projection::Up].map(|p| loaded.stacked(p).expect("numbers").bytes.into_owned());
    assert_eq!((gate.len(), gate == up), (48, false));
    assert!(matches!(source.weight("model.layers.0.self_attn.q_proj", 4, 4), Ok(Weight::Stored(_))));
    assert!(source.bias("model.layers.0.self_attn.q_proj", 4, false).expect("none").is_none());
}

#[test]
fn experts_that_do_not_fit_together_are_named() {
    let shape = ExpertsShape { experts: 3, width: 5, hidden: 4 };
    let name = |rest: &str| format!("{MLP}.experts.{rest}");
    let check = |layout: ExpertsLayout, change: &dyn Fn(&mut File), wanted: &[&str]| {
        let mut file = expert_file(shape, layout);
        change(&mut file);
        let (_folder, weights) = weights_of(&file, &config(&Value::Null)).expect("weights");
        let error = experts::load(&weights, MLP, shape).err().expect("nonsense").to_string();
        assert!(wanted.iter().all(|part| error.contains(part)), "{error}: wanted {wanted:?}");
    };
    let remove = |rest: &'static str| move |file: &mut File| drop(file.remove(&format!("{MLP}.experts.{rest}")));
    let add = |rest: &'static str, made: Made| {
        move |file: &mut File| drop(file.insert(format!("{MLP}.experts.{rest}"), made.clone()))
    };
    let zeros = |shape: &[usize]| bf16(shape, |_| 0);
    check(ExpertsLayout::Single, &remove("1.up_proj.weight"), &[&name("1.up_proj.weight"), "missing"]);
    check(ExpertsLayout::Single, &|file| file.clear(), &[&name("0.gate_proj.weight"), "missing"]);
    check(
        ExpertsLayout::Single,
        &add("3.up_proj.weight", zeros(&[5, 4])),
        &[&name("3.up_proj.weight"), "the config has 3"],
    );
    check(
        ExpertsLayout::Single,
        &add("03.up_proj.weight", zeros(&[5, 4])),
        &["03.up_proj.weight", "not a weight of an expert"],
    );
    check(ExpertsLayout::Single, &add("0.gate_proj.weight", zeros(&[4, 5])), &["0.gate_proj", "[4, 5]", "[5, 4]"]);
    check(
        ExpertsLayout::Single,
        &add("2.down_proj.weight", f32s(&[4, 5], &[0.0; 20])),
        &["2.down_proj", "F32", "Bf16"],
    );
    check(
        ExpertsLayout::Single,
        &add("2.router.weight", zeros(&[1])),
        &["2.router.weight", "not a weight of an expert"],
    );
    check(ExpertsLayout::Single, &add("gate_up_proj_bias", zeros(&[1])), &["gate_up_proj_bias"]);
    check(
        ExpertsLayout::Single,
        &add("down_proj", zeros(&[3, 4, 5])),
        &["0.down_proj.weight", "down_proj is there too"],
    );
    check(
        ExpertsLayout::Single,
        &add("0.up_proj.bias", bf16(&[5], |_| 1)),
        &["0.up_proj.bias", "element 0 is not zero"],
    );
    check(ExpertsLayout::Single, &add("0.up_proj.qweight", zeros(&[1])), &["0.up_proj", "`qweight`"]);
    check(ExpertsLayout::Single, &add("0.up_proj.weight", i32s(&[5, 4], &[0; 20])), &["0.up_proj.weight", "I32"]);
    check(ExpertsLayout::Fused, &remove("down_proj"), &[&name("down_proj"), "missing"]);
    check(ExpertsLayout::Fused, &remove("gate_up_proj"), &[&name("gate_up_proj"), "missing"]);
    check(
        ExpertsLayout::Fused,
        &add("gate_up_proj", zeros(&[2, 10, 4])),
        &[&name("gate_up_proj"), "[2, 10, 4]", "[3, 10, 4]"],
    );
    check(ExpertsLayout::Fused, &add("down_proj", zeros(&[3, 5, 4])), &[&name("down_proj"), "[3, 5, 4]"]);
    check(ExpertsLayout::Transposed, &add("down_proj", zeros(&[3, 4, 5])), &[&name("down_proj"), "[3, 4, 5]"]);
    check(ExpertsLayout::Fused, &add("down_proj", f32s(&[3, 4, 5], &[0.0; 60])), &[&name("down_proj"), "F32"]);
    check(ExpertsLayout::Fused, &add("down_proj", i32s(&[3, 4, 5], &[0; 60])), &[&name("down_proj"), "I32"]);
    // A bias of zeros, as quantisers write them, is no bias.
    let mut file = expert_file(shape, ExpertsLayout::Single);
    file.insert(name("0.up_proj.bias"), bf16(&[5], |_| 0));
    let (_folder, weights) = weights_of(&file, &config(&Value::Null)).expect("weights");
    assert!(experts::load(&weights, MLP, shape).is_ok());
}

#[test]
fn names_of_wrapped_models_are_found() {
    let shape = ExpertsShape { experts: 2, width: 3, hidden: 2 };
    let mut file: File = expert_file(shape, ExpertsLayout::Fused)
        .into_iter()
        .map(|(name, made)| (name.replacen("model.", "model.language_model.", 1), made))
        .collect();
    for extra in ["lm_head.weight", "model.visual.patch.weight"] {
        file.insert(extra.to_string(), bf16(&[2, 2], |at| at as u16));
    }
    let (_folder, weights) = weights_of(&file, &config(&Value::Null)).expect("weights");
    assert!(weights.names().prefixed());
    assert_eq!(weights.unused(), ["model.visual.patch.weight"]);
    assert!(experts::load(&weights, MLP, shape).is_ok());
    assert!(weights.contains("lm_head.weight") && weights.contains(&format!("{MLP}.experts.down_proj")));
    assert_eq!(weights.shape("lm_head.weight"), Some(vec![2, 2]));
    let error = weights.tensor(&format!("{MLP}.experts.down_proj"), &[1]).expect_err("a shape").to_string();
    assert!(error.contains("model.language_model.layers.0.mlp.experts.down_proj"), "{error}");
    file.insert("model.norm.weight".to_string(), bf16(&[2], |_| 0));
    let error = weights_of(&file, &config(&Value::Null)).expect_err("two prefixes").to_string();
    assert!(error.contains("model.norm.weight"), "{error}");
}

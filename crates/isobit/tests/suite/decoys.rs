//! Forged folders that look right: a file beside the weights that holds the true ones, weights that
//! are left out or in another type, and receipts that were made older or unfinished.

use crate::forgery::{ground, poke, refit, remanifest, restore, says};
use crate::model_folder::{Folder, Shape, weights};
use crate::receipt::STEPS;
use isobit_numerics::cast::f32_to_f16;
use isobit_proof::receipt::Receipt;
use isobit_proof::safetensors::{Dtype, Entry, SafeTensors, write};
use isobit_proof::{Hash, Lock};
use serde_json::Value;
use std::collections::BTreeMap;

const VERIFY: [&str; 2] = ["verify", "run"];

/// The config says where the weights are, not the files that are there.
#[test]
fn true_weights_beside_spoiled_ones_hide_nothing() {
    let folder = ground(Some("type = \"full\""));
    let cases = [
        ("final", "it does not belong to the model", "is not that of checkpoint-6", "5..6"),
        ("checkpoint-4", "it does not belong to a checkpoint", "its weights are not those of update 4", "3..4"),
    ];
    for (place, name, weights, steps) in cases {
        restore(&folder);
        let path = |file: &str| folder.path(&format!("run/{place}/{file}"));
        std::fs::copy(path("model.safetensors"), path("adapter_model.safetensors")).expect("copied");
        poke(&folder, &format!("run/{place}/model.safetensors"));
        refit(&folder, |_| ());
        says(&folder, &VERIFY, 8, &format!("{place}/adapter_model.safetensors: {name}"));
        says(&folder, &VERIFY, 8, weights);
        let replay = ["replay", "run", "--steps", steps, "-q", "--against", "none"];
        says(&folder, &replay, 1, &format!("the chain agrees, but {place} holds other"));
    }
    restore(&folder);
    std::fs::copy(
        folder.path("run/final/model.safetensors"),
        folder.path("run/final/model-00001-of-00001.safetensors"),
    )
    .expect("copied");
    refit(&folder, |_| ());
    says(&folder, &VERIFY, 8, "final/model-00001-of-00001.safetensors: it does not belong to the model");
}

/// The same for an adapter.
#[test]
fn an_adapter_has_no_model_beside_it() {
    let folder = ground(None);
    folder.put("run/checkpoint-4/model.safetensors", "anything");
    refit(&folder, |_| ());
    says(&folder, &VERIFY, 8, "checkpoint-4/model.safetensors: it does not belong to a checkpoint of this run");
    restore(&folder);
    std::fs::remove_file(folder.path("run/checkpoint-4/adapter_config.json")).expect("removed");
    refit(&folder, |_| ());
    says(&folder, &VERIFY, 8, "checkpoint-4/adapter_config.json: it is missing");
}

/// A kill while a folder is removed leaves it under a temporary name.
#[test]
fn a_half_removed_folder_is_no_damage() {
    let folder = ground(None);
    std::fs::rename(folder.path("run/checkpoint-3"), folder.path("run/.checkpoint-3.removed.partial")).expect("moved");
    std::fs::create_dir(folder.path("run/.final.removed.partial")).expect("folder");
    refit(&folder, |_| ());
    says(&folder, &VERIFY, 0, "note: .checkpoint-3.removed.partial was left by a crash; `train --resume` removes it");
    says(&folder, &VERIFY, 0, "note: .final.removed.partial was left by a crash");
}

/// A proof that was killed leaves a folder, which a resumed run removes; one that is alive keeps
/// it, and so does a folder with files of others.
#[test]
fn what_a_killed_proof_leaves_is_removed() {
    let folder = ground(None);
    let resume = [&STEPS[..], &["--resume-from=checkpoint-4"]].concat();
    let left = "run/.isobit-4194304.partial";
    std::fs::create_dir(folder.path(left)).expect("folder");
    folder.put(&format!("{left}/adapter_config.json"), "{");
    folder.put(&format!("{left}/.isobit-4194304-7.partial"), "half");
    says(&folder, &VERIFY, 0, "was left by a crash");
    let lock = Lock::acquire(&folder.path(left)).expect("free");
    says(&folder, &VERIFY, 0, "is what `isobit prove` is writing");
    folder.trained("run", &resume);
    assert!(folder.has(&format!("{left}/adapter_config.json")), "its proof is alive");
    drop(lock);
    folder.put(&format!("{left}/thesis.txt"), "years of work");
    folder.train("run", &resume).says(2, &["holds files that do not belong to `final`", "hint: move it away"]);
    std::fs::remove_file(folder.path(&format!("{left}/thesis.txt"))).expect("removed");
    folder.trained("run", &resume);
    assert!(!folder.has(left));
    says(&folder, &VERIFY, 0, "verified");
}

/// Rewrites the tensors of the model in the final folder.
fn change_tensors(folder: &Folder, change: impl Fn(&str, &mut Dtype, &mut Vec<u8>) -> bool) {
    let path = folder.path("run/final/model.safetensors");
    let file = SafeTensors::open(&path).expect("tensors");
    let mut tensors = Vec::new();
    for tensor in file.tensors() {
        let (mut dtype, mut bytes) = (tensor.dtype, tensor.bytes.to_vec());
        if change(tensor.name, &mut dtype, &mut bytes) {
            tensors.push((tensor.name.to_string(), dtype, tensor.shape.to_vec(), bytes));
        }
    }
    drop(file);
    let entries: Vec<Entry> =
        tensors.iter().map(|(name, dtype, shape, bytes)| Entry { name, dtype: *dtype, shape, bytes }).collect();
    write(&path, &BTreeMap::new(), &entries).expect("written");
    refit(folder, |_| ());
}

/// A head of its own is trained, and a folder without it would be loaded with the table in its
/// place.
#[test]
fn a_trained_head_is_not_left_out() {
    let folder = Folder::new(Shape::TINY);
    let mut config: Value = serde_json::from_str(&folder.text("model/config.json")).expect("JSON");
    config["tie_word_embeddings"] = false.into();
    let mut all = weights(folder.shape, 1);
    all.push(("lm_head.weight".to_string(), all[0].1.clone(), all[0].2.clone()));
    folder.put_model("model", &config, &all);
    folder.trained("run", &[&STEPS[..], &["adapter.type=full"]].concat());
    says(&folder, &VERIFY, 0, "verified");
    change_tensors(&folder, |name, _, _| name != "lm_head.weight");
    says(&folder, &VERIFY, 8, "`lm_head.weight`, but it is missing");
}

/// A run that trained a whole model stands for its final folder, for every command.
#[test]
fn a_run_is_named_as_the_base() {
    let folder = ground(Some("type = \"full\""));
    folder.trained("on", &["base_model=run", "max_steps=1"]);
    says(&folder, &["verify", "on", "--model", "run/final"], 0, "verified");
    says(&folder, &["verify", "on", "--model", "run"], 0, "verified");
}

/// The final folder of an unfinished run is of an earlier end of it, not of anything.
#[test]
fn an_unfinished_run_has_no_final_folder_of_another_one() {
    let folder = ground(None);
    let edits: [fn(&mut Receipt); 5] = [
        |own| own.made.data[0].blake3 = Hash([0; 32]),
        |own| own.made.tokenizer.clear(),
        |own| own.made.base.tensors.clear(),
        |own| own.made.rows = Some(7),
        |own| own.made.best.as_mut().expect("evaluated").step = 1,
    ];
    let unfinish = |edit: fn(&mut Receipt)| {
        restore(&folder);
        let (run, last) = (folder.path("run"), folder.path("run/final"));
        let [mut whole, mut own] = [&run, &last].map(|place| Receipt::read(place).expect("a receipt"));
        (whole.made.finished, whole.result) = (false, None);
        edit(&mut own);
        for (receipt, place) in [(&mut whole, &run), (&mut own, &last)] {
            receipt.digest = receipt.computed_digest();
            receipt.write(place).expect("written");
        }
        remanifest(&last);
    };
    unfinish(|_| ());
    says(&folder, &VERIFY, 0, "note: final/ comes from an earlier end of this unfinished run");
    for edit in edits {
        unfinish(edit);
        says(&folder, &VERIFY, 8, "final/receipt.json: it is not the receipt of this run");
    }
}

/// A run that goes on has another receipt than the one that was proved.
#[test]
fn a_statement_about_an_earlier_end_is_no_damage() {
    let folder = ground(None);
    folder.run(&["prove", "run", "-q"]).says(0, &[]);
    folder.trained("run", &[&STEPS[..], &["--resume", "save_dtype=bfloat16"]].concat());
    says(
        &folder,
        &VERIFY,
        0,
        "note: statement.json is about an earlier end of the run: `isobit prove` makes a new one",
    );
    let named = ["verify", "run", "--statement", "run/statement.json"];
    says(&folder, &named, 8, "statement.json: it is about another receipt");
    folder.run(&["prove", "run", "-q"]).says(0, &[]);
    says(&folder, &named, 0, "verified");
}

/// A receipt of the first version does not say how many rows there are.
#[test]
fn an_old_receipt_leaves_the_course_unchecked() {
    let folder = ground(None);
    for place in ["run", "run/final"] {
        let mut receipt = Receipt::read(&folder.path(place)).expect("a receipt");
        (receipt.segment, receipt.made.rows) = (None, None);
        let mut value = serde_json::to_value(&receipt).expect("JSON");
        value["schema"] = "isobit.receipt/1".into();
        receipt = serde_json::from_value(value).expect("a receipt");
        receipt.digest = receipt.computed_digest();
        receipt.write(&folder.path(place)).expect("written");
    }
    remanifest(&folder.path("run/final"));
    says(&folder, &VERIFY, 0, "the course of the run (its length, learning rates and evaluations) was not checked");
}

/// All trained tensors are rounded, or none.
#[test]
fn a_result_has_one_type() {
    let folder = ground(Some("type = \"full\""));
    change_tensors(&folder, |name, dtype, bytes| {
        if name.contains("norm") {
            *dtype = Dtype::F16;
            let values = bytes.chunks(4).map(|four| f32::from_le_bytes(four.try_into().expect("four")));
            *bytes = values.flat_map(|value| f32_to_f16(value).to_le_bytes()).collect();
        }
        true
    });
    says(&folder, &VERIFY, 8, "holds F16, but `");
}

/// Going back drops the record of what came later, though its checkpoints stay.
#[test]
fn a_checkpoint_behind_which_the_run_went_back_is_no_start() {
    let folder = ground(None);
    // As after a kill: the run went back to update 2, and no further.
    let cut = |name: &str, keep: usize| {
        let text = folder.text(&format!("run/{name}"));
        folder.put(&format!("run/{name}"), text.split_inclusive('\n').take(keep).collect::<String>());
    };
    cut("chain.jsonl", 3);
    cut("metrics.jsonl", 0);
    let pointer = folder.text("run/latest.json").replace("checkpoint-6", "checkpoint-2").replace(": 6", ": 2");
    folder.put("run/latest.json", pointer);
    let ran = folder.train("run", &[&STEPS[..], &["--resume-from=checkpoint-4"]].concat());
    ran.says(2, &["checkpoint-4 is later than the end of the run (update 2)", "hint: `--resume` goes on from"]);
}

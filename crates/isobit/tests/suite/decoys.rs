//! Forged folders that look right: a file beside the weights that holds the true ones, weights that
//! are left out or in another type, and receipts that were made older or unfinished.

use crate::forgery::{ground, poke, refit, restore, says};

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
    std::fs::copy(folder.path("run/final/model.safetensors"), folder.path("run/final/model-00001-of-00001.safetensors"))
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

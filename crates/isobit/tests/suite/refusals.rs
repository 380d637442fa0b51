//! Bad input to `isobit train`: each with its exit code and a message that names the file, the key
//! or the tensor.

use crate::model_folder::{self, Folder, Named, Shape, config_json, names, put_tensors, rows, weights};
use isobit_conformance::skip;
use std::fs::File;

fn tiny() -> Folder {
    Folder::new(Shape::TINY)
}

/// Trains after `change`, which must be refused; nothing but the lock may be left in the output
/// folder.
#[track_caller]
fn refused(change: impl FnOnce(&Folder), overrides: &[&str], code: i32, parts: &[&str]) {
    let folder = tiny();
    change(&folder);
    let ran = folder.train("out", overrides);
    ran.says(code, parts);
    assert!(ran.err.contains("error: "), "{}", ran.err);
    if folder.has("out") {
        assert_eq!(names(&folder.path("out")), ["LOCK"]);
    }
}

/// The same for a change of the model's tensors.
#[track_caller]
fn refused_weights(change: impl FnOnce(&mut Vec<Named>), code: i32, parts: &[&str]) {
    let put = |folder: &Folder| {
        let mut tensors = weights(folder.shape, 1);
        change(&mut tensors);
        put_tensors(&folder.path("model/model.safetensors"), &tensors);
    };
    refused(put, &[], code, parts);
}

fn find<'a>(tensors: &'a mut [Named], name: &str) -> &'a mut Named {
    tensors.iter_mut().find(|tensor| tensor.0 == name).expect("a tensor of the model")
}

/// Replaces text in a file.
fn edit(folder: &Folder, name: &str, from: &str, to: &str) {
    let text = folder.text(name);
    assert!(text.contains(from), "{text}");
    folder.put(name, text.replace(from, to));
}

#[test]
fn configs() {
    let without = |line: &'static str| move |folder: &Folder| edit(folder, "config.toml", line, "");
    refused(without("base_model = \"model\"\n"), &[], 2, &["config.toml", "`base_model` is missing", "hint: "]);
    refused(without("[[datasets]]\npath = \"data.jsonl\"\n"), &[], 2, &["config.toml", "`datasets` is missing"]);
    let misspelt = |folder: &Folder| edit(folder, "config.toml", "learning_rate", "lerning_rate");
    refused(misspelt, &[], 2, &["config.toml:", "unknown key `lerning_rate`", "did you mean `learning_rate`?"]);
    let broken = |folder: &Folder| edit(folder, "config.toml", "[training]", "[training");
    refused(broken, &[], 2, &["config.toml:", "not valid TOML"]);
    refused(|folder| folder.put("config.toml", [0xff, 0xfe]), &[], 2, &["config.toml", "UTF-8"]);
    let none = |folder: &Folder| std::fs::remove_file(folder.path("config.toml")).expect("removed");
    refused(none, &[], 2, &["config.toml"]);
}

#[test]
fn overrides() {
    for (argument, parts) in [
        ("nonsense", ["--set nonsense", "there is no `=`"]),
        ("lerning_rate=1", ["--set lerning_rate=1", "did you mean `learning_rate`"]),
        ("learning_rate=fast", ["--set learning_rate=fast", "must be a number"]),
        ("learning_rate=1e30", ["--set learning_rate=1e30", "out of range"]),
        ("learning_rate=nan", ["--set learning_rate=nan", "learning_rate"]),
        ("max_steps=-5", ["--set max_steps=-5", "max_steps"]),
        ("device=abacus", ["--set device=abacus", "not a device"]),
        ("max_seq_length=513", ["max_seq_length 513", "512 positions"]),
        ("val_set_size=40", ["40 rows are held out of 40", "val_set_size"]),
        ("lora_target_modules=[\"nothing\"]", ["no module", "target"]),
        ("lora_r=65", ["rank 65", "1 to 64"]),
        ("base_model=nowhere", ["nowhere does not exist", "check the path"]),
        ("base_model=Qwen/Qwen3-0.6B", ["Qwen/Qwen3-0.6B does not exist", "Hugging Face hub"]),
        ("base_model=model/Qwen3-0.6B", ["model/Qwen3-0.6B does not exist", "check the path"]),
        ("adapter.type=qlora", ["--set adapter.type=qlora", "load_in_4bit = true"]),
        ("base_model=data.jsonl", ["data.jsonl is not a folder", "config.json"]),
        ("datasets.0.path=nowhere.jsonl", ["nowhere.jsonl does not exist", "check the path"]),
        ("datasets.0.path=model", ["model is a folder", "name files"]),
        ("datasets.0.path=data.jsonl/x", ["data.jsonl/x does not exist", "check the path"]),
        ("eval.path=nowhere.jsonl", ["nowhere.jsonl does not exist", "check the path"]),
    ] {
        let folder = tiny();
        let ran = folder.run(&["train", "config.toml", "--set", argument]);
        ran.says(2, &parts);
    }
    refused(|_| (), &["device=opencl:999"], 6, &["opencl:999", "isobit devices"]);
    refused(|_| (), &["device=hip:999"], 6, &["hip:999", "isobit devices"]);
}

#[test]
fn files_of_the_model() {
    let config = |key: &'static str, value: serde_json::Value| {
        move |folder: &Folder| {
            let mut config = config_json(folder.shape);
            config[key] = value;
            folder.put("model/config.json", config.to_string());
        }
    };
    for key in ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"] {
        refused(config(key, serde_json::Value::Null), &[], 8, &["config.json", key]);
        refused(config(key, u64::MAX.into()), &[], 8, &["config.json", key]);
        refused(config(key, 0.into()), &[], 8, &["config.json", key]);
    }
    // Within the limits, and far more than there is: nothing of that size may be allocated.
    refused(config("vocab_size", (1 << 24).into()), &[], 8, &["model.embed_tokens.weight", "[352, 32]", "16777216"]);
    refused(config("num_hidden_layers", 4096.into()), &[], 8, &["model.layers.2."]);
    refused(config("intermediate_size", (1 << 24).into()), &[], 8, &["model.layers.0.mlp.gate_proj.weight"]);
    refused(config("max_position_embeddings", (1u64 << 40).into()), &[], 8, &["max_position_embeddings"]);
    refused(config("num_key_value_heads", 3.into()), &[], 8, &["config.json", "3 key heads"]);
    refused(
        config("model_type", "gpt9".into()),
        &[],
        2,
        &["model/config.json: ", "gpt9", "hint: `isobit models` lists"],
    );
    refused(config("rms_norm_eps", (-1).into()), &[], 8, &["rms_norm_eps"]);
    refused(
        |folder| folder.put("model/config.json", "{\"model_type\":"),
        &[],
        8,
        &["model/config.json: ", "hint: compare it"],
    );
    refused(|folder| folder.put("model/config.json", [0xff]), &[], 8, &["config.json", "UTF-8"]);
    refused(|folder| folder.put("model/tokenizer.json", "{}"), &[], 8, &["tokenizer.json"]);
    let gone = |name: &'static str| move |folder: &Folder| std::fs::remove_file(folder.path(name)).expect("removed");
    refused(
        gone("model/model.safetensors"),
        &[],
        2,
        &["model/model.safetensors does not exist", "fetch the weights too"],
    );
    refused(gone("model/tokenizer.json"), &[], 2, &["the model folder has no tokenizer.json", "hint: a model folder"]);
    refused(gone("model/config.json"), &[], 2, &["model/config.json does not exist", "hint: a model folder"]);
}

#[test]
fn tensors_of_the_model() {
    let bias = "model.layers.1.self_attn.k_proj.bias";
    refused_weights(|all| all.retain(|tensor| tensor.0 != bias), 8, &[bias, "model.safetensors"]);
    let norm = "model.layers.0.input_layernorm.weight";
    refused_weights(|all| find(all, norm).2[3] = f32::NAN, 8, &[norm, "element 3 is NaN"]);
    refused_weights(|all| find(all, bias).2[0] = f32::INFINITY, 8, &[bias, "element 0 is inf"]);
    let matrix = "model.layers.1.mlp.up_proj.weight";
    let said = [&format!("{matrix} of model/model.safetensors: "), "[32, 48]", "[48, 32]", "hint: config.json and"];
    refused_weights(|all| find(all, matrix).1.swap(0, 1), 8, &said);
}

/// Half of a model, or a model that is more than its config says.
#[test]
fn tensors_that_nothing_would_read() {
    let fewer = |folder: &Folder| {
        let mut config = config_json(folder.shape);
        config["num_hidden_layers"] = 1.into();
        folder.put("model/config.json", config.to_string());
    };
    refused(fewer, &[], 8, &["model.layers.1.", "it belongs to layer 1", "`num_hidden_layers` in config.json is 1"]);
    let add = |name: &'static str, value: f32| {
        move |all: &mut Vec<Named>| all.push((name.to_string(), vec![32], vec![value; 32]))
    };
    for name in ["model.layers.0.self_attn.q_norm.weight", "model.layers.1.mlp.norm.weight", "model.norm.bias"] {
        refused_weights(add(name, 0.0), 8, &[name, "nothing would read it"]);
    }
    let bias = "model.layers.0.self_attn.o_proj.bias";
    refused_weights(add(bias, 0.5), 8, &[bias, "not zero", "the config says that there is no bias"]);
}

/// What is no part of the text model is listed, by every command that loads the model.
#[test]
fn tensors_that_are_not_used() {
    let folder = tiny();
    let mut tensors = weights(folder.shape, 1);
    for number in 10..22 {
        tensors.push((format!("visual.blocks.{number}.norm.weight"), vec![1], vec![0.0]));
    }
    put_tensors(&folder.path("model/model.safetensors"), &tensors);
    let eval = ["eval", "--model", "model", "--data", "data.jsonl"];
    for ran in [folder.train("out", &["max_steps=1"]), folder.run(&["plan", "config.toml"]), folder.run(&eval)] {
        let start = "warning: 12 tensors of the model's files are not used: `visual.blocks.10.norm.weight`, ";
        ran.says(0, &[start, "`visual.blocks.19.norm.weight` and 2 more\n"]);
        assert!(!ran.err.contains("visual.blocks.20"), "{}", ran.err);
    }
}

#[test]
fn frozen_matrices_that_are_not_finite() {
    for name in ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"] {
        refused_weights(|all| find(all, name).2[5] = f32::NAN, 8, &[name, "element 5 is NaN"]);
    }
}

#[test]
fn safetensors_that_lie() {
    let path = "model/model.safetensors";
    let bytes = |folder: &Folder| std::fs::read(folder.path(path)).expect("read");
    let cut = |keep: fn(usize) -> usize| {
        move |folder: &Folder| {
            let all = bytes(folder);
            folder.put(path, &all[..keep(all.len())]);
        }
    };
    refused(cut(|length| length - 4), &[], 8, &["model.safetensors is malformed"]);
    refused(cut(|length| length / 50), &[], 8, &["model.safetensors is malformed"]);
    refused(cut(|_| 4), &[], 8, &["model.safetensors is malformed"]);
    refused(cut(|_| 0), &[], 8, &["model.safetensors is malformed"]);
    let header = |text: &'static str, data: usize| {
        move |folder: &Folder| {
            let mut file = (text.len() as u64).to_le_bytes().to_vec();
            file.extend(text.bytes());
            file.extend(vec![0; data]);
            folder.put(path, file);
        }
    };
    let overlapping = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    refused(header(overlapping, 12), &[], 8, &["model.safetensors is malformed", "tensor `b` overlaps"]);
    let beyond = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551608]}}"#;
    refused(header(beyond, 8), &[], 8, &["model.safetensors is malformed"]);
    let large = r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,8]}}"#;
    refused(header(large, 8), &[], 8, &["model.safetensors is malformed"]);
    refused(|folder| folder.put(path, [0xff; 64]), &[], 8, &["model.safetensors is malformed"]);
    let twice = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
    refused(header(twice, 8), &[], 8, &["model.safetensors is malformed"]);
    let unknown = r#"{"a":{"dtype":"Q9","shape":[1],"data_offsets":[0,4]}}"#;
    refused(header(unknown, 4), &[], 8, &["model.safetensors is malformed"]);
    let unused = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    refused(header(unused, 8), &[], 8, &["model.safetensors is malformed"]);
}

/// Shards that the index promises and that are not there, or do not hold what it says.
#[test]
fn indexes_that_promise_too_much() {
    let index = |map: serde_json::Value| {
        move |folder: &Folder| {
            std::fs::rename(folder.path("model/model.safetensors"), folder.path("model/part.safetensors"))
                .expect("moved");
            folder.put("model/model.safetensors.index.json", serde_json::json!({ "weight_map": map }).to_string());
        }
    };
    refused(index(serde_json::json!({ "w": "gone.safetensors" })), &[], 8, &["gone.safetensors is missing"]);
    refused(index(serde_json::json!({ "stranger": "part.safetensors" })), &[], 8, &["stranger"]);
    refused(index(serde_json::json!([])), &[], 8, &["model.safetensors.index.json"]);
    refused(index(serde_json::json!({ "w": 7 })), &[], 8, &["model.safetensors.index.json"]);
}

#[test]
fn indexes_that_leave_the_folder() {
    for file in ["../model.safetensors", "/etc/hosts", "..\\model.safetensors", "sub/model.safetensors", ".."] {
        let put = |folder: &Folder| {
            std::fs::rename(folder.path("model/model.safetensors"), folder.path("model.safetensors")).expect("moved");
            let index = serde_json::json!({ "weight_map": { "model.embed_tokens.weight": file } });
            folder.put("model/model.safetensors.index.json", index.to_string());
        };
        refused(put, &[], 8, &["model.safetensors.index.json"]);
    }
}

#[test]
fn data() {
    let put = |bytes: &'static [u8]| move |folder: &Folder| folder.put("data.jsonl", bytes);
    refused(put(b""), &[], 3, &["data.jsonl", "holds no row"]);
    refused(put(b"\n\n"), &[], 3, &["data.jsonl", "holds no row"]);
    let good = b"{\"prompt\":\"1\",\"completion\":\"2\"}\n";
    let with = |bad: &'static [u8]| move |folder: &Folder| folder.put("data.jsonl", [good, bad].concat());
    refused(with(b"{\"prompt\":\"\xff\",\"completion\":\"2\"}\n"), &[], 3, &["data.jsonl:2", "not UTF-8"]);
    refused(with(b"{\"prompt\":\"1\"\n"), &[], 3, &["data.jsonl:2", "not JSON"]);
    refused(with(b"{\"prompt\":1,\"completion\":\"2\"}\n"), &[], 3, &["data.jsonl:2", "`prompt`"]);
    refused(with(b"[1]\n"), &[], 3, &["data.jsonl:2"]);
    refused(put(b"{\"question\":\"1\"}\n"), &[], 3, &["data.jsonl:1", "question"]);
    let missing = |folder: &Folder| std::fs::remove_file(folder.path("data.jsonl")).expect("removed");
    refused(missing, &[], 2, &["data.jsonl does not exist", "hint: check the path"]);
}

/// Rows that are tokens already: every id is one of the vocabulary.
#[test]
fn rows_of_tokens() {
    let put = |row: &'static str| move |folder: &Folder| folder.put("data.jsonl", row.repeat(40));
    refused(put("{\"input_ids\":[1,2,99999]}\n"), &[], 3, &["data.jsonl:1", "`input_ids[2]` is 99999", "below"]);
    refused(put("{\"input_ids\":[1,-2]}\n"), &[], 3, &["data.jsonl:1", "`input_ids[1]` is -2"]);
    refused(put("{\"input_ids\":[1,2],\"labels\":[2,-100]}\n"), &[], 3, &["data.jsonl:1", "labels[0] is 2"]);
    refused(put("{\"input_ids\":[1,2],\"labels\":[1,-100]}\n"), &[], 3, &["data.jsonl:1", "no token is labelled"]);
    refused(put("{\"input_ids\":[[1]]}\n"), &[], 3, &["data.jsonl:1", "`input_ids[0]`"]);
    let folder = tiny();
    folder.put("data.jsonl", "{\"input_ids\":[17,18,19,20],\"labels\":[-100,-100,19,20]}\n".repeat(40));
    let ran = folder.trained("out", &["max_steps=2"]);
    assert!(ran.err.contains("160 tokens, 80 of them targets") || ran.err.contains("136 tokens, 68"), "{}", ran.err);
}

/// Rows whose every target lies beyond the context.
#[test]
fn rows_that_are_cut_to_nothing() {
    let long = |folder: &Folder| {
        let row = format!("{{\"prompt\":\"{}\",\"completion\":\"2\"}}\n", "12 ".repeat(200));
        folder.put("data.jsonl", rows(4) + &row);
    };
    refused(long, &[], 3, &["data.jsonl:5", "truncation to max_seq_length", "allow_untrainable_rows"]);
}

/// Files that are there and cannot be read. A link to itself is such a file for every user, root
/// included.
#[cfg(unix)]
#[test]
fn files_that_cannot_be_read() {
    for name in ["data.jsonl", "model/tokenizer.json", "model/config.json", "model/model.safetensors", "config.toml"] {
        let loop_to_itself = |folder: &Folder| {
            std::fs::remove_file(folder.path(name)).expect("removed");
            std::os::unix::fs::symlink(folder.path(name), folder.path(name)).expect("linked");
        };
        let code = if name == "config.toml" { 2 } else { 8 };
        refused(loop_to_itself, &[], code, &[name.rsplit('/').next().expect("a name")]);
    }
}

#[test]
fn rows_that_are_too_long_are_cut_and_counted() {
    let folder = tiny();
    let long = format!("{{\"prompt\":\"1\",\"completion\":\"{}\"}}\n", "12 ".repeat(200));
    folder.put("data.jsonl", rows(40) + &long + &long);
    let ran = folder.trained("out", &["max_steps=1"]);
    assert!(ran.err.contains("warning: 2 rows longer than 64 tokens, cut there"), "{}", ran.err);
}

#[test]
fn a_tokenizer_of_another_model() {
    let folder = Folder::new(Shape { vocabulary: 64, ..Shape::TINY });
    let ran = folder.train("out", &[]);
    ran.says(2, &["the tokenizer produces token", "the model has 64"]);
}

#[test]
fn output_folders() {
    refused(|folder| folder.put("file", ""), &["output_dir=file"], 7, &["file"]);
    refused(|folder| folder.put("file", ""), &["output_dir=file/below"], 7, &["file/below"]);
    let folder = tiny();
    std::fs::create_dir(folder.path("held")).expect("folder");
    let lock = File::create(folder.path("held/LOCK")).expect("created");
    lock.try_lock().expect("free");
    folder.train("held", &[]).says(2, &["held is in use"]);
    folder.train("held", &["--resume"]).says(2, &["held is in use"]);
    lock.unlock().expect("unlocked");
    folder.trained("held", &[]);
    let before = folder.text("held/config.resolved.toml");
    folder.train("held", &[]).says(2, &["held already holds a run", "--resume"]);
    let ran = folder.train("held", &["--resume", "learning_rate=2e-2", "threads=2"]);
    ran.says(2, &["held/checkpoint-12", "`training.learning_rate` is 0.02, but was 0.01"]);
    assert!(!ran.err.contains("`threads`"), "{}", ran.err);
    folder.train("held", &["--resume", "seed=8"]).says(2, &["`seed` is 8, but was 7", "its data is"]);
    let parts = ["an update has 12 rows, but had 8", "hint: set `training.gradient_accumulation_steps`"];
    folder.train("held", &["--resume", "gradient_accumulation_steps=3"]).says(2, &parts);
    folder.put("data.jsonl", rows(41));
    folder.train("held", &["--resume"]).says(2, &["its data is"]);
    assert_eq!(folder.text("held/config.resolved.toml"), before);
}

/// The disk refuses in the middle of a save: files of a process have a limit here, as a full disk
/// has. What was saved before stays, and the run goes on from it once there is room.
#[cfg(unix)]
#[test]
fn a_disk_that_is_full() {
    use std::process::{Command, Stdio};
    let folder = tiny();
    let adapter = folder.text("config.toml").find("[adapter]").expect("a section");
    let config = folder.text("config.toml")[..adapter].to_string() + "[adapter]\ntype = \"full\"\n";
    folder.put("config.toml", config);
    folder.trained("whole", &[]);
    let largest = folder.path("whole/checkpoint-3/optimizer.safetensors").metadata().expect("there").len();
    // Blocks of 512 bytes: the metrics fit, and the optimizer's state does not.
    let train = |blocks: u64| {
        let script =
            format!("trap '' XFSZ; ulimit -f {blocks} && exec \"$0\" train config.toml --set output_dir=out --resume");
        let mut command = Command::new("sh");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_isobit")]).current_dir(folder.path("")).stdin(Stdio::null());
        model_folder::finished(command.output().expect("a shell starts"))
    };
    train(largest / 512 - 8).says(7, &["cannot write", "optimizer.safetensors"]);
    assert_eq!(folder.checkpoints("out"), Vec::<String>::new());
    assert!(!names(&folder.path("out")).iter().any(|name| name.starts_with('.')), "{:?}", names(&folder.path("out")));
    folder.trained("out", &["--resume"]);
    folder.same("whole", "out");
}

/// Results that cannot be written.
#[cfg(target_os = "linux")]
#[test]
fn results_onto_a_full_disk() {
    let folder = tiny();
    for arguments in [
        &["data", "check", "--model", "model", "--data", "data.jsonl"][..],
        &["eval", "--model", "model", "--data", "data.jsonl", "--json"],
        &["generate", "--model", "model", "--prompt", "1+1=", "--max-tokens", "2"],
        &["diff", "model", "model"],
        &["completions", "bash"],
        &["man"],
    ] {
        let full = File::options().write(true).open("/dev/full").expect("Linux has one");
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_isobit"));
        command.args(arguments).current_dir(folder.path("")).stdout(full);
        let ran = model_folder::finished(command.output().expect("the program starts"));
        ran.says(7, &["cannot write the result", "No space left"]);
    }
}

/// Permissions do not bind root, so the program is started as nobody where this is run by root.
#[cfg(unix)]
#[test]
fn a_folder_that_may_not_be_written() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::os::unix::process::CommandExt;
    const NOBODY: u32 = 65534;
    let folder = tiny();
    let allow =
        |name: &str, mode| std::fs::set_permissions(folder.path(name), PermissionsExt::from_mode(mode)).expect("set");
    allow("", 0o755);
    std::fs::create_dir(folder.path("locked")).expect("made");
    allow("locked", 0o555);
    let root = folder.path("locked").metadata().expect("there").uid() == 0;
    for (output, part) in [("output_dir=locked", "LOCK"), ("output_dir=locked/run", "locked/run")] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_isobit"));
        command.args(["train", "config.toml", "--set", output]).current_dir(folder.path(""));
        if root {
            command.uid(NOBODY).gid(NOBODY);
        }
        let Ok(output) = command.output() else {
            let why = "the program cannot be started as another user here".to_string();
            return skip("refusals::a_folder_that_may_not_be_written", &[("nobody".to_string(), why)]);
        };
        model_folder::finished(output).says(7, &["not allowed", part, "hint: check owner and permissions"]);
    }
}

#[test]
fn checkpoints_that_were_changed() {
    let folder = tiny();
    folder.trained("out", &[]);
    let path = "out/checkpoint-12/optimizer.safetensors";
    let mut bytes = std::fs::read(folder.path(path)).expect("read");
    *bytes.last_mut().expect("not empty") ^= 1;
    folder.put(path, bytes);
    folder.train("out", &["--resume"]).says(8, &["optimizer.safetensors"]);
    folder.put("out/latest.json", "{}");
    folder.train("out", &["--resume"]).says(8, &["latest.json"]);
}

#[test]
fn numbers_that_grow_beyond_all_bounds() {
    let folder = tiny();
    // The first update has a rate of zero; the second multiplies the weights by -5e27.
    let overrides = ["weight_decay=1e30", "save_steps=1"];
    folder.train("out", &overrides).says(5, &["step 2", "lora_A", "smaller learning rate"]);
    assert_eq!(folder.checkpoints("out"), ["checkpoint-1"]);
    assert_eq!(folder.pointer("out", "latest"), 1);
    assert!(!folder.has("out/final"));
    // The checkpoint is whole: the run gets as far again, and no further.
    folder.train("out", &[&overrides[..], &["--resume"]].concat()).says(5, &["step 2", "lora_A"]);
}

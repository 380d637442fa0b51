//! `isobit plan` from the outside: items that add up, the promised fields, exit code 4 when it does
//! not fit.

use crate::hip::Fake;
use crate::model_folder::{Folder, Shape, config_json, finished};

fn number(value: &serde_json::Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("{field} in {value}"))
}

#[test]
fn json_has_the_promised_fields_and_adds_up() {
    let folder = Folder::new(Shape::TINY);
    let ran = folder.run(&["plan", "config.toml", "--json", "--explain"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let plan: serde_json::Value = serde_json::from_str(&ran.out).expect("one JSON object");
    assert_eq!((&plan["schema"], &plan["fits"]), (&"isobit.plan/1".into(), &true.into()));
    let items = ["weights", "trained", "gradients", "optimizer", "activations", "workspace"];
    let sum: u64 = items.iter().map(|item| number(&plan, &format!("{item}_bytes"))).sum();
    assert_eq!(sum, number(&plan, "total_bytes"));
    let held: u64 = plan["holdings"].as_array().expect("a list").iter().map(|held| number(held, "bytes")).sum();
    assert_eq!(held, sum);
    assert_eq!(number(&plan, "optimizer_bytes"), 8 * number(&plan, "trained_parameters"));
    assert!(plan["work"]["linear_forward"]["calls"].as_u64() > Some(0));
    assert!(number(&plan, "needed_bytes") <= number(&plan, "available_bytes"));
    assert!(!folder.has("out"), "a plan writes nothing");
}

#[test]
fn policies_and_splits_show() {
    let folder = Folder::new(Shape::TINY);
    let activations = |overrides: &[&str]| {
        let arguments: Vec<&str> = ["plan", "config.toml", "--json"]
            .into_iter()
            .chain(overrides.iter().flat_map(|&key| ["--set", key]))
            .collect();
        let ran = folder.run(&arguments);
        assert_eq!(ran.code, 0, "{}", ran.err);
        number(&serde_json::from_str(&ran.out).expect("JSON"), "activations_bytes")
    };
    let of = |policy| activations(&[&format!("training.gradient_checkpointing={policy}")]);
    assert!(of("full") <= of("selective") && of("selective") <= of("none") && of("full") < of("none"));
    let micro = |rows| activations(&[&format!("training.micro_batch_size={rows}")]);
    assert!(micro(1) < micro(4));
}

#[test]
fn what_does_not_fit_exits_with_four() {
    let folder = Folder::new(Shape::TINY);
    let plan = |memory: &str, sets: &[&str]| {
        let sets = sets.iter().flat_map(|&set| ["--set", set]);
        folder.run(&["plan", "config.toml", "--memory", memory].into_iter().chain(sets).collect::<Vec<_>>())
    };
    let ran = plan("0.0001", &[]);
    ran.says(4, &["error: this run needs", "0.10 MiB is available", "hint: no setting makes it fit: "]);
    assert!(ran.out.contains("does not fit"), "{}", ran.out);
    plan("0", &[]).says(4, &["hint: no setting makes it fit: "]);
    // Memory for one row at a time, and not a byte more: that is what the hint says.
    let least = ["--json", "--set", "training.micro_batch_size=1", "--set", "training.gradient_checkpointing=full"];
    let least = number(&folder.run(&[&["plan", "config.toml"], &least[..]].concat()).json()[0], "needed_bytes");
    let memory = format!("{}", least as f64 / f64::from(1 << 30));
    let split = "--set eval.micro_batch_size=1 --set training.micro_batch_size=1 \
                 --set training.gradient_accumulation_steps=8";
    let full = ["training.gradient_checkpointing=full"];
    plan(&memory, &full).says(4, &[&format!("hint: `{split}` fits and gives the same weights")]);
    let none = ["training.gradient_checkpointing=none"];
    let both = format!("hint: `{split} --set training.gradient_checkpointing=");
    plan(&memory, &none).says(4, &[&both, "` fits and gives the same weights"]);
    let one = ["training.gradient_checkpointing=none", "training.micro_batch_size=1"];
    plan(&memory, &one)
        .says(4, &["hint: `--set training.gradient_checkpointing=", "` fits and gives the same weights"]);
    assert_eq!(folder.run(&["plan", "config.toml", "--memory", "64"]).code, 0);
    folder.run(&["plan", "config.toml", "--memory", "much"]).says(2, &["--memory", "not a number"]);
    folder.run(&["plan", "config.toml", "--memory", "512Mi"]).says(2, &["`Mi` is not a unit of bytes", "512MiB"]);
    // The same amount in any unit.
    for (memory, code) in [("0.1MiB", 4), ("100KB", 4), ("1048576B", 4), ("65536MiB", 0), ("0.5TB", 0)] {
        assert_eq!(plan(memory, &[]).code, code, "{memory}");
    }
}

#[test]
fn absurd_sizes_are_not_counted() {
    let folder = Folder::new(Shape::TINY);
    let absurd = ["--set", "training.micro_batch_size=65536", "--set", "max_seq_length=1048576"];
    for memory in [&[][..], &["--memory", "999999999"]] {
        let ran = folder.run(&[&["plan", "config.toml"], &absurd[..], memory].concat());
        ran.says(4, &["error: this run needs at least ", "--set max_seq_length=512` fits; other weights: "]);
        assert!(ran.out.starts_with("does not fit: at least "), "{}", ran.out);
    }
    let ran = folder.run(&[&["plan", "config.toml", "--json"], &absurd[..]].concat());
    let plan: serde_json::Value = serde_json::from_str(&ran.out).expect("one JSON object");
    assert_eq!((ran.code, &plan["fits"], plan.get("total_bytes")), (4, &false.into(), None));
    // Two layers of 32 numbers.
    assert_eq!(number(&plan, "needed_bytes"), 65536 * 1_048_576 * 2 * 32 * 4);
    folder
        .train("out", &["training.micro_batch_size=65536", "max_seq_length=1048576"])
        .says(4, &["at least", "--no-plan"]);
    // Evaluations too, on one device and on several.
    let evaluated = ["eval.path=data.jsonl", "eval.micro_batch_size=65536", "max_seq_length=4096"];
    let says = ["evaluating 65536 rows of 4096 tokens at once", "hint: lower `eval.micro_batch_size`"];
    let sets: Vec<&str> = evaluated.iter().flat_map(|set| ["--set", set]).collect();
    for device in ["cpu", "cpu,cpu"] {
        folder.run(&[&["plan", "config.toml", "--device", device], &sets[..]].concat()).says(4, &says);
    }
    folder.train("out", &evaluated).says(4, &says);
    assert!(!folder.has("out"));
}

#[test]
fn rows_beyond_the_positions_have_one_answer() {
    let folder = Folder::new(Shape::TINY);
    let parts = ["max_seq_length 513 is beyond the model's 512 positions", "hint: set `max_seq_length = 512` or less"];
    folder.run(&["plan", "config.toml", "--set", "max_seq_length=513"]).says(2, &parts);
    folder.train("out", &["max_seq_length=513"]).says(2, &parts);
    folder.train("out", &["max_seq_length=513", "--no-plan"]).says(2, &parts);
    assert_eq!(folder.run(&["plan", "config.toml", "--set", "max_seq_length=512"]).code, 0);
}

#[test]
fn devices_that_are_not_here_need_their_memory_only() {
    let folder = Folder::new(Shape::TINY);
    for device in ["cuda:63", "opencl:63"] {
        let plan = ["plan", "config.toml", "--device", device];
        let ran = folder.run(&[&plan[..], &["--memory", "80"]].concat());
        assert_eq!(ran.code, 0, "{}", ran.err);
        let line = format!("80.00 GiB available on {device}, which is not in this machine (--memory)");
        assert!(ran.out.contains("\nfits: ") && ran.out.contains(&line), "{}", ran.out);
        folder.run(&[&plan[..], &["--memory", "0.0001"]].concat()).says(4, &["this run needs", device]);
        folder.run(&plan).says(6, &[device, "or give `--memory SIZE`"]);
    }
}

/// By name, as people write them; the memory is that of the card unless it is given.
#[test]
fn cards_by_name_need_not_be_here() {
    let folder = Folder::new(Shape::TINY);
    let plan = |device: &str, more: &[&str]| folder.run(&[&["plan", "config.toml", "--device", device], more].concat());
    for (device, line) in [
        ("mi50", "15.98 GiB available on mi50 (AMD Instinct MI50, 16 GB)"),
        ("AMD Instinct MI50 32GB", "31.98 GiB available on mi50-32 (AMD Instinct MI50, 32 GB)"),
        ("RTX 4090", "available on rtx4090 (NVIDIA GeForce RTX 4090, 24 GB)"),
    ] {
        let ran = plan(device, &[]);
        assert_eq!(ran.code, 0, "{}", ran.err);
        assert!(ran.out.contains(line) && ran.out.contains("an estimate: "), "{line} in {}", ran.out);
        assert!(ran.out.contains("driver ") && !ran.out.contains("process "), "{}", ran.out);
    }
    let h200 = &plan("h200", &["--json"]).json()[0];
    assert_eq!((&h200["estimate"], &h200["fits"]), (&false.into(), &true.into()));
    assert_eq!(number(h200, "needed_bytes"), number(h200, "total_bytes") + number(h200, "driver_bytes"));
    plan("mi100", &["--memory", "1MiB"]).says(4, &["on mi100, 1.00 MiB is available (--memory)"]);
    // `--memory` is for buffers alone: what the driver takes is shown and not counted.
    let limited = &plan("h200", &["--json", "--memory", "4"]).json()[0];
    assert_eq!(number(limited, "needed_bytes"), number(limited, "total_bytes"));
    assert_eq!(number(limited, "driver_bytes"), number(h200, "driver_bytes"));
    let total = number(h200, "total_bytes");
    assert!(plan("h200", &["--memory", &format!("{total}B")]).out.contains("; not counted in --memory"));
    plan("h200", &["--memory", &format!("{}B", total - 1)]).says(4, &["is available (--memory)"]);
    let ran = plan("mi50,mi50", &[]);
    assert!(ran.code == 0 && ran.out.contains("mi50 1: ") && ran.out.contains("mi50 2: "), "{}{}", ran.out, ran.err);
    plan("abacus", &[]).says(2, &["`abacus` is not a device", "mi300x", "b200"]);
    plan("mi50,abacus", &[]).says(2, &["`abacus` is not a device"]);
    plan("MI300", &[]).says(2, &["`MI300` is not a device", "did you mean `mi300x`?"]);
    plan("v100-3", &[]).says(2, &["did you mean `v100-32`?", "`--device cuda:0 --memory 11GiB`"]);
    plan("rtx4909", &[]).says(2, &["did you mean `rtx4090`?"]);
}

/// `eval.micro_batch_size` may be larger than that of training.
#[test]
fn evaluation_counts() {
    let folder = Folder::new(Shape::TINY);
    let total = |sets: &[&str]| {
        let sets = sets.iter().flat_map(|&set| ["--set", set]);
        let ran = folder.run(&["plan", "config.toml", "--json"].into_iter().chain(sets).collect::<Vec<_>>());
        assert_eq!(ran.code, 0, "{}", ran.err);
        number(&ran.json()[0], "total_bytes")
    };
    let [one, many, most] = [1, 64, 512].map(|rows| total(&[&format!("eval.micro_batch_size={rows}")]));
    assert!(one < many && many < most && most > 4 * one, "{one}, {many} and {most} bytes");
}

/// The hint is the first suggestion: here the rows that are evaluated at once are too many.
#[test]
fn the_hint_is_the_first_suggestion() {
    let folder = Folder::new(Shape::TINY);
    let given = ["--set", "eval.micro_batch_size=512", "--set", "training.micro_batch_size=1"];
    let needed = folder.run(&[&["plan", "config.toml", "--json"], &given[..]].concat());
    let memory = format!("{}B", number(&needed.json()[0], "needed_bytes") - 1);
    let ran = folder.run(&[&["plan", "config.toml", "--memory", &memory], &given[..]].concat());
    ran.says(4, &["hint: `--set eval.micro_batch_size=1` fits and gives the same weights\n"]);
    assert!(ran.out.contains("these settings fit:\n  --set eval.micro_batch_size=1\n"), "{}", ran.out);
    // Only shorter rows fit, with other weights.
    let rows = ["--set", "training.micro_batch_size=1", "--set", "max_seq_length=512"];
    let full = ["--set", "training.gradient_checkpointing=full", "--set", "eval.micro_batch_size=1"];
    let needed = folder.run(&[&["plan", "config.toml", "--json"], &rows[..], &full].concat());
    let memory = format!("{}B", number(&needed.json()[0], "needed_bytes") - 1);
    let ran = folder.run(&[&["plan", "config.toml", "--memory", &memory], &rows[..], &full].concat());
    ran.says(4, &["hint: `--set load_in_4bit=true` fits; other weights: "]);
    assert!(ran.out.contains("--set max_seq_length=256\n"), "{}", ran.out);
    assert!(!ran.out.contains("max_seq_length=128"), "shorter rows fit, too: {}", ran.out);
}

/// A config of a qwen2 model that is too large to write: so many layers of this width.
fn put_large(folder: &Folder, width: usize, layers: usize) {
    let mut config = config_json(Shape { hidden: width, intermediate: 4 * width, ..Shape::TINY });
    config["num_hidden_layers"] = layers.into();
    (config["num_attention_heads"], config["num_key_value_heads"]) = ((width / 128).into(), (width / 256).into());
    std::fs::create_dir_all(folder.path("large")).expect("a folder");
    folder.put("large/config.json", config.to_string());
}

/// A base too large as it is may fit in 4 bits; one that is quantised already is not quantised
/// again.
#[test]
fn four_bits_are_suggested_with_their_memory() {
    let folder = Folder::new(Shape::TINY);
    put_large(&folder, 1024, 8);
    let plan = |more: &[&str]| {
        let sets = ["training.micro_batch_size=1", "training.gradient_checkpointing=full", "eval.micro_batch_size=1"];
        let sets = ["base_model=large", "device=cpu"].into_iter().chain(sets).flat_map(|set| ["--set", set]);
        let given: Vec<&str> = ["plan", "config.toml"].into_iter().chain(sets).chain(more.iter().copied()).collect();
        folder.run(&given)
    };
    let needed = |more: &[&str]| number(&plan(&[&["--json"], more].concat()).json()[0], "needed_bytes");
    let (whole, quantised) = (needed(&[]), needed(&["--set", "load_in_4bit=true"]));
    assert!(quantised < whole / 2, "{quantised} of {whole}");
    let ran = plan(&["--memory", &format!("{quantised}B")]);
    ran.says(4, &["hint: `--set load_in_4bit=true` fits; other weights: the base is quantised to 4 bits\n"]);
    assert!(ran.out.contains("these settings fit:\n  --set load_in_4bit=true\n    "), "{}", ran.out);
    plan(&["--memory", &format!("{}B", quantised / 2)])
        .says(4, &["no setting makes it fit: take a smaller base model"]);
}

/// On a card a checkpoint is put together on the host, which must have the memory for it.
#[cfg(target_os = "linux")]
#[test]
fn the_host_must_hold_a_checkpoint() {
    let Some(card) = Fake::new("plan::the_host_must_hold_a_checkpoint", &[]) else { return };
    let folder = Folder::new(Shape::TINY);
    let config = folder.text("config.toml");
    let adapter = config.find("[adapter]").expect("a section");
    folder.put("config.toml", format!("{}[adapter]\ntype = \"full\"\n", &config[..adapter]));
    // 126 million numbers at 12 bytes.
    put_large(&folder, 1024, 8);
    let under = |limit: u32, command: &str, device: &str| {
        let program = card.command(&[command, "config.toml", "--set", "base_model=large", "--device", device]);
        let mut shell = std::process::Command::new("sh");
        shell.arg("-c").arg(format!("ulimit -v {limit}; exec \"$0\" \"$@\"")).arg(program.get_program());
        shell.args(program.get_args()).current_dir(folder.path("")).env("FAKE_HIP_COUNT", "2");
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => shell.env(name, value),
                None => shell.env_remove(name),
            };
        }
        finished(shell.output().expect("a shell"))
    };
    for (device, needs) in [
        ("hip:0", "saving a checkpoint beside the rows of data needs 1.43 GiB of host memory, "),
        ("hip:0,hip:1", "host memory needs 1.43 GiB, "),
    ] {
        for command in ["plan", "train"] {
            let ran = under(1_200_000, command, device);
            ran.says(4, &[needs, "hint: `--set adapter.type=lora` fits; other weights"]);
        }
        let ran = under(4_000_000, "plan", device);
        ran.says(0, &[]);
        assert!(ran.out.contains("1.43 GiB needed, ") && ran.out.contains("(`ulimit -v`)"), "{}", ran.out);
    }
}

/// Settings that change the weights are planned like the others, and named where they help.
#[test]
fn four_bits_are_suggested_where_they_fit() {
    let folder = Folder::new(Shape::TINY);
    // 10 billion numbers at 2 bytes.
    put_large(&folder, 8192, 10);
    let plan = |memory: &str| {
        let given = ["--set", "base_model=large", "--memory", memory];
        [&[][..], &["--json"]].map(|more| folder.run(&[&["plan", "config.toml"], &given[..], more].concat()))
    };
    let [text, json] = plan("14GiB");
    text.says(4, &["load_in_4bit=true` fits; other weights"]);
    let suggestion = json.json()[0]["suggestions"][0].clone();
    assert!(suggestion["set"].as_str().is_some_and(|set| set.contains("load_in_4bit=true")), "{suggestion}");
    assert!(suggestion["same_bits"] == false && number(&suggestion, "needed_bytes") < 14 << 30, "{suggestion}");
    for memory in ["1GiB", "0"] {
        let [text, json] = plan(memory);
        text.says(4, &["no setting makes it fit: take a smaller base model"]);
        assert_eq!(json.json()[0]["suggestions"], serde_json::json!([]));
    }
}

/// What a list needs is said of each device and of the host, not of all together.
#[test]
fn suggestions_for_a_list_are_for_each_device() {
    let folder = Folder::new(Shape::TINY);
    put_large(&folder, 8192, 10);
    let sets = ["base_model=large", "max_seq_length=512", "training.gradient_checkpointing=none"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let plan = |memory: &str| {
        folder.run(&[&["plan", "config.toml", "--device", "mi300x,mi300x", "--memory", memory], &sets[..]].concat())
    };
    let whole = plan("150GiB");
    assert!(whole.code == 0 && whole.out.contains(", if host memory has "), "{}{}", whole.out, whole.err);
    let needed = |out: &str| -> f64 {
        let line = out.lines().find(|line| line.starts_with("mi300x 1: ")).expect("a device").to_string();
        line.split_whitespace().nth(2).expect("a size").parse().expect("GiB")
    };
    let less = plan(&format!("{:.2}GiB", needed(&whole.out) * 0.75));
    let line = less.out.lines().find(|line| line.contains("same bits")).expect("a suggestion");
    assert!(line.contains(" on a device at most, ") && line.contains(" on the host, same bits"), "{}", less.out);
}

/// A card by name has its own memory, whatever `--memory` says, alone and in a list.
#[test]
fn a_named_card_has_no_more_than_its_memory() {
    let folder = Folder::new(Shape::TINY);
    // 10 billion numbers at 2 bytes.
    put_large(&folder, 8192, 10);
    for (device, part) in [("mi50", "15.98 GiB is available (AMD Instinct MI50"), ("mi50,mi50-32", "mi50 1 needs")] {
        let given =
            ["--set", "base_model=large", "--set", "device_map=[9,1]", "--device", device, "--memory", "100GiB"];
        let given = if device == "mi50" { [&given[..2], &given[4..]].concat() } else { given.to_vec() };
        folder.run(&[&["plan", "config.toml"], &given[..]].concat()).says(4, &[part]);
    }
}

/// `--memory` is no promise that a card here has so much; plan and train agree on that.
#[test]
fn a_card_that_is_here_has_its_own_memory() {
    let Some(card) = Fake::new("plan::a_card_that_is_here_has_its_own_memory", &[]) else { return };
    let folder = Folder::new(Shape::TINY);
    // 10 billion numbers at 2 bytes.
    put_large(&folder, 8192, 10);
    for command in ["plan", "train"] {
        let given = ["--set", "base_model=large", "--device", "hip:0", "--memory", "100GiB"];
        let mut command = card.command(&[&[command, "config.toml"], &given[..]].concat());
        let ran = finished(command.current_dir(folder.path("")).output().expect("the program starts"));
        ran.says(4, &["on hip:0, 16.00 GiB is available (Fake Instinct 0)"]);
    }
}

#[test]
fn what_was_never_measured_is_an_estimate() {
    let folder = Folder::new(Shape::TINY);
    let plan = |device: &str| folder.run(&["plan", "config.toml", "--json", "--device", device, "--memory", "8"]);
    for (device, estimate) in [("cuda:63", true), ("h200", false), ("a100-80", true), ("hip:63", true)] {
        assert_eq!(plan(device).json()[0]["estimate"], estimate, "{device}");
    }
    let list = plan("mi50,h200").json().remove(0);
    assert_eq!((&list["estimate"], &list["device"]), (&true.into(), &"mi50,h200".into()));
}

/// The samples at the end are made without offload: the model must fit by itself.
#[test]
fn samples_count() {
    let folder = Folder::new(Shape::TINY);
    put_large(&folder, 512, 8);
    let prompts = "generate_prompts=[\"Two and two\"]";
    let plan = |more: &[&str]| {
        let offload = ["--set", "base_model=large", "--device", "mi50", "--set", "offload=weights,activations"];
        folder.run(&[&["plan", "config.toml"], &offload[..], more].concat())
    };
    let without = plan(&["--json"]).json().remove(0);
    let with = plan(&["--json", "--set", prompts]).json().remove(0);
    assert!(without.get("generate_bytes").is_none());
    let generate = number(&with, "generate_bytes");
    assert!(generate > number(&with, "total_bytes"), "{with}");
    assert_eq!(number(&with, "needed_bytes"), generate + number(&with, "driver_bytes"));
    let memory = format!("{}B", generate - 1);
    let ran = plan(&["--set", prompts, "--memory", &memory]);
    ran.says(4, &["hint: `--set generate_prompts=[]` fits and gives the same weights"]);
    assert!(ran.out.contains(" needed to generate, ") && ran.out.contains("\ngenerate "), "{}", ran.out);
    plan(&["--memory", &memory]).says(0, &[]);
    plan(&["--memory", &memory, "--set", prompts, "--set", "generate_prompts=[]"]).says(0, &[]);
}

/// Checkpoints that no disk holds are warned of, before the first is written.
#[test]
fn a_disk_that_will_be_full_is_told() {
    let folder = Folder::new(Shape::TINY);
    let sets = ["--set", "max_steps=1000000000", "--set", "save_steps=1"];
    let ran = folder.run(&[&["plan", "config.toml"], &sets[..]].concat());
    ran.says(0, &["warning: this run writes up to ", " to out, where ", "set `save_total_limit`"]);
    let ran = folder.run(&[&["plan", "config.toml", "--set", "save_total_limit=2"], &sets[..]].concat());
    assert!(ran.code == 0 && !ran.err.contains("warning"), "{}", ran.err);
    assert!(ran.out.contains("up to 4 checkpoints of "), "{}", ran.out);
    let value = folder.run(&["plan", "config.toml", "--json", "--set", "max_steps=1"]).json().remove(0);
    let count = number(&value, "trained_parameters");
    assert!(number(&value, "disk_bytes") >= 16 * count && number(&value, "disk_available_bytes") > 0, "{value}");
}

/// What is suggested can be typed, and needs what it says.
#[test]
fn suggestions_hold() {
    let folder = Folder::new(Shape::TINY);
    let plan = |sets: &str, memory: &str| {
        let words = ["plan", "config.toml", "--json", "--memory", memory].into_iter();
        folder.run(&words.chain(sets.split_whitespace()).collect::<Vec<_>>())
    };
    let base = "--set training.micro_batch_size=8 --set training.gradient_checkpointing=none --set max_seq_length=512";
    let needed = number(&plan(base, "64").json()[0], "needed_bytes");
    let smaller = format!("{}", (needed - 1) as f64 / f64::from(1 << 30));
    for (memory, code, all_same) in [(smaller.as_str(), 4, false), ("64", 0, true)] {
        let base = if code == 0 { base.replace("checkpointing=none", "checkpointing=full") } else { base.to_string() };
        let ran = plan(&base, memory);
        assert_eq!(ran.code, code, "{}", ran.err);
        let answer = &ran.json()[0];
        let all = answer["suggestions"].as_array().expect("a list").clone();
        assert!(!all.is_empty(), "{answer}");
        for advice in all {
            let sets = advice["set"].as_str().expect("settings");
            let then = plan(&format!("{base} {sets}"), memory);
            assert_eq!(then.code, 0, "{sets}: {}", then.err);
            assert_eq!(number(&then.json()[0], "needed_bytes"), number(&advice, "needed_bytes"), "{sets}");
            assert!(advice["same_bits"] == true || !all_same && sets.contains("max_seq_length"), "{advice}");
        }
    }
}

#[test]
fn the_limit_is_named() {
    let folder = Folder::new(Shape::TINY);
    let ran = folder.run(&["plan", "config.toml", "--json"]);
    let plan = &ran.json()[0];
    let of = plan["available_of"].as_str().expect("a name");
    let known = ["available memory of the system", "limit of the control group", "`ulimit -v`"];
    assert!(known.contains(&of), "{plan}");
    assert!(folder.run(&["plan", "config.toml"]).out.contains(&format!("available on the CPU ({of})\n")));
    assert!(
        folder.run(&["plan", "config.toml", "--memory", "3"]).out.contains("3.00 GiB available on the CPU (--memory)")
    );
}

/// Samples map the weights again, while those of the run are still mapped: of address space that is
/// limited, less is left for a run with prompts.
#[cfg(target_os = "linux")]
#[test]
fn samples_map_the_weights_again() {
    let folder = Folder::new(Shape::TINY);
    put_large(&folder, 1024, 8);
    // Counted by its size alone: a plan needs no weights.
    let file = std::fs::File::create(folder.path("large/part.safetensors")).expect("a file");
    file.set_len(1 << 30).expect("a sparse file");
    let available = |prompts: &str| {
        let set = ["--set", "base_model=large", "--set", prompts, "--set", "max_seq_length=64", "--json"];
        let program = folder.command(&[&["plan", "config.toml"], &set[..]].concat());
        let mut shell = std::process::Command::new("sh");
        shell.arg("-c").arg("ulimit -v 4000000; exec \"$0\" \"$@\"").arg(program.get_program());
        let ran = finished(shell.args(program.get_args()).current_dir(folder.path("")).output().expect("a shell"));
        ran.says(0, &[]).json()[0]["available_bytes"].as_u64().expect("bytes")
    };
    let (without, with) = (available("generate_prompts=[]"), available("generate_prompts=[\"1+1=\"]"));
    assert!(with + (500 << 20) < without, "{with} {without}");
}

/// Both count what is left of the limit, less what a run maps: what the plan says is what happens.
#[cfg(target_os = "linux")]
#[test]
fn a_limit_on_address_space_has_one_answer() {
    let folder = Folder::new(Shape::TINY);
    let under = |limit: u32, arguments: &[&str]| {
        let program = folder.command(arguments);
        let mut shell = std::process::Command::new("sh");
        shell.arg("-c").arg(format!("ulimit -v {limit}; exec \"$0\" \"$@\"")).arg(program.get_program());
        shell.args(program.get_args()).current_dir(folder.path(""));
        finished(shell.output().expect("a shell"))
    };
    // What is between, down to some megabytes, depends on the libraries of the system.
    for (device, threads) in [("cpu", 1), ("cpu", 2), ("cpu,cpu", 2)] {
        let sets = ["--set", &format!("threads={threads}"), "--set", "max_steps=1", "--device", device];
        // Stacks of threads that read data are no reason to refuse a run of some megabytes.
        for (limit, code) in [(30_000, 4), (120_000, 0), (240_000, 0), (300_000, 0), (345_000, 0)] {
            let plan = under(limit, &[&["plan", "config.toml"], &sets[..]].concat());
            assert_eq!(plan.code, code, "{device} {threads} {limit}: {}", plan.err);
            for (output, more) in [("planned", &[][..]), ("unplanned", &["--no-plan"])] {
                let output = format!("output_dir={output}-{device}-{threads}-{limit}");
                let train = under(limit, &[&["train", "config.toml", "--set", &output], &sets[..], more].concat());
                assert_eq!(train.code, code, "{output}: {}", train.err);
            }
        }
        let plan = under(42_000, &[&["plan", "config.toml"], &sets[..]].concat());
        assert!(plan.code == 4 && plan.out.contains("(`ulimit -v`)"), "{}: {}", plan.out, plan.err);
    }
}

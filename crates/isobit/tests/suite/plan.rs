//! `isobit plan` from the outside: items that add up, the promised fields, exit code 4 when it does
//! not fit.

#[cfg(target_os = "linux")]
use crate::model_folder::finished;
use crate::model_folder::{Folder, Shape};

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
    ran.says(4, &["error: this run needs", "0.10 MiB is available", "hint: even one row at a time does not fit: "]);
    assert!(ran.out.contains("does not fit"), "{}", ran.out);
    plan("0", &[]).says(4, &["hint: even one row at a time does not fit: "]);
    // Memory for one row at a time, and not a byte more: that is what the hint says.
    let least = ["--json", "--set", "training.micro_batch_size=1", "--set", "training.gradient_checkpointing=full"];
    let least = number(&folder.run(&[&["plan", "config.toml"], &least[..]].concat()).json()[0], "needed_bytes");
    let memory = format!("{}", least as f64 / f64::from(1 << 30));
    let split = "--set training.micro_batch_size=1 --set training.gradient_accumulation_steps=8";
    let full = ["training.gradient_checkpointing=full"];
    plan(&memory, &full).says(4, &[&format!("hint: `{split}` fits and gives the same weights")]);
    let none = ["training.gradient_checkpointing=none"];
    let both = format!("hint: `{split} --set training.gradient_checkpointing=full` fits and gives the same weights");
    plan(&memory, &none).says(4, &[&both]);
    let one = ["training.gradient_checkpointing=none", "training.micro_batch_size=1"];
    plan(&memory, &one).says(4, &["hint: `--set training.gradient_checkpointing=full` fits"]);
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
        ran.says(
            4,
            &["error: this run needs at least ", "hint: even one row at a time does not fit: lower `max_seq_length`"],
        );
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
        for (limit, code) in [(120_000, 4), (240_000, 4), (330_000, 0)] {
            let plan = under(limit, &[&["plan", "config.toml"], &sets[..]].concat());
            assert_eq!(plan.code, code, "{device} {threads} {limit}: {}", plan.err);
            assert!(plan.code == 0 || plan.out.contains("(`ulimit -v`)"), "{limit}: {}", plan.out);
            for (output, more) in [("planned", &[][..]), ("unplanned", &["--no-plan"])] {
                let output = format!("output_dir={output}-{device}-{threads}-{limit}");
                let train = under(limit, &[&["train", "config.toml", "--set", &output], &sets[..], more].concat());
                assert_eq!(train.code, code, "{output}: {}", train.err);
            }
        }
    }
}

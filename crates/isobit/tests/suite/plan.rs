//! `isobit plan` from the outside: items that add up, the promised fields, exit code 4 when it does
//! not fit.

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
        folder.run(&plan).says(6, &[device, "hint: give `--memory GIB`"]);
    }
    folder.run(&["plan", "config.toml", "--device", "abacus"]).says(2, &["abacus", "not a device"]);
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

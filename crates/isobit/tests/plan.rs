//! `isobit plan` from the outside: items that add up, the promised fields, exit code 4 when it does not fit.

mod model_folder;

use model_folder::{Folder, Shape};

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
    assert!(plan["work"]["product_forward"]["calls"].as_u64() > Some(0));
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
    let small = ["plan", "config.toml", "--memory", "0.0001"];
    let ran = folder.run(&small);
    ran.says(4, &["error: this run needs", "0.00 GiB is there", "hint: `--set training.micro_batch_size=1`"]);
    assert!(ran.out.contains("does not fit"), "{}", ran.out);
    let one = [&small[..], &["--set", "training.micro_batch_size=1"]].concat();
    folder.run(&one).says(4, &["hint: lower `max_seq_length`"]);
    let kept = [&one[..], &["--set", "training.gradient_checkpointing=none"]].concat();
    folder.run(&kept).says(4, &["hint: `--set training.gradient_checkpointing=full`"]);
    assert_eq!(folder.run(&["plan", "config.toml", "--memory", "64"]).code, 0);
    folder.run(&["plan", "config.toml", "--memory", "much"]).says(2, &["--memory", "not a number"]);
}

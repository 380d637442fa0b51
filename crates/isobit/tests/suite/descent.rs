//! `replay --against`: two devices execute updates, op by op, and an update that is not the
//! recorded one is looked into. What spoils an op, and that it is named, is tested in
//! `isobit-training`.

use crate::receipt::trained;
use isobit_conformance::devices_or_skips;
use isobit_proof::chain::{Chain, ChainFile};

#[test]
fn two_devices_are_compared_op_by_op() {
    let folder = trained(None);
    let compared = |against: &str| {
        let found = folder.run(&["replay", "run", "--steps", "3..4", "--threads", "1", "--against", against, "-q"]);
        assert_eq!(found.code, 0, "{against}: {}{}", found.out, found.err);
        let expected = format!(" and {against} write the same bits in every op of 2 updates");
        assert!(found.out.contains("updates 3 to 4 agree with the record"), "{}", found.out);
        assert!(found.out.replace(" with 2 threads", ":2").contains(&expected), "{}", found.out);
    };
    compared("reference");
    compared("cpu:2");
    if !devices_or_skips("descent::two_devices_are_compared_op_by_op").is_empty() {
        compared("opencl:0");
    }
    let found = folder.run(&["replay", "run", "--steps", "4", "--against", "cpu", "--json"]);
    assert_eq!(found.code, 0, "{}{}", found.out, found.err);
    let object = &found.json()[0];
    assert_eq!(
        (&object["descent"]["updates"], &object["descent"]["difference"]),
        (&1.into(), &serde_json::Value::Null)
    );
    for bad in ["cpu:0", "gpu", "cpu:x"] {
        folder.run(&["replay", "run", "--steps", "4", "--against", bad]).says(2, &["--against"]);
    }
    folder.run(&["replay", "run", "--steps", "4", "--against", "cpu", "--device", "cpu,cpu"]).says(2, &["one device"]);
}

/// A record of other arithmetic, with links that fit: this machine agrees with itself.
#[test]
fn a_record_that_nothing_here_gives_is_told_from_a_faulty_device() {
    let folder = trained(None);
    let run = folder.path("run");
    let chain = Chain::read(&run).expect("a chain");
    std::fs::remove_file(run.join("chain.jsonl")).expect("removed");
    let mut file = ChainFile::create(&run, &chain.origin).expect("created");
    for update in &chain.updates {
        let mut update = update.clone();
        if update.step == 3 {
            update.gradient.0[0] ^= 1;
            update.parts.gradient[2] ^= 1;
        }
        file.append(&update).expect("appended");
    }
    file.sync().expect("synced");
    let found = folder.run(&["replay", "run", "--steps", "3..4", "-q"]);
    assert_eq!(found.code, 1, "{}{}", found.out, found.err);
    let tensor = &chain.origin.tensors[2];
    for part in [
        &format!("update 3: gradient differs in {tensor}"),
        "write the same bits in all ",
        "agrees with itself",
        "both devices agree: the machine that made the record computes differently",
    ] {
        assert!(found.out.contains(part), "`{part}` in {}", found.out);
    }
    let found = folder.run(&["replay", "run", "--steps", "3..4", "-q", "--against", "none"]);
    assert!(found.code == 1 && !found.out.contains("agrees with itself"), "{}", found.out);
    let found = folder.run(&["replay", "run", "--steps", "3..4", "--json", "--against", "reference"]);
    let descent = &found.json()[0]["descent"];
    assert_eq!((found.code, &descent["step"], &descent["on"][1]), (1, &3.into(), &"reference".into()));
    assert_eq!(descent["gives_the_record"], serde_json::json!([false, false]));
}

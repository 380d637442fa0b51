//! Statements of `prove`: signed with either kind of key, checked by `verify` and by the script in
//! `tools/`, and refused if anything in them or beside them was changed.

use crate::model_folder::Folder;
use crate::receipt::{STEPS, trained};
use isobit_conformance::skip;
use isobit_proof::statement::{Envelope, PrivateKey};
use serde_json::{Value, json};
use std::process::Command;

/// The key of the first test vector of RFC 8032, as OpenSSL writes it.
pub(crate) const KEY: &str = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIJ1hsZ3v/VpguoRK9JLsLMREScVpezJpGXA7rAMcrn9g\n-----END PRIVATE KEY-----\n";
pub(crate) const PUBLIC: &str = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=\n-----END PUBLIC KEY-----\n";
const OTHER: &str = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAPUAXw+hDiVqStwqnTRt+vJyYLM8uxJaMwM1V8Sr0Zgw=\n-----END PUBLIC KEY-----\n";

/// The key of RFC 6979, A.2.5, for ECDSA on P-256.
const EC_KEY: &str = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIMmvqdhFunUWa1whV2ex1pNOUMPbNuibEnuKYisSD2choAoGCCqGSM49\nAwEHoUQDQgAEYP7UuiVanTHJYet0xjVtaMBJuJI7Yfps5mliLmDyn7Z5A/4QCLi8\nmaQa6elWKLxk8vGyDC1+n1F3o8KU1EYimQ==\n-----END EC PRIVATE KEY-----\n";
const EC_PUBLIC: &str = "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEYP7UuiVanTHJYet0xjVtaMBJuJI7\nYfps5mliLmDyn7Z5A/4QCLi8maQa6elWKLxk8vGyDC1+n1F3o8KU1EYimQ==\n-----END PUBLIC KEY-----\n";

#[test]
fn a_proof_is_checked_by_its_signature_and_its_files() {
    let folder = trained(None);
    folder.put("key.pem", KEY);
    folder.put("public.pem", PUBLIC);
    folder.put("other.pem", OTHER);
    let proved = folder.run(&["prove", "run", "--segments", "2", "--challenge", "c0ffee", "--key", "key.pem", "-q"]);
    assert_eq!(proved.code, 0, "{}{}", proved.out, proved.err);
    assert!(proved.out.contains("replayed 4 of 6 updates in 2 of 3 segments"), "{}", proved.out);
    assert!(proved.out.contains("(chosen by the challenge c0ffee)"), "{}", proved.out);
    assert!(proved.out.contains("a 66.7 % chance"), "{}", proved.out);
    let verified = folder.run(&["verify", "run", "--key", "public.pem"]);
    assert!(verified.code == 0 && verified.out.contains("signed by key"), "{}{}", verified.out, verified.err);
    folder.run(&["verify", "run/final", "--statement", "run/statement.json", "--key", "public.pem"]).says(0, &[]);
    let other = folder.run(&["verify", "run", "--key", "other.pem"]);
    assert!(other.code == 8 && other.out.contains("not signed by the given key"), "{}", other.out);
    // A changed payload, a statement of another run, and one that lists other files.
    let text = folder.text("run/statement.json");
    folder.put("run/statement.json", text.replacen("\"payload\": \"e", "\"payload\": \"f", 1));
    folder.run(&["verify", "run", "--key", "public.pem"]).says(8, &[]);
    folder.trained("seed", &[&STEPS[..], &["seed=8"]].concat());
    folder.put("seed/statement.json", &text);
    let found = folder.run(&["verify", "seed"]);
    assert!(found.code == 8 && found.out.contains("it is about another receipt"), "{}", found.out);
    // All segments, and a run whose record does not follow.
    let whole = folder.run(&["prove", "seed", "-q", "-o", "other.json"]);
    assert!(
        whole.code == 0
            && whole.out.contains("replayed all of 3 segments with 6 updates")
            && whole.out.contains("not signed"),
        "{}",
        whole.out
    );
    // A chance means nothing if the prover chose.
    let own = folder.run(&["prove", "seed", "-q", "-o", "own.json", "--segments", "2", "--json"]);
    assert_eq!((own.code, &own.json()[0]["chosen_by"]), (0, &"self".into()), "{}", own.err);
    assert!(own.json()[0]["detection"].is_null() && whole.out.contains("same bits"), "{}", own.out);
    let own = folder.run(&["verify", "seed/final", "--statement", "own.json"]);
    let says = "the prover chose them, which says nothing against a prover who wanted to avoid a segment";
    assert!(own.code == 0 && own.out.contains(says) && !own.out.contains('%'), "{}", own.out);
    folder.run(&["prove", "seed", "--challenge", "xyz", "--segments", "1"]).says(2, &["hexadecimal"]);
    let path = folder.path("seed/final/adapter_model.safetensors");
    let mut bytes = std::fs::read(&path).expect("read");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).expect("written");
    folder.run(&["prove", "seed", "-q"]).says(8, &["final/adapter_model.safetensors"]);
}

/// Who checks a statement: the program, and the script if Python has what it needs.
struct Checkers<'a> {
    folder: &'a Folder,
    python: bool,
}

impl<'a> Checkers<'a> {
    fn new(test: &str, folder: &'a Folder) -> Self {
        let has_python = Command::new("python3").args(["-c", "import cryptography"]).output();
        let python = has_python.is_ok_and(|output| output.status.success());
        if !python {
            let missing = ("python".to_string(), "no Python 3 with the package cryptography".to_string());
            skip(test, &[missing]);
        }
        Self { folder, python }
    }

    /// What each says of the statement of `run`, signed by a key, and whether it accepts it.
    fn say(&self, key: &str, more: &[&str]) -> Vec<(bool, String)> {
        let verified = self.folder.run(&[&["verify", "run", "--key", key], more].concat());
        assert!([0, 8].contains(&verified.code), "{}{}", verified.out, verified.err);
        let mut all = vec![(verified.code == 0, verified.out)];
        if self.python {
            let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tools/verify_statement.py");
            let path = |name: &str| self.folder.path(name);
            let arguments = [path("run/statement.json"), path("run/final"), "--key".into(), path(key)];
            let output = Command::new("python3").arg(script).args(arguments).args(more).output().expect("it runs");
            let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
            assert!([Some(0), Some(1)].contains(&output.status.code()), "{said}");
            all.push((output.status.success(), said));
        }
        all
    }

    /// Whether each accepts it.
    fn accept(&self, key: &str) -> Vec<bool> {
        self.say(key, &[]).into_iter().map(|(accepts, _)| accepts).collect()
    }

    /// Each must accept it or not, and say one of these.
    #[track_caller]
    fn must_say(&self, more: &[&str], accepted: bool, parts: [&str; 2]) {
        for ((accepts, said), part) in self.say("public.pem", more).into_iter().zip(parts) {
            assert!(accepts == accepted && said.contains(part), "{accepts}: `{part}` in {said}");
        }
    }
}

/// Who chose what was replayed decides what a statement is worth: both checkers say it.
#[test]
fn who_chose_the_segments_is_said() {
    let folder = trained(None);
    let check = Checkers::new("statement::who_chose_the_segments_is_said", &folder);
    folder.put("key.pem", KEY);
    folder.put("public.pem", PUBLIC);
    let prove = |more: &[&str]| {
        folder.run(&[&["prove", "run", "-q", "--key", "key.pem"], more].concat()).says(0, &[]);
    };
    prove(&["--segments", "2"]);
    let own = ["the prover chose them, which says nothing against", "chosen by the prover, who could avoid any"];
    check.must_say(&[], true, own);
    check.must_say(&["--challenge", "0a"], false, ["it does not answer the challenge"; 2]);
    // One that has a probability nevertheless.
    let envelope = Envelope::read(&folder.path("run/statement.json")).expect("an envelope");
    let mut statement: Value = serde_json::from_slice(&envelope.payload().expect("base64")).expect("JSON");
    statement["predicate"]["isobit_reexecution"]["probability_of_detection"] =
        json!({ "if_one_segment_is_wrong": 2.0 / 3.0, "if_a_tenth_is_wrong": 2.0 / 3.0 });
    let key = PrivateKey::read(&folder.path("key.pem")).expect("a key");
    let payload = statement.to_string();
    Envelope::new(payload.as_bytes(), Some(&key)).write(&folder.path("run/statement.json")).expect("written");
    check.must_say(&[], false, ["predicate.isobit_reexecution.probability_of_detection"; 2]);
    // A challenge that was not compared, and one that all segments answer, whichever it is.
    prove(&["--segments", "2", "--challenge", "0a"]);
    check.must_say(&[], true, ["challenge of the statement is not compared", "(not compared: give --challenge)"]);
    check.must_say(&["--challenge", "0A"], true, ["by the challenge 0a", "replayed, by challenge 0a\n"]);
    prove(&["--segments", "3", "--challenge", "0a"]);
    let all = ["replays everything, as any would ask", "replayed, by challenge 0a, as 0b would ask, for all were\n"];
    check.must_say(&["--challenge", "0b"], true, all);
    prove(&[]);
    check.must_say(&[], true, ["replayed all of 3 segments with 6 updates", "3 of 3 segments replayed\n"]);
}

/// Other payloads that the holder of the key may sign, and whether they are accepted.
fn payloads(folder: &Folder, envelope: &str) -> Vec<(String, bool, &'static str)> {
    folder.put("envelope.json", envelope);
    let payload = Envelope::read(&folder.path("envelope.json")).expect("an envelope").payload().expect("base64");
    let good = String::from_utf8(payload).expect("JSON");
    let changed = |change: &dyn Fn(&mut Vec<Value>)| {
        let mut statement: Value = serde_json::from_str(&good).expect("JSON");
        change(statement["predicate"]["runDetails"]["byproducts"].as_array_mut().expect("a list"));
        statement.to_string()
    };
    let put = |path: &str, value: Value| {
        let mut statement: Value = serde_json::from_str(&good).expect("JSON");
        *statement.pointer_mut(path).unwrap_or_else(|| panic!("{path}")) = value;
        statement.to_string()
    };
    let again = "/predicate/isobit_reexecution";
    let replayed = |to: bool| {
        let mut statement: Value = serde_json::from_str(&good).expect("JSON");
        let done = statement.pointer_mut(again).expect("there");
        done["segments"].as_array_mut().expect("a list").iter_mut().for_each(|one| one["reexecuted"] = to.into());
        done["reexecuted_updates"] = if to { 6.into() } else { 0.into() };
        statement.to_string()
    };
    let zero = || Value::from("0".repeat(64));
    let one_third = Value::from(0.333_333_333_333_4);
    let chain = |digest: &str| json!({ "name": "chain", "digest": { "blake3": digest } });
    vec![
        (good.clone(), true, "the same payload"),
        (good.replacen('{', "{\"_type\":\"x\",", 1), false, "a key twice"),
        (good.replacen("\"updates\":", "\"updates\":5,\"updates\":", 1), false, "a key twice, further in"),
        (changed(&|all| all.reverse()), false, "byproducts in another order"),
        (changed(&|all| all.push(chain(&"0".repeat(64)))), false, "two chains"),
        (changed(&|all| all.retain(|one| one["name"] != "chain")), false, "no chain"),
        (changed(&|all| all[1]["digest"]["sha256"] = zero()), false, "another receipt among the byproducts"),
        (put(&format!("{again}/agrees"), false.into()), false, "a replay that does not agree"),
        (put(&format!("{again}/agrees"), 1.into()), false, "a number instead of true"),
        (replayed(false), false, "nothing was replayed"),
        (replayed(true), false, "all was replayed, with the numbers of one segment"),
        (put(&format!("{again}/probability_of_detection/if_one_segment_is_wrong"), 1.0.into()), false, "certainty"),
        (put(&format!("{again}/probability_of_detection/if_one_segment_is_wrong"), one_third), false, "another digit"),
        (put(&format!("{again}/challenge/chosen_by"), "the pope\n\u{1b}[31m".into()), false, "who chose"),
        (put(&format!("{again}/challenge/hex"), "c0ffef".into()), false, "another challenge"),
        (put(&format!("{again}/segments/2/starts_after"), 5.into()), false, "a start after the first update"),
        (put(&format!("{again}/segments/1/last"), 6.into()), false, "segments that overlap"),
        (put(&format!("{again}/segments"), json!([])), false, "no segments"),
        (put(&format!("{again}/reexecuted_updates"), 6.into()), false, "another count"),
        (put("/subject/0/digest/blake3", zero()), false, "another BLAKE3 of a file"),
        (put("/subject/0/digest/sha256", zero()), false, "another SHA-256 of a file"),
        (put("/subject/2/digest/blake3", 1.into()), false, "a number as BLAKE3 of the receipt"),
        (put("/predicate/buildDefinition/buildType", "urn:other".into()), false, "another type of build"),
        (put("/predicate/buildDefinition/externalParameters/config/seed", "8".into()), false, "another seed"),
        (put("/predicate/buildDefinition/resolvedDependencies", json!([])), false, "no inputs"),
        (put("/predicate/runDetails/builder/id", "urn:isobit:program:9.9".into()), false, "another program"),
        (put(&format!("{again}/environment/device"), "cuda:9".into()), true, "the environment is for information"),
        (put(&format!("{again}/environment/device"), 9.into()), false, "an environment that is no text"),
        (good.replacen("\"agrees\":true", "\"agrees\":true,\"more\":1", 1), false, "a field more"),
        (good.replacen("\"agrees\":true", "\"agrees\":NaN", 1), false, "not a number"),
        (format!("\u{feff}{good}"), false, "a byte order mark"),
        (format!("{good}\n{{}}"), false, "a second value"),
        (
            put(&format!("{again}/probability_of_detection/if_one_segment_is_wrong"), true.into()),
            false,
            "true as a chance",
        ),
        (good.replacen("\"if_one_", "\"if_none_is_wrong\":1.0,\"if_one_", 1), false, "one more chance"),
        (good.replacen("\"starts_after\":0", "\"starts_after\":-0", 1), false, "minus nothing"),
        (good.replacen("\"starts_after\":0", "\"starts_after\":0e0", 1), false, "a number in another form"),
        (good.replacen("\"starts_after\":0", "\"starts_after\":1e999", 1), false, "an endless number"),
        (good.replacen("\"updates\":6", "\"updates\":6.0", 1), false, "updates with a point"),
        (good.replacen("\"device\":\"", "\"device\":\"\\ud800", 1), false, "half of a character"),
        (good.replacen("\"device\":\"", "\"device\":\"\\u0041", 1), true, "a character in another form"),
        (put(&format!("{again}/segments/0/reexecuted"), 1.into()), false, "a number for whether it was replayed"),
        (put(&format!("{again}/challenge"), json!({ "chosen_by": "self" })), false, "a choice that is nobody's"),
        (put(&format!("{again}/challenge/hex"), "C0FFEE".into()), false, "digits in capitals"),
    ]
}

/// Keys that cannot do what is asked, and a statement of another tool, which is never replaced.
#[test]
fn keys_and_statements_of_others() {
    let folder = trained(None);
    folder.put("key.pem", KEY);
    let encrypted = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIGb\n-----END ENCRYPTED PRIVATE KEY-----\n";
    folder.put("encrypted.pem", encrypted);
    let prove = ["prove", "run", "-q", "--segments", "1", "--key"];
    folder.run(&[&prove[..], &["encrypted.pem"]].concat()).says(2, &["the key is encrypted"]);
    folder.run(&[&prove[..], &["key.pem"]].concat()).says(0, &[]);
    folder.run(&["verify", "run", "--key", "key.pem"]).says(2, &["it is a private key"]);
    let other = br#"{"predicate":{"buildDefinition":{"buildType":"https://example.com/build"}}}"#;
    Envelope::new(other, None).write(&folder.path("other.json")).expect("written");
    let before = folder.text("other.json");
    let refused = folder.run(&[&prove[..], &["key.pem", "-o", "other.json"]].concat());
    refused.says(2, &["exists, and is not a statement of `isobit prove`"]);
    assert_eq!(folder.text("other.json"), before);
}

/// Both kinds of key, and everything that a hostile envelope may have, for both checkers.
#[test]
fn hostile_envelopes_are_refused() {
    let folder = trained(None);
    let check = Checkers::new("statement::hostile_envelopes_are_refused", &folder);
    for (name, text) in [("key.pem", KEY), ("public.pem", PUBLIC), ("ec-key.pem", EC_KEY), ("ec-public.pem", EC_PUBLIC)]
    {
        folder.put(name, text);
    }
    for (key, public, other) in
        [("key.pem", "public.pem", "ec-public.pem"), ("ec-key.pem", "ec-public.pem", "public.pem")]
    {
        let proved = folder.run(&["prove", "run", "--segments", "1", "--challenge", "c0ffee", "--key", key, "-q"]);
        assert_eq!(proved.code, 0, "{}{}", proved.out, proved.err);
        let text = folder.text("run/statement.json");
        let good: Value = serde_json::from_str(&text).expect("JSON");
        let both = |public: &str, envelope: &str, accepted: bool, what: &str| {
            folder.put("run/statement.json", envelope);
            let found = check.accept(public);
            assert!(found.iter().all(|one| *one == accepted), "{key}: {what}: {found:?}");
        };
        let changed = |change: &dyn Fn(&mut Value)| {
            let mut envelope = good.clone();
            change(&mut envelope);
            envelope.to_string()
        };
        both(public, &text, true, "as it was written");
        both(other, &text, false, "the key of the other kind");
        let signature = good["signatures"][0].clone();
        let nonsense = json!({ "keyid": signature["keyid"], "sig": "AAAA" });
        let put = |signatures: Value| changed(&|envelope| envelope["signatures"] = signatures.clone());
        both(public, &put(json!([signature, signature])), true, "the same signature twice");
        both(public, &put(json!([nonsense, signature])), true, "a signature of somebody else before it");
        both(public, &put(json!([nonsense])), false, "a signature of nothing");
        both(public, &put(json!([])), false, "no signature");
        both(public, &put(json!([{ "sig": signature["sig"] }])), true, "no name of the key, which is optional");
        both(public, &changed(&|envelope| envelope["more"] = 1.into()), false, "a field that DSSE does not have");
        both(public, &put(json!([{ "keyid": "", "sig": "!" }])), false, "not base64");
        both(public, &put(json!("x")), false, "no list of signatures");
        let mut cut = signature["sig"].as_str().expect("text").to_string();
        cut.replace_range(..4, "AAAA");
        both(public, &put(json!([{ "keyid": signature["keyid"], "sig": cut }])), false, "a changed signature");
        both(public, &changed(&|envelope| envelope["payloadType"] = "text/plain".into()), false, "another type");
        both(public, &changed(&|envelope| envelope["payload"] = "e30=".into()), false, "another payload");
        both(public, &changed(&|envelope| envelope["payload"] = "*".into()), false, "a payload that is not base64");
        let payload = good["payload"].as_str().expect("text");
        let flipped = format!("{}B{}", &payload[..9], &payload[10..]);
        both(public, &changed(&|envelope| envelope["payload"] = flipped.clone().into()), false, "a changed payload");
        let spaced = format!("{}\n{}", &payload[..8], &payload[8..]);
        both(public, &changed(&|envelope| envelope["payload"] = spaced.clone().into()), false, "a line break in it");
        both(public, &put(json!([signature, { "sig": 5 }])), false, "a signature that is no text");
        both(public, &put(json!([signature, { "keyid": 5, "sig": "" }])), false, "a key's name that is no text");
        both(public, &put(json!([signature, {}])), false, "a signature without one");
        both(public, &put(vec![signature.clone(); 100].into()), true, "a hundred signatures");
        both(public, &put(vec![signature.clone(); 101].into()), false, "more than a hundred");
        both(public, &put(json!({ "0": signature })), false, "an object of signatures");
        let twice = text.replacen('{', "{\"payload\":\"e30=\",", 1);
        both(public, &twice, false, "two payloads");
        // Fields do not depend on the kind of key.
        let count = if key == "key.pem" { usize::MAX } else { 2 };
        for (payload, accepted, what) in payloads(&folder, &text).into_iter().take(count) {
            let key = PrivateKey::read(&folder.path(key)).expect("a key");
            let path = folder.path("signed.json");
            Envelope::new(payload.as_bytes(), Some(&key)).write(&path).expect("written");
            both(public, &folder.text("signed.json"), accepted, what);
        }
        both(public, "{", false, "no JSON");
        both(public, &format!("{text}{}", " ".repeat(32 << 20)), false, "an envelope of more than 32 MiB");
        both(public, &text, true, "as it was written");
    }
}

/// A key of small order, for which one signature is of every message, and a signature that begins
/// with such a point.
#[test]
fn points_of_small_order_sign_nothing() {
    let folder = trained(None);
    let check = Checkers::new("statement::points_of_small_order_sign_nothing", &folder);
    folder.put("key.pem", KEY);
    folder.put("public.pem", PUBLIC);
    let weak = "MCowBQYDK2VwAyEAAQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    folder.put("weak.pem", format!("-----BEGIN PUBLIC KEY-----\n{weak}\n-----END PUBLIC KEY-----\n"));
    folder.run(&["prove", "run", "-q", "--segments", "1", "--key", "key.pem"]).says(0, &[]);
    let mut envelope: Value = serde_json::from_str(&folder.text("run/statement.json")).expect("JSON");
    envelope["signatures"][0]["sig"] =
        "AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA==".into();
    folder.put("run/statement.json", envelope.to_string());
    assert!(check.accept("public.pem").iter().all(|accepts| !accepts));
    folder.run(&["verify", "run", "--key", "weak.pem"]).says(2, &["weak.pem: it is not an Ed25519"]);
    if check.python {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tools/verify_statement.py");
        let arguments = ["run/statement.json", "run/final", "--key", "weak.pem"];
        let output = Command::new("python3").arg(script).args(arguments).current_dir(folder.path("")).output();
        let said = String::from_utf8_lossy(&output.expect("it runs").stderr).into_owned();
        assert!(said.contains("the key is of small order"), "{said}");
    }
}

/// What was proved stays proved when the run prunes the checkpoints that the replay began with.
#[test]
fn a_pruned_run_keeps_its_statement() {
    let folder = trained(None);
    folder.run(&["prove", "run", "-q"]).says(0, &[]);
    folder.trained("run", &[&STEPS[..], &["--resume", "save_total_limit=1"]].concat());
    let verified = folder.run(&["verify", "run"]);
    let note = "note: replays of the statement began after other checkpoints";
    assert!(verified.code == 0 && verified.out.contains(note), "{}{}", verified.out, verified.err);
}

//! `isobit report`: one page that needs nothing else, of any run, however hostile its files are.

use crate::model_folder::{Folder, Shape};
use std::fmt::Write;

/// Elements without an end tag.
const VOID: [&str; 2] = ["meta", "wbr"];

/// Fails unless every element of a page is closed in its turn and nothing is fetched or run.
#[track_caller]
fn check_page(page: &str) {
    assert!(page.starts_with("<!doctype html>\n<!-- isobit.report/1 -->\n"), "{}", &page[..80.min(page.len())]);
    for forbidden in ["<script", "http:", "https:", "url(", "@import", "javascript:"] {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
    let mut open: Vec<&str> = Vec::new();
    for tag in page.split('<').skip(1).filter_map(|rest| rest.split('>').next()) {
        assert!(![" src", " href", " on"].iter().any(|attribute| tag.contains(attribute)), "{tag}");
        let name = tag.trim_start_matches('/').split([' ', '\n']).next().unwrap_or_default();
        if tag.starts_with('!') || tag.ends_with('/') || VOID.contains(&name) {
            continue;
        }
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "{}", &tag[..tag.len().min(60)]);
        } else {
            open.push(name);
        }
    }
    assert_eq!(open, Vec::<&str>::new());
}

/// A line as earlier versions wrote it, without a checksum.
fn line(step: u64, loss: f64) -> String {
    format!(
        "{{\"schema\":\"isobit.metrics/1\",\"step\":{step},\"epoch\":0.5,\"tokens\":{step},\"loss\":{loss:e},\
         \"loss_bits\":\"{:016x}\",\"learning_rate\":2e-4,\"grad_norm\":0.5,\
         \"timing\":{{\"seconds\":0.5,\"tokens_per_s\":9000.0}}}}\n",
        loss.to_bits()
    )
}

#[test]
fn a_page_needs_a_name_and_a_folder() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("run", &["max_steps=1"]);
    folder.run(&["report", "run", "-o", "-"]).says(2, &["standard output", "hint: name a file"]);
    folder.run(&["report", "run", "-o", "no/page.html"]).says(7, &["no is not a folder", "hint: create the folder"]);
    assert!(!folder.has("-") && !folder.has("no"));
}

/// Whatever is missing is told, and runs that log at other steps part where their chains do.
#[test]
fn a_missing_part_is_told() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("run", &["max_steps=4", "logging_steps=1"]);
    folder.trained("other", &["max_steps=4", "logging_steps=3", "learning_rate=1e-5"]);
    let ran = folder.run(&["report", "run", "other", "--json"]);
    assert!(ran.code == 0 && !ran.err.contains("note: "), "{}", ran.err);
    assert!(ran.json()[0]["runs"][1]["first_difference"].is_u64(), "{}", ran.out);
    folder.put("other/receipt.json", "[".repeat(1 << 20));
    folder.put("other/final/MANIFEST.json", "{");
    folder.run(&["report", "other"]).says(0, &["note: other: no receipt: ", "note: other: no final weights: "]);
    std::fs::remove_dir_all(folder.path("run/final")).expect("removed");
    folder.run(&["report", "run"]).says(0, &["note: run: no final weights: "]);
}

#[test]
fn one_run_two_runs_and_the_same_run_twice() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("first", &[]);
    folder.trained("again", &["threads=2"]);
    folder.trained("second", &["seed=8"]);
    let ran = folder.run(&["report", "first"]);
    ran.says(0, &[]);
    assert_eq!(ran.out, "report.html\n");
    let page = folder.text("report.html");
    check_page(&page);
    for part in
        ["Loss", "held-out", "Learning rate", "Gradient norm", "Tokens/s", "Planned memory on cpu", "lora_<wbr>r"]
    {
        assert!(page.contains(part), "{part}");
    }
    // Keys that can influence the weights are marked, others are not.
    assert!(
        page.contains("<span class=\"dot\">●</span> seed<") && page.contains("<span class=\"none\">●</span> threads<")
    );
    let ran = folder.run(&["report", "first", "second", "again", "-o", "three.html", "--json"]);
    let object = &ran.json()[0];
    assert_eq!((object["schema"].as_str(), ran.code), (Some("isobit.report/1"), 0));
    let of =
        |key: &str| object["runs"].as_array().expect("runs").iter().map(|run| run[key].clone()).collect::<Vec<_>>();
    assert_eq!(of("first_difference"), [serde_json::Value::Null, 1.into(), serde_json::Value::Null]);
    assert_eq!(of("same_as_first"), [serde_json::Value::Null, false.into(), true.into()]);
    let page = folder.text("three.html");
    check_page(&page);
    for part in
        ["first differing step 1: ", "first difference, step 1", "the same bits in every step", "class=\"differs\""]
    {
        assert!(page.contains(part), "{part}");
    }
}

#[test]
fn a_long_run_is_a_small_page() {
    let folder = Folder::new(Shape::TINY);
    std::fs::create_dir(folder.path("long")).expect("a folder");
    let lines: String = (1..=30_000).map(|step| line(step, 1.0 + (step % 97) as f64 / 50.0)).collect();
    folder.put("long/metrics.jsonl", lines);
    let ran = folder.run(&["report", "long"]);
    ran.says(0, &["note: long: no config: "]);
    let page = folder.text("report.html");
    check_page(&page);
    assert!(page.contains("30,000") && page.len() < 200_000, "{} bytes", page.len());
}

#[test]
fn hostile_runs_are_escaped_or_refused() {
    let folder = Folder::new(Shape::TINY);
    let name = "<img src=x onerror='alert(1)'>&\"";
    std::fs::create_dir(folder.path(name)).expect("a folder");
    let metrics = format!("{name}/metrics.jsonl");
    let huge = [line(1, 1e308), line(2, -1e308), line(3, f64::MIN_POSITIVE), line(4, 0.0)].concat();
    let nan = line(5, 1.0).replace("\"loss\":1e0", "\"loss\":null").replace("3ff0000000000000", "7ff8000000000000");
    folder.put(&metrics, format!("{huge}{nan}{}", &line(6, 1.0)[..50]));
    let config =
        "base_model = \"<script>alert(1)</script>\"\noutput_dir = \"o\"\n[[datasets]]\npath = \"</style><b>\"\n";
    folder.put(&format!("{name}/config.resolved.toml"), config);
    folder.run(&["report", name]).says(0, &["no memory by item"]);
    let page = folder.text("report.html");
    check_page(&page);
    assert!(page.contains("&lt;img src=x onerror=&#39;alert(1)&#39;&gt;&amp;&quot;"), "the name is escaped");
    assert!(page.contains("not finite at 1 step") && page.contains("&lt;script&gt;"));
    let mut text = line(1, 1.0);
    let _ = write!(text, "{{\"step\":2}}\n{}", line(3, 1.0));
    folder.put(&metrics, text);
    folder
        .run(&["report", name])
        .says(8, &["metrics.jsonl is malformed: line 2: it is not a line of metrics", "hint: "]);
    folder.put(&metrics, "");
    folder.run(&["report", name]).says(0, &[]);
    assert!(folder.text("report.html").contains("Nothing is logged yet"));
    folder.run(&["report", "nowhere"]).says(2, &["nowhere is no run: it has no metrics.jsonl"]);
    folder.run(&["report", "data.jsonl"]).says(2, &["data.jsonl is no run"]);
}

#[test]
fn only_pages_of_ours_are_overwritten() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("first", &["max_steps=1"]);
    folder.put("mine.html", "<!doctype html>\n<p>mine");
    folder.run(&["report", "first", "-o", "mine.html"]).says(7, &["is not a page of `isobit report`", "hint: "]);
    assert_eq!(folder.text("mine.html"), "<!doctype html>\n<p>mine");
    folder.run(&["report", "first", "-o", "model"]).says(7, &["not a regular file"]);
    folder.run(&["report", "first", "-o", "no/such/folder.html"]).says(7, &["cannot write"]);
    for _ in 0..2 {
        folder.run(&["report", "first", "-o", "page.html"]).says(0, &[]);
    }
}

/// The page is extra: the run stays the same.
#[test]
fn a_run_writes_its_page_at_every_save() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("first", &["max_steps=6"]);
    folder.trained("shown", &["max_steps=6", "report_to=html"]);
    folder.same("first", "shown");
    assert!(!folder.has("first/report.html"));
    let page = folder.text("shown/report.html");
    check_page(&page);
    assert!(page.contains("BLAKE3 of the final weights"), "the last page has the final weights");
    // A run that is stopped after a save has a page of that save.
    let mut child = folder.training("stopped", &["max_steps=400", "save_steps=1", "report_to=[html, tensorboard]"]);
    while !folder.has("stopped/checkpoint-2") && child.try_wait().expect("a child").is_none() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    child.kill().expect("killed");
    child.wait().expect("ended");
    let page = folder.text("stopped/report.html");
    check_page(&page);
    assert!(page.contains("no final weights") && folder.has("stopped/tensorboard"));
    std::fs::create_dir(folder.path("foreign")).expect("a folder");
    folder.put("foreign/report.html", "mine");
    let ran = folder.train("foreign", &["report_to=html"]);
    ran.says(7, &["report.html is not a page of `isobit report`"]);
    assert_eq!(folder.text("foreign/report.html"), "mine");
    assert!(!folder.has("foreign/metrics.jsonl"));
    folder.train("other", &["report_to=wandb"]).says(2, &["none, html, tensorboard"]);
}

/// `generate_prompts`: texts before and after, the same weights and metrics as without, and texts
/// that are escaped in the page.
#[test]
fn samples_before_and_after() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("plain", &["max_steps=3"]);
    let prompts = "generate_prompts=[\"1+2=\", \"<b>\"]";
    folder.trained("shown", &["max_steps=3", prompts, "generate_tokens=4", "report_to=html"]);
    folder.same("plain", "shown");
    let samples: serde_json::Value = serde_json::from_str(&folder.text("shown/samples.json")).expect("JSON");
    assert_eq!(samples["schema"], "isobit.samples/1");
    let generated = |model: &[&str]| {
        let flags = ["generate", "--json", "--prompt", "1+2=", "--max-tokens", "4", "--model", "model"];
        folder.run(&[&flags[..], model].concat()).json()[0]["text"].clone()
    };
    let first = &samples["samples"][0];
    assert_eq!(first["prompt"], "1+2=");
    assert_eq!(first["before"], generated(&[]));
    assert_eq!(first["after"], generated(&["--adapter", "shown"]));
    let page = folder.text("shown/report.html");
    assert!(page.contains("<h2>Samples</h2>") && page.contains("<h3>&lt;b&gt;"), "{page}");
    assert_eq!(folder.run(&["report", "shown", "-o", "page.html"]).code, 0);
    assert!(folder.text("page.html").contains("<h2>Samples</h2>"));
    // Samples are made from the result, and are no part of its record.
    folder.run(&["verify", "shown"]).says(0, &[]);
    folder.run(&["prove", "shown", "-q"]).says(0, &[]);
    let empty = r#"{"schema":"isobit.samples/1","samples":[{"prompt":"1","before":"","after":"2"}]}"#;
    folder.put("shown/samples.json", empty);
    folder.run(&["report", "shown", "-o", "page.html"]).says(0, &[]);
    assert!(folder.text("page.html").contains("<pre>(ended at once)\n</pre>"));
    folder.put("shown/samples.json", "{");
    folder.run(&["report", "shown", "-o", "page.html"]).says(0, &["no samples: ", "samples.json"]);
    folder.train("out", &["generate_prompts=[\"\"]"]).says(2, &["generate_prompts", "an empty one"]);
    std::fs::create_dir(folder.path("foreign")).expect("a folder");
    folder.put("foreign/samples.json", "mine");
    folder.train("foreign", &[prompts]).says(7, &["samples.json is not a file of samples", "hint: move it away"]);
    assert_eq!(folder.text("foreign/samples.json"), "mine");
    // A model without a tokenizer trains on tokens, and cannot continue a text.
    assert!(!folder.has("plain/samples.json"));
}

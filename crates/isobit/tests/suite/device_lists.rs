//! Law 8 from the outside: a list of devices divides the layers, and the run's folder is that of
//! one device, byte for byte. What cannot be divided is refused.

use crate::model_folder::{Folder, Shape};
use isobit_conformance::named_devices_or_skips;

/// Ends the config with this section instead of its adapter.
fn adapter(folder: &Folder, section: &str) {
    let config = folder.text("config.toml");
    let at = config.find("[adapter]").expect("a section");
    folder.put("config.toml", format!("{}{section}", &config[..at]));
}

fn full() -> Folder {
    let folder = Folder::new(Shape::TINY);
    adapter(&folder, "[adapter]\ntype = \"full\"\n");
    folder
}

const MICRO: [&str; 2] = ["training.micro_batch_size=1", "gradient_accumulation_steps=8"];

#[test]
fn a_list_gives_the_folder_of_one_device() {
    let experts = |section: &str| {
        let folder = Folder::of_experts();
        folder.put("config.toml", folder.text("config.toml") + section);
        folder
    };
    for folder in [
        Folder::new(Shape::TINY),
        full(),
        experts("[adapter]\nlora_target_modules = [\"q_proj\", \"o_proj\"]\n"),
        experts("[adapter]\ntype = \"full\"\n"),
    ] {
        folder.trained("one", &[]);
        folder.trained("list", &["device=cpu,cpu", "threads=2"]);
        folder.same("one", "list");
        folder.trained("micro", &[&["device=[\"cpu\", \"cpu\"]", "device_map=[1, 1]"], &MICRO[..]].concat());
        folder.same("one", "micro");
    }
}

#[test]
fn other_devices_in_a_list_give_the_same_folder() {
    for (name, gpu) in named_devices_or_skips("device_lists::other_devices_in_a_list_give_the_same_folder") {
        drop(gpu);
        let folder = full();
        folder.trained("one", &[]);
        for (at, list) in [format!("{name},cpu"), format!("cpu,{name}"), format!("{name},{name}")].iter().enumerate() {
            let output = format!("list-{at}");
            folder.trained(&output, &[&format!("device={list}"), "threads=1"]);
            folder.same("one", &output);
        }
    }
}

#[test]
fn a_run_is_resumed_on_another_list() {
    let folder = full();
    folder.trained("one", &["max_steps=12"]);
    for (at, (first, then)) in [("cpu,cpu", "cpu"), ("cpu", "cpu,cpu")].into_iter().enumerate() {
        let output = format!("resumed-{at}");
        folder.trained(&output, &["max_steps=12", &format!("device={first}")]);
        folder.trained(&output, &["max_steps=12", &format!("device={then}"), "--resume-from=checkpoint-6"]);
        folder.same("one", &output);
    }
}

#[test]
fn eval_and_bench_take_a_list() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("out", &[]);
    let eval = |device: &str| {
        let ran = folder.run(&[
            "eval",
            "--model",
            "model",
            "--adapter",
            "out",
            "--data",
            "data.jsonl",
            "--json",
            "--device",
            device,
        ]);
        assert_eq!(ran.code, 0, "{}", ran.err);
        let mut value = ran.json().remove(0);
        assert_eq!(value["device"], device);
        value["device"] = "any".into();
        value
    };
    assert_eq!(eval("cpu,cpu"), eval("cpu"));
    let bench = |device: &str| {
        let ran = folder.run(&[
            "bench",
            "step",
            "--config",
            "config.toml",
            "--set",
            &format!("device={device}"),
            "--steps",
            "1",
            "--json",
        ]);
        assert_eq!(ran.code, 0, "{}", ran.err);
        ran.json().remove(0)["loss"].clone()
    };
    assert_eq!(bench("cpu,cpu"), bench("cpu"));
}

#[test]
fn plan_shows_every_device() {
    let folder = full();
    let ran = folder.run(&["plan", "config.toml", "--device", "cpu,cpu"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    for part in ["the CPU, layer 0:", "the CPU, layer 1:", "with 2 micro-batches in flight", "fits as 1 + 1 layers"] {
        assert!(ran.out.contains(part), "`{part}` is missing in: {}", ran.out);
    }
    let plan =
        |memory: &str| folder.run(&["plan", "config.toml", "--json", "--device", "cuda:0,hip:0", "--memory", memory]);
    let ran = plan("1GiB,1");
    let value = &ran.json()[0];
    assert_eq!((ran.code, &value["fits"], value["devices"].as_array().map(Vec::len)), (0, &true.into(), Some(2)));
    let number = |value: &serde_json::Value| value.as_u64().expect("bytes");
    let total = |at: usize| number(&value["devices"][at]["total_bytes"]);
    // `--memory` is for buffers alone; in the memory of a card the driver has its share.
    let needed = |at: usize| number(&value["memories"][at]["needed_bytes"]);
    assert_eq!([needed(0), needed(1)], [total(0), total(1)], "{value}");
    let named = folder.run(&["plan", "config.toml", "--json", "--device", "mi50,mi50"]);
    let named = &named.json()[0];
    assert!(number(&named["memories"][0]["needed_bytes"]) > number(&named["devices"][0]["total_bytes"]), "{named}");
    assert!(number(&value["transfer_host_bytes"]) > 0);
    let one = folder.run(&["plan", "config.toml", "--json", "--device", "cuda:0", "--memory", "1"]);
    let one = number(&one.json()[0]["total_bytes"]);
    assert!(total(0) < one && total(1) < one && total(0) + total(1) > one, "{} and {} of {one}", total(0), total(1));
    // One byte less than the second card needs.
    assert_eq!(plan(&format!("{}B,{}B", needed(0), needed(1))).code, 0);
    let ran = plan(&format!("{}B,{}B", needed(0), needed(1) - 1));
    ran.says(4, &["this run does not fit as 1 + 1 layers: hip:0", "hint: "]);
}

/// What both entries of a card take is held against its one memory; numbers for both add up.
#[test]
fn a_card_that_is_listed_twice_has_one_memory() {
    let folder = full();
    let plan =
        |memory: &str| folder.run(&["plan", "config.toml", "--json", "--device", "cuda:0,cuda:0", "--memory", memory]);
    let value = plan("1GiB").json().remove(0);
    let total = |at: usize| value["devices"][at]["total_bytes"].as_u64().expect("bytes");
    let both = total(0) + total(1);
    assert_eq!(value["memories"].as_array().map(Vec::len), Some(2), "{value}");
    assert_eq!(value["memories"][1]["of"], "host memory");
    assert_eq!(value["memories"][0]["needed_bytes"], both);
    for (memory, code) in [
        (format!("{both}B"), 0),
        (format!("{}B", both - 1), 4),
        (format!("1B,{}B", both - 1), 0),
        (format!("1B,{}B", both - 2), 4),
    ] {
        assert_eq!(plan(&memory).code, code, "{memory}");
    }
    // One number is not said of the CPU beside a card: it has what the machine has.
    let mixed = folder.run(&["plan", "config.toml", "--json", "--device", "cuda:0,cpu", "--memory", "1MiB"]);
    let of = |at: usize| mixed.json()[0]["memories"][at]["available_of"].clone();
    assert_eq!(of(0), "--memory");
    assert_ne!(of(1), "--memory");
}

/// `train --memory` means what the plan says, to the byte, and holds for both entries together.
#[test]
fn a_limit_is_that_of_the_plan() {
    for (name, gpu) in named_devices_or_skips("device_lists::a_limit_is_that_of_the_plan") {
        drop(gpu);
        let folder = full();
        let total = |device: &str, at: usize| {
            let ran = folder.run(&["plan", "config.toml", "--json", "--device", device, "--memory", "1"]);
            let value = ran.json().remove(0);
            let of = if device.contains(',') { &value["devices"][at] } else { &value };
            of["total_bytes"].as_u64().expect("bytes")
        };
        let train = |device: &str, output: &str, bytes: u64, more: &[&str]| {
            let memory = format!("--memory={bytes}B");
            let device = format!("--device={device}");
            folder.train(output, &[&["max_steps=2", &device, &memory, "--json"], more].concat())
        };
        let (one, twice) = (total(&name, 0), format!("{name},{name}"));
        assert_eq!(train(&name, "one", one, &[]).code, 0);
        train(&name, "refused", one - 1, &[]).says(4, &["is available (--memory)", "--no-plan"]);
        let parts = [0, 1].map(|at| total(&twice, at));
        let ran = train(&twice, "twice", parts[0] + parts[1], &[]);
        assert_eq!(ran.code, 0, "{}", ran.err);
        folder.same("one", "twice");
        // The summary has the bytes of each.
        let finished = ran.json().pop().expect("an event");
        let peaks = [0, 1].map(|at| finished["devices"][at]["peak_bytes"].as_u64().expect("bytes"));
        assert!(peaks[0] <= parts[0] && peaks[1] <= parts[1], "{finished}");
        assert_eq!([0, 1].map(|at| finished["devices"][at]["device"].as_str()), [Some(name.as_str()); 2]);
        // Each would fit by itself.
        train(&twice, "over", peaks[0].max(peaks[1]), &["--no-plan"]).says(4, &["exceeds --memory"]);
        let ran = folder.trained("shown", &["max_steps=1", &format!("device={name},cpu")]);
        assert!(ran.err.contains(&format!(" on {name}\n")), "{}", ran.err);
    }
}

/// `eval` computes where the run of its config does, unless told otherwise.
#[test]
fn eval_takes_the_list_of_its_config() {
    let folder = Folder::new(Shape::TINY);
    folder.put(
        "config.toml",
        format!("device = [\"cpu\", \"cpu\"]\ndevice_map = [1, 1]\n{}", folder.text("config.toml")),
    );
    let eval = |more: &[&str]| {
        let ran = folder.run(&[&["eval", "--config", "config.toml", "--json"], more].concat());
        assert_eq!(ran.code, 0, "{}", ran.err);
        let value = ran.json().remove(0);
        (value["device"].clone(), value["loss_bits"].clone())
    };
    let (device, loss) = eval(&[]);
    assert_eq!(device, "cpu,cpu");
    assert_eq!(eval(&["--device", "cpu"]), ("cpu".into(), loss));
    let broken = folder.text("config.toml").replace("[1, 1]", "[1, 2]");
    folder.put("broken.toml", broken);
    folder.run(&["eval", "--config", "broken.toml"]).says(2, &["`device_map` divides 3 layers"]);
    for (name, gpu) in named_devices_or_skips("device_lists::eval_takes_the_list_of_its_config") {
        drop(gpu);
        let config = folder.text("config.toml").replace("device_map = [1, 1]\n", "offload = \"weights\"\n");
        folder.put("card.toml", config.replace("[\"cpu\", \"cpu\"]", &format!("\"{name}\"")));
        let ran = folder.run(&["eval", "--config", "card.toml", "--json"]);
        let value = ran.json().remove(0);
        assert_eq!((&value["device"], &value["loss_bits"]), (&name.into(), &eval(&[]).1), "{}", ran.err);
    }
}

/// What the command line displaces is named.
#[test]
fn a_device_on_the_command_line_says_what_it_overrides() {
    let folder = Folder::new(Shape::TINY);
    let keys = "device = [\"cuda:0\", \"cpu\"]\ndevice_map = [1, 1]\noffload = [\"weights\"]\n\
                devices_by_rank = [\"cuda:0\", \"cuda:1\"]\n";
    folder.put("config.toml", format!("{keys}{}", folder.text("config.toml")));
    let notes = [
        "note: --device cpu overrides `device_map = [1, 1]` (config.toml:2)\n",
        "note: --device cpu overrides `offload = [\"weights\"]` (config.toml:3)\n",
        "note: --device cpu overrides `devices_by_rank = [\"cuda:0\", \"cuda:1\"]` (config.toml:4)\n",
    ];
    folder.train("out", &["--device=cpu", "max_steps=1"]).says(0, &notes);
    folder.run(&["plan", "config.toml", "--device", "cpu"]).says(0, &notes);
    let quiet = folder.train("quiet", &["--device=cpu", "max_steps=1", "-q"]);
    assert!(quiet.code == 0 && !quiet.err.contains("note: "), "{}", quiet.err);
    // A card keeps what is offloaded, and is named as it was typed.
    let ran = folder.run(&["plan", "config.toml", "--device", "mi50"]);
    assert!(ran.code == 0 && ran.err.contains("note: --device mi50 overrides `device_map"), "{}", ran.err);
    assert!(!ran.err.contains("`offload") && ran.out.contains("offloaded to host memory"), "{}{}", ran.out, ran.err);
}

/// Cards of ranks that are elsewhere are planned by name, one `--device` for each rank.
#[test]
fn cards_of_ranks_are_planned_by_name() {
    let folder = Folder::new(Shape::TINY);
    let config = folder.text("config.toml").replace("[training]", "[training]\ngradient_groups = 3");
    folder.put("config.toml", format!("devices_by_rank = [\"cuda:62\", \"cuda:63\", \"cpu\"]\n{config}"));
    let absent = folder.run(&["plan", "config.toml"]);
    absent.says(6, &["(`--device mi50`, once for each rank)"]);
    assert!(absent.out.starts_with("rank 0:\n") && absent.out.contains("rank 2:\n"), "{}", absent.out);
    let named = ["--device", "mi50", "--device", "mi50", "--device", "a100-80,cpu"];
    let ran = folder.run(&[&["plan", "config.toml"], &named[..]].concat());
    ran.says(0, &["overrides `devices_by_rank"]);
    // Each heading stands above its table.
    let (first, last) = ran.out.split_once("rank 2:\n").expect("two plans");
    assert!(first.starts_with("each of ranks 0, 1:\n") && !first.contains("a100-80") && last.contains("a100-80"));
    assert!(ran.out.contains("available on mi50 (AMD Instinct MI50") && ran.out.contains("a100-80 1: "), "{}", ran.out);
    let objects = folder.run(&[&["plan", "config.toml", "--json"], &named[..]].concat()).json();
    let [object] = &objects[..] else { panic!("{objects:?}") };
    let plans = object["ranks"].as_array().expect("plans");
    assert_eq!((&object["schema"], &object["fits"]), (&"isobit.plan/1".into(), &true.into()));
    let ranks: Vec<String> = plans.iter().map(|plan| plan["ranks"].to_string()).collect();
    assert_eq!(ranks, ["[0,1]", "[2]"]);
    assert!(plans[0]["rank_host_bytes"].as_u64() > Some(0), "{}", plans[0]);
    // A rank that cannot be planned: an error, and no plan of some of the ranks.
    let absent = folder.run(&["plan", "config.toml", "--json"]);
    let lines = absent.json();
    assert_eq!((absent.code, lines.len(), &lines[0]["schema"]), (6, 1, &"isobit.error/1".into()), "{}", absent.out);
    let fewer = ["--set", "gradient_groups=2"];
    folder
        .run(&[&["plan", "config.toml"], &named[..], &fewer].concat())
        .says(2, &["3 ranks cannot share 2 gradient groups"]);
    let other = ["--ranks", "2"];
    folder.run(&[&["plan", "config.toml"], &named[..], &other].concat()).says(2, &["devices are named for 3 ranks"]);
}

/// Fewer, larger micro-batches leave devices of a list idle.
#[test]
fn a_list_is_not_advised_to_take_larger_micro_batches() {
    let folder = Folder::new(Shape::TINY);
    let advised = |device: &str| {
        let sets = ["--set", "micro_batch_size=1", "--set", "gradient_accumulation_steps=8"];
        let ran =
            folder.run(&[&["plan", "config.toml", "--device", device, "--json", "--memory", "64"], &sets[..]].concat());
        let all = ran.json()[0]["suggestions"].as_array().expect("a list").clone();
        all.iter().filter_map(|advice| advice["set"].as_str().map(str::to_string)).collect::<Vec<_>>()
    };
    assert!(advised("cpu").iter().any(|set| set.contains("micro_batch_size=8")), "{:?}", advised("cpu"));
    let list = advised("cpu,cpu");
    assert!(!list.is_empty() && list.iter().all(|set| !set.contains("micro_batch")), "{list:?}");
}

/// A run that fits with several changes together only is told all of them.
#[test]
fn changes_that_fit_together_are_advised() {
    let folder = Folder::new(Shape::TINY);
    let plan = |memory: &str, sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let plan = ["plan", "config.toml", "--json", "--device", "cuda:0", "--memory", memory];
        let ran = folder.run(&[&plan[..], &sets].concat());
        (ran.code, ran.json().remove(0))
    };
    let together = [
        "micro_batch_size=1",
        "gradient_accumulation_steps=8",
        "gradient_checkpointing=full",
        "offload=optimizer,activations,weights",
        "load_in_4bit=true",
    ];
    let (_, smallest) = plan("1", &together);
    let (_, without) = plan("1", &together[..4]);
    let bytes = |value: &serde_json::Value| value["total_bytes"].as_u64().expect("bytes");
    assert!(bytes(&smallest) < bytes(&without), "{} and {}", bytes(&smallest), bytes(&without));
    let (code, value) = plan(&format!("{}B", bytes(&smallest)), &[]);
    let first = value["suggestions"][0]["set"].as_str().expect("a suggestion").to_string();
    assert_eq!((code, value["suggestions"][0]["same_bits"].as_bool()), (4, Some(false)));
    for set in ["load_in_4bit=true", "offload=optimizer,activations,weights"] {
        assert!(first.contains(set), "{first}");
    }
}

/// Layers are dealt out by memory, and move to where more is left.
#[test]
fn layers_go_where_memory_is() {
    let folder = Folder::new(Shape::TINY);
    let config = folder.text("model/config.json").replace("\"num_hidden_layers\":2", "\"num_hidden_layers\":8");
    assert!(config.contains("\"num_hidden_layers\":8"), "{config}");
    std::fs::create_dir(folder.path("alone")).expect("a folder");
    folder.put("alone/config.json", config);
    let plan = |device: &str, memory: &str| {
        let set = ["--set", "base_model=alone", "--device", device, "--memory", memory];
        let ran = folder.run(&[&["plan", "config.toml", "--json"], &set[..]].concat());
        let value = ran.json().remove(0);
        let layers: Vec<u64> =
            value["devices"].as_array().expect("a list").iter().filter_map(|one| one["layers"].as_u64()).collect();
        let needed: Vec<u64> = value["memories"]
            .as_array()
            .expect("a list")
            .iter()
            .filter_map(|one| one["needed_bytes"].as_u64())
            .collect();
        (ran.code, layers, needed)
    };
    let cards = "cuda:0,hip:0";
    let (code, layers, even) = plan(cards, "1");
    assert_eq!((code, layers), (0, vec![4, 4]));
    assert_eq!(plan(cards, "3,1").1, [6, 2]);
    assert_eq!(plan("cuda:0,cpu", "1").1, [7, 1]);
    assert_eq!(plan("cuda:0,cuda:0,cuda:1", "1").1, [2, 2, 4], "one memory for both entries");
    assert_eq!(plan("cuda:0,cuda:0,cuda:1", "1,1,1").1, [3, 3, 2], "numbers for both add up");
    // As much for each as the one that needs less: the other gives layers away.
    let (more, less) = if even[0] > even[1] { (0, 1) } else { (1, 0) };
    let (code, layers, needed) = plan(cards, &format!("{0}B,{0}B", even[more] - 1));
    assert_eq!((code, layers[more], layers[less]), (0, 3, 5), "{needed:?} after {even:?}");
    // The CPU takes what a card has no room for.
    let (_, _, alone) = plan("cuda:0,cpu", "1");
    assert_eq!(plan("cuda:0,cpu", &format!("{}B", alone[0] - 1)).1, [6, 2]);
}

/// The text part of Qwen3.5-35B-A3B as GPTQ: its config is all there is.
const LARGE: &str = r#"{"model_type":"qwen3_5_moe","tie_word_embeddings":false,"text_config":{"model_type":"qwen3_5_moe_text",
    "vocab_size":248320,"hidden_size":2048,"num_hidden_layers":40,"num_attention_heads":16,"num_key_value_heads":2,
    "head_dim":256,"max_position_embeddings":262144,"rms_norm_eps":1e-6,"tie_word_embeddings":false,
    "linear_conv_kernel_dim":4,"linear_key_head_dim":128,"linear_value_head_dim":128,"linear_num_key_heads":16,
    "linear_num_value_heads":32,"moe_intermediate_size":512,"shared_expert_intermediate_size":512,
    "num_experts_per_tok":8,"num_experts":256,"full_attention_interval":4,
    "rope_parameters":{"rope_type":"default","rope_theta":10000000,"partial_rotary_factor":0.25}},
    "quantization_config":{"quant_method":"gptq","bits":4,"group_size":128,"desc_act":false,"sym":true,
    "dynamic":{"-:.*mlp\\.gate$":{},"-:.*shared_expert_gate$":{}}}}"#;

/// The figures of `docs/scale.md`: two cards of 32 GiB hold rows that one does not. A plan takes a
/// second on an idle machine; other tests run beside this one.
#[expect(clippy::disallowed_types, reason = "the time is part of what is tested")]
#[test]
fn a_large_model_is_divided_from_its_config_alone() {
    let folder = Folder::new(Shape::TINY);
    std::fs::create_dir(folder.path("large")).expect("a folder");
    folder.put("large/config.json", LARGE);
    let plan = |device: &str, tokens: u32| {
        let tokens = format!("max_seq_length={tokens}");
        let modules = "lora_target_modules=q_proj,k_proj,v_proj,o_proj,in_proj_qkv,in_proj_z,out_proj";
        let sets = [
            "base_model=large",
            "micro_batch_size=1",
            "gradient_accumulation_steps=8",
            "lora_r=16",
            "lora_dropout=0",
            modules,
            &tokens,
        ];
        let sets = sets.iter().flat_map(|&set| ["--set", set]);
        let given = ["plan", "config.toml", "--json", "--device", device, "--memory", "32GiB"];
        let begun = std::time::Instant::now();
        let ran = folder.run(&given.into_iter().chain(sets).collect::<Vec<_>>());
        assert!(begun.elapsed().as_secs() < 15, "{device}, {tokens} tokens: {:?}", begun.elapsed());
        (ran.code, ran.json().remove(0))
    };
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/scale.md")).expect("a page");
    let needed = |bytes: &serde_json::Value| {
        let bytes = bytes.as_u64().expect("bytes");
        let more = if bytes > 32 << 30 { ", does not fit" } else { "" };
        format!("{:.2} GiB{more}", bytes as f64 / f64::from(1 << 30))
    };
    for (tokens, shown, fits_one, fits_two) in [
        (4096, "4,096", true, true),
        (8192, "8,192", true, true),
        (16384, "16,384", false, true),
        (32768, "32,768", false, false),
    ] {
        let (code, one) = plan("cuda:0", tokens);
        assert_eq!((code, &one["fits"]), (if fits_one { 0 } else { 4 }, &fits_one.into()), "{tokens}");
        let (code, two) = plan("cuda:0,cuda:1", tokens);
        assert_eq!((code, &two["fits"]), (if fits_two { 0 } else { 4 }, &fits_two.into()), "{tokens}");
        assert_eq!(two["devices"][1]["first_layer"], 20, "{tokens}");
        let [one, first, second] =
            [&one, &two["memories"][0], &two["memories"][1]].map(|of| needed(&of["needed_bytes"]));
        let row = format!("| {shown} | {one} | {first} | {second} |");
        assert!(page.contains(&row), "docs/scale.md has no {row}");
        // About half of the 34 billion weights each, in 4 bits with their scales, and the embedding
        // or the head.
        for device in two["devices"].as_array().expect("devices") {
            let weights = device["weights_bytes"].as_u64().expect("bytes");
            assert!((7 << 30..12 << 30).contains(&weights), "{weights}");
        }
    }
}

#[test]
fn what_cannot_be_divided_is_refused() {
    let folder = Folder::new(Shape::TINY);
    let refused = |sets: &[&str], code: i32, parts: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        folder.run(&[&["train", "config.toml"], &sets[..]].concat()).says(code, parts);
        assert!(!folder.has("out"), "nothing is written");
    };
    refused(&["device=cpu,cpu,cpu"], 2, &["3 devices are listed, but the model has 2 layers"]);
    refused(&["device=cpu,cpu", "device_map=[1, 2]"], 2, &["divides 3 layers, but the model has 2"]);
    refused(&["device=cpu,cpu", "device_map=[2]"], 2, &["every device of `device` one number"]);
    refused(&["device=cpu,cpu", "device_map=[2, 0]"], 2, &["at least one layer"]);
    refused(&["device=cpu,cpu", "device_map={ cpu = 2 }"], 2, &["listed twice"]);
    refused(&["device=cpu,opencl:0", "device_map={ cpu = 1, \"cuda:0\" = 1 }"], 2, &["every device of `device`"]);
    refused(&["device_map=[1, 1]"], 2, &["`device` is not a list"]);
    let of_ranks = "devices_by_rank=[\"cpu,cpu,cpu\", \"cpu\"]";
    refused(&["device=cpu,cpu", "device_map=[1, 1]", of_ranks], 2, &["`devices_by_rank` names other devices"]);
    refused(&["device=cpu,auto"], 2, &["auto cannot be listed"]);
    for list in ["cpu,", ",cpu", "cpu,,cpu", ","] {
        let parts = [&format!("--device {list}: an entry of the list is empty")[..]];
        folder.run(&["train", "config.toml", "--device", list]).says(2, &parts);
        folder.run(&["plan", "config.toml", "--device", list]).says(2, &parts);
        folder.run(&["eval", "--model", "model", "--data", "data.jsonl", "--device", list]).says(2, &parts);
        refused(&[&format!("device={list}")], 2, &["an entry of the list is empty"]);
    }
    refused(&["device=cpu,opencl:999"], 6, &["opencl:999", "isobit devices"]);
    let ran = folder.run(&["train", "config.toml", "--device", "cpu,opencl:999", "--no-plan"]);
    ran.says(6, &["opencl:999", "isobit devices"]);
    for command in ["generate", "chat"] {
        folder.run(&[command, "--model", "model", "--device", "cpu,cpu"]).says(2, &["`cpu,cpu` is a list of devices"]);
    }
    let bench = ["bench", "step", "--model", "tiny", "--device", "cpu,cpu", "--breakdown"];
    folder.run(&bench).says(2, &["one device only"]);
}

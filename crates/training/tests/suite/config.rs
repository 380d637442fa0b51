//! Configs as people write them: what they mean, what is refused and in which words, and what the
//! digest covers.

use isobit_autograd::Policy;
use isobit_models::Targets;
use isobit_training::config::{
    Adapter, Device, EvalRows, Every, KEYS, Key, Length, Run, Scheduler, Section, Steps, ValueKind, Warmup, parse,
};
use std::fmt::Write;

/// The example of the product page, whole.
const EXAMPLE: &str = r#"
base_model = "models/Qwen2.5-0.5B"
output_dir = "out/run-a"
seed = 42
device = "cpu"

[[datasets]]
path = "data/train.jsonl"
[eval]
path = "data/valid.jsonl"
eval_steps = 50

[training]
max_seq_length = 1024
sample_packing = false
assistant_only_loss = true
micro_batch_size = 1
gradient_accumulation_steps = 8
num_epochs = 1
learning_rate = 2e-4
lr_scheduler_type = "cosine"
warmup_ratio = 0.03
weight_decay = 0.0
max_grad_norm = 1.0
gradient_checkpointing = "full"
save_steps = 100
load_best_model_at_end = true
early_stopping_patience = 3

[adapter]
type = "lora"
lora_r = 8
lora_alpha = 16
lora_dropout = 0.0
lora_target_modules = ["q_proj","k_proj","v_proj","o_proj","gate_proj","up_proj","down_proj"]
"#;

const LEAST: &str = "base_model = \"m\"\noutput_dir = \"o\"\n[[datasets]]\npath = \"d\"\n";

fn with(text: &str, sets: &[&str]) -> Result<Run, String> {
    let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
    let settled = parse("run.toml", text, &sets);
    settled.map(|settled| settled.run).map_err(|error| format!("{error}\nhint: {}", error.hint()))
}

/// What arguments took out of the file.
fn notes(text: &str, sets: &[&str]) -> Vec<String> {
    let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
    parse("run.toml", text, &sets).expect("valid").notes
}

/// The least config with lines added at its end.
fn least(added: &str) -> Result<Run, String> {
    with(&format!("{LEAST}{added}"), &[])
}

fn check_error(text: &str, sets: &[&str], expected: &str) {
    assert_eq!(with(text, sets).expect_err("this config is wrong"), expected);
}

#[test]
fn the_example_means_what_it_says() {
    let run = with(EXAMPLE, &[]).expect("valid");
    assert_eq!(run.rows_per_update(), 8);
    assert_eq!(run.training.length, Length::Epochs(1.0));
    assert_eq!(run.training.scheduler, Scheduler::Cosine);
    assert_eq!(run.training.warmup, Warmup::Share(0.03));
    assert_eq!(run.training.save, Every::Steps(100));
    assert_eq!(run.eval.every, Every::Steps(50));
    assert_eq!(run.devices, [Device::Cpu]);
    let Adapter::Lora(lora) = &run.adapter else { panic!("lora") };
    assert_eq!((lora.r, lora.alpha), (8, 16.0));
    assert!(matches!(&lora.targets, Targets::Names(names) if names.len() == 7));
}

#[test]
fn the_least_config_is_complete() {
    let run = least("").expect("valid");
    assert_eq!(run.seed, 42);
    assert_eq!(run.training.learning_rate, 2e-4);
    assert_eq!(run.rows_per_update(), 8);
    assert_eq!(run.training.recomputation, Policy::Full);
    assert_eq!(run.eval.rows, EvalRows::None);
    assert_eq!(run.eval.every, Every::Never);
    assert_eq!(run.date, "2025-01-01");
    assert_eq!(least("[adapter]\ntype = \"full\"").expect("valid").training.learning_rate, 2e-5);
    assert_eq!(
        least("[adapter]\ntype = \"last_blocks\"\nlast_blocks = 3").expect("valid").adapter,
        Adapter::LastBlocks(3)
    );
}

#[test]
fn names_people_know_mean_the_same() {
    let canonical = "[training]\nmicro_batch_size = 2\nnum_epochs = 2\nmax_seq_length = 64\nsample_packing = true\n\
        learning_rate = 1e-3\nwarmup_steps = 7\ngradient_checkpointing = \"none\"\n\
        [adapter]\nlora_r = 4\nlora_alpha = 8\nlora_dropout = 0.5\nlora_target_modules = [\"q_proj\"]\n";
    let known = "[training]\nper_device_train_batch_size = 2\nnum_train_epochs = 2\nmax_length = 64\npacking = true\n\
        lr = 1e-3\nwarmup_steps = 7.0\ngradient_checkpointing = false\n\
        [adapter]\nr = 4\nalpha = 8.0\ndropout = 0.5\ntarget_modules = [\"q_proj\"]\n";
    assert_eq!(least(canonical), least(known));
    assert_eq!(
        least("[training]\nwarmup_steps = 0.25\ngradient_checkpointing = true"),
        least("[training]\nwarmup_ratio = 0.25")
    );
    let linear = least("[adapter]\ntarget_modules = \"all-linear\"").expect("valid");
    assert_eq!(linear, least("").expect("valid"));
    assert_eq!(linear, least("[adapter]\ntarget_modules = \"All-Linear\"").expect("valid"));
}

#[test]
fn a_string_of_targets_is_an_expression() {
    let run = least(
        r"[adapter]
        lora_target_modules = '.*\.[qv]_proj'",
    )
    .expect("valid");
    let Adapter::Lora(lora) = &run.adapter else { panic!("an adapter") };
    assert_eq!(lora.targets, Targets::Pattern(r".*\.[qv]_proj".to_string()));
    assert_eq!(with(&run.to_toml(), &[]), Ok(run));
    let layers = r"[adapter]
        lora_target_modules = '.*\.[qv]_proj'
        layers_to_transform = [0]";
    assert!(least(layers).is_err());
}

#[test]
fn arguments_go_over_the_file() {
    let run = with(
        EXAMPLE,
        &[
            "training.lr=1e-4",
            "r = 4",
            "max_steps=10",
            "output_dir=out/run-b",
            "base_model=0.5",
            "date=2025-01-31",
            "device=[cuda:0,cuda:1]",
            "target_modules=q_proj,v_proj",
            "layers_to_transform=3,1",
            "adapter.rank_pattern.q_proj=16",
            "adapter.rank_pattern.\"layers.0.v_proj\"=2",
            "datasets.0.path=a.jsonl",
            "datasets.1.path=b.jsonl",
            "eval.path=\"v.jsonl\"",
        ],
    )
    .expect("valid");
    assert_eq!(run.training.learning_rate, 1e-4);
    assert_eq!(run.training.length, Length::Steps(10));
    assert_eq!(run.output_dir.to_str(), Some("out/run-b"));
    assert_eq!(run.base_model.to_str(), Some("0.5"));
    assert_eq!(run.date, "2025-01-31");
    assert_eq!(run.devices, [Device::Cuda(0), Device::Cuda(1)]);
    let Adapter::Lora(lora) = &run.adapter else { panic!("lora") };
    assert_eq!(lora.r, 4);
    assert_eq!(lora.layers_to_transform, [1, 3]);
    assert_eq!(
        lora.rank_pattern.iter().map(|(k, v)| (k.as_str(), *v)).collect::<Vec<_>>(),
        [("layers.0.v_proj", 2), ("q_proj", 16)]
    );
    assert_eq!(run.datasets.iter().map(|path| path.to_str()).collect::<Vec<_>>(), [Some("a.jsonl"), Some("b.jsonl")]);
}

/// Each argument gives the run of a file in which the lines it contradicts are not there, and says
/// which those are.
#[test]
fn arguments_take_out_what_contradicts_them() {
    let eval = "[eval]\nval_set_size = 0.1\n";
    let cases: &[(&str, &[&str], &str, usize)] = &[
        ("EVALeval_steps = 50", &["eval_strategy=no"], "EVALeval_strategy = \"no\"", 1),
        ("EVALeval_steps = 50", &["eval.eval_strategy=epoch"], "EVALeval_strategy = \"epoch\"", 1),
        ("EVALeval_steps = 50", &["eval_strategy=steps"], "EVALeval_steps = 50", 0),
        ("EVALeval_strategy = \"no\"", &["eval_steps=5"], "EVALeval_steps = 5", 1),
        ("EVALeval_steps = 50", &["eval_steps=5", "eval_strategy=no"], "EVALeval_strategy = \"no\"", 1),
        ("EVALeval_steps = 50", &["eval_strategy=no", "eval_steps=5"], "EVALeval_steps = 5", 1),
        (
            "EVALeval_steps = 50\n[training]\nload_best_model_at_end = true\nearly_stopping_patience = 3",
            &["eval_strategy=no"],
            "EVALeval_strategy = \"no\"",
            3,
        ),
        (
            "EVALeval_steps = 50\n[training]\nload_best_model_at_end = true",
            &["val_set_size=0"],
            "[eval]\nval_set_size = 0",
            2,
        ),
        ("EVALeval_steps = 50", &["val_set_size=0", "eval.path=v"], "[eval]\npath = \"v\"\neval_steps = 50", 0),
        ("EVALeval_steps = 50", &["eval.path=v"], "[eval]\npath = \"v\"\neval_steps = 50", 1),
        ("[eval]\npath = \"v\"", &["val_set_size=7"], "[eval]\nval_set_size = 7", 1),
        ("[training]\nsave_steps = 9", &["save_strategy=epoch"], "[training]\nsave_strategy = \"epoch\"", 1),
        ("[training]\nsave_strategy = \"no\"", &["save_steps=9"], "[training]\nsave_steps = 9", 1),
        ("[training]\nmax_steps = 9", &["epochs=2"], "[training]\nnum_epochs = 2", 1),
        ("[training]\nnum_epochs = 2", &["max_steps=9"], "[training]\nmax_steps = 9", 1),
        ("[training]\nnum_epochs = 2", &["max_steps=-1"], "[training]\nnum_epochs = 2", 0),
        ("[training]\nwarmup_ratio = 0.1", &["warmup_steps=5"], "[training]\nwarmup_steps = 5", 1),
        ("[training]\nwarmup_ratio = 0.1", &["warmup_steps=0"], "", 1),
        (
            "[training]\nwarmup_ratio = 0.1",
            &["lr_scheduler=constant"],
            "[training]\nlr_scheduler_type = \"constant\"",
            1,
        ),
        (
            "[training]\nlr_scheduler_type = \"cosine_with_min_lr\"\nmin_lr_rate = 0.1",
            &["lr_scheduler_type=cosine"],
            "[training]\nlr_scheduler_type = \"cosine\"",
            1,
        ),
        (
            "[training]\nlr_scheduler_type = \"cosine_with_min_lr\"\nmin_lr_rate = 0.1",
            &["min_lr=1e-5"],
            "[training]\nlr_scheduler_type = \"cosine_with_min_lr\"\nmin_lr = 1e-5",
            1,
        ),
        ("[adapter]\nr = 4\nalpha = 8", &["adapter.type=full"], "[adapter]\ntype = \"full\"", 2),
        ("[adapter]\ntype = \"last_blocks\"\nlast_blocks = 2", &["adapter.type=lora", "r=4"], "[adapter]\nr = 4", 1),
    ];
    for (added, sets, expected, gone) in cases {
        let [added, expected] = [added, expected].map(|text| format!("{LEAST}{}", text.replace("EVAL", eval)));
        assert_eq!(with(&added, sets), with(&expected, &[]), "{added} {sets:?}");
        assert_eq!(notes(&added, sets).len(), *gone, "{added} {sets:?}");
    }
    let text = format!("{LEAST}{eval}eval_steps = 50\n");
    assert_eq!(
        notes(&text, &["eval_strategy=no"]),
        ["--set eval_strategy=no overrides `eval_steps = 50` (run.toml:7)"]
    );
    // Within a file, and where an argument asks for what the rest does not have, it stays an error.
    assert!(with(&format!("{text}eval_strategy = \"no\""), &[]).is_err());
    assert!(with(&format!("{LEAST}{eval}eval_strategy = \"no\""), &["load_best_model_at_end=true"]).is_err());
    assert!(with(LEAST, &["min_lr_rate=0.1"]).is_err());
}

/// The devices of an argument are not those of the file: what belongs to these goes, with a note.
#[test]
fn a_device_displaces_what_was_written_for_others() {
    let keys = "device = [\"cuda:0\", \"cpu\"]\ndevice_map = [1, 1]\noffload = [\"weights\"]\n";
    let by_rank = "devices_by_rank = [\"cuda:0\", \"cuda:1\"]\n";
    let all = format!("{keys}{by_rank}{LEAST}");
    let cases: &[(&[&str], &str, usize)] = &[
        (&["device=cpu"], "device = \"cpu\"\n", 3),
        (&["device=cpu,cpu"], "device = [\"cpu\", \"cpu\"]\n", 3),
        (&["device=cuda:1"], "device = \"cuda:1\"\noffload = [\"weights\"]\n", 2),
        (&["device=hip:0,cpu"], "device = [\"hip:0\", \"cpu\"]\noffload = [\"weights\"]\n", 2),
        (
            &["device=hip:0,cpu", "device_map=[3, 4]"],
            "device = [\"hip:0\", \"cpu\"]\ndevice_map = [3, 4]\noffload = [\"weights\"]\n",
            1,
        ),
        (
            &["device_map=[3, 4]", "device=hip:0,cpu"],
            "device = [\"hip:0\", \"cpu\"]\ndevice_map = [3, 4]\noffload = [\"weights\"]\n",
            1,
        ),
        (&["devices_by_rank=[\"cpu\"]", "device=hip:0"], "device = \"hip:0\"\noffload = \"weights\"\n", 2),
    ];
    for (sets, expected, gone) in cases {
        assert_eq!(with(&all, sets), with(&format!("{expected}{LEAST}"), &[]), "{sets:?}");
        assert_eq!(notes(&all, sets).len(), *gone, "{sets:?}");
    }
    // The layers of one list are not those of another.
    let lists = ["devices_by_rank=[\"cuda:0,cuda:1\", \"cuda:2\"]"];
    let without = all.replace("device_map = [1, 1]\n", "");
    assert_eq!(with(&all, &lists), with(&without, &lists));
    assert_eq!(notes(&all, &lists).len(), 1);
    let later = with(&all, &["device=hip:0", "devices_by_rank=[\"cpu\", \"cpu\"]"]);
    assert!(later.is_err(), "nothing is offloaded from the CPU");
    assert_eq!(
        notes(&all, &["device=cpu"])[0],
        "--set device=cpu overrides `devices_by_rank = [\"cuda:0\", \"cuda:1\"]` (run.toml:4)"
    );
    // Typed together, they are a mistake.
    assert!(with(LEAST, &["device=cpu", "offload=weights"]).is_err());
    assert!(with(&format!("device = \"cpu\"\noffload = [\"weights\"]\n{LEAST}"), &[]).is_err());
}

#[test]
fn faults_are_named_with_place_and_remedy() {
    let text = |added: &str| format!("{LEAST}{added}");
    let cases: &[(&str, &[&str], &str)] = &[
        (
            "[training]\nlerning_rate = 1",
            &[],
            "run.toml:6: unknown key `lerning_rate` in [training]\nhint: did you mean `learning_rate`?",
        ),
        ("[trainin]\nlr = 1", &[], "run.toml:5: unknown key `trainin`\nhint: did you mean `training`?"),
        (
            "[training]\nlora_r = 1",
            &[],
            "run.toml:6: unknown key `lora_r` in [training]\nhint: `lora_r` belongs under [adapter]",
        ),
        (
            "[training]\nlr = \"2e-4\"",
            &[],
            "run.toml:6: `lr` must be a number, found a string (\"2e-4\")\nhint: remove the quotes",
        ),
        (
            "[training]\nsave_steps = 2.5",
            &[],
            "run.toml:6: `save_steps` must be a whole number, found a number (2.5)\nhint: write a whole number: `save_steps` is: save a checkpoint every N updates",
        ),
        (
            "[adapter]\nr = 8\nlora_r = 16",
            &[],
            "run.toml:7: `lora_r` repeats `r` from run.toml:6\nhint: keep one of them",
        ),
        ("[adapter]\nr = 0", &[], "run.toml:6: `r` = 0: out of range\nhint: a whole number from 1 to 65536"),
        ("[adapter]\ndropout = 1", &[], "run.toml:6: `dropout` = 1.0: out of range\nhint: from 0, below 1"),
        ("[adapter]\ntype = \"lorra\"", &[], "run.toml:6: `type` = \"lorra\": not known\nhint: did you mean \"lora\"?"),
        (
            "[adapter]\ntype = \"full\"\nr = 8",
            &[],
            "run.toml:7: `r` = 8: it has no effect with type = \"full\"\nhint: remove this line, or change type",
        ),
        (
            "[eval]\neval_steps = 5",
            &[],
            "run.toml:6: `eval_steps` = 5: there is nothing to evaluate on\nhint: give [eval] a path, or val_set_size = 0.05",
        ),
        (
            "[training]\nload_best_model_at_end = true",
            &[],
            "run.toml:6: `load_best_model_at_end` = true: there is nothing to evaluate on\nhint: give [eval] a path (or val_set_size = 0.05) and eval_steps = 50",
        ),
        (
            "[training]\nlr = nan",
            &[],
            "run.toml:6: `lr` = float: nan is not a finite number\nhint: it must be a number",
        ),
        (
            "[training]\nwarmup_steps = 5\nwarmup_ratio = 0.1",
            &[],
            "run.toml:6: `warmup_steps` = 5: warmup_ratio is also set\nhint: keep one of them",
        ),
        (
            "[training]\ngradient_groups = 0",
            &[],
            "run.toml:6: `gradient_groups` = 0: out of range\nhint: a whole number from 1 to 65536",
        ),
        (
            "",
            &["training.lr"],
            "--set training.lr: there is no `=`\nhint: write --set key=value, for example --set training.learning_rate=1e-4",
        ),
        (
            "",
            &["a b=1"],
            "--set a b=1: the part before `=` is not a key\nhint: write --set key=value, for example --set training.learning_rate=1e-4",
        ),
        (
            "",
            &["lr=fast"],
            "--set lr=fast: `lr` must be a number, found a string (\"fast\")\nhint: `learning_rate` is: peak learning rate",
        ),
        ("", &["path=x"], "--set path=x: unknown key `path` without its section\nhint: `datasets.path` or `eval.path`"),
        ("", &["sede=1"], "--set sede=1: unknown key `sede`\nhint: did you mean `seed`?"),
        (
            "",
            &["device=gpu"],
            "--set device=gpu: `device` = \"gpu\": not a device\nhint: cpu, opencl:0, cuda:0, hip:0 or auto; `isobit devices` lists what is here, and `isobit plan` takes cards by name",
        ),
        (
            "",
            &["seed=1\nthreads = 3"],
            "--set seed=1\nthreads = 3: `seed` must be a whole number, found a string (\"1\\nthreads = 3\")\nhint: `seed` is: seed of data order, dropout and new adapter weights",
        ),
    ];
    for (added, sets, expected) in cases {
        check_error(&text(added), sets, expected);
    }
    check_error(
        &format!(
            "device = [\"cpu\", \"cpu\"]\ndevice_map = [1, 1]\ndevices_by_rank = [\"cpu,cpu,cpu\", \"cpu\"]\n{LEAST}"
        ),
        &[],
        "run.toml:2: `device_map` = [1, 1]: it divides the layers of `device`, but `devices_by_rank` names other devices\nhint: leave `device_map` out: each rank's layers are divided by the plan",
    );
    check_error(
        "",
        &[],
        "run.toml: `datasets` is missing\nhint: add [[datasets]] and below it path = \"data/train.jsonl\"",
    );
    check_error(
        "[[datasets]]\npath = \"d\"",
        &[],
        "run.toml: `base_model` is missing\nhint: name the folder of a model: base_model = \"models/…\"",
    );
    check_error(
        "[datasets]\npath = \"d\"",
        &[],
        "run.toml:1: `datasets` must be a list of tables, found table\nhint: each dataset begins with [[datasets]], in double brackets",
    );
    let syntax = with("seed = \n", &[]).expect_err("not TOML");
    assert!(syntax.starts_with("run.toml:1: not valid TOML: "), "{syntax}");
}

#[test]
fn values_out_of_range_are_refused() {
    for added in [
        "[training]\nnum_epochs = 0",
        "[training]\nnum_epochs = -1",
        "[training]\nmax_steps = -2",
        "[training]\nmicro_batch_size = 0",
        "[training]\nmicro_batch_size = 65536\ngradient_accumulation_steps = 1048576",
        "[training]\nlearning_rate = 0",
        "[training]\nlearning_rate = -1e-4",
        "[training]\nwarmup_ratio = 1.0",
        "[training]\nwarmup_steps = 1.5",
        "[training]\nadam_beta2 = 1.0",
        "[training]\nadam_epsilon = 0.0",
        "[training]\nmax_grad_norm = -1.0",
        "[training]\nlogging_steps = 0",
        "[training]\nsave_steps = 0",
        "[training]\nsave_strategy = \"epoch\"\nsave_steps = 5",
        "[training]\nlr_scheduler_type = \"cosine_with_min_lr\"",
        "[training]\nmin_lr = 1e-5",
        "[training]\nlr_scheduler_type = \"constant\"\nwarmup_steps = 3",
        "[training]\nmetric_for_best = \"bleu\"",
        "[training]\nearly_stopping_patience = 3",
        "[eval]\neval_strategy = \"steps\"\nval_set_size = 0.1",
        "[eval]\nval_set_size = 1.5",
        "[eval]\nval_set_size = -1",
        "[eval]\npath = \"v\"\nval_set_size = 5",
        "[eval]\npath = \"\"",
        "[training]\nprompt_field = \"question\"",
        "[adapter]\nlora_target_modules = []",
        "[adapter]\nlora_target_modules = \"q_proj\"",
        "[adapter]\nlora_target_modules = [\"q\", \"q\"]",
        "[adapter]\nlora_target_modules = [1]",
        "[adapter]\nlayers_to_transform = [-1]",
        "[adapter]\nrank_pattern = { q = 0 }",
        "[adapter]\nlast_blocks = 2",
        "[[datasets]]",
    ] {
        assert!(least(added).is_err(), "{added}");
    }
    for set in [
        "seed=-1",
        "profile=x4",
        "date=2023-02-29",
        "date=today",
        "device=[]",
        "device=cpu,auto",
        "device=cpu:0",
        "device=cuda:",
        "device=cuda:+1",
        "threads=-1",
        "output_dir=",
        "datasets.2.path=x",
        "datasets.x.path=x",
        "training=5",
    ] {
        assert!(with(LEAST, &[set]).is_err(), "{set}");
    }
}

#[test]
fn the_resolved_form_parses_back_to_the_same_run() {
    for added in [
        "",
        "[adapter]\ntype = \"full\"",
        "[adapter]\ntype = \"last_blocks\"\nlast_blocks = 2",
        "[adapter]\nrank_pattern = { \"a\\\"b\" = 3 }\nalpha_pattern = { q = 1.5 }\nexclude_modules = [\"x\"]\nlayers_to_transform = 2",
        "[eval]\nval_set_size = 0.05\neval_strategy = \"epoch\"",
        "[eval]\nval_set_size = 12\neval_steps = 3\n[training]\nload_best_model_at_end = true\nearly_stopping_patience = 2",
        "[eval]\npath = \"v\"\neval_strategy = \"no\"",
        "[eval]\npath = \"v\"\n[training]\nprompt_field = \"question\"\ncompletion_field = \"answer\"",
        "[training]\nlr_scheduler_type = \"cosine_with_min_lr\"\nmin_lr = 1.7e-5\nwarmup_ratio = 0.03\nmax_steps = 5",
        "[training]\nsave_strategy = \"no\"\ngradient_checkpointing = \"selective\"\nlr_scheduler_type = \"constant\"",
    ] {
        let run = least(added).expect(added);
        let text = run.to_toml();
        let again = with(&text, &[]).unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert_eq!(again, run, "{text}");
        assert_eq!(again.to_toml(), text);
        assert_eq!(again.digest(), run.digest());
    }
    let sets = ["device=[cpu, opencl:1]", "data_workers=3", "threads=2", "report_to=[html, tensorboard]"];
    let run = with(EXAMPLE, &sets).expect("valid");
    assert!(run.report_to_html && run.report_to_tensorboard);
    assert_eq!(with(&run.to_toml(), &[]), Ok(run));
}

#[test]
fn the_digest_covers_what_can_influence_and_nothing_else() {
    let base = with(EXAMPLE, &[]).expect("valid").digest();
    for set in [
        "output_dir=elsewhere",
        "base_model=elsewhere",
        "datasets.0.path=elsewhere",
        "datasets.1.path=more",
        "eval.path=elsewhere",
        "threads=7",
        "device=opencl:0",
        "data_workers=5",
        "gradient_checkpointing=none",
        "logging_steps=1",
        "save_steps=3",
        "save_total_limit=2",
        "save_dtype=bfloat16",
        "report_to_tensorboard=true",
        "report_to=html",
        "report_to=[html, tensorboard]",
        "eval.micro_batch_size=3",
    ] {
        assert_eq!(with(EXAMPLE, &[set]).expect("valid").digest(), base, "{set}");
    }
    let split = with(EXAMPLE, &["training.micro_batch_size=4", "gradient_accumulation_steps=2"]).expect("valid");
    assert_eq!(split.digest(), base);
    for set in [
        "seed=43",
        "profile=x3",
        "date=2024-02-29",
        "training.micro_batch_size=2",
        "lr=1e-4",
        "max_steps=5",
        "num_epochs=2",
        "warmup_ratio=0.04",
        "adam_beta1=0.8",
        "r=4",
        "lora_dropout=0.1",
        "sample_packing=true",
        "eval_steps=51",
        "early_stopping_patience=4",
        "adapter.rank_pattern.q_proj=4",
        "assistant_only_loss=false",
        "max_seq_length=512",
        "completion_only_loss=false",
        "allow_untrainable_rows=true",
    ] {
        assert_ne!(with(EXAMPLE, &[set]).expect("valid").digest(), base, "{set}");
    }
}

#[test]
fn differences_are_named_by_key() {
    let run = with(EXAMPLE, &[]).expect("valid");
    let other = with(EXAMPLE, &["lr=1e-4", "threads=9", "max_steps=5"]).expect("valid");
    let found: Vec<String> = run.differences(&other).iter().map(|(key, a, b)| format!("{key}: {a}, {b}")).collect();
    let expected =
        ["training.learning_rate: 0.0002, 0.0001", "training.max_steps: -, 5", "training.num_epochs: 1.0, -"];
    assert_eq!(found, expected);
    assert!(run.differences(&run).is_empty());
}

#[test]
fn steps_follow_rows_and_not_the_split() {
    let steps = |sets: &[&str], rows| with(EXAMPLE, sets).expect("valid").steps(rows);
    assert_eq!(steps(&[], 80), Steps { per_epoch: 10, total: 10 });
    assert_eq!(steps(&[], 81), Steps { per_epoch: 11, total: 11 });
    assert_eq!(steps(&["num_epochs=2.5"], 81), Steps { per_epoch: 11, total: 28 });
    assert_eq!(steps(&["max_steps=7"], 81), Steps { per_epoch: 11, total: 7 });
    assert_eq!(steps(&[], 3), Steps { per_epoch: 1, total: 1 });
    assert_eq!(steps(&["num_epochs=0.001"], 3), Steps { per_epoch: 1, total: 1 });
    for (micro, accumulation) in [(8, 1), (4, 2), (2, 4)] {
        let micro = format!("training.micro_batch_size={micro}");
        let accumulation = format!("gradient_accumulation_steps={accumulation}");
        assert_eq!(steps(&[&micro, &accumulation], 81), steps(&[], 81));
    }
    let ten = Steps { per_epoch: 4, total: 10 };
    let due = |every: Every| (0..=10).filter(|&step| every.is_due(step, ten)).collect::<Vec<u64>>();
    assert_eq!(due(Every::Steps(3)), [3, 6, 9]);
    assert_eq!(due(Every::Epoch), [4, 8, 10]);
    assert_eq!(due(Every::Never), [0u64; 0]);
}

#[test]
fn hostile_text_is_an_error_and_not_a_panic() {
    let deep = format!("a = {}", "[".repeat(100_000));
    for text in
        ["\0", "a", "= 1", "[[[[", "datasets = 5", "datasets = [5]", "training = 1", "[training]\n[training]", &deep]
    {
        assert!(with(text, &[]).is_err());
    }
    assert!(with(&"#".repeat((1 << 20) + 1), &[]).is_err());
    let missing = isobit_training::config::read(std::path::Path::new("no/such/file.toml"), &[]);
    assert!(
        missing.expect_err("there is no file").to_string().starts_with("cannot read the config: no/such/file.toml")
    );
}

/// A generator of numbers for configs: the same ones every time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, count: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % count
    }

    fn of<'a>(&mut self, choices: &[&'a str]) -> &'a str {
        choices[self.below(choices.len() as u64) as usize]
    }

    /// Something to write after a key of that kind: mostly what it takes.
    fn value(&mut self, kind: ValueKind) -> String {
        const TEXTS: [&str; 16] = [
            "\"bfloat16\"",
            "\"a\"",
            "\"q_proj\"",
            "'.*\\.[qv]_proj'",
            "\"all-linear\"",
            "\"ü \\\" \\\\ \\n \\u0007\"",
            "\"no\"",
            "\"steps\"",
            "\"epoch\"",
            "\"cosine_with_min_lr\"",
            "\"constant\"",
            "\"lora\"",
            "\"full\"",
            "\"last_blocks\"",
            "\"loss\"",
            "\"2024-02-29\"",
        ];
        const NUMBERS: [&str; 12] =
            ["0", "1", "2", "7", "64", "0.5", "0.25", "1e-7", "1e16", "3.0", "0.1", "0.30000000000000004"];
        let items = self.below(3);
        let list = |dice: &mut Self, from: &[&str]| {
            let items: Vec<&str> = (0..items).map(|_| dice.of(from)).collect();
            format!("[{}]", items.join(", "))
        };
        match kind {
            ValueKind::Switch => self.of(&["true", "false"]).to_owned(),
            ValueKind::SwitchOrText => self.of(&["true", "false", "\"none\"", "\"selective\"", "\"full\""]).to_owned(),
            ValueKind::Whole => self.of(&["0", "1", "2", "3", "16", "100", "-1", "9223372036854775807"]).to_owned(),
            ValueKind::Number | ValueKind::CountOrShare => self.of(&NUMBERS).to_owned(),
            ValueKind::Text => self.of(&TEXTS).to_owned(),
            ValueKind::TextOrTexts if self.below(2) == 0 => self.of(&TEXTS).to_owned(),
            ValueKind::Texts | ValueKind::TextOrTexts => list(self, &TEXTS),
            ValueKind::Wholes => list(self, &["0", "1", "5"]),
            ValueKind::Counts => self.of(&["[]", "[1, 2]", "{ cpu = 1, \"cuda:0\" = 2 }", "{ cpu = 0 }"]).to_owned(),
            ValueKind::TableOfWholes => self.of(&["{}", "{ q_proj = 4 }", "{ \"a.b\" = 1, \"ü\" = 2 }"]).to_owned(),
            ValueKind::TableOfNumbers => self.of(&["{}", "{ q_proj = 4 }", "{ \"a.b\" = 1e-7, c = 2.5 }"]).to_owned(),
            ValueKind::Table => self
                .of(&["{}", "{ enable_thinking = false }", "{ a = 1, b = \"x\", c = [1.5, \"y\"], d = { e = true } }"])
                .to_owned(),
        }
    }
}

#[test]
fn every_config_that_is_valid_parses_back_to_itself() {
    let mut dice = Dice(0x1234_5678_9abc_def1);
    let (mut valid, mut seen) = (0, std::collections::BTreeSet::new());
    for _ in 0..30_000 {
        let mut text = String::from(LEAST);
        let mut used = Vec::new();
        for section in Section::NAMED.into_iter().filter(|section| *section != Section::Datasets) {
            writeln!(text, "{}", section.heading()).expect("a string");
            // Pairs that chance brings together too seldom.
            let floor = dice.of(&["min_lr", "min_lr_rate"]);
            let (first, second, kind) = match section {
                Section::Training => ("lr_scheduler_type = \"cosine_with_min_lr\"", floor, ValueKind::Number),
                _ => ("type = \"last_blocks\"", "last_blocks", ValueKind::Whole),
            };
            if section != Section::Eval && dice.below(4) == 0 {
                writeln!(text, "{first}\n{second} = {}", dice.value(kind)).expect("a string");
                used.push(format!("{}.{second}", section.name()));
            }
            for key in KEYS.iter().filter(|key| key.section == section) {
                if dice.below(16) == 0 {
                    writeln!(text, "{} = {}", key.name, dice.value(key.kind)).expect("a string");
                    used.push(key.dotted());
                }
            }
        }
        let Ok(run) = with(&text, &[]) else { continue };
        valid += 1;
        seen.extend(used);
        let printed = run.to_toml();
        let again = with(&printed, &[]).unwrap_or_else(|error| panic!("{error}\n{text}\nprinted:\n{printed}"));
        assert_eq!(again, run, "{text}\nprinted:\n{printed}");
        assert_eq!((again.to_toml(), again.digest()), (printed, run.digest()), "{text}");
    }
    let known = KEYS.iter().filter(|key| ![Section::Top, Section::Datasets].contains(&key.section));
    let missing: Vec<String> = known.map(Key::dotted).filter(|key| !seen.contains(key)).collect();
    assert!(valid > 1000 && missing.is_empty(), "{valid} valid configs, never with {missing:?}");
}

#[test]
fn variables_of_the_template_are_a_table() {
    let run = least("[training]\nchat_template_kwargs = { enable_thinking = false, n = 1 }").expect("valid");
    assert_eq!(run.training.chat_template_kwargs.len(), 2);
    let over = with(
        &format!("{LEAST}[training.chat_template_kwargs]\nn = 1"),
        &["training.chat_template_kwargs.enable_thinking=false"],
    );
    assert_eq!(over.expect("valid"), run);
    assert_ne!(run.digest(), least("").expect("valid").digest());
    let error = least("[training]\nchat_template_kwargs = { messages = 1 }").expect_err("a name of ours");
    assert!(error.contains("`messages` is set from the data"), "{error}");
}

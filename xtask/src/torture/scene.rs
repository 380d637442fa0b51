//! The inputs of the program under test: the model and data embedded in `isobit demo`, the same
//! model in shards and with a chat template, and configs for runs of a fraction of a second that
//! save often.

use super::program::{self, RunPlace, words};
use super::{Settings, run_folder};
use isobit_proof::safetensors::{Entry, SafeTensors, write};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Time limit in seconds for an undisturbed command.
pub(crate) const SECONDS: u64 = 60;

/// A chat template with an assistant mask, for the tokens of the demo's tokenizer.
pub(crate) const CHAT_TEMPLATE: &str = "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}\
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}\
    {%- else %}{{ message.content + '<|im_end|>' }}{%- endif %}{{ '\\n' }}{%- endfor %}\
    {%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}\n";

/// A shape of run: the tables `eval`, `training` and `adapter` of its config.
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    pub(crate) eval: &'static str,
    pub(crate) training: &'static str,
    pub(crate) adapter: &'static str,
}

const LORA: &str = "type = \"lora\"\nlora_r = 8\nlora_alpha = 16\nlora_dropout = 0.05\n";
const NO_EVAL: &str = "eval_strategy = \"no\"\n";
const EVAL: &str = "val_set_size = 6\neval_steps = 3\n";

/// Runs that save in every possible way.
pub(crate) const SHAPES: [Shape; 6] = [
    Shape { name: "lora", eval: NO_EVAL, training: "max_steps = 24\nsave_steps = 2\n", adapter: LORA },
    Shape {
        name: "full",
        eval: NO_EVAL,
        training: "max_steps = 12\nsave_steps = 1\nsave_total_limit = 3\n",
        adapter: "type = \"full\"\n",
    },
    Shape {
        name: "packed",
        eval: NO_EVAL,
        training: "max_steps = 20\nsave_steps = 3\nsample_packing = true\n",
        adapter: LORA,
    },
    Shape {
        name: "best",
        eval: EVAL,
        training: "max_steps = 18\nsave_steps = 2\nsave_total_limit = 2\nload_best_model_at_end = true\n",
        adapter: LORA,
    },
    Shape {
        name: "newest",
        eval: NO_EVAL,
        training: "max_steps = 20\nsave_steps = 1\nsave_total_limit = 1\n",
        adapter: LORA,
    },
    Shape {
        name: "blocks",
        eval: EVAL,
        training: "max_steps = 12\nsave_steps = 2\nsave_total_limit = 1\nload_best_model_at_end = true\n",
        adapter: "type = \"last_blocks\"\nlast_blocks = 1\n",
    },
];

impl Shape {
    /// The config of this run. `threads = 1` stays fast on a machine with other jobs.
    pub(crate) fn config(&self) -> String {
        format!(
            "base_model = \"model\"\noutput_dir = \"out\"\nseed = 7\nthreads = 1\n\n[[datasets]]\npath = \"pirate.jsonl\"\n\n[eval]\n{}\n\
             [training]\nmax_seq_length = 64\nmicro_batch_size = 4\ngradient_accumulation_steps = 1\nlearning_rate = 2e-3\n\
             logging_steps = 1\n{}\n[adapter]\n{}",
            self.eval, self.training, self.adapter
        )
    }

    pub(crate) fn file(&self) -> String {
        format!("{}.toml", self.name)
    }
}

/// A folder with everything, copied once per job.
pub(crate) struct Scene {
    pub(crate) folder: PathBuf,
    pub(crate) program: PathBuf,
}

impl Scene {
    /// `model/`, `pirate.jsonl` and a config for every shape.
    pub(crate) fn new(settings: &Settings) -> Result<Self, String> {
        let scene = Self { folder: settings.place("scene")?, program: settings.program.clone() };
        if scene.folder.join("pirate.jsonl").exists() {
            return Ok(scene);
        }
        let ended = scene.run(&["demo", "--keep", "demo"])?;
        if !ended.ok() {
            return Err(format!("isobit demo: {}", ended.how()));
        }
        scene.rename("demo/model", "model")?;
        scene.rename("demo/pirate.jsonl", "pirate.jsonl")?;
        remove(&scene.folder.join("demo"))?;
        for shape in &SHAPES {
            scene.put(&shape.file(), shape.config().as_bytes())?;
        }
        Ok(scene)
    }

    /// Runs the program here, undisturbed.
    pub(crate) fn run(&self, arguments: &[&str]) -> Result<program::Ended, String> {
        let logs = self.folder.with_extension("logs");
        std::fs::create_dir_all(&logs).map_err(|error| format!("{}: {error}", logs.display()))?;
        let place = RunPlace { scene: self.folder.clone(), logs };
        program::run(&self.program, &words(arguments), &place, SECONDS)
    }

    pub(crate) fn put(&self, name: &str, bytes: &[u8]) -> Result<(), String> {
        let path = self.folder.join(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|error| format!("{}: {error}", parent.display()))?;
        }
        std::fs::write(&path, bytes).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), String> {
        let (from, to) = (self.folder.join(from), self.folder.join(to));
        std::fs::rename(&from, &to).map_err(|error| format!("{}: {error}", from.display()))
    }

    /// The uninterrupted run of a shape, in `whole-NAME`, and its time in microseconds.
    pub(crate) fn whole(&self, shape: &Shape) -> Result<(PathBuf, u64), String> {
        let name = format!("whole-{}", shape.name);
        let begun = crate::repository::now();
        let folder = self.folder.join(&name);
        remove(&folder)?;
        let ended = self.run(&["train", &shape.file(), "-q", "--set", &format!("output_dir={name}")])?;
        if !ended.ok() {
            return Err(format!("the undisturbed run of {}: {}", shape.file(), ended.how()));
        }
        Ok((folder, begun.elapsed().as_micros() as u64))
    }

    /// A run of a shape killed midway, in `stopped-NAME`, and the step of its latest checkpoint.
    pub(crate) fn stopped(&self, shape: &Shape) -> Result<(PathBuf, u64), String> {
        let name = format!("stopped-{}", shape.name);
        let folder = self.folder.join(&name);
        remove(&folder)?;
        let place = RunPlace { scene: self.folder.clone(), logs: self.folder.with_extension("logs") };
        let arguments = words(&["train", &shape.file(), "--json", "--set", &format!("output_dir={name}")]);
        let mut started = program::start(&self.program, &arguments, &place)?;
        while started.is_running() && run_folder::newest(&folder)?.is_none_or(|step| step < 4) {
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
        started.signal(libc::SIGKILL);
        started.end(SECONDS)?;
        let step = run_folder::latest(&folder)?.ok_or("a run that was killed has no checkpoint")?;
        if folder.join("final").exists() {
            return Err(format!("{name} finished before it was killed"));
        }
        Ok((folder, step))
    }

    /// `sharded/`: the same model in two files with an index. `chat/`: with a chat template, and
    /// `chat.jsonl` for it.
    pub(crate) fn variants(&self) -> Result<(), String> {
        let failed = |error: &dyn std::fmt::Display| format!("the model in shards: {error}");
        for other in ["sharded", "chat"] {
            copy(&self.folder.join("model"), &self.folder.join(other))?;
        }
        let whole = self.folder.join("sharded/model.safetensors");
        let file = SafeTensors::open(&whole).map_err(|error| failed(&error))?;
        let mut map = serde_json::Map::new();
        let all: Vec<_> = file.tensors().collect();
        for (part, tensors) in all.chunks(all.len().div_ceil(2)).enumerate() {
            let name = format!("model-{}-of-00002.safetensors", part + 1);
            let entries: Vec<Entry> = tensors
                .iter()
                .map(|tensor| Entry {
                    name: tensor.name,
                    dtype: tensor.dtype,
                    shape: tensor.shape,
                    bytes: tensor.bytes,
                })
                .collect();
            map.extend(tensors.iter().map(|tensor| (tensor.name.to_string(), name.clone().into())));
            let path = self.folder.join("sharded").join(&name);
            write(&path, &BTreeMap::new(), &entries).map_err(|error| failed(&error))?;
        }
        drop(all);
        drop(file);
        remove(&whole)?;
        let index = serde_json::json!({"metadata": {"total_size": 0}, "weight_map": map});
        self.put("sharded/model.safetensors.index.json", index.to_string().as_bytes())?;
        let tokens = serde_json::json!({"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE});
        self.put("chat/tokenizer_config.json", tokens.to_string().as_bytes())?;
        let row = |index: usize| {
            let name = ["Anna", "Ben", "Clara"][index % 3];
            format!(
                "{{\"messages\":[{{\"role\":\"user\",\"content\":\"greet {name}:\"}},{{\"role\":\"assistant\",\
                 \"content\":\"Ahoy, {name}!\"}}]}}\n"
            )
        };
        self.put("chat.jsonl", (0..12).map(row).collect::<String>().as_bytes())
    }
}

/// Copies a folder; does nothing if it does not exist.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<(), String> {
    remove(to)?;
    std::fs::create_dir_all(to).map_err(|error| format!("{}: {error}", to.display()))?;
    for name in run_folder::names(from)? {
        let (from, to) = (from.join(&name), to.join(&name));
        if from.is_dir() {
            copy(&from, &to)?;
        } else {
            std::fs::copy(&from, &to).map_err(|error| format!("{}: {error}", from.display()))?;
        }
    }
    Ok(())
}

/// Removes whatever is there. Links are not followed.
pub(crate) fn remove(path: &Path) -> Result<(), String> {
    let Ok(found) = path.symlink_metadata() else { return Ok(()) };
    let removed = if found.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    removed.map_err(|error| format!("{}: {error}", path.display()))
}

//! `isobit demo`: what the program promises, shown on an embedded model, in seconds and without
//! downloads. It starts this program again for every run, so that it shows what a user would do:
//! train, kill, resume, train differently, compare.

use crate::Failure;
use crate::stderr::tell;
use isobit_proof::hash::Hash;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Keep model, data and runs in this new folder instead of a temporary one
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,
}

const MODEL: [(&str, &[u8]); 4] = [
    ("config.json", include_bytes!("../demo/config.json")),
    ("tokenizer.json", include_bytes!("../demo/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../demo/tokenizer_config.json")),
    ("model.safetensors", include_bytes!("../demo/model.safetensors")),
];

/// The result of the demo's runs on every machine: BLAKE3 of the adapter.
const EXPECTED: &str = "c34bde7d9cfeb85e30ab61654bb8e877";

const CONFIG: &str = include_str!("../demo/demo.toml");
/// Greetings in pirate speech.
const ROWS: &str = include_str!("../demo/pirate.jsonl");

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let temporary = std::env::temp_dir().join(format!("isobit-demo-{}", std::process::id()));
    let folder = arguments.keep.clone().unwrap_or_else(|| temporary.clone());
    std::fs::create_dir(&folder).map_err(|error| Failure {
        code: 7,
        message: format!("cannot create {}: {error}", folder.display()),
        hint: Some("name a folder that does not exist yet".to_string()),
    })?;
    let result = Demo { folder, program: std::env::current_exe().map_err(|error| Failure::output(&error))? }.tell();
    let Some(folder) = &arguments.keep else {
        let _ = std::fs::remove_dir_all(&temporary);
        return result;
    };
    result?;
    say(&format!("Kept in {0}: `cd {0} && isobit train demo.toml` gives this hash again.", folder.display()))
}

struct Demo {
    folder: PathBuf,
    program: PathBuf,
}

impl Demo {
    fn tell(&self) -> Result<(), Failure> {
        self.write_inputs()?;
        say("1. Train a LoRA adapter on the embedded model (60 updates, 2 threads, 4x4 rows, checkpointing full)")?;
        self.train("run-a", &[])?;
        let first = self.hash("run-a")?;
        say(&format!("   adapter {first}"))?;
        say("\n2. Base and tuned, same prompts")?;
        for prompt in ["greet Anna:", "leave Paul:"] {
            let base = self.generate(prompt, None)?;
            let tuned = self.generate(prompt, Some("run-a/final"))?;
            say(&format!("   {prompt:<12} base:{base:<22} tuned:{tuned}"))?;
        }
        say("\n3. Train again, kill the process in the middle, resume")?;
        let step = self.train_and_kill("run-b")?;
        say(&format!("   killed; the last checkpoint is {step}"))?;
        self.train("run-b", &["--resume"])?;
        self.same("run-b", &first)?;
        say("\n4. Train with 1 thread, 16x1 rows, no checkpointing of activations")?;
        let other = [
            "--set",
            "threads=1",
            "--set",
            "training.micro_batch_size=16",
            "--set",
            "training.gradient_accumulation_steps=1",
            "--set",
            "training.gradient_checkpointing=none",
        ];
        self.train("run-c", &other)?;
        self.same("run-c", &first)?;
        say("\n5. Change one byte of the data")?;
        let changed = format!("datasets.0.path=\"{}\"", self.change_one_byte()?);
        self.train("run-d", &["--set", &changed])?;
        say(&format!("   adapter {}", self.hash("run-d")?))?;
        let difference = self.output(&["diff", "run-a", "run-d"])?;
        let lines: Vec<&str> = difference.lines().filter(|line| !line.starts_with("config ")).collect();
        // The summary, the step, the update and the item, the row, and the first tensor.
        let shown = lines.iter().take(5).map(|line| format!("     {line}"));
        say(&format!("   isobit diff run-a run-d\n{}", shown.collect::<Vec<_>>().join("\n")))?;
        say("\n6. Change one bit of a weight in a checkpoint")?;
        self.change_one_bit("run-c/checkpoint-40/adapter_model.safetensors")?;
        for (arguments, lines) in [(&["verify", "run-c"][..], 1), (&["replay", "run-c", "--steps", "31..40", "-q"], 2)]
        {
            let output = self.output(arguments)?;
            let shown: Vec<String> = output.lines().take(lines).map(|line| format!("     {line}")).collect();
            say(&format!("   isobit {}\n{}", arguments.join(" "), shown.join("\n")))?;
        }
        self.change_one_bit("run-c/checkpoint-40/adapter_model.safetensors")?;
        verdict(&first)
    }

    /// Flips the lowest bit of the last weight of a file; a second time restores it.
    fn change_one_bit(&self, name: &str) -> Result<(), Failure> {
        let (path, failed) = (self.folder.join(name), |error: std::io::Error| Failure::output(&error));
        let mut bytes = std::fs::read(&path).map_err(failed)?;
        let last_weight = bytes.len().saturating_sub(size_of::<f32>());
        if let Some(byte) = bytes.get_mut(last_weight) {
            *byte ^= 1;
        }
        std::fs::write(&path, bytes).map_err(failed)
    }

    fn write_inputs(&self) -> Result<(), Failure> {
        let failed = |error: std::io::Error| Failure::output(&error);
        std::fs::create_dir(self.folder.join("model")).map_err(failed)?;
        for (name, bytes) in MODEL {
            std::fs::write(self.folder.join("model").join(name), bytes).map_err(failed)?;
        }
        std::fs::write(self.folder.join("demo.toml"), CONFIG).map_err(failed)?;
        std::fs::write(self.folder.join("pirate.jsonl"), ROWS).map_err(failed)
    }

    /// Changes a copy and returns its name: a user who keeps the folder can train on the original
    /// data again.
    fn change_one_byte(&self) -> Result<&'static str, Failure> {
        const COPY: &str = "pirate-changed.jsonl";
        let changed = ROWS.replacen("Ahoy", "Ahey", 1);
        std::fs::write(self.folder.join(COPY), changed).map_err(|error| Failure::output(&error))?;
        Ok(COPY)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(arguments).current_dir(&self.folder).stdin(Stdio::null());
        command
    }

    fn train_command(&self, output: &str, arguments: &[&str]) -> Command {
        let mut command = self.command(&["train", "demo.toml", "-q", "--set"]);
        command.arg(format!("output_dir=\"{output}\"")).args(arguments);
        command
    }

    fn train(&self, output: &str, arguments: &[&str]) -> Result<(), Failure> {
        let status = self.train_command(output, arguments).status().map_err(|error| Failure::output(&error))?;
        if status.success() { Ok(()) } else { Err(child_failed("train", status.code())) }
    }

    /// Kills a run once it has saved something; returns the name of its last checkpoint.
    fn train_and_kill(&self, output: &str) -> Result<String, Failure> {
        let failed = |error: std::io::Error| Failure::output(&error);
        let mut child = self.train_command(output, &[]).spawn().map_err(failed)?;
        let latest = self.folder.join(output).join("checkpoint-20");
        for _ in 0..6000 {
            if latest.is_dir() || child.try_wait().map_err(failed)?.is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        child.kill().map_err(failed)?;
        child.wait().map_err(failed)?;
        let text = std::fs::read_to_string(self.folder.join(output).join("latest.json")).map_err(failed)?;
        let value: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        Ok(value["checkpoint"].as_str().unwrap_or("none").to_string())
    }

    fn hash(&self, output: &str) -> Result<String, Failure> {
        let path = self.folder.join(output).join("final/adapter_model.safetensors");
        let hash = Hash::of_file(Path::new(&path));
        hash.map(|hash| hash.to_string()[..32].to_string()).map_err(|error| Failure {
            code: error.exit_code(),
            message: error.to_string(),
            hint: None,
        })
    }

    fn same(&self, output: &str, first: &str) -> Result<(), Failure> {
        let hash = self.hash(output)?;
        if hash == first {
            return say(&format!("   adapter {hash}  the same"));
        }
        Err(Failure { code: 1, message: format!("{output} gives {hash}, run-a {first}"), hint: None })
    }

    fn generate(&self, prompt: &str, adapter: Option<&str>) -> Result<String, Failure> {
        let mut arguments =
            vec!["generate", "--model", "model", "--prompt", prompt, "--max-tokens", "24", "--threads", "2", "-q"];
        arguments.extend(adapter.iter().flat_map(|adapter| ["--adapter", adapter]));
        Ok(self.output(&arguments)?.trim_end().to_string())
    }

    /// The output of a command. `diff` and `replay` end with 1 when they find a difference,
    /// `verify` with 8. What it says on stderr is shown if it fails.
    fn output(&self, arguments: &[&str]) -> Result<String, Failure> {
        let output = self.command(arguments).output().map_err(|error| Failure::output(&error))?;
        match output.status.code() {
            Some(0 | 1 | 8) if arguments[0] != "generate" => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            Some(0) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            code => {
                tell(String::from_utf8_lossy(&output.stderr).trim_end());
                Err(child_failed(arguments[0], code))
            }
        }
    }
}

/// Every platform must produce the hash in the README.
fn verdict(hash: &str) -> Result<(), Failure> {
    if hash == EXPECTED {
        return say("\nThe same bits as on every other machine.");
    }
    let message = format!("this machine gives {hash}, every other one {EXPECTED}");
    Err(Failure { code: 1, message, hint: Some("please report it with the output of `isobit devices`".to_string()) })
}

fn child_failed(command: &str, code: Option<i32>) -> Failure {
    let code = code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Failure { code, message: format!("`isobit {command}` failed"), hint: None }
}

fn say(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(|error| Failure::output(&error))
}

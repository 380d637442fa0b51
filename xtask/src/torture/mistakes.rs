//! User mistakes: one row each, with the exit code and the words that the message must contain. A
//! row is easy to add: files to change, a command line, and the expected result.

use super::program::{self, RunPlace, words};
use super::scene::{SHAPES, Scene, copy, remove};
use super::{Report, Settings};
use std::path::Path;

const SECONDS: u64 = 20;

/// A change to the folder before the command.
enum Edit {
    Put(&'static str, &'static str),
    Bytes(&'static str, &'static [u8]),
    Replace(&'static str, &'static str, &'static str),
    Remove(&'static str),
    Folder(&'static str),
    /// One bit of the last byte.
    Flip(&'static str),
    /// Keeps the first bytes only.
    Cut(&'static str, u64),
    /// `out/` is a run that was killed midway.
    Stopped,
}

use Edit::{Bytes, Cut, Flip, Folder, Put, Remove, Replace, Stopped};

/// What a user did and typed, and what the message must say. Words match regardless of case.
struct Mistake {
    what: &'static str,
    edits: &'static [Edit],
    command: &'static str,
    codes: &'static [i32],
    says: &'static [&'static str],
}

const fn row(
    what: &'static str,
    edits: &'static [Edit],
    command: &'static str,
    codes: &'static [i32],
    says: &'static [&'static str],
) -> Mistake {
    Mistake { what, edits, command, codes, says }
}

const TRAIN: &str = "train run.toml --set output_dir=out";
const RESUME: &str = "train run.toml --set output_dir=out --resume";
const CHECK: &str = "data check --model model --data data.jsonl";
const CHECK_CHAT: &str = "data check --model chat --data data.jsonl";
const EVAL: &str = "eval --model model --data pirate.jsonl";

#[rustfmt::skip]
const MISTAKES: [Mistake; 73] = [
    // Paths.
    row("a config that is not there", &[], "train nowhere.toml", &[2], &["nowhere.toml", "hint:"]),
    row("a folder as the config", &[], "train model", &[2], &["model"]),
    row("a model that is not there", &[], "train run.toml --set base_model=modle", &[2], &["modle", "hint:"]),
    row("a hub name as a path", &[], "train run.toml --set base_model=Qwen/Qwen2.5-0.5B", &[2], &["Qwen/Qwen2.5-0.5B", "hub"]),
    row("a hub name for data", &[], "data check --model Qwen/Qwen3-0.6B --data pirate.jsonl", &[2], &["Qwen3-0.6B", "hub"]),
    row("a hub name for eval", &[], "eval --model HuggingFaceTB/SmolLM2-135M --data pirate.jsonl", &[2], &["SmolLM2-135M", "hub"]),
    row("a file as the model", &[], "train run.toml --set base_model=pirate.jsonl", &[2], &["pirate.jsonl", "folder"]),
    row("data that is not there", &[], "train run.toml --set datasets.0.path=nowhere.jsonl", &[2], &["nowhere.jsonl", "hint:"]),
    row("a folder as the data", &[], "train run.toml --set datasets.0.path=model", &[2], &["model", "file"]),
    row("an adapter that is not there", &[], "eval --model model --data pirate.jsonl --adapter nowhere", &[2], &["nowhere"]),
    row("output_dir is a file", &[], "train run.toml --set output_dir=pirate.jsonl", &[2, 7], &["pirate.jsonl"]),
    row("output_dir where nobody may write", &[], "train run.toml --set output_dir=/proc/isobit", &[7], &["/proc/isobit"]),
    row("diff with a path that is not there", &[], "diff ours nowhere", &[2], &["nowhere"]),
    // The command line.
    row("a misspelt command", &[], "trian run.toml", &[2], &["train"]),
    row("a misspelt flag", &[], "train run.toml --resum", &[2], &["--resume"]),
    row("--set without a value", &[], "train run.toml --set learning_rate", &[2], &["learning_rate", "="]),
    row("--set with a misspelt key", &[], "train run.toml --set lora_rnk=8", &[2], &["lora_rnk", "lora_r"]),
    row("--set with words for a number", &[], "train run.toml --set learning_rate=fast", &[2], &["learning_rate", "number"]),
    row("no data for eval", &[], "eval --model model", &[2], &["--data"]),
    row("a device that does not exist", &[], "train run.toml --set device=gpu", &[2], &["device"]),
    row("an OpenCL device that is not there", &[], "train run.toml --set device=opencl:99", &[6], &["opencl:99", "isobit devices"]),
    row("a CUDA device that is not there", &[], "eval --model model --data pirate.jsonl --device cuda:99", &[6], &["cuda:99", "isobit devices"]),
    row("absurdly many threads", &[], "eval --model model --data pirate.jsonl --threads 99999999999", &[2], &["threads"]),
    row("a negative temperature", &[], "generate --model model --prompt x --temperature=-1", &[2], &["temperature"]),
    row("a row beyond the data", &[], "data show --model model --data pirate.jsonl --row 9999", &[2, 3], &["9999"]),
    row("init over a config", &[], "init model pirate.jsonl -o run.toml", &[2], &["run.toml", "--force"]),
    row("a profile that does not exist", &[], "eval --model model --data pirate.jsonl --profile x9", &[2], &["x2", "x3"]),
    // The config.
    row("a misspelt key", &[Replace("run.toml", "learning_rate", "lerning_rate")], TRAIN, &[2], &["run.toml", "learning_rate", "did you mean"]),
    row("a key of another tool", &[Replace("run.toml", "[training]", "[training]\nbf16 = true")], TRAIN, &[2], &["bf16"]),
    row("a key twice", &[Replace("run.toml", "seed = 7", "seed = 7\nseed = 8")], TRAIN, &[2], &["seed"]),
    row("a quote that is not closed", &[Replace("run.toml", "\"model\"", "\"model")], TRAIN, &[2], &["run.toml:"]),
    row("a config in Latin-1", &[Bytes("run.toml", b"base_model = \"mod\xe8le\"\n")], TRAIN, &[2], &["UTF-8"]),
    row("no data in the config", &[Replace("run.toml", "[[datasets]]\npath = \"pirate.jsonl\"", "")], TRAIN, &[2], &["datasets"]),
    row("text for a number", &[Replace("run.toml", "2e-3", "\"2e-3\"")], TRAIN, &[2], &["learning_rate"]),
    row("a learning rate that is not finite", &[Replace("run.toml", "2e-3", "nan")], TRAIN, &[2], &["learning_rate"]),
    row("a negative number of steps", &[], "train run.toml --set max_steps=-5", &[2], &["max_steps"]),
    row("a scheduler with a typo", &[], "train run.toml --set lr_scheduler_type=cosin", &[2], &["cosine"]),
    row("a checkpointing policy with a typo", &[], "train run.toml --set gradient_checkpointing=ful", &[2], &["full"]),
    row("qlora as the type", &[], "train run.toml --set adapter.type=qlora", &[2], &["qlora", "lora"]),
    row("rank 0", &[], "train run.toml --set lora_r=0", &[2], &["lora_r"]),
    row("a rank that is too high", &[], "train run.toml --set lora_r=4096", &[2], &["64"]),
    row("target modules that match nothing", &[], "train run.toml --set lora_target_modules=[\"c_attn\"]", &[2], &["c_attn", "q_proj"]),
    row("one target module of two with a typo", &[], "train run.toml --set lora_target_modules=[\"q_proj\",\"v_porj\"]", &[2], &["v_porj", "v_proj"]),
    row("longer rows than the model has positions", &[], "train run.toml --set max_seq_length=4096", &[2], &["max_seq_length", "256"]),
    row("plan with longer rows than positions", &[], "plan run.toml --set max_seq_length=4096", &[2], &["max_seq_length", "256"]),
    row("every row held out", &[], "train run.toml --set val_set_size=1000", &[2], &["val_set_size"]),
    row("a plan that does not fit", &[], "plan run.toml --memory 0.0001", &[4], &["hint:"]),
    // The model folder.
    row("no tokenizer", &[Remove("model/tokenizer.json")], TRAIN, &[2], &["tokenizer.json", "hint:"]),
    row("no config.json", &[Remove("model/config.json")], EVAL, &[2], &["config.json", "hint:"]),
    row("no weights", &[Remove("model/model.safetensors")], EVAL, &[2], &["safetensors"]),
    row("a family that is not known", &[Replace("model/config.json", "qwen2", "gpt9")], EVAL, &[2], &["gpt9"]),
    row("a broken config.json", &[Put("model/config.json", "{\"model_type\":")], EVAL, &[8], &["config.json"]),
    row("a download that was cut short", &[Cut("model/model.safetensors", 40_000)], EVAL, &[8], &["model.safetensors"]),
    row("a pointer of git LFS", &[Put("model/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")], EVAL, &[8], &["model.safetensors"]),
    row("fewer layers in config.json than in the file", &[Replace("model/config.json", "\"num_hidden_layers\": 4", "\"num_hidden_layers\": 2")], EVAL, &[2, 8], &["layers"]),
    // Data.
    row("an empty file", &[Put("data.jsonl", "")], CHECK, &[3], &["data.jsonl", "row"]),
    row("a line that is not JSON", &[Put("data.jsonl", "{\"prompt\":\"a\",\"completion\":\"b\"}\n{'prompt':'a'}\n")], CHECK, &[3], &["data.jsonl:2", "JSON"]),
    row("rows in Latin-1", &[Bytes("data.jsonl", b"{\"prompt\":\"a\",\"completion\":\"\xe9\"}\n")], CHECK, &[3], &["data.jsonl:1", "UTF-8"]),
    row("columns of another data set", &[Put("data.jsonl", "{\"question\":\"a\",\"answer\":\"b\"}\n")], CHECK, &[3], &["question", "hint:"]),
    row("a number as the prompt", &[Put("data.jsonl", "{\"prompt\":1,\"completion\":\"b\"}\n")], CHECK, &[3], &["prompt"]),
    row("two kinds of rows", &[Put("data.jsonl", "{\"prompt\":\"a\",\"completion\":\"b\"}\n{\"text\":\"c\"}\n")], CHECK, &[3], &["data.jsonl:2"]),
    row("roles human and gpt", &[Put("data.jsonl", "{\"messages\":[{\"role\":\"human\",\"content\":\"a\"},{\"role\":\"gpt\",\"content\":\"b\"}]}\n")], CHECK_CHAT, &[3], &["human", "user"]),
    row("messages for a model without a template", &[], "data check --model model --data chat.jsonl", &[2, 3], &["template"]),
    row("token ids beyond the vocabulary", &[Put("data.jsonl", "{\"input_ids\":[1,2,99999]}\n")], CHECK, &[3], &["99999"]),
    row("rows that are cut to nothing", &[Put("data.jsonl", "{\"prompt\":\"greet Anna and Ben and Clara and Dora:\",\"completion\":\"b\"}\n")], "data check --model model --data data.jsonl --max-seq-length 4", &[3], &["max_seq_length"]),
    row("chat without a template", &[], "generate --model model --chat --prompt hi", &[2, 3], &["template"]),
    // Runs and adapters.
    row("a run where one is already", &[Stopped], TRAIN, &[2], &["--resume"]),
    row("resume with another batch", &[Stopped], "train run.toml --set output_dir=out --resume --set micro_batch_size=3", &[2], &["micro_batch_size"]),
    row("resume with another learning rate", &[Stopped], "train run.toml --set output_dir=out --resume --set learning_rate=1e-3", &[2], &["learning_rate"]),
    row("resume without latest.json", &[Stopped, Remove("out/latest.json")], RESUME, &[8], &["--resume-from"]),
    row("checkpoints of another tool in output_dir", &[Folder("out/checkpoint-1"), Put("out/checkpoint-1/pytorch_model.bin", "x")], TRAIN, &[2], &["checkpoint-1"]),
    row("an adapter with a flipped bit", &[Flip("ours/adapter_model.safetensors")], "generate --model model --adapter ours --prompt x", &[8], &["adapter_model.safetensors"]),
    row("an adapter of another model", &[Remove("ours/MANIFEST.json"), Remove("ours/receipt.json"), Replace("ours/adapter_config.json", "\"base_model_name_or_path\": \"model\"", "\"base_model_name_or_path\": \"Mistral-7B\""), Replace("ours/adapter_config.json", "\"r\": 8", "\"r\": 4")], "eval --model model --adapter ours --data pirate.jsonl", &[2, 8], &["Mistral-7B"]),
];

pub(crate) fn run(settings: &Settings) -> Result<Report, String> {
    let scene = Scene::new(settings)?;
    scene.variants()?;
    let shape = SHAPES.iter().find(|shape| shape.name == "best").ok_or("no such shape")?;
    let (whole, _) = scene.whole(shape)?;
    let (stopped, _) = scene.stopped(shape)?;
    let count = settings.count(MISTAKES.len()).min(MISTAKES.len());
    let commands = commands(&scene.run(&["--help"])?.out);
    let findings = settings.cases(
        "mistakes",
        |folder| Ok(RunPlace { scene: folder.join("scene"), logs: folder.to_path_buf() }),
        |case| case < count,
        |place, case| {
            remove(&place.scene)?;
            for folder in ["model", "chat"] {
                copy(&scene.folder.join(folder), &place.scene.join(folder))?;
            }
            copy(&whole.join("final"), &place.scene.join("ours"))?;
            for file in ["pirate.jsonl", "chat.jsonl"] {
                let from = scene.folder.join(file);
                std::fs::copy(&from, place.scene.join(file)).map_err(|error| format!("{}: {error}", from.display()))?;
            }
            let config = place.scene.join("run.toml");
            std::fs::write(&config, shape.config()).map_err(|error| format!("{}: {error}", config.display()))?;
            let mistake = &MISTAKES[case];
            for edit in mistake.edits {
                made(edit, &place.scene, &stopped)?;
            }
            Ok(judged(&settings.program, mistake, place, &commands)?.into_iter().collect())
        },
    )?;
    Ok(Report { done: format!("{count} mistakes"), findings })
}

fn made(edit: &Edit, scene: &Path, stopped: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("an edit of a mistake: {error}");
    match edit {
        Put(name, text) => std::fs::write(scene.join(name), text).map_err(failed),
        Bytes(name, bytes) => std::fs::write(scene.join(name), bytes).map_err(failed),
        Replace(name, from, to) => {
            let text = std::fs::read_to_string(scene.join(name)).map_err(failed)?;
            if !text.contains(from) {
                return Err(format!("{name} holds no `{from}`"));
            }
            std::fs::write(scene.join(name), text.replacen(from, to, 1)).map_err(failed)
        }
        Remove(name) => remove(&scene.join(name)),
        Folder(name) => std::fs::create_dir_all(scene.join(name)).map_err(failed),
        Flip(name) => {
            let mut bytes = std::fs::read(scene.join(name)).map_err(failed)?;
            if let Some(last) = bytes.last_mut() {
                *last ^= 1;
            }
            std::fs::write(scene.join(name), bytes).map_err(failed)
        }
        Cut(name, length) => {
            let file = std::fs::File::options().write(true).open(scene.join(name)).map_err(failed)?;
            file.set_len(*length).map_err(failed)
        }
        Stopped => copy(stopped, &scene.join("out")),
    }
}

/// The commands listed in the help.
fn commands(help: &str) -> Vec<String> {
    let listed = help.lines().skip_while(|line| !line.starts_with("Commands:")).skip(1);
    let named = listed.take_while(|line| line.starts_with("  ")).filter_map(|line| line.split_whitespace().next());
    named.map(str::to_string).collect()
}

fn judged(program: &Path, mistake: &Mistake, place: &RunPlace, commands: &[String]) -> Result<Option<String>, String> {
    let command: Vec<&str> = mistake.command.split(' ').collect();
    let ended = program::run(program, &words(&command), place, SECONDS)?;
    let told = format!("{}{}", ended.out, ended.err).to_lowercase();
    let missing = mistake.says.iter().find(|word| !told.contains(&word.to_lowercase()));
    let wrong = if let Some(complaint) = ended.complaint() {
        complaint
    } else if !ended.code.is_some_and(|code| mistake.codes.contains(&code)) {
        format!("exit {:?} expected: {}", mistake.codes, ended.how())
    } else if let Some(word) = missing {
        format!("`{word}` is missing: {}", ended.how())
    } else if let Some(nothing) = names_nothing(&ended.err, commands) {
        format!("it speaks of `{nothing}`, which does not exist: {}", ended.how())
    } else {
        return Ok(None);
    };
    Ok(Some(format!("{} (`isobit {}`): {wrong}", mistake.what, mistake.command)))
}

/// A command in a message that does not exist.
fn names_nothing(message: &str, commands: &[String]) -> Option<String> {
    for rest in message.split("`isobit ").skip(1) {
        let name = rest.split([' ', '`']).next().unwrap_or_default();
        let is_name = name.starts_with(|first: char| first.is_ascii_lowercase());
        if is_name && !commands.iter().any(|command| command == name) {
            return Some(format!("isobit {name}"));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_name_what_exists() {
        let commands = commands("Usage: x\n\nCommands:\n  train  Fine-tune\n  data   Look\n\nOptions:\n  -h\n");
        assert_eq!(commands, ["train", "data"]);
        assert_eq!(names_nothing("hint: `isobit data check` lists them; `isobit --help`", &commands), None);
        assert_eq!(names_nothing("hint: `isobit replay`", &commands).as_deref(), Some("isobit replay"));
    }
}

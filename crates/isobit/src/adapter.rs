//! Resolves `--adapter`: an adapter folder, a checkpoint, or a run, which stands for its final
//! weights or, until it has any, for its latest checkpoint.

use crate::Failure;
use crate::stderr::tell;
use isobit_training::checkpoint::{self, ADAPTER, ADAPTER_CONFIG, FINAL, Latest, MODEL};
use isobit_training::data_record;
use isobit_training::prepare::RunError;
use std::path::{Path, PathBuf};

/// The folder that holds `adapter_config.json`. An unrecognised folder is returned as it is:
/// opening it reports what is missing.
pub(crate) fn located(folder: &Path) -> Result<PathBuf, Failure> {
    // Its file stands for the folder it is in, where its config is.
    let is_file = folder.file_name().is_some_and(|name| name == ADAPTER) && folder.is_file();
    let folder = if is_file { folder.parent().filter(|parent| !parent.as_os_str().is_empty()) } else { Some(folder) };
    let folder = folder.unwrap_or(Path::new("."));
    if holds_adapter(folder) {
        return Ok(folder.to_path_buf());
    }
    let last = folder.join(FINAL);
    if holds_adapter(&last) {
        return Ok(last);
    }
    for whole in [folder, &last] {
        if whole.join(MODEL).is_file() {
            let message = format!("{} holds the weights of a model, not an adapter", whole.display());
            return Err(Failure::usage(message, format!("pass it with `--model {}`", whole.display())));
        }
    }
    let latest = checkpoint::latest(folder).map_err(RunError::from)?;
    if let Latest::At(step) = latest
        && let latest = checkpoint::folder_of(folder, step)
        && holds_adapter(&latest)
    {
        tell(&format!("note: {} has not finished; using {}", folder.display(), latest.display()));
        return Ok(latest);
    }
    Ok(folder.to_path_buf())
}

fn holds_adapter(folder: &Path) -> bool {
    folder.join(ADAPTER_CONFIG).is_file()
}

/// The format of the conversations that an adapter was trained on, if the folder is a run or lies
/// in one.
pub(crate) fn conversations(folder: &Path) -> Option<String> {
    data_record::conversations(folder).or_else(|| data_record::conversations(folder.parent()?))
}

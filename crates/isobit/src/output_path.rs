//! Names that commands write to (`-o`): whether their folder is there, and whether they are inside
//! a run.

use crate::Failure;
use std::path::Path;

/// Refuses a name in a folder that does not exist.
pub(crate) fn check_parent(path: &Path) -> Result<(), Failure> {
    let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) else {
        return Ok(());
    };
    let message = format!("cannot write {}: {} is not a folder", path.display(), folder.display());
    let hint = "create the folder, or choose another name with `-o`";
    Err(Failure { code: 7, message, hint: Some(hint.to_string()) })
}

/// Whether a new file would be one that the run does not have: inside it, and not `own`.
pub(crate) fn is_foreign_in(run: &Path, path: &Path, own: &str) -> bool {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (Ok(run), Ok(parent)) = (run.canonicalize(), parent.canonicalize()) else { return false };
    let is_own = parent == run && path.file_name().is_some_and(|name| name == own);
    parent.starts_with(&run) && !is_own
}

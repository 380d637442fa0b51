//! `isobit completions` and `isobit man`: files for a shell and for `man`, generated from the same
//! definitions as `--help`.

use crate::Failure;
use isobit_training::sealed;
use std::io::Write;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub(crate) struct CompletionArguments {
    /// Shell to generate completions for
    shell: clap_complete::Shell,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ManArguments {
    /// Write a page for every command into this folder instead of printing the main page
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

pub(crate) fn completions(arguments: &CompletionArguments, mut command: clap::Command) -> Result<(), Failure> {
    // Into memory first: a closed pipe is an error to report, not a panic.
    let mut text = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "isobit", &mut text);
    print(&text)
}

pub(crate) fn man(arguments: &ManArguments, command: clap::Command) -> Result<(), Failure> {
    let Some(folder) = &arguments.folder else {
        let mut text = Vec::new();
        let rendered = clap_mangen::Man::new(command).render(&mut text);
        return rendered.map_err(|error| Failure::output(&error)).and_then(|()| print(&text));
    };
    let page = folder.join("isobit.1");
    sealed::check_target(&page).and_then(|()| sealed::check_beside_run(&page))?;
    let made = std::fs::create_dir_all(folder).and_then(|()| clap_mangen::generate_to(command, folder));
    made.map_err(|error| Failure {
        code: 7,
        message: format!("cannot write into {}: {error}", folder.display()),
        hint: Some("name a writable folder".to_string()),
    })
}

fn print(text: &[u8]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(text).and_then(|()| out.flush()).map_err(|error| Failure::output(&error))
}

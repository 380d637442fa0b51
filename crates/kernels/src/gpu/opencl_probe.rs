//! OpenCL's drivers, loaded in a child process first: one that crashes, aborts or hangs while it
//! lists its devices is an answer like any other, and this process does not load it.

use super::hip::child::is_started_with;
use super::hip::process::{self, End, Heard, Search};
use super::hip::settings;
use super::opencl;
use std::io::Write;
use std::process::ExitCode;
use std::sync::OnceLock;

/// The argument that makes a program list the devices.
const ARGUMENT: &str = "--list-opencl-devices";
/// What the child writes when its drivers have answered.
const MARK: &[u8] = b"\0isobit opencl drivers answer\0";
/// Drivers take a fraction of a second.
const SECONDS_MAX: u32 = 5;

/// Whether the drivers may be loaded here. Asked once in a process.
pub(super) fn check() -> Result<(), String> {
    static ANSWER: OnceLock<Result<(), String>> = OnceLock::new();
    let settings = settings::current();
    if !settings.children || settings.is_child {
        return Ok(());
    }
    ANSWER.get_or_init(ask).clone()
}

fn ask() -> Result<(), String> {
    let mut search = Search::default();
    let heard = |output: &[u8]| search.next(output, MARK).map_or(Heard::Nothing, |_| Heard::Everything);
    let remedy = "remove it from /etc/OpenCL/vendors, or point OCL_ICD_VENDORS at a folder with those that work";
    match process::run(ARGUMENT, &[], SECONDS_MAX, heard)?.end {
        End::Done => Ok(()),
        End::Silent(seconds) => Err(format!("an OpenCL driver hangs: no answer for {seconds} seconds; {remedy}")),
        End::Stopped => Err("the OpenCL drivers were stopped before they answered".to_string()),
        End::Exited(status) => Err(format!("an OpenCL driver crashes while it lists its devices ({status}); {remedy}")),
    }
}

/// Lists the devices if this process was started for that; its exit code.
pub(super) fn serve() -> Option<ExitCode> {
    is_started_with(ARGUMENT).then(|| {
        process::watch(2 * SECONDS_MAX);
        settings::set_child();
        // That there are none is an answer, too.
        let _ = opencl::list();
        let mut out = std::io::stdout().lock();
        let written = out.write_all(MARK).and_then(|()| out.flush());
        if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    })
}

//! Why a command ends: the exit code of its kind, a message, and one thing to try.

use crate::stderr::tell;
use crate::units::size;
use isobit_kernels::buffer::OutOfMemory;
use isobit_kernels::gpu::OverLimit;
use isobit_proof::FileError;
use isobit_training::prepare::RunError;
use std::any::Any;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// What went wrong, with the exit code of its kind.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) message: String,
    pub(crate) hint: Option<String>,
}

impl Failure {
    pub(crate) fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { code: 2, message: message.into(), hint: Some(hint.into()) }
    }

    pub(crate) fn device(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { code: 6, message: message.into(), hint: Some(hint.into()) }
    }

    /// Prints the message now and keeps only the exit code: for a command whose printed result says
    /// the same, so that no event follows.
    pub(crate) fn told(self) -> Self {
        self.tell();
        Self::printed(self.code)
    }

    /// Says how the command ended, to programs too.
    pub(crate) fn say(&self) {
        self.tell();
        if !self.message.is_empty() && crate::json_is_wanted(std::env::args_os()) {
            self.tell_event();
        }
    }

    pub(crate) fn tell(&self) {
        if !self.message.is_empty() {
            tell(&format!("error: {}", self.message));
        }
        if let Some(hint) = &self.hint {
            tell(&format!("hint: {hint}"));
        }
    }

    /// The last line of a command run with JSON output. Write errors are ignored.
    pub(crate) fn tell_event(&self) {
        let Self { code, message, hint } = self;
        let event = serde_json::json!({
            "schema": "isobit.error/1", "event": "error", "exit": code, "message": message, "hint": hint,
        });
        let _ = writeln!(std::io::stdout().lock(), "{event}");
    }

    /// What was printed says it all: an exit code without a message.
    pub(crate) fn printed(code: u8) -> Self {
        Self { code, message: String::new(), hint: None }
    }

    /// A difference was found and printed.
    pub(crate) fn difference() -> Self {
        Self::printed(1)
    }

    /// A reader that closed the pipe early is not worth a message: other tools die of the signal,
    /// whose number makes this code. The signal itself stays ignored, because it would end a
    /// training run.
    pub(crate) fn output(error: &std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return Self::printed(141);
        }
        Self { code: 7, message: format!("cannot write the result: {error}"), hint: None }
    }

    /// What does not fit may be started nevertheless, by `train`.
    pub(crate) fn with_way_out(self) -> Self {
        let is_refused = self.code == 4;
        let hint =
            self.hint.map(|hint| if is_refused { format!("{hint}; `--no-plan` starts it anyway") } else { hint });
        Self { hint, ..self }
    }

    /// Does the work, and makes a failure of a panic for want of memory.
    pub(crate) fn catch<T>(work: impl FnOnce() -> Result<T, Self>) -> Result<T, Self> {
        catch_unwind(AssertUnwindSafe(work))
            .unwrap_or_else(|thrown| Err(Self::thrown(&*thrown).unwrap_or_else(|| resume_unwind(thrown))))
    }

    /// The failure that stands for a panic for want of memory, on the host or on a device.
    fn thrown(payload: &(dyn Any + Send)) -> Option<Self> {
        if let Some(OutOfMemory { bytes }) = payload.downcast_ref() {
            return Some(Self::out_of_memory(*bytes));
        }
        let OverLimit { device, bytes, held, limit } = payload.downcast_ref()?;
        let [bytes, held, limit] = [bytes, held, limit].map(|bytes| size(*bytes as u64));
        Some(Self {
            code: 4,
            message: format!("{device}: a buffer of {bytes} exceeds --memory {limit}: {held} are taken"),
            hint: Some(
                "`isobit plan` shows what the run needs; `offload` moves parts of it to host memory".to_string(),
            ),
        })
    }

    /// Memory that the system cannot provide.
    pub(crate) fn out_of_memory(bytes: usize) -> Self {
        Self {
            code: 4,
            message: format!("out of memory: the system refused {bytes} bytes ({})", size(bytes as u64)),
            hint: Some("`isobit plan` shows what a config needs and what would need less".to_string()),
        }
    }
}

/// The failure of a run, a plan or an evaluation.
impl From<&RunError> for Failure {
    fn from(error: &RunError) -> Self {
        Self { code: error.exit_code(), message: error.to_string(), hint: error.hint() }
    }
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Self {
        Self::from(&error)
    }
}

/// The failure to read or write a file outside of a run.
impl From<FileError> for Failure {
    fn from(error: FileError) -> Self {
        Self { code: error.exit_code(), message: error.to_string(), hint: error.hint().map(str::to_string) }
    }
}

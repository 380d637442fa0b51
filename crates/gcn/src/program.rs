//! A program in memory: instructions, where each came from, kernels with what a launch needs to
//! know, and constant data.

use crate::instruction::Instruction;
use std::fmt;
use std::sync::Arc;

/// A line of a source file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Place {
    pub(crate) file: Arc<str>,
    pub(crate) line: u32,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// An instruction's text and where it comes from, for messages.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Origin {
    pub(crate) text: Box<str>,
    /// None if the compiler does not say.
    pub(crate) place: Option<Place>,
}

impl Origin {
    /// The end of a message about the instruction.
    pub(crate) fn description(&self) -> String {
        let place = self.place.as_ref().map(|place| format!(", at {place}")).unwrap_or_default();
        format!("in `{}`{place}", self.text)
    }
}

/// How a launch passes an argument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Parameter {
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
    pub(crate) is_pointer: bool,
}

/// Rounding and denormals of the MODE register at entry.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FloatMode {
    /// Bits 3:0 of MODE: 0 is round to nearest even, for both precisions.
    pub(crate) rounding: u8,
    /// Bits 5:4: 3 keeps float32 denormals.
    pub(crate) denormals: u8,
}

/// What a kernel descriptor and its metadata say.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    /// Index of the first instruction.
    pub(crate) entry: usize,
    pub(crate) shared_bytes: usize,
    pub(crate) private_bytes: usize,
    pub(crate) argument_bytes: usize,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) group_size_max: usize,
    pub(crate) mode: FloatMode,
    pub(crate) registers: EntryRegisters,
}

/// Which scalar registers hold what at entry, in this order.
#[expect(clippy::struct_excessive_bools, reason = "the descriptor has a bit for each")]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct EntryRegisters {
    pub(crate) private_buffer: bool,
    pub(crate) dispatch_pointer: bool,
    pub(crate) queue_pointer: bool,
    pub(crate) argument_pointer: bool,
    pub(crate) dispatch_id: bool,
    pub(crate) flat_scratch: bool,
    pub(crate) private_size: bool,
    pub(crate) group_id: [bool; 3],
    pub(crate) group_info: bool,
    pub(crate) scratch_offset: bool,
    /// Vector registers with work-item ids beyond the first.
    pub(crate) item_ids: u8,
}

/// A compiled program. Addresses in it are offsets into its image.
#[derive(Clone, Debug, Default)]
pub(crate) struct Program {
    pub(crate) code: Vec<Instruction>,
    pub(crate) origins: Vec<Origin>,
    pub(crate) kernels: Vec<Kernel>,
    /// Constant data. Bytes that are code are not data.
    pub(crate) image: Vec<u8>,
    /// Ranges of the image that hold data.
    pub(crate) data: Vec<std::ops::Range<usize>>,
}

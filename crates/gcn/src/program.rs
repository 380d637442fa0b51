//! A program in memory: instructions, where each came from, kernels with what a launch needs to
//! know, and constant data.

use crate::instruction::Instruction;

/// An instruction's text and line of source, for messages.
#[derive(Clone, Debug, PartialEq)]
pub struct Origin {
    pub text: Box<str>,
    /// Line of the source that was compiled; 0 if unknown.
    pub line: u32,
}

/// How a launch passes an argument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameter {
    pub offset: usize,
    pub bytes: usize,
    pub is_pointer: bool,
}

/// Rounding and denormals of the MODE register at entry.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FloatMode {
    /// Bits 3:0 of MODE: 0 is round to nearest even, for both precisions.
    pub rounding: u8,
    /// Bits 5:4: 3 keeps float32 denormals.
    pub denormals: u8,
}

/// What a kernel descriptor and its metadata say.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernel {
    pub name: String,
    /// Index of the first instruction.
    pub entry: usize,
    pub shared_bytes: usize,
    pub private_bytes: usize,
    pub argument_bytes: usize,
    pub parameters: Vec<Parameter>,
    pub group_size_max: usize,
    pub mode: FloatMode,
    pub registers: EntryRegisters,
}

/// Which scalar registers hold what at entry, in this order.
#[expect(clippy::struct_excessive_bools, reason = "the descriptor has a bit for each")]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EntryRegisters {
    pub private_buffer: bool,
    pub dispatch_pointer: bool,
    pub queue_pointer: bool,
    pub argument_pointer: bool,
    pub dispatch_id: bool,
    pub flat_scratch: bool,
    pub private_size: bool,
    pub group_id: [bool; 3],
    pub group_info: bool,
    pub scratch_offset: bool,
    /// Vector registers with work-item ids beyond the first.
    pub item_ids: u8,
}

/// A compiled program. Addresses in it are offsets into its image.
#[derive(Clone, Debug, Default)]
pub struct Program {
    pub code: Vec<Instruction>,
    pub origins: Vec<Origin>,
    pub kernels: Vec<Kernel>,
    /// Constant data. Bytes that are code are not data.
    pub image: Vec<u8>,
    /// Ranges of the image that hold data.
    pub data: Vec<std::ops::Range<usize>>,
}

impl Program {
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }
}

//! Reads the assembly that clang writes with `-S`: instructions, labels, constant data, kernel
//! descriptors (`.amdhsa_*`), arguments (metadata) and lines of source (`.loc`).

use crate::decode::{Places, decode};
use crate::metadata;
use crate::program::{EntryRegisters, FloatMode, Kernel, Origin, Place, Program};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Distance between the addresses of two instructions; only differences to data matter.
const STEP: u64 = 8;

/// Where a label points.
#[derive(Clone, Copy, Debug)]
enum Label {
    Code(usize),
    Data(u64),
}

/// An instruction that waits for all labels to be known.
struct Pending<'a> {
    text: &'a str,
    place: Option<Place>,
}

#[derive(Default)]
struct Reader<'a> {
    labels: BTreeMap<&'a str, Label>,
    pending: Vec<Pending<'a>>,
    data: Vec<u8>,
    descriptors: Vec<(&'a str, BTreeMap<&'a str, u64>)>,
    metadata: String,
    files: BTreeMap<&'a str, Arc<str>>,
    place: Option<Place>,
}

/// What the current line belongs to.
#[derive(Clone, Copy, PartialEq)]
enum Section {
    Code,
    Data,
    Descriptor,
    Metadata,
    Other,
}

/// Reads assembly; an error names the line.
pub(crate) fn read(text: &str) -> Result<Program, String> {
    let mut reader = Reader::default();
    let mut section = Section::Code;
    for (index, line) in text.lines().enumerate() {
        section = reader.line(section, line).map_err(|error| {
            let shown = line.trim();
            format!("line {} of the assembly: {error}: `{shown}`", index + 1)
        })?;
    }
    reader.finish()
}

/// The line without its comment and surrounding space.
fn stripped(line: &str) -> &str {
    line.split(';').next().unwrap_or_default().trim()
}

impl<'a> Reader<'a> {
    fn line(&mut self, section: Section, line: &'a str) -> Result<Section, String> {
        if section == Section::Metadata {
            if line.trim() == ".end_amdgpu_metadata" {
                return Ok(Section::Other);
            }
            self.metadata.push_str(line);
            self.metadata.push('\n');
            return Ok(section);
        }
        let text = stripped(line);
        if text.is_empty() {
            return Ok(section);
        }
        if let Some(label) = text.strip_suffix(':').filter(|label| !label.contains(char::is_whitespace)) {
            match section {
                Section::Code => _ = self.labels.insert(label, Label::Code(self.pending.len())),
                Section::Data => _ = self.labels.insert(label, Label::Data(self.data.len() as u64)),
                _ => {}
            }
            return Ok(section);
        }
        if text.starts_with('.') {
            return self.directive(section, text);
        }
        match section {
            Section::Code => self.pending.push(Pending { text, place: self.place.clone() }),
            Section::Other => {}
            _ => return Err("an instruction outside the code".to_string()),
        }
        Ok(section)
    }

    fn directive(&mut self, section: Section, text: &'a str) -> Result<Section, String> {
        let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let rest = rest.trim();
        if section == Section::Descriptor {
            if name == ".end_amdhsa_kernel" {
                return Ok(Section::Other);
            }
            let field = name.strip_prefix(".amdhsa_").ok_or("not a field of a kernel descriptor")?;
            let value = rest.parse().map_err(|_| format!("`{rest}` is not a number"))?;
            let (_, fields) = self.descriptors.last_mut().ok_or("no descriptor")?;
            fields.insert(field, value);
            return Ok(section);
        }
        Ok(match name {
            ".text" => Section::Code,
            ".section" => match rest.split(',').next().unwrap_or_default() {
                ".text" => Section::Code,
                name if name.starts_with(".rodata") || name.starts_with(".data") || name.starts_with(".bss") => {
                    Section::Data
                }
                _ => Section::Other,
            },
            ".amdhsa_kernel" => {
                self.descriptors.push((rest, BTreeMap::new()));
                Section::Descriptor
            }
            ".amdgpu_metadata" => Section::Metadata,
            ".file" => {
                // A number, the folder if it is another one, the name, and perhaps a digest.
                if let (Some(number), Some(name)) = (rest.split_whitespace().next(), rest.split('"').rev().nth(1)) {
                    self.files.insert(number, name.rsplit('/').next().unwrap_or(name).into());
                }
                section
            }
            ".loc" => {
                let mut words = rest.split_whitespace();
                let file = words.next().and_then(|number| self.files.get(number)).cloned();
                // Line 0 means that the compiler has none: the last one is the best guess.
                let line = words.next().and_then(|line| line.parse().ok()).filter(|line| *line > 0);
                self.place = file.zip(line).map(|(file, line)| Place { file, line }).or(self.place.take());
                section
            }
            _ if section == Section::Data => {
                self.datum(name, rest)?;
                section
            }
            _ => section,
        })
    }

    /// A directive that places bytes or moves on.
    fn datum(&mut self, name: &str, rest: &str) -> Result<(), String> {
        let first = rest.split(',').next().unwrap_or_default().trim();
        let value = || first.parse::<i128>().map_err(|_| format!("`{first}` is not a number"));
        match name {
            ".byte" => self.data.push(value()? as u8),
            ".short" | ".2byte" => self.data.extend((value()? as u16).to_le_bytes()),
            ".long" | ".4byte" => self.data.extend((value()? as u32).to_le_bytes()),
            ".quad" | ".8byte" => self.data.extend((value()? as u64).to_le_bytes()),
            ".zero" => {
                let count = usize::try_from(value()?).ok().filter(|count| *count <= 1 << 24);
                let count = count.ok_or("more zeros than constants need")?;
                self.data.resize(self.data.len() + count, 0);
            }
            ".p2align" => {
                let power = u32::try_from(value()?).ok().filter(|power| *power <= 12).ok_or("a strange alignment")?;
                self.data.resize(self.data.len().next_multiple_of(1 << power), 0);
            }
            ".type" | ".size" | ".globl" | ".protected" | ".weak" | ".hidden" | ".local" => {}
            _ => return Err("unknown data".to_string()),
        }
        Ok(())
    }

    fn finish(self) -> Result<Program, String> {
        let mut program = Program { image: self.data.clone(), ..Program::default() };
        program.data.push(0..self.data.len());
        let mut last_pc = None;
        for (index, pending) in self.pending.iter().enumerate() {
            let next = self.code_address(index + 1);
            if pending.text.starts_with("s_getpc_b64") {
                last_pc = Some(next);
            }
            let here = Here { reader: &self, next, last_pc };
            let origin = Origin { text: pending.text.into(), place: pending.place.clone() };
            program
                .code
                .push(decode(&origin.text, &here).map_err(|error| format!("{error}, {}", origin.description()))?);
            program.origins.push(origin);
        }
        let mut arguments = metadata::read(&self.metadata)?;
        for (name, fields) in &self.descriptors {
            let Some(Label::Code(entry)) = self.labels.get(name).copied() else {
                return Err(format!("the kernel {name} has no code"));
            };
            let found = arguments.remove(*name).ok_or_else(|| format!("the kernel {name} has no metadata"))?;
            program.kernels.push(described(name, fields, entry, found)?);
        }
        Ok(program)
    }

    /// Code comes after the data.
    fn code_address(&self, index: usize) -> u64 {
        (self.data.len() as u64).next_multiple_of(256) + index as u64 * STEP
    }
}

/// The kernel of a descriptor.
fn described(
    name: &str,
    fields: &BTreeMap<&str, u64>,
    entry: usize,
    arguments: metadata::Arguments,
) -> Result<Kernel, String> {
    let field = |name: &str| fields.get(name).copied().unwrap_or(0);
    let set = |name: &str| field(name) != 0;
    if field("wavefront_size32") != 0 || field("uses_dynamic_stack") != 0 {
        return Err(format!("{name}: waves of 32 lanes and dynamic stacks are not supported"));
    }
    Ok(Kernel {
        name: name.to_string(),
        entry,
        shared_bytes: field("group_segment_fixed_size") as usize,
        private_bytes: field("private_segment_fixed_size") as usize,
        argument_bytes: field("kernarg_size") as usize,
        parameters: arguments.parameters,
        group_size_max: arguments.group_size_max,
        mode: FloatMode {
            rounding: (field("float_round_mode_32") | field("float_round_mode_16_64") << 2) as u8,
            denormals: field("float_denorm_mode_32") as u8,
        },
        registers: EntryRegisters {
            private_buffer: set("user_sgpr_private_segment_buffer"),
            dispatch_pointer: set("user_sgpr_dispatch_ptr"),
            queue_pointer: set("user_sgpr_queue_ptr"),
            argument_pointer: set("user_sgpr_kernarg_segment_ptr"),
            dispatch_id: set("user_sgpr_dispatch_id"),
            flat_scratch: set("user_sgpr_flat_scratch_init"),
            private_size: set("user_sgpr_private_segment_size"),
            group_id: ["x", "y", "z"].map(|axis| set(&format!("system_sgpr_workgroup_id_{axis}"))),
            group_info: set("system_sgpr_workgroup_info"),
            scratch_offset: set("system_sgpr_private_segment_wavefront_offset"),
            item_ids: field("system_vgpr_workitem_id") as u8,
        },
    })
}

/// The surroundings of one instruction.
struct Here<'a> {
    reader: &'a Reader<'a>,
    next: u64,
    /// What the last `s_getpc_b64` gives.
    last_pc: Option<u64>,
}

impl Places for Here<'_> {
    fn target(&self, operand: &str) -> Result<usize, String> {
        match self.reader.labels.get(operand) {
            Some(Label::Code(index)) => Ok(*index),
            _ => Err(format!("no label `{operand}`")),
        }
    }

    fn literal(&self, operand: &str) -> Result<Option<u32>, String> {
        // The addends are the distances of the two literals from the address that was taken.
        let low = operand.strip_suffix("@rel32@lo+4");
        let Some(symbol) = low.or_else(|| operand.strip_suffix("@rel32@hi+12")) else { return Ok(None) };
        let Some(Label::Data(address)) = self.reader.labels.get(symbol) else {
            return Err(format!("no data called `{symbol}`"));
        };
        let distance = address.wrapping_sub(self.last_pc.ok_or("no address to be relative to")?);
        Ok(Some(if low.is_some() { distance as u32 } else { (distance >> 32) as u32 }))
    }

    fn next(&self) -> u64 {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_know_file_and_line() {
        let text = "\t.text\n\t.file\t0 \"/folder\" \"-\" md5 0x12\n\t.file\t1 \"a.cl\"\nk:\n\t.loc\t1 3 9 is_stmt 0 \
                    ; a.cl:3:9\n\ts_nop 0\n\t.file\t2 \"/elsewhere/b.h\"\n\t.loc\t2 7 1\n\ts_nop 0\n\t.loc\t1 0 1\n\ts_endpgm\n";
        let program = read(text).expect("three instructions");
        let found: Vec<String> = program.origins.iter().map(Origin::description).collect();
        assert_eq!(found, ["in `s_nop 0`, at a.cl:3", "in `s_nop 0`, at b.h:7", "in `s_endpgm`, at b.h:7"]);
        let unknown = read(&text.replace("s_endpgm", "s_nonsense")).expect_err("an unknown instruction");
        assert!(unknown.ends_with("in `s_nonsense`, at b.h:7"), "{unknown}");
    }
}

//! Reads code objects (linked ELF files): the image, kernel descriptors and metadata by ourselves,
//! the instructions and their lines of source as `llvm-objdump` prints them.

use crate::decode::{Places, decode};
use crate::message_pack::{self, Value};
use crate::metadata::{self, Arguments};
use crate::program::{EntryRegisters, FloatMode, Kernel, Origin, Place, Program};
use std::collections::BTreeMap;

/// BOUND: bytes of an image; ours have less than a hundredth.
const IMAGE_BYTES_MAX: u64 = 1 << 26;
const MACHINE: u16 = 224;
const LINKED: u16 = 3;
const LOADED: u32 = 1;
const EXECUTABLE: u32 = 1;
const SYMBOLS: u32 = 2;
const DYNAMIC_SYMBOLS: u32 = 11;
const NOTES: u32 = 7;
const DESCRIPTOR_BYTES: usize = 64;

/// Bytes of a file, read with a bound.
#[derive(Clone, Copy)]
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn part(self, at: u64, length: u64) -> Result<&'a [u8], String> {
        let end = at.checked_add(length).filter(|end| *end <= self.0.len() as u64);
        end.map(|end| &self.0[at as usize..end as usize]).ok_or_else(|| format!("the file ends before byte {at}"))
    }

    fn number<const N: usize>(self, at: u64) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.part(at, N as u64)?);
        Ok(bytes)
    }

    fn u16(self, at: u64) -> Result<u16, String> {
        self.number(at).map(u16::from_le_bytes)
    }

    fn u32(self, at: u64) -> Result<u32, String> {
        self.number(at).map(u32::from_le_bytes)
    }

    fn u64(self, at: u64) -> Result<u64, String> {
        self.number(at).map(u64::from_le_bytes)
    }
}

/// A section's type, place in the file and linked section.
struct Section {
    kind: u32,
    at: u64,
    length: u64,
    link: u32,
}

/// Reads a code object, with the text that `llvm-objdump -d -l` prints for it.
pub(crate) fn read(file: &[u8], disassembly: &str) -> Result<Program, String> {
    let elf = Bytes(file);
    if elf.part(0, 4)? != b"\x7fELF" || elf.u16(18)? != MACHINE {
        return Err("not a code object of an AMD device".to_string());
    }
    if elf.u16(16)? != LINKED {
        return Err("a code object that is not linked".to_string());
    }
    let mut program = Program::default();
    load(elf, &mut program)?;
    let sections = sections(elf)?;
    let mut arguments = BTreeMap::new();
    for section in sections.iter().filter(|section| section.kind == NOTES) {
        arguments.extend(notes(Bytes(elf.part(section.at, section.length)?))?);
    }
    let entries = instructions(disassembly, &mut program)?;
    for (name, address) in descriptors(elf, &sections)? {
        let found: Arguments = arguments.remove(&name).ok_or_else(|| format!("the kernel {name} has no metadata"))?;
        let kernel = described(&name, address, &program.image, &entries, found)?;
        program.kernels.push(kernel);
    }
    Ok(program)
}

/// The image of the loaded segments.
fn load(elf: Bytes, program: &mut Program) -> Result<(), String> {
    let (table, size, count) = (elf.u64(32)?, elf.u16(54)?, elf.u16(56)?);
    for index in 0..u64::from(count) {
        let header = table + index * u64::from(size);
        if elf.u32(header)? != LOADED {
            continue;
        }
        let (at, address) = (elf.u64(header + 8)?, elf.u64(header + 16)?);
        let (in_file, in_memory) = (elf.u64(header + 32)?, elf.u64(header + 40)?);
        let end = address.checked_add(in_memory.max(in_file)).filter(|end| *end <= IMAGE_BYTES_MAX);
        let end = end.ok_or("a segment too large for a program of kernels")? as usize;
        if program.image.len() < end {
            program.image.resize(end, 0);
        }
        let first = address as usize;
        program.image[first..first + in_file as usize].copy_from_slice(elf.part(at, in_file)?);
        if elf.u32(header + 4)? & EXECUTABLE == 0 {
            program.data.push(first..end);
        }
    }
    Ok(())
}

fn sections(elf: Bytes) -> Result<Vec<Section>, String> {
    let (table, size, count) = (elf.u64(40)?, elf.u16(58)?, elf.u16(60)?);
    let section = |index: u64| {
        let header = table + index * u64::from(size);
        let (kind, link) = (elf.u32(header + 4)?, elf.u32(header + 40)?);
        Ok(Section { kind, at: elf.u64(header + 24)?, length: elf.u64(header + 32)?, link })
    };
    (0..u64::from(count)).map(section).collect()
}

/// Names and addresses of the kernel descriptors.
fn descriptors(elf: Bytes, sections: &[Section]) -> Result<BTreeMap<String, u64>, String> {
    let mut found = BTreeMap::new();
    for section in sections.iter().filter(|section| [SYMBOLS, DYNAMIC_SYMBOLS].contains(&section.kind)) {
        let names = sections.get(section.link as usize).ok_or("symbols without names")?;
        let names = elf.part(names.at, names.length)?;
        for index in 0..section.length / 24 {
            let symbol = section.at + 24 * index;
            let name = names.get(elf.u32(symbol)? as usize..).unwrap_or_default();
            let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
            let name = String::from_utf8_lossy(name).into_owned();
            if let Some(name) = name.strip_suffix(".kd") {
                found.insert(name.to_string(), elf.u64(symbol + 8)?);
            }
        }
    }
    Ok(found)
}

/// The kernels of the metadata notes.
fn notes(notes: Bytes) -> Result<BTreeMap<String, Arguments>, String> {
    let mut at = 0;
    while at + 12 <= notes.0.len() as u64 {
        let (name, content) = (u64::from(notes.u32(at)?), u64::from(notes.u32(at + 4)?));
        let name_at = at + 12;
        let content_at = name_at + name.next_multiple_of(4);
        if notes.part(name_at, name)? == b"AMDGPU\0" {
            return kernels(&message_pack::read(notes.part(content_at, content)?)?);
        }
        at = content_at + content.next_multiple_of(4);
    }
    Ok(BTreeMap::new())
}

fn kernels(metadata: &Value) -> Result<BTreeMap<String, Arguments>, String> {
    let mut found = BTreeMap::new();
    for kernel in metadata.field("amdhsa.kernels").map(Value::items).unwrap_or_default() {
        let name = kernel.field(".name").and_then(Value::text).ok_or("a kernel without a name")?;
        let arguments = kernel.field(".args").map(Value::items).unwrap_or_default();
        let parameters = arguments.iter().map(|argument| {
            let number = |key| argument.field(key).and_then(Value::number);
            let kind = argument.field(".value_kind").and_then(Value::text);
            metadata::parameter(number(".offset"), number(".size"), kind)
        });
        let parameters = parameters.collect::<Result<_, _>>().map_err(|error| format!("{name}: {error}"))?;
        let group_size_max = kernel.field(".max_flat_workgroup_size").and_then(Value::number).unwrap_or(1024) as usize;
        found.insert(name.to_string(), Arguments { parameters, group_size_max });
    }
    Ok(found)
}

/// The kernel of a descriptor in the image.
fn described(
    name: &str,
    address: u64,
    image: &[u8],
    entries: &BTreeMap<u64, usize>,
    arguments: Arguments,
) -> Result<Kernel, String> {
    let bytes = Bytes(Bytes(image).part(address, DESCRIPTOR_BYTES as u64)?);
    let (first, second, properties) = (bytes.u32(48)?, bytes.u32(52)?, bytes.u16(56)?);
    let entry = address.wrapping_add(bytes.u64(16)?);
    let entry = *entries.get(&entry).ok_or_else(|| format!("the kernel {name} has no code"))?;
    if properties >> 10 & 3 != 0 {
        return Err(format!("{name}: waves of 32 lanes and dynamic stacks are not supported"));
    }
    let has = |bit: u32| properties >> bit & 1 == 1;
    let system = |bit: u32| second >> bit & 1 == 1;
    Ok(Kernel {
        name: name.to_string(),
        entry,
        shared_bytes: bytes.u32(0)? as usize,
        private_bytes: bytes.u32(4)? as usize,
        argument_bytes: bytes.u32(8)? as usize,
        parameters: arguments.parameters,
        group_size_max: arguments.group_size_max,
        mode: FloatMode { rounding: (first >> 12 & 15) as u8, denormals: (first >> 16 & 3) as u8 },
        registers: EntryRegisters {
            private_buffer: has(0),
            dispatch_pointer: has(1),
            queue_pointer: has(2),
            argument_pointer: has(3),
            dispatch_id: has(4),
            flat_scratch: has(5),
            private_size: has(6),
            group_id: [system(7), system(8), system(9)],
            group_info: system(10),
            scratch_offset: system(0),
            item_ids: (second >> 11 & 3) as u8,
        },
    })
}

/// The surroundings of an instruction: addresses are those of the file.
struct Here<'a> {
    entries: &'a BTreeMap<u64, usize>,
    address: u64,
}

impl Places for Here<'_> {
    fn target(&self, operand: &str) -> Result<usize, String> {
        let distance: u16 = operand.parse().map_err(|_| format!("`{operand}` is no distance"))?;
        let target = self.address.wrapping_add(4).wrapping_add_signed(4 * i64::from(distance as i16));
        self.entries.get(&target).copied().ok_or_else(|| format!("a branch to {target:#x}, where no instruction is"))
    }

    fn literal(&self, _: &str) -> Result<Option<u32>, String> {
        Ok(None)
    }

    fn next(&self) -> u64 {
        self.address + 4
    }
}

/// The line of source that a comment `; FILE:LINE` of the disassembly names.
fn place(comment: &str) -> Option<Place> {
    let (path, line) = comment.strip_prefix("; ")?.rsplit_once(':')?;
    let line = line.parse().ok().filter(|line| *line > 0)?;
    Some(Place { file: path.rsplit('/').next()?.into(), line })
}

/// Decodes lines of the form `mnemonic operands // ADDRESS: CODE`, with comments in between that
/// say which line of source follows; where each instruction begins.
fn instructions(disassembly: &str, program: &mut Program) -> Result<BTreeMap<u64, usize>, String> {
    let (mut lines, mut last) = (Vec::new(), None);
    for line in disassembly.lines() {
        if line.starts_with("; ") {
            // One without a line names the function; the compiler may know no line, too.
            last = place(line).or(last);
            continue;
        }
        let Some((text, rest)) = line.split_once("//") else { continue };
        let address = rest.trim_start().split(':').next().unwrap_or_default();
        let address = u64::from_str_radix(address, 16).map_err(|_| format!("no address in `{line}`"))?;
        lines.push((Origin { text: text.trim().into(), place: last.clone() }, address));
    }
    let entries: BTreeMap<u64, usize> = lines.iter().enumerate().map(|(index, line)| (line.1, index)).collect();
    for (origin, address) in lines {
        let here = Here { entries: &entries, address };
        program.code.push(decode(&origin.text, &here).map_err(|error| format!("{error}, {}", origin.description()))?);
        program.origins.push(origin);
    }
    if program.code.is_empty() { Err("llvm-objdump printed no instruction".to_string()) } else { Ok(entries) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_code_object_is_refused() {
        for bytes in [&b""[..], b"\x7fELF", &[0; 200]] {
            assert!(read(bytes, "").is_err());
        }
        let mut header = vec![0; 64];
        header[..4].copy_from_slice(b"\x7fELF");
        header[16] = 1;
        header[18] = 224;
        assert!(read(&header, "").expect_err("not linked").contains("linked"));
    }

    #[test]
    fn branches_count_dwords() {
        let mut program = Program::default();
        let text = "\ts_cbranch_scc1 1 // 000000001000: BF850001 <x>\n\ts_nop 0 // 000000001004: BF800000\n\
                    \ts_branch 65533 // 000000001008: BF82FFFD\n";
        instructions(text, &mut program).expect("three instructions");
        let targets: Vec<_> = program
            .code
            .iter()
            .filter_map(|found| match found {
                crate::instruction::Instruction::Branch { target, .. } => Some(*target),
                _ => None,
            })
            .collect();
        assert_eq!(targets, [2, 0]);
        let wild = "\ts_branch 7 // 000000001000: BF820007\n";
        assert!(instructions(wild, &mut Program::default()).is_err());
    }

    #[test]
    fn instructions_know_file_and_line() {
        let text = "0000000000001600 <k>:\n; k():\n; /folder/a.cl:2\n\ts_nop 0 // 000000001600: BF800000\n\
                    ; b.h:7\n\ts_nop 1 // 000000001604: BF800001\n; a.cl:0\n\ts_endpgm // 000000001608: BF810000\n";
        let mut program = Program::default();
        instructions(text, &mut program).expect("three instructions");
        let found: Vec<String> = program.origins.iter().map(Origin::description).collect();
        assert_eq!(found, ["in `s_nop 0`, at a.cl:2", "in `s_nop 1`, at b.h:7", "in `s_endpgm`, at b.h:7"]);
        let unknown = instructions(&text.replace("s_endpgm", "s_nonsense"), &mut Program::default());
        let unknown = unknown.expect_err("an unknown instruction");
        assert!(unknown.ends_with("in `s_nonsense`, at b.h:7"), "{unknown}");
    }
}

//! Reads a cubin, NVIDIA's machine code in an ELF file: the kernels it has and the parameters that
//! each takes. `cuModuleGetFunction` and `cuLaunchKernel` look them up in the same tables.

/// A kernel as the machine code describes it.
#[derive(Debug, PartialEq)]
pub(super) struct Entry {
    pub(super) name: String,
    /// Bytes of each parameter, in order.
    pub(super) parameters: Vec<usize>,
    /// Threads per block that it was compiled for, if it says.
    pub(super) threads: Option<usize>,
}

const SYMBOL_TABLE: u32 = 2;
const SYMBOL_BYTES: usize = 24;
/// Set in `st_other` for a function that the host may launch.
const ENTRY_POINT: u8 = 0x10;
/// Attributes of `.nv.info.<kernel>`, each after a format byte.
const MAX_THREADS: u8 = 0x05;
const PARAMETER: u8 = 0x17;
/// The format with a 16-bit length; the others carry their two bytes of value in its place.
const SIZED: u8 = 0x04;

/// All kernels; none if `code` is not such a file.
pub(super) fn entries(code: &[u8]) -> Option<Vec<Entry>> {
    let sections = sections(code)?;
    let mut found = Vec::new();
    for table in sections.iter().filter(|section| section.kind == SYMBOL_TABLE) {
        let strings = sections.get(table.link)?.bytes;
        for symbol in table.bytes.chunks_exact(SYMBOL_BYTES).filter(|symbol| symbol[5] & ENTRY_POINT != 0) {
            let name = text(strings, u32_at(symbol, 0)? as usize)?;
            // Sections that are reserved have the mark too, but no code.
            if !sections.iter().any(|section| section.name == format!(".text.{name}")) {
                continue;
            }
            let information = sections.iter().find(|section| section.name == format!(".nv.info.{name}"))?;
            let (parameters, threads) = attributes(information.bytes)?;
            found.push(Entry { name: name.to_string(), parameters, threads });
        }
    }
    Some(found)
}

struct Section<'a> {
    name: String,
    kind: u32,
    link: usize,
    bytes: &'a [u8],
}

fn sections(code: &[u8]) -> Option<Vec<Section<'_>>> {
    const HEADER_BYTES: usize = 64;
    const NO_BYTES: u32 = 8;
    // 64-bit, little-endian.
    code.starts_with(b"\x7fELF\x02\x01").then_some(())?;
    let start = usize::try_from(u64_at(code, 0x28)?).ok()?;
    let [count, names] = [0x3c, 0x3e].map(|at| u16_at(code, at).map(usize::from));
    let headers = code.get(start..)?.chunks_exact(HEADER_BYTES).take(count?);
    let bytes_of = |header: &[u8]| {
        let [start, size] = [0x18, 0x20].map(|at| u64_at(header, at).and_then(|x| usize::try_from(x).ok()));
        let kind = u32_at(header, 4)?;
        if kind == NO_BYTES { Some(&code[..0]) } else { code.get(start?..start?.checked_add(size?)?) }
    };
    let names = bytes_of(headers.clone().nth(names?)?)?;
    headers
        .map(|header| {
            Some(Section {
                name: text(names, u32_at(header, 0)? as usize)?.to_string(),
                kind: u32_at(header, 4)?,
                link: u32_at(header, 0x28)? as usize,
                bytes: bytes_of(header)?,
            })
        })
        .collect()
}

/// Sizes of the parameters and the limit on threads.
fn attributes(mut bytes: &[u8]) -> Option<(Vec<usize>, Option<usize>)> {
    let (mut parameters, mut threads) = (Vec::new(), None);
    while !bytes.is_empty() {
        let (format, attribute, short) = (*bytes.first()?, *bytes.get(1)?, u16_at(bytes, 2)?);
        let length = if format == SIZED { usize::from(short) } else { 0 };
        let value = bytes.get(4..4 + length)?;
        match attribute {
            MAX_THREADS => {
                let [x, y, z] = [0, 4, 8].map(|at| u32_at(value, at).map(|size| size as usize));
                threads = Some(x? * y? * z?);
            }
            // The size is in the upper bits of the last word, which also says where it is kept.
            PARAMETER => parameters.push((u16_at(value, 4)?, (u32_at(value, 8)? >> 18) as usize)),
            _ => {}
        }
        bytes = &bytes[4 + length..];
    }
    parameters.sort_unstable();
    Some((parameters.into_iter().map(|(_, size)| size).collect(), threads))
}

fn text(bytes: &[u8], start: usize) -> Option<&str> {
    let rest = bytes.get(start..)?;
    std::str::from_utf8(&rest[..rest.iter().position(|&byte| byte == 0)?]).ok()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sections as (name, kind, link, bytes) in the ELF format.
    fn elf(sections: &[(&str, u32, u32, &[u8])]) -> Vec<u8> {
        let mut names = vec![];
        let mut code = vec![0; 64];
        let mut headers = vec![];
        for (name, kind, link, bytes) in sections {
            let mut header = [0; 64];
            header[0..4].copy_from_slice(&(names.len() as u32).to_le_bytes());
            header[4..8].copy_from_slice(&kind.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&(code.len() as u64).to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
            header[0x28..0x2c].copy_from_slice(&link.to_le_bytes());
            headers.extend(header);
            code.extend_from_slice(bytes);
            names.extend([name.as_bytes(), &[0]].concat());
        }
        let mut last = [0; 64];
        last[0..4].copy_from_slice(&(names.len() as u32 - 1).to_le_bytes());
        last[0x18..0x20].copy_from_slice(&(code.len() as u64).to_le_bytes());
        last[0x20..0x28].copy_from_slice(&(names.len() as u64).to_le_bytes());
        code.extend(names);
        let start = code.len() as u64;
        code.extend(headers);
        code.extend(last);
        code[..6].copy_from_slice(b"\x7fELF\x02\x01");
        code[0x28..0x30].copy_from_slice(&start.to_le_bytes());
        code[0x3c..0x3e].copy_from_slice(&(sections.len() as u16 + 1).to_le_bytes());
        code[0x3e..0x40].copy_from_slice(&(sections.len() as u16).to_le_bytes());
        code
    }

    fn symbol(name: u32, other: u8) -> Vec<u8> {
        let mut bytes = vec![0; SYMBOL_BYTES];
        bytes[..4].copy_from_slice(&name.to_le_bytes());
        bytes[5] = other;
        bytes
    }

    fn parameter(ordinal: u8, size: u32) -> Vec<u8> {
        let mut bytes = vec![SIZED, PARAMETER, 12, 0, 0, 0, 0, 0, ordinal, 0, 0, 0];
        bytes.extend((size << 18 | 0x1_f000).to_le_bytes());
        bytes
    }

    #[test]
    fn kernels_with_their_parameters_in_order() {
        let symbols = [symbol(0, 0), symbol(1, ENTRY_POINT), symbol(5, 0), symbol(7, ENTRY_POINT)].concat();
        let limit = [[SIZED, MAX_THREADS, 12, 0], [0, 1, 0, 0], [2, 0, 0, 0], [1, 0, 0, 0]].concat();
        let flag = vec![3, 0x1b, 255, 0];
        let information = [parameter(1, 4), flag, limit, parameter(0, 72)].concat();
        let code = elf(&[
            (".strtab", 3, 0, b"\0run\0f\0reserved\0"),
            (".symtab", SYMBOL_TABLE, 0, &symbols),
            (".text.run", 1, 0, &[0; 4]),
            (".nv.info.run", 0x7000_0000, 1, &information),
        ]);
        let run = Entry { name: "run".to_string(), parameters: vec![72, 4], threads: Some(512) };
        assert_eq!(entries(&code), Some(vec![run]));
        assert_eq!(entries(&code[..code.len() - 1]), None);
        assert_eq!(entries(b"\x7fELF\x02\x01"), None);
        assert_eq!(entries(b""), None);
    }
}

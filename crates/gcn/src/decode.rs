//! One line of assembly to one instruction. Anything unknown is an error: a wrong guess would be a
//! wrong result.

use crate::instruction::*;
use crate::operand::{number, operand, scalar, scalar_source, vector, wide_source};

/// What a line may refer to outside itself.
pub(crate) trait Places {
    /// The index of the instruction that a branch operand names.
    fn target(&self, operand: &str) -> Result<usize, String>;
    /// The value of a symbolic literal such as `table@rel32@lo+4`, if the operand is one.
    fn literal(&self, operand: &str) -> Result<Option<u32>, String>;
    /// The address of the next instruction in the image.
    fn next(&self) -> u64;
}

/// A mnemonic without the suffix of its encoding.
pub fn without_encoding(mnemonic: &str) -> &str {
    let suffixes = ["_e32", "_e64", "_sdwa", "_dpp"];
    suffixes.iter().find_map(|suffix| mnemonic.strip_suffix(suffix)).unwrap_or(mnemonic)
}

/// A line, split.
struct Line<'a> {
    /// Without the encoding suffix.
    mnemonic: &'a str,
    operands: Vec<&'a str>,
    modifiers: Vec<&'a str>,
}

impl<'a> Line<'a> {
    fn new(text: &'a str) -> Self {
        let text = text.trim();
        let (mnemonic, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let mnemonic = without_encoding(mnemonic);
        let (mut operands, mut modifiers) = (Vec::new(), Vec::new());
        for field in outside(rest, |c| c == ',') {
            let mut words = outside(field, char::is_whitespace).into_iter().filter(|word| !word.is_empty());
            operands.extend(words.next());
            modifiers.extend(words);
        }
        Self { mnemonic, operands, modifiers }
    }

    /// Exactly `N` operands.
    fn operands<const N: usize>(&self) -> Result<[&'a str; N], String> {
        let found = self.operands.len();
        <[&str; N]>::try_from(self.operands.clone()).map_err(|_| format!("it has {found} operands, not {N}"))
    }

    /// The value of `name:VALUE` among the modifiers, which it leaves.
    fn field(&mut self, name: &str) -> Option<&'a str> {
        let value = |modifier: &&'a str| modifier.strip_prefix(name)?.strip_prefix(':');
        let at = self.modifiers.iter().position(|modifier| value(modifier).is_some())?;
        value(&self.modifiers.swap_remove(at))
    }

    /// A numeric field; 0 if it is missing.
    fn number(&mut self, name: &str) -> Result<i64, String> {
        self.field(name).map_or(Ok(0), number)
    }

    fn flag(&mut self, name: &str) -> bool {
        let at = self.modifiers.iter().position(|modifier| *modifier == name);
        at.map(|at| self.modifiers.swap_remove(at)).is_some()
    }

    /// No modifier may be left over.
    fn finish(&self) -> Result<(), String> {
        if self.modifiers.is_empty() { Ok(()) } else { Err(format!("unknown modifiers {:?}", self.modifiers)) }
    }
}

/// Splits at separators outside parentheses and brackets.
fn outside(text: &str, separator: impl Fn(char) -> bool) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0u32, 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth = depth.saturating_sub(1),
            c if depth == 0 && separator(c) => {
                parts.push(text[start..at].trim());
                start = at + c.len_utf8();
            }
            _ => {}
        }
    }
    parts.push(text[start..].trim());
    parts
}

/// The instruction on a line without comments and labels.
pub(crate) fn decode(text: &str, places: &dyn Places) -> Result<Instruction, String> {
    let mut line = Line::new(text);
    let mut found = None;
    for group in [control, scalar_alu, scalar_short, vector_alu, vector_group, vector_special, global, shared, private]
    {
        if found.is_none() {
            found = group(&mut line, places)?;
        }
    }
    line.finish()?;
    found.ok_or_else(|| "unknown instruction".to_string())
}

type Found = Result<Option<Instruction>, String>;

fn control(line: &mut Line, places: &dyn Places) -> Found {
    if let Some(condition) = Condition::from_mnemonic(line.mnemonic) {
        let [target] = line.operands()?;
        return Ok(Some(Instruction::Branch { condition, target: places.target(target)? }));
    }
    Ok(Some(match line.mnemonic {
        // These change timing, not values; the modifiers of a wait are further counters.
        "s_nop" | "s_waitcnt" => {
            line.modifiers.retain(|word| !word.contains("cnt("));
            Instruction::Nop
        }
        "s_endpgm" => Instruction::End,
        "s_barrier" => Instruction::Barrier,
        "s_set_gpr_idx_off" => Instruction::IndexOff,
        _ => return Ok(None),
    }))
}

/// A source of 32 bits that may be symbolic.
fn literal_source(text: &str, wide: bool, places: &dyn Places) -> Result<ScalarSource, String> {
    match places.literal(text)? {
        Some(value) => Ok(ScalarSource::Constant(value as u64)),
        None => scalar_source(text, wide),
    }
}

fn width(wide: bool) -> u16 {
    if wide { 2 } else { 1 }
}

fn scalar_alu(line: &mut Line, places: &dyn Places) -> Found {
    if let Some(op) = ScalarUnary::from_mnemonic(line.mnemonic) {
        let [dst, a] = line.operands()?;
        let (dst, a) = (scalar(dst, width(op.is_wide()))?, scalar_source(a, op.is_wide())?);
        return Ok(Some(Instruction::ScalarUnary { op, dst, a }));
    }
    if let Some(op) = ScalarBinary::from_mnemonic(line.mnemonic) {
        let [dst, a, b] =
            if op.is_in_place() { line.operands().map(|[dst, b]| [dst, dst, b])? } else { line.operands()? };
        let dst = scalar(dst, width(op.is_wide()))?;
        let a = literal_source(a, op.is_wide(), places)?;
        let b = literal_source(b, op.is_wide() && !op.is_wide_shift(), places)?;
        return Ok(Some(Instruction::ScalarBinary { op, dst, a, b }));
    }
    if let Some(op) = ScalarCompare::from_mnemonic(line.mnemonic) {
        let [a, b] = line.operands()?;
        let (a, b) = (scalar_source(a, op.is_wide())?, scalar_source(b, op.is_wide())?);
        return Ok(Some(Instruction::ScalarCompare { op, a, b }));
    }
    Ok(None)
}

/// The 16-bit field of the short forms, printed without its sign.
fn short(text: &str, signed: bool) -> Result<u64, String> {
    let value = number(text)?;
    let value = i16::try_from(value).map(|value| value as u16).or_else(|_| u16::try_from(value));
    let value = value.map_err(|_| format!("`{text}` has more than 16 bits"))?;
    Ok(if signed { value as i16 as i32 as u32 as u64 } else { value as u64 })
}

/// Scalar forms with an immediate, loads, and what concerns the wave.
fn scalar_short(line: &mut Line, places: &dyn Places) -> Found {
    let immediate = |text: &str| short(text, true).map(ScalarSource::Constant);
    if let Some(rest) = line.mnemonic.strip_prefix("s_cmpk_") {
        let [a, b] = line.operands()?;
        let op = ScalarCompare::from_mnemonic(&format!("s_cmp_{rest}"));
        let Some(op) = op else { return Ok(None) };
        let b = ScalarSource::Constant(short(b, rest.ends_with("i32"))?);
        return Ok(Some(Instruction::ScalarCompare { op, a: scalar_source(a, false)?, b }));
    }
    if let Some(dwords) = listed(&SCALAR_LOADS, line.mnemonic) {
        let [dst, base, offset] = line.operands()?;
        let (dst, base) = (scalar(dst, dwords as u16)?, scalar(base, 2)?);
        return Ok(Some(Instruction::ScalarLoad { dst, dwords, base, offset: number(offset)? }));
    }
    let in_place = |op, line: &Line| {
        let [dst, value] = line.operands()?;
        let dst = scalar(dst, 1)?;
        Ok(Some(Instruction::ScalarBinary { op, dst, a: ScalarSource::Register(dst), b: immediate(value)? }))
    };
    match line.mnemonic {
        "s_movk_i32" => {
            let [dst, value] = line.operands()?;
            let (op, dst) = (ScalarUnary::Move32, scalar(dst, 1)?);
            Ok(Some(Instruction::ScalarUnary { op, dst, a: immediate(value)? }))
        }
        "s_addk_i32" => in_place(ScalarBinary::AddI32, line),
        "s_mulk_i32" => in_place(ScalarBinary::MulI32, line),
        "s_getpc_b64" => {
            let [dst] = line.operands()?;
            Ok(Some(Instruction::GetPc { dst: scalar(dst, 2)?, next: places.next() }))
        }
        "s_setreg_imm32_b32" => set_mode(line).map(Some),
        "s_set_gpr_idx_on" => {
            let [index, mode] = line.operands()?;
            if mode != "gpr_idx(SRC0)" {
                return Err(format!("indexing by `{mode}` is not supported, only gpr_idx(SRC0)"));
            }
            Ok(Some(Instruction::IndexOn { index: scalar_source(index, false)? }))
        }
        _ => Ok(None),
    }
}

/// `s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3`.
fn set_mode(line: &Line) -> Result<Instruction, String> {
    let [register, value] = line.operands()?;
    let inside = register.strip_prefix("hwreg(").and_then(|rest| rest.strip_suffix(')'));
    let fields: Vec<&str> = inside.unwrap_or_default().split(',').map(str::trim).collect();
    match fields[..] {
        ["HW_REG_MODE" | "1", first, count] => {
            let (first, count) = (number(first)? as u8, number(count)? as u8);
            let value = number(value)? as u32;
            Ok(Instruction::SetMode { first, count, value })
        }
        _ => Err(format!("`{register}` is not a field of MODE")),
    }
}

/// Scalar loads and their dwords.
const SCALAR_LOADS: [(&str, u8); 5] =
    [("s_load_dword", 1), ("s_load_dwordx2", 2), ("s_load_dwordx4", 4), ("s_load_dwordx8", 8), ("s_load_dwordx16", 16)];

/// What a list has for a mnemonic.
fn listed<T: Copy>(list: &[(&str, T)], mnemonic: &str) -> Option<T> {
    list.iter().find(|(name, _)| *name == mnemonic).map(|(_, found)| *found)
}

/// The part of a source that `srcN_sel` names.
fn selected(text: &str, select: Option<&str>) -> Result<Operand, String> {
    let select = match select {
        None | Some("DWORD") => Select::Dword,
        Some("BYTE_0") => Select::Byte(0),
        Some("BYTE_1") => Select::Byte(1),
        Some("BYTE_2") => Select::Byte(2),
        Some("BYTE_3") => Select::Byte(3),
        Some("WORD_0") => Select::Word(0),
        Some("WORD_1") => Select::Word(1),
        Some(other) => return Err(format!("unknown selection `{other}`")),
    };
    Ok(Operand { select, ..operand(text)? })
}

/// Instructions with one to three sources and one vector result.
fn vector_alu(line: &mut Line, _: &dyn Places) -> Found {
    let destination = line.field("dst_sel").is_none_or(|select| select == "DWORD");
    let padded = line.field("dst_unused").is_none_or(|unused| unused == "UNUSED_PAD");
    if !destination || !padded {
        return Err("partial destinations are not supported".to_string());
    }
    let selects = [line.field("src0_sel"), line.field("src1_sel")];
    if let Some(op) = Unary::from_mnemonic(line.mnemonic) {
        let [dst, a] = line.operands()?;
        return Ok(Some(Instruction::Unary { op, dst: vector(dst, 1)?, a: selected(a, selects[0])? }));
    }
    if let Some(op) = Binary::from_mnemonic(line.mnemonic) {
        let [dst, a, b] = line.operands()?;
        let (dst, a, b) = (vector(dst, 1)?, selected(a, selects[0])?, selected(b, selects[1])?);
        let op = if op == Binary::SubU32 && line.flag("clamp") { Binary::SubU32Saturated } else { op };
        return Ok(Some(Instruction::Binary { op, dst, a, b }));
    }
    if let Some(op) = Ternary::from_mnemonic(line.mnemonic) {
        let [dst, a, b, c] = line.operands()?;
        let (dst, a, b, c) = (vector(dst, 1)?, operand(a)?, operand(b)?, operand(c)?);
        return Ok(Some(Instruction::Ternary { op, dst, a, b, c }));
    }
    if let Some(op) = Compare::from_mnemonic(line.mnemonic) {
        let [dst, a, b] = line.operands()?;
        let (dst, a, b) = (scalar(dst, 2)?, selected(a, selects[0])?, selected(b, selects[1])?);
        return Ok(Some(Instruction::Compare { op, dst, a, b }));
    }
    // The accumulator is the destination.
    let accumulating = match line.mnemonic {
        "v_fmac_f32" => Some(Ternary::Fma),
        "v_mac_f32" => Some(Ternary::MultiplyThenAdd),
        "v_dot4c_i32_i8" => Some(Ternary::Dot4),
        _ => None,
    };
    if let Some(op) = accumulating {
        let [dst, a, b] = line.operands()?;
        let dst = vector(dst, 1)?;
        let c = Operand::plain(Source::Vector(dst));
        return Ok(Some(Instruction::Ternary { op, dst, a: operand(a)?, b: operand(b)?, c }));
    }
    // D = S0 * K + S1, and D = S0 * S1 + K: in the order of the text.
    let with_literal = match line.mnemonic {
        "v_madmk_f32" | "v_madak_f32" => Some(Ternary::MultiplyThenAdd),
        "v_fmamk_f32" | "v_fmaak_f32" => Some(Ternary::Fma),
        _ => None,
    };
    if let Some(op) = with_literal {
        let [dst, a, b, c] = line.operands()?;
        let (dst, a, b, c) = (vector(dst, 1)?, operand(a)?, operand(b)?, operand(c)?);
        return Ok(Some(Instruction::Ternary { op, dst, a, b, c }));
    }
    Ok(None)
}

/// Vector instructions of other forms, by group.
fn vector_group(line: &mut Line, _: &dyn Places) -> Found {
    if let Some(op) = WideCompare::from_mnemonic(line.mnemonic) {
        let [dst, a, b] = line.operands()?;
        let (dst, a, b) = (scalar(dst, 2)?, wide_source(a)?, wide_source(b)?);
        return Ok(Some(Instruction::WideCompare { op, dst, a, b }));
    }
    if let Some(op) = WideShift::from_mnemonic(line.mnemonic) {
        let [dst, count, a] = line.operands()?;
        let (dst, count, a) = (vector(dst, 2)?, operand(count)?, wide_source(a)?);
        return Ok(Some(Instruction::WideShift { op, dst, count, a }));
    }
    if let Some(op) = Carry::from_mnemonic(line.mnemonic) {
        let (dst, out, a, b, carry) = if op.takes_carry() {
            line.operands().map(|[dst, out, a, b, carry]| (dst, out, a, b, carry))?
        } else {
            line.operands().map(|[dst, out, a, b]| (dst, out, a, b, "vcc"))?
        };
        let (dst, out, carry) = (vector(dst, 1)?, scalar(out, 2)?, scalar(carry, 2)?);
        return Ok(Some(Instruction::Carry { op, dst, out, a: operand(a)?, b: operand(b)?, carry }));
    }
    if let Some(op) = Matrix::from_mnemonic(line.mnemonic) {
        return matrix(op, line).map(Some);
    }
    if let Some(op) = Packed::from_mnemonic(line.mnemonic) {
        return packed(op, line).map(Some);
    }
    Ok(None)
}

/// Vector instructions of no group.
fn vector_special(line: &mut Line, _: &dyn Places) -> Found {
    Ok(Some(match line.mnemonic {
        "v_cndmask_b32" => {
            let [dst, a, b, mask] = line.operands()?;
            Instruction::Choose { dst: vector(dst, 1)?, a: operand(a)?, b: operand(b)?, mask: scalar(mask, 2)? }
        }
        "v_mad_u64_u32" => {
            let [dst, carry, a, b, c] = line.operands()?;
            let (dst, carry, c) = (vector(dst, 2)?, scalar(carry, 2)?, wide_source(c)?);
            Instruction::WideMad { dst, carry, a: operand(a)?, b: operand(b)?, c }
        }
        "v_mov_b64" => {
            let [dst, a] = line.operands()?;
            // An integer is extended to 64 bits.
            let sources = match wide_source(a)? {
                WideSource::Constant(value) => [value as u32, (value >> 32) as u32].map(Source::Constant),
                _ => [pair(a)?; 2],
            };
            let sources = [sources[0], sources[1], Source::Constant(0)];
            Instruction::Packed { op: Packed::Move, dst: vector(dst, 2)?, sources, halves: [0, 2], negate: [0; 2] }
        }
        "v_lshl_add_u64" => {
            let [dst, a, count, c] = line.operands()?;
            let (dst, a, c) = (vector(dst, 2)?, wide_source(a)?, wide_source(c)?);
            Instruction::WideShiftAdd { dst, a, count: operand(count)?, c }
        }
        "v_div_scale_f32" => {
            let [dst, mask, a, b, c] = line.operands()?;
            let (dst, mask) = (vector(dst, 1)?, scalar(mask, 2)?);
            Instruction::DivideScale { dst, mask, a: operand(a)?, b: operand(b)?, c: operand(c)? }
        }
        "v_div_fmas_f32" => {
            let [dst, a, b, c] = line.operands()?;
            Instruction::DivideFmas { dst: vector(dst, 1)?, a: operand(a)?, b: operand(b)?, c: operand(c)? }
        }
        "v_readfirstlane_b32" => {
            let [dst, source] = line.operands()?;
            Instruction::ReadFirstLane { dst: scalar(dst, 1)?, source: vector(source, 1)? }
        }
        "v_readlane_b32" => {
            let [dst, source, lane] = line.operands()?;
            let (dst, source) = (scalar(dst, 1)?, vector(source, 1)?);
            Instruction::ReadLane { dst, source, lane: scalar_source(lane, false)? }
        }
        "v_writelane_b32" => {
            let [dst, a, lane] = line.operands()?;
            let (a, lane) = (scalar_source(a, false)?, scalar_source(lane, false)?);
            Instruction::WriteLane { dst: vector(dst, 1)?, a, lane }
        }
        _ => return Ok(None),
    }))
}

fn matrix(op: Matrix, line: &mut Line) -> Result<Instruction, String> {
    let [dst, a, b, c] = line.operands()?;
    let sums = op.sums();
    let words = op.operand_words();
    let (a, b) = (vector(a, words)?, vector(b, words)?);
    let found = Instruction::Matrix { op, dst: vector(dst, sums)?, a, b, c: vector(c, sums)? };
    let permuted = ["cbsz", "abid", "blgp"].into_iter().any(|name| line.number(name) != Ok(0));
    if permuted { Err("permuted operands are not supported".to_string()) } else { Ok(found) }
}

/// A mask such as `[0,1]` of a modifier, bit 0 being the first; `default` if it is missing.
fn mask(line: &mut Line, name: &str, default: u8) -> Result<u8, String> {
    let Some(text) = line.field(name) else { return Ok(default) };
    let inside = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or_default();
    inside.split(',').enumerate().try_fold(0, |mask, (bit, digit)| match digit.trim() {
        "0" => Ok(mask),
        "1" if bit < 3 => Ok(mask | 1 << bit),
        _ => Err(format!("`{text}` is not a mask")),
    })
}

/// The low register of a pair, or a constant, which feeds both halves.
fn pair(text: &str) -> Result<Source, String> {
    match wide_source(text) {
        Ok(WideSource::Vector(register)) => Ok(Source::Vector(register)),
        Ok(WideSource::Scalar(register)) => Ok(Source::Scalar(register)),
        _ => operand(text).map(|operand| operand.source),
    }
}

fn packed(op: Packed, line: &mut Line) -> Result<Instruction, String> {
    let (dst, sources) = match op {
        Packed::Fma => line.operands().map(|[dst, a, b, c]| (dst, [a, b, c]))?,
        _ => line.operands().map(|[dst, a, b]| (dst, [a, b, "0"]))?,
    };
    let [a, b, c] = sources.map(pair);
    let low = mask(line, "op_sel", 0)?;
    // A move has one mask: its two results come from one source each.
    let high = if op == Packed::Move { low } else { mask(line, "op_sel_hi", 7)? };
    let negate = [mask(line, "neg_lo", 0)?, mask(line, "neg_hi", 0)?];
    Ok(Instruction::Packed { op, dst: vector(dst, 2)?, sources: [a?, b?, c?], halves: [low, high], negate })
}

/// Accesses to global memory: whether it is a load, and its width.
const GLOBAL: [(&str, (bool, Width)); 13] = [
    ("global_load_ubyte", (true, Width::U8)),
    ("global_load_sbyte", (true, Width::I8)),
    ("global_load_ushort", (true, Width::U16)),
    ("global_load_sshort", (true, Width::I16)),
    ("global_load_dword", (true, Width::Dwords(1))),
    ("global_load_dwordx2", (true, Width::Dwords(2))),
    ("global_load_dwordx3", (true, Width::Dwords(3))),
    ("global_load_dwordx4", (true, Width::Dwords(4))),
    ("global_store_short", (false, Width::U16)),
    ("global_store_dword", (false, Width::Dwords(1))),
    ("global_store_dwordx2", (false, Width::Dwords(2))),
    ("global_store_dwordx3", (false, Width::Dwords(3))),
    ("global_store_dwordx4", (false, Width::Dwords(4))),
];

fn global(line: &mut Line, _: &dyn Places) -> Found {
    let Some((load, width)) = listed(&GLOBAL, line.mnemonic) else { return Ok(None) };
    let [first, second, base] = line.operands()?;
    let (data, address) = if load { (first, second) } else { (second, first) };
    let registers = if let Width::Dwords(count) = width { count as u16 } else { 1 };
    let data = vector(data, registers)?;
    let address = match base {
        "off" => Address::Vector(vector(address, 2)?),
        base => Address::ScalarPlus(scalar(base, 2)?, vector(address, 1)?),
    };
    let offset = line.number("offset")?;
    Ok(Some(if load {
        Instruction::GlobalLoad { width, data, address, offset }
    } else {
        Instruction::GlobalStore { width, data, address, offset }
    }))
}

/// Whether it is a load, the dwords, and the unit of the two offsets of those that access two
/// places.
type SharedAccess = (bool, u8, Option<u32>);

/// Accesses to shared memory.
const SHARED: [(&str, SharedAccess); 16] = [
    ("ds_read_b32", (true, 1, None)),
    ("ds_read_b64", (true, 2, None)),
    ("ds_read_b96", (true, 3, None)),
    ("ds_read_b128", (true, 4, None)),
    ("ds_read2_b32", (true, 1, Some(4))),
    ("ds_read2_b64", (true, 2, Some(8))),
    ("ds_read2st64_b32", (true, 1, Some(256))),
    ("ds_read2st64_b64", (true, 2, Some(512))),
    ("ds_write_b32", (false, 1, None)),
    ("ds_write_b64", (false, 2, None)),
    ("ds_write_b96", (false, 3, None)),
    ("ds_write_b128", (false, 4, None)),
    ("ds_write2_b32", (false, 1, Some(4))),
    ("ds_write2_b64", (false, 2, Some(8))),
    ("ds_write2st64_b32", (false, 1, Some(256))),
    ("ds_write2st64_b64", (false, 2, Some(512))),
];

fn shared(line: &mut Line, _: &dyn Places) -> Found {
    let Some((load, dwords, stride)) = listed(&SHARED, line.mnemonic) else { return Ok(None) };
    let two = stride.is_some();
    let offsets = match stride {
        Some(stride) => [line.number("offset0")? as u32 * stride, line.number("offset1")? as u32 * stride],
        None => [line.number("offset")? as u32, 0],
    };
    let registers = dwords as u16;
    Ok(Some(if load {
        let [data, address] = line.operands()?;
        let data = vector(data, if two { 2 * registers } else { registers })?;
        Instruction::SharedLoad { dwords, data, address: vector(address, 1)?, offsets, two }
    } else if two {
        let [address, first, second] = line.operands()?;
        let data = [vector(first, registers)?, vector(second, registers)?];
        Instruction::SharedStore { dwords, data, address: vector(address, 1)?, offsets, two }
    } else {
        let [address, data] = line.operands()?;
        let data = [vector(data, registers)?; 2];
        Instruction::SharedStore { dwords, data, address: vector(address, 1)?, offsets, two }
    }))
}

/// Accesses to private memory: whether it is a load, and the dwords.
const PRIVATE: [(&str, (bool, u8)); 8] = [
    ("buffer_load_dword", (true, 1)),
    ("buffer_load_dwordx2", (true, 2)),
    ("buffer_load_dwordx3", (true, 3)),
    ("buffer_load_dwordx4", (true, 4)),
    ("buffer_store_dword", (false, 1)),
    ("buffer_store_dwordx2", (false, 2)),
    ("buffer_store_dwordx3", (false, 3)),
    ("buffer_store_dwordx4", (false, 4)),
];

/// Private memory through the buffer of the first four scalar registers.
fn private(line: &mut Line, _: &dyn Places) -> Found {
    let Some((load, dwords)) = listed(&PRIVATE, line.mnemonic) else { return Ok(None) };
    let [data, address, buffer, base] = line.operands()?;
    if (buffer, base) != ("s[0:3]", "0") {
        return Err("only private memory is accessed by buffer instructions".to_string());
    }
    let data = vector(data, dwords as u16)?;
    let address = match (address, line.flag("offen")) {
        ("off", false) => None,
        (address, true) => Some(vector(address, 1)?),
        _ => return Err(format!("`{address}` without offen")),
    };
    let offset = line.number("offset")? as u32;
    Ok(Some(if load {
        Instruction::PrivateLoad { dwords, data, address, offset }
    } else {
        Instruction::PrivateStore { dwords, data, address, offset }
    }))
}

/// For tests of few instructions: a branch names its target by its index, and there are no symbols.
#[cfg(test)]
pub(crate) struct Nowhere;

#[cfg(test)]
impl Places for Nowhere {
    fn target(&self, operand: &str) -> Result<usize, String> {
        operand.parse().map_err(|_| format!("no label `{operand}`"))
    }

    fn literal(&self, _: &str) -> Result<Option<u32>, String> {
        Ok(None)
    }

    fn next(&self) -> u64 {
        0x100
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fails(text: &str) -> String {
        decode(text, &Nowhere).expect_err(text)
    }

    #[test]
    fn immediates_of_short_forms_are_sign_extended() {
        let minus_100 = ScalarSource::Constant(0xffff_ff9c);
        let found = decode("s_movk_i32 s3, 0xff9c", &Nowhere);
        assert_eq!(found, Ok(Instruction::ScalarUnary { op: ScalarUnary::Move32, dst: 3, a: minus_100 }));
        let found = decode("s_cmpk_lt_u32 s3, 0xff9c", &Nowhere);
        let (a, b) = (ScalarSource::Register(3), ScalarSource::Constant(0xff9c));
        assert_eq!(found, Ok(Instruction::ScalarCompare { op: ScalarCompare::LessU32, a, b }));
    }

    #[test]
    fn memory_operands() {
        let address = Address::ScalarPlus(8, 3);
        let found = decode("global_store_dwordx4 v3, v[4:7], s[8:9] offset:-16", &Nowhere);
        let width = Width::Dwords(4);
        assert_eq!(found, Ok(Instruction::GlobalStore { width, data: 4, address, offset: -16 }));
        let found = decode("ds_read2st64_b32 v[2:3], v1 offset1:3", &Nowhere);
        let offsets = [0, 768];
        assert_eq!(found, Ok(Instruction::SharedLoad { dwords: 1, data: 2, address: 1, offsets, two: true }));
        let found = decode("buffer_load_dword v5, v2, s[0:3], 0 offen offset:12", &Nowhere);
        assert_eq!(found, Ok(Instruction::PrivateLoad { dwords: 1, data: 5, address: Some(2), offset: 12 }));
    }

    #[test]
    fn what_is_unknown_is_refused() {
        assert_eq!(fails("v_exp_f32_e32 v1, v0"), "unknown instruction");
        assert_eq!(fails("global_atomic_add v1, v2, s[0:1]"), "unknown instruction");
        assert_eq!(fails("global_load_dwordx8 v[0:7], v8, s[0:1]"), "unknown instruction");
        assert!(fails("v_add_f32_e64 v1, v0, v2 mul:2").contains("mul:2"));
        assert!(fails("v_dot4_i32_i8 v1, v0, v2, v3 clamp").contains("clamp"));
        assert!(fails("v_add_f32_e32 v1, v0").contains("2 operands, not 3"));
        assert!(fails("global_load_dword v1, v[2:3], off glc").contains("glc"));
        assert!(fails("s_set_gpr_idx_on s1, gpr_idx(SRC0,DST)").contains("DST"));
        assert!(fails("buffer_load_dword v5, off, s[4:7], 0").contains("private"));
        assert!(fails("v_mfma_i32_4x4x4i8 a[0:3], v0, v1, a[0:3] cbsz:1").contains("permuted"));
        assert!(fails("s_branch .LBB0_1").contains(".LBB0_1"));
        assert!(fails("v_and_b32_sdwa v1, v2, v3 dst_sel:BYTE_0 src0_sel:DWORD").contains("partial"));
    }
}

//! Reads the compiler's assembly of a program for AMD: the resources of each kernel, and every
//! instruction that may change the bits.
//!
//! A program is compiled twice. The *real* assembly is what a device runs. In the *marked* one
//! (`-DAUDIT`, see `gpu/exact.h`) every `fma_rn`, `div_rn`, `sqrt_rn` and `dot4` is a comment, so
//! any remaining fused instruction, division or root was not requested.

use std::collections::BTreeMap;

/// Required fields of a kernel's descriptor, and their meaning.
const MODES: [(&str, u32, &str); 3] = [
    (".amdhsa_float_denorm_mode_32", 3, "subnormal float32 are not kept"),
    (".amdhsa_float_round_mode_32", 0, "float32 are not rounded to nearest even"),
    (".amdhsa_ieee_mode", 1, "the IEEE mode is off"),
];

/// 2³² as float32: used by integer division to combine the halves of 64 bits.
const TWO_TO_32: &str = "0x4f800000";

/// The resources of one kernel, and its problems.
#[derive(Debug, Default)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) dot4: usize,
    pub(crate) divisions: usize,
    pub(crate) roots: usize,
    pub(crate) vgprs: u32,
    pub(crate) sgprs: u32,
    /// Bytes shared by a group.
    pub(crate) local: u32,
    /// Bytes of memory used for spilled registers.
    pub(crate) scratch: u32,
    pub(crate) findings: Vec<String>,
}

/// All kernels of a program from its real and its marked assembly.
pub(crate) fn kernels(real: &str, marked: &str) -> Result<Vec<Kernel>, String> {
    let marked = functions(marked);
    let real = functions(real);
    if real.iter().all(|function| function.descriptor.is_empty()) {
        return Err("the assembly has no kernel".to_string());
    }
    real.iter()
        .map(|function| {
            let marked = marked.iter().find(|marked| marked.name == function.name);
            let marked = marked.ok_or_else(|| format!("{} is not in the marked assembly", function.name))?;
            Ok(kernel(function, marked))
        })
        .collect()
}

#[derive(Debug, Default)]
struct Function<'a> {
    name: &'a str,
    instructions: Vec<Instruction<'a>>,
    /// The marks in the audit's comments: `fma`, `div`, `sqrt`, `dot4`.
    marks: Vec<&'a str>,
    /// Lines between `.amdhsa_kernel` and its end; empty for a function that is not a kernel.
    descriptor: BTreeMap<&'a str, u32>,
}

#[derive(Debug)]
struct Instruction<'a> {
    /// Without its encoding suffix.
    name: &'a str,
    operands: Vec<&'a str>,
}

fn functions(assembly: &str) -> Vec<Function<'_>> {
    let mut functions: Vec<Function> = Vec::new();
    let mut inside = false;
    let mut in_descriptor = false;
    for line in assembly.lines() {
        let text = line.trim();
        if let Some(name) = text.strip_prefix(".type").and_then(|rest| rest.trim().strip_suffix(",@function")) {
            functions.push(Function { name, ..Function::default() });
            inside = true;
            continue;
        }
        let Some(function) = functions.last_mut().filter(|_| inside) else { continue };
        if text.starts_with(".Lfunc_end") {
            inside = false;
        } else if text.starts_with(".amdhsa_kernel") {
            in_descriptor = true;
        } else if text.starts_with(".end_amdhsa_kernel") {
            in_descriptor = false;
        } else if in_descriptor {
            let mut words = text.split_whitespace();
            if let (Some(key), Some(Ok(value))) = (words.next(), words.next().map(str::parse)) {
                function.descriptor.insert(key, value);
            }
        } else if let Some(mark) = text.strip_prefix("; audit ") {
            function.marks.push(mark);
        } else if line.starts_with('\t') && text.starts_with(|first: char| first.is_ascii_lowercase()) {
            function.instructions.push(instruction(text));
        }
    }
    functions
}

fn instruction(text: &str) -> Instruction<'_> {
    let text = text.split(';').next().unwrap_or_default();
    let (name, operands) = text.split_once([' ', '\t']).unwrap_or((text, ""));
    let encodings = ["_e32", "_e64", "_sdwa", "_dpp"];
    let name = encodings.iter().find_map(|encoding| name.strip_suffix(encoding)).unwrap_or(name);
    // Modifiers follow the last operand after a space.
    let operands = operands.split(',').filter_map(|operand| operand.split_whitespace().next());
    Instruction { name, operands: operands.collect() }
}

impl<'a> Instruction<'a> {
    /// A product and a sum with one rounding, or none.
    fn is_fused(&self) -> bool {
        let float = self.name.contains("_f32") || self.name.contains("_f16") || self.name.contains("_mix");
        ["v_fma", "v_pk_fma", "v_dot2"].iter().any(|start| self.name.starts_with(start)) && float
            || self.flushes_subnormals()
    }

    fn flushes_subnormals(&self) -> bool {
        ["v_mad", "v_mac"].iter().any(|start| self.name.starts_with(start))
            && ["_f32", "_f16", "_mix"].iter().any(|what| self.name.contains(what))
    }

    /// Approximations, other precisions, and changes of the rounding or subnormal mode.
    fn is_forbidden(&self) -> bool {
        const APPROXIMATE: [&str; 5] = ["v_rsq", "v_exp", "v_log", "v_sin", "v_cos"];
        const MODE: [&str; 3] = ["s_setreg", "s_denorm_mode", "s_round_mode"];
        let starts = |names: &[&str]| names.iter().any(|name| self.name.starts_with(name));
        starts(&APPROXIMATE)
            || starts(&MODE)
            || self.name.contains("_legacy")
            || self.name.starts_with("v_") && (self.name.contains("_f64") || self.name.contains("_f16"))
    }

    fn is_call(&self) -> bool {
        self.name.starts_with("s_swappc") || self.name.starts_with("s_call")
    }

    /// Registers it writes: its first operand, unless it has no result.
    fn writes(&self) -> impl Iterator<Item = Register> + use<'a> {
        let stores = ["store", "write", "s_cbranch", "s_branch", "s_waitcnt"];
        let result = self.operands.first().copied().filter(|_| !stores.iter().any(|what| self.name.contains(what)));
        registers(result.unwrap_or_default())
    }

    /// An accumulating instruction reads its first operand too.
    fn reads(&self) -> impl Iterator<Item = Register> + '_ {
        let accumulates = ["v_fmac", "v_pk_fmac", "v_mac"].iter().any(|name| self.name.starts_with(name));
        self.operands.iter().skip(usize::from(!accumulates)).flat_map(|operand| registers(operand))
    }
}

/// `v` or `s` and its number.
type Register = (char, u32);

/// `v7`, `-v7`, `|v7|` and `v[2:3]` are registers; constants and names are not.
fn registers(operand: &str) -> impl Iterator<Item = Register> + use<> {
    let plain = operand.trim_matches(['-', '|']);
    let kind = plain.chars().next().unwrap_or(' ');
    let numbers = plain.get(1..).unwrap_or_default().trim_matches(['[', ']']);
    let (first, last) = numbers.split_once(':').unwrap_or((numbers, numbers));
    let range = match (kind, first.parse::<u32>(), last.parse::<u32>()) {
        ('v' | 's', Ok(first), Ok(last)) => first..last + 1,
        _ => 0..0,
    };
    range.map(move |number| (kind, number))
}

/// The origin of a register's value, as far as integer division is concerned.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Origin {
    Truncation,
    Conversion,
    /// The constant 2³².
    TwoTo32,
    /// A 64-bit divisor as float32, whose reciprocal is the first estimate.
    Divisor,
    Other,
}

/// Integer division estimates its quotient in float32 and corrects it in integers, so its fused
/// instructions do not change bits. They are recognised by their operands: nothing else truncates,
/// and nothing else combines 64 bits of unsigned integer.
#[derive(Default)]
struct Origins(BTreeMap<Register, Origin>);

impl Origins {
    fn reads(&self, instruction: &Instruction, origin: Origin) -> bool {
        instruction.reads().any(|register| self.0.get(&register) == Some(&origin))
    }

    /// Whether a fused instruction or a reciprocal belongs to an integer division.
    fn is_integer_division(&self, instruction: &Instruction) -> bool {
        if instruction.name == "v_rcp_f32" {
            return self.reads(instruction, Origin::Divisor);
        }
        let widens = instruction.operands.contains(&TWO_TO_32) || self.reads(instruction, Origin::TwoTo32);
        self.reads(instruction, Origin::Truncation) || widens && self.reads(instruction, Origin::Conversion)
    }

    fn step(&mut self, instruction: &Instruction) {
        let origin = match instruction.name {
            "v_trunc_f32" => Origin::Truncation,
            "v_cvt_f32_u32" => Origin::Conversion,
            "s_mov_b32" | "v_mov_b32" if instruction.operands.contains(&TWO_TO_32) => Origin::TwoTo32,
            _ if instruction.is_fused() && self.is_integer_division(instruction) => Origin::Divisor,
            _ => Origin::Other,
        };
        self.0.extend(instruction.writes().map(|register| (register, origin)));
    }
}

fn kernel(real: &Function, marked: &Function) -> Kernel {
    let mut findings = Vec::new();
    let count = |name: &str| real.instructions.iter().filter(|instruction| instruction.name == name).count();
    let dot4 = real.instructions.iter().filter(|instruction| instruction.name.starts_with("v_dot4")).count();
    let (divisions, roots) = (count("v_div_fixup_f32"), count("v_sqrt_f32"));

    if !real.descriptor.is_empty() {
        for (key, wanted, what) in MODES {
            match real.descriptor.get(key) {
                Some(value) if *value == wanted => {}
                Some(value) => findings.push(format!("{what}: {key} is {value}")),
                None => findings.push(format!("{what}: {key} is missing")),
            }
        }
    }
    let mut origins = Origins::default();
    let mut reciprocals = 0;
    for (index, instruction) in real.instructions.iter().enumerate() {
        let name = instruction.name;
        if instruction.is_forbidden() {
            findings.push(format!("`{name}`"));
        }
        if instruction.is_call() {
            findings.push("a function that is not inlined".to_string());
        }
        if instruction.flushes_subnormals() && !origins.is_integer_division(instruction) {
            findings.push(format!("`{name}` loses subnormals"));
        }
        reciprocals += usize::from(name == "v_rcp_f32" && !origins.is_integer_division(instruction));
        if name == "v_sqrt_f32" && corrections(&real.instructions[index..]) < 2 {
            findings.push("a root without its correction".to_string());
        }
        origins.step(instruction);
    }
    if reciprocals > divisions {
        findings.push(format!("{reciprocals} reciprocals, but {divisions} divisions"));
    }
    if divisions > 0 && (count("v_div_scale_f32") == 0 || count("v_div_fmas_f32") == 0) {
        findings.push("a division that is not whole".to_string());
    }

    let mut origins = Origins::default();
    for instruction in &marked.instructions {
        let name = instruction.name;
        if instruction.is_fused() && !origins.is_integer_division(instruction) {
            findings.push(format!("`{name}` that no fma_rn asked for"));
        }
        let divides = name.starts_with("v_div_") || name == "v_rcp_f32" && !origins.is_integer_division(instruction);
        if divides || name == "v_sqrt_f32" {
            findings.push(format!("`{name}` outside div_rn and sqrt_rn"));
        }
        origins.step(instruction);
    }
    let fused = real.instructions.iter().filter(|instruction| instruction.is_fused()).count();
    for (mark, found) in [("fma", fused), ("div", divisions), ("sqrt", roots), ("dot4", dot4)] {
        if marked.marks.contains(&mark) && found == 0 {
            findings.push(format!("{mark} is in the source and not in the code"));
        }
    }
    findings.sort();
    findings.dedup();
    let resource = |key: &str| real.descriptor.get(key).copied().unwrap_or(0);
    Kernel {
        name: real.name.to_string(),
        dot4,
        divisions,
        roots,
        vgprs: resource(".amdhsa_next_free_vgpr"),
        sgprs: resource(".amdhsa_next_free_sgpr"),
        local: resource(".amdhsa_group_segment_fixed_size"),
        scratch: resource(".amdhsa_private_segment_fixed_size"),
        findings,
    }
}

/// Fused instructions that read the result of the first instruction before it is overwritten: a
/// correctly rounded root tries both neighbours of the approximation.
fn corrections(instructions: &[Instruction]) -> usize {
    let Some((root, rest)) = instructions.split_first() else { return 0 };
    let Some(result) = root.writes().next() else { return 0 };
    let mut count = 0;
    for instruction in rest {
        count += usize::from(instruction.is_fused() && instruction.reads().any(|register| register == result));
        if instruction.writes().any(|register| register == result) {
            break;
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kernel with the given body lines and descriptor lines.
    fn assembly(body: &str, descriptor: &str) -> String {
        let body: String = body.lines().flat_map(|line| ["\t", line.trim(), "\n"]).collect();
        format!(
            "\t.type\tk,@function\nk:\n{body}\ts_endpgm\n\t.amdhsa_kernel k\n{descriptor}\t.end_amdhsa_kernel\n.Lfunc_end0:\n"
        )
    }

    const GOOD: &str = "\t\t.amdhsa_next_free_vgpr 17\n\t\t.amdhsa_float_round_mode_32 0\n\
                        \t\t.amdhsa_float_denorm_mode_32 3\n\t\t.amdhsa_ieee_mode 1\n";

    fn findings(real: &str, marked: &str) -> Vec<String> {
        let kernels = kernels(&assembly(real, GOOD), &assembly(marked, GOOD)).expect("a kernel");
        kernels.into_iter().flat_map(|kernel| kernel.findings).collect()
    }

    #[test]
    fn a_plain_kernel_is_clean_and_counted() {
        let body = "v_mul_f32_e32 v0, v1, v2\nv_add_f32_e32 v0, v0, v3 ; two roundings\nv_dot4_i32_i8 v4, v5, v6, v4\n\
                    v_mad_u64_u32 v[2:3], s[0:1], v1, v2, 0";
        let kernels = kernels(&assembly(body, GOOD), &assembly(body, GOOD)).expect("a kernel");
        assert_eq!((kernels[0].name.as_str(), kernels[0].dot4, kernels[0].vgprs), ("k", 1, 17));
        assert!(kernels[0].findings.is_empty(), "{:?}", kernels[0].findings);
    }

    #[test]
    fn instructions_that_lose_subnormals_are_found() {
        for planted in ["v_mac_f32_e32 v0, v1, v2", "v_mad_f32 v0, v1, v2, v3", "v_madak_f32 v0, v1, v2, 0x3f000000"] {
            let found = findings(planted, "");
            assert_eq!(found.len(), 1, "{planted}: {found:?}");
            assert!(found[0].contains("loses subnormals"), "{found:?}");
        }
    }

    #[test]
    fn contractions_are_found() {
        for planted in
            ["v_fma_f32 v0, v1, v2, v3", "v_fmac_f32_e32 v0, v1, v2", "v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]"]
        {
            assert_eq!(findings(planted, "; audit fma"), Vec::<String>::new(), "asked for");
            let found = findings(planted, &format!("; audit fma\n{planted}"));
            assert!(found.len() == 1 && found[0].contains("no fma_rn asked for"), "{planted}: {found:?}");
        }
    }

    #[test]
    fn descriptors_must_keep_subnormals_and_round_to_nearest() {
        let found = |descriptor: &str| {
            let text = assembly("", descriptor);
            kernels(&text, &text).expect("a kernel").remove(0).findings
        };
        assert_eq!(found(GOOD), Vec::<String>::new());
        assert!(found(&GOOD.replace("denorm_mode_32 3", "denorm_mode_32 0"))[0].contains("subnormal"));
        assert!(found(&GOOD.replace("float_denorm_mode_32", "float_denorm_mode_16_64"))[0].contains("is missing"));
        assert!(found(&GOOD.replace("round_mode_32 0", "round_mode_32 3"))[0].contains("nearest"));
        assert!(found(&GOOD.replace("ieee_mode 1", "ieee_mode 0"))[0].contains("IEEE"));
    }

    const DIVISION: &str = "v_div_scale_f32 v10, s[0:1], v6, v6, v8\nv_div_scale_f32 v11, vcc, v8, v6, v8\n\
                            v_rcp_f32_e32 v12, v10\nv_fma_f32 v13, -v10, v12, 1.0\nv_fmac_f32_e32 v12, v13, v12\n\
                            v_div_fmas_f32 v10, v10, v12, v13\nv_div_fixup_f32 v6, v10, v6, v8";

    #[test]
    fn divisions_are_whole() {
        assert_eq!(findings(DIVISION, "; audit div"), Vec::<String>::new());
        assert!(findings("v_rcp_f32_e32 v0, v1\nv_mul_f32_e32 v0, v0, v2", "; audit div").len() == 2);
        assert!(findings("v_rcp_f32_e32 v0, v1", "")[0].contains("1 reciprocals"));
        assert!(findings(DIVISION, DIVISION).iter().any(|finding| finding.contains("outside div_rn")));
    }

    #[test]
    fn roots_are_corrected() {
        let root = "v_sqrt_f32_e32 v12, v11\nv_add_u32_e32 v6, -1, v12\nv_add_u32_e32 v14, 1, v12\n\
                    v_fma_f32 v15, -v6, v12, v11\nv_fma_f32 v16, -v14, v12, v11";
        assert_eq!(findings(root, "; audit sqrt"), Vec::<String>::new());
        let found =
            findings("v_sqrt_f32_e32 v12, v11\nv_mov_b32_e32 v12, 0\nv_fma_f32 v0, v12, v12, v12", "; audit sqrt");
        assert_eq!(found, ["a root without its correction"]);
    }

    #[test]
    fn integer_division_may_use_floats() {
        let narrow = "v_trunc_f32_e32 v8, v8\nv_mad_f32 v7, -v8, v5, v7\nv_rcp_iflag_f32_e32 v8, v5";
        let wide = "v_cvt_f32_u32_e32 v0, s10\nv_cvt_f32_u32_e32 v1, s11\nv_madmk_f32 v0, v1, 0x4f800000, v0\n\
                    v_rcp_f32_e32 v0, v0\nv_mul_f32_e32 v1, 0x2f800000, v0\nv_trunc_f32_e32 v1, v1\n\
                    v_madmk_f32 v0, v1, 0xcf800000, v0";
        let hoisted = "s_mov_b32 s4, 0x4f800000\nv_cvt_f32_u32_e32 v1, s11\nv_fmac_f32_e32 v0, s4, v1";
        for division in [narrow, wide, hoisted] {
            assert_eq!(findings(division, division), Vec::<String>::new());
        }
    }

    #[test]
    fn approximations_other_precisions_and_modes_are_found() {
        for planted in [
            "v_rsq_f32_e32 v0, v1",
            "v_exp_f32_e32 v0, v1",
            "v_cvt_f64_f32_e32 v[0:1], v2",
            "v_mul_legacy_f32 v0, v1, v2",
            "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0",
        ] {
            assert_eq!(findings(planted, "").len(), 1, "{planted}");
        }
    }

    #[test]
    fn what_the_source_asks_for_must_be_there() {
        assert_eq!(
            findings("v_mul_i32_i24_e32 v0, v1, v2", "; audit dot4"),
            ["dot4 is in the source and not in the code"]
        );
        assert!(kernels("", "").is_err());
    }
}

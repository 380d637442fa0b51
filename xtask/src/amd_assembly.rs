//! Reads the compiler's assembly of a program for AMD: the resources of each kernel, and every
//! instruction that may change the bits.
//!
//! A program is compiled twice. The *real* assembly is what a device runs. In the *marked* one
//! (`-DAUDIT`, see `gpu/exact.h`) every `fma_rn`, `div_rn`, `sqrt_rn`, integer division and `dot4`
//! is a comment, so any remaining fused instruction, reciprocal or root was not requested.

use std::collections::BTreeMap;

/// Required fields of a kernel's descriptor, and their meaning.
const MODES: [(&str, u32, &str); 3] = [
    (".amdhsa_float_denorm_mode_32", 3, "subnormal float32 are not kept"),
    (".amdhsa_float_round_mode_32", 0, "float32 are not rounded to nearest even"),
    (".amdhsa_ieee_mode", 1, "the IEEE mode is off"),
];

/// The resources of one kernel, and its problems.
#[derive(Debug, Default)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) dot4: usize,
    pub(crate) divisions: usize,
    pub(crate) integer_divisions: usize,
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
    /// The marks in the audit's comments: `fma`, `div`, `sqrt`, `int_div`, `dot4`.
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

    /// Within a ULP of a reciprocal.
    fn is_reciprocal(&self) -> bool {
        self.name.starts_with("v_rcp")
    }

    fn is_root(&self) -> bool {
        self.name.starts_with("v_sqrt")
    }

    /// Scales an estimate; exact, or made good by what follows.
    fn is_product(&self) -> bool {
        ["v_mul_f32", "v_pk_mul_f32", "v_ldexp_f32"].contains(&self.name)
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

/// Divisions and roots of a kernel that are corrected.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Corrected {
    divisions: usize,
    integer_divisions: usize,
    roots: usize,
}

fn kernel(real: &Function, marked: &Function) -> Kernel {
    let mut findings = Vec::new();
    mode_findings(real, &mut findings);
    let corrected = instruction_findings(real, &mut findings);
    marked_findings(marked, &mut findings);
    let Corrected { divisions, integer_divisions, roots } = corrected;
    let dot4 = real.instructions.iter().filter(|instruction| instruction.name.starts_with("v_dot4")).count();
    let fused = real.instructions.iter().filter(|instruction| instruction.is_fused()).count();
    let counts = [("fma", fused), ("div", divisions), ("sqrt", roots), ("int_div", integer_divisions), ("dot4", dot4)];
    for (mark, found) in counts {
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
        integer_divisions,
        roots,
        vgprs: resource(".amdhsa_next_free_vgpr"),
        sgprs: resource(".amdhsa_next_free_sgpr"),
        local: resource(".amdhsa_group_segment_fixed_size"),
        scratch: resource(".amdhsa_private_segment_fixed_size"),
        findings,
    }
}

/// Rounding and subnormals of the kernel's descriptor.
fn mode_findings(real: &Function, findings: &mut Vec<String>) {
    if real.descriptor.is_empty() {
        return;
    }
    for (key, wanted, what) in MODES {
        match real.descriptor.get(key) {
            Some(value) if *value == wanted => {}
            Some(value) => findings.push(format!("{what}: {key} is {value}")),
            None => findings.push(format!("{what}: {key} is missing")),
        }
    }
}

/// What no kernel may contain, and estimates that are used as they are.
fn instruction_findings(real: &Function, findings: &mut Vec<String>) -> Corrected {
    let mut corrected = Corrected::default();
    for (index, instruction) in real.instructions.iter().enumerate() {
        let name = instruction.name;
        if instruction.is_forbidden() {
            findings.push(format!("`{name}`"));
        }
        if instruction.is_call() {
            findings.push("a function that is not inlined".to_string());
        }
        if instruction.flushes_subnormals() {
            findings.push(format!("`{name}` loses subnormals"));
        }
        if name.starts_with("v_div_") {
            findings.push(format!("`{name}`: the compiler's own division"));
        }
        let from_here = &real.instructions[index..];
        if instruction.is_reciprocal() {
            match correction(from_here) {
                Some(Correction::Fused) => corrected.divisions += 1,
                Some(Correction::Integer) => corrected.integer_divisions += 1,
                None => findings.push("a reciprocal without its correction".to_string()),
            }
        }
        if instruction.is_root() {
            corrected.roots += 1;
            if correction(from_here) != Some(Correction::Integer) {
                findings.push("a root without its correction".to_string());
            }
        }
    }
    corrected
}

/// What the compiler fuses or divides where the source does not ask for it.
fn marked_findings(marked: &Function, findings: &mut Vec<String>) {
    for instruction in &marked.instructions {
        let name = instruction.name;
        if instruction.is_fused() {
            findings.push(format!("`{name}` that no fma_rn asked for"));
        }
        if name.starts_with("v_div_") || instruction.is_reciprocal() || instruction.is_root() {
            findings.push(format!("`{name}` outside div_rn, sqrt_rn and div_u32"));
        }
    }
}

/// How the estimate of the first instruction is made exact: `gpu/exact.h` corrects a quotient with
/// fused instructions and then in integers, roots and quotients of integers in integers alone.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Correction {
    Fused,
    Integer,
}

/// None if the estimate is used as it is. A reader of the estimate is a fused instruction, or a
/// product on its way to an integer.
fn correction(instructions: &[Instruction]) -> Option<Correction> {
    let readers = readers(instructions);
    if readers.iter().any(|at| instructions[*at].is_fused()) {
        return Some(Correction::Fused);
    }
    let becomes_integer = |at: &usize| {
        let later = &instructions[*at..];
        later[0].is_product() && self::readers(later).iter().any(|at| later[*at].name == "v_cvt_u32_f32")
    };
    let corrected = !readers.is_empty() && readers.iter().all(becomes_integer);
    corrected.then_some(Correction::Integer)
}

/// Which instructions read the result of the first one before it is overwritten.
fn readers(instructions: &[Instruction]) -> Vec<usize> {
    let Some(result) = instructions.first().and_then(|first| first.writes().next()) else { return Vec::new() };
    let mut readers = Vec::new();
    for (index, instruction) in instructions.iter().enumerate().skip(1) {
        if instruction.reads().any(|register| register == result) {
            readers.push(index);
        }
        if instruction.writes().any(|register| register == result) {
            break;
        }
    }
    readers
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

    const DIVISION: &str = "v_rcp_iflag_f32_e32 v12, v10\nv_mul_f32_e32 v13, v11, v12\nv_fma_f32 v14, -v10, v13, v11\n\
                            v_fmac_f32_e32 v13, v14, v12\nv_mul_f32_e32 v13, 0x4b000000, v13\nv_cvt_u32_f32_e32 v13, v13";
    const INTEGERS: &str = "v_cvt_f32_u32_e32 v1, s4\nv_rcp_iflag_f32_e32 v1, v1\nv_mul_f32_e32 v1, 0x4f7ffff8, v1\n\
                            v_cvt_u32_f32_e32 v1, v1";
    const ROOT: &str = "v_sqrt_f32_e32 v2, v1\nv_mul_f32_e32 v2, 0x45000000, v2\nv_cvt_u32_f32_e32 v2, v2";

    #[test]
    fn estimates_are_corrected() {
        for (code, mark) in [(DIVISION, "div"), (INTEGERS, "int_div"), (ROOT, "sqrt")] {
            assert_eq!(findings(code, &format!("; audit {mark}")), Vec::<String>::new());
            // Not asked for.
            assert!(findings(code, code).iter().any(|finding| finding.contains("outside div_rn")), "{code}");
        }
        for (bare, what) in [
            ("v_rcp_f32_e32 v0, v1\nv_mul_f32_e32 v0, v0, v2\nglobal_store_dword v3, v0, s[0:1]", "reciprocal"),
            ("v_rcp_f32_e32 v0, v1\nv_mov_b32_e32 v0, 0\nv_fma_f32 v4, v0, v0, v0", "reciprocal"),
            ("v_sqrt_f32_e32 v0, v1\nglobal_store_dword v3, v0, s[0:1]", "root"),
            // Corrected, and used as it is as well.
            (
                "v_sqrt_f32_e32 v0, v1\nv_mul_f32_e32 v2, v0, v4\nv_cvt_u32_f32_e32 v2, v2\nv_add_f32_e32 v3, v0, v0",
                "root",
            ),
            // The compiler's own correction.
            ("v_sqrt_f32_e32 v0, v1\nv_fma_f32 v5, -v6, v0, v1", "root"),
        ] {
            assert_eq!(findings(bare, ""), [format!("a {what} without its correction")], "{bare}");
        }
    }

    #[test]
    fn the_compilers_own_division_is_found() {
        let found = findings("v_div_scale_f32 v10, s[0:1], v6, v6, v8\nv_div_fixup_f32 v6, v10, v6, v8", "");
        assert_eq!(found.len(), 2);
        assert!(found[0].contains("the compiler's own division"), "{found:?}");
        // As for 64-bit integers.
        let wide = "v_madmk_f32 v0, v1, 0x4f800000, v0";
        assert_eq!(findings(wide, ""), ["`v_madmk_f32` loses subnormals"]);
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

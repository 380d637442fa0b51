//! `cargo xtask amd-rates`: which share of an AMD chip's int8 peak the kernels can reach, from the
//! instructions that clang makes of them and the published rates of the units. Those of a slice
//! product are counted in its loops, those of int4 products and attention, whose loops depend on
//! the shapes, as the emulator executes them. It needs clang, not a device, and is a model: it
//! knows no latencies, caches or clocks.

use crate::amd_audit::{NO_COMPILER, SLICES, source};
use crate::arguments::Arguments;
use crate::repository::{command, root};
use isobit_conformance::Case;
use isobit_conformance::cases::attention::{AttentionCase, packed};
use isobit_conformance::cases::product4;
use isobit_conformance::data::Distribution;
use isobit_gcn::{Card, Dialect, Settings, compiler};
use isobit_kernels::gpu::hip::has_mfma;
use isobit_numerics::slices::Profile;
use std::collections::BTreeMap;

/// Architecture, card, and its int8 peak in 10¹² operations per second.
const DEVICES: [(&str, &str, f64); 4] =
    [("gfx906", "MI50", 53.6), ("gfx908", "MI100", 184.6), ("gfx90a", "MI250X", 383.0), ("gfx942", "MI300X", 2614.0)];
const KERNELS: [&str; 3] = ["product_forward", "product_input", "product_weight"];
/// Programs whose kernels are counted as they are executed.
const EXECUTED: [(&str, &[&str]); 2] = [
    ("product4", &["product4_forward", "product4_input"]),
    ("attention", &["attention_forward", "attention_grad_query", "attention_grad_key"]),
];
/// Tokens, and the width of heads and groups, of what is executed.
const SHAPE: [usize; 2] = [256, 128];
/// Devices that must reach [`SHARE_MIN`].
const BOUND: [&str; 2] = ["gfx906", "gfx908"];
/// BOUND: percent of the peak.
const SHARE_MIN: f64 = 50.0;
/// Elements of the contraction per step of a kernel, and per chunk.
const STEP: u64 = 64;
const CHUNK: u64 = 512;
/// Iterations of the innermost loop per step where it is a loop over words, four at a time: a
/// quarter of `DEPTH` in `gpu/product.cl`.
const WORDS: u64 = 4;
/// Waves of a group, one on each SIMD of a compute unit, which share its memory units.
const WAVES: u64 = 4;
/// Bytes per cycle of a compute unit's local memory and first-level cache.
const LOCAL_BYTES: u64 = 128;
const CACHE_BYTES: u64 = 64;
const LANES: u64 = 64;

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    let require = arguments.flag("--require");
    arguments.finish()?;
    let Some(compiler) = compiler() else {
        println!("0 kernels, 1 skipped: {NO_COMPILER}");
        return if require { Err(NO_COMPILER.to_string()) } else { Ok(()) };
    };
    rates(compiler)?;
    for (device, card, peak) in DEVICES {
        for slices in SLICES {
            for (kernel, rates) in executed(compiler, device, slices)? {
                println!("| {card} | {slices} | `{kernel}` | {} |", rates.line(device, peak));
            }
        }
    }
    Ok(())
}

/// Int4 products and attention as an emulated card executes them, per wave.
fn executed(compiler: &str, device: &str, slices: u32) -> Result<Vec<(&'static str, Rates)>, String> {
    let profile = if slices == 2 { Profile::X2 } else { Profile::X3 };
    let (gpu, emulated) =
        Card::new(Settings::new(device.parse()?)).into_gpu().map_err(|failure| failure.to_string())?;
    let [tokens, width] = SHAPE;
    product4::product(tokens, [tokens, CHUNK as usize], width, profile).run(&gpu);
    let (spans, kind) = (packed(&[tokens]), Distribution::Plain);
    let attention = AttentionCase {
        spans,
        heads: 1,
        kv_heads: 1,
        key_width: width,
        value_width: width,
        window: None,
        profile,
        kind,
        cap: None,
    };
    attention.run(&gpu);
    let mut rates = Vec::new();
    for (program, kernels) in EXECUTED {
        let assembly = assembly(compiler, device, program, slices)?;
        for kernel in kernels {
            let mut counts = Counts::default();
            let executed = emulated.executed(kernel);
            for (name, times) in &executed {
                counts.add(plain(name), *times);
            }
            let waves = executed.get("s_endpgm").copied().filter(|_| counts.int8 > 0);
            let counts = counts.over(waves.ok_or(format!("{device} {kernel}: no products"))?);
            rates.push((*kernel, Rates::with_resources(counts, &assembly, kernel)?));
        }
    }
    Ok(rates)
}

/// Prints the table of slice products, and fails if a kernel stays below its bound.
pub(crate) fn rates(compiler: &str) -> Result<(), String> {
    println!(
        "| card | slices | kernel | int8 | VALU | LDS | global | scalar | share | unoverlapped | VGPRs | LDS bytes | waves |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    let mut low = Vec::new();
    for (device, card, peak) in DEVICES {
        for slices in SLICES {
            let assembly = assembly(compiler, device, "product", slices)?;
            for kernel in KERNELS {
                let rates = Rates::of(&assembly, kernel).map_err(|error| format!("{device} {kernel}: {error}"))?;
                println!("| {card} | {slices} | `{kernel}` | {} |", rates.line(device, peak));
                if BOUND.contains(&device) && rates.share(device) < SHARE_MIN {
                    low.push(format!("{device} {kernel}, {slices} slices"));
                }
            }
        }
    }
    if low.is_empty() { Ok(()) } else { Err(format!("below {SHARE_MIN} % of the peak: {}", low.join("; "))) }
}

/// Of a program, or of the one for matrix cores where there are some.
fn assembly(compiler: &str, device: &str, program: &str, slices: u32) -> Result<String, String> {
    let program = &format!("{program}{}", if has_mfma(device) { "_mfma" } else { "" });
    let path = std::env::temp_dir().join(format!("isobit-amd-rates-{}.hip", std::process::id()));
    std::fs::write(&path, source(program, Dialect::Hip, &[])?)
        .map_err(|error| format!("{}: {error}", path.display()))?;
    let mut line = Dialect::Hip.options(device);
    line.extend([format!("-DSLICES={slices}"), "-S".to_string(), "-o".to_string(), "-".to_string()]);
    line.push(path.display().to_string());
    let line: Vec<&str> = line.iter().map(String::as_str).collect();
    let output = command(&root(), compiler, &line).output();
    // Whatever is left is in the temporary folder.
    let _ = std::fs::remove_file(&path);
    let output = output.map_err(|error| format!("{compiler}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{program} does not compile\n{}", String::from_utf8_lossy(&output.stderr)));
    }
    String::from_utf8(output.stdout).map_err(|error| error.to_string())
}

/// Instructions of one wave, and the cycles of the unit that executes them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Counts {
    int8: u64,
    int8_cycles: u64,
    valu: u64,
    valu_cycles: u64,
    local: u64,
    local_cycles: u64,
    global: u64,
    global_cycles: u64,
    scalar: u64,
    barriers: u64,
}

impl Counts {
    /// Adds one instruction: cycles of a SIMD, or of a memory unit that four SIMDs share.
    fn add(&mut self, name: &str, times: u64) {
        if let Some(cycles) = int8_cycles(name) {
            self.int8 += times;
            self.int8_cycles += times * cycles;
        } else if name.starts_with("v_") {
            self.valu += times;
            self.valu_cycles += times * valu_cycles(name);
        } else if name.starts_with("ds_") {
            self.local += times;
            self.local_cycles += times * (bytes(name) * LANES).div_ceil(LOCAL_BYTES);
        } else if ["global_", "buffer_", "scratch_"].iter().any(|start| name.starts_with(start)) {
            self.global += times;
            self.global_cycles += times * (bytes(name) * LANES).div_ceil(CACHE_BYTES);
        } else {
            self.scalar += times;
            self.barriers += if name == "s_barrier" { times } else { 0 };
        }
    }

    /// Of one of as many waves.
    fn over(self, waves: u64) -> Self {
        let each = |count: u64| (count + waves / 2) / waves.max(1);
        Self {
            int8: each(self.int8),
            int8_cycles: each(self.int8_cycles),
            valu: each(self.valu),
            valu_cycles: each(self.valu_cycles),
            local: each(self.local),
            local_cycles: each(self.local_cycles),
            global: each(self.global),
            global_cycles: each(self.global_cycles),
            scalar: each(self.scalar),
            barriers: each(self.barriers),
        }
    }

    /// Adds `times` of another.
    fn plus(self, other: &Self, times: u64) -> Self {
        Self {
            int8: self.int8 + times * other.int8,
            int8_cycles: self.int8_cycles + times * other.int8_cycles,
            valu: self.valu + times * other.valu,
            valu_cycles: self.valu_cycles + times * other.valu_cycles,
            local: self.local + times * other.local,
            local_cycles: self.local_cycles + times * other.local_cycles,
            global: self.global + times * other.global,
            global_cycles: self.global_cycles + times * other.global_cycles,
            scalar: self.scalar + times * other.scalar,
            barriers: self.barriers + times * other.barriers,
        }
    }
}

/// Cycles of an instruction on bytes, which the published peaks follow from: 256 operations per
/// cycle and SIMD on gfx908 and gfx90a, 1,024 on gfx942, 128 by `v_dot4`.
fn int8_cycles(name: &str) -> Option<u64> {
    match name {
        "v_mfma_i32_32x32x8i8" => Some(64),
        "v_mfma_i32_16x16x16i8" | "v_mfma_i32_32x32x16_i8" => Some(32),
        "v_mfma_i32_16x16x32_i8" => Some(16),
        _ if name.starts_with("v_dot4") => Some(4),
        _ => None,
    }
}

/// 64 lanes on 16 wide units; products and shifts of more than 24 bits, reciprocals and 64-bit
/// operations take four times as long.
fn valu_cycles(name: &str) -> u64 {
    const SLOW: [&str; 7] =
        ["v_mul_lo", "v_mul_hi", "v_mad_u64", "v_rcp", "v_lshlrev_b64", "v_lshrrev_b64", "v_lshl_add_u64"];
    if SLOW.iter().any(|slow| name.starts_with(slow)) { 16 } else { 4 }
}

/// Bytes that one lane moves.
fn bytes(name: &str) -> u64 {
    let sizes = [("b128", 16), ("dwordx4", 16), ("b96", 12), ("dwordx3", 12), ("b64", 8), ("dwordx2", 8)];
    let one = sizes.into_iter().find(|(size, _)| name.ends_with(size)).map_or(4, |(_, bytes)| bytes);
    let two_addresses = name.starts_with("ds_read2") || name.starts_with("ds_write2");
    if two_addresses { 2 * one } else { one }
}

/// The name without its encoding.
fn plain(name: &str) -> &str {
    ["_e32", "_e64", "_sdwa"].iter().find_map(|ending| name.strip_suffix(ending)).unwrap_or(name)
}

/// A loop: what lies in it and in no inner one, and the loop around it.
#[derive(Debug, Default)]
struct Loop {
    counts: Counts,
    parent: Option<String>,
}

/// The loops of a kernel by their headers, from the comments that clang writes.
fn loops<'a>(lines: impl Iterator<Item = &'a str>) -> BTreeMap<String, Loop> {
    let word = |text: &'a str, after: &str| {
        let rest = text.split_once(after)?.1;
        rest.split_whitespace().next()
    };
    let mut loops: BTreeMap<String, Loop> = BTreeMap::new();
    // The label of the block, the loop it is in, and the last loop named as around it.
    let (mut label, mut inside, mut around) = (String::new(), None::<String>, None::<String>);
    for line in lines {
        let text = line.trim();
        if text.starts_with(".LBB") || text.starts_with("; %bb.") {
            label = text.split(':').next().unwrap_or_default().trim_start_matches(".L").to_string();
            (inside, around) = (None, None);
        }
        if let Some(header) = word(text, "in Loop: Header=") {
            inside = Some(header.to_string());
        } else if let Some(parent) = word(text, "Parent Loop ") {
            around = Some(parent.to_string());
        } else if text.contains("Loop Header: Depth=") {
            inside = Some(label.clone());
            loops.entry(label.clone()).or_default().parent.clone_from(&around);
        }
        let name = text.split_whitespace().next().unwrap_or_default();
        let is_instruction = line.starts_with('\t') && name.starts_with(|first: char| first.is_ascii_lowercase());
        if let (Some(inside), true) = (&inside, is_instruction) {
            loops.entry(inside.clone()).or_default().counts.add(plain(name), 1);
        }
    }
    loops
}

/// A kernel: instructions of one wave, per chunk of the contraction or in all, and its resources.
struct Rates {
    chunk: Counts,
    vgprs: u64,
    local_bytes: u64,
}

impl Rates {
    fn of(assembly: &str, kernel: &str) -> Result<Self, String> {
        let label = format!("{kernel}:");
        let body = assembly.lines().skip_while(|line| !line.starts_with(&label));
        let loops = loops(body.take_while(|line| !line.starts_with(".Lfunc_end")));
        let parent = |of: &Loop| of.parent.clone().ok_or("the loop stands alone".to_string());
        let find = |name: &String| loops.get(name).ok_or(format!("no loop {name}"));
        let inner = loops.iter().max_by_key(|(_, found)| found.counts.int8).ok_or("no loop")?;
        let (mut step_name, mut step) = (inner.0.clone(), inner.1.counts);
        let mut chain = vec![step_name.clone()];
        if step.barriers == 0 {
            step_name = parent(inner.1)?;
            step = find(&step_name)?.counts.plus(&inner.1.counts, WORDS);
            chain.push(step_name.clone());
        }
        let chunk_name = parent(find(&step_name)?)?;
        let chunk = find(&chunk_name)?.counts.plus(&step, CHUNK / STEP);
        chain.push(chunk_name);
        // What another loop repeats is unknown.
        let stray = loops.iter().find(|(name, found)| {
            !chain.contains(name) && found.parent.as_ref().is_some_and(|parent| chain.contains(parent))
        });
        if let Some((name, _)) = stray {
            return Err(format!("the loop {name} is of unknown length"));
        }
        if chunk.int8 == 0 || step.barriers == 0 {
            return Err("no product loop".to_string());
        }
        Self::with_resources(chunk, assembly, kernel)
    }

    /// With what the kernel's descriptor says.
    fn with_resources(chunk: Counts, assembly: &str, kernel: &str) -> Result<Self, String> {
        let descriptor = assembly.lines().skip_while(|line| line.trim() != format!(".amdhsa_kernel {kernel}"));
        let field = |name: &str| {
            let found = descriptor.clone().find_map(|line| line.trim().strip_prefix(name)?.trim().parse().ok());
            found.ok_or(format!("no {name}"))
        };
        let vgprs = field(".amdhsa_next_free_vgpr")?;
        Ok(Self { chunk, vgprs, local_bytes: field(".amdhsa_group_segment_fixed_size")? })
    }

    /// Percent of the peak if all units work at the same time and the busiest one decides.
    fn share(&self, device: &str) -> f64 {
        let Counts { int8, int8_cycles, valu_cycles, local_cycles, global_cycles, .. } = self.chunk;
        // v_dot4 is one of the vector unit's own; a matrix instruction takes an issue slot of it.
        let vector = if has_mfma(device) { valu_cycles + 4 * int8 } else { valu_cycles + int8_cycles };
        let busiest = [int8_cycles, vector, WAVES * local_cycles, WAVES * global_cycles].into_iter().max();
        percent(int8_cycles, busiest.unwrap_or(int8_cycles))
    }

    /// The same if nothing overlaps.
    fn unoverlapped(&self) -> f64 {
        let Counts { int8_cycles, valu_cycles, local_cycles, global_cycles, .. } = self.chunk;
        percent(int8_cycles, int8_cycles + valu_cycles + WAVES * (local_cycles + global_cycles))
    }

    /// Waves per SIMD that registers and local memory allow.
    fn waves(&self, device: &str) -> u64 {
        // Registers of a lane, their granule, and waves at most.
        let (all, granule, most) = if ["gfx906", "gfx908"].contains(&device) { (256, 4, 10) } else { (512, 8, 8) };
        let by_registers = all / self.vgprs.next_multiple_of(granule).max(1);
        by_registers.min(65_536 / self.local_bytes.max(1)).min(most)
    }

    fn line(&self, device: &str, peak: f64) -> String {
        let Counts { int8, valu, local, global, scalar, .. } = self.chunk;
        let share = self.share(device);
        format!(
            "{int8} | {valu} | {local} | {global} | {scalar} | {share:.0} % ({:.0} TOPS) | {:.0} % | {} | {} | {}",
            peak * share / 100.0,
            self.unoverlapped(),
            self.vgprs,
            self.local_bytes,
            self.waves(device)
        )
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / whole as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: &str = "k:\n; %bb.0:\n\tv_mov_b32_e32 v0, 0\n\
        .LBB0_1:                                ; =>This Loop Header: Depth=1\n\
        \x20                                       ;     Child Loop BB0_2 Depth 2\n\tv_mul_lo_u32 v1, v2, v3\n\
        .LBB0_2:                                ;   Parent Loop BB0_1 Depth=1\n\
        \x20                                       ; =>  This Inner Loop Header: Depth=2\n\ts_barrier\n\
        \tv_mfma_i32_32x32x8i8 a[0:15], v1, v2, a[0:15]\n\tds_read_b128 v[0:3], v4\n\
        ; %bb.3:                                ;   in Loop: Header=BB0_2 Depth=2\n\
        \tglobal_load_dwordx4 v[0:3], v[4:5], off\n\ts_cbranch_scc1 .LBB0_2\n\
        ; %bb.4:                                ;   in Loop: Header=BB0_1 Depth=1\n\
        \tv_fma_f32 v1, v2, v3, v4\n\ts_cbranch_scc1 .LBB0_1\n\
        ; %bb.5:\n\ts_endpgm\n\t.amdhsa_kernel k\n\t\t.amdhsa_group_segment_fixed_size 30720\n\
        \t\t.amdhsa_next_free_vgpr 100\n\t.end_amdhsa_kernel\n.Lfunc_end0:\n";

    #[test]
    fn a_chunk_is_eight_steps_and_what_follows_them() {
        let rates = Rates::of(KERNEL, "k").expect("a kernel");
        let chunk = rates.chunk;
        assert_eq!((chunk.int8, chunk.int8_cycles), (8, 512));
        assert_eq!((chunk.valu, chunk.valu_cycles), (2, 20));
        assert_eq!((chunk.local, chunk.local_cycles), (8, 64));
        assert_eq!((chunk.global, chunk.global_cycles), (8, 128));
        assert_eq!((chunk.scalar, chunk.barriers), (17, 8));
        // 4 waves share the cache: 512 cycles, as long as the matrix unit.
        assert_eq!(rates.share("gfx908"), 100.0);
        assert_eq!(rates.unoverlapped(), percent(512, 512 + 20 + 256 + 512));
        assert_eq!((rates.waves("gfx908"), rates.waves("gfx90a")), (2, 2));
    }

    #[test]
    fn a_loop_over_words_repeats_within_a_step() {
        let text = KERNEL.replace(
            "\tv_mfma_i32_32x32x8i8 a[0:15], v1, v2, a[0:15]\n",
            ".LBB0_9:  ;   Parent Loop BB0_1 Depth=1\n ;   Parent Loop BB0_2 Depth=2\n ; => This Inner Loop Header: \
             Depth=3\n\tv_dot4_i32_i8 v1, v2, v3, v1\n; %bb.10: ;   in Loop: Header=BB0_2 Depth=2\n",
        );
        let rates = Rates::of(&text, "k").expect("a kernel");
        assert_eq!((rates.chunk.int8, rates.chunk.int8_cycles), (32, 128));
        let stray =
            text.replace("; %bb.3:", ".LBB0_7: ; Parent Loop BB0_2 Depth=2\n ; =>This Loop Header: Depth=3\n; %bb.3:");
        assert!(Rates::of(&stray, "k").is_err_and(|error| error.contains("BB0_7")));
    }

    #[test]
    fn kernels_without_products_are_refused() {
        assert!(Rates::of(&KERNEL.replace("v_mfma_i32_32x32x8i8", "v_other"), "k").is_err());
        assert!(Rates::of(KERNEL, "another").is_err());
    }

    #[test]
    fn rates_follow_the_peaks() {
        // Compute units, clock in GHz, operations of an instruction: the card's peak.
        for ((_, _, peak), (units, clock, operations, name)) in DEVICES.into_iter().zip([
            (60.0, 1.746, 512.0, "v_dot4_i32_i8"),
            (120.0, 1.502, 16_384.0, "v_mfma_i32_32x32x8i8"),
            (220.0, 1.7, 16_384.0, "v_mfma_i32_32x32x8i8"),
            (304.0, 2.1, 32_768.0, "v_mfma_i32_32x32x16_i8"),
        ]) {
            let cycles = int8_cycles(name).expect("an int8 instruction") as f64;
            let tops = units * 4.0 * operations / cycles * clock / 1000.0;
            assert!((tops / peak - 1.0).abs() < 0.01, "{name}: {tops} against {peak}");
        }
    }
}

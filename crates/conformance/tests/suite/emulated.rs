//! The machine code of gfx906, gfx908, gfx90a and gfx942 in an emulator: a sample of the cases with
//! adversarial seeds (`cargo xtask amd-run` runs the rest), and mistakes that must be found.

use crate::edited::Edited;
use isobit_conformance::emulated::Emulated;
use isobit_conformance::{Absent, Case, Visitor, cases, first_difference, in_own_process, skip, work_of};
use isobit_gcn::{Architecture, Card, Dialect, Settings, Toolchain};
use isobit_kernels::backend::BegunDigests;
use isobit_kernels::gpu::{Api, Gpu, Selector};
use isobit_kernels::op::{Add, AnyBuffer};
use isobit_kernels::{Counting, Cpu, Device, DeviceFailure, Path, Reference};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;
use std::rc::Rc;

/// BOUND: multiply-adds and outputs of a case, so that the samples take two minutes of a core
/// together.
const WORK_MAX: u64 = 10_000;

/// BOUND: the same for cases on matrix cores.
const MFMA_WORK_MAX: u64 = 1_500_000;

/// BOUND: the same for a sample of them.
const MFMA_SAMPLE_MAX: u64 = 200_000;

/// Whether the tools are there; a missing one is a skip, or a failure where it is required.
pub(crate) fn available(test: &str, toolchain: Toolchain) -> bool {
    let why = toolchain.unavailable_because();
    skip(test, &why.iter().map(|why| (toolchain.name().to_string(), why.clone())).collect::<Vec<_>>());
    why.is_none()
}

fn emulated(settings: Settings, visit: impl Fn(&mut Emulated)) {
    emulated_up_to(WORK_MAX, settings, visit);
}

fn emulated_up_to(work_max: u64, settings: Settings, visit: impl Fn(&mut Emulated)) -> Emulated {
    let mut emulated = Emulated::new(settings, work_max).unwrap_or_else(|absent| match absent {
        Absent::Missing(why) | Absent::Broken(why) => panic!("{why}"),
    });
    visit(&mut emulated);
    assert!(emulated.compared > 0, "no case was compared");
    assert!(emulated.differences.is_empty(), "{}", emulated.differences.join("\n"));
    emulated
}

/// Kernels that run on matrix cores where there are some.
const MATRIX_KERNELS: [&str; 8] = [
    "product_forward",
    "product_input",
    "product_weight",
    "product4_forward",
    "product4_input",
    "attention_forward",
    "attention_grad_query",
    "attention_grad_key",
];

/// That these kernels ran, and multiplied by matrix instructions alone.
fn assert_matrix_cores(emulated: &Emulated, cases_min: usize) {
    assert!(emulated.compared >= cases_min, "{} cases", emulated.compared);
    for kernel in MATRIX_KERNELS {
        let executed = emulated.card().executed(kernel);
        let times = |start: &str| -> u64 {
            executed.iter().filter(|(name, _)| name.starts_with(start)).map(|(_, times)| times).sum()
        };
        assert!(times("v_mfma_i32") > 0 && times("v_dot4") == 0, "{kernel}: {executed:?}");
    }
}

fn sample(test: &str, settings: Settings) {
    if available(test, settings.toolchain) {
        emulated(settings, cases::visit_all);
    }
}

#[test]
fn gfx906_in_hip() {
    sample("emulated::gfx906_in_hip", Settings { seed: 1, ..Settings::new(Architecture::Gfx906) });
}

#[test]
fn gfx908_in_hip() {
    sample("emulated::gfx908_in_hip", Settings { seed: 2, ..Settings::new(Architecture::Gfx908) });
}

/// Products and attention on matrix cores: tiles are large, and so are the cases.
#[test]
fn matrix_cores_of_gfx908() {
    let settings = Settings { seed: 4, ..Settings::new(Architecture::Gfx908) };
    if available("emulated::matrix_cores_of_gfx908", settings.toolchain) {
        let emulated = emulated_up_to(MFMA_WORK_MAX, settings, |visitor| {
            cases::product::visit(visitor);
            cases::product::visit_tile_borders(visitor);
            cases::product4::visit(visitor);
            cases::attention::visit(visitor);
        });
        assert_matrix_cores(&emulated, 30);
    }
}

/// The other forms of matrix instructions, and packed floats.
#[test]
fn matrix_cores_of_gfx90a_and_gfx942() {
    for (architecture, seed) in [(Architecture::Gfx90a, 5), (Architecture::Gfx942, 6)] {
        let settings = Settings { seed, ..Settings::new(architecture) };
        if available("emulated::matrix_cores_of_gfx90a_and_gfx942", settings.toolchain) {
            let emulated = emulated_up_to(MFMA_SAMPLE_MAX, settings, |visitor| {
                some_ops(visitor);
                cases::product4::visit(visitor);
                cases::attention::visit(visitor);
            });
            assert_matrix_cores(&emulated, 90);
        }
    }
}

/// Finds out whether the first case of some work differs from the reference.
struct FirstCase {
    gpu: Gpu,
    counting: Counting<Cpu>,
    differs: Option<bool>,
}

impl Visitor for FirstCase {
    fn op(&mut self, _: &'static str) {}

    fn case<C: Case>(&mut self, case: &C) {
        if self.differs.is_none() && (10_000..MFMA_WORK_MAX).contains(&work_of(&self.counting, case)) {
            let want = case.run(&Reference);
            self.differs = Some(match catch_unwind(AssertUnwindSafe(|| case.run(&self.gpu))) {
                Ok(got) => first_difference(&want, &got).is_some(),
                // The case's own check of its results. A fault of the card is no difference.
                Err(panic) if panic.downcast_ref::<String>().is_some_and(|text| text.contains(" is finite: ")) => true,
                Err(panic) => resume_unwind(panic),
            });
        }
    }
}

#[test]
fn a_wrong_layout_of_matrix_operands_is_found() {
    if !available("emulated::a_wrong_layout_of_matrix_operands_is_found", Toolchain::Assembly) {
        return;
    }
    let differs = |edit: [&'static str; 2], visit: fn(&mut FirstCase)| {
        let cpu = Cpu::new(1, Path::Scalar).expect("a path that is always there");
        let gpu = edited(Settings::new(Architecture::Gfx908), edit);
        let mut first = FirstCase { gpu, counting: Counting::new(cpu), differs: None };
        visit(&mut first);
        first.differs.expect("a case of that size")
    };
    let products = |edit| differs(edit, cases::product::visit);
    let attention = |edit| differs(edit, cases::attention::visit);
    assert!(!products(["not in the source", ""]) && !attention(["not in the source", ""]));
    // Rows of the sums, halves of the contraction, and words of one operand against the other's.
    assert!(products(["i % EACH / 4u * 8u", "i % EACH / 4u * 4u"]));
    assert!(products(["place(row, piece + half_wave)", "place(row, piece)"]));
    assert!(products(["(a[3], b[3], sums", "(a[3], b[2], sums"]));
    assert!(attention(["/ BLOCK * 4u + r;", "/ BLOCK + 4u * r;"]));
    assert!(attention(["(a[1], b[1], sums", "(a[1], b[0], sums"]));
}

#[test]
fn gfx906_in_opencl() {
    let settings = Settings { seed: 3, dialect: Dialect::OpenCl, ..Settings::new(Architecture::Gfx906) };
    if available("emulated::gfx906_in_opencl", settings.toolchain) {
        emulated(settings, some_ops);
    }
}

/// Ops that together use most kinds of instruction.
fn some_ops<V: Visitor>(visitor: &mut V) {
    cases::elementary::visit(visitor);
    cases::rms_norm::visit(visitor);
    cases::product::visit(visitor);
    cases::adamw::visit(visitor);
}

#[test]
fn code_objects_of_clang() {
    let toolchain = Toolchain::CodeObject;
    if available("emulated::code_objects_of_clang", toolchain) {
        for architecture in [Architecture::Gfx906, Architecture::Gfx908] {
            emulated(Settings { toolchain, ..Settings::new(architecture) }, some_ops);
        }
    }
}

/// In a process of its own: hipRTC and OpenCL on the CPU may both bring clang, which ends a process
/// that loads it twice.
#[test]
fn code_objects_of_hiprtc() {
    if !available("emulated::code_objects_of_hiprtc", Toolchain::HipRtc) {
        return;
    }
    let work_max = WORK_MAX.to_string();
    for architecture in [Architecture::Gfx906, Architecture::Gfx908] {
        let ops = ["elementary", "rms_norm", "product", "product4", "attention", "adamw"];
        let mut conform = Command::new(env!("CARGO_BIN_EXE_conform"));
        conform.args(ops).args(["--toolchain", "hiprtc", "--work", &work_max, "--on", architecture.name()]);
        let output = conform.output().expect("conform");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains("0 differences"), "{text}");
    }
}

/// A card knows what the waves of a kernel have executed.
#[test]
fn instructions_are_counted_by_kernel() {
    if !available("emulated::instructions_are_counted_by_kernel", Toolchain::Assembly) {
        return;
    }
    let (gpu, card) = Card::new(Settings::new(Architecture::Gfx906)).into_gpu().expect("a card");
    let (x, mut y, before) = (gpu.upload(&[1.0f32; 300]), gpu.zeros::<f32>(300), card.steps());
    gpu.run(Add { y: &mut y, a: &x, b: &x });
    gpu.download(&y).expect("no fault");
    let executed = card.executed("add_elements");
    assert_eq!(executed.values().sum::<u64>(), card.steps() - before);
    assert!(executed["s_endpgm"] > 0 && executed.keys().any(|name| name.starts_with("v_add_f32")), "{executed:?}");
    assert!(card.executed("another").is_empty());
}

/// A card with edited kernels.
fn edited(settings: Settings, [from, to]: [&'static str; 2]) -> Gpu {
    let (card, selector) = (Card::new(settings), Selector { api: Api::Hip, index: 0 });
    Gpu::with_runtime(Rc::new(Edited { card, from, to }), selector).expect("the probe finds nothing")
}

/// What goes wrong in `run` with edited kernels.
fn mistake(seed: u64, edit: [&'static str; 2], run: impl Fn(&Gpu) -> Result<(), DeviceFailure>) -> String {
    let gpu = edited(Settings { seed, ..Settings::new(Architecture::Gfx906) }, edit);
    run(&gpu).expect_err("the mistake is found").what
}

/// Launches the kernels of the digest, which has a shared array and barriers.
fn digest(gpu: &Gpu) -> Result<(), DeviceFailure> {
    let buffer = gpu.upload(&vec![1.0f32; 5000]);
    BegunDigests::new(gpu, &[AnyBuffer::F32(&buffer)]).finish(gpu).map(drop)
}

#[test]
fn a_missing_barrier_is_found() {
    if available("emulated::a_missing_barrier_is_found", Toolchain::Assembly) {
        // Depending on which wave comes first, it is a race or a read of what is not yet written.
        let found = [0, 1, 2, 3].map(|seed| mistake(seed, ["__builtin_amdgcn_s_barrier();", ";"], digest));
        for found in &found {
            assert!(found.contains("race") || found.contains("before it is written"), "{found}");
            let named = found.contains("`, at digest.cl:") || found.contains("`, at lanes.h:");
            assert!(found.contains("in `ds_") && named && found.ends_with('`'), "{found}");
        }
    }
}

/// A mistake in `add.cl`: what is replaced, by what, and what the message must say. The replaced
/// text is on the line that it must name.
struct Planted {
    from: &'static str,
    to: &'static str,
    says: &'static str,
}

const PLANTED: [Planted; 4] = [
    Planted { from: "left[n] = i < length", to: "left[n] = i <= length", says: "out of bounds" },
    Planted {
        from: "right[n] = i < length ? b[i]",
        to: "right[n] = i < length ? ((GLOBAL const float *)((GLOBAL const char *)b + 2))[i]",
        says: "misaligned",
    },
    Planted {
        from: "y[i] = left[n] + right[n];",
        to: "float x; __asm__ volatile(\"v_mov_b32 %0, v200\" : \"=v\"(x)); y[i] = x;",
        says: "never written",
    },
    Planted {
        from: "ulong first =",
        to: "__asm__ volatile(\"s_icache_inv\"); ulong first =",
        says: "unknown instruction",
    },
];

/// Every mistake is found, with its file and line, in what the toolchain makes of it.
fn planted_mistakes_are_found(toolchain: Toolchain) {
    let add = include_str!("../../../kernels/gpu/add.cl");
    for Planted { from, to, says } in PLANTED {
        let settings = Settings { toolchain, ..Settings::new(Architecture::Gfx906) };
        let gpu = edited(settings, [from, to]);
        let (x, mut y) = (gpu.upload(&[1.0f32; 300]), gpu.zeros::<f32>(300));
        gpu.run(Add { y: &mut y, a: &x, b: &x });
        let found = gpu.download(&y).map(drop).expect_err("the mistake is found").what;
        assert!(found.contains(says) && found.contains("add"), "{found}");
        let line = 1 + add.lines().position(|line| line.contains(from)).expect("what is replaced");
        assert!(found.contains(&format!("`, at add.cl:{line}")), "{found}");
    }
}

#[test]
fn mistakes_are_found_with_their_line_in_assembly() {
    if available("emulated::mistakes_are_found_with_their_line_in_assembly", Toolchain::Assembly) {
        planted_mistakes_are_found(Toolchain::Assembly);
    }
}

#[test]
fn mistakes_are_found_with_their_line_in_code_objects() {
    if available("emulated::mistakes_are_found_with_their_line_in_code_objects", Toolchain::CodeObject) {
        planted_mistakes_are_found(Toolchain::CodeObject);
    }
}

#[test]
fn mistakes_are_found_with_their_line_in_what_hiprtc_makes() {
    const TEST: &str = concat!(module_path!(), "::", "mistakes_are_found_with_their_line_in_what_hiprtc_makes");
    if available("emulated::mistakes_are_found_with_their_line_in_what_hiprtc_makes", Toolchain::HipRtc) {
        in_own_process(TEST, |_| {}, || planted_mistakes_are_found(Toolchain::HipRtc));
    }
}

/// Opens a card whose programs are compiled with one more option; the probe must refuse it.
fn refused(option: &str) -> String {
    let settings = Settings { options: vec![option.to_string()], ..Settings::new(Architecture::Gfx906) };
    Card::open(settings).map(drop).expect_err("the option is found").what
}

#[test]
fn contraction_is_found() {
    if available("emulated::contraction_is_found", Toolchain::Assembly) {
        let found = refused("-ffp-contract=fast");
        assert!(found.contains("a product and a sum are contracted"), "{found}");
    }
}

/// No option forbids contraction in OpenCL: the pragma of `opencl.h` does.
#[test]
fn a_missing_pragma_is_found() {
    if available("emulated::a_missing_pragma_is_found", Toolchain::Assembly) {
        let opened = |from| {
            let settings = Settings { dialect: Dialect::OpenCl, ..Settings::new(Architecture::Gfx906) };
            let (card, selector) = (Card::new(settings), Selector { api: Api::OpenCl, index: 0 });
            Gpu::with_runtime(Rc::new(Edited { card, from, to: "" }), selector).map(drop)
        };
        assert!(opened("not in the source").is_ok());
        let found = opened("#pragma OPENCL FP_CONTRACT OFF").expect_err("the mistake is found").what;
        assert!(found.contains("a product and a sum are contracted"), "{found}");
    }
}

#[test]
fn a_flushed_subnormal_is_found() {
    if available("emulated::a_flushed_subnormal_is_found", Toolchain::Assembly) {
        let found = refused("-fgpu-flush-denormals-to-zero");
        assert!(found.contains("a subnormal"), "{found}");
    }
}

//! Every rule applies to a machine with its cause, and to none without it.

use crate::machine::Machine;
use crate::snapshots;
use isobit_doctor::{VARIABLES, findings_text, rule_ids};
use isobit_kernels::gpu::hip::{APPENDING_VARIABLES, HIDING_VARIABLES};
use std::collections::BTreeSet;

/// Changes a machine.
type Change = fn(&mut Machine);

/// A rule, a machine and what to add for the rule to apply, and changes after each of which it does
/// not.
struct Trial {
    id: &'static str,
    machine: &'static str,
    cause: Change,
    without: &'static [Change],
}

const PROPERTIES: &str = "sys/class/kfd/kfd/topology/nodes/1/properties";

/// The first card is of another architecture.
fn becomes(machine: &Machine, version: u32) {
    let text = std::fs::read_to_string(machine.path(PROPERTIES)).expect("properties");
    let other = |line: &str| match line.split_once(' ') {
        Some(("gfx_target_version", _)) => format!("gfx_target_version {version}\n"),
        _ => format!("{line}\n"),
    };
    machine.put(PROPERTIES, text.lines().map(other).collect::<String>());
}

fn with_lanes_of_32(machine: &Machine) {
    let text = std::fs::read_to_string(machine.path(PROPERTIES)).expect("properties");
    machine.put(PROPERTIES, text.replace("wave_front_size 64", "wave_front_size 32"));
}

const NO_PYTHON: Change = |machine| machine.python = None;
const AN_MI100: Change = |machine| becomes(machine, 90_008);
const AN_MI50: Change = |machine| becomes(machine, 90_006);

#[rustfmt::skip]
const TRIALS: &[Trial] = &[
    Trial {
        id: "torch-2.5.1-rocm6.2-on-gfx906", machine: "mi50",
        cause: |m| m.put_python("3.11.2", &[("torch", "2.5.1+rocm6.2")]),
        without: &[
            NO_PYTHON, AN_MI100,
            |m| m.put_python("3.12.1", &[("torch", "2.5.1+rocm6.1")]),
            |m| m.put_python("3.12.1", &[("torch", "2.7.0+rocm6.3")]),
            |m| m.put_python("3.12.1", &[("torchvision", "2.5.1+rocm6.2")]),
        ],
    },
    Trial {
        id: "torch-2.0-rocm5.4-on-gfx906", machine: "mi50",
        cause: |m| m.put_python("3.10.1", &[("torch", "2.0.1+rocm5.4.2")]),
        without: &[NO_PYTHON, AN_MI100, |m| m.put_python("3.11.1", &[("torch", "2.1.0+rocm5.4.2")])],
    },
    Trial {
        id: "torch-rocm6.4-on-gfx906", machine: "mi50",
        cause: |m| m.put_python("3.12.1", &[("torch", "2.8.0+rocm6.4")]),
        without: &[NO_PYTHON, AN_MI100, |m| m.put_python("3.11.1", &[("torch", "2.7.0+rocm6.3")])],
    },
    Trial {
        id: "rocm-6.4-without-gfx906", machine: "mi50",
        cause: |m| m.put("opt/rocm/.info/version", "6.4.0-47\n"),
        without: &[AN_MI100, |m| m.put("opt/rocm/.info/version", "6.3.4-76\n"), |m| m.remove("opt")],
    },
    Trial {
        id: "gfx942-needs-rocm-6", machine: "mi300x",
        cause: |m| m.put("opt/rocm/.info/version", "5.7.1-98\n"),
        without: &[AN_MI100, |m| m.put("opt/rocm/.info/version", "6.0.0-91\n")],
    },
    Trial {
        id: "gfx950-needs-rocm-7", machine: "mi300x",
        cause: |m| { becomes(m, 90_500); m.put("opt/rocm/.info/version", "6.4.1-83\n"); },
        without: &[AN_MI100, |m| m.put("opt/rocm/.info/version", "7.0.2-56\n")],
    },
    Trial { id: "gfx940-was-never-sold", machine: "mi300x", cause: |m| becomes(m, 90_400), without: &[AN_MI100] },
    Trial {
        id: "override-names-another-architecture", machine: "mi50",
        cause: |m| m.set("HSA_OVERRIDE_GFX_VERSION", "9.0.8"),
        without: &[
            AN_MI100, |m| m.set("HSA_OVERRIDE_GFX_VERSION", "9.0.6"), |m| m.set("HSA_OVERRIDE_GFX_VERSION", ""),
            |m| m.variables.clear(),
        ],
    },
    Trial {
        id: "override-with-unlike-cards", machine: "mixed",
        cause: |m| m.set("HSA_OVERRIDE_GFX_VERSION", "9.0.10"),
        without: &[|m| m.variables.clear(), |m| m.remove("sys/class/kfd/kfd/topology/nodes/2")],
    },
    Trial {
        id: "compiler-options-appended", machine: "none",
        cause: |m| m.set("HIPRTC_LINK_OPTIONS_APPEND", "-ffast-math"),
        without: &[|m| m.variables.clear(), |m| m.set("HIPRTC_LINK_OPTIONS_APPEND", "")],
    },
    Trial {
        id: "several-cards-without-iommu-pt", machine: "two-mi100",
        cause: |_| (),
        without: &[
            |m| m.put("proc/cmdline", "quiet iommu=pt\n"), |m| m.put("proc/cmdline", "amd_iommu=off\n"),
            |m| m.remove("sys/class/kfd/kfd/topology/nodes/3"),
        ],
    },
    Trial {
        id: "data-centre-card-beside-another-kind", machine: "mixed",
        cause: |_| (),
        without: &[|m| m.remove("sys/class/kfd/kfd/topology/nodes/2"), |m| becomes(m, 100_300)],
    },
    Trial {
        id: "python-3.13-with-old-torch", machine: "none",
        cause: |m| m.put_python("3.13.1", &[("torch", "2.5.1")]),
        without: &[
            NO_PYTHON, |m| m.put_python("3.13.1", &[("torch", "2.6.0")]), |m| m.put_python("3.12.4", &[("torch", "2.5.1")]),
        ],
    },
    Trial {
        id: "python-without-interpreter", machine: "none",
        cause: |m| { m.put_python("3.12.1", &[]); m.remove("venv/bin"); },
        without: &[NO_PYTHON, |m| m.put("venv/bin/python", ""), |m| m.put("venv/bin/python3", "")],
    },
    Trial {
        id: "bitsandbytes-on-wavefronts-of-64", machine: "mi300x",
        cause: |m| m.put_python("3.12.1", &[("bitsandbytes", "0.48.1")]),
        without: &[
            NO_PYTHON, AN_MI50, |m| m.put_python("3.12.1", &[("bitsandbytes", "0.50.0")]), |m| with_lanes_of_32(m),
        ],
    },
    Trial {
        id: "bitsandbytes-without-gfx906", machine: "mi50",
        cause: |m| m.put_python("3.12.1", &[("bitsandbytes", "0.50.0")]),
        without: &[NO_PYTHON, AN_MI100, |m| m.put_python("3.11.1", &[("peft", "0.50.0")])],
    },
    Trial {
        id: "hipblaslt-bias-gradient", machine: "mi300x",
        cause: |m| m.put_python("3.12.1", &[("transformer-engine", "2.2.0")]),
        without: &[NO_PYTHON, AN_MI50],
    },
    Trial {
        id: "tf32-products-on-gfx950", machine: "mi300x",
        cause: |m| { becomes(m, 90_500); m.put_python("3.12.1", &[("torch", "2.9.0+rocm7.0")]); },
        without: &[NO_PYTHON, AN_MI100],
    },
    Trial {
        id: "torchao-needs-torch-2.6", machine: "none",
        cause: |m| m.put_python("3.12.1", &[("torch", "2.5.1"), ("torchao", "0.9.0")]),
        without: &[
            NO_PYTHON, |m| m.put_python("3.11.1", &[("torch", "2.5.1")]),
            |m| m.put_python("3.12.1", &[("torch", "2.6.0"), ("torchao", "0.9.0")]),
        ],
    },
    Trial {
        id: "cuda-wheel-on-amd", machine: "mi50",
        cause: |m| m.put_python("3.12.1", &[("torch", "2.6.0+cu124")]),
        without: &[
            NO_PYTHON, |m| m.put_python("3.11.1", &[("torch", "2.7.0+rocm6.3")]),
            |m| m.put("proc/driver/nvidia/version", "NVRM version: 570.86.15\n"), |m| m.remove("sys"),
        ],
    },
    Trial {
        id: "attention-without-flash-on-gfx906", machine: "mi50",
        cause: |m| m.put_python("3.12.1", &[("torch", "2.7.0+rocm6.3")]),
        without: &[NO_PYTHON, AN_MI100, |m| m.put_python("3.12.1", &[("torch", "2.7.0+cpu")])],
    },
    Trial {
        id: "no-driver-for-computing", machine: "mi50",
        cause: |m| m.remove("sys/class/kfd"),
        without: &[|m| m.put("sys/class/kfd/kfd/topology/generation_id", "1\n"), |m| m.remove("sys/class/drm")],
    },
    Trial {
        id: "no-access-to-the-device", machine: "mi50",
        cause: |m| m.remove("dev/kfd"),
        without: &[|m| m.put("dev/kfd", ""), |m| m.remove("sys/class/kfd")],
    },
    Trial {
        id: "cards-are-hidden", machine: "mi50",
        cause: |m| m.set("HIP_VISIBLE_DEVICES", "0"),
        without: &[|m| m.variables.clear(), |m| m.remove("sys/class/kfd")],
    },
    Trial {
        id: "narrow-link", machine: "two-mi100",
        cause: |_| (),
        without: &[|m| m.put("sys/class/drm/card2/device/current_link_width", "16\n"), |m| m.remove("sys/class/drm/card2")],
    },
    Trial {
        id: "divided-card", machine: "mi300x",
        cause: |m| m.put("sys/class/drm/card0/device/current_compute_partition", "CPX\n"),
        without: &[AN_MI100, |m| m.put("sys/class/drm/card0/device/current_compute_partition", "SPX\n")],
    },
];

#[test]
fn every_rule_applies_with_its_cause_and_not_without() {
    let tried: BTreeSet<&str> = TRIALS.iter().map(|trial| trial.id).collect();
    let ids = rule_ids();
    assert_eq!(tried, ids.iter().map(String::as_str).collect());
    let mut said = String::new();
    for Trial { id, machine, cause, without } in TRIALS {
        let caused = || {
            let mut changed = Machine::of(machine);
            cause(&mut changed);
            changed
        };
        let machine = caused();
        let found = isobit_doctor::findings(&machine.facts());
        let applies: Vec<_> = found.into_iter().filter(|finding| finding.id == *id).collect();
        assert!(!applies.is_empty(), "{id} does not apply: {:?}", caused().ids());
        said += &findings_text(&applies).replace(machine.path("").display().to_string().trim_end_matches('/'), "");
        for (index, change) in without.iter().enumerate() {
            let mut changed = caused();
            change(&mut changed);
            assert!(!changed.ids().iter().any(|found| found == id), "{id} applies without cause {index}");
        }
    }
    snapshots::check("rules", &said);
}

/// Two rules about one package must not send somebody in two directions.
#[test]
fn each_bitsandbytes_gets_one_advice() {
    for machine in ["mi50", "two-mi100", "mi300x"] {
        for version in ["0.43.0", "0.48.1", "0.50.0"] {
            let mut machine = Machine::of(machine);
            machine.put_python("3.12.1", &[("bitsandbytes", version)]);
            let ids = machine.ids();
            let about: Vec<&String> = ids.iter().filter(|id| id.starts_with("bitsandbytes")).collect();
            assert!(about.len() <= 1, "{version}: {about:?}");
        }
    }
}

/// The variables that Isobit itself looks at, HIP's name for CUDA's included.
#[test]
fn every_variable_of_the_runtime_counts() {
    for (id, names) in
        [("cards-are-hidden", &HIDING_VARIABLES[..]), ("compiler-options-appended", &APPENDING_VARIABLES)]
    {
        for name in names {
            assert!(VARIABLES.contains(name), "{name} is not read");
            let mut machine = Machine::of("mi50");
            machine.set(name, "1");
            assert_eq!(machine.ids(), [id], "{name}");
        }
    }
}

/// A machine with nothing wrong is told nothing.
#[test]
fn healthy_machines_have_no_findings() {
    for name in ["mi50", "mi300x", "none"] {
        assert_eq!(Machine::of(name).ids(), Vec::<String>::new(), "{name}");
    }
    let mut machine = Machine::of("mi300x");
    machine.put_python("3.12.1", &[("torch", "2.9.0+rocm7.0"), ("bitsandbytes", "0.50.0"), ("torchao", "0.14.0")]);
    assert_eq!(machine.ids(), Vec::<String>::new());
}

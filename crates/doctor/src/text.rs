//! Facts and findings in words.

use crate::amd::{Card, Link};
use crate::facts::Facts;
use crate::rules::{Finding, Level};
use std::fmt::Write;

/// Width of the first column.
pub const COLUMN: usize = 11;

/// What a machine has, a line for each thing.
pub fn facts_text(facts: &Facts) -> String {
    let mut out = String::new();
    let mut put = |name: &str, text: String| {
        let _ = writeln!(out, "{name:<COLUMN$}{text}");
    };
    if let Some(kernel) = &facts.kernel {
        let words = facts.command_line.join(" ");
        put("kernel", if words.is_empty() { kernel.clone() } else { format!("{kernel}, {words}") });
    }
    match (&facts.cards[..], facts.kfd) {
        ([], true) => put("AMD", "the driver is loaded, but has no card".to_string()),
        ([], false) => put("AMD", "no card".to_string()),
        (cards, _) => cards.iter().for_each(|card| put("AMD", card_text(card))),
    }
    let versions = [("amdgpu", &facts.amdgpu), ("ROCm", &facts.rocm)];
    for (name, version) in versions.into_iter().filter_map(|(name, version)| Some((name, version.as_ref()?))) {
        put(name, version.clone());
    }
    match &facts.nvidia {
        None => put("NVIDIA", "no driver".to_string()),
        Some(nvidia) => {
            put("NVIDIA", format!("driver {}", nvidia.driver));
            nvidia.cards.iter().for_each(|(model, pci)| put("NVIDIA", format!("{pci} {model}")));
        }
    }
    let drivers = if facts.opencl.is_empty() { "no driver".to_string() } else { facts.opencl.join(", ") };
    put("OpenCL", drivers);
    for (name, value) in &facts.variables {
        put("variable", format!("{name}={value}"));
    }
    if let Some(python) = &facts.python {
        let version = python.version.as_deref().unwrap_or("of unknown version");
        let (count, folder) = (python.packages.len(), &python.folder);
        put("Python", format!("{version}, {count} {} in {folder}", if count == 1 { "package" } else { "packages" }));
    }
    out
}

fn card_text(card: &Card) -> String {
    let mut parts = vec![match card.product {
        Some(product) => format!("{} {} ({product})", card.pci, card.architecture),
        None => format!("{} {}", card.pci, card.architecture),
    }];
    parts.extend(card.compute_units.map(|units| format!("{units} compute units")));
    let used = card.memory_used_bytes.map_or(String::new(), |bytes| format!(", {} of it in use", gibibytes(bytes)));
    parts.push(format!("{}{used}", gibibytes(card.memory_bytes)));
    if let Some(Link { speed, width, speed_max, width_max }) = &card.link {
        let most = match (speed_max, width_max) {
            (Some(speed_max), Some(width_max)) if (speed_max, width_max) != (speed, width) => {
                format!(" of x{width_max} {speed_max}")
            }
            _ => String::new(),
        };
        parts.push(format!("PCIe x{width} {speed}{most}"));
    }
    if card.xgmi {
        parts.push("xGMI".to_string());
    }
    parts.extend(card.partition.as_ref().map(|mode| format!("mode {mode}")));
    parts.join(", ")
}

fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

/// Each finding: what, why, what to do, and where it is known from.
pub fn findings_text(findings: &[Finding]) -> String {
    let mut out = String::new();
    for Finding { id, level, what, why, remedy, source } in findings {
        let level = match level {
            Level::Error => "error",
            Level::Warning => "warning",
            Level::Note => "note",
        };
        let _ = writeln!(out, "{level}: {what} [{id}]\n  why: {why}\n  do: {remedy}");
        if !source.is_empty() {
            let _ = writeln!(out, "  source: {}", source.join("; "));
        }
    }
    out
}

//! One digest per op and backend, side by side: the table in `docs/devices.md`.

use crate::digests::digest;
use crate::{Case, Visitor, devices};
use isobit_kernels::{Cpu, Device, Gpu, Path, Reference};
use isobit_numerics::digest::Digest;
use std::fmt;

/// Runs every case on the reference, on every CPU path (two threads) and on every device.
pub struct Table {
    paths: Vec<Cpu>,
    devices: Vec<Gpu>,
    /// An op, the number of its cases, and the digests of all of them so far, one list per column.
    rows: Vec<(&'static str, usize, Vec<Vec<u8>>)>,
}

impl Table {
    pub fn new() -> Self {
        Self {
            paths: Path::available().into_iter().filter_map(|path| Cpu::new(2, path).ok()).collect(),
            devices: devices().into_iter().filter_map(|(_, device)| device.ok()).collect(),
            rows: Vec::new(),
        }
    }

    /// Columns whose name contains `name`, beside the reference.
    pub fn on(name: &str) -> Self {
        let mut named = Self::new();
        named.paths.retain(|cpu| cpu.name().contains(name));
        named.devices.retain(|gpu| gpu.name().contains(name));
        named
    }

    /// Whether the reference is its only column.
    pub fn is_empty(&self) -> bool {
        self.paths.is_empty() && self.devices.is_empty()
    }

    fn columns(&self) -> Vec<String> {
        let paths = self.paths.iter().map(|cpu| format!("cpu/{}", cpu.path()));
        let devices = self.devices.iter().map(Device::name);
        ["reference".to_string()].into_iter().chain(paths).chain(devices).collect()
    }

    /// Ops for which a backend differs from the reference.
    pub fn differing(&self) -> Vec<&'static str> {
        let differs = |all: &[Vec<u8>]| all.iter().any(|one| *one != all[0]);
        self.rows.iter().filter(|(_, _, all)| differs(all)).map(|(op, ..)| *op).collect()
    }
}

impl Default for Table {
    fn default() -> Self {
        Self::new()
    }
}

impl Visitor for Table {
    fn op(&mut self, name: &'static str) {
        self.rows.push((name, 0, vec![Vec::new(); 1 + self.paths.len() + self.devices.len()]));
    }

    fn case<C: Case>(&mut self, case: &C) {
        let mut digests = vec![digest(&case.run(&Reference))];
        digests.extend(self.paths.iter().map(|cpu| digest(&case.run(cpu))));
        digests.extend(self.devices.iter().map(|gpu| digest(&case.run(gpu))));
        let (_, cases, all) = self.rows.last_mut().expect("an op was announced");
        *cases += 1;
        for (all, digest) in all.iter_mut().zip(digests) {
            all.extend(digest.to_string().bytes());
        }
    }
}

/// Prints Markdown.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.columns();
        writeln!(f, "| op | cases | {} |", columns.join(" | "))?;
        writeln!(f, "|---|---|{}", "---|".repeat(columns.len()))?;
        for (op, cases, all) in &self.rows {
            let digests: Vec<_> =
                all.iter().map(|all| format!("`{}`", &Digest::of_bytes(all).to_string()[..16])).collect();
            writeln!(f, "| {op} | {cases} | {} |", digests.join(" | "))?;
        }
        Ok(())
    }
}

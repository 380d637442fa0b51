//! Digests of the reference's results, one per case: stored in the golden file and compared by
//! `cargo xtask same-bits`.

use crate::{Case, Output, Visitor};
use isobit_kernels::Reference;
use isobit_numerics::digest::Digest;

/// Runs every case on the reference and keeps a line `digest name` for each.
#[derive(Debug, Default)]
pub struct ReferenceDigests {
    pub lines: Vec<String>,
}

impl Visitor for ReferenceDigests {
    fn case<C: Case>(&mut self, case: &C) {
        let outputs = case.run(&Reference);
        let finite = |output: &Output| output.bits.iter().all(|bits| f32::from_bits(*bits as u32).is_finite());
        assert!(!case.is_finite() || outputs.iter().all(finite), "results are finite: {}", case.name());
        self.lines.push(format!("{} {}", digest(&outputs), case.name()));
    }
}

/// Covers the names, element types, lengths and bits of all outputs.
pub fn digest(outputs: &[Output]) -> Digest {
    let mut bytes = Vec::new();
    for output in outputs {
        for text in [output.name, output.element] {
            bytes.extend((text.len() as u64).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
        bytes.extend((output.bits.len() as u64).to_le_bytes());
        bytes.extend(output.bits.iter().flat_map(|bits| bits.to_le_bytes()));
    }
    Digest::of_bytes(&bytes)
}

//! Single instructions against the published rules, edge values included. Every mnemonic that the
//! decoder knows must occur here: those of a group in its table, the others in any test.

mod control;
mod division;
mod floats;
mod integers;
mod scalars;

use crate::decode::{Nowhere, decode, without_encoding};
use crate::execute::{Environment, Pause};
use crate::instruction::{EXEC, LANES};
use crate::memory::Memory;
use crate::program::{FloatMode, Origin, Program};
use crate::race::Accessor;
use crate::random::order;
use crate::shared::{Private, Shared};
use crate::wave::Wave;
use isobit_numerics::SoftFma;

/// A wave with its surroundings.
pub(super) struct Bench {
    pub(super) wave: Wave,
    pub(super) memory: Memory,
    pub(super) shared: Shared,
    pub(super) seed: u64,
}

impl Bench {
    /// All lanes active, nothing written, 64 bytes of shared and 16 of private memory.
    pub(super) fn new(seed: u64) -> Self {
        let mut wave = Wave::new(0xdead_beef);
        wave.set_wide(EXEC, u64::MAX);
        wave.mode = FloatMode { rounding: 0, denormals: 3 };
        wave.private = Private::new(16, 7);
        Self { wave, memory: Memory::new(seed), shared: Shared::new(64, 7), seed }
    }

    /// Executes the lines until the wave pauses.
    pub(super) fn pause(&mut self, lines: &str) -> Result<Pause, String> {
        let mut program = Program::default();
        for line in lines.lines().map(str::trim).filter(|line| !line.is_empty()).chain(["s_endpgm"]) {
            program.code.push(decode(line, &Nowhere).map_err(|error| format!("{error}: {line}"))?);
            program.origins.push(Origin { text: line.into(), place: None });
        }
        self.wave.pc = 0;
        let mut environment = Environment {
            program: &program,
            image: 0x1_0000_0000,
            memory: &mut self.memory,
            shared: &mut self.shared,
            accessor: Accessor::new(1, 0, 0, 0),
            seed: self.seed,
            lane_order: &order(self.seed, LANES),
            steps: 0,
            executed: &mut [],
        };
        self.wave.run::<SoftFma>(&mut environment)
    }

    /// Executes the lines, to their end.
    pub(super) fn try_run(&mut self, lines: &str) -> Result<(), String> {
        self.pause(lines).map(|pause| assert_eq!(pause, Pause::End))
    }

    pub(super) fn run(&mut self, lines: &str) {
        self.try_run(lines).unwrap_or_else(|error| panic!("{lines}: {error}"));
    }

    /// One value in all lanes.
    pub(super) fn fill(&mut self, register: u16, value: u32) {
        self.wave.put_all(register, &[value; LANES], u64::MAX);
    }

    /// A value per lane.
    pub(super) fn lanes(&mut self, register: u16, value: impl Fn(usize) -> u32) {
        self.wave.put_all(register, &std::array::from_fn(value), u64::MAX);
    }

    pub(super) fn lane(&self, register: u16, lane: usize) -> u32 {
        let (lanes, defined) = self.wave.vector(register);
        assert_eq!(defined >> lane & 1, 1, "lane {lane} of v{register} was never written");
        lanes[lane]
    }
}

/// Executes an instruction with v1, v2 and v3 given; v0 of lane 5.
fn result(text: &str, sources: &[u32]) -> u32 {
    let mut bench = Bench::new(0);
    for (register, value) in (1..).zip(sources) {
        bench.fill(register, *value);
    }
    bench.run(text);
    bench.lane(0, 5)
}

/// A row: the instruction, v1.., and what v0 must be.
type Row<'a> = (&'a str, &'a [u32], u32);

fn check(rows: &[Row]) {
    for (text, sources, want) in rows {
        let got = result(text, sources);
        assert_eq!(got, *want, "{text} of {sources:08x?}: {got:08x}, not {want:08x}");
    }
}

/// Every mnemonic of a group is in a table.
fn assert_covered(mnemonics: &[&str], tables: &[&str]) {
    for mnemonic in mnemonics {
        let mut words = mnemonic.split(' ');
        let (name, modifier) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let is_it = |text: &&&str| {
            let found = text.split_whitespace().next().unwrap_or_default();
            without_encoding(found) == name && text.contains(modifier)
        };
        assert!(tables.iter().find(is_it).is_some(), "{mnemonic} has no test");
    }
}

/// Words of a text that look like mnemonics, without the suffix of their encoding.
fn mnemonics(text: &str) -> std::collections::BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let words =
        words.filter(|word| ["s_", "v_", "ds_", "global_", "buffer_"].iter().any(|kind| word.starts_with(kind)));
    words.map(without_encoding).collect()
}

/// The decoder names the mnemonics of no group in its own text.
#[test]
fn every_mnemonic_of_the_decoder_is_tested() {
    let decoder = include_str!("../decode.rs").split("mod tests").next().unwrap_or_default();
    let tests = [
        include_str!("control.rs"),
        include_str!("division.rs"),
        include_str!("floats.rs"),
        include_str!("integers.rs"),
        include_str!("scalars.rs"),
    ]
    .concat();
    let tested = mnemonics(&tests);
    let quoted = decoder.split('"').skip(1).step_by(2).filter(|text| !text.contains([' ', '\n']));
    let known: Vec<&str> = quoted.flat_map(mnemonics).filter(|name| !name.ends_with('_')).collect();
    assert!(known.len() > 60, "{known:?}");
    let missing: Vec<&&str> = known.iter().filter(|name| !tested.contains(**name) && **name != "s_endpgm").collect();
    assert!(missing.is_empty(), "no test: {missing:?}");
}

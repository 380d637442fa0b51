//! The state of a wave: 64 lanes with one program counter, registers that know whether they were
//! written, EXEC, SCC and MODE.

use crate::instruction::*;
use crate::program::{FloatMode, Kernel};
use crate::shared::Private;
use crate::vector::{Lanes, WideLanes};

/// A scalar value and its defined bits.
pub(crate) type ScalarValue<T> = (T, T);

/// The value of a source in every lane, and the lanes in which it was ever written.
pub(crate) type LaneValue<T> = (T, u64);

pub(crate) struct Wave {
    pub(crate) pc: usize,
    pub(crate) ended: bool,
    scalar: [u32; SCALAR_REGISTERS],
    /// Bits that were ever written: masks may be defined for some lanes only.
    scalar_defined: [u32; SCALAR_REGISTERS],
    pub(crate) scc: Option<bool>,
    vector: Box<[Lanes]>,
    vector_defined: Box<[u64]>,
    /// EXEC as a word of ones or zeros per lane.
    active: Lanes,
    pub(crate) mode: FloatMode,
    /// Added to the number of the first source while indexing is on.
    pub(crate) index: Option<u16>,
    pub(crate) private: Private,
}

/// How a group starts its waves.
pub(crate) struct Start<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) arguments: u64,
    pub(crate) group: u32,
    pub(crate) group_size: usize,
    pub(crate) poison: u32,
}

impl Wave {
    /// A wave that never ran. Registers hold garbage, and count as never written.
    pub(crate) fn new(poison: u32) -> Self {
        let garbage = |register: usize| [poison.wrapping_mul(register as u32 | 1); LANES];
        Self {
            pc: 0,
            ended: false,
            scalar: std::array::from_fn(|register| poison.wrapping_mul(register as u32 | 1)),
            scalar_defined: [0; SCALAR_REGISTERS],
            scc: None,
            vector: (0..VECTOR_REGISTERS).map(garbage).collect(),
            vector_defined: vec![0; VECTOR_REGISTERS].into(),
            active: [0; LANES],
            mode: FloatMode { rounding: 0, denormals: 3 },
            index: None,
            private: Private::new(0, 0),
        }
    }

    /// Wave `index` of a group at the entry of a kernel. What the last kernel left in registers
    /// counts as never written.
    pub(crate) fn enter(&mut self, index: usize, start: &Start) {
        let kernel = start.kernel;
        self.pc = kernel.entry;
        self.ended = false;
        self.scalar_defined = [0; SCALAR_REGISTERS];
        self.vector_defined.fill(0);
        self.scc = None;
        self.mode = kernel.mode;
        self.index = None;
        self.private = Private::new(kernel.private_bytes, start.poison);
        self.enter_scalars(start);
        let ids = std::array::from_fn(|lane| (index * LANES + lane) as u32);
        (self.vector[0], self.vector_defined[0]) = (ids, u64::MAX);
        for register in 1..=usize::from(kernel.registers.item_ids) {
            (self.vector[register], self.vector_defined[register]) = ([0; LANES], u64::MAX);
        }
        let items = start.group_size.saturating_sub(index * LANES).min(LANES);
        self.set_wide(EXEC, if items == LANES { u64::MAX } else { (1 << items) - 1 });
    }

    /// Scalar registers that are set at entry, one after the other.
    fn enter_scalars(&mut self, start: &Start) {
        let given = &start.kernel.registers;
        let pointer = [start.arguments as u32, (start.arguments >> 32) as u32];
        // What has no meaning here is garbage that counts as written: private memory needs no
        // address.
        let garbage = [start.poison; 4];
        let id = [start.group, 0, 0];
        let mut values: Vec<u32> = Vec::new();
        let mut add = |enabled: bool, words: &[u32]| values.extend(words.iter().filter(|_| enabled));
        add(given.private_buffer, &garbage);
        add(given.dispatch_pointer, &garbage[..2]);
        add(given.queue_pointer, &garbage[..2]);
        add(given.argument_pointer, &pointer);
        add(given.dispatch_id, &garbage[..2]);
        add(given.flat_scratch, &garbage[..2]);
        add(given.private_size, &garbage[..1]);
        for axis in 0..3 {
            add(given.group_id[axis], &id[axis..=axis]);
        }
        add(given.group_info, &garbage[..1]);
        add(given.scratch_offset, &garbage[..1]);
        for (register, value) in (0..).zip(values) {
            self.set(register, value);
        }
    }

    pub(crate) fn exec(&self) -> u64 {
        (self.scalar[EXEC as usize + 1] as u64) << 32 | self.scalar[EXEC as usize] as u64
    }

    /// The value of a register and its defined bits.
    pub(crate) fn known(&self, register: u8) -> ScalarValue<u32> {
        (self.scalar[register as usize], self.scalar_defined[register as usize])
    }

    pub(crate) fn known_wide(&self, register: u8) -> ScalarValue<u64> {
        let ((low, low_defined), (high, high_defined)) = (self.known(register), self.known(register + 1));
        ((high as u64) << 32 | low as u64, (high_defined as u64) << 32 | low_defined as u64)
    }

    /// A register that must be defined as a whole.
    pub(crate) fn get(&self, register: u8) -> Result<u32, String> {
        match self.known(register) {
            (value, u32::MAX) => Ok(value),
            _ => Err(unwritten(register)),
        }
    }

    pub(crate) fn get_wide(&self, register: u8) -> Result<u64, String> {
        match self.known_wide(register) {
            (value, u64::MAX) => Ok(value),
            _ => Err(unwritten(register)),
        }
    }

    pub(crate) fn set(&mut self, register: u8, value: u32) {
        self.set_known(register, (value, u32::MAX));
    }

    pub(crate) fn set_known(&mut self, register: u8, (value, defined): ScalarValue<u32>) {
        self.scalar[register as usize] = value;
        self.scalar_defined[register as usize] = defined;
        if register >= EXEC {
            let exec = self.exec();
            self.active = std::array::from_fn(|lane| if exec >> lane & 1 == 1 { u32::MAX } else { 0 });
        }
    }

    pub(crate) fn set_wide(&mut self, register: u8, value: u64) {
        self.set_known_wide(register, (value, u64::MAX));
    }

    pub(crate) fn set_known_wide(&mut self, register: u8, (value, defined): ScalarValue<u64>) {
        self.set_known(register, (value as u32, defined as u32));
        self.set_known(register + 1, ((value >> 32) as u32, (defined >> 32) as u32));
    }

    pub(crate) fn scalar_source(&self, source: ScalarSource, wide: bool) -> ScalarValue<u64> {
        match source {
            ScalarSource::Constant(value) => (value, u64::MAX),
            ScalarSource::Register(register) if wide => self.known_wide(register),
            ScalarSource::Register(register) => {
                let (value, defined) = self.known(register);
                (value as u64, defined as u64 | !0xffff_ffff)
            }
        }
    }

    /// A source that must be defined as a whole.
    pub(crate) fn scalar_value(&self, source: ScalarSource) -> Result<u32, String> {
        match source {
            ScalarSource::Constant(value) => Ok(value as u32),
            ScalarSource::Register(register) => self.get(register),
        }
    }

    /// SCC, if an instruction has set it.
    pub(crate) fn scc(&self) -> Result<bool, String> {
        self.scc.ok_or_else(|| "SCC is used, and depends on what was never written".to_string())
    }

    pub(crate) fn vector(&self, register: u16) -> LaneValue<&Lanes> {
        (&self.vector[register as usize], self.vector_defined[register as usize])
    }

    /// The value of a 32-bit source, with its modifiers.
    #[inline(always)]
    pub(crate) fn operand(&self, operand: Operand) -> LaneValue<Lanes> {
        let (mut lanes, defined) = match operand.source {
            Source::Vector(register) => {
                let (lanes, defined) = self.vector(register);
                (*lanes, defined)
            }
            Source::Scalar(register) => {
                let (value, defined) = self.known(register);
                ([value; LANES], if defined == u32::MAX { u64::MAX } else { 0 })
            }
            Source::Constant(value) => ([value; LANES], u64::MAX),
        };
        match operand.select {
            Select::Dword => {}
            Select::Byte(n) => lanes = lanes.map(|x| x >> (8 * n) & 0xff),
            Select::Word(n) => lanes = lanes.map(|x| x >> (16 * n) & 0xffff),
        }
        if operand.absolute {
            lanes = lanes.map(|x| x & 0x7fff_ffff);
        }
        if operand.negate {
            lanes = lanes.map(|x| x ^ 0x8000_0000);
        }
        (lanes, defined)
    }

    /// The halves of a 64-bit source, and the lanes in which each was written.
    #[inline(always)]
    pub(crate) fn wide(&self, source: WideSource) -> (WideLanes, [u64; 2]) {
        match source {
            WideSource::Vector(register) => {
                let (low, low_defined) = self.vector(register);
                let (high, high_defined) = self.vector(register + 1);
                ((*low, *high), [low_defined, high_defined])
            }
            WideSource::Scalar(register) => {
                let ((low, low_defined), (high, high_defined)) = (self.known(register), self.known(register + 1));
                let whole = |defined: u32| if defined == u32::MAX { u64::MAX } else { 0 };
                (([low; LANES], [high; LANES]), [whole(low_defined), whole(high_defined)])
            }
            WideSource::Constant(value) => (([value as u32; LANES], [(value >> 32) as u32; LANES]), [u64::MAX; 2]),
        }
    }

    /// Writes the active lanes of a register.
    #[inline(always)]
    pub(crate) fn put(&mut self, register: u16, lanes: &Lanes, defined: u64) {
        let exec = self.exec();
        let to = &mut self.vector[register as usize];
        for lane in 0..LANES {
            to[lane] = lanes[lane] & self.active[lane] | to[lane] & !self.active[lane];
        }
        let known = &mut self.vector_defined[register as usize];
        *known = *known & !exec | defined & exec;
    }

    /// Writes all lanes, whatever EXEC says.
    pub(crate) fn put_all(&mut self, register: u16, lanes: &Lanes, defined: u64) {
        self.vector[register as usize] = *lanes;
        self.vector_defined[register as usize] = defined;
    }

    /// Writes one lane, whatever EXEC says.
    #[inline(always)]
    pub(crate) fn put_lane(&mut self, register: u16, lane: usize, value: u32, defined: bool) {
        self.vector[register as usize][lane] = value;
        let known = &mut self.vector_defined[register as usize];
        *known = *known & !(1 << lane) | u64::from(defined) << lane;
    }

    /// An error if an active lane has a value that was never written.
    #[inline(always)]
    pub(crate) fn must_be_defined(&self, defined: u64, what: &str) -> Result<(), String> {
        match self.exec() & !defined {
            0 => Ok(()),
            lanes => Err(undefined(what, lanes)),
        }
    }
}

#[cold]
fn undefined(what: &str, lanes: u64) -> String {
    let (first, count) = (lanes.trailing_zeros(), lanes.count_ones());
    format!("{what} depends on a register or memory that was never written (lane {first}, {count} in all)")
}

#[cold]
fn unwritten(register: u8) -> String {
    let name = match register {
        VCC | 107 => "vcc".to_string(),
        M0 => "m0".to_string(),
        register => format!("s{register}"),
    };
    format!("{name} is used before it is written")
}

//! Executes instructions of a wave until a barrier or the end.

use crate::instruction::*;
use crate::memory::Memory;
use crate::program::Program;
use crate::race::Accessor;
use crate::shared::Shared;
use crate::vector::{self, Lanes};
use crate::wave::{LaneValue, ScalarValue, Wave};
use crate::{divide, float, matrix, scalar};
use isobit_numerics::Fma;

/// BOUND: instructions of a wave between two barriers; more is an endless loop.
const STEPS_MAX: u64 = 1 << 31;

/// What a wave can reach besides its registers.
pub(crate) struct Environment<'a> {
    pub(crate) program: &'a Program,
    /// Address of the program's image.
    pub(crate) image: u64,
    pub(crate) memory: &'a mut Memory,
    pub(crate) shared: &'a mut Shared,
    pub(crate) accessor: Accessor,
    pub(crate) seed: u64,
    /// The order in which lanes access memory.
    pub(crate) lane_order: &'a [usize],
    /// Instructions so far.
    pub(crate) steps: u64,
    /// The same for each instruction of the program.
    pub(crate) executed: &'a mut [u64],
}

/// Why a wave paused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pause {
    Barrier,
    End,
}

/// Where an instruction leads.
enum Next {
    Following,
    To(usize),
    Pause(Pause),
}

type Step = Result<Next, String>;

impl Wave {
    /// Runs until a barrier or the end. After an error `pc` is the instruction that failed.
    #[inline(always)]
    pub(crate) fn run<F: Fma>(&mut self, environment: &mut Environment) -> Result<Pause, String> {
        let program = environment.program;
        for _ in 0..STEPS_MAX {
            let Some(instruction) = program.code.get(self.pc) else {
                return Err("the program runs past its end".to_string());
            };
            environment.steps += 1;
            if let Some(executed) = environment.executed.get_mut(self.pc) {
                *executed += 1;
            }
            match self.step::<F>(instruction, environment)? {
                Next::Following => self.pc += 1,
                Next::To(target) => self.pc = target,
                Next::Pause(pause) => {
                    self.pc += 1;
                    self.ended = pause == Pause::End;
                    return Ok(pause);
                }
            }
        }
        Err("an endless loop".to_string())
    }

    #[inline(always)]
    fn step<F: Fma>(&mut self, instruction: &Instruction, environment: &mut Environment) -> Step {
        use Instruction as I;
        match *instruction {
            I::Unary { op, dst, a } => self.unary(op, dst, a, environment)?,
            I::Binary { op, dst, a, b } => self.binary(op, dst, [a, b], environment)?,
            I::Ternary { op, dst, a, b, c } => self.ternary::<F>(op, dst, [a, b, c], environment)?,
            _ => return self.other::<F>(instruction, environment),
        }
        Ok(Next::Following)
    }

    /// Everything but plain arithmetic of lanes.
    #[inline(always)]
    fn other<F: Fma>(&mut self, instruction: &Instruction, environment: &mut Environment) -> Step {
        use Instruction as I;
        match *instruction {
            I::Nop => {}
            I::End => return Ok(Next::Pause(Pause::End)),
            I::Barrier => return Ok(Next::Pause(Pause::Barrier)),
            I::Branch { condition, target } => {
                return Ok(if self.holds(condition)? { Next::To(target) } else { Next::Following });
            }
            I::ScalarUnary { .. }
            | I::ScalarBinary { .. }
            | I::ScalarCompare { .. }
            | I::GetPc { .. }
            | I::ScalarLoad { .. }
            | I::SetMode { .. }
            | I::IndexOn { .. }
            | I::IndexOff => self.scalar_step(instruction, environment)?,
            I::GlobalLoad { .. }
            | I::GlobalStore { .. }
            | I::SharedLoad { .. }
            | I::SharedStore { .. }
            | I::PrivateLoad { .. }
            | I::PrivateStore { .. } => self.access(instruction, environment)?,
            _ => self.vector_step::<F>(instruction, environment)?,
        }
        Ok(Next::Following)
    }

    fn holds(&self, condition: Condition) -> Result<bool, String> {
        Ok(match condition {
            Condition::Always => true,
            Condition::SccClear => !self.scc()?,
            Condition::SccSet => self.scc()?,
            Condition::VccZero => self.get_wide(VCC)? == 0,
            Condition::VccNotZero => self.get_wide(VCC)? != 0,
            Condition::ExecZero => self.exec() == 0,
            Condition::ExecNotZero => self.exec() != 0,
        })
    }

    fn scalar_step(&mut self, instruction: &Instruction, environment: &mut Environment) -> Result<(), String> {
        match *instruction {
            Instruction::ScalarUnary { op, dst, a } => {
                let a = self.scalar_source(a, op.is_wide());
                self.scalar_unary(op, dst, a)?;
            }
            Instruction::ScalarBinary { op, dst, a, b } => {
                let a = self.scalar_source(a, op.is_wide());
                let b = self.scalar_source(b, op.is_wide() && !op.is_wide_shift());
                let reads_scc = matches!(
                    op,
                    ScalarBinary::AddcU32 | ScalarBinary::SubbU32 | ScalarBinary::Select32 | ScalarBinary::Select64
                );
                let scc = reads_scc && self.scc()?;
                let (value, set) = scalar::binary(op, a.0, b.0, scc);
                let defined = scalar::defined(op, a, b, scc);
                if let Some(set) = set {
                    self.scc = if defined == u64::MAX || (set && op.is_logic() && value & defined != 0) {
                        Some(set)
                    } else {
                        None
                    };
                }
                self.set_result(dst, (value, defined), op.is_wide())?;
            }
            Instruction::ScalarCompare { op, a, b } => {
                let (a, b) = (self.scalar_source(a, op.is_wide()), self.scalar_source(b, op.is_wide()));
                let defined = a.1 & b.1 == u64::MAX;
                self.scc = defined.then(|| scalar::compare(op, a.0, b.0));
            }
            Instruction::GetPc { dst, next } => self.set_wide(dst, environment.image.wrapping_add(next)),
            Instruction::ScalarLoad { dst, dwords, base, offset } => {
                let address = self.get_wide(base)?.wrapping_add_signed(offset) & !3;
                let mut loaded = [(0, false); 16];
                let loaded = &mut loaded[..dwords as usize];
                environment.memory.load(address, loaded, environment.accessor)?;
                for (register, (value, defined)) in (dst..).zip(loaded) {
                    self.set_known(register, (*value, if *defined { u32::MAX } else { 0 }));
                }
            }
            Instruction::SetMode { first, count, value } => self.set_mode(first, count, value)?,
            Instruction::IndexOn { index } => {
                let index = self.scalar_value(index)? & 0xff;
                self.set(M0, 1 << 12 | index);
                self.index = Some(index as u16);
            }
            Instruction::IndexOff => self.index = None,
            _ => return Err("not a scalar instruction".to_string()),
        }
        Ok(())
    }

    /// EXEC must be defined; other registers may be in part.
    fn set_result(&mut self, dst: u8, (value, defined): ScalarValue<u64>, wide: bool) -> Result<(), String> {
        if dst >= EXEC && defined != u64::MAX {
            return Err("EXEC depends on a register or memory that was never written".to_string());
        }
        if wide {
            self.set_known_wide(dst, (value, defined));
        } else {
            self.set_known(dst, (value as u32, defined as u32));
        }
        Ok(())
    }

    fn scalar_unary(&mut self, op: ScalarUnary, dst: u8, (a, defined): ScalarValue<u64>) -> Result<(), String> {
        let old = self.exec();
        let of_exec = match op {
            ScalarUnary::AndSaveExec => Some(ScalarBinary::And64),
            ScalarUnary::OrSaveExec => Some(ScalarBinary::Or64),
            ScalarUnary::AndNotSaveExec => Some(ScalarBinary::AndNot64),
            ScalarUnary::XorSaveExec => Some(ScalarBinary::Xor64),
            _ => None,
        };
        if let Some(of_exec) = of_exec {
            let (new, _) = scalar::binary(of_exec, a, old, false);
            let defined = scalar::defined(of_exec, (a, defined), (old, u64::MAX), false);
            self.set_result(EXEC, (new, defined), true)?;
            self.scc = Some(new != 0);
            self.set_wide(dst, old);
            return Ok(());
        }
        let value = match op {
            ScalarUnary::Not32 => !(a as u32) as u64,
            ScalarUnary::Not64 => !a,
            ScalarUnary::Reverse32 => (a as u32).reverse_bits() as u64,
            _ => a,
        };
        if matches!(op, ScalarUnary::Not32 | ScalarUnary::Not64) {
            self.scc = (defined == u64::MAX).then_some(value != 0);
        }
        let defined = if op == ScalarUnary::Reverse32 && defined != u64::MAX { 0 } else { defined };
        self.set_result(dst, (value, defined), op.is_wide())
    }

    /// Rounding is bits 3:0 of MODE, float32 denormals bits 5:4; the rest concerns other types and
    /// exceptions.
    fn set_mode(&mut self, first: u8, count: u8, value: u32) -> Result<(), String> {
        if u32::from(first) + u32::from(count) > 32 {
            return Err("a field outside MODE".to_string());
        }
        let mask = (((1u64 << count) - 1) as u32) << first;
        let old = u32::from(self.mode.rounding) | u32::from(self.mode.denormals) << 4;
        let new = old & !mask | value << first & mask;
        (self.mode.rounding, self.mode.denormals) = ((new & 15) as u8, (new >> 4 & 3) as u8);
        if self.mode.rounding == 0 { Ok(()) } else { Err("only rounding to nearest even is supported".to_string()) }
    }

    /// Denormal sources become zero if MODE says so.
    #[inline(always)]
    fn flush_sources(&self, lanes: &mut [&mut Lanes]) {
        if self.mode.denormals & 1 == 0 {
            for lanes in lanes {
                **lanes = lanes.map(float::flushed);
            }
        }
    }

    /// What MODE and the seed make of float results.
    #[inline(always)]
    fn finish_floats(&self, lanes: &mut Lanes, seed: u64) {
        if self.mode.denormals & 2 == 0 {
            *lanes = lanes.map(float::flushed);
        }
        float::choose_nans(seed, lanes);
    }

    #[inline(always)]
    fn unary(&mut self, op: Unary, dst: u16, a: Operand, environment: &Environment) -> Result<(), String> {
        let mut a = a;
        if let Some(index) = self.index {
            let Source::Vector(register) = a.source else { return Err("an index without a register".to_string()) };
            if op != Unary::Move || register + index >= ACCUMULATORS {
                return Err("an indexed register that is not of a move, or past the last".to_string());
            }
            a.source = Source::Vector(register + index);
        }
        let (mut x, defined) = self.operand(a);
        if op.takes_float() {
            self.flush_sources(&mut [&mut x]);
        }
        let mut out = vector::unary(op, &x, environment.seed);
        if op.makes_float() {
            self.finish_floats(&mut out, environment.seed);
        }
        self.put(dst, &out, defined);
        Ok(())
    }

    #[inline(always)]
    fn binary(&mut self, op: Binary, dst: u16, [a, b]: [Operand; 2], environment: &Environment) -> Result<(), String> {
        self.not_indexed()?;
        let ((mut x, defined_x), (mut y, defined_y)) = (self.operand(a), self.operand(b));
        let out = if op.is_float() {
            self.flush_sources(&mut [&mut x]);
            if op != Binary::ScaleByPower {
                self.flush_sources(&mut [&mut y]);
            }
            let mut out = vector::binary(op, &x, &y);
            self.finish_floats(&mut out, environment.seed);
            out
        } else {
            vector::binary(op, &x, &y)
        };
        self.put(dst, &out, defined_x & defined_y);
        Ok(())
    }

    #[inline(always)]
    fn ternary<F: Fma>(
        &mut self,
        op: Ternary,
        dst: u16,
        [a, b, c]: [Operand; 3],
        environment: &Environment,
    ) -> Result<(), String> {
        self.not_indexed()?;
        let (mut x, defined_x) = self.operand(a);
        let (mut y, defined_y) = self.operand(b);
        let (mut z, defined_z) = self.operand(c);
        let out = if op.is_float() {
            self.flush_sources(&mut [&mut x, &mut y, &mut z]);
            let mut out = vector::ternary::<F>(op, &x, &y, &z);
            self.finish_floats(&mut out, environment.seed);
            out
        } else {
            vector::ternary::<F>(op, &x, &y, &z)
        };
        self.put(dst, &out, defined_x & defined_y & defined_z);
        Ok(())
    }

    fn not_indexed(&self) -> Result<(), String> {
        match self.index {
            None => Ok(()),
            Some(_) => Err("register indexing is supported for v_mov_b32 only".to_string()),
        }
    }

    /// Writes a mask: bits of inactive lanes are 0.
    fn put_mask(&mut self, dst: u8, mask: u64, defined: u64) -> Result<(), String> {
        let exec = self.exec();
        self.set_result(dst, (mask & exec, defined | !exec), true)
    }

    #[inline(always)]
    fn vector_step<F: Fma>(&mut self, instruction: &Instruction, environment: &mut Environment) -> Result<(), String> {
        self.not_indexed()?;
        match *instruction {
            Instruction::Compare { op, dst, a, b } => {
                let ((mut x, defined_x), (mut y, defined_y)) = (self.operand(a), self.operand(b));
                if op.is_float() {
                    self.flush_sources(&mut [&mut x, &mut y]);
                }
                self.put_mask(dst, vector::compare(op, &x, &y), defined_x & defined_y)
            }
            Instruction::Carry { op, dst, out, a, b, carry } => {
                let ((x, defined_x), (y, defined_y)) = (self.operand(a), self.operand(b));
                let (taken, known) = if op.takes_carry() { self.known_wide(carry) } else { (0, u64::MAX) };
                let defined = defined_x & defined_y & known;
                let (sum, bits) = vector::carry(op, &x, &y, taken);
                self.put(dst, &sum, defined);
                self.put_mask(out, bits, defined)
            }
            Instruction::Choose { dst, a, b, mask } => {
                let ((x, defined_x), (y, defined_y)) = (self.operand(a), self.operand(b));
                let (mask, known) = self.known_wide(mask);
                let chosen = |lane: usize| if mask >> lane & 1 == 1 { y[lane] } else { x[lane] };
                self.put(dst, &std::array::from_fn(chosen), (defined_y & mask | defined_x & !mask) & known);
                Ok(())
            }
            Instruction::Packed { op, dst, sources, halves, negate } => {
                let low = self.half::<F>(op, 0, sources, halves[0], negate[0], environment.seed);
                let high = self.half::<F>(op, 1, sources, halves[1], negate[1], environment.seed);
                self.put(dst, &low.0, low.1);
                self.put(dst + 1, &high.0, high.1);
                Ok(())
            }
            Instruction::DivideScale { dst, mask, a, b, c } => {
                self.divide_scale(dst, mask, [a, b, c], environment.seed)
            }
            Instruction::DivideFmas { dst, a, b, c } => {
                self.divide_fmas::<F>(dst, [a, b, c], environment.seed);
                Ok(())
            }
            Instruction::Matrix { op, dst, a, b, c } => self.matrix(op, dst, a, b, c),
            _ => self.wide_step(instruction),
        }
    }

    /// Vector instructions on pairs of registers.
    fn wide_step(&mut self, instruction: &Instruction) -> Result<(), String> {
        match *instruction {
            Instruction::WideCompare { op, dst, a, b } => {
                let ((x, [x0, x1]), (y, [y0, y1])) = (self.wide(a), self.wide(b));
                self.put_mask(dst, vector::wide_compare(op, &x, &y), x0 & x1 & y0 & y1)
            }
            Instruction::WideShift { op, dst, count, a } => {
                let ((count, counted), (x, [x0, x1])) = (self.operand(count), self.wide(a));
                let out = vector::wide_shift(op, &count, &x);
                // A shift to the left does not look at the high half for the low one.
                let low = if op == WideShift::Left { x0 } else { x0 & x1 };
                let high = if op == WideShift::Left { x0 & x1 } else { x1 };
                self.put(dst, &out.0, low & counted);
                self.put(dst + 1, &out.1, high & counted);
                Ok(())
            }
            Instruction::WideMad { dst, carry, a, b, c } => {
                let ((x, defined_x), (y, defined_y)) = (self.operand(a), self.operand(b));
                let (z, [z0, z1]) = self.wide(c);
                let (out, bits) = vector::wide_mad(&x, &y, &z);
                self.put(dst, &out.0, defined_x & defined_y & z0);
                let defined = defined_x & defined_y & z0 & z1;
                self.put(dst + 1, &out.1, defined);
                self.put_mask(carry, bits, defined)
            }
            Instruction::WideShiftAdd { dst, a, count, c } => {
                let ((x, [x0, x1]), (count, counted), (z, [z0, z1])) =
                    (self.wide(a), self.operand(count), self.wide(c));
                let joined =
                    |(low, high): &(Lanes, Lanes), lane: usize| u64::from(high[lane]) << 32 | u64::from(low[lane]);
                let sum = |lane: usize| (joined(&x, lane) << (count[lane] & 7)).wrapping_add(joined(&z, lane));
                self.put(dst, &std::array::from_fn(|lane| sum(lane) as u32), x0 & counted & z0);
                let high = std::array::from_fn(|lane| (sum(lane) >> 32) as u32);
                self.put(dst + 1, &high, x0 & x1 & counted & z0 & z1);
                Ok(())
            }
            _ => self.lanes_step(instruction),
        }
    }

    /// One result of a packed operation: bit `i` of the masks is for source `i`.
    #[inline(always)]
    fn half<F: Fma>(
        &self,
        op: Packed,
        result: usize,
        sources: [Source; 3],
        halves: u8,
        negate: u8,
        seed: u64,
    ) -> LaneValue<Lanes> {
        let source = |index: usize| {
            let half = halves >> index & 1;
            let source = match sources[index] {
                Source::Vector(register) => Source::Vector(register + u16::from(half)),
                Source::Scalar(register) => Source::Scalar(register + half),
                constant @ Source::Constant(_) => constant,
            };
            let negate = negate >> index & 1 == 1;
            self.operand(Operand { negate, ..Operand::plain(source) })
        };
        if op == Packed::Move {
            return source(result);
        }
        let ((mut x, defined_x), (mut y, defined_y), (mut z, defined_z)) = (source(0), source(1), source(2));
        self.flush_sources(&mut [&mut x, &mut y, &mut z]);
        let mut out = match op {
            Packed::Add => vector::binary(Binary::AddF32, &x, &y),
            Packed::Multiply => vector::binary(Binary::MulF32, &x, &y),
            _ => vector::ternary::<F>(Ternary::Fma, &x, &y, &z),
        };
        self.finish_floats(&mut out, seed);
        (out, defined_x & defined_y & defined_z)
    }

    fn three(&self, [a, b, c]: [Operand; 3]) -> LaneValue<[Lanes; 3]> {
        let ((x, defined_x), (y, defined_y), (z, defined_z)) = (self.operand(a), self.operand(b), self.operand(c));
        let mut all = [x, y, z];
        if self.mode.denormals & 1 == 0 {
            all = all.map(|lanes| lanes.map(float::flushed));
        }
        (all, defined_x & defined_y & defined_z)
    }

    fn divide_scale(&mut self, dst: u16, mask: u8, sources: [Operand; 3], seed: u64) -> Result<(), String> {
        let ([x, y, z], defined) = self.three(sources);
        let mut out = [0; LANES];
        let mut bits = 0;
        for lane in 0..LANES {
            let (value, bit) = divide::scale(x[lane], y[lane], z[lane]);
            out[lane] = value;
            bits |= u64::from(bit) << lane;
        }
        self.finish_floats(&mut out, seed);
        self.put(dst, &out, defined);
        self.put_mask(mask, bits, defined)
    }

    #[inline(always)]
    fn divide_fmas<F: Fma>(&mut self, dst: u16, sources: [Operand; 3], seed: u64) {
        let ([x, y, z], defined) = self.three(sources);
        let (mask, known) = self.known_wide(VCC);
        let mut out = vector::ternary::<F>(Ternary::Fma, &x, &y, &z);
        for lane in 0..LANES {
            if let Some(scaled) = divide::fmas(x[lane], y[lane], z[lane], mask >> lane & 1 == 1) {
                out[lane] = scaled;
            }
        }
        self.finish_floats(&mut out, seed);
        self.put(dst, &out, defined & known);
    }

    /// Moves between lanes and scalar registers.
    fn lanes_step(&mut self, instruction: &Instruction) -> Result<(), String> {
        match *instruction {
            Instruction::ReadFirstLane { dst, source } => {
                let exec = self.exec();
                let lane = if exec == 0 { 0 } else { exec.trailing_zeros() as usize };
                self.read_lane(dst, source, lane)
            }
            Instruction::ReadLane { dst, source, lane } => {
                let lane = self.scalar_value(lane)? as usize % LANES;
                self.read_lane(dst, source, lane)
            }
            Instruction::WriteLane { dst, a, lane } => {
                let lane = self.scalar_value(lane)? as usize % LANES;
                let (value, defined) = self.scalar_source(a, false);
                self.put_lane(dst, lane, value as u32, defined == u64::MAX);
                Ok(())
            }
            _ => Err("not a vector instruction".to_string()),
        }
    }

    fn read_lane(&mut self, dst: u8, source: u16, lane: usize) -> Result<(), String> {
        let (lanes, defined) = self.vector(source);
        let value = (lanes[lane] as u64, if defined >> lane & 1 == 1 { u64::MAX } else { 0 });
        self.set_result(dst, value, false)
    }

    fn matrix(&mut self, op: Matrix, dst: u16, a: u16, b: u16, c: u16) -> Result<(), String> {
        if self.exec() != u64::MAX {
            return Err("a matrix product with inactive lanes, whose meaning is not certain".to_string());
        }
        let mut known = u64::MAX;
        let mut words = |first: u16| -> Vec<Lanes> {
            let read = (first..first + op.operand_words()).map(|register| self.vector(register));
            read.map(|(lanes, defined)| {
                known &= defined;
                *lanes
            })
            .collect()
        };
        let (x, y) = (words(a), words(b));
        self.must_be_defined(known, "a matrix product")?;
        let mut defined = u64::MAX;
        let mut sums: Vec<Lanes> = (c..c + op.sums())
            .map(|register| {
                let (lanes, known) = self.vector(register);
                defined &= known;
                *lanes
            })
            .collect();
        matrix::multiply(op, &x, &y, &mut sums);
        for (register, lanes) in (dst..).zip(&sums) {
            self.put_all(register, lanes, defined);
        }
        Ok(())
    }
}

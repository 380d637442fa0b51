//! Launches: what the engine is told, and what it says.

use crate::compiler::{Kernel, Program, engine, message};
use isobit_kernels::gpu::runtime::{Answer, Argument};
use std::ffi::c_char;
use std::sync::PoisonError;

/// `DYNAMIC` and the memory behind a program leave this much.
const DYNAMIC_BYTES_MAX: usize = 163 << 10;
const THREADS_MAX: usize = 1024;

/// A buffer of the card: `Buffer` in the engine.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer {
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// `Launch` in the engine.
#[repr(C)]
struct Launch {
    run: usize,
    arguments: *const *const Slot,
    groups: u64,
    size: u64,
    seed: u64,
    buffers: *const Buffer,
    buffer_count: u64,
    declared: usize,
    declared_end: usize,
    dynamic: usize,
    dynamic_bytes: u64,
    image: usize,
    image_end: usize,
    message: *mut c_char,
    message_bytes: u64,
    culprit: usize,
    switches: u64,
}

/// An argument, aligned for the largest.
#[repr(C, align(64))]
struct Slot([u64; 16]);

/// Groups, their size and bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) groups: usize,
    pub(crate) size: usize,
    pub(crate) dynamic: usize,
}

impl Shape {
    fn check(&self) -> Answer<()> {
        if self.size == 0 || self.size > THREADS_MAX {
            return Err(format!("blocks of {} threads", self.size));
        }
        if self.dynamic > DYNAMIC_BYTES_MAX {
            return Err(format!("{} bytes of dynamic shared memory; a block has {DYNAMIC_BYTES_MAX}", self.dynamic));
        }
        Ok(())
    }
}

fn slots(kernel: &Kernel, arguments: &[Argument]) -> Answer<Vec<Slot>> {
    let parameters = &kernel.parameters;
    if parameters.len() != arguments.len() {
        return Err(format!("{} arguments; the kernel takes {}", arguments.len(), parameters.len()));
    }
    let slot = |(index, (argument, &wanted)): (usize, (&Argument, &u32))| {
        let mut slot = Slot([0; 16]);
        let bytes = match argument {
            Argument::Memory(memory, offset) => {
                slot.0[0] = memory.0 + *offset as u64;
                8..=8
            }
            Argument::U32(x) => {
                slot.0[0] = u64::from(*x);
                4..=4
            }
            Argument::U64(x) => {
                slot.0[0] = *x;
                8..=8
            }
            Argument::F32(x) => {
                slot.0[0] = u64::from(x.to_bits());
                4..=4
            }
            Argument::Descriptor(words) => {
                slot.0 = *words;
                9..=128
            }
        };
        if !bytes.contains(&wanted) {
            return Err(format!("argument {index} is {argument:?}; the kernel wants {wanted} bytes"));
        }
        Ok(slot)
    };
    arguments.iter().zip(parameters).enumerate().map(slot).collect()
}

/// Runs a kernel to its end.
pub(crate) fn launch(
    program: &Program,
    kernel: &Kernel,
    shape: Shape,
    seed: u64,
    buffers: &[Buffer],
    arguments: &[Argument],
) -> Answer<u64> {
    shape.check()?;
    let launcher = engine()?;
    let slots = slots(kernel, arguments)?;
    let pointers: Vec<*const Slot> = slots.iter().map(|slot| &raw const *slot).collect();
    let mut text = [0 as c_char; 512];
    let places = program.places;
    let mut launch = Launch {
        run: kernel.run,
        arguments: pointers.as_ptr(),
        groups: shape.groups as u64,
        size: shape.size as u64,
        seed,
        buffers: buffers.as_ptr(),
        buffer_count: buffers.len() as u64,
        declared: places.declared,
        declared_end: places.declared_end,
        dynamic: places.dynamic,
        dynamic_bytes: shape.dynamic as u64,
        image: places.image,
        image_end: places.image_end,
        message: text.as_mut_ptr(),
        message_bytes: text.len() as u64,
        culprit: 0,
        switches: 0,
    };
    let busy = program.busy.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the engine's own struct, whose pointers live until the call returns. The arguments
    // have the sizes that the kernel's parameters have, and the engine ends the launch before an
    // access outside of the buffers.
    let ran = unsafe { launcher((&raw mut launch).cast()) };
    drop(busy);
    if ran != 0 {
        return Ok(launch.switches);
    }
    let line = (launch.culprit != 0).then(|| program.line(launch.culprit)).flatten();
    Err(format!("{}{}", message(&text), line.map(|line| format!(", {line}")).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobit_kernels::gpu::runtime::Handle;

    #[test]
    fn arguments_must_be_those_of_the_kernel() {
        let kernel = Kernel { name: "run".to_string(), run: 0, parameters: vec![8, 4, 72] };
        let right = [Argument::Memory(Handle(256), 16), Argument::F32(1.0), Argument::Descriptor([7; 16])];
        let passed = slots(&kernel, &right).expect("arguments that fit");
        assert_eq!((passed[0].0[0], passed[1].0[0], passed[2].0[15]), (272, 0x3f80_0000, 7));
        let said = |arguments: &[Argument]| slots(&kernel, arguments).map(drop).expect_err("arguments that do not fit");
        assert!(said(&right[..2]).contains("2 arguments; the kernel takes 3"));
        assert!(said(&[right[0], Argument::U64(1), right[2]]).contains("argument 1"));
        assert!(said(&[right[2], right[1], right[2]]).contains("argument 0"));
    }

    #[test]
    fn a_block_has_limits() {
        let shape = Shape { groups: 1, size: 256, dynamic: 96 << 10 };
        assert!(shape.check().is_ok());
        assert!(Shape { size: 1025, ..shape }.check().is_err_and(|what| what.contains("1025 threads")));
        assert!(Shape { dynamic: 200 << 10, ..shape }.check().is_err_and(|what| what.contains("204800 bytes")));
    }
}

//! A runtime whose copies from and to locked pages are made only when somebody waits for them, for
//! tests: what is used without waiting has the wrong numbers.

use super::device::{Gpu, MatrixUnits};
use super::devices::{Api, Selector};
use super::runtime::{Answer, Argument, Compiled, Handle, Kernel, Language, LockedCopy, Mark, PageLock, Runtime};
use crate::backend::{Device as _, Shaped as _};
use crate::heap::Lifetime;
use crate::op::{Quantized, QuantizedShape, Scales};
use crate::parcel::Parcel;
use half::f16;
use std::convert::Infallible;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};

/// Blocks of memory by number, and copies that are still to be made: the block, the pages, and
/// whether it goes to the host.
#[derive(Default)]
struct State {
    blocks: Vec<Vec<u8>>,
    copies: Vec<(usize, usize, usize, bool)>,
    made: usize,
    /// Blocks that are copied to beside the commands.
    ahead: Vec<Handle>,
    locks: usize,
    is_lost: bool,
}

impl State {
    /// Makes the first `count` copies of all.
    fn make(&mut self, count: usize) -> Answer<()> {
        while self.made < count.min(self.copies.len()) {
            let (block, pages, bytes, to_host) = self.copies[self.made];
            let pages = std::ptr::with_exposed_provenance_mut::<u8>(pages);
            // SAFETY: pages of a parcel, which stay until the mark behind this copy was waited for.
            let pages = unsafe { std::slice::from_raw_parts_mut(pages, bytes) };
            if to_host {
                pages.copy_from_slice(&self.blocks[block][..bytes]);
            } else {
                self.blocks[block][..bytes].copy_from_slice(pages);
            }
            self.made += 1;
        }
        if self.is_lost { Err("the card is lost".to_string()) } else { Ok(()) }
    }
}

#[derive(Clone, Default)]
struct Late(Arc<Mutex<State>>);

impl Late {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no test panics here")
    }

    /// Copies that are still to be made.
    fn pending(&self) -> usize {
        let state = self.state();
        state.copies.len() - state.made
    }

    fn gpu(&self) -> Gpu {
        Gpu::from_parts(Rc::new(self.clone()), Selector { api: Api::Hip, index: 0 }, MatrixUnits::Portable)
    }
}

struct After(Late, usize);

impl Mark for After {
    fn wait(&self) -> Answer<()> {
        self.0.state().make(self.1)
    }
}

struct Lock(Late);

impl PageLock for Lock {
    fn begin(&self) {}
    fn wait(&self) {}
}

impl Drop for Lock {
    fn drop(&mut self) {
        let mut state = self.0.state();
        assert_eq!(state.made, state.copies.len(), "pages go after the copies");
        state.locks -= 1;
    }
}

impl Runtime for Late {
    fn name(&self) -> &'static str {
        "late"
    }

    fn alignment(&self) -> usize {
        256
    }

    fn multiprocessors(&self) -> usize {
        1
    }

    fn allocate(&self, bytes: usize, _: Lifetime) -> Answer<Handle> {
        let mut state = self.state();
        state.blocks.push(vec![0xa5; bytes]);
        Ok(Handle(state.blocks.len() as u64 - 1))
    }

    fn release(&self, _: Handle) {}

    fn zero(&self, memory: Handle, bytes: usize) -> Answer<()> {
        self.finish()?;
        self.state().blocks[memory.0 as usize][..bytes].fill(0);
        Ok(())
    }

    fn write(&self, memory: Handle, bytes: &[u8]) -> Answer<()> {
        self.finish()?;
        self.state().blocks[memory.0 as usize][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, bytes: &mut [u8], memory: Handle) -> Answer<()> {
        self.finish()?;
        bytes.copy_from_slice(&self.state().blocks[memory.0 as usize][..bytes.len()]);
        Ok(())
    }

    unsafe fn lock_pages(&self, _: *mut u8, _: usize) -> Option<Box<dyn PageLock>> {
        self.state().locks += 1;
        Some(Box::new(Lock(self.clone())))
    }

    unsafe fn copy_locked(&self, copy: LockedCopy, bytes: usize) -> Answer<()> {
        if let LockedCopy::Ahead(_, to) = copy {
            self.state().ahead.push(to);
        }
        let copy = match copy {
            LockedCopy::ToDevice(host, to) | LockedCopy::Ahead(host, to) => {
                (to.0 as usize, host.expose_provenance(), bytes, false)
            }
            LockedCopy::ToHost(host, from) => (from.0 as usize, host.expose_provenance(), bytes, true),
        };
        self.state().copies.push(copy);
        Ok(())
    }

    fn arrive(&self, memory: Handle) -> Answer<()> {
        self.state().ahead.retain(|to| *to != memory);
        Ok(())
    }

    fn mark(&self) -> Answer<Option<Box<dyn Mark>>> {
        let count = self.state().copies.len();
        Ok(Some(Box::new(After(self.clone(), count))))
    }

    fn finish(&self) -> Answer<()> {
        self.state().make(usize::MAX)
    }

    fn compile(&self, _: &str, _: Language, _: &[String]) -> Answer<Compiled> {
        Err("no programs".to_string())
    }

    fn kernel(&self, _: Compiled, _: &str) -> Answer<Kernel> {
        Err("no programs".to_string())
    }

    fn launch(&self, _: Kernel, _: usize, _: usize, _: usize, _: &[Argument]) -> Answer<()> {
        Err("no programs".to_string())
    }
}

#[test]
fn a_parcel_waits_for_the_copy_of_the_one_before() {
    let [left, right] = [Late::default(), Late::default()];
    let [sender, receiver] = [&left, &right].map(Late::gpu);
    let mut parcel = Parcel::new(5);
    let mut arrived = receiver.zeros::<f32>(3);
    for (round, first) in [1.0_f32, -0.0, f32::INFINITY].into_iter().enumerate() {
        let numbers = [first, 2.0, 3.0];
        let x = sender.upload(&numbers);
        parcel.resize(3);
        sender.pack(&mut parcel, &x).expect("begun");
        assert_eq!((left.pending(), right.pending()), (1, 0), "the sender does not wait for its copy");
        receiver.unpack(&mut arrived, &mut parcel).expect("begun");
        assert_eq!((left.pending(), right.pending()), (0, 1), "the receiver waits for it, and not for its own");
        if round == 0 {
            // The next one to use the parcel does.
            assert_eq!(parcel.numbers().map(<[f32]>::to_vec), Ok(numbers.to_vec()));
            assert_eq!(right.pending(), 0);
        }
        let bits = |numbers: &[f32]| numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&receiver.download(&arrived).expect("numbers")), bits(&numbers));
    }
    assert_eq!((left.state().locks, right.state().locks), (1, 0), "pages are locked once");
    drop(parcel);
    assert_eq!(left.state().locks, 0);
}

#[test]
fn the_failure_of_a_sender_reaches_the_receiver() {
    let [left, right] = [Late::default(), Late::default()];
    let [sender, receiver] = [&left, &right].map(Late::gpu);
    let (mut parcel, x) = (Parcel::new(2), sender.upload(&[1.0_f32, 2.0]));
    sender.pack(&mut parcel, &x).expect("begun");
    left.state().is_lost = true;
    let mut arrived = receiver.zeros::<f32>(2);
    let failure = receiver.unpack(&mut arrived, &mut parcel).expect_err("lost");
    assert_eq!(failure.to_string(), "late: the card is lost");
    assert!(receiver.finish().is_ok(), "the receiver itself has not failed");
    left.state().is_lost = false;
}

#[test]
fn weights_of_4_bits_come_beside_the_kernels() {
    let scales = [f16::ONE; 4];
    for (group_of, buffers) in [([0_u32, 1], 3), ([1, 0], 4)] {
        let group_of = group_of.map(|group| [group; 8]).concat();
        let weight = Quantized {
            n: 2,
            k: 16,
            group_size: 8,
            words: &[1, 2, 3, 4],
            zeros: &[8; 4],
            scales: Scales::F16(&scales),
            group_of: &group_of,
        };
        let late = Late::default();
        let gpu = late.gpu();
        let made = gpu.quantized_weight(QuantizedShape::of(&[weight]), |_| Ok::<_, Infallible>(weight));
        let host = gpu.save_quantized(made.unwrap_or_else(|never| match never {}));
        let arriving = gpu.begin_load_quantized(&host);
        assert_eq!(late.state().ahead.len(), buffers, "begun, and nothing has waited");
        let arrived = gpu.finish_load_quantized(arriving);
        assert_eq!(late.state().ahead, [], "kernels come after all of them");
        assert_eq!(arrived.shape(), QuantizedShape::of(&[weight]));
        gpu.finish().expect("copied");
    }
}

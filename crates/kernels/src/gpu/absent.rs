//! The runtime of an absent device. Workspace sizes depend on the device; this one answers only
//! those queries, so that memory can be planned for a machine that is not available.

use super::devices::Selector;
use super::runtime::{Answer, Argument, Compiled, Handle, Kernel, Language, Runtime};
use crate::heap::Lifetime;

pub(super) struct Absent {
    name: String,
    architecture: Option<(u32, u32)>,
}

impl Absent {
    pub(super) fn new(selector: Selector, architecture: Option<(u32, u32)>) -> Self {
        Self { name: format!("{selector} (absent)"), architecture }
    }
}

fn absent<T>() -> Answer<T> {
    Err("this device is for planning only".to_string())
}

impl Runtime for Absent {
    fn name(&self) -> &str {
        &self.name
    }

    fn alignment(&self) -> usize {
        256
    }

    fn allocate(&self, _: usize, _: Lifetime) -> Answer<Handle> {
        absent()
    }

    fn release(&self, _memory: Handle) {}

    fn zero(&self, _memory: Handle, _bytes: usize) -> Answer<()> {
        absent()
    }

    fn write(&self, _memory: Handle, _bytes: &[u8]) -> Answer<()> {
        absent()
    }

    fn read(&self, _bytes: &mut [u8], _memory: Handle) -> Answer<()> {
        absent()
    }

    fn finish(&self) -> Answer<()> {
        absent()
    }

    fn compile(&self, _source: &str, _language: Language, _options: &[String]) -> Answer<Compiled> {
        absent()
    }

    fn kernel(&self, _program: Compiled, _name: &str) -> Answer<Kernel> {
        absent()
    }

    fn launch(&self, _: Kernel, _groups: usize, _size: usize, _dynamic: usize, _: &[Argument]) -> Answer<()> {
        absent()
    }

    fn architecture(&self) -> Option<(u32, u32)> {
        self.architecture
    }

    fn multiprocessors(&self) -> usize {
        1
    }
}

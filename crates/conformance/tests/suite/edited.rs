//! A card whose kernels have a mistake, for negative controls.

use isobit_kernels::gpu::runtime::{Answer, Argument, Compiled, Handle, Kernel, Language, Lifetime, Runtime};

/// A card that compiles edited sources.
pub(crate) struct Edited<R> {
    pub(crate) card: R,
    pub(crate) from: &'static str,
    pub(crate) to: &'static str,
}

impl<R: Runtime> Runtime for Edited<R> {
    fn name(&self) -> &str {
        self.card.name()
    }

    fn alignment(&self) -> usize {
        self.card.alignment()
    }

    fn soft_division(&self) -> bool {
        self.card.soft_division()
    }

    fn allocate(&self, bytes: usize, lifetime: Lifetime) -> Answer<Handle> {
        self.card.allocate(bytes, lifetime)
    }

    fn release(&self, memory: Handle) {
        self.card.release(memory);
    }

    fn zero(&self, memory: Handle, bytes: usize) -> Answer<()> {
        self.card.zero(memory, bytes)
    }

    fn write(&self, memory: Handle, bytes: &[u8]) -> Answer<()> {
        self.card.write(memory, bytes)
    }

    fn read(&self, bytes: &mut [u8], memory: Handle) -> Answer<()> {
        self.card.read(bytes, memory)
    }

    fn finish(&self) -> Answer<()> {
        self.card.finish()
    }

    fn compile(&self, source: &str, language: Language, options: &[String]) -> Answer<Compiled> {
        self.card.compile(&source.replace(self.from, self.to), language, options)
    }

    fn kernel(&self, program: Compiled, name: &str) -> Answer<Kernel> {
        self.card.kernel(program, name)
    }

    fn launch(&self, kernel: Kernel, groups: usize, size: usize, dynamic: usize, arguments: &[Argument]) -> Answer<()> {
        self.card.launch(kernel, groups, size, dynamic, arguments)
    }

    fn architecture(&self) -> Option<(u32, u32)> {
        self.card.architecture()
    }

    fn has_mfma(&self) -> bool {
        self.card.has_mfma()
    }

    fn multiprocessors(&self) -> usize {
        self.card.multiprocessors()
    }
}

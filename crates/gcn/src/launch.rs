//! Launches: groups one after the other in seeded order, and within a group its waves from barrier
//! to barrier, in an order that the seed changes at every barrier.

use crate::execute::{Environment, Pause};
use crate::instruction::LANES;
use crate::memory::Memory;
use crate::program::{Kernel, Origin, Program};
use crate::race::Accessor;
use crate::random::{mix, order};
use crate::shared::Shared;
use crate::wave::{Start, Wave};
use isobit_numerics::{HardFma, SoftFma};
use std::fmt;

/// Shared memory that a group can have.
const SHARED_BYTES_MAX: usize = 64 << 10;

/// Why a launch failed, and where.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fault {
    pub(crate) what: String,
    /// The instruction; None if none is to blame.
    pub(crate) origin: Option<Origin>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Some(origin) => write!(f, "{}, {}", self.what, origin.description()),
            None => write!(f, "{}", self.what),
        }
    }
}

/// Memory and waves of an emulated card.
pub(crate) struct Machine {
    pub(crate) memory: Memory,
    /// Reused by every group.
    waves: Vec<Wave>,
    launches: u64,
    seed: u64,
    /// Of the lanes, in memory accesses of this launch.
    lane_order: Vec<usize>,
    /// Instructions that waves have executed.
    pub(crate) steps: u64,
    /// How often the last launch executed each instruction of its program.
    pub(crate) executed: Vec<u64>,
}

/// A kernel with its launch parameters.
pub(crate) struct Launch<'a> {
    pub(crate) program: &'a Program,
    /// Address of the program's image.
    pub(crate) image: u64,
    pub(crate) kernel: &'a Kernel,
    pub(crate) groups: usize,
    pub(crate) group_size: usize,
    pub(crate) dynamic_bytes: usize,
    /// The argument segment.
    pub(crate) arguments: &'a [u8],
}

impl Launch<'_> {
    fn fault(&self, pc: Option<usize>, what: String) -> Fault {
        Fault { what, origin: pc.and_then(|pc| self.program.origins.get(pc)).cloned() }
    }

    /// Bytes of shared memory of a group.
    fn shared_bytes(&self) -> usize {
        self.kernel.shared_bytes + self.dynamic_bytes
    }

    fn check(&self) -> Result<(), String> {
        let kernel = self.kernel;
        if self.group_size == 0 || self.group_size > kernel.group_size_max.min(1024) {
            return Err(format!("groups of {}; the kernel is for {}", self.group_size, kernel.group_size_max));
        }
        if self.groups >= Accessor::GROUPS_MAX {
            return Err(format!("{} groups are more than the emulator counts", self.groups));
        }
        if self.shared_bytes() > SHARED_BYTES_MAX {
            return Err(format!("{} bytes of shared memory; a group has {SHARED_BYTES_MAX}", self.shared_bytes()));
        }
        if kernel.mode.rounding != 0 {
            return Err("the kernel does not round to nearest even".to_string());
        }
        Ok(())
    }
}

impl Machine {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            memory: Memory::new(seed),
            waves: Vec::new(),
            launches: 0,
            seed,
            lane_order: Vec::new(),
            steps: 0,
            executed: Vec::new(),
        }
    }

    /// Runs all groups.
    pub(crate) fn launch(&mut self, launch: &Launch) -> Result<(), Fault> {
        launch.check().map_err(|what| launch.fault(None, what))?;
        self.executed.clear();
        self.executed.resize(launch.program.code.len(), 0);
        self.launches += 1;
        if self.launches >= Accessor::LAUNCHES_MAX {
            return Err(launch.fault(None, "more launches than the emulator counts".to_string()));
        }
        let bytes = launch.arguments.len().max(launch.kernel.argument_bytes);
        // Compilers load past the last argument, up to the alignment of the segment.
        let arguments =
            self.memory.allocate(bytes.max(1).next_multiple_of(16)).map_err(|what| launch.fault(None, what))?;
        self.memory.write(arguments, launch.arguments).map_err(|what| launch.fault(None, what))?;
        self.memory.protect(arguments);
        let wave_count = launch.group_size.div_ceil(LANES);
        while self.waves.len() < wave_count {
            self.waves.push(Wave::new(mix(self.seed, self.waves.len() as u64) as u32));
        }
        let launch_seed = if self.seed == 0 { 0 } else { mix(self.seed, self.launches) };
        self.lane_order = order(launch_seed, LANES);
        let mut shared = Shared::new(launch.shared_bytes(), launch_seed as u32);
        let ran = order(launch_seed, launch.groups).into_iter().try_for_each(|group| {
            shared.forget();
            let start = Start {
                kernel: launch.kernel,
                arguments,
                group: group as u32,
                group_size: launch.group_size,
                poison: launch_seed as u32,
            };
            let group_seed = if launch_seed == 0 { 0 } else { mix(launch_seed, group as u64) };
            self.group(launch, &start, &mut shared, group_seed)
        });
        self.memory.release(arguments);
        ran
    }

    /// Runs a group: all waves to a barrier, then all to the next one.
    fn group(&mut self, launch: &Launch, start: &Start, shared: &mut Shared, group_seed: u64) -> Result<(), Fault> {
        let wave_count = launch.group_size.div_ceil(LANES);
        let waves = &mut self.waves[..wave_count];
        for (index, wave) in waves.iter_mut().enumerate() {
            wave.enter(index, start);
        }
        for epoch in 0..Accessor::EPOCHS_MAX {
            let epoch_seed = if group_seed == 0 { 0 } else { mix(group_seed, epoch as u64) };
            let mut waiting = false;
            for index in order(epoch_seed, wave_count) {
                let wave = &mut waves[index];
                if wave.ended {
                    continue;
                }
                let mut environment = Environment {
                    program: launch.program,
                    image: launch.image,
                    memory: &mut self.memory,
                    shared,
                    accessor: Accessor::new(self.launches, start.group as usize, epoch, index),
                    seed: self.seed,
                    lane_order: &self.lane_order,
                    steps: 0,
                    executed: &mut self.executed,
                };
                let paused = run(wave, &mut environment).map_err(|what| launch.fault(Some(wave.pc), what));
                self.steps += environment.steps;
                waiting |= paused? == Pause::Barrier;
            }
            if !waiting {
                return Ok(());
            }
        }
        Err(launch.fault(None, "more barriers than the emulator counts".to_string()))
    }
}

/// Runs a wave to its next pause with the widest instructions of the host; the bits are the same.
fn run(wave: &mut Wave, environment: &mut Environment) -> Result<Pause, String> {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma,bmi1,bmi2")]
        fn wide(wave: &mut Wave, environment: &mut Environment) -> Result<Pause, String> {
            wave.run::<HardFma>(environment)
        }
        let vectors = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        if vectors && is_x86_feature_detected!("bmi1") && is_x86_feature_detected!("bmi2") {
            // SAFETY: the host has every feature that is enabled above.
            return unsafe { wide(wave, environment) };
        }
    }
    wave.run::<SoftFma>(environment)
}

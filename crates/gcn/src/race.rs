//! Races: who last read and wrote a place in global or shared memory, and whether another access is
//! ordered after that by a barrier or a launch.

/// Who accesses: launch, group, barriers passed by the group, wave. Order by barriers is decided by
/// comparing the parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Accessor(u64);

const WAVE_BITS: u32 = 5;
const EPOCH_BITS: u32 = 20;
const GROUP_BITS: u32 = 21;
/// In place of a wave or a group: more than one.
const WAVES: u64 = (1 << WAVE_BITS) - 1;
const GROUPS: u64 = (1 << GROUP_BITS) - 1;

impl Accessor {
    pub(crate) const GROUPS_MAX: usize = GROUPS as usize;
    pub(crate) const EPOCHS_MAX: usize = 1 << EPOCH_BITS;
    pub(crate) const LAUNCHES_MAX: u64 = 1 << (64 - WAVE_BITS - EPOCH_BITS - GROUP_BITS);

    /// `launch` starts at 1: 0 is nobody.
    pub(crate) fn new(launch: u64, group: usize, epoch: usize, wave: usize) -> Self {
        Self((((launch << GROUP_BITS | group as u64) << EPOCH_BITS | epoch as u64) << WAVE_BITS) | wave as u64)
    }

    fn wave(self) -> u64 {
        self.0 & WAVES
    }

    /// Launch, group and epoch.
    fn section(self) -> u64 {
        self.0 >> WAVE_BITS
    }

    fn group(self) -> u64 {
        self.section() >> EPOCH_BITS & GROUPS
    }

    fn launch(self) -> u64 {
        self.section() >> (EPOCH_BITS + GROUP_BITS)
    }

    /// Whether an access by `later` is not ordered after this one.
    fn races(self, later: Self) -> bool {
        self != later
            && self.launch() == later.launch()
            && (self.group() != later.group() || self.section() == later.section())
    }

    /// This reader and another one.
    fn joined(self, reader: Self) -> Self {
        if self.launch() != reader.launch() {
            reader
        } else if self.group() != reader.group() {
            Self(reader.0 | GROUPS << (EPOCH_BITS + WAVE_BITS) | WAVES)
        } else if self.section() == reader.section() {
            Self(reader.0 | WAVES)
        } else {
            reader
        }
    }
}

/// The last accesses to a place in memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cell {
    write: Accessor,
    read: Accessor,
}

impl Cell {
    #[inline(always)]
    pub(crate) fn read(&mut self, by: Accessor) -> Result<(), String> {
        if self.read == by && !self.write.races(by) {
            return Ok(());
        }
        if self.write.races(by) {
            return Err(race("read here and written", self.write, by));
        }
        if self.read != by {
            self.read = self.read.joined(by);
        }
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn write(&mut self, by: Accessor) -> Result<(), String> {
        if self.write.races(by) {
            return Err(race("written here and written", self.write, by));
        }
        if self.read.races(by) {
            return Err(race("written here and read", self.read, by));
        }
        self.write = by;
        Ok(())
    }
}

#[cold]
fn race(what: &str, other: Accessor, by: Accessor) -> String {
    let who = if other.group() == by.group() {
        match other.wave() {
            WAVES => "several waves of the group, without a barrier between".to_string(),
            wave => format!("wave {wave} of the group, without a barrier between"),
        }
    } else if other.group() == GROUPS {
        "several groups".to_string()
    } else {
        format!("group {}", other.group())
    };
    format!("a race: {what} by {who} (here: wave {} of group {})", by.wave(), by.group())
}

//! Ranks that MPI connects: `mpirun`, `mpiexec` or `srun` started them. MPI moves bytes and nothing
//! else; no reduction of its own is used.
//!
//! A thread of its own makes every call of MPI, so messages move while the other threads compute.
//! It passes messages on through queues, and `World` only looks at those.

use super::{Channel, Message, Neighbours, World, WorldError};
use ::mpi::environment::library_version;
use ::mpi::ffi::{self, MPI_Request, MPI_Status};
use ::mpi::traits::{Communicator, CommunicatorCollectives};
use ::mpi::{Threading, initialize_with_threading};
use isobit_kernels::buffer::try_room;
use isobit_kernels::gpu;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// BOUND: bytes that one call of MPI moves; its counts are 32-bit numbers.
const PIECE_BYTES: usize = 1 << 28;
/// BOUND: bytes of a message. A longer one was never sent.
const MESSAGE_BYTES_MAX: u64 = 1 << 40;
/// Between two looks for messages while none is on its way: longer and longer, since every look
/// takes time of a core that computes.
const PAUSES: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(1)];
/// Looks at messages in flight without a pause after the last one has moved; some milliseconds.
const IDLE_LOOKS_MAX: u64 = 10_000;
/// How long a rank that ends the run waits for its own end.
const ABORT_WAIT: Duration = Duration::from_secs(30);
/// Bytes of a set of cores.
const CORES_BYTES: usize = 128;

const CHANNELS: [Channel; 2] = [Channel::Data, Channel::Control];

/// MPI's tags of the length of a message and of its pieces.
const fn tags(channel: Channel) -> [c_int; 2] {
    match channel {
        Channel::Data => [1, 2],
        Channel::Control => [3, 4],
    }
}

enum Command {
    Send { to: usize, channel: Channel, message: Message },
    Abort(u8),
    Finish,
}

/// What the two sides share.
#[derive(Default)]
struct Shared {
    arrived: Mutex<BTreeMap<(usize, Channel), VecDeque<Message>>>,
    failed: Mutex<Option<WorldError>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This process among the others.
pub struct Mpi {
    place: Place,
    commands: Sender<Command>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Clone, Copy)]
struct Place {
    rank: usize,
    size: usize,
    neighbours: Neighbours,
}

impl Mpi {
    /// Whether this MPI is Open MPI. It ends a process that it cannot connect, with words about how
    /// it was built.
    pub fn is_open_mpi() -> bool {
        library_version().is_ok_and(|version| version.starts_with("Open MPI"))
    }

    /// Connects with the other processes. Call it once.
    pub fn start() -> Result<Self, String> {
        let (commands, received) = channel();
        let (tell, told) = channel();
        let shared = Arc::new(Shared::default());
        let of_thread = Arc::clone(&shared);
        let serve = move || {
            // MPI takes the thread that starts it for the one that calls it.
            let started =
                initialize_with_threading(Threading::Funneled).filter(|(_, level)| *level >= Threading::Funneled);
            let Some((universe, _)) = started else {
                let _ = tell.send(Err("MPI does not start, or does not allow threads".to_string()));
                return;
            };
            let place = place(&universe.world());
            let _ = tell.send(Ok(place));
            let (rank, sends, receives) = (place.rank, Vec::new(), BTreeMap::new());
            let mut link = Link { rank, shared: of_thread, commands: received, sends, receives };
            if let Err(error) = link.serve() {
                *locked(&link.shared.failed) = Some(error);
                // Nothing arrives any more; the other side may still end the run.
                link.wait_for_the_end();
            }
            drop(universe);
        };
        let thread = std::thread::Builder::new().name("mpi".to_string()).spawn(serve);
        let thread = thread.map_err(|error| format!("no thread for MPI: {error}"))?;
        let place = told.recv().map_err(|_| "MPI does not start".to_string())??;
        Ok(Self { place, commands, shared, thread: Some(thread) })
    }
}

/// Where this process stands among all, and on its machine.
fn place(world: &impl Communicator) -> Place {
    // SAFETY: the handle is that of the world, which exists until MPI ends. Errors are returned
    // from now on, and checked.
    unsafe { ffi::MPI_Comm_set_errhandler(ffi::RSMPI_COMM_WORLD, ffi::RSMPI_ERRORS_RETURN) };
    let machine = world.split_shared(world.rank());
    let own = cores();
    let mut all = vec![0; CORES_BYTES * machine.size() as usize];
    machine.all_gather_into(&own[..], &mut all[..]);
    let sharing = all.as_chunks::<CORES_BYTES>().0.iter().filter(|cores| **cores == own).count();
    let (count, index) = (machine.size() as usize, machine.rank() as usize);
    let neighbours = Neighbours { count, index, sharing: sharing.max(1) };
    Place { rank: world.rank() as usize, size: world.size() as usize, neighbours }
}

/// The cores this process may run on. Launchers bind ranks to cores of their own, or do not.
fn cores() -> [u8; CORES_BYTES] {
    let mut set = [0; CORES_BYTES];
    #[cfg(target_os = "linux")]
    // SAFETY: the kernel writes at most as many bytes as it is told there are.
    unsafe {
        libc::sched_getaffinity(0, CORES_BYTES, set.as_mut_ptr().cast());
    }
    set
}

impl World for Mpi {
    fn rank(&self) -> usize {
        self.place.rank
    }

    fn size(&self) -> usize {
        self.place.size
    }

    fn neighbours(&self) -> Neighbours {
        self.place.neighbours
    }

    fn send(&self, to: usize, channel: Channel, message: Message) -> Result<(), WorldError> {
        let gone = |_| WorldError::Gone { rank: to, why: "MPI has ended".to_string() };
        self.commands.send(Command::Send { to, channel, message }).map_err(gone)
    }

    fn poll(&self, from: usize, channel: Channel) -> Result<Option<Message>, WorldError> {
        let message = locked(&self.shared.arrived).get_mut(&(from, channel)).and_then(VecDeque::pop_front);
        match (message, &*locked(&self.shared.failed)) {
            (None, Some(error)) => Err(error.clone()),
            (message, _) => Ok(message),
        }
    }

    fn abort(&self, code: u8) {
        let _ = self.commands.send(Command::Abort(code));
        std::thread::sleep(ABORT_WAIT);
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        // A rank that panics cannot wait for the others, which do not know.
        let last = if std::thread::panicking() { Command::Abort(101) } else { Command::Finish };
        let _ = self.commands.send(last);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A message on its way out. MPI reads the bytes until the requests are done.
struct Sending {
    to: usize,
    requests: Vec<MPI_Request>,
    _length: Box<[u8; 8]>,
    _message: Message,
}

/// A message on its way in. MPI writes the bytes until the requests are done.
struct Receiving {
    requests: Vec<MPI_Request>,
    bytes: Vec<u8>,
}

/// The side that calls MPI.
struct Link {
    rank: usize,
    shared: Arc<Shared>,
    commands: Receiver<Command>,
    sends: Vec<Sending>,
    /// In the order in which they were sent.
    receives: BTreeMap<(usize, Channel), VecDeque<Receiving>>,
}

impl Link {
    /// Moves messages until the other side is done.
    fn serve(&mut self) -> Result<(), WorldError> {
        let [mut pause, longest] = PAUSES;
        let mut is_last = false;
        let mut idle_looks = 0;
        let mut command = None;
        loop {
            let before = self.in_flight();
            while let Some(next) = command.take().or_else(|| self.commands.try_recv().ok()) {
                match next {
                    Command::Send { to, channel, message } => self.send(to, channel, message)?,
                    Command::Abort(code) => abort(code),
                    Command::Finish => is_last = true,
                }
            }
            for channel in CHANNELS {
                while self.begin_to_receive(channel)? {}
            }
            let begun = self.in_flight();
            self.deliver()?;
            self.finish_sends()?;
            if is_last && self.sends.is_empty() {
                return Ok(());
            }
            // A message that stands still waits for a rank that computes; so do the threads here.
            let now = self.in_flight();
            let is_idle = before == begun && begun == now;
            idle_looks = if is_idle { idle_looks + 1 } else { 0 };
            pause = if is_idle { (2 * pause).min(longest) } else { PAUSES[0] };
            if now != (0, 0) && idle_looks <= IDLE_LOOKS_MAX {
                std::thread::yield_now();
            } else if is_last {
                std::thread::sleep(pause);
            } else {
                match self.commands.recv_timeout(pause) {
                    Ok(next) => command = Some(next),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => is_last = true,
                }
            }
        }
    }

    /// Messages on their way out and in.
    fn in_flight(&self) -> (usize, usize) {
        (self.sends.len(), self.receives.values().map(VecDeque::len).sum())
    }

    /// After a failure: until the other side ends the run.
    fn wait_for_the_end(&mut self) {
        loop {
            match self.commands.recv() {
                Ok(Command::Abort(code)) => abort(code),
                Ok(Command::Send { .. }) => (),
                // What is on its way can no longer be waited for.
                Ok(Command::Finish) | Err(_) => abort(6),
            }
        }
    }

    fn send(&mut self, to: usize, channel: Channel, message: Message) -> Result<(), WorldError> {
        let [length_tag, piece_tag] = tags(channel);
        let length = Box::new((message.len() as u64).to_le_bytes());
        let mut requests = Vec::new();
        let mut begin = |bytes: &[u8], tag| {
            let mut request = MaybeUninit::uninit();
            // SAFETY: the bytes are kept, unchanged and in place, until the request is done: the
            // length is boxed and the message is shared and never written to.
            let code = unsafe {
                ffi::MPI_Isend(
                    bytes.as_ptr().cast::<c_void>(),
                    bytes.len() as c_int,
                    ffi::RSMPI_UINT8_T,
                    to as c_int,
                    tag,
                    ffi::RSMPI_COMM_WORLD,
                    request.as_mut_ptr(),
                )
            };
            checked(code, to)?;
            // SAFETY: MPI has written it.
            requests.push(unsafe { request.assume_init() });
            Ok(())
        };
        begin(&length[..], length_tag)?;
        message.chunks(PIECE_BYTES).try_for_each(|piece| begin(piece, piece_tag))?;
        self.sends.push(Sending { to, requests, _length: length, _message: message });
        Ok(())
    }

    /// Begins to receive the next message of any rank; false if there is none.
    fn begin_to_receive(&mut self, channel: Channel) -> Result<bool, WorldError> {
        let [length_tag, piece_tag] = tags(channel);
        let (mut found, mut status) = (0, MaybeUninit::<MPI_Status>::uninit());
        // SAFETY: both places are valid for writing.
        let code = unsafe {
            ffi::MPI_Iprobe(
                ffi::RSMPI_ANY_SOURCE,
                length_tag,
                ffi::RSMPI_COMM_WORLD,
                &raw mut found,
                status.as_mut_ptr(),
            )
        };
        // Of this rank: no other one is named in the call.
        checked(code, self.rank)?;
        if found == 0 {
            return Ok(false);
        }
        // SAFETY: MPI has found a message and written where it comes from.
        let from = unsafe { status.assume_init() }.MPI_SOURCE;
        let mut length = [0; 8];
        // SAFETY: the buffer is valid for its length; a longer message is an error of MPI. It has
        // arrived, so this does not wait.
        let code = unsafe {
            ffi::MPI_Recv(
                length.as_mut_ptr().cast::<c_void>(),
                length.len() as c_int,
                ffi::RSMPI_UINT8_T,
                from,
                length_tag,
                ffi::RSMPI_COMM_WORLD,
                ffi::RSMPI_STATUS_IGNORE,
            )
        };
        checked(code, from as usize)?;
        let length = u64::from_le_bytes(length);
        let room = if length <= MESSAGE_BYTES_MAX { try_room(length as usize) } else { None };
        let Some(mut bytes) = room else {
            let why = format!("it sends {length} bytes at once, more than there is memory for");
            return Err(WorldError::Gone { rank: from as usize, why });
        };
        bytes.resize(length as usize, 0);
        let mut requests = Vec::new();
        for piece in bytes.chunks_mut(PIECE_BYTES) {
            let mut request = MaybeUninit::uninit();
            // SAFETY: the piece stays in place, and nobody reads it, until the request is done:
            // moving a vector does not move its elements.
            let code = unsafe {
                ffi::MPI_Irecv(
                    piece.as_mut_ptr().cast::<c_void>(),
                    piece.len() as c_int,
                    ffi::RSMPI_UINT8_T,
                    from,
                    piece_tag,
                    ffi::RSMPI_COMM_WORLD,
                    request.as_mut_ptr(),
                )
            };
            checked(code, from as usize)?;
            // SAFETY: MPI has written it.
            requests.push(unsafe { request.assume_init() });
        }
        self.receives.entry((from as usize, channel)).or_default().push_back(Receiving { requests, bytes });
        Ok(true)
    }

    /// Passes on what has arrived, in the order in which it was sent.
    fn deliver(&mut self) -> Result<(), WorldError> {
        for (from, waiting) in &mut self.receives {
            while let Some(first) = waiting.front_mut() {
                if !all_done(&mut first.requests, from.0)? {
                    break;
                }
                if let Some(Receiving { bytes, .. }) = waiting.pop_front() {
                    locked(&self.shared.arrived).entry(*from).or_default().push_back(Arc::new(bytes));
                }
            }
        }
        Ok(())
    }

    /// Forgets what has left.
    fn finish_sends(&mut self) -> Result<(), WorldError> {
        let mut failure = Ok(());
        self.sends.retain_mut(|Sending { to, requests, .. }| match all_done(requests, *to) {
            Ok(is_done) => !is_done,
            Err(error) => {
                failure = Err(error);
                // MPI may still read its bytes.
                true
            }
        });
        failure
    }
}

/// Whether all are done; forgets those that are. `rank` is at their other end.
fn all_done(requests: &mut Vec<MPI_Request>, rank: usize) -> Result<bool, WorldError> {
    while let Some(request) = requests.last_mut() {
        let mut is_done = 0;
        // SAFETY: the request was begun and is not done yet.
        let code = unsafe { ffi::MPI_Test(request, &raw mut is_done, ffi::RSMPI_STATUS_IGNORE) };
        checked(code, rank)?;
        if is_done == 0 {
            return Ok(false);
        }
        requests.pop();
    }
    Ok(true)
}

/// Ends all processes, this one too.
fn abort(code: u8) {
    gpu::exit_guard::disarm();
    // SAFETY: the world exists until MPI ends.
    unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, c_int::from(code)) };
}

fn checked(code: c_int, rank: usize) -> Result<(), WorldError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let (mut text, mut length) = ([0_u8; ffi::MPI_MAX_ERROR_STRING as usize + 1], 0);
    // SAFETY: the buffer has the size that MPI asks for.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &raw mut length) };
    let why = String::from_utf8_lossy(&text[..length.max(0) as usize]).into_owned();
    Err(WorldError::Gone { rank, why })
}

//! A child process of this program, started with an argument that only `gpu::start` understands:
//! AMD's libraries may crash or hang, and then they take the child with them and nothing else. It
//! is killed when it is silent for too long, or when the user wants to stop.

use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

const TICK: Duration = Duration::from_millis(20);
const TICKS_PER_SECOND: u32 = 50;
/// What a child may go on for when the user wants to stop: most finish by themselves.
const SECONDS_TO_STOP: u32 = 3;
/// BOUND: more than a code object or a list of devices has.
const OUTPUT_BYTES_MAX: u64 = 128 << 20;
const MESSAGE_BYTES_MAX: u64 = 1 << 20;

static STOP: OnceLock<fn() -> bool> = OnceLock::new();

/// From now on child processes end soon after `requested` becomes true: for programs that do not
/// end at the first signal. The first call of a process counts.
pub fn stop_children_when(requested: fn() -> bool) {
    let _ = STOP.set(requested);
}

/// How a child ended.
#[derive(Debug)]
pub(in crate::gpu) enum End {
    /// It wrote all that was asked for.
    Done,
    Exited(ExitStatus),
    /// Killed: it wrote nothing for as many seconds.
    Silent(u32),
    /// Killed: the user wants to stop.
    Stopped,
}

#[derive(Debug)]
pub(in crate::gpu) struct Ended {
    pub(in crate::gpu) output: Vec<u8>,
    messages: Vec<u8>,
    pub(in crate::gpu) end: End,
}

impl Ended {
    /// Its last lines on standard error.
    pub(in crate::gpu) fn said(&self) -> String {
        let text = String::from_utf8_lossy(&self.messages);
        let lines: Vec<&str> = text.lines().rev().take(3).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("; ")
    }
}

/// What the output of a child has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gpu) enum Heard {
    /// Nothing yet, or only what a library printed, which is silence.
    Nothing,
    /// More of the answer.
    More,
    Everything,
}

/// Looks for marks in an output that grows, each part of it once.
#[derive(Default)]
pub(in crate::gpu) struct Search {
    searched: usize,
}

impl Search {
    /// Where the next mark begins, which is found again until the search moves on.
    pub(in crate::gpu) fn next(&mut self, output: &[u8], mark: &[u8]) -> Option<usize> {
        let found = output.get(self.searched..)?.windows(mark.len()).position(|window| window == mark);
        self.searched = found.map_or((output.len() + 1).saturating_sub(mark.len()), |at| self.searched + at);
        found.map(|_| self.searched)
    }

    pub(in crate::gpu) fn move_on(&mut self, bytes: usize) {
        self.searched += bytes;
    }
}

/// What a thread tells about a child.
enum Event {
    Output(Vec<u8>),
    Messages(Vec<u8>),
    /// A pipe has come to its end.
    Closed,
    /// Time passes, however much the child writes.
    Tick,
}

/// Starts this program with one argument, writes `input`, and reads until `heard` has everything.
pub(in crate::gpu) fn run(
    argument: &str,
    input: &[u8],
    silent_seconds_max: u32,
    heard: impl FnMut(&[u8]) -> Heard,
) -> Result<Ended, String> {
    let program = std::env::current_exe().map_err(|error| format!("this program cannot be found: {error}"))?;
    let mut command = Command::new(program);
    command.arg(argument).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Ctrl-C asks this program to stop after its step, not its child to fail.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command.spawn().map_err(|error| format!("this program cannot start itself again: {error}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // The child reads before it opens a library. One that ends before says why below.
        let _ = stdin.write_all(input);
    }
    let (sender, receiver) = channel();
    let reading = read(child.stdout.take(), Event::Output, OUTPUT_BYTES_MAX, sender.clone())
        .and_then(|()| read(child.stderr.take(), Event::Messages, MESSAGE_BYTES_MAX, sender.clone()))
        .and_then(|()| {
            in_thread(move || {
                while sender.send(Event::Tick).is_ok() {
                    std::thread::sleep(TICK);
                }
            })
        });
    let ended = match reading {
        Ok(()) => follow(&mut child, &receiver, silent_seconds_max, heard),
        Err(error) => Err(format!("no thread for a child process: {error}")),
    };
    if !matches!(&ended, Ok(Ended { end: End::Exited(_), .. })) {
        end(&mut child);
    }
    ended
}

/// Sends what comes through a pipe, on a thread of its own.
fn read(
    pipe: Option<impl Read + Send + 'static>,
    event: fn(Vec<u8>) -> Event,
    bytes_max: u64,
    sender: Sender<Event>,
) -> std::io::Result<()> {
    in_thread(move || {
        let mut bytes = vec![0; 1 << 16];
        let mut pipe = pipe.map(|pipe| pipe.take(bytes_max));
        while let Some(Ok(length @ 1..)) = pipe.as_mut().map(|pipe| pipe.read(&mut bytes)) {
            if sender.send(event(bytes[..length].to_vec())).is_err() {
                return;
            }
        }
        let _ = sender.send(Event::Closed);
    })
}

fn in_thread(work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new().name("child".to_string()).spawn(work).map(|_| ())
}

fn follow(
    child: &mut Child,
    receiver: &Receiver<Event>,
    silent_seconds_max: u32,
    mut heard: impl FnMut(&[u8]) -> Heard,
) -> Result<Ended, String> {
    let (mut silent, mut stopping, mut open) = (0, 0, 2);
    let mut ended = Ended { output: Vec::new(), messages: Vec::new(), end: End::Done };
    loop {
        match receiver.recv().map_err(|error| format!("a child process: {error}"))? {
            Event::Output(bytes) => {
                ended.output.extend(bytes);
                match heard(&ended.output) {
                    Heard::Everything => return Ok(ended),
                    Heard::More => silent = 0,
                    Heard::Nothing => (),
                }
                continue;
            }
            Event::Messages(bytes) => {
                ended.messages.extend(bytes);
                continue;
            }
            Event::Closed => {
                open -= 1;
                continue;
            }
            Event::Tick => (),
        }
        if let Some(status) = child.try_wait().map_err(|error| format!("a child process: {error}"))? {
            let length = ended.output.len();
            drain(receiver, &mut ended, open);
            // It may have answered just before it ended.
            let has_answered = ended.output.len() > length && heard(&ended.output) == Heard::Everything;
            ended.end = if has_answered { End::Done } else { End::Exited(status) };
            return Ok(ended);
        }
        silent += 1;
        if silent > silent_seconds_max.saturating_mul(TICKS_PER_SECOND) {
            ended.end = End::Silent(silent_seconds_max);
            return Ok(ended);
        }
        stopping += u32::from(STOP.get().is_some_and(|requested| requested()));
        if stopping > SECONDS_TO_STOP * TICKS_PER_SECOND {
            ended.end = End::Stopped;
            return Ok(ended);
        }
    }
}

/// What is still in the open pipes of a child that has ended, for a second at most: a process that
/// the child left behind may hold them open.
fn drain(receiver: &Receiver<Event>, ended: &mut Ended, mut open: usize) {
    let mut ticks = 0;
    while open > 0 && ticks < TICKS_PER_SECOND {
        match receiver.recv() {
            Ok(Event::Output(bytes)) => ended.output.extend(bytes),
            Ok(Event::Messages(bytes)) => ended.messages.extend(bytes),
            Ok(Event::Closed) => open -= 1,
            Ok(Event::Tick) => ticks += 1,
            Err(_) => return,
        }
    }
}

/// Kills a child. One that is stuck in a driver does not die, and is not waited for.
fn end(child: &mut Child) {
    let _ = child.kill();
    for _ in 0..TICKS_PER_SECOND {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(TICK);
    }
}

/// In the child: ends this process when its parent is gone, or after `seconds_max`. Without the
/// thread, which the system may refuse, it only lives longer.
#[expect(clippy::exit, clippy::print_stderr, reason = "this process is a child; its parent reads what it says")]
pub(in crate::gpu) fn watch(seconds_max: u32) {
    let watched = move || {
        #[cfg(unix)]
        let parent = std::os::unix::process::parent_id();
        for _ in 0..seconds_max {
            std::thread::sleep(Duration::from_secs(1));
            #[cfg(unix)]
            if std::os::unix::process::parent_id() != parent {
                std::process::exit(1);
            }
        }
        eprintln!("not finished within {seconds_max} seconds");
        std::process::exit(1);
    };
    let _ = std::thread::Builder::new().name("watch".to_string()).spawn(watched);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parent may find the child gone before it has read what the child wrote last.
    #[test]
    #[cfg(unix)]
    fn an_answer_counts_though_its_writer_has_ended() {
        let mark: &[u8] = b"mark";
        let ended_after = |output: &[u8]| {
            let mut child = Command::new("true").spawn().expect("a process");
            while child.try_wait().expect("a status").is_none() {
                std::thread::sleep(TICK);
            }
            let (sender, receiver) = channel();
            for event in [Event::Tick, Event::Output(output.to_vec()), Event::Closed, Event::Closed] {
                sender.send(event).expect("a receiver");
            }
            let mut search = Search::default();
            let heard = |output: &[u8]| search.next(output, mark).map_or(Heard::Nothing, |_| Heard::Everything);
            follow(&mut child, &receiver, 1, heard).expect("it ends").end
        };
        assert!(matches!(ended_after(b"noise mark"), End::Done));
        assert!(matches!(ended_after(b"noise"), End::Exited(_)));
    }

    #[test]
    fn every_part_of_an_output_is_searched_once() {
        let (mut search, mark, mut output) = (Search::default(), b"mark", Vec::new());
        for (more, found) in [("noise ma", None), ("rk", Some(6)), (" and", Some(6))] {
            output.extend(more.as_bytes());
            assert_eq!(search.next(&output, mark), found, "{more}");
        }
        search.move_on(mark.len());
        assert_eq!(search.next(&output, mark), None);
        assert_eq!(search.searched, output.len() - 3);
        output.extend(b"mark");
        assert_eq!(search.next(&output, mark), Some(14));
    }
}

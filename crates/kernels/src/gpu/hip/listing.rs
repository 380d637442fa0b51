//! The cards of HIP, listed and tested in a child process: a runtime that crashes, aborts or hangs,
//! even while it is loaded, is an answer like any other. Where the system has no AMD device the
//! runtime is not opened at all, unless the user named one.

use super::process::{self, End, Heard, Search};
use super::settings::{self, Open, Settings};
use super::{child, list_here, system};
use crate::backend::Device;
use crate::gpu::device::Gpu;
use crate::gpu::devices::{Api, Listing, Selector};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// The argument that makes a program list the cards.
const ARGUMENT: &str = "--list-hip-devices";
/// Every record begins with this: a library may have written before.
const MARK: &[u8] = b"\0isobit hip device\0";
/// Numbers that are copied in a test: some pages.
const TEST_LENGTH: usize = 1 << 12;

/// Whether the user named an AMD device.
static NAMED: AtomicBool = AtomicBool::new(false);

/// The user named an AMD device: from now on the runtime is opened even if the system has none.
pub fn expect_device() {
    NAMED.store(true, Ordering::Relaxed);
}

/// What the child found.
#[derive(Clone, Debug, PartialEq)]
struct Found {
    listings: Result<Vec<Listing>, String>,
    /// Why the runtime must not be opened, if so: it took the child down.
    died: Option<String>,
}

/// The cards, or why there are none.
pub(in crate::gpu) fn list() -> Result<Vec<Listing>, String> {
    let settings = settings::current();
    if !settings.children {
        return list_here();
    }
    check_asked(&settings)?;
    found(&settings).listings.clone()
}

/// Why the runtime is not asked, if so.
fn check_asked(settings: &Settings) -> Result<(), String> {
    settings.refusal()?;
    let is_named = NAMED.load(Ordering::Relaxed) || settings.open == Open::Always;
    if !is_named && !Path::new(system::DEVICES).join("kfd").exists() {
        return Err(system::why_no_device(system::DEVICES, &[]));
    }
    Ok(())
}

/// What the runtime did to the child that listed its cards, if it took it down.
pub(in crate::gpu) fn failure() -> Option<String> {
    let settings = settings::current();
    if !settings.children || settings.is_child || check_asked(&settings).is_err() {
        return None;
    }
    found(&settings).died.clone()
}

/// Whether the runtime may be opened in this process.
pub(super) fn check() -> Result<(), String> {
    let settings = settings::current();
    if !settings.children || settings.is_child {
        return Ok(());
    }
    settings.refusal()?;
    found(&settings).died.clone().map_or(Ok(()), Err)
}

/// Asked once in a process.
fn found(settings: &Settings) -> &'static Found {
    static FOUND: OnceLock<Found> = OnceLock::new();
    FOUND.get_or_init(|| {
        let mut search = Search::default();
        match process::run(ARGUMENT, &[], settings.seconds_max, |output| heard(&mut search, output)) {
            Ok(ended) => Found::of(&records(&ended.output), &ended.end, &ended.said()),
            Err(error) => Found { died: Some(error.clone()), listings: Err(error) },
        }
    })
}

impl Found {
    fn of(records: &[Record], end: &End, said: &str) -> Self {
        let died = if records.contains(&Record::End) { None } else { Some(cause(end, said)) };
        if let Some(Record::Refused(why)) = records.iter().find(|record| matches!(record, Record::Refused(_))) {
            return Self { listings: Err(why.clone()), died };
        }
        let mut listings: Vec<Listing> = records
            .iter()
            .filter_map(|record| if let Record::Card(listing) = record { Some(listing.clone()) } else { None })
            .collect();
        for (index, listing) in listings.iter_mut().enumerate().filter(|(_, listing)| listing.objection.is_none()) {
            let test = records.iter().find_map(|record| match record {
                Record::Tested(tested, answer) if *tested == index => Some(answer.clone()),
                _ => None,
            });
            listing.objection = test.unwrap_or_else(|| died.clone());
        }
        match &died {
            Some(cause) if listings.is_empty() => Self { listings: Err(cause.clone()), died },
            _ => Self { listings: Ok(listings), died },
        }
    }
}

/// Why the child has no answer, and what to do.
fn cause(end: &End, said: &str) -> String {
    let remedy = "reinstall it or remove it; `ISOBIT_HIP=off` does without";
    match end {
        End::Silent(seconds) => format!(
            "the HIP runtime (libamdhip64) hung: no answer for {seconds} seconds; {remedy}, and \
             ISOBIT_HIP_TIMEOUT={} waits longer",
            seconds.saturating_mul(3)
        ),
        End::Stopped => "the HIP runtime (libamdhip64) was stopped before it answered".to_string(),
        End::Exited(status) if said.is_empty() => {
            format!("the HIP runtime (libamdhip64) crashed ({status}): {remedy}")
        }
        End::Exited(status) => format!("the HIP runtime (libamdhip64) crashed ({status}: {said}): {remedy}"),
        End::Done => "the HIP runtime (libamdhip64) gave no answer".to_string(),
    }
}

/// Lists the cards if this process was started for that; its exit code.
pub(in crate::gpu) fn serve_as_lister() -> Option<ExitCode> {
    child::is_started_with(ARGUMENT).then(|| if serve().is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The child's side.
fn serve() -> std::io::Result<()> {
    /// BOUND: the parent's patience with many cards, each of which compiles a program.
    const SECONDS_MAX: u32 = 3600;
    process::watch(SECONDS_MAX);
    settings::set_child();
    let mut out = std::io::stdout().lock();
    let mut write = |record: &Record| {
        out.write_all(&record.bytes())?;
        out.flush()
    };
    match list_here() {
        Err(why) => write(&Record::Refused(why))?,
        Ok(listings) => {
            for listing in &listings {
                write(&Record::Card(listing.clone()))?;
            }
            for (index, _) in listings.iter().enumerate().filter(|(_, listing)| listing.objection.is_none()) {
                write(&Record::Tested(index, test(index).err()))?;
            }
        }
    }
    write(&Record::End)
}

/// Opens a card, which proves its arithmetic, and makes the calls that this leaves out.
fn test(index: usize) -> Result<(), String> {
    let gpu = Gpu::open(Selector { api: Api::Hip, index }).map_err(|failure| failure.what)?;
    let test = || {
        let (mut card, mut host) = (gpu.zeros::<u32>(TEST_LENGTH), gpu.host_zeros::<u32>(TEST_LENGTH));
        gpu.save(&mut host, &card)?;
        gpu.load(&mut card, &host);
        gpu.finish_saves()?;
        gpu.download(&card)
    };
    let numbers = test().map_err(|failure| failure.what)?;
    if numbers.iter().any(|number| *number != 0) {
        return Err("zeros do not come back from the card as zeros".to_string());
    }
    Ok(())
}

/// What the child writes.
#[derive(Clone, Debug, PartialEq)]
enum Record {
    Refused(String),
    Card(Listing),
    /// A number, and why it cannot be used.
    Tested(usize, Option<String>),
    End,
}

impl Record {
    fn bytes(&self) -> Vec<u8> {
        let texts = match self {
            Self::Refused(why) => vec!["refused".to_string(), why.clone()],
            Self::Card(Listing { selector, name, runtime, memory, memory_free, units, architecture: _, objection }) => {
                let [selector, name, runtime] = [selector, name, runtime].map(String::clone);
                let [memory, units] = [memory.to_string(), units.to_string()];
                let free = memory_free.map_or(String::new(), |bytes| bytes.to_string());
                let mut texts = vec!["card".to_string(), selector, name, runtime, memory, free, units];
                texts.extend(objection.clone());
                texts
            }
            Self::Tested(index, objection) => {
                ["tested".to_string(), index.to_string()].into_iter().chain(objection.clone()).collect()
            }
            Self::End => vec!["end".to_string()],
        };
        let body = child::joined(texts.iter().map(String::as_str));
        [MARK, &(body.len() as u64).to_le_bytes(), &body].concat()
    }

    /// The record after a mark, if it is whole and says something, and what follows it.
    fn split(marked: &[u8]) -> Option<(Option<Self>, &[u8])> {
        let (length, rest) = marked.get(MARK.len()..)?.split_first_chunk::<8>()?;
        let (body, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        Some((Self::parse(body), rest))
    }

    fn parse(body: &[u8]) -> Option<Self> {
        let texts = child::texts(body)?;
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let objection = |rest: &[&str]| rest.first().map(ToString::to_string);
        Some(match texts[..] {
            ["refused", why] => Self::Refused(why.to_string()),
            ["card", selector, name, runtime, memory, free, units, ref rest @ ..] => Self::Card(Listing {
                selector: selector.to_string(),
                name: name.to_string(),
                runtime: runtime.to_string(),
                memory: memory.parse().ok()?,
                memory_free: free.parse().ok(),
                units: units.parse().ok()?,
                architecture: None,
                objection: objection(rest),
            }),
            ["tested", index, ref rest @ ..] => Self::Tested(index.parse().ok()?, objection(rest)),
            ["end"] => Self::End,
            _ => return None,
        })
    }
}

/// The whole records in what a child wrote.
fn records(mut output: &[u8]) -> Vec<Record> {
    let mut records = Vec::new();
    while let Some(at) = output.windows(MARK.len()).position(|window| window == MARK) {
        let Some((record, rest)) = Record::split(&output[at..]) else { break };
        records.extend(record);
        output = rest;
    }
    records
}

/// What the child has written since it was last asked.
fn heard(search: &mut Search, output: &[u8]) -> Heard {
    let mut heard = Heard::Nothing;
    while let Some(at) = search.next(output, MARK) {
        let Some((record, rest)) = Record::split(&output[at..]) else { break };
        if record == Some(Record::End) {
            return Heard::Everything;
        }
        search.move_on(output.len() - at - rest.len());
        heard = Heard::More;
    }
    heard
}

#[cfg(test)]
mod tests {
    use super::Heard::{Everything, More, Nothing};
    use super::*;

    fn card(index: usize, objection: Option<&str>) -> Listing {
        Listing {
            selector: format!("hip:{index}"),
            name: "MI50".to_string(),
            runtime: "HIP 6".to_string(),
            memory: 16 << 30,
            memory_free: (index == 0).then_some(15 << 30),
            units: 60,
            architecture: None,
            objection: objection.map(str::to_string),
        }
    }

    #[test]
    fn records_are_read_behind_what_a_library_prints() {
        let all = [
            Record::Card(card(0, None)),
            Record::Card(card(1, Some("gfx803 is not supported"))),
            Record::Tested(0, Some("no".to_string())),
            Record::Tested(2, None),
            Record::Refused("why".to_string()),
            Record::End,
        ];
        let bytes: Vec<u8> = all.iter().flat_map(|record| [b"a line\n".to_vec(), record.bytes()].concat()).collect();
        assert_eq!(records(&bytes), all);
        assert_eq!(records(&bytes[..bytes.len() - 1]), all[..5], "the last is not whole");
        assert_eq!(records(&[MARK, &[0xff; 8], b"card"].concat()), [], "more than there is");
        let (mut search, end) = (Search::default(), bytes.len() - all[5].bytes().len());
        let after = [6, end - 8, end - 7, end, end + 9, bytes.len()].map(|length| heard(&mut search, &bytes[..length]));
        assert_eq!(after, [Nothing, More, More, Nothing, Nothing, Everything]);
    }

    #[test]
    fn a_crash_leaves_what_was_tested_before() {
        let mut told = vec![Record::Card(card(0, None)), Record::Card(card(1, None)), Record::Tested(0, None)];
        let found = Found::of(&told, &End::Silent(20), "");
        let listings = found.listings.expect("cards");
        assert_eq!(listings[0].objection, None);
        assert!(listings[1].objection.as_ref().is_some_and(|why| why.contains("hung: no answer for 20 seconds")));
        assert!(found.died.is_some_and(|why| why.contains("ISOBIT_HIP=off") && why.contains("ISOBIT_HIP_TIMEOUT=60")));
        told.extend([Record::Tested(1, Some("a wrong quotient".to_string())), Record::End]);
        let found = Found::of(&told, &End::Done, "");
        assert_eq!(found.died, None);
        assert_eq!(found.listings.expect("cards")[1].objection.as_deref(), Some("a wrong quotient"));
        let nothing = Found::of(&[], &End::Silent(20), "");
        assert_eq!(nothing.listings.err(), nothing.died);
    }
}

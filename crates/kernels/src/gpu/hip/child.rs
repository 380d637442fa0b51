//! Compiling in a child process: hipRTC aborts its process on an architecture that it does not
//! know. The child is this program again, with an argument that only `gpu::start` understands.
//! Source and options go in through a pipe, and code or an error comes out of another.

use super::compiler::Compiler;
use super::process::{self, End, Heard, Search};
use super::settings::{self, Settings};
use std::ffi::OsString;
use std::io::{Read, Write};
use std::process::ExitCode;

/// The argument that makes a program a compiler.
const ARGUMENT: &str = "--compile-hip-program";
/// What the child writes begins with this: a library may have written before.
const MARK: &[u8] = b"\0isobit code object\0";
const INPUT_BYTES_MAX: u64 = 64 << 20;
/// BOUND: a program takes about a second.
const COMPILE_SECONDS_MAX: u32 = 180;

/// Compiles a program if this process was started for that; its exit code.
pub(in crate::gpu) fn serve_as_compiler() -> Option<ExitCode> {
    is_started_with(ARGUMENT).then(|| if serve().is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Whether this process was started with one argument alone.
pub(in crate::gpu) fn is_started_with(argument: &str) -> bool {
    let mut arguments = std::env::args_os().skip(1);
    arguments.next().is_some_and(|first| first == argument) && arguments.next().is_none()
}

/// From now on programs are compiled, and cards are listed, in child processes. `variable` gives
/// the value of an environment variable.
pub(in crate::gpu) fn configure(variable: impl Fn(&str) -> Option<OsString>) {
    settings::set(Settings { children: true, ..Settings::from_environment(variable) });
}

/// The child's side.
fn serve() -> std::io::Result<()> {
    process::watch(COMPILE_SECONDS_MAX);
    let mut input = Vec::new();
    std::io::stdin().lock().take(INPUT_BYTES_MAX).read_to_end(&mut input)?;
    let answer = match texts(&input).as_deref() {
        Some([line @ .., source]) => Compiler::open().and_then(|compiler| compiler.code(line, source)),
        _ => Err("the request is not whole".to_string()),
    };
    let (kind, bytes) = match &answer {
        Ok(code) => (0u8, code.as_slice()),
        Err(error) => (1u8, error.as_bytes()),
    };
    let mut out = std::io::stdout().lock();
    for part in [MARK, &[kind], &(bytes.len() as u64).to_le_bytes(), bytes] {
        out.write_all(part)?;
    }
    out.flush()
}

/// The parent's side.
pub(super) fn compile(line: &[String], source: &str) -> Result<Vec<u8>, String> {
    let request = joined(line.iter().map(String::as_str).chain([source]));
    let mut search = Search::default();
    let heard = |output: &[u8]| {
        let found = search.next(output, MARK).and_then(|at| answer(&output[at..]));
        if found.is_some() { Heard::Everything } else { Heard::Nothing }
    };
    let ended = process::run(ARGUMENT, &request, COMPILE_SECONDS_MAX, heard)?;
    answer(&ended.output).unwrap_or_else(|| {
        let said = ended.said();
        Err(match ended.end {
            End::Silent(seconds) => format!("the compiler hung: it did not finish within {seconds} seconds"),
            End::Stopped => "stopped while a program was being compiled".to_string(),
            End::Exited(status) => format!("the compiler died, {status}: {said}"),
            End::Done => format!("the compiler gave no answer: {said}"),
        })
    })
}

/// Texts with their lengths in front.
pub(super) fn joined<'a>(texts: impl Iterator<Item = &'a str>) -> Vec<u8> {
    texts.flat_map(|text| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()).collect()
}

/// The texts that were joined; None if they are not whole.
pub(super) fn texts(mut bytes: &[u8]) -> Option<Vec<String>> {
    let mut texts = Vec::new();
    while !bytes.is_empty() {
        let (length, rest) = bytes.split_first_chunk::<8>()?;
        let (text, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        texts.push(String::from_utf8(text.to_vec()).ok()?);
        bytes = rest;
    }
    Some(texts)
}

/// What the child answered; None if it did not finish.
fn answer(output: &[u8]) -> Option<Result<Vec<u8>, String>> {
    let at = output.windows(MARK.len()).position(|window| window == MARK)?;
    let (kind, rest) = output[at + MARK.len()..].split_first()?;
    let (length, rest) = rest.split_first_chunk::<8>()?;
    let bytes = rest.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    Some(if *kind == 0 { Ok(bytes.to_vec()) } else { Err(String::from_utf8_lossy(bytes).into_owned()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_found_behind_what_a_library_printed() {
        let mut output = b"warning: something\n".to_vec();
        assert_eq!(answer(&output), None);
        output.extend([MARK, &[0], &3u64.to_le_bytes()].concat());
        assert_eq!(answer(&output), None, "not whole");
        output.extend(b"abc and more");
        assert_eq!(answer(&output), Some(Ok(b"abc".to_vec())));
        let refused = [MARK, &[1], &2u64.to_le_bytes(), b"no"].concat();
        assert_eq!(answer(&refused), Some(Err("no".to_string())));
    }

    #[test]
    fn requests_are_whole_or_nothing() {
        let whole = [&2u64.to_le_bytes()[..], b"-O", &0u64.to_le_bytes()].concat();
        assert_eq!(texts(&whole), Some(vec!["-O".to_string(), String::new()]));
        assert_eq!(texts(&whole[..whole.len() - 1]), None);
        assert_eq!(texts(&u64::MAX.to_le_bytes()), None);
    }
}

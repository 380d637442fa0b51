//! TensorBoard event files: scalars in its record format, written on request and never read back by
//! us.
//!
//! A record is a length, its checksum, the bytes and their checksum; the bytes are a protobuf
//! `Event`, of which we need five fields. Wall-clock times come from the caller: nothing here reads
//! a clock.

use isobit_proof::FileError;
use isobit_proof::disk::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Names to try before giving up: several runs may start in the same second.
const ATTEMPTS: usize = 1000;

#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    writer: BufWriter<File>,
}

impl EventFile {
    /// Creates a new file in a folder, and the folder if necessary. A run resumed after `completed`
    /// updates makes TensorBoard discard later steps of older files.
    pub fn create(folder: &Path, completed: u64, wall_seconds: f64) -> Result<Self, FileError> {
        let failed = |error| FileError::from_io("write", folder, error);
        disk::create_folders(folder).map_err(failed)?;
        let (path, file) = create_new(folder, wall_seconds).map_err(failed)?;
        let mut events = Self { path, writer: BufWriter::new(file) };
        let mut version = event(wall_seconds, 0);
        put_bytes(&mut version, field::EVENT_FILE_VERSION, b"brain.Event:2");
        events.put_record(&version)?;
        if completed > 0 {
            let mut start = event(wall_seconds, completed + 1);
            put_bytes(&mut start, field::EVENT_SESSION_LOG, &[field::SESSION_STATUS << 3, 1]);
            events.put_record(&start)?;
        }
        events.flush()?;
        Ok(events)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes several scalars of one step.
    pub fn scalars(&mut self, step: u64, wall_seconds: f64, values: &[(&str, f32)]) -> Result<(), FileError> {
        let mut summary = Vec::new();
        for (tag, value) in values {
            let mut scalar = Vec::new();
            put_bytes(&mut scalar, field::VALUE_TAG, tag.as_bytes());
            scalar.push(field::VALUE_SIMPLE << 3 | wire::FIXED32);
            scalar.extend(value.to_le_bytes());
            put_bytes(&mut summary, field::SUMMARY_VALUE, &scalar);
        }
        let mut bytes = event(wall_seconds, step);
        put_bytes(&mut bytes, field::EVENT_SUMMARY, &summary);
        self.put_record(&bytes)
    }

    pub fn flush(&mut self) -> Result<(), FileError> {
        self.writer.flush().map_err(|error| FileError::from_io("write", &self.path, error))
    }

    fn put_record(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        let length = (bytes.len() as u64).to_le_bytes();
        let parts = [&length[..], &masked(&length).to_le_bytes(), bytes, &masked(bytes).to_le_bytes()];
        self.writer.write_all(&parts.concat()).map_err(|error| FileError::from_io("write", &self.path, error))
    }
}

fn create_new(folder: &Path, wall_seconds: f64) -> std::io::Result<(PathBuf, File)> {
    let mut last = std::io::ErrorKind::AlreadyExists.into();
    for number in 0..ATTEMPTS {
        // Float to integer saturates: a wrong clock only gives an odd file name.
        let path = folder.join(format!("events.out.tfevents.{:010}.isobit.{number}", wall_seconds as u64));
        match File::create_new(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

/// Field numbers of `Event`, `Summary`, `Summary.Value` and `SessionLog`.
mod field {
    pub(super) const EVENT_WALL_TIME: u8 = 1;
    pub(super) const EVENT_STEP: u8 = 2;
    pub(super) const EVENT_FILE_VERSION: u8 = 3;
    pub(super) const EVENT_SUMMARY: u8 = 5;
    pub(super) const EVENT_SESSION_LOG: u8 = 7;
    pub(super) const SUMMARY_VALUE: u8 = 1;
    pub(super) const VALUE_TAG: u8 = 1;
    pub(super) const VALUE_SIMPLE: u8 = 2;
    pub(super) const SESSION_STATUS: u8 = 1;
}

/// Wire types. Zero is a variable-length integer.
mod wire {
    pub(super) const FIXED64: u8 = 1;
    pub(super) const BYTES: u8 = 2;
    pub(super) const FIXED32: u8 = 5;
}

fn event(wall_seconds: f64, step: u64) -> Vec<u8> {
    let mut bytes = vec![field::EVENT_WALL_TIME << 3 | wire::FIXED64];
    bytes.extend(wall_seconds.to_le_bytes());
    bytes.push(field::EVENT_STEP << 3);
    put_number(&mut bytes, step);
    bytes
}

fn put_bytes(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    out.push(field << 3 | wire::BYTES);
    put_number(out, bytes.len() as u64);
    out.extend(bytes);
}

/// Seven bits per byte, lowest first; the top bit marks that more follow.
fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// CRC-32C as the record format stores it: rotated and shifted, so that checksums of checksums do
/// not cancel.
fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| TABLE[usize::from(crc as u8 ^ byte)] ^ (crc >> 8))
}

/// CRC table of the Castagnoli polynomial, bits reversed.
const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut rest = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            rest = if rest & 1 == 1 { rest >> 1 ^ 0x82f6_3b78 } else { rest >> 1 };
            bit += 1;
        }
        table[byte] = rest;
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_definition() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b""), 0);
    }

    /// Fields of a message: number, and the bytes it holds (or the number, little-endian).
    fn fields(mut bytes: &[u8]) -> Vec<(u8, Vec<u8>)> {
        fn number(bytes: &mut &[u8]) -> u64 {
            let mut value = 0;
            for shift in (0..64).step_by(7) {
                let (&byte, rest) = bytes.split_first().expect("a byte");
                *bytes = rest;
                value |= u64::from(byte & 0x7f) << shift;
                if byte < 0x80 {
                    break;
                }
            }
            value
        }
        fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
            let (head, rest) = bytes.split_at(count);
            *bytes = rest;
            head
        }
        let mut fields = Vec::new();
        while let Some((&key, rest)) = bytes.split_first() {
            bytes = rest;
            let content = match key & 7 {
                0 => number(&mut bytes).to_le_bytes().to_vec(),
                1 => take(&mut bytes, 8).to_vec(),
                2 => {
                    let count = number(&mut bytes) as usize;
                    take(&mut bytes, count).to_vec()
                }
                5 => take(&mut bytes, 4).to_vec(),
                other => panic!("wire type {other}"),
            };
            fields.push((key >> 3, content));
        }
        fields
    }

    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut records = Vec::new();
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight")) as usize;
            assert_eq!(bytes[8..12], masked(&bytes[..8]).to_le_bytes());
            let record = &bytes[12..12 + length];
            assert_eq!(bytes[12 + length..16 + length], masked(record).to_le_bytes());
            records.push(record.to_vec());
            bytes = &bytes[16 + length..];
        }
        records
    }

    #[test]
    fn a_parser_of_the_format_reads_what_was_written() {
        let folder = tempfile::tempdir().expect("folder");
        let mut events = EventFile::create(&folder.path().join("tensorboard"), 0, 1.5e9).expect("created");
        events.scalars(300, 1.5e9, &[("train/loss", 1.25), ("train/learning_rate", 2e-4)]).expect("written");
        events.flush().expect("flushed");
        let records = records(&std::fs::read(events.path()).expect("read"));
        assert_eq!(records.len(), 2);
        let wall = 1.5e9_f64.to_le_bytes().to_vec();
        let step = |step: u64| step.to_le_bytes().to_vec();
        assert_eq!(fields(&records[0]), [(1, wall.clone()), (2, step(0)), (3, b"brain.Event:2".to_vec())]);
        let scalars = fields(&records[1]);
        assert_eq!(scalars[..2], [(1, wall), (2, step(300))]);
        let values: Vec<_> = fields(&scalars[2].1).iter().map(|(number, value)| (*number, fields(value))).collect();
        assert_eq!(
            values,
            [
                (1, vec![(1, b"train/loss".to_vec()), (2, 1.25_f32.to_le_bytes().to_vec())]),
                (1, vec![(1, b"train/learning_rate".to_vec()), (2, 2e-4_f32.to_le_bytes().to_vec())]),
            ]
        );
    }

    #[test]
    fn files_of_one_second_stay_apart_and_a_resumed_one_says_so() {
        let folder = tempfile::tempdir().expect("folder");
        let first = EventFile::create(folder.path(), 0, 7.0).expect("created");
        let second = EventFile::create(folder.path(), 20, 7.0).expect("created");
        assert_ne!(first.path(), second.path());
        let records = records(&std::fs::read(second.path()).expect("read"));
        assert_eq!(fields(&records[1])[1..], [(2, 21_u64.to_le_bytes().to_vec()), (7, vec![8, 1])]);
    }
}

//! Number formats of GGUF files, and a writer that turns float32 into them as it comes.

use super::super::{check_signal, finite};
use crate::checkpoint;
use crate::prepare::RunError;
use isobit_numerics::cast::{f32_to_bf16, f32_to_f16};
use isobit_numerics::gguf_blocks::{BLOCK, Q4_0_BYTES, Q8_0_BYTES, q4_0, q8_0, scale_bits};
use isobit_proof::atomic::AtomicFile;

/// A scale, and 32 codes of four bits.
const MXFP4_BYTES: usize = 17;

/// A number format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgmlType {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q4_0,
    /// Only for what the model's files store so.
    Mxfp4,
}

impl GgmlType {
    /// Those that a file can be asked for.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Bf16, Self::Q8_0, Self::Q4_0];

    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Mxfp4 => "mxfp4",
        }
    }

    /// Its number in the table of tensors.
    pub(super) fn code(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q8_0 => 8,
            Self::Bf16 => 30,
            Self::Mxfp4 => 39,
        }
    }

    /// Its number as `general.file_type`.
    pub(super) fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q8_0 => 7,
            Self::Bf16 => 32,
            Self::Mxfp4 => 38,
        }
    }

    pub(super) fn is_blocks(self) -> bool {
        matches!(self, Self::Q8_0 | Self::Q4_0 | Self::Mxfp4)
    }

    /// Bytes of a tensor.
    pub(super) fn bytes(self, shape: &[usize]) -> u64 {
        let length: usize = shape.iter().product();
        let (values, bytes) = match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q8_0 => (BLOCK, Q8_0_BYTES),
            Self::Q4_0 => (BLOCK, Q4_0_BYTES),
            Self::Mxfp4 => (BLOCK, MXFP4_BYTES),
        };
        (length / values * bytes) as u64
    }
}

/// Receives the values of one tensor.
pub(super) struct Numbers<'f> {
    pub(super) file: &'f mut AtomicFile,
    pub(super) kind: GgmlType,
    pub(super) name: &'f str,
    pub(super) written: u64,
}

impl Numbers<'_> {
    /// The next values; whole blocks if the format has those.
    pub(super) fn put(&mut self, values: &[f32]) -> Result<(), RunError> {
        finite(self.name, values)?;
        let mut bytes = Vec::with_capacity(4 * values.len());
        match self.kind {
            GgmlType::F32 => values.iter().for_each(|value| bytes.extend(value.to_le_bytes())),
            GgmlType::F16 => self.halves(values, f32_to_f16, &mut bytes)?,
            GgmlType::Bf16 => self.halves(values, f32_to_bf16, &mut bytes)?,
            GgmlType::Q8_0 => self.blocks(values, q8_0, &mut bytes)?,
            GgmlType::Q4_0 => self.blocks(values, q4_0, &mut bytes)?,
            GgmlType::Mxfp4 => unreachable!("only codes of the model's files are written so"),
        }
        self.bytes(&bytes)
    }

    /// The same as bytes of the file.
    pub(super) fn bytes(&mut self, bytes: &[u8]) -> Result<(), RunError> {
        check_signal()?;
        self.written += bytes.len() as u64;
        Ok(self.file.write(bytes)?)
    }

    fn halves(&self, values: &[f32], narrow: fn(f32) -> u16, bytes: &mut Vec<u8>) -> Result<(), RunError> {
        let infinity = narrow(f32::INFINITY);
        for value in values {
            let bits = narrow(*value);
            if bits & 0x7fff == infinity {
                return Err(self.beyond(*value));
            }
            bytes.extend(bits.to_le_bytes());
        }
        Ok(())
    }

    fn blocks<const N: usize>(
        &self,
        values: &[f32],
        quantise: fn(&[f32; BLOCK]) -> [u8; N],
        bytes: &mut Vec<u8>,
    ) -> Result<(), RunError> {
        let (blocks, rest) = values.as_chunks::<BLOCK>();
        assert!(rest.is_empty(), "rows of {} are whole blocks", self.name);
        for block in blocks {
            let packed = quantise(block);
            if scale_bits(&packed) & 0x7c00 == 0x7c00 {
                return Err(
                    self.beyond(block.iter().copied().max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap_or(0.0))
                );
            }
            bytes.extend(packed);
        }
        Ok(())
    }

    fn beyond(&self, value: f32) -> RunError {
        let (tensor, format) = (self.name.to_string(), self.kind.name());
        checkpoint::Error::Beyond { tensor, value, format }.into()
    }
}

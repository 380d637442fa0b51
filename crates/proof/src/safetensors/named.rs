//! A named float32 tensor: the one form in which trained tensors and their moments move between a
//! model and the files of a run.

use super::{Declared, Dtype, Sink, Tensor, write_streamed};
use crate::error::FileError;
use std::collections::BTreeMap;
use std::path::Path;

/// Values converted to bytes at a time.
const VALUES_AT_ONCE: usize = 1 << 16;

#[derive(Clone, Debug, PartialEq)]
pub struct NamedTensor {
    pub name: String,
    pub shape: Vec<usize>,
    /// Row-major; their number matches the shape.
    pub values: Vec<f32>,
}

impl NamedTensor {
    /// Reads a tensor of a file under a new name and releases its pages.
    pub fn read(tensor: &Tensor<'_>, name: &str) -> Result<Self, FileError> {
        let values = tensor.to_f32()?;
        tensor.release();
        Ok(Self { name: name.to_string(), shape: tensor.shape.to_vec(), values })
    }

    /// Writes tensors to a file, atomically.
    pub fn write<'a>(path: &Path, tensors: impl IntoIterator<Item = (String, &'a Self)>) -> Result<(), FileError> {
        let tensors: Vec<(String, &Self)> = tensors.into_iter().collect();
        let declared: Vec<Declared<'_>> =
            tensors.iter().map(|(name, tensor)| Declared { name, dtype: Dtype::F32, shape: &tensor.shape }).collect();
        write_streamed(path, &BTreeMap::new(), &declared, |index, sink| sink.write_f32(&tensors[index].1.values))
    }
}

impl Sink<'_> {
    /// Writes float32 values a few at a time: a tensor is never copied whole.
    pub fn write_f32(&mut self, values: &[f32]) -> Result<(), FileError> {
        values.chunks(VALUES_AT_ONCE).try_for_each(|values| {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.write(&bytes)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::safetensors::SafeTensors;

    #[test]
    fn what_is_written_is_read_bit_for_bit() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("t.safetensors");
        let values: Vec<f32> = (0..3 * VALUES_AT_ONCE as u32 / 2).map(|at| f32::from_bits(at * 0x0001_0003)).collect();
        let tensor = NamedTensor { name: "a".to_string(), shape: vec![values.len() / 2, 2], values };
        NamedTensor::write(&path, [("x.a".to_string(), &tensor)]).expect("written");
        let file = SafeTensors::open(&path).expect("a file");
        let read = NamedTensor::read(&file.get("x.a").expect("there"), "a").expect("numbers");
        let bits = |tensor: &NamedTensor| tensor.values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!((&read.name, &read.shape, bits(&read)), (&tensor.name, &tensor.shape, bits(&tensor)));
    }
}

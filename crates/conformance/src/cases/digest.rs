//! Digest: lengths around the block of 4,096 bytes, several element types, including NaN payloads.

use crate::data::Random;
use crate::{Case, Output, Visitor, digest};
use half::bf16;
use isobit_kernels::Backend;
use isobit_kernels::op::AnyBuffer;

#[derive(Debug)]
struct DigestCase {
    length: usize,
}

impl Case for DigestCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let mut random = Random::new(self.length as u64);
        let words: Vec<u32> = (0..self.length).map(|_| random.word() as u32).collect();
        let floats: Vec<f32> = words.iter().map(|&word| f32::from_bits(word)).collect();
        let narrow: Vec<bf16> = words.iter().map(|&word| bf16::from_bits(word as u16)).collect();
        let bytes: Vec<u8> = words.iter().map(|&word| word as u8).collect();
        let digests = [
            ("u32", digest(b, AnyBuffer::U32(&b.upload(&words)))),
            ("f32", digest(b, AnyBuffer::F32(&b.upload(&floats)))),
            ("bf16", digest(b, AnyBuffer::Bf16(&b.upload(&narrow)))),
            ("u8", digest(b, AnyBuffer::U8(&b.upload(&bytes)))),
        ];
        digests.map(|(name, digest)| Output { name, element: "u64", bits: digest.0.to_vec() }).into()
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for length in [0, 1, 3, 1023, 1024, 1025, 2048, 4095, 4096, 4097, 12289, 50021] {
        visitor.case(&DigestCase { length });
    }
}

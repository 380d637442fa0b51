//! Digests: lengths around the block of 4,096 bytes, several element types, including NaN payloads;
//! four tensors in one op.

use crate::data::Random;
use crate::{Case, Output, Visitor, digests};
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
        let (words, floats) = (b.upload(&words), b.upload(&floats));
        let (narrow, bytes) = (b.upload(&narrow), b.upload(&bytes));
        let tensors =
            [AnyBuffer::U32(&words), AnyBuffer::F32(&floats), AnyBuffer::Bf16(&narrow), AnyBuffer::U8(&bytes)];
        let outputs = ["u32", "f32", "bf16", "u8"].into_iter().zip(digests(b, &tensors));
        outputs.map(|(name, digest)| Output { name, element: "u64", bits: digest.0.to_vec() }).collect()
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for length in [0, 1, 3, 1023, 1024, 1025, 2048, 4095, 4096, 4097, 12289, 50021] {
        visitor.case(&DigestCase { length });
    }
}

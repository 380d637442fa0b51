//! Digest: lengths around the block of 4,096 bytes, several element types, NaN payloads included.

use crate::data::Random;
use crate::{Case, Output, Visitor};
use half::bf16;
use isobit_kernels::Backend;

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
            ("u32", b.digest(&b.upload(&words))),
            ("f32", b.begin_digest(&b.upload(&floats)).and_then(|begun| b.finish_digest(&begun))),
            ("bf16", b.digest(&b.upload(&narrow))),
            ("u8", b.digest(&b.upload(&bytes))),
        ];
        digests
            .map(|(name, digest)| {
                let digest = digest.unwrap_or_else(|failure| panic!("{failure}"));
                Output { name, element: "u64", bits: digest.0.to_vec() }
            })
            .into()
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for length in [0, 1, 3, 1023, 1024, 1025, 2048, 4095, 4096, 4097, 12289, 50021] {
        visitor.case(&DigestCase { length });
    }
}

//! The packing of AWQ's files (`version` gemm): the integers of GPTQ, eight outputs of one input in
//! a word, in an order that suits a GPU's instructions. They are packed along inputs when they are
//! read, exactly, so that the same products take both.

use isobit_kernels::op::product4::CHANNELS_PER_WORD;

/// Four bits `j` of a word hold output `ORDER[j]` of its eight.
const ORDER: [usize; CHANNELS_PER_WORD] = [0, 2, 4, 6, 1, 3, 5, 7];
/// The inverse: which four bits hold each output.
pub(crate) const PLACES: [usize; CHANNELS_PER_WORD] = {
    let mut places = [0; CHANNELS_PER_WORD];
    let mut place = 0;
    while place < CHANNELS_PER_WORD {
        places[ORDER[place]] = place;
        place += 1;
    }
    places
};

/// Words `[inputs, outputs / 8]` of AWQ as words `[inputs / 8, outputs]` of GPTQ.
pub(crate) fn along_inputs(words: &[i32], outputs: usize) -> Vec<i32> {
    let across = outputs / CHANNELS_PER_WORD;
    let mut packed = vec![0; words.len()];
    for (input, row) in words.chunks(across.max(1)).enumerate() {
        let line = &mut packed[input / CHANNELS_PER_WORD * outputs..][..outputs];
        for (word, line) in row.iter().zip(line.as_chunks_mut::<CHANNELS_PER_WORD>().0) {
            for (place, packed) in PLACES.into_iter().zip(line) {
                *packed |= (word >> (4 * place) & 15) << (4 * (input % CHANNELS_PER_WORD));
            }
        }
    }
    packed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_becomes_a_column_of_words() {
        assert_eq!(PLACES, [0, 4, 1, 5, 2, 6, 3, 7]);
        // Input 0 has the integers 0 to 7, input 3 those from 15 down, the others 0.
        let mut words = [0_i32; 8];
        words[0] = 0x7531_6420;
        words[3] = 0x8ace_9bdf_u32.cast_signed();
        let packed: Vec<u32> = along_inputs(&words, 8).into_iter().map(i32::cast_unsigned).collect();
        let wanted: Vec<u32> = (0..8).map(|output| output | (15 - output) << 12).collect();
        assert_eq!(packed, wanted);
        assert!(along_inputs(&[], 0).is_empty());
    }
}

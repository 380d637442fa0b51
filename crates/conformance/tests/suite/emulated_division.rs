//! Division, square root and integer division of `gpu/exact.h` as machine code of gfx906 and
//! gfx908, over millions of operands, with reciprocals and roots moved by a ULP: the host's own
//! results.

use isobit_conformance::skip;
use isobit_gcn::{Architecture, Card, Settings, compiler};
use isobit_kernels::gpu::runtime::{Argument, Handle, Language, Lifetime, Runtime};

const SOURCE: [&str; 4] = [
    include_str!("../../../kernels/gpu/cuda.h"),
    include_str!("../../../kernels/gpu/exact.h"),
    "#define GROUP 256\n",
    "KERNEL(GROUP) divide(GLOBAL uint *out, GLOBAL const uint *in) {
        ulong i = (ulong)group_index() * GROUP + local_index();
        uint a = in[2 * i];
        uint b = in[2 * i + 1];
        out[3 * i] = as_u32(div_rn(as_f32(a), as_f32(b)));
        out[3 * i + 1] = as_u32(sqrt_rn(as_f32(a)));
        out[3 * i + 2] = div_u32(a, b | 1u);
    }",
];

/// Pairs of operands for each card and seed, a multiple of the group's size.
const PAIRS: usize = 1 << 19;

/// Random bits, an edge value in every eighth place, and operands near the ends of a binade.
fn operand(index: u64) -> u32 {
    const EDGES: [u32; 16] = [
        0,
        1,
        2,
        3,
        0x007f_ffff,
        0x0080_0000,
        0x0080_0001,
        0x3f80_0000,
        0x3f80_0001,
        0x3fff_ffff,
        0x3fff_fffd,
        0x3fd5_5553,
        0x7f00_0000,
        0x7f7f_ffff,
        0x7f80_0000,
        0x7fc0_0000,
    ];
    let mut x = index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^= x >> 31;
    let bits = x as u32;
    match x >> 61 {
        0 => EDGES[(x >> 40) as usize % EDGES.len()] | bits & 0x8000_0000,
        1 => bits & 0xff80_0000 | 0x007f_fff0 | bits & 15,
        2 => bits & 0xff80_000f,
        _ => bits,
    }
}

fn memory(card: &Card, words: &[u32]) -> Handle {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let handle = card.allocate(bytes.len(), Lifetime::Other).expect("memory");
    card.write(handle, &bytes).expect("a write");
    handle
}

fn results(settings: Settings, operands: &[u32]) -> Vec<u32> {
    let card = Card::new(settings);
    let (input, output) = (memory(&card, operands), card.allocate(PAIRS * 12, Lifetime::Other).expect("memory"));
    let program = card.compile(&SOURCE.concat(), Language::Portable, &[]).expect("it compiles");
    let kernel = card.kernel(program, "divide").expect("a kernel");
    let arguments = [Argument::Memory(output, 0), Argument::Memory(input, 0)];
    card.launch(kernel, PAIRS / 256, 256, 0, &arguments).expect("it runs");
    let mut bytes = vec![0; PAIRS * 12];
    card.read(&mut bytes, output).expect("a read");
    bytes.chunks_exact(4).map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect()
}

#[test]
fn estimates_of_the_card_do_not_move_the_bits() {
    if compiler().is_none() {
        let why = ("clang".to_string(), "no clang that compiles for amdgcn".to_string());
        return skip("emulated_division", &[why]);
    }
    let operands: Vec<u32> = (0..2 * PAIRS as u64).map(operand).collect();
    let same = |got: u32, want: f32| got == want.to_bits() || (want.is_nan() && f32::from_bits(got).is_nan());
    for (architecture, seed) in [(Architecture::Gfx906, 0), (Architecture::Gfx906, 1), (Architecture::Gfx908, 2)] {
        let results = results(Settings { seed, ..Settings::new(architecture) }, &operands);
        for (pair, got) in operands.chunks_exact(2).zip(results.chunks_exact(3)) {
            let (a, b) = (f32::from_bits(pair[0]), f32::from_bits(pair[1]));
            assert!(same(got[0], a / b), "{:08x} / {:08x}: {:08x}, seed {seed}", pair[0], pair[1], got[0]);
            assert!(same(got[1], a.sqrt()), "root of {:08x}: {:08x}, seed {seed}", pair[0], got[1]);
            let divisor = pair[1] | 1;
            assert_eq!(got[2], pair[0] / divisor, "{} / {divisor}, seed {seed}", pair[0]);
        }
    }
}

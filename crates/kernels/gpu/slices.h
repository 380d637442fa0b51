// Scales and slices (docs/numerics.md, "Slices"). SLICES is 2 (profile x2) or 3 (profile x3): a
// parameter of the program, so one source gives two programs.

#define CHUNK 512
// Rows of a plane are padded with zeros to a multiple of this many bytes.
#define PADDING 128
// Rows and columns of the outputs that one group computes.
#define PRODUCT_TILE 64

// Packed words of a row of a plane.
FUNCTION uint row_words(uint width) {
    return (width + (PADDING - 1u)) / PADDING * (PADDING / 4u);
}

// At most PRODUCT_TILE rows of the left operand that meet one weight.
typedef struct {
    uint first;
    uint end;
    uint weight;
} RowTile;

// Tile number `tile`: from the table (first, end, weight), or of the rows first..end alone where
// there is one weight.
FUNCTION RowTile row_tile(GLOBAL const uint *table, uint tabled, uint first, uint end, uint tile) {
    RowTile rows;
    if (tabled) {
        rows.first = table[(ulong)tile * 3u];
        rows.end = table[(ulong)tile * 3u + 1u];
        rows.weight = table[(ulong)tile * 3u + 2u];
    } else {
        rows.first = first + tile * PRODUCT_TILE;
        rows.end = end - rows.first < PRODUCT_TILE ? end : rows.first + PRODUCT_TILE;
        rows.weight = 0u;
    }
    return rows;
}

// SIGMA_FACTOR times the scale of a 4-bit weight is its sigma.
#if SLICES == 2
#define SLICE_LIMIT 32512.0f
#define SCALE_DIVISOR 2032.0f
#define SIGMA_FACTOR 0.0625f
#else
#define SLICE_LIMIT 8323072.0f
#define SCALE_DIVISOR 32512.0f
#define SIGMA_FACTOR 0.00390625f
#endif

// Element i of a stored weight: float32 (0), bfloat16 (1) or float16 (2).
FUNCTION float load_stored(GLOBAL const uchar *w, uint format, ulong i) {
    if (format == 0u) {
        return ((GLOBAL const float *)w)[i];
    }
    ushort bits = ((GLOBAL const ushort *)w)[i];
    return as_f32(format == 1u ? widen_bf16(bits) : widen_f16(bits));
}

FUNCTION uint magnitude_bits(float x) {
    return as_u32(x) & ~SIGN_BIT;
}

// Both from the largest magnitude_bits of the group: what its numbers are multiplied by, and what
// one integer is worth.
FUNCTION float group_multiplier(uint max_bits) {
    int none = max_bits < ((127u - 100u) << 23) || max_bits >= F32_INFINITY;
    return none ? 0.0f : div_rn(SLICE_LIMIT, as_f32(max_bits));
}

FUNCTION float group_scale(uint max_bits) {
    if (max_bits < ((127u - 100u) << 23)) {
        return 0.0f;
    }
    return max_bits >= F32_INFINITY ? as_f32(CANONICAL_NAN) : div_rn(as_f32(max_bits), SCALE_DIVISOR);
}

// round_half_even(x * multiplier), within the limit; zero where the multiplier is, and x may be
// infinite or NaN. BOUND: at most SLICE_LIMIT * (1 + 2^-22), so adding 2^23, or 1.5 * 2^23, leaves
// the rounded integer in the lowest bits.
FUNCTION int quantise(float x, float multiplier) {
    float scaled = x * multiplier;
#if SLICES == 2
    // None is rounded beyond the limit.
    return multiplier == 0.0f ? 0 : (int)(as_u32(scaled + 12582912.0f) - as_u32(12582912.0f));
#else
    uint size = as_u32(magnitude(scaled) + 8388608.0f) - as_u32(8388608.0f);
    size = size > (uint)SLICE_LIMIT ? (uint)SLICE_LIMIT : size;
    int q = multiplier == 0.0f ? 0 : (int)size;
    return scaled < 0.0f ? -q : q;
#endif
}

// Four slices as the bytes of an int.
FUNCTION int pack4(int a, int b, int c, int d) {
    return (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (int)((uint)d << 24);
}

// Slice number `slice` of four integers, 0 being the highest, as the bytes of an int: a byte of
// each integer after rounding away the slices below it.
FUNCTION int packed_slice(const int *q, int slice) {
    int byte = SLICES - 1 - slice;
    uint rounding = byte == 0 ? 0u : byte == 1 ? 0x80u : 0x8080u;
    uint r[4];
    for (int i = 0; i < 4; i++) {
        r[i] = (uint)q[i] + rounding;
    }
#if defined(permute_bytes)
    uint pair = (uint)byte | (uint)(byte + 4) << 8;
    return (int)permute_bytes(permute_bytes(r[3], r[2], pair), permute_bytes(r[1], r[0], pair), 0x05040100u);
#else
    uint shift = 8u * (uint)byte;
    return pack4((int)(r[0] >> shift), (int)(r[1] >> shift), (int)(r[2] >> shift), (int)(r[3] >> shift));
#endif
}

// Transposes four words of four bytes: byte i of word j becomes byte j of word i.
FUNCTION void transpose_bytes(uint *words) {
    // Pairs of bytes first, then pairs of pairs.
#if defined(permute_bytes)
    uint even_low = permute_bytes(words[1], words[0], 0x05010400u);
    uint even_high = permute_bytes(words[1], words[0], 0x07030602u);
    uint odd_low = permute_bytes(words[3], words[2], 0x05010400u);
    uint odd_high = permute_bytes(words[3], words[2], 0x07030602u);
    words[0] = permute_bytes(odd_low, even_low, 0x05040100u);
    words[1] = permute_bytes(odd_low, even_low, 0x07060302u);
    words[2] = permute_bytes(odd_high, even_high, 0x05040100u);
    words[3] = permute_bytes(odd_high, even_high, 0x07060302u);
#else
    uint even_low = (words[0] & 0x00ff00ffu) | ((words[1] & 0x00ff00ffu) << 8);
    uint odd_low = ((words[0] >> 8) & 0x00ff00ffu) | (words[1] & 0xff00ff00u);
    uint even_high = (words[2] & 0x00ff00ffu) | ((words[3] & 0x00ff00ffu) << 8);
    uint odd_high = ((words[2] >> 8) & 0x00ff00ffu) | (words[3] & 0xff00ff00u);
    words[0] = (even_low & 0xffffu) | (even_high << 16);
    words[1] = (odd_low & 0xffffu) | (odd_high << 16);
    words[2] = (even_low >> 16) | (even_high & 0xffff0000u);
    words[3] = (odd_low >> 16) | (odd_high & 0xffff0000u);
#endif
}

// Twice the value of four e2m1 codes, a byte each: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives.
FUNCTION uint twice_e2m1(uint codes) {
    uint base = 0x04040404u + ((codes & 0x01010101u) << 1);
    uint large = base + (base & ((codes >> 1 & 0x01010101u) * 255u));
    uint is_large = (codes >> 2 & 0x01010101u) * 255u;
    uint value = (large & is_large) | (codes & 0x03030303u & ~is_large);
    // The sign of a zero is dropped, so that no byte carries into the next.
    uint negative = codes >> 3 & (value + 0x0f0f0f0fu) >> 4 & 0x01010101u;
    return (value ^ negative * 255u) + negative;
}

// Four numbers of four bits less their zero points, a byte each. The topmost bits keep the bytes
// from borrowing of each other. Zero points are at most 16; 255 in their place says that the
// numbers are e2m1 codes. Bytes that take no part have the number 0 and the zero point 0 in either
// case.
FUNCTION uint without_zeros(uint numbers, uint zeros) {
    if ((zeros & 0x80808080u) != 0u) {
        return twice_e2m1(numbers);
    }
    return ((numbers | 0x80808080u) - zeros) ^ 0x80808080u;
}

// Packed int4 values of four outputs, eight places each (product4.cl), as bytes: number c has place
// c of all four.
FUNCTION void bytes_of_places(uint *numbers, const uint *packed) {
    #pragma unroll
    for (uint i = 0u; i < 4u; i++) {
        numbers[i] = packed[i] & 0x0f0f0f0fu;
        numbers[i + 4u] = (packed[i] >> 4) & 0x0f0f0f0fu;
    }
    transpose_bytes(numbers);
    transpose_bytes(numbers + 4);
}

// Slice `slice` of four neighbours in memory that the group shares, from a multiple of 16 bytes on.
FUNCTION void load_neighbours(int to[4][SLICES], uint slice, LOCAL_POINTER const int *from) {
    UINT4 four = *(LOCAL_POINTER const UINT4 *)from;
    to[0][slice] = (int)four.x;
    to[1][slice] = (int)four.y;
    to[2][slice] = (int)four.z;
    to[3][slice] = (int)four.w;
}

// Exact sums of a chunk: HH and X for two slices, S1, S2 and S3 for three.
typedef struct {
    int s[SLICES];
} Sums;

FUNCTION Sums no_sums(void) {
    Sums sums;
    for (int i = 0; i < SLICES; i++) {
        sums.s[i] = 0;
    }
    return sums;
}

// Adds the kept products of four elements: a[i], b[i] hold slice i of each, packed.
FUNCTION Sums add_products(Sums sums, const int *a, const int *b) {
#if SLICES == 2
    sums.s[0] = dot4(a[0], b[0], sums.s[0]);
    sums.s[1] = dot4(a[0], b[1], sums.s[1]);
    sums.s[1] = dot4(a[1], b[0], sums.s[1]);
#else
    sums.s[0] = dot4(a[0], b[0], sums.s[0]);
    sums.s[1] = dot4(a[0], b[1], sums.s[1]);
    sums.s[1] = dot4(a[1], b[0], sums.s[1]);
    sums.s[2] = dot4(a[0], b[2], sums.s[2]);
    sums.s[2] = dot4(a[1], b[1], sums.s[2]);
    sums.s[2] = dot4(a[2], b[0], sums.s[2]);
#endif
    return sums;
}

// The value of a chunk.
FUNCTION float chunk_value(Sums sums) {
#if SLICES == 2
    return (float)(sums.s[0] * 256 + sums.s[1]);
#else
    return fma_rn((float)sums.s[0], 65536.0f, fma_rn((float)sums.s[1], 256.0f, (float)sums.s[2]));
#endif
}

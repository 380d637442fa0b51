// The products of attention on AMD's matrix cores (gfx908, gfx90a, gfx942). attention.cl follows
// this file: its kernels call these functions instead of their own, with the same bits.
//
// A group's 16 rows are the rows of a 16 x 16 block. Scores: each of the four waves has two blocks
// of 16 columns. Results: wave w has columns 16 * (w + 4 * i), at most four blocks.

#define ATTENTION_MFMA
// Words from row to row of the sliced weights: rows start in different banks.
#define WEIGHT_PITCH 33
#define WAVE 64u
#define BLOCK 16u
// Blocks of scores, and at most of results, of a wave.
#define SCORE_BLOCKS 2u
#define RESULT_BLOCKS 4u
// Words of the contraction at a time: two for each quarter of a wave.
#define STEP_WORDS 8u

typedef int INT4 __attribute__((ext_vector_type(4)));

// sums += the products of 32 bytes of the contraction, two words in each quarter of the wave: row i
// of a with row j of b, by lane % 16. Lane l has column l % 16, and in element r row
// 4 * (l / 16) + r.
FUNCTION INT4 add_block(INT4 sums, const int *a, const int *b) {
#if defined(__gfx908__) || defined(__gfx90a__)
    sums = __builtin_amdgcn_mfma_i32_16x16x16i8(a[0], b[0], sums, 0, 0, 0);
    return __builtin_amdgcn_mfma_i32_16x16x16i8(a[1], b[1], sums, 0, 0, 0);
#elif defined(__gfx942__)
#define PAIR(x) ((long)(((ulong)(uint)(x)[1] << 32) | (uint)(x)[0]))
    return __builtin_amdgcn_mfma_i32_16x16x32_i8(PAIR(a), PAIR(b), sums, 0, 0, 0);
#else
#error "no matrix instructions are known for this architecture"
#endif
}

// A wave's number in its group, which all its lanes share: branches on it keep all lanes active, as
// matrix instructions need.
FUNCTION uint wave_index(void) {
    return uniform(local_index() / WAVE);
}

// Row of element r of a lane.
FUNCTION uint block_row(uint r) {
    return local_index() % WAVE / BLOCK * 4u + r;
}

// Adds the kept products of all pairs of slices.
FUNCTION void add_slices(INT4 *sums, int a[SLICES][2], int b[SLICES][2]) {
    #pragma unroll
    for (uint i = 0u; i < SLICES; i++) {
        #pragma unroll
        for (uint j = 0u; i + j < SLICES; j++) {
            sums[i + j] = add_block(sums[i + j], a[i], b[j]);
        }
    }
}

FUNCTION Sums element(const INT4 *sums, uint r) {
    Sums one;
    #pragma unroll
    for (uint s = 0u; s < SLICES; s++) {
        one.s[s] = sums[s][r];
    }
    return one;
}

// Scores of a work item.
FUNCTION uint score_row(uint n, uint row_count) {
    return block_row(n % 4u);
}

FUNCTION uint score_column(uint n) {
    return (local_index() / WAVE * SCORE_BLOCKS + n / 4u) * BLOCK + local_index() % BLOCK;
}

// The two words of a lane in a step that has `count` words, and all bits where they exist: the last
// one stands in for words beyond it, which are zero in the rows.
FUNCTION void lane_words(uint *own, uint *mask, uint count) {
    #pragma unroll
    for (uint i = 0u; i < 2u; i++) {
        uint word = local_index() % WAVE / BLOCK + i * 4u;
        own[i] = word < count ? word : count - 1u;
        mask[i] = word < count ? 0xffffffffu : 0u;
    }
}

// BOUND: a step's words of all places lie within 2^32 bytes.
FUNCTION void column_offsets(uint offset[SCORE_BLOCKS][2], const uint *own, const uint *column, uint places) {
    #pragma unroll
    for (uint block = 0u; block < SCORE_BLOCKS; block++) {
        #pragma unroll
        for (uint i = 0u; i < 2u; i++) {
            offset[block][i] = (own[i] * places + column[block]) * 4u;
        }
    }
}

// Products over the width of a work item's scores. Columns that are not from `first` to before
// `end` give numbers that nobody reads; they exist, since spans are padded to PLACE_BLOCK places.
// `columns` are the planes of the tile's columns.
FUNCTION void products_over_width(
    Sums *sums, LOCAL_POINTER const int *rows, GLOBAL const int *columns, uint words, uint places, uint row_count,
    uint first, uint end
) {
    INT4 acc[SCORE_BLOCKS][SLICES];
    uint column[SCORE_BLOCKS];
    #pragma unroll
    for (uint block = 0u; block < SCORE_BLOCKS; block++) {
        column[block] = score_column(block * 4u);
        #pragma unroll
        for (uint s = 0u; s < SLICES; s++) {
            acc[block][s] = 0;
        }
    }
    uint wave_first = wave_index() * SCORE_BLOCKS * BLOCK;
    if (wave_first < end && wave_first + SCORE_BLOCKS * BLOCK > first) {
        // A lane's words of a step, and where its columns have them.
        uint own[2];
        uint offset[SCORE_BLOCKS][2];
        uint mask[2];
        columns = uniform_pointer(columns);
        lane_words(own, mask, STEP_WORDS);
        column_offsets(offset, own, column, places);
        for (uint word = 0u; word < words; word += STEP_WORDS) {
            if (words - word < STEP_WORDS) {
                lane_words(own, mask, words - word);
                column_offsets(offset, own, column, places);
            }
            int a[SLICES][2];
            int b[SCORE_BLOCKS][SLICES][2];
            #pragma unroll
            for (uint s = 0u; s < SLICES; s++) {
                GLOBAL const int *shared = columns + (ulong)(s * words + word) * places;
                #pragma unroll
                for (uint i = 0u; i < 2u; i++) {
                    int row = rows[(s * words + word) * row_count + own[i] * row_count + local_index() % BLOCK];
                    a[s][i] = row & (int)mask[i];
                    #pragma unroll
                    for (uint block = 0u; block < SCORE_BLOCKS; block++) {
                        b[block][s][i] = load_word(shared, &offset[block][i]);
                    }
                }
            }
            #pragma unroll
            for (uint block = 0u; block < SCORE_BLOCKS; block++) {
                add_slices(acc[block], a, b[block]);
            }
        }
    }
    #pragma unroll
    for (uint n = 0u; n < SCORE_BLOCKS * 4u; n++) {
        sums[n] = element(acc[n / 4u], n % 4u);
    }
}

// Results of a work item.
FUNCTION uint result_row(uint n, uint width) {
    return block_row(n % 4u);
}

FUNCTION uint result_column(uint n, uint width) {
    return (local_index() / WAVE + n / 4u * 4u) * BLOCK + local_index() % BLOCK;
}

// What a tile adds to this work item's results: acc = fma(product over the tile, scale, acc *
// decay) for every row that sees something of the tile. Weights of places that are not seen are
// zero, whatever the words of a step that are not from `first` to before `end`; they exist, since
// spans are padded to PLACE_BLOCK places.
FUNCTION void add_tile(
    float *acc, LOCAL_POINTER const int *weights, LOCAL_POINTER const float *scales, LOCAL_POINTER const float *decays,
    LOCAL_POINTER const uint *active, GLOBAL const int *planes, ulong slice_step, uint width, uint first, uint end,
    uint row_count
) {
    uint lane_word = local_index() % WAVE / BLOCK;
    planes = uniform_pointer(planes);
    first = uniform(first) / STEP_WORDS * STEP_WORDS;
    end = uniform(end);
    #pragma unroll
    for (uint block = 0u; block < RESULT_BLOCKS; block++) {
        if ((wave_index() + block * 4u) * BLOCK < width) {
            uint column = result_column(block * 4u, width);
            column = column < width ? column : width - 1u;
            uint offset[2];
            #pragma unroll
            for (uint i = 0u; i < 2u; i++) {
                offset[i] = ((lane_word + i * 4u) * width + column) * 4u;
            }
            INT4 sums[SLICES];
            #pragma unroll
            for (uint s = 0u; s < SLICES; s++) {
                sums[s] = 0;
            }
            for (uint word = first; word < end; word += STEP_WORDS) {
                int a[SLICES][2];
                int b[SLICES][2];
                #pragma unroll
                for (uint i = 0u; i < 2u; i++) {
                    uint here = word + lane_word + i * 4u;
                    #pragma unroll
                    for (uint s = 0u; s < SLICES; s++) {
                        a[s][i] = weights[(s * row_count + local_index() % BLOCK) * WEIGHT_PITCH + here];
                        b[s][i] = load_word(planes + s * slice_step + (ulong)word * width, &offset[i]);
                    }
                }
                add_slices(sums, a, b);
            }
            #pragma unroll
            for (uint r = 0u; r < 4u; r++) {
                uint row = block_row(r);
                if (active[row] != 0u) {
                    uint n = block * 4u + r;
                    acc[n] = fma_rn(chunk_value(element(sums, r)), scales[row], acc[n] * decays[row]);
                }
            }
        }
    }
}


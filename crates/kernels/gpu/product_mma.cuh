// The main loop of slice products on the int8 tensor cores of NVIDIA devices from sm_80 on, for
// both profiles (SLICES is 2 or 3): exact sums of a chunk for a tile of the output, from planes of
// slices ("Slice product" in docs/numerics.md). What a chunk is worth and where it goes is up to
// the kernels that include this, behind mma.cuh.
//
// A block of eight warps makes ROWS x COLUMNS outputs, a warp 32 rows by half of the columns. STEP
// bytes of all planes stream through a ring of STAGES slots in shared memory, copied ahead by all
// threads; one barrier per step. The sums of all slices and the results stay in registers, which
// is why there is one block per multiprocessor. The ring takes at most 96 KiB: every device has
// that.
//
// A slot holds the planes of the left operand, then those of the right one, rows of STEP bytes.
// Eight rows of 16 bytes are read at once and should lie in different banks, so 16-byte pieces of a
// row change places with their neighbours.

#define ROWS 128u
#define STEP 64u
#define THREADS 256u
#define ROW_TILES 2
#if SLICES == 2
#define COLUMNS 128u
#define STAGES 3
#define COLUMN_TILES 8
#else
#define COLUMNS 64u
#define STAGES 2
#define COLUMN_TILES 4
#endif

// Planes of the right operand: 1 where it has no slices.
#ifndef RIGHT_SLICES
#define RIGHT_SLICES SLICES
#endif

#define LEFT_PLANE (ROWS * STEP)
#define RIGHT_PLANE (COLUMNS * STEP)
#define RIGHT (SLICES * LEFT_PLANE)
#define SLOT_BYTES (RIGHT + RIGHT_SLICES * RIGHT_PLANE)
// Tiles along the rows that are walked together, for reuse in L2.
#define WALK_ROWS 16u

#define MEMBER __device__ __forceinline__

extern __shared__ __align__(1024) uchar shared[];

// Rows of an operand, in planes of bytes: where the first one starts, bytes from row to row and
// from plane to plane, and how many rows there are. Rows beyond them stand for the last one.
struct Planes {
    const uchar *from;
    ulong pitch, plane;
    uint rows;
};

// Copies COUNT rows of STEP bytes of some planes, this thread a piece of every 64th row.
template <uint COUNT, int SLICE_COUNT> struct Copies {
    const uchar *from;
    // From plane to plane, in pieces of 16 bytes.
    uint plane;
    // This thread's rows, from the pointer on.
    uint at[COUNT / 64u];

    MEMBER Copies(const Planes &planes) : from(planes.from), plane((uint)(planes.plane / 16u)) {
#pragma unroll
        for (uint i = 0u; i < COUNT / 64u; i++) {
            uint row = threadIdx.x / 4u + 64u * i;
            at[i] = (row < planes.rows ? row : planes.rows - 1u) * (uint)planes.pitch + threadIdx.x % 4u * 16u;
        }
    }

    // The next STEP bytes of every row. `to` is where planes start in a slot.
    MEMBER void fill(uint to) {
        uint row = threadIdx.x / 4u;
        to += row * STEP + (threadIdx.x % 4u ^ row / 2u % 4u) * 16u;
#pragma unroll
        for (uint s = 0u; s < SLICE_COUNT; s++) {
#pragma unroll
            for (uint i = 0u; i < COUNT / 64u; i++) {
                copy_16(to + (s * COUNT + 64u * i) * STEP, from + (ulong)(s * plane) * 16u + at[i]);
            }
        }
        from += STEP;
    }
};

typedef Copies<ROWS, SLICES> LeftCopies;
typedef Copies<COLUMNS, RIGHT_SLICES> RightCopies;

// The stream of steps: STEP bytes of both operands, `rest` times.
template <class Right> struct Ring {
    LeftCopies left;
    Right right;
    // Steps that are left to copy; the slot that is read next.
    uint rest, out;

    MEMBER Ring(const LeftCopies &left, const Right &right, uint steps) : left(left), right(right), rest(steps), out(0u) {
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; i++) {
            load(i);
        }
    }

    MEMBER uint slot(uint index) const {
        return (uint)__cvta_generic_to_shared(shared) + index * SLOT_BYTES;
    }

    // Starts the copies of the next step to a slot, if there is one.
    MEMBER void load(uint into) {
        if (rest > 0u) {
            left.fill(slot(into));
            right.fill(slot(into) + RIGHT);
            rest--;
        }
        copies_end();
    }

    // The slot of the next step, filled. The one before it is free.
    MEMBER uint next(void) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        return slot(out);
    }

    // Fills the free slot with what comes STAGES - 1 steps later. Once after every `next`, when the
    // tensor cores have work.
    MEMBER void fill(void) {
        load(out == 0u ? STAGES - 1u : out - 1u);
        out = out + 1u == STAGES ? 0u : out + 1u;
    }
};

// Number 4 n + 2 r + e of tile m of a thread is column 8 n + 2 (lane % 4) + e of row
// 16 m + lane / 4 + 8 r of the warp's part.
struct TileSums {
    int s[SLICES][ROW_TILES][4 * COLUMN_TILES];

    MEMBER void clear(void) {
#pragma unroll
        for (int s = 0; s < SLICES; s++) {
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
                for (int i = 0; i < 4 * COLUMN_TILES; i++) {
                    this->s[s][m][i] = 0;
                }
            }
        }
    }

    // The products of bytes 32 k to 32 k + 31 of a slot. The addresses are the lane's, from the
    // slot's start on.
    MEMBER void add(uint slot, uint left, uint right, uint k) {
        uint a[SLICES][ROW_TILES][4];
#pragma unroll
        for (uint i = 0u; i < SLICES; i++) {
#pragma unroll
            for (uint m = 0u; m < ROW_TILES; m++) {
                load_matrices(a[i][m], (slot + left ^ 32u * k) + i * LEFT_PLANE + 16u * m * STEP);
            }
        }
#pragma unroll
        for (uint n = 0u; n < COLUMN_TILES; n += 2u) {
            uint b[RIGHT_SLICES][4];
#pragma unroll
            for (uint j = 0u; j < RIGHT_SLICES; j++) {
                load_matrices(b[j], (slot + right ^ 32u * k) + j * RIGHT_PLANE + 8u * n * STEP);
            }
            // Products that add to the same sums are apart.
#pragma unroll
            for (int i = 0; i < SLICES; i++) {
#pragma unroll
                for (int j = 0; j < RIGHT_SLICES && i + j < SLICES; j++) {
#pragma unroll
                    for (int m = 0; m < ROW_TILES; m++) {
                        multiply_bytes(s[i + j][m] + 4u * n, a[i][m], b[j][0], b[j][1]);
                        multiply_bytes(s[i + j][m] + 4u * n + 4u, a[i][m], b[j][2], b[j][3]);
                    }
                }
            }
        }
    }

    MEMBER float value(int m, int i) const {
        Sums sums;
#pragma unroll
        for (int s = 0; s < SLICES; s++) {
            sums.s[s] = this->s[s][m][i];
        }
        return chunk_value(sums);
    }
};

// This thread's place in the tile: the warp's first row and column, its own first ones, and where
// its lane's rows of matrices start in a slot.
struct Place {
    uint row, column, left, right;

    MEMBER Place(void) {
        uint lane = lane_index(), warp = __shfl_sync(0xffffffffu, threadIdx.x / 32u, 0);
        uint warp_row = warp / 2u * (16u * ROW_TILES), warp_column = warp % 2u * (8u * COLUMN_TILES);
        row = warp_row + lane / 4u;
        column = warp_column + lane % 4u * 2u;
        uint a = lane % 16u, b = lane / 16u * 8u + lane % 8u;
        left = (warp_row + a) * STEP + (lane / 16u ^ a / 2u % 4u) * 16u;
        right = RIGHT + (warp_column + b) * STEP + (lane / 8u % 2u ^ b / 2u % 4u) * 16u;
    }
};

// The exact sums of the next `steps` steps.
template <class Right> FUNCTION void sum_steps(TileSums &sums, Ring<Right> &ring, const Place &place, uint steps) {
    sums.clear();
#pragma unroll 1
    for (uint step = 0u; step < steps; step++) {
        uint slot = ring.next();
        sums.add(slot, place.left, place.right, 0u);
        ring.fill();
        sums.add(slot, place.left, place.right, 1u);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Tiles of the output

// Results of a thread, in the order of TileSums.
struct TileResults {
    float v[ROW_TILES][4 * COLUMN_TILES];

    MEMBER void clear(void) {
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
            for (int i = 0; i < 4 * COLUMN_TILES; i++) {
                v[m][i] = 0.0f;
            }
        }
    }

    // Calls `act` with each pair of neighbours: their place in the tile, and both numbers.
    template <class Act> MEMBER void each_pair(const Place &place, Act act) {
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
#pragma unroll
                for (int n = 0; n < COLUMN_TILES; n++) {
                    act(place.row + 16u * m + 8u * r, place.column + 8u * n, v[m][4 * n + 2 * r], v[m][4 * n + 2 * r + 1]);
                }
            }
        }
    }
};

// Rows and columns of y from the tile's first on, `stride` elements from row to row.
struct Output {
    float *y;
    ulong stride;
    uint rows, columns;

    MEMBER bool even(void) const {
        return columns % 2u == 0u && stride % 2u == 0u && (ulong)y % 8u == 0u;
    }

    MEMBER void load(TileResults &results, const Place &place) const {
        bool pairs = even();
        results.each_pair(place, [&](uint row, uint column, float &x, float &y0) {
            float2 v = make_float2(0.0f, 0.0f);
            if (row < rows && column < columns) {
                const float *from = y + row * stride + column;
                if (pairs) {
                    v = *(const float2 *)from;
                } else {
                    v.x = from[0];
                    if (column + 1u < columns) {
                        v.y = from[1];
                    }
                }
            }
            x = v.x;
            y0 = v.y;
        });
    }

    MEMBER void store(TileResults &results, const Place &place) const {
        bool pairs = even();
        results.each_pair(place, [&](uint row, uint column, float &x, float &y0) {
            if (row < rows && column < columns) {
                float *to = y + row * stride + column;
                if (pairs) {
                    __stcs((float2 *)to, make_float2(x, y0));
                } else {
                    __stcs(to, x);
                    if (column + 1u < columns) {
                        __stcs(to + 1, y0);
                    }
                }
            }
        });
    }
};

// The order of tiles: WALK_ROWS tiles of rows by all tiles of columns, rows fastest.
FUNCTION void tile_of(uint index, uint row_tiles, uint column_tiles, uint &row, uint &column) {
    uint group = index / (WALK_ROWS * column_tiles), rest = index % (WALK_ROWS * column_tiles);
    uint first = group * WALK_ROWS, here = row_tiles - first < WALK_ROWS ? row_tiles - first : WALK_ROWS;
    row = first + rest % here;
    column = rest / here;
}

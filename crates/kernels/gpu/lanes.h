// Lane sums (docs/numerics.md, "Lane sums"): the 32 lanes in memory that the group shares,
// or in the registers of a warp.

#define LANES 32
// Work items of a group.
#define GROUP 256

// A number that is the same in all lanes of a wave, for AMD's scalar unit.
FUNCTION uint uniform(uint x) {
#if defined(__AMDGCN__)
    return (uint)__builtin_amdgcn_readfirstlane((int)x);
#else
    return x;
#endif
}

FUNCTION GLOBAL const int *uniform_pointer(GLOBAL const int *pointer) {
#if defined(__AMDGCN__)
    ulong address = (ulong)pointer;
    return (GLOBAL const int *)((ulong)uniform((uint)(address >> 32)) << 32 | uniform((uint)address));
#else
    return pointer;
#endif
}

// The word at a uniform pointer plus a lane's offset in bytes. AMD's devices add the two in the
// load instruction, which the compiler uses only if it cannot move parts of the sum. LLVM 15 and 16
// stop at a pointer for scalar registers that they have computed in vector registers.
FUNCTION int load_word(GLOBAL const int *shared, uint *offset) {
#if defined(__AMDGCN__) && __clang_major__ < 19
    shared = uniform_pointer(shared);
#endif
    GLOBAL_SPACE const uchar *pointer = (GLOBAL_SPACE const uchar *)shared;
#if defined(__AMDGCN__)
    __asm__("" : "+s"(pointer));
    __asm__("" : "+v"(*offset));
#endif
    return *(GLOBAL_SPACE const int *)(pointer + *offset);
}

// Adds the 32 numbers by halves. Every work item of the group calls it; `lanes` is complete on
// return and the result is lanes[0]. Barriers on both sides.
FUNCTION void tree_sum(LOCAL_POINTER float *lanes) {
    uint l = local_index();
    barrier_local();
    for (uint h = LANES / 2; h > 0u; h /= 2u) {
        float other = l < h ? lanes[l + h] : 0.0f;
        if (l < h) {
            lanes[l] = lanes[l] + other;
        }
        barrier_local();
    }
}

// The same for `count` sums at once, lanes[count][32], by a group of GROUP work items: sum n is
// lanes[32 * n].
FUNCTION void tree_sums(LOCAL_POINTER float *lanes, uint count) {
    barrier_local();
    for (int shift = 4; shift >= 0; shift--) {
        uint h = 1u << shift;
        for (uint i = local_index(); i < count * h; i += GROUP) {
            uint l = (i >> shift) * LANES + (i & (h - 1u));
            lanes[l] = lanes[l] + lanes[l + h];
        }
        barrier_local();
    }
}

// A team is 32 work items in a row, one for each lane of a sum. All work items of the group call
// these together and get what the numbers of their team give; `lanes` has GROUP elements and is
// free again on return. NVIDIA's warps are teams and need no memory for it.
#if defined(lane_below)
#define TEAM_TREE(type, combined) \
    (void)lanes; \
    for (uint h = LANES / 2; h > 0u; h /= 2u) { \
        type other = lane_below(value, h); \
        value = combined; \
    } \
    return first_lane(value)
#else
#define TEAM_TREE(type, combined) \
    uint l = local_index(); \
    uint lane = l % LANES; \
    lanes[l] = value; \
    barrier_local(); \
    for (uint h = LANES / 2; h > 0u; h /= 2u) { \
        if (lane < h) { \
            type other = lanes[l + h]; \
            value = combined; \
            lanes[l] = value; \
        } \
        barrier_local(); \
    } \
    value = lanes[l - lane]; \
    barrier_local(); \
    return value
#endif

// The tree of a lane sum.
FUNCTION float team_sum(LOCAL_POINTER float *lanes, float value) {
    TEAM_TREE(float, value + other);
}

// A NaN is passed by unless it is the first.
FUNCTION float team_max(LOCAL_POINTER float *lanes, float value) {
    TEAM_TREE(float, other > value ? other : value);
}

FUNCTION uint team_min(LOCAL_POINTER uint *lanes, uint value) {
    TEAM_TREE(uint, other < value ? other : value);
}

// Maximum and lane sum of exponentials (docs/numerics.md, "Router") of `count` numbers from z[0],
// for the lists of all teams at once: the work items of a team bring its z and count. Every work
// item of the group calls it; `lanes` has GROUP elements and is free again on return.
FUNCTION void softmax_scales(LOCAL_POINTER float *lanes, GLOBAL const float *z, uint count, float *most, float *sum) {
    uint lane = local_index() % LANES;
    float largest = as_f32(SIGN_BIT | F32_INFINITY);
    for (uint c = lane; c < count; c += LANES) {
        largest = z[c] > largest ? z[c] : largest;
    }
    largest = team_max(lanes, largest);
    float total = 0.0f;
    for (uint c = lane; c < count; c += LANES) {
        total = total + isobit_exp(z[c] - largest);
    }
    *most = largest;
    *sum = team_sum(lanes, total);
}

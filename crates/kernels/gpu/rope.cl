// Rotary embedding, in place (docs/numerics.md, "Rotary embedding"): a work item turns one pair.

// `tiles` groups for each token, whose heads have `pairs` pairs each: `stride` channels from one to
// the next, its two channels `apart`. A position outside the tables turns nothing.
#define ROPE(name, sign_of_first, sign_of_second) \
    KERNEL(GROUP) rope_##name( \
        GLOBAL float *x, GLOBAL const float *cosines, GLOBAL const float *sines, GLOBAL const uint *positions, \
        uint table_rows, uint heads, uint head_width, uint pairs, uint offset, uint stride, uint apart, \
        uint tiles) { \
        uint token = div_u32(group_index(), tiles); \
        uint pair = mod_u32(group_index(), tiles) * GROUP + local_index(); \
        uint position = positions[token]; \
        if (pair >= heads * pairs || position >= table_rows) { \
            return; \
        } \
        uint i = mod_u32(pair, pairs); \
        ulong table = (ulong)position * pairs + i; \
        ulong first = ((ulong)token * heads + div_u32(pair, pairs)) * head_width + offset + i * stride; \
        float a = x[first]; \
        float b = x[first + apart]; \
        float c = cosines[table]; \
        float s = sines[table]; \
        float from_b = b * s; \
        float from_a = a * s; \
        x[first] = fma_rn(a, c, sign_of_first from_b); \
        x[first + apart] = fma_rn(b, c, sign_of_second from_a); \
    }

ROPE(forward, -, +)
ROPE(backward, +, -)

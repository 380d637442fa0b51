// Digests (docs/numerics.md, "Digests"): groups share the blocks of 1024 words of a tensor, four
// words per work item, and leave a pair of sums each; `digest_tensors` adds the pairs of a tensor.
// Sums modulo 2^64 have no order.

#define DIGEST_KEY_LOW 0x49534f42u
#define DIGEST_KEY_HIGH 0x44475354u
#define BLOCK_WORDS 1024u
// Work items that add up the 256 parts of a block, and parts that each adds.
#define ADDERS 16u

// Word `index` of `bytes` bytes; what is missing is zero, and nothing beyond the end is read.
FUNCTION uint digest_word(GLOBAL const uint *words, ulong index, ulong bytes) {
    if (index < bytes / 4u) {
        return words[index];
    }
    GLOBAL const uchar *tail = (GLOBAL const uchar *)words;
    uint word = 0u;
    for (uint i = 0u; i < 3u; i++) {
        ulong at = index * 4u + i;
        word |= at < bytes ? (uint)tail[at] << (8u * i) : 0u;
    }
    return word;
}

FUNCTION ulong digest_product(uint a, uint b) {
    return (ulong)a * (ulong)b;
}

// Blocks that a group takes at once, so that many words are on their way.
#define TOGETHER 4u

// Words of local memory that a group needs: parts, sums and results.
#define SHARED (TOGETHER * 2 * (GROUP + ADDERS + 1))

// The sums over TOGETHER blocks from `first` on, then from `first + stride` on, up to `end`, of a
// tensor of `bytes` bytes.
FUNCTION void digest_blocks(
    GLOBAL ulong *pair, LOCAL_POINTER ulong *shared, GLOBAL const uint *words, ulong bytes, ulong first, ulong end,
    ulong stride
) {
    LOCAL_POINTER ulong *sums = shared + TOGETHER * 2u * GROUP;
    LOCAL_POINTER ulong *results = sums + TOGETHER * 2u * ADDERS;
    uint l = local_index();
    // Words 4l .. 4l + 3 meet these key words in the first sum and the four after them in the
    // second.
    Words k = philox(l, 0u, 0u, 0u, DIGEST_KEY_LOW, DIGEST_KEY_HIGH);
    Words further = philox(l + 1u, 0u, 0u, 0u, DIGEST_KEY_LOW, DIGEST_KEY_HIGH);
    ulong s0 = 0;
    ulong s1 = 0;
    // Work item n < TOGETHER ends block n of a turn.
    for (ulong turn = first; turn < end; turn += stride) {
        uint w[TOGETHER][4];
        for (uint n = 0u; n < TOGETHER; n++) {
            ulong at = (turn + n) * BLOCK_WORDS + 4u * l;
            if ((at + 4u) * 4u <= bytes) {
                UINT4 four = *(GLOBAL const UINT4 *)(words + at);
                w[n][0] = four.x;
                w[n][1] = four.y;
                w[n][2] = four.z;
                w[n][3] = four.w;
            } else {
                for (uint i = 0u; i < 4u; i++) {
                    w[n][i] = digest_word(words, at + i, bytes);
                }
            }
        }
        for (uint n = 0u; n < TOGETHER; n++) {
            LOCAL_POINTER ulong *own = shared + n * 2u * GROUP;
            own[l] = digest_product(w[n][0] + k.w[0], w[n][1] + k.w[1])
                + digest_product(w[n][2] + k.w[2], w[n][3] + k.w[3]);
            own[GROUP + l] = digest_product(w[n][0] + further.w[0], w[n][1] + further.w[1])
                + digest_product(w[n][2] + further.w[2], w[n][3] + further.w[3]);
        }
        barrier_local();
        if (l < TOGETHER * 2u * ADDERS) {
            ulong sum = 0;
            // Neighbours read neighbouring parts.
            for (uint i = l % ADDERS; i < GROUP; i += ADDERS) {
                sum += shared[l / ADDERS * GROUP + i];
            }
            sums[l] = sum;
        }
        barrier_local();
        // Everyone else is already at the next turn, which does not touch `sums` before a barrier
        // that these reach too.
        if (l < TOGETHER && turn + l < end) {
            ulong h0 = 0;
            ulong h1 = 0;
            for (uint i = 0u; i < ADDERS; i++) {
                h0 += sums[l * 2u * ADDERS + i];
                h1 += sums[l * 2u * ADDERS + ADDERS + i];
            }
            ulong a = mix64(h0 + mix64(turn + l + 1u));
            ulong c1 = mix64(h1 + a);
            s0 += mix64(a + c1);
            s1 += c1;
        }
    }
    if (l < TOGETHER) {
        results[2u * l] = s0;
        results[2u * l + 1u] = s1;
    }
    barrier_local();
    if (l < 2u) {
        ulong sum = 0;
        for (uint n = 0u; n < TOGETHER; n++) {
            sum += results[2u * n + l];
        }
        pair[l] = sum;
    }
}

// The pairs `start` and on of one tensor: its groups take turns.
KERNEL(GROUP) digest(
    GLOBAL ulong *pairs, GLOBAL const uint *words, ulong bytes, ulong blocks, uint groups, uint start
) {
    LOCAL ulong shared[SHARED];
    digest_blocks(
        pairs + 2u * (start + group_index()), shared, words, bytes, (ulong)group_index() * TOGETHER, blocks,
        (ulong)groups * TOGETHER
    );
}

// A group per tensor adds its pairs: those from `starts[i]` to `starts[i + 1]` belong to number i.
KERNEL(GROUP) digest_tensors(GLOBAL ulong *sums, GLOBAL const ulong *pairs, GLOBAL const uint *starts) {
    LOCAL ulong parts[GROUP];
    uint l = local_index();
    uint tensor = group_index();
    ulong sum = 0;
    // Neighbours have the two sums of a pair.
    for (uint pair = starts[tensor] + l / 2u; pair < starts[tensor + 1u]; pair += GROUP / 2u) {
        sum += pairs[2u * pair + l % 2u];
    }
    parts[l] = sum;
    for (uint span = GROUP / 2u; span >= 2u; span /= 2u) {
        barrier_local();
        if (l < span) {
            parts[l] += parts[l + span];
        }
    }
    barrier_local();
    if (l < 2u) {
        sums[2u * tensor + l] = parts[l];
    }
}

// Digest (docs/numerics.md, "Digests"): the groups share out the blocks of 1024 words, four words
// per work item; each leaves the sums of its blocks' contributions. Sums modulo 2^64 have no order.

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

KERNEL(GROUP) digest(GLOBAL ulong *out, GLOBAL const uint *words, ulong bytes, ulong blocks, uint groups) {
    LOCAL ulong parts[TOGETHER * 2 * GROUP];
    LOCAL ulong sums[TOGETHER * 2 * ADDERS];
    LOCAL ulong results[TOGETHER * 2];
    uint l = local_index();
    // Words 4l .. 4l + 3 meet these key words in the first sum and the four after them in the
    // second.
    Words k = philox(l, 0u, 0u, 0u, DIGEST_KEY_LOW, DIGEST_KEY_HIGH);
    Words further = philox(l + 1u, 0u, 0u, 0u, DIGEST_KEY_LOW, DIGEST_KEY_HIGH);
    ulong s0 = 0;
    ulong s1 = 0;
    // Groups take turns of TOGETHER blocks; work item n < TOGETHER ends block n of a turn.
    for (ulong turn = (ulong)group_index() * TOGETHER; turn < blocks; turn += (ulong)groups * TOGETHER) {
        uint w[TOGETHER][4];
        for (uint n = 0u; n < TOGETHER; n++) {
            ulong first = (turn + n) * BLOCK_WORDS + 4u * l;
            if ((first + 4u) * 4u <= bytes) {
                UINT4 four = *(GLOBAL const UINT4 *)(words + first);
                w[n][0] = four.x;
                w[n][1] = four.y;
                w[n][2] = four.z;
                w[n][3] = four.w;
            } else {
                for (uint i = 0u; i < 4u; i++) {
                    w[n][i] = digest_word(words, first + i, bytes);
                }
            }
        }
        for (uint n = 0u; n < TOGETHER; n++) {
            LOCAL_POINTER ulong *own = parts + n * 2u * GROUP;
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
                sum += parts[l / ADDERS * GROUP + i];
            }
            sums[l] = sum;
        }
        barrier_local();
        // Everyone else is already at the next turn, which does not touch `sums` before a barrier
        // that these reach too.
        if (l < TOGETHER && turn + l < blocks) {
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
        out[2u * group_index() + l] = sum;
    }
}

// Router of a mixture of experts (docs/numerics.md, "Router"). Eight tokens per group, a work item
// per lane. Sums over slots are short: every work item of a token computes them for itself. No
// barrier stands inside an `if`, even one that the whole group enters: PoCL 5 and 6 may abort on
// variables that such an `if` sets.

#define TOKENS (GROUP / LANES)

// How logits become weights, as gpu/router.rs numbers it.
#define SOFTMAX_CHOSEN 0u
#define SOFTMAX_ALL 1u
#define SIGMOID_CHOSEN 2u
#define SIGMOID_EACH 3u

// Descends in the order of expert indices. Above: the score's bits, transposed so that they ascend
// with it, NaN below everything; below: the index, transposed. No two are equal and none is zero.
FUNCTION ulong choice_key(float score, uint index) {
    uint bits = as_u32(score);
    bits = bits == SIGN_BIT ? 0u : bits;
    uint ordinal = (bits & SIGN_BIT) != 0u ? ~bits : bits | SIGN_BIT;
    ordinal = (bits & ~SIGN_BIT) > F32_INFINITY ? 0u : ordinal;
    return ((ulong)ordinal << 32) | (ulong)(~index);
}

FUNCTION uint choice_index(ulong key) {
    return ~(uint)key;
}

// The largest key of each token's 32 work items. Barriers on both sides.
FUNCTION ulong largest_key(LOCAL_POINTER ulong *keys, ulong own) {
    uint i = local_index();
    uint lane = i % LANES;
    keys[i] = own;
    barrier_local();
    for (uint h = LANES / 2; h > 0u; h /= 2u) {
        if (lane < h) {
            keys[i] = keys[i + h] > keys[i] ? keys[i + h] : keys[i];
        }
        barrier_local();
    }
    ulong largest = keys[i - lane];
    barrier_local();
    return largest;
}

FUNCTION float choice_score(GLOBAL const float *z, GLOBAL const float *bias, uint e, uint sigmoid, uint biased) {
    float score = sigmoid != 0u ? isobit_sigmoid(z[e]) : z[e];
    return biased != 0u ? score + bias[e] : score;
}

// The sum of the two best scores of experts first .. first + size.
FUNCTION float group_score(
    GLOBAL const float *z, GLOBAL const float *bias, uint first, uint size, uint sigmoid, uint biased) {
    ulong best_key = 0;
    ulong second_key = 0;
    float best = 0.0f;
    float second = 0.0f;
    for (uint i = 0u; i < size; i++) {
        float score = choice_score(z, bias, first + i, sigmoid, biased);
        ulong key = choice_key(score, i);
        if (key > best_key) {
            second_key = best_key;
            second = best;
            best_key = key;
            best = score;
        } else if (key > second_key) {
            second_key = key;
            second = score;
        }
    }
    return size > 1u ? best + second : best;
}

KERNEL(GROUP) router_choose(
    GLOBAL uint *expert_indices,
    GLOBAL const float *logits,
    GLOBAL const float *bias,
    ulong tokens,
    uint experts,
    uint chosen,
    uint sigmoid,
    uint biased,
    uint groups,
    uint kept_groups
) {
    LOCAL ulong keys[GROUP];
    uint lane = local_index() % LANES;
    ulong token = (ulong)group_index() * TOKENS + local_index() / LANES;
    int inside = token < tokens;
    GLOBAL const float *z = logits + (inside ? token : (ulong)0) * experts;
    uint size = div_u32(experts, groups);
    // Without groups there are no rounds.
    uint rounds = groups > 1u ? kept_groups : 0u;
    uint kept = groups > 1u ? 0u : ~0u;
    ulong own_group = 0;
    if (groups > 1u && inside && lane < groups) {
        own_group = choice_key(group_score(z, bias, lane * size, size, sigmoid, biased), lane);
    }
    // For PoCL 5: no branch of some work items leads straight to a loop with barriers
    // (docs/add-an-op.md).
    barrier_local();
    for (uint n = 0u; n < rounds; n++) {
        ulong best = largest_key(keys, own_group);
        kept |= 1u << (choice_index(best) % LANES);
        own_group = own_group == best ? (ulong)0 : own_group;
    }
    ulong bound = ~(ulong)0;
    for (uint j = 0u; j < chosen; j++) {
        ulong own = 0;
        for (uint e = lane; inside && e < experts; e += LANES) {
            if (((kept >> div_u32(e, size)) & 1u) != 0u) {
                ulong key = choice_key(choice_score(z, bias, e, sigmoid, biased), e);
                own = key < bound && key > own ? key : own;
            }
        }
        bound = largest_key(keys, own);
        if (inside && lane == 0u) {
            expert_indices[token * chosen + j] = choice_index(bound);
        }
    }
}

// The logit of a choice; NaN where there is no such expert.
FUNCTION float chosen_logit(GLOBAL const float *z, uint choice, uint experts) {
    return choice < experts ? z[choice] : as_f32(CANONICAL_NAN);
}

// The weight of a slot before the scale.
FUNCTION float slot_weight(float z, uint mode, float most, float sum) {
    float score = mode <= SOFTMAX_ALL ? isobit_exp(z - most) : isobit_sigmoid(z);
    return mode == SIGMOID_EACH ? score : div_rn(score, sum);
}

// What slot_weight needs to know of all slots, except for SOFTMAX_ALL.
FUNCTION void slot_scales(
    GLOBAL const float *z, GLOBAL const uint *expert_indices, uint experts, uint chosen, uint mode, float *most, float *sum) {
    float largest = as_f32(SIGN_BIT | F32_INFINITY);
    for (uint j = 0u; j < chosen; j++) {
        float value = chosen_logit(z, expert_indices[j], experts);
        largest = value > largest ? value : largest;
    }
    float total = 0.0f;
    for (uint j = 0u; j < chosen; j++) {
        float value = chosen_logit(z, expert_indices[j], experts);
        total = total + (mode == SOFTMAX_CHOSEN ? isobit_exp(value - largest) : isobit_sigmoid(value));
    }
    *most = largest;
    *sum = mode == SIGMOID_CHOSEN ? total + 1e-20f : total;
}

KERNEL(GROUP) router_weights(
    GLOBAL float *weights,
    GLOBAL const float *logits,
    GLOBAL const uint *expert_indices,
    ulong tokens,
    uint experts,
    uint chosen,
    uint mode,
    float scale
) {
    LOCAL float lanes[GROUP];
    uint lane = local_index() % LANES;
    ulong token = (ulong)group_index() * TOKENS + local_index() / LANES;
    int inside = token < tokens;
    GLOBAL const float *z = logits + (inside ? token : (ulong)0) * experts;
    GLOBAL const uint *own = expert_indices + (inside ? token : (ulong)0) * chosen;
    float most;
    float sum;
    softmax_scales(lanes, z, inside && mode == SOFTMAX_ALL ? experts : 0u, &most, &sum);
    if (mode != SOFTMAX_ALL) {
        slot_scales(z, own, experts, chosen, mode, &most, &sum);
    }
    for (uint j = lane; inside && j < chosen; j += LANES) {
        weights[token * chosen + j] = slot_weight(chosen_logit(z, own[j], experts), mode, most, sum) * scale;
    }
}

KERNEL(GROUP) router_backward(
    GLOBAL float *dlogits,
    GLOBAL const float *dweights,
    GLOBAL const float *logits,
    GLOBAL const uint *expert_indices,
    ulong tokens,
    uint experts,
    uint chosen,
    uint mode,
    float scale
) {
    LOCAL float lanes[GROUP];
    uint lane = local_index() % LANES;
    ulong token = (ulong)group_index() * TOKENS + local_index() / LANES;
    int inside = token < tokens;
    ulong slots = (inside ? token : (ulong)0) * chosen;
    GLOBAL const float *z = logits + (inside ? token : (ulong)0) * experts;
    float most;
    float sum;
    softmax_scales(lanes, z, inside && mode == SOFTMAX_ALL ? experts : 0u, &most, &sum);
    if (mode != SOFTMAX_ALL) {
        slot_scales(z, expert_indices + slots, experts, chosen, mode, &most, &sum);
    }
    float mean = 0.0f;
    for (uint j = 0u; j < chosen; j++) {
        float q = slot_weight(chosen_logit(z, expert_indices[slots + j], experts), mode, most, sum);
        mean = fma_rn(dweights[slots + j] * scale, q, mean);
    }
    for (uint e = lane; inside && e < experts; e += LANES) {
        uint found = chosen;
        for (uint j = 0u; j < chosen; j++) {
            found = expert_indices[slots + j] == e ? j : found;
        }
        float dz = 0.0f;
        if (found < chosen || mode == SOFTMAX_ALL) {
            float q = slot_weight(z[e], mode, most, sum);
            float g = found < chosen ? dweights[slots + found] * scale : 0.0f;
            float inner = mode == SIGMOID_EACH ? g : g - mean;
            dz = (mode <= SOFTMAX_ALL ? q : q * isobit_sigmoid(-z[e])) * inner;
        }
        dlogits[token * experts + e] = dz;
    }
}

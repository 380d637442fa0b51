#!/usr/bin/env python3
"""A second implementation of docs/numerics.md, and whether it gives the same bits.

Needs Python 3 and numpy. From the repository root:

    tools/second_implementation.py                   every case, half a minute
    tools/second_implementation.py --only attention  one op
    tools/second_implementation.py --verbose         also the name of every case that differs

The arithmetic below is written from docs/numerics.md alone; it shares no code with the crates. Every case of
crates/conformance/golden/reference.txt is computed again from the parameters in its name, on inputs drawn as
crates/conformance/src/data.rs draws them, and its digest compared with the file's. The answers that the document itself
gives are compared too. Prints a line per op; the exit code is 1 if anything differs or nothing was compared.
"""
import argparse, ast, math, pathlib, re, struct, sys, time
import numpy as np

F, D, U, W = np.float32, np.float64, np.uint32, np.uint64
NAN = U(0x7FC00000)
np.seterr(all="ignore")


# ------------------------------------------------------------------ ground rules
def bits(x): return np.asarray(x, F).view(U)
def flt(u): return np.asarray(u, U).view(F)
def words(text): return [flt(int(word, 16)) for word in text.split()]

def fma(a, b, c):
    """Rounded once: the product is exact in float64; the sum is rounded to odd there, then to nearest in float32."""
    product, c = np.multiply(a, b, dtype=D), np.asarray(c, D)
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    u = np.asarray(total).view(np.int64)
    adjust = (lost != 0) & np.isfinite(total) & (u & 1 == 0)
    step = np.where((lost > 0) == (total > 0), 1, -1)
    return np.where(adjust, u + step, u).view(D).astype(F)

def blocks(n, size): return [(first, min(first + size, n)) for first in range(0, n, size)]
def rows_of(row_starts): return list(zip(row_starts, row_starts[1:]))


# ------------------------------------------------------------------ sums
def lane_sum(p, q=None):
    """Over the last axis; with q, of fma(p, q, .)."""
    shape = np.broadcast_shapes(np.shape(p), np.shape(q) if q is not None else ())
    p = np.broadcast_to(np.asarray(p, F), shape)
    q = None if q is None else np.broadcast_to(q, shape)
    lanes = np.zeros(shape[:-1] + (32,), F)
    for first, last in blocks(shape[-1], 32):
        part = lanes[..., : last - first]
        part[...] = part + p[..., first:last] if q is None else fma(p[..., first:last], q[..., first:last], part)
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]

def sum_over_tokens(g, row_starts, step):
    """`step(t, s)` is the block's sum s after token t."""
    for start, end in rows_of(row_starts):
        for first, last in blocks(end - start, 128):
            s = np.zeros_like(g)
            for t in range(start + first, start + last):
                s = step(t, s)
            g = g + s
    return g


# ------------------------------------------------------------------ slices and the slice product
LIMIT = {"X2": F(32512), "X3": F(8323072)}
DIVISOR = {"X2": F(2032), "X3": F(32512)}

def cut(x, profile):
    """Slices of the last axis as one group: arrays of whole numbers from high to low, and the scale."""
    largest = np.abs(x).max(axis=-1, initial=F(0))
    zero, finite = largest < F(2.0**-100), np.isfinite(largest)
    multiplier = np.where(zero | ~finite, F(0), LIMIT[profile] / largest)[..., None]
    scale = np.where(finite, np.where(zero, F(0), largest / DIVISOR[profile]), F(np.nan))
    q = np.where(multiplier == 0, F(0), np.rint(x * multiplier)).astype(np.int64)
    parts = []
    for _ in range(1 if profile == "X2" else 2):
        high = (q + 128) >> 8
        parts.append(q - 256 * high)
        q = high
    return [part.astype(D) for part in [q] + parts[::-1]], scale

def value(a, b):
    """Chunk values of rows of `a` with rows of `b`. The sums are whole numbers below 2**53: exact in float64."""
    dot = lambda i, j: a[i] @ b[j].T
    if len(a) == 2:
        return (256 * dot(0, 0) + (dot(0, 1) + dot(1, 0))).astype(F)
    s1, s2, s3 = dot(0, 0), dot(0, 1) + dot(1, 0), dot(0, 2) + dot(1, 1) + dot(2, 0)
    return fma(s1.astype(F), F(65536), fma(s2.astype(F), F(256), s3.astype(F)))

def transposed(parts, first, last): return [part[first:last].T for part in parts]

def product_forward(x, weight, profile):
    w, scale = weight
    acc = np.zeros((len(x), len(scale)), F)
    for first, last in blocks(x.shape[1], 512):
        a, sx = cut(x[:, first:last], profile)
        acc = fma(value(a, [part[:, first:last] for part in w]), sx[:, None], acc)
    return acc * scale

def product_grad_input(dy, weight, profile, acc):
    w, scale = weight
    d = dy * scale
    for first, last in blocks(d.shape[1], 512):
        a, sd = cut(d[:, first:last], profile)
        acc = fma(value(a, transposed(w, first, last)), sd[:, None], acc)
    return acc

def product4_value(a, d):
    """Values of the slices of rows with rows of whole numbers."""
    sums = [part @ d.T for part in a]
    if len(a) == 2:
        return (256 * sums[0] + sums[1]).astype(F)
    s1, s2, s3 = (s.astype(F) for s in sums)
    return fma(s1, F(65536), fma(s2, F(256), s3))

def product4_forward(x, weight, profile):
    """`weight`: order of the channels, starts of the groups, whole numbers [n, place], sigma [group, n]."""
    order, starts, d, sigma = weight
    acc = np.zeros((len(x), len(d)), F)
    x = x[:, order]
    for first, last in blocks(x.shape[1], 512):
        a, sx = cut(x[:, first:last], profile)
        for g, (start, end) in enumerate(rows_of(starts)):
            start, end = max(start, first), min(end, last)
            if start < end:
                v = product4_value([part[:, start - first:end - first] for part in a], d[:, start:end])
                acc = fma(v, sx[:, None] * sigma[g], acc)
    return acc

def product4_grad_input(dy, weight, profile, acc):
    order, starts, d, sigma = weight
    acc = acc.copy()
    for g, (start, end) in enumerate(rows_of(starts)):
        channels = order[start:end]
        for first, last in blocks(dy.shape[1], 512):
            a, sf = cut((dy * sigma[g])[:, first:last], profile)
            v = product4_value(a, d[first:last, start:end].T)
            acc[:, channels] = fma(v, sf[:, None], acc[:, channels])
    return acc

def product_grad_weight(dy, x, row_starts, profile, dw):
    for start, end in rows_of(row_starts):
        for first, last in blocks(end - start, 512):
            tokens = slice(start + first, start + last)
            (a, sd), (b, sx) = cut(dy[tokens].T, profile), cut(x[tokens].T, profile)
            dw = fma(value(a, b), sd[:, None] * sx[None, :], dw)
    return dw


# ------------------------------------------------------------------ elementary functions
SHIFT, LOG2E = F(12583166), flt(0x3FB8AA3B)
LN2_HIGH, LN2_LOW = words("3f317200 35bfbe8e")
ONE, TWO, HALF, ZERO = F(1), F(2), F(0.5), F(0)

def horner(v, lowest_first):
    p = lowest_first[-1]
    for next_one in lowest_first[-2::-1]:
        p = fma(p, v, next_one)
    return p

def clamp(x, limit):
    r = np.where(x > -F(limit), x, -F(limit))
    return np.where(r < F(limit), r, F(limit))

def canonical(bad, y): return flt(np.where(bad, NAN, bits(y)))

def scaled(p, t):
    half = bits(t) >> U(1)
    rest = bits(t) - half
    return p * flt(half << U(23)), flt(rest << U(23))

def exp_scaled(x):
    x = clamp(x, 150)
    t = fma(x, LOG2E, SHIFT)
    n = t - SHIFT
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x))
    return scaled(horner(r, [ONE, ONE] + words("3efffffe 3e2aaa49 3d2aac58 3c091cc7 3ab526b0")), t)

def exp_value(x):
    near, far = exp_scaled(x)
    return near * far

def exp(x): return canonical(np.isnan(x), exp_value(x))

def exp2(x):
    c = clamp(x, 200)
    t = c + SHIFT
    f = c - (t - SHIFT)
    near, far = scaled(horner(f, [ONE] + words("3f317218 3e75fdee 3d6357be 3c1d96f0 3aaf8417 3920b5a9")), t)
    return canonical(np.isnan(x), near * far)

def ln_normal(x, exponent, tail):
    o = bits(x) - U(0x3F2AAAAB)
    k = ((o.view(np.int32) >> 23) + exponent).astype(F)
    f = flt((o & U(0x7FFFFF)) + U(0x3F2AAAAB)) - ONE
    p = horner(f, words("3eaaaaab be7fff8c 3e4ccbf7 be2acbc6 3e1275b7 bdf9d816 3ddc8f7d be03615d 3df4e8c5"))
    curve = (f * f) * fma(p, f, -HALF)
    base = k * LN2_HIGH
    total = base + f
    lost = f - (total - base)
    return total + (fma(k, LN2_LOW, curve) + (lost + tail))

def ln(x):
    x = np.asarray(x, F)
    y = np.where(x < F(2.0**-126), ln_normal(x * F(2**23), -23, ZERO), ln_normal(x, 0, ZERO))
    y = np.where(x == F(np.inf), F(np.inf), np.where(x == 0, -F(np.inf), y))
    return canonical((x < 0) | np.isnan(x), y)

def sine_or_cosine(x, cosine_wanted):
    table = np.array([0, 0xA2F9836E, 0x4E441529, 0xFC2757D1, 0xF534DDC0, 0xDB629599, 0x3C439041, 0xFE5163AB], U)
    a = bits(x) & U(0x7FFFFFFF)
    e = a >> U(23)
    position = np.where(e > 120, e - U(120), U(0))
    w, s = position >> U(5), position & U(31)
    w0, w1, w2 = (((table[w + i] << s) | ((table[w + i + 1] >> U(1)) >> (U(31) - s))).astype(W) for i in range(3))
    m = ((a & U(0x7FFFFF)) | U(0x800000)).astype(W)
    p = ((m * w0) << W(32)) + m * w1 + ((m * w2) >> W(32))
    quadrant = (p + W(2**61)) >> W(62)
    r64 = (p - (quadrant << W(62))).view(np.int64)
    upper = (r64 >> 40).astype(F) * F(2.0**-22)
    middle = ((r64 >> 18) & 0x3FFFFF).astype(F) * F(2.0**-44)
    lower = (r64 & 0x3FFFF).astype(F) * F(2.0**-62)
    pi_high, pi_low = words("3fc90fdb b33bbd2e")
    turn = upper + middle
    lost = (middle - (turn - upper)) + lower
    product = turn * pi_high
    tail = fma(lost, pi_high, fma(turn, pi_low, fma(turn, pi_high, -product)))
    r = product + tail
    low = tail - (r - product)
    small = a <= U(0x3F490FDA)
    r, low = np.where(small, flt(a), r), np.where(small, ZERO, low)
    q = np.where(small, W(0), quadrant) + W(cosine_wanted)
    z = r * r
    sine = r + fma(r * z, horner(z, words("be2aaaab 3c0888ba b9502cac 363e17a6")), low)
    c = horner(z, words("3d2aaaa5 bab60615 37ccf482"))
    error, half = fma(r, r, -z), HALF * z
    top = ONE - half
    lost = (ONE - top) - half
    slope = fma(r, low, HALF * error)
    cosine = top + (fma(z * z, c, lost) - slope)
    v = bits(np.where(q & W(1) == 0, sine, cosine)) ^ ((q & W(2)).astype(U) << U(30))
    if not cosine_wanted:
        v = v ^ (bits(x) & U(0x80000000))
    return canonical(a >= U(0x7F800000), flt(v))

def with_sign_of(x, y): return flt(bits(y) | (bits(x) & U(0x80000000)))

def tanh(x):
    a = np.abs(x)
    z = a * a
    small = fma(a * z, horner(z, words("beaaaaaa 3e08883d bd5cf8c4 3cb1d2a8 bc062f68 3b0d140b")), a)
    large = ONE - TWO / (exp_value(a + a) + ONE)
    return canonical(np.isnan(x), with_sign_of(x, np.where(a < F(0.625), small, large)))

def over(high, low, e):
    d = ONE + e
    dropped = e - (d - ONE)
    q = high / d
    rem = fma(-q, dropped, fma(-q, d, high) + low)
    return fma(rem, fma(d, -HALF, flt(0x3FBA827A)), q)

def near_far(b, x):
    near, far = exp_scaled(-np.abs(b))
    return np.where(x < 0, near, ONE), np.where(x < 0, far, ONE), near * far

def sigmoid(x):
    near, far, e = near_far(x, x)
    return canonical(np.isnan(x), over(near, ZERO, e) * far)

def silu(x):
    b = clamp(x, 128)
    near, far, e = near_far(b, x)
    high = b * near
    low = fma(b, near, -high)
    y = over(high, low, e) * far
    return canonical(np.isnan(x), with_sign_of(x, np.where(x > 128, x, y)))

def silu_grad(x):
    b = clamp(x, 128)
    near, far, e = near_far(b, x)
    s = over(near, ZERO, e)
    t = over(np.where(x < 0, ONE, e), ZERO, e)
    return canonical(np.isnan(x), (s * fma(b, t, ONE)) * far)

def softplus(x):
    e = exp_value(-np.abs(x))
    d = ONE + e
    lost = e - (d - ONE)
    return canonical(np.isnan(x), np.where(x > 0, x, ZERO) + ln_normal(d, 0, lost / d))

def rsqrt(x):
    y = ONE / np.sqrt(x)
    return canonical(np.isnan(y), y)

ELEMENTARY = dict(exp=exp, exp2=exp2, ln=ln, sin=lambda x: sine_or_cosine(x, 0), cos=lambda x: sine_or_cosine(x, 1),
                  tanh=tanh, sigmoid=sigmoid, silu=silu, silu_grad=silu_grad, softplus=softplus, rsqrt=rsqrt)


# ------------------------------------------------------------------ random numbers, casts, digests
def mix64(z):
    z = np.asarray(z, W)
    z = (z ^ (z >> W(30))) * W(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> W(27))) * W(0x94D049BB133111EB)
    return z ^ (z >> W(31))

def philox(c0, c1, c2, c3, key):
    """Arrays of counters to an array [..., 4] of words; 32-bit numbers are held in 64 bits."""
    low = W(0xFFFFFFFF)
    c = [np.asarray(x, W) for x in np.broadcast_arrays(c0, c1, c2, c3)]
    k0, k1 = W(key[0]), W(key[1])
    for _ in range(10):
        first, third = W(0xD2511F53) * c[0], W(0xCD9E8D57) * c[2]
        c = [(third >> W(32)) ^ c[1] ^ k0, third & low, (first >> W(32)) ^ c[3] ^ k1, first & low]
        k0, k1 = (k0 + W(0x9E3779B9)) & low, (k1 + W(0xBB67AE85)) & low
    return np.stack(c, axis=-1)

def philox_key(seed, purpose):
    key = int(mix64(mix64(seed) + W(purpose)))
    return key & 0xFFFFFFFF, key >> 32

def dropout_threshold(p): return min(int(np.rint(D(p) * 2.0**32)), 2**32 - 1)

DIGEST_KEY = philox(np.arange(257), 0, 0, 0, (0x49534F42, 0x44475354)).reshape(-1).astype(U)

def digest(data):
    block = np.frombuffer(data + bytes(-len(data) % 4096), "<u4").reshape(-1, 1024)
    even, odd, k = block[:, 0::2], block[:, 1::2], DIGEST_KEY
    pairs = lambda o: (even + k[o : 1024 + o : 2]).astype(W) * (odd + k[1 + o : 1025 + o : 2]).astype(W)
    h0, h1 = (pairs(o).sum(axis=1, dtype=W) for o in (0, 4))
    a = mix64(h0 + mix64(np.arange(1, len(block) + 1, dtype=W)))
    c1 = mix64(h1 + a)
    c0 = mix64(a + c1)
    d0 = mix64(c0.sum(dtype=W) ^ mix64(W(len(data) + 1)))
    d1 = mix64(c1.sum(dtype=W) + d0)
    return int(d0), int(d1)

def text_of(d): return "%016x%016x" % d

def to_bf16(x):
    u = bits(x)
    rounded = (u + U(0x7FFF) + ((u >> U(16)) & U(1))) >> U(16)
    return np.where(np.isnan(x), U(0x7FC0), rounded).astype(np.uint16)

def to_f16(x):
    return np.where(np.isnan(x), np.uint16(0x7E00), np.asarray(x, F).astype(np.float16).view(np.uint16))

def from_bf16(u):
    y = flt(u.astype(U) << U(16))
    return canonical(np.isnan(y), y)

def from_f16(u):
    y = u.view(np.float16).astype(F)
    return canonical(np.isnan(y), y)

def stored(x, form):
    return {"F32": lambda: x, "Bf16": lambda: from_bf16(to_bf16(x)), "F16": lambda: from_f16(to_f16(x))}[form]()


# ------------------------------------------------------------------ optimizer and norm
def adamw_coefficients(step, lr, beta1, beta2, eps, weight_decay):
    c1, c2 = 1 - math.pow(beta1, step), 1 - math.pow(beta2, step)
    return [F(x) for x in (1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, lr / c1, 1 / math.sqrt(c2), eps)]

def adamw(p, m, v, g, coefficients):
    decay, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_sqrt_c2, eps = coefficients
    p = p * decay
    m = fma(one_minus_beta1, g - m, m)
    v = fma(one_minus_beta2, g * g, beta2 * v)
    d = fma(np.sqrt(v), inv_sqrt_c2, eps)
    return fma(-step_size, m / d, p), m, v

def sum_squares(x):
    if len(x) == 0:
        return F(0)
    level = np.array([lane_sum(x[a:b], x[a:b]) for a, b in blocks(len(x), 4096)])
    while len(level) > 1:
        level = np.array([lane_sum(level[a:b]) for a, b in blocks(len(level), 4096)])
    return level[0]


# ------------------------------------------------------------------ attention
class Head:
    """One query head over one span: slices, visibility and scores."""

    def __init__(self, q, k, v, window, scale, profile):
        self.profile, self.scale = profile, scale
        (self.q, self.sq), (self.k, self.sk), (self.v, self.sv) = (cut(x, profile) for x in (q, k, v))
        i, j = np.arange(len(k) - len(q), len(k))[:, None], np.arange(len(k))[None, :]
        self.visible = (j <= i) & (True if window is None else j + window > i)
        scale2 = F(D(scale) * 1.4426950408889634)
        self.z = value(self.q, self.k) * ((self.sq * scale2)[:, None] * self.sk)

    def forward(self):
        n, width = len(self.sq), self.v[0].shape[1]
        m, l, o = np.full(n, -np.inf, F), np.zeros(n, F), np.zeros((n, width), F)
        for first, last in blocks(len(self.sk), 128):
            seen = self.visible[:, first:last]
            any_seen = seen.any(axis=1)
            z = np.where(seen, self.z[:, first:last], -F(np.inf))
            top = np.maximum(m, z.max(axis=1))
            a = exp2(m - top)
            p = np.where(seen, exp2(z - top[:, None]), ZERO)
            w, u = cut(p * self.sv[first:last], self.profile)
            new_o = fma(value(w, transposed(self.v, first, last)), u[:, None], o * a[:, None])
            l = np.where(any_seen, fma(l, a, lane_sum(p)), l)
            o = np.where(any_seen[:, None], new_o, o)
            m = np.where(any_seen, top, m)
        return o * (ONE / l)[:, None], m + (ln(l) * LOG2E)

    def backward(self, d_o, o, lse):
        do, sdo = cut(d_o, self.profile)
        p = np.where(self.visible, exp2(self.z - lse[:, None]), ZERO)
        g = p * fma(value(do, self.v), sdo[:, None] * self.sv, -lane_sum(d_o, o)[:, None])
        g = np.where(self.visible, g, ZERO)
        return (self.gather(g * (self.sk * self.scale), self.visible, self.k),
                self.gather((g * (self.sq * self.scale)[:, None]).T, self.visible.T, self.q),
                self.gather((p * sdo[:, None]).T, self.visible.T, do))

    def gather(self, weights, visible, parts):
        acc = np.zeros((len(weights), parts[0].shape[1]), F)
        for first, last in blocks(weights.shape[1], 128):
            seen = visible[:, first:last]
            w, u = cut(np.where(seen, weights[:, first:last], ZERO), self.profile)
            new = fma(value(w, transposed(parts, first, last)), u[:, None], acc)
            acc = np.where(seen.any(axis=1)[:, None], new, acc)
        return acc


# ------------------------------------------------------------------ router
def in_order(scores, candidates):
    """Larger first, NaN last, smaller index first among equals."""
    return sorted(candidates, key=lambda e: (bool(np.isnan(scores[e])), 0.0 if np.isnan(scores[e]) else -D(scores[e]), e))

def router_choose(z, bias, chosen, scoring, groups, kept_groups):
    scores = z if scoring == "Softmax" else sigmoid(z)
    scores = scores if bias is None else scores + bias
    size, of_groups = len(z) // groups, []
    for first in range(0, len(z), size):
        best = in_order(scores, range(first, first + size))
        of_groups.append(scores[best[0]] + scores[best[1]] if size > 1 else scores[first])
    kept = in_order(of_groups, range(groups))[:kept_groups]
    return in_order(scores, [e for e in range(len(z)) if e // size in kept])[:chosen]

def probabilities(z):
    """Of all experts: the last axis."""
    powers = exp(z - z.max(axis=-1, keepdims=True))
    return powers / lane_sum(powers)[..., None]

def chain(x):
    total = F(0)
    for value in x:
        total = total + value
    return total

def router_weights(z, choices, scoring, renormalise, _scale):
    """Before the scale."""
    chosen = z[choices]
    if scoring == "Sigmoid":
        scores = sigmoid(chosen)
        return scores / (chain(scores) + F(1e-20)) if renormalise else scores
    if not renormalise:
        return probabilities(z)[choices]
    powers = exp(chosen - chosen.max())
    return powers / chain(powers)

def router_backward(dweights, z, choices, scoring, renormalise, scale):
    q, g, mean = router_weights(z, choices, scoring, renormalise, scale), dweights * scale, F(0)
    for j in range(len(q)):
        mean = fma(g[j], q[j], mean)
    dz = np.zeros_like(z)
    if scoring == "Softmax":
        if not renormalise:
            dz = probabilities(z) * (F(0) - mean)
        dz[choices] = q * (g - mean)
    else:
        dz[choices] = (q * sigmoid(-z[choices])) * (g - mean if renormalise else g)
    return dz


# ------------------------------------------------------------------ gated delta rule
def series(start, terms):
    """The document's chain: s = fma(a, b, s) over the terms, in their order."""
    for a, b in terms:
        start = fma(a, b, start)
    return start

class DeltaChunk:
    """A chunk of one value head: q, k [n, key width], v [n, value width], g, beta [n]; S is the state before it."""

    def __init__(self, q, k, v, g, beta, S):
        self.q, self.k, self.beta, self.S = q, k, beta, S
        n, width = k.shape
        a, nothing = exp(g), np.zeros((n, n), F)
        self.A, self.G = np.zeros(n, F), np.zeros((n, n), F)
        for i in range(n):
            self.A[i] = self.A[i - 1] * a[i] if i else a[0]
            self.G[i, :i], self.G[i, i] = self.G[i - 1, :i] * a[i], ONE
        self.E = self.G[n - 1]
        self.kk = series(nothing, ((k[:, None, d], k[None, :, d]) for d in range(width)))
        self.qk = series(nothing, ((q[:, None, d], k[None, :, d]) for d in range(width)))
        self.M, self.P = self.kk * self.G, self.qk * self.G
        zeros = np.zeros_like(v)
        self.Y = fma(-self.A[:, None], self.over_state(k, S, zeros), v)
        self.delta = np.zeros_like(v)
        for i in range(n):
            self.Y[i] = series(self.Y[i], ((-self.M[i, j], self.delta[j]) for j in range(i)))
            self.delta[i] = beta[i] * self.Y[i]
        self.o = self.A[:, None] * self.over_state(q, S, zeros)
        for i in range(n):
            self.o[i] = series(self.o[i], ((self.P[i, j], self.delta[j]) for j in range(i + 1)))
        outer = ((self.E[i] * k[i][:, None], self.delta[i]) for i in range(n))
        self.after = series(self.A[n - 1] * S, outer)

    @staticmethod
    def over_state(rows, state, zeros):
        return series(zeros, ((rows[:, d : d + 1], state[d]) for d in range(len(state))))

    def backward(self, d_o, T):
        """dq, dk, dv, dg, dbeta and the gradient of the state before; T is that of the state after."""
        q, k, S, A, E, delta = self.q, self.k, self.S, self.A, self.E, self.delta
        n, width, columns = len(k), k.shape[1], range(d_o.shape[1])
        d_delta, dY = E[:, None] * self.over_state(k, T, np.zeros_like(d_o)), np.zeros_like(d_o)
        for j in reversed(range(n)):
            d_delta[j] = series(d_delta[j], ((self.P[i, j], d_o[i]) for i in range(j, n)))
            d_delta[j] = series(d_delta[j], ((-self.M[i, j], dY[i]) for i in range(n - 1, j, -1)))
            dY[j] = self.beta[j] * d_delta[j]
        nothing, narrow = np.zeros((n, n), F), np.zeros((n, width), F)
        Wq = series(nothing, ((d_o[:, None, c], delta[None, :, c]) for c in columns)) * self.G
        Wk = np.tril(series(nothing, ((dY[:, None, c], delta[None, :, c]) for c in columns)) * self.G, -1)
        both = np.where(np.tri(n, dtype=bool), Wk, Wk.T)
        fq = A[:, None] * series(narrow, ((d_o[:, c : c + 1], S[:, c]) for c in columns))
        fk = -(A[:, None] * series(narrow, ((dY[:, c : c + 1], S[:, c]) for c in columns)))
        fe = E[:, None] * series(narrow, ((delta[:, c : c + 1], T[:, c]) for c in columns))
        dq, dk = fq.copy(), fk + fe
        for i in range(n):
            dq[i] = series(dq[i], ((Wq[i, j], k[j]) for j in range(i + 1)))
            dk[i] = series(dk[i], ((Wq[l, i], q[l]) for l in range(i, n)))
            dk[i] = series(dk[i], ((-both[i, j], k[j]) for j in range(n)))
        z = lane_sum(series(np.zeros(len(columns), F), zip(T, S)))
        x = fma(Wq, self.qk, -(Wk * self.kk))
        w, h, dg = np.zeros(n, F), A[n - 1] * z, np.zeros(n, F)
        reads, ends = lane_sum(q, fq) + lane_sum(k, fk), lane_sum(k, fe)
        e = np.zeros(n, F)
        for m in range(1, n):
            e[m] = e[m - 1] + ends[m - 1]
        for m in reversed(range(n)):
            w[:m] = w[:m] + x[m, :m]
            h = h + reads[m]
            dg[m] = (lane_sum(w[:m]) + h) + e[m]
        T = series(A[n - 1] * T, ((A[i] * q[i][:, None], d_o[i]) for i in range(n)))
        T = series(T, ((-(A[i] * k[i][:, None]), dY[i]) for i in range(n)))
        return dq, dk, dY, dg, lane_sum(d_delta, self.Y), T


# ------------------------------------------------------------------ inputs, as crates/conformance/src/data.rs draws them
EDGES = np.array([0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, -1.1754944e-38, 1e-20, -1e-20, 1e15, -1e15, 1, -1, 0.5, 1.5], F)

class Random:
    def __init__(self, seed):
        self.state = (seed * 0x9E3779B97F4A7C15 % 2**64) ^ 0xD1B54A32D192ED03

    def words(self, n):
        z = W(self.state) + np.arange(1, n + 1, dtype=W) * W(0x9E3779B97F4A7C15)
        self.state = (self.state + n * 0x9E3779B97F4A7C15) % 2**64
        return mix64(z)

    def below(self, limit):
        return int(self.words(1)[0] % W(limit))

    def uniform(self):
        return F(self.words(1)[0] >> W(40)) / F(2**24)

    def f32s(self, kind, n):
        if kind == "Zeros":
            return np.zeros(n, F)
        if kind == "Edges":
            first, second = self.words(2 * n).reshape(n, 2).T
            ties = ((second % W(65025)).astype(F) - F(32512)) / F(65024)
            return np.where(first % W(3) == 0, EDGES[second % W(14)], ties)
        per = 4 if kind == "Plain" else 5
        draws = self.words(per * n).reshape(n, per)
        u = (draws[:, -4:] >> W(40)).astype(F) / F(2**24)
        normal = ((((u[:, 0] + u[:, 1]) + u[:, 2]) + u[:, 3]) - F(2)) * F(1.7320508)
        if kind == "Plain":
            return normal
        size = F(1e-3) * (F(4) ** (draws[:, 0] % W(8)).astype(F))
        return normal * size * np.where(np.arange(n) % 37 == 5, F(1000), F(1))


# ------------------------------------------------------------------ cases: outputs as (name, array) from parameters
def product_case(segments, row_starts, n, k, profile, format, kind):
    m, count = segments[-1], len(segments) - 1
    weights = stored(Random(1).f32s(kind, count * n * k), format).reshape(count, n, k)
    random = Random(m + 2)
    x, dy = random.f32s(kind, m * k).reshape(m, k), random.f32s(kind, m * n).reshape(m, n)
    dx = [np.zeros((m, k), F), random.f32s("Plain", m * k).reshape(m, k)]
    dw = random.f32s("Plain", count * n * k).reshape(count, n, k)
    y = np.zeros((m, n), F)
    for e, (start, end) in enumerate(rows_of(segments)):
        if start == end:
            continue
        rows, weight = slice(start, end), cut(weights[e], profile)
        y[rows] = product_forward(x[rows], weight, profile)
        for old in dx:
            old[rows] = product_grad_input(dy[rows], weight, profile, old[rows])
        starts = [t for t in row_starts if start <= t <= end]
        dw[e] = product_grad_weight(dy, x, starts, profile, dw[e])
    return 2 * [("y", y), ("dx", dx[0]), ("dx accumulated", dx[1]), ("dw", dw)]

def product4_weight(random, n, k, group_size, shuffled, profile, scale_kind, zero):
    group_size = group_size or k
    groups = -(-k // group_size)
    words = random.words(k // 8 * n).reshape(k // 8, 1, n)
    q = (words >> (4 * np.arange(8, dtype=W))[None, :, None] & W(15)).reshape(k, n).astype(D)
    zeros = (random.words(groups * n) % W(17)).reshape(groups, n).astype(D)
    zeros = zeros if zero is None else np.full_like(zeros, zero)
    if scale_kind == "Plain":
        uniform = (random.words(groups * n) >> W(40)).astype(F) / F(2**24)
        scales = from_f16(to_f16(F(0.01) + F(0.03) * uniform))
    else:
        scales = random.f32s(scale_kind, groups * n)
    group_of = np.arange(k) // group_size
    if shuffled:
        for last in range(k - 1, 0, -1):
            other = random.below(last + 1)
            group_of[[last, other]] = group_of[[other, last]]
    order = np.argsort(group_of, kind="stable")
    starts = [int((group_of < g).sum()) for g in range(groups + 1)]
    sigma = scales.reshape(groups, n) * F(2.0 ** (-4 if profile == "X2" else -8))
    return order, starts, (q - zeros[group_of])[order].T, sigma

def product4_case(segments, n, k, group_size, shuffled, profile, kind, scale_kind, zero=None):
    m, random = segments[-1], Random(segments[-1] + 4)
    weights = [product4_weight(random, n, k, group_size, shuffled, profile, scale_kind, zero) for _ in segments[1:]]
    x, dy = random.f32s(kind, m * k).reshape(m, k), random.f32s(kind, m * n).reshape(m, n)
    dx = [np.zeros((m, k), F), random.f32s("Plain", m * k).reshape(m, k)]
    y = np.zeros((m, n), F)
    for (start, end), weight in zip(rows_of(segments), weights):
        if start == end:
            continue
        rows = slice(start, end)
        y[rows] = product4_forward(x[rows], weight, profile)
        for old in dx:
            old[rows] = product4_grad_input(dy[rows], weight, profile, old[rows])
    return [("y", y), ("dx", dx[0]), ("dx accumulated", dx[1])]

def symmetric4_case(of, zero):
    return product4_case(**of, zero=zero)

def linear_case(rows, n, k, rank, bias, profile, kind):
    """Bias after the product, then the adapter, whose short values `u` are given; backward they are `dy·B`."""
    random, m, alpha = Random(3), rows, F(0.75)
    w, x = random.f32s(kind, n * k).reshape(n, k), random.f32s(kind, m * k).reshape(m, k)
    dy = random.f32s(kind, m * n).reshape(m, n)
    added = random.f32s(kind, n) if bias else None
    old = random.f32s("Plain", m * k).reshape(m, k)
    u, up = random.f32s(kind, m * rank).reshape(m, rank), random.f32s(kind, n * rank).reshape(n, rank)
    down = random.f32s(kind, rank * k).reshape(rank, k)
    weight = cut(w, profile)
    y = product_forward(x, weight, profile)
    y = y + added if bias else y
    dx = [product_grad_input(dy, weight, profile, acc) for acc in (np.zeros_like(old), old)]

    def expanded(acc, u, factor):
        s = np.zeros_like(acc)
        for j in range(rank):
            s = fma(u[:, j : j + 1], factor[j], s)
        return fma(alpha, s, acc) if rank else acc

    low, of_x = (lane_sum(values[:, None, :], factor) for values, factor in ((dy, up.T), (x, down)))
    return [("y", expanded(y, u, up.T)), ("dx", expanded(dx[0], low, down)),
            ("dx accumulated", expanded(dx[1], low, down)), ("low", low), ("low again", low), ("u", of_x)]

def grouped_low_rank_case(segments, row_starts, rank, width, layout, alpha, kind):
    tokens, count, random = segments[-1], len(segments) - 1, Random(segments[-1])
    x, u = random.f32s(kind, tokens * width).reshape(-1, width), random.f32s(kind, tokens * rank).reshape(-1, rank)
    major = layout == "RankMajor"
    lies = lambda v: v.reshape(count, rank, width) if major else v.reshape(count, width, rank).transpose(0, 2, 1)
    factors = lies(random.f32s(kind, count * rank * width))
    y = random.f32s("Plain", tokens * width).reshape(-1, width)
    dfactors = lies(random.f32s("Plain", count * rank * width)).copy()
    contracted, scaled_u = np.zeros_like(u), F(alpha) * u
    for e, (start, end) in enumerate(rows_of(segments)):
        if start == end:
            continue
        rows, factor = slice(start, end), factors[e]
        s = np.zeros_like(y[rows])
        for j in range(rank):
            s = fma(u[rows, j : j + 1], factor[j], s)
        contracted[rows], y[rows] = lane_sum(x[rows, None, :], factor), fma(F(alpha), s, y[rows])
        starts = [t for t in row_starts if start <= t <= end]
        dfactors[e] = sum_over_tokens(dfactors[e], starts, lambda t, s: fma(scaled_u[t][:, None], x[t], s))
    return [("u", contracted), ("y", y), ("dfactor", dfactors if major else dfactors.transpose(0, 2, 1))]

def low_rank_case(row_starts, rank, width, layout, alpha, kind):
    return grouped_low_rank_case([0, row_starts[-1]], row_starts, rank, width, layout, alpha, kind)

def bias_case(row_starts, width, kind):
    tokens, random = row_starts[-1], Random(row_starts[-1])
    y = random.f32s(kind, tokens * width).reshape(-1, width) + random.f32s(kind, width)
    dbias, dy = random.f32s("Plain", width), random.f32s(kind, tokens * width).reshape(-1, width)
    return [("y", y), ("dbias", sum_over_tokens(dbias, row_starts, lambda t, s: s + dy[t]))]

def residual_case(length, factor, kind):
    random = Random(length)
    a, b = random.f32s(kind, length), random.f32s(kind, length)
    return [("sum", a + b), ("scaled", a * F(factor))]

def scale_case(length, factor, kind):
    return [("x", Random(length).f32s(kind, length) * F(factor))]

def swiglu_case(length, kind):
    random = Random(length)
    gate, up, dh = (random.f32s(kind, length) for _ in range(3))
    return [("h", silu(gate) * up), ("dgate", (dh * up) * silu_grad(gate)), ("dup", dh * silu(gate))]

def rms_norm_case(row_starts, width, zero_centred, kind):
    tokens, random = row_starts[-1], Random(row_starts[-1])
    x, dy = random.f32s(kind, tokens * width).reshape(-1, width), random.f32s(kind, tokens * width).reshape(-1, width)
    weight = random.f32s(kind, width)
    w = ONE + weight if zero_centred else weight
    inv = ONE / np.sqrt(lane_sum(x, x) / F(width) + F(1e-6))
    n, g = x * inv[:, None], dy * w
    m = lane_sum(g, n) / F(width)
    d = fma(-n, m[:, None], g) * inv[:, None]
    old, dweight = random.f32s("Plain", tokens * width).reshape(-1, width), random.f32s("Plain", width)
    dweight = sum_over_tokens(dweight, row_starts, lambda t, s: s + dy[t] * n[t])
    return [("y", n * w), ("inverse", inv), ("dx", d), ("dx accumulated", old + d), ("dweight", dweight)]

def rope_case(shape, kind):
    tokens, heads, width, half = shape["tokens"], shape["heads"], shape["head_width"], shape["rotary_width"] // 2
    length, first = tokens * heads * width, shape.get("offset", 0)
    step, apart = (2, 1) if shape.get("interleaved") else (1, half)
    random = Random(length)
    cos, sin = (random.f32s(kind, 19 * half).reshape(19, half) for _ in range(2))
    positions = [random.below(19) for _ in range(tokens)]
    x, dx = (random.f32s(kind, length).reshape(tokens, heads, width) for _ in range(2))
    c, s = cos[positions][:, None], sin[positions][:, None]
    at = first + step * np.arange(half)
    for y, forward in ((x, True), (dx, False)):
        a, b = y[..., at].copy(), y[..., at + apart].copy()
        y[..., at] = fma(a, c, -(b * s) if forward else b * s)
        y[..., at + apart] = fma(b, c, a * s if forward else -(a * s))
    return [("x", x), ("dx", dx)]

def column_copy_case(shape, kind):
    tokens, groups, width, source, target = (shape[key] for key in ("tokens", "groups", "width", "from", "to"))
    random = Random(tokens * source["row"])
    x = random.f32s(kind, tokens * source["row"]).reshape(tokens, source["row"])
    y = random.f32s(kind, tokens * target["row"]).reshape(tokens, target["row"])
    for g in range(groups):
        part = lambda m, place: m[:, place["offset"] + g * place["stride"] :][:, :width]
        adds = shape["mode"] == "Add" or (g > 0 and target["stride"] == 0)
        part(y, target)[:] = part(y, target) + part(x, source) if adds else part(x, source)
    return [("y", y)]

def gate_case(shape, kind):
    tokens, width, per_token = shape["tokens"], shape["width"], shape["per_token"]
    random = Random(tokens * width)
    x, dy = (random.f32s(kind, tokens * width).reshape(tokens, width) for _ in range(2))
    columns = 1 if per_token else width
    s = sigmoid(random.f32s(kind, tokens * columns).reshape(tokens, columns))
    d = lane_sum(dy, x)[:, None] if per_token else dy * x
    return [("y", x * s), ("dx", dy * s), ("dg", d * (s * (ONE - s)))]

def conv1d_case(row_starts, starts, channels, kernel, kind):
    tokens, documents = starts[-1], len(starts) - 1
    random = Random(tokens * channels + kernel)
    x, dy = (random.f32s(kind, tokens * channels).reshape(tokens, channels) for _ in range(2))
    weight = random.f32s(kind, channels * kernel).reshape(channels, kernel)
    history = random.f32s(kind, documents * (kernel - 1) * channels).reshape(documents, kernel - 1, channels)
    dweight = random.f32s("Plain", channels * kernel).reshape(channels, kernel)
    c, continued, dx = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    before = np.zeros(tokens, int)
    for document, (start, end) in enumerate(rows_of(starts)):
        before[start:end] = np.arange(end - start)
        longer = np.concatenate([history[document], x[start:end]])
        for t in range(start, end):
            for j in range(kernel):
                if t - (kernel - 1) + j >= start:
                    c[t] = fma(weight[:, j], x[t - (kernel - 1) + j], c[t])
                continued[t] = fma(weight[:, j], longer[t - start + j], continued[t])
    dc = dy * silu_grad(c)
    for start, end in rows_of(starts):
        for t in range(start, end):
            for u in range(t, min(t + kernel, end)):
                dx[t] = fma(weight[:, kernel - 1 - (u - t)], dc[u], dx[t])
    for j in range(kernel):
        back = kernel - 1 - j
        step = lambda t, s: fma(dc[t], x[t - back], s) if before[t] >= back else s
        dweight[:, j] = sum_over_tokens(dweight[:, j], row_starts, step)
    return [("y", silu(c)), ("y continued", silu(continued)), ("dx", dx), ("dx alone", dx), ("dweight", dweight)]

def l2_norm_case(tokens, width, scaled, kind):
    random = Random(tokens * width)
    x, dy = (random.f32s(kind, tokens * width).reshape(tokens, width) for _ in range(2))
    factor = ONE / np.sqrt(F(width)) if scaled else ONE
    inv = rsqrt(lane_sum(x, x) + F(1e-6))
    n, g = x * inv[:, None], dy * factor
    return [("y", n * factor), ("inverse", inv), ("dx", fma(-n, lane_sum(g, n)[:, None], g) * inv[:, None])]

def decay_case(row_starts, heads, kind):
    tokens, random = row_starts[-1], Random(row_starts[-1] * heads)
    a, b, dg, dbeta = (random.f32s(kind, tokens * heads).reshape(tokens, heads) for _ in range(4))
    a_log, dt_bias = random.f32s("Plain", heads), random.f32s(kind, heads)
    da_log, ddt_bias = random.f32s("Plain", heads), random.f32s("Plain", heads)
    u, rate, beta = a + dt_bias, exp(a_log), sigmoid(b)
    g = -(rate * softplus(u))
    da, db = -((dg * rate) * sigmoid(u)), dbeta * (beta * (ONE - beta))
    da_log = sum_over_tokens(da_log, row_starts, lambda t, s: fma(dg[t], g[t], s))
    ddt_bias = sum_over_tokens(ddt_bias, row_starts, lambda t, s: s + da[t])
    return [("g", g), ("beta", beta), ("da", da), ("db", db), ("da again", da), ("db again", db), ("da_log", da_log),
            ("ddt_bias", ddt_bias)]

def gated_norm_case(row_starts, width, kind):
    tokens, random = row_starts[-1], Random(row_starts[-1] * width)
    h, z, dy = (random.f32s(kind, tokens * width).reshape(tokens, width) for _ in range(3))
    weight, dweight = random.f32s("Plain", width), random.f32s("Plain", width)
    inv = ONE / np.sqrt(lane_sum(h, h) / F(width) + F(1e-6))
    n, d = h * inv[:, None], dy * silu(z)
    g = d * weight
    m = lane_sum(g, n) / F(width)
    dh, dz = fma(-n, m[:, None], g) * inv[:, None], (dy * (weight * n)) * silu_grad(z)
    dweight = sum_over_tokens(dweight, row_starts, lambda t, s: s + d[t] * n[t])
    return [("y", (weight * n) * silu(z)), ("inverse", inv)] + 2 * [("dh", dh), ("dz", dz)] + [("dweight", dweight)]

def attention_case(spans, heads, kv_heads, key_width, value_width, window, profile, kind):
    queries, keys = max(s["queries"][1] for s in spans), max(s["keys"][1] for s in spans)
    random = Random(key_width * 1000 + queries)
    q = random.f32s(kind, queries * heads * key_width).reshape(queries, heads, key_width)
    k = random.f32s(kind, keys * kv_heads * key_width).reshape(keys, kv_heads, key_width)
    v = random.f32s(kind, keys * kv_heads * value_width).reshape(keys, kv_heads, value_width)
    d_o = random.f32s("Plain" if kind == "Edges" else kind, queries * heads * value_width).reshape(queries, heads, -1)
    trains = all(s["queries"][1] - s["queries"][0] == s["keys"][1] - s["keys"][0] for s in spans)
    o, lse = np.zeros_like(d_o), np.zeros((queries, heads), F)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    scale, group = ONE / np.sqrt(F(key_width)), heads // kv_heads
    for span in spans:
        qs, ks = slice(*span["queries"]), slice(*span["keys"])
        for h in range(heads):
            g = h // group
            head = Head(q[qs, h], k[ks, g], v[ks, g], window, scale, profile)
            o[qs, h], lse[qs, h] = head.forward()
            if trains:
                dq[qs, h], dk_h, dv_h = head.backward(d_o[qs, h], o[qs, h], lse[qs, h])
                first = h % group == 0
                dk[ks, g] = dk_h if first else dk[ks, g] + dk_h
                dv[ks, g] = dv_h if first else dv[ks, g] + dv_h
    return [("o", o), ("lse", lse)] + ([("dq", dq), ("dk", dk), ("dv", dv)] if trains else [])

def delta_rule_inputs(random, tokens, key_heads, value_heads, key_width, value_width, kind):
    def unit_rows(scale):
        x = random.f32s(kind, tokens * key_heads * key_width).reshape(-1, key_width)
        squares = np.zeros(len(x), F)
        for d in range(key_width):
            squares = squares + x[:, d] * x[:, d]
        return (x * (scale / (np.sqrt(squares) + F(1e-6)))[:, None]).reshape(tokens, key_heads, key_width)

    def decay():
        if kind == "Zeros":
            return ZERO
        if kind == "Edges" and random.below(2) == 0:
            return F([0.0, -0.0, -1e-45, -1e-20, -1e-3, -20, -90, -200][random.below(8)])
        return (F(-0.1) if random.below(8) > 0 else F(-3)) * random.uniform()

    def strength():
        if kind == "Edges" and random.below(4) == 0:
            return F([0, 1, 1e-30, 0.5][random.below(4)])
        return ZERO if kind == "Zeros" else random.uniform()

    scalars = tokens * value_heads
    q, k = unit_rows(ONE / np.sqrt(F(key_width))), unit_rows(ONE)
    v = random.f32s(kind, scalars * value_width).reshape(tokens, value_heads, value_width)
    g, beta = (np.array([draw() for _ in range(scalars)], F).reshape(tokens, value_heads) for draw in (decay, strength))
    d_o = random.f32s("Plain" if kind == "Edges" else kind, v.size).reshape(v.shape)
    return q, k, v, g, beta, d_o

def delta_rule_case(row_starts, key_heads, value_heads, key_width, value_width, initial, kind):
    tokens, documents = row_starts[-1], len(row_starts) - 1
    random = Random(key_width * 1000 + tokens)
    q, k, v, g, beta, d_o = delta_rule_inputs(random, tokens, key_heads, value_heads, key_width, value_width, kind)
    states = np.zeros((documents, value_heads, key_width, value_width), F)
    if initial:
        states = random.f32s("Plain" if kind == "Edges" else kind, states.size).reshape(states.shape)
    last, o, dv = states.copy(), np.zeros_like(v), np.zeros_like(v)
    dq, dk, dg, dbeta = np.zeros_like(q), np.zeros_like(k), np.zeros_like(g), np.zeros_like(g)
    for (document, (start, end)), head in ((d, h) for d in enumerate(rows_of(row_starts)) for h in range(value_heads)):
        key_head, S, chunks = head // (value_heads // key_heads), states[document, head], []
        for first, final in blocks(end - start, 64):
            at = slice(start + first, start + final)
            chunk = DeltaChunk(q[at, key_head], k[at, key_head], v[at, head], g[at, head], beta[at, head], S)
            chunks.append((at, chunk))
            o[at, head], S = chunk.o, chunk.after
        last[document, head], T = S, np.zeros_like(S)
        for at, chunk in [] if initial else reversed(chunks):
            own_q, own_k, dv[at, head], dg[at, head], dbeta[at, head], T = chunk.backward(d_o[at, head], T)
            begins = head % (value_heads // key_heads) == 0
            dq[at, key_head] = own_q if begins else dq[at, key_head] + own_q
            dk[at, key_head] = own_k if begins else dk[at, key_head] + own_k
    grads = [("dq", dq), ("dk", dk), ("dv", dv), ("dg", dg), ("dbeta", dbeta)]
    return [("o", o), ("final_state", last)] + ([] if initial else grads)

def embedding_case(tokens, vocabulary, width, distinct, kind):
    random = Random(tokens)
    table = random.f32s(kind, vocabulary * width).reshape(vocabulary, width)
    step = (vocabulary - 1) // (max(distinct, 2) - 1)
    ids = [random.below(distinct) * step for _ in range(tokens)]
    dtable = random.f32s("Plain", vocabulary * width).reshape(vocabulary, width)
    dy = random.f32s(kind, tokens * width).reshape(tokens, width)
    for t, row in enumerate(ids):
        dtable[row] = dtable[row] + dy[t]
    return [(f"y {form.lower()}", stored(table, form)[ids]) for form in ("F32", "Bf16", "F16")] + [("dtable", dtable)]

def head_loss_case(row_starts, hidden, vocabulary, profile, format, kind, ignored, with_dhead, poison):
    tokens = row_starts[-1]
    random = Random(tokens * 1009 + vocabulary * 31 + hidden)
    h = random.f32s(kind, tokens * hidden).reshape(tokens, hidden)
    head = stored(random.f32s(kind, vocabulary * hidden), format).reshape(vocabulary, hidden)
    if kind == "Plain":
        h = h * F(0.1)
    if poison is not None:
        h[poison, 0] = np.nan
    labels = []
    for token in range(tokens):
        label = random.below(vocabulary)
        skip = {"None": lambda: False, "Some": lambda: random.below(3) == 0,
                "Prompt": lambda: token < tokens * 3 // 4, "All": lambda: True}[str(ignored)]()
        labels.append(-100 if skip else label)
    labels = np.array(labels)
    weight, dhead = random.f32s("Plain", tokens), random.f32s("Plain", vocabulary * hidden).reshape(head.shape)

    w = cut(head, profile)
    z = product_forward(h, w, profile)
    tops, sums = [], []
    for first, last in blocks(vocabulary, 512):
        tops.append(np.fmax.reduce(z[:, first:last], axis=1, initial=-F(np.inf)))
        sums.append(lane_sum(exp(z[:, first:last] - tops[-1][:, None])))
    tops, sums = np.stack(tops, 1), np.stack(sums, 1)
    m = tops.max(axis=1)
    lse = m + ln(lane_sum(sums * exp(tops - m[:, None])))
    taken = labels == -100
    loss = np.where(taken, ZERO, lse - z[np.arange(tokens), np.where(taken, 0, labels)])
    best = (z == m[:, None]).argmax(axis=1).astype(U)

    one_hot = (np.arange(vocabulary) == labels[:, None]).astype(F)
    dz = np.where(taken[:, None], ZERO, (exp(z - lse[:, None]) - one_hot) * weight[:, None])
    dh = np.where(taken[:, None], ZERO, product_grad_input(dz, w, profile, np.zeros_like(h)))
    outputs = [("loss", loss), ("lse", lse), ("best", best), ("dh", dh)]
    # The document leaves the NaN of a gradient open; the suite's is the canonical one.
    outputs = [(name, canonical(np.isnan(x), x) if x.dtype == F else x) for name, x in outputs]
    return outputs + ([("dhead", product_grad_weight(dz, h, row_starts, profile, dhead))] if with_dhead else [])

def router_case(tokens, experts, chosen, scoring, renormalise, scale, groups, kept_groups, biased, poison, kind):
    random = Random(tokens + experts)
    logits = random.f32s(kind, tokens * experts)
    if poison:
        for i, what in enumerate(random.words(logits.size) % W(8)):
            logits[i] = [np.nan, np.nan, np.inf, -np.inf][what] if what < 4 else logits[i]
    logits = logits.reshape(tokens, experts)
    bias = random.f32s("Plain", experts) if biased else None
    p = (scoring, renormalise, F(scale))
    choices = np.array([router_choose(z, bias, chosen, scoring, groups, kept_groups) for z in logits], U)
    if poison:
        return [("choices", choices)]
    dweights, outputs = random.f32s(kind, tokens * chosen).reshape(tokens, chosen), [("choices", choices)]
    for slots in (choices, (choices + U(1)) % U(experts)):
        weights = np.array([router_weights(z, c, *p) * F(scale) for z, c in zip(logits, slots)], F)
        dlogits = np.array([router_backward(d, z, c, *p) for d, z, c in zip(dweights, logits, slots)], F)
        outputs += [("weights", weights), ("dlogits", dlogits)]
    return outputs

def balance_case(row_starts, experts, kind):
    tokens, rows = row_starts[-1], len(row_starts) - 1
    random = Random(tokens + experts)
    logits = random.f32s(kind, tokens * experts).reshape(tokens, experts)
    share = random.f32s(kind, rows * experts).reshape(rows, experts)
    dlogits = random.f32s("Plain", tokens * experts).reshape(tokens, experts)
    probability, sums = probabilities(logits) if tokens else logits, np.zeros((rows, experts), F)
    for r, (start, end) in enumerate(rows_of(row_starts)):
        sums[r] = sum_over_tokens(sums[r], [start, end], lambda t, s: s + probability[t])
        mean = lane_sum(probability[start:end], share[r])[:, None]
        dlogits[start:end] = fma(probability[start:end], share[r] - mean, dlogits[start:end])
    return [("sums", sums), ("dlogits", dlogits)]

def combine_case(tokens, slots, width, experts, kind):
    random, rows = Random(tokens + width), tokens * slots
    choices = (random.words(rows) % W(experts)).astype(np.int64)
    order = np.argsort(choices, kind="stable")  # ascending (expert, token, slot)
    places = np.argsort(order).reshape(tokens, slots)
    x = random.f32s(kind, tokens * width).reshape(tokens, width)
    matrix, weights = random.f32s(kind, rows * width).reshape(rows, width), random.f32s(kind, rows).reshape(tokens, slots)
    old = random.f32s("Plain", tokens * width).reshape(tokens, width)
    outputs = [("gathered", x[order // slots])]
    for name, weighted in (("y", True), ("y without weights", False)):
        for acc in (np.zeros_like(old), old):
            for j in range(slots):
                row = matrix[places[:, j]]
                acc = fma(weights[:, j : j + 1], row, acc) if weighted else acc + row
            outputs.append((name, acc))
    drows, dweights = np.zeros_like(matrix), np.zeros_like(weights)
    for j in range(slots):
        drows[places[:, j]] = weights[:, j : j + 1] * x
        dweights[:, j] = lane_sum(x, matrix[places[:, j]])
    return outputs + [("drows", drows), ("dweights", dweights)]

def dropout_case(row_starts, width, probability, kind):
    length = row_starts[-1] * width
    x = Random(length).f32s(kind, length)
    word = np.zeros(length, W)
    key = philox_key(11, 1)
    for row, (start, end) in enumerate(rows_of(row_starts)):
        element = np.arange((end - start) * width, dtype=W)
        four = philox(element // W(4), 7 + row, 5, 3, key)
        word[start * width : end * width] = four[element.astype(int), (element % W(4)).astype(int)]
    return [("y", np.where(word >= W(dropout_threshold(probability)), x * F(1 / (1 - probability)), ZERO))]

def adamw_case(length, step, settings, kind):
    random = Random(length)
    p, m, v, g = (random.f32s(kind, length) for _ in range(4))
    return list(zip(("parameter", "m", "v"), adamw(p, m, np.abs(v), g, adamw_coefficients(step, **settings))))

def sum_squares_case(length, kind):
    pattern = Random(length).f32s(kind, min(length, 10007))
    return [("sum", np.array([sum_squares(np.resize(pattern, length))]))]

def digest_case(length):
    w = Random(length).words(length).astype(U)
    pair = lambda data: np.array(digest(data.tobytes()), W)
    return [("u32", pair(w)), ("f32", pair(w)), ("bf16", pair(w.astype(np.uint16))), ("u8", pair(w.astype(np.uint8)))]

def narrow_case(x):
    return [("bf16", to_bf16(x)), ("f16", to_f16(x)), ("f32", x)]  # float32 to float32 is a copy

def cast_case(length, name):
    if name == "16-bit patterns":
        every = np.arange(2**16, dtype=np.uint16)
        return [("from bf16", from_bf16(every)), ("from f16", from_f16(every))]
    if name == "boundaries":
        some = np.arange(0, 2**16, 7).astype(np.uint16)
        wide = bits(some.view(np.float16).astype(F))
        wide = np.where(np.isnan(flt(wide)), wide | U(0x400000), wide)  # the suite's input has quiet NaN
        edges = np.stack([some.astype(U) << U(16) | U(0x8000), wide | U(0x1000)], 1)
        return narrow_case(flt((edges[:, :, None] + np.array([-1, 0, 1]).astype(U)).reshape(-1)))
    if name == "patterns":
        return narrow_case(flt(np.arange(0, 2**32, 99991).astype(U)))
    return narrow_case(Random(2).f32s({1: "Plain", 33: "Outliers", 4097: "Edges", 0: "Zeros"}[length], length))

def elementary_arguments():
    """The arguments of the elementary cases come from one generator, function after function."""
    random = Random(1)
    sets = {}
    for name in ELEMENTARY:
        inside = (random.words(256 * 2 * 4) & W(0x7FFFFF)).astype(U).reshape(256, 2, 4)
        ends = np.broadcast_to(np.array([0, 1, 0x3FFFFF, 0x400000, 0x7FFFFE, 0x7FFFFF], U), (256, 2, 6))
        high = (np.arange(256, dtype=U) << U(23))[:, None] | np.array([0, 2**31], U)
        sets[name, 5120] = flt((high[:, :, None] | np.concatenate([ends, inside], 2)).reshape(-1))
        sets[name, 2003] = random.f32s("Plain", 2003) * F(8)
    return sets


# ------------------------------------------------------------------ the suite
CASES = dict(ProductCase=product_case, Product4Case=product4_case, Symmetric4Case=symmetric4_case,
             LowRankCase=low_rank_case, GroupedLowRankCase=grouped_low_rank_case, BiasCase=bias_case,
             RouterCase=router_case, BalanceCase=balance_case, CombineCase=combine_case, ResidualCase=residual_case,
             SwigluCase=swiglu_case, RmsNormCase=rms_norm_case, RopeCase=rope_case, AttentionCase=attention_case,
             EmbeddingCase=embedding_case, HeadLossCase=head_loss_case, DropoutCase=dropout_case, AdamWCase=adamw_case,
             SumSquaresCase=sum_squares_case, DigestCase=digest_case, ColumnCopyCase=column_copy_case, GateCase=gate_case,
             Conv1dCase=conv1d_case, L2NormCase=l2_norm_case, DecayCase=decay_case, GatedNormCase=gated_norm_case,
             DeltaRuleCase=delta_rule_case, LinearCase=linear_case, ScaleCase=scale_case)

def parameters(text):
    """`A { b: 1, c: D { e: 0..2 }, f: Some(3) }` as a dict."""
    text = re.sub(r"(\d+)\.\.(\d+)", r"(\1, \2)", text)
    text = re.sub(r"Some\((\d+)\)", r"\1", text)
    text = re.sub(r"\w+ \{", "{", text)
    constants = {"true": "True", "false": "False", "None": "None"}
    return ast.literal_eval(re.sub(r"\b[A-Za-z_]\w*", lambda found: constants.get(found[0], f'"{found[0]}"'), text))

ARGUMENTS = elementary_arguments()

def outputs_of(name):
    """The op of a case and what computes its outputs; nothing does if this program has no such case."""
    if found := re.fullmatch(r"(\w+) of (\d+) arguments", name):
        function, count = found[1], int(found[2])
        return "elementary", lambda: [("y", ELEMENTARY[function](ARGUMENTS[function, count]))]
    if found := re.fullmatch(r"casts of (all|\d+) (.*)", name):
        return "cast", lambda: cast_case(None if found[1] == "all" else int(found[1]), found[2])
    struct_name = name.split(" ")[0]
    op = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", struct_name.removesuffix("Case")).lower().replace("adam_w", "adamw")
    if struct_name not in CASES:
        return op, None
    return op, lambda: CASES[struct_name](**parameters(name))

ELEMENTS = {"float32": "f32", "uint32": "u32", "uint64": "u64"}

def case_digest(outputs):
    data = b""
    for name, x in outputs:
        element = name if x.dtype == np.uint16 else ELEMENTS[x.dtype.name]
        for text in (name, element):
            data += struct.pack("<Q", len(text)) + text.encode()
        raw = bits(x) if x.dtype == F else x
        data += struct.pack("<Q", raw.size) + raw.reshape(-1).astype("<u8").tobytes()
    return text_of(digest(data))

def quantised_at_load(x):
    """Scale, zero point and integers of one group."""
    x = np.asarray(x, F)
    low, high = min(F(0), x.min()), max(F(0), x.max())
    span = high - low
    if span == 0:
        return np.float16(0), 0, np.zeros(len(x), np.uint8)
    zero = np.rint(F(F(15) * -low) / span)
    best = None
    for j in range(12):
        half = np.float16(span / F(14 + j / 2))
        scale = F(half)
        inverse = F(0) if scale == 0 else F(1) / scale
        steps = np.minimum(np.maximum(np.rint(x * inverse), -zero), F(15) - zero)
        error = x - steps * scale
        total = lane_sum((error * error) * (error * error))
        if best is None or total < best[0]:
            best = total, half, steps
    return best[1], int(zero), (best[2] + zero).astype(np.uint8)

def known_answers(document):
    """(what, got, wanted) for every answer that the document states."""
    every = flt((np.arange(65536, dtype=np.int64) * 65537).astype(U))
    for name, wanted in re.findall(r"^\| `(\w+)` \| `(\w{32})` \|$", document, re.M):
        yield name, text_of(digest(ELEMENTARY[name](every).tobytes())), wanted
    coefficients = adamw_coefficients(1, 1e-3, 0.9, 0.999, 1e-8, 0.1)
    got = adamw(*(np.array([x], F) for x in (0.5, 0, 0, -0.25)), coefficients)
    yield "adamw", " ".join("%08x" % bits(x)[0] for x in got), "3f003e42 bccccccd 3883126f"
    for seed, wanted in ((0, "3a2b148a dbd23897"), (1, "2974aeeb ef30b01c"), (2**64 - 1, "d7f09386 806eb2d2")):
        yield f"key of {seed}", "%08x %08x" % philox_key(seed, 2), wanted
    data = b""
    for g in range(100):
        i = np.arange(24 if g % 10 == 9 else 64, dtype=W)
        low = mix64(W(1 + 64 * g) + i).astype("<u8").view(np.uint8).reshape(-1, 8)[:, :4]
        x = (low.sum(1, dtype=np.int64) - 510 + 16 * (g % 5)).astype(F) * (F(0.001) * F(1 + g % 7))
        scale, zero, integers = quantised_at_load(x)
        data += scale.tobytes() + bytes([zero]) + integers.tobytes()
    wanted = re.search(r"the digest of all of them is\n`(\w{32})`", document)[1]
    yield "weights quantised at load", text_of(digest(data)), wanted
    wanted = "302e82ba b58f6c58 81645f08 b03f9df1 f0a5da50"
    yield "digest key", " ".join("%08x" % DIGEST_KEY[j] for j in (0, 1, 2, 3, 1027)), wanted
    some = mix64(np.arange(1, 5001, dtype=W)).astype(np.uint8).tobytes()
    for data, wanted in ((b"", "7ab40e090f363a7d71cac37448049ce4"), (some[:1], "bb34472167558857e03f99127ad2bfb5"),
                         (some, "1b210a3aa5a8ec093caf3e42a58d731e"),
                         (struct.pack("<ffI", 1, -2.5, 0x7FC00000), "6b4f27f9539186896a47e0f226b6d1f9")):
        yield f"digest of {len(data)} bytes", text_of(digest(data)), wanted

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="only ops whose name contains this")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parent.parent
    tally = {}

    def count(op, what, seconds=0.0):
        row = tally.setdefault(op, dict(equal=0, different=0, skipped=0, seconds=0.0))
        row[what] += 1
        row["seconds"] += seconds

    if not options.only or options.only in "stated":
        for what, got, wanted in known_answers((root / "docs/numerics.md").read_text()):
            count("stated", "equal" if got == wanted else "different")
            if got != wanted and options.verbose:
                print(f"stated {what}: {got}, wanted {wanted}")
    for line in (root / "crates/conformance/golden/reference.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        wanted, name = line.split(" ", 1)
        op, outputs = outputs_of(name)
        if options.only and options.only not in op:
            continue
        start = time.monotonic()
        same = outputs and case_digest(outputs()) == wanted
        count(op, "skipped" if not outputs else "equal" if same else "different", time.monotonic() - start)
        if not same and options.verbose:
            print("different" if outputs else "skipped", name)

    print(f"{'op':<12} {'compared':>8} {'equal':>6} {'different':>9} {'skipped':>7} {'seconds':>7}")
    tally["all"] = {key: sum(row[key] for row in tally.values()) for key in ("equal", "different", "skipped", "seconds")}
    for op, row in tally.items():
        compared = row["equal"] + row["different"]
        print(f"{op:<12} {compared:>8} {row['equal']:>6} {row['different']:>9} {row['skipped']:>7} {row['seconds']:>7.1f}")
    total = tally["all"]
    return 1 if total["different"] or not total["equal"] else 0

if __name__ == "__main__":
    sys.exit(main())

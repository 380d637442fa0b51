//! Product with 4-bit weights (`docs/numerics.md`, "Product with 4-bit weights"): GPTQ layers and
//! MXFP4 experts, frozen, never expanded in memory.
//!
//! `W[n, k] = scale[g, n]·d[n, k]` with `g` the group of channel `k` and `d` a whole number:
//! `q − z` from −16 to 15, or twice an e2m1 float, from −12 to 12. The channels are taken in the
//! *order* of their groups (stable), and all chunks and group chunks are counted along that order.
//! `σ = scale·2⁻⁴` (profile x2) or `scale·2⁻⁸` (x3).
//! Two forms, beside the slice product's:
//! - forward `y[m, n] = Σ_k x[m, k]·W[n, k]`: `x` sliced per (row, 512 ordered channels). A *group
//!   chunk* is the intersection of a chunk and a group; in ascending order of group chunks
//!   `acc = fma(v, scale_x·σ[g, n], acc)`, the product of both factors rounded; `y = acc`.
//! - input gradient `dx[m, k] = Σ_n dy[m, n]·W[n, k]`: for the group of `k`, `dy[m, n]·σ[g, n]`
//!   (rounded once) is sliced per (row, 512 of n); per chunk `acc = fma(v, scale, acc)`, starting
//!   from zero or from `dx` when accumulating.
//!
//! `v` comes from exact sums of the left operand's slices with `d`: x2
//! `v = f32(256·Σ hi·d + Σ lo·d)`, one rounding; x3
//! `v = fma(f32(Σ hi·d), 65536, fma(f32(Σ mid·d), 256, f32(Σ lo·d)))`. Groups of weights (experts)
//! as in the slice product.

use crate::backend::{F32, Length, Memory, Shaped, Workspaces};
use crate::op::{Op, Output, Product, lengths};
use half::f16;
use isobit_numerics::e2m1;
use isobit_numerics::slices::{CHUNK, Profile};
use std::ops::Range;

/// Channels per packed word; group sizes are multiples of it.
pub const CHANNELS_PER_WORD: usize = 8;
/// Largest zero point: 15, or 16 for files that store it minus one.
pub const ZERO_MAX: u8 = 16;
/// In place of all zero points of a weight: its four bits are e2m1 floats.
pub const E2M1: u8 = 255;

/// Scales in their stored format, which is kept.
#[derive(Clone, Copy, Debug)]
pub enum Scales<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
}

/// Properties of weights that are known before their data: enough to allocate them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizedShape {
    pub count: usize,
    /// Outputs of the layer.
    pub n: usize,
    /// Inputs of the layer.
    pub k: usize,
    /// Channels per group; the last group may have fewer.
    pub group_size: usize,
    /// Whether all scales are float16.
    pub half_scales: bool,
    /// How many of the weights have channels that are not stored in group order.
    pub ordered: usize,
    /// The zero point, if all groups and outputs share one: a symmetric file.
    pub zero: Option<u8>,
}

impl QuantizedShape {
    /// The common shape of these weights.
    pub fn of(weights: &[Quantized]) -> Self {
        let (n, k, group_size) = weights.first().map_or((0, 0, CHANNELS_PER_WORD), |w| (w.n, w.k, w.group_size));
        let half_scales = weights.iter().all(|weight| matches!(weight.scales, Scales::F16(_)));
        let ordered = weights.iter().filter(|weight| !weight.group_of.is_sorted()).count();
        let mut zeros = weights.iter().flat_map(|weight| weight.zeros).copied();
        let zero = zeros.next().filter(|first| zeros.all(|zero| zero == *first));
        Self { count: weights.len(), n, k, group_size, half_scales, ordered, zero }
    }

    /// Whether the four bits are e2m1 floats.
    pub fn is_e2m1(&self) -> bool {
        self.zero == Some(E2M1)
    }

    pub fn groups(&self) -> usize {
        self.k.div_ceil(self.group_size)
    }

    /// Where each group's channels start in group order, followed by the end.
    pub fn starts(&self) -> Vec<usize> {
        (0..=self.groups()).map(|group| (group * self.group_size).min(self.k)).collect()
    }

    /// Panics unless `weight` matches this shape.
    pub(crate) fn expect(&self, weight: &Quantized) {
        weight.check().unwrap_or_else(|what| panic!("a weight that was not checked: {what}"));
        assert_eq!((weight.n, weight.k, weight.group_size), (self.n, self.k, self.group_size), "weights of one shape");
        assert!(self.zero.is_none_or(|zero| weight.zeros.iter().all(|one| *one == zero)), "the announced zero point");
        assert!(!self.half_scales || matches!(weight.scales, Scales::F16(_)), "the announced format of scales");
        assert!(self.is_e2m1() || !weight.zeros.contains(&E2M1), "floats are announced");
    }

    pub(crate) fn check(&self, p: &Product) {
        p.check();
        assert_eq!((self.count, self.n, self.k), (p.weights(), p.n, p.k), "quantised weight");
    }
}

/// A loader's type that can be viewed as a quantised weight.
pub trait AsQuantized {
    fn quantized(&self) -> Quantized<'_>;
}

impl AsQuantized for Quantized<'_> {
    fn quantized(&self) -> Quantized<'_> {
        *self
    }
}

/// One quantised weight in host memory, as a loader provides it.
#[derive(Clone, Copy, Debug)]
pub struct Quantized<'a> {
    /// Outputs of the layer.
    pub n: usize,
    /// Inputs of the layer: a multiple of eight.
    pub k: usize,
    /// Channels per group: a multiple of eight. The last group may have fewer.
    pub group_size: usize,
    /// `[k / 8, n]`: channel `8·r + j` of output `n` is in the bits `4·j..4·j + 4` of word
    /// `(r, n)`.
    pub words: &'a [i32],
    /// `[groups, n]`, each at most 16, or all [`E2M1`].
    pub zeros: &'a [u8],
    /// `[groups, n]`
    pub scales: Scales<'a>,
    /// `[k]`: the group of each channel.
    pub group_of: &'a [u32],
}

impl Scales<'_> {
    pub fn len(&self) -> usize {
        match self {
            Self::F32(scales) => scales.len(),
            Self::F16(scales) => scales.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn get(&self, index: usize) -> f32 {
        match self {
            Self::F32(scales) => scales[index],
            Self::F16(scales) => isobit_numerics::cast::f16_to_f32(scales[index].to_bits()),
        }
    }
}

impl Quantized<'_> {
    /// Describes the first error, if any. Backends take only weights that pass.
    pub fn check(&self) -> Result<(), String> {
        let Self { n, k, group_size, .. } = *self;
        if k % CHANNELS_PER_WORD != 0 {
            return Err(format!("{k} input channels are not a multiple of {CHANNELS_PER_WORD}"));
        }
        if group_size == 0 || group_size % CHANNELS_PER_WORD != 0 {
            return Err(format!("groups of {group_size} channels are not a multiple of {CHANNELS_PER_WORD}"));
        }
        let groups = k.div_ceil(group_size);
        let places = groups.checked_mul(n).ok_or_else(|| format!("{groups} groups of {n} outputs are too many"))?;
        let words = (k / CHANNELS_PER_WORD).checked_mul(n).ok_or_else(|| format!("{k} by {n} weights are too many"))?;
        let lengths = [
            ("packed words", self.words.len(), words),
            ("zero points", self.zeros.len(), places),
            ("scales", self.scales.len(), places),
            ("group indices", self.group_of.len(), k),
        ];
        if let Some((what, got, want)) = lengths.into_iter().find(|(_, got, want)| got != want) {
            return Err(format!("{got} {what}, but {want} are needed for {k} inputs, {n} outputs and {groups} groups"));
        }
        let are_floats = self.zeros.iter().all(|&zero| zero == E2M1);
        if let Some(at) = self.zeros.iter().position(|&zero| zero > ZERO_MAX).filter(|_| !are_floats) {
            return Err(format!(
                "zero point {} of group {}, output {}: {ZERO_MAX} at most",
                self.zeros[at],
                at / n,
                at % n
            ));
        }
        if let Some(at) = (0..places).find(|&at| !self.scales.get(at).is_finite()) {
            return Err(format!("the scale of group {}, output {} is not finite", at / n, at % n));
        }
        if let Some(at) = self.group_of.iter().position(|&group| group as usize >= groups) {
            return Err(format!("channel {at} is in group {}, but there are {groups} groups", self.group_of[at]));
        }
        let mut counts = vec![0; groups];
        for &group in self.group_of {
            counts[group as usize] += 1;
        }
        let wanted = |group: usize| group_size.min(k - group * group_size);
        match (0..groups).find(|&group| counts[group] != wanted(group)) {
            None => Ok(()),
            Some(group) => Err(format!("group {group} has {} channels, not {}", counts[group], wanted(group))),
        }
    }

    /// The channels in group order; None if they are stored that way.
    pub fn order(&self) -> Option<Vec<u32>> {
        if self.group_of.is_sorted() {
            return None;
        }
        let mut order: Vec<u32> = (0u32..).take(self.k).collect();
        order.sort_by_key(|&channel| self.group_of[channel as usize]);
        Some(order)
    }

    /// The four bits of a channel (as the file counts it) and output.
    pub fn int4(&self, channel: usize, n: usize) -> u8 {
        let word = self.words[channel / CHANNELS_PER_WORD * self.n + n];
        (word >> (4 * (channel % CHANNELS_PER_WORD)) & 15) as u8
    }

    /// The whole number `d` of a channel and output.
    pub fn number(&self, channel: usize, n: usize) -> i32 {
        let code = self.int4(channel, n);
        match self.zeros[self.group_of[channel] as usize * self.n + n] {
            E2M1 => i32::from(e2m1::TWICE[usize::from(code)]),
            zero => i32::from(code) - i32::from(zero),
        }
    }
}

impl Quantized<'_> {
    /// The channels at positions `8·line..` of the order for output `n`, packed for the kernels:
    /// byte `c` holds the channel at position `c` in its low bits and the one at `c + 4` in its
    /// high bits.
    pub(crate) fn line(&self, order: Option<&[u32]>, line: usize, n: usize) -> u32 {
        let word = match order {
            None => self.words[line * self.n + n] as u32,
            Some(order) => {
                let channels = &order[line * CHANNELS_PER_WORD..][..CHANNELS_PER_WORD];
                let int4 = |channel: u32| u32::from(self.int4(channel as usize, n));
                channels.iter().rev().fold(0, |word, &channel| word << 4 | int4(channel))
            }
        };
        let byte = |c: usize| (word >> (4 * c) & 15 | (word >> (4 * c + 16) & 15) << 4) as u8;
        u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)])
    }
}

/// The intersection of a chunk and a group: ordered channels that share an exact sum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupChunk {
    pub group: usize,
    pub channels: Range<usize>,
}

impl GroupChunk {
    pub fn chunk(&self) -> usize {
        self.channels.start / CHUNK
    }
}

/// The group chunks of groups with these starts, ascending.
pub fn group_chunks(starts: &[usize]) -> Vec<GroupChunk> {
    let mut group_chunks = Vec::new();
    for (group, ends) in starts.windows(2).enumerate() {
        let mut first = ends[0];
        while first < ends[1] {
            let end = ((first / CHUNK + 1) * CHUNK).min(ends[1]);
            group_chunks.push(GroupChunk { group, channels: first..end });
            first = end;
        }
    }
    group_chunks
}

/// The factor that turns a group scale into σ: the power of two that a slice scale leaves to its
/// partner (`Profile::scale_divisor`).
pub const fn sigma_factor(profile: Profile) -> f32 {
    match profile {
        Profile::X2 => 1.0 / 16.0,
        Profile::X3 => 1.0 / 256.0,
    }
}

/// Slices the rows of `x`, each with its channels in the order of its weight.
pub struct Product4Rows<'a, M: Memory> {
    pub rows: &'a mut M::Rows,
    pub x: &'a F32<M>,
    pub w: &'a M::QuantizedWeight,
    pub p: Product<'a>,
}

impl<M: Memory> Op<M> for Product4Rows<'_, M> {
    const NAME: &'static str = "product4_rows";

    fn check(&self) {
        let p = &self.p;
        p.check();
        self.w.shape().check(p);
        p.check_left(self.rows.shape());
        lengths(Self::NAME, &[("x", self.x.len(), p.rows() * p.k)]);
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::Rows(self.rows)]
    }
}

/// `y = x Wᵀ`; overwrites.
pub struct Product4Forward<'a, M: Memory> {
    pub y: &'a mut F32<M>,
    pub x: &'a M::Rows,
    pub w: &'a M::QuantizedWeight,
    pub p: Product<'a>,
}

impl<M: Memory> Op<M> for Product4Forward<'_, M> {
    const NAME: &'static str = "product4_forward";

    fn check(&self) {
        let p = &self.p;
        assert!(!p.accumulate, "the forward product overwrites");
        p.check();
        self.w.shape().check(p);
        p.check_left(self.x.shape());
        lengths(Self::NAME, &[("y", self.y.len(), p.rows() * p.n)]);
    }

    fn multiply_adds(&self) -> usize {
        self.p.multiply_adds()
    }

    fn size(&self) -> [usize; 3] {
        self.p.size()
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.product4(self.w.shape(), &self.p)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.y)]
    }
}

/// `dx = dy W`, or added to `dx`.
pub struct Product4GradInput<'a, M: Memory> {
    pub dx: &'a mut F32<M>,
    pub dy: &'a F32<M>,
    pub w: &'a M::QuantizedWeight,
    pub p: Product<'a>,
}

impl<M: Memory> Op<M> for Product4GradInput<'_, M> {
    const NAME: &'static str = "product4_grad_input";

    fn check(&self) {
        let p = &self.p;
        p.check();
        self.w.shape().check(p);
        lengths(Self::NAME, &[("dx", self.dx.len(), p.rows() * p.k), ("dy", self.dy.len(), p.rows() * p.n)]);
    }

    fn multiply_adds(&self) -> usize {
        self.p.multiply_adds()
    }

    fn size(&self) -> [usize; 3] {
        self.p.size()
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.product4(self.w.shape(), &self.p)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.dx)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantized<'a>(words: &'a [i32], zeros: &'a [u8], scales: &'a [f32], group_of: &'a [u32]) -> Quantized<'a> {
        Quantized { n: 2, k: 16, group_size: 8, words, zeros, scales: Scales::F32(scales), group_of }
    }

    #[test]
    fn what_is_wrong_is_said() {
        let (words, zeros, scales) = ([0; 4], [8; 4], [1.0; 4]);
        let (sorted, mixed) = ([0u32, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [0u32, 1].repeat(8));
        assert_eq!(quantized(&words, &zeros, &scales, &sorted).check(), Ok(()));
        assert_eq!(quantized(&words, &zeros, &scales, &mixed).check(), Ok(()));
        let says = |weight: Quantized, what: &str| {
            let text = weight.check().expect_err("a broken weight");
            assert!(text.contains(what), "{text}");
        };
        says(quantized(&words[..3], &zeros, &scales, &sorted), "3 packed words, but 4 are needed");
        says(quantized(&words, &[8, 17, 8, 8], &scales, &sorted), "zero point 17 of group 0, output 1");
        assert_eq!(quantized(&words, &[E2M1; 4], &scales, &sorted).check(), Ok(()));
        says(quantized(&words, &[E2M1, E2M1, 8, E2M1], &scales, &sorted), "zero point 255 of group 0, output 0");
        says(quantized(&words, &zeros, &[1.0, 1.0, f32::NAN, 1.0], &sorted), "group 1, output 0 is not finite");
        let mut lopsided = sorted;
        lopsided[7] = 1;
        says(quantized(&words, &zeros, &scales, &lopsided), "group 0 has 7 channels, not 8");
        lopsided[7] = 2;
        says(quantized(&words, &zeros, &scales, &lopsided), "channel 7 is in group 2");
        says(Quantized { k: 12, ..quantized(&words, &zeros, &scales, &sorted) }, "12 input channels");
        says(Quantized { group_size: 12, ..quantized(&words, &zeros, &scales, &sorted) }, "groups of 12 channels");
    }

    #[test]
    fn channels_are_ordered_by_group_and_stable() {
        let mixed = [0u32, 1].repeat(8);
        let weight = quantized(&[0x7654_3210, -1, 0, 0], &[8; 4], &[1.0; 4], &mixed);
        assert_eq!(weight.order(), Some(vec![0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]));
        let shape = QuantizedShape::of(&[weight]);
        assert_eq!((shape.starts(), shape.ordered, shape.half_scales), (vec![0, 8, 16], 1, false));
        assert_eq!([weight.int4(3, 0), weight.int4(7, 0), weight.int4(7, 1), weight.int4(9, 0)], [3, 7, 15, 0]);
    }

    #[test]
    fn pieces_end_with_chunks_and_groups() {
        let ranges =
            |starts: &[usize]| -> Vec<_> { group_chunks(starts).into_iter().map(|p| (p.group, p.channels)).collect() };
        assert_eq!(ranges(&[0, 384, 384, 768]), [(0, 0..384), (2, 384..512), (2, 512..768)]);
        assert_eq!(ranges(&[0, 1100]), [(0, 0..512), (0, 512..1024), (0, 1024..1100)]);
        assert_eq!(ranges(&[0, 0]), []);
    }
}

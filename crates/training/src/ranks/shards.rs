//! Shards: in full fine-tuning each rank keeps the optimizer state of a part of every tensor, on
//! its host, and updates that part for all.
//!
//! Shards are cut at the blocks of the sum of squares (`docs/numerics.md`, "Sum of squares and
//! clipping"), so the sums of blocks, in the order of ranks, are those of whole tensors. Addition,
//! scaling and AdamW are elementwise: who computes an element does not show.
#![expect(clippy::float_arithmetic, reason = "the tree's addition and the scaling of gradients, on the host")]

use super::team::Team;
use super::{RankError, RankFailure};
use crate::engine::{Engine, Stored};
use crate::groups::Groups;
use crate::prepare::RunError;
use crate::step::StepError;
use isobit_kernels::Cpu;
use isobit_kernels::backend::Device;
use isobit_kernels::buffer::room;
use isobit_kernels::op::sum_squares::BLOCK;
use isobit_kernels::op::{AdamWTensor, AdamWUpdate, SumSquares};
use isobit_kernels::tensor::F32;
use isobit_models::TrainedTensor;
use isobit_numerics::adamw::Coefficients;
use isobit_numerics::digest::{self, BLOCK_BYTES, Digest, blocks_of_f32};
use isobit_numerics::lanes::sum;
use std::borrow::Cow;
use std::ops::Range;

/// Blocks whose sums are computed together.
const BLOCKS_AT_ONCE: usize = 1024;

/// Consecutive elements of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) tensor: usize,
    pub(super) range: Range<usize>,
}

/// The part of the optimizer that this rank holds.
pub struct Shards {
    cpu: Cpu,
    rank: usize,
    lengths: Vec<usize>,
    /// Of every rank, in the order of tensors and elements.
    pieces: Vec<Vec<Piece>>,
    /// Of this rank's pieces.
    values: Vec<F32<Cpu>>,
    moments: [Vec<F32<Cpu>>; 2],
}

/// The pieces of each rank: equal numbers of blocks, or nearly.
fn cut(lengths: &[usize], ranks: usize) -> Vec<Vec<Piece>> {
    (0..ranks).map(|rank| pieces_of(lengths, ranks, rank)).collect()
}

/// The pieces of a rank.
pub(super) fn pieces_of(lengths: &[usize], ranks: usize, rank: usize) -> Vec<Piece> {
    let total: usize = lengths.iter().map(|length| length.div_ceil(BLOCK)).sum();
    let (blocks, mut first) = (Groups::new(total, ranks).rows_of(rank), 0);
    let mut pieces = Vec::new();
    for (tensor, length) in lengths.iter().enumerate() {
        let end = first + length.div_ceil(BLOCK);
        let (from, to) = (blocks.start.max(first), blocks.end.min(end));
        if from < to {
            pieces.push(Piece { tensor, range: (from - first) * BLOCK..((to - first) * BLOCK).min(*length) });
        }
        first = end;
    }
    pieces
}

impl Shards {
    pub fn new<E: Engine>(cpu: Cpu, engine: &E, team: &Team<'_>) -> Result<Self, StepError> {
        let lengths: Vec<usize> = engine.tensors().iter().map(TrainedTensor::length).collect();
        let pieces = cut(&lengths, team.size());
        let own = &pieces[team.rank()];
        let moments = [(); 2].map(|()| own.iter().map(|piece| cpu.zeros(piece.range.len())).collect());
        let mut shards = Self { values: Vec::new(), moments, rank: team.rank(), lengths, pieces, cpu };
        shards.read_values(engine)?;
        Ok(shards)
    }

    /// Takes the values of this rank's pieces from the engine.
    pub fn read_values<E: Engine>(&mut self, engine: &E) -> Result<(), StepError> {
        let mut values = Vec::new();
        for Piece { tensor, range } in &self.pieces[self.rank] {
            values.push(self.cpu.upload(&engine.read(*tensor, Stored::Value)?[range.clone()]));
        }
        self.values = values;
        Ok(())
    }

    /// Takes this rank's part of a whole moment.
    pub fn write_moment(&mut self, tensor: usize, order: usize, whole: &[f32]) {
        for (piece, moment) in self.pieces[self.rank].iter().zip(&mut self.moments[order]) {
            if piece.tensor == tensor {
                self.cpu.overwrite(moment, &whole[piece.range.clone()]);
            }
        }
    }

    /// The whole moments of every tensor, for rank 0; empty on the others.
    pub fn gather_moments(&self, team: &Team<'_>) -> Result<[Vec<Vec<f32>>; 2], RunError> {
        let mut all = [Vec::new(), Vec::new()];
        for (whole, own) in all.iter_mut().zip(&self.moments) {
            let own: Vec<&[f32]> = own.iter().map(|moment| &moment[..]).collect();
            if !team.is_first() {
                team.send_tensors(0, Ok(own))?;
                continue;
            }
            let mut pieces = vec![own.into_iter().map(Cow::Borrowed).collect::<Vec<_>>()];
            for rank in 1..team.size() {
                let received = team.receive_tensors(rank)?.map_err(RankError::Failed)?;
                pieces.push(received.into_iter().map(Cow::Owned).collect());
            }
            *whole = self.whole(pieces)?;
        }
        Ok(all)
    }

    /// Tensors from the pieces of all ranks.
    pub(super) fn whole(&self, of_ranks: Vec<Vec<Cow<'_, [f32]>>>) -> Result<Vec<Vec<f32>>, RankError> {
        let mut whole: Vec<Vec<f32>> = self.lengths.iter().map(|length| room(*length)).collect();
        for (rank, (pieces, values)) in self.pieces.iter().zip(of_ranks).enumerate() {
            let fits = pieces.iter().map(|piece| piece.range.len()).eq(values.iter().map(|values| values.len()));
            if !fits {
                return Err(RankError::damaged(rank, "its shard has other lengths"));
            }
            // Ranks and their pieces ascend.
            for (piece, values) in pieces.iter().zip(values) {
                whole[piece.tensor].extend_from_slice(&values);
            }
        }
        Ok(whole)
    }

    /// What a rank gets of whole gradients: its pieces, then those of the second part of a tied
    /// table, which is the first tensor.
    pub(super) fn part_of<'p>(&self, rank: usize, parts: &'p [Vec<f32>]) -> Vec<&'p [f32]> {
        let (tied, pieces) = (parts.get(self.lengths.len()), &self.pieces[rank]);
        let own = pieces.iter().map(|piece| &parts[piece.tensor][piece.range.clone()]);
        let of_table = pieces.iter().filter(|piece| piece.tensor == 0);
        let second = of_table.filter_map(|piece| Some(&tied?[piece.range.clone()]));
        own.chain(second).collect()
    }

    /// Adds the parts of a tied table, after the tree: the head's, then the embedding's.
    pub(super) fn combined(&self, mut shard: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
        let second = shard.split_off(self.pieces[self.rank].len().min(shard.len()));
        for (head, embedding) in shard.iter_mut().zip(&second) {
            add_to(head, embedding);
        }
        shard
    }

    /// The sum of the squares of every block of this rank's pieces.
    pub(super) fn squares<'a>(&self, pieces: impl Iterator<Item = &'a [f32]>) -> Result<Vec<f32>, StepError> {
        let blocks: Vec<&[f32]> = pieces.flat_map(|piece| piece.chunks(BLOCK)).collect();
        let mut all = Vec::with_capacity(blocks.len());
        for blocks in blocks.chunks(BLOCKS_AT_ONCE) {
            let held: Vec<F32<Cpu>> = blocks.iter().map(|block| self.cpu.upload(block)).collect();
            let mut sums = self.cpu.zeros(held.len());
            self.cpu.run(SumSquares { sums: &mut sums, tensors: &held.iter().collect::<Vec<_>>() });
            all.extend(self.cpu.download(&sums)?);
        }
        Ok(all)
    }

    /// The sum of the squares of each tensor from those of the blocks of every rank.
    pub(super) fn totals(&self, of_ranks: &[Vec<f32>]) -> Result<Vec<f32>, RankError> {
        for (rank, (pieces, sums)) in self.pieces.iter().zip(of_ranks).enumerate() {
            let blocks: usize = pieces.iter().map(|piece| piece.range.len().div_ceil(BLOCK)).sum();
            if sums.len() != blocks {
                return Err(RankError::damaged(rank, format!("it has {} sums for {blocks} blocks", sums.len())));
            }
        }
        // ORDER: pieces ascend with the ranks, so blocks are in the order of the tensors.
        let mut blocks = of_ranks.iter().flatten().copied();
        let total = |length: &usize| {
            let mut level: Vec<f32> = blocks.by_ref().take(length.div_ceil(BLOCK)).collect();
            while level.len() > 1 {
                level = level.chunks(BLOCK).map(sum).collect();
            }
            level.first().copied().unwrap_or(0.0)
        };
        Ok(self.lengths.iter().map(total).collect())
    }

    /// Applies AdamW to this rank's pieces.
    pub(super) fn apply(&mut self, gradients: &[Vec<f32>], coefficients: impl Fn(usize) -> Coefficients) {
        let gradients: Vec<F32<Cpu>> = gradients.iter().map(|gradient| self.cpu.upload(gradient)).collect();
        let [first, second] = &mut self.moments;
        let moments = first.iter_mut().zip(second);
        let tensors = self.pieces[self.rank].iter().zip(&mut self.values).zip(moments).zip(&gradients);
        let tensors = tensors.map(|(((piece, parameter), (m, v)), gradient)| AdamWTensor {
            parameter,
            m,
            v,
            gradient,
            coefficients: coefficients(piece.tensor),
        });
        let tensors = tensors.collect();
        self.cpu.run(AdamWUpdate { tensors });
    }

    /// What this rank's pieces contribute to the digests of gradients and moments.
    pub(super) fn digest_sums(&self, gradients: &[Vec<f32>]) -> Vec<u64> {
        const { assert!((BLOCK * size_of::<f32>()).is_multiple_of(BLOCK_BYTES), "pieces begin at blocks of a digest") };
        let [first, second] = &self.moments;
        let mut sums = Vec::new();
        for (((piece, gradient), m), v) in self.pieces[self.rank].iter().zip(gradients).zip(first).zip(second) {
            let block = (piece.range.start * size_of::<f32>() / BLOCK_BYTES) as u64;
            sums.extend([&gradient[..], m, v].into_iter().flat_map(|part| blocks_of_f32(part, block)));
        }
        sums
    }

    /// The digests of gradient and both moments of every tensor, from the contributions of all
    /// ranks.
    pub(super) fn digests(&self, of_ranks: &[Vec<u64>]) -> Result<Vec<[Digest; 3]>, RankError> {
        let mut sums = vec![[[0_u64; 2]; 3]; self.lengths.len()];
        for (rank, (pieces, own)) in self.pieces.iter().zip(of_ranks).enumerate() {
            let (own, rest) = own.as_chunks::<2>();
            let (own, more) = own.as_chunks::<3>();
            if own.len() != pieces.len() || rest.len() + more.len() > 0 {
                return Err(RankError::damaged(rank, "its digests belong to different tensors"));
            }
            for (piece, own) in pieces.iter().zip(own) {
                for (sum, own) in sums[piece.tensor].iter_mut().zip(own) {
                    *sum = digest::combine(*sum, *own);
                }
            }
        }
        let finish = |(sums, length): (&[[u64; 2]; 3], &usize)| {
            sums.map(|sum| digest::finish(sum, (length * size_of::<f32>()) as u64))
        };
        Ok(sums.iter().zip(&self.lengths).map(finish).collect())
    }

    /// The values of this rank's pieces.
    pub(super) fn values(&self) -> impl Iterator<Item = &[f32]> {
        self.values.iter().map(|values| &values[..])
    }
}

/// A node of the tree, elementwise: left plus right.
pub(super) fn add(left: Vec<Vec<f32>>, right: &[Vec<f32>], rank: usize) -> Result<Vec<Vec<f32>>, RankError> {
    let mut left = left;
    if !left.iter().map(Vec::len).eq(right.iter().map(Vec::len)) {
        return Err(RankError::damaged(rank, "its shard has other lengths"));
    }
    for (left, right) in left.iter_mut().zip(right) {
        add_to(left, right);
    }
    Ok(left)
}

fn add_to(left: &mut [f32], right: &[f32]) {
    for (left, right) in left.iter_mut().zip(right) {
        *left += *right;
    }
}

/// Multiplies every element, with one rounding.
pub(super) fn scale(shard: &mut [Vec<f32>], factor: f32) {
    for value in shard.iter_mut().flatten() {
        *value *= factor;
    }
}

/// Gradients of a shard, or the failure that came instead.
pub(super) type Shard = Result<Vec<Vec<f32>>, RankFailure>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_that_are_missing_are_those_of_their_rank() {
        let lengths = vec![2 * BLOCK + 1, 5];
        let pieces = cut(&lengths, 2);
        let cpu = Cpu::new(1, isobit_kernels::Path::best()).expect("a thread");
        let (values, moments) = (Vec::new(), [Vec::new(), Vec::new()]);
        let shards = Shards { cpu, rank: 0, lengths, pieces, values, moments };
        assert_eq!(shards.totals(&[vec![1.0, 2.0], vec![4.0, 8.0]]).expect("two blocks each"), [7.0, 8.0]);
        for (rank, of_ranks) in [(0, [vec![1.0], vec![4.0, 8.0]]), (1, [vec![1.0, 2.0], vec![4.0; 3]])] {
            let RankError::Damaged { rank: named, .. } = shards.totals(&of_ranks).expect_err("other blocks") else {
                panic!("not its message")
            };
            assert_eq!(named, rank);
        }
    }

    #[test]
    fn pieces_cover_every_element_once_and_begin_at_blocks() {
        let lengths = [3 * BLOCK + 5, 7, BLOCK, 2 * BLOCK, 1, 0, 100_000];
        for ranks in 1..20 {
            let mut next = vec![0; lengths.len()];
            for piece in cut(&lengths, ranks).into_iter().flatten() {
                assert_eq!(piece.range.start, next[piece.tensor], "{ranks} ranks");
                assert!(piece.range.start.is_multiple_of(BLOCK) && !piece.range.is_empty());
                next[piece.tensor] = piece.range.end;
            }
            assert_eq!(next, lengths, "{ranks} ranks");
        }
    }
}

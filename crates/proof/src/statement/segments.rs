//! The segments of a run that a proof replays: all of them, or some that a challenge chooses.
#![expect(clippy::float_arithmetic, reason = "a probability, for people")]

use crate::hash::Hash;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeSet;

/// Consecutive updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub first: u64,
    pub last: u64,
    /// The updates after which a replay can begin; 0 is the base. Less than `first - 1` if the
    /// checkpoint before it is gone.
    pub from: u64,
}

impl Segment {
    /// How many updates it has.
    pub fn updates(self) -> u64 {
        self.last - self.first + 1
    }
}

/// What chooses segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Challenge {
    /// Hexadecimal digits that a verifier gave after the chain was made.
    Given(String),
    None,
}

/// Cuts `updates` into segments of `every` updates; `saved` are the steps of checkpoints.
pub fn divided(updates: u64, every: u64, saved: &BTreeSet<u64>) -> Vec<Segment> {
    let every = every.max(1);
    let mut segments = Vec::new();
    let mut done = 0;
    while done < updates {
        let from = saved.range(..=done).next_back().copied().unwrap_or(0);
        let last = done.saturating_add(every).min(updates);
        segments.push(Segment { first: done + 1, last, from });
        done = last;
    }
    segments
}

/// `count` of `segments` numbers, in ascending order: a function of the challenge and the digest of
/// the receipt, which fixes the chain and its division. Each is as likely as any other.
pub fn chosen(challenge: &Challenge, receipt: Hash, segments: usize, count: usize) -> Vec<usize> {
    let challenge = match challenge {
        Challenge::Given(text) => text.as_str(),
        Challenge::None => "",
    };
    let seed = format!("isobit.prove/2 {challenge} {receipt}");
    let mut numbers: Vec<usize> = (0..segments).collect();
    let count = count.min(segments);
    for at in 0..count {
        let Hash([a, b, c, d, e, f, g, h, ..]) = Hash(Sha256::digest(format!("{seed} {at}")).into());
        let number = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        numbers.swap(at, at + (number % (segments - at) as u64) as usize);
    }
    let mut chosen = numbers[..count].to_vec();
    chosen.sort_unstable();
    chosen
}

/// The probability that at least one of `wrong` segments is among `count` of `segments` chosen at
/// random: `1 − C(S − w, K) / C(S, K)`.
pub(super) fn detection(segments: usize, count: usize, wrong: usize) -> f64 {
    if wrong == 0 || count == 0 {
        return 0.0;
    }
    if count + wrong > segments {
        return 1.0;
    }
    let missed = (0..count).fold(1.0, |missed, at| missed * (segments - wrong - at) as f64 / (segments - at) as f64);
    1.0 - missed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_begin_where_a_replay_can() {
        let saved = BTreeSet::from([20, 40, 50]);
        let segments = divided(50, 10, &saved);
        let froms: Vec<(u64, u64, u64)> = segments.iter().map(|of| (of.first, of.last, of.from)).collect();
        assert_eq!(froms, [(1, 10, 0), (11, 20, 0), (21, 30, 20), (31, 40, 20), (41, 50, 40)]);
        assert_eq!(divided(7, 5, &BTreeSet::new()).len(), 2);
        assert_eq!(divided(0, 5, &saved), []);
    }

    #[test]
    fn a_challenge_chooses_and_every_segment_is_as_likely() {
        let link = Hash([3; 32]);
        let one = chosen(&Challenge::Given("aa".to_string()), link, 20, 5);
        assert_eq!(one, chosen(&Challenge::Given("aa".to_string()), link, 20, 5));
        assert!(one.len() == 5 && one.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(chosen(&Challenge::None, link, 3, 9), [0, 1, 2]);
        let mut counts = [0_u32; 10];
        for number in 0..2000 {
            for segment in chosen(&Challenge::Given(format!("{number:04x}")), link, 10, 3) {
                counts[segment] += 1;
            }
        }
        // 600 expected; the standard deviation is 20.5.
        assert!(counts.iter().all(|count| (500..700).contains(count)), "{counts:?}");
        assert_ne!(one, chosen(&Challenge::Given("aa".to_string()), Hash([4; 32]), 20, 5));
    }

    #[test]
    fn the_probability_of_detection() {
        assert!((detection(10, 3, 1) - 0.3).abs() < 1e-15);
        assert_eq!((detection(10, 10, 1), detection(10, 0, 1), detection(4, 2, 3)), (1.0, 0.0, 1.0));
        // 1 − (8·7)/(10·9)
        assert!((detection(10, 2, 2) - 34.0 / 90.0).abs() < 1e-15);
    }
}

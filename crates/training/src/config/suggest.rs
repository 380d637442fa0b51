//! Did-you-mean: the known name closest to what was typed, by edit distance with transpositions of
//! adjacent letters.

/// BOUND: longer names are compared by this many leading letters.
const LENGTH_MAX: usize = 64;

/// The closest candidate, if close enough to be a typo: at most a third of its letters differ. The
/// first candidate wins ties.
pub fn nearest<'a>(typed: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let mut best: Option<(usize, &str)> = None;
    for candidate in candidates {
        let distance = edit_distance(&typed.to_lowercase(), candidate);
        let near = distance <= candidate.chars().count().div_ceil(3);
        if near && best.is_none_or(|(least, _)| distance < least) {
            best = Some((distance, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

/// Insertions, deletions, substitutions and adjacent transpositions that turn one word into the
/// other.
fn edit_distance(left: &str, right: &str) -> usize {
    let left: Vec<char> = left.chars().take(LENGTH_MAX).collect();
    let right: Vec<char> = right.chars().take(LENGTH_MAX).collect();
    let mut before: Vec<usize> = vec![0; right.len() + 1];
    let mut last: Vec<usize> = (0..=right.len()).collect();
    for (i, &a) in left.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, &b) in right.iter().enumerate() {
            let mut least = (last[j] + usize::from(a != b)).min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && a == right[j - 1] && left[i - 1] == b {
                least = least.min(before[j - 1] + 1);
            }
            row.push(least);
        }
        before = std::mem::replace(&mut last, row);
    }
    last[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_those_of_the_hand() {
        for (left, right, distance) in [
            ("", "", 0),
            ("", "abc", 3),
            ("abc", "abc", 0),
            ("kitten", "sitting", 3),
            ("sede", "seed", 1),
            ("ab", "ba", 1),
        ] {
            assert_eq!(edit_distance(left, right), distance, "{left} {right}");
            assert_eq!(edit_distance(right, left), distance, "{right} {left}");
        }
    }

    #[test]
    fn a_slip_is_found_and_a_stranger_is_not() {
        let names = ["learning_rate", "seed", "save_steps", "eval_steps"];
        assert_eq!(nearest("lerning_rate", names), Some("learning_rate"));
        assert_eq!(nearest("LEARNING_RATE", names), Some("learning_rate"));
        assert_eq!(nearest("sede", names), Some("seed"));
        assert_eq!(nearest("flash_attention", names), None);
        assert_eq!(nearest("", names), None);
    }
}

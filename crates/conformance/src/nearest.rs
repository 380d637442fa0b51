//! The name that was probably meant, for `conform`.

/// The name with the smallest edit distance, if at most a third of its letters differ.
pub fn nearest<'a>(typed: &str, names: &[&'a str]) -> Option<&'a str> {
    let distances = names.iter().map(|name| (distance(typed, name), *name));
    distances.filter(|(distance, name)| *distance <= name.len().div_ceil(3)).min().map(|(_, name)| name)
}

/// Insertions, deletions and substitutions that turn one word into the other.
fn distance(left: &str, right: &str) -> usize {
    let mut last: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.bytes().enumerate() {
        let mut row = vec![i + 1];
        for (j, b) in right.bytes().enumerate() {
            row.push((last[j] + usize::from(a != b)).min(last[j + 1] + 1).min(row[j] + 1));
        }
        last = row;
    }
    last[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_found_and_a_stranger_is_not() {
        let names = ["linear", "product", "product4", "rope"];
        assert_eq!(nearest("linaer", &names), Some("linear"));
        assert_eq!(nearest("produkt", &names), Some("product"));
        assert_eq!(nearest("softmax", &names), None);
        assert_eq!(nearest("", &names), None);
    }
}

//! Floats of four bits (`docs/numerics.md`, "Product with 4-bit weights"): a sign, two bits of
//! exponent, one of mantissa, as in MXFP4 files. Twice their value is an integer.

/// Twice the value of every code.
pub const TWICE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The same without a table, so that a loop over codes becomes vector code.
#[inline(always)]
pub const fn twice(code: u8) -> i8 {
    let base = 4 + 2 * (code & 1);
    let large = if code & 2 == 0 { base } else { 2 * base };
    let magnitude = if code & 4 == 0 { code & 3 } else { large };
    if code & 8 == 0 { magnitude as i8 } else { -(magnitude as i8) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_agree() {
        assert_eq!(std::array::from_fn(|code| twice(code as u8)), TWICE);
    }
}

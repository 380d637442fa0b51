//! Formats a number without heap allocation: for signal handlers, and for an allocator that is out
//! of memory.

/// Digits of the largest number.
pub(crate) const DIGITS_MAX: usize = 20;

pub(crate) fn decimal(mut number: u64, digits: &mut [u8; DIGITS_MAX]) -> &[u8] {
    let mut start = digits.len();
    loop {
        start -= 1;
        digits[start] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return &digits[start..];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_without_the_heap() {
        for number in [0, 7, 10, 4_096, u64::MAX] {
            assert_eq!(decimal(number, &mut [0; DIGITS_MAX]), number.to_string().as_bytes());
        }
    }
}

//! The number formats of safetensors, by their names in the format.

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dtype {
    Bool,
    F4,
    F6E2M3,
    F6E3M2,
    U8,
    I8,
    F8E5M2,
    F8E4M3,
    F8E8M0,
    F8E4M3Fnuz,
    F8E5M2Fnuz,
    I16,
    U16,
    F16,
    Bf16,
    I32,
    U32,
    F32,
    C64,
    F64,
    I64,
    U64,
}

impl Dtype {
    /// Name in the file and bits of one element.
    const TABLE: [(Self, &'static str, usize); 22] = [
        (Self::Bool, "BOOL", 8),
        (Self::F4, "F4", 4),
        (Self::F6E2M3, "F6_E2M3", 6),
        (Self::F6E3M2, "F6_E3M2", 6),
        (Self::U8, "U8", 8),
        (Self::I8, "I8", 8),
        (Self::F8E5M2, "F8_E5M2", 8),
        (Self::F8E4M3, "F8_E4M3", 8),
        (Self::F8E8M0, "F8_E8M0", 8),
        (Self::F8E4M3Fnuz, "F8_E4M3FNUZ", 8),
        (Self::F8E5M2Fnuz, "F8_E5M2FNUZ", 8),
        (Self::I16, "I16", 16),
        (Self::U16, "U16", 16),
        (Self::F16, "F16", 16),
        (Self::Bf16, "BF16", 16),
        (Self::I32, "I32", 32),
        (Self::U32, "U32", 32),
        (Self::F32, "F32", 32),
        (Self::C64, "C64", 64),
        (Self::F64, "F64", 64),
        (Self::I64, "I64", 64),
        (Self::U64, "U64", 64),
    ];

    /// The format with this name in a header.
    pub fn parse(name: &str) -> Option<Self> {
        Self::TABLE.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// The name in a header.
    pub fn name(self) -> &'static str {
        Self::TABLE[self as usize].1
    }

    /// Bits of one element.
    pub fn bits(self) -> usize {
        Self::TABLE[self as usize].2
    }

    /// Bytes of a tensor of this shape: None if they do not fit in 64 bits or the elements do not
    /// fill whole bytes.
    pub fn bytes_of(self, shape: &[usize]) -> Option<usize> {
        let elements = element_count(shape)?;
        let bits = elements.checked_mul(self.bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Product of a shape. A zero anywhere makes it zero, however large the others are.
pub(crate) fn element_count(shape: &[usize]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1_usize, |product, &dimension| product.checked_mul(dimension))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order_and_names_come_back() {
        for (index, (dtype, name, bits)) in Dtype::TABLE.into_iter().enumerate() {
            assert_eq!(dtype as usize, index);
            assert_eq!((dtype.name(), dtype.bits(), Dtype::parse(name)), (name, bits, Some(dtype)));
        }
        assert_eq!(Dtype::parse("f32"), None);
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(Dtype::F32.bytes_of(&[]), Some(4));
        assert_eq!(Dtype::Bf16.bytes_of(&[3, 5]), Some(30));
        assert_eq!(Dtype::F4.bytes_of(&[4]), Some(2));
        assert_eq!(Dtype::F4.bytes_of(&[3]), None);
        assert_eq!(Dtype::F32.bytes_of(&[usize::MAX, 0]), Some(0));
        assert_eq!(Dtype::F32.bytes_of(&[usize::MAX, 2]), None);
        assert_eq!(Dtype::F64.bytes_of(&[1 << 61]), None);
    }
}

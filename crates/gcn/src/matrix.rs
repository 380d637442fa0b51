//! Matrix products of signed bytes (MFMA): which lane and register holds which element.

use crate::instruction::{LANES, Matrix};

type Lanes = [u32; LANES];

/// Rows and columns of a block, blocks, and the depth of a product.
struct Shape {
    side: usize,
    blocks: usize,
    depth: usize,
}

impl Matrix {
    fn shape(self) -> Shape {
        let (side, blocks, depth) = match self {
            Self::M32x32x8 => (32, 1, 8),
            Self::M16x16x16 => (16, 1, 16),
            Self::M4x4x4 => (4, 16, 4),
            Self::M32x32x4 => (32, 2, 4),
            Self::M16x16x4 => (16, 4, 4),
            Self::M32x32x16 => (32, 1, 16),
            Self::M16x16x32 => (16, 1, 32),
        };
        Shape { side, blocks, depth }
    }

    /// Registers of either operand.
    pub(crate) fn operand_words(self) -> u16 {
        let shape = self.shape();
        if shape.blocks == 1 { (shape.side * shape.depth / LANES / 4) as u16 } else { 1 }
    }

    /// Registers of the sums.
    pub(crate) fn sums(self) -> u16 {
        let shape = self.shape();
        (shape.side * shape.side * shape.blocks / LANES) as u16
    }
}

/// Block, row and column of the sum in register `r` of lane `l`.
fn place(shape: &Shape, r: usize, l: usize) -> (usize, usize, usize) {
    let side = shape.side;
    // Registers per block, except for the smallest, whose blocks lie in lanes.
    let (block, r) = match side {
        4 => (l / 4, r),
        _ => (r / (side * side / LANES), r % (side * side / LANES)),
    };
    let row = match side {
        4 => r,
        16 => 4 * (l / 16) + r,
        _ => 8 * (r / 4) + 4 * (l / 32) + r % 4,
    };
    (block, row, l % side)
}

/// Byte `k` of row or column `index` of a block.
fn element(shape: &Shape, x: &[Lanes], block: usize, index: usize, k: usize) -> i32 {
    // One block spreads its depth over lanes; several blocks lie in lanes one after the other.
    let bytes = 4 * x.len();
    let lane = index + shape.side * if shape.blocks == 1 { k / bytes } else { block };
    (x[k % bytes / 4][lane] >> (8 * (k % 4))) as i8 as i32
}

/// `sums += a * b`, in all lanes whatever EXEC says; the operands have as many registers as the
/// instruction wants.
pub(crate) fn multiply(op: Matrix, a: &[Lanes], b: &[Lanes], sums: &mut [Lanes]) {
    let shape = op.shape();
    for (r, sum) in sums.iter_mut().enumerate() {
        for (l, sum) in sum.iter_mut().enumerate() {
            let (block, row, column) = place(&shape, r, l);
            for k in 0..shape.depth {
                let product = element(&shape, a, block, row, k) * element(&shape, b, block, column, k);
                *sum = (*sum as i32).wrapping_add(product) as u32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One element of A and one of B that is not zero, and where the product must appear.
    fn one_hot(op: Matrix, a: (usize, u32), b: (usize, u32)) -> Vec<(usize, usize, i32)> {
        let operand = |(lane, byte): (usize, u32), value: i8| {
            let mut words = vec![[0; LANES]; op.operand_words() as usize];
            words[byte as usize / 4][lane] = u32::from(value as u8) << (8 * (byte % 4));
            words
        };
        let mut sums = vec![[0; LANES]; op.sums() as usize];
        multiply(op, &operand(a, -3), &operand(b, 5), &mut sums);
        let found = sums.iter().enumerate().flat_map(|(r, lanes)| {
            lanes.iter().enumerate().filter(|(_, sum)| **sum != 0).map(move |(l, sum)| (r, l, *sum as i32))
        });
        found.collect()
    }

    #[test]
    fn registers_of_the_sums() {
        let all = [Matrix::M32x32x8, Matrix::M16x16x16, Matrix::M4x4x4, Matrix::M32x32x4, Matrix::M16x16x4];
        assert_eq!(all.map(Matrix::sums), [16, 4, 4, 32, 16]);
        assert_eq!(all.map(Matrix::operand_words), [1; 5]);
        let wide = [Matrix::M32x32x16, Matrix::M16x16x32];
        assert_eq!((wide.map(Matrix::sums), wide.map(Matrix::operand_words)), ([16, 4], [2, 2]));
    }

    #[test]
    fn elements_lie_where_the_layout_says() {
        // 32x32x8: A[7][4 * 1 + 2] is byte 2 of lane 39, B[6][9] byte 2 of lane 41; row 7 is
        // register 3 of the upper half (8 * 0 + 4 * 1 + 3), column 9 lane 32 + 9.
        assert_eq!(one_hot(Matrix::M32x32x8, (39, 2), (41, 2)), [(3, 41, -15)]);
        // Row 29 = 8 * 3 + 4 * 1 + 1: register 13 of the upper half.
        assert_eq!(one_hot(Matrix::M32x32x8, (29, 0), (0, 0)), [(13, 32, -15)]);
        // 16x16x16: A[5][4 * 3 + 1], B[13][8]: row 5 = 4 * 1 + 1.
        assert_eq!(one_hot(Matrix::M16x16x16, (53, 1), (56, 1)), [(1, 24, -15)]);
        // Another byte, or another quarter: nothing meets.
        assert_eq!(one_hot(Matrix::M16x16x16, (53, 1), (56, 2)), []);
        assert_eq!(one_hot(Matrix::M16x16x16, (53, 1), (40, 1)), []);
        // 4x4x4: block 5, row 2, column 3.
        assert_eq!(one_hot(Matrix::M4x4x4, (22, 3), (23, 3)), [(2, 23, -15)]);
        assert_eq!(one_hot(Matrix::M4x4x4, (22, 3), (27, 3)), []);
        // 32x32x4: block 1 is in registers 16 to 31.
        assert_eq!(one_hot(Matrix::M32x32x4, (32 + 10, 1), (32 + 4, 1)), [(16 + 6, 4, -15)]);
        // 32x32x16: A[7][8 * 1 + 6] is byte 6 of lane 39; B[14][9] byte 6 of lane 41.
        assert_eq!(one_hot(Matrix::M32x32x16, (39, 6), (41, 6)), [(3, 41, -15)]);
        assert_eq!(one_hot(Matrix::M32x32x16, (39, 6), (41, 2)), []);
        // 16x16x32: A[5][8 * 3 + 5], B[29][8]: row 5 = 4 * 1 + 1.
        assert_eq!(one_hot(Matrix::M16x16x32, (53, 5), (56, 5)), [(1, 24, -15)]);
        // 16x16x4: block 2 is in registers 8 to 11; row 11 = 4 * 2 + 3.
        assert_eq!(one_hot(Matrix::M16x16x4, (32 + 11, 0), (32 + 1, 0)), [(8 + 3, 32 + 1, -15)]);
    }

    #[test]
    fn products_are_added_to_the_sums() {
        let ones = [0x0101_0101; LANES];
        let minus = [0xffff_ffff; LANES];
        let mut sums = vec![[100; LANES]; 16];
        multiply(Matrix::M32x32x8, &[ones], &[minus], &mut sums);
        assert_eq!(sums, vec![[92; LANES]; 16]);
    }
}

//! Inputs for the cases: a pure function of a seed.

/// The distribution of the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distribution {
    /// Roughly normal, standard deviation 1.
    Plain,
    /// Magnitudes over many orders, some columns a thousand times larger.
    Outliers,
    /// Signed zeros, subnormals, the smallest and largest normals whose products stay in range,
    /// ties of the quantiser.
    Edges,
    /// All zero.
    Zeros,
}

impl Distribution {
    pub const ALL: [Self; 4] = [Self::Plain, Self::Outliers, Self::Edges, Self::Zeros];
}

/// A small generator used only by tests.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03)
    }

    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.word() % limit as u64) as usize
    }

    /// In [0, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.word() >> 40) as f32 / 16_777_216.0
    }

    /// Sum of four uniforms, centred: close to normal, standard deviation 1.
    pub fn normal(&mut self) -> f32 {
        (self.uniform() + self.uniform() + self.uniform() + self.uniform() - 2.0) * 1.7320508
    }

    pub fn f32s(&mut self, kind: Distribution, length: usize) -> Vec<f32> {
        (0..length).map(|index| self.f32(kind, index)).collect()
    }

    fn f32(&mut self, kind: Distribution, index: usize) -> f32 {
        const EDGES: [f32; 14] =
            [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, -1.1754944e-38, 1e-20, -1e-20, 1e15, -1e15, 1.0, -1.0, 0.5, 1.5];
        match kind {
            Distribution::Plain => self.normal(),
            Distribution::Outliers => {
                let size = (0..self.below(8)).fold(1e-3f32, |size, _| size * 4.0);
                self.normal() * size * if index % 37 == 5 { 1000.0 } else { 1.0 }
            }
            Distribution::Edges if self.below(3) == 0 => EDGES[self.below(EDGES.len())],
            // Multiples of half the quantiser's scale for a maximum of 1: ties.
            Distribution::Edges => (self.below(65025) as f32 - 32512.0) / 65024.0,
            Distribution::Zeros => 0.0,
        }
    }
}

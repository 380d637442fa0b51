//! Numbers for the study: weights, activations and gradients with distributions that are hard on
//! quantisers. A pure function of a seed, using only the `libm` crate, so that the tables are the
//! same on every machine.

use isobit_numerics::cast::{bf16_to_f32, f32_to_bf16};
use isobit_numerics::philox::mix64;

/// The distribution of activations and gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Data {
    Gaussian,
    /// A log-normal scale per channel, σ = 1.5.
    Channels,
    /// Four channels 300 times larger, and in every fourth row one element of about ±8000 in one of
    /// these.
    Massive,
    /// Student's t with 2.5 degrees of freedom.
    Student,
    /// Product of two Gaussians, and a log-normal scale per channel, σ = 1.
    Products,
}

impl Data {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Gaussian => "Gaussian",
            Self::Channels => "channel outliers",
            Self::Massive => "massive",
            Self::Student => "Student t 2.5",
            Self::Products => "Gaussian products",
        }
    }

    /// `rows × width` numbers.
    pub(crate) fn generate(self, random: &mut Random, rows: usize, width: usize) -> Vec<f32> {
        let sigma = match self {
            Self::Channels => 1.5,
            Self::Products => 1.0,
            _ => 0.0,
        };
        let mut channels: Vec<f64> = (0..width).map(|_| libm::exp(sigma * random.normal())).collect();
        let loud: Vec<usize> = (0..4).map(|_| random.below(width)).collect();
        if self == Self::Massive {
            for &channel in &loud {
                channels[channel] = 300.0;
            }
        }
        let mut x = Vec::with_capacity(rows * width);
        for row in 0..rows {
            for scale in &channels {
                let value = match self {
                    Self::Student => random.student(2.5),
                    Self::Products => random.normal() * random.normal(),
                    _ => random.normal(),
                };
                x.push((scale * value) as f32);
            }
            if self == Self::Massive && row % 4 == 0 {
                let sign = if random.below(2) == 0 { 1.0 } else { -1.0 };
                x[row * width + loud[random.below(4)]] = sign * (7000.0 + 2000.0 * random.uniform() as f32);
            }
        }
        x
    }
}

/// The distribution of weights. All are bfloat16 numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weights {
    Gaussian,
    /// Every row holds one element of 10 to 20 σ.
    Mild,
    /// One row in ten holds one to four elements of 30 to 100 σ.
    Outliers,
    /// Every row has its own scale, log-normal with σ = 0.7.
    RowScales,
}

impl Weights {
    pub(crate) const ALL: [Self; 4] = [Self::Gaussian, Self::Mild, Self::Outliers, Self::RowScales];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Gaussian => "Gaussian",
            Self::Mild => "mild outliers",
            Self::Outliers => "outliers",
            Self::RowScales => "row scales",
        }
    }

    /// One row of a weight matrix with standard deviation 0.02.
    pub(crate) fn row(self, random: &mut Random, width: usize) -> Vec<f32> {
        let scale = if self == Self::RowScales { libm::exp(0.7 * random.normal()) } else { 1.0 };
        let mut row: Vec<f64> = (0..width).map(|_| 0.02 * scale * random.normal()).collect();
        let (count, low, high) = match self {
            Self::Mild => (1, 10.0, 20.0),
            Self::Outliers if random.below(10) == 0 => (1 + random.below(4), 30.0, 100.0),
            _ => (0, 0.0, 0.0),
        };
        for _ in 0..count {
            let sign = if random.below(2) == 0 { 1.0 } else { -1.0 };
            row[random.below(width)] = 0.02 * sign * (low + (high - low) * random.uniform());
        }
        row.into_iter().map(|w| bf16(w as f32)).collect()
    }
}

/// Rounded to bfloat16.
pub(crate) fn bf16(x: f32) -> f32 {
    bf16_to_f32(f32_to_bf16(x))
}

/// Rounded to the ten stored mantissa bits of TF32, ties to even.
pub(crate) fn tf32(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0x0fff + ((bits >> 13) & 1)) & !0x1fff)
}

pub(crate) struct Random {
    state: u64,
    spare: Option<f64>,
}

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: mix64(seed.wrapping_add(0x9E37_79B9_7F4A_7C15)), spare: None }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix64(self.state)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// In (0, 1).
    pub(crate) fn uniform(&mut self) -> f64 {
        ((self.next() >> 12) as f64 + 0.5) / 4503599627370496.0
    }

    /// Marsaglia's polar method.
    pub(crate) fn normal(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        loop {
            let (u, v) = (2.0 * self.uniform() - 1.0, 2.0 * self.uniform() - 1.0);
            let square = u * u + v * v;
            if square < 1.0 && square > 0.0 {
                let factor = libm::sqrt(-2.0 * libm::log(square) / square);
                self.spare = Some(v * factor);
                return u * factor;
            }
        }
    }

    fn student(&mut self, degrees: f64) -> f64 {
        let chi_squared = 2.0 * self.gamma(degrees / 2.0);
        self.normal() / libm::sqrt(chi_squared / degrees)
    }

    /// Marsaglia and Tsang, for shapes of at least 1.
    fn gamma(&mut self, shape: f64) -> f64 {
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / libm::sqrt(9.0 * d);
        loop {
            let x = self.normal();
            let v = (1.0 + c * x) * (1.0 + c * x) * (1.0 + c * x);
            if v > 0.0 && libm::log(self.uniform()) < 0.5 * x * x + d - d * v + d * libm::log(v) {
                return d * v;
            }
        }
    }
}

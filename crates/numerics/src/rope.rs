//! Rotary position tables, computed once per run on the host in float64 with the `libm` crate.
//!
//! An inverse frequency is rounded to float32 once. An angle is one float32 product, as in
//! transformers; its cosine and sine are taken in float64, multiplied by the attention factor, and
//! rounded once.

/// How the rotation is scaled for long contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    Default,
    Linear {
        factor: f64,
    },
    /// The base grows with the sequence once it is longer than `original_max_position`.
    Dynamic {
        factor: f64,
        original_max_position: f64,
    },
    /// Long wavelengths are divided, short ones kept, those between are interpolated.
    Llama3 {
        factor: f64,
        low_frequency_factor: f64,
        high_frequency_factor: f64,
        original_max_position: f64,
    },
    Yarn(Yarn),
    LongRope(LongRope),
}

/// Settings of the longrope rule: each pair of channels has its own divisor, one for sequences up
/// to `original_max_position` and one for longer ones.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    pub short: Vec<f64>,
    pub long: Vec<f64>,
    pub original_max_position: f64,
    /// By how much sequences grow; decides the attention factor.
    pub factor: f64,
    /// Multiplies cosine and sine; computed from the rest if absent.
    pub attention_factor: Option<f64>,
}

impl LongRope {
    fn divisors(&self, positions: usize) -> &[f64] {
        if positions as f64 > self.original_max_position { &self.long } else { &self.short }
    }

    fn attention_factor(&self) -> f64 {
        match self.attention_factor {
            Some(factor) => factor,
            None if self.factor <= 1.0 => 1.0,
            None => libm::sqrt(1.0 + libm::log(self.factor) / libm::log(self.original_max_position)),
        }
    }
}

/// Settings of the yarn rule. `Default` gives those that a configuration may omit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    pub factor: f64,
    pub original_max_position: f64,
    pub beta_fast: f64,
    pub beta_slow: f64,
    /// Whether the ends of the ramp are widened to whole indices.
    pub truncate: bool,
    /// Multiplies cosine and sine; computed from the rest if absent.
    pub attention_factor: Option<f64>,
    /// Zero if absent.
    pub mscale: f64,
    /// Zero if absent.
    pub mscale_all_dim: f64,
}

impl Default for Yarn {
    fn default() -> Self {
        Self {
            factor: 1.0,
            original_max_position: 0.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: None,
            mscale: 0.0,
            mscale_all_dim: 0.0,
        }
    }
}

impl Yarn {
    /// First and last index of the ramp between kept and divided frequencies.
    fn ramp_ends(&self, rotary_width: usize, base: f64) -> (f64, f64) {
        let width = rotary_width as f64;
        let index_of = |rotations: f64| {
            let ratio = self.original_max_position / (rotations * 2.0 * core::f64::consts::PI);
            width * libm::log(ratio) / (2.0 * libm::log(base))
        };
        let (mut low, mut high) = (index_of(self.beta_fast), index_of(self.beta_slow));
        if self.truncate {
            low = libm::floor(low);
            high = libm::ceil(high);
        }
        low = low.max(0.0);
        high = high.min(width - 1.0);
        // The ramp must not have zero width.
        (low, if low == high { high + 0.001 } else { high })
    }

    fn attention_factor(&self) -> f64 {
        let growth = |mscale: f64| {
            if self.factor <= 1.0 { 1.0 } else { 0.1 * mscale * libm::log(self.factor) + 1.0 }
        };
        self.attention_factor.unwrap_or_else(|| {
            if self.mscale != 0.0 && self.mscale_all_dim != 0.0 {
                growth(self.mscale) / growth(self.mscale_all_dim)
            } else {
                growth(1.0)
            }
        })
    }
}

impl RopeScaling {
    /// The factor on cosine and sine.
    pub fn attention_factor(&self) -> f64 {
        match self {
            Self::Yarn(yarn) => yarn.attention_factor(),
            Self::LongRope(long) => long.attention_factor(),
            _ => 1.0,
        }
    }
}

/// Inverse frequencies of the `rotary_width / 2` pairs. Only the dynamic and the longrope rule use
/// `sequence_length`, that of the longest sequence.
pub fn inverse_frequencies(rotary_width: usize, base: f64, scaling: &RopeScaling, sequence_length: usize) -> Vec<f32> {
    let width = rotary_width as f64;
    let base = match *scaling {
        RopeScaling::Dynamic { factor, original_max_position } => {
            let length = (sequence_length as f64).max(original_max_position);
            let stretch = factor * length / original_max_position - (factor - 1.0);
            base * libm::pow(stretch, width / (width - 2.0))
        }
        _ => base,
    };
    let plain = |index: usize| 1.0 / libm::pow(base, (2 * index) as f64 / width);
    let ramp_ends = match scaling {
        RopeScaling::Yarn(yarn) => yarn.ramp_ends(rotary_width, base),
        _ => (0.0, 0.0),
    };
    let scaled = |index: usize| {
        let frequency = plain(index);
        match *scaling {
            RopeScaling::Default | RopeScaling::Dynamic { .. } => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::LongRope(ref long) => frequency / long.divisors(sequence_length)[index],
            RopeScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_max_position } => {
                let wavelength = 2.0 * core::f64::consts::PI / frequency;
                if wavelength < original_max_position / high_frequency_factor {
                    frequency
                } else if wavelength > original_max_position / low_frequency_factor {
                    frequency / factor
                } else {
                    let share = (original_max_position / wavelength - low_frequency_factor)
                        / (high_frequency_factor - low_frequency_factor);
                    (1.0 - share) * frequency / factor + share * frequency
                }
            }
            RopeScaling::Yarn(Yarn { factor, .. }) => {
                let (low, high) = ramp_ends;
                let ramp = ((index as f64 - low) / (high - low)).clamp(0.0, 1.0);
                frequency * (1.0 - ramp) + (frequency / factor) * ramp
            }
        }
    };
    (0..rotary_width / 2).map(|index| scaled(index) as f32).collect()
}

/// Cosine and sine of one pair at one position, each times the attention factor.
pub fn cos_sin(inverse_frequency: f32, attention_factor: f64, position: u32) -> (f32, f32) {
    let angle = f64::from(position as f32 * inverse_frequency);
    ((libm::cos(angle) * attention_factor) as f32, (libm::sin(angle) * attention_factor) as f32)
}

/// The rows of both tables for one position: `rotary_width / 2` cosines and as many sines.
pub fn cos_sin_row(inverse_frequencies: &[f32], attention_factor: f64, position: u32) -> (Vec<f32>, Vec<f32>) {
    inverse_frequencies.iter().map(|&frequency| cos_sin(frequency, attention_factor, position)).unzip()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_and_linear() {
        let plain = inverse_frequencies(128, 1e6, &RopeScaling::Default, 10);
        assert_eq!((plain.len(), plain[0], plain[32]), (64, 1.0, 1e-3));
        let halved = inverse_frequencies(128, 1e6, &RopeScaling::Linear { factor: 2.0 }, 10);
        assert!(plain.iter().zip(&halved).all(|(a, b)| a / 2.0 == *b));
        assert_eq!(RopeScaling::Default.attention_factor(), 1.0);
    }

    #[test]
    fn dynamic_changes_only_long_sequences() {
        let scaling = RopeScaling::Dynamic { factor: 2.0, original_max_position: 2048.0 };
        let plain = inverse_frequencies(64, 1e4, &RopeScaling::Default, 1);
        assert_eq!(inverse_frequencies(64, 1e4, &scaling, 2048), plain);
        let long = inverse_frequencies(64, 1e4, &scaling, 4096);
        // The stretch is 2·4096/2048 − 1 = 3, so the last frequency is divided by 3^(62/62).
        assert_eq!(long[0], 1.0);
        assert!((f64::from(plain[31]) / f64::from(long[31]) - 3.0).abs() < 1e-6);
    }

    #[test]
    fn yarn_numbers_of_qwen_and_deepseek() {
        let qwen = Yarn { factor: 4.0, original_max_position: 32768.0, ..Yarn::default() };
        assert_eq!(qwen.ramp_ends(128, 1e6), (23.0, 40.0));
        assert!((qwen.attention_factor() - 1.13862944).abs() < 5e-9);
        let plain = inverse_frequencies(128, 1e6, &RopeScaling::Default, 1);
        let scaled = inverse_frequencies(128, 1e6, &RopeScaling::Yarn(qwen), 1);
        assert_eq!(scaled[..=23], plain[..=23]);
        assert!(scaled[40..].iter().zip(&plain[40..]).all(|(a, b)| *a == b / 4.0));
        assert!((24..40).all(|i| plain[i] / 4.0 < scaled[i] && scaled[i] < plain[i]));

        let deepseek =
            Yarn { factor: 40.0, original_max_position: 4096.0, mscale: 1.0, mscale_all_dim: 1.0, ..Yarn::default() };
        assert_eq!(deepseek.ramp_ends(64, 1e4), (10.0, 23.0));
        assert_eq!(deepseek.attention_factor(), 1.0);
        let explicit = Yarn { attention_factor: Some(0.75), ..deepseek };
        assert_eq!(RopeScaling::Yarn(explicit).attention_factor(), 0.75);
    }

    #[test]
    fn llama3_bands() {
        // Llama-3.1-8B: wavelengths below 8192/4 are kept, above 8192/1 divided by 8.
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_max_position: 8192.0,
        };
        let plain = inverse_frequencies(128, 5e5, &RopeScaling::Default, 1);
        let scaled = inverse_frequencies(128, 5e5, &scaling, 1);
        for (index, (a, b)) in plain.iter().zip(&scaled).enumerate() {
            let wavelength = 2.0 * core::f64::consts::PI / f64::from(*a);
            if wavelength < 2048.0 {
                assert_eq!(a, b, "pair {index} is kept");
            } else if wavelength > 8192.0 {
                assert_eq!(a / 8.0, *b, "pair {index} is divided");
            } else {
                assert!(a / 8.0 < *b && b < a, "pair {index} is between");
            }
        }
        assert_eq!((0..64).filter(|&i| plain[i] == scaled[i]).count(), 29);
        assert_eq!((0..64).filter(|&i| plain[i] / 8.0 == scaled[i]).count(), 29);
    }

    #[test]
    fn longrope_divides_each_pair_by_its_own_number() {
        let long = LongRope {
            short: vec![1.0, 2.0],
            long: vec![4.0, 8.0],
            original_max_position: 16.0,
            factor: 8.0,
            attention_factor: None,
        };
        let scaling = RopeScaling::LongRope(long.clone());
        let plain = inverse_frequencies(4, 1e4, &RopeScaling::Default, 1);
        assert_eq!(inverse_frequencies(4, 1e4, &scaling, 16), [plain[0], plain[1] / 2.0]);
        assert_eq!(inverse_frequencies(4, 1e4, &scaling, 17), [plain[0] / 4.0, plain[1] / 8.0]);
        // √(1 + ln 8 / ln 16) = √1.75
        assert!((scaling.attention_factor() - 1.322_875_655_532_295).abs() < 1e-15);
        let given = RopeScaling::LongRope(LongRope { attention_factor: Some(0.5), ..long });
        assert_eq!(given.attention_factor(), 0.5);
    }

    #[test]
    fn rows_are_rounded_once() {
        assert_eq!(cos_sin(1.0, 1.0, 0), (1.0, 0.0));
        let (cos, sin) = cos_sin(1.0, 1.0, 1);
        assert_eq!([cos, sin].map(f32::to_bits), [0x3f0a_5140, 0x3f57_6aa4]);
        let (cos, sin) = cos_sin_row(&[1.0, 0.1], 2.0, 1);
        assert_eq!((cos.len(), sin[0]), (2, (2.0 * libm::sin(1.0)) as f32));
        // The angle is a float32 product: 16,777,217 positions would not fit, 100,003 · f32(0.001)
        // rounds.
        let angle = 100_003.0f32 * 1e-3f32;
        assert_eq!(cos_sin(1e-3, 1.0, 100_003).0, libm::cos(f64::from(angle)) as f32);
    }
}

//! Central differences in float64, against which gradients of the reference are checked: the loss
//! is `Σ weight·output`, so the incoming gradient is `weight`.
#![expect(clippy::float_arithmetic, reason = "float64 is the yardstick here")]

/// Half the distance of the two points of a difference.
const STEP: f64 = 1e-5;
/// Error of a central difference, absolute: a third derivative of at most 100 contributes
/// 100·STEP²/6 < 2e-9; a loss of magnitude below 500 that is rounded to 2⁻⁵³ some 1,000 times
/// contributes about √1000·500·2⁻⁵³/STEP < 2e-7.
const DIFFERENCING: f64 = 3e-7;

/// Compares `gradient` with the differences of `loss` around `at`.
///
/// A float32 result of `roundings` operations on terms whose magnitudes sum to at most `magnitude`
/// is off by at most `roundings·2⁻²⁴·magnitude` to first order; twice that covers the rest.
pub(crate) fn check(
    name: &str,
    gradient: &[f32],
    at: &[f32],
    roundings: usize,
    magnitude: f64,
    loss: impl Fn(&[f64]) -> f64,
) {
    assert_eq!(gradient.len(), at.len(), "{name}");
    let tolerance = roundings as f64 * f64::from(f32::EPSILON) * magnitude + DIFFERENCING;
    let mut point = wide(at);
    let mut largest = 0.0f64;
    for index in 0..point.len() {
        let here = point[index];
        point[index] = here + STEP;
        let above = loss(&point);
        point[index] = here - STEP;
        let below = loss(&point);
        point[index] = here;
        let want = (above - below) / (2.0 * STEP);
        let got = f64::from(gradient[index]);
        assert!(
            (got - want).abs() <= tolerance,
            "{name}[{index}]: {want} by differences, {got} given, {tolerance:e} allowed"
        );
        largest = largest.max(want.abs());
    }
    // A gradient of zeros against a loss that does not move would prove nothing.
    assert!(largest > 100.0 * tolerance, "{name}: largest gradient {largest}, tolerance {tolerance:e}");
}

/// The largest magnitude.
pub(crate) fn largest(x: &[f32]) -> f64 {
    x.iter().map(|x| f64::from(x.abs())).fold(0.0, f64::max)
}

pub(crate) fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().copied().map(f64::from).collect()
}

/// The loss: the incoming gradient is `weight`.
pub(crate) fn dot(weight: &[f32], output: impl IntoIterator<Item = f64>) -> f64 {
    weight.iter().zip(output).map(|(w, y)| f64::from(*w) * y).sum()
}

//! Axes of the charts: a range of numbers, round ticks on it, and their labels.
//!
//! Any finite number may come from a file, so nothing here overflows: spans are halved before they
//! are subtracted, and powers of ten are parsed rather than computed.

/// Most ticks of an axis; more would not help.
const TICKS_MAX: usize = 24;
/// Values whose largest is this many times the smallest are drawn on a logarithmic axis.
const LOG_RATIO: f64 = 200.0;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    logarithmic: bool,
    /// Distance of linear ticks.
    step: f64,
    pub(super) ticks: Vec<f64>,
}

/// What an axis must show besides the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Base {
    /// Zero, if no value is below it.
    Zero,
    /// The same, and always linear: a schedule that decays to nothing, or one slow update, would
    /// make a logarithmic axis of it.
    Linear,
    Free,
}

impl Axis {
    /// The axis of steps: it ends where the steps end.
    pub(super) fn of_steps(first: u64, last: u64, count: usize) -> Self {
        let (first, last) = (first as f64, last as f64);
        let low = if first * 20.0 <= last { 0.0 } else { first };
        let high = if last > low { last } else { low + 1.0 };
        let step = round_step((high - low) / count as f64).max(1.0);
        Self { low, high, logarithmic: false, step, ticks: multiples(low, high, step) }
    }

    /// An axis with about `count` ticks that shows all values; values that are not finite are left
    /// out.
    pub(super) fn of_values(values: impl Iterator<Item = f64>, base: Base, count: usize) -> Self {
        let finite = values.filter(|value| value.is_finite());
        let (low, high) =
            finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        if low > high {
            return Self::linear(0.0, 1.0, count);
        }
        if base != Base::Linear && low > 0.0 && high / low > LOG_RATIO {
            return Self::logarithmic(low, high, count);
        }
        let low = if base != Base::Free && low > 0.0 { 0.0 } else { low };
        if low < high {
            return Self::linear(low, high, count);
        }
        let margin = if low == 0.0 { 1.0 } else { low.abs() / 2.0 };
        Self::linear((low - margin).max(f64::MIN), (high + margin).min(f64::MAX), count)
    }

    fn linear(low: f64, high: f64, count: usize) -> Self {
        let step = round_step((high / 2.0 - low / 2.0) / count as f64 * 2.0);
        let outward = |value: f64, round: fn(f64) -> f64| {
            let at = round(value / step) * step;
            if at.is_finite() { at } else { value }
        };
        let (low, high) = (outward(low, f64::floor).min(low), outward(high, f64::ceil).max(high));
        Self { low, high, logarithmic: false, step, ticks: multiples(low, high, step) }
    }

    fn logarithmic(low: f64, high: f64, count: usize) -> Self {
        let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
        let every = (last - first).unsigned_abs().div_ceil(count as u32).max(1) as usize;
        let ticks = (first..=last).rev().step_by(every).map(power_of_ten).filter(|tick| tick.is_finite());
        let mut ticks: Vec<f64> = ticks.filter(|tick| *tick > 0.0).collect();
        ticks.reverse();
        let edge = |tick: f64, value: f64| if tick.is_finite() && tick > 0.0 { tick } else { value };
        let (low, high) = (edge(power_of_ten(first), low), edge(power_of_ten(last), high));
        Self { low, high, logarithmic: true, step: 0.0, ticks }
    }

    pub(super) fn is_logarithmic(&self) -> bool {
        self.logarithmic
    }

    /// Where a value lies, from 0 to 1; None if it has no place.
    pub(super) fn place(&self, value: f64) -> Option<f64> {
        let share = if self.logarithmic {
            if value <= 0.0 {
                return None;
            }
            (value.log10() - self.low.log10()) / (self.high.log10() - self.low.log10())
        } else {
            (value / 2.0 - self.low / 2.0) / (self.high / 2.0 - self.low / 2.0)
        };
        share.is_finite().then(|| share.clamp(0.0, 1.0))
    }

    /// The text of a tick.
    pub(super) fn label(&self, tick: f64) -> String {
        if tick == 0.0 {
            return "0".to_string();
        }
        if self.logarithmic {
            let exponent = exponent(tick);
            return if (-3..6).contains(&exponent) {
                grouped(tick, (-exponent).max(0) as usize)
            } else {
                format!("{tick:e}")
            };
        }
        let (size, fine) = (exponent(self.low.abs().max(self.high.abs())), exponent(self.step));
        if (-3..7).contains(&size) && fine > -6 {
            return grouped(tick, (-fine).max(0) as usize);
        }
        let digits = (exponent(tick) - fine).clamp(0, 6) as usize;
        format!("{tick:.digits$e}")
    }
}

/// The exponent of the leading decimal digit.
fn exponent(value: f64) -> i32 {
    let text = format!("{value:e}");
    text.split_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or(0)
}

fn power_of_ten(exponent: i32) -> f64 {
    format!("1e{exponent}").parse().unwrap_or(f64::INFINITY)
}

/// The smallest of 1, 2, 5 times a power of ten that is not below `raw`.
fn round_step(raw: f64) -> f64 {
    if !raw.is_finite() || raw <= 0.0 {
        return 1.0;
    }
    let unit = power_of_ten(exponent(raw));
    let steps = [1.0, 2.0, 5.0, 10.0].map(|times| times * unit);
    // A subnormal number has no room for factors.
    steps.into_iter().find(|step| *step >= raw && step.is_finite()).unwrap_or(raw)
}

fn multiples(low: f64, high: f64, step: f64) -> Vec<f64> {
    let first = (low / step).ceil();
    let ticks = (0..TICKS_MAX).map(|index| (first + index as f64) * step);
    // A little beyond the end: the product is rounded.
    ticks.take_while(|tick| *tick <= high + step / 1024.0).filter(|tick| tick.is_finite()).collect()
}

/// A number with `decimals` and commas between thousands.
pub(super) fn grouped(value: f64, decimals: usize) -> String {
    let text = format!("{:.decimals$}", value.abs());
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let mut out = String::from(if value < 0.0 { "−" } else { "" });
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out + rest
}

/// A measured number in few characters.
pub(super) fn short(value: f64) -> String {
    if !value.is_finite() {
        return "not finite".to_string();
    }
    match exponent(value) {
        _ if value == 0.0 => "0".to_string(),
        size @ -3..4 => grouped(value, (3 - size).clamp(0, 5) as usize),
        4..9 => grouped(value, 0),
        _ => format!("{value:.2e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<String> {
        axis.ticks.iter().map(|tick| axis.label(*tick)).collect()
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(labels(&Axis::of_steps(1, 3, 4)), ["1", "2", "3"]);
        assert_eq!(labels(&Axis::of_steps(10, 30_000, 4)), ["0", "10,000", "20,000", "30,000"]);
        assert_eq!(labels(&Axis::of_steps(1, 1, 4)), ["1", "2"]);
        let of = |values: &[f64], base| labels(&Axis::of_values(values.iter().copied(), base, 4));
        assert_eq!(of(&[0.52, 2.31], Base::Free), ["0.5", "1.0", "1.5", "2.0", "2.5"]);
        assert_eq!(of(&[0.0, 2e-4], Base::Zero), ["0", "5e-5", "1.0e-4", "1.5e-4", "2.0e-4"]);
        assert_eq!(of(&[4652.0, 3900.0], Base::Zero), ["0", "2,000", "4,000", "6,000"]);
        assert_eq!(of(&[0.1, 12_000.0], Base::Zero), ["0.1", "10", "1,000", "100,000"]);
        assert_eq!(of(&[1e-8, 2e-4], Base::Linear), ["0", "5e-5", "1.0e-4", "1.5e-4", "2.0e-4"]);
        assert_eq!(of(&[3.0], Base::Free), ["1", "2", "3", "4", "5"]);
        assert_eq!(of(&[0.0], Base::Free), ["−1.0", "−0.5", "0", "0.5", "1.0"]);
        assert_eq!(of(&[], Base::Free), of(&[f64::NAN, f64::INFINITY], Base::Free));
    }

    #[test]
    fn every_finite_number_has_a_place() {
        let extremes = [f64::MIN, -1.0, -f64::MIN_POSITIVE, 0.0, 5e-324, 1e-300, 1.0, 1e300, f64::MAX];
        for low in extremes {
            for high in extremes {
                for base in [Base::Zero, Base::Linear, Base::Free] {
                    let axis = Axis::of_values([low, high].into_iter(), base, 4);
                    for value in [low, high] {
                        let place = axis.place(value).unwrap_or(f64::NAN);
                        assert!((0.0..=1.0).contains(&place), "{value} on {axis:?}");
                    }
                    assert!(axis.ticks.len() <= TICKS_MAX && !labels(&axis).iter().any(|label| label.len() > 24));
                }
            }
        }
        assert_eq!(Axis::of_steps(0, u64::MAX, 4).place(u64::MAX as f64), Some(1.0));
        assert_eq!(Axis::of_values([1.0].into_iter(), Base::Free, 4).place(f64::NAN), None);
    }

    #[test]
    fn numbers_of_any_size_are_short() {
        let said = [0.0, 2e-4, 0.53124, 2.3051, 12.0, 4652.4, 123_456.7, 1e12, f64::NAN, -3.5].map(short);
        assert_eq!(
            said,
            ["0", "2.00e-4", "0.5312", "2.305", "12.00", "4,652", "123,457", "1.00e12", "not finite", "−3.500"]
        );
    }
}

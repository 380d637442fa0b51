//! Rotary positions of a config: base, scaling, and the rotated share of a head. Reads
//! `rope_parameters` of new files, which may tell layers with a window apart, and `rope_theta`,
//! `rope_scaling` and `partial_rotary_factor` of old ones; inner keys take precedence over outer
//! ones.

use super::fields::Fields;
use super::text::Implied;
use crate::ModelError;
use isobit_numerics::rope::{LongRope, RopeScaling, Yarn};
use serde_json::Value;

/// A rotation of its own, of the layers with a window.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalRotation {
    pub theta: f64,
    pub scaling: RopeScaling,
}

/// The base of such a rotation where `rope_parameters` does not state it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LocalBase {
    /// The key of old files, if there is one.
    pub(crate) key: Option<&'static str>,
    pub(crate) theta: f64,
}

pub(crate) struct Rope {
    pub(crate) theta: f64,
    pub(crate) scaling: RopeScaling,
    /// In families that have one.
    pub(crate) local: Option<LocalRotation>,
    /// Rotated share of a head, if the file specifies it.
    pub(crate) partial: Option<f64>,
    /// `mscale_all_dim` of a scaled rotation; otherwise zero.
    pub(crate) mscale_all_dim: f64,
    /// Widths of the three parts of an image position, in pairs. In text all three are the same
    /// position.
    sections: Option<Vec<usize>>,
}

/// Kinds of layers that `rope_parameters` may tell apart.
const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

pub(crate) fn parse(outer: Fields, max_positions: usize, implied: &Implied) -> Result<Rope, ModelError> {
    let parameters = outer.object("rope_parameters")?;
    let typed = match parameters {
        Some(inner) => inner.object(FULL)?.is_some() || inner.object(SLIDING)?.is_some(),
        None => false,
    };
    let Some(local) = implied.local else {
        if typed {
            return Err(outer.wrong("`rope_parameters` differ by layer type, which this family does not have"));
        }
        let silent = parameters.is_none() && outer.object("rope_scaling")?.is_none();
        let rope = flat(outer, parameters, max_positions, implied.theta)?;
        return Ok(match implied.yarn {
            Some(yarn) if silent => Rope { scaling: RopeScaling::Yarn(yarn), ..rope },
            _ => rope,
        });
    };
    if let (Some(inner), false) = (parameters, typed) {
        return Err(inner.wrong(format!("`rope_parameters` has neither `{FULL}` nor `{SLIDING}`")));
    }
    let none = Fields::new(&Value::Null, "config.json");
    let of = |kind: &str| parameters.map_or(Ok(None), |inner| inner.object(kind));
    let full = if typed { Some(of(FULL)?.unwrap_or(none)) } else { None };
    let rope = flat(outer, full, max_positions, implied.theta)?;
    let sliding = of(SLIDING)?.unwrap_or(none);
    let theta = match (sliding.positive("rope_theta")?, local.key) {
        (Some(theta), _) => theta,
        (None, Some(key)) => outer.positive(key)?.unwrap_or(local.theta),
        // Other programs take such a file in two ways.
        (None, None) if outer.positive("rope_theta")?.is_some_and(|theta| theta != local.theta) => {
            let what = format!("`rope_theta` is not {}, and nothing says whether it is for all layers", local.theta);
            return Err(outer.wrong(what));
        }
        (None, None) => local.theta,
    };
    if sliding.positive("partial_rotary_factor")?.is_some_and(|share| Some(share) != rope.partial) {
        return Err(sliding.wrong("`partial_rotary_factor` differs by layer type"));
    }
    let scaling = scaling(kind(sliding)?, sliding, none, max_positions)?;
    if matches!(scaling, RopeScaling::LongRope(_)) {
        return Err(sliding.wrong("longrope is not for layers with a window"));
    }
    Ok(Rope { local: Some(LocalRotation { theta, scaling }), ..rope })
}

fn kind(inner: Fields<'_>) -> Result<&str, ModelError> {
    Ok(inner.optional_text("rope_type")?.or(inner.optional_text("type")?).unwrap_or("default"))
}

/// One rotation, from `inner` or the keys of old files.
fn flat(outer: Fields, inner: Option<Fields>, max_positions: usize, theta: f64) -> Result<Rope, ModelError> {
    let inner = match inner {
        Some(inner) => inner,
        None => outer.object("rope_scaling")?.unwrap_or(Fields::new(&Value::Null, "config.json")),
    };
    let theta = inner.positive("rope_theta")?.or(outer.positive("rope_theta")?).unwrap_or(theta);
    let partial = inner.positive("partial_rotary_factor")?.or(outer.positive("partial_rotary_factor")?);
    let scaling = scaling(kind(inner)?, inner, outer, max_positions)?;
    let mscale_all_dim =
        if scaling == RopeScaling::Default { 0.0 } else { inner.number("mscale_all_dim")?.unwrap_or(0.0) };
    let sections = inner.numbers("mrope_section", super::fields::AXIS_MAX)?;
    Ok(Rope { theta, scaling, local: None, partial, mscale_all_dim, sections })
}

fn scaling(kind: &str, inner: Fields, outer: Fields, max_positions: usize) -> Result<RopeScaling, ModelError> {
    let factor = || inner.positive("factor")?.ok_or_else(|| inner.wrong("rope scaling has no `factor`"));
    #[expect(clippy::float_arithmetic, reason = "yarn's rule for a missing factor")]
    let stretch = |original: f64| max_positions as f64 / original;
    let original = match inner.positive("original_max_position_embeddings")? {
        Some(original) => original,
        None => outer.positive("original_max_position_embeddings")?.unwrap_or(max_positions as f64),
    };
    Ok(match kind {
        "default" => RopeScaling::Default,
        "linear" => RopeScaling::Linear { factor: factor()? },
        "llama3" => RopeScaling::Llama3 {
            factor: factor()?,
            low_frequency_factor: inner.positive("low_freq_factor")?.unwrap_or(1.0),
            high_frequency_factor: inner.positive("high_freq_factor")?.unwrap_or(4.0),
            original_max_position: original,
        },
        "yarn" => RopeScaling::Yarn(Yarn {
            factor: inner.positive("factor")?.unwrap_or_else(|| stretch(original)),
            original_max_position: original,
            beta_fast: inner.positive("beta_fast")?.unwrap_or(32.0),
            beta_slow: inner.positive("beta_slow")?.unwrap_or(1.0),
            truncate: inner.flag("truncate", true)?,
            attention_factor: inner.positive("attention_factor")?,
            mscale: inner.number("mscale")?.unwrap_or(0.0),
            mscale_all_dim: inner.number("mscale_all_dim")?.unwrap_or(0.0),
        }),
        "longrope" | "su" => RopeScaling::LongRope(long_rope(inner, original, stretch(original))?),
        other => {
            let other = isobit_proof::name::quoted(other);
            let what = format!("rope type {other} is not one of default, linear, llama3, yarn, longrope");
            return Err(inner.wrong(what));
        }
    })
}

fn long_rope(inner: Fields, original: f64, stretch: f64) -> Result<LongRope, ModelError> {
    let divisors = |key: &str| {
        let list = inner.get(key).and_then(Value::as_array);
        let number = |value: &Value| value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
        let divisors: Option<Vec<f64>> = list.and_then(|list| list.iter().map(number).collect());
        divisors.ok_or_else(|| inner.wrong(format!("`{key}` is not a list of numbers above zero")))
    };
    Ok(LongRope {
        short: divisors("short_factor")?,
        long: divisors("long_factor")?,
        original_max_position: original,
        factor: inner.positive("factor")?.unwrap_or(stretch),
        attention_factor: inner.positive("attention_factor")?,
    })
}

impl Rope {
    /// Rotated channels per head: all of them, or the share given by the file or the family.
    pub(crate) fn width(&self, fields: Fields, head_width: usize, share: f64) -> Result<usize, ModelError> {
        let share = self.partial.unwrap_or(share);
        #[expect(clippy::float_arithmetic, reason = "a width, cut to a whole number as its writers do")]
        let width = libm::trunc(head_width as f64 * share) as usize;
        if width == 0 || width > head_width || !width.is_multiple_of(2) {
            return Err(fields.wrong(format!(
                "`partial_rotary_factor` {share} rotates {width} of {head_width} channels, which is not an even number"
            )));
        }
        Ok(width)
    }

    /// Checks that longrope has a divisor for every rotated pair.
    fn check_divisors(&self, fields: Fields, width: usize) -> Result<(), ModelError> {
        let RopeScaling::LongRope(long) = &self.scaling else { return Ok(()) };
        for (key, divisors) in [("short_factor", &long.short), ("long_factor", &long.long)] {
            if divisors.len() != width / 2 {
                let (found, pairs) = (divisors.len(), width / 2);
                return Err(fields.wrong(format!("`{key}` has {found} numbers for {pairs} rotated pairs")));
            }
        }
        Ok(())
    }

    /// Checks that what the file has for every rotated pair, or for parts of an image position,
    /// fits the rotated channels.
    pub(crate) fn check_sections(&self, fields: Fields, rotary_width: usize) -> Result<(), ModelError> {
        self.check_divisors(fields, rotary_width)?;
        let Some(sections) = &self.sections else { return Ok(()) };
        let sum = sections.iter().try_fold(0_usize, |sum, section| sum.checked_add(*section));
        if sections.len() == 3 && sum == Some(rotary_width / 2) {
            return Ok(());
        }
        let pairs = rotary_width / 2;
        Err(fields
            .wrong(format!("`mrope_section` is not three numbers whose sum is {pairs}, the number of rotated pairs")))
    }

    /// The factor applied twice to the scale of latent attention
    /// (`0.1·mscale_all_dim·ln(factor) + 1`).
    pub(crate) fn latent_growth(&self) -> f64 {
        let factor = match self.scaling {
            RopeScaling::Default => return 1.0,
            RopeScaling::LongRope(LongRope { factor, .. })
            | RopeScaling::Yarn(Yarn { factor, .. })
            | RopeScaling::Linear { factor }
            | RopeScaling::Dynamic { factor, .. }
            | RopeScaling::Llama3 { factor, .. } => factor,
        };
        if self.mscale_all_dim == 0.0 || factor <= 1.0 {
            return 1.0;
        }
        #[expect(clippy::float_arithmetic, reason = "a parameter of the op, host arithmetic")]
        let growth = 0.1 * self.mscale_all_dim * libm::log(factor) + 1.0;
        growth
    }
}

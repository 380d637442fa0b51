//! Rotary positions of a config: base, scaling, and the rotated share of a head. Reads
//! `rope_parameters` of new files, and `rope_theta`, `rope_scaling` and `partial_rotary_factor` of
//! old ones; inner keys take precedence over outer ones.

use super::fields::Fields;
use crate::ModelError;
use isobit_numerics::rope::{RopeScaling, Yarn};

pub(crate) struct Rope {
    pub(crate) theta: f64,
    pub(crate) scaling: RopeScaling,
    /// Rotated share of a head, if the file specifies it.
    pub(crate) partial: Option<f64>,
    /// `mscale_all_dim` of a scaled rotation; otherwise zero.
    pub(crate) mscale_all_dim: f64,
    /// Widths of the three parts of an image position, in pairs. In text all three are the same
    /// position.
    sections: Option<Vec<usize>>,
}

pub(crate) fn parse(outer: Fields, max_positions: usize) -> Result<Rope, ModelError> {
    let inner = match outer.object("rope_parameters")? {
        Some(inner) => inner,
        None => outer.object("rope_scaling")?.unwrap_or(Fields::new(&serde_json::Value::Null, "config.json")),
    };
    let theta = inner.positive("rope_theta")?.or(outer.positive("rope_theta")?).unwrap_or(10000.0);
    let partial = inner.positive("partial_rotary_factor")?.or(outer.positive("partial_rotary_factor")?);
    let kind = inner.optional_text("rope_type")?.or(inner.optional_text("type")?).unwrap_or("default");
    let scaling = scaling(kind, inner, outer, max_positions)?;
    let mscale_all_dim =
        if scaling == RopeScaling::Default { 0.0 } else { inner.number("mscale_all_dim")?.unwrap_or(0.0) };
    let sections = inner.numbers("mrope_section", super::fields::AXIS_MAX)?;
    Ok(Rope { theta, scaling, partial, mscale_all_dim, sections })
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
        other => {
            let other = isobit_proof::name::quoted(other);
            return Err(inner.wrong(format!("rope type {other} is not one of default, linear, llama3, yarn")));
        }
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

    /// Checks that the parts of an image position fill the rotated channels.
    pub(crate) fn check_sections(&self, fields: Fields, rotary_width: usize) -> Result<(), ModelError> {
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
            RopeScaling::Yarn(Yarn { factor, .. })
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

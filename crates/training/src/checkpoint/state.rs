//! The contents of a checkpoint: trainable tensors under their names in files, the optimizer's
//! moments, and the progress of the run. Everything that can change during a run is here; numbers
//! that must be restored exactly are stored as their bits.

use isobit_proof::Hash;
use isobit_proof::safetensors::NamedTensor;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// Completed updates.
    pub step: u64,
    /// Trainable tensors under the names other tools use: PEFT's keys, or the model's own. Sorted
    /// by name once loaded.
    pub weights: Vec<NamedTensor>,
    /// First moments under the names of their weights. Moments of weights that were never updated
    /// may be missing.
    pub moments1: Vec<NamedTensor>,
    pub moments2: Vec<NamedTensor>,
    pub progress: Progress,
}

/// The progress of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    schema: Schema,
    /// Completed updates.
    pub step: u64,
    /// Completed epochs.
    pub epoch: u64,
    pub rows_seen: u64,
    pub tokens_seen: u64,
    pub best: Option<Best>,
    pub evals_without_improvement: u32,
    /// Sum of the losses since the last line of the metrics, and the number of updates: the next
    /// line is their mean.
    #[serde(rename = "loss_sum_bits", with = "bits")]
    pub loss_sum: f64,
    pub loss_count: u64,
    /// Digest of the lines of `metrics.jsonl` up to here, without their timing; None in checkpoints
    /// of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<Hash>,
    /// The link of this step in `chain.jsonl`; None in checkpoints of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chain: Option<Hash>,
    pub identity: Identity,
}

/// The best evaluation so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    pub step: u64,
    #[serde(rename = "metric_bits", with = "bits")]
    pub metric: f64,
}

/// The identity of a run: a checkpoint resumes only under the same one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// `Run::digest`.
    pub run: String,
    /// Digest of the training and evaluation rows.
    pub data: String,
    /// Digest of the base model's files.
    pub base: String,
    pub profile: String,
    /// Version of the bit contract.
    pub numerics: String,
    /// Digest of the adapter that the run starts from. Left out where there is none: the identity
    /// of other runs is what it was before this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<String>,
    /// The rule by which linear layers are quantised while they are loaded. Left out where they are
    /// not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_in_4bit: Option<String>,
}

impl Identity {
    /// Its fields by name.
    pub fn fields(&self) -> BTreeMap<String, String> {
        let Self { run, data, base, profile, numerics, start, load_in_4bit } = self;
        let fields = [("run", run), ("data", data), ("base", base), ("profile", profile), ("numerics", numerics)];
        let optional = [("start", start), ("load_in_4bit", load_in_4bit)];
        let optional = optional.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
        let fields = fields.into_iter().chain(optional);
        fields.map(|(name, value)| (name.to_string(), value.clone())).collect()
    }

    /// The digest recorded in the manifests of its folders.
    pub fn digest(&self) -> Hash {
        isobit_proof::receipt::identity_digest(&self.fields())
    }
}

/// The schema's name in the file; no other is accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Schema {
    #[default]
    #[serde(rename = "isobit.state/1")]
    One,
}

impl Progress {
    /// Before the first update.
    pub fn start(identity: Identity) -> Self {
        Self {
            schema: Schema::One,
            step: 0,
            epoch: 0,
            rows_seen: 0,
            tokens_seen: 0,
            best: None,
            evals_without_improvement: 0,
            loss_sum: 0.0,
            loss_count: 0,
            metrics: None,
            chain: None,
            identity,
        }
    }

    /// Records an evaluation after the current step; lower is better. Returns whether it is the
    /// best so far: the first of equals stays, and NaN is never best.
    pub fn take_eval(&mut self, metric: f64) -> bool {
        let better = !metric.is_nan() && self.best.is_none_or(|best| metric < best.metric);
        if better {
            self.best = Some(Best { step: self.step, metric });
            self.evals_without_improvement = 0;
        } else {
            self.evals_without_improvement = self.evals_without_improvement.saturating_add(1);
        }
        better
    }
}

/// A float64 as the sixteen hexadecimal digits of its bits: decimal parsers differ in the last
/// place.
pub(crate) mod bits {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature serde asks for")]
    pub(crate) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{:016x}", value.to_bits()))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digits = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let value = if digits { u64::from_str_radix(&text, 16).ok() } else { None };
        value.map(f64::from_bits).ok_or_else(|| D::Error::custom("not the sixteen hexadecimal digits of a float64"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evaluations_find_the_best_and_count_the_others() {
        let name = String::new;
        let identity = Identity {
            run: name(),
            data: name(),
            base: name(),
            profile: name(),
            numerics: name(),
            start: None,
            load_in_4bit: None,
        };
        let mut progress = Progress::start(identity);
        let mut take = |step, metric| {
            progress.step = step;
            (progress.take_eval(metric), progress.best.map(|best| best.step), progress.evals_without_improvement)
        };
        assert_eq!(take(1, f64::NAN), (false, None, 1));
        assert_eq!(take(2, 3.0), (true, Some(2), 0));
        assert_eq!(take(3, 3.0), (false, Some(2), 1));
        assert_eq!(take(4, f64::INFINITY), (false, Some(2), 2));
        assert_eq!(take(5, 2.5), (true, Some(5), 0));
        let text = serde_json::to_string(&progress).expect("has a JSON form");
        assert!(text.contains(r#""metric_bits":"4004000000000000""#), "{text}");
        assert_eq!(serde_json::from_str::<Progress>(&text).expect("reads back"), progress);
        for bad in ["", "4004", "+004000000000000", "400400000000000g"] {
            let text = text.replace("4004000000000000", bad);
            assert!(serde_json::from_str::<Progress>(&text).is_err(), "{bad}");
        }
    }
}

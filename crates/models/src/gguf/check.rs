//! What llama.cpp would compute differently, found before anything is written.

use super::{GgufRules, HeadRule, Routing, WindowRotation, Windows, refused};
use crate::ModelError;
use crate::config::{AttentionConfig, AttentionKind, Config, ExpertsConfig, LatentConfig, MlpKind, Rotary, Scoring};
use isobit_numerics::elementary::ClampedSwiglu;
use isobit_numerics::rope::RopeScaling;

/// Constants of its clamped SwiGLU.
const CLAMP: ClampedSwiglu = ClampedSwiglu { alpha: 1.702, limit: 7.0 };

/// The attention of all layers.
pub(super) enum Attention<'c> {
    /// The same everywhere, apart from window and rotation.
    Softmax {
        shared: AttentionConfig,
        window: Option<Window>,
    },
    Latent(&'c LatentConfig),
}

/// Sliding windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Window {
    /// The smallest that a layer has, where llama.cpp has none.
    Longest(usize),
    /// One size; the last of every `period` layers has none.
    Periodic { size: usize, period: usize },
}

impl<'c> Attention<'c> {
    pub(super) fn of(config: &'c Config, rules: GgufRules) -> Result<Self, ModelError> {
        match config.layers.first().map(|layer| &layer.attention) {
            Some(AttentionKind::Softmax(_)) => softmax(config, rules),
            Some(AttentionKind::Latent(latent)) => {
                check_latent(config, latent)?;
                Ok(Self::Latent(latent))
            }
            Some(AttentionKind::Delta(_)) => Err(refused("its attention is not one that can be written as GGUF yet")),
            None => Err(refused("it has no layers")),
        }
    }
}

/// Embedding, head and logits.
pub(super) fn ends(config: &Config, rules: GgufRules, tied: bool) -> Result<(), ModelError> {
    match rules.head {
        HeadRule::Needed if tied => {
            return Err(refused("llama.cpp reads no head that is the table in models of this family"));
        }
        HeadRule::Tied if !tied => {
            return Err(refused("llama.cpp takes the table for the head in models of this family, this one has both"));
        }
        _ => {}
    }
    let scaled = config.embedding_scale.is_some() || config.head_scale.is_some();
    if scaled && !rules.multipliers && rules.gemma.is_none() {
        return Err(refused("llama.cpp has no factors on embedding and logits in models of this family"));
    }
    if config.logit_cap.is_some() != rules.capped {
        return Err(refused("llama.cpp caps the logits of another model of this family"));
    }
    Ok(())
}

fn softmax(config: &Config, rules: GgufRules) -> Result<Attention<'_>, ModelError> {
    let mut found: Option<AttentionConfig> = None;
    for (at, layer) in config.layers.iter().enumerate() {
        let AttentionKind::Softmax(attention) = &layer.attention else {
            return Err(refused("its attention is not one that can be written as GGUF yet"));
        };
        let shared = AttentionConfig { rotary: Rotary::Global, window: None, ..attention.clone() };
        if *found.get_or_insert(shared.clone()) != shared {
            return Err(refused("llama.cpp needs the same kind of attention in every layer of this family"));
        }
        let is_left_out = rules.unrotated.is_some_and(|every| (at + 1).is_multiple_of(every));
        let is_local = attention.window.is_some() && has_own_rotation(rules.windows);
        let expected = match (is_left_out, is_local) {
            (true, _) => Rotary::None,
            (false, true) => Rotary::Local,
            (false, false) => Rotary::Global,
        };
        if attention.rotary != expected {
            return Err(refused("llama.cpp rotates other layers of such a model"));
        }
    }
    let shared = found.ok_or_else(|| refused("it has no layers"))?;
    check_softmax(config, rules, &shared)?;
    Ok(Attention::Softmax { shared, window: window(config, rules)? })
}

fn has_own_rotation(windows: Windows) -> bool {
    matches!(windows, Windows::Periodic { rotation: WindowRotation::OwnBase | WindowRotation::SameBase, .. })
}

fn window(config: &Config, rules: GgufRules) -> Result<Option<Window>, ModelError> {
    let windows: Vec<Option<usize>> = config
        .layers
        .iter()
        .map(|layer| match &layer.attention {
            AttentionKind::Softmax(attention) => attention.window,
            _ => None,
        })
        .collect();
    let smallest = windows.iter().flatten().copied().min();
    match (rules.windows, smallest) {
        (Windows::Ignored, smallest) => Ok(smallest.filter(|size| *size < config.max_positions).map(Window::Longest)),
        (Windows::Periodic { needed: false, .. }, None) => Ok(None),
        (Windows::Periodic { .. }, None) => {
            Err(refused("llama.cpp expects sliding windows in models of this family, this one has none"))
        }
        (Windows::Periodic { period, rotation, .. }, Some(size)) => {
            let has_window: Vec<bool> = windows.iter().map(Option::is_some).collect();
            let period = period_of(&has_window, period);
            let Some(period) = period.filter(|_| windows.iter().flatten().all(|other| *other == size)) else {
                return Err(refused("llama.cpp has windows of one size, in all layers but every n-th"));
            };
            check_rotation(config, rotation)?;
            Ok(Some(Window::Periodic { size, period }))
        }
    }
}

/// The `n` for which exactly the last of every `n` layers has no window; the usual one if it fits.
fn period_of(has_window: &[bool], usual: usize) -> Option<usize> {
    let fits =
        |period: &usize| has_window.iter().enumerate().all(|(layer, window)| *window == (layer % period + 1 < *period));
    std::iter::once(usual).chain(2..=has_window.len() + 1).find(fits)
}

/// The rotation of layers with a window.
fn check_rotation(config: &Config, rotation: WindowRotation) -> Result<(), ModelError> {
    let Some(local) = config.local_rotation.as_ref().filter(|_| rotation != WindowRotation::Same) else {
        return Ok(());
    };
    if local.scaling != RopeScaling::Default {
        return Err(refused("llama.cpp does not scale the rotation of layers with a window"));
    }
    if rotation == WindowRotation::SameBase && local.theta != config.rope_theta {
        return Err(refused("llama.cpp has one base for the rotations of all layers of this family"));
    }
    Ok(())
}

fn check_softmax(config: &Config, rules: GgufRules, attention: &AttentionConfig) -> Result<(), ModelError> {
    if attention.gated {
        return Err(refused("its gated attention cannot be written as GGUF yet"));
    }
    if attention.cap.is_some() != rules.capped {
        return Err(refused("llama.cpp caps the scores of another model of this family"));
    }
    if attention.sinks != (rules.routing == Routing::Clamped) {
        return Err(refused("llama.cpp has attention sinks in gpt-oss only"));
    }
    if attention.sinks && !attention.output_bias {
        return Err(refused("llama.cpp expects biases on all projections of this family, this model has none"));
    }
    if attention.qkv_bias && !rules.qkv_bias || attention.output_bias && !rules.other_bias {
        return Err(biases(rules));
    }
    if rules.heads_fill_hidden && attention.output_width() != config.hidden {
        let (heads, hidden) = (attention.output_width(), config.hidden);
        return Err(refused(format!(
            "its heads are {heads} wide together, llama.cpp expects the hidden size {hidden}"
        )));
    }
    let is_permuted = rules.interleaved && !attention.interleaved;
    let is_whole = attention.rotary_width == attention.head_width && attention.names.qkv.is_none();
    if attention.interleaved && !rules.interleaved || is_permuted && !is_whole {
        return Err(refused("llama.cpp rotates other pairs of channels in models of this family"));
    }
    let divisor = match rules.gemma {
        Some(layers) if layers == config.layers.len() => config.hidden / attention.heads,
        _ => attention.head_width,
    };
    if !rules.multipliers && !is_root(attention.scale, divisor) {
        return Err(refused(format!(
            "llama.cpp multiplies scores with 1/√{divisor} in such a model, this one does not"
        )));
    }
    Ok(())
}

/// Whether a scale is `1/√width`, up to rounding.
#[expect(clippy::float_arithmetic, reason = "a setting of another program")]
fn is_root(scale: f32, width: usize) -> bool {
    (f64::from(scale) * (width as f64).sqrt() - 1.0).abs() < 1e-6
}

fn check_latent(config: &Config, latent: &LatentConfig) -> Result<(), ModelError> {
    if config.layers.iter().any(|layer| !matches!(&layer.attention, AttentionKind::Latent(other) if other == latent)) {
        return Err(refused("llama.cpp needs the same kind of attention in every layer of this family"));
    }
    if latent.bias {
        return Err(refused("llama.cpp reads no biases of latent attention"));
    }
    if !latent.interleaved {
        return Err(refused(
            "llama.cpp rotates neighbours in latent attention, this model (`rope_interleave` false) does not",
        ));
    }
    if latent.norm_eps != config.eps {
        let what =
            "llama.cpp has one `rms_norm_eps`: this model's is not the one that latent attention is normalised with";
        return Err(refused(format!("{what} ({:e})", latent.norm_eps)));
    }
    Ok(())
}

pub(super) fn biases(rules: GgufRules) -> ModelError {
    refused(format!("llama.cpp reads no biases of these layers in a model of architecture {}", rules.architecture))
}

/// The MLP that all layers have.
pub(super) fn same_mlp(config: &Config) -> Result<&MlpKind, ModelError> {
    let mut all = config.layers.iter().map(|layer| &layer.mlp);
    match all.next() {
        Some(first) if all.all(|other| other == first) => Ok(first),
        _ => Err(refused("llama.cpp needs the same kind of MLP in every layer of this family")),
    }
}

/// Number and width of the dense layers, which come first, and the experts of the others.
pub(super) fn leading_dense(config: &Config) -> Result<(usize, Option<usize>, &ExpertsConfig), ModelError> {
    let odd = || refused("llama.cpp needs dense layers first, then layers with the same experts");
    let first = config.layers.iter().position(|layer| matches!(layer.mlp, MlpKind::Experts(_))).ok_or_else(odd)?;
    let MlpKind::Experts(experts) = &config.layers[first].mlp else { return Err(odd()) };
    if config.layers[first..].iter().any(|layer| layer.mlp != config.layers[first].mlp) {
        return Err(odd());
    }
    let width = match config.layers[0].mlp {
        MlpKind::Dense { width, .. } => Some(width),
        MlpKind::Experts(_) => None,
    };
    Ok((first, width, experts))
}

/// Routers without keys for what they do. `scale` is what the outputs of all branches are
/// multiplied with.
pub(super) fn router(routing: Routing, experts: &ExpertsConfig, scale: f32) -> Result<(), ModelError> {
    if !experts.renormalise {
        let what =
            "llama.cpp always renormalises the chosen experts' weights (`norm_topk_prob` true), this model does not";
        return Err(refused(what));
    }
    if experts.scoring != Scoring::Softmax {
        return Err(refused("llama.cpp scores the experts of this family by softmax, this model does not"));
    }
    if experts.scale != scale {
        return Err(refused("llama.cpp has no factor on the experts' weights in this family, this model has one"));
    }
    let has_biases = routing == Routing::Clamped;
    let clamp = has_biases.then_some(CLAMP);
    if experts.router_bias != has_biases || experts.biases != has_biases || experts.clamp != clamp {
        return Err(refused("llama.cpp has other experts in models of this family"));
    }
    if experts.shared.is_some() || experts.correction_bias.is_some() || experts.groups > 1 {
        return Err(refused("its router cannot be written as GGUF yet"));
    }
    Ok(())
}

//! What the environment says about HIP. A program hands it over once, at its start: nothing below
//! reads the environment.

use super::target::{Target, architecture_of_version};
use std::ffi::OsString;
use std::sync::OnceLock;

/// Without a program that sets them: no child processes, nothing overridden.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Settings {
    /// Whether this program compiles in child processes of itself.
    pub(super) children: bool,
    /// The value of `HSA_OVERRIDE_GFX_VERSION`.
    pub(super) gfx_override: Option<String>,
    /// Variables that hide devices, with their values.
    pub(super) hidden_by: Vec<String>,
    /// Variables that add options to those of the compiler.
    pub(super) appended_by: Vec<&'static str>,
}

static CURRENT: OnceLock<Settings> = OnceLock::new();

pub(super) fn current() -> Settings {
    CURRENT.get().cloned().unwrap_or_default()
}

/// The first call of a process counts.
pub(super) fn set(settings: Settings) {
    let _ = CURRENT.set(settings);
}

impl Settings {
    /// `variable` gives the value of an environment variable.
    pub(super) fn from_environment(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        const HIDING: [&str; 4] =
            ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"];
        const APPENDING: [&str; 3] =
            ["HIPRTC_COMPILE_OPTIONS_APPEND", "HIPRTC_LINK_OPTIONS_APPEND", "AMD_COMGR_DRIVER_OPTIONS_APPEND"];
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let text = |name: &str| set(name).map(|value| value.to_string_lossy().into_owned());
        let hidden_by = HIDING.into_iter().filter_map(|name| {
            // An empty list hides every device.
            variable(name).map(|value| format!("{name}={}", value.to_string_lossy()))
        });
        Self {
            children: false,
            gfx_override: text("HSA_OVERRIDE_GFX_VERSION"),
            hidden_by: hidden_by.collect(),
            appended_by: APPENDING.into_iter().filter(|name| set(name).is_some()).collect(),
        }
    }

    /// Code compiled for another architecture may compute wrong results. `real` is the card's
    /// architecture according to the kernel driver.
    pub(super) fn override_objection(&self, target: &Target, real: Option<&str>) -> Option<String> {
        let value = self.gfx_override.as_deref()?;
        let claimed = architecture_of_version(value).unwrap_or_else(|| target.to_string());
        match real {
            Some(real) if real == claimed => None,
            Some(real) => Some(format!(
                "HSA_OVERRIDE_GFX_VERSION={value} would run code for {claimed} on this {real} card: unset it"
            )),
            None => Some(format!(
                "HSA_OVERRIDE_GFX_VERSION={value} is set, and what the card really is cannot be read: unset it"
            )),
        }
    }

    pub(super) fn option_objection(&self) -> Option<String> {
        let name = self.appended_by.first()?;
        Some(format!("{name} adds compiler options, which may change the bits: unset it"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Settings {
        Settings::from_environment(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn an_override_must_name_the_cards_own_architecture() {
        let target = Target::parse("gfx906").expect("a target");
        let overridden = settings(&[("HSA_OVERRIDE_GFX_VERSION", "9.0.6")]);
        assert_eq!(settings(&[]).override_objection(&target, Some("gfx906")), None);
        assert_eq!(overridden.override_objection(&target, Some("gfx906")), None);
        let wrong = overridden.override_objection(&target, Some("gfx908")).expect("refused");
        assert!(wrong.contains("gfx906") && wrong.contains("gfx908") && wrong.contains("unset"), "{wrong}");
        assert!(overridden.override_objection(&target, None).is_some_and(|text| text.contains("unset")));
        // Not a version: the driver decides what it means.
        let odd = settings(&[("HSA_OVERRIDE_GFX_VERSION", "mi50")]);
        assert!(odd.override_objection(&target, Some("gfx908")).is_some());
    }

    #[test]
    fn added_options_are_refused() {
        assert_eq!(settings(&[("HIPRTC_COMPILE_OPTIONS_APPEND", "")]).option_objection(), None);
        let objection = settings(&[("HIPRTC_COMPILE_OPTIONS_APPEND", "-ffast-math")]).option_objection();
        assert!(objection.is_some_and(|text| text.contains("HIPRTC_COMPILE_OPTIONS_APPEND")));
    }
}

//! What the environment says about HIP. A program hands it over once, at its start: nothing below
//! reads the environment.

use super::target::{Target, architecture_of_version};
use std::ffi::OsString;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Variables that hide devices.
pub const HIDING_VARIABLES: [&str; 4] =
    ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"];
/// Variables that add options to those of the compiler, which may change the bits.
pub const APPENDING_VARIABLES: [&str; 3] =
    ["HIPRTC_COMPILE_OPTIONS_APPEND", "HIPRTC_LINK_OPTIONS_APPEND", "AMD_COMGR_DRIVER_OPTIONS_APPEND"];

/// How long the runtime may be silent. A machine with many cards takes some seconds.
const SECONDS_MAX: u32 = 20;

/// Whether the runtime is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Open {
    /// Where the system has an AMD device.
    #[default]
    WithDevice,
    Always,
    Never,
}

/// Without a program that sets them: no child processes, nothing overridden.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::gpu) struct Settings {
    /// Whether this program compiles, and lists cards, in child processes of itself.
    pub(in crate::gpu) children: bool,
    /// Whether this process is the child that lists cards.
    pub(in crate::gpu) is_child: bool,
    /// The value of `ISOBIT_HIP`.
    pub(super) open: Open,
    /// The value of `ISOBIT_HIP_TIMEOUT`.
    pub(super) seconds_max: u32,
    /// A variable of ours that says nothing.
    pub(super) mistake: Option<String>,
    /// The value of `HSA_OVERRIDE_GFX_VERSION`.
    pub(super) gfx_override: Option<String>,
    /// Variables that hide devices, with their values.
    pub(super) hidden_by: Vec<String>,
    /// Variables that add options to those of the compiler.
    pub(super) appended_by: Vec<&'static str>,
}

static CURRENT: OnceLock<Settings> = OnceLock::new();

pub(in crate::gpu) fn current() -> Settings {
    Settings { is_child: IS_CHILD.load(Ordering::Relaxed), ..CURRENT.get().cloned().unwrap_or_default() }
}

/// The first call of a process counts.
pub(super) fn set(settings: Settings) {
    let _ = CURRENT.set(settings);
}

static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// This process was started to list cards.
pub(in crate::gpu) fn set_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

impl Settings {
    /// `variable` gives the value of an environment variable.
    pub(super) fn from_environment(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let text = |name: &str| set(name).map(|value| value.to_string_lossy().into_owned());
        let hidden_by = HIDING_VARIABLES.into_iter().filter_map(|name| {
            // An empty list hides every device.
            variable(name).map(|value| format!("{name}={}", value.to_string_lossy()))
        });
        let (open, bad_open) = match text("ISOBIT_HIP").as_deref() {
            None => (Open::WithDevice, None),
            Some("always") => (Open::Always, None),
            Some("off") => (Open::Never, None),
            Some(other) => (Open::Never, Some(format!("ISOBIT_HIP={other}: `always` and `off` exist"))),
        };
        let timeout = text("ISOBIT_HIP_TIMEOUT");
        let seconds = timeout.as_deref().map_or(Some(SECONDS_MAX), |text| text.parse().ok().filter(|n| *n > 0));
        let bad_timeout = seconds.is_none().then(|| {
            format!("ISOBIT_HIP_TIMEOUT={}: write seconds, 1 or more", timeout.as_deref().unwrap_or_default())
        });
        Self {
            children: false,
            is_child: false,
            open,
            seconds_max: seconds.unwrap_or(SECONDS_MAX),
            mistake: bad_open.or(bad_timeout),
            gfx_override: text("HSA_OVERRIDE_GFX_VERSION"),
            hidden_by: hidden_by.collect(),
            appended_by: APPENDING_VARIABLES.into_iter().filter(|name| set(name).is_some()).collect(),
        }
    }

    /// Why the runtime is not opened, if the environment says so.
    pub(super) fn refusal(&self) -> Result<(), String> {
        match &self.mistake {
            Some(mistake) => Err(mistake.clone()),
            None if self.open == Open::Never => Err("ISOBIT_HIP=off leaves out HIP devices: unset it".to_string()),
            None => Ok(()),
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
    fn our_own_variables_say_something_or_are_refused() {
        let plain = settings(&[]);
        assert_eq!((plain.open, plain.seconds_max, plain.refusal()), (Open::WithDevice, SECONDS_MAX, Ok(())));
        assert_eq!(settings(&[("ISOBIT_HIP", "always")]).open, Open::Always);
        assert_eq!(settings(&[("ISOBIT_HIP_TIMEOUT", "60")]).seconds_max, 60);
        for (name, value) in [
            ("ISOBIT_HIP", "off"),
            ("ISOBIT_HIP", "on"),
            ("ISOBIT_HIP_TIMEOUT", "0"),
            ("ISOBIT_HIP_TIMEOUT", "-1"),
            ("ISOBIT_HIP_TIMEOUT", "soon"),
        ] {
            let refusal = settings(&[(name, value)]).refusal();
            assert!(refusal.is_err_and(|why| why.contains(&format!("{name}={value}"))), "{name}={value}");
        }
    }

    #[test]
    fn added_options_are_refused() {
        assert_eq!(settings(&[("HIPRTC_COMPILE_OPTIONS_APPEND", "")]).option_objection(), None);
        let objection = settings(&[("HIPRTC_COMPILE_OPTIONS_APPEND", "-ffast-math")]).option_objection();
        assert!(objection.is_some_and(|text| text.contains("HIPRTC_COMPILE_OPTIONS_APPEND")));
    }
}

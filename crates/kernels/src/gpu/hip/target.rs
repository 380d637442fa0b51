//! Architectures of AMD devices: their names, and which of them the kernels are made for.

use std::fmt;

/// An architecture that kernels are made for.
struct Known {
    name: &'static str,
    /// The first ROCm whose compiler knows it: an older one aborts the process.
    rocm_min: i32,
    /// Whether it has matrix cores for bytes that the programs named `*_mfma` know.
    mfma: bool,
}

const KNOWN: [Known; 4] = [
    Known { name: "gfx906", rocm_min: 5, mfma: false },
    Known { name: "gfx908", rocm_min: 5, mfma: true },
    Known { name: "gfx90a", rocm_min: 5, mfma: true },
    Known { name: "gfx942", rocm_min: 6, mfma: true },
];

/// Architectures that kernels are made for.
pub fn architectures() -> [&'static str; KNOWN.len()] {
    KNOWN.map(|known| known.name)
}

/// Whether an architecture has matrix cores for bytes.
pub fn has_mfma(architecture: &str) -> bool {
    KNOWN.iter().any(|known| known.name == architecture && known.mfma)
}

/// What a device calls itself: `gfx906:sramecc+:xnack-`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    architecture: String,
}

impl Target {
    pub(super) fn parse(name: &str) -> Result<Self, String> {
        let architecture = name.split(':').next().unwrap_or_default().trim();
        let plain = architecture.strip_prefix("gfx").is_some_and(|rest| {
            !rest.is_empty() && rest.len() <= 8 && rest.bytes().all(|byte| byte.is_ascii_alphanumeric())
        });
        if plain {
            Ok(Self { architecture: architecture.to_string() })
        } else {
            Err(format!("the device reports the architecture `{name}`, which is not one of AMD's"))
        }
    }

    /// Without features: code for the plain name runs with any setting of them.
    pub(super) fn architecture(&self) -> &str {
        &self.architecture
    }

    /// Why there is no code for it.
    pub(super) fn objection(&self, rocm: i32) -> Option<String> {
        let name = &self.architecture;
        match KNOWN.iter().find(|known| known.name == name) {
            None => {
                let known = architectures().join(", ");
                Some(format!("{name} is not supported: HIP kernels are made for {known}; try the card as `opencl:N`"))
            }
            Some(Known { rocm_min, .. }) if rocm < *rocm_min => {
                Some(format!("the compiler of ROCm {rocm} does not know {name}: install ROCm {rocm_min} or later"))
            }
            Some(_) => None,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.architecture)
    }
}

/// The name of `9.0.10` is `gfx90a`: minor version and stepping are one hexadecimal digit each.
pub fn architecture_of_version(version: &str) -> Option<String> {
    let parts: Option<Vec<u32>> = version.split('.').map(|part| part.parse().ok()).collect();
    match parts?[..] {
        [major, minor, stepping] if major < 100 && minor < 16 && stepping < 16 => {
            Some(format!("gfx{major}{minor:x}{stepping:x}"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_cut_off() {
        for name in ["gfx906", "gfx906:sramecc+:xnack-", "gfx906:xnack-"] {
            assert_eq!(Target::parse(name).expect("a target").architecture(), "gfx906");
        }
        for name in ["", "gfx", "sm_90", "gfx9 06 -O0", "gfx906 --save-temps", "GFX906"] {
            assert!(Target::parse(name).is_err(), "{name}");
        }
    }

    #[test]
    fn what_is_not_known_is_refused_with_a_way_out() {
        let objection = |name, rocm| Target::parse(name).expect("a target").objection(rocm);
        assert_eq!(objection("gfx906", 5), None);
        assert_eq!(objection("gfx942", 6), None);
        assert!(objection("gfx942", 5).is_some_and(|text| text.contains("install ROCm 6")));
        assert!(objection("gfx803", 7).is_some_and(|text| text.contains("gfx803") && text.contains("opencl:N")));
    }

    #[test]
    fn matrix_cores_are_known_by_name() {
        assert_eq!(architectures().map(has_mfma), [false, true, true, true]);
        assert!(!has_mfma("gfx950") && !has_mfma("gfx1100"));
    }

    #[test]
    fn versions_are_names() {
        for (version, name) in [("9.0.6", "gfx906"), ("9.0.10", "gfx90a"), ("10.3.0", "gfx1030"), ("9.4.2", "gfx942")] {
            assert_eq!(architecture_of_version(version).as_deref(), Some(name));
        }
        for version in ["", "9", "9.0", "9.0.6.1", "gfx906", "9.0.16", "9.-1.0"] {
            assert_eq!(architecture_of_version(version), None, "{version}");
        }
    }
}

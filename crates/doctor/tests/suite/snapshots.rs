//! What the doctor says of each machine, word for word. `TRYCMD=overwrite` writes what it says now;
//! look at the diff.

use crate::machine::{ALL, Machine};
use isobit_doctor::{facts_text, findings, findings_text};
use std::path::Path;

fn report(machine: &Machine) -> String {
    let facts = machine.facts();
    facts_text(&facts) + "\n" + &findings_text(&findings(&facts))
}

#[track_caller]
pub(crate) fn check(name: &str, said: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots").join(name).with_extension("txt");
    if std::env::var_os("TRYCMD").is_some_and(|value| value == "overwrite") {
        std::fs::write(&path, said).expect("written");
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(said, expected, "{}", path.display());
}

#[test]
fn every_machine_as_it_was() {
    for name in ALL {
        check(name, &report(&Machine::of(name)));
    }
}

/// The stack that the owners of MI50 cards usually meet.
#[test]
fn an_mi50_with_a_python_environment_and_an_override() {
    let mut machine = Machine::of("mi50");
    machine.set("HSA_OVERRIDE_GFX_VERSION", "9.0.8");
    machine.set("HSA_ENABLE_SDMA", "0");
    let packages = [("torch", "2.5.1+rocm6.2"), ("bitsandbytes", "0.45.0"), ("torchao", "0.9.0"), ("peft", "0.14.0")];
    machine.put_python("3.13.1", &packages);
    machine.remove("dev/kfd");
    let root = machine.path("").display().to_string();
    check("mi50-python", &report(&machine).replace(root.trim_end_matches('/'), ""));
}

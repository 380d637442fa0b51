//! Python environments, from their files.

use crate::machine::Machine;
use isobit_doctor::Facts;

#[test]
fn packages_are_read_from_their_metadata() {
    let mut machine = Machine::of("none");
    machine.put_python("3.12.1", &[("transformer-engine", "2.2.0"), ("torch", "2.5.1+rocm6.2")]);
    let folder = "venv/lib/python3.12/site-packages";
    // Metadata counts, not the name of the folder; without it, the name does.
    machine.put(&format!("{folder}/PEFT-9.dist-info/METADATA"), "Name: peft\nVersion: 0.14.0\n");
    machine.put(&format!("{folder}/some.thing_else-1.5.dist-info/RECORD"), "");
    machine.put(&format!("{folder}/old-3.egg-info/PKG-INFO"), "Name: Old\nVersion: 3.1\n");
    machine.put(&format!("{folder}/torch/__init__.py"), "");
    let python = machine.facts().python.expect("an environment");
    let packages: Vec<(&str, &str)> = python.packages.iter().map(|(name, version)| (&**name, &**version)).collect();
    let expected = [
        ("old", "3.1"),
        ("peft", "0.14.0"),
        ("some-thing-else", "1.5"),
        ("torch", "2.5.1+rocm6.2"),
        ("transformer-engine", "2.2.0"),
    ];
    assert_eq!((packages, python.version.as_deref()), (expected.to_vec(), Some("3.12.1")));
}

#[test]
fn an_interpreter_stands_for_its_environment() {
    let mut machine = Machine::of("none");
    machine.put_python("3.12.1", &[("torch", "2.6.0")]);
    machine.put("venv/bin/python", "");
    machine.python = Some(machine.path("venv/bin/python"));
    assert!(machine.facts().python.is_some_and(|python| python.packages.contains_key("torch")));
    // Without an environment of its own, the interpreter's name says which of several is meant.
    machine.put("usr/bin/python3.11", "");
    for (minor, version) in [(11, "2.5.0"), (13, "2.9.0")] {
        let folder = format!("usr/lib/python3.{minor}/site-packages/torch-{version}.dist-info");
        machine.put(&format!("{folder}/METADATA"), format!("Name: torch\nVersion: {version}\n"));
    }
    machine.python = Some(machine.path("usr/bin/python3.11"));
    let python = machine.facts().python.expect("an environment");
    assert_eq!((python.version.as_deref(), &*python.packages["torch"]), (Some("3.11"), "2.5.0"));
}

#[test]
fn what_is_no_environment_is_an_error_that_says_so() {
    let mut machine = Machine::of("none");
    machine.put_python("3.12.1", &[("torch", "2.6.0")]);
    for name in ["venv/bin/activate", "venv/bin/pip3.12", "venv/bin/python-config", "elsewhere/python3"] {
        machine.put(name, "");
    }
    for (path, part) in [
        ("nowhere", "does not exist"),
        ("venv/bin/python9", "does not exist"),
        ("proc", "has no folder lib/python3.N/site-packages"),
        ("venv/bin", "has no folder lib/python3.N/site-packages"),
        ("venv/pyvenv.cfg", "is not a Python interpreter"),
        ("venv/bin/activate", "is not a Python interpreter"),
        ("venv/bin/pip3.12", "is not a Python interpreter"),
        ("venv/bin/python-config", "is not a Python interpreter"),
        ("elsewhere/python3", "is in no folder `bin`"),
    ] {
        machine.python = Some(machine.path(path));
        let error = Facts::read(&machine.sources()).expect_err(path);
        assert!(error.contains(part), "{error}");
    }
    machine.python = Some("/dev/null".into());
    let error = Facts::read(&machine.sources()).expect_err("no environment");
    assert!(error.contains("/dev/null is neither a folder nor a file"), "{error}");
}

/// A pipe is never opened, be it named or found.
#[cfg(unix)]
#[test]
fn pipes_are_not_waited_for() {
    let mut machine = Machine::of("none");
    machine.put_python("3.12.1", &[("torch", "2.6.0")]);
    let pipe = |path: &std::path::Path| {
        assert!(std::process::Command::new("mkfifo").arg(path).status().is_ok_and(|status| status.success()));
    };
    machine.python = Some(machine.path("venv/bin/python3.12"));
    pipe(&machine.path("venv/bin/python3.12"));
    let error = Facts::read(&machine.sources()).expect_err("a pipe");
    assert!(error.contains("is neither a folder nor a file"), "{error}");
    machine.python = Some(machine.path("venv"));
    for file in ["pyvenv.cfg", "lib/python3.12/site-packages/torch-2.6.0.dist-info/METADATA"] {
        machine.remove(&format!("venv/{file}"));
        pipe(&machine.path(&format!("venv/{file}")));
    }
    let python = machine.facts().python.expect("an environment");
    assert_eq!((python.version.as_deref(), &*python.packages["torch"]), (Some("3.12"), "2.6.0"));
}

/// The Python that an environment was made with is gone: its packages are still there.
#[cfg(unix)]
#[test]
fn a_broken_environment_is_read_and_named() {
    let mut machine = Machine::of("none");
    machine.put_python("3.12.1", &[("torch", "2.6.0")]);
    machine.remove("venv/bin");
    std::fs::create_dir(machine.path("venv/bin")).expect("a folder");
    std::os::unix::fs::symlink("/opt/gone/bin/python3.12", machine.path("venv/bin/python")).expect("a link");
    for named in ["venv", "venv/bin/python"] {
        machine.python = Some(machine.path(named));
        let python = machine.facts().python.expect("an environment");
        assert_eq!(&*python.packages["torch"], "2.6.0");
        let problem = python.problem.expect("no interpreter");
        assert!(
            problem.contains("venv/bin/python links to /opt/gone/bin/python3.12, which does not exist"),
            "{problem}"
        );
        assert_eq!(machine.ids(), ["python-without-interpreter"]);
    }
}

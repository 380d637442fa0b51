//! Runs a test in its own process, for state that belongs to the whole process (memory counters,
//! signal handlers, the current folder), since tests run as threads of one.

use std::process::{Command, Stdio};

/// Set in a process started for a single test.
const MARK: &str = "ISOBIT_TEST_IN_OWN_PROCESS";

/// Runs `body` if this process was started for this test alone; otherwise starts such a process and
/// fails if it fails.
///
/// `test` is the full path of the calling test, including the crate:
/// `concat!(module_path!(), "::", "its_name")`. `prepare` may set the folder and the environment of
/// the process.
pub fn in_own_process(test: &str, prepare: impl FnOnce(&mut Command), body: impl FnOnce()) {
    if std::env::var_os(MARK).is_some_and(|mark| mark == test) {
        return body();
    }
    let (_, name) = test.split_once("::").expect("a crate and a name in it");
    let program = std::env::current_exe().expect("the path of this program");
    let mut command = Command::new(program);
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(MARK, test).stdin(Stdio::null());
    prepare(&mut command);
    let output = command.output().expect("the process starts");
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    // A filter that matches no test succeeds too.
    let ran = output.status.success() && out.contains("1 passed");
    assert!(ran, "`{name}` in a process of its own: {}\n{out}{err}", output.status);
}

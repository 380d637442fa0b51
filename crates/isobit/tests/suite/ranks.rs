//! Law 9 from the outside: `mpirun isobit train` with any number of ranks is the run of one
//! process. Needs a program built with `--features mpi`, and `mpirun`; a program without MPI must
//! refuse to be one of several.

use crate::model_folder::{Folder, Shape, finished};

/// A launcher's variables are enough: each of the processes would take itself for the only one.
#[cfg(not(feature = "mpi"))]
#[test]
fn a_program_without_mpi_is_not_one_of_several() {
    let folder = Folder::new(Shape::TINY);
    let train = |variables: &[(&str, &str)]| {
        let mut command = folder.command(&["train", "config.toml", "-q", "--set", "output_dir=out"]);
        crate::model_folder::finished(command.envs(variables.iter().copied()).output().expect("the program starts"))
    };
    for (variables, who) in [
        (&[("OMPI_COMM_WORLD_SIZE", "4"), ("PMIX_RANK", "0")][..], "mpirun started 4 processes"),
        (&[("PMI_SIZE", "2")], "mpiexec started 2 processes"),
        (&[("SLURM_STEP_NUM_TASKS", "3")], "srun started 3 processes"),
        (&[("PMIX_RANK", "0")], "as one of several"),
    ] {
        train(variables).says(2, &[who, "built without MPI", "libopenmpi-dev", "--features mpi"]);
        assert!(!folder.has("out"), "{who}");
    }
    // One process is no team, and a batch script starts its commands once.
    assert_eq!(train(&[("OMPI_COMM_WORLD_SIZE", "1"), ("SLURM_NTASKS", "8")]).code, 0);
}

/// Whatever is in the environment, a process that no launcher started trains alone.
#[test]
fn nonsense_in_a_launchers_variables_is_nobodys() {
    let folder = Folder::new(Shape::TINY);
    for (at, (name, value)) in
        [("PMI_SIZE", "many"), ("OMPI_COMM_WORLD_SIZE", "-3"), ("SLURM_STEP_NUM_TASKS", "0"), ("PMI_SIZE", "")]
            .into_iter()
            .enumerate()
    {
        let output = format!("output_dir=out-{at}");
        let mut command = folder.command(&["train", "config.toml", "-q", "--set", &output, "--set", "max_steps=1"]);
        let ran = crate::model_folder::finished(command.env(name, value).output().expect("the program starts"));
        assert_eq!(ran.code, 0, "{name}={value}: {}", ran.err);
    }
}

/// Seconds are whole.
/// The first process plans for all of them.
#[test]
fn a_plan_under_a_launcher_comes_once() {
    let folder = Folder::new(Shape::TINY);
    let plan = |rank: &str, more: &[&str]| {
        let mut command = folder.command(&[&["plan", "config.toml", "--json"], more].concat());
        command.env("OMPI_COMM_WORLD_SIZE", "2").env("OMPI_COMM_WORLD_RANK", rank);
        finished(command.output().expect("the program starts"))
    };
    let groups = ["--set", "gradient_groups=2"];
    let (first, second) = (plan("0", &groups), plan("1", &groups));
    let of_two = folder.run(&["plan", "config.toml", "--json", "--ranks", "2", groups[0], groups[1]]);
    assert_eq!(first.json()[0]["total_bytes"], of_two.json()[0]["total_bytes"], "{}", first.err);
    assert_eq!((second.code, &second.out[..], &second.err[..]), (0, "", ""));
    plan("0", &["--set", "gradient_groups=1"]).says(2, &["2 ranks cannot share 1 gradient group"]);
}

#[test]
fn a_timeout_in_parts_of_seconds_is_refused() {
    let folder = Folder::new(Shape::TINY);
    folder.put("config.toml", format!("rank_timeout = 1.5\n{}", folder.text("config.toml")));
    let ran = folder.run(&["train", "config.toml"]);
    ran.says(
        2,
        &["config.toml:1: `rank_timeout` must be a whole number, found", "1.5", "write a whole number", "seconds"],
    );
}

#[cfg(not(feature = "mpi"))]
#[test]
fn ranks() {
    let why = "the program is built without `--features mpi`".to_string();
    isobit_conformance::skip("ranks", &[("mpi".to_string(), why)]);
}

#[cfg(feature = "mpi")]
mod mpi {
    use super::*;
    use crate::model_folder::{Ran, train_arguments};
    use std::process::{Child, Command, Stdio};
    use std::time::Duration;

    /// Groups for up to four ranks.
    const GROUPS: [&str; 4] = ["gradient_groups=4", "threads=1", "max_steps=6", "save_steps=2"];
    const LONG: [&str; 5] = ["gradient_groups=4", "threads=1", "max_steps=60", "save_steps=3", "logging_steps=1"];

    /// True if `mpirun` is there; otherwise the test is skipped.
    fn is_there(test: &str) -> bool {
        let found = Command::new("mpirun").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        let missing = found.err().map(|error| ("mpi".to_string(), format!("mpirun does not start: {error}")));
        isobit_conformance::skip(test, &missing.clone().into_iter().collect::<Vec<_>>());
        missing.is_none()
    }

    /// `mpirun -n RANKS isobit train`, while it runs; that of Open MPI (the variables) or of MPICH.
    fn started(folder: &Folder, ranks: usize, output: &str, more: &[&str]) -> Child {
        let program = train_arguments(output, more);
        let mut command = Command::new("mpirun");
        command.args(["-n", &ranks.to_string(), env!("CARGO_BIN_EXE_isobit")]).args(program);
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command.env("OMPI_MCA_rmaps_base_oversubscribe", "1");
        command.current_dir(folder.path("")).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("mpirun starts")
    }

    fn ended(child: Child) -> Ran {
        finished(child.wait_with_output().expect("it ends"))
    }

    #[track_caller]
    fn trained(folder: &Folder, ranks: usize, output: &str, more: &[&str]) {
        let ran = ended(started(folder, ranks, output, more));
        assert_eq!(ran.code, 0, "{ranks} ranks: {}", ran.err);
    }

    /// Waits until the run has written so many lines of metrics.
    fn at_step(folder: &Folder, ranks: usize, output: &str, more: &[&str], step: usize) -> Child {
        let child = started(folder, ranks, output, more);
        let metrics = folder.path(&format!("{output}/metrics.jsonl"));
        for _ in 0..20_000 {
            if std::fs::read_to_string(&metrics).unwrap_or_default().lines().count() >= step {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        child
    }

    /// Sends a signal to one rank of a run, by its process id: the one that has this number from
    /// the launcher of Open MPI or of MPICH, and that works in this folder.
    fn signal(folder: &Folder, rank: usize, name: &str) {
        let wanted = ["OMPI_COMM_WORLD_RANK", "PMI_RANK"].map(|name| format!("{name}={rank}"));
        let place = std::fs::canonicalize(folder.path("")).expect("a folder");
        let processes = std::fs::read_dir("/proc").expect("processes").filter_map(Result::ok);
        let of_rank = processes.map(|entry| entry.path()).find(|process| {
            let environment = std::fs::read(process.join("environ")).unwrap_or_default();
            let mut variables = environment.split(|byte| *byte == 0);
            std::fs::read_link(process.join("cwd")).is_ok_and(|at| at == place)
                && variables.any(|variable| wanted.iter().any(|wanted| variable == wanted.as_bytes()))
        });
        let id = of_rank.expect("the rank runs").file_name().expect("an id").to_string_lossy().into_owned();
        assert!(Command::new("kill").args([name, &id]).status().expect("kill").success());
    }

    #[test]
    fn any_number_of_ranks() {
        if !is_there("ranks::mpi::any_number_of_ranks") {
            return;
        }
        let dense = Folder::new(Shape::TINY);
        let experts = Folder::of_experts();
        experts.put("config.toml", experts.text("config.toml") + "[adapter]\ntype = \"full\"\n");
        for (folder, counts) in [(dense, &[2, 3, 4][..]), (experts, &[3])] {
            folder.trained("one", &GROUPS);
            for ranks in counts {
                let output = format!("ranks-{ranks}");
                trained(&folder, *ranks, &output, &GROUPS);
                folder.same("one", &output);
            }
            assert!(folder.text("ranks-3/metrics.jsonl").contains("\"communication_s\":"));
        }
    }

    /// Layers over devices inside a rank, rows over ranks outside.
    #[test]
    fn a_rank_with_a_list_of_devices() {
        if !is_there("ranks::mpi::a_rank_with_a_list_of_devices") {
            return;
        }
        let full = Folder::new(Shape::TINY);
        let config = full.text("config.toml");
        let at = config.find("[adapter]").expect("a section");
        full.put("config.toml", format!("{}[adapter]\ntype = \"full\"\n", &config[..at]));
        let settings = ["gradient_groups=2", "threads=1", "training.micro_batch_size=1"];
        for folder in [Folder::new(Shape::TINY), full] {
            folder.trained("one", &settings);
            for (output, devices) in [("first", "[\"cpu,cpu\",\"cpu\"]"), ("both", "[\"cpu,cpu\",\"cpu,cpu\"]")] {
                let devices = format!("devices_by_rank={devices}");
                trained(&folder, 2, output, &[&settings[..], &[devices.as_str()]].concat());
                folder.same("one", output);
            }
        }
    }

    /// What `srun --mpi=none` leaves in the environment. Each process would be alone, and Open MPI
    /// ends it with 1 and words about how it was built.
    #[test]
    fn processes_that_slurm_does_not_connect() {
        let folder = Folder::new(Shape::TINY);
        let mut command = folder.command(&["train", "config.toml", "-q", "--set", "output_dir=out"]);
        for (name, value) in
            [("STEP_NUM_TASKS", "2"), ("JOBID", "1"), ("STEP_ID", "0"), ("NODELIST", "a"), ("PROCID", "0")]
        {
            command.env(format!("SLURM_{name}"), value);
        }
        let ran = finished(command.output().expect("the program starts"));
        ran.says(2, &["srun started 2 processes, but MPI connects", "`srun --mpi=pmix`", "--mpi=list"]);
        assert!(!folder.has("out"));
    }

    #[test]
    fn killed_stopped_or_hanging_and_resumed_with_other_ranks() {
        if !is_there("ranks::mpi::killed_stopped_or_hanging_and_resumed_with_other_ranks") {
            return;
        }
        let folder = Folder::new(Shape::TINY);
        folder.trained("one", &LONG);
        let resume = [&LONG[..], &["--resume"]].concat();

        let child = at_step(&folder, 3, "killed", &LONG, 7);
        signal(&folder, 2, "-KILL");
        assert_ne!(ended(child).code, 0);
        trained(&folder, 2, "killed", &resume);
        folder.same("one", "killed");

        let child = at_step(&folder, 2, "stopped", &LONG, 7);
        signal(&folder, 1, "-TERM");
        ended(child).says(143, &["stopped after", "by SIGTERM", "--resume"]);
        trained(&folder, 4, "stopped", &resume);
        folder.same("one", "stopped");

        let child = at_step(&folder, 3, "hanging", &[&LONG[..], &["rank_timeout=1"]].concat(), 7);
        signal(&folder, 1, "-STOP");
        ended(child).says(6, &["rank 1 did not answer within 1 second:"]);
        folder.trained("hanging", &resume);
        folder.same("one", "hanging");
    }

    #[test]
    fn refusals_come_once_and_before_the_folder() {
        if !is_there("ranks::mpi::refusals_come_once_and_before_the_folder") {
            return;
        }
        let folder = Folder::new(Shape::TINY);
        let ran = ended(started(&folder, 3, "out", &["gradient_groups=2", "threads=1"]));
        ran.says(2, &["3 ranks cannot share 2 gradient groups", "gradient_groups = 3"]);
        assert_eq!(ran.err.matches("error: ").count(), 1, "{}", ran.err);
        assert!(!ran.err.contains("asking all ranks"), "the launcher's signal is no request: {}", ran.err);
        let ran = ended(started(&folder, 2, "out", &["gradient_groups=2", "devices_by_rank=[\"cpu\"]"]));
        ran.says(2, &["`devices_by_rank` has 1 device list for 2 ranks"]);
        assert!(!folder.has("out"));
    }
}

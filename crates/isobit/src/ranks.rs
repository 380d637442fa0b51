//! `isobit train` on several ranks: whether a launcher started this process as one of them, what
//! each computes on, and how they end together.

use crate::Failure;
use crate::backend::cores;
use isobit_proof::name::counted;
use isobit_training::config::Run;
use isobit_training::prepare::RunError;
#[cfg(feature = "mpi")]
use isobit_training::ranks::launch::SRUN;
use isobit_training::ranks::launch::{Launch, neighbours_from, rank_from};
use isobit_training::ranks::{Alone, RankError, RankFailure, Team, World};
use isobit_training::signal;

#[expect(clippy::disallowed_methods, reason = "launchers say here how many processes they started")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// What a launcher of several processes says to this one.
fn launch() -> Option<(Launch, Option<usize>)> {
    Launch::from(variable).filter(Launch::is_shared).map(|launch| (launch, rank_from(variable)))
}

/// The number of this process among those that a launcher started, and how many there are, where it
/// says both: for commands in which the others have nothing to do.
pub(crate) fn launched() -> Option<(usize, usize)> {
    let (launch, rank) = launch()?;
    rank.zip(launch.size)
}

/// How many of the launched processes are on this machine, as far as a launcher says it.
pub(crate) fn launched_here() -> usize {
    neighbours_from(variable).unwrap_or(1)
}

/// The processes of this run: usually this one alone.
pub(crate) fn world() -> Result<Box<dyn World>, Failure> {
    let Some((launch, _)) = launch() else { return Ok(Box::new(Alone)) };
    signal::end_on_usr1().map_err(|error| Failure::output(&error))?;
    connected(&launch)
}

/// Who started how many processes.
fn started(launch: &Launch) -> String {
    let count = launch.size.map_or("this process as one of several".to_string(), |size| format!("{size} processes"));
    format!("{} started {count}", launch.launcher)
}

#[cfg(not(feature = "mpi"))]
fn connected(launch: &Launch) -> Result<Box<dyn World>, Failure> {
    Err(Failure::usage(
        format!("{}, but this program is built without MPI: each would train alone", started(launch)),
        "install an MPI and libclang (Debian: `apt install libopenmpi-dev openmpi-bin libclang-dev`) and build with \
         `cargo install --path crates/isobit --features mpi`, or start one process",
    ))
}

#[cfg(feature = "mpi")]
fn connected(launch: &Launch) -> Result<Box<dyn World>, Failure> {
    use isobit_training::ranks::mpi::Mpi;
    let hint = if launch.launcher == SRUN {
        "`srun --mpi=pmix` connects them (`srun --mpi=list` names what this Slurm has), or `mpirun` in a job's script"
    } else {
        "start it with the `mpirun` of the MPI that it was built with; `ldd` on the program names that MPI"
    };
    let apart = |count: &str| Failure::usage(format!("{}, but MPI connects {count} of them", started(launch)), hint);
    if launch.is_unconnected(variable) && Mpi::is_open_mpi() {
        return Err(apart("none"));
    }
    let world = Mpi::start().map_err(|why| Failure::device(why, hint))?;
    if launch.size.is_some_and(|size| size != world.size()) {
        return Err(apart(&world.size().to_string()));
    }
    Ok(Box::new(world))
}

/// The config as this rank runs it: with the devices named for it and its share of the cores.
pub(crate) fn of_rank(run: &Run, world: &dyn World) -> Result<Run, Failure> {
    let mut run = run.clone();
    if !run.devices_by_rank.is_empty() {
        let (named, size) = (run.devices_by_rank.len(), world.size());
        if named != size {
            let (lists, ranks) = (counted(named as u64, "device list"), counted(size as u64, "rank"));
            let message = format!("`devices_by_rank` has {lists} for {ranks}");
            return Err(Failure::usage(message, "give each rank one, or say `--device` for all"));
        }
        run.devices = run.devices_by_rank[world.rank()].clone();
    }
    let sharing = world.neighbours().sharing;
    if run.threads == 0 && sharing > 1 {
        run.threads = (cores().unwrap_or(1) / sharing).max(1) as u32;
    }
    Ok(run)
}

/// A failure of this rank in the form that others hear of.
pub(crate) fn shared(failure: &Failure, rank: usize) -> RunError {
    let Failure { code, message, hint } = failure;
    RankError::Failed(RankFailure { rank, code: *code, what: message.clone(), hint: hint.clone() }).into()
}

/// What this rank says about an error. One that another rank reports is only an exit code here.
pub(crate) fn said(error: &RunError, team: &Team<'_>) -> Failure {
    let failure = match error {
        RunError::Rank(RankError::Failed(failure)) => {
            let RankFailure { rank, code, what, hint } = failure.clone();
            if rank != team.rank() {
                return Failure { code, message: String::new(), hint: None };
            }
            Failure { code, message: what, hint }
        }
        other => Failure::from(other),
    };
    named(failure, team)
}

/// The same with the rank in its message. What rank 0 says is said for all.
pub(crate) fn named(failure: Failure, team: &Team<'_>) -> Failure {
    let rank = format!("rank {}: ", team.rank());
    if team.is_first() || failure.message.is_empty() || failure.message.starts_with(&rank) {
        return failure;
    }
    Failure { message: rank + &failure.message, ..failure }
}

//! Whether this process was started as one of several: what `mpirun`, `mpiexec` and `srun` leave in
//! the environment. A program built without MPI must not take itself for the only one.

/// BOUND: processes that a launcher starts.
const PROCESSES_MAX: usize = 1 << 24;
/// Slurm's launcher.
pub const SRUN: &str = "srun";

/// What the environment says about a launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Who started the processes.
    pub launcher: &'static str,
    /// How many there are; None if the launcher does not say.
    pub size: Option<usize>,
}

impl Launch {
    /// Reads the environment through `variable`. None if no launcher started this process.
    pub fn from(variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        // SLURM_NTASKS would not do: a batch script has it too, and starts one process.
        const SIZES: [(&str, &str); 3] =
            [("OMPI_COMM_WORLD_SIZE", "mpirun"), ("PMI_SIZE", "mpiexec"), ("SLURM_STEP_NUM_TASKS", SRUN)];
        // Of a process whose launcher does not say how many there are; MPI_LOCALNRANKS counts those
        // of one machine.
        const SIGNS: [(&str, &str); 2] = [("MPI_LOCALNRANKS", "mpiexec"), ("PMIX_RANK", "a launcher with PMIx")];
        let sized = SIZES.iter().find_map(|(name, launcher)| {
            // No launcher starts no process, or more than this: then it is not a launcher's.
            let size = variable(name)?.trim().parse().ok().filter(|size| (1..=PROCESSES_MAX).contains(size))?;
            Some(Self { launcher, size: Some(size) })
        });
        let sign = || SIGNS.iter().find(|(name, _)| variable(name).is_some());
        sized.or_else(|| sign().map(|(_, launcher)| Self { launcher, size: None }))
    }

    /// Whether the processes were started with nothing to find each other by, as `srun --mpi=none`
    /// does: with its other ways there is also a variable of PMI or PMIx.
    pub fn is_unconnected(&self, variable: impl Fn(&str) -> Option<String>) -> bool {
        self.launcher == SRUN && variable("PMIX_RANK").is_none()
    }

    /// Whether there may be other processes.
    pub fn is_shared(&self) -> bool {
        self.size != Some(1)
    }
}

/// The number of this process among those that a launcher started, if it says that.
pub fn rank_from(variable: impl Fn(&str) -> Option<String>) -> Option<usize> {
    const RANKS: [&str; 4] = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "PMIX_RANK"];
    RANKS.iter().find_map(|name| variable(name)?.trim().parse().ok())
}

/// How many of them are on this machine, if the launcher says that.
pub fn neighbours_from(variable: impl Fn(&str) -> Option<String>) -> Option<usize> {
    const COUNTS: [&str; 2] = ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"];
    let counts = COUNTS.iter().filter_map(|name| variable(name)?.trim().parse().ok());
    counts.into_iter().find(|count| (1..=PROCESSES_MAX).contains(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers() {
        let of = |set: &[(&str, &str)]| {
            Launch::from(|name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_string()))
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0")]), None, "a batch script");
        for (name, launcher) in
            [("OMPI_COMM_WORLD_SIZE", "mpirun"), ("PMI_SIZE", "mpiexec"), ("SLURM_STEP_NUM_TASKS", "srun")]
        {
            assert_eq!(of(&[(name, "3")]), Some(Launch { launcher, size: Some(3) }));
            assert!(of(&[(name, "3")]).is_some_and(|launch| launch.is_shared()));
            assert!(!of(&[(name, "1"), ("PMIX_RANK", "0")]).is_some_and(|launch| launch.is_shared()));
        }
        for nonsense in ["0", "-1", "many", "", "1e3", "99999999", "18446744073709551616", "2;rm"] {
            for name in ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"] {
                assert_eq!(of(&[(name, nonsense)]), None, "{name}={nonsense}");
            }
        }
        let neighbours = |name: &'static str, count: &'static str| {
            neighbours_from(|asked| (asked == name).then(|| count.to_string()))
        };
        assert_eq!(neighbours("OMPI_COMM_WORLD_LOCAL_SIZE", "2"), Some(2));
        assert_eq!(neighbours("MPI_LOCALNRANKS", "3"), Some(3));
        assert_eq!((neighbours("MPI_LOCALNRANKS", "0"), neighbours("OMPI_COMM_WORLD_SIZE", "4")), (None, None));
        let is_unconnected = |set: &[(&str, &str)]| {
            let of = |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_string());
            Launch::from(of).is_some_and(|launch| launch.is_unconnected(of))
        };
        assert!(is_unconnected(&[("SLURM_STEP_NUM_TASKS", "2")]), "srun --mpi=none");
        assert!(!is_unconnected(&[("SLURM_STEP_NUM_TASKS", "2"), ("PMIX_RANK", "0")]), "srun --mpi=pmix");
        assert!(!is_unconnected(&[("SLURM_STEP_NUM_TASKS", "2"), ("PMI_SIZE", "2")]), "srun --mpi=pmi2");
        assert!(!is_unconnected(&[("SLURM_STEP_NUM_TASKS", "2"), ("OMPI_COMM_WORLD_SIZE", "4")]), "mpirun inside");
        for name in ["PMIX_RANK", "MPI_LOCALNRANKS"] {
            assert!(of(&[(name, "1")]).is_some_and(|launch| launch.is_shared()), "the size is not known");
        }
    }
}

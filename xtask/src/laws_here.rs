//! The laws of `cargo xtask laws` that no flag of the program reaches: SIMD paths, ranks as
//! threads, and the cache of generation. They run the code of `isobit train` in this process.

use isobit_autograd::{BatchLayout, Tape};
use isobit_kernels::op::Span;
use isobit_kernels::{Cpu, Device, Path as CpuPath};
use isobit_models::build::Settings;
use isobit_models::{Session, Trained, build};
use isobit_numerics::philox::{Key, Purpose};
use isobit_numerics::slices::Profile;
use isobit_training::checkpoint::Start;
use isobit_training::config;
use isobit_training::prepare::{Prepared, RunError, prepare};
use isobit_training::ranks::threads::world;
use isobit_training::ranks::{Team, World, handshake};
use isobit_training::run::{Watch, train_with};
use isobit_training::trainer::Trainer;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Prints nothing and knows no time.
struct Silent;

impl Watch for Silent {
    fn seconds(&mut self) -> f64 {
        0.0
    }

    fn wall_seconds(&mut self) -> f64 {
        0.0
    }
}

/// The demo's config with settings, its paths inside `scene`.
fn prepared(scene: &Path, run: &str, settings: &[&str]) -> Result<Prepared, RunError> {
    let settings: Vec<String> = settings.iter().map(ToString::to_string).collect();
    let mut resolved = config::read(&scene.join("demo.toml"), &settings)?.run;
    let inside = |path: &mut PathBuf| *path = scene.join(&*path);
    resolved.output_dir = PathBuf::from(run);
    inside(&mut resolved.output_dir);
    inside(&mut resolved.base_model);
    resolved.datasets.iter_mut().for_each(inside);
    prepare(resolved)
}

fn cpu(threads: usize, path: CpuPath) -> Cpu {
    Cpu::new(threads, path).expect("an available path")
}

fn train(prepared: &Prepared, cpu: Cpu, team: &Team<'_>) -> Result<(), RunError> {
    let make = |settings: &Settings| {
        let built = build(&cpu, &prepared.model, &prepared.weights, settings)?;
        Ok(Trainer::new(cpu, built))
    };
    train_with(make, prepared, Start::New, team, &mut Silent).map(|_| ())
}

/// Trains on every SIMD path of this machine; the names of the runs.
pub(crate) fn paths(scene: &Path, settings: &[&str]) -> Result<Vec<String>, String> {
    let mut runs = Vec::new();
    for path in CpuPath::available() {
        let run = format!("3-{}", path.name());
        let trained = prepared(scene, &run, settings).and_then(|run| train(&run, cpu(1, path), &Team::alone()));
        trained.map_err(|error| format!("{run}: {error}"))?;
        runs.push(run);
    }
    Ok(runs)
}

/// Trains with so many ranks, as threads.
pub(crate) fn ranks(scene: &Path, run: &str, count: usize, settings: &[&str]) -> Result<(), String> {
    let rank = |world: &dyn World| -> Result<(), RunError> {
        let team = Team::new(world, Duration::from_mins(10));
        let prepared = prepared(scene, run, settings)?;
        handshake::compare(&team, handshake::Introduction::of(&prepared, team.size()))?;
        train(&prepared, cpu(1, CpuPath::best()), &team)
    };
    let rank = &rank;
    std::thread::scope(|scope| {
        let started: Vec<_> = world(count).into_iter().map(|thread| scope.spawn(move || rank(&thread))).collect();
        let ended = started
            .into_iter()
            .map(|thread| thread.join().map_err(|_| "a rank panicked".to_string())?.map_err(|error| error.to_string()));
        ended.collect::<Result<Vec<()>, String>>()
    })?;
    Ok(())
}

/// How many prefixes were computed with a cache, and the bits in which their logits differ from
/// those of the full forward pass.
pub(crate) fn cache(scene: &Path, settings: &[&str]) -> Result<(usize, u64), String> {
    let prepared = prepared(scene, "unused", settings).map_err(|error| error.to_string())?;
    let backend = cpu(1, CpuPath::best());
    let settings = Settings { trained: Trained::Nothing, profile: Profile::X2, positions: 256, seed: 0 };
    let built = build(&backend, &prepared.model, &prepared.weights, &settings).map_err(|error| error.to_string())?;
    let vocabulary = built.model.config.vocabulary;
    let tokens: Vec<u32> = (0..200).map(|t| (t * 13 + 5) % vocabulary as u32).collect();
    let whole = 0..tokens.len();
    let layout = BatchLayout {
        tokens: tokens.len(),
        row_starts: vec![0, tokens.len()],
        spans: vec![Span { queries: whole.clone(), keys: whole }],
        positions: backend.upload(&(0..tokens.len() as u32).collect::<Vec<_>>()),
        key: Key::new(0, Purpose::Dropout),
        step: 0,
        first_row: 0,
    };
    let ids = backend.upload(&tokens);
    let mut tape = Tape::inference(&backend, &built.parameters, &layout, Profile::X2);
    let full = built.model.logits(&mut tape, &ids).map_err(|error| error.to_string())?;
    let full = backend.download(full.buffer()).map_err(|error| error.to_string())?;
    let (mut count, mut differing) = (0, 0);
    for ends in [&[1, 2, 7, 128, 129, 130, 200][..], &[63, 64, 65, 192, 200], &[200]] {
        let mut session = Session::new(&backend, &built.model, &built.parameters, Profile::X2);
        for end in ends {
            let logits = session.extend(&tokens[session.length()..*end]).map_err(|error| error.to_string())?;
            let expected = &full[(end - 1) * vocabulary..end * vocabulary];
            let bits = |(a, b): (&f32, &f32)| u64::from((a.to_bits() ^ b.to_bits()).count_ones());
            differing += logits.iter().zip(expected).map(bits).sum::<u64>();
            count += 1;
        }
    }
    Ok((count, differing))
}

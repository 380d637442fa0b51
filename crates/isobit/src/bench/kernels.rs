//! `isobit bench kernels`: a table of rates per op, path and shape, or JSON lines; with `--serve`,
//! one run per line of standard input, so that another program can interleave its own runs with
//! ours.

use super::UnitsArguments;
use super::cases::{self, Prepared, Target, Work};
use crate::Failure;
use crate::backend::{Chosen, open_cpu};
use crate::input;
use isobit_kernels::gpu::{MatrixUnits, Selector};
use isobit_kernels::{DeviceFailure, Gpu, Path};
use isobit_numerics::slices::Profile;
use serde::Serialize;
use std::io::Write;
use std::rc::Rc;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    /// Number of threads
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Use this CPU path only: scalar, avx2, avx512 or amx, or `all` for every path of this
    /// machine; default: the fastest
    #[arg(long)]
    path: Option<String>,
    /// Use a device instead of the CPU: opencl:N, cuda:N, hip:N, or auto for the first card that
    /// works
    #[arg(long, conflicts_with = "path")]
    device: Option<String>,
    #[command(flatten)]
    units: UnitsArguments,
    /// Measure this op only
    #[arg(long)]
    op: Option<String>,
    /// Use this slice product profile only (x2, x3)
    #[arg(long)]
    profile: Option<String>,
    /// Measure this shape only, written as in the table: 512x4864x896
    #[arg(long)]
    shape: Option<String>,
    /// Timed runs of each case; the best and the median are reported. Default: 20, or as many as
    /// fit in half a second
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    runs: Option<u32>,
    /// Read `OP SHAPE PROFILE PATH THREADS` lines from standard input, run each once and reply with
    /// a JSON line
    #[arg(long, conflicts_with_all = ["op", "profile", "shape", "path", "device", "mma_sync", "portable", "json"])]
    serve: bool,
}

/// One line of output.
#[derive(Debug, Serialize)]
struct Line<'a> {
    schema: &'static str,
    op: &'a str,
    path: String,
    profile: &'a str,
    shape: &'a str,
    threads: usize,
    gflops: f64,
    gb_per_s: f64,
    ms: f64,
    ms_median: f64,
    runs: usize,
    workspace_bytes: usize,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.serve {
        return serve();
    }
    let threads = usize::from(arguments.threads);
    let chosen = Chosen::parse(arguments.device.as_deref().unwrap_or("cpu"), threads)?;
    let units = arguments.units.units(&[chosen])?;
    let targets = match chosen {
        Chosen::Cpu { .. } => {
            let paths = paths(arguments.path.as_deref())?;
            paths.into_iter().map(|path| cpu(threads, path)).collect::<Result<_, _>>()?
        }
        Chosen::Gpu(selector) => vec![device(selector, units)?],
    };
    let profiles = profiles(arguments.profile.as_deref())?;
    let wanted = |name: &str, given: &Option<String>| given.as_deref().is_none_or(|given| given == name);
    let mut out = std::io::stdout().lock();
    let mut found = false;
    if !arguments.json {
        writeln!(
            out,
            "{:<22} {:<7} {:<7} {:<22} {:>7} {:>9} {:>8} {:>10} {:>10}",
            "op", "path", "profile", "shape", "threads", "GFLOP/s", "GB/s", "best ms", "median ms"
        )
        .map_err(|error| Failure::output(&error))?;
    }
    for target in targets {
        for case in cases::ALL {
            for &profile in
                profiles.iter().filter(|_| case.sliced).chain(Profile::ALL[..1].iter().filter(|_| !case.sliced))
            {
                for &shape in target.shapes(case) {
                    if !wanted(case.op, &arguments.op) || !wanted(shape, &arguments.shape) {
                        continue;
                    }
                    found = true;
                    let mut prepared = cases::prepare(&target, case.op, shape, profile).map_err(bad_case)?;
                    let line = measure(
                        &target,
                        case.op,
                        shape,
                        if case.sliced { profile.name() } else { "-" },
                        &mut prepared,
                        arguments.runs,
                    )?;
                    print(&mut out, &line, arguments.json).map_err(|error| Failure::output(&error))?;
                }
            }
        }
    }
    if found {
        Ok(())
    } else {
        Err(Failure::usage("no case has that op and shape", "run `isobit bench kernels --runs 1` to list them all"))
    }
}

fn paths(given: Option<&str>) -> Result<Vec<Path>, Failure> {
    match given {
        None => Ok(vec![Path::best()]),
        Some("all") => Ok(Path::available()),
        Some(name) => Ok(vec![
            name.parse()
                .map_err(|message: String| Failure::usage(message, "`--path all` takes every path the machine has"))?,
        ]),
    }
}

fn profiles(given: Option<&str>) -> Result<Vec<Profile>, Failure> {
    match given {
        None => Ok(Profile::ALL.to_vec()),
        Some(name) => Profile::ALL
            .into_iter()
            .find(|profile| profile.name() == name)
            .map(|profile| vec![profile])
            .ok_or_else(|| Failure::usage(format!("unknown profile `{name}`"), "use x2 or x3")),
    }
}

fn cpu(threads: usize, path: Path) -> Result<Target, Failure> {
    open_cpu(threads, path).map(|cpu| Target::Cpu(Rc::new(cpu)))
}

fn device(selector: Selector, units: MatrixUnits) -> Result<Target, Failure> {
    Gpu::open_with(selector, units).map(Target::Gpu).map_err(|failure| device_failed(&failure))
}

fn device_failed(failure: &DeviceFailure) -> Failure {
    Failure::device(failure.to_string(), "`isobit devices` lists what this machine has")
}

fn bad_case(message: String) -> Failure {
    Failure::usage(message, "`isobit bench kernels --runs 1` lists ops and shapes")
}

fn measure<'a>(
    target: &Target,
    op: &'a str,
    shape: &'a str,
    profile: &'a str,
    prepared: &mut Prepared,
    runs: Option<u32>,
) -> Result<Line<'a>, Failure> {
    const RUNS_MIN: usize = 3;
    const RUNS_MAX: usize = 20;
    const SECONDS_MAX: f64 = 0.5;
    time(target, 1, prepared)?;
    let mut times = Vec::new();
    let mut total = 0.0;
    let wanted = |done: usize, total: f64| match runs {
        Some(runs) => done < runs as usize,
        None => done < RUNS_MIN || done < RUNS_MAX && total < SECONDS_MAX,
    };
    while wanted(times.len(), total) {
        let seconds = time(target, target.batch(), prepared)?;
        total += seconds * target.batch() as f64;
        times.push(seconds);
    }
    times.sort_by(f64::total_cmp);
    let (best, median) = (times[0], times[times.len() / 2]);
    Ok(line(target, [op, shape, profile], prepared.work, &Times { best, median, runs: times.len() }))
}

/// Seconds of one run.
struct Times {
    best: f64,
    median: f64,
    runs: usize,
}

fn line<'a>(target: &Target, [op, shape, profile]: [&'a str; 3], work: Work, times: &Times) -> Line<'a> {
    let &Times { best, median, runs } = times;
    Line {
        schema: "isobit.bench.kernels/1",
        op,
        path: target.name(),
        profile,
        shape,
        threads: target.threads(),
        gflops: round(work.flops / best / 1e9),
        gb_per_s: round(work.bytes / best / 1e9),
        ms: round(best * 1e3),
        ms_median: round(median * 1e3),
        runs,
        workspace_bytes: work.workspace,
    }
}

fn round(x: f64) -> f64 {
    (x * 1e4).round() / 1e4
}

/// Seconds of one run, the mean of `runs`.
#[expect(clippy::disallowed_types, reason = "a benchmark reads the clock")]
fn time(target: &Target, runs: usize, prepared: &mut Prepared) -> Result<f64, Failure> {
    let start = std::time::Instant::now();
    for _ in 0..runs {
        (prepared.run)();
    }
    target.finish().map_err(|failure| device_failed(&failure))?;
    Ok(start.elapsed().as_secs_f64() / runs as f64)
}

fn print(out: &mut impl Write, line: &Line, json: bool) -> std::io::Result<()> {
    if json {
        writeln!(out, "{}", serde_json::to_string(line)?)?;
    } else {
        let rate = |x: f64| if x > 0.0 { format!("{x:.1}") } else { "-".to_string() };
        writeln!(
            out,
            "{:<22} {:<7} {:<7} {:<22} {:>7} {:>9} {:>8} {:>10.3} {:>10.3}",
            line.op,
            line.path,
            line.profile,
            line.shape,
            line.threads,
            rate(line.gflops),
            rate(line.gb_per_s),
            line.ms,
            line.ms_median
        )?;
    }
    out.flush()
}

/// Serves requests until standard input ends. The last case stays prepared, so a repeated line only
/// repeats the run.
fn serve() -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let mut current: Option<(String, Target, Prepared)> = None;
    let mut requests = std::io::stdin().lock();
    while let Some(request) = input::line(&mut requests)? {
        let fields: Vec<_> = request.split_whitespace().collect();
        let [op, shape, profile, path, threads] = fields[..] else {
            return Err(Failure::usage(
                format!("`{request}` is not a request"),
                "write `OP SHAPE PROFILE PATH THREADS`",
            ));
        };
        if current.as_ref().is_none_or(|(last, ..)| *last != request) {
            drop(current.take());
            let count = threads.parse().ok().filter(|count| (1..=1024).contains(count));
            let threads =
                count.ok_or_else(|| Failure::usage(format!("`{threads}` is not a thread count"), "1 to 1024"))?;
            let target = match path {
                "best" => cpu(threads, Path::best())?,
                name if name.contains(':') => match Chosen::parse(name, threads)? {
                    Chosen::Gpu(selector) => device(selector, MatrixUnits::All)?,
                    Chosen::Cpu { .. } => {
                        return Err(Failure::usage(format!("unknown device `{name}`"), "`isobit devices` lists them"));
                    }
                },
                name => cpu(threads, paths(Some(name))?[0])?,
            };
            let profile = profiles(Some(profile))?[0];
            let mut prepared = cases::prepare(&target, op, shape, profile).map_err(bad_case)?;
            time(&target, 1, &mut prepared)?;
            current = Some((request.clone(), target, prepared));
        }
        let Some((_, target, prepared)) = &mut current else { unreachable!("prepared above") };
        let seconds = time(target, target.batch(), prepared)?;
        let times = Times { best: seconds, median: seconds, runs: 1 };
        let line = line(target, [op, shape, profile], prepared.work, &times);
        print(&mut out, &line, true).map_err(|error| Failure::output(&error))?;
    }
    Ok(())
}

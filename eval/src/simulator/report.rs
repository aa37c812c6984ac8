//! Tables of the flow simulator: each job's times under each variant, their spread, fairness.

use std::collections::BTreeMap;

use nix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::engine::{JobResult, SimulationError, simulate};
use super::scenario::{Scenario, Variant};

/// Mean and spread of a figure over runs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Least.
    pub min: f64,
    /// Most.
    pub max: f64,
    /// Standard deviation over the mean.
    pub cv: f64,
}

impl Spread {
    /// The figures of at least one value; zeros of none.
    #[must_use]
    pub fn of(values: &[f64]) -> Self {
        let count = values.len().max(1) as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
        let min = values.iter().copied().fold(f64::INFINITY, f64::min).min(mean.max(0.0));
        let max = values.iter().copied().fold(0.0, f64::max);
        Spread { mean, min, max, cv: if mean > 0.0 { variance.sqrt() / mean } else { 0.0 } }
    }
}

/// The figures of a job, over all runs of a variant.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct JobFigures {
    /// From its coming to its end, in seconds.
    pub completion_s: Spread,
    /// Bus bandwidth in GB/s.
    pub busbw_gb_s: Spread,
}

/// A variant.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VariantFigures {
    /// Name.
    pub name: String,
    /// Policy.
    pub policy: String,
    /// By job, for scenarios that name them.
    pub jobs: BTreeMap<String, JobFigures>,
    /// Sum of all jobs' bus bandwidth, in GB/s.
    pub aggregate_gb_s: Spread,
    /// Jain's index of the jobs' bus bandwidth: 1 where all have the same.
    pub fairness: Spread,
    /// Mean over jobs of the baseline's time in collectives divided by this variant's: seed by seed, job by job.
    pub speedup: Spread,
    /// Mean over jobs of the time from coming to end, in seconds.
    pub mean_completion_s: Spread,
    /// Simulated time of a run, in seconds.
    pub simulated_s: f64,
    /// Time that the runs took here, in seconds of this process: what others do on the machine does not count.
    pub cpu_s: f64,
}

/// Runs all variants of a scenario.
///
/// # Errors
/// As [`simulate`].
pub fn run(scenario: &Scenario) -> Result<Vec<VariantFigures>, SimulationError> {
    let mut baseline: Vec<BTreeMap<String, u64>> = Vec::new();
    let mut all = Vec::new();
    for variant in &scenario.variants {
        let began_s = cpu_s();
        let seeds = 1..=u64::from(scenario.seeds);
        let runs = seeds.map(|seed| simulate(scenario, variant, seed)).collect::<Result<Vec<_>, _>>()?;
        let cpu_s = cpu_s() - began_s;
        if baseline.is_empty() {
            baseline =
                runs.iter().map(|run| run.iter().map(|job| (job.name.clone(), job.sending_ns)).collect()).collect();
        }
        all.push(figures(scenario, variant, &runs, &baseline, cpu_s));
    }
    Ok(all)
}

fn figures(
    scenario: &Scenario,
    variant: &Variant,
    runs: &[Vec<JobResult>],
    baseline: &[BTreeMap<String, u64>],
    cpu_s: f64,
) -> VariantFigures {
    let seconds = |ns: u64| ns as f64 / 1e9;
    let completion = |job: &JobResult| seconds(job.ended_ns - job.came_ns);
    let busbw = |job: &JobResult| job.busbw / 1e9;
    let named = |name: &str| {
        let of = |figure: &dyn Fn(&JobResult) -> f64| {
            let values = runs.iter().flat_map(|run| run.iter().filter(|job| job.name == name).map(figure));
            Spread::of(&values.collect::<Vec<f64>>())
        };
        JobFigures { completion_s: of(&completion), busbw_gb_s: of(&busbw) }
    };
    let over_runs =
        |figure: &dyn Fn(&[JobResult]) -> f64| Spread::of(&runs.iter().map(|run| figure(run)).collect::<Vec<f64>>());
    let mean = |values: &mut dyn Iterator<Item = f64>| {
        let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
        sum / f64::max(count, 1.0)
    };
    let speedups: Vec<f64> = runs
        .iter()
        .zip(baseline)
        .map(|(run, baseline)| {
            let sent = run.iter().filter(|job| job.sending_ns > 0);
            mean(&mut sent.filter_map(|job| Some(*baseline.get(&job.name)? as f64 / job.sending_ns as f64)))
        })
        .collect();
    VariantFigures {
        name: variant.name.clone(),
        policy: variant.policy.clone(),
        jobs: scenario.jobs.iter().map(|job| (job.name.clone(), named(&job.name))).collect(),
        aggregate_gb_s: over_runs(&|run| run.iter().map(busbw).sum()),
        fairness: over_runs(&|run| jain(&run.iter().map(busbw).filter(|rate| *rate > 0.0).collect::<Vec<_>>())),
        speedup: Spread::of(&speedups),
        mean_completion_s: over_runs(&|run| mean(&mut run.iter().map(completion))),
        simulated_s: mean(&mut runs.iter().map(|run| seconds(run.iter().map(|job| job.ended_ns).max().unwrap_or(0)))),
        cpu_s,
    }
}

/// Time that this process has used, in seconds.
#[must_use]
pub fn cpu_s() -> f64 {
    let time = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID);
    time.map_or(0.0, |time| time.tv_sec() as f64 + time.tv_nsec() as f64 / 1e9)
}

/// Jain's fairness index.
#[must_use]
pub fn jain(values: &[f64]) -> f64 {
    let squares: f64 = values.iter().map(|value| value * value).sum();
    let sum: f64 = values.iter().sum();
    if squares > 0.0 { sum * sum / (values.len() as f64 * squares) } else { 1.0 }
}

/// The figures as a table in Markdown.
#[must_use]
pub fn table(scenario: &Scenario, all: &[VariantFigures]) -> String {
    let mut text = format!("{}\n\n", scenario.question);
    let names: Vec<&String> = scenario.jobs.iter().map(|job| &job.name).collect();
    let heads: String = names.iter().map(|name| format!(" {name}: s | {name}: busbw GB/s (CV) |")).collect();
    text += &format!("| variant | policy |{heads} all jobs, GB/s (CV) | Jain | speed-up | mean completion s |\n");
    text += &format!("| --- | --- |{} --- | --- | --- | --- |\n", " --- | --- |".repeat(names.len()));
    for variant in all {
        let cells: String = names
            .iter()
            .map(|name| {
                let job = &variant.jobs[*name];
                let (time, rate) = (job.completion_s, job.busbw_gb_s);
                format!(" {:.2} | {:.3} ({:.1}%) |", time.mean, rate.mean, rate.cv * 100.0)
            })
            .collect();
        text += &format!(
            "| {} | {} |{cells} {:.2} ({:.1}%) | {:.3} | {:.2} | {:.2} |\n",
            variant.name,
            variant.policy,
            variant.aggregate_gb_s.mean,
            variant.aggregate_gb_s.cv * 100.0,
            variant.fairness.mean,
            variant.speedup.mean,
            variant.mean_completion_s.mean
        );
    }
    text += &format!("\n{} runs of each variant, with seeds 1 to {}.\n", scenario.seeds, scenario.seeds);
    text
}

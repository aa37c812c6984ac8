//! Metrics: names, labels and values, the same for Prometheus and for OpenTelemetry. Pure: an
//! overview goes in, families of samples come out.
//!
//! Names that begin with `nccl_` are those of NCCL's Inspector plugin. They have its labels where these mean something here; `tenant`
//! is ours. Queries that choose or join by `message_size`, `algo_proto`, `gpu`, `slurm_job_id` or `version` find nothing. The plugin's
//! means cover operations that ended between two looks, and are geometric for bandwidth; ours cover the last operations.
//!
//! All other names begin with `mccs_`. `docs/METRICS.md` describes each, and a test compares. Series are bounded as
//! [`mccs_control::overview`] is; series of a communicator end with it.

mod communicators;
mod host;
pub(super) mod inspector;
mod paths;
mod process;
mod tenants;

use std::fmt::{self, Display};

use mccs_control::overview::Overview;
use mccs_telemetry::histogram::HistogramView;

/// Type of a metric's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Rises, or begins again at 0 with the service.
    Counter,
    /// Rises and falls.
    Gauge,
    /// Counts by upper bound.
    Histogram,
}

/// A value of a counter or gauge.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Number {
    Whole(u64),
    Real(f64),
}

impl Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Number::Whole(number) => number.fmt(f),
            Number::Real(number) => number.fmt(f),
        }
    }
}

impl From<u64> for Number {
    fn from(number: u64) -> Self {
        Number::Whole(number)
    }
}

impl From<u32> for Number {
    fn from(number: u32) -> Self {
        Number::Whole(number.into())
    }
}

impl From<usize> for Number {
    fn from(number: usize) -> Self {
        Number::Whole(number as u64)
    }
}

/// 1 where it is so, else 0.
impl From<bool> for Number {
    fn from(is: bool) -> Self {
        Number::Whole(is.into())
    }
}

impl From<f64> for Number {
    fn from(number: f64) -> Self {
        Number::Real(number)
    }
}

/// Value of a sample.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Number(Number),
    Histogram(HistogramView),
}

/// A series, and its value now.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sample {
    pub(super) labels: Vec<(String, String)>,
    pub(super) value: Value,
}

/// A metric with its samples.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Family {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) help: String,
    pub(super) samples: Vec<Sample>,
}

type Labels<'a> = [(&'a str, &'a dyn Display)];

/// The families so far.
#[derive(Default)]
pub(super) struct Metrics(Vec<Family>);

impl Metrics {
    pub(super) fn family(&mut self, name: &'static str, kind: Kind, help: &str) -> &mut Family {
        self.0.push(Family { name, kind, help: help.to_owned(), samples: Vec::new() });
        self.0.last_mut().expect("invariant: one was pushed")
    }
}

impl Family {
    pub(super) fn sample(&mut self, labels: &Labels<'_>, value: impl Into<Number>) {
        self.add(labels, Value::Number(value.into()));
    }

    fn histogram(&mut self, labels: &Labels<'_>, view: &HistogramView) {
        self.add(labels, Value::Histogram(view.clone()));
    }

    fn add(&mut self, labels: &Labels<'_>, value: Value) {
        let labels = labels.iter().map(|(label, text)| ((*label).to_owned(), text.to_string())).collect();
        self.samples.push(Sample { labels, value });
    }
}

/// All families, in one order.
#[must_use]
pub(super) fn families(overview: &Overview) -> Vec<Family> {
    let mut metrics = Metrics::default();
    inspector::inspector(&mut metrics, overview);
    host::host(&mut metrics, overview);
    process::process(&mut metrics, overview);
    tenants::tenants(&mut metrics, overview);
    communicators::communicators(&mut metrics, overview);
    communicators::ranks(&mut metrics, overview);
    paths::paths(&mut metrics, overview);
    metrics.0
}

pub(super) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

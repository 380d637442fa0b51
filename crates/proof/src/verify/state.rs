//! `state.json` of a checkpoint: everything in it follows from the chain, the metrics and the
//! receipt, so it is made again and compared.
#![expect(clippy::float_arithmetic, reason = "sums of losses, as a run adds them")]

use super::metrics::Lines;
use super::receipt::updates_of_epoch;
use crate::chain::Chain;
use crate::receipt::Made;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// What depends on the lines of the metrics, which may be others after a resume.
const LOGGED: [&str; 3] = ["loss_count", "loss_sum_bits", "metrics"];

/// The first field of a state that is not what it should be. One that is ahead of where the run
/// goes on from may follow other lines of the metrics.
pub(super) fn wrong_field(
    found: &Value,
    chain: &Chain,
    made: &Made,
    lines: &Lines,
    (step, is_ahead): (u64, bool),
) -> Option<String> {
    let expected = expected(chain, made, lines, step);
    let found = found.as_object()?;
    let names: BTreeSet<&String> = found.keys().chain(expected.keys()).collect();
    // Receipts of version 1 do not say how many rows there are.
    let is_unknown = |name: &str| {
        (made.rows.is_none() && ["epoch", "rows_seen"].contains(&name)) || (is_ahead && LOGGED.contains(&name))
    };
    let differs = |name: &&&String| !is_unknown(name) && found.get(**name) != expected.get(**name);
    names.iter().find(differs).map(|name| (*name).clone())
}

fn expected(chain: &Chain, made: &Made, lines: &Lines, step: u64) -> Map<String, Value> {
    let updates = &chain.updates[..step as usize];
    let (mut best, mut without) = (Value::Null, 0_u32);
    for (update, evaluation) in updates.iter().filter_map(|update| Some((update, update.evaluation?))) {
        if evaluation.best {
            best = json!({ "step": update.step, "metric_bits": format!("{:016x}", evaluation.loss) });
            without = 0;
        } else {
            without = without.saturating_add(1);
        }
    }
    // ORDER: update after update.
    let since = &updates[lines.logged(step) as usize..];
    let loss_sum = since.iter().fold(0.0, |sum, update| sum + f64::from_bits(update.loss));
    let per_epoch = updates_of_epoch(made).unwrap_or(1);
    let together = made.config.get("training.rows_per_update").and_then(|rows| rows.parse().ok()).unwrap_or(1_u64);
    let rows = made.rows.unwrap_or(0);
    // The last update of an epoch has what is left.
    let of_epoch = (step % per_epoch).saturating_mul(together);
    let rows_seen = (step / per_epoch).saturating_mul(rows).saturating_add(of_epoch);
    let object = json!({
        "schema": "isobit.state/1",
        "step": step,
        "epoch": step / per_epoch,
        "rows_seen": rows_seen,
        "tokens_seen": updates.iter().fold(0_u64, |sum, update| sum.saturating_add(update.tokens)),
        "best": best,
        "evals_without_improvement": without,
        "loss_sum_bits": format!("{:016x}", loss_sum.to_bits()),
        "loss_count": since.len(),
        "metrics": lines.digest(step),
        "chain": chain.link(step),
        "identity": made.identity,
    });
    if let Value::Object(object) = object { object } else { Map::new() }
}

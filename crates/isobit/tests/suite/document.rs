//! The known answers that docs/numerics.md writes out for the order of rows and for sampling: the
//! program gives them.

use isobit_models::Sampling;
use isobit_training::data::order;

const DOCUMENT: &str = include_str!("../../../../docs/numerics.md");

/// The text under a heading.
fn section(heading: &str) -> &'static str {
    let start = DOCUMENT.find(&format!("\n## {heading}\n")).expect("the section is there") + 4;
    let rest = &DOCUMENT[start..];
    &rest[..rest.find("\n## ").unwrap_or(rest.len())]
}

/// Says that the section has these numbers as an answer.
#[track_caller]
fn told(heading: &str, answer: impl IntoIterator<Item = impl ToString>) {
    let answer: Vec<String> = answer.into_iter().map(|number| number.to_string()).collect();
    let answer = format!("`{}`", answer.join(" "));
    assert!(section(heading).contains(&answer), "{answer} is not in the section {heading}");
}

#[test]
fn the_order_of_rows_is_the_one_written_down() {
    told("Order of rows", order(42, 0, 10));
    told("Order of rows", order(42, 1, 10));
}

#[test]
fn sampling_is_the_one_written_down() {
    let logits = [0.5, 2.0, 1.0, 2.0, -1.0];
    told("Sampling", logits);
    for sampling in
        [Sampling { temperature: 0.8, top_p: 0.95, seed: 42 }, Sampling { temperature: 1.0, top_p: 1.0, seed: 7 }]
    {
        told("Sampling", (0..16).map(|position| sampling.choose(&logits, position)));
    }
    told("Sampling", [Sampling::GREEDY.choose(&logits, 0)]);
}

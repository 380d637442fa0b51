//! Renders conversations with a chat template, for comparison with other programs:
//! `render_template TEMPLATE SPECIAL.json DATE < rows.jsonl`. Each row may have
//! `add_generation_prompt` beside its messages. One JSON object a line comes out: `{"text": …}` or
//! `{"error": …}`.

use isobit_training::data::Template;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{BufRead, Write};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, template, special, date] = arguments.as_slice() else {
        return Err("usage: render_template TEMPLATE SPECIAL.json DATE < rows.jsonl".into());
    };
    let special: BTreeMap<String, String> = serde_json::from_str(&std::fs::read_to_string(special)?)?;
    let parsed = Template::new(template, &std::fs::read_to_string(template)?, date, &special);
    let mut out = std::io::stdout().lock();
    for row in std::io::stdin().lock().lines() {
        let row = row?;
        let prompt = row.contains("\"add_generation_prompt\": true");
        let result = match &parsed {
            Ok(template) => template.render_row(&row, prompt).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        match result {
            Ok(rendered) => writeln!(out, "{}", json!({"text": rendered.text, "spans": rendered.spans}))?,
            Err(error) => writeln!(out, "{}", json!({"error": error}))?,
        }
    }
    Ok(())
}

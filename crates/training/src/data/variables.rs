//! Chat template variables besides the usual ones, such as `enable_thinking`. They come from the
//! config (`chat_template_kwargs`) or the command line, and a row may override them.

use super::error::RowError;
use super::json::Json;
use std::collections::BTreeMap;
use std::fmt;

/// Variables that we set and nobody else may.
const OURS: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

/// Names with their values as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Variables(BTreeMap<String, String>);

impl Variables {
    /// Adds `NAME=VALUE` from the command line. A JSON value is taken as such; any other is a
    /// string, except for Python's `True`, `False` and `None`.
    pub fn add_argument(&mut self, argument: &str) -> Result<(), String> {
        let (name, value) = argument.split_once('=').ok_or("there is no `=`")?;
        let json = match value {
            "True" => "true".to_owned(),
            "False" => "false".to_owned(),
            "None" => "null".to_owned(),
            json if serde_json::from_str::<serde::de::IgnoredAny>(json).is_ok() => json.to_owned(),
            text => serde_json::Value::from(text).to_string(),
        };
        self.add(name, json)
    }

    /// Adds a variable whose value is JSON.
    pub fn add(&mut self, name: &str, json: String) -> Result<(), String> {
        check_name(name)?;
        self.0.insert(name.to_owned(), json);
        Ok(())
    }

    /// Adds the variables of `others`, which take precedence.
    pub fn merge(&mut self, others: Self) {
        self.0.extend(others.0);
    }

    pub(super) fn values(&self) -> Result<Vec<(String, Json)>, RowError> {
        self.0.iter().map(|(name, json)| Ok((name.clone(), Json::parse(json)?))).collect()
    }
}

/// Prints one JSON object: the `chat_template_kwargs` of a row.
impl fmt::Display for Variables {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "{{")?;
        for (index, (name, json)) in self.0.iter().enumerate() {
            write!(out, "{}\"{name}\": {json}", if index == 0 { "" } else { ", " })?;
        }
        write!(out, "}}")
    }
}

/// Checks that a template can have a variable of that name; if not, says why.
pub fn check_name(name: &str) -> Result<(), String> {
    let first = |letter: char| letter.is_ascii_alphabetic() || letter == '_';
    if !name.starts_with(first) || !name.chars().all(|letter| first(letter) || letter.is_ascii_digit()) {
        return Err(format!("`{}` is not the name of a variable", name.escape_debug()));
    }
    if OURS.contains(&name) {
        return Err(format!("`{name}` is set from the data"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_json_or_text() {
        let mut variables = Variables::default();
        for argument in ["a=false", "b=no", "c=\"no\"", "d=1.5", "e=True", "f=", "g=[1, {\"x\": null}]", "a=true"] {
            variables.add_argument(argument).expect(argument);
        }
        let want = r#"{"a": true, "b": "no", "c": "no", "d": 1.5, "e": true, "f": "", "g": [1, {"x": null}]}"#;
        assert_eq!(variables.to_string(), want);
        assert_eq!(variables.values().expect("JSON").len(), 7);
        for (argument, want) in [
            ("thinking", "there is no `=`"),
            ("=1", "`` is not the name of a variable"),
            ("a-b=1", "`a-b` is not the name of a variable"),
            ("messages=[]", "`messages` is set from the data"),
        ] {
            assert_eq!(variables.add_argument(argument), Err(want.to_owned()));
        }
    }
}

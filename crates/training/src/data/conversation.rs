//! Conversations in the form templates expect: a list of messages, tools, and further template
//! variables. Aliases of the assistant's reasoning field are filled in; nothing else changes: the
//! template joins content given in parts.

use super::error::RowError;
use super::json::Json;
use super::variables::check_name;

/// BOUND: messages of one conversation.
const MESSAGES_MAX: usize = 10_000;

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Conversation {
    pub(super) messages: Vec<Json>,
    pub(super) tools: Option<Json>,
    /// Template variables besides the usual ones, such as `enable_thinking`.
    pub(super) extra: Vec<(String, Json)>,
}

/// An error about a field of the wrong type or value.
pub(super) fn field(field: impl Into<String>, want: &'static str, found: &Json) -> RowError {
    RowError::Field { field: field.into(), want, found: found.what().to_owned() }
}

pub(super) fn missing(name: impl Into<String>, want: &'static str) -> RowError {
    RowError::Field { field: name.into(), want, found: "missing".to_owned() }
}

pub(super) fn message(role: &str, content: &str) -> Json {
    let text = |text: &str| Json::Text(text.to_owned());
    Json::Object(vec![("role".into(), text(role)), ("content".into(), text(content))])
}

impl Conversation {
    /// The conversation of a row with the given messages; `tools` and `chat_template_kwargs` are
    /// read from the row.
    pub(super) fn new(messages: Vec<Json>, row: &Json) -> Result<Self, RowError> {
        let count = messages.len();
        if count > MESSAGES_MAX {
            return Err(RowError::TooMany { field: "messages".into(), count, limit: MESSAGES_MAX });
        }
        let extra = match row.get("chat_template_kwargs") {
            None | Some(Json::Null) => Vec::new(),
            Some(Json::Object(entries)) => entries.clone(),
            Some(other) => return Err(field("chat_template_kwargs", "an object", other)),
        };
        for (name, value) in &extra {
            if check_name(name).is_err() {
                let name = format!("chat_template_kwargs.{}", name.escape_debug());
                return Err(field(name, "a variable that the template does not get from the row", value));
            }
        }
        Ok(Self { messages, tools: tools(row)?, extra })
    }

    /// Adds variables shared by all rows, unless this row sets its own.
    pub(super) fn add_variables(&mut self, variables: &[(String, Json)]) {
        let own: Vec<String> = self.extra.iter().map(|(name, _)| name.clone()).collect();
        self.extra.extend(variables.iter().filter(|(name, _)| !own.contains(name)).cloned());
    }

    pub(super) fn assistant_count(&self) -> usize {
        self.messages.iter().filter(|message| is_assistant(message)).count()
    }

    pub(super) fn visit_text(&self, visit: &mut impl FnMut(&str)) {
        self.messages.iter().for_each(|message| message.visit_text(visit));
        self.tools.iter().for_each(|tools| tools.visit_text(visit));
        self.extra.iter().for_each(|(_, value)| value.visit_text(visit));
    }
}

pub(super) fn is_assistant(message: &Json) -> bool {
    matches!(message.get("role"), Some(Json::Text(role)) if role == "assistant")
}

/// `tools`: a list, or a string that holds a list as JSON.
fn tools(row: &Json) -> Result<Option<Json>, RowError> {
    match row.get("tools") {
        None | Some(Json::Null) => Ok(None),
        Some(tools @ Json::Array(_)) => Ok(Some(tools.clone())),
        Some(Json::Text(text)) if text.trim().is_empty() => Ok(None),
        Some(Json::Text(text)) => match Json::parse(text)? {
            tools @ Json::Array(_) => Ok(Some(tools)),
            other => Err(field("tools", "a list, or JSON text of a list", &other)),
        },
        Some(other) => Err(field("tools", "a list, or JSON text of a list", other)),
    }
}

/// The messages of a list, each checked and normalised.
pub(super) fn messages(name: &str, list: &Json) -> Result<Vec<Json>, RowError> {
    let Json::Array(items) = list else { return Err(field(name, "a list of messages", list)) };
    if items.is_empty() {
        return Err(RowError::Field { field: name.into(), want: "a list of messages", found: "empty".into() });
    }
    items.iter().enumerate().map(|(index, item)| one_message(&format!("{name}[{index}]"), item)).collect()
}

fn one_message(name: &str, item: &Json) -> Result<Json, RowError> {
    let Json::Object(entries) = item else { return Err(field(name, "a message", item)) };
    match item.get("role") {
        // Role names of another format: no template has them, and most would print them silently.
        Some(Json::Text(role)) if ["human", "gpt"].contains(&role.as_str()) => {
            return Err(RowError::Role { role: role.clone() });
        }
        Some(Json::Text(_)) => {}
        Some(other) => return Err(field(format!("{name}.role"), "a string", other)),
        None if item.get("from").is_some() => return Err(RowError::FromAndValue { field: name.to_owned() }),
        None => return Err(missing(format!("{name}.role"), "a string")),
    }
    if let Some(call) = item.get("function_call").filter(|call| **call != Json::Null) {
        return Err(field(format!("{name}.function_call"), "absent: calls stand in `tool_calls`", call));
    }
    if let Some(weight) = item.get("weight").filter(|weight| !matches!(weight, Json::Null | Json::Unsigned(1))) {
        return Err(field(format!("{name}.weight"), "1 or absent: weights of messages are not supported", weight));
    }
    let has_calls = item.get("tool_calls").is_some_and(|calls| *calls != Json::Null);
    let mut message = Vec::with_capacity(entries.len() + 2);
    for (key, value) in entries {
        let value = if key == "content" { content(name, value, has_calls)? } else { value.clone() };
        message.push((key.clone(), value));
    }
    if item.get("content").is_none() && !has_calls {
        return Err(missing(format!("{name}.content"), "a string"));
    }
    Ok(Json::Object(with_reasoning(message)))
}

/// A string, a list of text parts, or null beside tool calls.
fn content(name: &str, value: &Json, has_calls: bool) -> Result<Json, RowError> {
    let want = "a string or a list of text parts";
    match value {
        Json::Text(_) => Ok(value.clone()),
        Json::Null if has_calls => Ok(Json::Null),
        Json::Array(parts) => {
            for part in parts {
                match (part, part.get("type"), part.get("text")) {
                    (Json::Text(_), _, _) => {}
                    (_, Some(Json::Text(kind)), Some(Json::Text(_))) if kind == "text" => {}
                    (_, Some(Json::Text(kind)), _) => {
                        let found = format!("a part of type `{}`", kind.escape_debug());
                        return Err(RowError::Field { field: format!("{name}.content"), want, found });
                    }
                    _ => return Err(field(format!("{name}.content"), want, part)),
                }
            }
            Ok(value.clone())
        }
        other => Err(field(format!("{name}.content"), want, other)),
    }
}

/// Templates read reasoning as `reasoning_content` or `thinking`; data use either, or `reasoning`.
fn with_reasoning(mut message: Vec<(String, Json)>) -> Vec<(String, Json)> {
    let value = |name: &str| message.iter().find(|(key, value)| key == name && *value != Json::Null);
    let names = ["reasoning_content", "thinking", "reasoning"];
    let Some(reasoning) = names.into_iter().find_map(value).map(|(_, value)| value.clone()) else { return message };
    if !message.iter().any(|(key, _)| key == "thinking") {
        message.insert(0, ("thinking".into(), reasoning.clone()));
    }
    match message.iter_mut().find(|(key, _)| key == "reasoning_content") {
        Some((_, value)) => *value = reasoning,
        None => message.push(("reasoning_content".into(), reasoning)),
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<Json>, RowError> {
        messages("messages", &Json::parse(text).expect("JSON"))
    }

    #[test]
    fn parts_of_text_stay_and_other_parts_are_refused() {
        let text = r#"[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]"#;
        let Json::Array(given) = Json::parse(text).expect("JSON") else { panic!("a list") };
        assert_eq!(parsed(text).expect("messages")[0].get("content"), given[0].get("content"));
        let error = parsed(r#"[{"role":"user","content":[{"type":"image","url":"x"}]}]"#).expect_err("an image");
        assert!(error.to_string().contains("messages[0].content") && error.to_string().contains("image"), "{error}");
    }

    #[test]
    fn what_is_no_message_is_named() {
        for (text, want) in [
            ("[]", "empty"),
            ("{}", "an object"),
            ("[1]", "messages[0]"),
            (r#"[{"content":"x"}]"#, "messages[0].role"),
            (r#"[{"role":"user"}]"#, "messages[0].content"),
            (r#"[{"role":"user","content":null}]"#, "messages[0].content"),
            (r#"[{"role":"assistant","content":"x","weight":0}]"#, "messages[0].weight"),
        ] {
            let error = parsed(text).expect_err(text).to_string();
            assert!(error.contains(want), "{error}");
        }
        assert!(parsed(r#"[{"role":"assistant","content":null,"tool_calls":[]}]"#).is_ok());
    }

    #[test]
    fn reasoning_is_found_under_its_other_names() {
        let message = &parsed(r#"[{"role":"assistant","content":"x","reasoning":"r"}]"#).expect("messages")[0];
        assert_eq!(message.get("reasoning_content"), Some(&Json::Text("r".into())));
        assert_eq!(message.get("thinking"), Some(&Json::Text("r".into())));
    }
}

//! Changes to files: bytes flipped, cut, moved and duplicated, and, if the form is known, values
//! replaced so that the file still parses but makes no sense.

use super::hostile;
use super::random::Random;
use serde_json::Value;

/// The form of a file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Form {
    Json,
    JsonLines,
    Toml,
    Template,
    Safetensors,
}

/// Placeholder string for JSON that `serde_json` would not write.
const RAW: &str = "@raw@";

/// A mutated file. `large` allows values that are slow to read.
pub(crate) fn mutated(random: &mut Random, form: Form, bytes: &[u8], large: bool) -> Vec<u8> {
    if random.once_in(4) {
        return changed_bytes(random, bytes);
    }
    let text = String::from_utf8_lossy(bytes);
    let times = 1 + random.below(3);
    match form {
        Form::Safetensors => safetensors(random, bytes, large),
        Form::Json => (0..times).fold(text.into_owned(), |text, _| json(random, &text, large)).into_bytes(),
        Form::JsonLines => lines(random, &text, large).into_bytes(),
        Form::Toml => (0..times).fold(text.into_owned(), |text, _| toml(random, &text)).into_bytes(),
        Form::Template => (0..times).fold(text.into_owned(), |text, _| template(random, &text, large)).into_bytes(),
    }
}

/// One to four flips, cuts or copies.
pub(crate) fn changed_bytes(random: &mut Random, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..=random.below(4) {
        let (at, length) = (random.below(bytes.len()), random.below(bytes.len().min(64)));
        let end = (at + length).min(bytes.len());
        match random.below(9) {
            0..=2 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            3 if !bytes.is_empty() => bytes[at] = *random.pick(&[0, 0xff, 0x80, b'"', b'{', b'[', b'\n', b'\\', b'9']),
            4 => bytes.truncate(at),
            5 => drop(bytes.drain(at..end)),
            6 => {
                let piece = bytes[at..end].to_vec();
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, piece);
            }
            7 => {
                let number = *random.pick(&[0_u64, 1, 1 << 31, 1 << 32, 1 << 40, 1 << 63, u64::MAX - 7, u64::MAX]);
                let end = (at + 8).min(bytes.len());
                bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
            }
            _ => {
                let noise: Vec<u8> = (0..random.below(16)).map(|_| random.next() as u8).collect();
                bytes.splice(at..at, noise);
            }
        }
    }
    bytes
}

/// Replaces, removes, duplicates or wraps one value.
fn json(random: &mut Random, text: &str, large: bool) -> String {
    let Ok(mut value) = serde_json::from_str::<Value>(text) else { return text_edit(random, text) };
    let mut left = random.below(nodes(&value));
    let raw = changed_node(random, &mut value, &mut left, large);
    let text = value.to_string();
    raw.map_or_else(|| text.clone(), |raw| text.replacen(&format!("\"{RAW}\""), &raw, 1))
}

fn nodes(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(nodes).sum::<usize>(),
        Value::Object(entries) => entries.values().map(nodes).sum(),
        _ => 0,
    }
}

/// Changes the node that is `left` nodes further on; returns the text to put in place of `RAW`.
fn changed_node(random: &mut Random, value: &mut Value, left: &mut usize, large: bool) -> Option<String> {
    if *left == 0 {
        // Never reached again.
        *left = usize::MAX;
        return change(random, value, large);
    }
    *left -= 1;
    let children: Vec<&mut Value> = match value {
        Value::Array(items) => items.iter_mut().collect(),
        Value::Object(entries) => entries.values_mut().collect(),
        _ => Vec::new(),
    };
    for child in children {
        if *left == usize::MAX {
            break;
        }
        let raw = changed_node(random, child, left, large);
        if raw.is_some() {
            return raw;
        }
    }
    None
}

fn change(random: &mut Random, value: &mut Value, large: bool) -> Option<String> {
    let old = value.clone();
    let (key, other) = match &old {
        Value::Object(entries) if !entries.is_empty() => {
            let keys: Vec<&String> = entries.keys().collect();
            ((*random.pick(&keys)).clone(), (*random.pick(&keys)).clone())
        }
        _ => (String::new(), String::new()),
    };
    match (random.below(10), &mut *value) {
        (0 | 1, Value::Object(entries)) => drop(entries.remove(&key)),
        (2, Value::Object(entries)) => {
            // The same key twice, with different values.
            let raw = hostile::json(random, large);
            let again = entries.get(&key).map_or_else(String::new, ToString::to_string);
            entries.insert(key.clone(), RAW.into());
            return Some(format!("{again},{}:{raw}", Value::from(key)));
        }
        (3, Value::Object(entries)) => {
            let moved = entries.get(&other).cloned().unwrap_or_default();
            entries.insert(key, moved);
        }
        (4, Value::Object(entries)) => {
            entries.insert(format!("{key}_{}", random.below(9)), old[key].clone());
        }
        (0 | 1, Value::Array(items)) if !items.is_empty() => drop(items.remove(random.below(items.len()))),
        (2 | 3, Value::Array(items)) if !items.is_empty() => items.push(random.pick(&old.as_array().cloned()?).clone()),
        (5, _) => *value = Value::Array(vec![old]),
        (6, Value::Number(number)) => {
            let near = number.as_i64().unwrap_or(0).wrapping_add(random.below(5) as i64 - 2);
            *value = near.wrapping_mul(*random.pick(&[1, 1, 2, 1024, -1])).into();
        }
        (6, Value::String(string)) => *value = text_edit(random, string).into(),
        _ => {
            *value = RAW.into();
            return Some(hostile::json(random, large));
        }
    }
    None
}

/// Changes, duplicates or empties one row, or removes all but one.
fn lines(random: &mut Random, text: &str, large: bool) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_string).collect();
    if lines.is_empty() {
        return hostile::json(random, large);
    }
    for _ in 0..=random.below(3) {
        let at = random.below(lines.len());
        match random.below(8) {
            0 => lines[at] = hostile::json(random, large),
            1 => lines[at] = text_edit(random, &lines[at]),
            2 => lines.insert(at, String::new()),
            3 if lines.len() > 1 => drop(lines.remove(at)),
            4 => lines.insert(at, lines[at].clone()),
            _ => lines[at] = json(random, &lines[at], large),
        }
    }
    let end = if random.once_in(5) { "" } else { "\n" };
    lines.join(if random.once_in(9) { "\r\n" } else { "\n" }) + end
}

/// Changes a line's value, or duplicates, moves or removes the line.
fn toml(random: &mut Random, text: &str) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_string).collect();
    if lines.is_empty() {
        return text_edit(random, text);
    }
    let at = random.below(lines.len());
    let (to, line) = (random.below(lines.len()), lines[at].clone());
    match random.below(12) {
        0 => drop(lines.remove(at)),
        1 => lines.insert(to, line),
        2 => lines.swap(at, to),
        3 => lines[at] = text_edit(random, &line),
        _ => match line.split_once(" = ") {
            Some((key, _)) => lines[at] = format!("{key} = {}", hostile::toml(random)),
            None => lines.insert(at, format!("k{} = {}", random.below(9), hostile::toml(random))),
        },
    }
    lines.join("\n") + "\n"
}

fn template(random: &mut Random, text: &str, large: bool) -> String {
    let starts: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let at = *random.pick(&starts);
    match random.below(5) {
        0 => text_edit(random, text),
        _ => format!("{}{}{}", &text[..at], hostile::template(random, large), &text[at..]),
    }
}

/// Removes, moves or inserts characters.
fn text_edit(random: &mut Random, text: &str) -> String {
    let mut characters: Vec<char> = text.chars().collect();
    let at = random.below(characters.len());
    let end = (at + random.below(20)).min(characters.len());
    match random.below(4) {
        0 => drop(characters.drain(at..end)),
        1 => {
            let piece: Vec<char> = characters[at.min(end)..end].to_vec();
            let to = random.below(characters.len() + 1);
            characters.splice(to..to, piece);
        }
        2 => characters.truncate(at),
        _ => {
            let odd = *random.pick(&['"', '\'', '{', '}', '[', ']', '=', ',', '\\', '\0', '\u{feff}', '\u{202e}', '%']);
            characters.insert(at.min(characters.len()), odd);
        }
    }
    characters.into_iter().collect()
}

/// Changes the header, with a matching length or not; or inserts non-finite numbers.
fn safetensors(random: &mut Random, bytes: &[u8], large: bool) -> Vec<u8> {
    let length = bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)) as usize;
    let Some(header) = bytes.get(8..8usize.saturating_add(length)) else { return changed_bytes(random, bytes) };
    let data = &bytes[8 + length..];
    match random.below(8) {
        0 => {
            let mut bytes = bytes.to_vec();
            let number = f32::from_bits(*random.pick(&[0x7fc0_0000, 0x7f80_0000, 0xff80_0000, 0x7f7f_ffff, 1]));
            let at = 8 + length + random.below(data.len() / 4) * 4;
            if let Some(place) = bytes.get_mut(at..at + 4) {
                place.copy_from_slice(&number.to_le_bytes());
            }
            bytes
        }
        1 => {
            let lie = *random.pick(&[0_u64, 1, 7, 8, 100_000_001, 1 << 32, 1 << 40, 1 << 63, u64::MAX]);
            [&lie.to_le_bytes(), header, data].concat()
        }
        2 => {
            let lie = (length as u64).wrapping_add(random.below(9) as u64).wrapping_sub(4);
            [&lie.to_le_bytes(), header, data].concat()
        }
        3 => [&bytes[..8 + length], &data[..random.below(data.len())]].concat(),
        _ => {
            let text = String::from_utf8_lossy(header);
            let times = 1 + random.below(3);
            let text = (0..times).fold(text.into_owned(), |text, _| json(random, &text, large));
            [&(text.len() as u64).to_le_bytes(), text.as_bytes(), data].concat()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nearly every mutation changes something, in every form, and the same random numbers make the
    /// same change.
    #[test]
    fn changes_are_changes_and_can_be_repeated() {
        let header = br#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        let file = [&(header.len() as u64).to_le_bytes(), &header[..], &[0; 8]].concat();
        let files: [(Form, &[u8]); 5] = [
            (Form::Json, br#"{"a":[1,2,{"b":null}],"c":"text","d":1.5}"#),
            (Form::JsonLines, b"{\"prompt\":\"a\",\"completion\":\"b\"}\n{\"prompt\":\"c\",\"completion\":\"d\"}\n"),
            (Form::Toml, b"a = 1\n\n[b]\nc = \"x\"\n"),
            (Form::Template, b"{% for m in messages %}{{ m.content }}{% endfor %}"),
            (Form::Safetensors, &file),
        ];
        for (form, bytes) in files {
            let one = |case| mutated(&mut Random::of(3, "test", case), form, bytes, false);
            let changed = (0..400).filter(|case| one(*case) != bytes).count();
            assert!(changed > 300, "{form:?}: {changed}");
            assert!((0..50).all(|case| one(case) == one(case)), "{form:?}");
            assert!(
                (0..50).all(|case| !mutated(&mut Random::of(3, "empty", case), form, b"", false).starts_with(b"@raw@"))
            );
        }
    }
}

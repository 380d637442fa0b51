//! Compares two JSON documents by meaning: the order of keys, whitespace and the spelling of a
//! number do not matter.

use serde_json::{Number, Value};
use std::collections::{BTreeMap, BTreeSet};

/// BOUND: differing keys listed for one file; the rest are only counted.
const LISTED_MAX: usize = 100;

/// Lists in an adapter's config that are sets, which PEFT stores in any order.
const SETS: [&str; 3] = ["target_modules", "modules_to_save", "exclude_modules"];

/// How two documents of the same name differ.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DocumentDifference {
    /// In key order, at most a hundred.
    pub keys: Vec<KeyDifference>,
    /// The number of all of them.
    pub count: u64,
}

/// One key, as a path (`rope_scaling.factor`, `layers[3]`), and its value on both sides.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyDifference {
    pub key: String,
    /// None if the key is absent.
    pub values: [Option<Value>; 2],
}

/// Compares two documents; `name` decides whether some lists are sets.
pub(super) fn compare(name: &str, mut a: Value, mut b: Value) -> DocumentDifference {
    if name == crate::layout::ADAPTER_CONFIG {
        sort_sets(&mut a);
        sort_sets(&mut b);
    }
    let mut found = DocumentDifference::default();
    walk(&mut found, String::new(), Some(&a), Some(&b));
    found
}

fn sort_sets(document: &mut Value) {
    for key in SETS {
        if let Some(Value::Array(list)) = document.get_mut(key) {
            list.sort_by_key(Value::to_string);
        }
    }
}

/// The parser bounds the depth.
fn walk(found: &mut DocumentDifference, key: String, a: Option<&Value>, b: Option<&Value>) {
    match (a, b) {
        (Some(Value::Object(a)), Some(Value::Object(b))) => {
            let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            for name in keys {
                let inner = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                walk(found, inner, a.get(name), b.get(name));
            }
        }
        (Some(Value::Array(a)), Some(Value::Array(b))) => {
            for index in 0..a.len().max(b.len()) {
                walk(found, format!("{key}[{index}]"), a.get(index), b.get(index));
            }
        }
        (Some(Value::Number(a)), Some(Value::Number(b))) if same_number(a, b) => {}
        (a, b) if a == b => {}
        (a, b) => {
            found.count += 1;
            if found.keys.len() < LISTED_MAX {
                found.keys.push(KeyDifference { key, values: [a.cloned(), b.cloned()] });
            }
        }
    }
}

/// 16 and 16.0 are the same number; integers beyond 2⁵³ are compared as integers only.
fn same_number(a: &Number, b: &Number) -> bool {
    if a.is_f64() == b.is_f64() {
        return a == b;
    }
    let exact = |number: &Number| number.as_f64().filter(|value| value.abs() < 9_007_199_254_740_992.0);
    exact(a).is_some() && exact(a) == exact(b)
}

/// Differences of all documents of a folder, by file name.
pub type Documents = BTreeMap<String, DocumentDifference>;

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn keys(name: &str, a: Value, b: Value) -> Vec<String> {
        compare(name, a, b).keys.into_iter().map(|difference| difference.key).collect()
    }

    #[test]
    fn order_and_spelling_do_not_matter() {
        let a = serde_json::from_str(r#"{"a":1,"b":[1,2.50]}"#).expect("JSON");
        let b = serde_json::from_str(r#"{ "b":[1.0,2.5], "a":1 }"#).expect("JSON");
        assert_eq!(compare("x.json", a, b), DocumentDifference::default());
        assert_eq!(keys("x", json!(9_007_199_254_740_993_u64), json!(9_007_199_254_740_992.0)), [""]);
        assert_eq!(keys("x", json!({"a": 1}), json!({"a": "1"})), ["a"]);
    }

    #[test]
    fn differing_keys_are_named() {
        let a = json!({"r": 8, "deep": {"x": [1, 2]}, "gone": null});
        let b = json!({"r": 16, "deep": {"x": [1, 3, 4]}});
        assert_eq!(keys("x.json", a, b), ["deep.x[1]", "deep.x[2]", "gone", "r"]);
        let many = |offset: u32| Value::from((0..500).map(|i| i + offset).collect::<Vec<_>>());
        let found = compare("x.json", many(0), many(1));
        assert_eq!((found.count, found.keys.len()), (500, LISTED_MAX));
    }

    #[test]
    fn sets_of_an_adapter_have_no_order() {
        let a = json!({"target_modules": ["q_proj", "v_proj"]});
        let b = json!({"target_modules": ["v_proj", "q_proj"]});
        assert_eq!(keys("adapter_config.json", a.clone(), b.clone()), Vec::<String>::new());
        assert_eq!(keys("other.json", a, b).len(), 2);
    }
}

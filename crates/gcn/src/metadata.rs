//! The arguments of kernels: from the YAML of an assembly file, and from the MessagePack note of a
//! code object.

use crate::program::Parameter;
use std::collections::BTreeMap;

/// What the metadata of a kernel adds to its descriptor.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Arguments {
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) group_size_max: usize,
}

/// A parameter from its fields. Kernels of ours have explicit ones only.
pub(crate) fn parameter(offset: Option<u64>, size: Option<u64>, kind: Option<&str>) -> Result<Parameter, String> {
    let is_pointer = match kind {
        Some("global_buffer") => true,
        Some("by_value") => false,
        Some(kind) => return Err(format!("arguments of kind {kind} are not supported")),
        None => return Err("an argument without a kind".to_string()),
    };
    let (Some(offset), Some(size)) = (offset, size) else {
        return Err("an argument without offset or size".to_string());
    };
    Ok(Parameter { offset: offset as usize, bytes: size as usize, is_pointer })
}

/// The kernels by name, from YAML as LLVM indents it: kernels at two spaces, arguments at six.
pub(crate) fn read(yaml: &str) -> Result<BTreeMap<String, Arguments>, String> {
    let mut kernels: Vec<BTreeMap<&str, &str>> = Vec::new();
    let mut arguments: Vec<Vec<BTreeMap<&str, &str>>> = Vec::new();
    let lines = yaml.lines().skip_while(|line| line.trim() != "amdhsa.kernels:").skip(1);
    for line in lines.take_while(|line| line.starts_with(' ')) {
        let text = line.trim_start();
        let indent = line.len() - text.len();
        let (item, text) = text.strip_prefix("- ").map_or((false, text), |rest| (true, rest));
        let Some((key, value)) = text.split_once(':') else { continue };
        let (key, value) = (key.trim(), value.trim().trim_matches('\''));
        match (indent, item) {
            (2, true) => {
                kernels.push(BTreeMap::from([(key, value)]));
                arguments.push(Vec::new());
            }
            (4, false) => _ = kernels.last_mut().ok_or("a field outside a kernel")?.insert(key, value),
            (6, true) if key.starts_with('.') => {
                arguments.last_mut().ok_or("an argument outside a kernel")?.push(BTreeMap::from([(key, value)]));
            }
            (8, false) => {
                let argument = arguments.last_mut().and_then(|arguments| arguments.last_mut());
                argument.ok_or("a field outside an argument")?.insert(key, value);
            }
            _ => {}
        }
    }
    let mut found = BTreeMap::new();
    for (kernel, arguments) in kernels.iter().zip(&arguments) {
        let name = kernel.get(".name").ok_or("a kernel without a name")?;
        let number = |fields: &BTreeMap<&str, &str>, key: &str| fields.get(key).and_then(|value| value.parse().ok());
        let parameters = arguments.iter().map(|argument| {
            let kind = argument.get(".value_kind").copied();
            parameter(number(argument, ".offset"), number(argument, ".size"), kind)
        });
        let parameters = parameters.collect::<Result<_, _>>().map_err(|error| format!("{name}: {error}"))?;
        let group_size_max = number(kernel, ".max_flat_workgroup_size").unwrap_or(1024) as usize;
        found.insert((*name).to_string(), Arguments { parameters, group_size_max });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_and_their_arguments() {
        let yaml = "---\namdhsa.kernels:\n  - .agpr_count: 0\n    .args:\n      - .address_space: global\n        \
                    .name: x\n        .offset: 0\n        .size: 8\n        .value_kind: global_buffer\n      - \
                    .offset: 8\n        .size: 4\n        .value_kind: by_value\n    .max_flat_workgroup_size: 64\n    \
                    .name: first\n  - .args: []\n    .name: second\namdhsa.target: amdgcn\n";
        let found = read(yaml).expect("two kernels");
        let parameters = vec![
            Parameter { offset: 0, bytes: 8, is_pointer: true },
            Parameter { offset: 8, bytes: 4, is_pointer: false },
        ];
        assert_eq!(found["first"], Arguments { parameters, group_size_max: 64 });
        assert_eq!(found["second"].parameters, []);
        let hidden = yaml.replace("by_value", "hidden_heap_v1");
        assert!(read(&hidden).expect_err("a hidden argument").contains("hidden_heap_v1"));
    }
}

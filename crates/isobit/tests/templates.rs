//! Chat templates that want all the memory, all the time or all the disk there is: refused with the template's name and exit code 8.
#![cfg(unix)]

mod model_folder;

use model_folder::{Folder, Ran, Shape, finished};
use std::process::{Command, Stdio};

const ROW: &str = "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\"}]}\n";

fn folder(template: &str) -> Folder {
    let folder = Folder::new(Shape::TINY);
    folder.put("model/chat_template.jinja", template);
    folder.put("data.jsonl", ROW.repeat(2));
    folder
}

/// Under 2 GiB of address space: what would take more dies of it, and not with the exit code asked for here.
fn bounded(folder: &Folder, arguments: &str) -> Ran {
    let script = format!("ulimit -v 2097152 && exec \"$0\" {arguments}");
    let mut command = Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_isobit")]).current_dir(folder.path("")).stdin(Stdio::null());
    finished(command.output().expect("a shell starts"))
}

#[test]
fn templates_that_grow_without_bound() {
    let forty = |body: &str| {
        format!(
            "{{% set n = namespace(x='0123456789') %}}{{% for i in range(40) %}}{body}{{% endfor %}}{{{{ n.x|length }}}}"
        )
    };
    let unrolled = format!("{{% set x = 'ab' %}}{}{{{{ x|length }}}}", "{% set x = x ~ x %}".repeat(40));
    let hostile = [
        ("doubled by ~", forty("{% set n.x = n.x ~ n.x %}")),
        ("doubled by +", forty("{% set n.x = n.x + n.x %}")),
        ("doubled in a block", forty("{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}")),
        ("doubled by join", forty("{% set n.x = [n.x, n.x]|join %}")),
        ("doubled by a method", forty("{% set n.x = ''.join([n.x, n.x]) %}")),
        ("grown by replace", forty("{% set n.x = n.x.replace('0', '0000000000') %}")),
        ("grown by tojson", forty("{% set n.x = n.x|tojson|tojson|tojson|tojson|tojson|tojson|tojson|tojson %}")),
        ("grown by format", forty("{% set n.x = '%s%s'|format(n.x, n.x) %}")),
        ("grown by a macro", forty("{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set n.x = m(n.x) %}")),
        ("unrolled", unrolled),
        ("repeated", forty("{% set n.x = n.x * 20 %}")),
        ("lists of lists", forty("{% set n.x = [n.x|list, n.x|list]|tojson %}")),
        ("printed", "{% for i in range(100000) %}{% for i in range(100000) %}0123456789{% endfor %}{% endfor %}".into()),
        ("endless", "{% for i in range(100000) %}{% for i in range(100000) %}{% endfor %}{% endfor %}".into()),
        ("kept", "{% set n = namespace(x=[]) %}{% for i in range(100000) %}{% set n.x = n.x + ['x' * (90000000 + i)] %}{% endfor %}".into()),
    ];
    for (name, template) in &hostile {
        let folder = folder(template);
        for arguments in ["data check --model model --data data.jsonl", "generate --model model --chat --prompt 1"] {
            let ran = bounded(&folder, arguments);
            assert_eq!(ran.code, 8, "{name}, {arguments}: {}{}", ran.out, ran.err);
            assert!(ran.err.contains("chat_template.jinja: ") && ran.err.contains("hint: "), "{name}: {}", ran.err);
        }
        if *name == "doubled by ~" {
            bounded(&folder, "train config.toml --set data_workers=2")
                .says(8, &["chat template model/chat_template.jinja"]);
            assert!(!folder.has("out"));
        }
    }
}

/// A long conversation stays far below the limits.
#[test]
fn large_conversations_are_rendered() {
    let template = "{% set n = namespace(x='') %}{% for m in messages %}{% set n.x = n.x ~ m.role ~ ': ' ~ m.content ~ '\n' %}{% endfor %}{{ n.x }}";
    let folder = folder(template);
    let turn = |role: &str| format!("{{\"role\":\"{role}\",\"content\":\"{}\"}}", "12 ".repeat(100));
    let turns = vec![format!("{},{}", turn("user"), turn("assistant")); 1000];
    folder.put("data.jsonl", format!("{{\"messages\":[{}]}}\n", turns.join(",")));
    let ran = bounded(&folder, "data check --model model --data data.jsonl --assistant-only-loss false");
    assert_eq!(ran.code, 0, "{}", ran.err);
}

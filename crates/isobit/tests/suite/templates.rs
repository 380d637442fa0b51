//! Chat templates that want all the memory, all the time or all the disk there is: refused with the
//! template's name and exit code 8.
#![cfg(unix)]

use crate::model_folder::{Folder, Ran, Shape, finished};
use std::process::{Command, Stdio};

const ROW: &str = "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\"}]}\n";

fn folder(template: &str) -> Folder {
    let folder = Folder::new(Shape::TINY);
    folder.put("model/chat_template.jinja", template);
    folder.put("data.jsonl", ROW.repeat(2));
    folder
}

/// Under 2 GiB of address space: what would take more dies of it, and not with the exit code asked
/// for here.
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
            let limits = ["bytes of work", "of memory", "it writes more than", "items at most"];
            assert!(limits.iter().any(|limit| ran.err.contains(limit)), "{name}: {}", ran.err);
        }
        if *name == "doubled by ~" {
            bounded(&folder, "train config.toml --set data_workers=2")
                .says(8, &["chat template model/chat_template.jinja"]);
            assert!(!folder.has("out"));
        }
    }
}

/// Deep or long sources, and few instructions that touch much: each ends soon, with the limit
/// named.
#[test]
fn templates_that_cost_more_than_they_show() {
    let doubled = "{% set n = namespace(x=['a'], y=['a']) %}{% for i in range(18) %}{% set n.x = n.x + n.x %}\
                   {% set n.y = n.y + n.y %}{% endfor %}{% for i in range(9999) %}{{ n.x == n.y }}{% endfor %}";
    let shared = "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}\
                  {% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}";
    let over = |body: &str| {
        format!("{{% set x = 'a ' * 4000000 %}}{{% for i in range(9999) %}}{{% set y = {body} %}}{{% endfor %}}")
    };
    let (nested, work) = ("levels deep", "bytes of work");
    let hostile = [
        ("signs", format!("{{{{ {}1 }}}}", "-".repeat(20_000)), nested),
        ("not", format!("{{{{ {}1 }}}}", "not ".repeat(20_000)), nested),
        ("parentheses", format!("{{{{ {}1{} }}}}", "(".repeat(9000), ")".repeat(9000)), nested),
        ("lists", format!("{{{{ {}1{} }}}}", "[".repeat(9000), "]".repeat(9000)), nested),
        ("dicts", format!("{{{{ {}1{} }}}}", "{1:".repeat(9000), "}".repeat(9000)), nested),
        ("calls", format!("{{{{ {}1{} }}}}", "x(".repeat(9000), ")".repeat(9000)), nested),
        ("else", format!("{{{{ {}1 }}}}", "1 if 0 else ".repeat(9000)), nested),
        ("blocks", format!("{}{}", "{% if 1 %}".repeat(9000), "{% endif %}".repeat(9000)), nested),
        ("loops", format!("{}{}", "{% for a in [1] %}".repeat(9000), "{% endfor %}".repeat(9000)), nested),
        ("a sum", format!("{{{{ 1{} }}}}", " + 1".repeat(20_000)), "in a chain"),
        ("or", format!("{{{{ 0{} }}}}", " or 0".repeat(20_000)), "in a chain"),
        ("attributes", format!("{{{{ x{} }}}}", ".x".repeat(20_000)), "in a chain"),
        ("items", format!("{{{{ x{} }}}}", "[0]".repeat(20_000)), "in a chain"),
        ("filters", format!("{{{{ x{} }}}}", "|upper".repeat(20_000)), "in a chain"),
        ("doubled lists", doubled.to_owned(), work),
        ("shared lists", shared.to_owned(), work),
        ("printed shared lists", shared.replace("n.x == n.y", "n.x"), work),
        ("upper", over("x|upper"), work),
        ("compared", over("x == x ~ 'a'"), work),
        ("searched", over("'b' in x"), work),
        ("split", over("x.split()"), work),
        ("replaced", over("x.replace('a', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa')"), work),
        ("listed", over("x|list"), work),
        ("sliced", over("x[::-1]"), work),
        (
            "sorted",
            "{% set x = range(99999)|list %}{% for i in range(9999) %}{% set y = x|sort %}{% endfor %}".into(),
            work,
        ),
        ("range", "{% for i in range(10**9) %}{% endfor %}".into(), "a range of more than"),
        ("multiplied", "{{ 'x' * 10**12 }}".into(), work),
        ("multiplied list", "{{ [1] * 10**12 }}".into(), work),
        ("width", "{{ '%1000000000d' % 1 }}".into(), work),
        ("star", "{{ '%*d' % (1000000000000, 1) }}".into(), work),
        ("precision", "{{ '%.1000000000f' % 1 }}".into(), "decimals"),
        ("format", "{{ '{:>1000000000}'.format('x') }}".into(), work),
        ("zfill", "{{ '1'.zfill(1000000000) }}".into(), work),
        ("center", "{{ 'x'.center(1000000000) }}".into(), work),
        ("ljust", "{{ 'x'.ljust(1000000000) }}".into(), work),
        ("indent", "{{ 'x'|indent(1000000000, true) }}".into(), work),
        ("tojson", "{{ [1]|tojson(indent=1000000000) }}".into(), work),
        ("batch", "{{ [1]|batch(1000000000, 'x')|list }}".into(), work),
        ("slice", "{{ [1]|slice(1000000000)|list }}".into(), work),
        ("a macro in itself", "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}".into(), "nested too deeply"),
        ("a loop in itself", "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}".into(), "nested too deeply"),
        (
            "two macros",
            "{% macro f(x) %}{{ x }}{{ f(x) if x < 9 else '' }}{{ f(x + 1) }}{% endmacro %}{{ f(1) }}".into(),
            "nested too deeply",
        ),
    ];
    for (index, (name, template, limit)) in hostile.iter().enumerate() {
        let folder = folder(template);
        // The main thread has another stack than the workers.
        let commands = ["data check --model model --data data.jsonl", "generate --model model --chat --prompt 1"];
        for arguments in commands.iter().skip(index % 2).take(if index < 14 { 2 } else { 1 }) {
            #[expect(clippy::disallowed_types, reason = "a test that something ends soon")]
            let started = std::time::Instant::now();
            let ran = bounded(&folder, arguments);
            assert_eq!(ran.code, 8, "{name}, {arguments}: {}{}", ran.out, ran.err);
            assert!(ran.err.contains("chat_template.jinja: ") && ran.err.contains(limit), "{name}: {}", ran.err);
            assert!(started.elapsed().as_secs() < 20, "{name}: {:?}", started.elapsed());
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

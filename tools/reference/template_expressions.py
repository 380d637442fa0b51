"""Writes crates/training/tests/fixtures/expressions.json: small templates and what transformers renders of them.

Each case is a template that is rendered with the variables below and one short conversation. Where the reference raises,
the case has `error`. Needs transformers and jinja2; run it from the root of the repository after changing a case.
"""

import json
import pathlib

import jinja2
import transformers
from transformers.utils import chat_template_utils

TARGET = pathlib.Path("crates/training/tests/fixtures/expressions.json")
# As text, because numbers are part of what is compared.
VARIABLES = """{"n": null, "t": true, "i": 42, "neg": -7, "zero": -0, "f": 123.09510907566857, "small": 1e-7, "big": 1e20,
 "fneg": -0.0, "huge": 123456789012345678901234567890123456789012345678901234567890, "edge": -9223372036854775809,
 "wide": 18446744073709551616, "s": "Hello, wörld", "e": "", "lines": "a\\nb\\r\\n\\nc", "quote": "it's \\"x\\" \\\\ \\u200b\\u00a0",
 "l": [3, 1.5, true, null, "a"], "words": ["b", "A", "c", "a"], "d": {"b": 1, "a": [1, 2], "items": 5, "c": {"x": "y"}},
 "rows": [{"k": "x", "v": 2}, {"k": "y", "v": 1}, {"k": "x", "v": 3}, {"v": 0}], "empty": [], "nested": [[1, [2]], [3]]}"""
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there", "tool_calls": None}]

EXPRESSIONS = r"""
n is iterable
nope is iterable
s is iterable
d is iterable
i is iterable
l is sequence
d is sequence
s is sequence
n is sequence
nope is sequence
d is mapping
l is mapping
t is number
t is integer
i is integer
f is float
f is number
t is boolean
i is boolean
t is true
i is true
n is none
nope is none
nope is defined
n is defined
s is string
e is lower
'ab' is lower
'AB1' is upper
'1' is upper
3 is odd
4 is even
9 is divisibleby 3
9 is divisibleby(4)
i is eq 42
i is ne 42
i is gt 41
i is lessthan 41
'a' is in l
1 is in(l)
s is callable
d.get is callable
n is sameas none
t is sameas true
'upper' is filter
'none' is test
huge is integer
small is escaped
i
f
zero
fneg
small
big
huge
edge
wide
t
n
e
l
d
nested
quote
words
[quote]
[1.0, 2.5e-9, 1e16, 1e15, -0.0]
('a',)
('a', 1)
()
{}
{'a': {}, 1: 2, none: 3}
i ~ f ~ small ~ big ~ t ~ n
l ~ d
l|join('-')
[small, big, huge, wide, edge]|join(' ')
5 // 2
-5 // 2
5 // -2
5 % 3
-5 % 3
5 % -3
7 / 2
4 / 2
2 ** 10
-2 ** 2
2 ** 3 ** 2
1 + 2 * 3 - 4
5.5 // 2
-5.5 % 2
1 / 3
1e308 * 10
0.1 + 0.2
i + 0.5
t + t
'a' * 3
3 * 'a'
[1] * 2
'a' + 'b'
[1] + [2]
(1,) + (2,)
'a' + 1
1 + nope
wide + 1
wide - wide
edge * 2
i == 42.0
t == 1
'1' == 1
[1, 2] == [1.0, 2]
(1, 2) == [1, 2]
d == d
n == nope
nope == nope2
1 < 2 < 3
1 < 2 > 5
'a' < 'b'
[1, 2] < [1, 3]
1 < 'a'
n < 1
'a' in s
'ell' in s
1 in 'a'
'b' in d
5 in d.values()
1 in l
2 not in l
'a' not in l
n in l
'x' in n
'x' in nope
not t
not e
t and i
e or s
n or e
n and nope.x
t or nope.x
s[0]
s[-1]
s[1:4]
s[::-1]
s[:-2]
s[7:]
s[100]
l[0]
l[-1]
l[10]
l[1:3]
l[::-1]
l[::2]
l[-2:]
l['x']
d['b']
d.b
d['nope']
d.items
d['items']
d.c.x
d.c.nope
d.nope.x
d.keys()
d.values()
d.items()
d.get('b')
d.get('q')
d.get('q', 7)
n.x
n['x']
n[0]
i.x
nope.x
nope['x']
nope[0]
nope()
s()
s.nope
(1, 2)[0]
range(3)
range(5)[2]
range(1, 9, 3)|list
range(3)|length
s.upper()
s.lower()
s.title()
s.capitalize()
s.swapcase()
'they\'re bill-x'.title()
'they\'re bill-x'|title
s.index('w')
s.index('z')
s.find('l')
s.rfind('l')
s.find('z')
s.find('l', 4)
s.count('l')
s.count('l', 0, 3)
''.count('')
'abc'.count('')
s.partition(', ')
s.partition('z')
s.rpartition('l')
s.rpartition('z')
'42'.zfill(5)
'-42'.zfill(5)
'+1'.zfill(1)
'x'.zfill(3)
'a'.ljust(4, '.')
'a'.rjust(4)
'ab'.center(5, '*')
'abc'.center(6, '*')
'a'.center(4)
s.startswith('He')
s.startswith(('x', 'H'))
s.endswith('ld')
s.startswith('l', 2)
s.removeprefix('Hello')
s.removesuffix('ld')
s.split()
s.split(',')
s.split('l', 1)
s.rsplit('l', 1)
'  a b  c '.split()
'  a b  c '.split(none, 1)
'  a b  c '.rsplit(none, 1)
'a,b'.split(sep=',')
lines.splitlines()
lines.splitlines(true)
s.replace('l', 'L')
s.replace('l', 'L', 1)
'abc'.replace('', '-')
s.strip('Hd')
' x '.strip()
' x '.lstrip()
'-'.join(words)
'-'.join(l)
'a1'.isalnum()
'1'.isdigit()
'a'.isalpha()
' '.isspace()
''.isspace()
'Ab'.istitle()
'ab'.islower()
'{} {}'.format(1, 'x')
'{0}-{1}-{0}'.format('a', 'b')
'{a.x}'.format(a=d.c)
'{:>5}|{:<5}|{:^5}'.format('a', 'b', 'c')
'{:05d} {:+d} {:,} {:x}'.format(42, 7, 1234567, 255)
'{:.2f} {:e} {:g} {:.1%}'.format(3.14159, 12345.678, 0.00001, 0.256)
'{!r}'.format('a')
'{{}}'.format()
'{}'.format()
'{a[b]}'.format(a=d)
'%s' % s
'%s and %d' % ('a', 3)
'%5.2f%%' % 3.14159
'%05d|%-5d|%+d|% d' % (42, 42, 42, 42)
'%x %X %o %#x' % (255, 255, 8, 255)
'%r' % 'a'
'%(a)s' % {'a': 1}
'%s'
'%d' % 3.9
'%s %s' % 'a'
'%s' % (1, 2)
'%e %g %g %G' % (12345.678, 0.0001, 1e20, 1e-7)
'%c' % 65
'%5s|%-5s|%.2s' % ('ab', 'cd', 'efg')
'%d' % 'x'
'%s' % none
'%s' % [1]
'%*d' % (5, 42)
s|length
l|length
d|length
nope|length
i|length
e|length
l|first
l|last
empty|first
empty|last
e|first
words|sort
l|sort
words|sort(reverse=true)
words|sort(case_sensitive=true)
rows|sort(attribute='v')
rows|map(attribute='v')|list
rows|map(attribute='k')|list
rows|map(attribute='k', default='?')|join(',')
words|map('upper')|list
words|map('replace', 'a', 'b')|join
empty|map('upper')
rows|selectattr('k')|list
rows|selectattr('k', 'equalto', 'x')|map(attribute='v')|sum
rows|rejectattr('k', 'defined')|list
rows|selectattr('v', '>', 1)|list|length
l|select('string')|list
l|reject('none')|list
l|select|list
words|unique|list
rows|groupby('v')
words|reverse|list
s|reverse
rows|sum(attribute='v')
[1, 2.5]|sum
words|min
words|max
empty|max
[1, 3, 2]|max
l|list
s|list
d|list
n|list
nope|list
words|batch(3)|list
words|batch(3, '-')|list
words|slice(3)|list
words|slice(3, '-')|list
d|dictsort
d|items|list
n|items
nope|items|list
d.c|tojson
d|tojson
l|tojson
quote|tojson
s|tojson
s|tojson(ensure_ascii=true)
d|tojson(indent=2)
empty|tojson(indent=2)
d|tojson(separators=(',', ':'))
d|tojson(sort_keys=true)
d|tojson(indent=2, sort_keys=true)
{1: 2, none: 3, true: 4, 1.5: 5}|tojson
nope|tojson
[f, small, big, huge, edge, zero, fneg]|tojson
(1, 2)|tojson
d|tojson(indent='\t')
'x'|int
'42'|int
' 42 '|int
'42.9'|int
'x'|int(-1)
'ff'|int(0, 16)
'0x1f'|int(0, 16)
n|int
f|int
t|int
big|int
l|int
'1_000'|int
'1.5'|float
'x'|float
'x'|float(2.5)
i|float
n|float
'inf'|float
huge|int
-3|abs
-3.5|abs
f|round
f|round(2)
2.5|round
3.5|round
f|round(1, 'ceil')
f|round(1, 'floor')
i|round
2.675|round(2)
s|upper
s|lower
s|capitalize
s|title
s|trim
' x '|trim
'xax'|trim('x')
n|upper
i|string
l|string
n|string
s|center(20)
'a b c'|wordcount
'foo bar baz qux'|truncate(9)
'foo bar baz qux'|truncate(9, true)
'foo bar baz qux'|truncate(11)
'foo bar baz qux'|truncate(11, false, '..', 0)
'foo bar'|truncate(2)
lines|indent
lines|indent(2, true)
lines|indent(2, false, true)
lines|indent('> ')
'a b/c?d=ü'|urlencode
{'a b': 'c&d', 'e': 1}|urlencode
[('a', 1)]|urlencode
'%s-%d'|format('a', 3)
'%(x)s'|format(x=1)
s|replace('l', 'L')
s|replace('l', 'L', 1)
12321|replace(2, 'x')
'<a & "b">'|escape
'<a>'|e
'<a>'|safe
'<a>'|safe + '<b>'
'<b>' + '<a>'|safe
('<a> '|safe|trim) + '&'
('<a>'|safe) ~ '<b>'
['<a>'|safe]
nope|default('x')
n|default('x')
n|default('x', true)
e|d('y', true)
nope|d
d|attr('b')
{'a': 1, 'b': none}|xmlattr
nope|upper
nope|trim
nope|join
nope|list
nope|string
n|join
i|list
i|first
d|first
d|last
'a' if t
'a' if e
'a' if e else 'b'
('a' if e else 'b') ~ 'c'
i if nope is defined else 'z'
dict(a=1, b=2)
dict([('x', 1)])
dict(d.c, z=1)
namespace(a=1).a
namespace(a=1).b
raise_exception('no')
words.append('x')
d.update({})
d.pop('b')
words.sort
s.__class__
range(100001)
cycler('a', 'b').next()
joiner(',')()
words.count('a')
words.index('c')
words.index('q')
(1, 2).count(1)
messages[0].role
messages[-1]['content']
messages[0]['nope']
messages|length
messages[1].tool_calls is none
tools
documents
bos_token
0x1F
1_000
1e3
.5
5.
'a' 'b'
"\x41\u00e4\n"
'\q'
[1, 2,]
{'a': 1,}
(1, 2,)
1 if
)
'a
s is nosuch
s|nosuch
nosuch(1)
"""

TEMPLATES = [
    "{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }};{% endfor %}",
    "{% for x in words %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }}{{ loop.cycle('o', 'e') }}{{ loop.changed(x) }} {% endfor %}",
    "{% for x in words if x != 'A' %}{{ loop.index }}/{{ loop.length }}{{ x }}{{ loop.last }} {% else %}none{% endfor %}",
    "{% for x in empty %}{{ x }}{% else %}none{% endfor %}",
    "{% for x in nope %}{{ x }}{% else %}none{% endfor %}",
    "{% for x in n %}{{ x }}{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for k, v in d|items %}{{ k }}={{ v }};{% endfor %}",
    "{% for a, b in words %}{{ a }}{% endfor %}",
    "{% for x in nested recursive %}[{{ loop.depth }}{{ loop(x) if x is iterable else x }}]{% endfor %}",
    "{% for x in range(9) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% set ns = namespace(f=false) %}{% for x in words if not ns.f %}{{ x }}{% if x == 'A' %}{% set ns.f = true %}{% endif %}{% endfor %}",
    "{% set x = 1 %}{% for y in [1, 2] %}{{ x }}{% set x = x + y %}{{ x }} {% endfor %}{{ x }}",
    "{% if t %}{% set x = 1 %}{% endif %}{{ x }}{% if e %}{% set y = 1 %}{% endif %}[{{ y }}]",
    "{% macro m(a, b='d', c=a) %}{{ a }}-{{ b }}-{{ c }};{% endmacro %}{{ m(1) }}{{ m(1, 2) }}{{ m(b=3, a=4) }}{{ m() }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(z=2) }}",
    "{% macro m(a) %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, q=4) }}",
    "{% macro m() %}{{ x }}{% endmacro %}{% set x = 5 %}{{ m() }}{% set x = 6 %}{{ m() }}",
    "{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}in {{ i }}{% endcall %}",
    "{% macro m() %}<{{ caller(1, 2) }}>{% endmacro %}{% call(a, b) m() %}{{ a }}{{ b }}{% endcall %}",
    "{% macro m(x) %}{% if x > 0 %}{{ x }}{{ m(x - 1) }}{% endif %}{% endmacro %}{{ m(9) }}",
    "{% set ns = namespace(x=0) %}{% for m in messages %}{% generation %}{% set ns.x = ns.x + 1 %}{{ m.content }}{% endgeneration %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace() %}{% generation %}{% set ns.x = 'set' %}{% set y = 1 %}{% endgeneration %}{{ ns.x }}{{ y }}",
    "{% set x %}a{{ i }}{% endset %}{{ x|length }}{{ x }}",
    "{% set x | upper | trim %} a{{ s }} {% endset %}{{ x }}",
    "{% filter upper %}a{{ s }}{% endfilter %}",
    "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% set c = 3 %}{% endwith %}{{ a }}{{ c }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set a, b = b, a %}{{ a }}{{ b }}",
    "{% set a = 1, 2 %}{{ a }}",
    "{% set s.x = 1 %}",
    "{{ rows|selectattr('k', 'equalto', 'zzz') and 'always true' }}{{ rows|selectattr('k')|length }}",
    "{% set m = words|map('upper') %}{{ m|list }}{{ m|list }}",
    "{% set j = joiner('|') %}{% for x in words %}{{ j() }}{{ x }}{% endfor %}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}",
    "{% print i, s %}",
    "  {% if t %}\n  a\n  {%- endif %}\n b {#- c -#}  \n c {% raw %}{{ x }}{% endraw %}\n{{ i }}\n",
    "{{ i -}}   x   {{- i }}\n\n{%- if t +%}\n y{% endif %}",
    "{% if i > 5 and 'a' in words or nope.x %}yes{% elif t %}no{% else %}never{% endif %}",
    "{% if x is defined and x %}a{% elif not x is defined %}b{% endif %}",
    "{{ (messages|first).role }}{{ messages[::-1][0]['role'] }}{{ (messages|last)['content']|upper|lower }}",
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] | trim + '\\n' }}{% endfor %}",
    "{% nosuchtag %}",
    "{% if t %}",
    "{% endif %}",
    "{# open",
]


def main():
    cases = [f"{{{{ {text} }}}}" for text in EXPRESSIONS.strip().split("\n")]
    variables = json.loads(VARIABLES)
    out = []
    for source in cases + TEMPLATES:
        try:
            text = chat_template_utils.render_jinja_template(
                conversations=[MESSAGES], chat_template=source, add_generation_prompt=False, bos_token="<s>", **variables
            )[0][0]
        except Exception as error:
            out.append({"source": source, "error": type(error).__name__})
            continue
        if " at 0x" not in text and "<built-in" not in text and "bound method" not in text:
            out.append({"source": source, "text": text})
    head = {"transformers": transformers.__version__, "jinja2": jinja2.__version__}
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in out)
    row = "{" + f'"messages": {json.dumps(MESSAGES)}, "chat_template_kwargs": {VARIABLES}' + "}"
    TARGET.write_text(
        json.dumps(head)[:-1] + f',\n"row": {json.dumps(row)},\n"cases": [\n{lines}\n]}}\n', encoding="utf-8"
    )
    print(len(out), "cases,", sum("error" in case for case in out), "errors")


if __name__ == "__main__":
    main()

"""Templates within the bounds render as Jinja's sandbox and transformers do; hostile ones end early and small."""
# ruff: noqa: E501

from __future__ import annotations

import functools
import resource
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentspec.backends.templates import budget
from agentspec.backends.templates.budget import TemplateLimitError
from agentspec.backends.templates.huggingface import rendered
from agentspec.backends.templates.sandbox import BoundedEnvironment

SAID = [
    {"role": "user", "content": "hi\nthere"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "éé"},
]

HOSTILE = {
    "a loop of 1e9": "{% for i in range(1000000000) %}x{% endfor %}",
    "loops in loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loops over a text": "{% set t = 'x' * 100000 %}{% for i in t %}{% for j in t %}{% endfor %}{% endfor %}",
    "a text 1e9 times": "{{ 'x' * 1000000000 }}",
    "a list 1e9 times": "{{ ([0] * 1000000000)|length }}",
    "a number": "{{ (2 ** 1000000000) % 7 }}",
    "powers of powers": "{{ ((9 ** 9) ** 9) ** 999 }}",
    "doubling by ~": "{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling a list": "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "nesting a list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "nesting a dict": "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}"
    "{{ n.x|tojson }}",
    "nesting by dict()": "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}"
    "{{ n.x|string }}",
    "comparing": "{% set n = namespace(x=1, y=1) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}"
    "{% set n.y = (n.y, n.y) %}{% endfor %}{{ n.x == n.y }}",
    "many texts": "{% set n = namespace(x=[]) %}{% for i in range(1000) %}{% set n.x = n.x + ['x' * 1000000] %}{% endfor %}",
    "a text in a block": "{% set x %}{% for i in range(100000) %}" + "y" * 50000 + "{% endfor %}{% endset %}",
    "a text in a macro": "{% macro m() %}{% for i in range(100000) %}" + "y" * 50000 + "{% endfor %}{% endmacro %}{{ m() }}",
    "texts in a block": "{% set y = 'y' * 100000 %}{% set x %}{% for i in range(100000) %}{{ y }}{% endfor %}{% endset %}",
    "output": "{% set y = 'y' * 100000 %}{% for i in range(100000) %}{{ y }}{% endfor %}",
    "macros that call macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a recursive loop": "{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "center": "{{ 'x'|center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "ljust of escaped text": "{{ ('x'|escape).ljust(1000000000) }}",
    "replace in escaped text": "{{ (('x' * 1000000)|escape).replace('x', 'y' * 1000000) }}",
    "escaped text 1e9 times": "{{ ('x'|escape) * 1000000000 }}",
    "an attribute": "{{ ('x'|attr('ljust'))(1000000000) }}",
    "sorting again and again": "{% set l = range(100000)|map('string')|list %}{% set l = l + l + l %}"
    + "{{ l|sort|first }}{{ l|max }}{{ l|unique|list|length }}" * 200,
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t\t'.expandtabs(1000000000) }}",
    "indent": "{{ 'x\ny'|indent(1000000000) }}",
    "replace": "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
    "the filter replace": "{{ ('x' * 1000000)|replace('x', 'y' * 1000000) }}",
    "join": "{{ range(100000)|join('y' * 1000000) }}",
    "the method join": "{{ ('y' * 1000000).join(['a'] * 100000) }}",
    "joining a map": "{{ ''.join(range(100000)|map('center', 90000)) }}",
    "listing a map": "{{ range(100000)|map('center', 90000)|list|length }}",
    "a wide %": "{{ '%1000000000d' % 1 }}",
    "a wide % by name": "{{ '%(x)1000000000d' % {'x': 1} }}",
    "a long %": "{{ '%.1000000000f' % 1.0 }}",
    "a wide % by argument": "{{ '%*d' % (1000000000, 1) }}",
    "the filter format": "{{ '%1000000000d'|format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format by argument": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format by an element": "{{ '{0[x]:{0[w]}}'.format({'x': 1, 'w': 1000000000}) }}",
    "format_map by an element": "{{ '{x:{w}}'.format_map({'x': 1, 'w': 1000000000}) }}",
    "format many times": "{{ ('{0}' * 100000).format('x' * 1000000) }}",
    "format_map": "{{ '{x:1000000000}'.format_map({'x': 1}) }}",
    "tojson with an indent": "{{ [[1]]|tojson(indent=1000000000) }}",
    "tojson with a separator": "{{ range(100000)|list|tojson(separators=('y' * 1000000, ':')) }}",
    "batch": "{{ [1]|batch(1000000000, 'x')|list }}",
    "slice": "{{ [1]|slice(1000000000)|list }}",
    "round": "{{ 1.5|round(1000000000) }}",
    "sum": "{{ (range(50000)|map('string')|map('list')|list)|sum(start=[])|length }}",
    "lipsum": "{{ lipsum(1000000) }}",
    "strftime_now": "{{ strftime_now('%1000000000Y' * 100000) }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "a constant": "{% if 0 %}{{ 'x'|center(1000000000) }}{% endif %}{{ 'x'|center(1000000000) }}",
    "many comparisons": "{% set a = 'x' * 3000000 %}{% set b = 'x' * 2999999 ~ 'x' %}" + "{% if a == b %}{% endif %}" * 2000,
    "code": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "code by a filter": "{{ ''|attr('__class__') }}{{ (''|attr('__class__')).mro() }}",
    "code by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "code by globals": "{{ namespace.__init__.__globals__ }}",
    "code by a cycler": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "code by the environment": "{{ self._TemplateReference__context.environment.charged }}",
    "an import": "{% import 'os' as os %}",
    "a file": "{% include '/etc/passwd' %}",
    "changing a message": "{% set _ = messages.append(1) %}",
    "deep brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "a very long template": "x" * 100_001,
    "replace in a list": "{{ ['a' * 60000]|replace('a', 'x' * 60000) }}",
    "format of a list": "{{ ['%1000000000d']|format(1) }}",
    "sorting by a long default": "{{ (['a'] * 9000)|groupby('b', default='x' * 60000)|list|length }}",
    "joining bytes": "{{ ('y' * 60000).encode()|join('x' * 60000) }}",
    "joining long numbers": "{{ ([2 ** 14000] * 100000)|join|length }}",
    "writing long numbers": "{{ ([2 ** 14000] * 100000)|string|length }}",
    "select in": "{{ (['a' * 99] * 9000)|select('in', ['b' * 99] * 90000)|list|length }}" * 99,
    "in, by a filter": "{{ range(90000)|select('in', range(90000)|map('string')|list)|list|length }}",
    "strip": "{{ ('a' * 1000000).strip('b' * 999999 ~ 'a') }}",
    "trim": "{{ ('a' * 1000000)|trim('b' * 999999 ~ 'a') }}",
    "rfind": "{{ ('a' * 1000000).rfind('b' ~ 'a' * 500000) }}",
    "rsplit": "{{ ('a' * 1000000).rsplit('b' ~ 'a' * 500000) }}",
    "striptags": "{{ ('<!-- -->' * 20000)|striptags }}" * 9,
    "the method striptags": "{{ (('<!-- -->' * 20000)|safe).striptags() }}" * 9,
    "wordwrap": "{{ ('x' * 199999)|wordwrap(1) }}",
    "urlize": "{{ ('http://a.bc ' * 9999)|urlize(rel='x' * 1000000) }}",
    "punycode": "{{ ('é' * 300000).encode('punycode') }}",
    "names of characters": "{{ ('é' * 3000000).encode('ascii', 'namereplace') }}",
    "keys that collide": "{{ dict(range(99999)|map('multiply')) }}{{ {}.fromkeys(numbers) }}",
    "unique keys that collide": "{% set n = namespace(x=[]) %}{% for i in range(20000) %}"
    "{% set n.x = n.x + [2305843009213693951 * i] %}{% endfor %}{{ n.x|unique|list|length }}",
    "expandtabs by name": "{{ ('\t' * 9).expandtabs(tabsize=1000000000) }}",
    "to_bytes by name": "{{ (1).to_bytes(length=1000000000, byteorder='big') }}",
    "indent by name": "{{ 'x\ny'|indent(first=true, width=1000000000) }}",
    "an indented tojson of a deep list": "{% set n = namespace(x=range(9000)|list) %}{% for i in range(900) %}"
    "{% set n.x = [n.x] %}{% endfor %}{{ n.x|tojson(indent=64)|length }}",
    "a long attribute": "{{ range(99999)|map(attribute='a' ~ '.a' * 99999, default={})|list }}",
    "a split of blanks": "{{ ('a ' * 8000000).split()|length }}",
    "comparing long lists": "{% set l = range(99999)|list %}{% set k = range(99999)|list %}" + "{{ l == k }}" * 900,
    "a recursive loop over a long list": "{% set l = range(99999)|list %}{% for a in [0] * 9999 recursive %}"
    "{% if a == 0 %}{{ loop(l) }}{% endif %}{% endfor %}",
    "many widths of four digits": "{{ ('%(a)9999s' * 20000) % {'a': 'x'} }}",
    "many widths in format": "{{ ('{0:9999}' * 20000).format('x') }}",
    "many widths by argument": "{{ ('%*s' * 1500) % ((99999, 'x') * 1500) }}",
    "one argument as many widths": "{{ ('{1:{0}}' * 1500).format(99999, 'x') }}",
    "format by a text": "{{ '{:{}}'.format('x', '200000000') }}",
    "format_map by a text": "{{ '{a:{b}}'.format_map({'a': 'x', 'b': '200000000'}) }}",
    "format by several numbers": "{{ '{:{}{}}'.format('x', 20000, 9999) }}",
    "format by a filled number": "{{ '{:{:9<9}}'.format('x', 19) }}",
    "a block that is called": "{% set y = self.a() %}{% block a %}{% for i in range(3000) %}" + "y" * 90000 + "{% endfor %}{% endblock %}",
    "encoded again and again": "{% set t = 'é' * 1000000 %}" + "{{ t.encode()|length }}{{ t.upper()|length }}" * 900,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_early_and_small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.backends.templates.budget.SECONDS", 0.1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.thread_time()
    with pytest.raises(Exception) as caught:
        rendered(HOSTILE[name], SAID, None, {}, start=True, continue_final=False)
    assert not isinstance(caught.value, MemoryError)
    assert time.thread_time() - started < 30.0  # the budget and one operation beyond it, on whatever machine
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 60


def test_tuples_in_tuples_stay_few_on_a_machine_of_any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """To hash very many of them would end the process, which no exception tells."""
    monkeypatch.setattr(budget, "SECONDS", 600)
    nested = "(" * 40 + "n.x" + ",)" * 40
    source = (
        "{% set n = namespace(x=()) %}{% for i in range(AT_MOST) %}{% set n.x = NESTED %}{% endfor %}{{ {n.x: 1} }}"
    )
    source = source.replace("NESTED", nested)
    with pytest.raises(TemplateLimitError, match="too much work"):
        rendered(source.replace("AT_MOST", "500"), SAID, None, {}, start=True, continue_final=False)
    rendered(
        source.replace("{{ {n.x: 1} }}", "").replace("AT_MOST", "200"), SAID, None, {}, start=True, continue_final=False
    )


TEMPLATES = [
    "{% for m in messages %}{{ m.role }}: {{ m['content']|trim }}{% if not loop.last %}\n{% endif %}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }} {{ m.content.upper() }}"
    "{{ loop.previtem.content if loop.previtem is defined }}{% else %}none{% endfor %}",
    "{% set ns = namespace(found=false, out='') %}{% for m in messages[1:] %}{% set ns.out = ns.out ~ m.content ~ 1 %}"
    "{% set ns.found = true %}{% endfor %}{{ ns.out }}{{ ns.found }}",
    "{% macro one(m, n=2) %}<{{ m.role }}>{{ caller() if caller else '' }}{{ [m.content, n]|join('-') }}{% endmacro %}"
    "{% for m in messages %}{{ one(m) }}{% call one(m, n=3) %} body {% endcall %}{% endfor %}",
    "{% set text %}a{% for m in messages %}{{ m.content }}b{% endfor %}{% endset %}{{ text }}{{ text|length }}",
    "{{ messages|tojson }}{{ messages|map(attribute='role')|list }}{{ {'a': messages[0], 'b': (1, 2)} }}",
    "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join(', ') }}{{ [1, 2] + [3] }}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{% for a in 'xyz' %}{{ a * 2 }}{% endfor %}",
    "{{ '%s-%05d' % ('a', 3) }}{{ '{}{x:>4}'.format('a', x=1) }}{{ 7 // 2 }}{{ 2 ** 10 }}{{ 'a,b'.split(',') }}",
    "{{ '{}% of 20240101, {x} {{12345}}'.format(3, x=messages[0].role) }}{{ '%d{12345} %s %%12345' % (3, 'a') }}",
    "{{ messages[-1].content|replace('é', 'e')|indent(2)|center(9) }}{{ missing is defined }}{{ missing }}{{ none }}",
    "{% for group in messages|groupby('role') %}{{ group.grouper }}{{ group.list|length }}{% endfor %}"
    "{% for b in range(5)|batch(2, 'x') %}{{ b }}{% endfor %}{{ range(5)|sum }}{{ [3, 1]|sort }}{{ 1.25|round(1) }}",
    "{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "{% filter upper %}a{{ messages[0].content }}{% endfilter %}{{ 'x' if 'user' in messages|map(attribute='role') }}",
    "{% set a, b = 1, messages[0].role %}{{ a }}{{ b }}{{ (a, b) }}{{ dict(x=1) }}{{ dict({'y': 2}, z=b)|dictsort }}",
    "{% set a = messages[0].content.strip('h').split('\\n') %}{{ a }}{{ 'x'.join(a) }}{{ 1 not in [2] }}{{ 2 <= 2 != 3 }}"
    "{{ ' a b '.rsplit(' ', 1) }}{{ {'b': 1}.get('b') }}{{ 'é'.encode('utf-8') }}{{ {}.fromkeys('ab') }}{{ 'a' is in('ab') }}"
    "{{ [3, 1, 3]|unique|list }}{{ messages|rejectattr('role', 'in', ['user'])|list|length }}{{ (2).to_bytes(2, 'big') }}",
    "{{ 'a-b'|replace('-', '+') }}{{ ' a '|trim }}{{ 'abc'|truncate(2, true, '') }}{{ 'a b'|wordwrap(1) }}{{ '<b>'|striptags }}"
    "{{ {'b': 2, 'a': 1}|dictsort }}{{ {'b': 2}.items() - {'c': 1}.items() }}{{ [1, 2]|sum(start=3) }}{{ 'x'|indent(width=2) }}",
    "{{ '{:.{}f} {:>{}}'.format(3.14159265, 2, 'x', 12) }}{{ '{a:{b}}'.format_map({'a': 'x', 'b': 5}) }}{{ '%*d' % (5, 3) }}"
    "{{ ('{:>{}}'|safe).format('<', 4) }}{% block a %}hi {{ messages[0].role }}{% endblock %}{{ self.a() }}",
    "{{ messages[0].content[::-1] }}{{ messages[0]['content'][1:3] }}{{ 3 > 2 > 1 }}{{ 'a' in ['a', messages[0].role] }}",
]  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_a_template_makes_is_what_jinja_makes(template: str) -> None:
    plain = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    bounded = BoundedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    given = {"messages": SAID}
    assert bounded.render(bounded.load(template), given) == plain.from_string(template).render(given)


def test_long_conversations_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "SECONDS", 60)  # this is about bytes, whatever the machine
    many = [{"role": "user", "content": "word " * 100}] * 5000
    text = rendered(TEMPLATES[0], many, None, {}, start=True, continue_final=False)
    assert len(text) > 2_000_000
    with pytest.raises(TemplateLimitError, match="longer than"):
        rendered(TEMPLATES[0], many * 5, None, {}, start=True, continue_final=False)


@functools.cache
def loaded_templates() -> list[tuple[Any, BoundedEnvironment, Any]]:
    """As Jinja's sandbox has them, and as ours has them."""
    return [
        (ImmutableSandboxedEnvironment().from_string(template), bounded, bounded.load(template))
        for template in TEMPLATES[:6]
        for bounded in [BoundedEnvironment()]
    ]


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=20)), min_size=1, max_size=4))
def test_any_texts_render_as_in_jinja(said: Any) -> None:
    messages = [{"role": role, "content": content} for role, content in said]
    for plain, bounded, template in loaded_templates():
        assert bounded.render(template, {"messages": messages}) == plain.render(messages=messages)

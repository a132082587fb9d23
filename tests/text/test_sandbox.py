"""Templates from strangers: no way to Python's internals, no endless loop, no value that fills the memory."""

import pytest

from outpace.text import sandbox
from outpace.text.template import render

TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ (messages | attr('__class__')).__base__ }}",
        "{{ ''['__class__'] }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ '{0.__class__.__init__}'.format(messages) }}",
        "{{ '{0.__class__}' | format(1) }}{{ '{0.__class__}'.format_map({}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__.co_consts }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self._TemplateReference__context }}",
        "{{ range.__self__ }}",
        "{{ dict.__base__ }}",
        "{{ dict.mro() }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1%}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].clear() }}",
        "{% macro m() %}{% endmacro %}{{ m.__globals__ }}{{ m._func.__globals__ }}",
        "{% for x in messages %}{{ loop._iterable.__class__.__base__ }}{% endfor %}",
        "{% import 'os' as os %}",
    ],
)
def test_no_way_out_of_the_sandbox(template):
    try:
        text = render(template, TALK)
    except ValueError as error:
        assert "chat template" in str(error)
    else:
        assert text.replace("Undefined", "").strip("[], ") == ""  # an attribute that is not there


GROW = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}" + "x" * 1000 + "{% endfor %}",
        "{% filter upper %}{% for a in range(100000) %}" + "x" * 1000 + "{% endfor %}{% endfilter %}",
        "{% for a in range(100000) %}{{ range(100000) | list | length }}{% endfor %}",
        "{{ range(1000000) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
        "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * [1] }}",
        "{{ 'x'.encode() * 1000000000 }}",
        "{{ 10 ** 100000000 }}",
        GROW % ("3", "{% set ns.x = ns.x * ns.x %}"),
        GROW % ("'ab'", "{% set ns.x = ns.x + ns.x %}"),
        GROW % ("'ab'", "{% set ns.x = ns.x ~ ns.x %}"),
        GROW % ("'ab'", "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}"),
        GROW % ("[1]", "{% set ns.x = ns.x + ns.x %}"),
        GROW % ("[1]", "{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x }}",
        GROW % ("[1]", "{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x | tojson }}",
        GROW % ("[1]", "{% set ns.x = {1: ns.x, 2: ns.x}%}") + "{{ ns.x.values() | string }}",
        "{% set s = 'a' * 9000000%}" + GROW % ("[]", "{% set ns.x = ns.x + [s[1:]] %}"),
        "{% set s = 'a' * 9000000%}" + GROW % ("[]", "{% set ns.x = ns.x + [s.upper()] %}"),
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%(a)0999999999d' | format(a=1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ ('\t' * 9999999).expandtabs(1000) }}",
        "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
        "{{ ('a' * 999999) | replace('a', 'b' * 999999) }}",
        "{{ ('b' * 999999).join('a' * 99999) }}",
        "{{ ('a' * 99999) | join('b' * 999999) }}",
        "{{ ('a\n' * 999999) | indent(9999) }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{{ [1] | slice(1000000000) | list }}",
        "{{ [1] | batch(1000000000, 0) | list }}",
        "{{ [[1] * 99999] * 999 | sum(start=[]) }}",
        "{{ 'x'.translate({120: 'y' * 9999}) }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ lipsum(100000) }}",
    ],
)
def test_bombs_are_refused_in_bounded_time(template, monkeypatch):
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 0.1)
    with pytest.raises(ValueError, match="chat template"):
        render(template, TALK)


def test_the_bounds_leave_space_for_long_conversations():
    """Four million characters, written piece by piece and gathered in a variable."""
    messages = [{"role": "user", "content": "word " * 400}] * 2000
    assert (
        len(render("{% for m in messages %}{{ m.role ~ ': ' + m.content }}{% endfor %}", messages))
        > 4_000_000
    )
    gather = (
        "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + m.content %}{% endfor %}"
    )
    assert len(render(gather + "{{ ns.x }}", messages[:200])) == 400_000

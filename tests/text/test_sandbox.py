"""Templates from strangers: no way to Python's internals, no endless loop, no value that fills the memory."""

import os
import resource
import signal
import threading
import time

import pytest
from talks import render

from outpace.text import template as template_module
from outpace.text.sandbox import SANDBOX, Sandbox

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
        assert text.replace("Undefined", "").strip("[], ") == ""  # an attribute that does not exist


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
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
        "{{ 'x' | center(1000000000) }}",
        "{{ lipsum(100000) }}",
    ],
)
def test_bombs_are_refused_in_bounded_time(template, limits):
    with pytest.raises(ValueError, match="the chat template"):
        render(template, TALK)


def test_memory_of_the_parent_stays_bounded(limits):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="needs more than 256 MiB of memory"):
        render("{{ ('x' * 999999999) | length }}", TALK)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB


def test_the_text_is_bounded_and_the_reason_is_given(limits, monkeypatch):
    monkeypatch.setattr(template_module, "MAX_OUTPUT", 100)
    assert len(render("{{ 'x' * 100 }}", TALK)) == 100
    with pytest.raises(ValueError, match=r"the chat template stops: its text is longer than 100 characters"):
        render("{{ 'x' * 100 }}y", TALK)
    with pytest.raises(ValueError, match=r"the chat template takes more than 0\.4 seconds"):
        render(ENDLESS, TALK)


def test_messages_carry_no_control_characters():
    for bad in ("\x1b[31m\x07", "\x9b2J", "\u202e", "\r\b"):
        with pytest.raises(ValueError) as error:
            render("{{ raise_exception(messages[0].content) }}", [{"role": "user", "content": bad}])
        assert str(error.value).isprintable() and len(str(error.value)) < 100
    with pytest.raises(ValueError) as error:
        render("{{ x | no\x1bsuch }}", TALK)
    assert str(error.value).isprintable()


def test_one_child_serves_many_renders_and_is_replaced_when_it_dies():
    render("a", TALK)
    process = SANDBOX._process
    render("b", TALK)
    assert SANDBOX._process is process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert render("c", TALK) == "c"
    assert SANDBOX._process is not process


def test_threads_and_forks_share_no_pipe():
    results = {}

    def work(i):
        results[i] = render("{{ x }}" * 1000, TALK, x=i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: str(i) * 1000 for i in range(4)}
    parent = SANDBOX._process
    if (pid := os.fork()) == 0:
        ok = render("{{ 1 }}", TALK) == "1" and SANDBOX._process is not parent
        os.killpg(SANDBOX._process.pid, signal.SIGKILL)
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert render("{{ 2 }}", TALK) == "2" and SANDBOX._process is parent


def test_ctrl_c_leaves_no_reply_behind(monkeypatch):
    box = Sandbox()
    request = {"seconds": 5, "memory": 2**29, "stand_ins": {}, "variables": {}, "characters": 99}
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        box.run(
            "render",
            source=ENDLESS,
            **request,
        )
    assert box.run("render", source="next", **request) == "next"
    box._kill()


NESTED = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
TUPLES = "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
NUMBERS = "{% set l = range(100000) | list %}"
HUGE = "{% set ns = namespace(n=10 ** 4000) %}{% for i in range(9) %}{% set ns.n = ns.n * ns.n %}{% endfor %}"
ATTACKS = {
    "percent format": "{% set s = '%(' * 200000 %}{% for i in range(999) %}{{ s % 1 }}{% endfor %}",
    "regex on the braces": "{{ ('{' * 16000000).format(1) }}",
    "select in a list": NUMBERS + "{{ l | select('in', l) | list | length }}",
    "reject in a list": NUMBERS + "{{ l | reject('in', l) | list | length }}",
    "a filtered loop": NUMBERS + "{% for x in l if x in l %}{% endfor %}",
    "in a string": "{% set s = 'a' * 9999999 %}{% for i in range(99999) if (s ~ 'b') in s %}{% endfor %}",
    "nested lists compared": NESTED + "{{ ns.x == ns.y }}",
    "nested lists ordered": NESTED + "{{ ns.x < ns.y }}",
    "nested tuples hashed": TUPLES + "{{ {ns.x: 1} }}",
    "nested tuples made unique": TUPLES + "{{ [ns.x, 1] | unique | list }}",
    "huge floor division": HUGE + "{% for i in range(999) %}{% set x = ns.n * 3 // (ns.n + 1) %}{% endfor %}",
    "huge modulo": HUGE + "{% for i in range(999) %}{% set x = ns.n ** 3 % (ns.n + 1) %}{% endfor %}",
    "huge power": "{{ 7 ** 100000000 % 3 }}",
    "compiling": "{% for a in x %}{{ a.b.c[1:2] ~ a ~ (a if a else a) }}{% endfor %}" * 15000,
    "compiling one expression": "{{ " + "a + " * 100000 + "1 }}",
    "folding constants": "{{ " + "'a' * 99999999 ~ " * 99 + "1 }}",
    "to_bytes": "{{ (1).to_bytes(4000000000, 'big') | length }}",
    "indent with a text": "{{ ('a\n' * 999999) | indent('x' * 16000) }}",
    "tojson with an indent of text": "{{ range(100000) | list | tojson(indent='x' * 99999) }}",
    "tojson with separators": "{{ range(100000) | list | tojson(separators=('x' * 99999, ':')) }}",
    "a width of four digits": "{{ ('{0:9999}' * 199999).format(1) }}",
    "a width in percent format": "{{ ('%09999d' * 199999) % ((1,) * 199999) }}",
    "a width from an argument": "{{ '{:>{}}'.format(1, 4000000000) }}",
    "zfill": "{{ '1'.zfill(4000000000) }}",
}


@pytest.mark.parametrize("source", ATTACKS.values(), ids=ATTACKS)
def test_attacks_end_within_the_limits(source, limits, monkeypatch):
    """The kinds that a limit inside the interpreter does not stop: each is one long call of C code."""
    begun = time.monotonic()
    with pytest.raises(
        ValueError, match=r"the chat template (takes|needs more|crashes|stops|is nested|is not)"
    ):
        render(source, TALK)
    assert time.monotonic() - begun < limits + 2
    monkeypatch.setattr(template_module, "SECONDS", 10.0)
    assert render("{{ messages[0].content }}", TALK) == "Hello"  # the next render has a new child


@pytest.fixture
def limits(monkeypatch):
    monkeypatch.setattr(template_module, "SECONDS", 0.4)
    monkeypatch.setattr(template_module, "MEMORY", 2**28)
    return 0.4


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

"""Jinja for templates from strangers: sandboxed, and bounded in what it makes, writes and takes of time.

The sandbox keeps a template from Python's internals; alone it lets one loop for ever or fill the memory.
Here every turn of a loop and every call looks at a clock, and whatever can make a long text out of a
short one is measured first.
"""

import re
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from functools import wraps
from typing import Any

from jinja2 import TemplateError, ext, nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MOST_TEXT = 16 * 2**20  # characters of the result, and of any one value on the way
MOST_MADE = 16 * MOST_TEXT  # of all values together
ELEMENT = 16  # characters that an element of a list counts for
MOST_BITS = 4096  # of an integer
MOST_SECONDS = 10.0
# Filters that no chat template needs and that lengthen texts in ways of their own.
LEFT_OUT = ("center", "wordwrap", "urlize", "xmlattr", "pprint")
# Filters that hand elements on; all others may turn what they get into text.
ELEMENTWISE = {
    "list", "length", "count", "first", "last", "map", "select", "reject", "selectattr", "rejectattr", "sort",
    "unique", "min", "max", "batch", "slice", "groupby", "items", "dictsort", "reverse", "random", "default",
    "d", "attr", "abs", "round", "int", "float", "sum",
}  # fmt: skip
WIDTH = re.compile(r"%(\([^)]*\))?[-+ #0-9.]*?(\*|\d{5})|\{[^{}]*(\{|\d{5})")  # five digits, or an argument


class Overrun(TemplateError):
    """A template that goes past a bound."""


class GenerationBlock(ext.Extension):
    """`{% generation %}` marks what an assistant stated, for training masks; a rendering passes it
    through."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("output"), [], [], body).set_lineno(line)

    def output(self, caller: Callable[[], str]) -> str:
        return caller()


class PlainNamespace(Namespace):
    """Jinja's `namespace()`; its attributes may not be Python's internal ones."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise TemplateError(f"namespace attribute {name!r}: names that begin with _ are not allowed")
        super().__setitem__(name, value)


class Meter(NodeTransformer):
    """A template's tree with a `tick` at the head of every body that can run more than once, and with calls
    for `~` and slices, which a sandbox does not get to see in Jinja."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_tick(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_tick(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_tick(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes).set_lineno(node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = [one or nodes.Const(None) for one in (node.arg.start, node.arg.stop, node.arg.step)]
        return _call("sliced", [node.node, *bounds]).set_lineno(node.lineno)

    def _with_tick(self, node: Any) -> nodes.Node:
        fixed = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        fixed += sum(len(c.value) for c in node.find_all(nodes.Const) if isinstance(c.value, str))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [nodes.Const(fixed)])).set_lineno(node.lineno))
        result: nodes.Node = node
        return result


class Sandbox(ImmutableSandboxedEnvironment):
    """One rendering's environment, with its bounds. What runs past one raises Overrun."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, ext.loopcontrols])
        self.finalize = self.written
        self.filters = {n: self.bounded(n, f) for n, f in self.filters.items() if n not in LEFT_OUT}
        self.globals = {**self.globals, "namespace": PlainNamespace}
        del self.globals["lipsum"]
        self.budget, self.to_write, self.deadline = MOST_MADE, MOST_TEXT, time.monotonic() + MOST_SECONDS

    def template(self, source: str) -> Any:
        """Raises TemplateSyntaxError."""
        tree = Meter().visit(self.parse(source))
        tree.set_environment(self)
        return self.template_class.from_code(
            self, self.compile(tree, filename="<template>"), {**self.globals}
        )

    def tick(self, fixed: int = 0) -> None:
        """One more turn; `fixed`: characters that it may write as they are in the template."""
        self.to_write -= fixed
        if self.to_write < 0:
            raise Overrun(f"the text grows past {MOST_TEXT:,} characters")
        if time.monotonic() > self.deadline:
            raise Overrun(f"it takes more than {MOST_SECONDS:g} seconds")

    def made(self, size: int) -> None:
        """Account for a value as long as `size` characters: before it is made, where its size is known."""
        self.budget -= size
        if size > MOST_TEXT:
            raise Overrun(f"a value as long as {size:,} characters, past the bound of {MOST_TEXT:,}")
        if self.budget < 0:
            raise Overrun(f"it makes values of more than {MOST_MADE:,} characters")

    def written(self, value: Any) -> str:
        """What an output expression writes."""
        text = self.text(value)
        self.tick(len(text))
        return text

    def text(self, value: Any) -> str:
        self.size(value)
        return str(value)

    def joined(self, *parts: Any) -> str:
        """parts[0] ~ parts[1] ~ .."""
        texts = [self.text(part) for part in parts]
        self.made(sum(map(len, texts)))
        return "".join(texts)

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        given = value[start:stop:step]
        self.made(_length(given))
        return given

    def size(self, value: Any) -> int:
        """Characters, and elements as ELEMENT each, all the way down: a list that holds one list many times
        is as large as its text. Raises Overrun."""
        waiting: list[Any] = [value]
        result = 0
        while waiting:
            one = waiting.pop()
            result += len(one) if isinstance(one, str | bytes) else ELEMENT
            if isinstance(one, Namespace):
                raise TemplateError("a namespace is no text")
            if isinstance(one, Mapping):
                waiting += [*one.keys(), *one.values()]
            elif isinstance(one, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
                waiting.extend(one)
            if result + ELEMENT * len(waiting) > MOST_TEXT:
                raise Overrun(f"a value as long as {MOST_TEXT:,} characters and more")
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if operator == "*" and isinstance(other, int):
                self.made(_length(one) * max(other, 0))
        if operator == "+":
            self.made(_length(left) + _length(right))
        if operator == "%" and isinstance(left, str | bytes):
            self._format(str(left), right)
        if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            low, high = left.bit_length(), right.bit_length()
            if (low + high if operator == "*" else low * max(right, 0)) > MOST_BITS:
                raise Overrun(f"an integer of more than {MOST_BITS:,} bits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(owner, str | bytes):
            args = self._text_method(owner, obj.__name__, args, kwargs)
        result = super().call(context, obj, *args, **kwargs)
        self.made(_length(result))
        return result

    def _text_method(self, text: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, ...]:
        """Measure what a method of a text will make; -> its arguments, iterators as lists."""
        match name:
            case "center" | "ljust" | "rjust" | "zfill" | "expandtabs":
                widths = [n for n in (*args, *kwargs.values()) if isinstance(n, int)]
                self.made(len(text) * sum(widths) if name == "expandtabs" else sum(widths))
            case "replace":
                self._replace(text, *args[:2])
            case "join":
                return (self._items(args[0], len(text)),)
            case "format" | "format_map":
                self._format(text, (args, kwargs))
            case "translate":
                raise TemplateError("translate is not allowed")
        return args

    def _replace(self, text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
        if type(text) is type(old) is type(new):  # else it fails by itself
            self.made(len(text) + text.count(old) * len(new))

    def _items(self, values: Iterable[Any], between: int) -> list[Any]:
        items, size = [], 0
        for value in values:
            self.tick()
            items.append(value)
            size += self.size(value) + between
            if size > MOST_TEXT:
                break
        self.made(size)
        return items

    def _format(self, text: Any, values: Any) -> None:
        if WIDTH.search(str(text)):
            raise Overrun("a format with a width of five digits, or one from an argument")
        self.made(len(text) + (text.count("%") + text.count("{")) * self.size(values))

    def bounded(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(filter, "jinja_pass_arg") else 0  # jinja's own argument comes before the value

        @wraps(filter)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            value, rest = args[first], args[first + 1 :]
            if name not in ELEMENTWISE and name != "join":
                self.size(value)
            numbers = [n for n in (*rest, *kwargs.values()) if isinstance(n, int)]
            match name:
                case "join":
                    between = rest[0] if rest else kwargs.get("d", "")
                    value = self._items(value, len(str(between)))
                case "replace":
                    self._replace(str(value), *map(str, rest))
                case "format":
                    self._format(str(value), (rest, kwargs))
                case "indent":
                    self.made((str(value).count("\n") + 1) * max(map(abs, numbers), default=4))
                case "tojson":
                    self.made(self.size(value) * max(map(abs, numbers), default=1))
                case "batch" | "slice":
                    self.made(ELEMENT * max(map(abs, numbers), default=0))
                case "sum" if not all(isinstance(n, int | float | str) for n in (*rest, *kwargs.values())):
                    raise TemplateError("sum: only numbers are added")
            result = filter(*args[:first], value, *rest, **kwargs)
            self.made(_length(result))
            return result

        return bounded


def _length(value: Any) -> int:
    """Of a value that took memory for its length; of others 0."""
    if isinstance(value, str | bytes):
        return len(value)
    return ELEMENT * len(value) if isinstance(value, list | tuple | dict) else 0


def _call(name: str, values: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), values, [], None, None)

"""The child process of text/sandbox.py: renders chat templates and checks tokenizers under resource limits.

Run as a file and by itself, so that it starts in a tenth of a second: it imports nothing of this package.
A message is 8 bytes of length and JSON; requests come on stdin, replies go to stdout.
"""

import contextlib
import functools
import json
import math
import resource
import sys
import time
import traceback
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])  # the parent's: -I leaves out folders of the user

from jinja2 import TemplateError, TemplateSyntaxError, ext, nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_GROWTH = 256  # characters that a tokenizer may make of one
JINJAS_OWN = {"_loop_vars", "_block_vars"}  # arguments of every call in a loop or block
PROBE = "".join(map(chr, range(1, 256))) + " A fox, 12345.67!\n\tdef f(x):\u65e5\u672c \U0001f642"


class GenerationBlock(ext.Extension):
    """`{% generation %}` marks an assistant's text for training masks; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("output"), [], [], body).set_lineno(line)

    def output(self, caller: Callable[[], str]) -> str:
        return caller()


class CompareOriginals(NodeTransformer):
    """Comparisons see message contents as they were before stand-ins."""

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        part: Any
        for part in (node, *node.ops):
            call = nodes.Call(nodes.EnvironmentAttribute("original"), [part.expr], [], None, None)
            part.expr = call.set_lineno(part.lineno)
        return node


class Environment(ImmutableSandboxedEnvironment):
    """Jinja as transformers configures it.

    `stand_ins`: stand-in -> original, characters of message contents that the parent replaced
    (text/template.py: StandIns). Output keeps the stand-ins. What inspects a text (comparisons, tests, string
    methods with arguments) works on the original; positions in both are the same.
    """

    def __init__(self, stand_ins: dict[str, str]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, ext.loopcontrols])
        self.stand_ins = stand_ins
        self.filters |= {"tojson": self._tojson, "replace": self._replace, "trim": self._trim}
        self.tests = {name: self._on_originals(test) for name, test in self.tests.items()}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = CompareOriginals().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def original(self, value: Any) -> Any:
        """A string, the strings of a list, or the keys of a dict, without stand-ins."""
        if isinstance(value, str):
            for stand_in, character in self.stand_ins.items():
                value = value.replace(stand_in, character)
        elif self.stand_ins and type(value) in (list, tuple):
            return type(value)(self.original(v) if isinstance(v, str) else v for v in value)
        elif self.stand_ins and isinstance(value, dict):
            return {self.original(key): v for key, v in value.items()}
        return value

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str) and self.stand_ins and args and not kwargs.keys() - JINJAS_OWN:
            return self._string_method(owner, obj, args)
        return super().call(context, obj, *args, **kwargs)

    def _string_method(self, text: str, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """A method of str that searches in `text`, applied to the original and carried over by position."""
        name, plain, given = method.__name__, self.original(text), [self.original(arg) for arg in args]
        match name:
            case "startswith" | "endswith" | "find" | "rfind" | "index" | "rindex" | "count":
                return getattr(plain, name)(*given)
            case "strip" | "lstrip" | "rstrip" | "removeprefix" | "removesuffix":
                rest: str = getattr(plain, name)(*given)
                left = {"strip": "lstrip", "lstrip": "lstrip", "removeprefix": "removeprefix"}.get(name)
                start = len(plain) - len(getattr(plain, left)(*given)) if left else 0
                return text[start : start + len(rest)]
            case "split" | "rsplit" if isinstance(given[0], str):
                return _cut(text, getattr(plain, name)(*given), len(given[0]))
            case "partition" | "rpartition":
                return tuple(_cut(text, getattr(plain, name)(*given), 0))
            case "replace" if given[0]:
                return args[1].join(_cut(text, plain.split(given[0], *given[2:]), len(given[0])))
        return method(*args)

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> Any:
        text = str(value)
        args = (str(old), str(new), -1 if count is None else count)
        return self._string_method(text, text.replace, args)

    def _trim(self, value: Any, chars: str | None = None) -> Any:
        text = str(value)
        return text.strip() if chars is None else self._string_method(text, text.strip, (chars,))

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON without HTML's escapes, which Jinja's own filter writes."""
        text = json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        for stand_in in self.stand_ins if ensure_ascii else ():
            text = text.replace(json.dumps(stand_in)[1:-1], stand_in)
        return text

    def _on_originals(self, test: Any) -> Callable[..., Any]:
        @functools.wraps(test)
        def test_originals(*args: Any, **kwargs: Any) -> Any:
            return test(*map(self.original, args), **{key: self.original(v) for key, v in kwargs.items()})

        return test_originals


def _cut(text: str, parts: Any, gap: int) -> list[str]:
    """`text` cut as `parts` of its original are, `gap` characters between them left out."""
    pieces, start = [], 0
    for part in parts:
        pieces.append(text[start : start + len(part)])
        start += len(part) + gap
    return pieces


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


@functools.lru_cache(maxsize=4)
def _compiled(source: str, stand_ins: tuple[tuple[str, str], ...]) -> Any:
    return Environment(dict(stand_ins)).from_string(source)


def render(request: dict[str, Any]) -> str:
    """Raises ValueError with what is wrong, as the end of a sentence that begins with "the template"."""
    pieces, headroom = [], request["characters"]
    try:
        for piece in _compiled(request["source"], tuple(request["stand_ins"].items())).generate(
            request["variables"]
        ):
            pieces.append(piece)
            headroom -= len(piece)
            if headroom < 0:
                raise TemplateError(f"its text is longer than {request['characters']:,} characters")
    except MemoryError:
        raise
    except TemplateSyntaxError as error:
        raise ValueError(f"is not valid in line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except Exception as error:  # a template's mistakes raise whatever Python does
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
        place = f" in line {lines[-1]}" if lines else ""
        raise ValueError(f"stops{place}: {error or type(error).__name__}") from error
    return "".join(pieces)


def check_tokenizer(request: dict[str, Any]) -> None:
    """Load a tokenizer.json, encode and decode. Raises ValueError; a panic may end the process."""
    from tokenizers import Tokenizer

    data = json.loads(request["text"])
    for part in ("normalizer", "decoder"):
        if (growth := _growth(data.get(part))) > MAX_GROWTH:
            raise ValueError(
                f"its {part} makes up to {growth:,} characters of one; the limit is {MAX_GROWTH}"
            )
    tokenizer = Tokenizer.from_str(request["text"])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.decode(tokenizer.encode(PROBE).ids, skip_special_tokens=False)


def _growth(step: Any) -> int:
    """A bound on the characters that a normalizer or decoder makes of one character."""
    if not isinstance(step, dict):
        return 1
    match step.get("type"):
        case "Sequence":
            parts = step.get("normalizers") or step.get("decoders") or []
            return math.prod(map(_growth, parts)) if isinstance(parts, list) else 1
        case "Replace":
            return max(1, len(str(step.get("content")))) + ("Regex" in str(step.get("pattern")))
        case "Prepend":
            return max(1, len(str(step.get("prepend"))))
    return 1


def main() -> None:
    _limit(resource.RLIMIT_CORE, 0)
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    while header := requests.read(8):
        request = json.loads(requests.read(int.from_bytes(header, "big")))
        _limit(resource.RLIMIT_AS, request["memory"])
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + request["seconds"]) + 1)
        reply = json.dumps(_reply(request)).encode()
        replies.write(len(reply).to_bytes(8, "big") + reply)
        replies.flush()


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": {"render": render, "check_tokenizer": check_tokenizer}[request["kind"]](request)}
    except MemoryError:
        return {"out_of_memory": True}
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the tokenizers library is not an Exception
        return {"error": str(error)[:1000]}


def _limit(kind: int, soft: int) -> None:
    """Set a soft limit; macOS refuses RLIMIT_AS, and only the time limit holds there."""
    hard = resource.getrlimit(kind)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


if __name__ == "__main__":
    main()

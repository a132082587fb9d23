"""Tools in a Harmony prompt: a namespace of TypeScript-like types, made from JSON schemas."""

import json
import re
from typing import Any

from outpace.text.messages import Namespace, Tool

Schema = dict[str, Any]
NUMBERS = {"integer": "number"}  # by JSON schema's name, where TypeScript has another


def tools_section(namespaces: list[Namespace]) -> str:
    """`# Tools` and all namespaces, as it is in a system or developer message (openai/harmony,
    docs/format.md). Byte for byte what openai_harmony 0.0.8 writes, its line breaks in comments included."""
    return "\n\n".join(["# Tools", *map(_namespace, namespaces)])


def _namespace(space: Namespace) -> str:
    comment = "// " if space.tools else ""  # without functions the description is plain text
    lines = [f"## {space.name}\n", *(comment + line for line in _lines(space.description or ""))]
    if space.tools:
        functions = [line for tool in space.tools for line in _function(tool)]
        lines += [f"namespace {space.name} {{\n", *functions, f"}} // namespace {space.name}"]
    return "\n".join(lines)


def _function(tool: Tool) -> list[str]:
    arguments = "" if tool.parameters is None else f"_: {_type(tool.parameters, '')}"
    return [
        *(f"// {line}" for line in _lines(tool.description)),
        f"type {tool.name} = ({arguments}) => any;\n",
    ]


def _type(schema: Any, indent: str) -> str:
    """What a schema states, as a type; `any` where the format has no word for it (anyOf, $ref, ..)."""
    if not isinstance(schema, dict):
        return "any"
    if isinstance(variants := schema.get("oneOf"), list):
        return "".join(
            f"\n{indent} | {_variant(v, indent)}{_remarks([_described(v), _default(v, quoted=True)])}"
            for v in variants
        )
    kind = schema.get("type")
    if isinstance(kind, list) and (names := [k for k in kind if isinstance(k, str)]):
        return " | ".join(NUMBERS.get(name, name) for name in names)
    match kind:
        case "object":
            return _object(schema, indent)
        case "string":
            values = schema.get("enum")
            words = [f'"{v}"' for v in values if isinstance(v, str)] if isinstance(values, list) else []
            return " | ".join(words) or "string"
        case "array":
            return f"{_type(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
        case "number" | "integer" | "boolean":
            return NUMBERS.get(str(kind), str(kind))
    return "any"


def _object(schema: Schema, indent: str) -> str:
    value = _described(schema)
    comment = f"{indent}// {value}\n" if value is not None else ""
    properties, required = schema.get("properties"), schema.get("required")
    lines = []
    if isinstance(properties, dict):
        must = required if isinstance(required, list) else []
        lines = [_property(k, v, "" if k in must else "?", indent) for k, v in properties.items()]
    return f"{comment}{{\n{''.join(lines)}{indent}}}"


def _property(name: str, schema: Any, optional: str, indent: str) -> str:
    schema = schema if isinstance(schema, dict) else {}
    comments = []
    if isinstance(title := schema.get("title"), str):
        comments += [title, ""]
    if "oneOf" not in schema and (value := _described(schema)) is not None:
        comments.append(value)
    if isinstance(examples := schema.get("examples"), list) and examples:
        comments += ["Examples:", *(f'- "{e}"' for e in examples if isinstance(e, str))]
    above = "".join(f"{indent}// {c}\n" if c else f"{indent}//\n" for c in comments)
    if isinstance(schema.get("oneOf"), list):
        return above + _property_of_variants(name, schema, optional, indent)
    remark = "" if "oneOf" in schema else _remarks([_default(schema)])
    kind = _nullable(schema, _type(schema, indent + "    "))
    return f"{above}{indent}{name}{optional}: {kind},{remark}\n"


def _property_of_variants(name: str, schema: Schema, optional: str, indent: str) -> str:
    """A line for every variant; a remark that is above all of them is not repeated."""
    variants, value = schema["oneOf"], _described(schema)
    above = value is not None and (not variants or _described(variants[0]) != value)
    comments = [value if above else None, _default(schema)]
    lines = [f"{indent}// {c}\n" for c in comments if c is not None]
    lines.append(f"{indent}{name}{optional}:\n")
    for i, variant in enumerate(variants):
        own = _described(variant)
        shown = None if own == value or (i == 0 and above) else own
        lines.append(f"{indent} | {_variant(variant, indent)}{_remarks([shown, _default(variant)])}\n")
    return "".join([*lines, f"{indent},\n"])


def _variant(schema: Any, indent: str) -> str:
    return _nullable(schema, _type(schema, indent + "   "))


def _nullable(schema: Any, kind: str) -> str:
    null = isinstance(schema, dict) and schema.get("nullable") is True and "null" not in kind
    return f"{kind} | null" if null else kind


def _described(schema: Any) -> str | None:
    value = schema.get("description") if isinstance(schema, dict) else None
    return value if isinstance(value, str) else None


def _default(schema: Any, quoted: bool = False) -> str | None:
    """`default: 20`. A word of an enum is bare, except where `quoted`."""
    if not isinstance(schema, dict) or "default" not in schema:
        return None
    value, words = schema["default"], schema.get("enum")
    if not isinstance(value, str):
        return f"default: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"
    if isinstance(words, list) and words:
        return f"default: {json.dumps(value, ensure_ascii=False) if quoted else value}"
    return f'default: "{value}"'


def _remarks(items: list[str | None]) -> str:
    given = [item for item in items if item is not None]
    return f" // {' '.join(given)}" if given else ""


def _lines(text: str) -> list[str]:
    """Lines as they end with \\n or \\r\\n; str.splitlines knows ten further ends."""
    lines = re.split(r"\r?\n", text)
    return lines if lines[-1] else lines[:-1]

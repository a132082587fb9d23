"""The command rows: conversations as training rows for gpt-oss."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from outpace.cli.app import Target, app, console, say

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from outpace.text.sft_rows import TrainingRow


@app.command()
def rows(
    target: Target,
    file: Annotated[
        Path, typer.Argument(help='JSONL file: {"messages": [..], "tools": [..]} on every line.')
    ],
    reasoning: Annotated[
        str, typer.Option(help="Reasoning effort of conversations that do not set it.")
    ] = "medium",
    date: Annotated[str | None, typer.Option(help="Date given to the model in those. Default: none.")] = None,
    show: Annotated[int | None, typer.Option(help="Number of rows to print.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per row: ids and mask.")] = False,
) -> None:
    """Turn conversations into training rows for gpt-oss, and show which tokens are supervised.

    [bold]Examples[/bold]: outpace rows default chats.jsonl --show 3
    outpace rows gpt-oss-20b chats.jsonl --json > rows.jsonl
    """
    from outpace.checkpoint.open import open_checkpoint
    from outpace.checkpoint.shipped import target_path
    from outpace.checkpoint.tokenizer import open_tokenizer
    from outpace.text.harmony import HarmonyTokens
    from outpace.text.messages import System
    from outpace.text.sft_rows import read_rows

    tokens = HarmonyTokens(open_tokenizer(open_checkpoint(target_path(target))))
    wanted = show if show is not None else (sys.maxsize if as_json else 1)
    count, total, supervised, longest = 0, 0, 0, 0
    lines = set()
    for row in read_rows(file, tokens, system=System(reasoning=reasoning, current_date=date)):
        if count < wanted and as_json:
            print(json.dumps(row.as_json()))
        elif count < wanted:
            console.rule(f"line {row.line}, turn {row.turn}", style="dim")
            say(_marked(row, tokens.tokenizer), soft_wrap=True)
        count, total, supervised = count + 1, total + len(row.ids), supervised + sum(row.mask)
        longest = max(longest, len(row.ids))
        lines.add(row.line)
    if as_json:
        return
    share = f", {supervised / total:.1%} of them supervised; the longest row has {longest:,}" if total else ""
    text = f"{len(lines):,} conversations, {count:,} rows, {total:,} tokens{share}"
    say(text)


def _marked(row: "TrainingRow", tokenizer: "Tokenizer") -> Text:
    """The prompt dimmed, supervised tokens in green, or in brackets without colours."""
    marked = Text()
    for supervised, ids in row.spans():
        text = tokenizer.decode(ids, skip_special_tokens=False)
        bracketed = f"\u27e6{text}\u27e7" if supervised and not console.color_system else text
        marked.append(bracketed, style="green" if supervised else "dim")
    return marked

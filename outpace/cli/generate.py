"""The command generate: one text continued, or one message answered."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outpace.cli.app import (
    ActivationDtype,
    AsJson,
    Deterministic,
    DeviceName,
    KVCacheDtype,
    Target,
    TensorParallel,
    app,
    console,
    read_text,
    say,
)
from outpace.cli.options import GenerationOptions, MaxTokens, with_options

if TYPE_CHECKING:
    from outpace.api import GenerationOutput, Model


@app.command()
@with_options
def generate(
    target: Target,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the prompt.")] = None,
    *,
    options: GenerationOptions,
    mla: Annotated[
        bool | None,
        typer.Option(
            "--mla/--no-mla", help="Latent KV of a retrofitted target. Default: as its config specifies."
        ),
    ] = None,
    dsa: Annotated[
        bool | None,
        typer.Option(
            "--dsa/--no-dsa",
            help="Sparse attention of a retrofitted target. Default: as its config specifies.",
        ),
    ] = None,
    max_tokens: MaxTokens = 256,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Chat format: the prompt is a message, the output the answer without reasoning."
        ),
    ] = False,
    json_schema: Annotated[
        Path | None,
        typer.Option(help="File with a JSON schema that the output, or a chat's answer, follows."),
    ] = None,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens per forward.")] = 512,
    ignore_eos: Annotated[bool, typer.Option(help="Generation beyond the end tokens.")] = False,
    stats: Annotated[
        bool, typer.Option(help="Statistics after the text: tau, tokens/s, time by part.")
    ] = False,
    timing: Annotated[
        bool,
        typer.Option("--timing", help="Times of a first and of a warm run (generates twice)."),
    ] = False,
    layers: Annotated[
        int | None, typer.Option(help="Number of layers to run, for debugging. Default: all.")
    ] = None,
    top_logits: Annotated[
        int | None, typer.Option(help="Number of largest logits to show per token, for debugging.")
    ] = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    activation_dtype: ActivationDtype = "auto",
    device: DeviceName = "cpu",
    deterministic: Deterministic = False,
    tensor_parallel_size: TensorParallel = 1,
    as_json: AsJson = False,
) -> None:
    """Generate text and stream it; with --chat, answer a message.

    [bold]Examples[/bold]: outpace generate default "def fibonacci(n):" --stats
    outpace generate default --prompt-file main.py --temperature 0.8 --seed 7 --draft ngram
    outpace generate default "def fibonacci(n):" --num-draft-tokens 16 --stats
    outpace generate default "import os" --temperature 1 --min-p 0.05 --acceptance gumbel --seed 7
    outpace generate default --prompt-file book.txt --kv-budget 4096 --draft ngram --stats
    outpace generate gpt-oss-20b "What is 2 + 2?" --chat
    outpace generate gpt-oss-20b "A person, as JSON." --chat --json-schema person.json
    outpace generate gpt-oss-20b "What is 2 + 2?" --chat --device cuda
    outpace generate default "import os" -n 4 --layers 2 --top-logits 3 --timing
    torchrun --nproc-per-node 2 -m outpace generate gpt-oss-20b "import os" --tensor-parallel-size 2
    """
    from outpace.api import check_text, load, stream
    from outpace.loading import open_chat
    from outpace.ops.ranks import join

    if (prompt is None) == (prompt_file is None):
        raise ValueError(
            "give a prompt after the model, or --prompt-file, and not both: outpace generate MODEL PROMPT"
        )
    text = prompt if prompt_file is None else read_text(prompt_file)
    if not text:
        raise ValueError("the prompt is empty: there is nothing to continue")
    sampling = options.sampling(
        max_tokens,
        prefill_chunk=prefill_chunk,
        ignore_eos=ignore_eos,
        top_logits=top_logits,
        json_schema=None if json_schema is None else _schema(json_schema),
    )
    began = time.perf_counter()
    join(tensor_parallel_size)  # each of several processes would write the whole text
    model = load(
        target,
        layers=layers,
        kv_cache_dtype=kv_cache_dtype,
        activation_dtype=activation_dtype,
        device=device,
        deterministic=deterministic,
        tensor_parallel_size=tensor_parallel_size,
    )
    if mla is not None:
        model.target.use_mla_kv(mla)
    if dsa is not None:
        model.target.use_dsa(dsa)
    check_text(model, text)
    load_seconds = time.perf_counter() - began
    draft, how, note = options.speculation(model, sampling)
    session, ids = None, None
    if chat:
        session = open_chat(target, model.tokenizer, model.eos)
        session.add_user(text)
        ids = session.prompt()

    def run(*, show: bool, first: bool = True) -> "GenerationOutput":
        pieces = stream(
            model,
            ids or text,
            draft=draft or False,
            sampling=sampling,
            chat=session if first else None,
            **how,
        )
        for piece in pieces:
            if show:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        return pieces.finish()

    output, warm = run(show=not as_json), None
    values = output.as_json() | {"method": note}
    missing = answer_note(output) if chat else None
    if chat:
        values |= {"parts": [part.as_json() for part in output.parts], "note": missing}
    if not as_json:
        sys.stdout.write("\n")
    if timing:
        warm = run(show=False, first=False)
        values["timing"] = {"load": round(load_seconds, 6), "first": output.timing(), "warm": warm.timing()}
        values["timing"]["steps"] = _how_steps_run(model, partial="partial" in how)
    if as_json:
        print(json.dumps(values))
        return
    if missing:
        Console(stderr=True).print(missing, style="dim", highlight=False, soft_wrap=True)
    if output.top_logits:
        say(_logits_lines(output), markup=False, soft_wrap=True)
    if warm is not None:
        console.print(_timing_table(load_seconds, output, warm))
        say(f"steps: {values['timing']['steps']}")
    if stats:
        say(f"{output.summary()}; {note}", style="dim")


def _schema(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"--json-schema {path} is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"--json-schema {path} holds a {type(schema).__name__}: a schema is an object")
    return schema


def answer_note(output: "GenerationOutput") -> str | None:
    """What the user should know of an answer in a chat, besides its text."""
    from outpace.text.chat_format import CALL

    if output.finish_reason == "abort":
        return "stopped"
    complete = output.finish_reason == "stop"
    calls = [part.to for part in output.parts if part.kind == CALL and part.finished]
    if calls and complete:
        return f"{calls[-1]} is called: /tool TEXT gives it the result"
    cut = f"cut off after {len(output.tokens)} tokens: allow more with --max-tokens"
    if output.text:
        return None if complete else cut
    kinds = ", ".join(dict.fromkeys(part.kind for part in output.parts)) or "nothing"
    return f"no answer ({kinds}), " + ("which is not the model's format" if complete else cut)


def _logits_lines(output: "GenerationOutput") -> str:
    """One line per token: the token, then the largest logits and their tokens."""
    lines = []
    for i, (token, candidates) in enumerate(zip(output.tokens, output.top_logits, strict=True)):
        chosen = next((repr(c.text) for c in candidates if c.token == token), f"<{token}>")
        others = "  ".join(f"{c.logit:.3f} {c.text!r}" for c in candidates)
        lines.append(f"{i:4d} {chosen:16s} {others}")
    return "\n".join(lines)


def _how_steps_run(model: "Model", partial: bool) -> str:
    import torch

    from outpace.models.native_step import module_attention, why_modules

    if model.graphs is not None:
        return f"{model.graphs.captured} CUDA graphs"
    target = model.target
    with torch.inference_mode():
        cache = target.make_cache(1, 1)
        why = why_modules(target, cache)
    if why is not None:
        return f"module by module ({why})"
    apart = module_attention(cache)
    if partial:
        apart = "; ".join(filter(None, (apart, "partial KV while its queries are recorded")))
    if target.group is not None:
        return f"native calls between the sums over {target.group.size} processes" + f"; {apart}" * bool(
            apart
        )
    return (
        f"native calls, attention by its modules where there is {apart}" if apart else "one native call each"
    )


def _timing_table(load_seconds: float, first: "GenerationOutput", warm: "GenerationOutput") -> Table:
    """The first run, which reads weights from disk and warms up everything, next to the second."""
    table = Table("", title=f"loaded in {load_seconds:.2f} s", title_justify="left")
    for column in ("first run", "warm run"):
        table.add_column(column, justify="right")
    names = {
        "prefill": f"prefill of {first.prompt_tokens} tokens",
        "first_token": "time to first token",
        "round_mean": "step, mean",
        "round_p50": "step, p50",
        "round_p95": "step, p95",
    }
    times = first.timing(), warm.timing()
    for key, name in names.items():
        table.add_row(name, *(f"{run[key] * 1e3:.2f} ms" for run in times))
    table.add_row("tokens/s", *(f"{run['tokens_per_s']:.1f}" for run in times))
    return table

"""The command serve: an OpenAI-compatible server."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.app import (
    ActivationDtype,
    Deterministic,
    DeviceName,
    KVCacheDtype,
    Target,
    app,
    out_of_memory,
    say,
)

if TYPE_CHECKING:
    from outpace.api import Model
    from outpace.serve.engine import EngineConfig
    from outpace.serve.server import Served


@app.command()
def serve(
    target: Target,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on (0 = a free one).")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in the API. Default: as it is given here.")
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help='JSON: {"method": NAME, "model": DRAFT}; the method is what '
            "requests name it by. Default: the best draft known for the target; 'none' for none."
        ),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 8,
    max_model_len: Annotated[
        int, typer.Option(min=2, help="Tokens of prompt and output together, at most.")
    ] = 4096,
    kv_memory: Annotated[
        float | None, typer.Option(min=0, help="GB that the KV cache may take. Default: what is free.")
    ] = None,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests that wait; further ones get 429.")] = 256,
    max_seconds: Annotated[
        float | None,
        typer.Option(min=1, help="Of a request, waiting included; then it gets 408. Default: any."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OUTPACE_API_KEY", help="Key that clients must send.")
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(help="Origin of pages that may ask, repeatable: --cors '*'.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=128, help="Number of CPU threads. Default: torch's.")
    ] = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    activation_dtype: ActivationDtype = "auto",
    device: DeviceName = "cpu",
    deterministic: Deterministic = False,
) -> None:
    """Serve a model: /v1/chat/completions, /v1/completions, /v1/models, /metrics.

    Every request is decoded with exact speculation; its tokens do not depend on what else is running.

    [bold]Examples[/bold]: outpace serve default
    outpace serve gpt-oss-20b --speculative-config '{"method": "dflash", "model": "work/dflash/draft"}'
    outpace serve model.gguf --port 9000 --max-num-seqs 16 --api-key secret
    """
    try:
        import uvicorn

        from outpace.serve.app import AppConfig, make_app
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'outpace[serve]'") from None
    from outpace.api import load
    from outpace.serve.engine import EngineConfig
    from outpace.serve.server import Server

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    model = load(
        target,
        kv_cache_dtype=kv_cache_dtype,
        activation_dtype=activation_dtype,
        device=device,
        deterministic=deterministic,
        sequences=max_num_seqs,
        length=max_model_len,
    )
    served = _served(model, served_model_name, speculative_config, max_num_seqs)
    positions = served.model.target.config.max_position_embeddings
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=min(max_model_len, positions),
        max_waiting=max_waiting,
        max_seconds=max_seconds,
    )
    try:
        server = Server(served, config)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise ValueError(
            f"KV of {max_num_seqs:,} sequences of {config.max_model_len:,} tokens do not fit in memory: use "
            "a smaller --max-num-seqs or --max-model-len"
        ) from None
    if model.graphs is None or kv_memory is not None:  # a GPU's was known before the model was loaded
        _check_memory(server.engine.nbytes, server.engine.step_nbytes, config, kv_memory)
    server.engine.warm_up(None if served.default is None else served.drafts[served.default])
    door = AppConfig(api_key=api_key, cors=tuple(cors or ()))
    methods = ", ".join(served.drafts) or "none"
    say(f"{served.name}: drafts {methods}; default {served.default or 'none'}", markup=False)
    settings = uvicorn.Config(make_app(server, door), host, port, log_level="warning", access_log=False)
    listening = settings.bind_socket()
    listening.listen()  # who reads the line below may connect at once
    say(f"http://{host}:{listening.getsockname()[1]}/v1 (Ctrl-C stops)", markup=False)
    uvicorn.Server(settings).run(sockets=[listening])


def _check_memory(kv: int, steps: int, config: "EngineConfig", limit: float | None) -> None:
    """Raises ValueError, with what would fit, for bytes that could run out while it serves. `limit`: of the
    KV alone, in GB."""
    from outpace.ops.dispatch import available_memory

    needed, what, allowed = kv + steps, "KV and steps", available_memory()
    if limit is not None:
        needed, what, allowed = kv, "KV", int(limit * 1e9)
    if needed > allowed:
        fit = allowed * config.max_num_seqs // needed
        advice = f"use --max-num-seqs {fit}" if fit else "use a smaller --max-model-len"
        raise ValueError(
            f"{what} of {config.max_num_seqs} sequences of {config.max_model_len:,} tokens take "
            f"{needed / 1e9:.2f} GB, and {allowed / 1e9:.2f} GB are allowed: {advice}"
        )


def _served(model: "Model", name: str | None, speculative: str | None, max_num_seqs: int) -> "Served":
    from outpace.config import cache_folder
    from outpace.decode.auto import auto_controller
    from outpace.decode.request import GREEDY
    from outpace.serve.server import Served

    drafts, default = _drafts(model, speculative) if model.declined is None else ({}, None)
    controller = None
    if default is not None:
        controller, note = auto_controller(
            model.executor, model.tokenizer, drafts[default], GREEDY, cache_folder(), max_num_seqs
        )
        say(note, style="dim", markup=False)
    return Served(model=model, name=name or model.name, drafts=drafts, default=default, controller=controller)


def _drafts(model: "Model", speculative: str | None) -> tuple[dict[str, Any], str | None]:
    """By method, and the default one; prompt lookup is always there."""
    from outpace.api import load_draft
    from outpace.checkpoint.shipped import own_draft
    from outpace.drafts.lookup import NGram

    drafts: dict[str, Any] = {"ngram": NGram()}
    if speculative == "none":
        return drafts, None
    asked = {"method": own_draft(model.name)} if speculative is None else _speculative(speculative)
    method = asked["method"]
    if method == "none":
        return drafts, None
    draft = load_draft(asked.get("model", method), model)
    if draft is None:
        raise ValueError(f"--speculative-config: {asked.get('model', method)!r} is no draft")
    drafts[method] = draft
    return drafts, method


def _speculative(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--speculative-config is no JSON ({error}), nor 'none'") from None
    if not isinstance(value, dict) or not isinstance(value.get("method"), str):
        raise ValueError('--speculative-config: an object with a method, such as {"method": "ngram"}')
    unknown = sorted(value.keys() - {"method", "model"})
    if unknown:
        raise ValueError(f"--speculative-config: unknown key {unknown[0]!r}; known are method, model")
    return value

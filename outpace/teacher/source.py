"""Where a teacher cache's answers and states come from: our own engine, or transformers."""

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outpace.decode.generate import generate
from outpace.decode.request import Request
from outpace.models.decoder import Decoder
from outpace.ops.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Prompts that are answered together, each in up to so many tokens or up to a stop token. `seed`: of the
    draws above temperature 0."""

    prompts: list[list[int]]
    limits: list[int]
    temperature: float
    stop: frozenset[int]
    seed: int


class Source(Protocol):
    """A target that answers and shows its states."""

    @property
    def dtype(self) -> torch.dtype: ...

    def respond(self, asked: Questions) -> list[list[int]]:
        """The answers, each with the stop token that ended it."""
        ...

    def states(self, tokens: Tensor, layer_ids: Sequence[int], offset: int) -> tuple[Tensor, Tensor]:
        """tokens [B, T] from position `offset` on -> outputs of the layers [n, B, T, C], and the states
        after the final norm [B, T, C]."""
        ...


@dataclass(frozen=True)
class OwnEngine:
    target: Decoder

    @property
    def dtype(self) -> torch.dtype:
        return self.target.dtype

    def respond(self, asked: Questions) -> list[list[int]]:
        request = Request(
            max_new_tokens=max(asked.limits),
            limits=tuple(asked.limits),
            sampling=Sampling(temperature=asked.temperature),
            stop=asked.stop,
        )
        rng = torch.Generator(self.target.device).manual_seed(asked.seed)
        return generate(self.target, asked.prompts, request, rng=rng).tokens

    @torch.inference_mode()
    def states(self, tokens: Tensor, layer_ids: Sequence[int], offset: int) -> tuple[Tensor, Tensor]:
        # with a cache, states are those that decoding has
        cache = self.target.make_cache(len(tokens), tokens.shape[1], offset=offset)
        out = self.target(tokens.to(self.target.device), cache, aux=tuple(layer_ids))
        assert out.aux is not None
        return out.aux, out.hidden


class Transformers:
    """A checkpoint folder opened by transformers, spread over devices by its `device_map`."""

    def __init__(self, folder: Path, device_map: str = "auto") -> None:
        """Raises ValueError where transformers is missing, or cannot open the folder."""
        for name in ("transformers", "accelerate"):
            if importlib.util.find_spec(name) is None:
                raise ValueError(f"--source transformers needs {name}: pip install 'outpace[baselines]'")
        if not (folder / "config.json").is_file():
            raise ValueError(f"--source transformers: {folder} holds no config.json; name an HF folder")
        theirs: Any = importlib.import_module("transformers")
        theirs.logging.disable_progress_bar()
        try:
            model = theirs.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map=device_map)
        except (RuntimeError, KeyError, ValueError) as error:
            raise ValueError(f"--source transformers, device map {device_map!r}: {error}") from error
        self.model = model.eval()

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @torch.inference_mode()
    def respond(self, asked: Questions) -> list[list[int]]:
        width = max(map(len, asked.prompts))
        tokens = torch.tensor([[0] * (width - len(ids)) + ids for ids in asked.prompts])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in asked.prompts])
        drawn = {"do_sample": True, "temperature": asked.temperature, "top_k": 0, "top_p": 1.0}
        with torch.random.fork_rng():  # transformers draws from torch's global state alone
            torch.manual_seed(asked.seed)
            output = self.model.generate(
                input_ids=tokens.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                max_new_tokens=max(asked.limits),
                eos_token_id=sorted(asked.stop),
                pad_token_id=0,
                **(drawn if asked.temperature else {"do_sample": False}),
            )
        answers = output[:, width:].tolist()
        return [_until(ids[:n], asked.stop) for ids, n in zip(answers, asked.limits, strict=True)]

    @torch.inference_mode()
    def states(self, tokens: Tensor, layer_ids: Sequence[int], offset: int) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []
        base = self.model.base_model

        def keep(module: Any, inputs: Any, output: Any) -> None:
            seen.append((output[0] if isinstance(output, tuple) else output).cpu())

        hooks = [base.layers[i].register_forward_hook(keep) for i in sorted(layer_ids)]
        try:
            positions = torch.arange(offset, offset + tokens.shape[1], device=self.model.device)[None]
            given = {"input_ids": tokens.to(self.model.device), "position_ids": positions}
            hidden: Tensor = base(**given, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack([seen[sorted(layer_ids).index(i)] for i in layer_ids]), hidden.cpu()


def _until(ids: list[int], stop: frozenset[int]) -> list[int]:
    """Up to the first stop token, which stays."""
    ends = [n for n, token in enumerate(ids) if token in stop]
    return ids[: ends[0] + 1] if ends else ids

"""llama.cpp on the same weights: what a user would decode with otherwise. Needs llama-cpp-python."""

import importlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from outpace.bench.run import Prompts, Timed
from outpace.decode.trace import Trace
from outpace.formats.convert import vocabulary_of, write_gguf
from outpace.models.decoder import Decoder

NAME = "llama.cpp"
HOW_TO_GET = "make oracle, or pip install llama-cpp-python"
PROMPT = 512  # tokens of a prompt that it takes at once
FLASH_AUTO, FLASH_OFF, F32, F16 = -1, 0, 0, 1
SETTINGS = {  # flash attention, type of keys and values
    "defaults": (FLASH_AUTO, F16),
    "no flash attention": (FLASH_OFF, F16),
    "no flash attention, float32 KV": (FLASH_OFF, F32),
}
ROOM = 1024  # a context has room for a multiple of so many tokens
TRIAL = 24  # tokens by which a setting is chosen
# optional: who calls asks `installed`
llama: Any = importlib.import_module("llama_cpp") if importlib.util.find_spec("llama_cpp") else None


def installed() -> bool:
    return llama is not None


def builds() -> dict[str, str]:
    """What both engines were compiled for: our kernels' extra flags, llama.cpp's instruction sets."""
    return {
        "OUTPACE_CFLAGS": os.environ.get("OUTPACE_CFLAGS", ""),
        NAME: llama.llama_print_system_info().decode(),
    }


@cache
def _silent() -> Any:
    """C calls it: it must stay."""
    return llama.llama_log_callback(lambda level, text, user: None)


def load_model(path: Path) -> Any:
    """A GGUF file, without llama.cpp's log."""
    llama.llama_log_set(_silent(), None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    if not model:
        raise ValueError(f"llama.cpp cannot read {path}")
    return model


class LlamaCpp:
    """Decoding through its C functions: `batch` sequences of up to `length` tokens."""

    def __init__(self, model: Any, batch: int, length: int, flash: int, kv_type: int) -> None:
        how = llama.llama_context_default_params()
        how.n_ctx, how.n_batch, how.n_ubatch, how.n_seq_max = batch * length, PROMPT, PROMPT, batch
        how.swa_full = False  # windows read no more than they need, as in llama-cli
        how.kv_unified, how.flash_attn_type, how.type_k, how.type_v = True, flash, kv_type, kv_type
        self.context = llama.llama_init_from_model(model, how)
        self.batch = llama.llama_batch_init(max(PROMPT, batch), 0, 1)
        self.vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def close(self) -> None:
        llama.llama_batch_free(self.batch)
        llama.llama_free(self.context)

    def use_threads(self, n: int) -> None:
        llama.llama_set_n_threads(self.context, n, n)

    def decode(self, tokens: Sequence[int], place: int, row: int = 0, logits: bool = True) -> None:
        """`tokens` of one sequence, from position `place` on; `logits` of all of them, or of the last."""
        for i, token in enumerate(tokens):
            self._put(i, token, place + i, row, logits or i == len(tokens) - 1)
        self._run(len(tokens))

    def decode_rows(self, tokens: Sequence[int], place: int) -> None:
        """One token of each sequence, all at position `place`."""
        for row, token in enumerate(tokens):
            self._put(row, token, place, row, True)
        self._run(len(tokens))

    def _put(self, i: int, token: int, place: int, row: int, logits: bool) -> None:
        b = self.batch
        b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0], b.logits[i] = token, place, 1, row, logits

    def _run(self, count: int) -> None:
        self.batch.n_tokens = count
        if llama.llama_decode(self.context, self.batch):
            raise RuntimeError("llama.cpp could not decode: its cache is too small")

    def choice(self, i: int) -> int:
        """The most probable token after the i-th of the last call."""
        values = llama.llama_get_logits_ith(self.context, i)
        return int(np.ctypeslib.as_array(values, (self.vocab,)).argmax())

    def forget(self, place: int, row: int = 0) -> None:
        """Everything of a sequence from position `place` on."""
        llama.llama_memory_seq_rm(llama.llama_get_memory(self.context), row, place, -1)

    def share(self, row: int) -> None:
        """The sequence `row` becomes what the first one is."""
        llama.llama_memory_seq_cp(llama.llama_get_memory(self.context), 0, row, 0, -1)

    def generate(self, prompts: Prompts, count: int) -> tuple[list[list[int]], float, float]:
        """prompts of one length -> greedy tokens of each, seconds to the first ones, and from there on."""
        began = time.perf_counter()
        rows = [[self._first(prompt, row)] for row, prompt in enumerate(prompts)]
        first = time.perf_counter()
        for place in range(len(prompts[0]), len(prompts[0]) + count - 1):
            self.decode_rows([row[-1] for row in rows], place)
            for i, row in enumerate(rows):
                row.append(self.choice(i))
        return rows, first - began, time.perf_counter() - first

    def _first(self, prompt: Sequence[int], row: int) -> int:
        self.forget(0, row)
        for begin in range(0, len(prompt), PROMPT):
            part = prompt[begin : begin + PROMPT]
            self.decode(part, begin, row, logits=False)
        return self.choice(len(part) - 1)


class Baseline:
    """Greedy decoding of a target, each batch size with the setting and the threads that suit it best."""

    def __init__(self, target: Decoder, tokenizer: Tokenizer, file: Path | None = None) -> None:
        """`file`: the target's own GGUF file; None: one is written."""
        self.remarks: list[str] = []
        self._chosen: dict[tuple[int, int], tuple[LlamaCpp, int]] = {}  # by batch and length
        if file is not None:
            self._model = load_model(file)
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "target.gguf"
            write_file(target, tokenizer, path)
            self._model = load_model(path)  # mapped: the file may go

    def __call__(self, prompts: Prompts, new_tokens: int, seed: int = 0) -> Timed:
        """A `bench.run.Method`."""
        engine, threads = self._engine(prompts, len(prompts[0]) + new_tokens)
        engine.use_threads(threads)
        tokens, first_s, decode_s = engine.generate(prompts, new_tokens)
        trace, rows = Trace(), list(range(len(prompts)))
        for _ in range(new_tokens - 1):
            trace.add(len(rows), rows, [0] * len(rows), [0] * len(rows))
        trace.seconds |= {"prefill": first_s, "verify": decode_s}
        return Timed(tokens=tokens, first_s=first_s, decode_s=decode_s, trace=trace)

    def _engine(self, prompts: Prompts, length: int) -> tuple[LlamaCpp, int]:
        key = len(prompts), -(-max(length, len(prompts[0]) + TRIAL) // ROOM) * ROOM
        if key not in self._chosen:
            items: list[tuple[float, str, LlamaCpp, int]] = []
            for (name, how), threads in product(SETTINGS.items(), sorted({1, torch.get_num_threads()})):
                engine = LlamaCpp(self._model, *key, *how)
                engine.use_threads(threads)
                seconds = min(engine.generate(prompts, TRIAL)[2] for _ in range(2))
                items.append((seconds, f"{name}, {threads} thread{'s' * (threads > 1)}", engine, threads))
            best = min(items, key=lambda item: item[0])
            for item in items:
                if item is not best:
                    item[2].close()
            self._chosen[key] = best[2], best[3]
            self.remarks.append(
                f"{NAME}, batch {key[0]}, up to {key[1]} tokens: {best[1]}, the fastest of {len(items)} "
                "settings; its text is not compared, since it rounds otherwise"
            )
        return self._chosen[key]


def baseline(target: Decoder, tokenizer: Tokenizer, remarks: list[str]) -> Baseline | None:
    """None where it cannot run; `remarks` gets the reason."""
    reason = f"it is not installed ({HOW_TO_GET})"
    try:
        if installed():
            return Baseline(target, tokenizer)
    except ValueError as error:  # what GGUF cannot say
        reason = str(error)
    remarks.append(f"{NAME} left out: {reason}")
    return None


def write_file(target: Decoder, tokenizer: Tokenizer, path: Path) -> None:
    """The target in GGUF, its matrices in the type that it holds them in. Raises ValueError for what GGUF
    cannot say."""
    write_gguf(target, path, vocabulary_of(target, tokenizer, None), _type(target))


def _type(target: Decoder) -> str:
    """Of the matrices: as the target holds them."""
    weight = target.embed_tokens.weight
    stored = {torch.float32: "f32", torch.float16: "f16"}
    return stored.get(weight.dtype, "bf16") if isinstance(weight, torch.Tensor) else "bf16"

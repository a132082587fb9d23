"""From a trained target to a checkpoint folder: MXFP4 experts, tokenizer, and provenance.json."""

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from examples.tiny_target.problem_training import ProblemRecipe, exact_share
from outpace.checkpoint.save import write_atomically, write_json
from outpace.models.decoder import Decoder
from outpace.models.load import fingerprint, load_target
from outpace.models.save import save_target
from outpace.text.harmony import HarmonyTokens, Mark
from outpace.text.tokenizer import END_OF_TEXT

STOPS = (Mark.RETURN, END_OF_TEXT, Mark.CALL)  # the tokens that end an answer, in the order of gpt-oss
BATCH_TOKENS = 8192  # at once, on the CPU


def publish(
    model: Decoder,
    tokenizer: Tokenizer,
    recipe: ProblemRecipe,
    run: Path,
    folder: Path,
    started_from: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Save to `folder` in HF format and measure what was saved; -> the provenance. `run`: the folder of the
    training; `started_from`: the provenance of the weights that training began with."""
    stops = [tokenizer.token_to_id(stop) for stop in STOPS]
    save_target(model, folder, pack=True, dtype=torch.bfloat16, eos_token_id=stops)
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STOPS[0], "pad_token": END_OF_TEXT},
    )
    saved = load_target(folder)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    provenance = {
        "recipe": asdict(recipe),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "steps": len(log),
        "training_hours": round(sum(r["seconds"] for r in log) / 3600, 2),
        "loss_curve": [[r["step"], round(r["loss"], 4)] for r in log[:: max(1, len(log) // 100)]],
        "fingerprint": fingerprint(saved),
        "corpus": "generated problems of outpace/tasks; a tenth of them, by hash, is held out",
        "tokens": sum(r["tokens"] for r in log),
        "tokens_supervised": sum(r["supervised"] for r in log),
        "problems": recipe.test_problems,
        "exact": exact_share(saved, HarmonyTokens(tokenizer), recipe.test_problems, BATCH_TOKENS),
        "exact_curve": [[r["step"], round(r["exact"], 4)] for r in log if "exact" in r],
        "started_from": started_from,
    }
    write_json(folder / "provenance.json", provenance)
    return provenance

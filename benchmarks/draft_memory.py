"""Memory of a training step of a DFlash for gpt-oss-20b: 512 anchors in a row of 2,048 tokens, bfloat16.

python benchmarks/draft_memory.py [--no-optimizer] [--threads 2] [--json FILE]
"""

import argparse
import json
import resource
import time
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outpace.bench.machine import machine, provenance, versions
from outpace.drafts.dflash_config import DFlashConfig
from outpace.ops.rope import RopeConfig
from outpace.teacher.store import TeacherSample
from outpace.train.data import pack
from outpace.train.dflash import DFlashRecipe, Objective, block_states, init_dflash
from outpace.train.drafts import DraftVocabulary

ANCHORS, LENGTH = 512, 2048
CONFIG = DFlashConfig(
    hidden_size=2880,
    num_layers=8,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=7680,
    vocab_size=201088,
    rope=RopeConfig(theta=150000.0),
    rms_norm_eps=1e-5,
    block_size=8,
    target_layer_ids=(1, 6, 11, 16, 21),
    num_target_layers=24,
    mask_token_id=200000,
)


class Ends(nn.Module):
    """A target's embedding and head, random and frozen: all of it that training touches."""

    def __init__(self, vocab: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = torch.empty(vocab, width, dtype=dtype).normal_()
        self.head = torch.empty(vocab, width, dtype=dtype).normal_(std=width**-0.5)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


def random_row(config: DFlashConfig, length: int, dtype: torch.dtype) -> TeacherSample:
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, config.vocab_size, (length,), generator=rng)
    aux = torch.randn(len(config.target_layer_ids), length, config.hidden_size, generator=rng)
    return TeacherSample(tokens, 8, aux.to(dtype), 0, 0.0)


def measure(
    config: DFlashConfig = CONFIG, anchors: int = ANCHORS, length: int = LENGTH, *, optimizer: bool = True
) -> dict[str, Any]:
    """One step; peak resident memory of the process, head and embedding included."""
    dtype = torch.bfloat16
    ends, draft = Ends(config.vocab_size, config.hidden_size, dtype), init_dflash(config, 1)
    row = random_row(config, length, dtype)
    packed = pack([row], config.block_size, anchors, None, repeat(torch.Generator().manual_seed(1)))
    marks, began = {"loaded": _peak_gib()}, time.perf_counter()
    hidden = block_states(draft, ends, packed, dtype, recompute=True)  # type: ignore[arg-type]
    vocabulary = DraftVocabulary(None, None, ends.head, ends.head)
    loss = Objective(draft, DFlashRecipe(), vocabulary)(hidden, packed).loss
    marks["forward"] = _peak_gib()
    loss.backward()
    marks["backward"] = _peak_gib()
    nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    if optimizer:
        torch.optim.AdamW(draft.parameters(), lr=6e-4, fused=True).step()
    marks["step"] = _peak_gib()
    return {
        "parameters": sum(p.numel() for p in draft.parameters()),
        "blocks": list(packed.labels.shape),
        "optimizer": optimizer,
        "loss": loss.item(),
        "seconds": time.perf_counter() - began,
        "peak_rss_gib": marks,
    }


def _peak_gib() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-optimizer", action="store_true", help="forward and backward only")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    report = {**provenance(), "machine": machine(torch.device("cpu")), "versions": versions()}
    text = json.dumps(report | {"memory": measure(optimizer=not arguments.no_optimizer)})
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()

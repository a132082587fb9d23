"""Speed and memory of draft training: our step next to a plain one that builds the dense grid and all logits.

    python benchmarks/dflash_train.py [--anchors 64 500] [--threads 2] [--json FILE]
    python benchmarks/dflash_train.py --memory [--no-optimizer]

The configuration is the one public trainers were measured on: width 256, 2 draft layers, vocabulary 8,192,
blocks of 8, one row of 512 tokens per step, AdamW. Heads (8 x 32, 2 kv) and MLP width (768) were not stated
there and are assumed. On a busy machine take --threads 1 and read the processor time, which others' work does
not stretch. `--memory` takes one step on a draft for gpt-oss-20b: 512 anchors of a row of 2,048 tokens.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.bench.machine import machine, provenance, versions
from outpace.drafts.dflash import DFlash
from outpace.drafts.dflash_config import DFlashConfig
from outpace.ops.rope import RopeConfig
from outpace.teacher.store import TeacherSample
from outpace.train.data import Packed, pack
from outpace.train.dflash import DFlashRecipe, Objective, block_states, init_dflash
from outpace.train.drafts import DraftVocabulary
from outpace.train.losses import decay_weights

PEERS = "8 heads x 32, 2 kv heads, MLP 768 (assumed)"


class Ends(nn.Module):
    """A target's embedding and head, random and frozen: all of it that training touches."""

    def __init__(self, vocab: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = torch.empty(vocab, width, dtype=dtype).normal_()
        self.head = torch.empty(vocab, width, dtype=dtype).normal_(std=width**-0.5)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


def small() -> DFlashConfig:
    return DFlashConfig(
        hidden_size=256,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=768,
        vocab_size=8192,
        rope=RopeConfig(theta=10000.0),
        rms_norm_eps=1e-6,
        block_size=8,
        target_layer_ids=(1, 2, 3, 4, 5),
        num_target_layers=8,
        mask_token_id=2,
    )


def gpt_oss_20b() -> DFlashConfig:
    return DFlashConfig(
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


def random_row(config: DFlashConfig, length: int, dtype: torch.dtype = torch.float32) -> TeacherSample:
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, config.vocab_size, (length,), generator=rng)
    aux = torch.randn(len(config.target_layer_ids), length, config.hidden_size, generator=rng)
    return TeacherSample(tokens, 8, aux.to(dtype), 0, 0.0)


def plain_step(
    draft: DFlash,
    ends: Ends,
    row: TeacherSample,
    packed: Packed,
    dtype: torch.dtype,
    head: Tensor,
    gamma: float,
) -> Tensor:
    """The step as it is commonly written: dense [A*B, S + A*B] masked attention, full logits, decay."""
    A, B = packed.positions.shape
    S = len(row.tokens)
    seen, own = packed.layout.grid().split((int(packed.layout.context[-1]), A * B), dim=1)
    allowed = torch.cat((F.pad(seen, (0, S - seen.shape[1])), own), dim=1)
    features = draft.context(row.aux.to(dtype)[:, None])
    context_rope = draft.rope(torch.arange(S)[None])
    cos, sin = draft.rope(packed.positions.view(1, -1))
    group = draft.config.num_heads // draft.config.num_kv_heads

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = draft.layers[i].context_kv(features, *context_rope)  # type: ignore[operator]
        keys, values = (
            torch.cat(pair, dim=2).repeat_interleave(group, dim=1)
            for pair in zip(shared, (k, v), strict=True)
        )
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=allowed)
        return out.transpose(1, 2).flatten(2)

    x = draft.embed_block(packed.anchors, ends).to(dtype).view(1, A * B, -1)  # type: ignore[arg-type]
    hidden = draft.denoise(x, cos, sin, attend).view(A, B, -1)
    logits = F.linear(hidden[:, 1:], head).float()
    nll = F.cross_entropy(logits.flatten(0, 1), packed.labels.flatten(), reduction="none").view(A, B - 1)
    weights = decay_weights(packed.valid, gamma)
    return (nll * weights).sum() / weights.sum()


def trainer(kind: str, dtype: torch.dtype, anchors: int) -> Callable[[int], float]:
    """-> step(n), which takes one optimiser step and returns the loss."""
    config = small()
    torch.manual_seed(1)
    draft, ends, row = (
        init_dflash(config, 1),
        Ends(config.vocab_size, 256, torch.float32),
        random_row(config, 512),
    )
    fused = {"fused": True} if kind == "ours" else {}
    adam = torch.optim.AdamW(draft.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.0, **fused)
    head, recipe = ends.head.to(dtype), DFlashRecipe(weights="decay")

    def step(n: int) -> float:
        packed = pack([row], 8, anchors, None, repeat(torch.Generator().manual_seed(n)))
        if kind == "ours":
            hidden = block_states(draft, ends, packed, dtype)  # type: ignore[arg-type]
            loss = Objective(draft, recipe, DraftVocabulary(None, None, head, head))(hidden, packed).loss
        else:
            loss = plain_step(draft, ends, row, packed, dtype, head, 4.0)
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss.item()

    return step


def speed(anchors: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Both steps in turn, `repeats` times after two warm-up steps."""
    steps = {kind: trainer(kind, dtype, anchors) for kind in ("ours", "plain")}
    wall: dict[str, list[float]] = {kind: [] for kind in steps}
    processor: dict[str, list[float]] = {kind: [] for kind in steps}
    losses: dict[str, list[float]] = {kind: [] for kind in steps}
    for n in range(repeats + 2):
        for kind, step in steps.items():
            began = time.perf_counter(), time.process_time()
            losses[kind].append(step(n))
            wall[kind].append(time.perf_counter() - began[0])
            processor[kind].append(time.process_time() - began[1])
    values: dict[str, Any] = {"anchors": anchors, "dtype": str(dtype).removeprefix("torch.")}
    for kind in steps:
        values[kind] = {
            "steps_per_s": 1 / statistics.median(wall[kind][2:]),
            "best_steps_per_s": 1 / min(wall[kind][2:]),
            "processor_s": statistics.median(processor[kind][2:]),
            "losses": losses[kind],
        }
    for name, seconds in (("ratio", wall), ("processor_ratio", processor)):
        pairs = zip(seconds["ours"][2:], seconds["plain"][2:], strict=True)
        values[name] = statistics.median(plain / ours for ours, plain in pairs)
    return values


def memory(optimizer: bool) -> dict[str, Any]:
    """One step of a gpt-oss-20b draft; peak resident memory of the process, head and embedding included."""
    config = gpt_oss_20b()
    ends = Ends(config.vocab_size, config.hidden_size, torch.bfloat16)
    draft = init_dflash(config, 1)
    row = random_row(config, 2048, torch.bfloat16)
    packed = pack([row], 8, 512, None, repeat(torch.Generator().manual_seed(1)))
    marks, began = {"loaded": _peak_gib()}, time.perf_counter()
    hidden = block_states(draft, ends, packed, torch.bfloat16, recompute=True)  # type: ignore[arg-type]
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


def _line(values: dict[str, Any]) -> str:
    kinds = values["ours"], values["plain"]
    wall, processor = [x["steps_per_s"] for x in kinds], [x["processor_s"] for x in kinds]
    return (
        f"{values['dtype']:10} {values['anchors']:7d} | "
        f"{wall[0]:13.2f} {wall[1]:6.2f} {values['ratio']:6.2f} | "
        f"{processor[0]:17.3f} {processor[1]:6.3f} {values['processor_ratio']:6.2f}"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--anchors", type=int, nargs="+", default=[64, 500])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument(
        "--no-optimizer", action="store_true", help="with --memory: forward and backward only"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    report: dict[str, Any] = {
        **provenance(),
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
    }
    if arguments.memory:
        report["memory"] = memory(not arguments.no_optimizer)
    else:
        report["assumed"] = PEERS
        report["results"] = []
        print("dtype      anchors | steps/s: ours  plain  ratio | processor s: ours  plain  ratio")
        for anchors in arguments.anchors:
            for dtype in (torch.float32, torch.bfloat16):
                repeats = arguments.repeats if anchors < 200 else max(3, arguments.repeats // 2)
                result = speed(anchors, dtype, repeats)
                report["results"].append(result)
                print(_line(result), flush=True)
    text = json.dumps(report)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()

"""Drafts and retrofits in training, by one process or by all that torchrun starts.

`distributed.py FOLDER KILLED_AT KIND ..`, KILLED_AT: samples of the last kind that process 1 reads before it
is killed; -1: any number. A kind with ":shard" at its end is sharded."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path += [str(Path(__file__).parents[n]) for n in (1, 2)]
sys.path.append(str(Path(__file__).parents[1] / "tiny_target"))
import test_retrofit_training
import tiny
import torch
from taught import PROMPTS, TOKENIZER, TrainedSetup

from outpace.ops import ranks
from outpace.train import trainer
from outpace.train.dflash import DFlashRecipe, train_dflash
from outpace.train.eagle3 import Eagle3Recipe, train_eagle3

LAYERS, STEPS = (0, 2, 3), 50
SIZES = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 56, "lr": 3e-3}
COMMON = {"rows": 5, "steps": STEPS, "bfloat16": False, "save_every": 10, "eval_every": 25, "eval_prompts": 2}
DFLASH = DFlashRecipe(**SIZES, **COMMON, block_size=5, anchors=7, eval_new_tokens=8)
EAGLE3 = Eagle3Recipe(
    **SIZES, **COMMON, draft_vocab=61, target_layer_ids=LAYERS, steps_ahead=3, eval_new_tokens=8
)
# Seed 9: at no step do the sixth and the seventh logit of a row come nearer than 3e-5. Where they tie, the
# last bit decides which one is a candidate, and two runs that add in different orders part there.
SELECTOR = replace(DFLASH, selector=6, conv=2, confidence=True, weights="dpace", seed=9)
KINDS = {
    "dflash": (train_dflash, DFLASH),
    "muon": (train_dflash, replace(DFLASH, muon_lr=0.02)),
    "selector": (train_dflash, SELECTOR),
    "rounds": (train_dflash, replace(DFLASH, rounds=True, loss="kl", held_out_share=0.3)),
    "eagle3": (train_eagle3, EAGLE3),
    "thinned": (train_eagle3, replace(EAGLE3, parallel=True, mask_token="<|MASK|>", keep=0.6)),
}
RETROFITS = {
    "mla": replace(test_retrofit_training.MLA, rows=5),
    "mla cached": replace(test_retrofit_training.MLA, rows=5),
    "dsa": replace(test_retrofit_training.DSA, rows=5, steps=12),
}
SPLIT = ("selector", "rounds", "thinned", "mla cached", "dsa")  # by many in two micro-batches each


class KilledSetup(TrainedSetup):
    def sample(self, i):
        if self.asked == self.breaks_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.asked += 1
        return self.samples[i]


def train(kind, folder, killed_at=None, stop_after=None, **changes):
    """`killed_at`: samples that it reads before. Where Muon rounds to bfloat16 the last bits of a sum become
    visible: not here."""
    with mock.patch.object(trainer, "product_dtype", lambda device: torch.float32):
        return _train(kind, folder, killed_at, stop_after, **changes)


def _train(kind, folder, killed_at, stop_after, **changes):
    if kind in RETROFITS:
        world = test_retrofit_training.random_target()
        more = {"teacher": test_retrofit_training.Cached(world)} if "cached" in kind else {}
        recipe = replace(RETROFITS[kind], **changes)
        return test_retrofit_training.trained(
            kind.split()[0], world, folder / kind, recipe, stop_after, **more
        )
    target = tiny.target("gpt_oss")
    texts = [tiny.tokens(n, seed=n) for n in (31, 17, 24, 40, 9, 22, 35)]
    function, recipe = KINDS[kind]
    cache = KilledSetup(target, texts, LAYERS, breaks_at=killed_at)
    given = replace(recipe, **changes), target, TOKENIZER, cache, PROMPTS, folder / kind
    return function(*given, stop_after=stop_after)


if __name__ == "__main__":
    folder, killed_at, *kinds = sys.argv[1:]
    with ranks.joined():
        for kind in kinds:
            at = int(killed_at) if os.environ["RANK"] == "1" and kind == kinds[-1] else None
            name, _, shard = kind.partition(":")
            split = 2 if name in SPLIT else 1
            train(name, Path(folder) / shard, at, micro_batches=split, **{"shard": True} if shard else {})

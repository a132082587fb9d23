"""A small DFlash of random weights, as wide as a tiny target."""

import tiny

from outpace.drafts.dflash import DFlash
from outpace.drafts.dflash_config import DFlashConfig
from outpace.models.load import named_tensors


def random_dflash(target, seed=9, **changes):
    c = target.config
    values = {
        "hidden_size": c.hidden_size, "num_layers": 2, "num_heads": 6, "num_kv_heads": 3, "head_dim": 10,
        "intermediate_size": 44, "vocab_size": c.vocab_size, "rope": c.rope, "rms_norm_eps": 1e-5,
        "block_size": 5, "target_layer_ids": (0, 2), "num_target_layers": c.num_layers, "mask_token_id": 2,
    }  # fmt: skip
    draft = DFlash(DFlashConfig(**(values | changes))).eval()
    tiny.randomise(named_tensors(draft), seed)
    return draft

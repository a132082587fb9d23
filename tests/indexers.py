"""Tiny targets where the full-attention layers have an index of random weights."""

from dataclasses import replace

import tiny
import torch
from latents import latent_target

from outpace.kv.topk import TopKConfig
from outpace.models.load import build, named_tensors

KEEP = TopKConfig(top_k=14, min_context=16, sinks=2, recent=6)


def indexed_target(family, keep=KEEP, rank=None, window=True, dim=8, heads=3, seed=0):
    """-> the target as it was (with latents of `rank`, if given), and the same with an index."""
    model = latent_target(family, rank, window)[1] if rank else tiny.target(family, window)
    config = model.config
    layers = tuple(i for i in range(config.num_layers) if not config.window(i))
    sizes = {"dsa_layers": layers, "dsa_index_dim": dim, "dsa_index_heads": heads}
    made = build(replace(config, **sizes, dsa_keep=keep, use_dsa=True))
    held, rng = dict(named_tensors(model)), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".indexer.frequencies" in name:
                last = config.head_dim // 2
                parameter.copy_(torch.randint(last, parameter.shape, generator=rng))
            elif ".indexer." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=rng))
            else:
                parameter.copy_(held[name])
    made.dtype = model.dtype
    return model, made.eval()

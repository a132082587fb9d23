"""Targets where the full-attention layers have a latent: the tiny ones, with an exact or a cut-off basis."""

from dataclasses import replace

import tiny
import torch

from outpace.models.load import build, named_tensors


def latent_target(family, rank=None, window=True, seed=0):
    """-> the target as it was, and with latents of `rank`; None: of 2 K D, which loses nothing."""
    model = tiny.target(family, window)
    config = model.config
    whole = 2 * config.num_kv_heads * config.head_dim
    rank = whole if rank is None else rank
    ranks = tuple(0 if config.window(i) else rank for i in range(config.num_layers))
    made, held = build(replace(config, mla_ranks=ranks, use_mla_kv=True)), dict(named_tensors(model))
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".latent." not in name:
                parameter.copy_(held[name])
        for attention in made.attentions:
            if attention.latent is None:
                continue
            rows = attention.heads * attention.head_dim
            bias = attention.qkv_proj.bias
            weight = attention.qkv_proj.weight[rows:].double()
            bias = torch.zeros(whole) if bias is None else bias[rows:]
            U, _ = torch.linalg.qr(torch.randn(whole, rank, dtype=torch.float64, generator=rng))
            mean = torch.randn(whole, dtype=torch.float64, generator=rng)
            attention.latent.down.weight.copy_(U.T @ weight)
            attention.latent.down.bias.copy_(U.T @ (bias.double() - mean))
            for part, kept in (
                (attention.latent.k_up, slice(whole // 2)),
                (attention.latent.v_up, slice(whole // 2, None)),
            ):
                part.weight.copy_(U[kept])
                part.bias.copy_(mean[kept])
    made.dtype = model.dtype
    return model, made.eval()

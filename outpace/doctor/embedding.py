"""The embedding and the head: are their rows the file's, and are the two tied as the config specifies?"""

import torch
from torch import Tensor

from outpace.checkpoint.base import Checkpoint
from outpace.doctor.check import Check
from outpace.models.decoder import Decoder
from outpace.ops.quant import Joined, Quant, Weight, reference_dense

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MOST_ROWS = 2048  # that statistics are taken over
# Rows of the text's tokens where the norm is this far from the median's are not a trained token's.
FAR = 100.0


def stored_rows(checkpoint: Checkpoint, name: str, ids: list[int]) -> Tensor:
    """Rows of a tensor as the file has them, [n, C] float32; blocks unpacked by the gguf package."""
    tensor = checkpoint.get(name)
    if isinstance(tensor, Quant):
        return reference_dense(tensor.data[ids], tensor.format)
    return tensor[ids].float()


def weight_rows(weight: Weight, ids: list[int]) -> Tensor:
    assert not isinstance(weight, Joined), "embedding and head are one matrix"
    if isinstance(weight, Quant):
        return weight[torch.tensor(ids)].dense().float()
    return weight[ids].float()


def check_embedding(model: Decoder, checkpoint: Checkpoint, tokens: list[int]) -> Check:
    """The rows of the text's tokens, looked up and read from the file."""
    name = "embedding rows"
    ids = sorted(set(tokens))
    rows = stored_rows(checkpoint, EMBEDDING, ids)
    with torch.inference_mode():
        seen = model.embed(torch.tensor([ids], device=model.device))[0].float().cpu()
    norms = rows.norm(dim=-1)
    median = float(norms.median())
    odd = [i for i, n in zip(ids, norms.tolist(), strict=True) if not median / FAR <= n <= median * FAR]
    apart = float((seen - rows).abs().max())
    evidence = {
        "largest_difference": apart,
        "median_norm": median,
        "smallest_norm": float(norms.min()),
        "largest_norm": float(norms.max()),
        "odd": odd[:20],
    }
    if not bool(rows.isfinite().all()):
        return Check(name=name, verdict="fail", message="the file's rows hold NaN or Inf", evidence=evidence)
    if not apart <= 1e-6 * float(rows.abs().max()):
        text = f"what the model looks up differs from the file's rows by {apart:.2g}"
        return Check(name=name, verdict="fail", message=text, evidence=evidence)
    text = (
        f"{len(ids)} rows are the file's; norms {evidence['smallest_norm']:.3g} to "
        f"{evidence['largest_norm']:.3g}, median {median:.3g}"
    )
    if odd:
        text += f"; tokens {odd[:5]} have rows of a norm that no trained token has"
    return Check(name=name, verdict="warn" if odd else "pass", message=text, evidence=evidence)


def check_head(model: Decoder, checkpoint: Checkpoint) -> Check:
    """Tied or not, as the config specifies and as the file has it."""
    name = "head"
    vocab = model.config.vocab_size
    ids = list(range(0, vocab, max(vocab // MOST_ROWS, 1)))
    embedding = stored_rows(checkpoint, EMBEDDING, ids)
    used = weight_rows(model.head, ids).cpu()
    held = HEAD in checkpoint.names()
    tied = model.config.tie_word_embeddings
    alike = float(torch.nn.functional.cosine_similarity(embedding, used, dim=-1).mean())
    evidence = {"tied": tied, "file_has_a_head": held, "cosine_with_embedding": round(alike, 4)}
    if not bool(used.isfinite().all()):
        return Check(name=name, verdict="fail", message="the head holds NaN or Inf", evidence=evidence)
    if tied and held and not torch.equal(stored_rows(checkpoint, HEAD, ids), embedding):
        text = (
            "config.json ties the head to the embedding, but the file holds another head, which nobody "
            "reads: set tie_word_embeddings to false"
        )
        return Check(name=name, verdict="fail", message=text, evidence=evidence)
    if not tied and torch.equal(used, embedding):
        text = (
            "config.json specifies the head is not tied, but it equals the embedding: a converter may have "
            "copied one over the other"
        )
        return Check(name=name, verdict="warn", message=text, evidence=evidence)
    text = "tied to the embedding" if tied else f"its own matrix (cosine with the embedding {alike:.2f})"
    return Check(name=name, verdict="pass", message=text, evidence=evidence)

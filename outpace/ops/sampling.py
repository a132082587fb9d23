"""Logits -> probabilities -> token; every draw takes its generator."""

import hashlib
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outpace.kernels import bindings
from outpace.kernels.bindings import use_kernel

FEW = 512  # likely tokens
MOST_BIAS = 100
SMALLEST, LARGEST = 1e-6, 1e6  # temperatures and penalties that float32 logits survive


def check_scale(name: str, value: float) -> None:
    """Raises ValueError for a divisor of logits that leaves nothing of them in float32."""
    if not SMALLEST <= value <= LARGEST:
        raise ValueError(f"{name} {value} is outside [{SMALLEST:g}, {LARGEST:g}]")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """temperature 0 is greedy; top_k 0, top_p 1, min_p 0, repetition_penalty 1 and the other penalties 0 do
    nothing.

    The order is that of transformers and vLLM: the bias and the penalties (greedy or not), then temperature,
    top_k, top_p, min_p. `logit_bias`: token ids and what is added to their logits. The repetition penalty
    counts prompt and output, as in transformers; presence and frequency penalties the output alone, as in
    OpenAI's API.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} {getattr(self, name)} is not a number")
        if self.temperature < 0:
            raise ValueError(f"temperature {self.temperature} is below 0")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} is below 0 (0 cuts nothing)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is outside (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p {self.min_p} is outside [0, 1] (0 cuts nothing)")
        if self.repetition_penalty <= 0:
            raise ValueError(
                f"repetition_penalty {self.repetition_penalty} is not above 0 (1 changes nothing)"
            )
        check_scale("repetition_penalty", self.repetition_penalty)
        if self.temperature:  # 0 is greedy
            check_scale("temperature", self.temperature)
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:  # refuses nan, too
                raise ValueError(f"{name} {getattr(self, name)} is outside [-2, 2] (0 changes nothing)")
        for token, bias in self.logit_bias:
            if not -MOST_BIAS <= bias <= MOST_BIAS:
                raise ValueError(f"logit_bias {bias} of token {token} is outside [-{MOST_BIAS}, {MOST_BIAS}]")

    @property
    def penalises(self) -> bool:
        """Whether it reads the text so far."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def is_argmax(self) -> bool:
        """Whether the token is the one with the largest logit, whatever came before."""
        return not (self.temperature or self.penalises or self.logit_bias)

    @property
    def is_softmax(self) -> bool:
        """Whether a token's chance is the softmax of logits over temperature, whatever came before."""
        cuts = (self.top_k, self.top_p, self.min_p) != (0, 1, 0)
        return bool(self.temperature) and not (cuts or self.penalises or self.logit_bias)

    def for_draft(self, temperature: float | None = None) -> "Sampling":
        """The same for a draft: perhaps at a temperature of its own, without penalties, which would need the
        text of every draft token, and without bias: its vocabulary may be another."""
        own = self.temperature if temperature is None else temperature
        return replace(
            self,
            temperature=own,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            logit_bias=(),
        )


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of a user's seed. Raises ValueError for more than 64 bits.

    torch's generator on the CPU reads 32 bits of a seed: larger ones are hashed, so that every bit counts.
    """
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed {seed}: it must lie in -2^63 .. 2^64 - 1")
    if not 0 <= seed <= LOW:
        seed = int.from_bytes(hashlib.sha256(str(seed % 2**64).encode()).digest()[:4])
    return torch.Generator(device).manual_seed(seed)


def seeded(*numbers: int) -> torch.Generator:
    """A generator that depends on nothing but the numbers: step n of a resumed run draws what step n
    of an unbroken one would have drawn."""
    state = 0
    for n in numbers:
        state = (state * 1_000_003 + n + 1) % (2**63 - 25)
    return torch.Generator().manual_seed(state)


def shuffled(first: int, count: int, size: int, *seed: int) -> list[int]:
    """Numbers `first` .. first + count of an endless pass over `size` samples, shuffled again every epoch."""
    samples = []
    for n in range(first, first + count):
        epoch, i = divmod(n, size)
        samples.append(int(torch.randperm(size, generator=seeded(*seed, epoch))[i]))
    return samples


IN_PROMPT, OUTPUT = 1, 2  # what a token of the prompt, and each one of the output, adds to a history


def penalised(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    """[..., V] -> [..., V]. `seen`: the history of the text, int32, broadcast to the logits: for every token
    IN_PROMPT if the prompt has it, plus OUTPUT for each time it was generated.

    Logits of tokens in the text are divided by the repetition penalty above 0 and multiplied by it below
    (CTRL, arXiv 1909.05858, section 4.1, as transformers does it); then n times the frequency penalty and,
    where n > 0, the presence penalty are subtracted, n being how often the token was generated. The bias is
    added before.
    """
    if sampling.logit_bias:
        tokens, bias = zip(*sampling.logit_bias, strict=True)
        logits = logits.float().clone()
        logits[..., tokens] += torch.tensor(bias, device=logits.device)
    if not sampling.penalises:
        return logits
    assert seen is not None, "a penalty reads the text"
    logits, penalty = logits.float(), sampling.repetition_penalty
    if penalty != 1:
        logits = torch.where(seen > 0, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    if sampling.frequency_penalty or sampling.presence_penalty:
        times = seen // OUTPUT
        logits = logits - sampling.frequency_penalty * times - sampling.presence_penalty * (times > 0)
    return logits


def shaped(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """[..., V] -> [..., V] float32; its softmax is drawn from (temperature > 0); -inf: the token is
    cut.

    Each row's result depends on that row alone, to the bit: every sort is stable.
    """
    x = penalised(logits, sampling, seen).float() / sampling.temperature
    if sampling.top_k and sampling.top_k < x.shape[-1]:
        kth = x.topk(sampling.top_k, dim=-1).values[..., -1:]
        x = x.masked_fill(x < kth, -torch.inf)
    if sampling.top_p < 1:
        x = _nucleus(x.reshape(-1, x.shape[-1]), sampling.top_p).view(x.shape)
    if sampling.min_p:
        x = x.masked_fill(x < x.amax(-1, keepdim=True) + math.log(sampling.min_p), -torch.inf)
    return x


def _nucleus(x: Tensor, top_p: float) -> Tensor:
    """Top-p of x [M, V]: a token goes where it and all below it have at most 1 - top_p; among equals the
    earlier goes first. A full sort is slow on a CPU, so there a row with few likely tokens does without."""
    if not x.is_cpu or x.shape[1] <= FEW:
        return _nucleus_by_sort(x, top_p)
    values, index = x.topk(FEW, dim=-1)
    p = x.softmax(-1).gather(1, index)
    kept = (p.cumsum(-1) - p < top_p).sum(-1, keepdim=True).clamp(min=1)  # rounding may exceed a tiny top_p
    edge, far = values.gather(1, kept - 1), kept[:, 0] == FEW
    spare = (x >= edge).sum(-1, keepdim=True) - kept  # equals of the last one kept, too many
    cut, same = x < edge, x == edge
    cut |= same & (same.cumsum(-1) <= spare)
    left = x.masked_fill(cut, -torch.inf)
    if far.any():
        left[far] = _nucleus_by_sort(x[far], top_p)
    return left


def _nucleus_by_sort(x: Tensor, top_p: float) -> Tensor:
    ordered, index = x.sort(dim=-1, stable=True)
    cut = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    cut[..., -1] = False  # the most probable token always stays
    return x.masked_fill(torch.empty_like(cut).scatter_(-1, index, cut), -torch.inf)


def probabilities(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """[..., V] -> [..., V] float32, the distribution to sample from (temperature > 0)."""
    return shaped(logits, sampling, seen).softmax(-1)


def greedy(logits: Tensor) -> Tensor:
    """[..., V] -> [...] int64: the first of the largest."""
    if use_kernel(logits) and logits.is_contiguous():
        return bindings.argmax(logits.view(-1, logits.shape[-1])).view(logits.shape[:-1])
    return logits.argmax(-1)


def draw(p: Tensor, rng: torch.Generator | None) -> Tensor:
    """p [..., V], at least 0 and not all 0, of any sum -> [...] int64, drawn in proportion to it."""
    below = p.double().cumsum(-1)
    total = below[..., -1:]
    u = torch.rand(total.shape, generator=rng, dtype=torch.float64, device=p.device) * total
    u = torch.minimum(u, total.nextafter(torch.zeros_like(total)))  # rounding may not pass the last token
    return torch.searchsorted(below, u, right=True)[..., 0]


def sample(
    logits: Tensor,
    sampling: Sampling,
    keys: Tensor | None,
    seen: Tensor | None = None,
    best: Tensor | None = None,
) -> Tensor:
    """[..., V] -> [...] int64: the argmax at temperature 0, else one draw per row, by the noise of its key;
    `seen` as `penalised` wants it; `best` [...] the argmax of the logits, where it is known."""
    if best is not None and sampling.is_argmax:
        return best
    if sampling.temperature == 0:
        return greedy(penalised(logits, sampling, seen))
    assert keys is not None, "a draw takes noise"
    if sampling.is_softmax and use_kernel(logits) and logits.is_contiguous():
        rows = logits.view(-1, logits.shape[-1])
        return bindings.drawn(rows, keys.contiguous().view(-1), sampling.temperature).view(keys.shape)
    return greedy(perturbed(shaped(logits, sampling, seen), keys))


LOW = 2**32 - 1


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


_A, _B, _C = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mixed(x: Tensor) -> Tensor:
    """int64 -> int64, a bijection that scatters neighbours (the finaliser of SplitMix64; products wrap)."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _B
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _C
    return x ^ ((x >> 31) & (2**33 - 1))


def keys(key: int | Tensor, streams: Tensor, places: Tensor) -> Tensor:
    """One key of 64 bits for every place of every stream: streams and places int64, broadcast -> int64."""
    if isinstance(key, int) and use_kernel(streams) and use_kernel(places):
        each = torch.broadcast_tensors(streams, places)
        return bindings.place_keys(key, *(part.contiguous() for part in each))
    stream = _mixed(key + (streams + 1) * _A)
    return _mixed(stream + (places + 1) * _A)


def _scattered(x: Tensor) -> Tensor:
    """32 bits in int64 -> 32 bits, a bijection (the finaliser of MurmurHash3)."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & LOW
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & LOW
    return x ^ (x >> 16)


def gumbel(keys: Tensor, V: int) -> Tensor:
    """keys [...] int64 -> noise [..., V] float32, independent for every key and token.

    g = -log(-log(1 - w)) with w of 32 bits: w is finest near 0, where g is large and decides draws.
    """
    token = torch.arange(V, device=keys.device)
    low, high = keys[..., None] & LOW, (keys[..., None] >> 32) & LOW
    bits = _scattered(_scattered((token * 0x9E3779B9 & LOW) ^ low) ^ high)
    w = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -(-(-w).log1p()).log()


def perturbed(scores: Tensor, keys: Tensor) -> Tensor:
    """scores [..., V] float32 (log p, up to a constant per row; -inf is never drawn), keys [...] -> their sum
    with the noise; its argmax is a draw from p."""
    if use_kernel(scores):
        V = scores.shape[-1]
        rows = bindings.perturb(scores.contiguous().view(-1, V), keys.contiguous().view(-1))
        return rows.view(scores.shape)
    return scores + gumbel(keys, scores.shape[-1])

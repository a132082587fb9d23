"""What a user says of an output: how its tokens are chosen, and when it ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from outpace.decode.request import Request
from outpace.ops.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when generation ends.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus sampling; 1 keeps all tokens.
        top_k: Number of most probable tokens kept; 0 keeps all.
        min_p: Drops tokens less probable than this times the most probable one.
        repetition_penalty: Above 1 makes tokens of the prompt and the output less likely; 1 does nothing.
        presence_penalty: Subtracted from the logits of tokens that the output contains; -2 to 2.
        frequency_penalty: Subtracted once for each time that the output contains the token; -2 to 2.
        logit_bias: Added to the logits of these tokens, by id; -100 to 100.
        seed: Of the random draws, for the whole batch; None takes a fresh one.
        max_tokens: Most tokens to generate per prompt.
        stop: Strings that end the output; they are not part of it.
        stop_token_ids: Tokens that end the output, besides the model's own.
        ignore_eos: Generate beyond the model's own end tokens.
        acceptance: Acceptance rule above temperature 0: match, rejection, block or gumbel. All of them keep
            the target's distribution; with match and gumbel a seed gives one text with any draft, and
            without one.
        draft_temperature: Temperature of the draft's own sampling (not with match); None is the target's.
        prefill_chunk: Prompt tokens per forward of the target.
        top_logits: Number of largest logits to return per token, for debugging; None returns none.
        json_schema: The output is JSON of this schema; of a chat, what follows the reasoning. A draft changes
            the speed alone, as ever. Needs llguidance.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    acceptance: str = "match"
    draft_temperature: float | None = None
    prefill_chunk: int = 512
    top_logits: int | None = None
    json_schema: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for values out of range."""
        if not all(self.stop_strings) or (isinstance(self.stop, str) and not self.stop):
            raise ValueError("stop: an empty string would end every output")
        if self.top_logits is not None and self.top_logits < 1:
            raise ValueError(f"top_logits {self.top_logits}: it must be at least 1")
        self.request(frozenset())

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def request(self, eos: frozenset[int]) -> Request:
        """The request of the decoding loop; `eos`: the model's own end tokens."""
        given = {f.name: getattr(self, f.name) for f in fields(Sampling)}
        return Request(
            max_new_tokens=self.max_tokens,
            sampling=Sampling(**given | {"logit_bias": tuple(sorted(self.logit_bias.items()))}),
            rule=self.acceptance,
            draft_temperature=self.draft_temperature,
            prefill_chunk=self.prefill_chunk,
            stop=frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else eos),
        )


DEFAULTS = SamplingParams()

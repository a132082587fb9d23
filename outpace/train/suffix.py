"""A suffix draft from a teacher cache: its answers, sorted. Nothing is trained."""

import time
from pathlib import Path

import torch
from torch import Tensor

from outpace.checkpoint.publish import published
from outpace.drafts.lookup import save_suffix
from outpace.models.decoder import Decoder
from outpace.ops.suffixes import Suffixes
from outpace.teacher.store import TeacherCache
from outpace.train.drafts import origin, responses, write_provenance


def build_suffix(target: Decoder, cache: TeacherCache, folder: Path, count: int | None = None) -> Suffixes:
    """folder/draft holds the first `count` answers of this target's `cache`, and provenance.json."""
    began, used = time.perf_counter(), min(count or len(cache), len(cache))
    answers = Suffixes.of(joined(list(responses(cache, used))))
    with published(folder / "draft") as new:
        save_suffix(answers, target.config.vocab_size, new)
        hours = round((time.perf_counter() - began) / 3600, 4)
        write_provenance(new, origin(target, cache) | {"answers": used, "training_hours": hours})
    return answers


def joined(answers: list[Tensor]) -> Tensor:
    """[n] int32, -1 behind every answer. Raises ValueError where there is nothing to look up."""
    if not sum(map(len, answers)):
        raise ValueError("this cache holds no answers: build one with response_tokens above 0")
    end = torch.tensor([-1])
    return torch.cat([part for answer in answers for part in (answer, end)]).int()

"""Where a checkpoint states its real stop tokens: generation_config.json, alongside config.json."""

from pathlib import Path

from outpace.checkpoint.base import LoadError
from outpace.checkpoint.strict_json import read_object


def generation_stops(folder: Path) -> tuple[int, ...]:
    """The ids of `eos_token_id` in generation_config.json, none where there is no such file. config.json
    often names one alone: gpt-oss's `<|return|>`, while `<|call|>` ends a turn too.

    Raises LoadError for a file that states anything else than ids.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    value = read_object(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise LoadError(f"{path}: eos_token_id is {str(value)[:60]}, not a token's id or a list of them")
    return tuple(ids)

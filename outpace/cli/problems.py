"""The command problems: generated problems with worked answers, as a file of conversations."""

import json
import random
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.app import app, say


@app.command()
def problems(
    out: Annotated[Path, typer.Argument(help="JSONL file to write: a conversation on every line.")],
    count: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 1000,
    family: Annotated[
        list[str] | None, typer.Option(help="Family of problems, repeatable. Default: all in turn.")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Problems of the tenth that no training row has.")
    ] = False,
    reasoning: Annotated[
        str, typer.Option(help="Reasoning effort: low has no trace; medium, high.")
    ] = "medium",
    seed: Annotated[int, typer.Option(help="Seed: the same problems again.")] = 1,
) -> None:
    """Write generated problems with worked answers, for teacher caches and trainings.

    [bold]Examples[/bold]: outpace problems problems.jsonl --count 4000
    outpace problems test.jsonl --held-out --family addition --family lists --count 200
    """
    from outpace.checkpoint.save import write_atomically
    from outpace.tasks.families import FAMILIES
    from outpace.text.messages import EFFORTS

    names = family or list(FAMILIES)
    for name in names:
        if name not in FAMILIES:
            raise ValueError(f"--family {name}: known are {', '.join(FAMILIES)}")
    if reasoning not in EFFORTS:
        raise ValueError(f"--reasoning {reasoning}: one of {', '.join(EFFORTS)}")
    if out.is_dir():
        raise ValueError(f"{out} is a folder: name the file to write")
    rng = random.Random(seed)
    lines = []
    for i in range(count):
        name = names[i % len(names)]
        problem = FAMILIES[name].draw(rng, held_out=held_out)
        lines.append(json.dumps(problem.as_json(reasoning), ensure_ascii=False) + "\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, "".join(lines).encode())
    say(f"{out}: {count:,} problems of {len(names)} families")

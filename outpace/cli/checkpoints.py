"""Commands on checkpoints: inspect."""

import json
from typing import Annotated

import typer

from outpace.cli.app import AsJson, app, console


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="Checkpoint folder, or 'default'.")] = "default",
    as_json: AsJson = False,
) -> None:
    """Say what a checkpoint holds: architecture, shapes, parameters, bytes, what is missing or left over.

    Exits 1 where the tensors are not what config.json describes.

    [bold]Example[/bold]: outpace inspect default --json
    """
    from outpace.load import target_folder
    from outpace.models.inspect import inspect_target
    from outpace.show import show_inspection

    found = inspect_target(target_folder(path))
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        show_inspection(found, console)
    if not found.comparison.clean:
        raise typer.Exit(1)

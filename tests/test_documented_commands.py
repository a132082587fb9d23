"""Commands in the README, the documentation, help texts and scripts exist, with the flags that they show."""

import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import typer

from outpace.cli import main as cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "runs").glob("*.sh"),
]
COMMAND = re.compile(r'(?:^|[`|;]\s*|\]: )\s*(?:outpace|"\$outpace") ([a-z][^`;|]*)', re.M)


def documented():
    """(place, words after `outpace`) of every command line; backslashes continue a line."""
    texts = {
        p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in PAGES if p.name != "log.md"
    }
    texts |= {
        p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8")
        for p in (ROOT / "outpace/cli").glob("*.py")
    }
    for place, text in texts.items():
        for found in COMMAND.finditer(text.replace("\\\n", " ")):
            line = found[1].split("\n")[0].split(" # ")[0].split("   ")[0]
            yield place, line.strip()


def command_of(words):
    """The click command that the first words name, and the words left."""
    command = typer.main.get_command(cli.app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]  # type: ignore[attr-defined]
    return command, words


def flags_of(command):
    return {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help"
    }


LINES = sorted(set(documented()))


@pytest.mark.parametrize(("place", "line"), LINES)
def test_commands_and_flags_exist(place, line):
    words = re.sub(r"\$\{[^}]*\}|\$\([^)]*\)", "X", line).replace('"', "").replace("'", "").split()
    command, rest = command_of(words)
    if not hasattr(command, "callback") or hasattr(command, "commands"):
        assert not rest or rest[0].startswith("-") or not re.match(r"[a-z]+$", rest[0]), (
            f"{place}: no command {rest[0]}"
        )
        return
    for word in rest:
        if word.startswith("--"):
            assert word.split("=")[0].rstrip(".,)") in flags_of(command), f"{place}: outpace {line}"


def test_there_are_many():
    assert len(LINES) > 60 and {"README.md", "runs/whole_way.sh", "outpace/cli/training.py"} <= {
        p for p, _ in LINES
    }


def test_a_planted_flag_is_caught():
    with pytest.raises(AssertionError, match="outpace generate"):
        test_commands_and_flags_exist("here", "generate default --max-new-tokens 5")


def answers(command):
    """It serves until it is told to stop, and says where."""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            for line in server.stdout:
                if found := re.search(r"http://\S+(?=/v1)", line):
                    with urllib.request.urlopen(found[0] + "/v1/models", timeout=60) as response:
                        assert response.status == 200
                    break
            else:
                raise AssertionError("it ended without an address")
        finally:
            server.terminate()
        assert server.wait(timeout=60) in (0, -signal.SIGTERM)


def readme_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.split("```console\n")[1].split("```")[0].strip().splitlines()


@pytest.mark.parametrize("line", readme_commands())
def test_the_commands_of_the_readme_run(line):
    words = shlex.split(line)
    assert words[0] == "outpace"
    start = "from outpace.cli.main import main; main()"
    if words[1] == "serve":
        answers([sys.executable, "-c", start, *words[1:], "--port", "0"])
        return
    done = subprocess.run(
        [sys.executable, "-c", start, *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-500:]

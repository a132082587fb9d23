"""The examples run as they are documented, and every file outside the package can be imported."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
)


def python(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_script_imports():
    """In one process, without running any: a renamed function would show here."""
    assert len(SCRIPTS) > 6
    python(
        "-c",
        "import importlib.util, sys\n"
        "for path in sys.argv[1:]:\n"
        "    spec = importlib.util.spec_from_file_location('script', path)\n"
        "    spec.loader.exec_module(importlib.util.module_from_spec(spec))\n",
        *SCRIPTS,
    )


def test_generate():
    out = python("examples/generate.py")
    assert "tokens/s, tau" in out and "[" in out.split("tokens/s")[1] and "tokens, stop" in out


def test_custom_draft():
    out = python("examples/custom_draft.py")
    assert out.startswith('{"age": "blue"') and float(out.rsplit("tau ", 1)[1].split(":")[0]) > 1


def test_train_draft(tmp_path):
    out = python("examples/train_draft.py", tmp_path / "run", "--samples", "12", "--steps", "2")
    assert "tau" in out and (tmp_path / "run" / "draft" / "model.safetensors").exists()


def test_the_python_of_the_readme_runs():
    code = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    assert len(code.strip().splitlines()) <= 10
    tau, rate = python("-c", code).split("\n", 1)[0].rsplit(" ", 2)[-2:]
    assert float(tau) >= 1 and float(rate) > 0

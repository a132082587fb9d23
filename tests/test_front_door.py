"""README, documentation site and repository files: what a stranger reads first is true."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.overview import rates

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_is_short():
    assert len(README.split()) <= 700


def test_the_picture_shows_the_report():
    """docs/overview.png: benchmarks/overview.py stores the values it draws."""
    report = json.loads((ROOT / "reports/answers/report.json").read_text())
    with Image.open(ROOT / "docs" / "overview.png") as image:
        drawn = json.loads(image.info["Description"])
    assert drawn == {method: list(values) for method, values in rates(report).items()}
    assert len(drawn) == 9 and list(drawn)[:2] == ["llama.cpp", "plain"]


def test_the_readme_gives_the_ratio_over_the_faster_llama_cpp():
    report = json.loads((ROOT / "reports/llama-cpp/avx2/report.json").read_text())
    assert report["machine"]["vector"] == "AVX2" and "AVX512" not in report["builds"]["llama.cpp"]
    ratio = report["text"]["autoregressive"]["ratio"]
    assert f"plain decoding is {ratio:.1f}x ([report]" in README.replace("\n", " ")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/install.md", "docs/quickstart.md"])
def test_links_lead_to_files(page):
    path = ROOT / page
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    assert links and [link for link in links if not (path.parent / link).exists()] == []

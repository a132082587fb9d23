"""The suite soak: a short load of rude clients on real servers."""

import io

from rich.console import Console

from outpace.bench import servers, soak
from outpace.bench.soak import PAGE, SoakSettings, run_soak
from outpace.bench.soak_clients import MANNERS
from outpace.loading import open_target
from outpace.text.corpus import read_corpus, split

SHORT = SoakSettings(
    requests=60, clients=8, rows=3, prompt_tokens=64, new_tokens=12, slow=3, timed=25, warm_up=2000
)


def _run(folder):
    target, tokenizer = open_target("default")
    documents = split(read_corpus())[1]
    return run_soak(target, "default", tokenizer, documents, SHORT, folder, Console(file=io.StringIO()))


def test_a_short_soak_passes_all_its_checks(tmp_path, monkeypatch):
    report = _run(tmp_path)
    assert [row["check"] for row in report["checks"] if not row["passed"]] == []
    assert len(report["checks"]) == 6 and report["load"]["failures"] == []
    assert (
        set(report["load"]["manners"]) == set(MANNERS) and len(report["load"]["memory_mib"]) == soak.BATCHES
    )
    page = PAGE.markdown(report, plots=False)
    assert "| nothing to repair after kill -9 | yes |" in page and "memory is not judged" in page
    # a run that stopped goes on with what it has: no server starts
    monkeypatch.setattr(servers, "outpace_serve", None)
    assert _run(tmp_path)["checks"] == report["checks"]

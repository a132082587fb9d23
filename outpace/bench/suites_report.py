"""The reports of the lossless and controller suites as files."""

from pathlib import Path
from typing import Any

from outpace.bench.comparison_report import PREDICTED, differ, predicted
from outpace.bench.report import lines_of, machine_line, run_line, table, target_line, versions_line
from outpace.checkpoint.save import write_atomically, write_json


def write_suite(report: dict[str, Any], folder: Path, markdown: str) -> None:
    """folder/report.json and report.md; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", report)
    write_atomically(folder / "report.md", markdown.encode())


def _head(title: str, report: dict[str, Any], measured: str) -> list[str]:
    lines = machine_line(report), versions_line(report), target_line(report["target"]), measured
    return [f"# {title}", "", *lines_of(*lines, run_line(report)), ""]


def lossless_markdown(report: dict[str, Any]) -> str:
    measured = (
        f"**Measured**: {report['prompts']} held-out prompts x {report['new_tokens']} tokens, batch "
        f"{report['batch']}: {report['violations']:,} violations, {report['ties']:,} ties, "
        f"{report['checked']:,} tokens compared"
    )
    lines = _head("Every method against autoregressive decoding, token by token", report, measured)
    return "\n".join([*lines, *lossless_table(report), TIES])


TIES = """\
- violations: rows that differ from autoregressive decoding's and are no tie; what follows a row's first
  difference has another prefix and is not compared. A tie is two logits within 1e-4 in float32, the noise of
  their place added where there is any.
- gumbel: noise that is a function of seed, row and place: the same seed must give autoregressive decoding's
text.
"""


def lossless_table(report: dict[str, Any]) -> list[str]:
    partial = any("passed" in r for r in report["results"])
    rows = [
        [
            r["method"] + (" + controller" if r["steered"] else ""),
            f"{r['temperature']:g}",
            r["rule"] if r["temperature"] else "greedy",
            f"{r['violations']:,}",
            f"{r['ties']:,}",
            f"{r['checked']:,}",
            *([f"{r['confirmed']:,} of {r['passed']:,}" if "passed" in r else "-"] if partial else []),
        ]
        for r in report["results"]
    ]
    columns = ["method", "T", "acceptance rule", "violations", "ties", "tokens compared"]
    return table([*columns, *(["confirmed, of those that passed on partial KV"] if partial else [])], rows)


def controller_markdown(report: dict[str, Any]) -> str:
    recipe = report["recipe"]
    measured = (
        f"**Measured**: {recipe['controller_prompts']} prompts of {recipe['prompt_tokens']} tokens, "
        f"{recipe['new_tokens']} new tokens each, batch {recipe['batch']}, {recipe['repeats']} repeats, "
        "lengths interleaved"
    )
    lines = _head("The controller alongside fixed lengths", report, measured)
    lines += [*controller_table(report), MEANING]
    for r in report["results"]:
        lines += [f"## {r['method']}, {r['text']} text, T = {r['temperature']:g}", "", *widths_table(r)]
    return "\n".join(lines)


MEANING = """\
- held-out: text that nothing was trained on. random: prompts of uniformly drawn tokens, which no draft
predicts.
- T = 1 uses the rule gumbel, for autoregressive decoding too: every draft length generates the same text.
- best fixed: the fastest fixed draft length, autoregressive decoding (1) included. over the best: speed of
  the controller over, in every repeat, that of the length which was fastest in the other repeats (the
  fastest of the same repeat is partly luck). ±: approximate standard error from the spread of the runs.
- predicted speedup: what the controller expected, from a cost table measured before the first run and the
  draft's confidence, with its error. error in tokens/s: the same for tokens/s.
"""


def controller_table(report: dict[str, Any]) -> list[str]:
    rows = [
        [
            r["text"],
            f"{r['temperature']:g}",
            r["method"],
            str(r["best_width"]),
            f"{r['best_speedup']:.2f}x",
            f"{r['over_plain']:.2f}x",
            f"{r['over_best']:.2f} ±{r['over_best_error']:.2f}",
            *predicted(r["controller"]),
            f"{r['controller']['columns']:.1f}",
        ]
        for r in report["results"]
    ]
    columns = ("text", "T", "method", "best fixed", "its speedup", "controller", "over the best")
    return table((*columns, *PREDICTED, "draft length"), rows)


def widths_table(r: dict[str, Any]) -> list[str]:
    rows = [
        [
            str(f["width"]),
            f"{f['tau']:.2f}",
            f"{f['tokens_per_s']:.0f}",
            f"{f['speedup']:.2f}x",
            differ(f["lossless"]),
        ]
        for f in r["fixed"]
    ]
    c = r["controller"]
    own = [f"controller ({c['columns']:.1f})", f"{c['tau']:.2f}", f"{c['tokens_per_s']:.0f}"]
    rows.append([*own, f"{c['speedup']:.2f}x", differ(c["lossless"])])
    return table(("draft length", "tau", "tokens/s", "speedup", "mismatched tokens"), rows)

"""Tables of what `outpace train mla` and `train dsa` report."""

from statistics import fmean
from typing import Any

from outpace.bench.report import table

SHARE = 0.25


def mass_table(report: dict[str, Any]) -> list[str]:
    """At a quarter of the context, layer by layer: what the latest tokens alone would keep of the attention's
    mass, an index before and after training, and the best choice."""
    after, before = (
        {row["layer"]: row for row in report[name] if row["share"] == SHARE}
        for name in ("mass", "mass_untrained")
    )
    kept = {i: [r["recent"], before[i]["index"], r["index"], r["best"]] for i, r in sorted(after.items())}
    lines: dict[Any, list[float]] = kept | {"mean": [fmean(x) for x in zip(*kept.values(), strict=True)]}
    rows = [[str(name), *(f"{100 * x:.1f} %" for x in line)] for name, line in lines.items()]
    return table(("layer", "the latest", "index, untrained", "index", "best choice"), rows)


def held_table(report: dict[str, Any]) -> list[str]:
    """Held-out loss of the original, of the retrofit as it came, and trained."""
    held = report["held_out"]
    base = held["original"]["nats_per_token"]
    rows = []
    for name, key in (("original", "original"), ("untrained", "untrained"), ("trained", "after")):
        value = held[key]
        change = f"{100 * (value['nats_per_token'] / base - 1):+.2f} %"
        same = f"{100 * value['same_likeliest']:.1f} %" if "kl" in value else "-"
        kl = f"{value['kl']:.4f}" if "kl" in value else "-"
        rows.append([name, f"{value['nats_per_token']:.4f}", change, kl, same])
    return table(("", "loss, nats", "change", "KL", "same top-1 token"), rows)

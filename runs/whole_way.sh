#!/usr/bin/env bash
# Problems -> target -> teacher cache -> DFlash draft -> gates -> measured table, on a micro model in minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
work="${1:-work/whole-way}"
outpace="${OUTPACE:-.venv/bin/outpace}"
python="${PYTHON:-.venv/bin/python}"
target="$work/target/model"

"$python" -m examples.tiny_target.make --recipe examples/tiny_target/micro.toml --out "$work/target"
"$outpace" inspect "$target"
"$outpace" problems "$work/problems.jsonl" --count 64
"$outpace" problems "$work/held-out.jsonl" --held-out --count 16
"$outpace" teacher build "$target" --recipe recipes/teacher-micro.toml --prompts "$work/problems.jsonl" --out "$work/cache"
"$outpace" teacher verify "$work/cache" --target "$target"
"$outpace" train dflash "$target" --recipe recipes/dflash-micro.toml --cache "$work/cache" \
  --prompts "$work/held-out.jsonl" --out "$work/dflash"
"$outpace" check "$target" --draft "$work/dflash/draft" --cache "$work/cache" --prompts 2
"$outpace" bench "$target" --draft "$work/dflash/draft" --out "$work/report" \
  --set 'methods=plain,ngram,dflash' --set 'regimes=short,' --set 'batches=1,' --set repeats=1 --set prompts=2
"$outpace" generate "$target" "What is 12 + 7?" --chat --draft "$work/dflash/draft" -n 64 --stats
echo "the whole way is walked: $work/report/report.md"

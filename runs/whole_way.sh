#!/usr/bin/env bash
# Raw text -> target -> teacher cache -> DFlash draft -> gates -> measured table, on a micro model in minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
work="${1:-work/whole-way}"
outpace="${OUTPACE:-.venv/bin/outpace}"
python="${PYTHON:-.venv/bin/python}"
corpus="$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')/asyncio"

"$python" -m examples.tiny_target.make --recipe examples/tiny_target/micro.toml --corpus "$corpus" --out "$work/target"
"$outpace" inspect "$work/target/model"
"$outpace" teacher build "$work/target/model" --recipe recipes/teacher-micro.toml \
  --corpus "$corpus" --out "$work/cache"
"$outpace" teacher verify "$work/cache" --target "$work/target/model"
"$outpace" train dflash "$work/target/model" --recipe recipes/dflash-micro.toml \
  --cache "$work/cache" --corpus "$corpus" --out "$work/dflash"
"$outpace" check "$work/target/model" --draft "$work/dflash/draft" --cache "$work/cache" --prompts 2
"$outpace" bench "$work/target/model" --draft "$work/dflash/draft" --out "$work/report" \
  --set 'methods=plain,ngram,dflash' --set 'regimes=short,' --set 'batches=1,' --set repeats=1 --set prompts=2
"$outpace" generate "$work/target/model" "import os" --draft "$work/dflash/draft" -n 64 --stats
echo "the whole way is walked: $work/report/report.md"

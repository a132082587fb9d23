#!/usr/bin/env bash
# Raw text -> target -> teacher cache -> DFlash draft -> gates -> measured table, on a micro model in minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
work="${1:-work/whole-way}"
outpace="${OUTPACE:-.venv/bin/outpace}"
corpus="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')/asyncio"

"$outpace" train target --recipe recipes/target-micro.toml --corpus "$corpus" --out "$work/target"
"$outpace" inspect "$work/target/model"
"$outpace" teacher build --recipe recipes/teacher-micro.toml --target "$work/target/model" \
  --corpus "$corpus" --out "$work/cache"
"$outpace" teacher verify "$work/cache" --target "$work/target/model"
"$outpace" train dflash --recipe recipes/dflash-micro.toml --target "$work/target/model" \
  --cache "$work/cache" --corpus "$corpus" --out "$work/dflash"
"$outpace" verify --target "$work/target/model" --draft "$work/dflash/draft" --cache "$work/cache" --prompts 2
"$outpace" bench --target "$work/target/model" --draft "$work/dflash/draft" --out "$work/report" \
  --set 'methods=plain,ngram,dflash' --set 'regimes=short,' --set 'batches=1,' --set repeats=1 --set prompts=2
"$outpace" generate "import os" --target "$work/target/model" --draft "$work/dflash/draft" -n 64 --stats
echo "the whole way is walked: $work/report/report.md"

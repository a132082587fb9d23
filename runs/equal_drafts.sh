#!/usr/bin/env bash
# Every draft of the comparison, for a target of your own: one teacher cache, one budget, and the suites that compare them.
#
#   runs/equal_drafts.sh TARGET [WORK] [REPORT]
#
# In the environment: STEPS (2500), ROWS (6), SEED (1), SAMPLES of the cache (the recipe's), CORPUS (a folder), SUITE
# (recipes/drafts/suite.toml). In minutes, to see it walk:
#   STEPS=2 ROWS=2 SAMPLES=16 SUITE=recipes/drafts/suite-micro.toml runs/equal_drafts.sh TARGET work/micro work/micro/report
#
# The budget is counted in tokens of the texts trained on: STEPS x ROWS texts of the cache, prompts included, the
# same texts in the same order for every draft (one seed, one walk). What a draft makes of a text is its own affair:
# a DFlash draws anchors in it, an EAGLE-3 is unrolled over it. Each draft's provenance.json says what it came to.
# Everything resumes: a finished draft is skipped, a stopped one goes on from its checkpoint, and so do the suites.
set -euo pipefail
cd "$(dirname "$0")/.."
target="${1:?name the target: runs/equal_drafts.sh TARGET [WORK] [REPORT]}"
work="${2:-work/equal-drafts}"
report="${3:-reports/drafts/equal}"
outpace="${OUTPACE:-.venv/bin/outpace}"
steps="${STEPS:-2500}"
suite="${SUITE:-recipes/drafts/suite.toml}"
samples=(${SAMPLES:+--set "samples=$SAMPLES"})
corpus=(${CORPUS:+--corpus "$CORPUS"})
budget=(--set "steps=$steps" --set "rows=${ROWS:-6}" --set "seed=${SEED:-1}" --set "eval_every=$(((steps + 1) / 2))")

train() { # the command's name, the recipe's and the draft's
  if [ -f "$work/$2/draft/provenance.json" ]; then
    echo "$2: trained before, skipped"
    return
  fi
  "$outpace" train "$1" "$target" --recipe "recipes/drafts/$2.toml" --cache "$work/cache" \
    --out "$work/$2" "${budget[@]}" ${corpus[@]+"${corpus[@]}"}
}

compare() { # the suite, its folder
  if [ -f "$2/report.json" ]; then
    echo "$1: measured before, skipped: remove $2/report.json to measure again"
    return
  fi
  "$outpace" bench "$target" --suite "$1" --recipe "$suite" --drafts "$work" \
    --out "$2" ${corpus[@]+"${corpus[@]}"}
}

"$outpace" teacher build "$target" --recipe recipes/drafts/teacher.toml --out "$work/cache" \
  ${samples[@]+"${samples[@]}"} ${corpus[@]+"${corpus[@]}"}
if [ ! -f "$work/suffix/draft/provenance.json" ]; then
  "$outpace" train suffix "$target" --cache "$work/cache" --out "$work/suffix"
fi
train dflash dflash
train dflash dflash-dpace
train dflash dflash2
train eagle3 eagle3
train eagle3 p-eagle

compare drafts "$report"
compare lossless "$report/lossless"
compare controller "$report/controller"
"$outpace" tables docs/drafts.md

#!/usr/bin/env bash
# Drafts for the model that solves problems, from its own answers to problems that are not held out, and how fast it answers with them.
#
#   runs/solver_drafts.sh [WORK] [REPORT]
#
# In the environment: SAMPLES (16000 answers, 11 GiB) and STEPS (the recipes'). In minutes, to see it walk:
#   SAMPLES=32 STEPS=2 SET="problems=1 families=units calibrate_s=2.0" runs/solver_drafts.sh work/micro work/micro/report
#
# On two cores: a quarter of an hour for the answers, half an hour for the drafts, which learn side by side. Everything resumes.
set -euo pipefail
cd "$(dirname "$0")/.."
target=solver
work="${1:-work/solver-drafts}"
report="${2:-reports/solver/answers}"
outpace="${OUTPACE:-.venv/bin/outpace}"
samples="${SAMPLES:-16000}"
steps=(${STEPS:+--set "steps=$STEPS"})
settings=()
for setting in ${SET:-}; do settings+=(--set "$setting"); done

train() { # the command's name, the recipe's, and the draft's in the suite
  if [ -f "$work/solver/$3/provenance.json" ]; then
    echo "$2: trained before, skipped"
    return
  fi
  OMP_NUM_THREADS=1 "$outpace" train "$1" "$target" --recipe "recipes/drafts/solver-$2.toml" --cache "$work/cache" \
    --prompts "$work/held-out.jsonl" --out "$work/$2" ${steps[@]+"${steps[@]}"}
  mkdir -p "$work/solver"
  ln -sfn "../$2/draft" "$work/solver/$3"
}

mkdir -p "$work"
"$outpace" problems "$work/problems.jsonl" --count "$samples" --seed 8
"$outpace" problems "$work/held-out.jsonl" --held-out --count 96 --seed 5
"$outpace" teacher build "$target" --prompts "$work/problems.jsonl" --out "$work/cache" --final --set "samples=$samples" \
  --set "response_tokens=[600,600]" --set greedy_share=0.8 --set shard_samples=320 --set batch=32
train dflash dflash2 dflash &
train eagle3 eagle3 eagle3
wait $!
"$outpace" bench "$target" --suite answers --recipe recipes/drafts/suite-answers.toml --drafts "$work" --out "$report" \
  ${settings[@]+"${settings[@]}"}

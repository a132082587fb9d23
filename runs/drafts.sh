#!/usr/bin/env bash
# Drafts for the embedded target, from its own answers to problems that are not held out, and how fast it answers with them.
#
#   runs/drafts.sh [WORK] [REPORT]
#
# In the environment: SAMPLES (16000 answers, 11 GiB) and STEPS (the recipes'). In minutes, to see it walk:
#   SAMPLES=32 STEPS=2 SET="problems=1 families=units calibrate_s=2.0" runs/drafts.sh work/micro work/micro/report
#
# On two cores: a quarter of an hour for the answers, half an hour for the drafts, which learn side by side. Everything resumes.
set -euo pipefail
cd "$(dirname "$0")/.."
target=default
work="${1:-work/drafts}"
report="${2:-reports/answers}"
outpace="${OUTPACE:-.venv/bin/outpace}"
samples="${SAMPLES:-16000}"
steps=(${STEPS:+--set "steps=$STEPS"})
settings=()
for setting in ${SET:-}; do settings+=(--set "$setting"); done

train() { # the command's name, which is the draft's in the suite, and the recipe's
  if [ -f "$work/$1/provenance.json" ]; then
    echo "$1: trained before, skipped"
    return
  fi
  OMP_NUM_THREADS=1 "$outpace" train "$1" "$target" --recipe "recipes/drafts/$2.toml" --cache "$work/cache" \
    --prompts "$work/held-out.jsonl" --out "$work/$2" ${steps[@]+"${steps[@]}"}
  ln -sfn "$2/draft" "$work/$1"
}

mkdir -p "$work"
"$outpace" problems "$work/problems.jsonl" --count "$samples" --seed 8
"$outpace" problems "$work/held-out.jsonl" --held-out --count 96 --seed 5
"$outpace" teacher build "$target" --prompts "$work/problems.jsonl" --out "$work/cache" --final --set "samples=$samples" \
  --set "response_tokens=[600,600]" --set greedy_share=0.8 --set shard_samples=320 --set batch=32
train dflash answers-dflash2 &
train eagle3 answers-eagle3
wait $!
"$outpace" bench "$target" --suite answers --recipe recipes/drafts/suite-answers.toml --drafts "$work" --out "$report" \
  ${settings[@]+"${settings[@]}"}

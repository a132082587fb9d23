#!/usr/bin/env bash
# Drafts for the embedded target, from its own answers to problems that are not held out, and how fast it answers with them.
#
#   runs/drafts.sh [WORK] [REPORT]
#
# In the environment: SAMPLES (16000 answers, 11 GiB, and as many to go on with) and STEPS (of each training). In minutes, to see it walk:
#   SAMPLES=32 STEPS=2 SET="problems=1 families=units calibrate_s=2.0" runs/drafts.sh work/micro work/micro/report
#
# On two cores: a quarter of an hour for each of the two caches of answers, three quarters for each of the five trainings. Everything resumes.
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

answer() { # the cache's name and the seed of its problems
  "$outpace" problems "$work/$1.jsonl" --count "$samples" --seed "$2"
  "$outpace" teacher build "$target" --prompts "$work/$1.jsonl" --out "$work/$1" --final --set "samples=$samples" \
    --set "response_tokens=[600,600]" --set greedy_share=0.8 --set shard_samples=320 --set batch=32
}

train() { # the command's name, which is the draft's in the suite, the recipe's, the cache's, the folder's, and more
  if [ -f "$work/$4/draft/provenance.json" ]; then
    echo "$4: trained before, skipped"
  else
    OMP_NUM_THREADS=1 "$outpace" train "$1" "$target" --recipe "recipes/drafts/$2.toml" --cache "$work/$3" \
      --prompts "$work/held-out.jsonl" --out "$work/$4" "${@:5}" ${steps[@]+"${steps[@]}"}
  fi
  ln -sfn "$4/draft" "$work/$1"
}

mkdir -p "$work"
"$outpace" problems "$work/held-out.jsonl" --held-out --count 96 --seed 5
answer cache 8
answer cache-on 9
train dflash answers-dflash2 cache answers-dflash2 &
train eagle3 answers-eagle3 cache answers-eagle3
wait $!
before=answers-dflash2
for turn in "cache-on 3 3600" "cache 4 5000" "cache-on 5 5000"; do
  read -r answers seed count <<<"$turn"
  train dflash answers-dflash2-on "$answers" "answers-dflash2-$seed" --init "$work/$before/draft" --set "seed=$seed" --set "steps=$count"
  before="answers-dflash2-$seed"
done
"$outpace" bench "$target" --suite answers --recipe recipes/drafts/suite-answers.toml --drafts "$work" --out "$report" \
  ${settings[@]+"${settings[@]}"}

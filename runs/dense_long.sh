#!/usr/bin/env bash
# A dense target that is usable at 8,192 positions: a Qwen3 of the embedded gpt-oss's sizes, tokenizer and text, first all files once, then
# rows that can be gone on with only by looking back, then such rows of up to 8,192 tokens.
#
#   runs/dense_long.sh [WORK]          # -> WORK/long/model
#   outpace bench --suite recall --target WORK/long/model --out WORK/report
#
# Every part resumes where it was stopped; a finished one is skipped. CORPUS (a folder) and STEPS, in the environment, are for
# seeing it walk.
set -euo pipefail
cd "$(dirname "$0")/.."
work="${1:-work/dense-long}"
outpace="${OUTPACE:-.venv/bin/outpace}"
corpus=(${CORPUS:+--corpus "$CORPUS"})
declare -A steps=([default]=150 [recall]=240 [long]=120)

from=(--set architecture=Qwen3ForCausalLM --set intermediate_size=320)
for part in default recall long; do
  if [ ! -f "$work/$part/model/provenance.json" ]; then
    mkdir -p "$work/$part"
    cp -n outpace/embedded/target/tokenizer.json "$work/$part/tokenizer.json"
    "$outpace" train target --recipe "recipes/target-$part.toml" --out "$work/$part" "${from[@]}" \
      --set "steps=${STEPS:-${steps[$part]}}" ${corpus[@]+"${corpus[@]}"}
  fi
  from=(--init "$work/$part/model")
done

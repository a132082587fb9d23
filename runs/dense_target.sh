#!/usr/bin/env bash
# The dense target of the comparison: a Qwen3 by the embedded gpt-oss's own recipes, text and tokenizer, in fewer
# steps, the second and third part in shorter rows. Its MLPs are as wide as the two experts of 160 that a token of that one
# goes through.
#
#   runs/dense_target.sh [WORK]        # an hour and a half on two cores; -> WORK/splice/model
#
# Every part resumes where it was stopped; a finished one is skipped. CORPUS (a folder) and STEPS, in the environment, are for
# seeing it walk.
set -euo pipefail
cd "$(dirname "$0")/.."
work="${1:-work/dense}"
outpace="${OUTPACE:-.venv/bin/outpace}"
corpus=(${CORPUS:+--corpus "$CORPUS"})
declare -A steps=([default]=300 [focus]=300 [settle]=120 [splice]=150)
declare -A rows=([focus]="--set row_tokens=512 --set long_row_tokens=1024" [settle]="--set row_tokens=512")

from=(--set architecture=Qwen3ForCausalLM --set intermediate_size=320)
for part in default focus settle splice; do
  if [ ! -f "$work/$part/model/provenance.json" ]; then
    mkdir -p "$work/$part"
    cp -n outpace/embedded/target/tokenizer.json "$work/$part/tokenizer.json"
    "$outpace" train target --recipe "recipes/target-$part.toml" --out "$work/$part" "${from[@]}" \
      --set "steps=${STEPS:-${steps[$part]}}" ${rows[$part]-} ${corpus[@]+"${corpus[@]}"}
  fi
  from=(--init "$work/$part/model")
done

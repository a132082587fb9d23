#!/usr/bin/env bash
# The dense target of the comparison: a Qwen3 by the embedded gpt-oss's own recipes, text and tokenizer, in fewer
# steps. Its MLPs are as wide as the two experts of 160 that a token of that one goes through. After the first part rows
# are shorter than that one's: no longer than the texts of the comparison.
#
#   runs/dense_target.sh [WORK]        # an hour and a quarter on two cores; -> WORK/splice/model
#
# Every part resumes where it was stopped; a finished one is skipped. CORPUS (a folder) and STEPS, in the environment, are for
# seeing it walk.
set -euo pipefail
cd "$(dirname "$0")/.."
work="${1:-work/dense}"
outpace="${OUTPACE:-.venv/bin/outpace}"
corpus=(${CORPUS:+--corpus "$CORPUS"})
declare -A steps=([default]=300 [focus]=300 [settle]=120 [splice]=150)
declare -A longest=([default]=4096 [focus]=1024 [settle]=512 [splice]=768)
declare -A row=([default]=1024 [focus]=512 [settle]=512 [splice]=768)

from=(--set architecture=Qwen3ForCausalLM --set intermediate_size=320)
for part in default focus settle splice; do
  if [ ! -f "$work/$part/model/provenance.json" ]; then
    mkdir -p "$work/$part"
    cp -n outpace/embedded/target/tokenizer.json "$work/$part/tokenizer.json"
    "$outpace" train target --recipe "recipes/target-$part.toml" --out "$work/$part" "${from[@]}" \
      --set "steps=${STEPS:-${steps[$part]}}" --set "row_tokens=${row[$part]}" \
      --set "long_row_tokens=${longest[$part]}" ${corpus[@]+"${corpus[@]}"}
  fi
  from=(--init "$work/$part/model")
done

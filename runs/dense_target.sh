#!/usr/bin/env bash
# The dense target of the comparison: a Qwen3 by the embedded gpt-oss's own recipes, text and tokenizer.
#
#   runs/dense_target.sh [WORK]        # some hours on two cores; -> WORK/splice/model
#
# Every part resumes where it was stopped; a finished one is skipped. CORPUS (a folder) and STEPS, in the environment, are for
# seeing it walk.
set -euo pipefail
cd "$(dirname "$0")/.."
work="${1:-work/dense}"
outpace="${OUTPACE:-.venv/bin/outpace}"
corpus=(${CORPUS:+--corpus "$CORPUS"})
steps=(${STEPS:+--set "steps=$STEPS"})

from=(--set architecture=Qwen3ForCausalLM --set intermediate_size=512)
for part in default focus settle splice; do
  if [ ! -f "$work/$part/model/provenance.json" ]; then
    mkdir -p "$work/$part"
    cp -n outpace/embedded/target/tokenizer.json "$work/$part/tokenizer.json"
    "$outpace" train target --recipe "recipes/target-$part.toml" --out "$work/$part" "${from[@]}" \
      ${steps[@]+"${steps[@]}"} ${corpus[@]+"${corpus[@]}"}
  fi
  from=(--init "$work/$part/model")
done

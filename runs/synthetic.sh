#!/usr/bin/env bash
# What a draft with the published acceptance would bring on a dense shape: random weights, synthetic acceptance.
#
#   runs/synthetic.sh [SHAPE] [TYPE] [WORK] [REPORT]
#
# The target's steps and llama.cpp's on the same GGUF file are real; how many draft tokens are right is given. Once
# with a draft that costs nothing, once with a DFlash of LAYERS (5) layers of random weights. Resumes.
set -euo pipefail
cd "$(dirname "$0")/.."
shape="${1:-qwen3-0.6b}"
type="${2:-bf16}"
work="${3:-work/synthetic}"
report="${4:-reports/synthetic}"
outpace="${OUTPACE:-.venv/bin/outpace}"
file="$work/$shape-$type.gguf"
given=(--set "taus=[4.3,6.5,7.3]" --set "blocks=[8,16,16]" --set "new_tokens=${NEW:-96}" --set "repeats=${REPEATS:-2}")

if [ ! -f "$file" ]; then
  "$outpace" synth "$work/$shape" --like "$shape"
  "$outpace" convert "$work/$shape" "$file" --type "$type"
fi
for layers in 0 "${LAYERS:-5}"; do
  out="$report/$shape-$type-draft-$layers"
  [ -f "$out/report.json" ] || "$outpace" bench "$file" --suite synthetic --out "$out" "${given[@]}" --set "draft_layers=$layers"
done

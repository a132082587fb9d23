#!/usr/bin/env bash
# A dense target: a Qwen3 of the embedded gpt-oss's sizes by its recipes (examples/tiny_target), text and tokenizer, in fewer steps and shorter rows.
# Its MLPs are as wide as the two experts of 160 that a token of that one goes through.
#
#   runs/dense_target.sh [short] [WORK]  # sure of its words, for the comparison of drafts; -> WORK/splice/model
#   runs/dense_target.sh long [WORK]     # learns to look back from random tokens, then text; 8,192 positions; -> WORK/long/model
#   outpace bench WORK/long/model --suite recall --out WORK/report
#
# Every part resumes where it was stopped; a finished one is skipped. CORPUS (a folder) and STEPS, in the environment, are for
# seeing it walk.
set -euo pipefail
cd "$(dirname "$0")/.."
kind="${1:-short}"
work="${2:-work/dense-$kind}"
python="${PYTHON:-.venv/bin/python}"
declare -A recipes=(
  [default]=stage1_all_files [focus]=stage2_few_packages [settle]=stage3_three_packages [splice]=stage4_return
  [echo]=random_rows [recall]=stage5_recall [long]=stage6_long_rows
)
corpus=(${CORPUS:+--corpus "$CORPUS"})

case "$kind" in
  short)
    parts=(default focus settle splice)
    declare -A steps=([default]=300 [focus]=300 [settle]=120 [splice]=150)
    declare -A settings=([focus]="--set row_tokens=512 --set long_row_tokens=1024" [settle]="--set row_tokens=512")
    ;;
  long)
    parts=(default echo echo-256 echo-1024 echo-8192 recall long)
    declare -A steps=([default]=150 [echo]=240 [echo-256]=100 [echo-1024]=60 [echo-8192]=24 [recall]=150 [long]=40)
    # echo-256 is random_rows.toml in longer rows, and so on
    declare -A settings=(
      [echo-256]="--set row_tokens=256"
      [echo-1024]="--set row_tokens=1024"
      [echo-8192]="--set row_tokens=8192 --set step_tokens=8192"
      [long]="--set unlikelihood=0.0"
    )
    ;;
  *)
    echo "dense_target.sh makes a short or a long target, not '$kind': runs/dense_target.sh long [WORK]" >&2
    exit 2
    ;;
esac

from=(--set architecture=Qwen3ForCausalLM --set intermediate_size=320)
for part in "${parts[@]}"; do
  if [ ! -f "$work/$part/model/provenance.json" ]; then
    mkdir -p "$work/$part"
    cp -n outpace/embedded/target/tokenizer.json "$work/$part/tokenizer.json"
    "$python" -m examples.tiny_target.make --recipe "examples/tiny_target/${recipes[${part%-*}]}.toml" --out "$work/$part" "${from[@]}" \
      --set "steps=${STEPS:-${steps[$part]}}" ${settings[$part]-} ${corpus[@]+"${corpus[@]}"}
  fi
  from=(--init "$work/$part/model")
done

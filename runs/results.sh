#!/usr/bin/env bash
# Every report of the embedded model that docs/results.md and its neighbours show, then their tables and pictures.
#
#   make results        # on a machine that does nothing else; about an hour on two cores
#
# A suite that was stopped resumes, and a report of this commit is kept. BUSY=1 measures on a busy machine, too. Reports of
# other machines and builds (AVX2 alone, the shapes of larger models) have their commands in docs/results.md.
set -euo pipefail
cd "$(dirname "$0")/.."
outpace="${OUTPACE:-.venv/bin/outpace}"
python="${PYTHON:-.venv/bin/python}"
commit="$(git rev-parse HEAD)"

if [ -n "$(git status --porcelain -- ':/' ':(top,exclude)reports' ':(top,exclude)docs')" ]; then
  echo "results: there are changes that no commit has: commit them first, since a report names its commit" >&2
  exit 2
fi

quiet() { # whether the load of the last minute is at most half of the cores and one: a suite that has just ended is in it
  "$python" -c 'import os, sys; sys.exit(os.getloadavg()[0] > 0.5 * len(os.sched_getaffinity(0)) + 1)' || [ -n "${BUSY:-}" ]
}

measure() { # the report's folder, and the command that writes it
  local folder="reports/$1"
  shift
  if [ -f "$folder/report.json" ] && grep -q "\"commit\": \"$commit\"" "$folder/report.json"; then
    echo "$folder: of this commit, kept"
    return
  fi
  for _ in 1 2 3 4 5 6 7 8 9 10; do
    if quiet; then
      echo "$folder"
      "$@" --out "$folder"
      return
    fi
    sleep 30
  done
  echo "results: other processes keep the machine busy; try again later, or with BUSY=1" >&2
  exit 1
}

measure answers "$outpace" bench default --suite answers --recipe recipes/drafts/suite-answers.toml
measure speed "$outpace" bench default --set prompts=32 --set baseline_prompts=6
measure tasks "$outpace" bench default --suite tasks
measure tasks-float16 "$outpace" bench default --suite tasks --kv-cache-dtype float16
measure memory-answers "$outpace" bench default --suite memory-answers --set problems=12
measure draft-context "$outpace" bench --suite draft-context --set cell_s=3
measure serve "$outpace" bench default --suite serve
measure soak "$outpace" bench default --suite soak
if "$python" -c 'import llama_cpp' 2> /dev/null; then
  measure llama-cpp "$python" -m benchmarks.against_llama_cpp --repeats 5
  measure llama-cpp/busy "$python" -m benchmarks.against_llama_cpp --repeats 3 --busy
  measure start-up "$python" -m benchmarks.start_up
else
  echo "reports/llama-cpp, reports/start-up: without llama-cpp-python these are left out (make oracle)"
fi
for page in $(grep -l '<!-- table: ' docs/*.md); do "$outpace" tables "$page"; done
"$python" benchmarks/overview.py reports/answers/report.json docs/overview.png

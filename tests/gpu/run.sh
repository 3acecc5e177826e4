#!/bin/bash
# A day with a GPU, by stages that each leave their figures as JSON: tests/gpu/run.sh FOLDER [MODEL.gguf]
#
# Build llama.cpp for CUDA beforehand (`CUDA=1 CUDAARCHS=90 make setup` needs no GPU); its wheel is in the cache. A stage
# that fails leaves its log, and the others run. DRY_RUN=1: on the CPU, as `make test` does it, without the build.
set -u
cd "$(dirname "$0")/../.."
out=${1:?name a folder for the figures}
model=${2:-}
failed=0
mkdir -p "$out"

stage() {
  local name=$1
  shift
  if "$@" >"$out/$name.json" 2>"$out/$name.log"; then
    echo "done    $name"
  else
    failed=1
    echo "failed  $name: $(tail -1 "$out/$name.log")"
  fi
}

if [ -z "${DRY_RUN:-}" ]; then
  CUDA=1 make setup >"$out/setup.log" 2>&1 || { echo "failed  setup: see $out/setup.log"; exit 1; }
fi
python=${PYTHON:-.venv/bin/python}
stage doctor "$python" -m tests.gpu.stages doctor
stage one-stream "$python" -m tests.gpu.stages streams --count 1 $model
stage four-streams "$python" -m tests.gpu.stages streams --count 4 $model
stage heat "$python" -m tests.gpu.stages heat $model
exit $failed

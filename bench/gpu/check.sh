#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds fastcoll on a machine with GPUs, runs every GPU test, then measures.
#   bench/gpu/check.sh [FOLDER]    results go to FOLDER, else to bench/results/<gpu>
# Needs nvcc, torch with CUDA, pytest, pytest-timeout, pybind11 and setuptools; no network. Takes
# less than 9 minutes, as every step has a limit. Writes gpu.json and gpu.png. Exit code: 0 all
# well, 1 something failed, 77 nothing was run because there is no GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Only what is built here, wherever another fastcoll may be installed.
export PYTHONPATH=$work/site PYTHONDONTWRITEBYTECODE=1
export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER

failed=0
step() { # name, limit in seconds, command...
  local name=$1 limit_s=$2 start=$SECONDS code=0
  shift 2
  printf '\n== %s\n' "$name"
  timeout --kill-after 10 "$limit_s" "$@" || code=$?
  [ $code -ne 124 ] || echo "$name: stopped after $limit_s s"
  printf '%s\t%d\t%d\n' "$name" "$code" $((SECONDS - start)) >>"$work/steps.tsv"
  [ $code -eq 0 ] || failed=1
  return $code
}

if ! "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>"$work/err"; then
  echo "no GPU: torch ($python) sees no CUDA device. Nothing was built, run or measured."
  tail -n 1 "$work/err"
  exit 77
fi

step build 110 env FASTCOLL_CUDA=1 "$python" -m pip install --quiet --no-build-isolation --no-deps \
  --no-index --disable-pip-version-check --target "$work/site" . || exit 1
step tests 150 "$python" -m pytest -q -p no:cacheprovider -m gpu --timeout 100 \
  --junit-xml "$work/tests.xml" tests/gpu
if "$python" -c 'import triton' 2>/dev/null; then
  step triton 70 "$python" -m pytest -q -p no:cacheprovider -m gpu --timeout 60 \
    --junit-xml "$work/triton.xml" tests/triton_kernels
else
  printf 'triton\tskip\t0\n' >>"$work/steps.tsv"
fi
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    step "$tool" 35 compute-sanitizer --tool "$tool" --error-exitcode 1 \
      "$python" bench/gpu/small.py
  done
else
  printf 'compute-sanitizer\tskip\t0\n' >>"$work/steps.tsv"
fi
# One group at a time: it may have all of the GPU.
step measure 130 env FASTCOLL_GPU_CHANNELS=64 "$python" bench/gpu/measure.py "$work/measured.json"
"$python" bench/gpu/report.py "$work" ${1+"$1"} || failed=1
exit $failed

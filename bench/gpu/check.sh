#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds fastcoll on a machine with GPUs, runs every GPU test, then measures.
#   bench/gpu/check.sh [--mps] [--within SECONDS] [--commit HASH] [STAGE...] [-o FOLDER]
# STAGE is first, build, smoke, tests, extras, bench (fastcoll alone) or peers (beside other
# libraries); none means all but first. first is for a machine that is lent for ten minutes: it
# builds, shows the calls that work, and measures the figures that matter most. smoke takes a minute
# and shows the calls that work. A stage builds fastcoll if nothing is built, for the GPU that is
# there. build/gpu-check keeps the results of a stage, so a machine can be used stage by stage. Name
# a folder by -o where only such a folder is kept.
# Every run ends with a report of all results so far, a page at most. --within limits the whole
# run: steps are cut short, or left out and named, so that the report comes before the limit.
# --mps runs the tests and measurements of processes under NVIDIA's MPS, whose daemon is started
# and stopped here: without it processes that share a GPU take turns on it. --commit names the
# tested commit where there is no git. Results go to FOLDER, else to bench/results/<gpu>:
# gpu.json, gpu.txt and gpu.png. Needs nvcc, torch with CUDA, pytest, pytest-timeout, pybind11 and
# setuptools; no network. Every stage takes less than 9 minutes, its report included: its steps
# share them, and none has more than its own limit. The other tests run also if one fails, hangs or
# crashes. Exit code: 0 all well, 1 a step failed, was cut short or left out, 2 wrong arguments, 77
# no step was run because there is no GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
work=$PWD/build/gpu-check
out= mps= commit= until_s=86400 stages=()
report_s=30 # the time of the report
kill_s=10   # from the end of a step's limit until it is killed
rest_s=$((report_s + kill_s + 5)) # the time behind the last step; 5: starting Python, the shell
stage_s=$((540 - rest_s)) least_s=10 # a step that has less is not begun
while [ $# -gt 0 ]; do
  case $1 in
    --mps) mps=1 ;;
    --within)
      [[ ${2-} =~ ^[0-9]+$ ]] || { echo "--within needs seconds" && exit 2; }
      until_s=$(($2 - rest_s)) && shift
      ;;
    --commit) commit=${2:?--commit needs a hash} && shift ;;
    -o) out=${2:?-o needs a folder} && shift ;;
    first | build | smoke | tests | extras | bench | peers) stages+=("$1") ;;
    *) echo "unknown argument $1: see the head of this file" && exit 2 ;;
  esac
  shift
done
[ ${#stages[@]} -gt 0 ] || { stages=(build smoke tests extras bench peers) && rm -rf "$work"; }

if ! found=$("$python" -c 'import torch
num_gpus = torch.cuda.device_count()
print(num_gpus, "%d%d" % torch.cuda.get_device_capability() if num_gpus else "")
raise SystemExit(not torch.cuda.is_available())' 2>&1); then
  echo "no GPU: torch ($python) sees no CUDA device. Nothing was built, run or measured."
  tail -n 1 <<<"$found"
  exit 77
fi
read -r num_gpus arch <<<"$(tail -n 1 <<<"$found")" # before it may stand warnings
export FASTCOLL_CUDA_ARCHS=${FASTCOLL_CUDA_ARCHS:-$arch}
mkdir -p "$work"
"$python" -m pip list --format freeze 2>/dev/null |
  grep -iE '^(torch|triton|numpy|pybind11|setuptools|pytest|pytest-timeout|cupy.*|nvidia-nccl.*)==' |
  paste -sd ' '
nvcc --version 2>/dev/null | tail -n 1

# Only what is built here, wherever another fastcoll may be installed.
export PYTHONPATH=$work/site:$PWD/bench/gpu PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# Ranks that are threads: see prepare_gpu_threads in python/fastcoll/env.py.
export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=${CUDA_MODULE_LOADING:-EAGER}
# Ranks that are processes never wait in a kernel of their own context for another one to be
# loaded there, and loading all of torch's would take each of them many seconds.
lazily=(env CUDA_MODULE_LOADING=LAZY)

failed=0
note() { # name, code, seconds: replaces an earlier run's line of the step
  touch "$work/steps.tsv"
  grep -v "^$1	" "$work/steps.tsv" >"$work/steps.new"
  printf '%s\t%s\t%d\n' "$1" "$2" "$3" >>"$work/steps.new"
  mv "$work/steps.new" "$work/steps.tsv"
}
within() { # seconds: no more than are left to the stage
  local left=$((stage_until_s - SECONDS))
  echo $(($1 < left ? $1 : left))
}
step() { # name, limit in seconds, command...
  local name=$1 limit_s start=$SECONDS code=0
  limit_s=$(within "$2")
  shift 2
  if [ "$limit_s" -lt "$least_s" ]; then
    printf '\n== %s: not run, no time is left\n' "$name"
    note "$name" late 0
    failed=1
    return 1
  fi
  printf '\n== %s\n' "$name"
  timeout --kill-after "$kill_s" "$limit_s" "$@" || code=$?
  # 137: it had to be killed, by timeout or because memory ran out.
  [ $code -ne 137 ] || [ $((SECONDS - start)) -lt "$limit_s" ] || code=124
  [ $code -ne 124 ] || echo "$name: stopped after $limit_s s"
  printf '== %s: exit code %d after %d s\n' "$name" $code $((SECONDS - start))
  note "$name" $code $((SECONDS - start))
  [ $code -eq 0 ] || failed=1
  return $code
}
gpu_tests() { # name, limit in seconds, limit of one test, then words before the command, --, and
  # arguments of pytest. Each in a process of its own, as an error of the device ends all that a
  # process can do there.
  local name=$1 limit_s test_s=$3 words=()
  limit_s=$(within "$2")
  shift 3
  while [ "$1" != -- ]; do words+=("$1") && shift; done
  shift
  rm -f "$work/tests-$name.jsonl"
  step "$name" "$limit_s" "${words[@]}" "$python" bench/gpu/run_tests.py \
    "$work/tests-$name.jsonl" $((limit_s - 3)) $((test_s + 30)) \
    -q --tb short -p no:cacheprovider -m gpu --timeout "$test_s" "$@"
}
has_module() { # is not imported: that may take many seconds
  "$python" -c "import sys, importlib.util as util; sys.exit(util.find_spec('$1') is None)"
}

nccl_shares_gpus() { # before 2.30 it refuses two ranks on one GPU
  "$python" -c "from fastcoll.machine import gpu
raise SystemExit(gpu.nccl_version() < gpu.SHARING_NCCL)"
}

# Only what is run through the words in `under_mps` goes through the daemon.
under_mps=()
start_mps() {
  [ -n "$mps" ] || return 1
  [ ${#under_mps[@]} -eq 0 ] || return 0
  command -v nvidia-cuda-mps-control >/dev/null || return 1
  mkdir -p "$work/mps" "$work/mps-log"
  local words=(env CUDA_MPS_PIPE_DIRECTORY="$work/mps" CUDA_MPS_LOG_DIRECTORY="$work/mps-log")
  "${words[@]}" nvidia-cuda-mps-control -d || return 1
  under_mps=("${words[@]}")
  trap 'echo quit | "${under_mps[@]}" nvidia-cuda-mps-control >/dev/null' EXIT
}

beside() { # name, limit in seconds, arguments of fastcoll bench: its calls beside other libraries'
  local name=$1 limit_s=$2
  shift 2
  step "$name" "$limit_s" "${under_mps[@]}" "${lazily[@]}" "$python" -m fastcoll bench all_reduce \
    --device cuda --rounds 2 "$@" --json "$work/$name.json"
}
carrier() { # ranks: all_reduce that NCCL carries and adds, beside torch's call of the same
  beside "carrier-$1" 40 --ranks "$1" --algorithm nccl --numerics fast --vs nccl_default \
    --sizes 8,4K,256K,16M
}

build() {
  rm -rf "$work/site"
  step build 280 env FASTCOLL_CUDA=1 "$python" -m pip install --quiet --no-build-isolation \
    --no-deps --no-index --disable-pip-version-check --upgrade --target "$work/site" .
}
programs() { # those of CUDA C++ alone, side by side
  local flags=(-std=c++20 -O3 -fmad=false --expt-relaxed-constexpr -Icsrc -Ikernels -Ibench/gpu)
  rm -f "$work/queues" "$work/one_grid"
  step programs 90 bash -c 'for name in queues one_grid; do
    nvcc "$@" -o "$0/$name" "bench/gpu/$name.cu" & jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || exit; done' "$work" "${flags[@]}" -arch="sm_$arch"
}
prints() { # name, limit in seconds, command that prints the JSON of a step
  local name=$1 limit_s=$2
  shift 2
  step "$name" "$limit_s" bash -c '"$@" >"$0"' "$work/$name.json" "$@"
}
first() {
  [ -x "$work/one_grid" ] || programs
  prints queues 20 "$work/queues"
  smoke
  step one_grid-check 30 "$work/one_grid" check 40000 2 3 8
  prints one_grid 60 "$work/one_grid" time 67108864 2 8
  step kernels 60 "$python" bench/gpu/kernels.py "$work/kernels.json" first
  measure 100 first
}
measure() { # limit in seconds, then more arguments
  local limit_s=$1 sampler=
  shift
  # The clocks that the figures belong to.
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu \
      --format=csv,noheader,nounits -lms 500 >"$work/clocks.csv" 2>/dev/null &
    sampler=$!
  fi
  # One group at a time: it may have all of the GPU.
  step measure "$limit_s" env FASTCOLL_GPU_CHANNELS=64 "$python" bench/gpu/measure.py \
    "$work/measured.json" "$@"
  [ -z "$sampler" ] || { kill "$sampler" && wait "$sampler"; } 2>/dev/null
}
smoke() {
  # The start-up time of every process below.
  step context 60 "$python" -c "import time, torch; begin = time.monotonic()
torch.zeros(1, device='cuda')
print(f'a context with all of torch\'s kernels takes {time.monotonic() - begin:.1f} s')"
  gpu_tests smoke 90 25 -- tests/gpu/test_smoke.py
  gpu_tests smoke-processes 40 30 "${lazily[@]}" -- tests/gpu/test_processes.py -k cpus_bits
}
tests() {
  gpu_tests exact 200 60 -- tests/contract/test_values.py tests/contract/test_gpu_parts.py \
    tests/gpu/test_exact.py
  gpu_tests graphs 50 30 -- tests/gpu/test_graphs.py
  gpu_tests streams 50 30 -- tests/gpu/test_streams.py
  gpu_tests shapes 40 30 -- tests/gpu/test_shapes.py
  gpu_tests arrays 60 40 -- tests/gpu/test_arrays.py # skipped without CuPy
  # Of one GPU, or of GPUs without a switch that adds, most of these are skipped, and listed so.
  gpu_tests multimem 90 60 "${lazily[@]}" -- tests/gpu/test_multimem.py
  gpu_tests failures 80 30 -- tests/gpu/test_failures.py
  gpu_tests nccl 120 80 "${lazily[@]}" -- tests/gpu/test_nccl.py
  # The first file is skipped, and listed so, where NCCL has no two GPUs.
  gpu_tests nodes 120 80 "${lazily[@]}" -- tests/gpu/test_nodes.py tests/gpu/test_node_sends.py
  gpu_tests processes 140 80 "${lazily[@]}" -- tests/gpu/test_processes.py
}
extras() {
  # report.py lists tests that the machine can't run as "skipped: not there", never as passed.
  if has_module triton; then gpu_tests triton 150 60 -- tests/triton; else note triton skip 0; fi
  gpu_tests copies 60 30 -- tests/gpu/test_copies.py
  if command -v compute-sanitizer >/dev/null; then
    [ -x "$work/one_grid" ] || programs
    for tool in memcheck racecheck synccheck; do
      step "$tool" 40 compute-sanitizer --tool "$tool" --error-exitcode 1 \
        "$work/one_grid" check 4096 2
    done
  else
    note compute-sanitizer skip 0
  fi
  if has_module jsonschema; then
    step tune 100 "$python" -m fastcoll tune --device cuda --out "$work/tuning.json" \
      --sizes 4K,256K,16M --minutes 1.2
  else
    note tune skip 0
  fi
  if start_mps; then
    gpu_tests processes-mps 100 60 "${under_mps[@]}" "${lazily[@]}" -- tests/gpu/test_processes.py
  else  # only with --mps, where the machine has the daemon
    note processes-mps skip 0
  fi
}
bench() {
  measure 200
  step kernels 150 "$python" bench/gpu/kernels.py "$work/kernels.json"
  if has_module triton; then
    step fused 110 "$python" bench/gpu/fused.py "$work/fused.json"
  else
    note fused skip 0
  fi
}
peers() {
  # Through NCCL, fastcoll's calls beside torch's: alone, where NCCL has no peer, and two ranks.
  carrier 1
  # Beside other libraries: ranks are processes, which only MPS lets run together on one GPU.
  local ranks=$((num_gpus < 8 ? num_gpus : 8))
  if [ "$ranks" -lt 2 ]; then
    ranks=2
    # Without it they would take turns: meaningless times.
    if ! start_mps; then
      note carrier-2 skip 0
      note versus skip 0
      return
    fi
  fi
  if [ "$num_gpus" -ge 2 ] || nccl_shares_gpus; then carrier 2; else note carrier-2 skip 0; fi
  beside versus 240 --vs nccl,symm_mem,cupy --ranks "$ranks" --sizes 8:64M:8
}

for stage in "${stages[@]}"; do
  start=$SECONDS
  stage_until_s=$((SECONDS + stage_s < until_s ? SECONDS + stage_s : until_s))
  if [ "$stage" != build ] && [ ! -d "$work/site/fastcoll" ]; then build; fi
  [ "$stage" != build ] && [ ! -d "$work/site/fastcoll" ] || "$stage"
  printf '\n== stage %s: %d s\n' "$stage" $((SECONDS - start))
  if [ ! -d "$work/site/fastcoll" ]; then
    echo "nothing is built here, and nothing can be run"
    failed=1
    break
  fi
done
timeout --signal KILL "$report_s" "$python" bench/gpu/report.py "$work" "$out" "$commit" || failed=1
exit $failed

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures every published figure on this machine and holds them against the goals.
#   bench/publish.sh MACHINE       results go to bench/results/MACHINE
# Takes an hour on 2 cores, a third of it company.py: an estimate. Nothing else should run meanwhile.
# bench/setup_mpi.sh first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ $# -eq 1 ] || {
  echo "usage: bench/publish.sh MACHINE" >&2
  exit 2
}
out=bench/results/$1
bench() { # file, arguments of fastcoll bench all_reduce...
  local file=$out/$1
  shift
  echo "== $file"
  fastcoll bench all_reduce "$@" --json "$file.json" --plot "$file.png"
}

mpis=openmpi,mpich,intelmpi
bench python-float32 --sizes 8:256M:4 --vs "gloo,core,$mpis"
bench python-bfloat16 --sizes 8:256M:4 --vs gloo --dtype bfloat16
bench python-symmetric --sizes 512K:256M:4 --vs gloo --symmetric
python bench/memory_floor.py "$out/memory.json"
bench python-async --sizes 8:8M:4 --vs "gloo,$mpis" --async-op
bench c-float32 --sizes 8:256M:4 --vs "$mpis" --level c
bench c-symmetric --sizes 128K:256M:4 --vs "$mpis" --level c --symmetric
bench python-4ranks --ranks 4 --sizes 8:32M:4 --vs gloo
for verb in reduce_scatter reduce all_gather gather scatter all_to_all broadcast sendrecv barrier; do
  echo "== $out/$verb"
  fastcoll bench "$verb" --sizes 8,512,4K,64K,1M,16M,64M --vs "gloo,$mpis" --json "$out/$verb.json"
done
for verb in reduce_scatter reduce all_gather gather scatter all_to_all broadcast sendrecv; do
  echo "== $out/c-$verb"
  fastcoll bench "$verb" --level c --sizes 4K,64K,1M,16M,64M --vs "$mpis" --json "$out/c-$verb.json"
done
python bench/schedules.py "$out/schedules.md"
python bench/lists.py "$out/lists.json"
python bench/forms.py "$out/forms.json"
python bench/rows.py "$out/rows.json"
python bench/coding.py "$out/coding.json"
fastcoll build # before it is measured
python bench/torch_calls.py "$out/torch.json"
python bench/compiled.py "$out/compiled.json"
python bench/company.py "$out/company.json"
fastcoll regret --json "$out/regret.json"
tuning=$(mktemp)
fastcoll tune --out "$tuning"
FASTCOLL_TUNING=$tuning fastcoll regret --json "$out/regret-tuned.json"
if [ "$(id -u)" = 0 ]; then # it makes network namespaces
  python bench/hierarchical.py --json "$out/hierarchical.json"
  python bench/hierarchical.py --pipelining --json "$out/pipelining.json"
  python bench/wire.py --json "$out/wire.json"
fi
fastcoll demo --json "$out/demo.json" --plot "$out/demo.png"
fastcoll demo --params 25M --json "$out/demo-25M.json" --plot "$out/demo-25M.png"
python bench/summary.py
python bench/targets.py "$out"

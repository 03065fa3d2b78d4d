#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the checkout into a virtual environment and runs what takes too long for every change:
# all tests, with the proofs of unchanged files; the mutations of the protocol, the soak under kills
# and stops, the fuzzers; other people's programs; the quick suite on each torch and each Python that
# fastcoll is for. A Python that this machine lacks is named, and fails nothing.
#   scripts/nightly.sh               about two hours: a seventh of the mutations, another each night
#   scripts/nightly.sh --shard 0/1   all of them
# Arguments go to tests/protocol/native/mutate.py. All parts run, whatever the ones before found.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup_venv.sh

[ $# -gt 0 ] || set -- --shard "$(($(date +%s) / 86400 % 7))/7"
failed=()
absent=()
part() { # name command...
  printf '\n== %s (%d s) ==\n' "$1" "$SECONDS"
  "${@:2}" || failed+=("$1")
}

# In an environment of their own, as they bring packages that the other parts must not meet.
real_programs() { # list of packages, constraints or nothing, tests...
  (
    FASTCOLL_VENV=${FASTCOLL_VENV:-$PWD/.venv}-$1
    install_checkout test
    # Without constraints.txt where it holds another version than the programs want.
    pip install -q ${2:+-c "$2"} -r "tests/programs/$1.txt"
    REAL_PROGRAMS=1 pytest -q "${@:3}"
  )
}

install_checkout test
part "all tests" scripts/test.sh --all --installed
part "mutations" python -m tests.protocol.native.mutate "$@"
part "soak" python -m tests.faults.soak --seconds 600
part "growth" python -m tests.faults.soak_flat --seconds 600
part "long training" env TRAINING_STEPS=2000 python -m pytest -q tests/nodes/test_compressed_gradients.py
part "kills" python -m tests.faults.soak --kills 200
part "fuzz what peers send" python -m tests.faults.fuzz --seconds 300
part "fuzz what C++ reads" python -m tests.protocol.native.fuzz_bytes --seconds 300
part "real programs" real_programs nightly constraints.txt \
  tests/programs --ignore=tests/programs/test_titans.py
part "torchtitan" real_programs titans "" tests/programs/test_titans.py
# constraints.txt has the torch of CI, so these are the others.
for torch in 2.11.0 2.12.0 2.14.0 2.15.0; do
  part "torch $torch" env "FASTCOLL_TORCH=$torch" \
    "FASTCOLL_VENV=${FASTCOLL_VENV:-$PWD/.venv}-torch-$torch" scripts/test.sh --quick
done
for python in python3.11 python3.12 python3.13 python3.14; do
  if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    part "$python" env "PYTHON=$python" \
      "FASTCOLL_VENV=${FASTCOLL_VENV:-$PWD/.venv}-$python" scripts/test.sh --quick
  else
    absent+=("$python")
  fi
done

[ ${#absent[@]} -eq 0 ] || printf 'NOT RUN, not installed: %s\n' "${absent[@]}" >&2
if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}" >&2
  exit 1
fi

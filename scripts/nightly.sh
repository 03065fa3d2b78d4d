#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the checkout into a virtual environment and runs what takes too long for every change:
# all tests, with the proofs of unchanged files; the mutations of the protocol, the soak under kills
# and stops, the fuzzers; the quick suite on the oldest torch.
#   scripts/nightly.sh               about two hours: a seventh of the mutations, another each night
#   scripts/nightly.sh --shard 0/1   all of them
# Arguments go to tests/protocol/native/mutate.py. All parts run, whatever the ones before found.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup_venv.sh

[ $# -gt 0 ] || set -- --shard "$(($(date +%s) / 86400 % 7))/7"
failed=()
part() { # name command...
  printf '\n== %s (%d s) ==\n' "$1" "$SECONDS"
  "${@:2}" || failed+=("$1")
}

install_checkout test
part "all tests" scripts/test.sh --all --installed
part "mutations" python -m tests.protocol.native.mutate "$@"
part "soak" python -m tests.faults.soak --seconds 600
part "growth" python -m tests.faults.soak_flat --seconds 600
part "kills" python -m tests.faults.soak --kills 200
part "fuzz what peers send" python tests/faults/fuzz.py --seconds 300
part "fuzz what C++ reads" python tests/protocol/native/fuzz_bytes.py --seconds 300
part "the oldest torch" env FASTCOLL_TORCH=2.11.0 \
  FASTCOLL_VENV="${FASTCOLL_VENV:-$PWD/.venv}-torch-2.11" scripts/test.sh

if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}" >&2
  exit 1
fi

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the checkout into a virtual environment and runs the tests.
#   scripts/test.sh          the quick suite
#   scripts/test.sh --rest   what the quick suite leaves out: slow tests, native C++ programs
#   scripts/test.sh --all    both
# Behind these, --installed: in the environment as it is. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup_venv.sh

select=(-m "not slow and not native")
case ${1:-} in
  --all) select=(); shift ;;
  --rest) select=(-m "slow or native"); shift ;;
esac

if [ "${1:-}" = --installed ]; then
  shift
else
  install_checkout test
fi
# Three files at a time: that keeps two cores busy, and each worker collects all tests and has ranks
# of its own. Whole files: they share ranks and builds. In the order of tests/durations.py.
exec python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder "${select[@]}" "$@"

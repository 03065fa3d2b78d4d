#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the checkout into a virtual environment and runs the tests.
#   scripts/test.sh          the short suite: the quick one without the tests marked long
#   scripts/test.sh --quick  the quick suite: all tests but those marked slow or native
#   scripts/test.sh --rest   what the short suite leaves out: tests marked long, slow or native
#   scripts/test.sh --all    everything
# Behind these, --installed: in the environment as it is. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup_venv.sh

select=(-m "not long and not slow and not native")
left_out="tests marked long (--quick runs them), slow or native (--all)"
case ${1:-} in
  --all) select=(); left_out=; shift ;;
  --quick) select=(-m "not slow and not native"); left_out="tests marked slow or native"; shift ;;
  --rest) select=(-m "long or slow or native"); left_out="the short suite"; shift ;;
esac

if [ "${1:-}" = --installed ]; then
  shift
else
  install_checkout test
fi
[ -z "$left_out" ] || echo "Left out: $left_out"
# Three files at a time, one that computes and two whose ranks wait, in the order of
# tests/durations.py: two left 19 % of the CPUs idle. Each worker collects all tests and has ranks
# of its own. Whole files: they share ranks and builds.
exec python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder "${select[@]}" "$@"

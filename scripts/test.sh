#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the checkout into a virtual environment and runs the tests.
#   scripts/test.sh          the quick suite
#   scripts/test.sh --rest   what the quick suite leaves out: slow tests, native C++ programs
#   scripts/test.sh --all    both
# Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup_venv.sh

# Several files at a time, on two cores: much of a test is waiting, most in the rest; but each worker
# collects all tests and has ranks of its own.
select=(-m "not slow and not native") workers=3
case ${1:-} in
  --all) select=(); shift ;;
  --rest) select=(-m "slow or native") workers=4; shift ;;
esac

install_checkout test
# Whole files: they share ranks and builds. In the order of tests/conftest.py.
exec python -m pytest -q -n "$workers" --dist loadfile --no-loadscope-reorder "${select[@]}" "$@"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the checkout into a virtual environment and trains a small network on two ranks, its
# gradients averaged by fastcoll and by Gloo. Arguments go to `fastcoll demo`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup_venv.sh

[ $# -gt 0 ] || set -- --ranks 2
install_checkout demo
exec fastcoll demo "$@"

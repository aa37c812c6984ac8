#!/usr/bin/env bash
# Installs the peers that mccs is compared with, as they are shipped: Open MPI, Gloo (in PyTorch)
# and iperf3 from Debian, Intel MPI from PyPI into a folder outside the repository, given as the
# argument. Needs root for apt-get. Can be run again.
set -euo pipefail
folder="${1:?usage: install.sh FOLDER}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends openmpi-bin libopenmpi-dev python3-torch iperf3 > /dev/null
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet impi-rt==2021.18.0 impi-devel==2021.18.0
cc -O2 "$(dirname "$0")/mpi_bench.c" -o "$folder/bench_openmpi" $(pkg-config --cflags --libs ompi-c)
cc -O2 "$(dirname "$0")/mpi_bench.c" -o "$folder/bench_impi" -I "$folder/include" -L "$folder/lib" \
    -Wl,-rpath,"$folder/lib" -lmpi
echo "peers are installed in $folder"

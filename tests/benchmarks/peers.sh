#!/usr/bin/env bash
# Compares mpickpt with its peers: bash tests/benchmarks/peers.sh [arguments]
#
# Works on a bare Debian or Ubuntu machine with Python 3.11 or later. It makes
# .venv-peers in this clone (or MPICKPT_PEERS_VENV) with PyTorch, Open MPI and, where
# apt-get is there to bring what it takes, an h5py that writes one file from many
# ranks. MPICKPT_PEERS_RANKS is the number of ranks, 2 unless given. The arguments go
# to tests/benchmarks/peers: try --help. --setup-only measures nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly TORCH="torch==2.13.0+cpu"
readonly TORCH_INDEX=https://download.pytorch.org/whl/cpu
readonly SETUP_TIMEOUT_S=1200
readonly PARALLEL_HDF5=(libhdf5-openmpi-dev libopenmpi-dev openmpi-bin)
readonly OPENMPI_HDF5=/usr/lib/x86_64-linux-gnu/hdf5/openmpi

venv=${MPICKPT_PEERS_VENV:-$PWD/.venv-peers}

install() {
    timeout "$SETUP_TIMEOUT_S" "$venv/bin/python" -m pip install \
        --quiet --disable-pip-version-check "$@"
}

# The plain wheel on PyPI brings gigabytes of CUDA.
install_torch() {
    install "$TORCH" 2>/dev/null || install --extra-index-url "$TORCH_INDEX" "$TORCH"
}

has_parallel_hdf5() {
    "$venv/bin/python" -c 'import h5py, sys; sys.exit(not h5py.get_config().mpi)' \
        2>/dev/null
}

# Without both flags pip takes the wheel, which writes from one process only.
install_parallel_h5py() {
    has_parallel_hdf5 && return
    if [ ! -d "$OPENMPI_HDF5" ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends \
            "${PARALLEL_HDF5[@]}" build-essential >/dev/null
    fi
    CC=mpicc.openmpi HDF5_MPI=ON HDF5_DIR=$OPENMPI_HDF5 install \
        --no-build-isolation --no-cache-dir --force-reinstall --no-deps \
        --no-binary=h5py h5py && has_parallel_hdf5
}

make_environment() {
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    local digest
    digest="$(cat pyproject.toml "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1) $PWD"
    [ "$(cat "$venv/.mpickpt-stamp" 2>/dev/null)" = "$digest" ] && return
    install --editable ".[openmpi]" "cython>=3.1" pkgconfig "setuptools>=77" wheel
    install_torch
    if ! install_parallel_h5py >"$venv/parallel-h5py.log" 2>&1; then
        echo "peers.sh: no parallel HDF5, see $venv/parallel-h5py.log" >&2
        has_h5py || install --force-reinstall --no-deps h5py
    fi
    echo "$digest" >"$venv/.mpickpt-stamp"
}

has_h5py() {
    "$venv/bin/python" -c 'import h5py' 2>/dev/null
}

make_environment
[ "${1:-}" = --setup-only ] && exit

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_btl=self,sm OMPI_MCA_pml=ob1
# DCP and the compute loop take one core of a rank, as on a cluster with a core each.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$venv/bin/mpiexec" -n "${MPICKPT_PEERS_RANKS:-2}" \
    "$venv/bin/python" -m tests.benchmarks.peers "$@"

#!/usr/bin/env bash
# Compares mpickpt.torch with PyTorch DCP: bash tests/benchmarks/torch_peers.sh [arguments]
#
# Both save and load one FSDP2 model with its optimizer, in the environment that
# peers.sh makes. MPICKPT_PEERS_RANKS is the number of ranks, 2 unless given. The
# arguments go to tests/benchmarks/torch_peers.py: try --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

bash tests/benchmarks/peers.sh --setup-only
venv=${MPICKPT_PEERS_VENV:-$PWD/.venv-peers}

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_btl=self,sm OMPI_MCA_pml=ob1
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$venv/bin/mpiexec" -n "${MPICKPT_PEERS_RANKS:-2}" \
    "$venv/bin/python" -m tests.benchmarks.torch_peers "$@"

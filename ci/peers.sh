#!/usr/bin/env bash
# Set up the `peers` extra in an environment of its own, then hold transformers to the laws and
# the ledger, and our bitmasks against xgrammar's.
#
#   bash ci/peers.sh       PEERS_VENV: where the environment lies, .venv-peers by default
#
# About 2 GB on disk; 2 to 3 min, one thread. The pins are those of the traces: one transformers for both.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${PEERS_VENV:-.venv-peers}

# The stamp is written last: a set-up that was cut short is done again, not taken for whole.
stamp=$venv/.ready-$(cat constraints.txt ci/constraints-traces.txt pyproject.toml | sha256sum | cut -c1-16)
if [[ ! -e $stamp ]]; then
  "${PYTHON:-python3}" -m venv "$venv"
  # torch first and by its exact version: resolved along with transformers, pip may fetch a CUDA build.
  "$venv/bin/pip" install -q "$(grep -E '^torch==' constraints.txt)"
  "$venv/bin/pip" install -q -c constraints.txt -c ci/constraints-traces.txt -e '.[peers]'
  touch "$stamp"
fi

export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
exec "$venv/bin/python" -m pytest -p no:cacheprovider tests/test_peers.py tests/test_xgrammar.py

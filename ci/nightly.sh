#!/usr/bin/env bash
# The nightly campaign: `treeconv fuzz` over everything, on a copy of corpus/ that the nights share.
#
#   ci/nightly.sh [options of treeconv fuzz]
#
# SECONDS_TO_SEARCH (1500), NIGHTLY (.treeconv/nightly: the copy and the reports; cache it), VENV (.venv).
# Exit code 1: something was found. Move its case from NIGHTLY/corpus/regressions/ to corpus/regressions/.
set -euo pipefail
cd "$(dirname "$0")/.."

nightly=${NIGHTLY:-.treeconv/nightly}
venv=${VENV:-.venv}
make --quiet setup VENV="$venv"
# Coverage for the parsers; without it plain Hypothesis searches them, and the first lines say so.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]' \
  --config-settings editable_mode=compat ||
  echo "no atheris here"

mkdir -p "$nightly/corpus"
cp -R corpus/. "$nightly/corpus/"
exec "$venv/bin/python" -m treeconv fuzz \
  --seconds "${SECONDS_TO_SEARCH:-1500}" --campaign all --corpus "$nightly/corpus" \
  --junit "$nightly/junit.xml" --summary "$nightly/summary.md" "$@"

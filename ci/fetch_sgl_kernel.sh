#!/usr/bin/env bash
# Unpack SGLang's real verification kernel where the laws can import it.
#
#   ci/fetch_sgl_kernel.sh [wheel]        then: PYTHONPATH=.carry/sgl python -m treeconv ...
#
# Takes the wheel given, or gets sglang-kernel 0.4.5 with pip's own configuration and without dependencies
# (383 MB). Only the Python files and one architecture's operators are needed: 19 MB under .carry/sgl, which
# git ignores. TREECONV_SGL_ARCH is sm90 on Hopper and sm100 on everything else, as the package itself
# chooses; without it, the GPU here decides, or sm90 where there is none.
# 0.4.5 imports under torch 2.11 + CUDA 13.0; 0.4.7 does not, and 0.4.8 and later no longer hold the operator.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.4.5
target=${TREECONV_SGL_DIR:-.carry/sgl}
arch=${TREECONV_SGL_ARCH:-}
if [ -z "$arch" ]; then
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 || true)
  case "$capability" in
    "" | 9.*) arch=sm90 ;;
    *) arch=sm100 ;;
  esac
fi

mkdir -p "$target"
beside=$(mktemp -d "$target/.unpacked.XXXXXX") # on the same disk: what is there is left alone until the end
download=
trap 'rm -rf "$beside" ${download:+"$download"}' EXIT

wheel=${1:-}
if [ -z "$wheel" ]; then
  download=$(mktemp -d)
  # abi3: one wheel for every Python from 3.10 on.
  "${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --dest "$download" \
    --python-version 3.10 --implementation cp --abi abi3 --platform manylinux2014_x86_64 \
    "sglang-kernel==$version"
  wheel=$(echo "$download"/*.whl)
fi

said=$("${PYTHON:-python3}" - "$wheel" "$beside/new" "$arch" <<'PY'
import sys
import zipfile

wheel, target, arch = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    wanted = [
        name
        for name in archive.namelist()
        if name.startswith("sgl_kernel/") and (name.endswith(".py") or name.startswith(f"sgl_kernel/{arch}/"))
    ]
    if not any(f"/{arch}/" in name for name in wanted):
        sys.exit(f"{wheel} holds no operators for {arch}")
    for name in wanted:
        archive.extract(name, target)
    size = sum(archive.getinfo(name).file_size for name in wanted)
print(f"{len(wanted)} files, {size / 1e6:.0f} MB, {arch}")
PY
)
if [ -e "$target/sgl_kernel" ]; then
  mv "$target/sgl_kernel" "$beside/old"
fi
mv "$beside/new/sgl_kernel" "$target/sgl_kernel"
echo "$said -> $target"

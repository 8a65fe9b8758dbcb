#!/bin/sh
# Builds libeyas_cuda.so with nvcc alone, for machines without CMake.
#   native/build_cuda.sh OUT.so [ARCH...]      ARCH: 90 120 ... (default: 80 89 90 100 103 120 121, and PTX of 120)
set -e
here=$(cd "$(dirname "$0")" && pwd)
out=$1
shift
if [ $# -eq 0 ]; then
  set -- 80 89 90 100 103 120 121
  codes="-gencode arch=compute_120,code=compute_120"
fi
for arch in "$@"; do codes="$codes -gencode arch=compute_$arch,code=sm_$arch"; done
if nvcc --help | grep -q -e --compress-mode; then codes="$codes --compress-mode=size"; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
find "$here/src/cuda" -name '*.cu' | xargs -P "${MAX_JOBS:-$(nproc)}" -I{} sh -c \
  'nvcc -std=c++17 -O3 -I"'"$here"'/include" -I"'"$here"'/src/cuda" '"$codes"' -Xcompiler -fPIC,-fvisibility=hidden '"$NVCC_FLAGS"' \
   -c "{}" -o "'"$work"'/$(basename {}).o"'
nvcc -shared -cudart static -Xcompiler -fvisibility=hidden -Xlinker --exclude-libs,ALL -o "$out" "$work"/*.o

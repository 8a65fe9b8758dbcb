#!/bin/bash
# What a GPU host runs after a change of the CUDA kernels: correctness, then all comparisons. About 150 s on an H200.
#
#   benchmarks/check_kernels.sh OUT_FOLDER
#
# Needs the package installed with its CUDA library (or EYAS_CUDA_LIBRARY naming one, see native/build_cuda.sh), torch and
# triton; for the comparisons nvcc, sglang and flashinfer; compute-sanitizer where there is one. Writes fuzz.txt,
# sanitizer.txt and verify_attention.json. Exit code 1 when a kernel is wrong; what was measured then is not worth reading.
set -u
out=${1:?an output folder}
here=$(cd "$(dirname "$0")" && pwd)
fuzz="python $here/../tests/native/cuda_fuzz.py"
mkdir -p "$out"
started=$SECONDS
say() { echo "== $1, $((SECONDS - started)) s"; }

# FlashInfer compiles its kernel in the meantime.
nice -n 19 python - > "$out/flashinfer.txt" 2>&1 <<'PYTHON' &
import flashinfer, torch
run = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"), backend="fa2")
index = lambda *values: torch.tensor(values, device="cuda", dtype=torch.int32)
run.plan(index(0, 4), index(0, 1), index(0), index(16), 64, 8, 128, 16, q_data_type=torch.bfloat16,
         custom_mask=torch.ones(64, dtype=torch.bool, device="cuda"), kv_data_type=torch.bfloat16)
run.run(*(torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for shape in ((4, 64, 128), (1, 2, 16, 8, 128))))
PYTHON
compiling=$!

say "random cases against float64"
$fuzz --cases 2000 --seconds 5 --seed "${SEED:-1}" | tee "$out/fuzz.txt"
wrong=${PIPESTATUS[0]}
if command -v compute-sanitizer > /dev/null; then
  say "memory accesses"
  timeout 90 compute-sanitizer --tool memcheck --error-exitcode 1 $fuzz --cases 2 --only tree_attn_gqa > "$out/sanitizer.txt" 2>&1 || wrong=1
  tail -3 "$out/sanitizer.txt"
fi
wait $compiling
say "comparisons"
python "$here/verify_attention.py" --out "$out/verify_attention.json" || wrong=1
say "done, $([ "$wrong" = 0 ] && echo all agree || echo WRONG)"
exit "$wrong"

// Host side shared by the launchers: argument checks, device limits, launch attributes.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>

#include "attention.cuh"

namespace eyas {

struct Device {
  int sm_count, smem_bytes, capability;
};
int current_device(Device *d);  // 0 or a cudaError_t

inline bool aligned16(const void *p) { return (reinterpret_cast<uintptr_t>(p) & 15) == 0; }

// Checks what the two attention calls have in common; `dk`, `dv` are the widths of a key and of a result.
int check_attention(const eyas_attn &a, int dk, int dv);

// Bytes of the partial results, in the order part_out, part_stat.
inline uint64_t partial_rows(const eyas_attn &a) { return (uint64_t)a.batch * a.max_tree * a.num_q_heads; }
inline uint64_t workspace_bytes(const eyas_attn &a, int dv) {
  return a.num_splits <= 1 ? 0 : a.num_splits * partial_rows(a) * (dv * sizeof(__half) + sizeof(float2));
}
inline AttnParams make_params(const eyas_attn &a, int dv) {
  AttnParams p;
  p.a = a;
  p.scale_log2 = a.scale * 1.44269504089f * (a.kv_dtype == EYAS_E4M3 ? a.k_scale : 1.f);
  if (a.kv_dtype != EYAS_E4M3) p.a.v_scale = 1.f;
  p.part_out = (__half *)a.workspace;
  p.part_stat = (float2 *)((char *)a.workspace + a.num_splits * partial_rows(a) * dv * sizeof(__half));
  return p;
}

// Splits per request that make `blocks` blocks per split fill `sm_count` blocks at a time best. Every wave costs its keys
// plus a fixed part worth about 256 keys (start, queries, merge, partial results).
int choose_splits(int blocks, int sm_count, int keys, int min_keys);

// Queues the merge of the partial results of a launch whose key tiles held `tile` keys.
int launch_combine(const AttnParams &p, int dv, int tile);

template <class Kernel> int launch_attention(Kernel kernel, dim3 grid, int threads, int smem, const AttnParams &p) {
  cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  if (e != cudaSuccess) return (int)e;
  kernel<<<grid, threads, smem, (cudaStream_t)p.a.stream>>>(p);
  return (int)cudaGetLastError();
}

}  // namespace eyas

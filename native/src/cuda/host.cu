// Argument checks, device limits and error texts of the C ABI.
#include "host.h"

namespace eyas {

int current_device(Device *d) {
  int device = 0, major = 0, minor = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&d->sm_count, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&d->smem_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  d->capability = 10 * major + minor;
  return (int)e;
}

int check_attention(const eyas_attn &a, int dk, int dv) {
  if (a.struct_size != sizeof(eyas_attn)) return EYAS_BAD_STRUCT;
  if (a.q_dtype != EYAS_BF16 && a.q_dtype != EYAS_FP16) return EYAS_BAD_DTYPE;
  if (a.kv_dtype != a.q_dtype && a.kv_dtype != EYAS_E4M3) return EYAS_BAD_DTYPE;
  if (a.batch < 1 || a.batch > 65535) return EYAS_BAD_BATCH;
  if (a.max_tree < 1 || a.max_tree > 256) return EYAS_BAD_TREE;
  if (a.tree_keys < 0 || a.tree_keys > 256 || (a.tree_keys && (!a.mask || a.window || a.positions))) return EYAS_BAD_TREE_KEYS;
  const int tree = a.tree_keys ? a.tree_keys : a.max_tree;
  if (a.mask && (a.mask_words < (tree + 31) / 32 || a.mask_stride_batch < 0)) return EYAS_BAD_TREE;
  if (a.num_kv_heads < 1 || a.num_q_heads < 1 || a.num_q_heads % a.num_kv_heads) return EYAS_BAD_HEADS;
  if (a.page_size < 1) return EYAS_BAD_PAGE;
  if (!(a.scale > 0.f)) return EYAS_BAD_SCALE;
  if (a.kv_dtype == EYAS_E4M3 && !(a.k_scale > 0.f && a.v_scale > 0.f)) return EYAS_BAD_SCALE;
  if (a.window < 0 || (a.window > 0 && !a.positions)) return EYAS_BAD_WINDOW;
  if (!a.q || !a.out || !a.k || !a.kv_index || !a.seq_lens) return EYAS_BAD_POINTER;
  if (!aligned16(a.q) || !aligned16(a.out) || !aligned16(a.k) || !aligned16(a.v)) return EYAS_BAD_ALIGN;
  const int64_t key = a.kv_dtype == EYAS_E4M3 ? 15 : 7;  // strides keep 16-byte pieces aligned
  if ((a.kv_stride_token | a.kv_stride_head | a.kv_stride_page) & key) return EYAS_BAD_STRIDE;
  if ((a.q_stride_token | a.q_stride_head) & 7 || (a.out_stride_token | a.out_stride_head) & 1) return EYAS_BAD_STRIDE;
  if (a.kv_stride_token < dk || a.q_stride_head < dk || a.out_stride_head < dv) return EYAS_BAD_STRIDE;
  return 0;
}

int choose_splits(int blocks, int sm_count, int keys, int min_keys) {
  const int most = std::max(1, std::min({keys / min_keys, 4 * sm_count, 256}));
  long best = -1;
  int chosen = 1;
  for (int s = 1; s <= most; ++s) {
    const long waves = ((long)blocks * s + sm_count - 1) / sm_count;
    const long cost = waves * ((keys + s - 1) / s + 256) + (s > 1 ? 128 + 2 * s : 0);
    if (best < 0 || cost < best) best = cost, chosen = s;
  }
  return chosen;
}

}  // namespace eyas

extern "C" {

int eyas_cuda_version(void) { return EYAS_CUDA_ABI; }

const char *eyas_cuda_error_text(int code) {
  switch (code) {
    case 0: return "success";
    case EYAS_BAD_STRUCT: return "struct_size: library and caller were built from different headers";
    case EYAS_BAD_DTYPE: return "dtype: q is bf16 or fp16, the cache the same or e4m3";
    case EYAS_BAD_HEAD_DIM: return "head_dim: 64, 96, 128, 192 or 256";
    case EYAS_BAD_HEADS: return "num_q_heads, num_kv_heads: q heads must be a positive multiple of KV heads (MLA: one KV head)";
    case EYAS_BAD_TREE: return "max_tree, mask: a tree has 1 to 256 nodes, mask_words is at least ceil(max_tree / 32), or of tree_keys";
    case EYAS_BAD_PAGE: return "page_size: at least 1";
    case EYAS_BAD_ALIGN: return "q, out, k, v, sources: pointers must be 16-byte aligned";
    case EYAS_BAD_STRIDE: return "strides: rows must start at 16-byte boundaries and not overlap";
    case EYAS_BAD_WORKSPACE: return "workspace: missing, misaligned or smaller than the plan's workspace_bytes";
    case EYAS_BAD_CONFIG: return "num_splits, groups, stages, row_tile, key_tile: not a configuration that fits this device";
    case EYAS_BAD_BATCH: return "batch: 1 to 65535";
    case EYAS_BAD_SCALE: return "scale, k_scale, v_scale, out_scale, eps: must be positive";
    case EYAS_BAD_POINTER: return "a required pointer is null";
    case EYAS_BAD_WINDOW: return "window: not negative, and with a window positions are required";
    case EYAS_BAD_SOURCES: return "num_sources: 1 to 8";
    case EYAS_BAD_WIDTH: return "width, slot_bytes: must be positive multiples of 16 bytes";
    case EYAS_BAD_MODE: return "mode, norm: unknown value, or a bit-packed mask of more than 32 nodes";
    case EYAS_BAD_TOPK: return "topk, depth, nodes, max_accept, vocab: out of range";
    case EYAS_BAD_TREE_KEYS: return "tree_keys: 0 to 256; above 0 a mask is needed, and neither a window nor positions can be had";
    default: return code > 0 && code < 1000 ? cudaGetErrorString((cudaError_t)code) : "unknown code";
  }
}
}

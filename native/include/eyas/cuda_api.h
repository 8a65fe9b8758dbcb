/* C ABI of libeyas_cuda.so: tree attention, hidden gather and tree verification on CUDA.
 *
 * Rules of every call: device pointers in, work queued on `stream` (a cudaStream_t), nothing allocated, nothing read back
 * to the host, so each call may be captured in a CUDA graph. Strides count elements, not bytes. Returns 0, a cudaError_t
 * (below 1000) or an EYAS_BAD_* code; eyas_cuda_error_text() says which argument is meant. `struct_size` is
 * sizeof of the struct the caller was compiled with. */
#ifndef EYAS_CUDA_API_H
#define EYAS_CUDA_API_H

#include <stddef.h>
#include <stdint.h>

#define EYAS_API __attribute__((visibility("default")))
#define EYAS_CUDA_ABI 4 /* what eyas_cuda_version() returns; rises when a struct or a call changes */

#ifdef __cplusplus
extern "C" {
#endif

enum { EYAS_BF16 = 0, EYAS_FP16 = 1, EYAS_E4M3 = 2 };

enum {
  EYAS_BAD_STRUCT = 1000, EYAS_BAD_DTYPE = 1001, EYAS_BAD_HEAD_DIM = 1002, EYAS_BAD_HEADS = 1003,
  EYAS_BAD_TREE = 1004, EYAS_BAD_PAGE = 1005, EYAS_BAD_ALIGN = 1006, EYAS_BAD_STRIDE = 1007,
  EYAS_BAD_WORKSPACE = 1008, EYAS_BAD_CONFIG = 1009, EYAS_BAD_BATCH = 1010, EYAS_BAD_SCALE = 1011,
  EYAS_BAD_POINTER = 1012, EYAS_BAD_WINDOW = 1013, EYAS_BAD_SOURCES = 1014, EYAS_BAD_WIDTH = 1015,
  EYAS_BAD_MODE = 1016, EYAS_BAD_TOPK = 1017, EYAS_BAD_TREE_KEYS = 1018,
};

/* flags of eyas_attn: let the combine kernel start early (programmatic dependent launch, 9.0+). */
enum { EYAS_OVERLAP = 1 };

/* Attention of a draft tree's queries over a paged KV cache. B requests, T_b queries each, prefix always visible. */
typedef struct {
  uint32_t struct_size;
  int32_t q_dtype;             /* EYAS_BF16 or EYAS_FP16; also that of `out` */
  int32_t kv_dtype;            /* equal to q_dtype, or EYAS_E4M3 */
  int32_t head_dim;            /* 64, 96, 128, 192, 256; MLA: ignored (576/512) */
  const void *q;               /* [sum T_b, Hq, D] */
  void *out;                   /* [sum T_b, Hq, Dv] */
  float *lse;                  /* f32 [sum T_b, Hq] natural log, or null */
  const void *k, *v;           /* caches; MLA: v null, values are the first 512 of each row of k */
  int64_t q_stride_token, q_stride_head, out_stride_token, out_stride_head;
  int64_t kv_stride_page, kv_stride_token, kv_stride_head; /* same for k and v; of pages of one token the second alone counts */
  const int32_t *kv_index;     /* token slots (page_size 1) or page numbers */
  const int64_t *index_rows;   /* [B] row of kv_index per request, or null: row b */
  const int32_t *index_start;  /* [B] start of the request in a flat kv_index, or null: rows are used */
  int64_t index_stride;        /* entries per row of kv_index */
  const int32_t *q_start;      /* [B+1] first query of each request, or null: b * max_tree */
  const int64_t *seq_lens;     /* [B] */
  const uint32_t *mask;        /* u32 [B, max_tree, mask_words], bit j of row i: node i sees node j; null: causal */
  const int64_t *positions;    /* [sum T_b], needed with a window */
  int64_t mask_stride_batch;   /* words between requests; 0: one mask for all */
  int32_t mask_words;          /* words per row, ceil(max_tree / 32) or more; with tree_keys ceil(tree_keys / 32) */
  int32_t page_size;
  int32_t batch, max_tree, num_q_heads, num_kv_heads;
  int32_t tree_keys;           /* last keys of a request that the mask covers, up to 256, the queries' own or not; 0: T_b. Needs a
                                  mask, refuses window and positions */
  int32_t seq_lens_are_prefix; /* 1: seq_lens exclude the T_b (or tree_keys) last entries, 0: they include them */
  int32_t window;              /* 0: none; else keys at distance >= window from the query's position are hidden */
  int32_t max_seq_len;         /* host's upper bound of a request's whole KV length; sets the split count only */
  float scale;                 /* softmax scale, > 0 */
  float k_scale, v_scale;      /* of an e4m3 cache, else 1 */
  int32_t num_splits;          /* 0: chosen */
  int32_t groups, stages, row_tile, key_tile; /* tile configuration, 0: chosen for the device; see docs/kernels.md */
  int32_t flags;               /* EYAS_OVERLAP or 0 */
  void *workspace;
  uint64_t workspace_bytes;
  void *stream;
} eyas_attn;

EYAS_API int eyas_cuda_version(void);
EYAS_API const char *eyas_cuda_error_text(int code);
/* Fills num_splits, groups, stages, row_tile, key_tile and workspace_bytes as a launch would; sm_count and smem_bytes (per block)
 * of 0 ask the current device. A launch with the filled struct uses exactly that. */
EYAS_API int eyas_tree_attn_gqa_plan(eyas_attn *a, int sm_count, int smem_bytes);
EYAS_API int eyas_tree_attn_gqa(const eyas_attn *a);
EYAS_API int eyas_tree_attn_mla_plan(eyas_attn *a, int sm_count, int smem_bytes);
EYAS_API int eyas_tree_attn_mla(const eyas_attn *a);

/* Merge of n attention results over disjoint keys. outs [n, rows, D] of dtype, lses f32 [n, rows] -> out, lse (or null). */
EYAS_API int eyas_lse_combine(const void *outs, const float *lses, void *out, float *lse, int n, int64_t rows,
                              int head_dim, int dtype, void *stream);

typedef struct {
  uint32_t struct_size;
  int32_t num_sources;         /* 1..8 */
  const void *source[8];       /* [N, H] each */
  const void *residual[8];     /* added to its source before the norm, or null */
  int64_t source_stride[8];    /* elements per row, also of the residual */
  const void *index;           /* [T] i32 or i64, or null: identity */
  int32_t index_is_i64, width; /* H */
  int32_t rows, norm;          /* T; 0 none, 1 per source, 2 over the whole row */
  const void *weight;          /* norm weight of in_dtype: [K*H] for both norms */
  void *out;                   /* [T, K*H] */
  int64_t out_stride;
  int32_t in_dtype, out_dtype; /* out: EYAS_BF16, EYAS_FP16 or EYAS_E4M3 */
  float eps, out_scale;        /* e4m3: out = x / out_scale, saturated */
  float *row_scale;            /* e4m3: f32 [T] written, dynamic scale per row; null: out_scale is used */
  void *stream;
} eyas_gather;

EYAS_API int eyas_hidden_gather(const eyas_gather *g);

/* Draft tree of `nodes` nodes, root included. Semantics of SGLang's build_tree_kernel_efficient, -1 fills included.
 * mode 0: bool FULL mask (row stride seq_len + nodes), 1: bool [B, n, n], 2: bit-packed u8/u16/u32 (n <= 32),
 * 3: u32 words [B, n, ceil(n/32)]. words (or null) gets the mask of mode 3 too, whatever the mode. parent_stride: entries
 * per row of parent_list. invalid i32 [B] (or null) is set to 1 for a tree with an orphan, whose node then hangs from the
 * root. */
EYAS_API int eyas_tree_build(const int64_t *parent_list, int64_t parent_stride, const int64_t *selected_index,
                             const int64_t *seq_lens, int batch, int topk, int depth, int nodes, int mode, void *mask,
                             uint32_t *words, int64_t *positions, int64_t *retrive_index, int64_t *retrive_next_token,
                             int64_t *retrive_next_sibling, int32_t *invalid, void *stream);

/* tree_build's outputs from a bool mask [B, n, n]: a node's parent is the last earlier node that it sees. invalid as above,
 * for a node that sees no earlier one. */
EYAS_API int eyas_tree_from_mask(const uint8_t *tree_mask, const int64_t *seq_lens, int batch, int nodes,
                                 int64_t *positions, int64_t *retrive_index, int64_t *retrive_next_token,
                                 int64_t *retrive_next_sibling, int32_t *invalid, void *stream);

/* faults u8 [B, n]: 0 where a row of the bool mask [B, n, n] is its parent's row plus the node itself, else 1: does not see
 * itself, 2: sees a later node, 3: sees no earlier node, 4: sees other nodes than its parent. */
EYAS_API int eyas_tree_validate(const uint8_t *tree_mask, int batch, int nodes, uint8_t *faults, void *stream);

typedef struct {
  uint32_t struct_size;
  int32_t batch, nodes, max_accept; /* max_accept: columns of accept_index (depth + 1) */
  const int64_t *candidates, *retrive_index, *retrive_next_token, *retrive_next_sibling; /* [B, n] */
  const int64_t *target_predict;    /* greedy: [B, n] */
  int32_t *predicts;                /* [B * n], written where visited */
  int32_t *accept_index;            /* [B, max_accept], -1 filled here */
  int32_t *accept_token_num;        /* [B], bonus excluded */
  const float *uniform, *uniform_final; /* target-only: [B, n], [B] */
  const float *target_probs;        /* target-only: [B, n, vocab] */
  int64_t vocab;
  float threshold_single, threshold_acc;
  const float *draft_probs;         /* rejection: [B, n, vocab], what the children of each node were drawn from */
  int32_t replacement;              /* rejection: siblings were drawn independently, else without repetition */
  void *stream;
} eyas_verify;

EYAS_API int eyas_verify_greedy(const eyas_verify *v);
EYAS_API int eyas_verify_target_only(const eyas_verify *v);
/* For sampled drafts. uniform[b, i] decides whether node i is accepted; thresholds are not read. */
EYAS_API int eyas_verify_rejection(const eyas_verify *v);

/* After a verify: per request the accepted tokens back to back, the bonus token, KV slots to move, rows to gather.
 * out_cache_loc i64 [B*n]; accept_lens i32 [B] (bonus included); tokens i64 [B, max_accept] (-1 beyond);
 * src_loc, tgt_loc i64 [B, max_accept] (-1 beyond); rows i64 [B, max_accept] (global node ids, -1 beyond); bonus i64 [B]. */
EYAS_API int eyas_accept_commit(const int32_t *predicts, const int32_t *accept_index, const int32_t *accept_token_num,
                                const int64_t *out_cache_loc, int batch, int nodes, int max_accept, int32_t *accept_lens,
                                int64_t *tokens, int64_t *src_loc, int64_t *tgt_loc, int64_t *rows, int64_t *bonus,
                                void *stream);

/* Copies slot src_loc[b][i] to tgt_loc[b][i] in every buffer, i ascending within a request (in place is safe when
 * tgt_loc[b][i] is never a later src of b, as accept_commit's are). Negative slots are skipped. buffers u64 [num_buffers] device
 * addresses and slot_bytes i64 [num_buffers], both on the device; slot_bytes must be multiples of 16. */
EYAS_API int eyas_kv_move(const uint64_t *buffers, const int64_t *slot_bytes, int num_buffers, const int64_t *tgt_loc,
                          const int64_t *src_loc, int batch, int per_request, void *stream);

#ifdef __cplusplus
}
#endif
#endif

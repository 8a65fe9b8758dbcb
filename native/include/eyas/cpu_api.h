/* C ABI of libeyas_cpu.so: draft trees, their verification, attention over a KV pool and hidden gather, on a CPU.
 *
 * Rules of every call: plain pointers in, outputs preallocated by the caller, nothing kept after the call, no exception
 * leaves. Strides count elements, the last axis is contiguous unless a stride says otherwise. Returns 0 or an EYAS_CPU_*
 * code; then eyas_cpu_last_error() of the same thread says which argument is meant and why. Values that index memory
 * (slots, tree links) are checked before anything is read or written through them. Results do not depend on the number
 * of threads. `struct_size` is sizeof of the struct the caller was compiled with. */
#ifndef EYAS_CPU_API_H
#define EYAS_CPU_API_H

#include <stdint.h>

#ifndef EYAS_API
#define EYAS_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define EYAS_CPU_ABI 4

enum { EYAS_CPU_FP32 = 0, EYAS_CPU_BF16 = 1, EYAS_CPU_FP16 = 2, EYAS_CPU_E4M3 = 3 }; /* e4m3: where it is named */

enum {
  EYAS_CPU_OK = 0,
  EYAS_CPU_BAD_ARGUMENT = 1,  /* a size, type or option that cannot be */
  EYAS_CPU_OUT_OF_RANGE = 2,  /* an index that points outside its array */
  EYAS_CPU_BAD_TREE = 3,      /* an orphan, a cycle or a link to nowhere */
  EYAS_CPU_NO_MEMORY = 4,
  EYAS_CPU_INTERNAL = 5,
};

typedef struct {
  int32_t code;
  char argument[48];
  char found[208];
  char wanted[208];
} eyas_cpu_error;

EYAS_API int32_t eyas_cpu_abi(void);
EYAS_API const eyas_cpu_error *eyas_cpu_last_error(void);

/* Instruction sets of this build that this machine can run, best first, comma-separated. */
EYAS_API const char *eyas_cpu_isas(void);
/* The one in use: the best, or the environment's EYAS_NATIVE_ISA. Null (with an error) when that one cannot run here. */
EYAS_API const char *eyas_cpu_isa(void);
/* Forces one of eyas_cpu_isas() for all later calls; null or empty: back to the default. */
EYAS_API int32_t eyas_cpu_set_isa(const char *name);
/* Threads per call; 0: as many as OpenMP would take. In a forked child always one: OpenMP's threads stay behind. */
EYAS_API int32_t eyas_cpu_set_threads(int32_t threads);
EYAS_API int32_t eyas_cpu_threads(void);

/* ---- draft trees; all arrays dense ---------------------------------------------------------------------------- */

/* Mask layouts: FULL bool, request b's block of nodes rows, each seq_len + nodes wide, blocks back to back; TREE_ONLY
 * bool [B, n, n]; BITS 1/2/4 bytes a row for n <= 8/16/32, bit j = node j; WORDS u32 [B, n, ceil(n / 32)]. */
enum { EYAS_CPU_MASK_FULL = 0, EYAS_CPU_MASK_TREE_ONLY = 1, EYAS_CPU_MASK_BITS = 2, EYAS_CPU_MASK_WORDS = 3 };

typedef struct {
  uint32_t struct_size;
  int32_t batch, nodes, topk, mask_mode;
  const int64_t *parent_list;    /* [B, parent_columns] */
  int64_t parent_columns;
  const int64_t *selected_index; /* [B, n - 1] */
  const int64_t *seq_lens;       /* [B], tree excluded */
  uint8_t *tree_mask;
  uint64_t tree_mask_bytes;
  int64_t *positions;            /* [B * n] */
  int64_t *retrive_index, *retrive_next_token, *retrive_next_sibling; /* [B, n] */
} eyas_cpu_tree;

/* Nothing is written when a tree is refused. */
EYAS_API int32_t eyas_cpu_tree_build(const eyas_cpu_tree *tree);
/* The same outputs from a TREE_ONLY mask (input here): a node's parent is the last earlier node that it sees. */
EYAS_API int32_t eyas_cpu_tree_from_mask(const eyas_cpu_tree *tree);

/* Problem of each node: 0 none, 1 does not see itself, 2 sees a later node, 3 sees no earlier node, 4 sees something
 * else than its parent's view and itself. faults u8 [B, n]; returns EYAS_CPU_OK also when there are faults. */
EYAS_API int32_t eyas_cpu_tree_validate(const uint8_t *tree_mask, int32_t batch, int32_t nodes, uint8_t *faults);

typedef struct {
  uint32_t struct_size;
  int32_t batch, nodes, accept_columns; /* columns of accept_index: depth + 1 */
  const int64_t *candidates, *retrive_index, *retrive_next_token, *retrive_next_sibling, *target_predict; /* [B, n] */
  int32_t *predicts;         /* [B * n], written where visited */
  int32_t *accept_index;     /* [B, accept_columns], -1 beyond the accepted */
  int32_t *accept_token_num; /* [B], bonus excluded */
} eyas_cpu_verify;

EYAS_API int32_t eyas_cpu_verify_greedy(const eyas_cpu_verify *verify);

typedef struct {
  uint32_t struct_size;
  int32_t replacement;       /* rejection: siblings were drawn from the same distribution each, else without repetition */
  int64_t vocab;
  const float *uniform;      /* [B, n], the coin of each node; target-only: of the decision after it */
  const float *uniform_final; /* [B], of the token that ends the path */
  const float *target_probs; /* [B, n, vocab] */
  const float *draft_probs;  /* [B, n, vocab], what the children of each node were drawn from; null: target-only */
  float threshold_single, threshold_acc; /* target-only */
} eyas_cpu_sampling;

/* Sampled verification; target_predict is not read. */
EYAS_API int32_t eyas_cpu_verify_sampled(const eyas_cpu_verify *verify, const eyas_cpu_sampling *sampling);

/* What a verify leads to; a request's unused entries are -1. */
typedef struct {
  uint32_t struct_size;
  int32_t batch, nodes, accept_columns;
  const int32_t *predicts, *accept_index, *accept_token_num; /* as a verify wrote them */
  const int64_t *out_cache_loc; /* [B * n], the KV slot of each node */
  int32_t *accept_lens;         /* [B], bonus included */
  int64_t *tokens;              /* [B, accept_columns], the accepted tokens and the bonus */
  int64_t *src_loc, *tgt_loc;   /* [B, accept_columns], slots of the accepted nodes, and where a list without a tree has them */
  int64_t *rows;                /* [B, accept_columns], global ids of the accepted nodes */
  int64_t *bonus;               /* [B] */
} eyas_cpu_commit;

/* Nothing is written when a node or a count is refused. */
EYAS_API int32_t eyas_cpu_accept_commit(const eyas_cpu_commit *commit);

/* ---- attention over a KV pool by token slot ------------------------------------------------------------------- */

/* Queries of B requests, request b's at rows extend_start[b] .. + extend_lens[b] of q, its keys the slots
 * req_to_token[req_pool_indices[b], 0 .. seq_lens[b]), of which the last extend_lens[b] are the queries' own
 * (with tree_keys the last tree_keys are what tree_mask chooses from, the queries' own or not).
 * A query sees all keys before those, and among them: with tree_mask what its row says; else with causal those up to
 * itself; else all. Decode is extend_lens == extend_start == null: one query a request, seeing everything.
 * A query's result depends on the list of keys it sees alone, bit for bit: decode, tree and prefill agree. */
typedef struct {
  uint32_t struct_size;
  int32_t q_dtype, kv_dtype;     /* q_dtype is also that of out */
  int32_t num_q_heads, num_kv_heads, head_dim, v_head_dim;
  int32_t batch, causal, window; /* window: of the keys it sees, a query keeps the last `window`; 0: all */
  float scale, logit_cap;        /* cap > 0: score = cap * tanh(score / cap) */
  const void *q, *k, *v;
  void *out;
  float *lse;                    /* [rows, Hq] natural log of the sum of exponents, or null */
  int64_t q_stride_token, q_stride_head, out_stride_token, out_stride_head;
  int64_t k_stride_token, k_stride_head, v_stride_token, v_stride_head;
  int64_t q_rows, slots;         /* extents of q (and out), and of k and v */
  const int32_t *req_to_token;
  int64_t req_rows, req_columns, req_stride;
  const int64_t *req_pool_indices, *seq_lens; /* [B] */
  const void *extend_lens, *extend_start;     /* [B], or null */
  int32_t extend_lens_i64, extend_start_i64;  /* i64, else i32 */
  const uint8_t *tree_mask;      /* per request e * e (e * tree_keys), back to back, or null */
  uint64_t tree_mask_bytes;
  int32_t tree_keys;             /* columns of the mask; 0: as many as queries. Needs a mask */
} eyas_cpu_attention;

EYAS_API int32_t eyas_cpu_attention_run(const eyas_cpu_attention *attention);

/* ---- memory --------------------------------------------------------------------------------------------------- */

typedef struct {
  uint32_t struct_size;
  int32_t dtype, buffer_dtype;
  int64_t rows, heads, width, slots;
  const void *source;
  int64_t source_stride_token, source_stride_head;
  void *buffer;
  int64_t buffer_stride_token, buffer_stride_head;
  const int64_t *loc; /* [rows] slot of each row */
} eyas_cpu_write;

/* buffer[loc[i]] = source[i]; one of K or V. */
EYAS_API int32_t eyas_cpu_kv_write(const eyas_cpu_write *write);

/* In each buffer: slot tgt_loc[i] becomes what slot src_loc[i] was before the call, for all i together.
 * slots: extent of every buffer, or -1 when not known (then only negative slots are refused). */
EYAS_API int32_t eyas_cpu_kv_move(const uint64_t *buffers, const uint64_t *slot_strides, const uint64_t *slot_bytes,
                                  int32_t num_buffers, int64_t slots, const int64_t *tgt_loc, const int64_t *src_loc,
                                  int64_t count);

typedef struct {
  uint32_t struct_size;
  int32_t num_sources, in_dtype, out_dtype, norm; /* norm: 0 none, 1 RMSNorm per source, 2 over the whole row */
  const void *const *sources;    /* num_sources times [N, H] */
  const int64_t *source_strides; /* elements per row */
  int64_t source_rows, width, rows;
  const void *index;             /* [rows], or null: identity */
  int32_t index_i64;
  float eps;
  const void *weight;            /* [K * H] of in_dtype, with norm */
  void *out;                     /* [rows, K * H]; out_dtype may be e4m3 */
  int64_t out_stride;
  const void *const *residuals;  /* num_sources times [N, H] of in_dtype or null, added and rounded to it first; or null */
  const int64_t *residual_strides;
  float out_scale;               /* e4m3: out = x / out_scale, saturated */
  float *row_scale;              /* e4m3: f32 [rows] written, a scale per row instead of out_scale; or null */
} eyas_cpu_gather;

EYAS_API int32_t eyas_cpu_hidden_gather(const eyas_cpu_gather *gather);

#ifdef __cplusplus
}
#endif
#endif

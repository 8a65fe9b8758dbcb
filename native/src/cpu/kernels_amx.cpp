// AMX with bf16 tiles, for bf16 queries and keys; all else is AVX-512's. Weights enter as the sum of two bf16 numbers, which
// keeps 16 of their bits, so that results are as good as float arithmetic makes them.
//
// A tile operation adds 32 products to each element in an order of its own, the same for every row and place in the tile.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pairs_avx512.h"

namespace eyas::cpu {
namespace {

constexpr int kTileRows = 16, kTilePairs = 16;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0..3 results and 4, 5 left operands of `rows` rows, 6, 7 right operands. Whoever used tiles on this thread before
// (oneDNN keeps its configuration between calls) finds its configuration again.
class Tiles {
 public:
  Tiles() { _tile_storeconfig(&before_); }
  ~Tiles() {
    if (before_.palette != 0) _tile_loadconfig(&before_);
    else _tile_release();
  }
  void use(int rows) {
    if (rows == rows_) return;
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : kTilePairs);
    }
    _tile_loadconfig(&config);
    rows_ = rows;
  }

 private:
  TileConfig before_;
  int rows_ = 0;
};

int rows_at(int64_t row, int64_t m) { return static_cast<int>(m - row < kTileRows ? m - row : kTileRows); }

// Four result tiles at a time while four are left, else one.
void score_columns_4(int64_t pairs, const uint32_t* a, int64_t lda, const uint32_t* b, float* c) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t p = 0; p < pairs; p += kTilePairs, b += kTilePairs * kBlock) {
    _tile_loadd(4, a + p, lda * 4);
    _tile_loadd(6, b, kBlock * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + 16, kBlock * 4);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, b + 32, kBlock * 4);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, b + 48, kBlock * 4);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, c, kBlock * 4);
  _tile_stored(1, c + 16, kBlock * 4);
  _tile_stored(2, c + 32, kBlock * 4);
  _tile_stored(3, c + 48, kBlock * 4);
}

void score_columns(int64_t pairs, const uint32_t* a, int64_t lda, const uint32_t* b, float* c) {
  _tile_zero(0);
  for (int64_t p = 0; p < pairs; p += kTilePairs) {
    _tile_loadd(4, a + p, lda * 4);
    _tile_loadd(6, b + p * kBlock, kBlock * 4);
    _tile_dpbf16ps(0, 4, 6);
  }
  _tile_stored(0, c, kBlock * 4);
}

void gemm_pairs(int64_t m, int64_t n, int64_t pairs, const uint32_t* a, int64_t lda, const uint32_t* b, float* c) {
  Tiles tiles;
  for (int64_t r = 0; r < m; r += kTileRows, a += kTileRows * lda, c += kTileRows * kBlock) {
    tiles.use(rows_at(r, m));
    int64_t j = 0;
    for (; j + 64 <= n; j += 64) score_columns_4(pairs, a, lda, b + j, c + j);
    for (; j < n; j += 16) score_columns(pairs, a, lda, b + j, c + j);
  }
}

// Weights [rows][kBlock] -> the nearest bf16 and the nearest bf16 of what is left.
void split_weights(const float* weights, int rows, uint16_t* high, uint16_t* low) {
  for (int i = 0; i < rows * kBlock; i += 16) {
    const __m512 x = _mm512_loadu_ps(weights + i);
    const __m256i top = (__m256i)_mm512_cvtneps_pbh(x);
    const __m512 rest = _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(top), 16)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + i), top);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + i), (__m256i)_mm512_cvtneps_pbh(rest));
  }
}

void add_columns_4(int64_t n, int64_t keys, const uint16_t* high, const uint16_t* low, const uint32_t* values, float* c) {
  _tile_loadd(0, c, n * 4);
  _tile_loadd(1, c + 16, n * 4);
  _tile_loadd(2, c + 32, n * 4);
  _tile_loadd(3, c + 48, n * 4);
  for (int64_t key = 0; key < keys; key += 2 * kTilePairs, values += kTilePairs * n) {
    _tile_loadd(4, high + key, kBlock * 2);
    _tile_loadd(5, low + key, kBlock * 2);
    _tile_loadd(6, values, n * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(0, 5, 6);
    _tile_loadd(7, values + 16, n * 4);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(6, values + 32, n * 4);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, values + 48, n * 4);
    _tile_dpbf16ps(3, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, n * 4);
  _tile_stored(1, c + 16, n * 4);
  _tile_stored(2, c + 32, n * 4);
  _tile_stored(3, c + 48, n * 4);
}

void add_columns(int64_t n, int64_t keys, const uint16_t* high, const uint16_t* low, const uint32_t* values, float* c) {
  _tile_loadd(0, c, n * 4);
  for (int64_t key = 0; key < keys; key += 2 * kTilePairs) {
    _tile_loadd(6, values + key / 2 * n, n * 4);
    _tile_loadd(4, high + key, kBlock * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, low + key, kBlock * 2);
    _tile_dpbf16ps(0, 5, 6);
  }
  _tile_stored(0, c, n * 4);
}

void add_value_pairs(int64_t m, int64_t n, int64_t keys, const float* weights, const uint32_t* values, float* c) {
  alignas(64) uint16_t high[kTileRows * kBlock], low[kTileRows * kBlock];
  Tiles tiles;
  for (int64_t r = 0; r < m; r += kTileRows, c += kTileRows * n) {
    const int rows = rows_at(r, m);
    tiles.use(rows);
    split_weights(weights + r * kBlock, rows, high, low);
    int64_t j = 0;
    for (; j + 64 <= n; j += 64) add_columns_4(n, keys, high, low, values + j, c + j);
    for (; j < n; j += 16) add_columns(n, keys, high, low, values + j, c + j);
  }
}

bool finite_pairs(const void* const* rows, int64_t count, int64_t width) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 found = 0;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t d = 0; d < width; d += 32) {
      const int64_t left = width - d;
      const __mmask32 inside = left >= 32 ? 0xffffffffu : (1u << left) - 1u;
      const __m512i x = _mm512_maskz_loadu_epi16(inside, static_cast<const uint16_t*>(rows[i]) + d);
      found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
    }
  return found == 0;
}

// Linux gives tile registers to a process that asks for them.
bool runs_here() {
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!has_avx512() || !__builtin_cpu_supports("avx512bf16")) return false;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

constexpr Kernels with_tiles() {
  Kernels kernels = make_kernels<Avx512>("amx_bf16", runs_here);
  kernels.pack_key_pairs = pack_key_pairs;
  kernels.gemm_pairs = gemm_pairs;
  kernels.pack_value_pairs = pack_value_pairs;
  kernels.add_value_pairs = add_value_pairs;
  kernels.finite_pairs = finite_pairs;
  return kernels;
}

}  // namespace

const Kernels amx_bf16_kernels = with_tiles();

}  // namespace eyas::cpu

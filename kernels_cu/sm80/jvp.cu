// jvp: O = softmax(softmax_scale Q K^T) V, L = logsumexp, and their tangents in direction
//      (tq, tk, tv):  tO = (P o E) V + P tV - e o O,  tL = e = rowsum(P o E),
//      E = softmax_scale (tQ K^T + Q tK^T). Packed sequences, mma.sync.
//
//              BLOCK_N keys               A CTA owns BLOCK_M queries of one head and HEAD_DIM_V /
//            +-------------+              PIECES columns of O and tO. Its warps own whole rows.
//   BLOCK_M  | S, E -> P,  |  x V -> O    Key tiles run from the last to the first: the masked
//   queries  |    P o E    |  x V, tV     ones come first.
//            +-------------+    -> tO     Grid: (tiles of queries; query heads; PIECES).
//
// K and tK arrive by cp.async behind softmax and the products with V; V and tV behind S and E.
// Twin: rawattn/kernels_numba/jvp.py. Source: the tangent of softmax, by the tiles of FlashAttention-2,
// arXiv 2307.08691, algorithm 1.
#include "base/mask.cuh"
#include "base/softmax.cuh"
#include "base/varlen.cuh"
#include "sm80/tangent.cuh"

using cfg::BLOCK_M, cfg::BLOCK_N, cfg::HEAD_DIM, cfg::NUM_WARPS, cfg::PIECES;
constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int WARP_M = BLOCK_M / NUM_WARPS;  // query rows of a warp
constexpr int MT = WARP_M / 16;              // its m16 tiles
constexpr int COLS_V = cfg::HEAD_DIM_V / PIECES;
static_assert(WARP_M % 16 == 0 && MT > 0, "cfg::BLOCK_M: 16 rows or more for each of NUM_WARPS");
static_assert(BLOCK_N % 16 == 0, "cfg::BLOCK_N divides by 16");

using TileQ = Tile<BLOCK_M, HEAD_DIM>;
using TileK = Tile<BLOCK_N, HEAD_DIM>;
using TileV = Tile<BLOCK_N, COLS_V>;
using TileO = Tile<BLOCK_M, COLS_V>;

struct SmemPlan {
  static constexpr int Q = 0;  // O and tO overlap Q and tQ at the end
  static constexpr int TQ = Q + TileQ::BYTES;
  static constexpr int O = 0;
  static constexpr int TO = O + TileO::BYTES;
  static constexpr int K = 2 * (TileQ::BYTES > TileO::BYTES ? TileQ::BYTES : TileO::BYTES);
  static constexpr int TK = K + TileK::BYTES;
  static constexpr int V = TK + TileK::BYTES;
  static constexpr int TV = V + TileV::BYTES;
  static constexpr int BYTES = TV + TileV::BYTES;
};
static_assert(SmemPlan::BYTES == cfg::SMEM_BYTES, "variants.smem_bytes and SmemPlan differ");

struct Args {
  Tensor q;                 // (total_q, num_heads_q, head_dim)
  Tensor k;                 // (total_k, num_heads_kv, head_dim)
  Tensor v;                 // (total_k, num_heads_kv, head_dim_v)
  Tensor tq;                // like q; null without cfg::HAS_TQ
  Tensor tk;                // like k; null without cfg::HAS_TK
  Tensor tv;                // like v; null without cfg::HAS_TV
  Tensor out;               // (total_q, num_heads_q, head_dim_v)
  Tensor tout;              // (total_q, num_heads_q, head_dim_v)
  float* lse;               // (num_heads_q, total_q)
  float* tlse;              // (num_heads_q, total_q)
  const int* cu_seqlens_q;  // (batch + 1,)
  const int* cu_seqlens_k;  // (batch + 1,)
  int batch;
  int total_q;
  int total_k;
  int num_heads_q;
  int num_heads_kv;
  int window_left;
  int window_right;
  float softmax_scale;
};

__device__ __forceinline__ void write_dead_rows(const Args& args, int head, int row, int rows) {
  if (blockIdx.z > 0) return;
  zero_rows<cfg::WIDTH_V, NUM_THREADS>(args.out.at(row, head), args.out.token_stride, rows);
  zero_rows<cfg::WIDTH_V, NUM_THREADS>(args.tout.at(row, head), args.tout.token_stride, rows);
  for (int r = threadIdx.x; r < rows; r += NUM_THREADS) {
    args.lse[static_cast<int64_t>(head) * args.total_q + row + r] = -INF;
    args.tlse[static_cast<int64_t>(head) * args.total_q + row + r] = 0.0f;
  }
}

// What a warp gathers over the keys
struct Sums {
  float rO[MT][COLS_V / 8][4];   // sum P V
  float rTO[MT][COLS_V / 8][4];  // sum (P o E) V + P tV
  float tangent[MT][2];          // sum P o E, this lane's share
  float rounded[MT][4];          // sum P o E as rounded for the product with V

  __device__ __forceinline__ void scale(int i, int half, float factor) {
    scale_row(rO, i, half, factor);
    scale_row(rTO, i, half, factor);
    tangent[i][half] *= factor;
    rounded[i][half * 2] *= factor, rounded[i][half * 2 + 1] *= factor;
  }

  __device__ __forceinline__ void add_products(const float (&rP)[MT][BLOCK_N / 8][4],
                                               const float (&rPE)[MT][BLOCK_N / 8][4],
                                               const OperandBT<TileV>& v) {
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k) {
      uint32_t p[MT][4], pe[MT][4];
      to_operand(p, rP, k);
      if constexpr (HAS_E) {
        to_operand(pe, rPE, k);
        add_row_sums(rounded, pe);
      }
      multiply_step_pair<HAS_E>(rO, rTO, p, pe, [&](uint32_t (&b)[4], int j) { v.load(b, k, j); });
      if constexpr (cfg::HAS_TV) {
        multiply_step(
            rTO, p, [&](uint32_t (&b)[4], int j) { v.load(b, k, j, SmemPlan::TV - SmemPlan::V); });
      }
    }
  }
};

// O, tO, L and tL of this warp's rows, the first two through its rows of shared memory.
__device__ __forceinline__ void epilogue(const Args& args, int head, int first_row, int valid_rows,
                                         int warp_row, const OnlineSoftmax<MT>& softmax, Sums& sums,
                                         char* smem) {
  const int lane = threadIdx.x % WARP_SIZE, first_col = blockIdx.z * COLS_V;
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.total(i, half), inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
      const float e = sums.rounded[i][half * 2] * inverse;
#pragma unroll
      for (int j = 0; j < COLS_V / 8; ++j) {
#pragma unroll
        for (int c = half * 2; c < half * 2 + 2; ++c) {
          sums.rO[i][j][c] *= inverse;
          sums.rTO[i][j][c] = sums.rTO[i][j][c] * inverse - e * sums.rO[i][j][c];
        }
      }
      const float tangent = sum_of_row(sums.tangent[i][half]) * inverse;
      const int row = warp_row + i * 16 + half * 8 + lane / 4;
      if (lane % 4 == 0 && blockIdx.z == 0 && row < valid_rows) {
        const int64_t index = static_cast<int64_t>(head) * args.total_q + first_row + row;
        const float natural = softmax.row_max[i][half] * args.softmax_scale + lg2_approx(sum) * LN2;
        args.lse[index] = sum > 0.0f ? natural : -INF;
        args.tlse[index] = tangent;
      }
    }
  }
  __syncthreads();  // every warp has left Q and tQ
  const auto one = [](int, int) { return 1.0f; };
  store_tile<TileO>(smem + SmemPlan::O, sums.rO, warp_row, 0, one);
  store_tile<TileO>(smem + SmemPlan::TO, sums.rTO, warp_row, 0, one);
  __syncwarp();  // the rows were written by this warp's other lanes
  write_rows<TileO, cfg::WIDTH_V, WARP_SIZE, WARP_M>(args.out.at(first_row, head),
                                                     args.out.token_stride, smem + SmemPlan::O,
                                                     warp_row, valid_rows, lane, first_col);
  write_rows<TileO, cfg::WIDTH_V, WARP_SIZE, WARP_M>(args.tout.at(first_row, head),
                                                     args.tout.token_stride, smem + SmemPlan::TO,
                                                     warp_row, valid_rows, lane, first_col);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    jvp(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char smem[];
  const TileOfSequence tile =
      find_tile(args.cu_seqlens_q, args.batch, args.total_q, BLOCK_M, blockIdx.x);
  const int head = blockIdx.y, kv_head = head / (args.num_heads_q / args.num_heads_kv);
  if (tile.batch_index < 0) {  // rows that belong to no sequence
    const int row = tile.block * BLOCK_M;
    write_dead_rows(args, head, tile.start + row, min(BLOCK_M, tile.length - row));
    return;
  }
  // with a right bound the last tiles of a sequence are the longest: they start first
  const int m_block = cfg::HAS_RIGHT ? ceil_div(tile.length, BLOCK_M) - 1 - tile.block : tile.block;
  const int row0 = m_block * BLOCK_M, valid_rows = min(BLOCK_M, tile.length - row0);
  const int first_row = tile.start + row0;
  const Sequence keys = sequence_at(args.cu_seqlens_k, tile.batch_index, args.total_k);
  const Mask mask{tile.length, keys.length, args.window_left, args.window_right};
  const int n_begin = mask.first_key(row0) / BLOCK_N;
  const int n_end = ceil_div(mask.end_key(row0 + valid_rows - 1), BLOCK_N);
  if (n_end <= n_begin) {
    write_dead_rows(args, head, first_row, valid_rows);
    return;
  }

  const uint32_t s0 = smem_address(smem);
  const int warp_row = threadIdx.x / WARP_SIZE * WARP_M, lane = threadIdx.x % WARP_SIZE;
  const auto load_q = [&](int offset, const Tensor& x) {
    load_tile_async<TileQ, cfg::WIDTH, NUM_THREADS>(s0 + offset, x.at(first_row, head),
                                                    x.token_stride, valid_rows);
  };
  const auto load_k = [&](int offset, const Tensor& x, int n) {
    load_tile_async<TileK, cfg::WIDTH, NUM_THREADS>(s0 + offset,
                                                    x.at(keys.start + n * BLOCK_N, kv_head),
                                                    x.token_stride, keys.length - n * BLOCK_N);
  };
  const auto load_v = [&](int offset, const Tensor& x, int n) {
    load_tile_async<TileV, cfg::WIDTH_V, NUM_THREADS>(
        s0 + offset, x.at(keys.start + n * BLOCK_N, kv_head), x.token_stride,
        keys.length - n * BLOCK_N, blockIdx.z * COLS_V);
  };
  const auto load_keys = [&](int n) {
    load_k(SmemPlan::K, args.k, n);
    if constexpr (cfg::HAS_TK) load_k(SmemPlan::TK, args.tk, n);
    cp_async_commit();
  };
  const auto load_values = [&](int n) {
    load_v(SmemPlan::V, args.v, n);
    if constexpr (cfg::HAS_TV) load_v(SmemPlan::TV, args.tv, n);
    cp_async_commit();
  };
  load_q(SmemPlan::Q, args.q);
  if constexpr (cfg::HAS_TQ) load_q(SmemPlan::TQ, args.tq);
  load_keys(n_end - 1);

  const OperandA<TileQ> q(s0 + SmemPlan::Q, warp_row);
  const OperandB<TileK> k(s0 + SmemPlan::K);
  const OperandBT<TileV> v(s0 + SmemPlan::V);
  OnlineSoftmax<MT> softmax;
  Sums sums{};
  const float scale_log2 = args.softmax_scale * LOG2E;
  // float16 keeps the exact maximum: P o E must not pass what it holds
  constexpr float SLACK = cfg::BF16 ? RESCALE_LOG2 : 0.0f;
  float rS[MT][BLOCK_N / 8][4], rE[MT][BLOCK_N / 8][4];
  for (int n = n_end - 1; n >= n_begin; --n) {
    cp_async_wait<0>();
    __syncthreads();  // K and tK of this tile are here; every warp has left V and tV
    load_values(n);
    multiply_scores<HEAD_DIM, SmemPlan::TQ - SmemPlan::Q, SmemPlan::TK - SmemPlan::K>(rS, rE, q, k);
    cp_async_wait<0>();
    __syncthreads();  // V and tV are here; every warp has left K and tK
    if (n > n_begin) load_keys(n - 1);
    if (mask.cuts(row0, BLOCK_M, n * BLOCK_N, BLOCK_N)) {
      apply_mask(rS, mask, row0 + warp_row + lane / 4, n * BLOCK_N + lane % 4 * 2);
    }
    softmax.update_max(
        rS, scale_log2, [&](int i, int half, float factor) { sums.scale(i, half, factor); }, SLACK);
    softmax.exponentiate(rS, scale_log2);
    if constexpr (HAS_E) weigh_tangents(rE, rS, args.softmax_scale, sums.tangent);
    sums.add_products(rS, rE, v);
  }
  epilogue(args, head, first_row, valid_rows, warp_row, softmax, sums, smem);
}

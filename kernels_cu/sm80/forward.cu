// forward: O = softmax(softmax_scale Q K^T) V and L = logsumexp, packed sequences, mma.sync.
//
//              BLOCK_N keys            A CTA owns BLOCK_M queries of one head. Its warps own whole
//            +-----------+             rows, BLOCK_M / NUM_WARPS each: softmax needs no other warp.
//   BLOCK_M  |  S -> P   |  x V -> O   Key tiles run from the last to the first: the masked ones
//   queries  +-----------+             come first. Grid: (tiles of queries; query heads).
//
// K and V arrive by cp.async: V loads behind S = Q K^T, the next K behind softmax and P V.
// Twin: rawattn/kernels_numba/forward.py. Source: FlashAttention-2, arXiv 2307.08691, algorithm 1.
#include "base/mask.cuh"
#include "base/softmax.cuh"
#include "base/varlen.cuh"
#include "sm80/tile_mma.cuh"

using cfg::BLOCK_M, cfg::BLOCK_N, cfg::NUM_WARPS;
constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int WARP_M = BLOCK_M / NUM_WARPS;  // query rows of a warp
constexpr int MT = WARP_M / 16;              // its m16 tiles
static_assert(WARP_M % 16 == 0 && MT > 0, "cfg::BLOCK_M: 16 rows or more for each of NUM_WARPS");
static_assert(BLOCK_N % 16 == 0, "cfg::BLOCK_N divides by 16");

using TileQ = Tile<BLOCK_M, cfg::HEAD_DIM>;
using TileK = Tile<BLOCK_N, cfg::HEAD_DIM>;
using TileV = Tile<BLOCK_N, cfg::HEAD_DIM_V>;
using TileO = Tile<BLOCK_M, cfg::HEAD_DIM_V>;

struct SmemPlan {
  static constexpr int Q = 0;  // O overlaps Q at the end: a warp reads and writes its own rows only
  static constexpr int K = TileQ::BYTES > TileO::BYTES ? TileQ::BYTES : TileO::BYTES;
  static constexpr int V = K + TileK::BYTES;
  static constexpr int BYTES = V + TileV::BYTES;
};
static_assert(SmemPlan::BYTES == cfg::SMEM_BYTES, "variants.smem_bytes and SmemPlan differ");

struct Args {
  Tensor q;                 // (total_q, num_heads_q, head_dim)
  Tensor k;                 // (total_k, num_heads_kv, head_dim)
  Tensor v;                 // (total_k, num_heads_kv, head_dim_v)
  Tensor out;               // (total_q, num_heads_q, head_dim_v)
  float* lse;               // (num_heads_q, total_q)
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

// S = Q K^T of this warp's rows
struct Scores {
  OperandA<TileQ> rows;
  uint32_t held[cfg::Q_IN_REGISTERS ? cfg::HEAD_DIM / 16 : 1][MT][4];

  __device__ __forceinline__ Scores(uint32_t sQ, int row) : rows(sQ, row) {}
  __device__ __forceinline__ void hold() {
    if constexpr (cfg::Q_IN_REGISTERS) {
#pragma unroll
      for (int k = 0; k < cfg::HEAD_DIM / 16; ++k) {
#pragma unroll
        for (int i = 0; i < MT; ++i) rows.load(held[k][i], i, k);
      }
    }
  }
  __device__ __forceinline__ void multiply(float (&rS)[MT][BLOCK_N / 8][4], uint32_t sK) {
    const OperandB<TileK> keys(sK);
    clear(rS);
    if constexpr (cfg::Q_IN_REGISTERS) {
#pragma unroll
      for (int k = 0; k < cfg::HEAD_DIM / 16; ++k) {
        multiply_step(rS, held[k], [&](uint32_t (&b)[4], int j) { keys.load(b, j, k); });
      }
    } else {
      multiply_xyt<cfg::HEAD_DIM>(rS, rows, keys);
    }
  }
};

__device__ __forceinline__ void write_dead_rows(const Args& args, int head, int row, int rows) {
  zero_rows<cfg::WIDTH_V, NUM_THREADS>(args.out.at(row, head), args.out.token_stride, rows);
  for (int r = threadIdx.x; r < rows; r += NUM_THREADS) {
    args.lse[static_cast<int64_t>(head) * args.total_q + row + r] = -INF;
  }
}

// O / row_sum to global memory through this warp's rows of sQ; L beside it.
__device__ __forceinline__ void epilogue(const Args& args, int head, int first_row, int valid_rows,
                                         int warp_row, const OnlineSoftmax<MT>& softmax,
                                         const float (&rO)[MT][cfg::HEAD_DIM_V / 8][4], char* sO) {
  const int lane = threadIdx.x % WARP_SIZE;
  store_tile<TileO>(sO, rO, warp_row, 0, [&](int i, int half) {
    const float sum = softmax.total(i, half);
    const int row = warp_row + i * 16 + half * 8 + lane / 4;
    if (lane % 4 == 0 && row < valid_rows) {
      const float natural = softmax.row_max[i][half] * args.softmax_scale + lg2_approx(sum) * LN2;
      args.lse[static_cast<int64_t>(head) * args.total_q + first_row + row] =
          sum > 0.0f ? natural : -INF;
    }
    return sum > 0.0f ? 1.0f / sum : 0.0f;
  });
  __syncwarp();  // the rows were written by this warp's other lanes
  write_rows<TileO, cfg::WIDTH_V, WARP_SIZE, WARP_M>(
      args.out.at(first_row, head), args.out.token_stride, sO, warp_row, valid_rows, lane);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    forward(const __grid_constant__ Args args) {
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

  const uint32_t sQ = smem_address(smem), sK = sQ + SmemPlan::K, sV = sQ + SmemPlan::V;
  const int warp_row = threadIdx.x / WARP_SIZE * WARP_M, lane = threadIdx.x % WARP_SIZE;
  const auto load_k = [&](int n) {
    load_tile_async<TileK, cfg::WIDTH, NUM_THREADS>(sK,
                                                    args.k.at(keys.start + n * BLOCK_N, kv_head),
                                                    args.k.token_stride, keys.length - n * BLOCK_N);
    cp_async_commit();
  };
  const auto load_v = [&](int n) {
    load_tile_async<TileV, cfg::WIDTH_V, NUM_THREADS>(
        sV, args.v.at(keys.start + n * BLOCK_N, kv_head), args.v.token_stride,
        keys.length - n * BLOCK_N);
    cp_async_commit();
  };
  load_tile_async<TileQ, cfg::WIDTH, NUM_THREADS>(sQ, args.q.at(first_row, head),
                                                  args.q.token_stride, valid_rows);
  load_k(n_end - 1);

  Scores scores(sQ, warp_row);
  OnlineSoftmax<MT> softmax;
  const float scale_log2 = args.softmax_scale * LOG2E;
  float rO[MT][cfg::HEAD_DIM_V / 8][4], rS[MT][BLOCK_N / 8][4];
  clear(rO);
  for (int n = n_end - 1; n >= n_begin; --n) {
    cp_async_wait<0>();
    __syncthreads();  // K of this tile is here; every warp has left V
    load_v(n);
    if (n == n_end - 1) scores.hold();
    scores.multiply(rS, sK);
    cp_async_wait<0>();
    __syncthreads();  // V is here; every warp has left K
    if (n > n_begin) load_k(n - 1);
    if (mask.cuts(row0, BLOCK_M, n * BLOCK_N, BLOCK_N)) {
      apply_mask(rS, mask, row0 + warp_row + lane / 4, n * BLOCK_N + lane % 4 * 2);
    }
    softmax.update_max(rS, scale_log2,
                       [&](int i, int half, float factor) { scale_row(rO, i, half, factor); });
    softmax.exponentiate(rS, scale_log2);
    multiply_py(rO, rS, OperandBT<TileV>(sV));
  }
  epilogue(args, head, first_row, valid_rows, warp_row, softmax, rO, smem);
}

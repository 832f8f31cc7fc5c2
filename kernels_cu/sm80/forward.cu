// forward: O = softmax(softmax_scale Q K^T) V and L = logsumexp, packed sequences, mma.sync.
//
//              BLOCK_N keys            A CTA owns BLOCK_M queries of one head. Its warps own whole
//            +-----------+             rows, BLOCK_M / NUM_WARPS each: softmax needs no other warp.
//   BLOCK_M  |  S -> P   |  x V -> O   Key tiles run from the last to the first: the masked ones
//   queries  +-----------+             come first. Grid: (tiles of queries; query heads).
//
// K and V arrive by cp.async: V loads behind S = Q K^T, the next K behind softmax and P V; the first
// V with the first K, as many sequences have no second tile. Warps without a row only load.
// Twin: rawattn/kernels_numba/forward.py. Source: FlashAttention-2, arXiv 2307.08691, algorithm 1.
#include "base/softcap.cuh"
#include "base/softmax.cuh"
#include "base/store.cuh"
#include "base/tiles.cuh"
#include "base/warp_rows.cuh"
#include "sm80/products.cuh"

struct SmemPlan {
  union {
    TileQ q;
    TileO out;  // at the end: a barrier of the loop lies behind every last read of q
  };
  TileK k;
  TileV v;
};
static_assert(sizeof(SmemPlan) == cfg::SMEM_BYTES, "the row's shared memory and SmemPlan differ");

struct Args {
  Tensor q;                 // (total_q, num_heads_q, head_dim)
  Tensor k;                 // (total_k, num_heads_kv, head_dim)
  Tensor v;                 // (total_k, num_heads_kv, head_dim_v)
  Tensor out;               // (total_q, num_heads_q, head_dim_v)
  float* lse;               // (num_heads_q, total_q)
  const int* cu_seqlens_q;  // (batch + 1,)
  const int* cu_seqlens_k;  // (batch + 1,)
  const float* sinks;       // (num_heads_q,), with cfg::HAS_SINKS
  const int* seqused_k;     // (batch,), with cfg::HAS_SEQUSED_K
  Sizes sizes;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES, "struct Args and rawattn/ops/forward.py differ");

// S = Q K^T of this warp's rows
struct Scores {
  OperandA<TileQ> rows;
  uint32_t held[cfg::Q_IN_REGISTERS ? HEAD_DIM / 16 : 1][MT][4];

  __device__ __forceinline__ Scores(const TileQ& q, int row) : rows(q.address(), row) {}
  // Q into registers, once it is there
  __device__ __forceinline__ void hold() {
    if constexpr (cfg::Q_IN_REGISTERS) {
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; ++k) {
#pragma unroll
        for (int i = 0; i < MT; ++i) rows.load(held[k][i], i, k);
      }
    }
  }
  __device__ __forceinline__ void multiply(float (&rS)[MT][BLOCK_N / 8][4], const TileK& k_tile) {
    const OperandB<TileK> keys(k_tile.address());
    clear(rS);
    if constexpr (cfg::Q_IN_REGISTERS) {
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; ++k) {
        multiply_step(rS, held[k], [&](uint32_t (&b)[4], int j) { keys.load(b, j, k); });
      }
    } else {
      multiply_xyt<HEAD_DIM>(rS, rows, keys);
    }
  }
};

// O / row_sum to global memory through this warp's rows of shared memory; L beside it
__device__ __forceinline__ void epilogue(const Args& args, const QueryTile& tile, int warp_row,
                                         const OnlineSoftmax<MT>& softmax,
                                         const float (&rO)[MT][HEAD_DIM_V / 8][4], TileO& sO) {
  const int lane = threadIdx.x % WARP_SIZE;
  const float sink = tile.sink(args);
  store_tile(sO, rO, warp_row, 0, [&](int i, int half) {
    const RowEnd end = softmax.end(i, half, score_scale(args.sizes), sink);
    const int row = warp_row + i * 16 + half * 8 + lane / 4;
    if (lane % 4 == 0 && row < tile.valid_rows) {
      args.lse[tile.statistic(args.sizes) + row] = end.lse;
    }
    return end.inverse;
  });
  __syncwarp();  // the rows were written by this warp's other lanes
  write_warp_rows<cfg::WIDTH_V, WARP_M>(args.out, tile.rows(), sO, warp_row);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    forward(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared);
  const QueryTile tile = find_query_tile<BLOCK_M, BLOCK_N>(args);
  if (tile.dead()) {
    zero_rows<cfg::WIDTH_V>(args.out, tile.rows());
    fill_statistic(args.lse, tile.statistic(args.sizes), tile.valid_rows, tile.sink(args));
    return;
  }
  const auto load_k = [&](int n) {
    load_rows<cfg::WIDTH>(smem.k, args.k, tile.keys_of<BLOCK_N>(n));
    cp_async_commit();
  };
  const auto load_v = [&](int n) {
    load_rows<cfg::WIDTH_V>(smem.v, args.v, tile.keys_of<BLOCK_N>(n));
    cp_async_commit();
  };
  load_rows<cfg::WIDTH>(smem.q, args.q, tile.rows());
  load_k(tile.n_end - 1);

  const int warp_row = threadIdx.x / WARP_SIZE * WARP_M, lane = threadIdx.x % WARP_SIZE;
  const float scale_log2 = score_scale_log2(args.sizes);
  Scores scores(smem.q, warp_row);
  OnlineSoftmax<MT> softmax;
  float rO[MT][HEAD_DIM_V / 8][4], rS[MT][BLOCK_N / 8][4];
  clear(rO);
  for (int n = tile.n_end - 1; n >= tile.n_begin; --n) {
    const bool first = n == tile.n_end - 1;
    if (!first) {
      cp_async_wait<0>();
      __syncthreads();  // K of this tile is here; every warp has left V
    }
    load_v(n);
    if (first) {
      cp_async_wait<1>();
      __syncthreads();  // Q and the first K are here
      scores.hold();
    }
    scores.multiply(rS, smem.k);  // S = Q K^T  [WARP_M, BLOCK_N]
    cp_async_wait<0>();
    __syncthreads();  // V is here; every warp has left K
    if (n > tile.n_begin) load_k(n - 1);
    cap_scores(rS, args.sizes);
    if (tile.mask.cuts(tile.row0, BLOCK_M, n * BLOCK_N, BLOCK_N)) {
      apply_mask(rS, tile.mask, tile.row0 + warp_row + lane / 4, n * BLOCK_N + lane % 4 * 2);
    }
    softmax.update_max(rS, scale_log2,
                       [&](int i, int half, float factor) { scale_row(rO, i, half, factor); });
    softmax.exponentiate(rS, scale_log2);
    multiply_py(rO, rS, OperandBT<TileV>(smem.v.address()));  // O += P V  [WARP_M, HEAD_DIM_V]
  }
  epilogue(args, tile, warp_row, softmax, rO, smem.out);
}

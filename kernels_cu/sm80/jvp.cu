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
#include "base/softmax.cuh"
#include "base/store.cuh"
#include "base/tiles.cuh"
#include "base/warp_rows.cuh"
#include "sm80/tangent_products.cuh"

constexpr int COLS_V = HEAD_DIM_V / cfg::PIECES;  // of this CTA
using PartV = Tile<BLOCK_N, COLS_V>;
using PartO = Tile<BLOCK_M, COLS_V>;

struct SmemPlan {
  union {
    struct {
      TileQ q, tq;
    };
    struct {
      PartO out, tout;  // at the end: a barrier of the loop lies behind every last read of q and tq
    };
  };
  TileK k, tk;
  PartV v, tv;
};
static_assert(sizeof(SmemPlan) == cfg::SMEM_BYTES, "the row's shared memory and SmemPlan differ");

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
  const float* sinks;       // (num_heads_q,), with cfg::HAS_SINKS
  const float* tsinks;      // (num_heads_q,), or null
  const int* seqused_k;     // (batch,), with cfg::HAS_SEQUSED_K
  Sizes sizes;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES, "struct Args and rawattn/ops/jvp.py differ");

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
                                               const OperandBT<PartV>& v) {
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
        multiply_step(rTO, p, [&](uint32_t (&b)[4], int j) { v.load_tangent(b, k, j); });
      }
    }
  }
};

// What a sink that moves along tsinks adds to e of a row, P0 tsinks
__device__ __forceinline__ float sink_tangent(const Args& args, const QueryTile& tile, float lse) {
  if constexpr (cfg::HAS_SINKS) {
    if (args.tsinks && lse != -INF) {
      return ex2_approx((tile.sink(args) - lse) * LOG2E) * args.tsinks[tile.head];
    }
  }
  return 0.0f;
}

__device__ __forceinline__ void write_dead_rows(const Args& args, const QueryTile& tile) {
  if (blockIdx.z > 0) return;
  zero_rows<cfg::WIDTH_V>(args.out, tile.rows());
  zero_rows<cfg::WIDTH_V>(args.tout, tile.rows());
  const float lse = tile.sink(args);
  fill_statistic(args.lse, tile.statistic(args.sizes), tile.valid_rows, lse);
  fill_statistic(args.tlse, tile.statistic(args.sizes), tile.valid_rows,
                 sink_tangent(args, tile, lse));
}

// O, tO, L and tL of this warp's rows, the first two through its rows of shared memory
__device__ __forceinline__ void epilogue(const Args& args, const QueryTile& tile, int warp_row,
                                         const OnlineSoftmax<MT>& softmax, Sums& sums,
                                         SmemPlan& smem) {
  const int lane = threadIdx.x % WARP_SIZE, first_col = blockIdx.z * COLS_V;
  const float sink = tile.sink(args);
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowEnd end = softmax.end(i, half, score_scale(args.sizes), sink);
      const float inverse = end.inverse, of_sink = sink_tangent(args, tile, end.lse);
      const float e = sums.rounded[i][half * 2] * inverse + of_sink;
#pragma unroll
      for (int j = 0; j < COLS_V / 8; ++j) {
#pragma unroll
        for (int c = half * 2; c < half * 2 + 2; ++c) {
          sums.rO[i][j][c] *= inverse;
          sums.rTO[i][j][c] = sums.rTO[i][j][c] * inverse - e * sums.rO[i][j][c];
        }
      }
      const float tangent = sum_of_row(sums.tangent[i][half]) * inverse + of_sink;
      const int row = warp_row + i * 16 + half * 8 + lane / 4;
      if (lane % 4 == 0 && blockIdx.z == 0 && row < tile.valid_rows) {
        const int64_t index = tile.statistic(args.sizes) + row;
        args.lse[index] = end.lse;
        args.tlse[index] = tangent;
      }
    }
  }
  store_tile(smem.out, sums.rO, warp_row, 0);
  store_tile(smem.tout, sums.rTO, warp_row, 0);
  __syncwarp();  // the rows were written by this warp's other lanes
  write_warp_rows<cfg::WIDTH_V, WARP_M, HEAD_DIM_V>(args.out, tile.rows(), smem.out, warp_row,
                                                    first_col);
  write_warp_rows<cfg::WIDTH_V, WARP_M, HEAD_DIM_V>(args.tout, tile.rows(), smem.tout, warp_row,
                                                    first_col);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    jvp(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared);
  const QueryTile tile = find_query_tile<BLOCK_M, BLOCK_N>(args);
  if (tile.dead()) {
    write_dead_rows(args, tile);
    return;
  }
  const auto load_k = [&](TileK& to, const Tensor& x, int n) {
    load_rows<cfg::WIDTH>(to, x, tile.keys_of<BLOCK_N>(n));
  };
  const auto load_v = [&](PartV& to, const Tensor& x, int n) {
    load_rows<cfg::WIDTH_V, HEAD_DIM_V>(to, x, tile.keys_of<BLOCK_N>(n), blockIdx.z * COLS_V);
  };
  const auto load_keys = [&](int n) {
    load_k(smem.k, args.k, n);
    if constexpr (cfg::HAS_TK) load_k(smem.tk, args.tk, n);
    cp_async_commit();
  };
  const auto load_values = [&](int n) {
    load_v(smem.v, args.v, n);
    if constexpr (cfg::HAS_TV) load_v(smem.tv, args.tv, n);
    cp_async_commit();
  };
  load_rows<cfg::WIDTH>(smem.q, args.q, tile.rows());
  if constexpr (cfg::HAS_TQ) load_rows<cfg::WIDTH>(smem.tq, args.tq, tile.rows());
  load_keys(tile.n_end - 1);

  const int warp_row = threadIdx.x / WARP_SIZE * WARP_M, lane = threadIdx.x % WARP_SIZE;
  const float softmax_scale = args.sizes.softmax_scale, scale_log2 = score_scale_log2(args.sizes);
  const OperandA<TileQ> q(smem.q.address(), warp_row);
  const OperandB<TileK> k(smem.k.address());
  const OperandBT<PartV> v(smem.v.address());
  OnlineSoftmax<MT> softmax;
  Sums sums{};
  // float16 keeps the exact maximum: P o E must not pass what it holds
  constexpr float SLACK = cfg::BF16 ? RESCALE_LOG2 : 0.0f;
  float rS[MT][BLOCK_N / 8][4], rE[MT][BLOCK_N / 8][4];
  for (int n = tile.n_end - 1; n >= tile.n_begin; --n) {
    cp_async_wait<0>();
    __syncthreads();  // K and tK of this tile are here; every warp has left V and tV
    load_values(n);
    multiply_scores<HEAD_DIM>(rS, rE, q, k);  // S and E  [WARP_M, BLOCK_N]
    cp_async_wait<0>();
    __syncthreads();  // V and tV are here; every warp has left K and tK
    if (n > tile.n_begin) load_keys(n - 1);
    cap_scores(rS, args.sizes);
    if constexpr (HAS_E) slope_tangents(rE, rS);
    if (tile.mask.cuts(tile.row0, BLOCK_M, n * BLOCK_N, BLOCK_N)) {
      apply_mask(rS, tile.mask, tile.row0 + warp_row + lane / 4, n * BLOCK_N + lane % 4 * 2);
    }
    softmax.update_max(
        rS, scale_log2, [&](int i, int half, float factor) { sums.scale(i, half, factor); }, SLACK);
    softmax.exponentiate(rS, scale_log2);
    if constexpr (HAS_E) weigh_tangents(rE, rS, softmax_scale, sums.tangent);
    sums.add_products(rS, rE, v);  // O and tO  [WARP_M, COLS_V]
  }
  epilogue(args, tile, warp_row, softmax, sums, smem);
}

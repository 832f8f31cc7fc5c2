// backward_q: dQ = softmax_scale dS K in registers;
//             dK += dS^T Q and dV += P^T dO by float32 atomic adds (cfg::ATOMIC).
//
//              BLOCK_N keys             A CTA owns BLOCK_M queries of one head and walks over their
//            +-------------+            keys. Its warps own whole rows: dS feeds dQ straight from
//   BLOCK_M  | S, dP -> P, |  x K -> dQ registers. With cfg::ATOMIC, P and dS also pass shared
//   queries  |      dS     |            memory, 16 bits each, and the warps lie as WARPS_N_KV x ..
//            +-------------+            over dK and dV of the tile.
//             ^T x Q, dO -> dK, dV      Grid: (tiles of queries, upper bound; query heads).
//
// Without cfg::ATOMIC this is the second half of the deterministic backward, after backward_kv.
// Twin: rawattn/kernels_numba/backward_q.py.
// Source: FlashAttention, arXiv 2205.14135, algorithm 4, loops exchanged.
#include "base/softcap.cuh"
#include "base/statistics.cuh"
#include "base/store.cuh"
#include "base/tiles.cuh"
#include "base/warp_rows.cuh"
#include "base/workspace.cuh"
#include "sm80/products.cuh"

using cfg::NUM_STAGES;

using WarpK = WarpTile<BLOCK_N, HEAD_DIM / cfg::PIECES, cfg::WARPS_N_KV>;
using WarpV = WarpTile<BLOCK_N, HEAD_DIM_V / cfg::PIECES, cfg::WARPS_N_KV>;
static_assert(!cfg::ATOMIC || (WarpK::EVERY && WarpV::EVERY),
              "cfg::WARPS_N_KV: each warp gets whole 16 x 16 squares");

struct SmemPlan {
  TileQ q;  // dQ at the end
  TileO dout;
  TileK k[NUM_STAGES];
  TileV v[NUM_STAGES];
  TileP p, ds;  // only with cfg::ATOMIC: what warps exchange for dK and dV
};
constexpr int EXCHANGE_BYTES = 2 * sizeof(TileP);  // of p and ds, which stand last
static_assert(sizeof(SmemPlan) - (cfg::ATOMIC ? 0 : EXCHANGE_BYTES) == cfg::SMEM_BYTES,
              "the row's shared memory and SmemPlan differ");

struct Args {
  Tensor q;                 // (total_q, num_heads_q, head_dim)
  Tensor k;                 // (total_k, num_heads_kv, head_dim)
  Tensor v;                 // (total_k, num_heads_kv, head_dim_v)
  Tensor dout;              // (total_q, num_heads_q, head_dim_v)
  const float* lse;         // (num_heads_q, total_q)
  const float* delta;       // (num_heads_q, total_q)
  Tensor dq;                // (total_q, num_heads_q, head_dim)
  float* dk_accum;          // workspace of dK, zeroed; unused without cfg::ATOMIC
  float* dv_accum;          // workspace of dV, zeroed; unused without cfg::ATOMIC
  const int* cu_seqlens_q;  // (batch + 1,)
  const int* cu_seqlens_k;  // (batch + 1,)
  const int* seqused_k;     // (batch,), with cfg::HAS_SEQUSED_K
  Sizes sizes;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES, "struct Args and rawattn/ops/backward_q.py differ");

// X^T Y of this tile of keys, X = P or dS, added to the workspace of dV or dK, cfg::PIECES times
// COLS / PIECES columns
template <int COLS, class WarpT, class TileY, int WIDTH>
__device__ __forceinline__ void add_transposed(const Workspace<WIDTH>& sums, const TileP& x,
                                               const TileY& y, const WarpT& warp, int col0) {
#pragma unroll 1
  for (int piece = 0; piece < COLS; piece += COLS / cfg::PIECES) {
    float rY[WarpT::MT][WarpT::NT][4];
    clear(rY);
    multiply_xty<BLOCK_M>(rY, OperandAT<TileP, WarpT::SPAN_M>(x.address(), 0, warp.row),
                          OperandBT<TileY, WarpT::SPAN_N>(y.address(), 0, piece + warp.col));
    add_units<COLS>(sums, rY, col0 + warp.row, piece + warp.col);
  }
}

// dK and dV of this tile of keys, from the P and dS of all warps
__device__ __forceinline__ void add_dk_and_dv(const Args& args, const SmemPlan& smem,
                                              const QueryTile& tile, int warp, int col0) {
  Sequence keys = tile.keys;  // a workspace is laid out by all of them
  if constexpr (cfg::HAS_SEQUSED_K) {
    keys = sequence_at(args.cu_seqlens_k, tile.batch_index, args.sizes.total_k);
  }
  const Workspace<cfg::WIDTH_V> sums_v(args.dv_accum, tile.kv_head, args.sizes.total_k, keys.start,
                                       keys.length);
  add_transposed<HEAD_DIM_V>(sums_v, smem.p, smem.dout, WarpV(warp), col0);
  const Workspace<cfg::WIDTH> sums_k(args.dk_accum, tile.kv_head, args.sizes.total_k, keys.start,
                                     keys.length);
  add_transposed<HEAD_DIM>(sums_k, smem.ds, smem.q, WarpK(warp), col0);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    backward_q(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared);
  const QueryTile tile = find_query_tile<BLOCK_M, BLOCK_N>(args);
  if (tile.dead()) {
    zero_rows<cfg::WIDTH>(args.dq, tile.rows());
    return;
  }
  const auto load_keys = [&](int n, int stage) {
    load_rows<cfg::WIDTH>(smem.k[stage], args.k, tile.keys_of<BLOCK_N>(n));
    load_rows<cfg::WIDTH_V>(smem.v[stage], args.v, tile.keys_of<BLOCK_N>(n));
    cp_async_commit();
  };
  load_rows<cfg::WIDTH>(smem.q, args.q, tile.rows());
  load_rows<cfg::WIDTH_V>(smem.dout, args.dout, tile.rows());
  load_keys(tile.n_end - 1, 0);
  const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  const int warp_row = warp * WARP_M, stat_row = warp_row + lane / 4;
  const int64_t statistic = tile.statistic(args.sizes);
  const auto lse_log2 = load_lse_log2<MT>(args.lse + statistic, stat_row, tile.valid_rows);
  const auto delta = load_delta<MT>(args.delta + statistic, stat_row, lse_log2);

  float rdQ[MT][HEAD_DIM / 8][4];
  clear(rdQ);
  int stage = 0;
  for (int n = tile.n_end - 1; n >= tile.n_begin; --n) {
    const int col0 = n * BLOCK_N;
    cp_async_wait<0>();
    __syncthreads();  // K and V are here; every warp has left P, dS and the other stage
    if (NUM_STAGES == 2 && n > tile.n_begin) load_keys(n - 1, stage ^ 1);
    const uint32_t sK = smem.k[stage].address(), sV = smem.v[stage].address();
    float rP[MT][BLOCK_N / 8][4], rdS[MT][BLOCK_N / 8][4];
    clear(rP);  // S = Q K^T  [WARP_M, BLOCK_N]
    multiply_xyt<HEAD_DIM>(rP, OperandA<TileQ>(smem.q.address(), warp_row), OperandB<TileK>(sK));
    clear(rdS);  // dP = dO V^T
    multiply_xyt<HEAD_DIM_V>(rdS, OperandA<TileO>(smem.dout.address(), warp_row),
                             OperandB<TileV>(sV));
    cap_scores(rP, args.sizes);
    if (tile.mask.cuts(tile.row0, BLOCK_M, col0, BLOCK_N)) {
      apply_mask(rP, tile.mask, tile.row0 + stat_row, col0 + lane % 4 * 2);
    }
    scores_to_p(rP, lse_log2, score_scale_log2(args.sizes));
    dp_to_ds(rdS, rP, delta);
    slope_ds(rdS, rP, lse_log2, args.sizes);
    if constexpr (cfg::ATOMIC) {
      store_tile(smem.p, rP, warp_row, 0);
      store_tile(smem.ds, rdS, warp_row, 0);
    }
    multiply_py(rdQ, rdS, OperandBT<TileK>(sK));  // dQ += dS K  [WARP_M, HEAD_DIM]
    if constexpr (cfg::ATOMIC) {
      __syncthreads();  // P and dS are whole
      add_dk_and_dv(args, smem, tile, warp, col0);
    }
    if constexpr (NUM_STAGES == 2) {
      stage ^= 1;
    } else if (n > tile.n_begin) {
      __syncthreads();  // every warp has left K and V
      load_keys(n - 1, 0);
    }
  }

  if constexpr (cfg::ATOMIC)
    __syncthreads();  // every warp has left Q, which dK's products read whole
  else
    __syncwarp();  // every lane has left the warp's rows of Q
  store_tile(smem.q, rdQ, warp_row, 0, [&](int, int) { return args.sizes.softmax_scale; });
  __syncwarp();  // the rows were written by this warp's other lanes
  write_warp_rows<cfg::WIDTH, WARP_M>(args.dq, tile.rows(), smem.q, warp_row);
}

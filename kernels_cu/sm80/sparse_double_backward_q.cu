// sparse_double_backward_q: gQ = softmax_scale ((g tdS + ddg dS) K + (g dS) ddK) over the selected
//                           blocks of keys, in registers.
//   tP = P o (E - e),  dS = P o (dP - D),  tdS = tP o (dP - D) + P o (dO ddV^T - W),
//   E = softmax_scale (g (ddQ K^T + Q ddK^T) + ddg Q K^T); e, D and W come from
//   sparse_double_backward_out.
//
//                     BLOCK_N keys of a        A CTA owns ITEMS tokens of one selection head, with
//                     selected block           the GROUP query heads of each: BLOCK_M rows. Its
//            +-------------+                   consumer warps own 16 rows each and take only the
//   BLOCK_M  | S, E, dP, X |  x K, ddK         blocks that their rows named (sm80/sparse_walk.cuh).
//   rows     |  -> dS, tdS |    -> gQ          Grid: (tiles of tokens; selection heads).
//            +-------------+
//
// Twin: rawattn/kernels_numba/sparse_double_backward_q.py. Source: native sparse attention,
// arXiv 2502.11089; rawattn/reference/sparse.py has the equations.
#include "sm80/sparse_walk.cuh"
#include "sm80/tangent.cuh"

using cfg::HEAD_DIM, cfg::HEAD_DIM_V;
constexpr int STEP_N = BLOCK_N >= 16 * cfg::PIECES ? BLOCK_N / cfg::PIECES : 16;  // weighed at once
using TileQ = Tile<BLOCK_M, HEAD_DIM>;
using TileO = Tile<BLOCK_M, HEAD_DIM_V>;
using TileK = Tile<BLOCK_N, HEAD_DIM>;
using TileV = Tile<BLOCK_N, HEAD_DIM_V>;

struct SmemPlan {
  static constexpr int Q =
      0;  // gQ overlaps Q at the end: a warp reads and writes its own rows only
  static constexpr int DDQ = Q + TileQ::BYTES;
  static constexpr int DO = DDQ + TileQ::BYTES;
  static constexpr int STAGES = DO + TileO::BYTES;
  // in a stage
  static constexpr int DDK = TileK::BYTES;
  static constexpr int V = DDK + TileK::BYTES;
  static constexpr int DDV = V + TileV::BYTES;
  static constexpr int STAGE = DDV + TileV::BYTES;
  static constexpr int RING = STAGES + NUM_STAGES * STAGE;
  static constexpr int BYTES = RING + Ring::BYTES;
};
static_assert(SmemPlan::BYTES == cfg::SMEM_BYTES, "variants.smem_bytes and SmemPlan differ");

struct Args {
  Tensor q;                    // (total_q, num_heads_q, head_dim)
  Tensor k;                    // (total_k, num_heads_kv, head_dim)
  Tensor v;                    // (total_k, num_heads_kv, head_dim_v)
  Tensor ddq;                  // like q; null without cfg::HAS_TQ
  Tensor ddk;                  // like k; null without cfg::HAS_TK
  Tensor ddv;                  // like v; null without cfg::HAS_TV
  Tensor dout;                 // (total_q, num_heads_q, head_dim_v)
  const float* lse;            // (num_heads_q, total_q)
  const float* delta;          // (num_heads_q, total_q)
  const float* ddlse;          // (num_heads_q, total_q)
  const float* ddelta;         // (num_heads_q, total_q)
  const int* blocks;           // (num_heads_sel, total_q, width)
  const int* slots;            // (num_heads_sel, total_q, width)
  const float* block_scale;    // (total_q, num_heads_sel, num_selected); null without HAS_SCALE
  const float* ddblock_scale;  // like block_scale, or null
  const int* cu_seqlens_q;     // (batch + 1,)
  const int* cu_seqlens_k;     // (batch + 1,)
  Tensor gq;                   // (total_q, num_heads_q, head_dim)
  int batch;
  int total_q;
  int total_k;
  int num_heads_q;
  int num_heads_kv;
  int window_left;
  int window_right;
  float softmax_scale;
  SelectionSizes sizes;
};

// gQ += tdS K + dS ddK, ddK lies SmemPlan::DDK bytes behind K
template <int NT, int NT_Q, class Keys>
__device__ __forceinline__ void add_products(float (&rgQ)[1][NT_Q][4],
                                             const float (&rtdS)[1][NT][4],
                                             const float (&rdS)[1][NT][4], const Keys& keys) {
#pragma unroll
  for (int k = 0; k < NT / 2; ++k) {
    uint32_t a[1][4];
    to_operand(a, rtdS, k);
    multiply_step(rgQ, a, [&](uint32_t (&b)[4], int j) { keys.load(b, k, j); });
    if constexpr (cfg::HAS_TK) {
      to_operand(a, rdS, k);
      multiply_step(rgQ, a, [&](uint32_t (&b)[4], int j) { keys.load(b, k, j, SmemPlan::DDK); });
    }
  }
}

// Rows of this warp: the scores, their tangents and the products with K and ddK of every stage they
// named
__device__ __forceinline__ void differentiate(const Args& args, char* smem, const Ring& ring,
                                              const QueryTile& tile, int warp_row) {
  const uint32_t s0 = smem_address(smem);
  load_own_rows<TileQ, cfg::WIDTH>(s0 + SmemPlan::Q, args.q, tile, warp_row);
  if constexpr (cfg::HAS_TQ) {
    load_own_rows<TileQ, cfg::WIDTH>(s0 + SmemPlan::DDQ, args.ddq, tile, warp_row);
  }
  load_own_rows<TileO, cfg::WIDTH_V>(s0 + SmemPlan::DO, args.dout, tile, warp_row);
  cp_async_commit();
  const OperandA<TileQ> queries(s0 + SmemPlan::Q, warp_row);
  const OperandA<TileO> gradients(s0 + SmemPlan::DO, warp_row);
  const PerRow<1> lse_log2 = own_lse_log2(args.lse, tile, warp_row, args.total_q);
  const auto term = [&](const float* x) {
    return own_statistic(x, tile, warp_row, args.total_q, lse_log2);
  };
  const RowTerms<1> terms{term(args.delta), term(args.ddlse), term(args.ddelta)};
  float rgQ[1][HEAD_DIM / 8][4];
  clear(rgQ);
  cp_async_wait<0>();
  __syncwarp();  // Q, ddQ and dO were loaded by this warp's other lanes
  consume(ring, tile, warp_row, [&](int stage, const RowsOfStage& rows) {
    const uint32_t place = s0 + SmemPlan::STAGES + stage * SmemPlan::STAGE;
    float factor[1][2], factor_tangent[1][2];
    if constexpr (cfg::HAS_SCALE) {
      load_factors(factor[0], args.block_scale, tile, rows, warp_row, args.sizes, 1.0f);
      load_factors(factor_tangent[0], args.ddblock_scale, tile, rows, warp_row, args.sizes, 0.0f);
    }
#pragma unroll 1
    for (int col = 0; col < BLOCK_N; col += STEP_N) {
      float rP[1][STEP_N / 8][4], rE[1][STEP_N / 8][4];
      float rdS[1][STEP_N / 8][4], rtdS[1][STEP_N / 8][4];
      multiply_scores<HEAD_DIM, SmemPlan::DDQ - SmemPlan::Q, SmemPlan::DDK>(
          rP, rE, queries, OperandB<TileK>(place, col));
      multiply_gradients<HEAD_DIM_V, SmemPlan::DDV - SmemPlan::V>(
          rdS, rtdS, gradients, OperandB<TileV>(place + SmemPlan::V, col));
      if constexpr (cfg::HAS_SCALE) apply_factors(rP, rE, factor, factor_tangent);
      if (rows.cut) cut_rows(rP, rows, col);
      scores_to_p(rP, lse_log2, args.softmax_scale * LOG2E);
      tangents_of_p_and_ds(rE, rdS, rtdS, rP, terms, args.softmax_scale);
      if constexpr (cfg::HAS_SCALE) apply_factors(rdS, rtdS, factor, factor_tangent);
      add_products(rgQ, rtdS, rdS, OperandBT<TileK>(place, col));
    }
  });
  store_tile<TileQ>(smem + SmemPlan::Q, rgQ, warp_row, 0,
                    [&](int, int) { return args.softmax_scale; });
  __syncwarp();  // the rows were written by this warp's other lanes
  write_own_rows<TileQ, cfg::WIDTH>(args.gq, tile, smem + SmemPlan::Q, warp_row);
}

extern "C" __global__ void __launch_bounds__(NUM_WARPS* WARP_SIZE, cfg::MIN_CTAS)
    sparse_double_backward_q(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char smem[];
  const QueryTile tile = find_query_tile(args);
  if (tile.keys.length < 0) {  // tokens that belong to no sequence
    zero_own_rows<cfg::WIDTH>(args.gq, tile);
    return;
  }
  const Ring ring(smem + SmemPlan::RING);
  ring.init();
  __syncthreads();  // the barriers and queues are there
  const int warp = threadIdx.x / WARP_SIZE;
  if (warp < CONSUMERS) {
    differentiate(args, smem, ring, tile, warp * 16);
    return;
  }
  const uint32_t s0 = smem_address(smem);
  produce(ring, tile, args.blocks, args.slots, args.total_q, args.sizes.width,
          [&](int stage, int key) {
            const uint32_t place = s0 + SmemPlan::STAGES + stage * SmemPlan::STAGE;
            load_keys<TileK, cfg::WIDTH>(place, args.k, tile, key);
            if constexpr (cfg::HAS_TK) {
              load_keys<TileK, cfg::WIDTH>(place + SmemPlan::DDK, args.ddk, tile, key);
            }
            if constexpr (HAS_E) {
              load_keys<TileV, cfg::WIDTH_V>(place + SmemPlan::V, args.v, tile, key);
            }
            if constexpr (cfg::HAS_TV) {
              load_keys<TileV, cfg::WIDTH_V>(place + SmemPlan::DDV, args.ddv, tile, key);
            }
          });
}

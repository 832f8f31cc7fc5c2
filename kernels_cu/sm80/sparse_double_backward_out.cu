// sparse_double_backward_out: ddO = (P o E) V + P ddV - e o O and e = ddL = rowsum(P o E) over the
//                             selected blocks of keys, with
//                             E = softmax_scale (g (ddQ K^T + Q ddK^T) + ddg Q K^T);
//                             for the second pass D = dO.O - dL and its tangent W = dO.ddO.
//
//                     BLOCK_N keys of a        A CTA owns ITEMS tokens of one selection head, with
//                     selected block           the GROUP query heads of each: BLOCK_M rows. Its
//            +-------------+                   consumer warps own 16 rows each and take only the
//   BLOCK_M  | S, E -> P,  |  x V, ddV         blocks that their rows named (sm80/sparse_walk.cuh).
//   rows     |    P o E    |    -> ddO         P comes from S and the given L.
//            +-------------+                   Grid: (tiles of tokens; selection heads).
//
// Without dout (forward mode) there is no second pass, and D and W are left out.
// Twin: rawattn/kernels_numba/sparse_double_backward_out.py. Source: native sparse attention,
// arXiv 2502.11089; rawattn/reference/sparse.py has the equations.
#include "base/softmax.cuh"
#include "sm80/sparse_walk.cuh"
#include "sm80/tangent.cuh"

using cfg::HEAD_DIM, cfg::HEAD_DIM_V;
constexpr int STEP_N = BLOCK_N >= 16 * cfg::PIECES ? BLOCK_N / cfg::PIECES : 16;  // weighed at once
using TileQ = Tile<BLOCK_M, HEAD_DIM>;
using TileO = Tile<BLOCK_M, HEAD_DIM_V>;
using TileK = Tile<BLOCK_N, HEAD_DIM>;
using TileV = Tile<BLOCK_N, HEAD_DIM_V>;

struct SmemPlan {
  static constexpr int Q = 0;
  static constexpr int DDQ = Q + TileQ::BYTES;
  static constexpr int DDO = DDQ + TileQ::BYTES;
  static constexpr int STAGES = DDO + TileO::BYTES;
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
  Tensor out;                  // (total_q, num_heads_q, head_dim_v)
  Tensor dout;                 // (total_q, num_heads_q, head_dim_v), or null
  const float* lse;            // (num_heads_q, total_q)
  const float* dlse;           // (num_heads_q, total_q), or null
  const int* blocks;           // (num_heads_sel, total_q, width)
  const int* slots;            // (num_heads_sel, total_q, width)
  const float* block_scale;    // (total_q, num_heads_sel, num_selected); null without HAS_SCALE
  const float* ddblock_scale;  // like block_scale, or null
  const int* cu_seqlens_q;     // (batch + 1,)
  const int* cu_seqlens_k;     // (batch + 1,)
  Tensor ddout;                // (total_q, num_heads_q, head_dim_v)
  float* ddlse;                // (num_heads_q, total_q)
  float* delta;                // (num_heads_q, total_q), or null without dout
  float* ddelta;               // (num_heads_q, total_q), or null without dout
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

// ddO += (P o E) V + P ddV; rounded += rowsum(P o E) as rounded for the product
template <int NT, int NT_V, class Values>
__device__ __forceinline__ void add_products(float (&rddO)[1][NT_V][4], const float (&rP)[1][NT][4],
                                             const float (&rPE)[1][NT][4], const Values& v,
                                             float (&rounded)[1][4]) {
#pragma unroll
  for (int k = 0; k < NT / 2; ++k) {
    uint32_t p[1][4], pe[1][4];
    if constexpr (HAS_E) {
      to_operand(pe, rPE, k);
      add_row_sums(rounded, pe);
      multiply_step(rddO, pe, [&](uint32_t (&b)[4], int j) { v.load(b, k, j); });
    }
    if constexpr (cfg::HAS_TV) {
      to_operand(p, rP, k);
      multiply_step(rddO, p,
                    [&](uint32_t (&b)[4], int j) { v.load(b, k, j, SmemPlan::DDV - SmemPlan::V); });
    }
  }
}

// ddO, e, D and W of this warp's rows. A dead row, or one past the tokens, reads nothing.
__device__ __forceinline__ void epilogue(const Args& args, const QueryTile& tile, int warp_row,
                                         const PerRow<1>& lse_log2, const float (&tangent)[1][2],
                                         const float (&rounded)[1][4],
                                         float (&rddO)[1][HEAD_DIM_V / 8][4], char* smem) {
  const int lane = threadIdx.x % WARP_SIZE;
  const bool second = args.dout.data != nullptr;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + half * 8 + lane / 4;
    const bool alive = lse_log2.value[0][half] != INF;
    const float ddlse = sum_of_row(tangent[0][half]), e = rounded[0][half * 2];
    const uint16_t* gO = alive ? row_of(args.out, tile, row) + lane % 4 * 2 : nullptr;
    const uint16_t* gdO = alive && second ? row_of(args.dout, tile, row) + lane % 4 * 2 : nullptr;
    float delta = 0.0f, ddelta = 0.0f;
#pragma unroll
    for (int j = 0; j < HEAD_DIM_V / 8; ++j) {
      if (alive && j * 8 < cfg::WIDTH_V) {
        const Pair out(gO + j * 8);
        float& x = rddO[0][j][half * 2];
        float& y = rddO[0][j][half * 2 + 1];
        x -= e * out.x, y -= e * out.y;
        if (second) {
          const Pair dout(gdO + j * 8);
          delta += dout.x * out.x + dout.y * out.y;
          ddelta += dout.x * x + dout.y * y;
        }
      }
    }
    delta = sum_of_row(delta), ddelta = sum_of_row(ddelta);
    if (lane % 4 == 0 && tile.valid(row)) {
      const int64_t index = statistic_of(tile, row, args.total_q);
      args.ddlse[index] = ddlse;
      if (second) {
        args.delta[index] = alive && args.dlse ? delta - args.dlse[index] : delta;
        args.ddelta[index] = ddelta;
      }
    }
  }
  store_tile<TileO>(smem + SmemPlan::DDO, rddO, warp_row, 0, [](int, int) { return 1.0f; });
  __syncwarp();  // the rows were written by this warp's other lanes
  write_own_rows<TileO, cfg::WIDTH_V>(args.ddout, tile, smem + SmemPlan::DDO, warp_row);
}

// Rows of this warp: S, E and the products with V and ddV of every stage they named
__device__ __forceinline__ void differentiate(const Args& args, char* smem, const Ring& ring,
                                              const QueryTile& tile, int warp_row) {
  const uint32_t s0 = smem_address(smem);
  load_own_rows<TileQ, cfg::WIDTH>(s0 + SmemPlan::Q, args.q, tile, warp_row);
  if constexpr (cfg::HAS_TQ) {
    load_own_rows<TileQ, cfg::WIDTH>(s0 + SmemPlan::DDQ, args.ddq, tile, warp_row);
  }
  cp_async_commit();
  const OperandA<TileQ> queries(s0 + SmemPlan::Q, warp_row);
  const PerRow<1> lse_log2 = own_lse_log2(args.lse, tile, warp_row, args.total_q);
  float rddO[1][HEAD_DIM_V / 8][4], tangent[1][2] = {}, rounded[1][4] = {};
  clear(rddO);
  cp_async_wait<0>();
  __syncwarp();  // Q and ddQ were loaded by this warp's other lanes
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
      multiply_scores<HEAD_DIM, SmemPlan::DDQ - SmemPlan::Q, SmemPlan::DDK>(
          rP, rE, queries, OperandB<TileK>(place, col));
      if constexpr (cfg::HAS_SCALE) apply_factors(rP, rE, factor, factor_tangent);
      if (rows.cut) cut_rows(rP, rows, col);
      scores_to_p(rP, lse_log2, args.softmax_scale * LOG2E);
      if constexpr (HAS_E) weigh_tangents(rE, rP, args.softmax_scale, tangent);
      add_products(rddO, rP, rE, OperandBT<TileV>(place + SmemPlan::V, col), rounded);
    }
  });
  epilogue(args, tile, warp_row, lse_log2, tangent, rounded, rddO, smem);
}

extern "C" __global__ void __launch_bounds__(NUM_WARPS* WARP_SIZE, cfg::MIN_CTAS)
    sparse_double_backward_out(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char smem[];
  const QueryTile tile = find_query_tile(args);
  if (tile.keys.length < 0) {  // tokens that belong to no sequence
    zero_own_rows<cfg::WIDTH_V>(args.ddout, tile);
    for (int r = threadIdx.x; tile.valid(r); r += NUM_WARPS * WARP_SIZE) {
      const int64_t index = statistic_of(tile, r, args.total_q);
      args.ddlse[index] = 0.0f;
      if (args.delta) args.delta[index] = args.ddelta[index] = 0.0f;
    }
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

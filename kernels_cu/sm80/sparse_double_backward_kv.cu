// sparse_double_backward_kv: gK = softmax_scale ((g tdS + ddg dS)^T Q + (g dS)^T ddQ) and
//                            gV = tP^T dO of selected blocks of keys, and the gradient of g:
//                            rowsum over a block of  tdS o S + dS o (ddQ K^T + Q ddK^T).
//   tP = P o (E - e),  dS = P o (dP - D),  tdS = tP o (dP - D) + P o (dO ddV^T - W),
//   E = softmax_scale (g (ddQ K^T + Q ddK^T) + ddg Q K^T); e, D and W come from
//   sparse_double_backward_out.
//
//              BLOCK_N keys             A CTA owns BLOCK_N keys of one block and one kv head, and
//            +-------------+            walks over the queries that selected the block, gathered by
//   BLOCK_M  | S, E, dP, X |            the lists of base/selection.cuh (sm80/sparse_gather.cuh), all
//   gathered | -> tP, dS,  |            chunks in order. Warps lie as WARPS_M_S x .. over the scores,
//   rows     |     tdS     |            WARPS_N_KV x .. over gK and gV.
//            +-------------+            Grid: (parts of blocks of keys; kv heads).
//     ^T x dO, Q, ddQ -> gV, gK
//
// Twin: rawattn/kernels_numba/sparse_double_backward_kv.py. Source: native sparse attention,
// arXiv 2502.11089; rawattn/reference/sparse.py has the equations.
#include "sm80/sparse_gather.cuh"
#include "sm80/tangent.cuh"

using cfg::HEAD_DIM, cfg::HEAD_DIM_V;
constexpr int STEP_N = BLOCK_N >= 16 * cfg::PIECES ? BLOCK_N / cfg::PIECES : 16;  // weighed at once
using PieceS = Piece<BLOCK_M, STEP_N, cfg::WARPS_M_S>;
using PieceK = Piece<BLOCK_N, HEAD_DIM, cfg::WARPS_N_KV>;
using PieceV = Piece<BLOCK_N, HEAD_DIM_V, cfg::WARPS_N_KV>;

using TileQ = Tile<BLOCK_M, HEAD_DIM>;
using TileO = Tile<BLOCK_M, HEAD_DIM_V>;
using TileK = Tile<BLOCK_N, HEAD_DIM>;
using TileV = Tile<BLOCK_N, HEAD_DIM_V>;
using TileP = Tile<BLOCK_M, (BLOCK_N < 32 ? 32 : BLOCK_N)>;

struct SmemPlan {
  static constexpr int K = 0;  // gK overlaps K at the end, gV overlaps V
  static constexpr int DDK = K + TileK::BYTES;
  static constexpr int V = DDK + TileK::BYTES;
  static constexpr int DDV = V + TileV::BYTES;
  static constexpr int Q = DDV + TileV::BYTES;
  static constexpr int DDQ = Q + TileQ::BYTES;
  static constexpr int DO = DDQ + TileQ::BYTES;
  static constexpr int TP = DO + TileO::BYTES;
  static constexpr int DS = TP + TileP::BYTES;
  static constexpr int TDS = DS + TileP::BYTES;
  static constexpr int STATISTICS = TDS + TileP::BYTES;         // [L, D, e, W][BLOCK_M]
  static constexpr int FACTORS = STATISTICS + 4 * BLOCK_M * 4;  // [piece][BLOCK_M]
  static constexpr int CODES = FACTORS + 4 * BLOCK_M * 4;       // [2][ITEM_INTS]
  static constexpr int BYTES = CODES + 2 * ITEM_INTS * 4;
};
static_assert(SmemPlan::BYTES == cfg::SMEM_BYTES, "variants.smem_bytes and SmemPlan differ");
static_assert(PieceS::WARPS_N <= 4, "cfg::WARPS_M_S: four pieces along the keys at most");

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
  const int* starts;           // (chunks, num_heads_kv, units)
  const int* lengths;          // (chunks, num_heads_kv, units)
  const int* queries;          // items of all lists
  const int* query_slots;      // their slots
  const float* block_scale;    // (total_q, num_heads_sel, num_selected); null without HAS_SCALE
  const float* ddblock_scale;  // like block_scale, or null
  float* gblock_scale;         // like block_scale, zeroed, or null
  const int* cu_seqlens_q;     // (batch + 1,)
  const int* cu_seqlens_k;     // (batch + 1,)
  Tensor gk;                   // (total_k, num_heads_kv, head_dim)
  Tensor gv;                   // (total_k, num_heads_kv, head_dim_v)
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

// Q, ddQ, dO and the row terms of a tile of items. Rows without an item are zeros in all of them: P
// is 1 there and adds nothing.
__device__ __forceinline__ void load_rows(const Args& args, uint32_t s0, const Items& items,
                                          const KeyTile& tile) {
  gather_rows<TileQ, cfg::WIDTH>(s0 + SmemPlan::Q, args.q, items, tile.kv_head);
  if constexpr (cfg::HAS_TQ) {
    gather_rows<TileQ, cfg::WIDTH>(s0 + SmemPlan::DDQ, args.ddq, items, tile.kv_head);
  }
  gather_rows<TileO, cfg::WIDTH_V>(s0 + SmemPlan::DO, args.dout, items, tile.kv_head);
  const float* statistics[4] = {args.lse, args.delta, args.ddlse, args.ddelta};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    gather_statistic(s0 + SmemPlan::STATISTICS + i * BLOCK_M * 4, statistics[i], items,
                     tile.kv_head, args.total_q);
  }
}

// tP, g dS and g tdS + ddg dS of this tile into shared memory, cfg::PIECES times STEP_N columns;
// with factors also the row sums of their gradient.
__device__ __forceinline__ void make_tiles(const Args& args, char* smem, const Items& items,
                                           const KeyTile& tile, const PieceS& piece) {
  if (!piece.any()) return;
  constexpr int MT = PieceS::MT, NT = PieceS::NT;
  const int lane = threadIdx.x % WARP_SIZE;
  const uint32_t s0 = smem_address(smem);
  const OperandA<TileQ> q(s0 + SmemPlan::Q, piece.row);
  const OperandA<TileO> dout(s0 + SmemPlan::DO, piece.row);
  const float* lse =
      reinterpret_cast<const float*>(smem + SmemPlan::STATISTICS) + piece.row + lane / 4;
  const auto one = [](int, int) { return 1.0f; };
  float factor[MT][2], factor_tangent[MT][2], factor_sum[MT][2] = {};
  if constexpr (cfg::HAS_SCALE) {
    gather_factors(factor, args.block_scale, items, tile, args.sizes, piece.row, 1.0f);
    gather_factors(factor_tangent, args.ddblock_scale, items, tile, args.sizes, piece.row, 0.0f);
  }
#pragma unroll 1
  for (int part = 0; part < BLOCK_N; part += STEP_N) {
    const int col = part + piece.col;
    float rP[MT][NT][4], rE[MT][NT][4];
    float rS[cfg::HAS_SCALE ? MT : 1][cfg::HAS_SCALE ? NT : 1][4];   // as they are without factors
    float rtS[cfg::HAS_SCALE ? MT : 1][cfg::HAS_SCALE ? NT : 1][4];  // ddQ K^T + Q ddK^T
    multiply_scores<HEAD_DIM, SmemPlan::DDQ - SmemPlan::Q, SmemPlan::DDK - SmemPlan::K>(
        rP, rE, q, OperandB<TileK>(s0 + SmemPlan::K, col));
    if constexpr (cfg::HAS_SCALE) {
#pragma unroll
      for (int i = 0; i < MT; ++i) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) rS[i][j][e] = rP[i][j][e], rtS[i][j][e] = rE[i][j][e];
        }
      }
      apply_factors(rP, rE, factor, factor_tangent);
    }
    if (!whole(items, tile)) cut_scores(rP, items, tile, piece.row, col);
    scores_to_p(rP, load_lse_log2<MT>(lse, 0, BLOCK_M), args.softmax_scale * LOG2E);
    float rdP[MT][NT][4], rX[MT][NT][4];
    multiply_gradients<HEAD_DIM_V, SmemPlan::DDV - SmemPlan::V>(
        rdP, rX, dout, OperandB<TileV>(s0 + SmemPlan::V, col));
    // L is read again rather than kept: registers are what this loop is short of
    const auto lse_log2 = load_lse_log2<MT>(lse, 0, BLOCK_M);
    const RowTerms<MT> terms{load_delta<MT>(lse + BLOCK_M, 0, lse_log2),
                             load_delta<MT>(lse + 2 * BLOCK_M, 0, lse_log2),
                             load_delta<MT>(lse + 3 * BLOCK_M, 0, lse_log2)};
    tangents_of_p_and_ds(rE, rdP, rX, rP, terms, args.softmax_scale);
    if constexpr (cfg::HAS_SCALE) {
#pragma unroll
      for (int i = 0; i < MT; ++i) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            factor_sum[i][e / 2] +=
                args.softmax_scale * (rX[i][j][e] * rS[i][j][e] + rdP[i][j][e] * rtS[i][j][e]);
          }
        }
      }
      apply_factors(rdP, rX, factor, factor_tangent);
    }
    if constexpr (HAS_E) {
      store_tile<TileP>(smem + SmemPlan::TP, rE, piece.row, col, one);
      store_tile<TileP>(smem + SmemPlan::DS, rdP, piece.row, col, one);
    }
    store_tile<TileP>(smem + SmemPlan::TDS, rX, piece.row, col, one);
  }
  if constexpr (cfg::HAS_SCALE) {
    store_factor_sums<MT>(reinterpret_cast<float*>(smem + SmemPlan::FACTORS), factor_sum, piece);
  }
}

// X of this CTA's keys, scaled, through `place` in shared memory to a packed tensor
template <class TileT, class PieceT>
__device__ __forceinline__ void put_keys(const float (&rX)[PieceT::MT][PieceT::NT][4],
                                         const PieceT& piece, char* place, float scale) {
  if (piece.any()) {
    store_tile<TileT>(place, rX, piece.row, piece.col, [&](int, int) { return scale; });
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    sparse_double_backward_kv(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char smem[];
  const KeyTile tile = find_key_tile(args);
  if (tile.keys <= 0) return;
  uint16_t* ggK = args.gk.at(tile.first_row, tile.kv_head);
  uint16_t* ggV = args.gv.at(tile.first_row, tile.kv_head);
  ItemWalk walk{};
  if (tile.batch_index >= 0) walk = walk_items(args, tile);
  if (walk.done()) {  // nobody sees these keys, or they belong to no sequence
    zero_rows<cfg::WIDTH, NUM_THREADS>(ggK, args.gk.token_stride, tile.keys);
    zero_rows<cfg::WIDTH_V, NUM_THREADS>(ggV, args.gv.token_stride, tile.keys);
    return;
  }

  const uint32_t s0 = smem_address(smem);
  const int warp = threadIdx.x / WARP_SIZE;
  const int ratio = args.sizes.num_heads_sel / args.num_heads_kv;
  const PieceS piece_s(warp);
  const PieceK piece_k(warp);
  const PieceV piece_v(warp);
  const auto load_k = [&](int offset, const Tensor& x) {
    load_tile_async<TileK, cfg::WIDTH, NUM_THREADS>(s0 + offset, x.at(tile.first_row, tile.kv_head),
                                                    x.token_stride, tile.keys);
  };
  const auto load_v = [&](int offset, const Tensor& x) {
    load_tile_async<TileV, cfg::WIDTH_V, NUM_THREADS>(
        s0 + offset, x.at(tile.first_row, tile.kv_head), x.token_stride, tile.keys);
  };
  const auto codes = [&](int buffer) {
    return reinterpret_cast<const int*>(smem + SmemPlan::CODES) + buffer * ITEM_INTS;
  };
  load_k(SmemPlan::K, args.k);
  if constexpr (cfg::HAS_TK) load_k(SmemPlan::DDK, args.ddk);
  if constexpr (HAS_E) load_v(SmemPlan::V, args.v);
  if constexpr (cfg::HAS_TV) load_v(SmemPlan::DDV, args.ddv);
  load_items(smem_address(codes(0)), args.queries, args.query_slots, walk);
  cp_async_commit();

  float rgK[PieceK::MT][PieceK::NT][4], rgV[PieceV::MT][PieceV::NT][4];
  clear(rgK);
  clear(rgV);
  for (int buffer = 0; !walk.done(); buffer ^= 1) {
    const Items items{codes(buffer), walk.left, ratio};
    cp_async_wait<0>();
    __syncthreads();  // the items are here; every warp has left Q, ddQ, dO, tP, dS and tdS
    load_rows(args, s0, items, tile);
    walk.advance();
    if (!walk.done()) {
      load_items(smem_address(codes(buffer ^ 1)), args.queries, args.query_slots, walk);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // Q, ddQ, dO and the row terms are here
    make_tiles(args, smem, items, tile, piece_s);
    __syncthreads();  // tP, dS and tdS are whole
    if constexpr (cfg::HAS_SCALE) {
      if (args.gblock_scale) {
        write_factor_gradients<PieceS::WARPS_N>(
            args.gblock_scale, reinterpret_cast<const float*>(smem + SmemPlan::FACTORS), items,
            tile, args.sizes);
      }
    }
    if constexpr (HAS_E) {
      if (piece_v.any()) {
        multiply_xty<BLOCK_M>(rgV,
                              OperandAT<TileP, PieceV::SPAN_M>(s0 + SmemPlan::TP, 0, piece_v.row),
                              OperandBT<TileO, PieceV::SPAN_N>(s0 + SmemPlan::DO, 0, piece_v.col));
      }
    }
    if (piece_k.any()) {
      multiply_xty<BLOCK_M>(rgK,
                            OperandAT<TileP, PieceK::SPAN_M>(s0 + SmemPlan::TDS, 0, piece_k.row),
                            OperandBT<TileQ, PieceK::SPAN_N>(s0 + SmemPlan::Q, 0, piece_k.col));
      if constexpr (cfg::HAS_TQ) {
        multiply_xty<BLOCK_M>(rgK,
                              OperandAT<TileP, PieceK::SPAN_M>(s0 + SmemPlan::DS, 0, piece_k.row),
                              OperandBT<TileQ, PieceK::SPAN_N>(s0 + SmemPlan::DDQ, 0, piece_k.col));
      }
    }
  }

  __syncthreads();  // every warp has left K and V: gK and gV take their place
  put_keys<TileK>(rgK, piece_k, smem + SmemPlan::K, args.softmax_scale);
  put_keys<TileV>(rgV, piece_v, smem + SmemPlan::V, 1.0f);
  __syncthreads();  // both are whole
  write_rows<TileK, cfg::WIDTH, NUM_THREADS, BLOCK_N>(ggK, args.gk.token_stride, smem + SmemPlan::K,
                                                      0, tile.keys, threadIdx.x);
  write_rows<TileV, cfg::WIDTH_V, NUM_THREADS, BLOCK_N>(
      ggV, args.gv.token_stride, smem + SmemPlan::V, 0, tile.keys, threadIdx.x);
}

// sparse_backward_kv: dK = softmax_scale (g dS)^T Q and dV = P^T dO of selected blocks of keys;
//                     dQ += (g dS) K by float32 atomic adds (cfg::ATOMIC), and the gradient of g.
//
//              BLOCK_N keys             A CTA owns BLOCK_N keys of one block and one kv head, and
//            +-------------+            walks over the queries that selected the block, gathered by
//   BLOCK_M  | S, dP -> P, |  x K -> dQ the lists of base/selection.cuh (sm80/sparse_gather.cuh).
//   gathered |      dS     |            Warps lie as WARPS_M_S x .. over S and dP, WARPS_N_KV x ..
//   rows     +-------------+            over dK and dV, WARPS_M_DQ x .. over dQ.
//             ^T x dO, Q -> dV, dK      Grid: (parts of blocks of keys; kv heads), or (parts of
//                                       segments of work).
//
// With dk_accum a CTA takes a segment of work, queries of one chunk, whose Q, dO and dQ stay in the
// L2 cache, and adds dK and dV atomically; without, all queries of its keys in order, and dK and dV
// are written: deterministic.
// Twin: rawattn/kernels_numba/sparse_backward_kv.py. Source: native sparse attention, arXiv 2502.11089;
// FlashAttention-2, arXiv 2307.08691, algorithm 2.
#include "sm80/gradient.cuh"
#include "sm80/sparse_gather.cuh"

using cfg::HEAD_DIM, cfg::HEAD_DIM_V, cfg::NUM_STAGES;
constexpr int STEP_N =
    BLOCK_N >= 16 * cfg::PIECES ? BLOCK_N / cfg::PIECES : 16;  // keys that are weighed at once
using PieceS = Piece<BLOCK_M, STEP_N, cfg::WARPS_M_S>;
using PieceK = Piece<BLOCK_N, HEAD_DIM, cfg::WARPS_N_KV>;
using PieceV = Piece<BLOCK_N, HEAD_DIM_V, cfg::WARPS_N_KV>;
using PieceQ = Piece<BLOCK_M, HEAD_DIM, cfg::WARPS_M_DQ>;

using TileQ = Tile<BLOCK_M, HEAD_DIM>;
using TileO = Tile<BLOCK_M, HEAD_DIM_V>;
using TileK = Tile<BLOCK_N, HEAD_DIM>;
using TileV = Tile<BLOCK_N, HEAD_DIM_V>;
using TileP = Tile<BLOCK_M, (BLOCK_N < 32 ? 32 : BLOCK_N)>;

struct SmemPlan {
  static constexpr int K = 0;  // dK overlaps K at the end, dV overlaps V
  static constexpr int V = K + TileK::BYTES;
  static constexpr int Q = V + TileV::BYTES;
  static constexpr int DO = Q + NUM_STAGES * TileQ::BYTES;
  static constexpr int P = DO + NUM_STAGES * TileO::BYTES;
  static constexpr int DS = P + TileP::BYTES;
  static constexpr int STATISTICS = DS + TileP::BYTES;  // [stage][L, D][BLOCK_M]
  static constexpr int FACTORS = STATISTICS + NUM_STAGES * 2 * BLOCK_M * 4;  // [piece][BLOCK_M]
  static constexpr int CODES = FACTORS + 4 * BLOCK_M * 4;                    // [3][ITEM_INTS]
  static constexpr int BYTES = CODES + 3 * ITEM_INTS * 4;
};
static_assert(SmemPlan::BYTES == cfg::SMEM_BYTES, "variants.smem_bytes and SmemPlan differ");
static_assert(PieceS::WARPS_N <= 4, "cfg::WARPS_M_S: four pieces along the keys at most");

struct Args {
  Tensor q;                  // (total_q, num_heads_q, head_dim)
  Tensor k;                  // (total_k, num_heads_kv, head_dim)
  Tensor v;                  // (total_k, num_heads_kv, head_dim_v)
  Tensor dout;               // (total_q, num_heads_q, head_dim_v)
  const float* lse;          // (num_heads_q, total_q)
  const float* delta;        // (num_heads_q, total_q)
  const int* starts;         // (chunks, num_heads_kv, units)
  const int* lengths;        // (chunks, num_heads_kv, units)
  const int* queries;        // items of all lists
  const int* query_slots;    // their slots
  const int* work;           // (segments, 4) as block_offsets cuts them; unused without dk_accum
  const float* block_scale;  // (total_q, num_heads_sel, num_selected); null without cfg::HAS_SCALE
  float* dblock_scale;       // like block_scale, zeroed
  const int* cu_seqlens_q;   // (batch + 1,)
  const int* cu_seqlens_k;   // (batch + 1,)
  float* dq_accum;           // (total_q, num_heads_q, HEAD_DIM), zeroed; unused without cfg::ATOMIC
  Tensor dk;                 // (total_k, num_heads_kv, head_dim), or null
  Tensor dv;                 // (total_k, num_heads_kv, head_dim_v), or null
  float* dk_accum;           // (total_k, num_heads_kv, HEAD_DIM), zeroed, or null
  float* dv_accum;           // (total_k, num_heads_kv, HEAD_DIM_V), zeroed, or null
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

// Q, dO, L and D of a tile of items into a stage. Rows without an item are zeros in all four: P is
// 1 there and adds nothing.
__device__ __forceinline__ void load_rows(const Args& args, uint32_t s0, const Items& items,
                                          const KeyTile& tile, int stage) {
  gather_rows<TileQ, cfg::WIDTH>(s0 + SmemPlan::Q + stage * TileQ::BYTES, args.q, items,
                                 tile.kv_head);
  gather_rows<TileO, cfg::WIDTH_V>(s0 + SmemPlan::DO + stage * TileO::BYTES, args.dout, items,
                                   tile.kv_head);
  const uint32_t statistics = s0 + SmemPlan::STATISTICS + stage * 2 * BLOCK_M * 4;
  gather_statistic(statistics, args.lse, items, tile.kv_head, args.total_q);
  gather_statistic(statistics + BLOCK_M * 4, args.delta, items, tile.kv_head, args.total_q);
}

// P and g dS of this tile into shared memory, cfg::PIECES times BLOCK_N / PIECES columns; with
// factors also the row sums of softmax_scale dS o (Q K^T).
__device__ __forceinline__ void make_p_and_ds(const Args& args, char* smem, const Items& items,
                                              const KeyTile& tile, const PieceS& piece, int stage) {
  if (!piece.any()) return;
  const int lane = threadIdx.x % WARP_SIZE;
  const uint32_t s0 = smem_address(smem);
  const OperandA<TileQ> queries(s0 + SmemPlan::Q + stage * TileQ::BYTES, piece.row);
  const OperandA<TileO> gradients(s0 + SmemPlan::DO + stage * TileO::BYTES, piece.row);
  const float* lse = reinterpret_cast<const float*>(smem + SmemPlan::STATISTICS) +
                     stage * 2 * BLOCK_M + piece.row + lane / 4;
  const float scale_log2 = args.softmax_scale * LOG2E;
  const auto one = [](int, int) { return 1.0f; };
  float factor[PieceS::MT][2], factor_sum[PieceS::MT][2] = {};
  if constexpr (cfg::HAS_SCALE) {
    gather_factors(factor, args.block_scale, items, tile, args.sizes, piece.row, 1.0f);
  }
#pragma unroll 1
  for (int part = 0; part < BLOCK_N; part += STEP_N) {
    const int col = part + piece.col;
    float rP[PieceS::MT][PieceS::NT][4], rdS[PieceS::MT][PieceS::NT][4];
    float rS[cfg::HAS_SCALE ? PieceS::MT : 1][cfg::HAS_SCALE ? PieceS::NT : 1][4];
    clear(rP);
    multiply_xyt<HEAD_DIM>(rP, queries, OperandB<TileK>(s0 + SmemPlan::K, col));
    if constexpr (cfg::HAS_SCALE) {
#pragma unroll
      for (int i = 0; i < PieceS::MT; ++i) {
#pragma unroll
        for (int j = 0; j < PieceS::NT; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            rS[i][j][e] = rP[i][j][e];
            rP[i][j][e] *= factor[i][e / 2];
          }
        }
      }
    }
    if (!whole(items, tile)) cut_scores(rP, items, tile, piece.row, col);
    scores_to_p(rP, load_lse_log2<PieceS::MT>(lse, 0, BLOCK_M), scale_log2);
    store_tile<TileP>(smem + SmemPlan::P, rP, piece.row, col, one);
    clear(rdS);
    multiply_xyt<HEAD_DIM_V>(rdS, gradients, OperandB<TileV>(s0 + SmemPlan::V, col));
    // L is read again rather than kept: registers are what this loop is short of
    const auto lse_log2 = load_lse_log2<PieceS::MT>(lse, 0, BLOCK_M);
    dp_to_ds(rdS, rP, load_delta<PieceS::MT>(lse + BLOCK_M, 0, lse_log2));
    if constexpr (cfg::HAS_SCALE) {
#pragma unroll
      for (int i = 0; i < PieceS::MT; ++i) {
#pragma unroll
        for (int j = 0; j < PieceS::NT; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            factor_sum[i][e / 2] += rdS[i][j][e] * rS[i][j][e] * args.softmax_scale;
            rdS[i][j][e] *= factor[i][e / 2];
          }
        }
      }
    }
    store_tile<TileP>(smem + SmemPlan::DS, rdS, piece.row, col, one);
  }
  if constexpr (cfg::HAS_SCALE) {
    store_factor_sums<PieceS::MT>(reinterpret_cast<float*>(smem + SmemPlan::FACTORS), factor_sum,
                                  piece);
  }
}

// dQ of this tile of rows: g dS K, added to the rows' sums
__device__ __forceinline__ void add_dq(const Args& args, uint32_t s0, const Items& items,
                                       const KeyTile& tile, const PieceQ& piece) {
  if (!piece.any()) return;
  float rdQ[PieceQ::MT][PieceQ::NT][4];
  clear(rdQ);
  multiply_xy<BLOCK_N>(rdQ, OperandA<TileP>(s0 + SmemPlan::DS, piece.row),
                       OperandBT<TileK, PieceQ::SPAN_N>(s0 + SmemPlan::K, 0, piece.col));
  add_rows(rdQ, piece.col, [&](int row) -> float* {
    row += piece.row;
    if (!items.valid(row)) return nullptr;
    const int64_t at = static_cast<int64_t>(items.token(row)) * args.num_heads_q;
    return args.dq_accum + (at + items.head(row, tile.kv_head)) * HEAD_DIM;
  });
}

// X of this CTA's keys, scaled, to a packed tensor through `place` in shared memory, or added to
// its sums
template <class TileT, class PieceT, int WIDTH>
__device__ __forceinline__ void write_keys(const Tensor& gX, float* accum,
                                           const float (&rX)[PieceT::MT][PieceT::NT][4],
                                           const PieceT& piece, const KeyTile& tile, int num_heads,
                                           char* place, float scale) {
  if (accum != nullptr) {
    if (!piece.any()) return;
    add_rows(rX, piece.col, [&](int row) -> float* {
      row += piece.row;
      const int64_t at = static_cast<int64_t>(tile.first_row + row) * num_heads + tile.kv_head;
      return row < tile.keys ? accum + at * TileT::COLS : nullptr;
    });
    return;
  }
  if (piece.any()) {
    store_tile<TileT>(place, rX, piece.row, piece.col, [&](int, int) { return scale; });
  }
  __syncthreads();  // the tile is whole
  write_rows<TileT, WIDTH, NUM_THREADS, BLOCK_N>(gX.at(tile.first_row, tile.kv_head),
                                                 gX.token_stride, place, 0, tile.keys, threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    sparse_backward_kv(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char smem[];
  KeyTile tile;
  ItemWalk walk{};
  if (args.dk_accum != nullptr) {
    constexpr int PARTS = BLOCK_SIZE / BLOCK_N;
    const int4 work = reinterpret_cast<const int4*>(args.work)[blockIdx.x / PARTS];
    if (work.x < 0) return;  // there are fewer segments
    tile = find_work(args, work, walk);
    if (tile.keys <= 0) return;
  } else {
    tile = find_key_tile(args);
    if (tile.keys <= 0) return;
    if (tile.batch_index >= 0) walk = walk_items(args, tile);
  }
  if (walk.done()) {  // nobody sees these keys, or they belong to no sequence
    zero_rows<cfg::WIDTH, NUM_THREADS>(args.dk.at(tile.first_row, tile.kv_head),
                                       args.dk.token_stride, tile.keys);
    zero_rows<cfg::WIDTH_V, NUM_THREADS>(args.dv.at(tile.first_row, tile.kv_head),
                                         args.dv.token_stride, tile.keys);
    return;
  }

  const uint32_t s0 = smem_address(smem);
  const int warp = threadIdx.x / WARP_SIZE;
  const int ratio = args.sizes.num_heads_sel / args.num_heads_kv;
  const PieceS piece_s(warp);
  const PieceK piece_k(warp);
  const PieceV piece_v(warp);
  const PieceQ piece_q(warp);
  const auto codes = [&](int buffer) {
    return reinterpret_cast<const int*>(smem + SmemPlan::CODES) + buffer * ITEM_INTS;
  };
  const auto fetch_items = [&](int buffer) {
    load_items(smem_address(codes(buffer)), args.queries, args.query_slots, walk);
  };
  load_tile_async<TileK, cfg::WIDTH, NUM_THREADS>(
      s0 + SmemPlan::K, args.k.at(tile.first_row, tile.kv_head), args.k.token_stride, tile.keys);
  load_tile_async<TileV, cfg::WIDTH_V, NUM_THREADS>(
      s0 + SmemPlan::V, args.v.at(tile.first_row, tile.kv_head), args.v.token_stride, tile.keys);
  Items items{codes(0), walk.left, ratio};
  fetch_items(0);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();  // the first items are there
  load_rows(args, s0, items, tile, 0);
  walk.advance();
  if (!walk.done()) fetch_items(1);
  cp_async_commit();

  float rdK[PieceK::MT][PieceK::NT][4], rdV[PieceV::MT][PieceV::NT][4];
  clear(rdK);
  clear(rdV);
  int stage = 0, buffer = 0;  // of the tile of rows; of its items
  while (true) {
    // `walk` is at the tile behind this one; its items came with this one's rows
    const bool more = !walk.done();
    const int next_buffer = buffer == 2 ? 0 : buffer + 1;
    const Items next{codes(next_buffer), walk.left, ratio};
    const auto load_next = [&](int into) {
      load_rows(args, s0, next, tile, into);
      walk.advance();
      if (!walk.done()) fetch_items(next_buffer == 2 ? 0 : next_buffer + 1);
      cp_async_commit();
    };
    cp_async_wait<0>();
    __syncthreads();  // rows and items are here; every warp has left P, dS and the other stage
    if (NUM_STAGES == 2 && more) load_next(stage ^ 1);
    make_p_and_ds(args, smem, items, tile, piece_s, stage);
    __syncthreads();  // P and dS are whole

    if constexpr (cfg::HAS_SCALE) {
      write_factor_gradients<PieceS::WARPS_N>(
          args.dblock_scale, reinterpret_cast<const float*>(smem + SmemPlan::FACTORS), items, tile,
          args.sizes);
    }
    if (piece_v.any()) {
      multiply_xty<BLOCK_M>(rdV, OperandAT<TileP, PieceV::SPAN_M>(s0 + SmemPlan::P, 0, piece_v.row),
                            OperandBT<TileO, PieceV::SPAN_N>(
                                s0 + SmemPlan::DO + stage * TileO::BYTES, 0, piece_v.col));
    }
    if constexpr (cfg::ATOMIC) add_dq(args, s0, items, tile, piece_q);
    if (piece_k.any()) {
      multiply_xty<BLOCK_M>(rdK,
                            OperandAT<TileP, PieceK::SPAN_M>(s0 + SmemPlan::DS, 0, piece_k.row),
                            OperandBT<TileQ, PieceK::SPAN_N>(
                                s0 + SmemPlan::Q + stage * TileQ::BYTES, 0, piece_k.col));
    }
    if (!more) break;
    if constexpr (NUM_STAGES == 2) {
      stage ^= 1;
    } else {
      __syncthreads();  // every warp has left Q and dO
      load_next(0);
    }
    items = next;
    buffer = next_buffer;
  }

  __syncthreads();  // every warp has left K and V: dK and dV take their place
  write_keys<TileK, PieceK, cfg::WIDTH>(args.dk, args.dk_accum, rdK, piece_k, tile,
                                        args.num_heads_kv, smem + SmemPlan::K, args.softmax_scale);
  write_keys<TileV, PieceV, cfg::WIDTH_V>(args.dv, args.dv_accum, rdV, piece_v, tile,
                                          args.num_heads_kv, smem + SmemPlan::V, 1.0f);
}

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
#include "base/statistics.cuh"
#include "sm80/sparse_gather.cuh"

using cfg::NUM_STAGES;

struct SmemPlan {
  TileK k;  // dK takes its place at the end
  TileV v;  // dV its
  TileQ q[NUM_STAGES];
  TileO dout[NUM_STAGES];
  TileP p, ds;
  float terms[NUM_STAGES][2][BLOCK_M];  // L, D
  float scale_sums[4][BLOCK_M];         // [place of a warp along the keys][row]
  ItemCodes items[3];
};
static_assert(sizeof(SmemPlan) == cfg::SMEM_BYTES, "the row's shared memory and SmemPlan differ");

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
  const float* block_scale;  // (total_q, num_heads_sel, num_selected), or null
  float* dblock_scale;       // like block_scale, zeroed
  const int* cu_seqlens_q;   // (batch + 1,)
  const int* cu_seqlens_k;   // (batch + 1,)
  float* dq_accum;           // (total_q, num_heads_q, HEAD_DIM), zeroed; unused without cfg::ATOMIC
  Tensor dk;                 // (total_k, num_heads_kv, head_dim), or null
  Tensor dv;                 // (total_k, num_heads_kv, head_dim_v), or null
  float* dk_accum;           // (total_k, num_heads_kv, HEAD_DIM), zeroed, or null
  float* dv_accum;           // (total_k, num_heads_kv, HEAD_DIM_V), zeroed, or null
  Sizes sizes;
  SelectionSizes selection;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES,
              "struct Args and rawattn/ops/sparse_backward_kv.py differ");

// Q, dO, L and D of a tile of items into a stage. Rows without an item are zeros in all four: P is
// 1 there and adds nothing.
__device__ __forceinline__ void load_queries(const Args& args, SmemPlan& smem, const Items& items,
                                             int kv_head, int stage) {
  gather_rows<cfg::WIDTH>(smem.q[stage], args.q, items, kv_head);
  gather_rows<cfg::WIDTH_V>(smem.dout[stage], args.dout, items, kv_head);
  gather_statistic(smem.terms[stage][0], args.lse, items, kv_head, args.sizes.total_q);
  gather_statistic(smem.terms[stage][1], args.delta, items, kv_head, args.sizes.total_q);
}

// P and g dS of this tile into shared memory, STEP_N columns at a time; with scales of blocks also
// the row sums of softmax_scale dS o (Q K^T).
__device__ __forceinline__ void make_p_and_ds(const Args& args, SmemPlan& smem, const Items& items,
                                              const BlockTile& tile, const WarpS& warp, int stage) {
  if (!warp.any()) return;
  constexpr int MT = WarpS::MT, NT = WarpS::NT;
  const int lane = threadIdx.x % WARP_SIZE;
  const float softmax_scale = args.sizes.softmax_scale;
  const OperandA<TileQ> queries(smem.q[stage].address(), warp.row);
  const OperandA<TileO> gradients(smem.dout[stage].address(), warp.row);
  const float* lse = &smem.terms[stage][0][warp.row + lane / 4];
  float scale[MT][2], scale_sum[MT][2] = {};
  if constexpr (cfg::HAS_BLOCK_SCALE) {
    gather_block_scale(scale, args.block_scale, items, tile, args.selection, warp.row, 1.0f);
  }
#pragma unroll 1
  for (int part = 0; part < BLOCK_N; part += STEP_N) {
    const int col = part + warp.col;
    float rP[MT][NT][4], rdS[MT][NT][4];
    float rS[cfg::HAS_BLOCK_SCALE ? MT : 1][cfg::HAS_BLOCK_SCALE ? NT : 1]
            [4];  // as they are without scales
    clear(rP);
    multiply_xyt<HEAD_DIM>(rP, queries, OperandB<TileK>(smem.k.address(), col));
    if constexpr (cfg::HAS_BLOCK_SCALE) {
      for_each<MT, NT>([&](int i, int j, int e) {
        rS[i][j][e] = rP[i][j][e];
        rP[i][j][e] *= scale[i][e / 2];
      });
    }
    if (!whole(items, tile)) cut_scores(rP, items, tile, warp.row, col);
    scores_to_p(rP, load_lse_log2<MT>(lse, 0, BLOCK_M), softmax_scale * LOG2E);
    store_tile(smem.p, rP, warp.row, col);
    clear(rdS);
    multiply_xyt<HEAD_DIM_V>(rdS, gradients, OperandB<TileV>(smem.v.address(), col));
    // L is read again rather than kept: registers are what this loop is short of
    const auto lse_log2 = load_lse_log2<MT>(lse, 0, BLOCK_M);
    dp_to_ds(rdS, rP, load_delta<MT>(lse + BLOCK_M, 0, lse_log2));
    if constexpr (cfg::HAS_BLOCK_SCALE) {
      for_each<MT, NT>([&](int i, int j, int e) {
        scale_sum[i][e / 2] += rdS[i][j][e] * rS[i][j][e] * softmax_scale;
        rdS[i][j][e] *= scale[i][e / 2];
      });
    }
    store_tile(smem.ds, rdS, warp.row, col);
  }
  if constexpr (cfg::HAS_BLOCK_SCALE) store_scale_sums(smem.scale_sums, scale_sum, warp);
}

// dQ of this tile of rows: g dS K, added to the rows' sums
__device__ __forceinline__ void add_dq(const Args& args, const SmemPlan& smem, const Items& items,
                                       const BlockTile& tile, const WarpQ& warp) {
  if (!warp.any()) return;
  float rdQ[WarpQ::MT][WarpQ::NT][4];
  clear(rdQ);
  multiply_xy<BLOCK_N>(rdQ, OperandA<TileP>(smem.ds.address(), warp.row),
                       OperandBT<TileK, WarpQ::SPAN_N>(smem.k.address(), 0, warp.col));
  add_rows(rdQ, warp.col, [&](int row) -> float* {
    row += warp.row;
    if (!items.valid(row)) return nullptr;
    const int64_t at = static_cast<int64_t>(items.token(row)) * args.sizes.num_heads_q;
    return args.dq_accum + (at + items.head(row, tile.kv_head)) * HEAD_DIM;
  });
}

// X of this CTA's keys, scaled, to a packed tensor through `place`, or added to its sums
template <int WIDTH, class TileT, class WarpT>
__device__ __forceinline__ void write_keys(const Tensor& gX, float* accum,
                                           const float (&rX)[WarpT::MT][WarpT::NT][4],
                                           const WarpT& warp, const BlockTile& tile, int num_heads,
                                           TileT& place, float scale) {
  if (accum != nullptr) {
    if (!warp.any()) return;
    add_rows(rX, warp.col, [&](int row) -> float* {
      row += warp.row;
      const int64_t at = static_cast<int64_t>(tile.first_row + row) * num_heads + tile.kv_head;
      return row < tile.keys ? accum + at * TileT::COLS : nullptr;
    });
    return;
  }
  if (warp.any()) store_tile(place, rX, warp.row, warp.col, [&](int, int) { return scale; });
  __syncthreads();  // the tile is whole
  write_rows<WIDTH>(gX, tile.rows(), place);
}

// What this CTA works on: with dk_accum a segment of work, else all lists of its block. False where
// there are no keys, and nothing to write.
__device__ __forceinline__ bool find_tile_and_walk(const Args& args, BlockTile& tile,
                                                   ItemWalk& walk) {
  if (args.dk_accum != nullptr) {
    const int4 work = reinterpret_cast<const int4*>(args.work)[blockIdx.x / PARTS];
    if (work.x < 0) return false;  // there are fewer segments
    tile = find_work(args, work, walk);
    return tile.keys > 0;
  }
  tile = find_block_tile(args);
  if (tile.keys > 0 && tile.batch_index >= 0) walk = walk_items(args, tile);
  return tile.keys > 0;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    sparse_backward_kv(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared);
  BlockTile tile;
  ItemWalk walk{};
  if (!find_tile_and_walk(args, tile, walk)) return;
  if (walk.done()) {  // nobody sees these keys, or they belong to no sequence
    zero_rows<cfg::WIDTH>(args.dk, tile.rows());
    zero_rows<cfg::WIDTH_V>(args.dv, tile.rows());
    return;
  }
  const int ratio = args.selection.num_heads_sel / args.sizes.num_heads_kv;
  const KeyWarps<WarpS> warp(threadIdx.x / WARP_SIZE);
  const auto fetch_items = [&](int buffer) {
    load_items(smem.items[buffer], args.queries, args.query_slots, walk);
  };
  load_rows<cfg::WIDTH>(smem.k, args.k, tile.rows());
  load_rows<cfg::WIDTH_V>(smem.v, args.v, tile.rows());
  Items items{smem.items[0].codes, walk.left, ratio};
  fetch_items(0);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();  // the first items are there
  load_queries(args, smem, items, tile.kv_head, 0);
  walk.advance();
  if (!walk.done()) fetch_items(1);
  cp_async_commit();

  float rdK[WarpK::MT][WarpK::NT][4], rdV[WarpV::MT][WarpV::NT][4];
  clear(rdK);
  clear(rdV);
  int stage = 0, buffer = 0;  // of the tile of rows; of its items
  while (true) {
    // `walk` is at the tile behind this one; its items came with this one's rows
    const bool more = !walk.done();
    const int next_buffer = buffer == 2 ? 0 : buffer + 1;
    const Items next{smem.items[next_buffer].codes, walk.left, ratio};
    const auto load_next = [&](int into) {
      load_queries(args, smem, next, tile.kv_head, into);
      walk.advance();
      if (!walk.done()) fetch_items(next_buffer == 2 ? 0 : next_buffer + 1);
      cp_async_commit();
    };
    cp_async_wait<0>();
    __syncthreads();  // rows and items are here; every warp has left P, dS and the other stage
    if (NUM_STAGES == 2 && more) load_next(stage ^ 1);
    make_p_and_ds(args, smem, items, tile, warp.s, stage);
    __syncthreads();  // P and dS are whole

    if constexpr (cfg::HAS_BLOCK_SCALE) {
      write_scale_gradients<WarpS::WARPS_N>(args.dblock_scale, smem.scale_sums, items, tile,
                                            args.selection);
    }
    if (warp.v.any()) {  // dV += P^T dO
      multiply_xty<BLOCK_M>(
          rdV, OperandAT<TileP, WarpV::SPAN_M>(smem.p.address(), 0, warp.v.row),
          OperandBT<TileO, WarpV::SPAN_N>(smem.dout[stage].address(), 0, warp.v.col));
    }
    if constexpr (cfg::ATOMIC) add_dq(args, smem, items, tile, warp.q);
    if (warp.k.any()) {  // dK += (g dS)^T Q
      multiply_xty<BLOCK_M>(
          rdK, OperandAT<TileP, WarpK::SPAN_M>(smem.ds.address(), 0, warp.k.row),
          OperandBT<TileQ, WarpK::SPAN_N>(smem.q[stage].address(), 0, warp.k.col));
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
  write_keys<cfg::WIDTH>(args.dk, args.dk_accum, rdK, warp.k, tile, args.sizes.num_heads_kv, smem.k,
                         args.sizes.softmax_scale);
  write_keys<cfg::WIDTH_V>(args.dv, args.dv_accum, rdV, warp.v, tile, args.sizes.num_heads_kv,
                           smem.v, 1.0f);
}

// double_backward_kv: gK = softmax_scale (tdS^T Q + dS^T ddQ) and gV = tP^T dO in registers;
//                     gQ += tdS K + dS ddK by float32 atomic adds (cfg::ATOMIC).
//   tP = P o (E - e),  dS = P o (dP - D),  tdS = tP o (dP - D) + P o (dO ddV^T - W),
//   E = softmax_scale (ddQ K^T + Q ddK^T); e, D and W come from double_backward_out.
//
//              BLOCK_N keys             A CTA owns BLOCK_N keys of one kv head and walks over the
//            +-------------+            queries of every head of the group: gK and gV are summed
//   BLOCK_M  | S, E, dP, X |  x K, ddK  without atomics. Warps lie as WARPS_M_S x .. over the
//   queries  | -> tP, dS,  |    -> gQ   scores, WARPS_N_KV x .. over gK and gV, WARPS_M_DQ x ..
//            |     tdS     |            over gQ; tP, dS and tdS pass through shared memory, 16
//            +-------------+            bits each.
//     ^T x dO, Q, ddQ -> gV, gK         Grid: (tiles of keys, upper bound; kv heads).
//
// Without cfg::ATOMIC this is the first half of the deterministic form; the second is
// double_backward_q. Twin: rawattn/kernels_numba/double_backward_kv.py. Source: the derivative of
// FlashAttention-2's backward, arXiv 2307.08691, algorithm 2; rawattn/reference has the equations.
#include "base/varlen.cuh"
#include "base/workspace.cuh"
#include "sm80/tangent.cuh"

using cfg::BLOCK_M, cfg::BLOCK_N, cfg::HEAD_DIM, cfg::HEAD_DIM_V, cfg::NUM_WARPS;
constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;

using CutS = Cut<BLOCK_M, BLOCK_N / cfg::PIECES, cfg::WARPS_M_S, NUM_WARPS>;
using CutK = Cut<BLOCK_N, HEAD_DIM, cfg::WARPS_N_KV, NUM_WARPS>;
using CutV = Cut<BLOCK_N, HEAD_DIM_V, cfg::WARPS_N_KV, NUM_WARPS>;
using CutQ = Cut<BLOCK_M, HEAD_DIM, cfg::WARPS_M_DQ, NUM_WARPS>;

using TileQ = Tile<BLOCK_M, HEAD_DIM>;
using TileO = Tile<BLOCK_M, HEAD_DIM_V>;
using TileK = Tile<BLOCK_N, HEAD_DIM>;
using TileV = Tile<BLOCK_N, HEAD_DIM_V>;
using TileP = Tile<BLOCK_M, BLOCK_N>;

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
  static constexpr int STATISTICS = TDS + TileP::BYTES;  // [L, D, e, W][BLOCK_M]
  static constexpr int BYTES = STATISTICS + 4 * BLOCK_M * sizeof(float);
};
static_assert(SmemPlan::BYTES == cfg::SMEM_BYTES, "variants.smem_bytes and SmemPlan differ");

struct Args {
  Tensor q;                 // (total_q, num_heads_q, head_dim)
  Tensor k;                 // (total_k, num_heads_kv, head_dim)
  Tensor v;                 // (total_k, num_heads_kv, head_dim_v)
  Tensor ddq;               // like q; null without cfg::HAS_TQ
  Tensor ddk;               // like k; null without cfg::HAS_TK
  Tensor ddv;               // like v; null without cfg::HAS_TV
  Tensor dout;              // (total_q, num_heads_q, head_dim_v)
  const float* lse;         // (num_heads_q, total_q)
  const float* delta;       // (num_heads_q, total_q)
  const float* ddlse;       // (num_heads_q, total_q)
  const float* ddelta;      // (num_heads_q, total_q)
  float* gq_accum;          // workspace of gQ, zeroed; unused without cfg::ATOMIC
  Tensor gk;                // (total_k, num_heads_kv, head_dim)
  Tensor gv;                // (total_k, num_heads_kv, head_dim_v)
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

// Q, ddQ, dO and the row terms of tile m of a head's queries. Rows past the sequence's end are
// zeros in all of them: P is 1 there and adds nothing.
__device__ __forceinline__ void load_queries(const Args& args, char* smem, Sequence queries,
                                             int head, int m) {
  const int row0 = m * BLOCK_M, valid_rows = queries.length - row0;
  const int first_row = queries.start + row0;
  const uint32_t s0 = smem_address(smem);
  load_tile_async<TileQ, cfg::WIDTH, NUM_THREADS>(s0 + SmemPlan::Q, args.q.at(first_row, head),
                                                  args.q.token_stride, valid_rows);
  if constexpr (cfg::HAS_TQ) {
    load_tile_async<TileQ, cfg::WIDTH, NUM_THREADS>(
        s0 + SmemPlan::DDQ, args.ddq.at(first_row, head), args.ddq.token_stride, valid_rows);
  }
  load_tile_async<TileO, cfg::WIDTH_V, NUM_THREADS>(
      s0 + SmemPlan::DO, args.dout.at(first_row, head), args.dout.token_stride, valid_rows);
  const int64_t first = static_cast<int64_t>(head) * args.total_q + first_row;
  for (int i = threadIdx.x; i < 4 * BLOCK_M; i += NUM_THREADS) {
    const int term = i / BLOCK_M, row = i % BLOCK_M;
    const float* terms = term == 0   ? args.lse
                         : term == 1 ? args.delta
                         : term == 2 ? args.ddlse
                                     : args.ddelta;
    cp_async_4(s0 + SmemPlan::STATISTICS + i * sizeof(float), terms + first + row,
               row < valid_rows);
  }
  cp_async_commit();
}

// tP, dS and tdS of this tile into shared memory, cfg::PIECES times BLOCK_N / PIECES columns
__device__ __forceinline__ void make_tiles(char* smem, const Mask& mask, const CutS& cut, int row0,
                                           int col0, float softmax_scale) {
  const int lane = threadIdx.x % WARP_SIZE;
  const uint32_t s0 = smem_address(smem);
  const OperandA<TileQ> q(s0 + SmemPlan::Q, cut.row);
  const OperandA<TileO> dout(s0 + SmemPlan::DO, cut.row);
  const float* lse =
      reinterpret_cast<const float*>(smem + SmemPlan::STATISTICS) + cut.row + lane / 4;
  const auto one = [](int, int) { return 1.0f; };
#pragma unroll 1
  for (int piece = 0; piece < BLOCK_N; piece += BLOCK_N / cfg::PIECES) {
    const int col = piece + cut.col;
    float rP[CutS::MT][CutS::NT][4], rE[CutS::MT][CutS::NT][4];
    multiply_scores<HEAD_DIM, SmemPlan::DDQ - SmemPlan::Q, SmemPlan::DDK - SmemPlan::K>(
        rP, rE, q, OperandB<TileK>(s0 + SmemPlan::K, col));
    if (mask.cuts(row0, BLOCK_M, col0, BLOCK_N)) {
      apply_mask(rP, mask, row0 + cut.row + lane / 4, col0 + col + lane % 4 * 2);
    }
    scores_to_p(rP, load_lse_log2<CutS::MT>(lse, 0, BLOCK_M), softmax_scale * LOG2E);
    float rdP[CutS::MT][CutS::NT][4], rX[CutS::MT][CutS::NT][4];
    multiply_gradients<HEAD_DIM_V, SmemPlan::DDV - SmemPlan::V>(
        rdP, rX, dout, OperandB<TileV>(s0 + SmemPlan::V, col));
    // L is read again rather than kept: registers are what this loop is short of
    const auto lse_log2 = load_lse_log2<CutS::MT>(lse, 0, BLOCK_M);
    const RowTerms<CutS::MT> terms{load_delta<CutS::MT>(lse + BLOCK_M, 0, lse_log2),
                                   load_delta<CutS::MT>(lse + 2 * BLOCK_M, 0, lse_log2),
                                   load_delta<CutS::MT>(lse + 3 * BLOCK_M, 0, lse_log2)};
    tangents_of_p_and_ds(rE, rdP, rX, rP, terms, softmax_scale);
    if constexpr (HAS_E) {
      store_tile<TileP>(smem + SmemPlan::TP, rE, cut.row, col, one);
      store_tile<TileP>(smem + SmemPlan::DS, rdP, cut.row, col, one);
    }
    store_tile<TileP>(smem + SmemPlan::TDS, rX, cut.row, col, one);
  }
}

// gQ of this tile of queries: tdS K + dS ddK, added to the workspace
__device__ __forceinline__ void add_gq(const Workspace<HEAD_DIM>& sums, uint32_t s0,
                                       const CutQ& cut, int row0, int valid_rows) {
  float rgQ[CutQ::MT][CutQ::NT][4];
  clear(rgQ);
  multiply_xy<BLOCK_N>(rgQ, OperandA<TileP>(s0 + SmemPlan::TDS, cut.row),
                       OperandBT<TileK, CutQ::SPAN_N>(s0 + SmemPlan::K, 0, cut.col));
  if constexpr (cfg::HAS_TK) {
    multiply_xy<BLOCK_N>(rgQ, OperandA<TileP>(s0 + SmemPlan::DS, cut.row),
                         OperandBT<TileK, CutQ::SPAN_N>(s0 + SmemPlan::DDK, 0, cut.col));
  }
#pragma unroll
  for (int i = 0; i < CutQ::MT; ++i) {
    if (cut.row + i * 16 >= valid_rows) break;  // the unit may belong to the next sequence
#pragma unroll
    for (int j = 0; j < CutQ::NT; ++j) {
      sums.add((row0 + cut.row) / UNIT + i, cut.col / 8 + j, rgQ[i][j]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    double_backward_kv(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char smem[];
  const TileOfSequence tile =
      find_tile(args.cu_seqlens_k, args.batch, args.total_k, BLOCK_N, blockIdx.x);
  const int kv_head = blockIdx.y, group = args.num_heads_q / args.num_heads_kv;
  const int col0 = tile.block * BLOCK_N, valid_cols = min(BLOCK_N, tile.length - col0);
  const int first_col = tile.start + col0;
  uint16_t* ggK = args.gk.at(first_col, kv_head);
  uint16_t* ggV = args.gv.at(first_col, kv_head);
  Sequence queries{0, 0};
  if (tile.batch_index >= 0) {
    queries = sequence_at(args.cu_seqlens_q, tile.batch_index, args.total_q);
  }
  const Mask mask{queries.length, tile.length, args.window_left, args.window_right};
  const int m_begin = mask.first_query(col0) / BLOCK_M;
  const int m_end = ceil_div(mask.end_query(col0 + valid_cols - 1), BLOCK_M);
  if (m_end <= m_begin) {  // nobody sees these keys, or they belong to no sequence
    zero_rows<cfg::WIDTH, NUM_THREADS>(ggK, args.gk.token_stride, valid_cols);
    zero_rows<cfg::WIDTH_V, NUM_THREADS>(ggV, args.gv.token_stride, valid_cols);
    return;
  }

  const uint32_t s0 = smem_address(smem);
  const int warp = threadIdx.x / WARP_SIZE;
  const CutS cut_s(warp);
  const CutK cut_k(warp);
  const CutV cut_v(warp);
  const CutQ cut_q(warp);
  const auto load_k = [&](int offset, const Tensor& x) {
    load_tile_async<TileK, cfg::WIDTH, NUM_THREADS>(s0 + offset, x.at(first_col, kv_head),
                                                    x.token_stride, valid_cols);
  };
  const auto load_v = [&](int offset, const Tensor& x) {
    load_tile_async<TileV, cfg::WIDTH_V, NUM_THREADS>(s0 + offset, x.at(first_col, kv_head),
                                                      x.token_stride, valid_cols);
  };
  load_k(SmemPlan::K, args.k);
  if constexpr (cfg::HAS_TK) load_k(SmemPlan::DDK, args.ddk);
  if constexpr (HAS_E) load_v(SmemPlan::V, args.v);
  if constexpr (cfg::HAS_TV) load_v(SmemPlan::DDV, args.ddv);
  int head = kv_head * group, m = m_begin;
  load_queries(args, smem, queries, head, m);

  float rgK[CutK::MT][CutK::NT][4], rgV[CutV::MT][CutV::NT][4];
  clear(rgK);
  clear(rgV);
  for (const int end_head = head + group; head < end_head;) {
    const int row0 = m * BLOCK_M;
    const bool last_of_head = m + 1 == m_end;  // then the next head of the group begins
    const int next_m = last_of_head ? m_begin : m + 1, next_head = head + last_of_head;
    cp_async_wait<0>();
    __syncthreads();  // Q, ddQ, dO and the row terms are here; every warp has left tP, dS and tdS
    make_tiles(smem, mask, cut_s, row0, col0, args.softmax_scale);
    __syncthreads();  // tP, dS and tdS are whole

    if constexpr (HAS_E) {
      multiply_xty<BLOCK_M>(rgV, OperandAT<TileP, CutV::SPAN_M>(s0 + SmemPlan::TP, 0, cut_v.row),
                            OperandBT<TileO, CutV::SPAN_N>(s0 + SmemPlan::DO, 0, cut_v.col));
    }
    multiply_xty<BLOCK_M>(rgK, OperandAT<TileP, CutK::SPAN_M>(s0 + SmemPlan::TDS, 0, cut_k.row),
                          OperandBT<TileQ, CutK::SPAN_N>(s0 + SmemPlan::Q, 0, cut_k.col));
    if constexpr (cfg::HAS_TQ) {
      multiply_xty<BLOCK_M>(rgK, OperandAT<TileP, CutK::SPAN_M>(s0 + SmemPlan::DS, 0, cut_k.row),
                            OperandBT<TileQ, CutK::SPAN_N>(s0 + SmemPlan::DDQ, 0, cut_k.col));
    }
    if (next_head < end_head) {
      __syncthreads();  // every warp has left Q, ddQ and dO: the next ones load behind gQ
      load_queries(args, smem, queries, next_head, next_m);
    }
    if constexpr (cfg::ATOMIC) {
      const Workspace<HEAD_DIM> sums(args.gq_accum, head, args.total_q, args.batch, queries.start,
                                     tile.batch_index);
      add_gq(sums, s0, cut_q, row0, queries.length - row0);
    }
    head = next_head, m = next_m;
  }

  __syncthreads();  // every warp has left K and V: gK and gV take their place
  store_tile<TileK>(smem + SmemPlan::K, rgK, cut_k.row, cut_k.col,
                    [&](int, int) { return args.softmax_scale; });
  store_tile<TileV>(smem + SmemPlan::V, rgV, cut_v.row, cut_v.col, [](int, int) { return 1.0f; });
  __syncthreads();  // both are whole
  write_rows<TileK, cfg::WIDTH, NUM_THREADS, BLOCK_N>(ggK, args.gk.token_stride, smem + SmemPlan::K,
                                                      0, valid_cols, threadIdx.x);
  write_rows<TileV, cfg::WIDTH_V, NUM_THREADS, BLOCK_N>(
      ggV, args.gv.token_stride, smem + SmemPlan::V, 0, valid_cols, threadIdx.x);
}

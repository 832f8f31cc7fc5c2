// forward: O = softmax(softmax_scale Q K^T) V and L = logsumexp, packed sequences, wgmma and TMA.
//
//              BLOCK_N keys            A CTA works on one tile of BLOCK_M queries of a head after the
//            +-----------+             other. Key tiles run from the last to the first: the masked
//   BLOCK_M  |  S -> P   |  x V -> O   ones come first. Grid: CTAs, as many as run at once, or fewer.
//   queries  +-----------+
//
//   warpgroup 0, warp 0   loads Q, K and V, as far ahead as there are stages
//                warp 1   finds the tiles to work on
//   warpgroups 1 ..       64 rows each: S of key tile n beside P V of tile n + 1, then softmax of n.
//                         With cfg::PINGPONG they take turns at the tensor cores, so that one's
//                         softmax runs beside the others' products.
//
// A tile of V that ends beyond its sequence holds rows of the next one, be they NaN: the consumers
// fill these with zeros. K and Q may hold such rows, since no sum runs over them.
// Twin: rawattn/kernels_numba/forward.py. Source: FlashAttention-3, arXiv 2407.08608, algorithm 2.
#include "base/accumulators.cuh"
#include "base/shapes.cuh"
#include "base/softmax.cuh"
#include "base/store.cuh"
#include "base/tiles.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/softmax.cuh"
#include "sm90/works.cuh"

constexpr int CONSUMERS = cfg::CONSUMERS, WARPGROUP = 128, WARPGROUP_M = 64;
constexpr int CONSUMER_WARPS = 4 * CONSUMERS;
static_assert(BLOCK_M == WARPGROUP_M * CONSUMERS, "cfg::BLOCK_M: 64 rows for each of CONSUMERS");
using Q = Ring<cfg::Q_STAGES>;
using KV = Ring<cfg::NUM_STAGES>;

struct alignas(1024) SmemPlan {
  TileQ q_tile[Q::STAGES];
  TileK k_tile[KV::STAGES];
  TileV v_tile[KV::STAGES];
  Q q;
  KV k, v;
  Works<QueryTile> works;
};
static_assert(sizeof(SmemPlan) == cfg::SMEM_BYTES, "the row's shared memory and SmemPlan differ");

// A consumer passes over tiles of keys that none of its rows sees: there are such where a tile of
// queries is higher than one of keys is wide
constexpr bool PASSES_OVER = (cfg::HAS_LEFT || cfg::HAS_RIGHT) && BLOCK_M > BLOCK_N;

// Exponentials come first, by the maximum so far, and what they add up to says in most tiles that none
// has grown: what looks for one is off the longest path. Where a CTA has few tiles, or O leaves no
// registers, that is no gain.
constexpr bool SUMS_FIRST = cfg::MIN_CTAS == 1 && HEAD_DIM <= 128 && !cfg::HAS_SOFTCAP;

enum NamedBarrier : int { TAIL_OF_FIRST = 1, TURN_OF_FIRST = TAIL_OF_FIRST + CONSUMERS };

struct Args {
  TensorMap q_map;          // of q, boxes of BLOCK_M rows
  TensorMap k_map;          // of k, boxes of BLOCK_N rows
  TensorMap v_map;          // of v, boxes of BLOCK_N rows
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
  int num_tiles;  // of queries, upper bound
  int counter;    // this launch's, or -1
  CapSizes cap;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES, "struct Args and rawattn/ops/forward.py differ");

// --- producer ------------------------------------------------------------------------------------

// The CTA's tiles
__device__ __forceinline__ void find_tiles(const Args& args, SmemPlan& smem) {
  const int heads = args.sizes.num_heads_q;
  find_works<1, false>(smem.works, args.num_tiles * heads, counter_at(args.counter), [&](int work) {
    const TileOfHead at = tile_of_head(work, args.num_tiles, heads);
    const TileOfSequence found =
        find_tile(args.cu_seqlens_q, args.sizes.batch, args.sizes.total_q, BLOCK_M, at.number);
    return query_tile<BLOCK_M, BLOCK_N>(args, found, at.head);
  });
}

// Q, K and V of all works, by one thread
__device__ __forceinline__ void load_works(const Args& args, SmemPlan& smem) {
  prefetch_tensormap(args.q_map);
  prefetch_tensormap(args.k_map);
  prefetch_tensormap(args.v_map);
  Works<QueryTile>::Place work;
  Place<Q::STAGES> q;
  Place<KV::STAGES> k, v;
  while (true) {
    const QueryTile tile = smem.works.take(work);
    if (tile.valid_rows <= 0) return;
    const int n_begin = tile.n_begin, n_end = tile.n_end, start = tile.keys.start;
    const int kv_head = tile.kv_head, head = tile.head, first_row = tile.first_row;
    const auto load_k = [&](int n) {
      k.wait_empty(smem.k);
      load_tile(smem.k_tile[k.stage], args.k_map, kv_head, start + n * BLOCK_N,
                smem.k.full[k.stage], EVICT_LAST);
      k.advance();
    };
    const auto load_v = [&](int n) {
      v.wait_empty(smem.v);
      load_tile(smem.v_tile[v.stage], args.v_map, kv_head, start + n * BLOCK_N,
                smem.v.full[v.stage], EVICT_LAST);
      v.advance();
    };
    // finding the next work takes as long as a step or two
    const int ask = max(min(n_begin + 2, n_end - 1), n_begin);
    const auto want = [&](int n) {
      if (n == ask) smem.works.want();
    };
    if (n_end <= n_begin) {
      want(ask);
      continue;
    }
    want(n_end - 1);
    load_k(n_end - 1);
    q.wait_empty(smem.q);
    load_tile(smem.q_tile[q.stage], args.q_map, head, first_row, smem.q.full[q.stage], EVICT_FIRST);
    q.advance();
    for (int n = n_end - 2; n >= n_begin; --n) {
      want(n);
      load_k(n);
      load_v(n + 1);
    }
    load_v(n_begin);
  }
}

// --- consumers -----------------------------------------------------------------------------------

// Zeros to the rows of a tile of V past the `valid` ones, by every consumer that is to read them:
// they do not meet there
__device__ __forceinline__ void clear_tail(TileV& tile, int valid, int consumer) {
  for (int i = threadIdx.x % WARPGROUP; i < (BLOCK_N - valid) * TileV::CHUNKS; i += WARPGROUP) {
    const int offset = TileV::offset(valid + i / TileV::CHUNKS, i % TileV::CHUNKS);
    *reinterpret_cast<uint4*>(tile.bytes + offset) = uint4{0, 0, 0, 0};
  }
  fence_proxy_async();
  bar_sync(TAIL_OF_FIRST + consumer, WARPGROUP);
}

// The right to issue products, which goes round among the consumers
struct Turn {
  int mine, next;

  __device__ __forceinline__ explicit Turn(int consumer)
      : mine(TURN_OF_FIRST + consumer), next(TURN_OF_FIRST + (consumer + 1) % CONSUMERS) {
    if (cfg::PINGPONG && consumer == CONSUMERS - 1) pass();  // to the first
  }
  __device__ __forceinline__ void wait() const {
    if constexpr (cfg::PINGPONG) bar_sync(mine, 2 * WARPGROUP);
  }
  __device__ __forceinline__ void pass() const {
    if constexpr (cfg::PINGPONG) bar_arrive(next, 2 * WARPGROUP);
  }
};

// O / row_sum to global memory, 16 bytes a lane, and L
__device__ __forceinline__ void epilogue(const Args& args, const QueryTile& tile, int warp_row,
                                         const OnlineSoftmax<1>& softmax,
                                         const float (&rO)[1][HEAD_DIM_V / 8][4]) {
  const int lane = threadIdx.x % WARP_SIZE;
  const float sink = tile.sink(args);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + half * 8 + lane / 4;
    const RowEnd end = softmax.end(0, half, Cap::scale(args.sizes), sink);
    if (lane % 4 == 0 && row < tile.valid_rows) {
      args.lse[tile.statistic(args.sizes) + row] = end.lse;
    }
    write_row_of_quad<cfg::WIDTH_V>(args.out.at(tile.first_row + row, tile.head), rO, half,
                                    end.inverse, row < tile.valid_rows);
  }
}

__device__ __forceinline__ void consume(const Args& args, SmemPlan& smem) {
  const int consumer = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP - 1, 0);
  const int lane = threadIdx.x % WARP_SIZE;
  const int warp_row = threadIdx.x / WARP_SIZE * 16 - WARPGROUP_M;
  const Cap cap{args.cap};
  const float scale_log2 = Cap::scale_log2(args.sizes);
  const Turn turn(consumer);
  Works<QueryTile>::Place work;
  Place<Q::STAGES> q;
  Place<KV::STAGES> k, v;
  while (true) {
    const QueryTile tile = smem.works.take_together(work);
    if (tile.valid_rows <= 0) return;

    OnlineSoftmax<1> softmax;
    Ceilings ceilings;
    float rO[1][HEAD_DIM_V / 8][4];
    uint32_t rP[BLOCK_N / 16][4];
    clear(rO);
    const auto begin_scores = [&](float (&rS)[1][BLOCK_N / 8][4]) {
      wgmma_fence();
      multiply_xyt<HEAD_DIM, false>(
          rS, Operand<TileQ, K_MAJOR>(smem.q_tile[q.stage].address(), consumer * WARPGROUP_M),
          Operand<TileK, K_MAJOR>(smem.k_tile[k.stage].address()));
      wgmma_commit_group();
    };
    const auto begin_output = [&] {
      wgmma_fence();
      multiply_py(rO, rP, Operand<TileV, MN_MAJOR>(smem.v_tile[v.stage].address()));
      wgmma_commit_group();
    };
    const auto leave_k = [&](int n) {
      k.release(smem.k);
      k.advance();
      if (n == tile.n_begin) {
        q.release(smem.q);
        q.advance();
      }
    };
    const auto leave_v = [&] {
      v.release(smem.v);
      v.advance();
    };
    const auto end_output = [&] {
      wgmma_wait_group<0>();
      hold(rO);
      hold(rP);
      leave_v();
    };
    const auto pass_over = [&](int n) {
      turn.wait();
      turn.pass();
      k.wait_full(smem.k);
      leave_k(n);
      v.wait_full(smem.v);
      leave_v();
    };
    const int row0 = tile.row0 + consumer * WARPGROUP_M;
    const auto mask_scores = [&](float (&rS)[1][BLOCK_N / 8][4], int n) {
      if (tile.mask.cuts(row0, WARPGROUP_M, n * BLOCK_N, BLOCK_N)) {
        apply_mask(rS, tile.mask, tile.row0 + warp_row + lane / 4, n * BLOCK_N + lane % 4 * 2);
      }
    };
    KeyTiles seen{tile.n_begin, tile.n_end};
    if (PASSES_OVER) {
      seen = key_tiles<BLOCK_N>(tile.mask, row0, min(tile.end_row() - row0, WARPGROUP_M));
      if (seen.begin >= seen.end) seen = {tile.n_begin, tile.n_begin};
    }
    int n = tile.n_end - 1;
    for (; n >= seen.end; --n) pass_over(n);
    if (seen.begin < seen.end) {
      q.wait_full(smem.q);
      {
        float rS[1][BLOCK_N / 8][4];
        k.wait_full(smem.k);
        turn.wait();
        begin_scores(rS);
        turn.pass();
        wgmma_wait_group<0>();
        hold(rS);
        leave_k(n);
        mask_scores(rS, n);
        if (begin_max(softmax, rS, scale_log2, cap, ceilings, tile.valid_rows - warp_row)) {
          exponentiate<true>(softmax, rS, rP, scale_log2, cap);
        } else {
          exponentiate<false>(softmax, rS, rP, scale_log2, cap);
        }
      }
      const int second = n - 1;  // where rows have seen so little that they often ask
      const int valid = tile.keys.length - n * BLOCK_N;
      if (valid < BLOCK_N) {
        v.wait_full(smem.v);
        clear_tail(smem.v_tile[v.stage], valid, consumer);
      }
      for (--n; n >= seen.begin; --n) {
        float rS[1][BLOCK_N / 8][4];
        k.wait_full(smem.k);
        turn.wait();
        begin_scores(rS);
        v.wait_full(smem.v);
        begin_output();
        turn.pass();
        wgmma_wait_group<1>();
        hold(rS);
        leave_k(n);
        mask_scores(rS, n);
        // All warps of a warpgroup wait at one place for the products that they began together: what
        // follows is each warp's own.
        const bool may_ask =
            SUMS_FIRST || any_may_ask(softmax, rS, scale_log2, cap, ceilings);  // beside P V
        end_output();
        if (SUMS_FIRST && n != second) {
          float sums[2];
          try_exponentials(softmax, rS, rP, scale_log2, sums);
          if (!any_may_ask(softmax, sums)) {
#pragma unroll
            for (int half = 0; half < 2; ++half) softmax.row_sum[0][half] += sums[half];
            continue;  // what is rare lies behind what is not
          }
        }
        if (!may_ask) {
          exponentiate<false>(softmax, rS, rP, scale_log2, cap);
          continue;
        }
        follow_max(softmax, rS, scale_log2, cap, ceilings,
                   [&](int, int half, float factor) { scale_row(rO, 0, half, factor); });
        ceilings.follow(softmax, cap);
        if (any_large(rS, ceilings)) {
          exponentiate<true>(softmax, rS, rP, scale_log2, cap);
        } else {
          exponentiate<false>(softmax, rS, rP, scale_log2, cap);
        }
      }
      v.wait_full(smem.v);
      begin_output();
      end_output();
      for (; n >= tile.n_begin; --n) pass_over(n);
    }
    epilogue(args, tile, warp_row, softmax, rO);
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, cfg::MIN_CTAS)
    forward(const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) char shared[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / WARP_SIZE, 0);
  if (threadIdx.x == 0) {
    smem.q.init(CONSUMER_WARPS);
    smem.k.init(CONSUMER_WARPS);
    smem.v.init(CONSUMER_WARPS);
    smem.works.init(CONSUMER_WARPS + 1);
    fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are there
  if (warp < 4) {
    setmaxnreg_dec<cfg::PRODUCER_REGISTERS>();
    if (warp == 1) find_tiles(args, smem);
    if (warp == 0 && elect_sync()) load_works(args, smem);
  } else {
    setmaxnreg_inc<cfg::CONSUMER_REGISTERS>();
    consume(args, smem);
  }
}

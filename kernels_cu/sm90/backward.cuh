// What both backward_kv.cu and backward_kv_wide.cu are made of: their arguments, the keys of a
// cluster, and the warps that load. Of a `Plan` of shared memory they use
//   works, queries, exchange                  rings
//   lse_log2, delta, large, terms_full        of the queries of a stage, and the barriers of these
//   ds, ds_of_peer, from_peer                 dS^T, and what counts the other CTA's
#pragma once
#include "base/accumulators.cuh"
#include "base/shapes.cuh"
#include "base/statistics.cuh"
#include "base/store.cuh"
#include "base/tiles.cuh"
#include "base/workspace.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/softcap.cuh"
#include "sm90/works.cuh"

constexpr int CONSUMERS = cfg::CONSUMERS, CLUSTER = cfg::CLUSTER, WARPGROUP = 128;
constexpr int CONSUMER_WARPS = 4 * CONSUMERS, WARPGROUP_ROWS = 64;
constexpr int KEY_BLOCKS = BLOCK_N / WARPGROUP_ROWS;  // of a CTA
static_assert(BLOCK_M == WARPGROUP_ROWS, "cfg::BLOCK_M: dQ of a step is one warpgroup's");
using TileDS = Tile<BLOCK_N, BLOCK_M>;  // dS^T

struct Args {
  TensorMap q_map;          // of q, boxes of 64 rows
  TensorMap k_map;          // of k, boxes of 64 rows
  TensorMap v_map;          // of v, boxes of 64 rows
  TensorMap dout_map;       // of dout, boxes of 64 rows
  Tensor q;                 // (total_q, num_heads_q, head_dim)
  Tensor k;                 // (total_k, num_heads_kv, head_dim)
  Tensor v;                 // (total_k, num_heads_kv, head_dim_v)
  Tensor dout;              // (total_q, num_heads_q, head_dim_v)
  const float* lse;         // (num_heads_q, total_q)
  const float* delta;       // (num_heads_q, total_q)
  float* dq_accum;          // workspace of dQ, zeroed
  Tensor dk;                // (total_k, num_heads_kv, head_dim)
  Tensor dv;                // (total_k, num_heads_kv, head_dim_v)
  const int* cu_seqlens_q;  // (batch + 1,)
  const int* cu_seqlens_k;  // (batch + 1,)
  const int* seqused_k;     // (batch,), with cfg::HAS_SEQUSED_K
  Sizes sizes;
  int* turns;     // without cfg::ATOMIC: zeros, see IN_ORDER
  int num_tiles;  // of keys, of a cluster, upper bound
  int counter;    // this launch's, or -1
  CapSizes cap;
};
static_assert(sizeof(Args) == cfg::ARGS_BYTES, "struct Args and rawattn/ops/backward_kv.py differ");

// With cfg::ATOMIC tiles of keys add to dQ when they come to it. Without, those of a sequence take
// turns in their order, so that sums are the same on every run. Args::turns begins with this launch's
// Counter, since a tile waits for those before it, in COUNTS numbers; then comes for each unit, and
// each of up to PARTS parts of its columns, the number of the tile whose turn it is. Size:
// ops/workspaces.py.
constexpr bool IN_ORDER = !cfg::ATOMIC;
constexpr int COUNTS = 4, PARTS = 4;
struct KeyWork : KeyTile {
  int end_before;  // of the tiles of queries that the tile of keys before it adds to
  __device__ __forceinline__ int number() const { return col0 / (CLUSTER * BLOCK_N); }
  // which unit of all has a row of a head. Sequences never share one:
  // floor((c + n) / 16) - floor(c / 16) + 1 >= ceil(n / 16).
  __device__ __forceinline__ int64_t unit(const Sizes& sizes, int head, int row) const {
    const int64_t of_heads = static_cast<int64_t>(head) * (sizes.total_q / UNIT + sizes.batch);
    return of_heads + queries.start / UNIT + batch_index + row / UNIT;
  }
};

// Key blocks of 64 of the CTAs of a cluster, from the first of its tile on. Under a right bound the
// later ones see fewer queries: of four blocks one CTA has the first and the last.
__device__ __forceinline__ int first_key(int rank, int block) {
  return (block * CLUSTER + (block % 2 ? CLUSTER - 1 - rank : rank)) * WARPGROUP_ROWS;
}
__device__ __forceinline__ int valid_keys(const KeyTile& tile, int rank, int block) {
  return min(max(tile.valid_cols - first_key(rank, block), 0), WARPGROUP_ROWS);
}
__device__ __forceinline__ int used_keys(const KeyTile& tile, int rank, int block) {
  return min(max(tile.used_cols() - first_key(rank, block), 0), WARPGROUP_ROWS);
}

// What a tile walks over; a dead one over nothing. In order it goes down, every row of the group's
// heads at once: of tiles that begin at the same time each comes to its turns when the one before it
// has left them.
struct Walk : QueryWalk {
  int first_head;
  __device__ __forceinline__ Walk(const KeyTile& tile, int group)
      : QueryWalk(tile, group), first_head(head) {
    if (IN_ORDER) m = m_end - 1;
    if (tile.dead()) head = end_head;
  }
  __device__ __forceinline__ bool done() const {
    return QueryWalk::done() || (IN_ORDER && m < m_begin);
  }
  __device__ __forceinline__ void advance() {
    if (!IN_ORDER) return QueryWalk::advance();
    const bool last_of_rows = head + 1 == end_head;
    head = last_of_rows ? first_head : head + 1;
    m -= last_of_rows;
  }
};
__device__ __forceinline__ Walk walk_of(const Args& args, const KeyTile& tile) {
  return Walk(tile, args.sizes.group());
}

// --- producers -------------------------------------------------------------------------------------

// The cluster's tiles
template <class Plan>
__device__ __forceinline__ void find_tiles(const Args& args, Plan& smem) {
  constexpr int KEYS = CLUSTER * BLOCK_N;
  const Sizes& sizes = args.sizes;
  const int works = args.num_tiles * sizes.num_heads_kv;
  Counter* counter = IN_ORDER ? reinterpret_cast<Counter*>(args.turns) : counter_at(args.counter);
  find_works<CLUSTER, IN_ORDER>(smem.works, works, counter, [&](int work) {
    const TileOfHead at = tile_of_head<IN_ORDER>(work, args.num_tiles, sizes.num_heads_kv);
    int before = -1;  // the sequence that has the tile before, another one where offsets fall
    if (IN_ORDER) {
      before =
          sequence_of_tile(args.cu_seqlens_k, sizes.batch + 1, sizes.total_k, KEYS, at.number - 1);
    }
    KeyWork tile{find_key_tile<BLOCK_M, KEYS>(args, at.number, at.head)};
    if (tile.col0 > 0 && tile.valid_cols > 0 && before == tile.batch_index) {
      tile.end_before = ceil_div(tile.mask.end_query(tile.col0 - 1), BLOCK_M);
    }
    return tile;
  });
}

// Rows of K or V of a CTA from column `first_col` on
template <class TileT>
__device__ __forceinline__ void load_keys(const TileT& into, const TensorMap& map,
                                          const KeyTile& tile, int rank, const uint64_t& full,
                                          int first_col = 0) {
  const uint32_t barrier = smem_address(&full);
  mbarrier_arrive_expect_tx(barrier, TileT::BYTES);
#pragma unroll
  for (int block = 0; block < KEY_BLOCKS; ++block) {
    const int token = tile.first_col + first_key(rank, block);
    const uint32_t dst = into.address() + block * WARPGROUP_ROWS * TileT::ROW_BYTES;
#pragma unroll
    for (int panel = 0; panel < TileT::COLS / TileT::PANEL; ++panel) {
      cp_async_bulk_tensor_3d(dst + panel * TileT::PANEL_BYTES, map,
                              first_col + panel * TileT::PANEL, tile.kv_head, token, barrier,
                              EVICT_FIRST);
    }
  }
}

// L log2(e) and D of the queries of all steps, by one warp; inf and 0 where there is no query or no key
template <class Plan>
__device__ __forceinline__ void load_terms(const Args& args, Plan& smem) {
  const int lane = threadIdx.x % WARP_SIZE;
  Works<KeyWork>::Place work;
  Place<decltype(Plan::queries)::STAGES> place;
  while (true) {
    const KeyWork tile = smem.works.take(work);
    if (tile.valid_cols <= 0) return;
    for (Walk at = walk_of(args, tile); !at.done(); at.advance()) {
      const Rows rows = at.rows<BLOCK_M>(tile.queries);
      const int64_t first = static_cast<int64_t>(rows.head) * args.sizes.total_q + rows.first;
      float natural[BLOCK_M / WARP_SIZE], delta[BLOCK_M / WARP_SIZE];
#pragma unroll
      for (int i = 0; i < BLOCK_M / WARP_SIZE; ++i) {
        const int row = i * WARP_SIZE + lane;
        natural[i] = row < rows.valid ? args.lse[first + row] : -INF;
        delta[i] = row < rows.valid ? args.delta[first + row] : 0.0f;
      }
      place.wait_empty(smem.queries);
      if constexpr (cfg::HAS_SOFTCAP) {
        const Cap cap{args.cap};
        bool large = false;
#pragma unroll
        for (int i = 0; i < BLOCK_M / WARP_SIZE; ++i) {
          large |= natural[i] != -INF && cap.may_be_large(natural[i] * LOG2E);
        }
        large = __any_sync(0xffffffff, large);
        if (lane == 0) smem.large[place.stage] = large;
      }
#pragma unroll
      for (int i = 0; i < BLOCK_M / WARP_SIZE; ++i) {
        const bool dead = natural[i] == -INF;
        smem.lse_log2[place.stage][i * WARP_SIZE + lane] = dead ? INF : natural[i] * LOG2E;
        smem.delta[place.stage][i * WARP_SIZE + lane] = dead ? 0.0f : delta[i];
      }
      mbarrier_arrive(smem_address(smem.terms_full + place.stage));  // each lane for its own
      place.advance();
    }
  }
}

// Every dS^T of this CTA to the other one, by one thread
template <class Plan>
__device__ __forceinline__ void send_ds(const Args& args, Plan& smem, int peer) {
  Works<KeyWork>::Place work;
  Place<decltype(Plan::exchange)::STAGES> place;
  while (true) {
    const KeyWork tile = smem.works.take(work);
    if (tile.valid_cols <= 0) return;
    for (Walk at = walk_of(args, tile); !at.done(); at.advance()) {
      place.wait_full(smem.exchange);  // so what came two steps before has been read
      mbarrier_arrive_expect_tx(smem_address(smem.from_peer + place.stage), TileDS::BYTES);
      cp_async_bulk_cluster(mapa(smem.ds_of_peer[place.stage].address(), peer),
                            smem.ds[place.stage].address(), TileDS::BYTES,
                            mapa(smem_address(smem.from_peer + place.stage), peer));
      place.advance();
    }
  }
}

// --- consumers -------------------------------------------------------------------------------------

// The first STEPS of 16 columns of K or V each, which consumers keep in registers: shared memory has so
// much less to give, whose time is short where dQ is read out of it too
template <class TileX, int STEPS>
struct Kept {
  uint32_t steps[STEPS > 0 ? STEPS : 1][4];

  // 16 rows of a tile from `row` on, by a warp
  __device__ __forceinline__ void load(const TileX& tile, int row) {
    const SquareReader<TileX, true, false, TileX::COLS> rows(tile.address(), row);
#pragma unroll
    for (int k = 0; k < STEPS; ++k) rows.load(steps[k], 0, k);
  }
};
constexpr int V_STEPS = HEAD_DIM_V / 16 < cfg::V_STEPS ? HEAD_DIM_V / 16 : cfg::V_STEPS;
using KeptV = Kept<TileV, V_STEPS>;

// c = X Y^T, of rows of X that `rows` and `kept` begin with
template <int STEPS, int NT, class TileX, class TileY>
__device__ __forceinline__ void multiply_kept(float (&c)[1][NT][4], const Kept<TileX, STEPS>& kept,
                                              const Operand<TileX, K_MAJOR>& rows,
                                              const Operand<TileY, K_MAJOR>& y) {
  if constexpr (STEPS > 0) {
    multiply_xyt<TileX::COLS>(c, kept.steps, rows, y);
  } else {
    multiply_xyt<TileX::COLS, false>(c, rows, y);
  }
}

// The turns of rows `row` .. of dQ, of which there may be none
__device__ __forceinline__ int* turn_at(const Args& args, const KeyWork& tile, int head, int row,
                                        int part) {
  const int last = tile.queries.length - 1;
  return args.turns + COUNTS + tile.unit(args.sizes, head, min(row, last)) * PARTS + part;
}
// By a warp that is about to add: until those before number `number` have, if the number `seen` some
// time ago does not say so. `taken` is its turn or null, in shared memory since registers are short.
// The lanes leave the loop together: otherwise the compiler moves accumulators out of its way.
__device__ __forceinline__ void wait_turn(const KeyWork& tile, int* turn, int row, int number,
                                          bool follows, int seen, int*& taken) {
  const int least = follows || row < tile.end_before * BLOCK_M ? number : 0;
  while (!__all_sync(0xffffffff, seen >= least)) seen = ld_acquire(turn);
  if (threadIdx.x % WARP_SIZE == 0) taken = row < tile.queries.length ? turn : nullptr;
}
// To the next number, when what the warp has added is there
__device__ __forceinline__ void pass_turn(int number, int*& taken) {
  __syncwarp();
  if (threadIdx.x % WARP_SIZE == 0 && taken != nullptr) {
    red_release_max(taken, number + 1);
    taken = nullptr;
  }
}

// A consumer passes over steps in which nobody sees its keys
constexpr bool PASSES_OVER = cfg::HAS_LEFT || cfg::HAS_RIGHT;

// Zeros to the rows of a tile from `valid` to `end`, by `THREADS` threads, of which this is one
template <int THREADS, class TileT>
__device__ __forceinline__ void clear_rows(TileT& tile, int valid, int end = TileT::ROWS) {
  for (int i = threadIdx.x % THREADS; i < (end - valid) * TileT::CHUNKS; i += THREADS) {
    const int offset = TileT::offset(valid + i / TileT::CHUNKS, i % TileT::CHUNKS);
    *reinterpret_cast<uint4*>(tile.bytes + offset) = uint4{0, 0, 0, 0};
  }
}

// X^T of a warp, whose queries begin at `first_query`, as 16-bit elements to rows `row` .. of a tile
template <class TileX, int KT>
__device__ __forceinline__ void write_transposed(TileX& tile, const uint32_t (&x)[KT][4], int row,
                                                 int first_query) {
  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int j = 0; j < 2 * KT; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int offset = TileX::offset(row + half * 8 + lane / 4, first_query / 8 + j);
      *reinterpret_cast<uint32_t*>(tile.bytes + offset + lane % 4 * 4) = x[j / 2][j % 2 * 2 + half];
    }
  }
}
// S^T -> P^T in place, `lse_log2` from this thread's first query on
template <int NT>
__device__ __forceinline__ void exponentiate(float (&rS)[1][NT][4], const float* lse_log2,
                                             float scale_log2) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const float2 of = *reinterpret_cast<const float2*>(lse_log2 + j * 8);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      rS[0][j][e] = ex2_approx(rS[0][j][e] * scale_log2 - (e % 2 ? of.y : of.x));
    }
  }
}
// The same of tanh(X^T / c), under a softcap: P^T as operands, and in place what dS has for P, P^T times
// the derivative of the score by X
template <int NT>
__device__ __forceinline__ void exponentiate(float (&rT)[1][NT][4], uint32_t (&rPt)[NT / 2][4],
                                             const float* lse_log2, float scale_log2) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const float2 of = *reinterpret_cast<const float2*>(lse_log2 + j * 8);
    float p[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float t = rT[0][j][e];
      p[e] = ex2_approx(t * scale_log2 - (e % 2 ? of.y : of.x));
      rT[0][j][e] = p[e] * (1.0f - t * t);
    }
    rPt[j / 2][j % 2 * 2] = cvt_rn_x2(p[0], p[1]);
    rPt[j / 2][j % 2 * 2 + 1] = cvt_rn_x2(p[2], p[3]);
  }
}
// dP^T -> dS^T in place, `delta` likewise
template <int NT>
__device__ __forceinline__ void weigh(float (&rdP)[1][NT][4], const float (&rP)[1][NT][4],
                                      const float* delta) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const float2 of = *reinterpret_cast<const float2*>(delta + j * 8);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      rdP[0][j][e] = rP[0][j][e] * (rdP[0][j][e] - (e % 2 ? of.y : of.x));
    }
  }
}

// S^T of one thread, from key `key` and query `query` on: `masked` where forbidden
template <int NT>
__device__ __forceinline__ void apply_mask_of_keys(float (&rS)[1][NT][4], const Mask& mask, int key,
                                                   int query, float masked) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int col = key + half * 8;
    const int begin = mask.first_query(col) - query;
    const int end = col < mask.seqlen_k ? mask.end_query(col) - query : begin;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int offset = j * 8 + e;
        if (offset < begin || offset >= end) rS[0][j][half * 2 + e] = masked;
      }
    }
  }
}

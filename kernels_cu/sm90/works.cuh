// The tiles that a CTA, or a cluster, works on one after the other: a warp finds them, the others
// take them from a ring.
#pragma once
#include "base/tiles.cuh"
#include "sm90/pipeline.cuh"

// The next works of all clusters of a launch, and how many of these have no more. Launches that may
// run at the same time have different places; the last cluster leaves zeros behind.
struct Counter {
  int next, done;
};
__device__ Counter counters[cfg::COUNTERS];

// Rows or columns of a work; none: there are no more
__device__ __forceinline__ int extent(const QueryTile& tile) { return tile.valid_rows; }
__device__ __forceinline__ int extent(const KeyTile& tile) { return tile.valid_cols; }

// Which tile of which head a work is. Under a right bound tiles differ in length: the long ones of all
// heads come first. HEADS_FIRST: so they do in any case.
struct TileOfHead {
  int number, head;
};
template <bool HEADS_FIRST = false>
__device__ __forceinline__ TileOfHead tile_of_head(int work, int num_tiles, int num_heads) {
  if (HEADS_FIRST || cfg::HAS_RIGHT) return {work / num_heads, work % num_heads};
  return {work % num_tiles, work / num_tiles};
}

// What the first CTA of a cluster tells the other one
struct alignas(16) Mail {
  int sent[4], received[4];
  uint64_t full, empty;  // of `received`; `empty` in the sender
};

template <class TileT>
struct Works {
  static constexpr int STAGES = 2;
  using Place = ::Place<STAGES>;
  Mail mail;
  Ring<STAGES> ring;
  uint64_t wanted;  // a phase ends when the next work is wanted
  TileT tiles[STAGES];

  // by one thread, before anybody waits; `readers` are threads, or warps that take together
  __device__ __forceinline__ void init(int readers) {
    ring.init(readers);
    mbarrier_init(smem_address(&wanted), 1);
    mbarrier_init(smem_address(&mail.full), 1);
    mbarrier_init(smem_address(&mail.empty), 1);
  }
  __device__ __forceinline__ void want() const { mbarrier_arrive(smem_address(&wanted)); }
  // by a warp: what needs fewer registers than that each lane takes it
  __device__ __forceinline__ TileT take_together(Place& place) const {
    place.wait_full(ring);
    const TileT tile = tiles[place.stage];
    __syncwarp();  // every lane has read it
    place.release(ring);
    place.advance();
    return tile;
  }
  // by a thread for itself
  __device__ __forceinline__ TileT take(Place& place) const {
    const TileT tile = look(place);
    leave(place);
    return tile;
  }
  // likewise; the tile stays where it is until the thread leaves it
  __device__ __forceinline__ const TileT& look(const Place& place) const {
    place.wait_full(ring);
    return tiles[place.stage];
  }
  __device__ __forceinline__ void leave(Place& place) const {
    mbarrier_arrive(smem_address(ring.empty + place.stage));
    place.advance();
  }
};

__device__ __forceinline__ Counter* counter_at(int index) {
  return index < 0 ? nullptr : counters + index;
}

// Works 0 .. `total` - 1 to `works`, by a warp: those without extent left out, then one without, the
// end. The first is the cluster's own, then each takes the next that nobody has when the loads of the
// last one end: what is taken earlier, a CTA that runs late takes from one that does not. IN_ORDER:
// the first one too is the next, so that a work is only begun when those before it have been. Without
// a counter clusters take turns, every other round backwards. tile_of(work) is that tile.
template <int CLUSTER, bool IN_ORDER, class TileT, class TileOf>
__device__ __forceinline__ void find_works(Works<TileT>& works, int total, Counter* counter,
                                           TileOf&& tile_of) {
  const int clusters = gridDim.x / CLUSTER, own = blockIdx.x / CLUSTER;
  const int rank = CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER;
  const bool first_lane = threadIdx.x % WARP_SIZE == 0;
  Place<Works<TileT>::STAGES> place;
  const auto hand_over = [&](const TileT& tile) {
    place.wait_empty(works.ring);
    if (first_lane) {
      works.tiles[place.stage] = tile;
      mbarrier_arrive(smem_address(works.ring.full + place.stage));
    }
    place.advance();
  };
  // from the first CTA of the cluster to both
  int letter = 0;
  const auto together = [&](int work) {
    if constexpr (CLUSTER > 1) {
      Mail& mail = works.mail;
      if (first_lane && rank == 0) {
        mbarrier_wait(smem_address(&mail.empty), letter ^ 1);  // of the last one
        mail.sent[0] = work;
        fence_proxy_async();
        cp_async_bulk_cluster(mapa(smem_address(mail.received), 1), smem_address(mail.sent), 16,
                              mapa(smem_address(&mail.full), 1));
      }
      if (first_lane && rank == 1) {
        mbarrier_arrive_expect_tx(smem_address(&mail.full), 16);
        mbarrier_wait(smem_address(&mail.full), letter);
        work = mail.received[0];
      }
      work = __shfl_sync(0xffffffff, work, 0);
      if (first_lane && rank == 1) mbarrier_arrive_cluster(mapa(smem_address(&mail.empty), 0));
      letter ^= 1;
    }
    return work;
  };
  const auto after = [&](int work) {
    if (first_lane && rank == 0) work = (IN_ORDER ? 0 : clusters) + atomicAdd(&counter->next, 1);
    return together(__shfl_sync(0xffffffff, work, 0));
  };
  int work = IN_ORDER ? after(own) : own, parity = 0;
  for (int round = 1; work < total; ++round) {
    const TileT tile = tile_of(work);
    if (extent(tile) > 0) {
      hand_over(tile);
      mbarrier_wait(smem_address(&works.wanted), parity);
      parity ^= 1;
    }
    if (counter) {
      work = after(work);
    } else {
      work = round * clusters + (round % 2 ? clusters - 1 - own : own);
    }
  }
  hand_over(TileT{});
  if (counter && first_lane && rank == 0 && atomicAdd(&counter->done, 1) == clusters - 1) {
    *counter = {0, 0};
  }
}

// The walk of a tile of queries over the blocks of keys that they selected.
//
//   One warp, the producer, merges the ascending lists of the tile's items and loads every block
//   once into a stage, however many items named it; each of the other warps owns 16 rows and takes
//   from its queue the stages that its items named. So neither loads nor products are made for
//   pairs that nobody selected, and no warp waits for another.
//
//     lists of items   2 5 9 ..     producer     stages, any free one     queues     consumers
//                      2 6 9 ..  -> 2 5 6 9 .. -> [K V][K V][K V] ..  ->  2 5 9  ->  16 rows
//                      5 9 11 ..                                          2 6 9  ->  16 rows
//
// A block larger than BLOCK_N keys takes several stages.
#pragma once
#include "sm80/sparse_rows.cuh"

// Slots are wanted for the scales of blocks, and to tell the own block where nothing is causal.
constexpr bool HAS_SLOTS = cfg::HAS_BLOCK_SCALE || !cfg::HAS_RIGHT;

// An entry of a consumer's queue: a stage, and which items of the consumer's rows named its block.
//   word: parity of the stage's phase << 31 | stage << 16 | members, a bit an item; or STOP
struct Entry {
  uint32_t word;
  int key;  // first key of the stage
  static constexpr uint32_t STOP = ~0u;
  __device__ __forceinline__ int parity() const { return word >> 31; }
  __device__ __forceinline__ int stage() const { return word >> 16 & 0x7fff; }
};

// Queues, barriers and slots of the stages. Each place of a queue has a barrier that says when its
// entry is there; a queue never holds more than all stages and the stop, so that no entry is
// overwritten, and no phase passes, before it was taken.
struct Ring {
  static constexpr int DEPTH = NUM_STAGES + 1;
  static constexpr int PLACES = CONSUMERS * DEPTH;
  static constexpr int BARRIERS = 2 * NUM_STAGES + PLACES;
  Entry queues[PLACES];           // [CONSUMERS][DEPTH]
  uint64_t barriers[BARRIERS];    // full[NUM_STAGES], empty[NUM_STAGES], posted[CONSUMERS][DEPTH]
  int slots[NUM_STAGES * ITEMS];  // [NUM_STAGES][ITEMS], of members

  __device__ __forceinline__ uint32_t barrier(int i) const {
    return smem_address(barriers) + i * sizeof(uint64_t);
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return barrier(stage); }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barrier(NUM_STAGES + stage); }
  __device__ __forceinline__ uint32_t posted(int place) const {
    return barrier(2 * NUM_STAGES + place);
  }
  // of a consumer's entry of that number
  static __device__ __forceinline__ int place(int consumer, int number) {
    return consumer * DEPTH + number % DEPTH;
  }
  __device__ __forceinline__ void post(int consumer, int number, const Entry& entry) {
    queues[place(consumer, number)] = entry;
    mbarrier_arrive(posted(place(consumer, number)));
  }
  __device__ __forceinline__ Entry take(int consumer, int number) const {
    mbarrier_wait(posted(place(consumer, number)), number / DEPTH & 1);
    return queues[place(consumer, number)];
  }
  // by all threads; a block-wide sync has to follow
  __device__ __forceinline__ void init() const {
    for (int i = threadIdx.x; i < BARRIERS; i += NUM_THREADS) {
      // full: the loads of each lane, and its slots; empty: each lane of each consumer, those who do
      // not want the stage at once; posted: the lane that writes the entry
      const int arrivals = i < NUM_STAGES       ? WARP_SIZE * (HAS_SLOTS ? 2 : 1)
                           : i < 2 * NUM_STAGES ? WARP_SIZE * CONSUMERS
                                                : 1;
      mbarrier_init(barrier(i), arrivals);
    }
  }
};

// Items of a consumer's rows: the first one, and where in the words of all items its bits are
__device__ __forceinline__ int first_item(int consumer) { return consumer * 16 / GROUP; }
__device__ __forceinline__ uint32_t members_of(const uint32_t (&members)[ITEMS_PER_LANE],
                                               int consumer) {
  const int first = first_item(consumer), last = min((consumer * 16 + 15) / GROUP, ITEMS - 1);
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < ITEMS_PER_LANE; ++i) {
    const int from = first - i * WARP_SIZE;  // the first item's bit in word i
    if (from >= 0 && from < WARP_SIZE) bits |= members[i] >> from;
    if (from < 0 && from > -16) bits |= members[i] << -from;
  }
  return bits & ((1u << (last - first + 1)) - 1);
}

// Keys of a stage, from `key` on, into a tile, by the producer: rows past the last key are zeros. One
// warp loads for all others, so that a whole tile takes the fewest instructions that there can be.
template <int WIDTH, class TileT>
__device__ __forceinline__ void load_keys(const TileT& to, const Tensor& x, const ItemTile& tile,
                                          int key) {
  constexpr int PER_PANEL = TileT::PANEL / 8;
  constexpr int STEP = WARP_SIZE / PER_PANEL;  // rows at once: 4, or 8 of narrow panels
  constexpr int PANELS = TileT::COLS / TileT::PANEL;
  const int lane = threadIdx.x % WARP_SIZE;
  const int chunk = lane % PER_PANEL, first = lane / PER_PANEL;
  const uint32_t tile_address = to.address();
  // the swizzle repeats after 8 rows
  const uint32_t dst[2] = {tile_address + TileT::offset(first, chunk),
                           tile_address + TileT::offset(first + STEP % 8, chunk)};
  const int valid_rows = tile.keys.length - key;
  const uint16_t* src = x.at(tile.keys.start + key + first, tile.kv_head) + chunk * 8;
  const int64_t step = STEP * x.token_stride;
  if (WIDTH == TileT::COLS && valid_rows >= TileT::ROWS) {
#pragma unroll
    for (int r = 0; r < TileT::ROWS; r += STEP) {
#pragma unroll
      for (int panel = 0; panel < PANELS; ++panel) {
        cp_async(dst[r % 8 / STEP] + r / 8 * 8 * TileT::ROW_BYTES + panel * TileT::PANEL_BYTES,
                 src + panel * TileT::PANEL);
      }
      src += step;
    }
    return;
  }
#pragma unroll 1
  for (int r = 0; r < TileT::ROWS; r += STEP) {
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
      const bool valid = r + first < valid_rows &&
                         (WIDTH == TileT::COLS || panel * TileT::PANEL + chunk * 8 < WIDTH);
      cp_async((r & STEP % 8 ? dst[1] : dst[0]) + r / 8 * 8 * TileT::ROW_BYTES +
                   panel * TileT::PANEL_BYTES,
               src + panel * TileT::PANEL, valid);
    }
    src += step;
  }
}

// The producer's side: merge the items' lists, and stages[i].load(args, tile, key) for every stage.
template <class Args, class Stage>
__device__ __forceinline__ void produce(const Args& args, Ring& ring, const ItemTile& tile,
                                        Stage (&stages)[NUM_STAGES]) {
  const int lane = threadIdx.x % WARP_SIZE, width = args.selection.width;
  const int64_t first = static_cast<int64_t>(tile.head_sel) * args.sizes.total_q + tile.first_token;
  // of this lane's items: the next block, its place in the list, and the block behind it, which is
  // asked for long before it is the next
  int next[ITEMS_PER_LANE], place[ITEMS_PER_LANE], behind[ITEMS_PER_LANE];
  const auto block_at = [&](int i, int at) {
    return at < width ? args.blocks[(first + i * WARP_SIZE + lane) * width + at] : END;
  };
#pragma unroll
  for (int i = 0; i < ITEMS_PER_LANE; ++i) {
    const bool there = i * WARP_SIZE + lane < min(ITEMS, tile.tokens);
    place[i] = there ? 0 : width;
    next[i] = block_at(i, place[i]);
    behind[i] = block_at(i, place[i] + 1);
  }
  int entries = 0;  // of consumer `lane`'s queue
  int fills = 0;    // of stage `lane`
  while (true) {
    int least = next[0];
#pragma unroll
    for (int i = 1; i < ITEMS_PER_LANE; ++i) least = min(least, next[i]);
    const int block = __reduce_min_sync(0xffffffff, least);
    if (block == END) break;
    uint32_t members[ITEMS_PER_LANE];
    int slot[ITEMS_PER_LANE];
#pragma unroll
    for (int i = 0; i < ITEMS_PER_LANE; ++i) {
      const bool member = next[i] == block;
      members[i] = __ballot_sync(0xffffffff, member);
      if (member) {
        if constexpr (HAS_SLOTS) {
          slot[i] = args.slots[(first + i * WARP_SIZE + lane) * width + place[i]];
        }
        next[i] = behind[i];
        behind[i] = block_at(i, ++place[i] + 1);
      }
    }
#pragma unroll 1
    for (int part = 0; part < BLOCK_SIZE / BLOCK_N; ++part) {
      const int key = block * BLOCK_SIZE + part * BLOCK_N;
      // unsigned: where offsets fall, a token may have the list of another sequence, or none
      if (static_cast<uint32_t>(key) >= static_cast<uint32_t>(tile.keys.length)) break;
      unsigned free = 0;
      while (free == 0) {
        const bool mine =
            lane < NUM_STAGES &&
            (fills == 0 || mbarrier_test_wait_parity(ring.empty(lane), (fills - 1) & 1));
        free = __ballot_sync(0xffffffff, mine);
      }
      const int stage = __ffs(free) - 1;
      const int fill = __shfl_sync(0xffffffff, fills, stage);
      const uint32_t parity = fill & 1;
      // every lane sees for itself that the stage, its slots and old entries are free
      if (fill > 0) mbarrier_wait(ring.empty(stage), parity ^ 1);
      fills += lane == stage;
      if constexpr (HAS_SLOTS) {
#pragma unroll
        for (int i = 0; i < ITEMS_PER_LANE; ++i) {
          if (members[i] >> lane & 1) ring.slots[stage * ITEMS + i * WARP_SIZE + lane] = slot[i];
        }
      }
      const uint32_t wanted = lane < CONSUMERS ? members_of(members, lane) : 0;
      const int others = CONSUMERS - __popc(__ballot_sync(0xffffffff, wanted != 0));
      if (lane == 0 && others > 0) {
        mbarrier_arrive_no_complete(ring.empty(stage), WARP_SIZE * others);
      }
      stages[stage].load(args, tile, key);
      cp_async_mbarrier_arrive_noinc(ring.full(stage));
      if constexpr (HAS_SLOTS) mbarrier_arrive(ring.full(stage));
      if (wanted) {
        ring.post(lane, entries, Entry{parity << 31 | stage << 16 | wanted, key});
        ++entries;
      }
    }
  }
  if (lane < CONSUMERS) ring.post(lane, entries, Entry{Entry::STOP, 0});
}

// The consumers' side: body(stage, rows) for every stage that a row of this warp has named.
template <class Body>
__device__ __forceinline__ void consume(const Ring& ring, const ItemTile& tile, int warp_row,
                                        Body&& body) {
  const int lane = threadIdx.x % WARP_SIZE;
  const int row = warp_row + lane / 4;
  for (int number = 0;; ++number) {
    const Entry entry = ring.take(warp_row / 16, number);
    if (entry.word == Entry::STOP) break;
    const int stage = entry.stage();
    mbarrier_wait(ring.full(stage), entry.parity());
    RowsOfStage rows;
    bool named = false;
    rows.cut = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int item = (row + half * 8) / GROUP;
      const bool member = entry.word >> (item - first_item(warp_row / 16)) & 1 && item < ITEMS;
      rows.slot[half] = OWN;
      if (HAS_SLOTS && member) rows.slot[half] = ring.slots[stage * ITEMS + item];
      // the own block counts up to the query, whatever the mask
      int end = tile.keys.length;
      if (cfg::HAS_RIGHT || rows.slot[half] == OWN) end = min(end, tile.position + item + 1);
      rows.limit[half] = member ? end - entry.key : 0;
      named |= rows.limit[half] > 0;
      rows.cut |= rows.limit[half] < BLOCK_N;
    }
    if (__any_sync(0xffffffff, named)) {
      rows.cut = __any_sync(0xffffffff, rows.cut);
      body(stage, rows);
    }
    __syncwarp();  // a lane's rows of the stage, and of Q, were read for other lanes too
    mbarrier_arrive(ring.empty(stage));
  }
}

// What a stage holds without tangents
struct KeyStage {
  TileK k;
  TileV v;

  template <class Args>
  __device__ __forceinline__ void load(const Args& args, const ItemTile& tile, int key) const {
    load_keys<cfg::WIDTH>(k, args.k, tile, key);
    load_keys<cfg::WIDTH_V>(v, args.v, tile, key);
  }
};

// The roles of the warps: the last one loads, consume(warp_row) is what each of the others does with
// its rows. The ring's barriers are there.
template <class Args, class Plan, class Consume>
__device__ __forceinline__ void walk(const Args& args, Plan& smem, const ItemTile& tile,
                                     Consume&& consume) {
  const int warp = threadIdx.x / WARP_SIZE;
  if (warp < CONSUMERS) {
    consume(warp * 16);
  } else {
    produce(args, smem.ring, tile, smem.stages);
  }
}

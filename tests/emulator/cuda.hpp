// CUDA C++ on one thread of a CPU, as far as the sources of kernels_cu/ go: a few clusters of
// blocks at a time, their threads as fibers that take turns where one waits. Instructions are in
// base/ptx.cuh beside this file. It shows wrong numbers, deadlocks, accesses outside shared memory
// and missing waits (see Lateness); nothing about speed.
#pragma once
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <vector>

// The sources have their own names for these, which differ from the C library's.
#define int64_t cuda_int64_t
#define uint16_t cuda_uint16_t
#define uint32_t cuda_uint32_t
#define uint64_t cuda_uint64_t

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __CUDA_ARCH__ 900

struct uint3 {
  unsigned x, y, z;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

// When asynchronous work is done: as soon as it is asked for, or only when somebody has waited for
// it and nothing else can go on. A kernel has to be right with both.
enum Lateness { EARLY, LATE };

constexpr int WARP = 32;
constexpr size_t STACK = 256 * 1024;
constexpr int HOPELESS = 10'000'000;  // waits in a row, while no barrier is passed

struct Fiber {
  jmp_buf place;
  ucontext_t start;
  char* stack = nullptr;
  bool begun = false, ended = false;
  const char* waits_for = "";
};

struct Meeting {  // of the lanes of a warp, or of the threads of a barrier
  int arrived = 0, generation = 0;
  const char* name = "";
  void* slots[128];
};

constexpr int SHARED = 232448, LARGEST_CLUSTER = 2, CLUSTERS = 3, RANK_BIT = 24;
constexpr int BLOCKS = LARGEST_CLUSTER * CLUSTERS;  // that run at once
alignas(1024) inline char memory[BLOCKS * SHARED];  // shared memory of these
inline std::vector<Fiber> fibers;
inline std::vector<int> turns;  // the order in which threads take turns, and each one's place in it
inline std::vector<int> places;
inline std::vector<Meeting> warps, groups;  // groups: of 128 threads
struct Block {
  Meeting barriers[16];
  int alive;
};
inline Block blocks[BLOCKS];
inline Meeting cluster_barriers[CLUSTERS];
inline std::deque<std::function<void()>> late;  // work that nobody has had to wait for yet
struct Copies {  // of one thread: groups that were committed, and what is in none yet
  std::deque<std::vector<std::function<void()>>> groups;
  std::vector<std::function<void()>> open;
};
inline std::vector<Copies> copies;
inline int count, running, mode, shared_bytes;
inline int block_threads, cluster;  // threads of a block, blocks of a cluster
inline unsigned first_block;
inline bool greedy;
inline int stuck, quiet;  // waits since a barrier was passed; since a warp got anywhere
inline jmp_buf home;
inline char error[2048];
inline std::function<void()> body;

inline int block() { return running / block_threads; }  // of the running thread
inline int rank() { return block() % cluster; }         // in its cluster

[[noreturn]] inline void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  const int length =
      std::snprintf(error, sizeof error, "block (%u, %u, %u), thread %d: ", blockIdx.x, blockIdx.y,
                    blockIdx.z, running);
  std::vsnprintf(error + length, sizeof error - length, format, values);
  va_end(values);
  _longjmp(home, 1);
}

inline void resume(int next) {
  running = next;
  threadIdx.x = static_cast<unsigned>(next % block_threads);
  blockIdx.x = first_block + block();
  Fiber& fiber = fibers[next];
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.start);
}

// Round and round; or, greedily, a warp as long as it gets anywhere, then the next one
inline int next_turn() {
  const int from = places[running], warp = from / WARP * WARP;
  if (greedy && ++quiet < 2 * WARP) {
    for (int step = 1; step <= WARP; ++step) {
      const int thread = turns[warp + (from + step) % WARP];
      if (!fibers[thread].ended) return thread;
    }
  }
  quiet = 0;
  for (int step = 1; step <= count; ++step) {
    const int thread = turns[((greedy ? warp + WARP - 1 : from) + step) % count];
    if (!fibers[thread].ended) return thread;
  }
  return -1;
}

inline void yield() {
  const int self = running, next = next_turn();
  if (next == self) return;
  if (_setjmp(fibers[self].place) == 0) resume(next);
}

[[noreturn]] inline void deadlock() {
  char text[1024];
  int length = 0;
  const char* last = nullptr;
  for (int t = 0; t < count && length < 900; ++t) {
    if (fibers[t].ended || fibers[t].waits_for == last) continue;
    last = fibers[t].waits_for;
    length += std::snprintf(text + length, sizeof text - length, " %d: %s;", t, last);
  }
  fail("deadlock; from each thread on, what it waits for:%s", text);
}

// Lets the others go on for a while
inline void wait_for(const char* what) {
  fibers[running].waits_for = what;
  if (++stuck % (16 * count) == 0 && !late.empty()) {
    late.front()();
    late.pop_front();
  }
  if (stuck > HOPELESS) deadlock();
  yield();
}
template <class Done>
void wait_until(Done&& done, const char* what) {
  while (!done()) wait_for(what);
  fibers[running].waits_for = "nothing";
}

// All `members` threads of a meeting hand over `mine`; the last to come does `op` for all of them.
template <class Op>
void together(Meeting& meeting, int members, int place, const char* name, void* mine, Op&& op) {
  if (meeting.arrived && std::strcmp(meeting.name, name) != 0) {
    fail("some threads are at %s, others at %s", meeting.name, name);
  }
  meeting.name = name;
  meeting.slots[place] = mine;
  if (++meeting.arrived == members) {
    op(meeting.slots);
    meeting.arrived = 0;
    ++meeting.generation;
    quiet = 0;
    return;
  }
  const int generation = meeting.generation;
  wait_until([&] { return meeting.generation != generation; }, name);
}
template <class Op>
void warp_together(const char* name, void* mine, Op&& op) {
  together(warps[running / WARP], WARP, running % WARP, name, mine, op);
}

// Asynchronous work that is not a thread's own to wait for
inline void later(std::function<void()> work) {
  if (mode == EARLY) {
    work();
  } else {
    late.push_back(std::move(work));
  }
}

// Each lane gets f(all lanes' values, lane)
template <class T, class F>
T lanes(const char* name, T mine, F&& f) {
  T given = mine;
  warp_together(name, &given, [&](void** slots) {
    T all[WARP];
    for (int i = 0; i < WARP; ++i) all[i] = *static_cast<T*>(slots[i]);
    for (int i = 0; i < WARP; ++i) *static_cast<T*>(slots[i]) = f(all, i);
  });
  return given;
}

// What `extern __shared__ char shared[]` of a kernel is
inline char* own_shared() { return memory + block() * SHARED; }
// An address in the shared memory of a block, as every block of the cluster may use it, later too
inline unsigned of_rank(unsigned address, int other) {
  const int there = block() - rank() + other;
  return (address & ((1u << RANK_BIT) - 1)) | (there + 1u) << RANK_BIT;
}
inline unsigned of_cluster(unsigned address) {
  return address >> RANK_BIT ? address : of_rank(address, rank());
}
inline char* at(unsigned address, int bytes) {
  char* const base =
      address >> RANK_BIT ? memory + ((address >> RANK_BIT) - 1) * SHARED : own_shared();
  address &= (1u << RANK_BIT) - 1;
  if (address % bytes) fail("shared address %u is not a multiple of %d", address, bytes);
  if (address + bytes > static_cast<unsigned>(shared_bytes)) {
    fail("shared address %u, of %d bytes", address, shared_bytes);
  }
  return base + address;
}

inline void run_fiber() {
  body();
  fibers[running].ended = true;
  --blocks[block()].alive, stuck = 0;
  const int next = next_turn();
  if (next < 0) _longjmp(home, 2);
  resume(next);
}

inline void begin_blocks(int number, unsigned seed) {
  const int threads = block_threads * number;
  count = threads, stuck = quiet = running = 0;
  fibers.resize(threads);
  turns.resize(threads), places.resize(threads);
  warps.assign(threads / WARP, {}), groups.assign((threads + 127) / 128, {});
  for (Block& block : blocks) block = {{}, block_threads};
  for (Meeting& barrier : cluster_barriers) barrier = {};
  late.clear();
  copies.assign(threads, {});
  std::vector<int> order(threads / WARP);
  for (int w = 0; w < threads / WARP; ++w) order[w] = w;
  greedy = seed != 0;
  for (int w = threads / WARP - 1; seed && w > 0; --w) {  // Fisher and Yates
    seed = seed * 1664525u + 1013904223u;
    std::swap(order[w], order[(seed >> 8) % (w + 1)]);
  }
  for (int t = 0; t < threads; ++t) {
    turns[t] = order[t / WARP] * WARP + t % WARP;
    places[turns[t]] = t;
  }
  std::memset(memory, 0xff, number * SHARED);
  for (Fiber& fiber : fibers) {
    fiber.begun = fiber.ended = false, fiber.waits_for = "nothing";
    if (!fiber.stack) {
      fiber.stack = static_cast<char*>(mmap(nullptr, STACK, PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0));
    }
    getcontext(&fiber.start);
    fiber.start.uc_stack = {fiber.stack, 0, STACK};
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, run_fiber, 0);
  }
}

// The whole grid; an empty text, or what went wrong
template <class Args>
const char* run(void (*kernel)(Args), const void* given, const unsigned (&grid)[3], int threads,
                int dynamic_bytes, int blocks_together, int clusters, unsigned seed, int lateness) {
  static Args args;
  std::memcpy(&args, given, sizeof args);
  error[0] = 0;
  mode = lateness, shared_bytes = dynamic_bytes;
  block_threads = threads, cluster = blocks_together;
  gridDim = {grid[0], grid[1], grid[2]}, blockDim = {static_cast<unsigned>(threads), 1, 1};
  body = [kernel] { kernel(args); };
  static struct sigaction faults, before;
  faults.sa_flags = SA_SIGINFO | SA_NODEFER;
  faults.sa_sigaction = [](int, siginfo_t* what, void*) {
    fail("an access outside the arrays, at %p", what->si_addr);
  };
  sigaction(SIGSEGV, &faults, &before);
  static unsigned z, y, x;  // static: a jump back here leaves other variables undefined
  for (z = 0; z < grid[2]; ++z) {
    for (y = 0; y < grid[1]; ++y) {
      for (x = 0; x < grid[0]; x += cluster * clusters) {
        blockIdx = {x, y, z}, first_block = x;
        begin_blocks(std::min(cluster * clusters, int(grid[0] - x)), seed ? seed + x : 0);
        const int ended = _setjmp(home);
        if (ended == 0) resume(turns[0]);
        if (ended == 1) goto over;
      }
    }
  }
over:
  sigaction(SIGSEGV, &before, nullptr);
  return error;
}

}  // namespace emulator

// --- CUDA's functions ---------------------------------------------------------------------------

template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}

inline void barrier_of(int id, int members, bool waits) {
  emulator::Block& block = emulator::blocks[emulator::block()];
  emulator::Meeting& barrier = block.barriers[id];
  const int generation = barrier.generation;
  ++barrier.arrived;
  const auto done = [&] {
    if (barrier.generation != generation) return true;
    if (barrier.arrived < (members ? members : block.alive)) return false;
    barrier.arrived = 0, ++barrier.generation;
    emulator::stuck = 0;
    return true;
  };
  if (waits) {
    emulator::wait_until(done, "a barrier of the block");
  } else {
    done();
  }
}
inline void __syncthreads() { barrier_of(0, 0, true); }
inline void __syncwarp() {
  emulator::warp_together("__syncwarp", nullptr, [](void**) {});
}

template <class T>
T __shfl_sync(unsigned, T x, int from) {
  struct Given {
    T x;
    int from;
  };
  return emulator::lanes(
             "__shfl_sync", Given{x, from},
             [](const Given* all, int i) { return Given{all[all[i].from % emulator::WARP].x, 0}; })
      .x;
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return __shfl_sync(0xffffffffu, x, (emulator::running ^ mask) % emulator::WARP);
}
template <class T>
T __shfl_up_sync(unsigned, T x, int by) {
  const int lane = emulator::running % emulator::WARP;
  return __shfl_sync(0xffffffffu, x, lane < by ? lane : lane - by);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  return emulator::lanes("__ballot_sync", unsigned{x}, [](const unsigned* all, int) {
    unsigned set = 0;
    for (int i = 0; i < emulator::WARP; ++i) set |= all[i] << i;
    return set;
  });
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(unsigned mask, bool x) { return !__any_sync(mask, !x); }
template <class T>
T __reduce_min_sync(unsigned, T x) {
  return emulator::lanes("__reduce_min_sync", x, [](const T* all, int) {
    T least = all[0];
    for (int i = 1; i < emulator::WARP; ++i) least = min(least, all[i]);
    return least;
  });
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }

template <class T>
T atomicAdd(T* address, T x) {
  const T old = *address;
  *address = old + x;
  return old;
}
inline unsigned atomicOr(unsigned* address, unsigned x) {
  const unsigned old = *address;
  *address = old | x;
  return old;
}

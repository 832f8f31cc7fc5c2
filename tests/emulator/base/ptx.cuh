// The instructions of kernels_cu/base/ptx.cuh by what they do.
#pragma once
#include "base/compat.cuh"

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - emulator::own_shared());
}

// --- asynchronous copies: a thread's own, in groups ----------------------------------------------

namespace emulator {
inline void copy_async(uint32_t dst, const void* src, int bytes, bool valid) {
  const auto work = [=] {
    char* to = at(dst, bytes);
    if (valid) {
      std::memcpy(to, src, bytes);
    } else {
      std::memset(to, 0, bytes);
    }
  };
  if (mode == EARLY) {
    work();
  } else {
    copies[running].open.push_back(work);
  }
}
inline void do_all(std::vector<std::function<void()>>& works) {
  for (const auto& work : works) work();
  works.clear();
}
}  // namespace emulator

__device__ __forceinline__ void cp_async(uint32_t dst, const void* src, bool valid) {
  emulator::copy_async(dst, src, 16, valid);
}
__device__ __forceinline__ void cp_async(uint32_t dst, const void* src) {
  emulator::copy_async(dst, src, 16, true);
}
__device__ __forceinline__ void cp_async_4(uint32_t dst, const void* src, bool valid) {
  emulator::copy_async(dst, src, 4, valid);
}
__device__ __forceinline__ void cp_async_commit() {
  auto& mine = emulator::copies[emulator::running];
  mine.groups.push_back(std::move(mine.open));
  mine.open.clear();
}
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  auto& groups = emulator::copies[emulator::running].groups;
  while (groups.size() > PENDING) {
    emulator::do_all(groups.front());
    groups.pop_front();
  }
}

// --- barriers in shared memory -------------------------------------------------------------------

namespace emulator {
struct Mbarrier {  // 8 bytes, as the real one
  short arrivals, pending;
  int phase : 1;
  int bytes : 31;  // that are still to come
};
inline Mbarrier& mbarrier(uint32_t address) {
  auto& barrier = *reinterpret_cast<Mbarrier*>(at(address, 8));
  if (barrier.arrivals <= 0) fail("the mbarrier at %u was not initialised", address);
  return barrier;
}
inline void settle(Mbarrier& barrier) {
  if (barrier.pending < 0) fail("an mbarrier got more arrivals than it was made for");
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.pending = barrier.arrivals, barrier.phase = ~barrier.phase;
    stuck = 0;
  }
}
inline void arrive(uint32_t address, int arrivals) {
  Mbarrier& barrier = mbarrier(address);
  barrier.pending -= arrivals;
  settle(barrier);
}
}  // namespace emulator

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  *reinterpret_cast<emulator::Mbarrier*>(emulator::at(barrier, 8)) = {
      static_cast<short>(arrivals), static_cast<short>(arrivals), 0, 0};
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) { emulator::arrive(barrier, 1); }
__device__ __forceinline__ void mbarrier_arrive_no_complete(uint32_t barrier, int arrivals) {
  emulator::arrive(barrier, arrivals);
}
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
  auto& mine = emulator::copies[emulator::running];
  std::vector<std::function<void()>> works;
  for (auto& group : mine.groups) works.insert(works.end(), group.begin(), group.end());
  works.insert(works.end(), mine.open.begin(), mine.open.end());
  mine.groups.clear(), mine.open.clear();
  emulator::later([works, barrier] {
    for (const auto& work : works) work();
    emulator::arrive(barrier, 1);
  });
}
__device__ __forceinline__ bool mbarrier_test_wait_parity(uint32_t barrier, int parity) {
  const bool done = (emulator::mbarrier(barrier).phase & 1) != parity;
  if (!done) emulator::wait_for("an mbarrier");
  return done;
}
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint32_t barrier, int parity) {
  return mbarrier_test_wait_parity(barrier, parity);
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity) {
  while (!mbarrier_test_wait_parity(barrier, parity)) {
  }
}

// --- numbers -------------------------------------------------------------------------------------

__device__ __forceinline__ float cvt_f32(uint16_t element) {
  if constexpr (cfg::BF16) {
    return __uint_as_float(static_cast<uint32_t>(element) << 16);
  } else {
    return static_cast<float>(__builtin_bit_cast(_Float16, element));
  }
}
namespace emulator {
inline uint32_t rounded(float x) {
  if constexpr (cfg::BF16) {
    const uint32_t bits = __float_as_uint(x);
    if (x != x) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  } else {
    return __builtin_bit_cast(uint16_t, static_cast<_Float16>(x));
  }
}
}  // namespace emulator
__device__ __forceinline__ uint32_t cvt_rn_x2(float lo, float hi) {
  return emulator::rounded(lo) | emulator::rounded(hi) << 16;
}
__device__ __forceinline__ float ex2_approx(float x) { return std::exp2(x); }
__device__ __forceinline__ float rcp_approx(float x) { return 1.0f / x; }
__device__ __forceinline__ float lg2_approx(float x) { return std::log2(x); }

// --- matrices of a warp --------------------------------------------------------------------------

namespace emulator {
struct Ldmatrix {
  uint32_t* r;
  uint32_t address;
};
inline void ldmatrix(uint32_t (&r)[4], uint32_t address, bool transposed) {
  Ldmatrix mine{r, address};
  warp_together(transposed ? "ldmatrix.trans" : "ldmatrix", &mine, [&](void** slots) {
    const auto of = [&](int lane) { return static_cast<Ldmatrix*>(slots[lane]); };
    for (int lane = 0; lane < WARP; ++lane) {
      for (int m = 0; m < 4; ++m) {
        uint16_t pair[2];
        for (int e = 0; e < 2; ++e) {
          const int near = lane / 4, far = lane % 4 * 2 + e;
          const int row = transposed ? far : near, col = transposed ? near : far;
          std::memcpy(&pair[e], at(of(m * 8 + row)->address, 16) + col * 2, 2);
        }
        of(lane)->r[m] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
      }
    }
  });
}
inline float element(uint32_t pair, int e) {
  return cvt_f32(static_cast<uint16_t>(pair >> 16 * e));
}

struct Mma {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};
}  // namespace emulator

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  emulator::ldmatrix(r, address, false);
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  emulator::ldmatrix(r, address, true);
}

__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  emulator::Mma mine{c, a, {b0, b1}};
  emulator::warp_together("mma", &mine, [](void** slots) {
    float x[16][16], y[16][8];
    for (int lane = 0; lane < emulator::WARP; ++lane) {
      const auto& given = *static_cast<emulator::Mma*>(slots[lane]);
      for (int e = 0; e < 2; ++e) {
        const int k = lane % 4 * 2 + e, row = lane / 4;
        for (int i = 0; i < 4; ++i) {
          x[row + i % 2 * 8][k + i / 2 * 8] = emulator::element(given.a[i], e);
        }
        for (int i = 0; i < 2; ++i) y[k + i * 8][row] = emulator::element(given.b[i], e);
      }
    }
    for (int lane = 0; lane < emulator::WARP; ++lane) {
      float* sums = static_cast<emulator::Mma*>(slots[lane])->c;
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) sum += x[row][k] * y[k][col];
        sums[i] += sum;
      }
    }
  });
}

__device__ __forceinline__ int read_lane() { return threadIdx.x % WARP_SIZE; }
__device__ __forceinline__ void red_add(float* address, float x) { *address += x; }
__device__ __forceinline__ int ld_relaxed(const int* address) { return *address; }
__device__ __forceinline__ int ld_acquire(const int* address) {
  emulator::quiet = 2 * WARP_SIZE;  // who looks again and again lets other warps go on
  emulator::wait_for("a number in global memory");
  return *address;
}
__device__ __forceinline__ void red_release_max(int* address, int x) {
  *address = max(*address, x);
  emulator::stuck = 0;
}
__device__ __forceinline__ void red_add_v2(float* address, float x, float y) {
  address[0] += x;
  address[1] += y;
}
__device__ __forceinline__ void red_add_v4(float* address, const float (&x)[4]) {
  for (int e = 0; e < 4; ++e) address[e] += x[e];
}

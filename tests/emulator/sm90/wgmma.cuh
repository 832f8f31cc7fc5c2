// The products of kernels_cu/sm90/wgmma.cuh by what the instruction does. Late, a product is made
// when its group is waited for: until then operands must stay as they are.
#pragma once
#include "sm90/ptx.cuh"

enum Major { K_MAJOR, MN_MAJOR };

namespace emulator {
constexpr int WARPGROUP_THREADS = 128;
struct Products {  // of a warpgroup: groups that were committed, and what is in none yet
  std::deque<std::vector<std::function<void()>>> groups;
  std::vector<std::function<void()>> open;
};
inline Products products[32];

struct Wgmma {
  float* c;
  const uint32_t* a;
  uint64_t a_descriptor, b_descriptor;
};

// The warps of a warpgroup do it together, at one place of the program: in copies of it, in the
// branches of a warp's own condition, what they do is undefined. A place is where its callers are.
using Callers = std::array<void*, 4>;
inline Callers callers[32];

template <class Op>
[[gnu::noinline]] void warpgroup_together(const char* name, void* mine, Op&& op) {
  const int warpgroup = running / WARPGROUP_THREADS;
  const Callers here = {__builtin_return_address(0), __builtin_return_address(1),
                        __builtin_return_address(2), __builtin_return_address(3)};
  if (groups[warpgroup].arrived && callers[warpgroup] != here) {
    fail("the warps of a warpgroup are at %s in different places of the program", name);
  }
  callers[warpgroup] = here;
  together(groups[warpgroup], WARPGROUP_THREADS, running % WARPGROUP_THREADS, name, mine, op);
}

// Element (mn, k) of an operand in shared memory
inline float operand(uint64_t descriptor, bool mn_major, int mn, int k) {
  const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4;
  const int layout = descriptor >> 62 & 3;
  if (layout != 1 && layout != 2) fail("a descriptor without a swizzle that is emulated");
  const int row_bytes = layout == 1 ? 128 : 64;
  uint32_t address = start;
  if (mn_major) {
    const int columns = row_bytes / 2;
    address += mn / columns * leading + k / 8 * stride + k % 8 * row_bytes + mn % columns * 2;
  } else {
    address += mn / 8 * stride + mn % 8 * row_bytes + k * 2;
  }
  uint16_t element;
  std::memcpy(&element, at(swizzled(address, row_bytes), 2), 2);
  return cvt_f32(element);
}

template <int N>
void multiply(const std::vector<Wgmma>& lanes, bool accumulate, bool a_mn_major, bool b_mn_major,
              bool a_in_registers) {
  static float x[64][16], y[16][N];
  for (int row = 0; row < 64; ++row) {
    for (int k = 0; k < 16; ++k) {
      const int lane = row / 16 * 32 + row % 8 * 4 + k % 8 / 2;
      x[row][k] = a_in_registers ? element(lanes[lane].a[row % 16 / 8 + k / 8 * 2], k % 2)
                                 : operand(lanes[0].a_descriptor, a_mn_major, row, k);
    }
  }
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < N; ++n) y[k][n] = operand(lanes[0].b_descriptor, b_mn_major, n, k);
  }
  for (int t = 0; t < WARPGROUP_THREADS; ++t) {
    for (int i = 0; i < N / 2; ++i) {
      const int row = t / 32 * 16 + i % 4 / 2 * 8 + t % 32 / 4, col = i / 4 * 8 + t % 4 * 2 + i % 2;
      float sum = 0.0f;
      for (int k = 0; k < 16; ++k) sum += x[row][k] * y[k][col];
      lanes[t].c[i] = accumulate ? lanes[t].c[i] + sum : sum;
    }
  }
}

template <int N>
void wgmma(Wgmma mine, bool accumulate, bool a_mn_major, bool b_mn_major, bool a_in_registers) {
  warpgroup_together("wgmma", &mine, [=](void** slots) {
    std::vector<Wgmma> lanes;
    for (int t = 0; t < WARPGROUP_THREADS; ++t) lanes.push_back(*static_cast<Wgmma*>(slots[t]));
    for (const Wgmma& lane : lanes) {
      if (lane.b_descriptor != lanes[0].b_descriptor ||
          lane.a_descriptor != lanes[0].a_descriptor) {
        fail("the threads of a warpgroup have different operands");
      }
    }
    const auto work = [=] {
      multiply<N>(lanes, accumulate, a_mn_major, b_mn_major, a_in_registers);
    };
    if (mode == EARLY) {
      work();
    } else {
      products[running / WARPGROUP_THREADS].open.push_back(work);
    }
  });
}
}  // namespace emulator

__device__ __forceinline__ void wgmma_fence() {}
__device__ __forceinline__ void wgmma_commit_group() {
  emulator::warpgroup_together("wgmma.commit_group", nullptr, [](void**) {
    auto& mine = emulator::products[emulator::running / emulator::WARPGROUP_THREADS];
    mine.groups.push_back(std::move(mine.open));
    mine.open.clear();
  });
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
  emulator::warpgroup_together("wgmma.wait_group", nullptr, [](void**) {
    auto& groups = emulator::products[emulator::running / emulator::WARPGROUP_THREADS].groups;
    while (groups.size() > PENDING) {
      emulator::do_all(groups.front());
      groups.pop_front();
    }
  });
}
template <int N>
__device__ __forceinline__ void hold(float (&)[N]) {}
template <int NT>
__device__ __forceinline__ void hold(float (&)[1][NT][4]) {}
template <int KT>
__device__ __forceinline__ void hold(uint32_t (&)[KT][4]) {}

template <int N>
struct Wgmma {
  template <bool ACCUMULATE, Major A_MAJOR, Major B_MAJOR>
  static void multiply(float (&c)[1][N / 8][4], uint64_t a, uint64_t b) {
    emulator::wgmma<N>({&c[0][0][0], nullptr, a, b}, ACCUMULATE, A_MAJOR == MN_MAJOR,
                       B_MAJOR == MN_MAJOR, false);
  }
  template <bool ACCUMULATE, Major B_MAJOR>
  static void multiply(float (&c)[1][N / 8][4], const uint32_t (&a)[4], uint64_t b) {
    emulator::wgmma<N>({&c[0][0][0], a, 0, b}, ACCUMULATE, false, B_MAJOR == MN_MAJOR, true);
  }
};

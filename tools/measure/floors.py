"""The least time of a case on a GPU: that of the unit that has most to do, at its nominal rate.

Four units, as if nothing else were to be done: tensor cores, exponentials (one for each score),
shared memory, HBM. A score is an allowed pair of query and key in one query head.
"""

from dataclasses import dataclass

from measure.cases import BenchCase


@dataclass(frozen=True)
class Gpu:
    """Rates for each clock and SM, but for HBM: bytes a second."""

    sms: int
    clock: float  # Hz, nominal: under its power limit a card falls below
    tensor: int  # dense 16-bit FLOP
    exponentials: int
    shared: int  # bytes
    hbm: float


GPUS = {
    "NVIDIA H200": Gpu(132, 1.83e9, 4096, 16, 128, 4.24e12),  # HBM: a copy, measured; nominal 4.8
    "NVIDIA H100 80GB HBM3": Gpu(132, 1.83e9, 4096, 16, 128, 3.35e12),  # nominal
}

# What wgmma reads of shared memory with the best tiles known, not all that could be thought of.
# Forward: S = Q K^T with Q in shared memory, O += P V with P in registers, so many keys in a tile:
# a warpgroup of 64 queries reads K, V and its Q, head_dim / 32 + head_dim / 32 + 2 head_dim / keys
# bytes a score.
FORWARD_KEYS = {32: 128, 64: 128, 96: 128, 128: 176, 192: 112, 256: 80}
# Backward: operands, dS (from head_dim 192 on P too) stored, float32 dQ through shared memory; of
# queries x keys 128 x 128 up to head_dim 64, 64 x 128 with V in registers at 96, 80 x 128 at 128,
# 64 x 96 at 192, and 64 x 80 with dQ from registers at 256.
BACKWARD_BYTES = {32: 12.0, 64: 20.0, 96: 30.0, 128: 39.6, 192: 86.0, 256: 90.4}

TENSORS = {"forward": 2, "backward": 4}  # q, out; dout, dq too: and as many of k's size


def shared_bytes(case: BenchCase, direction: str) -> float:
    """Bytes of shared memory that move for each score; at least, where values are narrower."""
    d, dv = case.head_dim, case.head_dim_v
    if direction == "backward":
        return BACKWARD_BYTES[min(d, dv)]
    return (d + dv) / 32 + 2 * d / FORWARD_KEYS[d]


def hbm_bytes(case: BenchCase, direction: str) -> int:
    """Every input and output once, of 16 bits, and lse."""
    heads = case.num_heads_q + case.num_heads_kv
    lse = 4 * case.num_heads_q
    return case.total * ((case.head_dim + case.head_dim_v) * TENSORS[direction] * heads + lse)


def unit_times(case: BenchCase, direction: str, gpu: Gpu) -> dict[str, float]:
    """Milliseconds of each unit."""
    scores, clocks = case.num_heads_q * case.pairs, gpu.sms * gpu.clock
    seconds = {
        "tensor": case.flop(direction) / (clocks * gpu.tensor),
        "exp": scores / (clocks * gpu.exponentials),
        "shared": scores * shared_bytes(case, direction) / (clocks * gpu.shared),
        "HBM": hbm_bytes(case, direction) / gpu.hbm,
    }
    return {unit: 1e3 * time for unit, time in seconds.items()}


def floor(case: BenchCase, direction: str, gpu: Gpu) -> tuple[float, str]:
    """Milliseconds, and the unit that takes them: the first of those that take alike."""
    times = unit_times(case, direction, gpu)
    unit = max(times, key=lambda unit: times[unit])
    return times[unit], unit

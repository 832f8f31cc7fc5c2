"""Problems of every pair of native head_dim and head_dim_v, for whoever runs the CUDA kernels.

The 36 pairs take dtypes, masks and groups in turn, so that each head_dim meets all of them and few
kernels are compiled.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from rawattn.check.cases import HALF, Case
from rawattn.check.run import evaluate, own
from rawattn.check.sparse import own_sparse
from rawattn.check.sparse_cases import SparseCase
from rawattn.variants import HEAD_DIMS
from tests.shared.gpu_problems import sized

LENGTHS_Q, LENGTHS_K = (70, 5, 0, 1, 133), (133, 5, 5, 1, 70)
MASKS = (
    {},
    {"causal": True},
    {"window": (40, 20)},
    {"window": (30, -1)},
    {"window": (-1, 9)},
)
SHARING = ((1, 16, 2), (4, 64, 1), (16, 32, 1), (2, 128, 2), (3, 16, 1))  # group, block, kv heads
PAIRS = list(enumerate(product(HEAD_DIMS, HEAD_DIMS)))


def dense_cases() -> Iterator[Case]:
    for n, (d, dv) in PAIRS:
        i, j = divmod(n, len(HEAD_DIMS))
        yield Case(
            f"pair-{d}-{dv}",
            LENGTHS_Q,
            LENGTHS_K,
            dtype=HALF[(i + j) % 2],
            group=(1, 3)[j % 2],
            poisoned=(1,),
            **sized(d, dv),
            **MASKS[(2 * i + j) % len(MASKS)],
        )


def sparse_cases() -> Iterator[SparseCase]:
    for n, (d, dv) in PAIRS:
        i, j = divmod(n, len(HEAD_DIMS))
        group, block_size, num_heads_kv = SHARING[(2 * i + j) % len(SHARING)]
        yield SparseCase(
            f"sparse-pair-{d}-{dv}",
            LENGTHS_Q,
            LENGTHS_K,
            dtype=HALF[(i + j) % 2],
            group=group,
            num_heads_kv=num_heads_kv,
            block_size=block_size,
            num_selected=3,
            causal=j % 3 > 0,
            own=n % 4 > 0,
            gate=i % 2 == j // 2 % 2,
            poisoned=(1,),
            **sized(d, dv),
        )


def check(case: Case, step: str, *, forward: bool) -> None:
    """Judge a step of the CUDA kernels on CuPy arrays, and with it, or not, the forward."""
    make = own_sparse if isinstance(case, SparseCase) else own
    candidates = [replace(candidate, framework="cupy") for candidate in make("cuda", (step,))]
    rows = [row for c in candidates[0 if forward else 1 :] for row in evaluate(c, case)]
    wrong = [row for row in rows if row.verdict.verdict not in ("pass", "vacuous")]
    assert not wrong, "\n".join(f"{r.backend} {r.tensor}: {r.verdict}" for r in wrong)
    found = {row.tensor for row in rows if row.verdict.ok}
    assert len(found) >= 3, f"only {sorted(found)} of {case} prove anything"

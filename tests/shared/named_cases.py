"""Problems of the diagnosis that tests ask for by name, dense and block-sparse."""

from dataclasses import replace
from typing import Any

from rawattn.check.cases import Case
from rawattn.check.sparse_cases import SparseCase

LENGTHS = (65, 150, 1, 97)
ALIKE: dict[str, Any] = {"lengths_q": LENGTHS, "lengths_k": LENGTHS, "dtype": "bfloat16"}
ALIKE |= {"past_q": 0, "past_k": 0}
DENSE = Case("dense", group=2, **ALIKE)
CAUSAL = replace(DENSE, name="causal", causal=True)
UNEQUAL = replace(CAUSAL, name="unequal", lengths_q=(13, 90, 1, 70), lengths_k=(80, 140, 5, 70))
CASES = {
    "dense": DENSE,
    "causal": CAUSAL,
    "unequal": UNEQUAL,
    "window": replace(UNEQUAL, name="window", causal=False, window=(40, 7)),
    "wide": replace(CAUSAL, name="wide", head_dim=128, head_dim_v=96, group=3, dtype="float16"),
    "odd": replace(DENSE, name="odd", head_dim=40, head_dim_v=40, softmax_scale=0.4),
}
SELECTED = SparseCase("selected", group=4, block_size=32, **ALIKE)
SPARSE_CASES = {
    "selected": SELECTED,
    "open": replace(SELECTED, name="open", causal=False, own=False, counts=True, dtype="float16"),
    "gate": replace(SELECTED, name="gate", gate=True, block_size=16, head_dim=128, head_dim_v=128),
}

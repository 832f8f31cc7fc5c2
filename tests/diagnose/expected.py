"""What rawattn.reference says of a question, by the names of answers, in float64."""

from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import STAGES, Answers, Question
from rawattn.reference import dense, second, sparse
from tests.diagnose.problems import Needs

_SMALL: dict[str, Any] = {
    "lengths": (1, 24),
    "batch": (2, 3),
    "groups": (1, 2, 3),
    "head_dims": (4, 6),
    "head_dims_v": (4, 8),
    "moved": 0.2,
}
_OPTIONS = {"softcap": 0.5, "sinks": 0.5, "seqused": 0.5}
KINDS = {
    "dense": Needs(**_SMALL),
    "options": Needs(**_SMALL | {"dlse": 1.0, "moved": 0.0}, options=_OPTIONS),
    "sparse": Needs(**_SMALL | {"lengths": (1, 60)}, blocks={}),
    "gate": Needs(**_SMALL | {"lengths": (1, 60)}, blocks={"gate": True}),
}


def of_reference(q: Question) -> Answers:
    def wide(*names: str) -> list[Any]:
        arrays = [getattr(q, name) for name in names]
        return [None if array is None else array.astype(np.float64) for array in arrays]

    inputs, where = wide("q", "k", "v"), (q.cu_seqlens_q, q.cu_seqlens_k)
    tangents, (dout, dlse, sinks, tsinks) = wide("tq", "tk", "tv"), wide(*_OTHERS)
    mode: dict[str, Any] = {"softmax_scale": q.softmax_scale}
    first: Any = sparse if q.sparse else dense
    beyond: Any = sparse if q.sparse else second
    moved: dict[str, Any] = {}
    if q.sparse:
        gate, tgate = wide("block_scale", "tblock_scale")
        mode |= {name: getattr(q, name) for name in ("block_counts", "block_size", "causal")}
        mode |= {"include_own_block": q.own, "block_scale": gate}
        where = (*where, q.block_indices)
        moved = {"tblock_scale": tgate, "ddblock_scale": tgate}
    else:
        mode |= {"window": q.mask_window}
    if q.rare:
        mode |= {"softcap": q.softcap, "sinks": sinks, "seqused_k": q.seqused_k}
        moved = {"tsinks": tsinks, "ddsinks": tsinks}
    of_jvp, of_second = (
        {name: x for name, x in moved.items() if name.startswith(prefix)} for prefix in ("t", "dd")
    )
    out, lse = first.forward(*inputs, *where, **mode)
    found: Answers = {"out": out, "lse": lse}
    if q.sliding is not None:
        near = dense.forward(*inputs, *where[:2], window=q.sliding, softmax_scale=q.softmax_scale)
        found |= zip(("sliding out", "sliding lse"), near, strict=True)
    given = out, lse
    if q.passed is not None:
        given = tuple(wide("out", "lse"))
    names = {"backward": ("dq", "dk", "dv"), "second": STAGES["second"][:5], "jvp": STAGES["jvp"]}
    more = {"backward": "dblock_scale", "second": "gblock_scale", "jvp": ""}
    if sinks is not None:
        more |= {"backward": "dsinks", "second": "gsinks"}
    for stage in q.stages[1:]:
        if stage == "jvp":
            results = beyond.jvp(*inputs, *tangents, *where, **of_jvp, **mode)
        else:
            passed = (dout, *inputs, *given, *where)
            results = (
                first.backward(*passed, dlse=dlse, **mode)
                if stage == "backward"
                else beyond.double_backward(*tangents, *passed, dlse=dlse, **of_second, **mode)
            )
        found |= zip((*names[stage], more[stage]), results, strict=False)
    return {name: x for name, x in found.items() if x is not None}


_OTHERS = ("dout", "dlse", "sinks", "tsinks")

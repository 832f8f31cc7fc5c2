"""What hypothesis draws for the tests on a GPU: cases, and layouts of their arrays in memory."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rawattn.check.cases import HALF, Case, Tensors
from tests.shared.gpu_arrays import moved

seqlens = st.lists(st.integers(0, 150), min_size=1, max_size=6)
sides = st.integers(-1, 40)
layouts = st.tuples(st.sampled_from((0, 3, 8, 24)), st.sampled_from((0, 5, 8, 40)), st.booleans())


def laid_out(array: Any, offset: int, pad: int, heads_first: bool) -> Any:
    """A copy of a (tokens, heads, width) array within a buffer of NaN, with other strides."""
    order = (1, 0, 2) if heads_first else (0, 1, 2)
    outer, inner, width = (array.shape[axis] for axis in order)
    row = inner * width + pad
    flat = moved(np.full(offset + outer * row, np.nan, dtype=array.dtype))
    rows = flat[offset:].reshape(outer, row)[:, : inner * width]
    view = rows.reshape(outer, inner, width).transpose(order)
    assert view.base is not None or not array.size
    view[...] = moved(array)
    return view


def packed(host: Tensors) -> tuple[Any, Any, Any]:
    """q, k and v as views of one (tokens, all heads, head_dim) array."""
    joined = moved(np.concatenate([host.q, host.k, host.v], axis=1))
    a, b = host.q.shape[1], host.q.shape[1] + host.k.shape[1]
    return joined[:, :a], joined[:, a:b], joined[:, b:]


def draw_case(data: st.DataObject, **fields: Any) -> tuple[Case, bool]:
    """A case of any lengths, heads and mask; whether its q, k, v can be views of one array."""
    lengths_q = tuple(data.draw(seqlens, "lengths of q"))
    qkv = data.draw(st.booleans(), "views of one array")
    same = qkv or data.draw(st.booleans(), "equal lengths")
    exactly = st.lists(st.integers(0, 150), min_size=len(lengths_q), max_size=len(lengths_q))
    past = data.draw(st.integers(0, 9), "rows past the end")
    case = Case(
        "any",
        lengths_q,
        lengths_q if same else tuple(data.draw(exactly, "lengths of k")),
        dtype=data.draw(st.sampled_from(HALF), "dtype"),
        num_heads_kv=data.draw(st.integers(1, 3), "num_heads_kv"),
        group=data.draw(st.integers(1, 4), "group"),
        causal=data.draw(st.booleans(), "causal"),
        window=data.draw(st.tuples(sides, sides), "window"),
        poisoned=data.draw(st.sampled_from(((), (len(lengths_q) // 2,))), "poisoned"),
        past_q=past,
        past_k=past if qkv else data.draw(st.integers(0, 9), "past the end of k"),
    )
    return replace(case, **fields), qkv


def lay_out(data: st.DataObject, host: Tensors, names: tuple[str, ...], qkv: bool) -> Tensors:
    """``host`` on the GPU, with q, k, v and the arrays of ``names`` in any layout."""
    names = names if qkv else ("q", "k", "v", *names)
    given = {name: getattr(host, name) for name in names}
    drawn = {n: laid_out(a, *data.draw(layouts, n)) for n, a in given.items() if a is not None}
    views = dict(zip("qkv", packed(host), strict=True)) if qkv else {}
    return replace(host.on("cupy"), **views, **drawn)

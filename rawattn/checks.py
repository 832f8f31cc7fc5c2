"""Every rule for the inputs, one function each, and every error text: what, given, allowed, remedy.

Longer than a module should be, because texts take room. Plain comparisons on names, shapes and
numbers: no array's memory is touched; ``offsets`` gets the content of cu_seqlens as a list, of host
arrays and from callers who asked for validation.
"""

import math
from numbers import Real
from operator import index
from typing import Any, NoReturn

import numpy as np

Shape = tuple[int, ...]

DTYPES = ("float16", "bfloat16", "float32", "float64")
BACKENDS = ("cuda", "numba", "reference")
METHODS = ("atomic_dq", "atomic_dkv", "deterministic")
BLOCK_SIZES = (16, 32, 64, 128)
MAX_HEAD_DIM = 256
MAX_TOKENS = 2**31 - 1024  # the rows of a tile that begins before it count in 32 bits too
MAX_ENTRIES = 2**31 - 1
MAX_HEADS = 65535  # of a grid's second axis
MAX_GROUP = 64  # query heads of a selection: the most rows of a tile of queries
LAYOUTS = {
    "q": "(total_q, num_heads_q, head_dim)",
    "k": "(total_k, num_heads_kv, head_dim)",
    "v": "(total_k, num_heads_kv, head_dim_v)",
    "sinks": "(num_heads_q,)",
    "tsinks": "(num_heads_q,), like sinks",
    "ddsinks": "(num_heads_q,), like sinks",
    "seqused_k": "(batch,)",
    "out": "(total_q, num_heads_q, head_dim_v)",
    "lse": "(num_heads_q, total_q)",
    "dout": "(total_q, num_heads_q, head_dim_v), like out",
    "dlse": "(num_heads_q, total_q), like lse",
    "delta": "(num_heads_q, total_q), like lse",
    "dq": "(total_q, num_heads_q, head_dim), like q",
    "dk": "(total_k, num_heads_kv, head_dim), like k",
    "dv": "(total_k, num_heads_kv, head_dim_v), like v",
    "ddq": "(total_q, num_heads_q, head_dim), like q",
    "ddk": "(total_k, num_heads_kv, head_dim), like k",
    "ddv": "(total_k, num_heads_kv, head_dim_v), like v",
    "ddout": "(total_q, num_heads_q, head_dim_v), like out",
    "ddlse": "(num_heads_q, total_q), like lse",
    "gq": "(total_q, num_heads_q, head_dim), like q",
    "gk": "(total_k, num_heads_kv, head_dim), like k",
    "gv": "(total_k, num_heads_kv, head_dim_v), like v",
    "tq": "(total_q, num_heads_q, head_dim), like q",
    "tk": "(total_k, num_heads_kv, head_dim), like k",
    "tv": "(total_k, num_heads_kv, head_dim_v), like v",
    "tout": "(total_q, num_heads_q, head_dim_v), like out",
    "block_indices": "(total_q, num_heads_kv or num_heads_q, num_selected)",
    "block_mask": "(total_q, num_heads_kv or num_heads_q, num_blocks)",
    "block_counts": "(total_q, num_heads_sel), the first two axes of block_indices",
    "block_scale": "(total_q, num_heads_sel, num_selected), like block_indices",
    "ddblock_scale": "(total_q, num_heads_sel, num_selected), like block_scale",
    "tblock_scale": "(total_q, num_heads_sel, num_selected), like block_scale",
    "blocks": "(num_heads_sel, total_q, width) of the block table",
    "slots": "(num_heads_sel, total_q, width) of the block table",
    "counts": "(num_heads_sel, total_q) of the block table",
    "starts": "(num_chunks, num_heads_kv, key_units) of the block table",
    "lengths": "(num_chunks, num_heads_kv, key_units) of the block table",
    "queries": "(num_heads_sel * total_q * width,) of the block table",
    "query_slots": "(num_heads_sel * total_q * width,) of the block table",
    "work": "(segments, 4) of the block table",
}


# ---- arrays -----------------------------------------------------------------------------------


def unknown_array(name: str, kind: type) -> NoReturn:
    """Not an array of any library."""
    raise TypeError(
        f"{name} is a {_spell(kind)}, which is no array: expected one of CuPy, torch, JAX, Numba "
        "or NumPy, or an object with __dlpack__ or __cuda_array_interface__; convert it first"
    )


def no_memory(name: str, kind: str) -> NoReturn:
    """A tensor without memory: fake, meta, traced, or a wrapper around others."""
    raise TypeError(
        f"{name} is a {kind}, which has no memory of its own to compute on: expected a real array; "
        "under torch.compile or export use rawattn.torch.varlen_attn, and call outside jax.jit"
    )


def unsupported_device(name: str, device: str) -> NoReturn:
    """Neither host memory nor a CUDA device."""
    raise TypeError(
        f"{name} is on device {device}: expected host memory or a CUDA device; move it there first"
    )


def no_cupy() -> NoReturn:
    """CUDA arrays of any library are launched on through CuPy."""
    raise RuntimeError(
        "CuPy cannot be imported: expected it beside CUDA arrays of any library; install "
        "rawattn[cuda12] or rawattn[cuda13], whichever is your version of CUDA"
    )


def masked(name: str) -> NoReturn:
    """A masked array, or an interface that carries a mask."""
    raise TypeError(
        f"{name} has an element mask, which attention cannot honour: expected plain data; pass it "
        "without the mask, and use cu_seqlens to leave tokens out"
    )


def requires_grad(name: str) -> NoReturn:
    """A torch tensor that wants a gradient, while torch records the graph."""
    raise TypeError(
        f"{name} is a torch tensor that requires grad: expected one that does not, since nothing "
        "here is recorded for autograd; call rawattn.torch.varlen_attn or sparse_attn, or call "
        f"under torch.no_grad(), or pass {name}.detach()"
    )


def lazily_negated(name: str) -> NoReturn:
    """A torch tensor with the negative bit: its memory holds the opposite sign."""
    raise TypeError(
        f"{name} is a lazily negated torch tensor: expected one whose memory holds its values; "
        f"pass {name}.resolve_neg()"
    )


def uneven_strides(name: str, strides: Shape, itemsize: int) -> NoReturn:
    """Elements at addresses that are no multiple of their size."""
    raise ValueError(
        f"{name} has strides of {tuple(strides)} bytes: expected multiples of its element size, "
        f"{itemsize}; pass a contiguous copy"
    )


def same_framework(name: str, given: str, expected: str) -> None:
    """Arrays of one library, all in host memory or all on a device."""
    if given != expected:
        remedy = f"convert {name} to {expected}"
        if name.startswith("cu_seqlens") and "CPU" not in expected and expected != "NumPy":
            remedy += ", once per batch: the kernels read it on the device"
        raise TypeError(
            f"{name} is a {given} array beside a {expected} array: expected all arrays of a call "
            f"from one library and on one device; {remedy}"
        )


def same_device(name: str, given: int, expected: int) -> None:
    """One CUDA device per call."""
    if given != expected:
        raise ValueError(
            f"{name} is on CUDA device {given} beside an array on CUDA device {expected}: expected "
            f"all arrays of a call on one device; move {name} to device {expected}"
        )


def dtype(name: str, given: str) -> None:
    """The dtypes that q, k and v may have."""
    if given not in DTYPES:
        remedy = f"convert {name} to one of them"
        if given.startswith(">"):
            remedy = f"{name} is big-endian: convert it to native byte order"
        elif given == "void16":
            remedy = (
                "a void of 2 bytes is how __cuda_array_interface__ spells bfloat16: hand the array "
                "over by DLPack, for example through cupy.from_dlpack"
            )
        raise TypeError(f"{name} has dtype {given}: expected {_either(DTYPES)}; {remedy}")


def same_dtype(name: str, given: str, expected: str) -> None:
    """No mixed dtypes."""
    if given != expected:
        raise TypeError(
            f"{name} has dtype {given}: expected {expected}, as the other arrays of the call ask "
            f"for; convert {name} to {expected}"
        )


def rank(name: str, given: Shape) -> None:
    """Packed arrays have three axes."""
    if len(given) != 3:
        remedy = "reshape it, with all tokens of the batch along the first axis"
        if len(given) == 4:
            remedy = "join its first two axes: the sequences of a batch lie one after the other"
        raise ValueError(
            f"{name} has shape {tuple(given)}: expected 3 dimensions, {LAYOUTS[name]}; {remedy}"
        )


def shape(name: str, given: Shape, expected: Shape) -> None:
    """A shape that follows from the other arrays."""
    if given != expected:
        raise ValueError(
            f"{name} has shape {tuple(given)}: expected {tuple(expected)}, {LAYOUTS[name]}; check "
            "that it belongs to the other arrays of the call"
        )


def tokens(name: str, total: int) -> None:
    """Kernels count tokens, and the rows of a tile past the last one, in 32 bits."""
    if total > MAX_TOKENS:
        raise ValueError(
            f"{name} has {total} tokens: expected at most {MAX_TOKENS}, so that kernels can count "
            "them, and the rows of a tile past the last one, in 32 bits; split the batch"
        )


# ---- heads and head sizes ---------------------------------------------------------------------


def keys_and_values(k: Shape, v: Shape) -> None:
    """v has the tokens and heads of k."""
    if k[:2] != v[:2]:
        raise ValueError(
            f"v has shape {tuple(v)} beside k of {tuple(k)}: expected {(*k[:2], v[2])}, the tokens "
            "and heads of k; check that k and v belong together"
        )


def head_dim(name: str, given: int) -> None:
    """Any multiple of 8 up to 256."""
    if given % 8 or not 8 <= given <= MAX_HEAD_DIM:
        remedy = "split the heads"
        if 0 < given < MAX_HEAD_DIM:
            remedy = f"pad the last axis of {name} with zeros to {-(-given // 8) * 8}"
            if name == "q":
                remedy += ", that of k too, and pass softmax_scale for the original size"
        raise ValueError(
            f"{name} has head size {given}: expected a multiple of 8 from 8 to {MAX_HEAD_DIM}; "
            f"{remedy}"
        )


def same_head_dim(q: int, k: int) -> None:
    """q and k meet in a dot product."""
    if q != k:
        raise ValueError(
            f"k has head_dim {k} beside q of head_dim {q}: expected the same (only v may have "
            "another); check that q and k belong together"
        )


def heads(num_heads_q: int, num_heads_kv: int) -> None:
    """Query heads divide evenly over key/value heads."""
    if num_heads_q < 1 or num_heads_kv < 1 or num_heads_q % num_heads_kv:
        raise ValueError(
            f"q has {num_heads_q} heads and k has {num_heads_kv}: expected at least one of each, "
            "and num_heads_q divisible by num_heads_kv; repeat or regroup the heads"
        )
    if num_heads_q > MAX_HEADS:
        raise ValueError(
            f"q has {num_heads_q} heads: expected at most {MAX_HEADS}, what the grid of a kernel "
            "can count; split them into several calls"
        )


# ---- cu_seqlens -------------------------------------------------------------------------------


def cu_seqlens(name: str, shape: Shape, dtype: str) -> None:
    """(batch + 1,) int32, or int64 which is converted on the device."""
    if len(shape) != 1 or shape[0] < 1:
        raise ValueError(
            f"{name} has shape {tuple(shape)}: expected (batch + 1,), the running sum of the "
            "sequence lengths from 0 on; an empty batch is [0]"
        )
    if dtype not in ("int32", "int64"):
        raise TypeError(
            f"{name} has dtype {dtype}: expected int32, or int64 at the price of a conversion on "
            "every call; convert it to int32"
        )


def same_batch(cu_seqlens: int, cu_seqlens_k: int) -> None:
    """As many key sequences as query sequences."""
    if cu_seqlens != cu_seqlens_k:
        raise ValueError(
            f"cu_seqlens_k has {cu_seqlens_k} offsets beside {cu_seqlens} of cu_seqlens: expected "
            "as many; repeat an offset for a sequence without tokens"
        )


def shared_cu_seqlens(total_q: int, total_k: int) -> None:
    """Without cu_seqlens_k the keys are packed like the queries."""
    if total_q != total_k:
        raise ValueError(
            f"k has {total_k} tokens beside {total_q} of q, without cu_seqlens_k: expected as many "
            "then; pass cu_seqlens_k, the same array again if the surplus is padding"
        )


def offsets(name: str, content: list[int], total: int) -> None:
    """The content of cu_seqlens: from 0, never falling, within the tokens."""
    if content[0] != 0:
        raise ValueError(
            f"{name} starts at {content[0]}: expected 0; put a 0 in front of the running sum"
        )
    for i in range(1, len(content)):
        if content[i] < content[i - 1]:
            raise ValueError(
                f"{name} falls from {content[i - 1]} to {content[i]} at index {i}: expected a "
                "running sum, which never falls; pass cumulative sums, not lengths"
            )
    if content[-1] > total:
        raise ValueError(
            f"{name} ends at {content[-1]}: expected at most {total}, the number of tokens; check "
            "which array it belongs to"
        )


# ---- blocks of keys ---------------------------------------------------------------------------


def block_axes(name: str, shape: Shape) -> None:
    """block_indices and block_mask have three axes."""
    if len(shape) != 3:
        raise ValueError(
            f"{name} has shape {tuple(shape)}: expected 3 dimensions, {LAYOUTS[name]}; reshape it, "
            "with all tokens of the batch along the first axis"
        )


def block_dtype(name: str, given: str) -> None:
    """Block indices and counts are int32, or int64 which is converted on the device; masks bool."""
    if name == "block_mask":
        if given != "bool":
            raise TypeError(
                f"block_mask has dtype {given}: expected bool, whether a query sees a block; "
                "compare it, as in block_mask != 0, or pass block_indices"
            )
    elif given not in ("int32", "int64"):
        raise TypeError(
            f"{name} has dtype {given}: expected int32, or int64 at the price of a conversion; "
            f"convert {name} to int32"
        )


def selection_tokens(name: str, given: int, total_q: int) -> None:
    """A selection for every query token."""
    if given != total_q:
        raise ValueError(
            f"{name} has {given} tokens beside {total_q} of the queries: expected as many; check "
            "that they belong together"
        )


def selection_heads(given: int, num_heads_q: int, num_heads_kv: int) -> None:
    """Each key/value head has a selection, or each query head."""
    if given not in (num_heads_kv, num_heads_q):
        raise ValueError(
            f"the selection has {given} heads: expected {num_heads_kv} (num_heads_kv) or "
            f"{num_heads_q} (num_heads_q); repeat it along the query heads that share it"
        )
    if num_heads_q > MAX_GROUP * given:
        raise ValueError(
            f"{num_heads_q // given} query heads share a selection: expected at most {MAX_GROUP}; "
            "repeat the selection along the query heads"
        )


def block_size(given: Any) -> int:
    """Keys of a block."""
    size = _integer("block_size", given, "keys of a block")
    if size not in BLOCK_SIZES:
        raise ValueError(
            f"block_size is {size}: expected 16, 32, 64 or 128; split larger blocks into several "
            "of 128, each with an index of its own"
        )
    return size


def entries(num_heads_sel: int, total_q: int, width: int) -> None:
    """The table counts its entries in 32 bits."""
    total = num_heads_sel * total_q * width
    if total > MAX_ENTRIES:
        raise ValueError(
            f"{total_q} queries with {num_heads_sel} selections of up to {width} blocks are "
            f"{total} entries of a block table: expected at most {MAX_ENTRIES}; split the batch, "
            "or select fewer and larger blocks"
        )


def lists(number: int, segments: int) -> None:
    """And its lists, with two more counters, and the four numbers of each of their segments."""
    if number > MAX_ENTRIES - 2:
        raise ValueError(
            f"the keys are {number} lists of queries in a block table: expected at most "
            f"{MAX_ENTRIES - 2}; split the batch, or take larger blocks"
        )
    if segments > MAX_ENTRIES // 4:
        raise ValueError(
            f"the lists of a block table are up to {segments} segments: expected at most "
            f"{MAX_ENTRIES // 4}; split the batch, or take larger blocks"
        )


def counts(name: str, least: int) -> None:
    """The content of block_counts: a number of slots."""
    if least < 0:
        raise ValueError(
            f"{name} holds {least}: expected 0 or more, how many slots of a query count; clip it"
        )


def beside_block_scale(name: str, given: bool, scaled: bool) -> None:
    """A direction of block_scale asks for block_scale."""
    if given and not scaled:
        raise ValueError(
            f"{name} is given without block_scale: expected both or block_scale alone; pass "
            "block_scale, of ones if need be"
        )


def same_as_table(name: str, given: Any, of_table: Any) -> None:
    """A call and the block table that it gets say the same."""
    if given != of_table:
        raise ValueError(
            f"{name} is {given} beside a block table of {name} {of_table}: expected the same; "
            f"pass {name}={of_table}, or build another table"
        )


def counted_by_table(given: bool) -> None:
    """block_counts is in the table already."""
    if given:
        raise ValueError(
            "block_counts is given beside a block table: expected None, since the table has "
            "counted; pass block_counts to BlockTable.of_indices"
        )


def table_lists(available: bool) -> None:
    """Gradients go from key blocks to queries, which the table has to list."""
    if not available:
        raise ValueError(
            "the block table has no lists of queries, which gradients need: expected one that was "
            "built with lists=True; build it so, or pass block_indices"
        )


def pattern(sliding_blocks: Any, global_blocks: Any) -> tuple[int, int]:
    """Blocks of a pattern: the nearest ones, one at least, and the first ones."""
    near = _integer("sliding_blocks", sliding_blocks, "blocks from the query's own one back")
    first = _integer("global_blocks", global_blocks, "blocks from the sequence's start on")
    if near < 1 or first < 0:
        raise ValueError(
            f"sliding_blocks is {near} and global_blocks {first}: expected 1 or more, and 0 or "
            "more; pass sliding_blocks=1 for the own block alone"
        )
    return near, first


def size(name: str, given: Any) -> int:
    """A size that no array of the call tells."""
    if given is None:
        raise ValueError(f"{name} is None: expected a number, which no array tells; pass {name}")
    return _integer(name, given, "a size")


def only_sliding(given: Any, sliding: bool) -> None:
    """The window of a sparse function is that of its second result."""
    if given is not None and not sliding:
        raise ValueError(
            f"window is {given!r} without return_sliding: expected both or neither, since blocks "
            "are selected by block_indices alone; pass return_sliding=True, or leave window out"
        )


def sliding_window(given: Any, block_size: int, causal: bool) -> tuple[int, int]:
    """The window of return_sliding: None for block_size - 1 back, one integer for (left, 0)."""
    if given is None:
        return block_size - 1, 0
    try:
        given = index(given), 0
    except TypeError:
        pass
    return window(given, causal)


# ---- outputs ----------------------------------------------------------------------------------


def writable(name: str, given: bool) -> None:
    """Preallocated outputs are written in place."""
    if not given:
        raise ValueError(
            f"{name} is read-only (as JAX arrays always are): expected an array to write to; pass "
            f"{name}=None and take the returned one"
        )


def distinct_elements(name: str, shape: Shape, strides: Shape) -> None:
    """Two elements of an output never share memory, as in a broadcast array."""
    repeated = any(n > 1 and stride == 0 for n, stride in zip(shape, strides, strict=True))
    if repeated and 0 not in shape:
        raise ValueError(
            f"{name} has strides {tuple(strides)} for shape {tuple(shape)}: expected memory for "
            f"every element, not a broadcast array; pass {name}=None and take the returned one"
        )


def separate(name: str, other: str | None) -> NoReturn:
    """Results are written while inputs are still read; ``other`` is a result, None an input."""
    what = "an input" if other is None else other
    raise ValueError(
        f"{name} shares memory with {what}: expected memory of its own; pass {name}=None and take "
        "the returned array"
    )


# ---- options ----------------------------------------------------------------------------------

_WORDS = {  # of other libraries, and what stands for them here
    "cu_seqlens_q": "pass it as cu_seqlens",
    "max_seqlen_q": "leave it out, no maximum is needed",
    "max_seqlen_k": "leave it out, no maximum is needed",
    "dropout_p": "leave it out, there is no dropout",
    "window_size": "pass window=(left, right)",
    "scale": "pass softmax_scale",
    "sm_scale": "pass softmax_scale",
    "is_causal": "pass causal",
    "return_attn_probs": "pass return_lse=True for the logsumexp",
    "return_softmax_lse": "pass return_lse=True",
    "enable_gqa": "leave it out, num_heads_q may be any multiple of num_heads_kv",
    "alibi_slopes": "leave it out, there is no bias",
    "block_table": "leave it out, k and v are packed and have no pages",
}


def call_style(function: str, extra: tuple[Any, ...], wrong: dict[str, Any]) -> NoReturn:
    """What a function does not take: more arguments by position, or by another name."""
    if wrong:
        name = next(iter(wrong))
        remedy = _WORDS.get(name, f"help(rawattn.{function}) lists its parameters")
        raise TypeError(
            f"{function} is given {name}: expected its own parameters, by their names; {remedy}"
        )
    raise TypeError(
        f"{function} is given {len(extra)} more arguments by position than it takes: expected "
        "cu_seqlens_k and all options by name; leave the maximum lengths of other libraries out"
    )


def flag(name: str, given: Any) -> bool:
    """True or False, NumPy's too, and nothing that only counts as one of them."""
    if not isinstance(given, (bool, np.bool_)):
        raise TypeError(f"{name} is {given!r}: expected True or False; pass a bool")
    return bool(given)


def window(given: Any, causal: bool) -> tuple[int, int]:
    """(left, right), each -1 (open) or more; ``causal`` caps right at 0."""
    try:
        left, right = given
        left, right = index(left), index(right)
    except (TypeError, ValueError):
        raise TypeError(
            f"window is {given!r}: expected two integers (left, right), inclusive distances where "
            "-1 is open; pass (-1, -1) for no window"
        ) from None
    if left < -1 or right < -1:
        raise ValueError(
            f"window is {given!r}: expected left and right of -1 (open) or more; for causal "
            "attention pass causal=True"
        )
    return left, 0 if causal else right


def without_sinks(name: str) -> NoReturn:
    """A direction of sinks goes with sinks."""
    raise ValueError(f"{name} is given without sinks: expected both or neither; pass sinks too")


def softcap(given: Any) -> float:
    """A positive finite number."""
    return _positive("softcap", given, "None is none")


def softmax_scale(given: Any) -> float | None:
    """A positive finite number, or None for head_dim ** -0.5."""
    remedy = "pass None for head_dim ** -0.5, or scale q"
    return None if given is None else _positive("softmax_scale", given, remedy)


def _positive(name: str, given: Any, remedy: str) -> float:
    if not isinstance(given, Real):
        raise TypeError(
            f"{name} is a {_spell(type(given))}: expected a number or None; pass a Python number, "
            "since one in an array would have to be read back from the device"
        )
    number = float(given)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} is {number}: expected a positive finite number; {remedy}")
    return number


def backend(given: str | None, device: int) -> None:
    """A known backend that can work on arrays of this device (-1 is the CPU)."""
    if given is not None and given not in BACKENDS:
        raise ValueError(f"backend is {given!r}: expected {_either(BACKENDS)}; None takes the best")
    if given == "cuda" and device < 0:
        raise ValueError(
            "backend is 'cuda' beside arrays in host memory: expected arrays on a CUDA device; "
            "move them there, or pass backend=None, 'reference' or 'numba'"
        )


def numba_device(available: bool) -> None:
    """Numba twins work on host arrays by way of a GPU or of Numba's simulator."""
    if not available:
        raise RuntimeError(
            "backend is 'numba' without a CUDA device: expected one, or Numba's simulator; set "
            "NUMBA_ENABLE_CUDASIM=1 before Python starts, or pass backend='reference'"
        )


def method(given: str | None, deterministic: bool) -> None:
    """A known backward method, without atomics where determinism is asked for."""
    if given is not None and given not in METHODS:
        raise ValueError(f"method is {given!r}: expected {_either(METHODS)}; None takes the best")
    if deterministic and given in ("atomic_dq", "atomic_dkv"):
        raise ValueError(
            f"method is {given!r} with deterministic=True: expected 'deterministic', since "
            "atomics add in any order; pass method=None or deterministic=False"
        )


def _integer(name: str, given: Any, what: str) -> int:
    try:
        return index(given)
    except TypeError:
        raise TypeError(
            f"{name} is {given!r}: expected an integer, {what}; pass a Python int"
        ) from None


def _spell(kind: type) -> str:
    name = kind.__qualname__
    return name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}"


def _either(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"

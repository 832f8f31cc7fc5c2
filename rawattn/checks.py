"""Every rule for the inputs, one function each, and every error text: what, given, allowed, remedy.

Longer than a module should be, because texts take room. Plain comparisons on names, shapes and
numbers: no array's memory is touched; ``offsets`` gets the content of cu_seqlens as a list, from
callers who asked for validation.
"""

import math
from numbers import Real
from operator import index
from typing import Any, NoReturn

Shape = tuple[int, ...]

DTYPES = ("float16", "bfloat16", "float32", "float64")
BACKENDS = ("cuda", "numba", "reference")
METHODS = ("atomic_dq", "atomic_dkv", "two_pass")
MAX_HEAD_DIM = 256
MAX_TOKENS = 2**31 - 1
LAYOUTS = {
    "q": "(total_q, num_heads_q, head_dim)",
    "k": "(total_k, num_heads_kv, head_dim)",
    "v": "(total_k, num_heads_kv, head_dim_v)",
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
    """cu_seqlens counts tokens in 32 bits."""
    if total > MAX_TOKENS:
        raise ValueError(
            f"{name} has {total} tokens: expected at most {MAX_TOKENS}, what 32-bit cu_seqlens can "
            "count; split the batch"
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
    """The content of cu_seqlens, read on request: from 0, never falling, within the tokens."""
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


# ---- options ----------------------------------------------------------------------------------


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


def softmax_scale(given: Any) -> float | None:
    """A finite number, or None for head_dim ** -0.5."""
    if given is None:
        return None
    if not isinstance(given, Real):
        raise TypeError(
            f"softmax_scale is a {_spell(type(given))}: expected a number or None; pass a Python "
            "number, since one in an array would have to be read back from the device"
        )
    scale = float(given)
    if not math.isfinite(scale):
        raise ValueError(
            f"softmax_scale is {scale}: expected a finite number; pass None for head_dim ** -0.5"
        )
    return scale


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
            f"method is {given!r} with deterministic=True: expected 'two_pass', since atomics add "
            "in any order; pass method=None or deterministic=False"
        )


def _spell(kind: type) -> str:
    name = kind.__qualname__
    return name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}"


def _either(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"

"""What the memory of block_indices holds where it is taken for another array."""

from collections.abc import Callable

import numpy as np

from rawattn.check.diagnose.engine.question import Question


def _words(question: Question) -> np.ndarray:
    """int64 as int32: low and high words in turn, of the first half."""
    indices = np.ascontiguousarray(question.block_indices).astype("<i8")
    return indices.reshape(-1).view("<i4")[: indices.size].reshape(indices.shape).astype(np.int64)


def _words_of_rows(question: Question) -> np.ndarray:
    """The same for every token and head, which start where they should."""
    indices = np.ascontiguousarray(question.block_indices).astype("<i8")
    words = indices.view("<i4") if indices.size else np.repeat(indices, 2, axis=2)
    return words[..., : indices.shape[2]].astype(np.int64)


def _pairs_of_words(question: Question) -> np.ndarray:
    """int32 as int64: two a number; behind the end there is nothing."""
    indices = np.ascontiguousarray(question.block_indices).astype("<i4")
    flat = indices.reshape(-1)
    found = np.full(flat.size, -1, dtype=np.int64)
    numbers = flat[: flat.size // 2 * 2].view("<i8")
    found[: len(numbers)] = numbers
    return found.reshape(indices.shape)


def _axes(order: tuple[int, int, int], back: bool) -> Callable[[Question], np.ndarray]:
    """Memory with the axes in this order is read as (T, H, S), or, ``back``, the reverse."""

    def read(question: Question) -> np.ndarray:
        x = np.asarray(question.block_indices).astype(np.int64)
        if back:
            shape = tuple(x.shape[axis] for axis in order)
            return np.ascontiguousarray(x.reshape(shape).transpose(np.argsort(order)))
        return np.ascontiguousarray(x.transpose(order)).reshape(x.shape)

    return read


def _per_query_head(question: Question) -> np.ndarray | None:
    """Strides as if there were a selection for every query head."""
    x = np.asarray(question.block_indices).astype(np.int64)
    if x.shape[1] == question.num_heads_q:
        return None
    T, H, S = len(x), question.num_heads_q, x.shape[2]
    flat = np.concatenate([x.reshape(-1), np.full(T * H * S - x.size, -1)])
    return flat.reshape(T, H, S)


def _per_key_head(question: Question) -> np.ndarray | None:
    """Strides as if there were a selection for every key/value head."""
    x = np.asarray(question.block_indices).astype(np.int64)
    T, H, S = len(x), question.num_heads_kv, x.shape[2]
    return None if x.shape[1] == H else x.reshape(-1)[: T * H * S].reshape(T, H, S)


def _own_stride(question: Question) -> np.ndarray | None:
    """Tokens at the stride of query heads, selections at that of theirs."""
    x = np.asarray(question.block_indices).astype(np.int64)
    T, H, S = x.shape
    if question.num_heads_q == H:
        return None
    flat = np.concatenate([x.reshape(-1), np.full(T * question.num_heads_q * S - x.size, -1)])
    return np.ascontiguousarray(flat.reshape(T, question.num_heads_q, S)[:, :H])


def _first_rows(question: Question) -> np.ndarray:
    x, sequence = np.asarray(question.block_indices).astype(np.int64), question.sequence_of("q")
    starts = np.array([*np.asarray(question.cu_seqlens_q)[:-1], 0])[sequence]
    return x[np.where(sequence < 0, 0, np.arange(len(x)) - starts)]


def _other_rows(by: int) -> Callable[[Question], np.ndarray]:
    """Rows of the token before, or after."""

    def read(question: Question) -> np.ndarray:
        x = np.asarray(question.block_indices).astype(np.int64)
        return x[np.clip(np.arange(len(x)) + by, 0, max(len(x) - 1, 0))]

    return read


READINGS: dict[str, Callable[[Question], np.ndarray | None]] = {
    "int64 as int32": _words,
    "int64 as int32, each row from its start": _words_of_rows,
    "int32 as int64": _pairs_of_words,
    "(T, H, S) as (T, S, H)": _axes((0, 2, 1), back=True),
    "(T, S, H) as (T, H, S)": _axes((0, 2, 1), back=False),
    "(T, H, S) as (H, T, S)": _axes((1, 0, 2), back=True),
    "(H, T, S) as (T, H, S)": _axes((1, 0, 2), back=False),
    "one for every query head": _per_query_head,
    "one for every kv head": _per_key_head,
    "tokens at the stride of query heads": _own_stride,
    "without the sequence's offset": _first_rows,
    "of the token before": _other_rows(-1),
    "of the token after": _other_rows(1),
}

USUAL_READINGS = (
    "int64 as int32",
    "int64 as int32, each row from its start",
    "(T, H, S) as (T, S, H)",
    "(T, H, S) as (H, T, S)",
    "one for every query head",
    "one for every kv head",
    "without the sequence's offset",
)

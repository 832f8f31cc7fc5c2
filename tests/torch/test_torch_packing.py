"""How batches become packed sequences: which keys each query sees, counted out one by one."""

import random

import pytest

torch = pytest.importorskip("torch")

from rawattn.torch import packing  # noqa: E402
from rawattn.torch.packing import Packed  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

Pairs = set[tuple[int, int]]


def pairs_of(p: Packed) -> Pairs:
    """The (query, key) that causal attention of these sequences looks at, as they lay before."""
    found = set()
    ends_q, ends_k = p.cu_seqlens_q.tolist(), p.cu_seqlens_k.tolist()
    of_q, of_k = (None if x is None else x.tolist() for x in (p.of_queries, p.of_keys))
    for n in range(len(ends_q) - 1):
        most = ends_k[n + 1] - ends_k[n]
        used = most if p.seqused_k is None else min(most, int(p.seqused_k[n]))
        length = ends_q[n + 1] - ends_q[n]
        assert length >= 0 and most >= 0 and used >= 0
        for i in range(length):
            for j in range(max(0, min(used, i + used - length + 1))):
                q, k = ends_q[n] + i, ends_k[n] + j
                found.add((q if of_q is None else of_q[q], k if of_k is None else of_k[k]))
    return found


def counted(
    mask: list[list[bool]], seqlen_q: int, seqlen_k: int, size: int | None, padded_queries: bool
) -> Pairs:
    """Of a batch whose rows' tokens so far are padding or not; a cache keeps the last seqlen_k."""
    found = set()
    for row, tokens in enumerate(mask):
        places = [n for n, live in enumerate(tokens) if live]  # where the live ones are
        gone = max(0, len(tokens) - seqlen_k)
        queries = range(len(tokens) - seqlen_q, len(tokens))
        for i, at in enumerate(queries):
            if not tokens[at]:
                assert padded_queries
                continue
            own = places.index(at)
            for other, place in enumerate(places[: own + 1]):
                if place >= gone and (size is None or other // size == own // size):
                    found.add((row * seqlen_q + i, row * seqlen_k + place - gone))
    return found


@pytest.mark.parametrize("size", [None, 1, 3, 4, 64])
@pytest.mark.parametrize("seed", range(12))
def test_padding(seed: int, size: int | None) -> None:
    """With holes, caches that have room and caches that forgot, several queries and one."""
    rng = random.Random(seed)
    batch, so_far = rng.randint(1, 4), rng.randint(1, 14)
    seqlen_k = so_far if rng.random() < 0.5 else rng.randint(max(1, so_far - 5), so_far + 4)
    seqlen_q = rng.choice([1, min(so_far, seqlen_k), rng.randint(1, min(so_far, seqlen_k))])
    mask = [[rng.random() < 0.7 for _ in range(so_far)] for _ in range(batch)]
    padded_queries = seqlen_q > 1
    if not padded_queries:
        mask = [[*row[:-1], True] for row in mask]
    given = torch.tensor(mask)
    p = packing.without_padding(given, seqlen_q, seqlen_k, padded_queries)
    if size is not None:
        p = packing.in_chunks(p, size, batch * seqlen_k)
    assert pairs_of(p) == counted(mask, seqlen_q, seqlen_k, size, padded_queries)
    out = torch.arange(batch * seqlen_q)
    assert torch.equal(p.unpacked(p.queries(out[None]), (batch, seqlen_q)).flatten(), out)


@pytest.mark.parametrize("size", [None, 3, 4])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "seen"), [(2, 9, 7), (1, 4, 11), (6, 6, 6)])
def test_rows(seqlen_q: int, seqlen_k: int, seen: int, size: int | None) -> None:
    """Of a cache with room, of one that keeps the last 4 keys, and of none."""
    p = packing.rows(2, seqlen_q, seqlen_k, torch.device("cpu"), torch.tensor([seen, seen]))
    if size is not None:
        p = packing.in_chunks(p, size, 2 * seqlen_k)
    assert pairs_of(p) == counted([[True] * seen] * 2, seqlen_q, seqlen_k, size, False)


@pytest.mark.parametrize("size", [None, 3])
def test_documents(size: int | None) -> None:
    begins = torch.tensor([[1, 0, 0, 0, 1, 0], [0, 1, 0, 0, 0, 0]]).bool()
    p = packing.documents(begins)
    assert p.cu_seqlens_q.tolist() == [0, 4, 6, 7, 12]
    if size is not None:
        p = packing.in_chunks(p, size, 12)
        assert [n for n in p.cu_seqlens_q.tolist() if n < 12] == [0, 3, 4, 6, 7, 10]
    inside = {
        (q, k)
        for a, b in ((0, 4), (4, 6), (6, 7), (7, 12))
        for q in range(a, b)
        for k in range(a, q + 1)
        if size is None or (q - a) // size == (k - a) // size
    }
    assert pairs_of(p) == inside

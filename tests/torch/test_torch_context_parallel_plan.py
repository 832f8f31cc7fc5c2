"""Who has which tokens and who needs whose, without processes: layouts, stages, estimates."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from rawattn.torch.context_parallel import layout as layouts
from rawattn.torch.context_parallel.attention import Job
from rawattn.torch.context_parallel.estimate import Rates, Sizes
from rawattn.torch.context_parallel.first_order import Options
from rawattn.torch.context_parallel.plans import Plan
from rawattn.torch.context_parallel.stages import OPEN, pairs
from tests.shared import parallel_use, ranks

LENGTHS = st.lists(st.integers(0, 90), min_size=1, max_size=6)
COUNTS = st.integers(1, 5)
CPU = torch.device("cpu")
REACH = st.one_of(st.just(OPEN), st.integers(0, 30))


def plan_of(
    lengths_q: list[int],
    lengths_k: list[int] | None = None,
    *,
    count: int = 2,
    rank: int = 0,
    layout: str = "zigzag",
    method: str = "auto",
    min_chunk: int = 4,
) -> Plan:
    """Without a group: nothing is sent."""
    q, k = ((0, *np.cumsum(n).tolist()) for n in (lengths_q, lengths_k or lengths_q))
    ranges = layouts.LAYOUTS[layout]({"q": q, "k": k}, count, min_chunk)
    nobody: Any = None
    return Plan(nobody, rank, count, q, k, layout, method, None, ranges)


def may_see(plan: Plan, window: tuple[int, int]) -> Any:
    """(tokens of queries, tokens of keys), whether the one sees the other."""
    seen = np.zeros((plan.cu_seqlens_q[-1], plan.cu_seqlens_k[-1]), int)
    of_q, of_k = pairwise(plan.cu_seqlens_q), pairwise(plan.cu_seqlens_k)
    for (q, q_end), (k, k_end) in zip(of_q, of_k, strict=True):
        i, j = np.arange(q_end - q)[:, None], np.arange(k_end - k)
        place = i + (k_end - k) - (q_end - q)
        left, right = (n if n != OPEN else 10**6 for n in window)
        seen[q:q_end, k:k_end] = (j >= place - left) & (j <= place + right)
    return seen


# ---- layouts ----------------------------------------------------------------------------------


@given(LENGTHS, COUNTS, st.sampled_from(sorted(layouts.LAYOUTS)), st.integers(1, 9))
def test_every_token_is_on_one_rank(
    lengths: list[int], count: int, layout: str, least: int
) -> None:
    plan = plan_of(lengths, count=count, layout=layout, min_chunk=least)
    own = plan.tokens["q"]
    assert sorted(np.concatenate(own).tolist()) == list(range(sum(lengths)))
    slack = 1 if layout == "contiguous" else 2 + 2 * len(lengths)
    assert all(abs(len(tokens) - sum(lengths) / count) <= slack for tokens in own)
    for tokens, found in zip(own, plan.pieces["q"], strict=True):
        begins = plan.cu_seqlens_q
        assert [
            t
            for p in found
            for t in range(begins[p.sequence] + p.start, begins[p.sequence] + p.stop)
        ] == tokens.tolist()


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_zigzag_shares_the_work_of_a_causal_mask(count: int) -> None:
    def most(layout: str) -> float:
        plan = plan_of([4001, 7, 203], count=count, layout=layout, min_chunk=16)
        seen = may_see(plan, (OPEN, 0)).sum(1)
        work = [int(seen[tokens].sum()) for tokens in plan.tokens["q"]]
        return max(work) * count / sum(work)

    assert most("zigzag") < 1.01 < 1.3 < most("contiguous")


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("mean", [200, 4000])
def test_zigzag_deals_documents_whole(count: int, mean: int) -> None:
    """Equal tokens and work with one cut between two ranks, beside a few in chunks."""
    drawn = np.random.default_rng(count)
    for _ in range(20):
        lengths = drawn.integers(mean // 4, 2 * mean, 12 * count).tolist()
        ends = np.cumsum(lengths)
        plan = plan_of(lengths, count=count, min_chunk=1)
        tokens = [len(own) for own in plan.tokens["q"]]
        assert max(tokens) - min(tokens) <= 1
        place = np.concatenate([np.arange(n) + 1 for n in lengths])
        work = [int(place[own].sum()) for own in plan.tokens["q"]]
        assert max(work) <= 1.01 * sum(work) / count
        owner = plan.owned["q"].owner
        whole = [
            len({*owner[end - n : end].tolist()}) == 1 for n, end in zip(lengths, ends, strict=True)
        ]
        assert sum(whole) >= len(lengths) - 2 * count


def test_keys_go_where_their_queries_do() -> None:
    plan = plan_of([40, 0, 300, 50, 60], [80, 7, 300, 0, 61], min_chunk=1)
    *_, stage = plan._shares("gather", (OPEN, 0))
    assert sum(share.foreign for share in stage) < 250  # of no more than one sequence
    assert sorted(np.concatenate(plan.tokens["k"]).tolist()) == list(range(448))


# ---- stages -----------------------------------------------------------------------------------


@given(REACH, REACH, *[st.integers(0, 12)] * 4, st.integers(-9, 9))
def test_pairs(left: int, right: int, row: int, rows: int, key: int, keys: int, off: int) -> None:
    i, j = np.arange(row, row + rows)[:, None], np.arange(key, key + keys)
    seen = np.ones((rows, keys), bool)
    if left != OPEN:
        seen &= j >= i + off - left
    if right != OPEN:
        seen &= j <= i + off + right
    assert pairs((row, row + rows), (key, key + keys), off, (left, right)) == seen.sum()


@given(
    LENGTHS,
    st.integers(-5, 9),
    COUNTS,
    st.sampled_from(["gather", "ring"]),
    REACH,
    REACH,
    st.data(),
)
def test_every_pair_is_met_once(
    lengths: list[int], more: int, count: int, method: str, left: int, right: int, data: Any
) -> None:
    """What the calls of all stages and ranks compute, by their own offsets and windows."""
    layout = data.draw(st.sampled_from(sorted(layouts.LAYOUTS)))
    lengths_k = [max(0, n + more) for n in lengths]
    plan = plan_of(lengths, lengths_k, count=count, layout=layout)
    window = left, right
    met = np.zeros((sum(lengths), sum(lengths_k)), int)
    for stage in plan._stages(method, window):
        for rank, own in enumerate(stage):
            tokens = plan.tokens["q"][rank]
            for call in own.calls:
                met += of_call(plan, call, own.segments, tokens)
    assert (met == may_see(plan, window)).all()


def of_call(plan: Plan, call: Any, segments: Any, tokens: Any) -> Any:
    """By the contract of the packed call: ends of rows and of keys in use are aligned."""
    met = np.zeros((plan.cu_seqlens_q[-1], plan.cu_seqlens_k[-1]), int)
    left, right = (n if n != OPEN else 10**6 for n in call.window)
    for meeting in call.meetings:
        segment = segments[meeting.segment]
        rows = tokens[meeting.row : meeting.row + meeting.stop - meeting.start]
        keys = plan.cu_seqlens_k[segment.sequence] + np.arange(segment.start, meeting.end)
        place = np.arange(len(rows))[:, None] + len(keys) - len(rows)
        j = np.arange(len(keys))
        met[np.ix_(rows, keys)] += (j >= place - left) & (j <= place + right)
    return met


def test_a_window_sends_only_the_keys_that_are_seen() -> None:
    plan = plan_of([4000], count=4, layout="contiguous")
    *_, stage = plan._shares("gather", (100, 0))
    assert [share.foreign for share in stage] == [0, 100, 100, 100]
    *_, whole = plan._shares("gather", (OPEN, 0))
    assert [share.foreign for share in whole] == [0, 1000, 2000, 3000]


def test_short_documents_send_to_neighbours_alone() -> None:
    plan = plan_of([70] * 30, count=3, layout="contiguous")
    *_, stage = plan._shares("gather", (OPEN, OPEN))
    assert all(share.foreign < 2 * 70 for share in stage)
    assert len(plan._stages("ring", (OPEN, 0))) == 1  # none of the ring's other turns has work


# ---- estimates --------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [(OPEN, OPEN), (OPEN, 0), (300, 0)])
def test_estimates_count_the_pairs(window: tuple[int, int]) -> None:
    plan = plan_of([1500, 40, 700], count=4, min_chunk=16)
    found = plan.estimate(8, 2, 64, 32, window=window)
    seen = may_see(plan, window).sum(1)
    most = max(int(seen[tokens].sum()) for tokens in plan.tokens["q"])
    every = 8 * (8 * 64 + 6 * 32)  # two products forward, five backward, of 2 operations each
    assert found["gather"].flops == found["ring"].flops == most * every
    assert found["ulysses"].flops == seen.sum() * every / 4
    assert found["ring"].kept < found["gather"].kept


def test_ulysses_needs_a_share_of_heads_for_each_rank() -> None:
    plan = plan_of([300], count=3)
    assert {*plan.estimate(8, 2, 64)} == {"gather", "ring"}
    assert {*plan.estimate(6, 2, 64)} == {"gather", "ring", "ulysses"}


def test_auto_takes_what_is_estimated_to_be_fastest() -> None:
    sizes = Sizes(32, 8, 128, 128, 2)
    documents = plan_of([1024] * 64, count=8, layout="contiguous")
    found = documents.estimate(32, 8, 128, causal=True)
    assert (
        documents.best((OPEN, 0), sizes) == min(found, key=lambda m: found[m].seconds) == "gather"
    )
    slow = documents.estimate(32, 8, 128, causal=True, rates=Rates(received=1e9))
    assert slow["ulysses"].seconds > 5 * slow["gather"].seconds
    given = plan_of([1024] * 64, method="ring")
    assert given.best((OPEN, 0), sizes) == "ring"


@pytest.mark.parametrize(
    ("lengths", "pairs"), [([40] * 4, (True, True)), ([400], (False, True)), ([], (True, True))]
)
def test_who_needs_wider_sums_of_gradients(lengths: list[int], pairs: tuple[bool, bool]) -> None:
    """The first chunk of a document meets rows of its own rank twice, and others'."""
    for r, few in enumerate(pairs):
        made = plan_of(lengths, method="gather", rank=r).job(
            (OPEN, 0), Sizes(2, 2, 8, 8, 8), CPU, Options(None, None, False, None)
        )
        assert isinstance(made, Job) and made.pairs == few


def test_estimated_bytes_are_those_that_come() -> None:
    for count in (2, 3):
        for counted, estimated in ranks.run(parallel_use.bytes_that_come, count):
            assert counted == estimated

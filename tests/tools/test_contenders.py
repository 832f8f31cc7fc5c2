"""The benchmark's calls, on CPU tensors: they compute the same, and what failed is noted."""

import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from measure import cases, contenders, peers, selections, tables, timing  # noqa: E402


def case_of(causal):
    return cases.BenchCase(
        "second", "tiny", (24, 24), 2, 2, 16, causal, "float32", cases.SECOND_ORDER
    )


@pytest.mark.parametrize("causal, values", [(False, 16), (True, 16), (True, 8)])
@pytest.mark.parametrize("direction", list(cases.WORK))
def test_rawattn_and_mathematics_agree_in_every_direction(direction, causal, values, monkeypatch):
    everywhere = replace(peers.PEERS["torch_math"], directions=tuple(cases.WORK))
    monkeypatch.setitem(peers.PEERS, "torch_math", everywhere)
    case = replace(case_of(causal), head_dim_v=values)
    data = contenders.make(case, "cpu")
    mine = contenders.ours(case, data, direction).prepare()()
    contender = contenders.theirs("torch_math", case, data, direction)
    its = [contender.packed(x) for x in contender.prepare()()]
    apart = timing.distances(mine[: contenders.DIRECTIONS[direction].results], its)
    assert len(apart) == {"forward": 1, "backward": 3, "second": 4, "jvp": 2}[direction]
    assert max(apart) < 1e-5


@pytest.mark.parametrize("layout", ["PACKED", "BATCHED", "HEADS_FIRST", "HEADS_OUTSIDE"])
def test_layouts_come_back(layout):
    case, chosen = case_of(False), getattr(peers, layout)
    x = torch.randn(48, 2, 16)
    assert torch.equal(chosen.back(case, chosen.there(case, x)), x)


def test_a_peer_is_asked_for_its_directions_alone():
    case = case_of(False)
    data = contenders.make(case, "cpu")
    assert contenders.theirs("torch_math", case, data, "forward") is None
    assert contenders.theirs("sdpa_flash", case, data, "second") is None
    unequal = replace(case, lengths=(10, 38))
    assert contenders.theirs("torch_math", unequal, data, "second") is None


def test_peers_of_one_head_dim_are_not_asked_for_two():
    case = replace(case_of(False), head_dim_v=8)
    data = contenders.make(case, "cpu")
    for name in ("sdpa_flash", "torch_varlen"):
        assert contenders.theirs(name, case, data, "forward") is None


def sparse_case(own=False, local=False, group=16, tokens=160):
    blocks = cases.Blocks(12 if local else 4, 16, own=own, local=local)
    heads = (2 * group, 2)
    return cases.BenchCase(
        "sparse", "tiny", (tokens, tokens), *heads, 16, True, "float32", selection=blocks
    )


def selected(case):
    """(sequences, tokens, kv heads, num_selected) of the case, and each token's own block."""
    drawn = selections.block_indices(case, torch.Generator().manual_seed(0))
    assert drawn.dtype == torch.int32
    (seqlen, *_), size = case.lengths, case.selection.block_size
    own = torch.arange(seqlen) // size
    return drawn.view(len(case.lengths), seqlen, *drawn.shape[1:]), own


@pytest.mark.parametrize(("own", "local"), [(False, False), (True, False), (False, True)])
def test_selections_are_causal_distinct_and_as_many_as_there_are(own, local, monkeypatch):
    monkeypatch.setattr(selections, "STEP", 64)
    case = sparse_case(own, local, tokens=330)
    drawn, last = selected(case)
    for sequence in drawn:
        for blocks, block in zip(sequence, last, strict=True):
            for one in blocks.tolist():
                real = [n for n in one if n >= 0]
                assert len(real) == len({*real}) == min(len(one), int(block) + (not own))
                assert all(n < block for n in real) if own else (block in real)
                assert max(real, default=0) <= block and one[len(real) :] == [-1] * one.count(-1)
    first = 0 if own else 1
    assert (drawn >= 0).sum(-1).float().mean() > first + 1


def test_neighbours_share_what_a_local_selection_says():
    blocks = cases.Blocks(16, 16, local=True)
    case = replace(sparse_case(tokens=1600), selection=blocks)
    drawn, own = selected(case)
    late = drawn[0, own >= 40].sort(dim=-1).values
    assert ((late == 0).sum(-1) == 1).all()
    near = own[own >= 40][:, None] - torch.arange(selections.NEAR)
    assert all((late[:, 0] == n[:, None]).any(-1).all() for n in near.T)
    both = (late[:-1, :, :, None] == late[1:, :, None, :]).any(-1).sum(-1).float()
    same = torch.arange(len(both)) % 16 != 15  # both queries in one block
    assert both[same].min() == 14 and both[same].mean() < 15
    assert both[~same].mean() < 11.5
    random = selected(replace(case, selection=replace(blocks, local=False)))[0][0, own >= 40]
    shared = (random[:-1, :, :, None] == random[1:, :, None, :]).any(-1).sum(-1).float()
    assert shared.mean() < 6


def allowed(case, block_indices):
    """(tokens of a sequence, keys, number of times) by the rule of a peer: (b, h, t, keys)."""
    (seqlen, *_), size = case.lengths, case.selection.block_size
    key = torch.arange(seqlen)
    named = block_indices[..., None] == key // size  # (b, h, t, slots, keys)
    return named.sum(-2) * (key <= key[:, None])


@pytest.mark.parametrize("own", [False, True])
def test_flop_is_of_the_pairs_that_are_drawn(own):
    case = sparse_case(own)
    drawn, last = selected(case)
    times = allowed(case, drawn.transpose(1, 2))
    if own:
        key = torch.arange(case.lengths[0])
        times += (key // case.selection.block_size == last[:, None]) & (key <= key[:, None])
    assert times.max() == 1
    assert int(times[0, 0].sum()) == case.selection.pairs(case.lengths[0])


def weighted(q, k, v, times):
    """Dense attention, (b, h, t, d), of keys that count as many times."""
    group = q.shape[1] // k.shape[1]
    k, v, times = (x.repeat_interleave(group, 1) for x in (k, v, times))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + times.log()
    return scores.softmax(-1) @ v


def fake_fla(case):
    """Computes what fla's kernels do of their arguments, duplicates and padding included."""

    def parallel_nsa(q, k, v, *, g_slc, g_cmp, g_swa, block_indices, block_counts, **sizes):
        assert g_cmp is None and g_swa is None and g_slc.shape == q.shape[:3]
        assert block_indices.dtype == torch.int64 and block_indices.shape[-1] == block_counts
        assert sizes == {"block_size": case.selection.block_size, "window_size": 0}
        times = allowed(case, block_indices.transpose(1, 2))
        out = weighted(*(x.transpose(1, 2) for x in (q, k, v)), times).transpose(1, 2)
        return out * g_slc[..., None]

    return {"fla.ops.nsa.parallel": {"parallel_nsa": parallel_nsa}}


def fake_lucidrains(case):
    """Likewise: the mask says what counts, and selected blocks are not cut off causally."""

    def native_sparse_attend(q, k, v, size, indices, mask, include_block_causal):
        assert include_block_causal and size == case.selection.block_size
        assert indices.dtype == torch.int64 and indices.min() >= 0 and mask.dtype == torch.bool
        assert indices.is_contiguous() and mask.is_contiguous()
        key = torch.arange(q.shape[2])
        times = ((indices[..., None] == key // size) & mask[..., None]).sum(-2)
        times = times + ((key // size == (key // size)[:, None]) & (key <= key[:, None]))
        return weighted(q, k, v, times)

    path = "native_sparse_attention_pytorch.triton_native_sparse_attention"
    return {path: {"native_sparse_attend": native_sparse_attend}}


def install(monkeypatch, modules):
    for path, names in modules.items():
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
        vars(sys.modules[path]).update(names)


@pytest.mark.parametrize("direction", cases.FIRST_ORDER)
@pytest.mark.parametrize(
    ("name", "case", "fake"),
    [
        ("fla_nsa", sparse_case(), fake_fla),
        ("fla_nsa", sparse_case(local=True), fake_fla),
        ("lucidrains_triton", sparse_case(own=True, group=4), fake_lucidrains),
    ],
)
def test_sparse_peers_get_arguments_by_which_they_compute_the_same(
    name, case, fake, direction, monkeypatch
):
    install(monkeypatch, fake(case))
    data = contenders.make(case, "cpu")
    contender = contenders.theirs(name, case, data, direction)
    its = [contender.packed(x) for x in contender.prepare()()]
    for method in (None, contenders.DETERMINISTIC):
        mine = contenders.ours(case, data, direction, method).prepare()()
        apart = timing.distances(mine[: contenders.DIRECTIONS[direction].results], its)
        assert contender.same and max(apart) < 1e-5
    with pytest.raises(AssertionError):  # the distance can tell
        assert max(timing.distances(mine[: len(its)], [x.flip(0) for x in its])) < 0.05


@pytest.mark.parametrize("direction", cases.SECOND_ORDER)
def test_sparse_cases_have_the_other_directions_too(direction):
    case = sparse_case(group=1)
    call = contenders.ours(case, contenders.make(case, "cpu"), direction).prepare()
    assert len(call()) >= contenders.DIRECTIONS[direction].results


def test_peers_are_asked_for_the_cases_they_compute():
    dense, sparse = case_of(True), sparse_case()
    names = ("fla_nsa", "lucidrains_triton")
    data = contenders.make(dense, "cpu")
    assert all(contenders.theirs(name, dense, data, "forward") is None for name in names)
    data = contenders.make(sparse, "cpu")
    for name in ("sdpa_flash", "torch_varlen", "flex", "fa4", "fa3_fwd"):
        assert contenders.theirs(name, sparse, data, "forward") is None
    assert not contenders.theirs("sdpa_cudnn", sparse, data, "forward").same
    alone = replace(sparse, alone=True)
    assert all(contenders.theirs(name, alone, data, "forward") is None for name in peers.PEERS)
    methods = contenders.METHODS
    assert contenders.methods_of(sparse, methods) == ["deterministic"]
    assert contenders.methods_of(dense, methods) == [*methods]


def out_of_memory(case, cu_seqlens):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")


def twice(case, cu_seqlens):
    attention, layout = peers.torch_math(case, cu_seqlens)
    return lambda q, k, v: 2 * attention(q, k, v), layout


def test_a_row_holds_times_and_memory_and_says_who_failed(monkeypatch):
    for name, attention in (("broken", out_of_memory), ("wrong", twice)):
        monkeypatch.setitem(peers.PEERS, name, peers.Peer(attention, cases.SECOND_ORDER))
    case = case_of(True)
    data = contenders.make(case, "cpu")
    monkeypatch.setattr(contenders, "make", lambda case: data)
    monkeypatch.setattr(contenders, "chosen_row", lambda case, direction: ("sm80", "a_row"))
    monkeypatch.setattr(timing, "time_rounds", lambda calls, rounds, lead: dict.fromkeys(calls, 2))
    for name in ("synchronize", "reset_peak_memory_stats", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**29)
    names = ["sdpa_flash", "torch_math", "broken", "wrong", "fa4"]
    row = timing.measure_row(
        case, "second", timing.Plan(tuple(names), ("deterministic",), rounds=1)
    )
    assert row["peers"] == {"torch_math": 2} and row["peers_gib"] == {"torch_math": 0.5}
    assert row["ours_ms"] == 2 and row["ours_gib"] == 0.5 and "methods" not in row
    assert row["ours_tflops"] == round(case.flop("second") / 2e9, 1)
    assert set(row["errors"]) == {"broken", "wrong"}
    assert row["errors"]["broken"].startswith("OutOfMemoryError: CUDA out of memory")
    assert "differ by" in row["errors"]["wrong"]


def test_a_dense_peer_beside_a_sparse_case_is_timed_and_not_compared(monkeypatch):
    dense = replace(peers.PEERS["torch_math"], directions=cases.FIRST_ORDER, sparse=True)
    monkeypatch.setitem(peers.PEERS, "torch_math", dense)
    case = sparse_case(group=1)
    data = contenders.make(case, "cpu")
    monkeypatch.setattr(contenders, "make", lambda case: data)
    monkeypatch.setattr(contenders, "chosen_row", lambda case, direction: ("sm80", "a_row"))
    monkeypatch.setattr(timing, "time_rounds", lambda calls, rounds, lead: dict.fromkeys(calls, 2))
    for name in ("synchronize", "reset_peak_memory_stats", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**29)
    row = timing.measure_row(case, "backward", timing.Plan(("torch_math",), contenders.METHODS, 1))
    assert row["peers"] == {"torch_math": 2} and "errors" not in row
    assert row["methods"] == {"deterministic": 2}


def test_every_case_is_measured_in_the_directions_of_its_suite_or_in_those_asked_for():
    suite = cases.second()
    assert len(timing.wanted(suite, ())) == 13
    assert timing.wanted(suite[:1], ("forward", "second")) == [
        (suite[0], "forward"),
        (suite[0], "second"),
    ]


@pytest.mark.parametrize("name", ["fa4", "fa3_fwd"])
@pytest.mark.parametrize("lengths", [(24, 24), (10, 38)])
@pytest.mark.parametrize(("causal", "window"), [(False, -1), (True, -1), (True, 5)])
def test_the_flash_family_gets_arguments_by_which_it_computes_the_same(
    name, lengths, causal, window, monkeypatch
):
    def dense(q, k, v, causal=False, window_size=(-1, -1)):
        distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
        left, right = (-1, 0) if causal else window_size
        allowed = (distance <= left if left >= 0 else True) & (
            -distance <= right if right >= 0 else distance == distance
        )
        times = allowed.to(q.dtype).expand(len(q), q.shape[2], -1, -1)
        return weighted(*(x.transpose(1, 2) for x in (q, k, v)), times).transpose(1, 2), "lse"

    def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **mask):
        assert max_seqlen_q == max_seqlen_k == max(lengths) and cu_seqlens_k is cu_seqlens_q
        spans = pairwise(cu_seqlens_q)
        parts = [dense(*(x[None, a:b] for x in (q, k, v)), **mask)[0][0] for a, b in spans]
        return torch.cat(parts), "lse"

    functions = {"flash_attn_func": dense, "flash_attn_varlen_func": varlen}
    install(monkeypatch, {"flash_attn.cute": functions, "fa3_fwd_interface": functions})
    case = replace(case_of(causal), lengths=lengths, window=window, dtype="bfloat16")
    data = contenders.make(case, "cpu")
    for direction in peers.PEERS[name].directions:
        contender = contenders.theirs(name, case, data, direction)
        its = [contender.packed(x) for x in contender.prepare()()]
        mine = contenders.ours(case, data, direction).prepare()()
        assert max(timing.distances(mine[: len(its)], its)) < timing.SAME[direction] / 2
    assert ("backward" in peers.PEERS[name].directions) == (name == "fa4")


def test_peers_without_windows_are_not_asked_for_them():
    case = replace(case_of(True), window=5)
    data = contenders.make(case, "cpu")
    for name in ("sdpa_flash", "sdpa_cudnn", "torch_math"):
        for direction in cases.WORK:
            assert contenders.theirs(name, case, data, direction) is None


def test_a_row_keeps_the_times_under_load_and_those_of_old_sources(monkeypatch):
    case = case_of(True)
    data = contenders.make(case, "cpu")
    monkeypatch.setattr(contenders, "make", lambda case: data)
    monkeypatch.setattr(contenders, "chosen_row", lambda case, direction: ("sm80", "a_row"))
    monkeypatch.setattr(timing, "with_memory", lambda contender: (0, contender.prepare()(), 0.5))
    monkeypatch.setattr(timing, "time_rounds", lambda calls, rounds, lead: dict.fromkeys(calls, 2))
    monkeypatch.setattr(
        timing, "time_sustained", lambda calls, guess, plan: dict.fromkeys(calls, 3)
    )
    plan = timing.Plan(("torch_math",), ("deterministic",), sustained=1.0, old=contenders.rawattn)
    row = timing.measure_row(case, "second", plan)
    assert (row["ours_ms"], row["old_ms"], row["peers"]) == (2, 2, {"torch_math": 2})
    assert (row["sustained_ms"], row["peers_sustained"]) == (3, {"torch_math": 3})
    assert (row["kernels"], row["row"], row["ours_gib"]) == ("sm80", "a_row", 0.5)
    assert tables.sustained_rows([row, {}])[0]["ours_ms"] == 3


class Card:
    """A GPU that works off a queue, in the place of torch.cuda: what the host does takes time only
    where a call says so. ``log`` has the calls, and "|" where the card is kept waiting."""

    def __init__(self, monkeypatch):
        self.host, self.busy, self.log = 0.0, 0.0, []
        monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.zeros(1))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch("|", cycles))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(self, "host", self.busy))

    def launch(self, name, ms, host_ms=0.0):
        self.log.append(name)
        self.host += host_ms
        self.busy = max(self.busy, self.host) + ms


class Event:
    def __init__(self, card):
        self.card = card

    def record(self):
        self.at = max(self.card.busy, self.card.host)

    def query(self):
        return self.card.host >= self.at

    def elapsed_time(self, end):
        return end.at - self.at


def test_rounds_go_forwards_and_backwards(monkeypatch):
    card = Card(monkeypatch)
    calls = {"new": lambda: card.launch("n", 1.0), "old": lambda: card.launch("o", 2.0)}
    assert timing.time_rounds(calls, 3) == {"new": 1.0, "old": 2.0}
    assert "".join(card.log) == "|no|on|no|on|no"


@pytest.mark.parametrize("lead, slow", [(1, 1.0), (1, 11.0), (0, 4.0)])
def test_a_time_with_the_hosts_in_it_does_not_count(lead, slow, monkeypatch):
    card = Card(monkeypatch)
    calls = {"s": lambda: card.launch("s", 2.0, slow), "q": lambda: card.launch("q", 2.0, 0.1)}
    times = timing.time_rounds(calls, 8, lead)
    assert times["q"] == pytest.approx(2.0)
    assert (times["s"] == pytest.approx(2.0)) == (lead > 0)


def test_under_load_every_contender_runs_alone_behind_calls_that_settle_the_clocks(monkeypatch):
    """And has no time where it keeps the card waiting."""
    card = Card(monkeypatch)
    monkeypatch.setattr(timing, "heat", lambda seconds: card.log.append(f"heat {seconds}"))
    ms = {"ours": (5.0, 4.0), "fa4": (10.0, 0.0), "late": (5.0, 6.0)}
    calls = {name: partial(card.launch, name, *of) for name, of in ms.items()}
    guess = {name: gpu for name, (gpu, _) in ms.items()}
    times = timing.time_sustained(calls, guess, timing.Plan(sustained=0.15, heat=7))
    assert card.log == ["heat 7", *["ours"] * 40, *["fa4"] * 20, *["late"] * 40]
    assert times == pytest.approx({"ours": 5.0, "fa4": 10.0})

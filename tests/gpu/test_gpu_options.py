"""softcap, sinks and seqused_k on a GPU, at every order, by the tolerance.

Problems of a chunk share their kernels: 504 each with a softcap and with sinks, over all pairs of
native head_dim and head_dim_v, 252 with keys in use, alone and with the others. Their kernels are
named, so that small problems on Hopper visit the rows of large ones and of older GPUs too. Long by
the edges.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from rawattn import variants
from rawattn.check.cases import HALF
from rawattn.variants import HEAD_DIMS, METHODS
from rawattn.variants.steps import STEPS
from tests.shared import lies
from tests.shared.gpu_arrays import Bands, bits, moved
from tests.shared.gpu_options import (
    CAPS,
    OF_SINKS,
    OPTIONS,
    Posed,
    Problem,
    alone,
    faults,
    place,
    place_on_gpu,
    pose,
    random_problem,
    run,
)
from tests.shared.gpu_problems import (
    MASKS,
    PARTIAL,
    WHOLE,
    problem_of,
    sized,
)

torch = pytest.importorskip("torch")

ALL = tuple(STEPS)
REPEATABLE = ("forward", "deterministic", "jvp", "second/two_pass")
PAIRS = list(product(range(len(HEAD_DIMS)), repeat=2))


@dataclass(frozen=True)
class Chunk:
    """Problems with the same ``options`` of OPTIONS, and kernels.

    ``pair``: where in HEAD_DIMS head_dim and head_dim_v are. ``steps`` come after the forward.
    ``rows_of``: whose rows they run on, of "large" problems, "small" ones or "older" GPUs.
    """

    options: tuple[str, ...]
    pair: tuple[int, int]
    steps: tuple[str, ...]
    size: int = 14

    def __str__(self) -> str:
        d, dv = self.fixed["head_dim"], self.fixed["head_dim_v"]
        return f"{'-'.join(self.options)}-{self.fixed['dtype']}-d{d}-{dv}"

    @property
    def fixed(self) -> dict[str, Any]:
        """What is the same in all cases, beside the mask; every head_dim meets all of it."""
        i, j = self.pair
        direction = PARTIAL[(i + 2 * j) % len(PARTIAL)] if (i + j) % 2 else WHOLE
        dtype = HALF[(i + j // 3) % 2]
        return {"dtype": dtype, "direction": direction} | sized(HEAD_DIMS[i], HEAD_DIMS[j])

    @property
    def mask(self) -> str:
        i, j = self.pair
        return MASKS[(2 * i + j) % len(MASKS)]

    @property
    def rows_of(self) -> str:
        return ("large", "older", "large", "small")[sum(self.pair) % 4]

    def problems(self) -> Iterator[Problem]:
        """The last one is long."""
        for i in range(self.size):
            seed = [*map(OPTIONS.index, self.options), 9, *self.pair, i]
            fixed = {"name": f"{self}-{i}"} | self.fixed
            long = i == self.size - 1
            yield random_problem(
                np.random.default_rng(seed), self.mask, self.options, long, **fixed
            )

    def rows(self) -> str:
        """The names of the rows for all steps."""
        case = next(self.problems()).case
        problem = problem_of(case, tokens=0 if self.rows_of == "small" else 2**20)
        problem = replace(problem, softcap=1.0 if "softcap" in self.options else 0.0)
        problem = replace(problem, arch=80) if self.rows_of == "older" else problem
        stems = {"forward", *(step.stem for name in self.steps for step in STEPS[name])}
        rows = [variants.select(s, problem, backend="cuda", by_size=True) for s in sorted(stems)]
        return ",".join(row.name for row in rows)


def chunks() -> Iterator[Chunk]:
    """Few, and of few steps each, since their kernels are compiled."""
    for i, j in PAIRS:
        one, other = (ALL[(2 * i + i // 3 + j + n) % len(ALL)] for n in range(2))
        more = ("deterministic",) if i == j and i % 2 else ()
        yield Chunk(("softcap",), (i, j), (one, *more))
        yield Chunk(("sinks",), (i, j), (other,))
    for i in range(len(HEAD_DIMS)):
        yield Chunk(("seqused_k",), (i, (i + 3) % len(HEAD_DIMS)), (ALL[i],), 21)
        yield Chunk(OPTIONS, (i, i), ALL if i % 2 else (ALL[i + 1],), 21)


CHUNKS = list(chunks())


# ---- random problems --------------------------------------------------------------------------


@pytest.fixture
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Chunk:
    """A chunk, whose rows are asked for."""
    given: Chunk = request.param
    monkeypatch.setenv("RAWATTN_VARIANT", given.rows())
    return given


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", CHUNKS, ids=str, indirect=True)
def test_random_problems(chunk: Chunk) -> None:
    wrong = []
    for problem in chunk.problems():
        posed = pose(problem)
        found = [
            (step, fault) for step in ("forward", *chunk.steps) for fault in judged(posed, step)
        ]
        wrong += [f"{problem}\n  {step} {fault}" for step, fault in found]
    assert not wrong, "\n".join(wrong)


def judged(posed: Posed, step: str) -> list[str]:
    """What is wrong with a step: beyond the tolerance; or, where it is repeatable, other bits in
    another run, or in that of a sequence alone."""
    results = run(posed, step, backend="cuda")
    wrong = faults(posed, results)
    if step in REPEATABLE:
        again = run(posed, step, backend="cuda")
        wrong += [f"{name}: other bits in another run" for name in differing(results, again)]
        single, rows, keys = alone(posed)
        whole = {
            name: x[place(name, rows, keys)] for name, x in results.items() if name not in OF_SINKS
        }
        found = run(single, step, backend="cuda")
        wrong += [f"{name}: other bits alone" for name in differing(whole, found)]
    return wrong


def differing(results: dict[str, Any], others: dict[str, Any]) -> list[str]:
    return [name for name, x in results.items() if bits(x) != bits(others[name])]


def test_the_chunks_have_everything_in_them() -> None:
    """Needs no GPU, like all tests without the mark."""
    assert len({str(chunk) for chunk in CHUNKS}) == len(CHUNKS)
    for options in (("softcap",), ("sinks",)):
        some = [chunk for chunk in CHUNKS if chunk.options == options]
        assert {chunk.pair for chunk in some} == set(PAIRS)
        assert sum(chunk.size for chunk in some) >= 500
        met = {(step, chunk.fixed["dtype"]) for chunk in some for step in chunk.steps}
        assert met == set(product(ALL, HALF))
        for side, i in product((0, 1), range(len(HEAD_DIMS))):
            own = [chunk for chunk in some if chunk.pair[side] == i]
            assert {chunk.mask for chunk in own} == set(MASKS)
            assert {chunk.fixed["dtype"] for chunk in own} == set(HALF)
            assert {chunk.rows_of for chunk in own} == {"large", "older", "small"}
            assert {step for chunk in own for step in chunk.steps} == set(ALL)
    rest = [chunk for chunk in CHUNKS if "seqused_k" in chunk.options]
    assert sum(chunk.size for chunk in rest) > 200
    for i in range(len(HEAD_DIMS)):
        assert len([chunk for chunk in rest if i in chunk.pair]) == 3
    assert {chunk.fixed["direction"] for chunk in CHUNKS} == {WHOLE, *PARTIAL}
    problems = [p for chunk in CHUNKS for p in chunk.problems()]
    assert {p.case.group for p in problems} == {1, 3, 8}
    for some in (
        [p for p in problems if p.sinks and p.unseen("q")[: sum(p.case.lengths_q)].any()],
        [p for p in problems if p.sinks and p.case.poisoned],
        [p for p in problems if p.sinks and not p.case.poisoned],
        [p for p in problems if p.used and min(p.used) <= 0],
        [p for p in problems if p.used and any(map(int.__gt__, p.used, p.case.lengths_k))],
        [p for p in problems if p.softcap and p.case.strided],
        [p for p in problems if p.softcap and p.case.lengths_q != p.case.lengths_k],
    ):
        assert len(some) > 50


def test_scores_lie_on_either_side_of_what_is_small() -> None:
    """Where a polynomial stands for tanh is where |score / softcap| is below 0.2, or 0.7 at most:
    kernels_cu/sm90/softcap.cuh. A warp looks at 16 rows of a tile at once."""
    rng = np.random.default_rng(0)
    tiles = [np.abs(size / cap * rng.standard_normal((16, 64))) for cap, size in CAPS]
    assert sum(bool((x < 0.2).any() and (x > 0.7).any()) for x in tiles) == len(CAPS) - 1
    assert any((x < 0.2).all() for x in tiles)


def test_truth_is_that_of_the_reference() -> None:
    """Of all options at once, and every result."""
    for options in (("softcap",), ("sinks",), OPTIONS):
        fixed = {"dtype": HALF[1], "name": "small", **sized(24, 16)}
        posed = pose(random_problem(np.random.default_rng(1), "causal", options, **fixed))
        for step in ("forward", *ALL):
            assert not faults(posed, run(posed, step, backend="reference")), (options, step)


def test_a_wrong_result_is_a_fault() -> None:
    fixed = {"dtype": HALF[0], "name": "wrong", **sized(24, 16)}
    problem = random_problem(np.random.default_rng(4), "window", OPTIONS, **fixed)
    case = replace(problem.case, poisoned=(), softmax_scale=None)
    posed = pose(replace(problem, case=case, softcap=2.0))
    for step in ("forward", ALL[0], ALL[-1]):
        for name, x in run(posed, step, backend="reference").items():
            for wrong in (x * 1.0625, torch.zeros_like(x), torch.full_like(x, torch.nan)):
                assert faults(posed, {name: wrong}), name


# ---- edges ------------------------------------------------------------------------------------

LENGTHS = (70, 3, 0, 5, 133), (133, 0, 2, 9, 70)
# With all options and all steps; what the edges need has the kernels of these.
EDGES = [chunk for chunk in CHUNKS if chunk.options == OPTIONS and chunk.steps == ALL]
CAPPED = [c for c in CHUNKS if c.options == OPTIONS[:1] and c.pair[0] == c.pair[1]]
of_edges = pytest.mark.parametrize("chunk", EDGES, ids=str, indirect=True)


def edge(chunk: Chunk, **changes: Any) -> Problem:
    """A problem for the kernels of a chunk, with sinks that are moderate and all keys in use."""
    case = replace(next(chunk.problems()).case, name="edge", dlse=True, poisoned=(), past_k=0)
    case = replace(case, softmax_scale=None, group=3, num_heads_kv=1, strided=False)
    options = {name: changes.pop(name) for name in ("softcap", "sinks", "used") if name in changes}
    case = replace(case, lengths_q=LENGTHS[0], lengths_k=LENGTHS[1], **changes)
    return Problem(case, **{"softcap": 2.0, "sinks": True, "used": case.lengths_k} | options)


@pytest.mark.gpu
@of_edges
@pytest.mark.parametrize("sink", [-np.inf, 1e4])
def test_sinks_that_are_nothing_or_everything(sink: float, chunk: Chunk) -> None:
    without = pose(edge(chunk, sinks=False))
    inside = torch.from_numpy(without.problem.case.sequence_of("q") >= 0).to(without.lse.device)
    sinks = torch.full_like(without.lse[:, 0], sink)
    posed = replace(without, sinks=sinks, tsinks=torch.ones_like(sinks))
    forward = run(posed, "forward", backend="cuda")
    posed = replace(posed, **forward)
    results = {step: run(posed, step, backend="cuda") for step in ALL} | {"forward": forward}
    of_sinks = {
        name: found.pop(name) for found in results.values() for name in OF_SINKS if name in found
    }
    assert not of_sinks["gsinks"].any()
    if sink < 0:
        assert not of_sinks["dsinks"].any()
        wrong = [f"{step} {x}" for step, found in results.items() for x in faults(without, found)]
        assert not wrong, "\n".join(wrong)
        return
    exact = posed.tensors.dlse[:, inside].sum(1)
    torch.testing.assert_close(of_sinks["dsinks"], exact, rtol=2e-3, atol=2e-2)
    expected = {"lse": sink, "tlse": 1.0, "ddlse": 1.0}
    for step, found in results.items():
        for name, x in found.items():
            inner = x[:, inside] if name in expected else x
            wanted = torch.full_like(inner, expected.get(name, 0.0))
            torch.testing.assert_close(inner, wanted, rtol=2e-3, atol=0.0, msg=f"{step} {name}")


@pytest.mark.gpu
@of_edges
def test_a_softcap_that_is_high_is_none(chunk: Chunk) -> None:
    """tanh is its argument there, of which float32 keeps what 16 bits need."""
    without = pose(edge(chunk, softcap=None))
    posed = replace(without, problem=replace(without.problem, softcap=1000.0))
    wrong = []
    for step in ("forward", *ALL):
        results = run(posed, step, backend="cuda")
        results = {name: x for name, x in results.items() if not name.endswith("lse")}
        wrong += [f"{step} {fault}" for fault in faults(without, results)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [3.0, 50.0])
@pytest.mark.parametrize("chunk", CAPPED, ids=str, indirect=True)
def test_bits_hang_on_no_other_row(chunk: Chunk, softcap: float) -> None:
    """A warp with large scores takes another way, which must not tell in its rows without."""
    one = {"group": 1, "past_q": 0}
    problem = edge(chunk, softcap=softcap, sinks=False, used=None, **one)
    case = replace(problem.case, lengths_q=(192,), lengths_k=(192,))
    posed = place_on_gpu(replace(problem, case=case))
    loud = posed.tensors.q.clone()
    loud[1::2] *= 40
    found: list[list[bytes]] = []
    for q in (posed.tensors.q, loud):
        own = replace(posed, tensors=replace(posed.tensors, q=q))
        own = replace(own, **run(own, "forward", backend="cuda"))
        results = [own.out[::2], own.lse[:, ::2]]
        for step in REPEATABLE[1:]:
            if step in chunk.steps:
                of_step = run(own, step, backend="cuda")
                results += [
                    x[::2] for n, x in of_step.items() if n in ("dq", "tout", "ddout", "gq")
                ]
        found.append(bits(*results))
    assert found[0] == found[1]


@pytest.mark.gpu
@of_edges
@pytest.mark.parametrize("used", [(70, 0, 2, 4, 61), (0,) * 5, (999,) * 5, (-1, 5, 1, 9, 64)])
def test_keys_in_use_are_all_there_are(used: tuple[int, ...], chunk: Chunk) -> None:
    """To the bit what comes of the keys in use alone; the others are NaN, and have gradients 0."""
    posed = pose(edge(chunk, used=used))
    fewer, chosen = cut(posed)
    for step in REPEATABLE:
        results, others = (run(x, step, backend="cuda") for x in (posed, fewer))
        for name, x in results.items():
            if name in ("dk", "dv", "gk", "gv"):
                rest = torch.ones(len(x), dtype=torch.bool, device=x.device)
                rest[chosen] = False
                assert not x[rest].any(), (step, name)
                x = x[chosen]
            assert bits(x) == bits(others[name]), (step, name)


def cut(posed: Posed) -> tuple[Posed, Any]:
    """The same with keys that are not in use left out of the arrays, and where the others are."""
    p, t = posed.problem, posed.tensors
    starts = np.cumsum([0, *p.case.lengths_k])[:-1]
    at = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, p.in_use, strict=True)])
    chosen = torch.from_numpy(at).to(t.k.device)
    parts = {name: getattr(t, name)[chosen] for name in ("k", "v", "tk", "tv")}
    used = torch.tensor(p.in_use, dtype=torch.int32, device=t.k.device)
    offsets = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    return replace(posed, tensors=replace(t, **parts, cu_seqlens_k=offsets), used=used), chosen


@pytest.mark.gpu
@of_edges
def test_queries_without_any_key_at_all(chunk: Chunk) -> None:
    problem = edge(chunk)
    none = (0,) * len(LENGTHS[1])
    posed = place_on_gpu(Problem(replace(problem.case, lengths_k=none), 2.0, True, none))
    rows = torch.from_numpy(posed.problem.case.sequence_of("q")).to(posed.sinks.device)
    like = {"out": posed.tensors.dout, "lse": torch.empty_like(posed.tensors.dlse)}
    posed = replace(posed, **like)
    forward = run(posed, "forward", backend="cuda")
    assert not forward["out"].any() and (forward["lse"][:, rows < 0] == -torch.inf).all()
    wanted = posed.sinks.float()[:, None].expand(-1, len(rows))[:, rows >= 0]
    assert (forward["lse"][:, rows >= 0] == wanted).all()
    found = run(replace(posed, **forward), METHODS[0], backend="cuda")
    assert not found["dq"].any()
    exact = posed.tensors.dlse[:, rows >= 0].sum(1) * posed.sinks.isfinite()
    torch.testing.assert_close(found["dsinks"].float(), exact, rtol=1e-2, atol=1e-2)


# ---- offsets that lie -------------------------------------------------------------------------


class Lying(lies.Problem):
    """With all options; keys in use are lied about too."""

    def __init__(self, form: lies.Form, lie: str, sides: str, tokens: tuple[int, int]) -> None:
        super().__init__(form, lie, sides, tokens)
        batch = len(lies.LIES[lie]) - 1
        used = np.resize([lies.FAR, 70, -lies.FAR - 1, -1, 1000, 0], batch).astype(np.int32)
        sinks = self.normal("float32", form.heads[0])
        self.options |= {"softcap": 5.0, "sinks": sinks, "seqused_k": moved(used)}


@pytest.mark.gpu
@of_edges
@pytest.mark.parametrize("lie", lies.LIES)
def test_offsets_that_lie(lie: str, chunk: Chunk) -> None:
    cupy = pytest.importorskip("cupy")
    case, found = edge(chunk).case, []
    mask = (("window", case.mask_window),)
    form = lies.Form(case.dtype, (case.head_dim, case.head_dim_v), mask=mask)
    for sides, tokens in product(lies.SIDES, lies.TOKENS):
        bands = Bands()
        with cupy.cuda.using_allocator(bands.allocate):
            results = lies.dense(Lying(form, lie, sides, tokens))
        where = f"offsets of {sides} lie, {tokens[0]} queries, {tokens[1]} keys"
        found += [f"{where}: written {at}" for at in bands.touched()]
        for name, arrays in results.items():
            if not all(np.isfinite(x.get().astype(np.float64)).all() for x in arrays):
                found.append(f"{where}: a result of {name} is not finite")
    assert not found, "\n".join(found)

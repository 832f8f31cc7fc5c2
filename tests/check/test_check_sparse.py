"""rawattn-check on block-sparse attention: traps are set, right functions pass, wrong ones fail.

Long by the list of faults that must be found.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from rawattn import api_sparse
from rawattn.build import WHOLE, Build
from rawattn.check import cli, compiled, run, sparse
from rawattn.check.candidate import Candidate
from rawattn.check.cases import DTYPES, HALF
from rawattn.check.expected import expect
from rawattn.check.second import expect_second
from rawattn.check.sparse_cases import BLOCK_SIZES, SparseCase, standard_sparse
from rawattn.check.sparse_tensors import PADDING, WIDE, make_sparse, seen
from rawattn.variants.steps import SPARSE_STEPS

SIZES = ("small", "large")
SMALL = {case.name.removeprefix("sparse-"): case for case in standard_sparse("small")}
RIGHT = """
import numpy as np
from rawattn.reference import dense, sparse

def statistic(q, x):
    return None if x is None else x.astype(np.float64 if q.dtype == np.float64 else np.float32)

def clean(x):
    return np.nan_to_num(x.astype(np.float64))

def select(k, v, block_indices, **options):
    k, v = clean(k), clean(v)
    return k, v, block_indices, options

def attend(q, k, v, cu_seqlens, block_indices, *, cu_seqlens_k, block_size, block_counts,
           include_own_block, causal, block_scale, softmax_scale, return_lse=False,
           return_sliding=False, window=None, out=None):
    near = window or (block_size - 1, 0)
    near = (near[0], 0) if causal else near
    sliding = dense.forward(q, k, v, cu_seqlens, cu_seqlens_k, window=near,
                            softmax_scale=softmax_scale)
    k, v, block_indices, options = select(
        k, v, block_indices, block_size=block_size, block_counts=block_counts,
        include_own_block=include_own_block, causal=causal, block_scale=block_scale,
        softmax_scale=softmax_scale)
    result, lse = sparse.forward(q, k, v, cu_seqlens, cu_seqlens_k, block_indices, **options)
    out[...] = result
    results = (out, statistic(q, lse))
    branch = (sliding[0].astype(q.dtype), statistic(q, sliding[1]))
    return results + branch if return_sliding else results

def attend_backward(dout, q, k, v, out, lse, cu_seqlens, block_indices, *, cu_seqlens_k, dlse=None,
                    **options):
    k, v, block_indices, options = select(k, v, block_indices, **options)
    *grads, dg = sparse.backward(dout, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, block_indices,
                                 dlse=dlse, **known(options))
    return *(g.astype(q.dtype) for g in grads), statistic(q, dg)

def attend_double_backward(ddq, ddk, ddv, dout, q, k, v, out, lse, cu_seqlens, block_indices, *,
                           cu_seqlens_k, ddblock_scale=None, dlse=None, **options):
    k, v, block_indices, options = select(k, v, block_indices, **options)
    ddk, ddv = (None if x is None else clean(x) for x in (ddk, ddv))
    ddo, ddl, *grads, gg = sparse.double_backward(
        ddq, ddk, ddv, dout, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, block_indices, dlse=dlse,
        ddblock_scale=ddblock_scale, **known(options))
    grads = [g.astype(q.dtype) for g in grads]
    return ddo.astype(q.dtype), statistic(q, ddl), *grads, statistic(q, gg)

def attend_jvp(q, k, v, tq, tk, tv, cu_seqlens, block_indices, *, cu_seqlens_k, tblock_scale=None,
               **options):
    k, v, block_indices, options = select(k, v, block_indices, **options)
    tk, tv = (None if x is None else clean(x) for x in (tk, tv))
    out, tout, lse, tlse = sparse.jvp(q, k, v, tq, tk, tv, cu_seqlens, cu_seqlens_k, block_indices,
                                      tblock_scale=tblock_scale, **known(options))
    return out.astype(q.dtype), tout.astype(q.dtype), statistic(q, lse), statistic(q, tlse)

def known(options):
    names = ("block_size", "block_counts", "include_own_block", "causal", "block_scale",
             "softmax_scale")
    return {name: options[name] for name in names}
"""
RETURN = "    return k, v, block_indices, options"
FIRST = "out lse dq dk dv dblock_scale"
SECOND = "jvp-out jvp-lse tout tlse ddout ddlse gq gk gv gblock_scale"
BRANCH = "sliding-out sliding-lse"
# name: (case, text of RIGHT, what stands there in its place, tensors that must fail)
FAULTS = {
    "reads the neighbours": (
        "no-own",
        "clean(k), clean(v)",
        "(x + 0 * x.sum(axis=0) for x in (k, v))",
        "out lse dq dk dv jvp-out jvp-lse tout tlse ddout ddlse gq gk gv",
    ),
    "not causal": (
        "gate",
        RETURN,
        f"    options['causal'] = False\n{RETURN}",
        f"{FIRST} {SECOND}",
    ),
    "the own block forgotten": (
        "group4",
        RETURN,
        f"    options['include_own_block'] = False\n{RETURN}",
        f"out lse dq dk dv {SECOND}",  # for the gate its scores do not matter
    ),
    "the own block not asked for": (
        "no-own-open",
        RETURN,
        f"    options['include_own_block'] = True\n{RETURN}",
        "out lse dq dk dv jvp-out jvp-lse tout tlse ddout ddlse gq gk gv",
    ),
    "the whole own block": (
        "edges-open",
        RETURN,
        "    block_indices = np.concatenate([block_indices, np.zeros_like(block_indices[..., :1])]"
        f", axis=2)\n{RETURN}",
        "out lse dq dk dv jvp-out jvp-lse tout tlse ddout ddlse gq gk gv",
    ),
    "counts forgotten": (
        "counts-open",
        RETURN,
        f"    options['block_counts'] = None\n{RETURN}",
        "out lse dq dk dv jvp-out jvp-lse tout tlse ddout ddlse gq gk gv",
    ),
    "padding is the first block": (
        "late-open",
        RETURN,
        "    block_indices = np.where(block_indices > 2**30, 0, block_indices)\n" + RETURN,
        "out lse dq dk dv jvp-out jvp-lse tout tlse ddout ddlse gq gk gv",
    ),
    "indices times block_size overflow": (
        "block-64",
        RETURN,
        "    wrapped = (block_indices.astype(np.int64) * 64).astype(np.int32) // 64\n"
        "    block_indices = wrapped\n" + RETURN,
        f"{FIRST} {SECOND}",
    ),
    "the first selection head for all": (
        "query-heads",
        RETURN,
        "    block_indices = np.repeat(block_indices[:, :1], block_indices.shape[1], axis=1)\n"
        f"    options['block_scale'] = np.ones(block_indices.shape)\n{RETURN}",
        f"{FIRST} {SECOND}",
    ),
    "the gate forgotten": (
        "late",
        RETURN,
        f"    options['block_scale'] = 0 * options['block_scale'] + 1\n{RETURN}",
        f"{FIRST} {SECOND}",
    ),
    "the highest slot of a block": (
        "many-slots",
        "return *(g.astype(q.dtype) for g in grads), statistic(q, dg)",
        "return *(g.astype(q.dtype) for g in grads), statistic(q, dg[..., ::-1])",
        "dblock_scale",
    ),
    "dblock_scale of one head": (
        "group16",
        "statistic(q, dg)",
        "statistic(q, dg / 16)",
        "dblock_scale",
    ),
    "dblock_scale where no slot counts": (
        "gate",
        "statistic(q, dg)",
        "statistic(q, dg + 1e-9)",
        "dblock_scale",
    ),
    "no dblock_scale": ("gate", "statistic(q, dg)", "None", "dblock_scale"),
    "tblock_scale forgotten": (
        "gate",
        "tblock_scale=tblock_scale, **",
        "tblock_scale=None, **",
        "tout tlse",
    ),
    "ddblock_scale forgotten": (
        "gate",
        "ddblock_scale=ddblock_scale, **",
        "ddblock_scale=None, **",
        "ddout ddlse gq gk gv gblock_scale symmetry",
    ),
    "gblock_scale a bit large": (
        "gate",
        "statistic(q, gg)",
        "statistic(q, 1.3 * gg)",
        "gblock_scale symmetry",
    ),
    "the window of the other branch": (
        "sliding-window",
        "near = window or (block_size - 1, 0)",
        "near = (block_size - 1, 0)",
        BRANCH,
    ),
    "a window too wide by one": ("sliding", "(block_size - 1, 0)", "(block_size, 0)", BRANCH),
    "branches in turn": (
        "sliding",
        "results + branch if",
        "branch + results if",
        f"out lse {BRANCH}",
    ),
}


def names(tensors: str) -> set[str]:
    """Tensors by their names, where jvp-out stands for "jvp out"."""
    spaced = ("jvp-out", "jvp-lse", "sliding-out", "sliding-lse")
    return {name.replace("-", " ") if name in spaced else name for name in tensors.split()}


@pytest.fixture
def check() -> Callable[..., Result]:
    """Calls rawattn-check with these arguments."""
    return lambda *arguments: CliRunner().invoke(cli.main, [str(a) for a in arguments])


@pytest.fixture
def candidate(tmp_path: Path) -> Callable[..., str]:
    """Writes the right functions, with a text changed, to a file; gives FILE.py:NAME."""

    def write(old: str = "", new: str = "", file: str = "mine.py") -> str:
        assert old in RIGHT
        (tmp_path / file).write_text(RIGHT.replace(old, new, 1) if old else RIGHT)
        return f"{tmp_path / file}:attend"

    return write


# ---- the cases --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_every_feature_is_there(size: str) -> None:
    cases = standard_sparse(size)
    assert {case.block_size for case in cases} == set(BLOCK_SIZES)
    assert {1, 4, 16} <= {case.group for case in cases}
    assert {case.dtype for case in cases} == set(DTYPES)
    flags = {(case.causal, case.own, case.gate, case.counts) for case in cases}
    assert all({flag[i] for flag in flags} == {True, False} for i in range(4))
    assert {(False, False), (False, True), (True, False)} <= {flag[:2] for flag in flags}
    assert {True, False} == {case.by_query_head for case in cases if case.group > 1}
    assert {(-1, -1), (9, 2)} == {case.window for case in cases if case.sliding}
    assert any(case.lengths_q != case.lengths_k for case in cases)
    assert {0, 1} <= {n for case in cases for n in case.lengths_q}
    assert any(n % case.block_size for case in cases for n in case.lengths_k if n > case.block_size)
    assert any(not case.gate_direction for case in cases if case.gate)
    assert {"int32", "int64"} == {case.index_dtype for case in cases}
    found = [str(case) for case in cases]
    assert len(found) == len(set(found))
    if size == "large":
        by_dtype = [{c.name for c in cases if c.dtype == dtype} for dtype in HALF]
        assert by_dtype[0] == by_dtype[1]


@pytest.mark.parametrize("size", SIZES)
def test_every_trap_is_there(size: str) -> None:
    met = set()
    for case in standard_sparse(size):
        if case.dtype not in HALF[:1] and size == "large":
            continue
        t = make_sparse(case)
        there = seen(case, t.selection)
        sequence = case.sequence_of("q")
        healthy = case.healthy("q") & (sequence >= 0)
        indices = t.block_indices[healthy]
        for padding in (*PADDING, *WIDE):
            if (indices == padding).any():
                met.add(padding)
        blocks = -(-np.array([*case.lengths_k, 0])[sequence] // case.block_size)[healthy]
        if (indices == blocks[:, None, None]).any():
            met.add("past the last block")
        again = indices[..., :, None] == indices[..., None, :]
        if np.triu(again & (indices >= 0)[..., None], 1).any():
            met.add("twice")
        if (healthy[:, None] & ~there.q).any() and (healthy[:, None] & there.q).any():
            met.add("dead rows among live ones")
        of_sequence = case.healthy("k") & (case.sequence_of("k") >= 0)
        if not there.listed[of_sequence].all() and np.isnan(t.k[of_sequence].astype(float)).any():
            met.add("nobody's blocks")
    words = {"past the last block", "twice", "dead rows among live ones", "nobody's blocks"}
    assert met == words | {*PADDING, *WIDE}


def items(case: SparseCase) -> Iterator[tuple[int, int, dict[int, int], range, int]]:
    """Every item: token, selection head, its blocks with their slots (-1 own), keys, pos."""
    t = make_sparse(case)
    token, first_key = 0, 0
    for seqlen_q, seqlen_k in zip(case.lengths_q, case.lengths_k, strict=True):
        for i, head in product(range(seqlen_q), range(case.num_heads_sel)):
            pos, blocks = i + seqlen_k - seqlen_q, {}
            last = case.num_selected if t.block_counts is None else t.block_counts[token + i, head]
            for slot in range(case.num_selected):
                n = int(t.block_indices[token + i, head, slot])
                exists = 0 <= n * case.block_size < seqlen_k and slot < last
                if exists and not (case.causal and n * case.block_size > pos):
                    blocks.setdefault(n, slot)
            if case.own and pos >= 0:
                blocks.setdefault(pos // case.block_size, -1)
            yield token + i, head, blocks, range(first_key, first_key + seqlen_k), pos
        token, first_key = token + seqlen_q, first_key + seqlen_k


@pytest.mark.parametrize("case", SMALL.values(), ids=str)
def test_seen_and_poison_are_what_the_definition_says(case: SparseCase) -> None:
    t = make_sparse(case)
    shape = (len(t.q), case.num_heads_sel, case.num_selected)
    q, slots = np.zeros((len(t.q), case.num_heads_q), bool), np.zeros(shape, bool)
    k, listed = np.zeros((2, len(t.k), case.num_heads_kv), bool)
    share, kv = case.num_heads_q // case.num_heads_sel, case.num_heads_sel // case.num_heads_kv
    for token, head, blocks, keys, pos in items(case):
        for n, slot in blocks.items():
            slots[token, head, slot] |= slot >= 0
            for j in range(n * case.block_size, min((n + 1) * case.block_size, len(keys))):
                listed[keys[j], head // kv] = True
                if j <= pos or (not case.causal and slot >= 0):
                    k[keys[j], head // kv] = q[token, head * share : (head + 1) * share] = True
    there = seen(case, t.selection)
    for name, wanted in (("q", q), ("k", k), ("listed", listed), ("slots", slots)):
        assert (getattr(there, name) == wanted).all(), name
    bad = ~case.healthy("k") | (case.sequence_of("k") < 0)
    poisoned = bad[:, None] | (~listed & (not case.sliding))
    for array in (t.k, t.v, t.tk, t.tv):
        if array is not None:
            nan = np.isnan(array.astype(np.float64))
            assert (nan == poisoned[..., None]).all() and not array.flags.writeable
    counted = slots & case.healthy("q")[:, None, None]
    for array in (t.block_scale, t.tblock_scale):
        assert array is None or (np.isfinite(array) == counted).all()
    assert (t.block_scale is not None) == case.gate
    zeros = expect(case).exact.zeros
    for side, wanted in (("q", q[..., None]), ("k", k[..., None]), ("slot", slots)):
        assert (zeros[side] == ~wanted).all()


def test_same_seed_same_numbers() -> None:
    first, second = make_sparse(SMALL["gate"]), make_sparse(SMALL["gate"])
    assert first.block_indices.tobytes() == second.block_indices.tobytes()
    assert first.block_scale.tobytes() == second.block_scale.tobytes()
    other = make_sparse(SMALL["gate"], seed=1)
    assert other.block_indices.tobytes() != first.block_indices.tobytes()


@pytest.mark.parametrize("case", SMALL.values(), ids=str)
def test_no_target_knows_of_the_poison(case: SparseCase) -> None:
    expected = expect_second(case)
    for target in expected.targets.values():
        assert not np.isnan(target.reference).any()
        assert not np.isnan(target.same_dtype).any()
    gated = {"dblock_scale", "gblock_scale"} & set(expected.targets)
    assert gated == ({"dblock_scale", "gblock_scale"} if case.gate else set())
    assert ("sliding lse" in expected.targets) == case.sliding
    for part, origin in zip(expected.symmetry.direction, expected.tensors.origins, strict=True):
        assert (part is None) == (origin is None)
        if part is not None:
            nan = (np.isnan(a.astype(np.float64)) for a in (part, origin))
            assert np.array_equal(*nan)


def test_importable_without_gpu_libraries() -> None:
    code = (
        "import sys\n"
        "for name in ('cupy', 'torch', 'numba'): sys.modules[name] = None\n"
        "from rawattn.check import second, sparse_cases\n"
        "second.expect_second(sparse_cases.standard_sparse('small')[2])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- somebody's functions ---------------------------------------------------------------------


@pytest.mark.sweep
def test_diff_passes_a_right_function_on_every_case(check, candidate, tmp_path) -> None:
    file = tmp_path / "found.json"
    result = check("diff", "--candidate", candidate(), "--framework", "numpy", "--json", file)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert {row["case"] for row in rows} == {str(case) for case in standard_sparse("small")}
    assert {row["tensor"] for row in rows} == names(f"{FIRST} {SECOND} {BRANCH} symmetry")
    assert not any(row["verdict"] in ("skipped", "FAIL", "vacuous") for row in rows)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the wrong functions
@pytest.mark.parametrize("fault", FAULTS)
def test_diff_catches(fault: str, check, candidate, tmp_path) -> None:
    name, old, new, tensors = FAULTS[fault]
    file = tmp_path / "found.json"
    arguments = ("--framework", "numpy", "--no-diagnosis", "--filter", SMALL[name], "--json", file)
    result = check("diff", "--candidate", candidate(old, new), *arguments)
    assert result.exit_code == 1, result.output
    rows = json.loads(file.read_text())["rows"]
    failed = {row["tensor"] for row in rows if row["verdict"] == "FAIL"}
    symmetry = set() if "symmetry" in tensors else {"symmetry"}  # perhaps that fails too
    assert failed - symmetry == names(tensors), result.output


@pytest.mark.parametrize("name", ["backward", "double_backward", "jvp"])
def test_diff_judges_what_there_is(name: str, check, candidate, tmp_path) -> None:
    file = tmp_path / "found.json"
    place = f"{candidate()}_{name}"
    arguments = ("--framework", "numpy", "--filter", "sparse-gate-", "--json", file)
    assert check("diff", "--candidate", place, *arguments).exit_code == 0
    tensors = {row["tensor"] for row in json.loads(file.read_text())["rows"]}
    wanted = {
        "backward": "dq dk dv dblock_scale",
        "double_backward": "ddout ddlse gq gk gv gblock_scale symmetry",
        "jvp": "jvp-out jvp-lse tout tlse",
    }
    assert tensors == names(wanted[name])


def test_diff_skips_what_a_function_cannot_do(check, candidate, tmp_path) -> None:
    place = candidate("block_scale, softmax_scale, return_lse", "softmax_scale, return_lse")
    text = Path(place.rpartition(":")[0]).read_text()
    Path(place.rpartition(":")[0]).write_text(text.replace("block_scale=block_scale,", "", 1))
    arguments = ("diff", "--candidate", place, "--framework", "numpy", "--filter")
    result = check(*arguments, "sparse-gate-float64")
    assert result.exit_code == 1 and "skipped no parameter block_scale" in result.output


def test_diff_refuses_to_compare_sparse_with_dense(check, candidate) -> None:
    result = check("diff", "--candidate", candidate(), "--against", "torch")
    assert result.exit_code == 2 and "sparse attention" in result.output


# ---- rawattn's own ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "tensors"),
    [
        ("sparse_forward", "out lse"),
        ("sparse_backward", "dq dk dv dblock_scale"),
        ("sparse_jvp", "jvp-out jvp-lse tout tlse"),
        ("sparse_double_backward", "ddout ddlse gq gk gv gblock_scale"),
    ],
)
def test_a_wrong_kernel_fails(broken: str, tensors: str, monkeypatch) -> None:
    right, case, steps = getattr(api_sparse, broken), SMALL["gate"], tuple(SPARSE_STEPS)

    def wrong(*args, **kwargs):
        results = right(*args, **kwargs)
        for array in results:
            array *= array.dtype.type(1.1)
        return results

    rows = run.judge_case(case, "reference", steps)
    assert {row.tensor for row in rows} >= names(f"{FIRST} {SECOND}")
    assert all(row.verdict.ok for row in rows), rows
    monkeypatch.setattr(api_sparse, broken, wrong)
    bad = {row.tensor for row in run.judge_case(case, "reference", steps) if not row.verdict.ok}
    assert bad == names(tensors)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", ["no-own", "no-own-open", "late", "late-open", "decode"])
def test_the_reference_reads_nothing_of_blocks_that_nobody_sees(name: str) -> None:
    case = SMALL[name]
    there = make_sparse(case)
    assert np.isnan(there.k.astype(np.float64)[case.healthy("k")]).any()
    rows = run.judge_case(case, "reference", tuple(SPARSE_STEPS))
    assert len(rows) > 10 and all(row.verdict.ok for row in rows), rows


@pytest.mark.parametrize("noise", [0.0, 1e-9])
def test_a_second_call_must_give_the_same_bits(noise: float) -> None:
    calls = []

    def backward(*args, **kwargs):
        calls.append(1)
        dq, dk, dv, dg = api_sparse.sparse_backward(*args, **kwargs)
        return dq, dk, dv + noise * len(calls), dg

    case = SMALL["gate"]
    assert case.dtype == "float64"
    candidate = Candidate("twice", "numpy", backward=backward, repeat=True)
    rows = {row.tensor: row.verdict for row in run.evaluate(candidate, case)}
    assert len(calls) == 2
    assert rows["repeat"].verdict == ("FAIL" if noise else "pass")
    assert not noise or "a second call changes" in rows["repeat"].note


def test_deterministic_steps_are_asked_for_and_repeated_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(sparse, "gpu_name", lambda: "some GPU")
    _, *steps = sparse.own_sparse("cuda", tuple(SPARSE_STEPS))
    assert [step.repeat for step in steps] == [False, True, False, True]
    assert [step.backward.keywords["deterministic"] for step in steps[:2]] == [False, True]
    assert steps[3].symmetry and all(step.framework == "cupy" for step in steps)


def test_the_simulator_meets_every_step_with_every_dtype() -> None:
    jobs = sparse.sparse_jobs(0)
    wanted = sum(len(chosen) for chosen in sparse.SIMULATED.values())
    assert len(jobs) == wanted, "every name is that of a case"
    met = {(case.dtype, step) for case, _, steps in jobs for step in steps}
    assert met == set(product(DTYPES, SPARSE_STEPS))
    assert {backend for _, backend, _ in jobs} == {"numba"}


@pytest.mark.parametrize("arch", [75, 89, 90])
def test_a_gpu_meets_every_case(arch: int) -> None:
    jobs = sparse.sparse_jobs(arch)
    assert {case for case, _, _ in jobs} == {c for size in SIZES for c in standard_sparse(size)}
    raw = {(case, step) for case, backend, steps in jobs if backend == "cuda" for step in steps}
    assert bool(raw) == (arch >= 80) and all(case.dtype in HALF for case, _ in raw)
    assert all(set(steps) == set(SPARSE_STEPS) for _, b, steps in jobs if b == "numba")


def test_run_judges_sparse_cases(check, tmp_path) -> None:
    """One case with the kernels that are here, in processes as the whole run has them."""
    file = tmp_path / "found.json"
    result = check("run", "--filter", "sparse-decode", "--json", file)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert {row["tensor"] for row in rows} == names("out lse jvp-out jvp-lse tout tlse")
    assert all(row["verdict"] == "pass" and row["error"] > 0 for row in rows)


def test_quick_cases_are_cases() -> None:
    names = {case.name for case, _, _ in (*run.jobs(0), *sparse.sparse_jobs(0))}
    assert set(run.QUICK) <= names


@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_sparse_builds_are_what_calls_ask_for(arch: str) -> None:
    builds = list(compiled.sparse_builds(arch))
    assert builds
    for build in builds:
        kernel = build.row.kernel
        assert kernel.sparse or kernel.stem == "backward_preprocess"
        assert any(build.blocks) == kernel.sparse
        assert (build.direction == WHOLE) == kernel.directed
    assert {b.atomic for b in builds if b.row.stem == "sparse_backward_kv"} == {True, False}


def test_forms_of_sparse_rows() -> None:
    row = next(b.row for b in compiled.sparse_builds("sm_90") if any(b.blocks))
    build = Build(row, "float16", 64, 64, False, True, True, (True,) * 3, (16, 64), True)
    assert compiled.describe(build) == "f16 ra qkv 16x64 s"

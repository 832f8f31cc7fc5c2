"""Files of questions and answers: what is written comes back, and what others write is understood.
Long by the many forms in which arrays come."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.files.npz import dump, load_two, read
from rawattn.check.diagnose.judge.failures import reference_answers
from tests.diagnose.problems import KINDS, draw, normal, packed

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LENGTHS_Q, LENGTHS_K = (5, 9, 3), (7, 4, 8)
HEAD_DIM, HEAD_DIM_V = 6, 10
Problem = tuple[Question, Answers]


def problem(
    lengths_q: tuple[int, ...] = LENGTHS_Q,
    lengths_k: tuple[int, ...] = LENGTHS_K,
    dtype: Any = np.float32,
    **options: Any,
) -> Problem:
    """Random inputs, and random arrays of the right shapes as answers."""
    sizes = {"lengths_k": lengths_k, "dim": HEAD_DIM, "dim_v": HEAD_DIM_V, "causal": False}
    posed = packed(lengths_q, dtype, dlse=True, moved=True, **sizes | options)
    question, rng = replace(posed, tq=None, tv=None), np.random.default_rng(1)
    like = {"out": posed.dout, "lse": posed.dlse, "dq": posed.q, "dk": posed.k, "dv": posed.v}
    return question, {name: normal(rng, x.shape, x.dtype) for name, x in like.items()}


def load(path: Path) -> tuple[Question | None, Answers]:
    saved = read(path)
    return saved.question, saved.answers


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Bit for bit, dtype included."""
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and one.tobytes() == other.tobytes()


def assert_same(found: tuple[Question | None, Answers], wanted: Problem) -> None:
    question, answers = found
    assert question is not None
    for name, value in vars(wanted[0]).items():
        if name in ("lengths_q", "lengths_k"):  # cached
            continue
        got = getattr(question, name)
        right = same(got, value) if isinstance(value, np.ndarray) else got == value
        assert right, (name, got, value)
    assert answers.keys() == wanted[1].keys()
    for name, array in wanted[1].items():
        assert same(answers[name], array), name


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Writes these entries to a file."""

    def write(file: str = "a.npz", /, **arrays: Any) -> Path:
        np.savez(tmp_path / file, **arrays)
        return tmp_path / file

    return write


def plain(wanted: Problem, **more: Any) -> dict[str, Any]:
    """The entries that a stranger would write for ``wanted``."""
    question, answers = wanted
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "dout", "dlse", "tk")
    return {name: getattr(question, name) for name in names} | answers | more


def padded(array: np.ndarray, lengths: tuple[int, ...], heads_first: bool) -> np.ndarray:
    """Packed rows as a batch of ``max(lengths)`` rows each, with 7 in the padding."""
    full = np.full((len(lengths), max(lengths), *array.shape[1:]), 7, dtype=array.dtype)
    for rows, x in zip(full, np.split(array, np.cumsum(lengths)[:-1]), strict=True):
        rows[: len(x)] = x
    return full.swapaxes(1, 2) if heads_first else full


def batches(wanted: Problem, heads_first: bool) -> dict[str, Any]:
    """Its entries as (batch, tokens, heads, dim), or heads before tokens, as lse always has."""
    found = {}
    for name, array in plain(wanted).items():
        of_keys = name in ("k", "v", "tk", "dk", "dv")
        lengths = wanted[0].lengths_k if of_keys else wanted[0].lengths_q
        if name in ("lse", "dlse"):
            found[name] = padded(array.T, lengths, True)
        elif "cu_seqlens" not in name:
            found[name] = padded(array, lengths, heads_first)
    return found


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_dumped_comes_back(kind: str, dtype: Any, tmp_path: Path) -> None:
    """Masks, lists of blocks, gates, a sliding branch, softcap, sinks and seqused_k."""
    needs = replace(KINDS[kind], past_end=0.0)
    for seed in range(3):
        question = draw(needs, np.random.default_rng(seed), np.dtype(dtype))
        wanted = question, reference_answers(question)
        dump(tmp_path / "case", *wanted)
        assert_same(load(tmp_path / "case"), wanted)
        assert not read(tmp_path / "case").notes


@pytest.mark.parametrize(
    "names",
    [
        {"cu_seqlens_q": "cu_seqlens_q", "dout": "dO", "out": "O", "q": "Q", "k": "K", "v": "V"},
        {"dout": "do", "lse": "softmax_lse", "dq": "grad_q", "dk": "q.grad".replace("q", "k")},
        {"dout": "grad_output", "dq": "dQ", "dk": "dK", "dv": "v_grad", "out": "o", "tk": "ddk"},
        {"q": "query", "k": "key", "v": "value", "lse": "LSE", "cu_seqlens_k": "cu_seqlens_kv"},
    ],
)
def test_other_names(names: dict[str, str], save: Callable[..., Path]) -> None:
    wanted = problem(causal=True, softmax_scale=0.5, window=(2, 1))
    options = {"is_causal": True, "sm_scale": np.float32(0.5), "window_size": np.array([2, 1])}
    entries = {names.get(name, name): array for name, array in plain(wanted).items()}
    path = save(**entries, **options)
    assert_same(load(path), wanted)
    assert not read(path).notes


@pytest.mark.parametrize("heads_first", [False, True])
def test_batches(heads_first: bool, save: Callable[..., Path]) -> None:
    wanted = problem((20,) * 3, (20,) * 3)
    layout = "bhsd" if heads_first else "bshd"
    path = save(**batches(wanted, heads_first), layout=layout, causal=False)
    assert_same(load(path), wanted)
    assert not read(path).notes


def test_a_batch_must_say_its_layout_and_its_padding(save: Callable[..., Path]) -> None:
    q = np.random.default_rng(0).standard_normal((2, 8, 6, 16))
    with pytest.raises(ValueError, match=r"with a batch; then say how, in an entry layout='bthd'"):
        load(save(q=q, k=q, v=q))
    for layout, total in (("bthd", 16), ("bhtd", 12)):
        question, _ = load(save(q=q, k=q, v=q, layout=layout))
        assert question is not None and len(question.q) == total
    q[1, 5:] = 0
    with pytest.raises(ValueError, match="k ends in zeros: say lengths="):
        load(save(q=q, k=q, v=q, layout="bthd"))
    question, _ = load(save(q=q, k=q, v=q, layout="bthd", lengths=np.array([8, 5])))
    assert question is not None and question.lengths_k == (8, 5)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("how", ["cu_seqlens", "lengths"])
def test_padding_is_taken_out(heads_first: bool, how: str, save: Callable[..., Path]) -> None:
    wanted = problem()
    entries = batches(wanted, heads_first)
    if how == "lengths":
        entries |= {"seqlens_q": np.array(LENGTHS_Q), "seqlens_k": np.array(LENGTHS_K)}
    else:
        names = ("cu_seqlens_q", "cu_seqlens_k")
        entries |= {name: getattr(wanted[0], name).astype(np.int64) for name in names}
    assert_same(load(save(**entries, layout="bhtd" if heads_first else "bthd")), wanted)


# ---- dtypes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)])
def test_widened_numbers_are_known_again(dtype: np.dtype, save: Callable[..., Path]) -> None:
    wanted = problem(dtype=dtype)
    entries = {n: a.astype(np.float32) if a.ndim > 1 else a for n, a in plain(wanted).items()}
    path = save(**entries)
    assert_same(load(path), wanted)
    assert any("read as such" in note for note in read(path).notes)


@pytest.mark.parametrize("apart", [False, True])
def test_widened_results_of_16_bits_are_known_again(apart: bool, save: Callable[..., Path]) -> None:
    wanted = problem(dtype=BFLOAT16)
    wide = {n: a.astype(np.float32) for n, a in wanted[1].items()}
    given = {n: a for n, a in plain(wanted).items() if n not in wide}
    files = [save("a.npz", **given, **({} if apart else wide))]
    found = load_two(*files, *([save("b.npz", **wide)] if apart else []))
    assert_same((found.questions[-1], found.sides[-1].answers), wanted)
    assert any("judged as such" in note for note in found.sides[-1].notes)


def test_bits_of_bfloat16(save: Callable[..., Path]) -> None:
    """As numpy.savez writes them; ``dump`` writes uint16."""
    wanted = problem(dtype=BFLOAT16)
    assert_same(load(save(**plain(wanted))), wanted)


# ---- what cannot be read ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dq": np.zeros((3, 3))}, r"dq has shape \(3, 3\); it must be \(17, 4, 6\)"),
        ({"dk": np.zeros((19, 4, 6))}, r"dk has shape .* must be \(19, 2, 6\)"),
        ({"lse": np.zeros((2, 17))}, r"lse has shape \(2, 17\); it must be \(4, 17\)"),
        ({"v": np.zeros((18, 2, 6))}, r"q, k and v as \(batch, tokens, heads, head_dim\) are"),
        ({"k": np.zeros((19, 3, 6)), "v": np.zeros((19, 3, 6))}, "and these divide those of q"),
        ({"cu_seqlens_q": np.array([0, 5, 14, 30])}, r"cu_seqlens_q ends at 30, and 17 rows"),
        ({"cu_seqlens_q": np.array([0, 9, 5, 17])}, "it must grow from 0 to the total"),
        ({"cu_seqlens_q": np.array([0, 17])}, "cu_seqlens_q has 2 entries and cu_seqlens_k 4"),
        ({"cu_seqlens_q": np.array([0, 0.5, 17])}, "must be a list of integers"),
        ({"layout": "bxtd"}, "layout is 'bxtd'; it must be one of thd, bthd"),
        ({"window": np.array([1, 2, 3])}, r"window is \[1, 2, 3\]; it must be two integers"),
        ({"causal": "maybe"}, "causal is 'maybe'; it must be true or false"),
        ({"alibi_slopes": np.ones(4)}, "alibi_slopes is not 0: there is no reference"),
        ({"o": np.ones(4)}, "o is a second entry for out; leave one of them out"),
        ({"tk": np.ones((19, 2, 6), int)}, "tk has dtype int64; it must be floating, or uint16"),
        ({"q": np.ones(4)}, r"q, k and v have shapes \(4,\)"),
        (dict.fromkeys("qkv", np.ones((3, 8))), "they must have three axes"),
        ({"k": np.ones((19, 4, 6)), "v": np.ones((19, 4, 10))}, r"tk has .* must be \(19, 4, 6"),
        ({"about": "{"}, "about is not JSON text"),
        ({"s_aux": np.ones(3)}, r"sinks has shape \(3,\); it must be \(4,\), by query head"),
        ({"seqused_k": np.ones(2)}, r"seqused_k has shape \(2,\); it must be \(3,\), by sequence"),
        ({"softcap": np.ones(2)}, "softcap is .*; it must be one number, 0 for none"),
    ],
)
def test_what_cannot_be_read(
    change: dict[str, Any], message: str, save: Callable[..., Path]
) -> None:
    path = save(**plain(problem(), **change))
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(str(path)), "which file"


# ---- two files ----------------------------------------------------------------------------------


def test_two_files_of_one_problem(save: Callable[..., Path]) -> None:
    """The second one has no q, k and v: it is judged by those of the first."""
    wanted = problem((20,) * 3, (20,) * 3, causal=True)
    question = wanted[0]
    entries = plain(wanted)
    of_second = {"dout", "dlse", "tk", "dq", "dk", "dv"}
    one = save("a.npz", **{name: entries[name] for name in entries.keys() - of_second})
    other: dict[str, Any] = {"is_causal": True}
    other |= {name: x for name, x in batches(wanted, True).items() if name in of_second}
    two = save("b.npz", **other, layout="bhtd")
    for swapped in (False, True):
        pair = load_two(*((two, one) if swapped else (one, two)))
        a, b = pair.sides[::-1] if swapped else pair.sides
        of_a, of_b = pair.questions[::-1] if swapped else pair.questions
        assert_same((of_b, a.answers | b.answers), wanted)
        assert "dq" not in a.answers and not pair.apart
        assert of_a is not None and of_a.dlse is None and same(of_a.dout, question.dout)
        assert f"dout, tk, causal: not said, as in {two} is assumed" in a.notes
        assert pair.notes == (f"dlse: only in {two}; {one} is judged as a run that had none",)
    other["dlse"] = 0 * other["dlse"]
    assert not load_two(one, save("c.npz", **other, layout="bhtd")).notes, "0 is none"


@pytest.mark.parametrize(
    ("change", "apart"),
    [
        ({"q": 0.5}, "q differs by up to 0.5, in 408 of 408 numbers"),
        ({"q": 0.5, "dout": None}, "q differs by up to"),
        ({"k": np.zeros((20, 2, 6)), "v": np.zeros((20, 2, 10))}, "k has shape"),
        ({"dout": 1.0}, "dout differs by up to 1"),
        ({"dlse": 1.0}, "dlse differs by up to 1"),
        ({"tk": 1.0}, "tk differs by up to 1"),
        ({"causal": True}, "causal is False and True"),
        ({"window": np.array([3, -1])}, "window is (-1, -1) and (3, -1)"),
        ({"softmax_scale": 0.5}, "softmax_scale is 0.408248 and 0.5"),
        ({"softcap": np.array(2.0)}, "softcap is 1 and 2"),
        ({"sinks": 1.0}, "sinks differs"),
        ({"seqused_k": np.array([7, 3, 8])}, "seqused_k differs"),
        ({"cu_seqlens_q": np.array([0, 4, 14, 17])}, "cu_seqlens_q differs by up to 1"),
    ],
)
def test_two_files_of_different_problems(
    change: dict[str, Any], apart: str, save: Callable[..., Path]
) -> None:
    options = {"softcap": 1.0, "sinks": np.zeros(4), "seqused_k": np.array([7, 4, 8])}
    options |= {"causal": False, "window": np.array([-1, -1]), "softmax_scale": 6**-0.5}
    entries = plain(problem(), **options)
    one = save("a.npz", **entries)
    for name, value in change.items():
        if value is None:
            del entries[name]
        elif isinstance(value, float) and name != "softmax_scale":
            entries[name] = entries[name] + np.float32(value)
        else:
            entries[name] = value
    for name in ("dk", "dv", "tk") if "k" in change else ():
        del entries[name]
    if "k" in change:
        entries["cu_seqlens_k"] = np.array([0, 7, 11, 20])
    pair = load_two(one, save("b.npz", **entries))
    assert any(text.startswith(apart) for text in pair.apart), pair.apart
    first, second = pair.questions
    assert first is not None and second is not None and first is not second
    assert same(first.dout, problem()[0].dout)
    if "q" in change:
        assert same(second.q, first.q + np.float32(0.5))
        assert ("dout" in change) == (second.dout is None), "not that of another problem"

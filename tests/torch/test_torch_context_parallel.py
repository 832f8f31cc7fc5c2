"""Packed attention over several processes, beside one: gloo on CPUs, float64, every method."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.shared import parallel, parallel_failures, parallel_rounded, parallel_use, ranks


def whole(texts: list[object]) -> list[str]:
    """What the ranks found wrong, or how they failed."""
    return [each for x in texts for each in ([x] if isinstance(x, str) else x)]  # type: ignore


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_method_gives_what_one_process_gives(count: int) -> None:
    assert whole(ranks.run(parallel.sweep, count, 0, 10)) == []


@pytest.mark.parametrize(
    ("seed", "problems"),
    [pytest.param(1, 60, marks=pytest.mark.sweep), pytest.param(2, 300, marks=pytest.mark.rest)],
)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_method_on_many_problems(count: int, seed: int, problems: int) -> None:
    assert whole(ranks.run(parallel.sweep, count, seed, problems)) == []


@pytest.mark.parametrize("count", [2, 3])
def test_second_order_and_forward_mode(count: int) -> None:
    assert whole(ranks.run(parallel.beyond_sweep, count, 0, 4)) == []


@pytest.mark.sweep
@pytest.mark.parametrize("count", [2, 3, 4])
def test_second_order_and_forward_mode_of_many_problems(count: int) -> None:
    assert whole(ranks.run(parallel.beyond_sweep, count, 1, 30)) == []


def test_mistakes_are_seen() -> None:
    assert whole(ranks.run(parallel.unseen, 2, 0, 30)) == []


def test_shards_make_the_whole() -> None:
    assert ranks.run(parallel_use.whole_again, 3) == [[True] * 8] * 3


# ---- errors -----------------------------------------------------------------------------------


def test_wrong_calls_are_errors_on_every_rank() -> None:
    heard = ranks.run(parallel_failures.wrong_calls, 2)
    for name, (_, (of_odd, of_other)) in parallel_failures.WRONG.items():
        assert of_other in heard[0][name], name
        assert of_odd in heard[1][name], name


def test_a_rank_outside_the_group() -> None:
    first, second, outside = ranks.run(parallel_failures.not_in_the_group, 3)
    assert first == second == "" and "not in group" in outside


def test_without_a_process_group() -> None:
    from rawattn.torch import context_parallel

    with pytest.raises(RuntimeError, match="init_process_group"):
        context_parallel.plan([0, 3])


@pytest.mark.parametrize("method", ["gather", "ring", "ulysses"])
def test_the_others_raise_when_a_rank_is_killed(method: str) -> None:
    first, last = ranks.run(parallel_failures.failing, 2, method, "killed", timeout=20.0)
    assert 0 <= first < 20 and last == "gone"


def test_the_others_raise_when_a_rank_raises() -> None:
    first, last = ranks.run(parallel_failures.failing, 2, "gather", "raising", timeout=20.0)
    assert 0 <= first < 20 and "ArithmeticError" in last


def test_the_others_raise_when_a_rank_hangs() -> None:
    first, last = ranks.run(parallel_failures.failing, 2, "gather", "12.0", timeout=6.0)
    assert 5 < first < 12 and last == 0.0


# ---- surroundings -----------------------------------------------------------------------------


def test_in_models_with_checkpoints_and_compiled() -> None:
    for found in ranks.run(parallel_use.in_models, 2):
        assert len(found) == 9 and max(found.values()) < 1e-12, found


def test_on_a_mesh_under_fsdp() -> None:
    for found in ranks.run(parallel_use.on_a_mesh, 4):
        assert len(found) == 2 and max(found.values()) < 1e-12, found


def test_the_page_s_code_runs() -> None:
    page = Path(parallel_use.cp.__file__).with_name("README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert ranks.run(parallel_use.snippet, 2, code) == [[100, 200, 100, 8, 64]] * 2


def test_in_transformers() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    for found in ranks.run(parallel_use.in_transformers, 2, ("llama", "gpt_oss", "gemma2")):
        assert len(found) == 3
        for of_logits, of_gradients in found.values():
            assert of_logits < 2e-5 and of_gradients < 1e-4, found


def test_refused_in_transformers() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    for texts in ranks.run(parallel_use.refused_in_transformers, 2):
        assert "(2, 10, 4, 8)" in texts[0] and "a padding mask" in texts[1]


def test_16_bits_are_as_exact_as_one_rank() -> None:
    assert whole(ranks.run(parallel_rounded.sweep, 2, 0, 3, "cpu")) == []

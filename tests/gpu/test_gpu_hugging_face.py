"""Tiny models of transformers in bfloat16 on a GPU, packed and padded, judged by eager's own error.

Exact is eager attention in float32, each document alone. What rawattn's model may differ from it
follows the tolerance of the kernels: twice what eager's differs in bfloat16, and twice a rounding.
A parameter of few numbers eager may hit by luck: of gradients eager's error counts as no smaller
than its median over all parameters.
"""

from functools import cache
from statistics import median
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from rawattn.torch import hugging_face  # noqa: E402
from tests.shared import tiny_models  # noqa: E402
from tests.shared.tiny_models import BATCHES, MODELS, all_apart, apart  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPE = torch.bfloat16
ROUNDING = 2 * 0.3 * torch.finfo(DTYPE).eps  # twice, of numbers a third of the largest
MUTANTS = {
    n: x for n, x in tiny_models.mutants(hugging_face).items() if n != "a window of one more"
}

Results = tuple[Any, dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    hugging_face.register_with_transformers()


def built(name: str, implementation: str, dtype: Any) -> Any:
    return MODELS[name].build(implementation, DTYPE).to(DEVICE, dtype)


def of_eager(name: str, dtype: Any) -> Results:
    model = built(name, "eager", dtype)
    logits = tiny_models.one_by_one(model)
    return logits.detach(), tiny_models.gradients(model, logits)


@cache
def exact(name: str) -> Results:
    return of_eager(name, torch.float32)


@cache
def bounds(name: str) -> tuple[float, dict[str, float]]:
    """What may be between rawattn's model and the exact one: of logits, and of each gradient."""
    (logits, gradients), (wanted, of_parameters) = of_eager(name, DTYPE), exact(name)
    own = all_apart(gradients, of_parameters)
    least = median(own.values())
    of_gradients = {n: 2 * max(x, least) + ROUNDING for n, x in own.items()}
    return 2 * apart(logits, wanted) + ROUNDING, of_gradients


def faults(name: str, batch: str) -> list[str]:
    """What is further from exact than it may be."""
    model = built(name, hugging_face.NAME, DTYPE)
    given = {n: x.to(DEVICE) if torch.is_tensor(x) else x for n, x in BATCHES[batch]().items()}
    logits = tiny_models.of_documents(model(**given, use_cache=False).logits, given)
    found = {"logits": apart(logits, exact(name)[0])}
    found |= all_apart(tiny_models.gradients(model, logits), exact(name)[1])
    of_logits, of_gradients = bounds(name)
    most = {"logits": of_logits} | of_gradients
    return [f"{n}: {found[n]:.3g} > {most[n]:.3g}" for n in found if not found[n] <= most[n]]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", MODELS)
def test_no_further_than_eager(name: str, batch: str) -> None:
    assert not faults(name, batch)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, mutated = MUTANTS[mutant]
    monkeypatch.setattr(hugging_face, "varlen_attn", mutated)
    assert len(faults(name, "packed by cu_seq_lens")) > len(bounds(name)[1]) / 2

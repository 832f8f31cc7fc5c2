"""Tiny models of transformers: packed and padded batches by rawattn, and each document alone by
transformers' eager attention. Logits, and the gradient of every parameter.
"""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from rawattn.torch import hugging_face, varlen_attn  # noqa: E402
from tests.shared import tiny_models  # noqa: E402
from tests.shared.tiny_models import (  # noqa: E402
    BATCHES,
    CHUNKED,
    MODELS,
    Model,
    all_apart,
    apart,
    expected,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = MODELS | CHUNKED
MUTANTS = tiny_models.mutants(hugging_face)


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    hugging_face.register_with_transformers()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ALL)
def test_model(name: str, batch: str) -> None:
    model, given = ALL[name].build(hugging_face.NAME), BATCHES[batch]()
    logits = tiny_models.of_documents(model(**given, use_cache=False).logits, given)
    wanted, of_parameters = expected(name)
    assert apart(logits, wanted) < 2e-5
    found = tiny_models.gradients(model, logits)
    assert max(all_apart(found, of_parameters).values()) < 1e-4


@pytest.mark.parametrize("batch", BATCHES)
def test_inference_mode(batch: str) -> None:
    with torch.inference_mode():
        given = BATCHES[batch]()
        logits = MODELS["llama"].build(hugging_face.NAME)(**given, use_cache=False).logits
        logits = tiny_models.of_documents(logits, given)
    assert apart(logits.clone(), expected("llama")[0]) < 2e-5


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, mutated = MUTANTS[mutant]
    monkeypatch.setattr(hugging_face, "varlen_attn", mutated)
    logits = MODELS[name].build(hugging_face.NAME)(**tiny_models.packed(), use_cache=False).logits
    assert apart(logits[0], expected(name)[0]) > 1e-2


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_gradient_checkpointing(name: str) -> None:
    model = MODELS[name].build(hugging_face.NAME).train()
    model.gradient_checkpointing_enable()
    logits = model(**tiny_models.packed(), use_cache=False).logits[0]
    found, wanted = tiny_models.gradients(model, logits), expected(name)[1]
    assert max(all_apart(found, wanted).values()) < 1e-4


def test_documents_in_every_row() -> None:
    """Positions that begin anew in some rows, and at other places."""
    ids = torch.cat(tiny_models.documents(), 1)[:, :44].reshape(2, 22)
    cuts = ((9, 22), (4, 5, 22))
    positions = torch.tensor(
        [[n - max((0, *(c for c in cut if c <= n))) for n in range(22)] for cut in cuts]
    )
    found, wanted = (
        MODELS["llama"].build(name)(input_ids=ids, position_ids=positions, use_cache=False).logits
        for name in (hugging_face.NAME, "eager")
    )
    assert apart(found, wanted) < 2e-5


def test_values_are_not_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of multi-head latent attention are narrower than its keys."""
    widths, real = set(), hugging_face.varlen_attn

    def seen(q: Any, k: Any, v: Any, *args: Any, **given: Any) -> Any:
        widths.add((k.shape[2], v.shape[2]))
        return real(q, k, v, *args, **given)

    monkeypatch.setattr(hugging_face, "varlen_attn", seen)
    MODELS["deepseek_v3"].build(hugging_face.NAME)(**tiny_models.packed(), use_cache=False)
    assert widths == {(24, 16)}


# ---- what it refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["my_flash", "sdpa", "eager"])
def test_names_of_transformers_are_left_to_it(name: str) -> None:
    with pytest.raises(ValueError, match="transformers treats names"):
        hugging_face.register_with_transformers(name)


def test_dropout_is_refused() -> None:
    model = Model("LlamaConfig", {"attention_dropout": 0.1}).build(hugging_face.NAME).train()
    with pytest.raises(ValueError, match=r"attention dropout is 0\.1.*config's attention_dropout"):
        model(**tiny_models.packed(), use_cache=False)


def test_packed_rows_of_a_batch_without_a_mask() -> None:
    """As sequence parallelism hands them over, which drops the mask."""
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 12, 8, generator=drawn) for n in (4, 2, 2))
    positions = torch.tensor([[*range(5), *range(7)], [*range(12)]])
    out, _ = hugging_face.attend(torch.nn.Module(), q, k, v, None, position_ids=positions)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    offsets = torch.tensor([0, 5, 12, 24], dtype=torch.int32)
    assert torch.equal(out.flatten(0, 1), varlen_attn(q, k, v, offsets, causal=True))

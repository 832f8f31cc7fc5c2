"""Families of models of transformers beside the eleven: decoders, encoders, both, vision towers.

Each beside its own eager attention. What rawattn does not do is refused with words for it.
"""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")  # older ones pass on less

from rawattn.torch import hugging_face  # noqa: E402
from tests.shared.tiny_families import (  # noqa: E402
    DECODERS,
    ENCODERS,
    GEMMA3,
    GRIDS,
    HALF_LINEAR,
    IMAGE,
    REFUSED,
    SEQ2SEQ,
    TOWERS,
    images,
)
from tests.shared.tiny_models import (  # noqa: E402
    MODELS,
    VOCABULARY,
    Model,
    all_apart,
    apart,
    documents,
    gradients,
    of_documents,
    one_by_one,
    packed,
    padded,
    with_offsets,
)

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = hugging_face.NAME


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    hugging_face.register_with_transformers()


def build(model: Model, implementation: str = NAME) -> Any:
    if not hasattr(transformers, model.config):
        pytest.skip(f"transformers {transformers.__version__} has no {model.config}")
    return model.build(implementation)


def both(model: Model) -> list[Any]:
    return [build(model, implementation) for implementation in (NAME, "eager")]


Results = tuple[Any, dict[str, Any]]


def results(model: Any, given: dict[str, Any]) -> Results:
    """Logits and the gradients of every parameter."""
    logits = model(**given).logits
    return logits, gradients(model, logits)


def assert_close(found: Results, wanted: Results) -> None:
    assert apart(found[0], wanted[0]) < 5e-5
    assert max(all_apart(found[1], wanted[1]).values()) < 2e-4


# ---- decoders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS | HALF_LINEAR)
def test_decoder(name: str) -> None:
    model, eager = both((DECODERS | HALF_LINEAR)[name])
    with torch.no_grad():
        wanted = one_by_one(eager)
        batches = [padded("left"), padded("right")] + [packed()] * (name in DECODERS)
        for batch in batches:
            logits = of_documents(model(**batch, use_cache=False).logits, batch)
            assert apart(logits, wanted) < 2e-4


# ---- encoders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name: str, side: str) -> None:
    """They see what comes after a token too."""
    given = padded(side)
    del given["position_ids"]
    found, wanted = (
        of_documents(model(**given).last_hidden_state, given) for model in both(ENCODERS[name])
    )
    assert apart(found, wanted) < 2e-5


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_encoder_packed(name: str) -> None:
    """By offsets; RoBERTa's positions are from 2 on."""
    given = with_offsets()
    given["position_ids"] = given["position_ids"] + 2 * (name == "roberta")
    model, eager = both(ENCODERS[name])
    found = model(**given).last_hidden_state[0]
    wanted = torch.cat([eager(input_ids=each).last_hidden_state[0] for each in documents()])
    assert apart(found, wanted) < 2e-5


# ---- encoder and decoder -------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("length", [7, 23, 30], ids=["shorter", "as long", "longer"])
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_cross_attention(name: str, length: int, mask: bool) -> None:
    """To an encoder's tokens, padded or all, from a decoder that is not padded."""
    batch = padded("right")
    given = {"input_ids": batch["input_ids"].clamp(min=3)}
    if mask:
        given["attention_mask"] = batch["attention_mask"]
    generator = torch.Generator().manual_seed(3)
    given["decoder_input_ids"] = torch.randint(3, VOCABULARY, (4, length), generator=generator)
    assert_close(*(results(model, given) for model in both(SEQ2SEQ[name])))


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_cross_attention_generates(name: str) -> None:
    given = padded("right")
    del given["position_ids"]
    found, wanted = (
        model.generate(**given, max_new_tokens=12, do_sample=False, eos_token_id=None)
        for model in both(SEQ2SEQ[name])
    )
    assert torch.equal(found, wanted)


# ---- vision towers -------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", [NAME, f"{NAME}_flash"])
@pytest.mark.parametrize("name", TOWERS)
def test_vision_tower(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with "flash" gets all images of a layer in one call."""
    calls, real = [], hugging_face.varlen_attn

    def seen(*args: Any, **given: Any) -> Any:
        calls.append((len(args[3]) - 1, given["causal"]))
        return real(*args, **given)

    monkeypatch.setattr(hugging_face, "varlen_attn", seen)
    given = images() | {"use_cache": False}
    found, wanted = (results(build(TOWERS[name], n), given) for n in (implementation, "eager"))
    of_images = [count for count, causal in calls if not causal]
    if "flash" in implementation:
        assert len(of_images) == 2 and of_images[-1] == len(GRIDS)
    else:
        assert len(of_images) > len(GRIDS) and set(of_images) == {1}
    assert_close(found, wanted)


# ---- what is not served --------------------------------------------------------------------------


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_served_is_said(what: str) -> None:
    model, words = REFUSED[what]
    given = {"input_ids": documents()[1]}
    if what == "a bias":
        given["decoder_input_ids"] = documents()[0]
    with pytest.raises(ValueError, match=words):
        build(model)(**given)


@pytest.mark.parametrize("implementation", [NAME, "eager"])
def test_tokens_of_an_image_that_see_each_other(implementation: str) -> None:
    """Of Gemma 3: refused, and words alone are not."""
    model = build(GEMMA3, implementation)
    words = {"input_ids": documents()[1], "token_type_ids": torch.zeros_like(documents()[1])}
    assert model(**words, use_cache=False).logits.isfinite().all()
    ids = torch.tensor([[5, 91, *[IMAGE] * 4, 92, 6, 7]])
    given = {"input_ids": ids, "token_type_ids": (ids == IMAGE).long()}
    given["pixel_values"] = torch.randn(1, 3, 16, 16)
    if implementation == NAME:
        with pytest.raises(ValueError, match=r"gemma3.* both ways, as an image's do.*sdpa"):
            model(**given, use_cache=False)
    else:
        model(**given, use_cache=False)


def test_a_paged_cache_is_refused() -> None:
    x = torch.zeros(1, 4, 3, 16)
    with pytest.raises(ValueError, match="passes cache, a paged cache"):
        hugging_face.attend(torch.nn.Identity(), x, x, x, None, cache=object())


def test_a_mask_of_pairs_is_refused() -> None:
    pairs = torch.ones(1, 1, 5, 5).bool()
    with pytest.raises(ValueError, match=r"shape \(1, 1, 5, 5\).*pairs of tokens"):
        build(MODELS["llama"])(input_ids=documents()[0], attention_mask=pairs)

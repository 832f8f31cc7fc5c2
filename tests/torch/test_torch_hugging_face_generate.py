"""transformers' ``generate`` and torch.compile around rawattn's attention, beside eager's.

Caches that grow, that are static and that keep a window or a chunk; compiled code is one graph.
"""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")  # older ones pass on less

import torch._dynamo as dynamo  # noqa: E402

from rawattn.torch import hugging_face  # noqa: E402
from tests.shared import tiny_models  # noqa: E402
from tests.shared.tiny_models import (  # noqa: E402
    BATCHES,
    CHUNKED,
    MODELS,
    Model,
    all_apart,
    apart,
    documents,
    expected,
    padded,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = MODELS | CHUNKED
NAMES = (hugging_face.NAME, "eager")


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    hugging_face.register_with_transformers()


def prompts(pad: str) -> dict[str, Any]:
    """Padded on the left, or of one length."""
    if pad == "none":
        return {"input_ids": torch.cat([documents()[1], documents()[1].flip(1)])}
    given = padded("left")
    del given["position_ids"]
    return given


def generated(model: Any, given: dict[str, Any], **options: Any) -> Any:
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(**given, eos_token_id=None, **options)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("pad", ["left", "none"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "gemma2", "llama4"])
def test_generate(name: str, pad: str, cache: str | None) -> None:
    kind = {} if cache is None else {"cache_implementation": cache}
    found, wanted = (generated(ALL[name].build(n), prompts(pad), **kind) for n in NAMES)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("mask", [False, True], ids=["no mask", "padded"])
@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("name", ["mistral", "llama4"])
def test_a_cache_goes_on(name: str, kind: str, mask: bool) -> None:
    """By several tokens and by one, past its window or chunk."""
    given = padded("left")
    ids, tokens = given["input_ids"], given["attention_mask"]
    if not mask:
        tokens = torch.ones_like(tokens)
    results = []
    for implementation in NAMES:
        model = ALL[name].build(implementation)
        room = {"max_cache_len": 64} if kind == "StaticCache" else {}
        cache = getattr(transformers, kind)(config=model.config, **room)
        parts, at = [], 0
        for n in (9, 1, 6, 1, 1, 5):
            seen = {"attention_mask": tokens[:, : at + n]} if mask else {}
            with torch.no_grad():
                out = model(input_ids=ids[:, at : at + n], past_key_values=cache, **seen)
            parts.append(out.logits[tokens[:, at : at + n].bool()])
            at += n
        results.append(torch.cat(parts))
    assert apart(*results) < 2e-5


# ---- compiled ------------------------------------------------------------------------------------


@pytest.fixture
def graphs() -> Any:
    """How many graphs were compiled since the test began."""
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield lambda: dynamo.utils.counters["stats"]["unique_graphs"]
    dynamo.reset()


def compiled(model: Any) -> Any:
    return torch.compile(model, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("gpt_oss", "packed by cu_seq_lens"),
        ("llama", "packed by position_ids"),
        ("gemma2", "padded on the left"),
        ("llama4", "packed by cu_seq_lens"),
    ],
)
def test_compiled_is_one_graph(name: str, batch: str, graphs: Any) -> None:
    """Forwards and backwards."""
    model, given = ALL[name].build(hugging_face.NAME), BATCHES[batch]()
    logits = compiled(model)(**given, use_cache=False).logits
    assert graphs() == 1
    logits = tiny_models.of_documents(logits, given)
    wanted, of_parameters = expected(name)
    assert apart(logits, wanted) < 2e-5
    found = tiny_models.gradients(model, logits)
    assert max(all_apart(found, of_parameters).values()) < 1e-4


def test_other_documents_need_no_other_graph(graphs: Any) -> None:
    """Once torch has seen that their number and their lengths vary."""
    model = compiled(Model("LlamaConfig", {"num_hidden_layers": 1}).build(hugging_face.NAME))
    counts = []
    for lengths in [(5, 23, 1), (30, 16), (7, 7, 7, 7), (20,) * 6, (3, 40), (2, 2, 9)]:
        ids = torch.randint(3, tiny_models.VOCABULARY, (1, sum(lengths)))
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        model(
            input_ids=ids,
            position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
            cu_seq_lens_q=ends,
            cu_seq_lens_k=ends,
            max_length_q=max(lengths),
            max_length_k=max(lengths),
            use_cache=False,
        )
        counts.append(graphs())
    assert counts[2:] == [counts[1]] * 4


@pytest.mark.parametrize(
    ("name", "pad"), [("llama", "left"), ("llama", "none"), ("mistral", "left")]
)
def test_compiled_generation(name: str, pad: str, graphs: Any) -> None:
    """Of a static cache: no graph for each token, but others when a window is full."""
    compile_config = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    compile_config._compile_all_devices = True
    tiny = Model(MODELS[name].config, MODELS[name].more | {"num_hidden_layers": 1})
    options = {"cache_implementation": "static", "compile_config": compile_config}
    found = generated(tiny.build(hugging_face.NAME), prompts(pad), **options)
    assert 1 <= graphs() <= (3 if name == "mistral" else 1)
    assert torch.equal(found, generated(tiny.build("eager"), prompts(pad)))

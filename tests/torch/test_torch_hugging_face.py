"""Tiny models of transformers with random weights: packed and padded batches by rawattn, and each
sequence alone by transformers' eager attention. Logits, and the gradient of every parameter.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from rawattn.torch import hugging_face  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (5, 23, 1, 17)
VOCABULARY = 97
BASE: dict[str, Any] = {
    "initializer_range": 0.25,  # by transformers' 0.02 attention hardly matters
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Model:
    config: str
    more: dict[str, Any] = field(default_factory=dict)

    def build(self, implementation: str) -> Any:
        given = {**BASE, **self.more}
        given = {name: value for name, value in given.items() if value is not None}
        config = getattr(transformers, self.config)(**given)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=implementation, dtype=torch.float32
        )
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter)
        return model.eval()


MODELS = {
    "llama": Model("LlamaConfig"),
    "qwen2": Model("Qwen2Config"),
    "qwen3": Model("Qwen3Config"),
    "mistral": Model("MistralConfig", {"sliding_window": 8}),
    "gemma2": Model("Gemma2Config", {**SLIDING, "attn_logit_softcapping": 2.0}),
    "gemma3": Model("Gemma3TextConfig", SLIDING),
    "gpt_oss": Model("GptOssConfig", {**SLIDING, "num_local_experts": 4}),
    "phi3": Model("Phi3Config", {"sliding_window": 8}),
    "olmo3": Model("Olmo3Config", SLIDING),
    "cohere2": Model("Cohere2Config", SLIDING),
    "deepseek_v3": Model(
        "DeepseekV3Config",
        {
            "head_dim": None,
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 2,
        },
    ),
}


def documents() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (1, n), generator=generator) for n in LENGTHS]


def packed() -> dict[str, Any]:
    ids = torch.cat(documents(), 1)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"input_ids": ids, "position_ids": positions}


def with_offsets() -> dict[str, Any]:
    ends = torch.tensor((0, *LENGTHS)).cumsum(0).int()
    longest = max(LENGTHS)
    names = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    return packed() | names | {"max_length_q": longest, "max_length_k": longest}


def padded(side: str) -> dict[str, Any]:
    longest, rows, masks = max(LENGTHS), [], []
    for ids in documents():
        pad = (longest - ids.shape[1], 0) if side == "left" else (0, longest - ids.shape[1])
        rows.append(torch.nn.functional.pad(ids, pad))
        masks.append(torch.nn.functional.pad(torch.ones_like(ids), pad))
    mask = torch.cat(masks)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": torch.cat(rows), "attention_mask": mask, "position_ids": positions}


BATCHES = {
    "packed by position_ids": packed,
    "packed by cu_seq_lens": with_offsets,
    "padded on the right": lambda: padded("right"),
    "padded on the left": lambda: padded("left"),
}


def tokens(logits: Any, batch: dict[str, Any]) -> Any:
    """Those of the documents, one after the other."""
    mask = batch.get("attention_mask")
    return logits[0] if mask is None else logits[mask.bool()]


def weights(count: int) -> Any:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, VOCABULARY, generator=generator)


def gradients(model: Any, logits: Any) -> dict[str, Any]:
    model.zero_grad()
    (logits * weights(len(logits))).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    hugging_face.register_with_transformers()


@pytest.fixture(scope="module")
def exact() -> dict[str, Any]:
    return {}


def expected(exact: dict[str, Any], name: str) -> tuple[Any, dict[str, Any]]:
    """By eager attention, sequence by sequence."""
    if name not in exact:
        model = MODELS[name].build("eager")
        logits = torch.cat([model(ids, use_cache=False).logits[0] for ids in documents()])
        exact[name] = logits.detach(), gradients(model, logits)
    found: tuple[Any, dict[str, Any]] = exact[name]
    return found


def apart(got: Any, wanted: Any) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, batch: str, exact: dict[str, Any]) -> None:
    model, given = MODELS[name].build(hugging_face.NAME), BATCHES[batch]()
    logits = tokens(model(**given, use_cache=False).logits, given)
    wanted, of_parameters = expected(exact, name)
    assert apart(logits.detach(), wanted) < 2e-5
    found = gradients(model, logits)
    assert found.keys() == of_parameters.keys()
    assert max(apart(found[n], of_parameters[n]) for n in found) < 1e-4


# ---- what the models must notice ----------------------------------------------------------------

MUTANTS = {
    "a leak between documents": (
        "llama",
        lambda q, k, v, cu_q, cu_k, given: ((q, k, v, cu_q[[0, -1]], cu_k[[0, -1]]), given),
    ),
    "no window": ("mistral", lambda *x: (x[:5], x[5] | {"window": (-1, -1)})),
    "a window of one more": (
        "mistral",
        lambda *x: (x[:5], x[5] | {"window": (x[5]["window"][0] + 1, -1)}),
    ),
    "no sinks": ("gpt_oss", lambda *x: (x[:5], x[5] | {"sinks": None})),
    "no softcap": ("gemma2", lambda *x: (x[:5], x[5] | {"softcap": None})),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_seen(
    mutant: str, exact: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change = MUTANTS[mutant]
    real = hugging_face.varlen_attn

    def mutated(*args: Any, **given: Any) -> Any:
        args, given = change(*args, given)
        return real(*args, **given)

    monkeypatch.setattr(hugging_face, "varlen_attn", mutated)
    given = packed()
    logits = MODELS[name].build(hugging_face.NAME)(**given, use_cache=False).logits[0]
    assert apart(logits.detach(), expected(exact, name)[0]) > 1e-2


# ---- generation, checkpointing, encoders ---------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("pad", ["left", "none"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "gemma2"])
def test_generate(name: str, pad: str, cache: str) -> None:
    """With a cache of keys: a batch padded on the left, and one of equal lengths."""
    given = padded("left")
    del given["position_ids"]
    if pad == "none":
        given = {"input_ids": torch.cat([documents()[1], documents()[1].flip(1)])}
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    kind = {} if cache == "dynamic" else {"cache_implementation": "static"}
    found, wanted = (
        MODELS[name].build(implementation).generate(**given, **options, **kind)
        for implementation in (hugging_face.NAME, "eager")
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_gradient_checkpointing(name: str, exact: dict[str, Any]) -> None:
    model, given = MODELS[name].build(hugging_face.NAME), packed()
    model.train()
    model.gradient_checkpointing_enable()
    logits = model(**given, use_cache=False).logits[0]
    found, wanted = gradients(model, logits), expected(exact, name)[1]
    assert max(apart(found[n], wanted[n]) for n in found) < 1e-4


ENCODERS = {
    "bert": ("BertConfig", {}),
    "modernbert": (
        "ModernBertConfig",
        {
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name: str, side: str) -> None:
    """They see what comes after a token too."""
    config, more = ENCODERS[name]
    given = padded(side)
    del given["position_ids"]
    found = []
    for implementation in (hugging_face.NAME, "eager"):
        torch.manual_seed(0)
        of_model = {n: x for n, x in BASE.items() if n not in ("head_dim", "num_key_value_heads")}
        made = getattr(transformers, config)(**of_model, **more)
        model = transformers.AutoModel.from_config(
            made, attn_implementation=implementation, dtype=torch.float32
        ).eval()
        found.append(model(**given).last_hidden_state[given["attention_mask"].bool()])
    assert apart(*found) < 2e-5


# ---- what it refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["my_flash", "sdpa", "eager"])
def test_names_of_transformers_are_left_to_it(name: str) -> None:
    with pytest.raises(ValueError, match="transformers treats names"):
        hugging_face.register_with_transformers(name)


def test_dropout_is_refused() -> None:
    model = Model("LlamaConfig", {"attention_dropout": 0.1}).build(hugging_face.NAME).train()
    with pytest.raises(ValueError, match=r"attention dropout is 0\.1.*attention_dropout to 0"):
        model(**packed(), use_cache=False)

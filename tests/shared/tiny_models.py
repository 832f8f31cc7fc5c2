"""Tiny models of transformers with random weights, drawn wide so that attention matters.

Batches of a few documents, packed and padded, and what eager attention makes of each document
alone: logits, and the gradient of every parameter.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers

LENGTHS = (5, 23, 1, 17)
VOCABULARY = 97
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
BASE: dict[str, Any] = {
    **SIZES,
    "initializer_range": 0.25,  # by transformers' 0.02 attention hardly matters
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
LAYERS = ["sliding_attention", "full_attention"]
SLIDING = {"sliding_window": 8, "layer_types": LAYERS}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,
}


@dataclass(frozen=True)
class Model:
    """A config's class, what it is given beside BASE (None: not given), and transformers' class."""

    config: str
    more: dict[str, Any] = field(default_factory=dict)
    of: str = "AutoModelForCausalLM"
    base: bool = True

    def build(self, implementation: str, dtype: Any = torch.float32) -> Any:
        given = (BASE if self.base else {}) | self.more
        given = {name: value for name, value in given.items() if value is not None}
        config = getattr(transformers, self.config)(**given)
        torch.manual_seed(0)
        model = getattr(transformers, self.of).from_config(
            config, attn_implementation=implementation, dtype=torch.float32
        )
        for name, parameter in model.named_parameters():
            if "sink" in name:
                torch.nn.init.normal_(parameter)
        return model.to(dtype).eval()


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
    "deepseek_v3": Model("DeepseekV3Config", LATENT),
}
CHUNKED = {
    "llama4": Model(
        "Llama4TextConfig",
        {
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
            "moe_layers": [],
        },
    )
}


def documents(device: str = "cpu") -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randint(3, VOCABULARY, (1, n), generator=generator) for n in LENGTHS)
    return [ids.to(device) for ids in drawn]


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


BATCHES: dict[str, Callable[[], dict[str, Any]]] = {
    "packed by position_ids": packed,
    "packed by cu_seq_lens": with_offsets,
    "padded on the right": lambda: padded("right"),
    "padded on the left": lambda: padded("left"),
}


def of_documents(results: Any, batch: dict[str, Any]) -> Any:
    """Their tokens', one after the other."""
    mask = batch.get("attention_mask")
    return results.flatten(0, 1) if mask is None else results[mask.bool()]


def cotangents(logits: Any) -> Any:
    """Random ones of all documents' logits."""
    drawn = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    return drawn.to(logits)


def of_parameters(model: Any) -> dict[str, Any]:
    """The gradients that there are; 0 of what is not looked at."""
    named = model.named_parameters()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}


def gradients(model: Any, logits: Any) -> dict[str, Any]:
    """Of every parameter, for ``cotangents`` of the logits."""
    model.zero_grad()
    (logits * cotangents(logits)).sum().backward()
    return of_parameters(model)


def one_by_one(model: Any) -> Any:
    """The logits of each document alone."""
    ids = documents(model.device)
    return torch.cat([model(input_ids=each, use_cache=False).logits[0] for each in ids])


@cache
def expected(name: str) -> tuple[Any, dict[str, Any]]:
    """By eager attention, document by document: logits, and every parameter's gradient."""
    model = (MODELS | CHUNKED)[name].build("eager")
    logits = one_by_one(model)
    return logits.detach(), gradients(model, logits)


def apart(got: Any, wanted: Any, least: float = 1e-6) -> float:
    """The largest difference, over the size of what is wanted."""
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=least))


def all_apart(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """Of each parameter's gradient; one that is nearly 0, as of a key's bias, counts as 0."""
    assert found.keys() == wanted.keys()
    least = 1e-3 * max(float(x.abs().max()) for x in wanted.values())
    return {name: apart(found[name], wanted[name], least) for name in found}


def mutants(of_module: Any) -> dict[str, tuple[str, Callable[..., Any]]]:
    """What a model must notice: its name, and what then stands for ``of_module.varlen_attn``."""
    real = of_module.varlen_attn

    def given(model: str, change: Callable[..., dict[str, Any]]) -> tuple[str, Callable[..., Any]]:
        return model, lambda *args, **named: real(*args, **named | change(**named))

    def leaking(q: Any, k: Any, v: Any, of_q: Any, of_k: Any, **named: Any) -> Any:
        return real(q, k, v, of_q[[0, -1]], of_k[[0, -1]], **named)

    return {
        "a leak between documents": ("llama", leaking),
        "no window": given("mistral", lambda **_: {"window": (-1, -1)}),
        "a window of one more": given(
            "mistral", lambda window, **_: {"window": (window[0] + 1, -1)}
        ),
        "no sinks": given("gpt_oss", lambda **_: {"sinks": None}),
        "no softcap": given("gemma2", lambda **_: {"softcap": None}),
    }

"""Models of transformers with random weights: their shapes, the work they get, their losses."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from implementations import available
from models import at_least_float32
from packing import TextPack
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

LLAMA = {  # Llama 3.2 1B
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
GPT_OSS = {  # a layer of gpt-oss 20B but for its number of experts; every other one has the window
    "vocab_size": 32768,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}
TINY = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
KINDS = {"llama_128": "llama"}  # what transformers calls a model, where it differs
SHAPES: dict[str, dict[str, dict[str, Any]]] = {  # by device and model
    "cuda": {
        "llama": LLAMA,
        "llama_128": LLAMA | {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128},
        "gpt_oss": GPT_OSS,
    },
    "cpu": {
        "llama": TINY,
        "llama_128": TINY | {"head_dim": 128},
        "gpt_oss": TINY | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    },
}


@dataclass(frozen=True)
class Work:
    """What a model is trained on, and in what precision."""

    tokens: int  # in a batch
    longest: int  # document
    steps: int  # that are timed together, each of another batch
    dtype: torch.dtype


WORK = {
    "cpu": Work(256, 96, 1, torch.float32),
    "cuda": Work(16384, 8192, 2, torch.bfloat16),
}


def build(model: str, device: str, dtype: torch.dtype, seed: int) -> nn.Module:
    """A model with random weights; the experts of all tokens are multiplied by one call."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(KINDS.get(model, model), **SHAPES[device][model])
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=available("rawattn")
        )
    if hasattr(config, "num_local_experts"):
        made.set_experts_implementation("grouped_mm")
    return made.train()


def masks(model: nn.Module, pack: TextPack) -> dict[str, Any] | None:
    """The masks of a model with windows; others make theirs.

    gpt-oss asks for its own without positions (transformers 5.17 to 5.23), and so attentions that
    need a mask would let documents see each other.
    """
    if not getattr(model.config, "sliding_window", None):
        return None
    what = {
        "config": model.config,
        "inputs_embeds": pack.inputs.new_empty((1, len(pack.inputs), 0), dtype=model.dtype),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": pack.positions[None],
    }
    return {
        "full_attention": create_causal_mask(**what),
        "sliding_attention": create_sliding_window_causal_mask(**what),
    }


def token_losses(model: nn.Module, pack: TextPack) -> Tensor:
    """Nats of each token."""
    longest = max(pack.lengths)
    logits = model(
        input_ids=pack.inputs[None],
        attention_mask=masks(model, pack),
        position_ids=pack.positions[None],
        cu_seq_lens_q=pack.cu_seqlens,
        cu_seq_lens_k=pack.cu_seqlens,
        max_length_q=longest,
        max_length_k=longest,
        use_cache=False,
    ).logits[0]
    return F.cross_entropy(at_least_float32(logits), pack.targets, reduction="none")

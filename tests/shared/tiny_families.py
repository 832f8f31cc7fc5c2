"""Tiny models of the other families of transformers: decoders, encoders, both, vision towers."""

from typing import Any

import torch

from tests.shared.tiny_models import EXPERTS, LATENT, LAYERS, SIZES, SLIDING, VOCABULARY, Model

_WIDE = {"initializer_range": 0.25, "vocab_size": VOCABULARY, "pad_token_id": 0}

DECODERS = {
    "smollm3": Model("SmolLM3Config"),
    "olmo2": Model("Olmo2Config"),
    "granite": Model("GraniteConfig"),
    "glm4": Model("Glm4Config"),
    "nemotron": Model("NemotronConfig"),
    "ministral": Model("MinistralConfig", SLIDING),
    "mixtral": Model("MixtralConfig", {"num_local_experts": 4, "sliding_window": 8}),
    "starcoder2": Model("Starcoder2Config", {"sliding_window": 8}),
    "exaone4": Model("Exaone4Config", SLIDING),
    "vaultgemma": Model("VaultGemmaConfig", {**SLIDING, "attn_logit_softcapping": 2.0}),
    "gemma3n": Model(
        "Gemma3nTextConfig",
        {
            **SLIDING,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "intermediate_size": [96, 96],
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0, 0.0],
        },
    ),
    "gemma4, narrow": Model(
        "Gemma4TextConfig",
        {
            **SLIDING,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 16,
        },
    ),
    "mimo_v2_flash": Model("MiMoV2FlashConfig", {**SLIDING, **EXPERTS}),
    "granite_swa": Model("GraniteSWAConfig", SLIDING),
    "granitemoe_swa": Model("GraniteMoeSWAConfig", {**SLIDING, "num_local_experts": 4}),
    "flint": Model("FlintConfig", SLIDING),
    "deepseek_v2": Model("DeepseekV2Config", LATENT),
    "persimmon": Model("PersimmonConfig"),  # keeps position_ids to itself, as the next
    "moshi": Model("MoshiConfig"),
}
# Of these some layers are linear, which transformers itself does not do packed by position_ids.
HALF_LINEAR = {
    name: Model(
        config,
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    )
    for name, config in {"qwen3_next": "Qwen3NextConfig", "qwen3_5": "Qwen3_5TextConfig"}.items()
}

# BERT's relatives know no head_dim and no groups of heads, and have another dropout.
_BERT = {"head_dim": None, "num_key_value_heads": None, "hidden_dropout_prob": 0.0}


def _encoder(config: str, **more: Any) -> Model:
    return Model(config, more, "AutoModel")


ENCODERS = {
    "bert": _encoder("BertConfig", **_BERT),
    "roberta": _encoder("RobertaConfig", **_BERT | {"pad_token_id": 1}),  # positions from 2 on
    "distilbert": _encoder("DistilBertConfig", **_BERT, dim=64, n_heads=4, n_layers=2),
    "esm": _encoder("EsmConfig", **_BERT),
    "eurobert": _encoder("EuroBertConfig"),
    "modernbert": _encoder(
        "ModernBertConfig",
        **_BERT,
        local_attention=8,
        global_attn_every_n_layers=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    "gemma3, both ways": _encoder("Gemma3TextConfig", **SLIDING, use_bidirectional_attention=True),
    "openai_privacy_filter": _encoder("OpenAIPrivacyFilterConfig", sliding_window=8),
    "llama, both ways": _encoder("LlamaConfig", is_causal=False),
}

_BART = {
    **_WIDE,
    "init_std": 0.25,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "decoder_start_token_id": 2,
    "dropout": 0.0,
}
_T5GEMMA = {
    **SLIDING,
    **_WIDE,
    **SIZES,
    "attn_logit_softcapping": 2.0,
    "dropout_rate": 0.0,
}
SEQ2SEQ = {
    "bart": Model("BartConfig", _BART, "AutoModelForSeq2SeqLM", base=False),
    "t5gemma": Model(
        "T5GemmaConfig",
        {
            "encoder": _T5GEMMA,
            "decoder": _T5GEMMA | {"cross_attention_hidden_size": 64},
            "vocab_size": VOCABULARY,
            "dropout_rate": 0.0,
        },
        "AutoModelForSeq2SeqLM",
        base=False,
    ),
}

_TEXT = {
    **_WIDE,
    **SIZES,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [2, 2, 4],
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
    },
}
_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.25,
}
IMAGE = 90
_TOKENS = {"image_token_id": IMAGE, "video_token_id": 93}
_OF_QWEN = {"vision_start_token_id": 91, "vision_end_token_id": 92}
_OF_GLM = {
    "image_start_token_id": 91,
    "image_end_token_id": 92,
    "video_start_token_id": 94,
    "video_end_token_id": 95,
}


def with_tower(config: str, tower: dict[str, Any], tokens: dict[str, int]) -> Model:
    parts = {"text_config": _TEXT, "vision_config": _TOWER | tower}
    return Model(config, parts | _TOKENS | tokens, "AutoModelForImageTextToText", base=False)


TOWERS = {
    "qwen2_5_vl": with_tower(
        "Qwen2_5_VLConfig", {"window_size": 16, "fullatt_block_indexes": [1]}, _OF_QWEN
    ),
    "qwen3_vl": with_tower(
        "Qwen3VLConfig",
        {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        _OF_QWEN,
    ),
    "glm4v": with_tower("Glm4vConfig", {"image_size": 64}, _OF_GLM),
}
GRIDS = ((1, 4, 8), (1, 8, 12), (1, 4, 4))  # of three images: frames, rows and columns of patches


def images() -> dict[str, Any]:
    """A prompt with three images between words."""
    ids: list[int] = []
    for _, rows, columns in GRIDS:
        ids += [5, 6, 91, *[IMAGE] * (rows * columns // 4), 92, 7, 8, 9]
    patches = sum(rows * columns for _, rows, columns in GRIDS)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.tensor([ids])
    return {
        "input_ids": prompt,
        "attention_mask": torch.ones_like(prompt),
        "mm_token_type_ids": (prompt == IMAGE).long(),
        "pixel_values": torch.randn(patches, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor(GRIDS),
    }


# An image's tokens of it see each other both ways.
GEMMA3 = Model(
    "Gemma3Config",
    {
        "text_config": dict(_TEXT, layer_types=LAYERS, sliding_window=8, rope_parameters=None),
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "boi_token_index": 91,
        "eoi_token_index": 92,
    },
    "AutoModelForImageTextToText",
    base=False,
)
# What is not served, and the words for it.
REFUSED = {
    "ALiBi": (Model("BloomConfig"), "bloom computes attention itself, as those with ALiBi"),
    "wide heads": (
        Model(
            "Gemma4TextConfig",
            {**SLIDING, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
        ),
        "head size 512: expected a multiple",
    ),
    "an indexer": (Model("DeepseekV32Config", LATENT), "deepseek_v32 chooses keys by an indexer"),
    "a bias": (
        Model(
            "T5Config",
            {**_WIDE, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
            "AutoModelForSeq2SeqLM",
            base=False,
        ),
        "T5Attention passes position_bias, a bias of positions",
    ),
}

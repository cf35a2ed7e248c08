"""Small random models of every family that transformers loads as a causal language model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

VOCABULARY = 64
WINDOW = 8
"""Tokens that a local attention sees, the token itself included, in every family that has one."""

SIZES: dict[str, Any] = {
    "attention_chunk_size": WINDOW,
    "attention_multiplier": 0.35,
    "attention_window_size": WINDOW,
    "bos_token_id": 1,
    "d_ff": 48,
    "d_model": 32,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "encoder_layers": 1,
    "eos_token_id": 2,
    "ffn_dim": 48,
    "head_dim": 8,
    "hidden_size": 32,
    "hidden_size_global": 32,
    "index_head_dim": 8,
    "index_n_heads": 16,
    "init_std": 0.3,
    "initializer_range": 0.3,
    "intermediate_size": 48,
    "is_decoder": True,
    "kv_lora_rank": 16,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "logit_scale": 1.0,
    "mamba_chunk_size": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "max_position_embeddings": 256,
    "max_seq_len": 256,
    "moe_intermediate_size": 16,
    "n_embd": 32,
    "n_head": 4,
    "n_heads": 4,
    "n_inner": 48,
    "n_layer": 2,
    "n_layers": 2,
    "n_positions": 256,
    "n_routed_experts": 4,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_layers": 2,
    "num_local_experts": 4,
    "pad_token_id": 0,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "use_mamba_kernels": False,
    "v_head_dim": 8,
    "vocab_size": VOCABULARY,
    "window_size": WINDOW,
}
"""Set where a family's configuration knows the name."""

_LOCAL_AND_GLOBAL = {"layer_types": ["sliding_attention", "full_attention"]}
_LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_MLA = {"num_key_value_heads": 4, "head_dim": 8, "n_group": 1, "topk_group": 1}

CHANGES: dict[str, dict[str, Any]] = {
    "afmoe": _LOCAL_AND_GLOBAL,
    "axk1": _MLA,
    "axk2": {**_MLA, "index_topk": 4},
    "bailing_hybrid": {
        **_LINEAR_AND_FULL,
        "head_dim": 8,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
    },
    "bamba": {"attn_layer_indices": [1]},
    "beam": {**_LOCAL_AND_GLOBAL, "n_group": 1, "topk_group": 1},
    "blt": {"encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [3, 4]},
    "codegen": {"rotary_dim": 4},
    "cohere2": _LOCAL_AND_GLOBAL,
    "cohere2_moe": _LOCAL_AND_GLOBAL,
    "cohere_compass_text": {
        **_LOCAL_AND_GLOBAL,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "cpmant": {"dim_head": 8, "dim_ff": 48, "prompt_length": 2, "segment_types": 40},
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "deepseek_v2": {**_MLA, "topk_method": "greedy", "first_k_dense_replace": 1},
    "deepseek_v3": {**_MLA, "first_k_dense_replace": 1},
    "deepseek_v32": {**_MLA, "first_k_dense_replace": 1, "index_topk": 4},
    "dory": {
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 0,
    },
    "dots1": {
        **_LOCAL_AND_GLOBAL,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
    },
    "dots3_note_text": {
        "per_layer_config": {1: {"kv_lora_rank": 12}},
        "layer_types": ["indexed_attention", "sliding_attention"],
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 16,
        "num_key_value_heads": 4,
        "index_topk": 4,
        "shared_experts_intermediate_size": 16,
    },
    "exaone4": _LOCAL_AND_GLOBAL,
    "falcon_h1": {"mamba_d_ssm": 64},
    "flint": _LOCAL_AND_GLOBAL,
    "gemma2": _LOCAL_AND_GLOBAL,
    "gemma3_text": _LOCAL_AND_GLOBAL,
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "global_head_dim": 16,
        "num_experts": None,
    },
    "gemma4_unified_text": {**_LOCAL_AND_GLOBAL, "global_head_dim": 16},
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": {**_MLA, "index_topk": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": _LINEAR_AND_FULL,
    "hrm_text": {"H_cycles": 1, "L_cycles": 1},
    "hy_v4": {**_MLA, "index_topk": 4, "indexer_types": ["full", "shared"]},
    "inkling2_loop_text": {
        "unpadded_vocab_size": VOCABULARY,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "rel_extent": 16,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
        "loop_gate_rank": 4,
    },
    "inkling2_text": {
        "unpadded_vocab_size": VOCABULARY,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "rel_extent": 16,
        "layer_types": ["hybrid_sliding", "hybrid"],
        "n_layers_per_attn_res_block": 1,
    },
    "inkling_text": {
        "logits_mup_width_multiplier": 1.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "rel_extent": 16,
        "layer_types": ["hybrid_sliding", "hybrid"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "kimi_linear": {
        **_LINEAR_AND_FULL,
        "head_dim": 8,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 4,
    },
    "kolibri1": _LOCAL_AND_GLOBAL,
    "laguna": _LOCAL_AND_GLOBAL,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3,
    },
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
    },
    "longcat_flash": {
        "expert_ffn_hidden_size": 16,
        "ffn_hidden_size": 48,
        "head_dim": 8,
        "moe_topk": 2,
        "num_key_value_heads": 4,
        "zero_expert_num": 2,
    },
    "mamba2": {"head_dim": 16, "n_groups": 1, "state_size": 8, "chunk_size": 8},
    "mellum": _LOCAL_AND_GLOBAL,
    "minicpm3": {"num_key_value_heads": 4, "head_dim": 8, "scale_emb": 1, "dim_model_base": 32},
    "nemotron_h": {
        "mamba_head_dim": 16,
        "mamba_num_heads": 4,
        "n_groups": 1,
        "ssm_state_size": 8,
        "moe_shared_expert_intermediate_size": 16,
        "chunk_size": 8,
    },
    "olmo3": _LOCAL_AND_GLOBAL,
    "qwen2_moe": {"shared_expert_intermediate_size": 16},
    "qwen3_5_moe_text": _LINEAR_AND_FULL,
    "qwen3_5_text": _LINEAR_AND_FULL,
    "qwen3_next": _LINEAR_AND_FULL,
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "hc_lowrank": 8,
        "shared_expert_intermediate_size": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {
        "w_init_variance_scale": 1.0,
        "block_types": ["recurrent", "attention"],
        "lru_width": 32,
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "roc_bert": {
        "pronunciation_vocab_size": 1,
        "shape_vocab_size": 1,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "sarvam_mla": {**_MLA, "first_k_dense_replace": 1},
    "xlm": {"causal": True, "embed_init_std": 0.3},
    "xlstm": {"hidden_size": 128, "num_blocks": 2},
    "xmod": {"default_language": "en_XX"},
    "youtu": {"embedding_initializer_range": 0.3, "num_key_value_heads": 4, "head_dim": 8},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "mamba_dt_rank": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "chunk_size": 8,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
    "zaya": {
        "layer_types": ["hybrid_sliding", "hybrid"],
        "num_experts_per_tok": 1,
    },
}
"""What a family needs beyond the sizes."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon, ALiBi": ("falcon", {"alibi": True}),
    "falcon, old decoder": ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "gemma4_text, experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
    ),
    "granitemoehybrid, attention only": (
        "granitemoehybrid",
        {"layer_types": ["full_attention", "full_attention"]},
    ),
    "phi3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.0, 1.0, 1.0],
                "long_factor": [4.0, 3.0, 2.0, 1.5],
            },
        },
    ),
    "qwen2, window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3, window": ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}),
}
"""Configurations beside a family's default: family, and what differs."""

REFUSED = {
    **{
        family: "encoder-decoder: lm-eval loads it as such, and the tasks refuse it"
        for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if family in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    },
    "cpmant": "what follows a text changes what it predicts; found by the self-check",
    "xlnet": "attends in both directions; found by the self-check",
    "musicgen": "predicts audio codes of several codebooks, not text",
    "musicgen_melody": "predicts audio codes of several codebooks, not text",
    "gemma4_assistant": "drafts for another model and needs that one's hidden states",
    "gemma4_unified_assistant": "drafts for another model and needs that one's hidden states",
}
"""Families that cannot be scored, and why."""

UNTESTED = {
    "dots3_note": "its vision encoder cannot be made small; the text model is dots3_note_text",
    "gemma3n": "its vision encoder is timm's; the text model is gemma3n_text",
}
"""Families that cannot be built small, and why."""

FAMILIES = sorted(
    {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS} - REFUSED.keys() - UNTESTED.keys()
)
"""What is tested; families of a later transformers included."""


def configuration(family: str, **changes: Any) -> Any:
    """The small configuration of a family.

    Args:
        family: A model type of transformers, or one of `VARIANTS`.
        changes: Further fields.
    """
    family, variant = VARIANTS.get(family, (family, {}))
    return _configuration(CONFIG_MAPPING[family], variant | changes)


def build(family: str, **changes: Any) -> Any:
    """The same random model of a family at each call, with logits of a few nats.

    Args:
        family: As for `configuration`.
        changes: The same.
    """
    torch.manual_seed(0)
    load: Any = AutoModelForCausalLM.from_config  # has no type hints
    return load(configuration(family, **changes), dtype=torch.float32).eval()


def _configuration(make: Any, changes: dict[str, Any]) -> Any:
    default = make()
    known = {*default.to_dict(), *make.attribute_map}
    options = {name: value for name, value in SIZES.items() if name in known}
    for name in make.sub_configs:
        part = getattr(default, name, None)
        if part is not None:
            options[name] = _configuration(type(part), {}).to_dict()
    return make(**(options | CHANGES.get(default.model_type, {}) | changes))

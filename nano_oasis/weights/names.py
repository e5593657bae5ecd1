"""Names and shapes of every parameter: what a checkpoint of a given ModelConfig must hold.

Owns: canonical names, and their names in Hugging Face and in GGUF files. Adding a family whose tensors
have other names means adding a column here. Must not know: files, number formats.
"""

from __future__ import annotations

from nano_oasis.config import ModelConfig

# canonical name within a layer: (Hugging Face, GGUF); the first matches after "model.layers.<i>.", the
# second after "blk.<i>."
_LAYER = {
    "attn_norm": ("input_layernorm.weight", "attn_norm.weight"),
    "q": ("self_attn.q_proj.weight", "attn_q.weight"),
    "k": ("self_attn.k_proj.weight", "attn_k.weight"),
    "v": ("self_attn.v_proj.weight", "attn_v.weight"),
    "o": ("self_attn.o_proj.weight", "attn_output.weight"),
    "q_bias": ("self_attn.q_proj.bias", "attn_q.bias"),
    "k_bias": ("self_attn.k_proj.bias", "attn_k.bias"),
    "v_bias": ("self_attn.v_proj.bias", "attn_v.bias"),
    "o_bias": ("self_attn.o_proj.bias", "attn_output.bias"),
    "q_norm": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "k_norm": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "post_attn_norm": ("post_attention_layernorm.weight", "post_attention_norm.weight"),
    "mlp_norm": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "gate": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "up": ("mlp.up_proj.weight", "ffn_up.weight"),
    "down": ("mlp.down_proj.weight", "ffn_down.weight"),
    "gate_bias": ("mlp.gate_proj.bias", "ffn_gate.bias"),
    "up_bias": ("mlp.up_proj.bias", "ffn_up.bias"),
    "down_bias": ("mlp.down_proj.bias", "ffn_down.bias"),
    "post_mlp_norm": ("post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
}
# With norms on both sides, Hugging Face's "post attention" norm is just that, and the one before the MLP is:
_SANDWICH_MLP_NORM = "pre_feedforward_layernorm.weight"
# Where the text model sits: on its own, and in two generations of Gemma 3's vision wrapper.
HF_PREFIXES = ("model.", "language_model.model.", "model.language_model.")


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every parameter; "lm_head" is left out when it is the embedding."""
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    hidden, inner = c.hidden_size, c.intermediate_size
    layer: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,)}
    layer |= {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    if c.qkv_bias:
        layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if c.o_bias:
        layer |= {"o_bias": (hidden,)}
    if c.qk_norm:
        layer |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
    layer |= {"mlp_norm": (hidden,), "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    if c.mlp_bias:
        layer |= {"gate_bias": (inner,), "up_bias": (inner,), "down_bias": (hidden,)}
    if c.sandwich_norms:
        layer |= {"post_attn_norm": (hidden,), "post_mlp_norm": (hidden,)}
    shapes: dict[str, tuple[int, ...]] = {"embed": (c.vocab_size, hidden)}
    for i in range(c.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["final_norm"] = (hidden,)
    if not c.tie_embeddings:
        shapes["lm_head"] = (c.vocab_size, hidden)
    return shapes


def is_norm(name: str) -> bool:
    """Whether a canonical name is that of an RMSNorm weight."""
    return name.endswith("norm")


def hf_name(name: str, config: ModelConfig, prefix: str = "model.") -> str:
    """The name in Hugging Face files of the parameter with canonical name `name`."""
    if name == "lm_head":
        return "language_model.lm_head.weight" if prefix == "language_model.model." else "lm_head.weight"
    if name in ("embed", "final_norm"):
        return prefix + {"embed": "embed_tokens.weight", "final_norm": "norm.weight"}[name]
    _, layer, part = name.split(".")
    if part == "mlp_norm" and config.sandwich_norms:
        return f"{prefix}layers.{layer}.{_SANDWICH_MLP_NORM}"
    return f"{prefix}layers.{layer}.{_LAYER[part][0]}"


def gguf_name(name: str) -> str:
    """The name in GGUF files of the parameter with canonical name `name`."""
    outside = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"}
    if name in outside:
        return outside[name]
    _, layer, part = name.split(".")
    return f"blk.{layer}.{_LAYER[part][1]}"

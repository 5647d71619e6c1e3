"""A slow decoder in NumPy float64, straight from ``config.json`` and published names.

It knows nothing of the library: what a key means, which defaults a family has and what
a tensor is called are written down here a second time.
"""

import math

import numpy as np


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "silu": silu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
}


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def rms(x, gain, epsilon=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * gain


def layer_norm(x, t, name, epsilon=1e-5):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    return x * t[f"{name}.weight"] + t[f"{name}.bias"]


def rope_tables(rope, theta, width, num, longest):
    """Angles of every position, and the factor on their cosine and sine."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", theta)
    out, factor = [], 1.0
    original = rope.get("original_max_position_embeddings", longest)
    for i in range(width // 2):
        f = theta ** (-2 * i / width)
        if kind == "linear":
            f /= rope["factor"]
        if kind == "llama3":
            turns = original * f / (2 * math.pi)
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if turns < low:
                f /= rope["factor"]
            elif turns <= high:
                s = (turns - low) / (high - low)
                f = (1 - s) * f / rope["factor"] + s * f
        if kind == "yarn":

            def where(rotations):
                x = original / (rotations * 2 * math.pi)
                return width * math.log(x) / (2 * math.log(theta))

            low, high = (
                where(rope.get("beta_fast", 32)),
                where(rope.get("beta_slow", 1)),
            )
            if rope.get("truncate", True):
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, width - 1)
            ramp = min(max((i - low) / ((high - low) or 1e-3), 0), 1)
            f = f / rope["factor"] * ramp + f * (1 - ramp)
        out.append(f)
    if kind == "yarn":

        def m(c):
            return 0.1 * c * math.log(rope["factor"]) + 1

        if "attention_factor" in rope:
            factor = rope["attention_factor"]
        elif "mscale" in rope and "mscale_all_dim" in rope:
            factor = m(rope["mscale"]) / m(rope["mscale_all_dim"])
        else:
            factor = m(1)
    return np.arange(num)[:, None] * np.asarray(out), factor


def rotate(x, tables):
    angle, factor = tables
    cos, sin = np.cos(angle)[:, None] * factor, np.sin(angle)[:, None] * factor
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(query, key, value, scale, window):
    """[T, heads, D] each; query head h reads key/value head h // (A / K)."""
    num, heads, _ = query.shape
    distance = np.arange(num)[:, None] - np.arange(num)[None]
    seen = (distance >= 0) & (distance < (window or num))
    out = []
    for h in range(heads):
        group = h // (heads // key.shape[1])
        scores = query[:, h] @ key[:, group].T * scale
        out.append(softmax(np.where(seen, scores, -np.inf)) @ value[:, group])
    return np.concatenate(out, -1)


def gpt2(c, t, tokens):
    t = {k.removeprefix("transformer."): v for k, v in t.items()}
    width, heads = c["n_embd"], c["n_head"]
    act = ACTIVATIONS[c.get("activation_function", "gelu_new")]
    x = t["wte.weight"][tokens] + t["wpe.weight"][: len(tokens)]
    for i in range(c["n_layer"]):
        scale = (width // heads) ** -0.5 if c.get("scale_attn_weights", True) else 1
        if c.get("scale_attn_by_inverse_layer_idx"):
            scale /= i + 1
        h = layer_norm(x, t, f"h.{i}.ln_1")
        h = h @ t[f"h.{i}.attn.c_attn.weight"] + t[f"h.{i}.attn.c_attn.bias"]
        qkv = (p.reshape(len(x), heads, -1) for p in np.split(h, 3, -1))
        h = attention(*qkv, scale, None)
        x = x + h @ t[f"h.{i}.attn.c_proj.weight"] + t[f"h.{i}.attn.c_proj.bias"]
        h = layer_norm(x, t, f"h.{i}.ln_2")
        h = act(h @ t[f"h.{i}.mlp.c_fc.weight"] + t[f"h.{i}.mlp.c_fc.bias"])
        x = x + h @ t[f"h.{i}.mlp.c_proj.weight"] + t[f"h.{i}.mlp.c_proj.bias"]
    tied = c.get("tie_word_embeddings", True)
    head = t["wte.weight"] if tied else t["lm_head.weight"]
    return layer_norm(x, t, "ln_f") @ head.T


def slides(c, i):
    """Whether a layer has a sliding window."""
    if "layer_types" in c:
        return c["layer_types"][i] == "sliding_attention"
    if c["model_type"] == "gemma3_text":
        pattern = c.get("sliding_window_pattern", c.get("_sliding_window_pattern", 6))
        return (i + 1) % pattern != 0
    if c["model_type"] == "mistral":
        return True
    if not c.get("use_sliding_window", False):
        return False
    return c["model_type"] == "qwen3_moe" or i >= c.get("max_window_layers", 28)


def mlp(c, t, prefix, x):
    default = "gelu_pytorch_tanh" if c["model_type"] == "gemma3_text" else "silu"
    act = ACTIVATIONS[c.get("hidden_activation", c.get("hidden_act", default))]

    def linear(name, x):
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0)

    experts = c.get("num_experts", c.get("num_local_experts"))
    i = int(prefix.split(".")[2])
    if (
        not experts
        or i in c.get("mlp_only_layers", [])
        or (i + 1) % c.get("decoder_sparse_step", 1)
    ):
        gate, up = linear(f"{prefix}.gate_proj", x), linear(f"{prefix}.up_proj", x)
        return linear(f"{prefix}.down_proj", act(gate) * up)
    odds = softmax(x @ t[f"{prefix}.gate.weight"].T)
    out = np.zeros_like(x)
    for row in range(len(x)):
        chosen = np.argsort(-odds[row])[: c["num_experts_per_tok"]]
        weights = odds[row][chosen]
        if c.get("norm_topk_prob", False):
            weights = weights / weights.sum()
        for e, weight in zip(chosen, weights, strict=True):
            gate_up = t[f"{prefix}.experts.gate_up_proj"][e] @ x[row]
            gate, up = np.split(gate_up, 2)
            down = t[f"{prefix}.experts.down_proj"][e]
            out[row] += weight * (down @ (act(gate) * up))
    return out


def llama(c, t, tokens):
    """Llama and its descendants, with the experts of a mixture in fused tensors."""
    is_gemma = c["model_type"] == "gemma3_text"
    heads = c.get("num_attention_heads", 8)
    groups = c.get("num_key_value_heads", 4 if is_gemma else heads)
    default = 256 if is_gemma else c["hidden_size"] // heads
    width = c.get("head_dim", default)
    longest = c["max_position_embeddings"]
    scale = (c.get("query_pre_attn_scalar", 256) if is_gemma else width) ** -0.5
    one = 1.0 if is_gemma else 0.0

    def norm(x, name):
        return rms(x, t[f"{name}.weight"] + one)

    def rope(is_local):
        new = c.get("rope_parameters")
        if is_gemma and is_local:
            settings = new["sliding_attention"] if new else {}
            theta = c.get("rope_local_base_freq", 1e4)
        else:
            settings = new or c.get("rope_scaling") or {}
            settings = settings.get("full_attention", settings)
            theta = c.get("rope_theta", 1e6 if is_gemma else 1e4)
        return rope_tables(settings, theta, width, len(tokens), longest)

    x = t["model.embed_tokens.weight"][tokens]
    if is_gemma:
        x = x * np.sqrt(c["hidden_size"])
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        parts = []
        for letter, num in (("q", heads), ("k", groups), ("v", groups)):
            name = f"{layer}.self_attn.{letter}_proj"
            part = h @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0)
            part = part.reshape(len(x), num, width)
            own_norm = f"{layer}.self_attn.{letter}_norm"
            if f"{own_norm}.weight" in t:
                part = norm(part, own_norm)
            parts.append(part if letter == "v" else rotate(part, rope(slides(c, i))))
        window = c["sliding_window"] if slides(c, i) else None
        name = f"{layer}.self_attn.o_proj"
        h = attention(*parts, scale, window) @ t[f"{name}.weight"].T
        h = h + t.get(f"{name}.bias", 0)
        if is_gemma:
            x = x + norm(h, f"{layer}.post_attention_layernorm")
            h = norm(x, f"{layer}.pre_feedforward_layernorm")
            h = mlp(c, t, f"{layer}.mlp", h)
            x = x + norm(h, f"{layer}.post_feedforward_layernorm")
        else:
            x = x + h
            h = norm(x, f"{layer}.post_attention_layernorm")
            x = x + mlp(c, t, f"{layer}.mlp", h)
    tied = c.get("tie_word_embeddings", is_gemma)
    head = t["model.embed_tokens.weight" if tied else "lm_head.weight"]
    logits = norm(x, "model.norm") @ head.T
    cap = c.get("final_logit_softcapping")
    return np.tanh(logits / cap) * cap if cap else logits


def logits(config, tensors, tokens):
    """``[T, V]`` for one sequence of token ids."""
    tensors = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    forward = gpt2 if config["model_type"] == "gpt2" else llama
    return forward(config, tensors, np.asarray(tokens))

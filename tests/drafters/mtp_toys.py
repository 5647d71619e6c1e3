"""Tiny MTP drafters with random weights on the target TINY, and a slow reference.

The reference is NumPy, without a cache: it reads whole sequences again for every token
that it drafts.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import toy

from jaxdec import acceptance
from jaxdec.drafters.mtp import mtp
from jaxdec.models.config import RopeConfig
from jaxdec.models.mtp import MtpConfig, init_mtp_params, make_mtp
from jaxdec.models.vocabulary import vocabulary_params
from jaxdec.types import DrafterParams

ONE = dataclasses.replace(toy.TINY_CONFIG, num_layers=1, intermediate_size=96)
GATED = dataclasses.replace(
    ONE,
    attention_gate=True,
    qk_norm=True,
    qkv_bias=True,
    num_kv_heads=1,
    ropes=(RopeConfig(theta=5000.0, rotated=0.25),),
)


def mtp_config(block=ONE, num_modules=1, **kwargs) -> MtpConfig:
    """Modules for TINY; by default one of DeepSeek's kind."""
    block = dataclasses.replace(block, num_layers=num_modules)
    defaults = dict(
        block=block,
        num_target_layers=toy.TINY_CONFIG.num_layers,
        hidden_source="post",
        recycle="post",
    )
    return MtpConfig(**(defaults | kwargs))


CONFIGS = {
    "mtp": (mtp_config(), 4),
    "mtp_own": (
        mtp_config(
            GATED,
            hidden_source="pre",
            recycle="pre",
            own_embedding=True,
            own_head=True,
        ),
        3,
    ),
    "mtp_three": (mtp_config(num_modules=3, hidden_source="pre", recycle="pre"), 3),
    "mtp_turns": (mtp_config(GATED, num_modules=3), 6),
    "mtp_few": (mtp_config(GATED, 2, own_head=True, draft_vocab_size=40), 4),
}
"""By layout: the modules, and how many tokens they draft."""


@functools.cache
def weights(config: MtpConfig, seed: int = 0):
    """Random weights, loud enough that context matters, with gains of their own."""
    own = init_mtp_params(config, jax.random.key(seed))
    rng = np.random.default_rng(seed)

    def lively(path, x):
        name = jax.tree_util.keystr(path)
        if "'scale'" in name or "'bias'" in name:
            noise = rng.normal(size=x.shape).astype(np.float32)
            return x + 0.3 * jnp.asarray(noise)
        return x * 2.0 if "'out'" in name or "'project'" in name else x

    own = jax.tree_util.tree_map_with_path(lively, own)
    if config.is_reduced:
        ids = np.arange(1, 2 * config.head_size, 2)
        own["vocabulary"] = vocabulary_params(ids, config.block.vocab_size)
    return own


class MtpMethod(NamedTuple):
    """A layout: what its target must return, how to make it, its arrays."""

    taps: tuple[int, ...]
    drafter: Any
    """``(coupled, processor) -> Drafter``."""
    params: DrafterParams
    config: MtpConfig
    length: int


@functools.cache
def methods() -> dict[str, MtpMethod]:
    """Every layout on TINY."""

    def make(config, length):
        def drafter(coupled=True, processor=None):
            network = make_mtp(config)
            return mtp(network, length, coupled=coupled, processor=processor)

        params = DrafterParams(own=weights(config), shared=toy.tiny_params())
        return MtpMethod(config.taps, drafter, params, config, length)

    return {name: make(*made) for name, made in CONFIGS.items()}


def compiled(name: str, rule: str = "match", **kwargs) -> toy.Method:
    """A layout as a strategy on TINY, ready for the contract."""
    made = methods()[name]
    return toy.compiled(
        toy.tiny(taps=made.taps),
        made.drafter(coupled=rule == "match"),
        {"match": acceptance.match, "rejection": acceptance.rejection}[rule],
        target=toy.tiny_params(),
        own=made.params.own,
        shared=made.params.shared,
        **kwargs,
    )


ROWS = ("mtp_own", "mtp_three")
"""Rows of the contract: one module, and several."""


def register() -> None:
    """Puts every layout into the contract table."""
    for name in ROWS:
        layout = name.removesuffix("_rejection")
        rule = "rejection" if layout != name else "match"
        toy.OTHERS[name] = functools.partial(compiled, layout, rule)


# ---- A slow reference ----------------------------------------------------------------


class Reference:
    """One sequence, read again from its start whenever something is asked."""

    def __init__(self, config: MtpConfig, params: DrafterParams):
        self.config = config
        self.own, self.shared = jax.tree.map(np.asarray, (params.own, params.shared))

    def table(self, own: bool, name: str):
        if own:
            return self.own[name]
        if name == "head":
            return self.shared["head"]["weight"]
        return self.shared[name]

    def module(self, k, hidden, tokens):
        """Rows 0 .. T - 1 of module k: keys, values, what is carried on, logits."""
        config, block = self.config, self.config.block
        weights = self.own["modules"][k]
        embedded = self.table(config.own_embedding, "embedding")[tokens]
        joined = [
            self.norm(embedded, weights["embed_norm"]),
            self.norm(hidden, weights["hidden_norm"]),
        ]
        x = np.concatenate(joined, axis=-1) @ weights["project"]["weight"]
        parts = weights["block"]
        keys, values, attended = self.attention(
            parts["attention"], self.norm(x, parts["attention_norm"])
        )
        x = x + attended
        inner = self.norm(x, parts["mlp_norm"]) @ parts["mlp"]["up"]["weight"]
        gate, up = np.split(inner, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ parts["mlp"]["down"]["weight"]
        y = self.norm(x, weights["final_norm"])
        logits = y @ self.table(config.own_head, "head").T
        if config.is_reduced:
            few, logits = logits, np.full((len(y), block.vocab_size), -np.inf)
            logits[:, self.own["vocabulary"]["target_ids"]] = few
        assert block.activation == "silu"
        return keys, values, y if config.recycle == "post" else x, logits

    def norm(self, x, weights):
        mean = np.mean(np.square(x), axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.config.block.norm_eps) * weights["scale"]

    def attention(self, weights, x):
        block, num = self.config.block, len(x)
        heads, groups, width = block.num_heads, block.num_kv_heads, block.head_dim
        qkv = x @ weights["qkv"]["weight"] + weights["qkv"].get("bias", 0.0)
        qkv = qkv.reshape(num, heads + 2 * groups, width)
        query, key, value = np.split(qkv, [heads, heads + groups], axis=1)
        if block.qk_norm:
            query = self.norm(query, weights["query_norm"])
            key = self.norm(key, weights["key_norm"])
        query, key = self.rotate(query), self.rotate(key)
        shared = heads // groups
        scores = np.einsum("qhd,khd->hqk", query, np.repeat(key, shared, axis=1))
        scores = scores * width**-0.5 + np.where(np.tri(num) > 0, 0.0, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores = scores / scores.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", scores, np.repeat(value, shared, axis=1))
        out = out.reshape(num, -1)
        if block.attention_gate:
            gate = x @ weights["gate"]["weight"] + weights["gate"].get("bias", 0.0)
            out = out / (1 + np.exp(-gate))
        return key, value, out @ weights["out"]["weight"]

    def rotate(self, x):
        rope = self.config.block.ropes[0]
        num = int(x.shape[-1] * rope.rotated)
        speed = rope.theta ** (-np.arange(0, num, 2) / num)
        angle = np.arange(len(x))[:, None] * speed[None]
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        low, high, rest = np.split(x, [num // 2, num], axis=-1)
        turned = [low * cos - high * sin, high * cos + low * sin, rest]
        return np.concatenate(turned, axis=-1).astype(np.float32)

    def caches(self, tokens, hidden):
        """Keys and values of every module after a sequence was committed.

        `hidden` has the target's rows for all tokens but the last.
        """
        found = []
        for k in range(self.config.num_native_modules):
            num = len(tokens) - 1 - k
            if num <= 0:
                break
            keys, values, hidden, _ = self.module(k, hidden[:num], tokens[k + 1 :])
            found.append((keys, values))
        return found

    def logits(self, tokens, hidden, drafts):
        """What is said about each draft, given those before it."""
        num = self.config.num_native_modules
        said = []
        while len(said) < len(drafts):
            # In the second turn, what was said about a token stands for its hidden row.
            rows, pseudo = hidden, []
            for k in range(num):
                known = np.concatenate([tokens, drafts[: len(said)]])
                paired = known[k + 1 : k + 1 + len(rows)].astype(int)
                _, _, rows, logits = self.module(k, rows, paired)
                pseudo.append(rows[-1:])
                said.append(logits[-1])
                if len(said) == len(drafts):
                    break
            hidden = np.concatenate([hidden, *pseudo])
        return np.stack(said)

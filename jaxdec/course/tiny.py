"""A tiny model that speaks eight letters, and drafters that nobody has trained.

Both are for trying notebooks out in seconds. The tiny model is random but for its head,
which is loud on a few letters: so even an untrained drafter is sometimes right, and
every picture has something to show.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import decoders, pre_tokenizers

from jaxdec.io.tokenizer import Tokenizer
from jaxdec.lm import LM
from jaxdec.loaded_drafter import LoadedDrafter
from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import init_params
from jaxdec.training.kinds import make_objective
from jaxdec.training.recipe import (
    BlockRecipe,
    DraftRecipe,
    DsparkRecipe,
    Recipe,
    recipe_from,
)
from jaxdec.training.session import as_drafter
from jaxdec.training.store import TokenStore

LETTERS = b" aeinrst"
"""All that the tiny model says, nearly."""
_LOUD, _QUIET = 5.0, 0.2
"""Factors of the head's rows."""
_CONFIG = ModelConfig(
    family="llama",
    vocab_size=257,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=1024,
)
_STRATEGIES = {"draft_model": "draft"}
"""Strategies whose recipe has another name."""


@functools.cache
def tiny_model() -> LM:
    """A random model of 2 layers whose tokens are bytes."""
    params = init_params(_CONFIG, jax.random.key(0))
    loudness = np.full((_CONFIG.vocab_size, 1), _QUIET, np.float32)
    loudness[list(LETTERS)] = _LOUD
    params["head"] = {"weight": params["head"]["weight"] * jnp.asarray(loudness)}
    return LM(
        config=_CONFIG,
        params=params,
        tokenizer=_bytes_tokenizer(),
        stop_tokens=(256,),
        name="tiny",
        content_hash="tiny",
    )


def _bytes_tokenizer() -> Tokenizer:
    """Token i is byte i; one more ends a text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [i for i in range(256) if i not in printable]
    letters = {i: chr(i) for i in printable}
    letters |= {i: chr(256 + n) for n, i in enumerate(others)}
    vocabulary = {letters[i]: i for i in range(256)}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token=None)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend, {"eos_token": "<|end|>"})


def untrained(lm: LM, strategy: str) -> LoadedDrafter:
    """A drafter as it is before its training begins.

    Args:
        lm: the target.
        strategy: whose: draft_model, mtp, eagle3, dflash or dspark.

    Raises:
        ValueError: no such strategy has a drafter that is trained here.
    """
    recipe = _recipe(lm, _STRATEGIES.get(strategy, strategy))
    objective = make_objective(recipe, lm, _nothing())
    own = objective.init(jax.random.key(1))
    return as_drafter(objective, own, lm, f"untrained {strategy}")


def _recipe(lm: LM, kind: str) -> Recipe:
    """The defaults of a kind, at the size of a small target."""
    values: dict[str, Any] = {"kind": kind, "vocabulary": lm.config.vocab_size}
    base = type(recipe_from(values))
    if issubclass(base, BlockRecipe):
        values |= {"mask_token": ord("t"), "num_layers": 1, "block_size": 5}
    if issubclass(base, DsparkRecipe):
        values |= {"markov_rank": 8}
    if issubclass(base, DraftRecipe):
        values |= {"from_layers": list(range(min(3, lm.config.num_layers - 1)))}
    return recipe_from(values)


def _nothing() -> TokenStore:
    """Two records of one token: recipes look at data only to choose a vocabulary."""
    return TokenStore(
        ids=np.zeros(4, np.uint16),
        offsets=np.array([0, 2, 4]),
        prompt_length=np.array([1, 1]),
        is_greedy=np.array([True, True]),
        is_validation=np.array([False, True]),
        prompt_id=np.array(["", ""]),
        source=np.array(["", ""]),
    )

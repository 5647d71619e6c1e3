"""Reading whole sequences with a target, for the golden cases of every kind."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import toy

import jaxdec
from jaxdec.models.decoder import make_model

CHUNK = 8
"""Tokens a row and forward: one program for prompts and for single steps."""


class Read(NamedTuple):
    """What a target says of a sequence; every leaf leads with its places."""

    logits: np.ndarray
    taps: np.ndarray
    """``[N + 1, T, E]``."""
    normed_hidden: np.ndarray


@functools.cache
def load(path):
    return jaxdec.load(path, dtype="float32")


def prompts_of(expected):
    """The prompts of a case, however many."""
    numbers = range(len(expected))
    return [expected[f"prompt_{i}"] for i in numbers if f"prompt_{i}" in expected]


@functools.cache
def program(config):
    """A model with every tap, and its jitted forward; equal models share one."""
    model = make_model(config, taps=tuple(range(config.num_layers + 1)))
    return model, jax.jit(model.forward, compiler_options=toy.FAST)


def read_prompts(lm, prompts):
    """Every prompt in one batch, where what stands after a shorter one is scratch.

    Returns:
        One `Read` per prompt, and the cache with all of them committed.
    """
    lengths = np.asarray([len(prompt) for prompt in prompts])
    num_chunks = -(-int(lengths.max()) // CHUNK)
    tokens = np.zeros((len(prompts), num_chunks * CHUNK), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    model, _ = program(lm.config)
    # Room for the answers too, and for what a step writes as scratch.
    cache = model.init_cache(len(prompts), num_chunks * CHUNK + 128)
    outputs = []
    for start in range(0, num_chunks * CHUNK, CHUNK):
        live = np.clip(lengths - start, 0, CHUNK)
        cache, output = _read(lm, cache, tokens[:, start : start + CHUNK], live)
        outputs.append(output)
    whole = [np.concatenate(parts, 1) for parts in zip(*outputs, strict=True)]
    return [
        Read(
            logits=whole[0][row, :length],
            taps=np.stack(
                np.split(whole[1][row, :length], lm.config.num_layers + 1, axis=-1)
            ),
            normed_hidden=whole[2][row, :length],
        )
        for row, length in enumerate(lengths)
    ], cache


def continue_greedily(lm, reads, cache, num):
    """The next `num` tokens of every row and the logits behind each, step by step.

    The same program as for prompts: all but the first token of a step is scratch.
    """
    logits = [np.stack([read.logits[-1] for read in reads])]
    tokens = [logits[0].argmax(-1)]
    rng = np.random.default_rng(0)
    while len(tokens) < num:
        step = rng.integers(0, lm.config.vocab_size, (len(reads), CHUNK))
        step[:, 0] = tokens[-1]
        cache, output = _read(lm, cache, step, np.ones(len(reads)))
        logits.append(output[0][:, 0])
        tokens.append(logits[-1].argmax(-1))
    return np.stack(tokens, 1), np.stack(logits, 1)


def _read(lm, cache, tokens, live):
    """Reads `CHUNK` tokens a row after the cache, of which the first `live` stay."""
    _, forward = program(lm.config)
    position = cache.length[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)[None]
    cache, output = forward(
        lm.params, cache, jnp.asarray(tokens, jnp.int32), position, None
    )
    parts = (output.logits, output.features, output.normed_hidden)
    cache = cache.commit(None, jnp.asarray(live, jnp.int32))
    return cache, tuple(np.asarray(part) for part in parts)

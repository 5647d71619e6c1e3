"""What a proposal costs beside the sum of its parts, and beside one target verify.

    python tests/benchmarks/drafter_costs.py [--only eagle3,dspark_rnn] [--check]

At the width of SmolLM2-135M (30 layers, bf16, one request, capacity 512), with random
weights, which cost what trained ones do. A proposal is made of passes through the
drafter's layers, heads, and selections over the vocabulary; how many of each follows
from the method. Here each part is timed alone at the very shapes, and the proposal as
it stands in the step, so that whatever else the step does (copies, scatters, branches)
shows as the difference.

Everything is warm and runs many times in one program (`jaxdec.measure.Rounds`); what is
compared is measured in turns, and ratios are medians of ratios within a turn.

``--check`` ends with exit code 1 where a bound of `BOUNDS` is broken.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxdec
from jaxdec import call, measure, program, sampling
from jaxdec.drafters.eagle import recurrent_net
from jaxdec.drafters.mtp import recurrent_net as mtp_recurrent_net
from jaxdec.loaded_drafter import LoadedDrafter, Tree
from jaxdec.models.block import BlockConfig, make_block_net
from jaxdec.models.block_weights import init_block_params
from jaxdec.models.config import ModelConfig, RopeConfig
from jaxdec.models.decoder import init_params
from jaxdec.models.eagle import init_eagle_params
from jaxdec.models.eagle_config import EagleConfig
from jaxdec.models.mtp import MtpConfig, init_mtp_params, make_mtp

DTYPE = "bfloat16"
LENGTH = 7
READ = 200
"""Tokens in the cache."""
SAMPLE_MS = 60.0
"""How long a sample takes at least, about."""
TREE = Tree(nodes=60, depth=7, width=10)
TARGET = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_positions=8192,
    norm_eps=1e-5,
    tie_embeddings=True,
    ropes=(RopeConfig(theta=100000.0),),
)
TAPS = (2, 15, 27)


class Part(NamedTuple):
    """A piece of a proposal: how often it runs, and one run of it."""

    name: str
    times: int
    run: Callable[[Any, Any, Any], tuple[Any, Any]]
    """``(drafter params, x, rest) -> (y, rest)``."""
    x: Any
    rest: Any = ()


class Case(NamedTuple):
    """A strategy with the parts of its propose and its extend."""

    config: jaxdec.strategies.StrategyConfig
    propose: list[Part]
    extend: list[Part]


def normal(*shape):
    """Activations."""
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def head(net, rows, times):
    """The output head over some rows, and the largest logit of each."""

    def run(params, hidden, rest):
        tokens, _ = sampling.first_max(net.logits(params, hidden))
        return tokens, rest

    return Part(f"head of {rows}", times, run, normal(1, rows, TARGET.hidden_size))


def top_k(rows, vocab_size, width, times):
    """The likeliest tokens of some rows, and their log-probabilities."""

    def run(params, logits, rest):
        del params
        best, tokens = jax.lax.top_k(logits, width)
        total = jax.nn.logsumexp(logits, axis=-1)
        return (best - total[:, None], tokens), rest

    return Part(f"top-{width} of {rows}", times, run, normal(rows, vocab_size))


def layers(net, rows, held_rows, times):
    """Some rows through the drafter's layers, beside its cache."""

    def run(params, hidden, rest):
        cache, held = rest
        num = jnp.arange(rows, dtype=jnp.int32)[None]
        position = READ + num
        held, out = net.read(
            params,
            cache,
            held,
            jnp.int32(0),
            hidden,
            jnp.abs(hidden[..., 0] * 100).astype(jnp.int32),
            position,
            READ + jnp.arange(held_rows, dtype=jnp.int32)[None],
            jnp.ones((1, rows, held_rows), bool),
        )
        return out, (cache, held)

    cache = net.init_cache(1, 512)
    cache = cache.replace(length=cache.length + READ)
    rest = (cache, net.init_held(1, held_rows))
    x = normal(1, rows, net.hidden_size)
    return Part(f"pass of {rows}", times, run, x, rest)


def write(net, num_features, rows=LENGTH + 1):
    """Rows with known features through the layers, into the cache."""

    def run(params, features, cache):
        tokens = jnp.abs(features[..., 0] * 100).astype(jnp.int32)
        position = READ + jnp.arange(rows, dtype=jnp.int32)[None]
        hidden = net.fuse(params, features)
        cache, out = net.write(params, cache, hidden, tokens, position)
        return out, cache

    cache = net.init_cache(1, 512)
    cache = cache.replace(length=cache.length + READ)
    return Part(f"pass of {rows}", 1, run, normal(1, rows, num_features), cache)


def body_of(part):
    """Rounds of a part, each of which has to wait for the one before."""

    def body(params, carry):
        y, rest = part.run(params.drafter, *carry)
        peak = sum(jnp.max(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(y))
        x = carry[0]
        return x + (peak < -1e30).astype(x.dtype), rest

    return body, (part.x, part.rest)


def drafter_layers(num, **changes):
    """Layers of a drafter, as wide as the target's."""
    return dataclasses.replace(TARGET, num_layers=num, tie_embeddings=False, **changes)


def loaded(lm, family, config, init):
    """A drafter with random weights, as if from a file."""
    return LoadedDrafter(
        family=family,
        config=config,
        own=init(config, jax.random.key(1), DTYPE),
        name=family,
        format="random weights",
        facts={},
        dtype=DTYPE,
    )


def eagle_drafter(lm, num_layers=1, vocab_size=TARGET.vocab_size, mask_token=None):
    """EAGLE-3, or P-EAGLE."""
    config = EagleConfig(
        layers=drafter_layers(num_layers),
        taps=TAPS,
        target_hidden_size=TARGET.hidden_size,
        draft_vocab_size=vocab_size,
        own_embedding=False,
        own_head=vocab_size != TARGET.vocab_size,
        mask_token=mask_token,
        draft_length=LENGTH,
    )
    net = recurrent_net(config, dtype=DTYPE)
    return loaded(lm, "eagle", config, init_eagle_params), net


def chain_parts(net):
    """One token after another."""
    return [layers(net, 1, LENGTH - 1, LENGTH - 1), head(net, 1, LENGTH)]


def eagle3(lm, vocab_size=TARGET.vocab_size):
    """A chain."""
    drafter, net = eagle_drafter(lm, vocab_size=vocab_size)
    config = jaxdec.trained(drafter, length=LENGTH)
    return Case(config, chain_parts(net), [write(net, 3 * TARGET.hidden_size)])


def eagle3_tree(lm, vocab_size=TARGET.vocab_size):
    """A dynamic tree."""
    drafter, net = eagle_drafter(lm, vocab_size=vocab_size)
    config = jaxdec.trained(drafter, tree=TREE)
    depth, width = TREE.depth, TREE.width
    parts = [
        layers(net, width, (depth - 1) * width, depth - 1),
        head(net, 1, 1),
        head(net, width, depth - 1),
        top_k(1, vocab_size, width, 1),
        top_k(width, vocab_size, width, depth - 1),
        top_k(1, width * width, width, depth - 1),
        top_k(1, width + (depth - 1) * width**2, TREE.nodes, 1),
    ]
    extend = [write(net, 3 * TARGET.hidden_size, depth + 1)]
    return Case(config, parts, extend)


def peagle(lm):
    """All tokens in one pass."""
    drafter, net = eagle_drafter(lm, num_layers=2, mask_token=0)
    config = jaxdec.trained(drafter, length=LENGTH)
    parts = [layers(net, LENGTH - 1, LENGTH - 1, 1), head(net, LENGTH, 1)]
    return Case(config, parts, [write(net, 3 * TARGET.hidden_size)])


def mtp(lm):
    """One module, again and again."""
    config = MtpConfig(
        block=drafter_layers(1),
        num_target_layers=TARGET.num_layers,
        hidden_source="post",
        recycle="post",
    )
    net = mtp_recurrent_net(make_mtp(config, dtype=DTYPE))
    drafter = loaded(lm, "mtp", config, init_mtp_params)
    config = jaxdec.trained(drafter, length=LENGTH)
    return Case(config, chain_parts(net), [write(net, TARGET.hidden_size)])


def block(lm, markov="none", rank=0, num_layers=3):
    """A block; with a Markov head, its places in order."""
    num = num_layers
    config = BlockConfig(
        layers=drafter_layers(num, qk_norm=True),
        taps=TAPS,
        block_size=LENGTH + (markov == "none"),
        sample_from_anchor=markov != "none",
        mask_token=0,
        draft_vocab_size=TARGET.vocab_size,
        own_embedding=False,
        own_head=False,
        markov=markov,
        markov_rank=rank,
        windows=(None,) * num,
        causal=(False,) * num,
    )
    net = make_block_net(config, dtype=DTYPE)
    drafter = loaded(lm, "block", config, init_block_params)

    def read(params, anchor, cache):
        tokens = jnp.abs(anchor).astype(jnp.int32)
        return net.read(params, cache, tokens), cache

    def put(params, features, cache):
        cache = net.write(params, cache, net.fuse(params, features))
        return jax.tree.map(lambda x: x[:, :, READ], cache.keys), cache

    def logits(params, hidden, rest):
        if markov == "none":
            return sampling.first_max(net.logits(params, hidden))[0], rest
        return net.logits(params, hidden), rest

    def place(params, logits, previous):
        head = net.markov(params)
        hidden = jnp.zeros((1, 1, TARGET.hidden_size))
        state, code = head.code(
            head.start(1), previous[:, 0], head.prepare(hidden)[:, 0]
        )
        added = head.out(code) + jnp.sum(state)
        token, _ = sampling.first_max(logits + added)
        return token, token[:, None]

    cache = net.init_cache(1, 512)
    cache = cache.replace(length=cache.length + READ)
    size, hidden = config.block_size, TARGET.hidden_size
    parts = [
        Part(f"pass of {size}", 1, read, normal(1), cache),
        Part(f"head of {LENGTH}", 1, logits, normal(1, LENGTH, hidden)),
    ]
    if markov != "none":
        first = jnp.zeros((1, 1), jnp.int32)
        x = normal(1, TARGET.vocab_size)
        parts.append(Part("Markov place", LENGTH, place, x, first))
    features = normal(1, LENGTH + 1, 3 * hidden)
    extend = [Part(f"context of {LENGTH + 1}", 1, put, features, cache)]
    return Case(jaxdec.trained(drafter), parts, extend)


def lookup_first(lm):
    """Prompt lookup, which finds nothing here, then EAGLE-3."""
    case = eagle3(lm)
    first = jaxdec.lookup(LENGTH, min_ngram=3)
    return case._replace(config=jaxdec.first_of(first, case.config))


CASES = {
    "mtp": mtp,
    "eagle3": eagle3,
    "eagle3_reduced": lambda lm: eagle3(lm, 32000),
    "eagle3_tree": eagle3_tree,
    "eagle3_tree_reduced": lambda lm: eagle3_tree(lm, 32000),
    "peagle": peagle,
    "first_of": lookup_first,
    "dflash": block,
    "dspark_vanilla_64": lambda lm: block(lm, "vanilla", 64),
    "dspark_gated_64": lambda lm: block(lm, "gated", 64),
    "dspark_rnn_64": lambda lm: block(lm, "rnn", 64),
    "dspark_vanilla_256": lambda lm: block(lm, "vanilla", 256),
}


class Timer:
    """One thing that is timed, in samples of about the same duration."""

    def __init__(self, body, params, state):
        self.rounds = measure.Rounds(body, params, state)
        self.num, spent = 1, 0.0
        while spent < SAMPLE_MS:
            self.num *= 2
            spent = self.rounds.sample(self.num) * self.num

    def sample(self):
        """Milliseconds of one round."""
        return self.rounds.sample(self.num)


def timers_of(lm, case, which):
    """Timers of the proposal, the rest of a step, and every part."""
    prompt = np.random.default_rng(1).integers(0, TARGET.vocab_size, READ + 1).tolist()
    checked = call.check(lm, prompt, strategy=case.config, max_new_tokens=64)
    strategy, params = program.build(lm, checked.key)
    compiled = program.Program(
        key=checked.key,
        strategy=strategy,
        params=params,
        prefill=jax.jit(strategy.prefill),
        loop=None,
        compile_s=0.0,
        num_compilations=0,
    )
    state = compiled.prefill(params, checked.request)
    _, forward, propose, extend, _ = measure.step_parts(lm, compiled)
    bodies = {"propose": (propose, state), "extend": (extend, state)}
    bodies["verify"] = (forward, state)
    for kind in ("propose", "extend"):
        for i, part in enumerate(getattr(case, kind)):
            bodies[kind, i] = body_of(part)
    return {k: Timer(b, params, s) for k, (b, s) in bodies.items() if which(k)}


def run_case(lm, name, turns):
    """Prints one line, and returns the medians."""
    case = CASES[name](lm)
    timers = timers_of(lm, case, lambda key: True)
    found = {key: [] for key in timers}
    for turn in range(turns):
        order = list(timers)
        for key in order if turn % 2 else order[::-1]:
            found[key].append(timers[key].sample())

    def parts(kind, turn):
        return sum(
            part.times * found[kind, i][turn]
            for i, part in enumerate(getattr(case, kind))
        )

    mid = {key: statistics.median(values) for key, values in found.items()}
    result = dict(mid)
    for kind in ("propose", "extend"):
        sums = [parts(kind, turn) for turn in range(turns)]
        result[kind, "parts"] = statistics.median(sums)
        result[kind, "ratio"] = statistics.median(
            whole / bare for whole, bare in zip(found[kind], sums, strict=True)
        )
    detail = " + ".join(
        f"{part.times} x {part.name} {mid['propose', i]:.3f}"
        for i, part in enumerate(case.propose)
    )
    print(
        f"{name:20s} {mid['propose']:8.3f} {result['propose', 'parts']:8.3f} "
        f"{result['propose', 'ratio']:6.2f} {mid['extend']:8.3f} "
        f"{result['extend', 'parts']:8.3f} {result['extend', 'ratio']:6.2f} "
        f"{mid['verify']:8.2f}   {detail}",
        flush=True,
    )
    return result


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    params = init_params(TARGET, jax.random.key(0), DTYPE)
    lm = jaxdec.LM(config=TARGET, params=params, dtype=DTYPE, name="SmolLM2 width")
    print(measure.versions(), lm.row_classes)
    print(
        f"{'drafter':20s} {'propose':>8s} {'parts':>8s} {'ratio':>6s} {'extend':>8s} "
        f"{'parts':>8s} {'ratio':>6s} {'verify':>8s}   parts of propose"
    )
    for name in options.only.split(","):
        run_case(lm, name, options.turns)
    sys.exit(0)


if __name__ == "__main__":
    main()

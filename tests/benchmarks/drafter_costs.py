"""What a proposal costs beside the sum of its parts, and beside one target verify.

    python tests/benchmarks/drafter_costs.py [--only eagle3,dflash,widths] [--check]

At the width of SmolLM2-135M (30 layers, bf16, one request, capacity 512) and with
random weights, which cost what trained ones do. A proposal is made of passes through
the drafter's layers, heads, and selections over the vocabulary; how many of each, over
how many rows, follows from the method. Each part is timed alone at those shapes, and
the proposal as it stands in the step, so that whatever else it does (copies, scatters,
branches, conversions) shows as the difference. So does the extension of a drafter by
what a step commits. The step of several widths is timed beside those of one.

Everything is warm and runs many times in one program (`jaxdec.measure.Rounds`); what is
compared is measured in turns, and a ratio is the median of the ratios of the turns.
``--check`` ends with exit code 1 where a bound is broken:

    propose            at most 1.25 of its parts
    a tree's propose   at most a target verify of as many nodes
    widths             no drafts are cheaper than 16, which cost at most 10 % more than
                       in a step of that width alone

Not bounded, since it depends on the machine: what a Markov head adds to a block pass
(column ``/bare``). Its r x V matrix is read once a place, so on a processor that is as
fast as its memory the least it can add is K r V over the weights of the pass.
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
from jaxdec import call, decoding, measure, program, sampling, tree
from jaxdec.cache import KVCache
from jaxdec.drafters.eagle import recurrent_net
from jaxdec.drafters.mtp import recurrent_net as mtp_recurrent_net
from jaxdec.drafters.none import none
from jaxdec.loaded_drafter import LoadedDrafter, Tree
from jaxdec.models.block import BlockConfig, make_block_net
from jaxdec.models.block_weights import init_block_params
from jaxdec.models.config import ModelConfig, RopeConfig
from jaxdec.models.decoder import init_params, make_model
from jaxdec.models.eagle import init_eagle_params
from jaxdec.models.eagle_config import EagleConfig
from jaxdec.models.mtp import MtpConfig, init_mtp_params, make_mtp
from jaxdec.types import (
    DecodeState,
    Draft,
    Drafter,
    DrafterParams,
    Sequences,
    StrategyParams,
)

DTYPE = "bfloat16"
LENGTH = 7
CAPACITY = 512
READ = 200
"""Tokens in the caches."""
SAMPLE_MS = 60.0
"""How long a sample takes, at least."""
TREE = Tree(nodes=60, depth=7, width=10)
REDUCED = 8192
"""Tokens of a block drafter's own vocabulary, where it has one."""
WIDE = 16
"""Draft tokens of the widest step of several widths."""
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
HIDDEN, VOCAB = TARGET.hidden_size, TARGET.vocab_size
TAPS = (2, 15, 27)


# ---- Parts ---------------------------------------------------------------------------


class Part(NamedTuple):
    """A piece of a proposal: how often it runs, and one run of it.

    Alone and again and again it finds its weights in the processor's cache, which in a
    step it does not; so what a proposal is compared with is one program that runs all
    of its parts, one after another.
    """

    name: str
    times: int
    run: Callable[[Any, Any, Any], tuple[Any, Any]]
    """``(drafter params, x, rest) -> (y, rest)``."""
    x: Any
    rest: Any = ()

    def body(self):
        """Rounds of it, each of which has to wait for the one before."""

        def body(params, carry):
            x, rest = carry
            y, rest = self.run(params.drafter, x, rest)
            # As far as XLA can tell, all of y decides what goes in next.
            leaves = [leaf for leaf in jax.tree.leaves(y) if leaf.size]
            peaks = [jnp.max(leaf).astype(jnp.float32) for leaf in leaves]
            return x + (sum(peaks) < -1e30).astype(x.dtype), rest

        return body, (self.x, self.rest)


def one_after_another(parts):
    """All parts of something, as often as it runs each, in one program."""
    bodies, carries = zip(*[part.body() for part in parts], strict=True)

    def body(params, carries):
        done = jnp.float32(0)
        after = []
        for part, run, (x, rest) in zip(parts, bodies, carries, strict=True):
            # Each waits for the one before.
            carry = x + (done < -1e30).astype(x.dtype), rest
            carry = jax.lax.fori_loop(
                0, part.times, lambda _, c, run=run: run(params, c), carry
            )
            done = jnp.max(carry[0]).astype(jnp.float32)
            after.append(carry)
        return tuple(after)

    return body, carries


def normal(*shape):
    """Activations."""
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def ids(x):
    """Token ids that depend on some numbers."""
    return jnp.abs(x[..., 0] * 100).astype(jnp.int32)


def filled(cache):
    """A cache that holds READ tokens."""
    rows = tuple(jnp.full(x.shape, 0.1, x.dtype) for x in cache.keys)
    return cache.replace(keys=rows, values=rows, length=cache.length + READ)


def head(net, rows, times, is_read=True):
    """The output head over some rows; and, where it is all, the likeliest tokens."""

    def run(params, hidden, rest):
        logits = net.logits(params, hidden)
        return (sampling.first_max(logits)[0] if is_read else logits), rest

    return Part(f"head of {rows}", times, run, normal(1, rows, HIDDEN))


def top_k(rows, num_of, num, times):
    """The likeliest of some rows, and their log-probabilities."""

    def run(params, logits, rest):
        del params
        best, tokens = jax.lax.top_k(logits, num)
        total = jax.nn.logsumexp(logits, axis=-1)
        return (best - total[:, None], tokens), rest

    return Part(f"top-{num} of {rows} x {num_of}", times, run, normal(rows, num_of))


def layers(net, rows, num_held, times):
    """Some rows through the drafter's layers, beside its cache."""

    def run(params, hidden, rest):
        cache, held = rest
        held, out = net.read(
            params,
            cache,
            held,
            jnp.int32(0),
            hidden,
            ids(hidden),
            READ + jnp.arange(rows, dtype=jnp.int32)[None],
            READ + jnp.arange(num_held, dtype=jnp.int32)[None],
            jnp.ones((1, rows, num_held), bool),
        )
        return out, (cache, held)

    rest = (filled(net.init_cache(1, CAPACITY)), net.init_held(1, num_held))
    return Part(f"pass of {rows}", times, run, normal(1, rows, HIDDEN), rest)


def write(net, num_taps, rows=LENGTH + 1):
    """Rows with known features through the layers, into the cache."""

    def run(params, features, cache):
        position = READ + jnp.arange(rows, dtype=jnp.int32)[None]
        hidden = net.fuse(params, features)
        cache, out = net.write(params, cache, hidden, ids(features), position)
        return out, cache

    x = normal(1, rows, num_taps * HIDDEN)
    cache = filled(net.init_cache(1, CAPACITY))
    return [Part(f"pass of {rows}", 1, run, x, cache)]


# ---- Drafters ------------------------------------------------------------------------


class Case(NamedTuple):
    """A strategy, the parts of its propose and its extend, and what it stands beside.

    `bare` is the same strategy without what should cost little.
    """

    config: Any
    propose: list[Part]
    extend: list[Part]
    bare: Any = None
    member: int | None = None
    """Which of several drafters the parts are of."""


def drafter_layers(num, **changes):
    """Layers of a drafter, as wide as the target's."""
    return dataclasses.replace(TARGET, num_layers=num, tie_embeddings=False, **changes)


def strategy_of(family, config, init, **options):
    """A drafter with random weights, as if from a file."""
    drafter = LoadedDrafter(
        family=family,
        config=config,
        own=init(config, jax.random.key(1), DTYPE),
        name=family,
        format="random weights",
        facts={},
        dtype=DTYPE,
    )
    return jaxdec.trained(drafter, **options)


def eagle(num_layers=1, vocab_size=VOCAB, mask_token=None, **options):
    """EAGLE-3 or P-EAGLE, and its network."""
    config = EagleConfig(
        layers=drafter_layers(num_layers),
        taps=TAPS,
        target_hidden_size=HIDDEN,
        draft_vocab_size=vocab_size,
        own_embedding=False,
        own_head=vocab_size != VOCAB,
        mask_token=mask_token,
        draft_length=LENGTH,
    )
    strategy = strategy_of("eagle", config, init_eagle_params, **options)
    return strategy, recurrent_net(config, dtype=DTYPE)


def chain(strategy, net, num_taps):
    """One token after another; the last is not read."""
    parts = [layers(net, 1, LENGTH - 1, LENGTH - 1), head(net, 1, LENGTH)]
    return Case(strategy, parts, write(net, num_taps))


def eagle3(**options):
    """A chain."""
    return chain(*eagle(length=LENGTH, **options), len(TAPS))


def eagle3_tree(vocab_size=VOCAB):
    """A dynamic tree."""
    strategy, net = eagle(vocab_size=vocab_size, tree=TREE)
    depth, width = TREE.depth, TREE.width
    parts = [
        layers(net, width, (depth - 1) * width, depth - 1),
        head(net, 1, 1, is_read=False),
        head(net, width, depth - 1, is_read=False),
        top_k(1, vocab_size, width, 1),
        top_k(width, vocab_size, width, depth - 1),
        top_k(1, width * width, width, depth - 1),
        top_k(1, width + (depth - 1) * width**2, TREE.nodes, 1),
    ]
    return Case(strategy, parts, write(net, len(TAPS), depth + 1))


def peagle():
    """All tokens in one pass over masks."""
    strategy, net = eagle(num_layers=2, mask_token=0, length=LENGTH)
    parts = [layers(net, LENGTH - 1, LENGTH - 1, 1), head(net, LENGTH, 1)]
    return Case(strategy, parts, write(net, len(TAPS)))


def mtp():
    """One module, again and again."""
    config = MtpConfig(
        block=drafter_layers(1),
        num_target_layers=TARGET.num_layers,
        hidden_source="post",
        recycle="post",
    )
    strategy = strategy_of("mtp", config, init_mtp_params, length=LENGTH)
    return chain(strategy, mtp_recurrent_net(make_mtp(config, dtype=DTYPE)), 1)


def first_of():
    """Prompt lookup, which finds nothing here, then EAGLE-3."""
    case = eagle3()
    lookup = jaxdec.lookup(LENGTH, min_ngram=3)
    return case._replace(config=jaxdec.first_of(lookup, case.config), member=1)


def block_config(
    markov="none", rank=0, num_layers=3, anchor_first=True, vocab_size=VOCAB
):
    """DSpark or, without heads, DFlash (also as 1 + N)."""
    return BlockConfig(
        layers=drafter_layers(num_layers, qk_norm=True),
        taps=TAPS,
        block_size=LENGTH if anchor_first else LENGTH + 1,
        sample_from_anchor=anchor_first,
        mask_token=0,
        draft_vocab_size=vocab_size,
        own_embedding=False,
        own_head=vocab_size != VOCAB,
        markov=markov,
        markov_rank=rank,
        confidence="none" if markov == "none" else "hidden_and_previous",
        windows=(None,) * num_layers,
        causal=(False,) * num_layers,
    )


def block(config):
    """A block pass and a head; with a Markov head, then its places in order."""
    net = make_block_net(config, dtype=DTYPE)
    has_markov = config.markov != "none"

    def read(params, anchor, cache):
        return net.read(params, cache, jnp.abs(anchor).astype(jnp.int32)), cache

    def put(params, features, cache):
        cache = net.write(params, cache, net.fuse(params, features))
        return [x[0, :, READ] for x in (*cache.keys, *cache.values)], cache

    def place(params, logits, previous):
        markov = net.markov(params)
        prepared = markov.prepare(jnp.zeros((1, 1, HIDDEN)))[:, 0]
        state, code = markov.code(markov.start(1), previous, prepared)
        token, _ = sampling.first_max(logits + markov.out(code))
        return (token, state), token

    cache = filled(net.init_cache(1, CAPACITY))
    parts = [
        Part(f"pass of {config.block_size}", 1, read, normal(1), cache),
        head(net, LENGTH, 1, is_read=not has_markov),
    ]
    bare = None
    if has_markov:
        first = jnp.zeros((1,), jnp.int32)
        size = config.draft_vocab_size
        parts.append(Part("Markov place", LENGTH, place, normal(1, size), first))
        plain = block_config(vocab_size=size)
        bare = strategy_of("block", plain, init_block_params)
    x = normal(1, LENGTH + 1, len(TAPS) * HIDDEN)
    extend = [Part(f"context of {LENGTH + 1}", 1, put, x, cache)]
    strategy = strategy_of("block", config, init_block_params)
    return Case(strategy, parts, extend, bare)


CASES = {
    "mtp": mtp,
    "eagle3": eagle3,
    "eagle3_reduced": lambda: eagle3(vocab_size=32000),
    "eagle3_tree": eagle3_tree,
    "eagle3_tree_reduced": lambda: eagle3_tree(32000),
    "peagle": peagle,
    "first_of": first_of,
    "dflash": lambda: block(block_config(anchor_first=False)),
    "dspark_vanilla": lambda: block(block_config("vanilla", 64)),
    "dspark_gated": lambda: block(block_config("gated", 64)),
    "dspark_rnn": lambda: block(block_config("rnn", 64)),
    "dspark_rank_256": lambda: block(block_config("vanilla", 256)),
    **{
        f"dspark_{kind}_reduced": lambda kind=kind: block(
            block_config(kind, 64, vocab_size=REDUCED)
        )
        for kind in ("vanilla", "gated", "rnn")
    },
}


# ---- Timing --------------------------------------------------------------------------


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


class Found:
    """Samples of several timers, taken in turns."""

    def __init__(self, timers, turns):
        self.samples = {name: [] for name in timers}
        for turn in range(turns):
            order = list(timers)
            # In turns, so that a drift of the machine hits all alike.
            for name in order if turn % 2 else order[::-1]:
                self.samples[name].append(timers[name].sample())

    def __getitem__(self, name):
        return statistics.median(self.samples[name])

    def ratio(self, name, other):
        """How often something is as expensive as something else."""
        samples = (np.asarray(self.samples[key]) for key in (name, other))
        return float(np.median(np.divide(*samples)))


def state_of(strategy, params, request):
    """A state in the middle of an answer, without running a model."""

    def fill(x):
        if isinstance(x, KVCache):
            return filled(jax.tree.map(fill, x))
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.full(x.shape, 0.1, x.dtype)
        return jnp.zeros(x.shape, x.dtype)

    shapes = jax.eval_shape(strategy.prefill, params, request)
    cache, drafter = jax.tree.map(
        fill, (shapes.cache, shapes.drafter), is_leaf=lambda x: isinstance(x, KVCache)
    )
    zero = jnp.zeros_like(request.prompt_length)
    sequences = Sequences(
        tokens=request.prompt,
        length=request.prompt_length,
        prompt_length=request.prompt_length,
        limit=request.prompt_length + request.max_new_tokens,
        finish=zero,
        max_draft_length=request.max_draft_length,
        stop_tokens=request.stop_tokens,
        num_stop_tokens=request.num_stop_tokens,
        key=request.key,
        sampling=request.sampling,
    )
    return DecodeState(sequences=sequences, cache=cache, drafter=drafter)


def checked_call(lm, strategy):
    """A call with READ + 1 random tokens."""
    prompt = np.random.default_rng(1).integers(0, VOCAB, READ + 1).tolist()
    return call.check(lm, prompt, strategy=strategy, max_new_tokens=64)


def step_parts(lm, strategy_config):
    """The pieces of a strategy's step, its arrays, and a state."""
    checked = checked_call(lm, strategy_config)
    strategy, params = program.build(lm, checked.key)
    built = program.Program(
        key=checked.key,
        strategy=strategy,
        params=params,
        prefill=None,
        loop=None,
        compile_s=0.0,
        num_compilations=0,
    )
    pieces = measure.step_parts(lm, built)
    return pieces, params, state_of(strategy, params, checked.request)


def _given(params, program):
    body, carry = program
    return body, params, carry


def case_timers(lm, case):
    """Of the proposal, the extension, every part, and the bare proposal."""
    (_, _, propose, extend, _), params, state = step_parts(lm, case.config)
    timers = {
        "propose": Timer(propose, params, state),
        "extend": Timer(extend, params, state),
    }
    own = params.drafter
    if case.member is not None:
        own = DrafterParams(own=own.own[case.member], shared=own.shared[case.member])
    params = params.replace(drafter=own)
    for kind in timers.copy():
        parts = getattr(case, kind)
        timers[kind, "parts"] = Timer(*_given(params, one_after_another(parts)))
        for i, part in enumerate(parts):
            timers[kind, i] = Timer(*_given(params, part.body()))
    if case.bare is not None:
        (_, _, propose, _, _), params, state = step_parts(lm, case.bare)
        timers["bare"] = Timer(propose, params, state)
    return timers


# ---- What is printed -----------------------------------------------------------------


def time_verify(lm, turns):
    """Milliseconds of a target forward over a chain and over a tree, heads included."""
    model = make_model(TARGET, dtype=DTYPE)

    def body_of(num, mask):
        def body(params, carry):
            tokens, cache = carry
            position = READ + jnp.arange(num, dtype=jnp.int32)[None]
            cache, output = model.forward(params, cache, tokens, position, mask)
            found, _ = sampling.first_max(output.logits)
            return tokens + (jnp.sum(found) < -1).astype(jnp.int32), cache

        return body

    parents = jnp.maximum(jnp.arange(TREE.nodes, dtype=jnp.int32) - 8, 0)
    masks = {LENGTH: None, TREE.nodes: tree.ancestors(parents)[None]}
    timers = {}
    for num, mask in masks.items():
        carry = jnp.zeros((1, num + 1), jnp.int32), model.init_cache(1, CAPACITY)
        carry = carry[0], filled(carry[1])
        timers[num] = Timer(body_of(num + 1, mask), lm.params, carry)
    found = Found(timers, turns)
    for num in masks:
        print(f"target verify of {num} draft tokens {found[num]:8.2f} ms", flush=True)
    return {num: found[num] for num in masks}


def time_case(lm, name, verify, turns):
    """Prints the line of a drafter; returns the bounds that it breaks."""
    case = CASES[name]()
    found = Found(case_timers(lm, case), turns)
    line, broken = f"{name:20s}", []
    for kind in ("propose", "extend"):
        ratio = found.ratio(kind, (kind, "parts"))
        parts = found[kind, "parts"]
        line += f" {found[kind]:8.3f} {parts:8.3f} {ratio:5.2f}"
        if kind == "propose" and ratio > 1.25:
            broken.append(f"{name}: propose costs {ratio:.2f} of its parts")
    num = case.config.length
    line += f" {found['propose'] / verify[num]:7.2f}"
    if name.startswith("eagle3_tree") and found["propose"] > verify[num]:
        broken.append(f"{name}: propose costs more than a verify of {num}")
    if case.bare is not None:
        line += f" {found.ratio('propose', 'bare'):5.2f}"
    else:
        line += " " * 6
    details = [
        f"{part.times} x {part.name} {found['propose', i]:.3f}"
        for i, part in enumerate(case.propose)
    ]
    print(f"{line}   {', '.join(details)}", flush=True)
    return broken


def junk():
    """Drafts WIDE tokens that cost nothing."""

    def propose(params, state, sequences):
        del params
        batch = sequences.length.shape[0]
        tokens = jnp.broadcast_to(sequences.anchor[:, None], (batch, WIDE))
        length = jnp.full((batch,), WIDE, jnp.int32)
        return state, Draft(tokens=tokens, length=length)

    return Drafter(
        name="junk",
        max_length=WIDE,
        taps=(),
        init=lambda batch_size, capacity: (),
        extend=lambda params, state, commit: state,
        propose=propose,
    )


def time_widths(lm, turns):
    """Prints steps of several widths beside steps of one; returns broken bounds."""
    request = checked_call(lm, jaxdec.lookup(WIDE)).request
    params = StrategyParams(target=lm.params, drafter=())
    model = make_model(TARGET, dtype=DTYPE)

    def timer(drafter, most, widths=()):
        strategy = decoding.speculative(
            model, drafter, capacity=CAPACITY, widths=widths
        )

        def body(params, state):
            # A row that stays as long as it is can be stepped again and again.
            after, _ = strategy.step(params, state)
            sequences = after.sequences.replace(
                length=state.sequences.length, finish=state.sequences.finish
            )
            back = state.cache.length - after.cache.length
            return after.replace(
                sequences=sequences, cache=after.cache.commit(None, back)
            )

        asked = request.replace(max_draft_length=jnp.full((1,), most, jnp.int32))
        return Timer(body, params, state_of(strategy, params, asked))

    found = Found(
        {
            "plain": timer(none(), 0),
            "alone": timer(junk(), WIDE),
            "wide": timer(junk(), WIDE, (0, WIDE)),
            "narrow": timer(junk(), 0, (0, WIDE)),
        },
        turns,
    )
    more = found.ratio("wide", "alone")
    less = found.ratio("narrow", "wide")
    print(
        f"step of width 0 {found['plain']:.2f} ms, of {WIDE} {found['alone']:.2f} ms; "
        f"of widths (0, {WIDE}): {WIDE} judged {found['wide']:.2f} ms, ratio "
        f"{more:.3f}; 0 judged {found['narrow']:.2f} ms, ratio to {WIDE} {less:.3f}",
        flush=True,
    )
    broken = []
    if more > 1.1:
        broken.append(f"widths: {WIDE} judged cost {more:.3f} of a step of one width")
    if less > 0.95:
        broken.append(f"widths: 0 judged cost {less:.3f} of {WIDE}")
    return broken


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join([*CASES, "widths"]))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    names = options.only.split(",")
    if wrong := [n for n in names if n not in (*CASES, "widths")]:
        parser.error(f"{wrong} are none of {', '.join([*CASES, 'widths'])}")

    params = init_params(TARGET, jax.random.key(0), DTYPE)
    lm = jaxdec.LM(config=TARGET, params=params, dtype=DTYPE, name="random")
    print(f"{measure.versions()}, K = {LENGTH}, medians of {options.turns}", flush=True)
    broken = []
    if set(names) & set(CASES):
        verify = time_verify(lm, options.turns)
        parts = f"{'parts':>8s} {'ratio':>5s}"
        print(
            f"{'milliseconds':20s} {'propose':>8s} {parts} {'extend':>8s} {parts} "
            f"{'/verify':>7s} {'/bare':>5s}   parts of propose"
        )
    for name in names:
        if name == "widths":
            broken += time_widths(lm, options.turns)
        else:
            broken += time_case(lm, name, verify, options.turns)
    print("\n".join(broken) if broken else "all bounds hold")
    sys.exit(1 if broken and options.check else 0)


if __name__ == "__main__":
    main()

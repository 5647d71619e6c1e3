"""Small models, drafters and requests for tests: tiny, exact, and easy to steer.

TINY is a two-layer decoder, TINYDRAFT a one-layer stranger to it, and TABLE a Markov
chain whose next-token logits are a row of a matrix, so that its laws are known exactly.
Drafters are the oracle (the target's own weights), its corrupted twin (wrong at a slot
that moves), trees, junk, the stubborn one, and SCRIPT, which says what it is told.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from example_drafter import last_successor

from jaxdec import acceptance, decoding, sampling
from jaxdec.cache import KVCache
from jaxdec.draft_length import limited, threshold
from jaxdec.drafters.draft_model import draft_model
from jaxdec.drafters.first_of import first_of
from jaxdec.drafters.lookup import lookup
from jaxdec.drafters.none import none
from jaxdec.models.config import ModelConfig
from jaxdec.models.decoder import init_params, make_model
from jaxdec.types import (
    Draft,
    Drafter,
    DrafterParams,
    FinishReason,
    Model,
    Output,
    Request,
    Sequences,
    StrategyParams,
    pytree,
)

CAPACITY = 256
CHUNK = 16
SLOTS = 64
BUFFER = 24
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}
"""Compiler options: what XLA does unless told otherwise; see conftest.py."""
K = 8
"""Draft tokens a step; `max_draft` lowers it without another program."""
FAST = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
"""Compiler options: less than half the compile time, the same numbers."""

TINY_CONFIG = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=1024,
)
DRAFT_CONFIG = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_positions=1024,
)
VOCAB = TINY_CONFIG.vocab_size


@functools.cache
def weights(config: ModelConfig, seed: int):
    """Random weights, the residual branches made loud enough that context matters."""
    params = init_params(config, jax.random.key(seed))
    params["embedding"] = params["embedding"] * 2.0
    for layer in params["layers"].values():
        layer["attention"]["out"]["weight"] = layer["attention"]["out"]["weight"] * 2.0
    return params


def tiny_params():
    return weights(TINY_CONFIG, 0)


@functools.cache
def tiny(**kwargs) -> Model:
    return make_model(TINY_CONFIG, **kwargs)


@functools.cache
def tiny_draft(**kwargs) -> Model:
    return make_model(DRAFT_CONFIG, **kwargs)


# ---- TABLE ---------------------------------------------------------------------------


@pytree
class TableCache:
    """The tokens read, so that commit has something to get wrong."""

    tokens: Any
    length: Any

    def commit(self, path, num):
        tokens = self.tokens
        if path is not None:
            index = self.length[:, None] + path
            moved = jnp.take_along_axis(tokens, index, axis=1)
            tokens = _write(tokens, moved, self.length)
        return TableCache(tokens=tokens, length=self.length + num)


def _write(buffer, rows, start):
    write = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
    return jax.vmap(write)(buffer, rows, start)


def table_model(vocab_size: int, max_positions: int = 1024) -> Model:
    """Logits are the row of `params` that belongs to the last token."""

    def init_cache(batch_size, capacity):
        return TableCache(
            tokens=jnp.zeros((batch_size, capacity), jnp.int32),
            length=jnp.zeros((batch_size,), jnp.int32),
        )

    def forward(params, cache, tokens, position, mask):
        del position, mask
        logits = params[jnp.clip(tokens, 0, vocab_size - 1)]
        empty = jnp.zeros((*tokens.shape, 0), jnp.float32)
        cache = cache.replace(tokens=_write(cache.tokens, tokens, cache.length))
        output = Output(
            logits=logits, features=empty, hidden=empty, normed_hidden=empty
        )
        return cache, output

    return Model(
        init_cache=init_cache,
        forward=forward,
        vocab_size=vocab_size,
        max_positions=max_positions,
        num_features=0,
    )


# ---- Drafters ------------------------------------------------------------------------


def _stateless(name, max_length, propose) -> Drafter:
    return Drafter(
        name=name,
        max_length=max_length,
        taps=(),
        init=lambda batch_size, capacity: (),
        extend=lambda params, state, commit: state,
        propose=propose,
    )


def _hash(x, size: int):
    """A fixed pseudo-random number below `size` for every integer."""
    x = x.astype(jnp.uint32) * jnp.uint32(2654435761)
    x = (x ^ (x >> 15)) * jnp.uint32(2246822519)
    return ((x ^ (x >> 13)) % jnp.uint32(size)).astype(jnp.int32)


def junk(length: int = K, vocab_size: int = VOCAB) -> Drafter:
    """Pseudo-random tokens."""

    def propose(params, state, sequences):
        del params
        slot = (
            sequences.length[:, None] * 31 + jnp.arange(length, dtype=jnp.int32)[None]
        )
        num = jnp.full_like(sequences.length, length)
        return state, Draft(tokens=_hash(slot, vocab_size), length=num)

    return _stateless("junk", length, propose)


def stubborn(token: int, length: int = K) -> Drafter:
    """One token, always."""

    def propose(params, state, sequences):
        del params
        batch = sequences.length.shape[0]
        tokens = jnp.full((batch, length), token, jnp.int32)
        return state, Draft(tokens=tokens, length=jnp.full((batch,), length, jnp.int32))

    return _stateless("stubborn", length, propose)


ORACLE, WRONG = -1, -2
"""Script entries: the oracle's token at that place, or any other than that."""


@pytree
class Script:
    """What SCRIPT says: at step n of row b, ``drafts[b, n]``."""

    drafts: Any
    lengths: Any
    oracle: Any
    """The tokens that ORACLE and WRONG refer to, by absolute position."""


def make_script(drafts, oracle, lengths=None) -> Script:
    drafts = jnp.asarray(drafts, jnp.int32)
    if lengths is None:
        lengths = np.full(drafts.shape[:2], drafts.shape[2])
    return Script(
        drafts=drafts,
        lengths=jnp.asarray(lengths, jnp.int32),
        oracle=jnp.asarray(oracle, jnp.int32),
    )


def script(length: int = K, vocab_size: int = VOCAB) -> Drafter:
    """Says what its params (`Script`) list for the step; its state counts steps."""

    def init(batch_size, capacity):
        del capacity
        return jnp.zeros((batch_size,), jnp.int32)

    def propose(params, state, sequences):
        step = jnp.minimum(state, params.drafts.shape[1] - 1)
        said = jnp.take_along_axis(params.drafts, step[:, None, None], axis=1)[:, 0]
        place = sequences.length[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        place = jnp.minimum(place, params.oracle.shape[1] - 1)
        right = jnp.take_along_axis(params.oracle, place, axis=1)
        tokens = jnp.where(said == ORACLE, right, said)
        tokens = jnp.where(said == WRONG, (right + 1) % vocab_size, tokens)
        num = jnp.take_along_axis(params.lengths, step[:, None], axis=1)[:, 0]
        return state + 1, Draft(tokens=tokens, length=num)

    return Drafter(
        name="script",
        max_length=length,
        taps=(),
        init=init,
        extend=lambda params, state, commit: state,
        propose=propose,
    )


def corrupted(inner: Drafter, vocab_size: int = VOCAB) -> Drafter:
    """`inner` with one token made wrong, at a slot that depends on the position."""
    length = inner.max_length

    def propose(params, state, sequences):
        state, draft = inner.propose(params, state, sequences)
        slot = _hash(sequences.length, length + 1)[:, None]
        is_hit = jnp.arange(length, dtype=jnp.int32)[None] == slot
        tokens = jnp.where(is_hit, (draft.tokens + 1) % vocab_size, draft.tokens)
        return state, draft.replace(tokens=tokens)

    return inner._replace(name=f"corrupted {inner.name}", propose=propose)


def confident(inner: Drafter) -> Drafter:
    """With a confidence that differs by row, step and slot, and now and then is low."""

    def propose(params, state, sequences):
        state, draft = inner.propose(params, state, sequences)
        slot = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
        mixed = _hash(sequences.length[:, None] * 31 + slot, 5)
        confidence = jnp.where(mixed == 0, 0.1, 0.95).astype(jnp.float32)
        return state, draft.replace(confidence=confidence)

    return inner._replace(propose=propose)


def scripted(inner: Drafter, vocab_size: int = VOCAB) -> Drafter:
    """`inner`, corrupted at step n of row b in slot ``plan[b, n]`` (K: nowhere).

    Params and state are pairs: the plan (the step) and those of `inner`.
    """

    def init(batch_size, capacity):
        step = jnp.zeros((batch_size,), jnp.int32)
        return step, inner.init(batch_size, capacity)

    def extend(params, state, commit):
        return state[0], inner.extend(params[1], state[1], commit)

    def propose(params, state, sequences):
        plan, inner_params = params
        step, inner_state = state
        inner_state, draft = inner.propose(inner_params, inner_state, sequences)
        index = jnp.minimum(step, plan.shape[1] - 1)[:, None]
        slot = jnp.take_along_axis(plan, index, axis=1)
        is_hit = jnp.arange(inner.max_length, dtype=jnp.int32)[None] == slot
        tokens = jnp.where(is_hit, (draft.tokens + 1) % vocab_size, draft.tokens)
        return (step + 1, inner_state), draft.replace(tokens=tokens)

    return inner._replace(
        name=f"scripted {inner.name}", init=init, extend=extend, propose=propose
    )


def tree_of(inner: Drafter, vocab_size: int = VOCAB) -> Drafter:
    """The chain of `inner` with an elder sibling beside each of its tokens.

    Depth d holds nodes 2d - 1 (the sibling, a leaf) and 2d (the chain). Siblings are
    junk at even depths, and at odd depths the very token of the chain: the rule must
    then find the deeper of two equal nodes.
    """
    depth = inner.max_length
    parents = np.repeat(2 * np.arange(depth), 2)

    def propose(params, state, sequences):
        state, draft = inner.propose(params, state, sequences)
        batch = draft.tokens.shape[0]
        place = sequences.length[:, None] + jnp.arange(depth, dtype=jnp.int32)[None]
        is_junk = jnp.arange(depth) % 2 == 1
        sibling = jnp.where(is_junk[None], _hash(place, vocab_size), draft.tokens)
        tokens = jnp.stack([sibling, draft.tokens], axis=2).reshape(batch, 2 * depth)
        return state, Draft(
            tokens=tokens,
            parents=jnp.broadcast_to(
                jnp.asarray(parents, jnp.int32), (batch, 2 * depth)
            ),
            length=2 * draft.length,
        )

    return inner._replace(
        name=f"tree of {inner.name}", max_length=2 * depth, propose=propose
    )


# ---- Strategies ----------------------------------------------------------------------


class Method(NamedTuple):
    """A strategy with its arrays, and what the contract may expect of it."""

    strategy: Any
    params: StrategyParams
    traces: list
    prefill: Any
    generate: Any
    is_match: bool
    draft_forward: Any
    """``(model, params)`` of the draft model, or None."""


def compiled(
    model, drafter, accept=acceptance.match, *, target, own=None, shared=None, **kwargs
) -> Method:
    """A strategy with jitted programs that count how often they are traced.

    Nothing is donated, so that a test may keep any state it likes.
    """
    kwargs = {"capacity": CAPACITY, "prefill_chunk": CHUNK} | kwargs
    strategy = decoding.speculative(model, drafter, accept, **kwargs)
    traces = []

    def prefill(params, request):
        traces.append("prefill")
        return strategy.prefill(params, request)

    def generate(params, state, max_steps):
        traces.append("generate")
        return decoding.generate(strategy, params, state, max_steps, num_slots=SLOTS)

    if not isinstance(own, tuple | Script | DrafterParams):
        own = DrafterParams(own=own, shared=shared)
    return Method(
        strategy=strategy,
        params=StrategyParams(target=target, drafter=own),
        traces=traces,
        prefill=jax.jit(prefill, compiler_options=FAST),
        generate=jax.jit(generate, compiler_options=FAST),
        is_match=accept.name == "match",
        draft_forward=None,
    )


METHODS = (
    "plain",
    "lookup",
    "example",
    "draft",
    "self",
    "first_layers",
    "corrupted",
    "tree",
    "junk",
    "first_of",
    "in_widths",
    "tree_in_widths",
    "draft_rejection",
    "self_rejection",
)
MATCH_METHODS = tuple(name for name in METHODS if "rejection" not in name)
OTHERS: dict[str, Callable[[], Method]] = {}
"""More rows of the contract table, by name; tests/drafters adds its own."""


@functools.cache
def method(name: str, capacity: int = CAPACITY) -> Method:
    """One row of the contract table, compiled on first use."""
    if name in OTHERS:
        return OTHERS[name]()
    target = tiny_params()
    draft = weights(DRAFT_CONFIG, 7)
    layers = {"num_layers": 1}
    oracle = draft_model(tiny(), K)
    rejection = {"accept": acceptance.rejection}
    table = {
        "plain": lambda: (none(), {}, None),
        "lookup": lambda: (lookup(K, max_ngram=2), {}, None),
        "example": lambda: (last_successor(K, VOCAB), {}, None),
        "draft": lambda: (
            draft_model(tiny_draft(), K),
            {"own": draft},
            (tiny_draft(), draft),
        ),
        "self": lambda: (oracle, {"shared": target}, (tiny(), target)),
        "first_layers": lambda: (
            draft_model(tiny(**layers), K),
            {"shared": target},
            (tiny(**layers), target),
        ),
        "corrupted": lambda: (
            corrupted(oracle),
            {"shared": target},
            (tiny(), target),
        ),
        "tree": lambda: (
            tree_of(corrupted(oracle)),
            {"shared": target},
            (tiny(), target),
        ),
        "junk": lambda: (junk(), {}, None),
        "first_of": lambda: (
            first_of(lookup(3, max_ngram=2), corrupted(oracle)),
            {"own": DrafterParams(own=((), None), shared=((), target))},
            (tiny(), target),
        ),
        "in_widths": lambda: (
            limited(confident(corrupted(oracle)), threshold(0.3)),
            {"shared": target, "widths": (0, 2, K)},
            (tiny(), target),
        ),
        "tree_in_widths": lambda: (
            tree_of(corrupted(oracle)),
            {"shared": target, "widths": (3, 2 * K)},
            (tiny(), target),
        ),
        "draft_rejection": lambda: (
            draft_model(tiny_draft(), K, coupled=False),
            {"own": draft} | rejection,
            (tiny_draft(), draft),
        ),
        "self_rejection": lambda: (
            draft_model(tiny(), K, coupled=False),
            {"shared": target} | rejection,
            (tiny(), target),
        ),
    }
    drafter, kwargs, forward = table[name]()
    built = compiled(tiny(), drafter, target=target, capacity=capacity, **kwargs)
    return built._replace(draft_forward=forward)


# ---- Requests and runs ---------------------------------------------------------------


def make_request(
    prompts,
    *,
    max_new=20,
    stop=(),
    seeds=None,
    max_draft=99,
    buffer=BUFFER,
    pad=0,
    **params,
) -> Request:
    """Requests from lists of tokens; `stop` is one list of ids, or one per row."""
    batch = len(prompts)
    tokens = np.full((batch, buffer), pad, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    stops = stop if stop and isinstance(stop[0], list | tuple) else [stop] * batch
    stop_tokens = np.zeros((batch, 4), np.int32)
    for row, ids in enumerate(stops):
        stop_tokens[row, : len(ids)] = ids
    seeds = range(100, 100 + batch) if seeds is None else seeds
    return Request(
        prompt=jnp.asarray(tokens),
        prompt_length=jnp.asarray([len(p) for p in prompts], jnp.int32),
        max_new_tokens=_row(max_new, batch),
        max_draft_length=_row(max_draft, batch),
        stop_tokens=jnp.asarray(stop_tokens),
        num_stop_tokens=jnp.asarray([len(s) for s in stops], jnp.int32),
        key=jnp.stack([jax.random.key(seed) for seed in seeds]),
        sampling=sampling.make_sampling_params(batch, **params),
    )


def sequences_with(request, tokens, length) -> Sequences:
    """What a drafter sees of requests that came as far as these tokens."""
    buffer = np.zeros((len(tokens), CAPACITY), np.int32)
    buffer[:, : tokens.shape[1]] = tokens
    length = jnp.asarray(length, jnp.int32)
    return Sequences(
        tokens=jnp.asarray(buffer),
        length=length,
        prompt_length=length,
        limit=length + request.max_new_tokens,
        finish=jnp.zeros_like(length),
        max_draft_length=request.max_draft_length,
        stop_tokens=request.stop_tokens,
        num_stop_tokens=request.num_stop_tokens,
        key=request.key,
        sampling=request.sampling,
    )


def _row(value, batch):
    return jnp.broadcast_to(jnp.asarray(value, jnp.int32), (batch,))


def pick(tree, rows):
    """Some rows of anything whose leaves lead with B."""
    rows = np.asarray(rows)
    return jax.tree.map(lambda x: x[rows], tree)


PROMPTS = (
    [3],
    [5, 17, 40],
    [11, 12, 11, 12, 11],
    [7, 90, 33, 2, 61, 8, 19, 44, 25, 70, 1, 54, 77, 15, 88, 42, 6, 31, 64, 29],
)
"""Ragged on purpose: nothing to prefill, part of a chunk, and more than one."""


def ragged(**kwargs) -> Request:
    """Four rows with different prompts, lengths, limits (and temperatures)."""
    kwargs = {"max_new": [17, 22, 9, 20]} | kwargs
    return make_request(PROMPTS, **kwargs)


TEMPERATURES = [0.0, 0.7, 1.0, 1.3]


def run(built: Method, request, *, steps: int = SLOTS, params=None):
    """Prefill and generate; the final state, the records, and how many steps ran."""
    params = built.params if params is None else params
    state = built.prefill(params, request)
    return built.generate(params, state, jnp.int32(steps))


def tokens_of(state) -> list[list[int]]:
    """What each row generated."""
    seq = state.sequences
    rows = zip(
        np.asarray(seq.tokens),
        np.asarray(seq.prompt_length),
        np.asarray(seq.length),
        strict=True,
    )
    return [row[start:end].tolist() for row, start, end in rows]


def reasons(state) -> list[FinishReason]:
    return [FinishReason(int(x)) for x in np.asarray(state.sequences.finish)]


def output(name: str, request) -> list[list[int]]:
    return tokens_of(run(method(name), request)[0])


def plain(request) -> list[list[int]]:
    """What plain decoding says to the same requests."""
    return output("plain", request)


FULL = 64


@functools.cache
def _full_forward(model: Model):
    def forward(params, tokens):
        batch = tokens.shape[0]
        position = jnp.arange(FULL, dtype=jnp.int32)[None]
        position = jnp.broadcast_to(position, (batch, FULL))
        cache = model.init_cache(batch, FULL)
        return model.forward(params, cache, tokens, position, None)

    return jax.jit(forward, compiler_options=FAST)


def full_forward(tokens, model: Model | None = None, params=None):
    """Cache and output after reading whole sequences at once, from nothing."""
    model = tiny() if model is None else model
    params = tiny_params() if params is None else params
    return _full_forward(model)(params, jnp.asarray(tokens)[:, :FULL])


def full_logits(tokens):
    """Logits of TINY after every token of one sequence, in one forward, no cache."""
    padded = np.zeros((1, FULL), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(full_forward(padded)[1].logits)[0, : len(tokens)]


def is_greedy(prompt, generated) -> bool:
    """Whether every generated token is the full forward's first choice (oracle O1)."""
    logits = full_logits([*prompt, *generated])
    choice = np.argmax(logits, axis=-1)[len(prompt) - 1 : -1]
    return choice.tolist() == list(generated)


def assert_live_equal(cache, reference, length):
    """Live entries of a KV cache against those of a reference, up to rounding."""
    for ours, theirs in (
        *zip(cache.keys, reference.keys, strict=True),
        *zip(cache.values, reference.values, strict=True),
    ):
        # In NumPy: every other length of a slice would be another program.
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        for row, num in enumerate(np.asarray(length)):
            np.testing.assert_allclose(
                ours[row, :, :num], theirs[row, :, :num], rtol=0, atol=3e-6
            )


def assert_one_behind(built: Method, state):
    """I1 for both caches: they hold a fresh reading of the committed prefix."""
    length = np.asarray(state.sequences.length)
    np.testing.assert_array_equal(state.cache.length, length - 1)
    fresh, _ = full_forward(state.sequences.tokens)
    assert_live_equal(state.cache, fresh, length - 1)
    if built.draft_forward is None:
        return
    draft = draft_state(state.drafter)
    np.testing.assert_array_equal(draft.cache.length + draft.num_unread, length - 1)
    assert np.all(np.asarray(draft.num_unread) <= 1)
    fresh, _ = full_forward(state.sequences.tokens, *built.draft_forward)
    assert_live_equal(draft.cache, fresh, draft.cache.length)


def draft_state(state):
    """The draft model's state within a drafter's."""
    return state[1] if isinstance(state, tuple) else state


def poison(state, value: float):
    """Fills every scratch entry of the state: all caches' tails and the tokens."""

    def spoil(cache):
        slot = jnp.arange(cache.keys[0].shape[2], dtype=jnp.int32)
        is_tail = (slot[None] >= cache.length[:, None])[:, None, :, None]

        def fill(x):
            return jnp.where(is_tail, jnp.asarray(value, x.dtype), x)

        return cache.replace(
            keys=tuple(map(fill, cache.keys)), values=tuple(map(fill, cache.values))
        )

    seq = state.sequences
    slot = jnp.arange(seq.tokens.shape[1], dtype=jnp.int32)[None]
    tokens = jnp.where(slot < seq.length[:, None], seq.tokens, jnp.int32(VOCAB - 1))
    drafter = jax.tree.map(
        lambda x: spoil(x) if isinstance(x, KVCache) else x,
        state.drafter,
        is_leaf=lambda x: isinstance(x, KVCache),
    )
    return state.replace(
        sequences=seq.replace(tokens=tokens),
        cache=spoil(state.cache),
        drafter=drafter,
    )


def check_last_chunk(build) -> None:
    """A row has room for what it says, and none for the padding of its chunks.

    Args:
        build: ``(capacity=, prefill_chunk=) -> Method``.
    """
    small, large = (build(capacity=n, prefill_chunk=100) for n in (256, 512))
    room = 256 - small.strategy.headroom
    assert 200 + 100 > 256 > room > 215  # The third chunk is the one.
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (room - 12, 203, 5)]
    request = make_request(prompts, max_new=12, buffer=256)
    (found, *records), (wanted, *others) = run(small, request), run(large, request)
    assert tokens_of(found) == tokens_of(wanted)
    assert [len(said) for said in tokens_of(found)] == [12, 12, 12]
    jax.tree.map(np.testing.assert_array_equal, records, others)

    def is_cache(node):
        return isinstance(node, KVCache)

    # All that the target and the drafter remember, in rows of either length.
    for one, other in zip(
        *(
            jax.tree.leaves((s.cache, s.drafter), is_leaf=is_cache)
            for s in (found, wanted)
        ),
        strict=True,
    ):
        if not is_cache(one):
            np.testing.assert_array_equal(one, other)
            continue
        assert one.keys[0].shape[2] == 256 < other.keys[0].shape[2]
        np.testing.assert_array_equal(one.length, other.length)
        for row, end in enumerate(np.asarray(one.length)):
            for a, b in zip(
                (*one.keys, *one.values), (*other.keys, *other.values), strict=True
            ):
                np.testing.assert_array_equal(a[row, :, :end], b[row, :, :end])

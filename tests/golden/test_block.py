"""Block drafters (DFlash, DSpark) against the published implementations."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from helpers_sampling import make_sequences
from reading import read_prompts

import jaxdec
from jaxdec import draft_length
from jaxdec.drafters.dspark import block_drafter, markov_start
from jaxdec.io.drafters.block import read_block, recognise
from jaxdec.io.drafters.sharing import share_with_target
from jaxdec.io.safetensors import open_stored
from jaxdec.models.block import make_block_net
from jaxdec.models.block_weights import block_params_from_tensors
from jaxdec.models.decoder import make_model
from jaxdec.types import Commit, DrafterParams

CAPACITY = 256
ROUNDS = range(4)
STORED = ("F32", "I64", "BOOL")


@functools.cache
def target_of(folder):
    return jaxdec.load(folder, dtype="float32")


def config_of(case):
    return json.loads((case.folder / "config.json").read_text(encoding="utf-8"))


def load(case):
    """The target, the network and its arrays, as a person would get them."""
    lm = target_of(case.target)
    tensors = open_stored(case.folder, STORED)
    checkpoint = read_block(config_of(case), tensors, lm.config)
    checkpoint = share_with_target(checkpoint, lm.params)
    config = checkpoint.config
    own = block_params_from_tensors(config, checkpoint.tensors)
    return lm, make_block_net(config), DrafterParams(own=own, shared=lm.params)


def is_block(case):
    return recognise(config_of(case), {}) is not None


def one_round(net, drafter, params, state, commit, sequences):
    """`extend` and `propose`, and everything that they compute on the way."""
    config = net.config
    state = drafter.extend(params, state, commit)
    _, draft = drafter.propose(params, state, sequences)
    anchor = sequences.anchor
    rows = net.read(params, state.cache, anchor)
    hidden = rows[:, config.first :]
    base = net.logits(params, rows)
    logits = base[:, config.first :]
    previous = jnp.concatenate([anchor[:, None], draft.tokens[:, :-1]], axis=1)
    head = net.markov(params)
    if head is not None:
        start = markov_start(net, params, rows, anchor)
        logits = logits + head.unrolled(start, previous, hidden)
    confidence = None
    if config.confidence != "none":
        confidence = net.confidence(params, hidden, previous)
    return (
        state,
        draft,
        {
            "new_fused": net.fuse(params, commit.features)[0],
            "block_hidden": rows[0],
            "base_logits": base[0],
            "draft_logits": logits[0],
            "confidence_logits": None if confidence is None else confidence[0],
        },
    )


@pytest.mark.golden("drafter", only=is_block)
def test_rounds(case):
    """Four scripted rounds: every intermediate value, and the drafted tokens."""
    lm, net, params = load(case)
    expected = case.expected()
    drafter = block_drafter(net)
    assert drafter.max_length == case.facts["tokens_per_round"]
    assert net.config.sample_from_anchor == case.facts["sample_from_anchor"]
    program = jax.jit(
        functools.partial(one_round, net, drafter), compiler_options=toy.FAST
    )
    committed = expected["committed"]
    features = feature_rows(lm, net.config.taps, committed)
    state = drafter.init(1, CAPACITY)
    ends = [int(expected[f"r{r}.s"][0]) for r in ROUNDS]
    # Committed tokens that one `extend` reads, live or not.
    width = -(-max(np.diff([0, *ends])) // 16) * 16
    start = 0
    for r in ROUNDS:
        e = {
            k.removeprefix(f"r{r}."): v
            for k, v in expected.items()
            if k.startswith(f"r{r}.")
        }
        s = ends[r]
        num = s - start
        assert committed[s] == e["root"][0]
        case.close(f"r{r}.new_features", features[start:s], e["new_features"], "hidden")
        tokens = np.zeros((1, width + 1), np.int32)
        tokens[0, : num + 1] = committed[start : s + 1]
        rows = np.full((1, width, e["new_features"].shape[1]), np.nan, np.float32)
        rows[0, :num] = e["new_features"]
        commit = Commit(
            tokens=jnp.asarray(tokens),
            features=jnp.asarray(rows),
            length=jnp.asarray([num], jnp.int32),
        )
        state, draft, got = program(
            params,
            state,
            commit,
            make_sequences([committed[: s + 1]], 1, capacity=CAPACITY),
        )
        got["new_fused"] = got["new_fused"][:num]
        if "base_logits" in e and len(e["base_logits"]) < net.config.block_size:
            got["base_logits"] = got["base_logits"][net.config.first :]
        for name in ("new_fused", "block_hidden"):
            case.close(f"r{r}.{name}", got[name], e[name], "hidden")
        for name in ("base_logits", "draft_logits", "confidence_logits"):
            if name in e:
                case.close(f"r{r}.{name}", got[name], e[name])
        case.equal(f"r{r}.draft_tokens", draft.tokens[0], e["draft_tokens"])
        assert int(draft.length[0]) == drafter.max_length
        np.testing.assert_array_equal(state.cache.length, [s])
        start = s


def feature_rows(lm, taps, tokens):
    """The target's features at every token, the last one aside."""
    reads, _ = read_prompts(lm, [tokens[:-1]])
    return np.concatenate([reads[0].taps[tap] for tap in taps], axis=-1)


@pytest.mark.golden("drafter-end-to-end", only=is_block)
def test_end_to_end(case):
    """The engine accepts as many draft tokens in every round as the original loop."""
    lm, net, params = load(case)
    expected = case.expected()
    drafter = block_drafter(net)
    threshold = case.facts.get("confidence_threshold")
    if threshold is not None:
        rule = draft_length.threshold(threshold, on="slot")
        drafter = draft_length.limited(drafter, rule)
    built = toy.compiled(
        make_model(lm.config, taps=drafter.taps),
        drafter,
        target=lm.params,
        own=params.own,
        shared=params.shared,
    )
    prompts = [expected["prompt_0"], expected["prompt_1"]]
    most, longest = case.facts["max_new_tokens"], drafter.max_length
    request = toy.make_request(
        [p.tolist() for p in prompts], max_new=most + longest + 1, buffer=64
    )
    # The originals sample the first token from the prompt's own forward.
    first = request.replace(max_draft_length=jnp.zeros((2,), jnp.int32))
    state, _, _ = toy.run(built, first, steps=1)
    after = state.sequences.replace(max_draft_length=request.max_draft_length)
    state, info, _ = built.generate(
        built.params, state.replace(sequences=after), jnp.int32(toy.SLOTS)
    )
    for row in range(2):
        output = expected[f"output_{row}"]
        case.equal(f"output_{row}", state.sequences.tokens[row, : len(output)], output)
        want, offered = expected[f"accepted_{row}"], expected[f"proposed_{row}"]
        # Up to the round that crosses the limit; the first token came before.
        rounds = int(np.sum(1 + np.cumsum(want + 1) < most)) + 1
        for name, ours, theirs in (
            ("accepted", info.num_accepted, want),
            ("proposed", info.num_drafted, offered),
        ):
            case.equal(f"{name}_{row}", ours[row, :rounds], theirs[:rounds])

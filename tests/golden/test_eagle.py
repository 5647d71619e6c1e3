"""EAGLE drafters against the published implementations, from their files on."""

import functools
import json
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from reading import read_prompts

import jaxdec
from jaxdec import sampling
from jaxdec.drafters.eagle import eagle, recurrent_net
from jaxdec.drafters.recurrent_tree import best_nodes, grow, recurrent_tree
from jaxdec.io.drafters.eagle import read_eagle, recognise
from jaxdec.io.drafters.sharing import share_with_target
from jaxdec.io.safetensors import open_stored
from jaxdec.models.decoder import make_model
from jaxdec.models.eagle import make_network
from jaxdec.models.eagle_config import EagleConfig
from jaxdec.models.eagle_weights import eagle_params_from_tensors
from jaxdec.types import Commit, Drafter, DrafterParams, Sequences

BUFFER = 256
STORED = ("F32", "I64", "BOOL")


def is_eagle(case):
    return case.facts["family"] in ("eagle1", "eagle3", "peagle")


def has_tree(case):
    return is_eagle(case) and "tree" in case.facts


class Loaded(NamedTuple):
    """A case's drafter beside its target."""

    lm: jaxdec.LM
    config: EagleConfig
    params: DrafterParams


@functools.cache
def load_target(folder):
    return jaxdec.load(folder, dtype="float32")


@functools.cache
def load(case) -> Loaded:
    lm = load_target(case.target)
    values = json.loads((case.folder / "config.json").read_text(encoding="utf-8"))
    tensors = open_stored(case.folder, STORED)
    assert recognise(values, tensors.shapes)
    checkpoint = read_eagle(values, tensors, lm.config, {})
    checkpoint = share_with_target(checkpoint, lm.params)
    own = eagle_params_from_tensors(checkpoint.config, checkpoint.tensors)
    return Loaded(lm, checkpoint.config, DrafterParams(own=own, shared=lm.params))


def sequences_of(tokens) -> Sequences:
    """What the engine would show a drafter after these tokens."""
    request = toy.make_request([list(map(int, tokens))], buffer=BUFFER)
    return Sequences(
        tokens=request.prompt,
        length=request.prompt_length,
        prompt_length=request.prompt_length,
        limit=request.prompt_length + 64,
        finish=jnp.zeros((1,), jnp.int32),
        max_draft_length=request.max_draft_length,
        stop_tokens=request.stop_tokens,
        num_stop_tokens=request.num_stop_tokens,
        key=request.key,
        sampling=request.sampling,
    )


def features_of(loaded, tokens):
    """The taps of every token, as the drafter reads them."""
    reads, _ = read_prompts(loaded.lm, [tokens])
    taps = [*reads[0].taps, reads[0].normed_hidden]
    return np.concatenate([taps[t] for t in loaded.config.taps], axis=-1)


def rounds(expected):
    """Every scripted round: its number, and what was committed since the last."""
    start = 0
    committed = expected["committed"]
    width = max(len(expected[f"r{r}.new_features"]) for r in range(4))
    for r in range(4):
        end = int(expected[f"r{r}.s"][0])
        features = expected[f"r{r}.new_features"]
        assert committed[end] == expected[f"r{r}.root"][0]
        room = width - (end - start)
        tokens = np.pad(committed[start : end + 1], (0, room))
        commit = Commit(
            tokens=jnp.asarray(tokens)[None],
            features=jnp.asarray(np.pad(features, ((0, room), (0, 0))))[None],
            length=jnp.asarray([end - start], jnp.int32),
        )
        yield r, commit, sequences_of(committed[: end + 1])
        start = end


class Programs(NamedTuple):
    """A drafter, one round of it, and the numbers behind its network."""

    drafter: Drafter
    round: Callable
    """``(params, state, commit, sequences) -> (state, draft)``."""
    rows: Callable
    """``(params, state, commit)``: what the new rows read, and what they pass on."""
    behind: Callable
    """``(params, state, tokens)``: hidden state and logits behind every draft."""


@functools.cache
def programs(config: EagleConfig, length: int) -> Programs:
    net, network = recurrent_net(config), make_network(config)
    drafter = eagle(config, length=length)
    num = length - 1

    def round(params, state, commit, sequences):
        state = drafter.extend(params, state, commit)
        return drafter.propose(params, state, sequences)

    def rows(params, state, commit):
        fused, tokens = net.fuse(params, commit.features), commit.tokens[:, 1:]
        entered, _ = network.enter(params, fused, tokens)
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        position = state.cache.length[:, None] + steps
        _, hidden = net.write(params, state.cache, fused, tokens, position)
        return entered[0], hidden[0]

    def behind(params, state, tokens):
        index = jnp.arange(num, dtype=jnp.int32)
        causal = (index[:, None] >= index[None])[None]
        position = state.cache.length[:, None] + index[None]
        held, first = net.init_held(1, num), state.hidden[:, None]

        def read(held, start, hidden, tokens, mask):
            here = jax.lax.dynamic_slice_in_dim(position, start, tokens.shape[1], 1)
            return net.read(
                params, state.cache, held, start, hidden, tokens, here, position, mask
            )

        def step(carry, i):
            held, hidden = carry
            token = jax.lax.dynamic_slice_in_dim(tokens, i, 1, axis=1)
            mask = jax.lax.dynamic_slice_in_dim(causal, i, 1, axis=1)
            held, hidden = read(held, i, hidden, token, mask)
            return (held, hidden), hidden[:, 0]

        if config.is_parallel:
            masked = network.mask_hidden(params)
            ids = jnp.full((1, num), config.mask_token, jnp.int32)
            masked = jnp.broadcast_to(masked, (1, num, net.hidden_size))
            _, later = read(held, jnp.int32(0), masked, ids, causal)
        else:
            _, later = jax.lax.scan(step, (held, first), index)
            later = later[:, 0][None]
        hidden = jnp.concatenate([first, later], axis=1)
        return hidden[0], net.logits(params, hidden)[0]

    def jit(function):
        return jax.jit(function, compiler_options=toy.FAST)

    return Programs(drafter, jit(round), jit(rows), jit(behind))


@pytest.mark.golden("drafter", only=is_eagle)
def test_features(case):
    """What the drafter is given is what the target felt, tap by tap."""
    loaded, expected = load(case), case.expected()
    features = features_of(loaded, expected["committed"])
    start = 0
    for r in range(4):
        end = int(expected[f"r{r}.s"][0])
        name = f"r{r}.new_features"
        case.close(name, features[start:end], expected[name], "hidden")
        start = end


@pytest.mark.golden("drafter", only=is_eagle)
def test_chain(case):
    """Every number of four rounds, cache growth and rejections between them."""
    loaded, expected = load(case), case.expected()
    length = case.facts["tokens_per_round"]
    program, params = programs(loaded.config, length), loaded.params
    state = program.drafter.init(1, BUFFER)
    if "r0.mask_fused" in expected:
        masked = jax.jit(make_network(loaded.config).mask_hidden)(params)
        case.close("mask_fused", masked, expected["r0.mask_fused"], "hidden")
    for r, commit, sequences in rounds(expected):
        num = int(commit.length[0])
        entered, extended = program.rows(params, state, commit)
        state, draft = program.round(params, state, commit, sequences)
        assert np.asarray(draft.length) == [length]
        tokens = f"r{r}.draft_tokens"
        case.equal(tokens, np.asarray(draft.tokens)[0], expected[tokens])
        hidden, logits = program.behind(params, state, draft.tokens)
        case.close(f"r{r}.draft_logits", logits, expected[f"r{r}.draft_logits"])
        found = {
            "new_fused": np.asarray(entered)[:num],
            "extend_hidden": np.asarray(extended)[:num],
            "extend_hidden_last": np.asarray(extended)[num - 1],
            "draft_hidden": hidden,
        }
        for name, ours in found.items():
            if (name := f"r{r}.{name}") in expected:
                case.close(name, ours, expected[name], "hidden")
        assert (
            f"r{r}.extend_hidden" in expected or f"r{r}.extend_hidden_last" in expected
        )


@functools.cache
def tree_program(config: EagleConfig, nodes: int, depth: int, width: int):
    """One round of a tree, and the numbers behind it."""
    net = recurrent_net(config)
    drafter = recurrent_tree(net, nodes=nodes, depth=depth, width=width)

    def run(params, state, commit, sequences):
        state = drafter.extend(params, state, commit)
        grown = grow(net, params, state, sequences, depth=depth, width=width)
        _, _, scores = best_nodes(grown, nodes)
        state, draft = drafter.propose(params, state, sequences)
        seen = sampling.draft_nodes(sequences.anchor, draft)
        return state, {
            "tree_tokens": seen.tokens[0],
            "tree_parent": jnp.concatenate([jnp.full(1, -1), draft.parents[0]]),
            "tree_depth": seen.depth[0],
            "tree_mask": seen.ancestors[0],
            "tree_scores": jnp.concatenate([jnp.zeros(1), scores[0]]),
            "root_logits": net.logits(params, state.hidden[:, None])[0, 0],
        }

    return drafter, jax.jit(run, compiler_options=toy.FAST)


@pytest.mark.golden("drafter", only=has_tree)
def test_tree(case):
    """Tokens, parents, depths and masks of four rounds, node for node."""
    loaded, expected = load(case), case.expected("expected_tree.safetensors")
    shape = case.facts["tree"]
    drafter, run = tree_program(
        loaded.config,
        nodes=shape["total_tokens"] - 1,
        depth=shape["depth"] + 1,
        width=shape["top_k"],
    )
    state = drafter.init(1, BUFFER)
    for r, commit, sequences in rounds(expected):
        state, found = run(loaded.params, state, commit, sequences)
        for name in ("tree_tokens", "tree_parent", "tree_depth", "tree_mask"):
            case.equal(f"r{r}.{name}", found[name], expected[f"r{r}.{name}"])
        for name in ("tree_scores", "root_logits"):
            case.close(f"r{r}.{name}", found[name], expected[f"r{r}.{name}"])


@pytest.mark.golden("drafter-end-to-end", only=is_eagle)
def test_end_to_end(case):
    """The whole engine: the target's own output, and as many drafts kept each step.

    The published loops sample one token before they first draft, so that token is part
    of the prompt here. Their last rounds may run past the end; ours are cut there.
    """
    loaded, expected = load(case), case.expected()
    if "tree" in case.facts:
        shape = case.facts["tree"]
        drafter = recurrent_tree(
            recurrent_net(loaded.config),
            nodes=shape["total_tokens"] - 1,
            depth=shape["depth"] + 1,
            width=shape["top_k"],
        )
    else:
        drafter = eagle(loaded.config, length=case.facts["tokens_per_round"])
    prompts = [expected["prompt_0"], expected["prompt_1"]]
    outputs = [expected["output_0"], expected["output_1"]]
    begun = [o[: len(p) + 1].tolist() for o, p in zip(outputs, prompts, strict=True)]
    num = case.facts["max_new_tokens"] - 1
    built = toy.compiled(
        make_model(loaded.lm.config, taps=loaded.config.taps),
        drafter,
        target=loaded.lm.params,
        own=loaded.params.own,
        shared=loaded.params.shared,
    )
    request = toy.make_request(
        begun, max_new=num, max_draft=drafter.max_length, buffer=BUFFER // 2
    )
    state, info, steps = toy.run(built, request)
    tokens = toy.tokens_of(state)
    for i, output in enumerate(outputs):
        case.equal(f"output_{i}", tokens[i], output[len(prompts[i]) + 1 :])
        is_live = np.asarray(info.is_live)[i]
        kept, emitted = (
            np.asarray(x)[i, is_live] for x in (info.num_accepted, info.num_emitted)
        )
        accepted = expected[f"accepted_{i}"]
        # Whole rounds: those that end before the limit.
        whole = np.cumsum(emitted) < num
        assert whole.sum() >= len(accepted) - 2
        case.equal(f"accepted_{i}", kept[whole], accepted[: whole.sum()])
        assert np.all(kept[~whole] <= accepted[whole.sum() : is_live.sum()])

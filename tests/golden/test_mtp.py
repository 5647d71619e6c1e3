"""MTP modules against the published implementations: every hidden state and draft.

The scripted rounds drive the drafter as the engine does: `extend` with what became
known, then `propose`. Hidden states within are computed by the same pure functions.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from reading import read_prompts

import jaxdec
from jaxdec.drafters.mtp import mtp
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.io.drafters.mtp import read_mtp, recognise
from jaxdec.io.safetensors import open_tensors, read_json
from jaxdec.models.mtp import make_mtp, mtp_params_from_tensors
from jaxdec.types import Commit, DrafterParams, Sequences

REFUSED = {"deepseek_v3": "MLA"}
"""Kinds of models, by ``model_type``, and what the refusal must speak of."""
CAPACITY = 256
WIDTH = 8
"""Rows that become known are padded to a multiple of this."""


def model_type(case) -> str:
    values = read_json(case.folder / "config.json")
    return values.get("text_config", values).get("model_type")


def is_refused(case) -> bool:
    return model_type(case) in REFUSED


@functools.cache
def target_of(folder):
    return jaxdec.load(folder, dtype="float32")


def sources(case) -> dict[str, str | None]:
    """The hidden source that each expected file was made with; None: the default."""
    told = case.facts["hidden_source"]
    if isinstance(told, str):
        return {"expected.safetensors": None}
    return {file: text.split()[0] for file, text in told.items()}


def read(case, target, **overrides):
    values = read_json(case.folder / "config.json")
    tensors = open_tensors(case.folder)
    assert recognise(values, tensors.shapes) is not None
    return read_mtp(values, tensors, target, overrides)


@pytest.mark.golden("mtp")
def test_refused_by_name(case):
    if not is_refused(case):
        pytest.skip("a kind that is supported")
    with pytest.raises(CheckpointError, match=REFUSED[model_type(case)]):
        read(case, None)
    with pytest.raises(CheckpointError, match=REFUSED[model_type(case)]):
        target_of(case.folder)


@functools.cache
def program(config, length):
    """A drafter, and one pass of it with all that is known of what lies within."""
    network = make_mtp(config)
    drafter = mtp(network, length)

    def drafted(params, state, tokens):
        """Output and logits of every row behind a draft.

        The vectors were made by rows that follow the permanent ones; so are these, not
        beside the cache as `propose` does it.
        """

        def step(carry, token):
            cache, hidden = carry
            logits = network.logits(params, 0, hidden)
            cache, out = network.write(params, 0, cache, hidden, token)
            cache = cache.commit(None, jnp.ones_like(cache.length))
            return (cache, out), (hidden[0, 0], logits[0, 0])

        carry = (state.cache, state.hidden[:, None])
        return jax.lax.scan(step, carry, tokens[:, None, None])[1]

    def run(params, state, commit, sequences, drafts):
        hidden, tokens = commit.features, commit.tokens[:, 1:]
        _, out = network.write(params, 0, state.cache, hidden, tokens)
        within = {
            "proj": network.combine(params, 0, hidden, tokens)[0],
            "out": out[0],
            "logits": network.logits(params, 0, out)[0],
        }
        state = drafter.extend(params, state, commit)
        _, draft = drafter.propose(params, state, sequences)
        return state, draft, within, drafted(params, state, drafts)

    return drafter, jax.jit(run, compiler_options=toy.FAST)


class Driver:
    """A drafter with its arrays, driven as the engine does."""

    def __init__(self, checkpoint, target, length):
        own = mtp_params_from_tensors(checkpoint.config, checkpoint.tensors)
        self.params = DrafterParams(own=own, shared=target)
        # Which hidden state comes in is the target's affair: one program for both.
        config = dataclasses.replace(checkpoint.config, hidden_source="post")
        drafter, self.run = program(config, length)
        self.state = drafter.init(1, CAPACITY)

    def round(self, case, name, new, drafts):
        """Checks one pass: `new` rows become known, then `drafts` are proposed."""
        num = len(new["tokens"])
        room = ((0, -(-num // WIDTH) * WIDTH - num),)
        tokens = np.pad(new["committed"], room).astype(np.int32)
        case.equal(f"{name}new_tokens", tokens[1 : num + 1], new["tokens"])
        commit = Commit(
            tokens=jnp.asarray(tokens)[None],
            features=jnp.asarray(np.pad(new["hidden"], (*room, (0, 0))))[None],
            length=jnp.asarray([num], jnp.int32),
        )
        length = int(self.state.cache.length[0]) + num
        self.state, draft, within, (hidden, logits) = self.run(
            self.params,
            self.state,
            commit,
            sequences_of(new["committed"], length),
            drafts["draft_tokens"],
        )
        for what in within.keys() & new.keys():
            kind = "logits" if what == "logits" else "hidden"
            case.close(f"{name}new {what}", within[what][:num], new[what], kind)
        case.equal(f"{name}draft_tokens", draft.tokens[0], drafts["draft_tokens"])
        assert int(draft.length[0]) == len(drafts["draft_tokens"])
        case.close(f"{name}draft_hidden", hidden, drafts["draft_hidden"], "hidden")
        case.close(f"{name}draft_logits", logits, drafts["draft_logits"])


@pytest.mark.golden("mtp")
def test_rounds(case):
    """Every pass with a target: what enters the blocks, what leaves them, drafts."""
    if is_refused(case) or case.facts["pairs_with"] is None:
        pytest.skip("no target to draft for")
    lm = target_of(case.target)
    length = case.facts["tokens_per_round"]
    for file, source in sources(case).items():
        overrides = {} if source is None else {"hidden_source": source}
        checkpoint = read(case, lm.config, **overrides)
        driver = Driver(checkpoint, lm.params, length)
        assert checkpoint.config.taps == (lm.config.num_layers + (source != "pre"),)
        expected = case.expected(file)
        for i in range(sum(name.endswith(".root") for name in expected)):
            name = f"r{i}."
            end = int(expected[f"{name}s"][0])
            num = len(expected[f"{name}new_tokens"])
            new = {
                "committed": expected["committed"][end - num : end + 1],
                "tokens": expected[f"{name}new_tokens"],
                "hidden": expected[f"{name}new_features"],
                "proj": expected[f"{name}new_proj"],
                "out": expected[f"{name}extend_hidden"],
            }
            assert new["committed"][-1] == expected[f"{name}root"][0]
            parts = ("draft_tokens", "draft_hidden", "draft_logits")
            driver.round(case, name, new, {p: expected[name + p] for p in parts})


@pytest.mark.golden("mtp")
def test_hidden_source(case):
    """Which of the target's hidden states the taps name, by default and if told."""
    if is_refused(case) or case.facts["pairs_with"] is None:
        pytest.skip("no target to draft for")
    lm = target_of(case.target)
    prompt = case.expected()["prompt"].tolist()
    (states,), _ = read_prompts(lm, [prompt])
    by_tap = {
        lm.config.num_layers: states.taps[-1],
        lm.config.num_layers + 1: states.normed_hidden,
    }
    for file, source in sources(case).items():
        overrides = {} if source is None else {"hidden_source": source}
        (tap,) = read(case, lm.config, **overrides).config.taps
        rows = case.expected(file)["r0.new_features"]
        case.close(f"{file} r0.new_features", by_tap[tap], rows, "hidden")
        if file == "expected.safetensors":
            assert read(case, lm.config).config.taps == (tap,), "the default"


def sequences_of(last, length) -> Sequences:
    """One greedy sequence that has been read up to `length`, and ends with `last`."""
    buffer = np.zeros((1, length + 1), np.int32)
    buffer[0, length + 1 - len(last) :] = last
    request = toy.make_request([[1]], max_new=100)
    return toy.sequences_with(request, buffer, np.array([length + 1]))


@pytest.mark.golden("mtp")
def test_module_alone(case):
    """A module whose model cannot be read: its own vectors, from given hidden rows."""
    if is_refused(case) or case.facts["pairs_with"] is not None:
        pytest.skip("has a target")
    expected = case.expected()
    driver = Driver(read(case, None), {}, case.facts["tokens_per_round"])
    new = {
        "committed": np.concatenate([[0], expected["tokens"]]),
        "tokens": expected["tokens"],
        "hidden": expected["hidden"],
        "proj": expected["new_proj"],
        "out": expected["extend_hidden"],
        "logits": expected["extend_logits"],
    }
    driver.round(case, "", new, expected)


@pytest.mark.golden("mtp")
def test_teacher_forced(case):
    """The training forward: step k reads step k - 1's output and the token k ahead."""
    expected = case.expected()
    if "tf.hidden" not in expected:
        pytest.skip("no training forward in this case")
    lm = target_of(case.target)
    checkpoint = read(case, lm.config)
    network = make_mtp(checkpoint.config)
    own = mtp_params_from_tensors(checkpoint.config, checkpoint.tensors)
    params = DrafterParams(own=own, shared=lm.params)

    @functools.partial(jax.jit, compiler_options=toy.FAST)
    def forward(hidden, tokens):
        hidden = network.forward(params, 0, hidden, tokens)
        return hidden, network.logits(params, 0, hidden)

    tokens = expected["tf.input_ids"]
    num_rows = len(expected["tf.logits_step0"])
    hidden = jnp.asarray(expected["tf.hidden"])[None, :num_rows]
    total = 0.0
    for step in range(case.facts["tokens_per_round"]):
        paired = jnp.asarray(tokens[None, step + 1 : step + 1 + num_rows])
        hidden, logits = forward(hidden, paired)
        logits = np.asarray(logits[0])
        case.close(f"tf.logits_step{step}", logits, expected[f"tf.logits_step{step}"])
        labels = tokens[step + 2 : step + 2 + num_rows]
        loss = np.log(np.exp(logits).sum(-1)) - logits[np.arange(num_rows), labels]
        name = f"tf.loss_step{step}"
        case.close(name, [loss.mean()], expected[name])
        total += loss.mean()
    case.close("tf.loss", [total], expected["tf.loss"])

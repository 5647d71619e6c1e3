"""Text in, text out, on a tiny model with a byte tokenizer."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers_sampling import make_sequences
from helpers_tiny import write_model

import jaxdec
from jaxdec import measure, sampling, scoring
from jaxdec.detokenize import TextStream
from jaxdec.models.decoder import make_model

PROMPTS = ["abcabcabcabc", "the cat and the cat and", "x"]
STRATEGIES = ("greedy", "sample", jaxdec.lookup(3), jaxdec.self_draft(1, length=3))


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return jaxdec.load(write_model(tmp_path_factory.mktemp("tiny")), dtype="float32")


def tokens_of(outputs):
    return [item.tokens for item in outputs]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: getattr(s, "name", s))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_strategies_say_the_same(lm, strategy, temperature):
    if strategy == "greedy" and temperature:
        strategy = "sample"
    options = dict(max_new_tokens=[9, 24, 17], temperature=temperature, seed=[1, 2, 1])
    plain = jaxdec.generate(lm, PROMPTS, strategy="sample", **options)
    found = jaxdec.generate(lm, PROMPTS, strategy=strategy, **options)
    assert tokens_of(found) == tokens_of(plain)
    assert [item.text for item in found] == [item.text for item in plain]
    alone = jaxdec.generate(
        lm,
        PROMPTS[1],
        strategy=strategy,
        max_new_tokens=24,
        temperature=temperature,
        seed=2,
    )
    assert alone[0].tokens == plain[1].tokens


@pytest.mark.parametrize("strategy", ["sample", "lookup"])
def test_stream_equals_generate(lm, strategy):
    options = dict(strategy=strategy, temperature=0.8, seed=5, max_new_tokens=40)
    whole = jaxdec.generate(lm, PROMPTS[0], **options)[0]
    for segment in (1, 3, 8):
        pieces = list(jaxdec.stream(lm, PROMPTS[0], segment=segment, **options))
        assert "".join(p.text for p in pieces) == whole.text
        assert tuple(t for p in pieces for t in p.tokens) == whole.tokens
        assert pieces[-1].finish_reason == whole.finish_reason
        assert all(p.finish_reason is None for p in pieces[:-1])


def test_b24_a_closed_stream_leaves_nothing_behind(lm):
    """Close after each of the first pieces and go on from there: the same tokens."""
    options = dict(strategy="lookup", temperature=0.8, seed=5)
    prompt = lm.tokenizer.encode(PROMPTS[0])
    whole = jaxdec.generate(lm, prompt, max_new_tokens=40, **options)[0]
    for num_pieces in range(1, 11):
        pieces = jaxdec.stream(lm, prompt, segment=1, max_new_tokens=40, **options)
        said = [t for _ in range(num_pieces) for t in next(pieces).tokens]
        pieces.close()
        assert num_pieces <= len(said) < 40
        rest = jaxdec.generate(
            lm, [*prompt, *said], max_new_tokens=40 - len(said), **options
        )
        assert (*said, *rest[0].tokens) == whole.tokens


@pytest.mark.parametrize("strategy", ["sample", "lookup"])
def test_cancelled_requests_keep_what_they_said(lm, strategy):
    options = dict(temperature=0.8, seed=5)
    whole = jaxdec.generate(
        lm, PROMPTS, strategy="sample", max_new_tokens=[1, 40, 40], **options
    )
    for times in (1, 2, 3):
        answers = iter([False] * (times - 1) + [True])
        out = jaxdec.generate(
            lm,
            PROMPTS,
            strategy=strategy,
            max_new_tokens=[1, 40, 40],
            cancelled=lambda answers=answers: next(answers),
            **options,
        )
        reasons = [item.finish_reason for item in out]
        assert reasons == ["length", "cancelled", "cancelled"]
        record = measure.evidence(out.run, out, with_costs=False)
        assert record.finish_reasons == {"length": 1, "cancelled": 2}
        for item, full, row in zip(out, whole, record.requests, strict=True):
            num = len(item.tokens)
            assert item.tokens == full.tokens[:num]
            assert item.text == lm.tokenizer.decode(item.tokens)
            assert row.num_emitted == num
            assert row.num_steps == (1 if len(full.tokens) == 1 else 8 * times - 7)
        assert 8 * times - 7 <= len(out[1].tokens) < 40


def test_cancelled_is_asked_between_segments_and_only_while_something_runs(lm):
    asked = []

    def after(times):
        asked.clear()
        return lambda: asked.append(1) or len(asked) == times

    options = dict(strategy="lookup", temperature=0.8, seed=5, max_new_tokens=40)
    whole = jaxdec.generate(lm, PROMPTS[0], **options)[0]
    pieces = jaxdec.stream(lm, PROMPTS[0], segment=2, cancelled=after(4), **options)
    shown = []
    while (piece := next(pieces)).finish_reason is None:
        shown.append(piece)
        assert len(asked) == len(shown) - 1
    assert (piece.finish_reason, piece.tokens, len(asked)) == ("cancelled", (), 4)
    with pytest.raises(StopIteration) as end:
        next(pieces)
    item = end.value.value[0]
    assert item.finish_reason == "cancelled"
    assert item.tokens == tuple(t for p in shown for t in p.tokens)
    assert item.tokens == whole.tokens[: len(item.tokens)] and len(item.tokens) >= 7
    assert item.text == "".join(p.text for p in [*shown, piece])
    for limit in (0, 1):
        nothing = options | dict(max_new_tokens=limit, cancelled=after(1))
        out = jaxdec.generate(lm, PROMPTS[0], **nothing)
        assert out[0].finish_reason == "length" and asked == []

    def breaks():
        raise RuntimeError("no answer")

    with pytest.raises(RuntimeError, match="no answer"):
        jaxdec.generate(lm, PROMPTS[0], cancelled=breaks, **options)
    assert jaxdec.generate(lm, PROMPTS[0], **options)[0] == whole
    with pytest.raises(ValueError, match="it must be a function"):
        jaxdec.call.check(lm, PROMPTS[0], cancelled=True)


@pytest.mark.parametrize("strategy", ["greedy", "lookup"])
@pytest.mark.parametrize("at", [0, 3, 4, 11])
def test_stop_string_ends_tokens_text_logprobs_and_evidence_at_one_place(
    lm, strategy, at
):
    free = jaxdec.generate(
        lm, PROMPTS[0], max_new_tokens=24, stop_tokens=[], logprobs=0
    )[0]
    spoken = [i for i, t in enumerate(free.tokens) if t < 128]
    if len(spoken) <= at + 1:
        pytest.fail("the tiny model no longer says plain characters here")
    first = spoken[at]
    stop = lm.tokenizer.decode(free.tokens[first : first + 1])
    cut = free.text.index(stop)
    out = jaxdec.generate(
        lm,
        PROMPTS[0],
        strategy=strategy,
        max_new_tokens=24,
        stop_tokens=[],
        stop=[stop, "never said \N{SNOWMAN}"],
        logprobs=0,
    )
    item = out[0]
    assert item.finish_reason == "stop_string"
    assert item.text == free.text[:cut]
    assert item.tokens == free.tokens[: len(item.tokens)]
    assert lm.tokenizer.decode(item.tokens).startswith(item.text)
    assert stop in lm.tokenizer.decode(item.tokens)
    assert stop not in lm.tokenizer.decode(item.tokens[:-1])
    assert len(item.logprobs) == len(item.tokens)
    evidence = measure.evidence(out.run, out, with_costs=False)
    assert evidence.num_emitted == len(item.tokens)
    assert evidence.finish_reasons == {"stop_string": 1}


def test_stream_never_shows_part_of_a_stop_string(lm):
    class Letters:
        def is_special(self, token):
            return token == 0

        def token_bytes(self, token):
            return {1: b"a", 2: b"<e", 3: b"nd", 4: b">", 5: "é".encode()[:1]}.get(
                token, "é".encode()[1:]
            )

    text = TextStream(Letters(), ["<end>"])
    assert text.push([1, 2]) == "a"
    assert text.push([3]) == ""
    assert text.push([1]) == "<enda"
    assert text.push([5]) == ""
    assert text.push([6, 0, 2, 3]) == "é"
    assert text.push([4, 1, 1]) == ""
    assert text.is_stopped
    assert text.text == "a<endaé"
    assert text.num_tokens == 10
    assert text.finish() == ""
    open_end = TextStream(Letters(), ["<end>"])
    open_end.push([1, 2, 5])
    assert open_end.finish() == "<e\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("strategy", ["sample", "lookup"])
def test_logprobs_equal_a_teacher_forced_pass(lm, strategy):
    out = jaxdec.generate(
        lm,
        PROMPTS,
        strategy=strategy,
        temperature=0.9,
        top_k=20,
        repetition_penalty=1.2,
        max_new_tokens=20,
        logprobs=3,
    )
    prompts = [list(p) for p in out.run.call.prompts]
    known = {}
    scores = scoring.score(lm, prompts, tokens_of(out), known)
    assert list(known.values()) == scores
    # What is known is not found again.
    marked = {pair: [0.5] for pair in known}
    assert scoring.score(lm, prompts[:1], tokens_of(out)[:1], marked) == [[0.5]]
    for item, expected in zip(out, scores, strict=True):
        np.testing.assert_allclose(item.logprobs, expected, atol=2e-4)
        for own, top, token in zip(
            item.logprobs, item.top_logprobs, item.tokens, strict=True
        ):
            values = [value for _, value in top]
            assert len(top) == 3 and values == sorted(values, reverse=True)
            assert own <= values[0] + 1e-6
            if token in dict(top):
                assert own == pytest.approx(dict(top)[token], abs=1e-6)


def teacher_forced_laws(lm, prompts, answers, options):
    """The sampling distribution at each place of answers that are already there.

    Each place is a row of its own, whose committed tokens are all that came before it.
    """
    model = make_model(lm.config)
    whole = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
    size = max(map(len, whole))
    tokens = jnp.asarray([row + [0] * (size - len(row)) for row in whole], jnp.int32)
    rows = [r for r, a in enumerate(answers) for _ in a]
    ends = [len(prompts[r]) + i for r, a in enumerate(answers) for i in range(len(a))]
    places = make_sequences(
        [whole[r][:end] for r, end in zip(rows, ends, strict=True)],
        1,
        capacity=size,
        stop_tokens=lm.stop_tokens,
        **{
            name: [v[r] for r in rows] if isinstance(v, list) else v
            for name, v in options.items()
        },
    ).replace(prompt_length=jnp.asarray([len(prompts[r]) for r in rows], jnp.int32))
    rows, last = jnp.asarray(rows, jnp.int32), jnp.asarray(ends, jnp.int32) - 1

    @jax.jit
    def laws(params, tokens, places):
        position = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), tokens.shape)
        cache = model.init_cache(len(whole), 256)
        _, output = model.forward(params, cache, tokens, position, None)
        nodes = sampling.chain_nodes(tokens[rows, last][:, None])
        adjusted = sampling.adjust(places, nodes, output.logits[rows, last][:, None])
        return sampling.log_probs(places.sampling, adjusted)[:, 0]

    found = np.asarray(laws(lm.params, tokens, places))
    return np.split(found, np.cumsum([len(a) for a in answers])[:-1])


def test_processed_logprobs_equal_a_teacher_forced_pass(lm):
    """Penalties, bias, bans, temperature and filters, as each token was drawn."""
    options = dict(
        temperature=[0.9, 0.0, 1.3],
        top_k=[20, 0, 0],
        top_p=[1.0, 1.0, 0.8],
        min_p=[0.0, 0.0, 0.02],
        repetition_penalty=[1.2, 1.5, 1.0],
        frequency_penalty=[0.0, 0.3, 0.2],
        logit_bias=[{101: 3.0}, None, {7: -1.0}],
        min_new_tokens=8,
        no_repeat_ngram=[0, 0, 3],
    )
    options_of_call = dict(max_new_tokens=20, seed=[3, 4, 5], **options)
    out = jaxdec.generate(
        lm,
        PROMPTS,
        strategy=jaxdec.self_draft(2, length=3),
        logprobs=30,
        processed_logprobs=True,
        **options_of_call,
    )
    plain = jaxdec.generate(lm, PROMPTS, strategy="sample", **options_of_call)
    assert tokens_of(out) == tokens_of(plain)
    assert (out.run.info.num_emitted > 1).any(axis=1).all()
    laws = teacher_forced_laws(lm, out.run.call.prompts, tokens_of(out), options)
    for item, law in zip(out, laws, strict=True):
        own = law[np.arange(len(law)), list(item.tokens)]
        np.testing.assert_allclose(item.logprobs, own, atol=2e-4)
        for place, top in zip(law, item.top_logprobs, strict=True):
            values = [value for _, value in top]
            best = np.sort(place[place > -np.inf])[::-1][:30]
            np.testing.assert_allclose(values, best, atol=2e-4)
            np.testing.assert_allclose(place[[t for t, _ in top]], values, atol=2e-4)
    assert out[1].logprobs == (0.0,) * len(out[1].tokens)
    assert [len(top) for top in out[1].top_logprobs] == [1] * len(out[1].tokens)
    assert {len(top) for top in out[0].top_logprobs} == {20}


def test_each_request_has_its_own_stops(lm):
    """In a batch each request ends where it ends alone, and for the same reason."""
    free = jaxdec.generate(lm, PROMPTS, max_new_tokens=24, stop_tokens=[])
    token = free[0].tokens[-2]
    letter = next(c for c in free[2].text if c.isalpha())
    decode = lm.tokenizer.decode
    ends = [
        free[0].tokens.index(token) + 1,
        24,
        next(n for n in range(25) if letter in decode(free[2].tokens[:n])),
    ]
    assert token in free[1].tokens and ends[0] > 8 and ends[2] > 8
    stops = dict(
        stop_tokens=[[token, 7], [], None],
        stop=[None, ["unsaid", "\N{SNOWMAN}"], letter],
    )
    out = jaxdec.generate(
        lm, PROMPTS, strategy=jaxdec.lookup(3), max_new_tokens=24, **stops
    )
    wanted = [item.tokens[:n] for item, n in zip(free, ends, strict=True)]
    assert tokens_of(out) == wanted
    reasons = [item.finish_reason for item in out]
    assert reasons == ["stop_token", "length", "stop_string"]
    assert out[0].stop_token == token
    evidence = measure.evidence(out.run, out, with_costs=False)
    assert evidence.sampling["stop_tokens"] == [[token, 7], [], [256]]


def test_other_values_compile_nothing(lm):
    def call(**options):
        return jaxdec.generate(lm, PROMPTS[:1], strategy="lookup", **options).run

    call(max_new_tokens=20)
    before = len(lm.programs)
    for options in (
        dict(max_new_tokens=64),
        dict(max_new_tokens=5, temperature=0.5, top_k=3, top_p=0.9, min_p=0.01),
        dict(max_new_tokens=5, seed=77, repetition_penalty=1.3, no_repeat_ngram=3),
        dict(max_new_tokens=5, stop_tokens=[1, 2, 3], logit_bias={5: 1.0, 7: -1.0}),
        dict(max_new_tokens=5, stop_tokens=[], banned_tokens=[4, 9], stop="zz"),
    ):
        run = call(**options)
        assert run.num_compilations == 0 and run.compile_s == 0.0
    assert len(lm.programs) == before


def test_prompt_lengths_share_programs(lm):
    before = len(lm.programs)
    for length in range(5, 61, 5):
        jaxdec.generate(
            lm, [[65] * length], strategy=jaxdec.lookup(2), max_new_tokens=8
        )
    assert 2 * (len(lm.programs) - before) <= 3


def test_processor_sees_every_place_and_is_compiled_once(lm):
    def even_only(tokens, length, logits):
        """Bans odd ids after an even token."""
        last = tokens[length - 1]
        ids = jnp.arange(logits.shape[0], dtype=jnp.int32)
        return jnp.where((last % 2 == 0) & (ids % 2 == 1), -jnp.inf, logits)

    options = dict(max_new_tokens=24, processor=even_only, stop_tokens=[])
    plain = jaxdec.generate(lm, PROMPTS[:1], **options)
    drafted = jaxdec.generate(
        lm, PROMPTS[:1], strategy=jaxdec.self_draft(2, length=3), **options
    )
    assert drafted[0].tokens == plain[0].tokens
    said = [int(t) for t in [*plain.run.call.prompts[0][-1:], *plain[0].tokens]]
    assert all(b % 2 == 0 for a, b in zip(said, said[1:], strict=False) if a % 2 == 0)
    again = jaxdec.generate(lm, PROMPTS[:1], **options)
    assert again.run.num_compilations == 0


def test_seeds_may_be_numbers_or_keys(lm):
    options = dict(strategy="sample", temperature=1.0, max_new_tokens=12)
    number = jaxdec.generate(lm, PROMPTS[0], seed=42, **options)
    key = jaxdec.generate(lm, PROMPTS[0], seed=jax.random.key(42), **options)
    assert number[0].tokens == key[0].tokens
    many = {
        jaxdec.generate(lm, PROMPTS[0], seed=s, **options)[0].tokens for s in range(20)
    }
    assert len(many) >= 15


def test_nothing_asked_for_calls_no_model(lm, monkeypatch):
    monkeypatch.setattr(jaxdec.LM, "program", None)
    out = jaxdec.generate(lm, PROMPTS, max_new_tokens=0)
    assert [item.tokens for item in out] == [()] * 3
    assert [item.finish_reason for item in out] == ["length"] * 3


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "request 0: the prompt is empty"),
        ("  \n", {}, "the prompt is empty"),
        ([], {}, "no prompts"),
        ([[]], {}, "request 0: the prompt is empty"),
        (["ok", ""], {}, "request 1: the prompt is empty"),
        ([[1, -1]], {}, "token id -1 is outside the vocabulary"),
        ([[1, 259]], {}, "token id 259 is outside the vocabulary of 259"),
        ([[1.5, 2.0]], {}, "token ids must be whole numbers"),
        ([[65] * 1000], {"max_new_tokens": 100}, "needs 1100 positions"),
        ("a", {"temperature": -1}, "temperature"),
        ("a", {"temperature": float("nan")}, "temperature"),
        ("a", {"temperature": "hot"}, "temperature"),
        ("a", {"strategy": "greedy", "temperature": 0.7}, "use strategy 'sample'"),
        ("a", {"strategy": "fastest"}, "unknown strategy 'fastest'; use one of"),
        ("a", {"strategy": "draft_model"}, "jaxdec.draft_model"),
        ("a", {"strategy": "greedy", "draft_length": 3}, "drafts nothing"),
        ("a", {"strategy": "lookup", "draft_length": 0}, "at least 1"),
        ("a", {"max_new_tokens": -1}, "max_new_tokens"),
        ("a", {"max_new_tokens": 2.5}, "max_new_tokens"),
        ("a", {"max_new_tokens": [1, 2]}, "2 values for 1 prompts"),
        ("a", {"top_p": 1.5}, "top_p"),
        ("a", {"stop_tokens": [400]}, "stop token 400"),
        ("a", {"processed_logprobs": True}, "logprobs is None; pass logprobs=0"),
        ("a", {"stop_tokens": [[1], [2]]}, "stop_tokens has 2 values for 1 prompts"),
        ("a", {"stop_tokens": [[400]]}, "stop token 400"),
        ("a", {"stop": [["x"], "y"]}, "stop has 2 values for 1 prompts"),
        ("a", {"stop": [["x", 3]]}, "stop strings must be non-empty"),
        ("a", {"stop": [""]}, "stop strings must be non-empty"),
        ("a", {"seed": -3}, "a seed is a whole number"),
        ("a", {"seed": 0.5}, "a seed is a whole number"),
        ("a", {"logit_bias": {900: 1.0}}, "900"),
        ("a", {"chat": True}, "chat template"),
        ("a", {"system": "be brief"}, "system message needs a chat model"),
        ("a", {"strategy": jaxdec.self_draft(3)}, "the model has 2"),
    ],
)
def test_bad_input_is_said_before_any_model_call(
    lm, monkeypatch, prompt, options, message
):
    def no_call(*_):
        raise AssertionError("a program was run")

    monkeypatch.setattr(jaxdec.program.Program, "run", no_call)
    with pytest.raises(ValueError) as error:
        jaxdec.generate(lm, prompt, **options)
    assert message in str(error.value)


def test_draft_model_must_speak_the_same_tokens(lm, tmp_path):
    other = jaxdec.load(write_model(tmp_path / "other", seed=3), dtype="float32")
    out = jaxdec.generate(
        lm, PROMPTS, strategy=jaxdec.draft_model(other, length=2), max_new_tokens=12
    )
    plain = jaxdec.generate(lm, PROMPTS, max_new_tokens=12)
    assert tokens_of(out) == tokens_of(plain)
    assert out.evidence.drafter_param_bytes == 4 * other.num_params
    folder = write_model(tmp_path / "permuted", seed=3)
    path = folder / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    swapped = text.replace('"a":', '"@@":').replace('"b":', '"a":')
    path.write_text(swapped.replace('"@@":', '"b":'), encoding="utf-8")
    permuted = jaxdec.load(folder, dtype="float32")
    with pytest.raises(ValueError, match="different tokenizers"):
        jaxdec.generate(lm, PROMPTS[0], strategy=jaxdec.draft_model(permuted))


def test_broken_weights_are_refused(tmp_path):
    folder = write_model(tmp_path / "nan")
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        jaxdec.load(folder, dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_with_orbax_and_loaded_again(tmp_path, dtype, monkeypatch):
    lm = jaxdec.load(write_model(tmp_path / "tiny"), dtype=dtype)
    lm.save(tmp_path / "saved")
    reads = []
    whole = ocp.args.PyTreeRestore
    monkeypatch.setattr(
        ocp.args, "PyTreeRestore", lambda **k: reads.append(1) or whole(**k)
    )
    again = jaxdec.load(tmp_path / "saved", dtype=dtype)
    assert reads == [1]
    assert again.config == lm.config and again.stop_tokens == lm.stop_tokens
    assert again.content_hash == lm.content_hash
    assert jax.tree.structure(again.params) == jax.tree.structure(lm.params)
    for a, b in zip(
        jax.tree.leaves(lm.params), jax.tree.leaves(again.params), strict=True
    ):
        assert a.dtype == b.dtype and bool((a == b).all())
    assert again.tokenizer.encode("the cat") == lm.tokenizer.encode("the cat")
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    with pytest.raises(ValueError, match=f"was saved in {dtype}"):
        jaxdec.load(tmp_path / "saved", dtype=other)
    assert reads == [1]
    with pytest.raises(ValueError, match="exists"):
        lm.save(tmp_path / "saved")

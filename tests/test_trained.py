"""Trained drafters from the outside: load, generate, stream, certify, evidence."""

import dataclasses
import functools
import json
import pathlib
import shutil
import types

import helpers_tiny
import numpy as np
import pytest

import jaxdec
from jaxdec.calibration import calibrate, rounds_in
from jaxdec.drafters.mtp import check_length
from jaxdec.io.checkpoint import CheckpointError
from jaxdec.loaded_drafter import LoadedDrafter
from jaxdec.training.calibrate import joined, quality, rounds_of
from jaxdec.training.confidence import HeadInputs, log_odds

CASES = pathlib.Path(__file__).parent / "golden" / "cases"
DRAFTERS = {
    "eagle3": "drafters/e2e_eagle3_tree",
    "dspark": "drafters/e2e_deepspec_dspark",
}
PROMPTS = [[5, 17, 40, 3], [9, 8, 7, 6, 5, 4]]
OPTIONS = dict(max_new_tokens=20, stop_tokens=[])


@functools.cache
def loaded(kind):
    """A target with the drafter that was made for it."""
    folder = CASES / DRAFTERS[kind]
    case = json.loads((folder / "case.json").read_text())
    lm = jaxdec.load(CASES / case["pairs_with"], dtype="float32")
    drafter = jaxdec.load_drafter(folder, lm)
    names = jaxdec.add_drafter(lm, drafter)
    return lm, drafter, names


@functools.cache
def plain(kind, temperature):
    lm, _, _ = loaded(kind)
    strategy = "greedy" if temperature == 0 else "sample"
    out = jaxdec.generate(
        lm, PROMPTS, strategy=strategy, temperature=temperature, seed=7, **OPTIONS
    )
    return [item.tokens for item in out]


NAMES = [
    ("eagle3", "eagle3"),
    ("eagle3", "eagle3_tree"),
    ("eagle3", "first_of"),
    ("dspark", "dspark"),
]


@pytest.mark.parametrize(("kind", "name"), NAMES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_name_gives_plain_decoding(kind, name, temperature):
    lm, _, names = loaded(kind)
    assert name in names and lm.strategies[name].name == name
    out = jaxdec.generate(
        lm, PROMPTS, strategy=name, temperature=temperature, seed=7, **OPTIONS
    )
    assert [item.tokens for item in out] == plain(kind, temperature)


def evidence_of(kind, strategy):
    lm, _, _ = loaded(kind)
    out = jaxdec.generate(lm, PROMPTS, strategy=strategy, **OPTIONS)
    evidence = jaxdec.measure.evidence(out.run, out.items, with_costs=False)
    # Strict JSON, whatever the strategy is made of.
    json.dumps(evidence.to_dict(), allow_nan=False)
    return evidence


def test_evidence_of_a_tree():
    lm, drafter, _ = loaded("eagle3")
    tree = jaxdec.Tree(width=3, depth=2, nodes=7)
    evidence = evidence_of("eagle3", jaxdec.eagle3(drafter, tree=tree))
    assert evidence.proposal_mode == "tree"
    assert (evidence.tree_width, evidence.tree_depth) == (3, 2)
    assert evidence.num_native_modules == 0
    assert evidence.num_nodes_verified == evidence.num_drafted + evidence.num_steps
    assert max(evidence.requests[0].steps.num_drafted) == 7
    assert max(evidence.requests[0].steps.num_judged) == 2
    assert evidence.pairing["target"] == lm.content_hash
    assert evidence.pairing["drafter"] == drafter.content_hash
    assert evidence.pairing["format"] == "SafeAILab EAGLE-3"
    assert evidence.pairing["taps"] == [2, 4, 5]
    assert evidence.sampling["tree"] == {"width": 3, "depth": 2, "nodes": 7}
    assert evidence.drafter_param_bytes == 4 * drafter.num_params
    assert evidence.calibration_error is None


def test_evidence_of_a_confidence():
    _, drafter, _ = loaded("dspark")
    free = evidence_of("dspark", jaxdec.dspark(drafter))
    assert free.proposal_mode == "block" and 0 <= free.calibration_error <= 1
    assert free.proposal_budget == "5 draft tokens a step"
    limited = evidence_of("dspark", jaxdec.dspark(drafter, threshold=0.5))
    assert limited.proposal_budget == "5 draft tokens a step, up to survival 0.5"
    assert limited.num_drafted < free.num_drafted
    steps = limited.requests[0].steps
    assert min(steps.num_drafted[1:]) < 5
    # Every token that was judged had a survival of at least the threshold.
    for confidence in steps.draft_confidence:
        survival = 1.0
        for value in confidence:
            survival *= value
            assert survival >= 0.5


def test_evidence_of_several_sources():
    evidence = evidence_of("eagle3", "first_of")
    assert evidence.sources == ("lookup", "eagle3")
    source = evidence.source
    assert sum(s["num_drafted"] for s in source.values()) == evidence.num_drafted
    assert sum(s["num_accepted"] for s in source.values()) == evidence.num_accepted
    assert source["eagle3"]["num_steps"] > 0
    assert evidence.sampling["parts"] == [["lookup", 6], ["eagle3", 5]]
    assert evidence.hashes["drafter"] == loaded("eagle3")[1].content_hash


def test_a_certificate_of_a_tree():
    lm, drafter, _ = loaded("eagle3")
    config = jaxdec.eagle3(drafter, tree=jaxdec.Tree(width=3, depth=2, nodes=7))
    certificate = jaxdec.certify(lm, PROMPTS, config, max_new_tokens=20, stop_tokens=[])
    assert certificate.passed and certificate.num_positions == 40


def test_a_stream_says_the_same():
    lm, drafter, _ = loaded("eagle3")
    config = jaxdec.eagle3(drafter, tree=jaxdec.Tree(width=3, depth=2, nodes=7))
    tokens = []
    for piece in jaxdec.stream(lm, PROMPTS[0], strategy=config, **OPTIONS):
        tokens += piece.tokens
    assert tuple(tokens) == tuple(plain("eagle3", 0.0)[0])


def test_another_draft_length_by_name():
    lm, _, _ = loaded("eagle3")
    for name, length in (("eagle3", 2), ("eagle3_tree", 3), ("first_of", 2)):
        config = jaxdec.strategies.resolve(name, length, lm)
        assert config.length == length and config.name == name
    assert jaxdec.strategies.resolve("eagle3_tree", 3, lm).tree.nodes == 3


def test_a_name_without_a_drafter_says_what_to_do():
    lm = jaxdec.load(CASES / "targets" / "qwen2", dtype="float32")
    with pytest.raises(ValueError, match="needs a drafter.*load_drafter"):
        jaxdec.generate(lm, [[1, 2]], strategy="eagle3", max_new_tokens=1)
    with pytest.raises(ValueError, match="unknown strategy 'eagel3'"):
        jaxdec.generate(lm, [[1, 2]], strategy="eagel3", max_new_tokens=1)


def test_options_that_do_not_fit():
    _, eagle, _ = loaded("eagle3")
    _, spark, _ = loaded("dspark")
    with pytest.raises(ValueError, match="no confidence head"):
        jaxdec.eagle3(eagle, threshold=0.5)
    with pytest.raises(ValueError, match="goes on from its own tokens"):
        config = jaxdec.dspark(spark, tree=jaxdec.Tree())
        config.build(loaded("dspark")[0], None, 2)
    with pytest.raises(ValueError, match="use jaxdec.trained"):
        jaxdec.mtp(eagle)
    with pytest.raises(ValueError, match="rule='match'"):
        jaxdec.eagle3(eagle, tree=jaxdec.Tree(), rule="rejection")
    with pytest.raises(ValueError, match="not both"):
        jaxdec.dspark(spark, threshold=0.5, steps_per_second=[1.0] * 7)
    with pytest.raises(ValueError, match="width must be"):
        jaxdec.Tree(width=0)
    with pytest.raises(ValueError, match="two or more strategies that draft"):
        jaxdec.first_of(jaxdec.lookup(), jaxdec.greedy())


def test_a_drafter_of_another_target_is_refused():
    lm = jaxdec.load(CASES / "targets" / "qwen2", dtype="float32")
    with pytest.raises(CheckpointError, match="vocabulary|hidden"):
        jaxdec.load_drafter(CASES / DRAFTERS["eagle3"], lm)
    assert "eagle3" not in lm.strategies


def test_a_drafter_drafts_for_the_target_it_was_loaded_for():
    """For another it would be wrong on every token, or not fit at all."""
    lm, drafter, _ = loaded("eagle3")
    other = jaxdec.load(CASES / "targets" / "qwen3", dtype="float32")
    drafter.check_target(lm)
    chain = jaxdec.eagle3(drafter)
    with pytest.raises(ValueError, match="loaded for another target .*vocab_size 160"):
        jaxdec.generate(other, [[1, 5, 9]], strategy=chain)
    with pytest.raises(ValueError, match="loaded for another target"):
        jaxdec.generate(other, [[1]], strategy=jaxdec.first_of(jaxdec.lookup(), chain))
    with pytest.raises(ValueError, match="loaded for another target"):
        jaxdec.add_drafter(other, drafter)
    assert len(repr(drafter)) < 2000 and len(repr(lm)) < 200


def test_a_model_with_native_modules_has_the_strategy():
    lm = jaxdec.load(CASES / "mtp" / "mimo", dtype="float32")
    assert {"mtp", "mtp_tree", "first_of", "first_of_tree"} <= set(lm.strategies)
    out = jaxdec.generate(lm, PROMPTS, strategy="mtp", **OPTIONS)
    assert out.run is not None
    evidence = jaxdec.measure.evidence(out.run, out.items, with_costs=False)
    assert evidence.num_native_modules == 1 and evidence.proposal_mode == "chain"
    greedy = jaxdec.generate(lm, PROMPTS, **OPTIONS)
    assert [a.tokens for a in out] == [b.tokens for b in greedy]


@pytest.mark.parametrize(
    ("num", "told", "length"), [(1, None, 3), (2, None, 4), (3, None, 3), (2, 5, 6)]
)
def test_several_modules_draft_a_multiple(num, told, length):
    drafter = LoadedDrafter(
        family="mtp",
        config=types.SimpleNamespace(num_native_modules=num),
        own={},
        name="drafter",
        format="native MTP",
        facts={"draft_length": told},
    )
    assert drafter.draft_length == length
    check_length(num, length)


def test_b38_a_drafter_of_another_tokenizer_is_refused(tmp_path):
    """Equal size, two ids swapped: drafts would be noise, and nothing would show."""
    lm = jaxdec.load(helpers_tiny.write_model(tmp_path / "target"), dtype="float32")
    folder = tmp_path / "drafter"
    shutil.copytree(CASES / DRAFTERS["eagle3"], folder)
    tokenizer = json.loads((tmp_path / "target" / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="different tokenizers"):
        jaxdec.load_drafter(folder, lm)
    shutil.copy(tmp_path / "target" / "tokenizer.json", folder)
    with pytest.raises(CheckpointError, match="vocabulary"):  # The next thing checked.
        jaxdec.load_drafter(folder, lm)


def test_a_mixture_keeps_its_parts_apart():
    lm, spark, _ = loaded("dspark")
    parts = [jaxdec.lookup(6, min_ngram=4), jaxdec.lookup(6, min_ngram=2)]
    parts.append(jaxdec.dspark(spark, threshold=0.3))
    mixed = jaxdec.first_of(*parts)
    facts = mixed.facts(lm)
    assert facts["sources"] == ("lookup", "lookup 2", "dspark")
    assert set(facts["pairing"]) == set(facts["sources"])
    assert facts["has_confidence"] == (False, False, True)
    # What limits a part keeps its use: forwards as wide as the drafts that are left.
    assert mixed.widths == (0, 2, 5, 6) and mixed.length == 6
    assert jaxdec.first_of(*parts[:2]).widths == ()
    drafter, _ = mixed.build(lm, None, 2)
    assert drafter.sources == facts["sources"]


def test_why_a_name_is_missing_is_said():
    lm, _, _ = loaded("eagle3")
    poor = dataclasses.replace(
        lm, strategies={}, notes={"mtp": "of a kind"}, mesh=None, programs={}
    )
    for name in ("mtp", "mtp_tree", "first_of", "first_of_tree"):
        with pytest.raises(ValueError, match="of a kind"):
            jaxdec.generate(poor, [[1, 2]], strategy=name, max_new_tokens=1)


def test_what_a_confidence_read_is_found_again_from_tokens():
    """The log-odds of a decoding are those of the inputs that are found afterwards."""
    lm, drafter, _ = loaded("dspark")
    drafter = dataclasses.replace(
        drafter, config=dataclasses.replace(drafter.config, temperatures=())
    )
    outputs = jaxdec.generate(
        lm,
        PROMPTS,
        strategy=jaxdec.trained(drafter),
        temperature=1.0,
        seed=3,
        max_new_tokens=60,
        stop_tokens=[],
    )
    rounds, _ = rounds_of(outputs)
    read = HeadInputs(drafter.config, drafter.own, lm)(*rounds_in(outputs))
    head = drafter.own["confidence"]["proj"]
    weight, bias = np.asarray(head["weight"][0]), float(head["bias"][0])
    # Also past refused drafts, after which the drafter went on from its own token.
    assert (rounds.num_accepted < rounds.num_judged).sum() >= 20
    np.testing.assert_allclose(log_odds(read, weight, bias), rounds.odds, atol=1e-4)


@pytest.mark.parametrize("fits_head", [True, False])
def test_a_confidence_is_calibrated_to_what_decoding_does(fits_head, tmp_path):
    """What is reported of the calibrated drafter is what it then says."""
    lm, drafter, _ = loaded("dspark")
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 60, (9, 5)).tolist()  # The last batch is filled up.
    options = dict(max_new_tokens=24, temperature=1.0)
    calibrated, report = calibrate(
        lm, drafter, prompts, batch_size=4, fits_head=fits_head, **options
    )
    folder = tmp_path / "calibrated"
    jaxdec.save_drafter(folder, calibrated, lm, card={"calibration": report})
    back = jaxdec.load_drafter(folder, lm)
    assert back.config.temperatures == tuple(report["temperatures"])
    assert back.card["calibration"]["prompts"] == 9 and calibrated.content_hash == ""
    same = np.array_equal(
        back.own["confidence"]["proj"]["bias"],
        drafter.own["confidence"]["proj"]["bias"],
    )
    assert same == (not fits_head)
    strategy = jaxdec.trained(back)
    outputs = [
        jaxdec.generate(lm, [prompt], strategy=strategy, seed=[seed], **options)
        for seed, prompt in enumerate(prompts)
    ]
    parts = [rounds_of(output) for output in outputs]
    found = joined([rounds for rounds, _ in parts])
    assert len(found.odds) == report["rounds"]
    for said, row in zip(quality(found), report["after"], strict=True):
        assert said.rounds == row["rounds"] and said.rate == pytest.approx(row["rate"])
        # All of it was fitted to these rounds, so it says no worse of them.
        assert said.brier < row["brier"] + 0.03
    with pytest.raises(ValueError, match="got 7 prompts; give at least 8"):
        calibrate(lm, drafter, prompts[:7])

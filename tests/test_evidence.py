import json

import numpy as np
import pytest

from jaxdec import counts as counting
from jaxdec.counts import count, cut, kv_bytes
from jaxdec.evidence import RunFacts, collect, merge
from jaxdec.types import FinishReason, StepInfo


def step_info(accepted, judged, emitted, drafted=None, live=None):
    """Chains of at most K tokens from nested lists [B, steps]."""
    accepted, judged, emitted = (np.array(x) for x in (accepted, judged, emitted))
    drafted = np.full_like(judged, 4) if drafted is None else np.array(drafted)
    live = np.ones_like(judged, bool) if live is None else np.array(live)
    batch, steps = judged.shape
    k = max(int(drafted.max()), 1)
    zeros = np.zeros((batch, steps, k), np.int32)
    return StepInfo(
        is_live=live,
        draft_tokens=zeros,
        draft_parents=zeros,
        draft_confidence=np.full((batch, steps, k), 0.5, np.float32),
        draft_source=np.zeros((batch, steps), np.int32),
        path=np.tile(np.arange(k + 1), (batch, steps, 1)),
        num_drafted=np.where(live, drafted, 0),
        num_judged=np.where(live, judged, 0),
        num_accepted=np.where(live, accepted, 0),
        num_emitted=np.where(live, emitted, 0),
        logprobs=np.zeros((batch, steps, k + 1), np.float32),
        top_logprobs=np.zeros((batch, steps, k + 1, 0), np.float32),
        top_tokens=np.zeros((batch, steps, k + 1, 0), np.int32),
    )


# B46: the first request ends at a stop token, draft index 1 of its fourth step.
SCRIPT = step_info(
    accepted=[[0, 4, 2, 2], [1, 0, 0, 0]],
    judged=[[4, 4, 4, 2], [4, 0, 0, 0]],
    emitted=[[1, 5, 3, 2], [2, 0, 0, 0]],
    live=[[True] * 4, [True, False, False, False]],
)
PROMPT = np.array([10, 20])
FINISH = np.array([FinishReason.STOP_TOKEN, FinishReason.LENGTH])


def script_evidence(**kwargs):
    return collect(SCRIPT, prompt_length=PROMPT, finish=FINISH, **kwargs)


def test_b46_scripted_counts():
    evidence = script_evidence()
    first, second = evidence.requests
    assert first.steps.num_drafted == (4, 4, 4, 4)
    assert first.steps.num_judged == (4, 4, 4, 2)
    assert first.steps.num_accepted == (0, 4, 2, 2)
    assert first.steps.num_emitted == (1, 5, 3, 2)
    assert first.steps.path == ((), (1, 2, 3, 4), (1, 2), (1, 2))
    assert second.steps.num_emitted == (2,)
    assert evidence.num_steps == 5
    assert evidence.num_drafted == 20
    assert evidence.num_judged == 18
    assert evidence.num_accepted == 9
    assert evidence.num_emitted == 13
    assert evidence.num_rollbacks == 3
    assert evidence.acceptance_rate == 9 / 18
    assert evidence.tokens_per_step == 13 / 5
    assert evidence.acceptance_length == 14 / 5
    assert evidence.acceptance_by_position == (4 / 5, 3 / 5, 1 / 4, 1 / 4)
    assert evidence.conditional_acceptance_by_position == (4 / 5, 3 / 4, 1 / 2, 1.0)
    assert evidence.finish_reasons == {"stop_token": 1, "length": 1}
    assert (first.output_length, second.output_length) == (11, 2)
    # The one step without the target's own token is the whole difference.
    missing = 1 / evidence.num_steps
    assert evidence.acceptance_length == pytest.approx(2.6 + missing)


def test_b46_geometric_closed_form():
    rng = np.random.default_rng(0)
    accepted = np.cumprod(rng.random((10_000, 4)) < 0.8, axis=1).sum(axis=1)
    four = np.full(10_000, 4)
    counts = count(four, four, accepted, accepted + 1)
    np.testing.assert_allclose(
        counts.acceptance_by_position, [0.8, 0.64, 0.512, 0.4096], atol=0.02
    )
    np.testing.assert_allclose(
        counts.conditional_acceptance_by_position, [0.8] * 4, atol=0.02
    )
    assert counts.tokens_per_step == pytest.approx(3.3616, abs=0.05)
    assert counts.acceptance_rate == pytest.approx(0.5904, abs=0.02)
    assert counts.acceptance_length == counts.tokens_per_step


def test_nothing_over_nothing_is_none():
    none = np.zeros(0, np.int64)
    counts = count(none, none, none, none)
    assert counts.tokens_per_step is None
    assert counts.acceptance_rate is None
    assert counts.acceptance_length is None
    assert counts.acceptance_by_position == ()
    plain = step_info([[0, 0]], [[0, 0]], [[1, 1]], drafted=[[0, 0]])
    evidence = collect(
        plain, prompt_length=np.array([1]), finish=np.array([FinishReason.LENGTH])
    )
    assert evidence.tokens_per_step == 1.0
    assert evidence.acceptance_rate is None
    assert evidence.num_rollbacks == 0
    # Position 1 was judged but never reached.
    refused = count(*(np.array([n]) for n in (2, 2, 0, 1)))
    assert refused.acceptance_by_position == (0.0, 0.0)
    assert refused.conditional_acceptance_by_position == (0.0, None)


@pytest.mark.parametrize(
    "step", [(4, 2, 3, 3), (2, 4, 1, 2), (4, 4, 2, 4), (4, 4, 2, 1), (4, 4, -1, 0)]
)
def test_impossible_counts_are_refused(step):
    with pytest.raises(ValueError, match="correct the strategy"):
        count(*(np.array([n]) for n in step))


def test_cut_ends_steps_where_tokens_end():
    for keep in range(12):
        info = cut(SCRIPT, np.array([keep, 2]))
        assert info.num_emitted.sum(axis=1).tolist() == [keep, 2]
        for row in range(2):
            steps = counting.request_steps(info, row)
            counting.count_steps([steps])
    info = cut(SCRIPT, np.array([3, 2]))
    assert info.is_live[0].tolist() == [True, True, False, False]
    assert info.num_judged[0].tolist() == [4, 2, 0, 0]
    assert info.num_accepted[0].tolist() == [0, 2, 0, 0]
    assert info.num_drafted[0].tolist() == [4, 4, 0, 0]
    # At a step's end nothing of that step changes, its rollback included.
    assert cut(SCRIPT, np.array([9, 2])).num_judged[0].tolist() == [4, 4, 4, 0]
    untouched = cut(SCRIPT, np.array([11, 2]))
    assert (untouched.num_judged == SCRIPT.num_judged).all()


def test_cut_keeps_a_last_step_that_emitted_nothing():
    info = step_info([[0, 0]], [[4, 4]], [[1, 0]])
    assert cut(info, np.array([1])).is_live.all()


def test_kv_bytes():
    # Row 0: live 9, 10, 15, 18; row 1: live 19; T = 5.
    read, written = kv_bytes(SCRIPT, PROMPT, bytes_per_token=100)
    assert read == 100 * (9 + 10 + 15 + 18 + 19 + 5 * 5)
    assert written == 100 * 5 * 5
    read, written = kv_bytes(SCRIPT, PROMPT, bytes_per_token=1, num_rows=8)
    assert (read, written) == (71 + 5 * 8, 40)


def test_times():
    evidence = script_evidence(
        ttft_s=[0.5, 0.7], request_e2e_s=[1.5, 0.7], facts=RunFacts(e2e_s=2.0)
    )
    first, second = evidence.requests
    assert first.tpot_ms == pytest.approx(1000 / 10)
    assert second.tpot_ms is None
    assert evidence.ttft_s == pytest.approx(0.6)
    assert evidence.tpot_ms == pytest.approx(100.0)
    assert evidence.throughput_tokens_per_s == 13 / 2
    assert evidence.cache_length == max(10 + 11 - 1, 20 + 2 - 1)


TOKENS = [[1, 2, 3, 4, 1, 2, 3, 4, 9, 9, 9], [5, 6]]


def test_quality():
    evidence = script_evidence(
        tokens=TOKENS,
        references=[TOKENS[0], [5, 7]],
        logprobs=[[-1.0] * 11, [-1.0] * 2],
        texts=['{"a": 1}', "{"],
        output_format="json",
    )
    assert evidence.exact_match == 0.5
    assert evidence.perplexity == pytest.approx(np.e)
    assert evidence.repetition_rate == 1 / 8
    assert evidence.format_success_rate == 0.5
    assert evidence.distinct_outputs == 2


def test_tokens_and_steps_must_end_together():
    with pytest.raises(ValueError, match="cut tokens and steps"):
        script_evidence(tokens=[TOKENS[0][:-1], TOKENS[1]])
    with pytest.raises(ValueError, match="pass both or none"):
        script_evidence(texts=["", ""])
    with pytest.raises(ValueError, match="pass tokens too"):
        script_evidence(references=TOKENS)


def one_row(info, row):
    return StepInfo(**{k: v[row : row + 1] for k, v in vars(info).items()})


def test_merge_recomputes_from_counts():
    whole = script_evidence(tokens=TOKENS, logprobs=[[-2.0] * 11, [-1.0] * 2])
    parts = [
        collect(
            one_row(SCRIPT, row),
            prompt_length=PROMPT[row : row + 1],
            finish=FINISH[row : row + 1],
            tokens=[TOKENS[row]],
            logprobs=[[-2.0] * 11] if row == 0 else [[-1.0] * 2],
        )
        for row in range(2)
    ]
    assert merge(parts) == whole
    mean = np.mean([p.tokens_per_step for p in parts])
    assert whole.tokens_per_step != pytest.approx(mean)


def test_merge_of_run_facts():
    facts = dict(versions={"jax": "1"}, drafter_param_bytes=7, num_compilations=1)
    a = script_evidence(facts=RunFacts(e2e_s=1.0, seed=1, draft_cost_ms=2.0, **facts))
    b = collect(
        one_row(SCRIPT, 1),
        prompt_length=PROMPT[1:],
        finish=FINISH[1:],
        facts=RunFacts(e2e_s=4.0, seed=2, draft_cost_ms=8.0, **facts),
    )
    merged = merge([a, b])
    assert merged.e2e_s == 5.0
    assert merged.throughput_tokens_per_s == 15 / 5
    assert merged.draft_cost_ms == pytest.approx((2 * 5 + 8 * 1) / 6)
    assert merged.verify_cost_ms is None
    assert merged.num_compilations == 2
    assert merged.drafter_param_bytes == 7
    assert merged.seed == (1, 2)
    assert merge([merged, a]).seed == (1, 2, 1)
    assert merge([a, a]).seed == 1
    with pytest.raises(ValueError, match="agree in versions"):
        merge([a, script_evidence()])
    with pytest.raises(ValueError, match="at least one"):
        merge([])


def test_json_is_strict():
    evidence = script_evidence(
        tokens=TOKENS,
        logprobs=[[-np.inf] * 11, [0.0, 0.0]],
        facts=RunFacts(
            compile_s=np.float32(1.5),
            kv_bytes_read=np.int64(3),
            sampling={"top_k": np.int32(5), "bias": np.array([1.0, -np.inf])},
        ),
    )
    assert evidence.perplexity == np.inf

    def refuse(constant):
        raise AssertionError(constant)

    record = json.loads(evidence.to_json(), parse_constant=refuse)
    assert record == evidence.to_dict()
    assert record["perplexity"] is None
    assert record["compile_s"] == 1.5
    assert record["sampling"] == {"top_k": 5, "bias": [1.0, None]}
    assert record["requests"][0]["steps"]["num_emitted"] == [1, 5, 3, 2]
    names = """tokens_per_step acceptance_rate acceptance_length acceptance_by_position
        conditional_acceptance_by_position num_steps num_drafted num_judged num_accepted
        num_emitted num_rollbacks ttft_s tpot_ms e2e_s throughput_tokens_per_s compile_s
        num_compilations draft_cost_ms verify_cost_ms cache_length kv_bytes_read
        kv_bytes_written drafter_param_bytes drafter_state_bytes finish_reasons
        exact_match perplexity repetition_rate format_success_rate distinct_outputs
        versions hashes seed sampling requests num_nodes_verified block_acceptance
        proposal_mode proposal_budget tree_width tree_depth num_native_modules pairing
        sources source calibration_error has_confidence"""
    assert set(record) == set(names.split())


def test_nodes_blocks_and_sources():
    """Definitions of the counts that trees and mixtures of drafters add, by hand."""
    info = step_info(
        accepted=[[2, 0, 1, 0]],
        judged=[[2, 3, 1, 0]],
        emitted=[[3, 1, 2, 1]],
        drafted=[[6, 3, 1, 0]],
    ).replace(draft_source=np.array([[0, 1, 0, 1]]))
    evidence = collect(
        info,
        prompt_length=np.array([5]),
        finish=np.array([FinishReason.LENGTH]),
        facts=RunFacts(sources=("lookup", "mtp")),
    )
    assert evidence.num_nodes_verified == 6 + 3 + 1 + 0 + 4
    # Three steps drafted; the first draft was accepted in two, the second in one.
    assert evidence.block_acceptance == (2 / 3, 1 / 3, 0.0)
    assert evidence.acceptance_by_position == (2 / 3, 1 / 2, 0.0)
    assert evidence.source == {
        "lookup": {
            "num_steps": 2,
            "num_drafted": 7,
            "num_judged": 3,
            "num_accepted": 3,
            "acceptance_rate": 1.0,
        },
        "mtp": {
            "num_steps": 1,
            "num_drafted": 3,
            "num_judged": 3,
            "num_accepted": 0,
            "acceptance_rate": 0.0,
        },
    }


def test_calibration_by_hand():
    """Confidence 0.5 throughout: survival 0.5, 0.25, 0.125 (three bins)."""
    info = step_info(accepted=[[2, 0]], judged=[[3, 1]], emitted=[[3, 1]])
    evidence = collect(
        info, prompt_length=np.array([5]), finish=np.array([FinishReason.LENGTH])
    )
    # Bin of 0.5: said 1.0, happened 1; of 0.25: 0.25 and 1; of 0.125: 0.125 and 0.
    assert evidence.calibration_error == pytest.approx((0 + 0.75 + 0.125) / 4)
    silent = info.replace(draft_confidence=np.zeros((1, 2, 4), np.float32))
    evidence = collect(
        silent, prompt_length=np.array([5]), finish=np.array([FinishReason.LENGTH])
    )
    assert evidence.calibration_error is None

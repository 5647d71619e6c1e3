"""The card of a shipped drafter says what training and a comparison found."""

from jaxdec.report import cards, plots
from jaxdec.training.recipe import Eagle3Recipe

REPORT = {
    "settings": {"prompts": [{}] * 5, "max_new_tokens": 32},
    "strategies": [
        {
            "strategy": name,
            "temperature": 0.7,
            "draft_length": 4,
            "acceptance_rate": 0.25,
            "tokens_per_step": per_step,
            "tokens_per_step_not_repetitive": 1.5,
            "tokens_per_step_by_task": {"math": 2.125, "code": 1.0},
            "num_steps": 9,
        }
        for name, per_step in (("greedy", 1.0), ("eagle3", 1.75))
    ],
}
CARD = {
    "target": {"name": "smollm2", "hash": "abc"},
    "recipe": Eagle3Recipe(steps=1200).to_dict(),
    "earlier": [
        {
            "recipe": Eagle3Recipe(steps=900, seed=3).to_dict(),
            "steps": 600,
            "minutes": 20.0,
            "tokens_read": 1_000_000,
        }
    ],
    "steps": 1200,
    "minutes": 58.4,
    "tokens_read": 3_456_789,
    "answer_tokens": 1_000_000,
    "sources": ["gsm8k-train", "math-train"],
    "validation": {"tokens_per_step": 2.345, "tokens_per_step_not_repetitive": 2.0},
    "licences": "MIT",
    "command": "jaxdec train eagle3 --data answers --out run",
}


def test_a_card_has_what_is_known():
    found = cards.acceptance(REPORT, ["eagle3", "eagle3_tree"])
    assert [record["strategy"] for record in found] == ["eagle3"]
    assert found[0]["num_prompts"] == 5 and "num_steps" not in found[0]
    text = cards.markdown(CARD | {"acceptance": found})
    for part in (
        "# eagle3 for smollm2",
        "content hash `abc`",
        "1,000,000 tokens",
        "gsm8k-train, math-train",
        "licences of the prompts: MIT",
        "- 600 of 900 steps in 20 minutes, 1,000,000 tokens read (learning rate 0.004, "
        "held for 40%, seed 3)\n- 1,200 of 1,200 steps in 58 minutes, 3,456,789",
        "`jaxdec train eagle3 --data answers --out run`",
        "| steps | 1200 |",
        "without decoding: 2.35, of those that are not repetitive 2.00",
        "5 prompts, at most 32 new tokens, temperature 0.7, K = 4, "
        "acceptance rate 25.0%",
        "| strategy | math | code | all | not repetitive |",
        "| eagle3 | 2.12 | 1.00 | 1.75 | 1.50 |",
    ):
        assert part in text


def test_a_card_says_how_well_a_confidence_was_calibrated(tmp_path):
    quality = {
        "depth": 1,
        "rounds": 9,
        "rate": 0.5,
        "auroc": 0.8125,
        "base_brier": 0.25,
    }
    never = {"depth": 2, "rounds": 4, "rate": 0.0, "auroc": None, "base_brier": 0.0}
    found = {
        "temperatures": [1.5, 1.0],
        "fits_head": False,
        "rounds": 1209,
        "prompts": 31,
        "before": [q | {"ece": 0.1, "brier": 0.24} for q in (quality, never)],
        "after": [q | {"ece": 0.025, "brier": 0.2} for q in (quality, never)],
        "plot": [
            {
                "depth": 1,
                "predicted": [0.2, 0.7],
                "observed": [0.25, 0.75],
                "rounds": [4, 5],
            }
        ],
    }
    text = cards.markdown(CARD | {"acceptance": [], "calibration": found})
    said = "1,209 rounds of 31 prompts, each told by {} that were fitted to other"
    assert said.format("temperatures") in text
    both = CARD | {"acceptance": [], "calibration": found | {"fits_head": True}}
    assert said.format("a head and temperatures") in cards.markdown(both)
    assert "| 1 | 50.0% | 1.50 | 0.100 | 0.025 | 0.812 | 0.200 | 0.250 |" in text
    assert "| 2 | 0.0% | 1.00 | 0.100 | 0.025 | - | 0.200 | 0.000 |" in text
    assert "](calibration.png)" in text
    (path,) = plots.plot_calibration(found, tmp_path)
    assert path.name == "calibration.png" and path.read_bytes()[:4] == b"\x89PNG"
    assert "Confidence" not in cards.markdown(CARD | {"acceptance": []})


def test_a_card_of_a_drafter_that_began_with_a_published_one():
    begun = [{"format": "speculators", "hash": "def"}]
    text = cards.markdown(CARD | {"earlier": begun, "acceptance": []})
    assert "- begun from a drafter in the format speculators, `def`\n- 1,200 of" in text
    assert "begun" not in cards.markdown(CARD | {"earlier": [], "acceptance": []})

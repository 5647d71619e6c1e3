"""A trained drafter's card as Markdown: what it is, how it came to be, what it does."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxdec.report.tables import table

Card = Mapping[str, Any]


def markdown(card: Card) -> str:
    """The card that ships beside a drafter's weights.

    Args:
        card: what training wrote (`jaxdec.training.session.train`), with ``licences``,
            ``command`` and, from reports of `jaxdec.compare`, ``acceptance``: one
            record of `acceptance` per report; and ``calibration``, if it was
            calibrated, whose picture is ``calibration.png`` beside the card.
    """
    recipe, target, validation = card["recipe"], card["target"], card["validation"]
    lines = [
        f"# {recipe['kind']} for {target['name']}",
        "",
        f"Trained with jaxdec for {target['name']} (content hash `{target['hash']}`); "
        "it drafts for no other model. The target's embedding and head are used, and "
        "are not in the files.",
        "",
        "## How it was made",
        "",
        f"- data: {card['answer_tokens']:,} tokens that the target answered to prompts "
        f"of {', '.join(card['sources'])}",
        f"- licences of the prompts: {card['licences']}",
        *(_run(run) for run in (*card.get("earlier", ()), card)),
        f"- command: `{card['command']}`",
        "",
        *table(("recipe", ""), [(k, str(v)) for k, v in recipe.items()]),
        "",
        "## Tokens per step",
        "",
        f"On {recipe['num_validation']} validation answers, found without decoding: "
        f"{validation['tokens_per_step']:.2f}, of those that are not repetitive "
        f"{validation['tokens_per_step_not_repetitive']:.2f}.",
    ]
    for found in card["acceptance"]:
        by_task = found["tokens_per_step_by_task"]
        lines += [
            "",
            f"Decoded with `jaxdec compare`: {found['num_prompts']} prompts, at most "
            f"{found['max_new_tokens']} new tokens, temperature "
            f"{found['temperature']:g}, K = {found['draft_length']}, acceptance rate "
            f"{found['acceptance_rate']:.1%}.",
            "",
            *table(
                ("strategy", *by_task, "all", "not repetitive"),
                [
                    (
                        found["strategy"],
                        *(f"{x:.2f}" for x in by_task.values()),
                        f"{found['tokens_per_step']:.2f}",
                        f"{found['tokens_per_step_not_repetitive']:.2f}",
                    )
                ],
            ),
        ]
    if "calibration" in card:
        lines += _confidence(card["calibration"])
    return "\n".join(lines) + "\n"


def _confidence(calibration: Mapping[str, Any]) -> list[str]:
    """How well survival is told, before and after the confidence was calibrated."""
    both = zip(calibration["before"], calibration["after"], strict=True)

    def auroc(quality: Mapping[str, Any]) -> str:
        return "-" if quality["auroc"] is None else f"{quality['auroc']:.3f}"

    fitted = (
        "a head and temperatures" if calibration.get("fits_head") else "temperatures"
    )
    return [
        "",
        "## Confidence",
        "",
        f"Survival (the product of the confidences up to a token) on "
        f"{calibration['rounds']:,} rounds of {calibration['prompts']:,} prompts, each "
        f"told by {fitted} that were fitted to other prompts.",
        "",
        *table(
            (
                "token",
                "accepted up to it",
                "temperature",
                "ECE before",
                "ECE",
                "AUROC",
                "Brier",
                "Brier of the base rate",
            ),
            [
                (
                    str(new["depth"]),
                    f"{new['rate']:.1%}",
                    f"{calibration['temperatures'][new['depth'] - 1]:.2f}",
                    f"{old['ece']:.3f}",
                    f"{new['ece']:.3f}",
                    auroc(new),
                    f"{new['brier']:.3f}",
                    f"{new['base_brier']:.3f}",
                )
                for old, new in both
            ],
        ),
        "",
        "![said and observed survival by token](calibration.png)",
    ]


def _run(run: Mapping[str, Any]) -> str:
    if "recipe" not in run:
        return f"- begun from a drafter in the format {run['format']}, `{run['hash']}`"
    recipe = run["recipe"]
    held = f"held for {recipe['hold']:.0%}"
    if recipe.get("schedule") == "constant":
        held = "constant"
    return (
        f"- {run['steps']:,} of {recipe['steps']:,} steps in {run['minutes']:.0f} "
        f"minutes, {run['tokens_read']:,} tokens read (learning rate "
        f"{recipe['learning_rate']:g}, {held}, seed "
        f"{recipe['seed']})"
    )


def acceptance(report: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """What a report of `jaxdec.compare` says of strategies, for a card."""
    settings = report["settings"]
    return [
        {
            "num_prompts": len(settings["prompts"]),
            "max_new_tokens": settings["max_new_tokens"],
        }
        | {name: record[name] for name in _KEPT}
        for record in report["strategies"]
        if record["strategy"] in names
    ]


_KEPT = (
    "strategy",
    "temperature",
    "draft_length",
    "acceptance_rate",
    "tokens_per_step",
    "tokens_per_step_not_repetitive",
    "tokens_per_step_by_task",
)

"""Puts a trained drafter into a folder of shipped ones, with its card.

    jaxdec compare --drafter RUN/drafter --strategies eagle3,eagle3_tree \
        --prompts evaluation.jsonl --limit 0 --batch-size 8 --max-new-tokens 128 \
        --out evaluation
    python tests/benchmarks/ship.py RUN/drafter evaluation/report.json \
        --licences "MIT, Apache-2.0, CC BY 4.0" --command "jaxdec train ..."

Writes ``checkpoints/TARGET/STRATEGY``: the drafter's own tensors in bfloat16, and
``README.md``. Several reports (temperatures, say) may be given.
"""

import argparse
import json
import pathlib

import jaxdec
from jaxdec.report import cards, plots


def main():
    """Writes one drafter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafter")
    parser.add_argument("reports", nargs="+", type=pathlib.Path)
    parser.add_argument("--licences", required=True)
    parser.add_argument("--command", required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--out", default="checkpoints", type=pathlib.Path)
    options = parser.parse_args()
    lm = jaxdec.load(options.model)
    drafter = jaxdec.load_drafter(options.drafter, lm)
    names = (drafter.kind, f"{drafter.kind}_tree", "first_of", "first_of_tree")
    found = [
        record
        for report in options.reports
        for record in cards.acceptance(json.loads(report.read_text()), names)
    ]
    card = dict(drafter.card) | {
        "licences": options.licences,
        "command": options.command,
        "acceptance": found,
    }
    folder = options.out / options.target / drafter.kind
    text = cards.markdown(card)
    if "calibration" in card and not plots.can_draw():
        parser.error("the card shows a plot: install matplotlib")
    jaxdec.save_drafter(folder, drafter, lm, card=card, overwrite=True)
    (folder / "README.md").write_text(text, encoding="utf-8")
    if "calibration" in card:
        plots.plot_calibration(card["calibration"], folder)
    print(f"wrote {folder}: {drafter.num_params:,} parameters of its own")


if __name__ == "__main__":
    main()

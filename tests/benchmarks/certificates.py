"""Certifies strategies on the real model: every built-in prompt, greedy and sampled.

    python tests/benchmarks/certificates.py --dtype bfloat16 [--max-new-tokens 96]
    python tests/benchmarks/certificates.py --dtype float32 --max-new-tokens 128 \
        --drafter run/drafter

With a drafter its own strategies are certified, by the rules that they have. Answers
are made by `jaxdec.generate` in batches of 8, each request with a seed of its own, and
judged by `jaxdec.certify`. Ends with exit code 1 if one is not lossless.
"""

import argparse
import sys

import jaxdec
from jaxdec.trained import strategies_of

CASES = (
    ("greedy", 0.0),
    ("sample", 0.7),
    ("lookup", 0.0),
    ("lookup", 0.7),
    ("self_draft", 0.0),
    ("self_draft", 0.7),
    (jaxdec.self_draft(rule="rejection"), 0.7),
)
BATCH = 8


def cases_of(folder, lm):
    """What a drafter can do, greedy and sampled."""
    drafter = jaxdec.load_drafter(folder, lm)
    made = strategies_of(drafter)
    own = [name for name in made if not name.startswith("first_of")]
    found = [(made[name], t) for name in own for t in (0.0, 0.7)]
    return (*found, (jaxdec.trained(drafter, rule="rejection"), 0.7))


def main():
    """Prints a line for every strategy and temperature."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument(
        "--last", type=int, default=0, help="only so many, from the end"
    )
    parser.add_argument("--drafter", help="a trained one, in place of the usual cases")
    options = parser.parse_args()
    lm = jaxdec.load("smollm2", dtype=options.dtype)
    cases = CASES if options.drafter is None else cases_of(options.drafter, lm)
    prompts = [prompt.text for prompt in jaxdec.prompts.builtin()]
    all_passed = True
    for strategy, temperature in cases[-options.last :]:
        outputs = [
            jaxdec.generate(
                lm,
                prompts[i : i + BATCH],
                strategy=strategy,
                max_new_tokens=options.max_new_tokens,
                temperature=temperature,
                seed=list(range(i, i + BATCH)),
            )
            for i in range(0, len(prompts), BATCH)
        ]
        certificate = jaxdec.certify(lm, prompts, strategy, outputs=outputs)
        all_passed &= certificate.passed
        print(f"T {temperature:g}  {certificate}", flush=True)
    sys.exit(0 if all_passed else 1)


if __name__ == "__main__":
    main()

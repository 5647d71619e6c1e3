"""Certifies strategies on the real model: every built-in prompt, greedy and sampled.

    python tests/benchmarks/certificates.py --dtype bfloat16 [--max-new-tokens 96]

Answers are made by `jaxdec.generate` in batches of 8, each request with a seed of its
own, and judged by `jaxdec.certify`. Ends with exit code 1 if one is not lossless.
"""

import argparse
import sys

import jaxdec

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
    options = parser.parse_args()
    lm = jaxdec.load("smollm2", dtype=options.dtype)
    prompts = [prompt.text for prompt in jaxdec.prompts.builtin()]
    all_passed = True
    for strategy, temperature in CASES[-options.last :]:
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

"""What a token costs, as ratios within one run on this machine.

    python tests/benchmarks/step_cost.py [--transformers]

1. TPOT of greedy decoding (bf16, batch 1, 64 new tokens, median of 5), and, with
   ``--transformers`` (needs torch and transformers), its ratio to their greedy decoding
   on the same weights, measured alternately.
2. TPOT at a cache capacity of 8448 slots (8192 positions) over that at 512.
3. Overhead of the engine: a greedy step and a step of K = 4 minus propose, target
   forward and extend, as a share of the step; medians of paired measurements. The three
   run one after another in one program, as in the step: apart, each would find its own
   weights in the processor's caches.

Everything is warm, compilation is apart, and every time ends in `block_until_ready`.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

import jaxdec
from jaxdec import call, measure, strategies

PROMPT = "Explain in detail how a bicycle stays upright when it is moving."
NEW_TOKENS = 64
REPEATS = 5


def timed(run):
    """Seconds of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def decoder(lm, strategy, capacity):
    """A function that decodes NEW_TOKENS tokens and returns its TPOT in ms."""
    checked = call.check(
        lm,
        PROMPT,
        strategy=strategy,
        max_new_tokens=NEW_TOKENS,
        stop_tokens=[],
        capacity=capacity,
    )
    compiled, _ = lm.program(checked.key)

    def run():
        state = compiled.prefill(compiled.params, checked.request)
        state, _, _ = compiled.loop(compiled.params, state, jnp.int32(1))
        jax.block_until_ready(state)
        started = time.perf_counter()
        state, _, _ = compiled.loop(compiled.params, state, jnp.int32(NEW_TOKENS))
        jax.block_until_ready(state)
        emitted = int(state.sequences.length[0] - state.sequences.prompt_length[0])
        assert emitted == NEW_TOKENS
        return (time.perf_counter() - started) * 1e3 / (NEW_TOKENS - 1)

    return run


def transformers_model(lm):
    """The model as transformers runs it, on the same weights in bf16."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from jaxdec.io.cache import load_checkpoint

    checkpoint = load_checkpoint(lm.name, "float32")
    config, (rope,) = checkpoint.config, checkpoint.config.ropes
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.norm_eps,
            rope_theta=rope.theta,
            tie_word_embeddings=config.tie_embeddings,
        )
    )
    tensors = {
        name: torch.from_numpy(np.array(value, np.float32))
        for name, value in checkpoint.tensors.items()
    }
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    return model.to(torch.bfloat16).eval()


def transformers_decoder(lm):
    """What `decoder` gives, for transformers."""
    import torch

    model = transformers_model(lm)
    ids = torch.tensor([call.encode(lm, PROMPT, None, None, 0)])

    def run():
        with torch.inference_mode():
            options = dict(do_sample=False, use_cache=True, eos_token_id=None)
            first = timed(lambda: model.generate(ids, max_new_tokens=1, **options))
            whole = timed(
                lambda: model.generate(ids, max_new_tokens=NEW_TOKENS, **options)
            )
        return (whole - first) * 1e3 / (NEW_TOKENS - 1)

    return run


def alternate(*runs):
    """Medians of several functions, measured in turn after a warm-up."""
    for run in runs:
        run()
    samples = [[] for _ in runs]
    for _ in range(REPEATS):
        for run, found in zip(runs, samples, strict=True):
            found.append(run())
    return [statistics.median(found) for found in samples]


def overhead(lm, strategy):
    """Engine overhead: share of a step that no model or drafter accounts for."""
    checked = call.check(lm, PROMPT, strategy=strategy, max_new_tokens=NEW_TOKENS)
    compiled, _ = lm.program(checked.key)
    step, forward, propose, extend, _ = measure.step_parts(lm, compiled)
    answer = jaxdec.generate(lm, PROMPT, strategy=strategy, max_new_tokens=NEW_TOKENS)
    state = measure.mid_state(compiled, checked, [answer[0].tokens])

    def parts(params, state):
        return extend(params, forward(params, propose(params, state)))

    whole, bare = (measure.Rounds(b, compiled.params, state) for b in (step, parts))
    shares, steps = [], []
    for turn in range(4 * REPEATS):
        # In turns, so that a drift of the machine hits both alike.
        pair = (whole, bare) if turn % 2 else (bare, whole)
        found = {timer: timer.sample() for timer in pair}
        shares.append(1 - found[bare] / found[whole])
        steps.append(found[whole])
    return statistics.median(shares), statistics.median(steps)


def main():
    """Prints the three measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--transformers", action="store_true")
    options = parser.parse_args()
    lm = jaxdec.load(options.model, dtype="bfloat16")
    print(f"{measure.versions()}, {NEW_TOKENS} new tokens, medians of {REPEATS}")

    small, large = decoder(lm, "greedy", 512), decoder(lm, "greedy", 8448)
    if options.transformers:
        ours, theirs = alternate(small, transformers_decoder(lm))
        print(
            f"1. greedy TPOT {ours:.2f} ms; transformers {theirs:.2f} ms; ratio "
            f"{ours / theirs:.3f}"
        )
    else:
        (ours,) = alternate(small)
        print(f"1. greedy TPOT {ours:.2f} ms")
    low, high = alternate(small, large)
    print(f"2. capacity 512: {low:.2f} ms; 8448: {high:.2f} ms; ratio {high / low:.3f}")
    for config in (strategies.greedy(), strategies.self_draft(6, length=4)):
        share, step = overhead(lm, config)
        print(
            f"3. {config.name} (K = {config.length}): step {step:.2f} ms, engine "
            f"overhead {share:.1%}"
        )


if __name__ == "__main__":
    main()

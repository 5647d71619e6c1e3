# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1. Greedy decoding and sampling
#
# **What does one step of decoding do, and what do temperature, top-k and top-p
# change?**
#
# This is the first of eight notebooks on the decode loop of one request. It uses plain
# decoding only: one forward of the model for every token.

# %%
import importlib.util

if importlib.util.find_spec("jaxdec") is None:
    # From the clone that this notebook is in; on Colab, clone it and %cd to colab/.
    get_ipython().run_line_magic("pip", "install -q '..[plots]'")

import jaxdec
from jaxdec import course

lesson = course.start()
lm = lesson.lm
lesson

# %% [markdown]
# ## One answer, step by step
#
# *Prefill* reads the prompt. Then every *step* reads the last token, gets the model's
# *logits* (a score for every token of the vocabulary), and chooses one token. *Greedy*
# decoding takes the token with the largest logit, so it is deterministic: the baseline
# of everything that follows.

# %%
greedy = jaxdec.generate(
    lm,
    "Why is the sky blue?",
    strategy="greedy",
    max_new_tokens=lesson.max_new_tokens,
)
print(greedy[0].text)

# %% [markdown]
# *TTFT* is the time to the first token, and *TPOT* the time per token after it. The *KV
# cache* holds the keys and values of every token that was read, one entry each. The
# last token has been said and not yet read, so the cache is always one behind.

# %%
course.plain_table(greedy)

# %% [markdown]
# ## What a step reads
#
# A step reads all weights once, and the keys and values of all tokens before. Look at
# the axis: it is logarithmic. The weights are read for one token, and would be read
# only once for several. That is the opening for everything in this course.

# %%
course.draw_reads(course.reads_of(greedy))

# %% [markdown]
# ## The law of the next token
#
# Sampling draws from a distribution, the *law* of the next token. Temperature divides
# the logits. *Top-k* keeps the k likeliest tokens. *Top-p* keeps the fewest tokens that
# together have the probability p ([Holtzman et al.](https://arxiv.org/abs/1904.09751)).
#
# The four settings below are four rows of one call: settings are values, so one
# compiled program serves them all.

# %%
laws = jaxdec.generate(
    lm,
    ["My favourite animal is the"] * 4,
    strategy="sample",
    temperature=[1.0, 0.4, 1.0, 1.0],
    top_k=[0, 0, 4, 0],
    top_p=[1.0, 1.0, 1.0, 0.5],
    logprobs=8,
    processed_logprobs=True,
    max_new_tokens=1,
    chat=False,
)
course.draw_laws(laws, ["T = 1", "T = 0.4", "top-k 4", "top-p 0.5"])

# %% [markdown]
# ## What temperature does to whole answers
#
# The same prompt, several seeds at each temperature. At temperature 0 there is nothing
# to draw, so all seeds say the same.

# %%
temperatures = [t for t in (0.0, 0.5, 1.0, 1.5) for _ in lesson.seeds]
options = dict(strategy="sample", temperature=temperatures, seed=lesson.seeds * 4)
prompts = ["Tell me about an animal."] * len(temperatures)
sampled = jaxdec.generate(
    lm, prompts, max_new_tokens=lesson.max_new_tokens, logprobs=0, **options
)
course.compare_answers(sampled, temperatures)

# %% [markdown]
# *Repetition* is the share of 4-grams that occurred before: small models often go
# in circles when they are greedy. *Perplexity* says how surprised the model is by what
# was said; its axis is logarithmic.

# %%
answer = course.sampling_table(sampled, temperatures)
course.draw_sampling(answer)

# %% [markdown]
# ## Sampling can be repeated
#
# The noise of a token depends on the request's seed and on the token's position, on
# nothing else. So the same seeds say the same again.

# %%
again = jaxdec.generate(lm, prompts, max_new_tokens=8, logprobs=0, **options)
is_repeated = [a.tokens == b.tokens[:8] for a, b in zip(again, sampled, strict=True)]
all(is_repeated)

# %% [markdown]
# ## The answer
#
# One step reads all weights to choose one token. Greedy decoding takes the likeliest;
# temperature, top-k and top-p change the law that a token is drawn from. What a step
# reads stays the same.

# %%
answer

# %% [markdown]
# ## Exercises
#
# Put your answer in the place of `None`, and run the cell. A wrong answer gets a hint.
#
# **1.** Write the law at a temperature: probabilities from logits (a NumPy array).

# %%
import numpy as np


def law(logits, temperature):
    return None  # your answer


course.check_temperature(law)

# %% [markdown]
# **2.** Five tokens have the probabilities 0.5, 0.25, 0.15, 0.06, 0.04. How many does
# top-p 0.8 keep?

# %%
kept = None  # your answer
course.check_top_p(kept)

# %% [markdown]
# **3.** How many bytes does one token leave in the KV cache of this model? `lm.config`
# has what you need; a number takes 4 bytes.

# %%
num_bytes = None  # your answer
course.check_kv_bytes(lm, num_bytes)

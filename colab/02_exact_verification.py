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
# # 2. Exact verification
#
# **How can a small model write for a large one, and not a single word change?**
#
# Classic speculative decoding ([Leviathan et al.](https://arxiv.org/abs/2211.17192),
# [Chen et al.](https://arxiv.org/abs/2302.01318)): a *draft model* proposes a few
# tokens, the *target* reads all of them in one forward, and a rule keeps a beginning of
# the draft so that what is said follows the target's law exactly.

# %%
import importlib.util

if importlib.util.find_spec("jaxdec") is None:
    # From the clone that this notebook is in; on Colab, clone it and %cd to colab/.
    get_ipython().run_line_magic("pip", "install -q '..[plots]'")

import jax

import jaxdec
from jaxdec import course

lesson = course.start("draft_model")
lm = lesson.lm
lesson

# %% [markdown]
# ## The same words in fewer steps
#
# The draft model here is a few layers as wide as the target's, with its embedding and
# head. It drafts one token after the other.

# %%
prompt = lesson.prompts[1]
plain = jaxdec.generate(lm, prompt, max_new_tokens=lesson.max_new_tokens)
drafted = jaxdec.generate(
    lm, prompt, strategy="draft_model", max_new_tokens=lesson.max_new_tokens
)
print(plain[0].text)
print("the same tokens:", plain[0].tokens == drafted[0].tokens)

# %% [markdown]
# Where each token came from: an *accepted* draft token, a *correction* by the target in
# the place of a refused one, or a *bonus* token after a draft that was kept whole.

# %%
course.show_tokens(drafted)

# %%
course.counts_table({"plain": plain, "draft model": drafted})

# %% [markdown]
# ## Proof: the certificate
#
# The tokens are replayed through the plain step, position by position. Where a rounding
# error could swap two nearly equal tokens, the certificate says so; anything else would
# be a divergence, and the certificate refused.

# %%
certificate = jaxdec.certify(
    lm,
    [prompt],
    "draft_model",
    outputs=drafted,
    max_new_tokens=lesson.max_new_tokens,
)
print(certificate)

# %% [markdown]
# ## A step is a pure function
#
# Under `generate` there are two functions: `prefill` makes a state, and `step` turns a
# state into the next one. A state is never changed: here the same one is used twice,
# with the same result.
#
# From here on a token is drawn, at temperature 0.8 from the eight likeliest, and the
# rule is *rejection*.

# %%
rejecting = lesson.strategy("draft_model", rule="rejection")
story = "My favourite animal is the"
sampling = dict(temperature=0.8, top_k=8, chat=False)
strategy, params, request = course.open_strategy(lm, story, rejecting, **sampling)

prefill, step = jax.jit(strategy.prefill), jax.jit(strategy.step)
start = prefill(params, request)
one, _ = step(params, start)
other, _ = step(params, start)
course.is_same(one, other)

# %% [markdown]
# ## Rollback is the reuse of a prior state
#
# The target writes keys and values for the whole draft behind the live entries of its
# cache. Only the *length* says what counts. When a draft token is refused, nothing is
# undone: the length just does not cover it.

# %%
walked = course.walk(step, params, start, num=8)
before, info, after = course.first_refusal(walked)
course.draw_step(lm, before, info, after)

# %%
course.step_table(before, info, after)

# %% [markdown]
# ## The law holds
#
# Since a state is never spent, one state has many futures: take a step from it again
# and again, each time with other noise, and count the first token that is said. It
# should follow the target's law, although the drafts follow the drafter's.

# %%
found = course.futures(step, params, start, lesson.futures)
target = jaxdec.generate(
    lm,
    story,
    strategy="sample",
    logprobs=8,
    processed_logprobs=True,
    max_new_tokens=1,
    **sampling,
)
course.draw_law(course.law_table(lm, found, target[0]), len(found.emitted))

# %% [markdown]
# The bars on the target's law are two standard errors of so many draws. The eye is a
# good judge of a few tokens; a test judges all of them, with a stated rate of false
# alarms.
#
# ## The answer
#
# What was emitted follows the target; what was drafted need not.

# %%
answer = course.law_tests(found, target[0])
answer

# %% [markdown]
# ## Exercises
#
# **1.** A draft token x comes from q and is kept with the probability
# min(1, p(x) / q(x)). How often is a draft token kept, over all x? `p` and `q` are
# NumPy arrays.

# %%
import numpy as np


def chance(p, q):
    return None  # your answer


course.check_acceptance_probability(chance)

# %% [markdown]
# **2.** From which law must the token be drawn that replaces a refused one?


# %%
def residual(p, q):
    return None  # your answer


course.check_residual(residual)

# %% [markdown]
# **3.** Look at the step that was drawn above. Of the cache entries that it wrote for
# the anchor and the draft, how many do not count?

# %%
num_entries = None  # your answer
course.check_rollback(num_entries, info, after)

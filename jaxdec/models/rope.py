"""Rotary position embedding in half-rotation (NeoX) order, with published scalings.

Dimension i pairs with i + D/2. Frequencies are static NumPy float64, rounded once, so
that every backend sees the same table (RoFormer, arXiv 2104.09864; YaRN, 2309.00071).
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxdec.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each of the D/2 rotated pairs, float64.

    Raises:
        ValueError: a type of scaling that is not known.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    base = rope.theta**-exponent
    if rope.kind == "default":
        return base
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "factors":
        return base / np.asarray(rope.factors, np.float64)
    if rope.kind == "llama3":
        wavelength = 2 * np.pi / base
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = (rope.original_max_positions / wavelength - low) / (high - low)
        blend = (1 - smooth) * base / rope.factor + smooth * base
        scaled = np.where(
            wavelength > rope.original_max_positions / low, base / rope.factor, blend
        )
        return np.where(wavelength < rope.original_max_positions / high, base, scaled)
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, base)
    raise ValueError(
        f"rope type {rope.kind!r} is not supported; use one of default, linear, "
        "llama3, yarn, factors"
    )


def _yarn(rope: RopeConfig, head_dim: int, base: np.ndarray) -> np.ndarray:
    def correction(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 1e-3)
    ramp = np.clip((np.arange(head_dim // 2) - low) / span, 0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1 except under YaRN."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        if rope.factor <= 1:
            return 1.0
        return 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rotation(
    rope: RopeConfig, head_dim: int, position: Int[Array, "B T"]
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosine and sine of every position's angles, float32."""
    num_rotated = int(head_dim * rope.rotated)
    table = jnp.asarray(inverse_frequencies(rope, num_rotated), jnp.float32)
    angle = position[..., None].astype(jnp.float32) * table[None, None, :]
    factor = jnp.float32(attention_factor(rope))
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(
    x: Float[Array, "B T H D"],
    cos_sin: tuple[Float[Array, "B T half"], Float[Array, "B T half"]],
) -> Float[Array, "B T H D"]:
    """Rotates every head by its position; dimensions past the angles stay."""
    cos, sin = (part[:, :, None, :] for part in cos_sin)
    half = cos.shape[-1]
    low, high = x[..., :half], x[..., half : 2 * half]
    parts = [low * cos - high * sin, high * cos + low * sin]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return jnp.concatenate(parts, axis=-1)

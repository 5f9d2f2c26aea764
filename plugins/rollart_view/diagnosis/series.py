"""Robust statistics of metric series: falls, trends, levels and noise.

Takes: plain arrays, one value per batch. Gives: numbers. Never: depends on the meaning of a metric.

All limits are in units of the noise of the series itself, so that they do not depend on the size
of a metric. A single outlier moves none of them: levels are medians, and noise is a median too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

MAD_TO_STD = 1.4826
"""Standard deviation of a normal variable over its median absolute deviation."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal values: sqrt(pi / 2)."""
NUM_BLOCKS = 12
"""Blocks into which :func:`trend` cuts a series."""
MIN_VALUES = 8
"""With fewer values no order of them is certain: 1 in 8! is the first below CERTAIN_Z."""
T_95 = 1.943
"""One-sided 95% quantile of Student's t with MIN_VALUES - 2 degrees of freedom; more need less."""
FALL_Z = 6.0
"""A fall is this many standard errors. The search compares some thousand pairs of windows that
overlap; six leaves one false alarm in 10^9 normal pairs, and room for heavier tails."""
FALL_SHARE = 0.25
"""A fall costs at least this share of the level before it."""
CERTAIN_Z = 3.09
"""One-sided 0.1% quantile of the normal distribution: a diagnosis makes about ten tests."""


@dataclass(frozen=True, slots=True)
class Fall:
    """A lasting fall of a series."""

    onset: int
    """Index of the first value that belongs to it."""
    split: int
    """Index at which the level falls most."""
    before: float
    """Median before."""
    after: float
    """Median after ``split``."""
    last: float
    """Median of the last values of the series."""
    z: float
    """The fall in standard errors."""

    @property
    def has_recovered(self) -> bool:
        """True if the series ends above the middle of ``before`` and ``after``."""
        return self.last > (self.before + self.after) / 2


@dataclass(frozen=True, slots=True)
class Trend:
    """The change of a series from its beginning to its end."""

    first: float
    """Mean of its first quarter."""
    last: float
    """Mean of its last quarter."""
    z: float
    """Mann-Kendall's statistic, of the means of blocks: above 0 if it rises."""
    gain: float
    """The gain of the fitted line over the whole series."""
    error: float
    """Standard error of ``gain``."""

    @property
    def gain_high(self) -> float:
        """Upper end of the one-sided 95% interval of ``gain``."""
        return self.gain + T_95 * self.error

    @property
    def rises(self) -> bool:
        """True if it almost certainly rises."""
        return self.z > CERTAIN_Z

    @property
    def falls(self) -> bool:
        """True if it almost certainly falls."""
        return self.z < -CERTAIN_Z


def noise(values: FloatArray) -> float:
    """Return the standard deviation of single values ``[B]`` about a level that moves slowly.

    It is taken from successive differences (von Neumann 1941, Ann. Math. Stat. 12:367), so that a
    trend does not count as noise, by their median absolute value, so that jumps do not either.
    """
    if len(values) < 2:
        return 0.0
    return float(np.median(np.abs(np.diff(values)))) * MAD_TO_STD / math.sqrt(2)


def smoothed(values: FloatArray, window: int) -> FloatArray:
    """Return the medians of all windows ``[B - window + 1]`` of a series ``[B]``."""
    if len(values) < window:
        return np.empty(0)
    return np.median(np.lib.stride_tricks.sliding_window_view(values, window), axis=-1)


def find_fall(values: FloatArray, *, num_samples: int | None, low: float = 0.0) -> Fall | None:
    """Return the largest fall of a series ``[B]`` that lasts at least five batches.

    A change point is where the median of the batches before exceeds that of the batches after most
    (two-window change detection; Basseville and Nikiforov 1993, section 2.1). It counts if it is at
    least FALL_SHARE of the level and FALL_Z standard errors. Sudden falls are searched first, then
    slow ones.

    Args:
        values: One value per batch.
        num_samples: The number of samples (0 or 1) whose mean each value is: the noise is then at
            least binomial. None means that values are not shares.
        low: The lowest possible value.
    """
    size = len(values)
    for width, after in ((10, 5), (50, 20), (max(51, size // 4), max(21, size // 6))):
        if size < width + after:
            break
        found = _fall_of_width(values, (width, after), num_samples, low)
        if found is not None:
            return found
    return None


def _fall_of_width(
    values: FloatArray, widths: tuple[int, int], num_samples: int | None, low: float
) -> Fall | None:
    width, after_width = widths
    splits = np.arange(width, len(values) - after_width + 1)
    before = smoothed(values, width)[: len(splits)]
    after = smoothed(values, after_width)[width:]
    drops = before - after
    best: tuple[float, int, float] | None = None
    for n in map(int, np.flatnonzero((drops > 0) & (drops >= FALL_SHARE * (before - low)))):
        split, levels = int(splits[n]), (float(before[n]), float(after[n]))
        errors = [
            MEDIAN_ERROR * max(noise(part), _binomial(level, num_samples)) / math.sqrt(count)
            for part, level, count in zip(
                (values[max(0, split - 50) : split], values[split : split + 50]),
                levels,
                (width, after_width),
                strict=True,
            )
        ]
        z = float(drops[n]) / max(math.hypot(*errors), 1e-12)
        if z >= FALL_Z and (best is None or drops[n] > best[0]):
            best = (float(drops[n]), n, z)
    if best is None:
        return None
    _, n, z = best
    split = int(splits[n])
    # The level before the onset: a slow fall has lowered the window before its split.
    start, level = _level_before(values, split, width)
    return Fall(
        onset=_onset(values, level, range(start, split + after_width), num_samples),
        split=split,
        before=level,
        after=float(after[n]),
        last=float(np.median(values[-min(20, len(values) - split) :])),
        z=z,
    )


def _level_before(values: FloatArray, split: int, width: int) -> tuple[int, float]:
    """Return the highest median of 50 values, or ``width``, near a split, and where they end."""
    size = min(max(50, width), split)
    ends = np.arange(max(size, split - 2 * width), split + 1)
    levels = smoothed(values[int(ends[0]) - size : split], size)
    best = int(np.argmax(levels))
    return int(ends[best]), float(levels[best])


def _onset(values: FloatArray, level: float, where: range, num_samples: int | None) -> int:
    """Return where a fall from ``level`` begins: after the zero of Page's CUSUM before its maximum.

    ``S_t = max(0, S_(t-1) + (level - x_t) / sigma - 1)`` (Page 1954, Biometrika 41:100), with an
    allowance of one standard deviation.
    """
    part = values[where.start : where.stop]
    usual = noise(values[max(0, where.start - 50) : where.start])
    sigma = max(usual, _binomial(level, num_samples), 1e-12)
    total, largest = 0.0, 0.0
    begin = onset = where.start
    for n, value in enumerate(part):
        if total <= 0.0:
            begin = where.start + n
        total = max(0.0, total + (level - float(value)) / sigma - 1.0)
        if total > largest:
            largest, onset = total, begin
    return onset


def _binomial(share: float, num_samples: int | None) -> float:
    """Return the standard deviation of a share among ``num_samples``, with one of each added."""
    if num_samples is None:
        return 0.0
    share = min(1.0, max(0.0, share))
    share = (share * num_samples + 1) / (num_samples + 2)
    return math.sqrt(share * (1 - share) / num_samples)


def trend(values: FloatArray) -> Trend | None:
    """Return the change of a series ``[B]``; None if it has fewer than MIN_VALUES values.

    The test is Mann-Kendall's (Mann 1945, Econometrica 13:245), on the means of NUM_BLOCKS equal
    blocks. It assumes no distribution, and correlated neighbouring batches count once. A series
    with fewer than two values per block is tested as it is.
    """
    if len(values) < MIN_VALUES:
        return None
    size = NUM_BLOCKS if len(values) >= 2 * NUM_BLOCKS else len(values)
    means = np.array([part.mean() for part in np.array_split(values, size)])
    score = float(np.triu(np.sign(means[None, :] - means[:, None]), 1).sum())
    spread = math.sqrt(size * (size - 1) * (2 * size + 5) / 18)
    x = np.arange(size) - (size - 1) / 2
    slope = float((x * means).sum() / (x * x).sum())
    rest = means - means.mean() - slope * x
    error = math.sqrt(float((rest * rest).sum()) / (size - 2) / float((x * x).sum()))
    quarter = max(1, size // 4)
    return Trend(
        first=float(means[:quarter].mean()),
        last=float(means[-quarter:].mean()),
        z=float(score - np.sign(score)) / spread,
        gain=slope * size,
        error=error * size,
    )


def mostly_above(values: FloatArray, limit: float) -> bool:
    """Return whether the median is above a limit, by a one-sided sign test at 1%.

    Needs ten values (Dixon and Mood 1946, JASA 41:557; the normal form).
    """
    n = len(values)
    return n >= 10 and int((values > limit).sum()) >= n / 2 + 2.33 * math.sqrt(n) / 2


def mostly_below(values: FloatArray, limit: float) -> bool:
    """Return whether the median is below a limit; see :func:`mostly_above`."""
    return mostly_above(-values, -limit)


def last_run_above(values: FloatArray, limit: float, window: int = 5) -> int:
    """Return the index from which the median of ``window`` values stays above a limit."""
    levels = smoothed(values, window)
    under = np.flatnonzero(levels <= limit)
    return int(under[-1]) + window // 2 + 1 if len(under) else 0

"""Handwriting of ten digits: strokes drawn with a pen of some width, slanted, turned and shifted, on a noisy page."""

import numpy as np

DIGIT_SIDE = 16
_SAMPLES = 12  # points along an arc


def _arc(x: float, y: float, wide: float, high: float, start: float, stop: float) -> list[tuple[float, float]]:
    """Points of an ellipse around (x, y), between two angles in turns: 0 is to the right, a quarter is down."""
    angles = 2 * np.pi * np.linspace(start, stop, _SAMPLES)
    return list(zip(x + wide * np.cos(angles), y + high * np.sin(angles), strict=True))


# Each a few pen strokes of (x, y) points in a box from -1 to 1, y downwards.
STROKES: tuple[tuple[list[tuple[float, float]], ...], ...] = (
    (_arc(0, 0, 0.6, 0.9, 0, 1),),
    ([(-0.4, -0.5), (0.1, -0.9), (0.1, 0.9)],),
    (_arc(0, -0.4, 0.55, 0.5, 0.5, 1.08) + [(-0.6, 0.9), (0.65, 0.9)],),
    (_arc(-0.05, -0.45, 0.5, 0.45, 0.6, 1.25), _arc(-0.05, 0.4, 0.6, 0.5, -0.25, 0.4)),
    ([(0.25, 0.9), (0.25, -0.9), (-0.6, 0.3), (0.65, 0.3)],),
    ([(0.55, -0.9), (-0.45, -0.9), (-0.5, -0.15)] + _arc(-0.05, 0.35, 0.6, 0.55, 0.63, 1.4),),
    ([(0.45, -0.9), (-0.2, -0.4)] + _arc(0, 0.4, 0.55, 0.5, 0.5, 1.5),),
    ([(-0.6, -0.9), (0.6, -0.9), (-0.1, 0.9)],),
    (_arc(0, -0.45, 0.45, 0.42, 0, 1), _arc(0, 0.43, 0.57, 0.47, 0, 1)),
    (_arc(0, -0.4, 0.55, 0.5, 0, 1), [(0.55, -0.4), (0.35, 0.9)]),
)


def draw_digits(count: int, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """`count` digits as pixels uint8 [count, 16, 16, 1], bright ink on a dark page, and labels int32 [count].

    key: of the random draws; the same gives the same digits, and the first of more are those of fewer.
    """
    pixels, labels = [], []
    for start in range(0, count, 1000):
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence(key, spawn_key=(start,))))
        chosen = random.integers(10, size=1000)
        pixels.append(_written(chosen, random))
        labels.append(chosen)
    empty = np.zeros((0, DIGIT_SIDE, DIGIT_SIDE, 1), np.uint8), np.zeros(0, int)
    return np.concatenate([empty[0], *pixels])[:count], np.concatenate([empty[1], *labels])[:count].astype(np.int32)


def _written(labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    n = len(labels)
    uniform = lambda low, high, *shape: random.uniform(low, high, (n, *shape))
    turn, slant, size = uniform(-0.3, 0.3), uniform(-0.35, 0.35), uniform(0.6, 0.95, 2)
    shift, width, ink = uniform(-0.2, 0.2, 1, 2), uniform(0.09, 0.22), uniform(0.55, 1.0)
    waver = random.normal(0, 0.06, (n, 3, 2)), random.normal(0, 0.06, (n, 3, 2))
    noise = random.normal(0, 0.08, (n, DIGIT_SIDE, DIGIT_SIDE))
    cos, sin, zero = np.cos(turn), np.sin(turn), np.zeros(n)
    slanted = np.stack([np.stack([size[:, 0], slant], -1), np.stack([zero, size[:, 1]], -1)], -2)
    frame = np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], -2) @ slanted  # [n, 2, 2]
    page = (np.arange(DIGIT_SIDE) + 0.5) / DIGIT_SIDE * 2.4 - 1.2
    grid = np.stack(np.meshgrid(page, page), axis=-1).reshape(1, -1, 1, 2)  # x, y
    out = np.empty((n, DIGIT_SIDE, DIGIT_SIDE))
    for digit, strokes in enumerate(STROKES):
        at = np.flatnonzero(labels == digit)
        far = np.full((len(at), DIGIT_SIDE * DIGIT_SIDE), np.inf)
        for stroke in strokes:
            points = np.asarray(stroke)[None]
            waves = np.arange(1, 4)[None, None, :, None] * points[:, :, None, :] * 1.5
            points = points + np.sum(waver[0][at, None] * np.sin(waves) + waver[1][at, None] * np.cos(waves), axis=2)
            points = points @ frame[at].swapaxes(1, 2) + shift[at]
            far = np.minimum(far, _distance(grid, points[:, None, :-1], points[:, None, 1:]))
        out[at] = (1 / (1 + np.exp((far - width[at, None]) / 0.05))).reshape(-1, DIGIT_SIDE, DIGIT_SIDE)
    return np.round(255 * np.clip(out * ink[:, None, None] + np.abs(noise), 0, 1)).astype(np.uint8)[..., None]


def _distance(points: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """From points [1, P, 1, 2] to the nearest of the segments [n, 1, S, 2]: [n, P]."""
    along = stop - start
    share = np.sum((points - start) * along, axis=-1) / np.maximum(np.sum(along**2, axis=-1), 1e-12)
    nearest = start + np.clip(share, 0, 1)[..., None] * along
    return np.sqrt(np.min(np.sum((points - nearest) ** 2, axis=-1), axis=-1))

"""Images of handwritten digits, drawn by a program.

Each digit is drawn as pen strokes of random width, slant, rotation and shift on a noisy background.
"""

import numpy as np

DIGIT_SIDE = 16
_ARC_POINTS = 12


def _arc(x: float, y: float, x_radius: float, y_radius: float, start: float, stop: float) -> list[tuple[float, float]]:
    """Return points of an arc of an ellipse around (x, y).

    start, stop: angles in turns; 0 is to the right, 0.25 is down.
    """
    angles = 2 * np.pi * np.linspace(start, stop, _ARC_POINTS)
    return list(zip(x + x_radius * np.cos(angles), y + y_radius * np.sin(angles), strict=True))


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
"""The pen strokes of each digit: (x, y) points of line segments, from -1 to 1, y downwards."""


def draw_digits(count: int, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Draw digits: pixels [count, 16, 16, 1] uint8, bright on dark, and labels [count] int32.

    key: seed of the random numbers.  The result is a function of the arguments, and a smaller `count` gives the first
      digits of a larger one.
    """
    pixels, labels = [], []
    for start in range(0, count, 1000):
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence(key, spawn_key=(start,))))
        chunk_labels = random.integers(10, size=1000)
        pixels.append(_draw(chunk_labels, random))
        labels.append(chunk_labels)
    no_pixels, no_labels = np.zeros((0, DIGIT_SIDE, DIGIT_SIDE, 1), np.uint8), np.zeros(0, int)
    all_pixels, all_labels = np.concatenate([no_pixels, *pixels]), np.concatenate([no_labels, *labels])
    return all_pixels[:count], all_labels[:count].astype(np.int32)


def _draw(labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draw one image for each label, [n, 16, 16, 1] uint8."""
    n = len(labels)
    uniform = lambda low, high, *shape: random.uniform(low, high, (n, *shape))
    rotation, slant, size = uniform(-0.3, 0.3), uniform(-0.35, 0.35), uniform(0.6, 0.95, 2)
    shift, width, ink = uniform(-0.2, 0.2, 1, 2), uniform(0.09, 0.22), uniform(0.55, 1.0)
    wave_amplitudes = random.normal(0, 0.06, (n, 3, 2)), random.normal(0, 0.06, (n, 3, 2))
    noise = random.normal(0, 0.08, (n, DIGIT_SIDE, DIGIT_SIDE))
    cos, sin, zero = np.cos(rotation), np.sin(rotation), np.zeros(n)
    slant_and_scale = np.stack([np.stack([size[:, 0], slant], -1), np.stack([zero, size[:, 1]], -1)], -2)
    transform = np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], -2) @ slant_and_scale  # [n, 2, 2]
    centres = (np.arange(DIGIT_SIDE) + 0.5) / DIGIT_SIDE * 2.4 - 1.2
    grid = np.stack(np.meshgrid(centres, centres), axis=-1).reshape(1, -1, 1, 2)  # (x, y) of each pixel's centre
    out = np.empty((n, DIGIT_SIDE, DIGIT_SIDE))
    for digit, strokes in enumerate(STROKES):
        indices = np.flatnonzero(labels == digit)
        distance = np.full((len(indices), DIGIT_SIDE * DIGIT_SIDE), np.inf)
        for stroke in strokes:
            points = np.asarray(stroke)[None]
            waves = np.arange(1, 4)[None, None, :, None] * points[:, :, None, :] * 1.5
            sines, cosines = (amplitudes[indices, None] for amplitudes in wave_amplitudes)
            points = points + np.sum(sines * np.sin(waves) + cosines * np.cos(waves), axis=2)
            points = points @ transform[indices].swapaxes(1, 2) + shift[indices]
            distance = np.minimum(distance, _segment_distance(grid, points[:, None, :-1], points[:, None, 1:]))
        out[indices] = (1 / (1 + np.exp((distance - width[indices, None]) / 0.05))).reshape(-1, DIGIT_SIDE, DIGIT_SIDE)
    return np.round(255 * np.clip(out * ink[:, None, None] + np.abs(noise), 0, 1)).astype(np.uint8)[..., None]


def _segment_distance(points: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return the distance from each point to the nearest of several line segments, [n, P].

    points: [1, P, 1, 2].  start, stop: the ends of the segments, [n, 1, S, 2].
    """
    direction = stop - start
    fraction = np.sum((points - start) * direction, axis=-1) / np.maximum(np.sum(direction**2, axis=-1), 1e-12)
    nearest = start + np.clip(fraction, 0, 1)[..., None] * direction
    return np.sqrt(np.min(np.sum((points - nearest) ** 2, axis=-1), axis=-1))

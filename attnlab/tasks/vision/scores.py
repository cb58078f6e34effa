"""How well classes are told, from the probabilities of each."""

import numpy as np

CALIBRATION_BINS = 15
"""Of the calibration error, as in Guo et al. 2017."""


def score_classification(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Of probabilities [n, classes] and labels [n], each image once.

    accuracy: the likeliest class is the label's.  top5: it is among the five likeliest, with more than five classes.
    loss: mean of -log p(label), in nats.  calibration_error: see `calibration_bins`.
    """
    n, classes = probabilities.shape
    truth = probabilities[np.arange(n), labels]
    # What is not less likely than the label's class counts as before it: who says the same of all has told nothing.
    rank = classes - 1 - np.sum(probabilities < truth[:, None], axis=1)
    found = {'accuracy': float(np.mean(rank < 1)), 'loss': float(-np.mean(np.log(np.maximum(truth, 1e-30))))}
    if classes > 5:
        found['top5'] = float(np.mean(rank < 5))
    sizes, confidence, accuracy = calibration_bins(probabilities, labels)
    found['calibration_error'] = float(np.sum(sizes * np.abs(confidence - accuracy)) / n)
    return found


def calibration_bins(probabilities: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images by their confidence, the likeliest class's probability, in `CALIBRATION_BINS` of equal width (Guo et al. 2017, eq. 3).

    Returns how many there are in each bin, their mean confidence and their accuracy, 0 in an empty one.
    """
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    at = np.clip(np.ceil(np.nan_to_num(confidence) * CALIBRATION_BINS).astype(int) - 1, 0, CALIBRATION_BINS - 1)
    sizes = np.bincount(at, minlength=CALIBRATION_BINS)
    mean = lambda values: np.bincount(at, values, CALIBRATION_BINS) / np.maximum(sizes, 1)
    return sizes, mean(confidence), mean(right)


def confusion_matrix(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """[classes, classes] int: how many images of class (row) were taken for class (column)."""
    classes = probabilities.shape[1]
    pairs = labels * classes + probabilities.argmax(axis=1)
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)

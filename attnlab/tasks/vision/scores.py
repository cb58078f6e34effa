"""Scores of classification from class probabilities: accuracy, loss, calibration, confusion matrix."""

import numpy as np

CALIBRATION_BINS = 15
"""Number of confidence bins of the calibration error, as in Guo et al. 2017."""


def score_classification(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the scores of probabilities [n, classes] float for labels [n] int.

    accuracy: share of images whose label has the highest probability.
    top5: share of images whose label is among the five most probable classes; only with more than five classes.
    loss: mean of -log p(label), in nats.
    calibration_error: mean distance of confidence and accuracy, weighted by the size of the bin; see
      `calibration_bins`.

    In accuracy and top5 a class as probable as the label ranks before it, so that equal probabilities score nothing.
    """
    n, classes = probabilities.shape
    label_probability = probabilities[np.arange(n), labels]
    # Counts the classes that are not less probable, so that NaN probabilities rank before the label too.
    rank = classes - 1 - np.sum(probabilities < label_probability[:, None], axis=1)
    scores = {
        'accuracy': float(np.mean(rank < 1)),
        'loss': float(-np.mean(np.log(np.maximum(label_probability, 1e-30)))),
    }
    if classes > 5:
        scores['top5'] = float(np.mean(rank < 5))
    sizes, confidence, accuracy = calibration_bins(probabilities, labels)
    scores['calibration_error'] = float(np.sum(sizes * np.abs(confidence - accuracy)) / n)
    return scores


def calibration_bins(probabilities: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group images into `CALIBRATION_BINS` bins of equal width by confidence, the probability of the top class.

    Returns three arrays [bins]: the number of images (int), their mean confidence and their accuracy (float); the last
    two are 0 in an empty bin. Guo et al. 2017, equation 3.
    """
    confidence = probabilities.max(axis=1)
    correct = probabilities.argmax(axis=1) == labels
    bins = np.clip(np.ceil(np.nan_to_num(confidence) * CALIBRATION_BINS).astype(int) - 1, 0, CALIBRATION_BINS - 1)
    sizes = np.bincount(bins, minlength=CALIBRATION_BINS)

    def bin_means(values: np.ndarray) -> np.ndarray:
        return np.bincount(bins, values, CALIBRATION_BINS) / np.maximum(sizes, 1)

    return sizes, bin_means(confidence), bin_means(correct)


def confusion_matrix(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the number of images of each class (row) with each prediction (column), [classes, classes] int."""
    classes = probabilities.shape[1]
    pairs = labels * classes + probabilities.argmax(axis=1)
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)

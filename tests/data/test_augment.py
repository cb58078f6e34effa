"""Image augmentation, compared with images computed by hand or by Pillow, and with statistics."""

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from attnlab.data import augment
from attnlab.data.augment import Augment

B, H, W = 6, 8, 12


def generator(seed=0):
    return np.random.default_rng(seed)


def random_images(count=B, height=H, width=W, channels=3):
    return generator(1).integers(0, 256, (count, height, width, channels)).astype(np.uint8)


def apply(name, pixels, strength, sign=1.0):
    """Apply one operation to all images, at one strength."""
    n = len(pixels)
    return augment.OPERATIONS[name](pixels, np.full(n, strength), np.full(n, sign))


def test_a_crop_is_a_window_of_the_padded_image_possibly_mirrored():
    pixels = random_images(200)
    out = augment.random_crop(pixels, 2, True, generator())
    padded = np.pad(pixels, ((0, 0), (2, 2), (2, 2), (0, 0)))
    seen = set()
    for before, after in zip(padded, out, strict=True):
        windows = {
            (row, column, flip): before[row : row + H, column : column + W][:, :: -1 if flip else 1]
            for row in range(5) for column in range(5) for flip in (False, True)
        }  # fmt: skip
        (match,) = [key for key, window in windows.items() if np.array_equal(window, after)]
        seen.add(match)
    assert len(seen) > 40 and {flip for _, _, flip in seen} == {True, False}
    np.testing.assert_array_equal(augment.random_crop(pixels, 0, False, generator()), pixels)


@pytest.mark.parametrize(('name', 'shift'), [('translate_x', (0, 2)), ('translate_y', (2, 0))])
def test_translation_shifts_whole_pixels_and_fills_with_black(name, shift):
    pixels = random_images()
    size = W if shift[1] else H
    out = apply(name, pixels, 2 / (150 / 331 * size))  # AutoAugment's 150 of 331 pixels
    expected = np.zeros_like(pixels)
    expected[:, : H - shift[0], : W - shift[1]] = pixels[:, shift[0] :, shift[1] :]
    np.testing.assert_array_equal(out, expected)
    back = apply(name, pixels, 2 / (150 / 331 * size), -1.0)
    np.testing.assert_array_equal(back[:, shift[0] :, shift[1] :], pixels[:, : H - shift[0], : W - shift[1]])


def test_a_shear_shifts_each_row_by_its_distance_from_the_centre():
    pixels = random_images(1, 9, 9)
    out = apply('shear_x', pixels, 1.0)[0]
    for row in range(9):
        shift = round(0.3 * (row - 4))
        columns = np.arange(9) + shift
        inside = (columns >= 0) & (columns < 9)
        np.testing.assert_array_equal(out[row, inside], pixels[0, row, columns[inside]])
        assert not out[row, ~inside].any()
    np.testing.assert_array_equal(
        apply('shear_y', pixels, 1.0), apply('shear_x', pixels.swapaxes(1, 2), 1.0).swapaxes(1, 2)
    )


def test_a_rotation_is_about_the_centre():
    pixels = np.zeros((1, 21, 21, 1), np.uint8)
    pixels[0, 10, 18] = 255  # to the right of the centre
    for sign in (1.0, -1.0):
        (row, column, _), *_ = np.argwhere(apply('rotate', pixels, 1.0, sign)[0])
        assert abs(np.hypot(row - 10, column - 10) - 8) < 1 and abs(abs(row - 10) - 4) <= 1 and column > 10
    np.testing.assert_array_equal(apply('rotate', random_images(), 0.0), random_images())


@pytest.mark.parametrize('sign', [1.0, -1.0])
@pytest.mark.parametrize(('name', 'enhance'), [
    ('brightness', ImageEnhance.Brightness), ('contrast', ImageEnhance.Contrast), ('color', ImageEnhance.Color),
])  # fmt: skip
def test_enhancements_match_pillow(name, enhance, sign):
    pixels = random_images()
    out = apply(name, pixels, 0.5, sign)
    for before, after in zip(pixels, out, strict=True):
        expected = np.asarray(enhance(Image.fromarray(before)).enhance(1 + 0.45 * sign), int)
        assert np.abs(after.astype(int) - expected).max() <= 2  # Pillow rounds the luminance first


def test_sharpness_matches_pillow_inside_the_border():
    pixels = random_images()
    for before, after in zip(pixels, apply('sharpness', pixels, 1.0), strict=True):
        expected = np.asarray(ImageEnhance.Sharpness(Image.fromarray(before)).enhance(1.9), int)
        assert np.abs(after.astype(int) - expected)[1:-1, 1:-1].max() <= 2


def test_operations_without_a_sign_match_pillow():
    pixels = random_images()
    for before, *after in zip(
        pixels, apply('posterize', pixels, 0.5), apply('solarize', pixels, 0.25),
        apply('autocontrast', pixels // 2 + 40, 1.0), strict=True,
    ):  # fmt: skip
        image = Image.fromarray(before)
        np.testing.assert_array_equal(after[0], np.asarray(ImageOps.posterize(image, 6)))
        np.testing.assert_array_equal(after[1], np.asarray(ImageOps.solarize(image, 192)))
        expected = np.asarray(ImageOps.autocontrast(Image.fromarray(before // 2 + 40)), int)
        assert np.abs(after[2].astype(int) - expected).max() <= 1


def test_equalize_flattens_the_histogram():
    dark = (random_images(2, 16, 16) // 8).astype(np.uint8)
    out = apply('equalize', dark, 1.0)
    for image in range(2):
        for channel in range(3):
            before = dark[image, ..., channel]
            darker = np.array([[np.sum(before < value) for value in row] for row in before])
            np.testing.assert_array_equal(out[image, ..., channel], np.round(255 * darker / darker.max()))
    flat = np.full((1, 4, 4, 1), 9, np.uint8)
    for name in ('equalize', 'autocontrast'):
        np.testing.assert_array_equal(apply(name, flat, 1.0), flat)


def test_operations_at_strength_zero_change_nothing():
    pixels = random_images()
    for name in set(augment.OPERATIONS) - {'autocontrast', 'equalize', 'solarize'}:
        np.testing.assert_array_equal(apply(name, pixels, 0.0), pixels, err_msg=name)


def test_erased_boxes_have_the_stated_size_and_rate():
    pixels = np.zeros((2000, 16, 16, 1), np.uint8)
    out = augment.random_erase(pixels, 0.25, generator())
    share = (out != 0).mean(axis=(1, 2, 3))
    erased = share[share > 0]
    assert abs(len(erased) / 2000 - 0.25) < 0.03 and erased.max() < 0.4
    assert not pixels.any()


def test_an_erased_box_is_inside_the_image_and_a_cutmix_box_may_be_cut_off():
    areas = generator().uniform(0.02, 0.33, 4000)
    ratios = np.exp(generator().uniform(np.log(0.3), np.log(1 / 0.3), 4000))
    whole, cut_off = (augment.random_boxes(4000, 32, 24, areas, ratios, generator(), cut) for cut in (False, True))
    share = whole.mean(axis=(1, 2))
    assert abs(share - areas).max() < 0.05 and abs(share.mean() - areas.mean()) < 3e-3
    assert cut_off.mean() < 0.9 * areas.mean()
    oblong = augment.random_boxes(500, 32, 24, np.full(500, 0.33), np.full(500, 1 / 0.3), generator(), False)
    # With the given ratio the box would be higher than the image.
    np.testing.assert_allclose(oblong.mean(axis=(1, 2)), 0.33, atol=0.04)


LABELS = np.array([0, 1, 2, 3, 4, -1])


def test_mixup_is_the_mean_of_two_images_weighted_by_their_shares():
    pixels = random_images()
    out, labels = Augment(mixup=0.5)(pixels, LABELS, generator())
    assert np.all((labels.share >= 0) & (labels.share <= 1)) and len(set(labels.share)) == B
    for i in range(5):
        j = int(np.flatnonzero(LABELS == labels.second[i])[0])
        assert j != i
        mixed = labels.share[i] * pixels[i].astype(float) + (1 - labels.share[i]) * pixels[j]
        assert np.abs(out[i] - mixed).max() <= 0.51
    assert labels.first.tolist() == LABELS.tolist() and labels.second[-1] == -1


def test_cutmix_share_is_the_part_of_the_area_that_is_left():
    pixels = np.broadcast_to(np.arange(B, dtype=np.uint8)[:, None, None, None], (B, 32, 32, 3)).copy()
    out, labels = Augment(cutmix=1.0)(pixels, LABELS, generator(2))
    for i in range(5):
        kept = float((out[i] == i).mean())
        assert labels.share[i] == pytest.approx(kept)
        assert set(np.unique(out[i])) <= {i, labels.second[i]}
        rows, columns = (np.flatnonzero((out[i, ..., 0] != i).any(axis=axis)) for axis in (1, 0))
        assert (out[i, rows[:, None], columns] != i).all() if rows.size else True  # the changed pixels are one box


def test_mixup_and_cutmix_are_both_drawn_and_a_single_image_is_unchanged():
    augmentation = Augment(mixup=1.0, cutmix=1.0)
    pixels = np.stack([np.zeros((8, 8, 1), np.uint8), np.full((8, 8, 1), 200, np.uint8)])
    outputs = [augmentation(pixels, np.array([0, 1]), generator(i))[0] for i in range(20)]
    assert {bool(set(np.unique(out)) - {0, 200}) for out in outputs} == {True, False}  # mixup gives other values
    out, labels = augmentation(pixels, np.array([4, -1]), generator())
    np.testing.assert_array_equal(out, pixels)
    assert labels.share.tolist() == [1, 1] and labels.second.tolist() == [4, -1]


@pytest.mark.parametrize('policy', ['trivial', 'rand'])
def test_policies_are_deterministic_and_do_not_change_their_input(policy):
    pixels, labels = random_images(64, 32, 32), np.zeros(64, int)
    before = pixels.copy()
    augmentation = Augment(crop=2, flip=True, policy=policy, erase=0.5, mixup=0.3, cutmix=1.0)
    first, again, other = (augmentation(pixels, labels, generator(seed)) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first[0], again[0])
    assert not np.array_equal(first[0], other[0]) and first[0].dtype == np.uint8
    np.testing.assert_array_equal(pixels, before)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="policy is 'auto'; expected 'none', 'trivial' or 'rand'"):
        Augment(policy='auto')(random_images(), LABELS, generator())


def test_without_augmentations_nothing_changes():
    pixels = random_images()
    out, labels = Augment()(pixels, LABELS, generator())
    np.testing.assert_array_equal(out, pixels)
    assert labels.share.tolist() == [1.0] * B

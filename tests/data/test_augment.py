"""Changes of images: each against an image made by hand, by Pillow, or a count."""

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from attnlab.data import augment
from attnlab.data.augment import Augment

B, H, W = 6, 8, 12


def random(seed=0):
    return np.random.default_rng(seed)


def pictures(count=B, height=H, width=W, channels=3):
    return random(1).integers(0, 256, (count, height, width, channels)).astype(np.uint8)


def one(name, pixels, strength, sign=1.0):
    n = len(pixels)
    return augment.OPERATIONS[name](pixels, np.full(n, strength), np.full(n, sign))


def test_a_crop_is_a_window_of_the_framed_image_mirrored_or_not():
    pixels = pictures(200)
    out = augment.random_crop(pixels, 2, True, random())
    framed = np.pad(pixels, ((0, 0), (2, 2), (2, 2), (0, 0)))
    seen = set()
    for before, after in zip(framed, out, strict=True):
        windows = {
            (row, column, flip): before[row : row + H, column : column + W][:, :: -1 if flip else 1]
            for row in range(5) for column in range(5) for flip in (False, True)
        }  # fmt: skip
        (found,) = [key for key, window in windows.items() if np.array_equal(window, after)]
        seen.add(found)
    assert len(seen) > 40 and {flip for _, _, flip in seen} == {True, False}
    np.testing.assert_array_equal(augment.random_crop(pixels, 0, False, random()), pixels)


@pytest.mark.parametrize(('name', 'shift'), [('translate_x', (0, 2)), ('translate_y', (2, 0))])
def test_translation_moves_whole_pixels_and_leaves_black(name, shift):
    pixels = pictures()
    size = W if shift[1] else H
    out = one(name, pixels, 2 / (150 / 331 * size))  # AutoAugment's 150 of 331 pixels
    expected = np.zeros_like(pixels)
    expected[:, : H - shift[0], : W - shift[1]] = pixels[:, shift[0] :, shift[1] :]
    np.testing.assert_array_equal(out, expected)
    back = one(name, pixels, 2 / (150 / 331 * size), -1.0)
    np.testing.assert_array_equal(back[:, shift[0] :, shift[1] :], pixels[:, : H - shift[0], : W - shift[1]])


def test_a_shear_moves_each_row_by_its_height():
    pixels = pictures(1, 9, 9)
    out = one('shear_x', pixels, 1.0)[0]
    for row in range(9):
        shift = round(0.3 * (row - 4))
        columns = np.arange(9) + shift
        inside = (columns >= 0) & (columns < 9)
        np.testing.assert_array_equal(out[row, inside], pixels[0, row, columns[inside]])
        assert not out[row, ~inside].any()
    np.testing.assert_array_equal(
        one('shear_y', pixels, 1.0), one('shear_x', pixels.swapaxes(1, 2), 1.0).swapaxes(1, 2)
    )


def test_a_rotation_is_about_the_middle():
    pixels = np.zeros((1, 21, 21, 1), np.uint8)
    pixels[0, 10, 18] = 255  # to the right of the middle
    for sign in (1.0, -1.0):
        (row, column, _), *_ = np.argwhere(one('rotate', pixels, 1.0, sign)[0])
        assert abs(np.hypot(row - 10, column - 10) - 8) < 1 and abs(abs(row - 10) - 4) <= 1 and column > 10
    np.testing.assert_array_equal(one('rotate', pictures(), 0.0), pictures())


@pytest.mark.parametrize('sign', [1.0, -1.0])
@pytest.mark.parametrize(('name', 'enhance'), [
    ('brightness', ImageEnhance.Brightness), ('contrast', ImageEnhance.Contrast), ('color', ImageEnhance.Color),
])  # fmt: skip
def test_enhancements_are_those_of_pillow(name, enhance, sign):
    pixels = pictures()
    out = one(name, pixels, 0.5, sign)
    for before, after in zip(pixels, out, strict=True):
        expected = np.asarray(enhance(Image.fromarray(before)).enhance(1 + 0.45 * sign), int)
        assert np.abs(after.astype(int) - expected).max() <= 2  # it rounds its grey first


def test_sharpness_is_that_of_pillow_inside():
    pixels = pictures()
    for before, after in zip(pixels, one('sharpness', pixels, 1.0), strict=True):
        expected = np.asarray(ImageEnhance.Sharpness(Image.fromarray(before)).enhance(1.9), int)
        assert np.abs(after.astype(int) - expected)[1:-1, 1:-1].max() <= 2


def test_operations_without_a_sign_are_those_of_pillow():
    pixels = pictures()
    for before, *after in zip(
        pixels, one('posterize', pixels, 0.5), one('solarize', pixels, 0.25),
        one('autocontrast', pixels // 2 + 40, 1.0), strict=True,
    ):  # fmt: skip
        image = Image.fromarray(before)
        np.testing.assert_array_equal(after[0], np.asarray(ImageOps.posterize(image, 6)))
        np.testing.assert_array_equal(after[1], np.asarray(ImageOps.solarize(image, 192)))
        expected = np.asarray(ImageOps.autocontrast(Image.fromarray(before // 2 + 40)), int)
        assert np.abs(after[2].astype(int) - expected).max() <= 1


def test_equalize_makes_every_value_as_frequent():
    dark = (pictures(2, 16, 16) // 8).astype(np.uint8)
    out = one('equalize', dark, 1.0)
    for image in range(2):
        for channel in range(3):
            before = dark[image, ..., channel]
            darker = np.array([[np.sum(before < value) for value in row] for row in before])
            np.testing.assert_array_equal(out[image, ..., channel], np.round(255 * darker / darker.max()))
    flat = np.full((1, 4, 4, 1), 9, np.uint8)
    for name in ('equalize', 'autocontrast'):
        np.testing.assert_array_equal(one(name, flat, 1.0), flat)


def test_at_strength_zero_nothing_with_a_strength_happens():
    pixels = pictures()
    for name in set(augment.OPERATIONS) - {'autocontrast', 'equalize', 'solarize'}:
        np.testing.assert_array_equal(one(name, pixels, 0.0), pixels, err_msg=name)


def test_erased_boxes_are_of_the_stated_size_and_number():
    pixels = np.zeros((2000, 16, 16, 1), np.uint8)
    out = augment.random_erase(pixels, 0.25, random())
    share = (out != 0).mean(axis=(1, 2, 3))
    hit = share[share > 0]
    assert abs(len(hit) / 2000 - 0.25) < 0.03 and hit.max() < 0.4
    assert not pixels.any()


def test_an_erased_box_lies_in_the_image_and_a_pasted_one_may_be_cut():
    areas, ratios = random().uniform(0.02, 0.33, 4000), np.exp(random().uniform(np.log(0.3), np.log(1 / 0.3), 4000))
    whole, cut = (augment.random_boxes(4000, 32, 24, areas, ratios, random(), each) for each in (False, True))
    share = whole.mean(axis=(1, 2))
    assert abs(share - areas).max() < 0.05 and abs(share.mean() - areas.mean()) < 3e-3
    assert cut.mean() < 0.9 * areas.mean()
    oblong = augment.random_boxes(500, 32, 24, np.full(500, 0.33), np.full(500, 1 / 0.3), random(), False)
    np.testing.assert_allclose(oblong.mean(axis=(1, 2)), 0.33, atol=0.04)  # at this ratio it would be too tall


LABELS = np.array([0, 1, 2, 3, 4, -1])


def test_mixup_is_the_mean_of_two_by_their_shares():
    pixels = pictures()
    out, labels = Augment(mixup=0.5)(pixels, LABELS, random())
    assert np.all((labels.share >= 0) & (labels.share <= 1)) and len(set(labels.share)) == B
    for i in range(5):
        j = int(np.flatnonzero(LABELS == labels.second[i])[0])
        assert j != i
        mixed = labels.share[i] * pixels[i].astype(float) + (1 - labels.share[i]) * pixels[j]
        assert np.abs(out[i] - mixed).max() <= 0.51
    assert labels.first.tolist() == LABELS.tolist() and labels.second[-1] == -1


def test_cutmix_counts_the_pixels_that_it_takes():
    pixels = np.broadcast_to(np.arange(B, dtype=np.uint8)[:, None, None, None], (B, 32, 32, 3)).copy()
    out, labels = Augment(cutmix=1.0)(pixels, LABELS, random(2))
    for i in range(5):
        kept = float((out[i] == i).mean())
        assert labels.share[i] == pytest.approx(kept)
        assert set(np.unique(out[i])) <= {i, labels.second[i]}
        rows, columns = (np.flatnonzero((out[i, ..., 0] != i).any(axis=axis)) for axis in (1, 0))
        assert (out[i, rows[:, None], columns] != i).all() if rows.size else True  # one box


def test_both_are_drawn_and_an_image_alone_is_left():
    changed = Augment(mixup=1.0, cutmix=1.0)
    pixels = np.stack([np.zeros((8, 8, 1), np.uint8), np.full((8, 8, 1), 200, np.uint8)])
    kinds = {bool(set(np.unique(changed(pixels, np.array([0, 1]), random(i))[0])) - {0, 200}) for i in range(20)}
    assert kinds == {True, False}
    out, labels = changed(pixels, np.array([4, -1]), random())
    np.testing.assert_array_equal(out, pixels)
    assert labels.share.tolist() == [1, 1] and labels.second.tolist() == [4, -1]


@pytest.mark.parametrize('policy', ['trivial', 'rand'])
def test_policies_are_the_same_again_and_change_nothing_given(policy):
    pixels, labels = pictures(64, 32, 32), np.zeros(64, int)
    before = pixels.copy()
    change = Augment(crop=2, flip=True, policy=policy, erase=0.5, mixup=0.3, cutmix=1.0)
    first, again, other = (change(pixels, labels, random(seed)) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first[0], again[0])
    assert not np.array_equal(first[0], other[0]) and first[0].dtype == np.uint8
    np.testing.assert_array_equal(pixels, before)


def test_a_policy_of_no_name_is_refused():
    with pytest.raises(ValueError, match="policy is 'auto'; expected 'none', 'trivial' or 'rand'"):
        Augment(policy='auto')(pictures(), LABELS, random())


def test_nothing_asked_for_is_nothing_done():
    pixels = pictures()
    out, labels = Augment()(pixels, LABELS, random())
    np.testing.assert_array_equal(out, pixels)
    assert labels.share.tolist() == [1.0] * B

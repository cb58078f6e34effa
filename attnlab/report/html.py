"""Self-contained HTML pages from the templates of this package: all text is escaped, pictures are data URIs."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from attnlab import files
from attnlab.tasks import heatmap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader('attnlab.report'), autoescape=True, undefined=jinja2.StrictUndefined,
    trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
)  # fmt: skip


class Picture(NamedTuple):
    """A PNG for a template.

    base64: the encoded file.  width, height: half the picture's pixels, so that it is sharp on high-density screens.
    alt: alternative text.  caption: text above the picture, may be empty.
    """

    base64: str
    width: int
    height: int
    alt: str
    caption: str


def encode_picture(image: bytes | Figure, alt: str, caption: str = '') -> Picture:
    """Return a PNG or a matplotlib figure encoded for a template."""
    data = image if isinstance(image, bytes) else heatmap.render_png(image)
    width, height = struct.unpack('>II', data[16:24])  # the first chunk of a PNG is its header
    return Picture(base64.b64encode(data).decode(), width // 2, height // 2, alt, caption)


def write_html(path: str | Path, template: str, **values: object) -> None:
    """Render a template of this package with `values` and write the page."""
    files.write_file(path, _TEMPLATES.get_template(template).render(values))


def config_lines(config: Mapping[str, Any], prefix: str = '') -> list[str]:
    """Return one line `section.key = value` for each field of a nested config; `prefix` is that of the keys."""
    return [line for key, value in config.items()
            for line in (config_lines(value, f'{prefix}{key}.') if isinstance(value, Mapping)
                         else [f'{prefix}{key} = {json.dumps(value, ensure_ascii=False)}'])]  # fmt: skip

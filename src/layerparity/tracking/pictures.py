"""Pictures in the layout that the MLflow UI reads as a series with a slider over steps."""

from __future__ import annotations

import io
import time
import uuid
from pathlib import Path

from layerparity.files import whole_file
from layerparity.tracking.names import clean

PREVIEW_PIXELS = 256


def write_picture(folder: Path, png: bytes, key: str, step: int) -> None:
    """Write a PNG and the small WebP preview that MLflow's image grid loads, under ``images/``."""
    from PIL import Image

    # The UI reads key, step and time from the name; "~" stands for "/" and "+" parts the fields.
    series = clean(key).replace("/", "~").replace(":", "_")
    stem = f"{series}+step+{step}+timestamp+{int(time.time() * 1000)}+{uuid.uuid4()}"
    with whole_file(folder / "images" / f"{stem}.png") as part:
        part.write_bytes(png)
    preview = Image.open(io.BytesIO(png)).convert("RGBA")
    preview.thumbnail((PREVIEW_PIXELS, PREVIEW_PIXELS))
    with whole_file(folder / "images" / f"{stem}+compressed.webp") as part:
        preview.save(part, format="WEBP")

"""Pictures of report pages as a reader sees them: headless Chromium at two widths, light and dark.

    python -m benchmarks.screenshots demo=layerbudget-demo finetune=adapters bits=bits ranks=ranks --out DIR

Every folder becomes a page (``layerbudget report``), the page is drawn in a frame of 1200 and of 420 pixels (a window cannot be
narrower than 500), as tall as it is up to ``--tall``, and kept as a PNG of 128 colours.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

WIDTHS = (1200, 420)
LEAST = 500  # pixels of the narrowest window
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
MEASURE = "<script>addEventListener('load',()=>{document.title='tall='+document.documentElement.scrollHeight})</script>"


def browse(browser: str, page: Path, width: int, height: int, *options: str) -> str:
    """Open a page; what the browser prints."""
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"]
    window = f"--window-size={max(width, LEAST)},{height}"
    done = subprocess.run([*command, window, *options, page.as_uri()], capture_output=True, text=True, timeout=300)
    return done.stdout


def framed(page: Path, width: int, height: int, folder: Path) -> Path:
    """A page that shows another one in a frame of that width."""
    frame = folder / "frame.html"
    style = f"border:0;width:{width}px;height:{height}px"
    frame.write_text(f'<body style="margin:0"><iframe src="{page.name}" style="{style}"></iframe>')
    return frame


def tall(browser: str, page: Path, width: int, folder: Path) -> int:
    """Pixels of the page's height in a frame of that width."""
    probe = folder / "probe.html"
    probe.write_text(page.read_text() + MEASURE)
    frame = framed(probe, width, 900, folder)
    read = "<script>onload=()=>setTimeout(()=>{document.title=document.querySelector('iframe').contentDocument.title},500)</script>"
    frame.write_text(frame.read_text() + read)
    found = re.search(r"<title>tall=(\d+)", browse(browser, frame, width, 900, "--dump-dom", "--allow-file-access-from-files"))
    return int(found[1]) if found else 2000


def shoot(browser: str, page: Path, width: int, height: int, picture: Path, *, dark: bool, colours: int) -> None:
    """Draw one page at one width and keep it small."""
    from PIL import Image

    own = page.read_text()
    if dark:  # what the system asks for cannot be said on the command line
        own = own.replace("prefers-color-scheme:dark", "min-width:1px")
    shown = page.with_name("shown.html")
    shown.write_text(own)
    frame = framed(shown, width, height, page.parent)
    browse(browser, frame, width, height, f"--screenshot={picture}")
    with Image.open(picture) as image:
        small = image.convert("RGB").crop((0, 0, width, min(height, image.height)))
        small.quantize(colours, kmeans=1, dither=Image.Dither.NONE).save(picture, optimize=True)


def main() -> None:
    """Draw every folder."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folders", nargs="+", metavar="NAME=FOLDER")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--tall", type=int, default=2600, help="most pixels of a picture's height (default %(default)s)")
    p.add_argument("--colours", type=int, default=128)
    a = p.parse_args()
    from layerbudget.reporting.page import write_report

    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        p.error("no headless browser is installed (Debian: chromium)")
    a.out.mkdir(parents=True, exist_ok=True)
    for item in a.folders:
        name, _, folder = item.partition("=")
        with tempfile.TemporaryDirectory() as place:
            page = write_report(Path(folder), Path(place) / f"{name}.html")
            for width in WIDTHS:
                height = min(tall(browser, page, width, Path(place)), a.tall)
                for dark in (False, True):
                    picture = a.out / f"{name}-{width}{'-dark' if dark else ''}.png"
                    shoot(browser, page, width, height, picture.resolve(), dark=dark, colours=a.colours)
                    print(f"{picture}: {width} x {height}, {picture.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()

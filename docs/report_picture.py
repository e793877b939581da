"""Takes docs/img/report.png: the schedule and the idle time of a run's report, as Chromium shows them.

penstock run aipo --updates 100 --batch 16 --out RUN
python docs/report_picture.py RUN
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).resolve().parent / "img" / "report.png"
WIDTH = 1100


def main() -> None:
    report = Path(sys.argv[1], "report.html").resolve()
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 3000}, color_scheme="light")
        page.goto(report.as_uri())
        first, last = (page.locator(part).bounding_box() for part in ("#schedule", "#idle"))
        assert first is not None, f"{report} has no schedule"
        assert last is not None
        top, end = first["y"] - 2, last["y"] + last["height"] + 12
        page.screenshot(path=PICTURE, clip={"x": 0, "y": top, "width": WIDTH, "height": end - top})
        browser.close()


if __name__ == "__main__":
    main()

"""The picture of the page that `outpace serve` shows: two answers, drawn by a headless Chromium.

    python benchmarks/page_picture.py docs/page.png

Needs playwright and a Chromium (Debian: apt install chromium).
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import ViewportSize, sync_playwright

from outpace.checkpoint.save import write_atomically

QUESTIONS = (
    "Add 4821 and 7364.",
    """Add the line print(month) before the return:
def count_owner(number):
    month = number + number
    if month > 46:
        month = month + 36
    room = number * number
    return month""",
)
SIZE: ViewportSize = {"width": 900, "height": 800}
READY = re.compile(r"http://[\d.]+:\d+")


def main(place: Path) -> None:
    if (chromium := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        raise SystemExit("no Chromium here (Debian: apt install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as output:
            command = [sys.executable, "-m", "outpace", "serve", "default", "--port", "0"]
            server = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            while not (address := READY.search(log.read_text())):
                if server.poll() is not None:
                    raise SystemExit(f"the server does not start: {log.read_text()}")
                time.sleep(0.1)
            with sync_playwright() as play:
                browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
                page = browser.new_page(viewport=SIZE, device_scale_factor=1.5)
                page.goto(address[0])
                page.wait_for_function("document.getElementById('model').textContent === 'default'")
                for question in QUESTIONS:
                    page.fill("#text", question)
                    page.press("#text", "Enter")
                    page.wait_for_function("document.getElementById('chat').ariaBusy === 'false'")
                write_atomically(place, page.screenshot())
                browser.close()
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("name the picture: python benchmarks/page_picture.py docs/page.png")
    main(Path(sys.argv[1]))

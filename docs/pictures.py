"""Makes the pictures of gpuflow's pages: `python docs/pictures.py`, after `make demo`. Needs chromium.

Runs `gpuflow show`, `serve` and `parity` on configs/demo.yaml, and takes a picture of each page, into docs/pictures.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[1]
CONFIG, PICTURES = "configs/demo.yaml", ROOT / "docs/pictures"
PORT, START_SECONDS, PICTURE_SECONDS = 8899, 120.0, 120.0
GPUFLOW = [sys.executable, "-m", "gpuflow"]


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    subprocess.run([*GPUFLOW, "show", CONFIG, "-n", "4", "--out", "runs/show.html"], cwd=ROOT, check=True)
    take_picture((ROOT / "runs/show.html").as_uri(), "show", 1000, 400)
    subprocess.run([*GPUFLOW, "parity", CONFIG], cwd=ROOT, check=True)
    take_picture((ROOT / "runs/parity/report.html").as_uri(), "parity", 1000, 640)
    take_picture_of_service()


def take_picture(address: str, name: str, width: int, height: int) -> None:
    """Write docs/pictures/NAME.png, a picture of the upper part of a page."""
    size = f"--window-size={width},{height}"
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=8000", size]
    path = PICTURES / f"{name}.png"
    command = ["chromium", *options, f"--screenshot={path}", address]
    subprocess.run(command, check=True, timeout=PICTURE_SECONDS, capture_output=True)
    print("wrote", path.relative_to(ROOT))


def take_picture_of_service() -> None:
    """Start the service, and take a picture of its page with the answer for one photograph."""
    service = f"http://127.0.0.1:{PORT}"
    server = subprocess.Popen([*GPUFLOW, "serve", CONFIG, "--port", str(PORT)], cwd=ROOT)
    try:
        wait_for(f"{service}/readyz")
        with ThreadingHTTPServer(("127.0.0.1", 0), page_with_photograph(service)) as page:
            threading.Thread(target=page.serve_forever, daemon=True).start()
            take_picture(f"http://127.0.0.1:{page.server_port}", "service", 1000, 640)
            page.shutdown()
    finally:
        server.terminate()
        server.wait(30)


def page_with_photograph(service: str) -> type[BaseHTTPRequestHandler]:
    """Return a handler that passes requests on to the service; its page drops a photograph on itself."""
    photograph = base64.b64encode(next((ROOT / "data/photos").glob("*/*.jpg")).read_bytes()).decode()
    script = f"""<script>
        const bytes = Uint8Array.from(atob("{photograph}"), (letter) => letter.charCodeAt(0));
        predict(new File([bytes], "photo.jpg", {{type: "image/jpeg"}}));
    </script></body>"""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.pass_on(None)

        def do_POST(self) -> None:
            self.pass_on(self.rfile.read(int(self.headers["Content-Length"])))

        def pass_on(self, body: bytes | None) -> None:
            headers = {name: value for name, value in self.headers.items() if name in ("Content-Type", "Accept")}
            request = Request(service + self.path, body, headers)
            with urlopen(request, timeout=30) as answer:
                content = answer.read()
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers["Content-Type"])
            if self.path == "/":
                content = content.replace(b"</body>", script.encode())
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    return Page


def wait_for(address: str) -> None:
    """Wait until a request succeeds. Raises TimeoutError."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            with urlopen(address, timeout=5):
                return
        except (URLError, ConnectionError):
            time.sleep(0.5)
    raise TimeoutError(f"{address} did not answer within {START_SECONDS:g} s")


if __name__ == "__main__":
    main()

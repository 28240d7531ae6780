"""JupyterLab in a real browser, as an instructor uses it: open each notebook, Run All, look at the result.

It takes minutes and needs Chromium and its driver, so `make browser` runs it, and `make test` does not. Screenshots
are kept in `artifacts/screenshots/`.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import nbformat
import pytest
from conftest import ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
webdriver = pytest.importorskip("selenium.webdriver", reason="requirements-dev.txt is not installed")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None or shutil.which("chromedriver") is None,
        reason="needs chromium and chromedriver (Debian: apt install chromium chromium-driver)",
    ),
]
NOTEBOOKS = sorted([*ROOT.glob("step*/*.ipynb"), *ROOT.glob("notebooks/*.ipynb")])
SCREENSHOTS = ROOT / "artifacts" / "screenshots"

# What JupyterLab knows of the open notebook: are all cells done, and what did they give?
NOTEBOOK = """
const widget = [...window.jupyterapp.shell.widgets("main")].find(widget => widget.sessionContext && widget.context);
"""
RUN_ALL = f"""{NOTEBOOK}
window.jupyterapp.shell.activateById(widget.id);
window.jupyterapp.commands.execute("notebook:run-all-cells");
"""
STATE = (
    NOTEBOOK
    + """
const kernel = widget?.sessionContext.session?.kernel;
if (!kernel || !widget.context.isReady) return null;
const cells = widget.content.widgets.map(cell => cell.model).filter(model => model.type === "code");
return JSON.stringify({
    status: kernel.status,
    counts: cells.map(model => model.executionCount),
    cells: cells.map(model => ({tags: model.getMetadata("tags") || [], outputs: model.outputs.toJSON()})),
});
"""
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Start JupyterLab at the course on a free port; nothing is saved, since the notebooks are opened in copies."""
    home = tmp_path_factory.mktemp("home")
    course = tmp_path_factory.mktemp("lab")
    for path in NOTEBOOKS:
        (course / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, course / path.parent.name)
    (home / "labconfig").mkdir()
    no_news = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    (home / "labconfig" / "page_config.json").write_text(json.dumps(no_news))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--ServerApp.token=", "--ServerApp.allow_root=True", "--LabApp.expose_app_in_browser=True"]
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        f"--port={port}",
        f"--notebook-dir={course}",
        *options,
    ]
    environment = os.environ | {"HOME": str(home), "JUPYTER_CONFIG_DIR": str(home)}
    with (home / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/api", timeout=5)
                break
            assert server.poll() is None, (home / "log").read_text()
            time.sleep(0.25)
        yield address
    finally:
        server.terminate()
        server.wait(30)


def open_browser(profile):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = ["headless=new", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking"]
    flags += ["disable-component-update", "disable-sync", "disable-dev-shm-usage", "window-size=1400,2400"]
    for flag in [*flags, f"user-data-dir={profile}"]:
        options.add_argument(f"--{flag}")
    return webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = open_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


def wait_for(browser, script, done, seconds):
    """Ask the page until `done` is content with the answer, and return it."""
    end, answer = time.monotonic() + seconds, None
    while time.monotonic() < end:
        with contextlib.suppress(Exception):  # the page is not there yet, or no notebook is in front
            answer = browser.execute_script(script)
            if done(answer):
                return answer
        time.sleep(0.5)
    raise AssertionError(f"after {seconds} s the page still says {str(answer)[:500]}")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_run_all_in_jupyterlab(lab, browser, path):
    browser.get(f"{lab}/lab/tree/{path.parent.name}/{path.name}?reset")
    wait_for(browser, STATE, lambda state: state and json.loads(state)["status"] == "idle", 90)
    for _ in range(5):  # the command does nothing if it comes before the notebook is in front
        browser.execute_script(RUN_ALL)
        with contextlib.suppress(AssertionError):
            wait_for(browser, STATE, lambda state: any(json.loads(state)["counts"]), 15)
            break

    def finished(answer):
        state = json.loads(answer)
        return state["status"] == "idle" and state["counts"] == list(range(1, len(state["counts"]) + 1))

    state = json.loads(wait_for(browser, STATE, finished, 400))
    for cell in state["cells"]:
        for output in cell["outputs"]:
            assert output["output_type"] != "error" or "raises-exception" in cell["tags"], output
            assert output.get("name") != "stderr", output
    committed = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert figures(state["cells"]) == figures(committed)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(SCREENSHOTS / f"{path.stem}.png"))
    browser.execute_script("return window.jupyterapp.serviceManager.kernels.shutdownAll()")  # they hold memory


def figures(cells) -> int:
    return sum("image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"])


def test_the_page_for_reading_has_navigation_figures_and_no_dead_links(browser):
    book = ROOT / "artifacts" / "book" / "_build" / "html"
    if not book.exists():
        pytest.skip("`make book` builds it")
    browser.get((book / "index.html").as_uri())  # it leads to the README
    wait_for(browser, "return location.pathname", lambda place: place.endswith("README.html"), 30)
    pages, seen = ["README.html"], set()
    while pages:
        page = pages.pop()
        seen.add(page)
        browser.get((book / page).as_uri())
        links = browser.execute_script(
            "return [...document.querySelectorAll('a[href], img[src]')]"
            ".map(element => [element.tagName, element.href || element.src, element.naturalWidth])"
        )
        for kind, target, width in links:
            if not target.startswith("file:"):
                continue
            file = target.removeprefix(book.as_uri() + "/").split("#")[0].split("?")[0]
            assert (book / file).is_file(), f"{page} leads to {target}, which is not there"
            assert kind != "IMG" or width > 0, f"{page}: {target} cannot be shown"
            if file.endswith(".html") and file not in seen and file not in pages:
                pages.append(file)
    wanted = {f"{path.parent.name}/{path.stem}.html" for path in NOTEBOOKS}
    assert wanted <= seen, "a notebook cannot be reached from the front page"
    browser.get((book / "README.html").as_uri())
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(SCREENSHOTS / "book.png"))

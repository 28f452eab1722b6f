"""The page in a real browser: headless Chromium, driven through chromedriver, without any network."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from gradveil.report import write_report
from tests.report.runs import failed_trial, played, trained, write_run
from tests.report.trainings import trained as real_training

pytestmark = pytest.mark.processes

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
Browser = webdriver.Chrome


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report with every kind of content."""
    run = write_run(tmp_path_factory.mktemp("runs") / "run", [*played(seeds=(0, 1)), failed_trial("boom")])
    return write_report(run).as_uri()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of an audit that follows a training."""
    return write_report(write_run(tmp_path_factory.mktemp("fronts") / "run", trained(played(seeds=(0, 1))))).as_uri()


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a training, one of whose defences diverges."""
    folder = tmp_path_factory.mktemp("training") / "run"
    kinds = ["none", "topk(0.1)", "gaussian(1e38)"]
    return write_report(real_training(folder, "central=true", defences=kinds, seeds=[0, 1], rounds=3)).as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all tests; each opens the page anew."""
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    missing = [name for name, path in programs.items() if path is None]
    if missing:
        pytest.fail(
            f"{' and '.join(missing)} not found: `apt-get install chromium chromium-driver`, or run `make browser`"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = str(programs["chromium"])
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(programs["chromedriver"])))
    yield driver
    driver.quit()


def visit(browser: Browser, address: str, width: int = 1280, scheme: str = "light") -> None:
    """Open the page at a width and in a colour scheme, with nothing remembered from before."""
    browser.get("about:blank")
    browser.get_log("browser")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    media = [{"name": name, "value": value} for name, value in features.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    browser.get(address)
    browser.execute_script("localStorage.clear()")
    browser.refresh()
    WebDriverWait(browser, 20).until(lambda b: b.execute_script("return document.readyState === 'complete'"))


def all_of(browser: Browser, selector: str) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, selector)


def one(browser: Browser, selector: str) -> WebElement:
    return browser.find_element(By.CSS_SELECTOR, selector)


def column(browser: Browser, key: str) -> list[str]:
    """The shown values of a column, top to bottom."""
    script = """
        const heads = [...document.querySelectorAll('#trials thead th')];
        const at = heads.findIndex((head) => head.dataset.key === arguments[0]);
        return [...document.querySelectorAll('#trials tbody tr')].map((row) => row.cells[at].dataset.sort);
    """
    return browser.execute_script(script, key)


def background(browser: Browser) -> list[int]:
    value = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    return [int(part) for part in value[value.index("(") + 1 : -1].split(",")[:3]]


def open_all(browser: Browser) -> None:
    browser.execute_script("document.querySelectorAll('details').forEach((node) => { node.open = true; })")


def show(browser: Browser, selector: str) -> None:
    browser.execute_script("arguments[0].scrollIntoView({behavior: 'instant'})", one(browser, selector))


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (375, "dark")])
def test_opens_without_console_messages_or_requests(browser: Browser, address: str, width: int, scheme: str) -> None:
    visit(browser, address, width, scheme)
    for selector in ("#front", "#pictures", "#details", "#table", "#method", "#legend"):
        show(browser, selector)
    assert browser.get_log("browser") == []
    names = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [name for name in names if not name.startswith("data:")] == []
    assert len(all_of(browser, "details.verdict")) == 7 + 1, "and one of the iterations"


@pytest.mark.parametrize("key", ["ssim", "bytes_sent", "defence"])
def test_table_sorts_both_ways_by_keyboard(browser: Browser, address: str, key: str) -> None:
    visit(browser, address)
    before = column(browser, "trial")
    head = one(browser, f"#trials th[data-key='{key}']")
    first, second = ("ascending", "descending") if key == "defence" else ("descending", "ascending")
    for order in (first, second):
        head.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
        assert head.get_attribute("aria-sort") == order
        assert len(all_of(browser, "#trials th[aria-sort]")) == 1
        shown = column(browser, key)
        values = shown if key == "defence" else [float(value) for value in shown]
        assert values == sorted(values, reverse=order == "descending")
        assert len(set(values)) > 1
    assert sorted(column(browser, "trial")) == sorted(before)
    assert column(browser, "trial") != before


def test_sorting_moves_whole_rows(browser: Browser, address: str) -> None:
    visit(browser, address)
    before = set(zip(column(browser, "trial"), column(browser, "ssim"), column(browser, "distance"), strict=True))
    one(browser, "#trials th[data-key='distance'] button").click()
    after = zip(column(browser, "trial"), column(browser, "ssim"), column(browser, "distance"), strict=True)
    assert set(after) == before
    assert len(before) == 48


def test_pictures_are_large_enough_and_first_on_the_page(browser: Browser, address: str) -> None:
    visit(browser, address)
    sizes = """
        return [...document.querySelectorAll(arguments[0])].map((i) => [i.naturalWidth, i.offsetWidth]);
    """
    first = browser.execute_script(sizes, ".exhibits img")
    assert len(first) == 4 * 6
    assert all(natural == 32 and shown >= 112 for natural, shown in first)
    # Headline, pictures and recommendation, even a long one, are on the first screen.
    bottom = "return document.querySelector('.recommendation').getBoundingClientRect().bottom"
    assert browser.execute_script(bottom) <= 800
    bands = browser.execute_script(sizes, ".band img")
    assert len(bands) == 16 * 8
    assert all(natural == 32 and shown == 128 for natural, shown in bands)


def test_plot_has_points_tooltips_a_legend_and_a_choice_of_costs(browser: Browser, address: str) -> None:
    visit(browser, address)
    show(browser, "#front")
    dots = ".plot[data-front] .point"
    assert len(all_of(browser, dots)) == 7
    tip = one(browser, "#tip")
    assert not tip.is_displayed()
    browser.execute_script("arguments[0].focus()", all_of(browser, dots)[0])
    assert tip.is_displayed()
    assert "100% identifiable, the mean of 2 seeds" in tip.text
    before = [dot.get_attribute("transform") for dot in all_of(browser, dots)]
    sentence = one(browser, "#front .advice").text
    one(browser, "[data-cost='distortion']").click()
    assert [dot.get_attribute("transform") for dot in all_of(browser, dots)] != before
    assert one(browser, "#front .advice").text != sentence
    one(browser, "#front-legend button:last-child").click()
    assert len(all_of(browser, dots)) == 6


def test_points_lie_between_the_axes(browser: Browser, address: str) -> None:
    outside = """
        return [...document.querySelectorAll('.plot')].flatMap((plot) => {
            const grid = plot.querySelector('.grid').getBoundingClientRect();
            const boxes = [...plot.querySelectorAll('.point')].map((point) => point.getBoundingClientRect());
            return boxes.filter((box) => box.left < grid.left - 2 || box.right > grid.right + 2);
        }).length;
    """
    for width in (1280, 375):
        visit(browser, address, width)
        open_all(browser)
        for key in ("bytes", "distortion"):
            browser.execute_script("arguments[0].click()", one(browser, f"[data-cost='{key}']"))
            assert browser.execute_script(outside) == 0


def test_curves_have_points_tooltips_and_share_their_legend(browser: Browser, address: str) -> None:
    visit(browser, address)
    open_all(browser)
    show(browser, "#budget")
    marks, lines = ".plot[data-chart] .point", ".plot[data-chart] .curve"
    assert (len(all_of(browser, lines)), len(all_of(browser, marks))) == (7, 7 * 8)
    assert len(all_of(browser, f"{marks}:not(.passing)")) == 7
    browser.execute_script("arguments[0].focus()", all_of(browser, marks)[0])
    assert "after 2 iterations of 300" in one(browser, "#tip").text
    before = [line.get_attribute("d") for line in all_of(browser, lines)]
    heights = [float(path.split()[1].partition("L")[0]) for path in before]
    finals = [float(path.rpartition(" ")[2]) for path in before]
    assert all(final < first for first, final in zip(heights, finals, strict=True))
    one(browser, "[data-quality='asr']").click()
    assert [line.get_attribute("d") for line in all_of(browser, lines)] != before
    one(browser, "#budget-legend button:last-child").click()
    assert one(browser, "#front-legend button:last-child").get_attribute("aria-pressed") == "false"
    assert len(all_of(browser, lines)) == 6
    assert len(all_of(browser, ".plot[data-front] .point")) == 6


def test_the_name_of_a_defence_opens_its_details(browser: Browser, address: str) -> None:
    visit(browser, address)
    links = all_of(browser, ".glance a")
    assert len(links) == 7
    for link in links:
        target = one(browser, "#" + str(link.get_attribute("href")).partition("#")[2])
        assert target.get_attribute("open") is None
        browser.execute_script("arguments[0].click()", link)
        WebDriverWait(browser, 5).until(lambda _, entry=target: entry.get_attribute("open") is not None)
        assert link.text in target.find_element(By.TAG_NAME, "summary").text


def test_paper_has_the_closed_details(browser: Browser, address: str) -> None:
    visit(browser, address)
    hidden = "return document.querySelectorAll('details.verdict:not([open])').length"
    assert browser.execute_script(hidden) == 8
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script(hidden) == 0
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script(hidden) == 8


@pytest.mark.parametrize("width", [375, 320])
def test_readable_at_phone_width(browser: Browser, address: str, width: int) -> None:
    visit(browser, address, width)
    open_all(browser)
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    outside = """
        return [...document.querySelectorAll('main *, header *, footer *')].filter((node) => {
            const box = node.getBoundingClientRect();
            return box.width && box.right > arguments[0] + 0.5 && !node.closest('.scroll, pre, .hidden, .skip');
        }).map((node) => node.outerHTML.slice(0, 80));
    """
    assert browser.execute_script(outside, width) == []
    wide = one(browser, "#table .scroll")
    assert browser.execute_script("return arguments[0].scrollWidth > arguments[0].clientWidth", wide)
    small = (
        "return [...document.querySelectorAll('p, td, dd, li')].map((n) => parseFloat(getComputedStyle(n).fontSize))"
    )
    assert min(browser.execute_script(small)) >= 11.5


def test_dark_mode_follows_the_system_and_the_button(browser: Browser, address: str) -> None:
    visit(browser, address)
    assert min(background(browser)) > 230
    visit(browser, address, scheme="dark")
    assert max(background(browser)) < 60
    colour = browser.execute_script("return getComputedStyle(document.body).color")
    assert int(colour[colour.index("(") + 1 :].split(",")[0]) > 200
    one(browser, "#theme").click()
    assert min(background(browser)) > 230
    browser.refresh()
    assert min(background(browser)) > 230


def test_paper_is_light_and_nothing_is_cut_off(browser: Browser, address: str) -> None:
    visit(browser, address, 760, scheme="dark")
    media = {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        assert background(browser) == [255, 255, 255]
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 760
        assert not one(browser, "#theme").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_works_without_scripts(browser: Browser, address: str) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(address)
        assert one(browser, ".exhibits img").is_displayed()
        assert "broken" in one(browser, "h1").text
        assert len(all_of(browser, "#trials tbody tr")) == 48
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_scripted_text_stays_text(browser: Browser, tmp_path: Path) -> None:
    entries = played(target_clients=2)[:4]
    for entry in entries:
        for key in ("defence", "defence_title", "attack", "attack_title", "model"):
            entry["info"][key] = "<img src=x onerror='window.hacked = 1'></script><script>window.hacked = 1</script>"
    visit(browser, write_report(write_run(tmp_path / "run", entries)).as_uri())
    show(browser, "#pictures")
    assert browser.execute_script("return window.hacked") is None
    assert "onerror" in one(browser, ".band .whose:nth-of-type(2)").text
    assert browser.get_log("browser") == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (375, "dark"), (320, "light")])
@pytest.mark.parametrize("page", ["front", "training"])
def test_pages_of_trainings_open_quietly_at_every_width(
    browser: Browser, page: str, width: int, scheme: str, request: pytest.FixtureRequest
) -> None:
    visit(browser, request.getfixturevalue(page), width, scheme)
    for section in all_of(browser, "main > section"):
        browser.execute_script("arguments[0].scrollIntoView({behavior: 'instant'})", section)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    outside = """
        return [...document.querySelectorAll('.plot svg text, .plot svg path, .costs td, .costs th')].filter((node) => {
            const box = node.getBoundingClientRect(), figure = node.closest('figure, .scroll').getBoundingClientRect();
            return box.width && (box.left < figure.left || (node.closest('figure') && box.right > figure.right + 0.5));
        }).map((node) => node.outerHTML.slice(0, 80));
    """
    assert browser.execute_script(outside) == []


OVERLAPS = """
    const names = [...document.querySelectorAll(arguments[0])].map((node) => node.getBoundingClientRect());
    return names.filter((a, i) => names.slice(i + 1).some((b) =>
        a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)).length;
"""


def test_fronts_are_drawn_named_and_follow_the_chosen_round(browser: Browser, front: str) -> None:
    visit(browser, front)
    show(browser, "#front")
    assert len(all_of(browser, ".plot[data-front]")) == 1
    lines = [line.get_attribute("d") for line in all_of(browser, ".plot .front")]
    assert all(str(line).count("V") >= 1 for line in lines)
    for key in ("bytes", "seconds", "accuracy"):
        browser.execute_script("arguments[0].click()", one(browser, f"[data-cost='{key}']"))
        assert len(all_of(browser, ".plot[data-front] .point")) == 7
        names = [text.text for text in all_of(browser, ".plot[data-front] .name")]
        assert "No defence" in names
        assert browser.execute_script(OVERLAPS, ".plot[data-front] .name") == 0
        members = one(browser, "#front .advice").text.partition("Dominated")[0]
        assert all(name.rstrip("…") in members for name in names if name != "No defence")
    before = [node.text for node in all_of(browser, "#front .advice")]
    one(browser, "[data-view='2']").click()
    assert [line.get_attribute("d") for line in all_of(browser, ".plot .front")] != lines
    assert [node.text for node in all_of(browser, "#front .advice")] != before
    browser.execute_script("arguments[0].focus()", one(browser, ".plot[data-front] .point"))
    assert "identifiable after 4 rounds, the mean of 2 seeds" in one(browser, "#tip").text
    one(browser, "#front-legend button:last-child").click()
    assert len(all_of(browser, ".plot[data-front] .point")) == 6


def test_curves_of_a_training_have_bands_marks_and_a_legend(browser: Browser, training: str) -> None:
    visit(browser, training)
    show(browser, "#curves")
    assert [len(all_of(browser, f".plot[data-across='{by}'] .curve")) for by in ("round", "sent")] == [4 + 4, 3]
    accuracy = ".plot[data-curve='accuracy'][data-across='round']"
    assert len(all_of(browser, f"{accuracy} .band")) == 4
    assert len(all_of(browser, f"{accuracy} .best")) == 3 * 2
    browser.execute_script("arguments[0].focus()", all_of(browser, f"{accuracy} .best")[0])
    assert "best round" in one(browser, "#tip").text
    lines = [line.get_attribute("d") for line in all_of(browser, f"{accuracy} .curve")]
    one(browser, "[data-span='late']").click()
    assert [line.get_attribute("d") for line in all_of(browser, f"{accuracy} .curve")] != lines
    one(browser, "#curves-legend button").click()
    assert len(all_of(browser, ".plot[data-curve='loss'] .curve")) == 2
    one(browser, "#trials th[data-key='bytes_up'] button").click()
    sent = [float(value) for value in column(browser, "bytes_up") if value]
    assert sent == sorted(sent, reverse=True)

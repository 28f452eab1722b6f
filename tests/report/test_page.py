"""The page as text: everything in it, nothing from outside, every foreign text escaped."""

import copy
import csv
import json
import re
import resource
import stat
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from gradveil.audit.findings import findings_of
from gradveil.audit.result_rows import summarise
from gradveil.audit.run_directory import load_run
from gradveil.core.errors import GradveilError
from gradveil.report import audit_page, write_report
from tests.report.parsed_page import EVIL, read
from tests.report.runs import CASES, failed_trial, played, write_run


def test_report_lies_in_the_run_directory_for_its_owner_only(run: Path) -> None:
    out = write_report(run)
    assert out == run / "report.html"
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    first = out.read_bytes()
    assert write_report(run).read_bytes() == first
    assert [path.name for path in run.iterdir() if "tmp" in path.name] == []


def test_report_is_written_to_out(run: Path, tmp_path: Path) -> None:
    assert write_report(run, tmp_path / "deep" / "page.html").read_text("utf-8").startswith("<!doctype html>")


def test_nothing_is_loaded_from_outside(run: Path) -> None:
    html = audit_page(load_run(run))
    addresses = read(html).addresses
    assert len(addresses) > 10
    assert [a for a in addresses if not a.startswith(("data:", "#"))] == []
    assert "http" + "s://" not in html
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket", html)
    assert "default-src 'none'" in html


def test_page_holds_every_required_text(run: Path, trials: list[dict[str, Any]]) -> None:
    text = read(audit_page(load_run(run))).text
    for expected in (
        "lenet-zhu on faces, one gradient of 1 image",
        "An honest-but-curious server",
        "Handed over besides: the true labels.",
        "4 of 4 identifiable 95% CI 44.3–100%",
        "Without a defence, an attacker recovers 4 of 4 images, 4 of them identifiable (100%, 95% CI 44.3–100%).",
        "An attacker who knows this defence recovers",
        "It watches one round.",
        "No attacker who knows this defence was run: add --attack adaptive.",
        "A low number here is not evidence of safety.",
        "Identifiable 95% CI Baseline Strongest attack Attack check",
        "Basis: lenet-zhu on faces, one gradient of 1 image, labels known to the attacker, 4 private images",
        "Not tested: a malicious server, batches",
        "mismatch control",
        "Scope: reconstruction of images, no other data",
        "targets: the true labels",
        "gradveil audit faces --seed 0",
        "torch 2.13.0",
        "0123456789abcdef",
        "NeurIPS 2019",
        "bounds the update's norm",
        f"{4 * len(trials)} target client runs",
        "EPYC, 2 cores, cpu",
        "2025-06-01 09:30 UTC",
    ):
        assert expected in text, expected


def test_the_attack_with_the_highest_rate_stands_first(run: Path) -> None:
    html = audit_page(load_run(run))
    for entry in html.split('<details class="verdict')[1:-1]:
        rates = [float(rate) for rate in re.findall(r"<td>([\d.]+)% \(", entry)]
        assert rates == sorted(rates, reverse=True)
        assert f"({rates[0]:g}%, 95% CI" in entry
    (body,) = re.findall(r'<table class="sortable".*?<tbody>(.*?)</tbody>', html, re.S)
    rates = [float(re.findall(r'data-sort="([^"]*)"', line)[4]) for line in body.split("<tr>")[1:]]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]


def test_union_is_shown_only_above_the_strongest_attack(tmp_path: Path, trials: list[dict[str, Any]]) -> None:
    def text_of(place: Path, winners: tuple[int, int]) -> str:
        pair = copy.deepcopy([trial for trial in trials if trial["info"]["defence"] == CASES[2].text][:2])
        for trial, winner in zip(pair, winners, strict=True):
            for record in trial["records"]:
                record["per_image"][0]["success"] = int(record["target_client"] == winner)
        return read(audit_page(load_run(write_run(place, pair)))).text

    assert "Upper bound, not an attacker: at least one of the 2 attackers recovers 2 of 4" in text_of(
        tmp_path / "a", (0, 1)
    )
    assert "Upper bound, not" not in text_of(tmp_path / "b", (1, 1))


def test_every_grant_is_named(tmp_path: Path, trials: list[dict[str, Any]]) -> None:
    granted = copy.deepcopy(trials[:1])
    names = [f"round{i}.step.noise.w" for i in range(1, 9)]
    granted[0]["info"]["secrets"] = names
    granted[0]["info"]["grants"] = ["targets: the true labels", *(f"{name}: its true value" for name in names)]
    html = audit_page(load_run(write_run(tmp_path / "run", granted)))
    (table,) = re.findall(r'aria-label="Side information">(.*?)</table>', html, re.S)
    text = read(table).text
    assert "targets: the true labels 8 true values" in text
    assert all(name in text for name in names)
    assert "was told the true values of 8 random tensors or statistics" in read(html).text


def test_page_with_a_budget_states_it_in_place_of_unlimited_time(
    tmp_path: Path, run: Path, trials: list[dict[str, Any]]
) -> None:
    limited = write_run(tmp_path / "limited", trials[:3], config={"budget": "2h"})
    text = read(audit_page(load_run(limited))).text
    assert text.count("All attacks on one defence that search or learn share 2 h 0 min of working time.") == 1
    assert "its computing time is not limited" not in text
    assert "its computing time is not limited" in read(audit_page(load_run(run))).text


def test_defences_have_a_line_each_that_leads_to_their_details(run: Path) -> None:
    html = audit_page(load_run(run))
    (body,) = re.findall(r'<table class="plain glance">.*?<tbody>(.*?)</tbody>', html, re.S)
    lines = [read(line).text for line in body.split("<tr")[1:]]
    assert len(lines) == html.count('<details class="verdict') - 1 == 6, "and one of the iterations"
    (precode,) = [line for line in lines if "precode(k=64)" in line]
    assert "Not tested" in precode or "Leaks" in precode
    assert "dlg, non-adaptive" in precode
    assert "70.9 kB 1.1 × none" in precode
    targets = re.findall(r'<a href="#(run-\d+)">', body)
    assert all(f'id="{target}"' in html for target in targets)


def test_legend_comes_last_and_defines_the_labels_that_occur(tmp_path: Path, trials: list[dict[str, Any]]) -> None:
    html = audit_page(load_run(write_run(tmp_path / "run", trials[:2])))
    sections = re.findall(r'<section id="(\w+)"', html)
    assert sections == ["defences", "front", "pictures", "details", "assurance", "table", "method", "legend"]
    legend = read(html[html.index('<section id="legend"') :]).text
    assert "Broken The update leaks" in legend
    assert "Not tested" not in legend
    assert "Adaptive" not in legend
    assert "Attack checks Effective" in legend


def test_extra_metrics_are_columns_of_table_and_csv(tmp_path: Path, trials: list[dict[str, Any]]) -> None:
    measured = copy.deepcopy(trials[:2])
    for entry in measured:
        entry["info"]["metrics"] = ["my.metrics:sharpness"]
        for record in entry["records"]:
            record["my.metrics:sharpness"] = 0.625
            for image in record["per_image"]:
                image["my.metrics:sharpness"] = 0.625
    html = audit_page(load_run(write_run(tmp_path / "run", measured)))
    assert 'data-key="my.metrics:sharpness"' in html
    assert html.count(">0.625<") == 2
    (address,) = [each for each in read(html).addresses if each.startswith("data:text/csv")]
    with urllib.request.urlopen(address) as answer:
        (head, *lines) = csv.reader(answer.read().decode().splitlines())
    assert {line[head.index("my.metrics:sharpness")] for line in lines} == {"0.625"}


def test_first_screen_ends_with_the_recommendation_and_what_the_verdict_rests_on(run: Path) -> None:
    loaded = load_run(run)
    advice = findings_of(loaded).recommendation
    assert advice is not None
    html = audit_page(loaded)
    first = read(html[: html.index("<main>")]).text
    assert f"{advice.text} Basis: lenet-zhu on faces" in first


def test_a_leak_that_is_not_the_headline_is_named_on_the_first_screen(tmp_path: Path) -> None:
    entries = played(target_clients=8, cases=CASES[:2])
    for entry in entries[2:]:
        for record in entry["records"]:
            record["per_image"][0] |= {"success": 0, "identified": True}
    html = audit_page(load_run(write_run(tmp_path / "run", entries)))
    first = read(html[: html.index("<main>")]).text
    assert "0 of 8 identifiable" in first
    assert "8 of 8 identified" in first


def test_every_foreign_text_is_escaped(tmp_path: Path, trials: list[dict[str, Any]]) -> None:
    bad = copy.deepcopy(trials[4:8])
    for entry in bad:
        for key, value in entry["info"].items():
            if isinstance(value, str) and key not in ("simulated_client", "attacker", "method"):
                entry["info"][key] = value + EVIL
        entry["info"]["knowledge"] = {EVIL: EVIL}
        entry["info"]["grants"] = [EVIL]
        entry["info"]["citations"] = [EVIL]
        for record in entry["records"]:
            record["status"] = EVIL
    broken = failed_trial(EVIL)
    changes = {
        "name": EVIL,
        "command": EVIL,
        "machine": {"cpu": EVIL},
        "packages": {EVIL: EVIL},
        "config": {EVIL: EVIL},
    }
    html = audit_page(load_run(write_run(tmp_path / "run", [*bad, broken], gradveil=EVIL, **changes)))
    plain = audit_page(load_run(write_run(tmp_path / "plain", trials[4:8])))
    assert "<script>alert" not in html
    assert read(html).tags.count("script") == read(plain).tags.count("script")
    assert "alert(1)" in read(html).text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert data is not None
    assert any(EVIL in spot["name"] for spot in json.loads(data[1])["fronts"][0]["views"][0]["spots"])


def test_page_without_images_has_a_note(tmp_path: Path, trials: list[dict[str, Any]]) -> None:
    html = audit_page(load_run(write_run(tmp_path / "run", trials[:3], images=False)))
    assert "This run kept no images" in read(html).text
    assert "<img" not in html


def test_failed_and_unfinished_trials_are_named(tmp_path: Path, trials: list[dict[str, Any]]) -> None:
    run = write_run(tmp_path / "run", [*trials[:2], failed_trial("RuntimeError: out of memory")])
    info = json.loads((run / "run.json").read_text("utf-8"))
    (run / "run.json").write_text(json.dumps(info | {"trials": [*info["trials"], "later-1", "later-2"]}), "utf-8")
    text = read(audit_page(load_run(run))).text
    assert "1 of 3 trials failed and count nowhere" in text
    assert "later-1 not done yet" in text
    assert "RuntimeError: out of memory" in text
    assert "1 whole attack run failed" in text
    assert "2 of 5 trials are not done yet" in text


def test_a_run_in_which_everything_failed_still_gives_a_page(tmp_path: Path) -> None:
    text = read(audit_page(load_run(write_run(tmp_path / "run", [failed_trial("boom")])))).text
    assert "Not tested Dlg failed: boom." in text
    assert "1 of 1 trials failed" in text


def test_colour_images_and_batches(tmp_path: Path) -> None:
    entries = played(target_clients=2, cases=CASES[:2], batch=2)
    for entry in entries:
        entry["images"] = {name: value.expand(-1, -1, 3, -1, -1) for name, value in entry["images"].items()}
    text = read(audit_page(load_run(write_run(tmp_path / "run", entries)))).text
    assert "one gradient of 2 images" in text
    assert "recovers 4 of 4 images" in text


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, trials: list[dict[str, Any]]) -> None:
    run = write_run(tmp_path / "run", [trials[0]])
    (tmp_path / "file").touch()
    with pytest.raises(GradveilError, match="is a folder"):
        write_report(run, tmp_path)
    with pytest.raises(GradveilError, match="cannot be written"):
        write_report(run, tmp_path / "file" / "report.html")


def test_a_full_disk_leaves_the_last_report_and_nothing_else(tmp_path: Path, trials: list[dict[str, Any]]) -> None:
    """A limit on the size of files makes the write itself fail."""
    run = write_run(tmp_path / "run", [trials[0]])
    whole = write_report(run).read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(GradveilError, match=r"report\.html: cannot be written: .* -> choose another place"):
            write_report(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {path.name for path in run.iterdir()} == {"run.json", "trials", "report.html"}
    assert (run / "report.html").read_bytes() == whole


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match="is not a run directory"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_bound_is_shown_next_to_the_measured_error(tmp_path: Path, trials: list[dict[str, Any]]) -> None:
    bounded = copy.deepcopy(trials)
    for trial in bounded:
        noisy = trial["info"]["defence"].startswith("gaussian")
        trial["info"]["bound"] = {"mse": 0.0123, "prior": 0.07, "by": "Cramér-Rao"} if noisy else None
        trial["info"]["unbounded"] = None if noisy else "no noise is added <at all>"
    html = audit_page(load_run(write_run(tmp_path / "run", bounded)))
    seen = 0
    for entry in re.findall(r'<details class="verdict.*?</details>', html, re.S)[:-1]:
        noisy = "<b>gaussian(std=0.01)</b>" in entry
        for line in re.findall(r"<tr><td>.*?</tr>", entry, re.S):
            values = re.findall(r"<td[^>]*>(.*?)</td>", line, re.S)
            assert 0 <= float(values[8]) < 1
            assert values[9] == ("0.0123" if noisy else '<span title="no noise is added &lt;at all&gt;">–</span>')
            seen += 1
        assert ("<small>bound 0.0123</small>" in entry) == noisy
    assert 6 < seen <= len(bounded)
    (table,) = re.findall(r'<section id="table".*?</section>', html, re.S)
    keys = re.findall(r'data-key="([^"]*)"', table)
    assert keys.index("mse_bound") == keys.index("mse") + 1
    bound = [re.findall(r"<td[^>]*>(.*?)</td>", line)[keys.index("mse_bound")] for line in table.split("<tr>")[2:]]
    noisy = [trial["info"]["defence"].startswith("gaussian") for trial in bounded]
    assert sorted(each == "0.0123" for each in bound) == sorted(noisy)
    assert "No MSE bound: <b>No defence, clip(norm=1.0), prune(ratio=0.9)" in table
    assert "and precode(k=64)</b>, no noise is added &lt;at all&gt;." in table
    rows = [summarise(trial) for trial in load_run(tmp_path / "run").trials]
    assert {(row["mse_bound"], row["unbounded"]) for row in rows} == {
        (0.0123, None),
        (None, "no noise is added <at all>"),
    }

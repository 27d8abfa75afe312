"""The page in a real browser: what it computes, how it is operated, and whom it keeps out."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from gatespace.addons.pages.explore import build_explorer
from gatespace.config import TrainConfig, load_config
from gatespace.gating.coefficients import SATURATION, Gate
from gatespace.gating.configured import build_gate
from gatespace.gating.signals import teacher_entropy
from tests.addons.pages.conftest import GATE, own_copy, records

AXE = Path(__file__).resolve().parents[3] / "web/node_modules/axe-core/axe.min.js"


@pytest.fixture(scope="module")
def page_url(gated, tmp_path_factory):
    return build_explorer([gated]).write(tmp_path_factory.mktemp("page") / "run.html").as_uri()


@pytest.fixture(scope="module")
def both_url(runs, tmp_path_factory):
    made = build_explorer([runs], gates=[Gate.named("G5"), Gate.named("H3")])
    return made.write(tmp_path_factory.mktemp("page") / "both.html").as_uri()


@pytest.fixture(scope="module")
def recorded(gated):
    """Name → one number per token, over the whole run."""
    lines = records(gated)
    return {name: [v for line in lines for v in line["values"][name]] for name in lines[0]["values"]}


def python_lam(gate: Gate, recorded) -> list[float]:
    names = ("h", "u", "gap", *gate.extra)
    return [gate.lam(**dict(zip(names, row, strict=True))) for row in zip(*(recorded[n] for n in names), strict=True)]


def current_gate(page, side="a") -> Gate:
    found = page.evaluate(f"explorer.state().{side}")
    return Gate(*(found[name] for name in "abcd"), extra=found["extra"])


def drag(page, name, share):
    """Take the slider's knob with the mouse and pull it, in several movements."""
    box = page.locator(".gate-a input[type=range]").nth("abcd".index(name)).bounding_box()
    y = box["y"] + box["height"] / 2
    value = page.evaluate(f"explorer.state().a.{name}")
    page.mouse.move(box["x"] + 8 + (box["width"] - 16) * (value + 9) / 18, y)
    page.mouse.down()
    for part in (0.3, 0.6, 1.0):
        page.mouse.move(box["x"] + box["width"] * (0.5 + (share - 0.5) * part), y)
    page.mouse.up()


def settle(page):
    """Two frames: in the first a change is told, in the second it is on the screen."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


# ---------------------------------------------------------------------- numbers


def test_lam_is_what_python_computes_while_dragging(visit, page_url, recorded):
    page = visit(page_url)
    assert str(current_gate(page)) == GATE
    seen = []
    for name, share in (("a", 0.9), ("b", 0.2), ("d", 0.1)):
        drag(page, name, share)
        settle(page)
        gate = current_gate(page)
        seen.append(gate)
        want = python_lam(gate, recorded)
        assert page.evaluate("explorer.lam('a')") == pytest.approx(want, abs=1e-9)
        shown = float(page.get_attribute("[data-name=a-mean]", "data-value"))
        assert shown == pytest.approx(math.fsum(want) / len(want), abs=1e-9)
    assert len(set(seen)) == 3
    assert seen[0].a > 5
    assert seen[2].d < -5


def test_summary_of_lam(visit, page_url, recorded):
    page = visit(page_url)
    gate = Gate.parse("40,-6,-15,5.5,student_entropy=-2")
    page.goto(f"{page_url}#a={gate}")
    page.reload()
    lam = python_lam(gate, recorded)
    mean = math.fsum(lam) / len(lam)
    reverse = math.fsum(one * r for one, r in zip(lam, recorded["reverse_kl"], strict=True))
    forward = math.fsum((1 - one) * f for one, f in zip(lam, recorded["forward_kl"], strict=True))
    want = {
        "mean": mean,
        "sd": math.sqrt(math.fsum((one - mean) ** 2 for one in lam) / len(lam)),
        "saturated": sum(min(one, 1 - one) <= SATURATION for one in lam) / len(lam),
        "rkl": reverse / (reverse + forward),
        "fkl": forward / (reverse + forward),
        "tokens": len(lam),
    }
    shown = {name: float(page.get_attribute(f"[data-name=a-{name}]", "data-value")) for name in want}
    assert shown == pytest.approx(want, abs=1e-9)
    assert 0 < want["saturated"] < 1


def test_another_k_changes_h_and_u(visit, page_url, gated):
    page = visit(page_url)
    page.get_by_label("K of h and u").select_option("3")
    settle(page)
    want = []
    for line in records(gated):
        top = torch.tensor([[p for _, p in choices] for choices in line["teacher_top"]], dtype=torch.float64)
        h = teacher_entropy(top.log(), top_k=3).tolist()
        gaps, extra = line["values"]["gap"], line["values"]["student_entropy"]
        gate, rows = Gate.parse(GATE), zip(h, gaps, extra, strict=True)
        want += [gate.lam(h=one, u=h[0], gap=gap, student_entropy=further) for one, gap, further in rows]
    assert page.evaluate("explorer.lam('a')") == pytest.approx(want, abs=1e-6)


def test_tints_follow_and_go_from_blue_to_orange(visit, page_url):
    page = visit(page_url)

    def tint():
        settle(page)
        text = page.locator("button.token").first.evaluate("(e) => getComputedStyle(e).backgroundColor")
        return [int(part) for part in text.removeprefix("rgb(").removesuffix(")").split(",")]

    presets = page.get_by_label("Preset of gate A")
    presets.select_option(label="static λ = 0 (forward KL)")
    red, _, blue = tint()
    assert blue > red + 60
    presets.select_option(label="static λ = 1 (reverse KL)")
    red, _, blue = tint()
    assert red > blue + 60
    assert page.evaluate("explorer.state().a.c") is not None
    assert set(page.evaluate("explorer.lam('a')")) == {1}


def test_each_token_has_the_tint_of_its_own_lam(visit, page_url, recorded):
    page = visit(f"{page_url}#a=30,0,-12,0")
    settle(page)
    tokens = page.locator("button.token")
    shown = tokens.evaluate_all(
        "(all) => all.map((e) => [Number(e.dataset.token), getComputedStyle(e).backgroundColor])"
    )
    assert len(shown) > 40
    lam = python_lam(Gate.parse("30,0,-12,0"), recorded)

    def warmth(colour: str) -> int:
        red, _, blue = (int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
        return red - blue

    ordered = [warmth(colour) for _, colour in sorted((lam[token], colour) for token, colour in shown)]
    assert ordered[-1] > ordered[0] + 60
    assert all(later >= sooner - 2 for sooner, later in itertools.pairwise(ordered))  # neighbours may round alike


def test_it_opens_on_the_token_of_the_first_response_where_the_models_differ_most(visit, page_url, recorded):
    page = visit(page_url)
    first = page.locator(".response").first.locator("button.token")
    shown = first.evaluate_all("(all) => all.map((e) => Number(e.dataset.token))")
    apart = [forward + reverse for forward, reverse in zip(recorded["forward_kl"], recorded["reverse_kl"], strict=True)]
    token = page.evaluate("explorer.state().token")
    assert token in shown
    assert apart[token] == pytest.approx(max(apart[one] for one in shown), abs=1e-6)
    assert page.locator("button.token[aria-current]").get_attribute("data-token") == str(token)
    assert "λ in training" in page.locator(".inspector").inner_text()


def test_the_inspector_shows_a_token(visit, page_url, gated):
    page = visit(page_url)
    line = records(gated)[0]
    page.locator("button.token").nth(1).hover()
    settle(page)
    panel = page.locator(".inspector")
    assert line["tokens"][1].strip() in panel.inner_text()
    assert "token 2 of" in panel.inner_text()
    lam = float(page.get_attribute("[data-name=token-a]", "data-value"))
    assert lam == pytest.approx(line["values"]["lam"][1], abs=1e-5)
    for text in (f"{line['values']['forward_kl'][1]:.3f}", f"{line['values']['reverse_kl'][1]:.3f}"):
        assert text in panel.inner_text()
    assert panel.locator(".choices tr").count() == 10


def test_filters_select_what_they_say(visit, both_url, runs):
    page = visit(both_url)
    page.get_by_label("run", exact=True).select_option("-1")
    page.get_by_label("from step", exact=True).select_option("3")
    settle(page)
    lines = records(runs / "gated") + records(runs / "todi")
    assert f"{sum(line['step'] >= 3 for line in lines)} responses" in page.locator("main").inner_text()
    gold = lines[0]["gold"]
    page.get_by_label("gold label").select_option(gold)
    settle(page)
    want = sum(line["step"] >= 3 and line["gold"] == gold for line in lines)
    assert page.locator("p.muted[role=status]").inner_text().startswith(f"{want} response")
    assert all(gold in text for text in page.locator(".facts b:first-of-type").all_inner_texts())


# ---------------------------------------------------------------------- using it


def test_a_link_restores_everything(visit, both_url):
    page = visit(both_url)
    drag(page, "a", 0.8)
    page.get_by_label("y axis", exact=True).select_option("c")
    page.get_by_label("signal", exact=True).select_option("gap")
    page.get_by_label("theme", exact=True).select_option("dark")
    page.get_by_label("run", exact=True).select_option(label="todi, seed 3")
    page.locator("button.token").nth(4).click()
    page.wait_for_url(lambda url: "token=" in url and "theme=dark" in url)
    there = page.evaluate("({state: explorer.state(), lam: explorer.lam('b'), hash: location.hash})")
    assert there["state"]["token"] >= 0
    other = visit(both_url + there["hash"])
    again = other.evaluate("({state: explorer.state(), lam: explorer.lam('b')})")
    assert again["state"] | {"hover": 0} == there["state"] | {"hover": 0}
    assert again["lam"] == there["lam"]
    assert other.locator("button.token[aria-current]").count() == 1
    assert other.evaluate("document.documentElement.dataset.theme") == "dark"


def test_the_keyboard_is_enough(visit, page_url):
    page = visit(page_url)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.type") == "range":
            break
    before = current_gate(page)
    page.keyboard.press("ArrowRight")
    settle(page)
    assert current_gate(page).a == pytest.approx(before.a + 0.05)
    page.keyboard.press("Tab")  # the number beside it
    page.keyboard.press("Control+A")
    page.keyboard.type("-2.5")
    settle(page)
    assert current_gate(page).a == -2.5
    page.keyboard.press("Control+A")
    page.keyboard.type("x")
    settle(page)
    assert current_gate(page).a == -2.5
    assert page.evaluate("document.activeElement.getAttribute('aria-invalid')") == "true"
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('token')"):
            break
    page.keyboard.press("Home")
    for _ in range(12):
        page.keyboard.press("ArrowUp")
    settle(page)
    first = page.evaluate("explorer.state().token")
    page.keyboard.press("ArrowRight")
    settle(page)
    assert page.evaluate("explorer.state().token") == first + 1
    page.keyboard.press("ArrowDown")
    settle(page)
    assert page.evaluate("explorer.state().token") > first + 1
    page.keyboard.press("Home")
    page.keyboard.press("ArrowUp")
    settle(page)
    assert page.evaluate("explorer.state().token") == first
    page.keyboard.press("Escape")
    settle(page)
    assert page.evaluate("explorer.state().token") == -1
    page.keyboard.press("Tab")
    assert not page.evaluate("document.activeElement.classList.contains('token')")  # tokens are one stop


def test_the_plane_chooses(visit, both_url, runs):
    page = visit(both_url)
    page.locator(".mark[aria-label*='G1']").first.click()
    settle(page)
    assert current_gate(page) == Gate.named("G1")
    page.locator(".here-list button", has_text="G1").click()
    mark = page.locator(f".mark[aria-label*='{GATE}']").first
    mark.focus()
    text = page.locator(".here-list").inner_text()
    correct = json.loads((runs / "gated/evaluation-val.json").read_text())["metrics"]["correct"]
    assert f"{5 * correct:.1f} %" in text
    assert "95 % interval over 20 texts" in text
    box = page.locator(".field-box").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 40)
    page.mouse.up()
    settle(page)
    moved = current_gate(page)
    assert moved.a < -3
    assert moved.d > 5
    assert (moved.b, moved.c) == (2, 0)


def test_the_config_can_be_pasted(visit, page_url, tmp_path):
    page = visit(page_url, permissions=["clipboard-read", "clipboard-write"])
    drag(page, "a", 0.7)
    page.locator(".gate-a").get_by_role("button", name="Copy as config").click()
    page.get_by_text("copied", exact=True).wait_for()
    text = page.evaluate("navigator.clipboard.readText()")
    (tmp_path / "pasted.yaml").write_text("pair: {teacher: tiny}\n" + text)
    assert build_gate(load_config(TrainConfig, tmp_path / "pasted.yaml").objective) == current_gate(page)


def test_a_gate_beside_it(visit, page_url, recorded):
    page = visit(page_url)
    page.get_by_role("button", name="compare with a gate B").click()
    settle(page)
    assert page.evaluate("explorer.lam('b')") == pytest.approx(python_lam(current_gate(page, "b"), recorded), abs=1e-9)
    assert page.locator("[data-side=b]").count() == page.locator("[data-side=a]").count()
    page.get_by_role("button", name="Remove gate B").click()
    settle(page)
    assert page.evaluate("explorer.state().b") is None
    assert page.locator("[data-side=b]").count() == 0


# ---------------------------------------------------------------------- for everyone


@pytest.mark.parametrize("scheme, rules", [("light", None), ("dark", ["color-contrast"])])
def test_axe_finds_nothing(visit, both_url, scheme, rules):
    if not AXE.is_file():
        pytest.skip("no axe-core here: npm ci in web/")
    page = visit(both_url, color_scheme=scheme)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    page.locator("button.token").nth(2).click()
    page.locator(".take summary").first.click()
    page.locator(".mark").first.focus()
    settle(page)
    page.evaluate(AXE.read_text())
    options = {"resultTypes": ["violations"]} | ({} if rules is None else {"runOnly": rules})
    found = page.evaluate("(options) => axe.run(document, options).then((r) => r.violations)", options)
    assert [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in found] == []


def test_on_a_phone(visit, both_url):
    page = visit(both_url, width=360, height=740, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator(".inspector").is_hidden()
    page.locator("button.token").first.tap()
    sheet = page.locator(".inspector")
    sheet.wait_for(state="visible")
    box = sheet.bounding_box()
    assert box["y"] + box["height"] == pytest.approx(740, abs=1)
    page.get_by_role("button", name="Close").tap()
    sheet.wait_for(state="hidden")


def test_texts_of_models_are_only_text(visit, gated, tmp_path):
    evil = "</script><img src=x onerror=\"alert('in')\"><b>&amp;"

    def change(lines):
        lines[0]["text"] = lines[0]["gold"] = lines[0]["label"] = evil
        lines[0]["tokens"][0] = evil
        lines[0]["teacher_top"][0][0][0] = evil

    page = visit(build_explorer([own_copy(gated, tmp_path / evil.replace("/", "_"), change)]).write().as_uri())
    page.locator("button.token").first.hover()
    settle(page)
    assert page.locator("img").count() == 0
    assert page.locator(".prompt").first.inner_text() == evil
    assert page.locator("button.token").first.inner_text() == evil
    assert evil in page.locator(".choices").inner_text()

"""bench/pages.py: every measured number on a page comes from the JSON, and none can be typed in by hand."""

import json
import re

import pytest
from matplotlib.figure import Figure

from bench import convergence_report, pages, speed_report, stability_report
from nanote import cli, models
from trainer_tools import ROOT

SPEED = [{"shape": "wide", "arm": "bf16", "ms": 30.0, "tokens_per_s": 1_234_567.0, "width": 8},
         {"shape": "wide", "arm": "fp8", "ms": 20.0, "tokens_per_s": 1_851_850.0, "width": 8},
         {"shape": "slim", "arm": "fp8", "ms": 5.0, "tokens_per_s": 10.0, "width": 4, "peak_gib": None}]
RUN = {"machine": "H200", "parts": {"one two": {"loss": 3.14159}}, "rows": SPEED}
CONTENTS = {"speed": SPEED, "run": RUN}


def run(arguments=""):
    return cli.run(lambda: pages.main(arguments.split()), "bench/pages.py")


def test_the_pages_show_what_was_measured(capsys):
    assert run("--check") == 0, capsys.readouterr().out


def test_the_words_beside_the_figures_are_true():
    """What guide/first_guide.md says in words of figures that stand beside them."""
    contents = {name: pages.wrap(content) for name, content in pages.read(ROOT / "results").items()}
    steps = contents["compile"]
    for recipe in {row["recipe"] for row in steps}:
        graph, eager = ({model: steps(mode, recipe, model).tokens_per_s for model in models.MODELS}
                        for mode in ("cuda-graph", "eager"))
        assert max(graph, key=graph.get) == "optimized" != max(eager, key=eager.get), recipe
    gqa = contents["gqa_rmsnorm"]
    small, wide = ([gqa(shape, block, "fp8").sequences for block in ("default", "GQA")]
                   for shape in ("124m-b32", "c4096"))
    assert small[1] <= small[0] and wide[1] > wide[0]


def test_links_to_headings_lead_to_headings():
    for path in (ROOT / "README.md", ROOT / "GUIDE.md", *(ROOT / "guide").glob("*.md")):
        for file, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", path.read_text()):
            text = ((path.parent / file) if file else path).read_text()
            headings = re.findall(r"^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", text), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{path.name}: {file}#{anchor}"


@pytest.mark.parametrize("written, expression, expected", [
    ("0.00", 'speed("wide", "bf16").ms / speed("wide", "fp8").ms', "1.50"), ("9", "speed(4).ms", "5"),
    ("+0.0", '100 * (speed("slim").ms / speed("wide", "fp8").ms - 1)', "-75.0"), ("-1", "speed(4).ms", "+5"),
    ("0", 'speed("wide", "fp8").tokens_per_s', "1,851,850"),
    ("+0.00", "-speed(4).ms / 1e4", "+0.00"),
    ("0,0", 'speed("bf16").tokens_per_s / 1e3', "1,235"),
    ("0.000", 'run.parts["one two"].loss', "3.142"), ("0", 'max(run.rows.all("ms", shape="wide"))', "30"),
    ("0", 'len(speed.all("peak_gib"))', "0"), ("0", 'sum(row["ms"] for row in speed)', "55")])
def test_a_figure_is_computed_and_keeps_its_format(written, expression, expected):
    mark = f"<!--= {expression} -->"
    assert pages.fill_figures(f"It is {written}{mark} times, was {written}.", CONTENTS) == (
        f"It is {expected}{mark} times, was {written}.")


@pytest.mark.parametrize("expression, complaint", [
    ('speed("wide").ms', "2 rows have 'wide'; name values that one row has"),
    ('speed("narrow").ms', "0 rows have"), ('speed("slim").watts', "no field 'watts'; there are shape, arm"),
    ("speeed(4)", "name 'speeed' is not defined"), ('open("x")', "name 'open' is not defined"),
    ("speed(4).ms +", "SyntaxError"), ("run.machine", "not a number: H200")])
def test_an_expression_that_yields_no_number_is_an_error_that_names_it(expression, complaint):
    with pytest.raises(ValueError) as error:
        pages.fill_figures(f"1.0<!--= {expression} -->", CONTENTS)
    assert expression in str(error.value) and complaint in str(error.value)


@pytest.mark.parametrize("text, found", [
    ("It is 1.33 times as fast.", ["1.33"]), ("24 % more", ["24"]), ("from 6 ms", ["6"]),
    ("takes +1.3 %", ["+1.3"]), ("505 k tokens/s", ["505"]), ("at 1,650 MHz", ["1,650"]),
    ("saves 4 GiB", ["4"]), ("by 24\n% of it", ["24"]), ("a loss of 3.28", ["3.28"]),
    ("| FP8 adds 20 % | 22 % |", ["22"]), ("It is 1.33<!--= speed(4).ms --> times, 1.45 at most", ["1.45"]),
    ("the 700 W of `nvidia-smi`", ["700"]), ("12.9 of 15", ["12.9"]), ("(0.6 to 0.9)", ["0.6", "0.9"]),
    ("1.33<!--= speed(4).ms --> times", []), ("within 5 %<!-- given --> of it", []),
    ("a history of 1,024 steps", []),
    ("PyTorch 2.11 and CUDA 13.0, TE 2.20.2; capability 8.9", []), ("124M, 8B, 32 x 1,024 tokens", []),
    ("`--lr 0.1` and ```\n24 %\n```", []), ("[here](page-1.5.md)", []),
    ("<!-- speed -->\n| 1.5 |\n<!-- speed -->", []),
    ("Blackwell 10.x", []), ("width 4,096, 2^15, 1e-3", [])])
def test_a_measured_number_without_a_source_is_found(text, found):
    assert [line.split(": ")[1] for line in pages.unmarked(text)] == found


def test_a_row_with_another_number_of_cells_is_told():
    table = "| a | b |\n| --- | --- |\n| `x | y` | 1 \\| 2<!-- given --> |\n"
    assert pages.ragged(f"text\n\n{table}\n| other |\n") == []
    assert pages.ragged(f"{table}| 1 | 2 | 3 |\n") == ["line 4: 3 cells, and 2 in the row above"]


def test_the_line_of_such_a_number_is_told():
    text = "one\n\n```\n1.0\n```\n2.0\n<!-- speed -->\n\n<!-- speed -->\n24 %"
    assert pages.unmarked(text) == ["line 6: 2.0", "line 10: 24"]


@pytest.mark.parametrize("text, complaint", [
    ("<!-- memory -->", "<!-- memory -->: stands 1 times; put one before and one after the table"),
    ("<!-- memry -->\n<!-- memry -->", "<!-- memry -->: unknown; tables are speed, compile")])
def test_a_comment_that_makes_no_table_is_an_error(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        pages.fill_tables(text, {})


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A README and a guide over one JSON file."""
    (tmp_path / "results").mkdir()
    (tmp_path / "guide").mkdir()
    (tmp_path / "results" / "memory.json").write_text((ROOT / "results" / "memory.json").read_text())
    (tmp_path / "README.md").write_text("# A\n\n0.0<!--= memory(\"c4096\", \"defaults\").peak_gib --> GiB\n")
    (tmp_path / "GUIDE.md").write_text("# B\n")
    (tmp_path / "guide" / "more.md").write_text("<!-- memory -->\n<!-- memory -->\nend\n")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "PICTURES", {})
    return tmp_path


def test_tables_and_figures_are_written_wherever_they_stand(site, capsys):
    before = (site / "guide" / "more.md").read_text()
    assert run("--check") == 1 and (site / "guide" / "more.md").read_text() == before
    out = capsys.readouterr().out
    assert "README.md: page has 0.0<!--=" in out and "guide/more.md: JSON has | defaults |" in out
    assert run() == 0 and run("--check") == 0
    rows = json.loads((site / "results" / "memory.json").read_text())
    peak = next(row["peak_gib"] for row in rows if (row["shape"], row["switch"]) == ("c4096", "defaults"))
    assert (site / "README.md").read_text().startswith(f"# A\n\n{peak:.1f}<!--= memory(")
    assert (site / "guide" / "more.md").read_text().endswith("|\n<!-- memory -->\nend\n")


def test_a_number_typed_in_fails_the_check(site, capsys):
    assert run() == 0 and run("--check") == 0
    (site / "GUIDE.md").write_text("# B\n\nno CUDA graph +1.3 %\n")
    assert run("--check") == 1
    assert "GUIDE.md: no file in results/ is behind this number, line 3: +1.3" in capsys.readouterr().out


def test_an_error_on_one_page_leaves_all_pages_as_they_were(site, capsys):
    (site / "guide" / "more.md").write_text("1.0<!--= memory(\"c4096\").ms -->\n")
    before = (site / "README.md").read_text()
    assert run() == 2 and (site / "README.md").read_text() == before
    assert "guide/more.md: <!--= memory(\"c4096\").ms -->" in capsys.readouterr().err


# ---------------------------------------------------------------- pictures

def texts_of(figure):
    """Return {text: its box} of what stands in and under a figure's panels."""
    figure.canvas.draw()
    found = []
    for axes in figure.axes:
        found += [text for text in (*axes.texts, *axes.get_xticklabels()) if text.get_text().strip()]
    return [(text.get_text(), text.get_window_extent()) for text in found]


@pytest.mark.parametrize("name", ["speed", "stack", "attention", "convergence_switched_small"])
def test_in_a_picture_no_text_collides_and_no_message_is_raw(name, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: drawn.append(texts_of(figure)))
    result = pages.read(ROOT / "results")[name]
    if name == "attention":  # two panels, since drawing takes seconds
        result["rows"] = [row for row in result["rows"] if "16384" in row["shape"] or row["part"] == "block"]
    pages.PICTURES[name](result, tmp_path / "picture.png")
    texts, = drawn
    assert len(texts) > 10
    for i, (text, box) in enumerate(texts):
        assert not any(box.overlaps(other) for _, other in texts[:i]), text
    reasons = [row["why_not"] for row in result["rows"] if "why_not" in row] if name == "attention" else []
    assert not any(reason[:40] in text for text, _ in texts for reason in reasons)


def test_speed_is_drawn_for_four_arms_at_most(monkeypatch, tmp_path):
    legends = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: legends.extend(
        text.get_text() for text in figure.legends[0].get_texts()))
    rows = pages.read(ROOT / "results")["speed"]
    speed_report.draw_speed(rows, tmp_path / "speed.png")
    assert legends == ["plain PyTorch, compiled", "plain PyTorch, CUDA graphs", "ours, BF16", "ours, FP8"]
    legends.clear()
    other = [row for row in rows if row["arm"] in ("plain", "fp8-current", "fp8-eager")]
    speed_report.draw_speed(other, tmp_path / "speed.png")
    assert legends == ["plain PyTorch, compiled", "ours, FP8 current", "fp8-eager"]


# ---------------------------------------------------------------- tables

def test_variants_compare_with_the_fp8_step_of_their_group():
    row = {"shape": "s", "block": "gpt2"}
    rows = [row | {"arm": "fp8", "ms": 20.0}, row | {"arm": "bf16", "ms": 25.0},
            row | {"arm": "fp8-eager", "ms": 40.0}, row | {"arm": "fp8-block", "error": "no"},
            {"shape": "t", "block": "gpt2", "arm": "fp8", "ms": 1.0}]
    assert speed_report.variants_table(rows).splitlines() == [
        "| ms a step | FP8 | BF16 | no CUDA graph |", "| --- | ---: | ---: | ---: |",
        "| s, gpt2 | 20.00 | 25.00 (0.80) | 40.00 (0.50) |"]


def test_the_profile_sums_up_kernels():
    row = {"shape": "c4096", "block": "gpt2", "arm": "fp8", "ms": 10.5, "floor_ms": 5.25,
           "profile_ms": {"GEMM FP8": 5.0, "GEMM BF16": 1.0, "attention": 2.0, "norm": 1.5, "embedding": 0.25,
                          "other": 0.25},
           "sm_mhz": 1440.0, "sm_mhz_limit": 1980.0, "watts": 699.5, "watts_limit": 700.0}
    lines = dict(line[2:].split(" | ", 1) for line in speed_report.profile_table([row]).splitlines())
    assert lines["ms a step"] == "c4096, FP8 | bound by |"
    assert lines["GEMMs"].startswith("6.0 |") and lines["copies, embedding, other"].startswith("0.5 |")
    assert lines["**GEMMs and attention**"].startswith("8.0 (80 %)")
    assert lines["**everything else**"].startswith("2.0 (20 %)")
    assert lines["speed of light (`floor_ms`)"].startswith("5.2 (50 %)")
    assert lines["clock, MHz"].startswith("1,440 of 1,980")


def test_mfu_in_both_conventions():
    """Llama-3 8B at 8,192 tokens costs 57.9 GFLOP a token, and 51.5 with attention halved."""
    rows = [row for row in pages.read(ROOT / "results")["speed"] if row["shape"] == "llama3-8b"]
    row = next(row for row in rows if row["arm"] == "fp8") | {"mfu": 0.579, "ms": 4.0, "floor_ms": 3.0}
    assert speed_report.mfu_table([row, row | {"arm": "bf16"}]).splitlines()[2:] == [
        "| llama3-8b | 57.9 % | 51.5 % | 28.9 % | 25.7 % | 75.0 % |"]


def test_fp8_pays_from_the_width_above_which_it_always_does():
    speed = {(256, 1024): 1.10, (512, 1024): 1.01, (1024, 1024): 1.02, (2048, 1024): 1.50, (256, 2048): 1.2,
             (512, 2048): 1.3, (2048, 4096): 0.9}
    rows = [{"width": width, "tokens": tokens, "graph": graph} for (width, tokens), graph in speed.items()]
    rows.append({"width": 1024, "tokens": 2048, "graph": None, "error": "not run"})
    assert speed_report.crossover_table(rows).splitlines()[2:] == [
        "| 1,024 | 1,024 | 1.02 | 1.50 |", "| 2,048 | 256 | 1.20 | 1.30 |", "| 4,096 | none |  | 0.90 |"]


def test_gaps_compare_the_last_records_of_the_seeds_that_two_arms_share():
    """At the tokens that both have, though the arm may have trained on more, too."""
    fields = ("arm", "seed", "run_tokens", "tokens", "val_loss", "without")
    runs = [dict(zip(fields, values)) for values in (
        ("fp8@1e-3", 2, 8, 8, 1.02, None), ("fp8@1e-3", 1, 8, 8, 1.1, 1.05), ("fp8@1e-3", 1, 8, 4, 9, 9),
        ("fp8@1e-3", 1, 9, 9, 0.5, 0.5), ("fp8@1e-3", 3, 8, 8, 7, 7), ("fp8-e4m3@1e-3", 1, 8, 8, 1.1, 1.0),
        ("bf16@1e-3", 1, 8, 8, 1.0, None), ("bf16@1e-3", 2, 8, 8, 1.0, None))]
    assert convergence_report.gaps({"runs": runs}, "fp8@1e-3") == pytest.approx([10, 2])
    assert convergence_report.gaps({"runs": runs}, "fp8@1e-3", field="without") == pytest.approx([5])
    other = convergence_report.gaps({"runs": runs}, "fp8@1e-3", "fp8-e4m3@1e-3", "without")
    assert other == pytest.approx([5]) and convergence_report.losses({"runs": runs}, "bf16@1e-3") == [1, 1]


def test_the_stability_table_spans_margins():
    cell = {"recipe": "delayed", "format": "hybrid", "history": 16, "algo": "max", "size": "2x64"}
    cells = [cell | {"recipe": "none", "disturbance": "none", "final_vs_high_precision": 7.0}]
    outcomes = [("none", -0.004, 0), ("none", 0.002, 0), ("outlier 1e6", 0.15, 3),
                ("outlier 1e6", 0.42, None), ("loss down", 0.001, 1), ("zeros", 0.01, 9)]
    for disturbance, versus, after in outcomes:
        outcome = {"disturbance": disturbance, "final_vs_high_precision": versus, "recovered_after": after}
        cells.append(cell | outcome)
    assert stability_report.table({"cells": cells}).splitlines()[2:] == [
        "| delayed hybrid, max of 16 | -0.4 to +0.2 % | +15.0 to +42.0 %; never | +0.1 %; 1 step | +1.0 % |"]
    assert stability_report.sizes_table({"cells": cells[:3]}).splitlines() == [
        "|  | 2x64 |", "| --- | ---: |", "| delayed hybrid, max of 16 | -0.4 to +0.2 % |"]

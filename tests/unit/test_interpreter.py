"""Code cells without a sandbox: what kernels say as lines, and lines as values; the languages' ways with variables."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from space.errors import CommandFailed, GuestError
from space.sdk.cells import LINE_BYTES_MAX, Cell, CellError, CellOutput, Display, Lines

SERVER = Path(__file__).parents[2] / "templates/code-interpreter-v1/server"


@pytest.fixture(scope="module")
def server():
    """The modules of the server that need nothing but the standard library."""
    sys.path.insert(0, str(SERVER))
    try:
        import executions  # type: ignore[import-not-found]  # noqa: F401
        import languages  # type: ignore[import-not-found]
        import outputs  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(SERVER))
    return languages, outputs


def told(outputs, kind: str, **content) -> dict:
    (event,) = outputs.events_of(kind, content)
    return json.loads(outputs.line(event))


def test_quotes_around_a_text_are_not_part_of_it(server) -> None:
    _, outputs = server
    texts = {"'a'": "a", '"a\'s"': "a's", "'": "'", "3": "3", "['a']": "['a']"}
    shown = [told(outputs, "execute_result", data={"text/plain": text})["text"] for text in texts]
    assert shown == list(texts.values())


def test_every_form_has_its_name_and_others_keep_their_media_types(server) -> None:
    _, outputs = server
    data = {"image/png": "AA==", "e2b/data": {"a": [1]}, "application/x-own": "x", "text/html": ["<b>", "</b>"]}
    assert told(outputs, "display_data", data=data) == {
        "type": "result",
        "is_main_result": False,
        "png": "AA==",
        "data": {"a": [1]},
        "html": "<b></b>",
        "extra": {"application/x-own": "x"},
    }


def test_a_traceback_has_no_colours_in_it(server) -> None:
    _, outputs = server
    error = told(outputs, "error", ename="E", evalue="v", traceback=["\x1b[0;31mred\x1b[0m", "plain"])
    assert error == {"type": "error", "name": "E", "value": "v", "traceback": "red\nplain"}


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("stream", {"name": ["stdout"], "text": 5}),
        ("execute_result", {"data": {"text/plain": 5, "image/png": {"a": 1}, "application/json": [None]}}),
        ("error", {"ename": 5, "evalue": None, "traceback": 7}),
    ],
)
def test_whatever_a_kernel_says_of_it_a_line_has_texts_where_texts_belong(server, kind: str, content: dict) -> None:
    _, outputs = server
    event = told(outputs, kind, **content)
    forms = ("text", "png", "name", "value", "traceback")
    assert all(isinstance(event[name], str) for name in forms if name in event)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("stream", {}),
        ("display_data", {"data": [1, 2]}),
        ("execute_input", {"execution_count": "x"}),
        ("status", {}),
        ("made-up", {}),
    ],
)
def test_what_makes_no_sense_is_nothing(server, kind: str, content: dict) -> None:
    _, outputs = server
    assert outputs.events_of(kind, content) == []


def test_a_long_output_is_told_in_pieces_and_of_a_large_result_what_fits(server) -> None:
    _, outputs = server
    text = "x" * (3 * outputs.PIECE_CHARS + 1)
    pieces = outputs.events_of("stream", {"name": "stdout", "text": text})
    assert len(pieces) == 4
    assert "".join(piece["text"] for piece in pieces) == text
    large = "y" * outputs.RESULT_BYTES_MAX
    (result,) = outputs.events_of("execute_result", {"data": {"text/plain": large, "text/html": large, "a/b": "z"}})
    assert result["text"] == large[: outputs.PIECE_CHARS]
    assert result["extra"] == {"a/b": "z", "space/omitted": ["text/html"]}
    assert len(outputs.line(result)) < LINE_BYTES_MAX


def test_a_line_is_json_whatever_is_in_it(server) -> None:
    _, outputs = server
    line = outputs.line({"type": "result", "json": {"nan": float("nan"), "text": "\ud800\u2028\n"}})
    assert line.count(b"\n") == 1
    assert line.isascii()
    assert json.loads(line)["json"] == {"nan": None, "text": "\ud800\u2028\n"}


class _Deaf:
    """A kernel that is interrupted in vain."""

    def __init__(self) -> None:
        self.interrupts = 0

    async def interrupt(self) -> None:
        self.interrupts += 1


async def test_a_cell_that_heeds_no_interrupt_is_told_of_and_its_client_let_go(server, monkeypatch) -> None:
    executions = sys.modules["executions"]
    for name, value in (("LOOK_S", 0.01), ("INTERRUPT_EVERY_S", 0.02), ("HEED_S", 0.1)):
        monkeypatch.setattr(executions, name, value)
    kernel, execution = _Deaf(), executions.Execution("", {}, 0.05)
    time = executions.Time(execution)
    async with asyncio.timeout(20):
        while not execution.given_up:
            await time.see_to(kernel)
            await asyncio.sleep(time.wait_s())
        lines = [json.loads(line) async for line in execution.told()]
    assert [(line["type"], line.get("name")) for line in lines] == [
        ("error", "StillRunning"),
        ("end_of_execution", None),
    ]
    assert kernel.interrupts >= 2
    execution.tell({"type": "stdout", "text": "later"})
    assert execution.bytes_ahead == 0, "what nobody takes is not kept"


@pytest.mark.parametrize("value", ["plain", "a b'c\"d", "two\nlines", "back\\slash $HOME `id`", "ü", ""])
def test_what_is_lent_to_bash_is_as_it_was_afterwards(server, value: str) -> None:
    languages, _ = server
    bash = languages.find("bash")
    script = "\n".join(
        [
            "KEPT=before",
            bash.lend({"KEPT": value, "NEW": value}),
            'printf "%s|%s|" "$KEPT" "$NEW"',
            bash.take_back({"KEPT": value, "NEW": value}),
            'printf "%s|%s" "$KEPT" "${NEW-none}"',
        ]
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=10)
    assert done.stdout == f"{value}|{value}|before|none"


def test_lines_are_told_as_values_however_they_are_cut() -> None:
    said = [
        {"type": "number_of_executions", "execution_count": 1},
        {"type": "stdout", "text": "a", "timestamp": 1},
        {"type": "keepalive"},
        {"type": "stderr", "text": "b", "timestamp": 1},
        {"type": "result", "is_main_result": True, "text": "3", "extra": {}},
        {"type": "something-later"},
        {"type": "error", "name": "E", "value": "v", "traceback": "t"},
        {"type": "end_of_execution"},
    ]
    text = b"".join(json.dumps(one).encode() + b"\n" for one in said)
    for size in (1, 7, len(text)):
        lines = Lines()
        events = [event for at in range(0, len(text), size) for event in lines.feed(text[at : at + size])]
        assert events == [
            CellOutput("stdout", "a"),
            CellOutput("stderr", "b"),
            Display(main=True, text="3"),
            CellError("E", "v", "t"),
        ]
        assert lines.ended
    cell = Cell.of(events)
    assert (cell.stdout, cell.stderr, cell.text) == ("a", "b", "3")
    with pytest.raises(CommandFailed, match="E: v"):
        cell.check()


def test_a_cell_that_was_not_told_to_its_end_has_not_ended() -> None:
    lines = Lines()
    assert list(lines.feed(b'{"type":"stdout","text":"a"}\n{"type":"end_of_execution"}')) == [CellOutput("stdout", "a")]
    assert not lines.ended


@pytest.mark.parametrize("line", [b"no json\n", b"\n", b'{"type":\n'])
def test_what_is_no_json_is_the_sandboxs_fault(line: bytes) -> None:
    with pytest.raises(GuestError):
        list(Lines().feed(line))


def test_a_line_without_end_is_given_up() -> None:
    lines = Lines()
    assert list(lines.feed(bytes(LINE_BYTES_MAX))) == []
    with pytest.raises(GuestError, match="without end"):
        list(lines.feed(b"x"))


@pytest.mark.parametrize("said", [[], 3, None, {"type": 7}, {"type": "result", "png": 3, "data": "x", "extra": []}])
def test_what_a_sandbox_makes_up_harms_nobody(said) -> None:
    events = list(Lines().feed(json.dumps(said).encode() + b"\n"))
    assert events in ([], [Display()])

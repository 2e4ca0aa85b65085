"""Inside a Python kernel: its environment, and tables and charts as data beside what they look like."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any, ClassVar

from IPython.core.formatters import BaseFormatter
from traitlets import ObjectName, Unicode

CELLS_MAX = 200_000
"""Of a table that is told as data: beyond that it is only shown."""

_before: dict[str, str | None] = {}


def change(values: dict[str, str | None]) -> None:
    """Have variables these values; None: they are not there."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def lend(values: dict[str, str | None]) -> None:
    """`change`, until ``take_back``."""
    _before.update({name: os.environ.get(name) for name in values})
    change(values)


def take_back(_values: dict[str, str | None]) -> None:
    """Have what was lent as it was before."""
    change(_before)
    _before.clear()


def reseed(_values: dict[str, str | None]) -> None:
    """Have chance begin anew: this process is a copy of one that many sandboxes begin with."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        numpy.random.seed()


class _Form(BaseFormatter):
    """One more form to show things in. What has it is known by names, so that nothing is imported before there is
    something to show, and stays so: setting how figures look makes IPython forget what else was said of them.
    """

    _return_type = dict
    _of: ClassVar[dict[tuple[str, str], Callable[[Any], dict[str, Any] | None]]] = {}

    def lookup_by_type(self, typ: type) -> Callable[[Any], dict[str, Any] | None]:
        for cls in typ.__mro__:
            if (found := self._of.get((cls.__module__, cls.__name__))) is not None:
                return lambda shown, form=found: _told(form, shown)
        raise KeyError(typ)


def _told(form: Callable[[Any], dict[str, Any] | None], shown: Any) -> dict[str, Any] | None:
    """Return an object in a form; None where that fails, which is no error of the cell: it is shown in other forms."""
    try:
        return form(shown)
    except Exception:
        return None


class _Data(_Form):
    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    # Where the class says it is differs from version to version.
    _of = {(module, "DataFrame"): lambda frame: _table(frame) for module in ("pandas", "pandas.core.frame")}


class _Chart(_Form):
    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _of = {("matplotlib.figure", "Figure"): lambda figure: _figure(figure)}


def install(shell: Any) -> None:
    """Add both forms to what the shell shows results in, and let ``exit()`` end a cell, not all that was remembered."""
    shell.ask_exit = _leave
    display = shell.display_formatter
    display.formatters.update({form.format_type: form for form in (_Data(parent=display), _Chart(parent=display))})


def _leave() -> None:
    raise SystemExit


def _table(frame: Any) -> dict[str, Any] | None:
    if frame.size > CELLS_MAX:
        return None
    columns = ((str(name), frame.iloc[:, at]) for at, name in enumerate(frame.columns))
    return {name: json.loads(column.to_json(orient="values", date_format="iso")) for name, column in columns}


def _figure(figure: Any) -> dict[str, Any] | None:
    from e2b_charts import chart_figure_to_dict

    told = chart_figure_to_dict(figure)
    return json.loads(json.dumps(told, default=str)) if told else None

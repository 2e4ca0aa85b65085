"""The instructions of one stage, one after another: what each makes of the configuration, and of the files.

A *step* is what changes files: ``run``, ``copy`` or ``workdir``. Its fields say all that its outcome depends on, beside
the disk it begins with; ``line`` and ``text`` are for people, and ``asked`` is its number among those that were asked
for. Pure.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from e2b_dockerfile_utils import DockerfileInstruction, ShellLex, chomp_heredoc_content, parse_heredoc

from space.node.builds.refusals import Refusal

TEXT_CHARS_MAX = 400
PATH_DEFAULT = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHELL_DEFAULT = ("/bin/sh", "-c")
EPOCH = "SOURCE_DATE_EPOCH"
EPOCH_DEFAULT = "315532800"
"""1980: the earliest time that every kind of archive can hold."""
_PREDEFINED = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
_MODE = re.compile(r"0?[0-7]{3,4}")
_PORT = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?(?:/(?:tcp|udp|sctp))?")
PORTS_MAX = 64


@dataclass(slots=True)
class Config:
    """What is known of a container beside its files."""

    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    shell: list[str] = field(default_factory=lambda: list(SHELL_DEFAULT))
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    ports: list[int] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    onbuild: list[str] = field(default_factory=list)
    account: str = ""
    """The user of the template that is the base, and below the variables in ``env`` that are about that one."""
    about: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Config:
        """Take what an image or a template says of itself."""
        ports = {port for text in told.get("ports") or [] for port in _ports(str(text)) or ()}
        workdir = told.get("workdir") or "/"
        return cls(
            env=dict(told.get("env") or {}),
            workdir=posixpath.normpath(posixpath.join("/", workdir)),
            user=told.get("user") or "",
            shell=list(told.get("shell") or SHELL_DEFAULT),
            entrypoint=told.get("entrypoint"),
            cmd=told.get("cmd"),
            ports=sorted(ports)[:PORTS_MAX],
            labels=dict(told.get("labels") or {}),
            onbuild=list(told.get("onbuild") or []),
            account=told.get("account") or "",
            about=dict(told.get("about") or {}),
        )

    def copy(self) -> Config:
        return Config.of(self.told())

    def told(self) -> dict[str, Any]:
        return {
            "env": self.env,
            "workdir": self.workdir,
            "user": self.user,
            "shell": self.shell,
            "entrypoint": self.entrypoint,
            "cmd": self.cmd,
            "ports": self.ports,
            "labels": self.labels,
            "account": self.account,
            "about": self.about,
        }

    def environment(self) -> dict[str, str]:
        """Return the variables, for another user than the template's without those that are about that one."""
        if self.user.partition(":")[0] == self.account:
            return self.env
        return {name: value for name, value in self.env.items() if self.about.get(name) != value}

    def run_step(self, argv: list[str], args: Mapping[str, str]) -> dict[str, Any]:
        """Return the step that runs a program as this stage has it."""
        env = {EPOCH: EPOCH_DEFAULT, **args, **self.environment()}
        return {"kind": "run", "argv": argv, "env": env, "cwd": self.workdir, "user": self.user}


class Evaluation:
    """One stage as it is gone through."""

    def __init__(self, config: Config, escape: str, outer: Mapping[str, str], build_args: Mapping[str, str]) -> None:
        """``outer`` are ARGs that hold here once they are declared again."""
        self.config = config
        self._escape = escape
        self._outer = outer
        self._given = build_args
        self._args = {name: value for name, value in build_args.items() if name == EPOCH or name.upper() in _PREDEFINED}
        self._line = 0

    def take(self, instruction: DockerfileInstruction, source: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Take the next instruction and return its steps. ``source`` is what its ``--from`` means."""
        self._line = instruction.start_line
        handlers: dict[str, Callable[[DockerfileInstruction], list[dict[str, Any]] | None]] = {
            "RUN": self._run,
            "COPY": lambda i: self._copy(i, source),
            "ADD": lambda i: self._copy(i, None),
            "WORKDIR": self._workdir,
            "ENV": self._env,
            "ARG": self._arg,
            "USER": self._user,
            "LABEL": self._label,
            "EXPOSE": self._expose,
            "SHELL": self._shell,
            "CMD": self._cmd,
            "ENTRYPOINT": self._entrypoint,
        }
        if instruction.name == "ONBUILD":
            raise self._unsupported("ONBUILD is not supported: write its instruction where it is to be carried out.")
        # STOPSIGNAL, VOLUME, HEALTHCHECK and MAINTAINER say nothing that a template has.
        handler = handlers.get(instruction.name)
        steps = (handler(instruction) if handler is not None else None) or []
        text = " ".join(instruction.original.split())
        shown = text if len(text) <= TEXT_CHARS_MAX else text[: TEXT_CHARS_MAX - 1] + "…"
        return [{**step, "line": self._line, "text": shown} for step in steps]

    # --- instructions that change files

    def _run(self, instruction: DockerfileInstruction) -> list[dict[str, Any]]:
        for flag in instruction.flags:
            if flag not in {"--network=default", "--network=none", "--security=sandbox"}:
                raise self._unsupported(f"RUN {flag} is not supported.")
        if not instruction.args or not instruction.args[0]:
            raise self._invalid("RUN needs a command.")
        if instruction.json:
            return [self.config.run_step(instruction.args, self._args)]
        command, script = instruction.args[0], None
        if instruction.heredocs:
            first = instruction.heredocs[0]
            alone = len(instruction.heredocs) == 1 and parse_heredoc(command.strip()) is not None
            body = chomp_heredoc_content(first.content) if first.chomp else first.content
            if alone and body.startswith("#!"):
                script = body
            elif alone:
                command = body
            else:
                command += "".join(f"\n{one.content}{one.name}" for one in instruction.heredocs)
        if script is not None:
            return [{**self.config.run_step([], self._args), "script": script}]
        return [self.config.run_step([*self.config.shell, command], self._args)]

    def _copy(self, instruction: DockerfileInstruction, source: dict[str, Any] | None) -> list[dict[str, Any]]:
        add = instruction.name == "ADD"
        options = self._copy_options(instruction)
        words = [self._expand(word) for word in instruction.args]
        if len(words) < 2:
            raise self._invalid(f"{instruction.name} needs at least one source and a destination.")
        *sources, target = words
        files: list[dict[str, str]] = []
        if instruction.heredocs:
            files = self._inline(instruction)
            sources = [word for word in sources if parse_heredoc(word) is None]
        for one in sources if add else ():
            if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|git@", one):
                raise self._unsupported("ADD does not fetch from the network: bring the file along in the context.")
        to = posixpath.join(self.config.workdir, target)
        directory = target.endswith(("/", "/.")) or target == "." or len(sources) + len(files) > 1
        step = {
            "kind": "copy",
            "from": source,
            "sources": sources,
            "files": files,
            "to": posixpath.normpath(to),
            "into": directory,
            "unpack": add,
            **options,
        }
        return [step]

    def _copy_options(self, instruction: DockerfileInstruction) -> dict[str, Any]:
        options: dict[str, Any] = {"owner": None, "mode": None, "exclude": []}
        for flag in instruction.flags:
            name, _, raw = flag.partition("=")
            value = self._expand(raw)
            match name:
                case "--chown":
                    options["owner"] = value
                case "--chmod" if _MODE.fullmatch(value):
                    options["mode"] = int(value, 8)
                case "--exclude":
                    options["exclude"].append(value)
                case "--from" if instruction.name == "COPY":
                    pass
                case "--link" if value in {"", "true", "false"}:
                    pass  # How layers are kept; there are none here.
                case _:
                    raise self._unsupported(f"{instruction.name} {flag} is not supported.")
        return options

    def _inline(self, instruction: DockerfileInstruction) -> list[dict[str, str]]:
        lex = ShellLex(self._escape, env=self._variables(), skip_unset_env=False, skip_process_quotes=True)
        found: list[dict[str, str]] = []
        for one in instruction.heredocs:
            text = chomp_heredoc_content(one.content) if one.chomp else one.content
            if one.expand:
                try:
                    text = lex.process_word(text)
                except ValueError as error:
                    raise self._invalid(str(error)[:500]) from error
            found.append({"name": one.name, "text": text})
        return found

    def _workdir(self, instruction: DockerfileInstruction) -> list[dict[str, Any]]:
        path = self._expand(self._only(instruction))
        if not path:
            raise self._invalid("WORKDIR needs a directory.")
        self.config.workdir = posixpath.normpath(posixpath.join(self.config.workdir, path))
        return [{"kind": "workdir", "path": self.config.workdir, "user": self.config.user}]

    # --- instructions that do not

    def _env(self, instruction: DockerfileInstruction) -> None:
        variables = self._variables()
        for name, value in self._pairs(instruction, variables):
            if not name:
                raise self._invalid("ENV has a variable without a name.")
            self.config.env[name] = value

    def _label(self, instruction: DockerfileInstruction) -> None:
        self.config.labels.update(self._pairs(instruction, self._variables()))

    def _pairs(self, instruction: DockerfileInstruction, variables: Mapping[str, str]) -> list[tuple[str, str]]:
        """Variables of one line are those of before it."""
        args = instruction.args
        if not args:
            raise self._invalid(f"{instruction.name} needs a name and a value.")
        names, values = args[0::3], args[1::3]
        pairs = zip(names, values, strict=True)
        return [(self._expand(name, variables), self._expand(value, variables)) for name, value in pairs]

    def _arg(self, instruction: DockerfileInstruction) -> None:
        if not instruction.args:
            raise self._invalid("ARG needs a name.")
        for word in instruction.args:
            name, equals, raw = word.partition("=")
            if name in self._given:
                value: str | None = self._given[name]
            elif equals:
                value = self._expand(raw)
            else:
                value = self._outer.get(name)
            if value is not None:
                self._args[name] = value

    def _user(self, instruction: DockerfileInstruction) -> None:
        user = self._expand(self._only(instruction))
        if re.fullmatch(r"[A-Za-z0-9_.][A-Za-z0-9_.@-]{0,63}(:[A-Za-z0-9_.][A-Za-z0-9_.@-]{0,63})?", user) is None:
            raise self._invalid("USER needs the name or the number of a user, and may go on with : and a group.")
        self.config.user = user

    def _expose(self, instruction: DockerfileInstruction) -> None:
        for word in instruction.args:
            for text in self._expand(word).split():
                ports = _ports(text)
                if ports is None:
                    raise self._invalid(f"EXPOSE {text[:100]}: that is no port.")
                self.config.ports = sorted({*self.config.ports, *ports})[:PORTS_MAX]

    def _shell(self, instruction: DockerfileInstruction) -> None:
        if not instruction.json or not instruction.args:
            raise self._invalid("SHELL needs a list in JSON form.")
        self.config.shell = list(instruction.args)

    def _cmd(self, instruction: DockerfileInstruction) -> None:
        self.config.cmd = self._command(instruction)

    def _entrypoint(self, instruction: DockerfileInstruction) -> None:
        self.config.entrypoint = self._command(instruction)
        self.config.cmd = None

    def _command(self, instruction: DockerfileInstruction) -> list[str]:
        if instruction.json or not instruction.args:
            return list(instruction.args)
        return [*self.config.shell, instruction.args[0]]

    # --- words

    def _only(self, instruction: DockerfileInstruction) -> str:
        if len(instruction.args) != 1:
            raise self._invalid(f"{instruction.name} needs one argument.")
        return instruction.args[0]

    def _variables(self) -> dict[str, str]:
        return {"PATH": PATH_DEFAULT, **self._args, **self.config.env}

    def _expand(self, text: str, variables: Mapping[str, str] | None = None) -> str:
        lex = ShellLex(self._escape, env=self._variables() if variables is None else variables, skip_unset_env=False)
        try:
            return lex.process_word(text)
        except ValueError as error:
            raise self._invalid(str(error)[:500]) from error

    def _invalid(self, message: str) -> Refusal:
        return Refusal("dockerfile-invalid", message, self._line)

    def _unsupported(self, message: str) -> Refusal:
        return Refusal("instruction-not-supported", message, self._line)


def _ports(text: str) -> list[int] | None:
    """Return the ports that a word of EXPOSE names; None when it is none."""
    match = _PORT.fullmatch(text)
    if match is None:
        return None
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last <= 65535 or last - first >= PORTS_MAX:
        return None
    return list(range(first, last + 1))


def canonical(step: Mapping[str, Any]) -> str:
    """Return what a step's outcome depends on, as text that is the same for the same step."""
    return json.dumps({k: v for k, v in step.items() if k not in {"line", "text", "upload", "asked"}}, sort_keys=True)

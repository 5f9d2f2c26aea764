"""``swe/Repair-v1``: fix an issue of a repository with a shell and an editor in a sandbox.

Takes: answers with one fenced action each, or with function calls: a command, an edit, or
``submit``. Gives: the result, and at the end the grade of the changes, judged in another sandbox.
Never: has the hidden tests or the repository's history in the agent's sandbox.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from gymnasium.error import ResetNeeded

from rollart_core.contracts.sandbox import Sandbox
from rollart_core.rollout.tools.action import Call, ToolAction
from rollart_core.types import Message, Observation
from rollart_envs.swe.config import RepairConfig
from rollart_envs.swe.editor import VERBS, Edit, History
from rollart_envs.swe.repair_episode import (
    RepairEpisode,
    RepairTasks,
    components_of,
    expert_actions,
    expert_commands,
    fenced,
    statement,
)
from rollart_envs.swe.repair_judge import Report
from rollart_envs.swe.task import RepairTask
from rollart_envs.swe.tools import (
    SHELL_ENV,
    SUBMIT,
    ActionError,
    Bash,
    Submit,
    called_action,
    cut_output,
    fenced_blocks,
    function_specs,
    help_text,
    parse_action,
)
from rollart_envs.swe.workspace import WORK_REPO
from rollart_sandboxes.pool.lease import Reset, SandboxEnv, Step
from rollart_sandboxes.pool.source import sandbox_source

_MAX_EDIT_BYTES: Final = 1 << 20
_COMMAND_BYTES: Final = 1 << 20


class RepairEnv(SandboxEnv):
    """Fix a repository; see :class:`rollart_envs.swe.config.RepairConfig` for the options."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium declares it so)

    def __init__(self, **options: Any) -> None:
        self.config = RepairConfig.model_validate(options)
        super().__init__(sandbox_source(self.config.sandbox, self.config.pool))
        self._tasks = RepairTasks(self.config, self._sandboxes)
        self._help = help_text(self.config.shell, tools=self.config.tools)
        self._state: _State | None = None

    @property
    def task(self) -> RepairTask:
        """The current task.

        Raises:
            ResetNeeded: If there is none yet.
        """
        return self._present.episode.task

    @property
    def _present(self) -> _State:
        if self._state is None:
            raise ResetNeeded("call reset() before the first step")
        return self._state

    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of ``split``."""
        return len(self._tasks.book.ids(split))

    async def begin(self, seed: int | None, options: dict[str, Any]) -> Reset:
        """Start an episode: the repository at its base commit, in its own sandbox."""
        self._state = None
        task = self._tasks.choose(options, self.np_random)
        self._state = _State(await self._tasks.start(self.open_sandbox, task))
        tools = {"tools": function_specs()} if self.config.tools else {}
        return f"{self._state.episode.statement}\n{self._help}\n", {**self._info(None), **tools}

    async def act(self, action: str) -> Step:
        """Carry out an answer; ``submit``, or the last turn, ends the episode with a grade."""
        if not isinstance(action, str):
            raise TypeError(f"an answer is a str, not {action!r:.80}")
        state = self._present
        if state.is_over or self._sandbox is None:
            raise ResetNeeded("the episode is over: call reset()")
        state.num_turns += 1
        calls = ToolAction.read(action).calls if self.config.tools else ()
        texts, is_submitted = list[str](), False
        for call in calls or (None,):
            if is_submitted:
                texts.append("The work has ended.")
                continue
            text, is_submitted = await self._answered(self._sandbox, action, call)
            texts.append(text)
        report = None
        if is_submitted or state.num_turns >= self.config.max_turns:
            report = await self._graded(self._sandbox)
            texts[-1] = f"{texts[-1]}\n{_verdict(report)}".strip()
        reward = 0.0 if report is None else report.grade.reward
        over = report is not None
        return _observation(calls, texts), reward, over, False, self._info(report)

    def oracle(self) -> str | None:
        """Return the next action that applies the gold patch, file by file, then ``submit``."""
        state = self._present
        return None if state.is_over else self._as_action([*state.expert, SUBMIT][0])

    def typed_action(self, text: str) -> str:
        """Return the action of a line that a person types: without a fence, or without JSON.

        The first word decides whether it is a command or an edit.
        """
        if self.config.tools:
            return text if ToolAction.read(text).calls else self._as_action(text.strip())
        if fenced_blocks(text):
            return text
        is_edit = bool(text.split()) and text.split()[0] in VERBS
        return fenced("edit", text) if is_edit else self._as_action(text)

    def secrets(self) -> tuple[str, ...]:
        """Return the gold patch and the hidden tests."""
        return self.task.secrets()

    def corpus(self) -> Iterator[str]:
        """Yield the prompts of the tasks of ``train``, and the expert's actions."""
        for name in self._tasks.book.ids("train"):
            task = self._tasks.book.tasks[name]
            yield f"{statement(task, WORK_REPO)}\n{self._help}\n"
            yield from expert_actions(task)

    def _as_action(self, command: str) -> str:
        """Return the answer with one command."""
        if not self.config.tools:
            return fenced("bash", command)
        is_end = command == SUBMIT
        call = Call(SUBMIT) if is_end else Call("bash", {"command": command})
        return ToolAction("", (call,)).text()

    async def _answered(self, sandbox: Sandbox, action: str, call: Call | None) -> tuple[str, bool]:
        """Carry out an action or a call; return what is said to it, and whether it submits."""
        try:
            if call is None and self.config.tools:
                raise ActionError("Your answer held no call.")
            parsed = parse_action(action) if call is None else called_action(call)
        except ActionError as error:
            return f"{error}\n\n{self._help}", False
        if isinstance(parsed, Submit):
            return "", True
        try:
            if isinstance(parsed, Bash):
                said = await self._command(sandbox, parsed)
                self._present.expert_done(parsed.command)
                return said, False
            return await self._edit(sandbox, parsed), False
        except OSError as error:  # the sandbox refuses it, for example if a folder is gone
            return f"That could not be done: {error.strerror or error}", False

    async def _command(self, sandbox: Sandbox, action: Bash) -> str:
        episode = self._present.episode
        repo_dir = episode.workspace.repo_dir
        keeps = self.config.shell == "persistent"
        state = f"{episode.workspace.scratch}/rollart-shell" if keeps else ""
        result = await sandbox.exec(
            action.argv(state),
            timeout_s=self.config.command_timeout_s,
            cwd=repo_dir,
            env={**SHELL_ENV, **episode.needs.environ(repo_dir), "PATH": episode.path},
            max_output_bytes=_COMMAND_BYTES,
        )
        text = (result.stdout + result.stderr).decode("utf-8", "replace")
        if result.timed_out:
            text += f"\n(stopped after {self.config.command_timeout_s:g} s)"
        elif result.exit_code != 0:
            text += f"\n(exit code {result.exit_code})"
        return cut_output(text.strip("\n"), self.config.max_output_chars) or "(no output)"

    async def _edit(self, sandbox: Sandbox, edit: Edit) -> str:
        state = self._present
        path = str(Path(state.episode.workspace.repo_dir, edit.path))
        try:
            content = await sandbox.read_file(path)
        except FileNotFoundError:
            text = None
        else:
            if len(content) > _MAX_EDIT_BYTES:
                return f"{edit.path} is too large for the editor."
            try:
                text = content.decode()
            except UnicodeDecodeError:
                return f"{edit.path} is no text in UTF-8."
        edited = state.history.apply(edit, text)
        if edited.text != text:
            await self._write(sandbox, path, edited.text, was_there=text is not None)
        return cut_output(edited.message, self.config.max_output_chars)

    async def _write(
        self, sandbox: Sandbox, path: str, text: str | None, *, was_there: bool
    ) -> None:
        if text is None:
            await sandbox.exec(("rm", "-f", "--", path), timeout_s=10)
            return
        mode = 0o644
        if was_there:
            found = await sandbox.exec(("stat", "-L", "-c", "%a", "--", path), timeout_s=10)
            mode = int(found.stdout, 8) if found.exit_code == 0 else mode
        await sandbox.write_file(path, text.encode("utf-8", "surrogateescape"), mode=mode)

    async def _graded(self, sandbox: Sandbox) -> Report:
        state = self._present
        state.is_over = True
        return await self._tasks.graded(state.episode, sandbox, self._give_back)

    def _info(self, report: Report | None) -> dict[str, Any]:
        state = self._state
        return {
            "instance": state.episode.task.instance_id if state else "",
            "turns": state.num_turns if state else 0,
            "success": report is not None and report.grade.resolution == "full",
            "reward_components": components_of(report),
            "resolution": report.grade.resolution if report else "",
        }


class _State:
    """The state of an episode."""

    def __init__(self, episode: RepairEpisode) -> None:
        self.episode = episode
        self.history = History()
        self.num_turns = 0
        self.is_over = False
        self.expert = list(expert_commands(episode.task))
        """The remaining commands of the expert, without ``submit``."""

    def expert_done(self, command: str) -> None:
        """Record that a command was carried out, if it was the expert's next one."""
        if [command] == self.expert[:1]:
            del self.expert[0]


def _observation(calls: tuple[Call, ...], texts: list[str]) -> Observation:
    if not calls:
        return texts[0]
    return [
        Message(role="tool", content=text, tool_call_id=call.id, name=call.name)
        for call, text in zip(calls, texts, strict=True)
    ]


def _verdict(report: Report) -> str:
    return {
        "full": "The issue is mended.",
        "partial": "The issue is mended in part.",
        "none": "The issue is not mended.",
    }[report.grade.resolution]

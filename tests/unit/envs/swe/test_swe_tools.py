import pytest

from rollart_core.rollout.tools import Call
from rollart_envs.swe.editor import Edit, History, apply_edit
from rollart_envs.swe.tools import (
    ActionError,
    Bash,
    Submit,
    called_action,
    cut_output,
    function_specs,
    parse_action,
)

TEXT = "a\nb\nb\nc\n"


def test_view_numbers_lines_and_says_what_there_is():
    assert apply_edit(Edit("view", "f", first_line=2, last_line=3), TEXT).message == (
        "     2\tb\n     3\tb"
    )
    assert apply_edit(Edit("view", "f", first_line=4, last_line=99), TEXT).message == "     4\tc"
    beyond = apply_edit(Edit("view", "f", first_line=5), TEXT)
    assert (beyond.ok, "1 to 4" in beyond.message) == (False, True)
    assert "empty" in apply_edit(Edit("view", "f"), "").message


def test_str_replace_wants_its_text_exactly_once():
    assert apply_edit(Edit("str_replace", "f", old="a\nb", text="x"), TEXT).text == "x\nb\nc\n"
    twice = apply_edit(Edit("str_replace", "f", old="b", text="x"), TEXT)
    assert (twice.ok, twice.text, "lines 2, 3" in twice.message) == (False, TEXT, True)
    overlapping = apply_edit(Edit("str_replace", "f", old="aa", text="x"), "aaa")
    assert overlapping.ok is False
    never = apply_edit(Edit("str_replace", "f", old="  c", text="x"), TEXT)
    assert (never.ok, "line 4" in never.message) == (False, True)
    assert apply_edit(Edit("str_replace", "f", old="", text="x"), TEXT).ok is False


@pytest.mark.parametrize(
    ("text", "after", "new"),
    [
        (TEXT, 0, "x\ny\na\nb\nb\nc\n"),
        (TEXT, 4, "a\nb\nb\nc\nx\ny\n"),
        ("a", 1, "a\nx\ny"),
        ("", 0, "x\ny\n"),
        (TEXT, 5, None),
        (TEXT, None, None),
    ],
)
def test_insert(text, after, new):
    edited = apply_edit(Edit("insert", "f", text="x\ny\n", first_line=after), text)
    assert (edited.text, edited.ok) == ((text, False) if new is None else (new, True))


def test_edits_of_what_is_not_there_and_making_what_is():
    assert apply_edit(Edit("view", "f"), None).ok is False
    assert apply_edit(Edit("create", "f", text="x\n"), None).text == "x\n"
    there = apply_edit(Edit("create", "f", text="x\n"), TEXT)
    assert (there.ok, there.text) == (False, TEXT)


def test_undo_goes_back_edit_by_edit_file_by_file():
    history = History()
    text = None
    for edit in (
        Edit("create", "f", text="a\n"),
        Edit("str_replace", "f", old="a", text="b"),
        Edit("str_replace", "f", old="nothing", text="c"),
        Edit("view", "f"),
    ):
        text = history.apply(edit, text).text
    assert text == "b\n"
    assert history.apply(Edit("undo_edit", "g"), "g\n").ok is False
    text = history.apply(Edit("undo_edit", "f"), text).text
    assert text == "a\n"
    gone = history.apply(Edit("undo_edit", "f"), text)
    assert (gone.text, gone.ok) == (None, True)
    assert history.apply(Edit("undo_edit", "f"), None).ok is False


def test_actions():
    assert parse_action("I look.\n```bash\nls -la\ncat x\n```\n") == Bash("ls -la\ncat x")
    assert parse_action("```sh\nls\n```") == Bash("ls")
    assert parse_action("```bash\n submit \n```") == Submit()
    assert parse_action("```bash\necho submit\n```") == Bash("echo submit")
    assert parse_action("```python\nx\n```\nso\n```bash\nls\n```") == Bash("ls")
    assert parse_action("````bash\ncat <<E\n```bash\nE\n````") == Bash("cat <<E\n```bash\nE")


def test_edit_actions():
    def edit(body):
        return parse_action(f"```edit\n{body}\n```")

    assert edit("view a.py 3 9") == Edit("view", "a.py", first_line=3, last_line=9)
    assert edit("create a.py\nx = 1") == Edit("create", "a.py", text="x = 1\n")
    assert edit("insert a.py 0\n    x") == Edit("insert", "a.py", text="    x\n", first_line=0)
    assert edit("undo_edit a.py") == Edit("undo_edit", "a.py")
    block = "<<<<<<< old\n    a\n    b\n=======\n{}>>>>>>> new"
    assert edit("str_replace a.py\n" + block.format("    c\n")) == Edit(
        "str_replace", "a.py", old="    a\n    b", text="    c"
    )
    assert edit("str_replace a.py\n" + block.format("")).text == ""


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "no action"),
        ("ls", "no action"),
        ("```bash\nls", "no action"),
        ("```bash\nls\n```\n```bash\nls\n```", "2 actions"),
        ("```bash\n \n```", "empty"),
        ("```edit\nremove a.py\n```", "'remove' is no edit"),
        ("```edit\nview\n```", "first line"),
        ("```edit\nview a.py x\n```", "first line"),
        ("```edit\ninsert a.py\nx\n```", "first line"),
        ("```edit\n\nview a.py\n```", "is no edit"),
        ("```edit\nstr_replace a.py\na\nb\n```", "three marks"),
        ("```bash\necho a\0b\n```", r"held '\\x00'"),
        ("```edit\nview a\0.py\n```", r"held '\\x00'"),
        ("```bash\necho \ud800\n```", r"held '\\ud800'"),
        pytest.param(f"```edit\nview a.py {'1' * 5000}\n```", "first line", id="many digits"),
    ],
)
def test_what_is_no_action_is_refused_with_the_reason(answer, why):
    with pytest.raises(ActionError, match=why):
        parse_action(answer)


def test_calls_are_actions():
    assert called_action(Call("bash", {"command": "ls"})) == Bash("ls")
    assert called_action(Call("submit")) == Submit()
    replaced = Call("str_replace", {"path": "a.py", "old": "x", "new": "y"})
    assert called_action(replaced) == Edit("str_replace", "a.py", text="y", old="x")
    assert called_action(Call("view", {"path": "a.py"})) == Edit("view", "a.py")
    lines = Call("view", {"path": "a.py", "first_line": 2, "last_line": 3})
    assert called_action(lines) == Edit("view", "a.py", first_line=2, last_line=3)
    inserted = Call("insert", {"path": "a.py", "after_line": 0, "text": "x"})
    assert called_action(inserted) == Edit("insert", "a.py", text="x", first_line=0)


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("fly", {}, "no tool 'fly'; there are bash, view"),
        ("bash", {}, "bash takes command"),
        ("bash", {"command": 3}, "bash takes command"),
        ("bash", {"command": "ls", "cwd": "/"}, "bash takes command"),
        ("insert", {"path": "a.py", "text": "x"}, "insert takes path, after_line, text"),
        ("view", {"path": "a.py", "first_line": True}, "view takes path, first_line, last_line"),
        ("submit", {"now": "yes"}, "submit takes no arguments"),
        ("bash", {"command": "a\0b"}, "character"),
    ],
)
def test_what_is_no_call_is_refused_with_the_reason(name, arguments, why):
    with pytest.raises(ActionError, match=why):
        called_action(Call(name, arguments))


def test_the_schema_of_each_function_fits_what_it_takes():
    for spec in function_specs():
        function = spec["function"]
        properties = function["parameters"]["properties"]
        values = {"string": "x", "integer": 1}
        given = {name: values[said["type"]] for name, said in properties.items()}
        called_action(Call(function["name"], given))
        needed = {name: given[name] for name in function["parameters"]["required"]}
        called_action(Call(function["name"], needed))


def test_long_output_keeps_head_and_tail():
    assert cut_output("x" * 10, 10) == "x" * 10
    cut = cut_output("a" * 50 + "b" * 50, 11)
    assert cut.startswith("aaaaaa\n[... 89 characters")
    assert cut.endswith("...]\nbbbbb")

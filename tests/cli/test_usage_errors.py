"""A wrong argument, option or command name is one sentence with exit code 2, for every command."""

import pytest
from typer.main import get_command

from vitascope.cli.app import app


def list_commands(command=None, path=()):
    """Every command and group, with the words that call it."""
    command = get_command(app) if command is None else command
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from list_commands(inner, (*path, name))


COMMANDS = dict(list_commands())


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_an_unknown_option_of_any_command_is_one_sentence_that_names_the_options(vitascope, path) -> None:
    answer = vitascope(*path, "--no-such-option")
    assert answer.code == 2 and answer.out == "" and answer.err.count("\n") == 1
    assert answer.err.startswith(f"vitascope: {' '.join(path) or 'vitascope'} has no option --no-such-option. ")
    shown = [parameter for parameter in COMMANDS[path].params if not getattr(parameter, "hidden", False)]
    names = [name for parameter in shown for name in parameter.opts if name.startswith("--")]
    assert all(name in answer.err for name in names if not name.endswith("-completion"))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_the_usage_line_of_any_command_has_capital_names_without_braces(vitascope, path) -> None:
    usage = next(line for line in vitascope(*path, "--help").out.splitlines() if "Usage:" in line)
    arguments = usage.split("vitascope")[1].split()[len(path) :]
    assert all(word.replace(".py", "").isupper() for word in arguments) and not set("{}") & set(usage)


@pytest.mark.parametrize(
    "path",
    [path for path, command in COMMANDS.items() if any(parameter.required for parameter in command.params)],
    ids=" ".join,
)
def test_a_missing_argument_of_any_command_is_one_sentence_with_what_to_write(vitascope, path) -> None:
    answer = vitascope(*path)
    assert answer.code == 2 and answer.out == "" and answer.err.count("\n") == 1
    assert answer.err.startswith(f"vitascope: {' '.join(path)} needs the argument ")
    assert f" Write: vitascope {' '.join(path)} " in answer.err


@pytest.mark.parametrize(
    "path", [path for path, command in COMMANDS.items() if hasattr(command, "commands")], ids=" ".join
)
def test_an_unknown_command_is_one_sentence_and_no_command_prints_the_help(vitascope, path) -> None:
    answer = vitascope(*path, "xyzzy")
    assert answer.code == 2 and answer.out == "" and answer.err.count("\n") == 1
    assert answer.err.startswith(f"vitascope: There is no command '{' '.join((*path, 'xyzzy'))}'. Choose one of ")
    assert all(name in answer.err for name in COMMANDS[path].commands)
    helped = vitascope(*path)
    assert helped.code == 2 and "Usage:" in helped.out and helped.err.strip() == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "predict",
            "predict needs the argument RUN (a run, timm:NAME or a weights file). Write: vitascope predict RUN "
            "IMAGE…|FOLDER, for example: vitascope predict runs/digits photos/ --csv",
        ),
        ("record runs/digits", "record needs the option --name (name of the record, saved as NAME.json). Write: "),
        (
            "train digits --epochs 3",
            "train has no option --epochs. Its only option is --runs. Write settings as KEY=VALUE, for example: "
            "vitascope train digits train.epochs=20 model.depth=4",
        ),
        ("predict run image --view 2", "predict has no option --view. Did you mean --views?"),
        ("resume run --yes", "resume has no option --yes. Its only option is --force."),
        ("doctor --force", "doctor has no option --force. It has no options."),
        ("trian digits", "There is no command 'trian'. Did you mean train?"),
        ("runs lst", "There is no command 'runs lst'. Did you mean list?"),
        ("resume run other", "Got unexpected extra argument(s) (other). Write: vitascope resume RUN"),
        ("evaluate run --split", "Option '--split' requires an argument. For its values, see: vitascope evaluate "),
        ("predict run image --views two", "Invalid value for '--views': Input should be a valid integer"),
    ],
)
def test_the_sentence_says_what_was_asked_what_is_there_and_what_to_do(vitascope, words, sentence) -> None:
    answer = vitascope(*words.split())
    assert answer.code == 2 and answer.out == "" and answer.err.count("\n") == 1
    assert answer.err.startswith(f"vitascope: {sentence}"), answer.err


def test_help_and_exit_codes_of_commands_are_as_before(vitascope, tmp_path) -> None:
    assert vitascope("--help").code == vitascope("train", "-h").code == vitascope("--version").code == 0
    (tmp_path / "empty.py").write_text("")
    assert vitascope("check", str(tmp_path / "empty.py")).code == 2


def test_an_argument_that_is_not_utf8_is_refused(vitascope) -> None:
    answer = vitascope("predict", "runs/a\udcff", "b.png")
    assert answer.code == 2 and answer.err == (
        "vitascope: The argument 'runs/a\\udcff' is not UTF-8. Rename the file or folder, or correct the text.\n"
    )


def test_ctrl_c_before_a_command_has_started_gives_no_traceback(vitascope, monkeypatch) -> None:
    def interrupt(arguments: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitascope.cli._reject_renamed_options", interrupt)
    answer = vitascope("doctor")
    assert answer.code == 130 and answer.err == "vitascope: Interrupted.\n"


@pytest.mark.parametrize("command", [("train",), ("predict", "runs"), ("data", "describe")], ids=" ".join)
def test_a_path_that_no_file_system_takes_is_one_short_sentence(vitascope, command) -> None:
    answer = vitascope(*command, "ü" * 300)
    assert answer.code == 2 and answer.err.startswith("vitascope: ") and answer.err.count("\n") == 1
    assert len(answer.err) < 400
